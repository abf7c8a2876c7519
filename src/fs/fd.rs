//! What a descriptor tells of its file, and how to open the file again.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, Statx, StatxFlags, openat, readlinkat_raw, statx};

use crate::fuse::ops::Result;

/// Attributes of `name` in `dir` or, with an empty name, of `dir` itself. They suffice for an entry.
pub fn stat(dir: BorrowedFd, name: &CStr) -> Result<Statx> {
    let mut flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    if name.is_empty() {
        flags |= AtFlags::EMPTY_PATH;
    }
    statx(dir, name, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID)
}

/// Opens `name` in `dir` as an O_PATH descriptor. Follows no symbolic link.
pub fn open_path(dir: BorrowedFd, name: &CStr) -> Result<OwnedFd> {
    openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Opens the file of a descriptor again, which may be O_PATH.
pub fn reopen(fd: BorrowedFd, flags: OFlags) -> Result<OwnedFd> {
    openat(CWD, FdPath::new(fd).as_cstr(), flags | OFlags::CLOEXEC, Mode::empty())
}

/// Whether the kernel knows a name by which this file is reached, which is no directory. It may not of one that was
/// opened by handle: if no process has used its name lately, the kernel has dropped it from its memory. Then it tells
/// the directory's marks (fanotify(7), inotify(7)) of no change by this descriptor. Such a file has the path "/".
pub fn is_named(fd: BorrowedFd) -> bool {
    // What does not fit is cut off.
    let mut path = [0; 2];
    !matches!(readlinkat_raw(CWD, FdPath::new(fd).as_cstr(), path.as_mut_slice()), Ok(1))
}

/// The path of a descriptor, relative to the workers' directory, /proc/self/fd.
pub struct FdPath([u8; Self::LEN]);

impl FdPath {
    /// Digits of the largest descriptor and a NUL.
    const LEN: usize = 11;

    pub fn new(fd: BorrowedFd) -> Self {
        let (mut path, mut at, mut rest) = ([0; Self::LEN], Self::LEN - 1, fd.as_raw_fd().unsigned_abs());
        loop {
            at -= 1;
            path[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        path.rotate_left(at);
        Self(path)
    }

    pub fn as_cstr(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_paths() {
        for n in [0, 7, 10, 1234567, i32::MAX] {
            // SAFETY: the number is only printed.
            let path = FdPath::new(unsafe { BorrowedFd::borrow_raw(n) });
            assert_eq!(path.as_cstr().to_str().unwrap(), n.to_string());
        }
    }
}
