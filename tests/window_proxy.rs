//! Proxy files and their guard, as QEMU and host processes see them. Needs root and Linux 6.9.
//!
//! Each test has its own process, since only a process with one thread can start the window process. The program also
//! runs itself as the host process of a test.

mod cgroup;
mod common;
mod locked;
mod processes;

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use common::wait_until;
use locked::Locked;
use processes::{run_all, skip, this};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use thruway::device;
use thruway::fs::{Config, PassthroughFs, proc_self_fd};
use thruway::fuse::Server;
use thruway::fuse::abi::*;
use thruway::sandbox::{self, Sandbox, seccomp};
use thruway::window::proxy::{self, Event, Guard, GuardMode, Kind, Proxy};
use thruway_bench::frontend::{Frontend, WINDOW_BASE};
use virtio_queue::desc::split::Descriptor;
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, FileOffset, VolatileMemory};
use zerocopy::{FromBytes, IntoBytes};

const TESTS: &[(&str, fn())] = &[
    ("a_mapping_is_the_real_file", a_mapping_is_the_real_file),
    ("a_proxy_file_cannot_be_resized", a_proxy_file_cannot_be_resized),
    ("any_user_can_use_a_descriptor", any_user_can_use_a_descriptor),
    ("far_offsets_are_mapped", far_offsets_are_mapped),
    ("cached_reads_zeros_beyond_the_end", cached_reads_zeros_beyond_the_end),
    ("cached_writes_keep_the_size", cached_writes_keep_the_size),
    ("a_truncation_is_not_undone", a_truncation_is_not_undone),
    ("cached_serves_read_only_files", cached_serves_read_only_files),
    ("cached_is_invalidated", cached_is_invalidated),
    ("cached_sees_what_the_host_writes", cached_sees_what_the_host_writes),
    ("a_locked_file_delays_no_other", a_locked_file_delays_no_other),
    ("files_of_overlayfs", files_of_overlayfs),
    ("bad_calls_get_an_errno", bad_calls_get_an_errno),
    ("truncations_wait_for_the_mapping", truncations_wait_for_the_mapping),
    ("other_calls_do_not_wait", other_calls_do_not_wait),
    ("changes_of_watched_files_are_told", changes_of_watched_files_are_told),
    ("the_daemons_truncations_do_not_wait", the_daemons_truncations_do_not_wait),
    ("two_ids_of_one_file_are_both_revoked", two_ids_of_one_file_are_both_revoked),
    ("a_truncation_waits_for_the_deadline_at_most", a_truncation_waits_for_the_deadline_at_most),
    ("a_frozen_daemon_holds_up_nobody_for_long", a_frozen_daemon_holds_up_nobody_for_long),
    ("nothing_hangs_under_load", nothing_hangs_under_load),
    ("nothing_is_left_of_closed_files", nothing_is_left_of_closed_files),
    ("the_process_can_do_little", the_process_can_do_little),
    ("it_ends_with_the_daemon", it_ends_with_the_daemon),
    ("its_end_frees_who_waits", its_end_frees_who_waits),
    ("a_stopped_one_is_killed", a_stopped_one_is_killed),
    ("a_mapped_file_is_no_place_for_a_message", a_mapped_file_is_no_place_for_a_message),
];

const SIZE: usize = 5000;
const MAPPED: usize = 2 << 20;
const ID: u64 = 7;
/// Uid of `nobody` on Linux distributions. Any unused one would do.
const NOBODY: u32 = 65534;
const SOON: Duration = Duration::from_secs(1);
/// What ends by itself has ended by then, however busy the machine is.
const LONG: Duration = Duration::from_secs(100);
/// A deadline that no test reaches.
const HOUR: Duration = Duration::from_secs(3600);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--run", name] => TESTS.iter().find(|(n, _)| *n == name).unwrap().1(),
        ["--host", what, path] => host(what, Path::new(path)),
        ["--daemon", share] => daemon(Path::new(share)),
        ["--cost"] => cost(),
        _ => return run_tests(args.iter().find(|a| !a.starts_with('-')).map_or("", String::as_str)),
    }
    ExitCode::SUCCESS
}

fn run_tests(filter: &str) -> ExitCode {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: proxy files need root");
        return ExitCode::SUCCESS;
    }
    let names = TESTS.iter().map(|(name, _)| ((*name).to_owned(), *name));
    run_all(names, filter, |name| this(&["--run", name]).status().unwrap())
}

/// A window process, and a directory on the disk.
struct Window {
    proxy: Arc<Proxy>,
    dir: TempDir,
}

