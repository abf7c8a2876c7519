//! A session that an earlier worker process has left: the same nodeids and `fh`s, and the same descriptors.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::PassthroughFs;
use super::fd::stat;
use super::inode::{Inode, Place};
use super::key::Key;
use super::seen::Seen;
use crate::fuse::abi::{InitFlags, ROOT_ID};
use crate::fuse::ops::Result;
use crate::record::{self, Found, FoundHandle, FoundInode, FoundPlace};

impl PassthroughFs {
    /// Whether this daemon can have what INIT settled.
    pub(super) fn check_settled(&self, flags: InitFlags) -> io::Result<()> {
        let mut missing = flags - self.settle(flags, true)?.flags;
        if self.window.as_ref().is_some_and(|window| window.dax_size() > 0) {
            // There is no frontend yet that maps.
            missing -= InitFlags::MAP_ALIGNMENT | InitFlags::HAS_INODE_DAX;
        }
        if missing.is_empty() {
            self.session.store(flags.bits(), Ordering::Relaxed);
            return Ok(());
        }
        Err(io::Error::other(format!("the guest uses {missing:?}, which this daemon does not offer")))
    }

    /// There must be no requests meanwhile.
    pub(super) fn take_over_found(&self, flags: InitFlags, mut found: Found) -> io::Result<()> {
        self.check_settled(flags)?;
        let (inodes, handles) = (std::mem::take(&mut found.inodes), std::mem::take(&mut found.handles));
        let Found { next_id, generation, .. } = found;
        if next_id > ROOT_ID {
            self.inodes.set_next_id(next_id);
        }
        let (names, others): (Vec<_>, Vec<_>) =
            inodes.into_iter().partition(|inode| matches!(inode.place, FoundPlace::Name { .. }));
        let (known, open) = (names.len() + others.len(), handles.len());
        // A directory is given its nodeid before what is in it.
        let lost = others.into_iter().chain(names).filter(|inode| !self.enter_again(inode)).count();
        handles.into_iter().for_each(|handle| self.open_again(handle));
        self.handles.restored();
        self.handles.begin_above(generation);
        if self.gives_handles() {
            // What nobody has open is closed.
            let files = self.inodes.all().into_iter().filter(|inode| inode.format() == libc::S_IFREG);
            files.for_each(|inode| inode.nameless().into_iter().for_each(|last| inode.remove(last)));
        }
        for lock in std::mem::take(&mut found.locks) {
            let Some(file) = record::left_behind(lock.fd) else { continue };
            if let Ok(handle) = self.handles.get(lock.node, lock.fh) {
                handle.locked_by(lock.owner);
            }
            self.locks.add_again(lock.node, lock.owner, file, lock.cell);
        }
        self.take_over_mappings(&mut found);
        tracing::info!("the session goes on: the guest knows {known} files and has {open} open, {lost} are lost");
        Ok(())
    }

    /// Whether the file is still there.
    fn enter_again(&self, found: &FoundInode) -> bool {
        if found.nlookup == 0 && !self.inodes.remembers() {
            // The process died while it forgot the file.
            found.cell.free();
            return true;
        }
        let gone = || Key::of_none(found.id, found.format);
        let (place, seen) = self.place_again(&found.place).unwrap_or((Place::Lost, None));
        let (key, removed) = seen.map_or_else(|| (gone(), true), |(key, links)| (key, links == 0));
        let lost = matches!(place, Place::Lost);
        if found.nlookup == 0 && (removed || !matches!(place, Place::Handle(_))) {
            found.cell.free();
            return true;
        }
        let inode = Inode::new(found.id, key, found.nlookup, place);
        inode.cell.set(found.cell.copy());
        inode.found_in(found.parent);
        // It fails if two files have one nodeid, which no process gives out, or if there may be fewer files now.
        self.inodes.enter_again(inode, removed).is_ok() && !lost
    }

    /// The file's place. Also its key and the number of its names, unless it is gone: then the place says ESTALE, as it
    /// did before.
    fn place_again(&self, place: &FoundPlace) -> Result<(Place, Option<(Key, u32)>)> {
        let root = self.inodes.get(ROOT_ID)?;
        match place {
            FoundPlace::Fd(fd) => {
                let fd = record::left_behind(*fd).ok_or(Errno::BADF)?;
                let st = stat(fd.as_fd(), c"")?;
                let key = Key::of(fd.as_fd(), &st, Some(&root.key), None);
                Ok((Place::Fd(fd), Some((key, st.stx_nlink))))
            }
            FoundPlace::Handle { mount, kind, data } => {
                let handle = self.places.handle_again(*mount, *kind, data.clone())?;
                let seen = handle.open(OFlags::PATH).and_then(|fd| {
                    let st = stat(fd.as_fd(), c"")?;
                    Ok((Key::of(fd.as_fd(), &st, Some(&root.key), None), st.stx_nlink))
                });
                Ok((Place::Handle(handle), seen.ok()))
            }
            FoundPlace::Name { parent, name } => {
                let parent = self.inodes.get(*parent)?;
                let seen = parent.with_fd(&self.places, |dir| {
                    let seen = Seen::at(&parent, dir, name)?;
                    Ok((seen.key, seen.st.stx_nlink))
                });
                Ok((Place::Name(parent, name.as_c_str().into()), seen.ok()))
            }
            FoundPlace::Lost | FoundPlace::Removed => Err(Errno::STALE),
        }
    }

    fn open_again(&self, FoundHandle { cell, fh, node, fd }: FoundHandle) {
        let inode = self.inodes.get(node);
        let (Some(file), Ok(inode)) = (record::left_behind(fd), inode) else { return cell.free() };
        let mut handle = self.handle(&inode, file);
        handle.cell = cell;
        let cell = handle.cell.copy();
        if self.handles.restore(fh, Ok(handle)).is_err() {
            // Two handles have one number, which no process gives out, or it is too high.
            cell.free();
        }
    }
}
