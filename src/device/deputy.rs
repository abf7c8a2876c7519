//! Deputies: while a request of a queue takes long, another thread serves the queue.
//!
//! Nothing tells beforehand that a system call will wait, for example for a file that another process writes to. So
//! while a queue is served, one thread looks every [`TICK`] whether its request is still the one of the look before.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::thread;
use std::time::Duration;

use vmm_sys_util::epoll::{EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::handler::Handler;
use super::queue::{End, Workers};
use super::ring::Ring;
use super::seat::Glance;
use crate::limits::Limit;

/// A request that takes longer than one to two of these gets the queue a deputy. It is long beside nearly all requests,
/// and a look takes about a microsecond. virtiofsd's pool of threads answers the next request after 10 to 40 ms.
const TICK: Duration = Duration::from_millis(10);

/// After so many looks that saw no request the thread rests, until a worker wakes it. A guest that sends a request now
/// and then costs 20 looks for each.
const QUIET: u32 = 20;

impl<H: Handler> Workers<H> {
    /// Has somebody look whether requests take long. The caller has a seat.
    pub(super) fn look_out(self: &Arc<Self>) {
        let awake = &self.lookout.awake;
        // Either the thread that is about to rest sees the seat taken, or this sees that it rests.
        fence(Ordering::SeqCst);
        if awake.load(Ordering::Relaxed) || awake.swap(true, Ordering::SeqCst) {
            return;
        }
        let workers = self.clone();
        if self.service.pools.deputies.run(Box::new(move || workers.look())).is_err() {
            awake.store(false, Ordering::SeqCst);
        }
    }

    fn look(self: &Arc<Self>) {
        let mut seen = vec![Glance::default(); self.lookout.queues()];
        let mut quiet = 0;
        while !self.closing.load(Ordering::Relaxed) {
            thread::sleep(TICK);
            quiet += 1;
            for (index, ring) in self.lookout.rings() {
                let (now, before) = (ring.seat().glance(), &mut seen[index]);
                if now != *before || now.serves {
                    quiet = 0;
                }
                if now.serves && now == *before {
                    self.take_over(ring, index, now);
                }
                *before = now;
            }
            if quiet < QUIET {
                continue;
            }
            self.lookout.awake.store(false, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            let all_free = self.lookout.rings().all(|(_, ring)| ring.seat().is_free());
            if all_free || self.lookout.awake.swap(true, Ordering::SeqCst) {
                return;
            }
            quiet = 0;
        }
    }

    fn take_over(self: &Arc<Self>, ring: &Arc<Ring>, index: usize, glance: Glance) {
        let (workers, ring) = (self.clone(), ring.clone());
        let job = move || {
            if let Err(e) = workers.deputize(&ring, index, glance) {
                tracing::warn!("queue {index} waits for a request that takes long: {e}");
            }
        };
        if self.service.pools.deputies.run(Box::new(job)).is_err() {
            Limit::Deputies.reached();
        }
    }

    /// Serves the queue until its own worker is back. `glance`: the request that takes long.
    fn deputize(self: &Arc<Self>, ring: &Arc<Ring>, index: usize, glance: Glance) -> io::Result<()> {
        let uring = self.urings.of(index).map(|uring| uring.lock().event());
        let back = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        // Each is seen once, since it is the worker who reads them.
        let once = |fd| (fd, EventSet::IN | EventSet::EDGE_TRIGGERED, 0);
        let own = uring.into_iter().chain([back.as_raw_fd()]);
        let epoll = ring.with_kick(|kick| self.lookout.epoll(own.chain(kick).map(once)))?;
        let Some(turn) = ring.take_over(glance, &back) else { return Ok(()) };
        let mut end = self.serve(ring, index, (turn, false), self.scratch(None, index));
        while let End::Left = end {
            if self.closing.load(Ordering::Relaxed) || !ring.seat().own_away {
                return Ok(());
            }
            match epoll.wait(-1, &mut [EpollEvent::default()]) {
                Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(e),
                _ => end = self.take_turn(ring, index, false),
            }
        }
        Ok(())
    }
}
