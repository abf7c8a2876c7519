//! The sandbox as /proc shows it on the host. If root runs the tests, they also run a daemon as the user `nobody`.

mod common;

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::copy_of_the_daemon;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change};
use tempfile::TempDir;
use thruway::fuse::abi::*;
use thruway::sandbox::seccomp;
use thruway_bench::frontend::{Frontend, Options};
use zerocopy::{FromBytes, IntoBytes};

/// User and group ID of `nobody` on Linux distributions. Any unused ID would do.
const NOBODY: u32 = 65534;

/// CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID, MKNOD, LEASE and SETFCAP of include/uapi/linux/capability.h.
const KEPT: u64 = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 27 | 1 << 28 | 1 << 31;
const DAC_READ_SEARCH: u64 = 1 << 2;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A daemon, its share (with a file `inside`) and its socket.
struct Daemon {
    dir: TempDir,
    child: Child,
}

impl Daemon {
    /// Starts a daemon and waits until it listens inside its sandbox. With `user`, and if the test is root, it runs as
    /// `nobody`.
    fn start(user: bool, args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let share = dir.path().join("share");
        fs::create_dir(&share).unwrap();
        fs::write(share.join("inside"), "").unwrap();
        Self::start_in(dir, user, args)
    }

    /// The same with an existing directory.
    fn start_in(dir: TempDir, user: bool, args: &[&str]) -> Self {
        let share = dir.path().join("share");
        if user && is_root() {
            chown(&share, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        let share = share.to_str().unwrap().to_owned();
        Self::run(dir, user, &[&["--shared-dir", &share], args].concat())
    }

    fn run(dir: TempDir, user: bool, args: &[&str]) -> Self {
        let mut command = Command::new(copy_of_the_daemon(dir.path()));
        if user && is_root() {
            chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
            command.uid(NOBODY).gid(NOBODY);
        }
        let log = fs::File::create(dir.path().join("log")).unwrap();
        command.arg("--socket-path").arg(dir.path().join("socket")).args(args);
        let child = command.stdin(Stdio::null()).stderr(log).spawn().unwrap();
        let mut daemon = Self { dir, child };
        daemon.wait_until("it serves", |d| d.log().contains("Waiting for vhost-user socket connection"));
        daemon
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap()
    }

    fn wait_until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let end = Instant::now() + Duration::from_secs(100);
        while !done(self) {
            assert!(Instant::now() < end, "not {what}: {}", self.log());
            sleep(Duration::from_millis(5));
        }
    }

    /// The process that serves: the last child's last child, and so on.
    fn server(&self) -> u32 {
        let mut id = self.child.id();
        loop {
            let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
            // The window process is the first child.
            let Some(child) = children.split_whitespace().last() else { return id };
            id = child.parse().unwrap();
        }
    }

    fn proc(&self, file: &str) -> PathBuf {
        Path::new("/proc").join(self.server().to_string()).join(file)
    }

    fn status(&self, field: &str) -> String {
        let text = fs::read_to_string(self.proc("status")).unwrap();
        let line = text.lines().find(|line| line.starts_with(field)).unwrap();
        line.split_once(':').unwrap().1.trim().to_owned()
    }

    fn capabilities(&self, set: &str) -> u64 {
        u64::from_str_radix(&self.status(set), 16).unwrap()
    }

    /// Whether the server has a namespace of its own of this kind.
    fn has_own(&self, namespace: &str) -> bool {
        let of = |process: &Path| fs::read_link(process.join("ns").join(namespace)).unwrap();
        of(&self.proc("")) != of(Path::new("/proc/self"))
    }

    /// Checks that the share is the server's root, and that it sees no mount of the host.
    fn assert_root_is_the_share(&self) {
        let root = self.proc("root/");
        let names: Vec<_> = fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["inside"]);
        let (up, share) = (fs::metadata(root.join("..")).unwrap(), fs::metadata(self.path("share")).unwrap());
        assert_eq!((up.dev(), up.ino()), (share.dev(), share.ino()));
        assert!(!root.join("..").join(self.path("log").strip_prefix("/").unwrap()).exists());
    }

