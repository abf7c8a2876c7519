//! Regular files: OPEN to RELEASE, data, space, durability.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use rustix::fs::{
    self, FallocateFlags, OFlags, SeekFrom, copy_file_range, fallocate, fcntl_getfl, fdatasync, fsync, seek,
};
use rustix::io::Errno;
use zerocopy::{Immutable, IntoBytes};

use super::contents::{CacheValidator, Pages};
use super::fd::{FdPath, stat};
use super::handle::Handle;
use super::host::HostFs;
use super::inode::{Inode, Spare};
use super::name::Purpose;
use super::name::was_made;
use super::opens::{Opened, Use};
use super::seen::Seen;
use super::waits::may_wait;
use super::{CachePolicy, PassthroughFs, cred, sys};
use crate::fuse::Reply;
use crate::fuse::abi::*;
use crate::fuse::buf::IoRange;
use crate::fuse::ops::{Caller, Creator, Files, Result, Threads, WOULD_WAIT};
use crate::record;

/// The modes of fallocate(2) that Linux sends. Other modes move or cut a file's contents, which may be mapped. The
/// window's guard does not see that.
const SPACE: [FallocateFlags; 5] = [
    FallocateFlags::empty(),
    FallocateFlags::KEEP_SIZE,
    FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE),
    FallocateFlags::ZERO_RANGE,
    FallocateFlags::ZERO_RANGE.union(FallocateFlags::KEEP_SIZE),
];

/// The flags of pwritev2(2) for a write to a file that is open with these flags.
fn sync_flags(flags: u32) -> i32 {
    let flags = OFlags::from_bits_retain(flags);
    // O_SYNC includes O_DSYNC.
    if flags.contains(OFlags::SYNC) {
        libc::RWF_SYNC
    } else if flags.contains(OFlags::DSYNC) {
        libc::RWF_DSYNC
    } else {
        0
    }
}

/// Whether a write takes set-id bits away. Linux asks for that in writes that it does not cache, whatever was settled.
fn kills(write: &WriteIn) -> bool {
    write.write_flags & WRITE_KILL_SUIDGID != 0
}

impl PassthroughFs {
    /// The host's open flags for the guest's. Without O_APPEND: a write from the guest's page cache has an offset, so
    /// each write decides whether it appends.
    fn host_flags(&self, flags: u32) -> OFlags {
        let mut keep = OFlags::ACCMODE | OFlags::TRUNC | OFlags::DSYNC | OFlags::SYNC | OFlags::LARGEFILE;
        keep.set(OFlags::DIRECT, self.config.allow_direct_io);
        keep.set(OFlags::NOATIME, self.config.preserve_noatime);
        let mut host = OFlags::from_bits_retain(flags) & keep | OFlags::NOCTTY | OFlags::CLOEXEC;
        let also_reads = self.has(InitFlags::WRITEBACK_CACHE) || !self.gives_handles();
        if also_reads && host & OFlags::ACCMODE == OFlags::WRONLY {
            // To write a part of a page, the guest's page cache reads the page. Without handles the descriptor serves
            // others too.
            host = host & !OFlags::ACCMODE | OFlags::RDWR;
        }
        host
    }

    fn may_open(&self, flags: OFlags) -> Result<()> {
        if flags & OFlags::ACCMODE == OFlags::RDONLY && !flags.contains(OFlags::TRUNC) {
            return Ok(());
        }
        self.writable()
    }

    /// Runs `open` with the host's flags. If that is denied and they allow more than the guest's access mode, tries
    /// that mode.
    fn try_open(&self, guest: u32, open: impl Fn(OFlags) -> Result<OwnedFd>) -> Result<OwnedFd> {
        let flags = self.host_flags(guest);
        self.may_open(flags)?;
        match open(flags) {
            Err(Errno::ACCESS) if flags & OFlags::ACCMODE != OFlags::from_bits_retain(guest) & OFlags::ACCMODE => {
                open(flags & !OFlags::ACCMODE | OFlags::WRONLY)
            }
            done => done,
        }
    }

