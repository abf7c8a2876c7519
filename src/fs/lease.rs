//! Leases: what the guest may keep, since its agent repeats what the host changes (docs/guest-agent.md).
//!
//! The watch must see a file before its attributes are read, or it must be certain that it has missed nothing meanwhile
//! (src/watch). An [`Observation`] is taken before a name is looked at.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{OFlags, Statx, StatxAttributes, ioctl_getflags};
use rustix::io::Errno;

use super::fd::{FdPath, open_path, stat};
use super::inode::Inode;
use super::{CachePolicy, PassthroughFs, announce, sys};
use crate::agent::Agents;
use crate::fuse::abi::InitFlags;
use crate::watch::{Change, Cover, FileId, Listener, Target, Watch};

/// Takes what the watch says to the guest's agent.
pub(super) struct ChangeForwarder(pub Arc<Agents>);

impl Listener for ChangeForwarder {
    fn change(&self, change: &Change) {
        if self.0.any() {
            announce::change(&self.0, change);
        }
    }

    fn look_again(&self, node: u64) {
        announce::look_again(&self.0, node);
    }

    fn look_up_again(&self, dir: u64, name: &[u8]) {
        announce::look_up_again(&self.0, dir, name);
    }

    fn all_changed(&self) {
        self.0.lose();
        self.0.hand_out();
    }

    fn all_told(&self) {
        self.0.hand_out();
    }
}

/// The watch.
#[derive(Default)]
pub(super) struct Leases {
    pub watch: Option<Watch>,
    /// It has been said that a file system cannot be watched.
    said: AtomicBool,
    /// File systems and Btrfs subvolumes of the session that cannot be watched, at most [`UNWATCHED`]: a device number,
    /// and a path in the share.
    pub unwatched: Mutex<BTreeMap<u32, PathBuf>>,
}

/// A directory's flag, of include/uapi/linux/fs.h.
const FS_CASEFOLD_FL: u32 = 0x4000_0000;

/// As many as somebody would read. A share has few.
const UNWATCHED: usize = 16;

/// A name, and what was watched before it was looked at.
#[derive(Clone, Copy)]
pub(super) struct Observation<'a> {
    pub parent: &'a Arc<Inode>,
    /// A descriptor of the directory.
    pub dir: BorrowedFd<'a>,
    pub name: &'a CStr,
    /// Events that were handled, in a session that has a watch.
    handled: Option<u64>,
    /// The directory is marked.
    pub named: bool,
    /// Its names are the same in upper and lower case.
    pub folds: bool,
}

/// A point at which a test may step in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Point {
    /// What is watched is known, and nothing was looked at.
    BeforeStat,
    AfterStat,
    /// The node has its number, and the watch does not know it.
    BeforeTable,
    BeforeReply,
}

#[cfg(not(test))]
pub(super) fn at(_point: Point) {}

#[cfg(test)]
pub(super) fn at(point: Point) {
    super::tests::lease::at(point);
}

fn ctime(st: &Statx) -> (i64, u32) {
    (st.stx_ctime.tv_sec, st.stx_ctime.tv_nsec)
}

/// Whether its attributes forbid what its mode allows.
pub(super) fn is_fixed(st: &Statx) -> bool {
    st.stx_attributes.intersects(StatxAttributes::IMMUTABLE | StatxAttributes::APPEND)
}

/// Whether anybody may execute it.
pub(super) fn is_program(st: &Statx) -> bool {
    st.stx_mode & 0o111 != 0
}

impl PassthroughFs {
    /// The watch, if the guest's agent is to repeat changes.
    pub(super) fn watch(&self) -> Option<&Watch> {
        self.leases.watch.as_ref().filter(|_| self.agents.any())
    }

    /// Whether the guest hears of changes, and may keep what it knows for longer.
    pub(super) fn hears(&self) -> bool {
        let c = &self.config;
        c.cache != CachePolicy::Never && !c.lease_timeout.is_zero() && self.agents.is_current()
    }

    /// Whether it is on a submount of which the guest's kernel makes a superblock of its own. The agent does not reach
    /// it there. Also true of a file that is mounted on another one, which the kernel makes none of.
    fn is_apart(&self, inode: &Inode) -> bool {
        self.has(InitFlags::SUBMOUNTS) && !self.inodes.is_on_root_mount(inode)
    }

