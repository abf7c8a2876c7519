//! Shared memory regions, through which the guest reads and writes files in place.
//!
//! Region 0 is the DAX window (VIRTIO 1.3, section 5.11.6.4). The guest chooses where in it to map a part of a file;
//! the mapper (`mapper`, `dax`) has the frontend put it there. What is mapped is never the file itself but its proxy
//! file on a private mount ([`proxy`]).
//!
//! Regions 1 and 2 belong to window passthrough (docs/protocol.md): whole files, and a table that says where they are
//! (`passthrough`). [`Passthrough`] is the file system's side of it.

mod dax;
mod frontend;
mod jobs;
mod layout;
mod mapper;
mod passthrough;
pub mod proxy;
mod reservation;
mod sys;
#[cfg(test)]
mod tests;
mod turn;

#[cfg(any(fuzzing, test))]
pub mod fuzzing;

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::fuse::ops::{Answer, Result};
use crate::record::FoundNumber;
use dax::Dax;
pub use dax::Left;
use frontend::Shared;
pub use frontend::{Facts, Frontend, Mapping, ProxyFiles, Source};
use jobs::{DaxJob, Job, Jobs};
pub use jobs::{DaxMapping, ResumedRange};
use layout::{DAX, WHOLE_FILES};
pub use layout::{RANGE, RANGE_SHIFT};
use mapper::Mapper;
use passthrough::{Core, Slots, TABLE_LEN, touch};
pub use passthrough::{
    EntryState, MIN_SIZE, Moved, MovedEntry, OpenFile, PATIENCE, Passthrough, Record, Settings, Writable,
};
pub use reservation::Stores;
use turn::{MayWait, Slow};

/// The largest pages that Linux has, on arm64 for example.
const LARGEST_PAGE: usize = 64 << 10;

/// How long a migration waits for the mapper, and so for the frontend. A full window takes a second or two.
const MOVED_WITHIN: Duration = Duration::from_secs(30);

/// The shared memory regions of one device.
pub struct Window {
    /// Size of the DAX window in bytes. 0 if there is none.
    size: u64,
    passthrough: Option<Arc<Passthrough>>,
    jobs: Arc<Jobs>,
    shared: Arc<Shared>,
    files: Arc<dyn ProxyFiles>,
    mapper: Arc<Mapper>,
}

impl Window {
    /// A DAX window of `size` bytes (0: none), a passthrough window, and their threads.
    pub fn new(size: u64, passthrough: Option<Settings>, files: Arc<dyn ProxyFiles>) -> io::Result<Arc<Self>> {
        let jobs = Arc::new(Jobs::default());
        let shared = Arc::new(Shared::default());
        let core = passthrough.map(|settings| Core::new(settings, jobs.clone(), Box::new(touch))).transpose()?;
        let core = core.map(Arc::new);
        let slow = Slow::new(files.clone());
        let slots = core.clone().map(|core| Slots::new(core, shared.clone(), slow.clone()));
        let passthrough = core.map(|core| Arc::new(Passthrough::new(core)));
        let dax = Dax::new((size / RANGE) as usize, shared.clone(), slow, jobs.clone(), PATIENCE);
        let mapper = Arc::new(Mapper::new(jobs.clone(), shared.clone(), dax, slots));
        mapper.clone().start()?;
        let (tell, events) = (jobs.clone(), files.clone());
        thread::Builder::new().name("thruway-events".into()).spawn(move || {
            while let Some(event) = events.next_event() {
                tell.send(Job::Event(event, Instant::now()));
            }
            tracing::error!("the window process ended: no file is mapped any more, restart the daemon");
        })?;
        Ok(Arc::new(Self { size, passthrough, jobs, shared, files, mapper }))
    }

    /// Sizes of the regions in bytes, by id. The frontend that asks will map.
    pub fn announce(&self) -> Vec<u64> {
        self.shared.announced.store(true, Ordering::Release);
        self.sizes()
    }

    /// Size of the DAX window in bytes. 0 if there is none.
    pub fn dax_size(&self) -> u64 {
        self.size
    }

    /// Whether there is a frontend that maps.
    pub fn is_connected(&self) -> bool {
        self.shared.announced.load(Ordering::Acquire) && self.shared.frontend.lock().is_some()
    }

    /// Whether the guest can have DAX.
    pub fn is_open(&self) -> bool {
        self.size > 0 && self.is_connected()
    }

