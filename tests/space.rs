//! Full disks while a guest stores in place, on small file systems, with the real window process and guard. Needs root,
//! loop devices, mkfs.ext4, mkfs.xfs and mkfs.btrfs.
//!
//! Each test has its own process and mount namespace.

mod common;
mod processes;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use common::sh;
use processes::{run_mounting, skip, this};
use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;
use thruway::device;
use thruway::fs::{Config, PassthroughFs, proc_self_fd};
use thruway::fuse::Server;
use thruway::fuse::abi::*;
use thruway::sandbox::seccomp;
use thruway::window::proxy::{self, Guard, GuardMode};
use thruway::window::{PATIENCE, RANGE, Settings, Window, Writable};
use thruway_bench::frontend::{Frontend, Mapped, Options, Window as Region};
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, FileOffset, VolatileMemory};
use zerocopy::{FromBytes, IntoBytes};

type Test = fn(&str);

const TESTS: &[(&str, Test)] = &[
    ("a_store_has_room", a_store_has_room),
    ("a_load_has_room", a_load_has_room),
    ("a_hole_that_comes_later_has_room", a_hole_that_comes_later_has_room),
    ("growth_has_room", growth_has_room),
    ("each_open_hears_of_a_failure_once", each_open_hears_of_a_failure_once),
    ("another_daemon_takes_no_blocks", another_daemon_takes_no_blocks),
    ("what_is_immutable_is_not_stored_to", what_is_immutable_is_not_stored_to),
    ("a_disk_without_writing_is_read_in_place", a_disk_without_writing_is_read_in_place),
    ("what_passes_is_stored_to_on_a_full_disk", what_passes_is_stored_to_on_a_full_disk),
    (
        "a_clone_ends_stores_in_place_until_the_guest_wants_them",
        a_clone_ends_stores_in_place_until_the_guest_wants_them,
    ),
    ("a_copy_ends_stores_in_place_to_a_file_mapped_meanwhile", a_copy_ends_stores_in_place_to_a_file_mapped_meanwhile),
];

/// ext2 stands for file systems that cannot allocate in advance.
const DISKS: &[&str] = &["ext4", "ext2", "ext4-quota", "xfs", "xfs-quota", "btrfs", "tmpfs"];

/// Of 32 ranges.
const SIZE: u64 = 32 * RANGE;

/// No file is larger than this in a test: 16 MiB.
const LEN: u64 = 8 * RANGE;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--run", name, disk] => TESTS.iter().find(|(n, _)| *n == name).unwrap().1(disk),
        ["--daemon", share, socket] => daemon(share, socket),
        ["--clone", from, to] => clone(from, to),
        _ => return run_disks(args.iter().find(|arg| !arg.starts_with('-')).map_or("", String::as_str)),
    }
    ExitCode::SUCCESS
}

fn run_disks(filter: &str) -> ExitCode {
    run_mounting(TESTS.iter().flat_map(|(name, _)| DISKS.iter().map(move |disk| [*name, *disk])), filter)
}

/// A process of the host that copies a file so that both share the blocks.
fn clone(from: &str, to: &str) {
    // As in tests/passthrough.rs: this process has inherited the mapping that must go.
    // SAFETY: nothing in this process uses these descriptors.
    assert_eq!(unsafe { libc::close_range(3, u32::MAX, 0) }, 0);
    sh(&format!("cp --reflink=always {from} {to}"));
}

/// A small file system of its own.
struct Disk {
    kind: String,
    dir: TempDir,
}

