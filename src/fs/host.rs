//! Properties of the host's file systems. A share may have several.

use std::io::IoSliceMut;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dashmap::DashMap;
use rustix::fs::{fstatfs, statfs};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use super::sys;
use crate::fuse::buf::IoRange;
use crate::fuse::ops::WOULD_WAIT;
use crate::window::Stores;

/// File systems on which close(2) neither writes nor reports anything, by statfs(2)'s f_type.
const LOCAL: [i64; 8] = [
    libc::EXT4_SUPER_MAGIC,
    libc::XFS_SUPER_MAGIC,
    libc::BTRFS_SUPER_MAGIC,
    libc::TMPFS_MAGIC,
    RAMFS,
    libc::F2FS_SUPER_MAGIC,
    libc::OVERLAYFS_SUPER_MAGIC,
    // ZFS
    0x2fc1_2fc1,
];

/// File systems on disks of this host that set a file's change time at each change, and before a mapped page's first
/// store. tmpfs and ramfs do not notice such stores. Network and cluster file systems, FUSE and overlayfs have files
/// that others change.
const CTIME_RELIABLE: [i64; 3] = [libc::EXT4_SUPER_MAGIC, libc::XFS_SUPER_MAGIC, libc::BTRFS_SUPER_MAGIC];

/// File systems on which the kernel itself takes set-id bits and capabilities away from a file that is written to. It
/// goes by the capabilities of who writes.
const CLEARS_PRIVILEGES: [i64; 5] =
    [libc::EXT4_SUPER_MAGIC, libc::XFS_SUPER_MAGIC, libc::BTRFS_SUPER_MAGIC, libc::TMPFS_MAGIC, libc::F2FS_SUPER_MAGIC];

/// File systems that no other host changes, and whose files have handles by which fanotify(7) names them.
const WATCHABLE: [i64; 5] = [
    // ext2 and ext3 too.
    libc::EXT4_SUPER_MAGIC,
    libc::XFS_SUPER_MAGIC,
    libc::BTRFS_SUPER_MAGIC,
    libc::F2FS_SUPER_MAGIC,
    libc::TMPFS_MAGIC,
];

/// File systems whose files a server has: another machine, or a process of this host. Any system call on such a file
/// may wait for it, and others change files without this kernel's knowledge. By include/uapi/linux/magic.h, or by the
/// file system's own sources where that has none.
const REMOTE: [i64; 18] = [
    libc::FUSE_SUPER_MAGIC,
    libc::NFS_SUPER_MAGIC,
    libc::SMB_SUPER_MAGIC,
    CIFS,
    SMB2,
    CEPH,
    // 9p
    0x0102_1997,
    libc::AFS_SUPER_MAGIC,
    AFS_OF_THE_KERNEL,
    libc::CODA_SUPER_MAGIC,
    OCFS2,
    GFS2,
    LUSTRE,
    GPFS,
    BEEGFS,
    ORANGEFS,
    // VirtualBox's shared folders
    0x786f_4256,
    // What looks into such a directory waits for the mount.
    libc::AUTOFS_SUPER_MAGIC,
];

const CIFS: i64 = 0xff53_4d42;
const SMB2: i64 = 0xfe53_4d42;
const CEPH: i64 = 0x00c3_6400;
/// AFS_FS_MAGIC
const AFS_OF_THE_KERNEL: i64 = 0x6b41_4653;
const OCFS2: i64 = 0x7461_636f;
/// GFS2_MAGIC of include/uapi/linux/gfs2_ondisk.h.
const GFS2: i64 = 0x0116_1970;
/// LL_SUPER_MAGIC of Lustre's lustre_user.h.
const LUSTRE: i64 = 0x0bd0_0bd0;
/// IBM Storage Scale, as coreutils' stat(1) knows it.
const GPFS: i64 = 0x4750_4653;
/// As coreutils' stat(1) knows it.
const BEEGFS: i64 = 0x1983_0326;
/// ORANGEFS_SUPER_MAGIC of fs/orangefs/orangefs-utils.h.
const ORANGEFS: i64 = 0x2003_0528;

/// RAMFS_MAGIC of include/uapi/linux/magic.h.
const RAMFS: i64 = 0x8584_58f6;

/// File systems whose files are made when they are read, so that their sizes say nothing. By
/// include/uapi/linux/magic.h.
const MADE: [i64; 7] = [
    libc::PROC_SUPER_MAGIC,
    libc::SYSFS_MAGIC,
    libc::TRACEFS_MAGIC,
    libc::DEBUGFS_MAGIC,
    libc::SECURITYFS_MAGIC,
    libc::CGROUP_SUPER_MAGIC,
    libc::CGROUP2_SUPER_MAGIC,
];

/// Whether a server has the files of the file system that `path` is on: another machine, or a process of this host.
pub fn is_remote(path: &Path) -> bool {
    statfs(path).is_ok_and(|st| REMOTE.contains(&st.f_type))
}

