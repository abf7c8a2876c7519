//! A hostile guest against the file system: requests that Linux never sends, and the replies to them.

use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;
use thruway::device;
use thruway::fs::idmap::IdMap;
use thruway::fs::{Config, FileHandles, PassthroughFs, proc_self_fd};
use thruway::fuse::Server;
use thruway::fuse::abi::*;
use thruway_bench::frontend::{Frontend, Options, Token};
use zerocopy::{FromBytes, IntoBytes};

/// A limit on hangs.
const LONG: Duration = Duration::from_secs(100);

/// The id that system calls take to mean "leave it as it is".
const NO_ID: u32 = u32::MAX;

struct Guest {
    frontend: Frontend,
    dir: TempDir,
}

impl Guest {
    fn new(config: Config) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let share = dir.path().join("share");
        std::fs::create_dir(&share).unwrap();
        std::fs::set_permissions(&share, PermissionsExt::from_mode(0o777)).unwrap();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&share, flags, Mode::empty()).unwrap();
        let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), config).unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        std::thread::spawn(move || device::serve(listener, Arc::new(Server::new(fs)), device::Options::default()));
        let frontend = Frontend::connect(&dir.path().join("socket"), Options::default()).unwrap();
        frontend.fuse_init(u64::MAX).unwrap();
        Self { frontend, dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("share").join(name)
    }

    /// Names in the share.
    fn names(&self) -> Vec<std::ffi::OsString> {
        std::fs::read_dir(self.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }

    fn call(&self, opcode: Opcode, node: u64, args: &[u8]) -> Result<Vec<u8>, i32> {
        self.call_as((0, 0), opcode, node, args)
    }

    /// Sends a request as a process of the guest with these ids.
    fn call_as(&self, (uid, gid): (u32, u32), opcode: Opcode, node: u64, args: &[u8]) -> Result<Vec<u8>, i32> {
        let (_, header) = self.frontend.header(opcode as u32, node, args.len());
        let header = InHeader { uid, gid, ..InHeader::read_from_bytes(&header).unwrap() };
        let room = [size_of::<OutHeader>(), 512];
        let sent = self.frontend.submit(1, &[&[header.as_bytes(), args].concat()], &room).unwrap();
        let done = self.frontend.wait_for(1, sent, LONG).unwrap();
        let (out, body) = OutHeader::read_from_prefix(&done.data).unwrap();
        if out.error == 0 { Ok(body.to_vec()) } else { Err(-out.error) }
    }

    /// Sends a request whose reply may take long.
    fn send(&self, opcode: Opcode, node: u64, args: &[u8]) -> Token {
        let (_, header) = self.frontend.header(opcode as u32, node, args.len());
        self.frontend.submit(1, &[&[&header, args].concat()], &[size_of::<OutHeader>(), 512]).unwrap()
    }

    /// Waits for the reply: 0 or an errno.
    fn finish(&self, sent: Token) -> i32 {
        let done = self.frontend.wait_for(1, sent, LONG).unwrap();
        -OutHeader::read_from_prefix(&done.data).unwrap().0.error
    }

    /// Checks that the queue is served while this request is not answered.
    fn is_served_without(&self, sent: Token) {
        self.call(Opcode::Getattr, ROOT_ID, GetattrIn::default().as_bytes()).unwrap();
        let none = self.frontend.wait_for(1, sent, Duration::ZERO).map(drop).unwrap_err();
        assert_eq!(none.raw_os_error(), Some(libc::ETIMEDOUT));
    }

    fn lookup(&self, name: &[u8]) -> Result<u64, i32> {
        let entry = self.call(Opcode::Lookup, ROOT_ID, name)?;
        Ok(EntryOut::read_from_bytes(&entry).unwrap().nodeid)
    }

    fn open(&self, node: u64, flags: i32) -> Result<u64, i32> {
        let open = OpenIn { flags: flags as u32, open_flags: 0 };
        Ok(OpenOut::read_from_bytes(&self.call(Opcode::Open, node, open.as_bytes())?).unwrap().fh)
    }
}

fn with(args: impl IntoBytes + zerocopy::Immutable, rest: &[u8]) -> Vec<u8> {
    [args.as_bytes(), rest].concat()
}

/// A configuration that translates user and group ids.
fn translated(rules: &[&str]) -> Config {
    let map = IdMap::new(&rules.iter().map(|rule| rule.parse().unwrap()).collect::<Vec<_>>()).unwrap();
    Config { uid_map: map.clone(), gid_map: map, ..Default::default() }
}

