//! What the server needs of a file system: a trait for each concern.
//!
//! Errors are errnos, which reach the guest unchanged. Unless a method says otherwise, they are those of the system
//! call that it names, ESTALE for a `node` or `parent` that the guest does not know, and EBADF for an `fh` that it does
//! not have.

use std::ffi::CStr;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use super::abi::*;
use super::buf::IoRange;
use super::reply::Reply;
pub use super::reply::{Answer, DirSink};
pub use super::transport::{Result, WOULD_WAIT, Wait};
use crate::agent::Agents;
use crate::record::Found;
use crate::watch::FileId;

/// Who creates a file, and how.
pub struct Creator<'a> {
    /// The new file's owner, by the guest's numbers.
    pub uid: u32,
    /// The new file's group, by the guest's numbers.
    pub gid: u32,
    /// The umask to apply unless the directory has a default ACL. 0 if the guest has applied it.
    pub umask: u32,
    /// A supplementary group of the caller that the directory belongs to.
    pub group: Option<u32>,
    /// Security context: xattr name and value.
    pub label: Option<(&'a CStr, &'a [u8])>,
}

/// Who sent a request, by the guest's numbers. Of the caller's groups, only the first is known. With ALLOW_IDMAP, Linux
/// names nobody but who creates a file: both are [`u32::MAX`] then (fuse_get_req() of fs/fuse/dev.c).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The thread. 0 where it is not known.
    pub pid: u32,
}

/// What INIT settled.
pub struct Session {
    /// What both sides support.
    pub flags: InitFlags,
    /// log2 of the alignment in bytes of offsets in the DAX window and in mapped files, with MAP_ALIGNMENT.
    pub map_alignment: u16,
}

/// Waits for a lock on the calling thread.
pub type LockWait = Box<dyn FnOnce() -> Result<()> + Send>;

/// What serves requests, and where.
pub trait Threads: Send + Sync + 'static {
    /// Prepares the calling thread, which `may_wait` for the host's file system and for other processes. Called before
    /// each request; cheap after the first. On a thread that may not, a request that finds that it would have to fails
    /// with [`WOULD_WAIT`], and nothing has come of it: it is served again on one that may.
    fn enter_thread(&self, may_wait: bool);
    /// What a request that does this with a node's file would wait for, as far as it is known before it begins. `None`:
    /// a queue's worker serves it. `fh`: the file that the request has open.
    fn may_block(&self, _does: Does, _node: u64, _fh: Option<u64>) -> Option<Wait> {
        None
    }
}

