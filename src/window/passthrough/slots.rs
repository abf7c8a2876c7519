//! The mapper's part of window passthrough. It maps whole files into slots of region 1 and revokes them, without
//! waiting while the guest lets go: [`Entry`] says what to do, and hears what was done.
//!
//! What is here waits for no file. The rest is in `fill`.

mod fill;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::allocator::RangeAllocator;
use super::core::Core;
use super::entry::{Entry, Held, Need, Place, Revocation, RevokeReason, Use, Want};
use super::table;
use crate::fuse::ops::Result;
use crate::limits::FILE_MAPPINGS;
use crate::window::frontend::{Closing, Mapping, ProxyFiles, Shared};
use crate::window::jobs::{EntryJob, SlotJob};
use crate::window::layout::{RANGE, TABLE, WHOLE_FILES};
use crate::window::turn::Slow;

/// How often to look for acknowledgements while one is missing: a host process or a file that needs a longer slot waits
/// for it. After [`STUCK`] they are what nobody waits for.
const SOON: Duration = Duration::from_millis(1);

/// How often to look at what nobody waits for.
const LATER: Duration = Duration::from_millis(if cfg!(fuzzing) { 0 } else { 100 });

/// How often files get the time of what the guest has stored in place, if no request needs it sooner: programs of the
/// host look at it too.
const TIMES: Duration = Duration::from_secs(5);

/// How long a slot must be unused, by two looks, before it gives way to a file that is opened.
const IDLE: Duration = Duration::from_secs(if cfg!(fuzzing) { 0 } else { 1 });

/// How long a slot stays at least. Without that, two processes whose files do not fit together could take the slot from
/// each other before either of them has touched it.
const STAY: Duration = Duration::from_millis(if cfg!(fuzzing) { 0 } else { 50 });

/// How long an open waits for a slot that another file is to leave. The guest looks every 100 ms, and takes
/// milliseconds to let go.
const OPENING: Duration = Duration::from_millis(if cfg!(fuzzing) { 0 } else { 1500 });

/// How long the slots that are to become free are waited for before others are taken away too: the guest may hold pages
/// of one for as long as it likes.
const STUCK: Duration = Duration::from_secs(1);

/// What [`Slots::reserve`] says if there is no room in the window now, and if there never is.
const FULL: Errno = Errno::NOBUFS;
const TOO_LONG: Errno = Errno::FBIG;

/// Which slots may give way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victims {
    /// Those that the guest has not used lately.
    Idle,
    /// The least used ones.
    Any,
}

/// What came of [`Slots::extend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extended {
    /// The slot covers the file now.
    Done,
    /// The file must move.
    NoRoom,
    /// The frontend has no time. The slot is as it was.
    NotNow,
}

pub struct Slots {
    core: Arc<Core>,
    shared: Arc<Shared>,
    files: Slow<dyn ProxyFiles>,
    room: RangeAllocator,
    has_table: bool,
    /// When the files last got their times.
    settled: Instant,
    /// A slot has become free.
    freed: bool,
    /// One that waits for room has found none since then. One is enough: each look takes system calls.
    full: bool,
    /// How many have waited for room.
    wants: u64,
    /// The entry after which the search for the least used slot goes on.
    hand: u32,
    /// The time of the last turn.
    now: Instant,
    closing: Closing,
}

impl Slots {
    pub fn new(core: Arc<Core>, shared: Arc<Shared>, files: Slow<dyn ProxyFiles>) -> Self {
        let (room, now) = (RangeAllocator::new(core.settings.slots_size()), Instant::now());
        let (has_table, freed, full, wants, hand, settled) = (false, false, false, 0, 0, now);
        let closing = Closing::default();
        Self { core, shared, files, room, has_table, settled, freed, full, wants, hand, now, closing }
    }

