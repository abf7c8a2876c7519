//! Descriptor chains (VIRTIO 1.3, section 2.7.5): from guest memory to slices. The guest wrote all of it, so nothing is
//! believed: each descriptor is read once, its bounds are checked, and the walk ends whatever the links say.

use virtio_queue::desc::split::Descriptor;
use vm_memory::bitmap::Bitmap;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion};
use zerocopy::IntoBytes;

use super::region::is_mapped_file;
use super::{LoadedMemory, Memory};
use crate::fuse::Work;
use crate::fuse::abi::{InHeader, OutHeader};
use crate::fuse::buf::IoVecs;
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

/// A [`Work`] that holds the slices of a chain for as long as the memory under them is sure to be mapped.
pub struct Loaded<'a> {
    pub work: &'a mut Work,
    _mem: &'a LoadedMemory,
}

impl Drop for Loaded<'_> {
    fn drop(&mut self) {
        self.work.readable.clear();
        self.work.writable.clear();
    }
}

impl Loaded<'_> {
    /// Answers the request with an errno, without its being served. Returns the length of the reply: 0 if the
    /// request's header or room for the answer is missing.
    pub fn refuse(&mut self, errno: i32) -> usize {
        let mut request = InHeader::default();
        let fits = self.work.writable.len() >= size_of::<OutHeader>();
        if !fits || self.work.readable.read_at(0, request.as_mut_bytes()) < size_of::<InHeader>() {
            return 0;
        }
        let reply = OutHeader { len: size_of::<OutHeader>() as u32, error: -errno, unique: request.unique };
        self.work.writable.write_at(0, reply.as_bytes())
    }
}

/// Puts the slices of the chain that starts at `head` into `work` and its writable ranges into `segments`.
///
/// The errno of a chain that must be refused: EFAULT if a descriptor or its buffer is not in guest memory, EINVAL if the chain
/// breaks the rules. What precedes the fault is there even so, as far as it serves to answer the request.
pub fn load<'a>(
    mem: &'a LoadedMemory,
    table: Table,
    head: u16,
    work: &'a mut Work,
    segments: &mut Vec<Segment>,
) -> (Loaded<'a>, Result<(), i32>) {
    segments.clear();
    let loaded = Loaded { work, _mem: mem };
    let mut walk = Walk::new(mem, table, head);
    let fault = gather(&mut walk, mem, loaded.work, segments);
    (loaded, fault)
}

fn gather(walk: &mut Walk, mem: &Memory, work: &mut Work, segments: &mut Vec<Segment>) -> Result<(), i32> {
    let mut fault = Ok(());
    while let Some(desc) = walk.next().map_err(|errno| fault.err().unwrap_or(errno))? {
        let (addr, len) = (desc.addr(), desc.len());
        if desc.is_write_only() {
            if len > 0 {
                push(mem, addr, len, &mut work.writable)?;
                segments.push(Segment { addr, len });
            }
        } else if !segments.is_empty() {
            fault = fault.and(Err(libc::EINVAL));
        } else if fault.is_ok() {
            // On a fault the walk goes on: room for the answer comes after what cannot be read.
            fault = push(mem, addr, len, &mut work.readable);
        }
    }
    fault
}

fn push(mem: &Memory, addr: GuestAddress, len: u32, to: &mut IoVecs) -> Result<(), i32> {
    each_slice(mem, addr, len as usize, |region, offset, len| {
        let base = region.get_host_address(vm_memory::MemoryRegionAddress(offset)).map_err(|_| libc::EFAULT)?;
        let near = !is_mapped_file(region);
        // SAFETY: `each_slice` keeps the range within the region, which `mem` keeps mapped; `Loaded` borrows
        // `mem` and empties the list before that borrow ends. A file that is mapped may have been cut: `near`.
        unsafe { to.push(base, len, near) };
        Ok(())
    })
}

type Region = <Memory as GuestMemoryBackend>::R;

