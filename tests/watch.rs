//! What the guest's agent is told on each file system that is watched, for a daemon of root and one without
//! privileges. Needs root, loop devices, mkfs.ext4, mkfs.xfs, mkfs.btrfs and mkfs.f2fs.
//!
//! Each test has its own process and mount namespace.

mod common;
mod listening;
mod processes;

use std::collections::HashMap;
use std::ffi::CString;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::sh;
use listening::Listening;
use processes::{run_mounting, skip, this};
use rustix::fs::{Mode, OFlags};
use thruway::fs::{Config, FileHandles, PassthroughFs, proc_self_fd};
use thruway::fuse::Reply;
use thruway::fuse::abi::*;
use thruway::fuse::ops::{Attrs, Caller, Control, Creator, Files, Names, Threads, Xattrs};
use thruway::watch::Watch;
use thruway_guest::protocol::{Change, Place, ops};
use zerocopy::FromBytes;

type Test = fn(&Path);

const TESTS: &[(&str, Test)] = &[
    ("every_change_is_told", every_change_is_told),
    ("changes_by_handle_are_told", changes_by_handle_are_told),
    ("nested_file_systems", nested_file_systems),
];

/// The last is a subvolume, with a file system id of its own.
const DISKS: &[&str] = &["ext4", "xfs", "f2fs", "tmpfs", "btrfs", "btrfs-subvolume"];

const USERS: &[&str] = &["root", "nobody"];

/// Tests in a user namespace, and what is written to /proc/sys/user/max_fanotify_* there.
const LIMITED: &[(&str, Test, &str)] = &[
    ("marks_run_out", marks_run_out, "echo 3 >/proc/sys/user/max_fanotify_marks"),
    ("there_is_no_group", there_is_no_group, "echo 0 >/proc/sys/user/max_fanotify_groups"),
];

/// What a lease lasts here. No other timeout is as long.
const LEASE: u64 = 7777;

/// A limit on hangs.
const LONG: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--run", name, disk, user] => on_disk(name, disk, user),
        ["--inside", name, share] => test_of(name)(Path::new(share)),
        ["--other", share] => serve_other(Path::new(share)),
        _ => return run(args.iter().find(|arg| !arg.starts_with('-')).map_or("", String::as_str)),
    }
    ExitCode::SUCCESS
}

fn test_of(name: &str) -> Test {
    let limited = LIMITED.iter().map(|(name, test, _)| (*name, *test));
    TESTS.iter().copied().chain(limited).find(|(known, _)| *known == name).unwrap().1
}

fn run(filter: &str) -> ExitCode {
    let on_disks = TESTS
        .iter()
        .flat_map(|(name, _)| DISKS.iter().map(move |disk| (*name, *disk)))
        .flat_map(|(name, disk)| USERS.iter().map(move |user| [name, disk, *user]));
    let limited = LIMITED.iter().map(|(name, ..)| [*name, "tmpfs", "namespace"]);
    run_mounting(on_disks.chain(limited), filter)
}

