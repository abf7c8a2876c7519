//! LOOKUP, FORGET, and the requests that make, move and remove names.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, RenameFlags, Statx, StatxFlags, StatxTimestamp, linkat, mkdirat, mknodat,
    readlinkat_raw, renameat_with, symlinkat, unlinkat,
};
use rustix::io::Errno;

use super::attr::decode_rdev;
use super::cred::{Denied, Identity};
use super::fd::{FdPath, open_path, stat};
use super::inode::{Inode, Lent, Place};
use super::key::{ToldBy, dev, mount, ns};
use super::lease::{Observation, Point, at};
use super::path::is_name;
use super::seen::Seen;
use super::waits::may_wait;
use super::{PassthroughFs, announce};
use crate::fuse::abi::*;
use crate::fuse::ops::{Creator, Mappings, Names, Result, WOULD_WAIT};
use crate::record::{self, claim};

/// Longest target of a symbolic link in bytes, with its NUL: PATH_MAX of include/uapi/linux/limits.h.
const PATH_MAX: usize = 4096;

/// The flags of renameat2(2) that Linux sends.
const RENAMES: RenameFlags = RenameFlags::NOREPLACE.union(RenameFlags::EXCHANGE).union(RenameFlags::WHITEOUT);

/// What an entry is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A listing: the file is not opened, and nobody waits for its [times](Mappings::settle_times).
    Listing,
    /// One file. Nobody waits for its times.
    File,
    /// One file that has its times. A new one has them, too.
    Settled,
    /// As `Settled`, for the agent: the guest's programs do not learn of it.
    Repeated,
}

impl PassthroughFs {
    /// Runs `f` with the directory `parent`, after it has checked `name`.
    ///
    /// # Errors
    /// EINVAL if `name` could lead out of the directory, ENOTDIR if `parent` is none.
    pub(super) fn within<R>(
        &self,
        parent: u64,
        name: &CStr,
        f: impl FnOnce(&Arc<Inode>, BorrowedFd) -> Result<R>,
    ) -> Result<R> {
        if !is_name(name.to_bytes()) {
            return Err(Errno::INVAL);
        }
        let parent = self.inodes.get(parent)?;
        // `f` may change the place of a file that is not a directory (`Inode::hold`), which is locked from here on.
        if parent.format() != libc::S_IFDIR {
            return Err(Errno::NOTDIR);
        }
        parent.with_fd(&self.places, |dir| f(&parent, dir))
    }

    /// As [`observe`](Self::observe).
    pub(super) fn enter(
        &self,
        parent: &Arc<Inode>,
        dir: BorrowedFd,
        name: &CStr,
        purpose: Purpose,
    ) -> Result<EntryOut> {
        self.observe(&self.sight(parent, dir, name), purpose)
    }

    /// What a name leads to. The guest gets one more reference to it.
    ///
    /// # Errors
    /// WOULD_WAIT if the file has yet to get its times.
    fn observe(&self, sight: &Observation, purpose: Purpose) -> Result<EntryOut> {
        at(Point::BeforeStat);
        let seen = Seen::at(sight.parent, sight.dir, sight.name)?;
        at(Point::AfterStat);
        let (inode, st) = self.reference(sight, seen, purpose)?;
        Ok(self.found(sight, &inode, st, purpose))
    }

