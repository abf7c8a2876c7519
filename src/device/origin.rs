//! Where a request came from: the work that the queue's worker does not do itself, and the way back of a late reply.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::Instant;

use parking_lot::Mutex;
use rustix::io::Errno;

use super::chain::{self, Loaded, Segment, Used};
use super::handler::Handler;
use super::offload::CopyOffload;
use super::pool::{self, Pools};
use super::region::{MemorySnapshot, Tables};
use super::ring::Ring;
use super::tally::Tally;
use super::uring::Uring;
use crate::fuse::buf::IoRange;
use crate::fuse::ops::{Result, Wait};
use crate::fuse::{Io, Job, Release, ReplySender, Serve, Stopping, Transport, Work};
use crate::limits::{LATE_REPLY_BYTES, Limit};

/// What serves requests, the memory that they are in, and the threads for those that wait.
pub struct Service<H> {
    pub handler: Arc<H>,
    pub mem: Tables,
    pub pools: Arc<Pools>,
    /// The number of requests that may wait without end, over all connections.
    pub waiting: Arc<AtomicUsize>,
}

impl<H> Service<H> {
    /// Runs a job that waits only for the host's file system.
    fn work(&self, job: pool::Job) {
        // If there can be no thread at all, the caller waits.
        if let Err(job) = self.pools.host.run(job) {
            job();
        }
    }
}

/// The chain of one request, while it is served.
pub struct Origin<'a, H> {
    pub service: &'a Arc<Service<H>>,
    pub ring: &'a Arc<Ring>,
    pub head: u16,
    pub segments: &'a [Segment],
    pub snapshot: &'a MemorySnapshot,
    pub uring: Option<&'a Mutex<Uring>>,
    /// The worker's. `None` on a thread that may wait.
    pub offload: Option<&'a mut CopyOffload>,
    /// Where the worker counts. `None` on another thread.
    pub tally: Option<&'a Tally>,
    /// The chain goes back with a late reply.
    pub left: bool,
}

impl<H: Handler> Origin<'_, H> {
    /// Serves the request, or refuses it with this `fault`. Returns the length of the reply in bytes; `None` if it
    /// comes later.
    pub fn serve(&mut self, loaded: &mut Loaded, fault: Result<()>) -> Option<usize> {
        let service = self.service;
        let len = match fault.and_then(|()| self.ring.begin(self.head)) {
            Ok(()) => service.handler.handle(loaded.work, self),
            Err(errno) => {
                if errno == Errno::FAULT {
                    say_unshared();
                }
                loaded.refuse(errno)
            }
        };
        (!self.left).then(|| len.min(loaded.work.writable.len()))
    }

    /// Serves the request anew on a thread that waits for the host's file system. The thread needs only the chain's
    /// head. `since`: when the request began.
    fn hand_over(&self, since: Option<Instant>) {
        self.service.work(self.anew(since));
    }

    /// What serves the request anew.
    fn anew(&self, since: Option<Instant>) -> pool::Job {
        self.tally.inspect(|tally| tally.handed_over());
        let (service, head, busy) = (self.service.clone(), self.head, self.ring.occupy());
        Box::new(move || {
            let (mut snapshot, table) = (service.mem.keep(), busy.ring().table());
            let (mut work, mut segments) = (Work::default(), Vec::new());
            work.since = since;
            let (mut loaded, fault) = chain::load(&service.mem, &mut snapshot, table, head, &mut work, &mut segments);
            let ring = busy.ring();
            let mut origin = Origin {
                service: &service,
                ring,
                head,
                segments: &segments,
                snapshot: loaded.snapshot,
                uring: None,
                offload: None,
                tally: None,
                left: false,
            };
            let written = origin.serve(&mut loaded, fault);
            drop(loaded);
            if let Some(written) = written {
                ring.served(&Used::new(head, written));
                chain::mark_dirty(&snapshot, &segments, written);
                busy.give_back(&snapshot.near, Used::new(head, written));
            }
        })
    }
}