impl Window {
    fn new(guard: GuardMode) -> Self {
        Self::with_deadline(guard, HOUR)
    }

    fn with_deadline(guard: GuardMode, deadline: Duration) -> Self {
        let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let proxy = proxy::start(guard, deadline, seccomp::Action::Kill).unwrap_or_else(|e| skip(e));
        Self { proxy: Arc::new(proxy), dir }
    }

    fn guarded() -> Self {
        Self::guarded_for(HOUR)
    }

    fn guarded_for(deadline: Duration) -> Self {
        let window = Self::with_deadline(GuardMode::Fanotify, deadline);
        match window.proxy.guard() {
            Guard::On => window,
            off => skip(off),
        }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("file")
    }

    /// A new file of `SIZE` bytes "r".
    fn file(&self) -> File {
        fs::write(self.path(), [b'r'; SIZE]).unwrap();
        read_write(&self.path())
    }

    fn map(&self, kind: Kind, file: &File) -> Mapping {
        let opened = self.proxy.open(ID, kind, file.as_fd()).unwrap();
        Mapping::new(opened.fd, 0)
    }

    /// A host process that does `what` to the file.
    fn host(&self, what: &str) -> Child {
        this(&["--host", what, self.path().to_str().unwrap()]).spawn().unwrap()
    }

    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.proxy.pid())).unwrap().count()
    }

    fn status(&self, field: &str) -> String {
        let text = fs::read_to_string(format!("/proc/{}/status", self.proxy.pid())).unwrap();
        let line = text.lines().find(|line| line.starts_with(field)).unwrap();
        line.split_once(':').unwrap().1.trim().to_owned()
    }
}

fn read_write(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// What QEMU has of a proxy file: a shared mapping and the descriptor, which it closes last.
struct Mapping(MmapRegion);

impl Mapping {
    fn new(fd: OwnedFd, offset: u64) -> Self {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        Self(MmapRegion::build(Some(FileOffset::new(fd.into(), offset)), MAPPED, prot, flags).unwrap())
    }

    fn read(&self, offset: usize) -> u8 {
        self.0.as_volatile_slice().read_obj(offset).unwrap()
    }

    fn write(&self, offset: usize, byte: u8) {
        self.0.as_volatile_slice().write_obj(byte, offset).unwrap();
    }

    fn sync(&self) {
        self.0.file_offset().unwrap().file().sync_all().unwrap();
    }
}

/// How many threads of the process are in this system call.
fn calls(pid: Pid, number: i64) -> usize {
    let call = |task: io::Result<fs::DirEntry>| fs::read_to_string(task.unwrap().path().join("syscall"));
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks.filter_map(|task| call(task).ok()).filter(|call| call.split(' ').next() == Some(&number.to_string())).count()
}

/// The byte at `offset`, or 0 beyond the end.
fn byte(file: &File, offset: u64) -> u8 {
    let mut byte = [0];
    file.read_at(&mut byte, offset).unwrap();
    byte[0]
}

fn is_gone(pid: Pid) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
}

/// Waits for a host process. The guard's deadline is later than this limit, so it has not let the process go on.
fn finish(mut host: Child) {
    let end = Instant::now() + LONG;
    let status = loop {
        assert!(Instant::now() < end, "it waits");
        match host.try_wait().unwrap() {
            Some(status) => break status,
            None => sleep(Duration::from_millis(2)),
        }
    };
    assert!(status.success());
}

fn a_mapping_is_the_real_file() {
    let window = Window::new(GuardMode::None);
    let file = window.file();
    let mapping = window.map(Kind::Through, &file);
    assert_eq!(mapping.read(0), b'r');
    mapping.write(4999, b'm');
    assert_eq!(byte(&file, 4999), b'm');
    file.write_all_at(b"w", 17).unwrap();
    assert_eq!(mapping.read(17), b'w');
    file.write_all_at(b"longer", 8000).unwrap();
    assert_eq!(mapping.read(8000), b'l');
    assert_eq!(file.metadata().unwrap().len(), 8006);
}

fn a_proxy_file_cannot_be_resized() {
    let window = Window::new(GuardMode::None);
    let file = window.file();
    for kind in [Kind::Through, Kind::Cached] {
        let fd = window.proxy.open(ID, kind, file.as_fd()).unwrap().fd;
        let size = rustix::fs::seek(&fd, rustix::fs::SeekFrom::End(0)).unwrap();
        assert!(size >= 1 << 60 && size as i64 == rustix::fs::fstat(&fd).unwrap().st_size);
        for size in [0, MAPPED as u64] {
            assert_eq!(rustix::fs::ftruncate(&fd, size), Err(Errno::PERM));
        }
    }
    assert_eq!(file.metadata().unwrap().len(), SIZE as u64);
}

