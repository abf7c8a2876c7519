//! Daemons under test, and the resources that they use.

use std::fs;
use std::ops::{Add, Sub};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::Result;

/// How long a daemon may take to make its socket.
const START: Duration = Duration::from_secs(60);
/// How long it may take to end after its frontend has gone.
const END: Duration = Duration::from_secs(60);

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
        let dir = tempfile::Builder::new().prefix("thruway-bench.").tempdir_in("/dev/shm");
        let dir = dir.map_err(|e| format!("cannot make a directory in /dev/shm: {e}"))?;
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

/// What a process and its descendants have used.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub cpu_seconds: f64,
    pub context_switches: u64,
}

impl Usage {
    fn add_tree(&mut self, pid: u32) {
        self.cpu_seconds += cpu_seconds(pid).unwrap_or(0.0);
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return };
        for task in tasks.flatten() {
            self.context_switches += context_switches(&task.path().join("status")).unwrap_or(0);
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            children.split_whitespace().filter_map(|child| child.parse().ok()).for_each(|child| self.add_tree(child));
        }
    }
}

impl Add for Usage {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        Self {
            cpu_seconds: self.cpu_seconds + more.cpu_seconds,
            context_switches: self.context_switches + more.context_switches,
        }
    }
}

impl Sub for Usage {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            cpu_seconds: self.cpu_seconds - before.cpu_seconds,
            context_switches: self.context_switches.saturating_sub(before.context_switches),
        }
    }
}

/// utime and stime of proc_pid_stat(5). They include threads that have ended.
fn cpu_seconds(pid: u32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name stands in parentheses and may contain anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let ticks: f64 = fields.next()?.parse::<f64>().ok()? + fields.next()?.parse::<f64>().ok()?;
    Some(ticks / rustix::param::clock_ticks_per_second() as f64)
}

fn context_switches(status: &Path) -> Option<u64> {
    let status = fs::read_to_string(status).ok()?;
    let counts = status.lines().filter(|line| line.contains("voluntary_ctxt_switches:"));
    counts.map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum()
}
