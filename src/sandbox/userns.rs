//! The user namespace in which an ordinary user's daemon runs (`--uid-map`, `--gid-map`).

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, exit};
use std::str::FromStr;

use rustix::io::Errno;
use rustix::process::{Gid, Pid, Uid, WaitOptions, getegid, geteuid, getpid, waitpid};
use rustix::thread::{UnshareFlags, set_thread_res_gid, set_thread_res_uid};

use super::sys::{Forked, fork, unshare};
use super::{Error, Step};

/// Maps the IDs `inside..inside + count` of the namespace to the IDs of the host from `outside` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRange {
    /// The first ID in the namespace.
    pub inside: u32,
    /// The first ID on the host.
    pub outside: u32,
    /// The number of IDs, at least 1.
    pub count: u32,
}

impl FromStr for IdRange {
    type Err = String;

    /// Parses `:inside:outside:count:`. Any character that is not a letter or digit may replace the colons.
    fn from_str(text: &str) -> Result<Self, String> {
        let malformed = || "expected :NAMESPACE_ID:HOST_ID:COUNT:, for example :0:100000:65536:".to_owned();
        let separator = text.chars().next().filter(|c| !c.is_alphanumeric()).ok_or_else(malformed)?;
        let fields = text.strip_prefix(separator).and_then(|t| t.strip_suffix(separator)).ok_or_else(malformed)?;
        let numbers: Result<Vec<u32>, _> = fields.split(separator).map(str::parse).collect();
        match numbers.as_deref() {
            Ok(&[inside, outside, count]) if count > 0 => {
                // The highest number is not an ID: to system calls it means "do not change the ID".
                let ends = |first: u32| first.checked_add(count).is_some();
                let range = (ends(inside) && ends(outside)).then_some(Self { inside, outside, count });
                range.ok_or_else(|| "the range ends after 4294967294, the highest ID".into())
            }
            _ => Err(malformed()),
        }
    }
}

/// The helper process sends this when it has written the maps. Anything else is its error message.
const DONE: &str = "done";

/// Enters a new user namespace with these maps, and the other new namespaces. Becomes the user namespace's root if it
/// has one.
pub fn unshare_mapped(others: UnshareFlags, uids: &[IdRange], gids: &[IdRange]) -> Result<(), Error> {
    let (mut helper, requests) = UnixStream::pair().step("create a socket pair")?;
    let target = getpid();
    // Only a process outside the namespace may map more than the user's own ID.
    let pid = match fork().step("start a helper process")? {
        Forked::Parent(pid) => pid,
        Forked::Child => {
            drop(helper);
            map_on_request(requests, target, uids, gids)
        }
    };
    drop(requests);
    unshare(others | UnshareFlags::NEWUSER).step(
        "create a user namespace (allow it, see user.max_user_namespaces, kernel.unprivileged_userns_clone and \
         kernel.apparmor_restrict_unprivileged_userns in sysctl, or use --sandbox none)",
    )?;
    let mut answer = String::new();
    helper.write_all(&[0]).and_then(|()| helper.read_to_string(&mut answer)).step("talk to the helper process")?;
    let _ = waitpid(Some(pid), WaitOptions::empty());
    if answer != DONE {
        return Err(Error::IdMap(answer));
    }
    become_root()
}

/// Becomes the user namespace's root if it has one.
pub fn become_root() -> Result<(), Error> {
    let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
    unless_unmapped(set_thread_res_gid(gid, gid, gid)).step("become group 0 of the user namespace")?;
    unless_unmapped(set_thread_res_uid(uid, uid, uid)).step("become user 0 of the user namespace")
}

/// Ignores the kernel's EINVAL for an ID that the namespace does not have.
fn unless_unmapped(result: Result<(), Errno>) -> Result<(), Errno> {
    result.or_else(|e| if e == Errno::INVAL { Ok(()) } else { Err(e) })
}

/// The helper process: waits until `target` is in its namespace, writes the maps, answers and exits.
fn map_on_request(mut requests: UnixStream, target: Pid, uids: &[IdRange], gids: &[IdRange]) -> ! {
    if requests.read_exact(&mut [0]).is_err() {
        exit(1);
    }
    let answer = match map_uids(target, uids).and_then(|()| map_gids(target, gids)) {
        Ok(()) => DONE.to_owned(),
        Err(e) => e,
    };
    exit(requests.write_all(answer.as_bytes()).is_err().into())
}

fn map_uids(target: Pid, ranges: &[IdRange]) -> Result<(), String> {
    let own = geteuid().as_raw();
    match trivial(ranges, own) {
        Some(range) => write_proc(target, "uid_map", &format!("{} {own} 1", range.inside)),
        None => run("newuidmap", "/etc/subuid", target, ranges),
    }
}

fn map_gids(target: Pid, ranges: &[IdRange]) -> Result<(), String> {
    let own = getegid().as_raw();
    match trivial(ranges, own) {
        Some(range) => {
            write_proc(target, "setgroups", "deny")?;
            write_proc(target, "gid_map", &format!("{} {own} 1", range.inside))
        }
        None => run("newgidmap", "/etc/subgid", target, ranges),
    }
}

/// The only range of a map that needs no privilege: the user's own ID.
fn trivial(ranges: &[IdRange], own: u32) -> Option<IdRange> {
    match ranges {
        [] => Some(IdRange { inside: own, outside: own, count: 1 }),
        [range] if range.outside == own && range.count == 1 => Some(*range),
        _ => None,
    }
}

fn write_proc(target: Pid, file: &str, text: &str) -> Result<(), String> {
    let path = format!("/proc/{target}/{file}");
    fs::write(&path, text).map_err(|e| format!("cannot write '{text}' to {path}: {e}"))
}

fn run(program: &str, ids_file: &str, target: Pid, ranges: &[IdRange]) -> Result<(), String> {
    let numbers = ranges.iter().flat_map(|r| [r.inside, r.outside, r.count]).map(|n| n.to_string());
    let output = Command::new(program)
        .arg(target.to_string())
        .args(numbers)
        .output()
        .map_err(|e| format!("cannot run {program}: {e}: install it (package uidmap or shadow-utils)"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let reason = text.lines().next().unwrap_or("no reason given");
    Err(format!("{program} failed: {reason}: check that {ids_file} grants these IDs to the user"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_parsed_with_any_separator() {
        let range = Ok(IdRange { inside: 0, outside: 100000, count: 65536 });
        assert_eq!(":0:100000:65536:".parse(), range);
        assert_eq!("/0/100000/65536/".parse(), range);
        for bad in ["", ":", "0:1:2", ":0:1:2", ":0:1:", ":0:1:2:3:", ":0:1:0:", ":0:-1:1:", ":0:4294967295:1:"] {
            assert!(bad.parse::<IdRange>().is_err(), "{bad}");
        }
    }

    #[test]
    fn only_the_own_id_is_trivial() {
        let range = |inside, outside, count| IdRange { inside, outside, count };
        assert_eq!(trivial(&[], 1000), Some(range(1000, 1000, 1)));
        assert_eq!(trivial(&[range(0, 1000, 1)], 1000), Some(range(0, 1000, 1)));
        assert_eq!(trivial(&[range(0, 1000, 2)], 1000), None);
        assert_eq!(trivial(&[range(0, 1001, 1)], 1000), None);
        assert_eq!(trivial(&[range(0, 1000, 1), range(1, 100000, 9)], 1000), None);
    }
}
