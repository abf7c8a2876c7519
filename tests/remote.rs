//! Shares on a file system whose files a server has, and others change. Here the server is a process of this test: it
//! serves a directory, the "far" one, by FUSE, holds requests back when told to, and is killed. What changes in the far
//! directory itself is what another host changes. Needs root and /dev/fuse.
//!
//! Each test has its own process and mount namespace.

mod listening;
mod processes;

use std::fs::{self, File};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use listening::Listening;
use processes::{run_mounting, skip, this};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use thruway::device::{self, Urings};
use thruway::fs::{CachePolicy, Config, FileHandles, NoOpen, PassthroughFs, proc_self_fd};
use thruway::fuse::abi::*;
use thruway::fuse::buf::IoRange;
use thruway::fuse::ops::{Attrs, Caller, Control, DirSink, Dirs, Files, Names, Threads, Wait};
use thruway::fuse::{Io, Job, Reply, ReplySender, Server, Transport, Work};
use thruway::watch::Watch;
use thruway_bench::frontend::{Frontend, Options, Token};
use zerocopy::{FromBytes, IntoBytes};

type Test = fn();

const TESTS: &[(&str, Test)] = &[
    ("a_server_that_hangs_holds_up_nothing_else", a_server_that_hangs_holds_up_nothing_else),
    ("a_mounted_server_that_hangs_holds_up_nothing_else", a_mounted_server_that_hangs_holds_up_nothing_else),
    ("a_server_that_dies_gives_errors", a_server_that_dies_gives_errors),
    ("files_outlive_the_kernels_cache", files_outlive_the_kernels_cache),
    ("a_number_that_is_used_again_is_another_file", a_number_that_is_used_again_is_another_file),
    ("listed_files_are_held", listed_files_are_held),
    ("nothing_is_leased_or_kept", nothing_is_leased_or_kept),
    ("files_are_opened_with_messages", files_are_opened_with_messages),
    ("there_is_no_window", there_is_no_window),
];

/// What a lease lasts here. No other timeout is as long.
const LEASE: u64 = 7777;

/// A limit on hangs.
const LONG: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--serve", far, mount, control] => serve(Path::new(far), mount, PathBuf::from(control)),
        ["--run", name] => TESTS.iter().find(|(known, _)| *known == name).unwrap().1(),
        _ => return run(args.iter().find(|arg| !arg.starts_with('-')).map_or("", String::as_str)),
    }
    ExitCode::SUCCESS
}

fn run(filter: &str) -> ExitCode {
    run_mounting(TESTS.iter().map(|(name, _)| [*name]), filter)
}

// The server.

fn session(root: &Path, config: Config) -> PassthroughFs {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root: OwnedFd = rustix::fs::open(root, flags, Mode::empty()).unwrap();
    PassthroughFs::new(root, proc_self_fd().unwrap(), config).unwrap()
}

