//! `thruway check`: sees by trying whether this host and a directory have what thruwayd can use.

use std::fmt::{self, Display};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use rustix::fs::{AtFlags, CWD, OFlags, StatxFlags, statx};
use rustix::thread::{CapabilitySet, capabilities};
use serde_json::json;
use thruway::device::Urings;
use thruway::fs::{can_keep_owners, probe};
use thruway::sandbox::{self, Sandbox, caps, cgroup, seccomp};
use thruway::window::Stores;
use thruway::window::proxy::{self, Guard, GuardMode, Kind, Proxy};

use crate::Result;
use crate::qemu::{self, Device};

/// What is looked for, in the order of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Need {
    /// The daemon can isolate itself.
    Sandbox,
    /// Files of the share can belong to all users of the guest.
    Ids,
    /// Reads that wait for a disk hold up no queue, and take no thread.
    IoUring,
    /// DAX and passthrough windows.
    Windows,
    /// Host processes that truncate a mapped file wait.
    Guard,
    /// QEMU has shared memory regions, which windows need.
    Qemu,
    /// The control group that a daemon would be in allows the memory of a virtual machine.
    Memory,
    /// Files are named by handle instead of by descriptor.
    FileHandles,
    /// Owners can be kept in an extended attribute.
    Ownership,
    /// A guest with the agent hears of the host's changes.
    Watch,
    /// Files can be mapped into windows.
    Mapping,
    /// Passed-through files are written in place.
    Passthrough,
}

impl Need {
    const fn name(self) -> &'static str {
        match self {
            Self::Sandbox => "sandbox",
            Self::Ids => "ids",
            Self::IoUring => "io-uring",
            Self::Windows => "windows",
            Self::Guard => "guard",
            Self::Qemu => "qemu",
            Self::Memory => "memory",
            Self::FileHandles => "file-handles",
            Self::Ownership => "ownership",
            Self::Watch => "watch",
            Self::Mapping => "mapping",
            Self::Passthrough => "passthrough",
        }
    }
}

/// The options of `thruway check`.
#[derive(clap::Args)]
pub struct Options {
    /// Look at this directory too: its file system, and what can be done with files there
    ///
    /// A file without a name is made in it for a moment.
    dir: Option<PathBuf>,

    /// Exit with status 1 if any of these is missing; the sandbox is always required
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    require: Vec<Need>,

    /// The QEMU to look at, which may have arguments
    #[arg(long, value_name = "COMMAND", default_value = qemu::DEFAULT)]
    qemu: String,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What is missing, and how to get it.
struct Missing {
    why: String,
    cure: &'static str,
}

/// Of what is there, what it is good for.
type Found = std::result::Result<String, Missing>;

fn missing<T>(why: impl Display, cure: &'static str) -> std::result::Result<T, Missing> {
    Err(Missing { why: why.to_string(), cure })
}

/// A line of the output.
struct Line {
    need: Need,
    found: Found,
    required: bool,
}

impl Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let name = self.need.name();
        match &self.found {
            Ok(what) => write!(f, "  ok       {name:13} {what}"),
            Err(Missing { why, cure }) => write!(f, "  missing  {name:13} {why}; to get it: {cure}"),
        }
    }
}

