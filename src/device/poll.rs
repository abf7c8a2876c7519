//! How long a worker looks at its empty ring before it sleeps: a wake-up costs both sides more than most requests do.

use std::time::{Duration, Instant};

/// Shortest time worth polling for: about what it costs to go to sleep and be woken.
const SHORTEST: Duration = Duration::from_micros(4);

/// Pauses between two looks at the ring: some 0.5 µs, which is little beside a request, and leaves the ring's cache line to the driver.
const PAUSES: u32 = 16;

/// Looks at the ring between two offers of the CPU to others: some 2 µs.
const LOOKS: u32 = 4;

/// An offer that took longer than this was taken: two switches of threads and some work, where one that nobody wants takes 1 µs.
const TAKEN: Duration = Duration::from_micros(5);

/// Offers the CPU to other threads. True if one took it.
pub fn offer_cpu() -> bool {
    let offered = Instant::now();
    std::thread::yield_now();
    was_taken(offered.elapsed())
}

fn was_taken(took: Duration) -> bool {
    took > TAKEN
}

/// The state of one worker. The time adapts as KVM's halt polling does (virt/kvm/kvm_main.c): requests that come
/// soon after the worker has gone to sleep lengthen it, long silence shortens it.
#[derive(Default)]
pub struct Poll {
    /// How long it polls now.
    time: Duration,
    /// When the ring was seen empty.
    since: Option<Instant>,
    looks: u32,
    /// Others want the CPU.
    wanted: bool,
}

impl Poll {
    /// The worker was woken. `longest`: bound of the time.
    pub fn wake(&mut self, longest: Duration) {
        self.wanted = false;
        if let Some(idle) = self.since.take().map(|since| since.elapsed()) {
            self.time = match idle {
                // Polling would have found it.
                idle if idle < longest => (2 * self.time).max(SHORTEST).min(longest),
                _ if self.time > SHORTEST => self.time / 2,
                _ => Duration::ZERO,
            };
        }
    }

    /// Whether the ring was empty for long enough.
    pub fn is_over(&self) -> bool {
        self.wanted || self.time.is_zero() || self.since.is_some_and(|since| since.elapsed() >= self.time)
    }

    /// There was nothing: other threads may have the CPU.
    pub fn pause(&mut self) {
        self.since.get_or_insert_with(Instant::now);
        self.looks += 1;
        if self.looks % LOOKS == 0 {
            if offer_cpu() {
                self.give_way();
            }
        } else {
            (0..PAUSES).for_each(|_| std::hint::spin_loop());
        }
    }

    /// Where others want the CPU, they get it; and it is polled less the next time.
    fn give_way(&mut self) {
        self.time /= 2;
        self.wanted = true;
    }

    /// There was something.
    pub fn found(&mut self) {
        self.since = None;
    }

    /// The worker goes to sleep.
    pub fn rest(&mut self) {
        self.since.get_or_insert_with(Instant::now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_follows_what_comes() {
        let longest = Duration::from_secs(3600);
        let mut poll = Poll::default();
        poll.wake(longest);
        assert!(poll.is_over());
        poll.rest();
        poll.wake(longest);
        assert_eq!(poll.time, SHORTEST);
        (0..100).for_each(|_| {
            poll.rest();
            poll.wake(longest);
        });
        assert_eq!(poll.time, longest);
        poll.found();
        assert!(!was_taken(Duration::ZERO));
        assert!(!poll.is_over());
        assert!(was_taken(2 * TAKEN));
        poll.give_way();
        assert!(poll.is_over());
        poll.rest();
        poll.wake(longest);
        assert!(!poll.is_over() && poll.time == longest);
        // Whatever comes now comes too late.
        (0..40).for_each(|_| {
            poll.rest();
            poll.wake(Duration::ZERO);
        });
        assert_eq!(poll.time, Duration::ZERO);
    }
}
