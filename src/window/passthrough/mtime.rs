//! The times of files that the guest has stored to in place. To set them can take long: while a process of the host
//! writes to a file, the kernel holds the file's lock, and a file system may be frozen. So neither the mapper nor a
//! queue's worker sets them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::fs::{AtFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, utimensat};

use crate::fuse::ops::Result;
use crate::limits::{OWED_TIMES, TIMES_THREADS};
use crate::window::turn::{MayWait, Slow};

/// Gives a file the present time. In tests it is another function than [`touch`].
pub type Touch = Box<dyn Fn(BorrowedFd) -> Result<()> + Send + Sync>;

/// Sets the times of a file that was stored to in place: the kernel does that at the first store to a clean page, and
/// on tmpfs never.
pub fn touch(file: BorrowedFd) -> Result<()> {
    let time = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
    let times = Timestamps { last_access: time(UTIME_OMIT), last_modification: time(UTIME_NOW) };
    utimensat(file, c"", &times, AtFlags::EMPTY_PATH)
}

/// Lock rule: `state` is locked after the entries, as the last lock. It is not locked while a file gets its
/// times.
pub struct DeferredMtime {
    state: Mutex<State>,
    /// A file has got its times.
    set: Condvar,
    touch: Touch,
}

#[derive(Default)]
struct State {
    /// Files that have yet to get the present time, and their nodeids. A node can have several: its file is opened anew
    /// for each slot.
    owed: Vec<(u64, Slow<OwnedFd>)>,
    /// Nodes whose file gets it now.
    setting: Vec<u64>,
    /// Threads of [`DeferredMtime::set_soon`].
    threads: usize,
}

impl State {
    /// The next file for a thread. Those of a node that is getting its time would only make the thread wait.
    fn next(&self) -> Option<usize> {
        self.owed.iter().position(|(node, _)| !self.setting.contains(node))
    }
}

impl DeferredMtime {
    pub fn new(touch: Touch) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), set: Condvar::new(), touch })
    }

    /// A node's file must get the present time. Never waits.
    pub fn owe(&self, node: u64, file: &Slow<OwnedFd>) {
        let mut state = self.state.lock();
        if state.owed.iter().any(|(_, owed)| owed.is(file)) {
            return;
        }
        if state.owed.len() >= OWED_TIMES {
            tracing::warn!(node, "no time of a store in place: too many files wait for theirs");
            return;
        }
        state.owed.push((node, file.clone()));
    }

    /// Whether a node's file has yet to get a time. Never waits.
    pub fn owes(&self, node: u64) -> bool {
        let state = self.state.lock();
        state.setting.contains(&node) || state.owed.iter().any(|(of, _)| *of == node)
    }

    /// Whether any file has yet to get its time, and no thread is about it.
    pub fn is_behind(&self) -> bool {
        self.state.lock().next().is_some()
    }

    /// Gives a node's file its time if it owes one. Waits for the file system, and for other threads that do the same.
    pub fn settle(&self, node: u64) {
        let mut state = self.state.lock();
        loop {
            if state.setting.contains(&node) {
                self.set.wait(&mut state);
            } else if let Some(at) = state.owed.iter().position(|(of, _)| *of == node) {
                self.set(&mut state, at);
            } else {
                return;
            }
        }
    }

    /// Gives all files that owe one their time. Waits as [`settle`](Self::settle) does.
    pub fn settle_all(&self) {
        loop {
            let state = self.state.lock();
            let next = state.owed.first().map(|(node, _)| *node).or_else(|| state.setting.first().copied());
            drop(state);
            let Some(node) = next else { return };
            self.settle(node);
        }
    }

    /// Gives the files their times on a thread. Never waits.
    pub fn set_soon(self: &Arc<Self>) {
        let mut state = self.state.lock();
        if state.next().is_none() || state.threads >= TIMES_THREADS {
            return;
        }
        state.threads += 1;
        drop(state);
        let this = self.clone();
        if let Err(e) = thread::Builder::new().name("thruway-times".into()).spawn(move || this.work()) {
            tracing::debug!("no thread for the times of files: {e}");
            self.state.lock().threads -= 1;
        }
    }

    fn work(&self) {
        let mut state = self.state.lock();
        while let Some(at) = state.next() {
            self.set(&mut state, at);
        }
        state.threads -= 1;
    }

    fn set(&self, state: &mut MutexGuard<State>, at: usize) {
        let (node, file) = state.owed.remove(at);
        state.setting.push(node);
        MutexGuard::unlocked(state, || {
            // It fails where a daemon without privileges serves another user's file. The kernel may move the times
            // there.
            if let Err(errno) = (self.touch)(file.get(&MayWait::without_a_turn()).as_fd()) {
                tracing::debug!(node, "no time of a store in place: {errno}");
            }
            drop(file);
        });
        state.setting.retain(|setting| *setting != node);
        self.set.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Files whose times take as long as the test likes: it hears of each, and says when it is done.
    fn slow() -> (Arc<DeferredMtime>, Receiver<()>, Sender<()>) {
        let ((begin, begun), (go, wait)) = (channel(), channel());
        let wait = Mutex::new(wait);
        let touch = move |_: BorrowedFd<'_>| {
            begin.send(()).unwrap();
            wait.lock().recv().unwrap();
            Ok(())
        };
        (DeferredMtime::new(Box::new(touch)), begun, go)
    }

    fn file() -> Slow<OwnedFd> {
        Slow::new(Arc::new(File::open("/dev/null").unwrap().into()))
    }

    /// Who looks at the file meanwhile must see the new times.
    #[test]
    fn nobody_overtakes_who_sets_a_time() {
        let (times, begun, go) = slow();
        let one = file();
        times.owe(7, &one);
        times.owe(7, &one);
        assert!(times.owes(7) && !times.owes(8));
        thread::scope(|scope| {
            let first = scope.spawn(|| times.settle(7));
            begun.recv().unwrap();
            // The guest stores again meanwhile, and others wait for both.
            assert!(times.owes(7));
            times.owe(7, &one);
            let second = scope.spawn(|| times.settle(7));
            times.settle(8);
            go.send(()).unwrap();
            begun.recv().unwrap();
            assert!(times.owes(7));
            go.send(()).unwrap();
            first.join().unwrap();
            second.join().unwrap();
        });
        assert!(!times.owes(7) && begun.try_recv().is_err());
    }

    #[test]
    fn a_file_that_waits_delays_no_others() {
        let (times, begun, go) = slow();
        for node in 0..TIMES_THREADS as u64 {
            times.owe(node, &file());
            // Two files of one node wait for the same.
            times.owe(node, &file());
            times.set_soon();
            begun.recv().unwrap();
            assert!(!times.is_behind());
        }
        // There are no more threads. A request sets the time for itself.
        times.owe(99, &file());
        times.set_soon();
        assert!(times.is_behind() && begun.try_recv().is_err());
        thread::scope(|scope| {
            scope.spawn(|| times.settle(99));
            begun.recv().unwrap();
            (0..2 * TIMES_THREADS + 1).for_each(|_| go.send(()).unwrap());
        });
        (0..TIMES_THREADS as u64).for_each(|node| times.settle(node));
        assert!(!times.is_behind());
    }

    #[test]
    fn the_number_of_files_that_wait_is_limited() {
        let (times, ..) = slow();
        (0..OWED_TIMES as u64 + 9).for_each(|node| times.owe(node, &file()));
        assert!(times.owes(OWED_TIMES as u64 - 1) && !times.owes(OWED_TIMES as u64));
    }
}
