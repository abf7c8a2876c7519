//! Compares the walker of descriptor chains with one that is as simple as possible.
#![no_main]

use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use rustix::io::Errno;
use thruway::device::fuzzing::{Memory, RegionState, Segment, Table, Tables, is_near, load, mark_dirty, write};
use thruway::fuse::Work;
use thruway_fuzz::Input;
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestRegionMmap};

/// Memory regions: address, length, and whether it is a mapped file. Two of them are adjacent.
const REGIONS: [(u64, usize, bool); 4] =
    [(0, 0x4000, false), (0x8000, 0x2000, false), (0xa000, 0x1000, false), (0xb000, 0x1000, true)];

fn region(addr: u64, len: usize, far: bool) -> GuestRegionMmap<RegionState> {
    let mapping = if far {
        let file: OwnedFd = rustix::fs::memfd_create("far", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, len as u64).unwrap();
        // If statx(2) fails, the walker treats the region as a mapped file.
        let closed = file.into_raw_fd();
        // SAFETY: the descriptor is open.
        let file = unsafe { std::fs::File::from_raw_fd(closed) };
        let mapping = MmapRegion::from_file(FileOffset::new(file, 0), len).unwrap();
        // SAFETY: the only later use of the descriptor is the statx(2) that must fail.
        unsafe { libc::close(closed) };
        mapping
    } else {
        MmapRegion::new(len).unwrap()
    };
    GuestRegionMmap::new(mapping, GuestAddress(addr)).unwrap()
}

fn memory() -> &'static Tables {
    static MEMORY: OnceLock<Tables> = OnceLock::new();
    MEMORY.get_or_init(|| {
        let regions = REGIONS.map(|(addr, len, far)| region(addr, len, far));
        let mem = Memory::from_regions(regions.into()).unwrap();
        assert!(REGIONS.iter().all(|r| is_near(&mem, GuestAddress(r.0), r.1) != r.2));
        Tables::new(mem)
    })
}

/// What the walker must find: the lengths of the readable and of the writable buffers, and whether the chain is valid.
#[derive(Debug, Default, PartialEq)]
struct Found {
    readable: u64,
    writable: u64,
    segments: usize,
    fault: Option<Errno>,
}

/// The number of bytes of a range that are in memory.
fn inside(addr: u64, len: u64, far_too: bool) -> u64 {
    let (mut at, end) = (u128::from(addr), u128::from(addr) + u128::from(len));
    while at < end {
        let holds = |r: &&(u64, usize, bool)| {
            (far_too || !r.2) && (u128::from(r.0)..u128::from(r.0) + r.1 as u128).contains(&at)
        };
        let Some(r) = REGIONS.iter().find(holds) else { break };
        at = end.min(u128::from(r.0) + r.1 as u128);
    }
    (at - u128::from(addr)) as u64
}

fn model(mem: &Memory, table: u64, len: u16, head: u16) -> Found {
    let mut found = Found::default();
    let (mut table, mut len, mut index, mut indirect) = (table, u64::from(len), u64::from(head), false);
    for _ in 0..1024 {
        let Some(at) = table.checked_add(16 * index).filter(|_| index < len) else {
            let errno = if index < len { Errno::FAULT } else { Errno::INVAL };
            found.fault = found.fault.or(Some(errno));
            return found;
        };
        if inside(at, 16, false) < 16 {
            found.fault = found.fault.or(Some(Errno::FAULT));
            return found;
        }
        let mut raw = [0; 16];
        mem.read_slice(&mut raw, GuestAddress(at)).unwrap();
        let mut raw = Input(&raw);
        let (addr, size, flags, next) = (raw.u64(), u64::from(raw.u32()), raw.u16(), raw.u16());
        if flags & 4 != 0 {
            if indirect || flags & 1 != 0 || size == 0 || size % 16 != 0 {
                found.fault = found.fault.or(Some(Errno::INVAL));
                return found;
            }
            (table, len, index, indirect) = (addr, size / 16, 0, true);
            continue;
        }
        let there = inside(addr, size, true);
        if flags & 2 != 0 {
            found.writable += there;
            if there < size {
                found.fault = Some(Errno::FAULT);
                return found;
            }
            found.segments += usize::from(size > 0);
        } else if found.segments > 0 {
            found.fault = found.fault.or(Some(Errno::INVAL));
        } else if found.fault.is_none() {
            found.readable += there;
            found.fault = (there < size).then_some(Errno::FAULT);
        }
        if flags & 1 == 0 {
            return found;
        }
        index = next.into();
    }
    found.fault = found.fault.or(Some(Errno::INVAL));
    found
}

thread_local! {
    static KEPT: std::cell::RefCell<(Work, Vec<Segment>)> = Default::default();
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let (head, shape) = (input.u8(), input.u8());
    let at = [0, 0x1000, 0x3fe0, 0x8000, 0x9fe8, 0xafe0, 0xb000, 0xffff_ffff_ffff_ffe0][usize::from(shape & 7)];
    let len = [1, 2, 4, 8, 16, 64, 256, 1024][usize::from(shape >> 3 & 7)];
    let mem = memory().all.memory();
    // Drop the part that does not fit.
    let wrote = mem.write(input.0, GuestAddress(at)).unwrap_or(0);
    KEPT.with_borrow_mut(|(work, segments)| {
        let want = model(&mem, at, len, head.into());
        let table = Table { addr: GuestAddress(at), len };
        let mut kept = memory().keep();
        let (mut loaded, fault) = load(memory(), &mut kept, table, head.into(), work, segments);
        let (readable, writable) = (loaded.work.readable.len() as u64, loaded.work.writable.len() as u64);
        let got = Found { readable, writable, segments: segments.len(), fault: fault.err() };
        assert_eq!(got, want);
        let mut uses_file = false;
        for list in [&mut loaded.work.readable, &mut loaded.work.writable] {
            let range = list.range(0..usize::MAX);
            assert!(range.as_slice().len() <= 2 * 1024 * REGIONS.len());
            for slice in range.as_slice() {
                // Two regions may be adjacent in this process too, so a slice may reach into both.
                let (start, end) = (slice.iov_base as usize, slice.iov_base as usize + slice.iov_len);
                let mut covered = start;
                while covered < end {
                    let base = |r: &(u64, usize, bool)| mem.get_host_address(GuestAddress(r.0)).unwrap() as usize;
                    let within = |r: &&(u64, usize, bool)| (base(r)..base(r) + r.1).contains(&covered);
                    let r = REGIONS.iter().find(within).expect("a slice outside memory");
                    covered = end.min(base(r) + r.1);
                    uses_file |= r.2;
                }
            }
        }
        assert_eq!(loaded.snapshot.files.len(), usize::from(uses_file));
        let refused = loaded.refuse(Errno::IO);
        assert!(refused == 0 || refused <= 16);
        drop(loaded);
        let near = segments.iter().all(|s| is_near(&mem, s.addr, s.len as usize));
        let reply = [0; 64];
        match write(&mem, segments, &reply) {
            Ok(n) => assert_eq!(n as u64, want.writable.min(64).min(segments.iter().map(|s| u64::from(s.len)).sum())),
            Err(_) => assert!(!near),
        }
        mark_dirty(&kept, segments, 64);
    });
    // Restore memory for the next input.
    let zeros = [0; 4096];
    let mut left = wrote;
    while left > 0 {
        let n = left.min(zeros.len());
        mem.write_slice(&zeros[..n], GuestAddress(at + (wrote - left) as u64)).unwrap();
        left -= n;
    }
});
