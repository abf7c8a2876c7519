//! Descriptors that are kept while they are used: O_PATH ones of inodes that are held by file handle, which takes longer
//! to open than most of what is then done, and those that the guest opened for reading and has closed, since a build, for
//! one, opens the same headers again and again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::process::{Resource, getrlimit};

use super::inode::Inode;

/// Most descriptors: of the files that a build or a listing comes back to within a second. Each costs the kernel some 300
/// bytes; what does not find room is opened by its handle each time.
const MOST: usize = 4096;

/// The part of what the process may open that they may be: the rest is for what the guest has open.
const SHARE: u64 = 4;

/// One that was not used for so long is closed, at the latest after twice as long: it would keep a file that the host has
/// removed on its disk.
const UNUSED: Duration = Duration::from_secs(1);

/// The inodes that keep a descriptor.
#[derive(Default)]
pub struct Kept {
    state: Mutex<State>,
    come: Condvar,
    count: AtomicUsize,
    most: usize,
}

#[derive(Default)]
struct State {
    inodes: Vec<Weak<Inode>>,
    over: bool,
}

impl Kept {
    /// Starts the thread that closes what is not used. It sleeps while there is nothing.
    pub fn start() -> Arc<Self> {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / SHARE;
        let kept = Arc::new(Self { most: MOST.min(limit as usize), ..Self::default() });
        let thread = thread::Builder::new().name("thruway-sweep".into());
        let swept = kept.clone();
        if let Err(e) = thread.spawn(move || swept.sweep_on()) {
            tracing::warn!("files are opened by handle each time: {e}");
            kept.end();
        }
        kept
    }

    /// Ends the thread.
    pub fn end(&self) {
        self.state.lock().over = true;
        self.come.notify_all();
    }

    /// Takes note of an inode that is about to keep a descriptor. False: it must not.
    pub fn add(&self, inode: &Arc<Inode>) -> bool {
        if self.count.load(Ordering::Relaxed) >= self.most {
            return false;
        }
        let mut state = self.state.lock();
        if !state.over {
            self.count.fetch_add(1, Ordering::Relaxed);
            state.inodes.push(Arc::downgrade(inode));
            self.come.notify_all();
        }
        !state.over
    }

    /// Closes what was not used since the last time.
    pub fn sweep(&self) {
        let mut inodes = std::mem::take(&mut self.state.lock().inodes);
        let before = inodes.len();
        inodes.retain(|inode| inode.upgrade().is_some_and(|inode| inode.keeps_on()));
        self.count.fetch_sub(before - inodes.len(), Ordering::Relaxed);
        self.state.lock().inodes.append(&mut inodes);
    }

    fn sweep_on(&self) {
        loop {
            {
                let mut state = self.state.lock();
                while state.inodes.is_empty() && !state.over {
                    self.come.wait(&mut state);
                }
                if state.over {
                    return;
                }
            }
            thread::sleep(UNUSED);
            self.sweep();
        }
    }
}
