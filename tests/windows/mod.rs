//! For tests/supervise.rs: workers that are killed while the guest has files mapped.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;
use thruway::fuse::abi::*;
use thruway::window::RANGE;
use thruway_bench::frontend::{Frontend, Mapped, Options, Point, Window};
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, FileOffset, VolatileMemory};
use zerocopy::IntoBytes;

use super::common::{thruwayd, wait_until};
use super::{Daemon, ask, children, lookup, open};

/// A guest with a DAX window of 32 ranges, and two files of 4 ranges. Each byte of a file is its first letter.
struct Guest {
    frontend: Frontend,
    region: Window,
    daemon: Daemon,
    nodes: [u64; 2],
    /// What the guest relies on: a file and a range of it, by range of the window.
    relies: BTreeMap<u64, (usize, u64)>,
}

const NAMES: [&str; 2] = ["a", "b"];

/// None if this machine has no window.
fn start(kill: Option<&str>) -> Option<Guest> {
    // On the disk, where truncations wait.
    start_in(TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap(), kill, |name| {
        vec![name.as_bytes()[0]; 4 * RANGE as usize]
    })
}

fn start_in(dir: TempDir, kill: Option<&str>, contents: fn(&str) -> Vec<u8>) -> Option<Guest> {
    if !geteuid().is_root() {
        return None;
    }
    let mut program = thruwayd();
    if let Some(kill) = kill {
        program.env("THRUWAY_TEST_KILL", kill);
    }
    let daemon = Daemon::run(program, dir, &["--dax-window=64M", "--log-level=debug"]);
    if daemon.log().contains("continuing without a window") {
        return None;
    }
    for name in NAMES {
        fs::write(daemon.share(name), contents(name)).unwrap();
    }
    let mut frontend = Frontend::connect(&daemon.dir.path().join("socket"), Options::default()).unwrap();
    let region = frontend.open_window().unwrap();
    let flags = InitFlags::MAP_ALIGNMENT | InitFlags::HAS_INODE_DAX | InitFlags::INIT_EXT;
    frontend.fuse_init(flags.bits()).unwrap();
    let nodes = [&b"a\0"[..], b"b\0"].map(|name| lookup(&frontend, ROOT_ID, name).unwrap().nodeid);
    Some(Guest { frontend, region, daemon, nodes, relies: BTreeMap::new() })
}

impl Guest {
    fn map(&mut self, at: u64, file: usize, from: u64, flags: u64) {
        let args = SetupmappingIn { fh: 0, foffset: from * RANGE, len: RANGE, flags, moffset: at * RANGE };
        ask(&self.frontend, Opcode::Setupmapping, self.nodes[file], args.as_bytes()).unwrap();
        self.relies.insert(at, (file, from));
        self.check();
    }

    fn unmap(&mut self, at: u64) {
        let part = RemovemappingOne { moffset: at * RANGE, len: RANGE };
        ask(&self.frontend, Opcode::Removemapping, 0, &[1u32.as_bytes(), part.as_bytes()].concat()).unwrap();
        self.relies.remove(&at);
        self.check();
    }

    fn is_there(&self, at: u64) -> bool {
        self.region.mapped().contains_key(&(at * RANGE))
    }

    /// What the guest relies on is there when its request is answered.
    fn check(&self) {
        for (at, (file, from)) in &self.relies {
            let mapped = self.region.mapped().remove(&(at * RANGE)).unwrap();
            assert_eq!(mapped.from, from * RANGE);
            assert_eq!(Mapping::new(&mapped).read(0), NAMES[*file].as_bytes()[0], "range {at}");
        }
    }

    fn file(&self, file: usize) -> File {
        File::open(self.daemon.share(NAMES[file])).unwrap()
    }

    /// A process of the host makes a file as long as this.
    fn truncate(&self, file: usize, len: u64) -> Child {
        let mut command = Command::new("truncate");
        command.arg("-s").arg(len.to_string()).arg(self.daemon.share(NAMES[file])).spawn().unwrap()
    }

    fn kills(&self) -> usize {
        self.daemon.log().matches("another one goes on").count()
    }

    /// The next worker serves.
    fn wait_for_worker(&self) {
        ask(&self.frontend, Opcode::Getattr, ROOT_ID, GetattrIn::default().as_bytes()).unwrap();
    }
}

/// What the guest has of a mapped file.
struct Mapping(MmapRegion);

impl Mapping {
    fn new(mapped: &Mapped) -> Self {
        let file = FileOffset::new(mapped.file.try_clone().unwrap().into(), mapped.from);
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        Self(MmapRegion::build(Some(file), RANGE as usize, prot, flags).unwrap())
    }

    fn read(&self, offset: usize) -> u8 {
        self.0.as_volatile_slice().read_obj(offset).unwrap()
    }

    fn write(&self, offset: usize, byte: u8) {
        self.0.as_volatile_slice().write_obj(byte, offset).unwrap();
    }
}

fn byte(file: &File, offset: u64) -> u8 {
    let mut byte = [0];
    file.read_at(&mut byte, offset).unwrap();
    byte[0]
}

