//! Replies. Most are written in place, into the memory that the guest has left for them: the body first, then the
//! header before it. A reply that comes later is detached and answered from another thread.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use zerocopy::{Immutable, IntoBytes};

use super::abi::*;
use super::buf::{IoRange, IoVecs};
use super::metrics::{LateMeter, Meter};
use super::transport::{HEADER, Io, Release, ReplySender, Result, Serve, Stopping, Transport, Wait};

/// Longest directory listing or xattr that is collected in bytes: the guest asks for at most its max_pages.
const MAX_COLLECTED: usize = super::MAX_WRITE as usize;

/// Takes a result from another thread. Dropping it answers EIO.
pub type Answer<T = ()> = Box<dyn FnOnce(Result<T>) + Send>;

/// The reply to one request, in place or [detached](Self::detach). A detached reply that is dropped answers EIO.
pub struct Reply<'a> {
    unique: u64,
    to: To<'a>,
    /// Bytes so far, including the header.
    len: usize,
}

enum To<'a> {
    /// The guest's memory.
    Place { writable: &'a mut IoVecs, scratch: &'a mut Vec<u8>, from: &'a mut dyn Transport, meter: Meter<'a> },
    /// Another thread than the worker's. The buffer begins with room for the header. `room`: bytes that the guest has
    /// left.
    Later { buffer: Vec<u8>, room: usize, back: ReplySender, meter: LateMeter },
    /// There is nothing to answer, or somebody else answers.
    Nowhere,
}

impl<'a> Reply<'a> {
    pub(super) fn new(
        unique: u64,
        writable: &'a mut IoVecs,
        scratch: &'a mut Vec<u8>,
        from: &'a mut dyn Transport,
        meter: Meter<'a>,
    ) -> Self {
        Self { unique, to: To::Place { writable, scratch, from, meter }, len: HEADER }
    }

    /// A reply that another thread may give. `unique`: the request's.
    pub fn late(unique: u64, back: ReplySender) -> Self {
        Self::measured(unique, usize::MAX, back, LateMeter::default())
    }

    fn measured(unique: u64, room: usize, back: ReplySender, meter: LateMeter) -> Self {
        Self { unique, to: To::Later { buffer: vec![0; HEADER], room, back, meter }, len: HEADER }
    }

    /// Adds a structure.
    ///
    /// # Errors
    /// EOVERFLOW if the guest left too little room.
    pub fn put<T: IntoBytes + Immutable + ?Sized>(&mut self, body: &T) -> Result<()> {
        let bytes = body.as_bytes();
        match &mut self.to {
            To::Place { writable, .. } => {
                if writable.write_at(self.len, bytes) < bytes.len() {
                    return Err(Errno::OVERFLOW);
                }
            }
            To::Later { buffer, room, .. } => {
                if room.saturating_sub(buffer.len()) < bytes.len() {
                    return Err(Errno::OVERFLOW);
                }
                buffer.extend_from_slice(bytes);
            }
            To::Nowhere => {}
        }
        self.len += bytes.len();
        Ok(())
    }

    /// Adds up to `size` bytes that `read` puts into guest memory.
    pub fn fill(&mut self, size: usize, read: impl FnOnce(&IoRange) -> Result<usize>) -> Result<()> {
        let To::Place { writable, meter, .. } = &mut self.to else { return Err(Errno::IO) };
        let range = writable.range(self.len..self.len.saturating_add(size));
        let bytes = read(&range)?.min(range.len());
        meter.bytes = bytes as u64;
        self.len += bytes;
        Ok(())
    }

    /// Notes that so many bytes were written.
    pub fn wrote(&mut self, bytes: usize) {
        if let To::Place { meter, .. } = &mut self.to {
            meter.bytes = bytes as u64;
        }
    }

