//! What the threads of the window process share, and the daemon's calls.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicI32;

use parking_lot::RwLock;
use rustix::fs::{Mode, OFlags, fcntl_getfl, openat};
use rustix::io::Errno;
use rustix::net::SendFlags;
use zerocopy::IntoBytes;

use super::Kind;
use super::data::Data;
use super::marks::{Gate, Marks, Watch};
use super::messages::{
    Answer, Call, FIND_CACHED, FIND_THROUGH, INVALIDATE, Notice, OPEN_CACHED, OPEN_THROUGH, WATCH, send,
};
use super::nodes::{FileId, Node, Nodes};
use crate::fuse::abi::{NOTIFY_INVAL_INODE, NotifyInvalInodeOut, OutHeader};
use crate::window::sys;

/// What the threads of the window process share.
pub struct Shared {
    /// /dev/fuse.
    pub fuse: OwnedFd,
    /// The mount's directory.
    pub root: OwnedFd,
    pub calls: OwnedFd,
    /// For INVALIDATE, which waits for a real file.
    pub invalidations: OwnedFd,
    pub notices: OwnedFd,
    pub nodes: Nodes,
    pub data: Data,
    /// Is read while a thread waits for the kernel to forget pages.
    pub invalidating: RwLock<()>,
    /// The daemon's process.
    pub daemon: AtomicI32,
    pub gate: Result<Gate, String>,
    pub watch: Option<Watch>,
}

impl Shared {
    /// `sockets`: the daemon's ends of calls, invalidations and notices.
    pub fn new(
        (fuse, root): (OwnedFd, OwnedFd),
        [calls, invalidations, notices]: [OwnedFd; 3],
        gate: Result<Gate, String>,
        watch: Option<Watch>,
    ) -> Self {
        let (nodes, data, invalidating, daemon) = Default::default();
        Self { fuse, root, calls, invalidations, notices, nodes, data, invalidating, daemon, gate, watch }
    }

    pub fn answer(&self, call: Call, real: Option<OwnedFd>) -> (Answer, Vec<Arc<OwnedFd>>) {
        let result = match (call.what, real) {
            (OPEN_THROUGH, Some(real)) => self.open(call.id, Kind::Through, real),
            (OPEN_CACHED, Some(real)) => self.open(call.id, Kind::Cached, real),
            (FIND_THROUGH, None) => self.find(call.id, Kind::Through),
            (FIND_CACHED, None) => self.find(call.id, Kind::Cached),
            (WATCH, None) => self.watch(call.id).map(|()| Default::default()),
            (INVALIDATE, None) => self.invalidate(call.id).map(|()| Default::default()),
            _ => Err(Errno::INVAL),
        };
        let failed = |e: Errno| (Answer { errno: e.raw_os_error(), ..Answer::default() }, Vec::new());
        let (answer, fds) = result.unwrap_or_else(failed);
        (Answer { number: call.number, ..answer }, fds)
    }

    fn invalidate(&self, id: u64) -> Result<(), Errno> {
        self.invalidate_node(Nodes::nodeid(id, Kind::Cached)?)
    }

    /// Makes the kernel forget the pages of a Cached proxy file. Waits for READs that are under way.
    pub fn invalidate_node(&self, nodeid: u64) -> Result<(), Errno> {
        let notice = NotifyInvalInodeOut { ino: nodeid, off: 0, len: 0 };
        let _invalidating = self.invalidating.read();
        match self.tell_kernel(0, NOTIFY_INVAL_INODE, notice.as_bytes()) {
            // The kernel does not know the node, so it has no pages of it.
            Err(Errno::NOENT) => Ok(()),
            result => result,
        }
    }

    /// Writes a reply to the kernel's FUSE, or a notification if `unique` is 0.
    pub fn tell_kernel(&self, unique: u64, error: i32, body: &[u8]) -> Result<(), Errno> {
        let header = OutHeader { len: (size_of::<OutHeader>() + body.len()) as u32, error, unique };
        rustix::io::writev(&self.fuse, &[IoSlice::new(header.as_bytes()), IoSlice::new(body)]).map(drop)
    }

    /// Tells the daemon something unasked.
    ///
    /// # Errors
    /// EAGAIN if the daemon has too many notices to read.
    pub fn notify(&self, notice: Notice) -> io::Result<()> {
        send(self.notices.as_fd(), notice.as_bytes(), &[], SendFlags::DONTWAIT)
    }

