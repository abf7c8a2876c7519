//! Open files and directories by `fh`.

use std::collections::HashSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use rustix::io::Errno;

use super::host::HostFs;
use super::inode::Open;
use super::listing::{DirState, Listings};
use crate::fuse::ops::Result;
use crate::limits::RESTORED_HANDLES;
use crate::record::{self, Cell};

/// Whether a request says that it has no handle: the guest opened the file without a message. No handle has this `fh`.
pub fn is_unopened(fh: u64) -> bool {
    fh == 0
}

/// An open file or directory.
pub struct Handle {
    file: OwnedFd,
    /// The nodeid that it was opened by.
    pub node: u64,
    /// The file system on which it lies.
    pub host: Arc<HostFs>,
    /// Opened for reading, with no other flag. When the guest closes it, the next such open may have it.
    pub plain: bool,
    /// Counts it at its inode, of a file.
    _counted: Option<Open>,
    /// The position of the listing, of a directory.
    dir: Option<Box<Mutex<DirState>>>,
    /// Owners that have asked for POSIX locks through this handle.
    lock_owners: Mutex<HashSet<u64>>,
    /// The last of [`super::inode::Failures`] that it has heard of.
    pub heard: AtomicU32,
    /// The number of the drop that the guest has seen to when it reads by this handle ([`super::contents`]), or 0.
    pub drops: AtomicU32,
    /// What the next worker process finds of it.
    pub cell: Cell,
}

impl Handle {
    pub fn file(file: OwnedFd, node: u64, host: Arc<HostFs>) -> Self {
        let (lock_owners, heard) = (Mutex::default(), AtomicU32::default());
        let (drops, cell) = (AtomicU32::default(), Cell::default());
        Self { file, node, host, plain: false, _counted: None, dir: None, lock_owners, heard, drops, cell }
    }

    pub fn dir(file: OwnedFd, node: u64, host: Arc<HostFs>, listings: &Arc<Listings>) -> Self {
        Self { dir: Some(Box::new(Mutex::new(DirState::new(listings)))), ..Self::file(file, node, host) }
    }

    pub fn counted(self, open: Open) -> Self {
        Self { _counted: Some(open), ..self }
    }

    /// Records it for the next worker process, unless it is recorded already.
    fn record(&self, fh: u64) {
        if let Some(record) = record::get().filter(|_| self.cell.is_empty()) {
            self.cell.set(record.handle(fh, self.node, self.file.as_raw_fd()));
        }
    }

    /// # Errors
    /// ENOTDIR if this is a file.
    pub fn listing(&self) -> Result<MutexGuard<'_, DirState>> {
        Ok(self.dir.as_ref().ok_or(Errno::NOTDIR)?.lock())
    }

    /// Notes an owner whose locks end with this handle.
    pub fn locked_by(&self, owner: u64) {
        self.lock_owners.lock().insert(owner);
    }

    /// The owners whose locks end with this handle. It forgets them.
    pub fn take_lock_owners(&self) -> HashSet<u64> {
        std::mem::take(&mut self.lock_owners.lock())
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub fn into_fd(self) -> OwnedFd {
        self.file
    }
}

/// A slot's handle, and how often the slot was used. An `fh` names one use of one slot.
#[derive(Default)]
struct Slot {
    generation: u32,
    handle: Option<Handle>,
    /// The nodeid of a handle that a migration lost.
    lost: Option<u64>,
}

/// Slots in the first chunk. Each chunk is twice as long as the one before it.
const FIRST_CHUNK: usize = 64;
/// Number of chunks. Together they hold 2^31 handles; a process has at most 2^30 descriptors (fs.nr_open).
const CHUNKS: usize = 25;

/// All handles of a session. Slots never move. So a handle's use does not wait for another's OPEN or RELEASE, and OPEN
/// allocates nothing if there were as many handles before.
///
/// Lock rule: `free` is never held together with a slot's lock. A slot is locked for reading while its handle is in
/// use. The lock is recursive, since one request may use a handle twice.
pub struct Handles {
    chunks: [OnceLock<Box<[RwLock<Slot>]>>; CHUNKS],
    free: Mutex<Free>,
    /// An earlier worker process may have given out generations up to this one.
    generation: AtomicU32,
}