impl Disk {
    fn new(kind: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (image, share) = (dir.path().join("image"), dir.path().join("share"));
        fs::create_dir(&share).unwrap();
        let (image, at) = (image.to_str().unwrap(), share.to_str().unwrap());
        let (mkfs, options) = match kind {
            "ext4" => ("mkfs.ext4 -q -m 0", "loop"),
            "ext4-quota" => ("mkfs.ext4 -q -m 0 -O quota,project -E quotatype=prjquota", "loop,prjquota"),
            "ext2" => ("mkfs.ext2 -q -m 0", "loop"),
            "xfs" => ("mkfs.xfs -q -m reflink=1", "loop"),
            "xfs-quota" => ("mkfs.xfs -q -m reflink=1", "loop,prjquota"),
            "btrfs" => ("mkfs.btrfs -q", "loop"),
            _ => {
                sh(&format!("mount -t tmpfs -o size=64M none {at}"));
                return Self { kind: kind.into(), dir };
            }
        };
        // XFS wants 300 MiB.
        sh(&format!("truncate -s 320M {image} && {mkfs} {image}"));
        let mounted = Command::new("mount").args(["-o", options, image, at]).stderr(Stdio::null()).status().unwrap();
        if !mounted.success() {
            skip(format!("the kernel does not mount {kind}"));
        }
        if kind.ends_with("quota") {
            sh(&format!("xfs_quota -fxc 'project -s -p {at} 7' -c 'limit -p bhard=64m 7' {at}"));
        }
        Self { kind: kind.into(), dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("share").join(name)
    }

    /// A new file of this size, whose first bytes are "r".
    fn file(&self, name: &str, filled: u64, len: u64) -> File {
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(self.path(name)).unwrap();
        file.write_all(&vec![b'r'; filled as usize]).unwrap();
        file.set_len(len).unwrap();
        file.sync_all().unwrap();
        file
    }

    /// Fills the disk. The first sync frees what the file system had reserved.
    fn fill(&self) {
        let mut file = OpenOptions::new().append(true).create(true).open(self.path("filler")).unwrap();
        for _ in 0..3 {
            let mut piece = &vec![b'f'; 1 << 20][..];
            while !piece.is_empty() {
                if file.write(piece).is_err() {
                    piece = &piece[piece.len() / 2 + 1..];
                }
            }
            let _ = file.sync_all();
        }
    }

    /// A daemon for another guest, in its own process.
    fn another_daemon(&self) -> Daemon {
        let socket = tempfile::tempdir().unwrap();
        let path = socket.path().join("socket");
        let mut daemon = Command::new(std::env::current_exe().unwrap());
        daemon.args(["--daemon".as_ref(), self.path(".").as_os_str(), path.as_os_str()]);
        Daemon { process: daemon.spawn().unwrap(), socket }
    }

    /// Whether a store to a page that has blocks takes no new ones.
    fn stores_in_place(&self) -> bool {
        self.kind != "btrfs"
    }
}

struct Daemon {
    process: Child,
    socket: TempDir,
}

impl Daemon {
    fn guest(self) -> (Guest, Self) {
        let path = self.socket.path().join("socket");
        let until = Instant::now() + Duration::from_secs(100);
        while !path.exists() && Instant::now() < until {
            sleep(Duration::from_millis(1));
        }
        let frontend = Frontend::connect(&path, Options::default()).unwrap();
        frontend.fuse_init(u64::MAX).unwrap();
        (Guest { frontend, region: None, _socket: None }, self)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

struct Guest {
    frontend: Frontend,
    /// None: it has no window.
    region: Option<Region>,
    _socket: Option<TempDir>,
}

impl Guest {
    fn new(disk: &Disk) -> Self {
        Self::with(disk, SIZE, None)
    }

    /// A guest with window passthrough.
    fn passing(disk: &Disk) -> Self {
        Self::with(
            disk,
            0,
            Some(Settings { size: 2 * SIZE, slots: 8, writable: Writable::InPlace, patience: PATIENCE }),
        )
    }

    fn with(disk: &Disk, dax: u64, passthrough: Option<Settings>) -> Self {
        // By a process of one thread.
        let proxy =
            proxy::start(GuardMode::Fanotify, proxy::DEADLINE, seccomp::Action::Kill).unwrap_or_else(|e| skip(e));
        if disk.kind != "tmpfs" && *proxy.guard() != Guard::On {
            skip(proxy.guard());
        }
        let root = rustix::fs::open(disk.path("."), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let window = Window::new(dax, passthrough, Arc::new(proxy)).unwrap();
        let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), Config::default()).unwrap();
        let fs = fs.with_window(Some(window.clone()));
        let socket = tempfile::tempdir().unwrap();
        let path = socket.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let options = device::Options { window: Some(window), ..Default::default() };
        spawn(move || device::serve(listener, Arc::new(Server::new(fs)), options));
        let mut frontend = Frontend::connect(&path, Options::default()).unwrap();
        let region = Some(frontend.open_window().unwrap());
        frontend.fuse_init(u64::MAX).unwrap();
        Self { frontend, region, _socket: Some(socket) }
    }

    fn call(&self, opcode: Opcode, node: u64, args: &[u8], room: usize) -> Result<Vec<u8>, i32> {
        self.frontend.request(1, opcode as u32, node, args, &[], room)
    }

    fn lookup(&self, name: &str) -> u64 {
        self.entry(name).nodeid
    }

    fn entry(&self, name: &str) -> EntryOut {
        let name = format!("{name}\0");
        let entry = self.call(Opcode::Lookup, ROOT_ID, name.as_bytes(), size_of::<EntryOut>()).unwrap();
        EntryOut::read_from_bytes(&entry).unwrap()
    }

    fn open(&self, node: u64) -> u64 {
        self.open_passing(node).0
    }

    /// The handle, and the index if it has passthrough.
    fn open_passing(&self, node: u64) -> (u64, Option<u32>) {
        let open = OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
        let out = self.call(Opcode::Open, node, open.as_bytes(), size_of::<OpenOut>()).unwrap();
        let out = OpenOut::read_from_bytes(&out).unwrap();
        let passes = out.open_flags & OpenFlags::PASSTHROUGH.bits() != 0;
        (out.fh, passes.then_some(out.backing_id as u32))
    }

    /// The passthrough window's table.
    fn table(&self) -> MmapRegion {
        let mapped = self.region.as_ref().unwrap().mapped_in(2)[&0].clone();
        let file = FileOffset::new(File::from(mapped.file.try_clone().unwrap()), mapped.from);
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        MmapRegion::build(Some(file), mapped.len as usize, prot, libc::MAP_SHARED).unwrap()
    }

    /// Flags and offset of an entry of the table.
    fn slot(&self, index: u32) -> (u32, u64) {
        let (table, at) = (self.table(), 64 * index as usize);
        let table = table.as_volatile_slice();
        (table.read_obj(at + 4).unwrap(), table.read_obj(at + 8).unwrap())
    }

    fn acknowledge(&self, index: u32) {
        let table = self.table();
        let table = table.as_volatile_slice();
        let generation: u32 = table.read_obj(64 * index as usize + 48).unwrap();
        table.write_obj(generation, 64 * 4096 + 16 * index as usize).unwrap();
    }

    fn ask(&self, node: u64, fh: u64, write: bool) -> Result<(), i32> {
        let flags = SETUPMAPPING_PASSTHROUGH | if write { SETUPMAPPING_WRITE } else { 0 };
        let args = SetupmappingIn { fh, len: LEN, flags, ..Default::default() };
        self.call(Opcode::Setupmapping, node, args.as_bytes(), 0).map(drop)
    }

    /// As Linux does: one range, at the same place of the window.
    fn map(&self, node: u64, range: u64, write: bool) -> Result<(), i32> {
        let at = range * RANGE;
        let flags = if write { SETUPMAPPING_WRITE } else { 0 };
        let args = SetupmappingIn { fh: u64::MAX, foffset: at, len: RANGE, flags, moffset: at };
        self.call(Opcode::Setupmapping, node, args.as_bytes(), 0).map(drop)
    }

    fn size(&self, node: u64) -> u64 {
        let out = self.call(Opcode::Getattr, node, GetattrIn::default().as_bytes(), size_of::<AttrOut>()).unwrap();
        AttrOut::read_from_bytes(&out).unwrap().attr.size
    }

    fn set_size(&self, node: u64, size: u64) -> Result<(), i32> {
        let attr = SetattrIn { valid: SetattrValid::SIZE.bits(), size, ..Default::default() };
        self.call(Opcode::Setattr, node, attr.as_bytes(), size_of::<AttrOut>()).map(drop)
    }

    fn write(&self, node: u64, fh: u64, offset: u64, len: usize) -> Result<(), i32> {
        let write = WriteIn { fh, offset, size: len as u32, ..Default::default() };
        let args = [write.as_bytes(), &vec![b'w'; len]].concat();
        self.call(Opcode::Write, node, &args, size_of::<WriteOut>()).map(drop)
    }

    fn fallocate(&self, node: u64, fh: u64, mode: i32, offset: u64, length: u64) -> Result<(), i32> {
        let args = FallocateIn { fh, offset, length, mode: mode as u32, padding: 0 };
        self.call(Opcode::Fallocate, node, args.as_bytes(), 0).map(drop)
    }

    fn mapped(&self) -> BTreeMap<u64, Mapped> {
        self.region.as_ref().unwrap().mapped()
    }

    /// The signal that the frontend gets when the guest touches each page of this part of a range, if any.
    fn touch(&self, range: u64, len: u64, write: bool) -> Option<i32> {
        Self::touch_mapped(&self.mapped()[&(range * RANGE)], len, write)
    }

    /// The same of a file that passes.
    fn touch_slot(&self, index: u32, len: u64, write: bool) -> Option<i32> {
        Self::touch_mapped(&self.region.as_ref().unwrap().mapped_in(1)[&self.slot(index).1], len, write)
    }

    fn touch_mapped(mapped: &Mapped, len: u64, write: bool) -> Option<i32> {
        let file = FileOffset::new(File::from(mapped.file.try_clone().unwrap()), mapped.from);
        let (prot, len) = (libc::PROT_READ | libc::PROT_WRITE, len as usize);
        let memory: MmapRegion = MmapRegion::build(Some(file), len, prot, libc::MAP_SHARED).unwrap();
        let at = memory.as_ptr();
        // SAFETY: the child touches nothing but the mapping, and ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            for page in (0..len).step_by(4096) {
                // SAFETY: it is mapped, and beyond the file's end nothing is touched.
                unsafe {
                    match write {
                        true => at.add(page).write_volatile(b's'),
                        false => drop(at.add(page).read_volatile()),
                    }
                }
            }
            // SAFETY: nothing is to be cleaned up.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: it is this process's own child.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status))
    }

