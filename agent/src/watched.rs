//! What is watched in this guest, as proc(5) tells it: the marks of inotify(7) and fanotify(7).

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use thruway_guest::protocol::{Change, ops};

/// The inode of the first pid namespace (PROC_PID_INIT_INO of include/linux/proc_ns.h). In another one, the agent does
/// not see all processes.
const FIRST_PIDS: u64 = 0xEFFF_FFFC;

/// Nodes of a share that are watched.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Watched {
    nodes: HashSet<u64>,
}

impl Watched {
    /// The nodes of the share with this device number. `None` if all of it may be watched.
    pub fn look(dev: u64) -> Option<Self> {
        let all_seen = fs::metadata("/proc/self/ns/pid").is_ok_and(|ns| ns.ino() == FIRST_PIDS);
        let mut watched = Self::default();
        let all = all_seen.then(|| fs::read_dir("/proc").ok()).flatten()?;
        for process in all {
            let name = process.ok()?.file_name();
            let Some(pid) = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) else {
                continue;
            };
            match watched.add_process(pid, dev) {
                Ok(true) => {}
                // It has ended.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {}
                _ => return None,
            }
        }
        Some(watched)
    }

    /// Adds what a process watches. False if that is everything.
    fn add_process(&mut self, pid: &str, dev: u64) -> io::Result<bool> {
        for descriptor in fs::read_dir(format!("/proc/{pid}/fd"))? {
            let descriptor = descriptor?;
            // It may have been closed.
            let Ok(target) = fs::read_link(descriptor.path()) else { continue };
            if !target.to_str().is_some_and(|target| target.starts_with("anon_inode:") && target.contains("notify")) {
                continue;
            }
            let number = descriptor.file_name();
            let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", number.to_string_lossy()))?;
            if !self.add(&info, dev) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Adds the marks of a file of /proc/PID/fdinfo. False if one of them may be of everything.
    fn add(&mut self, info: &str, dev: u64) -> bool {
        // As the kernel has it (MKDEV of include/linux/kdev_t.h).
        let dev = u64::from(rustix::fs::major(dev)) << 20 | u64::from(rustix::fs::minor(dev));
        for line in info.lines() {
            let Some(("inotify" | "fanotify", fields)) = line.split_once(' ') else { continue };
            let field = |name: &str| fields.split(' ').find_map(|field| field.strip_prefix(name)?.strip_prefix(':'));
            // The line with the settings of a fanotify group.
            if field("flags").is_some() {
                continue;
            }
            if field("sdev").and_then(|sdev| u64::from_str_radix(sdev, 16).ok()).is_some_and(|sdev| sdev != dev) {
                continue;
            }
            match field("f_handle").and_then(nodeid) {
                Some(node) => self.nodes.insert(node),
                // A mark of a mount, or of a file system.
                None => return false,
            };
        }
        true
    }

    /// Whether a node is watched.
    pub fn has(&self, node: u64) -> bool {
        self.nodes.contains(&node)
    }

    /// Whether nobody hears of a change, unless it replaces what is watched. Not said of directories: watches of them
    /// follow them.
    pub fn misses(&self, change: &Change) -> bool {
        let quiet = ops::CREATE | ops::RENAME | ops::CONTENTS | ops::CLOSED | ops::ATTRIBUTES | ops::REMOVE;
        let places = [&change.place, &change.to].into_iter().filter(|place| !place.is_none());
        !change.place.is_none()
            && change.ops & !quiet == 0
            && places.clone().all(|place| place.dir != 0 && !self.has(place.dir))
            && !self.has(change.node)
    }
}

/// The nodeid of a file handle: its upper and its lower half, in the machine's order of bytes.
fn nodeid(handle: &str) -> Option<u64> {
    let half = |at: usize| {
        let word = u32::from_str_radix(handle.get(at..at + 8)?, 16).ok()?;
        Some(u64::from(u32::from_ne_bytes(word.to_be_bytes())))
    };
    Some(half(0)? << 32 | half(8)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use thruway_guest::protocol::Place;

    const INFO: &str = "pos:\t0\nflags:\t02004000\nmnt_id:\t15\nino:\t55\n\
        inotify wd:2 ino:7 sdev:2a mask:fce ignored_mask:0 fhandle-bytes:c fhandle-type:81 \
        f_handle:010000000700000000000000\n\
        inotify wd:1 ino:99 sdev:800001 mask:fce ignored_mask:0 fhandle-bytes:8 fhandle-type:1 \
        f_handle:6300000000000000\n";

    #[test]
    fn marks_of_the_share_count() {
        let mut watched = Watched::default();
        assert!(watched.add(INFO, rustix::fs::makedev(0, 42)));
        assert_eq!(watched.nodes, HashSet::from([1 << 32 | 7]));
        let change =
            |ops, dir, node| Change { ops, node, place: Place { dir, name: b"a".to_vec() }, ..Change::default() };
        assert!(watched.misses(&change(ops::CREATE | ops::CLOSED, 5, 0)));
        assert!(!watched.misses(&change(ops::CREATE, 1 << 32 | 7, 0)));
        assert!(!watched.misses(&change(ops::CONTENTS, 5, 1 << 32 | 7)));
        assert!(!watched.misses(&change(ops::CREATE | ops::DIRECTORY, 5, 0)));
        assert!(!watched.misses(&change(ops::RENAME, 0, 0)));
        assert!(!watched.misses(&Change { ops: ops::REFRESH, node: 5, ..Change::default() }));
    }

    #[test]
    fn marks_of_mounts_and_file_systems_are_of_everything() {
        let flags = "fanotify flags:10 event-flags:0\n";
        assert!(Watched::default().add(flags, 42));
        assert!(!Watched::default().add("fanotify mnt_id:15 mflags:0 mask:8 ignored_mask:0\n", 42));
        let system = "fanotify sdev:2a mflags:0 mask:8 ignored_mask:0\n";
        assert!(!Watched::default().add(system, 42) && Watched::default().add(system, 43));
    }
}
