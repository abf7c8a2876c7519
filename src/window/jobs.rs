//! The mapper's queue of jobs. It is bounded: the guest's jobs by number, the daemon's own because none of them waits
//! twice.
//!
//! What waits for no file is done by the mapper's thread, in turn, revocations first. The rest is done by workers: the
//! jobs of one file in turn, those of different files side by side.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::io::Errno;

use super::frontend::{Closing, Source};
use super::proxy::Event;
use crate::fuse::ops::Answer;
use crate::limits::{Limit, WINDOW_JOBS, WINDOW_WORKERS};

/// A job of the mapper.
pub enum Job {
    Dax(DaxJob),
    Slot(SlotJob),
    /// Closes files that nothing is mapped of any more.
    Close(Closing),
    /// Others do something to a file. The daemon has known since then.
    Event(Event, Instant),
    /// The session is over.
    Reset,
    /// What another process has left can be put in order: there is a frontend.
    FinishTakeover,
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
    /// It has asked to store there.
    pub stored: bool,
    /// These are the file's own pages.
    pub through: bool,
}

/// A range of the DAX window that the guest of another daemon has mapped.
pub struct ResumedRange {
    /// Which of the window's ranges it is.
    pub range: usize,
    /// Its file's node.
    pub node: u64,
    /// Where it is in the file, in bytes.
    pub from: u64,
    /// The guest may store there.
    pub stored: bool,
    /// Its file.
    pub source: Arc<dyn Source>,
}

/// A job for the DAX window.
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
    /// The session of another daemon goes on here.
    Resume {
        ranges: Vec<ResumedRange>,
        /// Whether each of them must be mapped, or else gets zeros.
        strict: bool,
        answer: Answer,
    },
    /// Blocks are about to be taken from these bytes of a node's file.
    Vacate {
        node: u64,
        from: u64,
        len: u64,
        /// Also where the guest only reads.
        all: bool,
        answer: Answer,
    },
    /// Of the daemon's own.
    Node(NodeJob, u64),
}

/// What the daemon itself wants done to a node's file in the DAX window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NodeJob {
    /// A process was killed while it replaced mappings: a Cached proxy file must take their place.
    Mend,
    /// Its own pages are taken back: a Cached proxy file must take their place.
    Copy,
    /// What the guest has stored in a Cached proxy file goes to the real one, and its own pages come back if they can.
    Care,
}

/// A job for window passthrough.
pub enum SlotJob {
    /// A guest with passthrough begins a session.
    Start {
        session: u64,
        answer: Answer,
    },
    /// The session of another daemon goes on here, after the end of the one before.
    Resume(Box<dyn FnOnce() + Send>),
    /// A guest whose session goes on here gets the table.
    Table {
        session: u64,
    },
    /// The guest is about to move to another daemon.
    Leave,
    /// A node's first open with passthrough, which has got the `life`th entry.
    Open {
        index: u32,
        life: u64,
    },
    /// The guest wants a live entry that covers these bytes.
    Ask {
        node: u64,
        index: u32,
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
    /// The guest has let go of it, and may read in its slot again.
    Live,
    /// The guest has let go of it, and its file moves to a longer slot.
    Move,
    /// The guest has not let go of it in time: a Cached proxy file must take the file's place.
    Replace,
    /// It waits for room, which may be there now.
    Serve,
    /// Its file was kept away for a while, which is over.
    Again,
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
    /// The daemon, which has as many files to close as it had open.
    Close,
    Reset,
}

/// A job of the daemon's own.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Own {
    Event(Event),
    Entry(EntryJob, u32),
    Node(NodeJob, u64),
    FinishTakeover,
    Leave,
    Table(u64),
    Show,
}

/// Who does a job.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// The mapper's thread.
    Mapper,
    /// A worker. A host process waits for it, so there is always a worker for these.
    Urgent,
    /// A worker, after the other jobs of this file.
    Worker(Key),
}

/// The file of a job, so that its jobs are done in turn.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    Node(u64),
    Entry(u32),
    /// There is no order to keep.
    Any,
}

