//! Flags and project ids of files, as lsattr(1), chattr(1) and xfs_io(8) show and set them (docs/attributes.md).
//!
//! The guest sees what the host's file system says. It sets only flags that concern nobody but itself.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use rustix::io::Errno;

use super::fd::stat;
use super::idmap::NO_ID;
use super::inode::Inode;
use super::opens::Use;
use super::{PassthroughFs, sys};
use crate::fuse::abi::*;
use crate::fuse::ops::{Flags, Result};

/// What the guest may set and clear: writes that wait for the disk, no access times, no backup by dump(8).
const FREE: IFlags = IFlags::SYNC.union(IFlags::DIRSYNC).union(IFlags::NOATIME).union(IFlags::NODUMP);

/// What needs a right that the guest does not have, EPERM. Others on the host could not remove or change a file that is
/// immutable or append-only. A project decides whose quota counts a file.
const PRIVILEGED: IFlags = IFlags::IMMUTABLE.union(IFlags::APPEND).union(IFlags::from_bits_retain(PROJINHERIT));

/// FS_PROJINHERIT_FL of include/uapi/linux/fs.h.
const PROJINHERIT: u32 = 0x2000_0000;

/// FS_XFLAG_* of include/uapi/linux/fs.h and the flags that mean the same.
const SAME: [(u32, IFlags); 6] = [
    (0x8, IFlags::IMMUTABLE),
    (0x10, IFlags::APPEND),
    (0x20, IFlags::SYNC),
    (0x40, IFlags::NOATIME),
    (0x80, IFlags::NODUMP),
    (0x200, IFlags::from_bits_retain(PROJINHERIT)),
];

/// What no program sets: FS_XFLAG_PREALLOC, _VERITY, _CASEFOLD, _CASENONPRESERVING and _HASATTR. Linux leaves it out
/// when it sends the others.
const TOLD: u32 = 0x2 | 0x2_0000 | 0x4_0000 | 0x8_0000 | 0x8000_0000;

/// Whether the guest may change these flags.
///
/// # Errors
/// EPERM for what needs a right, EOPNOTSUPP for what it cannot have here.
fn check(changed: IFlags) -> Result<()> {
    if changed.intersects(PRIVILEGED) {
        return Err(Errno::PERM);
    }
    if FREE.contains(changed) { Ok(()) } else { Err(Errno::OPNOTSUPP) }
}

/// The flags that a change of `xflags` means.
///
/// # Errors
/// EOPNOTSUPP for what has no flag.
fn changed_flags(changed: u32) -> Result<IFlags> {
    let (mut rest, mut flags) = (changed & !TOLD, IFlags::empty());
    for (xflag, flag) in SAME {
        flags.set(flag, rest & xflag != 0);
        rest &= !xflag;
    }
    if rest == 0 { Ok(flags) } else { Err(Errno::OPNOTSUPP) }
}

impl PassthroughFs {
    /// Runs `f` with a descriptor that ioctl(2) takes, which an O_PATH one is not.
    fn with_open<R>(&self, node: u64, fh: u64, f: impl FnOnce(&Arc<Inode>, BorrowedFd) -> Result<R>) -> Result<R> {
        let inode = self.inodes.get(node)?;
        match inode.format() {
            libc::S_IFDIR if self.has_no_handle(fh) => self.with_dir(node, |dir| f(&inode, dir.fd())),
            _ => self.with_file(node, fh, (Use::Any, 0), |file| f(&inode, file.fd)),
        }
    }

    /// Changes flags that the guest may change, if `uid` may change the file's. Others stay as they are.
    fn change_flags(&self, inode: &Inode, fd: BorrowedFd, uid: u32, changed: IFlags) -> Result<()> {
        check(changed)?;
        let owner = self.config.uid_map.to_guest(self.seen_by(fd, &stat(fd, c"")?).stx_uid);
        // Linux checks it by itself. Before 5.13 it did not, and said who asks.
        if uid != NO_ID && uid != 0 && uid != owner {
            return Err(Errno::PERM);
        }
        let stores_in_place = self.window.is_some() || self.has(InitFlags::WRITEBACK_CACHE);
        if changed.contains(IFlags::SYNC) && stores_in_place && inode.format() == libc::S_IFREG {
            // The guest's kernel does not know of the flag. It would not wait for what it keeps or stores in a window.
            return Err(Errno::OPNOTSUPP);
        }
        if !changed.is_empty() {
            ioctl_setflags(fd, ioctl_getflags(fd)? ^ changed)?;
            // The change time. The reply has no attributes.
            self.look_again(inode.id);
        }
        Ok(())
    }
}

impl Flags for PassthroughFs {
    fn flags(&self, node: u64, fh: u64) -> Result<u32> {
        self.with_open(node, fh, |_, fd| Ok(ioctl_getflags(fd)?.bits()))
    }

    fn set_flags(&self, node: u64, fh: u64, uid: u32, flags: u32) -> Result<()> {
        self.writable()?;
        self.with_open(node, fh, |inode, fd| {
            let changed = ioctl_getflags(fd)? ^ IFlags::from_bits_retain(flags);
            self.change_flags(inode, fd, uid, changed)
        })
    }

    fn fsxattr(&self, node: u64, fh: u64) -> Result<Fsxattr> {
        self.with_open(node, fh, |_, fd| sys::fsxattr(fd))
    }

    fn set_fsxattr(&self, node: u64, fh: u64, uid: u32, to: &Fsxattr) -> Result<()> {
        self.writable()?;
        self.with_open(node, fh, |inode, fd| {
            let old = sys::fsxattr(fd)?;
            if to.projid != old.projid {
                return Err(Errno::PERM);
            }
            if (to.extsize, to.cowextsize) != (old.extsize, old.cowextsize) {
                return Err(Errno::OPNOTSUPP);
            }
            self.change_flags(inode, fd, uid, changed_flags(to.xflags ^ old.xflags)?)
        })
    }
}
