//! The frontend's messages, as far as the supervisor needs to know them: their frame, and which of them settle
//! something (vhost-user, "Message Specification").

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

/// Requests: enum VhostUserRequest.
pub const GET_FEATURES: u32 = 1;
pub const SET_FEATURES: u32 = 2;
pub const SET_OWNER: u32 = 3;
pub const RESET_OWNER: u32 = 4;
pub const SET_MEM_TABLE: u32 = 5;
pub const SET_LOG_BASE: u32 = 6;
pub const SET_LOG_FD: u32 = 7;
pub const SET_VRING_NUM: u32 = 8;
pub const SET_VRING_ADDR: u32 = 9;
pub const SET_VRING_BASE: u32 = 10;
pub const GET_VRING_BASE: u32 = 11;
pub const SET_VRING_KICK: u32 = 12;
pub const SET_VRING_CALL: u32 = 13;
pub const SET_VRING_ERR: u32 = 14;
pub const GET_PROTOCOL_FEATURES: u32 = 15;
pub const SET_PROTOCOL_FEATURES: u32 = 16;
pub const SET_VRING_ENABLE: u32 = 18;
pub const SET_BACKEND_REQ_FD: u32 = 21;
pub const RESET_DEVICE: u32 = 34;
pub const ADD_MEM_REG: u32 = 37;
pub const REM_MEM_REG: u32 = 38;
pub const SET_DEVICE_STATE_FD: u32 = 42;
pub const CHECK_DEVICE_STATE: u32 = 43;
pub const GET_SHMEM_CONFIG: u32 = 44;

/// The version, in the flags of a header.
const VERSION: u32 = 1;
/// A reply. The request then has another number of bytes.
const NEED_REPLY: u32 = 1 << 3;

/// Bytes of a message after its header. No message is longer (crate vhost, MAX_MSG_SIZE).
const LONGEST: usize = 4096;
/// Descriptors with a message: as many as Linux passes at once (SCM_MAX_FD). A frontend's memory table has at most 32
/// regions.
pub const MOST_FDS: usize = 253;
const HEADER: usize = 12;

/// A message and the descriptors that came with it.
#[derive(Debug)]
pub struct Message {
    pub request: u32,
    flags: u32,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Message {
    pub fn new(request: u32, body: Vec<u8>, fds: Vec<OwnedFd>) -> Self {
        Self { request, flags: VERSION, body, fds }
    }

    /// The same message.
    ///
    /// # Errors
    /// If there is no room for more descriptors.
    pub fn copy(&self) -> io::Result<Self> {
        let fds = self.fds.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?;
        Ok(Self { request: self.request, flags: self.flags, body: self.body.clone(), fds })
    }

    /// Receives one. `None`: the other end is gone.
    ///
    /// # Errors
    /// Those of recvmsg(2). EINVAL if it is too long.
    pub fn receive(socket: impl AsFd) -> io::Result<Option<Self>> {
        let (mut header, mut fds) = ([0; HEADER], Vec::new());
        if !fill(&socket, &mut header, &mut fds)? {
            return Ok(None);
        }
        let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let mut body = vec![0; word(8) as usize];
        if body.len() > LONGEST {
            return Err(Errno::INVAL.into());
        }
        if !fill(&socket, &mut body, &mut fds)? {
            return Ok(None);
        }
        Ok(Some(Self { request: word(0), flags: word(4), body, fds }))
    }

    /// Sends it. The descriptors stay open here.
    ///
    /// # Errors
    /// Those of sendmsg(2).
    pub fn send(&self, socket: impl AsFd) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(HEADER + self.body.len());
        for word in [self.request, self.flags, self.body.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(&self.body);
        let fds: Vec<_> = self.fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match sendmsg(&socket, &[IoSlice::new(rest)], &mut control, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                sent => {
                    rest = rest.get(sent?..).unwrap_or_default();
                    control.clear();
                }
            }
        }
        Ok(())
    }

    /// Whether it asks for a reply, although its kind has none of its own.
    pub fn needs_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }

    /// The same message with another descriptor.
    pub fn with(&self, fd: OwnedFd) -> Self {
        Self { request: self.request, flags: self.flags, body: self.body.clone(), fds: vec![fd] }
    }

    /// The same message, which asks for no reply.
    pub fn without_reply(mut self) -> Self {
        self.flags &= !NEED_REPLY;
        self
    }

    /// The ring that it is about.
    pub fn ring(&self) -> Option<usize> {
        let index = match self.request {
            SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR => usize::from(*self.body.first()?),
            _ => u32::from_ne_bytes(self.body.get(..4)?.try_into().ok()?) as usize,
        };
        (index < crate::record::RINGS).then_some(index)
    }
}

/// False: the other end is gone.
fn fill(socket: impl AsFd, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<bool> {
    let mut at = 0;
    while at < bytes.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let iov = &mut [IoSliceMut::new(&mut bytes[at..])];
        let received = match recvmsg(&socket, iov, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => continue,
            Err(Errno::CONNRESET) => return Ok(false),
            received => received?.bytes,
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        if received == 0 {
            return Ok(false);
        }
        at += received;
    }
    Ok(true)
}