    /// Gives the guest an open file. `flags`: the guest's. `out`: makes the reply's body.
    fn opened<T: IntoBytes + Immutable>(
        &self,
        inode: &Arc<Inode>,
        file: OwnedFd,
        flags: u32,
        reply: &mut Reply,
        out: impl FnOnce(OpenOut) -> T + Send + 'static,
    ) -> Result<()> {
        let host = self.hosts.get(inode.key.dev, file.as_fd());
        let mut open_flags = match self.config.cache {
            // The guest would read up to the file's size.
            _ if host.made => OpenFlags::DIRECT_IO,
            CachePolicy::Auto => OpenFlags::empty(),
            CachePolicy::Always => OpenFlags::KEEP_CACHE,
            // The host's file system orders parallel writes to one file.
            CachePolicy::Never | CachePolicy::Metadata => OpenFlags::DIRECT_IO | OpenFlags::PARALLEL_DIRECT_WRITES,
        };
        // The guest need not send FLUSH if a close has no effect: the file system does nothing at close(2), there are
        // no POSIX locks, and no mapping can be dirty (a writable shared mapping needs O_RDWR). With writeback Linux
        // sends it anyway.
        let unmapped = flags & libc::O_ACCMODE as u32 != libc::O_RDWR as u32;
        open_flags.set(OpenFlags::NOFLUSH, unmapped && !host.flush_on_close && !self.config.posix_lock);
        if !self.gives_handles() {
            let flags = fcntl_getfl(&file)?;
            drop(inode.lend(&self.places, Spare::file(file, flags)));
            return reply.put(&out(OpenOut { fh: 0, open_flags: open_flags.bits(), backing_id: 0 }));
        }
        let file = self.places.fit(file)?;
        let entry = self.count(inode, file.as_fd(), flags);
        let mut handle = self.handle(inode, file);
        // With passthrough the guest may not drop its pages.
        if matches!((self.config.cache, entry), (CachePolicy::Auto, Poll::Ready(None))) {
            match self.pages(inode, &host, handle.fd(), flags) {
                Pages::Keep => open_flags |= OpenFlags::KEEP_CACHE,
                Pages::Drop(number) => handle.drops = number.into(),
            }
        }
        handle.heard = inode.failures.heard();
        handle.plain = handle.host.shares_page_cache && self.is_plain(flags);
        let fh = self.handles.insert(handle).inspect_err(|_| self.uncount(inode.id))?;
        let out = move |entry: Option<u32>| {
            out(match entry {
                // The other flags are about the guest's page cache, which is not used.
                Some(index) => OpenOut { fh, open_flags: OpenFlags::PASSTHROUGH.bits(), backing_id: index as i32 },
                None => OpenOut { fh, open_flags: open_flags.bits(), backing_id: 0 },
            })
        };
        match (entry, self.passing()) {
            (Poll::Ready(entry), _) => return reply.put(&out(entry)),
            (Poll::Pending, Some(pass)) => {
                let reply = reply.detach();
                pass.decided(inode.id, Box::new(move |entry| reply.answer(entry.map(out))));
            }
            (Poll::Pending, None) => return Err(Errno::IO),
        }
        Ok(())
    }

    /// What becomes of the guest's pages at this open. `flags`: the guest's.
    fn pages(&self, inode: &Inode, host: &HostFs, file: BorrowedFd, flags: u32) -> Pages {
        let reads = flags & (libc::O_ACCMODE | libc::O_TRUNC) as u32 == libc::O_RDONLY as u32;
        if !host.ctime_reliable || !reads && !inode.contents.is_known() {
            return Pages::Drop(0);
        }
        let look = || stat(file, c"").ok().map(|st| CacheValidator::of(&st));
        let unwritten = || {
            let found = sys::unwritten(file);
            self.found_writers(inode, found == Err(Errno::AGAIN));
            found.is_ok()
        };
        inode.contents.opened(self.clock, look, reads.then_some(unwritten))
    }

