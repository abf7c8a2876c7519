//! Watches the shared directory for changes by others than this daemon, by fanotify(7).
//!
//! A mark on a directory reports what happens to its names and, while they are reached by these names, to its files.
//! The watch knows files by their handles and calls them by numbers, the nodeids. Knows no virtqueue and no FUSE.
//!
//! **What may be trusted.** The kernel queues an event after the change that it is about. So the guest may keep
//! attributes if an event that is queued after they were read finds the node in the table, and if the mark was there
//! before they were read. A node gets its number only after its attributes were read. For that case the watch counts
//! events before it looks at the table: if the count is the same before the attributes were read and after the node was
//! entered, no event was missed.
//!
//! **Own changes.** Events of this process are about what the guest has done, so the guest is not told. They still show
//! where files have moved.
//!
//! **What sends no event:** stores through a shared mapping of the file until the mapping ends, changes by another link
//! in a directory that is not marked, mounts, and access times.

mod event;
mod table;
#[cfg(test)]
pub(crate) mod tests;

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use parking_lot::{Mutex, RwLock};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::{fanotify, limits};
use event::{Event, Place};
use table::Table;
pub use table::{Cover, FileId};

/// A group that reports events with the directory, the name and the file (Linux 5.17). It needs no privilege.
const GROUP: u32 = libc::FAN_CLASS_NOTIF | libc::FAN_REPORT_DFID_NAME_TARGET | libc::FAN_NONBLOCK;
/// What a directory's mark reports. FAN_CLOSE_WRITE shows what was stored through a mapping, once that is gone.
const DIRECTORY: u64 = FILE | libc::FAN_CREATE | libc::FAN_DELETE | libc::FAN_RENAME | FLAGS;
/// What the mark of another file reports.
const FILE: u64 =
    libc::FAN_MODIFY | libc::FAN_ATTRIB | libc::FAN_CLOSE_WRITE | libc::FAN_DELETE_SELF | libc::FAN_MOVE_SELF;
const FLAGS: u64 = libc::FAN_EVENT_ON_CHILD | libc::FAN_ONDIR;
/// Events that are about a name.
const NAMES: u64 = libc::FAN_CREATE | libc::FAN_DELETE | libc::FAN_RENAME;

/// Room for the events of one read(2); more come with the next. 64 KiB hold some 800, which take less than a
/// millisecond.
const BUFFER: usize = 64 << 10;

/// How often the events are read before the listener hears that these are all for now: one system call makes several
/// events, as an exchange of two names does, and they belong together.
const READS: usize = 4;

/// How long events wait after a read(2) that had own ones alone. A guest that writes causes one for each write, and
/// each would wake the thread: 10 % fewer writes of 4 KiB in a QEMU guest. Events of one file become one while they
/// wait. It is short beside the 10 ms within which a guest should see the host's changes.
const REST: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// A change by another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change<'a> {
    /// What happened, FAN_* bits. One event may stand for several changes, in no known order.
    pub mask: u64,
    /// The node that changed. 0 if it is not known. If the guest has several of the file, this is one of them.
    pub node: u64,
    /// The file that changed.
    pub file: Option<FileId>,
    /// The directory and the name of what changed, or the old ones. 0 if the directory is not known.
    pub dir: u64,
    /// See `dir`.
    pub name: &'a [u8],
    /// Where a rename led.
    pub to: Option<(u64, &'a [u8])>,
}

/// Is told of changes by others, on the watch's thread. Must not wait.
pub trait Listener: Send + Sync {
    /// A change.
    fn change(&self, change: &Change);
    /// The guest may have the attributes, the contents or the listing of a node wrong.
    fn look_again(&self, node: u64);
    /// The guest may have wrong what a name in a directory leads to.
    fn look_up_again(&self, dir: u64, name: &[u8]);
    /// Anything may have changed.
    fn all_changed(&self);
    /// All changes that were there have been told.
    fn all_told(&self);
}

