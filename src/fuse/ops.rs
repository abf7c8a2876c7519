//! What the server needs of a file system: a trait for each concern. Errors are errnos, which reach the guest unchanged.

use std::ffi::CStr;
use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::abi::*;
use super::buf::IoRange;
use super::reply::Reply;

pub type Result<T> = std::result::Result<T, Errno>;

/// Who creates a file, and how.
pub struct Creator<'a> {
    /// The new file's owner, by the guest's numbers.
    pub uid: u32,
    pub gid: u32,
    /// The umask to apply unless the directory has a default ACL. 0 if the guest has applied it.
    pub umask: u32,
    /// A supplementary group of the caller that the directory belongs to.
    pub group: Option<u32>,
    /// Security context: xattr name and value.
    pub label: Option<(&'a CStr, &'a [u8])>,
}

/// What INIT settled.
pub struct Session {
    pub flags: InitFlags,
    /// log2 of the alignment in bytes of offsets in the DAX window and in mapped files, with MAP_ALIGNMENT.
    pub map_alignment: u16,
}

/// What a request waits for on a thread of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The host's file system alone. Whoever stops the queue waits for it.
    Host,
    /// Other processes or this guest's own frontend, for some time.
    Others,
    /// A lock, perhaps for ever.
    Lock,
}

/// Waits for a lock on the calling thread.
pub type LockWait = Box<dyn FnOnce() -> Result<()> + Send>;

/// Takes the result of what another thread does. Called from any thread; a dropped one means EIO.
pub type Answer<T = ()> = Box<dyn FnOnce(Result<T>) + Send>;

/// Takes directory entries until the reply is full.
pub trait DirSink {
    /// Whether an entry with a name of this many bytes still fits.
    fn fits(&self, namelen: usize) -> bool;
    /// Adds an entry that fits. `entry` is for READDIRPLUS.
    fn push(&mut self, dirent: Dirent, name: &[u8], entry: Option<&EntryOut>);
}

/// The session and its threads.
pub trait Control: Send + Sync + 'static {
    /// Prepares the calling thread. Called before each request; cheap after the first.
    fn enter_thread(&self);
    /// Chooses from the flags that the guest offers, or refuses the session. With PASSTHROUGH_SHM,
    /// [`Mappings::start_passthrough`] follows.
    fn init(&self, offered: InitFlags) -> Result<Session>;
    /// Forgets all nodeids and handles, and ends waiting locks with EINTR.
    fn destroy(&self);
    /// Ends this request with EINTR if it waits for a lock.
    fn interrupt(&self, unique: u64);
    /// All nodeids and handles, for another daemon. No request is served meanwhile.
    ///
    /// # Errors
    /// If the session cannot move.
    fn save(&self) -> io::Result<Vec<u8>> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Takes over what [`save`](Self::save) gave. The state may hold anything. `flags`: what INIT settled. No request is served
    /// meanwhile.
    ///
    /// # Errors
    /// If the state is not valid. There are no nodeids or handles then.
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
    /// `by`: the owner of the device node that RENAME_WHITEOUT leaves.
    fn rename(&self, parent: u64, name: &CStr, newparent: u64, newname: &CStr, flags: u32, by: &Creator) -> Result<()>;
    fn link(&self, node: u64, newparent: u64, newname: &CStr) -> Result<EntryOut>;
}

pub trait Files {
    /// Replies with an [`OpenOut`], at once or later. With `patient`, the thread may wait for the holder of a lease.
    ///
    /// # Errors
    /// EAGAIN where it would wait, but is not `patient`.
    fn open(&self, node: u64, open: &OpenIn, patient: bool, reply: &mut Reply) -> Result<()>;
    /// What truncating this file, to whatever size, may wait for. `None`: a queue's worker may do it.
    fn truncating_waits(&self, node: u64, fh: Option<u64>) -> Result<Option<Wait>>;
    /// Replies with a [`CreateOut`], at once or later.
    fn create(&self, parent: u64, name: &CStr, create: &CreateIn, by: &Creator, reply: &mut Reply) -> Result<()>;
    /// As [`create`](Self::create), for a file without a name.
    fn tmpfile(&self, parent: u64, create: &CreateIn, by: &Creator, reply: &mut Reply) -> Result<()>;
    /// How many bytes were read. `None`: the thread would wait for the host's file system, which it may only with `waits`.
    fn read(&self, node: u64, read: &ReadIn, to: &IoRange, waits: bool) -> Result<Option<usize>>;
    /// The open file, if io_uring may read from it. If not, a thread that may wait calls [`read`](Self::read).
    fn file_for_read(&self, node: u64, read: &ReadIn) -> Result<Option<OwnedFd>>;
    fn write(&self, node: u64, write: &WriteIn, from: &IoRange) -> Result<usize>;
    /// The open file, if somebody else may write to it in place of [`write`](Self::write), on behalf of this thread.
    fn file_for_write(&self, node: u64, write: &WriteIn) -> Result<Option<OwnedFd>>;
    fn flush(&self, node: u64, fh: u64, lock_owner: u64) -> Result<()>;
    fn release(&self, node: u64, release: &ReleaseIn) -> Result<()>;
    /// Whether a sync, a copy or an allocation may take long. A queue's worker must not do it then.
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
    /// Writes the value to `to`, at most `size` bytes. Returns its length. A `size` of 0 asks for the length alone.
    fn getxattr(&self, node: u64, name: &CStr, size: usize, to: &mut Vec<u8>) -> Result<usize>;
    fn listxattr(&self, node: u64, size: usize, to: &mut Vec<u8>) -> Result<usize>;
    fn removexattr(&self, node: u64, name: &CStr) -> Result<()>;
}

pub trait Locks {
    fn getlk(&self, node: u64, lk: &LkIn) -> Result<LkOut>;
    /// Takes or drops a lock. If another holds it: EAGAIN, or with `wait` a function that waits for it.
    fn setlk(&self, node: u64, unique: u64, lk: &LkIn, wait: bool) -> Result<Option<LockWait>>;
}

/// The DAX window and the passthrough window.
pub trait Mappings {
    /// Whether the guest has mapped files. If so, a change that removes part of a file may wait for another guest, which in turn waits
    /// for this guest's memory. A worker uses that memory, so it must not make the change.
    fn has_mappings(&self) -> bool {
        false
    }
    /// Gives the guest the passthrough window's table.
    fn start_passthrough(&self, answer: Answer) {
        answer(Err(Errno::NOSYS));
    }
    /// Replies later.
    fn setupmapping(&self, _node: u64, _args: &SetupmappingIn, _reply: &mut Reply) -> Result<()> {
        Err(Errno::NOSYS)
    }
    /// Replies later. `parts`: what to unmap, of any of the session's files.
    fn removemapping(&self, _parts: &[RemovemappingOne], _reply: &mut Reply) -> Result<()> {
        Err(Errno::NOSYS)
    }
}

pub trait FileSystem: Control + Attrs + Names + Files + Dirs + Xattrs + Locks + Mappings {}

impl<T: Control + Attrs + Names + Files + Dirs + Xattrs + Locks + Mappings> FileSystem for T {}