fn any_user_can_use_a_descriptor() {
    let window = Window::new(GuardMode::None);
    let file = window.file();
    for kind in [Kind::Through, Kind::Cached] {
        let fd = window.proxy.open(ID, kind, file.as_fd()).unwrap().fd;
        let mut reader = Command::new("sh");
        reader.args(["-c", "test $(stat -c %s -) -gt 1000000 && test $(head -c 1) = r"]).current_dir("/");
        assert!(reader.uid(NOBODY).stdin(fd).status().unwrap().success(), "{kind:?}");
    }
}

/// A guest puts messages and descriptors beyond the end of a file that it has mapped.
fn a_mapped_file_is_no_place_for_a_message() {
    let window = Window::new(GuardMode::None);
    drop(window.file());
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
    let root = rustix::fs::open(window.dir.path(), flags, rustix::fs::Mode::empty()).unwrap();
    let region = thruway::window::Window::new(2 * MAPPED as u64, None, window.proxy.clone()).unwrap();
    let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), Config::default()).unwrap();
    let fs = fs.with_window(Some(region.clone()));
    let socket = window.dir.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let options = device::Options { window: Some(region), ..Default::default() };
    spawn(move || device::serve(listener, Arc::new(Server::new(fs)), options));
    let mut guest = Frontend::connect(&socket, Default::default()).unwrap();
    let _region = guest.open_window().unwrap();
    guest.fuse_init(u64::MAX).unwrap();
    let ask = |opcode: Opcode, node, args: &[u8], room| guest.request(1, opcode as u32, node, args, &[], room);
    let entry = ask(Opcode::Lookup, ROOT_ID, b"file\0", size_of::<EntryOut>()).unwrap();
    let node = EntryOut::read_from_bytes(&entry).unwrap().nodeid;
    let map = SetupmappingIn { len: MAPPED as u64, flags: SETUPMAPPING_WRITE, ..Default::default() };
    ask(Opcode::Setupmapping, node, map.as_bytes(), 0).unwrap();
    let (own, file) = (guest.alloc(1, 4096).unwrap(), WINDOW_BASE + MAPPED as u64 / 2);
    let (next, write, indirect) = (1, 2, 4);
    for (message, reply, table) in [(file, own, false), (own, file, false), (file, file, true)] {
        let [first, second] = guest.take_descriptors(1, 2).unwrap()[..] else { unreachable!() };
        let flags = if table { indirect } else { next };
        guest.write_descriptor(1, first, Descriptor::new(message, 48, flags, second)).unwrap();
        guest.write_descriptor(1, second, Descriptor::new(reply, 128, write, 0)).unwrap();
        guest.push_raw(1, first).unwrap();
        // An errno where there is room for one.
        let (head, len) = guest.wait_raw(1, 100 * SOON).unwrap();
        assert!(head == u32::from(first) && (len == 0 || len == 16), "{len}");
    }
    ask(Opcode::Getattr, node, GetattrIn::default().as_bytes(), size_of::<AttrOut>()).unwrap();
}

fn far_offsets_are_mapped() {
    let window = Window::new(GuardMode::None);
    let file = window.file();
    let far = 3 << 30;
    file.write_all_at(b"far", far).unwrap();
    let mapping = Mapping::new(window.proxy.open(ID, Kind::Through, file.as_fd()).unwrap().fd, far);
    assert_eq!(mapping.read(0), b'f');
    mapping.write(1, b'A');
    assert_eq!(byte(&file, far + 1), b'A');
}

fn cached_reads_zeros_beyond_the_end() {
    let window = Window::new(GuardMode::None);
    let mapping = window.map(Kind::Cached, &window.file());
    assert_eq!([0, 4999, 5000, 8191, 8192, MAPPED - 1].map(|at| mapping.read(at)), [b'r', b'r', 0, 0, 0, 0]);
    let far = Mapping::new(window.proxy.open(ID, Kind::Cached, window.file().as_fd()).unwrap().fd, 1 << 40);
    assert_eq!(far.read(9), 0);
}

fn cached_writes_keep_the_size() {
    let window = Window::new(GuardMode::None);
    let file = window.file();
    let mapping = window.map(Kind::Cached, &file);
    [0, 4999, 5000, 100_000].iter().for_each(|at| mapping.write(*at, b'm'));
    mapping.sync();
    assert_eq!([0, 1, 4999].map(|at| byte(&file, at)), [b'm', b'r', b'm']);
    assert_eq!(file.metadata().unwrap().len(), SIZE as u64);

    let append = OpenOptions::new().read(true).append(true).open(window.path()).unwrap();
    let mapping = window.map(Kind::Cached, &append);
    mapping.write(1, b'a');
    mapping.sync();
    assert_eq!((byte(&file, 1), file.metadata().unwrap().len()), (b'a', SIZE as u64));
}

