//! A file that the guest knows, and how the daemon gets at it.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use rustix::fs::{OFlags, RawDir, Statx, fcntl_setfl};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, getrlimit};

use super::config::FileHandles;
use super::contents::Contents;
use super::fd::{is_named, open_path, reopen, stat};
use super::fd_cache::{FdCache, FdHolder, GivenUp};
use super::file_handle::{FileHandle, Mounts, keeps_name};
use super::key::Key;
use super::listing::{DirState, Listings};
use super::{cred, sys};
use crate::fuse::ops::Result;
use crate::limits;
use crate::record::{self, Cell, FoundSize};
use crate::watch::FileId;

/// Bytes of a directory that are read at a time to find a name: some 1,000 entries, as glibc reads them.
const LISTING: usize = 32 << 10;

/// Sweeps for which a descriptor stays after a write: seconds. Linux writes back what is 30 s old, and looks for that
/// every 5 s.
const UNSYNCED: u8 = 40;

/// How to get at an inode's file.
pub enum Place {
    /// An O_PATH descriptor.
    Fd(OwnedFd),
    Handle(FileHandle),
    /// Only READDIRPLUS has named it: it is opened when it is first needed.
    Name(Arc<Inode>, Box<CStr>),
    /// A migration lost it: every request for it gets EIO.
    Lost,
    /// It was removed, and nobody has it open. Its attributes when it was closed.
    Removed(Box<Statx>),
}

impl Place {
    fn recorded(&self) -> record::Place<'_> {
        match self {
            Self::Fd(fd) => record::Place::Fd(fd.as_raw_fd()),
            Self::Handle(handle) => handle.recorded(),
            Self::Name(parent, name) => record::Place::Name { parent: parent.id, name },
            Self::Lost => record::Place::Lost,
            Self::Removed(_) => record::Place::Removed,
        }
    }
}

/// A file that the guest knows.
pub struct Inode {
    pub id: u64,
    pub key: Key,
    /// The nodeid of the directory that the file was found in last, or 0.
    parent: AtomicU64,
    /// References that the guest holds. It becomes 0, and rises from 0, only while the table of inodes has its key
    /// locked.
    nlookup: AtomicU64,
    told_size: ToldSize,
    /// What the daemon knows of the guest's pages.
    pub contents: Contents,
    /// Failures to write what the guest stored in place.
    pub failures: Failures,
    /// Who has heard of them, where requests have no handle.
    pub hearers: Hearers,
    /// Sweeps for which the spare descriptor stays: it hears whether what was written without a handle fails.
    unsynced: AtomicU8,
    /// Locked for reading while the file is in use. A rename within one directory uses it twice, so the lock is
    /// recursive. Locked for writing when it changes, with no other lock held.
    place: RwLock<Place>,
    /// Another descriptor, for as long as it is used. Locked as `place` is, and after it. Nothing waits to lock it for
    /// writing.
    spare: RwLock<Option<Spare>>,
    /// It was used since the last sweep.
    used: AtomicBool,
    /// Somebody had it open for writing when the guest opened it last. Not all writes cause an event.
    written: AtomicBool,
    /// Whether names of this directory are the same in upper and lower case.
    pub folds: Folds,
    /// It has no name left. Who closes it last lets go of it.
    removed: AtomicBool,
    /// Handles that the guest has, or is about to get.
    opens: AtomicU32,
    /// The sweep knows of it. Changes while `spare` is locked for writing.
    swept: AtomicBool,
    /// What the next worker process finds of it. A change of `place` is recorded before the old one is dropped.
    pub cell: Cell,
}

/// The size that the guest was told last, in bytes. With a window it is recorded for the next worker process: pages of
/// a file that the host has cut off must not be mapped while the guest believes in them. So is the last failure.
#[derive(Default)]
struct ToldSize {
    size: AtomicU64,
    cell: Cell,
}

impl Drop for ToldSize {
    fn drop(&mut self) {
        self.cell.free();
    }
}

/// The last failure to write to a file, and a count of them. Each open hears of a failure once. The kernel does the
/// same for its own files (errseq_t).
#[derive(Default)]
pub struct Failures(AtomicU32);

impl Failures {
    /// Bits of an errno (MAX_ERRNO of include/linux/err.h).
    const ERRNO: u32 = 0xfff;

