//! The mapper's queue of jobs. It is bounded: the guest's jobs by number, the daemon's own because none of them waits
//! twice.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;

use super::proxy::Event;
use super::shared::Source;
use crate::fuse::ops::Answer;
use crate::limits::{Limit, WINDOW_JOBS};

/// A job of the mapper.
pub enum Job {
    Dax(DaxJob),
    Slot(SlotJob),
    /// Others do something to a file. The daemon has known since then.
    Event(Event, Instant),
    /// The session is over.
    Reset,
    /// Somebody wants to see what is mapped.
    Show(Box<dyn FnOnce(Vec<DaxMapping>) + Send>),
}

/// A mapped range of the DAX window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaxMapping {
    /// Where it is in the window, in bytes.
    pub at: u64,
    /// Its file's node.
    pub node: u64,
    /// Where it is in the file, in bytes.
    pub from: u64,
    /// The guest may store there.
    pub writable: bool,
    /// These are the file's own pages.
    pub through: bool,
}

/// A job for the DAX window. All are the guest's.
pub enum DaxJob {
    Map {
        ranges: Range<usize>,
        from: u64,
        writable: bool,
        node: u64,
        source: Arc<dyn Source>,
        answer: Answer,
    },
    Unmap {
        ranges: Vec<usize>,
        answer: Answer,
    },
    /// Blocks are about to be taken from these bytes of a node's file.
    Vacate {
        node: u64,
        from: u64,
        len: u64,
        answer: Answer,
    },
}

/// A job for window passthrough.
pub enum SlotJob {
    /// A guest with passthrough begins a session.
    Start {
        session: u64,
        answer: Answer,
    },
    /// A node's first open with passthrough.
    Open {
        session: u64,
        node: u64,
        index: u32,
        source: Arc<dyn Source>,
    },
    /// The guest wants a live entry that covers these bytes.
    Ask {
        node: u64,
        from: u64,
        len: u64,
        writable: bool,
        answer: Answer,
    },
    Entry(EntryJob, u32),
}

/// What the daemon itself wants done to an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EntryJob {
    /// Its last open is released, and its slot is not kept.
    Drop,
    /// It was revoked because its file has a hole now.
    Downgrade,
    /// Its file has outgrown the slot.
    Remap,
    /// The guest reads and writes its file by messages, since it has lost the slot.
    Want,
}

impl From<DaxJob> for Job {
    fn from(job: DaxJob) -> Self {
        Self::Dax(job)
    }
}

impl From<SlotJob> for Job {
    fn from(job: SlotJob) -> Self {
        Self::Slot(job)
    }
}

/// Who asks for a job.
enum Origin {
    /// The guest. If the queue is full, it is refused.
    Guest,
    /// The daemon. There is no use in a second one before the first is done.
    Daemon(Own),
    Reset,
}

/// A job of the daemon's own.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Own {
    Event(Event),
    Entry(EntryJob, u32),
    Show,
}

impl Job {
    const fn origin(&self) -> Origin {
        match self {
            Self::Dax(_) | Self::Slot(SlotJob::Start { .. } | SlotJob::Open { .. } | SlotJob::Ask { .. }) => {
                Origin::Guest
            }
            Self::Slot(SlotJob::Entry(job, index)) => Origin::Daemon(Own::Entry(*job, *index)),
            Self::Event(event, _) => Origin::Daemon(Own::Event(*event)),
            Self::Reset => Origin::Reset,
            Self::Show(_) => Origin::Daemon(Own::Show),
        }
    }

    const fn is_urgent(&self) -> bool {
        matches!(self, Self::Event(Event::Revoke(_), _))
    }

    /// Answers EAGAIN to a job of the guest's.
    fn refuse(self) {
        match self {
            Self::Dax(DaxJob::Map { answer, .. } | DaxJob::Unmap { answer, .. } | DaxJob::Vacate { answer, .. })
            | Self::Slot(SlotJob::Start { answer, .. } | SlotJob::Ask { answer, .. }) => answer(Err(Errno::AGAIN)),
            // Its sender answers.
            Self::Slot(SlotJob::Open { .. } | SlotJob::Entry(..)) | Self::Event(..) | Self::Reset | Self::Show(_) => {}
        }
    }
}

#[derive(Default)]
pub struct Jobs {
    queue: Mutex<Queue>,
    some: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// How many are the guest's.
    guests: usize,
    /// Those of the daemon's own.
    waiting: HashSet<Own>,
}

impl Jobs {
    /// Adds a job. If the queue is full, the guest gets EAGAIN. The daemon's own jobs are never lost, and sending one
    /// never blocks.
    pub fn send(&self, job: impl Into<Job>) {
        if let Err(job) = self.offer(job) {
            job.refuse();
        }
    }