    /// The inode of a file that was seen by its name, with one more reference for the guest, and its attributes.
    fn reference(
        &self,
        &Observation { parent, dir, name, .. }: &Observation,
        seen: Seen,
        purpose: Purpose,
    ) -> Result<(Arc<Inode>, Statx)> {
        if let Some(inode) = self.inodes.known(&seen.key) {
            let settled = matches!(purpose, Purpose::Settled | Purpose::Repeated);
            if !settled && self.owes_times(inode.id) {
                self.unlearn(inode.id, 1);
                return Err(WOULD_WAIT);
            }
            inode.moved(parent, name);
            return Ok((inode, seen.st));
        }
        self.inodes.have_room()?;
        // Only as long as it is open, that is the file's key.
        let lazy = purpose == Purpose::Listing && !self.inodes.remembers();
        if lazy && seen.key.told_by() != ToldBy::OpenHandle {
            return Ok((self.inodes.learn(seen.key, Place::Name(parent.clone(), name.into())), seen.st));
        }
        let (fd, Seen { st, key, .. }) = match seen {
            Seen { st, key, fd: Some(fd) } => (fd, Seen { st, key, fd: None }),
            _ => {
                let fd = open_path(dir, name)?;
                let seen = Seen::of(parent, fd.as_fd(), Some(name))?;
                (fd, seen)
            }
        };
        let (place, spare) = self.places.place(fd)?;
        let inode = self.inodes.learn(key, place);
        if let Some(fd) = spare {
            inode.keep_named(&self.places, fd);
        }
        Ok((inode, st))
    }

    /// What the guest is told of a file that it finds by its name: with leases, as far as both are watched.
    pub(super) fn found(&self, sight: &Observation, inode: &Arc<Inode>, mut st: Statx, purpose: Purpose) -> EntryOut {
        inode.found_in(sight.parent.id);
        let leased = self.covers(sight, inode, &mut st);
        let name = self.name_timeout(sight, inode);
        let entry = self.observed(sight.parent, inode, &st, leased, name);
        at(Point::BeforeReply);
        if purpose != Purpose::Repeated {
            self.agents.tell(sight.parent.id, sight.name.to_bytes(), entry.nodeid);
        }
        entry
    }

    /// What the guest is told of a file that it gets a reference to. All who go by what it knows hear of that here.
    /// `leased`: the guest hears of changes of the attributes. `name`: how long it may keep the name.
    pub(super) fn observed(
        &self,
        parent: &Inode,
        inode: &Arc<Inode>,
        st: &Statx,
        leased: bool,
        name: Duration,
    ) -> EntryOut {
        self.saw(inode, st);
        let (mut attr, valid) = self.tell(inode, st, leased);
        if inode.key.mount != parent.key.mount {
            if inode.format() == libc::S_IFDIR && self.has(InitFlags::SUBMOUNTS) {
                attr.flags |= ATTR_SUBMOUNT;
            }
            if self.hosts.known(inode.key.dev).is_none() {
                // From now on it is known whether its files are remote.
                let _ = inode.with_fd(&self.places, |fd| Ok(self.hosts.get(inode.key.dev, fd)));
            }
        }
        EntryOut {
            nodeid: inode.id,
            generation: 0,
            entry_valid: name.as_secs(),
            attr_valid: valid.as_secs(),
            entry_valid_nsec: name.subsec_nanos(),
            attr_valid_nsec: valid.subsec_nanos(),
            attr,
        }
    }

