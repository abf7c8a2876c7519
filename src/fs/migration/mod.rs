//! A session that moves to another daemon: every inode and handle, with the same nodeids and `fh`s. Locks stay behind.

mod find;
pub mod format;
#[cfg(test)]
mod tests;
mod windows;

use std::collections::HashMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{OFlags, Statx, fcntl_getfl, fstatfs};
use rustix::io::Errno;

use super::fd::{open_path, reopen, stat};
use super::handle::Handle;
use super::inode::{Inode, Place};
use super::key::{Key, mount};
use super::path::open_beneath;
use super::seen::Seen;
use super::sys::{RawHandle, name_to_handle, open_by_handle};
use super::{MigrationMode, MigrationOnError, PassthroughFs};
use crate::fuse::abi::{InitFlags, ROOT_ID};
use crate::fuse::ops::Result;
use find::Finder;
use format::{HandleState, InodeState, Location, MountState, State};

/// The flags that open files keep. Creation and truncation were done when they were opened.
const KEPT: OFlags = OFlags::ACCMODE.union(OFlags::DSYNC).union(OFlags::SYNC).union(OFlags::LARGEFILE);

/// Most nodeids that a source can have given out: no daemon lives long enough for more. As many are left for this
/// daemon.
const MAX_NODEID: u64 = 1 << 62;

impl PassthroughFs {
    /// The session. There must be no requests meanwhile.
    pub(super) fn save_state(&self) -> io::Result<State> {
        // First, since it may be refused.
        let window = self.save_window()?;
        Ok(State { window, ..self.save_files()? })
    }

    fn save_files(&self) -> Result<State> {
        let root = self.inodes.get(ROOT_ID)?;
        root.with_fd(&self.places, |root_fd| {
            let mut inodes = self.inodes.all();
            if self.config.migration.mode == MigrationMode::FindPaths {
                // The kernel may have forgotten their paths, too, and the guest stands still.
                inodes.retain(|inode| inode.nlookup() > 0);
            }
            let mut saver = Saver { fs: self, root: root_fd, mounts: Vec::new(), known: HashMap::new() };
            let locations = match self.config.migration.mode {
                MigrationMode::FindPaths => saver.paths(&inodes)?,
                MigrationMode::FileHandles => inodes.iter().map(|inode| saver.by_handle(inode)).collect(),
            };
            let mut inodes: Vec<_> =
                inodes.iter().zip(locations).map(|(inode, location)| saver.inode(inode, location)).collect();
            // Puts each entry after its directory.
            inodes.sort_by_key(|inode| matches!(inode.location, Location::Entry { .. }));
            let (next_id, mounts, handles) = (self.inodes.next_id(), saver.mounts, self.save_handles());
            Ok(State { next_id, mounts, inodes, handles, window: None })
        })
    }

    fn save_handles(&self) -> Vec<HandleState> {
        let mut all = Vec::new();
        self.handles.for_each(|fh, handle| {
            let (node, directory, flags) = match handle {
                // Each READDIR says its position in the directory.
                Ok(handle) => (handle.node, handle.listing().is_ok(), fcntl_getfl(handle.fd()).map_or(0, |f| f.bits())),
                Err(node) => (node, false, 0),
            };
            all.push(HandleState { fh, node, directory, flags });
        });
        all
    }

    /// Takes over a session. There must be no requests meanwhile.
    pub(super) fn load_state(&self, flags: InitFlags, bytes: &[u8]) -> io::Result<()> {
        let state = State::decode(bytes).map_err(invalid)?;
        let settled = self.settle(flags, true)?.flags;
        if settled != flags {
            let missing = flags - settled;
            return Err(invalid(format!("the guest uses {missing:?}: give this daemon the options of the source")));
        }
        let mut loader = Loader::new(self, &state)?;
        let done = loader.load(&state);
        self.handles.restored();
        done?;
        self.inodes.set_next_id(state.next_id);
        self.load_window(flags, state.window.as_ref())?;
        if loader.lost > 0 {
            let (lost, all) = (loader.lost, state.inodes.len() + state.handles.len());
            tracing::warn!("{lost} of {all} inodes and open files are lost: the guest gets EIO from them");
        }
        Ok(())
    }
}

