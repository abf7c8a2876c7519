//! The limit of open files (`--rlimit-nofile`).

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{Error, Step};

/// The default, as virtiofsd has it: each inode that the guest knows and each open file takes a descriptor.
const DEFAULT_NOFILE: u64 = 1_000_000;

/// Sets the limit of open files, soft and hard, and returns the soft limit. `None`: the default, as far as the hard
/// limit allows; `Some(0)`: leaves it.
///
/// # Errors
/// If `Some` limit is above fs.nr_open, or above the hard limit without CAP_SYS_RESOURCE.
pub fn set_nofile(limit: Option<u64>) -> Result<u64, Error> {
    let now = getrlimit(Resource::Nofile);
    let current = now.current.unwrap_or(u64::MAX);
    match limit {
        Some(0) => Ok(current),
        Some(limit) => {
            set(limit, limit).step("set --rlimit-nofile (above fs.nr_open, or above the hard limit without root?)")
        }
        None if current >= DEFAULT_NOFILE => Ok(current),
        None => set_default(now.maximum.unwrap_or(u64::MAX)),
    }
}

fn set_default(hard: u64) -> Result<u64, Error> {
    let wanted = nr_open().map_or(DEFAULT_NOFILE, |most| most.min(DEFAULT_NOFILE));
    set(wanted, wanted).or_else(|_| {
        tracing::warn!("the limit of open files is {hard}, below the {wanted} asked for: a large share may need more");
        set(hard, hard).step("raise the limit of open files")
    })
}

fn set(current: u64, maximum: u64) -> rustix::io::Result<u64> {
    setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum: Some(maximum) }).map(|()| current)
}

fn nr_open() -> Option<u64> {
    std::fs::read_to_string("/proc/sys/fs/nr_open").ok()?.trim().parse().ok()
}