    /// The guest reads by this handle.
    fn reads(&self, handle: &Handle) {
        if handle.drops.load(Ordering::Relaxed) == 0 {
            return;
        }
        let number = handle.drops.swap(0, Ordering::Relaxed);
        if let Ok(inode) = self.inodes.get(handle.node) {
            inode.contents.dropped(number);
        }
    }

    /// Whether any other open for reading could take this one's place. With locks none can.
    fn is_plain(&self, flags: u32) -> bool {
        let special = self.host_flags(flags) - (OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::LARGEFILE);
        special.is_empty() && !self.config.flock && !self.config.posix_lock
    }

    pub(super) fn handle(&self, inode: &Arc<Inode>, file: OwnedFd) -> Handle {
        let host = self.hosts.get(inode.key.dev, file.as_fd());
        match inode.format() {
            libc::S_IFDIR => Handle::dir(file, inode.id, host, &self.listings),
            _ => Handle::file(file, inode.id, host).counted(inode.count_open()),
        }
    }

    /// As [`was_made`], of a regular file.
    fn was_created(&self, parent: u64, name: &CStr) -> bool {
        self.within(parent, name, |_, dir| Ok(was_made(dir, name, libc::S_IFREG))).unwrap_or(false)
    }

    /// Takes back a [`count`](Self::count).
    fn uncount(&self, node: u64) {
        self.passing().into_iter().for_each(|pass| pass.release(node));
    }

    fn open_known<T: IntoBytes + Immutable>(
        &self,
        node: u64,
        open: &OpenIn,
        by: Caller,
        reply: &mut Reply,
        out: impl FnOnce(OpenOut) -> T + Send + 'static,
    ) -> Result<()> {
        let inode = self.inodes.get(node)?;
        // The guest opens devices and FIFOs by itself. Opening the host's could block, or do something.
        if inode.format() != libc::S_IFREG {
            return Err(Errno::BADF);
        }
        // The file is held from here on, even if it is removed meanwhile. The handle counts by itself.
        let _counted = self.gives_handles().then(|| inode.count_open());
        if self.is_plain(open.flags) {
            if let Some(file) = inode.take_readable() {
                return self.opened(&inode, file, open.flags, reply, out);
            }
        }
        let reads = open.flags & (libc::O_ACCMODE | libc::O_TRUNC) as u32 == libc::O_RDONLY as u32;
        let named = if reads { None } else { self.named(&inode) };
        let opening = || self.try_open(open.flags, |flags| self.open_anew(&inode, flags));
        let file = match open.flags & libc::O_TRUNC as u32 {
            0 => opening()?,
            _ => {
                let kills = (open.open_flags & OPEN_KILL_SUIDGID != 0).then_some(by);
                let file = self.resize(&inode, 0, || {
                    inode.with_fd(&self.places, |fd| {
                        self.set_id_kept(fd, kills);
                        Ok(())
                    })?;
                    opening()
                })?;
                inode.tell_size(0, self.window.is_some());
                self.drop_capability(file.as_fd());
                file
            }
        };
        drop(named);
        self.opened(&inode, file, open.flags, reply, out)
    }

    /// Opens a file that the guest wanted to create and that exists.
    ///
    /// # Errors
    /// ESTALE if the open could wait. The guest then looks the name up and sends an OPEN.
    fn open_found(&self, entry: EntryOut, create: &CreateIn, by: Caller, reply: &mut Reply) -> Result<()> {
        let node = entry.nodeid;
        let truncates = create.flags & libc::O_TRUNC as u32 != 0;
        if truncates && self.may_block(Does::TRUNCATE, node, None).is_some() {
            return Err(Errno::STALE);
        }
        let open = OpenIn { flags: create.flags, open_flags: create.open_flags };
        match self.open_known(node, &open, by, reply, move |open| CreateOut { entry, open }) {
            Err(WOULD_WAIT) => Err(Errno::STALE),
            opened => opened,
        }
    }

