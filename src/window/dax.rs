//! The DAX window: which part of which file is mapped where. Host processes take files back from it ([`Dax::revoke`]).
//!
//! Methods of [`Dax`] wait for no file. Those of a [`Turn`] may: the state is another one afterwards, so each looks
//! again at what it relies on.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;

use super::frontend::{CachedFile, Closing, Mapping, ProxyFiles, Shared, Source};
use super::jobs::{DaxJob, DaxMapping, Jobs, NodeJob, ResumedRange};
use super::layout::{DAX, RANGE};
use super::proxy::{Kind, errno};
use super::reservation::{Reservations, Stores, has_hole};
use super::turn::{MayWait, Slow, Turn};
use crate::fuse::ops::Result;
use crate::record::{self, Cell, FoundMapping, Standing};

/// How often to look after Cached proxy files. What the guest wrote to them must reach the host soon, since a change by
/// the host discards it. After a truncation the file's own pages must come back while the guest can take that for a
/// part of the truncation.
const TICK: Duration = Duration::from_millis(50);

/// How long after a revocation to try to bring the file's own pages back. The guard lets a truncation go on after 2 s,
/// and the window process then regards it as over.
const RESTORED_WITHIN: Duration = Duration::from_secs(5);

/// How often to look for something to map if revocations come in between: after the first one it is a Cached proxy
/// file, which is not taken back.
const TRIES: usize = 3;

/// One [`RANGE`] of a file, as the DAX window has it or as the guest wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Chunk {
    node: u64,
    from: u64,
    kind: Kind,
    writable: bool,
    /// The guest has asked to store there. Before that it does not store, although it could.
    stored: bool,
}

/// A chunk in the window.
struct Live {
    chunk: Chunk,
    /// The number of its proxy file.
    id: u64,
    /// What the next worker process finds of it.
    cell: Cell,
    /// Its proxy file. None if nothing is mapped: the file's own pages were taken back, and a Cached proxy file is not
    /// there yet.
    file: Option<Arc<OwnedFd>>,
}

/// An open proxy file.
#[derive(Clone)]
struct ProxyFile {
    id: u64,
    kind: Kind,
    fd: Arc<OwnedFd>,
    real: Arc<OwnedFd>,
    stores: Stores,
    writable: bool,
    /// Truncations by the host wait for the end of the mapping.
    guarded: bool,
    /// A host process had taken it back before this process began.
    left: bool,
}

/// A file that has mappings.
struct File {
    source: Slow<dyn Source>,
    through: Option<ProxyFile>,
    cached: Option<ProxyFile>,
    /// The Through proxy file that is being opened. None if a host process took it back meanwhile.
    opening: Option<u64>,
    live: usize,
}

impl File {
    fn new(source: Arc<dyn Source>) -> Self {
        Self { source: Slow::new(source), through: None, cached: None, opening: None, live: 0 }
    }

    /// The Cached proxy file, if the guest may have written to it.
    fn copy(&self) -> Option<CachedFile> {
        let copy = self.cached.as_ref().filter(|copy| copy.writable)?;
        Some(CachedFile { id: copy.id, fd: copy.fd.clone(), source: self.source.clone() })
    }

    /// The Cached proxy file, if it is good enough.
    fn cached(&self, writable: bool) -> Option<ProxyFile> {
        self.cached.clone().filter(|open| open.writable || !writable)
    }
}

/// What another process has left of a range, and its file if the guest knows it still.
pub struct Left(pub FoundMapping, pub Option<Arc<dyn Source>>);

/// How a [`record::Range`] names a proxy file.
const fn recorded_id(id: u64, kind: Kind) -> u64 {
    2 * id + matches!(kind, Kind::Cached) as u64
}

fn recorded(range: usize, chunk: Chunk, id: u64) -> record::Range {
    let Chunk { node, from, kind, writable, stored } = chunk;
    record::Range { number: range as u32, node, from, proxy: recorded_id(id, kind), writable, stored }
}

/// A file that a host process has taken back.
struct Revoked {
    /// Its own pages are not back yet.
    since: Instant,
    /// Whether they may be mapped still, until a Cached proxy file is there.
    leaving: bool,
}

