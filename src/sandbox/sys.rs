//! The system calls of the sandbox that Rust cannot call safe.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::process::Pid;
use rustix::thread::UnshareFlags;

/// Which of the two processes fork(2) returned in.
pub enum Forked {
    Child,
    Parent(Pid),
}

/// fork(2).
///
/// # Errors
/// Those of fork(2); EBUSY if the process has several threads, whose locks the child would inherit for ever.
pub fn fork() -> io::Result<Forked> {
    require_single_thread()?;
    // SAFETY: there is one thread, so the child's copy of memory is consistent.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Forked::Child),
        pid => Ok(Pid::from_raw(pid).map_or(Forked::Child, Forked::Parent)),
    }
}

/// unshare(2) of namespaces.
pub fn unshare(namespaces: UnshareFlags) -> io::Result<()> {
    // SAFETY: unsafe is only the flag FILES, which callers here have no use for and which is masked out.
    unsafe { rustix::thread::unshare_unsafe(namespaces - UnshareFlags::FILES) }.map_err(Into::into)
}

/// Gives a mount and those below it these attributes (MOUNT_ATTR_*) besides what they have: mount_setattr(2).
pub fn restrict_mounts(tree: BorrowedFd, attributes: u64) -> io::Result<()> {
    let attr = libc::mount_attr { attr_set: attributes, attr_clr: 0, propagation: 0, userns_fd: 0 };
    let flags = libc::AT_EMPTY_PATH | libc::AT_RECURSIVE;
    // SAFETY: the path is a C string, and `attr` is as long as said.
    let done = unsafe {
        libc::syscall(libc::SYS_mount_setattr, tree.as_raw_fd(), c"".as_ptr(), flags, &attr, size_of_val(&attr))
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn require_single_thread() -> io::Result<()> {
    match std::fs::read_dir("/proc/self/task")?.count() {
        1 => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::EBUSY)),
    }
}
