//! GETATTR, SETATTR, STATX, STATFS, ACCESS.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::fs::{
    AtFlags, CWD, Gid, Mode, Statx, StatxAttributes, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid,
    chmodat, chownat, fstatfs, ftruncate, makedev, statx, utimensat,
};
use rustix::io::Errno;

use super::PassthroughFs;
use super::fd::{FdPath, stat};
use super::idmap::{BadId, NO_ID};
use super::inode::Inode;
use super::opens::Use;
use super::{cred, is_mounted_read_only, key, sys};
use crate::fuse::abi::*;
use crate::fuse::ops::{Attrs, Caller, Result};

/// What Linux may send along in a SETATTR that changes nothing. So it asks for the set-id bits to be cleared: before
/// fallocate(2), copy_file_range(2) or a write by a user who may not keep them, and for a chown(2) without ids. With a
/// write-back cache, that chown(2) comes with the change time. A write's times come together.
const KILLS: SetattrValid =
    SetattrValid::FH.union(SetattrValid::LOCKOWNER).union(SetattrValid::KILL_SUIDGID).union(SetattrValid::CTIME);

/// A SETATTR that changes the owner or the group.
const OWNER: SetattrValid = SetattrValid::UID.union(SetattrValid::GID);

/// What a guest with a write-back cache sends of each file that it has removed (fuse_flush_times() of fs/fuse/inode.c).
/// Its syncfs(2) would tell of a failure.
const OWN_TIMES: SetattrValid = SetattrValid::MTIME.union(SetattrValid::CTIME);

/// The inode number of a submount's root, without the mount's id. No file system of Linux but overlayfs uses this bit.
const SUBMOUNT_INO: u64 = 1 << 63;

/// Whether this is a regular file with a set-group-ID bit that its group may not execute. Such a bit gives nobody
/// anything, and Linux leaves it to who is in the file's group (setattr_should_drop_sgid() of fs/attr.c).
fn is_sgid_alone(mode: u32) -> bool {
    mode & (libc::S_IFMT | libc::S_ISGID | libc::S_IXGRP) == libc::S_IFREG | libc::S_ISGID
}

/// Clears bits of a regular file's mode.
fn clear_bits(fd: BorrowedFd, st: &Statx, bits: u32) -> Result<()> {
    let mode = u32::from(st.stx_mode);
    if mode & libc::S_IFMT != libc::S_IFREG || mode & bits == 0 {
        return Ok(());
    }
    cred::keep_setid();
    let mode = Mode::from_raw_mode(mode & !bits & 0o7777);
    chmodat(CWD, FdPath::new(fd).as_cstr(), mode, AtFlags::empty())
}

impl PassthroughFs {
    /// The inode number as the guest sees it. Where the guest makes a superblock of its own of a submount, the root of
    /// the submount stands in two: in its own, and where it is mounted. There it must have another number than all
    /// directories above it, and the roots of file systems often have the same. find(1), du(1) and others tell a loop
    /// by that.
    fn ino(&self, st: &Statx) -> u64 {
        let root = st.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
        let directory = u32::from(st.stx_mode) & libc::S_IFMT == libc::S_IFDIR;
        match root && directory && self.has(InitFlags::SUBMOUNTS) && !self.inodes.is_root_mount(key::mount(st)) {
            true => SUBMOUNT_INO | u64::from(key::mount(st)),
            false => st.stx_ino,
        }
    }

    /// Attributes as the guest sees them, without flags.
    pub(super) fn attr(&self, st: &Statx) -> Attr {
        Attr {
            ino: self.ino(st),
            size: st.stx_size,
            blocks: st.stx_blocks,
            atime: st.stx_atime.tv_sec as u64,
            mtime: st.stx_mtime.tv_sec as u64,
            ctime: st.stx_ctime.tv_sec as u64,
            atimensec: st.stx_atime.tv_nsec,
            mtimensec: st.stx_mtime.tv_nsec,
            ctimensec: st.stx_ctime.tv_nsec,
            mode: st.stx_mode.into(),
            nlink: st.stx_nlink,
            uid: self.config.uid_map.to_guest(st.stx_uid),
            gid: self.config.gid_map.to_guest(st.stx_gid),
            rdev: encode_rdev(st.stx_rdev_major, st.stx_rdev_minor),
            blksize: st.stx_blksize,
            flags: 0,
        }
    }