pub struct Dax {
    shared: Arc<Shared>,
    files: Slow<dyn ProxyFiles>,
    jobs: Arc<Jobs>,
    ranges: Box<[Option<Live>]>,
    /// By nodeid.
    known: HashMap<u64, File>,
    revoked: HashMap<u64, Revoked>,
    /// How long a Cached proxy file may take to be there.
    patience: Duration,
    /// The last time that the Cached proxy files were looked after.
    cared: Instant,
    /// Counts resets.
    session: u64,
    closing: Closing,
    /// What another process has left and [`finish_takeover`](Self::finish_takeover) has yet to put in order. `None`:
    /// nothing.
    unfinished: Option<Unfinished>,
}

#[derive(Default)]
struct Unfinished {
    /// Ranges of which the frontend may have mappings that the guest does not know of.
    loose: BTreeMap<usize, Cell>,
    /// Proxy files that host processes have taken back.
    revoked: Vec<u64>,
    /// Nodes with ranges that were being replaced.
    torn: BTreeSet<u64>,
}

impl Dax {
    /// `patience`: how long a host process may wait for the end of a mapping.
    pub fn new(
        ranges: usize,
        shared: Arc<Shared>,
        files: Slow<dyn ProxyFiles>,
        jobs: Arc<Jobs>,
        patience: Duration,
    ) -> Self {
        let ranges = (0..ranges).map(|_| None).collect();
        let (known, revoked, cared, session) = (HashMap::new(), HashMap::new(), Instant::now(), 0);
        let (closing, unfinished) = Default::default();
        Self { shared, files, jobs, ranges, known, revoked, patience, cared, session, closing, unfinished }
    }

    /// Takes over what another process has left. What the frontend has for sure stays as it is: the guest uses it all
    /// the time. The rest is for [`finish_takeover`](Self::finish_takeover).
    pub fn take_over(&mut self, left: Vec<Left>) {
        let mut unfinished = Unfinished::default();
        let (mut found, wait) = (HashMap::new(), MayWait::without_a_turn());
        let files = self.files.clone();
        for Left(FoundMapping { cell, range, standing }, source) in left {
            let number = range.number as usize;
            let is_free = self.ranges.get(number).is_some_and(Option::is_none);
            let Some(source) = source.filter(|_| is_free && standing != Standing::Loose) else {
                if number < self.ranges.len() {
                    unfinished.loose.insert(number, cell).into_iter().for_each(|cell| cell.free());
                } else {
                    cell.free();
                }
                continue;
            };
            let (id, kind) = (range.proxy / 2, if range.proxy % 2 == 0 { Kind::Through } else { Kind::Cached });
            let chunk =
                Chunk { node: range.node, from: range.from, kind, writable: range.writable, stored: range.stored };
            let file = self.known.entry(chunk.node).or_insert_with(|| File::new(source));
            file.live += 1;
            self.shared.nodes.insert(chunk.node);
            let proxy_file = (standing == Standing::There)
                .then(|| found.entry(range.proxy).or_insert_with(|| find(files.get(&wait), id, kind, chunk)).clone())
                .flatten();
            let Some(proxy_file) = proxy_file else {
                // Nobody has asked to store there in a Cached one, which is as good.
                cell.set_standing(Standing::Changing);
                unfinished.torn.insert(chunk.node);
                self.ranges[number] =
                    Some(Live { chunk: Chunk { kind: Kind::Through, ..chunk }, id, cell, file: None });
                continue;
            };
            self.shared.live(DAX).fetch_add(1, Ordering::Relaxed);
            if kind == Kind::Through && chunk.stored {
                self.shared.reservations.add_again(chunk.node, &proxy_file.real, proxy_file.stores, chunk.from);
            }
            let open = if kind == Kind::Through { &mut file.through } else { &mut file.cached };
            let fd = proxy_file.fd.clone();
            if open.as_ref().is_none_or(|open| open.id < id) {
                *open = Some(proxy_file);
            }
            if let Some(copy) = file.copy().filter(|copy| copy.id == id) {
                self.shared.cached.insert(chunk.node, copy);
            }
            self.ranges[number] = Some(Live { chunk, id, cell, file: Some(fd) });
        }
        unfinished.revoked.extend(found.values().flatten().filter(|file| file.left).map(|file| file.id));
        let live = self.shared.live(DAX).load(Ordering::Relaxed);
        let Unfinished { loose, revoked, torn } = &unfinished;
        tracing::debug!(
            "{live} mappings stay, {} files are torn, {} revoked, {} ranges loose",
            torn.len(),
            revoked.len(),
            loose.len()
        );
        self.unfinished = Some(unfinished);
    }