    pub fn add(&self, errno: Errno) {
        let next = |now: u32| (now & !Self::ERRNO).wrapping_add(Self::ERRNO + 1) | errno.raw_os_error() as u32;
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| Some(next(now)));
    }

    /// What a file that is opened now counts as having heard of.
    pub fn heard(&self) -> AtomicU32 {
        AtomicU32::new(self.0.load(Ordering::Acquire))
    }

    /// Gives an open the last failure that it has not heard of.
    ///
    /// # Errors
    /// The failure's.
    pub fn tell(&self, heard: &AtomicU32) -> Result<()> {
        let now = self.0.load(Ordering::Acquire);
        match heard.swap(now, Ordering::AcqRel) == now {
            true => Ok(()),
            false => Err(Errno::from_raw_os_error((now & Self::ERRNO) as i32)),
        }
    }
}

/// Whether names of a directory are the same in upper and lower case, once it was asked for.
#[derive(Default)]
pub struct Folds(AtomicU8);

impl Folds {
    /// What was found.
    pub fn get(&self) -> Option<bool> {
        match self.0.load(Ordering::Relaxed) {
            0 => None,
            known => Some(known == 2),
        }
    }

    pub fn set(&self, folds: Option<bool>) {
        self.0.store(folds.map_or(0, |folds| 1 + u8::from(folds)), Ordering::Relaxed);
    }
}

/// Threads of the guest that wrote to one file. More write to few files, and the first ones then count as strangers.
const WRITERS: usize = 16;

/// Who has heard of [`Failures`], where the guest opens files without a message. A thread of the guest that writes is
/// taken for an open file. Threads that wrote nothing hear of a failure together once, if nobody has heard of it.
#[derive(Default)]
pub struct Hearers {
    /// The last failure that anybody has heard of.
    any: AtomicU32,
    /// The thread that wrote last, which is among the writers.
    last: AtomicU32,
    /// Threads that wrote, and the last failure that each has heard of.
    writers: Mutex<Vec<(u32, AtomicU32)>>,
}

impl Hearers {
    /// A thread writes.
    pub fn wrote(&self, pid: u32, failures: &Failures) {
        if self.last.load(Ordering::Relaxed) == pid {
            return;
        }
        let mut writers = self.writers.lock();
        if writers.iter().all(|(writer, _)| *writer != pid) {
            if writers.len() == WRITERS {
                writers.remove(0);
            }
            writers.push((pid, failures.heard()));
        }
        self.last.store(pid, Ordering::Relaxed);
    }

    /// Gives a thread the last failure that it has not heard of.
    ///
    /// # Errors
    /// The failure's.
    pub fn tell(&self, pid: u32, failures: &Failures) -> Result<()> {
        let writers = self.writers.lock();
        let writer = writers.iter().find(|(writer, _)| *writer == pid);
        let told = failures.tell(writer.map_or(&self.any, |(_, heard)| heard));
        if told.is_err() {
            self.any.store(failures.heard().into_inner(), Ordering::Release);
        }
        told
    }
}

/// A descriptor that is kept.
pub struct Spare {
    fd: OwnedFd,
    /// How it is open: O_PATH, or an access mode with some of [`Spare::SPECIAL`].
    flags: OFlags,
    /// It is known that the file [is named](is_named). The kernel keeps the name in its memory as long as this is open.
    named: AtomicBool,
    /// Its position, if it is a directory that can be listed.
    listing: Option<Box<Mutex<DirState>>>,
}

impl Spare {
    /// Flags without which a descriptor does not serve a request that asks for them, and the other way around.
    pub const SPECIAL: OFlags = OFlags::DIRECT.union(OFlags::NOATIME);

    fn new(fd: OwnedFd, flags: OFlags, named: bool) -> Self {
        Self { fd, flags, named: named.into(), listing: None }
    }

    /// A file that is open with these flags.
    pub fn file(fd: OwnedFd, flags: OFlags) -> Self {
        // What the guest may write to was opened when it was named.
        let named = flags & OFlags::ACCMODE != OFlags::RDONLY;
        Self::new(fd, flags & (OFlags::ACCMODE | Self::SPECIAL), named)
    }

    /// A directory that is open for reading.
    pub fn dir(fd: OwnedFd, listings: &Arc<Listings>) -> Self {
        let listing = Some(Box::new(Mutex::new(DirState::new(listings))));
        Self { listing, ..Self::new(fd, OFlags::RDONLY, false) }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// # Errors
    /// ENOTDIR if this is a file.
    pub fn listing(&self) -> Result<MutexGuard<'_, DirState>> {
        Ok(self.listing.as_ref().ok_or(Errno::NOTDIR)?.lock())
    }

