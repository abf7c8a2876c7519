//! System calls that rustix lacks, or that must act on the calling thread alone. All of src/fs's `unsafe`.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;

use crate::fuse::buf::{IOV_MAX, IoRange};

type Result<T> = std::result::Result<T, Errno>;

fn check(ret: i64) -> Result<usize> {
    if ret < 0 {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        return Err(Errno::from_raw_os_error(errno));
    }
    Ok(ret as usize)
}

/// preadv2(2) into guest memory, in pieces of IOV_MAX slices. Ends at a short read.
pub fn preadv(fd: BorrowedFd, to: &IoRange, offset: u64, flags: i32) -> Result<usize> {
    pieces(to.as_slice(), offset, |piece, offset| {
        // SAFETY: an IoRange's slices are mapped and writable memory of their length (IoVecs::push).
        unsafe { libc::preadv2(fd.as_raw_fd(), piece.as_ptr(), piece.len() as i32, offset, flags) }
    })
}

/// pwritev2(2) from guest memory, in pieces of IOV_MAX slices. Ends at a short write.
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

/// getdents64(2): fills `buf` with `linux_dirent64` records and sets its length.
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

/// A file handle of name_to_handle_at(2).
#[repr(C)]
pub struct RawHandle {
    pub bytes: u32,
    pub kind: i32,
    pub data: [u8; MAX_HANDLE],
}

/// MAX_HANDLE_SZ of include/uapi/linux/fcntl.h.
pub const MAX_HANDLE: usize = 128;

/// name_to_handle_at(2) of the descriptor itself: the handle and the mount id.
pub fn name_to_handle(fd: BorrowedFd) -> Result<(RawHandle, i32)> {
    let mut handle = RawHandle { bytes: MAX_HANDLE as u32, kind: 0, data: [0; MAX_HANDLE] };
    let mut mount = 0;
    // SAFETY: `handle` is a struct file_handle with room for `bytes` bytes.
    let ret = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            fd.as_raw_fd(),
            c"".as_ptr(),
            &mut handle,
            &mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    check(ret)?;
    Ok((handle, mount))
}

/// open_by_handle_at(2). Needs CAP_DAC_READ_SEARCH.
pub fn open_by_handle(mount: BorrowedFd, handle: &RawHandle, flags: i32) -> Result<OwnedFd> {
    // SAFETY: `handle` is a struct file_handle; the call gives a new descriptor.
    unsafe {
        let fd = check(libc::syscall(
            libc::SYS_open_by_handle_at,
            mount.as_raw_fd(),
            handle as *const RawHandle,
            flags | libc::O_CLOEXEC,
        ))?;
        Ok(OwnedFd::from_raw_fd(fd as i32))
    }
}

/// setresuid(2) of the calling thread's effective id alone (glibc's function is for the whole process).
///
/// # Errors
/// Those of setresuid(2), and EINVAL for the id that it would leave as it is.
pub fn seteuid(uid: u32) -> Result<()> {
    if uid == u32::MAX {
        return Err(Errno::INVAL);
    }
    // SAFETY: no memory is involved.
    check(unsafe { libc::syscall(libc::SYS_setresuid, u32::MAX, uid, u32::MAX) }).map(drop)
}

/// setresgid(2) of the calling thread's effective id alone.
///
/// # Errors
/// As [`seteuid`].
pub fn setegid(gid: u32) -> Result<()> {
    if gid == u32::MAX {
        return Err(Errno::INVAL);
    }
    // SAFETY: no memory is involved.
    check(unsafe { libc::syscall(libc::SYS_setresgid, u32::MAX, gid, u32::MAX) }).map(drop)
}

/// setgroups(2) of the calling thread.
pub fn setgroups(groups: &[u32]) -> Result<()> {
    // SAFETY: the list is as long as said.
    check(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) }).map(drop)
}

/// Capability sets of a thread, a bit for each capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    pub effective: u64,
    pub permitted: u64,
    pub inheritable: u64,
}

/// _LINUX_CAPABILITY_VERSION_3 of include/uapi/linux/capability.h: two 32-bit words for each set.
const CAP_VERSION: u32 = 0x2008_0522;

/// capget(2) of the calling thread.
pub fn capget() -> Result<Caps> {
    let header = [CAP_VERSION, 0];
    let mut data = [[0u32; 3]; 2];
    // SAFETY: header and data have the layout of version 3.
    check(unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), data.as_mut_ptr()) })?;
    let set = |i: usize| u64::from(data[0][i]) | u64::from(data[1][i]) << 32;
    Ok(Caps { effective: set(0), permitted: set(1), inheritable: set(2) })
}