    /// The guest's processes store wherever they may.
    fn store(&self, ranges: impl IntoIterator<Item = u64>) {
        for range in ranges {
            assert_eq!(self.touch(range, RANGE, true), None, "range {range}");
        }
    }
}

fn is_full(done: Result<(), i32>) -> bool {
    assert!(matches!(done, Ok(()) | Err(libc::ENOSPC | libc::EDQUOT)), "{done:?}");
    done.is_err()
}

fn a_store_has_room(kind: &str) {
    let disk = Disk::new(kind);
    let guest = Guest::new(&disk);
    let file = disk.file("file", RANGE / 2, LEN);
    let entry = guest.entry("file");
    let node = entry.nodeid;
    // With dax=inode, only where a mapping has the file's own pages.
    assert_eq!(entry.attr.flags & ATTR_DAX != 0, disk.stores_in_place());
    // Read before, with a hole; stored to, with one; all there.
    guest.map(node, 0, false).unwrap();
    guest.map(node, 1, true).unwrap();
    file.write_all_at(&vec![b'r'; RANGE as usize], 2 * RANGE).unwrap();
    guest.map(node, 2, true).unwrap();
    if kind.starts_with("xfs") || kind == "btrfs" {
        // Blocks that another file has too.
        disk.file("shared", 2 * RANGE, 2 * RANGE);
        sh(&format!("cp --reflink=always {0}/shared {0}/copy", disk.path(".").display()));
        let shared = guest.lookup("shared");
        let args = SetupmappingIn { fh: u64::MAX, len: RANGE, moffset: 20 * RANGE, ..Default::default() };
        let write = SetupmappingIn { flags: SETUPMAPPING_WRITE, moffset: 21 * RANGE, foffset: RANGE, ..args };
        for args in [args, write] {
            guest.call(Opcode::Setupmapping, shared, args.as_bytes(), 0).unwrap();
        }
        disk.fill();
        let upgrade = SetupmappingIn { flags: SETUPMAPPING_WRITE, ..args };
        if !is_full(guest.call(Opcode::Setupmapping, shared, upgrade.as_bytes(), 0).map(drop)) {
            guest.store([20]);
        }
        guest.store([21]);
    }
    disk.fill();
    let upgraded = guest.map(node, 0, true);
    let new = guest.map(node, 3, true);
    assert!(is_full(upgraded) == is_full(new) || kind == "tmpfs");
    // Where the guest stores to a copy, it hears of it at fsync.
    let copies = !disk.stores_in_place() || matches!(kind, "ext2");
    assert_eq!(is_full(upgraded), !copies && kind != "tmpfs", "{upgraded:?}");
    // A refusal leaves what there is.
    assert!(guest.mapped().contains_key(&0));
    assert_eq!(guest.touch(0, RANGE, false), None);
    guest.store([1, 2]);
    if upgraded.is_ok() {
        guest.store([0]);
    }
    if new.is_ok() {
        guest.store([3]);
    }
}

fn a_load_has_room(kind: &str) {
    let disk = Disk::new(kind);
    let guest = Guest::new(&disk);
    disk.file("file", RANGE / 2, LEN);
    let node = guest.lookup("file");
    for range in 0..3 {
        guest.map(node, range, false).unwrap();
    }
    disk.fill();
    for range in 0..3 {
        assert_eq!(guest.touch(range, RANGE, false), None, "range {range}");
    }
}

fn a_hole_that_comes_later_has_room(kind: &str) {
    let disk = Disk::new(kind);
    let guest = Guest::new(&disk);
    let file = disk.file("file", LEN, LEN);
    let node = guest.lookup("file");
    let fh = guest.open(node);
    for range in 0..6 {
        guest.map(node, range, true).unwrap();
    }
    guest.store(0..6);
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    guest.fallocate(node, fh, punch, RANGE / 2, RANGE).unwrap();
    let _ = guest.fallocate(node, fh, libc::FALLOC_FL_ZERO_RANGE, 3 * RANGE, RANGE);
    // It did make room.
    let blocks = rustix::fs::fstat(&file).unwrap().st_blocks as u64;
    assert!(kind == "btrfs" || blocks * 512 < LEN, "{blocks}");
    if kind != "tmpfs" {
        // By a descriptor that was open before, which the guard does not see, and by a new one.
        sh(&format!("fallocate -p -o {} -l {RANGE} {}", 4 * RANGE, disk.path("file").display()));
    }
    disk.fill();
    guest.store(0..6);
    let mut bytes = [0; 2];
    file.read_exact_at(&mut bytes[..1], 2 * RANGE).unwrap();
    assert_eq!(bytes[0], b's');
}

fn growth_has_room(kind: &str) {
    let disk = Disk::new(kind);
    let guest = Guest::new(&disk);
    let page = 4096;
    let files: Vec<File> = ["a", "b", "c", "d"].map(|name| disk.file(name, page, page)).into();
    let nodes: Vec<u64> = ["a", "b", "c", "d"].map(|name| guest.lookup(name)).into();
    for (at, node) in nodes.iter().enumerate() {
        let at = at as u64 * RANGE;
        let args =
            SetupmappingIn { fh: u64::MAX, len: RANGE, flags: SETUPMAPPING_WRITE, moffset: at, ..Default::default() };
        guest.call(Opcode::Setupmapping, *node, args.as_bytes(), 0).unwrap();
    }
    let fh = guest.open(nodes[1]);
    // What has been written is there, though there is no room for as much again.
    let room = RANGE / 2;
    guest.map(nodes[0], 0, true).unwrap();
    guest.write(nodes[0], guest.open(nodes[0]), page, room as usize).unwrap();
    assert_eq!(guest.size(nodes[0]), page + room);
    guest.set_size(nodes[0], page).unwrap();
    // While there is room, and cut off again.
    guest.set_size(nodes[2], RANGE).unwrap();
    guest.set_size(nodes[2], page).unwrap();
    guest.write(nodes[1], fh, 2 * page, page as usize).unwrap();
    disk.fill();
    // By the guest, as a whole and by a write beyond the end, after a cut; by another process.
    let _ = guest.set_size(nodes[0], RANGE);
    let _ = guest.write(nodes[1], fh, RANGE / 2, 1);
    let _ = guest.set_size(nodes[2], RANGE);
    files[3].set_len(RANGE / 2).unwrap();
    for (range, node) in nodes.iter().enumerate() {
        let known = guest.size(*node).min(RANGE);
        assert_eq!(guest.touch(range as u64, known, true), None, "file {range}, {known} bytes");
    }
    assert!(disk.stores_in_place() || guest.size(nodes[0]) == RANGE);
}

fn what_is_immutable_is_not_stored_to(kind: &str) {
    let disk = Disk::new(kind);
    for name in ["before", "later"] {
        disk.file(name, LEN, LEN);
    }
    let immutable =
        |name| Command::new("chattr").arg("+i").arg(disk.path(name)).stderr(Stdio::null()).status().unwrap();
    if !immutable("before").success() {
        skip(format!("{kind} has no chattr +i"));
    }
    let guest = Guest::new(&disk);
    let (before, later) = (guest.lookup("before"), guest.lookup("later"));
    assert_eq!(guest.map(before, 0, true), Err(libc::EPERM));
    guest.map(before, 0, false).unwrap();
    assert_eq!(guest.touch(0, RANGE, false), None);
    guest.map(later, 1, false).unwrap();
    immutable("later");
    let stored = guest.map(later, 1, true);
    assert!(matches!(stored, Ok(()) | Err(libc::EPERM)), "{stored:?}");
    assert!(stored.is_err() || !kind.starts_with("ext4"));
    assert_eq!(guest.touch(1, RANGE, stored.is_ok()), None);
}

fn a_disk_without_writing_is_read_in_place(kind: &str) {
    let disk = Disk::new(kind);
    disk.file("file", LEN, LEN);
    sh(&format!("mount -o remount,ro {}", disk.path("").display()));
    let guest = Guest::new(&disk);
    let node = guest.lookup("file");
    assert_eq!(guest.map(node, 0, true), Err(libc::EROFS));
    guest.map(node, 0, false).unwrap();
    assert_eq!(guest.touch(0, RANGE, false), None);
}

const VALID: u32 = 1;
const WRITABLE: u32 = 2;
const REVOKED: u32 = 4;

fn what_passes_is_stored_to_on_a_full_disk(kind: &str) {
    let disk = Disk::new(kind);
    let guest = Guest::passing(&disk);
    for (name, filled) in [("whole", LEN), ("sparse", RANGE / 2), ("shared", LEN)] {
        disk.file(name, filled, LEN);
    }
    let shares = disk.kind.starts_with("xfs") || disk.kind == "btrfs";
    if shares {
        sh(&format!("cp --reflink=always {0}/shared {0}/copy", disk.path(".").display()));
    }
    let nodes = ["whole", "sparse", "shared"].map(|name| guest.lookup(name));
    let opened = nodes.map(|node| guest.open_passing(node));
    let passes = opened.map(|(_, index)| index.is_some());
    assert_eq!(passes, [disk.stores_in_place(), false, !shares]);
    disk.fill();
    for index in opened.into_iter().filter_map(|(_, index)| index) {
        assert_eq!(guest.slot(index).0, VALID | WRITABLE);
        assert_eq!(guest.touch_slot(index, LEN, true), None);
    }
    if let [(fh, Some(index)), (out, None), _] = opened {
        // A hole that comes later: the guest may read, and stores if there is room.
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        fs::remove_file(disk.path("filler")).unwrap();
        guest.fallocate(nodes[0], fh, punch, RANGE, RANGE).unwrap();
        disk.fill();
        assert_eq!(guest.slot(index).0, VALID | WRITABLE | REVOKED);
        guest.acknowledge(index);
        let until = Instant::now() + Duration::from_secs(100);
        while guest.slot(index).0 & (VALID | REVOKED) != VALID && kind != "tmpfs" && Instant::now() < until {
            sleep(Duration::from_millis(1));
        }
        if kind == "tmpfs" {
            return;
        }
        assert_eq!((guest.slot(index).0, guest.touch_slot(index, LEN, false)), (VALID, None));
        // ext2 cannot allocate.
        let none = if kind == "ext2" { libc::EIO } else { libc::ENOSPC };
        assert_eq!(guest.ask(nodes[0], fh, true), Err(none));
        fs::remove_file(disk.path("filler")).unwrap();
        if kind != "ext2" {
            assert_eq!((guest.ask(nodes[0], fh, true), guest.slot(index).0), (Ok(()), VALID | WRITABLE));
            disk.fill();
            assert_eq!(guest.touch_slot(index, LEN, true), None);
        }
        // The guest's own copy takes blocks of its own, or the guest's kernel copies.
        let args = CopyFileRangeIn { fh_in: fh, nodeid_out: nodes[1], fh_out: out, len: RANGE, ..Default::default() };
        let copied = guest.call(Opcode::CopyFileRange, nodes[0], args.as_bytes(), size_of::<WriteOut>());
        assert_eq!(copied.err() == Some(libc::EOPNOTSUPP), shares);
    }
}

fn a_clone_ends_stores_in_place_until_the_guest_wants_them(kind: &str) {
    let disk = Disk::new(kind);
    if !kind.starts_with("xfs") {
        skip("files that pass share no blocks here");
    }
    let guest = Guest::passing(&disk);
    disk.file("file", LEN, LEN);
    let node = guest.lookup("file");
    let (fh, index) = guest.open_passing(node);
    let index = index.unwrap();
    let path = |name| disk.path(name).to_str().unwrap().to_owned();
    let mut host = this(&["--clone", &path("file"), &path("clone")]).spawn().unwrap();
    let wait_for = |flags, mask| {
        let until = Instant::now() + Duration::from_secs(100);
        while guest.slot(index).0 & mask != flags {
            assert!(Instant::now() < until, "{:?} is not {flags}", guest.slot(index));
            sleep(Duration::from_millis(1));
        }
    };
    wait_for(REVOKED, REVOKED);
    assert!(host.try_wait().unwrap().is_none(), "it waits");
    guest.acknowledge(index);
    assert!(host.wait().unwrap().success());
    wait_for(VALID, VALID | REVOKED);
    assert_eq!(guest.slot(index).0, VALID, "a store would take blocks");
    for mode in [0, libc::FALLOC_FL_KEEP_SIZE] {
        // It leaves the blocks shared.
        guest.fallocate(node, fh, mode, 0, LEN).unwrap();
        assert_eq!(guest.slot(index).0, VALID, "a store would take blocks");
    }
    assert_eq!((guest.ask(node, fh, true), guest.slot(index).0), (Ok(()), VALID | WRITABLE));
    disk.fill();
    assert_eq!(guest.touch_slot(index, LEN, true), None);
    let mut byte = [0];
    File::open(disk.path("clone")).unwrap().read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, *b"r");
}

