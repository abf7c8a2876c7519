//! What the file system asks and tells the windows: SETUPMAPPING, REMOVEMAPPING, which files are mapped, changes of
//! files.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::Poll;

use rustix::fs::{FallocateFlags, OFlags, Statx, fallocate, fcntl_getfl};
use rustix::io::Errno;

use super::PassthroughFs;
use super::contents::CacheValidator;
use super::cred;
use super::fd::stat;
use super::inode::{Inode, Places};
use super::lease::{is_fixed, is_program};
use crate::fuse::Reply;
use crate::fuse::abi::*;
use crate::fuse::ops::{Answer, Mappings, Result};
use crate::record::{Found, FoundMapping};
use crate::window::{Facts, Left, Passthrough, Source, Window};

impl PassthroughFs {
    fn window(&self) -> Result<&Window> {
        self.window.as_deref().ok_or(Errno::NOSYS)
    }

    /// Whether the guest has mapped any of this node's file, or is about to.
    pub(super) fn is_mapped(&self, node: u64) -> bool {
        self.window.as_ref().is_some_and(|window| window.is_mapped(node))
    }

    /// Whether the guest has mapped any file.
    pub(super) fn has_mappings(&self) -> bool {
        self.window.as_ref().is_some_and(|window| window.has_mappings())
    }

    /// Whether a file has yet to get the time of what the guest has stored in place.
    pub(super) fn owes_times(&self, node: u64) -> bool {
        self.passing().is_some_and(|pass| pass.owes_times(node))
    }

    /// Whether the guest is offered a window.
    pub(super) fn maps(&self) -> bool {
        self.window.as_ref().is_some_and(|window| window.is_open())
    }

    /// Window passthrough, in a session that has it.
    pub(super) fn passing(&self) -> Option<&Arc<Passthrough>> {
        self.window.as_ref()?.passing()
    }

    /// Counts an open. Returns the index of its entry if it has passthrough. Pending: [`Passthrough::decided`] tells it
    /// later. `flags`: the guest's.
    pub(super) fn count(&self, inode: &Arc<Inode>, file: BorrowedFd, flags: u32) -> Poll<Option<u32>> {
        let Some(pass) = self.passing() else { return Poll::Ready(None) };
        let source = if pass.is_open(inode.id) { None } else { self.worth_passing(inode, file, flags) };
        pass.open(inode.id, file, source)
    }

    /// The file, if passthrough is better than messages for it. `flags`: the guest's, of the first open.
    fn worth_passing(&self, inode: &Arc<Inode>, file: BorrowedFd, flags: u32) -> Option<Arc<dyn Source>> {
        let flags = OFlags::from_bits_retain(flags);
        let appends = flags.contains(OFlags::APPEND) && flags & OFlags::ACCMODE == OFlags::WRONLY;
        let direct = self.config.allow_direct_io && flags.contains(OFlags::DIRECT);
        if appends || direct || self.config.readonly {
            return None;
        }
        let st = stat(file, c"").ok()?;
        let worth = st.stx_size >= self.config.passthrough_min_size && !is_fixed(&st);
        worth.then(|| self.opener(inode.clone()) as Arc<dyn Source>)
    }

    /// Runs what gives a file this size. Tells a guest with passthrough of the size in the right order.
    pub(super) fn resize<R>(&self, inode: &Arc<Inode>, size: u64, run: impl FnOnce() -> Result<R>) -> Result<R> {
        if let Some(window) = &self.window {
            window.cut(inode.id, size)?;
        }
        let run = || {
            self.grows(inode.id, size)?;
            self.changing(inode.id, run)
                .inspect(|_| self.window.iter().for_each(|window| window.shrunk(inode.id, size)))
        };
        let look = || inode.with_fd(&self.places, |fd| Ok(stat(fd, c"")?.stx_size));
        match self.passing() {
            Some(pass) => pass.truncate(inode.id, size, run, look),
            None => run(),
        }
    }

    /// See [`Window::grows`].
    pub(super) fn grows(&self, node: u64, to: u64) -> Result<()> {
        self.window.as_ref().map_or(Ok(()), |window| window.grows(node, to))
    }

