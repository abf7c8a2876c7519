//! How long a worker polls its empty ring before it sleeps. A wake-up costs both sides more than most requests do.

use std::time::{Duration, Instant};

/// Shortest time worth polling for: about what it costs to go to sleep and be woken.
const SHORTEST: Duration = Duration::from_micros(4);

/// Pauses between two looks at the ring: about 0.5 µs. That is short beside a request, and leaves the ring's cache line
/// to the driver.
const PAUSES: u32 = 16;

/// Looks at the ring between two offers of the CPU to other threads: about 2 µs.
const LOOKS: u32 = 4;

/// If an offer takes longer than this, another thread has run: two switches of threads and some work. An offer that
/// nobody takes costs 1 µs.
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

/// One worker's polling. The time adapts to the load, as in KVM's halt polling (virt/kvm/kvm_main.c): it grows when
/// requests come soon after the worker has gone to sleep, and shrinks after a long silence. It takes two in a row: a
/// guest that opens and closes a file now and then sends a second request soon, and then none for long.
#[derive(Default)]
pub struct Poll {
    /// How long it polls at present.
    time: Duration,
    /// When the ring was seen empty.
    since: Option<Instant>,
    looks: u32,
    /// Polling would have found the last request that woke the worker.
    soon: bool,
    /// Other threads want the CPU.
    wanted: bool,
}

impl Poll {
    /// The worker was woken. `longest`: the bound of the time.
    pub fn wake(&mut self, longest: Duration) {
        self.wanted = false;
        if let Some(idle) = self.since.take().map(|since| since.elapsed()) {
            let was_soon = std::mem::replace(&mut self.soon, idle < longest);
            self.time = match (was_soon, self.soon) {
                (true, true) => (2 * self.time).max(SHORTEST).min(longest),
                (false, true) => self.time,
                _ if self.time > SHORTEST => self.time / 2,
                _ => Duration::ZERO,
            };
        }
    }

    /// Whether it has polled long enough.
    pub fn is_over(&self) -> bool {
        self.wanted || self.time.is_zero() || self.since.is_some_and(|since| since.elapsed() >= self.time)
    }

    /// The ring was empty. Waits a moment, and now and then offers the CPU to other threads.
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

    /// Leaves the CPU to other threads, and polls less the next time.
    fn give_way(&mut self) {
        self.time /= 2;
        self.wanted = true;
    }

    /// The ring was not empty. Whether it had been polled.
    pub fn found(&mut self) -> bool {
        self.since.take().is_some()
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
        // Two requests, and then none for long.
        for _ in 0..10 {
            poll.rest();
            poll.wake(longest);
            assert!(poll.is_over());
            poll.rest();
            poll.wake(Duration::ZERO);
            assert!(poll.is_over());
        }
        (0..2).for_each(|_| {
            poll.rest();
            poll.wake(longest);
        });
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
        // From now on, every request comes too late.
        (0..40).for_each(|_| {
            poll.rest();
            poll.wake(Duration::ZERO);
        });
        assert_eq!(poll.time, Duration::ZERO);
    }
}