    /// The mount point and the options of each mount that the server sees.
    fn mounts(&self) -> Vec<(String, String)> {
        let text = fs::read_to_string(self.proc("mountinfo")).unwrap();
        let fields = text.lines().map(|line| line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        fields.map(|fields| (fields[4].clone(), fields[5].clone())).collect()
    }

    fn assert_mounts_are_restricted(&self) {
        for (point, options) in self.mounts() {
            let has = |option| options.split(',').any(|o| o == option);
            assert!(["nosuid", "nodev", "noexec"].into_iter().all(has), "{point}: {options}");
        }
    }

    fn assert_filtered(&self) {
        assert_eq!((self.status("Seccomp:"), self.status("NoNewPrivs:")), ("2".into(), "1".into()));
    }

    /// Whether the process is gone or a zombie.
    fn is_gone(process: u32) -> bool {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        status.is_empty() || status.contains("State:\tZ")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn needs_root() -> bool {
    if !is_root() {
        eprintln!("skipped: needs root");
    }
    is_root()
}

/// Whether this host lets ordinary users create user namespaces.
fn needs_user_namespaces() -> bool {
    let mut probe = Command::new("unshare");
    if is_root() {
        probe.uid(NOBODY).gid(NOBODY);
    }
    let works = probe.args(["-U", "true"]).current_dir("/").status().is_ok_and(|status| status.success());
    if !works {
        eprintln!("skipped: needs user namespaces for ordinary users");
    }
    works
}

#[test]
fn namespace_as_root() {
    if !needs_root() {
        return;
    }
    let mut daemon = Daemon::start(false, &[]);
    let share = daemon.path("share");
    let is_mounted_here = || fs::read_to_string("/proc/self/mountinfo").unwrap().contains(share.to_str().unwrap());
    assert!(!is_mounted_here());
    for namespace in ["mnt", "pid", "net"] {
        assert!(daemon.has_own(namespace), "{namespace}");
    }
    assert!(!daemon.has_own("user"));
    daemon.assert_root_is_the_share();
    assert_eq!(daemon.mounts().len(), 1);
    daemon.assert_mounts_are_restricted();
    daemon.assert_filtered();
    for (set, kept) in
        [("CapEff:", KEPT | DAC_READ_SEARCH), ("CapPrm:", KEPT | DAC_READ_SEARCH), ("CapBnd:", 0), ("CapInh:", 0)]
    {
        assert_eq!(daemon.capabilities(set), kept, "{set}");
    }
    drop(UnixStream::connect(daemon.path("socket")).unwrap());
    assert_eq!(daemon.child.wait().unwrap().code(), Some(0), "{}", daemon.log());
    assert!(!is_mounted_here());
}

#[test]
fn the_share_may_be_named_by_a_symbolic_link() {
    if !needs_root() {
        return;
    }
    for sandbox in ["namespace", "chroot", "none"] {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("directory")).unwrap();
        std::os::unix::fs::symlink("directory", dir.path().join("share")).unwrap();
        let mut daemon = Daemon::start_in(dir, false, &["--sandbox", sandbox]);
        drop(UnixStream::connect(daemon.path("socket")).unwrap());
        assert_eq!(daemon.child.wait().unwrap().code(), Some(0), "{}", daemon.log());
    }
}

/// Threads share their memory, so an attacker who runs code in one can run it in all.
#[test]
fn every_thread_has_the_same_few_capabilities() {
    if !needs_root() {
        return;
    }
    for args in [&[][..], &["--dax-window", "64M", "--passthrough-window", "64M"]] {
        let daemon = Daemon::start(false, args);
        let mut threads = 0;
        for thread in fs::read_dir(daemon.proc("task")).unwrap() {
            let path = thread.unwrap().path();
            // A thread may end meanwhile.
            let Ok(status) = fs::read_to_string(path.join("status")) else { continue };
            for (set, want) in [("CapEff", KEPT | DAC_READ_SEARCH), ("CapPrm", KEPT | DAC_READ_SEARCH), ("CapBnd", 0)] {
                let line = status.lines().find(|line| line.starts_with(set)).unwrap();
                let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
                assert_eq!(line, format!("{set}:\t{want:016x}"), "{args:?}: {name}");
            }
            threads += 1;
        }
        assert!(threads > 1, "{args:?}");
    }
}

#[test]
fn the_daemon_creates_device_nodes_but_cannot_open_them() {
    if !needs_root() {
        return;
    }
    let daemon = Daemon::start(false, &[]);
    let frontend = Frontend::connect(&daemon.path("socket"), Options::default()).unwrap();
    frontend.fuse_init(u64::MAX).unwrap();
    // Major 1, minor 3: /dev/null.
    let null = MknodIn { mode: libc::S_IFCHR | 0o666, rdev: 1 << 8 | 3, ..Default::default() };
    let body = [null.as_bytes(), b"null\0"].concat();
    frontend.request(1, Opcode::Mknod as u32, ROOT_ID, &body, &[], size_of::<EntryOut>()).unwrap();
    let made = fs::symlink_metadata(daemon.path("share/null")).unwrap();
    assert!(made.file_type().is_char_device());
    // The daemon sees the node on its own mount, which is nodev.
    let opened = fs::File::open(daemon.proc("root").join("null"));
    assert_eq!(opened.unwrap_err().raw_os_error(), Some(libc::EACCES));
}

#[test]
fn namespace_as_user() {
    if !needs_user_namespaces() {
        return;
    }
    let daemon = Daemon::start(true, &[]);
    for namespace in ["mnt", "pid", "net", "user"] {
        assert!(daemon.has_own(namespace), "{namespace}");
    }
    daemon.assert_root_is_the_share();
    daemon.assert_mounts_are_restricted();
    daemon.assert_filtered();
    assert_eq!(daemon.capabilities("CapPrm:"), KEPT | DAC_READ_SEARCH);
    let map = fs::read_to_string(daemon.proc("uid_map")).unwrap();
    assert!(map.ends_with(" 1\n"), "{map}");
}

#[test]
fn namespace_as_user_who_is_root_inside() {
    if !needs_user_namespaces() || !is_root() {
        return;
    }
    let daemon = Daemon::start(true, &["--uid-map=:0:65534:1:", "--gid-map=:0:65534:1:"]);
    let map = fs::read_to_string(daemon.proc("uid_map")).unwrap();
    assert_eq!(map.split_whitespace().collect::<Vec<_>>(), ["0", "65534", "1"]);
    assert_eq!(fs::read_to_string(daemon.proc("setgroups")).unwrap(), "deny\n");
}

#[test]
fn chroot_as_root() {
    if !needs_root() {
        return;
    }
    let daemon = Daemon::start(false, &["--sandbox=chroot", "--inode-file-handles=never", "--modcaps=-mknod:-chown"]);
    assert_eq!(fs::read_link(daemon.proc("root")).unwrap(), daemon.path("share"));
    assert!(!daemon.has_own("mnt"));
    daemon.assert_filtered();
    assert_eq!(daemon.capabilities("CapEff:"), KEPT & !(1 << 27 | 1 << 0));
}

#[test]
fn none_as_user() {
    let daemon = Daemon::start(true, &["--sandbox=none", "--seccomp=none"]);
    assert_eq!(daemon.server(), daemon.child.id());
    assert_eq!((daemon.status("Seccomp:"), daemon.capabilities("CapEff:")), ("0".into(), 0));
}

/// The guest's root makes a file, if it is not there, and gives it to a user and a group.
fn give_away(guest: &Frontend, uid: u32, gid: u32) -> Result<(), i32> {
    let file = [MknodIn { mode: libc::S_IFREG | 0o600, ..Default::default() }.as_bytes(), b"file\0"].concat();
    let _ = guest.request(1, Opcode::Mknod as u32, ROOT_ID, &file, &[], size_of::<EntryOut>());
    let entry = guest.request(1, Opcode::Lookup as u32, ROOT_ID, b"file\0", &[], size_of::<EntryOut>())?;
    let node = EntryOut::read_from_bytes(&entry).unwrap().nodeid;
    let valid = (SetattrValid::UID | SetattrValid::GID).bits();
    let attr = SetattrIn { valid, uid, gid, ..Default::default() };
    guest.request(1, Opcode::Setattr as u32, node, attr.as_bytes(), &[], size_of::<AttrOut>()).map(drop)
}

#[test]
fn a_refused_id_is_said_once_with_the_option_that_maps_it() {
    let (uid, gid) = match is_root() {
        true => (NOBODY, NOBODY),
        false => (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()),
    };
    for (sandbox, errno) in [("--sandbox=none", libc::EPERM), ("--sandbox=namespace", libc::EINVAL)] {
        if sandbox == "--sandbox=namespace" && !needs_user_namespaces() {
            return;
        }
        let connect = |daemon: &Daemon| {
            let guest = Frontend::connect(&daemon.path("socket"), Options::default()).unwrap();
            guest.fuse_init(u64::MAX).unwrap();
            guest
        };
        let translate_gid = format!("--translate-gid=squash-guest:0:{gid}:4294967295");
        let mut daemon = Daemon::start(true, &[sandbox, &translate_gid]);
        let guest = connect(&daemon);
        for user in [1234, 1235] {
            assert_eq!(give_away(&guest, user, 1234), Err(errno), "{sandbox}");
        }
        // The log has a thread of its own.
        daemon.wait_until("it is said", |d| d.log().contains("is refused"));
        let log = daemon.log();
        let rule = format!("--translate-uid squash-guest:0:{uid}:4294967295");
        let said: Vec<_> = log.lines().filter(|line| line.contains("is refused")).collect();
        assert!(said.len() == 1 && said[0].contains("the guest's user 1234,") && said[0].contains(&rule), "{log}");
        // What it says helps.
        let daemon = Daemon::start(true, &[sandbox, &translate_gid, &rule.replace(' ', "=")]);
        assert_eq!(give_away(&connect(&daemon), 1234, 1234), Ok(()), "{sandbox}");
        assert!(!daemon.log().contains("is refused"));
        let daemon = Daemon::start(true, &[sandbox, "--ownership=xattr"]);
        assert_eq!(give_away(&connect(&daemon), 1234, 1235), Ok(()), "{sandbox}");
        let meta = fs::metadata(daemon.path("share/file")).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (uid, gid), "{sandbox}");
        let mut value = [0; 64];
        let n = rustix::fs::getxattr(daemon.path("share/file"), "user.containers.override_stat", &mut value).unwrap();
        assert_eq!(&value[..n], b"1234:1235:0600:file");
        assert!(!daemon.log().contains("is refused"));
        // A group alone.
        let mut daemon = Daemon::start(true, &[sandbox]);
        assert_eq!(give_away(&connect(&daemon), uid, 1234), Err(errno), "{sandbox}");
        daemon.wait_until("it is said", |d| d.log().contains("the guest's group 1234,"));
        assert!(daemon.log().contains("--translate-gid"));
    }
}

/// As in a container without CAP_SYS_ADMIN and CAP_SETPCAP.
#[test]
fn root_without_some_capabilities_serves_or_says_what_helps() {
    if !needs_root() {
        return;
    }
    for (sandbox, dropped, serves) in [
        ("namespace", "-setpcap", true),
        ("namespace", "-sys_admin,-setpcap", false),
        ("chroot", "-sys_admin,-setpcap", true),
        ("none", "-all", true),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (share, socket) = (dir.path().join("share"), dir.path().join("socket"));
        fs::create_dir(&share).unwrap();
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let mut command = Command::new("setpriv");
        command.arg(format!("--bounding-set={dropped}")).arg("--inh-caps=-all").arg(env!("CARGO_BIN_EXE_thruwayd"));
        command.arg("--shared-dir").arg(&share).arg("--socket-path").arg(&socket).args(["--sandbox", sandbox]);
        command.arg("--ownership=xattr").stdin(Stdio::null()).stderr(log);
        let mut daemon = Daemon { child: command.spawn().unwrap(), dir };
        if !serves {
            assert_eq!(daemon.child.wait().unwrap().code(), Some(1));
            assert!(daemon.log().contains("give the daemon CAP_SYS_ADMIN, or use --sandbox chroot or none"));
            continue;
        }
        daemon.wait_until("it serves", |d| d.log().contains("Waiting for vhost-user socket connection"));
        let guest = Frontend::connect(&socket, Options::default()).unwrap();
        guest.fuse_init(u64::MAX).unwrap();
        assert_eq!(give_away(&guest, 1234, 1235), Ok(()), "{sandbox} {dropped}");
    }
}

/// A directory that is mounted on itself as a shared mount, so that later mounts in it appear in other namespaces.
/// Dropping it unmounts it.
struct SharedMount(PathBuf);

impl SharedMount {
    fn new(path: PathBuf) -> Self {
        mount_bind(&path, &path).unwrap();
        let mounted = Self(path);
        mount_change(&mounted.0, MountPropagationFlags::SHARED).unwrap();
        mounted
    }
}

impl Drop for SharedMount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, UnmountFlags::DETACH);
    }
}