/// The file is truncated while what the guest stored is on its way there.
fn a_truncation_is_not_undone() {
    let window = Window::new(GuardMode::None);
    let file = window.file();
    let mapping = window.map(Kind::Cached, &file);
    mapping.write(4500, b'g');
    let lock = Locked::new(&file).unwrap_or_else(|| skip("userfaultfd(2) is not allowed"));
    // Both wait for the file's lock, the truncation first.
    let truncated = file.try_clone().unwrap();
    let truncating = spawn(move || truncated.set_len(0).unwrap());
    let ours = Pid::from_raw(std::process::id() as i32).unwrap();
    wait_until("truncating", || calls(ours, libc::SYS_ftruncate) == 1);
    let syncing = spawn(move || mapping.sync());
    let pid = window.proxy.pid();
    wait_until("writing", || calls(pid, libc::SYS_fallocate) + calls(pid, libc::SYS_pwritev2) > 0);
    drop(lock);
    truncating.join().unwrap();
    syncing.join().unwrap();
    assert_eq!((file.metadata().unwrap().len(), byte(&file, 4500)), (0, 0));
}

fn cached_serves_read_only_files() {
    let window = Window::new(GuardMode::None);
    window.file();
    let file = File::open(window.path()).unwrap();
    let mapping = window.map(Kind::Cached, &file);
    assert_eq!(mapping.read(0), b'r');
    mapping.write(0, b'm');
    assert!(mapping.0.file_offset().unwrap().file().sync_all().is_err());
    assert_eq!(byte(&file, 0), b'r');
    // While the host executes it, too.
    let program = window.dir.path().join("sleep");
    fs::copy("/bin/sleep", &program).unwrap();
    let mut running = Command::new(&program).arg("100").spawn().unwrap();
    let opened = window.proxy.open(ID + 1, Kind::Cached, File::open(&program).unwrap().as_fd()).unwrap();
    assert_eq!(Mapping::new(opened.fd, 0).read(1), b'E');
    running.kill().unwrap();
    running.wait().unwrap();
}

fn cached_is_invalidated() {
    let window = Window::new(GuardMode::None);
    let file = window.file();
    let mapping = window.map(Kind::Cached, &file);
    assert_eq!(mapping.read(0), b'r');
    file.write_all_at(b"w", 0).unwrap();
    assert_eq!(mapping.read(0), b'r');
    window.proxy.invalidate(ID).unwrap();
    assert_eq!(mapping.read(0), b'w');
    window.proxy.invalidate(ID + 1).unwrap();
}

/// A process of the host writes to a file for long, so what the guest stored in its Cached proxy file cannot be
/// written.
fn a_locked_file_delays_no_other() {
    let window = Window::new(GuardMode::None);
    let file = window.file();
    let mapping = window.map(Kind::Cached, &file);
    mapping.write(4500, b'g');
    let lock = Locked::new(&file).unwrap_or_else(|| skip("userfaultfd(2) is not allowed"));
    let writing = || calls(window.proxy.pid(), libc::SYS_fallocate);
    let syncing = spawn(move || {
        mapping.sync();
        mapping
    });
    wait_until("writing", || writing() > 0);
    let proxy = window.proxy.clone();
    let invalidating = spawn(move || proxy.invalidate(ID).unwrap());
    // Others are opened, mapped, read and written.
    let other = window.dir.path().join("other");
    fs::write(&other, [b'o'; SIZE]).unwrap();
    for (id, kind) in [(ID + 1, Kind::Through), (ID + 2, Kind::Cached)] {
        let opened = window.proxy.open(id, kind, read_write(&other).as_fd()).unwrap();
        let mapping = Mapping::new(opened.fd, 0);
        assert_eq!(mapping.read(0), b'o');
        mapping.write(1, b'g');
        mapping.sync();
    }
    assert_eq!((byte(&read_write(&other), 1), writing()), (b'g', 1));
    drop(lock);
    let mapping = syncing.join().unwrap();
    invalidating.join().unwrap();
    assert_eq!((byte(&file, 4500), mapping.read(4500), mapping.read(0)), (b'g', b'g', 0));
}

