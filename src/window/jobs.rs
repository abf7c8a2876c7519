//! What the mapper is to do, in order. The queue is bounded: the guest's jobs by number, and of what the daemon itself asks for no
//! job waits twice.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;

use super::mapper::Job;
use super::proxy::Event;
use crate::limits::WINDOW_JOBS;

#[derive(Default)]
pub struct Jobs {
    queue: Mutex<Queue>,
    some: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// How many are of the guest.
    guests: usize,
    /// The daemon's own that wait.
    waiting: HashSet<Own>,
}

/// A job of the daemon that may be asked for again before it is done, to no purpose.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Own {
    Changed(u64),
    Revoke(u64),
    Drop(u32),
    Downgrade(u32),
    Remap(u32),
    Gone(u32),
}

impl Own {
    fn of(job: &Job) -> Option<Self> {
        Some(match *job {
            Job::Event(Event::Changed(id)) => Self::Changed(id),
            Job::Event(Event::Revoke(id)) => Self::Revoke(id),
            Job::Drop { index } => Self::Drop(index),
            Job::Downgrade { index } => Self::Downgrade(index),
            Job::Remap { index } => Self::Remap(index),
            Job::Gone { index } => Self::Gone(index),
            _ => return None,
        })
    }
}

impl Jobs {
    /// Adds a job. The guest gets EAGAIN for one too many; those of the daemon are never lost, and never wait.
    pub fn send(&self, job: Job) {
        let mut queue = self.queue.lock();
        if let Some(own) = Own::of(&job) {
            if !queue.waiting.insert(own) {
                return;
            }
        } else if matches!(job, Job::Reset) {
            // Nothing has come since the last one.
            if matches!(queue.jobs.back(), Some(Job::Reset)) {
                return;
            }
        } else if queue.guests == WINDOW_JOBS {
            drop(queue);
            return job.refuse(Errno::AGAIN);
        } else {
            queue.guests += 1;
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.some.notify_one();
    }

    /// Waits for a job, or so long.
    pub fn next(&self, patience: Option<Duration>) -> Option<Job> {
        let mut queue = self.queue.lock();
        if queue.jobs.is_empty() {
            match patience {
                Some(patience) => drop(self.some.wait_for(&mut queue, patience)),
                None => self.some.wait_while(&mut queue, |queue| queue.jobs.is_empty()),
            }
        }
        let job = queue.jobs.pop_front()?;
        match Own::of(&job) {
            Some(own) => drop(queue.waiting.remove(&own)),
            None if matches!(job, Job::Reset) => {}
            None => queue.guests -= 1,
        }
        Some(job)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn the_queue_is_bounded_and_what_the_daemon_asks_for_is_kept() {
        let jobs = Jobs::default();
        let refused = Arc::new(AtomicUsize::new(0));
        for _ in 0..WINDOW_JOBS + 100 {
            let refused = refused.clone();
            let answer = Box::new(move |done| {
                assert_eq!(done, Err(Errno::AGAIN));
                refused.fetch_add(1, Ordering::Relaxed);
            });
            jobs.send(Job::Unmap { ranges: Vec::new(), answer });
            (0..10).for_each(|_| jobs.send(Job::Reset));
            for id in 0..5 {
                jobs.send(Job::Event(Event::Changed(id)));
                jobs.send(Job::Event(Event::Revoke(id)));
            }
            for index in 1..5 {
                jobs.send(Job::Drop { index });
                jobs.send(Job::Downgrade { index });
                jobs.send(Job::Remap { index });
            }
        }
        assert_eq!(refused.load(Ordering::Relaxed), 100);
        let mut all = Vec::new();
        while let Some(job) = jobs.next(Some(Duration::ZERO)) {
            all.push(job);
        }
        let count = |is: fn(&Job) -> bool| all.iter().filter(|job| is(job)).count();
        assert_eq!(count(|job| matches!(job, Job::Unmap { .. })), WINDOW_JOBS);
        assert_eq!(count(|job| matches!(job, Job::Event(_))), 10);
        assert_eq!(count(|job| matches!(job, Job::Drop { .. } | Job::Downgrade { .. } | Job::Remap { .. })), 12);
        assert!(count(|job| matches!(job, Job::Reset)) <= WINDOW_JOBS + 1);
        // What was done can be asked for again.
        jobs.send(Job::Drop { index: 1 });
        assert!(matches!(jobs.next(Some(Duration::ZERO)), Some(Job::Drop { index: 1 })));
    }
}