fn invalid(what: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Finds out where the files are.
struct Saver<'a> {
    fs: &'a PassthroughFs,
    root: BorrowedFd<'a>,
    mounts: Vec<MountState>,
    /// Indices into `mounts` by mount id.
    known: HashMap<u32, Result<u32>>,
}

impl Saver<'_> {
    /// The path of each inode. It was right a moment ago.
    fn paths(&self, inodes: &[Arc<Inode>]) -> Result<Vec<Location>> {
        let finder = Finder::new(self.root)?;
        let mut locations = vec![Location::Lost(Errno::NOENT); inodes.len()];
        self.fill(&finder, inodes, &mut locations);
        if self.fs.config.migration.confirm_paths {
            for (inode, location) in inodes.iter().zip(&mut locations) {
                if !self.confirm(&finder, inode, location) {
                    *location = Location::Lost(Errno::NOENT);
                }
            }
            self.fill(&finder, inodes, &mut locations);
        }
        Ok(locations)
    }

    /// Locates the inodes that are still lost.
    fn fill(&self, finder: &Finder, inodes: &[Arc<Inode>], locations: &mut [Location]) {
        let mut hidden = Vec::new();
        for (at, inode) in inodes.iter().enumerate() {
            if !matches!(locations[at], Location::Lost(_)) {
                continue;
            }
            let found = self.by_path(finder, inode);
            if found.is_err() && self.has_name(inode) {
                hidden.push(at);
            }
            locations[at] = found.unwrap_or_else(Location::Lost);
        }
        if hidden.is_empty() {
            return;
        }
        tracing::info!("{} inodes are not where the kernel says: searching the share", hidden.len());
        let mut found = finder.search(hidden.iter().map(|at| &*inodes[*at]));
        for at in hidden {
            if let Some(path) = found.remove(&inodes[at].id) {
                locations[at] = Location::Path(path);
            }
        }
    }

    fn by_path(&self, finder: &Finder, inode: &Arc<Inode>) -> Result<Location> {
        if inode.id == ROOT_ID {
            return Ok(Location::Root);
        }
        if let Some((parent, name)) = inode.lazy() {
            let entry = Location::Entry { parent: parent.id, name: name.to_bytes().into() };
            if self.fs.inodes.get(parent.id).is_ok() && self.confirm(finder, inode, &entry) {
                return Ok(entry);
            }
        }
        let path = inode.with_fd(&self.fs.places, |fd| finder.hint(fd))?;
        if finder.is_at(inode, &path) { Ok(Location::Path(path)) } else { Err(Errno::NOENT) }
    }

    fn confirm(&self, finder: &Finder, inode: &Arc<Inode>, location: &Location) -> bool {
        match location {
            Location::Path(path) => finder.is_at(inode, path),
            Location::Entry { parent, name } => {
                entry(self.fs, *parent, name, |_, dir, name| Ok(inode.key.is_of(dir, &name, &stat(dir, &name)?)))
                    == Ok(true)
            }
            Location::Root | Location::Handle(..) | Location::Lost(_) => true,
        }
    }

    /// Whether a search may find the file: it is not removed, or it was never opened and may have another name.
    fn has_name(&self, inode: &Arc<Inode>) -> bool {
        match inode.with_fd(&self.fs.places, |fd| stat(fd, c"")) {
            Ok(st) => st.stx_nlink > 0,
            Err(_) => inode.lazy().is_some(),
        }
    }

    fn by_handle(&mut self, inode: &Arc<Inode>) -> Location {
        if inode.id == ROOT_ID {
            return Location::Root;
        }
        let mount = match self.known.get(&inode.key.mount) {
            Some(known) => *known,
            None => {
                let new = self.mount(inode);
                self.known.insert(inode.key.mount, new);
                new
            }
        };
        let raw = mount.and_then(|mount| Ok(Location::Handle(mount, self.raw(inode)?)));
        raw.unwrap_or_else(Location::Lost)
    }

    /// The inode's handle. Opens a file that only READDIRPLUS has named, and closes it again.
    fn raw(&self, inode: &Arc<Inode>) -> Result<RawHandle> {
        let raw = |fd: BorrowedFd| Ok(name_to_handle(fd)?.0);
        let Some((parent, name)) = inode.lazy() else { return inode.with_fd(&self.fs.places, raw) };
        let fd = parent.with_fd(&self.fs.places, |dir| open_path(dir, &name))?;
        if inode.is_at(fd.as_fd())? { raw(fd.as_fd()) } else { Err(Errno::STALE) }
    }

    /// Adds the mount on which the inode is.
    fn mount(&mut self, inode: &Arc<Inode>) -> Result<u32> {
        let path = self.mount_path(inode)?;
        let fd = open_beneath(self.root, &path, OFlags::PATH)?;
        let (root, _) = name_to_handle(fd.as_fd())?;
        self.mounts.push(MountState { kind: fstatfs(&fd)?.f_type as u64, path, root });
        Ok(self.mounts.len() as u32 - 1)
    }

    /// The shortest path that leads from the share's root to the inode's mount. The inode itself may have no name left.
    fn mount_path(&self, inode: &Arc<Inode>) -> Result<Vec<u8>> {
        let is_there = |path: &[u8]| {
            let st = open_beneath(self.root, path, OFlags::PATH).and_then(|fd| stat(fd.as_fd(), c""));
            st.is_ok_and(|st| mount(&st) == inode.key.mount)
        };
        if is_there(b"") {
            return Ok(Vec::new());
        }
        let path = inode.with_fd(&self.fs.places, |fd| Finder::new(self.root)?.hint(fd))?;
        let ends = path.iter().enumerate().filter(|(_, b)| **b == b'/').map(|(at, _)| at).chain([path.len()]);
        let ways = ends.map(|end| &path[..end]);
        ways.into_iter().find(|way| is_there(way)).map(Into::into).ok_or(Errno::NOENT)
    }

    fn inode(&self, inode: &Arc<Inode>, location: Location) -> InodeState {
        let (id, nlookup, format) = (inode.id, inode.nlookup(), inode.format());
        let m = &self.fs.config.migration;
        if !m.verify_handles || m.mode != MigrationMode::FindPaths || matches!(location, Location::Lost(_)) {
            return InodeState { id, nlookup, format, location, verify: None };
        }
        match self.raw(inode) {
            Ok(raw) => InodeState { id, nlookup, format, location, verify: Some(raw) },
            Err(errno) => InodeState { id, nlookup, format, location: Location::Lost(errno), verify: None },
        }
    }
}

