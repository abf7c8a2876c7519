//! Events for the guest's watchers (inotify(7), fanotify(7)) of changes by others: docs/protocol.md, "Remote file
//! events".

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::RwLock;
use rustix::io::Errno;

use super::inode::{Inode, Places};
use crate::fuse::notify::{FsEvent, Sink};
use crate::fuse::ops::Result;
use crate::limits::{Limit, WATCHED_NODES};
use crate::watch::Change;

/// Masks of include/linux/fsnotify_backend.h, which has the numbers of fanotify(7)'s.
mod fs {
    pub const MODIFY: u32 = libc::FAN_MODIFY as u32;
    pub const ATTRIB: u32 = libc::FAN_ATTRIB as u32;
    pub const CLOSE_WRITE: u32 = libc::FAN_CLOSE_WRITE as u32;
    pub const MOVED_FROM: u32 = libc::FAN_MOVED_FROM as u32;
    pub const MOVED_TO: u32 = libc::FAN_MOVED_TO as u32;
    pub const CREATE: u32 = libc::FAN_CREATE as u32;
    pub const DELETE: u32 = libc::FAN_DELETE as u32;
    pub const DELETE_SELF: u32 = libc::FAN_DELETE_SELF as u32;
    pub const MOVE_SELF: u32 = libc::FAN_MOVE_SELF as u32;
    pub const ON_CHILD: u32 = libc::FAN_EVENT_ON_CHILD as u32;
    pub const Q_OVERFLOW: u32 = libc::FAN_Q_OVERFLOW as u32;
    pub const ISDIR: u32 = libc::FAN_ONDIR as u32;
}

/// A node that processes of the guest watch.
struct Watched {
    /// FS_* bits.
    mask: u32,
    inode: Arc<Inode>,
}

/// The nodes that processes of the guest watch.
pub struct Watchers {
    places: Arc<Places>,
    nodes: RwLock<HashMap<u64, Watched>>,
    /// Of the last rename.
    cookie: AtomicU32,
}

impl Watchers {
    pub fn new(places: Arc<Places>) -> Self {
        Self { places, nodes: RwLock::default(), cookie: AtomicU32::new(0) }
    }

    /// The guest wants events of these kinds from now on.
    ///
    /// # Errors
    /// ENOSPC if it watches too many nodes.
    pub fn set(&self, inode: &Arc<Inode>, mask: u32) -> Result<()> {
        let mut nodes = self.nodes.write();
        if nodes.len() >= WATCHED_NODES && !nodes.contains_key(&inode.id) {
            Limit::WatchedNodes.reached();
            return Err(Errno::NOSPC);
        }
        nodes.insert(inode.id, Watched { mask, inode: inode.clone() });
        Ok(())
    }

    /// The guest wants no events of this node any longer.
    pub fn remove(&self, node: u64) {
        let removed = self.nodes.write().remove(&node);
        // Closes descriptors of the inode, if it was the last.
        drop(removed);
    }

    /// Whether the guest watches nothing.
    pub fn is_empty(&self) -> bool {
        self.nodes.read().is_empty()
    }

    /// The nodes, with FS_* bits, in any order.
    pub fn all(&self) -> Vec<(u64, u32)> {
        self.nodes.read().iter().map(|(node, watched)| (*node, watched.mask)).collect()
    }

    pub fn clear(&self) {
        let removed = std::mem::take(&mut *self.nodes.write());
        drop(removed);
    }

    /// Whether the guest wants all of these bits of a node.
    fn wants(&self, node: u64, what: u32) -> bool {
        self.nodes.read().get(&node).is_some_and(|watched| watched.mask & what == what)
    }

    /// Events were lost: any watcher may have missed some.
    pub fn lost(&self, sink: &dyn Sink) {
        if !self.is_empty() {
            sink.event(FsEvent { nodeid: 0, child: 0, mask: fs::Q_OVERFLOW, cookie: 0, name: &[] });
        }
    }

