//! Counts and times of requests. Each worker counts in a shard of its own, so that no two workers write to one cache
//! line, and none waits for another. Who reads adds the shards up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;

use super::abi::Opcode;

/// Of so many requests with one opcode to one worker, the first is measured. Reading the clock twice takes 100 ns on a
/// virtual machine, and the fastest requests take 1 µs.
const SAMPLE: u64 = 8;

/// Number of latency classes. Class `n` has requests that took up to 2^n µs, the last one all that took longer than
/// 16.8 s.
pub const CLASSES: usize = 26;

const OPCODES: usize = Opcode::ALL.len();

/// What happened to the requests with one opcode.
#[derive(Default)]
#[repr(align(64))]
struct Tally {
    requests: AtomicU64,
    errors: AtomicU64,
    nanos: AtomicU64,
    classes: [AtomicU64; CLASSES],
}

/// Counts, since the daemon's start.
pub(super) struct Shard {
    /// One thread alone writes to it.
    alone: bool,
    tallies: [Tally; OPCODES],
    read: AtomicU64,
    written: AtomicU64,
}

impl Shard {
    fn new(alone: bool) -> Self {
        let tallies = std::array::from_fn(|_| Tally::default());
        Self { alone, tallies, read: AtomicU64::new(0), written: AtomicU64::new(0) }
    }

    fn add(&self, counter: &AtomicU64, n: u64) {
        if self.alone {
            // No other thread writes, so this needs no locked instruction.
            counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
        } else {
            counter.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// A request has come. Returns the time if it is one to measure.
    pub(super) fn begin(&self, opcode: Opcode) -> Option<Instant> {
        let requests = &self.tallies[opcode.index()].requests;
        self.add(requests, 1);
        (requests.load(Ordering::Relaxed) % SAMPLE == 1).then(Instant::now)
    }

    /// A request was answered. `took`: if it was measured. `bytes`: data of a READ or WRITE. `error`: 0 or a negative
    /// errno.
    fn end(&self, opcode: Opcode, took: Option<Duration>, error: i32, bytes: u64) {
        let tally = &self.tallies[opcode.index()];
        if let Some(took) = took {
            let nanos = took.as_nanos() as u64;
            self.add(&tally.nanos, nanos);
            self.add(&tally.classes[class(nanos)], 1);
        }
        if is_failure(opcode, error) {
            self.add(&tally.errors, 1);
        }
        match opcode {
            Opcode::Read if bytes > 0 => self.add(&self.read, bytes),
            Opcode::Write if bytes > 0 => self.add(&self.written, bytes),
            _ => {}
        }
    }
}

/// The latency class of so many nanoseconds.
fn class(nanos: u64) -> usize {
    let micros = nanos.div_ceil(1000);
    (micros.max(1).next_power_of_two().trailing_zeros() as usize).min(CLASSES - 1)
}

/// Whether an answer is a failure. To ask for a name or an attribute that does not exist is none.
fn is_failure(opcode: Opcode, error: i32) -> bool {
    let absent = match opcode {
        Opcode::Lookup => -Errno::NOENT.raw_os_error(),
        Opcode::Getxattr => -Errno::NODATA.raw_os_error(),
        _ => 0,
    };
    error < 0 && error != absent
}

/// The counts of a server.
pub struct Counters {
    /// Of those who serve alone. One that nobody has any more is given to the next.
    shards: Mutex<Vec<Arc<Shard>>>,
    /// Of all other threads.
    shared: Shard,
}

impl Default for Counters {
    fn default() -> Self {
        Self { shards: Mutex::default(), shared: Shard::new(false) }
    }
}

/// What happened to the requests with one opcode.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    /// Requests that came.
    pub requests: u64,
    /// Those that were answered with an errno, but not LOOKUP's ENOENT and GETXATTR's ENODATA.
    pub errors: u64,
    /// How long all that were measured took.
    pub took: Duration,
    /// How many of those that were measured are in each class: up to 2^n µs, and longer than that in the last one.
    pub classes: [u64; CLASSES],
}

impl Counters {
    /// A shard for one thread alone, for as long as it has it.
    pub(super) fn shard(&self) -> Arc<Shard> {
        let mut shards = self.shards.lock();
        if let Some(free) = shards.iter().find(|shard| Arc::strong_count(shard) == 1) {
            return free.clone();
        }
        let shard = Arc::new(Shard::new(true));
        shards.push(shard.clone());
        shard
    }

    /// The shard of threads that have none.
    pub(super) fn shared(&self) -> &Shard {
        &self.shared
    }

    fn sum(&self, counter: impl Fn(&Shard) -> &AtomicU64) -> u64 {
        let shards = self.shards.lock();
        let all = shards.iter().map(|shard| &**shard).chain([&self.shared]);
        all.fold(0, |sum, shard| sum.wrapping_add(counter(shard).load(Ordering::Relaxed)))
    }

