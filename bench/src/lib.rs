//! A vhost-user frontend that plays the guest without a VM, and the measurements that `thruway-bench` makes with it.

pub mod daemon;
pub mod frontend;
pub mod report;
pub mod series;
mod slots;
mod workload;

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use crate::frontend::{Frontend, Options};
use daemon::{Daemon, Used};
use slots::{Forgets, Slots};
use workload::{Lane, Progress, Share};

pub use workload::{NAMES, bytes, is_workload};

/// The error is one line for the user.
pub type Result<T> = std::result::Result<T, String>;

/// FUSE_INIT flags of Linux 7.2 on virtio-fs without DAX (fs/fuse/inode.c, fuse_new_init). In the first word: all up to
/// INIT_EXT, except FILE_OPS and MAP_ALIGNMENT. In the second: SECURITY_CTX, CREATE_SUPP_GROUP, HAS_EXPIRE_ONLY,
/// DIRECT_IO_ALLOW_MMAP, PASSTHROUGH, NO_EXPORT_SUPPORT, HAS_RESEND, ALLOW_IDMAP and REQUEST_TIMEOUT.
const LINUX_FLAGS: u64 = 0x7fff_ffff & !(1 << 2 | 1 << 26)
    | 1 << 32
    | 1 << 34
    | 1 << 35
    | 1 << 36
    | 1 << 37
    | 1 << 38
    | 1 << 39
    | 1 << 40
    | 1 << 42;

/// Descriptors per queue: QEMU's maximum, with which a request carries 1 MiB in pages.
const QUEUE_SIZE: u16 = 1024;

/// Memory of a queue besides its slots, in bytes: for the rings, and for requests of 1 MiB that prepare a workload.
const SLACK: usize = 8 << 20;

/// How to measure.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Request queues, each with its own thread.
    pub queues: usize,
    /// Operations in flight on each queue.
    pub depth: usize,
    /// How long after an operation of a queue the next one is due. `None`: at once. Only with a depth of 1.
    pub every: Option<Duration>,
    pub warm_up: Duration,
    pub time: Duration,
}

/// The figures of one workload.
pub struct Measured {
    pub seconds: f64,
    /// Operations, or entries if the workload lists directories.
    pub ops: u64,
    pub requests: u64,
    pub bytes: u64,
    /// Time of an operation, in ns.
    pub latency: Histogram<u64>,
    /// The daemon's CPU time and context switches. `None` if its process is not known.
    pub usage: Option<Used>,
}

impl Measured {
    fn new() -> Self {
        // Times up to a minute, with three digits.
        let latency =
            Histogram::new_with_bounds(1, 60_000_000_000, 3).unwrap_or_else(|_| unreachable!("the bounds are good"));
        Self { seconds: 0.0, ops: 0, requests: 0, bytes: 0, latency, usage: None }
    }

    /// Takes in what was measured at the same time.
    fn add(&mut self, other: &Self) {
        self.seconds = self.seconds.max(other.seconds);
        self.ops += other.ops;
        self.requests += other.requests;
        self.bytes += other.bytes;
        let _ = self.latency.add(&other.latency);
        self.usage = self.usage.zip(other.usage).map(|(usage, more)| usage + more);
    }
}

/// Measures a workload with all these daemons at a time. The figures are of all together.
///
/// # Errors
/// The first of those of [`Session::measure`].
pub fn measure(sessions: &mut [Session], name: &str, plan: &Plan) -> Result<Measured> {
    let ready = Barrier::new(sessions.len());
    let measured = std::thread::scope(|scope| {
        let run = |session| scope.spawn(|| Session::measure_when(session, name, plan, &ready));
        let all: Vec<_> = sessions.iter_mut().map(run).collect();
        let join =
            |one: std::thread::ScopedJoinHandle<_>| one.join().unwrap_or_else(|_| Err("a guest panicked".into()));
        all.into_iter().map(join).collect::<Result<Vec<Measured>>>()
    })?;
    let sum = measured.into_iter().reduce(|mut sum, one| {
        sum.add(&one);
        sum
    });
    sum.ok_or_else(|| "there is no daemon to measure".into())
}