    /// The size to tell the guest. A file that has grown keeps its old size until the disk has room for everything that
    /// the guest may then store in place.
    pub(super) fn tell_size(&self, inode: &Inode, size: u64) -> u64 {
        let told = inode.told_size();
        let size = match &self.window {
            Some(window) if size > told && window.grows(inode.id, size).is_err() => told,
            Some(window) if size < told => {
                window.shrunk(inode.id, size);
                size
            }
            _ => size,
        };
        if let Some(window) = self.window.as_ref().filter(|_| size != told) {
            window.read_anew(inode.id);
        }
        inode.tell_size(size, self.window.is_some());
        size
    }

    /// Punches a hole or zeroes a range. Opens the file anew: another daemon's guard does not see what is done by a
    /// descriptor that was open before its guest mapped the file.
    pub(super) fn punch(&self, file: BorrowedFd, args: &FallocateIn, mode: FallocateFlags, node: u64) -> Result<()> {
        if let Some(window) = &self.window {
            window.vacate(node, args.offset, args.length)?;
        }
        if fcntl_getfl(file)? & OFlags::ACCMODE == OFlags::RDONLY {
            return Err(Errno::BADF);
        }
        let fresh = self.fresh(node, OFlags::WRONLY);
        let file = fresh.as_ref().map_or(file, AsFd::as_fd);
        let punch = || self.changing(node, || fallocate(file, mode, args.offset, args.length));
        match self.passing() {
            Some(pass) => pass.punching(node, args.offset, punch),
            None => punch(),
        }
    }

    /// Opens a node's file.
    pub(super) fn fresh(&self, node: u64, flags: OFlags) -> Option<OwnedFd> {
        self.inodes.get(node).and_then(|inode| inode.open(&self.places, flags)).ok()
    }

    /// Whether a node's file must not share blocks with another.
    pub(super) fn keeps_blocks(&self, node: u64) -> bool {
        self.window.as_ref().is_some_and(|window| window.keeps_blocks(node))
    }

    /// Compares a file's attributes with what the guest has in its pages, and with what a guest with passthrough knows.
    pub(super) fn saw(&self, inode: &Arc<Inode>, st: &Statx) {
        inode.contents.saw(&CacheValidator::of(st));
        if let Some(pass) = self.passing() {
            let look = || inode.with_fd(&self.places, |fd| stat(fd, c"").map(|st| (st.stx_size, st.stx_blocks)));
            pass.saw(inode.id, st.stx_size, st.stx_blocks, look);
        }
    }

    /// Takes over what another process has left of the DAX window, if there is one.
    pub(super) fn take_over_mappings(&self, found: &mut Found) {
        for size in std::mem::take(&mut found.sizes) {
            match self.inodes.get(size.node) {
                Ok(inode) => inode.told_before(size),
                Err(_) => size.cell.free(),
            }
        }
        let (left, rooms) = (std::mem::take(&mut found.mappings), std::mem::take(&mut found.rooms));
        let Some(window) = self.window.as_ref().filter(|window| window.dax_size() > 0) else { return };
        let with_source = |found: FoundMapping| {
            let inode = self.inodes.get(found.range.node).ok().filter(|inode| inode.format() == libc::S_IFREG);
            if let Some(inode) = inode.as_ref().filter(|_| self.has(InitFlags::HAS_INODE_DAX)) {
                // The guest has decided for it.
                self.grants.ask(inode.id, inode.told_size(), false);
            }
            Left(found, inode.map(|inode| self.opener(inode) as Arc<dyn Source>))
        };
        window.take_over(left.into_iter().map(with_source).collect(), rooms, found.proxy);
    }

    pub(super) fn opener(&self, inode: Arc<Inode>) -> Arc<Opener> {
        let (places, proc_self_fd) = (self.places.clone(), self.proc_self_fd.clone());
        Arc::new(Opener { inode, places, proc_self_fd, readonly: self.config.readonly })
    }

