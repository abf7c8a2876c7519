//! Limits of one guest's requests and bytes (`--limit-iops`, `--limit-bandwidth`), as token buckets.
//!
//! A request takes from up to four buckets: that of all requests and that of its [`Kind`], each for requests and for
//! bytes. It begins when none of them owes anything, and may leave a debt. So a request of any size begins at some
//! time, and over time the rates hold. What has to wait is served anew later, by nobody's worker: the queue goes on.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::transport::{Release, Serve};
use crate::size::parse_size;

/// What a request is, to its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// READ.
    Read,
    /// WRITE and COPY_FILE_RANGE.
    Write,
    /// All others that ask the host for something.
    Metadata,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Metadata];

    /// Its name, as limits have it.
    pub fn name(self) -> &'static str {
        ["read", "write", "metadata"][self as usize]
    }
}

/// Longest burst in seconds. A guest that was idle for an hour may do that hour's work at once.
const LONGEST_BURST: u32 = 3600;

/// How much a guest may do in a second. The default limits nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rates {
    /// All kinds together. 0: no limit.
    pub total: u64,
    /// By kind. 0: no limit.
    pub kinds: [u64; Kind::ALL.len()],
    /// What an idle guest saves up, in seconds of the rate. 1 to 3600.
    pub burst: u32,
}

impl Default for Rates {
    fn default() -> Self {
        Self { total: 0, kinds: [0; Kind::ALL.len()], burst: 1 }
    }
}

impl Rates {
    /// Limits of requests: `N,read=N,write=N,metadata=N,burst=SECONDS`, in which each part may be missing.
    ///
    /// # Errors
    /// What is wrong, in one line.
    pub fn iops(text: &str) -> Result<Self, String> {
        Self::parse(text, |n| n.parse().map_err(|_| format!("'{n}' is not a number of requests in a second")))
    }

    /// Limits of bytes: as [`iops`](Self::iops), with sizes and without metadata.
    ///
    /// # Errors
    /// What is wrong, in one line.
    pub fn bandwidth(text: &str) -> Result<Self, String> {
        let rates = Self::parse(text, parse_size)?;
        match rates.kinds[Kind::Metadata as usize] {
            0 => Ok(rates),
            _ => Err("metadata has no bytes: limit its requests".into()),
        }
    }

    fn parse(text: &str, number: impl Fn(&str) -> Result<u64, String>) -> Result<Self, String> {
        let mut rates = Self::default();
        let rate = |text: &str| match number(text)? {
            0 => Err("a limit of 0 would stop the guest: leave it out for no limit".to_owned()),
            n => Ok(n),
        };
        for part in text.split(',').filter(|_| !text.is_empty()) {
            let Some((name, value)) = part.split_once('=') else {
                rates.total = rate(part)?;
                continue;
            };
            if let Some(kind) = Kind::ALL.into_iter().find(|kind| kind.name() == name) {
                rates.kinds[kind as usize] = rate(value)?;
                continue;
            }
            if name != "burst" {
                return Err(format!("'{name}' is not read, write, metadata or burst"));
            }
            let burst = value.parse().ok().filter(|burst| (1..=LONGEST_BURST).contains(burst));
            rates.burst = burst.ok_or_else(|| format!("burst is 1 to {LONGEST_BURST} seconds, not '{value}'"))?;
        }
        Ok(rates)
    }

    fn is_none(&self) -> bool {
        self.total == 0 && self.kinds == [0; Kind::ALL.len()]
    }
}

/// In the form that [`Rates::iops`] takes. Empty if there is no limit.
impl fmt::Display for Rates {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if self.is_none() {
            return Ok(());
        }
        if self.total > 0 {
            write!(f, "{},", self.total)?;
        }
        for kind in Kind::ALL {
            match self.kinds[kind as usize] {
                0 => {}
                rate => write!(f, "{}={rate},", kind.name())?,
            }
        }
        write!(f, "burst={}", self.burst)
    }
}

/// One bucket.
#[derive(Clone, Copy)]
struct Bucket {
    /// In a second. 0: it has no limit.
    rate: u64,
    /// What it holds when it is full.
    most: f64,
    /// What may be taken at once. Below 0: a debt.
    level: f64,
}

impl Bucket {
    fn new(rate: u64, burst: u32) -> Self {
        let most = rate as f64 * f64::from(burst);
        Self { rate, most, level: most }
    }

