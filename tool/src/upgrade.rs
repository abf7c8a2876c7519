//! `thruway upgrade`: has supervised daemons become the programs that are at their paths now (docs/supervise.md).

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::{Result, daemons};

/// How long a daemon may take: it gives up after a minute itself at each of two steps.
const PATIENCE: Duration = Duration::from_secs(150);

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(10);

/// The options of `thruway upgrade`.
#[derive(clap::Args)]
pub struct Options {
    /// A daemon's process ID, or one of its sockets
    #[arg(value_name = "PID|SOCKET", required_unless_present = "all")]
    which: Option<String>,

    /// All supervised daemons of this host whose program was replaced
    #[arg(long, conflicts_with = "which")]
    all: bool,
}

pub fn run(options: &Options) -> Result {
    let proc = Path::new("/proc");
    let pids = match &options.which {
        Some(which) => vec![one(proc, which)?],
        None => daemons::pids(proc).into_iter().filter(|pid| Daemon(proc.join(pid.to_string())).is_old()).collect(),
    };
    let mut failed = false;
    for pid in pids {
        match (upgrade(proc, pid), options.all) {
            (Ok(()), _) => println!("process {pid}: upgraded"),
            (Err(NotDone::Unable), true) => println!("process {pid}: goes on as it is, without a supervisor"),
            (Err(NotDone::Unable), false) => {
                return Err(format!(
                    "process {pid} cannot upgrade: it was not started by this user, or has no supervisor"
                ));
            }
            (Err(NotDone::Failed(why)), _) => {
                eprintln!("thruway: process {pid} goes on as it is: {why}");
                failed = true;
            }
        }
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The daemon with this process ID, or with this socket, beside which is the process ID.
fn one(proc: &Path, which: &str) -> std::result::Result<u32, String> {
    let none = || format!("no daemon has the process ID or the socket '{which}'");
    let pid = match which.parse() {
        Ok(pid) => pid,
        Err(_) => fs::read_to_string(format!("{which}.pid"))
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .ok_or_else(none)?,
    };
    if daemons::pids(proc).contains(&pid) { Ok(pid) } else { Err(none()) }
}

#[derive(Debug, PartialEq, Eq)]
enum NotDone {
    /// It would not know what the signal means.
    Unable,
    Failed(String),
}

fn upgrade(proc: &Path, pid: u32) -> std::result::Result<(), NotDone> {
    let daemon = Daemon(proc.join(pid.to_string()));
    let before = daemon.passed();
    let process = Pid::from_raw(pid as i32).ok_or(NotDone::Unable)?;
    if !daemon.holds_back("SigBlk") {
        return Err(NotDone::Unable);
    }
    kill_process(process, Signal::USR2).map_err(|_| NotDone::Unable)?;
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        // The signal waits while the daemon tries. Then it becomes the program, which has other variables, and can
        // hold back the signal a bit later.
        let is_trying = daemon.holds_back("ShdPnd") || !daemon.holds_back("SigBlk");
        let now = daemon.passed();
        if now.is_some() && now != before {
            return Ok(());
        }
        if !daemon.0.exists() {
            return Err(NotDone::Failed("it has ended".into()));
        }
        if !is_trying {
            return Err(NotDone::Failed("its log says why".into()));
        }
        sleep(PAUSE);
    }
    Err(NotDone::Failed("it does not come to an end".into()))
}

/// A process, by its directory in /proc.
struct Daemon(PathBuf);

impl Daemon {
    /// Whether SIGUSR2 is in a set of signals of /proc/PID/status.
    fn holds_back(&self, set: &str) -> bool {
        let status = fs::read_to_string(self.0.join("status")).unwrap_or_default();
        let bits = status.lines().find_map(|line| line.strip_prefix(set)?.strip_prefix(':'));
        let bits = bits.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
        bits.is_some_and(|bits| bits & 1 << (Signal::USR2.as_raw() - 1) != 0)
    }

    /// What it has got from the program before. Another one gets something else.
    fn passed(&self) -> Option<Vec<u8>> {
        let all = fs::read(self.0.join("environ")).ok()?;
        let mut all = all.split(|byte| *byte == 0);
        all.find(|one| one.starts_with(b"THRUWAY_UPGRADE=")).map(Vec::from)
    }

    /// Whether another program is where the running one was.
    fn is_old(&self) -> bool {
        let number = |path: &Path| fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
        let exe = self.0.join("exe");
        let Some((running, path)) = number(&exe).zip(fs::read_link(&exe).ok()) else { return false };
        let path = path.to_string_lossy();
        // The path is not always one that the process or this one can use: in a mount namespace below a chroot it is
        // longer. So it is not asked what is there now.
        if path.ends_with(" (deleted)") {
            return true;
        }
        // It may be in a container.
        number(&self.0.join("root").join(path.trim_start_matches('/'))).is_some_and(|there| there != running)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_and_process_ids_name_daemons() {
        let dir = tempfile::tempdir().unwrap();
        let process = dir.path().join("77");
        fs::create_dir(&process).unwrap();
        fs::write(process.join("cmdline"), "thruwayd\0--supervise").unwrap();
        fs::write(process.join("stat"), "77 (thruwayd) S 1 0").unwrap();
        fs::write(process.join("status"), "Name:\tthruwayd\nShdPnd:\t0000\nSigBlk:\t0000000000000400\n").unwrap();
        let socket = dir.path().join("s").display().to_string();
        fs::write(dir.path().join("s.pid"), "77\n").unwrap();
        assert_eq!((one(dir.path(), "77"), one(dir.path(), &socket)), (Ok(77), Ok(77)));
        assert!(one(dir.path(), "78").is_err() && one(dir.path(), "/nowhere").is_err());
        // It does not hold back SIGUSR2, which would end it.
        assert_eq!(upgrade(dir.path(), 77), Err(NotDone::Unable));
        assert!(!Daemon(process.clone()).is_old());
        fs::create_dir(process.join("root")).unwrap();
        std::os::unix::fs::symlink(process.join("stat"), process.join("exe")).unwrap();
        let there = process.join("root").join(process.join("stat").strip_prefix("/").unwrap());
        fs::create_dir_all(there.parent().unwrap()).unwrap();
        fs::hard_link(process.join("stat"), &there).unwrap();
        assert!(!Daemon(process.clone()).is_old());
        fs::remove_file(&there).unwrap();
        fs::write(&there, "").unwrap();
        assert!(Daemon(process).is_old());
    }
}
