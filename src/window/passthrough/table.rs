//! The backing table in region 2, which tells the guest where in region 1 each open file is. docs/virtio-spec.md has
//! its format, and docs/protocol.md what the daemon does with it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::param::page_size;
use vm_memory::mmap::MmapRegion;
use vm_memory::{AtomicAccess, Bytes, FileOffset, VolatileMemory};

use super::entry::{EntryState, Record};
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

/// The entry's `flags` in this state.
const fn flags(state: EntryState) -> u32 {
    match state {
        EntryState::Free => 0,
        EntryState::Live { writable: false } => VALID,
        EntryState::Live { writable: true } => VALID | WRITABLE,
        EntryState::Revoking { writable: false } => VALID | REVOKED,
        EntryState::Revoking { writable: true } => VALID | WRITABLE | REVOKED,
        EntryState::Revoked => REVOKED,
    }
}

/// What the guest has of an entry.
#[derive(Default)]
struct Row {
    record: Record,
    seq: u32,
}

/// What the guest has seen of an entry, and said of it.
#[derive(Clone, Copy)]
pub struct Seen {
    pub seq: u32,
    pub ack: u32,
}

/// The guest may write to the memory, so the daemon reads nothing but the guest's own words from it.
pub struct Table {
    memory: MmapRegion<()>,
    rows: Box<[Row]>,
    revocations: u32,
    /// Those of all sessions.
    all_revocations: u64,
}

impl Table {
    pub fn new() -> io::Result<Self> {
        let fd = memfd_create("thruway-table", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, LEN)?;
        // If somebody cut off a page, this process would get SIGBUS.
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let memory = MmapRegion::from_file(FileOffset::new(fd.into(), 0), LEN as usize).map_err(io::Error::other)?;
        let rows = (0..TABLE_ENTRIES).map(|_| Row::default()).collect();
        let mut table = Self { memory, rows, revocations: 0, all_revocations: 0 };
        table.clear();
        Ok(table)
    }