/// Mounts a file system, and runs the test there as the user.
fn on_disk(name: &str, disk: &str, user: &str) {
    // Everybody may enter /mnt. What is mounted here ends with the namespace.
    sh("mount -t tmpfs -o mode=755 none /mnt && mkdir -m 777 /mnt/share");
    let image = std::env::temp_dir().join("image");
    let image = image.to_str().unwrap();
    match disk {
        "tmpfs" => sh("mount -t tmpfs -o size=64M,mode=777 none /mnt/share"),
        _ => {
            let mkfs = match disk {
                "f2fs" => "mkfs.f2fs",
                "ext4" => "mkfs.ext4 -q",
                "xfs" => "mkfs.xfs -q",
                _ => "mkfs.btrfs -q",
            };
            // XFS wants 300 MiB.
            sh(&format!("truncate -s 320M {image}"));
            let made = Command::new("sh")
                .args(["-ec", &format!("{mkfs} {image}")])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
            if !made.unwrap().success() {
                skip(format!("{mkfs} does not work"));
            }
            let mut mount = Command::new("mount");
            mount.args(["-o", "loop", image, "/mnt/share"]).stderr(Stdio::null());
            if !mount.status().unwrap().success() {
                skip(format!("the kernel does not mount {disk}"));
            }
            if disk == "btrfs-subvolume" {
                sh("cd /mnt/share && btrfs -q subvolume create volume && mount --bind volume /mnt/share");
            }
            sh("chmod 777 /mnt/share");
        }
    }
    if name == "nested_file_systems" {
        sh("mkdir -m 777 /mnt/share/nested");
        match disk {
            // The same inode numbers as in the subvolume above, and another device number.
            "btrfs" | "btrfs-subvolume" => sh("rmdir /mnt/share/nested; btrfs -q subvolume create /mnt/share/nested"),
            _ => sh("mount -t tmpfs -o mode=777 none /mnt/share/nested"),
        }
        sh("chmod 777 /mnt/share/nested");
        sh("mkdir /mnt/share/apart && touch /mnt/share/apart/file /mnt/share/bound && chmod 666 /mnt/share/apart/file");
        sh("mount --bind /mnt/share/apart/file /mnt/share/bound");
    }
    let mut inside = Command::new("/proc/self/exe");
    match (user, LIMITED.iter().find(|(limited, ..)| *limited == name)) {
        (_, Some((_, _, limit))) => {
            if !Command::new("unshare").args(["--user", "true"]).status().is_ok_and(|status| status.success()) {
                skip("there are no user namespaces");
            }
            inside = Command::new("unshare");
            let script = format!("{limit} 2>/dev/null || exit 77; exec \"$0\" \"$@\"");
            inside.args(["--user", "--map-root-user", "sh", "-c", &script]).arg(this(&[]).get_program());
        }
        ("nobody", _) => drop(inside.uid(65534).gid(65534)),
        _ => {}
    }
    let status = inside.args(["--inside", name, "/mnt/share"]).status().unwrap();
    if status.code() == Some(77) {
        skip("it cannot run here");
    }
    assert!(status.success(), "{status}");
}

/// What the agent is told. A change may say more.
struct Told {
    ops: u16,
    /// 0: any.
    node: u64,
    /// `None`: any.
    place: Option<Place>,
    to: Option<Place>,
}

impl Told {
    /// Whether the change is of this, with this op.
    fn is(&self, op: u16, change: &Change) -> bool {
        let at = |wanted: &Option<Place>, place: &Place| wanted.as_ref().is_none_or(|wanted| wanted == place);
        let node = self.node == 0 || self.node == change.node;
        change.has(op) && node && at(&self.place, &change.place) && at(&self.to, &change.to)
    }
}

/// Of a node, wherever it is.
fn of(ops: u16, node: u64) -> Told {
    Told { ops, node, place: None, to: None }
}

/// Of a name, and of the node if that is not 0.
fn at(ops: u16, node: u64, dir: u64, name: &str) -> Told {
    Told { ops, node, place: Some(place(dir, name)), to: None }
}

fn place(dir: u64, name: &str) -> Place {
    Place { dir, name: name.into() }
}

/// A guest with an agent, and a host.
struct World {
    fs: PassthroughFs,
    agent: Option<Arc<Listening>>,
    share: PathBuf,
}

impl World {
    fn new(share: &Path) -> Self {
        let world = Self::with_watch(share, Some(Watch::new().unwrap()));
        Self { agent: Some(Listening::start(&world.fs)), ..world }
    }

    fn with_watch(share: &Path, watch: Option<Watch>) -> Self {
        let root = rustix::fs::open(share, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let config = Config {
            inode_file_handles: FileHandles::Prefer,
            lease_timeout: Duration::from_secs(LEASE),
            xattr: true,
            ..Config::default()
        };
        let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), config).unwrap();
        let fs = fs.with_watch(watch).unwrap();
        fs.enter_thread(true);
        fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap();
        Self { fs, agent: None, share: share.to_owned() }
    }

    /// Runs a shell command in the share. The shell and all that it starts are other processes.
    fn host(&self, command: &str) {
        sh(&format!("cd {} && {command}", self.share.display()));
    }

    fn look(&self, dir: u64, name: &str) -> EntryOut {
        self.fs.lookup(dir, &CString::new(name).unwrap()).unwrap()
    }

    /// Looks a name up. It is leased: at once or, if an event was handled meanwhile, later.
    fn leased(&self, dir: u64, name: &str) -> EntryOut {
        let start = Instant::now();
        loop {
            let out = self.look(dir, name);
            if valid(&out) == (LEASE, LEASE) || (out.nodeid, out.entry_valid) == (0, LEASE) {
                return out;
            }
            assert!(start.elapsed() < LONG, "{name} is not leased: {:?}", valid(&out));
        }
    }

    /// Waits until the agent has been told all of this. The host's kernel may merge what one command does, or not.
    fn hears(&self, what: &str, expected: &[Told]) {
        let agent = self.agent.as_ref().unwrap();
        let mut all = agent.told.lock();
        let missing = |all: &[Change], told: &Told| {
            let bits = (0..u16::BITS).map(|bit| 1 << bit).filter(|bit| told.ops & bit != 0);
            bits.filter(|op| !all.iter().any(|change| told.is(*op, change))).sum::<u16>()
        };
        while expected.iter().any(|told| missing(&all, told) != 0) {
            let timed_out = agent.changed.wait_for(&mut all, LONG).timed_out();
            let missing: Vec<u16> = expected.iter().map(|told| missing(&all, told)).collect();
            assert!(!timed_out, "{what}: {missing:?} are missing in {all:?}");
        }
        all.clear();
    }
}

