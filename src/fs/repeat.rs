//! What the requests of the guest's agent are answered with: the share's present state (docs/guest-agent.md).

use std::ffi::CStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use super::name::Purpose;
use super::path::is_name;
use super::seen::Seen;
use super::{PassthroughFs, sys};
use crate::agent::Agents;
use crate::fuse::abi::*;
use crate::fuse::ops::{Present, Repeats, Result};
use crate::watch::FileId;

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
            let Seen { st, key, .. } = Seen::at(&parent, dir, name)?;
            Ok(match self.inodes.peek(&key) {
                Some(inode) => Present::Known(inode.id),
                None => Present::New(
                    u32::from(self.seen_at(dir, name, &st).stx_mode) & libc::S_IFMT,
                    sys::file_id(dir, name).ok(),
                ),
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
            Ok(st) => self.tell(&inode, &st, false).0,
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
