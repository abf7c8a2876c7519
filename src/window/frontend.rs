//! What the parts of the window know of each other: the frontend, the files to map, and the state that the mapper
//! shares with other threads.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dashmap::{DashMap, DashSet};
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;

use super::layout::{DAX, RANGE};
use super::proxy::{Event, Found, Kind, Opened, Proxy, errno};
use super::reservation::Reservations;
use super::sys;
use super::turn::{MayWait, Slow};
use crate::fuse::ops::Result;
use crate::record;

/// How long a mapping may take to reach the guest's memory after the frontend has acknowledged it. QEMU's commit takes
/// 2.5 ms with 512 regions. It never comes while the guest's driver has switched the device's memory off.
const COMMIT: Duration = Duration::from_millis(250);

/// How often to check whether a stopped device runs again.
const STOPPED: Duration = Duration::from_millis(2);

/// A mapping of a file into a region, as the frontend knows it. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Mapping<'a> {
    /// The region's id.
    pub region: u8,
    /// Where in the region it begins.
    pub at: u64,
    /// How long it is.
    pub len: u64,
    /// A descriptor that the frontend can map.
    pub file: BorrowedFd<'a>,
    /// Where in the file it begins.
    pub from: u64,
    /// Whether the guest may store.
    pub writable: bool,
}

impl<'a> Mapping<'a> {
    /// One [`RANGE`] of a file in the DAX window.
    pub const fn dax(range: usize, file: BorrowedFd<'a>, from: u64, writable: bool) -> Self {
        Self { region: DAX, at: range as u64 * RANGE, len: RANGE, file, from, writable }
    }

    /// A file's first `len` bytes, writable.
    pub const fn whole(region: u8, at: u64, len: u64, file: BorrowedFd<'a>) -> Self {
        Self { region, at, len, file, from: 0, writable: true }
    }
}

/// The frontend, which has the guest's memory.
pub trait Frontend: Send + Sync {
    /// Whether the device is started.
    fn is_running(&self) -> bool;
    /// Has the frontend map it. Returns before the guest can see it.
    ///
    /// # Errors
    /// If the frontend refuses, or is gone.
    fn map(&self, mapping: &Mapping) -> io::Result<()>;
    /// Has the frontend unmap it. Returns before it is gone from the guest.
    ///
    /// # Errors
    /// If the frontend refuses, or is gone.
    fn unmap(&self, mapping: &Mapping) -> io::Result<()>;
    /// How many times the guest's memory contains this part of the file, at any place. [`Window::committed`] tells when
    /// this may have changed.
    ///
    /// [`Window::committed`]: super::Window::committed
    fn mapped(&self, mapping: &Mapping) -> usize;
}

/// A host file to map.
pub trait Source: Send + Sync {
    /// Opens the file anew.
    ///
    /// # Errors
    /// Those of openat(2).
    fn open(&self, writable: bool) -> Result<OwnedFd>;
    /// What decides how the file can be mapped now.
    fn facts(&self) -> Result<Facts>;
    /// What the guest stored in place could not be written. Each open of the file must report this once.
    fn failed(&self, errno: Errno);
}

/// See [`Source::facts`].
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Bytes of the file.
    pub size: u64,
    /// The largest size in bytes that the guest may believe in. Past `size` it may touch pages that a mapping does not
    /// have.
    pub told_size: u64,
    /// It has an execute bit.
    pub executable: bool,
}

/// Opens proxy files, which the frontend can map; see [`Proxy`].
pub trait ProxyFiles: Send + Sync {
    /// See [`Proxy::open`].
    fn open(&self, id: u64, kind: Kind, real: BorrowedFd) -> io::Result<Opened>;
    /// See [`Proxy::find`].
    fn find(&self, _id: u64, _kind: Kind) -> io::Result<Found> {
        Err(Errno::NOENT.into())
    }
    /// See [`Proxy::invalidate`].
    fn invalidate(&self, id: u64) -> io::Result<()>;
    /// See [`Proxy::watch`].
    fn watch(&self, id: u64) -> io::Result<()>;
    /// See [`Proxy::next_event`].
    fn next_event(&self) -> Option<Event>;
}

