//! Listing directories.

use std::ffi::CStr;
use std::os::fd::BorrowedFd;

use rustix::fs::{OFlags, SeekFrom, fdatasync, fsync, seek};
use rustix::io::Errno;
use zerocopy::FromBytes;

use super::fd::stat;
use super::listing::DirState;
use super::name::Purpose;
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

/// A directory's entries, as lseek(2) and getdents64(2) give them.
trait Stream: Copy {
    fn seek(self, offset: u64) -> Result<()>;
    /// Puts the next entries into `entries`: none at the end.
    fn read(self, entries: &mut Vec<u8>) -> Result<()>;
    /// Whether the directory is removed.
    fn is_removed(self) -> bool;
}

impl Stream for BorrowedFd<'_> {
    fn seek(self, offset: u64) -> Result<()> {
        seek(self, SeekFrom::Start(offset)).map(drop)
    }

    fn read(self, entries: &mut Vec<u8>) -> Result<()> {
        sys::getdents(self, entries)
    }

    fn is_removed(self) -> bool {
        stat(self, c"").is_ok_and(|st| st.stx_nlink == 0)
    }
}

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

    fn seek(&mut self, stream: impl Stream, offset: u64) -> Result<()> {
        if self.offset == Some(offset) {
            return Ok(());
        }
        if self.fresh {
            // A descriptor whose first position is the end of an ext4 directory has no entries at its beginning
            // afterwards.
            self.read_more(stream)?;
        }
        self.go(stream, offset)
    }

    /// Lists from the beginning, without entries that were read before.
    fn rewind(&mut self, stream: impl Stream) -> Result<()> {
        self.go(stream, 0)
    }

    fn go(&mut self, stream: impl Stream, offset: u64) -> Result<()> {
        let skips = i64::try_from(offset).is_err();
        self.entries.clear();
        (self.at, self.offset) = (0, None);
        // ext4 refuses the end's position, EINVAL, once the directory is removed.
        let to = if skips { 0 } else { offset };
        stream.seek(to).map_err(|errno| if stream.is_removed() { Errno::NOENT } else { errno })?;
        if skips {
            self.skip(stream, offset)?;
        }
        self.offset = Some(offset);
        Ok(())
    }

    /// Reads from the beginning up to a position that lseek(2) cannot go to: it takes it for negative. NFSv4 servers
    /// have such positions.
    ///
    /// # Errors
    /// EINVAL if no entry has it: the entry before was removed meanwhile, or there was none.
    fn skip(&mut self, stream: impl Stream, offset: u64) -> Result<()> {
        while self.read_more(stream)? {
            while let Some((dirent, _, next)) = self.peek()? {
                self.at = next;
                if dirent.off == offset {
                    return Ok(());
                }
            }
        }
        Err(Errno::INVAL)
    }

    fn read_more(&mut self, stream: impl Stream) -> Result<bool> {
        (self.at, self.fresh) = (0, false);
        self.entries.reserve_exact(BATCH);
        stream.read(&mut self.entries)?;
        Ok(!self.entries.is_empty())
    }

    fn list<S: Stream>(&mut self, stream: S, each: &mut impl FnMut(S, Dirent, &CStr) -> Result<bool>) -> Result<()> {
        loop {
            let Some((dirent, name, next)) = self.peek()? else {
                if self.read_more(stream)? {
                    continue;
                }
                return Ok(());
            };
            if !each(stream, dirent, name)? {
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

impl PassthroughFs {
    /// The type in a listing (DT_REG and others) of an entry whose type on the host is `kind`. `mode`: what the guest
    /// is told of the file, or 0. A regular file may be a device that is kept in an attribute.
    fn kind(&self, kind: u32, mode: u32) -> u32 {
        match self.keeps_owners() && kind == u32::from(libc::DT_REG) {
            // Without a mode that is DT_UNKNOWN.
            true => (mode & libc::S_IFMT) >> 12,
            false => kind,
        }
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
            // The agent makes the guest drop a listing that is out of date.
            CachePolicy::Auto if self.repeats_in(&inode) => OpenFlags::KEEP_CACHE | OpenFlags::CACHE_DIR,
            CachePolicy::Auto | CachePolicy::Never => OpenFlags::empty(),
            CachePolicy::Always | CachePolicy::Metadata => OpenFlags::KEEP_CACHE | OpenFlags::CACHE_DIR,
        };
        let file = self.places.fit(file)?;
        let fh = self.handles.insert(self.handle(&inode, file))?;
        Ok(OpenOut { fh, open_flags: open_flags.bits(), backing_id: 0 })
    }

    fn readdir(&self, node: u64, fh: u64, offset: u64, sink: &mut dyn DirSink) -> Result<()> {
        self.list(node, fh, offset, |_, dirent, name| {
            let fits = sink.fits(name.count_bytes());
            if fits {
                let dirent = Dirent { kind: self.kind(dirent.kind, 0), ..dirent };
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
            // whose times would have to be waited for: the guest then asks for it alone. If the guest learned of a
            // name before its agent repeats that it is new, it would not hear of that.
            let entry = match name.to_bytes() {
                b"." | b".." => EntryOut::default(),
                name if self.agents.is_announced(node, name) => EntryOut::default(),
                _ => self.enter(&parent, dir, name, Purpose::Listing).unwrap_or_default(),
            };
            let dirent = Dirent { kind: self.kind(dirent.kind, entry.attr.mode), ..dirent };
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

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::sync::Arc;

    use super::super::listing::Listings;
    use super::*;

    /// A directory of an NFS server: each entry has a name and the position after it. A read returns two of them.
    struct Nfs {
        entries: RefCell<Vec<(&'static str, u64)>>,
        next: Cell<usize>,
        seeks: Cell<usize>,
    }

    impl Nfs {
        fn new(positions: [u64; 6]) -> Self {
            let entries = [".", "..", "a", "b", "c", "d"].into_iter().zip(positions).collect();
            Self { entries: RefCell::new(entries), next: Cell::new(0), seeks: Cell::new(0) }
        }
    }

    impl Stream for &Nfs {
        fn seek(self, offset: u64) -> Result<()> {
            self.seeks.set(self.seeks.get() + 1);
            if i64::try_from(offset).is_err() {
                return Err(Errno::INVAL);
            }
            let at = |entries: &[(_, u64)]| entries.iter().position(|(_, off)| *off == offset).map(|at| at + 1);
            self.next.set(if offset == 0 { 0 } else { at(&self.entries.borrow()).ok_or(Errno::INVAL)? });
            Ok(())
        }

        fn read(self, buffer: &mut Vec<u8>) -> Result<()> {
            buffer.clear();
            for (name, off) in self.entries.borrow().iter().skip(self.next.get()).take(2) {
                self.next.set(self.next.get() + 1);
                let reclen = (NAME_OFFSET + name.len() + 1).next_multiple_of(8);
                let end = buffer.len() + reclen;
                buffer.extend(7u64.to_ne_bytes());
                buffer.extend(off.to_ne_bytes());
                buffer.extend((reclen as u16).to_ne_bytes());
                buffer.push(libc::DT_REG);
                buffer.extend(name.as_bytes());
                buffer.resize(end, 0);
            }
            Ok(())
        }

        fn is_removed(self) -> bool {
            false
        }
    }

    const WIDE: u64 = 1 << 63;

    /// Lists up to `most` entries from `offset` on.
    fn list(dir: &mut DirState, nfs: &Nfs, offset: u64, most: usize) -> Result<(Vec<String>, u64)> {
        let (mut names, mut position) = (Vec::new(), offset);
        dir.seek(nfs, offset)?;
        dir.list(nfs, &mut |_, dirent: Dirent, name: &CStr| {
            let room = names.len() < most;
            if room {
                names.push(name.to_str().unwrap().to_owned());
                position = dirent.off;
            }
            Ok(room)
        })?;
        dir.rest();
        Ok((names, position))
    }

    #[test]
    fn positions_beyond_those_of_lseek_are_found() {
        // NFSv4 allows any number but 0, 1 and 2, in any order.
        for positions in [
            [WIDE, WIDE + 1, WIDE + 2, WIDE + 3, WIDE + 4, u64::MAX],
            [3, WIDE | 9, 17, u64::MAX - 1, 5, WIDE],
            [3, 4, 5, 6, 7, 8],
        ] {
            let nfs = Nfs::new(positions);
            for most in 1..6 {
                // In one go, no position is sought.
                let mut dir = DirState::new(&Arc::default());
                let (mut all, mut offset) = (Vec::new(), 0);
                let before = nfs.seeks.get();
                nfs.next.set(0);
                loop {
                    let (names, next) = list(&mut dir, &nfs, offset, most).unwrap();
                    if names.is_empty() {
                        break;
                    }
                    (offset, ()) = (next, all.extend(names));
                }
                assert_eq!(
                    (&all[..], nfs.seeks.get()),
                    (&[".", "..", "a", "b", "c", "d"].map(String::from)[..], before)
                );
                // With another descriptor for each request, as after a migration.
                let (mut again, mut offset) = (Vec::new(), 0);
                loop {
                    nfs.next.set(0);
                    let (names, next) = list(&mut DirState::new(&Arc::default()), &nfs, offset, most).unwrap();
                    if names.is_empty() {
                        break;
                    }
                    (offset, ()) = (next, again.extend(names));
                }
                assert_eq!((again, offset), (all, positions[5]));
            }
        }
    }

    #[test]
    fn a_position_that_is_gone_is_an_error() {
        let nfs = Nfs::new([WIDE, WIDE + 1, WIDE + 2, WIDE + 3, WIDE + 4, WIDE + 5]);
        let mut dir = DirState::new(&Arc::<Listings>::default());
        let (names, offset) = list(&mut dir, &nfs, 0, 3).unwrap();
        assert_eq!((names.len(), offset), (3, WIDE + 2));
        nfs.entries.borrow_mut().remove(2);
        assert_eq!(list(&mut DirState::new(&Arc::default()), &nfs, offset, 9).err(), Some(Errno::INVAL));
        assert_eq!(list(&mut dir, &nfs, 0, 9).unwrap().0.len(), 5);
    }
}
