//! Inodes by nodeid and by host identity.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use parking_lot::{RwLock, RwLockReadGuard};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Statx, StatxFlags, fcntl_setfl, makedev, openat, statx};
use rustix::io::Errno;

use super::file_handle::{FileHandle, Handles};
use crate::fuse::abi::ROOT_ID;
use crate::fuse::ops::Result;

/// Host identity of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub dev: u64,
    ino: u64,
    /// The same file seen through another mount is another inode to the guest, as a submount's root must be.
    pub mount: u64,
}

/// What tells apart two files that have the same [`Key`] one after the other. The time is 0 where the file system keeps
/// no birth times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Birth {
    sec: i64,
    nsec: u32,
    /// S_IFMT bits.
    format: u32,
}

impl Key {
    pub fn of(st: &Statx) -> Self {
        identity(st).0
    }
}

fn identity(st: &Statx) -> (Key, Birth) {
    let known = st.stx_mask & StatxFlags::BTIME.bits() != 0;
    let (sec, nsec) = if known { (st.stx_btime.tv_sec, st.stx_btime.tv_nsec) } else { (0, 0) };
    let key = Key { dev: makedev(st.stx_dev_major, st.stx_dev_minor), ino: st.stx_ino, mount: st.stx_mnt_id };
    (key, Birth { sec, nsec, format: u32::from(st.stx_mode) & libc::S_IFMT })
}

/// statx(2) with all that an entry needs, of `name` in `dir` or, with an empty name, of `dir` itself.
pub fn stat(dir: BorrowedFd, name: &CStr) -> Result<Statx> {
    let mut flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    if name.is_empty() {
        flags |= AtFlags::EMPTY_PATH;
    }
    statx(dir, name, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID)
}

