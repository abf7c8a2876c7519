//! What the guest's agent repeats: changes by others, and the share's present state (docs/guest-agent.md).

use std::ffi::CStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use thruway_guest::protocol::{Change as Announced, Place, ops};

use super::fd::stat;
use super::name::Purpose;
use super::path::is_name;
use super::{PassthroughFs, sys};
use crate::agent::Agents;
use crate::fuse::abi::*;
use crate::fuse::ops::{Present, Repeats, Result};
use crate::limits::AGENT_NAME;
use crate::watch::{Change, FileId};

/// Has the agent repeat a change that the watch has seen.
pub(super) fn announce(agents: &Agents, change: &Change) {
    let has = |bits: u64| change.mask & bits != 0;
    let kind = if has(libc::FAN_ONDIR) { ops::DIRECTORY } else { 0 };
    let place = |dir: u64, name: &[u8]| Place { dir, name: name.to_vec() };
    let here = if change.dir == 0 { Place::default() } else { place(change.dir, change.name) };
    if change.name.len() > AGENT_NAME || change.to.is_some_and(|(_, name)| name.len() > AGENT_NAME) {
        // No file system that can be watched has such names.
        return agents.lose();
    }
    let tell = |ops: u16, place: Place, to: Place| {
        agents.announce(Announced { ops: ops | kind, node: change.node, place, to }, change.file);
    };
    // One event of the host may stand for several. This is the usual order.
    if has(libc::FAN_CREATE) && change.dir != 0 {
        tell(ops::CREATE, here.clone(), Place::default());
    }
    if let Some((newdir, newname)) = change.to.filter(|(newdir, _)| change.dir != 0 || *newdir != 0) {
        tell(ops::RENAME, place(change.dir, change.name), place(newdir, newname));
    }
    let same: u16 =
        [(libc::FAN_MODIFY, ops::CONTENTS), (libc::FAN_CLOSE_WRITE, ops::CLOSED), (libc::FAN_ATTRIB, ops::ATTRIBUTES)]
            .into_iter()
            .filter(|(bit, _)| has(*bit))
            .map(|(_, ops)| ops)
            .sum();
    // Where it is now.
    let now = match change.to {
        Some((0, _)) => Place::default(),
        Some((dir, name)) => place(dir, name),
        None => here.clone(),
    };
    if same != 0 && (change.node != 0 || !now.is_none()) {
        tell(same, now, Place::default());
    }
    if has(libc::FAN_DELETE) && change.dir != 0 {
        tell(ops::REMOVE, here, Place::default());
    }
}

/// Has the agent look at a node again.
pub(super) fn look_again(agents: &Agents, node: u64) {
    agents.announce(Announced { ops: ops::REFRESH, node, ..Announced::default() }, None);
}

/// Has the agent look a name up again.
pub(super) fn look_up_again(agents: &Agents, dir: u64, name: &[u8]) {
    if name.len() > AGENT_NAME {
        return agents.lose();
    }
    let place = Place { dir, name: name.to_vec() };
    agents.announce(Announced { ops: ops::REFRESH, place, ..Announced::default() }, None);
}

impl Repeats for PassthroughFs {
    fn agents(&self) -> Option<&Arc<Agents>> {
        self.leases.watch.as_ref().map(|_| &self.agents)
    }

    fn present(&self, parent: u64, name: &CStr) -> Present {
        let Ok(parent) = self.inodes.get(parent) else { return Present::Missing };
        if !is_name(name.to_bytes()) || parent.format() != libc::S_IFDIR {
            return Present::Missing;
        }
        let found = parent.with_fd(&self.places, |dir| {
            let st = stat(dir, name)?;
            Ok(match self.inodes.peek(&st) {
                Some(inode) => Present::Known(inode.id),
                None => Present::New(u32::from(st.stx_mode) & libc::S_IFMT, sys::file_id(dir, name).ok()),
            })
        });
        found.unwrap_or(Present::Missing)
    }

    fn lookup_repeated(&self, parent: u64, name: &CStr) -> Result<EntryOut> {
        self.find(parent, name, Purpose::Repeated)
    }

    fn file_id_of(&self, node: u64) -> Option<FileId> {
        self.inodes.get(node).ok()?.file_id()
    }

    fn known_attr(&self, node: u64) -> Result<Attr> {
        let inode = self.inodes.get(node)?;
        Ok(match inode.stat(&self.places) {
            Ok(st) => {
                let size = self.tell_size(&inode, st.stx_size);
                Attr { size, flags: self.dax_flag(&inode, &st), ..self.attr(&st) }
            }
            Err(_) => {
                let mode = inode.format() | 0o600;
                Attr { ino: inode.key.ino, size: inode.told_size(), mode, ..Attr::default() }
            }
        })
    }

    fn known_entry(&self, node: u64) -> Result<EntryOut> {
        self.inodes.reference(node)?;
        Ok(EntryOut { nodeid: node, attr: self.known_attr(node)?, ..EntryOut::default() })
    }

    fn follow_known(&self) {
        let Some(watch) = self.watch() else { return };
        for id in self.inodes.ids() {
            let Ok(inode) = self.inodes.get(id) else { continue };
            if inode.format() != libc::S_IFDIR {
                let _ = inode.file_id().map(|file| watch.add(id, file));
            } else if !watch.is_marked(id) {
                let _ = inode.with_fd(&self.places, |fd| Ok(self.mark(watch, &inode, fd)));
            }
        }
    }

    fn path_below_root(&self, node: u64) -> Option<Vec<u8>> {
        let inode = self.inodes.get(node).ok().filter(|inode| inode.format() == libc::S_IFDIR)?;
        let path = self.path_of(&inode)?;
        Some(path.strip_prefix("/").ok()?.as_os_str().as_bytes().to_vec())
    }

    fn known_nodes(&self) -> Vec<u64> {
        self.inodes.ids()
    }
}
