//! Compares the guest's view of the backing table with a model.
#![no_main]

use std::cell::RefCell;
use std::collections::BTreeSet;

use libfuzzer_sys::fuzz_target;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use thruway::window::fuzzing::{Change, EntryState, Record, Table};
use thruway_fuzz::Input;

const LEN: usize = 2 << 20;
const ENTRIES: u32 = 4096;
const ACKS: usize = 4096 * 64;

/// Each state, with its flags in docs/protocol.md.
const STATES: [(EntryState, u32); 6] = [
    (EntryState::Free, 0),
    (EntryState::Live { writable: false }, 1),
    (EntryState::Live { writable: true }, 3),
    (EntryState::Revoking { writable: false }, 5),
    (EntryState::Revoking { writable: true }, 7),
    (EntryState::Revoked, 4),
];

/// Whether the guest may see `after` in place of `before`. A live slot may grow. It is never removed, moved or made
/// shorter without a revocation.
fn is_legal(before: Record, after: Record) -> bool {
    // Only what the guest could store to is ever lost, when a slot is taken away.
    let forced = before.state == EntryState::Revoking { writable: true } && after.state == EntryState::Revoked;
    let lost = after.lost.wrapping_sub(before.lost);
    if lost > 1 || lost == 1 && !forced {
        return false;
    }
    let same_slot = (before.offset, before.length, before.generation) == (after.offset, after.length, after.generation);
    match (before.state, after.state) {
        (EntryState::Live { writable }, EntryState::Live { writable: now }) => {
            let place = (before.offset, before.generation) == (after.offset, after.generation);
            place && after.length >= before.length && now >= writable
        }
        (EntryState::Live { writable }, EntryState::Revoking { writable: now }) => same_slot && now == writable,
        (EntryState::Live { .. }, EntryState::Revoked) | (_, EntryState::Revoking { .. }) => {
            same_slot && before.state == after.state
        }
        (_, EntryState::Live { .. }) => after.generation == before.generation.wrapping_add(1).max(1),
        (_, EntryState::Revoked) => (after.offset, after.length) == (0, 0) && after.generation == before.generation,
        (_, EntryState::Free) => same_slot,
    }
}

struct Kept {
    table: Table,
    /// The guest's mapping of the table.
    guest: *mut u8,
    /// Entries and their sequence numbers, by index.
    model: Vec<(Record, u32)>,
    revocations: u32,
}

impl Kept {
    fn new() -> Self {
        let table = Table::new().unwrap();
        let file = table.file().unwrap();
        // SAFETY: the kernel chooses the address.
        let guest = unsafe {
            mmap(std::ptr::null_mut(), LEN, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0).unwrap()
        };
        let mut kept = Self { table, guest: guest.cast(), model: Vec::new(), revocations: 0 };
        kept.model = (0..ENTRIES).map(|index| (Record::default(), kept.word(index as usize * 64))).collect();
        kept
    }

    fn word(&self, at: usize) -> u32 {
        assert!(at + 4 <= LEN);
        // SAFETY: the address is in the mapping and aligned.
        u32::from_le(unsafe { self.guest.add(at).cast::<u32>().read_volatile() })
    }

    fn put(&self, at: usize, value: u32) {
        assert!(at + 4 <= LEN && at % 4 == 0);
        // SAFETY: as above.
        unsafe { self.guest.add(at).cast::<u32>().write_volatile(value.to_le()) }
    }

    fn long(&self, at: usize) -> u64 {
        u64::from(self.word(at)) | u64::from(self.word(at + 4)) << 32
    }

    fn seen(&self, index: u32) -> Record {
        let at = index as usize * 64;
        Record {
            state: STATES.into_iter().find(|state| state.1 == self.word(at + 4)).unwrap().0,
            offset: self.long(at + 8),
            length: self.long(at + 16),
            size: self.long(at + 24),
            nodeid: self.long(at + 32),
            change: self.long(at + 40),
            generation: self.word(at + 48),
            lost: self.word(at + 52),
        }
    }

