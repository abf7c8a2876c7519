//! The worker of a queue: takes requests, has them served, gives the chains back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use vm_memory::GuestAddressSpace;

use super::chain::{self, Loaded, Segment, Table};
use super::ring::{Ring, Used};
use super::{GuestMemory, Handler, Memory};
use crate::fuse::{Deferred, Outcome, Work};

/// Most chains that are taken from a ring, and given back to it, at a time. Enough to spread the cost of the ring's lock
/// and of a notification; few, because the first one's reply and whoever stops the ring wait for the others.
pub const BATCH: usize = 16;

/// Chains are given back before the batch is over when so many bytes have moved since: about 10 µs of copying, which
/// costs more than a notification.
const FLUSH_BYTES: usize = 64 << 10;

/// Most requests that may wait at a time, each on a thread of its own. It bounds what a guest can make the daemon spend:
/// a waiting thread costs some 10 KiB; a guest with more processes blocked in fcntl(F_SETLKW) gets EAGAIN.
const MAX_WAITING: usize = 256;

/// Stack of a thread that waits, in bytes: what waits is a system call with its arguments on the heap.
const WAIT_STACK: usize = 128 << 10;

/// What one worker keeps from request to request.
pub struct Scratch {
    work: Work,
    segments: Vec<Segment>,
    heads: Vec<u16>,
    used: Vec<Used>,
}

/// What the workers of one connection share.
pub struct Workers<H> {
    pub handler: Arc<H>,
    pub mem: GuestMemory,
    /// The connection is over.
    pub closing: AtomicBool,
    /// The frontend logs dirty pages (VHOST_F_LOG_ALL).
    pub logging: AtomicBool,
    /// How many requests wait, over all connections.
    pub waiting: Arc<AtomicUsize>,
}

impl Scratch {
    fn new() -> Self {
        Self {
            work: Work::default(),
            segments: Vec::new(),
            heads: Vec::with_capacity(BATCH),
            used: Vec::with_capacity(BATCH),
        }
    }
}

impl<H: Handler> Workers<H> {
    /// Serves the ring until it is empty. `index` is the queue's, 0 for the high priority queue.
    pub fn drain(&self, ring: &Arc<Ring>, index: usize) {
        let mut worker = ring.worker();
        let scratch = worker.get_or_insert_with(|| {
            name_thread(index);
            Box::new(Scratch::new())
        });
        loop {
            let mem = self.mem.memory();
            let table = ring.exchange(&mem, &mut scratch.used, &mut scratch.heads);
            if scratch.heads.is_empty() {
                return;
            }
            self.serve_batch(ring, &mem, table, scratch);
            if self.closing.load(Ordering::Relaxed) {
                return ring.flush(&mem, &mut scratch.used);
            }
        }
    }

    fn serve_batch(&self, ring: &Arc<Ring>, mem: &Memory, table: Table, scratch: &mut Scratch) {
        let Scratch { work, segments, heads, used } = scratch;
        let mut moved = 0;
        for head in heads.drain(..) {
            let (mut loaded, fault) = chain::load(mem, table, head, work, segments);
            moved += loaded.work.readable.len();
            let written = match fault {
                Ok(()) => self.serve(ring, head, &mut loaded, segments),
                Err(errno) => Some(loaded.refuse(errno)),
            };
            drop(loaded);
            let Some(written) = written else { continue };
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
    fn serve(&self, ring: &Arc<Ring>, head: u16, loaded: &mut Loaded, segments: &[Segment]) -> Option<usize> {
        match self.handler.handle(loaded.work) {
            Outcome::Replied(len) => Some(len.min(loaded.work.writable.len())),
            Outcome::Silent => Some(0),
            Outcome::Deferred(wait) => match self.defer(ring, head, segments, wait) {
                Some(()) => None,
                None => Some(loaded.refuse(libc::EAGAIN)),
            },
            Outcome::Handed(hand) => {
                hand(Box::new(answer_later(ring, head, segments)));
                None
            }
        }
    }

    /// Runs `wait` on a thread of its own. `None` if there are too many.
    fn defer(&self, ring: &Arc<Ring>, head: u16, segments: &[Segment], wait: Deferred) -> Option<()> {
        let permit = Permit::take(&self.waiting)?;
        let answer = answer_later(ring, head, segments);
        let work = move || {
            answer(wait());
            // The reply is with the ring before nothing seems to wait any more.
            drop(permit);
        };
        let thread = thread::Builder::new().name("thruway-wait".into()).stack_size(WAIT_STACK);
        thread.spawn(work).map(drop).ok()
    }
}

/// Delivers a reply that comes from another thread. What waits for it must not keep the memory of a guest that is gone.
fn answer_later(ring: &Arc<Ring>, head: u16, segments: &[Segment]) -> impl FnOnce(Vec<u8>) + Send + use<> {
    let (mut completion, ring) = (ring.promise(head, segments), Arc::downgrade(ring));
    move |reply| {
        completion.reply = reply;
        if let Some(ring) = ring.upgrade() {
            ring.complete(completion);
        }
    }
}

/// One of the requests that may wait.
struct Permit(Arc<AtomicUsize>);

impl Permit {
    fn take(waiting: &Arc<AtomicUsize>) -> Option<Self> {
        let more = |n| (n < MAX_WAITING).then_some(n + 1);
        waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Self(waiting.clone()))
    }
}

impl Drop for Permit {
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