impl ProxyFiles for Proxy {
    fn open(&self, id: u64, kind: Kind, real: BorrowedFd) -> io::Result<Opened> {
        Self::open(self, id, kind, real)
    }

    fn find(&self, id: u64, kind: Kind) -> io::Result<Found> {
        Self::find(self, id, kind)
    }

    fn invalidate(&self, id: u64) -> io::Result<()> {
        Self::invalidate(self, id)
    }

    fn watch(&self, id: u64) -> io::Result<()> {
        Self::watch(self, id)
    }

    fn next_event(&self) -> Option<Event> {
        Self::next_event(self)
    }
}

/// What the mapper shares with the other threads. No lock here is held during a call to the frontend.
#[derive(Default)]
pub struct Shared {
    pub frontend: Mutex<Option<Arc<dyn Frontend>>>,
    /// The frontend has asked for the regions.
    pub announced: AtomicBool,
    /// What another process has left is to be put in order once there is a frontend.
    pub left: AtomicBool,
    /// A session is loaded: the frontend maps although the device does not run yet.
    pub loading: AtomicBool,
    pub commits: Commits,
    /// Live mappings, by region.
    pub live: [AtomicUsize; 3],
    /// Mappings of the DAX window that were taken back because of the host.
    pub revocations: AtomicU64,
    /// Nodes that have mappings in the DAX window.
    pub nodes: DashSet<u64>,
    /// Cached proxy files that are mapped, by nodeid.
    pub cached: Arc<DashMap<u64, CachedFile>>,
    pub reservations: Arc<Reservations>,
    /// The guest's pages may be larger than the host's.
    pub larger_pages: AtomicBool,
    /// How many proxy files were ever opened.
    ids: AtomicU64,
}

/// A Cached proxy file: what the guest stores there has yet to be written to the real file.
#[derive(Clone)]
pub struct CachedFile {
    pub id: u64,
    pub fd: Arc<OwnedFd>,
    pub source: Slow<dyn Source>,
}

impl CachedFile {
    /// Writes what the guest stored to the real file. The kernel reports a failure once, so it is passed on to all
    /// opens of the file.
    ///
    /// # Errors
    /// That failure.
    pub fn write_back(&self, wait: &MayWait) -> Result<()> {
        let done = sys::write_back(self.fd.as_fd()).map_err(errno);
        done.inspect_err(|errno| self.source.get(wait).failed(*errno))
    }
}

/// Files that nothing is mapped of any more. Each close(2) may wait: for the real file's lock, if there are stores in a
/// Cached proxy file, and for a remote file system.
#[derive(Default)]
pub struct Closing {
    /// Through proxy files, and real files. A host process may wait for their end.
    pub files: Vec<Slow<OwnedFd>>,
    /// Cached proxy files, by nodeid.
    pub copies: Vec<(u64, CachedFile)>,
}

impl Closing {
    pub fn is_urgent(&self) -> bool {
        self.copies.is_empty()
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && self.copies.is_empty()
    }

    /// `cached`: the Cached proxy files that are in use.
    pub fn close(self, cached: &DashMap<u64, CachedFile>, wait: &MayWait) {
        drop(self.files);
        for (node, copy) in self.copies {
            // A close would not report the error.
            let _ = copy.write_back(wait);
            cached.remove_if(&node, |_, now| now.id == copy.id);
        }
    }
}

impl Shared {
    /// A number for a new proxy file.
    pub fn next_id(&self) -> u64 {
        let id = self.ids.fetch_add(1, Ordering::Relaxed) + 1;
        record::get().into_iter().for_each(|record| record.gave_proxy(id));
        id
    }

    /// Numbers of proxy files up to this one were given out.
    pub fn begin_above(&self, id: u64) {
        self.ids.fetch_max(id, Ordering::Relaxed);
    }

