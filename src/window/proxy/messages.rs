//! The messages between the daemon and the window process, on two sockets of whole messages.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::Pid;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A call of the daemon. Its descriptor comes with it.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Call {
    pub what: u64,
    pub id: u64,
    /// Comes back with the answer. Another process of the daemon may have ended before it got its answer.
    pub number: u64,
}

pub const OPEN_THROUGH: u64 = 1;
pub const OPEN_CACHED: u64 = 2;
pub const INVALIDATE: u64 = 3;
pub const WATCH: u64 = 4;
/// Proxy files that are open already. The answer has the real file, too.
pub const FIND_THROUGH: u64 = 5;
pub const FIND_CACHED: u64 = 6;

/// The answer; errno 0 is success.
#[repr(C)]
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Answer {
    pub errno: i32,
    pub guarded: u32,
    pub number: u64,
    /// The daemon was asked to drop it.
    pub revoked: u64,
}

/// A message of the window process that is no answer.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Notice {
    pub what: u64,
    /// The id, or the device.
    pub first: u64,
    /// The inode.
    pub second: u64,
}

pub const REVOKE: u64 = 1;
pub const CHANGED: u64 = 3;
/// A truncation was let go on although the file may still be mapped.
pub const OVERDUE: u64 = 2;

/// The first byte of the window process's first message if it works. The reason why there is no guard follows. Without
/// this byte, the message is the reason why there are no proxy files.
pub const READY: u8 = b'+';

/// The most descriptors of a message.
const MOST_FDS: usize = 2;

/// A received message: its length (0 if the other end is gone), its descriptors, its sender.
pub struct Message {
    pub len: usize,
    pub fds: Vec<OwnedFd>,
    pub sender: Option<Pid>,
}

pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

pub fn send(socket: BorrowedFd, bytes: &[u8], fds: &[BorrowedFd], flags: SendFlags) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = flags | SendFlags::NOSIGNAL;
    rustix::io::retry_on_intr(|| sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags))?;
    Ok(())
}

pub fn receive(socket: BorrowedFd, buffer: &mut [u8]) -> io::Result<Message> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS), ScmCredentials(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut message = Message { len: received.bytes, fds: Vec::new(), sender: None };
    for part in ancillary.drain() {
        match part {
            RecvAncillaryMessage::ScmRights(fds) => message.fds.extend(fds),
            RecvAncillaryMessage::ScmCredentials(sender) => message.sender = Some(sender.pid),
            _ => {}
        }
    }
    Ok(message)
}
