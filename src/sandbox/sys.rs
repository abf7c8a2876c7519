//! The system calls of the sandbox that need `unsafe`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::process::Pid;
use rustix::thread::UnshareFlags;

/// The process in which fork(2) returned.
pub enum Forked {
    Child,
    Parent(Pid),
}

/// fork(2).
///
/// # Errors
/// Those of fork(2). EBUSY if the process has several threads: the child would inherit their locks, and nobody would
/// release them.
pub fn fork() -> io::Result<Forked> {
    require_single_thread()?;
    // SAFETY: the process has one thread, so the child's copy of its memory is consistent.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Forked::Child),
        pid => Ok(Pid::from_raw(pid).map_or(Forked::Child, Forked::Parent)),
    }
}

/// unshare(2) of namespaces.
pub fn unshare(namespaces: UnshareFlags) -> io::Result<()> {
    // SAFETY: only the flag FILES makes this call unsafe, and it is masked out.
    unsafe { rustix::thread::unshare_unsafe(namespaces - UnshareFlags::FILES) }.map_err(Into::into)
}

/// mount_setattr(2): adds the attributes (MOUNT_ATTR_*) to a mount and to the mounts below it.
pub fn restrict_mounts(tree: BorrowedFd, attributes: u64) -> io::Result<()> {
    let attr = libc::mount_attr { attr_set: attributes, attr_clr: 0, propagation: 0, userns_fd: 0 };
    let flags = libc::AT_EMPTY_PATH | libc::AT_RECURSIVE;
    // SAFETY: the path is a C string, and the last argument is the size of `attr`.
    let done = unsafe {
        libc::syscall(libc::SYS_mount_setattr, tree.as_raw_fd(), c"".as_ptr(), flags, &attr, size_of_val(&attr))
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn require_single_thread() -> io::Result<()> {
    let tasks = std::fs::read_dir("/proc/self/task");
    match tasks.map_err(|e| io::Error::new(e.kind(), format!("/proc/self/task: {e} (is /proc mounted?)")))?.count() {
        1 => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::EBUSY)),
    }
}