impl<H: Handler> Transport for Origin<'_, H> {
    fn moves(&mut self, bytes: usize) -> bool {
        self.offload.as_mut().is_some_and(|offload| offload.moves(bytes))
    }

    fn may_wait(&self) -> bool {
        self.offload.is_none()
    }

    fn io(&mut self, io: Io, data: &IoRange) {
        // A thread that may wait does all I/O itself.
        if self.may_wait() {
            return;
        }
        self.left = true;
        let since = io.meter.since();
        let begin = |uring: &Mutex<Uring>| {
            uring.lock().begin(io, data.as_slice(), self.head, self.segments, self.snapshot.clone())
        };
        match self.uring.is_some_and(begin) {
            true => drop(self.tally.inspect(|tally| tally.submitted())),
            false => self.hand_over(since),
        }
    }

    fn serve_anew(&mut self, since: Option<Instant>) {
        if !self.may_wait() {
            self.left = true;
            self.hand_over(since);
        }
    }

    fn defer(&mut self, since: Option<Instant>, release: Arc<dyn Release>) -> Option<(Serve, Stopping)> {
        self.left = true;
        self.ring.release_by(release);
        let (service, ring, job) = (self.service.clone(), self.ring.clone(), self.anew(since));
        let stopping = move || ring.stopping().load(Ordering::SeqCst);
        Some((Box::new(move || service.work(job)), Box::new(stopping)))
    }

    fn detach(&mut self) -> ReplySender {
        self.left = true;
        let completion = self.ring.completion(self.head, self.segments, LATE_REPLY_BYTES);
        // A late reply must not keep the memory of a guest that is gone.
        let ring = Arc::downgrade(self.ring);
        Box::new(move |reply| {
            if let Some(ring) = ring.upgrade() {
                ring.complete(completion, reply);
            }
        })
    }

    fn run(&mut self, wait: Wait, job: Job) -> Result<()> {
        self.tally.inspect(|tally| tally.handed_over());
        let pools = &self.service.pools;
        let pool = if wait == Wait::Lock { &pools.locks } else { &pools.others };
        let (waits, back) = (Waits::new(&self.service.waiting), self.detach());
        let lock = (wait == Wait::Lock).then(|| Locked::new(self.ring.locks()));
        let back = Box::new(move |reply| {
            // Who counts requests that wait for no lock may count one too many, but none too few.
            drop(lock);
            back(reply);
            // First give the reply to the ring, then say that the request does not wait any more.
            drop(waits);
        });
        self.left = pool.run(Box::new(move || job(back))).is_ok();
        if !self.left {
            Limit::LockThreads.reached();
        }
        if self.left { Ok(()) } else { Err(Errno::AGAIN) }
    }

    fn stopping(&self) -> bool {
        self.ring.stopping().load(Ordering::Relaxed)
    }

    fn park(&mut self, bytes: usize, release: Arc<dyn Release>) -> Option<(ReplySender, Stopping)> {
        self.left = true;
        self.ring.release_by(release);
        // A stop waits for it, after it has had it answered.
        let (busy, parked) = (self.ring.occupy(), Locked::new(self.ring.locks()));
        let completion = self.ring.completion(self.head, self.segments, bytes);
        let back = move |reply| {
            drop(parked);
            busy.complete(completion, reply);
        };
        let ring = self.ring.clone();
        Some((Box::new(back), Box::new(move || ring.stopping().load(Ordering::SeqCst))))
    }
}

/// The frontend leaves out memory that it cannot share, without a message. Once, since the guest can do it at any time.
fn say_unshared() {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        tracing::warn!(
            "a request of the guest uses memory that the frontend has not shared, and fails: memory that is added to \
             a virtual machine must be shared like the rest (share=on with QEMU's memory backend)"
        );
    });
}

/// One of the requests that may wait without end.
struct Waits(Arc<AtomicUsize>);

impl Waits {
    fn new(waiting: &Arc<AtomicUsize>) -> Self {
        waiting.fetch_add(1, Ordering::Relaxed);
        Self(waiting.clone())
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One of the requests of a ring that wait for a lock, or that are parked.
struct Locked(Arc<AtomicU32>);

impl Locked {
    fn new(locks: &Arc<AtomicU32>) -> Self {
        locks.fetch_add(1, Ordering::SeqCst);
        Self(locks.clone())
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
