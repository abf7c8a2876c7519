//! System calls that rustix lacks, with all `unsafe` of src/window.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{Ordering, compiler_fence};

use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};

use crate::linux::{FS_IOC_FIEMAP, SYS_CACHESTAT, ioctl_number};

/// struct fuse_backing_map of include/uapi/linux/fuse.h.
#[repr(C)]
struct BackingMap {
    fd: i32,
    flags: u32,
    padding: u64,
}

/// struct fiemap_extent of include/uapi/linux/fiemap.h.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// Extents of one call.
const EXTENTS: usize = 64;

/// struct fiemap of include/uapi/linux/fiemap.h, with its extents.
#[repr(C)]
struct Fiemap {
    head: FiemapHead,
    extents: [Extent; EXTENTS],
}

#[repr(C)]
struct FiemapHead {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
}

/// FIEMAP_EXTENT_LAST and FIEMAP_EXTENT_SHARED.
const LAST: u32 = 1;
const SHARED: u32 = 0x2000;

/// The first byte from `from` on, up to `end`, that the file shares with another one, or from which on it is not known.
/// Looks at no more than so many extents: 4096 take a millisecond or so, and a file of more pieces is rare.
pub fn shared(file: BorrowedFd, from: u64, end: u64) -> io::Result<u64> {
    let mut at = from;
    for _ in 0..64 {
        if at >= end {
            return Ok(end);
        }
        let (flags, mapped, count) = (0, 0, EXTENTS as u32);
        let head = FiemapHead { start: at, length: end - at, flags, mapped, count, reserved: 0 };
        let mut map = Fiemap { head, extents: [Extent::default(); EXTENTS] };
        // SAFETY: the request writes at most `count` extents after the head.
        check(unsafe { libc::ioctl(file.as_raw_fd(), ioctl_number(FS_IOC_FIEMAP), &raw mut map) })?;
        let extents = &map.extents[..EXTENTS.min(map.head.mapped as usize)];
        let Some(last) = extents.last() else { return Ok(end) };
        if let Some(extent) = extents.iter().find(|extent| extent.flags & SHARED != 0) {
            return Ok(extent.logical.clamp(from, end));
        }
        if last.flags & LAST != 0 {
            return Ok(end);
        }
        at = last.logical.saturating_add(last.length).max(at + 1);
    }
    Ok(at.min(end))
}

/// FUSE_DEV_IOC_MAGIC of include/uapi/linux/fuse.h.
const FUSE: u8 = 229;
/// FUSE_DEV_IOC_BACKING_OPEN.
pub const BACKING_OPEN: Opcode = opcode::write::<BackingMap>(FUSE, 1);
/// FUSE_DEV_IOC_BACKING_CLOSE.
pub const BACKING_CLOSE: Opcode = opcode::write::<u32>(FUSE, 2);

/// Registers `file` as a backing file of the FUSE connection and returns its number.
pub fn backing_open(fuse: BorrowedFd, file: BorrowedFd) -> io::Result<i32> {
    let map = BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
    // SAFETY: the request reads the one struct that it is given.
    check(unsafe { libc::ioctl(fuse.as_raw_fd(), ioctl_number(BACKING_OPEN), &raw const map) })
}

/// Writes the dirty pages of a file, without flushing the disk's cache.
pub fn write_back(file: BorrowedFd) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: it takes no pointer.
    let write = || check(unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, flags) }).map(drop);
    // An old error is reported once, and keeps the call from writing newer pages. So call it again.
    write().or_else(|e| write().and(Err(e)))
}

/// struct cachestat of include/uapi/linux/mman.h.
#[derive(Default)]
#[repr(C)]
struct Cached {
    cache: u64,
    dirty: u64,
    writeback: u64,
    /// Of tmpfs: pages in swap space.
    evicted: u64,
    recently_evicted: u64,
}