impl Job {
    const fn origin(&self) -> Origin {
        match self {
            Self::Dax(DaxJob::Node(job, node)) => Origin::Daemon(Own::Node(*job, *node)),
            Self::Slot(SlotJob::Entry(job, index)) => Origin::Daemon(Own::Entry(*job, *index)),
            Self::Slot(SlotJob::Leave) => Origin::Daemon(Own::Leave),
            Self::Slot(SlotJob::Table { session }) => Origin::Daemon(Own::Table(*session)),
            Self::Dax(_) | Self::Slot(_) => Origin::Guest,
            Self::Event(event, _) => Origin::Daemon(Own::Event(*event)),
            Self::Close(_) => Origin::Close,
            Self::Reset => Origin::Reset,
            Self::FinishTakeover => Origin::Daemon(Own::FinishTakeover),
            Self::Show(_) => Origin::Daemon(Own::Show),
        }
    }

    fn by(&self) -> By {
        match self {
            Self::Event(Event::Revoke(_), _) | Self::Reset | Self::FinishTakeover | Self::Show(_) => By::Mapper,
            Self::Slot(
                SlotJob::Start { .. }
                | SlotJob::Resume(_)
                | SlotJob::Table { .. }
                | SlotJob::Leave
                | SlotJob::Entry(EntryJob::Drop | EntryJob::Downgrade, _),
            ) => By::Mapper,
            Self::Dax(DaxJob::Node(NodeJob::Copy | NodeJob::Mend, _))
            | Self::Slot(SlotJob::Entry(EntryJob::Replace, _)) => By::Urgent,
            Self::Close(closing) if closing.is_urgent() => By::Urgent,
            Self::Dax(DaxJob::Map { node, .. } | DaxJob::Vacate { node, .. } | DaxJob::Node(_, node)) => {
                By::Worker(Key::Node(*node))
            }
            Self::Slot(SlotJob::Open { index, .. } | SlotJob::Ask { index, .. } | SlotJob::Entry(_, index)) => {
                By::Worker(Key::Entry(*index))
            }
            Self::Dax(DaxJob::Unmap { .. } | DaxJob::Resume { .. })
            | Self::Event(Event::Changed(_), _)
            | Self::Close(_) => By::Worker(Key::Any),
        }
    }

    fn is_urgent(&self) -> bool {
        matches!(self, Self::Event(Event::Revoke(_), _)) || matches!(self.by(), By::Urgent)
    }

    /// Whether the mapper's thread does it.
    #[cfg(any(fuzzing, test))]
    pub fn is_mappers(&self) -> bool {
        matches!(self.by(), By::Mapper)
    }

    /// Whether it is of no use once its session is over.
    const fn ends_with_its_session(&self) -> bool {
        matches!(self, Self::Dax(_) | Self::Slot(_))
    }

    /// Workers take nothing that came after it until it is done.
    const fn is_fence(&self) -> bool {
        matches!(
            self,
            Self::Reset
                | Self::FinishTakeover
                | Self::Slot(SlotJob::Start { .. } | SlotJob::Resume(_) | SlotJob::Table { .. })
        )
    }

    /// Answers EAGAIN to a job of the guest's.
    fn refuse(self) {
        match self {
            Self::Dax(
                DaxJob::Map { answer, .. }
                | DaxJob::Unmap { answer, .. }
                | DaxJob::Resume { answer, .. }
                | DaxJob::Vacate { answer, .. },
            )
            | Self::Slot(SlotJob::Start { answer, .. } | SlotJob::Ask { answer, .. }) => answer(Err(Errno::AGAIN)),
            // Its sender answers, or finds that nobody does.
            Self::Slot(
                SlotJob::Open { .. } | SlotJob::Entry(..) | SlotJob::Resume(_) | SlotJob::Table { .. } | SlotJob::Leave,
            )
            | Self::Dax(DaxJob::Node(..))
            | Self::Event(..)
            | Self::Close(_)
            | Self::Reset
            | Self::FinishTakeover
            | Self::Show(_) => {}
        }
    }
}

