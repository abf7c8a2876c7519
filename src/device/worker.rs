//! The worker of a queue, which waits for the driver's kicks. A queue gets it with its first request, so a queue that
//! the guest does not use costs no thread. Until then one thread, the dispatcher, waits for the kicks of all queues.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use vmm_sys_util::epoll::{Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::config::Role;
use super::crew::Worker;
use super::handler::Handler;
use super::pool::no_thread;
use super::queue::Workers;
use super::ring::Ring;

/// What has woken a worker. Lookout's events are [`ALL`](super::lookout::ALL).
const KICK: u64 = 1;
const WAKE: u64 = 2;
const URING: u64 = 3;

impl<H: Handler> Workers<H> {
    /// The ring was started or kicked, or is held no more. If there is something to take from it, its worker takes it,
    /// and waits for its kicks from here on.
    ///
    /// `starts`: it was started. A frontend that restores a virtual machine may send the session only then, so until
    /// there is one, what is in the ring stays there, or until the driver kicks.
    pub(super) fn attend(self: &Arc<Self>, ring: &Arc<Ring>, index: usize, starts: bool) {
        ring.adopt(index);
        // Its guest has no session any more if an earlier worker process died while it ended that.
        let leftovers = ring.has_leftovers();
        let waits = || starts && !self.service.handler.has_session() && ring.keeps_what_is_there();
        let mut workers = self.crew.workers.lock();
        if workers.len() <= index {
            workers.resize_with(index + 1, || None);
        }
        if workers[index].is_none() {
            let watched = match &*self.crew.dispatcher.lock() {
                Some(dispatcher) => ring.watch_kick(dispatcher, index as u64),
                None => Ok(()),
            };
            if let Err(e) = watched {
                tracing::error!("nobody hears of the requests of queue {index}: {e}");
            }
            if !leftovers && waits() {
                return;
            }
            ring.clear_kick();
            if !leftovers && ring.asks_for_kick() {
                return;
            }
            match self.hire(ring, index) {
                Ok(worker) => workers[index] = Some(worker),
                Err(_) => {
                    drop(workers);
                    no_thread();
                    return self.drain(ring, index);
                }
            }
        }
        if let Some(worker) = &workers[index] {
            // If this fails, the dispatcher goes on to wait.
            let _ = ring.watch_kick(&worker.epoll, KICK);
            if leftovers || !waits() {
                // It fails only if the event is set already.
                let _ = worker.wake.write(1);
            }
        }
    }

    fn hire(self: &Arc<Self>, ring: &Arc<Ring>, index: usize) -> io::Result<Worker> {
        let wake = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        let uring = self.urings.of(index).map(|uring| (uring.lock().event(), EventSet::IN, URING));
        let own = [(wake.as_raw_fd(), EventSet::IN, WAKE)];
        let epoll = Arc::new(self.lookout.epoll(own.into_iter().chain(uring))?);
        let (workers, ring, theirs) = (self.clone(), ring.clone(), (epoll.clone(), wake.clone()));
        let thread = thread::Builder::new()
            .name(Role::of(index).thread_name())
            .spawn(move || workers.work(&ring, index, &theirs.0, &theirs.1))?;
        Ok(Worker { epoll, wake, thread })
    }

    fn work(self: &Arc<Self>, ring: &Arc<Ring>, index: usize, epoll: &Epoll, wake: &EventFd) {
        // One of each kind.
        let mut events = [EpollEvent::default(); 5];
        while !self.closing.load(Ordering::Relaxed) {
            let ready = match epoll.wait(-1, &mut events) {
                Ok(ready) => ready,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return tracing::error!("queue {index} is not served any more: {e}"),
            };
            for event in &events[..ready] {
                match event.data() {
                    KICK => ring.clear_kick(),
                    WAKE => drop(wake.read()),
                    URING => self.urings.of(index).into_iter().for_each(|uring| uring.lock().seen()),
                    _ => {}
                }
            }
            if !self.closing.load(Ordering::Relaxed) {
                self.drain(ring, index);
            }
        }
    }
}
