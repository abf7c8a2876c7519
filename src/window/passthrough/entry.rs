//! The life of one entry of the table: a node's file, from its first open until its slot is free again.
//!
//! An [`Entry`] knows who has the file open ([`Use`]), what the guest is told ([`EntryState`]), what is in the slot
//! ([`Place`]), who waits for that ([`Revocation`], [`Want`]), and what was seen of the file. All of it is behind one
//! lock, that of [`Entries`](super::entries::Entries). Nothing here waits for anybody: what has to be done to the
//! guest's memory, or looked up in the file, is for the caller, who reports back.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;

use crate::fuse::ops::Answer;
use crate::window::frontend::{CachedFile, Mapping, Source};
use crate::window::jobs::EntryJob;
use crate::window::layout::WHOLE_FILES;
use crate::window::turn::Slow;

/// Who has a node open by an entry.
pub enum Use {
    /// The first open waits until somebody has decided whether it has passthrough. All may be released before that.
    Deciding {
        opens: u32,
        waiting: Vec<Answer<Option<u32>>>,
        /// Since when a worker has been opening the file.
        since: Option<Instant>,
    },
    Open {
        opens: u32,
    },
    /// The last open was the `released`th release of all. The slot is kept for the next open.
    Kept {
        released: u64,
    },
    /// No node has the entry any more. The mapper takes the slot, if there is one.
    Over,
}

impl Use {
    /// Of a node's first open.
    pub const fn deciding() -> Self {
        Self::Deciding { opens: 1, waiting: Vec::new(), since: None }
    }

    /// How many opens there are.
    pub const fn opens(&self) -> u32 {
        match self {
            Self::Deciding { opens, .. } | Self::Open { opens } => *opens,
            Self::Kept { .. } | Self::Over => 0,
        }
    }
}

/// What is in an entry's slot. Only the mapper changes it, in a [`Turn`](crate::window::turn::Turn).
#[derive(Default)]
pub enum Place {
    #[default]
    Empty,
    /// A worker is about to map the file. It is `Empty` again if it must not: a host process has taken the file back
    /// meanwhile, or an open has waited long enough.
    Opening {
        /// The proxy file's number.
        id: u64,
        /// It has room for a slot, and a mapping.
        reserved: bool,
    },
    Held(Held),
    Overdue(Overdue),
}

/// A file in a slot.
#[derive(Clone)]
pub struct Held {
    pub at: u64,
    /// How long its mappings are. Each begins where the one before ends.
    pub pieces: Vec<u64>,
    /// The proxy file's number.
    pub id: u64,
    /// Since when it is there.
    pub since: Instant,
    /// The guest has not used the slot since then, as far as the daemon has looked.
    pub idle: Option<Instant>,
    pub real: Slow<OwnedFd>,
    /// The proxy file, open as long as it is mapped: a host process that truncates the real file waits for its end.
    pub proxy: Arc<OwnedFd>,
}

impl Held {
    /// Bytes of the slot.
    pub fn len(&self) -> u64 {
        self.pieces.iter().sum()
    }

    /// `len` bytes of the file from `from` on, which are as far from the beginning of the slot.
    pub fn mapping(&self, from: u64, len: u64) -> Mapping<'_> {
        Mapping { from, ..Mapping::whole(WHOLE_FILES, self.at + from, len, self.proxy.as_fd()) }
    }

    pub fn mappings(&self) -> Vec<Mapping<'_>> {
        let mut from = 0;
        let next = |&len: &u64| {
            let mapping = self.mapping(from, len);
            from += len;
            mapping
        };
        self.pieces.iter().map(next).collect()
    }
}

/// What is in a slot because the guest did not let go of it in time.
pub struct Overdue {
    pub at: u64,
    pub len: u64,
    /// The generation that the guest has.
    pub generation: u32,
    /// The Cached proxy file. None if it is not there yet, or could not be mapped.
    pub file: Option<CachedFile>,
}

/// Why an entry is revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RevokeReason {
    /// A host process is about to truncate the file, and waits until then.
    Host(Instant),
    /// The file gets a longer slot.
    Longer,
    /// Another file gets the slot.
    Room,
    /// The guest must not store to it any more. The slot stays.
    Downgrade,
}

/// A revocation that the guest has not acknowledged.
#[derive(Clone, Copy)]
pub struct Revocation {
    pub generation: u32,
    pub why: RevokeReason,
    pub since: Instant,
}

