//! What a daemon costs while its guest does nothing, and what its start costs. All of it is counted, not timed.

mod cgroup;
mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use common::{family, thruwayd, wait_until};
use tempfile::TempDir;
use thruway::fuse::abi::*;
use thruway_bench::frontend::{Frontend, Options};
use zerocopy::{FromBytes, IntoBytes};

/// Threads of an idle daemon whose guest uses one queue, with the two processes that wait for it.
const THREADS: usize = 10;

/// System calls until the daemon can be connected to: half as much again as there were when this was written, so that
/// another version of a crate may make some more, and a thread for each queue or a loop over all descriptors may not.
const START_CALLS: usize = 900;

/// The log has it when the start is over.
const LISTENS: &str = "Waiting for vhost-user socket connection";

/// A daemon with the default options, which has a share and nothing else.
struct Daemon {
    child: Child,
    dir: TempDir,
}

impl Daemon {
    /// Has `program` run it.
    fn start(mut program: Command, args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("share")).unwrap();
        program.env_remove("RUST_LOG").stdin(Stdio::null()).stderr(fs::File::create(dir.path().join("log")).unwrap());
        program.arg("--shared-dir").arg(dir.path().join("share")).arg("--socket-path").arg(dir.path().join("socket"));
        let daemon = Self { child: program.args(args).spawn().unwrap(), dir };
        wait_until("listens", || daemon.log().contains(LISTENS));
        daemon
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap()
    }

    fn connect(&self, queues: usize) -> Frontend {
        let options = Options { queues: queues + 1, ..Options::default() };
        let guest = Frontend::connect(&self.path("socket"), options).unwrap();
        guest.fuse_init(InitFlags::ASYNC_READ.bits()).unwrap();
        guest
    }

    /// The process that was started and its children.
    fn family(&self) -> Vec<u32> {
        family(self.child.id())
    }

    /// The directories of /proc of all its threads.
    fn threads(&self) -> Vec<PathBuf> {
        let tasks = |pid| fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        self.family().into_iter().flat_map(tasks).map(|task| task.path()).collect()
    }

    /// How often each of its threads has gone to sleep.
    fn sleeps(&self) -> Vec<(PathBuf, String)> {
        let count = |thread: PathBuf| {
            let status = fs::read_to_string(thread.join("status")).ok()?;
            let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"))?.to_owned();
            Some((thread, line))
        };
        self.threads().into_iter().filter_map(count).collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        for pid in self.family().into_iter().rev() {
            let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

/// A guest has mounted the share, read a directory and a file, and does nothing more.
#[test]
fn an_idle_daemon_has_few_threads_and_never_wakes() {
    let daemon = Daemon::start(thruwayd(), &[]);
    fs::write(daemon.path("share/file"), "contents").unwrap();
    let guest = daemon.connect(1);
    let entry = guest.request(1, Opcode::Lookup as u32, ROOT_ID, b"file\0", b"", 128).unwrap();
    let node = EntryOut::read_from_prefix(&entry).unwrap().0.nodeid;
    let open = guest.request(1, Opcode::Open as u32, node, OpenIn::default().as_bytes(), b"", 16).unwrap();
    let fh = OpenOut::read_from_prefix(&open).unwrap().0.fh;
    let read = ReadIn { fh, size: 100, ..Default::default() };
    assert_eq!(guest.request(1, Opcode::Read as u32, node, read.as_bytes(), b"", 100).unwrap(), b"contents");
    // Longer than the longest period of the daemon, 10 s. What the requests left is over before.
    let quiet = Duration::from_secs(12);
    let (mut sleeps, mut since) = (daemon.sleeps(), Instant::now());
    wait_until("sleeps for good", || {
        let now = daemon.sleeps();
        if now != sleeps {
            (sleeps, since) = (now, Instant::now());
        }
        since.elapsed() > quiet
    });
    let threads = daemon.threads();
    let name = |thread: &PathBuf| fs::read_to_string(thread.join("comm")).unwrap();
    assert!(threads.len() <= THREADS, "{:?}", threads.iter().map(name).collect::<Vec<_>>());
}

/// The worker and who looks whether the request takes long. A look each 10 ms for a while would be 20 more.
#[test]
fn a_request_now_and_then_wakes_few_threads() {
    let daemon = Daemon::start(thruwayd(), &[]);
    let guest = daemon.connect(1);
    let sleeps = || {
        let count = |line: &String| line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap();
        daemon.sleeps().iter().map(|(_, line)| count(line)).sum::<u64>()
    };
    let quiet = || {
        loop {
            let before = sleeps();
            // Longer than from one look to the next.
            sleep(Duration::from_secs(1));
            if sleeps() == before {
                return before;
            }
        }
    };
    let before = quiet();
    let attributes = GetattrIn::default();
    guest.request(1, Opcode::Getattr as u32, ROOT_ID, attributes.as_bytes(), b"", size_of::<AttrOut>()).unwrap();
    let wakes = quiet() - before;
    assert!(wakes <= 8, "{wakes}");
}

/// Under strace(1), which follows all processes and threads.
#[test]
fn a_start_takes_few_system_calls() {
    if !Command::new("strace").arg("--version").stdout(Stdio::null()).status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: there is no strace");
        return;
    }
    let trace = tempfile::NamedTempFile::new().unwrap();
    let mut strace = Command::new("strace");
    // Long enough for the message that ends the start.
    strace
        .args(["--follow-forks", "--string-limit=200", "--output"])
        .arg(trace.path())
        .arg(env!("CARGO_BIN_EXE_thruwayd"));
    let _daemon = Daemon::start(strace, &[]);
    let text = || fs::read_to_string(trace.path()).unwrap();
    wait_until("is traced", || text().contains(LISTENS));
    let text = text();
    let start = text.lines().take_while(|line| !line.contains(LISTENS));
    // Not the second half of a call, a signal, or an end.
    let calls = start.filter(|line| !["resumed>", "+++", "---"].iter().any(|word| line.contains(word))).count();
    assert!(calls <= START_CALLS, "{calls}");
}

/// Four of the threads are for the four queues. A write of a large block would have more.
#[test]
fn twelve_processes_and_threads_are_enough_for_four_writers() {
    const BLOCK: usize = 128 << 10;
    const BLOCKS: u64 = 50;
    let Some(group) = cgroup::Group::new("pids.max") else { return };
    group.set("pids.max", 12);
    let daemon = Daemon::start(group.command(env!("CARGO_BIN_EXE_thruwayd")), &[]);
    let guest = daemon.connect(4);
    let write = |queue: usize| {
        let name = [b'a' + queue as u8, 0];
        let args = CreateIn { flags: libc::O_RDWR as u32, mode: libc::S_IFREG | 0o600, ..Default::default() };
        let made = guest.request(queue, Opcode::Create as u32, ROOT_ID, &[args.as_bytes(), &name].concat(), b"", 144);
        let made = made.unwrap();
        let (entry, rest) = EntryOut::read_from_prefix(&made).unwrap();
        let fh = OpenOut::read_from_prefix(rest).unwrap().0.fh;
        let block = vec![b'a' + queue as u8; BLOCK];
        for n in 0..BLOCKS {
            let args = WriteIn { fh, offset: n * BLOCK as u64, size: BLOCK as u32, ..Default::default() };
            guest.request(queue, Opcode::Write as u32, entry.nodeid, args.as_bytes(), &block, 8).unwrap();
        }
        let args = FsyncIn { fh, ..Default::default() };
        guest.request(queue, Opcode::Fsync as u32, entry.nodeid, args.as_bytes(), b"", 0).unwrap();
    };
    scope(|scope| {
        for queue in 1..=4 {
            scope.spawn(move || write(queue));
        }
    });
    for name in ["b", "c", "d", "e"] {
        assert_eq!(daemon.path("share").join(name).metadata().unwrap().size(), BLOCKS * BLOCK as u64);
    }
    drop(guest);
    drop(daemon);
    wait_until("is empty", || group.get("cgroup.procs").is_empty());
}
