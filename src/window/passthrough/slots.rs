//! The mapper's part of window passthrough. It maps whole files into slots of region 1 and revokes them, without
//! waiting while the guest lets go.
//!
//! What is here waits for no file. The rest is in `fill`.

mod fill;

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::Passthrough;
use super::allocator::RangeAllocator;
use super::table::{self, Change, EntryState};
use crate::fuse::ops::Result;
use crate::limits::FILE_MAPPINGS;
use crate::window::frontend::{CachedFile, Closing, Mapping, ProxyFiles, Shared, Source};
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

/// Who needs a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// A node's first open. It has passthrough only if the guest may store to the file.
    Open,
    /// A process of the guest, whose page fault waits for it.
    Fault,
    /// Nobody waits.
    Later,
}

/// Which slots may give way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victims {
    /// Those that the guest has not used lately.
    Idle,
    /// The least used ones.
    Any,
}

/// An entry that waits until other slots are free.
#[derive(Clone, Copy)]
struct Wanting {
    index: u32,
    need: Need,
    since: Instant,
}

/// A file in a slot.
struct Held {
    at: u64,
    /// How long its mappings are. Each begins where the one before ends.
    pieces: Vec<u64>,
    /// The proxy file's number.
    id: u64,
    /// Since when it is there.
    since: Instant,
    real: Arc<OwnedFd>,
    /// The proxy file, open as long as it is mapped: a host process that truncates the real file waits for its end.
    proxy: Arc<OwnedFd>,
}

impl Held {
    /// Bytes of the slot.
    fn len(&self) -> u64 {
        self.pieces.iter().sum()
    }

    /// `len` bytes of the file from `from` on, which are as far from the beginning of the slot.
    fn mapping(&self, from: u64, len: u64) -> Mapping<'_> {
        Mapping { from, ..Mapping::whole(WHOLE_FILES, self.at + from, len, self.proxy.as_fd()) }
    }

    fn mappings(&self) -> impl Iterator<Item = Mapping<'_>> {
        let mut from = 0;
        self.pieces.iter().map(move |&len| {
            let mapping = self.mapping(from, len);
            from += len;
            mapping
        })
    }
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

/// What is in a slot because the guest did not let go of it in time.
struct Overdue {
    at: u64,
    len: u64,
    /// The generation that the guest has.
    generation: u32,
    /// The Cached proxy file. None if it is not there yet, or could not be mapped.
    file: Option<CachedFile>,
}

/// A worker is about to map a file.
#[derive(Clone, Copy)]
struct Opening {
    /// The proxy file's number.
    id: u64,
    need: Need,
    since: Instant,
    /// It has room for a slot, and a mapping.
    reserved: bool,
}

/// What belongs to an entry.
struct Slot {
    session: u64,
    node: u64,
    source: Slow<dyn Source>,
    /// None if it is not, or must not be any more: a host process has taken the file back meanwhile, or an open has
    /// waited long enough.
    opening: Option<Opening>,
    held: Option<Held>,
    late: Option<Overdue>,
    /// Bytes of the file when a worker last looked.
    size: u64,
    /// When to map the file again. It is not sooner, so that a host process that waits sees the end of the mapping.
    not_before: Option<Instant>,
    /// The guest has not used the slot since then, as far as the daemon has looked.
    idle: Option<Instant>,
}

impl Slot {
    fn new(session: u64, node: u64, source: Arc<dyn Source>) -> Self {
        let (opening, held, late, size, not_before, idle) = (None, None, None, 0, None, None);
        Self { session, node, source: Slow::new(source), opening, held, late, size, not_before, idle }
    }

    /// Whether its file is to be mapped again now.
    fn is_due(&self) -> bool {
        let empty = self.held.is_none() && self.late.is_none();
        empty && self.not_before.is_some_and(|at| at <= Instant::now())
    }
}

/// Why an entry is revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RevokeReason {
    /// A host process is about to truncate the file, and waits.
    Host(Instant),
    /// The file gets a longer slot.
    Longer,
    /// Another file gets the slot.
    Room,
    /// The guest must not store to it any more. The slot stays.
    Downgrade,
}

/// A revocation that the guest has not acknowledged.
struct Pending {
    index: u32,
    generation: u32,
    why: RevokeReason,
    since: Instant,
}

