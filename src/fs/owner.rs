//! Owners, modes and device numbers that are kept in an extended attribute (`--ownership=xattr`).
//!
//! The attribute and its format are those of containers/storage and fuse-overlayfs: `uid:gid:mode:type`, for example
//! `0:42:0640:file` or `0:0:0666:char-1-3`. libkrun leaves out the type, and may have its bits in the mode.

use std::ffi::{CStr, CString};
use std::fmt::{self, Display};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::str::FromStr;
use std::sync::Arc;

use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, Statx, XattrFlags, chmodat, getxattr, lgetxattr, lsetxattr, major, makedev, minor,
    mkdirat, openat, setxattr, unlinkat,
};
use rustix::io::Errno;
use rustix::path::Arg;

use super::attr::decode_rdev;
use super::fd::{FdPath, stat};
use super::idmap::NO_ID;
use super::inode::Inode;
use super::{Ownership, PassthroughFs, cred};
use crate::fuse::abi::*;
use crate::fuse::ops::{Creator, Result};

/// The attribute's name.
pub const OVERRIDE: &CStr = c"user.containers.override_stat";

/// Longest value in bytes: that of fuse-overlayfs. Two ids, a mode, and a type with two numbers have 58 at most.
const LONGEST: usize = 64;

/// What the guest sees of a file that its owner on the host does not decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    uid: u32,
    gid: u32,
    /// With the type.
    mode: u32,
    /// Of a device, as makedev(3) makes it.
    rdev: u64,
}

impl Owner {
    fn format(&self) -> u32 {
        self.mode & libc::S_IFMT
    }

    /// The mode of its file on the host. The daemon's user can always read and write it. For others it is as for those
    /// whom the guest's owner and group do not concern, but they can write nothing. No bit of it gives anybody an id.
    fn host_mode(&self) -> Mode {
        let own = match self.format() {
            libc::S_IFDIR => 0o700,
            _ if self.mode & 0o111 != 0 => 0o700,
            _ => 0o600,
        };
        let others = self.mode & 0o005;
        Mode::from_raw_mode(own | others << 3 | others)
    }

    /// The set-id bits that a change of the file takes away. A set-group-ID bit gives nothing if the group may not
    /// execute the file.
    fn privileges(&self) -> u32 {
        match (self.format(), self.mode & libc::S_IXGRP) {
            (libc::S_IFREG, 0) => self.mode & libc::S_ISUID,
            (libc::S_IFREG, _) => self.mode & (libc::S_ISUID | libc::S_ISGID),
            _ => 0,
        }
    }
}

impl Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}:{}:{:04o}:", self.uid, self.gid, self.mode & 0o7777)?;
        let (major, minor) = (major(self.rdev), minor(self.rdev));
        match self.format() {
            libc::S_IFDIR => write!(f, "dir"),
            libc::S_IFLNK => write!(f, "symlink"),
            libc::S_IFIFO => write!(f, "pipe"),
            libc::S_IFSOCK => write!(f, "socket"),
            libc::S_IFBLK => write!(f, "block-{major}-{minor}"),
            libc::S_IFCHR => write!(f, "char-{major}-{minor}"),
            _ => write!(f, "file"),
        }
    }
}

/// What the attribute's value says. The type may be missing: 0.
impl FromStr for Owner {
    type Err = ();

    fn from_str(value: &str) -> std::result::Result<Self, ()> {
        let mut fields = value.split(':');
        let mut number = |radix| u32::from_str_radix(fields.next().ok_or(())?, radix).map_err(drop);
        let (uid, gid, mode) = (number(10)?, number(10)?, number(8)?);
        if [uid, gid].contains(&NO_ID) {
            return Err(());
        }
        let (format, rdev) = match fields.next() {
            None => (mode & libc::S_IFMT, 0),
            Some(kind) => {
                let mut parts = kind.split('-');
                let format = match parts.next() {
                    Some("dir") => libc::S_IFDIR,
                    Some("pipe") => libc::S_IFIFO,
                    Some("socket") => libc::S_IFSOCK,
                    Some("block") => libc::S_IFBLK,
                    Some("char") => libc::S_IFCHR,
                    _ => libc::S_IFREG,
                };
                let mut number = || parts.next().and_then(|n| n.parse().ok()).unwrap_or(0);
                (format, makedev(number(), number()))
            }
        };
        Ok(Self { uid, gid, mode: format | mode & 0o7777, rdev })
    }
}

