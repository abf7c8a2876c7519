//! The limit of open files (`--rlimit-nofile`), and those of threads.

use std::process::exit;
use std::thread;

use rustix::process::{Resource, Rlimit, WaitOptions, getrlimit, setrlimit, waitpid};

use super::sys::{Forked, fork};
use super::{Error, Step, cgroup};
use crate::limits::FILE_MAX_SHARE;

/// The default, as in virtiofsd: each open file takes a descriptor, and without file handles each known inode too.
const DEFAULT_NOFILE: u64 = 1_000_000;

/// Sets the soft and the hard limit of open files, and returns the soft limit. `None` sets the default, or the hard
/// limit if that is lower and cannot be raised. `Some(0)` changes nothing.
///
/// # Errors
/// If the given limit is above fs.nr_open, or above the hard limit without CAP_SYS_RESOURCE.
pub fn set_nofile(limit: Option<u64>) -> Result<u64, Error> {
    let now = getrlimit(Resource::Nofile);
    let current = now.current.unwrap_or(u64::MAX);
    match limit {
        Some(0) => Ok(current),
        Some(limit) => set(limit, limit).step(
            "set --rlimit-nofile (it may not be above fs.nr_open, nor above the hard limit without CAP_SYS_RESOURCE)",
        ),
        None => set_default(current, now.maximum.unwrap_or(u64::MAX)),
    }
}

fn set_default(current: u64, hard: u64) -> Result<u64, Error> {
    let wanted = wanted(current, sysctl("nr_open"), sysctl("file-max"));
    set(wanted, wanted).or_else(|_| {
        tracing::warn!(
            "the limit of open files stays at {hard}, since it takes CAP_SYS_RESOURCE to raise it to {wanted}: at the \
             limit, the guest gets ENFILE when it opens a file and, without file handles, when it looks up a name"
        );
        set(hard, hard).step("raise the limit of open files")
    })
}

fn wanted(current: u64, nr_open: Option<u64>, file_max: Option<u64>) -> u64 {
    let most = [nr_open, file_max.map(|all| all / FILE_MAX_SHARE)];
    most.into_iter().flatten().fold(current.max(DEFAULT_NOFILE), u64::min)
}

fn set(current: u64, maximum: u64) -> rustix::io::Result<u64> {
    setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum: Some(maximum) }).map(|()| current)
}

/// A number from /proc/sys/fs.
fn sysctl(name: &str) -> Option<u64> {
    std::fs::read_to_string(format!("/proc/sys/fs/{name}")).ok()?.trim().parse().ok()
}

/// Sees whether the process may have so many threads and processes, itself among them. To be called while it has one
/// thread.
///
/// # Errors
/// Says which limit is in the way.
pub fn check_threads(wanted: usize) -> Result<(), Error> {
    let start = || thread::Builder::new().stack_size(TRIAL_STACK).spawn(loop_for_ever).is_ok();
    let got = match fork() {
        Ok(Forked::Child) => exit(if (2..wanted).all(|_| start()) { 0 } else { 1 }),
        Ok(Forked::Parent(pid)) => {
            let ended = waitpid(Some(pid), WaitOptions::empty()).step("try to start threads")?;
            ended.is_some_and(|(_, status)| status.exit_status() == Some(0))
        }
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => false,
        Err(e) => return Err(e).step("try to start threads"),
    };
    if got {
        return Ok(());
    }
    let of_user = getrlimit(Resource::Nproc).current;
    let limit = match (cgroup::threads().filter(|limit| limit.left() < wanted as u64), of_user) {
        (Some(limit), _) => limit.to_string(),
        (None, Some(limit)) => format!("RLIMIT_NPROC is {limit} for all processes of the user"),
        (None, None) => "see pids.max of its control groups, kernel.threads-max and kernel.pid_max".into(),
    };
    Err(Error::Other(format!("the daemon needs {wanted} processes and threads, and may not have them: {limit}")))
}

/// Stack of a thread that does nothing, in bytes. The system raises it where it needs more.
const TRIAL_STACK: usize = 16 << 10;

fn loop_for_ever() {
    loop {
        thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_leaves_most_descriptors_to_others() {
        let million = DEFAULT_NOFILE;
        assert_eq!(wanted(1024, Some(1 << 20), Some(i64::MAX as u64)), million);
        assert_eq!(wanted(1024, Some(1 << 19), Some(i64::MAX as u64)), 1 << 19);
        assert_eq!(wanted(1024, Some(1 << 20), Some(400_000)), 100_000);
        assert_eq!(wanted(2 * million, Some(4 * million), Some(400_000)), 100_000);
        assert_eq!(wanted(2 * million, Some(4 * million), Some(40 * million)), 2 * million);
        assert_eq!(wanted(1024, None, None), million);
    }
}
