//! Room on the host's file systems for what the guest stores in place. If a store finds none, the frontend gets SIGBUS,
//! which ends the virtual machine.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use dashmap::DashMap;
use dashmap::mapref::one::RefMut;
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, fstat, fstatfs, seek};
use rustix::io::{Errno, retry_on_intr};

use super::layout::RANGE;
use super::sys;
use crate::fuse::ops::Result;
use crate::record::{self, Cell};

/// Where a file system puts a store to a page that already has blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// In these blocks.
    InPlace,
    /// In these blocks, unless another file shares them.
    Unshared,
    /// In memory. A load from a hole takes memory too.
    Memory,
    /// It may take new blocks each time.
    Elsewhere,
}

impl Stores {
    /// By the f_type of statfs(2). An unknown file system counts as `Elsewhere`.
    pub fn of(file: BorrowedFd) -> Result<Self> {
        Ok(match fstatfs(file)?.f_type {
            // ext2 and ext3 have the same number.
            libc::EXT4_SUPER_MAGIC => Self::InPlace,
            libc::XFS_SUPER_MAGIC => Self::Unshared,
            libc::TMPFS_MAGIC => Self::Memory,
            _ => Self::Elsewhere,
        })
    }

    /// Whether stores can be kept from needing new blocks. `guarded`: nobody makes a file share blocks unnoticed.
    pub const fn in_place(self, guarded: bool) -> bool {
        match self {
            Self::InPlace | Self::Memory => true,
            Self::Unshared => guarded,
            Self::Elsewhere => false,
        }
    }

    /// How many bytes of a file can be allocated in less than a quarter of a second or so: a host process that waits
    /// for another file has half a second left for that. On XFS the blocks may have to be copied, and 100 MB/s is slow.
    /// tmpfs takes 0.5 s for 1 GiB of pages. Elsewhere, only what tells of blocks is written (4 GiB on ext4: 6 ms).
    pub const fn at_once(self) -> u64 {
        match self {
            _ if cfg!(test) => RANGE,
            Self::Unshared => 16 << 20,
            Self::Memory => 256 << 20,
            Self::InPlace | Self::Elsewhere => 4 << 30,
        }
    }

    /// Allocates blocks for a part of a file that it shares with no other file.
    pub fn allocate(self, file: impl AsFd, from: u64, end: u64) -> Result<()> {
        if from >= end {
            return Ok(());
        }
        let mut mode = FallocateFlags::KEEP_SIZE;
        mode.set(FallocateFlags::UNSHARE_RANGE, self == Self::Unshared);
        retry_on_intr(|| fallocate(&file, mode, from, end - from))
    }
}

/// The first byte from `from` on, up to `size`, that has no block.
pub fn hole(file: BorrowedFd, from: u64, size: u64) -> Result<u64> {
    if Stores::of(file)? == Stores::Memory && has_all_pages(file, size) {
        return Ok(size);
    }
    match seek(file, SeekFrom::Hole(from)) {
        Err(Errno::NXIO) => Ok(size),
        found => found,
    }
}

/// Whether a file in memory has a page for each byte up to `size`. If false, it may still have them. lseek(2) looks at
/// each page, which takes 11 ms for 1 GiB.
fn has_all_pages(file: BorrowedFd, size: u64) -> bool {
    // The smallest page. If the host's are larger, the last one may look like one beyond the end.
    const PAGE: u64 = 4096;
    let look = || fstat(file).map(|st| (st.st_blocks, st.st_ctime, st.st_ctime_nsec));
    let before = look();
    let Ok((blocks, ..)) = before else { return false };
    // Pages beyond the end are counted too. fallocate(2) makes such pages, and a truncation in between takes them away.
    blocks as u64 * 512 >= size
        && sys::has_pages(file, size.next_multiple_of(PAGE)).is_ok_and(|more| !more)
        && look() == before
}

/// The ranges that guests may store to, by nodeid. Each has blocks up to the end of its file.
///
/// Anybody may make a file longer by a hole within such a range. The guest stores there only when it knows the new
/// size, and only this daemon tells it, after it has allocated the blocks.
#[derive(Default)]
pub struct Reservations(DashMap<u64, Arc<Reservation>>);