    /// Adds what `f` writes to the scratch buffer.
    pub fn collect(&mut self, f: impl FnOnce(&mut Vec<u8>) -> Result<()>) -> Result<()> {
        let mut bytes = match &mut self.to {
            To::Place { scratch, .. } => std::mem::take(*scratch),
            To::Later { .. } | To::Nowhere => Vec::new(),
        };
        bytes.clear();
        let result = f(&mut bytes).and_then(|()| self.put(&bytes[..]));
        if let To::Place { scratch, .. } = &mut self.to {
            **scratch = bytes;
        }
        result
    }

    /// GETXATTR and LISTXATTR: the length alone for a `size` of 0, otherwise the bytes.
    pub fn sized(&mut self, size: u32, f: impl FnOnce(usize, &mut Vec<u8>) -> Result<usize>) -> Result<()> {
        if size > 0 {
            return self.collect(|to| f((size as usize).min(MAX_COLLECTED), to).map(drop));
        }
        let mut len = 0;
        self.collect(|to| {
            len = f(0, to)?;
            to.clear();
            Ok(())
        })?;
        self.put(&GetxattrOut { size: len as u32, padding: 0 })
    }

    /// READDIR and READDIRPLUS: entries up to `size` bytes. An error after the first entry ends the listing there.
    pub fn entries(
        &mut self,
        size: usize,
        plus: bool,
        read: impl FnOnce(&mut dyn DirSink) -> Result<()>,
    ) -> Result<()> {
        let To::Place { writable, .. } = &self.to else { return Err(Errno::IO) };
        let room = size.min(MAX_COLLECTED).min(writable.len().saturating_sub(HEADER));
        self.collect(|to| {
            let mut entries = Entries { to, room, plus };
            match read(&mut entries) {
                Err(errno) if entries.to.is_empty() => Err(errno),
                _ => Ok(()),
            }
        })
    }

    /// The guest gets no answer.
    pub fn silence(&mut self) {
        self.to = To::Nowhere;
    }

    /// See [`Transport::moves`].
    pub fn moves(&mut self, bytes: usize) -> bool {
        if let To::Place { from, .. } = &mut self.to { from.moves(bytes) } else { false }
    }

    /// See [`Transport::may_wait`].
    pub fn may_wait(&self) -> bool {
        if let To::Place { from, .. } = &self.to { from.may_wait() } else { true }
    }

    /// See [`Transport::stopping`].
    pub fn stopping(&self) -> bool {
        if let To::Place { from, .. } = &self.to { from.stopping() } else { false }
    }

    /// Leaves it to the transport to read `size` bytes from `offset` on and to answer. `long`: see [`Io`].
    pub fn read_elsewhere(&mut self, file: OwnedFd, offset: u64, size: usize, long: bool) {
        if let To::Place { writable, from, meter, .. } = &mut self.to {
            let io = Io { unique: self.unique, file, offset, write: false, long, meter: meter.detach() };
            from.io(io, &writable.range(HEADER..HEADER.saturating_add(size)));
        }
        self.to = To::Nowhere;
    }

    /// See [`Transport::serve_anew`].
    pub fn serve_anew(&mut self) {
        if let To::Place { from, meter, .. } = &mut self.to {
            from.serve_anew(meter.since);
        }
        self.to = To::Nowhere;
    }

    /// See [`Transport::defer`].
    pub fn defer(&mut self, release: Arc<dyn Release>) -> Option<(Serve, Stopping)> {
        let To::Place { from, meter, .. } = &mut self.to else { return None };
        let deferred = from.defer(meter.since, release)?;
        self.to = To::Nowhere;
        Some(deferred)
    }

    /// Leaves it to the transport to write `data` at `offset` and to answer.
    pub fn write_elsewhere(&mut self, file: OwnedFd, offset: u64, data: &IoRange) {
        if let To::Place { from, meter, .. } = &mut self.to {
            let io = Io { unique: self.unique, file, offset, write: true, long: true, meter: meter.detach() };
            from.io(io, data);
        }
        self.to = To::Nowhere;
    }