    /// Window passthrough, if the session's guest has it.
    pub fn passing(&self) -> Option<&Arc<Passthrough>> {
        self.passthrough.as_ref().filter(|passthrough| passthrough.is_on())
    }

    /// Window passthrough, if the guest can have it.
    pub fn passthrough(&self) -> Option<&Arc<Passthrough>> {
        self.passthrough.as_ref().filter(|_| self.is_connected())
    }

    /// Takes the frontend that maps.
    pub fn connect(&self, frontend: Arc<dyn Frontend>) {
        *self.shared.frontend.lock() = Some(frontend);
        if self.shared.left.swap(false, Ordering::AcqRel) {
            self.jobs.send(Job::FinishTakeover);
        }
    }

    /// Takes over what another process of the daemon has left in the DAX window. `rooms`: up to where nodes have room
    /// for what the guest stores. `proxy`: above this, no proxy file has a number. To be called before there are
    /// requests.
    pub fn take_over(&self, left: Vec<Left>, rooms: Vec<FoundNumber>, proxy: u64) {
        self.shared.begin_above(proxy);
        self.mapper.take_over(left);
        rooms.into_iter().for_each(|room| self.shared.reservations.reaches(room.node, room.value, room.cell));
        self.shared.left.store(true, Ordering::Release);
    }

    /// The frontend is gone, and so are all mappings.
    pub fn disconnect(&self) {
        *self.shared.frontend.lock() = None;
        self.shared.announced.store(false, Ordering::Release);
        self.set_leaving(false);
        self.reset();
    }

    /// The frontend has changed the guest's memory.
    pub fn committed(&self) {
        self.shared.commits.add();
    }

    /// Whether all of the guest's pages have 4 KiB. Otherwise the last one of a file may reach past the host's last
    /// one. The file's own pages end there, and the frontend would get SIGBUS.
    pub fn small_pages(&self, are: bool) {
        let host_page = sys::page_size();
        let larger = !are && host_page < LARGEST_PAGE;
        if larger && !self.shared.larger_pages.swap(larger, Ordering::Relaxed) && self.size > 0 {
            tracing::info!(
                "the guest's pages may be larger than the host's {host_page} bytes: the DAX window has the end of each \
                 file by a Cached proxy file"
            );
        }
        self.shared.larger_pages.store(larger, Ordering::Relaxed);
    }

    /// The guest is about to move to another daemon, or stays after all.
    pub fn set_leaving(&self, leaving: bool) {
        self.passthrough.iter().for_each(|passthrough| passthrough.set_leaving(leaving));
    }

    /// Sizes of the regions in bytes, by id.
    pub fn sizes(&self) -> Vec<u64> {
        let more = self.passthrough.iter().flat_map(|passthrough| [passthrough.size(), TABLE_LEN]);
        [self.size].into_iter().chain(more).collect()
    }

    /// Makes the mapper drop all mappings soon.
    pub fn reset(&self) {
        self.passthrough.iter().for_each(|passthrough| passthrough.reset());
        self.jobs.send(Job::Reset);
    }

    /// Whether a part of any file is mapped.
    pub fn has_mappings(&self) -> bool {
        [DAX, WHOLE_FILES].iter().any(|region| self.shared.live(*region).load(Ordering::Relaxed) > 0)
    }

    /// Whether a part of this node's file is mapped, or is about to be.
    pub fn is_mapped(&self, node: u64) -> bool {
        self.shared.nodes.contains(&node) || self.passing().is_some_and(|passthrough| passthrough.has_entry(node))
    }

    /// Live mappings of the DAX window.
    pub fn live(&self) -> usize {
        self.shared.live(DAX).load(Ordering::Relaxed)
    }

    /// Live mappings of the DAX window and of the passthrough window.
    pub fn live_mappings(&self) -> [u64; 2] {
        [DAX, WHOLE_FILES].map(|region| self.shared.live(region).load(Ordering::Relaxed) as u64)
    }

    /// How many mappings of the DAX window, and entries of the passthrough window, were taken back.
    pub fn revocations(&self) -> [u64; 2] {
        let entries = self.passthrough.as_ref().map_or(0, |passthrough| passthrough.revocations());
        [self.shared.revocations.load(Ordering::Relaxed), entries]
    }

    /// Bytes of the passthrough window. 0 if there is none.
    pub fn passthrough_size(&self) -> u64 {
        self.passthrough.as_ref().map_or(0, |passthrough| passthrough.size())
    }

