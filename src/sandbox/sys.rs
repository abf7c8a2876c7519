//! The system calls of the sandbox that Rust cannot call safe.

use std::io;

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

fn require_single_thread() -> io::Result<()> {
    match std::fs::read_dir("/proc/self/task")?.count() {
        1 => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::EBUSY)),
    }
}