/// A daemon with its share, and the guest that it serves.
pub struct Session {
    frontend: Frontend,
    share: Share,
    slots: Vec<Slots>,
    forgets: Forgets,
    daemon: Daemon,
}

impl Session {
    /// Connects to a daemon, opens a FUSE session as Linux does, and prepares for up to `depth` operations in flight.
    /// The guest's CPUs poll for `halt_poll` before they sleep.
    ///
    /// # Errors
    /// One line that says what failed.
    pub fn open(daemon: Daemon, queues: usize, depth: usize, halt_poll: Duration) -> Result<Self> {
        let share = (depth * slots::SLOT_SIZE + SLACK).next_multiple_of(2 << 20);
        let options = Options {
            queues: queues + 1,
            queue_size: QUEUE_SIZE,
            mem_size: share * (queues + 1),
            halt_poll,
            ..Options::default()
        };
        let failed = |e| format!("{}: cannot connect: {e}", daemon.socket().display());
        let frontend = Frontend::connect(daemon.socket(), options).map_err(failed)?;
        frontend.fuse_init(LINUX_FLAGS).map_err(|errno| format!("INIT failed: {}", errno_text(errno)))?;
        let open = |e| format!("cannot lay out guest memory: {e}");
        let slots = (1..=queues)
            .map(|queue| Slots::new(&frontend, queue, depth))
            .collect::<std::io::Result<_>>()
            .map_err(open)?;
        let forgets = Forgets::new(&frontend).map_err(open)?;
        let share = Share::make(&frontend)?;
        Ok(Self { frontend, share, slots, forgets, daemon })
    }

    /// Measures the workload of this name, one of [`NAMES`] or an I/O pattern.
    ///
    /// # Errors
    /// A request failed, or the daemon has ended.
    pub fn measure(&mut self, name: &str, plan: &Plan) -> Result<Measured> {
        self.measure_when(name, plan, &Barrier::new(1))
    }

    /// Measures when the files of all are there: to make them takes a CPU.
    fn measure_when(&mut self, name: &str, plan: &Plan, ready: &Barrier) -> Result<Measured> {
        let (frontend, forgets) = (&self.frontend, &self.forgets);
        let lanes = workload::lanes(name, frontend, forgets, &mut self.share, plan.queues * plan.depth);
        ready.wait();
        let mut lanes = lanes?;
        let (phase, counted) = (AtomicU8::new(WARM_UP), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let mut workers = Vec::new();
            for slots in self.slots.iter_mut().take(plan.queues) {
                let mine: Vec<_> = lanes.drain(..plan.depth).collect();
                let (phase, counted) = (&phase, &counted);
                workers.push(scope.spawn(move || {
                    drive(frontend, slots, forgets, mine, plan.every, (phase, counted))
                        .inspect_err(|_| phase.store(OVER, Ordering::Relaxed))
                }));
            }
            wait(&phase, plan.warm_up);
            let (before, start) = (self.daemon.usage(), Instant::now());
            let _ = phase.compare_exchange(WARM_UP, MEASURE, Ordering::Relaxed, Ordering::Relaxed);
            wait(&phase, plan.time);
            // Count at least one operation: on a busy machine the first may take longer than the whole measurement.
            while !counted.load(Ordering::Relaxed) && phase.load(Ordering::Relaxed) != OVER {
                std::thread::sleep(Duration::from_millis(1));
            }
            phase.store(OVER, Ordering::Relaxed);
            let (after, seconds) = (self.daemon.usage(), start.elapsed().as_secs_f64());
            let mut all = Measured::new();
            for worker in workers {
                all.add(&worker.join().unwrap_or_else(|_| Err("a worker panicked".into()))?);
            }
            let usage = after.zip(before).map(|(after, before)| after.since(&before));
            Ok(Measured { seconds, usage, ..all })
        })
    }

    /// Removes the files that were made in the share.
    pub fn close(mut self) -> Result<()> {
        self.share.remove(&self.frontend)
    }
}

