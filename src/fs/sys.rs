//! System calls that rustix lacks, or that it can only offer for memory which Rust owns. All of the `unsafe` in src/fs
//! is here.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::time::Duration;

use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::thread::{Pid, UnshareFlags, unshare_unsafe};
use serde::{Deserialize, Serialize};

use crate::fuse::abi::{FS_IOC_FSGETXATTR, Fsxattr};
use crate::fuse::buf::{IOV_MAX, IoRange};
use crate::linux::ioctl_number;
use crate::watch::FileId;

type Result<T> = std::result::Result<T, Errno>;

fn check(ret: i64) -> Result<usize> {
    if ret < 0 {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        return Err(Errno::from_raw_os_error(errno));
    }
    Ok(ret as usize)
}

/// Reads into guest memory with preadv2(2), in pieces of IOV_MAX slices. Ends at a short read.
pub fn preadv(fd: BorrowedFd, to: &IoRange, offset: u64, flags: i32) -> Result<usize> {
    pieces(to.as_slice(), offset, |piece, offset| {
        // SAFETY: an IoRange's slices are mapped and writable memory of their length (IoVecs::push).
        unsafe { libc::preadv2(fd.as_raw_fd(), piece.as_ptr(), piece.len() as i32, offset, flags) }
    })
}

/// Writes from guest memory with pwritev2(2), in pieces of IOV_MAX slices. Ends at a short write.
pub fn pwritev(fd: BorrowedFd, from: &IoRange, offset: u64, flags: i32) -> Result<usize> {
    pieces(from.as_slice(), offset, |piece, offset| {
        // SAFETY: an IoRange's slices are mapped memory of their length (IoVecs::push).
        unsafe { libc::pwritev2(fd.as_raw_fd(), piece.as_ptr(), piece.len() as i32, offset, flags) }
    })
}