    /// There is a frontend again. Puts in order what another process has left unfinished.
    pub fn finish_takeover(&mut self, since: Instant) {
        let Some(Unfinished { loose, revoked, torn }) = self.unfinished.take() else { return };
        for (range, cell) in loose {
            if self.shared.clear(range).is_ok() {
                cell.free();
            }
        }
        revoked.into_iter().for_each(|id| self.revoke(id, since));
        torn.into_iter().for_each(|node| self.jobs.send(DaxJob::Node(NodeJob::Mend, node)));
    }

    pub fn mappings(&self) -> Vec<DaxMapping> {
        let mapping = |(range, live): (usize, &Option<Live>)| {
            let Chunk { node, from, kind, writable, stored } = live.as_ref()?.chunk;
            Some(DaxMapping { at: range as u64 * RANGE, node, from, writable, stored, through: kind == Kind::Through })
        };
        self.ranges.iter().enumerate().filter_map(mapping).collect()
    }

    /// How long the mapper may wait for a job before it must call [`look`](Self::look).
    pub fn patience(&self) -> Option<Duration> {
        let care = self.needs_care().then(|| TICK.saturating_sub(self.cared.elapsed()));
        let leaving = self.revoked.values().filter(|revoked| revoked.leaving);
        let leaving = leaving.map(|revoked| self.patience.saturating_sub(revoked.since.elapsed()));
        care.into_iter().chain(leaving).min()
    }

    fn needs_care(&self) -> bool {
        !self.revoked.is_empty() || self.known.values().any(|file| file.copy().is_some())
    }

    /// Does what is due.
    pub fn look(&mut self) {
        let patience = self.patience;
        let late = |(node, revoked): (&u64, &Revoked)| {
            (revoked.leaving && revoked.since.elapsed() >= patience).then_some(*node)
        };
        let late: Vec<u64> = self.revoked.iter().filter_map(late).collect();
        late.into_iter().for_each(|node| self.give_up(node));
        if self.needs_care() && self.cared.elapsed() >= TICK {
            self.cared = Instant::now();
            let copies = self.known.iter().filter(|(_, file)| file.copy().is_some()).map(|(node, _)| *node);
            let nodes = copies.chain(self.revoked.keys().copied());
            nodes.for_each(|node| self.jobs.send(DaxJob::Node(NodeJob::Care, node)));
            self.revoked.retain(|_, revoked| revoked.since.elapsed() < RESTORED_WITHIN);
        }
        self.jobs.close(&mut self.closing);
    }

    /// The proxy file that is open is still to be mapped.
    fn is_current(&self, node: u64, proxy_file: &ProxyFile) -> bool {
        let of = |file: &File| match proxy_file.kind {
            Kind::Through => file.through.as_ref().map(|open| open.id),
            Kind::Cached => file.cached.as_ref().map(|open| open.id),
        };
        self.known.get(&node).and_then(of) == Some(proxy_file.id)
    }

    /// Maps a chunk where nothing is mapped. A file's own pages are writable from the start, so that a later request to
    /// write need not replace the mapping.
    /// `cell`: what is recorded of what was there, if the guest relies on it.
    fn put(&mut self, range: usize, want: Chunk, proxy_file: &ProxyFile, mut cell: Cell) -> Result<()> {
        let chunk = Chunk { kind: proxy_file.kind, writable: proxy_file.writable, ..want };
        let (file, new) = (proxy_file.fd.as_fd(), recorded(range, chunk, proxy_file.id));
        match record::get() {
            Some(record) if cell.is_empty() => cell = record.range(&new, Standing::Loose),
            _ => cell.set_range(&new),
        }
        record::step("recorded");
        if let Err(errno) = self.shared.map(&Mapping::dax(range, file, chunk.from, chunk.writable)) {
            self.release(chunk);
            cell.free();
            return Err(errno);
        }
        record::step("mapped");
        cell.set_standing(Standing::There);
        record::step("there");
        if let Some(place) = self.ranges.get_mut(range) {
            *place = Some(Live { chunk, id: proxy_file.id, cell, file: Some(proxy_file.fd.clone()) });
        }
        self.file(chunk.node)?.live += 1;
        Ok(())
    }

    fn unmap(&mut self, range: usize) {
        self.take_away(range, Standing::Loose).free();
    }

    /// Unmaps a range. Returns what is recorded of it. `standing`: what comes of it.
    fn take_away(&mut self, range: usize, standing: Standing) -> Cell {
        let Some(Live { chunk, cell, file, .. }) = self.ranges.get_mut(range).and_then(Option::take) else {
            return Cell::default();
        };
        cell.set_standing(standing);
        record::step("going");
        if let Some(file) = file {
            self.shared.unmap(&Mapping::dax(range, file.as_fd(), chunk.from, chunk.writable));
            self.closing.files.push(Slow::new(file));
        }
        record::step("unmapped");
        self.release(chunk);
        self.let_go(chunk.node);
        cell
    }

