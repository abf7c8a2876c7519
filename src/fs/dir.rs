//! Listing directories.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{OFlags, SeekFrom, fdatasync, fsync, seek};
use rustix::io::Errno;
use zerocopy::FromBytes;

use super::fd::stat;
use super::handle::DirState;
use super::{CachePolicy, PassthroughFs, sys};
use crate::fuse::abi::*;
use crate::fuse::ops::{DirSink, Dirs, Result};

/// Bytes that one getdents64(2) asks for: as many as glibc's readdir(3). A directory of 100,000 entries takes 100
/// calls.
const BATCH: usize = 32 << 10;

/// linux_dirent64 of include/linux/dirent.h, without the name.
#[derive(zerocopy::FromBytes)]
#[repr(C, packed)]
struct LinuxDirent {
    ino: u64,
    off: u64,
    reclen: u16,
    kind: u8,
}

const NAME_OFFSET: usize = size_of::<LinuxDirent>();

impl DirState {
    /// The entry at the position, and where the next one starts. `None`: the buffer has no more.
    fn peek(&self) -> Result<Option<(Dirent, &CStr, usize)>> {
        let Some(rest) = self.entries.get(self.at..).filter(|rest| !rest.is_empty()) else { return Ok(None) };
        let (head, tail) = LinuxDirent::read_from_prefix(rest).map_err(|_| Errno::IO)?;
        let name = CStr::from_bytes_until_nul(tail).map_err(|_| Errno::IO)?;
        let (namelen, kind) = (name.count_bytes() as u32, head.kind.into());
        let next = self.at + usize::from(head.reclen).max(NAME_OFFSET);
        Ok(Some((Dirent { ino: head.ino, off: head.off, namelen, kind }, name, next)))
    }

    fn seek(&mut self, fd: BorrowedFd, offset: u64) -> Result<()> {
        if self.offset == Some(offset) {
            return Ok(());
        }
        if self.fresh {
            // A descriptor whose first position is the end of an ext4 directory has no entries at its beginning
            // afterwards.
            self.read_more(fd)?;
        }
        self.go(fd, offset)
    }

    /// Lists from the beginning, without entries that were read before.
    fn rewind(&mut self, fd: BorrowedFd) -> Result<()> {
        self.go(fd, 0)
    }

    fn go(&mut self, fd: BorrowedFd, offset: u64) -> Result<()> {
        self.entries.clear();
        (self.at, self.offset) = (0, None);
        // ext4 refuses the end's position, EINVAL, once the directory is removed.
        let gone = || stat(fd, c"").is_ok_and(|st| st.stx_nlink == 0);
        seek(fd, SeekFrom::Start(offset)).map_err(|errno| if gone() { Errno::NOENT } else { errno })?;
        self.offset = Some(offset);
        Ok(())
    }

    fn read_more(&mut self, fd: BorrowedFd) -> Result<bool> {
        (self.at, self.fresh) = (0, false);
        self.entries.reserve_exact(BATCH);
        sys::getdents(fd, &mut self.entries)?;
        Ok(!self.entries.is_empty())
    }

    fn list(&mut self, fd: BorrowedFd, each: &mut impl FnMut(BorrowedFd, Dirent, &CStr) -> Result<bool>) -> Result<()> {
        loop {
            let Some((dirent, name, next)) = self.peek()? else {
                if self.read_more(fd)? {
                    continue;
                }
                return Ok(());
            };
            if !each(fd, dirent, name)? {
                return Ok(());
            }
            (self.at, self.offset) = (next, Some(dirent.off));
        }
    }

    /// Frees the buffer at the end of a request. A buffer with entries left stays if there are not too many.
    fn rest(&mut self) {
        if self.at == self.entries.len() {
            (self.entries, self.at, self.kept) = (Vec::new(), 0, None);
        } else if self.kept.is_none() {
            self.kept = self.listings.keep();
            if self.kept.is_none() {
                // The entries are read again.
                (self.entries, self.at, self.offset) = (Vec::new(), 0, None);
            }
        }
    }
}

