//! The thread that maps. It alone talks to the frontend, and all state is its own: it holds no lock while it waits, since
//! the frontend changes the guest's memory meanwhile and waits for the thread that takes note of it.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::jobs::Jobs;
use super::proxy::{Event, Kind};
use super::slots::Slots;
use super::space::{Stores, has_hole};
use super::{Copy, DAX, RANGE, Shared, Source, StandIns, sys};
use crate::fuse::ops::{Answer, Result};

/// How often there is something to look after while a file has copies: what the guest wrote to them is to reach the host
/// soon, and where it can lose to a change by the host, little; and after a truncation the file's own pages are to come back
/// as long as the guest can take that for a part of it.
const TICK: Duration = Duration::from_millis(50);

/// For so long after a revocation the file's own pages are tried again: the guard lets a truncation go on after 2 s, and the
/// window process then calls it over.
const REVOKED: Duration = Duration::from_secs(5);

pub enum Job {
    Map {
        ranges: Range<usize>,
        from: u64,
        writable: bool,
        node: u64,
        source: Arc<dyn Source>,
        answer: Answer,
    },
    Unmap {
        ranges: Vec<usize>,
        answer: Answer,
    },
    /// Blocks are about to be taken from these bytes of a node's file.
    Vacate {
        node: u64,
        from: u64,
        len: u64,
        answer: Answer,
    },
    /// The session is over.
    Reset,
    /// Others do something to a file.
    Event(Event),
    /// A guest with passthrough begins a session.
    Start {
        session: u64,
        answer: Answer,
    },
    /// A node's first open with passthrough.
    Open {
        session: u64,
        node: u64,
        index: u32,
        source: Arc<dyn Source>,
        /// What to do if it is one too many.
        refused: Box<dyn FnOnce() + Send>,
    },
    /// The entry's last open is released, and its slot is not to be kept.
    Drop {
        index: u32,
    },
    /// An entry was revoked as its file has a hole now.
    Downgrade {
        index: u32,
    },
    /// A file has grown beyond its slot.
    Remap {
        index: u32,
    },
    /// An entry must not stay mapped.
    Gone {
        index: u32,
    },
    /// The guest wants a live entry that covers these bytes.
    Ask {
        node: u64,
        from: u64,
        len: u64,
        writable: bool,
        answer: Answer,
    },
}

impl Job {
    /// Answers a request of the guest that is not to be done.
    pub fn refuse(self, errno: Errno) {
        match self {
            Self::Map { answer, .. }
            | Self::Unmap { answer, .. }
            | Self::Vacate { answer, .. }
            | Self::Start { answer, .. }
            | Self::Ask { answer, .. } => answer(Err(errno)),
            Self::Open { refused, .. } => refused(),
            _ => {}
        }
    }
}

/// A live mapping, of one [`RANGE`].
#[derive(Clone, Copy, PartialEq, Eq)]
struct Mapping {
    node: u64,
    from: u64,
    kind: Kind,
    writable: bool,
    /// The guest has asked to store there. It does not before, though it could.
    stored: bool,
}

/// A range of the window that is in use, and what is mapped there.
struct Live {
    mapping: Mapping,
    file: Arc<OwnedFd>,
}

/// A stand-in that is open.
#[derive(Clone)]
struct StandIn {
    id: u64,
    kind: Kind,
    fd: Arc<OwnedFd>,
    real: Arc<OwnedFd>,
    writable: bool,
    /// The host's truncations are waited for.
    guarded: bool,
}

/// A file that has mappings.
struct File {
    source: Arc<dyn Source>,
    through: Option<StandIn>,
    cached: Option<StandIn>,
    live: usize,
}

impl File {
    fn new(source: Arc<dyn Source>) -> Self {
        Self { source, through: None, cached: None, live: 0 }
    }

    /// What the guest may have written to.
    fn copy(&self) -> Option<&StandIn> {
        self.cached.as_ref().filter(|copy| copy.writable)
    }

    fn write_back(&self) {
        if let Some(copy) = self.copy() {
            write_back(copy.fd.as_fd(), &*self.source);
        }
    }
}

