//! What the device needs of the server.

use std::io;

use crate::fuse::ops::FileSystem;
use crate::fuse::{Server, Transport, Work};

/// What serves the requests that come over the queues.
pub trait Handler: Send + Sync + 'static {
    /// Serves one request. Returns the length in bytes of the reply in `work.writable`, which counts unless `from` was
    /// told to answer. Called by several threads at a time; both lists of slices may be empty.
    ///
    /// Unless `from` says that it may, it should not wait: until it returns, no other request of the queue is served,
    /// and the ring cannot be stopped.
    fn handle(&self, work: &mut Work, from: &mut dyn Transport) -> usize;

    /// Ends requests that wait and forgets the session. The guest or its device was reset, or the frontend is gone.
    fn reset(&self);

    /// Whether there is a session, so that requests can be served.
    fn has_session(&self) -> bool {
        true
    }

    /// The session, for another daemon. All queues are stopped meanwhile.
    fn save(&self) -> io::Result<Vec<u8>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Takes over what [`save`](Self::save) gave. The state may hold anything. No request is served meanwhile.
    fn load(&self, _state: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl<F: FileSystem> Handler for Server<F> {
    fn handle(&self, work: &mut Work, from: &mut dyn Transport) -> usize {
        Server::handle(self, work, from)
    }

    fn reset(&self) {
        Server::reset(self);
    }

    fn has_session(&self) -> bool {
        Server::is_open(self)
    }

    fn save(&self) -> io::Result<Vec<u8>> {
        Server::save(self)
    }

    fn load(&self, state: &[u8]) -> io::Result<()> {
        Server::load(self, state)
    }
}
