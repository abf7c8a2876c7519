//! The guest's memory, and what the device knows of each region of it: the frontend's log of the pages that the device
//! writes (vhost-user, "Migration"), and whether the region is a mapped file.
//!
//! A mapped file stays mapped for as long as somebody has a table with it, and a host process that truncates the file
//! waits for that. So requests, which may take long, have a table without mapped files, and the files that they use.
//!
//! vhost-user-backend has a type for the log, but each access to guest memory through it takes a lock and counts a
//! reference that all queues share. Here an access reads one flag as long as there is no log.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;
use vhost_user_backend::bitmap::{AtomicBitmapMmap, BitmapReplace, MemRegionBitmap, MmapLogReg};
use vm_memory::bitmap::{Bitmap, NewBitmap, RefSlice, WithBitmapSlice};
use vm_memory::{
    Address, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryLoadGuard,
    GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
};

use crate::window::proxy::is_proxy_file;

/// Size in bytes of the pages that the log counts in (VHOST_LOG_PAGE, include/uapi/linux/vhost_types.h).
const PAGE: usize = 4096;

/// A region of guest memory.
pub type Region = GuestRegionMmap<RegionState>;

/// One memory table of the guest.
pub type Memory = GuestMemoryMmap<RegionState>;

/// The guest's memory, whose table the frontend may replace.
pub type GuestMemory = GuestMemoryAtomic<Memory>;

/// The tables of the guest's memory.
#[derive(Clone)]
pub struct Tables {
    /// The frontend's. Whoever may wait must not keep it.
    pub all: GuestMemory,
    /// Without mapped files.
    near: GuestMemory,
}

impl Tables {
    /// Of this memory.
    pub fn new(all: Memory) -> Self {
        let tables = Self { all: GuestMemory::new(all), near: GuestMemory::new(Memory::new()) };
        tables.follow();
        tables
    }

    /// The frontend has replaced its table.
    pub fn follow(&self) {
        let all = self.all.memory();
        let near = all.iter().filter(|region| !is_mapped_file(region)).filter_map(again).collect();
        // It fails if there is no region.
        let near = Memory::from_regions(near).unwrap_or_default();
        let lock = self.near.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        lock.replace(near);
    }

    /// Whether all of the guest's pages have 4 KiB. It does not say. A machine with memory at address 0 is x86; arm64
    /// has devices there.
    pub fn has_small_pages(&self) -> bool {
        self.all.memory().find_region(GuestAddress(0)).is_some()
    }

    /// Keeps what is not a mapped file.
    pub fn keep(&self) -> MemorySnapshot {
        MemorySnapshot { near: self.near.memory(), files: Vec::new() }
    }
}

/// A region once more. It stays mapped as long as any of them.
pub fn again(region: &Region) -> Option<Region> {
    Region::with_arc(region.get_mmap(), region.start_addr())
}

/// Memory that stays mapped: all that is not a mapped file, and the files that one request uses.
#[derive(Clone)]
pub struct MemorySnapshot {
    pub near: GuestMemoryLoadGuard<Memory>,
    /// In the order of their addresses.
    pub files: Vec<Arc<Region>>,
}

/// The state of one memory region. vm-memory keeps it where a region has its dirty bitmap.
#[derive(Clone, Debug, Default)]
pub struct RegionState(Arc<State>);

#[derive(Debug, Default)]
struct State {
    set: AtomicBool,
    pages: RwLock<Option<Pages>>,
    mapped_file: OnceLock<bool>,
}

/// Whether the region is a file that the window has mapped. Pages beyond the end of such a file cannot be touched, only
/// passed to the kernel. The region may hold the data of a READ or WRITE, but no ring and no message.
pub fn is_mapped_file(region: &Region) -> bool {
    // The region's own bitmap() gives a slice.
    let mapping: &MmapRegion<RegionState> = region;
    let is_proxy = || mapping.file_offset().is_some_and(|file| is_proxy_file(file.file()).unwrap_or(true));
    *mapping.bitmap().0.mapped_file.get_or_init(is_proxy)
}

/// The bits of a region's pages in the log.
#[derive(Debug)]
pub struct Pages {
    log: Arc<MmapLogReg>,
    first: usize,
    count: usize,
}

impl MemRegionBitmap for Pages {
    fn new<R: GuestMemoryRegion>(region: &R, log: Arc<MmapLogReg>) -> io::Result<Self> {
        // Fails if the log is too short for the region. After it, no index into the log is out of bounds.
        AtomicBitmapMmap::new(region, log.clone())?;
        let first = region.start_addr().raw_value() as usize / PAGE;
        Ok(Self { log, first, count: region.len() as usize / PAGE })
    }
}

impl Pages {
    fn range(&self, offset: usize, len: usize) -> std::ops::Range<usize> {
        let end = offset.saturating_add(len).div_ceil(PAGE).min(self.count);
        self.first + (offset / PAGE).min(end)..self.first + end
    }
}

impl BitmapReplace for RegionState {
    type InnerBitmap = Pages;

    fn replace(&self, pages: Pages) {
        *self.0.pages.write() = Some(pages);
        self.0.set.store(true, Ordering::Release);
    }
}

impl Bitmap for RegionState {
    fn mark_dirty(&self, offset: usize, len: usize) {
        if len == 0 || !self.0.set.load(Ordering::Acquire) {
            return;
        }
        if let Some(pages) = &*self.0.pages.read() {
            for page in pages.range(offset, len) {
                pages.log[page / 8].fetch_or(1 << (page % 8), Ordering::Relaxed);
            }
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let pages = self.0.pages.read();
        let bit = |pages: &Pages, page: usize| pages.log[page / 8].load(Ordering::Relaxed) & 1 << (page % 8) != 0;
        pages.as_ref().is_some_and(|pages| pages.range(offset, 1).any(|page| bit(pages, page)))
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Self> {
        RefSlice::new(self, offset)
    }
}

impl<'a> WithBitmapSlice<'a> for RegionState {
    type S = RefSlice<'a, Self>;
}

impl NewBitmap for RegionState {
    fn with_len(_len: usize) -> Self {
        Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_with_memory_at_0_has_small_pages() {
        let of = |ranges: &[_]| Tables::new(Memory::from_ranges(ranges).unwrap());
        let (low, high) = ((GuestAddress(0), 4096), (GuestAddress(1 << 30), 4096));
        assert!(of(&[low, high]).has_small_pages());
        assert!(!of(&[high]).has_small_pages());
    }
}