/// capset(2) of the calling thread.
pub fn capset(caps: Caps) -> Result<()> {
    let header = [CAP_VERSION, 0];
    let word = |shift: u32| [caps.effective, caps.permitted, caps.inheritable].map(|set| (set >> shift) as u32);
    let data = [word(0), word(32)];
    // SAFETY: header and data have the layout of version 3.
    check(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), data.as_ptr()) }).map(drop)
}

/// unshare(CLONE_FS): a working directory and a umask of the thread's own.
pub fn unshare_fs() -> Result<()> {
    // SAFETY: no memory is involved.
    check(unsafe { libc::unshare(libc::CLONE_FS) }.into()).map(drop)
}

/// fcntl(2) with F_OFD_GETLK, F_OFD_SETLK or F_OFD_SETLKW.
pub fn ofd_lock(fd: BorrowedFd, command: i32, lock: &mut libc::flock) -> Result<()> {
    // SAFETY: `lock` is a struct flock.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), command, lock) }.into()).map(drop)
}

/// Signal that ends the wait of a thread in a lock; it has a handler that does nothing.
pub const INTERRUPT: i32 = libc::SIGUSR1;

/// Gives [`INTERRUPT`] its handler, without SA_RESTART.
pub fn catch_interrupt() -> Result<()> {
    extern "C" fn nothing(_: i32) {}
    // SAFETY: an all-zero sigaction is valid, and the handler does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(i32) as usize;
        check(libc::sigaction(INTERRUPT, &action, std::ptr::null_mut()).into()).map(drop)
    }
}

/// Sends [`INTERRUPT`] to a thread of this process.
pub fn interrupt(tid: i32) -> Result<()> {
    // SAFETY: no memory is involved.
    check(unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, INTERRUPT) }).map(drop)
}

/// The calling thread's id.
pub fn gettid() -> i32 {
    // SAFETY: no memory is involved.
    unsafe { libc::gettid() }
}

macro_rules! xattr {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*; $buf:ident: &mut Vec<u8>) = $call:ident($($pass:expr),*);)*) => {$(
        $(#[$doc])*
        pub fn $name($($arg: $type,)* $buf: &mut Vec<u8>, size: usize) -> Result<usize> {
            $buf.clear();
            $buf.reserve(size);
            // SAFETY: strings are NUL-terminated; the buffer has room for `size` bytes, and the kernel says how many it
            // has written (with a size of 0 it writes none).
            unsafe {
                let n = check(libc::$call($($pass,)* $buf.as_mut_ptr().cast(), size) as i64)?;
                if size > 0 {
                    $buf.set_len(n.min(size));
                }
                Ok(n)
            }
        }
    )*};
}

xattr! {
    /// getxattr(2); a `size` of 0 asks for the length alone.
    fn getxattr(path: &CStr, name: &CStr; to: &mut Vec<u8>) = getxattr(path.as_ptr(), name.as_ptr());
    /// listxattr(2); a `size` of 0 asks for the length alone.
    fn listxattr(path: &CStr; to: &mut Vec<u8>) = listxattr(path.as_ptr());
}

/// setxattr(2).
pub fn setxattr(path: &CStr, name: &CStr, value: &[u8], flags: u32) -> Result<()> {
    // SAFETY: strings are NUL-terminated and the value is as long as said.
    let ret = unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), flags as i32) };
    check(ret.into()).map(drop)
}

/// removexattr(2).
pub fn removexattr(path: &CStr, name: &CStr) -> Result<()> {
    // SAFETY: strings are NUL-terminated.
    check(unsafe { libc::removexattr(path.as_ptr(), name.as_ptr()) }.into()).map(drop)
}

/// close(2) of a copy of the descriptor, for the errors that it reports.
pub fn close_copy(fd: BorrowedFd) -> Result<()> {
    let copy = rustix::io::fcntl_dupfd_cloexec(fd, 0)?;
    // SAFETY: the copy is ours alone and is given up here.
    check(unsafe { libc::close(copy.into_raw_fd()) }.into()).map(drop)
}

/// How long an interrupter waits before it sends its signal again: the first may have come just before the system
/// call it was to end. Long enough for a thread to get there, short enough that nobody notices.
pub const INTERRUPT_AGAIN: Duration = Duration::from_millis(1);