    /// Tells the guest of a change by somebody else, if it watches what changed.
    pub fn tell(&self, change: &Change, sink: &dyn Sink) {
        if self.is_empty() {
            return;
        }
        let Change { node, dir, name, to, .. } = *change;
        // The other bits of fanotify(7) have no meaning here.
        let mask = change.mask as u32;
        let kind = mask & fs::ISDIR;
        let in_dir = |what: u32, dir: u64, name: &[u8], cookie: u32| {
            let on_child = if what & (fs::MODIFY | fs::CLOSE_WRITE | fs::ATTRIB) != 0 { fs::ON_CHILD } else { 0 };
            if dir != 0 && self.wants(dir, what | on_child) {
                sink.event(FsEvent { nodeid: dir, child: node, mask: what | kind, cookie, name });
            }
        };
        let itself = |what: u32| {
            if node != 0 && self.wants(node, what) {
                sink.event(FsEvent { nodeid: node, child: 0, mask: what | kind, cookie: 0, name: &[] });
            }
        };
        // One event of the host may stand for several. This is the usual order.
        if mask & fs::CREATE != 0 {
            in_dir(fs::CREATE, dir, name, 0);
        }
        if let Some((newdir, newname)) = to {
            let cookie = self.next_cookie();
            in_dir(fs::MOVED_FROM, dir, name, cookie);
            in_dir(fs::MOVED_TO, newdir, newname, cookie);
        }
        for what in [fs::MODIFY, fs::CLOSE_WRITE, fs::ATTRIB] {
            if mask & what != 0 {
                in_dir(what, dir, name, 0);
                itself(what);
            }
        }
        if mask & fs::MOVE_SELF != 0 {
            itself(fs::MOVE_SELF);
        }
        if mask & fs::DELETE != 0 {
            in_dir(fs::DELETE, dir, name, 0);
        }
        let may_be_gone = mask & (fs::DELETE | fs::ATTRIB | fs::DELETE_SELF) != 0;
        if may_be_gone && node != 0 && self.wants(node, fs::DELETE_SELF) && self.is_gone(node, mask) {
            itself(fs::DELETE_SELF);
            // Of a node that is gone there is nothing more to tell, and nothing twice.
            self.remove(node);
        }
    }

    /// Whether a watched node has lost its last name. A directory has one, and a file's count of links tells.
    fn is_gone(&self, node: u64, mask: u32) -> bool {
        if mask & fs::DELETE_SELF != 0 || mask & fs::DELETE != 0 && mask & fs::ISDIR != 0 {
            return true;
        }
        let inode = self.nodes.read().get(&node).map(|watched| watched.inode.clone());
        inode.is_some_and(|inode| match inode.stat(&self.places) {
            Ok(st) => st.stx_nlink == 0,
            Err(errno) => errno == Errno::STALE || errno == Errno::NOENT,
        })
    }

    /// A number that joins the two halves of a rename. Never 0, which means that there is none.
    fn next_cookie(&self) -> u32 {
        let next = |cookie: u32| Some(cookie.wrapping_add(1).max(1));
        let last = self.cookie.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).unwrap_or_default();
        last.wrapping_add(1).max(1)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use parking_lot::Mutex;

    use super::super::config::FileHandles;
    use super::super::fd::{identity, stat};
    use super::super::inode::Place;
    use super::*;
    use crate::fuse::notify::Notification;

    /// Keeps events as text.
    #[derive(Default)]
    struct Heard(Mutex<Vec<String>>);

