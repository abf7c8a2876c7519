//! A file that was looked at by its name, and what it is known by.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::Statx;

use super::fd::{open_path, stat};
use super::inode::Inode;
use super::key::{Key, ToldBy, UNMARKED, mount};
use crate::fuse::ops::Result;

/// A file that was looked at by its name.
pub struct Seen {
    pub st: Statx,
    pub key: Key,
    /// An O_PATH descriptor of it, if that was needed.
    pub fd: Option<OwnedFd>,
}

impl Seen {
    /// `name` in the directory `parent`, which `dir` is a descriptor of. It takes one statx(2) where files have a time
    /// of birth, or on overlayfs one name.
    pub fn at(parent: &Inode, dir: BorrowedFd, name: &CStr) -> Result<Self> {
        let told_by = parent.key.told_by();
        if matches!(told_by, ToldBy::Birth | ToldBy::Number) {
            let st = stat(dir, name)?;
            let near = mount(&st) == parent.key.mount;
            let key = match told_by {
                ToldBy::Birth => Key::born(&st),
                _ if st.stx_nlink == 1 || u32::from(st.stx_mode) & libc::S_IFMT == libc::S_IFDIR => {
                    Some(Key::new(&st, told_by, UNMARKED))
                }
                _ => None,
            };
            if let Some(key) = key.filter(|_| near) {
                return Ok(Self { st, key, fd: None });
            }
        }
        let fd = open_path(dir, name)?;
        let mut seen = Self::of(parent, fd.as_fd(), Some(name))?;
        seen.fd = Some(fd);
        Ok(seen)
    }

    /// The file that `fd` is a descriptor of. `name`: its name in `parent`.
    pub fn of(parent: &Inode, fd: BorrowedFd, name: Option<&CStr>) -> Result<Self> {
        let st = stat(fd, c"")?;
        let key = Key::of(fd, &st, Some(&parent.key), name.map(|name| (parent.id, name)));
        Ok(Self { st, key, fd: None })
    }
}