/// Serves `far` at `mount` until it is killed. While the file `control/hang` is there, requests for the directory
/// "slow" and what is in it wait, and leave a file in `control/waiting`. As most servers, it tells no times of birth.
fn serve(far: &Path, mount: &str, control: PathBuf) {
    let Ok(fuse) = File::options().read(true).write(true).open("/dev/fuse") else { skip("there is no /dev/fuse") };
    let options =
        format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions", fuse.as_raw_fd());
    let options = std::ffi::CString::new(options).unwrap();
    rustix::mount::mount("far", mount, "fuse", rustix::mount::MountFlags::empty(), &*options).unwrap();
    // By handle, so that it does not keep the numbers of removed files.
    let server = Arc::new(Server::new(session(far, Config { cache: CachePolicy::Never, ..prefer() })));
    let (fuse, control) = (Arc::new(fuse), Arc::new(control));
    let slow = Arc::new(parking_lot::Mutex::new(std::collections::HashSet::new()));
    loop {
        // The kernel wants room for a WRITE of max_write with its headers.
        let mut request = vec![0u8; (4 << 20) + (64 << 10)];
        let Ok(len) = rustix::io::read(&*fuse, &mut *request) else { return };
        request.truncate(len);
        let (server, fuse, control, slow) = (server.clone(), fuse.clone(), control.clone(), slow.clone());
        let answer = move || {
            let header = InHeader::read_from_prefix(&request).unwrap().0;
            let is_lookup = header.opcode == Opcode::Lookup as u32;
            let named = is_lookup && request[40..] == *b"slow\0" || slow.lock().contains(&header.nodeid);
            let is_forget = [Opcode::Forget as u32, Opcode::BatchForget as u32].contains(&header.opcode);
            if named && !is_forget && control.join("hang").exists() {
                File::create(control.join("waiting").join(header.unique.to_string())).unwrap();
                while control.join("hang").exists() {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            let mut reply = vec![0u8; (1 << 20) + (4 << 10)];
            let mut work = Work::default();
            // SAFETY: the buffers stay as they are until the request is served.
            unsafe {
                work.readable.push(request.as_mut_ptr(), request.len(), true);
                work.writable.push(reply.as_mut_ptr(), reply.len(), true);
            }
            if header.opcode == Opcode::Statx as u32 {
                let head = OutHeader { len: 16, error: -libc::ENOSYS, unique: header.unique };
                let _ = rustix::io::write(&*fuse, head.as_bytes());
                return;
            }
            let mut here = Here { fuse: &fuse, left: false, may_wait: false };
            let mut n = server.handle(&mut work, &mut here);
            if here.may_wait {
                n = server.handle(&mut work, &mut here);
            }
            if named && is_lookup && n > 16 {
                slow.lock().insert(EntryOut::read_from_prefix(&reply[16..]).unwrap().0.nodeid);
            }
            if n > 0 && !here.left {
                let _ = rustix::io::write(&*fuse, &reply[..n]);
            }
        };
        // INIT comes first, and alone.
        thread::spawn(answer);
    }
}

/// Answers by /dev/fuse.
struct Here<'a> {
    fuse: &'a Arc<File>,
    left: bool,
    may_wait: bool,
}

impl Transport for Here<'_> {
    fn moves(&mut self, _bytes: usize) -> bool {
        false
    }

    fn may_wait(&self) -> bool {
        self.may_wait
    }

    fn io(&mut self, io: Io, data: &IoRange) {
        let file = ManuallyDrop::new(File::from(io.file.try_clone().unwrap()));
        let mut bytes = vec![0; data.len()];
        let result = file.read_at(&mut bytes, io.offset).map_or_else(|e| -e.raw_os_error().unwrap(), |n| n as i32);
        drop(ManuallyDrop::into_inner(file));
        let (head, _) = io.reply(result);
        let _ = rustix::io::write(&**self.fuse, &[&head[..], &bytes[..result.max(0) as usize]].concat());
        self.left = true;
    }

    fn serve_anew(&mut self, _since: Option<std::time::Instant>) {
        self.may_wait = true;
    }

    fn detach(&mut self) -> ReplySender {
        self.left = true;
        let fuse = self.fuse.clone();
        Box::new(move |reply| {
            let _ = rustix::io::write(&*fuse, &reply);
        })
    }

    fn run(&mut self, _: Wait, job: Job) -> Result<(), Errno> {
        job(self.detach());
        Ok(())
    }
}

/// A directory of another host, and where it is mounted.
struct Far {
    dir: PathBuf,
    mount: PathBuf,
    control: PathBuf,
    server: Child,
}

impl Far {
    fn new() -> Self {
        let base = std::env::temp_dir();
        let [dir, mount, control] = ["far", "mount", "control"].map(|name| base.join(name));
        for dir in [&dir, &mount, &control, &control.join("waiting"), &dir.join("slow"), &dir.join("quick")] {
            fs::create_dir(dir).unwrap();
        }
        for file in ["slow/file", "quick/file"] {
            fs::write(dir.join(file), "contents").unwrap();
        }
        let paths = [&dir, &mount, &control].map(|path| path.to_str().unwrap());
        let mut server = this(&["--serve"]).args(paths).stdin(Stdio::null()).spawn().unwrap();
        let end = Instant::now() + LONG;
        while !mount.join("quick").exists() {
            if let Some(status) = server.try_wait().unwrap() {
                if status.code() == Some(77) {
                    skip("there is no /dev/fuse");
                }
                panic!("the server ended: {status}");
            }
            assert!(Instant::now() < end, "nothing is mounted");
            thread::sleep(Duration::from_millis(5));
        }
        Self { dir, mount, control, server }
    }

    fn hang(&self) {
        File::create(self.control.join("hang")).unwrap();
    }

    fn go_on(&self) {
        for name in fs::read_dir(self.control.join("waiting")).unwrap() {
            fs::remove_file(name.unwrap().path()).unwrap();
        }
        fs::remove_file(self.control.join("hang")).unwrap();
    }