impl PassthroughFs {
    /// Calls `each` for the entries from `offset` on, until it returns false or there are no more.
    ///
    /// # Errors
    /// ENOENT if the directory is removed, or ESTALE if nothing held it.
    fn list(
        &self,
        node: u64,
        fh: u64,
        offset: u64,
        mut each: impl FnMut(BorrowedFd, Dirent, &CStr) -> Result<bool>,
    ) -> Result<()> {
        if self.has_no_handle(fh) {
            return self.with_dir(node, |spare| {
                let mut dir = spare.listing()?;
                // Other listings use the same descriptor. A new one must not get what an earlier one has read.
                if offset == 0 { dir.rewind(spare.fd()) } else { dir.seek(spare.fd(), offset) }?;
                let listed = dir.list(spare.fd(), &mut each);
                dir.rest();
                listed
            });
        }
        let handle = self.handles.get(node, fh)?;
        let mut dir = handle.listing()?;
        dir.seek(handle.fd(), offset)?;
        let listed = dir.list(handle.fd(), &mut each);
        dir.rest();
        listed
    }
}

impl Dirs for PassthroughFs {
    fn opendir(&self, node: u64, _flags: u32) -> Result<OpenOut> {
        if !self.gives_dir_handles() {
            // The guest's kernel then opens directories by itself.
            return Err(Errno::NOSYS);
        }
        let inode = self.inodes.get(node)?;
        if inode.format() != libc::S_IFDIR {
            return Err(Errno::NOTDIR);
        }
        let file = inode.open(&self.places, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let open_flags = match self.config.cache {
            CachePolicy::Auto | CachePolicy::Never => OpenFlags::empty(),
            CachePolicy::Always | CachePolicy::Metadata => OpenFlags::KEEP_CACHE | OpenFlags::CACHE_DIR,
        };
        self.places.fits(file.as_fd())?;
        let fh = self.handles.insert(self.handle(&inode, file))?;
        Ok(OpenOut { fh, open_flags: open_flags.bits(), backing_id: 0 })
    }

    fn readdir(&self, node: u64, fh: u64, offset: u64, sink: &mut dyn DirSink) -> Result<()> {
        self.list(node, fh, offset, |_, dirent, name| {
            let fits = sink.fits(name.count_bytes());
            if fits {
                sink.push(dirent, name.to_bytes(), None);
            }
            Ok(fits)
        })
    }

    fn readdirplus(&self, node: u64, fh: u64, offset: u64, sink: &mut dyn DirSink) -> Result<()> {
        let parent = self.inodes.get(node)?;
        self.list(node, fh, offset, |dir, dirent, name| {
            if !sink.fits(name.count_bytes()) {
                return Ok(false);
            }
            // Nodeid 0 makes it a mere name: for "." and "..", and for a file that was removed meanwhile. And for one
            // whose times would have to be waited for: the guest then asks for it alone.
            let entry = match name.to_bytes() {
                b"." | b".." => EntryOut::default(),
                _ => self.enter(&parent, dir, name, true, false).unwrap_or_default(),
            };
            sink.push(dirent, name.to_bytes(), Some(&entry));
            Ok(true)
        })
    }

    fn releasedir(&self, node: u64, fh: u64) -> Result<()> {
        if self.has_no_handle(fh) {
            return self.inodes.get(node).map(drop);
        }
        self.handles.remove(node, fh).map(drop)
    }

    fn fsyncdir(&self, node: u64, fh: u64, datasync: bool) -> Result<()> {
        let sync = |fd: BorrowedFd| if datasync { fdatasync(fd) } else { fsync(fd) };
        if self.has_no_handle(fh) {
            return self.with_dir(node, |dir| sync(dir.fd()));
        }
        sync(self.handles.get(node, fh)?.fd())
    }
}