pub struct Slots {
    pass: Arc<Passthrough>,
    shared: Arc<Shared>,
    files: Slow<dyn ProxyFiles>,
    room: RangeAllocator,
    /// By index in the table.
    known: HashMap<u32, Slot>,
    pending: Vec<Pending>,
    has_table: bool,
    /// When the files last got their times.
    settled: Instant,
    /// In the order in which they came.
    wanting: Vec<Wanting>,
    /// A slot has become free.
    freed: bool,
    /// One that waits for room has found none since then. One is enough: each look takes system calls.
    full: bool,
    /// The entry after which the search for the least used slot goes on.
    hand: u32,
    /// The time of the last turn.
    now: Instant,
    closing: Closing,
}

impl Slots {
    pub fn new(pass: Arc<Passthrough>, shared: Arc<Shared>, files: Slow<dyn ProxyFiles>) -> Self {
        let room = RangeAllocator::new(pass.size());
        let (known, pending, wanting, now) = (HashMap::new(), Vec::new(), Vec::new(), Instant::now());
        let (has_table, freed, full, hand, settled) = (false, false, false, 0, now);
        let closing = Closing::default();
        Self { pass, shared, files, room, known, pending, has_table, settled, wanting, freed, full, hand, now, closing }
    }

    /// How long the mapper may wait for a job before it must call [`look`](Self::look).
    pub fn patience(&self) -> Option<Duration> {
        let waits = self.known.values().any(|slot| slot.late.is_some() || slot.not_before.is_some());
        let holds = self.known.values().any(|slot| slot.held.is_some());
        let opens = self.known.values().any(|slot| slot.opening.is_some_and(|opening| opening.need == Need::Open));
        let soon = |pending: &Pending| self.is_recent(pending) || matches!(pending.why, RevokeReason::Host(_));
        match self.pending.iter().any(soon) || !self.wanting.is_empty() {
            true => Some(SOON),
            // The guest may hold pages of a slot for as long as it likes.
            false if waits || opens || !self.pending.is_empty() => Some(LATER),
            false => (holds || self.pass.times.is_behind()).then(|| TIMES.saturating_sub(self.settled.elapsed())),
        }
    }

    /// Does a job that waits for no file.
    pub fn serve(&mut self, job: SlotJob, now: Instant) {
        self.now = now;
        match job {
            SlotJob::Start { session, answer } => {
                let started = self.start(session);
                answer(started);
            }
            SlotJob::Entry(EntryJob::Drop, index) => self.drop_slot(index),
            SlotJob::Entry(EntryJob::Downgrade, index) => self.pend(index, RevokeReason::Downgrade),
            // Others are the workers'.
            SlotJob::Open { .. } | SlotJob::Ask { .. } | SlotJob::Entry(..) => {}
        }
    }

    /// Gives the guest the table.
    fn start(&mut self, session: u64) -> Result<()> {
        self.reset();
        // A file that was mapped while the last session ended may have left its entry.
        self.pass.table.clear();
        let file = self.pass.table.file().ok_or(Errno::IO)?;
        let seen = self.shared.map(&Mapping::whole(TABLE, 0, table::LEN, file)).inspect_err(|errno| {
            tracing::warn!("no window passthrough: the frontend does not map its table: {errno}");
        })?;
        self.has_table = true;
        if !seen {
            return Err(Errno::TIMEDOUT);
        }
        self.pass.started(session);
        Ok(())
    }

    pub fn reset(&mut self) {
        let all: Vec<u32> = self.known.keys().copied().collect();
        all.into_iter().for_each(|index| self.drop_slot(index));
        if std::mem::take(&mut self.has_table) {
            if let Some(file) = self.pass.table.file() {
                self.shared.unmap(&Mapping::whole(TABLE, 0, table::LEN, file));
            }
        }
    }