pub struct Mapper {
    shared: Arc<Shared>,
    files: Arc<dyn StandIns>,
    ranges: Box<[Option<Live>]>,
    /// By nodeid.
    known: HashMap<u64, File>,
    /// When nodes were revoked whose own pages are not back.
    revoked: HashMap<u64, Instant>,
    /// When there was care last.
    cared: Instant,
    /// Of files that are mapped as a whole.
    slots: Option<Slots>,
}

impl Mapper {
    pub fn new(ranges: usize, shared: Arc<Shared>, files: Arc<dyn StandIns>, slots: Option<Slots>) -> Self {
        let ranges = (0..ranges).map(|_| None).collect();
        let (known, revoked) = (HashMap::new(), HashMap::new());
        Self { shared, files, ranges, known, revoked, cared: Instant::now(), slots }
    }

    pub fn run(mut self, jobs: &Jobs) -> ! {
        loop {
            let job = jobs.next(self.patience());
            self.turn(job);
        }
    }

    /// Does a job, and what is due.
    pub fn turn(&mut self, job: Option<Job>) {
        job.into_iter().for_each(|job| self.work(job));
        if self.needs_care() && self.cared.elapsed() >= TICK {
            self.care();
            self.cared = Instant::now();
        }
        if let Some(slots) = &mut self.slots {
            slots.look();
        }
    }

    fn work(&mut self, job: Job) {
        match job {
            Job::Map { ranges, from, writable, node, source, answer } => {
                let start = Instant::now();
                let done = self.map(ranges, from, writable, node, source);
                let live = self.shared.live(DAX).load(Ordering::Relaxed);
                tracing::trace!(node, from, live, us = start.elapsed().as_micros(), "mapped");
                answer(done.inspect_err(|errno| tracing::debug!(node, from, "not mapped: {errno}")));
            }
            Job::Unmap { ranges, answer } => {
                ranges.into_iter().for_each(|range| self.unmap(range));
                answer(Ok(()));
            }
            Job::Vacate { node, from, len, answer } => answer(self.vacate(node, from, len)),
            Job::Reset => self.reset(),
            Job::Event(Event::Revoke(id)) => self.revoke(id),
            job => {
                if let Some(slots) = &mut self.slots {
                    slots.serve(job);
                }
            }
        }
    }

    /// How long to wait for a job before there is something else to do.
    fn patience(&self) -> Option<Duration> {
        let care = self.needs_care().then(|| TICK.saturating_sub(self.cared.elapsed()));
        care.into_iter().chain(self.slots.as_ref().and_then(Slots::patience)).min()
    }

    fn needs_care(&self) -> bool {
        !self.revoked.is_empty() || self.known.values().any(|file| file.copy().is_some())
    }

    fn care(&mut self) {
        for file in self.known.values() {
            file.write_back();
        }
        let nodes: Vec<u64> = self.revoked.keys().copied().collect();
        nodes.into_iter().for_each(|node| self.restore(node));
        self.revoked.retain(|_, at| at.elapsed() < REVOKED);
    }

    fn map(
        &mut self,
        ranges: Range<usize>,
        from: u64,
        writable: bool,
        node: u64,
        source: Arc<dyn Source>,
    ) -> Result<()> {
        // Counted, so that the file stays known even between two of its mappings.
        self.known.entry(node).or_insert_with(|| File::new(source)).live += 1;
        self.shared.nodes.insert(node);
        let want = |from| Mapping { node, from, kind: Kind::Through, writable, stored: writable };
        let mut new = Vec::new();
        let done = ranges.zip((from..).step_by(RANGE as usize)).try_for_each(|(range, from)| {
            // What the guest has already stays as it is if this fails.
            if !self.has(range, want(from))? {
                new.push(range);
                self.map_range(range, want(from))?;
            }
            Ok(())
        });
        if done.is_err() {
            new.into_iter().for_each(|range| self.unmap(range));
        }
        self.let_go(node);
        done
    }