/// A point of the watch's work at which a test may step in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Events were read and not yet counted.
    Read,
    /// An event was counted and the table not yet asked.
    Counted,
    /// All events that were read were own ones, so the next ones may wait.
    Rests,
}

/// What [`Watch::mark`] needs to know of a file.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// Where `path` starts. `None`: in the current directory.
    pub dir: Option<BorrowedFd<'a>>,
    /// Its path. A symbolic link is followed only if `dir` is none: the path is then one in /proc/self/fd.
    pub path: &'a CStr,
    /// It is a directory.
    pub directory: bool,
}

impl Target<'_> {
    fn flags(&self) -> u32 {
        let only = if self.directory { libc::FAN_MARK_ONLYDIR } else { 0 };
        only | if self.dir.is_some() { libc::FAN_MARK_DONT_FOLLOW } else { 0 }
    }

    fn mask(&self) -> u64 {
        if self.directory { DIRECTORY } else { FILE }
    }

    fn start(&self) -> RawFd {
        self.dir.map_or(libc::AT_FDCWD, |dir| dir.as_raw_fd())
    }
}

/// A watch. Its thread ends when it is dropped.
pub struct Watch {
    shared: Arc<Shared>,
}

/// How much is watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watched {
    /// fanotify marks.
    pub marks: usize,
    /// Files and directories of which an event would be told.
    pub nodes: usize,
    /// Events that were taken up since the start.
    pub events: u64,
    /// Nothing is watched any longer: the host's events cannot be read.
    pub failed: bool,
}

struct Shared {
    group: OwnedFd,
    /// Readable once the thread is to end.
    end: OwnedFd,
    /// The process whose events are the guest's own changes.
    own: i32,
    /// Locked with no other lock held.
    table: RwLock<Table>,
    /// Held while marks are set and removed, before `table`: what the table says of marks is then true.
    marking: Mutex<()>,
    /// Events that were taken up. It rises before the table is asked.
    handled: AtomicU64,
    /// There was no room for another mark.
    full: AtomicBool,
    /// It has been said.
    said: AtomicBool,
    /// The thread has failed. Nothing is watched any longer.
    failed: AtomicBool,
    most_marks: usize,
    most_nodes: usize,
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.shared.end, &1u64.to_ne_bytes());
    }
}

impl Watch {
    /// A watch that marks nothing yet. To be called before the sandbox forbids fanotify_init(2).
    ///
    /// # Errors
    /// EINVAL before Linux 5.17, EPERM and ENOSYS without fanotify for this user, EMFILE if the user has too many
    /// groups (fs.fanotify.max_user_groups).
    pub fn new() -> io::Result<Self> {
        Self::with_limits(limits::WATCHES, limits::LEASES)
    }