    /// Enters and opens a new file.
    fn enter_new(
        &self,
        (parent, name): (u64, Option<&CStr>),
        file: OwnedFd,
        flags: u32,
        by: &Creator,
        reply: &mut Reply,
    ) -> Result<()> {
        let parent = self.inodes.get(parent)?;
        let (inode, entry) = parent.with_fd(&self.places, |dir| {
            let sight = name.map(|name| self.sight(&parent, dir, name));
            let Seen { st, key, .. } = Seen::of(&parent, file.as_fd(), name)?;
            let place = match st.stx_nlink {
                // It has no name, and so no handle opens it once it is closed.
                0 if !self.gives_handles() => self.places.place_pinned(file.as_fd())?,
                _ => self.places.place_open(file.as_fd())?,
            };
            let inode = self.inodes.learn(key, place);
            let entry = match sight {
                Some(sight) => self.found(&sight, &inode, st, Purpose::Settled),
                None => self.observed(&parent, &inode, &st, false, self.timeout),
            };
            Ok((inode, entry))
        })?;
        let labelled = by.label.map_or(Ok(()), |(label, value)| self.label(inode.id, label, value));
        let out = move |open| CreateOut { entry, open };
        let opened = labelled.and_then(|()| self.opened(&inode, file, flags, reply, out));
        opened.inspect_err(|_| self.unlearn(inode.id, 1))
    }

    fn write_to(&self, fd: BorrowedFd, node: u64, write: &WriteIn, from: &IoRange) -> Result<usize> {
        let cached = write.write_flags & WRITE_CACHE != 0;
        let append = write.flags & libc::O_APPEND as u32 != 0 && !cached;
        let mut flags = if append { libc::RWF_APPEND } else { 0 };
        if self.has_no_handle(write.fh) && !cached {
            flags |= sync_flags(write.flags);
        }
        if !append {
            self.grows(node, write.offset)?;
        }
        let n = self.changing(node, || match append.then(|| appended(fd, from.len())).flatten() {
            Some(appended) => Ok(appended),
            None => sys::pwritev(fd, from, write.offset, flags),
        })?;
        if !cached {
            self.drop_capability(fd);
        }
        if let Some(window) = &self.window {
            let size = || fs::fstat(fd).map_or(0, |st| st.st_size as u64);
            window.filled(node, || {
                let from = if append { size().saturating_sub(n as u64) } else { write.offset };
                from..from.saturating_add(n as u64)
            });
        }
        if let Some(pass) = self.passing() {
            pass.wrote(node, fd, (!append).then_some(write.offset), n as u64);
            pass.missed(node);
        }
        Ok(n)
    }

    fn copy(&self, node: u64, from: &Opened, to: &Opened, a: &CopyFileRangeIn) -> Result<usize> {
        if self.keeps_blocks(node) || self.keeps_blocks(a.nodeid_out) {
            // The guest's kernel then reads and writes.
            return Err(Errno::OPNOTSUPP);
        }
        self.grows(a.nodeid_out, a.off_out)?;
        let (mut off_in, mut off_out) = (a.off_in, a.off_out);
        let len = usize::try_from(a.len).map_err(|_| Errno::INVAL)?;
        // Opened anew, for the reason given at `punch`.
        let fresh = |node, flags| if from.host.shares_blocks { self.fresh(node, flags) } else { None };
        let (fresh_from, fresh_to) = (fresh(node, OFlags::RDONLY), fresh(a.nodeid_out, OFlags::WRONLY));
        let (source, target) = match (&fresh_from, &fresh_to) {
            (Some(from), Some(to)) => (from.as_fd(), to.as_fd()),
            _ => (from.fd, to.fd),
        };
        let copy = || copy_file_range(source, Some(&mut off_in), target, Some(&mut off_out), len);
        let n = self.changing(a.nodeid_out, copy)?;
        // Mapped since they were asked for: the daemon looks for shared blocks when the guest has let go.
        for node in [node, a.nodeid_out].into_iter().filter(|node| self.keeps_blocks(*node)) {
            self.passing().into_iter().for_each(|pass| pass.punching(node, 0, || ()));
        }
        self.drop_capability(to.fd);
        if let Some(pass) = self.passing() {
            pass.wrote(a.nodeid_out, to.fd, Some(a.off_out), n as u64);
        }
        Ok(n)
    }

