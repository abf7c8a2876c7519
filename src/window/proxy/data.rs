//! Requests to the mount of proxy files that may wait for a real file.

use std::collections::VecDeque;

use parking_lot::Mutex;

/// Threads that serve the mount, all but one of which may wait for real files at a time: a host process that writes to
/// a file holds its lock for as long as it likes. The last one serves what needs no real file, as opens do. More files
/// are seldom locked at a time.
pub const THREADS: usize = 3;

/// Requests that need a real file, and find no thread for it.
#[derive(Default)]
pub struct Data(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    /// Threads that are at such a request.
    threads: usize,
    /// Whole requests. The kernel has a dozen writes in flight at most, and a read for each thread of the guest.
    requests: VecDeque<Vec<u8>>,
}

impl Data {
    /// Whether the thread that has read this request may serve it. If not, another one will.
    pub fn begin(&self, request: &[u8]) -> bool {
        let mut waiting = self.0.lock();
        let may = waiting.threads + 1 < THREADS;
        match may {
            true => waiting.threads += 1,
            false => waiting.requests.push_back(request.to_vec()),
        }
        may
    }

    /// The next request for a thread that has served one.
    pub fn next(&self) -> Option<Vec<u8>> {
        let mut waiting = self.0.lock();
        let next = waiting.requests.pop_front();
        waiting.threads -= usize::from(next.is_none());
        next
    }
}