    /// Takes away what the frontend may have in a range of the DAX window.
    ///
    /// # Errors
    /// ENODEV without a frontend.
    pub fn clear(&self, range: usize) -> Result<()> {
        // No file has a part in this.
        let cleared = self.frontend()?.unmap(&Mapping::dax(range, rustix::fs::CWD, 0, false));
        cleared.unwrap_or_else(|e| tracing::debug!("the frontend had nothing in range {range}: {e}"));
        Ok(())
    }

    pub fn live(&self, region: u8) -> &AtomicUsize {
        &self.live[usize::from(region) % self.live.len()]
    }

    /// The frontend, once its device runs: QEMU 11.1 crashes if it is asked to map for a stopped device.
    fn frontend(&self) -> Result<Arc<dyn Frontend>> {
        loop {
            let frontend = self.frontend.lock().clone().ok_or(Errno::NODEV)?;
            if frontend.is_running() || self.loading.load(Ordering::Acquire) {
                return Ok(frontend);
            }
            thread::sleep(STOPPED);
        }
    }

    /// Maps a file where nothing is mapped, and waits until the guest has it. `false` if that takes too long.
    pub fn map(&self, mapping: &Mapping) -> Result<bool> {
        let frontend = self.frontend()?;
        // The guest's memory also changes by the mappings of other devices.
        let before = frontend.mapped(mapping);
        let map = || frontend.map(mapping);
        map()
            .or_else(|e| {
                // The frontend may still have a mapping that the daemon does not know of.
                frontend.unmap(mapping).map_err(|_| e).and_then(|()| map())
            })
            .map_err(errno)?;
        self.live(mapping.region).fetch_add(1, Ordering::Relaxed);
        // A device that does not run hears of all its memory when it is started.
        Ok(!frontend.is_running() || self.commits.wait(|| frontend.mapped(mapping) > before))
    }

    /// Takes a mapping away, and waits until the guest no longer has it.
    pub fn unmap(&self, mapping: &Mapping) {
        self.unmap_all(std::slice::from_ref(mapping));
    }

    /// Takes mappings away, and waits once until the guest no longer has them: a host process may be waiting too.
    pub fn unmap_all(&self, mappings: &[Mapping]) {
        for mapping in mappings {
            self.live(mapping.region).fetch_sub(1, Ordering::Relaxed);
        }
        let Ok(frontend) = self.frontend() else { return };
        let unmap = |mapping| {
            let before = frontend.mapped(mapping);
            match frontend.unmap(mapping) {
                Ok(()) => Some((mapping, before)),
                Err(e) => {
                    let Mapping { region, at, .. } = mapping;
                    tracing::debug!("the frontend had no mapping at {at:#x} of region {region}: {e}");
                    None
                }
            }
        };
        let unmapped: Vec<_> = mappings.iter().filter_map(unmap).collect();
        if !frontend.is_running() {
            return;
        }
        self.commits.wait(|| unmapped.iter().all(|(mapping, before)| frontend.mapped(mapping) < *before));
    }
}

/// Counts the changes of the guest's memory.
#[derive(Default)]
pub struct Commits {
    count: Mutex<u64>,
    changed: Condvar,
}

impl Commits {
    pub fn add(&self) {
        *self.count.lock() += 1;
        self.changed.notify_all();
    }

    /// Waits until `done` is true, which only a change of the guest's memory can make it. `false` if that takes too
    /// long.
    fn wait(&self, done: impl Fn() -> bool) -> bool {
        let until = Instant::now() + COMMIT;
        loop {
            let before = *self.count.lock();
            if done() {
                return true;
            }
            let mut count = self.count.lock();
            while *count == before {
                if self.changed.wait_until(&mut count, until).timed_out() {
                    tracing::debug!("a mapping is not in the guest's memory: is the device's memory off?");
                    return false;
                }
            }
        }
    }
}
