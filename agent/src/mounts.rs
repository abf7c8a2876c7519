//! Which shares are mounted, in any mount namespace.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// A mount of a share, or of a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The superblock's device number, as stat(2) tells it.
    pub dev: u64,
    /// Where it is mounted, as its process sees it.
    pub path: OsString,
    /// What of the share is mounted there, as a path below its root.
    pub root: OsString,
    /// The share's tag.
    pub tag: String,
    /// A process of the mount namespace, unless that is the agent's own.
    pub pid: Option<u32>,
    /// An overlay has it, or a part of it, as a lower layer.
    pub layered: bool,
}

impl Mount {
    /// Where the agent finds it. In another namespace, what is below that process's root.
    pub fn path_here(&self) -> PathBuf {
        match self.pid {
            None => self.path.clone().into(),
            Some(pid) => {
                let mut path = OsString::from(format!("/proc/{pid}/root"));
                path.push(&self.path);
                path.into()
            }
        }
    }
}

/// The shares of the agent's own mount namespace, each once.
///
/// # Errors
/// If /proc cannot be read.
pub fn own() -> io::Result<Vec<Mount>> {
    Ok(shares(&fs::read("/proc/self/mountinfo")?, None))
}

/// The shares of all mount namespaces of processes that the agent sees, each once. Its own come first.
///
/// # Errors
/// If /proc cannot be read.
pub fn all() -> io::Result<Vec<Mount>> {
    let mut seen = HashSet::from([fs::read_link("/proc/self/ns/mnt")?]);
    let mut found = own()?;
    for process in fs::read_dir("/proc")? {
        let Some(pid) = process?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // It may have ended meanwhile, or be a thread of the kernel.
        let Ok(namespace) = fs::read_link(format!("/proc/{pid}/ns/mnt")) else { continue };
        if seen.insert(namespace) {
            let Ok(info) = fs::read(format!("/proc/{pid}/mountinfo")) else { continue };
            let more = shares(&info, Some(pid));
            for mount in &mut found {
                mount.layered |= more.iter().any(|other| other.dev == mount.dev && other.layered);
            }
            found.extend(more.into_iter().filter(|mount| !has(&found, mount.dev)).collect::<Vec<_>>());
        }
    }
    Ok(found)
}

/// A process of each other pid namespace whose processes have this mount, at most [`PIDS`]. Mounters are among them, if
/// they or their children are still there.
pub fn other_pids(mount: &Mount) -> Vec<u32> {
    let link = |pid: &str, kind: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok();
    let mounts = link(&mount.pid.map_or_else(|| "self".into(), |pid| pid.to_string()), "mnt");
    let mut seen = HashSet::from([link("self", "pid")]);
    let mut found = Vec::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().filter(|name| name.parse::<u32>().is_ok()) else { continue };
        let pids = link(pid, "pid");
        if pids.is_some() && link(pid, "mnt") == mounts && found.len() < PIDS && seen.insert(pids) {
            found.extend(pid.parse::<u32>());
        }
    }
    found
}

/// Pid namespaces that have one mount namespace in common. More than two are rare.
const PIDS: usize = 8;

/// Whether a share is among these mounts.
pub fn has(mounts: &[Mount], dev: u64) -> bool {
    mounts.iter().any(|mount| mount.dev == dev)
}

/// The shares of a mountinfo file of proc(5), each once, and the whole one if it is there.
fn shares(mountinfo: &[u8], pid: Option<u32>) -> Vec<Mount> {
    let lines = || mountinfo.split(|byte| *byte == b'\n');
    let mut shares: Vec<Mount> = lines().filter_map(|line| parse(line, pid)).collect();
    let lower: Vec<PathBuf> = lines().flat_map(lower_layers).collect();
    for mount in &mut shares {
        mount.layered = lower.iter().any(|layer| layer.starts_with(&mount.path));
    }
    // If one of its mounts is, the share is.
    shares.sort_by_key(|mount| (mount.dev, !mount.layered));
    for at in 1..shares.len() {
        shares[at].layered |= shares[at].dev == shares[at - 1].dev && shares[at - 1].layered;
    }
    shares.sort_by_key(|mount| (mount.dev, mount.root.len()));
    shares.dedup_by_key(|mount| mount.dev);
    shares
}