#[test]
fn mappings_outlive_workers() {
    let Some(mut guest) = start(None) else { return };
    guest.map(0, 0, 1, 0);
    guest.map(5, 0, 3, SETUPMAPPING_WRITE);
    guest.map(6, 1, 0, SETUPMAPPING_WRITE);
    let before = guest.region.mapped();
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = asked.clone();
    guest.region.at_each_request(move |at| {
        counter.fetch_add(usize::from(at == Point::Asked), Ordering::Relaxed);
    });
    for round in 1..4 {
        guest.daemon.kill();
        Mapping::new(&before[&(5 * RANGE)]).write(9, round);
        guest.wait_for_worker();
        assert_eq!(byte(&guest.file(0), 3 * RANGE + 9), round);
        // What is mapped already is not mapped again.
        guest.map(5, 0, 3, SETUPMAPPING_WRITE);
        guest.map(0, 0, 1, 0);
    }
    assert_eq!((asked.load(Ordering::Relaxed), guest.kills()), (0, 3));
    let after = guest.region.mapped();
    assert!(before.iter().all(|(at, mapped)| Arc::ptr_eq(&mapped.file, &after[at].file)));
    // The next one knows of them.
    for at in [0, 5, 6] {
        guest.unmap(at);
        assert!(!guest.is_there(at));
    }
    // A proxy file has a new number.
    guest.map(0, 1, 3, 0);
    drop((before, after));
    assert!(guest.truncate(1, 0).wait().unwrap().success());
    assert_eq!(guest.kills(), 3);
}

/// The window process holds the process of the host until the next worker has taken the file's pages from the guest.
#[test]
fn a_truncation_while_there_is_no_worker() {
    let Some(mut guest) = start(None) else { return };
    guest.map(0, 0, 0, SETUPMAPPING_WRITE);
    guest.map(1, 0, 1, SETUPMAPPING_WRITE);
    let through = guest.region.mapped();
    let worker = Pid::from_raw(guest.daemon.worker()).unwrap();
    kill_process(worker, Signal::STOP).unwrap();
    let mut truncate = guest.truncate(0, RANGE + 5);
    kill_process(worker, Signal::KILL).unwrap();
    guest.wait_for_worker();
    let ids = |mapped: &BTreeMap<u64, Mapped>| mapped.values().map(|m| m.file.as_raw_fd()).collect::<Vec<_>>();
    let old = ids(&through);
    // The frontend has the files open as long as the test does.
    wait_until("they are replaced", || {
        let now = guest.region.mapped();
        now.len() == 2 && ids(&now).iter().all(|fd| !old.contains(fd))
    });
    drop(through);
    assert!(truncate.wait().unwrap().success());
    wait_until("the guest sees its end", || {
        let mapped = guest.region.mapped();
        mapped.get(&RANGE).is_some_and(|mapped| Mapping::new(mapped).read(5) == 0)
    });
    // A copy has what the guest stores there, and the file gets it.
    let copy = guest.region.mapped()[&RANGE].clone();
    Mapping::new(&copy).write(2, b'x');
    guest.daemon.kill();
    guest.wait_for_worker();
    wait_until("it is written back", || byte(&guest.file(0), RANGE + 2) == b'x');
    Mapping::new(&copy).write(3, b'y');
    wait_until("the next worker writes back too", || byte(&guest.file(0), RANGE + 3) == b'y');
    assert!(Arc::ptr_eq(&copy.file, &guest.region.mapped()[&RANGE].file));
    assert_eq!(guest.file(0).metadata().unwrap().len(), RANGE + 5);
}

/// A guest that does not know yet that the host has cut a file off.
#[test]
fn a_size_that_the_guest_was_told_is_remembered() {
    let Some(mut guest) = start(None) else { return };
    assert!(guest.truncate(0, 5).wait().unwrap().success());
    guest.daemon.kill();
    guest.map(0, 0, 0, 0);
    let mapped = guest.region.mapped()[&0].clone();
    // SIGBUS if it is the file's own page.
    assert_eq!((Mapping::new(&mapped).read(0), Mapping::new(&mapped).read(4096)), (b'a', 0));
}

/// A full tmpfs. Unmounts it.
struct Full(TempDir);

impl Drop for Full {
    fn drop(&mut self) {
        unmount(self.0.path(), UnmountFlags::DETACH).unwrap();
    }
}