    /// To be called before a file is changed, and to be kept until then: those who watch its directory are told.
    /// Costs one readlinkat(2) where the file was opened by handle and not by name in the last second or two: nothing
    /// else says whether the kernel knows the name.
    pub(super) fn named<'a>(&self, inode: &'a Arc<Inode>) -> Option<Lent<'a>> {
        inode.named(&self.places, |parent| self.inodes.get(parent).ok())
    }

    /// Drops references that the guest holds, or would hold if there were no error.
    pub(super) fn unlearn(&self, node: u64, nlookup: u64) {
        self.inodes.forget(node, nlookup);
        if self.window.is_some() && self.inodes.get(node).is_err() {
            self.grants.end(node);
            self.passing().into_iter().for_each(|pass| pass.forget(node));
        }
    }

    /// Gives the file of this name its times. The directory is not locked while the file may be waited for.
    pub(super) fn settle_times_at(&self, parent: u64, name: &CStr) -> Result<()> {
        let inode = self.within(parent, name, |parent, dir| Ok(self.inodes.peek(&Seen::at(parent, dir, name)?.key)))?;
        inode.into_iter().for_each(|inode| self.settle_times(inode.id));
        Ok(())
    }

    pub(super) fn find(&self, parent: u64, name: &CStr, purpose: Purpose) -> Result<EntryOut> {
        self.within(parent, name, |parent, dir| {
            let sight = self.sight(parent, dir, name);
            let leased = sight.named && self.hears();
            let kept = leased || !self.config.negative_timeout.is_zero();
            match self.observe(&sight, purpose) {
                Err(Errno::NOENT) if kept && !self.folds_case(parent, dir) => Ok(self.missing(leased)),
                found => found,
            }
        })
    }

    /// Tells the guest that there is no such name, and for how long it may believe that. Nodeid 0 means ENOENT.
    fn missing(&self, leased: bool) -> EntryOut {
        let valid = self.config.negative_timeout;
        let valid = if leased { valid.max(self.config.lease_timeout) } else { valid };
        EntryOut { entry_valid: valid.as_secs(), entry_valid_nsec: valid.subsec_nanos(), ..EntryOut::default() }
    }

    /// Runs `make` as the creator.
    pub(super) fn as_creator<R>(&self, by: &Creator, make: impl Fn() -> Result<R>) -> Result<R> {
        if self.keeps_owners() {
            return make();
        }
        let (uid, gid) = (self.host_uid(by.uid)?, self.host_gid(by.gid)?);
        let group = by.group.map(|group| self.host_gid(group)).transpose()?;
        let identity = Identity::take(uid, gid, group, by.umask).map_err(|denied| {
            match denied {
                Denied::User(_) => self.say_denied("user", by.uid, uid),
                Denied::Group(_) => self.say_denied("group", by.gid, gid),
            }
            denied.errno()
        })?;
        identity.run(make)
    }

    /// Makes a file with `make`, labels it and enters it. If it cannot be labelled, it is removed. `format`: its type,
    /// S_IFMT bits.
    fn make(
        &self,
        parent: u64,
        name: &CStr,
        format: u32,
        by: &Creator,
        make: impl Fn(BorrowedFd) -> Result<()>,
    ) -> Result<EntryOut> {
        self.writable()?;
        self.inodes.have_room()?;
        self.within(parent, name, |parent, dir| {
            match self.as_creator(by, || make(dir)) {
                Err(Errno::EXIST) if was_made(dir, name, format) => {}
                made => made?,
            }
            let entry = self.enter(parent, dir, name, Purpose::Settled)?;
            if let Some((label, value)) = by.label {
                if let Err(errno) = self.label(entry.nodeid, label, value) {
                    let directory = entry.attr.mode & libc::S_IFMT == libc::S_IFDIR;
                    let _ = unlinkat(dir, name, if directory { AtFlags::REMOVEDIR } else { AtFlags::empty() });
                    self.unlearn(entry.nodeid, 1);
                    return Err(errno);
                }
            }
            Ok(entry)
        })
    }

    /// Runs `make`, which makes a name in this directory. A mount that maps ids refuses that to users without an id
    /// there, EOVERFLOW. The daemon's own user often has none. The guest does not say who asks, but has checked the
    /// permission: the directory's owner does it.
    fn naming(&self, dir: BorrowedFd, make: impl Fn() -> Result<()>) -> Result<()> {
        match make() {
            Err(Errno::OVERFLOW) => {
                let st = stat(dir, c"")?;
                Identity::take(st.stx_uid, st.stx_gid, None, 0).map_err(Denied::errno)?.run(make)
            }
            done => done,
        }
    }

    /// The guest has moved a file to this place. It takes its leases along.
    fn follow(&self, Observation { parent, dir, name, named, .. }: Observation) {
        if self.watch().is_some() && !named {
            announce::look_up_again(&self.agents, parent.id, name.to_bytes());
            self.agents.hand_out();
        }
        if let Some(inode) = Seen::at(parent, dir, name).ok().and_then(|seen| self.inodes.peek(&seen.key)) {
            inode.found_in(parent.id);
            self.has_moved(&inode, parent.id);
        }
    }

    fn pin(&self, parent: (&Inode, BorrowedFd), name: &CStr, removed: bool) -> Option<Arc<Inode>> {
        self.inodes.pin(&self.places, parent, name, removed, self.gives_handles())
    }

    /// The name of this pinned file is removed. If nobody has the file open, its space is free from here on.
    fn was_removed(&self, inode: &Arc<Inode>) {
        if self.inodes.was_removed(inode) {
            self.passing().into_iter().for_each(|pass| pass.forget(inode.id));
        }
    }

    fn remove(&self, parent: u64, name: &CStr, flags: AtFlags) -> Result<()> {
        self.writable()?;
        self.within(parent, name, |parent, dir| {
            let pinned = self.pin((parent, dir), name, true);
            match unlinkat(dir, name, flags) {
                Err(Errno::NOENT) if claim().again.is_some() => {}
                done => done?,
            }
            pinned.into_iter().for_each(|inode| self.was_removed(&inode));
            self.agents.tell(parent.id, name.to_bytes(), 0);
            Ok(())
        })
    }
}