/// Whether a file of this type has attributes of the namespace `user.`.
fn has_user_xattrs(format: u32) -> bool {
    matches!(format, libc::S_IFREG | libc::S_IFDIR)
}

/// What `read` finds in the attribute. What is not in the format counts as missing.
fn kept(read: impl FnOnce(&mut [u8]) -> Result<usize>) -> Option<Owner> {
    let mut value = [0; LONGEST];
    let n = read(&mut value).ok()?;
    std::str::from_utf8(value.get(..n)?).ok()?.parse().ok()
}

fn kept_at(fd: BorrowedFd) -> Option<Owner> {
    kept(|to| getxattr(FdPath::new(fd).as_cstr(), OVERRIDE, to))
}

/// The path of a name in a directory, for system calls that take no descriptor of the directory.
fn path_of(dir: BorrowedFd, name: &CStr) -> Result<CString> {
    let path = [dir.as_raw_fd().to_string().as_bytes(), b"/", name.to_bytes()].concat();
    CString::new(path).map_err(|_| Errno::INVAL)
}

/// The attributes of the host with what is kept. A file without the attribute that belongs to the daemon's own user is
/// the guest's root's, as for who creates files ([`cred::Identity`]). So is a symbolic link, which can keep nothing.
fn overlay(st: &Statx, kept: Option<Owner>) -> Statx {
    let (own_uid, own_gid) = cred::own();
    let mut seen = *st;
    let format = u32::from(st.stx_mode) & libc::S_IFMT;
    match kept {
        Some(owner) => {
            (seen.stx_uid, seen.stx_gid) = (owner.uid, owner.gid);
            let format = match (format, owner.format()) {
                (libc::S_IFREG, kind @ (libc::S_IFCHR | libc::S_IFBLK | libc::S_IFIFO | libc::S_IFSOCK)) => kind,
                _ => format,
            };
            seen.stx_mode = (format | owner.mode & 0o7777) as u16;
            if matches!(format, libc::S_IFCHR | libc::S_IFBLK) {
                (seen.stx_rdev_major, seen.stx_rdev_minor) = (major(owner.rdev), minor(owner.rdev));
            }
        }
        None => {
            if st.stx_uid == own_uid.as_raw() || format == libc::S_IFLNK {
                seen.stx_uid = 0;
            }
            if st.stx_gid == own_gid.as_raw() || format == libc::S_IFLNK {
                seen.stx_gid = 0;
            }
        }
    }
    seen
}

fn owner_of(seen: &Statx) -> Owner {
    let rdev = makedev(seen.stx_rdev_major, seen.stx_rdev_minor);
    Owner { uid: seen.stx_uid, gid: seen.stx_gid, mode: seen.stx_mode.into(), rdev }
}

/// Keeps this of a file. `st`: its attributes on the host.
fn keep(fd: BorrowedFd, st: &Statx, owner: Owner) -> Result<()> {
    let mode = owner.host_mode();
    // First: the host sets the attribute only of a file that its owner may write to.
    if Mode::from_raw_mode(u32::from(st.stx_mode) & 0o7777) != mode {
        chmodat(CWD, FdPath::new(fd).as_cstr(), mode, AtFlags::empty())?;
    }
    keep_at(fd, owner)
}

fn keep_at(fd: BorrowedFd, owner: Owner) -> Result<()> {
    setxattr(FdPath::new(fd).as_cstr(), OVERRIDE, owner.to_string().as_bytes(), XattrFlags::empty())
}

/// Whether `--ownership=xattr` can keep owners in the file system of `path`.
///
/// # Errors
/// EOPNOTSUPP if it has no such attributes.
pub fn can_keep_owners(path: impl Arg) -> Result<()> {
    match getxattr(path, OVERRIDE, &mut [0; LONGEST]) {
        Err(Errno::OPNOTSUPP) => Err(Errno::OPNOTSUPP),
        _ => Ok(()),
    }
}

impl PassthroughFs {
    /// Whether owners are kept in the attribute.
    pub(super) fn keeps_owners(&self) -> bool {
        self.config.ownership == Ownership::Xattr
    }

