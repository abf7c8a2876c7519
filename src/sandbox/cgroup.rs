//! The control groups that the daemon is in, and their limits. Both versions of control groups have them.

use std::fmt;
use std::fs::read_to_string;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, Mode, OFlags, accessat, mkdirat, openat};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsmount, fsopen};
use rustix::process::Pid;

/// A limit of a control group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The file that has it.
    pub file: PathBuf,
    /// The limit.
    pub most: u64,
    /// How much of it is in use.
    pub used: u64,
}

impl Limit {
    /// What is left.
    pub fn left(&self) -> u64 {
        self.most.saturating_sub(self.used)
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} is {}, of which {} are in use", self.file.display(), self.most, self.used)
    }
}

/// The limit of processes and threads that leaves the fewest.
pub fn threads() -> Option<Limit> {
    limits("pids", &[("pids.max", "pids.current")]).into_iter().min_by_key(Limit::left)
}

/// The lowest limit of memory, in bytes.
pub fn memory() -> Option<Limit> {
    let names = [("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")];
    limits("memory", &names).into_iter().min_by_key(|limit| limit.most)
}

/// Those of the process's group and of the groups above it.
fn limits(controller: &str, names: &[(&str, &str)]) -> Vec<Limit> {
    let number = |file: &Path| read_to_string(file).ok()?.trim().parse().ok();
    let all = groups(controller).into_iter().flat_map(|group| names.iter().map(move |name| (group.clone(), *name)));
    let limit = |(group, (most, used)): (PathBuf, (&str, &str))| {
        let file = group.join(most);
        // It says "max" where there is none.
        let most = number(&file)?;
        Some(Limit { file, most, used: number(&group.join(used)).unwrap_or(0) })
    };
    all.filter_map(limit).collect()
}

/// The directories of the process's group and of the groups above it, as far as they can be seen.
fn groups(controller: &str) -> Vec<PathBuf> {
    let (Ok(mounts), Ok(mine)) = (read_to_string("/proc/self/mountinfo"), read_to_string("/proc/self/cgroup")) else {
        return Vec::new();
    };
    let parsed = mounts.lines().filter_map(|mount| group(mount, &mine, controller));
    parsed.flat_map(|(top, below)| ancestors(&top, &below)).collect()
}

/// The group that [`set_apart`] makes, one for all daemons.
pub const APART: &str = "thruway-guard";

/// Moves a process into a group at the top, so that nothing that is done to this process's groups stops or slows it.
/// Needs CAP_SYS_ADMIN: it mounts the groups, attached nowhere, since /sys/fs/cgroup may be read-only.
///
/// # Errors
/// Says which group it cannot leave.
pub fn set_apart(pid: Pid) -> Result<(), String> {
    let mine = read_to_string("/proc/self/cgroup").map_err(|e| format!("/proc/self/cgroup: {e}"))?;
    let stops = |list: &str| list.is_empty() || list.split(',').any(|one| one == "freezer" || one == "cpu");
    let lists = mine.lines().filter_map(|line| line.split(':').nth(1)).filter(|list| stops(list));
    let named = |list: &str| if list.is_empty() { String::new() } else { format!(" ({list})") };
    let all = lists.map(|list| leave(list, pid).map_err(|e| format!("the control group{}: {e}", named(list))));
    // Each is left that can be.
    all.fold(Ok(()), Result::and)
}

/// Leaves the groups with these controllers. None: those of the second version.
fn leave(list: &str, pid: Pid) -> io::Result<()> {
    let top = mount(list)?;
    // The topmost of all groups cannot be stopped, and has no such file. That of a container has it.
    let has = |file| accessat(&top, file, Access::EXISTS, AtFlags::empty()).is_ok();
    let is_real = if list.is_empty() { !has("cgroup.freeze") } else { has("cgroup.sane_behavior") };
    match mkdirat(&top, APART, Mode::from(0o755)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(e.into()),
    }
    let procs = openat(&top, format!("{APART}/cgroup.procs"), OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(procs, pid.as_raw_nonzero().to_string().as_bytes())?;
    if is_real { Ok(()) } else { Err(io::Error::other("it is a container's")) }
}

/// Mounts a hierarchy once more, attached nowhere.
fn mount(list: &str) -> io::Result<OwnedFd> {
    let context = fsopen(if list.is_empty() { "cgroup2" } else { "cgroup" }, FsOpenFlags::FSOPEN_CLOEXEC)?;
    list.split(',').filter(|one| !one.is_empty()).try_for_each(|one| fsconfig_set_flag(&context, one))?;
    fsconfig_create(&context)?;
    let attributes =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// `below` and what is above it, up to `top`.
fn ancestors(top: &Path, below: &Path) -> Vec<PathBuf> {
    below.ancestors().map(|part| top.join(part)).collect()
}

/// From a line of /proc/self/mountinfo and from /proc/self/cgroup: where this hierarchy is mounted, and the process's
/// group below it. `None` if it does not have the controller. That of the second version may have any.
fn group(mount: &str, mine: &str, controller: &str) -> Option<(PathBuf, PathBuf)> {
    let (place, kind) = mount.split_once(" - ")?;
    let mut words = place.split(' ').skip(3);
    let (root, top) = (words.next()?, words.next()?);
    let kind: Vec<&str> = kind.split(' ').collect();
    let has = |list: &str| list.split(',').any(|one| one == controller);
    let is_mine = |line: &&str| {
        let list = line.split(':').nth(1).unwrap_or_default();
        match kind[0] {
            "cgroup2" => list.is_empty(),
            "cgroup" => kind.last().is_some_and(|options| has(options)) && has(list),
            _ => false,
        }
    };
    let path = mine.lines().find(is_mine)?.splitn(3, ':').nth(2)?;
    let below = Path::new(path).strip_prefix(root).ok()?;
    Some((PathBuf::from(top), below.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_in_both_versions() {
        let mine = "4:memory:/docker/7\n1:cpu,cpuacct:/a\n0::/vm.slice/vm:1.scope\n";
        let find = |mount, controller| {
            let (top, below) = group(mount, mine, controller)?;
            Some((top.to_str()?.to_owned(), below.to_str()?.to_owned()))
        };
        let found = |top: &str, below: &str| Some((top.to_owned(), below.to_owned()));
        let two = "25 22 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
        assert_eq!(find(two, "pids"), found("/sys/fs/cgroup", "vm.slice/vm:1.scope"));
        let one = "40 30 0:30 /docker/7 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory";
        assert_eq!((find(one, "memory"), find(one, "cpu")), (found("/sys/fs/cgroup/memory", ""), None));
        let both = "41 30 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct";
        assert_eq!((find(both, "cpu"), find(both, "cpuset")), (found("/sys/fs/cgroup/cpu", "a"), None));
        for bad in ["", " - ", "1 2 3", "1 2 3 /else /x rw - cgroup2 x rw", "1 2 3 / /proc rw - proc proc rw"] {
            assert_eq!(find(bad, "pids"), None, "{bad}");
        }
        let all = ancestors(Path::new("/g"), Path::new("a/b"));
        assert_eq!(all, ["/g/a/b", "/g/a", "/g/"].map(PathBuf::from));
    }
}
