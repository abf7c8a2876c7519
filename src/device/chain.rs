//! Descriptor chains (VIRTIO 1.3, section 2.7.5): from guest memory to slices. The guest wrote them and is not trusted.
//! Each descriptor is read once, its bounds are checked, and the walk ends whatever the links say.

use std::sync::Arc;

use rustix::io::Errno;
use virtio_queue::desc::split::Descriptor;
use vm_memory::bitmap::Bitmap;
use vm_memory::{
    Address, Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryError, GuestMemoryLoadGuard,
    GuestMemoryRegion, MemoryRegionAddress,
};
use zerocopy::IntoBytes;

use super::region::{Memory, MemorySnapshot, Region, Tables, again, is_mapped_file};
use crate::fuse::Work;
use crate::fuse::abi::{InHeader, OutHeader};
use crate::fuse::buf::IoVecs;
use crate::fuse::ops::Result;
use crate::limits::CHAIN_DESCRIPTORS;

/// Size of a descriptor in memory, in bytes (section 2.7.5).
const DESCRIPTOR_SIZE: u32 = 16;

/// A device-writable range of guest memory.
#[derive(Clone, Copy)]
pub struct Segment {
    pub addr: GuestAddress,
    pub len: u32,
}

/// A queue's descriptor table: guest address and length in descriptors.
#[derive(Clone, Copy)]
pub struct Table {
    pub addr: GuestAddress,
    pub len: u16,
}

/// A chain that goes back to the driver.
#[derive(Clone, Copy)]
pub struct Used {
    pub head: u16,
    /// Bytes written.
    pub len: u32,
}

impl Used {
    pub fn new(head: u16, written: usize) -> Self {
        Self { head, len: u32::try_from(written).unwrap_or(u32::MAX) }
    }
}

/// A [`Work`] with the slices of a chain, while the memory under them is sure to stay mapped.
pub struct Loaded<'a> {
    pub work: &'a mut Work,
    pub snapshot: &'a MemorySnapshot,
}

impl Drop for Loaded<'_> {
    fn drop(&mut self) {
        self.work.readable.clear();
        self.work.writable.clear();
    }
}

impl Loaded<'_> {
    /// Answers the request with an errno instead of serving it. Returns the length of the reply: 0 if the request has
    /// no header or no room for the answer.
    pub fn refuse(&mut self, errno: Errno) -> usize {
        let mut request = InHeader::default();
        let fits = self.work.writable.len() >= size_of::<OutHeader>();
        if !fits || self.work.readable.read_at(0, request.as_mut_bytes()) < size_of::<InHeader>() {
            return 0;
        }
        let reply =
            OutHeader { len: size_of::<OutHeader>() as u32, error: -errno.raw_os_error(), unique: request.unique };
        self.work.writable.write_at(0, reply.as_bytes())
    }
}

/// Puts the slices of the chain that starts at `head` into `work` and its writable ranges into `segments`.
///
/// The second result is the errno of a chain that must be refused: EFAULT if a descriptor or its buffer is not in guest
/// memory, EINVAL if the chain breaks the rules. `work` has the slices before the fault, and the room for an answer.
/// `kept` has the mapped files among its buffers then, and no others.
pub fn load<'a>(
    mem: &Tables,
    snapshot: &'a mut MemorySnapshot,
    table: Table,
    head: u16,
    work: &'a mut Work,
    segments: &mut Vec<Segment>,
) -> (Loaded<'a>, Result<()>) {
    segments.clear();
    snapshot.files.clear();
    let mut buffers = Buffers { near: &snapshot.near, files: &mut snapshot.files, mem, all: None };
    let fault = gather(&mut Walk::new(&snapshot.near, table, head), &mut buffers, work, segments);
    (Loaded { work, snapshot }, fault)
}