/// The lower layers of an overlay, as who has mounted it has named them.
fn lower_layers(line: &[u8]) -> Vec<PathBuf> {
    let mut rest = line.split(|byte| *byte == b' ').skip_while(|field| *field != b"-").skip(1);
    let (Some(b"overlay"), Some(options)) = (rest.next(), rest.nth(1)) else { return Vec::new() };
    // One of a list, or one of its own with fsconfig(2).
    let options = options.split(|byte| *byte == b',');
    let lists = options
        .filter_map(|option| [&b"lowerdir="[..], b"lowerdir+="].iter().find_map(|key| option.strip_prefix(*key)));
    lists
        .flat_map(|list| list.split(|byte| *byte == b':'))
        .map(|path| OsString::from_vec(unescape(path)).into())
        .collect()
}

fn parse(line: &[u8], pid: Option<u32>) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let dev = std::str::from_utf8(fields.nth(2)?).ok()?;
    let (major, minor) = dev.split_once(':')?;
    let (root, path) = (fields.next()?, fields.next()?);
    let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
    let (kind, source) = (rest.next()?, rest.next()?);
    if kind != b"virtiofs" {
        return None;
    }
    Some(Mount {
        dev: rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?),
        path: OsString::from_vec(unescape(path)),
        root: OsString::from_vec(unescape(root)),
        tag: OsStr::from_bytes(&unescape(source)).to_string_lossy().into_owned(),
        pid,
        layered: false,
    })
}

/// A space, tab, newline or backslash is an octal number there.
fn unescape(field: &[u8]) -> Vec<u8> {
    let (mut bytes, mut at) = (Vec::new(), 0);
    while let Some(byte) = field.get(at) {
        let octal = field.get(at + 1..at + 4).filter(|_| *byte == b'\\');
        let number = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        match number.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(number) => {
                bytes.push(number);
                at += 4;
            }
            None => {
                bytes.push(*byte);
                at += 1;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_found_once() {
        let info = b"22 1 0:20 / / rw - ext4 /dev/vda rw\n\
            30 22 0:40 /part /mnt/part rw - virtiofs tag rw\n\
            31 22 0:40 / /mnt/a\\040b rw,relatime shared:7 - virtiofs tag\\134x rw\n\
            32 22 0:40 / /mnt/again rw - virtiofs tag rw\n\
            33 22 0:41 /part /mnt/part rw - virtiofs other rw\nnonsense\n";
        let mount = |minor, path: &str, root: &str, tag: &str| Mount {
            dev: rustix::fs::makedev(0, minor),
            path: path.into(),
            root: root.into(),
            tag: tag.into(),
            pid: None,
            layered: false,
        };
        assert_eq!(
            shares(info, None),
            [mount(40, "/mnt/a b", "/", "tag\\x"), mount(41, "/mnt/part", "/part", "other")]
        );
        assert_eq!(shares(info, Some(7))[1].path_here(), PathBuf::from("/proc/7/root/mnt/part"));
    }

    #[test]
    fn a_share_below_an_overlay_is_known() {
        let layered = |options: &str| {
            let overlay = format!("40 22 0:50 / /merged rw,relatime shared:9 - overlay overlay rw,{options}\n");
            let info = "31 22 0:40 / /mnt/a\\040b rw - virtiofs tag rw\n32 22 0:40 /x /mnt/again rw - virtiofs tag rw\n\
                33 22 0:41 / /mnt/ab rw - virtiofs other rw\n";
            let found = shares([info, &overlay].concat().as_bytes(), None);
            [found[0].layered, found[1].layered]
        };
        assert_eq!(layered("lowerdir=/lower,upperdir=/mnt/ab/u,workdir=/mnt/ab/w"), [false, false]);
        assert_eq!(layered("lowerdir=/lower:/mnt/a\\040b/part,upperdir=/u,workdir=/w"), [true, false]);
        assert_eq!(layered("lowerdir=/mnt/again/y:/lower"), [true, false]);
        assert_eq!(layered("lowerdir+=/mnt/ab,lowerdir+=/lower,redirect_dir=on"), [false, true]);
    }
}
