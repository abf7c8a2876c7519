//! The thread that maps. Only this thread talks to the frontend, and it owns its state. It holds no lock while it
//! waits: the frontend changes the guest's memory then, and waits for the thread that notes the change.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::RANGE;
use super::jobs::{DaxJob, DaxMapping, Job, Jobs};
use super::proxy::{Event, Kind, errno};
use super::shared::{CachedFile, DAX, Mapping, ProxyFiles, Shared, Source, write_back};
use super::slots::Slots;
use super::space::{Stores, has_hole};
use crate::fuse::ops::Result;

/// How often to look after Cached proxy files. What the guest wrote to them must reach the host soon, since a change by
/// the host discards it. After a truncation the file's own pages must come back while the guest can take that for a
/// part of the truncation.
const TICK: Duration = Duration::from_millis(50);

/// How long after a revocation to try to bring the file's own pages back. The guard lets a truncation go on after 2 s,
/// and the window process then regards it as over.
const RESTORED_WITHIN: Duration = Duration::from_secs(5);

/// One [`RANGE`] of a file, as the DAX window has it or as the guest wants it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Chunk {
    node: u64,
    from: u64,
    kind: Kind,
    writable: bool,
    /// The guest has asked to store there. Before that it does not store, although it could.
    stored: bool,
}

/// A chunk in the window, and its proxy file.
struct Live {
    chunk: Chunk,
    file: Arc<OwnedFd>,
}

/// An open proxy file.
#[derive(Clone)]
struct ProxyFile {
    id: u64,
    kind: Kind,
    fd: Arc<OwnedFd>,
    real: Arc<OwnedFd>,
    writable: bool,
    /// Truncations by the host wait for the end of the mapping.
    guarded: bool,
}

/// A file that has mappings.
struct File {
    source: Arc<dyn Source>,
    through: Option<ProxyFile>,
    cached: Option<ProxyFile>,
    live: usize,
}

impl File {
    fn new(source: Arc<dyn Source>) -> Self {
        Self { source, through: None, cached: None, live: 0 }
    }

    /// The Cached proxy file, if the guest may have written to it.
    fn copy(&self) -> Option<&ProxyFile> {
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
    files: Arc<dyn ProxyFiles>,
    ranges: Box<[Option<Live>]>,
    /// By nodeid.
    known: HashMap<u64, File>,
    /// When nodes were revoked, if their own pages are not back yet.
    revoked: HashMap<u64, Instant>,
    /// The last time that the Cached proxy files were looked after.
    cared: Instant,
    /// Files that are mapped as a whole.
    slots: Option<Slots>,
}

impl Mapper {
    pub fn new(ranges: usize, shared: Arc<Shared>, files: Arc<dyn ProxyFiles>, slots: Option<Slots>) -> Self {
        let ranges = (0..ranges).map(|_| None).collect();
        let (known, revoked) = (HashMap::new(), HashMap::new());
        Self { shared, files, ranges, known, revoked, cared: Instant::now(), slots }
    }

    pub fn run(mut self, jobs: &Jobs) -> ! {
        loop {
            let job = jobs.next(self.patience());
            self.turn(job, Instant::now());
        }
    }

    /// Does a job, if there is one, and then what is due.
    pub fn turn(&mut self, job: Option<Job>, now: Instant) {
        self.slots.iter_mut().for_each(|slots| slots.begin(now));
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
            Job::Dax(job) => self.serve(job),
            Job::Slot(job) => {
                if let Some(slots) = &mut self.slots {
                    slots.serve(job);
                }
            }
            Job::Event(Event::Changed(id), _) => self.slots.iter_mut().for_each(|slots| slots.changed(id)),
            Job::Event(Event::Revoke(id), since) => {
                self.slots.iter_mut().for_each(|slots| slots.revoke(id, since));
                self.revoke(id);
            }
            Job::Reset => {
                self.reset();
                self.slots.iter_mut().for_each(Slots::reset);
            }
            Job::Show(to) => to(self.dax_mappings()),
        }
    }