    pub(crate) fn with_limits(most_marks: usize, most_nodes: usize) -> io::Result<Self> {
        let shared = Shared {
            group: fanotify::init(GROUP)?,
            end: eventfd(0, EventfdFlags::CLOEXEC)?,
            own: std::process::id() as i32,
            table: RwLock::default(),
            marking: Mutex::default(),
            handled: AtomicU64::new(0),
            full: AtomicBool::new(false),
            said: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            most_marks,
            most_nodes,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Starts the thread that tells `listener` what has changed.
    ///
    /// # Errors
    /// If there is no thread.
    pub fn start(&self, listener: Arc<dyn Listener>) -> io::Result<()> {
        self.start_stepped(listener, |_| {})
    }

    pub(crate) fn start_stepped(
        &self,
        listener: Arc<dyn Listener>,
        step: impl Fn(Step) + Send + 'static,
    ) -> io::Result<()> {
        let shared = self.shared.clone();
        let thread = thread::Builder::new().name("thruway-watch".into());
        thread.spawn(move || shared.run(&*listener, &step)).map(drop)
    }

    /// Events that were taken up so far.
    pub fn handled(&self) -> u64 {
        self.shared.handled.load(Ordering::SeqCst)
    }

    /// How much is watched now.
    pub fn watched(&self) -> Watched {
        let table = self.shared.table.read();
        Watched {
            marks: table.marks(),
            nodes: table.len(),
            events: self.handled(),
            failed: self.shared.failed.load(Ordering::Relaxed),
        }
    }

    /// Which events would show a change of this node.
    pub fn cover(&self, node: u64) -> Cover {
        self.shared.table.read().cover(node)
    }

    /// Whether events find this node.
    pub fn has(&self, node: u64) -> bool {
        self.shared.table.read().has(node)
    }

    /// Whether the file was found in this directory last.
    pub fn is_in(&self, node: u64, dir: u64) -> bool {
        self.shared.table.read().is_in(node, dir)
    }

    /// Enters a node, unless it is there. Whether it is now: there is a limit.
    pub fn add(&self, node: u64, file: FileId) -> bool {
        let mut table = self.shared.table.write();
        if !table.has(node) {
            if !self.has_room(&table) {
                return false;
            }
            table.add(node, file);
        }
        true
    }

    /// Notes that a file was found in a marked directory, whose events show the file's changes from now on. `handled`:
    /// [`handled`](Self::handled) from before the file was looked at. `file` is asked if the node is new. Whether the
    /// file's attributes may be trusted that were read between then and now.
    pub fn found(&self, node: u64, dir: u64, handled: u64, file: impl FnOnce() -> Option<FileId>) -> bool {
        let new = {
            let table = self.shared.table.read();
            if table.is_in(node, dir) {
                return true;
            }
            !table.has(node)
        };
        let file = if new { file() } else { None };
        let mut table = self.shared.table.write();
        // An event that was taken up meanwhile may be that the file has left, or has changed.
        if self.handled() != handled {
            return false;
        }
        match file {
            Some(file) if !table.has(node) && self.has_room(&table) => table.add(node, file),
            _ if !table.has(node) => return false,
            _ => {}
        }
        table.found(node, dir);
        true
    }

    /// Notes that the guest has moved a file, to a directory that is marked or to another one. The attributes that it
    /// knows are not to be trusted any longer if this is false.
    pub fn moved(&self, node: u64, dir: u64) -> bool {
        let mut table = self.shared.table.write();
        let dir = if table.is_marked(dir) { dir } else { 0 };
        let before = table.cover(node);
        table.found(node, dir);
        table.cover(node) == before
    }

    fn has_room(&self, table: &Table) -> bool {
        table.len() < self.shared.most_nodes && !self.shared.failed.load(Ordering::Relaxed)
    }

    /// Whether the node's own mark is there.
    pub fn is_marked(&self, node: u64) -> bool {
        self.shared.table.read().is_marked(node)
    }

    /// Marks a node's file. What is read of it afterwards may be trusted.
    ///
    /// # Errors
    /// Those of fanotify_mark(2). ENOSPC if there are too many marks or nodes.
    pub fn mark(&self, node: u64, file: FileId, target: Target) -> Result<(), Errno> {
        let shared = &self.shared;
        if shared.full.load(Ordering::Relaxed) {
            return Err(Errno::NOSPC);
        }
        let _marking = shared.marking.lock();
        if shared.table.read().is_marked(node) {
            return Ok(());
        }
        if shared.table.read().marks() >= shared.most_marks || !self.add(node, file) {
            shared.is_full();
            return Err(Errno::NOSPC);
        }
        let flags = libc::FAN_MARK_ADD | target.flags();
        match fanotify::mark(shared.group.as_fd(), flags, target.mask(), target.start(), Some(target.path)) {
            Ok(()) => shared.keep(node, file, target),
            Err(e) => {
                let errno = e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error);
                if errno == Errno::NOSPC {
                    shared.is_full();
                }
                Err(errno)
            }
        }
    }

    /// Forgets a node. `unmark` is called if its file has a mark that is no longer needed.
    pub fn forget(&self, node: u64, unmark: impl FnOnce(&dyn Fn(Target))) {
        let shared = &self.shared;
        if !shared.table.read().is_marked(node) {
            shared.table.write().remove(node);
            return;
        }
        let _marking = shared.marking.lock();
        let shared_mark = {
            let mut table = shared.table.write();
            table.set_marked(node, false);
            let shares = table.shares_mark(node);
            table.remove(node);
            shares
        };
        if !shared_mark {
            unmark(&|target| shared.unmark(target));
        }
        shared.full.store(false, Ordering::Relaxed);
    }

    /// Forgets everything.
    pub fn clear(&self) {
        let shared = &self.shared;
        let _marking = shared.marking.lock();
        if shared.table.read().len() == 0 {
            return;
        }
        shared.table.write().clear();
        // Marks that stay cost no more than events that nobody asked for.
        let _ = fanotify::flush(shared.group.as_fd());
        shared.full.store(false, Ordering::Relaxed);
    }
}

impl Shared {
    /// Notes a mark that the kernel has. To be called with `marking`.
    ///
    /// # Errors
    /// ENOENT if the guest has forgotten the node meanwhile. The mark is gone then.
    fn keep(&self, node: u64, file: FileId, target: Target) -> Result<(), Errno> {
        let mut table = self.table.write();
        if table.has(node) {
            table.set_marked(node, true);
            return Ok(());
        }
        if !table.of(Some(file)).iter().any(|node| table.is_marked(*node)) {
            drop(table);
            self.unmark(target);
        }
        Err(Errno::NOENT)
    }