/// Runs `f` with a directory that the guest knows and the name of an entry.
fn entry<R>(
    fs: &PassthroughFs,
    parent: u64,
    name: &[u8],
    f: impl FnOnce(&Inode, BorrowedFd, CString) -> Result<R>,
) -> Result<R> {
    let name = CString::new(name).map_err(|_| Errno::INVAL)?;
    let parent = fs.inodes.get(parent)?;
    parent.with_fd(&fs.places, |dir| f(&parent, dir, name))
}

/// An open file of a mount that the source named.
type Mount = Result<OwnedFd>;

/// Enters another daemon's session.
struct Loader<'a> {
    fs: &'a PassthroughFs,
    root: Arc<Inode>,
    mounts: Vec<Mount>,
    lost: usize,
}

impl<'a> Loader<'a> {
    fn new(fs: &'a PassthroughFs, state: &State) -> io::Result<Self> {
        let sends_handles = state.inodes.iter().any(|inode| matches!(inode.location, Location::Handle(..)));
        if (sends_handles || !state.mounts.is_empty()) && !fs.config.migration.trust_handles {
            return Err(invalid(
                "the source sends file handles: give this daemon --migration-mode=file-handles or \
                 --modcaps=+dac_read_search, or the source --migration-mode=find-paths",
            ));
        }
        let root = fs.inodes.get(ROOT_ID)?;
        let mount = |mount| root.with_fd(&fs.places, |root| open_mount(root, mount));
        let mounts = state.mounts.iter().map(mount).collect();
        Ok(Self { fs, root, mounts, lost: 0 })
    }