    /// Takes the reply to another thread. It starts empty there. What is added here afterwards is ignored.
    pub fn detach(&mut self) -> Reply<'static> {
        match std::mem::replace(&mut self.to, To::Nowhere) {
            To::Place { writable, from, meter, .. } => {
                Reply::measured(self.unique, writable.len(), from.detach(), meter.detach())
            }
            To::Later { room, back, meter, .. } => Reply::measured(self.unique, room, back, meter),
            To::Nowhere => Reply { unique: self.unique, to: To::Nowhere, len: HEADER },
        }
    }

    /// Takes the reply of a request that waits for something to happen to whoever will answer it, with a body of up to
    /// `bytes`. See [`Transport::park`].
    ///
    /// # Errors
    /// EOPNOTSUPP if the transport cannot do that.
    pub fn park(&mut self, bytes: usize, release: Arc<dyn Release>) -> Result<(Reply<'static>, Stopping)> {
        let To::Place { writable, from, .. } = &mut self.to else { return Err(Errno::OPNOTSUPP) };
        let room = writable.len();
        let (back, stopping) = from.park(HEADER + bytes, release).ok_or(Errno::OPNOTSUPP)?;
        self.to = To::Nowhere;
        // How long it waits says nothing about the daemon.
        let buffer = vec![0; HEADER];
        let to = To::Later { buffer, room, back, meter: LateMeter::default() };
        Ok((Reply { unique: self.unique, to, len: HEADER }, stopping))
    }

    /// [Detaches](Self::detach) the reply as a function that answers it.
    pub fn answer_later<T: IntoBytes + Immutable>(&mut self) -> Answer<T> {
        let reply = self.detach();
        Box::new(move |result| reply.answer(result))
    }

    /// Serves the request on a thread that may wait, or at once if this is such a thread.
    ///
    /// # Errors
    /// See [`Transport::run`].
    pub fn run(&mut self, wait: Wait, serve: impl FnOnce(&mut Reply) -> Result<()> + Send + 'static) -> Result<()> {
        let unique = self.unique;
        let To::Place { writable, from, meter, .. } = &mut self.to else {
            return serve(self);
        };
        let (meter, room) = (meter.detach(), writable.len());
        from.run(
            wait,
            Box::new(move |back| {
                let mut reply = Reply::measured(unique, room, back, meter);
                let result = serve(&mut reply);
                reply.finish(result);
            }),
        )?;
        self.to = To::Nowhere;
        Ok(())
    }

    /// Answers with this body, or with the errno.
    pub fn answer<T: IntoBytes + Immutable>(mut self, result: Result<T>) {
        let result = result.and_then(|body| self.put(&body));
        self.finish(result);
    }

    /// Answers with the body that was added, or with the errno. Returns the length of a reply in place, otherwise 0.
    pub fn finish(mut self, result: Result<()>) -> usize {
        let error = result.err().map_or(0, |errno| -errno.raw_os_error());
        self.end(error)
    }

    fn end(&mut self, error: i32) -> usize {
        let len = if error == 0 { self.len } else { HEADER };
        let header = OutHeader { len: len as u32, error, unique: self.unique };
        match std::mem::replace(&mut self.to, To::Nowhere) {
            To::Place { writable, meter, .. } => {
                meter.end(error);
                let fits = writable.write_at(0, header.as_bytes()) == HEADER;
                return if fits { len } else { 0 };
            }
            To::Later { mut buffer, room, back, meter } => {
                meter.end(error, 0);
                buffer.truncate(len);
                buffer[..HEADER].copy_from_slice(header.as_bytes());
                if room < HEADER {
                    buffer.clear();
                }
                back(buffer);
            }
            To::Nowhere => {}
        }
        0
    }
}

impl Drop for Reply<'_> {
    fn drop(&mut self) {
        if let To::Later { .. } = self.to {
            self.end(-libc::EIO);
        }
    }
}

/// Takes directory entries until the reply is full.
pub trait DirSink {
    /// Whether an entry with a name of this many bytes still fits.
    fn fits(&self, namelen: usize) -> bool;
    /// Adds an entry that fits. `entry` is for READDIRPLUS.
    fn push(&mut self, dirent: Dirent, name: &[u8], entry: Option<&EntryOut>);
}