#[derive(Default)]
pub struct Jobs {
    queue: Mutex<Queue>,
    /// For the mapper's thread.
    some: Condvar,
    /// For the workers.
    work: Condvar,
    /// How often a worker was woken.
    #[cfg(test)]
    woken: std::sync::atomic::AtomicUsize,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// How many are the guest's.
    guests: usize,
    /// Those of the daemon's own.
    waiting: HashSet<Own>,
    /// The mapper's thread is to look again when it must do something.
    is_late: bool,
    /// Until when it waits; `None` if it does not wait, or without end.
    until: Option<Instant>,
    /// The mapper's thread is at a job that ends a session or begins one.
    fenced: bool,
    /// Files that workers are at.
    busy: HashSet<Key>,
    workers: Workers,
}

/// How many workers there are, and what they do.
#[derive(Default)]
struct Workers {
    all: usize,
    idle: usize,
    /// They are at jobs that are not urgent.
    ordinary: usize,
}

/// A worker's job. When it is dropped, the file's next job can begin.
pub struct Work<'a> {
    jobs: &'a Jobs,
    by: By,
    /// `None` once it is taken.
    pub job: Option<Job>,
    /// No worker is left for the next job, and there may be one more.
    pub is_last: bool,
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        let mut queue = self.jobs.queue.lock();
        if let By::Worker(key) = self.by {
            queue.busy.remove(&key);
            queue.workers.ordinary -= 1;
        }
        self.jobs.wake_for_more(queue);
    }
}

impl Queue {
    fn take(&mut self, at: usize) -> Option<Job> {
        let job = self.jobs.remove(at)?;
        match job.origin() {
            Origin::Guest => self.guests -= 1,
            Origin::Daemon(own) => drop(self.waiting.remove(&own)),
            Origin::Close | Origin::Reset => {}
        }
        Some(job)
    }

    /// Where the next job for the mapper's thread is.
    fn for_mapper(&self) -> Option<usize> {
        self.jobs.iter().position(|job| job.by() == By::Mapper)
    }

