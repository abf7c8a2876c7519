//! What a worker process has taken from a virtqueue and not given back.

use std::sync::atomic::Ordering;

use rustix::time::{ClockId, clock_gettime};

use super::{Claim, RING_HEADER, RING_WORDS, RINGS_AT, Record};
use crate::limits::CHAINS;

/// Words of a ring's header.
const LEFT: usize = 0;
const GIVING: usize = 1;
const SERVED: usize = 2;

/// Words of a chain.
pub(super) const CHAIN_WORDS: usize = 4;
const STATE: usize = 0;
const SINCE: usize = 1;
const USES: usize = 2;
const NOTE: usize = 3;

/// What is done with a chain: the lowest bits of its state. The length of its reply is in the upper half.
const TAKEN: u64 = 1;
const DONE: u64 = 2;
const STAGE: u64 = 3;
/// Another process has taken it.
const AGAIN: u64 = 1 << 2;
/// How many processes it may have killed: bits 8 to 15 of its state.
const TRY: u64 = 1 << 8;

/// A request that so many processes died with, each soon after its start, is refused: it is probably what kills them. A
/// request that was merely under way while another killed the process is seldom among them so often.
const TRIES: u64 = 8;

/// [`GIVING`] names a chain.
const IS_GIVING: u64 = 1 << 63;

/// How a ring was when its worker process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftAs {
    /// The frontend had stopped it.
    Stopped = 1,
    /// The frontend had not stopped it.
    Running = 2,
    /// As [`Running`](Self::Running), and what was taken from it may have killed the process.
    Suspect = 3,
}

/// The record of one ring.
#[derive(Clone, Copy)]
pub struct RingRecord {
    record: &'static Record,
    at: usize,
    index: usize,
}

/// What another process has left in a ring.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Chains to serve, perhaps for the second time.
    pub taken: Vec<u16>,
    /// Chains that were served, and the lengths of their replies.
    pub done: Vec<(u16, u32)>,
    /// The chain to take next.
    pub next_avail: u16,
}

impl Record {
    /// The record of a ring.
    pub fn ring(&'static self, index: usize) -> RingRecord {
        RingRecord { record: self, at: RINGS_AT + index * RING_WORDS, index }
    }
}

impl RingRecord {
    fn get(&self, word: usize) -> u64 {
        self.record.words.at(self.at + word).load(Ordering::Acquire)
    }

    fn set(&self, word: usize, value: u64) {
        self.record.words.at(self.at + word).store(value, Ordering::Release);
    }

    fn chain(head: u16) -> usize {
        RING_HEADER + usize::from(head % CHAINS) * CHAIN_WORDS
    }