/// Whether an earlier worker process made this file for the request that is served now. It made it after the request
/// had come, and the kernel's clock says when. A file that somebody else made at that moment is taken for it.
pub(super) fn was_made(dir: BorrowedFd, name: &CStr, format: u32) -> bool {
    let Some(since) = claim().again else { return false };
    stat(dir, name).is_ok_and(|st| u32::from(st.stx_mode) & libc::S_IFMT == format && ns(&born(&st)) >= since)
}

/// To be called before a rename. Whether an earlier worker process made it for the request that is served now. An
/// exchange leaves no name missing, so the number of the file is noted before.
fn was_moved(from: (BorrowedFd, &CStr), to: (BorrowedFd, &CStr), flags: RenameFlags) -> bool {
    let number = |(dir, name)| stat(dir, name).map_or(0, |st| st.stx_ino);
    if flags.contains(RenameFlags::EXCHANGE) {
        return record::note(|| number(from)).is_some_and(|moved| moved == number(to));
    }
    if claim().again.is_none() || number(to) == 0 {
        return false;
    }
    match stat(from.0, from.1) {
        // A whiteout is left in its place.
        Ok(st) if flags.contains(RenameFlags::WHITEOUT) => {
            FileType::from_raw_mode(st.stx_mode.into()) == FileType::CharacterDevice
        }
        left => matches!(left, Err(Errno::NOENT)),
    }
}

/// Whether the name is one of this file.
fn is_same(fd: BorrowedFd, dir: BorrowedFd, name: &CStr) -> bool {
    let same = |a: Statx, b: Statx| (a.stx_ino, dev(&a), mount(&a)) == (b.stx_ino, dev(&b), mount(&b));
    stat(fd, c"").is_ok_and(|a| stat(dir, name).is_ok_and(|b| same(a, b)))
}

/// When the file was made, as far as its file system says.
fn born(st: &Statx) -> StatxTimestamp {
    if st.stx_mask & StatxFlags::BTIME.bits() != 0 { st.stx_btime } else { st.stx_ctime }
}

impl Names for PassthroughFs {
    fn lookup(&self, parent: u64, name: &CStr) -> Result<EntryOut> {
        if let Some(entry) = self.export_lookup(parent, name) {
            return entry;
        }
        match self.find(parent, name, Purpose::File) {
            Err(WOULD_WAIT) if may_wait() => {
                self.settle_times_at(parent, name)?;
                self.find(parent, name, Purpose::Settled)
            }
            found => found,
        }
    }

    fn forget(&self, node: u64, nlookup: u64) {
        let marked = self.leases.watch.as_ref().is_some_and(|watch| watch.is_marked(node));
        let inode = if marked { self.inodes.get(node).ok() } else { None };
        self.unlearn(node, nlookup);
        self.forgot(node, inode.as_ref());
    }

    fn readlink(&self, node: u64, to: &mut Vec<u8>) -> Result<()> {
        self.inodes.get(node)?.with_fd(&self.places, |fd| {
            to.resize(PATH_MAX, 0);
            let n = readlinkat_raw(fd, c"", to.as_mut_slice())?;
            to.truncate(n);
            Ok(())
        })
    }