struct Entries<'a> {
    to: &'a mut Vec<u8>,
    room: usize,
    plus: bool,
}

impl Entries<'_> {
    fn size(&self, namelen: usize) -> usize {
        let entry = if self.plus { size_of::<EntryOut>() } else { 0 };
        (entry + size_of::<Dirent>() + namelen).next_multiple_of(8)
    }
}

impl DirSink for Entries<'_> {
    fn fits(&self, namelen: usize) -> bool {
        self.to.len() + self.size(namelen) <= self.room
    }

    fn push(&mut self, dirent: Dirent, name: &[u8], entry: Option<&EntryOut>) {
        let end = self.to.len() + self.size(name.len());
        if let Some(entry) = entry {
            self.to.extend_from_slice(entry.as_bytes());
        }
        self.to.extend_from_slice(dirent.as_bytes());
        self.to.extend_from_slice(name);
        self.to.resize(end, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use zerocopy::FromBytes;

    use super::*;

    fn late() -> (Reply<'static>, Receiver<Vec<u8>>) {
        let (send, receive) = channel();
        (Reply::late(7, Box::new(move |reply| send.send(reply).unwrap())), receive)
    }

    fn header(reply: &[u8]) -> (u32, i32, u64) {
        let header = OutHeader::read_from_prefix(reply).unwrap().0;
        (header.len, header.error, header.unique)
    }

    #[test]
    fn a_detached_reply_that_is_dropped_answers_eio() {
        let (mut reply, sent) = late();
        reply.put(&OpenOut::default()).unwrap();
        drop(reply);
        assert_eq!(header(&sent.recv().unwrap()), (16, -libc::EIO, 7));
        // It answers once, even after it became a function.
        let (mut reply, sent) = late();
        let answer = reply.answer_later::<()>();
        drop(reply);
        assert!(sent.try_recv().is_err());
        drop(answer);
        assert_eq!(sent.iter().map(|reply| header(&reply)).collect::<Vec<_>>(), [(16, -libc::EIO, 7)]);
        let (reply, sent) = late();
        std::thread::spawn(move || {
            let _reply = reply;
            std::panic::resume_unwind(Box::new(()));
        });
        assert_eq!(sent.iter().map(|reply| header(&reply)).collect::<Vec<_>>(), [(16, -libc::EIO, 7)]);
    }

    #[test]
    fn a_detached_reply_fits_into_what_the_guest_left() {
        for (room, answer) in [(32, Some((32, 0, 7))), (31, Some((16, -libc::EOVERFLOW, 7))), (16, None), (15, None)] {
            let (send, sent) = channel();
            let back = Box::new(move |reply| send.send(reply).unwrap());
            let reply = Reply::measured(7, room, back, LateMeter::default());
            reply.answer(Ok(OpenOut::default()));
            let bytes: Vec<u8> = sent.recv().unwrap();
            assert!(bytes.len() <= room);
            match answer {
                Some(answer) => assert_eq!((header(&bytes), bytes.len()), (answer, answer.0 as usize)),
                None => assert_eq!(bytes.len(), if room < HEADER { 0 } else { HEADER }),
            }
        }
    }

    #[test]
    fn a_detached_reply_has_its_body_or_an_errno() {
        let (reply, sent) = late();
        reply.answer(Ok(OpenOut { fh: 5, ..Default::default() }));
        let bytes = sent.recv().unwrap();
        assert_eq!((header(&bytes), bytes.len(), bytes[16]), ((32, 0, 7), 32, 5));
        let (mut reply, sent) = late();
        reply.put(&OpenOut::default()).unwrap();
        reply.finish(Err(Errno::NOSPC));
        let bytes = sent.recv().unwrap();
        assert_eq!((header(&bytes), bytes.len()), ((16, -libc::ENOSPC, 7), 16));
    }
}