    /// Whether what is mapped will do. A mapping that gives way to another is not there for a moment, so it stays if it can.
    fn has(&mut self, range: usize, want: Mapping) -> Result<bool> {
        let Some(have) = self.mapping(range).filter(|have| (have.node, have.from) == (want.node, want.from)) else {
            return Ok(false);
        };
        if !have.writable {
            return Ok(false);
        }
        if want.stored && !have.stored {
            if have.kind == Kind::Through {
                let Some(through) = self.file(want.node)?.through.clone() else { return Ok(false) };
                match self.promise(want, &through) {
                    Err(Errno::OPNOTSUPP) => return Ok(false),
                    done => done?,
                }
            }
            if let Some(Some(live)) = self.ranges.get_mut(range) {
                live.mapping.stored = true;
            }
        }
        Ok(true)
    }

    fn map_range(&mut self, range: usize, want: Mapping) -> Result<()> {
        let stand_in = self.stand_in(want)?;
        self.unmap(range);
        // Of tmpfs each is promised.
        let stored = stand_in.kind == Kind::Through && self.shared.promises.has(want.node, want.from);
        self.put(range, Mapping { stored: want.stored || stored, ..want }, &stand_in)
    }

    /// What to map for `want`: the file's own pages where that is safe.
    fn stand_in(&mut self, want: Mapping) -> Result<StandIn> {
        if !self.revoked.contains_key(&want.node) {
            if let Some(through) = self.through(want)? {
                if self.is_whole(want)? && self.has_room(want, &through)? {
                    return Ok(through);
                }
            }
        }
        self.cached(want)
    }

    /// Whether the range can be mapped itself. If so, and if the guest may store there, it has blocks.
    fn has_room(&self, want: Mapping, through: &StandIn) -> Result<bool> {
        let in_memory = Stores::of(through.real.as_fd())? == Stores::Memory;
        if !want.stored && (!in_memory || has_hole(&through.real, want.from)?) {
            return Ok(!in_memory);
        }
        match self.promise(want, through) {
            Err(Errno::OPNOTSUPP) => Ok(false),
            done => done.and(Ok(true)),
        }
    }

    fn promise(&self, want: Mapping, through: &StandIn) -> Result<()> {
        let stores = Stores::of(through.real.as_fd())?;
        self.shared.promises.add(want.node, &through.real, stores, want.from)
    }

    /// Whether the guest knows better than to touch the range where the file has no pages. To be asked when the guard is
    /// there, so that the answer holds.
    fn is_whole(&mut self, want: Mapping) -> Result<bool> {
        let facts = self.file(want.node)?.source.facts()?;
        Ok(facts.size >= facts.told_size || want.from + RANGE <= facts.size)
    }

    fn through(&mut self, want: Mapping) -> Result<Option<StandIn>> {
        let file = self.file(want.node)?;
        let source = file.source.clone();
        let stand_in = match file.through.clone() {
            Some(open) => open,
            None => match source.open(true) {
                Ok(real) if Stores::of(real.as_fd())? == Stores::Elsewhere => return Ok(None),
                Ok(real) => match self.open(want.node, Kind::Through, real, true) {
                    // A truncation is under way.
                    Err(Errno::BUSY) => return Ok(None),
                    opened => opened?,
                },
                Err(errno) if is_read_only(errno) && !want.writable => return Ok(None),
                Err(errno) => return Err(errno),
            },
        };
        // Where the guard is not, the host could not execute a file that is mapped like this, and nobody would tell when
        // another file comes to share its blocks.
        let shares = || Ok(Stores::of(stand_in.real.as_fd())? == Stores::Unshared);
        if !stand_in.guarded && (shares()? || !want.writable && source.facts()?.executable) {
            if !self.is_mapped(want.node, Kind::Through) {
                self.file(want.node)?.through = None;
            }
            return Ok(None);
        }
        Ok(Some(stand_in))
    }

    fn cached(&mut self, want: Mapping) -> Result<StandIn> {
        let file = self.file(want.node)?;
        if let Some(open) = file.cached.as_ref().filter(|open| open.writable || !want.writable) {
            return Ok(open.clone());
        }
        let source = file.source.clone();
        let writable = want.writable || !source.facts()?.executable;
        match source.open(writable) {
            Err(errno) if is_read_only(errno) && !want.writable => {
                self.open(want.node, Kind::Cached, source.open(false)?, false)
            }
            real => self.open(want.node, Kind::Cached, real?, writable),
        }
    }

