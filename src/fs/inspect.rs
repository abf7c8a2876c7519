//! What the control socket is told of the file system. Nothing here is on a request's path.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, OFlags, StatxFlags, fstat, readlinkat, statx};

use super::PassthroughFs;
use super::inode::{Inode, Place};
use super::key::parts_of_dev;
use crate::fuse::abi::ROOT_ID;
use crate::fuse::ops::{Files as _, Result};
use crate::watch::Watched;

/// By what inodes are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InodeOrder {
    /// The guest's references.
    Lookups,
    /// Open handles.
    Opens,
}

/// An inode that the guest knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InodeFacts {
    /// Its nodeid.
    pub id: u64,
    /// References that the guest holds.
    pub nlookup: u64,
    /// Open handles.
    pub opens: u32,
    /// S_IFMT bits.
    pub format: u32,
    /// The host's device number, major and minor.
    pub dev: (u32, u32),
    /// The host's inode number.
    pub ino: u64,
    /// Its path in the share, if it is known without a search.
    pub path: Option<PathBuf>,
}

/// The longest chain of names that READDIRPLUS alone has given, as far as a path follows it.
const DEPTH: usize = 256;

impl PassthroughFs {
    /// `--max-inodes`
    pub fn max_inodes(&self) -> usize {
        self.inodes.most()
    }

    /// Files and directories that the guest has open by a handle.
    pub fn open_handles(&self) -> usize {
        self.handles.len()
    }

    /// The daemon's open descriptors. `None` before Linux 6.2, where /proc does not tell.
    pub fn descriptors(&self) -> Option<u64> {
        let open = fstat(&*self.proc_self_fd).ok()?.st_size;
        u64::try_from(open).ok().filter(|open| *open > 0)
    }

    /// Why files are not named by handle, if they are not.
    pub fn why_no_handles(&self) -> Option<&str> {
        self.why_no_handles.as_deref()
    }

    /// How much is watched, if there is a watch.
    pub fn watched(&self) -> Option<Watched> {
        self.leases.watch.as_ref().map(crate::watch::Watch::watched)
    }

    /// How the guest's agent is.
    pub fn agent_facts(&self) -> crate::agent::Facts {
        self.agents.facts()
    }