#[test]
fn no_request_acts_as_the_invalid_id() {
    const SET_ID: u32 = 0o6755;
    let create = CreateIn { flags: libc::O_RDWR as u32, mode: libc::S_IFREG | SET_ID, ..Default::default() };
    let making = [
        (Opcode::Create, with(create, b"n\0")),
        (Opcode::Tmpfile, with(create, b"\0")),
        (Opcode::Mknod, with(MknodIn { mode: libc::S_IFREG | SET_ID, ..Default::default() }, b"n\0")),
        (Opcode::Mkdir, with(MkdirIn { mode: SET_ID, umask: 0 }, b"n\0")),
        (Opcode::Symlink, b"n\0target\0".to_vec()),
    ];
    let all = "4294967295";
    for config in [
        Config::default(),
        translated(&["map:0:100000:65536"]),
        translated(&[&format!("squash-guest:0:1000:{all}")]),
        translated(&[&format!("forbid-guest:0:{all}")]),
    ] {
        let rules = format!("{:?}", config.uid_map);
        let guest = Guest::new(config);
        for who in [(NO_ID, 0), (0, NO_ID), (NO_ID, NO_ID)] {
            for (opcode, args) in &making {
                let made = guest.call_as(who, *opcode, ROOT_ID, args).map(drop);
                // A rule may forbid the other of the two ids first.
                assert!(
                    [Err(libc::EINVAL), Err(libc::EPERM)].contains(&made),
                    "{opcode:?} as {who:?}, {rules}: {made:?}"
                );
            }
            let access = AccessIn { mask: libc::R_OK as u32, padding: 0 };
            let seen = guest.call_as(who, Opcode::Access, ROOT_ID, access.as_bytes());
            assert_eq!(seen, Err(libc::EINVAL), "{who:?}, {rules}");
        }
        assert_eq!(guest.names(), [""; 0], "{rules}");
    }
}

#[test]
fn no_group_is_the_invalid_id() {
    let guest = Guest::new(Config::default());
    let groups = [ExtHeader { size: 16, kind: EXT_GROUPS }.as_bytes(), [1, NO_ID].as_bytes()].concat();
    let mkdir = with(MkdirIn { mode: 0o755, umask: 0 }, &[b"n\0", &groups[..]].concat());
    assert_eq!(guest.call_as((1000, 1000), Opcode::Mkdir, ROOT_ID, &mkdir), Err(libc::EINVAL));
    assert_eq!(guest.names(), [""; 0]);
}

#[test]
fn no_owner_is_the_invalid_id() {
    let squash = translated(&["squash-guest:0:1000:4294967295"]);
    for config in [Config::default(), squash] {
        let guest = Guest::new(config);
        std::fs::write(guest.path("f"), b"").unwrap();
        let node = guest.lookup(b"f\0").unwrap();
        for (valid, uid, gid) in [
            (SetattrValid::UID, NO_ID, 0),
            (SetattrValid::GID, 0, NO_ID),
            (SetattrValid::UID | SetattrValid::GID, NO_ID, 5),
            (SetattrValid::UID | SetattrValid::GID | SetattrValid::MODE, 5, NO_ID),
        ] {
            let set = SetattrIn { valid: valid.bits(), uid, gid, mode: 0o4755, ..Default::default() };
            assert_eq!(guest.call(Opcode::Setattr, node, set.as_bytes()), Err(libc::EINVAL), "{valid:?}");
        }
        assert_eq!(std::fs::metadata(guest.path("f")).unwrap().permissions().mode() & 0o7000, 0);
    }
}

#[test]
fn only_the_modes_of_fallocate_that_linux_sends_are_allowed() {
    let guest = Guest::new(Config::default());
    let contents: Vec<u8> = (0..4 << 12).map(|n| (n >> 12) as u8 + 1).collect();
    std::fs::write(guest.path("f"), &contents).unwrap();
    let node = guest.lookup(b"f\0").unwrap();
    let fh = guest.open(node, libc::O_RDWR).unwrap();
    let (keep, punch, zero) = (libc::FALLOC_FL_KEEP_SIZE, libc::FALLOC_FL_PUNCH_HOLE, libc::FALLOC_FL_ZERO_RANGE);
    let sent = [0, keep, punch | keep, zero, zero | keep];
    let modes = (0..0x200).chain((9..32).map(|bit| (1u32 << bit) as i32));
    for mode in modes.filter(|mode| !sent.contains(mode)) {
        let args = FallocateIn { fh, offset: 1 << 12, length: 1 << 12, mode: mode as u32, padding: 0 };
        assert_eq!(guest.call(Opcode::Fallocate, node, args.as_bytes()), Err(libc::EOPNOTSUPP), "mode {mode:#x}");
    }
    assert_eq!(std::fs::read(guest.path("f")).unwrap(), contents);
    for mode in sent {
        let args = FallocateIn { fh, offset: 3 << 12, length: 2 << 12, mode: mode as u32, padding: 0 };
        let done = guest.call(Opcode::Fallocate, node, args.as_bytes());
        // tmpfs cannot zero a range in place.
        assert!(done.is_ok() || mode & zero != 0 && done == Err(libc::EOPNOTSUPP), "mode {mode:#x}: {done:?}");
    }
}