/// The phases of a run: operations are not counted, are counted, or no more are started.
const WARM_UP: u8 = 0;
const MEASURE: u8 = 1;
const OVER: u8 = 2;

/// Sleeps for `time`, or until a worker has failed.
fn wait(phase: &AtomicU8, time: Duration) {
    let end = Instant::now() + time;
    while phase.load(Ordering::Relaxed) != OVER {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(Duration::from_millis(50)));
    }
}

/// Sleeps until then, or until the run is over. Returns when an operation that is due then begins: what is late counts
/// from when it was due.
fn sleep_until(due: Instant, phase: &AtomicU8) -> Instant {
    let left = due.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return due;
    }
    wait(phase, left);
    Instant::now()
}

/// Runs the lanes' operations on one queue until the run is over and the last ones are complete.
fn drive(
    frontend: &Frontend,
    slots: &mut Slots,
    forgets: &Forgets,
    mut lanes: Vec<Lane>,
    every: Option<Duration>,
    (phase, counted): (&AtomicU8, &AtomicBool),
) -> Result<Measured> {
    let lost = |e: std::io::Error| format!("the daemon does not answer: {e}");
    let (mut tally, mut forgotten, mut seen) = (Measured::new(), Vec::new(), WARM_UP);
    for (at, lane) in lanes.iter_mut().enumerate() {
        lane.started = Instant::now();
        slots.submit(frontend, at, |ask| lane.script.next(ask)).map_err(lost)?;
    }
    slots.publish(frontend).map_err(lost)?;
    let mut busy = lanes.len();
    while busy > 0 {
        let mut next = Some(slots.wait(frontend).map_err(lost)?);
        while let Some((at, len)) = next {
            let now = phase.load(Ordering::Relaxed);
            if now != seen && seen == WARM_UP {
                tally = Measured::new();
            }
            seen = now;
            let lane = &mut lanes[at];
            let reply = slots.reply(frontend, at, len).map_err(|e| format!("{}: {e}", lane.name))?;
            tally.requests += 1;
            let progress = lane.script.done(&reply, &mut forgotten).map_err(|e| format!("{}: {e}", lane.name))?;
            let mut go_on = true;
            if let Progress::Done { units, bytes } = progress {
                if lane.counts && seen != OVER {
                    if tally.ops == 0 && seen == MEASURE {
                        counted.store(true, Ordering::Relaxed);
                    }
                    tally.ops += units;
                    tally.bytes += bytes;
                    let ns = lane.started.elapsed().as_nanos() as u64;
                    tally.latency.saturating_record(ns.max(1));
                }
                lane.started = match every {
                    Some(every) => sleep_until(lane.started + every, phase),
                    None => Instant::now(),
                };
                go_on = phase.load(Ordering::Relaxed) != OVER || !lane.script.is_at_rest();
            }
            if go_on {
                slots.submit(frontend, at, |ask| lane.script.next(ask)).map_err(lost)?;
            } else {
                busy -= 1;
            }
            next = slots.poll(frontend).map_err(lost)?;
        }
        slots.publish(frontend).map_err(lost)?;
        if forgotten.len() >= slots::FORGETS {
            forgets.send(frontend, &mut forgotten).map_err(lost)?;
        }
    }
    forgets.send(frontend, &mut forgotten).map_err(lost)?;
    Ok(tally)
}

fn errno_text(errno: i32) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_late_counts_from_when_it_was_due() {
        let due = Instant::now().checked_sub(Duration::from_millis(1)).unwrap();
        assert_eq!(sleep_until(due, &AtomicU8::new(MEASURE)), due);
        // The end of the run ends the sleep.
        let due = Instant::now() + Duration::from_secs(3600);
        assert!(sleep_until(due, &AtomicU8::new(OVER)) < due);
    }
}
