//! Whether the guest may keep its pages of a file when it opens the file again (`--cache=auto`).
//!
//! An open without FOPEN_KEEP_CACHE makes the guest drop its pages of the file. Close-to-open coherence needs that only
//! if the file has changed since the guest last dropped them. A build opens each header many times.
//!
//! **The rule.** The daemon keeps one [`CacheValidator`] for each file: what statx(2) said at the last open that made
//! the guest drop its pages. An open keeps the pages if statx(2) says the same now, and the guest has seen to that
//! drop. Everything that the guest has in its pages was then read after that drop, and the file has not changed since.
//!
//! A validator must tell of every change that comes after it. So there is one only if all of this is true:
//!
//! 1. The file system moves the change time at each change, to the kernel's clock (`HostFs::ctime_reliable`).
//! 2. The change time is older than the clock's tick, read before the validator. A change within the same tick could
//!    leave the same time.
//! 3. The change time has a fraction of a second. Some file systems keep whole seconds.
//! 4. Nobody had the file open for writing after that tick began. A long write(2) sets the time before it copies the
//!    data. A store through a mapping sets it only at a page's first store after the page was written back. The
//!    daemon's own handles and windows count, and so do those of other daemons. A lease tells (`sys::unwritten`).
//!
//! Who changes the file later must open it after the tick. So the change moves the time to that tick or a later one.
//! Neither utimensat(2) nor anything else sets a change time back, except for a host's clock that is set back.
//!
//! The guest's own writes are changes too. Its next open drops the pages, and the open after that keeps them.
//!
//! **Replies under way.** The reply that makes the guest drop its pages may be overtaken by another that lets it keep
//! them. So a validator counts only once the guest has read by the open that dropped: it sends no READ before the drop.

use parking_lot::Mutex;
use rustix::fs::{Statx, Timespec};

/// The longest tick of the clock that file systems take their times from: HZ is 100 at least.
const TICK: i64 = 10_000_000;

/// Nanoseconds in a second.
const SECOND: i64 = 1_000_000_000;

/// What statx(2) says of the contents of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheValidator {
    changed_sec: i64,
    modified_sec: i64,
    changed_nsec: u32,
    modified_nsec: u32,
    size: u64,
}

impl CacheValidator {
    pub fn of(st: &Statx) -> Self {
        Self {
            changed_sec: st.stx_ctime.tv_sec,
            modified_sec: st.stx_mtime.tv_sec,
            changed_nsec: st.stx_ctime.tv_nsec,
            modified_nsec: st.stx_mtime.tv_nsec,
            size: st.stx_size,
        }
    }

    /// Whether a change at `clock` or later makes another validator (2 and 3 of the rule).
    fn is_older(&self, clock: Timespec) -> bool {
        let nsec = i64::from(self.changed_nsec) + TICK;
        let settled = (self.changed_sec.saturating_add(nsec / SECOND), nsec % SECOND);
        self.changed_nsec != 0 && settled < (clock.tv_sec, clock.tv_nsec)
    }
}

/// What an open does to the guest's pages of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// They stay.
    Keep,
    /// They are dropped. The first READ of this open calls [`Contents::dropped`] with the number, unless it is 0.
    Drop(u32),
}

/// What the daemon knows of the pages that a guest has of a file.
#[derive(Debug, Default)]
pub struct Contents(Mutex<Known>);

#[derive(Clone, Copy, Debug, Default)]
struct Known {
    validator: Option<CacheValidator>,
    /// Number of the validator.
    number: u32,
    /// The guest has dropped what it had before the validator.
    dropped: bool,
}

impl Contents {
    /// Decides at an open. `look`: what statx(2) says now. `unwritten`: whether nobody has the file open for writing;
    /// only an open for reading can tell. No lock is held meanwhile.
    pub fn opened(
        &self,
        clock: impl FnOnce() -> Timespec,
        look: impl Fn() -> Option<CacheValidator>,
        unwritten: Option<impl FnOnce() -> bool>,
    ) -> Pages {
        let known = *self.0.lock();
        if let Some(validator) = known.validator {
            if look() == Some(validator) {
                return if known.dropped { Pages::Keep } else { Pages::Drop(known.number) };
            }
        }
        // In this order: who opens the file for writing after `unwritten` sets times of this clock or later.
        let validator = unwritten.and_then(|unwritten| {
            let clock = clock();
            if unwritten() { look().filter(|validator| validator.is_older(clock)) } else { None }
        });
        let mut known = self.0.lock();
        // 0 is the number of no validator.
        let number = known.number.wrapping_add(1).max(1);
        *known = Known { validator, number, dropped: false };
        Pages::Drop(if validator.is_some() { number } else { 0 })
    }

    /// Whether there is a validator to compare with.
    pub fn is_known(&self) -> bool {
        self.0.lock().validator.is_some()
    }

    /// The guest has dropped the pages that it had before the validator with this number.
    pub fn dropped(&self, number: u32) {
        let mut known = self.0.lock();
        known.dropped |= known.number == number;
    }

