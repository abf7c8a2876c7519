//! The system calls and events of fanotify(7), with all `unsafe` that they need.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use zerocopy::{FromBytes, Immutable, KnownLayout};

/// struct fanotify_event_metadata of include/uapi/linux/fanotify.h.
#[repr(C)]
#[derive(FromBytes, Immutable, KnownLayout)]
pub(crate) struct Metadata {
    pub event_len: u32,
    vers: u8,
    reserved: u8,
    pub metadata_len: u16,
    /// FAN_* bits.
    pub mask: u64,
    fd: i32,
    /// The process, or the thread in a group with FAN_REPORT_TID. 0 if it is outside of this process namespace.
    pub pid: i32,
}

/// An event of a group that reports descriptors.
pub(crate) struct Event {
    /// FAN_* bits.
    pub mask: u64,
    /// See [`Metadata::pid`].
    pub pid: i32,
    /// The file. `None` if the queue has overflowed.
    pub file: Option<OwnedFd>,
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// fanotify_init(2). The events' descriptors are read-only.
pub(crate) fn init(flags: u32) -> io::Result<OwnedFd> {
    let files = libc::O_RDONLY | libc::O_LARGEFILE | libc::O_CLOEXEC;
    // SAFETY: no pointers are passed.
    let fd = check(unsafe { libc::fanotify_init(flags | libc::FAN_CLOEXEC, files as u32) })?;
    // SAFETY: the kernel made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// fanotify_mark(2) of the inode at `path`, which starts at `dir`, or of `dir` itself.
pub(crate) fn mark(group: BorrowedFd, flags: u32, mask: u64, dir: RawFd, path: Option<&CStr>) -> io::Result<()> {
    let path = path.map_or(ptr::null(), CStr::as_ptr);
    // SAFETY: `path` is a valid C string. A null pointer stands for `dir` itself.
    check(unsafe { libc::fanotify_mark(group.as_raw_fd(), flags, mask, dir, path) }).map(drop)
}

/// Removes all marks of inodes.
pub(crate) fn flush(group: BorrowedFd) -> io::Result<()> {
    mark(group, libc::FAN_MARK_FLUSH, 0, libc::AT_FDCWD, None)
}

/// Reads events of a group that reports descriptors.
pub(crate) fn read(group: BorrowedFd, buffer: &mut [u8]) -> io::Result<Vec<Event>> {
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
pub(crate) fn allow(group: BorrowedFd, file: BorrowedFd) -> io::Result<()> {
    let mut response = [0; 8];
    response[..4].copy_from_slice(&file.as_raw_fd().to_ne_bytes());
    response[4..].copy_from_slice(&libc::FAN_ALLOW.to_ne_bytes());
    rustix::io::write(group, &response)?;
    Ok(())
}
