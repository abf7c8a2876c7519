//! Extended attributes, by names that `--xattrmap` may change.

use std::borrow::Cow;
use std::ffi::CStr;

use rustix::fs::{XattrFlags, getxattr, getxattr_query, listxattr, listxattr_query, removexattr, setxattr};
use rustix::io::Errno;

use super::fd::FdPath;
use super::owner::OVERRIDE;
use super::{PassthroughFs, cred};
use crate::fuse::abi::InitFlags;
use crate::fuse::ops::{Caller, Result, Xattrs};
use crate::record::claim;

/// The longest list of names and the longest value in bytes: XATTR_LIST_MAX and XATTR_SIZE_MAX of
/// include/uapi/linux/limits.h. A guest that asks for more gets no larger buffer.
const LONGEST: usize = 64 << 10;

/// Lets `read` fill `to`, at most `size` bytes.
fn fill(to: &mut Vec<u8>, size: usize, read: impl FnOnce(&mut [u8]) -> Result<usize>) -> Result<usize> {
    to.clear();
    to.resize(size.min(LONGEST), 0);
    let read = read(to);
    to.truncate(*read.as_ref().unwrap_or(&0));
    read
}

/// The names of attributes; a `size` of 0 asks for the length alone.
fn list(path: &CStr, to: &mut Vec<u8>, size: usize) -> Result<usize> {
    match size {
        0 => listxattr_query(path),
        _ => fill(to, size, |to| listxattr(path, to)),
    }
}

impl PassthroughFs {
    /// The host's name for the guest's.
    fn xattr_name<'a>(&self, name: &'a CStr) -> Result<Cow<'a, CStr>> {
        if !self.config.xattr {
            return Err(Errno::NOSYS);
        }
        let acl = [c"system.posix_acl_access", c"system.posix_acl_default"].contains(&name);
        if acl && !self.has(InitFlags::POSIX_ACL) {
            return Err(Errno::OPNOTSUPP);
        }
        let host = match &self.config.xattrmap {
            Some(map) => map.to_host(name).map_err(Errno::from_raw_os_error)?,
            None => Cow::Borrowed(name),
        };
        if self.keeps_owners() && *host == *OVERRIDE { Err(Errno::PERM) } else { Ok(host) }
    }

    fn with_path<R>(&self, node: u64, f: impl FnOnce(&CStr) -> Result<R>) -> Result<R> {
        self.inodes.get(node)?.with_fd(&self.places, |fd| f(FdPath::new(fd).as_cstr()))
    }

    /// Gives a new file its security label.
    pub(super) fn label(&self, node: u64, name: &CStr, value: &[u8]) -> Result<()> {
        let name = self.xattr_name(name)?;
        self.with_path(node, |path| setxattr(path, &*name, value, XattrFlags::empty()))
    }
}

impl Xattrs for PassthroughFs {
    fn setxattr(&self, node: u64, name: &CStr, value: &[u8], flags: u32, kill_sgid: Option<Caller>) -> Result<()> {
        let name = self.xattr_name(name)?;
        self.writable()?;
        cred::keep_setid();
        let flags = XattrFlags::from_bits_retain(flags);
        let inode = self.inodes.get(node)?;
        let _named = self.named(&inode);
        inode.with_fd(&self.places, |fd| {
            match setxattr(FdPath::new(fd).as_cstr(), &*name, value, flags) {
                // An earlier worker process has set it.
                Err(Errno::EXIST) if claim().again.is_some() => {
                    setxattr(FdPath::new(fd).as_cstr(), &*name, value, XattrFlags::REPLACE)?;
                }
                set => set?,
            }
            match kill_sgid {
                Some(by) => self.clear_set_group_id(fd, by),
                None => Ok(()),
            }
        })
    }

    fn getxattr(&self, node: u64, name: &CStr, size: usize, to: &mut Vec<u8>) -> Result<usize> {
        let name = match self.xattr_name(name) {
            // A hidden attribute does not exist for the guest.
            Err(Errno::PERM) => return Err(Errno::NODATA),
            name => name?,
        };
        self.with_path(node, |path| match size {
            0 => getxattr_query(path, &*name),
            _ => fill(to, size, |to| getxattr(path, &*name, to)),
        })
    }

    fn listxattr(&self, node: u64, size: usize, to: &mut Vec<u8>) -> Result<usize> {
        if !self.config.xattr {
            return Err(Errno::NOSYS);
        }
        let map = self.config.xattrmap.as_ref();
        if map.is_none() && !self.keeps_owners() {
            return self.with_path(node, |path| list(path, to, size));
        }
        let mut host = Vec::new();
        self.with_path(node, |path| list(path, &mut host, LONGEST))?;
        to.clear();
        for name in host.split(|b| *b == 0).filter(|name| !name.is_empty()) {
            if self.keeps_owners() && *name == *OVERRIDE.to_bytes() {
                continue;
            }
            if let Some(name) = map.map_or(Some(name), |map| map.to_guest(name)) {
                to.extend_from_slice(name);
                to.push(0);
            }
        }
        let n = to.len();
        match size {
            0 => to.clear(),
            size if n > size => return Err(Errno::RANGE),
            _ => {}
        }
        Ok(n)
    }

    fn removexattr(&self, node: u64, name: &CStr) -> Result<()> {
        let name = self.xattr_name(name)?;
        self.writable()?;
        let inode = self.inodes.get(node)?;
        let _named = self.named(&inode);
        inode.with_fd(&self.places, |fd| match removexattr(FdPath::new(fd).as_cstr(), &*name) {
            // An earlier worker process has removed it.
            Err(Errno::NODATA) if claim().again.is_some() => Ok(()),
            removed => removed,
        })
    }
}
