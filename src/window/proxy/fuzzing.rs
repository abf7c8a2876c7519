//! For fuzz/: the window process's side, in this process.

use super::fuse::Fuse;
use super::marks::Watch;
use super::messages::pair;
use super::process::mount;
use super::shared::Shared;
use super::*;

use std::sync::Arc;

/// A window process without a guard. Its kernel's side is a mount, or what the other end of a socket says.
pub struct Harness {
    shared: Arc<Shared>,
    fuse: Option<Fuse>,
}

impl Harness {
    /// With a mount, which a thread serves.
    pub fn mounted() -> io::Result<Self> {
        let (fuse, root) = mount().map_err(io::Error::other)?;
        let mut rig = Self::new(fuse, root);
        let mut fuse = rig.fuse.take().ok_or(io::ErrorKind::Other)?;
        fuse.serve_one()?;
        std::thread::spawn(move || fuse.run());
        Ok(rig)
    }

    /// With a socket of whole messages for /dev/fuse.
    pub fn talking(fuse: OwnedFd, root: OwnedFd) -> Self {
        Self::new(fuse, root)
    }

    fn new(fuse: OwnedFd, root: OwnedFd) -> Self {
        let (calls, notices) = pair().unwrap_or_else(|e| panic!("{e}"));
        let (invalidations, _) = pair().unwrap_or_else(|e| panic!("{e}"));
        let sockets = [calls, invalidations, notices];
        let shared = Arc::new(Shared::new((fuse, root), sockets, Err(String::new()), Watch::new().ok()));
        Self { fuse: Some(Fuse::new(shared.clone())), shared }
    }

    /// Serves one message of the kernel's.
    pub fn serve_one(&mut self) -> bool {
        self.fuse.as_mut().is_some_and(|fuse| fuse.serve_one().is_ok())
    }

    /// A call of the daemon: the errno, and a proxy file.
    pub fn answer(&self, what: u64, id: u64, real: Option<OwnedFd>) -> (i32, Option<OwnedFd>) {
        let (answer, mut fds) = self.shared.answer(Call { what, id, number: 0 }, real);
        (answer.errno, fds.pop().and_then(Arc::into_inner))
    }

    /// Enters an open node.
    pub fn insert(&self, id: u64, kind: Kind, real: OwnedFd) {
        let (Ok(nodeid), Ok(file)) = (nodes::Nodes::nodeid(id, kind), nodes::FileId::of(&real)) else { return };
        self.shared.nodes.insert(nodeid, file, Arc::new(real), None);
    }

    /// Whether there is nothing of a node any more.
    pub fn is_forgotten(&self, id: u64) -> bool {
        [Kind::Through, Kind::Cached]
            .into_iter()
            .filter_map(|kind| nodes::Nodes::nodeid(id, kind).ok())
            .all(|nodeid| self.shared.nodes.with(nodeid, |_| ()).is_none())
    }
}
