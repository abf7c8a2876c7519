//! The backing table, region 2: where in region 1 each open file is, for the guest to read. docs/protocol.md has its format.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{Ordering, fence};

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vm_memory::mmap::MmapRegion;
use vm_memory::{AtomicAccess, Bytes, FileOffset, VolatileMemory};

use super::RANGE;

/// Bytes of region 2: the smallest that keeps region 1, which has the rest, a multiple of 2 MiB.
pub const LEN: u64 = RANGE;

/// Entries, with the header: far more than there can be slots, as revoked files keep theirs.
pub const ENTRIES: u32 = 4096;

/// Bytes of the header and of each entry.
const ENTRY_SIZE: u32 = 64;

/// Where the guest's acknowledgements begin.
const ACK_OFFSET: u32 = ENTRIES * ENTRY_SIZE;

const MAGIC: u64 = u64::from_le_bytes(*b"FUSE_WIN");
const VERSION: u32 = 1;

/// Offsets in the header.
const HEADER: [(usize, u32); 4] = [(8, VERSION), (12, ENTRY_SIZE), (16, ENTRIES), (20, ACK_OFFSET)];
const REVOCATIONS: usize = 24;

pub const VALID: u32 = 1;
pub const WRITABLE: u32 = 2;
pub const REVOKED: u32 = 4;

/// What the guest sees of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    pub flags: u32,
    /// Of the slot in region 1, in bytes.
    pub offset: u64,
    /// Bytes of the file that are mapped there.
    pub length: u64,
    /// Of the file, in bytes.
    pub size: u64,
    pub nodeid: u64,
    pub change: u64,
    pub generation: u32,
}

impl Entry {
    pub fn is_live(&self) -> bool {
        self.flags & (VALID | REVOKED) == VALID
    }

    pub fn is_revoking(&self) -> bool {
        self.flags & (VALID | REVOKED) == VALID | REVOKED
    }
}

/// An entry and what the daemon alone knows of it.
#[derive(Default)]
pub struct Line {
    pub entry: Entry,
    /// The slot, offset and length, if there is one: also while the entry is free.
    pub slot: Option<(u64, u64)>,
    /// The first byte that a store may have to find room on the disk for. From `size` on: none.
    pub hole: u64,
    /// Counts the times that `hole` went down: who has it go up by what was so a moment ago looks at it.
    pub holes: u64,
    /// Of the file when it was looked at last, as statx(2) counts them.
    pub blocks: u64,
    /// Sizes to which truncations under way cut the file.
    pub limits: Vec<u64>,
    seq: u32,
}

/// Nothing is read back but the acknowledgements. The memory is the guest's to write.
///
/// Lock rule: one line at a time, as the last lock; no call to the frontend while it is held. A stat of the line's file is
/// made under it, so that the last one to look writes last.
pub struct Table {
    memory: MmapRegion<()>,
    lines: Box<[Mutex<Line>]>,
    revocations: Mutex<u32>,
}

impl Table {
    pub fn new() -> io::Result<Self> {
        let fd = memfd_create("thruway-table", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, LEN)?;
        // A page that is cut off would be a SIGBUS here.
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let memory = MmapRegion::from_file(FileOffset::new(fd.into(), 0), LEN as usize).map_err(io::Error::other)?;
        let lines = (0..ENTRIES).map(|_| Mutex::default()).collect();
        let table = Self { memory, lines, revocations: Mutex::new(0) };
        table.clear();
        Ok(table)
    }

    /// What the frontend maps.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.memory.file_offset().map(|file| file.file().as_fd())
    }

    /// Frees all entries, and writes the header anew.
    pub fn clear(&self) {
        *self.revocations.lock() = 0;
        self.put(REVOCATIONS, 0u32, Ordering::Relaxed);
        for index in 1..ENTRIES {
            self.update(index, |line| *line = Line { seq: line.seq, ..Line::default() });
            self.put(ack_at(index), 0u32, Ordering::Relaxed);
        }
        for (at, value) in HEADER {
            self.put(at, value.to_le(), Ordering::Relaxed);
        }
        self.put(0, MAGIC.to_le(), Ordering::Release);
    }

    /// Changes an entry, and shows the guest what is new.
    pub fn update<R>(&self, index: u32, change: impl FnOnce(&mut Line) -> R) -> R {
        let mut line = self.lines[index as usize % self.lines.len()].lock();
        let before = line.entry;
        let result = change(&mut line);
        if line.entry != before {
            write((index * ENTRY_SIZE) as usize, self, &mut line);
        }
        // After the flag, under the lock: a guest that sees the count sees the flag.
        if line.entry.flags & !before.flags & REVOKED != 0 {
            let mut revocations = self.revocations.lock();
            *revocations = revocations.wrapping_add(1);
            self.put(REVOCATIONS, revocations.to_le(), Ordering::Release);
        }
        result
    }

    /// An entry as the daemon knows it.
    pub fn entry(&self, index: u32) -> Entry {
        self.lines[index as usize % self.lines.len()].lock().entry
    }

    /// The last generation that the guest says to have let go of.
    pub fn acknowledged(&self, index: u32) -> u32 {
        let ack: Result<u32, _> = self.memory.as_volatile_slice().load(ack_at(index), Ordering::Acquire);
        ack.map_or(0, u32::from_le)
    }

    fn put<T: AtomicAccess>(&self, at: usize, value: T, order: Ordering) {
        // Never out of bounds: all offsets are below LEN.
        let _ = self.memory.as_volatile_slice().store(value, at, order);
    }
}

/// What entries are written to.
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

