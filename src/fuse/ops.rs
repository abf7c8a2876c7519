//! What a file system does for the server, a trait for each concern. Errors are errnos; they reach the guest as they are.

use std::ffi::CStr;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::abi::*;
use super::buf::IoRange;

pub type Result<T> = std::result::Result<T, Errno>;

/// Who creates something, and how.
pub struct Creator<'a> {
    /// Owner of the new file, as the guest counts.
    pub uid: u32,
    pub gid: u32,
    /// To be applied unless the directory has a default ACL; 0 where the guest has applied it.
    pub umask: u32,
    /// A supplementary group of the caller that the directory belongs to.
    pub group: Option<u32>,
    /// Security context: xattr name and value.
    pub label: Option<(&'a CStr, &'a [u8])>,
}

/// What INIT settled.
pub struct Session {
    pub flags: InitFlags,
    /// log2 of what offsets in the DAX window and in mapped files are aligned to, with MAP_ALIGNMENT.
    pub map_alignment: u16,
    /// With PASSTHROUGH_SHM: what has to be done before the guest is told of it. If that fails, it is not.
    pub passthrough: Option<Handover>,
}

/// A lock that is not free: waits for it on the calling thread.
pub type LockWait = Box<dyn FnOnce() -> Result<()> + Send>;

/// Answers a request, from any thread.
pub type Answer<T = ()> = Box<dyn FnOnce(Result<T>) + Send>;

/// A request that another thread serves: hands it over with the way to answer it.
pub type Handover<T = ()> = Box<dyn FnOnce(Answer<T>) + Send>;

/// A reply, or a request that another thread serves.
pub enum Served<T> {
    Now(T),
    Later(Handover<T>),
}

impl<T: 'static> Served<T> {
    /// The same with another reply.
    pub fn map<U: 'static>(self, f: impl FnOnce(T) -> U + Send + 'static) -> Served<U> {
        match self {
            Self::Now(reply) => Served::Now(f(reply)),
            Self::Later(hand) => Served::Later(Box::new(|answer| hand(Box::new(|result| answer(result.map(f)))))),
        }
    }

    /// The reply, waited for.
    ///
    /// # Errors
    /// As the request; EIO if there never will be a reply.
    pub fn wait(self) -> Result<T>
    where
        T: Send,
    {
        match self {
            Self::Now(reply) => Ok(reply),
            Self::Later(hand) => {
                let (send, receive) = std::sync::mpsc::channel();
                hand(Box::new(move |result| drop(send.send(result))));
                receive.recv().unwrap_or(Err(Errno::IO))
            }
        }
    }
}

/// Takes directory entries until the reply is full.
pub trait DirSink {
    /// Whether an entry with so long a name still fits.
    fn fits(&self, namelen: usize) -> bool;
    /// Adds an entry that fits. `entry` is for READDIRPLUS.
    fn push(&mut self, dirent: Dirent, name: &[u8], entry: Option<&EntryOut>);
}

/// The session and its threads.
pub trait Control: Send + Sync + 'static {
    /// Prepares the calling thread; called before each request and cheap after the first.
    fn enter_thread(&self);
    /// Chooses from the flags that the guest offers, or refuses the session.
    fn init(&self, offered: InitFlags) -> Result<Session>;
    /// Forgets every nodeid and handle and ends waiting locks with EINTR.
    fn destroy(&self);
    /// Ends the waiting lock of this request, if it is one, with EINTR.
    fn interrupt(&self, unique: u64);
    /// Every nodeid and handle, for another daemon. There are no requests meanwhile.
    ///
    /// # Errors
    /// What keeps the session from moving.
    fn save(&self) -> io::Result<Vec<u8>> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Takes over what [`save`](Self::save) gave. `flags`: what INIT settled. There are no requests meanwhile. The state
    /// may be anything.
    ///
    /// # Errors
    /// What is wrong; there is no nodeid or handle then.
    fn load(&self, _flags: InitFlags, _state: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

pub trait Attrs {
    fn getattr(&self, node: u64, fh: Option<u64>) -> Result<AttrOut>;
    fn setattr(&self, node: u64, attr: &SetattrIn) -> Result<AttrOut>;
    fn statx(&self, node: u64, fh: Option<u64>, flags: u32, mask: u32) -> Result<StatxOut>;
    fn statfs(&self, node: u64) -> Result<StatfsOut>;
    fn access(&self, node: u64, uid: u32, gid: u32, mask: u32) -> Result<()>;
}

/// Each entry that is returned counts as one lookup of its nodeid.
pub trait Names {
    fn lookup(&self, parent: u64, name: &CStr) -> Result<EntryOut>;
    fn forget(&self, node: u64, nlookup: u64);
    /// Writes the target to `to`, cut to its length.
    fn readlink(&self, node: u64, to: &mut Vec<u8>) -> Result<()>;
    fn symlink(&self, parent: u64, name: &CStr, target: &CStr, by: &Creator) -> Result<EntryOut>;
    fn mknod(&self, parent: u64, name: &CStr, mode: u32, rdev: u32, by: &Creator) -> Result<EntryOut>;
    fn mkdir(&self, parent: u64, name: &CStr, mode: u32, by: &Creator) -> Result<EntryOut>;
    fn unlink(&self, parent: u64, name: &CStr) -> Result<()>;
    fn rmdir(&self, parent: u64, name: &CStr) -> Result<()>;
    /// `by`: whose the device node is that RENAME_WHITEOUT leaves.
    fn rename(&self, parent: u64, name: &CStr, newparent: u64, newname: &CStr, flags: u32, by: &Creator) -> Result<()>;
    fn link(&self, node: u64, newparent: u64, newname: &CStr) -> Result<EntryOut>;
}

/// What CREATE and TMPFILE are answered with.
pub type Created = (EntryOut, OpenOut);

/// How a READ ended.
pub enum Reading {
    /// So many bytes were read.
    Done(usize),
    /// It would wait for the host's file system; nothing is read that counts.
    Waits(OwnedFd),
}

/// Where a file may be truncated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncates {
    /// On a queue's worker: nothing is taken away.
    Here,
    /// On another thread: it may wait for another daemon on this host, whose guest has the file mapped, for a second or two.
    Slowly,
    /// On another thread: it may wait for longer, or for this guest's own frontend.
    Waits,
}