    fn fill(&mut self, time: Duration) {
        self.level = (self.level + self.rate as f64 * time.as_secs_f64()).min(self.most);
    }

    /// How long it owes something.
    fn owes(&self) -> Duration {
        if self.rate == 0 || self.level >= 0.0 {
            return Duration::ZERO;
        }
        // At least the clock's step, so that nobody waits for nothing again and again.
        Duration::try_from_secs_f64(-self.level / self.rate as f64).unwrap_or(Duration::MAX).max(STEP)
    }

    fn take(&mut self, n: u64) {
        if self.rate > 0 {
            self.level -= n as f64;
        }
    }
}

/// Shortest wait. A request that is late by it is not noticed.
const STEP: Duration = Duration::from_micros(50);

/// How long the thread that ends waits stays when nobody waits. A guest at its limit has it all the time.
const STAY: Duration = Duration::from_secs(1);

/// The buckets of requests or of bytes.
#[derive(Clone, Copy)]
struct Buckets {
    total: Bucket,
    kinds: [Bucket; Kind::ALL.len()],
}

impl Buckets {
    fn new(rates: &Rates) -> Self {
        let bucket = |rate| Bucket::new(rate, rates.burst);
        Self { total: bucket(rates.total), kinds: rates.kinds.map(bucket) }
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Bucket> {
        [&mut self.total].into_iter().chain(&mut self.kinds)
    }

    fn take(&mut self, kind: Kind, n: u64) {
        self.total.take(n);
        self.kinds[kind as usize].take(n);
    }
}

struct Waiting {
    bytes: u64,
    /// Its place among all that wait.
    number: u64,
    serve: Serve,
}

struct State {
    rates: [Rates; 2],
    requests: Buckets,
    bytes: Buckets,
    /// When the buckets were filled last.
    filled: Instant,
    /// By kind.
    waiting: [VecDeque<Waiting>; Kind::ALL.len()],
    /// How many have waited so far, by kind.
    waited: [u64; Kind::ALL.len()],
    number: u64,
    /// There is a thread that ends waits.
    runs: bool,
}

/// The limits of one guest.
pub struct Throttle {
    /// There are limits. It spares a look at the state.
    on: AtomicBool,
    /// Nothing is served while it is locked.
    state: Mutex<State>,
    /// Something waits, or the limits have changed.
    changed: Condvar,
    clock: Box<dyn Fn() -> Instant + Send + Sync>,
}

/// What has waited for its limit, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// Requests that wait now.
    pub now: [u64; Kind::ALL.len()],
    /// Requests that have waited so far.
    pub so_far: [u64; Kind::ALL.len()],
}

impl Throttle {
    /// Without limits.
    pub fn new() -> Arc<Self> {
        Self::with_clock(Box::new(Instant::now))
    }

    fn with_clock(clock: Box<dyn Fn() -> Instant + Send + Sync>) -> Arc<Self> {
        let none = Rates::default();
        let state = State {
            rates: [none; 2],
            requests: Buckets::new(&none),
            bytes: Buckets::new(&none),
            filled: clock(),
            waiting: Default::default(),
            waited: Default::default(),
            number: 0,
            runs: false,
        };
        Arc::new(Self { on: AtomicBool::new(false), state: Mutex::new(state), changed: Condvar::new(), clock })
    }

    /// Whether there are limits.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// The limits of requests and of bytes.
    pub fn rates(&self) -> [Rates; 2] {
        self.state.lock().rates
    }

    /// Sets other limits. The buckets are full then. `iops`: requests in a second. `bandwidth`: bytes in a second.
    pub fn set(self: &Arc<Self>, iops: Rates, bandwidth: Rates) {
        let mut state = self.state.lock();
        state.rates = [iops, bandwidth];
        (state.requests, state.bytes) = (Buckets::new(&iops), Buckets::new(&bandwidth));
        self.on.store(state.is_on(), Ordering::Relaxed);
        drop(state);
        self.changed.notify_all();
    }

    /// Whether a request may begin. If not, it [waits](Self::wait).
    pub fn admit(&self, kind: Kind, bytes: u64) -> bool {
        let mut state = self.state.lock();
        state.fill((self.clock)());
        // Those who wait come first, unless their own kind holds them back.
        if !state.waiting[kind as usize].is_empty() || state.first().is_some() || !state.owes(kind).is_zero() {
            return false;
        }
        state.take(kind, bytes);
        true
    }

