//! A hostile guest beside a good neighbour. While each attack ([`attack`]) runs, another guest with its own daemon, and
//! the host, work on the same share and check every byte.
//!
//! All the while, another process of the host holds the lock of a file that the neighbour has begun to write to.
//!
//! A run fails on a wrong byte, on an error in the neighbour's work, if a daemon ends, or if a daemon holds more
//! memory, descriptors, threads or log than the limits allow. The table at the end also shows the neighbour's p99
//! times, with and without the attack. The test does not judge these: `make neighbours` measures them with the release
//! build.
//!
//! `sched_setaffinity(2)` separates the guests: if there are two CPUs, the neighbour has one to itself.

mod attack;
#[path = "../locked/mod.rs"]
mod locked;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tempfile::TempDir;
use thruway::fuse::abi::*;
use thruway::limits;
use thruway_bench::frontend::{Frontend, Options, Token, Window};
use zerocopy::{FromBytes, IntoBytes};

use attack::{ATTACKS, Hostile};
use locked::Locked;

/// Rounds of the neighbour's work in a test, and in `make neighbours`: enough for a p99 with a few hundred values above
/// it.
const ROUNDS: u64 = 500;
const MEASURED_ROUNDS: u64 = 20_000;

/// Number of files that the neighbour and the host each work on in turn.
const FILES: u64 = 8;
const BLOCK: usize = 4096;

/// How long a daemon may take to start or to end.
const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let rounds = if args.iter().any(|arg| arg == "--measure") { MEASURED_ROUNDS } else { ROUNDS };
    let filter = args.iter().find(|arg| !arg.starts_with('-')).map_or("", String::as_str);
    let alone = run("no attack", |_| thread::sleep(Duration::from_millis(1)), rounds);
    let mut failed = 0;
    println!("{HEADER}");
    println!("{}", alone.row(&alone));
    for (name, attack) in ATTACKS.iter().filter(|(name, _)| name.contains(filter)) {
        let seen = run(name, *attack, rounds);
        println!("{}", seen.row(&alone));
        for complaint in &seen.complaints {
            println!("  FAILED: {complaint}");
        }
        failed += usize::from(!seen.complaints.is_empty());
    }
    println!("{failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

const HEADER: &str = "\
attack                                steps p99 in us: getattr   x    read    x   write    x  rename    x  unlink    \
x   memory  fds  threads log";

/// The result of one attack.
struct Seen {
    name: String,
    steps: u64,
    /// The neighbour's p99 times, in µs, of [`KINDS`].
    times: [u64; KINDS],
    daemon: Use,
    complaints: Vec<String>,
}

impl Seen {
    fn row(&self, alone: &Self) -> String {
        let times = self.times.iter().zip(alone.times);
        let times = times.map(|(now, then)| format!(" {now:7} {:4.1}", *now as f64 / then.max(1) as f64));
        format!(
            "{:36} {:6}           {} {:4} MiB {:5} {:8} {:4} KiB",
            self.name,
            self.steps,
            times.collect::<String>(),
            self.daemon.memory >> 20,
            self.daemon.descriptors,
            self.daemon.threads,
            self.daemon.log >> 10,
        )
    }
}

/// Runs one attack until the neighbour and the host have done their rounds.
fn run(name: &str, attack: fn(&mut Hostile), rounds: u64) -> Seen {
    let dir = tempfile::tempdir().unwrap();
    let share = dir.path().join("share");
    for part in ["", "neighbour", "host", "hostile"] {
        fs::create_dir(share.join(part)).unwrap();
    }
    let cpus = sched_getaffinity(None).unwrap();
    // `None` where userfaultfd(2) is not allowed.
    let holder = Locked::new(&File::create(share.join("neighbour/locked")).unwrap());
    pin(&cpus, 1);
    let mut daemon = Daemon::start(&dir, "hostile");
    pin(&cpus, 0);
    let mut other = Daemon::start(&dir, "neighbour");
    let stop = AtomicBool::new(false);
    let mut complaints = Vec::new();
    let mut steps = 0;
    let neighbour = other.connect();
    let (times, host, most) = thread::scope(|scope| {
        let (stop, share, cpus, watched) = (&stop, &share, &cpus, &daemon);
        let watch = scope.spawn(move || {
            // Counting 16,000 descriptors takes milliseconds. They must not slow the neighbour down.
            pin(cpus, 1);
            let mut most = Use::default();
            while !stop.load(Ordering::Relaxed) {
                most = most.max(watched.usage());
                thread::sleep(Duration::from_millis(5));
            }
            most
        });
        let works = scope.spawn(move || {
            pin(cpus, 0);
            (work(&neighbour.0, rounds), neighbour)
        });
        let host = scope.spawn(move || {
            pin(cpus, 0);
            host_work(&share.join("host"), stop)
        });
        pin(cpus, 1);
        let attacked = catch_unwind(AssertUnwindSafe(|| {
            let mut hostile = Hostile::new(watched.connect(), share.join("hostile"));
            // Take a few steps of each attack even if the neighbour is quick.
            while !works.is_finished() || steps < 3 {
                attack(&mut hostile);
                steps += 1;
            }
        }));
        if attacked.is_err() {
            complaints.push("the attack did not end as it should".to_owned());
        }
        stop.store(true, Ordering::Relaxed);
        let works = works.join().map_err(|_| "the neighbour's work failed".to_owned());
        let host = host.join().unwrap_or_else(|_| Err("the host's work failed".into()));
        (works, host, watch.join().unwrap())
    });
    pin_to(&cpus);
    complaints.extend(host.err());
    let (times, neighbour) = match times {
        Ok((Ok(times), neighbour)) => (times, Some(neighbour)),
        Ok((Err(e), neighbour)) => {
            complaints.push(e);
            (Times::default(), Some(neighbour))
        }
        Err(e) => {
            complaints.push(e);
            (Times::default(), None)
        }
    };
    // Until now, the neighbour's write to the locked file has waited.
    drop(holder);
    let waits = neighbour.as_ref().and_then(|neighbour| Some((neighbour, times.waits?)));
    if waits.is_some_and(|((guest, _), token)| guest.wait_for(1, token, PATIENCE).is_err()) {
        complaints.push("the write to the locked file did not end".into());
    }
    drop(neighbour);
    complaints.extend(daemon.end().err());
    complaints.extend(other.end().err());
    complaints.extend(most.excess());
    Seen { name: name.to_owned(), steps, times: times.of.map(p99), daemon: most, complaints }
}

/// Pins the calling thread and its children to the `n`th of these CPUs, if there is one.
fn pin(cpus: &CpuSet, n: usize) {
    let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| cpus.is_set(*cpu)).collect();
    let mut one = CpuSet::new();
    one.set(all[n % all.len()]);
    pin_to(&one);
}