    /// Where the next job for a worker is.
    fn for_worker(&self) -> Option<usize> {
        // One worker is left for what is urgent.
        let ordinary = self.workers.ordinary + 1 < WINDOW_WORKERS;
        let may = |job: &Job| match job.by() {
            By::Mapper => false,
            By::Urgent => true,
            By::Worker(key) => ordinary && !self.busy.contains(&key),
        };
        if self.fenced {
            return None;
        }
        self.jobs.iter().take_while(|job| !job.is_fence()).position(may)
    }
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
        let mut ended = Vec::new();
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
            Origin::Close => {}
            // Nothing has come since the last one.
            Origin::Reset if matches!(queue.jobs.back(), Some(Job::Reset)) => return Ok(()),
            // What came before is of no use, and a worker could come to it only in the next session.
            Origin::Reset => {
                while let Some(at) = queue.jobs.iter().position(Job::ends_with_its_session) {
                    ended.extend(queue.take(at));
                }
            }
        }
        let by = job.by();
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
        match by {
            By::Mapper => drop(self.some.notify_one()),
            By::Urgent | By::Worker(_) => self.wake_worker(),
        }
        ended.into_iter().for_each(Job::refuse);
        Ok(())
    }

    /// Has workers close all files of `closing`.
    pub fn close(&self, closing: &mut Closing) {
        let Closing { files, copies } = std::mem::take(closing);
        for closing in [Closing { files, ..Closing::default() }, Closing { copies, ..Closing::default() }] {
            if !closing.is_empty() {
                self.send(Job::Close(closing));
            }
        }
    }

    /// Waits for a job for the mapper's thread, `patience` at most. Ends the wait without a job after
    /// [`hurry`](Self::hurry).
    pub fn next(&self, patience: Option<Duration>) -> Option<Job> {
        let mut queue = self.queue.lock();
        if std::mem::take(&mut queue.fenced) {
            self.work.notify_all();
        }
        let waits = |queue: &mut Queue| !queue.is_late && queue.for_mapper().is_none();
        queue.until = patience.map(|patience| Instant::now() + patience);
        match patience {
            Some(patience) => drop(self.some.wait_while_for(&mut queue, waits, patience)),
            None => self.some.wait_while(&mut queue, waits),
        }
        (queue.is_late, queue.until) = (false, None);
        let at = queue.for_mapper()?;
        let job = queue.take(at)?;
        queue.fenced = job.is_fence();
        Some(job)
    }

    /// A worker has changed what the mapper's thread waits for: something is due so soon.
    pub fn hurry(&self, patience: Duration) {
        let due = Instant::now() + patience;
        let mut queue = self.queue.lock();
        if queue.until.is_none_or(|until| due < until) {
            queue.is_late = true;
            self.some.notify_one();
        }
    }

    fn wake_worker(&self) {
        let _woken = self.work.notify_one();
        #[cfg(test)]
        self.woken.fetch_add(usize::from(_woken), std::sync::atomic::Ordering::Relaxed);
    }

    /// Wakes a worker if there is another job for it.
    fn wake_for_more(&self, queue: MutexGuard<Queue>) {
        let more = queue.for_worker().is_some();
        drop(queue);
        if more {
            self.wake_worker();
        }
    }

    /// A worker begins. `false` if there are enough.
    pub fn add_worker(&self) -> bool {
        let mut queue = self.queue.lock();
        let more = queue.workers.all < WINDOW_WORKERS;
        queue.workers.all += usize::from(more);
        more
    }

    /// A worker that was [added](Self::add_worker) could not begin.
    pub fn remove_worker(&self) {
        self.queue.lock().workers.all -= 1;
    }

    /// Waits for a job for a worker.
    pub fn next_work(&self) -> Work<'_> {
        let mut queue = self.queue.lock();
        queue.workers.idle += 1;
        loop {
            if let Some(job) = queue.for_worker().and_then(|at| queue.take(at)) {
                queue.workers.idle -= 1;
                let by = job.by();
                if let By::Worker(key) = by {
                    queue.workers.ordinary += 1;
                    if key != Key::Any {
                        queue.busy.insert(key);
                    }
                }
                let is_last = queue.workers.idle == 0 && queue.workers.all < WINDOW_WORKERS;
                // Where a wake-up met a job that had to wait.
                self.wake_for_more(queue);
                return Work { jobs: self, by, job: Some(job), is_last };
            }
            self.work.wait(&mut queue);
        }
    }

    /// The next job of any kind, without waiting, for a mapper without threads. `own`: only if it is one of the
    /// daemon's.
    #[cfg(any(fuzzing, test))]
    pub fn any(&self, own: bool) -> Option<Job> {
        let mut queue = self.queue.lock();
        let wanted =
            |job: &Job| !own || matches!(job.origin(), Origin::Daemon(Own::Entry(..) | Own::Node(..)) | Origin::Close);
        let at = queue.jobs.iter().position(wanted)?;
        queue.take(at)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn all(jobs: &Jobs) -> Vec<Job> {
        std::iter::from_fn(|| jobs.any(false)).collect()
    }

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
        let all_jobs = all(&jobs);
        let count = |is: fn(&Job) -> bool| all_jobs.iter().filter(|job| is(job)).count();
        assert_eq!(count(|job| matches!(job, Job::Dax(DaxJob::Unmap { .. }))), WINDOW_JOBS);
        assert_eq!(count(|job| matches!(job, Job::Event(..))), 10);
        assert_eq!(count(|job| matches!(job, Job::Slot(SlotJob::Entry(..)))), 12);
        // What was done can be asked for again.
        jobs.send(SlotJob::Entry(EntryJob::Drop, 1));
        assert!(matches!(*all(&jobs), [Job::Slot(SlotJob::Entry(EntryJob::Drop, 1))]));
    }

    /// A job for a node's file, and how often it was refused.
    fn map(node: u64) -> (DaxJob, Arc<AtomicUsize>) {
        let refused = Arc::new(AtomicUsize::new(0));
        let count = refused.clone();
        let answer = Box::new(move |done: Result<(), Errno>| {
            count.fetch_add(usize::from(done == Err(Errno::AGAIN)), Ordering::Relaxed);
        });
        (DaxJob::Vacate { node, from: 0, len: 1, all: false, answer }, refused)
    }

    #[test]
    fn what_a_session_asked_for_is_refused_at_its_end() {
        let jobs = Jobs::default();
        let (job, refused) = map(7);
        jobs.send(job);
        (0..10).for_each(|_| jobs.send(Job::Reset));
        let (next, kept) = map(7);
        jobs.send(next);
        assert_eq!((refused.load(Ordering::Relaxed), kept.load(Ordering::Relaxed)), (1, 0));
        assert!(matches!(*all(&jobs), [Job::Reset, Job::Dax(_)]));
        assert_eq!(jobs.queue.lock().guests, 0);
    }

    #[test]
    fn processes_that_wait_come_first_and_in_turn() {
        let (jobs, now) = (Jobs::default(), Instant::now());
        jobs.send(SlotJob::Entry(EntryJob::Drop, 1));
        jobs.send(SlotJob::Entry(EntryJob::Want, 1));
        jobs.send(Job::Reset);
        for id in 1..4 {
            jobs.send(Job::Event(Event::Changed(id), now));
            jobs.send(Job::Event(Event::Revoke(id), now));
        }
        let number = |job: Job| match job {
            Job::Event(Event::Revoke(id), _) => id,
            Job::Reset => 12,
            Job::Event(Event::Changed(id), _) => 20 + id,
            _ => unreachable!(),
        };
        let order = std::iter::from_fn(|| jobs.next(Some(Duration::ZERO))).map(number);
        assert_eq!(order.collect::<Vec<_>>(), [1, 2, 3, 12]);
        // The others are the workers', who wait for the end of the reset.
        assert!(jobs.queue.lock().for_worker().is_some());
        let others = (0..3).map(|_| number(jobs.next_work().job.take().unwrap()));
        assert_eq!(others.collect::<Vec<_>>(), [21, 22, 23]);
    }

    #[test]
    fn a_job_wakes_one_worker() {
        const JOBS: usize = 100;
        let jobs = Arc::new(Jobs::default());
        for _ in 0..2 {
            let jobs = jobs.clone();
            std::thread::spawn(move || {
                loop {
                    drop(jobs.next_work());
                }
            });
        }
        for number in 0..=JOBS {
            let rests = |queue: &Queue| queue.workers.idle == 2 && queue.jobs.is_empty();
            while !rests(&jobs.queue.lock()) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if number < JOBS {
                jobs.send(map(7).0);
            }
        }
        assert_eq!(jobs.woken.load(Ordering::Relaxed), JOBS);
    }

    #[test]
    fn workers_do_the_jobs_of_a_file_in_turn_and_leave_one_worker_for_who_waits() {
        let jobs = Jobs::default();
        let next = || {
            let at = jobs.queue.lock().for_worker();
            at.map(|_| jobs.next_work())
        };
        let node = |work: &Work| match work.job {
            Some(Job::Dax(DaxJob::Vacate { node, .. } | DaxJob::Node(_, node))) => node,
            _ => unreachable!(),
        };
        for _ in 0..2 {
            (1..=WINDOW_WORKERS as u64).for_each(|node| jobs.send(map(node).0));
        }
        let first: Vec<_> = std::iter::from_fn(next).collect();
        assert_eq!(first.iter().map(node).collect::<Vec<_>>(), (1..WINDOW_WORKERS as u64).collect::<Vec<_>>());
        // A host process waits.
        jobs.send(DaxJob::Node(NodeJob::Copy, 1));
        let urgent = next().unwrap();
        assert_eq!((node(&urgent), next().is_none()), (1, true));
        drop(first);
        assert_eq!(next().as_ref().map(node), Some(WINDOW_WORKERS as u64));
        assert_eq!(next().as_ref().map(node), Some(1));
        // Nobody begins with the next session's jobs before the last one is over.
        jobs.send(Job::Reset);
        jobs.send(map(9).0);
        assert!(next().is_none());
        assert!(matches!(jobs.next(Some(Duration::ZERO)), Some(Job::Reset)));
        assert!(next().is_none());
        assert!(jobs.next(Some(Duration::ZERO)).is_none());
        assert_eq!(next().as_ref().map(node), Some(9));
    }
}