/// Who needs a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A node's first open. It has passthrough only if the guest may store to the file.
    Open,
    /// A process of the guest, whose page fault waits for it.
    Fault,
    /// Nobody waits.
    Later,
}

/// An entry waits until other slots are free.
#[derive(Clone, Copy)]
pub struct Want {
    pub need: Need,
    pub since: Instant,
    /// Those with a lower number came before.
    pub turn: u64,
}

/// A file had no hole before `size` when it had got `holes` holes before ([`Entry::holes`]) and had `blocks` blocks.
#[derive(Clone, Copy, Default)]
pub struct Filled {
    pub holes: u64,
    pub size: u64,
    pub blocks: u64,
}

/// The state of an entry, as the guest is told (docs/protocol.md, "Revocation").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EntryState {
    /// The guest does not know of a slot. There may be one, kept for the node's next open.
    #[default]
    Free,
    /// The guest may use the slot, and store to it if `writable`.
    Live {
        /// Whether the guest may store.
        writable: bool,
    },
    /// The guest is asked to let go of the slot, which still holds the file.
    Revoking {
        /// Whether the guest may store until then.
        writable: bool,
    },
    /// The guest has no slot: it works by messages.
    Revoked,
}

/// What changes an entry's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Free, Revoking or Revoked → Live, read-only: the file is in this slot, and the guest has let go of the last one.
    Map {
        /// Where the slot begins in region 1, in bytes.
        offset: u64,
        /// Bytes of the file that are mapped there.
        length: u64,
    },
    /// Live → Live, writable: no store can fail.
    AllowStores,
    /// Live → Revoking: the guest must let go.
    BeginRevoke,
    /// Free, Revoking or Revoked → Revoked: the slot is lost. The guest has let go of it, or never knew of it.
    Revoke,
    /// Revoking → Revoked: the guest had too much time. If it could store, `lost` says that stores may be lost.
    ForceRevoke,
    /// Any → Free: the last open is released, or the session is over.
    Release,
}

impl EntryState {
    /// The state after `change`; `None` if this state does not allow it.
    const fn after(self, change: Change) -> Option<Self> {
        match (change, self) {
            (Change::Map { .. }, Self::Free | Self::Revoking { .. } | Self::Revoked) => {
                Some(Self::Live { writable: false })
            }
            (Change::AllowStores, Self::Live { .. }) => Some(Self::Live { writable: true }),
            (Change::BeginRevoke, Self::Live { writable }) => Some(Self::Revoking { writable }),
            (Change::Revoke, Self::Free | Self::Revoking { .. } | Self::Revoked)
            | (Change::ForceRevoke, Self::Revoking { .. }) => Some(Self::Revoked),
            (Change::Release, _) => Some(Self::Free),
            // A live entry is revoked before anything else happens to its slot. What is not live cannot be revoked.
            (Change::Map { .. } | Change::Revoke | Change::ForceRevoke, Self::Live { .. })
            | (Change::AllowStores | Change::BeginRevoke, Self::Free | Self::Revoking { .. } | Self::Revoked)
            | (Change::ForceRevoke, Self::Free | Self::Revoked) => None,
        }
    }

    /// Whether the guest may use the slot.
    pub const fn is_live(self) -> bool {
        matches!(self, Self::Live { .. })
    }

    /// Whether the guest is asked to let go.
    pub const fn is_revoking(self) -> bool {
        matches!(self, Self::Revoking { .. })
    }

    /// Whether the guest knows of a slot with the file in it.
    pub const fn is_mapped(self) -> bool {
        self.is_live() || self.is_revoking()
    }

    /// Whether the guest may store to the slot.
    pub const fn is_writable(self) -> bool {
        matches!(self, Self::Live { writable: true })
    }

    /// Whether the guest is told that it has lost the slot, or is about to.
    pub const fn shows_revoked(self) -> bool {
        matches!(self, Self::Revoking { .. } | Self::Revoked)
    }
}

/// What the guest sees of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// See [`EntryState`].
    pub state: EntryState,
    /// Where the slot begins in region 1, in bytes.
    pub offset: u64,
    /// Bytes of the file that are mapped there.
    pub length: u64,
    /// Bytes of the file.
    pub size: u64,
    /// The file's node.
    pub nodeid: u64,
    /// How often others have changed the file's attributes.
    pub change: u64,
    /// How often the entry became live.
    pub generation: u32,
    /// How often a slot that the guest could store to was taken away before it had let go.
    pub lost: u32,
}