    /// Answers a node's first open.
    fn decide(&mut self, index: u32, start: Instant, mapped: Result<()>) {
        let Some((session, node)) = self.known.get(&index).map(|slot| (slot.session, slot.node)) else { return };
        tracing::debug!(node, us = start.elapsed().as_micros(), ?mapped, "passthrough");
        if !self.pass.decide(session, node, index, mapped.is_ok()) {
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
        if shortest(size) > self.pass.size() {
            return Err(TOO_LONG);
        }
        let lens = lens(size);
        loop {
            let full = self.mappings() >= self.pass.settings.slots;
            let kept = self.kept();
            let mut fits = lens.into_iter().flatten().filter(|_| !full);
            match fits.find_map(|len| Some((self.room.take(len, &kept)?, len))) {
                Some(place) => return Ok(place),
                None => {
                    let evicted = self.pass.nodes.lock().evict().ok_or(FULL)?;
                    self.drop_slot(evicted);
                }
            }
        }
    }

    /// Where the slots of files that nobody has open are.
    fn kept(&self) -> Vec<u64> {
        let nodes = self.pass.nodes.lock();
        let kept = self.known.iter().filter(|(index, slot)| nodes.is_kept(slot.node, **index));
        kept.filter_map(|(_, slot)| slot.held.as_ref()).map(|held| held.at).collect()
    }

    /// Revokes slots of open files so that the file of `index` has room, in addition to its present slot. Whether room
    /// will come.
    fn make_room(&mut self, index: u32, whom: Victims) -> bool {
        if self.room_comes() {
            return true;
        }
        let Some(slot) = self.known.get(&index) else { return false };
        let len = shortest(slot.size.max(self.pass.table.entry(index).size));
        let own = slot.held.as_ref().map(|held| held.at);
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
            self.pend(leaves, RevokeReason::Room);
        }
        true
    }

    /// Whether slots are about to become free.
    fn room_comes(&self) -> bool {
        self.pending.iter().any(|pending| pending.why == RevokeReason::Room && self.is_recent(pending))
    }

    fn is_recent(&self, pending: &Pending) -> bool {
        self.now.saturating_duration_since(pending.since) < STUCK
    }

    fn has_room_without(&self, len: u64, own: Option<u64>, leave: &[u32]) -> bool {
        let held = self.known.iter().filter_map(|(index, slot)| Some((index, slot.held.as_ref()?)));
        let leaves = held.filter(|(index, held)| leave.contains(index) || own == Some(held.at));
        let (free, mappings): (Vec<u64>, Vec<usize>) = leaves.map(|(_, held)| (held.at, held.pieces.len())).unzip();
        let mappings: usize = mappings.iter().sum();
        self.mappings() < self.pass.settings.slots + mappings && self.room.would_fit(len, &free)
    }

    /// The slots that may give way for `index`, the best first.
    fn candidates(&mut self, index: u32, whom: Victims) -> Vec<u32> {
        self.look_for_use();
        let (now, hand) = (self.now, self.hand);
        let long = |since: Instant, least| now.saturating_duration_since(since) >= least;
        let may = |(at, slot): &(&u32, &Slot)| {
            let stayed = slot.held.as_ref().is_some_and(|held| long(held.since, STAY));
            let idle = slot.idle.is_some_and(|since| long(since, IDLE));
            **at != index && stayed && (idle || whom == Victims::Any) && self.pass.table.entry(**at).state.is_live()
        };
        // First those that were not used since the last look, in turn: so each gets a second chance.
        let key = |(at, slot): (&u32, &Slot)| (slot.idle.is_none(), *at <= hand, *at);
        let mut all: Vec<_> = self.known.iter().filter(may).map(key).collect();
        all.sort_unstable();
        all.into_iter().map(|(.., at)| at).collect()
    }

    /// Notes which slots the guest has used since the last look.
    fn look_for_use(&mut self) {
        for (index, slot) in self.known.iter_mut().filter(|(_, slot)| slot.held.is_some()) {
            slot.idle = if self.pass.table.used(*index) { None } else { slot.idle.or(Some(self.now)) };
        }
    }

    fn is_wanting(&self, index: u32) -> bool {
        self.wanting.iter().any(|wanting| wanting.index == index)
    }

    /// Whether a file must not be mapped yet.
    fn is_kept_away(&self, index: u32) -> bool {
        self.known.get(&index).and_then(|slot| slot.not_before).is_some_and(|at| at > Instant::now())
    }

    /// Live mappings.
    fn mappings(&self) -> usize {
        let of = |slot: &Slot| {
            let reserved = slot.opening.is_some_and(|opening| opening.reserved);
            let held = slot.held.as_ref().map_or(0, |held| held.pieces.len());
            held + usize::from(slot.late.is_some()) + usize::from(reserved)
        };
        self.known.values().map(of).sum()
    }

    /// Ends what belongs to an entry without opens.
    fn drop_slot(&mut self, index: u32) {
        self.give_up(index);
        self.wanting.retain(|wanting| wanting.index != index);
        self.empty(index).into_iter().for_each(|held| self.spent(held));
        self.end_late(index);
        let Some(slot) = self.known.remove(&index) else { return };
        let mut nodes = self.pass.nodes.lock();
        if slot.session == nodes.session {
            self.pass.table.update(index, |line| {
                (line.slot, line.file) = (None, None);
                let _ = line.step(Change::Release);
            });
        }
        nodes.free(slot.session, index);
    }

