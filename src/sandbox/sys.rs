//! The system calls of the sandbox that need `unsafe`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

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

/// Makes a child of this process's parent. The caller has seen that it has one thread: there may be no /proc now.
///
/// # Errors
/// Those of clone(2).
pub fn clone_sibling() -> io::Result<Forked> {
    let flags = (libc::CLONE_PARENT | libc::SIGCHLD) as libc::c_ulong;
    // SAFETY: the process has one thread, so the child's copy of its memory is consistent; without a stack the child
    // goes on with a copy of this one's.
    match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
        ..0 => Err(io::Error::last_os_error()),
        pid => Ok(Pid::from_raw(pid as i32).map_or(Forked::Child, Forked::Parent)),
    }
}

/// Has a signal wait from here on until it is read. Returns where that is.
///
/// # Errors
/// Those of signalfd(2).
pub fn hold_back(signal: i32) -> io::Result<OwnedFd> {
    let set = only(signal);
    // SAFETY: each of the calls takes the address of `set`, or a number.
    unsafe {
        // Where it does not wait, it has no effect.
        libc::signal(signal, libc::SIG_IGN);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        match libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

/// The signal waits no more, and has no effect, here and in the program that execve(2) starts.
pub fn let_go(signal: i32) {
    let set = only(signal);
    // SAFETY: the call takes the address of `set`.
    unsafe { libc::sigprocmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()) };
}

fn only(signal: i32) -> libc::sigset_t {
    // SAFETY: zeros are a sigset_t, and both calls take the address of one.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, signal);
        set
    }
}

/// Ends of children are not waited for from here on.
pub fn reap_children() {
    // SAFETY: no function runs at the signal.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// unshare(2) of namespaces.
pub fn unshare(namespaces: UnshareFlags) -> io::Result<()> {
    // SAFETY: only the flag FILES makes this call unsafe, and it is masked out.
    unsafe { rustix::thread::unshare_unsafe(namespaces - UnshareFlags::FILES) }.map_err(Into::into)
}

/// mount_setattr(2): adds the attributes (MOUNT_ATTR_*) to a mount and, with AT_RECURSIVE in `flags`, to the mounts
/// below it. `propagation`: MS_PRIVATE, for example, or 0.
pub fn restrict_mounts(tree: BorrowedFd, attributes: u64, propagation: u64, flags: i32) -> io::Result<()> {
    let attr = libc::mount_attr { attr_set: attributes, attr_clr: 0, propagation, userns_fd: 0 };
    let flags = libc::AT_EMPTY_PATH | flags;
    // SAFETY: the path is a C string, and the last argument is the size of `attr`.
    let done = unsafe {
        libc::syscall(libc::SYS_mount_setattr, tree.as_raw_fd(), c"".as_ptr(), flags, &attr, size_of_val(&attr))
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// # Errors
/// EBUSY if this process has several threads.
pub fn require_single_thread() -> io::Result<()> {
    let tasks = std::fs::read_dir("/proc/self/task");
    match tasks.map_err(|e| io::Error::new(e.kind(), format!("/proc/self/task: {e} (is /proc mounted?)")))?.count() {
        1 => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::EBUSY)),
    }
}