impl Record {
    /// Changes the entry's state. Nothing else does.
    ///
    /// # Errors
    /// EAGAIN if the state does not allow the change. The entry then stays as it is.
    pub fn step(&mut self, change: Change) -> Result<(), Errno> {
        let after = self.state.after(change).ok_or(Errno::AGAIN)?;
        match change {
            Change::Map { offset, length } => {
                (self.offset, self.length) = (offset, length);
                self.generation = self.generation.wrapping_add(1).max(1);
            }
            Change::Revoke | Change::ForceRevoke => {
                let stores = change == Change::ForceRevoke && self.state == (EntryState::Revoking { writable: true });
                self.lost = self.lost.wrapping_add(stores.into());
                (self.offset, self.length) = (0, 0);
            }
            Change::AllowStores | Change::BeginRevoke | Change::Release => {}
        }
        self.state = after;
        Ok(())
    }

    /// The slot at `offset` has `length` bytes now. A guest that knows it is told.
    pub fn lengthen(&mut self, offset: u64, length: u64) {
        if self.state.is_live() && self.offset == offset {
            self.length = self.length.max(length);
        }
    }
}

pub struct Entry {
    /// Which of all entries of all sessions this is.
    life: u64,
    pub source: Slow<dyn Source>,
    pub uses: Use,
    /// What the guest sees.
    record: Record,
    pub place: Place,
    /// The guest is asked to let go of the slot.
    pub revocation: Option<Revocation>,
    pub want: Option<Want>,
    /// When to map the file again. It is not sooner, so that a host process that waits sees the end of the mapping.
    pub not_before: Option<Instant>,
    /// Bytes of the file when a worker last looked.
    pub size: u64,
    /// The first byte for which a store may have to find room on the disk. There is none if this is the file's size or
    /// more.
    pub hole: u64,
    /// How often `hole` went down. Whoever raises `hole` after a look at the file checks that no hole came about
    /// meanwhile.
    pub holes: u64,
    /// The file's blocks when the daemon last looked, in units of 512 bytes as statx(2) counts them.
    pub blocks: u64,
    /// How far the holes of a file in memory are allocated, if that is not done yet.
    pub filled: Filled,
    /// Messages that took the place of an access to the slot, since the guest has none.
    pub missed: u32,
    /// Sizes to which truncations under way cut the file.
    pub limits: Vec<u64>,
    /// The guest was allowed to store to the file.
    stores: bool,
}

impl Entry {
    /// The entry of a node that is opened for the first time. `record`: what the guest has seen of the entry so far.
    pub fn new(life: u64, node: u64, record: Record, source: Arc<dyn Source>) -> Self {
        Self {
            life,
            source: Slow::new(source),
            uses: Use::deciding(),
            record: Record { nodeid: node, ..record },
            place: Place::Empty,
            revocation: None,
            want: None,
            not_before: None,
            size: 0,
            hole: 0,
            holes: 0,
            blocks: 0,
            filled: Filled::default(),
            missed: 0,
            limits: Vec::new(),
            stores: false,
        }
    }

    /// The entry of a node that has `opens` opens in another daemon's session. It has no slot.
    pub fn resumed(life: u64, record: Record, opens: u32, source: Arc<dyn Source>) -> Self {
        Self { uses: Use::Open { opens }, ..Self::new(life, record.nodeid, record, source) }
    }

    pub const fn life(&self) -> u64 {
        self.life
    }

    pub const fn node(&self) -> u64 {
        self.record.nodeid
    }

    pub const fn record(&self) -> &Record {
        &self.record
    }

    pub const fn state(&self) -> EntryState {
        self.record.state
    }

    // Who has it open.

    /// Counts a release, the `released`th of all. Whether nobody has the entry any more: a slot is kept only if the
    /// guest has not been asked to let go of it.
    pub fn release(&mut self, released: u64) -> bool {
        match &mut self.uses {
            Use::Deciding { opens, .. } => *opens = opens.saturating_sub(1),
            Use::Open { opens } if *opens > 1 => *opens -= 1,
            Use::Open { .. } => {
                let kept = self.state().is_live();
                self.uses = if kept { Use::Kept { released } } else { Use::Over };
                self.close();
            }
            Use::Kept { .. } | Use::Over => {}
        }
        matches!(self.uses, Use::Over)
    }