    /// Stops waiting for an acknowledgement.
    fn give_up(&mut self, index: u32) {
        self.pending.retain(|pending| pending.index != index);
    }

    /// Has a file closed that is in no slot. A host process that waits for that then goes on.
    fn spent(&mut self, held: Held) {
        self.closing.files.extend([held.proxy, held.real]);
    }

    /// What a worker is about to map, if it still may.
    fn opening(&mut self, index: u32, id: u64) -> Option<&mut Option<Opening>> {
        let slot = self.known.get_mut(&index)?;
        slot.opening.is_some_and(|opening| opening.id == id).then_some(&mut slot.opening)
    }

    /// Takes the file out of its slot.
    fn empty(&mut self, index: u32) -> Option<Held> {
        let slot = self.known.get_mut(&index)?;
        let (node, held) = (slot.node, slot.held.take()?);
        self.unmap(index, node, &held);
        self.free(held.at);
        Some(held)
    }

    fn free(&mut self, at: u64) {
        self.room.free(at);
        self.freed = true;
    }

    /// Takes the file out of the guest's memory. Its entry must still have it.
    fn unmap(&self, index: u32, node: u64, held: &Held) {
        self.shared.unmap_all(&held.mappings().collect::<Vec<_>>());
        self.pass.note_stores(index, node);
        self.pass.times.set_soon();
    }

    /// Gives files the time of what the guest has stored in place, now and then.
    fn settle_times(&mut self, now: Instant) {
        if now.saturating_duration_since(self.settled) < TIMES {
            return;
        }
        self.settled = now;
        // A file that is opened later then need not wait for a second look.
        self.look_for_use();
        for (index, slot) in self.known.iter().filter(|(_, slot)| slot.held.is_some()) {
            self.pass.note_stores(*index, slot.node);
        }
        self.pass.times.set_soon();
    }

    fn end_late(&mut self, index: u32) {
        let Some(slot) = self.known.get_mut(&index) else { return };
        let Some(late) = slot.late.take() else { return };
        let node = slot.node;
        if let Some(file) = late.file {
            self.shared.unmap(&Mapping::whole(WHOLE_FILES, late.at, late.len, file.fd.as_fd()));
            self.closing.copies.push((node, file));
        }
        self.free(late.at);
    }

    /// The slot that has this proxy file.
    fn with_proxy_file(&self, id: u64) -> Option<(u32, &Slot, &Held)> {
        self.known
            .iter()
            .find_map(|(&index, slot)| Some((index, slot, slot.held.as_ref().filter(|held| held.id == id)?)))
    }

    /// A host process is about to truncate a proxy file's real file, and has waited since then.
    pub fn revoke(&mut self, id: u64, since: Instant) {
        let is_opening = |slot: &&mut Slot| slot.opening.is_some_and(|opening| opening.id == id);
        if let Some(slot) = self.known.values_mut().find(is_opening) {
            slot.opening = None;
            slot.not_before = Some(Instant::now() + LATER);
        }
        let Some((index, slot, _)) = self.with_proxy_file(id) else { return };
        let node = slot.node;
        if self.pass.nodes.lock().forget(node, index) {
            return self.drop_slot(index);
        }
        tracing::debug!(node, "a truncation on the host revokes a slot");
        self.give_up(index);
        self.pend(index, RevokeReason::Host(since + self.pass.settings.patience));
    }

    /// Revokes an entry if it is live, and notes that its acknowledgement is missing.
    fn pend(&mut self, index: u32, why: RevokeReason) {
        if self.pending.iter().any(|pending| pending.index == index) {
            return;
        }
        let Some(slot) = self.known.get(&index) else { return };
        // As long as the entry has its file.
        self.pass.note_stores(index, slot.node);
        let entry = self.pass.table.update(index, |line| {
            let acknowledged = || self.pass.table.acknowledged(index) == line.entry().generation;
            // Refused if there is nothing to revoke.
            let _ = match (why, line.state()) {
                (RevokeReason::Downgrade, _) => Ok(()),
                // An open or a worker that is about to make it live finds no slot.
                (RevokeReason::Host(_), EntryState::Free | EntryState::Revoked) => line.step(Change::Revoke),
                (RevokeReason::Host(_) | RevokeReason::Room, EntryState::Revoking { .. }) if acknowledged() => {
                    line.step(Change::Revoke)
                }
                (RevokeReason::Host(_) | RevokeReason::Longer | RevokeReason::Room, _) => {
                    line.step(Change::BeginRevoke)
                }
            };
            line.entry()
        });
        if entry.state.is_revoking() {
            self.pending.push(Pending { index, generation: entry.generation, why, since: self.now });
        } else if entry.state == EntryState::Revoked && matches!(why, RevokeReason::Host(_) | RevokeReason::Room) {
            self.revoked(index);
        }
    }