    fn dax_mappings(&self) -> Vec<DaxMapping> {
        let mapping = |(range, live): (usize, &Option<Live>)| {
            let Chunk { node, from, kind, writable, .. } = live.as_ref()?.chunk;
            Some(DaxMapping { at: range as u64 * RANGE, node, from, writable, through: kind == Kind::Through })
        };
        self.ranges.iter().enumerate().filter_map(mapping).collect()
    }

    fn serve(&mut self, job: DaxJob) {
        match job {
            DaxJob::Map { ranges, from, writable, node, source, answer } => {
                let start = Instant::now();
                let done = self.map(ranges, from, writable, node, source);
                let live = self.shared.live(DAX).load(Ordering::Relaxed);
                tracing::trace!(node, from, live, us = start.elapsed().as_micros(), "mapped");
                answer(done.inspect_err(|errno| tracing::debug!(node, from, "not mapped: {errno}")));
            }
            DaxJob::Unmap { ranges, answer } => {
                ranges.into_iter().for_each(|range| self.unmap(range));
                answer(Ok(()));
            }
            DaxJob::Vacate { node, from, len, answer } => answer(self.vacate(node, from, len)),
        }
    }

    /// How long to wait for a job before something else is due.
    pub fn patience(&self) -> Option<Duration> {
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
        self.revoked.retain(|_, at| at.elapsed() < RESTORED_WITHIN);
    }