/// The session.
pub trait Control {
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
    /// Goes on with what an earlier worker process has left. `flags`: what INIT settled. No request is served
    /// meanwhile.
    ///
    /// # Errors
    /// If the session cannot go on.
    fn take_over(&self, _flags: InitFlags, _found: Found) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Takes over what there is although the guest has no session.
    fn take_over_rest(&self, _found: Found) {}
    /// Whether [`take_over`](Self::take_over) could go on with this.
    ///
    /// # Errors
    /// If it could not.
    fn check(&self, _flags: InitFlags) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Takes over what [`save`](Self::save) gave. The state may hold anything. `flags`: what INIT settled. No request
    /// is served meanwhile.
    ///
    /// # Errors
    /// If the state is not valid. There are no nodeids or handles then.
    fn load(&self, _flags: InitFlags, _state: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Attributes of files and file systems.
pub trait Attrs {
    /// fstat(2). `fh`: an open file of this node.
    fn getattr(&self, node: u64, fh: Option<u64>) -> Result<AttrOut>;
    /// chmod(2), chown(2), truncate(2) and utimensat(2), by the bits of `valid`.
    fn setattr(&self, node: u64, attr: &SetattrIn, by: Caller) -> Result<AttrOut>;
    /// statx(2).
    fn statx(&self, node: u64, fh: Option<u64>, flags: u32, mask: u32) -> Result<StatxOut>;
    /// statfs(2).
    fn statfs(&self, node: u64) -> Result<StatfsOut>;
    /// access(2) for this user and group.
    fn access(&self, node: u64, uid: u32, gid: u32, mask: u32) -> Result<()>;
}

/// Each entry that is returned counts as one lookup of its nodeid.
pub trait Names {
    /// Finds a name in a directory.
    fn lookup(&self, parent: u64, name: &CStr) -> Result<EntryOut>;
    /// The guest has dropped `nlookup` lookups of the node.
    fn forget(&self, node: u64, nlookup: u64);
    /// Writes the target to `to`, cut to its length.
    fn readlink(&self, node: u64, to: &mut Vec<u8>) -> Result<()>;
    /// symlink(2).
    fn symlink(&self, parent: u64, name: &CStr, target: &CStr, by: &Creator) -> Result<EntryOut>;
    /// mknod(2).
    fn mknod(&self, parent: u64, name: &CStr, mode: u32, rdev: u32, by: &Creator) -> Result<EntryOut>;
    /// mkdir(2).
    fn mkdir(&self, parent: u64, name: &CStr, mode: u32, by: &Creator) -> Result<EntryOut>;
    /// unlink(2).
    fn unlink(&self, parent: u64, name: &CStr) -> Result<()>;
    /// rmdir(2).
    fn rmdir(&self, parent: u64, name: &CStr) -> Result<()>;
    /// `by`: the owner of the device node that RENAME_WHITEOUT leaves.
    fn rename(&self, parent: u64, name: &CStr, newparent: u64, newname: &CStr, flags: u32, by: &Creator) -> Result<()>;
    /// link(2).
    fn link(&self, node: u64, newparent: u64, newname: &CStr) -> Result<EntryOut>;
}

/// Regular files.
pub trait Files {
    /// Replies with an [`OpenOut`], at once or later.
    ///
    /// # Errors
    /// ENOSYS if the guest is to open files by itself.
    fn open(&self, node: u64, open: &OpenIn, by: Caller, reply: &mut Reply) -> Result<()>;
    /// Replies with a [`CreateOut`], at once or later.
    fn create(&self, parent: u64, name: &CStr, create: &CreateIn, by: &Creator, reply: &mut Reply) -> Result<()>;
    /// Like [`create`](Self::create), for a file without a name.
    fn tmpfile(&self, parent: u64, create: &CreateIn, by: &Creator, reply: &mut Reply) -> Result<()>;
    /// pread(2) at the offset of the request. Returns the number of bytes.
    fn read(&self, node: u64, read: &ReadIn, to: &IoRange) -> Result<usize>;
    /// The open file, for io_uring.
    ///
    /// # Errors
    /// WOULD_WAIT if only a thread that may wait can [read](Self::read) from it.
    fn file_for_read(&self, node: u64, read: &ReadIn) -> Result<OwnedFd>;
    /// pwrite(2) at the offset of the request. Returns the number of bytes.
    fn write(&self, node: u64, write: &WriteIn, by: Caller, from: &IoRange) -> Result<usize>;
    /// The open file, if io_uring may write to it instead of [`write`](Self::write), with this thread's credentials.
    fn file_for_write(&self, node: u64, write: &WriteIn, by: Caller) -> Result<Option<OwnedFd>>;
    /// A process has closed a descriptor of the file: drops the locks of `lock_owner`.
    ///
    /// # Errors
    /// ENOSYS if that never has an effect.
    fn flush(&self, node: u64, fh: u64, lock_owner: u64) -> Result<()>;
    /// The last descriptor of an open file is closed.
    fn release(&self, node: u64, release: &ReleaseIn) -> Result<()>;
    /// fsync(2), or fdatasync(2) with `datasync`.
    fn fsync(&self, node: u64, fh: u64, datasync: bool, by: Caller) -> Result<()>;
    /// fallocate(2).
    fn fallocate(&self, node: u64, args: &FallocateIn) -> Result<()>;
    /// lseek(2) with SEEK_DATA or SEEK_HOLE. Offsets are in bytes.
    fn lseek(&self, node: u64, fh: u64, offset: u64, whence: u32) -> Result<u64>;
    /// copy_file_range(2). Returns the number of bytes.
    fn copy_file_range(&self, node: u64, args: &CopyFileRangeIn) -> Result<usize>;
    /// syncfs(2) on the file system of this node.
    fn syncfs(&self, node: u64) -> Result<()>;
}

/// Directories.
pub trait Dirs {
    /// Opens a directory.
    ///
    /// # Errors
    /// ENOSYS if the guest is to open directories by itself.
    fn opendir(&self, node: u64, flags: u32) -> Result<OpenOut>;
    /// Lists a directory from the position `offset` on.
    fn readdir(&self, node: u64, fh: u64, offset: u64, sink: &mut dyn DirSink) -> Result<()>;
    /// Like [`readdir`](Self::readdir), with attributes. Each entry counts as one lookup.
    fn readdirplus(&self, node: u64, fh: u64, offset: u64, sink: &mut dyn DirSink) -> Result<()>;
    /// Closes a directory.
    fn releasedir(&self, node: u64, fh: u64) -> Result<()>;
    /// Like [`Files::fsync`], for a directory.
    fn fsyncdir(&self, node: u64, fh: u64, datasync: bool) -> Result<()>;
}

/// Extended attributes.
pub trait Xattrs {
    /// setxattr(2). An access ACL takes the set-group-ID bit away unless the file's group is that of `kill_sgid`.
    fn setxattr(&self, node: u64, name: &CStr, value: &[u8], flags: u32, kill_sgid: Option<Caller>) -> Result<()>;
    /// Writes the value to `to`, at most `size` bytes. Returns its length. A `size` of 0 asks for the length alone.
    fn getxattr(&self, node: u64, name: &CStr, size: usize, to: &mut Vec<u8>) -> Result<usize>;
    /// Like [`getxattr`](Self::getxattr), for the list of names.
    fn listxattr(&self, node: u64, size: usize, to: &mut Vec<u8>) -> Result<usize>;
    /// removexattr(2).
    fn removexattr(&self, node: u64, name: &CStr) -> Result<()>;
}

/// What chattr(1) and project quotas go by. `fh`: an open file or directory of this node.
///
/// # Errors
/// ENOTTY if the host's file system has no such thing.
pub trait Flags {
    /// FS_IOC_GETFLAGS: FS_*_FL of include/uapi/linux/fs.h.
    fn flags(&self, node: u64, fh: u64) -> Result<u32>;
    /// FS_IOC_SETFLAGS. `uid`: who asks, or [`u32::MAX`] if the guest has checked that.
    ///
    /// # Errors
    /// EPERM if it would change what the guest may not change, EOPNOTSUPP for flags that it cannot have here.
    fn set_flags(&self, node: u64, fh: u64, uid: u32, flags: u32) -> Result<()>;
    /// FS_IOC_FSGETXATTR.
    fn fsxattr(&self, node: u64, fh: u64) -> Result<Fsxattr>;
    /// FS_IOC_FSSETXATTR. Otherwise as [`set_flags`](Self::set_flags).
    fn set_fsxattr(&self, node: u64, fh: u64, uid: u32, to: &Fsxattr) -> Result<()>;
}

/// Locks.
pub trait Locks {
    /// fcntl(2) with F_GETLK.
    fn getlk(&self, node: u64, lk: &LkIn) -> Result<LkOut>;
    /// Takes or drops a lock. If another holds it: EAGAIN, or with `wait` a function that waits for it.
    fn setlk(&self, node: u64, unique: u64, lk: &LkIn, wait: bool) -> Result<Option<LockWait>>;
}

/// The DAX window and the passthrough window.
pub trait Mappings {
    /// Gives a file the time of what the guest has stored in place, if it has yet to get one. Waits for the host's file
    /// system, perhaps for long: while a process of the host writes to the file. To be called before a request reads or
    /// changes the attributes or data of `node`. (An entry that LOOKUP or READDIRPLUS returns has its times already.)
    fn settle_times(&self, _node: u64) {}
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

/// What a name leads to on the host now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Present {
    /// Nothing.
    Missing,
    /// A file of this type (S_IFMT) that the guest does not know, and by what the watch knows it.
    New(u32, Option<FileId>),
    /// This node.
    Known(u64),
}

/// What the guest agent's requests are answered with (docs/guest-agent.md).
pub trait Repeats {
    /// What the agent is to repeat. `None` if the file system does not watch for changes by others.
    fn agents(&self) -> Option<&Arc<Agents>> {
        None
    }
    /// What a name leads to. The guest does not learn of it.
    fn present(&self, _parent: u64, _name: &CStr) -> Present {
        Present::Missing
    }
    /// As [`Names::lookup`], for the agent's own use.
    fn lookup_repeated(&self, _parent: u64, _name: &CStr) -> Result<EntryOut> {
        Err(Errno::NOSYS)
    }
    /// By what the watch knows a node that the guest knows.
    fn file_id_of(&self, _node: u64) -> Option<FileId> {
        None
    }
    /// The present attributes of a node that the guest knows. If the file is gone, what is still known of it.
    fn known_attr(&self, _node: u64) -> Result<Attr> {
        Err(Errno::NOSYS)
    }
    /// The entry of such a node, which counts as one lookup. The guest may keep nothing of it.
    fn known_entry(&self, _node: u64) -> Result<EntryOut> {
        Err(Errno::NOSYS)
    }
    /// An agent has registered: from now on, changes in all directories that the guest knows are announced.
    fn follow_known(&self) {}
    /// Where a directory is below the share's root on the host, without a slash at the beginning.
    fn path_below_root(&self, _node: u64) -> Option<Vec<u8>> {
        None
    }
    /// All nodes that the guest knows.
    fn known_nodes(&self) -> Vec<u64> {
        Vec::new()
    }
}

/// All the traits above.
pub trait FileSystem:
    Threads + Control + Attrs + Names + Files + Dirs + Xattrs + Flags + Locks + Mappings + Repeats
{
}

impl<T: Threads + Control + Attrs + Names + Files + Dirs + Xattrs + Flags + Locks + Mappings + Repeats> FileSystem
    for T
{
}
