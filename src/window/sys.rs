//! System calls that rustix lacks, with all `unsafe` of src/window.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use rustix::ioctl::{Opcode, opcode};

/// struct fuse_backing_map of include/uapi/linux/fuse.h.
#[repr(C)]
struct BackingMap {
    fd: i32,
    flags: u32,
    padding: u64,
}

/// FUSE_DEV_IOC_MAGIC of include/uapi/linux/fuse.h.
const FUSE: u8 = 229;
/// FUSE_DEV_IOC_BACKING_OPEN.
pub const BACKING_OPEN: Opcode = opcode::write::<BackingMap>(FUSE, 1);
/// FUSE_DEV_IOC_BACKING_CLOSE.
pub const BACKING_CLOSE: Opcode = opcode::write::<u32>(FUSE, 2);

/// Registers `file` as a backing file of the FUSE connection and returns its number.
pub fn backing_open(fuse: BorrowedFd, file: BorrowedFd) -> io::Result<i32> {
    let map = BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
    // SAFETY: the request reads the one struct that it is given.
    check(unsafe { libc::ioctl(fuse.as_raw_fd(), BACKING_OPEN.into(), &raw const map) })
}

/// Writes the dirty pages of a file, without flushing the disk's cache.
pub fn write_back(file: BorrowedFd) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: it takes no pointer.
    let write = || check(unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, flags) }).map(drop);
    // An old error is reported once, and keeps the call from writing newer pages. So call it again.
    write().or_else(|e| write().and(Err(e)))
}

/// Unregisters a backing file. Open files keep it.
pub fn backing_close(fuse: BorrowedFd, id: i32) -> io::Result<()> {
    // SAFETY: the request reads the one integer that it is given.
    check(unsafe { libc::ioctl(fuse.as_raw_fd(), BACKING_CLOSE.into(), &raw const id) }).map(drop)
}

/// Closes all descriptors except these and the standard ones, even those that other code owns. For a process that was
/// just forked.
pub fn close_all_but(kept: &[BorrowedFd]) -> io::Result<()> {
    let mut kept: Vec<RawFd> = kept.iter().map(AsRawFd::as_raw_fd).collect();
    kept.sort_unstable();
    let mut first = libc::STDERR_FILENO + 1;
    for fd in kept {
        close_range(first, fd - 1)?;
        first = first.max(fd + 1);
    }
    close_range(first, RawFd::MAX)
}

fn close_range(first: RawFd, last: RawFd) -> io::Result<()> {
    if first > last {
        return Ok(());
    }
    // SAFETY: the caller is a forked process that never returns to what owns these descriptors.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
