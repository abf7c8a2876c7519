//! Who serves a queue: the thread that has the seat at its ring. If one of its requests takes long, a deputy takes the
//! seat, with the chains that were taken and not begun. So what holds up one request does not hold up the queue.

use super::chain::Used;
use super::scratch::{BATCH, Scratch};

/// One stay at a ring. 0 is nobody's.
pub type Turn = u64;

/// Locked for moments, and never while a request is served. `B` keeps the ring from being stopped.
pub struct Seat<B> {
    /// Whose turn it is. 0: the seat is free.
    turn: Turn,
    turns: Turn,
    /// It is the queue's own worker's.
    own: bool,
    /// A request is served. Only then another thread may take the seat.
    serves: bool,
    /// Requests that were begun.
    begun: u64,
    /// Chains that were taken and not begun. There are none while the seat is free.
    pub heads: Vec<u16>,
    /// Chains to give back.
    pub used: Vec<Used>,
    /// What the next turn begins with.
    pub scratch: Option<Box<Scratch>>,
    /// Turns that were taken over in the middle of a request. The ring cannot be stopped before it has ended.
    away: Vec<(Turn, B)>,
    /// The queue's own worker is among them.
    pub own_away: bool,
}

/// A seat at one moment. If nothing has changed at a second look, its request takes long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Glance {
    turn: Turn,
    begun: u64,
    /// A request is served.
    pub serves: bool,
}

impl<B> Default for Seat<B> {
    fn default() -> Self {
        Self {
            turn: 0,
            turns: 0,
            own: false,
            serves: false,
            begun: 0,
            heads: Vec::with_capacity(BATCH),
            used: Vec::with_capacity(BATCH),
            scratch: None,
            away: Vec::new(),
            own_away: false,
        }
    }
}

impl<B> Seat<B> {
    /// Whether nobody has it.
    pub fn is_free(&self) -> bool {
        self.turn == 0
    }

    /// Takes the free seat. `own`: for the queue's own worker.
    pub fn take(&mut self, own: bool) -> Turn {
        self.turns += 1;
        (self.turn, self.own) = (self.turns, own);
        self.turn
    }

    /// Leaves it.
    pub fn leave(&mut self, scratch: Box<Scratch>) {
        self.turn = 0;
        self.scratch.get_or_insert(scratch);
    }

    /// Begins the next chain that was taken.
    pub fn begin(&mut self) -> Option<u16> {
        let head = (!self.heads.is_empty()).then(|| self.heads.remove(0))?;
        self.serves = true;
        self.begun += 1;
        Some(head)
    }

    /// The request has ended. If the seat was taken over meanwhile: what kept the ring from being stopped.
    pub fn end(&mut self, turn: Turn) -> Option<B> {
        if self.turn == turn {
            self.serves = false;
            return None;
        }
        let at = self.away.iter().position(|(away, _)| *away == turn)?;
        Some(self.away.swap_remove(at).1)
    }

    /// How it is now.
    pub fn glance(&self) -> Glance {
        Glance { turn: self.turn, begun: self.begun, serves: self.serves && self.turn != 0 }
    }

    /// Takes the seat over from a turn whose request still is the one of this glance. `busy` keeps the ring from being
    /// stopped.
    pub fn take_over(&mut self, glance: Glance, busy: impl FnOnce() -> B) -> Option<Turn> {
        if !glance.serves || self.glance() != glance {
            return None;
        }
        self.away.push((self.turn, busy()));
        self.own_away |= self.own;
        self.serves = false;
        Some(self.take(false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seat_is_taken_over_in_the_middle_of_a_request_alone() {
        let mut seat = Seat::default();
        let own = seat.take(true);
        seat.heads = vec![5, 6];
        assert_eq!(seat.take_over(seat.glance(), || 'a'), None);
        assert_eq!(seat.begin(), Some(5));
        let long = seat.glance();
        let deputy = seat.take_over(long, || 'a').unwrap();
        assert!(seat.own_away && seat.take_over(long, || 'b').is_none());
        // It goes on with what was taken.
        assert_eq!((seat.begin(), seat.begin(), seat.end(deputy)), (Some(6), None, None));
        // The next request is another one.
        seat.heads = vec![7, 8];
        seat.begin();
        let before = seat.glance();
        assert_eq!((seat.end(deputy), seat.begin()), (None, Some(8)));
        assert_eq!(seat.take_over(before, || 'b'), None);
        // Each gets back what is its own.
        assert_eq!((seat.end(own), seat.end(own), seat.end(deputy)), (Some('a'), None, None));
    }
}
