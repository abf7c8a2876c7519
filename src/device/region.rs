//! What the device knows of each region of guest memory: the frontend's log of the pages that the device writes
//! (vhost-user, "Migration"), and whether the region is a mapped file.
//!
//! vhost-user-backend has a type for the log, but each access to guest memory through it takes a lock and counts a
//! reference that all queues share. Here an access reads one flag as long as there is no log.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;
use rustix::fs::fstatfs;
use vhost_user_backend::bitmap::{AtomicBitmapMmap, BitmapReplace, MemRegionBitmap, MmapLogReg};
use vm_memory::bitmap::{Bitmap, NewBitmap, RefSlice, WithBitmapSlice};
use vm_memory::{
    Address, GuestMemoryAtomic, GuestMemoryLoadGuard, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
};

/// Size in bytes of the pages that the log counts in (VHOST_LOG_PAGE, include/uapi/linux/vhost_types.h).
const PAGE: usize = 4096;

/// One memory table of the guest.
pub type Memory = GuestMemoryMmap<RegionState>;

/// The guest's memory, whose table the frontend may replace.
pub type GuestMemory = GuestMemoryAtomic<Memory>;

/// A memory table that stays mapped.
pub type LoadedMemory = GuestMemoryLoadGuard<Memory>;

/// The state of one memory region. vm-memory keeps it where a region has its dirty bitmap.
#[derive(Clone, Debug, Default)]
pub struct RegionState(Arc<State>);

#[derive(Debug, Default)]
struct State {
    set: AtomicBool,
    pages: RwLock<Option<Pages>>,
    mapped_file: OnceLock<bool>,
}

/// f_type of a FUSE mount (FUSE_SUPER_MAGIC of include/uapi/linux/magic.h).
const FUSE: i64 = 0x6573_5546;

/// Whether the region is a file that the window has mapped. Pages beyond the end of such a file cannot be touched, only
/// passed to the kernel. The region may hold the data of a READ or WRITE, but no ring and no message.
pub fn is_mapped_file(region: &GuestRegionMmap<RegionState>) -> bool {
    // The region's own bitmap() gives a slice.
    let mapping: &MmapRegion<RegionState> = region;
    *mapping.bitmap().0.mapped_file.get_or_init(|| {
        // The proxy does not answer fstatfs(2).
        mapping.file_offset().is_some_and(|file| fstatfs(file.file()).map_or(true, |st| st.f_type == FUSE))
    })
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