fn pieces(slices: &[libc::iovec], offset: u64, io: impl Fn(&[libc::iovec], i64) -> isize) -> Result<usize> {
    let mut done = 0;
    for piece in slices.chunks(IOV_MAX) {
        let at = offset.checked_add(done as u64).and_then(|at| i64::try_from(at).ok()).ok_or(Errno::INVAL)?;
        let want: usize = piece.iter().map(|v| v.iov_len).sum();
        match check(io(piece, at) as i64) {
            Ok(n) => {
                done += n;
                if n < want {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

/// getdents64(2): fills `buf` with `linux_dirent64` records and sets its length. rustix's RawDir cannot go on with a
/// buffer that an earlier request has read.
pub fn getdents(fd: BorrowedFd, buf: &mut Vec<u8>) -> Result<()> {
    buf.clear();
    // SAFETY: the buffer has room for its capacity; the kernel says how much of it is initialized.
    unsafe {
        let n = check(libc::syscall(libc::SYS_getdents64, fd.as_raw_fd(), buf.as_mut_ptr(), buf.capacity()))?;
        buf.set_len(n);
    }
    Ok(())
}

/// truncate(2).
pub fn truncate(path: &CStr, size: u64) -> Result<()> {
    let size = i64::try_from(size).map_err(|_| Errno::FBIG)?;
    // SAFETY: `path` is a valid C string.
    check(unsafe { libc::truncate(path.as_ptr(), size) }.into()).map(drop)
}

/// FS_IOC_FSGETXATTR of ioctl(2).
pub fn fsxattr(fd: BorrowedFd) -> Result<Fsxattr> {
    let mut attr = Fsxattr::default();
    // SAFETY: the request writes a struct fsxattr.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), ioctl_number(FS_IOC_FSGETXATTR), &raw mut attr) }.into())?;
    Ok(attr)
}

/// What the kernel calls a file handle: it names a file on its mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RawHandle {
    pub kind: i32,
    #[serde(with = "serde_bytes")]
    pub data: Box<[u8]>,
}

/// struct file_handle of include/linux/fs.h.
#[repr(C)]
struct CHandle {
    bytes: u32,
    kind: i32,
    data: [u8; MAX_HANDLE],
}

/// Longest handle in bytes: MAX_HANDLE_SZ of include/uapi/linux/fcntl.h.
pub const MAX_HANDLE: usize = 128;

/// name_to_handle_at(2) of `name` in `fd` or, with an empty name, of `fd` itself: the handle, which may be one that
/// does not open, and the mount id. Follows no symbolic link.
fn handle_at(fd: BorrowedFd, name: &CStr, flags: i32) -> Result<(CHandle, i32)> {
    let mut handle = CHandle { bytes: MAX_HANDLE as u32, kind: 0, data: [0; MAX_HANDLE] };
    let mut mount = 0;
    let flags = flags | if name.is_empty() { libc::AT_EMPTY_PATH } else { 0 };
    // SAFETY: `name` is a C string, and `handle` is a struct file_handle with room for `bytes` bytes.
    let ret = unsafe {
        libc::syscall(libc::SYS_name_to_handle_at, fd.as_raw_fd(), name.as_ptr(), &mut handle, &mut mount, flags)
    };
    check(ret)?;
    Ok((handle, mount))
}

/// The handle of the descriptor itself, which may be one that does not open, and the mount id.
pub fn name_to_handle(fd: BorrowedFd) -> Result<(RawHandle, i32)> {
    let (handle, mount) = handle_at(fd, c"", 0)?;
    let data = handle.data.get(..handle.bytes as usize).ok_or(Errno::OVERFLOW)?.into();
    Ok((RawHandle { kind: handle.kind, data }, mount))
}

/// AT_HANDLE_FID of include/uapi/linux/fcntl.h, since Linux 6.5: the handle is to tell files apart, and need not open.
const AT_HANDLE_FID: i32 = 0x200;

/// Calls `f` with the type and the bytes of a handle that tells the file `name` in `fd`, or with an empty name `fd`
/// itself, from others.
///
/// # Errors
/// Those of name_to_handle_at(2).
pub fn with_file_id<R>(fd: BorrowedFd, name: &CStr, f: impl FnOnce(i32, &[u8]) -> R) -> Result<R> {
    let (handle, _) = match handle_at(fd, name, AT_HANDLE_FID) {
        Err(Errno::INVAL) => handle_at(fd, name, 0)?,
        done => done?,
    };
    Ok(f(handle.kind, handle.data.get(..handle.bytes as usize).ok_or(Errno::OVERFLOW)?))
}

/// By what name the watch knows the file `name` in `fd` or, with an empty name, `fd` itself.
///
/// # Errors
/// Those of name_to_handle_at(2); EOVERFLOW for a handle that is too long.
pub fn file_id(fd: BorrowedFd, name: &CStr) -> Result<FileId> {
    let (handle, _) = handle_at(fd, name, 0)?;
    let data = handle.data.get(..handle.bytes as usize).ok_or(Errno::OVERFLOW)?;
    FileId::new(handle.kind, data).ok_or(Errno::OVERFLOW)
}

/// open_by_handle_at(2). `mount`: an open file of the handle's mount, not O_PATH. Needs CAP_DAC_READ_SEARCH.
///
/// # Errors
/// Those of the system call; EOVERFLOW for a handle of more than [`MAX_HANDLE`] bytes.
pub fn open_by_handle(mount: BorrowedFd, handle: &RawHandle, flags: i32) -> Result<OwnedFd> {
    let mut raw = CHandle { bytes: handle.data.len() as u32, kind: handle.kind, data: [0; MAX_HANDLE] };
    raw.data.get_mut(..handle.data.len()).ok_or(Errno::OVERFLOW)?.copy_from_slice(&handle.data);
    // SAFETY: `raw` is a struct file_handle; the call gives a new descriptor.
    unsafe {
        let fd = check(libc::syscall(
            libc::SYS_open_by_handle_at,
            mount.as_raw_fd(),
            &raw const raw,
            flags | libc::O_CLOEXEC,
        ))?;
        Ok(OwnedFd::from_raw_fd(fd as i32))
    }
}

/// unshare(CLONE_FS): gives the thread a working directory and a umask of its own.
pub fn unshare_fs() -> Result<()> {
    // SAFETY: the table of descriptors stays shared.
    unsafe { unshare_unsafe(UnshareFlags::FS) }
}

/// fcntl(2) with F_OFD_GETLK, F_OFD_SETLK or F_OFD_SETLKW.
pub fn ofd_lock(fd: BorrowedFd, command: i32, lock: &mut libc::flock) -> Result<()> {
    // SAFETY: `lock` is a struct flock.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), command, lock) }.into()).map(drop)
}

/// Ends a thread's wait for a lock. Its handler does nothing.
const INTERRUPT: i32 = libc::SIGUSR1;

/// Gives [`INTERRUPT`] its handler, without SA_RESTART.
pub fn catch_interrupt() -> Result<()> {
    extern "C" fn nothing(_: i32) {}
    // SAFETY: an all-zero sigaction is valid, and the handler does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(i32) as usize;
        check(libc::sigaction(INTERRUPT, &raw const action, std::ptr::null_mut()).into()).map(drop)
    }
}

/// The clock that the kernel takes file times from.
pub fn file_clock() -> Timespec {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a struct timespec. With this clock the call does not fail; `now` would then be 1970, and no time
    // older.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME_COARSE, &raw mut now) };
    Timespec { tv_sec: now.tv_sec, tv_nsec: now.tv_nsec }
}

/// Fails if a process has the file open for writing, or mapped so that it can store. `fd` is open for reading alone.
///
/// The kernel gives a lease for reading only if this is so. The lease ends at once. Who opens the file for writing
/// meanwhile waits for that moment, or gets EAGAIN with O_NONBLOCK.
///
/// # Errors
/// EAGAIN if it is so, EACCES if that cannot be told: the file is of another user and the process has no CAP_LEASE.
pub fn unwritten(fd: BorrowedFd) -> Result<()> {
    // SAFETY: no memory is involved.
    let lease = |kind: i32| check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, kind) }.into());
    lease(libc::F_RDLCK)?;
    lease(libc::F_UNLCK).map(drop)
}

/// Ignores SIGIO, by which the kernel asks for a lease back.
pub fn ignore_lease_signal() -> Result<()> {
    // SAFETY: an all-zero sigaction is valid, and SIG_IGN is no function of this process.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_IGN;
        check(libc::sigaction(libc::SIGIO, &raw const action, std::ptr::null_mut()).into()).map(drop)
    }
}

/// Sends [`INTERRUPT`] to a thread of this process.
pub fn interrupt(thread: Pid) -> Result<()> {
    let thread = thread.as_raw_nonzero().get();
    // SAFETY: no memory is involved.
    check(unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, INTERRUPT) }).map(drop)
}

/// Time between two signals to one thread. The first may come just before the system call that it is to end. This is
/// long enough for the thread to get there, and too short to notice.
pub const INTERRUPT_AGAIN: Duration = Duration::from_millis(1);

/// Closes a copy of the descriptor, for the errors that close(2) reports.
pub fn close_copy(fd: BorrowedFd) -> Result<()> {
    let copy = rustix::io::fcntl_dupfd_cloexec(fd, 0)?;
    // SAFETY: nothing else uses the copy.
    check(unsafe { libc::close(copy.into_raw_fd()) }.into()).map(drop)
}
