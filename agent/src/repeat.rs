//! Repeats changes by system calls. The daemon answers them without doing anything on the host.
//!
//! Follows no symbolic link, and opens nothing but directories and regular files: everything else is O_PATH.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Statx, StatxFlags, Timespec, Timestamps,
    UTIME_OMIT, mkdirat, mknodat, openat, openat2, readlinkat, renameat_with, statx, unlinkat, utimensat,
};
use rustix::io::Errno;
use thruway_guest::protocol::{ASIDE, Batch, Change, Done, FOUND, Found, MESSAGE, PATH, Place, QUIET, ops};

use crate::sys;
use crate::watched::Watched;

type Result<T> = std::result::Result<T, Errno>;

/// How often to ask for attributes whose reply the kernel dropped, because others asked at the same time.
const ASK: usize = 5;

/// Directories whose paths are remembered. With paths of 60 bytes they take 100 KiB.
const PATHS: usize = 1024;

/// Directories that are held open while directories are moved. More are rare, and only cost events.
const HELD: usize = 64;

/// Names of one file that are ended. More are rare, and end with their timeout.
const NAMES: usize = 1024;

/// A batch of so many changes is worth a look at what is watched, which takes a millisecond or two.
const MANY: usize = 16;

/// Batches of many changes, all of them watched, after which to look again whether they still are. Without that look a
/// batch takes a tenth less.
const KEEP: usize = 16;

/// What a change needs of the share.
pub struct Hands<'a> {
    /// The share's root, open for reading.
    pub root: BorrowedFd<'a>,
    /// The directory that stands for all that the guest does not know.
    pub hidden: BorrowedFd<'a>,
    /// The name of that directory.
    token: &'a str,
    /// The share's device number.
    dev: u64,
    /// An overlay has the share as a lower layer.
    layered: &'a AtomicBool,
    /// The directory of the change before.
    last: Option<(u64, OwnedFd)>,
    /// Where directories were found last, by nodeid.
    paths: HashMap<u64, CString>,
    /// Directories are not looked for by path.
    moves: bool,
    /// Directories that were opened by handle. The kernel would forget them if they were closed, and could not open
    /// them by handle again.
    held: HashMap<u64, OwnedFd>,
    /// What is watched, as far as the batch has asked for it.
    watched: Option<Option<Rc<Watched>>>,
    /// For how many batches more that holds where it is only messages that it may cost.
    keep: usize,
}

/// A place whose directory is open.
struct Here<'a> {
    dir: BorrowedFd<'a>,
    name: CString,
}

impl<'a> Hands<'a> {
    pub fn new(
        root: BorrowedFd<'a>,
        hidden: BorrowedFd<'a>,
        token: &'a str,
        dev: u64,
        layered: &'a AtomicBool,
    ) -> Self {
        let (paths, held) = (HashMap::new(), HashMap::new());
        Self { root, hidden, token, dev, layered, last: None, paths, moves: false, held, watched: None, keep: 0 }
    }

    /// Carries out a batch. Returns what to say of it.
    pub fn carry_out(&mut self, batch: &Batch) -> Done {
        self.moves = batch.moves;
        if !batch.moves {
            self.held.clear();
        }
        let mut done = Done { batch: batch.id, ..Done::default() };
        let mut note = |result: Result<bool>| match result {
            Ok(seen) => seen,
            // The guest does not know the directory or the node any more.
            Err(Errno::STALE) => false,
            Err(errno) => {
                done.failed += 1;
                done.errno = errno.raw_os_error() as u32;
                false
            }
        };
        let changes = &batch.changes;
        let look = changes.len() >= MANY && !batch.moves;
        let all_watched = match &self.watched {
            Some(Some(watched)) => !changes.iter().any(|change| watched.misses(change)),
            Some(None) => true,
            None => false,
        };
        if look && all_watched && self.keep > 0 {
            self.keep -= 1;
        } else {
            self.keep = KEEP;
            self.watched = look.then(|| Watched::look(self.dev).map(Rc::new));
        }
        let watched = self.watched.clone().flatten();
        let (mut quiet, mut listed) = (Vec::new(), HashSet::new());
        for (index, change) in changes.iter().enumerate() {
            if watched.as_ref().is_some_and(|watched| watched.misses(change) && !self.replaces(change, watched)) {
                quiet.push(index);
            } else {
                note(self.repeat(index, change));
            }
        }
        // One name of each directory is repeated nevertheless. So the kernel knows that its listing has changed.
        quiet.retain(|index| {
            let change = &changes[*index];
            let dirs = [change.place.dir, change.to.dir].into_iter().filter(|dir| *dir != 0);
            let names = change.has(ops::CREATE | ops::RENAME | ops::REMOVE);
            if !names || dirs.clone().all(|dir| listed.contains(&dir)) {
                return true;
            }
            if note(self.repeat(*index, change)) {
                listed.extend(dirs);
            }
            false
        });
        if !quiet.is_empty() {
            let mut bitmap = [0; MESSAGE / 8];
            quiet.iter().for_each(|index| bitmap[index / 8] |= 1 << (index % 8));
            let known = sys::ask(self.root, QUIET, &bitmap);
            for index in quiet {
                let change = &changes[index];
                // A daemon that does not know the call wants all repeated.
                note(if known.is_ok() { self.renew(change) } else { self.repeat(index, change) });
            }
        }
        self.last = None;
        done
    }