#[derive(Default)]
struct Free {
    slots: Vec<u32>,
    /// Number of slots that were ever used.
    used: u32,
}

/// A handle in use.
pub struct InUse<'a>(RwLockReadGuard<'a, Slot>);

impl std::ops::Deref for InUse<'_> {
    type Target = Handle;

    fn deref(&self) -> &Handle {
        self.0.handle.as_ref().unwrap_or_else(|| unreachable!("only a full slot is in use"))
    }
}

impl Handles {
    pub fn new() -> Self {
        Self { chunks: [const { OnceLock::new() }; CHUNKS], free: Mutex::default(), generation: AtomicU32::new(0) }
    }

    fn slot(&self, index: u32) -> Option<&RwLock<Slot>> {
        let n = index as usize / FIRST_CHUNK + 1;
        let chunk = n.ilog2() as usize;
        let start = ((1 << chunk) - 1) * FIRST_CHUNK;
        self.chunks.get(chunk)?.get()?.get(index as usize - start)
    }

    fn grow(&self, index: u32) -> Result<()> {
        let chunk = (index as usize / FIRST_CHUNK + 1).ilog2() as usize;
        let slots = self.chunks.get(chunk).ok_or(Errno::NFILE)?;
        slots.get_or_init(|| (0..FIRST_CHUNK << chunk).map(|_| RwLock::default()).collect());
        Ok(())
    }

    /// Gives the handle an `fh`.
    ///
    /// # Errors
    /// ENFILE if there are too many.
    pub fn insert(&self, handle: Handle) -> Result<u64> {
        let index = {
            let mut free = self.free.lock();
            match free.slots.pop() {
                Some(index) => index,
                None => {
                    self.grow(free.used)?;
                    free.used += 1;
                    free.used - 1
                }
            }
        };
        let mut slot = self.slot(index).ok_or(Errno::NFILE)?.write();
        // Never 0: then the first slot's `fh` would be that of a request without a handle.
        let least = self.generation.load(Ordering::Relaxed);
        slot.generation = slot.generation.max(least).checked_add(1).unwrap_or(1);
        let fh = u64::from(slot.generation) << 32 | u64::from(index);
        handle.record(fh);
        slot.handle = Some(handle);
        Ok(fh)
    }