    /// The same of directories alone.
    fn is_dir_apart(&self, inode: &Inode) -> bool {
        inode.format() == libc::S_IFDIR && self.is_apart(inode)
    }

    /// To be called before a name in this directory is looked at.
    pub(super) fn sight<'a>(&self, parent: &'a Arc<Inode>, dir: BorrowedFd<'a>, name: &'a CStr) -> Observation<'a> {
        let sight = Observation { parent, dir, name, handled: None, named: false, folds: false };
        let Some(watch) = self.watch().filter(|_| !self.is_apart(parent)) else { return sight };
        let handled = Some(watch.handled());
        let named = watch.is_marked(parent.id) || self.mark(watch, parent, dir);
        Observation { handled, named, folds: self.folds_case(parent, dir), ..sight }
    }

    /// Whether names of a directory are the same in upper and lower case. A change is then told by another name than
    /// the guest may know.
    pub(super) fn folds_case(&self, dir: &Arc<Inode>, fd: BorrowedFd) -> bool {
        if let Some(folds) = dir.folds.get() {
            return folds;
        }
        let flags = |dir: OwnedFd| ioctl_getflags(dir).map(|flags| flags.bits() & FS_CASEFOLD_FL != 0);
        let folds = !self.hosts.get(dir.key.dev, fd).remote
            && dir.open(&self.places, OFlags::RDONLY | OFlags::DIRECTORY).and_then(flags).unwrap_or(false);
        dir.folds.set(Some(folds));
        folds
    }

    /// Marks a file by an O_PATH descriptor. Whether it is marked now.
    pub(super) fn mark(&self, watch: &Watch, inode: &Inode, fd: BorrowedFd) -> bool {
        if !self.is_watchable(inode, fd) {
            return false;
        }
        let Ok(file) = sys::file_id(fd, c"") else { return false };
        let directory = inode.format() == libc::S_IFDIR;
        let marked = watch.mark(inode.id, file, Target { dir: None, path: FdPath::new(fd).as_cstr(), directory });
        if marked == Err(Errno::XDEV) {
            self.cannot_watch(inode, fd);
        }
        marked.is_ok()
    }

    /// Notes that a file's file system or subvolume cannot be watched.
    fn cannot_watch(&self, inode: &Inode, fd: BorrowedFd) {
        let mut unwatched = self.leases.unwatched.lock();
        if unwatched.len() < UNWATCHED && !unwatched.contains_key(&inode.key.dev) {
            unwatched.insert(inode.key.dev, self.path_at(fd).unwrap_or_default());
        }
    }

    /// Whether the kernel reports all changes of this file's file system.
    fn is_watchable(&self, inode: &Inode, fd: BorrowedFd) -> bool {
        let host = self.hosts.get(inode.key.dev, fd);
        if !host.watchable && !self.leases.said.swap(true, Ordering::Relaxed) {
            tracing::info!(
                "a file system of the share cannot be watched for changes by others (only ext2, ext3, ext4, XFS, \
                 Btrfs, F2FS and tmpfs can): the guest uses the timeouts of --cache for it"
            );
        }
        if !host.watchable {
            self.cannot_watch(inode, fd);
        }
        host.watchable
    }

    /// Whether the attributes of a file that was just found may be leased. Reads them again if it was not watched
    /// before.
    pub(super) fn covers(&self, sight: &Observation, inode: &Arc<Inode>, st: &mut Statx) -> bool {
        let (Some(watch), Some(handled)) = (self.watch(), sight.handled) else { return false };
        if self.is_dir_apart(inode) {
            return false;
        }
        at(Point::BeforeTable);
        let here = (inode.key.mount, inode.key.dev) == (sight.parent.key.mount, sight.parent.key.dev);
        if inode.format() != libc::S_IFDIR && st.stx_nlink == 1 && here {
            let id = || self.file_id(sight, inode, st);
            return sight.named && watch.found(inode.id, sight.parent.id, handled, id);
        }
        let marked = watch.is_marked(inode.id) || self.mark_found(watch, sight, inode);
        // They may be from before the mark.
        let again = if marked { stat(sight.dir, sight.name) } else { return false };
        match again {
            Ok(again) if inode.key.is_of(sight.dir, sight.name, &again) => {
                *st = again;
                true
            }
            _ => false,
        }
    }

    fn mark_found(&self, watch: &Watch, sight: &Observation, inode: &Arc<Inode>) -> bool {
        let Ok(fd) = open_path(sight.dir, sight.name) else { return false };
        inode.is_at(fd.as_fd()) == Ok(true) && self.mark(watch, inode, fd.as_fd())
    }

    /// By what the watch knows a file.
    fn file_id(&self, sight: &Observation, inode: &Arc<Inode>, st: &Statx) -> Option<FileId> {
        if let Some(file) = inode.file_id() {
            return Some(file);
        }
        let file = sys::file_id(sight.dir, sight.name).ok()?;
        // If the name led to another file for a moment, this file was renamed, which changes its ctime.
        let again = stat(sight.dir, sight.name).ok()?;
        (inode.key.is_of(sight.dir, sight.name, &again) && ctime(&again) == ctime(st)).then_some(file)
    }

    /// The attributes of a known file, and whether they may be leased. `look` reads them.
    pub(super) fn look<E>(
        &self,
        inode: &Arc<Inode>,
        look: impl Fn() -> std::result::Result<Statx, E>,
    ) -> std::result::Result<(Statx, bool), E> {
        let Some(watch) = self.watch().filter(|_| !self.is_dir_apart(inode)) else { return Ok((look()?, false)) };
        let cover = watch.cover(inode.id);
        at(Point::BeforeStat);
        let st = look()?;
        at(Point::AfterStat);
        match cover {
            Cover::Itself => return Ok((st, true)),
            Cover::ByDirectory if st.stx_nlink == 1 => return Ok((st, true)),
            _ => {}
        }
        let several = st.stx_nlink > 1;
        if !several && inode.format() != libc::S_IFDIR || self.is_apart(inode) {
            // Where it is now is learned by a lookup.
            return Ok((st, false));
        }
        let marked = inode.with_fd(&self.places, |fd| Ok(self.mark(watch, inode, fd)));
        if marked == Ok(true) { Ok((look()?, true)) } else { Ok((st, false)) }
    }

    /// Whether the guest's agent repeats what others do in this directory.
    pub(super) fn repeats_in(&self, dir: &Inode) -> bool {
        self.hears() && !self.is_apart(dir) && self.watch().is_some_and(|watch| watch.is_marked(dir.id))
    }

    /// How long a name may be kept. No event says that a mount is gone.
    pub(super) fn name_timeout(&self, sight: &Observation, inode: &Inode) -> Duration {
        self.timeout_of(sight.named && !sight.folds && !self.is_dir_apart(inode))
    }

    /// How long something may be kept. `leased`: the guest hears of changes.
    pub(super) fn timeout_of(&self, leased: bool) -> Duration {
        if leased && self.hears() { self.timeout.max(self.config.lease_timeout) } else { self.timeout }
    }

    /// Has the agent look at a node again.
    pub(super) fn look_again(&self, node: u64) {
        announce::look_again(&self.agents, node);
        self.agents.hand_out();
    }

    /// Whether somebody has a file open for writing, as an open has found. Then its attributes are not leased: writes
    /// by libaio cause no event before the file is closed.
    pub(super) fn found_writers(&self, inode: &Inode, has: bool) {
        if !inode.note_writers(has) && has && self.watch().is_some() {
            self.look_again(inode.id);
        }
    }

    /// The guest has moved a file to this directory.
    pub(super) fn has_moved(&self, inode: &Inode, parent: u64) {
        let Some(watch) = self.watch() else { return };
        if inode.format() != libc::S_IFDIR && watch.has(inode.id) && !watch.moved(inode.id, parent) {
            self.look_again(inode.id);
        }
    }

    /// The guest has forgotten references to a node. `inode`: the node before that, if it is marked.
    pub(super) fn forgot(&self, node: u64, inode: Option<&Arc<Inode>>) {
        // Even if the agent is gone: another one may come.
        let Some(watch) = &self.leases.watch else { return };
        if self.inodes.get(node).is_ok() {
            return;
        }
        watch.forget(node, |unmark| {
            let Some(inode) = inode else { return };
            let directory = inode.format() == libc::S_IFDIR;
            // The mark of a file that is gone went with it.
            let _ = inode.with_fd(&self.places, |fd| {
                unmark(Target { dir: None, path: FdPath::new(fd).as_cstr(), directory });
                Ok(())
            });
        });
    }
}