/// How long name and attributes are valid, in seconds.
fn valid(out: &EntryOut) -> (u64, u64) {
    (out.entry_valid, out.attr_valid)
}

fn every_change_is_told(share: &Path) {
    let world = World::new(share);
    world.host("mkdir d out && for f in f g h; do echo $f >d/$f; done && ln d/h out/h && ln -s f d/link");
    let d = world.leased(ROOT_ID, "d").nodeid;
    let [f, g, h, link] = ["f", "g", "h", "link"].map(|name| world.leased(d, name).nodeid);
    assert_eq!(world.leased(d, "none").nodeid, 0);
    let (write, attr, name) = (ops::CONTENTS | ops::CLOSED, ops::ATTRIBUTES, |ops, name| at(ops, 0, d, name));
    let moves = |node, from, to: Place| Told { to: Some(to), ..at(ops::RENAME, node, d, from) };
    let file = |ops| at(ops, f, d, "f");
    let cases: Vec<(&str, Vec<Told>)> = vec![
        ("echo x >d/f", vec![file(write)]),
        ("echo y >>d/f", vec![file(write)]),
        ("truncate -s 100 d/f", vec![file(ops::CONTENTS)]),
        ("dd if=/dev/zero of=d/f bs=1 count=1 seek=9 conv=notrunc", vec![file(write)]),
        ("fallocate -l 8192 d/f", vec![file(ops::CONTENTS)]),
        ("chmod 600 d/f", vec![file(attr)]),
        ("touch -m d/f", vec![file(write)]),
        ("touch -d '2001-02-03 04:05:06' d/f", vec![file(attr)]),
        // By a link that is not watched.
        ("echo z >>out/h", vec![of(write, h)]),
        ("chmod 700 d", vec![of(attr | ops::DIRECTORY, d)]),
        ("echo x >d/none", vec![name(ops::CREATE | write, "none")]),
        ("mkdir d/dir", vec![name(ops::CREATE | ops::DIRECTORY, "dir")]),
        ("rmdir d/dir", vec![name(ops::REMOVE | ops::DIRECTORY, "dir")]),
        ("mkfifo d/fifo", vec![name(ops::CREATE, "fifo")]),
        ("ln -s x d/symlink", vec![name(ops::CREATE, "symlink")]),
        ("ln d/f d/f2", vec![at(ops::CREATE, f, d, "f2")]),
        ("rm d/f2", vec![at(ops::REMOVE, f, d, "f2")]),
        ("mv d/g d/g2", vec![moves(g, "g", place(d, "g2"))]),
        ("mv d/g2 d/f", vec![moves(g, "g2", place(d, "f"))]),
        ("rm d/link", vec![at(ops::REMOVE, link, d, "link")]),
        ("mv d/f out/f", vec![moves(g, "f", place(0, "f"))]),
        ("rm out/h", vec![of(attr, h)]),
        ("rm d/h", vec![at(ops::REMOVE, h, d, "h")]),
        ("rm -r d", vec![at(ops::REMOVE | ops::DIRECTORY, d, ROOT_ID, "d")]),
    ];
    for (command, expected) in cases {
        world.host(command);
        world.hears(command, &expected);
    }
}