    /// Whether it can be written to.
    pub fn is_writable(&self) -> bool {
        self.flags & OFlags::ACCMODE != OFlags::RDONLY && !self.flags.contains(OFlags::PATH)
    }

    /// Whether it does what a descriptor with these flags does.
    fn serves(&self, want: OFlags) -> bool {
        let (has, wanted) = (self.flags & OFlags::ACCMODE, want & OFlags::ACCMODE);
        !self.flags.contains(OFlags::PATH)
            && (has == wanted || has == OFlags::RDWR)
            && (self.flags ^ want).intersection(Self::SPECIAL).is_empty()
    }

    /// Kinds of access that it allows.
    fn rank(&self) -> u8 {
        match self.flags & (OFlags::ACCMODE | OFlags::PATH) {
            OFlags::RDWR => 2,
            OFlags::RDONLY | OFlags::WRONLY => 1,
            _ => 0,
        }
    }

    fn is_named(&self) -> bool {
        let named = self.named.load(Ordering::Relaxed) || is_named(self.fd());
        self.named.store(named, Ordering::Relaxed);
        named
    }

    fn replaces(&self, old: &Spare) -> bool {
        // A writable one is named.
        if self.named.load(Ordering::Relaxed) && !old.named.load(Ordering::Relaxed) && old.listing.is_none() {
            return true;
        }
        self.rank() > old.rank() || self.rank() == old.rank() && self.flags != old.flags
    }
}

/// What serves a request without a handle.
pub enum Lent<'a> {
    /// The inode's spare descriptor. It is not closed meanwhile.
    Spare(RwLockReadGuard<'a, Option<Spare>>),
    /// A descriptor for this request alone.
    Own(Spare),
}

impl std::ops::Deref for Lent<'_> {
    type Target = Spare;

    fn deref(&self) -> &Spare {
        match self {
            Self::Spare(spare) => spare.as_ref().unwrap_or_else(|| unreachable!("only a spare that is there is lent")),
            Self::Own(spare) => spare,
        }
    }
}

impl Inode {
    pub fn new(id: u64, key: Key, nlookup: u64, place: Place) -> Self {
        Self {
            id,
            key,
            parent: AtomicU64::new(0),
            nlookup: AtomicU64::new(nlookup),
            told_size: ToldSize::default(),
            contents: Contents::default(),
            failures: Failures::default(),
            hearers: Hearers::default(),
            unsynced: AtomicU8::new(0),
            place: RwLock::new(place),
            spare: RwLock::new(None),
            used: AtomicBool::new(false),
            written: AtomicBool::new(false),
            folds: Folds::default(),
            removed: AtomicBool::new(false),
            opens: AtomicU32::new(0),
            swept: AtomicBool::new(false),
            cell: Cell::default(),
        }
    }

    /// Records it for the next worker process, unless it is recorded already.
    pub fn record(&self) {
        if let Some(record) = record::get().filter(|_| self.cell.is_empty()) {
            let place = self.place.read_recursive();
            self.cell.set(record.inode(self.id, self.nlookup(), self.format(), &place.recorded()));
            record.gave_id(self.id);
        }
    }

    /// The size that the guest was told last, in bytes.
    pub fn told_size(&self) -> u64 {
        self.told_size.size.load(Ordering::Relaxed)
    }

    /// Notes that the guest is told this size. `recorded`: for the next worker process, too.
    pub fn tell_size(&self, size: u64, recorded: bool) {
        let told = self.told_size.size.swap(size, Ordering::Relaxed);
        let cell = &self.told_size.cell;
        match record::get().filter(|_| recorded && (told != size || cell.is_empty())) {
            Some(record) if cell.is_empty() => cell.set_first(record.told(self.id, size)),
            Some(_) => cell.set_number(size),
            None => {}
        }
    }

    /// Another process has told the guest this size.
    pub fn told_before(&self, found: FoundSize) {
        self.told_size.size.store(found.size, Ordering::Relaxed);
        self.told_size.cell.set(found.cell);
        if found.failure != 0 {
            self.failures.add(Errno::from_raw_os_error(found.failure));
        }
    }

    /// What the guest stored in place could not be written. The next worker process tells it too, if no open of the
    /// file has heard of it until then.
    pub fn failed(&self, errno: Errno) {
        self.failures.add(errno);
        if let Some(record) = record::get().filter(|_| self.told_size.cell.is_empty()) {
            self.told_size.cell.set_first(record.told(self.id, self.told_size()));
        }
        self.told_size.cell.set_failure(errno.raw_os_error());
    }