    fn load(&mut self, state: &State) -> io::Result<()> {
        // The root's nodeid is never given to another file.
        let next = ROOT_ID + 1..=MAX_NODEID;
        let given = ROOT_ID..state.next_id;
        if !next.contains(&state.next_id) || state.inodes.iter().any(|inode| !given.contains(&inode.id)) {
            return Err(invalid("the state is damaged: a nodeid that was never given out"));
        }
        for inode in &state.inodes {
            self.inode(inode)?;
        }
        for handle in &state.handles {
            self.handle(handle)?;
        }
        Ok(())
    }

    fn inode(&mut self, inode: &InodeState) -> io::Result<()> {
        if (inode.id == ROOT_ID) != (inode.location == Location::Root) {
            return Err(invalid("the state is damaged: it has another root"));
        }
        let found = match inode.location {
            Location::Root => {
                let same = self.root.with_fd(&self.fs.places, |fd| verify(fd, inode));
                return same.map(drop).map_err(|_| invalid("the shared directory is not the one of the source"));
            }
            _ => self.find(inode),
        };
        // Nobody waits for a file that the guest has forgotten.
        let stays =
            |place: &Place| inode.nlookup > 0 || self.fs.inodes.remembers() && matches!(place, Place::Handle(_));
        let entered = match found {
            Ok((_, place)) if !stays(&place) => return Ok(()),
            Err(_) if inode.nlookup == 0 => return Ok(()),
            Ok((key, place)) => self.fs.inodes.restore(inode.id, inode.nlookup, key, place),
            Err(errno) => {
                self.lose(&inode.location, errno)?;
                self.fs.inodes.restore_lost(inode.id, inode.nlookup, inode.format)
            }
        };
        entered.map_err(|_| invalid("the state is damaged: a nodeid comes twice"))
    }