#[test]
fn a_failure_to_write_is_told_by_the_next_worker() {
    if !geteuid().is_root() {
        return;
    }
    let full = Full(tempfile::tempdir().unwrap());
    mount("none", full.0.path(), "tmpfs", MountFlags::empty(), c"size=4M").unwrap();
    let Some(guest) = start_in(TempDir::new_in(full.0.path()).unwrap(), None, |_| Vec::new()) else { return };
    let path = guest.daemon.share("a");
    File::options().write(true).open(&path).unwrap().set_len(RANGE).unwrap();
    let fh = open(&guest.frontend, guest.nodes[0], libc::O_RDWR);
    // On tmpfs, a hole that is only read is a copy.
    let args = SetupmappingIn { fh: 0, foffset: 0, len: RANGE, flags: 0, moffset: 0 };
    ask(&guest.frontend, Opcode::Setupmapping, guest.nodes[0], args.as_bytes()).unwrap();
    let copy = Mapping::new(&guest.region.mapped()[&0]);
    let mut filler = File::create(full.0.path().join("filler")).unwrap();
    while filler.write_all(&[1; 4096]).is_ok() {}
    copy.write(5, b'x');
    // This writes the copy back first, and reports nothing.
    let same = SetattrIn { valid: SetattrValid::SIZE.bits(), size: RANGE, ..Default::default() };
    let _ = ask(&guest.frontend, Opcode::Setattr, guest.nodes[0], same.as_bytes());
    let worker = guest.daemon.worker();
    guest.daemon.kill();
    let fsync = || {
        let args = FsyncIn { fh, ..Default::default() };
        ask(&guest.frontend, Opcode::Fsync, guest.nodes[0], args.as_bytes()).err()
    };
    assert_eq!(fsync(), Some(libc::ENOSPC));
    assert_ne!(guest.daemon.worker(), worker);
    drop(fs::remove_file(full.0.path().join("filler")));
    filler.set_len(0).unwrap();
    copy.write(5, b'y');
    assert_eq!(fsync(), None);
    guest.daemon.kill();
    assert_eq!((fsync(), byte(&guest.file(0), 5)), (None, b'y'));
}

/// What a guest does, in which each step of a mapping's life occurs.
fn a_life(guest: &mut Guest) {
    guest.map(0, 0, 0, SETUPMAPPING_WRITE);
    // In place of it.
    guest.map(0, 1, 0, 0);
    guest.map(0, 1, 1, SETUPMAPPING_WRITE);
    guest.unmap(0);
    guest.map(1, 0, 0, SETUPMAPPING_WRITE);
    guest.map(2, 0, 1, 0);
    assert!(guest.truncate(0, RANGE + 5).wait().unwrap().success());
    wait_until("all is there", || guest.is_there(1) && guest.is_there(2));
    wait_until("it was replaced", || {
        let mapped = guest.region.mapped();
        mapped.get(&(2 * RANGE)).is_some_and(|mapped| Mapping::new(mapped).read(5) == 0)
    });
    wait_until("all is there again", || guest.is_there(1) && guest.is_there(2));
    guest.unmap(2);
    guest.unmap(1);
    wait_until("nothing is left", || guest.region.mapped().is_empty());
    // Nobody waits for a mapping that is forgotten.
    guest.map(3, 1, 3, SETUPMAPPING_WRITE);
    guest.unmap(3);
    assert!(guest.truncate(1, 0).wait().unwrap().success());
    let log = guest.daemon.log();
    assert!(!log.contains("ERROR") && !log.contains("nothing is mapped in place of a mapping"), "{log}");
}

/// The guest unmounts, and the worker ends before all is unmapped.
#[test]
fn a_session_that_ends_leaves_nothing() {
    for step in ["going 1", "unmapped 1", "going 2"] {
        let Some(mut guest) = start(Some(step)) else { return };
        guest.map(0, 0, 0, SETUPMAPPING_WRITE);
        guest.map(7, 1, 2, SETUPMAPPING_WRITE);
        ask(&guest.frontend, Opcode::Destroy, 0, &[]).unwrap();
        wait_until("nothing is left", || guest.region.mapped().is_empty() && guest.kills() == 1);
        assert!(guest.truncate(0, 0).wait().unwrap().success() && guest.truncate(1, 0).wait().unwrap().success());
    }
}

/// A worker ends at each step of a mapping's life in turn.
#[test]
fn a_worker_ends_at_each_step() {
    for step in ["recorded", "mapped", "there", "going", "unmapped"] {
        for nth in 1.. {
            let Some(mut guest) = start(Some(&format!("{step} {nth}"))) else { return };
            a_life(&mut guest);
            if guest.kills() == 0 {
                assert!(nth > 5, "{step} {nth}");
                break;
            }
        }
    }
}

/// A worker is killed while the frontend does what it has asked for, at each point of each request in turn.
#[test]
fn a_worker_ends_while_the_frontend_maps() {
    for point in [Point::Asked, Point::Done, Point::Replied, Point::Committed] {
        for nth in 1.. {
            let Some(mut guest) = start(None) else { return };
            let (count, pid) = (AtomicUsize::new(0), guest.daemon.child.id());
            guest.region.at_each_request(move |at| {
                if at == point && count.fetch_add(1, Ordering::Relaxed) + 1 == nth {
                    let worker = children(pid).into_iter().find_map(|child| Some(*children(child).first()? as i32));
                    kill_process(Pid::from_raw(worker.unwrap()).unwrap(), Signal::KILL).unwrap();
                }
            });
            a_life(&mut guest);
            if guest.kills() == 0 {
                assert!(nth > 10, "{point:?} {nth}");
                break;
            }
        }
    }
}
