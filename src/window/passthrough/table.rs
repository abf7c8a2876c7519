//! The backing table in region 2, which tells the guest where in region 1 each open file is. docs/virtio-spec.md has
//! its format, and docs/protocol.md what the daemon does with it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::param::page_size;
use vm_memory::mmap::MmapRegion;
use vm_memory::{AtomicAccess, Bytes, FileOffset, VolatileMemory};

use crate::limits::TABLE_ENTRIES;
use crate::window::layout::RANGE;

/// Bytes of region 2: the least that leaves a multiple of 2 MiB for region 1.
pub const LEN: u64 = RANGE;

/// Bytes of the header and of each entry.
const ENTRY_SIZE: u32 = 64;

/// Where the guest's words begin, one group for each entry.
const GUEST_OFFSET: u32 = TABLE_ENTRIES * ENTRY_SIZE;

/// Bytes of each group.
const GUEST_SIZE: u32 = 16;

/// Offsets in a group: the last generation that the guest has let go of, whether it has stored to the slot, and whether
/// it has used it.
const ACK: u32 = 0;
const STORED: u32 = 4;
const USED: u32 = 8;

const MAGIC: u64 = u64::from_le_bytes(*b"FUSE_WIN");
const VERSION: u32 = 2;

/// Offsets in the header.
const HEADER: [(usize, u32); 4] = [(8, VERSION), (12, ENTRY_SIZE), (16, TABLE_ENTRIES), (20, GUEST_OFFSET)];
const REVOCATIONS: usize = 24;
/// The host's page size in bytes: the last page of a file ends there, so that a guest with larger pages cannot use it.
const PAGE_SIZE: usize = 28;

/// Flags of an entry, as the guest reads them. Nothing but this file uses them; the daemon thinks in [`EntryState`].
const VALID: u32 = 1;
const WRITABLE: u32 = 2;
const REVOKED: u32 = 4;

