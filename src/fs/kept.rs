//! Descriptors that stay open while they are used.
//!
//! Opening a file by its handle takes longer than most of what is then done with it. A build opens the same headers for
//! reading again and again. So an inode may keep an O_PATH descriptor, or one that the guest opened for reading and
//! closed.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::process::{Resource, getrlimit};

/// Most descriptors that are kept. A build or a listing comes back to about as many files within a second. Each costs
/// the kernel some 300 bytes.
const MOST: usize = 4096;

/// At most this part of what the process may open is kept: a quarter. The rest is for what the guest has open.
const SHARE: u64 = 4;

/// A descriptor is closed when it was not used for one to two of these. An open descriptor keeps a file that the host
/// has removed on its disk.
const UNUSED: Duration = Duration::from_secs(1);

/// Keeps a descriptor.
pub trait Keeper: Send + Sync + 'static {
    /// Closes the descriptor if it was not used since the last call. Whether it may still be open.
    fn close_unused(&self) -> bool;
}

/// Those that keep a descriptor, and a thread that closes what is not used.
pub struct Kept<T> {
    state: Mutex<State<T>>,
    /// There is a keeper, or it is over.
    changed: Condvar,
    count: AtomicUsize,
    most: usize,
}

struct State<T> {
    keepers: Vec<Weak<T>>,
    over: bool,
}

impl<T: Keeper> Kept<T> {
    /// Starts the thread. It sleeps while nothing is kept.
    pub fn start() -> Arc<Self> {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / SHARE;
        let kept = Arc::new(Self {
            state: Mutex::new(State { keepers: Vec::new(), over: false }),
            changed: Condvar::new(),
            count: AtomicUsize::new(0),
            most: MOST.min(limit as usize),
        });
        let thread = thread::Builder::new().name("thruway-sweep".into());
        let swept = kept.clone();
        if let Err(e) = thread.spawn(move || swept.run()) {
            tracing::warn!("files are opened by handle each time: {e}");
            kept.end();
        }
        kept
    }

    /// Ends the thread.
    pub fn end(&self) {
        self.state.lock().over = true;
        self.changed.notify_all();
    }

    /// Adds one that is about to keep a descriptor. False: it must not.
    pub fn add(&self, keeper: &Arc<T>) -> bool {
        if self.count.load(Ordering::Relaxed) >= self.most {
            return false;
        }
        let mut state = self.state.lock();
        if !state.over {
            self.count.fetch_add(1, Ordering::Relaxed);
            state.keepers.push(Arc::downgrade(keeper));
            self.changed.notify_all();
        }
        !state.over
    }

    /// Closes what was not used since the last sweep.
    pub fn sweep(&self) {
        let mut keepers = std::mem::take(&mut self.state.lock().keepers);
        let before = keepers.len();
        keepers.retain(|keeper| keeper.upgrade().is_some_and(|keeper| keeper.close_unused()));
        self.count.fetch_sub(before - keepers.len(), Ordering::Relaxed);
        self.state.lock().keepers.append(&mut keepers);
    }

    fn run(&self) {
        loop {
            {
                let mut state = self.state.lock();
                while state.keepers.is_empty() && !state.over {
                    self.changed.wait(&mut state);
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