/// Lock rule: `allocating` before `made`. `allocating` is held over system calls on the file; who revokes takes `made`
/// alone.
struct Reservation {
    node: u64,
    file: Arc<OwnedFd>,
    stores: Stores,
    /// Whoever allocates, or learns of blocks that came or went.
    allocating: Mutex<()>,
    made: Mutex<Made>,
}

#[derive(Default)]
struct Made {
    /// Where in the file the ranges begin.
    ranges: BTreeSet<u64>,
    /// All of them have blocks up to here.
    end: u64,
    /// How many calls of [`Reservations::add`] have yet to add their range.
    adding: usize,
    /// What the next worker process finds of `end`.
    cell: Cell,
}

impl Made {
    fn set_end(&mut self, node: u64, end: u64) {
        self.end = end;
        match record::get() {
            Some(record) if self.cell.is_empty() => self.cell = record.room(node, end),
            _ => self.cell.set_number(end),
        }
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        self.cell.free();
    }
}

impl Reservation {
    /// `to`: the file's present or next size in bytes. To be called with `allocating`.
    fn grow(&self, to: u64) -> Result<()> {
        let (ranges, end) = {
            let made = self.made.lock();
            // A process of the host may have made the file shorter.
            let from = made.end.saturating_sub(RANGE).min(to);
            (made.ranges.range(from..to).copied().collect::<Vec<_>>(), made.end)
        };
        for from in ranges.into_iter().filter(|_| to > end) {
            self.stores.allocate(&self.file, from.max(end), to.min(from + RANGE))?;
        }
        self.made.lock().set_end(self.node, end.max(to));
        Ok(())
    }

    /// Allocates the range at `from`, and adds it.
    fn add(&self, from: u64) -> Result<()> {
        let _allocating = self.allocating.lock();
        let size = fstat(&self.file)?.st_size as u64;
        let end = self.made.lock().end.max(size);
        self.stores.allocate(&self.file, from, end.min(from + RANGE))?;
        self.grow(size)?;
        self.made.lock().ranges.insert(from);
        Ok(())
    }
}

impl Reservations {
    /// Allocates the blocks of the range at `from`, now and when its file grows. May wait for the file.
    ///
    /// # Errors
    /// ENOSPC, EDQUOT and other errors of allocation; EOPNOTSUPP if the file system cannot allocate.
    pub fn add(&self, node: u64, file: &Arc<OwnedFd>, stores: Stores, from: u64) -> Result<()> {
        let reservation = {
            let entry = self.entry(node, file, stores);
            entry.made.lock().adding += 1;
            entry.clone()
        };
        let done = reservation.add(from);
        reservation.made.lock().adding -= 1;
        self.drop_empty(node);
        done
    }

    fn entry(&self, node: u64, file: &Arc<OwnedFd>, stores: Stores) -> RefMut<'_, u64, Arc<Reservation>> {
        self.0.entry(node).or_insert_with(|| {
            let (allocating, made) = Default::default();
            Arc::new(Reservation { node, file: file.clone(), stores, allocating, made })
        })
    }

    /// Another process of the daemon has added the range at `from`.
    pub fn add_again(&self, node: u64, file: &Arc<OwnedFd>, stores: Stores, from: u64) {
        self.entry(node, file, stores).made.lock().ranges.insert(from);
    }

    /// All of a node's ranges have blocks up to `end`. Another process has noted that in `cell`.
    pub fn reaches(&self, node: u64, end: u64, cell: Cell) {
        match self.get(node) {
            Some(reservation) => {
                let mut made = reservation.made.lock();
                (made.end, made.cell) = (end, cell);
            }
            None => cell.free(),
        }
    }

    pub fn remove(&self, node: u64, from: u64) {
        let Some(reservation) = self.get(node) else { return };
        reservation.made.lock().ranges.remove(&from);
        self.drop_empty(node);
    }

    fn drop_empty(&self, node: u64) {
        let is_empty = |made: &Made| made.ranges.is_empty() && made.adding == 0;
        self.0.remove_if(&node, |_, reservation| is_empty(&reservation.made.lock()));
    }

    /// Whether the range at `from` has a reservation.
    pub fn has(&self, node: u64, from: u64) -> bool {
        self.get(node).is_some_and(|reservation| reservation.made.lock().ranges.contains(&from))
    }

    fn get(&self, node: u64) -> Option<Arc<Reservation>> {
        self.0.get(&node).map(|reservation| reservation.clone())
    }

    /// Where the file system puts stores to a node's ranges. `None` if it has no range.
    pub fn stores(&self, node: u64) -> Option<Stores> {
        self.get(node).map(|reservation| reservation.stores)
    }

    /// Call this before the guest can know that the file has `to` bytes. May wait for the file.
    ///
    /// # Errors
    /// As [`add`](Self::add). The guest must then not learn of the size.
    pub fn grows(&self, node: u64, to: u64) -> Result<()> {
        let Some(reservation) = self.get(node) else { return Ok(()) };
        if to <= reservation.made.lock().end {
            return Ok(());
        }
        let _allocating = reservation.allocating.lock();
        reservation.grow(to)
    }

    /// The guest has written these bytes by a message, so they have blocks or reserved room. On a full disk, allocating
    /// them again could fail.
    pub fn filled(&self, node: u64, bytes: impl FnOnce() -> std::ops::Range<u64>) {
        let Some(reservation) = self.get(node) else { return };
        let _allocating = reservation.allocating.lock();
        let bytes = bytes();
        let mut made = reservation.made.lock();
        if bytes.start <= made.end && bytes.end > made.end {
            made.set_end(node, bytes.end);
        }
    }

    /// The file was cut off at `to`, and so were its blocks.
    pub fn shrunk(&self, node: u64, to: u64) {
        if let Some(reservation) = self.get(node) {
            let _allocating = reservation.allocating.lock();
            let mut made = reservation.made.lock();
            if to < made.end {
                made.set_end(node, to);
            }
        }
    }
}