    /// An open of the file has heard of the last failure.
    pub fn heard_of_failure(&self) {
        self.told_size.cell.set_failure(0);
    }

    /// Whether somebody had it open for writing when the guest opened it last.
    pub fn has_writers(&self) -> bool {
        self.written.load(Ordering::Relaxed)
    }

    /// Notes whether somebody has it open for writing now. Whether that was known.
    pub fn note_writers(&self, has: bool) -> bool {
        self.written.swap(has, Ordering::Relaxed) == has
    }

    /// The file's type, S_IFMT bits.
    pub fn format(&self) -> u32 {
        self.key.format()
    }

    /// Runs `f` with an O_PATH descriptor of the file.
    ///
    /// # Errors
    /// ESTALE if the file is gone, EIO if a migration lost it.
    pub fn with_fd<R>(self: &Arc<Self>, places: &Places, f: impl FnOnce(BorrowedFd) -> Result<R>) -> Result<R> {
        match &*self.found(places)? {
            Place::Fd(fd) => f(fd.as_fd()),
            Place::Handle(handle) => {
                self.used.store(true, Ordering::Relaxed);
                if let Some(spare) = &*self.spare.read_recursive() {
                    return f(spare.fd.as_fd());
                }
                let fd = handle.open(OFlags::PATH)?;
                let result = f(fd.as_fd());
                self.keep(places, Spare::new(fd, OFlags::PATH, false));
                result
            }
            Place::Name(..) => Err(Errno::STALE),
            Place::Lost => Err(Errno::IO),
            Place::Removed(_) => Err(Errno::STALE),
        }
    }

    /// The file's attributes, also after its end. Tries not to open a file that only READDIRPLUS has named.
    ///
    /// # Errors
    /// As [`with_fd`](Self::with_fd).
    pub fn stat(self: &Arc<Self>, places: &Places) -> Result<Statx> {
        if let Some((parent, name)) = self.lazy() {
            let there = parent.with_fd(places, |dir| {
                let st = stat(dir, &name)?;
                Ok(self.key.is_of(dir, &name, &st).then_some(st))
            });
            if let Ok(Some(st)) = there {
                return Ok(st);
            }
        }
        self.last().map_or_else(|| self.with_fd(places, |fd| stat(fd, c"")), Ok)
    }

    /// The attributes that the file had last, if it was removed and nobody has it open.
    pub fn last(&self) -> Option<Statx> {
        match &*self.place.read_recursive() {
            Place::Removed(last) => Some(**last),
            _ => None,
        }
    }

    /// Opens the file again, without waiting.
    ///
    /// # Errors
    /// EAGAIN if a process holds a lease on the file. The kernel has told it to give the lease back.
    pub fn open(self: &Arc<Self>, places: &Places, flags: OFlags) -> Result<OwnedFd> {
        if flags.contains(OFlags::DIRECTORY) {
            return self.open_waiting(places, flags);
        }
        let file = self.open_waiting(places, flags | OFlags::NONBLOCK)?;
        // Without O_NONBLOCK: io_uring would not wait for the file's data.
        fcntl_setfl(&file, flags & (OFlags::DIRECT | OFlags::NOATIME))?;
        Ok(file)
    }

    /// As [`open`](Self::open), but waits for a lease to end: up to fs.lease-break-time, by default 45 s.
    pub fn open_waiting(self: &Arc<Self>, places: &Places, flags: OFlags) -> Result<OwnedFd> {
        match &*self.found(places)? {
            Place::Fd(fd) => reopen(fd.as_fd(), flags),
            // Faster than through a spare descriptor, which needs a path in /proc.
            Place::Handle(handle) => handle.open(flags),
            Place::Name(..) | Place::Removed(_) => Err(Errno::STALE),
            Place::Lost => Err(Errno::IO),
        }
    }

    /// Keeps a descriptor of its file, if there is room: one that was open for reading.
    pub fn keep_readable(self: &Arc<Self>, places: &Places, fd: OwnedFd) {
        self.keep(places, Spare::new(fd, OFlags::RDONLY, false));
    }

    /// Keeps an O_PATH descriptor that was opened by the file's name, if there is room.
    pub fn keep_named(self: &Arc<Self>, places: &Places, fd: OwnedFd) {
        self.keep(places, Spare::new(fd, OFlags::PATH, true));
    }