    /// How long the guest may use these attributes. If the host clears set-id bits, the guest does not hear of it: it
    /// would still go by them when it executes the file. `leased`: the guest hears of changes by others.
    pub(super) fn attr_timeout(&self, st: &Statx, leased: bool) -> Duration {
        let mode = u32::from(st.stx_mode);
        let set_id = mode & libc::S_IFMT == libc::S_IFREG && mode & (libc::S_ISUID | libc::S_ISGID) != 0;
        let told = !(set_id && self.has(InitFlags::HANDLE_KILLPRIV_V2));
        if is_sgid_alone(mode) {
            self.knows_sgid_alone.store(true, Ordering::Relaxed);
        }
        if told { self.timeout_of(leased) } else { Duration::ZERO }
    }

    /// What the guest is told of a file, and how long it may use that. The windows hear of the size, and the file may
    /// get DAX. `leased`: the guest hears of changes.
    pub(super) fn tell(&self, node: &Arc<Inode>, st: &Statx, leased: bool) -> (Attr, Duration) {
        let size = self.tell_size(node, st.stx_size);
        let kept = self.keeps_owners().then(|| self.seen(node, st));
        let seen = kept.as_ref().unwrap_or(st);
        let valid = self.attr_timeout(seen, leased && !node.has_writers());
        (Attr { size, flags: self.dax_flag(node, st), ..self.attr(seen) }, valid)
    }

    fn attr_out(&self, node: &Arc<Inode>, st: &Statx, leased: bool) -> AttrOut {
        let (attr, valid) = self.tell(node, st, leased);
        AttrOut { attr_valid: valid.as_secs(), attr_valid_nsec: valid.subsec_nanos(), dummy: 0, attr }
    }

    /// Runs `f` with the handle's descriptor or, without a handle, with an O_PATH one.
    fn with_either<R>(
        &self,
        inode: &Arc<Inode>,
        fh: Option<u64>,
        f: impl FnOnce(BorrowedFd) -> Result<R>,
    ) -> Result<R> {
        match fh.filter(|fh| !self.has_no_handle(*fh)) {
            Some(fh) => f(self.handles.get(inode.id, fh)?.fd()),
            None => inode.with_fd(&self.places, f),
        }
    }

    /// Sets which set-id bits the thread's next change of a file leaves: all, or those that `kills` may leave. If the
    /// guest does not say who that is, a set-group-ID bit that gives nothing stays.
    ///
    /// Takes no system call as long as the guest knows no file with such a bit.
    pub(super) fn set_id_kept(&self, fd: BorrowedFd, kills: Option<Caller>) {
        let Some(by) = kills else { return cred::keep_setid() };
        if self.keeps_owners() {
            if let Err(errno) = self.drop_privileges(fd) {
                tracing::warn!("a file that the guest changes keeps its set-id bits: {errno}");
            }
            // Bits that the host has given it.
            return cred::clear_setid(None);
        }
        let sgid_alone = self.knows_sgid_alone.load(Ordering::Relaxed);
        let st = if sgid_alone { stat(fd, c"").ok() } else { None };
        cred::clear_setid(st.filter(|st| is_sgid_alone(st.stx_mode.into())).and_then(|st| match by.gid {
            NO_ID => Some(Gid::from_raw(st.stx_gid)),
            gid => self.host_gid(gid).ok().map(Gid::from_raw),
        }));
    }

    /// Clears the set-id bits of a file that the caller changes, unseen by the host's kernel. The guest has found that
    /// some must go. If it does not say who the caller is, all go.
    fn clear_set_id(&self, fd: BorrowedFd, by: Caller) -> Result<()> {
        let st = stat(fd, c"")?;
        let keeps = is_sgid_alone(st.stx_mode.into()) && (by.uid == 0 || self.is_of_group(by, &st));
        clear_bits(fd, &st, libc::S_ISUID | if keeps { 0 } else { libc::S_ISGID })
    }

    /// Clears the set-group-ID bit of a file whose access ACL the caller sets.
    pub(super) fn clear_set_group_id(&self, fd: BorrowedFd, by: Caller) -> Result<()> {
        let st = stat(fd, c"")?;
        let keeps = self.is_of_group(by, &st);
        clear_bits(fd, &st, if keeps { 0 } else { libc::S_ISGID })
    }