    /// FLUSH without a handle.
    ///
    /// # Errors
    /// ENOSYS if no close has an effect: the guest's kernel then sends no FLUSH again.
    fn flush_unopened(&self, node: u64) -> Result<()> {
        let inode = self.inodes.get(node)?;
        let host = match self.hosts.known(inode.key.dev) {
            Some(host) => host,
            None => inode.with_fd(&self.places, |fd| Ok(self.hosts.get(inode.key.dev, fd)))?,
        };
        if !self.hosts.any_flushes() {
            return Err(Errno::NOSYS);
        }
        match inode.spare(OFlags::WRONLY) {
            Some(spare) if host.flush_on_close => sys::close_copy(spare.fd()),
            _ => Ok(()),
        }
    }

    /// Removes the file's capabilities if `--xattrmap` keeps them under another name. The kernel only removes its own.
    pub(super) fn drop_capability(&self, fd: BorrowedFd) {
        if let Some(name) = &self.capability {
            // Fails for most files: they have none.
            let _ = fs::removexattr(FdPath::new(fd).as_cstr(), &**name);
        }
    }
}

/// To be called before a request appends `len` bytes. How many of them an earlier worker process has appended for it,
/// if any. What somebody else has appended since is taken for them.
fn appended(fd: BorrowedFd, len: usize) -> Option<usize> {
    record::get()?;
    let size = fs::fstat(fd).map_or(0, |st| st.st_size as u64);
    let more = size.checked_sub(record::note(|| size)?)?;
    (more > 0).then(|| len.min(more as usize))
}

impl Files for PassthroughFs {
    fn open(&self, node: u64, open: &OpenIn, by: Caller, reply: &mut Reply) -> Result<()> {
        if !self.gives_handles() {
            // The guest's kernel then opens files by itself.
            return Err(Errno::NOSYS);
        }
        match self.open_known(node, open, by, reply, |open| open) {
            Err(WOULD_WAIT) if open.flags & libc::O_NONBLOCK as u32 != 0 => Err(Errno::AGAIN),
            opened => opened,
        }
    }

    fn create(&self, parent: u64, name: &CStr, create: &CreateIn, by: &Creator, reply: &mut Reply) -> Result<()> {
        self.writable()?;
        self.inodes.have_room()?;
        let made = self.within(parent, name, |_, dir| {
            let new = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
            self.open_new(dir, Some(name), self.host_flags(create.flags) | new, create.mode, by)
        });
        match made {
            Ok(file) => self.enter_new((parent, Some(name)), file, create.flags, by, reply).inspect_err(|_| {
                let _ = self.within(parent, name, |_, dir| fs::unlinkat(dir, name, fs::AtFlags::empty()));
            }),
            Err(Errno::EXIST) if create.flags & libc::O_EXCL as u32 == 0 || self.was_created(parent, name) => {
                self.settle_times_at(parent, name)?;
                let entry = self.within(parent, name, |parent, dir| self.enter(parent, dir, name, Purpose::Settled))?;
                let caller = Caller { uid: by.uid, gid: by.gid, pid: 0 };
                let opened = self.open_found(entry, create, caller, reply);
                opened.inspect_err(|_| self.unlearn(entry.nodeid, 1))
            }
            Err(errno) => Err(errno),
        }
    }