/// The daemon has asked whether the file is mapped, and then waits for another one to be opened.
fn a_copy_ends_stores_in_place_to_a_file_mapped_meanwhile(kind: &str) {
    let disk = Disk::new(kind);
    if !kind.starts_with("xfs") {
        skip("files that pass share no blocks here");
    }
    let settings = Settings { size: 2 * SIZE, slots: 1, writable: Writable::InPlace, patience: PATIENCE };
    let guest = Guest::with(&disk, 0, Some(settings));
    disk.file("file", LEN, LEN);
    disk.file("other", LEN, LEN);
    disk.file("copy", 0, 0);
    let [node, other, nodeid_out] = ["file", "other", "copy"].map(|name| guest.lookup(name));
    let (fh_in, index) = guest.open_passing(node);
    let index = index.unwrap();
    let send = |opcode: Opcode, node, args: &[u8], room| {
        let (_, head) = guest.frontend.header(opcode as u32, node, args.len());
        guest.frontend.submit(1, &[&[&head, args].concat()], &[16, room]).unwrap()
    };
    let until = Instant::now() + Duration::from_secs(100);
    let let_go = |index| {
        if guest.slot(index).0 & REVOKED != 0 {
            guest.acknowledge(index);
        }
        assert!(Instant::now() < until);
        sleep(Duration::from_millis(1));
    };
    // It has an entry and no slot, since another file has the only one, once it is idle.
    let other_index = loop {
        let open = OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
        let opening = send(Opcode::Open, other, open.as_bytes(), size_of::<OpenOut>());
        let opened = loop {
            let_go(index);
            if let Ok(opened) = guest.frontend.wait_for(1, opening, Duration::ZERO) {
                break OpenOut::read_from_bytes(&opened.data[16..]).unwrap();
            }
        };
        if opened.open_flags & OpenFlags::PASSTHROUGH.bits() != 0 {
            break opened.backing_id as u32;
        }
        let release = ReleaseIn { fh: opened.fh, ..Default::default() };
        guest.call(Opcode::Release, other, release.as_bytes(), 0).unwrap();
    };
    assert_eq!(guest.slot(index).0, REVOKED);
    // Too small to pass.
    let (fh_out, none) = guest.open_passing(nodeid_out);
    assert_eq!(none, None);
    let mut opens = held_opens(&disk.path("copy"));
    let args = CopyFileRangeIn { fh_in, nodeid_out, fh_out, len: LEN, ..Default::default() };
    let copying = send(Opcode::CopyFileRange, node, args.as_bytes(), size_of::<WriteOut>());
    // struct fanotify_event_metadata, with a descriptor of the file.
    let mut event = [0; 24];
    opens.read_exact(&mut event).unwrap();
    while guest.ask(node, fh_in, true) == Err(libc::EAGAIN) {
        let_go(other_index);
    }
    assert_eq!(guest.slot(index).0, VALID | WRITABLE);
    // struct fanotify_response
    opens.write_all(&[&event[16..20], &libc::FAN_ALLOW.to_ne_bytes()].concat()).unwrap();
    let copied = guest.frontend.wait_for(1, copying, Duration::from_secs(100)).unwrap();
    assert_eq!(copied.data[4..8], [0; 4], "no error");
    assert_eq!(guest.slot(index).0 & REVOKED, REVOKED);
    guest.acknowledge(index);
    let until = Instant::now() + Duration::from_secs(100);
    while guest.slot(index).0 & (VALID | REVOKED) != VALID {
        assert!(Instant::now() < until, "{:?}", guest.slot(index));
        sleep(Duration::from_millis(1));
    }
    assert_eq!(guest.slot(index).0, VALID, "a store would take blocks");
}