    fn keep(self: &Arc<Self>, places: &Places, spare: Spare) {
        if matches!(&*self.place.read_recursive(), Place::Handle(handle) if handle.keeps_name()) {
            return;
        }
        drop(self.put(places, spare));
    }

    /// Notes the directory that it was found in.
    pub fn found_in(&self, parent: u64) {
        self.parent.store(parent, Ordering::Relaxed);
        self.cell.set_parent(parent);
    }

    /// To be called before the file is changed. While the result is there, the file [is named](is_named), so that all
    /// who watch its directory are told. `get`: the inode of a nodeid.
    pub fn named(self: &Arc<Self>, places: &Places, get: impl FnOnce(u64) -> Option<Arc<Inode>>) -> Option<Lent<'_>> {
        if self.format() == libc::S_IFDIR {
            return None;
        }
        let mut fd = match &*self.found(places).ok()? {
            Place::Handle(handle) if !handle.keeps_name() => {
                let spare = self.spare.read_recursive();
                if spare.as_ref().is_some_and(Spare::is_named) {
                    self.used.store(true, Ordering::Relaxed);
                    return Some(Lent::Spare(spare));
                }
                handle.open(OFlags::PATH).ok()?
            }
            // Opened by name.
            _ => return None,
        };
        if !is_named(fd.as_fd()) {
            let parent = get(self.parent.load(Ordering::Relaxed))?;
            // From now on, its handle opens the file by this name.
            fd = self.find_name(places, &parent).ok()??;
        }
        Some(self.lend(places, Spare::new(fd, OFlags::PATH, true)))
    }

    /// An O_PATH descriptor of the file by its name in this directory, which is read for that.
    fn find_name(&self, places: &Places, parent: &Arc<Inode>) -> Result<Option<OwnedFd>> {
        let dir = parent.open(places, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut buffer = Vec::with_capacity(LISTING);
        let mut entries = RawDir::new(&dir, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry?;
            if entry.ino() != self.key.ino {
                continue;
            }
            if let Ok(fd) = open_path(dir.as_fd(), entry.file_name()) {
                if self.is_at(fd.as_fd())? {
                    return Ok(Some(fd));
                }
            }
        }
        Ok(None)
    }

    /// Makes `spare` the inode's spare descriptor. Gives it back if there is a better one or no room.
    fn put(
        self: &Arc<Self>,
        places: &Places,
        spare: Spare,
    ) -> std::result::Result<RwLockWriteGuard<'_, Option<Spare>>, Spare> {
        let Some(mut kept) = self.spare.try_write() else { return Err(spare) };
        let unheld = self.removed.load(Ordering::SeqCst) && self.opens.load(Ordering::SeqCst) == 0;
        if unheld || kept.as_ref().is_some_and(|old| !spare.replaces(old)) {
            return Err(spare);
        }
        if !self.swept.load(Ordering::Relaxed) {
            if !places.kept.add(self) {
                return Err(spare);
            }
            self.swept.store(true, Ordering::Relaxed);
        }
        self.used.store(true, Ordering::Relaxed);
        *kept = Some(spare);
        Ok(kept)
    }

    /// The spare descriptor, if it does what one with these flags does.
    pub fn spare(&self, want: OFlags) -> Option<Lent<'_>> {
        let spare = self.spare.read_recursive();
        if !spare.as_ref().is_some_and(|spare| spare.serves(want)) {
            return None;
        }
        self.used.store(true, Ordering::Relaxed);
        Some(Lent::Spare(spare))
    }

    /// Whether the spare descriptor can be written to.
    pub fn has_writable(&self) -> bool {
        self.spare.read_recursive().as_ref().is_some_and(Spare::is_writable)
    }

    /// Lends out `spare`. If it can, it keeps it.
    pub fn lend(self: &Arc<Self>, places: &Places, spare: Spare) -> Lent<'_> {
        match self.put(places, spare) {
            Ok(kept) => Lent::Spare(RwLockWriteGuard::downgrade(kept)),
            Err(spare) => Lent::Own(spare),
        }
    }

    /// Something is written to it without a handle.
    pub fn writes(&self) {
        self.unsynced.store(UNSYNCED, Ordering::Relaxed);
    }

    /// All that was written is on the disk, or the guest has heard that it is not.
    pub fn synced(&self) {
        self.unsynced.store(0, Ordering::Relaxed);
    }

    /// Whether the spare descriptor stays for what is not synced. From now on it is one for reading, as nobody keeps
    /// the host from executing the file.
    fn stays(&self) -> bool {
        let next = |left: u8| left.checked_sub(1);
        if self.unsynced.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_err() {
            return false;
        }
        let reader = match &*self.spare.read_recursive() {
            Some(spare) if spare.flags.contains(OFlags::PATH) => return false,
            // The space of a removed file is to be free.
            Some(spare) if stat(spare.fd(), c"").is_ok_and(|st| st.stx_nlink == 0) => return false,
            Some(spare) if spare.is_writable() => reopen(spare.fd(), OFlags::RDONLY | OFlags::NONBLOCK).ok(),
            Some(_) => None,
            None => return false,
        };
        if let (Some(reader), Some(mut spare)) = (reader, self.spare.try_write()) {
            spare.replace(Spare::new(reader, OFlags::RDONLY, true));
        }
        true
    }

    /// Gives away the spare descriptor if it is open for reading and nothing else.
    pub fn take_readable(&self) -> Option<OwnedFd> {
        let spare = self.spare.try_write()?.take_if(|spare| spare.flags == OFlags::RDONLY)?;
        Some(spare.fd)
    }

    /// Opens a file that only READDIRPLUS has named. What fails now makes it stale later.
    pub fn settle(self: &Arc<Self>, places: &Places) {
        drop(self.found(places));
    }

    /// The place, which is no [`Place::Name`].
    fn found(self: &Arc<Self>, places: &Places) -> Result<RwLockReadGuard<'_, Place>> {
        let place = self.place.read_recursive();
        let Place::Name(parent, name) = &*place else { return Ok(place) };
        let (parent, name) = (parent.clone(), name.clone());
        drop(place);
        self.find(places, &parent, &name)?;
        Ok(self.place.read_recursive())
    }

    fn find(self: &Arc<Self>, places: &Places, parent: &Arc<Inode>, name: &CStr) -> Result<()> {
        let fd = parent.with_fd(places, |dir| open_path(dir, name)).map_err(|errno| match errno {
            Errno::NOENT | Errno::NOTDIR => Errno::STALE,
            other => other,
        })?;
        if !self.is_at(fd.as_fd())? {
            return Err(Errno::STALE);
        }
        let (found, spare) = places.place(fd)?;
        {
            let mut place = self.place.write();
            if let Place::Name(..) = *place {
                self.cell.set_place(&found.recorded());
                *place = found;
            }
        }
        if let Some(fd) = spare {
            self.keep_named(places, fd);
        }
        Ok(())
    }

    /// Holds the file, which is `name` in `dir` and is about to be removed, by descriptor. With `if_harmless`, not if
    /// that [`keeps_name`].
    ///
    /// # Errors
    /// ESTALE if it is another file, ENFILE if there are too many descriptors.
    pub fn hold(self: &Arc<Self>, places: &Places, dir: BorrowedFd, name: &CStr, if_harmless: bool) -> Result<()> {
        let is_lazy = match &*self.place.read_recursive() {
            Place::Fd(_) => return Ok(()),
            Place::Handle(handle) if if_harmless && handle.keeps_name() => return Ok(()),
            place => matches!(place, Place::Name(..)),
        };
        let fd = open_path(dir, name)?;
        if !self.is_at(fd.as_fd())? {
            return Err(Errno::STALE);
        }
        if is_lazy && if_harmless && keeps_name(fd.as_fd()) {
            self.settle(places);
            return Ok(());
        }
        let fd = places.fit(fd)?;
        // This very request may be using a directory: a rename of a directory's entry over the directory, which will
        // fail. Another request may be opening a file, which must not be lost.
        let place = if self.format() == libc::S_IFDIR { self.place.try_write() } else { Some(self.place.write()) };
        if let Some(mut place) = place {
            let fd = Place::Fd(fd);
            self.cell.set_place(&fd.recorded());
            *place = fd;
        }
        Ok(())
    }

    /// The attributes of the file, which was [held](Self::hold), if it has no name left. It may have got another one
    /// meanwhile.
    pub fn nameless(&self) -> Option<Statx> {
        let Place::Fd(fd) = &*self.place.read_recursive() else { return None };
        stat(fd.as_fd(), c"").ok().filter(|st| st.stx_nlink == 0)
    }

    /// From now on, the file is held only as long as it is open. `last`: its attributes.
    pub fn remove(&self, last: Statx) {
        self.removed.store(true, Ordering::SeqCst);
        if self.opens.load(Ordering::SeqCst) == 0 {
            self.let_go(Some(last));
        }
    }

    /// Closes a removed file, whose space is free then. Not while a request uses it: it goes when the guest forgets it.
    /// `last`: its attributes, if they are known.
    fn let_go(&self, last: Option<Statx>) {
        let place = self.place.try_write().and_then(|mut place| {
            let Place::Fd(fd) = &*place else { return None };
            let last = last.or_else(|| stat(fd.as_fd(), c"").ok())?;
            self.cell.set_place(&record::Place::Removed);
            Some(std::mem::replace(&mut *place, Place::Removed(Box::new(last))))
        });
        let spare = self.spare.try_write().map(|mut spare| spare.take());
        // Closed without a lock, which may take long.
        drop((place, spare));
    }

    /// Counts a handle, until the result is dropped. To be called before the file is opened.
    pub fn count_open(self: &Arc<Self>) -> Open {
        self.opens.fetch_add(1, Ordering::SeqCst);
        Open(self.clone())
    }

    /// How the daemon gets at its file now.
    pub fn place(&self) -> RwLockReadGuard<'_, Place> {
        self.place.read_recursive()
    }

    /// Calls `f` with the spare descriptor, if there is one.
    pub fn with_spare<R>(&self, f: impl FnOnce(BorrowedFd) -> R) -> Option<R> {
        self.spare.read_recursive().as_ref().map(|spare| f(spare.fd()))
    }

    /// Whether only READDIRPLUS has named it, and nothing has used it.
    pub fn is_lazy(&self) -> bool {
        matches!(*self.place.read_recursive(), Place::Name(..))
    }

    /// The directory and the name of a file that only READDIRPLUS has named.
    pub fn lazy(&self) -> Option<(Arc<Inode>, Box<CStr>)> {
        match &*self.place.read_recursive() {
            Place::Name(parent, name) => Some((parent.clone(), name.clone())),
            _ => None,
        }
    }

    /// By what the watch knows the file, if that takes no system call for a name.
    pub fn file_id(&self) -> Option<FileId> {
        match &*self.place.read_recursive() {
            Place::Fd(fd) => sys::file_id(fd.as_fd(), c"").ok(),
            Place::Handle(handle) => handle.file_id(),
            Place::Name(..) | Place::Lost | Place::Removed(_) => None,
        }
    }

    pub fn is_lost(&self) -> bool {
        matches!(*self.place.read_recursive(), Place::Lost)
    }

    /// Whether `fd` is a descriptor of this inode's file.
    pub fn is_at(&self, fd: BorrowedFd) -> Result<bool> {
        Ok(self.key.is_of(fd, c"", &stat(fd, c"")?))
    }

    /// References that the guest holds.
    pub fn nlookup(&self) -> u64 {
        self.nlookup.load(Ordering::Relaxed)
    }

    /// Counts one more reference. Returns how many there were.
    pub fn reference(&self) -> u64 {
        let before = self.nlookup.fetch_add(1, Ordering::Relaxed);
        self.cell.set_references(before + 1);
        before
    }

    /// Takes references back. Whether these were the last.
    pub fn drop_references(&self, count: u64) -> bool {
        let before = self.nlookup();
        if self.cell.was_forgotten() {
            return before == 0;
        }
        let left = before.saturating_sub(count);
        self.nlookup.store(left, Ordering::Relaxed);
        self.cell.set_forgotten(left);
        before > 0 && before <= count
    }

    /// Notes another name of a file that only READDIRPLUS has named.
    pub fn moved(&self, parent: &Arc<Inode>, name: &CStr) {
        if !self.is_lazy() {
            return;
        }
        if let Place::Name(p, n) = &mut *self.place.write() {
            if p.id != parent.id || **n != *name {
                self.cell.set_place(&record::Place::Name { parent: parent.id, name });
                (*p, *n) = (parent.clone(), name.into());
            }
        }
    }
}