/// Looks, and prints what it found. The status is 1 if something required is missing.
pub fn run(options: &Options) -> Result {
    // The window process is forked, so this comes while there is one thread.
    let windows = proxy::start(GuardMode::Fanotify, proxy::DEADLINE, seccomp::Action::Kill);
    let dir = options.dir.as_ref().map(|path| Dir::open(path)).transpose()?;
    let line = |(need, found)| Line { need, found, required: need == Need::Sandbox || options.require.contains(&need) };
    let shared_dir = options.dir.clone().unwrap_or_else(std::env::temp_dir);
    let host = host(&shared_dir, &windows, &options.qemu).map(line);
    let dir = dir.map(|dir| (dir.says(), dir.lines(&windows).map(line)));
    let of_dir = || dir.iter().flat_map(|(_, lines)| lines);
    let unseen = options.require.iter().find(|need| !host.iter().chain(of_dir()).any(|line| line.need == **need));
    if let Some(need) = unseen {
        return Err(format!("--require {} is about a directory: name one, thruway check DIR", need.name()));
    }
    let good = !host.iter().chain(of_dir()).any(|line| line.required && line.found.is_err());
    if options.json {
        let dir = dir.as_ref().zip(options.dir.as_ref());
        let dir = dir.map(|((says, lines), path)| json!({"path": path, "file_system": says, "checks": entries(lines)}));
        println!("{}", json!({"ok": good, "host": entries(&host), "dir": dir}));
    } else {
        println!("This host:");
        host.iter().for_each(|line| println!("{line}"));
        if let (Some((says, lines)), Some(path)) = (&dir, &options.dir) {
            println!("{} ({says}):", path.display());
            lines.iter().for_each(|line| println!("{line}"));
        }
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn entries(lines: &[Line]) -> Vec<serde_json::Value> {
    let entry = |Line { need, found, required }: &Line| {
        let (says, cure) = match found {
            Ok(what) => (what, None),
            Err(Missing { why, cure }) => (why, Some(cure)),
        };
        json!({"name": need.name(), "ok": found.is_ok(), "required": required, "says": says, "cure": cure})
    };
    lines.iter().map(entry).collect()
}

type Windows = std::result::Result<Proxy, sandbox::Error>;

fn host(shared_dir: &Path, windows: &Windows, qemu: &str) -> [(Need, Found); 7] {
    let guard = match windows {
        Ok(proxy) => match (proxy.guard(), proxy.shared_group()) {
            (Guard::On, None) => {
                Ok("host processes that truncate a mapped file wait until the guest has let go of it".into())
            }
            (Guard::On, Some(why)) => Ok(format!(
                "host processes that truncate a mapped file wait until the guest has let go of it, and all that open \
                 one wait while the daemon's control group is frozen: the guard cannot leave {why}"
            )),
            (Guard::Off(why), _) => missing(
                why,
                "Linux 6.14 or later with CONFIG_FANOTIFY_ACCESS_PERMISSIONS, run as root in the host's process \
                 namespace",
            ),
        },
        Err(_) => missing("it is a part of the windows", "see 'windows'"),
    };
    let made = match windows {
        Ok(_) => Ok("--dax-window and --passthrough-window work on this host".into()),
        Err(e) => {
            missing(e, "root (not in a user namespace), Linux 6.9 or later with CONFIG_FUSE_PASSTHROUGH, /dev/fuse")
        }
    };
    let uring = match Urings::probe() {
        Ok(()) => Ok("reads that wait for a disk take no thread".into()),
        Err(e) => missing(
            format!("reads that wait for a disk use threads: {e}"),
            "CONFIG_IO_URING, sysctl kernel.io_uring_disabled=0, and no filter of a container against it",
        ),
    };
    let qemu = match qemu::maps(qemu) {
        Ok(device) => Ok(format!(
            "{} maps files for a daemon, as windows need, by {}{}",
            qemu::version(qemu).as_deref().unwrap_or(qemu),
            device.name(),
            match device {
                Device::FileSystem => ", which libvirt and Kata start too",
                Device::Test =>
                    " alone, which libvirt and Kata do not start: QEMU with the patches of qemu/ has better",
            }
        )),
        Err(why) => missing(
            match qemu::version(qemu) {
                Some(version) => format!("{version}: {why}"),
                None => why,
            },
            "QEMU 11.1 or later with vhost-user-test-device-pci, or --qemu COMMAND",
        ),
    };
    [
        (Need::Sandbox, sandbox(shared_dir)),
        (Need::Ids, ids()),
        (Need::IoUring, uring),
        (Need::Windows, made),
        (Need::Guard, guard),
        (Need::Qemu, qemu),
        (Need::Memory, memory(cgroup::memory(), host_memory())),
    ]
}

/// Memory of this host, in bytes.
fn host_memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib =
        text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse().ok());
    kib.map_or(u64::MAX, |kib: u64| kib << 10)
}