/// Holds each open of a file until it is answered: see fanotify(7).
fn held_opens(path: &std::path::Path) -> File {
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: the new descriptor is nobody else's, and the path ends with a NUL.
    unsafe {
        let fd = libc::fanotify_init(libc::FAN_CLASS_CONTENT | libc::FAN_CLOEXEC, libc::O_RDONLY as u32);
        assert!(fd >= 0);
        let marked = libc::fanotify_mark(fd, libc::FAN_MARK_ADD, libc::FAN_OPEN_PERM, libc::AT_FDCWD, path.as_ptr());
        assert_eq!(marked, 0);
        File::from_raw_fd(fd)
    }
}

/// What is stored in place goes to a Cached proxy file, and then to a disk that is full.
fn each_open_hears_of_a_failure_once(kind: &str) {
    let disk = Disk::new(kind);
    if disk.stores_in_place() {
        skip("what is stored has room");
    }
    let guest = Guest::new(&disk);
    disk.file("file", 0, LEN);
    let node = guest.lookup("file");
    let (first, second) = (guest.open(node), guest.open(node));
    guest.map(node, 0, true).unwrap();
    disk.fill();
    guest.store([0]);
    // The daemon finds out by itself some 50 ms later.
    sleep(Duration::from_millis(500));
    let fsync = |fh| guest.call(Opcode::Fsync, node, FsyncIn { fh, ..Default::default() }.as_bytes(), 0).map(drop);
    assert!(matches!(fsync(first), Err(libc::ENOSPC | libc::EIO)));
    assert_eq!((fsync(first), fsync(first)), (Ok(()), Ok(())));
    let third = guest.open(node);
    assert_eq!(fsync(third), Ok(()));
    assert!(matches!(fsync(second), Err(libc::ENOSPC | libc::EIO)));
    assert_eq!((fsync(second), fsync(first)), (Ok(()), Ok(())));
    // The end of the mapping does not hide the error.
    guest.store([0]);
    let args = [1u32.as_bytes(), RemovemappingOne { moffset: 0, len: RANGE }.as_bytes()].concat();
    guest.call(Opcode::Removemapping, 0, &args, 0).unwrap();
    for fh in [first, second, third] {
        assert!(matches!(fsync(fh), Err(libc::ENOSPC | libc::EIO)));
        assert_eq!(fsync(fh), Ok(()));
    }
}

