//! The system calls of fanotify(7), with all `unsafe` of src/watch.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Makes a group that reports events with the directory, the name and the file (Linux 5.17). It needs no privilege.
pub fn init() -> io::Result<OwnedFd> {
    let flags = libc::FAN_CLASS_NOTIF | libc::FAN_REPORT_DFID_NAME_TARGET | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK;
    // SAFETY: no pointers are passed.
    let fd = check(unsafe { libc::fanotify_init(flags, libc::O_RDONLY as u32) })?;
    // SAFETY: the kernel made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// fanotify_mark(2) of the inode at `path`. `dir`: where the path starts, or AT_FDCWD.
pub fn mark(group: BorrowedFd, flags: u32, mask: u64, dir: RawFd, path: &CStr) -> io::Result<()> {
    // SAFETY: `path` is a valid C string.
    check(unsafe { libc::fanotify_mark(group.as_raw_fd(), flags, mask, dir, path.as_ptr()) }).map(drop)
}

/// Removes all marks of inodes.
pub fn flush(group: BorrowedFd) -> io::Result<()> {
    // SAFETY: the path means nothing here, and the kernel reads it as a null pointer.
    let done =
        unsafe { libc::fanotify_mark(group.as_raw_fd(), libc::FAN_MARK_FLUSH, 0, libc::AT_FDCWD, std::ptr::null()) };
    check(done).map(drop)
}
