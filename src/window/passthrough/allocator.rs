//! The slots of region 1.

use std::collections::BTreeMap;

/// A new slot has so many times its length free behind it, where the window has that, and so has the slot before it. It
/// can then double three times without a revocation, which a guest that holds a page of it delays for as long as it
/// likes. With more, fewer slots would have any room.
const BEHIND: u64 = 7;

/// Ranges of a region, in bytes.
pub struct RangeAllocator {
    size: u64,
    /// Lengths by offset.
    taken: BTreeMap<u64, u64>,
}

impl RangeAllocator {
    pub fn new(size: u64) -> Self {
        Self { size, taken: BTreeMap::new() }
    }

    /// Takes a free range: with free room behind it as long as half of the region stays in one piece, since a long file
    /// needs that. Otherwise the last one that is long enough, since the others are room behind slots. `kept`: slots
    /// that give way to any other; they count as free, but the range is not one of theirs.
    pub fn take(&mut self, len: u64, kept: &[u64]) -> Option<u64> {
        let last = || self.gaps(&[]).filter(|gap| gap.len() >= len).last().map(|gap| gap.end - len);
        let at = self.with_room_behind(len, kept).or_else(last)?;
        self.taken.insert(at, len);
        Some(at)
    }

    fn with_room_behind(&self, len: u64, kept: &[u64]) -> Option<u64> {
        let longest = self.gaps(kept).max_by_key(Gap::len)?;
        let place = |gap: Gap| {
            let mut at = gap.start.saturating_add(gap.before.saturating_mul(BEHIND));
            for (&start, &length) in self.taken.range(gap.start..gap.end) {
                if start < at.saturating_add(len) {
                    at = at.max(start + length);
                }
            }
            let behind = gap.end.checked_sub(at.checked_add(len)?)?;
            let whole = if gap.start == longest.start { behind.max(at - gap.start) } else { longest.len() };
            (behind >= len.saturating_mul(BEHIND) && whole >= self.size / 2).then_some(at)
        };
        self.gaps(kept).find_map(place)
    }

    /// What is free, in order, if the slots at `free` were free.
    fn gaps(&self, free: &[u64]) -> impl Iterator<Item = Gap> {
        let taken = self.taken.iter().filter(|(start, _)| !free.contains(start)).map(|(&start, &len)| (start, len));
        let mut next = Gap { start: 0, end: 0, before: 0 };
        taken.chain([(self.size, 0)]).map(move |(start, len)| {
            let gap = Gap { end: start, ..next };
            next = Gap { start: start + len, end: 0, before: len };
            gap
        })
    }

    /// Whether there would be a range that is long enough if those at `free` were free.
    pub fn would_fit(&self, len: u64, free: &[u64]) -> bool {
        self.gaps(free).any(|gap| gap.len() >= len)
    }

    /// The slots that are in the way of the one at `at` if it had `len` bytes. `None` if the region ends there.
    pub fn behind(&self, at: u64, len: u64) -> Option<Vec<u64>> {
        let end = at.checked_add(len).filter(|end| *end <= self.size)?;
        Some(self.taken.range(at..end).skip(1).map(|(start, _)| *start).collect())
    }

    /// Gives the slot at `at` another length. Whether nothing is in the way.
    pub fn resize(&mut self, at: u64, len: u64) -> bool {
        let fits = self.taken.contains_key(&at) && self.behind(at, len).is_some_and(|slots| slots.is_empty());
        if fits {
            self.taken.insert(at, len);
        }
        fits
    }

    pub fn free(&mut self, at: u64) {
        self.taken.remove(&at);
    }
}

/// A free range, and how long the slot before it is.
#[derive(Clone, Copy)]
struct Gap {
    start: u64,
    end: u64,
    before: u64,
}

impl Gap {
    const fn len(&self) -> u64 {
        self.end - self.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_filled() {
        let mut room = RangeAllocator::new(10);
        assert_eq!([4, 4, 4, 2, 1].map(|len| room.take(len, &[])), [Some(6), Some(2), None, Some(0), None]);
        room.free(6);
        assert_eq!([5, 3, 1].map(|len| room.take(len, &[])), [None, Some(7), Some(6)]);
        assert_eq!([3, 4, 5].map(|len| room.would_fit(len, &[2])), [true, true, false]);
        assert_eq!([3, 4, 6, 10].map(|len| room.would_fit(len, &[0, 2])), [true, true, true, false]);
        assert_eq!([8, 10, 11].map(|len| room.would_fit(len, &[0, 2, 6, 7])), [true, true, false]);
        room.free(2);
        room.free(6);
        assert_eq!(room.take(5, &[]), Some(2));
    }

    #[test]
    fn slots_have_room_behind_while_half_of_the_region_is_in_one_piece() {
        let mut room = RangeAllocator::new(64);
        // Each has seven times its length behind it, up to the half.
        assert_eq!([1, 2, 1].map(|len| room.take(len, &[])), [Some(0), Some(8), Some(24)]);
        assert!(room.would_fit(39, &[]));
        // Further ones are in nobody's way as long as there is another place.
        assert_eq!([1, 3].map(|len| room.take(len, &[])), [Some(63), Some(60)]);
        assert_eq!(room.take(35, &[]), Some(25));
        assert_eq!([13, 12, 2].map(|len| room.take(len, &[])), [Some(11), None, Some(6)]);
    }

    #[test]
    fn what_is_kept_counts_as_free_and_stays() {
        let mut room = RangeAllocator::new(64);
        assert_eq!([1, 1, 1].map(|len| room.take(len, &[])), [Some(0), Some(8), Some(16)]);
        room.free(16);
        // The slot at 0 has a kept one behind it, and that has none of its own room.
        assert_eq!(room.take(2, &[8]), Some(9));
        assert_eq!(room.take(2, &[0, 8, 9]), Some(1));
    }

    #[test]
    fn a_slot_grows_into_what_is_free_behind_it() {
        let mut room = RangeAllocator::new(20);
        assert_eq!(room.take(2, &[]), Some(0));
        assert_eq!(room.take(4, &[]), Some(16));
        assert!(room.resize(0, 16) && !room.resize(0, 17));
        assert_eq!(room.behind(0, 17), Some(vec![16]));
        assert_eq!((room.behind(0, 20), room.behind(0, 21), room.behind(16, u64::MAX)), (Some(vec![16]), None, None));
        assert_eq!(room.take(1, &[]), None);
        assert!(room.resize(0, 2) && !room.resize(3, 1));
        assert_eq!(room.take(14, &[]), Some(2));
    }
}