    /// A file's attributes as the guest sees them. It takes one getxattr(2) with `--ownership=xattr`.
    pub(super) fn seen(&self, node: &Arc<Inode>, st: &Statx) -> Statx {
        if !self.keeps_owners() {
            return *st;
        }
        let kept = match node.lazy() {
            _ if !has_user_xattrs(node.format()) => None,
            // It is not opened for that.
            Some((parent, name)) => {
                let owner = parent.with_fd(&self.places, |dir| Ok(self.seen_at(dir, &name, st)));
                return owner.unwrap_or_else(|_| overlay(st, None));
            }
            None => node.with_fd(&self.places, |fd| Ok(kept_at(fd))).unwrap_or(None),
        };
        overlay(st, kept)
    }

    /// The same of the file of a name.
    pub(super) fn seen_at(&self, dir: BorrowedFd, name: &CStr, st: &Statx) -> Statx {
        if !self.keeps_owners() {
            return *st;
        }
        let path = path_of(dir, name).ok().filter(|_| has_user_xattrs(u32::from(st.stx_mode) & libc::S_IFMT));
        overlay(st, path.and_then(|path| kept(|to| lgetxattr(path.as_c_str(), OVERRIDE, to))))
    }

    /// The same of an open file.
    pub(super) fn seen_by(&self, fd: BorrowedFd, st: &Statx) -> Statx {
        match self.keeps_owners() && has_user_xattrs(u32::from(st.stx_mode) & libc::S_IFMT) {
            true => overlay(st, kept_at(fd)),
            false if self.keeps_owners() => overlay(st, None),
            false => *st,
        }
    }

    /// Keeps what a SETATTR says of owner, group and mode.
    pub(super) fn change_owner(&self, fd: BorrowedFd, a: &SetattrIn) -> Result<()> {
        let valid = SetattrValid::from_bits_truncate(a.valid);
        let st = stat(fd, c"")?;
        let format = u32::from(st.stx_mode) & libc::S_IFMT;
        if !has_user_xattrs(format) {
            // tar(1) and dpkg(1) change the owner of each symbolic link. A special file that the host has made stays
            // as it is.
            return if format == libc::S_IFLNK { Ok(()) } else { Err(Errno::PERM) };
        }
        let mut owner = owner_of(&self.seen_by(fd, &st));
        if valid.intersects(SetattrValid::UID | SetattrValid::GID) {
            owner.mode &= !owner.privileges();
        }
        if valid.contains(SetattrValid::UID) {
            owner.uid = self.host_uid(a.uid)?;
        }
        if valid.contains(SetattrValid::GID) {
            owner.gid = self.host_gid(a.gid)?;
        }
        if valid.contains(SetattrValid::MODE) {
            owner.mode = owner.format() | a.mode & 0o7777;
        }
        keep(fd, &st, owner)
    }

    /// Takes the set-id bits of a file away, which somebody changes.
    pub(super) fn drop_privileges(&self, fd: BorrowedFd) -> Result<()> {
        let Some(kept) = kept_at(fd).filter(|kept| kept.mode & (libc::S_ISUID | libc::S_ISGID) != 0) else {
            return Ok(());
        };
        let st = stat(fd, c"")?;
        let mut owner = owner_of(&overlay(&st, Some(kept)));
        owner.mode &= !owner.privileges();
        keep(fd, &st, owner)
    }

    /// What a new file in this directory has. `mode`: with its type.
    fn new_owner(&self, dir: BorrowedFd, by: &Creator, mode: u32, rdev: u32) -> Result<Owner> {
        let (uid, gid) = (self.host_uid(by.uid)?, self.host_gid(by.gid)?);
        let parent = match kept_at(dir) {
            Some(parent) => parent,
            None => owner_of(&overlay(&stat(dir, c"")?, None)),
        };
        let mut owner = Owner { uid, gid, mode: mode & !(by.umask & 0o777), rdev: decode_rdev(rdev) };
        if parent.mode & libc::S_ISGID != 0 {
            owner.gid = parent.gid;
            if owner.format() == libc::S_IFDIR {
                owner.mode |= libc::S_ISGID;
            }
        }
        Ok(owner)
    }

