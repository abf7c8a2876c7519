//! The slots of region 1.

use std::collections::BTreeMap;

/// Ranges of a region, in bytes.
pub struct Room {
    size: u64,
    /// Lengths by offset.
    taken: BTreeMap<u64, u64>,
}

impl Room {
    pub fn new(size: u64) -> Self {
        Self { size, taken: BTreeMap::new() }
    }

    /// The first free range that is long enough.
    pub fn take(&mut self, len: u64) -> Option<u64> {
        let mut at = 0;
        for (&start, &length) in &self.taken {
            if start - at >= len {
                break;
            }
            at = start + length;
        }
        if self.size - at < len {
            return None;
        }
        self.taken.insert(at, len);
        Some(at)
    }

    /// Whether there would be a range that is long enough if those at `free` were free.
    pub fn would_fit(&self, len: u64, free: &[u64]) -> bool {
        let mut end = 0;
        for (start, length) in self.taken.iter().filter(|(start, _)| !free.contains(start)) {
            if start - end >= len {
                return true;
            }
            end = start + length;
        }
        self.size - end >= len
    }

    pub fn free(&mut self, at: u64) {
        self.taken.remove(&at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_filled() {
        let mut room = Room::new(10);
        assert_eq!([4, 4, 4, 2, 1].map(|len| room.take(len)), [Some(0), Some(4), None, Some(8), None]);
        room.free(0);
        assert_eq!([5, 3, 1].map(|len| room.take(len)), [None, Some(0), Some(3)]);
        assert_eq!([3, 4, 5].map(|len| room.would_fit(len, &[4])), [true, true, false]);
        assert_eq!([3, 4, 8, 10].map(|len| room.would_fit(len, &[8, 4])), [true, true, false, false]);
        assert_eq!([8, 10, 11].map(|len| room.would_fit(len, &[0, 4, 8, 3])), [true, true, false]);
        room.free(4);
        room.free(3);
        assert_eq!(room.take(5), Some(3));
    }
}
