//! What the frontend maps for the device (vhost-user, VHOST_USER_BACKEND_SHMEM_MAP).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vhost::vhost_user::message::{VhostUserMMap, VhostUserMMapFlags};
use vhost::vhost_user::{Backend, VhostUserFrontendReqHandler};

use crate::window::Frontend;

/// Id of the DAX window (VIRTIO 1.3, section 5.11.6.4).
const DAX: u8 = 0;

/// The channel for requests to the frontend.
pub struct Channel(pub Backend);

impl Frontend for Channel {
    fn map(&self, at: u64, len: u64, file: BorrowedFd, from: u64, writable: bool) -> io::Result<()> {
        let flags = if writable { VhostUserMMapFlags::WRITABLE.bits() } else { 0 };
        let request = VhostUserMMap { shmid: DAX, fd_offset: from, shm_offset: at, len, flags, ..Default::default() };
        self.0.shmem_map(&request, &file.as_raw_fd()).map(drop)
    }

    fn unmap(&self, at: u64, len: u64) -> io::Result<()> {
        let request = VhostUserMMap { shmid: DAX, shm_offset: at, len, ..Default::default() };
        self.0.shmem_unmap(&request).map(drop)
    }
}