#[test]
fn a_whiteout_belongs_to_the_translated_user() {
    let guest = Guest::new(translated(&["squash-guest:0:1000:4294967295"]));
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let rename = |from: &str, flags| {
        std::fs::write(guest.path(from), b"").unwrap();
        let names = format!("{from}\0to\0");
        guest.call(Opcode::Rename2, ROOT_ID, &with(Rename2In { newdir: ROOT_ID, flags, padding: 0 }, names.as_bytes()))
    };
    for flags in (3..32).map(|bit| 1 << bit) {
        assert_eq!(rename("f", flags), Err(libc::EINVAL), "{flags:#x}");
    }
    // The kernel puts a device node in the place of the renamed file, for overlayfs.
    rename("f", libc::RENAME_WHITEOUT).unwrap();
    assert_eq!(std::fs::metadata(guest.path("f")).unwrap().uid(), 1000);
}

/// A lease on a file (fcntl(2), F_SETLEASE). Other opens of the file wait until this is dropped.
struct Lease(std::fs::File);

impl Lease {
    /// `None` if the file system has no leases.
    fn take(path: &std::path::Path, kind: i32) -> Option<Self> {
        // SAFETY: no memory is involved. The signal says that another process wants the file. It would end this
        // process.
        unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
        let file = std::fs::OpenOptions::new().read(true).write(kind == libc::F_WRLCK).open(path).unwrap();
        // SAFETY: as above.
        let taken = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) } == 0;
        (taken || std::io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL)).then(|| {
            assert!(taken, "{}", std::io::Error::last_os_error());
            Self(file)
        })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // SAFETY: no memory is involved.
        unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
    }
}

/// Flags of this process's open files at `path`. The daemon is a part of this process.
fn flags_of(path: &std::path::Path) -> Vec<i32> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap());
    let here = open.filter(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target == path));
    let fds = here.map(|entry| entry.file_name().to_str().unwrap().parse().unwrap());
    // SAFETY: no memory is involved.
    fds.map(|fd: i32| unsafe { libc::fcntl(fd, libc::F_GETFL) }).filter(|flags| flags & libc::O_PATH == 0).collect()
}