fn mount_tmpfs(path: &Path) {
    fs::create_dir(path).unwrap();
    mount("none", path, "tmpfs", MountFlags::empty(), None).unwrap();
    fs::write(path.join("file"), "").unwrap();
}

fn lookup(guest: &Frontend, parent: u64, name: &str) -> Result<EntryOut, i32> {
    let entry = guest.request(
        1,
        Opcode::Lookup as u32,
        parent,
        &[name.as_bytes(), b"\0"].concat(),
        &[],
        size_of::<EntryOut>(),
    )?;
    Ok(EntryOut::read_from_bytes(&entry).unwrap())
}

fn make(guest: &Frontend, parent: u64, name: &str) -> Result<(), i32> {
    let mode = libc::S_IFREG | 0o600;
    let body = [MknodIn { mode, ..Default::default() }.as_bytes(), name.as_bytes(), b"\0"].concat();
    guest.request(1, Opcode::Mknod as u32, parent, &body, &[], size_of::<EntryOut>()).map(drop)
}

fn several_shares(user: bool, more: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let shares = ["rw", "ro", "with,comma"].map(|name| {
        let share = dir.path().join(name);
        fs::create_dir(&share).unwrap();
        fs::write(share.join(format!("in {name}")), "").unwrap();
        if user && is_root() {
            chown(&share, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        // A link on the host leads to a directory like any other.
        std::os::unix::fs::symlink(name, dir.path().join(format!("{name} link"))).unwrap();
        format!("--share={name}={}{}", dir.path().join(name).display(), if name == "ro" { " link,ro" } else { "" })
    });
    let daemon = Daemon::run(dir, user, &[&shares.each_ref().map(|share| &**share)[..], more].concat());
    // Nothing else of the host is there.
    let mut names: Vec<_> = fs::read_dir(daemon.proc("root/")).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["ro", "rw", "with,comma"]);
    assert!(!daemon.proc("root/..").join(daemon.path("log").strip_prefix("/").unwrap()).exists());
    daemon.assert_mounts_are_restricted();
    let is_readonly = |(point, options): (String, String)| (point, options.split(',').any(|option| option == "ro"));
    let mut mounts: Vec<_> = daemon.mounts().into_iter().map(is_readonly).collect();
    mounts.sort();
    let [root, ro, rw, comma] = ["/", "/ro", "/rw", "/with,comma"].map(str::to_owned);
    assert_eq!(mounts, [(root, true), (ro, true), (rw, false), (comma, false)]);

    let guest = Frontend::connect(&daemon.path("socket"), Options::default()).unwrap();
    guest.fuse_init(u64::MAX).unwrap();
    let nodes = ["rw", "ro", "with,comma"].map(|name| {
        let entry = lookup(&guest, ROOT_ID, name).unwrap();
        assert_eq!(entry.attr.flags & ATTR_SUBMOUNT, ATTR_SUBMOUNT);
        lookup(&guest, entry.nodeid, &format!("in {name}")).unwrap();
        entry.nodeid
    });
    assert_eq!(make(&guest, nodes[0], "new"), Ok(()));
    assert_eq!(make(&guest, nodes[1], "new"), Err(libc::EROFS));
    assert_eq!(make(&guest, nodes[2], "new"), Ok(()));
    assert!(daemon.path("rw/new").exists() && !daemon.path("ro/new").exists());
    // Nobody changes the root directory.
    assert_eq!(make(&guest, ROOT_ID, "new"), Err(libc::EROFS));
    assert!(guest.request(1, Opcode::Rmdir as u32, ROOT_ID, b"rw\0", &[], 0).is_err());
    let rename = |node, name: &[u8]| {
        let body = [RenameIn { newdir: node }.as_bytes(), name].concat();
        guest.request(1, Opcode::Rename as u32, nodes[0], &body, &[], 0).err()
    };
    assert_eq!(rename(ROOT_ID, b"new\0out\0"), Some(libc::EXDEV));
    assert_eq!(rename(nodes[2], b"new\0other\0"), Some(libc::EXDEV));
}

#[test]
fn several_shares_are_below_a_directory_that_nobody_changes() {
    if !needs_root() {
        return;
    }
    several_shares(false, &[]);
    several_shares(false, &["--no-open=always", "--inode-file-handles=never"]);
    several_shares(false, &["--supervise"]);
}

#[test]
fn several_shares_of_an_ordinary_user() {
    if needs_user_namespaces() {
        several_shares(true, &[]);
    }
}

#[test]
fn later_mounts_appear_in_shares_that_can_be_changed() {
    if !needs_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [rw, ro] = ["rw", "ro"].map(|name| {
        fs::create_dir(dir.path().join(name)).unwrap();
        SharedMount::new(dir.path().join(name))
    });
    mount_tmpfs(&ro.0.join("early"));
    let shares = [format!("--share=rw={}", rw.0.display()), format!("--share=ro={},ro", ro.0.display())];
    let daemon = Daemon::run(dir, false, &shares.each_ref().map(|share| &**share));
    mount_tmpfs(&rw.0.join("late"));
    mount_tmpfs(&ro.0.join("late"));
    let mut mounts = daemon.mounts();
    mounts.sort();
    assert_eq!(mounts.iter().map(|(at, _)| &**at).collect::<Vec<_>>(), ["/", "/ro", "/ro/early", "/rw", "/rw/late"]);
    assert!(mounts[2].1.split(',').any(|option| option == "ro"), "{mounts:?}");
    for mounted in [ro.0.join("early"), ro.0.join("late"), rw.0.join("late")] {
        rustix::mount::unmount(mounted, UnmountFlags::DETACH).unwrap();
    }
}

#[test]
fn mounts_in_the_share_appear_even_later_ones() {
    if !needs_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let share = dir.path().join("share");
    fs::create_dir(&share).unwrap();
    let mounted = SharedMount::new(share.clone());
    mount_tmpfs(&share.join("early"));
    let daemon = Daemon::start_in(dir, false, &[]);
    assert_eq!(daemon.mounts().len(), 2);
    daemon.assert_mounts_are_restricted();
    mount_tmpfs(&share.join("later"));
    for name in ["early", "later"] {
        assert!(daemon.proc("root").join(name).join("file").exists(), "{name}");
        rustix::mount::unmount(share.join(name), UnmountFlags::empty()).unwrap();
        assert!(!daemon.proc("root").join(name).join("file").exists(), "{name}");
    }
    drop(mounted);
}

#[test]
fn when_one_process_ends_so_does_the_other() {
    if !needs_root() && !needs_user_namespaces() {
        return;
    }
    let mut daemon = Daemon::start(false, &[]);
    let server = daemon.server();
    daemon.child.kill().unwrap();
    daemon.wait_until("killed with its parent", |_| Daemon::is_gone(server));

    let mut daemon = Daemon::start(false, &["--supervise=never"]);
    let server = rustix::process::Pid::from_raw(daemon.server() as i32).unwrap();
    rustix::process::kill_process(server, rustix::process::Signal::KILL).unwrap();
    assert_eq!(daemon.child.wait().unwrap().code(), Some(128 + 9));
    assert!(daemon.log().contains("killed by signal 9"), "{}", daemon.log());
}

/// Code that runs under the filter. Each runs in a process of its own, since a filter cannot be removed.
mod filtered {
    use super::*;

    #[test]
    #[ignore = "run by the tests below"]
    fn thread() {
        seccomp::apply(seccomp::Action::Kill, false).unwrap();
        assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7);
        std::process::exit(0);
    }

    #[test]
    #[ignore = "run by the tests below"]
    fn process() {
        seccomp::apply(seccomp::Action::Kill, false).unwrap();
        let _ = Command::new("true").status();
    }

    #[test]
    #[ignore = "run by the tests below"]
    fn socket() {
        seccomp::apply(seccomp::Action::Kill, false).unwrap();
        let _ = UnixStream::pair();
    }

    #[test]
    #[ignore = "run by the tests below"]
    fn logged_socket() {
        seccomp::apply(seccomp::Action::Log, false).unwrap();
        UnixStream::pair().unwrap();
        std::process::exit(0);
    }
}