/// Whether a file in memory has a page from the byte `from` on.
pub fn has_pages(file: BorrowedFd, from: u64) -> io::Result<bool> {
    // struct cachestat_range: to the end, however long the file is.
    let (range, mut cached) = ([from, 0_u64], Cached::default());
    // SAFETY: the call reads two integers and writes one struct.
    let done = unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range.as_ptr(), &raw mut cached, 0) };
    match done {
        0 => Ok(cached.cache > 0 || cached.evicted > 0),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Unregisters a backing file. Open files keep it.
pub fn backing_close(fuse: BorrowedFd, id: i32) -> io::Result<()> {
    // SAFETY: the request reads the one integer that it is given.
    check(unsafe { libc::ioctl(fuse.as_raw_fd(), ioctl_number(BACKING_CLOSE), &raw const id) }).map(drop)
}

/// Closes all descriptors except these and the standard ones, even those that other code owns. For a process that was
/// just forked.
pub fn close_all_but(kept: &[BorrowedFd]) -> io::Result<()> {
    let mut kept: Vec<RawFd> = kept.iter().map(AsRawFd::as_raw_fd).collect();
    kept.sort_unstable();
    let mut first = libc::STDERR_FILENO + 1;
    for fd in kept {
        close_range(first, fd - 1)?;
        first = first.max(fd + 1);
    }
    close_range(first, RawFd::MAX)
}

fn close_range(first: RawFd, last: RawFd) -> io::Result<()> {
    if first > last {
        return Ok(());
    }
    // SAFETY: the caller is a forked process that never returns to what owns these descriptors.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The part of a thread's memory that is a mapping of a file in [`store`].
#[derive(Clone, Copy)]
struct Target {
    from: usize,
    to: usize,
    /// The first byte whose page the file did not have.
    cut: usize,
}

thread_local! {
    /// Only the thread itself uses it, and [`cut_off`], which interrupts it.
    static TARGET: Cell<Target> = const { Cell::new(Target { from: 0, to: 0, cut: 0 }) };
}

/// The size of a page. Makes no system call, as it is asked where few are allowed.
pub fn page_size() -> usize {
    // SAFETY: it takes no pointer.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Has [`store`] survive a file's end. For processes whose other memory no file's end is in.
pub fn catch_ends() -> io::Result<()> {
    // SAFETY: all zeros is a valid value, and the handler has the type that SA_SIGINFO asks for.
    check(unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = cut_off as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut())
    })
    .map(drop)
}

/// Puts memory that belongs to no file in the place of what the file does not have. Elsewhere SIGBUS ends the process.
extern "C" fn cut_off(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel gives the signal's own information, and a SIGBUS has an address.
    let at = unsafe { (*info).si_addr() } as usize;
    let target = TARGET.get();
    let page = at & !(page_size() - 1);
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
    let replaced = (target.from..target.to).contains(&at) && {
        // SAFETY: `store` owns this part of the memory, and copies to it now.
        let memory = unsafe { libc::mmap(page as *mut _, target.to - page, prot, flags, -1, 0) };
        memory != libc::MAP_FAILED
    };
    if replaced {
        TARGET.set(Target { cut: page.max(target.from), ..target });
    } else {
        // SAFETY: it takes no pointer. The same access then ends the process.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    }
}

/// Writes to a file that is open for reading and writing as a mapping would: it never becomes longer. Returns how much
/// of `data` was stored; the rest is behind the file's end, or had no room.
///
/// # Errors
/// Those of mmap(2), before anything is stored.
pub fn store(file: BorrowedFd, offset: u64, data: &[u8]) -> io::Result<usize> {
    if data.is_empty() {
        return Ok(0);
    }
    let skipped = (offset % page_size() as u64) as usize;
    let at = i64::try_from(offset - skipped as u64).map_err(|_| Errno::FBIG)?;
    let length = (skipped + data.len()).next_multiple_of(page_size());
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: the kernel chooses an unused address.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), length, prot, flags, file.as_raw_fd(), at) };
    if memory == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let (start, to) = (memory as usize + skipped, memory as usize + length);
    TARGET.set(Target { from: memory as usize, to, cut: to });
    compiler_fence(Ordering::SeqCst);
    // SAFETY: the mapping has room for it, and is not `data`. Others may write there at the same time, as to all files.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), start as *mut u8, data.len()) };
    compiler_fence(Ordering::SeqCst);
    let target = TARGET.replace(Target { from: 0, to: 0, cut: 0 });
    // SAFETY: nothing refers to the mapping any more.
    unsafe { libc::munmap(memory, length) };
    Ok(target.cut.saturating_sub(start).min(data.len()))
}