    /// Says whether the opens have passthrough. How many there are, and who waits for it; `None` if that was no
    /// question.
    pub fn decide(&mut self, passes: bool) -> Option<(u32, Vec<Answer<Option<u32>>>)> {
        let Use::Deciding { opens, waiting, .. } = &mut self.uses else { return None };
        let (opens, waiting) = (*opens, std::mem::take(waiting));
        // The guest may have released an open before it was answered.
        self.uses = if passes && opens > 0 { Use::Open { opens } } else { Use::Over };
        Some((opens, waiting))
    }

    /// The session is over, and the guest's table is empty. Who waits for a decision.
    pub fn end(&mut self, life: u64) -> Vec<Answer<Option<u32>>> {
        let waiting = self.decide(false).map(|(_, waiting)| waiting);
        (self.uses, self.life, self.record, self.stores) = (Use::Over, life, Record::default(), false);
        waiting.unwrap_or_default()
    }

    // What is in the slot.

    pub const fn held(&self) -> Option<&Held> {
        match &self.place {
            Place::Held(held) => Some(held),
            Place::Empty | Place::Opening { .. } | Place::Overdue(_) => None,
        }
    }

    pub const fn held_mut(&mut self) -> Option<&mut Held> {
        match &mut self.place {
            Place::Held(held) => Some(held),
            Place::Empty | Place::Opening { .. } | Place::Overdue(_) => None,
        }
    }

    /// What is in the slot still, if no Cached proxy file is there yet.
    pub fn overdue(&mut self) -> Option<&mut Overdue> {
        match &mut self.place {
            Place::Overdue(overdue) if overdue.file.is_none() => Some(overdue),
            _ => None,
        }
    }

    /// How many mappings the slot has, or is about to have.
    pub fn mappings(&self) -> usize {
        match &self.place {
            Place::Held(held) => held.pieces.len(),
            Place::Overdue(_) | Place::Opening { reserved: true, .. } => 1,
            Place::Empty | Place::Opening { reserved: false, .. } => 0,
        }
    }

    pub const fn is_empty(&self) -> bool {
        matches!(self.place, Place::Empty)
    }

    /// Whether this proxy file is being opened for the slot.
    pub fn is_opening(&self, opening: u64) -> bool {
        matches!(self.place, Place::Opening { id, .. } if id == opening)
    }

    /// Whether the file must not be mapped yet.
    pub fn is_kept_away(&self) -> bool {
        self.not_before.is_some_and(|at| at > Instant::now())
    }

    /// Whether the file is to be mapped again now.
    pub fn is_due(&self) -> bool {
        self.is_empty() && self.not_before.is_some() && !self.is_kept_away()
    }

    /// Whether something is due for the entry, or will be.
    pub fn waits(&self) -> bool {
        matches!(self.uses, Use::Deciding { since: Some(_), .. })
            || matches!(self.place, Place::Overdue(_))
            || self.not_before.is_some()
            || self.revocation.is_some()
            || self.want.is_some()
    }

    /// A worker begins to open the file.
    pub fn begin_opening(&mut self, id: u64, need: Need, now: Instant) {
        self.place = Place::Opening { id, reserved: false };
        if let (Need::Open, Use::Deciding { since, .. }) = (need, &mut self.uses) {
            *since = Some(now);
        }
    }

    /// A host process takes the file back while a worker opens it. Whether one does.
    pub fn stop_opening(&mut self, not_before: Instant) -> bool {
        let opens = matches!(self.place, Place::Opening { .. });
        if opens {
            (self.place, self.not_before) = (Place::Empty, Some(not_before));
        }
        opens
    }

    /// It is done with that, and the file may be in the slot.
    pub fn end_opening(&mut self, opening: u64) {
        if self.is_opening(opening) {
            self.place = Place::Empty;
        }
        if let Use::Deciding { since, .. } = &mut self.uses {
            *since = None;
        }
    }

    /// The file is in the slot. From now on a host process can take it back.
    pub fn hold(&mut self, held: Held) {
        (self.place, self.not_before) = (Place::Held(held), None);
    }

    /// More of the file is mapped right behind the slot. A guest that knows the slot is told.
    pub fn lengthen(&mut self, piece: u64) {
        let Some(held) = self.held_mut() else { return };
        held.pieces.push(piece);
        let (at, len) = (held.at, held.len());
        self.record.lengthen(at, len);
    }