    fn release(&self, chunk: Chunk) {
        if chunk.kind == Kind::Through && chunk.stored {
            self.shared.reservations.remove(chunk.node, chunk.from);
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
            self.forget(node);
        }
    }

    fn forget(&mut self, node: u64) {
        let Some(file) = self.known.remove(&node) else { return };
        self.shared.nodes.remove(&node);
        match file.copy() {
            Some(copy) => self.closing.copies.push((node, copy)),
            None => drop(self.shared.cached.remove(&node)),
        }
        file.through.into_iter().chain(file.cached).for_each(|open| self.spent(open));
    }

    /// A proxy file is of no use any more.
    fn spent(&mut self, proxy_file: ProxyFile) {
        let ProxyFile { kind, fd, real, writable, .. } = proxy_file;
        self.closing.files.push(Slow::new(real));
        // What may have stores in it is among `copies`.
        self.closing.files.extend(Some(Slow::new(fd)).filter(|_| kind == Kind::Through || !writable));
    }

    /// No Through proxy file is open any more, except as far as it is mapped.
    fn close_through(&mut self, node: u64) {
        let Ok(file) = self.file(node) else { return };
        file.through.take().into_iter().for_each(|through| self.spent(through));
    }

    pub fn reset(&mut self) {
        let live = self.shared.live(DAX).load(Ordering::Relaxed);
        if live > 0 {
            tracing::debug!("{live} mappings are dropped");
        }
        (0..self.ranges.len()).for_each(|range| self.unmap(range));
        // A worker may be about to map more of them.
        let nodes: Vec<u64> = self.known.keys().copied().collect();
        nodes.into_iter().for_each(|node| self.forget(node));
        self.revoked.clear();
        self.unfinished.take().into_iter().flat_map(|left| left.loose).for_each(|(_, cell)| cell.free());
        self.session += 1;
        self.jobs.close(&mut self.closing);
    }

    /// Has the Through mappings of a file replaced by Cached ones.
    pub fn revoke(&mut self, id: u64, since: Instant) {
        if let Some(unfinished) = &mut self.unfinished {
            // There is no frontend yet.
            return unfinished.revoked.push(id);
        }
        let of = |file: &File| {
            file.opening == Some(id) || file.through.as_ref().is_some_and(|proxy_file| proxy_file.id == id)
        };
        let Some((&node, _)) = self.known.iter().find(|(_, file)| of(file)) else { return };
        let mapped = self.mapped(node, Kind::Through);
        tracing::debug!(node, "a truncation on the host revokes {} mappings", mapped.len());
        self.shared.revocations.fetch_add(mapped.len() as u64, Ordering::Relaxed);
        self.close_through(node);
        let Ok(file) = self.file(node) else { return };
        file.opening = None;
        self.revoked.insert(node, Revoked { since, leaving: !mapped.is_empty() });
        if !mapped.is_empty() {
            let writable = mapped.iter().any(|(_, chunk)| chunk.stored);
            match self.known.get(&node).and_then(|file| file.cached(writable)) {
                Some(copy) => self.give_way(node, Ok(copy)),
                None => self.jobs.send(DaxJob::Node(NodeJob::Copy, node)),
            }
        }
        self.jobs.close(&mut self.closing);
    }

    /// Replaces the file's own pages by a Cached proxy file. Where that fails, nothing is mapped.
    fn give_way(&mut self, node: u64, copy: Result<ProxyFile>) {
        for (range, chunk) in self.mapped(node, Kind::Through) {
            self.replace(range, chunk, copy.clone());
        }
        if let Some(revoked) = self.revoked.get_mut(&node) {
            revoked.leaving = false;
        }
    }

    /// There is no Cached proxy file yet, and the host process has waited long enough.
    fn give_up(&mut self, node: u64) {
        tracing::warn!(node, "nothing is mapped in place of a truncated file yet");
        for (range, _) in self.mapped(node, Kind::Through) {
            let Some(live) = self.ranges.get_mut(range).and_then(Option::as_mut) else { continue };
            let (chunk, file) = (live.chunk, live.file.take());
            live.cell.set_standing(Standing::Changing);
            if let Some(file) = file {
                self.shared.unmap(&Mapping::dax(range, file.as_fd(), chunk.from, chunk.writable));
                self.closing.files.push(Slow::new(file));
            }
        }
        if let Some(revoked) = self.revoked.get_mut(&node) {
            revoked.leaving = false;
        }
    }