#[test]
fn a_lease_delays_only_its_own_file() {
    let open = |flags: i32| OpenIn { flags: flags as u32, open_flags: 0 }.as_bytes().to_vec();
    let size = SetattrIn { valid: SetattrValid::SIZE.bits(), size: 3, ..Default::default() };
    for (opcode, args, after) in [
        (Opcode::Open, open(libc::O_RDWR), "contents"),
        (Opcode::Open, open(libc::O_RDONLY), "contents"),
        (Opcode::Open, open(libc::O_RDWR | libc::O_TRUNC), ""),
        (Opcode::Setattr, size.as_bytes().to_vec(), "con"),
    ] {
        let guest = Guest::new(Config::default());
        let path = guest.path("f");
        std::fs::write(&path, "contents").unwrap();
        let node = guest.lookup(b"f\0").unwrap();
        let Some(lease) = Lease::take(&path, libc::F_WRLCK) else { return };
        let sent = guest.send(opcode, node, &args);
        guest.is_served_without(sent);
        let create = CreateIn { flags: (libc::O_RDWR | libc::O_TRUNC) as u32, mode: 0o600, ..Default::default() };
        assert_eq!(guest.call(Opcode::Create, ROOT_ID, &with(create, b"f\0")), Err(libc::ESTALE));
        let nonblock = open(libc::O_RDWR | libc::O_NONBLOCK);
        assert_eq!(guest.call(Opcode::Open, node, &nonblock), Err(libc::EAGAIN));
        drop(lease);
        assert_eq!(guest.finish(sent), 0, "{opcode:?}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), after);
        let fh = guest.open(node, libc::O_RDWR | libc::O_NONBLOCK).unwrap();
        assert!(flags_of(&path).iter().all(|flags| flags & libc::O_NONBLOCK == 0));
        guest.call(Opcode::Release, node, ReleaseIn { fh, ..Default::default() }.as_bytes()).unwrap();
    }
}

#[test]
fn a_lock_does_not_wait_for_a_lease() {
    let guest = Guest::new(Config { posix_lock: true, ..Default::default() });
    std::fs::write(guest.path("f"), "contents").unwrap();
    let node = guest.lookup(b"f\0").unwrap();
    let fh = guest.open(node, libc::O_RDONLY).unwrap();
    let Some(_lease) = Lease::take(&guest.path("f"), libc::F_RDLCK) else { return };
    let lk = FileLock { start: 0, end: 9, kind: libc::F_RDLCK as u32, pid: 1 };
    guest.call(Opcode::Setlk, node, LkIn { fh, owner: 1, lk, ..Default::default() }.as_bytes()).unwrap();
}

#[test]
fn a_pipe_is_not_opened() {
    let guest = Guest::new(Config::default());
    let pipe = MknodIn { mode: libc::S_IFIFO | 0o600, ..Default::default() };
    guest.call(Opcode::Mknod, ROOT_ID, &with(pipe, b"p\0")).unwrap();
    let node = guest.lookup(b"p\0").unwrap();
    for flags in [libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR, libc::O_WRONLY | libc::O_TRUNC] {
        assert_eq!(guest.open(node, flags), Err(libc::EBADF));
        let create = CreateIn { flags: flags as u32, mode: 0o600, ..Default::default() };
        let created = guest.call(Opcode::Create, ROOT_ID, &with(create, b"p\0"));
        assert_eq!(created, Err(libc::EBADF));
    }
    let size = SetattrIn { valid: SetattrValid::SIZE.bits(), size: 3, ..Default::default() };
    assert_eq!(guest.call(Opcode::Setattr, node, size.as_bytes()), Err(libc::EINVAL));
}

/// A daemon in a process of its own, without a sandbox.
struct Process {
    child: std::process::Child,
    frontend: Frontend,
    dir: TempDir,
}

impl Process {
    fn start(args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (share, socket) = (dir.path().join("share"), dir.path().join("socket"));
        std::fs::create_dir(&share).unwrap();
        std::fs::write(share.join("f"), "contents").unwrap();
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_thruwayd"));
        command.args(["--sandbox", "none", "--shared-dir"]).arg(&share).arg("--socket-path").arg(&socket).args(args);
        command.stderr(std::fs::File::create(dir.path().join("log")).unwrap());
        let child = command.spawn().unwrap();
        let end = std::time::Instant::now() + LONG;
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            assert!(std::time::Instant::now() < end, "it does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        let frontend = Frontend::connect(&socket, Options::default()).unwrap();
        frontend.fuse_init(u64::MAX).unwrap();
        Self { child, frontend, dir }
    }

    fn call<T: FromBytes>(&self, opcode: Opcode, node: u64, args: &[u8]) -> Result<T, i32> {
        let out = self.frontend.request(1, opcode as u32, node, args, &[], 512)?;
        Ok(T::read_from_prefix(&out).ok().unwrap().0)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Descriptors that are only kept give way to files that the guest opens. Whoever closes a file can open another one.
#[test]
fn kept_descriptors_give_way_at_the_limit() {
    const LIMIT: usize = 400;
    let limit = format!("--rlimit-nofile={LIMIT}");
    let daemon = Process::start(&["--keep-alive", "--num-request-queues=1", &limit]);
    // Some are the test's, which the daemon has inherited.
    let own = std::fs::read_dir(format!("/proc/{}/fd", daemon.child.id())).unwrap().count();
    let names: Vec<_> = (0..LIMIT).map(|n| format!("many-{n}\0")).collect();
    for name in &names {
        std::fs::write(daemon.dir.path().join("share").join(name.trim_end_matches('\0')), "").unwrap();
    }
    let lookup = |name: &String| daemon.call::<EntryOut>(Opcode::Lookup, ROOT_ID, name.as_bytes()).unwrap().nodeid;
    let nodes: Vec<_> = names.iter().map(lookup).collect();
    let opening = |node| daemon.call::<OpenOut>(Opcode::Open, node, OpenIn::default().as_bytes());
    let mut fhs = Vec::new();
    let full = loop {
        match opening(nodes[fhs.len()]) {
            Ok(out) => fhs.push(out.fh),
            Err(errno) => break errno,
        }
    };
    assert_eq!(full, libc::ENFILE);
    // No more than a few for a mount or a deputy come to the daemon's own.
    let most = LIMIT - LIMIT / 4;
    assert!((most - own - 10..most).contains(&fhs.len()), "{} and {own}", fhs.len());
    for n in 0..100 {
        let release = ReleaseIn { fh: fhs[n], ..Default::default() };
        daemon.call::<[u8; 0]>(Opcode::Release, nodes[n], release.as_bytes()).unwrap();
        fhs.push(opening(nodes[fhs.len()]).unwrap_or_else(|errno| panic!("{n}: {errno}")).fh);
        assert_eq!(opening(nodes[n]).map(drop), Err(libc::ENFILE));
    }
    // The log has a thread of its own.
    let end = std::time::Instant::now() + LONG;
    let log = loop {
        let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
        if log.contains("--rlimit-nofile)") || std::time::Instant::now() > end {
            break log;
        }
    };
    let lines: Vec<_> = log.lines().filter(|line| line.contains("--rlimit-nofile)")).collect();
    assert!(lines.len() == 1 && lines[0].contains(&format!(": {most} of {LIMIT} are in use")), "{log}");
}

#[test]
fn a_guest_that_opens_too_many_files_is_still_served() {
    const LIMIT: usize = 400;
    let daemon = Process::start(&["--keep-alive", &format!("--rlimit-nofile={LIMIT}")]);
    let entry: EntryOut = daemon.call(Opcode::Lookup, ROOT_ID, b"f\0").unwrap();
    let open = OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
    let opening = || daemon.call::<OpenOut>(Opcode::Open, entry.nodeid, open.as_bytes());
    let mut fhs = Vec::new();
    let full = loop {
        match opening() {
            Ok(out) => fhs.push(out.fh),
            Err(errno) => break errno,
        }
    };
    assert_eq!(full, libc::ENFILE);
    let open_files = std::fs::read_dir(format!("/proc/{}/fd", daemon.child.id())).unwrap().count();
    assert!((LIMIT / 2..LIMIT * 4 / 5).contains(&open_files), "{open_files} with {} of the guest", fhs.len());
    let opendir = daemon.call::<OpenOut>(Opcode::Opendir, ROOT_ID, OpenIn::default().as_bytes());
    assert_eq!(opendir.map(drop), Err(libc::ENFILE));
    let create = CreateIn { flags: libc::O_RDWR as u32, mode: 0o600, ..Default::default() };
    let created = daemon.call::<EntryOut>(Opcode::Create, ROOT_ID, &with(create, b"n\0"));
    assert_eq!(created.map(drop), Err(libc::ENFILE));
    assert!(!daemon.dir.path().join("share/n").exists());
    // Everything else still works.
    daemon.call::<AttrOut>(Opcode::Getattr, entry.nodeid, GetattrIn::default().as_bytes()).unwrap();
    daemon.call::<EntryOut>(Opcode::Lookup, ROOT_ID, b"f\0").unwrap();
    let read = ReadIn { fh: fhs[0], size: 8, ..Default::default() };
    assert_eq!(&daemon.call::<[u8; 8]>(Opcode::Read, entry.nodeid, read.as_bytes()).unwrap(), b"contents");
    let release = ReleaseIn { fh: fhs[0], ..Default::default() };
    daemon.call::<[u8; 0]>(Opcode::Release, entry.nodeid, release.as_bytes()).unwrap();
    opening().unwrap();
}

/// A rename holds both directories. If a file were one of them, a rename over that file would wait for itself.
#[test]
fn a_file_is_no_directory_of_a_rename() {
    let guest = Guest::new(Config { inode_file_handles: FileHandles::Prefer, ..Default::default() });
    std::fs::write(guest.path("f"), "f").unwrap();
    let node = guest.lookup(b"f\0").unwrap();
    let over_itself = with(RenameIn { newdir: ROOT_ID }, b"a\0f\0");
    assert_eq!(guest.call(Opcode::Rename, node, &over_itself), Err(libc::ENOTDIR));
    let away = with(RenameIn { newdir: node }, b"f\0a\0");
    assert_eq!(guest.call(Opcode::Rename, ROOT_ID, &away), Err(libc::ENOTDIR));
    assert_eq!(guest.names(), ["f"]);
}
