//! Inodes by nodeid and by host identity.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use parking_lot::Mutex;
use rustix::io::Errno;

use super::fd::stat;
use super::inode::{Inode, Place, Places};
use super::key::{Key, ToldBy};
use super::seen::Seen;
use crate::fuse::abi::ROOT_ID;
use crate::fuse::ops::Result;
use crate::limits;

/// All inodes of a session.
///
/// Lock rule: a shard of `by_key` before one of `by_id`, and `forgotten` last. None is held during a system call.
pub struct Inodes {
    /// The most inodes, those that the guest has forgotten included.
    most: usize,
    count: AtomicUsize,
    /// Nodeids of files that the guest has forgotten and that stay (`--nfs-export`). They have no references.
    forgotten: Option<Mutex<BTreeSet<u64>>>,
    by_id: DashMap<u64, Arc<Inode>>,
    by_key: DashMap<Key, Arc<Inode>>,
    next_id: AtomicU64,
    /// Whether the session has seen a [`Place::Name`].
    any_lazy: AtomicBool,
    root: Arc<Inode>,
}

impl Inodes {
    /// A table that has the shared directory alone. With `remembers`, files stay in it when the guest has forgotten
    /// them.
    pub fn new(root: OwnedFd, most: usize, remembers: bool) -> Result<Self> {
        // A client of the guest's NFS server may have nodeids of an earlier daemon, which are not to name other files.
        // In 2^61 numbers two ranges of a billion meet once in 2^30 restarts. A phantom's nodeid has a higher bit.
        let first = if remembers { RandomState::new().hash_one(()) >> 3 } else { 0 };
        let key = Key::of(root.as_fd(), &stat(root.as_fd(), c"")?, None, None);
        let root = Arc::new(Inode::new(ROOT_ID, key, 1, Place::Fd(root)));
        let inodes = Self {
            most,
            count: AtomicUsize::new(0),
            forgotten: remembers.then(Mutex::default),
            by_id: DashMap::new(),
            by_key: DashMap::new(),
            next_id: AtomicU64::new(first + ROOT_ID + 1),
            any_lazy: AtomicBool::new(false),
            root,
        };
        inodes.clear();
        Ok(inodes)
    }

    /// Forgets all but the root.
    pub fn clear(&self) {
        self.by_id.iter().for_each(|inode| inode.cell.free());
        self.by_key.clear();
        self.by_id.clear();
        self.forgotten.iter().for_each(|forgotten| forgotten.lock().clear());
        self.any_lazy.store(false, Ordering::Relaxed);
        self.by_key.insert(self.root.key, self.root.clone());
        self.by_id.insert(ROOT_ID, self.root.clone());
        self.count.store(1, Ordering::Relaxed);
    }

    /// The guest knows none but the root from now on. What it knew counts as forgotten.
    pub fn forget_all(&self) {
        if self.forgotten.is_none() {
            return self.clear();
        }
        self.all().into_iter().for_each(|inode| self.forget(inode.id, u64::MAX));
    }

    /// How many the guest knows.
    pub fn len(&self) -> usize {
        let forgotten = self.forgotten.as_ref().map_or(0, |forgotten| forgotten.lock().len());
        self.count.load(Ordering::Relaxed).saturating_sub(forgotten)
    }

    /// Whether files stay when the guest has forgotten them.
    pub fn remembers(&self) -> bool {
        self.forgotten.is_some()
    }

    /// The most inodes that the guest may know.
    pub fn most(&self) -> usize {
        self.most
    }

    /// The nodeids of all inodes that the guest knows, in no order. It holds each part of the table for as long as it
    /// takes to copy its numbers: about 1 ms with a million inodes.
    pub fn ids(&self) -> Vec<u64> {
        self.by_id.iter().filter(|inode| inode.nlookup() > 0).map(|inode| inode.id).collect()
    }

    /// To be asked before the guest hears of another inode. A forgotten one makes room.
    ///
    /// # Errors
    /// ENFILE if it knows too many.
    pub fn have_room(&self) -> Result<()> {
        if self.count.load(Ordering::Relaxed) < self.most || self.drop_forgotten() {
            return Ok(());
        }
        limits::Limit::Inodes.reached();
        tracing::warn!("the guest knows {} files and forgets none: more are refused (--max-inodes)", self.most);
        Err(Errno::NFILE)
    }

    /// # Errors
    /// ESTALE if the nodeid was never given out, or is forgotten.
    pub fn get(&self, id: u64) -> Result<Arc<Inode>> {
        if id == ROOT_ID {
            return Ok(self.root.clone());
        }
        let inode = self.by_id.get(&id).ok_or(Errno::STALE)?;
        if inode.nlookup() == 0 { Err(Errno::STALE) } else { Ok(inode.clone()) }
    }

