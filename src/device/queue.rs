//! What a queue's worker does: takes requests, has them served, gives the chains back. `worker` has the threads, and
//! `deputy` gives them deputies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::MutexGuard;

use super::chain::{self, Table, Used};
use super::config::Role;
use super::crew::Crew;
use super::handler::Handler;
use super::lookout::Lookout;
use super::monitor::Monitor;
use super::offload::HOLDS_UP;
use super::origin::{Origin, Service};
use super::region::MemorySnapshot;
use super::ring::{Busy, Ring};
use super::scratch::{BATCH, Scratch};
use super::seat::{Seat, Turn};
use super::tally::Tally;
use super::uring::Urings;

/// How long FORGETs may gather, so that hundreds of them cost one wake-up of the worker and of the guest's CPU. Linux
/// tries again after this time when the queue was full (fs/fuse/virtio_fs.c).
const GATHER: Duration = Duration::from_millis(1);

/// What the workers of one connection share.
pub struct Workers<H> {
    pub service: Arc<Service<H>>,
    /// The connection is over.
    pub closing: AtomicBool,
    /// A session comes from another daemon: what is in the rings stays there.
    pub loading: AtomicBool,
    /// The frontend logs dirty pages (VHOST_F_LOG_ALL).
    pub logging: AtomicBool,
    pub urings: Arc<Urings>,
    /// Longest that a worker polls its ring.
    pub poll: Duration,
    pub monitor: Arc<Monitor>,
    pub lookout: Lookout,
    pub crew: Crew,
}

/// How a thread's turn at a ring has ended.
pub(super) enum End {
    /// There is nothing to do for it.
    Left,
    /// Another thread has the seat, since a request took long.
    TakenOver,
}

impl<H: Handler> Workers<H> {
    /// Serves the requests of the ring until it is empty. To be called by the queue's own worker. `index`: the queue's
    /// number.
    pub fn drain(self: &Arc<Self>, ring: &Arc<Ring>, index: usize) {
        if Role::of(index) == Role::HighPriority {
            // Nobody waits for the requests of this queue, so it is not polled.
            std::thread::sleep(GATHER);
        }
        while let End::TakenOver = self.take_turn(ring, index, true) {}
    }

    /// Serves the ring until it is empty, or until somebody else does.
    pub(super) fn take_turn(self: &Arc<Self>, ring: &Arc<Ring>, index: usize, own: bool) -> End {
        let (turn, scratch) = ring.sit(own);
        self.look_out();
        let mut scratch = self.scratch(scratch, index);
        if Role::of(index) != Role::HighPriority {
            scratch.poll.wake(self.poll);
        }
        self.serve(ring, index, (turn, own), scratch)
    }

    /// What a thread keeps at this queue.
    pub(super) fn scratch(&self, kept: Option<Box<Scratch>>, index: usize) -> Box<Scratch> {
        kept.unwrap_or_else(|| Box::new(Scratch::new(self.urings.of(index).cloned())))
    }

    /// `own`: the turn is the queue's own worker's.
    pub(super) fn serve(
        &self,
        ring: &Arc<Ring>,
        index: usize,
        (turn, own): (Turn, bool),
        mut scratch: Box<Scratch>,
    ) -> End {
        let tally = self.monitor.tally(index);
        loop {
            scratch.reap();
            let mut snapshot = self.service.mem.keep();
            let mut seat = ring.seat();
            let Seat { heads, used, own_away, .. } = &mut *seat;
            used.append(&mut scratch.used);
            // The end of a hold or of a load wakes the worker.
            let held = self.monitor.is_held() || self.loading.load(Ordering::SeqCst);
            let ends = held || self.closing.load(Ordering::Relaxed) || !own && !*own_away;
            if heads.is_empty() && ends {
                ring.flush(&snapshot.near, used);
                scratch.poll.rest();
                ring.leave(seat, scratch);
                return End::Left;
            }
            let rest = scratch.poll.is_over();
            let table = match heads.is_empty() {
                true => ring.exchange(index, &snapshot.near, used, heads, BATCH, rest),
                false => ring.table(),
            };
            if seat.heads.is_empty() {
                if rest {
                    tally.slept();
                    scratch.poll.rest();
                    ring.leave(seat, scratch);
                    return End::Left;
                }
                drop(seat);
                scratch.poll.pause();
                continue;
            }
            if scratch.poll.found() {
                tally.found();
            }
            if let End::TakenOver = self.serve_batch(ring, seat, (turn, own), &mut snapshot, table, &mut scratch, tally)
            {
                return End::TakenOver;
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "it is the inside of serve")]
    fn serve_batch<'a>(
        &self,
        ring: &'a Arc<Ring>,
        mut seat: MutexGuard<'a, Seat<Busy>>,
        (turn, own): (Turn, bool),
        snapshot: &mut MemorySnapshot,
        table: Table,
        scratch: &mut Scratch,
        tally: &Tally,
    ) -> End {
        let Scratch { work, segments, uring, offload, .. } = scratch;
        let (service, uring) = (&self.service, uring.as_deref());
        let mut moved = 0;
        while let Some(head) = seat.begin() {
            drop(seat);
            let (mut loaded, fault) = chain::load(&service.mem, snapshot, table, head, work, segments);
            let sent = loaded.work.readable.len();
            moved += sent;
            let mut origin = Origin {
                service,
                ring,
                head,
                segments,
                snapshot: loaded.snapshot,
                uring,
                offload: Some(offload),
                tally: Some(tally),
                left: false,
            };
            let written = origin.serve(&mut loaded, fault);
            drop(loaded);
            written.inspect(|written| ring.served(&Used::new(head, *written)));
            if let Some(written) = written.filter(|_| self.logging.load(Ordering::Acquire)) {
                chain::mark_dirty(snapshot, segments, written);
            }
            seat = ring.seat();
            if let Some(busy) = seat.end(turn) {
                drop(seat);
                ring.return_from(busy, own, &snapshot.near, written.map(|written| Used::new(head, written)));
                return End::TakenOver;
            }
            let Some(written) = written else {
                offload.left();
                continue;
            };
            let Seat { heads, used, .. } = &mut *seat;
            // Without io_uring nothing leaves.
            offload.served(sent + written, || uring.is_some() && (!heads.is_empty() || ring.has_more(&snapshot.near)));
            moved += written;
            used.push(Used::new(head, written));
            if moved >= HOLDS_UP {
                ring.flush(&snapshot.near, used);
                moved = 0;
            }
        }
        End::Left
    }
}