/// A second guest, with its own daemon, opened the file long before.
fn another_daemon_takes_no_blocks(kind: &str) {
    let disk = Disk::new(kind);
    if kind == "tmpfs" {
        skip("there is no guard on tmpfs");
    }
    let daemon = disk.another_daemon();
    let guest = Guest::new(&disk);
    let (other, _daemon) = daemon.guest();
    for what in ["punch", "copy"] {
        disk.file(what, LEN, LEN);
        disk.file("target", 0, 0);
        let (node, theirs, target) = (guest.lookup(what), other.lookup(what), other.lookup("target"));
        let (fh, to) = (other.open(theirs), other.open(target));
        for range in 0..3 {
            guest.map(node, range, true).unwrap();
        }
        match what {
            "punch" => {
                let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                other.fallocate(theirs, fh, punch, 0, RANGE).unwrap();
            }
            _ => {
                let (nodeid_out, fh_out) = (target, to);
                let copy = CopyFileRangeIn { fh_in: fh, nodeid_out, fh_out, len: LEN, ..Default::default() };
                other.call(Opcode::CopyFileRange, theirs, copy.as_bytes(), size_of::<WriteOut>()).map(drop).unwrap();
            }
        }
        disk.fill();
        guest.store(0..3);
        fs::remove_file(disk.path("filler")).unwrap();
        fs::remove_file(disk.path("target")).unwrap();
    }
}

/// A daemon without a window, in its own process, until its guest is gone.
fn daemon(share: &str, socket: &str) {
    let root = rustix::fs::open(share, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), Config::default()).unwrap();
    let listener = UnixListener::bind(socket).unwrap();
    let _ = device::serve(listener, Arc::new(Server::new(fs)), device::Options::default());
}