    /// The handle `fh` of the inode `node`.
    ///
    /// # Errors
    /// EBADF if there is none, EIO if a migration lost it.
    pub fn get(&self, node: u64, fh: u64) -> Result<InUse<'_>> {
        let slot = self.slot(fh as u32).ok_or(Errno::BADF)?.read_recursive();
        match &slot.handle {
            Some(handle) if handle.node == node && slot.generation == (fh >> 32) as u32 => Ok(InUse(slot)),
            None if slot.lost == Some(node) && slot.generation == (fh >> 32) as u32 => Err(Errno::IO),
            _ => Err(Errno::BADF),
        }
    }

    /// The number of handles.
    pub fn len(&self) -> usize {
        let free = self.free.lock();
        free.used as usize - free.slots.len()
    }

    /// Calls `each` with each `fh`, and with its handle or, if a migration lost it, with its nodeid.
    pub fn for_each(&self, mut each: impl FnMut(u64, std::result::Result<&Handle, u64>)) {
        let used = self.free.lock().used;
        for index in 0..used {
            let Some(slot) = self.slot(index) else { continue };
            let slot = slot.read_recursive();
            let fh = u64::from(slot.generation) << 32 | u64::from(index);
            match (&slot.handle, slot.lost) {
                (Some(handle), _) => each(fh, Ok(handle)),
                (None, Some(node)) => each(fh, Err(node)),
                (None, None) => {}
            }
        }
    }

    /// Enters a handle that another daemon gave this `fh`, or the nodeid of a lost one. There must be no requests
    /// before [`restored`](Self::restored).
    ///
    /// # Errors
    /// EEXIST if its slot is taken, ENFILE if no daemon can have given this `fh`.
    pub fn restore(&self, fh: u64, handle: std::result::Result<Handle, u64>) -> Result<()> {
        let index = fh as u32;
        if index >= RESTORED_HANDLES || is_unopened(fh) {
            return Err(Errno::NFILE);
        }
        self.make_used(index)?;
        let mut slot = self.slot(index).ok_or(Errno::NFILE)?.write();
        if slot.handle.is_some() || slot.lost.is_some() {
            return Err(Errno::EXIST);
        }
        slot.generation = (fh >> 32) as u32;
        match handle {
            Ok(handle) => {
                handle.record(fh);
                slot.handle = Some(handle);
            }
            Err(node) => slot.lost = Some(node),
        }
        Ok(())
    }

    /// Counts the slots up to `index` as used.
    fn make_used(&self, index: u32) -> Result<()> {
        let mut free = self.free.lock();
        while free.used <= index {
            self.grow(free.used)?;
            free.used += 1;
        }
        Ok(())
    }

    /// From now on, generations are above this one. To be called before there are requests.
    pub fn begin_above(&self, generation: u32) {
        self.generation.store(generation, Ordering::Relaxed);
    }

    /// To be called when all handles are restored, before there are requests.
    pub fn restored(&self) {
        let used = self.free.lock().used;
        let is_free = |index: &u32| {
            self.slot(*index).is_some_and(|slot| {
                let slot = slot.read();
                slot.handle.is_none() && slot.lost.is_none()
            })
        };
        let slots = (0..used).filter(is_free).collect();
        self.free.lock().slots = slots;
    }

    /// Removes the handle.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn remove(&self, node: u64, fh: u64) -> Result<Handle> {
        let handle = {
            let mut slot = self.slot(fh as u32).ok_or(Errno::BADF)?.write();
            if slot.generation != (fh >> 32) as u32 {
                return Err(Errno::BADF);
            }
            match slot.lost.take_if(|lost| *lost == node) {
                Some(_) => Err(Errno::IO),
                None => {
                    let handle = slot.handle.take_if(|handle| handle.node == node).ok_or(Errno::BADF)?;
                    handle.cell.free();
                    Ok(handle)
                }
            }
        };
        self.free.lock().slots.push(fh as u32);
        handle
    }

    /// Closes all handles.
    pub fn clear(&self) {
        let used = self.free.lock().used;
        for index in 0..used {
            let Some(slot) = self.slot(index) else { continue };
            let (closed, lost) = {
                let mut slot = slot.write();
                slot.handle.iter().for_each(|handle| handle.cell.free());
                (slot.handle.take(), slot.lost.take())
            };
            if closed.is_some() || lost.is_some() {
                self.free.lock().slots.push(index);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(node: u64) -> Handle {
        Handle::file(std::fs::File::open("/dev/null").unwrap().into(), node, Arc::default())
    }

    #[test]
    fn an_fh_names_one_open() {
        let handles = Handles::new();
        let fhs: Vec<u64> = (0..1000).map(|n| handles.insert(handle(n)).unwrap()).collect();
        for (n, &fh) in fhs.iter().enumerate() {
            assert!(handles.get(n as u64, fh).is_ok());
            assert!(handles.get(n as u64 + 1, fh).is_err());
        }
        handles.remove(5, fhs[5]).unwrap();
        assert!(handles.remove(5, fhs[5]).is_err());
        let again = handles.insert(handle(5)).unwrap();
        assert_ne!(again, fhs[5]);
        assert!(handles.get(5, fhs[5]).is_err());
        assert!(handles.get(5, again).is_ok());
        for bad in [u64::MAX, 0, 1 << 31, 5000] {
            assert!(handles.get(5, bad).is_err());
        }
        handles.clear();
        assert!(handles.get(5, again).is_err());
        assert_eq!(handles.free.lock().slots.len(), 1000);
    }

    #[test]
    fn no_handle_has_the_fh_of_a_request_without_one() {
        let handles = Handles::new();
        assert_eq!(handles.restore(0, Err(5)), Err(Errno::NFILE));
        let first = handles.insert(handle(5)).unwrap();
        assert!(first as u32 == 0 && !is_unopened(first));
        handles.remove(5, first).unwrap();
        // As after 2^32 opens.
        handles.slot(0).unwrap().write().generation = u32::MAX;
        let again = handles.insert(handle(5)).unwrap();
        assert!(again as u32 == 0 && !is_unopened(again));
    }
}