    impl Heard {
        fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.0.lock())
        }
    }

    impl Sink for Heard {
        fn is_open(&self) -> bool {
            true
        }

        fn notify(&self, notification: Notification) {
            let Notification::Event(FsEvent { nodeid, child, mask, cookie, name }) = notification else { return };
            self.0.lock().push(format!("{nodeid} {child} {mask:#x} {cookie} {}", name.escape_ascii()));
        }

        fn clear(&self) {}
    }

    fn watchers() -> Watchers {
        Watchers::new(Arc::new(Places::new(FileHandles::Never)))
    }

    fn inode(id: u64, file: &std::fs::File) -> Arc<Inode> {
        let fd: OwnedFd = file.try_clone().unwrap().into();
        let st = stat(fd.as_fd(), c"").unwrap();
        Arc::new(Inode::new(id, identity(&st), 1, Place::Fd(fd)))
    }

    fn change<'a>(mask: u64, node: u64, dir: u64, name: &'a [u8]) -> Change<'a> {
        Change { mask, node, file: None, dir, name, to: None }
    }

    #[test]
    fn only_what_is_watched_is_told() {
        let (w, heard) = (watchers(), Heard::default());
        let file = tempfile::tempfile().unwrap();
        w.tell(&change(libc::FAN_CREATE, 0, 1, b"a"), &heard);
        w.lost(&heard);
        w.set(&inode(1, &file), fs::CREATE | fs::MODIFY | fs::ON_CHILD).unwrap();
        w.set(&inode(3, &file), fs::MODIFY).unwrap();
        w.tell(&change(libc::FAN_MODIFY, 0, 3, b"child"), &heard);
        w.set(&inode(5, &file), fs::MODIFY | fs::ATTRIB).unwrap();
        w.tell(&change(libc::FAN_CREATE | libc::FAN_ONDIR, 0, 1, b"a"), &heard);
        w.tell(&change(libc::FAN_CREATE, 0, 2, b"elsewhere"), &heard);
        w.tell(&change(libc::FAN_DELETE, 0, 1, b"unwanted"), &heard);
        // One event of the host for several changes, to the directory's watcher and the file's.
        let several = libc::FAN_MODIFY | libc::FAN_ATTRIB | libc::FAN_CLOSE_WRITE | libc::FAN_CREATE;
        w.tell(&change(several, 5, 1, b"b"), &heard);
        w.lost(&heard);
        assert_eq!(
            heard.take(),
            ["1 0 0x40000100 0 a", "1 5 0x100 0 b", "1 5 0x2 0 b", "5 0 0x2 0 ", "5 0 0x4 0 ", "0 0 0x4000 0 "]
        );
        w.remove(1);
        w.tell(&change(libc::FAN_CREATE, 0, 1, b"a"), &heard);
        w.clear();
        w.tell(&change(several, 5, 1, b"b"), &heard);
        assert!(heard.take().is_empty());
    }

    #[test]
    fn the_halves_of_a_rename_have_one_cookie() {
        let (w, heard) = (watchers(), Heard::default());
        let file = tempfile::tempfile().unwrap();
        let both = fs::MOVED_FROM | fs::MOVED_TO;
        w.set(&inode(1, &file), both).unwrap();
        w.set(&inode(2, &file), both).unwrap();
        let renamed = |dir, to, node| Change { to: Some((to, b"new")), ..change(libc::FAN_RENAME, node, dir, b"old") };
        w.tell(&renamed(1, 2, 7), &heard);
        w.tell(&renamed(1, 1, 0), &heard);
        // From outside, and to the outside.
        w.tell(&renamed(0, 1, 0), &heard);
        w.tell(&renamed(2, 0, 0), &heard);
        assert_eq!(
            heard.take(),
            [
                "1 7 0x40 1 old",
                "2 7 0x80 1 new",
                "1 0 0x40 2 old",
                "1 0 0x80 2 new",
                "1 0 0x80 3 new",
                "2 0 0x40 4 old"
            ]
        );
        w.cookie.store(u32::MAX, Ordering::Relaxed);
        w.tell(&renamed(2, 0, 0), &heard);
        assert_eq!(heard.take(), ["2 0 0x40 1 old"]);
    }

    #[test]
    fn a_node_is_gone_once() {
        let (w, heard) = (watchers(), Heard::default());
        let dir = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(dir.path().join("a")).unwrap();
        std::fs::hard_link(dir.path().join("a"), dir.path().join("b")).unwrap();
        w.set(&inode(1, &file), fs::DELETE).unwrap();
        w.set(&inode(5, &file), fs::DELETE_SELF | fs::ATTRIB).unwrap();
        std::fs::remove_file(dir.path().join("a")).unwrap();
        w.tell(&change(libc::FAN_ATTRIB, 5, 0, b""), &heard);
        w.tell(&change(libc::FAN_DELETE, 5, 1, b"a"), &heard);
        assert_eq!(heard.take(), ["5 0 0x4 0 ", "1 5 0x200 0 a"]);
        std::fs::remove_file(dir.path().join("b")).unwrap();
        w.tell(&change(libc::FAN_ATTRIB, 5, 0, b""), &heard);
        w.tell(&change(libc::FAN_DELETE, 5, 1, b"b"), &heard);
        w.tell(&change(libc::FAN_DELETE_SELF, 5, 0, b""), &heard);
        assert_eq!(heard.take(), ["5 0 0x4 0 ", "5 0 0x400 0 ", "1 5 0x200 0 b"]);
        // A directory has one name.
        w.set(&inode(6, &file), fs::DELETE_SELF).unwrap();
        w.tell(&change(libc::FAN_DELETE | libc::FAN_ONDIR, 6, 1, b"d"), &heard);
        assert_eq!(heard.take(), ["1 6 0x40000200 0 d", "6 0 0x40000400 0 "]);
    }

    #[test]
    fn the_number_of_watched_nodes_is_limited() {
        let w = watchers();
        let file = tempfile::tempfile().unwrap();
        for id in 1..=WATCHED_NODES as u64 {
            let lost = Arc::new(Inode::new(id, identity(&stat(file.as_fd(), c"").unwrap()), 1, Place::Lost));
            w.set(&lost, 1).unwrap();
        }
        let refused = Limit::WatchedNodes.times();
        assert_eq!(w.set(&inode(0, &file), 1), Err(Errno::NOSPC));
        assert!(Limit::WatchedNodes.times() > refused);
        w.set(&inode(1, &file), 2).unwrap();
        w.remove(1);
        w.set(&inode(0, &file), 1).unwrap();
    }
}