/// `all`: the host's memory. A higher limit is none.
fn memory(limit: Option<cgroup::Limit>, all: u64) -> Found {
    let limit = limit.filter(|limit| limit.most < all);
    let Some(cgroup::Limit { file, most, .. }) = limit else {
        return Ok("no control group limits the memory of a daemon started from here".into());
    };
    missing(
        format!(
            "a daemon started from here may have {most} bytes of memory ({}), and the pages of the guest's memory that \
             it touches first count: the kernel may kill the daemon of a guest with more",
            file.display()
        ),
        "raise the limit above the guest's memory",
    )
}

/// Whether a daemon of this user can give files to users of the guest.
fn ids() -> Found {
    let user = rustix::process::geteuid().as_raw();
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    if user == 0 {
        let needed = CapabilitySet::CHOWN | CapabilitySet::SETUID | CapabilitySet::SETGID;
        let all = capabilities(None).is_ok_and(|caps| caps.permitted.contains(needed));
        let mapped = read("/proc/self/uid_map");
        return match all && ids_of(&mapped) > 1 {
            true => Ok("files can belong to all users of the guest".into()),
            false => missing(
                "root has not all of CAP_CHOWN, CAP_SETUID and CAP_SETGID here, or only one user exists: files of the \
                 share belong to that user",
                "a container with them and with more users, or --ownership=xattr",
            ),
        };
    }
    let name = user_name(&read("/etc/passwd"), user);
    let granted = |file: &str| subordinate(&read(file), user, name.as_deref());
    let has = |program| {
        let mut paths = std::env::var_os("PATH").iter().flat_map(std::env::split_paths).collect::<Vec<_>>().into_iter();
        paths.any(|path| path.join(program).is_file())
    };
    match (granted("/etc/subuid"), granted("/etc/subgid")) {
        (Some(uids), Some(gids)) if has("newuidmap") && has("newgidmap") => {
            Ok(format!("files can belong to many users of the guest: --uid-map :0:{uids}: --gid-map :0:{gids}:"))
        }
        _ => missing(
            "files of the share can belong to this user alone, and a guest that gives them to others gets an error",
            "ranges of ids for this user in /etc/subuid and /etc/subgid, and newuidmap and newgidmap; or \
             --ownership=xattr",
        ),
    }
}

/// How many ids a uid_map has.
fn ids_of(map: &str) -> u64 {
    map.lines().filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok()).sum()
}

fn user_name(passwd: &str, user: u32) -> Option<String> {
    let line = passwd.lines().find(|line| line.split(':').nth(2) == Some(&user.to_string()))?;
    line.split(':').next().map(str::to_owned)
}

/// The first range that /etc/subuid or /etc/subgid grants to a user: `FIRST:COUNT`.
fn subordinate(text: &str, user: u32, name: Option<&str>) -> Option<String> {
    text.lines().find_map(|line| {
        let (who, range) = line.split_once(':')?;
        (Some(who) == name || who == user.to_string()).then(|| range.trim().to_owned())
    })
}

/// Has another process enter the sandbox: whoever enters it does not come back.
fn sandbox(dir: &Path) -> Found {
    let cure = "allow namespaces (user.max_user_namespaces, kernel.unprivileged_userns_clone, the container's \
                profile), or use --sandbox chroot or none";
    let output = Command::new("/proc/self/exe").arg("enter-sandbox").arg(dir).stdin(Stdio::null()).output();
    match output {
        Ok(output) if output.status.success() => Ok(match rustix::process::geteuid().is_root() {
            true => "namespaces, and a filter of system calls".into(),
            false => "namespaces of an ordinary user: all files of the share belong to that user".into(),
        }),
        Ok(output) => match String::from_utf8_lossy(&output.stdout).trim() {
            "" => missing(format!("a process that entered it ended ({})", output.status), cure),
            why => missing(why, cure),
        },
        Err(e) => missing(format!("cannot start a process: {e}"), "/proc, and more processes (ulimit -u)"),
    }
}