    /// Has another thread call `to` with what the DAX window has, by place. If the mapper has such a request already,
    /// drops `to`.
    pub fn show(&self, to: impl FnOnce(Vec<DaxMapping>) + Send + 'static) {
        self.jobs.send(Job::Show(Box::new(to)));
    }

    /// The entries of the passthrough window that a guest knows, by index.
    pub fn entries(&self) -> Vec<(u32, Record)> {
        self.passthrough.as_ref().map_or(Vec::new(), |passthrough| passthrough.known())
    }

    /// What the DAX window has, by place. It waits for the mapper, which waits for the frontend.
    ///
    /// # Errors
    /// ETIMEDOUT if the mapper cannot say.
    pub fn mapped(&self) -> Result<Vec<DaxMapping>> {
        let until = Instant::now() + MOVED_WITHIN;
        while Instant::now() < until {
            let (send, shown) = mpsc::channel();
            self.show(move |mappings| send.send(mappings).unwrap_or_default());
            match shown.recv_timeout(MOVED_WITHIN) {
                Ok(mappings) => return Ok(mappings),
                // Somebody else had asked.
                Err(mpsc::RecvTimeoutError::Disconnected) => thread::yield_now(),
                Err(mpsc::RecvTimeoutError::Timeout) => break,
            }
        }
        Err(Errno::TIMEDOUT)
    }

    /// Maps what the guest of another daemon believes to be mapped, before its device runs. The frontend must carry
    /// out the requests although it waits for the session. `strict`: each range must be mapped, or else gets zeros.
    ///
    /// # Errors
    /// EINVAL if a range comes twice, is not aligned or not in the window; why one cannot be mapped; ETIMEDOUT if the
    /// frontend does not answer.
    pub fn resume(&self, ranges: Vec<ResumedRange>, strict: bool) -> Result<()> {
        let mut named = vec![false; (self.size / RANGE) as usize];
        for ResumedRange { range, from, .. } in &ranges {
            let fits = from % RANGE == 0 && from.checked_add(RANGE).is_some_and(|end| end <= i64::MAX as u64);
            match named.get_mut(*range) {
                Some(named) if fits && !*named => *named = true,
                _ => return Err(Errno::INVAL),
            }
        }
        if ranges.is_empty() {
            return Ok(());
        }
        self.shared.loading.store(true, Ordering::Release);
        let (send, resumed) = mpsc::channel();
        let answer = Box::new(move |done| send.send(done).unwrap_or_default());
        self.jobs.send(DaxJob::Resume { ranges, strict, answer });
        let done = resumed.recv_timeout(MOVED_WITHIN).unwrap_or(Err(Errno::TIMEDOUT));
        self.shared.loading.store(false, Ordering::Release);
        done
    }

