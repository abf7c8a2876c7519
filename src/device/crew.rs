//! The threads of the queues (`worker`), and who waits for kicks until a queue has one.

use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use vmm_sys_util::epoll::{Epoll, EpollEvent};
use vmm_sys_util::eventfd::EventFd;

/// Those of one connection.
#[derive(Default)]
pub struct Crew {
    /// Waits for the kicks of queues without a worker. An event's data is the queue's number.
    pub dispatcher: Mutex<Option<Arc<Epoll>>>,
    /// By queue.
    pub workers: Mutex<Vec<Option<Worker>>>,
}

/// One of them.
pub struct Worker {
    pub epoll: Arc<Epoll>,
    /// Has it look at the ring.
    pub wake: Arc<EventFd>,
    pub thread: JoinHandle<()>,
}

impl Crew {
    pub fn new(dispatcher: Arc<Epoll>) -> Self {
        Self { dispatcher: Mutex::new(Some(dispatcher)), workers: Mutex::default() }
    }

    /// The queues without a worker that were kicked.
    pub fn kicked(&self) -> Vec<usize> {
        let mut events = [EpollEvent::default(); 64];
        let Some(dispatcher) = self.dispatcher.lock().clone() else { return Vec::new() };
        let ready = dispatcher.wait(0, &mut events).unwrap_or(0);
        events[..ready].iter().map(|event| event.data() as usize).collect()
    }

    /// Waits for the end of all workers. The connection is closing.
    pub fn join(&self) {
        let workers = std::mem::take(&mut *self.workers.lock());
        for worker in workers.into_iter().flatten() {
            // A panic has told of itself.
            let _ = worker.thread.join();
        }
    }
}
