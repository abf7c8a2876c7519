use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Weak;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use parking_lot::Condvar;
use rustix::fs::{CWD, FileType, Mode, RenameFlags, mknodat, renameat_with};
use tempfile::TempDir;
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, FileOffset, VolatileMemory};

use super::*;

/// How long a test waits for something that must happen.
pub const LONG: Duration = Duration::from_secs(60);

/// Another process, which changes files. A test's own threads would count as the daemon.
pub struct Host {
    child: Child,
    lines: BufReader<UnixStream>,
}

impl Host {
    pub fn start() -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "watch::tests::the_host_process"])
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, lines: BufReader::new(ours) }
    }

    /// Changes a file, and returns when it has been changed. Whether it worked.
    pub fn run(&mut self, what: &str, paths: &[&Path], text: &str) -> bool {
        let mut line = what.as_bytes().to_vec();
        for part in paths.iter().map(|path| path.as_os_str().as_bytes()).chain([text.as_bytes()]) {
            line.push(b'\t');
            line.extend(part);
        }
        line.push(b'\n');
        self.lines.get_mut().write_all(&line).unwrap();
        let mut answer = String::new();
        self.lines.read_line(&mut answer).unwrap();
        assert!(!answer.is_empty(), "the host process has ended");
        answer == "yes\n"
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.lines.get_ref().shutdown(std::net::Shutdown::Both);
        let _ = self.child.wait();
    }
}