/// The daemon of another guest changes files by handle, which this host's kernel has dropped from its cache of names.
fn changes_by_handle_are_told(share: &Path) {
    let world = World::new(share);
    world.host("mkdir d e && for n in $(seq 300); do echo $n >d/$n; done && echo f >d/f && echo g >d/g");
    let mut other = this(&["--other"]).arg(share).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut answers = BufReader::new(other.stdout.take().unwrap()).lines();
    let mut orders = other.stdin.take().unwrap();
    let mut order = |words: &str| {
        writeln!(orders, "{words}").unwrap();
        assert_eq!(answers.next().unwrap().unwrap(), "done", "{words}");
    };
    // The other guest moves it, and looks it up nowhere.
    order("know d/f");
    order("know d/g");
    order("move d/g e/g");
    let (d, e) = (world.leased(ROOT_ID, "d").nodeid, world.leased(ROOT_ID, "e").nodeid);
    for (dir, name, file) in [(d, "f", "d/f"), (e, "g", "d/g")] {
        let node = world.leased(dir, name).nodeid;
        for (change, told) in [
            ("chmod", ops::ATTRIBUTES),
            ("append", ops::CONTENTS),
            ("truncate", ops::CONTENTS),
            ("open", ops::CONTENTS),
            ("setxattr", ops::ATTRIBUTES),
        ] {
            world.leased(dir, name);
            forget_names();
            order(&format!("{change} {file}"));
            world.hears(&format!("{change} {file}"), &[of(told, node)]);
        }
    }
    drop(orders);
    assert!(other.wait().unwrap().success());
}

/// Has this host's kernel forget the names of files, as far as it can. A daemon without privileges opens no file by
/// handle.
fn forget_names() {
    // The daemon keeps a descriptor for a second or two.
    let open = || {
        let all = fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
        all.into_iter().find(|path| path.starts_with("/mnt/share") && path.is_file())
    };
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let start = Instant::now();
    while let Some(file) = open() {
        assert!(start.elapsed() < LONG, "{} stays open", file.display());
        std::thread::sleep(Duration::from_millis(10));
    }
    // A name that was just used gets a second chance.
    for _ in 0..3 {
        fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
    }
}

/// The `fh` of a file that the guest opens.
fn open(fs: &PassthroughFs, node: u64, flags: i32) -> u64 {
    let (send, sent) = channel();
    let mut reply = Reply::late(1, Box::new(move |reply: Vec<u8>| send.send(reply).unwrap()));
    let open = OpenIn { flags: flags as u32, open_flags: 0 };
    let opened = fs.open(node, &open, Caller { uid: 0, gid: 0, pid: 0 }, &mut reply);
    reply.finish(opened);
    let reply = sent.recv().unwrap();
    let (header, body) = OutHeader::read_from_prefix(&reply).unwrap();
    assert_eq!(header.error, 0);
    OpenOut::read_from_bytes(body).unwrap().fh
}

/// The daemon of another guest, which has no agent. Each line of its input is an order.
fn serve_other(share: &Path) {
    let world = World::with_watch(share, None);
    let mut known = HashMap::new();
    let c = |name: &str| CString::new(name).unwrap();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let set = |valid: SetattrValid| SetattrIn { valid: valid.bits(), mode: 0o640, size: 1, ..Default::default() };
        let by = Caller { uid: 0, gid: 0, pid: 0 };
        let (dir, name) = words[1].split_once('/').unwrap();
        match words[0] {
            "know" => {
                let dir = world.look(ROOT_ID, dir).nodeid;
                known.insert(words[1].to_owned(), world.look(dir, name).nodeid);
            }
            "move" => {
                let (to, new) = words[2].split_once('/').unwrap();
                let [from, to] = [dir, to].map(|dir| world.look(ROOT_ID, dir).nodeid);
                let by = Creator { uid: 0, gid: 0, umask: 0, group: None, label: None };
                world.fs.rename(from, &c(name), to, &c(new), 0, &by).unwrap();
            }
            change => {
                forget_names();
                let node = known[words[1]];
                let open = |flags: i32, used: &dyn Fn(u64)| {
                    let fh = open(&world.fs, node, flags);
                    used(fh);
                    world.fs.release(node, &ReleaseIn { fh, ..Default::default() }).unwrap();
                };
                match change {
                    "chmod" => drop(world.fs.setattr(node, &set(SetattrValid::MODE), by).unwrap()),
                    "truncate" => drop(world.fs.setattr(node, &set(SetattrValid::SIZE), by).unwrap()),
                    "setxattr" => world.fs.setxattr(node, c"user.name", b"value", 0, None).unwrap(),
                    "open" => open(libc::O_WRONLY | libc::O_TRUNC, &|_| ()),
                    "append" => open(libc::O_WRONLY, &|fh| {
                        let fallocate = FallocateIn { fh, length: 9, ..Default::default() };
                        world.fs.fallocate(node, &fallocate).unwrap();
                    }),
                    other => panic!("{other}"),
                }
            }
        }
        println!("done");
    }
}

