//! System calls that rustix lacks, with all `unsafe` of src/window.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::ioctl::{Opcode, opcode};
use zerocopy::{FromBytes, Immutable, KnownLayout};

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

/// The answer to a permission event (FAN_ALLOW).
const ALLOW: u32 = 1;

/// struct fanotify_event_metadata of include/uapi/linux/fanotify.h.
#[repr(C)]
#[derive(FromBytes, Immutable, KnownLayout)]
struct Metadata {
    event_len: u32,
    vers: u8,
    reserved: u8,
    metadata_len: u16,
    mask: u64,
    fd: i32,
    pid: i32,
}

/// An event of a fanotify group.
pub struct Event {
    pub mask: u64,
    /// The process, or the thread in a group with FAN_REPORT_TID. 0 if it is outside of this process namespace.
    pub pid: i32,
    /// The file. `None` if the queue has overflowed.
    pub file: Option<OwnedFd>,
}

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

/// fanotify_init(2). The events' descriptors are read-only.
pub fn fanotify_init(flags: u32) -> io::Result<OwnedFd> {
    let files = libc::O_RDONLY | libc::O_LARGEFILE | libc::O_CLOEXEC;
    // SAFETY: no pointers are passed.
    let fd = check(unsafe { libc::fanotify_init(flags | libc::FAN_CLOEXEC, files as u32) })?;
    // SAFETY: the kernel made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// fanotify_mark(2) of the inode of `file`; `action` is FAN_MARK_ADD or FAN_MARK_REMOVE.
pub fn fanotify_mark(group: BorrowedFd, action: u32, mask: u64, file: BorrowedFd) -> io::Result<()> {
    // SAFETY: a null path stands for the descriptor itself.
    let done = unsafe { libc::fanotify_mark(group.as_raw_fd(), action, mask, file.as_raw_fd(), std::ptr::null()) };
    check(done).map(drop)
}

/// Reads events of a fanotify group.
pub fn fanotify_read(group: BorrowedFd, buffer: &mut [u8]) -> io::Result<Vec<Event>> {
    let length = rustix::io::read(group, &mut *buffer)?;
    let mut rest = &buffer[..length];
    let mut events = Vec::new();
    while let Ok((event, _)) = Metadata::read_from_prefix(rest) {
        // SAFETY: the kernel made this descriptor for this event.
        let file = (event.fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(event.fd) });
        events.push(Event { mask: event.mask, pid: event.pid, file });
        rest = rest.get(event.event_len as usize..).unwrap_or_default();
    }
    Ok(events)
}

/// Lets the caller of a permission event go on.
pub fn fanotify_allow(group: BorrowedFd, file: BorrowedFd) -> io::Result<()> {
    let mut response = [0; 8];
    response[..4].copy_from_slice(&file.as_raw_fd().to_ne_bytes());
    response[4..].copy_from_slice(&ALLOW.to_ne_bytes());
    rustix::io::write(group, &response)?;
    Ok(())
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