/// Does what the daemon does before it serves. The exit status says whether it can.
pub fn enter_sandbox(dir: PathBuf) -> ExitCode {
    let settings = sandbox::Settings {
        sandbox: Sandbox::Namespace,
        shared_dir: dir,
        shares: vec![],
        uid_map: vec![],
        gid_map: vec![],
        helper: None,
        supervised: false,
    };
    let entered = sandbox::enter(&settings, ())
        .and_then(|_| caps::limit(&caps::ModCaps::default(), false))
        .and_then(|()| seccomp::apply(seccomp::Action::Kill, false));
    match entered {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            println!("{e}");
            ExitCode::FAILURE
        }
    }
}

/// The directory that is looked at.
struct Dir {
    path: PathBuf,
    dir: File,
    /// A file in it that has no name.
    file: io::Result<File>,
}

impl Dir {
    fn open(path: &Path) -> std::result::Result<Self, String> {
        let cannot = |e| format!("cannot open DIR '{}': {e}: name a directory that this user may read", path.display());
        let options = |flags: OFlags| OpenOptions::new().read(true).custom_flags(flags.bits() as i32).clone();
        let dir = options(OFlags::DIRECTORY).open(path).map_err(cannot)?;
        let file = options(OFlags::TMPFILE).write(true).mode(0o600).open(path).or_else(|_| {
            let name = path.join(format!(".thruway-check.{}", std::process::id()));
            let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&name)?;
            fs::remove_file(name)?;
            Ok(file)
        });
        let file = file.and_then(|mut file| file.write_all(PATTERN).map(|()| file));
        Ok(Self { path: path.to_owned(), dir, file })
    }

    /// The file system's name, and where it is mounted.
    fn says(&self) -> String {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let id = statx(CWD, &self.path, AtFlags::empty(), StatxFlags::MNT_ID).map_or(0, |st| st.stx_mnt_id);
        kind(&mounts, id).unwrap_or_else(|| "an unknown file system".into())
    }

    fn lines(&self, windows: &Windows) -> [(Need, Found); 6] {
        let probe = probe(self.dir.as_fd());
        let handles = match probe.handles {
            Ok(()) => Ok("files that the guest knows cost no descriptors".into()),
            Err(e) => missing(
                format!("each file that the guest knows costs a descriptor: {e}"),
                "root (CAP_DAC_READ_SEARCH), and a file system with file handles",
            ),
        };
        let watch = match probe.watch {
            Ok(()) => Ok("a guest with the agent hears what the host changes".into()),
            Err(e) => missing(
                format!("a guest hears nothing of what the host changes: {e}"),
                "Linux 5.17 or later, ext4, XFS, Btrfs, F2FS or tmpfs, and room in fs.fanotify.max_user_groups",
            ),
        };
        let mapped = self.map(windows);
        let stores = self.file.as_ref().ok().map(|file| Stores::of(file.as_fd()).unwrap_or(Stores::Elsewhere));
        let guarded = mapped.as_ref().is_ok_and(|guarded| *guarded);
        let guard = match &mapped {
            Ok(true) => Ok("host processes that truncate a mapped file of it wait".into()),
            Ok(false) => missing(
                "whoever shortens a mapped file of it may end the virtual machine",
                "'guard' above, and a share on ext2, ext3, ext4, XFS or Btrfs; or replace files instead of shortening \
                 them",
            ),
            Err(_) => missing("nothing is mapped", "see 'mapping'"),
        };
        let passthrough = match (&mapped, stores) {
            (Ok(_), Some(stores)) if stores.in_place(guarded) => Ok(match stores {
                Stores::Unshared => "files without holes that share no blocks are read and written in place",
                _ => "files without holes are read and written in place",
            }
            .into()),
            (Ok(_), _) => missing(
                "files go by messages: a store may need a new block, and on a full disk that ends the virtual machine",
                "a share on ext2, ext3, ext4, tmpfs, or XFS with the guard; --passthrough-writable=always takes the \
                 risk",
            ),
            (Err(_), _) => missing("nothing is mapped", "see 'mapping'"),
        };
        let mapping = mapped.map(|_| match stores {
            Some(Stores::Elsewhere) => {
                "files can be mapped; with dax=inode none is, since a store may take new blocks".into()
            }
            _ => "files can be mapped into a window".into(),
        });
        [
            (Need::FileHandles, handles),
            (Need::Ownership, self.ownership()),
            (Need::Watch, watch),
            (Need::Mapping, mapping),
            (Need::Guard, guard),
            (Need::Passthrough, passthrough),
        ]
    }

    fn ownership(&self) -> Found {
        let kept = self.file.as_ref().map_err(|e| io::Error::new(e.kind(), e.to_string()));
        match kept.and_then(|_| Ok(can_keep_owners(&self.path)?)) {
            Ok(()) => Ok("an ordinary user's daemon keeps the guest's owners with --ownership=xattr".into()),
            Err(e) => missing(
                format!("--ownership=xattr does not work here: {e}"),
                "a directory that this user may write to, on ext4, XFS, Btrfs, F2FS, or tmpfs since Linux 6.6",
            ),
        }
    }

    /// Has a file mapped as the daemon would, without a guest. Whether it is guarded.
    fn map(&self, windows: &Windows) -> std::result::Result<bool, Missing> {
        let proxy = match windows {
            Ok(proxy) => proxy,
            Err(_) => return missing("there are no windows", "see 'windows' above"),
        };
        let file = match &self.file {
            Ok(file) => file,
            Err(e) => {
                return missing(
                    format!("cannot make a file here to try it: {e}"),
                    "a directory that this user may write to",
                );
            }
        };
        let tried = proxy.open(1, Kind::Through, file.as_fd()).and_then(|opened| {
            let mut read = [0; PATTERN.len()];
            File::from(opened.fd).read_exact_at(&mut read, 0)?;
            match read == *PATTERN {
                true => Ok(opened.guarded),
                false => Err(io::Error::other("it has other contents when it is mapped")),
            }
        });
        tried.or_else(|e| {
            missing(
                format!("the kernel does not pass files of it through FUSE: {e}"),
                "a share on a local file system, not on overlayfs or FUSE",
            )
        })
    }
}

