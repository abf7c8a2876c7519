//! The mapper's part of window passthrough. It maps whole files into slots of region 1 and revokes them, without
//! waiting while the guest lets go.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate, fstat};
use rustix::io::Errno;

use super::jobs::{EntryJob, SlotJob};
use super::passthrough::{Passthrough, Writable, touch};
use super::proxy::{Kind, errno};
use super::room::Room;
use super::shared::{CachedFile, Mapping, ProxyFiles, Shared, Source, TABLE, WHOLE_FILES, write_back};
use super::table::{Change, EntryState};
use super::{RANGE, table};
use crate::fuse::ops::Result;

/// How often to look for acknowledgements while one is missing: a host process or a file that needs a longer slot waits
/// for it.
const SOON: Duration = Duration::from_millis(1);

/// How often to look at what nobody waits for.
const LATER: Duration = Duration::from_millis(if cfg!(fuzzing) { 0 } else { 100 });

/// How long the guest may take to let go if a host process waits: the guard lets that process go on after 2 s.
const PATIENCE: Duration = Duration::from_millis(if cfg!(fuzzing) { 0 } else { 1500 });

/// How often files get the time of what the guest has stored in place, if no request needs it sooner: programs of the
/// host look at it too.
const TIMES: Duration = Duration::from_secs(5);

/// A file in a slot.
struct Held {
    at: u64,
    len: u64,
    /// The proxy file's number.
    id: u64,
    real: OwnedFd,
    /// The proxy file, open as long as it is mapped: a host process that truncates the real file waits for its end.
    proxy: OwnedFd,
}

impl Held {
    fn mapping(&self) -> Mapping<'_> {
        Mapping::whole(WHOLE_FILES, self.at, self.len, self.proxy.as_fd())
    }
}

/// The Cached proxy file that is in a slot because the guest did not let go of it in time.
struct Late {
    at: u64,
    len: u64,
    /// The generation that the guest has.
    generation: u32,
    /// None if nothing could be mapped.
    file: Option<Arc<OwnedFd>>,
}

/// What belongs to an entry.
struct Slot {
    session: u64,
    node: u64,
    source: Arc<dyn Source>,
    held: Option<Held>,
    late: Option<Late>,
    /// When to map the file again. It is not sooner, so that a host process that waits sees the end of the mapping.
    not_before: Option<Instant>,
}

/// Why an entry is revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// A host process is about to truncate the file, and waits.
    Host(Instant),
    /// The file gets a longer slot.
    Longer,
    /// The guest must not store to it any more. The slot stays.
    Downgrade,
}

/// A revocation that the guest has not acknowledged.
struct Pending {
    index: u32,
    generation: u32,
    why: Why,
    since: Instant,
}

pub struct Slots {
    pass: Arc<Passthrough>,
    shared: Arc<Shared>,
    files: Arc<dyn ProxyFiles>,
    room: Room,
    /// By index in the table.
    known: HashMap<u32, Slot>,
    pending: Vec<Pending>,
    has_table: bool,
    /// When the files last got their times.
    settled: Instant,
}

impl Slots {
    pub fn new(pass: Arc<Passthrough>, shared: Arc<Shared>, files: Arc<dyn ProxyFiles>) -> Self {
        let room = Room::new(pass.size());
        let (known, pending) = (HashMap::new(), Vec::new());
        Self { pass, shared, files, room, known, pending, has_table: false, settled: Instant::now() }
    }

    /// How long the mapper may wait for a job before it must call [`look`](Self::look).
    pub fn patience(&self) -> Option<Duration> {
        let waits = self.known.values().any(|slot| slot.late.is_some() || slot.not_before.is_some());
        let holds = self.known.values().any(|slot| slot.held.is_some());
        match self.pending.is_empty() {
            false => Some(SOON),
            true if waits => Some(LATER),
            true => holds.then(|| TIMES.saturating_sub(self.settled.elapsed())),
        }
    }