    /// Why nobody hears of changes of the shared directory, although there is a watch.
    pub fn why_unwatchable(&self) -> Option<&'static str> {
        let root = self.inodes.get(ROOT_ID).ok()?;
        let watchable = self.hosts.known(root.key.dev).is_none_or(|host| host.watchable);
        (!watchable).then_some("the kernel does not report all changes of this file system")
    }

    /// Where parts of the share begin that cannot be watched, as far as the guest has looked into them: file systems
    /// that do not tell, and subvolumes of Btrfs. Paths in the share; at most 16.
    pub fn unwatched(&self) -> Vec<PathBuf> {
        self.leases.unwatched.lock().values().cloned().collect()
    }

    /// Whether the shared directory was removed on the host, as far as its server last said.
    pub fn is_removed(&self) -> bool {
        let Ok(root) = self.inodes.get(ROOT_ID) else { return false };
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let st = match &*root.place() {
            Place::Fd(fd) => statx(fd, c"", flags, StatxFlags::NLINK).ok(),
            _ => None,
        };
        st.is_some_and(|st| st.stx_nlink == 0)
    }

    /// The inodes that come first in this order, at most `top`.
    pub fn top_inodes(&self, top: usize, order: InodeOrder) -> Vec<InodeFacts> {
        let mut opens: HashMap<u64, u32> = HashMap::new();
        self.handles.for_each(|_, handle| *opens.entry(handle.map_or_else(|node| node, |h| h.node)).or_default() += 1);
        let opens_of = |id| opens.get(&id).copied().unwrap_or(0);
        let mut first = BTreeSet::new();
        let ids = match order {
            InodeOrder::Lookups => self.inodes.ids(),
            InodeOrder::Opens => opens.keys().copied().collect(),
        };
        for id in ids {
            let rank = match (order, self.inodes.get(id)) {
                (_, Err(_)) => continue,
                (InodeOrder::Lookups, Ok(inode)) => inode.nlookup(),
                (InodeOrder::Opens, Ok(_)) => opens_of(id).into(),
            };
            first.insert((rank, std::cmp::Reverse(id)));
            if first.len() > top {
                first.pop_first();
            }
        }
        let root = self.root_path();
        let facts = |(_, std::cmp::Reverse(id)): &(u64, _)| {
            let inode = self.inodes.get(*id).ok()?;
            Some(InodeFacts {
                id: *id,
                nlookup: inode.nlookup(),
                opens: opens_of(*id),
                format: inode.format(),
                dev: parts_of_dev(inode.key.dev),
                ino: inode.key.ino,
                path: root.as_ref().and_then(|root| self.path_in(root, &inode)),
            })
        };
        first.iter().rev().filter_map(facts).collect()
    }

    /// The shared directory's path, as /proc shows it.
    fn root_path(&self) -> Option<PathBuf> {
        match &*self.inodes.get(ROOT_ID).ok()?.place() {
            Place::Fd(fd) => self.shown(fd.as_fd()),
            _ => None,
        }
    }

    /// An inode's path in the share, if it is known without a search.
    pub(super) fn path_of(&self, inode: &Arc<Inode>) -> Option<PathBuf> {
        self.path_in(&self.root_path()?, inode)
    }

    /// A descriptor's path in the share, as /proc shows it.
    pub(super) fn path_at(&self, fd: BorrowedFd) -> Option<PathBuf> {
        Some(Path::new("/").join(self.shown(fd)?.strip_prefix(self.root_path()?).ok()?))
    }

    /// A descriptor's path, as /proc shows it.
    fn shown(&self, fd: BorrowedFd) -> Option<PathBuf> {
        let path = readlinkat(&*self.proc_self_fd, fd.as_raw_fd().to_string(), Vec::new()).ok()?;
        Some(PathBuf::from(OsStr::from_bytes(path.to_bytes())))
    }

    fn path_in(&self, root: &Path, inode: &Arc<Inode>) -> Option<PathBuf> {
        let mut names: Vec<CString> = Vec::new();
        let mut inode = inode.clone();
        let shown = loop {
            let next = match &*inode.place() {
                Place::Fd(fd) => break self.shown(fd.as_fd())?,
                Place::Handle(handle) => match inode.with_spare(|fd| self.shown(fd)) {
                    Some(shown) => break shown?,
                    None => break self.shown(handle.open(OFlags::PATH).ok()?.as_fd())?,
                },
                Place::Name(parent, name) if names.len() < DEPTH => {
                    names.push(name.clone().into());
                    parent.clone()
                }
                Place::Name(..) | Place::Lost | Place::Removed(_) => return None,
            };
            inode = next;
        };
        let below = shown.strip_prefix(root).ok()?;
        if below.as_os_str().is_empty() && inode.id != ROOT_ID {
            // A file whose directory the kernel does not know.
            return None;
        }
        let mut path = PathBuf::from("/");
        path.extend(below.components().filter(|part| matches!(part, Component::Normal(_))));
        path.extend(names.iter().rev().map(|name| Path::new(OsStr::from_bytes(name.to_bytes()))));
        Some(path)
    }

    /// Writes what the guest has stored in windows, and all of each file system of which the guest knows a directory.
    /// It may take long.
    ///
    /// # Errors
    /// The first of syncfs(2).
    pub fn sync_all(&self) -> Result<()> {
        if let Some(window) = &self.window {
            let _ = window.sync_all();
        }
        let mut done = BTreeSet::new();
        let mut result = Ok(());
        for id in std::iter::once(ROOT_ID).chain(self.inodes.ids()) {
            let Ok(inode) = self.inodes.get(id) else { continue };
            if inode.format() == libc::S_IFDIR && done.insert(inode.key.dev) {
                result = result.and(self.syncfs(id));
            }
        }
        result
    }
}