fn pin_to(cpus: &CpuSet) {
    sched_setaffinity(None, cpus).unwrap();
}

/// A daemon with its default sandbox, or without one if this process may not set it up.
struct Daemon {
    child: Child,
    socket: PathBuf,
    log: PathBuf,
}

impl Daemon {
    fn start(dir: &TempDir, name: &str) -> Self {
        let (socket, log) = (dir.path().join(format!("{name}.socket")), dir.path().join(format!("{name}.log")));
        let sandbox = if rustix::process::geteuid().is_root() { "namespace" } else { "none" };
        let mut command = Command::new(env!("CARGO_BIN_EXE_thruwayd"));
        command.env_remove("RUST_LOG").args(["--sandbox", sandbox, "--posix-lock", "--flock", "--xattr"]);
        command.args(["--num-request-queues", "2"]);
        // Without root the daemon warns and has no window.
        command.args(["--dax-window", "64M", "--passthrough-window", "64M"]);
        command.arg("--shared-dir").arg(dir.path().join("share")).arg("--socket-path").arg(&socket);
        let child = command.stdin(Stdio::null()).stderr(File::create(&log).unwrap()).spawn().unwrap();
        let end = Instant::now() + PATIENCE;
        let daemon = Self { child, socket, log };
        while !fs::read_to_string(&daemon.log).unwrap().contains("Waiting for vhost-user socket connection") {
            assert!(Instant::now() < end, "no daemon: {}", fs::read_to_string(&daemon.log).unwrap());
            thread::sleep(Duration::from_millis(2));
        }
        daemon
    }

    /// Connects a guest. It has shared memory regions if the daemon does.
    fn connect(&self) -> (Frontend, Option<Window>) {
        // 1024 descriptors, as in a real guest. The memory is for the attacks' buffers.
        let options = Options { queues: 3, queue_size: 1024, mem_size: 96 << 20, ..Default::default() };
        let mut frontend = Frontend::connect(&self.socket, options).unwrap();
        let window = frontend.open_window().ok().filter(|window| window.size > 0);
        frontend.fuse_init(u64::MAX).unwrap();
        (frontend, window)
    }

