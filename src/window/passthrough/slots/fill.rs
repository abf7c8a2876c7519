//! What workers do for window passthrough: they map files into slots, and may wait for them. The state is another one
//! afterwards, so each method looks again at what it relies on.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::fs::fstat;
use rustix::io::Errno;

use super::{FULL, Held, LATER, Need, OPENING, Opening, Slot, Slots, TOO_LONG, Victims, Wanting, shortest};
use crate::fuse::ops::Result;
use crate::window::frontend::{CachedFile, Mapping, ProxyFiles, Source};
use crate::window::jobs::{EntryJob, SlotJob};
use crate::window::layout::WHOLE_FILES;
use crate::window::passthrough::Passthrough;
use crate::window::passthrough::table::{EntryState, Filled};
use crate::window::proxy::{Kind, errno};
use crate::window::reservation::Stores;
use crate::window::turn::{MayWait, Turn};

impl Turn<'_, Slots> {
    /// Does a job that may wait for a file.
    pub fn serve(&mut self, job: SlotJob, now: Instant) {
        self.now = now;
        match job {
            SlotJob::Open { session, node, index, source } => self.open(session, node, index, source),
            SlotJob::Ask { node, index, from, len, writable, answer } => {
                let asked = self.ask(node, index, from, len, writable);
                self.unlocked(|_| answer(asked));
            }
            SlotJob::Entry(EntryJob::Remap, index) => self.lengthen(index, Victims::Idle),
            SlotJob::Entry(EntryJob::Want, index) => self.want_again(index),
            SlotJob::Entry(EntryJob::Live, index) => drop(self.live(index, None, false)),
            SlotJob::Entry(EntryJob::Move, index) => self.move_elsewhere(index),
            SlotJob::Entry(EntryJob::Replace, index) => self.put_copy(index),
            SlotJob::Entry(EntryJob::Serve, index) => self.serve_wanting(index),
            SlotJob::Entry(EntryJob::Again, index) => self.fill_again(index),
            // The thread's.
            SlotJob::Start { .. } | SlotJob::Entry(EntryJob::Drop | EntryJob::Downgrade, _) => {}
        }
        let closing = std::mem::take(&mut self.closing);
        if !closing.is_empty() {
            let cached = self.shared.cached.clone();
            self.unlocked(|wait| closing.close(&cached, wait));
        }
    }

    /// Runs what may wait for a file that is about to be mapped.
    ///
    /// # Errors
    /// Those of `run`; EBUSY if the file must not be mapped any more.
    fn wait<R>(&mut self, index: u32, id: u64, run: impl FnOnce(&MayWait) -> Result<R>) -> Result<R> {
        let done = self.unlocked(run);
        if self.opening(index, id).is_some() {
            return done;
        }
        // It may have opened files.
        self.unlocked(|_| drop(done));
        Err(Errno::BUSY)
    }

    fn open(&mut self, session: u64, node: u64, index: u32, source: Arc<dyn Source>) {
        let start = Instant::now();
        self.known.insert(index, Slot::new(session, node, source));
        let mapped = self.fill(index, Need::Open);
        if mapped == Err(FULL) && self.make_room(index, Victims::Idle) {
            tracing::debug!(node, "another file leaves its slot for one that is opened");
            let since = self.now;
            return self.wanting.push(Wanting { index, need: Need::Open, since });
        }
        self.decide(index, start, mapped);
    }

    /// Maps an entry's file and makes the entry live.
    ///
    /// # Errors
    /// [`FULL`] or [`TOO_LONG`] for want of room in the window; EAGAIN if holes are yet to be allocated; EOPNOTSUPP if
    /// its file may not be stored to, or read, in place.
    fn fill(&mut self, index: u32, need: Need) -> Result<()> {
        let (id, since) = (self.shared.next_id(), self.now);
        let slot = self.known.get_mut(&index).ok_or(Errno::STALE)?;
        slot.opening = Some(Opening { id, need, since, reserved: false });
        let (node, source) = (slot.node, slot.source.clone());
        let (pass, files) = (self.pass.clone(), self.files.clone());
        let opened = self.wait(index, id, move |wait| open(&pass, files.get(wait), source.get(wait), id, need));
        let filled = opened.and_then(|opened| self.fill_with(index, node, opened, need));
        self.opening(index, id).into_iter().for_each(|opening| *opening = None);
        filled
    }

    fn fill_with(&mut self, index: u32, node: u64, (held, size): (Held, u64), need: Need) -> Result<()> {
        let id = held.id;
        if let Some(slot) = self.known.get_mut(&index) {
            slot.size = size;
        }
        let (at, len) = match self.reserve(size) {
            Ok(place) => place,
            Err(errno) => {
                self.spent(held);
                return Err(errno);
            }
        };
        self.opening(index, id).into_iter().flatten().for_each(|opening| opening.reserved = true);
        let mut filled = Ok(None);
        if need == Need::Fault {
            // A process of the guest waits, so the holes of a file in memory are to be allocated.
            let (pass, real) = (self.pass.clone(), held.real.clone());
            filled = self.wait(index, id, move |_| pass.fill(index, real.as_fd()).map(Some));
        }
        self.opening(index, id).into_iter().flatten().for_each(|opening| opening.reserved = false);
        match filled {
            Ok(filled) => {
                let held = Held { at, pieces: vec![len], since: self.now, ..held };
                self.put(index, node, held, filled, need == Need::Open)
            }
            Err(errno) => {
                self.room.free(at);
                self.spent(held);
                Err(errno)
            }
        }
    }

    /// Maps a file into its reserved slot, as one piece, and makes the entry live: see [`Passthrough::live`].
    fn put(&mut self, index: u32, node: u64, held: Held, filled: Option<Filled>, stores: bool) -> Result<()> {
        let len = held.len();
        if let Err(errno) = self.map(&held.mapping(0, len)) {
            self.room.free(held.at);
            self.spent(held);
            return Err(errno);
        }
        self.pass.table.update(index, |line| {
            line.slot = Some((held.at, len));
            line.file = Some(held.real.clone());
            line.set_node(node);
        });
        if let Some(slot) = self.known.get_mut(&index) {
            // From now on a host process can take it back.
            (slot.held, slot.not_before, slot.idle) = (Some(held), None, None);
        }
        self.live(index, filled, stores)
    }

    /// Makes an entry live that has a slot. Where that fails, it loses the slot.
    fn live(&mut self, index: u32, filled: Option<Filled>, stores: bool) -> Result<()> {
        let held = self.known.get(&index).and_then(|slot| slot.held.as_ref()).ok_or(Errno::AGAIN)?;
        let (id, real, pass) = (held.id, held.real.clone(), self.pass.clone());
        let live = self.unlocked(move |_| pass.live(index, real.as_fd(), filled, stores));
        if live.is_err() && self.with_proxy_file(id).is_some() {
            self.revoked(index);
        }
        live
    }

    /// The guest uses a file by messages that has lost its slot.
    fn want_again(&mut self, index: u32) {
        let waits = self.known.get(&index).is_none_or(|slot| slot.held.is_some() || slot.late.is_some());
        let open = self.pass.table.entry(index).state == EntryState::Revoked;
        if waits || !open || self.is_wanting(index) || self.is_kept_away(index) {
            return;
        }
        if self.fill(index, Need::Later) == Err(FULL) && self.make_room(index, Victims::Idle) {
            let since = self.now;
            self.wanting.push(Wanting { index, need: Need::Later, since });
        }
    }

    /// Maps a file that waits for room, if it still does.
    fn serve_wanting(&mut self, index: u32) {
        let Some(want) = self.wanting.iter().find(|wanting| wanting.index == index).copied() else { return };
        let empty = |slot: &Slot| slot.held.is_none() && slot.late.is_none();
        let waits = self.known.get(&index).is_some_and(empty) && !self.is_kept_away(index);
        if want.need != Need::Open && !waits {
            return self.wanting.retain(|wanting| wanting.index != index);
        }
        let patient = self.now.saturating_duration_since(want.since) < OPENING;
        if self.full && patient && self.room_comes() {
            return;
        }
        let mapped = self.fill(index, want.need);
        self.full |= mapped == Err(FULL);
        if mapped == Err(FULL) && patient && self.room_comes() {
            return;
        }
        self.wanting.retain(|wanting| wanting.index != index);
        match mapped {
            mapped if want.need == Need::Open => self.decide(index, want.since, mapped),
            Ok(()) => {}
            // A guest that still wants it asks again.
            Err(errno) => tracing::debug!(index, "still not mapped: {errno}"),
        }
    }

    /// Maps a file again whose truncation is over.
    fn fill_again(&mut self, index: u32) {
        if !self.known.get(&index).is_some_and(Slot::is_due) {
            return;
        }
        let again = match self.fill(index, Need::Later) {
            // The truncation is still in progress.
            Err(Errno::BUSY) => Some(Instant::now() + LATER),
            done => done.inspect_err(|errno| tracing::debug!("not mapped again: {errno}")).ok().and(None),
        };
        if let Some(slot) = self.known.get_mut(&index) {
            slot.not_before = again;
        }
    }

    /// Somebody else has written to a proxy file's real file, or changed its size.
    pub fn changed(&mut self, id: u64) {
        let Some((index, _, held)) = self.with_proxy_file(id) else { return };
        let (real, pass) = (held.real.clone(), self.pass.clone());
        self.unlocked(move |_| pass.look(index, real.as_fd()));
    }

    /// Moves a file to a slot that is long enough.
    fn move_elsewhere(&mut self, index: u32) {
        let moved = self.known.get_mut(&index).and_then(|slot| Some((slot.node, slot.held.take()?)));
        let Some((node, held)) = moved else { return };
        self.unmap(index, node, &held);
        self.free(held.at);
        let size = self.pass.table.entry(index).size;
        let since = self.now;
        let put = match self.reserve(size) {
            Ok((at, len)) => self.put(index, node, Held { at, pieces: vec![len], since, ..held }, None, false),
            Err(errno) => {
                self.spent(held);
                Err(errno)
            }
        };
        if let Err(errno) = put {
            tracing::debug!(node, "not mapped again: {errno}");
            self.revoked(index);
        }
    }

    /// Maps a Cached proxy file where the guest did not let go of a file in time.
    fn put_copy(&mut self, index: u32) {
        let missing = |slots: &Slots| {
            let slot = slots.known.get(&index)?;
            let late = slot.late.as_ref().filter(|late| late.file.is_none())?;
            Some((slot.node, slot.source.clone(), (late.at, late.len, late.generation)))
        };
        let Some((node, source, place)) = missing(self) else { return };
        let (id, files, of) = (self.shared.next_id(), self.files.clone(), source.clone());
        let opened = self.unlocked(move |wait| {
            let real = of.get(wait).open(true)?;
            files.get(wait).open(id, Kind::Cached, real.as_fd()).map_err(errno)
        });
        let is_missing = missing(self).is_some_and(|(.., now)| now == place);
        let (at, len, _) = place;
        let mapped = opened.and_then(|opened| {
            let fd = Arc::new(opened.fd);
            let mapping = Mapping::whole(WHOLE_FILES, at, len, fd.as_fd());
            if let Err(errno) = if is_missing { self.shared.map(&mapping) } else { Err(Errno::STALE) } {
                self.closing.files.push(fd);
                return Err(errno);
            }
            Ok(CachedFile { id, fd, source })
        });
        if !is_missing {
            return;
        }
        let mapped = mapped.inspect_err(|errno| tracing::warn!(node, "nothing can be put in its place: {errno}"));
        if let Ok(file) = &mapped {
            self.shared.cached.insert(node, file.clone());
        }
        if let Some(late) = self.known.get_mut(&index).and_then(|slot| slot.late.as_mut()) {
            late.file = mapped.ok();
        }
    }

    /// Answers a SETUPMAPPING.
    ///
    /// # Errors
    /// EAGAIN: the guest is to ask again. ENOSPC if the file is longer than the window or the disk is full. EFAULT past
    /// the end of the file, EBADF without an open, EINVAL. EIO otherwise.
    fn ask(&mut self, node: u64, index: u32, from: u64, len: u64, writable: bool) -> Result<()> {
        let end = from.checked_add(len).ok_or(Errno::INVAL)?;
        let slot = self.known.get(&index).filter(|slot| slot.node == node).ok_or(Errno::AGAIN)?;
        let entry = self.pass.table.entry(index);
        let opening = self.wanting.iter().any(|wanting| wanting.index == index && wanting.need == Need::Open);
        if entry.state.is_revoking() || slot.late.is_some() || self.is_kept_away(index) || opening {
            return Err(Errno::AGAIN);
        }
        if entry.state.is_live() {
            return self.ask_live(index, end, writable);
        }
        if slot.held.is_some() {
            // An open is about to make it live, or could not: then the slot is emptied first.
            return Err(Errno::AGAIN);
        }
        match self.fill(index, Need::Fault) {
            Ok(()) => self.ask_live(index, end, writable),
            Err(FULL) => {
                if self.make_room(index, Victims::Any) && !self.is_wanting(index) {
                    let since = self.now;
                    self.wanting.push(Wanting { index, need: Need::Fault, since });
                }
                Err(Errno::AGAIN)
            }
            Err(TOO_LONG | Errno::NOSPC | Errno::DQUOT) => Err(Errno::NOSPC),
            // A truncation is under way; the frontend does not answer; a process of the host executes the file, or has
            // a lease; a hole came meanwhile; for want of memory or descriptors.
            Err(
                Errno::BUSY
                | Errno::TIMEDOUT
                | Errno::TXTBSY
                | Errno::AGAIN
                | Errno::OPNOTSUPP
                | Errno::NOMEM
                | Errno::MFILE
                | Errno::NFILE,
            ) => Err(Errno::AGAIN),
            Err(errno) => {
                tracing::debug!(node, "a fault of the guest fails: {errno}");
                Err(Errno::IO)
            }
        }
    }

    fn ask_live(&mut self, index: u32, end: u64, writable: bool) -> Result<()> {
        let mut entry = self.pass.table.entry(index);
        if end > entry.length {
            if entry.size <= entry.length {
                // Beyond the end of the file.
                return Err(Errno::FAULT);
            }
            if shortest(entry.size) > self.pass.size() {
                return Err(Errno::NOSPC);
            }
            self.lengthen(index, Victims::Any);
            entry = self.pass.table.entry(index);
            if !entry.state.is_live() || end > entry.length {
                return Err(Errno::AGAIN);
            }
        }
        match writable && !entry.state.is_writable() {
            true => self.fill_holes(index),
            false => Ok(()),
        }
    }

    /// Allocates the file's holes, and blocks of its own where it shares some, so that no store to it can fail for want
    /// of space. The entry has one flag for the whole file, so a part would not do. Of a long file it does a part, and
    /// the guest asks again: other files must not wait for a worker.
    ///
    /// # Errors
    /// EAGAIN if there is more to do; ENOSPC; EIO.
    fn fill_holes(&mut self, index: u32) -> Result<()> {
        let held = self.known.get(&index).and_then(|slot| slot.held.as_ref()).ok_or(Errno::AGAIN)?;
        let (real, pass) = (held.real.clone(), self.pass.clone());
        self.unlocked(move |_| {
            let since = pass.holes(index);
            let (size, stores) = (fstat(&real)?.st_size as u64, Stores::of(real.as_fd())?);
            let from = pass.first_hole(index).min(size);
            let end = size.min(from.saturating_add(stores.at_once()));
            let allocated = stores.allocate(&real, from, end);
            allocated.map_err(|errno| match errno {
                Errno::NOSPC | Errno::DQUOT => Errno::NOSPC,
                _ => Errno::IO,
            })?;
            pass.allocated(&since, real.as_fd(), from, (end - from).max(1));
            Ok(())
        })?;
        if self.pass.table.entry(index).state.is_writable() { Ok(()) } else { Err(Errno::AGAIN) }
    }
}

/// Opens a file to map it as a whole, and looks at its size.
fn open(pass: &Passthrough, files: &dyn ProxyFiles, source: &dyn Source, id: u64, need: Need) -> Result<(Held, u64)> {
    let real = Arc::new(source.open(true)?);
    // Cheaper than to find out later.
    if need == Need::Open && !pass.seems_whole(real.as_fd())? {
        return Err(Errno::OPNOTSUPP);
    }
    let opened = files.open(id, Kind::Through, real.as_fd()).map_err(errno)?;
    // If it fails, a change is noticed when the guest asks for attributes.
    let _ = files.watch(id);
    // Without the guard, the host could not execute it.
    if !opened.guarded && source.facts()?.executable {
        return Err(Errno::TXTBSY);
    }
    if !pass.permits(real.as_fd(), opened.guarded)? {
        return Err(Errno::OPNOTSUPP);
    }
    // The guard is active now, so the size cannot shrink.
    let size = fstat(&real)?.st_size as u64;
    Ok((Held { at: 0, pieces: Vec::new(), id, since: Instant::now(), real, proxy: Arc::new(opened.fd) }, size))
}
