//! Which large transfers leave a queue's worker. It is fastest if the worker copies the data itself, but then the next
//! request has to wait.

/// A transfer of this many bytes or more leaves a crowded worker: about 50 µs of copying, several times what it costs
/// to have another thread copy.
pub const LARGE: usize = 256 << 10;

/// A request that has moved this many bytes has held up the next one: about 10 µs of copying, more than a notification
/// costs.
pub const HOLDS_UP: usize = 64 << 10;

/// After a metadata request waits behind a large transfer, this many large transfers leave the worker. If they follow
/// each other without a metadata request, nobody waits any more. A transfer that waits for a transfer does not count:
/// Linux sends the end of a large read right after the rest of it, and waking another thread for it would cost more.
const CROWD: u32 = 64;

/// What one worker has seen of its queue.
#[derive(Default)]
pub struct CopyOffload {
    /// How many more large transfers leave.
    left: u32,
    /// The next request has waited behind a large one.
    waited: bool,
    /// The request that is served moves data.
    data: bool,
}

impl CopyOffload {
    /// The request that is served is a READ or WRITE of `bytes`. True if it should leave the worker.
    pub fn moves(&mut self, bytes: usize) -> bool {
        self.data = true;
        self.left > 0 && bytes >= LARGE
    }

    /// The request has left the worker.
    pub fn left(&mut self) {
        self.data = false;
        self.left = self.left.saturating_sub(1);
    }

    /// The worker has served the request and moved this many bytes. `others`: whether other requests wait.
    pub fn served(&mut self, moved: usize, others: impl FnOnce() -> bool) {
        if !self.data && (self.waited || self.left > 0) {
            self.left = CROWD;
        }
        self.data = false;
        self.waited = moved >= HOLDS_UP && others();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl CopyOffload {
        /// A transfer; whether it leaves the worker.
        fn transfer(&mut self, bytes: usize, others: bool) -> bool {
            let leaves = self.moves(bytes);
            if leaves {
                self.left();
            } else {
                self.served(bytes, || others);
            }
            leaves
        }
    }

    #[test]
    fn transfers_leave_while_metadata_waits() {
        let mut offload = CopyOffload::default();
        assert!(!offload.transfer(LARGE, true));
        // A transfer that has waited does not count.
        assert!(!offload.transfer(LARGE, true));
        offload.served(16, || true);
        assert!(!offload.transfer(LARGE - 1, true));
        for _ in 0..CROWD {
            assert!(offload.transfer(LARGE, true));
        }
        assert!(!offload.transfer(LARGE, false));
        // No request has waited.
        offload.served(16, || true);
        assert!(!offload.transfer(LARGE, true));
    }
}