    /// The number of requests with this opcode.
    pub fn get(&self, opcode: Opcode) -> u64 {
        self.sum(|shard| &shard.tallies[opcode.index()].requests)
    }

    /// All about the requests with this opcode.
    pub fn of(&self, opcode: Opcode) -> Sum {
        let at = opcode.index();
        Sum {
            requests: self.get(opcode),
            errors: self.sum(|shard| &shard.tallies[at].errors),
            took: Duration::from_nanos(self.sum(|shard| &shard.tallies[at].nanos)),
            classes: std::array::from_fn(|class| self.sum(|shard| &shard.tallies[at].classes[class])),
        }
    }

    /// Bytes that the guest has read by READ.
    pub fn read_bytes(&self) -> u64 {
        self.sum(|shard| &shard.read)
    }

    /// Bytes that the guest has written by WRITE.
    pub fn written_bytes(&self) -> u64 {
        self.sum(|shard| &shard.written)
    }
}

/// Measures a request that its worker answers.
pub(super) struct Meter<'a> {
    pub counters: &'a Arc<Counters>,
    pub shard: &'a Shard,
    pub opcode: Option<Opcode>,
    /// When it began, if it is measured.
    pub since: Option<Instant>,
    /// Data of a READ or WRITE.
    pub bytes: u64,
}

impl Meter<'_> {
    /// The request was answered. `error`: 0 or a negative errno.
    pub fn end(&self, error: i32) {
        if let Some(opcode) = self.opcode {
            self.shard.end(opcode, elapsed(self.since), error, self.bytes);
        }
    }

    /// Measures the request on another thread.
    pub fn detach(&self) -> LateMeter {
        let of = |opcode| Of { counters: self.counters.clone(), opcode, since: self.since };
        LateMeter(self.opcode.map(of))
    }
}

/// Measures a request that another thread answers, or the kernel. The default measures nothing.
#[derive(Default)]
pub struct LateMeter(Option<Of>);

struct Of {
    counters: Arc<Counters>,
    opcode: Opcode,
    since: Option<Instant>,
}

fn elapsed(since: Option<Instant>) -> Option<Duration> {
    since.map(|since| since.elapsed())
}

impl LateMeter {
    /// When the request began, if it is measured.
    pub fn since(&self) -> Option<Instant> {
        self.0.as_ref().and_then(|of| of.since)
    }

    /// The request was answered. `bytes`: data of a READ or WRITE. `error`: 0 or a negative errno.
    pub(super) fn end(&self, error: i32, bytes: u64) {
        if let Some(of) = &self.0 {
            of.counters.shared.end(of.opcode, elapsed(of.since), error, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_end_at_powers_of_two() {
        let micros = |n: u64| class(n * 1000);
        assert_eq!((class(0), class(1), micros(1), class(1001)), (0, 0, 0, 1));
        assert_eq!((micros(2), micros(3), micros(4), micros(5)), (1, 2, 2, 3));
        assert_eq!((micros(1 << 24), micros((1 << 24) + 1), class(u64::MAX)), (24, 25, 25));
    }

    #[test]
    fn the_first_of_some_requests_is_measured() {
        let counters = Counters::default();
        let shard = counters.shard();
        let measured: Vec<_> = (0..2 * SAMPLE).map(|_| shard.begin(Opcode::Open).is_some()).collect();
        assert!(measured.iter().enumerate().all(|(n, measured)| *measured == (n as u64 % SAMPLE == 0)));
        assert!(shard.begin(Opcode::Read).is_some());
    }

    #[test]
    fn shards_are_added_up_and_used_again() {
        let counters = Arc::new(Counters::default());
        let (first, second) = (counters.shard(), counters.shard());
        assert!(!Arc::ptr_eq(&first, &second));
        for shard in [&*first, &*second, counters.shared()] {
            let _ = shard.begin(Opcode::Read);
            shard.end(Opcode::Read, Some(Duration::from_micros(3)), 0, 100);
        }
        let _ = second.begin(Opcode::Lookup);
        second.end(Opcode::Lookup, None, -libc::ENOENT, 0);
        drop(first);
        assert!(!Arc::ptr_eq(&counters.shard(), &second));
        assert_eq!(counters.shards.lock().len(), 2);
        let sum = counters.of(Opcode::Read);
        assert_eq!((sum.requests, sum.errors, sum.took, sum.classes[2]), (3, 0, Duration::from_micros(9), 3));
        assert_eq!((counters.read_bytes(), counters.written_bytes()), (300, 0));
        assert_eq!((counters.get(Opcode::Lookup), counters.of(Opcode::Lookup).errors), (1, 0));
    }

    #[test]
    fn what_does_not_exist_is_no_failure() {
        assert!(!is_failure(Opcode::Lookup, -libc::ENOENT) && is_failure(Opcode::Open, -libc::ENOENT));
        assert!(!is_failure(Opcode::Getxattr, -libc::ENODATA) && !is_failure(Opcode::Getxattr, 0));
        assert!(is_failure(Opcode::Lookup, -libc::EIO));
    }
}
