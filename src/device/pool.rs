//! Threads for what waits, kept for a while: to make one costs more than most of what they do.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Most jobs at a time, each on a thread of its own. It bounds what a guest can make the daemon spend: a waiting thread
/// costs some 10 KiB; a guest with more processes blocked in fcntl(F_SETLKW) gets EAGAIN.
const MAX_JOBS: usize = 256;

/// Stack of a thread in bytes: what waits is a system call with its arguments on the heap.
const STACK: usize = 128 << 10;

/// How long a thread stays that has nothing to do: a burst of syncs finds it, an idle daemon has none.
const STAY: Duration = Duration::from_secs(5);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub struct Pool {
    state: Mutex<State>,
    come: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Threads that wait for a job, those that are called to one included.
    idle: usize,
    threads: usize,
}

impl Pool {
    /// Runs a job. False if there are too many.
    pub fn run(self: &Arc<Self>, job: Job) -> bool {
        let mut state = self.state.lock();
        if state.idle > state.jobs.len() {
            state.jobs.push_back(job);
            self.come.notify_one();
            return true;
        }
        if state.threads >= MAX_JOBS {
            return false;
        }
        let pool = self.clone();
        let thread = thread::Builder::new().name("thruway-wait".into()).stack_size(STACK);
        let started = thread.spawn(move || {
            job();
            pool.work();
        });
        state.threads += usize::from(started.is_ok());
        started.is_ok()
    }

    fn work(&self) {
        while let Some(job) = self.next() {
            job();
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        state.idle += 1;
        if state.jobs.is_empty() {
            self.come.wait_for(&mut state, STAY);
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
    fn threads_are_kept_and_no_job_waits_for_another() {
        let pool = Arc::new(Pool::default());
        let (done, finished) = channel();
        for _ in 0..100 {
            let done = done.clone();
            assert!(pool.run(Box::new(move || done.send(thread::current().id()).unwrap())));
            finished.recv().unwrap();
            while pool.state.lock().idle == 0 {
                thread::yield_now();
            }
        }
        assert_eq!(pool.state.lock().threads, 1);
        let (go, wait) = channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        for _ in 0..MAX_JOBS {
            let wait = wait.clone();
            assert!(pool.run(Box::new(move || {
                let _ = wait.lock().recv();
            })));
        }
        assert!(!pool.run(Box::new(|| {})));
        drop(go);
    }
}
