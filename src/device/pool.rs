//! Threads for requests that wait. They are kept for a while, because starting one costs more than most of their work.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Once};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::limits::{self, Limit};

/// Stack of a thread in bytes. A job is a system call with its arguments on the heap. Only pages in use take memory.
const STACK: usize = 256 << 10;

/// How long an idle thread stays. A burst of syncs finds it; an idle daemon has none.
const STAY: Duration = Duration::from_secs(5);

pub type Job = Box<dyn FnOnce() + Send>;

/// Separate threads for each kind of wait, so that one kind cannot take the threads of another.
pub struct Pools {
    /// For [`Wait::Host`](crate::fuse::ops::Wait).
    pub host: Arc<Pool>,
    /// For `Wait::Others`.
    pub others: Arc<Pool>,
    /// For `Wait::Lock`.
    pub locks: Arc<Pool>,
    /// For queues whose request takes long (`deputy`).
    pub deputies: Arc<Pool>,
}

impl Pools {
    /// # Errors
    /// If there is not even a thread for [`others`](Self::others). A queue's worker cannot take its place: what it
    /// would wait for may wait for its queue.
    pub fn new() -> io::Result<Arc<Self>> {
        let others = Pool::new(limits::OTHERS_THREADS, true);
        others.keep_one()?;
        Ok(Arc::new(Self {
            host: Pool::new(limits::WORK_THREADS, true),
            others,
            locks: Pool::new(limits::LOCK_THREADS, false),
            deputies: Pool::new(limits::DEPUTIES, false),
        }))
    }
}

/// Counts that the host did not give a thread, and says so once.
pub fn no_thread() {
    static SAID: Once = Once::new();
    Limit::Threads.reached();
    SAID.call_once(|| {
        tracing::warn!(
            "the host gives the daemon no more threads (pids.max of its control group, or RLIMIT_NPROC): queues \
             share a thread, a request that takes long holds them up, and locks that have to wait may fail"
        );
    });
}

pub struct Pool {
    most: usize,
    /// Whether jobs may wait for a thread.
    queues: bool,
    state: Mutex<State>,
    come: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Threads that wait for a job, including those that were just woken for one.
    idle: usize,
    threads: usize,
    /// Threads that stay when they are idle.
    stay: usize,
}

impl Pool {
    fn new(most: usize, queues: bool) -> Arc<Self> {
        Arc::new(Self { most, queues, state: Mutex::default(), come: Condvar::new() })
    }

    /// Runs a job, at once or when a thread is free for it.
    ///
    /// # Errors
    /// The job, if there is no thread for it and never will be.
    pub fn run(self: &Arc<Self>, job: Job) -> Result<(), Job> {
        let mut state = self.state.lock();
        state.jobs.push_back(job);
        if state.idle >= state.jobs.len() {
            self.come.notify_one();
            return Ok(());
        }
        if state.threads < self.most && self.spawn(&mut state).inspect_err(|_| no_thread()).is_ok() {
            return Ok(());
        }
        if self.queues && state.threads > 0 {
            return Ok(());
        }
        state.jobs.pop_back().map_or(Ok(()), Err)
    }

    /// Has a thread that is there before the first job, and stays.
    fn keep_one(self: &Arc<Self>) -> io::Result<()> {
        let mut state = self.state.lock();
        state.stay = 1;
        self.spawn(&mut state)
    }

    fn spawn(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        let pool = self.clone();
        let thread = thread::Builder::new().name("thruway-wait".into()).stack_size(STACK);
        thread.spawn(move || pool.work())?;
        state.threads += 1;
        state.idle += 1;
        Ok(())
    }

    fn work(&self) {
        while let Some(job) = self.next() {
            job();
            self.state.lock().idle += 1;
        }
    }

    /// The next job of an idle thread, which is not idle any more. `None`: the thread must end.
    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        if state.jobs.is_empty() {
            self.come.wait_for(&mut state, STAY);
        }
        while state.jobs.is_empty() && state.threads <= state.stay {
            self.come.wait(&mut state);
        }
        state.idle -= 1;
        let job = state.jobs.pop_front();
        state.threads -= usize::from(job.is_none());
        job
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn threads_are_kept_and_jobs_wait_for_one() {
        let pool = Pool::new(3, true);
        let (done, finished) = channel();
        for _ in 0..100 {
            let done = done.clone();
            assert!(pool.run(Box::new(move || done.send(thread::current().id()).unwrap())).is_ok());
            finished.recv().unwrap();
            while pool.state.lock().idle == 0 {
                thread::yield_now();
            }
        }
        assert_eq!(pool.state.lock().threads, 1);
        let (go, wait) = channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let (count, mut ended) = (10, 0);
        for _ in 0..count {
            let (wait, done) = (wait.clone(), done.clone());
            let job = move || {
                let _ = wait.lock().recv();
                done.send(thread::current().id()).unwrap();
            };
            assert!(pool.run(Box::new(job)).is_ok());
        }
        assert_eq!(pool.state.lock().threads, 3);
        drop(go);
        while ended < count {
            finished.recv().unwrap();
            ended += 1;
        }
    }

    #[test]
    fn a_thread_that_stays_takes_the_jobs_that_find_no_other() {
        let pool = Pool::new(1, true);
        pool.keep_one().unwrap();
        assert_eq!(pool.state.lock().threads, 1);
        let (done, finished) = channel();
        for _ in 0..10 {
            let done = done.clone();
            assert!(pool.run(Box::new(move || done.send(()).unwrap())).is_ok());
        }
        (0..10).for_each(|_| finished.recv().unwrap());
        assert_eq!(pool.state.lock().threads, 1);
    }

    #[test]
    fn a_job_that_may_not_queue_comes_back() {
        let pool = Pool::new(3, false);
        let (go, wait) = channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        for _ in 0..3 {
            let wait = wait.clone();
            let job = move || {
                let _ = wait.lock().recv();
            };
            assert!(pool.run(Box::new(job)).is_ok());
        }
        assert!(pool.run(Box::new(|| {})).is_err());
        drop(go);
        let all_idle = |state: &State| state.idle == 3 && state.jobs.is_empty();
        while !all_idle(&pool.state.lock()) {
            thread::yield_now();
        }
        assert!(pool.run(Box::new(|| {})).is_ok());
    }
}