/// Calls `each` with the region, the offset therein and the length of each part of a range of guest memory.
fn each_slice(
    mem: &Memory,
    addr: GuestAddress,
    len: usize,
    mut each: impl FnMut(&Region, u64, usize) -> Result<(), i32>,
) -> Result<(), i32> {
    let (mut addr, mut left) = (addr, len);
    while left > 0 {
        let (region, at) = mem.to_region_addr(addr).ok_or(libc::EFAULT)?;
        let room = usize::try_from(region.len() - at.raw_value()).unwrap_or(usize::MAX);
        let n = room.min(left);
        each(region, at.raw_value(), n)?;
        left -= n;
        if left > 0 {
            addr = addr.checked_add(n as u64).ok_or(libc::EFAULT)?;
        }
    }
    Ok(())
}

/// Copies a reply into a chain's writable ranges and returns how many bytes had room. Marks them dirty.
pub fn write(mem: &Memory, segments: &[Segment], reply: &[u8]) -> Result<usize, GuestMemoryError> {
    let mut done = 0;
    for segment in segments {
        let n = (reply.len() - done).min(segment.len as usize);
        each_slice(mem, segment.addr, n, near).or(Err(GuestMemoryError::InvalidGuestAddress(segment.addr)))?;
        mem.write_slice(&reply[done..done + n], segment.addr)?;
        done += n;
    }
    Ok(done)
}

/// The ranges that have the first `len` bytes.
pub fn first(segments: &[Segment], len: usize) -> &[Segment] {
    let mut room = 0;
    let enough = |segment: &Segment| {
        room += segment.len as usize;
        room >= len
    };
    let end = segments.iter().position(enough).map_or(segments.len(), |last| last + 1);
    &segments[..end]
}

/// Whether none of these bytes is of a mapped file.
pub fn is_near(mem: &Memory, addr: GuestAddress, len: usize) -> bool {
    each_slice(mem, addr, len, near).is_ok()
}

fn near(region: &Region, _offset: u64, _len: usize) -> Result<(), i32> {
    if is_mapped_file(region) { Err(libc::EFAULT) } else { Ok(()) }
}

/// Records that the first `len` bytes of the writable ranges were written, for the frontend's log of dirty pages.
pub fn mark_dirty(mem: &Memory, segments: &[Segment], mut len: usize) {
    for segment in segments {
        let n = len.min(segment.len as usize);
        // A range that is not in memory any more has nothing to log.
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

    fn next(&mut self) -> Result<Option<Descriptor>, i32> {
        let Some(index) = self.next else { return Ok(None) };
        let desc = self.fetch(index)?;
        if desc.refers_to_indirect_table() {
            self.enter(desc)?;
            return self.next();
        }
        self.next = desc.has_next().then_some(desc.next().into());
        Ok(Some(desc))
    }

    fn fetch(&mut self, index: u32) -> Result<Descriptor, i32> {
        self.left = self.left.checked_sub(1).ok_or(libc::EINVAL)?;
        if index >= self.len {
            return Err(libc::EINVAL);
        }
        let offset = u64::from(index) * u64::from(DESCRIPTOR_SIZE);
        let addr = self.table.checked_add(offset).ok_or(libc::EFAULT)?;
        each_slice(self.mem, addr, DESCRIPTOR_SIZE as usize, near)?;
        self.mem.read_obj(addr).map_err(|_| libc::EFAULT)
    }

    /// Goes on in an indirect table, which ends the chain: section 2.7.5.3.1 forbids a link after it and a table in it.
    fn enter(&mut self, desc: Descriptor) -> Result<(), i32> {
        let whole = desc.len() > 0 && desc.len() % DESCRIPTOR_SIZE == 0;
        if self.indirect || !whole || desc.has_next() {
            return Err(libc::EINVAL);
        }
        self.indirect = true;
        self.table = desc.addr();
        self.len = desc.len() / DESCRIPTOR_SIZE;
        self.next = Some(0);
        Ok(())
    }
}