    fn tmpfile(&self, parent: u64, create: &CreateIn, by: &Creator, reply: &mut Reply) -> Result<()> {
        self.writable()?;
        self.inodes.have_room()?;
        let file = self.inodes.get(parent)?.with_fd(&self.places, |dir| {
            let excl = OFlags::from_bits_retain(create.flags) & OFlags::EXCL;
            self.open_new(dir, None, self.host_flags(create.flags) | OFlags::TMPFILE | excl, create.mode, by)
        })?;
        self.enter_new((parent, None), file, create.flags, by, reply)
    }

    fn read(&self, node: u64, read: &ReadIn, to: &IoRange) -> Result<usize> {
        self.passing().iter().for_each(|pass| pass.missed(node));
        self.with_file(node, read.fh, (Use::Read, read.flags), |file| {
            file.handle.into_iter().for_each(|handle| self.reads(handle));
            match may_wait() {
                true => sys::preadv(file.fd, to, read.offset, 0),
                false => file.host.read_cached(file.fd, to, read.offset),
            }
        })
    }

    fn file_for_read(&self, node: u64, read: &ReadIn) -> Result<OwnedFd> {
        // Another daemon's guard cannot tell a read by io_uring from a truncation, and would end its own guest's
        // mappings. If this guest has mapped the file, others probably have too. The system call of a thread shows that
        // it reads.
        let mapped = self.is_mapped(node);
        self.with_file(node, read.fh, (Use::Read, read.flags), |file| {
            file.handle.into_iter().for_each(|handle| self.reads(handle));
            if mapped { None } else { file.copy() }.ok_or(WOULD_WAIT)
        })
    }

    fn file_for_write(&self, node: u64, write: &WriteIn, by: Caller) -> Result<Option<OwnedFd>> {
        // After the write, a window must hear of it, and capabilities under another name must go.
        let mut alone = self.window.is_none() && self.capability.is_none() && write.flags & libc::O_APPEND as u32 == 0;
        // Without a handle, each write says whether it is synchronous.
        alone &= !self.has_no_handle(write.fh) || sync_flags(write.flags) == 0;
        self.with_file(node, write.fh, (Use::Write, write.flags), |file| {
            file.writes(by);
            self.set_id_kept(file.fd, kills(write).then_some(by));
            Ok(if alone { file.copy() } else { None })
        })
    }

    fn write(&self, node: u64, write: &WriteIn, by: Caller, from: &IoRange) -> Result<usize> {
        self.with_file(node, write.fh, (Use::Write, write.flags), |file| {
            file.writes(by);
            self.set_id_kept(file.fd, kills(write).then_some(by));
            self.write_to(file.fd, node, write, from)
        })
    }

    fn flush(&self, node: u64, fh: u64, lock_owner: u64) -> Result<()> {
        if self.has_no_handle(fh) {
            return self.flush_unopened(node);
        }
        let handle = self.handles.get(node, fh)?;
        self.locks.drop_owner(node, lock_owner);
        if handle.host.flush_on_close { sys::close_copy(handle.fd()) } else { Ok(()) }
    }

    fn release(&self, node: u64, release: &ReleaseIn) -> Result<()> {
        if self.has_no_handle(release.fh) {
            // Linux sends it for what CREATE opened, until it has sent an OPEN.
            return self.inodes.get(node).map(drop);
        }
        // The close drops the handle's flock lock. A FLUSH has dropped a process's POSIX locks. Locks of the open file
        // description (F_OFD_SETLK) have an owner that no FLUSH names.
        let handle = self.handles.remove(node, release.fh)?;
        for owner in handle.take_lock_owners() {
            self.locks.drop_owner(node, owner);
        }
        self.uncount(node);
        if handle.plain {
            if let Ok(inode) = self.inodes.get(node) {
                inode.keep_readable(&self.places, handle.into_fd());
            }
        }
        Ok(())
    }