fn run_filtered(name: &str) -> std::process::ExitStatus {
    let args = ["--ignored", "--exact", "--test-threads=1", &format!("filtered::{name}")];
    Command::new(std::env::current_exe().unwrap()).args(args).stdout(Stdio::null()).status().unwrap()
}

#[test]
fn the_filter_allows_threads_and_kills_at_unlisted_calls() {
    assert_eq!(run_filtered("thread").code(), Some(0));
    assert_eq!(run_filtered("process").signal(), Some(libc::SIGSYS));
    assert_eq!(run_filtered("socket").signal(), Some(libc::SIGSYS));
    assert_eq!(run_filtered("logged_socket").code(), Some(0));
}

#[test]
fn a_directory_out_of_reach_is_not_to_be_created() {
    if !needs_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let program = copy_of_the_daemon(dir.path());
    let ours = dir.path().join("ours");
    fs::create_dir_all(ours.join("in")).unwrap();
    fs::set_permissions(&ours, fs::Permissions::from_mode(0o700)).unwrap();
    for (share, socket) in [(ours.join("in"), dir.path().join("socket")), (dir.path().into(), ours.join("in/socket"))] {
        let mut command = Command::new(&program);
        command.uid(NOBODY).gid(NOBODY).arg("--shared-dir").arg(share).arg("--socket-path").arg(socket);
        let found = command.output().unwrap();
        let said = String::from_utf8(found.stderr).unwrap();
        assert!(!found.status.success() && said.contains("out of reach"), "{said}");
    }
}
