//! The worker of a queue: takes requests, has them served, gives the chains back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use vm_memory::GuestAddressSpace;

use super::chain::{self, Loaded, Segment, Table};
use super::poll::Poll;
use super::pool::{Job, Pool, Pools};
use super::ring::{Completion, Ring, Used};
use super::uring::{Rings, Uring};
use super::{GuestMemory, Handler, LoadedMemory};
use crate::fuse::{Deferred, LateIo, Outcome, Slow, Work};

/// Most chains that are taken from a ring, and given back to it, at a time. Enough to spread the cost of the ring's lock
/// and of a notification; few, because the driver works on what it has while the others are served: 4 did up to twice as
/// much as 16 with 8 requests under way, and as much with 32 (`thruway-bench`, two cores).
pub const BATCH: usize = 4;

/// Chains are given back before the batch is over when so many bytes have moved since: about 10 µs of copying, which
/// costs more than a notification.
const FLUSH_BYTES: usize = 64 << 10;

/// How long FORGETs may gather, so that hundreds of them cost one wake-up of the worker, and of the guest's CPU. The time after
/// which Linux tries again when the queue was full (fs/fuse/virtio_fs.c).
const GATHER: Duration = Duration::from_millis(1);

/// How many large requests are handed over after one that is neither READ nor WRITE had to wait behind one, or would have had
/// to: with so many in a row and nothing else between them, none waits any more. Data that waits for data does not count: Linux
/// sends the end of a large read right after the rest of it, and another thread would have to be woken for what this one is
/// about to do.
const CROWD: u32 = 64;

/// What one worker keeps from request to request.
pub struct Scratch {
    work: Work,
    segments: Vec<Segment>,
    heads: Vec<u16>,
    used: Vec<Used>,
    poll: Poll,
    /// What the kernel does meanwhile.
    uring: Option<Arc<Mutex<Uring>>>,
    /// How many more large requests are not for the worker.
    crowd: u32,
    /// The request that comes next has waited behind a large one.
    waited: bool,
}

/// What the workers of one connection share.
pub struct Workers<H> {
    pub handler: Arc<H>,
    pub mem: GuestMemory,
    /// The connection is over.
    pub closing: AtomicBool,
    /// The frontend logs dirty pages (VHOST_F_LOG_ALL).
    pub logging: AtomicBool,
    /// How many requests wait that may do so for ever, over all connections.
    pub waiting: Arc<AtomicUsize>,
    pub pools: Arc<Pools>,
    pub rings: Arc<Rings>,
    /// Longest that a worker polls its ring.
    pub poll: Duration,
}

impl Scratch {
    fn new(uring: Option<Arc<Mutex<Uring>>>) -> Self {
        Self {
            work: Work::default(),
            segments: Vec::new(),
            heads: Vec::with_capacity(BATCH),
            used: Vec::with_capacity(BATCH),
            poll: Poll::default(),
            uring,
            crowd: 0,
            waited: false,
        }
    }

    /// Takes what the kernel has done meanwhile.
    fn reap(&mut self) {
        if let Some(uring) = &self.uring {
            uring.lock().reap(&mut self.used);
        }
    }

    /// Waits for all that the kernel does; the chains that go back for it.
    pub fn finish(&mut self) -> &mut Vec<Used> {
        if let Some(uring) = &self.uring {
            uring.lock().finish(&mut self.used);
        }
        &mut self.used
    }
}

impl<H: Handler> Workers<H> {
    /// Serves the ring until it is empty. `index` is the queue's, 0 for the high priority queue.
    pub fn drain(&self, ring: &Arc<Ring>, index: usize) {
        let mut worker = ring.worker();
        let scratch = worker.get_or_insert_with(|| {
            name_thread(index);
            Box::new(Scratch::new(self.rings.of(index).cloned()))
        });
        if index == 0 {
            // Not polled: nobody waits for what comes here.
            std::thread::sleep(GATHER);
        } else {
            scratch.poll.wake(self.poll);
        }
        loop {
            scratch.reap();
            let mem = self.mem.memory();
            let rest = scratch.poll.is_over();
            let table = ring.exchange(index, &mem, &mut scratch.used, &mut scratch.heads, rest);
            if scratch.heads.is_empty() {
                if rest {
                    return scratch.poll.rest();
                }
                scratch.poll.pause();
                continue;
            }
            scratch.poll.found();
            self.serve_batch(ring, &mem, table, scratch);
            if self.closing.load(Ordering::Relaxed) {
                return ring.flush(&mem, &mut scratch.used);
            }
        }
    }

    fn serve_batch(&self, ring: &Arc<Ring>, mem: &LoadedMemory, table: Table, scratch: &mut Scratch) {
        let Scratch { work, segments, heads, used, uring, crowd, waited, .. } = scratch;
        let mut moved = 0;
        let mut heads = heads.drain(..);
        while let Some(head) = heads.next() {
            work.crowded = *crowd > 0;
            let (mut loaded, fault) = chain::load(mem, table, head, work, segments);
            let sent = loaded.work.readable.len();
            moved += sent;
            let written = match fault {
                Ok(()) => self.serve(ring, head, &mut loaded, segments, uring.as_deref()),
                Err(errno) => Some(loaded.refuse(errno)),
            };
            let data = loaded.work.data;
            drop(loaded);
            let Some(written) = written else {
                *crowd = crowd.saturating_sub(1);
                continue;
            };
            if !data && (*waited || *crowd > 0) {
                *crowd = CROWD;
            }
            *waited = uring.is_some() && sent + written >= FLUSH_BYTES && (heads.len() > 0 || ring.has_more(mem));
            if self.logging.load(Ordering::Acquire) {
                chain::mark_dirty(mem, segments, written);
            }
            moved += written;
            used.push(Used { head, len: u32::try_from(written).unwrap_or(u32::MAX) });
            if moved >= FLUSH_BYTES {
                ring.flush(mem, used);
                moved = 0;
            }
        }
    }