    /// Whether a rename replaces a file that is watched, as the kernel knows it.
    fn replaces(&mut self, change: &Change, watched: &Watched) -> bool {
        let replaced = |here: Here| here.open().and_then(|file| sys::node_of(file.as_fd()));
        change.has(ops::RENAME) && self.here(&change.to).and_then(replaced).is_ok_and(|node| watched.has(node))
    }

    /// Has the kernel look at what a change that nobody watches has made old.
    fn renew(&mut self, change: &Change) -> Result<bool> {
        let mut names = 0;
        if change.node != 0 {
            // One of its names ends, too.
            names = look(sys::open_node(self.root, change.node, OFlags::PATH)?.as_fd())?.stx_nlink;
        }
        // Of a file with several names, it may have been another one.
        let old = change.has(ops::RENAME) || change.has(ops::REMOVE) && names > 0;
        let places = [(&change.place, change.has(ops::CREATE) || old), (&change.to, change.has(ops::RENAME))];
        for (place, _) in places.into_iter().filter(|(_, asks)| *asks) {
            // The kernel asks for the name. Nothing is made.
            let _ = self.here(place)?.make(change);
        }
        Ok(true)
    }

    /// Repeats a change. `index`: its place in the batch. Returns whether the kernel knows that a listing has changed.
    ///
    /// # Errors
    /// If the guest could only be shown how things are now, or not even that.
    fn repeat(&mut self, index: usize, change: &Change) -> Result<bool> {
        let index = index as u32;
        if change.has(ops::RENAME | ops::EXCHANGE) {
            return self.rename(index, change).map(|()| true);
        }
        if change.place.is_none() {
            let file = match change.has(ops::DIRECTORY) {
                true => self.directory(change.node)?,
                false => sys::open_node(self.root, change.node, OFlags::PATH)?,
            };
            if change.has(ops::REFRESH) {
                let st = look(file.as_fd())?;
                if u32::from(st.stx_mode) & libc::S_IFMT != libc::S_IFDIR {
                    self.end_names(change.node, file);
                }
            } else {
                touch(file.as_fd(), change)?;
            }
            return Ok(false);
        }
        let root = self.root;
        let mut here = self.here(&change.place)?;
        if change.has(ops::REFRESH) {
            here.settle(root, index);
            return Ok(false);
        }
        let (mut listed, mut known) = (change.has(ops::REMOVE), false);
        let more = change.has(ops::CONTENTS | ops::CLOSED | ops::ATTRIBUTES);
        if change.has(ops::CREATE) {
            let new = change.node == 0 && change.has(ops::CLOSED) && !change.has(ops::DIRECTORY | ops::REMOVE);
            match if new { here.make_and_touch(change) } else { here.make(change) } {
                Ok(()) if new => return Ok(true),
                Ok(()) => listed = true,
                // The guest knows it already.
                Err(Errno::EXIST) => known = change.has(ops::DIRECTORY),
                Err(errno) => return Err(errno),
            }
            // It is another name of a file that the guest knows.
            if change.node != 0 {
                sys::open_node(root, change.node, OFlags::PATH)
                    .and_then(|file| look(file.as_fd()))
                    .map(drop)
                    .or_else(stale)?;
            }
        }
        if known {
            listed |= self.make_known(index, change)?;
            here = self.here(&change.place)?;
        }
        if more {
            match here.open() {
                Ok(file) if is_of(root, index, change, sys::node_of(file.as_fd())?) => touch(file.as_fd(), change)?,
                // It has been moved or removed: that change follows.
                Ok(_) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
        }
        if change.has(ops::REMOVE) {
            let removed = here.remove(root, index, change);
            if removed.is_err() {
                here.settle(root, index);
            }
            removed?;
        }
        Ok(listed)
    }

    /// Makes the name of a directory that the guest knows already, for those who watch. It gets another name for that
    /// moment. Returns whether the name was made.
    fn make_known(&mut self, index: u32, change: &Change) -> Result<bool> {
        let dev = self.dev;
        let watched = self.watched.get_or_insert_with(|| Watched::look(dev).map(Rc::new));
        if watched.as_ref().is_some_and(|watched| !watched.has(change.place.dir)) {
            return Ok(false);
        }
        let (root, aside) = (self.root, CString::new(format!("{}{ASIDE}{index}", self.token)));
        let here = self.here(&change.place)?;
        // The kernel locks the directory for it, so no lookup is under way that brings it back unseen.
        match mkdirat(here.dir, aside.unwrap_or_default(), Mode::empty()) {
            Err(Errno::EXIST) => match here.make(change) {
                Ok(()) => Ok(true),
                Err(_) => {
                    // If it is still aside, this brings it back.
                    here.settle(root, index);
                    Ok(false)
                }
            },
            _ => Ok(false),
        }
    }

    /// Ends the names by which the kernel knows a file, so that it asks for each of them again. An open by handle ends
    /// the one that it finds (fuse_get_dentry() of fs/fuse/inode.c), and a close drops that, unless somebody uses it.
    fn end_names(&self, node: u64, mut file: OwnedFd) {
        let mut last = CString::default();
        for _ in 0..NAMES {
            let name = readlinkat(CWD, fd_path(&file), Vec::new()).unwrap_or_default();
            if name == last {
                return;
            }
            last = name;
            // Before it is opened again: it would be found again.
            drop(file);
            file = match sys::open_node(self.root, node, OFlags::PATH) {
                Ok(file) => file,
                // Nothing is left.
                Err(_) => return,
            };
        }
    }

    /// The place's directory and name.
    fn here(&mut self, place: &Place) -> Result<Here<'_>> {
        let name = CString::new(&place.name[..]).map_err(|_| Errno::INVAL)?;
        let fresh = self.last.as_ref().is_none_or(|(node, _)| *node != place.dir);
        if place.dir != 0 && fresh {
            self.last = Some((place.dir, self.directory(place.dir)?));
        }
        let dir = match &self.last {
            Some((_, dir)) if place.dir != 0 => dir.as_fd(),
            _ => self.hidden,
        };
        Ok(Here { dir, name })
    }