    fn replace(&mut self, range: usize, chunk: Chunk, proxy_file: Result<ProxyFile>) {
        if let Ok(file) = self.file(chunk.node) {
            file.live += 1;
        }
        let cell = self.take_away(range, Standing::Changing);
        let put =
            proxy_file.inspect_err(|_| cell.free()).and_then(|proxy_file| self.put(range, chunk, &proxy_file, cell));
        put.unwrap_or_else(|errno| tracing::warn!("nothing is mapped in place of a mapping: {errno}"));
        self.let_go(chunk.node);
    }
}

impl Turn<'_, Dax> {
    pub fn serve(&mut self, job: DaxJob) {
        match job {
            DaxJob::Map { ranges, from, writable, node, source, answer } => {
                let start = Instant::now();
                let done = self.map(ranges, from, writable, node, source);
                let live = self.shared.live(DAX).load(Ordering::Relaxed);
                tracing::trace!(node, from, live, us = start.elapsed().as_micros(), "mapped");
                let done = done.inspect_err(|errno| tracing::debug!(node, from, "not mapped: {errno}"));
                self.unlocked(|_| answer(done));
            }
            DaxJob::Unmap { ranges, answer } => {
                ranges.into_iter().for_each(|range| self.unmap(range));
                self.close();
                answer(Ok(()));
            }
            DaxJob::Resume { ranges, strict, answer } => {
                let resumed = self.resume(ranges, strict);
                self.unlocked(|_| answer(resumed));
            }
            DaxJob::Vacate { node, from, len, all, answer } => {
                let vacated = self.vacate(node, from, len, all);
                answer(vacated);
            }
            DaxJob::Node(NodeJob::Mend, node) => self.mend(node),
            DaxJob::Node(NodeJob::Copy, node) => self.copy(node),
            DaxJob::Node(NodeJob::Care, node) => self.care(node),
        }
        self.close();
    }

    /// Closes what is no longer needed.
    fn close(&mut self) {
        let closing = std::mem::take(&mut self.closing);
        if !closing.is_empty() {
            let cached = self.shared.cached.clone();
            self.unlocked(|wait| closing.close(&cached, wait));
        }
    }

    /// Runs what may wait for a file.
    ///
    /// # Errors
    /// Those of `run`; ESTALE if the session has ended meanwhile.
    fn wait<R>(&mut self, run: impl FnOnce(&MayWait) -> Result<R>) -> Result<R> {
        let session = self.session;
        let done = self.unlocked(run);
        if self.session == session {
            return done;
        }
        // It may have opened files.
        self.unlocked(|_| drop(done));
        Err(Errno::STALE)
    }

    fn map(
        &mut self,
        ranges: Range<usize>,
        from: u64,
        writable: bool,
        node: u64,
        source: Arc<dyn Source>,
    ) -> Result<()> {
        let session = self.session;
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
        if self.session != session {
            // The node may be known again, to another session.
            return Err(Errno::STALE);
        }
        if done.is_err() {
            new.retain(|range| self.chunk(*range).is_some_and(|chunk| chunk.node == node));
            new.into_iter().for_each(|range| self.unmap(range));
        }
        self.let_go(node);
        done
    }

    /// Maps what the guest of another daemon believes to be mapped.
    ///
    /// # Errors
    /// Why a range cannot be mapped; if not `strict`, why not even zeros can be.
    fn resume(&mut self, ranges: Vec<ResumedRange>, strict: bool) -> Result<()> {
        for ResumedRange { range, node, from, stored, source } in ranges {
            if let Err(errno) = self.map(range..range + 1, from, stored, node, source.clone()) {
                tracing::warn!(node, from, "a part of a file cannot be mapped for a guest that has moved: {errno}");
                if strict {
                    return Err(errno);
                }
                self.map_zeros(range, Chunk { node, from, kind: Kind::Cached, writable: true, stored }, source)?;
            }
        }
        Ok(())
    }

    /// Maps zeros for a file that is gone.
    fn map_zeros(&mut self, range: usize, chunk: Chunk, source: Arc<dyn Source>) -> Result<()> {
        let zeros = memfd_create("thruway-zeros", MemfdFlags::CLOEXEC)?;
        ftruncate(&zeros, chunk.from.saturating_add(RANGE))?;
        let (fd, id) = (Arc::new(zeros), self.shared.next_id());
        let (real, stores) = (fd.clone(), Stores::Elsewhere);
        // Counts as a mapping until there is one.
        self.known.entry(chunk.node).or_insert_with(|| File::new(source)).live += 1;
        self.shared.nodes.insert(chunk.node);
        let (writable, guarded, left) = (true, false, false);
        let zeros = ProxyFile { id, kind: Kind::Cached, fd, real, stores, writable, guarded, left };
        let done = self.put(range, chunk, &zeros, Cell::default());
        self.let_go(chunk.node);
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
                let reservations = self.shared.reservations.clone();
                let reserved = self.wait(|_| reservations.add(want.node, &through.real, through.stores, want.from));
                if self.chunk(range) != Some(have) || !self.is_current(want.node, &through) {
                    // It was taken back meanwhile.
                    self.shared.reservations.remove(want.node, want.from);
                    self.spent(through);
                    return reserved.and(Ok(false));
                }
                match reserved {
                    Err(Errno::OPNOTSUPP) => return Ok(false),
                    done => done?,
                }
            }
            if let Some(Some(live)) = self.ranges.get_mut(range) {
                live.chunk.stored = true;
                live.cell.set_range(&recorded(range, live.chunk, live.id));
            }
        }
        Ok(true)
    }

    fn map_range(&mut self, range: usize, want: Chunk) -> Result<()> {
        for _ in 0..TRIES {
            let proxy_file = self.proxy_file(want)?;
            // On tmpfs, every mapping has a reservation.
            let stored = proxy_file.kind == Kind::Through && self.shared.reservations.has(want.node, want.from);
            let chunk = Chunk { stored: want.stored || stored, ..want };
            if self.is_current(want.node, &proxy_file) {
                self.unmap(range);
                return self.put(range, chunk, &proxy_file, Cell::default());
            }
            // It was taken back meanwhile.
            self.release(Chunk { kind: proxy_file.kind, ..chunk });
            self.spent(proxy_file);
        }
        Err(Errno::AGAIN)
    }

    /// What to map for `want`: the file's own pages if that is safe. Then, if the guest may store there, the chunk has
    /// blocks.
    fn proxy_file(&mut self, want: Chunk) -> Result<ProxyFile> {
        if !self.revoked.contains_key(&want.node) {
            if let Some(through) = self.through(want)? {
                let (source, reservations) = (self.file(want.node)?.source.clone(), self.shared.reservations.clone());
                let (of, past_end) = (through.clone(), self.shared.larger_pages.load(Ordering::Relaxed));
                let suits = self.wait(move |wait| {
                    Ok(is_whole(source.get(wait), want, past_end)? && has_room(&reservations, want, &of)?)
                });
                if suits? {
                    return Ok(through);
                }
            }
        }
        self.cached(want)
    }

    fn through(&mut self, want: Chunk) -> Result<Option<ProxyFile>> {
        let file = self.file(want.node)?;
        let source = file.source.clone();
        let proxy_file = match file.through.clone() {
            Some(open) => open,
            None => match self.open_through(want, source.clone()) {
                Ok(Some(open)) => open,
                // A truncation is in progress.
                Ok(None) | Err(Errno::BUSY) => return Ok(None),
                Err(errno) => return Err(errno),
            },
        };
        // Without the guard, the host could not execute a file that is mapped in this way, and nobody would notice when
        // another file comes to share its blocks.
        let mut unsafe_without = !proxy_file.guarded && proxy_file.stores == Stores::Unshared;
        if !proxy_file.guarded && !unsafe_without && !want.writable {
            unsafe_without = self.wait(|wait| Ok(source.get(wait).facts()?.executable))?;
        }
        if unsafe_without {
            if !self.is_mapped(want.node, Kind::Through) {
                self.close_through(want.node);
            }
            return Ok(None);
        }
        Ok(Some(proxy_file))
    }

    /// `None` if the file's own pages cannot be mapped.
    fn open_through(&mut self, want: Chunk, source: Slow<dyn Source>) -> Result<Option<ProxyFile>> {
        let (id, files) = (self.shared.next_id(), self.files.clone());
        self.file(want.node)?.opening = Some(id);
        let opened = self.wait(move |wait| {
            let real = match source.get(wait).open(true) {
                Ok(real) => real,
                Err(errno) if is_read_only(errno) && !want.writable => return Ok(None),
                Err(errno) => return Err(errno),
            };
            let stores = Stores::of(real.as_fd())?;
            match stores {
                Stores::Elsewhere => Ok(None),
                _ => open(files.get(wait), id, Kind::Through, (real, stores), true).map(Some),
            }
        });
        let file = self.file(want.node)?;
        let is_wanted = file.opening.take() == Some(id);
        let Some(opened) = opened? else { return Ok(None) };
        if is_wanted {
            file.through = Some(opened.clone());
            return Ok(Some(opened));
        }
        self.spent(opened);
        Ok(None)
    }

    fn cached(&mut self, want: Chunk) -> Result<ProxyFile> {
        let file = self.file(want.node)?;
        if let Some(open) = file.cached(want.writable) {
            return Ok(open);
        }
        let (source, id, files) = (file.source.clone(), self.shared.next_id(), self.files.clone());
        let of = source.clone();
        let opened = self.wait(move |wait| {
            let source = of.get(wait);
            let writable = want.writable || !source.facts()?.executable;
            let (real, writable) = match source.open(writable) {
                Err(errno) if is_read_only(errno) && !want.writable => (source.open(false)?, false),
                real => (real?, writable),
            };
            open(files.get(wait), id, Kind::Cached, (real, Stores::Elsewhere), writable)
        })?;
        let file = self.file(want.node)?;
        if let Some(open) = file.cached(want.writable) {
            // Another worker was faster. Nothing was written to this one.
            self.closing.files.extend([opened.fd, opened.real].map(Slow::new));
            return Ok(open);
        }
        let before = file.cached.replace(opened.clone());
        before.into_iter().for_each(|before| self.spent(before));
        self.shared.cached.insert(want.node, CachedFile { id, fd: opened.fd.clone(), source });
        Ok(opened)
    }

    /// Another process has ended while it replaced mappings of this node, which have no file here. They get a Cached
    /// proxy file, as a file's own pages would be wrong after a truncation.
    fn mend(&mut self, node: u64) {
        let torn = |live: &Live| live.chunk.node == node && live.file.is_none();
        let is_torn = |range: &usize| self.ranges[*range].as_ref().is_some_and(torn);
        let torn: Vec<_> = (0..self.ranges.len()).filter(is_torn).filter_map(|r| Some((r, self.chunk(r)?))).collect();
        let Some((_, first)) = torn.first() else { return };
        let writable = torn.iter().any(|(_, chunk)| chunk.stored);
        let (session, copy) = (self.session, self.cached(Chunk { writable, ..*first }));
        for (range, chunk) in torn {
            let still = self.ranges[range].as_ref().is_some_and(|live| live.chunk == chunk && live.file.is_none());
            if still && self.session == session {
                self.replace(range, chunk, copy.clone());
            }
        }
    }

    /// A Cached proxy file takes the place of a file's own pages.
    fn copy(&mut self, node: u64) {
        let Some(file) = self.known.get_mut(&node) else { return };
        // Counts as a mapping until the last one is replaced.
        file.live += 1;
        let session = self.session;
        let mapped = self.mapped(node, Kind::Through);
        let writable = mapped.iter().any(|(_, chunk)| chunk.stored);
        let copy = match mapped.first() {
            Some((_, first)) => self.cached(Chunk { writable, ..*first }),
            None => Err(Errno::STALE),
        };
        if self.session == session {
            self.give_way(node, copy);
            self.let_go(node);
        }
    }

    fn care(&mut self, node: u64) {
        if let Some(copy) = self.known.get(&node).and_then(File::copy) {
            let _ = self.unlocked(move |wait| copy.write_back(wait));
        }
        if self.revoked.get(&node).is_some_and(|revoked| !revoked.leaving) {
            // What cannot be brought back now is tried again.
            let _ = self.restore(node);
        }
    }

    /// Replaces by Cached mappings the chunks that the guest may store to, or all. It does not ask again after their
    /// blocks are gone, and it does not use the file until the request that takes them is answered.
    fn vacate(&mut self, node: u64, from: u64, len: u64, all: bool) -> Result<()> {
        let end = from.saturating_add(len);
        let touched = |m: &Chunk| (all || m.stored) && m.from < end && from < m.from + RANGE;
        for (range, chunk) in self.mapped(node, Kind::Through) {
            if !touched(&chunk) {
                continue;
            }
            let copy = self.cached(Chunk { writable: chunk.stored, ..chunk })?;
            if self.chunk(range) == Some(chunk) {
                self.replace(range, chunk, Ok(copy));
            }
        }
        if !self.is_mapped(node, Kind::Through) {
            self.close_through(node);
        }
        Ok(())
    }

    /// Brings the file's own pages back once a truncation is over, for chunks that it left whole.
    ///
    /// # Errors
    /// Why that cannot be done now.
    fn restore(&mut self, node: u64) -> Result<()> {
        if !self.known.contains_key(&node) {
            self.revoked.remove(&node);
            return Ok(());
        }
        let mapped = self.mapped(node, Kind::Cached);
        let Some((_, first)) = mapped.first() else { return Ok(()) };
        // It fails while the truncation is in progress.
        let Some(through) = self.through(*first)? else { return Ok(()) };
        self.revoked.remove(&node);
        let file = self.file(node)?;
        let (source, copy) = (file.source.clone(), file.copy());
        let size = self.wait(move |wait| {
            let _ = copy.map(|copy| copy.write_back(wait));
            Ok(source.get(wait).facts()?.size)
        })?;
        let (whole, cut): (Vec<_>, Vec<_>) = mapped.into_iter().partition(|(_, m)| m.from + RANGE <= size);
        let (left, all) = (whole.len(), whole.len() + cut.len());
        tracing::debug!(node, "a truncation on the host leaves {left} mappings of {all}");
        for (range, chunk) in whole {
            let (reservations, of) = (self.shared.reservations.clone(), through.clone());
            // If there is no room, the Cached mapping stays.
            let has_room = self.wait(move |_| has_room(&reservations, chunk, &of))?;
            // On tmpfs, every mapping has a reservation.
            let stored = chunk.stored || self.shared.reservations.has(node, chunk.from);
            if has_room && self.chunk(range) == Some(chunk) && self.is_current(node, &through) {
                self.replace(range, Chunk { stored, ..chunk }, Ok(through.clone()));
            } else if has_room {
                self.release(Chunk { kind: Kind::Through, stored, ..chunk });
            }
        }
        self.spent(through);
        if !self.is_mapped(node, Kind::Through) {
            self.close_through(node);
        }
        Ok(())
    }
}

