//! Inodes held by file handle (open_by_handle_at(2)) rather than by descriptor.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Weak};

use dashmap::DashMap;
use rustix::fs::{FileType, OFlags, fstat};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::FileHandles;
use super::inode::{Place, reopen};
use super::kept::Kept;
use super::stream::RawState;
use super::sys::{self, MAX_HANDLE, RawHandle};
use crate::fuse::ops::Result;
use crate::limits;

/// A file handle and an open file of its mount.
pub struct FileHandle {
    mount: Arc<OwnedFd>,
    raw: RawState,
}

/// The kernel's handle of an O_PATH descriptor's file, and its mount's id. It may be one that does not open.
pub fn raw_handle(fd: BorrowedFd) -> Result<(RawState, i32)> {
    let (raw, mount) = sys::name_to_handle(fd)?;
    let data = raw.data.get(..raw.bytes as usize).ok_or(Errno::OVERFLOW)?.into();
    Ok((RawState { kind: raw.kind, data }, mount))
}

/// Opens a file by its handle, on the mount of which `mount` is an open file (not by O_PATH).
pub fn open_raw(mount: BorrowedFd, handle: &RawState, flags: OFlags) -> Result<OwnedFd> {
    let mut raw = RawHandle { bytes: handle.data.len() as u32, kind: handle.kind, data: [0; MAX_HANDLE] };
    raw.data.get_mut(..handle.data.len()).ok_or(Errno::OVERFLOW)?.copy_from_slice(&handle.data);
    sys::open_by_handle(mount, &raw, flags.bits() as i32)
}

impl FileHandle {
    pub fn open(&self, flags: OFlags) -> Result<OwnedFd> {
        open_raw(self.mount.as_fd(), &self.raw, flags)
    }
}

/// How inodes are held, and a file of each mount that has one.
pub struct Handles {
    mode: FileHandles,
    pub kept: Arc<Kept>,
    mounts: DashMap<i32, Weak<OwnedFd>>,
    /// The first descriptor that the guest cannot have.
    end: RawFd,
}

impl Drop for Handles {
    fn drop(&mut self) {
        self.kept.end();
    }
}

impl Handles {
    pub fn new(mode: FileHandles) -> Self {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let end = limit - limits::OWN_DESCRIPTORS.min(limit / 4);
        let end = RawFd::try_from(end).unwrap_or(RawFd::MAX);
        Self { mode, kept: Kept::start(), mounts: DashMap::new(), end }
    }

    /// To be asked before a descriptor stays open for the guest. Numbers are given from the lowest on, so this one's says how many are
    /// open.
    ///
    /// # Errors
    /// ENFILE where those that are left are the daemon's own.
    pub fn fits(&self, fd: BorrowedFd) -> Result<()> {
        if fd.as_raw_fd() < self.end {
            return Ok(());
        }
        tracing::warn!("the guest has {} files open: more are refused (--rlimit-nofile)", self.end);
        Err(Errno::NFILE)
    }

    /// Whether some inodes are held by handle.
    pub fn in_use(&self) -> bool {
        self.mode != FileHandles::Never
    }

    /// How to hold the file of this O_PATH descriptor, which comes back if it is not needed for that.
    ///
    /// # Errors
    /// Those of name_to_handle_at(2), with `--inode-file-handles=mandatory`.
    pub fn place(&self, fd: OwnedFd) -> Result<(Place, Option<OwnedFd>)> {
        if self.mode != FileHandles::Never {
            match self.handle(fd.as_fd()) {
                Ok(handle) => return Ok((Place::Handle(handle), Some(fd))),
                Err(errno) if self.mode == FileHandles::Mandatory => return Err(errno),
                Err(_) => {}
            }
        }
        self.fits(fd.as_fd())?;
        Ok((Place::Fd(fd), None))
    }

    /// How to hold a file that is open for I/O.
    pub fn place_open(&self, fd: BorrowedFd) -> Result<Place> {
        if self.mode != FileHandles::Never {
            match self.handle(fd) {
                Ok(handle) => return Ok(Place::Handle(handle)),
                Err(errno) if self.mode == FileHandles::Mandatory => return Err(errno),
                Err(_) => {}
            }
        }
        let fd = reopen(fd, OFlags::PATH)?;
        self.fits(fd.as_fd())?;
        Ok(Place::Fd(fd))
    }

    /// A handle that was seen to open.
    pub fn handle(&self, fd: BorrowedFd) -> Result<FileHandle> {
        let (raw, mount) = raw_handle(fd)?;
        let (mount, new) = self.mount(mount, fd)?;
        let handle = FileHandle { mount, raw };
        if new {
            handle.open(OFlags::PATH)?;
        }
        Ok(handle)
    }

    /// An open file of the mount, and whether it is the mount's first.
    fn mount(&self, id: i32, fd: BorrowedFd) -> Result<(Arc<OwnedFd>, bool)> {
        if let Some(mount) = self.mounts.get(&id).and_then(|mount| mount.upgrade()) {
            return Ok((mount, false));
        }
        // open_by_handle_at(2) takes no O_PATH descriptor, and to open a device or a FIFO could do anything.
        match FileType::from_raw_mode(fstat(fd)?.st_mode) {
            FileType::Directory | FileType::RegularFile => {}
            _ => return Err(Errno::OPNOTSUPP),
        }
        // Nor must it wait for the holder of a lease.
        let mount = Arc::new(reopen(fd, OFlags::RDONLY | OFlags::NONBLOCK)?);
        self.mounts.insert(id, Arc::downgrade(&mount));
        Ok((mount, true))
    }
}
