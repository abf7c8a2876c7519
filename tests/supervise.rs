//! Workers that are killed under a guest, which must not notice.

mod common;
mod windows;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{copy_of_the_daemon, family, thruwayd, wait_until};
use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use thruway::fuse::abi::*;
use thruway::record::{self, LeftAs, Place, Record};
use thruway_bench::frontend::{Completion, Frontend, Options, Token};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostTransferStateDirection, VhostTransferStatePhase};
use zerocopy::{FromBytes, IntoBytes};

/// A limit on hangs. 15 s were too few for a traced process on a busy machine.
const LONG: Duration = Duration::from_secs(120);

/// The log has it when a worker is ready.
const LISTENS: &str = "Waiting for vhost-user socket connection";

/// A daemon with a supervisor.
struct Daemon {
    child: Child,
    dir: TempDir,
}

impl Daemon {
    fn start(args: &[&str]) -> Self {
        Self::run(thruwayd(), tempfile::tempdir().unwrap(), args)
    }

    fn run(mut program: Command, dir: TempDir, args: &[&str]) -> Self {
        let share = dir.path().join("share");
        fs::create_dir(&share).unwrap();
        fs::set_permissions(&share, fs::Permissions::from_mode(0o777)).unwrap();
        program.stderr(fs::File::create(dir.path().join("log")).unwrap());
        program.arg("--shared-dir").arg(dir.path().join("share")).arg("--socket-path").arg(dir.path().join("socket"));
        let mut daemon = Self { child: program.arg("--supervise").args(args).spawn().unwrap(), dir };
        wait_until("listens", || daemon.log().contains(LISTENS) || daemon.child.try_wait().unwrap().is_some());
        assert!(daemon.child.try_wait().unwrap().is_none());
        daemon
    }