/// Writes an entry such that a reader can tell whether it has read one and the same: its number is odd meanwhile.
fn write(at: usize, to: &impl Words, line: &mut Line) {
    let entry = &line.entry;
    to.put32(at, line.seq.wrapping_add(1), Ordering::Relaxed);
    to.fence(Ordering::Release);
    to.put32(at + 4, entry.flags, Ordering::Relaxed);
    let words = [entry.offset, entry.length, entry.size, entry.nodeid, entry.change];
    for (word, at) in words.into_iter().zip((at + 8..).step_by(8)) {
        to.put64(at, word, Ordering::Relaxed);
    }
    to.put32(at + 48, entry.generation, Ordering::Relaxed);
    line.seq = line.seq.wrapping_add(2);
    to.put32(at, line.seq, Ordering::Release);
}

fn ack_at(index: u32) -> usize {
    (ACK_OFFSET + 4 * index) as usize
}

const _: () = assert!(ACK_OFFSET as u64 + 4 * ENTRIES as u64 <= LEN && ENTRIES <= 65536);

#[cfg(test)]
mod tests {
    use super::*;

    fn get<T: AtomicAccess>(table: &Table, at: usize, order: Ordering) -> T {
        table.memory.as_volatile_slice().load(at, order).unwrap()
    }

    /// Reads an entry as the guest does.
    fn read(table: &Table, index: u32) -> Entry {
        let at = (index * ENTRY_SIZE) as usize;
        loop {
            let seq: u32 = get(table, at, Ordering::Acquire);
            let word = |n: usize| get::<u64>(table, at + 8 * n, Ordering::Relaxed);
            let entry = Entry {
                flags: get(table, at + 4, Ordering::Relaxed),
                offset: word(1),
                length: word(2),
                size: word(3),
                nodeid: word(4),
                change: word(5),
                generation: get(table, at + 48, Ordering::Relaxed),
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
        let words: Vec<u32> = header[8..28].chunks(4).map(|w| u32::from_le_bytes(w.try_into().unwrap())).collect();
        assert_eq!(words, [1, 64, 4096, 4096 * 64, 0]);
        assert!(header[28..].iter().all(|b| *b == 0));
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
                                line.entry.generation = n as u32;
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
                assert_eq!((e.offset, e.length, e.nodeid, e.change, e.generation), (n, n, n, n, n as u32));
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
        for at in (0..ACK_OFFSET as usize).step_by(8) {
            table.put(at, u64::MAX, Ordering::Relaxed);
        }
        assert_eq!(table.entry(1).size, 7);
        table.update(1, |line| line.entry.flags = VALID | REVOKED);
        assert_eq!((read(&table, 1), get::<u32>(&table, REVOCATIONS, Ordering::Relaxed)), (table.entry(1), 1));
        table.put(ack_at(1), 9u32.to_le(), Ordering::Relaxed);
        assert_eq!((table.acknowledged(1), table.acknowledged(2)), (9, 0));
        table.clear();
        assert_eq!((read(&table, 1), table.acknowledged(1)), (Entry::default(), 0));
    }
}

/// Each order of steps, and each value that a relaxed load may see. [`write`] is the real one; readers are what docs/protocol.md
/// asks of the guest.
#[cfg(test)]
mod orders {
    use std::sync::Arc;

    use loom::cell::UnsafeCell;
    use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
    use loom::thread;

    use super::*;

    /// One entry; what the guest has acknowledged.
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
            // Three of the five: the others are between them.
            if at != 16 && at != 24 {
                self.words[at / 8 - 1].store(value, order);
            }
        }

        fn fence(&self, order: Ordering) {
            fence(order);
        }
    }

    impl Memory {
        /// Flags, three words and the generation, if none was written meanwhile.
        fn read(&self) -> Option<(u32, [u64; 3], u32)> {
            let seq = self.seq.load(Ordering::Acquire);
            let flags = self.flags.load(Ordering::Relaxed);
            let words = [0, 3, 4].map(|n: usize| self.words[n].load(Ordering::Relaxed));
            let generation = self.generation.load(Ordering::Relaxed);
            fence(Ordering::Acquire);
            (seq % 2 == 0 && self.seq.load(Ordering::Relaxed) == seq).then_some((flags, words, generation))
        }
    }

    fn line(n: u32, flags: u32) -> Line {
        let n64 = n.into();
        let entry = Entry { flags, offset: n64, length: n64, size: n64, nodeid: n64, change: n64, generation: n };
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
                    let mut line = line(1, 1);
                    write(0, &*memory, &mut line);
                    line.entry = super::orders::line(2, 2).entry;
                    write(0, &*memory, &mut line);
                }
            });
            if let Some((flags, words, generation)) = memory.read() {
                let n = u64::from(flags);
                assert_eq!((words, u64::from(generation)), ([n; 3], n));
            }
            writer.join().unwrap();
            assert_eq!(memory.read(), Some((2, [2; 3], 2)));
        });
    }

    #[test]
    fn nobody_is_in_a_slot_that_was_given_back() {
        model(|| {
            let memory = Arc::new(Memory::default());
            #[expect(clippy::arc_with_non_send_sync, reason = "loom sees who uses it when")]
            let slot = Arc::new(UnsafeCell::new(1));
            let mut line = line(1, VALID);
            write(0, &*memory, &mut line);
            let guest = thread::spawn({
                let (memory, slot) = (memory.clone(), slot.clone());
                move || {
                    // It may look twice before it lets go.
                    for _ in 0..2 {
                        match memory.read() {
                            Some((VALID, ..)) => slot.with(|at| {
                                // SAFETY: loom sees to it that nobody writes meanwhile.
                                assert_eq!(unsafe { *at }, 1);
                            }),
                            Some((_, _, generation)) => return memory.ack.store(generation, Ordering::Release),
                            None => {}
                        }
                    }
                    memory.ack.store(1, Ordering::Release);
                }
            });
            line.entry.flags |= REVOKED;
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