fn cached_sees_what_the_host_writes() {
    let window = Window::guarded();
    let file = window.file();
    let mapping = window.map(Kind::Cached, &file);
    let through = window.map(Kind::Through, &file);
    assert_eq!(mapping.read(0), b'r');
    finish(window.host("write"));
    wait_until("seen", || mapping.read(0) == b'h');
    assert_eq!(through.read(0), b'h');
}

fn files_of_overlayfs() {
    let window = Window::new(GuardMode::Fanotify);
    let [lower, upper, work, merged] = ["lower", "upper", "work", "merged"].map(|name| {
        let path = window.dir.path().join(name);
        fs::create_dir(&path).unwrap();
        path
    });
    fs::write(lower.join("file"), [b'r'; SIZE]).unwrap();
    let options = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    let options = std::ffi::CString::new(options).unwrap();
    if let Err(e) = mount("overlay", &merged, "overlay", MountFlags::empty(), Some(&*options)) {
        skip(format!("cannot mount overlayfs: {e}"));
    }
    let file = read_write(&merged.join("file"));
    unmount(&merged, UnmountFlags::DETACH).unwrap();
    let opened = window.proxy.open(ID, Kind::Through, file.as_fd()).unwrap();
    assert!(!opened.guarded);
    let mapping = Mapping::new(opened.fd, 0);
    mapping.write(1, b'm');
    assert_eq!((byte(&file, 0), byte(&file, 1), file.metadata().unwrap().len()), (b'r', b'm', SIZE as u64));
}

fn bad_calls_get_an_errno() {
    let window = Window::new(GuardMode::Fanotify);
    let file = window.file();
    let open = |id, kind, fd: &dyn AsFd| window.proxy.open(id, kind, fd.as_fd()).err().and_then(|e| e.raw_os_error());
    for id in [0, u64::MAX, 1 << 62] {
        assert_eq!(open(id, Kind::Through, &file), Some(libc::EINVAL), "{id}");
    }
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(open(1, Kind::Through, &socket).is_some());
    assert!(open(1, Kind::Through, &File::open(window.dir.path()).unwrap()).is_some());
    let _mapping = window.map(Kind::Through, &file);
    let other = File::create_new(window.dir.path().join("other")).unwrap();
    assert_eq!(open(ID, Kind::Through, &other), Some(libc::ESTALE));
    assert_eq!(open(ID, Kind::Through, &file), None);
    assert_eq!(open(ID, Kind::Through, &File::open(window.path()).unwrap()), Some(libc::EACCES));
}

fn truncations_wait_for_the_mapping() {
    let window = Window::guarded();
    for what in ["truncate", "ftruncate", "open_trunc", "punch", "thread"] {
        let file = window.file();
        let opened = window.proxy.open(ID, Kind::Through, file.as_fd()).unwrap();
        assert!(opened.guarded);
        let mapping = Mapping::new(opened.fd, 0);
        let mut host = window.host(what);
        assert_eq!(window.proxy.next_event(), Some(Event::Revoke(ID)), "{what}");
        sleep(SOON / 4);
        assert!(host.try_wait().unwrap().is_none(), "{what} is held");
        assert_eq!((mapping.read(0), file.metadata().unwrap().len()), (b'r', SIZE as u64), "{what}");
        let reopened = window.proxy.open(ID, Kind::Through, file.as_fd());
        assert_eq!(reopened.unwrap_err().raw_os_error(), Some(libc::EBUSY));
        drop(mapping);
        finish(host);
        assert_eq!(byte(&file, 0), 0, "{what}");
        drop(window.proxy.open(ID, Kind::Through, file.as_fd()).unwrap());
    }
}

