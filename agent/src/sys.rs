//! System calls that rustix lacks. All of the agent's `unsafe` is here.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use thruway_guest::protocol::MESSAGE;

type Result<T> = std::result::Result<T, Errno>;

/// The type of a file handle that is a nodeid and a generation (FILEID_INO64_GEN, which fuse_encode_fh() of
/// fs/fuse/inode.c gives).
const HANDLE: i32 = 0x81;

/// struct file_handle with the bytes of such a handle: the nodeid's upper half, its lower half, the generation.
#[repr(C)]
struct Handle {
    bytes: u32,
    kind: i32,
    words: [u32; 3],
}

fn check(result: libc::c_long) -> Result<i32> {
    match result {
        ..0 => Err(Errno::from_raw_os_error(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))),
        result => Ok(result as i32),
    }
}

/// ioctl(2) with a message that begins with these bytes. Returns the answer, of [`MESSAGE`] bytes.
pub fn ask(fd: BorrowedFd, command: u32, bytes: &[u8]) -> Result<Vec<u8>> {
    // Not on the stack: each of an idle agent's threads would keep some of these.
    let mut message = vec![0u8; MESSAGE];
    message[..bytes.len()].copy_from_slice(bytes);
    let command = u64::from(command);
    // SAFETY: the command's number says how many bytes the kernel reads and writes, and the message has so many.
    check(unsafe { libc::syscall(libc::SYS_ioctl, fd.as_raw_fd(), command, message.as_mut_ptr()) })?;
    Ok(message)
}

/// Opens a node that the guest's kernel knows. `mount`: an open directory of the share.
///
/// # Errors
/// ESTALE if the kernel does not know it.
pub fn open_node(mount: BorrowedFd, node: u64, flags: OFlags) -> Result<OwnedFd> {
    let handle = Handle { bytes: 12, kind: HANDLE, words: [(node >> 32) as u32, node as u32, 0] };
    let flags = (flags | OFlags::CLOEXEC).bits() as i32;
    // SAFETY: the handle has as many bytes as it says. The call gives a new descriptor.
    unsafe {
        let fd = check(libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), &raw const handle, flags))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// The nodeid of an open file.
pub fn node_of(fd: BorrowedFd) -> Result<u64> {
    let mut handle = Handle { bytes: 12, kind: 0, words: [0; 3] };
    let mut mount = 0i32;
    let (empty, at): (&CStr, _) = (c"", fd.as_raw_fd());
    // SAFETY: the handle has room for the bytes that it says.
    check(unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            at,
            empty.as_ptr(),
            &raw mut handle,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    })?;
    match handle.kind {
        HANDLE => Ok(u64::from(handle.words[0]) << 32 | u64::from(handle.words[1])),
        _ => Err(Errno::OPNOTSUPP),
    }
}

/// Moves this thread into a process's mount namespace.
pub fn enter_mounts(pid: u32) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let namespace = rustix::fs::open(format!("/proc/{pid}/ns/mnt"), flags, rustix::fs::Mode::empty())?;
    // SAFETY: the working directory and the root are separated from other threads', and no descriptors.
    unsafe { unshare_unsafe(UnshareFlags::FS)? };
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))
}

/// Has further children of this thread begin in a process's pid namespace.
pub fn enter_pids(pid: u32) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let namespace = rustix::fs::open(format!("/proc/{pid}/ns/pid"), flags, rustix::fs::Mode::empty())?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::ProcessID))
}

/// Has all threads share one heap. glibc would give each its own, of some 20 KiB.
pub fn share_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it changes where later allocations lie, and nothing else.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Blocks SIGTERM and SIGINT, and gives a descriptor that is readable once one of them has come.
pub fn end_signals() -> Result<OwnedFd> {
    // SAFETY: sigemptyset() makes the set valid. The call gives a new descriptor.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::sigaddset(&raw mut set, libc::SIGINT);
        check(libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()).into())?;
        let fd = check(libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC).into())?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}
