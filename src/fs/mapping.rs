//! SETUPMAPPING and REMOVEMAPPING, and which files are worth them.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{OFlags, Statx, StatxAttributes};
use rustix::io::Errno;

use super::PassthroughFs;
use super::cred;
use super::file_handle::Handles;
use super::inode::{Inode, stat};
use crate::fuse::abi::*;
use crate::fuse::ops::{Handover, Mappings, Result};
use crate::window::{Facts, Source, Window};

/// Permission bits to execute.
const EXECUTE: u32 = 0o111;

impl PassthroughFs {
    fn window(&self) -> Result<&Window> {
        self.window.as_deref().ok_or(Errno::NOSYS)
    }

    /// Whether the guest is offered a window.
    pub(super) fn maps(&self) -> bool {
        self.window.as_ref().is_some_and(|window| window.is_open())
    }

    /// ATTR_DAX for a file that is better mapped than sent. One with an execute bit is not: the host may execute it, and
    /// could not if it were written to, or could not write to it.
    pub(super) fn dax_flag(&self, st: &Statx) -> u32 {
        let worth = self.has(InitFlags::HAS_INODE_DAX)
            && u32::from(st.stx_mode) & (libc::S_IFMT | EXECUTE) == libc::S_IFREG
            && st.stx_size >= self.config.dax_min_size
            && !self.config.readonly
            && !st.stx_attributes.intersects(StatxAttributes::IMMUTABLE | StatxAttributes::APPEND);
        if worth { ATTR_DAX } else { 0 }
    }

    /// See [`Window::changing`].
    pub(super) fn changing<R>(&self, node: u64, change: impl FnOnce() -> R) -> R {
        match &self.window {
            Some(window) => window.changing(node, change),
            None => change(),
        }
    }

    /// Brings what the guest wrote by its mappings to the file, where it is not there at once.
    pub(super) fn sync_mappings(&self, node: u64) -> Result<()> {
        self.window.as_ref().map_or(Ok(()), |window| window.sync(node))
    }
}

impl Mappings for PassthroughFs {
    fn setupmapping(&self, node: u64, args: &SetupmappingIn) -> Result<Handover> {
        let window = self.window()?;
        let inode = self.inodes.get(node)?;
        if inode.format() != libc::S_IFREG {
            return Err(Errno::BADF);
        }
        let writable = args.flags & SETUPMAPPING_WRITE != 0;
        if writable {
            self.writable()?;
        }
        let source = Opener {
            inode,
            places: self.places.clone(),
            proc_self_fd: self.proc_self_fd.clone(),
            readonly: self.config.readonly,
        };
        window.map(args.moffset, args.len, args.foffset, writable, node, Arc::new(source))
    }

    fn removemapping(&self, parts: &[RemovemappingOne]) -> Result<Handover> {
        let parts: Vec<_> = parts.iter().map(|part| (part.moffset, part.len)).collect();
        self.window()?.unmap(&parts)
    }
}

/// Opens an inode's file from the mapper's thread.
struct Opener {
    inode: Arc<Inode>,
    places: Arc<Handles>,
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
        Ok(Facts {
            size: st.stx_size,
            told_size: self.inode.told_size(),
            executable: u32::from(st.stx_mode) & EXECUTE != 0,
        })
    }
}