/// A handle of an inode.
pub struct Open(Arc<Inode>);

impl Drop for Open {
    fn drop(&mut self) {
        if self.0.opens.fetch_sub(1, Ordering::SeqCst) == 1 && self.0.removed.load(Ordering::SeqCst) {
            self.0.let_go(None);
        }
    }
}

impl FdHolder for Inode {
    type Spare = Spare;

    fn give_up(&self, sweeps: bool) -> GivenUp<Spare> {
        if self.used.swap(false, Ordering::Relaxed) || sweeps && self.stays() {
            return GivenUp::Used;
        }
        // A locked one is in use.
        let Some(mut spare) = self.spare.try_write() else { return GivenUp::Used };
        self.swept.store(false, Ordering::Relaxed);
        GivenUp::Gone(spare.take())
    }
}

/// How inodes are held, and the descriptors for that.
pub struct Places {
    mode: FileHandles,
    pub kept: Arc<FdCache<Inode>>,
    mounts: Mounts,
    /// The first descriptor that the guest cannot have.
    end: RawFd,
    /// How many the process may have.
    limit: u64,
    /// The log says that they are used up.
    said_full: AtomicBool,
}

impl Drop for Places {
    fn drop(&mut self) {
        self.kept.end();
    }
}

impl Places {
    /// `proc_self_fd`: /proc/self/fd.
    pub fn new(mode: FileHandles, mounts: Mounts, proc_self_fd: Arc<OwnedFd>) -> Self {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let end = limit - limits::OWN_DESCRIPTORS.min(limit / 4);
        let end = RawFd::try_from(end).unwrap_or(RawFd::MAX);
        let kept = FdCache::start(move || cred::enter_thread(proc_self_fd.as_fd()));
        Self { mode, kept, mounts, end, limit, said_full: AtomicBool::new(false) }
    }