    /// The time that a file gets which is made now, in ns.
    pub fn now() -> u64 {
        let now = clock_gettime(ClockId::RealtimeCoarse);
        (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
    }

    /// The chain is taken. `now`: [`now`](Self::now).
    pub fn take(&self, head: u16, now: u64) {
        let chain = Self::chain(head);
        self.set(chain + SINCE, now);
        self.set(chain + NOTE, 0);
        self.set(chain + USES, self.get(chain + USES).wrapping_add(1));
        self.set(chain + STATE, TAKEN);
    }

    /// The chain was served, and its reply is in the guest's memory. `len`: of the reply.
    pub fn done(&self, head: u16, len: u32) {
        self.set(Self::chain(head) + STATE, DONE | u64::from(len) << 32);
    }

    /// Gives the chain back by `add`, which writes it into the used ring at `used_idx`.
    pub fn give_back(&self, head: u16, len: u32, used_idx: u16, add: impl FnOnce()) {
        self.done(head, len);
        self.set(GIVING, IS_GIVING | u64::from(head) << 16 | u64::from(used_idx));
        add();
        self.set(Self::chain(head) + STATE, 0);
        self.set(GIVING, 0);
        self.set(SERVED, self.get(SERVED).wrapping_add(1));
    }

    /// Nothing of it goes back to the driver any more.
    pub fn clear(&self) {
        for head in 0..CHAINS {
            let state = Self::chain(head) + STATE;
            if self.get(state) != 0 {
                self.set(state, 0);
            }
        }
    }

    /// What the request of this chain is to know of processes before this one. `None`: it is to be refused.
    pub fn claim(&self, head: u16) -> Option<Claim> {
        let chain = Self::chain(head);
        let state = self.get(chain + STATE);
        let id = (self.index as u64) << 56 | u64::from(head) << 40 | (self.get(chain + USES) % (1 << 40));
        let again = (state & AGAIN != 0).then(|| self.get(chain + SINCE));
        (state / TRY % 256 < TRIES).then_some(Claim { id: id | 1 << 63, again })
    }

    /// Whether a request is still to be answered. `id`: of its [`Claim`].
    pub(super) fn is_open(record: &'static Record, id: u64) -> bool {
        let (ring, chain) = Self::of(record, id);
        ring.get(chain + STATE) & STAGE == TAKEN && ring.get(chain + USES) % (1 << 40) == id % (1 << 40)
    }

    /// The ring and the chain of a request. `id`: of its [`Claim`].
    fn of(record: &'static Record, id: u64) -> (Self, usize) {
        let (index, head) = ((id >> 56 & 0x7f) as usize, (id >> 40) as u16);
        (record.ring(index % super::RINGS), Self::chain(head))
    }

    /// What a request has noted for whoever serves it again. Otherwise notes `value`. `id`: of its [`Claim`].
    pub(super) fn note(record: &'static Record, id: u64, value: impl FnOnce() -> u64) -> Option<u64> {
        let (ring, chain) = Self::of(record, id);
        let noted = ring.get(chain + NOTE).checked_sub(1);
        if noted.is_none() {
            ring.set(chain + NOTE, value().wrapping_add(1));
        }
        noted
    }

    /// The number of chains that were given back.
    pub fn served(&self) -> u64 {
        self.get(SERVED)
    }

    /// Notes how the ring was when its worker process ended.
    pub fn leave(&self, left: LeftAs) {
        self.set(LEFT, left as u64);
    }

    /// Takes over what another process has left. `used_idx`: of the used ring. `next_avail`: where the frontend has the
    /// ring go on. `None` if this is no ring of another process.
    pub fn adopt(&self, used_idx: u16, next_avail: u16) -> Option<Leftovers> {
        let left = self.get(LEFT);
        if left == 0 {
            return None;
        }
        let giving = self.get(GIVING);
        if giving & IS_GIVING != 0 {
            let state = Self::chain((giving >> 16) as u16) + STATE;
            if self.get(state) & STAGE == DONE && used_idx == (giving as u16).wrapping_add(1) {
                self.set(state, 0);
            }
            self.set(GIVING, 0);
        }
        let mut found = Leftovers::default();
        for head in 0..CHAINS {
            let state = self.get(Self::chain(head) + STATE);
            match state & STAGE {
                TAKEN => found.taken.push(head),
                DONE => found.done.push((head, (state >> 32) as u32)),
                _ => {}
            }
        }
        let held = (found.taken.len() + found.done.len()) as u16;
        found.next_avail = used_idx.wrapping_add(held);
        self.set(LEFT, 0);
        if left == LeftAs::Stopped as u64 && found.next_avail != next_avail {
            // The driver has set it up anew.
            self.clear();
            return None;
        }
        let blame = if left == LeftAs::Suspect as u64 { TRY } else { 0 };
        for head in &found.taken {
            let state = Self::chain(*head) + STATE;
            self.set(state, (self.get(state) | AGAIN) + blame);
        }
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring() -> RingRecord {
        let record: &'static Record = Box::leak(Box::new(Record::new().unwrap()));
        record.ring(3)
    }

    #[test]
    fn a_chain_goes_back_once() {
        let ring = ring();
        assert_eq!(ring.adopt(0, 0), None);
        for head in [5, 6, 7] {
            ring.take(head, 11);
        }
        ring.done(6, 40);
        ring.leave(LeftAs::Running);
        let found = ring.adopt(100, 0).unwrap();
        assert_eq!(found, Leftovers { taken: vec![5, 7], done: vec![(6, 40)], next_avail: 103 });
        assert_eq!(ring.claim(5).unwrap().again, Some(11));
        ring.give_back(6, 40, 100, || {});
        ring.take(6, 12);
        assert_eq!(ring.claim(6).unwrap().again, None);
        ring.leave(LeftAs::Running);
        assert_eq!(ring.adopt(101, 0).unwrap().taken, [5, 6, 7]);
    }

    /// The process ends before, in and after the store that gives the chain back.
    #[test]
    fn a_chain_that_was_being_given_back() {
        for (given, done) in [(0, vec![(5, 9)]), (1, vec![])] {
            let ring = ring();
            ring.take(5, 1);
            ring.done(5, 9);
            ring.set(GIVING, IS_GIVING | 5 << 16 | 65535);
            ring.leave(LeftAs::Running);
            let used = 65535u16.wrapping_add(given);
            let next_avail = used.wrapping_add(done.len() as u16);
            assert_eq!(ring.adopt(used, 0), Some(Leftovers { taken: vec![], done, next_avail }));
        }
    }

    #[test]
    fn a_stopped_ring_goes_on_or_is_new() {
        for (base, goes_on) in [(12, true), (0, false)] {
            let ring = ring();
            ring.take(1, 1);
            ring.take(2, 1);
            ring.leave(LeftAs::Stopped);
            assert_eq!(ring.adopt(10, base).is_some(), goes_on);
            assert_eq!(ring.get(RingRecord::chain(1) + STATE) != 0, goes_on);
        }
    }

    #[test]
    fn a_request_that_kills_is_refused() {
        let ring = ring();
        ring.take(9, 1);
        for _ in 0..TRIES {
            for left in [LeftAs::Running, LeftAs::Suspect] {
                assert!(ring.claim(9).is_some());
                ring.leave(left);
                ring.adopt(0, 0).unwrap();
            }
        }
        assert!(ring.claim(9).is_none());
        ring.give_back(9, 16, 0, || {});
        ring.take(9, 1);
        assert!(ring.claim(9).is_some());
    }

    #[test]
    fn a_claim_ends_with_its_chain() {
        let ring = ring();
        ring.take(9, 1);
        let id = ring.claim(9).unwrap().id;
        assert!(RingRecord::is_open(ring.record, id));
        ring.give_back(9, 16, 0, || assert!(!RingRecord::is_open(ring.record, id)));
        ring.take(9, 1);
        assert!(!RingRecord::is_open(ring.record, id));
    }
}