    /// Waits until the server holds so many requests back.
    fn holds(&self, count: usize) {
        let end = Instant::now() + LONG;
        while fs::read_dir(self.control.join("waiting")).unwrap().count() < count {
            assert!(Instant::now() < end, "the server has fewer than {count} requests");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn kill(&mut self) {
        self.server.kill().unwrap();
        self.server.wait().unwrap();
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        let _ = self.server.kill();
    }
}

// The guest.

/// A guest with one request queue, of a daemon that shares a directory.
struct Guest {
    frontend: Frontend,
    daemon: JoinHandle<Result<(), device::Error>>,
}

impl Guest {
    fn new(share: &Path) -> Self {
        let path = std::env::temp_dir().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let server = Server::new(session(share, Config { cache: CachePolicy::Never, ..prefer() }).with_window(None));
        let options = device::Options { urings: Arc::new(Urings::new(1)), ..Default::default() };
        let daemon = thread::spawn(move || device::serve(listener, Arc::new(server), options));
        let frontend = Frontend::connect(&path, Options::default()).unwrap();
        frontend.fuse_init(0).unwrap();
        Self { frontend, daemon }
    }

    fn call(&self, opcode: Opcode, node: u64, body: &[u8], room: usize) -> Result<Vec<u8>, i32> {
        self.frontend.request(1, opcode as u32, node, body, b"", room)
    }

    /// Sends a request without waiting for its answer.
    fn send(&self, opcode: Opcode, node: u64, body: &[u8]) -> Token {
        let (_, head) = self.frontend.header(opcode as u32, node, body.len());
        self.frontend.submit(1, &[&[&head, body].concat()], &[16, 4096]).unwrap()
    }

    /// The errno of the answer, 0 if there is none.
    fn errno(&self, token: Token) -> i32 {
        let data = self.frontend.wait_for(1, token, LONG).unwrap().data;
        -OutHeader::read_from_prefix(&data).unwrap().0.error
    }

    fn lookup(&self, parent: u64, name: &[u8]) -> u64 {
        EntryOut::read_from_prefix(&self.call(Opcode::Lookup, parent, name, 128).unwrap()).unwrap().0.nodeid
    }

    fn open(&self, node: u64) -> u64 {
        let open = OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
        OpenOut::read_from_prefix(&self.call(Opcode::Open, node, open.as_bytes(), 16).unwrap()).unwrap().0.fh
    }

    /// Everything that a program does with a file, on the one queue.
    fn uses(&self, dir: u64) {
        let node = self.lookup(dir, b"file\0");
        let fh = self.open(node);
        self.call(Opcode::Getattr, node, GetattrIn::default().as_bytes(), 104).unwrap();
        let read = ReadIn { fh, size: 4096, ..Default::default() };
        assert_eq!(self.call(Opcode::Read, node, read.as_bytes(), 4096).unwrap(), b"contents");
        let write = WriteIn { fh, size: 8, ..Default::default() };
        self.call(Opcode::Write, node, &[write.as_bytes(), b"contents"].concat(), 8).unwrap();
        let create = CreateIn { flags: libc::O_RDWR as u32, mode: libc::S_IFREG | 0o600, ..Default::default() };
        let made = self.call(Opcode::Create, dir, &[create.as_bytes(), b"new\0"].concat(), 144).unwrap();
        let (entry, rest) = EntryOut::read_from_prefix(&made).unwrap();
        let made = OpenOut::read_from_prefix(rest).unwrap().0.fh;
        for (node, fh) in [(node, fh), (entry.nodeid, made)] {
            self.call(Opcode::Release, node, ReleaseIn { fh, ..Default::default() }.as_bytes(), 0).unwrap();
        }
        self.call(Opcode::Unlink, dir, b"new\0", 0).unwrap();
    }

    /// Sends one request of each kind for a file in this directory. None of them is answered while the server hangs.
    fn asks_for_all(&self, dir: u64, node: u64, fh: u64) -> Vec<(Opcode, Token)> {
        let create = CreateIn { flags: libc::O_RDWR as u32, mode: libc::S_IFREG | 0o600, ..Default::default() };
        let chmod = SetattrIn { valid: SetattrValid::MODE.bits(), mode: 0o600, ..Default::default() };
        let write = WriteIn { fh, size: 8, ..Default::default() };
        let read = ReadIn { fh, size: 4096, ..Default::default() };
        let open = OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
        let getattr = GetattrIn::default();
        let all: [(Opcode, u64, Vec<u8>); 11] = [
            (Opcode::Getattr, node, getattr.as_bytes().to_vec()),
            (Opcode::Setattr, node, chmod.as_bytes().to_vec()),
            (Opcode::Open, node, open.as_bytes().to_vec()),
            (Opcode::Read, node, read.as_bytes().to_vec()),
            (Opcode::Write, node, [write.as_bytes(), b"contents"].concat()),
            (Opcode::Fsync, node, FsyncIn { fh, ..Default::default() }.as_bytes().to_vec()),
            (Opcode::Statfs, node, Vec::new()),
            (Opcode::Lookup, dir, b"file\0".to_vec()),
            (Opcode::Opendir, dir, open.as_bytes().to_vec()),
            (Opcode::Create, dir, [create.as_bytes(), b"new\0"].concat()),
            (Opcode::Unlink, dir, b"file\0".to_vec()),
        ];
        all.iter().map(|(opcode, node, body)| (*opcode, self.send(*opcode, *node, body))).collect()
    }
}

fn prefer() -> Config {
    Config { inode_file_handles: FileHandles::Prefer, ..Config::default() }
}

/// While the server answers nothing about one directory, a guest with one queue uses another.
fn hangs(far: &Far, guest: &Guest, root: u64, other: u64) {
    let slow = guest.lookup(root, b"slow\0");
    let node = guest.lookup(slow, b"file\0");
    let fh = guest.open(node);
    guest.uses(other);
    far.hang();
    let all = guest.asks_for_all(slow, node, fh);
    // At least these are at the server. The kernel orders the others by the locks of the file and its directory.
    far.holds(3);
    guest.uses(other);
    guest.uses(other);
    far.go_on();
    for (opcode, token) in all {
        let errno = guest.errno(token);
        // The requests ran side by side: the file may be gone when its name is looked up.
        assert!(errno == 0 || opcode == Opcode::Lookup && errno == libc::ENOENT, "{opcode:?}: errno {errno}");
    }
}

fn a_server_that_hangs_holds_up_nothing_else() {
    let far = Far::new();
    let guest = Guest::new(&far.mount);
    hangs(&far, &guest, ROOT_ID, guest.lookup(ROOT_ID, b"quick\0"));
    drop(guest.frontend);
    guest.daemon.join().unwrap().unwrap();
}

/// The share is local. A directory in it is a mount of the far one.
fn a_mounted_server_that_hangs_holds_up_nothing_else() {
    let far = Far::new();
    let share = std::env::temp_dir().join("share");
    for dir in ["", "far", "local"] {
        fs::create_dir(share.join(dir)).unwrap();
    }
    fs::write(share.join("local/file"), "contents").unwrap();
    rustix::mount::mount_bind(&far.mount, share.join("far")).unwrap();
    let guest = Guest::new(&share);
    let mounted = guest.lookup(ROOT_ID, b"far\0");
    let local = guest.lookup(ROOT_ID, b"local\0");
    // From the first request on.
    far.hang();
    let first = guest.send(Opcode::Lookup, mounted, b"slow\0");
    far.holds(1);
    guest.uses(local);
    far.go_on();
    assert_eq!(guest.errno(first), 0);
    hangs(&far, &guest, mounted, local);
    drop(guest.frontend);
    guest.daemon.join().unwrap().unwrap();
}

/// A stop of the queue and the end of the daemon wait for the server. If it dies, all waiting requests fail, and the
/// daemon ends.
fn a_server_that_dies_gives_errors() {
    let mut far = Far::new();
    let guest = Guest::new(&far.mount);
    let slow = guest.lookup(ROOT_ID, b"slow\0");
    let node = guest.lookup(slow, b"file\0");
    let fh = guest.open(node);
    let quick = guest.lookup(ROOT_ID, b"quick\0");
    far.hang();
    let all = guest.asks_for_all(slow, node, fh);
    far.holds(3);
    // The queue's worker has taken all of them when it has taken this one.
    guest.call(Opcode::Getattr, quick, GetattrIn::default().as_bytes(), 104).unwrap();
    let Guest { frontend, daemon } = guest;
    let stopped = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            frontend.stop_queue(1).unwrap();
            stopped.store(true, Ordering::SeqCst);
        });
        // Long enough to be noticed if the stop did not wait. If this is too short, the test proves less.
        thread::sleep(Duration::from_millis(200));
        assert!(!stopped.load(Ordering::SeqCst), "the stop did not wait");
        far.kill();
    });
    for (opcode, token) in all {
        let data = frontend.wait_for(1, token, LONG).unwrap().data;
        let errno = -OutHeader::read_from_prefix(&data).unwrap().0.error;
        assert!([libc::ENOTCONN, libc::ECONNABORTED, libc::EIO].contains(&errno), "{opcode:?}: errno {errno}");
    }
    drop(frontend);
    daemon.join().unwrap().unwrap();
}