    /// Forgets a validator that is no longer true.
    pub fn saw(&self, validator: &CacheValidator) {
        let mut known = self.0.lock();
        if known.validator.is_some_and(|known| known != *validator) {
            known.validator = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(tv_sec: i64, tv_nsec: i64) -> Timespec {
        Timespec { tv_sec, tv_nsec }
    }

    /// A file that was changed at `sec` and `nsec`.
    fn validator(sec: i64, nsec: u32) -> CacheValidator {
        CacheValidator { changed_sec: sec, changed_nsec: nsec, size: 5, ..CacheValidator::default() }
    }

    const OLD: CacheValidator =
        CacheValidator { changed_sec: 50, modified_sec: 50, changed_nsec: 1, modified_nsec: 1, size: 5 };
    const NOW: Timespec = at(100, 0);

    impl Contents {
        fn open(&self, clock: Timespec, validator: CacheValidator, unwritten: bool) -> Pages {
            self.opened(|| clock, || Some(validator), Some(|| unwritten))
        }

        fn open_to_write(&self, validator: CacheValidator) -> Pages {
            self.opened(|| NOW, || Some(validator), None::<fn() -> bool>)
        }

        /// Opens and reads. Whether the guest has kept its pages.
        fn keeps(&self, clock: Timespec, validator: CacheValidator, unwritten: bool) -> bool {
            match self.open(clock, validator, unwritten) {
                Pages::Keep => true,
                Pages::Drop(number) => {
                    self.dropped(number);
                    false
                }
            }
        }
    }

    #[test]
    fn the_second_open_of_an_unchanged_file_keeps() {
        let contents = Contents::default();
        assert!(!contents.keeps(NOW, OLD, true));
        for _ in 0..3 {
            assert!(contents.keeps(NOW, OLD, true));
        }
        // Whoever has it open to write has opened it since, and would have changed the time.
        assert!(contents.keeps(NOW, OLD, false));
        assert_eq!(contents.open_to_write(OLD), Pages::Keep);
    }

    #[test]
    fn each_part_of_the_stamp_tells() {
        for changed in [
            CacheValidator { size: 6, ..OLD },
            CacheValidator { changed_sec: 51, ..OLD },
            CacheValidator { changed_nsec: 2, ..OLD },
            CacheValidator { modified_sec: 49, ..OLD },
            CacheValidator { modified_nsec: 2, ..OLD },
        ] {
            let contents = Contents::default();
            assert!(!contents.keeps(NOW, OLD, true));
            assert!(!contents.keeps(NOW, changed, true), "{changed:?}");
            assert!(contents.keeps(NOW, changed, true), "{changed:?}");
        }
    }

    #[test]
    fn a_time_within_a_tick_of_the_clock_is_no_stamp() {
        let tick = TICK as u32;
        for (changed, clock, tells) in [
            (validator(100, 1), at(100, 1), false),
            (validator(100, 1), at(100, 2), false),
            (validator(100, 1), at(100, TICK + 1), false),
            (validator(100, 1), at(100, TICK + 2), true),
            (validator(99, 999_999_999), at(100, TICK - 1), false),
            (validator(99, 999_999_999), at(100, TICK), true),
            (validator(100, tick), at(99, 0), false),
            (validator(i64::MAX, 999_999_999), NOW, false),
            (validator(i64::MIN, 1), NOW, true),
            // Whole seconds.
            (validator(10, 0), NOW, false),
        ] {
            let contents = Contents::default();
            assert!(!contents.keeps(clock, changed, true));
            assert_eq!(contents.keeps(clock, changed, true), tells, "{changed:?} at {clock:?}");
        }
    }

    #[test]
    fn a_writer_makes_no_stamp() {
        let contents = Contents::default();
        assert!(!contents.keeps(NOW, OLD, false));
        assert!(!contents.keeps(NOW, OLD, false));
        assert_eq!(contents.open_to_write(OLD), Pages::Drop(0));
        assert!(!contents.is_known());
        // The writer is gone. What it has stored since the last open is not in the times.
        assert!(!contents.keeps(NOW, OLD, true));
        assert!(contents.keeps(NOW, OLD, true));
    }

    #[test]
    fn the_clock_is_read_before_the_lease_and_the_lease_before_the_stamp() {
        let steps = std::cell::RefCell::new(Vec::new());
        let step = |name| steps.borrow_mut().push(name);
        let (clock, look) = (|| (step("clock"), NOW).1, || (step("validator"), Some(OLD)).1);
        Contents::default().opened(clock, look, Some(|| (step("lease"), true).1));
        assert_eq!(steps.into_inner(), ["clock", "lease", "validator"]);
    }

    #[test]
    fn a_stamp_counts_once_the_guest_has_dropped() {
        let contents = Contents::default();
        let Pages::Drop(first) = contents.open(NOW, OLD, true) else { panic!("nothing was known") };
        // This reply could overtake the first.
        assert_eq!(contents.open(NOW, OLD, true), Pages::Drop(first));
        let Pages::Drop(second) = contents.open(NOW, validator(60, 1), true) else { panic!("it has changed") };
        assert_ne!(first, second);
        contents.dropped(first);
        assert_eq!(contents.open(NOW, validator(60, 1), true), Pages::Drop(second));
        contents.dropped(second);
        assert_eq!(contents.open(NOW, validator(60, 1), true), Pages::Keep);
    }

    #[test]
    fn what_other_requests_see_ends_a_stamp() {
        let contents = Contents::default();
        assert!(!contents.keeps(NOW, OLD, true));
        contents.saw(&OLD);
        assert!(contents.is_known());
        contents.saw(&CacheValidator { size: 6, ..OLD });
        assert!(!contents.is_known());
        // Even if it looks the same again.
        assert!(!contents.keeps(NOW, OLD, true));
    }

    #[test]
    fn a_file_that_cannot_be_looked_at_is_dropped() {
        let contents = Contents::default();
        let open = || contents.opened(|| NOW, || None, Some(|| true));
        assert_eq!((open(), open()), (Pages::Drop(0), Pages::Drop(0)));
    }
}