    /// As [`send`](Self::send), but the guest gets no answer if the queue is full.
    ///
    /// # Errors
    /// The job, if the queue is full.
    pub fn offer(&self, job: impl Into<Job>) -> Result<(), Job> {
        let job = job.into();
        let mut queue = self.queue.lock();
        match job.origin() {
            Origin::Guest if queue.guests == WINDOW_JOBS => {
                drop(queue);
                Limit::WindowJobs.reached();
                return Err(job);
            }
            Origin::Guest => queue.guests += 1,
            Origin::Daemon(own) => {
                if !queue.waiting.insert(own) {
                    return Ok(());
                }
            }
            // Nothing has come since the last one.
            Origin::Reset if matches!(queue.jobs.back(), Some(Job::Reset)) => return Ok(()),
            Origin::Reset => {}
        }
        match job {
            // A process of the host waits, and the guard does not let it wait for long. Those that came before wait,
            // too.
            job if job.is_urgent() => {
                let at = queue.jobs.iter().take_while(|job| job.is_urgent()).count();
                queue.jobs.insert(at, job);
            }
            job => queue.jobs.push_back(job),
        }
        drop(queue);
        self.some.notify_one();
        Ok(())
    }

    /// Waits for a job, `patience` at most.
    pub fn next(&self, patience: Option<Duration>) -> Option<Job> {
        let mut queue = self.queue.lock();
        if queue.jobs.is_empty() {
            match patience {
                Some(patience) => drop(self.some.wait_for(&mut queue, patience)),
                None => self.some.wait_while(&mut queue, |queue| queue.jobs.is_empty()),
            }
        }
        let job = queue.jobs.pop_front()?;
        match job.origin() {
            Origin::Guest => queue.guests -= 1,
            Origin::Daemon(own) => drop(queue.waiting.remove(&own)),
            Origin::Reset => {}
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
        let (refused, now) = (Arc::new(AtomicUsize::new(0)), Instant::now());
        let counted = Limit::WindowJobs.times();
        for _ in 0..WINDOW_JOBS + 100 {
            let refused = refused.clone();
            let answer = Box::new(move |done| {
                assert_eq!(done, Err(Errno::AGAIN));
                refused.fetch_add(1, Ordering::Relaxed);
            });
            jobs.send(DaxJob::Unmap { ranges: Vec::new(), answer });
            (0..10).for_each(|_| jobs.send(Job::Reset));
            for id in 0..5 {
                jobs.send(Job::Event(Event::Changed(id), now));
                jobs.send(Job::Event(Event::Revoke(id), now));
            }
            for index in 1..5 {
                for job in [EntryJob::Drop, EntryJob::Downgrade, EntryJob::Remap] {
                    jobs.send(SlotJob::Entry(job, index));
                }
            }
        }
        assert_eq!(refused.load(Ordering::Relaxed), 100);
        assert!(Limit::WindowJobs.times() >= counted + 100);
        let mut all = Vec::new();
        while let Some(job) = jobs.next(Some(Duration::ZERO)) {
            all.push(job);
        }
        let count = |is: fn(&Job) -> bool| all.iter().filter(|job| is(job)).count();
        assert_eq!(count(|job| matches!(job, Job::Dax(DaxJob::Unmap { .. }))), WINDOW_JOBS);
        assert_eq!(count(|job| matches!(job, Job::Event(..))), 10);
        assert_eq!(count(|job| matches!(job, Job::Slot(SlotJob::Entry(..)))), 12);
        assert!(count(|job| matches!(job, Job::Reset)) <= WINDOW_JOBS + 1);
        // What was done can be asked for again.
        jobs.send(SlotJob::Entry(EntryJob::Drop, 1));
        let again = jobs.next(Some(Duration::ZERO));
        assert!(matches!(again, Some(Job::Slot(SlotJob::Entry(EntryJob::Drop, 1)))));
    }
    #[test]
    fn processes_that_wait_come_first_and_in_turn() {
        let (jobs, now) = (Jobs::default(), Instant::now());
        jobs.send(SlotJob::Entry(EntryJob::Want, 1));
        jobs.send(Job::Reset);
        for id in 1..4 {
            jobs.send(Job::Event(Event::Changed(id), now));
            jobs.send(Job::Event(Event::Revoke(id), now));
        }
        let order = std::iter::from_fn(|| jobs.next(Some(Duration::ZERO))).map(|job| match job {
            Job::Event(Event::Revoke(id), _) => id,
            Job::Slot(_) => 11,
            Job::Reset => 12,
            Job::Event(Event::Changed(id), _) => 20 + id,
            Job::Dax(_) | Job::Show(_) => unreachable!(),
        });
        assert_eq!(order.collect::<Vec<_>>(), [1, 2, 3, 11, 12, 21, 22, 23]);
    }
}