    /// Takes the file out of the slot.
    pub fn take(&mut self) -> Option<Held> {
        let held = self.held().cloned()?;
        self.place = Place::Empty;
        Some(held)
    }

    /// The guest has let go of what was in its slot for too long, or has closed the file.
    pub fn take_overdue(&mut self) -> Option<Overdue> {
        match std::mem::take(&mut self.place) {
            Place::Overdue(overdue) => Some(overdue),
            place => {
                self.place = place;
                None
            }
        }
    }

    // What the guest is told.

    /// The file is in the slot, and the guest may read there. `hole`: see [`Entry::hole`].
    ///
    /// # Errors
    /// EAGAIN if the slot is empty, or the guest has yet to let go of it; ESTALE if no node has the entry.
    pub fn map(&mut self) -> Result<(), Errno> {
        if matches!(self.uses, Use::Over) {
            return Err(Errno::STALE);
        }
        let held = self.held().ok_or(Errno::AGAIN)?;
        let (offset, length) = (held.at, held.len());
        self.record.step(Change::Map { offset, length })
    }

    /// Revokes the entry if it is live. Returns the file if nobody has to let go of it: the slot is empty then, and the
    /// file is to be unmapped. `acknowledged`: the last generation that the guest has let go of.
    pub fn revoke(&mut self, why: RevokeReason, acknowledged: u32, now: Instant, not_before: Instant) -> Option<Held> {
        if self.revocation.is_some() {
            return None;
        }
        let has_let_go = acknowledged == self.record.generation;
        // Refused if there is nothing to revoke.
        let _ = match (why, self.state()) {
            (RevokeReason::Downgrade, _) => Ok(()),
            // An open or a worker that is about to make it live finds no slot.
            (RevokeReason::Host(_), EntryState::Free | EntryState::Revoked) => self.record.step(Change::Revoke),
            (RevokeReason::Host(_) | RevokeReason::Room, EntryState::Revoking { .. }) if has_let_go => {
                self.record.step(Change::Revoke)
            }
            (RevokeReason::Host(_) | RevokeReason::Longer | RevokeReason::Room, _) => {
                self.record.step(Change::BeginRevoke)
            }
        };
        match (self.state(), why) {
            (EntryState::Revoking { .. }, _) => {
                self.revocation = Some(Revocation { generation: self.record.generation, why, since: now });
                None
            }
            (EntryState::Revoked, RevokeReason::Host(_) | RevokeReason::Room) => self.lose(not_before),
            _ => None,
        }
    }

    /// The revocation that is over: the guest has let go, or a host process has waited too long; and whether the guest
    /// has let go.
    pub fn end_revocation(&mut self, acknowledged: u32) -> Option<(Revocation, bool)> {
        let revocation = self.revocation?;
        let has_let_go = acknowledged == revocation.generation;
        let is_late = matches!(revocation.why, RevokeReason::Host(until) if Instant::now() >= until);
        if !has_let_go && !is_late {
            return None;
        }
        self.revocation = None;
        Some((revocation, has_let_go))
    }

    /// The guest no longer uses the slot, which is empty from now on.
    pub fn lose(&mut self, not_before: Instant) -> Option<Held> {
        self.not_before = Some(not_before);
        let done = self.record.step(Change::Revoke);
        debug_assert!(done.is_ok(), "a live entry loses its slot");
        self.take()
    }

    /// The guest has not let go of the slot in time: see [`Overdue`].
    pub fn force(&mut self, not_before: Instant) -> Option<Held> {
        self.held()?;
        // Meanwhile the last open may have been released.
        let forced = self.record.step(Change::ForceRevoke);
        let held = if forced.is_ok() { self.take() } else { self.lose(not_before) }?;
        self.not_before = Some(not_before);
        let (at, len, generation) = (held.at, held.len(), self.record.generation);
        self.place = Place::Overdue(Overdue { at, len, generation, file: None });
        Some(held)
    }

    /// The guest has closed the file.
    pub fn close(&mut self) {
        let done = self.record.step(Change::Release);
        debug_assert!(done.is_ok(), "each state allows this");
    }

    // What is known of the file.

    /// The file in the slot, if the guest may have stored to it.
    pub fn stored_to(&self) -> Option<&Slow<OwnedFd>> {
        self.held().filter(|_| self.stores).map(|held| &held.real)
    }