    /// Counts a file that cannot be found as lost, or ends the migration.
    fn lose(&mut self, what: &dyn std::fmt::Display, errno: Errno) -> io::Result<()> {
        if self.fs.config.migration.on_error == MigrationOnError::Abort {
            let text = format!("{what}: {errno} (--migration-on-error=guest-error would go on without it)");
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        tracing::debug!("lost {what}: {errno}");
        self.lost += 1;
        Ok(())
    }

    fn find(&self, inode: &InodeState) -> Result<(Key, Place)> {
        let fd = match &inode.location {
            Location::Path(path) => {
                self.root.with_fd(&self.fs.places, |root| open_beneath(root, path, OFlags::PATH))?
            }
            Location::Entry { parent, name } => return self.find_entry(inode, *parent, name),
            Location::Handle(mount, raw) => {
                let mount = self.mounts.get(*mount as usize).ok_or(Errno::INVAL)?;
                open_by_handle(mount.as_ref().map_err(|errno| *errno)?.as_fd(), raw, OFlags::PATH.bits() as i32)?
            }
            Location::Lost(errno) => return Err(*errno),
            Location::Root => return Err(Errno::INVAL),
        };
        let st = verify(fd.as_fd(), inode)?;
        let key = Key::of(fd.as_fd(), &st, Some(&self.root.key), None);
        Ok((key, self.fs.places.place(fd)?.0))
    }

    fn find_entry(&self, inode: &InodeState, parent: u64, name: &[u8]) -> Result<(Key, Place)> {
        let directory = self.fs.inodes.get(parent)?;
        entry(self.fs, parent, name, |parent, dir, name| {
            let key = match inode.verify {
                Some(_) => {
                    let fd = open_path(dir, &name)?;
                    let st = verify(fd.as_fd(), inode)?;
                    Key::of(fd.as_fd(), &st, Some(&parent.key), Some((parent.id, &name)))
                }
                None => {
                    let seen = Seen::at(parent, dir, &name)?;
                    check_format(seen.st, inode)?;
                    seen.key
                }
            };
            Ok((key, Place::Name(directory, name.into())))
        })
    }

    fn handle(&mut self, handle: &HandleState) -> io::Result<()> {
        let inode = self
            .fs
            .inodes
            .get(handle.node)
            .map_err(|_| invalid("the state is damaged: an open file without an inode"))?;
        let opened = if inode.is_lost() { Err(handle.node) } else { self.open(&inode, handle)? };
        self.fs.handles.restore(handle.fh, opened).map_err(|_| invalid("the state is damaged: an impossible handle"))
    }

    fn open(&mut self, inode: &Arc<Inode>, handle: &HandleState) -> io::Result<std::result::Result<Handle, u64>> {
        let opened = match (handle.directory, inode.format()) {
            (true, libc::S_IFDIR) => {
                let file = inode.open(&self.fs.places, OFlags::RDONLY | OFlags::DIRECTORY);
                file.map(|file| self.fs.handle(inode, file))
            }
            (false, libc::S_IFREG) => self.open_file(inode, handle.flags).map(|file| self.fs.handle(inode, file)),
            // The source had a file of another type open.
            _ => Err(Errno::STALE),
        };
        match opened {
            Ok(handle) => Ok(Ok(handle)),
            Err(errno) => {
                self.lose(&format_args!("an open file (nodeid {})", inode.id), errno)?;
                Ok(Err(inode.id))
            }
        }
    }

    fn open_file(&self, inode: &Arc<Inode>, flags: u32) -> Result<OwnedFd> {
        let mut keep = KEPT;
        keep.set(OFlags::DIRECT, self.fs.config.allow_direct_io);
        keep.set(OFlags::NOATIME, self.fs.config.preserve_noatime);
        let flags = OFlags::from_bits_retain(flags) & keep;
        if flags & OFlags::ACCMODE != OFlags::RDONLY {
            self.fs.writable()?;
        }
        inode.open_waiting(&self.fs.places, flags | OFlags::NOCTTY)
    }
}

/// Opens a mount that the source named, if it is the same mount.
fn open_mount(root: BorrowedFd, mount: &MountState) -> Result<OwnedFd> {
    let fd = open_beneath(root, &mount.path, OFlags::PATH)?;
    // A mount's root is a directory or a regular file. Opening anything else could block, or do something.
    let format = u32::from(stat(fd.as_fd(), c"")?.stx_mode) & libc::S_IFMT;
    if !matches!(format, libc::S_IFDIR | libc::S_IFREG) {
        return Err(Errno::STALE);
    }
    if fstatfs(&fd)?.f_type as u64 != mount.kind || name_to_handle(fd.as_fd())?.0 != mount.root {
        return Err(Errno::STALE);
    }
    reopen(fd.as_fd(), OFlags::RDONLY)
}

/// The file's attributes, if it has the type and the handle that the source saw.
fn verify(fd: BorrowedFd, inode: &InodeState) -> Result<Statx> {
    let st = check_format(stat(fd, c"")?, inode)?;
    match &inode.verify {
        Some(raw) if name_to_handle(fd)?.0 != *raw => Err(Errno::STALE),
        _ => Ok(st),
    }
}

fn check_format(st: Statx, inode: &InodeState) -> Result<Statx> {
    if u32::from(st.stx_mode) & libc::S_IFMT == inode.format { Ok(st) } else { Err(Errno::STALE) }
}