    /// Whether the caller's known group is the file's.
    fn is_of_group(&self, by: Caller, st: &Statx) -> bool {
        by.gid != NO_ID && self.host_gid(by.gid).ok() == Some(st.stx_gid)
    }

    fn change(&self, fd: BorrowedFd, a: &SetattrIn, by: Caller, inode: &Arc<Inode>) -> Result<()> {
        let valid = SetattrValid::from_bits_truncate(a.valid);
        if (valid - KILLS).is_empty() {
            if self.has(InitFlags::HANDLE_KILLPRIV_V2) {
                self.clear_set_id(fd, by)?;
            }
            // The change time, and no more bits. Only the guest knows whether the caller may do that.
            cred::keep_setid();
            let _ = chownat(fd, c"", None, None, AtFlags::EMPTY_PATH);
            return Ok(());
        }
        if valid.intersects(OWNER | SetattrValid::MODE) {
            match self.keeps_owners() {
                true => self.change_owner(fd, a)?,
                false => self.change_host_owner(fd, a, by)?,
            }
        }
        if valid.contains(SetattrValid::SIZE) {
            let kill = self.has(InitFlags::HANDLE_KILLPRIV_V2) && valid.contains(SetattrValid::KILL_SUIDGID);
            self.set_id_kept(fd, kill.then_some(by));
            let by_fh = valid.contains(SetattrValid::FH);
            self.resize(inode, a.size, || match by_fh && self.has_no_handle(a.fh) {
                // The daemon may not be able to open it again.
                true if inode.has_writable() => self.truncate_unopened(inode.id, a),
                false if by_fh => ftruncate(self.handles.get(inode.id, a.fh)?.fd(), a.size),
                _ => sys::truncate(FdPath::new(fd).as_cstr(), a.size),
            })?;
            self.drop_capability(fd);
        }
        if valid.intersects(SetattrValid::ATIME | SetattrValid::MTIME) {
            let time = |set, now, sec: u64, nsec: u32| match (valid.contains(set), valid.contains(now)) {
                (false, _) => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
                (_, true) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
                // UTIME_NOW and UTIME_OMIT are over 999,999,999, and would not be taken for a time.
                _ => Timespec { tv_sec: sec as i64, tv_nsec: i64::from(nsec.min(999_999_999)) },
            };
            let times = Timestamps {
                last_access: time(SetattrValid::ATIME, SetattrValid::ATIME_NOW, a.atime, a.atimensec),
                last_modification: time(SetattrValid::MTIME, SetattrValid::MTIME_NOW, a.mtime, a.mtimensec),
            };
            utimensat(fd, c"", &times, AtFlags::EMPTY_PATH)?;
        }
        Ok(())
    }

    /// Sets owner, group and mode of a file on the host, as a SETATTR says.
    fn change_host_owner(&self, fd: BorrowedFd, a: &SetattrIn, by: Caller) -> Result<()> {
        let valid = SetattrValid::from_bits_truncate(a.valid);
        // The owner comes before the mode, since chown(2) clears set-id bits.
        if valid.intersects(OWNER) {
            let uid = valid.contains(SetattrValid::UID).then(|| self.host_uid(a.uid)).transpose()?;
            let gid = valid.contains(SetattrValid::GID).then(|| self.host_gid(a.gid)).transpose()?;
            // The kernel also looks whether the caller is in the new group, which only the guest knows. So who keeps a
            // set-group-ID bit has CAP_FSETID here. The guest's root is taken to have it.
            let known = self.has(InitFlags::HANDLE_KILLPRIV_V2) && ![0, NO_ID].contains(&by.uid);
            match known && !self.is_of_group(by, &stat(fd, c"")?) {
                true => self.set_id_kept(fd, Some(by)),
                false => cred::keep_setid(),
            }
            let owned = chownat(fd, c"", uid.map(Uid::from_raw), gid.map(Gid::from_raw), AtFlags::EMPTY_PATH);
            if let Err(Errno::INVAL | Errno::PERM) = owned {
                let st = stat(fd, c"")?;
                match (uid, gid) {
                    (Some(uid), _) if uid != st.stx_uid => self.say_denied("user", a.uid, uid),
                    (_, Some(gid)) if gid != st.stx_gid => self.say_denied("group", a.gid, gid),
                    _ => {}
                }
            }
            owned?;
            self.drop_capability(fd);
        }
        if valid.contains(SetattrValid::MODE) {
            cred::keep_setid();
            chmodat(CWD, FdPath::new(fd).as_cstr(), Mode::from_raw_mode(a.mode & 0o7777), AtFlags::empty())?;
        }
        Ok(())
    }
}

