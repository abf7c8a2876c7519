//! What is looked up in the file of an entry, or allocated there. It may wait for the file as long as others like, so
//! all of it takes a [`MayWait`]: nobody who revokes can call it.

use std::os::fd::BorrowedFd;

use parking_lot::MutexGuard;
use rustix::fs::{Stat, fstat};
use rustix::io::Errno;

use super::Writable;
use super::core::Core;
use super::entry::{Entry, Filled};
use crate::fuse::ops::Result;
use crate::window::reservation::{Stores, hole};
use crate::window::sys;
use crate::window::turn::MayWait;

/// The right to look at an entry's file and to note what is there. There is one for each entry, so that the last thread
/// that looks writes last. It is held over system calls on the file. Only who has it changes an entry's size, holes,
/// blocks and limits.
pub struct Look<'a> {
    core: &'a Core,
    index: u32,
    life: u64,
    _held: MutexGuard<'a, ()>,
}

impl Look<'_> {
    /// The entry's index, and which of all entries this is.
    pub const fn entry(&self) -> (u32, u64) {
        (self.index, self.life)
    }

    /// [`Core::update`] of the entry.
    ///
    /// # Errors
    /// ESTALE if the entry is another node's by now, or another session's.
    pub fn update<R>(&self, change: impl FnOnce(&mut Entry) -> R) -> Result<R> {
        let updated = self.core.update(self.index, |entry| (entry.life() == self.life).then(|| change(entry)));
        updated.flatten().ok_or(Errno::STALE)
    }

    /// Notes what a look has found. `hole`: the first hole, if it was looked for.
    pub fn note(self, st: &Stat, hole: Option<u64>) {
        self.settle(|entry| {
            hole.into_iter().for_each(|hole| entry.hole = hole);
            entry.note(st.st_size as u64, st.st_blocks as u64);
        });
    }

    /// Changes the entry, and tells the mapper what follows from it.
    pub fn settle(self, change: impl FnOnce(&mut Entry)) {
        let job = self.update(|entry| {
            change(entry);
            entry.settle()
        });
        let (core, index) = (self.core, self.index);
        drop(self);
        job.ok().flatten().into_iter().for_each(|job| core.send(job, index));
    }
}

/// An entry, and how many holes its file had got by then.
pub struct Holes {
    index: u32,
    life: u64,
    holes: u64,
}