    /// Opens a directory by its path, which costs the guest nothing. open_by_handle_at(2) would end the timeout of its
    /// name (fuse_get_dentry() of fs/fuse/inode.c), and the kernel would forget it. So that is for directories which
    /// the host has moved while the guest has them at their old place.
    fn directory(&mut self, node: u64) -> Result<OwnedFd> {
        if self.moves {
            match self.by_handle(node) {
                // The kernel has no name of it.
                Err(Errno::STALE) => {}
                opened => return opened,
            }
        }
        if let Some(path) = self.paths.get(&node) {
            if let Ok(dir) = self.open_path(node, path) {
                return Ok(dir);
            }
            self.paths.remove(&node);
        }
        if let Some(path) = ask_path(self.root, node) {
            if let Ok(dir) = self.open_path(node, &path) {
                if self.paths.len() >= PATHS {
                    self.paths.clear();
                }
                self.paths.insert(node, path);
                return Ok(dir);
            }
        }
        self.by_handle(node)
    }

    fn by_handle(&mut self, node: u64) -> Result<OwnedFd> {
        if let Some(dir) = self.held.get(&node) {
            return dir.try_clone().map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO));
        }
        let dir = sys::open_node(self.root, node, OFlags::PATH | OFlags::DIRECTORY)?;
        if self.held.len() < HELD {
            if let Ok(copy) = dir.try_clone() {
                self.held.insert(node, copy);
            }
        }
        Ok(dir)
    }

    fn open_path(&self, node: u64, path: &CStr) -> Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let path = if path.is_empty() { c"." } else { path };
        let dir = openat2(self.root, path, flags, Mode::empty(), resolve)?;
        if sys::node_of(dir.as_fd())? == node { Ok(dir) } else { Err(Errno::STALE) }
    }

    fn rename(&mut self, index: u32, change: &Change) -> Result<()> {
        let (root, hidden) = (self.root, self.hidden);
        let other = if change.to.dir == 0 { None } else { Some(self.directory(change.to.dir)?) };
        let to_dir = other.as_ref().map_or(hidden, |dir| dir.as_fd());
        let to = Here { dir: to_dir, name: CString::new(&change.to.name[..]).map_err(|_| Errno::INVAL)? };
        let layered = self.layered.load(Ordering::Relaxed);
        let from = self.here(&change.place)?;
        let exchange = change.has(ops::EXCHANGE);
        let mut replaces = false;
        if !exchange {
            match to.open().and_then(|file| Ok((sys::node_of(file.as_fd())?, file))) {
                // Somebody has looked it up at its new place before.
                Ok((node, _)) if node == change.node && node != 0 => {
                    from.settle(root, index);
                    return Ok(());
                }
                Ok((node, file)) => {
                    tell(root, Found { index, node })?;
                    // So that the kernel knows how many names it has.
                    let _ = look(file.as_fd());
                    replaces = true;
                }
                Err(_) => {}
            }
        }
        let flags = if exchange { RenameFlags::EXCHANGE } else { RenameFlags::empty() };
        let moved = match layered && !exchange && !change.has(ops::DIRECTORY) {
            true => from.move_apart(root, &to, replaces, change),
            false => from.asked(root, || renameat_with(from.dir, &from.name, to.dir, &to.name, flags)),
        };
        if moved.is_err() {
            from.settle(root, index);
            to.settle(root, index);
        }
        moved
    }
}

