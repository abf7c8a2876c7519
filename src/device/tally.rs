//! What a queue's worker counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// What one worker counts. It is the only one that writes there.
#[derive(Default)]
#[repr(align(128))]
pub struct Tally {
    pub found: AtomicU64,
    pub slept: AtomicU64,
    pub submissions: AtomicU64,
    pub handovers: AtomicU64,
}

fn count(counter: &AtomicU64) {
    // The worker alone writes it, so this needs no locked instruction.
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

impl Tally {
    /// A poll of the empty ring found a request.
    pub fn found(&self) {
        count(&self.found);
    }

    /// The worker goes to sleep.
    pub fn slept(&self) {
        count(&self.slept);
    }

    /// A transfer went to io_uring.
    pub fn submitted(&self) {
        count(&self.submissions);
    }

    /// A request went to a thread.
    pub fn handed_over(&self) {
        count(&self.handovers);
    }
}