    fn map(
        &mut self,
        ranges: Range<usize>,
        from: u64,
        writable: bool,
        node: u64,
        source: Arc<dyn Source>,
    ) -> Result<()> {
        // Counts as a mapping, so that the file stays known between two of its mappings.
        self.known.entry(node).or_insert_with(|| File::new(source)).live += 1;
        self.shared.nodes.insert(node);
        let want = |from| Chunk { node, from, kind: Kind::Through, writable, stored: writable };
        let mut new = Vec::new();
        let done = ranges.zip((from..).step_by(RANGE as usize)).try_for_each(|(range, from)| {
            // If this fails, what the guest already has stays as it is.
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

    /// Whether the present mapping is good enough. While one mapping replaces another there is none for a moment, so it
    /// is best kept.
    fn has(&mut self, range: usize, want: Chunk) -> Result<bool> {
        let Some(have) = self.chunk(range).filter(|have| (have.node, have.from) == (want.node, want.from)) else {
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
                live.chunk.stored = true;
            }
        }
        Ok(true)
    }

    fn map_range(&mut self, range: usize, want: Chunk) -> Result<()> {
        let proxy_file = self.proxy_file(want)?;
        self.unmap(range);
        // On tmpfs, every mapping has a promise.
        let stored = proxy_file.kind == Kind::Through && self.shared.promises.has(want.node, want.from);
        self.put(range, Chunk { stored: want.stored || stored, ..want }, &proxy_file)
    }

    /// What to map for `want`: the file's own pages if that is safe.
    fn proxy_file(&mut self, want: Chunk) -> Result<ProxyFile> {
        if !self.revoked.contains_key(&want.node) {
            if let Some(through) = self.through(want)? {
                if self.is_whole(want)? && self.has_room(want, &through)? {
                    return Ok(through);
                }
            }
        }
        self.cached(want)
    }

    /// Whether the file's own pages can be mapped. If the guest may store there, the chunk then has blocks.
    fn has_room(&self, want: Chunk, through: &ProxyFile) -> Result<bool> {
        let in_memory = Stores::of(through.real.as_fd())? == Stores::Memory;
        if !want.stored && (!in_memory || has_hole(&through.real, want.from)?) {
            return Ok(!in_memory);
        }
        match self.promise(want, through) {
            Err(Errno::OPNOTSUPP) => Ok(false),
            done => done.and(Ok(true)),
        }
    }

    fn promise(&self, want: Chunk, through: &ProxyFile) -> Result<()> {
        let stores = Stores::of(through.real.as_fd())?;
        self.shared.promises.add(want.node, &through.real, stores, want.from)
    }

    /// Whether the file has all the pages that the guest may touch. Call this once the guard is active, so that the
    /// answer stays true.
    fn is_whole(&mut self, want: Chunk) -> Result<bool> {
        let facts = self.file(want.node)?.source.facts()?;
        Ok(facts.size >= facts.told_size || want.from + RANGE <= facts.size)
    }

    fn through(&mut self, want: Chunk) -> Result<Option<ProxyFile>> {
        let file = self.file(want.node)?;
        let source = file.source.clone();
        let proxy_file = match file.through.clone() {
            Some(open) => open,
            None => match source.open(true) {
                Ok(real) if Stores::of(real.as_fd())? == Stores::Elsewhere => return Ok(None),
                Ok(real) => match self.open(want.node, Kind::Through, real, true) {
                    // A truncation is in progress.
                    Err(Errno::BUSY) => return Ok(None),
                    opened => opened?,
                },
                Err(errno) if is_read_only(errno) && !want.writable => return Ok(None),
                Err(errno) => return Err(errno),
            },
        };
        // Without the guard, the host could not execute a file that is mapped in this way, and nobody would notice when
        // another file comes to share its blocks.
        let shares = || Ok(Stores::of(proxy_file.real.as_fd())? == Stores::Unshared);
        if !proxy_file.guarded && (shares()? || !want.writable && source.facts()?.executable) {
            if !self.is_mapped(want.node, Kind::Through) {
                self.file(want.node)?.through = None;
            }
            return Ok(None);
        }
        Ok(Some(proxy_file))
    }

    fn cached(&mut self, want: Chunk) -> Result<ProxyFile> {
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

    fn open(&mut self, node: u64, kind: Kind, real: OwnedFd, writable: bool) -> Result<ProxyFile> {
        let id = self.shared.next_id();
        let opened = self.files.open(id, kind, real.as_fd()).map_err(errno)?;
        let (fd, real, guarded) = (Arc::new(opened.fd), Arc::new(real), opened.guarded);
        let proxy_file = ProxyFile { id, kind, fd, real, writable, guarded };
        let file = self.known.get_mut(&node).ok_or(Errno::STALE)?;
        match kind {
            Kind::Through => file.through = Some(proxy_file.clone()),
            Kind::Cached => {
                file.cached = Some(proxy_file.clone());
                let cached = CachedFile { id, fd: proxy_file.fd.clone(), source: file.source.clone() };
                self.shared.cached.insert(node, cached);
            }
        }
        Ok(proxy_file)
    }

    /// Maps a chunk where nothing is mapped. A file's own pages are writable from the start, so that a later request to
    /// write need not replace the mapping.
    fn put(&mut self, range: usize, want: Chunk, proxy_file: &ProxyFile) -> Result<()> {
        let chunk = Chunk { kind: proxy_file.kind, writable: proxy_file.writable, ..want };
        let file = proxy_file.fd.as_fd();
        if let Err(errno) = self.shared.map(&Mapping::dax(range, file, chunk.from, chunk.writable)) {
            self.break_promise(chunk);
            return Err(errno);
        }
        if let Some(place) = self.ranges.get_mut(range) {
            *place = Some(Live { chunk, file: proxy_file.fd.clone() });
        }
        self.file(chunk.node)?.live += 1;
        Ok(())
    }

    fn unmap(&mut self, range: usize) {
        let Some(Live { chunk, file }) = self.ranges.get_mut(range).and_then(Option::take) else { return };
        self.shared.unmap(&Mapping::dax(range, file.as_fd(), chunk.from, chunk.writable));
        self.break_promise(chunk);
        self.let_go(chunk.node);
    }

    fn break_promise(&self, chunk: Chunk) {
        if chunk.kind == Kind::Through && chunk.stored {
            self.shared.promises.remove(chunk.node, chunk.from);
        }
    }

    fn chunk(&self, range: usize) -> Option<Chunk> {
        self.ranges.get(range)?.as_ref().map(|live| live.chunk)
    }

    fn is_mapped(&self, node: u64, kind: Kind) -> bool {
        !self.mapped(node, kind).is_empty()
    }

    fn mapped(&self, node: u64, kind: Kind) -> Vec<(usize, Chunk)> {
        let of = |range| self.chunk(range).filter(|chunk| chunk.node == node && chunk.kind == kind);
        (0..self.ranges.len()).filter_map(|range| Some((range, of(range)?))).collect()
    }

    fn file(&mut self, node: u64) -> Result<&mut File> {
        self.known.get_mut(&node).ok_or(Errno::STALE)
    }

    /// Counts one mapping less. After the last one, closes the proxy files.
    fn let_go(&mut self, node: u64) {
        let Ok(file) = self.file(node) else { return };
        file.live -= 1;
        if file.live == 0 {
            // A close would not report the error.
            file.write_back();
            self.shared.cached.remove(&node);
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
    }

    /// Replaces the Through mappings of a file by Cached ones. Where that fails, nothing is mapped.
    fn revoke(&mut self, id: u64) {
        let of = |file: &File| file.through.as_ref().is_some_and(|proxy_file| proxy_file.id == id);
        let Some((&node, _)) = self.known.iter().find(|(_, file)| of(file)) else { return };
        self.revoked.insert(node, Instant::now());
        let mapped = self.mapped(node, Kind::Through);
        tracing::debug!(node, "a truncation on the host revokes {} mappings", mapped.len());
        self.shared.revocations.fetch_add(mapped.len() as u64, Ordering::Relaxed);
        let Ok(file) = self.file(node) else { return };
        // Counts as a mapping until the last one is replaced.
        file.live += 1;
        file.through = None;
        for (range, chunk) in mapped {
            let copy = self.cached(Chunk { writable: chunk.stored, ..chunk });
            self.replace(range, chunk, copy);
        }
        self.let_go(node);
    }

    /// Replaces by Cached mappings the chunks that the guest may store to. It does not ask again after their blocks are
    /// gone, and it does not use the file until the request that takes them is answered.
    fn vacate(&mut self, node: u64, from: u64, len: u64) -> Result<()> {
        let end = from.saturating_add(len);
        let touched = |m: &Chunk| m.stored && m.from < end && from < m.from + RANGE;
        let mapped = self.mapped(node, Kind::Through).into_iter().filter(|(_, chunk)| touched(chunk));
        for (range, chunk) in mapped.collect::<Vec<_>>() {
            let copy = self.cached(Chunk { writable: true, ..chunk })?;
            self.replace(range, chunk, Ok(copy));
        }
        if !self.is_mapped(node, Kind::Through) {
            if let Ok(file) = self.file(node) {
                file.through = None;
            }
        }
        Ok(())
    }

    /// Brings the file's own pages back once a truncation is over, for chunks that it left whole.
    fn restore(&mut self, node: u64) {
        if !self.known.contains_key(&node) {
            self.revoked.remove(&node);
            return;
        }
        let mapped = self.mapped(node, Kind::Cached);
        let Some((_, first)) = mapped.first() else { return };
        // It fails while the truncation is in progress.
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
        for (range, chunk) in whole {
            // If there is no room, the Cached mapping stays.
            if self.has_room(chunk, &through) == Ok(true) {
                self.replace(range, chunk, Ok(through.clone()));
            }
        }
        if !self.is_mapped(node, Kind::Through) {
            if let Ok(file) = self.file(node) {
                file.through = None;
            }
        }
    }

    fn replace(&mut self, range: usize, chunk: Chunk, proxy_file: Result<ProxyFile>) {
        if let Ok(file) = self.file(chunk.node) {
            file.live += 1;
        }
        self.unmap(range);
        if let Err(errno) = proxy_file.and_then(|proxy_file| self.put(range, chunk, &proxy_file)) {
            tracing::warn!("nothing is mapped in place of a mapping: {errno}");
        }
        self.let_go(chunk.node);
    }
}

/// Whether this is an error of opening for writing that opening for reading may not have.
fn is_read_only(errno: Errno) -> bool {
    matches!(errno, Errno::ROFS | Errno::TXTBSY | Errno::ACCESS | Errno::PERM)
}