/// The state of an entry (docs/protocol.md, "Revocation").
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
    /// Free, Revoking or Revoked → Live, read-only: the file is in the slot, and the guest has let go of the last one.
    Map,
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
            (Change::Map, Self::Free | Self::Revoking { .. } | Self::Revoked) => Some(Self::Live { writable: false }),
            (Change::AllowStores, Self::Live { .. }) => Some(Self::Live { writable: true }),
            (Change::BeginRevoke, Self::Live { writable }) => Some(Self::Revoking { writable }),
            (Change::Revoke, Self::Free | Self::Revoking { .. } | Self::Revoked)
            | (Change::ForceRevoke, Self::Revoking { .. }) => Some(Self::Revoked),
            (Change::Release, _) => Some(Self::Free),
            // A live entry is revoked before anything else happens to its slot. What is not live cannot be revoked.
            (Change::Map | Change::Revoke | Change::ForceRevoke, Self::Live { .. })
            | (Change::AllowStores | Change::BeginRevoke, Self::Free | Self::Revoking { .. } | Self::Revoked)
            | (Change::ForceRevoke, Self::Free | Self::Revoked) => None,
        }
    }

    /// The entry's `flags` in this state.
    pub const fn flags(self) -> u32 {
        match self {
            Self::Free => 0,
            Self::Live { writable: false } => VALID,
            Self::Live { writable: true } => VALID | WRITABLE,
            Self::Revoking { writable: false } => VALID | REVOKED,
            Self::Revoking { writable: true } => VALID | WRITABLE | REVOKED,
            Self::Revoked => REVOKED,
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
    const fn shows_revoked(self) -> bool {
        matches!(self, Self::Revoking { .. } | Self::Revoked)
    }
}

/// What the guest sees of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
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

/// A file had no hole before `size` when it had got `holes` holes before ([`Line::holes`]) and had `blocks` blocks.
#[derive(Clone, Copy, Default)]
pub struct Filled {
    pub holes: u64,
    pub size: u64,
    pub blocks: u64,
}

/// An entry, and what only the daemon knows of it.
#[derive(Default)]
pub struct Line {
    entry: Entry,
    /// The slot, offset and length, if there is one. A free entry may have one too.
    pub slot: Option<(u64, u64)>,
    /// The first byte for which a store may have to find room on the disk. There is none if this is `size` or more.
    pub hole: u64,
    /// How often `hole` went down. Whoever raises `hole` after a look at the file checks that no hole came about
    /// meanwhile.
    pub holes: u64,
    /// The file's blocks when the daemon last looked, in units of 512 bytes as statx(2) counts them.
    pub blocks: u64,
    /// How far the holes of a file in memory are allocated, if that is not done yet.
    pub filled: Filled,
    /// The file in the slot. It is looked at for holes.
    pub file: Option<Arc<OwnedFd>>,
    /// Messages that took the place of an access to the slot, since the guest has none.
    pub missed: u32,
    /// Sizes to which truncations under way cut the file.
    pub limits: Vec<u64>,
    /// The guest was allowed to store to the node's file.
    stores: bool,
    /// How many nodes the entry has had, in all sessions.
    life: u64,
    seq: u32,
}

impl Line {
    pub const fn entry(&self) -> Entry {
        self.entry
    }

    pub const fn state(&self) -> EntryState {
        self.entry.state
    }

    /// Changes the entry's state. Nothing else does.
    ///
    /// # Errors
    /// EAGAIN if the state does not allow the change, or if there is no slot to [`Map`](Change::Map). The entry then
    /// stays as it is.
    pub fn step(&mut self, change: Change) -> Result<(), Errno> {
        let after = self.entry.state.after(change).ok_or(Errno::AGAIN)?;
        match change {
            Change::Map => {
                (self.entry.offset, self.entry.length) = self.slot.ok_or(Errno::AGAIN)?;
                self.entry.generation = self.entry.generation.wrapping_add(1).max(1);
            }
            Change::Revoke | Change::ForceRevoke => {
                let stores = change == Change::ForceRevoke && self.state() == (EntryState::Revoking { writable: true });
                self.entry.lost = self.entry.lost.wrapping_add(stores.into());
                (self.slot, self.file) = (None, None);
                (self.entry.offset, self.entry.length) = (0, 0);
            }
            Change::AllowStores => self.stores = true,
            Change::BeginRevoke | Change::Release => {}
        }
        self.entry.state = after;
        Ok(())
    }

    /// More of the file is mapped right behind its slot, which has `len` bytes now. A guest that knows the slot is
    /// told.
    pub fn lengthen(&mut self, len: u64) {
        let Some((at, _)) = self.slot.filter(|(_, length)| *length < len) else { return };
        self.slot = Some((at, len));
        if self.state().is_live() && self.entry.offset == at {
            self.entry.length = self.entry.length.max(len);
        }
    }

    /// Sets the node that the entry belongs to.
    pub const fn set_node(&mut self, nodeid: u64) {
        self.stores = self.stores && self.entry.nodeid == nodeid;
        self.entry.nodeid = nodeid;
    }

    /// Sets the file's size, in bytes.
    pub const fn set_size(&mut self, size: u64) {
        self.entry.size = size;
    }

    /// Tells the guest that somebody else changed the file's attributes.
    pub const fn count_change(&mut self) {
        self.entry.change = self.entry.change.wrapping_add(1);
    }
}

/// The guest may write to the memory, so the daemon reads nothing but the guest's own words from it.
///
/// Lock rule: one line at a time, as the last lock but for that of `DeferredMtime`, and no system call and no call to
/// the frontend while it is held: who revokes takes it. Who looks at the line's file holds its [`Look`] first.
pub struct Table {
    memory: MmapRegion<()>,
    lines: Box<[Mutex<Line>]>,
    looks: Box<[Mutex<()>]>,
    revocations: Mutex<u32>,
    /// Those of all sessions.
    all_revocations: AtomicU64,
}

/// The right to look at an entry's file and to note what is there. There is one for each entry, so that the last thread
/// that looks writes last. It is held over system calls on the file, which may take as long as others like, so who
/// revokes never takes it. Only who has it changes a line's size, holes, blocks and limits.
pub struct Look<'a> {
    table: &'a Table,
    index: u32,
    life: u64,
    _held: MutexGuard<'a, ()>,
}

