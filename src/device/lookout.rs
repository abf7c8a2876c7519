//! What the workers (`worker`) and deputies (`deputy`) of the queues need to know of their device.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::ring::{Ring, Vring};
use super::seat::Glance;

/// What an event for all threads says.
pub const ALL: u64 = 0;

/// Of one device.
pub struct Lookout {
    /// By queue.
    rings: Arc<[OnceLock<Vring>]>,
    /// What wakes all workers.
    events: Vec<EventFd>,
    /// Tells the dispatcher that a look is due.
    timer: OwnedFd,
    /// The timer is set.
    pub due: AtomicBool,
    pub looks: Mutex<Looks>,
}

impl Lookout {
    /// # Errors
    /// If there can be no timer.
    pub fn new(rings: Arc<[OnceLock<Vring>]>, events: Vec<EventFd>) -> io::Result<Self> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?;
        let looks = Mutex::new(Looks::new(rings.len()));
        Ok(Self { rings, events, timer, due: AtomicBool::new(false), looks })
    }

    /// What becomes readable when a look is due. Nobody needs to read it: a new time makes it unreadable.
    pub fn timer(&self) -> RawFd {
        self.timer.as_raw_fd()
    }

    /// Has a look be due after this time, unless one is already.
    pub fn look_in(&self, time: Duration) {
        if self.due.swap(true, Ordering::SeqCst) {
            return;
        }
        let once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        // It fails only for a time that does not exist.
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &Itimerspec { it_interval: once, it_value });
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

/// What the last look has seen, by queue.
pub struct Looks(Vec<Glance>);

impl Looks {
    pub fn new(queues: usize) -> Self {
        Self(vec![Glance::default(); queues])
    }

    /// Looks at one queue. Whether its request is the one of the last look.
    pub fn takes_long(&mut self, index: usize, now: Glance) -> bool {
        let before = std::mem::replace(&mut self.0[index], now);
        now.serves && now == before
    }
}

#[cfg(test)]
mod tests {
    use super::super::scratch::Scratch;
    use super::super::seat::Seat;
    use super::*;

    #[test]
    fn a_request_takes_long_from_its_second_look_on() {
        let (mut looks, mut seat) = (Looks::new(2), Seat::<()>::default());
        assert!(!looks.takes_long(1, seat.glance()) && !looks.takes_long(1, seat.glance()));
        let turn = seat.take(true);
        seat.heads = vec![1, 2];
        assert!(!looks.takes_long(1, seat.glance()) && !looks.takes_long(1, seat.glance()));
        seat.begin();
        assert!(!looks.takes_long(1, seat.glance()));
        // The next one.
        seat.end(turn);
        seat.begin();
        assert!(!looks.takes_long(1, seat.glance()) && looks.takes_long(1, seat.glance()));
        seat.end(turn);
        seat.leave(Box::new(Scratch::new(None)));
        assert!(!looks.takes_long(1, seat.glance()));
    }
}
