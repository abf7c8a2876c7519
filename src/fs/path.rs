//! Names and paths that stay in the share.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};

use crate::fuse::ops::Result;

/// Longest path in bytes: PATH_MAX without its NUL (include/uapi/linux/limits.h).
const MAX_PATH: usize = 4095;

/// Longest name in bytes: NAME_MAX (include/uapi/linux/limits.h).
pub const MAX_NAME: usize = 255;

/// Whether this names an entry of a directory, and nothing else. The length is for the file system to check.
pub fn is_name(name: &[u8]) -> bool {
    !matches!(name, b"" | b"." | b"..") && !name.iter().any(|b| matches!(b, 0 | b'/'))
}

/// Whether this leads from a directory to something below it, unless by a symbolic link.
pub fn is_path(path: &[u8]) -> bool {
    path.len() <= MAX_PATH && path.split(|b| *b == b'/').all(|name| is_name(name) && name.len() <= MAX_NAME)
}

/// `name` in the directory at `path`.
pub fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    if path.is_empty() { name.into() } else { [path, b"/", name].concat() }
}

/// Opens what is at a path below `root` (empty: `root` itself). Follows no symbolic link.
pub fn open_beneath(root: BorrowedFd, path: &[u8], flags: OFlags) -> Result<OwnedFd> {
    let path = if path.is_empty() { b"." } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    openat2(root, path, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty(), resolve)
}