impl Look<'_> {
    /// The entry's index, and which of the nodes that it has had this is.
    pub const fn entry(&self) -> (u32, u64) {
        (self.index, self.life)
    }

    /// [`Table::update`] of the entry.
    ///
    /// # Errors
    /// ESTALE if the entry is another node's by now, or another session's.
    pub fn update<R>(&self, change: impl FnOnce(&mut Line) -> R) -> Result<R, Errno> {
        self.table.update(self.index, |line| if line.life == self.life { Ok(change(line)) } else { Err(Errno::STALE) })
    }
}

impl Table {
    pub fn new() -> io::Result<Self> {
        let fd = memfd_create("thruway-table", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, LEN)?;
        // If somebody cut off a page, this process would get SIGBUS.
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let memory = MmapRegion::from_file(FileOffset::new(fd.into(), 0), LEN as usize).map_err(io::Error::other)?;
        let lines = (0..TABLE_ENTRIES).map(|_| Mutex::default()).collect();
        let looks = (0..TABLE_ENTRIES).map(|_| Mutex::default()).collect();
        let (revocations, all_revocations) = Default::default();
        let table = Self { memory, lines, looks, revocations, all_revocations };
        table.clear();
        Ok(table)
    }

    /// The file that the frontend maps.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.memory.file_offset().map(|file| file.file().as_fd())
    }

    /// Frees all entries and writes the header anew.
    pub fn clear(&self) {
        *self.revocations.lock() = 0;
        self.put(REVOCATIONS, 0u32, Ordering::Relaxed);
        for index in 1..TABLE_ENTRIES {
            self.update(index, |line| *line = Line { seq: line.seq, life: line.life + 1, ..Line::default() });
            [ACK, STORED, USED].iter().for_each(|word| self.put(guest_at(index, *word), 0u32, Ordering::Relaxed));
        }
        for (at, value) in HEADER.into_iter().chain([(PAGE_SIZE, page_size() as u32)]) {
            self.put(at, value.to_le(), Ordering::Relaxed);
        }
        self.put(0, MAGIC.to_le(), Ordering::Release);
    }

    /// Changes an entry, and writes what changed to the guest's memory.
    pub fn update<R>(&self, index: u32, change: impl FnOnce(&mut Line) -> R) -> R {
        let mut line = self.lines[index as usize % self.lines.len()].lock();
        let before = line.entry;
        let result = change(&mut line);
        if line.entry != before {
            write((index * ENTRY_SIZE) as usize, self, &mut line);
        }
        // After the flag and under the lock, so that a guest that sees the count also sees the flag.
        if line.entry.state.shows_revoked() && !before.state.shows_revoked() {
            let mut revocations = self.revocations.lock();
            *revocations = revocations.wrapping_add(1);
            self.all_revocations.fetch_add(1, Ordering::Relaxed);
            self.put(REVOCATIONS, revocations.to_le(), Ordering::Release);
        }
        result
    }

    /// Waits until nobody else looks at the file of an entry.
    pub fn look(&self, index: u32) -> Look<'_> {
        let held = self.looks[index as usize % self.looks.len()].lock();
        Look { table: self, index, life: self.update(index, |line| line.life), _held: held }
    }

    /// The entries that are not free, by index.
    pub fn known(&self) -> Vec<(u32, Entry)> {
        let all = (1..TABLE_ENTRIES).map(|index| (index, self.entry(index)));
        all.filter(|(_, entry)| entry.state != EntryState::Free).collect()
    }

    /// Revocations in all sessions.
    pub fn revocations(&self) -> u64 {
        self.all_revocations.load(Ordering::Relaxed)
    }

    /// An entry as the daemon has it.
    pub fn entry(&self, index: u32) -> Entry {
        self.lines[index as usize % self.lines.len()].lock().entry
    }

    /// The last generation that the guest has let go of, as it says.
    pub fn acknowledged(&self, index: u32) -> u32 {
        let ack: Result<u32, _> = self.memory.as_volatile_slice().load(guest_at(index, ACK), Ordering::Acquire);
        ack.map_or(0, u32::from_le)
    }

    /// Calls `note` with the file in the slot if the guest says that it has stored to this node's file since the last
    /// call, and may have. Nobody sees that it no longer says so before `note` is done. Whether it was called.
    pub fn stored(&self, index: u32, node: u64, note: impl FnOnce(&Arc<OwnedFd>)) -> bool {
        let line = self.lines[index as usize % self.lines.len()].lock();
        // Without a file the slot is gone, and whoever took it away has called this.
        let Some(file) = line.file.as_ref().filter(|_| line.stores && line.entry.nodeid == node) else { return false };
        // Under the lock, so that it is not said of the entry's next node.
        let stored = self.take(index, STORED);
        if stored {
            note(file);
        }
        stored
    }

    /// Whether the guest says that it has used the slot since the last call.
    pub fn used(&self, index: u32) -> bool {
        self.take(index, USED)
    }

    /// The entry is another node's from now on: what the guest said of the one before does not count.
    pub fn begin(&self, index: u32, node: u64) {
        self.update(index, |line| {
            line.set_node(node);
            line.life += 1;
            (line.missed, line.limits, line.filled) = (0, Vec::new(), Filled::default());
        });
        self.take(index, STORED);
        self.take(index, USED);
    }

    /// Whether one of the guest's words is not 0. It is 0 then.
    fn take(&self, index: u32, word: u32) -> bool {
        let memory = self.memory.as_volatile_slice();
        let word = memory.get_atomic_ref::<AtomicU32>(guest_at(index, word));
        // Without the first look, each call would take the cache line from the guest.
        word.is_ok_and(|word| word.load(Ordering::Acquire) != 0 && word.swap(0, Ordering::AcqRel) != 0)
    }

    fn put<T: AtomicAccess>(&self, at: usize, value: T, order: Ordering) {
        // All offsets are below LEN, so this never fails.
        let _ = self.memory.as_volatile_slice().store(value, at, order);
    }
}

