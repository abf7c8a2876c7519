//! Deputies: while a request of a queue takes long, another thread serves the queue.
//!
//! Nothing tells beforehand that a system call will wait, for example for a file that another process writes to. So
//! while a queue is served, the dispatcher looks now and then whether its request is still the one of the look before.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use vmm_sys_util::epoll::{EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::handler::Handler;
use super::queue::{End, Workers};
use super::ring::Ring;
use super::seat::Glance;
use crate::limits::Limit;

/// From a look that found a request being served to the next. A request that is still the same then gets the queue a
/// deputy. It is long beside nearly all requests, and a look takes about a microsecond.
const TICK: Duration = Duration::from_millis(10);

/// From the first request, or from a look that found none being served, to the next look. A request that takes long is
/// noticed after [`TICK`] and this at most; virtiofsd's pool of threads answers the next request after 10 to 40 ms.
/// Each look wakes a thread, so with 200 short requests a second this is one wake-up for 8 requests.
const FAR: Duration = Duration::from_millis(40);

impl<H: Handler> Workers<H> {
    /// Has the dispatcher look whether requests take long, if it is not to look already. The caller has a seat.
    pub(super) fn look_out(&self) {
        // Either the look that finds nothing to look for sees the seat taken, or this sees that there is no other.
        fence(Ordering::SeqCst);
        if !self.lookout.due.load(Ordering::Relaxed) {
            self.lookout.look_in(FAR);
        }
    }

    /// Looks, and says when to look again.
    pub(super) fn look(self: &Arc<Self>) {
        let mut serves = false;
        let mut looks = self.lookout.looks.lock();
        for (index, ring) in self.lookout.rings() {
            let now = ring.seat().glance();
            serves |= now.serves;
            if looks.takes_long(index, now) {
                self.take_over(ring, index, now);
            }
        }
        drop(looks);
        self.lookout.due.store(false, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        // Who takes a seat from here on sees that no look is due.
        if serves || self.lookout.rings().any(|(_, ring)| !ring.seat().is_free()) {
            self.lookout.look_in(if serves { TICK } else { FAR });
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