/// Where a chain's buffers may be. Keeps each mapped file in which one is.
struct Buffers<'a> {
    near: &'a Memory,
    files: &'a mut Vec<Arc<Region>>,
    mem: &'a Tables,
    /// The frontend's table, once it was needed.
    all: Option<GuestMemoryLoadGuard<Memory>>,
}

impl Find for &mut Buffers<'_> {
    fn find(&mut self, addr: GuestAddress) -> Option<(&Region, MemoryRegionAddress)> {
        if let Some(found) = self.near.to_region_addr(addr) {
            return Some(found);
        }
        let (region, at) = self.all.get_or_insert_with(|| self.mem.all.memory()).to_region_addr(addr)?;
        let file = match self.files.binary_search_by_key(&region.start_addr(), |file| file.start_addr()) {
            Ok(file) => file,
            Err(file) => {
                self.files.insert(file, Arc::new(again(region)?));
                file
            }
        };
        Some((self.files.get(file)?, at))
    }
}

fn gather(walk: &mut Walk, mem: &mut Buffers, work: &mut Work, segments: &mut Vec<Segment>) -> Result<()> {
    let mut fault = Ok(());
    while let Some(desc) = walk.next().map_err(|errno| fault.err().unwrap_or(errno))? {
        let (addr, len) = (desc.addr(), desc.len());
        if desc.is_write_only() {
            if len > 0 {
                push(mem, addr, len, &mut work.writable)?;
                segments.push(Segment { addr, len });
            }
        } else if !segments.is_empty() {
            fault = fault.and(Err(Errno::INVAL));
        } else if fault.is_ok() {
            // After a fault the walk goes on: the room for the answer comes last.
            fault = push(mem, addr, len, &mut work.readable);
        }
    }
    fault
}

fn push(mem: &mut Buffers, addr: GuestAddress, len: u32, to: &mut IoVecs) -> Result<()> {
    each_slice(mem, addr, len as usize, |region, offset, len| {
        let base = region.get_host_address(MemoryRegionAddress(offset)).map_err(|_| Errno::FAULT)?;
        let near = !is_mapped_file(region);
        // SAFETY: `each_slice` keeps the range within the region, which `MemorySnapshot` keeps mapped. `Loaded` borrows
        // that and empties the list before the borrow ends. A mapped file may have been cut, so its region is not
        // `near`.
        unsafe { to.push(base, len, near) };
        Ok(())
    })
}

/// Memory of the guest.
trait Find {
    /// The region that has an address, and where in it that is.
    fn find(&mut self, addr: GuestAddress) -> Option<(&Region, MemoryRegionAddress)>;
}

impl Find for &Memory {
    fn find(&mut self, addr: GuestAddress) -> Option<(&Region, MemoryRegionAddress)> {
        self.to_region_addr(addr)
    }
}

impl Find for &MemorySnapshot {
    fn find(&mut self, addr: GuestAddress) -> Option<(&Region, MemoryRegionAddress)> {
        let of_file = |file: &'_ Arc<Region>| file.to_region_addr(addr);
        let file = || self.files.iter().find_map(|file| Some((&**file, of_file(file)?)));
        self.near.to_region_addr(addr).or_else(file)
    }
}

/// Calls `each` for each region that a range of guest memory touches: with the region, and the part's offset and length
/// in it.
fn each_slice(
    mut mem: impl Find,
    addr: GuestAddress,
    len: usize,
    mut each: impl FnMut(&Region, u64, usize) -> Result<()>,
) -> Result<()> {
    let (mut addr, mut left) = (addr, len);
    while left > 0 {
        let (region, at) = mem.find(addr).ok_or(Errno::FAULT)?;
        let room = usize::try_from(region.len() - at.raw_value()).unwrap_or(usize::MAX);
        let n = room.min(left);
        each(region, at.raw_value(), n)?;
        left -= n;
        if left > 0 {
            addr = addr.checked_add(n as u64).ok_or(Errno::FAULT)?;
        }
    }
    Ok(())
}

