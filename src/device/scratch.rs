//! What a worker keeps from request to request. Between its turns it is kept in the seat of its ring, which waits at a
//! stop for what the kernel still does.

use std::sync::Arc;

use parking_lot::Mutex;

use super::chain::{Segment, Used};
use super::offload::CopyOffload;
use super::poll::Poll;
use super::uring::Uring;
use crate::fuse::Work;

/// Most chains that are taken from a ring, and given back to it, at a time. Several share the cost of the ring's lock
/// and of a notification. They are few so that the driver works on some while the others are served: with 8 requests
/// under way 4 did up to twice as much as 16, and with 32 as much (`thruway-bench`, two cores).
pub const BATCH: usize = 4;

pub struct Scratch {
    pub work: Work,
    pub segments: Vec<Segment>,
    pub used: Vec<Used>,
    pub poll: Poll,
    /// I/O that the kernel does.
    pub uring: Option<Arc<Mutex<Uring>>>,
    pub offload: CopyOffload,
}

impl Scratch {
    pub fn new(uring: Option<Arc<Mutex<Uring>>>) -> Self {
        Self {
            work: Work::default(),
            segments: Vec::new(),
            used: Vec::with_capacity(BATCH),
            poll: Poll::default(),
            uring,
            offload: CopyOffload::default(),
        }
    }

    /// Takes the I/O that the kernel has done.
    pub fn reap(&mut self) {
        if let Some(uring) = &self.uring {
            uring.lock().reap(&mut self.used);
        }
    }

    /// Waits for the I/O that the kernel does. Returns the chains to give back.
    pub fn finish(&mut self) -> &mut Vec<Used> {
        if let Some(uring) = &self.uring {
            uring.lock().finish(&mut self.used);
        }
        &mut self.used
    }
}