    fn symlink(&self, parent: u64, name: &CStr, target: &CStr, by: &Creator) -> Result<EntryOut> {
        self.make(parent, name, libc::S_IFLNK, by, |dir| symlinkat(target, dir, name))
    }

    fn mknod(&self, parent: u64, name: &CStr, mode: u32, rdev: u32, by: &Creator) -> Result<EntryOut> {
        if self.keeps_owners() {
            return self.make(parent, name, libc::S_IFREG, by, |dir| self.make_kept(dir, name, mode, rdev, by));
        }
        let format = if mode & libc::S_IFMT == 0 { libc::S_IFREG } else { mode & libc::S_IFMT };
        let (kind, mode) = (FileType::from_raw_mode(mode), Mode::from_raw_mode(mode & 0o7777));
        self.make(parent, name, format, by, |dir| mknodat(dir, name, kind, mode, decode_rdev(rdev)))
    }

    fn mkdir(&self, parent: u64, name: &CStr, mode: u32, by: &Creator) -> Result<EntryOut> {
        if self.keeps_owners() {
            let mode = libc::S_IFDIR | mode & 0o7777;
            return self.make(parent, name, libc::S_IFDIR, by, |dir| self.make_kept(dir, name, mode, 0, by));
        }
        self.make(parent, name, libc::S_IFDIR, by, |dir| mkdirat(dir, name, Mode::from_raw_mode(mode & 0o7777)))
    }

    fn unlink(&self, parent: u64, name: &CStr) -> Result<()> {
        self.remove(parent, name, AtFlags::empty())
    }

    fn rmdir(&self, parent: u64, name: &CStr) -> Result<()> {
        self.remove(parent, name, AtFlags::REMOVEDIR)
    }

    fn rename(&self, parent: u64, name: &CStr, newparent: u64, newname: &CStr, flags: u32, by: &Creator) -> Result<()> {
        self.writable()?;
        let flags = RenameFlags::from_bits_retain(flags);
        if !RENAMES.contains(flags) {
            return Err(Errno::INVAL);
        }
        self.within(parent, name, |old, dir| {
            self.within(newparent, newname, |new, newdir| {
                // Whatever moves into it is watched then.
                let (from, to) = (self.sight(old, dir, name), self.sight(new, newdir, newname));
                self.pin((old, dir), name, false);
                let over = self.pin((new, newdir), newname, !flags.contains(RenameFlags::EXCHANGE));
                if was_moved((dir, name), (newdir, newname), flags) {
                    // Only what follows is left to do.
                } else if flags.contains(RenameFlags::WHITEOUT) {
                    let by = Creator { group: None, umask: 0, ..*by };
                    self.as_creator(&by, || renameat_with(dir, name, newdir, newname, flags))?;
                } else {
                    self.naming(newdir, || renameat_with(dir, name, newdir, newname, flags))?;
                }
                over.into_iter().for_each(|inode| self.was_removed(&inode));
                self.agents.tell(parent, name.to_bytes(), 0);
                self.agents.tell(newparent, newname.to_bytes(), 0);
                if self.watch().is_some() || old.id != new.id {
                    self.follow(to);
                    if flags.contains(RenameFlags::EXCHANGE) {
                        self.follow(from);
                    }
                }
                Ok(())
            })
        })
    }

    fn link(&self, node: u64, newparent: u64, newname: &CStr) -> Result<EntryOut> {
        self.writable()?;
        let inode = self.inodes.get(node)?;
        self.within(newparent, newname, |parent, dir| {
            inode.with_fd(&self.places, |fd| {
                let path = FdPath::new(fd);
                match self.naming(dir, || linkat(CWD, path.as_cstr(), dir, newname, AtFlags::SYMLINK_FOLLOW)) {
                    Err(Errno::EXIST) if claim().again.is_some() && is_same(fd, dir, newname) => Ok(()),
                    linked => linked,
                }
            })?;
            self.enter(parent, dir, newname, Purpose::Settled)
        })
    }
}