fn other_calls_do_not_wait() {
    let window = Window::guarded();
    let mapping = window.map(Kind::Through, &window.file());
    let revoked = Arc::new(AtomicUsize::new(0));
    let (counter, proxy) = (Arc::clone(&revoked), Arc::clone(&window.proxy));
    spawn(move || {
        while proxy.next_event().is_some() {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    });
    for what in ["read", "write", "append", "mmap", "sendfile", "many"] {
        finish(window.host(what));
        assert_eq!(revoked.load(Ordering::Relaxed), 0, "{what}");
    }
    assert_eq!(mapping.read(0), b'h');
}

fn the_daemons_truncations_do_not_wait() {
    let window = Window::guarded();
    let _mapping = window.map(Kind::Through, &window.file());
    let path = window.path();
    let thread = spawn(move || {
        let file = OpenOptions::new().write(true).truncate(true).open(path).unwrap();
        file.set_len(100).unwrap();
        file.set_len(50).unwrap();
    });
    wait_until("truncated", || thread.is_finished());
    thread.join().unwrap();
}

fn changes_of_watched_files_are_told() {
    let window = Window::guarded();
    let file = window.file();
    let mapping = window.map(Kind::Through, &file);
    assert_eq!(window.proxy.watch(ID + 1).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    // Not before it is watched.
    finish(window.host("write"));
    window.proxy.watch(ID).unwrap();
    window.proxy.watch(ID).unwrap();
    finish(window.host("append"));
    assert_eq!(window.proxy.next_event(), Some(Event::Changed(ID)));
    drop(mapping);
}

fn two_ids_of_one_file_are_both_revoked() {
    let window = Window::guarded();
    let file = window.file();
    let mapping = window.map(Kind::Through, &file);
    let other = window.proxy.open(ID + 1, Kind::Through, file.as_fd()).unwrap();
    assert!(other.guarded);
    drop(mapping);
    let mapping = window.map(Kind::Through, &file);
    let mut host = window.host("truncate");
    let mut revoked = [window.proxy.next_event(), window.proxy.next_event()];
    revoked.sort_unstable_by_key(|event| *event == Some(Event::Revoke(ID + 1)));
    assert_eq!(revoked, [ID, ID + 1].map(|id| Some(Event::Revoke(id))));
    drop(mapping);
    sleep(SOON / 4);
    assert!(host.try_wait().unwrap().is_none());
    drop(other);
    finish(host);
}

fn a_truncation_waits_for_the_deadline_at_most() {
    let window = Window::guarded_for(SOON);
    let file = window.file();
    let _mapping = window.map(Kind::Through, &file);
    let start = Instant::now();
    let host = window.host("truncate");
    // The window process goes on serving others.
    finish(window.host("read"));
    finish(host);
    assert!(start.elapsed() >= SOON);
    assert_eq!(file.metadata().unwrap().len(), 0);
}

/// Whoever freezes the daemon's control group does not freeze its guard.
fn a_frozen_daemon_holds_up_nobody_for_long() {
    let mut frozen = 0;
    for (file, freeze, thaw) in [("cgroup.freeze", "1", "0"), ("freezer.state", "FROZEN", "THAWED")] {
        let Some(group) = cgroup::Group::new(file) else { continue };
        let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("file");
        fs::write(&path, [b'r'; SIZE]).unwrap();
        // It is not in the group. It stops the daemon, which is this process, and has it go on in the end.
        let script = "read -r _; echo $2 >$1; timeout 100 cat $0 >/dev/null && timeout 100 truncate -s 0 $0; end=$?; \
                      echo $3 >$1; exit $end";
        let mut host = Command::new("sh");
        host.args(["-c", script]).arg(&path).arg(group.0.join(file)).args([freeze, thaw]);
        let mut host = host.stdin(Stdio::piped()).spawn().unwrap();
        group.set("cgroup.procs", 0);
        let proxy = proxy::start(GuardMode::Fanotify, SOON, seccomp::Action::Kill).unwrap_or_else(|e| skip(e));
        if let Guard::Off(reason) = proxy.guard() {
            skip(reason);
        }
        let opened = proxy.open(ID, Kind::Through, read_write(&path).as_fd()).unwrap();
        let _mapping = Mapping::new(opened.fd, 0);
        drop(host.stdin.take());
        finish(host);
        assert_eq!((proxy.shared_group(), fs::metadata(&path).unwrap().len()), (None, 0));
        fs::write(group.0.join("../cgroup.procs"), "0").unwrap();
        frozen += 1;
    }
    if frozen == 0 {
        skip("there are no control groups");
    }
}

fn nothing_hangs_under_load() {
    let window = Window::guarded();
    window.file();
    let mapped = Arc::new(std::sync::Mutex::new(None));
    let (theirs, proxy) = (Arc::clone(&mapped), Arc::clone(&window.proxy));
    spawn(move || {
        while proxy.next_event().is_some() {
            *theirs.lock().unwrap() = None;
        }
    });
    let mut storms: Vec<Child> = (0..2).map(|_| window.host("storm")).collect();
    let end = Instant::now() + LONG;
    let mut opened = 0;
    while storms.iter_mut().any(|storm| storm.try_wait().unwrap().is_none()) {
        assert!(Instant::now() < end, "a storm waits");
        let file = read_write(&window.path());
        let cached = window.map(Kind::Cached, &file);
        assert_eq!(cached.read(MAPPED - 1), 0);
        cached.write(1, b'm');
        window.proxy.invalidate(ID).unwrap();
        let through = window.proxy.open(ID, Kind::Through, file.as_fd());
        opened += usize::from(through.is_ok());
        *mapped.lock().unwrap() = through.ok();
    }
    assert!(opened > 0);
    assert!(storms.into_iter().all(|mut storm| storm.wait().unwrap().success()));
}

fn nothing_is_left_of_closed_files() {
    let window = Window::new(GuardMode::Fanotify);
    let before = window.descriptors();
    for id in 1..=200 {
        let path = window.dir.path().join(format!("{id}"));
        fs::write(&path, "r").unwrap();
        let file = read_write(&path);
        for kind in [Kind::Through, Kind::Cached] {
            let mapping = Mapping::new(window.proxy.open(id, kind, file.as_fd()).unwrap().fd, 0);
            assert_eq!(mapping.read(0), b'r');
        }
        if id == 200 {
            // A closed file can be executed, and has no marks.
            drop(file);
            wait_until("closed", || window.descriptors() == before);
            let marks = fs::read_dir(format!("/proc/{}/fdinfo", window.proxy.pid())).unwrap();
            let marks = marks.map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap());
            assert_eq!(marks.map(|info| info.matches("fanotify ino").count()).sum::<usize>(), 0);
        }
    }
}

fn the_process_can_do_little() {
    let dir = tempfile::tempfile().unwrap();
    let window = Window::new(GuardMode::Fanotify);
    let guarded = *window.proxy.guard() == Guard::On;
    // DAC_READ_SEARCH, SYS_ADMIN and, to read others' system calls, SYS_PTRACE of include/uapi/linux/capability.h.
    let kept: u64 = 1 << 2 | 1 << 21 | u64::from(guarded) << 19;
    for (set, wanted) in [("CapEff:", kept), ("CapPrm:", kept), ("CapBnd:", 0), ("CapInh:", 0), ("CapAmb:", 0)] {
        assert_eq!(u64::from_str_radix(&window.status(set), 16).unwrap(), wanted, "{set}");
    }
    assert_eq!((window.status("Seccomp:"), window.status("NoNewPrivs:")), ("2".into(), "1".into()));
    let pid = window.proxy.pid();
    for namespace in ["mnt", "net", "ipc", "uts"] {
        let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/{namespace}")).unwrap();
        assert_ne!(of(&pid.to_string()), of("self"), "{namespace}");
    }
    assert!(!Path::new(&format!("/proc/{pid}/root/bin")).exists());
    // A copy of a mount would keep a disk busy that the host unmounts.
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    assert_eq!(mounts.lines().count(), 1, "{mounts}");
    let ours = rustix::fs::fstat(&dir).unwrap().st_ino.to_string();
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap() {
        assert!(!fs::read_to_string(entry.unwrap().path()).unwrap().contains(&format!("ino:\t{ours}\n")));
    }
}

/// A daemon in its sandbox that has the file of the share mapped, and never reacts.
struct Daemon {
    child: Child,
    helper: Pid,
    dir: TempDir,
}

impl Daemon {
    fn start() -> Self {
        let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        fs::write(dir.path().join("file"), [b'r'; SIZE]).unwrap();
        let mut child = this(&["--daemon", dir.path().to_str().unwrap()]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let Ok(helper) = line.trim().parse() else { skip(line) };
        Self { child, helper: Pid::from_raw(helper).unwrap(), dir }
    }

    fn truncate(&self) -> Child {
        this(&["--host", "truncate", self.dir.path().join("file").to_str().unwrap()]).spawn().unwrap()
    }
}

fn daemon(share: &Path) {
    let proxy = proxy::start(GuardMode::Fanotify, HOUR, seccomp::Action::Kill).unwrap_or_else(|e| skip(e));
    let pid = proxy.pid();
    let (uid_map, gid_map) = (Vec::new(), Vec::new());
    let (shared_dir, sandbox) = (share.to_owned(), Sandbox::Namespace);
    let (shares, helper) = (Vec::new(), Some(pid));
    let settings = sandbox::Settings { sandbox, shared_dir, shares, uid_map, gid_map, helper, supervised: false };
    let (_, proxy) = sandbox::enter(&settings, proxy).unwrap();
    let opened = proxy.open(ID, Kind::Through, read_write(Path::new("/file")).as_fd()).unwrap();
    let mapping = Mapping::new(opened.fd, 0);
    // A truncation by the daemon, whose process id is another one outside.
    read_write(Path::new("/file")).set_len(4000).unwrap();
    println!("{}", if opened.guarded { pid.to_string() } else { proxy.guard().to_string() });
    while proxy.next_event().is_some() {}
    sleep(100 * SOON);
    drop(mapping);
}

fn it_ends_with_the_daemon() {
    let mut daemon = Daemon::start();
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    wait_until("gone", || is_gone(daemon.helper));

    // Only the serving process: the one that waits for it then ends too.
    let mut daemon = Daemon::start();
    let id = daemon.child.id();
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    let server = children.split_whitespace().find(|pid| *pid != daemon.helper.to_string()).unwrap();
    kill_process(Pid::from_raw(server.parse().unwrap()).unwrap(), Signal::KILL).unwrap();
    daemon.child.wait().unwrap();
    wait_until("gone", || is_gone(daemon.helper));
}

fn its_end_frees_who_waits() {
    let mut daemon = Daemon::start();
    let mut host = daemon.truncate();
    sleep(SOON / 2);
    assert!(host.try_wait().unwrap().is_none());
    kill_process(daemon.helper, Signal::KILL).unwrap();
    finish(host);
    wait_until("reaped", || !Path::new(&format!("/proc/{}", daemon.helper)).exists());
    assert!(daemon.child.try_wait().unwrap().is_none());
    daemon.child.kill().unwrap();
}

fn a_stopped_one_is_killed() {
    let mut daemon = Daemon::start();
    kill_process(daemon.helper, Signal::STOP).unwrap();
    finish(daemon.truncate());
    wait_until("reaped", || !Path::new(&format!("/proc/{}", daemon.helper)).exists());
    daemon.child.kill().unwrap();
}

/// A process of the host that does `what` to a file.
fn host(what: &str, path: &Path) {
    match what {
        "truncate" => truncate(path),
        "ftruncate" => read_write(path).set_len(0).unwrap(),
        "thread" => in_thread(|path| truncate(&path), path),
        "open_trunc" => drop(File::create(path).unwrap()),
        "punch" => punch(path),
        "read" => in_thread(|path| drop(fs::read(path).unwrap()), path),
        "write" => read_write(path).write_all_at(b"h", 0).unwrap(),
        "append" => io::Write::write_all(&mut OpenOptions::new().append(true).open(path).unwrap(), b"h").unwrap(),
        "mmap" => map_and_change(path),
        "sendfile" => drop(fs::copy(path, path.with_extension("copy")).unwrap()),
        "many" => (0..2000).for_each(|_| drop(fs::read(path).unwrap())),
        "storm" => (0..300).for_each(|_| storm(path)),
        "cost" => print_cost(path),
        _ => panic!("{what}"),
    }
}

/// Truncates and changes a file in many ways.
fn storm(path: &Path) {
    truncate(path);
    fs::write(path, [b'r'; SIZE]).unwrap();
    drop(fs::read(path).unwrap());
}

fn in_thread(what: fn(PathBuf), path: &Path) {
    let path = path.to_owned();
    spawn(move || what(path)).join().unwrap();
}

fn truncate(path: &Path) {
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the path is a string that ends with a zero.
    assert_eq!(unsafe { libc::truncate(path.as_ptr(), 0) }, 0);
}

fn punch(path: &Path) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(read_write(path), flags, 0, 4096).unwrap();
}

fn map_and_change(path: &Path) {
    let file = FileOffset::new(read_write(path), 0);
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    let mapping = MmapRegion::<()>::build(Some(file), 4096, prot, flags).unwrap();
    mapping.as_volatile_slice().write_obj(b'h', 0).unwrap();
}

/// Prints what 4 KiB of a file cost a host process, without and with a mark.
fn cost() {
    let window = Window::guarded();
    let file = window.file();
    file.write_all_at(&vec![b'r'; 2 * MAPPED], 0).unwrap();
    for round in 1..=3 {
        println!("round {round}, not marked:");
        finish(window.host("cost"));
        let _mapping = window.map(Kind::Through, &file);
        println!("round {round}, marked:");
        finish(window.host("cost"));
    }
}

fn print_cost(path: &Path) {
    let (file, mut block, calls) = (read_write(path), [0; 4096], 20_000);
    let time = |what, call: &mut dyn FnMut()| {
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        println!("  {what}: {} ns", start.elapsed().as_nanos() / calls);
    };
    time("pread", &mut || assert!(file.read_at(&mut block, 0).is_ok()));
    time("pwrite", &mut || assert!(file.write_at(&[0; 4096], 0).is_ok()));
    let mapping = Mapping::new(read_write(path).into(), 0);
    let start = Instant::now();
    (0..MAPPED).step_by(4096).for_each(|at| assert_ne!(mapping.read(at), b'x'));
    println!("  page faults: {} ns for each page", start.elapsed().as_nanos() * 4096 / MAPPED as u128);
    time("open, close", &mut || drop(File::open(path).unwrap()));
}