impl Core {
    /// Waits until nobody else looks at the file of an entry.
    pub fn look(&self, index: u32, _: &MayWait) -> Look<'_> {
        let held = self.looks[index as usize % self.looks.len()].lock();
        // No entry has the number 0.
        Look { core: self, index, life: self.get(index, Entry::life).unwrap_or(0), _held: held }
    }

    /// The right to look at a node's file, if it has an entry.
    pub fn look_at(&self, node: u64, wait: &MayWait) -> Option<Look<'_>> {
        let look = self.look(self.index(node)?, wait);
        // While this waited, the entry may have become another node's.
        (look.update(|entry| entry.node()) == Ok(node)).then_some(look)
    }

    /// Makes an entry with a slot live. `filled`: the file had no hole then; the entry counts those that it got since.
    /// `stores`: only if the guest may store to it.
    ///
    /// # Errors
    /// EOPNOTSUPP if it may not, or if a load from a hole would take memory, which may be short; EAGAIN if there is no
    /// slot; EBUSY while the guest is about to move to another daemon.
    pub fn live(
        &self,
        index: u32,
        file: BorrowedFd,
        filled: Option<Filled>,
        stores: bool,
        wait: &MayWait,
    ) -> Result<()> {
        let look = self.look(index, wait);
        let st = fstat(file)?;
        let size = st.st_size as u64;
        let hole = self.hole(file, 0, size, wait)?;
        if stores && hole < size {
            return Err(Errno::OPNOTSUPP);
        }
        let takes_memory = hole < size && Stores::of(file)? == Stores::Memory;
        look.update(|entry| {
            let hole = match filled {
                _ if !takes_memory => hole,
                // Pages that were allocated and not written look like holes.
                Some(filled) if filled.holes == entry.holes && filled.size >= size => filled.size,
                _ => return Err(Errno::OPNOTSUPP),
            };
            if self.is_leaving() {
                return Err(Errno::BUSY);
            }
            entry.map()?;
            entry.hole = hole;
            entry.note(size, st.st_blocks as u64);
            entry.settle();
            Ok(())
        })?
    }

    /// Allocates the holes of a file in memory, so that no load from them can fail for want of memory. The result is
    /// for [`live`](Self::live). Of a long file it does a part, for the reason given at
    /// [`allocate`](Self::allocate).
    ///
    /// # Errors
    /// EAGAIN if there is more to do; ENOSPC.
    pub fn fill(&self, index: u32, file: BorrowedFd, wait: &MayWait) -> Result<Filled> {
        let look = self.look(index, wait);
        let (st, stores) = (fstat(file)?, Stores::of(file)?);
        let size = st.st_size as u64;
        let (holes, from) = look.update(|entry| {
            let Filled { holes, size, blocks } = entry.filled;
            // Others may have taken blocks away since the last part.
            let is_known = holes == entry.holes && blocks <= st.st_blocks as u64;
            (entry.holes, if is_known { size } else { 0 })
        })?;
        if stores == Stores::Memory {
            let from = hole(file, from.min(size), size)?;
            let end = size.min(from.saturating_add(stores.at_once()));
            stores.allocate(file, from, end)?;
            let blocks = fstat(file)?.st_blocks as u64;
            look.update(|entry| entry.filled = Filled { holes, size: end, blocks })?;
            if end < size {
                return Err(Errno::AGAIN);
            }
        }
        Ok(Filled { holes, size, blocks: 0 })
    }

    /// Allocates the file's holes, and blocks of its own where it shares some, so that no store to it can fail for want
    /// of space. The entry has one flag for the whole file, so a part would not do. Of a long file it does a part, and
    /// the guest asks again: other files must not wait for a worker.
    ///
    /// # Errors
    /// ENOSPC; EIO.
    pub fn allocate(&self, index: u32, file: BorrowedFd, wait: &MayWait) -> Result<()> {
        let Some((since, first)) = self.get(index, |entry| (Holes::of(index, entry), entry.hole)) else {
            return Ok(());
        };
        let (size, stores) = (fstat(file)?.st_size as u64, Stores::of(file)?);
        let from = first.min(size);
        let end = size.min(from.saturating_add(stores.at_once()));
        stores.allocate(file, from, end).map_err(|errno| match errno {
            Errno::NOSPC | Errno::DQUOT => Errno::NOSPC,
            _ => Errno::IO,
        })?;
        self.allocated(&since, file, from, (end - from).max(1), wait);
        Ok(())
    }

    /// `len` bytes of an entry's file from `at` on now have blocks, unless somebody has punched a hole since `since`.
    pub fn allocated(&self, since: &Holes, file: BorrowedFd, at: u64, len: u64, wait: &MayWait) {
        let look = self.look(since.index, wait);
        let Ok(st) = fstat(file) else { return };
        if look.life != since.life {
            return;
        }
        let (size, end) = (st.st_size as u64, at.saturating_add(len));
        let hole = look.update(|entry| {
            entry.skips_to(at);
            (entry.holes == since.holes).then_some(entry.hole)
        });
        let covered = hole.ok().flatten().filter(|hole| (at..end).contains(hole));
        let next = covered.map(|hole| {
            let done = end.min(size);
            // An allocation without FALLOC_FL_UNSHARE_RANGE leaves blocks shared.
            let own = match (self.settings.writable, Stores::of(file)) {
                (Writable::InPlace, Ok(Stores::Unshared)) => first_shared(file, hole, done),
                _ => done,
            };
            if own < done { own } else { self.hole(file, done, size, wait).unwrap_or(hole) }
        });
        look.note(&st, next);
    }

    /// Others have changed the file of an entry: its size may be another, and there may be holes.
    pub fn changed(&self, index: u32, file: BorrowedFd, wait: &MayWait) {
        let look = self.look(index, wait);
        let Ok(st) = fstat(file) else { return };
        let Ok(old) = look.update(|entry| entry.record().size) else { return };
        let size = st.st_size as u64;
        let found = self.beyond(Some(file), old, size, wait);
        // Allocated blocks that nobody has written look like a hole. The guest then only has to look again. On XFS
        // the guard reports by itself who comes to share blocks.
        let in_place = self.settings.writable == Writable::InPlace;
        let hole = if in_place { hole(file, 0, size).unwrap_or(0) } else { u64::MAX };
        look.settle(|entry| {
            if !entry.state().is_mapped() {
                return;
            }
            if entry.limits.is_empty() {
                entry.resized(size, found);
            }
            if hole < entry.hole.min(size) {
                entry.skipped(hole);
            }
            entry.blocks = st.st_blocks as u64;
        });
    }

    /// The first hole of a file between its `old` end and its new one.
    pub fn beyond(&self, file: Option<BorrowedFd>, old: u64, size: u64, wait: &MayWait) -> u64 {
        match file {
            Some(file) if size > old => self.hole(file, old, size, wait).unwrap_or(old),
            _ => old,
        }
    }

    /// The first byte between `from` and `size` for which a store may have to find room.
    pub fn hole(&self, file: BorrowedFd, from: u64, size: u64, _: &MayWait) -> Result<u64> {
        if self.settings.writable == Writable::Always {
            return Ok(u64::MAX);
        }
        match Stores::of(file)? {
            Stores::InPlace | Stores::Memory => hole(file, from, size),
            Stores::Unshared => Ok(hole(file, from, size)?.min(first_shared(file, from, size))),
            Stores::Elsewhere => Ok(from),
        }
    }

    /// Whether the guest may ever store to a file of its file system in place. `guarded`: nobody makes it share blocks
    /// unnoticed.
    pub fn permits(&self, file: BorrowedFd, guarded: bool, _: &MayWait) -> Result<bool> {
        Ok(self.settings.writable == Writable::Always || Stores::of(file)?.in_place(guarded))
    }

    /// Whether the guest may store to the file in place, as far as a quick look tells. [`live`](Self::live) decides.
    pub fn seems_whole(&self, file: BorrowedFd, wait: &MayWait) -> Result<bool> {
        let st = fstat(file)?;
        let size = st.st_size as u64;
        if self.settings.writable == Writable::InPlace && Stores::of(file)? == Stores::Memory {
            // Enough to find most files with holes. To find the hole may take lseek(2) 11 ms for 1 GiB.
            return Ok((st.st_blocks as u64).saturating_mul(512) >= size);
        }
        Ok(self.permits(file, true, wait)? && self.hole(file, 0, size, wait)? >= size)
    }
}

impl Holes {
    pub const fn of(index: u32, entry: &Entry) -> Self {
        Self { index, life: entry.life(), holes: entry.holes }
    }
}

/// The first byte in `from..end` that another file may share. `end` if there is none.
fn first_shared(file: BorrowedFd, from: u64, end: u64) -> u64 {
    sys::shared(file, from, end).unwrap_or(from)
}
