//! What a request may wait for, and whether the calling thread may.

use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::fd::stat;
use super::inode::Inode;
use super::{PassthroughFs, cred};
use crate::fuse::abi::Does;
use crate::fuse::ops::{Result, Threads, WOULD_WAIT, Wait};

thread_local! {
    static MAY_WAIT: Cell<bool> = const { Cell::new(true) };
}

/// Whether the calling thread may wait for the host's file system and for other processes. A queue's worker may not.
pub fn may_wait() -> bool {
    MAY_WAIT.get()
}

impl Threads for PassthroughFs {
    fn enter_thread(&self, may_wait: bool) {
        cred::enter_thread(self.proc_self_fd.as_fd());
        MAY_WAIT.set(may_wait);
    }

    fn may_block(&self, does: Does, node: u64, fh: Option<u64>) -> Option<Wait> {
        let truncates = does.contains(Does::TRUNCATE) && self.may_truncate(node);
        // Others may have mapped the file too, and wait for this guest's memory. A worker uses that memory.
        let changes = truncates && self.window.is_some() || does.contains(Does::CHANGE_SPACE) && self.has_mappings();
        if changes {
            return Some(Wait::Others);
        }
        let owes = || does.contains(Does::SEE_TIMES) && self.owes_times(node);
        if does.contains(Does::ASK_HOST) && self.is_remote(node) || owes() {
            return Some(Wait::Host);
        }
        if truncates {
            return self.truncation_waits(node, fh);
        }
        let slow = || does.contains(Does::USE_DISK) && fh.is_some_and(|fh| self.uses_disk(node, fh));
        (does.contains(Does::TAKE_LONG) || slow()).then_some(Wait::Host)
    }
}

impl PassthroughFs {
    /// Opens a file anew. Waits for the holder of a lease, if the thread may.
    ///
    /// # Errors
    /// WOULD_WAIT if it may not.
    pub(super) fn open_anew(&self, inode: &Arc<Inode>, flags: OFlags) -> Result<OwnedFd> {
        if may_wait() {
            return inode.open_waiting(&self.places, flags);
        }
        inode.open(&self.places, flags).map_err(|errno| if errno == Errno::AGAIN { WOULD_WAIT } else { errno })
    }

    /// Whether any system call on this node's file may wait without end, because a server has the file.
    fn is_remote(&self, node: u64) -> bool {
        let host = |inode: Arc<Inode>| self.hosts.known(inode.key.dev);
        self.hosts.any_remote() && self.inodes.get(node).is_ok_and(|inode| host(inode).is_some_and(|host| host.remote))
    }

    /// Whether a truncation of this node's file does not fail at once.
    fn may_truncate(&self, node: u64) -> bool {
        !self.config.readonly && self.inodes.get(node).is_ok_and(|inode| inode.format() == libc::S_IFREG)
    }

    /// What truncating a file, to whatever size, may wait for.
    pub(super) fn truncation_waits(&self, node: u64, fh: Option<u64>) -> Option<Wait> {
        let size = || {
            let inode = self.inodes.get(node)?;
            let handle = fh.filter(|fh| !self.has_no_handle(*fh));
            // The guest has it open: the daemon may not be able to open it again.
            let spare = if handle.is_none() { fh.and_then(|_| inode.spare(OFlags::WRONLY)) } else { None };
            let st = match (handle, spare) {
                (Some(fh), _) => stat(self.handles.get(node, fh)?.fd(), c"")?,
                (None, Some(spare)) => stat(spare.fd(), c"")?,
                (None, None) => stat(inode.open(&self.places, OFlags::WRONLY)?.as_fd(), c"")?,
            };
            Ok(st.stx_size)
        };
        match size() {
            Ok(0) => None,
            // truncate(2) breaks a lease.
            Err(Errno::AGAIN) => Some(Wait::Others),
            Ok(_) | Err(_) => Some(Wait::Host),
        }
    }

    /// Whether a sync, a copy or an allocation may take long.
    fn uses_disk(&self, node: u64, fh: u64) -> bool {
        if !self.has_no_handle(fh) {
            return self.handles.get(node, fh).is_ok_and(|handle| !handle.host.in_memory);
        }
        let Ok(inode) = self.inodes.get(node) else { return false };
        let in_memory = self.hosts.known(inode.key.dev).is_some_and(|host| host.in_memory);
        // To open a file may take long too.
        !in_memory || inode.format() == libc::S_IFREG && !inode.has_writable()
    }
}