    /// The process that serves the guest.
    fn server(&self) -> u32 {
        let id = self.child.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
        // The other child is the window process.
        children.split_whitespace().last().and_then(|child| child.parse().ok()).unwrap_or(id)
    }

    fn usage(&self) -> Use {
        let process = PathBuf::from(format!("/proc/{}", self.server()));
        let status = fs::read_to_string(process.join("status")).unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
        };
        Use {
            // RssAnon: the guest's memory, which the daemon maps, is not its own.
            memory: field("RssAnon:") << 10,
            threads: field("Threads:"),
            descriptors: fs::read_dir(process.join("fd")).map_or(0, |fds| fds.count() as u64),
            log: fs::metadata(&self.log).map_or(0, |log| log.len()),
        }
    }

    /// Waits for the daemon to end, now that its frontend has gone. Fails if its exit status is not 0.
    fn end(&mut self) -> Result<(), String> {
        let end = Instant::now() + PATIENCE;
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() > end => return Err("a daemon did not end".into()),
                None => thread::sleep(Duration::from_millis(2)),
            }
        };
        if status.success() { Ok(()) } else { Err(format!("a daemon ended with {status}: {}", self.tail())) }
    }

    fn tail(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().rev().take(3).collect::<Vec<_>>().join(" / ")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The resources that a daemon uses.
#[derive(Clone, Copy, Default)]
struct Use {
    /// Bytes.
    memory: u64,
    threads: u64,
    descriptors: u64,
    /// Bytes.
    log: u64,
}

impl Use {
    fn max(self, other: Self) -> Self {
        Self {
            memory: self.memory.max(other.memory),
            threads: self.threads.max(other.threads),
            descriptors: self.descriptors.max(other.descriptors),
            log: self.log.max(other.log),
        }
    }

    /// The resources above their limits.
    fn excess(&self) -> Vec<String> {
        let bounds = [
            ("bytes of memory", self.memory, limits::DAEMON_MEMORY),
            ("threads", self.threads, limits::DAEMON_THREADS),
            ("bytes of log", self.log, LOG),
        ];
        let above = bounds.into_iter().filter(|(_, used, bound)| used > bound);
        above.map(|(what, used, bound)| format!("{used} {what}, more than {bound}")).collect()
    }
}

/// Limit of the log, in bytes, for an attack of a few minutes: each of about 20 places may log [`limits::LOG_BURST`]
/// lines per [`limits::LOG_PERIOD`].
const LOG: u64 = 1 << 20;

/// What is measured: GETATTR, READ and WRITE of 4 KiB, RENAME, UNLINK.
const KINDS: usize = 5;

/// Of the neighbour's work.
#[derive(Default)]
struct Times {
    /// In µs.
    of: [Vec<u64>; KINDS],
    /// The write to the locked file, if it waits.
    waits: Option<Token>,
}

fn p99(mut times: Vec<u64>) -> u64 {
    times.sort_unstable();
    times.get(times.len().saturating_sub(1) * 99 / 100).copied().unwrap_or(0)
}

/// The content of block `n` in a round.
fn pattern(n: u64, round: u64) -> Vec<u8> {
    let word = (n << 32 | round).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    word.repeat(BLOCK / word.len())
}

/// The neighbour's work: it makes, writes, reads, stats and removes files, and checks every byte.
fn work(guest: &Frontend, rounds: u64) -> Result<Times, String> {
    let call = |opcode: Opcode, node, body: &[u8], extra: &[u8], room| {
        guest.request(1, opcode as u32, node, body, extra, room).map_err(|e| format!("the neighbour's {opcode:?}: {e}"))
    };
    let timed = |times: &mut Times, kind: usize, opcode, node, body: &[u8], extra: &[u8], room| {
        let start = Instant::now();
        let reply = call(opcode, node, body, extra, room);
        times.of[kind].push(start.elapsed().as_micros() as u64);
        reply
    };
    let entry = call(Opcode::Lookup, ROOT_ID, b"neighbour\0", &[], size_of::<EntryOut>())?;
    let dir = EntryOut::read_from_bytes(&entry).unwrap().nodeid;
    let mut times = Times { waits: write_to_locked(guest, dir), ..Default::default() };
    let mut files = Vec::new();
    for n in 0..FILES {
        let args = CreateIn { flags: libc::O_RDWR as u32, mode: 0o600, ..Default::default() };
        let body = [args.as_bytes(), format!("file{n}\0").as_bytes()].concat();
        let made = call(Opcode::Create, dir, &body, &[], size_of::<EntryOut>() + size_of::<OpenOut>())?;
        let (entry, rest) = EntryOut::read_from_prefix(&made).unwrap();
        files.push((entry.nodeid, OpenOut::read_from_bytes(rest).unwrap().fh));
    }
    for round in 0..rounds {
        let n = round % FILES;
        let (node, fh) = files[n as usize];
        let data = pattern(n, round);
        let offset = (round / FILES % 16) * BLOCK as u64;
        let write = WriteIn { fh, offset, size: BLOCK as u32, ..Default::default() };
        timed(&mut times, 2, Opcode::Write, node, write.as_bytes(), &data, size_of::<WriteOut>())?;
        let read = ReadIn { fh, offset, size: BLOCK as u32, ..Default::default() };
        let back = timed(&mut times, 1, Opcode::Read, node, read.as_bytes(), &[], BLOCK)?;
        if back != data {
            return Err(format!("the neighbour's file {n} has a wrong byte in round {round}"));
        }
        let args = GetattrIn::default();
        let attr = timed(&mut times, 0, Opcode::Getattr, node, args.as_bytes(), &[], size_of::<AttrOut>())?;
        let size = AttrOut::read_from_bytes(&attr).unwrap().attr.size;
        if size < offset + BLOCK as u64 {
            return Err(format!("the neighbour's file {n} has {size} bytes in round {round}"));
        }
        if round % 8 == 0 {
            let mknod = MknodIn { mode: libc::S_IFREG | 0o600, ..Default::default() };
            call(Opcode::Mknod, dir, &[mknod.as_bytes(), b"old\0"].concat(), &[], size_of::<EntryOut>())?;
            let rename = [RenameIn { newdir: dir }.as_bytes(), b"old\0new\0"].concat();
            timed(&mut times, 3, Opcode::Rename, dir, &rename, &[], 0)?;
            timed(&mut times, 4, Opcode::Unlink, dir, b"new\0", &[], 0)?;
        }
        if round % 64 == 0 {
            let name = format!("made{round}\0");
            let mkdir = [MkdirIn { mode: 0o700, umask: 0 }.as_bytes(), name.as_bytes()].concat();
            call(Opcode::Mkdir, dir, &mkdir, &[], size_of::<EntryOut>())?;
            call(Opcode::Rmdir, dir, name.as_bytes(), &[], 0)?;
        }
    }
    Ok(times)
}

/// Begins to write to the locked file. A queue's worker waits then.
fn write_to_locked(guest: &Frontend, dir: u64) -> Option<Token> {
    let entry = guest.request(1, Opcode::Lookup as u32, dir, b"locked\0", &[], size_of::<EntryOut>()).unwrap();
    let node = EntryOut::read_from_bytes(&entry).unwrap().nodeid;
    let open = OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
    let open = guest.request(1, Opcode::Open as u32, node, open.as_bytes(), &[], size_of::<OpenOut>()).unwrap();
    let fh = OpenOut::read_from_bytes(&open).unwrap().fh;
    let write = WriteIn { fh, size: 1, ..Default::default() };
    let (_, head) = guest.header(Opcode::Write as u32, node, size_of::<WriteIn>() + 1);
    guest.submit(1, &[&head, write.as_bytes(), b"x"], &[16, size_of::<WriteOut>()]).ok()
}

/// The work of a process on the host in the meantime.
fn host_work(dir: &Path, stop: &AtomicBool) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("the host's work: {e}");
    let mut round = 0;
    while !stop.load(Ordering::Relaxed) {
        let path = dir.join(format!("file{}", round % FILES));
        let data = pattern(round % FILES, round);
        let file = File::options().create(true).truncate(true).write(true).read(true).open(&path).map_err(failed)?;
        file.write_all_at(&data, 0).map_err(failed)?;
        let mut back = vec![0; BLOCK];
        file.read_exact_at(&mut back, 0).map_err(failed)?;
        if back != data || file.metadata().map_err(failed)?.len() != BLOCK as u64 {
            return Err(format!("the host's {} has a wrong byte", path.display()));
        }
        round += 1;
        // A host does other things as well.
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