/// A proxy file that another process has opened. `None` if nobody has it any more.
fn find(files: &dyn ProxyFiles, id: u64, kind: Kind, chunk: Chunk) -> Option<ProxyFile> {
    let found = files.find(id, kind).and_then(|found| {
        let stores = if kind == Kind::Cached { Stores::Elsewhere } else { Stores::of(found.real.as_fd())? };
        Ok((found, stores))
    });
    let (found, stores) = found.inspect_err(|e| tracing::warn!("a mapping is made anew: {e}")).ok()?;
    let (fd, real, guarded) = (Arc::new(found.opened.fd), Arc::new(found.real), found.opened.guarded);
    Some(ProxyFile { id, kind, fd, real, stores, writable: chunk.writable, guarded, left: found.revoked })
}

fn open(
    files: &dyn ProxyFiles,
    id: u64,
    kind: Kind,
    (real, stores): (OwnedFd, Stores),
    writable: bool,
) -> Result<ProxyFile> {
    let opened = files.open(id, kind, real.as_fd()).map_err(errno)?;
    let (fd, real, guarded) = (Arc::new(opened.fd), Arc::new(real), opened.guarded);
    Ok(ProxyFile { id, kind, fd, real, stores, writable, guarded, left: false })
}

/// Whether the file has all the pages that the guest may touch. `past_end`: it may touch some beyond the file's last
/// one. Call this once the guard is active, so that the answer stays true.
fn is_whole(source: &dyn Source, want: Chunk, past_end: bool) -> Result<bool> {
    let facts = source.facts()?;
    Ok((facts.size >= facts.told_size && !past_end) || want.from + RANGE <= facts.size)
}

/// Whether the file's own pages can be mapped. If the guest may store there, the chunk then has blocks.
fn has_room(reservations: &Reservations, want: Chunk, through: &ProxyFile) -> Result<bool> {
    let in_memory = through.stores == Stores::Memory;
    if !want.stored && (!in_memory || has_hole(&through.real, want.from)?) {
        return Ok(!in_memory);
    }
    match reservations.add(want.node, &through.real, through.stores, want.from) {
        Err(Errno::OPNOTSUPP) => Ok(false),
        done => done.and(Ok(true)),
    }
}

/// Whether this is an error of opening for writing that opening for reading may not have.
fn is_read_only(errno: Errno) -> bool {
    matches!(errno, Errno::ROFS | Errno::TXTBSY | Errno::ACCESS | Errno::PERM)
}
