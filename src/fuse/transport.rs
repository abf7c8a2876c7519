//! What a reply needs of the queue that its request came from.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::abi::*;
use super::buf::IoRange;
use super::metrics::LateMeter;

/// Length of a reply's header in bytes.
pub(super) const HEADER: usize = size_of::<OutHeader>();

/// The result of an operation.
pub type Result<T> = std::result::Result<T, Errno>;

/// A request would have to wait, on a thread that must not. Never reaches the guest. It is ERESTARTNOINTR of
/// include/linux/errno.h, which means the same and which no system call returns.
pub const WOULD_WAIT: Errno = Errno::from_raw_os_error(513);

/// What a request waits for on a thread of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Only the host's file system. Stopping the queue waits for the request.
    Host,
    /// Other processes or this guest's own frontend, for a bounded time.
    Others,
    /// A lock, perhaps without end.
    Lock,
}

/// Where a request came from. It takes what its queue's worker should not do itself.
pub trait Transport: Send {
    /// The request is a READ or WRITE of `bytes`. True if the worker should not copy them, because other requests
    /// wait for it.
    fn moves(&mut self, bytes: usize) -> bool;
    /// Whether this thread may wait for the host's file system. If so, only requests are served that may come anew.
    fn may_wait(&self) -> bool;
    /// Moves `data` between guest memory and a file, and answers the request.
    fn io(&mut self, io: Io, data: &IoRange);
    /// Serves the request again from its beginning on a thread that may wait. Nothing may have come of it yet. `since`:
    /// when it began, if it is measured.
    fn serve_anew(&mut self, since: Option<Instant>);
    /// Like [`serve_anew`](Self::serve_anew), but when what it returns is called. `release` is asked to do that when
    /// the queue stops. Also returns what tells whether the queue is stopping. `None`: the transport cannot do that.
    fn defer(&mut self, _since: Option<Instant>, _release: Arc<dyn Release>) -> Option<(Serve, Stopping)> {
        None
    }
    /// The way back for a reply that comes from another thread. The length that
    /// [`Server::handle`](super::Server::handle) returns is then ignored.
    fn detach(&mut self) -> ReplySender;
    /// Like [`detach`](Self::detach), and runs `job` on a thread that may `wait` for others or for a lock. What waits
    /// for the host's file system is [served anew](Self::serve_anew).
    ///
    /// # Errors
    /// EAGAIN if too many requests wait. The request is not detached then.
    fn run(&mut self, wait: Wait, job: Job) -> Result<()>;
    /// Whether somebody waits for the end of this request.
    fn stopping(&self) -> bool {
        false
    }
    /// Like [`detach`](Self::detach), for a request that waits for something to happen. It counts as no work in
    /// progress. Its reply has at most `bytes`. `release` is asked for it when its queue stops. Also returns what tells
    /// whether the queue is stopping. `None`: the transport cannot do that.
    fn park(&mut self, _bytes: usize, _release: Arc<dyn Release>) -> Option<(ReplySender, Stopping)> {
        None
    }
}

/// Serves a request that has waited. It is called on any thread, and does not wait.
pub type Serve = Box<dyn FnOnce() + Send>;

/// What requests wait for, and what need not happen.
pub trait Release: Send + Sync {
    /// Has all of them answered or served at once.
    fn release(&self);
}

/// Whether a queue is stopping.
pub type Stopping = Box<dyn FnOnce() -> bool>;

/// Takes a late reply, including its header, to its queue. It must be called.
pub type ReplySender = Box<dyn FnOnce(Vec<u8>) + Send>;

/// A job for [`Transport::run`].
pub type Job = Box<dyn FnOnce(ReplySender) + Send>;

/// The data transfer of a READ or WRITE.
pub struct Io {
    /// The request's.
    pub unique: u64,
    /// The open file.
    pub file: OwnedFd,
    /// Bytes.
    pub offset: u64,
    /// It is a WRITE.
    pub write: bool,
    /// The data is in memory, but takes long to copy. Otherwise the transfer waits for the host's file system.
    pub long: bool,
    /// Measures the request.
    pub meter: LateMeter,
}

impl Io {
    /// The reply without the data that was read, and the length of the whole reply. `result`: bytes, or a negative
    /// errno.
    pub fn reply(&self, result: i32) -> (Vec<u8>, u32) {
        let bytes = result.max(0) as u32;
        self.meter.end(result.min(0), bytes.into());
        let body = WriteOut { size: bytes, padding: 0 };
        let body = if self.write && result >= 0 { body.as_bytes() } else { &[] };
        let rest = if self.write { body.len() as u32 } else { bytes };
        let header = OutHeader { len: HEADER as u32 + rest, error: result.min(0), unique: self.unique };
        ([header.as_bytes(), body].concat(), header.len)
    }
}
