//! Daemons under test, and the resources that they use.

use std::collections::HashMap;
use std::fs;
use std::ops::Add;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tempfile::TempDir;

use crate::Result;

/// How long a daemon may take to make its socket.
const START: Duration = Duration::from_secs(60);
/// How long it may take to end after its frontend has gone.
const END: Duration = Duration::from_secs(60);

/// Where the daemons have their shares: in memory.
const MEMORY: &str = "/dev/shm";

/// The directory of all daemons of this process. Another process removes it when this one ends, by a signal too: what
/// stays there takes memory.
struct Home {
    path: PathBuf,
    /// It waits for the end of its input.
    _remover: Child,
}

static HOME: Mutex<Option<Home>> = Mutex::new(None);

/// A new directory in memory.
fn directory() -> std::io::Result<TempDir> {
    let mut home = HOME.lock();
    let home = match &mut *home {
        Some(home) => home,
        none => {
            let prefix = format!("thruway-bench.{}.", std::process::id());
            let dir = tempfile::Builder::new().prefix(&prefix).tempdir_in(MEMORY)?;
            // Ctrl-C goes to a whole process group.
            let remover = Command::new("sh")
                .args(["-c", "cat; rm -rf -- \"$0\""])
                .arg(dir.path())
                .process_group(0)
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()?;
            none.insert(Home { path: dir.keep(), _remover: remover })
        }
    };
    tempfile::tempdir_in(&home.path)
}

/// How many bytes the files of daemons that are started here can take.
///
/// # Errors
/// If the system does not tell.
pub fn room() -> Result<u64> {
    let failed = |e: &dyn std::fmt::Display| format!("no size of {MEMORY}: {e}");
    let shm = rustix::fs::statvfs(MEMORY).map_err(|e| failed(&e))?;
    let memory = fs::read_to_string("/proc/meminfo").map_err(|e| failed(&e))?;
    let free = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.split_whitespace().next());
    let free = free.and_then(|kib| kib.parse::<u64>().ok()).map_or(u64::MAX, |kib| kib << 10);
    Ok(free.min(shm.f_bavail * shm.f_frsize))
}

/// A daemon that was started here with its own share, or one that was running before.
pub struct Daemon {
    socket: PathBuf,
    child: Option<Child>,
    /// Holds the socket, the log and the share.
    _dir: Option<TempDir>,
}

impl Daemon {
    /// Runs a shell command. In it, `{socket}` is replaced by the path of the socket to make, and `{share}` by the
    /// directory to serve, which lies in memory.
    ///
    /// # Errors
    /// One line that says what failed, and the command's own output.
    pub fn start(command: &str) -> Result<Self> {
        for part in ["{socket}", "{share}"] {
            if !command.contains(part) {
                return Err(format!(
                    "the command lacks {part}: thruwayd --socket-path {{socket}} --shared-dir {{share}}"
                ));
            }
        }
        let dir = directory().map_err(|e| format!("cannot make a directory in {MEMORY}: {e}"))?;
        let (socket, share, log) = (dir.path().join("socket"), dir.path().join("share"), dir.path().join("log"));
        let made = fs::create_dir(&share).and_then(|()| fs::File::create(&log));
        let output = made.map_err(|e| format!("cannot write to {}: {e}", dir.path().display()))?;
        let line =
            command.replace("{socket}", &socket.display().to_string()).replace("{share}", &share.display().to_string());
        let copy = output.try_clone().map_err(|e| e.to_string())?;
        let child = Command::new("sh")
            .args(["-c", &format!("exec {line}")])
            .stdin(Stdio::null())
            .stdout(copy)
            .stderr(output)
            .spawn()
            .map_err(|e| format!("cannot run '{line}': {e}"))?;
        let mut daemon = Self { socket, child: Some(child), _dir: Some(dir) };
        daemon
            .await_socket()
            .map_err(|e| format!("{line}: {e}\n{}", fs::read_to_string(log).unwrap_or_default().trim_end()))?;
        Ok(daemon)
    }

    /// Uses the running daemon that listens at `socket`.
    pub fn join(socket: PathBuf) -> Self {
        Self { socket, child: None, _dir: None }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    fn await_socket(&mut self) -> Result<()> {
        let end = Instant::now() + START;
        while !self.socket.exists() {
            if let Some(status) = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten()) {
                return Err(format!("it ended ({status})"));
            }
            if Instant::now() > end {
                return Err(format!("no socket after {} s", START.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // The daemon may be between bind(2) and listen(2).
        std::thread::sleep(Duration::from_millis(50));
        Ok(())
    }

    /// What the daemon has used so far. `None` if it was not started here.
    pub fn usage(&self) -> Option<Usage> {
        let mut all = Usage::default();
        all.add_tree(self.child.as_ref()?.id());
        Some(all)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let Some(child) = &mut self.child else { return };
        let end = Instant::now() + END;
        while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// What each thread of a process and of its descendants has used so far.
#[derive(Default)]
pub struct Usage(HashMap<u32, Used>);

/// CPU time and context switches.
#[derive(Clone, Copy, Debug, Default)]
pub struct Used {
    pub cpu_seconds: f64,
    pub context_switches: u64,
}

impl Usage {
    fn add_tree(&mut self, pid: u32) {
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return };
        for task in tasks.flatten() {
            let (task, id) = (task.path(), task.file_name().to_string_lossy().parse().unwrap_or(0));
            if let Some(used) = used(&task) {
                self.0.insert(id, used);
            }
            let children = fs::read_to_string(task.join("children")).unwrap_or_default();
            children.split_whitespace().filter_map(|child| child.parse().ok()).for_each(|child| self.add_tree(child));
        }
    }

    /// What was used between `before` and this, without threads that have ended.
    pub fn since(&self, before: &Self) -> Used {
        let used = |(id, now): (&u32, &Used)| {
            let before = before.0.get(id).copied().unwrap_or_default();
            Used {
                cpu_seconds: (now.cpu_seconds - before.cpu_seconds).max(0.0),
                context_switches: now.context_switches.saturating_sub(before.context_switches),
            }
        };
        self.0.iter().map(used).fold(Used::default(), Add::add)
    }
}

impl Add for Used {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        Self {
            cpu_seconds: self.cpu_seconds + more.cpu_seconds,
            context_switches: self.context_switches + more.context_switches,
        }
    }
}

/// The time is the first figure of schedstat, in ns. The ticks of proc_pid_stat(5) are 10 ms: as much as 500 requests.
fn used(task: &Path) -> Option<Used> {
    let ns = fs::read_to_string(task.join("schedstat")).ok()?;
    let status = fs::read_to_string(task.join("status")).ok()?;
    let counts = status.lines().filter(|line| line.contains("voluntary_ctxt_switches:"));
    let context_switches = counts.map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum::<Option<_>>()?;
    Some(Used { cpu_seconds: ns.split_whitespace().next()?.parse::<f64>().ok()? / 1e9, context_switches })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_end_or_begin_count_for_what_they_did_meanwhile() {
        let usage = |threads: &[(u32, u64)]| {
            let used = |&(id, n): &(u32, u64)| (id, Used { cpu_seconds: n as f64, context_switches: n });
            Usage(threads.iter().map(used).collect())
        };
        let used = usage(&[(2, 25), (3, 7)]).since(&usage(&[(1, 100), (2, 20)]));
        assert_eq!((used.cpu_seconds, used.context_switches), (12.0, 12));
    }
}
