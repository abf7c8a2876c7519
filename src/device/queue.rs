//! The worker of a queue: takes requests, has them served, gives the chains back.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::chain::{self, Table, Used};
use super::crowd::HOLDS_UP;
use super::handler::Handler;
use super::monitor::{Monitor, Tally};
use super::origin::{Origin, Service};
use super::region::Kept;
use super::ring::Ring;
use super::scratch::{BATCH, Scratch};
use super::uring::Urings;

/// How long FORGETs may gather, so that hundreds of them cost one wake-up of the worker and of the guest's CPU. Linux
/// tries again after this time when the queue was full (fs/fuse/virtio_fs.c).
const GATHER: Duration = Duration::from_millis(1);

/// What the workers of one connection share.
pub struct Workers<H> {
    pub service: Arc<Service<H>>,
    /// The connection is over.
    pub closing: AtomicBool,
    /// The frontend logs dirty pages (VHOST_F_LOG_ALL).
    pub logging: AtomicBool,
    pub urings: Arc<Urings>,
    /// Longest that a worker polls its ring.
    pub poll: Duration,
    pub monitor: Arc<Monitor>,
}

/// What a queue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    HighPriority,
    /// The request queue of this number.
    Request(usize),
}

impl Role {
    /// What queue number `index` is for.
    pub fn of(index: usize) -> Self {
        index.checked_sub(1).map_or(Self::HighPriority, Self::Request)
    }
}

impl<H: Handler> Workers<H> {
    /// Serves the requests of the ring until it is empty. `index`: the queue's number.
    pub fn drain(&self, ring: &Arc<Ring>, index: usize) {
        let role = Role::of(index);
        role.name_thread();
        let mut worker = ring.worker();
        let scratch = self.scratch(&mut worker, index);
        let tally = self.monitor.tally(index);
        if role == Role::HighPriority {
            // Nobody waits for the requests of this queue, so it is not polled.
            std::thread::sleep(GATHER);
        } else {
            scratch.poll.wake(self.poll);
        }
        loop {
            scratch.reap();
            let mut kept = self.service.mem.keep();
            if self.monitor.is_held() {
                // The end of the hold wakes the worker.
                ring.flush(&kept.near, &mut scratch.used);
                return scratch.poll.rest();
            }
            let rest = scratch.poll.is_over();
            let table = ring.exchange(index, &kept.near, &mut scratch.used, &mut scratch.heads, BATCH, rest);
            if scratch.heads.is_empty() {
                if rest {
                    tally.slept();
                    return scratch.poll.rest();
                }
                scratch.poll.pause();
                continue;
            }
            if scratch.poll.found() {
                tally.found();
            }
            self.serve_batch(ring, &mut kept, table, scratch, tally);
            if self.closing.load(Ordering::Relaxed) {
                return ring.flush(&kept.near, &mut scratch.used);
            }
        }
    }

    /// What the worker of this queue keeps.
    fn scratch<'a>(&self, worker: &'a mut Option<Box<Scratch>>, index: usize) -> &'a mut Scratch {
        worker.get_or_insert_with(|| Box::new(Scratch::new(self.urings.of(index).cloned())))
    }

    fn serve_batch(&self, ring: &Arc<Ring>, kept: &mut Kept, table: Table, scratch: &mut Scratch, tally: &Tally) {
        let Scratch { work, segments, heads, used, uring, crowd, .. } = scratch;
        let (service, uring) = (&self.service, uring.as_deref());
        let mut moved = 0;
        let mut heads = heads.drain(..);
        while let Some(head) = heads.next() {
            let (mut loaded, fault) = chain::load(&service.mem, kept, table, head, work, segments);
            let sent = loaded.work.readable.len();
            moved += sent;
            let mut origin = Origin {
                service,
                ring,
                head,
                segments,
                kept: loaded.kept,
                uring,
                crowd: Some(crowd),
                tally: Some(tally),
                left: false,
            };
            let written = origin.serve(&mut loaded, fault);
            drop(loaded);
            let Some(written) = written else {
                crowd.left();
                continue;
            };
            // Without io_uring nothing leaves.
            crowd.served(sent + written, || uring.is_some() && (heads.len() > 0 || ring.has_more(&kept.near)));
            if self.logging.load(Ordering::Acquire) {
                chain::mark_dirty(kept, segments, written);
            }
            moved += written;
            used.push(Used::new(head, written));
            if moved >= HOLDS_UP {
                ring.flush(&kept.near, used);
                moved = 0;
            }
        }
    }
}

thread_local! {
    /// What the thread is named after.
    static NAMED: Cell<Option<Role>> = const { Cell::new(None) };
}

impl Role {
    /// Names the calling thread after its queue; vhost-user-backend gives all workers the same name.
    fn name_thread(self) {
        if NAMED.replace(Some(self)) == Some(self) {
            return;
        }
        let name = match self {
            Self::HighPriority => "thruway-hiprio".to_owned(),
            Self::Request(number) => format!("thruway-q{number}"),
        };
        if let Ok(name) = std::ffi::CString::new(name) {
            let _ = rustix::thread::set_name(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_have_their_order() {
        let [first, second] = [0, 1].map(Role::Request);
        assert_eq!([0, 1, 2].map(Role::of), [Role::HighPriority, first, second]);
    }
}
