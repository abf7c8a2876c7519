//! Descriptors that stay open while they are used.
//!
//! Opening a file by its handle takes longer than most of what is then done with it. A build opens the same headers for
//! reading again and again. So an inode may keep an O_PATH descriptor, or one that the guest opened for reading and
//! closed. Requests without a handle use such a descriptor too.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::process::{Resource, getrlimit};

use crate::limits::KEPT_DESCRIPTORS;

/// At most this part of what the process may open is kept: a quarter. The rest is for what the guest has open.
const SHARE: u64 = 4;

/// If all descriptors are kept that may be, so many keepers are asked for one that was not used lately. Each one that
/// was is asked again after all others. More would make a request slow.
const ASKED: usize = 8;

/// A descriptor is closed when it was not used for one to two of these. An open descriptor keeps a file that the host
/// has removed on its disk.
const UNUSED: Duration = Duration::from_secs(1);

/// Keeps a descriptor.
pub trait FdHolder: Send + Sync + 'static {
    /// What is kept. It closes the descriptor when it is dropped.
    type Spare;
    /// Gives up the descriptor if it was not used since the last call. `sweeps`: it may keep it for another reason.
    fn give_up(&self, sweeps: bool) -> GivenUp<Self::Spare>;
}

/// What [`FdHolder::give_up`] did.
pub enum GivenUp<S> {
    /// The descriptor is in use, or was used lately.
    Used,
    /// Nothing is kept any more.
    Gone(Option<S>),
}

impl<S> GivenUp<S> {
    fn gone(self) -> Option<Option<S>> {
        match self {
            Self::Used => None,
            Self::Gone(spare) => Some(spare),
        }
    }
}

/// Those that keep a descriptor, and a thread that closes what is not used.
pub struct FdCache<T> {
    state: Mutex<State<T>>,
    /// There is a keeper, or it is over.
    changed: Condvar,
    count: AtomicUsize,
    most: usize,
    /// Held during a sweep, which takes all keepers out.
    sweeping: Mutex<()>,
}

/// A keeper that is still there, and what it kept.
type Evicted<T> = (Option<Arc<T>>, Option<<T as FdHolder>::Spare>);

struct State<T> {
    /// The one that is asked next is the first.
    keepers: VecDeque<Weak<T>>,
    over: bool,
}

impl<T: FdHolder> FdCache<T> {
    /// Starts the thread, which calls `enter` first. It sleeps while nothing is kept.
    pub fn start(enter: impl FnOnce() + Send + 'static) -> Arc<Self> {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / SHARE;
        let kept = Arc::new(Self {
            state: Mutex::new(State { keepers: VecDeque::new(), over: false }),
            changed: Condvar::new(),
            count: AtomicUsize::new(0),
            most: KEPT_DESCRIPTORS.min(limit as usize),
            sweeping: Mutex::new(()),
        });
        let thread = thread::Builder::new().name("thruway-sweep".into());
        let swept = kept.clone();
        if let Err(e) = thread.spawn(move || {
            enter();
            swept.run();
        }) {
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
        let mut state = self.state.lock();
        // Closed after the lock is released, since close(2) may take long.
        let mut closed = None;
        if !state.over && self.count.load(Ordering::Relaxed) >= self.most {
            closed = self.make_room(&mut state.keepers);
        }
        let added = !state.over && self.count.load(Ordering::Relaxed) < self.most;
        if added {
            self.count.fetch_add(1, Ordering::Relaxed);
            state.keepers.push_back(Arc::downgrade(keeper));
            self.changed.notify_all();
        }
        drop(state);
        drop(closed);
        added
    }

    /// Takes one out that did not use its descriptor lately. Returns what is to be dropped.
    fn make_room(&self, keepers: &mut VecDeque<Weak<T>>) -> Option<Evicted<T>> {
        for _ in 0..ASKED {
            let first = keepers.pop_front()?;
            let keeper = first.upgrade();
            match keeper.as_ref().map_or(GivenUp::Gone(None), |keeper| keeper.give_up(false)) {
                GivenUp::Used => keepers.push_back(first),
                GivenUp::Gone(spare) => {
                    self.count.fetch_sub(1, Ordering::Relaxed);
                    return Some((keeper, spare));
                }
            }
        }
        None
    }

    /// Closes one, used lately or not. False: all are in use at this moment.
    pub fn evict(&self) -> bool {
        // A sweep takes all keepers out.
        let _sweeping = self.sweeping.lock();
        let mut state = self.state.lock();
        for _ in 0..state.keepers.len() {
            let Some(first) = state.keepers.pop_front() else { break };
            let keeper = first.upgrade();
            // The second time it counts as not used lately.
            let give_up = |keeper: &Arc<T>| (0..2).find_map(|_| keeper.give_up(false).gone());
            let Some(spare) = keeper.as_ref().map_or(Some(None), give_up) else {
                state.keepers.push_back(first);
                continue;
            };
            self.count.fetch_sub(1, Ordering::Relaxed);
            // Closed after the lock is released, since close(2) may take long.
            drop(state);
            drop((keeper, spare));
            return true;
        }
        false
    }

    /// Closes what was not used since the last sweep.
    pub fn sweep(&self) {
        let _sweeping = self.sweeping.lock();
        let mut keepers = std::mem::take(&mut self.state.lock().keepers);
        let before = keepers.len();
        keepers.retain(|keeper| keeper.upgrade().is_some_and(|keeper| matches!(keeper.give_up(true), GivenUp::Used)));
        self.count.fetch_sub(before - keepers.len(), Ordering::Relaxed);
        self.state.lock().keepers.append(&mut keepers);
    }

    /// The number of descriptors that are kept.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// The most descriptors that are kept.
    #[cfg(test)]
    pub fn most(&self) -> usize {
        self.most
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