    /// A file of this size and so many blocks was seen.
    pub fn note(&mut self, size: u64, blocks: u64) {
        self.blocks = blocks;
        self.resize(size);
    }

    /// Sets the size, but not above the truncations in progress.
    pub fn resize(&mut self, size: u64) {
        self.record.size = self.limits.iter().copied().fold(size, u64::min);
    }

    /// What was known of a file past its end no longer holds once somebody makes it longer.
    pub fn forget_past_end(&mut self) {
        // u64::MAX: holes do not count.
        if self.hole != u64::MAX {
            self.hole = self.hole.min(self.record.size);
        }
    }

    /// From now on there may be a hole at this byte.
    pub fn skipped(&mut self, at: u64) {
        if self.hole != u64::MAX {
            self.hole = self.hole.min(at);
        }
        self.holes += 1;
    }

    /// Something was written or allocated at `at`: there may be a hole between the end of the file and there.
    pub fn skips_to(&mut self, at: u64) {
        if at > self.record.size {
            self.skipped(self.record.size);
        }
    }

    /// Others have given the file this size. `found`: the first hole beyond the old one.
    pub fn resized(&mut self, size: u64, found: u64) {
        let old = self.record.size;
        if size > old {
            // The others may have made it longer by a hole, or appended to it.
            match found >= size && self.hole >= old {
                true => self.hole = self.hole.max(found),
                false => self.skipped(found),
            }
        }
        self.resize(size);
        self.forget_past_end();
        if self.record.size != old {
            self.record.change = self.record.change.wrapping_add(1);
        }
    }

    /// Lets the guest store to a live entry if no store can fail, and revokes the entry if stores were allowed and may
    /// fail from now on. Returns what the mapper has to do: for that, or because the file is longer than the slot.
    pub fn settle(&mut self) -> Option<EntryJob> {
        let whole = self.hole >= self.record.size;
        match self.state() {
            EntryState::Live { writable: false } if whole => {
                self.stores |= self.record.step(Change::AllowStores).is_ok();
            }
            EntryState::Live { writable: true } if !whole && self.record.step(Change::BeginRevoke).is_ok() => {
                return Some(EntryJob::Downgrade);
            }
            _ => {}
        }
        (self.state().is_live() && self.record.size > self.record.length).then_some(EntryJob::Remap)
    }
}

#[cfg(test)]
pub mod tests {
    use std::fs::File;

    use super::*;
    use crate::fuse::ops::Result as Answered;
    use crate::window::frontend::Facts;

    /// Never opened.
    pub struct NoFile;

    impl Source for NoFile {
        fn open(&self, _writable: bool) -> Answered<OwnedFd> {
            Err(Errno::IO)
        }

        fn facts(&self) -> Answered<Facts> {
            Err(Errno::IO)
        }

        fn failed(&self, _errno: Errno) {}
    }

    pub const STATES: [EntryState; 6] = [
        EntryState::Free,
        EntryState::Live { writable: false },
        EntryState::Live { writable: true },
        EntryState::Revoking { writable: false },
        EntryState::Revoking { writable: true },
        EntryState::Revoked,
    ];

    const MAP: Change = Change::Map { offset: 128, length: 16 };

    const CHANGES: [Change; 6] =
        [MAP, Change::AllowStores, Change::BeginRevoke, Change::Revoke, Change::ForceRevoke, Change::Release];

    fn record_in(state: EntryState) -> Record {
        Record { state, offset: 64, length: 32, size: 9, nodeid: 8, change: 7, generation: 6, lost: 5 }
    }

    /// A slot of `len` bytes.
    pub fn held(at: u64, len: u64) -> Held {
        let file: Arc<OwnedFd> = Arc::new(File::open("/dev/null").unwrap().into());
        let (real, proxy) = (Slow::new(Arc::clone(&file)), file);
        Held { at, pieces: vec![len], id: 1, since: Instant::now(), idle: None, real, proxy }
    }

    /// An entry with a slot of 16 bytes, in a state. Its node is open.
    pub fn entry_in(state: EntryState) -> Entry {
        let mut entry = Entry::new(1, 8, record_in(state), Arc::new(NoFile));
        entry.hold(held(128, 16));
        entry.decide(true).unwrap();
        entry
    }

