//! Paths inside of the share: those of open files, and the way back.

use std::collections::HashMap;
use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, ResolveFlags, openat2, readlinkat};
use rustix::io::Errno;

use super::inode::{FdPath, Inode, stat};
use crate::fuse::ops::Result;

/// Longest path: PATH_MAX without its NUL.
const MAX_PATH: usize = 4095;

/// NAME_MAX.
const MAX_NAME: usize = 255;

/// Whether this names an entry of a directory, and nothing else.
pub fn is_name(name: &[u8]) -> bool {
    (1..=MAX_NAME).contains(&name.len()) && !matches!(name, b"." | b"..") && !name.iter().any(|b| matches!(b, 0 | b'/'))
}

/// Whether this leads from a directory to something below it, as far as one can see.
pub fn is_path(path: &[u8]) -> bool {
    path.len() <= MAX_PATH && path.split(|b| *b == b'/').all(is_name)
}

fn open(root: BorrowedFd, path: &[u8], flags: OFlags) -> Result<OwnedFd> {
    let path = if path.is_empty() { b"." } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    openat2(root, path, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty(), resolve)
}

/// Opens what is at a path below `root` (empty: `root` itself) as an O_PATH descriptor. No symbolic link is followed.
pub fn open_beneath(root: BorrowedFd, path: &[u8]) -> Result<OwnedFd> {
    open(root, path, OFlags::PATH)
}

/// `name` in the directory at `path`.
pub fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    if path.is_empty() { name.into() } else { [path, b"/", name].concat() }
}

/// Finds the paths of files.
pub struct Finder<'a> {
    root: BorrowedFd<'a>,
    /// The share's path, as the kernel tells those of files in it. Ends in a slash.
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

    /// What the kernel says the path is. It can be any file's.
    ///
    /// # Errors
    /// ENOENT where it is not in the share.
    pub fn hint(&self, fd: BorrowedFd) -> Result<Vec<u8>> {
        let path = link(fd)?;
        path.strip_prefix(&*self.prefix).filter(|path| is_path(path)).map(Into::into).ok_or(Errno::NOENT)
    }

    /// Whether the inode's file is at this path.
    pub fn is_at(&self, inode: &Inode, path: &[u8]) -> bool {
        let there = open_beneath(self.root, path).and_then(|fd| stat(fd.as_fd(), c""));
        there.is_ok_and(|st| inode.is_of(&st))
    }

    /// Looks for the files of inodes in the whole share: paths by nodeid.
    pub fn search<'i>(&self, wanted: impl Iterator<Item = &'i Inode>) -> HashMap<u64, Vec<u8>> {
        let mut wanted: HashMap<_, _> = wanted.map(|inode| (inode.key, inode)).collect();
        let mut found = HashMap::new();
        let mut directories = vec![Vec::new()];
        while let Some(path) = directories.pop() {
            if wanted.is_empty() {
                break;
            }
            // What cannot be read has nothing to be found.
            let _ = self.search_in(&path, &mut wanted, &mut found, &mut directories);
        }
        found
    }

    fn search_in(
        &self,
        path: &[u8],
        wanted: &mut HashMap<super::inode::Key, &Inode>,
        found: &mut HashMap<u64, Vec<u8>>,
        directories: &mut Vec<Vec<u8>>,
    ) -> Result<()> {
        let fd = open(self.root, path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        for entry in Dir::read_from(&fd)? {
            let entry = entry?;
            let name: CString = entry.file_name().into();
            let path = join(path, name.as_bytes());
            if !is_path(&path) {
                continue;
            }
            let Ok(st) = stat(fd.as_fd(), &name) else { continue };
            let key = super::inode::Key::of(&st);
            if wanted.get(&key).is_some_and(|inode| inode.is_of(&st)) {
                wanted.remove(&key).map(|inode| found.insert(inode.id, path.clone()));
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