    fn open(&mut self, node: u64, kind: Kind, real: OwnedFd, writable: bool) -> Result<StandIn> {
        let id = self.shared.next_id();
        let opened = self.files.open(id, kind, real.as_fd()).map_err(|e| errno(&e))?;
        let (fd, real, guarded) = (Arc::new(opened.fd), Arc::new(real), opened.guarded);
        let stand_in = StandIn { id, kind, fd, real, writable, guarded };
        let file = self.known.get_mut(&node).ok_or(Errno::STALE)?;
        match kind {
            Kind::Through => file.through = Some(stand_in.clone()),
            Kind::Cached => {
                file.cached = Some(stand_in.clone());
                let copy = Copy { id, file: stand_in.fd.clone(), source: file.source.clone() };
                self.shared.copies.insert(node, copy);
            }
        }
        Ok(stand_in)
    }

    /// Maps a range that is free. A file's own pages are writable from the start, so that no later request for that need
    /// take the mapping away for a moment.
    fn put(&mut self, range: usize, want: Mapping, stand_in: &StandIn) -> Result<()> {
        let mapping = Mapping { kind: stand_in.kind, writable: stand_in.writable, ..want };
        let (at, file) = (range as u64 * RANGE, stand_in.fd.as_fd());
        if let Err(errno) = self.shared.map(DAX, at, RANGE, file, mapping.from, mapping.writable) {
            self.break_promise(mapping);
            return Err(errno);
        }
        if let Some(place) = self.ranges.get_mut(range) {
            *place = Some(Live { mapping, file: stand_in.fd.clone() });
        }
        self.file(mapping.node)?.live += 1;
        Ok(())
    }

    fn unmap(&mut self, range: usize) {
        let Some(Live { mapping, file }) = self.ranges.get_mut(range).and_then(Option::take) else { return };
        self.shared.unmap(DAX, range as u64 * RANGE, RANGE, file.as_fd(), mapping.from);
        self.break_promise(mapping);
        self.let_go(mapping.node);
    }

    fn break_promise(&self, mapping: Mapping) {
        if mapping.kind == Kind::Through && mapping.stored {
            self.shared.promises.remove(mapping.node, mapping.from);
        }
    }

    fn mapping(&self, range: usize) -> Option<Mapping> {
        self.ranges.get(range)?.as_ref().map(|live| live.mapping)
    }

    fn is_mapped(&self, node: u64, kind: Kind) -> bool {
        !self.mapped(node, kind).is_empty()
    }

    fn mapped(&self, node: u64, kind: Kind) -> Vec<(usize, Mapping)> {
        let of = |range| self.mapping(range).filter(|mapping| mapping.node == node && mapping.kind == kind);
        (0..self.ranges.len()).filter_map(|range| Some((range, of(range)?))).collect()
    }

    fn file(&mut self, node: u64) -> Result<&mut File> {
        self.known.get_mut(&node).ok_or(Errno::STALE)
    }

    /// Counts one mapping less, and with the last one closes the stand-ins.
    fn let_go(&mut self, node: u64) {
        let Ok(file) = self.file(node) else { return };
        file.live -= 1;
        if file.live == 0 {
            // A close would swallow the error.
            file.write_back();
            self.shared.copies.remove(&node);
            self.known.remove(&node);
            self.shared.nodes.remove(&node);
        }
    }

    fn reset(&mut self) {
        let live = self.shared.live(DAX).load(Ordering::Relaxed);
        if live > 0 {
            tracing::debug!("{live} mappings are dropped");
        }
        (0..self.ranges.len()).for_each(|range| self.unmap(range));
        self.revoked.clear();
        if let Some(slots) = &mut self.slots {
            slots.reset();
        }
    }

