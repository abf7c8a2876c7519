//! The workers' requests to the frontend, to map and unmap files (vhost-user, "Back-end message types").
//!
//! Each worker gets a channel of its own, and the supervisor passes whole messages on. So the frontend never gets the
//! half of one, its requests are done in the order in which it got them, whichever worker has sent them, and no worker
//! takes the reply to another one's for its own.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use super::message::Message;

/// What is under way between the present worker and the frontend.
#[derive(Debug, Default)]
pub struct Channel {
    /// The frontend's end.
    frontend: Option<OwnedFd>,
    /// The supervisor's end of the present worker's.
    worker: Option<UnixStream>,
    /// Replies that the frontend owes the present worker.
    owed: usize,
    /// Replies that it owes dead ones. They come first.
    stale: usize,
}

impl Channel {
    /// The frontend has made a channel. Returns the worker's end.
    ///
    /// # Errors
    /// If there is no room for more descriptors.
    pub fn connect(&mut self, frontend: &OwnedFd) -> io::Result<OwnedFd> {
        let (ours, theirs) = UnixStream::pair()?;
        *self = Self { frontend: Some(frontend.try_clone()?), worker: Some(ours), ..Self::default() };
        Ok(theirs.into())
    }

    /// There is a new worker. `frontend`: what the dead one has got. Returns the worker's end.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn open(&mut self, frontend: &OwnedFd) -> io::Result<OwnedFd> {
        if self.frontend.is_none() {
            return self.connect(frontend);
        }
        let (ours, theirs) = UnixStream::pair()?;
        self.worker = Some(ours);
        Ok(theirs.into())
    }

    /// The worker is dead. What it has sent and was not passed on was never asked.
    pub fn abandon(&mut self) {
        (self.worker, self.stale, self.owed) = (None, self.stale + self.owed, 0);
    }

    /// The descriptors that it has.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let ours = self.worker.iter().map(AsRawFd::as_raw_fd);
        ours.chain(self.frontend.iter().map(AsRawFd::as_raw_fd))
    }

    /// Readable when the worker asks something, and when the frontend has replied.
    pub fn ends(&self) -> [Option<BorrowedFd<'_>>; 2] {
        let ours = self.worker.as_ref().map(AsFd::as_fd);
        [ours, self.frontend.as_ref().map(AsFd::as_fd).filter(|_| self.stale > 0 || ours.is_some())]
    }

    /// Passes a request on.
    pub fn ask(&mut self) {
        let request = self.worker.as_ref().map(Message::receive);
        let (Some(Ok(Some(request))), Some(frontend)) = (request, &self.frontend) else {
            // The worker has closed its end.
            self.worker = None;
            return;
        };
        match request.send(frontend) {
            Ok(()) => self.owed += usize::from(request.needs_reply()),
            Err(_) => *self = Self::default(),
        }
    }

    /// Passes a reply on.
    pub fn reply(&mut self) {
        let Some(Ok(Some(reply))) = self.frontend.as_ref().map(Message::receive) else {
            // The worker sees that it has ended.
            *self = Self::default();
            return;
        };
        if self.stale > 0 {
            self.stale -= 1;
        } else if let Some(worker) = &self.worker {
            self.owed = self.owed.saturating_sub(1);
            // If it fails, the worker is dead.
            let _ = reply.send(worker);
        }
    }
}