    fn watch(&self, id: u64) -> Result<(), Errno> {
        let nodeid = Nodes::nodeid(id, Kind::Through)?;
        let of = |node: &mut Node| (node.watched, node.file, node.real.clone());
        let (watched, file, real) = self.nodes.with(nodeid, of).ok_or(Errno::NOENT)?;
        if !watched {
            self.watch.as_ref().ok_or(Errno::NOSYS)?.marks.add(file, real).map_err(errno)?;
            self.nodes.with(nodeid, |node| node.watched = true);
        }
        Ok(())
    }

    /// Opens a proxy file that is open, also one that is to be dropped.
    fn find(&self, id: u64, kind: Kind) -> Result<(Answer, Vec<Arc<OwnedFd>>), Errno> {
        let nodeid = Nodes::nodeid(id, kind)?;
        // This open counts until the kernel knows of its own.
        self.nodes.opened(nodeid).ok_or(Errno::NOENT)?;
        let fd = self.open_number(nodeid);
        let found = self.nodes.with(nodeid, |node| (node.real.clone(), node.marked)).ok_or(Errno::NOENT);
        let revoked = self.nodes.is_revoked(nodeid).into();
        self.released(nodeid);
        let (real, marked) = found?;
        let guarded = u32::from(marked && kind == Kind::Through);
        Ok((Answer { guarded, revoked, ..Answer::default() }, vec![fd?.into(), real]))
    }

    fn open(&self, id: u64, kind: Kind, real: OwnedFd) -> Result<(Answer, Vec<Arc<OwnedFd>>), Errno> {
        let nodeid = Nodes::nodeid(id, kind)?;
        let file = FileId::of(&real).map_err(errno)?;
        // The kernel opens a backing file anew, and would for writing whatever `real` is open for.
        if kind == Kind::Through && fcntl_getfl(&real)? & OFlags::ACCMODE != OFlags::RDWR {
            return Err(Errno::ACCESS);
        }
        let real = Arc::new(real);
        let is_passing = |gate: &Gate| kind == Kind::Through && gate.is_passing(file);
        // If there were a new proxy file at once, the truncation would have to wait on.
        let is_leaving = kind == Kind::Through && self.nodes.is_leaving(file);
        if is_leaving || self.gate.as_ref().is_ok_and(is_passing) {
            return Err(Errno::BUSY);
        }
        if self.nodes.reopen(nodeid, file, &real)?.is_none() {
            let backing = (kind == Kind::Through).then(|| sys::backing_open(self.fuse.as_fd(), real.as_fd()));
            self.nodes.insert(nodeid, file, Arc::clone(&real), backing.transpose().map_err(errno)?);
        }
        // This open counts until the kernel knows of its own.
        let opened = self.open_node(nodeid, file, &real);
        self.released(nodeid);
        opened.map(|(fd, marked)| {
            let guarded = marked && kind == Kind::Through;
            (Answer { guarded: guarded.into(), ..Answer::default() }, vec![fd.into()])
        })
    }

    fn open_number(&self, nodeid: u64) -> Result<OwnedFd, Errno> {
        openat(&self.root, nodeid.to_string(), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
    }

    /// Opens the proxy file and only then marks the real one, so that page faults of its mappings are no events.
    fn open_node(&self, nodeid: u64, file: FileId, real: &Arc<OwnedFd>) -> Result<(OwnedFd, bool), Errno> {
        let fd = self.open_number(nodeid)?;
        let marked = self.nodes.with(nodeid, |node| node.marked).unwrap_or(false);
        let marked = marked || self.marks(nodeid).is_some_and(|marks| marks.add(file, real).is_ok());
        self.nodes.with(nodeid, |node| node.marked = marked);
        if self.nodes.is_revoked(nodeid) { Err(Errno::BUSY) } else { Ok((fd, marked)) }
    }

    /// The fanotify group that marks a proxy file's real file.
    fn marks(&self, nodeid: u64) -> Option<&Marks> {
        match nodeid % 2 {
            0 => self.gate.as_ref().ok().map(|gate| &gate.marks),
            _ => self.watch.as_ref().map(|watch| &watch.marks),
        }
    }

    /// Counts one open of a proxy file less. After the last one, drops everything that belongs to it.
    pub fn released(&self, nodeid: u64) {
        let Some(node) = self.nodes.released(nodeid) else { return };
        if node.marked {
            self.marks(nodeid).inspect(|marks| marks.remove(node.file, &node.real));
        }
        if node.watched {
            self.watch.iter().for_each(|watch| watch.marks.remove(node.file, &node.real));
        }
        if let Some(id) = node.backing {
            let _ = sys::backing_close(self.fuse.as_fd(), id);
        }
        if let Ok(gate) = &self.gate {
            gate.wake();
        }
    }
}

/// The errno of an error; EIO if it has none.
pub fn errno(e: std::io::Error) -> Errno {
    Errno::from_io_error(&e).unwrap_or(Errno::IO)
}
