//! What the workers (`worker`) and deputies (`deputy`) of the queues need to know of their device.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::ring::{Ring, Vring};

/// What an event for all threads says.
pub const ALL: u64 = 0;

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

    /// What wakes a thread of a queue: what wakes all of them, whose events say [`ALL`], and `own`.
    pub fn epoll(&self, own: impl IntoIterator<Item = (RawFd, EventSet, u64)>) -> io::Result<Epoll> {
        let epoll = Epoll::new()?;
        // Each thread sees each write once, and none reads the event.
        let once = EventSet::IN | EventSet::EDGE_TRIGGERED;
        let all = self.events.iter().map(|event| (event.as_raw_fd(), once, ALL));
        for (fd, on, data) in all.chain(own) {
            epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(on, data))?;
        }
        Ok(epoll)
    }
}