    /// All 36 pairs of a state and a change. `None`: the change is refused.
    #[test]
    fn each_state_allows_its_changes_and_no_others() {
        let [free, live, writable, revoking, revoking_writable, revoked] = STATES;
        let legal = [
            (free, [Some(live), None, None, Some(revoked), None, Some(free)]),
            (live, [None, Some(writable), Some(revoking), None, None, Some(free)]),
            (writable, [None, Some(writable), Some(revoking_writable), None, None, Some(free)]),
            (revoking, [Some(live), None, None, Some(revoked), Some(revoked), Some(free)]),
            (revoking_writable, [Some(live), None, None, Some(revoked), Some(revoked), Some(free)]),
            (revoked, [Some(live), None, None, Some(revoked), None, Some(free)]),
        ];
        for (before, afters) in legal {
            for (change, after) in CHANGES.into_iter().zip(afters) {
                let mut record = record_in(before);
                let done = record.step(change);
                assert_eq!(done, if after.is_some() { Ok(()) } else { Err(Errno::AGAIN) }, "{before:?} {change:?}");
                assert_eq!(record.state, after.unwrap_or(before), "{before:?} {change:?}");
                if after.is_none() {
                    assert_eq!(record, record_in(before), "{before:?} {change:?}");
                }
            }
        }
    }

    #[test]
    fn a_slot_grows_within_a_generation_and_never_shrinks() {
        for state in STATES {
            let mut record = record_in(state);
            record.lengthen(64, 48);
            let length = if state.is_live() { 48 } else { 32 };
            assert_eq!(record, Record { length, ..record_in(state) }, "{state:?}");
            record.lengthen(64, 47);
            record.lengthen(0, 100);
            assert_eq!(record.length, length);
        }
        // A slot that was released meanwhile is longer from the next open on.
        let mut entry = entry_in(EntryState::Free);
        entry.lengthen(4);
        assert_eq!((entry.mappings(), entry.record().length), (2, 32));
        entry.map().unwrap();
        assert_eq!((entry.record().offset, entry.record().length), (128, 20));
        entry.lengthen(10);
        assert_eq!((entry.mappings(), entry.record().length, entry.record().generation), (3, 30, 7));
        entry.take();
        entry.lengthen(10);
        assert_eq!((entry.mappings(), entry.record().length), (0, 30));
    }

    #[test]
    fn a_live_entry_has_its_slot_and_a_new_generation() {
        let mut entry = entry_in(EntryState::Free);
        entry.map().unwrap();
        let live = *entry.record();
        assert_eq!((live.offset, live.length, live.generation), (128, 16, 7));
        let now = Instant::now();
        assert!(entry.revoke(RevokeReason::Room, 6, now, now).is_none());
        let revoking = *entry.record();
        assert_eq!(Record { state: live.state, ..revoking }, live, "the guest still reads there");
        assert!(entry.end_revocation(6).is_none() && entry.end_revocation(7).is_some_and(|(_, let_go)| let_go));
        assert_eq!(entry.lose(now).map(|held| held.at), Some(128));
        let revoked = *entry.record();
        assert_eq!((revoked.offset, revoked.length, revoked.generation), (0, 0, 7));
        assert_eq!(entry.map(), Err(Errno::AGAIN), "there is no slot");
        assert_eq!(*entry.record(), revoked);
    }

    #[test]
    fn a_generation_is_never_0() {
        let mut record = Record { generation: u32::MAX, ..record_in(EntryState::Revoked) };
        record.step(MAP).unwrap();
        assert_eq!(record.generation, 1);
    }

    #[test]
    fn only_a_writable_slot_that_is_taken_by_force_counts_as_lost() {
        for (state, change, lost) in [
            (EntryState::Revoking { writable: true }, Change::ForceRevoke, 6),
            (EntryState::Revoking { writable: false }, Change::ForceRevoke, 5),
            (EntryState::Revoking { writable: true }, Change::Revoke, 5),
        ] {
            let mut record = record_in(state);
            record.step(change).unwrap();
            assert_eq!((record.lost, record.offset), (lost, 0), "{state:?} {change:?}");
        }
        let mut record = Record { lost: u32::MAX, ..record_in(EntryState::Revoking { writable: true }) };
        record.step(Change::ForceRevoke).unwrap();
        assert_eq!(record.lost, 0);
    }