/// A file system.
#[derive(Debug, Default)]
pub struct HostFs {
    /// close(2) writes or reports something.
    pub flush_on_close: bool,
    /// A write clears set-id bits and capabilities.
    pub clears_privileges: bool,
    /// It is in memory: nothing waits for a disk.
    pub in_memory: bool,
    /// All opens of a file share one page cache, so an open file is as good as one that is opened now: open(2) asks no
    /// server and copies nothing up.
    pub shares_page_cache: bool,
    /// Each change of a file's contents moves its change time. Nothing but this host's kernel changes files.
    pub ctime_reliable: bool,
    /// fanotify(7) reports all changes of it, and its file handles name files.
    pub watchable: bool,
    /// A server has the files. Any system call may wait for it, however small, and without end.
    pub remote: bool,
    /// A removed file stays only while it is open, which an O_PATH descriptor is not: many a server of FUSE finds files
    /// by their paths.
    pub removes_unopened: bool,
    /// A file's contents are made when they are read. Its size says nothing.
    pub made: bool,
    /// A copy of a file may share its blocks.
    pub shares_blocks: bool,
    /// A store to a mapped page may take new blocks each time.
    pub copies_on_write: bool,
    /// It does not support RWF_NOWAIT, and so does not say whether a read would wait.
    silent: AtomicBool,
}

impl HostFs {
    pub(super) fn of(fd: BorrowedFd) -> Self {
        // If this fails, anything may happen at close(2), and it is a server that has failed.
        let kind = fstatfs(fd).map_or(libc::FUSE_SUPER_MAGIC, |st| st.f_type);
        let in_memory = matches!(kind, libc::TMPFS_MAGIC | RAMFS);
        let flush_on_close = !LOCAL.contains(&kind);
        let clears_privileges = CLEARS_PRIVILEGES.contains(&kind);
        let shares_page_cache = !flush_on_close && kind != libc::OVERLAYFS_SUPER_MAGIC;
        let ctime_reliable = CTIME_RELIABLE.contains(&kind);
        let watchable = WATCHABLE.contains(&kind);
        let remote = REMOTE.contains(&kind);
        let removes_unopened = kind == libc::FUSE_SUPER_MAGIC;
        let made = MADE.contains(&kind);
        let shares_blocks = kind == libc::XFS_SUPER_MAGIC;
        let copies_on_write = Stores::of(fd).is_ok_and(|stores| stores == Stores::Elsewhere);
        let silent = AtomicBool::new(in_memory);
        Self {
            flush_on_close,
            clears_privileges,
            in_memory,
            shares_page_cache,
            ctime_reliable,
            watchable,
            remote,
            removes_unopened,
            made,
            shares_blocks,
            copies_on_write,
            silent,
        }
    }

    /// Reads what is in memory.
    ///
    /// # Errors
    /// WOULD_WAIT if some of it is not.
    pub fn read_cached(&self, fd: BorrowedFd, to: &IoRange, offset: u64) -> Result<usize, Errno> {
        if self.silent.load(Ordering::Relaxed) {
            // A local file system without RWF_NOWAIT, such as overlayfs, has most data in memory. Handing each read to
            // another thread would cost more than the few waits.
            return if self.flush_on_close { Err(WOULD_WAIT) } else { sys::preadv(fd, to, offset, 0) };
        }
        match sys::preadv(fd, to, offset, libc::RWF_NOWAIT) {
            Ok(n) if n < to.len() && !is_end(fd, offset.saturating_add(n as u64)) => Err(WOULD_WAIT),
            Err(Errno::AGAIN) => Err(WOULD_WAIT),
            Err(Errno::OPNOTSUPP) => {
                self.silent.store(true, Ordering::Relaxed);
                self.read_cached(fd, to, offset)
            }
            done => done,
        }
    }
}

/// Whether the file is known to end at `offset` or before, without waiting.
fn is_end(fd: BorrowedFd, offset: u64) -> bool {
    let mut byte = [0];
    matches!(preadv2(fd, &mut [IoSliceMut::new(&mut byte)], offset, ReadWriteFlags::NOWAIT), Ok(0))
}

/// The file systems that were met, by [device number](super::key::Key::dev).
#[derive(Default)]
pub struct Hosts {
    met: DashMap<u32, Arc<HostFs>>,
    /// One of them is [remote](HostFs::remote).
    any_remote: AtomicBool,
}

impl Hosts {
    /// The file system with this device number, if a file of it was opened before.
    pub fn known(&self, dev: u32) -> Option<Arc<HostFs>> {
        self.met.get(&dev).map(|known| known.clone())
    }

    /// Makes the file system with this device number another.
    #[cfg(test)]
    pub fn pretend(&self, dev: u32, host: HostFs) {
        self.met.insert(dev, Arc::new(host));
    }

    /// Whether close(2) writes or reports something on any of them.
    pub fn any_flushes(&self) -> bool {
        self.met.iter().any(|host| host.flush_on_close)
    }

    /// Whether any of them is [remote](HostFs::remote). Costs nothing, as each request asks.
    pub fn any_remote(&self) -> bool {
        self.any_remote.load(Ordering::Relaxed)
    }

    /// The file system with this device number, on which `fd` lies.
    pub fn get(&self, dev: u32, fd: BorrowedFd) -> Arc<HostFs> {
        if let Some(known) = self.met.get(&dev) {
            return known.clone();
        }
        // Without a lock: a server may not answer.
        let host = Arc::new(HostFs::of(fd));
        self.any_remote.fetch_or(host.remote, Ordering::Relaxed);
        self.met.entry(dev).or_insert(host).clone()
    }
}