    /// How long the mapper may wait for a job before it must call [`look`](Self::look).
    pub fn patience(&self) -> Option<Duration> {
        let soon = |entry: &Entry| {
            let is_soon = |why: &Revocation| self.is_recent(why) || matches!(why.why, RevokeReason::Host(_));
            entry.want.is_some() || entry.revocation.as_ref().is_some_and(is_soon)
        };
        let entries = self.core.entries();
        // The guest may hold pages of a slot for as long as it likes.
        let waits = |(_, entry): (u32, &Entry)| entry.waits().then(|| if soon(entry) { SOON } else { LATER });
        entries.used().filter_map(waits).min().or_else(|| {
            let holds = entries.used().any(|(_, entry)| entry.held().is_some());
            (holds || self.core.times.is_behind()).then(|| TIMES.saturating_sub(self.settled.elapsed()))
        })
    }

    /// Does a job that waits for no file.
    pub fn serve(&mut self, job: SlotJob, now: Instant) {
        self.now = now;
        match job {
            SlotJob::Start { session, answer } => {
                let started = self.start(session);
                answer(started);
            }
            SlotJob::Leave => self.leave(),
            SlotJob::Resume(resume) => resume(),
            SlotJob::Table { session } => self.map_table(session),
            SlotJob::Entry(EntryJob::Drop, index) => self.drop_slot(index),
            SlotJob::Entry(EntryJob::Downgrade, index) => self.revoke(index, RevokeReason::Downgrade),
            // Others are the workers'.
            SlotJob::Open { .. } | SlotJob::Ask { .. } | SlotJob::Entry(..) => {}
        }
    }

    /// Gives the guest the table.
    fn start(&mut self, session: u64) -> Result<()> {
        self.reset();
        self.core.entries().table.clear();
        let seen = self.shared.map(&self.table()).inspect_err(|errno| {
            tracing::warn!("no window passthrough: the frontend does not map its table: {errno}");
        })?;
        self.has_table = true;
        if !seen {
            return Err(Errno::TIMEDOUT);
        }
        self.core.started(session);
        Ok(())
    }

    /// Gives the guest of another daemon's session the table. Until then the guest finds zeros there, and sends
    /// messages.
    fn map_table(&mut self, session: u64) {
        if self.core.entries().session != session {
            return;
        }
        match self.shared.map(&self.table()) {
            Ok(_) => self.has_table = true,
            Err(errno) => {
                tracing::error!("no window passthrough: the frontend does not map the table of a moved guest: {errno}");
                self.core.end();
            }
        }
    }

    /// The guest is about to move to another daemon: has it let go of all slots.
    fn leave(&mut self) {
        if !self.core.is_leaving() {
            return;
        }
        while self.evict() {}
        let all: Vec<u32> = self.core.entries().used().map(|(index, _)| index).collect();
        all.into_iter().for_each(|index| self.revoke(index, RevokeReason::Room));
    }