    pub fn serve(&mut self, job: SlotJob) {
        match job {
            SlotJob::Start { session, answer } => answer(self.start(session)),
            SlotJob::Open { session, node, index, source, refused: _ } => self.open(session, node, index, source),
            SlotJob::Ask { node, from, len, writable, answer } => answer(self.ask(node, from, len, writable)),
            SlotJob::Entry(job, index) => match job {
                EntryJob::Drop => self.drop_slot(index),
                EntryJob::Downgrade => self.pend(index, Why::Downgrade),
                EntryJob::Remap => self.lengthen(index),
                EntryJob::Gone => {
                    if self.pass.table.entry(index).state == EntryState::Gone {
                        self.gone(index);
                    }
                }
            },
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

    fn open(&mut self, session: u64, node: u64, index: u32, source: Arc<dyn Source>) {
        let start = Instant::now();
        self.known.insert(index, Slot { session, node, source, held: None, late: None, not_before: None });
        let mapped = self.fill(index, false);
        tracing::debug!(node, us = start.elapsed().as_micros(), ?mapped, "passthrough");
        if !self.pass.decide(session, node, index, mapped.is_ok()) {
            self.drop_slot(index);
        }
    }

    /// Maps an entry's file and makes the entry live. `wanted`: a process of the guest waits for it, so the holes of a
    /// file in memory are to be allocated.
    fn fill(&mut self, index: u32, wanted: bool) -> Result<()> {
        let slot = self.known.get(&index).ok_or(Errno::STALE)?;
        let (node, source) = (slot.node, slot.source.clone());
        let real = source.open(true)?;
        let id = self.shared.next_id();
        let opened = self.files.open(id, Kind::Through, real.as_fd()).map_err(errno)?;
        // If it fails, a change is noticed when the guest asks for attributes.
        let _ = self.files.watch(id);
        // Without the guard, the host could not execute it.
        if !opened.guarded && source.facts()?.executable {
            return Err(Errno::TXTBSY);
        }
        // The guard is active now, so the size cannot shrink.
        let (at, len) = self.reserve(fstat(&real)?.st_size as u64)?;
        self.put(index, node, Held { at, len, id, real, proxy: opened.fd }, wanted)
    }

    /// Maps a file into its reserved slot and makes the entry live. `wanted`: see [`fill`](Self::fill).
    fn put(&mut self, index: u32, node: u64, held: Held, wanted: bool) -> Result<()> {
        match self.shared.map(&held.mapping()) {
            Ok(true) => {}
            seen => {
                if seen.is_ok() {
                    self.shared.unmap(&held.mapping());
                }
                self.room.free(held.at);
                return Err(seen.err().unwrap_or(Errno::TIMEDOUT));
            }
        }
        self.pass.table.update(index, |line| {
            line.slot = Some((held.at, held.len));
            line.set_node(node);
        });
        let real = held.real.as_fd();
        let filled = if wanted { self.pass.fill(index, real).map(Some) } else { Ok(None) };
        let live = filled.and_then(|filled| self.pass.live(index, real, filled));
        if let Some(slot) = self.known.get_mut(&index) {
            (slot.held, slot.not_before) = (Some(held), None);
        }
        if live.is_err() {
            self.gone(index);
        }
        live
    }

    /// Reserves a slot (offset and length), of the greatest of [`lens`] that there is room for.
    fn reserve(&mut self, size: u64) -> Result<(u64, u64)> {
        let lens = lens(size);
        loop {
            let full = self.slots() >= self.pass.settings.slots;
            let mut fits = lens.into_iter().flatten().filter(|_| !full);
            match fits.find_map(|len| Some((self.room.take(len)?, len))) {
                Some(place) => return Ok(place),
                None => {
                    let evicted = self.pass.nodes.lock().evict().ok_or(Errno::NOSPC)?;
                    self.drop_slot(evicted);
                }
            }
        }
    }

    /// Live mappings.
    fn slots(&self) -> usize {
        self.known.values().filter(|slot| slot.held.is_some() || slot.late.is_some()).count()
    }

    /// Ends what belongs to an entry without opens.
    fn drop_slot(&mut self, index: u32) {
        self.give_up(index);
        drop(self.empty(index));
        self.end_late(index);
        let Some(slot) = self.known.remove(&index) else { return };
        self.shared.cached.remove(&slot.node);
        let mut nodes = self.pass.nodes.lock();
        if slot.session == nodes.session {
            self.pass.table.update(index, |line| {
                line.slot = None;
                let _ = line.step(Change::Release);
            });
        }
        nodes.free(slot.session, index);
    }

    /// Stops waiting for an acknowledgement.
    fn give_up(&mut self, index: u32) {
        self.pending.retain(|pending| pending.index != index);
    }

    /// Takes the file out of its slot. A host process that waits for that goes on when the result is dropped.
    fn empty(&mut self, index: u32) -> Option<Held> {
        let slot = self.known.get_mut(&index)?;
        let (node, held) = (slot.node, slot.held.take()?);
        self.unmap(index, node, &held);
        self.room.free(held.at);
        Some(held)
    }

    fn unmap(&self, index: u32, node: u64, held: &Held) {
        self.shared.unmap(&held.mapping());
        self.settle_times_of(index, node, held);
    }

    fn settle_times_of(&self, index: u32, node: u64, held: &Held) {
        self.pass.settle_times_of(index, node, || touch(held.real.as_fd()));
    }

    /// Gives files the time of what the guest has stored in place, now and then.
    fn settle_times(&mut self, now: Instant) {
        if now.saturating_duration_since(self.settled) < TIMES {
            return;
        }
        self.settled = now;
        let held = self.known.iter().filter_map(|(&index, slot)| Some((index, slot.node, slot.held.as_ref()?)));
        held.for_each(|(index, node, held)| self.settle_times_of(index, node, held));
    }

    fn end_late(&mut self, index: u32) {
        let Some(slot) = self.known.get_mut(&index) else { return };
        let Some(late) = slot.late.take() else { return };
        self.shared.cached.remove(&slot.node);
        if let Some(file) = late.file {
            self.shared.unmap(&Mapping::whole(WHOLE_FILES, late.at, late.len, file.as_fd()));
            write_back(file.as_fd(), &*slot.source);
        }
        self.room.free(late.at);
    }

    /// The slot that has this proxy file.
    fn with_proxy_file(&self, id: u64) -> Option<(u32, &Slot, &Held)> {
        self.known
            .iter()
            .find_map(|(&index, slot)| Some((index, slot, slot.held.as_ref().filter(|held| held.id == id)?)))
    }

    /// Somebody else has written to a proxy file's real file, or changed its size.
    pub fn changed(&mut self, id: u64) {
        if let Some((index, _, held)) = self.with_proxy_file(id) {
            self.pass.look(index, held.real.as_fd());
        }
    }

    /// A host process is about to truncate a proxy file's real file.
    pub fn revoke(&mut self, id: u64) {
        let Some((index, slot, _)) = self.with_proxy_file(id) else { return };
        let node = slot.node;
        if self.pass.nodes.lock().forget(node, index) {
            return self.drop_slot(index);
        }
        tracing::debug!(node, "a truncation on the host revokes a slot");
        self.give_up(index);
        self.pend(index, Why::Host(Instant::now() + PATIENCE));
    }

    /// Revokes an entry if it is live, and notes that its acknowledgement is missing.
    fn pend(&mut self, index: u32, why: Why) {
        if !self.known.contains_key(&index) || self.pending.iter().any(|pending| pending.index == index) {
            return;
        }
        let entry = self.pass.table.update(index, |line| {
            // Refused if there is nothing to revoke.
            let _ = match (why, line.state()) {
                (Why::Downgrade, _) => Ok(()),
                // An open that is about to make it live finds no slot.
                (Why::Host(_), EntryState::Free) => line.step(Change::Withdraw),
                (Why::Host(_) | Why::Longer, _) => line.step(Change::Revoke),
            };
            line.entry()
        });
        if entry.state.is_revoking() {
            self.pending.push(Pending { index, generation: entry.generation, why, since: Instant::now() });
        } else if matches!(why, Why::Host(_)) {
            self.gone(index);
        }
    }

    /// The guest no longer uses the slot: takes the file out, and makes the entry gone.
    fn gone(&mut self, index: u32) {
        let held = self.empty(index);
        self.set_gone(index, Change::Withdraw);
        drop(held);
    }

    /// `change`: Withdraw or Seize.
    fn set_gone(&mut self, index: u32, change: Change) {
        if let Some(slot) = self.known.get_mut(&index) {
            slot.not_before = Some(Instant::now() + LATER);
        }
        let done = self.pass.table.update(index, |line| line.step(change));
        debug_assert!(done.is_ok(), "a live entry loses its slot");
    }

    /// Revokes the entry of a file that has outgrown its slot, if there is room for a longer one.
    fn lengthen(&mut self, index: u32) {
        let Some(held) = self.known.get(&index).and_then(|slot| slot.held.as_ref()) else { return };
        let entry = self.pass.table.entry(index);
        let (at, len) = (held.at, held.len);
        if entry.size <= len || !entry.state.is_live() {
            return;
        }
        let lens = lens(entry.size);
        while !lens.into_iter().flatten().any(|len| self.room.would_fit(len, at)) {
            let Some(evicted) = self.pass.nodes.lock().evict() else { return };
            self.drop_slot(evicted);
        }
        self.pend(index, Why::Longer);
    }

    /// Looks for acknowledgements, and does what is due.
    pub fn look(&mut self, now: Instant) {
        self.settle_times(now);
        let done: Vec<(u32, Why, bool)> = self
            .pending
            .iter()
            .filter_map(|p| {
                let acknowledged = self.pass.table.acknowledged(p.index) == p.generation;
                let late = matches!(p.why, Why::Host(until) if Instant::now() >= until);
                let us = p.since.elapsed().as_micros();
                (acknowledged || late)
                    .then(|| tracing::debug!(p.index, why = ?p.why, acknowledged, us, "a revocation is over"))
                    .map(|()| (p.index, p.why, acknowledged))
            })
            .collect();
        for (index, why, acknowledged) in done {
            self.pending.retain(|pending| pending.index != index);
            self.finish(index, why, acknowledged);
        }
        self.look_later();
    }

    fn finish(&mut self, index: u32, why: Why, acknowledged: bool) {
        match why {
            Why::Host(_) if acknowledged => self.gone(index),
            Why::Host(_) => self.replace(index),
            Why::Downgrade => {
                let Some(real) = self.known.get(&index).and_then(|slot| slot.held.as_ref()) else { return };
                if self.pass.live(index, real.real.as_fd(), None).is_err() {
                    self.gone(index);
                }
            }
            Why::Longer => self.move_elsewhere(index),
        }
    }

    /// Moves a file to a slot that is long enough.
    fn move_elsewhere(&mut self, index: u32) {
        let moved = self.known.get_mut(&index).and_then(|slot| Some((slot.node, slot.held.take()?)));
        let Some((node, held)) = moved else { return };
        self.unmap(index, node, &held);
        self.room.free(held.at);
        let size = self.pass.table.entry(index).size;
        let put = self.reserve(size).and_then(|(at, len)| self.put(index, node, Held { at, len, ..held }, false));
        if let Err(errno) = put {
            tracing::debug!(node, "not mapped again: {errno}");
            self.gone(index);
        }
    }

    /// Replaces a file by a Cached proxy file because the guest did not let go of it in time.
    fn replace(&mut self, index: u32) {
        let generation = self.pass.table.entry(index).generation;
        let Some(slot) = self.known.get_mut(&index) else { return };
        let (node, source) = (slot.node, slot.source.clone());
        let Some(held) = slot.held.take() else { return };
        tracing::warn!(node, "the guest did not let go of a file in time: what it still stores in place may be lost");
        let (at, len) = (held.at, held.len);
        self.unmap(index, node, &held);
        self.set_gone(index, Change::Seize);
        drop(held);
        let id = self.shared.next_id();
        let open = || self.files.open(id, Kind::Cached, source.open(true)?.as_fd());
        let mapped = open().map_err(errno).and_then(|opened| {
            self.shared.map(&Mapping::whole(WHOLE_FILES, at, len, opened.fd.as_fd()))?;
            Ok(Arc::new(opened.fd))
        });
        let mapped = mapped.inspect_err(|errno| tracing::warn!(node, "nothing can be put in its place: {errno}"));
        if let Ok(file) = &mapped {
            self.shared.cached.insert(node, CachedFile { id, fd: file.clone(), source });
        }
        if let Some(slot) = self.known.get_mut(&index) {
            slot.late = Some(Late { at, len, generation, file: mapped.ok() });
        }
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
        let due = |slot: &Slot| {
            slot.held.is_none() && slot.late.is_none() && slot.not_before.is_some_and(|at| at <= Instant::now())
        };
        let due: Vec<u32> = self.known.iter().filter(|(_, slot)| due(slot)).map(|(index, _)| *index).collect();
        for index in due {
            let again = match self.fill(index, false) {
                // The truncation is still in progress.
                Err(Errno::BUSY) => Some(Instant::now() + LATER),
                done => done.inspect_err(|errno| tracing::debug!("not mapped again: {errno}")).ok().and(None),
            };
            if let Some(slot) = self.known.get_mut(&index) {
                slot.not_before = again;
            }
        }
    }

    /// Answers a SETUPMAPPING.
    fn ask(&mut self, node: u64, from: u64, len: u64, writable: bool) -> Result<()> {
        let index = self.pass.nodes.lock().index(node).ok_or(Errno::BADF)?;
        let slot = self.known.get(&index).ok_or(Errno::AGAIN)?;
        let end = from.checked_add(len).ok_or(Errno::INVAL)?;
        let entry = self.pass.table.entry(index);
        if entry.state.is_revoking() || slot.late.is_some() || slot.not_before.is_some_and(|at| at > Instant::now()) {
            return Err(Errno::AGAIN);
        }
        if !entry.state.is_live() {
            if slot.held.is_some() {
                // An open is about to make it live, or could not: then the slot is emptied first.
                return Err(Errno::AGAIN);
            }
            self.fill(index, true).map_err(|errno| match errno {
                Errno::NOSPC | Errno::BUSY | Errno::TIMEDOUT => Errno::AGAIN,
                other => other,
            })?;
            return self.ask_live(index, end, writable);
        }
        self.ask_live(index, end, writable)
    }

    fn ask_live(&mut self, index: u32, end: u64, writable: bool) -> Result<()> {
        let entry = self.pass.table.entry(index);
        if end > entry.length {
            if entry.size <= entry.length {
                // Beyond the end of the file.
                return Err(Errno::FAULT);
            }
            self.lengthen(index);
            return Err(Errno::AGAIN);
        }
        match writable && !entry.state.is_writable() {
            true => self.fill_holes(index),
            false => Ok(()),
        }
    }

    /// Allocates the file's holes, so that no store to it can fail for want of space.
    fn fill_holes(&mut self, index: u32) -> Result<()> {
        let held = self.known.get(&index).and_then(|slot| slot.held.as_ref()).ok_or(Errno::AGAIN)?;
        if self.pass.settings.writable == Writable::InPlace && !self.pass.writes_in_place(held.real.as_fd())? {
            return Err(Errno::OPNOTSUPP);
        }
        let (since, real) = (self.pass.holes(index), held.real.as_fd());
        let size = fstat(real)?.st_size as u64;
        if size > 0 {
            fallocate(real, FallocateFlags::KEEP_SIZE, 0, size)?;
        }
        self.pass.allocated(&since, real, 0, size.max(1));
        if self.pass.table.entry(index).state.is_writable() { Ok(()) } else { Err(Errno::AGAIN) }
    }
}

/// Lengths of a slot for a file of `size` bytes, the best first: with room to grow by as much again, by an eighth, by
/// nothing.
fn lens(size: u64) -> [Option<u64>; 3] {
    [size, size / 8, 0].map(|more| size.checked_add(more)?.max(1).checked_next_multiple_of(RANGE))
}