/// The guest knows a file that the host's kernel has forgotten: another host has renamed it, and this host has noticed.
fn files_outlive_the_kernels_cache() {
    let far = Far::new();
    let guest = Guest::new(&far.mount);
    let dir = guest.lookup(ROOT_ID, b"quick\0");
    let node = guest.lookup(dir, b"file\0");
    let subdir = far.dir.join("quick/subdir");
    fs::create_dir(&subdir).unwrap();
    let subdir = guest.lookup(dir, b"subdir\0");
    for name in ["file", "subdir"] {
        fs::rename(far.dir.join("quick").join(name), far.dir.join(name)).unwrap();
        let seen = fs::metadata(far.mount.join("quick").join(name)).map(drop);
        assert_eq!(seen.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
    for node in [node, subdir] {
        guest.call(Opcode::Getattr, node, GetattrIn::default().as_bytes(), 104).unwrap();
    }
    let read = ReadIn { fh: guest.open(node), size: 100, ..Default::default() };
    assert_eq!(guest.call(Opcode::Read, node, read.as_bytes(), 100).unwrap(), b"contents");
    drop(guest.frontend);
    guest.daemon.join().unwrap().unwrap();
}

/// Makes files until one has this inode number. `None` if somebody else's file on this file system has got it.
fn with_number(number: u64, dir: &Path) -> Option<PathBuf> {
    for n in 0..2000 {
        // Each is a new file: those of before keep the numbers that the host's file system gives out first.
        let path = dir.join(format!("new{number}-{n}"));
        fs::write(&path, "another").unwrap();
        if fs::metadata(&path).unwrap().ino() == number {
            return Some(path);
        }
        // The server keeps a file for a second or two.
        thread::sleep(Duration::from_millis(1));
    }
    None
}

/// The server frees a file's number and gives it to another, though the daemon has the first file open with O_PATH.
fn a_number_that_is_used_again_is_another_file() {
    let far = Far::new();
    let guest = Guest::new(&far.mount);
    let dir = guest.lookup(ROOT_ID, b"quick\0");
    for old in ["file", "dir"] {
        let replaced = |n| {
            let old = format!("{old}{n}");
            let path = far.dir.join("quick").join(&old);
            if old.starts_with("dir") { fs::create_dir(&path) } else { fs::write(&path, "old") }.unwrap();
            let node = guest.lookup(dir, format!("{old}\0").as_bytes());
            let number = fs::metadata(&path).unwrap().ino();
            if old.starts_with("dir") { fs::remove_dir(&path) } else { fs::remove_file(&path) }.unwrap();
            Some((node, with_number(number, &far.dir.join("quick"))?))
        };
        let (node, new) = (0..100).find_map(replaced).expect("a number that is used again");
        let name = format!("{}\0", new.file_name().unwrap().to_str().unwrap());
        let other = guest.lookup(dir, name.as_bytes());
        assert_ne!(node, other, "{old}");
        let read = ReadIn { fh: guest.open(other), size: 100, ..Default::default() };
        assert_eq!(guest.call(Opcode::Read, other, read.as_bytes(), 100).unwrap(), b"another");
        assert_eq!(guest.lookup(dir, name.as_bytes()), other);
    }
    drop(guest.frontend);
    guest.daemon.join().unwrap().unwrap();
}

/// The guest knows files by a listing. The host's kernel forgets what nobody holds, and then they are others to it.
fn listed_files_are_held() {
    let far = Far::new();
    for n in 0..100 {
        fs::write(far.dir.join(format!("quick/f{n}")), "contents").unwrap();
    }
    let fs = session(&far.mount, prefer());
    fs.enter_thread(false);
    fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap();
    let dir = fs.lookup(ROOT_ID, c"quick").unwrap().nodeid;
    let list = || {
        let fh = fs.opendir(dir, 0).unwrap().fh;
        let mut list = List::default();
        fs.readdirplus(dir, fh, 0, &mut list).unwrap();
        fs.releasedir(dir, fh).unwrap();
        list.0
    };
    let before = list();
    assert!(before.len() > 100);
    fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
    assert_eq!(list(), before);
    for node in before.values().filter(|node| **node != 0) {
        fs.getattr(*node, None).unwrap();
    }
}

/// The nodeids of a listing, by name.
#[derive(Default)]
struct List(std::collections::BTreeMap<Vec<u8>, u64>);

impl DirSink for List {
    fn fits(&self, _: usize) -> bool {
        true
    }

    fn push(&mut self, _: Dirent, name: &[u8], entry: Option<&EntryOut>) {
        self.0.insert(name.into(), entry.map_or(0, |entry| entry.nodeid));
    }
}

/// Nothing tells the daemon of what another host changes. So the guest gets no lease, and no contents stay at an open.
fn nothing_is_leased_or_kept() {
    let far = Far::new();
    let look = |share: &Path| {
        let config = Config { lease_timeout: Duration::from_secs(LEASE), ..prefer() };
        let fs = session(share, config).with_watch(Some(Watch::new().unwrap())).unwrap();
        fs.enter_thread(false);
        fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap();
        Listening::start(&fs);
        let dir = fs.lookup(ROOT_ID, c"quick").unwrap();
        let file = fs.lookup(dir.nodeid, c"file").unwrap();
        let attr = fs.getattr(file.nodeid, None).unwrap();
        let mut kept = 0;
        for _ in 0..5 {
            let (send, opened) = mpsc::channel();
            let mut reply = Reply::late(1, Box::new(move |reply: Vec<u8>| send.send(reply).unwrap()));
            fs.open(file.nodeid, &OpenIn::default(), Caller { uid: 0, gid: 0, pid: 0 }, &mut reply).unwrap();
            reply.finish(Ok(()));
            let open = OpenOut::read_from_bytes(&opened.recv().unwrap()[16..]).unwrap();
            kept |= open.open_flags & (OpenFlags::KEEP_CACHE | OpenFlags::CACHE_DIR).bits();
        }
        (dir.entry_valid, file.entry_valid, file.attr_valid, attr.attr_valid, kept)
    };
    assert_eq!(look(&far.mount), (1, 1, 1, 1, 0));
    // The same directory without the mount has leases, unless it is on a file system that nobody watches.
    println!("without the mount: {:?}", look(&far.dir));
}

/// A server may keep a removed file only while it is open: the daemon must know what the guest has open.
fn files_are_opened_with_messages() {
    let far = Far::new();
    let settled = |share: &Path| {
        let fs = session(share, Config { cache: CachePolicy::Always, no_open: NoOpen::Always, ..prefer() });
        fs.enter_thread(false);
        fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap().flags
    };
    let no_open = InitFlags::NO_OPEN_SUPPORT | InitFlags::NO_OPENDIR_SUPPORT;
    assert_eq!(settled(&far.dir) & no_open, no_open);
    assert_eq!(settled(&far.mount) & no_open, InitFlags::NO_OPENDIR_SUPPORT);
}

/// Another host may truncate a mapped file. No guard here holds that up, and QEMU would get SIGBUS.
fn there_is_no_window() {
    let far = Far::new();
    let run = |window: &str, share: &Path| {
        let socket = std::env::temp_dir().join("window");
        let mut daemon = Command::new(env!("CARGO_BIN_EXE_thruwayd"));
        daemon.arg("--socket-path").arg(&socket).arg("--shared-dir").arg(share).args(["--sandbox=none", window]);
        let mut daemon = daemon.stderr(Stdio::piped()).spawn().unwrap();
        let end = Instant::now() + LONG;
        while !socket.exists() && daemon.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "neither a socket nor an end");
            thread::sleep(Duration::from_millis(5));
        }
        // It may have made the socket before it looks at the share.
        thread::sleep(Duration::from_millis(200));
        let ended = daemon.try_wait().unwrap().is_some();
        daemon.kill().unwrap();
        let said = daemon.wait_with_output().unwrap().stderr;
        let _ = fs::remove_file(&socket);
        (ended, String::from_utf8(said).unwrap())
    };
    for window in ["--dax-window=64M", "--passthrough-window=64M"] {
        let (ended, said) = run(window, &far.mount);
        assert!(!ended && said.contains("continuing without a window: the shared directory is on a network"), "{said}");
        let (ended, said) = run(&format!("{window},required"), &far.mount);
        assert!(ended && said.contains("cannot create a window: the shared directory is on a network"), "{said}");
        let (_, said) = run(window, &far.dir);
        assert!(!said.contains("the shared directory is on a network"), "{said}");
    }
}