    /// Has the kernel take a mark away. That of a file that is gone went with it.
    fn unmark(&self, target: Target) {
        let flags = libc::FAN_MARK_REMOVE | target.flags();
        let _ = fanotify::mark(self.group.as_fd(), flags, target.mask(), target.start(), Some(target.path));
    }

    fn is_full(&self) {
        limits::Limit::Watches.reached();
        self.full.store(true, Ordering::Relaxed);
        if !self.said.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "{} files and directories are watched, and there is no room for more: the guest uses the timeouts of \
                 --cache for the others (fs.fanotify.max_user_marks)",
                self.table.read().marks()
            );
        }
    }

    fn run(&self, listener: &dyn Listener, step: &dyn Fn(Step)) {
        let mut buffer = vec![0; BUFFER];
        loop {
            let mut ready = [PollFd::new(&self.group, PollFlags::IN), PollFd::new(&self.end, PollFlags::IN)];
            let _ = poll(&mut ready, None);
            if !ready[1].revents().is_empty() {
                return;
            }
            let (mut own, mut bytes) = (true, 0);
            for _ in 0..READS {
                match rustix::io::read(&self.group, &mut buffer) {
                    Ok(length) => {
                        own &= self.take(&buffer[..length], listener, step);
                        bytes += length;
                    }
                    Err(Errno::AGAIN | Errno::INTR) => break,
                    Err(errno) => {
                        // Nothing that was promised holds any longer.
                        tracing::error!("the share is no longer watched for changes on the host: {errno}");
                        self.fail(listener);
                        return;
                    }
                }
            }
            listener.all_told();
            // If there are many, more may be waiting, and the kernel keeps a limited number.
            if own && bytes < BUFFER / 2 {
                step(Step::Rests);
                let _ = poll(&mut ready[1..], Some(&REST));
            }
        }
    }

    fn fail(&self, listener: &dyn Listener) {
        self.handled.fetch_add(1, Ordering::SeqCst);
        {
            let mut table = self.table.write();
            self.failed.store(true, Ordering::Relaxed);
            table.clear();
        }
        listener.all_changed();
    }

    /// Whether all these events are about own changes.
    fn take(&self, mut bytes: &[u8], listener: &dyn Listener, step: &dyn Fn(Step)) -> bool {
        step(Step::Read);
        let mut all_own = true;
        while let Some((event, rest)) = Event::read(bytes) {
            bytes = rest;
            if event.mask & libc::FAN_Q_OVERFLOW != 0 {
                all_own = false;
                // Files may have moved unseen. Marks stay.
                self.handled.fetch_add(1, Ordering::SeqCst);
                step(Step::Counted);
                self.table.write().lose();
                listener.all_changed();
                continue;
            }
            let own = event.pid == self.own;
            all_own &= own;
            if !own || self.table.read().several {
                self.handled.fetch_add(1, Ordering::SeqCst);
            }
            step(Step::Counted);
            self.follow(&event, listener);
            self.tell(&event, own, listener);
        }
        all_own
    }

    /// Notes where files have gone. This comes before the guest is told: it may ask again at once.
    fn follow(&self, event: &Event, listener: &dyn Listener) {
        if event.mask & (libc::FAN_DELETE | libc::FAN_RENAME) == 0 || event.mask & libc::FAN_ONDIR != 0 {
            return;
        }
        let mut table = self.table.write();
        let marked = |table: &Table, dir| table.of(dir).iter().copied().find(|dir| table.is_marked(*dir));
        let mut bare = Vec::new();
        for node in table.of(event.object).to_vec() {
            let before = table.cover(node);
            if event.mask & libc::FAN_RENAME != 0 {
                let dir = marked(&table, event.to.dir).unwrap_or(0);
                table.found(node, dir);
            } else if table.of(event.place.dir).iter().any(|dir| table.is_in(node, *dir)) {
                table.found(node, 0);
            }
            if table.cover(node) != before && before != Cover::Not {
                bare.push(node);
            }
        }
        drop(table);
        // The guest has moved it, and a lookup at the same time has found it at its old place: further changes will
        // not be seen. What the guest has removed is gone.
        let moved = event.pid == self.own && event.mask & libc::FAN_RENAME != 0;
        bare.iter().filter(|_| moved).for_each(|node| listener.look_again(*node));
    }

    fn tell(&self, event: &Event, own: bool, listener: &dyn Listener) {
        // Collected first: the listener must not be called with the table locked.
        let (nodes, dirs, to, disturbed) = {
            let table = self.table.read();
            let of = |file| table.of(file).to_vec();
            let dirs = of(event.place.dir);
            let disturbed = dirs.iter().any(|dir| table.is_disturbed(*dir));
            (of(event.object), dirs, of(event.to.dir), disturbed)
        };
        if !own && event.mask & NAMES != 0 {
            let mut table = self.table.write();
            [event.place.dir, event.to.dir].into_iter().for_each(|dir| table.disturb(dir));
        }
        // The guest has moved a file, perhaps another one than it believed: before it heard of it, others may have put
        // this one in its place.
        if own && event.mask & libc::FAN_RENAME != 0 && disturbed {
            to.iter().for_each(|dir| listener.look_up_again(*dir, event.to.name));
        }
        // A file may have several numbers. A change by others has the first. For its own change the guest has used one
        // of them, and it is not known which.
        let others = |nodes: &[u64]| match nodes.len() {
            0 | 1 => Vec::new(),
            _ => nodes[usize::from(!own)..].to_vec(),
        };
        if event.mask & NAMES != 0 {
            for (dirs, Place { name, .. }) in [(&dirs, event.place), (&to, event.to)] {
                for dir in others(dirs) {
                    listener.look_up_again(dir, name);
                    listener.look_again(dir);
                }
            }
        }
        for node in others(&nodes) {
            listener.look_again(node);
        }
        if !own {
            let one = |nodes: &[u64]| nodes.first().copied().unwrap_or(0);
            let (dir, name) = (one(&dirs), event.place.name);
            let to = (event.mask & libc::FAN_RENAME != 0).then(|| (one(&to), event.to.name));
            let (node, file) = (one(&nodes), event.object);
            listener.change(&Change { mask: event.mask, node, file, dir, name, to });
        }
    }
}
