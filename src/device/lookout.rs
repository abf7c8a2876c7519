//! What the deputies of the queues (`deputy`) need to know of their device.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::ring::{Ring, Vring};

/// Of one device.
#[derive(Default)]
pub struct Lookout {
    /// By queue.
    rings: Arc<[OnceLock<Vring>]>,
    /// What wakes all workers.
    events: Vec<EventFd>,
    /// Somebody looks.
    pub awake: AtomicBool,
}

impl Lookout {
    pub fn new(rings: Arc<[OnceLock<Vring>]>, events: Vec<EventFd>) -> Self {
        Self { rings, events, awake: AtomicBool::new(false) }
    }

    /// How many queues there are.
    pub fn queues(&self) -> usize {
        self.rings.len()
    }

    /// Those that are there, with their numbers.
    pub fn rings(&self) -> impl Iterator<Item = (usize, &Arc<Ring>)> {
        self.rings.iter().enumerate().filter_map(|(index, ring)| Some((index, &ring.get()?.0)))
    }

    /// What wakes the deputy of a queue. Each event is seen once (EPOLLET), since nobody reads them. `back`: the
    /// deputy's own.
    pub fn epoll(&self, ring: &Ring, back: &EventFd, more: impl IntoIterator<Item = RawFd>) -> io::Result<Epoll> {
        let epoll = Epoll::new()?;
        let mine = [back.as_raw_fd()];
        let all = self.events.iter().map(EventFd::as_raw_fd).chain(mine).chain(ring.kick()).chain(more);
        for fd in all {
            let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, 0);
            epoll.ctl(ControlOperation::Add, fd, event)?;
        }
        Ok(epoll)
    }
}