    /// openat(2) of a new file: of `name` or, without, of a temporary file.
    pub(super) fn open_new(
        &self,
        dir: BorrowedFd,
        name: Option<&CStr>,
        flags: OFlags,
        mode: u32,
        by: &Creator,
    ) -> Result<OwnedFd> {
        let at = name.unwrap_or(c".");
        if !self.keeps_owners() {
            let mode = Mode::from_raw_mode(mode & 0o7777);
            return self.as_creator(by, || openat(dir, at, flags, mode));
        }
        self.open_kept(dir, at, flags, self.new_owner(dir, by, libc::S_IFREG | mode & 0o7777, 0)?)
    }

    fn open_kept(&self, dir: BorrowedFd, name: &CStr, flags: OFlags, owner: Owner) -> Result<OwnedFd> {
        let file = openat(dir, name, flags, owner.host_mode())?;
        let kept = keep_at(file.as_fd(), owner);
        if kept.is_err() && !flags.contains(OFlags::TMPFILE) {
            let _ = unlinkat(dir, name, AtFlags::empty());
        }
        kept.map(|()| file)
    }

    /// mknodat(2) or mkdirat(2), with the owner in the attribute. Every file that is no directory is an ordinary one:
    /// the host gets no device, pipe or socket.
    pub(super) fn make_kept(&self, dir: BorrowedFd, name: &CStr, mode: u32, rdev: u32, by: &Creator) -> Result<()> {
        let owner = self.new_owner(dir, by, mode, rdev)?;
        if owner.format() != libc::S_IFDIR {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            return self.open_kept(dir, name, flags, owner).map(drop);
        }
        mkdirat(dir, name, owner.host_mode())?;
        let path = path_of(dir, name)?;
        let kept = lsetxattr(path.as_c_str(), OVERRIDE, owner.to_string().as_bytes(), XattrFlags::empty());
        kept.inspect_err(|_| {
            let _ = unlinkat(dir, name, AtFlags::REMOVEDIR);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_others() {
        let owner = |uid, gid, mode, rdev| Owner { uid, gid, mode, rdev };
        for (value, is) in [
            ("1000:1011:0644:file", owner(1000, 1011, libc::S_IFREG | 0o644, 0)),
            ("1012:1022:4755:file", owner(1012, 1022, libc::S_IFREG | 0o4755, 0)),
            ("0:0:0001:dir", owner(0, 0, libc::S_IFDIR | 1, 0)),
            ("1003:1014:0666:pipe", owner(1003, 1014, libc::S_IFIFO | 0o666, 0)),
            ("1:2:0700:socket", owner(1, 2, libc::S_IFSOCK | 0o700, 0)),
            ("0:6:0600:block-8-0", owner(0, 6, libc::S_IFBLK | 0o600, makedev(8, 0))),
            ("4294967294:0:0600:char-4095-1048575", owner(NO_ID - 1, 0, libc::S_IFCHR | 0o600, makedev(4095, 0xfffff))),
        ] {
            assert_eq!((value.parse(), is.to_string().as_str()), (Ok(is), value));
        }
        // libkrun's.
        assert_eq!("0:5:0644".parse(), Ok(owner(0, 5, 0o644, 0)));
        assert_eq!("0:5:010644".parse(), Ok(owner(0, 5, libc::S_IFIFO | 0o644, 0)));
        for bad in ["", "1", "1:2", "1:2:", "1:2:8:file", "-1:2:0644", "4294967295:0:0644:file", "a:b:c:d", "::"] {
            assert_eq!(bad.parse::<Owner>(), Err(()), "{bad}");
        }
        let longest = owner(NO_ID - 1, NO_ID - 1, libc::S_IFBLK | 0o7777, makedev(u32::MAX, u32::MAX));
        assert!(longest.to_string().len() < LONGEST);
    }

    #[test]
    fn no_mode_on_the_host_gives_anybody_an_id_or_lets_others_write() {
        for mode in 0..=0o7777 {
            for format in [libc::S_IFREG, libc::S_IFDIR, libc::S_IFCHR] {
                let host = Owner { uid: 0, gid: 0, mode: format | mode, rdev: 0 }.host_mode().as_raw_mode();
                assert_eq!((host & 0o7022, host & 0o600), (0, 0o600), "{mode:o}");
                assert_eq!(host & 0o005, mode & 0o005);
            }
        }
    }
}