    fn share(&self, name: &str) -> PathBuf {
        self.dir.path().join("share").join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    fn connect(&self) -> Frontend {
        let guest = Frontend::connect(&self.dir.path().join("socket"), Options::default()).unwrap();
        let flags = InitFlags::DO_READDIRPLUS | InitFlags::FLOCK_LOCKS | InitFlags::POSIX_LOCKS | InitFlags::INIT_EXT;
        let flags = flags | InitFlags::EXPORT_SUPPORT;
        guest.fuse_init(flags.bits()).unwrap();
        guest
    }

    /// The process that was started, the supervisor and, if there is one, the worker.
    fn family(&self) -> Vec<i32> {
        family(self.child.id()).into_iter().map(|pid| pid as i32).collect()
    }

    /// The only grandchild: after an upgrade there is another supervisor beside the first.
    fn find_worker(&self) -> Option<i32> {
        children(self.child.id()).into_iter().find_map(|child| Some(*children(child).first()? as i32))
    }

    fn worker(&self) -> i32 {
        let mut worker = None;
        wait_until("there is a worker", || {
            worker = self.find_worker();
            worker.is_some()
        });
        worker.unwrap()
    }

    /// One that can be replaced by another: `dir`/thruwayd.
    fn replaceable(args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let program = Command::new(copy_of_the_daemon(dir.path()));
        Self::run(program, dir, args)
    }

    /// Puts a shell script in the daemon's place. $real is the daemon. Another process makes it: see
    /// `copy_of_the_daemon`.
    fn replace_by(&self, script: &str) {
        let text = format!("#!/bin/sh\nreal={}\n{script}\n", env!("CARGO_BIN_EXE_thruwayd"));
        let mut shell = Command::new("sh");
        shell.args(["-ec", "printf %s \"$1\" >new; chmod 755 new; mv new thruwayd", "sh", &text]);
        assert!(shell.current_dir(self.dir.path()).status().unwrap().success());
    }

    /// Puts another copy of the daemon in its place.
    fn replace(&self) {
        let new = tempfile::tempdir_in(self.dir.path()).unwrap();
        fs::rename(copy_of_the_daemon(new.path()), self.dir.path().join("thruwayd")).unwrap();
    }

    /// What an upgrade changes.
    fn passed(&self) -> Option<String> {
        let environ = fs::read(format!("/proc/{}/environ", self.child.id())).unwrap();
        let mut all = environ.split(|byte| *byte == 0).map(String::from_utf8_lossy);
        all.find_map(|one| Some(one.strip_prefix("THRUWAY_UPGRADE=")?.to_owned()))
    }

    /// Whether the daemon has become the program that is at its path now.
    fn upgrade(&self) -> bool {
        self.upgrade_during(|| ())
    }

    fn upgrade_during(&self, mut work: impl FnMut()) -> bool {
        let before = self.passed();
        let pid = self.child.id();
        let bits = |name: &str| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            u64::from_str_radix(line.trim_start_matches(':').trim(), 16).unwrap() & 1 << (libc::SIGUSR2 - 1) != 0
        };
        wait_until("it can upgrade", || bits("SigBlk"));
        kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::USR2).unwrap();
        let mut done = false;
        wait_until("the upgrade ends", || {
            work();
            let waits = bits("ShdPnd") || !bits("SigBlk");
            // Between the two programs there is none.
            done = self.passed().is_some_and(|passed| Some(&passed) != before.as_ref());
            done || !waits
        });
        done
    }

    fn kill(&self) {
        kill_process(Pid::from_raw(self.worker()).unwrap(), Signal::KILL).unwrap();
    }

    /// Descriptors of the worker, which are the supervisor's too.
    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.worker())).unwrap().count()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn children(pid: u32) -> Vec<u32> {
    let all = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    all.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// Room for a reply's body in bytes.
const ROOM: usize = 8192;

fn ask(guest: &Frontend, opcode: Opcode, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
    guest.request(1, opcode as u32, node, body, &[], ROOM)
}

fn lookup(guest: &Frontend, parent: u64, name: &[u8]) -> Result<EntryOut, i32> {
    Ok(EntryOut::read_from_prefix(&ask(guest, Opcode::Lookup, parent, name)?).unwrap().0)
}

fn open(guest: &Frontend, node: u64, flags: i32) -> u64 {
    let args = OpenIn { flags: flags as u32, open_flags: 0 };
    OpenOut::read_from_prefix(&ask(guest, Opcode::Open, node, args.as_bytes()).unwrap()).unwrap().0.fh
}

fn read(guest: &Frontend, node: u64, fh: u64) -> Result<Vec<u8>, i32> {
    ask(guest, Opcode::Read, node, ReadIn { fh, size: 4096, ..Default::default() }.as_bytes())
}

fn release(guest: &Frontend, node: u64, fh: u64) {
    ask(guest, Opcode::Release, node, ReleaseIn { fh, ..Default::default() }.as_bytes()).unwrap();
}

fn setlk(guest: &Frontend, node: u64, fh: u64, flags: u32) -> Result<Vec<u8>, i32> {
    let lk = FileLock { start: 0, end: i64::MAX as u64, kind: libc::F_WRLCK as u32, pid: 1 };
    ask(guest, Opcode::Setlk, node, LkIn { fh, owner: 7, lk, lk_flags: flags, padding: 0 }.as_bytes())
}

fn forget(guest: &Frontend, node: u64) {
    let args = ForgetIn { nlookup: 1 };
    let (_, header) = guest.header(Opcode::Forget as u32, node, args.as_bytes().len());
    let token = guest.submit(0, &[&header, args.as_bytes()], &[]).unwrap();
    guest.wait_for(0, token, LONG).unwrap();
    assert_eq!(ask(guest, Opcode::Getattr, node, GetattrIn::default().as_bytes()).err(), Some(libc::ESTALE));
}

#[test]
fn forgotten_files_stay_for_nfs() {
    let daemon = Daemon::start(&["--inode-file-handles", "mandatory", "--nfs-export"]);
    for name in ["kept", "removed"] {
        fs::write(daemon.share(name), "contents").unwrap();
    }
    let guest = daemon.connect();
    let [kept, removed] = [&b"kept\0"[..], b"removed\0"].map(|name| lookup(&guest, ROOT_ID, name).unwrap().nodeid);
    for node in [kept, removed] {
        forget(&guest, node);
    }
    fs::remove_file(daemon.share("removed")).unwrap();
    for _ in 0..2 {
        assert_eq!(lookup(&guest, kept, b".\0").unwrap().nodeid, kept);
        assert_eq!(lookup(&guest, removed, b".\0").err(), Some(libc::ESTALE));
        forget(&guest, kept);
        daemon.kill();
    }
    fs::write(daemon.share("new"), "contents").unwrap();
    assert!(lookup(&guest, ROOT_ID, b"new\0").unwrap().nodeid > removed);
}

fn a_guest_does_not_notice(handles: &str, interrupt: fn(&Daemon)) {
    let daemon = Daemon::replaceable(&["--inode-file-handles", handles, "--posix-lock", "--flock"]);
    fs::create_dir(daemon.share("dir")).unwrap();
    fs::write(daemon.share("dir/file"), "contents").unwrap();
    fs::write(daemon.share("dir/listed"), "as listed").unwrap();
    let guest = daemon.connect();
    let dir = lookup(&guest, ROOT_ID, b"dir\0").unwrap().nodeid;
    let file = lookup(&guest, dir, b"file\0").unwrap().nodeid;
    let fh = open(&guest, file, libc::O_RDWR);
    interrupt(&daemon);
    assert_eq!(read(&guest, file, fh).unwrap(), b"contents");
    assert_eq!(lookup(&guest, dir, b"file\0").unwrap().nodeid, file);

    // What READDIRPLUS has named, a position in a directory, a file without a name, and locks.
    let listing = {
        let args = OpenIn::default();
        OpenOut::read_from_prefix(&ask(&guest, Opcode::Opendir, dir, args.as_bytes()).unwrap()).unwrap().0.fh
    };
    let list = |offset| {
        let args = ReadIn { fh: listing, offset, size: ROOM as u32, ..Default::default() };
        ask(&guest, Opcode::Readdirplus, dir, args.as_bytes()).unwrap()
    };
    let all = list(0);
    let mut entries = &all[..];
    let (mut listed, mut first) = (0, 0);
    while !entries.is_empty() {
        let (entry, rest) = EntryOut::read_from_prefix(entries).unwrap();
        let (dirent, rest) = Dirent::read_from_prefix(rest).unwrap();
        let (name, _) = rest.split_at(dirent.namelen as usize);
        if name == b"listed" {
            listed = entry.nodeid;
        }
        if first == 0 {
            first = dirent.off;
        }
        entries = &rest[(dirent.namelen as usize).next_multiple_of(8)..];
    }
    assert!(setlk(&guest, file, fh, 0).is_ok() && setlk(&guest, file, fh, LK_FLOCK).is_ok());
    ask(&guest, Opcode::Unlink, dir, b"file\0").unwrap();
    interrupt(&daemon);
    assert_eq!(read(&guest, file, fh).unwrap(), b"contents");
    let attr = ask(&guest, Opcode::Getattr, file, GetattrIn::default().as_bytes()).unwrap();
    assert_eq!(AttrOut::read_from_prefix(&attr).unwrap().0.attr.nlink, 0);
    let attr = ask(&guest, Opcode::Getattr, listed, GetattrIn::default().as_bytes()).unwrap();
    assert_eq!(AttrOut::read_from_prefix(&attr).unwrap().0.attr.size, 9);
    assert!(list(first).len() < all.len());
    // The locks are there: no other description of the same file gets them.
    let path = format!("/proc/{}/fd/{}", daemon.worker(), fd_of_deleted(&daemon));
    let host = fs::File::options().read(true).write(true).open(path).unwrap();
    for lock in [flock::<&fs::File>, fcntl_lock] {
        assert_eq!(lock(&host, FlockOperation::NonBlockingLockExclusive), Err(rustix::io::Errno::WOULDBLOCK));
    }
    assert_eq!(lookup(&guest, dir, b"file\0").unwrap_err(), libc::ENOENT);
    release(&guest, file, fh);
    assert_eq!(read(&guest, file, fh).unwrap_err(), libc::EBADF);
    assert!(!daemon.log().contains("ERROR"), "{}", daemon.log());
}

fn upgrade(daemon: &Daemon) {
    daemon.replace();
    assert!(daemon.upgrade());
}

/// A worker's descriptor of a file that has no name any more.
fn fd_of_deleted(daemon: &Daemon) -> String {
    let fds = fs::read_dir(format!("/proc/{}/fd", daemon.worker())).unwrap().flatten();
    let mut deleted = fds.filter(|fd| {
        fs::read_link(fd.path())
            .is_ok_and(|to| to.to_string_lossy().contains("/file") && to.to_string_lossy().ends_with("(deleted)"))
    });
    deleted.next().unwrap().file_name().into_string().unwrap()
}

#[test]
fn a_guest_does_not_notice_with_descriptors() {
    a_guest_does_not_notice("never", Daemon::kill);
}

#[test]
fn a_guest_does_not_notice_with_handles() {
    a_guest_does_not_notice("prefer", Daemon::kill);
}

/// Its user namespace has a process file system too.
#[test]
fn an_ordinary_users_daemon_goes_on() {
    if !rustix::process::geteuid().is_root() {
        // The other tests are of such a daemon then.
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let mut program = Command::new(copy_of_the_daemon(dir.path()));
    program.uid(65534).gid(65534);
    let daemon = Daemon::run(program, dir, &[]);
    fs::write(daemon.share("file"), "contents").unwrap();
    let guest = daemon.connect();
    let node = lookup(&guest, ROOT_ID, b"file\0").unwrap().nodeid;
    let fh = open(&guest, node, libc::O_RDONLY);
    // The supervisor's memory is out of its worker's reach: /proc gives it to root.
    assert_eq!(fs::metadata(format!("/proc/{}/mem", daemon.family()[1])).unwrap().uid(), 0);
    for interrupt in [Daemon::kill, upgrade, Daemon::kill, upgrade] {
        interrupt(&daemon);
        assert_eq!(read(&guest, node, fh).unwrap(), b"contents");
        assert_eq!(lookup(&guest, ROOT_ID, b"file\0").unwrap().nodeid, node);
    }
}

/// The daemon in a user namespace where a part of /proc is hidden, as in a container. `None` if this host has no such
/// namespaces.
fn contained(args: &[&str]) -> Option<Command> {
    let mut program = Command::new("unshare");
    let hide = "mount --bind /dev/null /proc/timer_list && exec unshare --user --map-root-user --mount \"$@\"";
    program.args(["--user", "--map-root-user", "--mount", "sh", "-c", hide, "sh"]);
    let possible = Command::new(program.get_program()).args(program.get_args()).arg("true").status();
    if !possible.is_ok_and(|status| status.success()) {
        eprintln!("skipped: needs user namespaces");
        return None;
    }
    program.arg(env!("CARGO_BIN_EXE_thruwayd")).args(args);
    Some(program)
}

#[test]
fn where_the_host_gives_no_supervisor_the_daemon_serves_alone() {
    let Some(program) = contained(&[]) else { return };
    let daemon = Daemon::run(program, tempfile::tempdir().unwrap(), &["--supervise=auto"]);
    assert!(daemon.log().contains("another process will not go on if this daemon is killed: cannot make a process"));
    assert_eq!((daemon.family().len(), daemon.find_worker()), (2, None));
    fs::write(daemon.share("file"), "contents").unwrap();
    assert!(lookup(&daemon.connect(), ROOT_ID, b"file\0").is_ok());

    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let refused = contained(&["--supervise", "--shared-dir", "/", "--socket-path", socket.to_str().unwrap()]);
    let refused = refused.unwrap().output().unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(said.contains("thruwayd: cannot make a process file system for --supervise"), "{said}");
}

#[test]
fn a_supervisor_is_there_by_default() {
    let daemon = Daemon::start(&["--supervise=auto"]);
    fs::write(daemon.share("file"), "contents").unwrap();
    let guest = daemon.connect();
    let node = lookup(&guest, ROOT_ID, b"file\0").unwrap().nodeid;
    let fh = open(&guest, node, libc::O_RDONLY);
    daemon.kill();
    assert_eq!(read(&guest, node, fh).unwrap(), b"contents");
    drop(guest);
    let alone = Daemon::start(&["--supervise=never"]);
    assert_eq!(alone.find_worker(), None);
}

#[test]
fn locks_are_held_all_the_time() {
    let daemon = Daemon::replaceable(&["--flock", "--posix-lock"]);
    fs::write(daemon.share("file"), "").unwrap();
    let guest = daemon.connect();
    let node = lookup(&guest, ROOT_ID, b"file\0").unwrap().nodeid;
    let fh = open(&guest, node, libc::O_RDWR);
    setlk(&guest, node, fh, LK_FLOCK).unwrap();
    let host = fs::File::open(daemon.share("file")).unwrap();
    let refused = || flock(&host, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK);
    assert!(refused());
    let worker = daemon.worker();
    daemon.kill();
    wait_until("another worker", || daemon.find_worker().is_some_and(|pid| pid != worker) || !refused());
    assert!(refused());
    assert!(daemon.upgrade_during(|| assert!(refused())) && refused());
    release(&guest, node, fh);
    assert!(!refused());
}

/// The guest opens "file" and waits for a lock that the host has. Returns its nodeid and `fh`, who holds the lock, and
/// the request.
fn wait_for_lock(daemon: &Daemon, guest: &Frontend) -> (u64, u64, fs::File, Token) {
    let node = lookup(guest, ROOT_ID, b"file\0").unwrap().nodeid;
    let fh = open(guest, node, libc::O_RDWR);
    let host = fs::File::open(daemon.share("file")).unwrap();
    flock(&host, FlockOperation::LockExclusive).unwrap();
    let lk = FileLock { start: 0, end: i64::MAX as u64, kind: libc::F_WRLCK as u32, pid: 1 };
    let body = LkIn { fh, owner: 7, lk, lk_flags: LK_FLOCK, padding: 0 };
    let waits = submit(guest, Opcode::Setlkw, node, body.as_bytes());
    (node, fh, host, waits)
}

#[test]
fn a_request_that_waits_goes_on() {
    let daemon = Daemon::start(&["--flock"]);
    fs::write(daemon.share("file"), "").unwrap();
    let guest = daemon.connect();
    let (_, _, host, token) = wait_for_lock(&daemon, &guest);
    // Others are served meanwhile.
    for _ in 0..3 {
        lookup(&guest, ROOT_ID, b"file\0").unwrap();
        daemon.kill();
    }
    lookup(&guest, ROOT_ID, b"file\0").unwrap();
    flock(&host, FlockOperation::Unlock).unwrap();
    assert_eq!(reply(&guest, token), Ok(Vec::new()));
}

#[test]
fn nothing_is_left_open() {
    let daemon = Daemon::start(&[]);
    fs::write(daemon.share("file"), "contents").unwrap();
    let guest = daemon.connect();
    let once = || {
        let node = lookup(&guest, ROOT_ID, b"file\0").unwrap().nodeid;
        let fh = open(&guest, node, libc::O_RDWR);
        daemon.kill();
        assert_eq!(read(&guest, node, fh).unwrap(), b"contents");
        release(&guest, node, fh);
        lookup(&guest, ROOT_ID, b"file\0").unwrap();
    };
    once();
    // A descriptor that is only kept is closed after a second or two.
    let mut before = 0;
    wait_until("settles", || {
        sleep(Duration::from_secs(2));
        std::mem::replace(&mut before, daemon.descriptors()) == daemon.descriptors()
    });
    for _ in 0..10 {
        once();
    }
    wait_until("closes what is not used", || daemon.descriptors() <= before);
}

#[test]
fn a_frontend_that_leaves_ends_all() {
    let mut daemon = Daemon::start(&[]);
    let guest = daemon.connect();
    daemon.kill();
    assert!(lookup(&guest, ROOT_ID, b"none\0").is_err());
    drop(guest);
    assert!(daemon.child.wait().unwrap().success());
}

#[test]
fn another_frontend_finds_nothing_of_the_first() {
    let daemon = Daemon::start(&["--keep-alive"]);
    fs::write(daemon.share("file"), "contents").unwrap();
    let mut last = 0;
    for _ in 0..3 {
        let guest = daemon.connect();
        assert!(ask(&guest, Opcode::Getattr, 1 << 20 | last, GetattrIn::default().as_bytes()).is_err());
        last = lookup(&guest, ROOT_ID, b"file\0").unwrap().nodeid;
        daemon.kill();
        lookup(&guest, ROOT_ID, b"file\0").unwrap();
        drop(guest);
        daemon.kill();
    }
}

#[test]
fn a_daemon_that_cannot_serve_gives_up() {
    let mut daemon = Daemon::start(&[]);
    let mut status = None;
    wait_until("gives up", || {
        if let Some(worker) = daemon.find_worker() {
            let _ = kill_process(Pid::from_raw(worker).unwrap(), Signal::KILL);
        }
        status = daemon.child.try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(status.unwrap().code(), Some(128 + libc::SIGKILL));
    assert!(daemon.log().contains("were killed one after the other"), "{}", daemon.log());
}

fn submit(guest: &Frontend, opcode: Opcode, node: u64, body: &[u8]) -> Token {
    let (_, head) = guest.header(opcode as u32, node, body.len());
    let room = [size_of::<OutHeader>(), ROOM];
    guest.submit(1, &[&[&head, body].concat()], &room).unwrap()
}

fn reply(guest: &Frontend, token: Token) -> Result<Vec<u8>, i32> {
    decode(&guest.wait_for(1, token, LONG).unwrap())
}

fn decode(done: &Completion) -> Result<Vec<u8>, i32> {
    // FORGET has no reply.
    let Ok((header, body)) = OutHeader::read_from_prefix(&done.data) else { return Ok(Vec::new()) };
    if header.error == 0 { Ok(body.to_vec()) } else { Err(-header.error) }
}

fn is_known(guest: &Frontend, node: u64) -> bool {
    ask(guest, Opcode::Getattr, node, GetattrIn::default().as_bytes()).is_ok()
}

/// The worker's thread of a queue, stopped.
struct Traced {
    pid: i32,
    thread: i32,
}

impl Traced {
    fn stop(pid: i32) -> Self {
        let mut found = None;
        wait_until("the queue has its thread", || {
            let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
            let mut named = tasks.filter(|task| {
                fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.starts_with("thruway-q"))
            });
            found = named.next().and_then(|task| task.file_name().to_str()?.parse().ok());
            found.is_some()
        });
        let thread = found.unwrap();
        let this = Self { pid, thread };
        this.ptrace(libc::PTRACE_SEIZE);
        this.ptrace(libc::PTRACE_INTERRUPT);
        assert!(this.wait());
        this
    }

    fn ptrace(&self, how: u32) -> bool {
        // SAFETY: no such request takes memory.
        unsafe { libc::ptrace(how, self.thread, 0, 0) == 0 }
    }

    /// Waits for a stop. False: the thread has ended.
    fn wait(&self) -> bool {
        let mut status = 0;
        // SAFETY: `status` is an int.
        let pid = unsafe { libc::waitpid(self.thread, &raw mut status, libc::__WALL) };
        pid == self.thread && libc::WIFSTOPPED(status)
    }

    /// Has it stopped within the next moments? It may sleep instead.
    fn has_stopped(&self) -> bool {
        let mut status = 0;
        // SAFETY: `status` is an int.
        let pid = unsafe { libc::waitpid(self.thread, &raw mut status, libc::__WALL | libc::WNOHANG) };
        pid == self.thread && libc::WIFSTOPPED(status)
    }

    /// Whether it waits in a system call, as it does when its queue is empty.
    fn sleeps(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/task/{}/stat", self.pid, self.thread)).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
    }

    fn kill(&self) {
        kill_process(Pid::from_raw(self.pid).unwrap(), Signal::KILL).unwrap();
        while self.wait() {}
    }
}

/// An operation that is killed at each of its steps, and what must have come of it.
struct Operation {
    name: &'static str,
    opcode: Opcode,
    node: u64,
    body: Vec<u8>,
    /// What the guest must get and what the share must be like.
    check: Box<Check>,
}

type Check = dyn Fn(&Frontend, Result<Vec<u8>, i32>);

fn operation(
    name: &'static str,
    (opcode, node): (Opcode, u64),
    parts: &[&[u8]],
    check: impl Fn(&Frontend, Result<Vec<u8>, i32>) + 'static,
) -> Operation {
    Operation { name, opcode, node, body: parts.concat(), check: Box::new(check) }
}

type Prepare = fn(&Frontend, &Path, usize) -> Operation;

fn entry_of(reply: Result<Vec<u8>, i32>) -> EntryOut {
    EntryOut::read_from_prefix(&reply.unwrap()).unwrap().0
}

fn name(kind: &str, n: usize) -> (String, Vec<u8>) {
    let name = format!("{kind}{n}");
    let bytes = format!("{name}\0").into_bytes();
    (name, bytes)
}

const OPERATIONS: &[Prepare] = &[
    |_, share, n| {
        let (name, bytes) = name("mkdir", n);
        let args = MkdirIn { mode: 0o750, umask: 0 };
        let path = share.join(name);
        operation("MKDIR", (Opcode::Mkdir, ROOT_ID), &[args.as_bytes(), &bytes], move |_, reply| {
            assert_eq!(entry_of(reply).attr.mode, libc::S_IFDIR | 0o750);
            assert!(path.is_dir());
        })
    },
    |_, share, n| {
        let (name, bytes) = name("mknod", n);
        let args = MknodIn { mode: libc::S_IFIFO | 0o600, ..Default::default() };
        let path = share.join(name);
        operation("MKNOD", (Opcode::Mknod, ROOT_ID), &[args.as_bytes(), &bytes], move |_, reply| {
            entry_of(reply);
            assert!(path.metadata().unwrap().file_type().is_fifo());
        })
    },
    |_, share, n| {
        let (name, bytes) = name("symlink", n);
        let path = share.join(name);
        operation("SYMLINK", (Opcode::Symlink, ROOT_ID), &[&bytes, b"target\0"], move |_, reply| {
            entry_of(reply);
            assert_eq!(fs::read_link(&path).unwrap(), Path::new("target"));
        })
    },
    |_, share, n| {
        let (name, bytes) = name("create", n);
        let flags = (libc::O_RDWR | libc::O_CREAT | libc::O_EXCL) as u32;
        let args = CreateIn { flags, mode: libc::S_IFREG | 0o600, ..Default::default() };
        let path = share.join(name);
        operation("CREATE", (Opcode::Create, ROOT_ID), &[args.as_bytes(), &bytes], move |_, reply| {
            entry_of(reply);
            assert!(path.is_file());
        })
    },
    |guest, share, n| {
        let (name, bytes) = name("link", n);
        let path = share.join(&name);
        fs::write(share.join(format!("{name}-old")), "").unwrap();
        let old = lookup(guest, ROOT_ID, format!("{name}-old\0").as_bytes()).unwrap().nodeid;
        let args = LinkIn { oldnodeid: old };
        operation("LINK", (Opcode::Link, ROOT_ID), &[args.as_bytes(), &bytes], move |_, reply| {
            assert_eq!(entry_of(reply).nodeid, old);
            assert_eq!(path.metadata().unwrap().nlink(), 2);
        })
    },
    |guest, share, n| {
        let (name, bytes) = name("unlink", n);
        let path = share.join(name);
        fs::write(&path, "").unwrap();
        lookup(guest, ROOT_ID, &bytes).unwrap();
        operation("UNLINK", (Opcode::Unlink, ROOT_ID), &[&bytes], move |_, reply| {
            reply.unwrap();
            assert!(!path.exists());
        })
    },
    |guest, share, n| {
        let (name, bytes) = name("rmdir", n);
        let path = share.join(name);
        fs::create_dir(&path).unwrap();
        lookup(guest, ROOT_ID, &bytes).unwrap();
        operation("RMDIR", (Opcode::Rmdir, ROOT_ID), &[&bytes], move |_, reply| {
            reply.unwrap();
            assert!(!path.exists());
        })
    },
    |guest, share, n| {
        let ((old, from), (new, to)) = (name("rename-old", n), name("rename-new", n));
        let (old, new) = (share.join(old), share.join(new));
        fs::write(&old, "moved").unwrap();
        fs::write(&new, "replaced").unwrap();
        lookup(guest, ROOT_ID, &from).unwrap();
        let args = Rename2In { newdir: ROOT_ID, ..Default::default() };
        operation("RENAME2", (Opcode::Rename2, ROOT_ID), &[args.as_bytes(), &from, &to], move |_, reply| {
            reply.unwrap();
            assert!(!old.exists() && fs::read(&new).unwrap() == b"moved");
        })
    },
    |_, share, n| {
        let ((old, from), (new, to)) = (name("exchange-a", n), name("exchange-b", n));
        let (old, new) = (share.join(old), share.join(new));
        fs::write(&old, "a").unwrap();
        fs::write(&new, "b").unwrap();
        let args = Rename2In { newdir: ROOT_ID, flags: libc::RENAME_EXCHANGE, ..Default::default() };
        operation("RENAME2 to exchange", (Opcode::Rename2, ROOT_ID), &[args.as_bytes(), &from, &to], move |_, reply| {
            reply.unwrap();
            assert!(fs::read(&old).unwrap() == b"b" && fs::read(&new).unwrap() == b"a");
        })
    },
    |guest, share, n| {
        let (name, bytes) = name("forget", n);
        fs::write(share.join(name), "").unwrap();
        let node = lookup(guest, ROOT_ID, &bytes).unwrap().nodeid;
        lookup(guest, ROOT_ID, &bytes).unwrap();
        lookup(guest, ROOT_ID, &bytes).unwrap();
        // A batch by a request queue is what can be traced. It has a reply of no bytes.
        let one = ForgetOne { nodeid: node, nlookup: 1 };
        let args = [BatchForgetIn { count: 1, dummy: 0 }.as_bytes(), one.as_bytes()].concat();
        let forget = args.clone();
        operation("BATCH_FORGET", (Opcode::BatchForget, 0), &[&args], move |guest, _| {
            for more in [true, true, false] {
                assert_eq!(is_known(guest, node), more);
                let token = submit(guest, Opcode::BatchForget, 0, &forget);
                reply(guest, token).unwrap();
            }
        })
    },
    |guest, share, n| {
        let (name, bytes) = name("write", n);
        let path = share.join(name);
        fs::write(&path, "").unwrap();
        let node = lookup(guest, ROOT_ID, &bytes).unwrap().nodeid;
        let fh = open(guest, node, libc::O_RDWR);
        let args = WriteIn { fh, size: 5, offset: 3, ..Default::default() };
        operation("WRITE", (Opcode::Write, node), &[args.as_bytes(), b"hello"], move |_, reply| {
            assert_eq!(WriteOut::read_from_prefix(&reply.unwrap()).unwrap().0.size, 5);
            assert_eq!(fs::read(&path).unwrap(), b"\0\0\0hello");
        })
    },
    |guest, share, n| {
        let (name, bytes) = name("append", n);
        let path = share.join(name);
        fs::write(&path, "before").unwrap();
        let node = lookup(guest, ROOT_ID, &bytes).unwrap().nodeid;
        let fh = open(guest, node, libc::O_WRONLY | libc::O_APPEND);
        let args = WriteIn { fh, size: 5, offset: 6, flags: libc::O_APPEND as u32, ..Default::default() };
        operation("WRITE with O_APPEND", (Opcode::Write, node), &[args.as_bytes(), b"hello"], move |_, reply| {
            assert_eq!(WriteOut::read_from_prefix(&reply.unwrap()).unwrap().0.size, 5);
            assert_eq!(fs::read(&path).unwrap(), b"beforehello");
        })
    },
    |guest, share, n| {
        let (name, bytes) = name("setxattr", n);
        fs::write(share.join(name), "").unwrap();
        let node = lookup(guest, ROOT_ID, &bytes).unwrap().nodeid;
        let args = SetxattrInCompat { size: 5, flags: libc::XATTR_CREATE as u32 };
        let body: [&[u8]; 3] = [args.as_bytes(), b"user.thruway\0", b"value"];
        operation("SETXATTR", (Opcode::Setxattr, node), &body, |_, reply| drop(reply.unwrap()))
    },
];

/// Kills the worker at step after step of an operation, until one comes to its end. A step is a system call's begin or
/// end, or so many instructions. Returns the number of kills.
fn each_step(args: &[&str], prepare: Prepare, how: u32, every: usize) -> (usize, &'static str) {
    let daemon = Daemon::start(args);
    let guest = daemon.connect();
    let share = daemon.share("");
    let mut kills = 0;
    loop {
        let operation = prepare(&guest, &share, kills);
        // The thread sleeps, and nothing is in its ring.
        let worker = Traced::stop(daemon.worker());
        let token = submit(&guest, operation.opcode, operation.node, &operation.body);
        let mut left = (kills + 1) * every;
        let mut done = None;
        let end = Instant::now() + LONG;
        'steps: while left > 0 {
            assert!(worker.ptrace(how));
            // It stops at once, or it sleeps.
            while !(0..100).any(|_| worker.has_stopped()) {
                done = done.or_else(|| guest.wait(1, Duration::ZERO).ok());
                if done.is_some() && worker.sleeps() {
                    break 'steps;
                }
                assert!(Instant::now() < end, "{} hangs", operation.name);
            }
            left -= 1;
        }
        worker.kill();
        (operation.check)(&guest, done.map_or_else(|| reply(&guest, token), |done| decode(&done)));
        if left > 0 {
            return (kills, operation.name);
        }
        kills += 1;
        wait_until("another worker", || daemon.find_worker().is_some_and(|pid| pid != worker.pid));
        // It may have had nothing to do yet.
        let _ = lookup(&guest, ROOT_ID, b"none\0");
    }
}

#[test]
fn each_operation_is_done_once() {
    for prepare in OPERATIONS {
        let (kills, name) = each_step(&["--xattr"], *prepare, libc::PTRACE_SYSCALL, 1);
        println!("{name}: {kills} kills");
        assert!(kills > 0);
    }
}

/// Between system calls too. Each step is a prime, so that no two operations are killed at the same places of what they
/// share. All instructions would take hours: an operation has some 100,000 of them in a debug build.
#[test]
fn an_operation_is_done_once_between_its_system_calls() {
    // MKDIR, CREATE, UNLINK and RENAME2.
    for (operation, every) in [(0, 24_001), (3, 24_007), (5, 24_019), (7, 24_023)] {
        let (kills, name) = each_step(&["--xattr"], OPERATIONS[operation], libc::PTRACE_SINGLESTEP, every);
        println!("{name}: {kills} kills");
        assert!(kills > 1);
    }
}

/// A RELEASE that is served again must not close what was opened since.
#[test]
fn no_number_of_an_open_file_is_given_out_twice() {
    let daemon = Daemon::start(&[]);
    fs::write(daemon.share("file"), "contents").unwrap();
    let guest = daemon.connect();
    let node = lookup(&guest, ROOT_ID, b"file\0").unwrap().nodeid;
    let mut given = std::collections::HashSet::new();
    for _ in 0..5 {
        let fh = open(&guest, node, libc::O_RDWR);
        assert!(given.insert(fh));
        release(&guest, node, fh);
        daemon.kill();
    }
}

/// The count and the end of the request are two stores, with no system call between them.
#[test]
fn a_forget_is_counted_once() {
    let record: &'static Record = Box::leak(Box::new(Record::new().unwrap()));
    record.install();
    let (cell, ring) = (record.inode(2, 3, libc::S_IFREG, &Place::Lost), record.ring(0));
    let begins = || record::begin(ring.claim(5).unwrap());
    let dies = || {
        ring.leave(LeftAs::Running);
        assert_eq!(ring.adopt(0, 0).unwrap().taken, [5]);
    };
    ring.take(5, 1);
    begins();
    assert!(!cell.was_forgotten());
    cell.set_forgotten(2);
    dies();
    begins();
    assert!(cell.was_forgotten());
    ring.give_back(5, 0, 0, || ());
    // The next one is killed before it counts.
    ring.take(5, 1);
    begins();
    assert!(!cell.was_forgotten());
    dies();
    begins();
    assert!(!cell.was_forgotten());
}

#[test]
fn a_session_without_any_feature_goes_on() {
    let daemon = Daemon::start(&[]);
    let guest = Frontend::connect(&daemon.dir.path().join("socket"), Options::default()).unwrap();
    guest.fuse_init(0).unwrap();
    daemon.kill();
    assert_eq!(lookup(&guest, ROOT_ID, b"none\0").unwrap_err(), libc::ENOENT);
}

fn control_goes_on(interrupt: fn(&Daemon)) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("control");
    let program = Command::new(copy_of_the_daemon(dir.path()));
    let daemon = Daemon::run(program, dir, &["--control-path", socket.to_str().unwrap()]);
    let guest = daemon.connect();
    for _ in 0..3 {
        let mut control = UnixStream::connect(&socket).unwrap();
        control.write_all(b"GET /status HTTP/1.1\r\nHost: _\r\nConnection: close\r\n\r\n").unwrap();
        let mut status = String::new();
        control.read_to_string(&mut status).unwrap();
        assert!(status.starts_with("HTTP/1.1 200"), "{status}");
        assert!(status.contains(&format!("\"pid\":{}", daemon.child.id())), "{status}");
        interrupt(&daemon);
        // Another worker is there.
        let _ = lookup(&guest, ROOT_ID, b"none\0");
    }
}

#[test]
fn the_control_socket_goes_on() {
    control_goes_on(Daemon::kill);
    control_goes_on(upgrade);
}

#[test]
fn a_guest_does_not_notice_an_upgrade_with_descriptors() {
    a_guest_does_not_notice("never", upgrade);
}

#[test]
fn a_guest_does_not_notice_an_upgrade_with_handles() {
    a_guest_does_not_notice("prefer", upgrade);
}

/// Makes and removes a directory, each of which succeeds once.
fn work(guest: &Frontend) {
    let args = MkdirIn { mode: 0o755, umask: 0 };
    entry_of(ask(guest, Opcode::Mkdir, ROOT_ID, &[args.as_bytes(), b"made\0"].concat()));
    assert_eq!(lookup(guest, ROOT_ID, b"none\0").unwrap_err(), libc::ENOENT);
    ask(guest, Opcode::Rmdir, ROOT_ID, b"made\0").unwrap();
}

#[test]
fn upgrades_go_back_and_forth_under_requests() {
    let daemon = Daemon::replaceable(&["--flock"]);
    fs::write(daemon.share("file"), "contents").unwrap();
    let guest = daemon.connect();
    let (node, fh, host, waits) = wait_for_lock(&daemon, &guest);
    let running = || fs::metadata(format!("/proc/{}/exe", daemon.child.id())).unwrap().ino();
    let other = daemon.dir.path().join("other");
    daemon.replace();
    fs::rename(daemon.dir.path().join("thruwayd"), &other).unwrap();
    daemon.replace();
    let (mut seen, mut worked) = (vec![running()], 0);
    for _ in 0..20 {
        let program = daemon.dir.path().join("thruwayd");
        rustix::fs::renameat_with(
            rustix::fs::CWD,
            &program,
            rustix::fs::CWD,
            &other,
            rustix::fs::RenameFlags::EXCHANGE,
        )
        .unwrap();
        let done = daemon.upgrade_during(|| {
            work(&guest);
            worked += 1;
        });
        assert!(done && running() == fs::metadata(&program).unwrap().ino());
        seen.push(running());
    }
    assert!(worked >= 20 && seen[1] != seen[2] && seen[1] == seen[3]);
    flock(&host, FlockOperation::Unlock).unwrap();
    assert_eq!(reply(&guest, waits), Ok(Vec::new()));
    assert_eq!(read(&guest, node, fh).unwrap(), b"contents");
    // The first supervisor, the last one and nobody else.
    wait_until("the others end", || children(daemon.child.id()).len() == 2);
    assert_eq!(daemon.log().matches("upgraded from version").count(), 20);
}

/// More of them than one message has, and more than is under way at a time.
#[test]
fn many_descriptors_come_along() {
    let daemon = Daemon::replaceable(&["--inode-file-handles=never"]);
    let guest = daemon.connect();
    let files: Vec<_> = (0..1200)
        .map(|n| {
            let (name, bytes) = name("file", n);
            fs::write(daemon.share(&name), &name).unwrap();
            (name, lookup(&guest, ROOT_ID, &bytes).unwrap().nodeid)
        })
        .collect();
    let handles: Vec<_> = files.iter().step_by(10).map(|(_, node)| open(&guest, *node, libc::O_RDONLY)).collect();
    files.iter().step_by(10).for_each(|(name, _)| fs::remove_file(daemon.share(name)).unwrap());
    for _ in 0..3 {
        upgrade(&daemon);
        for ((name, node), fh) in files.iter().step_by(10).zip(&handles) {
            assert_eq!(read(&guest, *node, *fh).unwrap(), name.as_bytes());
        }
        assert!(files.iter().all(|(_, node)| is_known(&guest, *node)));
    }
}

#[test]
fn nothing_is_left_open_after_upgrades() {
    let daemon = Daemon::replaceable(&[]);
    fs::write(daemon.share("file"), "contents").unwrap();
    let guest = daemon.connect();
    let once = || {
        let node = lookup(&guest, ROOT_ID, b"file\0").unwrap().nodeid;
        let fh = open(&guest, node, libc::O_RDWR);
        upgrade(&daemon);
        assert_eq!(read(&guest, node, fh).unwrap(), b"contents");
        release(&guest, node, fh);
    };
    once();
    let settled = |least: usize| {
        let mut now = 0;
        wait_until("settles", || {
            sleep(Duration::from_secs(2));
            let before = std::mem::replace(&mut now, daemon.descriptors());
            before == now && (least == 0 || now <= least)
        });
        now
    };
    let before = settled(0);
    for _ in 0..5 {
        once();
    }
    settled(before);
}

/// A program that this test puts in the daemon's place is refused, or fails, and the daemon goes on.
fn is_refused(daemon: &Daemon, script: &str, why: &str) {
    let before = daemon.log().len();
    daemon.replace_by(script);
    assert!(!daemon.upgrade());
    assert!(daemon.log()[before..].contains(why), "{why}");
}

#[test]
fn a_program_that_does_not_understand_is_refused() {
    let daemon = Daemon::replaceable(&[]);
    let guest = daemon.connect();
    let family = daemon.family();
    for (script, why) in [
        ("exit 1", "does not say what it understands"),
        ("echo something", "does not say what it understands"),
        ("yes", "does not say what it understands"),
        ("kill -SEGV $$", "does not say what it understands"),
        (r#"echo '{"version":"9.9","handover":[1],"record":[9]}'"#, "version 9.9, does not understand"),
        (r#"echo '{"version":"9.9","handover":[9],"record":[2]}'"#, "version 9.9, does not understand"),
    ] {
        is_refused(&daemon, script, why);
        work(&guest);
    }
    fs::remove_file(daemon.dir.path().join("thruwayd")).unwrap();
    assert!(!daemon.upgrade());
    // Nothing was given up.
    assert_eq!(daemon.family(), family);
}

#[test]
fn a_program_that_fails_at_any_step_loses_nothing() {
    let daemon = Daemon::replaceable(&["--inode-file-handles=never", "--flock"]);
    fs::write(daemon.share("file"), "contents").unwrap();
    let guest = daemon.connect();
    let node = lookup(&guest, ROOT_ID, b"file\0").unwrap().nodeid;
    let fh = open(&guest, node, libc::O_RDWR);
    setlk(&guest, node, fh, LK_FLOCK).unwrap();
    ask(&guest, Opcode::Unlink, ROOT_ID, b"file\0").unwrap();
    let goes_on = || {
        work(&guest);
        assert_eq!(read(&guest, node, fh).unwrap(), b"contents");
    };
    let unless_asked = r#"case "$1" in --print-upgrade) exec $real "$@" ;; esac"#;
    for _ in 0..2 {
        is_refused(&daemon, &format!("{unless_asked}; exit 1"), "has not joined the sandbox");
        goes_on();
        for step in ["joined", "greeted", "checked", "stopped", "state", "descriptors", "done"] {
            let script = format!("{unless_asked}; export THRUWAY_TEST_END={step}; exec $real \"$@\"");
            is_refused(&daemon, &script, "has not taken over");
            goes_on();
        }
        // It has no READDIRPLUS, which the guest uses.
        let script = format!("{unless_asked}; exec $real \"$@\" --no-readdirplus");
        is_refused(&daemon, &script, "which this daemon does not offer");
        goes_on();
        daemon.replace_by(r#"exec $real "$@""#);
        assert!(daemon.upgrade());
        goes_on();
        upgrade(&daemon);
    }
}

/// The daemon waits for it for some seconds.
#[test]
fn a_program_that_hangs_loses_nothing() {
    let daemon = Daemon::replaceable(&["--inode-file-handles=never"]);
    fs::write(daemon.share("file"), "contents").unwrap();
    let guest = daemon.connect();
    let node = lookup(&guest, ROOT_ID, b"file\0").unwrap().nodeid;
    let fh = open(&guest, node, libc::O_RDWR);
    let is_stopped = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
    };
    for step in ["checked", "state"] {
        daemon.replace_by(&format!(
            "case $1 in --print-upgrade) ;; *) export THRUWAY_TEST_STOP={step} ;; esac; exec $real \"$@\""
        ));
        let mut stopped = false;
        let done = daemon.upgrade_during(|| {
            let Some(successor) = children(daemon.child.id()).into_iter().find(is_stopped) else { return };
            stopped = true;
            assert_eq!(read(&guest, node, fh).unwrap(), b"contents");
            work(&guest);
            kill_process(Pid::from_raw(successor as i32).unwrap(), Signal::KILL).unwrap();
        });
        assert!(stopped && !done);
        assert_eq!(read(&guest, node, fh).unwrap(), b"contents");
    }
    upgrade(&daemon);
    assert_eq!(read(&guest, node, fh).unwrap(), b"contents");
}

#[test]
fn a_migration_is_not_broken() {
    let daemon = Daemon::replaceable(&[]);
    fs::write(daemon.share("file"), "contents").unwrap();
    let mut guest = daemon.connect();
    lookup(&guest, ROOT_ID, b"file\0").unwrap();
    for queue in [0, 1] {
        guest.stop_queue(queue).unwrap();
    }
    let (from, to) = rustix::pipe::pipe().unwrap();
    let (save, stopped) = (VhostTransferStateDirection::SAVE, VhostTransferStatePhase::STOPPED);
    guest.vhost().set_device_state_fd(save, stopped, to).unwrap();
    assert!(!daemon.upgrade());
    assert!(daemon.log().contains("the guest migrates"), "{}", daemon.log());
    let mut state = Vec::new();
    fs::File::from(from).read_to_end(&mut state).unwrap();
    assert!(guest.vhost().check_device_state().is_ok() && !state.is_empty());
    upgrade(&daemon);
}

/// As in the unit of systemd: with no_new_privs a program gets no capabilities that this one does not have.
#[test]
fn a_daemon_without_new_privileges_upgrades() {
    let dir = tempfile::tempdir().unwrap();
    let mut program = Command::new(copy_of_the_daemon(dir.path()));
    // SAFETY: between fork(2) and execve(2) there is only this system call.
    unsafe { program.pre_exec(|| Ok(rustix::thread::set_no_new_privs(true)?)) };
    let mut daemon = Daemon::run(program, dir, &[]);
    let guest = daemon.connect();
    for _ in 0..3 {
        upgrade(&daemon);
        work(&guest);
        daemon.kill();
        work(&guest);
    }
    drop(guest);
    assert!(daemon.child.wait().unwrap().success());
}

#[test]
fn all_ends_with_the_last_supervisor_or_with_the_parent() {
    for upgrades in 0..3 {
        for outside in [true, false] {
            let mut daemon = Daemon::replaceable(&[]);
            let guest = daemon.connect();
            (0..upgrades).for_each(|_| upgrade(&daemon));
            work(&guest);
            let worker = daemon.worker();
            let supervisor = children(daemon.child.id()).into_iter().find(|pid| !children(*pid).is_empty()).unwrap();
            let victim = if outside { daemon.child.id() } else { supervisor };
            kill_process(Pid::from_raw(victim as i32).unwrap(), Signal::KILL).unwrap();
            let status = daemon.child.wait().unwrap();
            assert_eq!(status.code(), if outside { None } else { Some(128 + libc::SIGKILL) });
            wait_until("the worker ends", || !Path::new(&format!("/proc/{worker}")).exists());
        }
    }
}