/// Opens `name` in `dir` as an O_PATH descriptor, symbolic links themselves and not their targets.
pub fn open_path(dir: BorrowedFd, name: &CStr) -> Result<OwnedFd> {
    openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// The path of a descriptor, relative to the workers' directory, /proc/self/fd.
pub struct FdPath([u8; Self::LEN]);

impl FdPath {
    /// Digits of the largest descriptor and a NUL.
    const LEN: usize = 11;

    pub fn new(fd: BorrowedFd) -> Self {
        let (mut path, mut at, mut rest) = ([0; Self::LEN], Self::LEN - 1, fd.as_raw_fd().unsigned_abs());
        loop {
            at -= 1;
            path[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        path.rotate_left(at);
        Self(path)
    }

    pub fn as_cstr(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or_default()
    }
}

/// Opens the file of an O_PATH descriptor anew.
pub fn reopen(fd: BorrowedFd, flags: OFlags) -> Result<OwnedFd> {
    openat(CWD, FdPath::new(fd).as_cstr(), flags | OFlags::CLOEXEC, Mode::empty())
}

/// How to get at an inode's file.
pub enum Place {
    /// An O_PATH descriptor.
    Fd(OwnedFd),
    Handle(FileHandle),
    /// Known by READDIRPLUS alone: opened at first need.
    Name(Arc<Inode>, Box<CStr>),
    /// A migration lost it: all that the guest asks of it gets EIO.
    Lost,
}

/// A file that the guest knows.
pub struct Inode {
    pub id: u64,
    pub key: Key,
    birth: Birth,
    /// References that the guest holds. Becomes 0, and is raised from there, only under the key's shard lock in
    /// [`Inodes::by_key`].
    nlookup: AtomicU64,
    /// The size that the guest was told last, in bytes.
    told_size: AtomicU64,
    /// Of what the guest stored in place.
    pub failures: Failures,
    /// Locked for reading while the file is in use, and that recursively (a rename within one directory uses it twice);
    /// for writing when it changes, with no other lock held.
    place: RwLock<Place>,
    /// A descriptor besides its place, for as long as it is used ([`super::kept`]). Locked as `place` is, and after it.
    kept: RwLock<Option<Spare>>,
    /// It was used since the last sweep, and the sweep knows of it.
    used: AtomicBool,
    listed: AtomicBool,
}

/// The last failure to write to a file and how many there were, so that each open hears of it once. The kernel has the same
/// in each of its files (errseq_t).
#[derive(Default)]
pub struct Failures(AtomicU32);

impl Failures {
    /// Bits of an errno (MAX_ERRNO of include/linux/err.h).
    const ERRNO: u32 = 0xfff;

    pub fn add(&self, errno: Errno) {
        let next = |now: u32| (now & !Self::ERRNO).wrapping_add(Self::ERRNO + 1) | errno.raw_os_error() as u32;
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| Some(next(now)));
    }

    /// What an open that begins now has heard of.
    pub fn heard(&self) -> AtomicU32 {
        AtomicU32::new(self.0.load(Ordering::Acquire))
    }

    /// Tells an open what it has not heard of.
    pub fn tell(&self, heard: &AtomicU32) -> Result<()> {
        let now = self.0.load(Ordering::Acquire);
        match heard.swap(now, Ordering::AcqRel) == now {
            true => Ok(()),
            false => Err(Errno::from_raw_os_error((now & Self::ERRNO) as i32)),
        }
    }
}

/// A descriptor that is kept.
struct Spare {
    fd: OwnedFd,
    /// Open for reading, with no other flag; else by O_PATH.
    readable: bool,
}

impl Inode {
    fn new(id: u64, (key, birth): (Key, Birth), nlookup: u64, place: Place) -> Self {
        Self {
            id,
            key,
            birth,
            nlookup: AtomicU64::new(nlookup),
            told_size: AtomicU64::new(0),
            failures: Failures::default(),
            place: RwLock::new(place),
            kept: RwLock::new(None),
            used: AtomicBool::new(false),
            listed: AtomicBool::new(false),
        }
    }

    /// The size that the guest was told last, in bytes.
    pub fn told_size(&self) -> u64 {
        self.told_size.load(Ordering::Relaxed)
    }

    /// Notes that the guest is told this size.
    pub fn tell_size(&self, size: u64) {
        self.told_size.store(size, Ordering::Relaxed);
    }

    /// The file's type, S_IFMT bits.
    pub fn format(&self) -> u32 {
        self.birth.format
    }

    /// Runs `f` with an O_PATH descriptor of the file.
    ///
    /// # Errors
    /// ESTALE where the file is not to be found any more.
    pub fn with_fd<R>(self: &Arc<Self>, handles: &Handles, f: impl FnOnce(BorrowedFd) -> Result<R>) -> Result<R> {
        match &*self.found(handles)? {
            Place::Fd(fd) => f(fd.as_fd()),
            Place::Handle(handle) => {
                self.used.store(true, Ordering::Relaxed);
                if let Some(spare) = &*self.kept.read_recursive() {
                    return f(spare.fd.as_fd());
                }
                let fd = handle.open(OFlags::PATH)?;
                let result = f(fd.as_fd());
                self.keep(handles, fd, false);
                result
            }
            Place::Name(..) => Err(Errno::STALE),
            Place::Lost => Err(Errno::IO),
        }
    }

    /// The file's attributes. One that has yet to be opened stays so.
    ///
    /// # Errors
    /// ESTALE where the file is not to be found any more.
    pub fn stat(self: &Arc<Self>, handles: &Handles) -> Result<Statx> {
        if let Some((parent, name)) = self.lazy()
            && let Ok(st) = parent.with_fd(handles, |dir| stat(dir, &name))
            && self.is_of(&st)
        {
            return Ok(st);
        }
        self.with_fd(handles, |fd| stat(fd, c""))
    }

    /// Opens the file anew, without waiting for anybody.
    ///
    /// # Errors
    /// EAGAIN where somebody holds a lease on the file, who is told now to give it back.
    pub fn open(self: &Arc<Self>, handles: &Handles, flags: OFlags) -> Result<OwnedFd> {
        if flags.contains(OFlags::DIRECTORY) {
            return self.open_waiting(handles, flags);
        }
        let file = self.open_waiting(handles, flags | OFlags::NONBLOCK)?;
        // io_uring would not wait for data of such a file.
        fcntl_setfl(&file, flags & (OFlags::DIRECT | OFlags::NOATIME))?;
        Ok(file)
    }

    /// The same, but waits for a lease to end: up to fs.lease-break-time, 45 s unless the host's administrator changes it.
    pub fn open_waiting(self: &Arc<Self>, handles: &Handles, flags: OFlags) -> Result<OwnedFd> {
        match &*self.found(handles)? {
            Place::Fd(fd) => reopen(fd.as_fd(), flags),
            // Faster than by a descriptor that is kept, which takes a path in /proc.
            Place::Handle(handle) => handle.open(flags),
            Place::Name(..) => Err(Errno::STALE),
            Place::Lost => Err(Errno::IO),
        }
    }

    /// Keeps a descriptor of its file, `readable` or an O_PATH one, if there is room for one.
    pub fn keep(self: &Arc<Self>, handles: &Handles, fd: OwnedFd, readable: bool) {
        if !self.listed.swap(true, Ordering::Relaxed) && !handles.kept.add(self) {
            self.listed.store(false, Ordering::Relaxed);
            return;
        }
        self.used.store(true, Ordering::Relaxed);
        if let Some(mut kept) = self.kept.try_write()
            && kept.as_ref().is_none_or(|spare| readable && !spare.readable)
        {
            *kept = Some(Spare { fd, readable });
        }
    }

    /// A descriptor that was kept and is open for reading.
    pub fn take_readable(&self) -> Option<OwnedFd> {
        let spare = self.kept.try_write()?.take_if(|spare| spare.readable)?;
        Some(spare.fd)
    }

    /// Closes its descriptor if it was not used since the last call. Whether it may still have one.
    pub fn keeps_on(&self) -> bool {
        if self.used.swap(false, Ordering::Relaxed) {
            return true;
        }
        // One that is locked is in use.
        let Some(mut kept) = self.kept.try_write() else { return true };
        self.listed.store(false, Ordering::Relaxed);
        *kept = None;
        false
    }

    /// The place as a descriptor or a handle.
    fn found(self: &Arc<Self>, handles: &Handles) -> Result<RwLockReadGuard<'_, Place>> {
        let place = self.place.read_recursive();
        let Place::Name(parent, name) = &*place else { return Ok(place) };
        let (parent, name) = (parent.clone(), name.clone());
        drop(place);
        self.find(handles, &parent, &name)?;
        Ok(self.place.read_recursive())
    }

    fn find(self: &Arc<Self>, handles: &Handles, parent: &Arc<Inode>, name: &CStr) -> Result<()> {
        let fd = parent.with_fd(handles, |dir| open_path(dir, name)).map_err(|errno| match errno {
            Errno::NOENT | Errno::NOTDIR => Errno::STALE,
            other => other,
        })?;
        let st = stat(fd.as_fd(), c"")?;
        if identity(&st) != (self.key, self.birth) {
            return Err(Errno::STALE);
        }
        let (found, spare) = handles.place(fd)?;
        {
            let mut place = self.place.write();
            if let Place::Name(..) = *place {
                *place = found;
            }
        }
        if let Some(fd) = spare {
            self.keep(handles, fd, false);
        }
        Ok(())
    }

    /// Holds the file by descriptor, which is `name` in `dir`.
    fn hold(&self, handles: &Handles, dir: BorrowedFd, name: &CStr) -> Result<()> {
        if matches!(*self.place.read_recursive(), Place::Fd(_)) {
            return Ok(());
        }
        let fd = open_path(dir, name)?;
        if !self.is_of(&stat(fd.as_fd(), c"")?) {
            return Err(Errno::STALE);
        }
        handles.fits(fd.as_fd())?;
        // It may be in use by this very request, as in a rename of a directory's entry over the directory, which fails.
        if let Some(mut place) = self.place.try_write() {
            *place = Place::Fd(fd);
        }
        Ok(())
    }

    fn is_lazy(&self) -> bool {
        matches!(*self.place.read_recursive(), Place::Name(..))
    }

    /// The directory and the name of a file that has yet to be opened.
    pub fn lazy(&self) -> Option<(Arc<Inode>, Box<CStr>)> {
        match &*self.place.read_recursive() {
            Place::Name(parent, name) => Some((parent.clone(), name.clone())),
            _ => None,
        }
    }

    pub fn is_lost(&self) -> bool {
        matches!(*self.place.read_recursive(), Place::Lost)
    }

    /// Whether `st` is of this inode's file.
    pub fn is_of(&self, st: &Statx) -> bool {
        let (key, birth) = identity(st);
        self.key == key && self.is(birth)
    }

    /// References that the guest holds.
    pub fn nlookup(&self) -> u64 {
        self.nlookup.load(Ordering::Relaxed)
    }

    /// Notes that a file which has yet to be opened is now found under this name.
    pub fn moved(&self, parent: &Arc<Inode>, name: &CStr) {
        if !self.is_lazy() {
            return;
        }
        if let Place::Name(p, n) = &mut *self.place.write()
            && (p.id != parent.id || **n != *name)
        {
            (*p, *n) = (parent.clone(), name.into());
        }
    }

    /// Whether `st`, which has this inode's key, is of the same file. A descriptor pins its file, so the number can't
    /// have gone to another one; elsewhere the birth must be the same.
    fn is(&self, birth: Birth) -> bool {
        self.birth == birth || matches!(*self.place.read_recursive(), Place::Fd(_))
    }
}

/// All inodes of a session.
///
/// Lock rule: a shard of `by_key` before one of `by_id`; neither is held during a system call.
pub struct Inodes {
    /// Most of them.
    most: usize,
    count: AtomicUsize,
    by_id: DashMap<u64, Arc<Inode>>,
    by_key: DashMap<Key, Arc<Inode>>,
    next_id: AtomicU64,
    /// Whether the session has seen a [`Place::Name`].
    any_lazy: AtomicBool,
    root: Arc<Inode>,
}

impl Inodes {
    /// A table that knows the shared directory alone.
    pub fn new(root: OwnedFd, most: usize) -> Result<Self> {
        let identity = identity(&stat(root.as_fd(), c"")?);
        let root = Arc::new(Inode::new(ROOT_ID, identity, 1, Place::Fd(root)));
        let inodes = Self {
            most,
            count: AtomicUsize::new(0),
            by_id: DashMap::new(),
            by_key: DashMap::new(),
            next_id: AtomicU64::new(ROOT_ID + 1),
            any_lazy: AtomicBool::new(false),
            root,
        };
        inodes.clear();
        Ok(inodes)
    }

    /// Forgets all but the root.
    pub fn clear(&self) {
        self.by_key.clear();
        self.by_id.clear();
        self.any_lazy.store(false, Ordering::Relaxed);
        self.by_key.insert(self.root.key, self.root.clone());
        self.by_id.insert(ROOT_ID, self.root.clone());
        self.count.store(1, Ordering::Relaxed);
    }

    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// To be asked before the guest gets to know another one.
    ///
    /// # Errors
    /// ENFILE where it knows too many.
    pub fn have_room(&self) -> Result<()> {
        if self.len() < self.most {
            return Ok(());
        }
        tracing::warn!("the guest knows {} files and forgets none: more are refused (--max-inodes)", self.most);
        Err(Errno::NFILE)
    }

    /// # Errors
    /// ESTALE for a nodeid that was never given out, or is forgotten.
    pub fn get(&self, id: u64) -> Result<Arc<Inode>> {
        if id == ROOT_ID {
            return Ok(self.root.clone());
        }
        self.by_id.get(&id).map(|inode| inode.clone()).ok_or(Errno::STALE)
    }

    /// The inode of this file if it is known, without another reference for the guest.
    pub fn peek(&self, st: &Statx) -> Option<Arc<Inode>> {
        let (key, birth) = identity(st);
        self.by_key.get(&key).filter(|inode| inode.is(birth)).map(|inode| inode.clone())
    }

    /// The inode of this file if it is known, with one more reference for the guest.
    pub fn known(&self, st: &Statx) -> Option<Arc<Inode>> {
        let (key, birth) = identity(st);
        let inode = self.by_key.get(&key).filter(|inode| inode.is(birth))?;
        inode.nlookup.fetch_add(1, Ordering::Relaxed);
        Some(inode.clone())
    }

    /// As [`known`](Self::known), or a new inode at `place`.
    pub fn learn(&self, st: &Statx, place: Place) -> Arc<Inode> {
        let (key, birth) = identity(st);
        let lazy = matches!(place, Place::Name(..));
        let create = || {
            let id = self.next_id.fetch_add(1, Ordering::Relaxed);
            let inode = Arc::new(Inode::new(id, (key, birth), 1, place));
            self.by_id.insert(id, inode.clone());
            self.count.fetch_add(1, Ordering::Relaxed);
            if lazy {
                self.any_lazy.store(true, Ordering::Relaxed);
            }
            inode
        };
        match self.by_key.entry(key) {
            Entry::Occupied(mut entry) => {
                if entry.get().is(birth) {
                    entry.get().nlookup.fetch_add(1, Ordering::Relaxed);
                    return entry.get().clone();
                }
                // The number has gone to another file. The guest keeps the old nodeid until it forgets it.
                entry.insert(create());
                entry.get().clone()
            }
            Entry::Vacant(entry) => entry.insert(create()).clone(),
        }
    }

    /// All inodes, by nodeid.
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
    /// EEXIST where there is one, ENFILE where there are too many.
    pub fn restore(&self, id: u64, nlookup: u64, st: &Statx, place: Place) -> Result<()> {
        let (key, birth) = identity(st);
        let lazy = matches!(place, Place::Name(..));
        let inode = self.insert(Inode::new(id, (key, birth), nlookup, place))?;
        if lazy {
            self.any_lazy.store(true, Ordering::Relaxed);
        }
        self.by_key.entry(key).or_insert(inode);
        Ok(())
    }

    /// Enters an inode that is lost. `format`: S_IFMT bits.
    ///
    /// # Errors
    /// EEXIST where there is one, ENFILE where there are too many.
    pub fn restore_lost(&self, id: u64, nlookup: u64, format: u32) -> Result<()> {
        // No file has these.
        let key = Key { dev: u64::MAX, ino: id, mount: u64::MAX };
        let birth = Birth { sec: 0, nsec: 0, format };
        self.insert(Inode::new(id, (key, birth), nlookup, Place::Lost)).map(drop)
    }

    fn insert(&self, inode: Inode) -> Result<Arc<Inode>> {
        self.have_room()?;
        match self.by_id.entry(inode.id) {
            Entry::Occupied(_) => Err(Errno::EXIST),
            Entry::Vacant(entry) => {
                self.count.fetch_add(1, Ordering::Relaxed);
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
        let mut last = false;
        let mut drop_references = || {
            let before = inode.nlookup.load(Ordering::Relaxed);
            inode.nlookup.store(before.saturating_sub(nlookup), Ordering::Relaxed);
            last = before > 0 && before <= nlookup;
            last
        };
        match self.by_key.entry(inode.key) {
            Entry::Occupied(entry) if Arc::ptr_eq(entry.get(), &inode) => {
                if drop_references() {
                    entry.remove();
                }
            }
            // Replaced in `by_key`; the entry's lock is held all the same.
            _other => {
                drop_references();
            }
        }
        if last && self.by_id.remove(&id).is_some() {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// To be called before the file `name` in `dir` loses this name. If the guest knows it by READDIRPLUS alone, it is
    /// opened. If this is its last name (`removed`), it is held by descriptor until the guest forgets it: no handle opens
    /// a file without a name, and the guest may still ask for it.
    pub fn pin(&self, handles: &Handles, dir: BorrowedFd, name: &CStr, removed: bool) {
        let unpinned = self.any_lazy.load(Ordering::Relaxed) || removed && handles.in_use();
        if !unpinned {
            return;
        }
        let Ok(st) = stat(dir, name) else { return };
        let Some(inode) = self.peek(&st) else { return };
        // What can't be opened now is stale for the guest later, as it would be without this.
        if removed && (st.stx_nlink <= 1 || inode.format() == libc::S_IFDIR) {
            let _ = inode.hold(handles, dir, name);
        } else {
            drop(inode.found(handles));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_paths() {
        for n in [0, 7, 10, 1234567, i32::MAX] {
            // SAFETY: the number is only printed.
            let path = FdPath::new(unsafe { BorrowedFd::borrow_raw(n) });
            assert_eq!(path.as_cstr().to_str().unwrap(), n.to_string());
        }
    }
}
