//! Where in the share a file is.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{CWD, Dir, FileType, OFlags, readlinkat};
use rustix::io::Errno;

use crate::fs::fd::{FdPath, stat};
use crate::fs::inode::Inode;
use crate::fs::key::{dev, mount};
use crate::fs::path::{is_path, join, open_beneath};
use crate::fuse::ops::Result;

/// Inodes that are searched for, by inode number, device number and mount.
type Wanted<'i> = HashMap<(u64, u32, u32), Vec<&'i Inode>>;

/// Finds the paths of files.
pub struct Finder<'a> {
    root: BorrowedFd<'a>,
    /// The share's path as the kernel gives it for files in the share. Ends in a slash.
    prefix: Vec<u8>,
}

impl<'a> Finder<'a> {
    /// # Errors
    /// Those of readlink(2) in /proc/self/fd.
    pub fn new(root: BorrowedFd<'a>) -> Result<Self> {
        let mut prefix = link(root)?;
        if !prefix.ends_with(b"/") {
            prefix.push(b'/');
        }
        Ok(Self { root, prefix })
    }

    /// The path that the kernel gives for this file. Another file may be there now.
    ///
    /// # Errors
    /// ENOENT if the path is not in the share.
    pub fn hint(&self, fd: BorrowedFd) -> Result<Vec<u8>> {
        let path = link(fd)?;
        path.strip_prefix(&*self.prefix).filter(|path| is_path(path)).map(Into::into).ok_or(Errno::NOENT)
    }

    /// Whether the inode's file is at this path.
    pub fn is_at(&self, inode: &Inode, path: &[u8]) -> bool {
        open_beneath(self.root, path, OFlags::PATH).and_then(|fd| inode.is_at(fd.as_fd())) == Ok(true)
    }

    /// Searches the whole share for the files of inodes. Returns their paths by nodeid.
    pub fn search<'i>(&self, wanted: impl Iterator<Item = &'i Inode>) -> HashMap<u64, Vec<u8>> {
        let mut by_number: Wanted<'i> = HashMap::new();
        for inode in wanted {
            by_number.entry((inode.key.ino, inode.key.dev, inode.key.mount)).or_default().push(inode);
        }
        let mut wanted = by_number;
        let mut found = HashMap::new();
        let mut directories = vec![Vec::new()];
        while let Some(path) = directories.pop() {
            if wanted.is_empty() {
                break;
            }
            // What is in an unreadable directory is not found.
            let _ = self.search_in(&path, &mut wanted, &mut found, &mut directories);
        }
        found
    }

    fn search_in(
        &self,
        path: &[u8],
        wanted: &mut Wanted,
        found: &mut HashMap<u64, Vec<u8>>,
        directories: &mut Vec<Vec<u8>>,
    ) -> Result<()> {
        let fd = open_beneath(self.root, path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        for entry in Dir::read_from(&fd)? {
            let entry = entry?;
            let name: CString = entry.file_name().into();
            let path = join(path, name.as_bytes());
            if !is_path(&path) {
                continue;
            }
            let Ok(st) = stat(fd.as_fd(), &name) else { continue };
            if let Entry::Occupied(mut inodes) = wanted.entry((st.stx_ino, dev(&st), mount(&st))) {
                inodes.get_mut().retain(|inode| {
                    let is_it = inode.key.is_of(fd.as_fd(), &name, &st);
                    is_it.then(|| found.insert(inode.id, path.clone()));
                    !is_it
                });
                if inodes.get().is_empty() {
                    inodes.remove();
                }
            }
            if FileType::from_raw_mode(st.stx_mode.into()) == FileType::Directory {
                directories.push(path);
            }
        }
        Ok(())
    }
}

/// What /proc/self/fd says of the descriptor.
fn link(fd: BorrowedFd) -> Result<Vec<u8>> {
    Ok(readlinkat(CWD, FdPath::new(fd).as_cstr(), Vec::new())?.into_bytes())
}