    /// Maps a file's `len` bytes from `from` on at `at`, in place of what is mapped there. Another thread answers.
    /// Calls `answer` only if there is no error.
    ///
    /// # Errors
    /// EINVAL if the range is not aligned to [`RANGE`] or not in the window; ENODEV without a frontend that can map.
    pub fn map(
        &self,
        (at, len): (u64, u64),
        from: u64,
        writable: bool,
        node: u64,
        source: Arc<dyn Source>,
        answer: impl FnOnce() -> Answer,
    ) -> Result<()> {
        let ranges = self.ranges(at, len)?;
        if from % RANGE != 0 || from.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
            return Err(Errno::INVAL);
        }
        self.jobs.send(DaxJob::Map { ranges, from, writable, node, source, answer: answer() });
        Ok(())
    }

    /// Unmaps `parts` of the window (offset and length). Another thread answers.
    ///
    /// # Errors
    /// As [`map`](Self::map); nothing is unmapped then.
    pub fn unmap(&self, parts: &[(u64, u64)], answer: impl FnOnce() -> Answer) -> Result<()> {
        // However many parts there are, no more is kept than the window has ranges.
        let mut named = vec![false; (self.size / RANGE) as usize];
        for &(at, len) in parts {
            named[self.ranges(at, len)?].fill(true);
        }
        let ranges = (0..named.len()).filter(|range| named[*range]).collect();
        self.jobs.send(DaxJob::Unmap { ranges, answer: answer() });
        Ok(())
    }

    /// Writes to the real file what the guest wrote to its Cached proxy file. Reports an error to [`Source::failed`].
    pub fn sync(&self, node: u64) {
        let _ = self.try_sync(node);
    }

    /// [`sync`](Self::sync) of all files.
    ///
    /// # Errors
    /// One failure, which each open of the file reports too.
    pub fn sync_all(&self) -> Result<()> {
        let nodes: Vec<u64> = self.shared.cached.iter().map(|file| *file.key()).collect();
        let mut done = Ok(());
        for node in nodes {
            done = self.try_sync(node).and(done);
        }
        done
    }

    fn try_sync(&self, node: u64) -> Result<()> {
        let cached = self.shared.cached.get(&node).map(|file| file.clone());
        cached.map_or(Ok(()), |file| file.write_back(&MayWait::without_a_turn()))
    }

    /// Runs `change`, which changes a file's contents by a message. The guest still sees one file: what it wrote in
    /// place comes before the change, and what it reads in place is read anew.
    pub fn changing<R>(&self, node: u64, change: impl FnOnce() -> R) -> R {
        if !self.shared.cached.contains_key(&node) {
            return change();
        }
        self.sync(node);
        let changed = change();
        self.read_anew(node);
        changed
    }

    /// What the guest reads in place of a Cached proxy file is read anew. Call this before the guest can know that
    /// others have changed the size of a node's file: fanotify does not report that to the window process.
    pub fn read_anew(&self, node: u64) {
        let Some(id) = self.shared.cached.get(&node).map(|file| file.id) else { return };
        if let Err(e) = self.files.invalidate(id) {
            tracing::warn!("the guest may see old contents of a mapped file: {e}");
        }
    }

    /// Allocates room for what the guest may store in place. Call this before the guest can know that a node's file has
    /// `to` bytes.
    ///
    /// # Errors
    /// ENOSPC, EDQUOT and other errors of allocation. The guest must then not learn of the size.
    pub fn grows(&self, node: u64, to: u64) -> Result<()> {
        self.shared.reservations.grows(node, to)
    }

    /// The guest has written these bytes of a node's file by a message.
    pub fn filled(&self, node: u64, bytes: impl FnOnce() -> std::ops::Range<u64>) {
        self.shared.reservations.filled(node, bytes);
    }

    /// A node's file was cut off there.
    pub fn shrunk(&self, node: u64, to: u64) {
        self.shared.reservations.shrunk(node, to);
    }

    /// Call this before blocks are taken from these bytes of a node's file. Waits for the frontend.
    ///
    /// # Errors
    /// Why the mappings there cannot be replaced by Cached ones. The blocks must then stay.
    pub fn vacate(&self, node: u64, from: u64, len: u64) -> Result<()> {
        if self.shared.reservations.stores(node).is_none() {
            return Ok(());
        }
        self.replace(node, from, len, false)
    }

    /// Call this before the guest cuts off a node's file there. Waits for the frontend.
    ///
    /// # Errors
    /// Why the mappings beyond cannot be replaced by Cached ones. The file must then stay as it is.
    pub fn cut(&self, node: u64, to: u64) -> Result<()> {
        if !self.shared.larger_pages.load(Ordering::Relaxed) || !self.shared.nodes.contains(&node) {
            return Ok(());
        }
        self.replace(node, to, u64::MAX, true)
    }

    fn replace(&self, node: u64, from: u64, len: u64, all: bool) -> Result<()> {
        let (send, replaced) = mpsc::channel();
        let answer = Box::new(move |result| send.send(result).unwrap_or_default());
        self.jobs.send(DaxJob::Vacate { node, from, len, all, answer });
        replaced.recv().unwrap_or(Err(Errno::IO))
    }

    /// Whether a node's file must not share blocks with another.
    pub fn keeps_blocks(&self, node: u64) -> bool {
        let passes = || self.passing().is_some_and(|passthrough| passthrough.keeps_blocks(node));
        self.shared.reservations.stores(node) == Some(Stores::Unshared) || passes()
    }

    fn ranges(&self, at: u64, len: u64) -> Result<std::ops::Range<usize>> {
        let end = at.checked_add(len).filter(|&end| end <= self.size && len > 0).ok_or(Errno::INVAL)?;
        match at % RANGE == 0 && len % RANGE == 0 {
            true if self.is_open() => Ok((at / RANGE) as usize..(end / RANGE) as usize),
            true => Err(Errno::NODEV),
            false => Err(Errno::INVAL),
        }
    }
}
