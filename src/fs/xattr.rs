//! Extended attributes, by names that `--xattrmap` may change.

use std::borrow::Cow;
use std::ffi::CStr;

use rustix::io::Errno;

use super::inode::FdPath;
use super::{PassthroughFs, cred, sys};
use crate::fuse::abi::InitFlags;
use crate::fuse::ops::{Result, Xattrs};

/// XATTR_LIST_MAX and XATTR_SIZE_MAX of include/uapi/linux/limits.h: the longest list of names and the longest value, in
/// bytes. A guest that asks for more gets no larger buffer.
const LONGEST: usize = 64 << 10;

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
        match &self.config.xattrmap {
            Some(map) => map.to_host(name).map_err(Errno::from_raw_os_error),
            None => Ok(Cow::Borrowed(name)),
        }
    }

    fn with_path<R>(&self, node: u64, f: impl FnOnce(&CStr) -> Result<R>) -> Result<R> {
        self.inodes.get(node)?.with_fd(&self.places, |fd| f(FdPath::new(fd).as_cstr()))
    }

    /// Gives a new file its security label.
    pub(super) fn label(&self, node: u64, name: &CStr, value: &[u8]) -> Result<()> {
        let name = self.xattr_name(name)?;
        self.with_path(node, |path| sys::setxattr(path, &name, value, 0))
    }
}

impl Xattrs for PassthroughFs {
    fn setxattr(&self, node: u64, name: &CStr, value: &[u8], flags: u32, kill_sgid: bool) -> Result<()> {
        let name = self.xattr_name(name)?;
        self.writable()?;
        cred::keep_setid(!kill_sgid);
        self.with_path(node, |path| sys::setxattr(path, &name, value, flags))
    }

    fn getxattr(&self, node: u64, name: &CStr, size: usize, to: &mut Vec<u8>) -> Result<usize> {
        let name = match self.xattr_name(name) {
            // A hidden attribute is one that is not there.
            Err(Errno::PERM) => return Err(Errno::NODATA),
            name => name?,
        };
        self.with_path(node, |path| sys::getxattr(path, &name, to, size.min(LONGEST)))
    }

    fn listxattr(&self, node: u64, size: usize, to: &mut Vec<u8>) -> Result<usize> {
        if !self.config.xattr {
            return Err(Errno::NOSYS);
        }
        let Some(map) = &self.config.xattrmap else {
            return self.with_path(node, |path| sys::listxattr(path, to, size.min(LONGEST)));
        };
        let mut host = Vec::new();
        self.with_path(node, |path| sys::listxattr(path, &mut host, LONGEST))?;
        to.clear();
        for name in host.split(|b| *b == 0).filter(|name| !name.is_empty()) {
            if let Some(name) = map.to_guest(name) {
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
        self.with_path(node, |path| sys::removexattr(path, &name))
    }
}