/// Copies a reply into a chain's writable ranges, and marks those dirty. Returns how many bytes had room.
pub fn write(mem: &Memory, segments: &[Segment], reply: &[u8]) -> std::result::Result<usize, GuestMemoryError> {
    let mut done = 0;
    for segment in segments {
        let n = (reply.len() - done).min(segment.len as usize);
        each_slice(mem, segment.addr, n, near).or(Err(GuestMemoryError::InvalidGuestAddress(segment.addr)))?;
        mem.write_slice(&reply[done..done + n], segment.addr)?;
        done += n;
    }
    Ok(done)
}

/// The ranges that hold the first `len` bytes.
pub fn first(segments: &[Segment], len: usize) -> &[Segment] {
    let mut room = 0;
    let enough = |segment: &Segment| {
        room += segment.len as usize;
        room >= len
    };
    let end = segments.iter().position(enough).map_or(segments.len(), |last| last + 1);
    &segments[..end]
}

/// Whether all these bytes are in memory that is not a mapped file.
pub fn is_near(mem: &Memory, addr: GuestAddress, len: usize) -> bool {
    each_slice(mem, addr, len, near).is_ok()
}

fn near(region: &Region, _offset: u64, _len: usize) -> Result<()> {
    if is_mapped_file(region) { Err(Errno::FAULT) } else { Ok(()) }
}

/// Marks the first `len` bytes of the writable ranges as written in the frontend's log of dirty pages.
pub fn mark_dirty(mem: &MemorySnapshot, segments: &[Segment], mut len: usize) {
    for segment in segments {
        let n = len.min(segment.len as usize);
        // A range that has left guest memory needs no log.
        let _ = each_slice(mem, segment.addr, n, |region, offset, n| {
            region.bitmap().mark_dirty(offset as usize, n);
            Ok(())
        });
        len -= n;
    }
}

/// Walks a chain's links.
struct Walk<'a> {
    mem: &'a Memory,
    table: GuestAddress,
    len: u32,
    next: Option<u32>,
    left: u32,
    indirect: bool,
}

impl<'a> Walk<'a> {
    fn new(mem: &'a Memory, table: Table, head: u16) -> Self {
        let (len, next) = (table.len.into(), Some(head.into()));
        Walk { mem, table: table.addr, len, next, left: CHAIN_DESCRIPTORS, indirect: false }
    }

    fn next(&mut self) -> Result<Option<Descriptor>> {
        let Some(index) = self.next else { return Ok(None) };
        let desc = self.fetch(index)?;
        if desc.refers_to_indirect_table() {
            self.enter(desc)?;
            return self.next();
        }
        self.next = desc.has_next().then_some(desc.next().into());
        Ok(Some(desc))
    }

    fn fetch(&mut self, index: u32) -> Result<Descriptor> {
        self.left = self.left.checked_sub(1).ok_or(Errno::INVAL)?;
        if index >= self.len {
            return Err(Errno::INVAL);
        }
        let offset = u64::from(index) * u64::from(DESCRIPTOR_SIZE);
        let addr = self.table.checked_add(offset).ok_or(Errno::FAULT)?;
        each_slice(self.mem, addr, DESCRIPTOR_SIZE as usize, near)?;
        self.mem.read_obj(addr).map_err(|_| Errno::FAULT)
    }

    /// Goes on in an indirect table, which ends the chain: section 2.7.5.3.1 forbids a link after it and a table in it.
    fn enter(&mut self, desc: Descriptor) -> Result<()> {
        let whole = desc.len() > 0 && desc.len() % DESCRIPTOR_SIZE == 0;
        if self.indirect || !whole || desc.has_next() {
            return Err(Errno::INVAL);
        }
        self.indirect = true;
        self.table = desc.addr();
        self.len = desc.len() / DESCRIPTOR_SIZE;
        self.next = Some(0);
        Ok(())
    }
}