    /// A request has turned out to be of so many more bytes.
    pub fn charge(&self, kind: Kind, bytes: u64) {
        if self.is_on() {
            let mut state = self.state.lock();
            state.fill((self.clock)());
            state.bytes.take(kind, bytes);
        }
    }

    /// Has a request served when it may begin.
    pub fn wait(self: &Arc<Self>, kind: Kind, bytes: u64, serve: Serve) {
        let mut state = self.state.lock();
        state.number += 1;
        let number = state.number;
        state.waiting[kind as usize].push_back(Waiting { bytes, number, serve });
        state.waited[kind as usize] += 1;
        if state.runs {
            drop(state);
            self.changed.notify_all();
            return;
        }
        let throttle = self.clone();
        let thread = thread::Builder::new().name("thruway-limit".into()).stack_size(STACK);
        state.runs = thread.spawn(move || throttle.work()).is_ok();
        if !state.runs {
            drop(state);
            // It is better served than forgotten.
            self.release();
        }
    }

    /// What waits and has waited.
    pub fn waits(&self) -> Waits {
        let state = self.state.lock();
        Waits { now: state.waiting.each_ref().map(|waiting| waiting.len() as u64), so_far: state.waited }
    }

    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            state.fill((self.clock)());
            let ready = state.ready();
            if !ready.is_empty() {
                drop(state);
                ready.into_iter().for_each(|serve| serve());
                state = self.state.lock();
                continue;
            }
            let owed = state.shortest_wait();
            let late = self.changed.wait_for(&mut state, owed.unwrap_or(STAY)).timed_out();
            if late && owed.is_none() && state.shortest_wait().is_none() {
                state.runs = false;
                return;
            }
        }
    }
}

impl Release for Throttle {
    /// Serves all that wait, whatever the limits are: somebody waits for the end of what is in flight.
    fn release(&self) {
        let waiting = std::mem::take(&mut self.state.lock().waiting);
        waiting.into_iter().flatten().for_each(|waiting| (waiting.serve)());
    }
}

/// The stack of the thread that ends waits, in bytes. It hands requests to other threads.
const STACK: usize = 128 << 10;

impl State {
    fn is_on(&self) -> bool {
        self.rates.iter().any(|rates| !rates.is_none())
    }

    fn fill(&mut self, now: Instant) {
        let time = now.saturating_duration_since(self.filled);
        self.requests.all().chain(self.bytes.all()).for_each(|bucket| bucket.fill(time));
        self.filled = now;
    }

    fn take(&mut self, kind: Kind, bytes: u64) {
        self.requests.take(kind, 1);
        self.bytes.take(kind, bytes);
    }

    /// How long this kind's own buckets owe something.
    fn owes_itself(&self, kind: Kind) -> Duration {
        self.requests.kinds[kind as usize].owes().max(self.bytes.kinds[kind as usize].owes())
    }

    fn owes(&self, kind: Kind) -> Duration {
        self.owes_itself(kind).max(self.requests.total.owes()).max(self.bytes.total.owes())
    }

    /// The kind of the first that waits, of those that their own kind does not hold back.
    fn first(&self) -> Option<Kind> {
        let fronts = Kind::ALL.into_iter().filter_map(|kind| Some((self.waiting[kind as usize].front()?.number, kind)));
        let free = fronts.filter(|(_, kind)| self.owes_itself(*kind).is_zero());
        free.min_by_key(|(number, _)| *number).map(|(_, kind)| kind)
    }

    /// Takes those that may begin now.
    fn ready(&mut self) -> Vec<Serve> {
        let mut ready = Vec::new();
        while let Some(kind) = self.first().filter(|kind| self.owes(*kind).is_zero()) {
            let Some(next) = self.waiting[kind as usize].pop_front() else { break };
            self.take(kind, next.bytes);
            ready.push(next.serve);
        }
        ready
    }

    /// Until one that waits may begin. `None`: nobody waits.
    fn shortest_wait(&self) -> Option<Duration> {
        let waits = Kind::ALL.into_iter().filter(|kind| !self.waiting[*kind as usize].is_empty());
        waits.map(|kind| self.owes(kind)).min()
    }
}
