//! What workers do for window passthrough: they map files into slots, and may wait for them. The state is another one
//! afterwards, so each method looks again at what it relies on.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::fs::fstat;
use rustix::io::Errno;

use super::{FULL, LATER, Slots, TOO_LONG, Victims, shortest};
use crate::fuse::ops::Result;
use crate::window::frontend::{CachedFile, Mapping, ProxyFiles, Source};
use crate::window::jobs::{EntryJob, SlotJob};
use crate::window::layout::WHOLE_FILES;
use crate::window::passthrough::core::Core;
use crate::window::passthrough::entry::{Entry, EntryState, Filled, Held, Need, Place, Use};
use crate::window::proxy::{Kind, errno};
use crate::window::turn::{MayWait, Slow, Turn};

impl Turn<'_, Slots> {
    /// Does a job that may wait for a file.
    pub fn serve(&mut self, job: SlotJob, now: Instant) {
        self.now = now;
        match job {
            SlotJob::Open { index, life } => self.open(index, life),
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
            SlotJob::Start { .. }
            | SlotJob::Leave
            | SlotJob::Resume(_)
            | SlotJob::Table { .. }
            | SlotJob::Entry(EntryJob::Drop | EntryJob::Downgrade, _) => {}
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
        if self.core.get(index, |entry| entry.is_opening(id)) == Some(true) {
            return done;
        }
        // It may have opened files.
        self.unlocked(|_| drop(done));
        Err(Errno::BUSY)
    }

    fn open(&mut self, index: u32, life: u64) {
        let start = Instant::now();
        if self.core.get(index, Entry::life) != Some(life) {
            return;
        }
        let mapped = self.fill(index, Need::Open);
        let is_it = self.core.get(index, Entry::life) == Some(life);
        if is_it && mapped == Err(FULL) && self.make_room(index, Victims::Idle) {
            tracing::debug!(index, "another file leaves its slot for one that is opened");
            return self.want(index, Need::Open);
        }
        self.decide(index, life, start, mapped);
    }

    /// Maps an entry's file and makes the entry live.
    ///
    /// # Errors
    /// [`FULL`] or [`TOO_LONG`] for want of room in the window; EAGAIN if holes are yet to be allocated; EOPNOTSUPP if
    /// its file may not be stored to, or read, in place; EBUSY while a host process truncates it, or while the guest is
    /// about to move to another daemon.
    fn fill(&mut self, index: u32, need: Need) -> Result<()> {
        if self.core.is_leaving() {
            return Err(Errno::BUSY);
        }
        let (id, now) = (self.shared.next_id(), self.now);
        let begin = |entry: &mut Entry| {
            entry.begin_opening(id, need, now);
            entry.source.clone()
        };
        let source = self.core.update(index, begin).ok_or(Errno::STALE)?;
        let (core, files) = (self.core.clone(), self.files.clone());
        let opened = self.wait(index, id, move |wait| open(&core, files.get(wait), source.get(wait), id, need, wait));
        let filled = opened.and_then(|opened| self.fill_with(index, opened, need));
        self.core.update(index, |entry| entry.end_opening(id));
        filled
    }

    fn fill_with(&mut self, index: u32, (held, size): (Held, u64), need: Need) -> Result<()> {
        let id = held.id;
        self.core.update(index, |entry| entry.size = size);
        let (at, len) = match self.reserve(size) {
            Ok(place) => place,
            Err(errno) => {
                self.spent(held);
                return Err(errno);
            }
        };
        let mut filled = Ok(None);
        if need == Need::Fault {
            self.core.update(index, |entry| entry.place = Place::Opening { id, reserved: true });
            // A process of the guest waits, so the holes of a file in memory are to be allocated.
            let (core, real) = (self.core.clone(), held.real.clone());
            filled = self.wait(index, id, move |wait| core.fill(index, real.get(wait).as_fd(), wait).map(Some));
        }
        match filled {
            Ok(filled) => {
                let held = Held { at, pieces: vec![len], since: self.now, ..held };
                self.put(index, held, filled, need == Need::Open)
            }
            Err(errno) => {
                self.room.free(at);
                self.spent(held);
                Err(errno)
            }
        }
    }

    /// Maps a file into its reserved slot, as one piece, and makes the entry live: see [`Core::live`].
    fn put(&mut self, index: u32, held: Held, filled: Option<Filled>, stores: bool) -> Result<()> {
        if let Err(errno) = self.map(&held.mapping(0, held.len())) {
            self.room.free(held.at);
            self.spent(held);
            return Err(errno);
        }
        // Nobody else ends an entry during a turn.
        self.core.update(index, |entry| entry.hold(held));
        self.live(index, filled, stores)
    }

    /// Makes an entry live that has a slot. Where that fails, it loses the slot.
    fn live(&mut self, index: u32, filled: Option<Filled>, stores: bool) -> Result<()> {
        let (core, held) = (self.core.clone(), self.held(index).ok_or(Errno::AGAIN)?);
        let (id, real) = (held.id, held.real);
        let live = self.unlocked(move |wait| core.live(index, real.get(wait).as_fd(), filled, stores, wait));
        if live.is_err() && self.held(index).is_some_and(|held| held.id == id) {
            self.revoked(index);
        }
        live
    }

    /// The guest uses a file by messages that has lost its slot.
    fn want_again(&mut self, index: u32) {
        let wants = |entry: &Entry| {
            let lost = entry.is_empty() && entry.state() == EntryState::Revoked;
            lost && entry.want.is_none() && !entry.is_kept_away()
        };
        if self.core.get(index, wants) == Some(true)
            && self.fill(index, Need::Later) == Err(FULL)
            && self.make_room(index, Victims::Idle)
        {
            self.want(index, Need::Later);
        }
    }

    /// Maps a file that waits for room, if it still does.
    fn serve_wanting(&mut self, index: u32) {
        let wanting = |entry: &Entry| Some((entry.want?, entry.life(), entry.is_empty() && !entry.is_kept_away()));
        let Some((want, life, waits)) = self.core.get(index, wanting).flatten() else { return };
        let end = |entry: &mut Entry| entry.want = None;
        if want.need != Need::Open && !waits {
            self.core.update(index, end);
            return;
        }
        let patient = !self.is_late(want.since);
        if self.full && patient && self.room_comes() {
            return;
        }
        let mapped = self.fill(index, want.need);
        self.full |= mapped == Err(FULL);
        if mapped == Err(FULL) && patient && self.room_comes() || self.core.get(index, Entry::life) != Some(life) {
            return;
        }
        self.core.update(index, end);
        match mapped {
            mapped if want.need == Need::Open => self.decide(index, life, want.since, mapped),
            Ok(()) => {}
            // A guest that still wants it asks again.
            Err(errno) => tracing::debug!(index, "still not mapped: {errno}"),
        }
    }

    /// Maps a file again whose truncation is over.
    fn fill_again(&mut self, index: u32) {
        if self.core.get(index, Entry::is_due) != Some(true) {
            return;
        }
        let again = match self.fill(index, Need::Later) {
            // The truncation, or a move to another daemon, is still in progress.
            Err(Errno::BUSY) => Some(Instant::now() + LATER),
            done => done.inspect_err(|errno| tracing::debug!("not mapped again: {errno}")).ok().and(None),
        };
        self.core.update(index, |entry| entry.not_before = again);
    }

    /// Somebody else has written to a proxy file's real file, or changed its size.
    pub fn changed(&mut self, id: u64) {
        let of = |(index, entry): (u32, &Entry)| Some((index, entry.held().filter(|held| held.id == id)?.real.clone()));
        let Some((index, real)) = self.core.entries().used().find_map(of) else { return };
        let core = self.core.clone();
        self.unlocked(move |wait| core.changed(index, real.get(wait).as_fd(), wait));
    }

    /// Moves a file to a slot that is long enough.
    fn move_elsewhere(&mut self, index: u32) {
        self.unmap(index);
        let moved = |entry: &mut Entry| Some((entry.take()?, entry.record().size));
        let Some((held, size)) = self.core.update(index, moved).flatten() else { return };
        self.free(held.at);
        let since = self.now;
        let put = match self.reserve(size) {
            Ok((at, len)) => self.put(index, Held { at, pieces: vec![len], since, idle: None, ..held }, None, false),
            Err(errno) => {
                self.spent(held);
                Err(errno)
            }
        };
        if let Err(errno) = put {
            tracing::debug!(index, "not mapped again: {errno}");
            self.revoked(index);
        }
    }

    /// Maps a Cached proxy file where the guest did not let go of a file in time.
    fn put_copy(&mut self, index: u32) {
        let missing = |entry: &mut Entry| {
            let (node, source) = (entry.node(), entry.source.clone());
            entry.overdue().map(|overdue| (node, source, (overdue.at, overdue.len, overdue.generation)))
        };
        let Some((node, source, place)) = self.core.update(index, missing).flatten() else { return };
        let (id, files, of) = (self.shared.next_id(), self.files.clone(), source.clone());
        let opened = self.unlocked(move |wait| {
            let real = of.get(wait).open(true)?;
            files.get(wait).open(id, Kind::Cached, real.as_fd()).map_err(errno)
        });
        let is_missing = self.core.update(index, missing).flatten().is_some_and(|(.., now)| now == place);
        let (at, len, _) = place;
        let mapped = opened.and_then(|opened| {
            let fd = Arc::new(opened.fd);
            let mapping = Mapping::whole(WHOLE_FILES, at, len, fd.as_fd());
            if let Err(errno) = if is_missing { self.shared.map(&mapping) } else { Err(Errno::STALE) } {
                self.closing.files.push(Slow::new(fd));
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
        self.core.update(index, |entry| entry.overdue().map(|overdue| overdue.file = mapped.ok()));
    }

    /// Answers a SETUPMAPPING.
    ///
    /// # Errors
    /// EAGAIN: the guest is to ask again. ENOSPC if the file is longer than the window or the disk is full. EFAULT past
    /// the end of the file, EBADF without an open, EINVAL. EIO otherwise.
    fn ask(&mut self, node: u64, index: u32, from: u64, len: u64, writable: bool) -> Result<()> {
        let end = from.checked_add(len).ok_or(Errno::INVAL)?;
        let is_live = |entry: &Entry| {
            let is_open = entry.node() == node && !matches!(entry.uses, Use::Over);
            let opening = entry.want.is_some_and(|want| want.need == Need::Open);
            let waits = entry.state().is_revoking() || entry.is_kept_away() || opening;
            let live = entry.state().is_live();
            // An open is about to make it live that has a slot, or could not: then the slot is emptied first.
            (is_open && !waits && (live || entry.is_empty())).then_some(live)
        };
        if self.core.get(index, is_live).flatten().ok_or(Errno::AGAIN)? {
            return self.ask_live(index, end, writable);
        }
        match self.fill(index, Need::Fault) {
            Ok(()) => self.ask_live(index, end, writable),
            Err(FULL) => {
                let waits = |entry: &Entry| entry.want.is_some();
                if self.make_room(index, Victims::Any) && self.core.get(index, waits) == Some(false) {
                    self.want(index, Need::Fault);
                }
                Err(Errno::AGAIN)
            }
            Err(TOO_LONG | Errno::NOSPC | Errno::DQUOT) => Err(Errno::NOSPC),
            // A truncation is under way, or a move; the frontend does not answer; a process of the host executes the
            // file, or has a lease; a hole came meanwhile; for want of memory or descriptors.
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
        let record = |slots: &Self| slots.core.get(index, |entry| *entry.record()).ok_or(Errno::AGAIN);
        let mut seen = record(self)?;
        if end > seen.length {
            if seen.size <= seen.length {
                // Beyond the end of the file.
                return Err(Errno::FAULT);
            }
            if shortest(seen.size) > self.core.settings.slots_size() {
                return Err(Errno::NOSPC);
            }
            self.lengthen(index, Victims::Any);
            seen = record(self)?;
            if !seen.state.is_live() || end > seen.length {
                return Err(Errno::AGAIN);
            }
        }
        if !writable || seen.state.is_writable() {
            return Ok(());
        }
        let (core, real) = (self.core.clone(), self.held(index).ok_or(Errno::AGAIN)?.real);
        self.unlocked(move |wait| core.allocate(index, real.get(wait).as_fd(), wait))?;
        // If there is more to do, the guest asks again.
        if record(self)?.state.is_writable() { Ok(()) } else { Err(Errno::AGAIN) }
    }
}

/// Opens a file to map it as a whole, and looks at its size.
fn open(
    core: &Core,
    files: &dyn ProxyFiles,
    source: &dyn Source,
    id: u64,
    need: Need,
    wait: &MayWait,
) -> Result<(Held, u64)> {
    let real = source.open(true)?;
    // Cheaper than to find out later.
    if need == Need::Open && !core.seems_whole(real.as_fd(), wait)? {
        return Err(Errno::OPNOTSUPP);
    }
    let opened = files.open(id, Kind::Through, real.as_fd()).map_err(errno)?;
    // If it fails, a change is noticed when the guest asks for attributes.
    let _ = files.watch(id);
    // Without the guard, the host could not execute it.
    if !opened.guarded && source.facts()?.executable {
        return Err(Errno::TXTBSY);
    }
    if !core.permits(real.as_fd(), opened.guarded, wait)? {
        return Err(Errno::OPNOTSUPP);
    }
    // The guard is active now, so the size cannot shrink.
    let size = fstat(&real)?.st_size as u64;
    let (real, proxy) = (Slow::new(Arc::new(real)), Arc::new(opened.fd));
    Ok((Held { at: 0, pieces: Vec::new(), id, since: Instant::now(), idle: None, real, proxy }, size))
}