    /// The inode of this file if it is known, without another reference for the guest.
    pub fn peek(&self, key: &Key) -> Option<Arc<Inode>> {
        self.by_key.get(key).map(|inode| inode.clone())
    }

    /// The inode of this file if it is known, with one more reference for the guest.
    pub fn known(&self, key: &Key) -> Option<Arc<Inode>> {
        let inode = self.by_key.get(key)?;
        self.add_reference(&inode);
        Some(inode.clone())
    }

    /// The inode of this nodeid, with one more reference for the guest, which may have forgotten it.
    ///
    /// # Errors
    /// ESTALE if the nodeid was never given out, or the file did not stay.
    pub fn reference(&self, id: u64) -> Result<Arc<Inode>> {
        let inode = self.by_id.get(&id).map(|inode| inode.clone()).ok_or(Errno::STALE)?;
        let _locked = self.by_key.entry(inode.key);
        if !self.by_id.contains_key(&id) {
            return Err(Errno::STALE);
        }
        self.add_reference(&inode);
        Ok(inode)
    }

    /// To be called while the inode's key is locked.
    fn add_reference(&self, inode: &Inode) {
        if inode.reference() == 0 {
            self.forgotten.iter().for_each(|forgotten| _ = forgotten.lock().remove(&inode.id));
        }
    }

    /// As [`known`](Self::known), or a new inode at `place`.
    pub fn learn(&self, key: Key, place: Place) -> Arc<Inode> {
        let lazy = matches!(place, Place::Name(..));
        let create = || {
            let id = self.next_id.fetch_add(1, Ordering::Relaxed);
            let inode = Arc::new(Inode::new(id, key, 1, place));
            inode.record();
            self.by_id.insert(id, inode.clone());
            self.count.fetch_add(1, Ordering::Relaxed);
            if lazy {
                self.any_lazy.store(true, Ordering::Relaxed);
            }
            inode
        };
        match self.by_key.entry(key) {
            Entry::Occupied(entry) => {
                self.add_reference(entry.get());
                entry.get().clone()
            }
            Entry::Vacant(entry) => entry.insert(create()).clone(),
        }
    }

    /// All inodes, also those that the guest has forgotten, by nodeid.
    pub fn all(&self) -> Vec<Arc<Inode>> {
        let mut all: Vec<_> = self.by_id.iter().map(|inode| inode.clone()).collect();
        all.sort_unstable_by_key(|inode| inode.id);
        all
    }

    /// The nodeid that comes next.
    pub fn next_id(&self) -> u64 {
        self.next_id.load(Ordering::Relaxed)
    }

    /// Makes `next` the nodeid that comes next.
    pub fn set_next_id(&self, next: u64) {
        self.next_id.store(next, Ordering::Relaxed);
    }

    /// Enters an inode that another daemon gave this nodeid.
    ///
    /// # Errors
    /// EEXIST if the nodeid is taken, ENFILE if there are too many inodes.
    pub fn restore(&self, id: u64, nlookup: u64, key: Key, place: Place) -> Result<()> {
        let inode = self.insert(Inode::new(id, key, nlookup, place))?;
        self.name(inode);
        Ok(())
    }

    /// Enters an inode that an earlier worker process gave this nodeid. `removed`: it has no name left.
    ///
    /// # Errors
    /// As [`restore`](Self::restore).
    pub fn enter_again(&self, inode: Inode, removed: bool) -> Result<Arc<Inode>> {
        let inode = self.insert(inode)?;
        if !removed {
            self.name(inode.clone());
        }
        Ok(inode)
    }

    /// Has an inode found by its key.
    fn name(&self, inode: Arc<Inode>) {
        if inode.is_lazy() {
            self.any_lazy.store(true, Ordering::Relaxed);
        }
        self.by_key.entry(inode.key).or_insert(inode);
    }

    /// Enters an inode whose file is lost. `format`: S_IFMT bits.
    ///
    /// # Errors
    /// EEXIST if the nodeid is taken, ENFILE if there are too many inodes.
    pub fn restore_lost(&self, id: u64, nlookup: u64, format: u32) -> Result<()> {
        self.insert(Inode::new(id, Key::of_none(id, format), nlookup, Place::Lost)).map(drop)
    }

    fn insert(&self, inode: Inode) -> Result<Arc<Inode>> {
        self.have_room()?;
        match self.by_id.entry(inode.id) {
            Entry::Occupied(_) => Err(Errno::EXIST),
            Entry::Vacant(entry) => {
                self.count.fetch_add(1, Ordering::Relaxed);
                if inode.nlookup() == 0 {
                    self.forgotten.iter().for_each(|forgotten| _ = forgotten.lock().insert(inode.id));
                }
                inode.record();
                Ok(entry.insert(Arc::new(inode)).clone())
            }
        }
    }