    /// ATTR_DAX if the guest is to map the file rather than to send messages. Not with an execute bit: the host could
    /// not execute a file that the guest writes to, and the guest could not write to a file that the host executes.
    /// Not one that does not fit into the window beside the others.
    pub(super) fn dax_flag(&self, inode: &Inode, st: &Statx) -> u32 {
        let copies_on_write = || {
            let host = self.hosts.known(inode.key.dev);
            host.is_some_and(|host| host.copies_on_write)
        };
        // With passthrough there is no DAX: a file cannot have both.
        let worth = self.has(InitFlags::HAS_INODE_DAX)
            && self.passing().is_none()
            && inode.format() == libc::S_IFREG
            && !is_program(st)
            && st.stx_size >= self.config.dax_min_size
            && !self.config.readonly
            && !is_fixed(st)
            && !copies_on_write()
            && self.grants.ask(inode.id, st.stx_size, inode.is_lazy());
        if worth && self.inodes.get(inode.id).is_err() {
            // The guest has forgotten it meanwhile, by another queue.
            self.grants.end(inode.id);
        }
        if worth { ATTR_DAX } else { 0 }
    }

    /// See [`Window::changing`].
    pub(super) fn changing<R>(&self, node: u64, change: impl FnOnce() -> R) -> R {
        match &self.window {
            Some(window) => window.changing(node, change),
            None => change(),
        }
    }

    /// Writes to the file what the guest stored through mappings that are copies.
    pub(super) fn sync_mappings(&self, node: u64) {
        self.window.iter().for_each(|window| window.sync(node));
    }
}

impl Mappings for PassthroughFs {
    fn settle_times(&self, node: u64) {
        self.passing().into_iter().for_each(|pass| pass.settle_times(node));
    }

    fn start_passthrough(&self, answer: Answer) {
        match self.window.as_ref().and_then(|window| window.passthrough()) {
            Some(pass) => pass.start(answer),
            None => answer(Err(Errno::NOSYS)),
        }
    }

    fn setupmapping(&self, node: u64, args: &SetupmappingIn, reply: &mut Reply) -> Result<()> {
        let window = self.window()?;
        let inode = self.inodes.get(node)?;
        if inode.format() != libc::S_IFREG {
            return Err(Errno::BADF);
        }
        let writable = args.flags & SETUPMAPPING_WRITE != 0;
        if writable {
            self.writable()?;
        }
        if args.flags & SETUPMAPPING_PASSTHROUGH != 0 {
            let pass = self.passing().ok_or(Errno::NOSYS)?;
            self.handles.get(node, args.fh)?;
            pass.ask(node, args.foffset, args.len, writable, reply.answer_later());
            return Ok(());
        }
        let source = self.opener(inode);
        window.map((args.moffset, args.len), args.foffset, writable, node, source, || reply.answer_later())
    }

    fn removemapping(&self, parts: &[RemovemappingOne], reply: &mut Reply) -> Result<()> {
        let parts: Vec<_> = parts.iter().map(|part| (part.moffset, part.len)).collect();
        self.window()?.unmap(&parts, || reply.answer_later())
    }
}

/// Opens an inode's file on the mapper's thread.
pub(super) struct Opener {
    inode: Arc<Inode>,
    places: Arc<Places>,
    proc_self_fd: Arc<OwnedFd>,
    readonly: bool,
}

impl Source for Opener {
    fn open(&self, writable: bool) -> Result<OwnedFd> {
        cred::enter_thread(self.proc_self_fd.as_fd());
        match (writable, self.readonly) {
            (true, true) => Err(Errno::ROFS),
            (true, false) => self.inode.open(&self.places, OFlags::RDWR),
            (false, _) => self.inode.open(&self.places, OFlags::RDONLY),
        }
    }

    fn facts(&self) -> Result<Facts> {
        cred::enter_thread(self.proc_self_fd.as_fd());
        let st = self.inode.with_fd(&self.places, |fd| stat(fd, c""))?;
        Ok(Facts { size: st.stx_size, told_size: self.inode.told_size(), executable: is_program(&st) })
    }

    fn failed(&self, errno: Errno) {
        self.inode.failed(errno);
    }
}