    #[test]
    fn a_slot_that_is_taken_by_force_is_overdue_until_the_guest_lets_go() {
        let now = Instant::now();
        let mut entry = entry_in(EntryState::Revoking { writable: true });
        assert_eq!(entry.force(now).map(|held| held.at), Some(128));
        assert_eq!((entry.state(), entry.mappings(), entry.is_empty()), (EntryState::Revoked, 1, false));
        assert!(entry.take().is_none() && entry.force(now).is_none() && entry.map() == Err(Errno::AGAIN));
        assert_eq!(entry.take_overdue().map(|overdue| (overdue.len, overdue.generation)), Some((16, 6)));
        assert!(entry.is_due());
    }

    #[test]
    fn a_release_keeps_a_slot_that_the_guest_may_use() {
        for state in STATES {
            let mut entry = entry_in(state);
            entry.uses = Use::Open { opens: 2 };
            assert!(!entry.release(1) && entry.state() == state);
            assert_eq!(entry.release(2), !state.is_live(), "{state:?}");
            assert_eq!((entry.state(), entry.held().is_some()), (EntryState::Free, true));
            assert_eq!(matches!(entry.uses, Use::Kept { released: 2 }), state.is_live());
            assert_eq!(entry.map().is_ok(), state.is_live(), "nobody can use it any more");
        }
    }

    #[test]
    fn an_open_that_is_released_before_it_is_decided_leaves_no_slot() {
        let mut entry = Entry::new(1, 8, Record::default(), Arc::new(NoFile));
        entry.begin_opening(5, Need::Open, Instant::now());
        assert!(!entry.release(1) && entry.is_opening(5) && entry.mappings() == 0);
        assert!(entry.stop_opening(Instant::now()) && !entry.is_opening(5));
        assert!(entry.decide(true).is_some_and(|(opens, _)| opens == 0));
        assert!(matches!(entry.uses, Use::Over) && entry.decide(true).is_none());
    }
}

/// Loom tries each order of steps.
#[cfg(test)]
mod orders {
    use std::time::Duration;

    use loom::cell::UnsafeCell;
    use loom::sync::atomic::{AtomicU32, Ordering};
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::tests::entry_in;
    use super::*;

    struct Shared {
        entry: Mutex<Entry>,
        ack: AtomicU32,
        /// What is in the slot: 1, the file.
        slot: UnsafeCell<u32>,
    }

    /// A host process takes a file back that was kept, while the guest opens it again and uses it.
    #[test]
    fn nobody_is_in_a_slot_that_a_host_process_took_back() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let mut entry = entry_in(EntryState::Live { writable: false });
            assert!(!entry.release(1));
            entry.uses = Use::deciding();
            let (entry, ack, slot) = (Mutex::new(entry), AtomicU32::new(0), UnsafeCell::new(1));
            let shared = Arc::new(Shared { entry, ack, slot });
            let lock = |shared: &Shared, run: fn(&mut Entry) -> bool| run(&mut shared.entry.lock().unwrap());
            let guest = thread::spawn({
                let shared = shared.clone();
                move || {
                    // The file is looked at without the lock.
                    let live = lock(&shared, |entry| entry.map().is_ok());
                    let decide = |entry: &mut Entry, live| entry.decide(live).is_some();
                    assert!(decide(&mut shared.entry.lock().unwrap(), live));
                    for _ in 0..2 {
                        let record = *shared.entry.lock().unwrap().record();
                        if !record.state.is_live() {
                            return shared.ack.store(record.generation, Ordering::Release);
                        }
                        // SAFETY: loom checks that nobody writes at the same time.
                        shared.slot.with(|at| assert_eq!(unsafe { *at }, 1));
                    }
                    let generation = shared.entry.lock().unwrap().record().generation;
                    shared.ack.store(generation, Ordering::Release);
                }
            });
            let now = Instant::now();
            let why = RevokeReason::Host(now + Duration::from_secs(1000));
            let ack = shared.ack.load(Ordering::Acquire);
            let taken = shared.entry.lock().unwrap().revoke(why, ack, now, now);
            let taken = taken.or_else(|| {
                loop {
                    let ack = shared.ack.load(Ordering::Acquire);
                    let mut entry = shared.entry.lock().unwrap();
                    if entry.end_revocation(ack).is_some() {
                        return entry.lose(now);
                    }
                    drop(entry);
                    thread::yield_now();
                }
            });
            assert!(taken.is_some());
            // SAFETY: as above.
            shared.slot.with_mut(|at| unsafe { *at = 2 });
            guest.join().unwrap();
            assert!(shared.entry.lock().unwrap().is_empty());
        });
    }
}