    /// Drops references that the guest held.
    pub fn forget(&self, id: u64, nlookup: u64) {
        if id == ROOT_ID {
            return;
        }
        let Some(inode) = self.by_id.get(&id).map(|inode| inode.clone()) else { return };
        let last;
        match self.by_key.entry(inode.key) {
            Entry::Occupied(entry) if Arc::ptr_eq(entry.get(), &inode) => {
                last = inode.drop_references(nlookup);
                if let Some(forgotten) = self.forgotten.as_ref().filter(|_| last && may_stay(&inode)) {
                    forgotten.lock().insert(id);
                    return;
                }
                if last {
                    entry.remove();
                }
            }
            // It is removed, or a migration gave two inodes this key. The key is locked nevertheless.
            _other => last = inode.drop_references(nlookup),
        }
        if last {
            self.drop_id(&inode);
        }
    }

    fn drop_id(&self, inode: &Inode) {
        if self.by_id.remove(&inode.id).is_some() {
            inode.cell.free();
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Drops the forgotten file that the guest has known first. Whether there was one.
    fn drop_forgotten(&self) -> bool {
        let first = || self.forgotten.as_ref()?.lock().pop_first();
        while let Some(id) = first() {
            let inode = self.by_id.get(&id).map(|inode| inode.clone());
            if inode.is_some_and(|inode| self.drop_if_forgotten(&inode)) {
                return true;
            }
        }
        false
    }

    /// Whether the guest had forgotten this file, which then does not stay.
    fn drop_if_forgotten(&self, inode: &Arc<Inode>) -> bool {
        let Some(forgotten) = &self.forgotten else { return false };
        let entry = self.by_key.entry(inode.key);
        if inode.nlookup() > 0 {
            return false;
        }
        forgotten.lock().remove(&inode.id);
        match entry {
            Entry::Occupied(entry) if Arc::ptr_eq(entry.get(), inode) => drop(entry.remove()),
            _other => {}
        }
        self.drop_id(inode);
        true
    }

    /// Whether it is on the mount of the shared directory.
    pub fn is_on_root_mount(&self, inode: &Inode) -> bool {
        self.is_root_mount(inode.key.mount)
    }

    /// Whether this is the id of the mount of the shared directory.
    pub fn is_root_mount(&self, mount: u32) -> bool {
        mount == self.root.key.mount
    }

    /// To be called before the file `name` in `parent` loses this name. `dir`: a descriptor of the directory. A file
    /// that only READDIRPLUS has named is opened.
    /// If this is the file's last name (`removed`), it is held by descriptor until the guest forgets it: the guest may
    /// still ask for it, and no handle opens a file without a name. If it is a regular file and the guest's opens have
    /// handles (`open_by_handle`), it is held only as long as there are any: the result is to be given to
    /// [`was_removed`](Self::was_removed) then. On NFS it has a name as long as it is open, so it is not held at all.
    pub fn pin(
        &self,
        places: &Places,
        (parent, dir): (&Inode, BorrowedFd),
        name: &CStr,
        removed: bool,
        open_by_handle: bool,
    ) -> Option<Arc<Inode>> {
        let unpinned = self.any_lazy.load(Ordering::Relaxed) || removed && (open_by_handle || places.use_handles());
        if !unpinned {
            return None;
        }
        let Seen { st, key, .. } = Seen::at(parent, dir, name).ok()?;
        let inode = self.peek(&key)?;
        // If this fails, the file is stale for the guest later.
        if removed && (st.stx_nlink <= 1 || inode.format() == libc::S_IFDIR) {
            let _ = inode.hold(places, dir, name, open_by_handle);
            if self.drop_if_forgotten(&inode) {
                return None;
            }
            (open_by_handle && inode.format() == libc::S_IFREG).then_some(inode)
        } else {
            inode.settle(places);
            None
        }
    }

    /// The name of this [pinned](Self::pin) file was removed. Whether the file is: then another may get its key.
    pub fn was_removed(&self, inode: &Arc<Inode>) -> bool {
        let Some(last) = inode.nameless() else { return false };
        self.by_key.remove_if(&inode.key, |_, known| Arc::ptr_eq(known, inode));
        inode.remove(last);
        true
    }
}

/// Whether a file may stay when the guest has forgotten it: that takes no descriptor, and no other file gets its key.
fn may_stay(inode: &Inode) -> bool {
    matches!(*inode.place(), Place::Handle(_)) && matches!(inode.key.told_by(), ToldBy::Birth | ToldBy::Handle)
}