/// A memory that entries are written to.
trait Words {
    fn put32(&self, at: usize, value: u32, order: Ordering);
    fn put64(&self, at: usize, value: u64, order: Ordering);
    fn fence(&self, order: Ordering);
}

impl Words for Table {
    fn put32(&self, at: usize, value: u32, order: Ordering) {
        self.put(at, value.to_le(), order);
    }

    fn put64(&self, at: usize, value: u64, order: Ordering) {
        self.put(at, value.to_le(), order);
    }

    fn fence(&self, order: Ordering) {
        fence(order);
    }
}

/// Writes an entry. Its sequence number is odd while it is incomplete, so that a reader can tell whether it has read
/// all of one version.
fn write(at: usize, to: &impl Words, line: &mut Line) {
    let entry = &line.entry;
    to.put32(at, line.seq.wrapping_add(1), Ordering::Relaxed);
    to.fence(Ordering::Release);
    to.put32(at + 4, entry.state.flags(), Ordering::Relaxed);
    let words = [entry.offset, entry.length, entry.size, entry.nodeid, entry.change];
    for (word, at) in words.into_iter().zip((at + 8..).step_by(8)) {
        to.put64(at, word, Ordering::Relaxed);
    }
    to.put32(at + 48, entry.generation, Ordering::Relaxed);
    to.put32(at + 52, entry.lost, Ordering::Relaxed);
    line.seq = line.seq.wrapping_add(2);
    to.put32(at, line.seq, Ordering::Release);
}

/// Where one of the guest's words of an entry is.
fn guest_at(index: u32, word: u32) -> usize {
    (GUEST_OFFSET + GUEST_SIZE * (index % TABLE_ENTRIES) + word) as usize
}

const _: () = assert!(GUEST_OFFSET as u64 + (GUEST_SIZE * TABLE_ENTRIES) as u64 <= LEN && TABLE_ENTRIES <= 65536);

#[cfg(test)]
mod tests {
    use super::*;

