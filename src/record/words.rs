//! Memory that the next worker process finds as the last one left it. All of the `unsafe` in src/record is here.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::Dir;
use rustix::process::{Pid, pidfd_open};

/// Shared, zeroed memory, which never goes away. Pages take memory once they are written to.
pub struct Words {
    base: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: all access is by shared references to atomics, and the memory is never unmapped.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// `len`: the number of words.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn new(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let bytes = len * size_of::<AtomicU64>();
        // SAFETY: a new mapping, wherever the kernel likes.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        match NonNull::new(at.cast()) {
            Some(base) if at != libc::MAP_FAILED => Ok(Self { base, len }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// A word. Panics beyond the end, which no number from a guest leads to.
    pub fn at(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.len, "the record has no word {index}");
        // SAFETY: the word is in the mapping, which stays, and any bytes are an AtomicU64.
        unsafe { self.base.add(index).as_ref() }
    }
}

/// A descriptor that a worker process left behind. `None` if it is closed.
pub fn left_behind(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: fcntl(2) takes any number.
    if fd < 0 || unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: it is open, who had it is dead, and the record names each once.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes a process with this one's table of descriptors. Returns `None` in it, and its pidfd in this one. `tasks`:
/// /proc/self/task.
///
/// # Errors
/// Those of clone(2), pidfd_open(2). EBUSY if this process has several threads.
pub fn clone_files(tasks: Dir) -> io::Result<Option<(Pid, OwnedFd)>> {
    // Without "." and "..".
    if tasks.count() != 3 {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    let flags = (libc::CLONE_FILES | libc::SIGCHLD) as libc::c_ulong;
    // SAFETY: the process has one thread, so the child's copy of its memory is consistent; without a stack the child
    // goes on with a copy of this one's. The child has this one's descriptors too, so neither may close one that the
    // other has: `supervise` says who has which.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    match Pid::from_raw(pid as i32) {
        _ if pid < 0 => Err(io::Error::last_os_error()),
        None => Ok(None),
        Some(pid) => Ok(Some((pid, pidfd_open(pid, rustix::process::PidfdFlags::empty())?))),
    }
}