    fn table(&self) -> Mapping<'_> {
        Mapping::whole(TABLE, 0, table::LEN, self.core.table.as_fd())
    }

    pub fn reset(&mut self) {
        let all: Vec<_> = self.core.entries().used().map(|(index, entry)| (index, entry.life())).collect();
        for (index, life) in all {
            // An open may have come after the end of its session.
            self.core.decide(index, life, false);
            self.drop_slot(index);
        }
        if std::mem::take(&mut self.has_table) {
            self.shared.unmap(&self.table());
        }
    }

    /// Answers a node's first open.
    fn decide(&mut self, index: u32, life: u64, start: Instant, mapped: Result<()>) {
        let node = |entry: &Entry| (entry.life() == life).then(|| entry.node());
        let Some(node) = self.core.get(index, node).flatten() else { return };
        tracing::debug!(node, us = start.elapsed().as_micros(), ?mapped, "passthrough");
        if !self.core.decide(index, life, mapped.is_ok()) {
            self.drop_slot(index);
        }
    }

    /// Has the frontend map a part of a file, and waits until the guest has it.
    ///
    /// # Errors
    /// ETIMEDOUT if that takes too long; why the frontend refuses. It is not mapped then.
    fn map(&self, mapping: &Mapping) -> Result<()> {
        match self.shared.map(mapping)? {
            true => Ok(()),
            false => {
                self.shared.unmap(mapping);
                Err(Errno::TIMEDOUT)
            }
        }
    }

    /// Reserves a slot (offset and length), of the greatest of [`lens`] that there is room for.
    ///
    /// # Errors
    /// [`FULL`]; [`TOO_LONG`] if the file does not fit into the whole window.
    fn reserve(&mut self, size: u64) -> Result<(u64, u64)> {
        if shortest(size) > self.core.settings.slots_size() {
            return Err(TOO_LONG);
        }
        let lens = lens(size);
        loop {
            let full = self.mappings() >= self.core.settings.slots;
            let kept = self.kept();
            let mut fits = lens.into_iter().flatten().filter(|_| !full);
            match fits.find_map(|len| Some((self.room.take(len, &kept)?, len))) {
                Some(place) => return Ok(place),
                None if self.evict() => {}
                None => return Err(FULL),
            }
        }
    }

    /// Takes the slot of the file that was closed first, if nobody has it open.
    fn evict(&mut self) -> bool {
        let evicted = self.core.entries().evict();
        evicted.into_iter().for_each(|index| self.drop_slot(index));
        evicted.is_some()
    }

    /// Where the slots of files that nobody has open are.
    fn kept(&self) -> Vec<u64> {
        let entries = self.core.entries();
        let kept = entries.used().filter(|(_, entry)| matches!(entry.uses, Use::Kept { .. }));
        kept.filter_map(|(_, entry)| Some(entry.held()?.at)).collect()
    }

    /// Revokes slots of open files so that the file of `index` has room, in addition to its present slot. Whether room
    /// will come.
    fn make_room(&mut self, index: u32, whom: Victims) -> bool {
        if self.room_comes() {
            return true;
        }
        let needs = |entry: &Entry| {
            let len = shortest(entry.size.max(entry.record().size));
            (len, entry.held().map(|held| held.at))
        };
        let Some((len, own)) = self.core.get(index, needs) else { return false };
        let mut leave: Vec<u32> = Vec::new();
        let mut enough = false;
        for candidate in self.candidates(index, whom) {
            leave.push(candidate);
            enough = self.has_room_without(len, own, &leave);
            if enough {
                break;
            }
        }
        if !enough {
            return false;
        }
        // The last one is needed. Others may have been in vain, since they lie elsewhere.
        for candidate in leave.clone() {
            let fewer: Vec<u32> = leave.iter().copied().filter(|leaves| *leaves != candidate).collect();
            if self.has_room_without(len, own, &fewer) {
                leave = fewer;
            }
        }
        for leaves in leave {
            self.hand = leaves;
            self.revoke(leaves, RevokeReason::Room);
        }
        true
    }

    /// Whether slots are about to become free.
    fn room_comes(&self) -> bool {
        let comes = |revocation: Revocation| revocation.why == RevokeReason::Room && self.is_recent(&revocation);
        self.core.entries().used().any(|(_, entry)| entry.revocation.is_some_and(comes))
    }

    fn is_recent(&self, revocation: &Revocation) -> bool {
        self.now.saturating_duration_since(revocation.since) < STUCK
    }

    fn has_room_without(&self, len: u64, own: Option<u64>, leave: &[u32]) -> bool {
        let entries = self.core.entries();
        let held = entries.used().filter_map(|(index, entry)| Some((index, entry.held()?)));
        let leaves = held.filter(|(index, held)| leave.contains(index) || own == Some(held.at));
        let (free, mappings): (Vec<u64>, Vec<usize>) = leaves.map(|(_, held)| (held.at, held.pieces.len())).unzip();
        drop(entries);
        let mappings: usize = mappings.iter().sum();
        self.mappings() < self.core.settings.slots + mappings && self.room.would_fit(len, &free)
    }

    /// The slots that may give way for `index`, the best first.
    fn candidates(&mut self, index: u32, whom: Victims) -> Vec<u32> {
        let mut entries = self.core.entries();
        entries.look_for_use(self.now);
        let (now, hand) = (self.now, self.hand);
        let long = |since: Instant, least| now.saturating_duration_since(since) >= least;
        let key = |(at, entry): (u32, &Entry)| {
            let held = entry.held().filter(|held| at != index && long(held.since, STAY) && entry.state().is_live())?;
            let idle = held.idle.is_some_and(|since| long(since, IDLE));
            // First those that were not used since the last look, in turn: so each gets a second chance.
            (idle || whom == Victims::Any).then_some((held.idle.is_none(), at <= hand, at))
        };
        let mut all: Vec<_> = entries.used().filter_map(key).collect();
        all.sort_unstable();
        all.into_iter().map(|(.., at)| at).collect()
    }

    /// Has an entry wait for room.
    fn want(&mut self, index: u32, need: Need) {
        self.wants += 1;
        let want = Want { need, since: self.now, turn: self.wants };
        self.core.update(index, |entry| entry.want = Some(want));
    }

    /// Live mappings.
    fn mappings(&self) -> usize {
        self.core.entries().used().map(|(_, entry)| entry.mappings()).sum()
    }

    /// Ends what belongs to an entry without opens.
    fn drop_slot(&mut self, index: u32) {
        self.unmap(index);
        let held = self.core.update(index, Entry::take).flatten();
        held.into_iter().for_each(|held| self.put_away(held));
        self.end_overdue(index);
        let entry = self.core.entries().remove(index);
        drop(entry);
    }

    /// Has a file closed that is in no slot. A host process that waits for that then goes on.
    fn spent(&mut self, held: Held) {
        self.closing.files.extend([Slow::new(held.proxy), held.real]);
    }

    /// A file is unmapped: its slot is free, and it is closed.
    fn put_away(&mut self, held: Held) {
        self.free(held.at);
        self.spent(held);
    }

    fn free(&mut self, at: u64) {
        self.room.free(at);
        self.freed = true;
    }

    /// Takes the file of an entry out of the guest's memory. The entry still has it.
    fn unmap(&self, index: u32) {
        let Some(held) = self.held(index) else { return };
        self.shared.unmap_all(&held.mappings());
        self.core.note_stores(index);
        self.core.times.set_soon();
    }

    /// Gives files the time of what the guest has stored in place, now and then.
    fn settle_times(&mut self, now: Instant) {
        if now.saturating_duration_since(self.settled) < TIMES {
            return;
        }
        self.settled = now;
        let mut entries = self.core.entries();
        // A file that is opened later then need not wait for a second look.
        entries.look_for_use(now);
        entries.used().for_each(|(index, _)| entries.note_stores(index, &self.core.times));
        drop(entries);
        self.core.times.set_soon();
    }

    fn end_overdue(&mut self, index: u32) {
        let take = |entry: &mut Entry| Some((entry.node(), entry.take_overdue()?));
        let Some((node, overdue)) = self.core.update(index, take).flatten() else { return };
        if let Some(file) = overdue.file {
            self.shared.unmap(&Mapping::whole(WHOLE_FILES, overdue.at, overdue.len, file.fd.as_fd()));
            self.closing.copies.push((node, file));
        }
        self.free(overdue.at);
    }

    /// The file in the slot of an entry.
    fn held(&self, index: u32) -> Option<Held> {
        self.core.get(index, |entry| entry.held().cloned())?
    }

    /// A host process is about to truncate a proxy file's real file, and has waited since then.
    pub fn revoke_for_host(&mut self, id: u64, since: Instant) {
        let mut entries = self.core.entries();
        let has = |entry: &Entry| entry.is_opening(id) || entry.held().is_some_and(|held| held.id == id);
        let Some(index) = entries.used().find_map(|(index, entry)| has(entry).then_some(index)) else { return };
        if entries.update(index, |entry| entry.stop_opening(Instant::now() + LATER)) == Some(true) {
            return;
        }
        let is_kept = entries.give_up(index);
        let node = entries.update(index, |entry| {
            entry.revocation = None;
            entry.node()
        });
        drop(entries);
        if is_kept {
            return self.drop_slot(index);
        }
        tracing::debug!(node, "a truncation on the host revokes a slot");
        self.revoke(index, RevokeReason::Host(since + self.core.settings.patience));
    }

    /// Revokes an entry if it is live. If the guest has let go of the slot already, the file is out of it afterwards.
    fn revoke(&mut self, index: u32, why: RevokeReason) {
        let (now, not_before) = (self.now, Instant::now() + LATER);
        let mut entries = self.core.entries();
        // As long as the entry has its file.
        entries.note_stores(index, &self.core.times);
        let acknowledged = entries.table.acknowledged(index);
        let taken = entries.update(index, |entry| entry.revoke(why, acknowledged, now, not_before));
        drop(entries);
        if let Some(held) = taken.flatten() {
            self.shared.unmap_all(&held.mappings());
            self.core.times.set_soon();
            self.put_away(held);
        }
    }

    /// The guest no longer uses the slot: takes the file out, and makes the entry Revoked.
    fn revoked(&mut self, index: u32) {
        self.unmap(index);
        let held = self.core.update(index, |entry| entry.lose(Instant::now() + LATER)).flatten();
        held.into_iter().for_each(|held| self.put_away(held));
    }

    /// Makes room for a file that has outgrown its slot: behind the slot if that is possible, or else by a revocation,
    /// after which the file moves. `whom`: who gives way then.
    fn lengthen(&mut self, index: u32, whom: Victims) {
        let outgrown = |entry: &Entry| {
            let (held, size) = (entry.held()?, entry.record().size);
            (size > held.len() && entry.state().is_live()).then_some((held.at, size))
        };
        let Some((at, size)) = self.core.get(index, outgrown).flatten() else { return };
        if shortest(size) > self.core.settings.slots_size() || self.extend(index, size) != Extended::NoRoom {
            return;
        }
        while !self.room.would_fit(shortest(size), &[at]) {
            if !self.evict() {
                // The next one who asks finds the room.
                self.make_room(index, whom);
                return;
            }
        }
        self.revoke(index, RevokeReason::Longer);
    }

    /// Maps more of a file right behind its slot, for `size` bytes of the file. The guest need not let go of anything.
    fn extend(&mut self, index: u32, size: u64) -> Extended {
        let Some(len) = self.room_behind(index, size) else { return Extended::NoRoom };
        let Some(held) = self.held(index) else { return Extended::NoRoom };
        let before = held.len();
        // First the mapping, then the entry: the guest uses what the entry says.
        if let Err(errno) = self.map(&held.mapping(before, len - before)) {
            tracing::debug!(index, "no more of a file is mapped: {errno}");
            self.room.resize(held.at, before);
            return if errno == Errno::TIMEDOUT { Extended::NotNow } else { Extended::NoRoom };
        }
        self.core.update(index, |entry| entry.lengthen(len - before));
        tracing::debug!(index, len, "a slot has grown");
        Extended::Done
    }

    /// Takes the room behind a slot, for `size` bytes of its file, and a mapping. Kept slots give way. Returns how long
    /// the slot is then.
    fn room_behind(&mut self, index: u32, size: u64) -> Option<u64> {
        let Held { at, pieces, .. } = self.held(index)?;
        if pieces.len() >= FILE_MAPPINGS {
            return None;
        }
        let kept = self.kept();
        let all_kept = |slots: &Vec<u64>| slots.iter().all(|at| kept.contains(at));
        let fits = |len: &u64| self.room.behind(at, *len).filter(all_kept);
        let (len, in_the_way) = lens(size).into_iter().flatten().find_map(|len| Some((len, fits(&len)?)))?;
        for other in in_the_way {
            let mut entries = self.core.entries();
            let is_it = |(_, entry): &(u32, &Entry)| entry.held().is_some_and(|held| held.at == other);
            let (kept, _) = entries.used().find(is_it)?;
            // It may have been opened meanwhile.
            if !entries.give_up(kept) {
                return None;
            }
            drop(entries);
            self.drop_slot(kept);
        }
        while self.mappings() >= self.core.settings.slots {
            self.evict().then_some(())?;
        }
        self.room.resize(at, len).then_some(len)
    }

    /// Looks for acknowledgements, and does what is due, or has workers do it.
    pub fn look(&mut self, now: Instant) {
        self.now = now;
        self.settle_times(self.now);
        let entries = self.core.entries();
        let waiting: Vec<u32> = entries.used().filter(|(_, entry)| entry.waits()).map(|(index, _)| index).collect();
        drop(entries);
        for index in &waiting {
            self.look_for_acknowledgement(*index);
        }
        self.look_for_room(&waiting);
        for index in waiting {
            self.look_later(index);
        }
        self.core.jobs.close(&mut self.closing);
    }

    fn look_for_acknowledgement(&mut self, index: u32) {
        let mut entries = self.core.entries();
        let acknowledged = entries.table.acknowledged(index);
        let ended = entries.update(index, |entry| entry.end_revocation(acknowledged));
        drop(entries);
        let Some((Revocation { why, since, .. }, acknowledged)) = ended.flatten() else { return };
        tracing::debug!(index, ?why, acknowledged, us = since.elapsed().as_micros(), "a revocation is over");
        self.finish(index, why, acknowledged);
    }

    /// Has files mapped that wait for room, if there may be some.
    fn look_for_room(&mut self, waiting: &[u32]) {
        let want =
            |index: &u32| self.core.get(*index, |entry| entry.want.map(|want| (want.turn, *index, want.since)))?;
        let mut wants: Vec<_> = waiting.iter().filter_map(want).collect();
        if std::mem::take(&mut self.freed) || wants.iter().any(|(.., since)| self.is_late(*since)) {
            self.full = false;
            wants.sort_unstable();
            wants.into_iter().for_each(|(_, index, _)| self.core.send(EntryJob::Serve, index));
        }
    }

    /// Whether an open has waited long enough.
    fn is_late(&self, since: Instant) -> bool {
        self.now.saturating_duration_since(since) >= OPENING
    }

    fn finish(&mut self, index: u32, why: RevokeReason, acknowledged: bool) {
        match why {
            RevokeReason::Host(_) if acknowledged => self.revoked(index),
            RevokeReason::Host(_) => self.replace(index),
            RevokeReason::Room => {
                self.revoked(index);
                self.core.update(index, |entry| entry.not_before = None);
            }
            RevokeReason::Downgrade => self.core.send(EntryJob::Live, index),
            RevokeReason::Longer => self.core.send(EntryJob::Move, index),
        }
    }

    /// Takes a file out of its slot because the guest did not let go of it in time. A Cached proxy file is to take its
    /// place.
    fn replace(&mut self, index: u32) {
        self.unmap(index);
        let force = |entry: &mut Entry| Some((entry.node(), entry.force(Instant::now() + LATER)?));
        let Some((node, held)) = self.core.update(index, force).flatten() else { return };
        tracing::warn!(node, "the guest did not let go of a file in time: what it still stores in place may be lost");
        self.spent(held);
        self.core.send(EntryJob::Replace, index);
    }

    /// Ends the Cached proxy file that the guest has let go of, has the file mapped again whose truncation is over, and
    /// answers the open whose file keeps a worker waiting: it is by messages.
    fn look_later(&mut self, index: u32) {
        let acknowledged = self.core.entries().table.acknowledged(index);
        let is_over = |entry: &Entry| matches!(&entry.place, Place::Overdue(late) if late.generation == acknowledged);
        if self.core.get(index, is_over) == Some(true) {
            self.end_overdue(index);
        }
        if self.core.get(index, Entry::is_due) == Some(true) {
            self.core.send(EntryJob::Again, index);
        }
        let late = |entry: &Entry| match entry.uses {
            Use::Deciding { since: Some(since), .. } if self.is_late(since) => Some(entry.life()),
            _ => None,
        };
        if let Some(life) = self.core.get(index, late).flatten() {
            self.decide(index, life, Instant::now(), Err(Errno::TIMEDOUT));
        }
    }
}

/// Lengths of a slot for a file of `size` bytes, the best first: with room to grow by as much again, by an eighth, by
/// nothing.
fn lens(size: u64) -> [Option<u64>; 3] {
    [size, size / 8, 0].map(|more| size.checked_add(more)?.max(1).checked_next_multiple_of(RANGE))
}

/// The least of them.
fn shortest(size: u64) -> u64 {
    size.max(1).checked_next_multiple_of(RANGE).unwrap_or(u64::MAX)
}