    fn get<T: AtomicAccess>(table: &Table, at: usize, order: Ordering) -> T {
        table.memory.as_volatile_slice().load(at, order).unwrap()
    }

    const STATES: [EntryState; 6] = [
        EntryState::Free,
        EntryState::Live { writable: false },
        EntryState::Live { writable: true },
        EntryState::Revoking { writable: false },
        EntryState::Revoking { writable: true },
        EntryState::Revoked,
    ];

    const CHANGES: [Change; 6] =
        [Change::Map, Change::AllowStores, Change::BeginRevoke, Change::Revoke, Change::ForceRevoke, Change::Release];

    fn state(flags: u32) -> EntryState {
        STATES.into_iter().find(|state| state.flags() == flags).unwrap()
    }

    /// A line with a slot, in a state.
    fn line_in(state: EntryState) -> Line {
        let entry = Entry { state, offset: 64, length: 32, size: 9, nodeid: 8, change: 7, generation: 6, lost: 5 };
        Line { entry, slot: Some((128, 16)), ..Line::default() }
    }

    #[test]
    fn flags_are_as_the_protocol_says() {
        assert_eq!(STATES.map(EntryState::flags), [0, 1, 3, 5, 7, 4]);
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
                let mut line = line_in(before);
                let entry = line.entry();
                let done = line.step(change);
                assert_eq!(done, if after.is_some() { Ok(()) } else { Err(Errno::AGAIN) }, "{before:?} {change:?}");
                assert_eq!(line.state(), after.unwrap_or(before), "{before:?} {change:?}");
                if after.is_none() {
                    assert_eq!((line.entry(), line.slot), (entry, Some((128, 16))), "{before:?} {change:?}");
                }
            }
        }
    }

    #[test]
    fn a_slot_grows_within_a_generation_and_never_shrinks() {
        for state in STATES {
            let mut line = line_in(state);
            line.slot = Some((64, 32));
            let before = line.entry();
            line.lengthen(48);
            assert_eq!(line.slot, Some((64, 48)));
            let length = if state.is_live() { 48 } else { 32 };
            assert_eq!(line.entry(), Entry { length, ..before }, "{state:?}");
            line.lengthen(47);
            assert_eq!((line.slot, line.entry().length), (Some((64, 48)), length));
            line.slot = None;
            line.lengthen(64);
            assert_eq!((line.slot, line.entry().length), (None, length));
        }
        // A slot that was released meanwhile is longer from the next open on.
        let mut line = line_in(EntryState::Free);
        line.lengthen(20);
        line.step(Change::Map).unwrap();
        assert_eq!((line.entry().offset, line.entry().length), (128, 20));
    }

    #[test]
    fn a_live_entry_has_its_slot_and_a_new_generation() {
        let mut line = line_in(EntryState::Free);
        line.step(Change::Map).unwrap();
        let live = line.entry();
        assert_eq!((live.offset, live.length, live.generation), (128, 16, 7));
        line.step(Change::BeginRevoke).unwrap();
        let revoking = line.entry();
        assert_eq!(Entry { state: live.state, ..revoking }, live, "the guest still reads there");
        line.step(Change::Revoke).unwrap();
        let revoked = line.entry();
        assert_eq!((revoked.offset, revoked.length, revoked.generation, line.slot), (0, 0, 7, None));
        assert_eq!(line.step(Change::Map), Err(Errno::AGAIN), "there is no slot");
        assert_eq!(line.entry(), revoked);
    }

    #[test]
    fn a_generation_is_never_0() {
        let mut line = line_in(EntryState::Revoked);
        line.entry.generation = u32::MAX;
        line.step(Change::Map).unwrap();
        assert_eq!(line.entry().generation, 1);
    }

    #[test]
    fn only_a_writable_slot_that_is_seized_counts_as_lost() {
        for (state, change, lost) in [
            (EntryState::Revoking { writable: true }, Change::ForceRevoke, 6),
            (EntryState::Revoking { writable: false }, Change::ForceRevoke, 5),
            (EntryState::Revoking { writable: true }, Change::Revoke, 5),
        ] {
            let mut line = line_in(state);
            line.step(change).unwrap();
            assert_eq!((line.entry().lost, line.slot), (lost, None), "{state:?} {change:?}");
        }
        let mut line = line_in(EntryState::Revoking { writable: true });
        line.entry.lost = u32::MAX;
        line.step(Change::ForceRevoke).unwrap();
        assert_eq!(line.entry().lost, 0);
    }

    #[test]
    fn a_release_keeps_the_slot() {
        let mut line = line_in(EntryState::Live { writable: true });
        line.step(Change::Release).unwrap();
        assert_eq!((line.state(), line.slot), (EntryState::Free, Some((128, 16))));
    }

    #[test]
    fn each_revocation_is_flagged_and_counted_once() {
        let table = Table::new().unwrap();
        let word = |at| get::<u32>(&table, at, Ordering::Acquire);
        let seen = |change: fn(&mut Line)| {
            table.update(3, change);
            (word(3 * ENTRY_SIZE as usize + 4), word(REVOCATIONS))
        };
        assert_eq!(seen(|line| line.slot = Some((0, RANGE))).1, 0);
        assert_eq!(seen(|line| line.step(Change::Map).unwrap()), (VALID, 0));
        assert_eq!(seen(|line| line.step(Change::AllowStores).unwrap()), (VALID | WRITABLE, 0));
        assert_eq!(seen(|line| line.set_size(5)), (VALID | WRITABLE, 0));
        assert_eq!(seen(|line| line.step(Change::BeginRevoke).unwrap()), (VALID | WRITABLE | REVOKED, 1));
        assert_eq!(seen(|line| line.set_size(4)), (VALID | WRITABLE | REVOKED, 1));
        assert_eq!(seen(|line| line.step(Change::Revoke).unwrap()).1, 1);
        assert_eq!(seen(|line| line.slot = Some((0, RANGE))).1, 1);
        assert_eq!(seen(|line| line.step(Change::Map).unwrap()), (VALID, 1));
        assert_eq!(seen(|line| line.step(Change::BeginRevoke).unwrap()), (VALID | REVOKED, 2));
        assert_eq!(seen(|line| line.step(Change::Release).unwrap()).1, 2);
        table.clear();
        assert_eq!((word(REVOCATIONS), table.revocations()), (0, 2), "a new session revokes nothing");
    }

    #[test]
    fn what_the_guest_has_stored_counts_once_and_for_its_node_alone() {
        let table = Table::new().unwrap();
        let stores = |index| table.put(guest_at(index, STORED), 1u32.to_le(), Ordering::Release);
        let counts = |index, node| {
            let mut noted = 0;
            assert_eq!(table.stored(index, node, |_| noted += 1), noted == 1);
            noted
        };
        let step = |change| table.update(3, |line| line.step(change)).unwrap();
        let file = Some(Arc::new(table.file().unwrap().try_clone_to_owned().unwrap()));
        table.update(3, |line| {
            (line.slot, line.entry.nodeid) = (Some((0, RANGE)), 8);
            line.file.clone_from(&file);
        });
        step(Change::Map);
        stores(3);
        assert_eq!(counts(3, 8), 0, "it may not store");
        step(Change::AllowStores);
        assert_eq!((counts(3, 9), counts(3, 8), counts(3, 8)), (0, 1, 0));
        // Without a file it is kept until there is one.
        table.update(3, |line| line.file = None);
        stores(3);
        assert_eq!(counts(3, 8), 0);
        table.update(3, |line| line.file = file);
        assert_eq!((counts(3, 8), counts(3, 8)), (1, 0));
        // What it stored before it let go, and before the release.
        step(Change::BeginRevoke);
        stores(3);
        assert_eq!(counts(3, 8), 1);
        step(Change::Map);
        stores(3);
        assert_eq!(counts(3, 8), 1);
        step(Change::Release);
        stores(3);
        assert_eq!((counts(3, 8), counts(2, 8)), (1, 0));
        // The entry is another node's.
        table.update(3, |line| line.set_node(9));
        stores(3);
        assert_eq!((counts(3, 8), counts(3, 9)), (0, 0));
        assert!(!table.used(3));
        table.put(guest_at(3, USED), u32::MAX, Ordering::Release);
        assert_eq!((table.used(2), table.used(3), table.used(3)), (false, true, false));
        stores(3);
        table.clear();
        let word = |word| get::<u32>(&table, guest_at(3, word), Ordering::Relaxed);
        assert_eq!([ACK, STORED, USED].map(word), [0; 3]);
    }

    /// Reads an entry as the guest does.
    fn read(table: &Table, index: u32) -> Entry {
        let at = (index * ENTRY_SIZE) as usize;
        loop {
            let seq: u32 = get(table, at, Ordering::Acquire);
            let word = |n: usize| get::<u64>(table, at + 8 * n, Ordering::Relaxed);
            let entry = Entry {
                state: state(get(table, at + 4, Ordering::Relaxed)),
                offset: word(1),
                length: word(2),
                size: word(3),
                nodeid: word(4),
                change: word(5),
                generation: get(table, at + 48, Ordering::Relaxed),
                lost: get(table, at + 52, Ordering::Relaxed),
            };
            fence(Ordering::Acquire);
            if seq % 2 == 0 && get::<u32>(table, at, Ordering::Relaxed) == seq {
                return entry;
            }
        }
    }

    #[test]
    fn the_header_is_as_the_protocol_says() {
        let table = Table::new().unwrap();
        let mut header = [0; 64];
        table.memory.as_volatile_slice().read_slice(&mut header, 0).unwrap();
        assert_eq!(&header[..8], b"FUSE_WIN");
        let words: Vec<u32> = header[8..32].chunks(4).map(|w| u32::from_le_bytes(w.try_into().unwrap())).collect();
        assert_eq!(words, [2, 64, 4096, 4096 * 64, 0, page_size() as u32]);
        assert!(header[32..].iter().all(|b| *b == 0));
    }

    #[test]
    fn a_reader_never_sees_half_an_entry() {
        let table = Table::new().unwrap();
        std::thread::scope(|scope| {
            let table = &table;
            let writers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(move || {
                        for _ in 0..100_000 {
                            table.update(5, |line| {
                                let n = line.entry.size + 1;
                                (line.entry.generation, line.entry.lost) = (n as u32, n as u32);
                                (line.entry.offset, line.entry.length) = (n, n);
                                (line.entry.size, line.entry.nodeid, line.entry.change) = (n, n, n);
                            });
                        }
                    })
                })
                .collect();
            let mut last = 0;
            while writers.iter().any(|w| !w.is_finished()) {
                let e = read(table, 5);
                let n = e.size;
                assert_eq!((e.offset, e.length, e.nodeid, e.change), (n, n, n, n));
                assert_eq!((e.generation, e.lost), (n as u32, n as u32));
                assert!(n >= last);
                last = n;
            }
        });
        assert_eq!(
            (read(&table, 5).size, read(&table, 4), read(&table, 6)),
            (200_000, Entry::default(), Entry::default())
        );
    }

    #[test]
    fn what_the_guest_writes_is_overwritten_and_never_read() {
        let table = Table::new().unwrap();
        table.update(1, |line| line.entry.size = 7);
        for at in (0..GUEST_OFFSET as usize).step_by(8) {
            table.put(at, u64::MAX, Ordering::Relaxed);
        }
        assert_eq!(table.entry(1).size, 7);
        table.update(1, |line| line.entry.state = EntryState::Revoking { writable: false });
        assert_eq!((read(&table, 1), get::<u32>(&table, REVOCATIONS, Ordering::Relaxed)), (table.entry(1), 1));
        table.put(guest_at(1, ACK), 9u32.to_le(), Ordering::Relaxed);
        assert_eq!((table.acknowledged(1), table.acknowledged(2)), (9, 0));
        table.clear();
        assert_eq!((read(&table, 1), table.acknowledged(1)), (Entry::default(), 0));
    }
}