    /// The file that the frontend maps.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.memory.file_offset().map(|file| file.file().as_fd())
    }

    /// Frees all entries and writes the header anew.
    pub fn clear(&mut self) {
        self.revocations = 0;
        self.put(REVOCATIONS, 0u32, Ordering::Relaxed);
        for index in 1..TABLE_ENTRIES {
            self.write(index, &Record::default());
            [ACK, STORED, USED].iter().for_each(|word| self.put(guest_at(index, *word), 0u32, Ordering::Relaxed));
        }
        for (at, value) in HEADER.into_iter().chain([(PAGE_SIZE, page_size() as u32)]) {
            self.put(at, value.to_le(), Ordering::Relaxed);
        }
        self.put(0, MAGIC.to_le(), Ordering::Release);
    }

    /// An entry as the guest was told.
    pub fn record(&self, index: u32) -> &Record {
        &self.rows[index as usize % self.rows.len()].record
    }

    /// Writes what changed of an entry to the guest's memory.
    pub fn write(&mut self, index: u32, record: &Record) {
        let at = index as usize % self.rows.len();
        let mut row = std::mem::take(&mut self.rows[at]);
        let before = std::mem::replace(&mut row.record, *record);
        if row.record != before {
            write((index * ENTRY_SIZE) as usize, self, &mut row);
        }
        self.rows[at] = row;
        // After the flag, so that a guest that sees the count also sees the flag.
        if record.state.shows_revoked() && !before.state.shows_revoked() {
            self.revocations = self.revocations.wrapping_add(1);
            self.all_revocations += 1;
            self.put(REVOCATIONS, self.revocations.to_le(), Ordering::Release);
        }
    }

    /// The entries that are not free, by index.
    pub fn known(&self) -> Vec<(u32, Record)> {
        let all = (1..TABLE_ENTRIES).map(|index| (index, *self.record(index)));
        all.filter(|(_, record)| record.state != EntryState::Free).collect()
    }

    /// Revocations in all sessions.
    pub const fn revocations(&self) -> u64 {
        self.all_revocations
    }

    /// Revocations in this session, as the guest reads it.
    pub const fn revocation_count(&self) -> u32 {
        self.revocations
    }

    /// The sequence number of an entry.
    pub fn seq(&self, index: u32) -> u32 {
        self.rows[index as usize % self.rows.len()].seq
    }

    /// Goes on with another daemon's table, which had so many revocations.
    pub fn resume(&mut self, revocations: u32) {
        self.clear();
        self.revocations = revocations;
        self.put(REVOCATIONS, revocations.to_le(), Ordering::Release);
    }

    /// Goes on with an entry of another daemon's table. It is written afterwards.
    pub fn resume_entry(&mut self, index: u32, seen: Seen) {
        let at = index as usize % self.rows.len();
        // Even, as it is while nobody writes.
        self.rows[at].seq = seen.seq & !1;
        self.put(guest_at(index, ACK), seen.ack.to_le(), Ordering::Relaxed);
    }

    /// Sets what [`revocations`](Self::revocations) counts.
    pub const fn set_revocations(&mut self, all: u64) {
        self.all_revocations = all;
    }

    /// The last generation that the guest has let go of, as it says.
    pub fn acknowledged(&self, index: u32) -> u32 {
        let ack: Result<u32, _> = self.memory.as_volatile_slice().load(guest_at(index, ACK), Ordering::Acquire);
        ack.map_or(0, u32::from_le)
    }

    /// Whether the guest says that it has stored to the slot since the last call.
    pub fn stored(&self, index: u32) -> bool {
        self.take(index, STORED)
    }

    /// Whether the guest says that it has used the slot since the last call.
    pub fn used(&self, index: u32) -> bool {
        self.take(index, USED)
    }

    /// What the guest has said so far of its use of the slot does not count.
    pub fn forget_use(&self, index: u32) {
        for word in [STORED, USED] {
            self.take(index, word);
        }
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
fn write(at: usize, to: &impl Words, row: &mut Row) {
    let record = &row.record;
    to.put32(at, row.seq.wrapping_add(1), Ordering::Relaxed);
    to.fence(Ordering::Release);
    to.put32(at + 4, flags(record.state), Ordering::Relaxed);
    let words = [record.offset, record.length, record.size, record.nodeid, record.change];
    for (word, at) in words.into_iter().zip((at + 8..).step_by(8)) {
        to.put64(at, word, Ordering::Relaxed);
    }
    to.put32(at + 48, record.generation, Ordering::Relaxed);
    to.put32(at + 52, record.lost, Ordering::Relaxed);
    row.seq = row.seq.wrapping_add(2);
    to.put32(at, row.seq, Ordering::Release);
}

/// Where one of the guest's words of an entry is.
fn guest_at(index: u32, word: u32) -> usize {
    (GUEST_OFFSET + GUEST_SIZE * (index % TABLE_ENTRIES) + word) as usize
}

const _: () = assert!(GUEST_OFFSET as u64 + (GUEST_SIZE * TABLE_ENTRIES) as u64 <= LEN && TABLE_ENTRIES <= 65536);

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;
    use crate::window::passthrough::entry::Change;
    use crate::window::passthrough::entry::tests::STATES;

    fn get<T: AtomicAccess>(memory: &MmapRegion<()>, at: usize, order: Ordering) -> T {
        memory.as_volatile_slice().load(at, order).unwrap()
    }

    fn state(flags: u32) -> EntryState {
        STATES.into_iter().find(|state| super::flags(*state) == flags).unwrap()
    }

    /// Reads an entry as the guest does.
    fn read(memory: &MmapRegion<()>, index: u32) -> Record {
        let at = (index * ENTRY_SIZE) as usize;
        loop {
            let seq: u32 = get(memory, at, Ordering::Acquire);
            let word = |n: usize| get::<u64>(memory, at + 8 * n, Ordering::Relaxed);
            let entry = Record {
                state: state(get(memory, at + 4, Ordering::Relaxed)),
                offset: word(1),
                length: word(2),
                size: word(3),
                nodeid: word(4),
                change: word(5),
                generation: get(memory, at + 48, Ordering::Relaxed),
                lost: get(memory, at + 52, Ordering::Relaxed),
            };
            fence(Ordering::Acquire);
            if seq % 2 == 0 && get::<u32>(memory, at, Ordering::Relaxed) == seq {
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
        let table = Mutex::new(Table::new().unwrap());
        // The reader takes no lock, as the guest.
        let file = FileOffset::new(table.lock().file().unwrap().try_clone_to_owned().unwrap().into(), 0);
        let memory = MmapRegion::<()>::from_file(file, LEN as usize).unwrap();
        std::thread::scope(|scope| {
            let table = &table;
            let writers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(move || {
                        for _ in 0..100_000 {
                            let mut table = table.lock();
                            let n = table.record(5).size + 1;
                            let (state, n32) = (EntryState::Free, n as u32);
                            let (offset, length, size, nodeid, change, generation, lost) = (n, n, n, n, n, n32, n32);
                            table.write(5, &Record { state, offset, length, size, nodeid, change, generation, lost });
                        }
                    })
                })
                .collect();
            let mut last = 0;
            while writers.iter().any(|w| !w.is_finished()) {
                let e = read(&memory, 5);
                let n = e.size;
                assert_eq!((e.offset, e.length, e.nodeid, e.change), (n, n, n, n));
                assert_eq!((e.generation, e.lost), (n as u32, n as u32));
                assert!(n >= last);
                last = n;
            }
        });
        assert_eq!(
            (read(&memory, 5).size, read(&memory, 4), read(&memory, 6)),
            (200_000, Record::default(), Record::default())
        );
    }

    #[test]
    fn what_the_guest_writes_is_overwritten_and_never_read() {
        let mut table = Table::new().unwrap();
        table.write(1, &Record { size: 7, ..Record::default() });
        for at in (0..GUEST_OFFSET as usize).step_by(8) {
            table.put(at, u64::MAX, Ordering::Relaxed);
        }
        assert_eq!(table.record(1).size, 7);
        table.write(1, &Record { state: EntryState::Revoking { writable: false }, ..*table.record(1) });
        assert_eq!(read(&table.memory, 1), *table.record(1));
        assert_eq!(get::<u32>(&table.memory, REVOCATIONS, Ordering::Relaxed), 1);
        table.put(guest_at(1, ACK), 9u32.to_le(), Ordering::Relaxed);
        assert_eq!((table.acknowledged(1), table.acknowledged(2)), (9, 0));
        table.clear();
        assert_eq!((read(&table.memory, 1), table.acknowledged(1)), (Record::default(), 0));
    }

    #[test]
    fn flags_are_as_the_protocol_says() {
        assert_eq!(STATES.map(flags), [0, 1, 3, 5, 7, 4]);
    }

    #[test]
    fn each_revocation_is_flagged_and_counted_once() {
        let mut table = Table::new().unwrap();
        let mut record = Record::default();
        let mut seen = |change: fn(&mut Record)| {
            change(&mut record);
            table.write(3, &record);
            let word = |at| get::<u32>(&table.memory, at, Ordering::Acquire);
            (word(3 * ENTRY_SIZE as usize + 4), word(REVOCATIONS))
        };
        let map = |record: &mut Record| record.step(Change::Map { offset: 0, length: RANGE }).unwrap();
        assert_eq!(seen(map), (VALID, 0));
        assert_eq!(seen(|record| record.step(Change::AllowStores).unwrap()), (VALID | WRITABLE, 0));
        assert_eq!(seen(|record| record.size = 5), (VALID | WRITABLE, 0));
        assert_eq!(seen(|record| record.step(Change::BeginRevoke).unwrap()), (VALID | WRITABLE | REVOKED, 1));
        assert_eq!(seen(|record| record.size = 4), (VALID | WRITABLE | REVOKED, 1));
        assert_eq!(seen(|record| record.step(Change::Revoke).unwrap()), (REVOKED, 1));
        assert_eq!(seen(map), (VALID, 1));
        assert_eq!(seen(|record| record.step(Change::BeginRevoke).unwrap()), (VALID | REVOKED, 2));
        assert_eq!(seen(|record| record.step(Change::Release).unwrap()), (0, 2));
        table.clear();
        let revocations = get::<u32>(&table.memory, REVOCATIONS, Ordering::Acquire);
        assert_eq!((revocations, table.revocations()), (0, 2), "a new session revokes nothing");
    }

    #[test]
    fn what_the_guest_has_said_counts_once() {
        let mut table = Table::new().unwrap();
        let says = |table: &Table, word| table.put(guest_at(3, word), u32::MAX, Ordering::Release);
        assert!(!table.used(3) && !table.stored(3));
        says(&table, USED);
        assert_eq!((table.used(2), table.stored(3), table.used(3), table.used(3)), (false, false, true, false));
        says(&table, STORED);
        assert_eq!((table.stored(3), table.stored(3)), (true, false));
        [USED, STORED].iter().for_each(|word| says(&table, *word));
        table.forget_use(3);
        assert!(!table.used(3) && !table.stored(3));
        [ACK, USED, STORED].iter().for_each(|word| says(&table, *word));
        table.clear();
        let word = |word| get::<u32>(&table.memory, guest_at(3, word), Ordering::Relaxed);
        assert_eq!([ACK, STORED, USED].map(word), [0; 3]);
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
    use crate::window::passthrough::entry::Change;

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

    fn row(n: u32, state: EntryState) -> Row {
        let n64 = n.into();
        let record =
            Record { state, offset: n64, length: n64, size: n64, nodeid: n64, change: n64, generation: n, lost: n };
        Row { record, ..Row::default() }
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
                    let mut row = row(1, EntryState::Live { writable: false });
                    write(0, &*memory, &mut row);
                    row.record = super::orders::row(3, EntryState::Live { writable: true }).record;
                    write(0, &*memory, &mut row);
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
            let mut row = row(1, EntryState::Live { writable: false });
            write(0, &*memory, &mut row);
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
            row.record.step(Change::BeginRevoke).unwrap();
            write(0, &*memory, &mut row);
            while memory.ack.load(Ordering::Acquire) != row.record.generation {
                thread::yield_now();
            }
            // SAFETY: as above.
            slot.with_mut(|at| unsafe { *at = 2 });
            guest.join().unwrap();
        });
    }
}