    /// Puts the proxy's own pages in place of the file's. Where that fails, the guest finds nothing there.
    fn revoke(&mut self, id: u64) {
        if let Some(slots) = &mut self.slots {
            slots.revoke(id);
        }
        let of = |file: &File| file.through.as_ref().is_some_and(|stand_in| stand_in.id == id);
        let Some((&node, _)) = self.known.iter().find(|(_, file)| of(file)) else { return };
        self.revoked.insert(node, Instant::now());
        let mapped = self.mapped(node, Kind::Through);
        tracing::debug!(node, "a truncation on the host takes {} mappings away", mapped.len());
        let Ok(file) = self.file(node) else { return };
        // Until the last mapping is there again.
        file.live += 1;
        file.through = None;
        for (range, mapping) in mapped {
            let copy = self.cached(Mapping { writable: mapping.stored, ..mapping });
            self.replace(range, mapping, copy);
        }
        self.let_go(node);
    }

    /// Puts copies in the place of ranges that the guest may store to, since it does not ask again when their blocks are gone.
    /// It makes no use of the file until it is told that they are.
    fn vacate(&mut self, node: u64, from: u64, len: u64) -> Result<()> {
        let end = from.saturating_add(len);
        let touched = |m: &Mapping| m.stored && m.from < end && from < m.from + RANGE;
        let mapped = self.mapped(node, Kind::Through).into_iter().filter(|(_, mapping)| touched(mapping));
        for (range, mapping) in mapped.collect::<Vec<_>>() {
            let copy = self.cached(Mapping { writable: true, ..mapping })?;
            self.replace(range, mapping, Ok(copy));
        }
        if !self.is_mapped(node, Kind::Through) {
            if let Ok(file) = self.file(node) {
                file.through = None;
            }
        }
        Ok(())
    }

    /// Brings the file's own pages back where a truncation has left all of a range, once it is over.
    fn restore(&mut self, node: u64) {
        if !self.known.contains_key(&node) {
            self.revoked.remove(&node);
            return;
        }
        let mapped = self.mapped(node, Kind::Cached);
        let Some((_, first)) = mapped.first() else { return };
        // Else it is not over.
        let Ok(Some(through)) = self.through(*first) else { return };
        self.revoked.remove(&node);
        if let Ok(file) = self.file(node) {
            file.write_back();
        }
        let size = self.file(node).and_then(|file| file.source.facts()).map_or(0, |facts| facts.size);
        let (whole, cut): (Vec<_>, Vec<_>) = mapped.into_iter().partition(|(_, m)| m.from + RANGE <= size);
        tracing::debug!(
            node,
            "a truncation on the host leaves {} mappings of {}",
            whole.len(),
            whole.len() + cut.len()
        );
        for (range, mapping) in whole {
            // Else the copy stays.
            if self.has_room(mapping, &through) == Ok(true) {
                self.replace(range, mapping, Ok(through.clone()));
            }
        }
        if !self.is_mapped(node, Kind::Through) {
            if let Ok(file) = self.file(node) {
                file.through = None;
            }
        }
    }

    fn replace(&mut self, range: usize, mapping: Mapping, stand_in: Result<StandIn>) {
        if let Ok(file) = self.file(mapping.node) {
            file.live += 1;
        }
        self.unmap(range);
        if let Err(errno) = stand_in.and_then(|stand_in| self.put(range, mapping, &stand_in)) {
            tracing::warn!("a mapping that lost its place cannot be replaced: {errno}");
        }
        self.let_go(mapping.node);
    }
}

/// Brings what the guest stored in a copy to its file. The kernel tells of a failure once, so it is noted here for all opens of the
/// file.
pub(super) fn write_back(copy: BorrowedFd, source: &dyn Source) {
    if let Err(e) = sys::write_back(copy) {
        source.failed(errno(&e));
    }
}

/// Whether the file cannot be opened for writing, but perhaps for reading.
fn is_read_only(errno: Errno) -> bool {
    matches!(errno, Errno::ROFS | Errno::TXTBSY | Errno::ACCESS | Errno::PERM)
}

pub(super) fn errno(e: &io::Error) -> Errno {
    Errno::from_io_error(e).unwrap_or(Errno::IO)
}