/// Loom tries each order of steps, and each value that a relaxed load may see. [`write`] is the real one. The readers
/// do what docs/protocol.md asks of the guest.
#[cfg(test)]
mod orders {
    use std::sync::Arc;

    use loom::cell::UnsafeCell;
    use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
    use loom::thread;

    use super::*;

    /// One entry, and what the guest has acknowledged.
    #[derive(Default)]
    struct Memory {
        seq: AtomicU32,
        flags: AtomicU32,
        generation: AtomicU32,
        words: [AtomicU64; 5],
        ack: AtomicU32,
    }

    impl Words for Memory {
        fn put32(&self, at: usize, value: u32, order: Ordering) {
            [(0, &self.seq), (4, &self.flags), (48, &self.generation)]
                .into_iter()
                .filter(|word| word.0 == at)
                .for_each(|word| word.1.store(value, order));
        }

        fn put64(&self, at: usize, value: u64, order: Ordering) {
            // Only three of the five words: the others are between them.
            if at != 16 && at != 24 {
                self.words[at / 8 - 1].store(value, order);
            }
        }

        fn fence(&self, order: Ordering) {
            fence(order);
        }
    }

    impl Memory {
        /// Flags, three words and the generation, unless a writer came in between.
        fn read(&self) -> Option<(u32, [u64; 3], u32)> {
            let seq = self.seq.load(Ordering::Acquire);
            let flags = self.flags.load(Ordering::Relaxed);
            let words = [0, 3, 4].map(|n: usize| self.words[n].load(Ordering::Relaxed));
            let generation = self.generation.load(Ordering::Relaxed);
            fence(Ordering::Acquire);
            (seq % 2 == 0 && self.seq.load(Ordering::Relaxed) == seq).then_some((flags, words, generation))
        }
    }