    /// The length of the reply; `None` if it comes later.
    fn serve(
        &self,
        ring: &Arc<Ring>,
        head: u16,
        loaded: &mut Loaded,
        segments: &[Segment],
        uring: Option<&Mutex<Uring>>,
    ) -> Option<usize> {
        let started = match self.handler.handle(loaded.work) {
            Outcome::Replied(len) => return Some(len.min(loaded.work.writable.len())),
            Outcome::Silent => return Some(0),
            Outcome::Deferred(wait) => self.defer(&self.pools.others, ring.promise(head, segments), ring, wait),
            Outcome::Lock(wait) => self.defer(&self.pools.locks, ring.promise(head, segments), ring, wait),
            Outcome::Slow(wait) => {
                self.work(slow(ring.promise(head, segments), ring, wait));
                true
            }
            Outcome::Io(io) => {
                self.io(ring, head, loaded, segments, uring, io);
                true
            }
            Outcome::Handed(hand) => {
                hand(Box::new(answer_later(ring.promise(head, segments), ring)));
                true
            }
        };
        if started { None } else { Some(loaded.refuse(libc::EAGAIN)) }
    }

    /// Runs what waits for the host's file system alone.
    fn work(&self, job: Job) {
        // Where there can be no thread at all, the worker waits.
        if let Err(job) = self.pools.work.run(job) {
            job();
        }
    }

    /// Runs `wait` on a thread of `pool`. Whoever stops the ring does not wait for it. False if there are too many.
    fn defer(&self, pool: &Arc<Pool>, completion: Completion, ring: &Arc<Ring>, wait: Deferred) -> bool {
        let waits = Waits::new(&self.waiting);
        let answer = answer_later(completion, ring);
        let job = move || {
            answer(wait());
            // The reply is with the ring before nothing seems to wait any more.
            drop(waits);
        };
        pool.run(Box::new(job)).is_ok()
    }

    /// Begins I/O that is not for the worker: the kernel does it, or a thread. All that a thread needs before it begins is the
    /// chain's head.
    fn io(
        &self,
        ring: &Arc<Ring>,
        head: u16,
        loaded: &mut Loaded,
        segments: &[Segment],
        uring: Option<&Mutex<Uring>>,
        io: LateIo,
    ) {
        let (mem, data) = (loaded.memory(), io.data());
        let from = if io.write { &mut loaded.work.readable } else { &mut loaded.work.writable };
        let begun = uring.is_some_and(|uring| uring.lock().begin(io, from.range(data).as_slice(), head, segments, mem));
        if !begun {
            self.work(self.anew(ring, head));
        }
    }

    /// A job that serves the request anew, a READ or WRITE, and waits for the host's file system.
    fn anew(&self, ring: &Arc<Ring>, head: u16) -> Job {
        let (handler, busy) = (self.handler.clone(), ring.occupy());
        Box::new(move || {
            let (mem, table) = busy.table();
            let (mut work, mut segments) = (Work::default(), Vec::new());
            work.waits = true;
            let (mut loaded, fault) = chain::load(&mem, table, head, &mut work, &mut segments);
            let outcome = fault.map(|()| handler.handle(loaded.work));
            let written = match outcome {
                Ok(Outcome::Replied(len)) => len.min(loaded.work.writable.len()),
                Ok(Outcome::Silent) => 0,
                // The guest has made another request of it meanwhile.
                Ok(_) => loaded.refuse(libc::EINVAL),
                Err(errno) => loaded.refuse(errno),
            };
            drop(loaded);
            chain::mark_dirty(&mem, &segments, written);
            busy.give_back(&mem, Used { head, len: u32::try_from(written).unwrap_or(u32::MAX) });
        })
    }
}

/// A job that waits for the host's file system alone: whoever stops the ring waits for it too.
fn slow(mut completion: Completion, ring: &Arc<Ring>, wait: Slow) -> Job {
    let busy = ring.occupy();
    Box::new(move || {
        completion.reply = wait(busy.stopping());
        busy.complete(completion);
    })
}

/// Delivers a reply that comes from another thread. What waits for it must not keep the memory of a guest that is gone.
fn answer_later(mut completion: Completion, ring: &Arc<Ring>) -> impl FnOnce(Vec<u8>) + Send + use<> {
    let ring = Arc::downgrade(ring);
    move |reply| {
        completion.reply = reply;
        if let Some(ring) = ring.upgrade() {
            ring.complete(completion);
        }
    }
}

/// One of the requests that may wait for ever.
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

/// Names the calling thread after its queue; vhost-user-backend names all workers alike.
fn name_thread(index: usize) {
    let name = match index {
        0 => "thruway-hiprio".to_owned(),
        _ => format!("thruway-q{}", index - 1),
    };
    if let Ok(name) = std::ffi::CString::new(name) {
        let _ = rustix::thread::set_name(&name);
    }
}
