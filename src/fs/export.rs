//! LOOKUP of "." and ".." by nodeid (FUSE_EXPORT_SUPPORT), which a guest's kernel sends for a file handle:
//! fs/fuse/inode.c, `fuse_get_dentry` and `fuse_get_parent`. The kernel may have forgotten the nodeid.
//!
//! A nodeid never names another file, so its generation is always 0.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use super::PassthroughFs;
use super::fd::{open_path, stat};
use super::inode::Inode;
use super::key::{dev, mount};
use super::seen::Seen;
use super::waits::may_wait;
use crate::fuse::abi::{EntryOut, InitFlags, ROOT_ID};
use crate::fuse::ops::{Mappings, Result, WOULD_WAIT};

/// The deepest directory whose parent is looked for: no path in PATH_MAX (include/uapi/linux/limits.h) has more names.
const DEEPEST: usize = 2048;

impl PassthroughFs {
    /// What a LOOKUP by nodeid is answered with. `None`: this is an ordinary LOOKUP.
    ///
    /// # Errors
    /// ESTALE if there is no such file, or if its directory is not in the share or on another mount.
    pub(super) fn export_lookup(&self, node: u64, name: &CStr) -> Option<Result<EntryOut>> {
        match name.to_bytes() {
            b"." | b".." if !self.has(InitFlags::EXPORT_SUPPORT) => None,
            b"." => Some(self.inodes.reference(node).and_then(|inode| self.entry_of(inode))),
            b".." => Some(self.directory(node).and_then(|inode| self.entry_of(inode))),
            _ => None,
        }
    }

    /// What the guest is told of this inode, to which it has got one more reference.
    fn entry_of(&self, inode: Arc<Inode>) -> Result<EntryOut> {
        let look = || {
            if self.owes_times(inode.id) {
                if !may_wait() {
                    return Err(WOULD_WAIT);
                }
                self.settle_times(inode.id);
            }
            let st = inode.stat(&self.places)?;
            if st.stx_nlink == 0 { Err(Errno::STALE) } else { Ok(st) }
        };
        match look() {
            // Its directory is not known, so it counts as one on the same mount, and nobody watches it by that.
            Ok(st) => Ok(self.observed(&inode, &inode, &st, false, self.timeout)),
            Err(errno) => {
                self.unlearn(inode.id, 1);
                Err(if errno == Errno::NOENT { Errno::STALE } else { errno })
            }
        }
    }

    /// The inode of the directory that has this one, with one more reference for the guest.
    fn directory(&self, node: u64) -> Result<Arc<Inode>> {
        let inode = self.inodes.get(node)?;
        if node == ROOT_ID {
            return self.inodes.reference(ROOT_ID);
        }
        if inode.format() != libc::S_IFDIR {
            return Err(Errno::NOTDIR);
        }
        let fd = inode.with_fd(&self.places, |fd| open_path(fd, c".."))?;
        self.check_in_share(&fd)?;
        let key = Seen::of(&inode, fd.as_fd(), None)?.key;
        if key.mount != inode.key.mount && self.has(InitFlags::SUBMOUNTS) {
            // The root of a file system in the guest, which has no directory.
            return Err(Errno::STALE);
        }
        if let Some(known) = self.inodes.known(&key) {
            return Ok(known);
        }
        self.inodes.have_room()?;
        Ok(self.inodes.learn(key, self.places.place(fd)?.0))
    }

    /// # Errors
    /// ESTALE if this directory is not below the shared directory: the host has moved it.
    fn check_in_share(&self, dir: &OwnedFd) -> Result<()> {
        let root = self.inodes.get(ROOT_ID)?;
        let mut st = stat(dir.as_fd(), c"")?;
        let mut above: Option<OwnedFd> = None;
        for _ in 0..DEEPEST {
            let at = above.as_ref().unwrap_or(dir).as_fd();
            if root.key.is_of(at, c"", &st) {
                return Ok(());
            }
            let next = open_path(at, c"..")?;
            let next_st = stat(next.as_fd(), c"")?;
            let [same, next_same] = [&st, &next_st].map(|st| (st.stx_ino, dev(st), mount(st)));
            if same == next_same {
                // The root of the process.
                return Err(Errno::STALE);
            }
            (above, st) = (Some(next), next_st);
        }
        Err(Errno::STALE)
    }
}
