//! Files by their handle (open_by_handle_at(2)), which needs no open descriptor for each of them.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Weak};

use dashmap::DashMap;
use rustix::fs::{FileType, OFlags, fstat, fstatfs};
use rustix::io::Errno;

use super::fd::reopen;
use super::sys::{self, RawHandle};
use crate::fuse::ops::Result;
use crate::record;
use crate::watch::FileId;

/// A file handle and an open file of its mount.
pub struct FileHandle {
    mount: Arc<Mount>,
    raw: RawHandle,
}

/// A mount that has handles.
struct Mount {
    /// An open file of it.
    fd: OwnedFd,
    /// See [`keeps_name`].
    keeps_name: bool,
}

impl FileHandle {
    /// By what the watch knows the file. `None` if the handle is too long.
    pub fn file_id(&self) -> Option<FileId> {
        FileId::new(self.raw.kind, &self.raw.data)
    }

    /// As the next worker process finds it.
    pub fn recorded(&self) -> record::Place<'_> {
        record::Place::Handle { mount: self.mount.fd.as_raw_fd(), kind: self.raw.kind, data: &self.raw.data }
    }

    pub fn open(&self, flags: OFlags) -> Result<OwnedFd> {
        sys::open_by_handle(self.mount.fd.as_fd(), &self.raw, flags.bits() as i32)
    }

    /// As [`keeps_name`], of its file.
    pub fn keeps_name(&self) -> bool {
        self.mount.keeps_name
    }
}

/// Whether a descriptor that nobody needs does harm: the file is on NFS, whose client gives it another name (.nfs...)
/// instead of removing it while any descriptor refers to it, O_PATH ones included. Until then its handle opens it.
pub fn keeps_name(fd: BorrowedFd) -> bool {
    fstatfs(fd).is_ok_and(|st| st.f_type == libc::NFS_SUPER_MAGIC)
}

/// An open file of each mount that has handles. It is a directory, unless a file is all that was mounted: an open file
/// keeps its space when the host removes it.
#[derive(Default)]
pub struct Mounts {
    /// By mount id. `None`: its handles do not last.
    all: DashMap<i32, Option<Weak<Mount>>>,
    /// The mount of the shared directory, which stays.
    shared: Option<Arc<Mount>>,
}

impl Mounts {
    /// Opens the shared directory.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    pub fn new(root: BorrowedFd) -> Result<Self> {
        let mut mounts = Self::default();
        mounts.shared = Some(mounts.handle(root)?.mount);
        Ok(mounts)
    }

    /// A handle of this file. The first of each mount was seen to open.
    ///
    /// # Errors
    /// Those of name_to_handle_at(2) and open_by_handle_at(2). EOPNOTSUPP if the first file of a mount is neither a
    /// directory nor a regular file, or if it is a FUSE mount.
    pub fn handle(&self, fd: BorrowedFd) -> Result<FileHandle> {
        let (raw, mount) = sys::name_to_handle(fd)?;
        let (mount, new) = self.mount(mount, fd)?;
        let handle = FileHandle { mount, raw };
        if new {
            handle.open(OFlags::PATH)?;
        }
        Ok(handle)
    }

    /// A handle that an earlier worker process had. `mount`: its descriptor of the mount.
    ///
    /// # Errors
    /// EBADF if that is gone.
    pub fn handle_again(&self, mount: RawFd, raw: RawHandle) -> Result<FileHandle> {
        let of = |known: &Option<Weak<Mount>>| known.as_ref()?.upgrade().filter(|known| known.fd.as_raw_fd() == mount);
        if let Some(mount) = self.all.iter().find_map(|known| of(&known)) {
            return Ok(FileHandle { mount, raw });
        }
        let fd = record::left_behind(mount).ok_or(Errno::BADF)?;
        let (_, id) = sys::name_to_handle(fd.as_fd())?;
        Ok(FileHandle { mount: self.keep(id, fd), raw })
    }

    /// From now on, this is the open file of the mount.
    fn keep(&self, id: i32, fd: OwnedFd) -> Arc<Mount> {
        let keeps_name = keeps_name(fd.as_fd());
        let mount = Arc::new(Mount { fd, keeps_name });
        self.all.insert(id, Some(Arc::downgrade(&mount)));
        mount
    }

    /// An open file of the mount, and whether it was opened just now.
    fn mount(&self, id: i32, fd: BorrowedFd) -> Result<(Arc<Mount>, bool)> {
        if let Some(known) = self.all.get(&id) {
            match known.as_ref().map(Weak::upgrade) {
                Some(Some(mount)) => return Ok((mount, false)),
                // The number may be another mount's by now. That one is then served by descriptors too.
                None => return Err(Errno::OPNOTSUPP),
                Some(None) => {}
            }
        }
        // FUSE names a file by what the kernel has in its cache. Once the kernel drops the file from there, the handle
        // is stale, unless the server can find it again (FUSE_EXPORT_SUPPORT), which cannot be seen from outside.
        if fstatfs(fd)?.f_type == libc::FUSE_SUPER_MAGIC {
            self.all.insert(id, None);
            return Err(Errno::OPNOTSUPP);
        }
        // open_by_handle_at(2) takes no O_PATH descriptor. Opening a device or a FIFO could do anything.
        match FileType::from_raw_mode(fstat(fd)?.st_mode) {
            FileType::Directory | FileType::RegularFile => {}
            _ => return Err(Errno::OPNOTSUPP),
        }
        // NONBLOCK: does not wait for the holder of a lease.
        let fd = reopen(fd, OFlags::RDONLY | OFlags::NONBLOCK)?;
        Ok((self.keep(id, fd), true))
    }
}