    /// The guest no longer uses the slot: takes the file out, and makes the entry Revoked.
    fn revoked(&mut self, index: u32) {
        let held = self.empty(index);
        self.set_revoked(index, Change::Revoke);
        held.into_iter().for_each(|held| self.spent(held));
    }

    /// `change`: Revoke or ForceRevoke.
    fn set_revoked(&mut self, index: u32, change: Change) {
        if let Some(slot) = self.known.get_mut(&index) {
            slot.not_before = Some(Instant::now() + LATER);
        }
        // Meanwhile the last open may have been released.
        let done = self.pass.table.update(index, |line| line.step(change).or_else(|_| line.step(Change::Revoke)));
        debug_assert!(done.is_ok(), "a live entry loses its slot");
    }

    /// Makes room for a file that has outgrown its slot: behind the slot if that is possible, or else by a revocation,
    /// after which the file moves. `whom`: who gives way then.
    fn lengthen(&mut self, index: u32, whom: Victims) {
        let Some(held) = self.known.get(&index).and_then(|slot| slot.held.as_ref()) else { return };
        let entry = self.pass.table.entry(index);
        let (at, len) = (held.at, held.len());
        if entry.size <= len || !entry.state.is_live() || shortest(entry.size) > self.pass.size() {
            return;
        }
        if self.extend(index, entry.size) != Extended::NoRoom {
            return;
        }
        while !self.room.would_fit(shortest(entry.size), &[at]) {
            let Some(evicted) = self.pass.nodes.lock().evict() else {
                // The next one who asks finds the room.
                self.make_room(index, whom);
                return;
            };
            self.drop_slot(evicted);
        }
        self.pend(index, RevokeReason::Longer);
    }

    /// Maps more of a file right behind its slot, for `size` bytes of the file. The guest need not let go of anything.
    fn extend(&mut self, index: u32, size: u64) -> Extended {
        let Some(len) = self.room_behind(index, size) else { return Extended::NoRoom };
        let Some(held) = self.known.get(&index).and_then(|slot| slot.held.as_ref()) else { return Extended::NoRoom };
        let (at, before) = (held.at, held.len());
        // First the mapping, then the entry: the guest uses what the entry says.
        let mapped = self.map(&held.mapping(before, len - before));
        if let Err(errno) = mapped {
            tracing::debug!(index, "no more of a file is mapped: {errno}");
            self.room.resize(at, before);
            return if errno == Errno::TIMEDOUT { Extended::NotNow } else { Extended::NoRoom };
        }
        if let Some(held) = self.known.get_mut(&index).and_then(|slot| slot.held.as_mut()) {
            held.pieces.push(len - before);
        }
        self.pass.table.update(index, |line| line.lengthen(len));
        tracing::debug!(index, len, "a slot has grown");
        Extended::Done
    }

    /// Takes the room behind a slot, for `size` bytes of its file, and a mapping. Kept slots give way. Returns how long
    /// the slot is then.
    fn room_behind(&mut self, index: u32, size: u64) -> Option<u64> {
        let held = self.known.get(&index)?.held.as_ref()?;
        let at = held.at;
        if held.pieces.len() >= FILE_MAPPINGS {
            return None;
        }
        let kept = self.kept();
        let all_kept = |slots: &Vec<u64>| slots.iter().all(|at| kept.contains(at));
        let fits = |len: &u64| self.room.behind(at, *len).filter(all_kept);
        let (len, in_the_way) = lens(size).into_iter().flatten().find_map(|len| Some((len, fits(&len)?)))?;
        for other in in_the_way {
            let of = |(&index, slot): (&u32, &Slot)| {
                let is_it = slot.held.as_ref().is_some_and(|held| held.at == other);
                is_it.then_some((slot.node, index))
            };
            let (node, kept) = self.known.iter().find_map(of)?;
            // It may have been opened meanwhile.
            if !self.pass.nodes.lock().forget(node, kept) {
                return None;
            }
            self.drop_slot(kept);
        }
        while self.mappings() >= self.pass.settings.slots {
            let evicted = self.pass.nodes.lock().evict()?;
            self.drop_slot(evicted);
        }
        self.room.resize(at, len).then_some(len)
    }