impl PassthroughFs {
    fn say_removed(&self) {
        if !self.said_removed.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "the shared directory was removed on the host: the guest sees an empty one, whatever has its name now; \
                 to share that, start the daemon anew"
            );
        }
    }

    /// Says that the daemon may not act as an id or give files to it: once, since a guest may ask at any time.
    pub(super) fn say_denied(&self, kind: &str, guest: u32, host: u32) {
        if self.said_denied.swap(true, Ordering::Relaxed) {
            return;
        }
        let (uid, gid) = cred::own();
        let (own, option) = if kind == "user" { (uid.as_raw(), "uid") } else { (gid.as_raw(), "gid") };
        tracing::warn!(
            "the guest's {kind} {guest}, the daemon's {kind} {host}, is refused: an ordinary user's daemon can neither \
             act as it nor give files to it; --{option}-map gives the daemon ids of /etc/sub{option}, \
             --translate-{option} squash-guest:0:{own}:4294967295 makes all files the daemon's own, and \
             --ownership=xattr keeps ids in an attribute; this is said once"
        );
    }

    fn truncate_unopened(&self, node: u64, a: &SetattrIn) -> Result<()> {
        self.with_file(node, a.fh, (Use::Write, 0), |file| ftruncate(file.fd, a.size))
    }
}

impl Attrs for PassthroughFs {
    fn getattr(&self, node: u64, fh: Option<u64>) -> Result<AttrOut> {
        let inode = self.inodes.get(node)?;
        let (st, leased) = self.look(&inode, || match fh.filter(|fh| !self.has_no_handle(*fh)) {
            Some(fh) => stat(self.handles.get(node, fh)?.fd(), c""),
            None => inode.stat(&self.places),
        })?;
        if node == ROOT_ID && st.stx_nlink == 0 {
            self.say_removed();
        }
        self.saw(&inode, &st);
        Ok(self.attr_out(&inode, &st, leased))
    }

    fn setattr(&self, node: u64, attr: &SetattrIn, by: Caller) -> Result<AttrOut> {
        self.writable()?;
        let inode = self.inodes.get(node)?;
        if let Some(last) =
            inode.last().filter(|_| (SetattrValid::from_bits_truncate(attr.valid) - OWN_TIMES).is_empty())
        {
            return Ok(self.attr_out(&inode, &last, false));
        }
        let _named = self.named(&inode);
        inode.with_fd(&self.places, |fd| {
            self.change(fd, attr, by, &inode)?;
            let (st, leased) = self.look(&inode, || stat(fd, c""))?;
            Ok(self.attr_out(&inode, &st, leased))
        })
    }

    fn statx(&self, node: u64, fh: Option<u64>, flags: u32, mask: u32) -> Result<StatxOut> {
        let sync = AtFlags::STATX_FORCE_SYNC | AtFlags::STATX_DONT_SYNC;
        let flags = AtFlags::from_bits_truncate(flags) & sync | AtFlags::EMPTY_PATH;
        let mask = StatxFlags::from_bits_truncate(mask) & (StatxFlags::BASIC_STATS | StatxFlags::BTIME);
        let inode = self.inodes.get(node)?;
        let (st, leased) = self.look(&inode, || {
            self.with_either(&inode, fh, |fd| statx(fd, c"", flags, mask | StatxFlags::BASIC_STATS))
        })?;
        self.saw(&inode, &st);
        let st = self.seen(&inode, &st);
        let valid = self.attr_timeout(&st, leased && !inode.has_writers());
        let size = self.tell_size(&inode, st.stx_size);
        Ok(StatxOut {
            attr_valid: valid.as_secs(),
            attr_valid_nsec: valid.subsec_nanos(),
            flags: 0,
            spare: [0; 2],
            stat: FuseStatx { size, ..self.fuse_statx(&st) },
        })
    }

