//! Requests without a handle: the guest opened the file without a message. An inode's spare descriptor serves them.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::OFlags;
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use super::handle::{Handle, is_unopened};
use super::host::HostFs;
use super::inode::{Inode, Lent, Spare};
use super::{CachePolicy, NoOpen, PassthroughFs, cred};
use crate::fuse::abi::InitFlags;
use crate::fuse::ops::{Caller, Result};

/// What a request does with its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// It reads.
    Read,
    /// It writes.
    Write,
    /// Any open file will do.
    Any,
}

/// A request's open file: its handle's or, without a handle, one that the inode lends.
pub struct Opened<'a> {
    pub fd: BorrowedFd<'a>,
    /// The file system on which it lies.
    pub host: &'a HostFs,
    /// Its handle, if it has one.
    pub handle: Option<&'a Handle>,
    /// The inode that lends it, if it has none.
    pub lender: Option<&'a Arc<Inode>>,
}

impl Opened<'_> {
    /// The caller writes.
    pub fn writes(&self, by: Caller) {
        self.lender.into_iter().for_each(|inode| inode.hearers.wrote(by.pid, &inode.failures));
    }

    /// Another descriptor of the open file, which may outlive the request.
    pub fn copy(&self) -> Option<OwnedFd> {
        fcntl_dupfd_cloexec(self.fd, 0).ok()
    }
}

impl PassthroughFs {
    /// Whether to answer OPEN and OPENDIR with ENOSYS. `moved`: another daemon has decided for the session.
    pub(super) fn wants_no_open(&self, moved: bool) -> bool {
        let c = &self.config;
        if moved {
            return true;
        }
        if c.posix_lock || c.flock {
            return false;
        }
        // From now on the shared directory's file system is known, which a FLUSH asks for.
        let hosts = self.shared_hosts();
        match (c.no_open, c.cache) {
            // Unless it matters when and by whom a file is opened: a server may have a say, or the file's mode.
            (NoOpen::Auto, CachePolicy::Always) => {
                cred::overrides_modes() && hosts.is_ok_and(|hosts| hosts.iter().all(|host| !host.flush_on_close))
            }
            (NoOpen::Always, CachePolicy::Always | CachePolicy::Auto) => true,
            _ => false,
        }
    }

    /// Whether the host keeps a removed file only while the daemon has it open. Then it must know what the guest has
    /// open.
    pub(super) fn removes_unopened(&self) -> bool {
        let removes = self.shared_hosts().is_ok_and(|hosts| hosts.iter().any(|host| host.removes_unopened));
        if removes && self.config.no_open == NoOpen::Always {
            tracing::warn!(
                "--no-open=always does not hold for files: the shared directory is on FUSE, whose server would lose a \
                 removed file that the guest has open"
            );
        }
        removes
    }

    /// Whether OPEN and CREATE give handles.
    pub(super) fn gives_handles(&self) -> bool {
        !self.has(InitFlags::NO_OPEN_SUPPORT)
    }

    /// Whether OPENDIR gives handles.
    pub(super) fn gives_dir_handles(&self) -> bool {
        !self.has(InitFlags::NO_OPENDIR_SUPPORT)
    }

    /// Whether a request with this `fh` has no handle, and may have none.
    pub(super) fn has_no_handle(&self, fh: u64) -> bool {
        is_unopened(fh) && !(self.gives_handles() && self.gives_dir_handles())
    }

    /// Runs `f` with a request's open file. `flags`: those of the guest's open file.
    ///
    /// # Errors
    /// Without a handle WOULD_WAIT as for [`open_anew`](Self::open_anew), EROFS for a write to a read-only share.
    pub(super) fn with_file<R>(
        &self,
        node: u64,
        fh: u64,
        (usage, flags): (Use, u32),
        f: impl FnOnce(&Opened) -> Result<R>,
    ) -> Result<R> {
        if !self.has_no_handle(fh) {
            let handle = self.handles.get(node, fh)?;
            return f(&Opened { fd: handle.fd(), host: &handle.host, handle: Some(&handle), lender: None });
        }
        let inode = self.inodes.get(node)?;
        // Opening a device or a FIFO could block, or do something.
        if inode.format() != libc::S_IFREG {
            return Err(Errno::BADF);
        }
        if usage == Use::Write {
            self.writable()?;
        }
        let file = self.lend_file(&inode, usage, flags)?;
        let host = self.hosts.get(inode.key.dev, file.fd());
        // A descriptor that stays would keep the host from unmounting a submount, and from removing a file of NFS.
        if usage == Use::Write && !host.flush_on_close && self.inodes.is_on_root_mount(&inode) {
            inode.writes();
        }
        f(&Opened { fd: file.fd(), host: &host, handle: None, lender: Some(&inode) })
    }

    /// Flags of an open file that matter to a single read or write, as far as the host's file gets them.
    fn special(&self, flags: u32) -> OFlags {
        let mut special = OFlags::empty();
        special.set(OFlags::DIRECT, self.config.allow_direct_io);
        special.set(OFlags::NOATIME, self.config.preserve_noatime);
        special & OFlags::from_bits_retain(flags)
    }

    fn lend_file<'a>(&self, inode: &'a Arc<Inode>, usage: Use, flags: u32) -> Result<Lent<'a>> {
        let special = self.special(flags);
        let first = if usage == Use::Write { OFlags::RDWR } else { OFlags::RDONLY } | special;
        // A file that only its owner may write to, or only read: the daemon may be that owner.
        let second = (usage != Use::Read).then_some(OFlags::WRONLY | special);
        if let Some(spare) = [Some(first), second].into_iter().flatten().find_map(|want| inode.spare(want)) {
            return Ok(spare);
        }
        // A descriptor that takes the place of a writable one must be writable: the guest may write again.
        let wider = (inode.has_writable() && !self.config.readonly).then_some(OFlags::RDWR | special);
        let named = if usage == Use::Read && wider.is_none() { None } else { self.named(inode) };
        let mut tried = Err(Errno::BADF);
        for want in [wider, Some(first), second].into_iter().flatten() {
            tried = self.open_anew(inode, want).map(|file| (file, want));
            if !matches!(tried, Err(Errno::ACCESS)) {
                break;
            }
        }
        drop(named);
        let (file, want) = tried?;
        let spare = Spare::file(file, want);
        // Elsewhere, a file that is open for reading may be another than the one that is written to.
        let keep = spare.is_writable() || self.hosts.get(inode.key.dev, spare.fd()).shares_page_cache;
        Ok(if keep { inode.lend(&self.places, spare) } else { Lent::Own(spare) })
    }

    /// Runs `f` with a directory that is open for reading, for a request without a handle.
    pub(super) fn with_dir<R>(&self, node: u64, f: impl FnOnce(&Spare) -> Result<R>) -> Result<R> {
        let inode = self.inodes.get(node)?;
        if inode.format() != libc::S_IFDIR {
            return Err(Errno::NOTDIR);
        }
        if let Some(spare) = inode.spare(OFlags::RDONLY) {
            return f(&spare);
        }
        let dir = inode.open(&self.places, OFlags::RDONLY | OFlags::DIRECTORY)?;
        f(&inode.lend(&self.places, Spare::dir(dir, &self.listings)))
    }
}

#[cfg(test)]
mod tests;