    fn line(n: u32, state: EntryState) -> Line {
        let n64 = n.into();
        let entry =
            Entry { state, offset: n64, length: n64, size: n64, nodeid: n64, change: n64, generation: n, lost: n };
        Line { entry, ..Line::default() }
    }

    fn model(check: impl Fn() + Send + Sync + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(check);
    }

    #[test]
    fn no_reader_has_half_an_entry() {
        model(|| {
            let memory = Arc::new(Memory::default());
            let writer = thread::spawn({
                let memory = memory.clone();
                move || {
                    let mut line = line(1, EntryState::Live { writable: false });
                    write(0, &*memory, &mut line);
                    line.entry = super::orders::line(3, EntryState::Live { writable: true }).entry;
                    write(0, &*memory, &mut line);
                }
            });
            if let Some((flags, words, generation)) = memory.read() {
                let n = u64::from(flags);
                assert_eq!((words, u64::from(generation)), ([n; 3], n));
            }
            writer.join().unwrap();
            assert_eq!(memory.read(), Some((3, [3; 3], 3)));
        });
    }

    #[test]
    fn nobody_is_in_a_slot_that_was_given_back() {
        model(|| {
            let memory = Arc::new(Memory::default());
            #[expect(clippy::arc_with_non_send_sync, reason = "loom sees who uses it when")]
            let slot = Arc::new(UnsafeCell::new(1));
            let mut line = line(1, EntryState::Live { writable: false });
            write(0, &*memory, &mut line);
            let guest = thread::spawn({
                let (memory, slot) = (memory.clone(), slot.clone());
                move || {
                    // The guest may look twice before it lets go.
                    for _ in 0..2 {
                        match memory.read() {
                            Some((VALID, ..)) => slot.with(|at| {
                                // SAFETY: loom checks that nobody writes at the same time.
                                assert_eq!(unsafe { *at }, 1);
                            }),
                            Some((_, _, generation)) => return memory.ack.store(generation, Ordering::Release),
                            None => {}
                        }
                    }
                    memory.ack.store(1, Ordering::Release);
                }
            });
            line.step(Change::BeginRevoke).unwrap();
            write(0, &*memory, &mut line);
            while memory.ack.load(Ordering::Acquire) != line.entry.generation {
                thread::yield_now();
            }
            // SAFETY: as above.
            slot.with_mut(|at| unsafe { *at = 2 });
            guest.join().unwrap();
        });
    }
}