    fn statfs(&self, node: u64) -> Result<StatfsOut> {
        let st = self.inodes.get(node)?.with_fd(&self.places, |fd| fstatfs(fd))?;
        let unit = u64::try_from(st.f_frsize).unwrap_or(1).max(1);
        let most = self.config.report_size.map_or(u64::MAX, |size| size / unit);
        Ok(StatfsOut {
            blocks: st.f_blocks.min(most),
            bfree: st.f_bfree.min(most),
            bavail: st.f_bavail.min(most),
            files: st.f_files,
            ffree: st.f_ffree,
            bsize: st.f_bsize as u32,
            namelen: st.f_namelen as u32,
            frsize: st.f_frsize as u32,
            ..Default::default()
        })
    }

    /// Linux checks permissions by itself (default_permissions) and does not send ACCESS. This serves other guests.
    fn access(&self, node: u64, uid: u32, gid: u32, mask: u32) -> Result<()> {
        if uid == NO_ID || gid == NO_ID {
            return Err(Errno::INVAL);
        }
        let want = mask & 0o7;
        let st = self.inodes.get(node)?.with_fd(&self.places, |fd| {
            if want & 0o2 != 0 && is_mounted_read_only(fd)? {
                return Err(Errno::ROFS);
            }
            Ok(self.seen_by(fd, &stat(fd, c"")?))
        })?;
        let attr = self.attr(&st);
        let allowed = match uid {
            0 if want & 0o1 == 0 || attr.mode & 0o111 != 0 || attr.mode & libc::S_IFMT == libc::S_IFDIR => 0o7,
            0 => 0o6,
            _ if uid == attr.uid => attr.mode >> 6,
            _ if gid == attr.gid => attr.mode >> 3,
            _ => attr.mode,
        };
        if want & 0o2 != 0 {
            self.writable()?;
        }
        if want & !allowed == 0 { Ok(()) } else { Err(Errno::ACCESS) }
    }
}

impl PassthroughFs {
    fn fuse_statx(&self, st: &Statx) -> FuseStatx {
        let time = |t: &rustix::fs::StatxTimestamp| SxTime { tv_sec: t.tv_sec, tv_nsec: t.tv_nsec, reserved: 0 };
        FuseStatx {
            mask: st.stx_mask & (StatxFlags::BASIC_STATS | StatxFlags::BTIME).bits(),
            blksize: st.stx_blksize,
            attributes: st.stx_attributes.bits(),
            nlink: st.stx_nlink,
            uid: self.config.uid_map.to_guest(st.stx_uid),
            gid: self.config.gid_map.to_guest(st.stx_gid),
            mode: st.stx_mode,
            ino: self.ino(st),
            size: st.stx_size,
            blocks: st.stx_blocks,
            attributes_mask: st.stx_attributes_mask.bits(),
            atime: time(&st.stx_atime),
            btime: time(&st.stx_btime),
            ctime: time(&st.stx_ctime),
            mtime: time(&st.stx_mtime),
            rdev_major: st.stx_rdev_major,
            rdev_minor: st.stx_rdev_minor,
            dev_major: st.stx_dev_major,
            dev_minor: st.stx_dev_minor,
            ..Default::default()
        }
    }

    pub(super) fn host_uid(&self, uid: u32) -> Result<u32> {
        self.config.uid_map.to_host(uid).map_err(BadId::errno)
    }

    pub(super) fn host_gid(&self, gid: u32) -> Result<u32> {
        self.config.gid_map.to_host(gid).map_err(BadId::errno)
    }
}

/// A device number as the kernel passes it in 32 bits (new_encode_dev of include/linux/kdev_t.h).
fn encode_rdev(major: u32, minor: u32) -> u32 {
    minor & 0xff | major << 8 & 0xfff00 | minor << 12 & 0xfff0_0000
}

/// The device number of [`encode_rdev`]'s 32 bits.
pub(super) fn decode_rdev(rdev: u32) -> u64 {
    makedev(rdev >> 8 & 0xfff, rdev & 0xff | rdev >> 12 & 0xfff00)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers() {
        for (major, minor) in [(0, 0), (8, 1), (259, 0), (4095, 0xfffff)] {
            assert_eq!(decode_rdev(encode_rdev(major, minor)), makedev(major, minor));
        }
    }
}