    fn fsync(&self, node: u64, fh: u64, datasync: bool, by: Caller) -> Result<()> {
        self.sync_mappings(node);
        self.with_file(node, fh, (Use::Any, 0), |file| {
            // Each of the two reports a failure once.
            let synced = if datasync { fdatasync(file.fd) } else { fsync(file.fd) };
            match (file.lender, file.handle) {
                (Some(inode), _) => {
                    match synced {
                        Ok(()) => inode.synced(),
                        // Each writer is to hear of it, as each descriptor of a guest with handles.
                        Err(errno) => inode.failures.add(errno),
                    }
                    inode.hearers.tell(by.pid, &inode.failures).inspect_err(|_| inode.heard_of_failure())
                }
                (None, Some(handle)) => {
                    let inode = self.inodes.get(node)?;
                    inode.failures.tell(&handle.heard).inspect_err(|_| inode.heard_of_failure()).and(synced)
                }
                (None, None) => synced,
            }
        })
    }

    fn fallocate(&self, node: u64, a: &FallocateIn) -> Result<()> {
        self.writable()?;
        cred::keep_setid();
        let mode = FallocateFlags::from_bits_retain(a.mode);
        if !SPACE.contains(&mode) {
            return Err(Errno::OPNOTSUPP);
        }
        self.with_file(node, a.fh, (Use::Write, 0), |file| {
            if mode.intersects(FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE) {
                self.punch(file.fd, a, mode, node)?;
                self.drop_capability(file.fd);
                // FALLOC_FL_ZERO_RANGE may make the file longer.
                self.passing().iter().for_each(|pass| pass.wrote(node, file.fd, Some(a.offset), 0));
                return Ok(());
            }
            let since = self.passing().and_then(|pass| pass.allocating(node));
            let done = self.changing(node, || fallocate(file.fd, mode, a.offset, a.length));
            if done.is_err() {
                // tmpfs takes back the pages that it has allocated by then.
                self.passing().iter().for_each(|pass| pass.punching(node, a.offset, || ()));
            }
            done?;
            self.drop_capability(file.fd);
            if let (Some(pass), Some(since)) = (self.passing(), since) {
                pass.allocated(&since, file.fd, a.offset, a.length);
            }
            Ok(())
        })
    }

    fn lseek(&self, node: u64, fh: u64, offset: u64, whence: u32) -> Result<u64> {
        let to = match whence as i32 {
            libc::SEEK_DATA => SeekFrom::Data(offset),
            libc::SEEK_HOLE => SeekFrom::Hole(offset),
            // The guest's kernel handles the others.
            _ => return Err(Errno::INVAL),
        };
        // Nothing else uses the descriptor's position.
        self.with_file(node, fh, (Use::Read, 0), |file| seek(file.fd, to))
    }

    fn copy_file_range(&self, node: u64, a: &CopyFileRangeIn) -> Result<usize> {
        if a.flags != 0 {
            return Err(Errno::INVAL);
        }
        cred::keep_setid();
        self.with_file(node, a.fh_in, (Use::Read, 0), |from| {
            self.with_file(a.nodeid_out, a.fh_out, (Use::Write, 0), |to| self.copy(node, from, to, a))
        })
    }

    fn syncfs(&self, node: u64) -> Result<()> {
        let inode = self.inodes.get(node)?;
        let _ = self.window.as_ref().map(|window| window.sync_all());
        // syncfs(2) takes no O_PATH descriptor. The guest sends the root of a mount, which is a directory.
        match inode.format() {
            libc::S_IFDIR => fs::syncfs(inode.open(&self.places, OFlags::RDONLY | OFlags::DIRECTORY)?),
            _ => Err(Errno::INVAL),
        }
    }
}