pub trait Files {
    /// # Errors
    /// EAGAIN where it would wait for the holder of a lease.
    fn open(&self, node: u64, open: &OpenIn) -> Result<Served<OpenOut>>;
    /// The same, but waits.
    fn open_waiting(&self, node: u64, open: &OpenIn) -> Result<Served<OpenOut>>;
    /// Where this file is to be truncated to any size.
    fn truncates(&self, node: u64, fh: Option<u64>) -> Result<Truncates>;
    fn create(&self, parent: u64, name: &CStr, create: &CreateIn, by: &Creator) -> Result<Served<Created>>;
    fn tmpfile(&self, parent: u64, create: &CreateIn, by: &Creator) -> Result<Served<Created>>;
    /// With `waits`, the thread may wait for the host's file system: all that there is is read.
    fn read(&self, node: u64, read: &ReadIn, to: &IoRange, waits: bool) -> Result<Reading>;
    /// The open file, for who reads from it by himself, if that is as good.
    fn file_for_read(&self, node: u64, read: &ReadIn) -> Result<Option<OwnedFd>>;
    fn write(&self, node: u64, write: &WriteIn, from: &IoRange) -> Result<usize>;
    /// The open file, for who writes to it by himself on behalf of this thread, if that is as good.
    fn file_for_write(&self, node: u64, write: &WriteIn) -> Result<Option<OwnedFd>>;
    fn flush(&self, node: u64, fh: u64, lock_owner: u64) -> Result<()>;
    fn release(&self, node: u64, release: &ReleaseIn) -> Result<()>;
    /// Whether a sync, a copy or an allocation may take long: a worker must not do it.
    fn waits(&self, node: u64, fh: u64) -> bool;
    fn fsync(&self, node: u64, fh: u64, datasync: bool) -> Result<()>;
    fn fallocate(&self, node: u64, args: &FallocateIn) -> Result<()>;
    fn lseek(&self, node: u64, fh: u64, offset: u64, whence: u32) -> Result<u64>;
    fn copy_file_range(&self, node: u64, args: &CopyFileRangeIn) -> Result<usize>;
    fn syncfs(&self, node: u64) -> Result<()>;
}

pub trait Dirs {
    fn opendir(&self, node: u64, flags: u32) -> Result<OpenOut>;
    fn readdir(&self, node: u64, fh: u64, offset: u64, sink: &mut dyn DirSink) -> Result<()>;
    fn readdirplus(&self, node: u64, fh: u64, offset: u64, sink: &mut dyn DirSink) -> Result<()>;
    fn releasedir(&self, node: u64, fh: u64) -> Result<()>;
    fn fsyncdir(&self, node: u64, fh: u64, datasync: bool) -> Result<()>;
}

pub trait Xattrs {
    fn setxattr(&self, node: u64, name: &CStr, value: &[u8], flags: u32, kill_sgid: bool) -> Result<()>;
    /// Writes the value to `to`, at most `size` bytes; a `size` of 0 asks for the length alone.
    fn getxattr(&self, node: u64, name: &CStr, size: usize, to: &mut Vec<u8>) -> Result<usize>;
    fn listxattr(&self, node: u64, size: usize, to: &mut Vec<u8>) -> Result<usize>;
    fn removexattr(&self, node: u64, name: &CStr) -> Result<()>;
}

pub trait Locks {
    fn getlk(&self, node: u64, lk: &LkIn) -> Result<LkOut>;
    /// Takes or drops a lock. One that is not free gives EAGAIN, or with `wait` the way to wait for it.
    fn setlk(&self, node: u64, unique: u64, lk: &LkIn, wait: bool) -> Result<ControlFlow<LockWait>>;
}

/// The DAX window. Without one, nothing is mapped.
pub trait Mappings {
    /// Whether a change that takes away parts of a file may have to wait for another guest, which waits for this one's
    /// memory: a worker, which has that in use, must not make it.
    fn has_mappings(&self) -> bool {
        false
    }
    fn setupmapping(&self, _node: u64, _args: &SetupmappingIn) -> Result<Handover> {
        Err(Errno::NOSYS)
    }
    /// `parts`: what to unmap, all of the session's files.
    fn removemapping(&self, _parts: &[RemovemappingOne]) -> Result<Handover> {
        Err(Errno::NOSYS)
    }
}

pub trait FileSystem: Control + Attrs + Names + Files + Dirs + Xattrs + Locks + Mappings {}

impl<T: Control + Attrs + Names + Files + Dirs + Xattrs + Locks + Mappings> FileSystem for T {}