    /// Looks for acknowledgements, and does what is due, or has workers do it.
    pub fn look(&mut self, now: Instant) {
        self.now = now;
        self.settle_times(self.now);
        let over = |p: &Pending| {
            let acknowledged = self.pass.table.acknowledged(p.index) == p.generation;
            let late = matches!(p.why, RevokeReason::Host(until) if Instant::now() >= until);
            (acknowledged || late).then_some((p.index, p.why, p.since, acknowledged))
        };
        let over: Vec<_> = self.pending.iter().filter_map(over).collect();
        for (index, why, since, acknowledged) in over {
            tracing::debug!(index, ?why, acknowledged, us = since.elapsed().as_micros(), "a revocation is over");
            self.give_up(index);
            self.finish(index, why, acknowledged);
        }
        self.look_for_room();
        self.look_later();
        self.look_at_opens();
        self.pass.jobs().close(&mut self.closing);
    }

    /// Has files mapped that wait for room, if there may be some.
    fn look_for_room(&mut self) {
        let late = |w: &Wanting| self.now.saturating_duration_since(w.since) >= OPENING;
        if std::mem::take(&mut self.freed) || self.wanting.iter().any(late) {
            self.full = false;
            for want in &self.wanting {
                self.pass.send(SlotJob::Entry(EntryJob::Serve, want.index));
            }
        }
    }

    /// Answers opens whose file keeps a worker waiting: they are by messages.
    fn look_at_opens(&mut self) {
        let late = |opening: Opening| {
            opening.need == Need::Open && self.now.saturating_duration_since(opening.since) >= OPENING
        };
        let late = |(index, slot): (&u32, &Slot)| slot.opening.filter(|opening| late(*opening)).map(|_| *index);
        let late: Vec<u32> = self.known.iter().filter_map(late).collect();
        for index in late {
            self.decide(index, Instant::now(), Err(Errno::TIMEDOUT));
        }
    }

    fn finish(&mut self, index: u32, why: RevokeReason, acknowledged: bool) {
        match why {
            RevokeReason::Host(_) if acknowledged => self.revoked(index),
            RevokeReason::Host(_) => self.replace(index),
            RevokeReason::Room => {
                self.revoked(index);
                if let Some(slot) = self.known.get_mut(&index) {
                    slot.not_before = None;
                }
            }
            RevokeReason::Downgrade => self.pass.send(SlotJob::Entry(EntryJob::Live, index)),
            RevokeReason::Longer => self.pass.send(SlotJob::Entry(EntryJob::Move, index)),
        }
    }

    /// Takes a file out of its slot because the guest did not let go of it in time. A Cached proxy file is to take its
    /// place.
    fn replace(&mut self, index: u32) {
        let generation = self.pass.table.entry(index).generation;
        let Some(slot) = self.known.get_mut(&index) else { return };
        let node = slot.node;
        let Some(held) = slot.held.take() else { return };
        tracing::warn!(node, "the guest did not let go of a file in time: what it still stores in place may be lost");
        let (at, len) = (held.at, held.len());
        self.unmap(index, node, &held);
        self.set_revoked(index, Change::ForceRevoke);
        self.spent(held);
        if let Some(slot) = self.known.get_mut(&index) {
            slot.late = Some(Overdue { at, len, generation, file: None });
        }
        self.pass.send(SlotJob::Entry(EntryJob::Replace, index));
    }

    /// Ends the Cached proxy files that the guest has let go of, and maps files again whose truncation is over.
    fn look_later(&mut self) {
        let pass = &self.pass;
        let over = |(index, slot): (&u32, &Slot)| {
            let late = slot.late.as_ref().is_some_and(|late| pass.table.acknowledged(*index) == late.generation);
            late.then_some(*index)
        };
        let over: Vec<u32> = self.known.iter().filter_map(over).collect();
        over.into_iter().for_each(|index| self.end_late(index));
        for (index, _) in self.known.iter().filter(|(_, slot)| slot.opening.is_none() && slot.is_due()) {
            self.pass.send(SlotJob::Entry(EntryJob::Again, *index));
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