impl Here<'_> {
    fn open(&self) -> Result<OwnedFd> {
        openat(self.dir, &self.name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
    }

    fn make(&self, change: &Change) -> Result<()> {
        if change.has(ops::DIRECTORY) {
            mkdirat(self.dir, &self.name, Mode::empty())
        } else {
            // Of whatever type it is: the next look shows it.
            mknodat(self.dir, &self.name, FileType::RegularFile, Mode::empty(), 0)
        }
    }

    /// Makes a file, and does to it what was done to the file that it stands for.
    fn make_and_touch(&self, change: &Change) -> Result<()> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        // It lives for this moment. Its times are nobody's.
        let file = openat(self.dir, &self.name, flags, Mode::RUSR)?;
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        if change.has(ops::CONTENTS) {
            set_times(file.as_fd(), OMIT, none)?;
        }
        if change.has(ops::ATTRIBUTES) {
            set_times(file.as_fd(), none, none)?;
        }
        Ok(())
    }

    fn remove(&self, root: BorrowedFd, index: u32, change: &Change) -> Result<()> {
        let directory = change.has(ops::DIRECTORY);
        if !directory {
            if let Ok(file) = self.open() {
                let node = sys::node_of(file.as_fd())?;
                if change.node == 0 {
                    tell(root, Found { index, node })?;
                } else if !is_of(root, index, change, node) {
                    return Err(Errno::CANCELED);
                }
                // So that the kernel knows how many names it has.
                let _ = look(file.as_fd());
            }
        }
        let flags = if directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        self.asked(root, || unlinkat(self.dir, &self.name, flags))
    }

    /// Moves a file as two changes. An overlay would find it by its old name for ever: the kernel's name of the file
    /// that the overlay has is still right, at its new place.
    fn move_apart(&self, root: BorrowedFd, to: &Here, replaces: bool, change: &Change) -> Result<()> {
        let none = AtFlags::empty();
        // So that the kernel knows how many names it has.
        let _ = self.open().and_then(|file| look(file.as_fd()));
        self.asked(root, || unlinkat(self.dir, &self.name, none))?;
        if replaces {
            to.asked(root, || unlinkat(to.dir, &to.name, none))?;
        }
        match change.to.dir {
            0 => Ok(()),
            _ => to.make(change),
        }
    }

    /// Does what takes the name away. If the daemon wants that, the kernel asks for the name before.
    fn asked(&self, root: BorrowedFd, take: impl Fn() -> Result<()>) -> Result<()> {
        match take() {
            Err(Errno::AGAIN) => {
                let node = self.open().and_then(|file| sys::node_of(file.as_fd()))?;
                // The name's timeout ends (fuse_get_dentry() of fs/fuse/inode.c).
                drop(sys::open_node(root, node, OFlags::PATH)?);
                take()
            }
            done => done,
        }
    }

    /// Shows the guest what the name leads to now, after a change could not be repeated.
    fn settle(&self, root: BorrowedFd, index: u32) {
        if tell(root, Found { index, node: 0 }).is_ok() {
            // It asks for the name in any case, and is refused.
            let _ = mknodat(self.dir, &self.name, FileType::RegularFile, Mode::empty(), 0);
        }
    }
}