/// Another file system, or another subvolume, below the share. What is not watched is not leased.
fn nested_file_systems(share: &Path) {
    let world = World::new(share);
    world.host("echo x >f && echo x >nested/f");
    // The other name of a file that is mounted on one: its directory is not watched.
    let bound = world.leased(ROOT_ID, "bound").nodeid;
    world.host("echo x >>apart/file");
    world.hears("a file that is mounted on another", &[of(ops::CONTENTS, bound)]);
    let nested = world.look(ROOT_ID, "nested").nodeid;
    let node = |dir| world.look(dir, "f").nodeid;
    let (upper, lower) = (node(ROOT_ID), node(nested));
    assert_ne!(upper, lower);
    let watched = world.look(nested, "f").entry_valid == LEASE;
    println!("what is nested is {}", if watched { "watched" } else { "not watched" });
    world.leased(ROOT_ID, "f");
    world.host("echo y >>f");
    world.hears("above", &[of(ops::CONTENTS, upper)]);
    if watched {
        world.leased(nested, "f");
        world.host("echo y >>nested/f && mv nested/f nested/g");
        let renamed = Told { to: Some(place(nested, "g")), ..at(ops::RENAME, lower, nested, "f") };
        world.hears("below", &[of(ops::CONTENTS, lower), renamed]);
    } else {
        // What is on another mount of the guest is not asked for.
        let btrfs = rustix::fs::statfs(share).unwrap().f_type == libc::BTRFS_SUPER_MAGIC;
        let unwatched = if btrfs { vec![PathBuf::from("/nested")] } else { Vec::new() };
        assert_eq!(world.fs.unwatched(), unwatched);
        assert_eq!(valid(&world.look(nested, "f")), (1, 1));
        assert_eq!(world.fs.getattr(lower, None).unwrap().attr_valid, 1);
    }
}

/// The kernel allows three marks: the share, `a` and `b`.
fn marks_run_out(share: &Path) {
    let world = World::new(share);
    world.host("for d in a b c; do mkdir $d; echo $d >$d/f; done; ln a/f c/hard; echo x >f");
    let [a, b, c] = ["a", "b", "c"].map(|name| world.look(ROOT_ID, name));
    assert_eq!([valid(&a), valid(&b), valid(&c)], [(LEASE, LEASE), (LEASE, LEASE), (LEASE, 1)]);
    world.leased(b.nodeid, "f");
    assert_eq!(valid(&world.look(c.nodeid, "hard")), (1, 1), "neither the directory nor the file finds a mark");
    assert_eq!(valid(&world.look(a.nodeid, "f")), (LEASE, 1), "it has several links");
    // What is watched is still told.
    let f = world.look(b.nodeid, "f").nodeid;
    world.host("echo y >>b/f");
    world.hears("a file in b", &[of(ops::CONTENTS, f)]);
    // The guest forgets b and its file, and the kernel has room for one more.
    world.fs.forget(f, 1000);
    world.fs.forget(b.nodeid, 1000);
    assert_eq!(valid(&world.look(ROOT_ID, "c")), (LEASE, LEASE));
    world.host("touch c/new");
    world.hears("a name in c", &[at(ops::CREATE, 0, c.nodeid, "new")]);
}

/// The user has too many groups already. The daemon serves without a watch.
fn there_is_no_group(share: &Path) {
    let watch = Watch::new();
    assert_eq!(watch.as_ref().err().and_then(std::io::Error::raw_os_error), Some(libc::EMFILE));
    let world = World::with_watch(share, watch.ok());
    world.host("echo x >f");
    assert_eq!(valid(&world.look(ROOT_ID, "f")), (1, 1));
    assert!(fs::read(share.join("f")).is_ok());
}
