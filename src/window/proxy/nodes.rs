//! The proxy files that are open, and the real files behind them.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::io::Errno;

use super::Kind;

/// The largest number whose nodeid fits in 63 bits, since inode numbers may be signed somewhere.
const MAX_ID: u64 = u64::MAX / 4;

/// The identity of a file of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// The file system (st_dev).
    pub dev: u64,
    /// The inode number (st_ino).
    pub ino: u64,
}

impl FileId {
    /// The identity of an open file.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn of(file: impl AsFd) -> io::Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        Ok(Self { dev: stat.st_dev, ino: stat.st_ino })
    }
}

/// An open proxy file.
pub struct Node {
    pub real: Arc<OwnedFd>,
    pub file: FileId,
    /// The number of the backing file. Only a Through proxy file has one.
    pub backing: Option<i32>,
    pub marked: bool,
    /// The daemon is told when others change the file.
    pub watched: bool,
    /// Its pages are out of date: writes are dropped.
    pub outdated: bool,
    /// The daemon was asked to drop it.
    revoked: bool,
    opens: u32,
}

/// The open proxy files by FUSE nodeid: 2 * id, plus 1 for a Cached one. A proxy file that nobody has open is
/// forgotten.
#[derive(Default)]
pub struct Nodes(Mutex<HashMap<u64, Node>>);

impl Nodes {
    /// The nodeid of the caller's number.
    pub fn nodeid(id: u64, kind: Kind) -> Result<u64, Errno> {
        match id {
            1..=MAX_ID => Ok(2 * id + u64::from(kind == Kind::Cached)),
            _ => Err(Errno::INVAL),
        }
    }

    /// Counts an open of a proxy file. A Cached one uses `real` from now on. `None` if there is no such proxy file.
    ///
    /// # Errors
    /// EBUSY if the daemon was asked to drop it, ESTALE if it stands for another file.
    pub fn reopen(&self, nodeid: u64, file: FileId, real: &Arc<OwnedFd>) -> Result<Option<()>, Errno> {
        let mut table = self.0.lock();
        let Some(node) = table.get_mut(&nodeid) else { return Ok(None) };
        match () {
            () if node.revoked => return Err(Errno::BUSY),
            () if node.file != file => return Err(Errno::STALE),
            () if node.backing.is_none() => node.real = Arc::clone(real),
            () => {}
        }
        node.opens += 1;
        Ok(Some(()))
    }

    /// Adds a proxy file that is open once.
    pub fn insert(&self, nodeid: u64, file: FileId, real: Arc<OwnedFd>, backing: Option<i32>) {
        let node =
            Node { real, file, backing, marked: false, watched: false, outdated: false, revoked: false, opens: 1 };
        self.0.lock().insert(nodeid, node);
    }

    /// Calls `f` with an open proxy file.
    pub fn with<T>(&self, nodeid: u64, f: impl FnOnce(&mut Node) -> T) -> Option<T> {
        self.0.lock().get_mut(&nodeid).map(f)
    }

    /// Counts an open. Returns the backing file's number, if there is one.
    pub fn opened(&self, nodeid: u64) -> Option<Option<i32>> {
        self.with(nodeid, |node| {
            node.opens += 1;
            node.backing
        })
    }

    /// Whether the daemon was asked to drop one of the file's proxy files.
    pub fn is_leaving(&self, file: FileId) -> bool {
        self.0.lock().values().any(|node| node.revoked && node.file == file)
    }

    /// Whether the daemon was asked to drop it.
    pub fn is_revoked(&self, nodeid: u64) -> bool {
        self.with(nodeid, |node| node.revoked).unwrap_or(true)
    }

    /// Counts one open less. Returns the proxy file if it was the last.
    pub fn released(&self, nodeid: u64) -> Option<Node> {
        let mut table = self.0.lock();
        let node = table.get_mut(&nodeid)?;
        node.opens -= 1;
        if node.opens == 0 { table.remove(&nodeid) } else { None }
    }

    /// Asks for the end of each Through proxy file of `file`, by `ask(id)`, until that returns true. Whether there are
    /// any.
    pub fn revoke(&self, file: FileId, ask: impl Fn(u64) -> bool) -> bool {
        let mut any = false;
        for (nodeid, node) in self.0.lock().iter_mut().filter(|(id, node)| *id % 2 == 0 && node.file == file) {
            any = true;
            node.revoked = node.revoked || ask(nodeid / 2);
        }
        any
    }

    /// The ids of the watched proxy files of `file`, or of all files.
    pub fn watched(&self, file: Option<FileId>) -> Vec<u64> {
        let table = self.0.lock();
        let wanted = |node: &Node| node.watched && file.is_none_or(|file| node.file == file);
        table.iter().filter(|(_, node)| wanted(node)).map(|(id, _)| id / 2).collect()
    }

    /// The nodeids of the Cached proxy files of `file`, or of all files.
    pub fn cached(&self, file: Option<FileId>) -> Vec<u64> {
        let table = self.0.lock();
        let of_file = |node: &Node| file.is_none_or(|file| node.file == file);
        table.iter().filter(|(id, node)| *id % 2 == 1 && of_file(node)).map(|(id, _)| *id).collect()
    }
}
