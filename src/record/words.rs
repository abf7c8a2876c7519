//! Memory that the next worker process finds as the last one left it. All of the `unsafe` in src/record is here.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::{Dir, MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::process::{Pid, pidfd_open};

/// The memory's length does not change any more, so that no process gets SIGBUS where another has cut it off.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Shared, zeroed memory, which never goes away. Pages take memory once they are written to.
pub struct Words {
    base: NonNull<AtomicU64>,
    len: usize,
    file: OwnedFd,
}

// SAFETY: all access is by shared references to atomics, and the memory is never unmapped.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// `len`: the number of words.
    ///
    /// # Errors
    /// Those of memfd_create(2) and mmap(2).
    pub fn new(len: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Linux before 6.3 does not know the flag, and some hosts allow no memory without it.
        let file = match memfd_create("thruway-record", flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => memfd_create("thruway-record", flags),
            made => made,
        }?;
        ftruncate(&file, (len * size_of::<AtomicU64>()) as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        Self::map(file, len)
    }

    /// The same memory in another program. `file` may be anything.
    ///
    /// # Errors
    /// InvalidData if it is not such memory of this length. Those of mmap(2).
    pub fn open(file: OwnedFd, len: usize) -> io::Result<Self> {
        let is_whole = fstat(&file)?.st_size as u64 == (len * size_of::<AtomicU64>()) as u64;
        if !is_whole || !fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS)) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "this is no record"));
        }
        Self::map(file, len)
    }

    fn map(file: OwnedFd, len: usize) -> io::Result<Self> {
        let (bytes, prot) = (len * size_of::<AtomicU64>(), libc::PROT_READ | libc::PROT_WRITE);
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, wherever the kernel likes.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, file.as_raw_fd(), 0) };
        match NonNull::new(at.cast()) {
            Some(base) if at != libc::MAP_FAILED => Ok(Self { base, len, file }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Has the memory's descriptor be another one.
    ///
    /// # Errors
    /// Those of `change`.
    pub fn with_file(self, change: impl FnOnce(OwnedFd) -> io::Result<OwnedFd>) -> io::Result<Self> {
        Ok(Self { file: change(self.file)?, ..self })
    }

    /// The memory, for another program.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// A word. Panics beyond the end, which no number from a guest leads to.
    pub fn at(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.len, "the record has no word {index}");
        // SAFETY: the word is in the mapping, which stays, and any bytes are an AtomicU64.
        unsafe { self.base.add(index).as_ref() }
    }
}

/// Whether this descriptor is open.
pub fn is_open(fd: RawFd) -> bool {
    // SAFETY: fcntl(2) takes any number.
    fd >= 0 && unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0
}

/// A descriptor that another process or program left behind. `None` if it is closed.
pub fn left_behind(fd: RawFd) -> Option<OwnedFd> {
    if !is_open(fd) {
        return None;
    }
    // SAFETY: it is open, and who had it is gone and has named it once.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes this descriptor have a number, whatever had it before.
///
/// # Errors
/// Those of dup3(2). EINVAL if it has the number already.
pub fn copy_to(fd: impl AsFd, number: RawFd) -> io::Result<()> {
    // SAFETY: nobody has the number: it is a descriptor that the record names, which are only taken over later.
    match unsafe { libc::dup3(fd.as_fd().as_raw_fd(), number, libc::O_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Makes a process, which has this one's table of descriptors or a copy of it. Returns `None` in it, and its pidfd in
/// this one. `tasks`: /proc/self/task.
///
/// # Errors
/// Those of clone(2), pidfd_open(2). EBUSY if this process has several threads.
pub fn clone(tasks: Dir, shares_files: bool) -> io::Result<Option<(Pid, OwnedFd)>> {
    // Without "." and "..".
    if tasks.count() != 3 {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    let files = if shares_files { libc::CLONE_FILES } else { 0 };
    let flags = (files | libc::SIGCHLD) as libc::c_ulong;
    // SAFETY: the process has one thread, so the child's copy of its memory is consistent; without a stack the child
    // goes on with a copy of this one's. The child may have this one's descriptors too, so neither may close one that
    // the other has: `supervise` says who has which.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    match Pid::from_raw(pid as i32) {
        _ if pid < 0 => Err(io::Error::last_os_error()),
        None => Ok(None),
        Some(pid) => Ok(Some((pid, pidfd_open(pid, rustix::process::PidfdFlags::empty())?))),
    }
}