/// What the file has.
const PATTERN: &[u8] = b"thruway check";

/// The file system of the mount with this id, from /proc/self/mountinfo.
fn kind(mounts: &str, id: u64) -> Option<String> {
    let line = mounts.lines().find(|line| line.split(' ').next() == Some(&id.to_string()))?;
    let (mount, fs) = line.split_once(" - ")?;
    let (kind, options) = (fs.split(' ').next()?, mount.split(' ').nth(5)?);
    let readonly = options.split(',').any(|option| option == "ro");
    Some(format!("{kind}{} at {}", if readonly { ", read-only," } else { "" }, mount.split(' ').nth(4)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_memory_is_told() {
        let limit = |most| Some(cgroup::Limit { file: "/g/memory.max".into(), most, used: 0 });
        assert!(memory(None, 8).is_ok() && memory(limit(9), 8).is_ok());
        assert!(memory(limit(7), 8).is_err_and(|missing| missing.why.contains("7 bytes of memory (/g/memory.max)")));
        assert!((1 << 20..u64::MAX).contains(&host_memory()));
    }

    #[test]
    fn ranges_of_ids_are_found_by_name_and_by_number() {
        let passwd = "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n";
        let name = user_name(passwd, 1000);
        assert_eq!((name.as_deref(), user_name(passwd, 1)), (Some("ann"), None));
        let text = "anna:1:2\nann:100000:65536\n1001:165536:65536\n";
        assert_eq!(subordinate(text, 1000, name.as_deref()).as_deref(), Some("100000:65536"));
        assert_eq!(subordinate(text, 1001, None).as_deref(), Some("165536:65536"));
        assert_eq!(subordinate(text, 1002, Some("bob")), None);
        assert_eq!((ids_of("         0       1000          1\n"), ids_of("0 1000 1\n1 100000 65536\n")), (1, 65537));
    }

    #[test]
    fn a_mount_is_found_by_its_id() {
        let mounts = "22 27 0:21 / /proc rw,relatime - proc proc rw\n\
                      122 27 8:1 /a /srv/share ro,relatime shared:1 - ext4 /dev/sda1 rw\n";
        assert_eq!(kind(mounts, 22).as_deref(), Some("proc at /proc"));
        assert_eq!(kind(mounts, 122).as_deref(), Some("ext4, read-only, at /srv/share"));
        assert_eq!(kind(mounts, 2), None);
    }
}