/// A node that the kernel does not know needs nothing.
fn stale(errno: Errno) -> Result<()> {
    if errno == Errno::STALE { Ok(()) } else { Err(errno) }
}

/// Has the kernel ask for a file's attributes. It drops the file's pages then.
fn look(file: BorrowedFd) -> Result<Statx> {
    let stat = |flags| statx(file, c"", AtFlags::EMPTY_PATH | flags, StatxFlags::BASIC_STATS);
    let facts = |st: &Statx| (st.stx_size, st.stx_mtime.tv_sec, st.stx_mtime.tv_nsec);
    let mut told = stat(AtFlags::STATX_FORCE_SYNC)?;
    for _ in 0..ASK {
        if facts(&told) == facts(&stat(AtFlags::STATX_DONT_SYNC)?) {
            break;
        }
        told = stat(AtFlags::STATX_FORCE_SYNC)?;
    }
    Ok(told)
}

/// A time that stays as it is.
const OMIT: Timespec = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };

fn set_times(file: BorrowedFd, last_access: Timespec, last_modification: Timespec) -> Result<()> {
    utimensat(file, c"", &Timestamps { last_access, last_modification }, AtFlags::EMPTY_PATH)
}

/// Repeats what happened to a file.
fn touch(file: BorrowedFd, change: &Change) -> Result<()> {
    let st = look(file)?;
    let is_file = u32::from(st.stx_mode) & libc::S_IFMT == libc::S_IFREG;
    let mtime = Timespec { tv_sec: st.stx_mtime.tv_sec, tv_nsec: st.stx_mtime.tv_nsec.into() };
    if change.has(ops::CONTENTS) && is_file {
        // The time of modification alone: IN_MODIFY.
        set_times(file, OMIT, mtime)?;
    }
    // A program is not opened: nobody could execute it meanwhile (ETXTBSY).
    if change.has(ops::CLOSED) && is_file && st.stx_mode & 0o111 == 0 {
        drop(openat(CWD, fd_path(&file), OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?);
    }
    // Of a file without a place, it is the number of its names that has changed. The kernel would report an event of
    // any of them.
    if change.has(ops::ATTRIBUTES) && (!change.place.is_none() || change.has(ops::DIRECTORY)) {
        // Both times: IN_ATTRIB.
        set_times(file, Timespec { tv_sec: st.stx_atime.tv_sec, tv_nsec: st.stx_atime.tv_nsec.into() }, mtime)?;
    }
    Ok(())
}

/// Where a directory is on the host.
fn ask_path(root: BorrowedFd, node: u64) -> Option<CString> {
    let answer = sys::ask(root, PATH, &node.to_le_bytes()).ok()?;
    CStr::from_bytes_until_nul(&answer).ok().map(CStr::to_owned)
}

/// What leads to an open file.
fn fd_path(file: &impl AsRawFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Whether this node is the change's. The daemon knows it if the kernel has forgotten the file meanwhile, and learned
/// of it anew.
fn is_of(root: BorrowedFd, index: u32, change: &Change, node: u64) -> bool {
    change.is_of(node) || tell(root, Found { index, node }).is_ok()
}

fn tell(root: BorrowedFd, found: Found) -> Result<()> {
    sys::ask(root, FOUND, &found.encode()).map(drop)
}