/// Whether the range at `from` has one within the file.
pub fn has_hole(file: &OwnedFd, from: u64) -> Result<bool> {
    let end = (fstat(file)?.st_size as u64).min(from + RANGE);
    Ok(from < end && hole(file.as_fd(), from, end)? < end)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    const SIZE: u64 = 64 << 10;

    fn make(dir: &str) -> File {
        let file = tempfile::tempfile_in(dir).unwrap();
        file.write_all_at(&[1; SIZE as usize], 0).unwrap();
        file.sync_all().unwrap();
        file
    }

    fn change(file: &File, mode: FallocateFlags, at: u64, len: u64) {
        fallocate(file, mode, at, len).unwrap();
    }

    fn first_hole(file: &File, size: u64) -> u64 {
        hole(file.as_fd(), 0, size).unwrap()
    }

    #[test]
    fn holes_are_found() {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for dir in ["/dev/shm", "."] {
            let file = make(dir);
            assert_eq!(first_hole(&file, SIZE), SIZE, "{dir}");
            change(&file, punch, 8192, 4096);
            assert_eq!(first_hole(&file, SIZE), 8192, "{dir}");
            // As many blocks as the file has bytes for, but not at the right place.
            change(&file, FallocateFlags::KEEP_SIZE, SIZE, 4096);
            assert_eq!(first_hole(&file, SIZE), 8192, "{dir}");
            file.set_len(2 * SIZE).unwrap();
            file.write_all_at(&[1; 4096], 8192).unwrap();
            assert_eq!(first_hole(&file, 2 * SIZE), SIZE, "{dir}");
            // A file that ends within a page.
            file.set_len(SIZE - 1).unwrap();
            assert_eq!(first_hole(&file, SIZE - 1), SIZE - 1, "{dir}");
        }
    }

    #[test]
    fn a_file_in_memory_is_whole_by_the_number_of_its_pages() {
        let file = make("/dev/shm");
        file.set_len(SIZE + 5000).unwrap();
        assert!(!has_all_pages(file.as_fd(), SIZE + 5000));
        // lseek(2) takes pages that were allocated and not written for a hole.
        change(&file, FallocateFlags::empty(), SIZE, 5000);
        assert!(has_all_pages(file.as_fd(), SIZE + 5000));
        assert_eq!(seek(&file, SeekFrom::Hole(0)).unwrap(), SIZE);
        assert_eq!(first_hole(&file, SIZE + 5000), SIZE + 5000);
        // One page beyond the end.
        change(&file, FallocateFlags::KEEP_SIZE, SIZE + 8192, 1);
        assert!(!has_all_pages(file.as_fd(), SIZE + 5000));
    }
}