    fn update<R>(&mut self, index: u32, change: impl FnOnce(&mut Record) -> R) -> R {
        let (before, seq) = self.model[index as usize];
        let mut record = *self.table.record(index);
        let result = change(&mut record);
        self.table.write(index, &record);
        let entry = *self.table.record(index);
        assert_eq!(entry, record);
        assert!(is_legal(before, entry), "{before:?} became {entry:?}");
        let changed = entry != before;
        let seq = if changed { seq.wrapping_add(2) } else { seq };
        self.model[index as usize] = (entry, seq);
        let is_revoked = |entry: Record| matches!(entry.state, EntryState::Revoking { .. } | EntryState::Revoked);
        if is_revoked(entry) && !is_revoked(before) {
            self.revocations = self.revocations.wrapping_add(1);
            assert_eq!(self.word(24), self.revocations);
        }
        if changed {
            assert_eq!((self.seen(index), self.word(index as usize * 64)), (entry, seq));
        }
        result
    }
}

thread_local! {
    static KEPT: RefCell<Kept> = RefCell::new(Kept::new());
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let mut touched = BTreeSet::new();
    KEPT.with_borrow_mut(|kept| {
        while !input.is_empty() {
            let what = input.u8();
            let index = 1 + u32::from(what >> 4) * 272;
            match what & 15 {
                // The guest writes anything.
                0..=2 => {
                    let at = [index as usize * 64, ACKS + 16 * index as usize, 24][usize::from(what & 3)];
                    let value = input.u32();
                    kept.put(at + if what & 3 == 0 { usize::from(input.u8() % 16) * 4 } else { 0 }, value);
                    match what & 3 {
                        1 => assert_eq!(kept.table.acknowledged(index), value),
                        _ => assert_eq!(*kept.table.record(index), kept.model[index as usize].0),
                    }
                }
                3 if bytes.len() == 1 => {
                    kept.table.clear();
                    kept.revocations = 0;
                    for (n, (entry, seq)) in kept.model.iter_mut().enumerate() {
                        *seq = if *entry == Record::default() { *seq } else { seq.wrapping_add(2) };
                        *entry = Record::default();
                        assert_eq!(*kept.table.record(n as u32), *entry);
                    }
                    assert_eq!((kept.word(24), kept.word(8), kept.word(20)), (0, 2, ACKS as u32));
                }
                4 | 5 => {
                    let (offset, length) = (input.number(), input.number());
                    let _ = kept.update(index, |record| record.step(Change::Map { offset, length }));
                }
                6 => {
                    let size = input.number();
                    kept.update(index, |record| record.size = size);
                }
                7 => {
                    let node = input.number();
                    kept.update(index, |record| record.nodeid = node);
                }
                8 => kept.update(index, |record| record.change = record.change.wrapping_add(1)),
                9 => {
                    let (offset, len) = (kept.model[index as usize].0.offset, input.number());
                    kept.update(index, |record| record.lengthen(offset, len));
                }
                n => {
                    let before = kept.model[index as usize].0;
                    let map = Change::Map { offset: before.offset, length: before.length };
                    let change = [
                        map,
                        Change::AllowStores,
                        Change::BeginRevoke,
                        Change::Revoke,
                        Change::ForceRevoke,
                        Change::Release,
                    ][usize::from(n) % 6];
                    let done = kept.update(index, |record| record.step(change));
                    assert!(done.is_ok() || kept.model[index as usize].0 == before, "a refused change took effect");
                }
            }
            touched.insert(index);
        }
        // Free the entries for the next input. Writing an entry overwrites the guest's bytes.
        for index in touched {
            kept.update(index, |record| {
                record.step(Change::Release).unwrap();
                record.change = record.change.wrapping_add(1);
            });
            kept.put(ACKS + 16 * index as usize, 0);
        }
        kept.put(24, kept.revocations);
    });
});