    /// To be asked before a descriptor stays open for the guest. The kernel gives out the lowest free number, so the
    /// number says how many are open. Descriptors that are only kept give way. Returns the descriptor, which may have
    /// another number.
    ///
    /// # Errors
    /// ENFILE if only the daemon's own share of the descriptors is left.
    pub fn fit(&self, mut fd: OwnedFd) -> Result<OwnedFd> {
        while fd.as_raw_fd() >= self.end {
            if !self.kept.evict() {
                limits::Limit::Descriptors.reached();
                self.say_full();
                return Err(Errno::NFILE);
            }
            // The number that is free now.
            fd = fcntl_dupfd_cloexec(&fd, 0)?;
        }
        Ok(fd)
    }

    /// Once, since a guest may come back to the limit at any time.
    fn say_full(&self) {
        if !self.said_full.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "no descriptor is left for the guest: {} of {} are in use, and the daemon keeps the rest for itself; a \
                 file that the guest has open takes one and, without file handles, each that it knows \
                 (--rlimit-nofile)",
                self.end,
                self.limit
            );
        }
    }

    /// Whether inodes are held by handle.
    pub fn use_handles(&self) -> bool {
        self.mode != FileHandles::Never
    }

    /// How to hold the file of this O_PATH descriptor, which comes back if it is not needed for that.
    ///
    /// # Errors
    /// Those of name_to_handle_at(2), with `--inode-file-handles=mandatory`; ENFILE if there are too many descriptors.
    pub fn place(&self, fd: OwnedFd) -> Result<(Place, Option<OwnedFd>)> {
        if let Some(handle) = self.handle(fd.as_fd())? {
            return Ok((Place::Handle(handle), Some(fd)));
        }
        Ok((Place::Fd(self.fit(fd)?), None))
    }

    /// A handle that an earlier worker process had.
    ///
    /// # Errors
    /// EBADF if the descriptor of its mount is gone.
    pub fn handle_again(&self, mount: RawFd, kind: i32, data: Box<[u8]>) -> Result<FileHandle> {
        self.mounts.handle_again(mount, sys::RawHandle { kind, data })
    }

    /// How to hold a file that is open for I/O.
    ///
    /// # Errors
    /// As [`place`](Self::place).
    pub fn place_open(&self, fd: BorrowedFd) -> Result<Place> {
        match self.handle(fd)? {
            Some(handle) => Ok(Place::Handle(handle)),
            None => self.place_pinned(fd),
        }
    }

    /// Holds a file that is open for I/O by descriptor.
    ///
    /// # Errors
    /// ENFILE if there are too many descriptors.
    pub fn place_pinned(&self, fd: BorrowedFd) -> Result<Place> {
        Ok(Place::Fd(self.fit(reopen(fd, OFlags::PATH)?)?))
    }

    fn handle(&self, fd: BorrowedFd) -> Result<Option<FileHandle>> {
        match self.mode {
            FileHandles::Never => Ok(None),
            FileHandles::Prefer => Ok(self.mounts.handle(fd).ok()),
            FileHandles::Mandatory => self.mounts.handle(fd).map(Some),
        }
    }
}