/// Not a test: what [`Host`] starts.
#[test]
#[ignore = "it is the other process of other tests"]
fn the_host_process() {
    let stdin = std::io::stdin();
    let mut lines = stdin.lock().lines();
    while let Some(Ok(line)) = lines.next() {
        let parts: Vec<&str> = line.split('\t').collect();
        let done = match parts[..] {
            ["write", path, text] => fs::write(path, text).is_ok(),
            ["append", path, text] => fs::OpenOptions::new()
                .append(true)
                .open(path)
                .is_ok_and(|mut file| file.write_all(text.as_bytes()).is_ok()),
            ["owner", path, value] => {
                let flags = rustix::fs::XattrFlags::empty();
                rustix::fs::setxattr(path, "user.containers.override_stat", value.as_bytes(), flags).is_ok()
            }
            ["chmod", path, mode] => {
                fs::set_permissions(path, fs::Permissions::from_mode(u32::from_str_radix(mode, 8).unwrap())).is_ok()
            }
            ["mkdir", path, _] => fs::create_dir(path).is_ok(),
            ["remove", path, _] => fs::remove_file(path).or_else(|_| fs::remove_dir(path)).is_ok(),
            ["link", from, to, _] => fs::hard_link(from, to).is_ok(),
            // By a mapping, after which it closes the file.
            ["store", path, text] => fs::OpenOptions::new().read(true).write(true).open(path).is_ok_and(|file| {
                let mapped: Result<MmapRegion, _> = MmapRegion::from_file(FileOffset::new(file, 0), text.len());
                mapped.is_ok_and(|mapped| mapped.as_volatile_slice().write_slice(text.as_bytes(), 0).is_ok())
            }),
            ["symlink", target, to, _] => std::os::unix::fs::symlink(target, to).is_ok(),
            ["rename", from, to, _] => fs::rename(from, to).is_ok(),
            ["swap", from, to, _] => renameat_with(CWD, from, CWD, to, RenameFlags::EXCHANGE).is_ok(),
            _ => panic!("{line}"),
        };
        rustix::io::write(stdin.as_fd(), if done { b"yes\n" } else { b"no\n" }).unwrap();
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Told {
    Node(u64, bool),
    Name(u64, String),
    Look(u64),
    LookUp(u64, String),
    All,
}

/// Events after which the contents are others.
const CONTENTS: u64 = libc::FAN_MODIFY | libc::FAN_CLOSE_WRITE;

struct Collector(Mutex<Sender<Told>>);

impl Collector {
    fn tell(&self, told: Told) {
        let _ = self.0.lock().send(told);
    }
}

impl Listener for Collector {
    fn change(&self, change: &Change) {
        let names = [Some((change.dir, change.name)).filter(|_| change.mask & NAMES != 0), change.to];
        for (dir, name) in names.into_iter().flatten().filter(|(dir, _)| *dir != 0) {
            self.tell(Told::Name(dir, String::from_utf8_lossy(name).into_owned()));
            self.tell(Told::Node(dir, true));
        }
        if change.node != 0 {
            self.tell(Told::Node(change.node, change.mask & CONTENTS != 0));
        }
    }

    fn look_again(&self, node: u64) {
        self.tell(Told::Look(node));
    }

    fn look_up_again(&self, dir: u64, name: &[u8]) {
        self.tell(Told::LookUp(dir, String::from_utf8_lossy(name).into_owned()));
    }

    fn all_changed(&self) {
        self.tell(Told::All);
    }

    fn all_told(&self) {}
}

/// A gate for the watch's thread.
#[derive(Default)]
struct Gate {
    closed: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    fn set(&self, closed: bool) {
        *self.closed.lock() = closed;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let mut closed = self.closed.lock();
        while *closed {
            self.changed.wait(&mut closed);
        }
    }
}

struct Bench {
    _dir: TempDir,
    root: PathBuf,
    watch: Watch,
    told: Receiver<Told>,
    host: Host,
    gate: Arc<Gate>,
    markers: u32,
}

/// The nodeid of the directory `inside`. `outside` is not watched.
const DIR: u64 = 1;

/// Where the tests run: the temporary directory, which may be any file system, and a tmpfs.
pub fn places() -> Vec<PathBuf> {
    let mut places = vec![std::env::temp_dir()];
    places.extend(Some(PathBuf::from("/dev/shm")).filter(|place| place.is_dir()));
    places
}

impl Bench {
    fn new(place: &Path, most_marks: usize) -> Self {
        let dir = TempDir::new_in(place).unwrap();
        let root = dir.path().to_owned();
        fs::create_dir(root.join("inside")).unwrap();
        fs::create_dir(root.join("outside")).unwrap();
        let watch = Watch::with_limits(most_marks, 1000).unwrap();
        let (sender, told) = channel();
        let gate = Arc::new(Gate::default());
        let passed = gate.clone();
        let collector = Arc::new(Collector(Mutex::new(sender)));
        let pass = move |step| match step {
            Step::Read => passed.pass(),
            Step::Counted | Step::Rests => {}
        };
        watch.start_stepped(collector, pass).unwrap();
        let bench = Self { _dir: dir, root, watch, told, host: Host::start(), gate, markers: 0 };
        bench.mark(DIR, "inside").unwrap();
        bench
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    fn id(&self, path: &str) -> FileId {
        crate::fs::file_id(CWD, &c_path(&self.path(path))).unwrap()
    }

    fn mark(&self, node: u64, path: &str) -> Result<(), Errno> {
        let path_ = self.path(path);
        let directory = path_.is_dir();
        self.watch.mark(node, self.id(path), Target { dir: Some(CWD), path: &c_path(&path_), directory })
    }

    /// The guest finds a file in `inside`.
    fn find(&self, node: u64, path: &str) {
        let id = self.id(path);
        // The test's own changes cause events too, and another process may have closed its files.
        while !self.watch.found(node, DIR, self.watch.handled(), || Some(id)) {}
    }

    fn host(&mut self, what: &str, paths: &[&str], text: &str) {
        let paths: Vec<PathBuf> = paths.iter().map(|path| self.root.join(path)).collect();
        let paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
        assert!(self.host.run(what, &paths, text), "{what} {paths:?}");
    }

    /// What was told up to now, each thing once and in order.
    fn told(&mut self) -> Vec<Told> {
        self.markers += 1;
        let name = format!("marker{}", self.markers);
        let path = format!("inside/{name}");
        self.host("mkdir", &[&path], "");
        let mut all = Vec::new();
        loop {
            match self.told.recv_timeout(LONG).expect("the watch says nothing") {
                Told::Name(DIR, told) if told == name => break,
                told if all.contains(&told) => {}
                told => all.push(told),
            }
        }
        // What follows the marker's name: its directory.
        assert_eq!(self.told.recv_timeout(LONG).unwrap(), Told::Node(DIR, true));
        all.sort_by_key(|told| format!("{told:?}"));
        all
    }

    /// The marks that the kernel has.
    fn marks(&self) -> usize {
        let info = format!("/proc/self/fdinfo/{}", self.watch.shared.group.as_raw_fd());
        fs::read_to_string(info).unwrap().lines().filter(|line| line.starts_with("fanotify ino:")).count()
    }
}

/// Makes a file without opening it. While another test starts a process, that process has all open files for a moment
/// and may be the one that closes them.
pub fn make(path: &Path) {
    mknodat(CWD, path, FileType::RegularFile, Mode::from_raw_mode(0o644), 0).unwrap();
}

pub fn c_path(path: &Path) -> std::ffi::CString {
    std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn name(name: &str) -> Told {
    Told::Name(DIR, name.into())
}

#[test]
fn every_kind_of_change_is_told() {
    for place in places() {
        let mut bench = Bench::new(&place, 100);
        for file in ["inside/a", "inside/b", "outside/o"] {
            make(&bench.path(file));
        }
        bench.find(10, "inside/a");
        bench.find(11, "inside/b");
        assert!(bench.watch.add(12, bench.id("outside/o")));
        assert_eq!(bench.told(), [], "own changes");
        let dir = || Told::Node(DIR, true);
        let cases: [(&str, &[&str], &str, Vec<Told>); 11] = [
            ("append", &["inside/a"], "x", vec![Told::Node(10, true)]),
            ("store", &["inside/a"], "y", vec![Told::Node(10, true)]),
            ("chmod", &["inside/a"], "600", vec![Told::Node(10, false)]),
            ("chmod", &["inside"], "711", vec![Told::Node(DIR, false)]),
            ("write", &["inside/new"], "x", vec![name("new"), dir()]),
            ("mkdir", &["inside/dir"], "", vec![name("dir"), dir()]),
            ("link", &["inside/a", "inside/a2"], "", vec![name("a2"), dir(), Told::Node(10, false)]),
            ("rename", &["inside/a2", "inside/a3"], "", vec![name("a2"), name("a3"), dir(), Told::Node(10, false)]),
            ("remove", &["inside/b"], "", vec![name("b"), dir(), Told::Node(11, false)]),
            ("rename", &["outside/o", "inside/o"], "", vec![name("o"), dir(), Told::Node(12, false)]),
            (
                "swap",
                &["inside/o", "inside/a"],
                "",
                vec![name("a"), name("o"), dir(), Told::Node(10, false), Told::Node(12, false)],
            ),
        ];
        for (what, paths, text, mut expected) in cases {
            bench.host(what, paths, text);
            expected.sort_by_key(|told| format!("{told:?}"));
            assert_eq!(bench.told(), expected, "{what} {paths:?} in {place:?}");
        }
        // Moved in: its own changes show from now on.
        assert_eq!(bench.watch.cover(12), Cover::ByDirectory);
        bench.host("append", &["inside/a"], "y");
        assert_eq!(bench.told(), [Told::Node(12, true)]);
    }
}

#[test]
fn a_file_that_leaves_is_not_covered() {
    for place in places() {
        let mut bench = Bench::new(&place, 100);
        for (node, file) in [(10, "a"), (11, "b"), (12, "c"), (13, "d")] {
            make(&bench.path("inside").join(file));
            bench.find(node, &format!("inside/{file}"));
            assert_eq!(bench.watch.cover(node), Cover::ByDirectory);
        }
        bench.host("rename", &["inside/a", "outside/a"], "");
        assert!(bench.told().contains(&Told::Node(10, false)));
        assert_eq!(bench.watch.cover(10), Cover::Not);
        bench.host("remove", &["inside/b"], "");
        bench.told();
        assert_eq!(bench.watch.cover(11), Cover::Not);
        // Own moves count too. They are told if the file is not covered any longer, and the new name if the host has
        // changed names in the directory: the guest may have believed that another file had the old one.
        fs::rename(bench.path("inside/c"), bench.path("outside/c")).unwrap();
        fs::rename(bench.path("inside/d"), bench.path("inside/e")).unwrap();
        assert_eq!(bench.told(), [Told::Look(12), Told::LookUp(DIR, "e".into())]);
        assert_eq!((bench.watch.cover(12), bench.watch.cover(13)), (Cover::Not, Cover::ByDirectory));
        fs::rename(bench.path("outside/c"), bench.path("inside/c")).unwrap();
        bench.told();
        assert_eq!(bench.watch.cover(12), Cover::ByDirectory);
        // What the guest has removed is gone, and needs no look.
        fs::remove_file(bench.path("inside/c")).unwrap();
        assert_eq!(bench.told(), []);
        assert_eq!(bench.watch.cover(12), Cover::Not);
    }
}

#[test]
fn a_file_that_moves_while_it_is_found_is_not_covered() {
    let mut bench = Bench::new(&std::env::temp_dir(), 100);
    for file in ["inside/a", "inside/b"] {
        make(&bench.path(file));
    }
    bench.find(10, "inside/a");
    bench.told();
    let (handled, id) = (bench.watch.handled(), bench.id("inside/b"));
    bench.host("rename", &["inside/a", "outside/a"], "");
    bench.told();
    // What was found before the move was handled, under the old name.
    assert!(!bench.watch.found(10, DIR, handled, || unreachable!("it is known")));
    assert!(!bench.watch.found(11, DIR, handled, || Some(id)) && !bench.watch.has(11));
    assert_eq!(bench.watch.cover(10), Cover::Not);
    bench.find(11, "inside/b");
    // The guest has moved it itself.
    assert!(bench.watch.moved(11, DIR));
    assert!(!bench.watch.moved(11, 77) && bench.watch.cover(11) == Cover::Not);
}

#[test]
fn a_marked_file_shows_changes_by_other_links() {
    for place in places() {
        let mut bench = Bench::new(&place, 100);
        make(&bench.path("inside/a"));
        fs::hard_link(bench.path("inside/a"), bench.path("outside/a")).unwrap();
        bench.find(10, "inside/a");
        bench.told();
        bench.host("append", &["outside/a"], "x");
        assert_eq!(bench.told(), [], "the other link's directory is not watched");
        bench.mark(10, "inside/a").unwrap();
        assert_eq!(bench.watch.cover(10), Cover::Itself);
        bench.host("append", &["outside/a"], "x");
        assert_eq!(bench.told(), [Told::Node(10, true)]);
        bench.host("remove", &["outside/a"], "");
        assert_eq!(bench.told(), [Told::Node(10, false)], "it has one link less");
    }
}

#[test]
fn a_file_with_two_numbers_is_told_of_own_changes() {
    let mut bench = Bench::new(&std::env::temp_dir(), 100);
    make(&bench.path("inside/a"));
    bench.find(10, "inside/a");
    bench.find(20, "inside/a");
    bench.told();
    let before = bench.watch.handled();
    crate::fs::truncate(&c_path(&bench.path("inside/a")), 5).unwrap();
    assert_eq!(bench.told(), [Told::Look(10), Told::Look(20)]);
    assert!(bench.watch.handled() >= before + 2, "the change and the marker");
    // Of what others do, the change has one.
    bench.host("append", &["inside/a"], "x");
    assert_eq!(bench.told(), [Told::Look(20), Told::Node(10, true)]);
}

#[test]
fn lost_events_are_told() {
    let mut bench = Bench::new(&places().pop().unwrap(), 100);
    make(&bench.path("inside/a"));
    bench.find(10, "inside/a");
    bench.told();
    let most: usize = fs::read_to_string("/proc/sys/fs/fanotify/max_queued_events").unwrap().trim().parse().unwrap();
    let before = bench.watch.handled();
    bench.gate.set(true);
    // The thread may have read some before the gate.
    for n in 0..most + 1000 {
        make(&bench.path(&format!("inside/n{n}")));
    }
    bench.host("rename", &["inside/a", "outside/a"], "");
    bench.gate.set(false);
    assert_eq!(bench.told.recv_timeout(LONG), Ok(Told::All));
    assert!(bench.watch.handled() > before);
    assert_eq!((bench.watch.cover(10), bench.watch.cover(DIR)), (Cover::Not, Cover::Itself));
    // It goes on.
    bench.host("chmod", &["inside"], "711");
    assert_eq!(bench.told(), [Told::Node(DIR, false)]);
}

#[test]
fn after_a_failure_nothing_is_watched() {
    let dir = TempDir::new().unwrap();
    let path = c_path(dir.path());
    let id = crate::fs::file_id(CWD, &path).unwrap();
    let target = Target { dir: Some(CWD), path: &path, directory: true };
    let mut watch = Watch::with_limits(100, 1000).unwrap();
    watch.mark(DIR, id, target).unwrap();
    assert!(watch.found(10, DIR, 0, || FileId::new(1, b"file")));
    assert_eq!((watch.cover(DIR), watch.cover(10)), (Cover::Itself, Cover::ByDirectory));
    // From now on read(2) of the group fails, as that of any directory does.
    Arc::get_mut(&mut watch.shared).unwrap().group = fs::File::open(dir.path()).unwrap().into();
    let (sender, told) = channel();
    watch.start(Arc::new(Collector(Mutex::new(sender)))).unwrap();
    assert_eq!(told.recv_timeout(LONG), Ok(Told::All));
    assert_eq!((watch.cover(DIR), watch.cover(10), watch.handled()), (Cover::Not, Cover::Not, 1));
    // Nothing is promised again.
    assert!(!watch.add(11, id) && !watch.found(12, DIR, 1, || Some(id)));
    assert_eq!((watch.mark(DIR, id, target), watch.is_marked(DIR)), (Err(Errno::NOSPC), false));
    watch.forget(DIR, |_| panic!("it has no mark"));
    watch.clear();
    assert_eq!(watch.mark(DIR, id, target), Err(Errno::NOSPC));
    assert!(told.recv_timeout(LONG).is_err(), "the thread has ended, and has said no more");
}

#[test]
fn events_are_counted_before_the_table_is_asked() {
    let mut bench = Bench::new(&std::env::temp_dir(), 100);
    make(&bench.path("inside/a"));
    let id = bench.id("inside/a");
    bench.told();
    let before = bench.watch.handled();
    bench.host("append", &["inside/a"], "x");
    assert_eq!(bench.told(), [], "it is not in the table yet");
    assert!(bench.watch.add(10, id));
    assert!(bench.watch.handled() > before, "whoever has entered it knows");
}

#[test]
fn marks_go_with_their_nodes() {
    let mut bench = Bench::new(&std::env::temp_dir(), 100);
    fs::create_dir(bench.path("inside/d")).unwrap();
    bench.told();
    bench.mark(2, "inside/d").unwrap();
    bench.mark(3, "inside/d").unwrap();
    assert_eq!(bench.marks(), 2, "one for each inode");
    let path = c_path(&bench.path("inside/d"));
    let target = Target { dir: None, path: &path, directory: true };
    bench.watch.forget(2, |_| panic!("node 3 needs the mark"));
    assert_eq!((bench.marks(), bench.watch.cover(3)), (2, Cover::Itself));
    bench.watch.forget(3, |unmark| unmark(target));
    assert_eq!((bench.marks(), bench.watch.cover(3)), (1, Cover::Not));
    bench.watch.forget(3, |_| panic!("there is none"));
    assert!(bench.watch.add(10, bench.id("inside/d")) && bench.watch.has(10));
    bench.watch.clear();
    assert_eq!((bench.marks(), bench.watch.cover(DIR), bench.watch.has(10)), (0, Cover::Not, false));
    bench.mark(DIR, "inside").unwrap();
    bench.host("chmod", &["inside"], "711");
    assert_eq!(bench.told(), [Told::Node(DIR, false)]);
}

#[test]
fn marks_and_nodes_have_a_limit() {
    let bench = Bench::new(&std::env::temp_dir(), 2);
    for dir in ["inside/d", "inside/e"] {
        fs::create_dir(bench.path(dir)).unwrap();
    }
    bench.mark(2, "inside/d").unwrap();
    assert_eq!((bench.mark(3, "inside/e"), bench.watch.cover(3)), (Err(Errno::NOSPC), Cover::Not));
    let path = c_path(&bench.path("inside/d"));
    bench.watch.forget(2, |unmark| unmark(Target { dir: None, path: &path, directory: true }));
    bench.mark(3, "inside/e").unwrap();
    let id = bench.id("inside/d");
    let added = (100..2000).filter(|node| bench.watch.add(*node, id)).count();
    assert_eq!(added, 998);
    assert!(bench.watch.add(100, id), "it is there already");
}

/// The mark would count for nobody.
#[test]
fn a_node_that_is_forgotten_while_it_is_marked_leaves_no_mark() {
    let bench = Bench::new(&std::env::temp_dir(), 2);
    fs::create_dir(bench.path("inside/d")).unwrap();
    let (path, id) = (c_path(&bench.path("inside/d")), bench.id("inside/d"));
    let target = || Target { dir: None, path: &path, directory: true };
    let shared = &bench.watch.shared;
    let marks = || {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", shared.group.as_raw_fd())).unwrap();
        info.lines().filter(|line| line.starts_with("fanotify ino:")).count()
    };
    let before = marks();
    let mark = || {
        let flags = libc::FAN_MARK_ADD | target().flags();
        fanotify::mark(shared.group.as_fd(), flags, target().mask(), target().start(), Some(&path)).unwrap();
    };
    mark();
    assert_eq!((shared.keep(2, id, target()), marks()), (Err(Errno::NOENT), before));
    // Unless the file has another node.
    bench.mark(3, "inside/d").unwrap();
    mark();
    assert_eq!((shared.keep(2, id, target()), marks()), (Err(Errno::NOENT), before + 1));
}

#[test]
fn own_events_wait_and_become_one() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("file");
    let file = fs::File::create(&path).unwrap();
    let watch = Watch::with_limits(10, 10).unwrap();
    let (sender, steps) = channel();
    let gate = Arc::new(Gate::default());
    gate.set(true);
    let passed = gate.clone();
    let step = move |step| {
        let _ = sender.send(step);
        if step == Step::Rests {
            passed.pass();
        }
    };
    let (told_to, told) = channel();
    watch.start_stepped(Arc::new(Collector(Mutex::new(told_to))), step).unwrap();
    for (node, path, directory) in [(DIR, dir.path(), true), (2, &*path, false)] {
        let c_path = c_path(path);
        let id = crate::fs::file_id(CWD, &c_path).unwrap();
        watch.mark(node, id, Target { dir: Some(CWD), path: &c_path, directory }).unwrap();
    }
    let next = || steps.recv_timeout(LONG).unwrap();
    let until_rest = || std::iter::repeat_with(next).take_while(|step| *step != Step::Rests).collect::<Vec<_>>();
    file.write_at(b"x", 0).unwrap();
    assert_eq!(until_rest()[0], Step::Read);
    for _ in 0..1000 {
        file.write_at(b"x", 0).unwrap();
    }
    gate.set(false);
    let counted = until_rest().iter().filter(|step| **step == Step::Counted).count();
    // The directory's event and the file's.
    assert!((1..=2).contains(&counted), "{counted} events");
    assert!(told.try_recv().is_err(), "own changes were told");
    // Nothing waits behind another's change.
    assert!(Host::start().run("append", &[&path], "x"));
    assert_eq!(told.recv_timeout(LONG).unwrap(), Told::Node(2, true));
    drop(watch);
    assert!(steps.iter().all(|step| step != Step::Rests));
}

#[test]
fn the_thread_ends_with_the_watch() {
    let listener: Arc<dyn Listener> = Arc::new(Collector(Mutex::new(channel().0)));
    let alive: Weak<dyn Listener> = Arc::downgrade(&listener);
    let watch = Watch::new().unwrap();
    watch.start(listener).unwrap();
    assert!(alive.upgrade().is_some());
    drop(watch);
    let start = std::time::Instant::now();
    while alive.upgrade().is_some() {
        assert!(start.elapsed() < LONG, "it has not ended");
        thread::yield_now();
    }
}
