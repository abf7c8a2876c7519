//! The DAX window of a whole device in one process. The frontend maps by QEMU's rules, and a proxy file is the real
//! file.

mod locked;
mod moving;

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use locked::Locked;
use moving::{load, save};
use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create};
use tempfile::TempDir;
use thruway::device;
use thruway::fs::{Config, Migration, MigrationOnError, PassthroughFs, proc_self_fd};
use thruway::fuse::Server;
use thruway::fuse::abi::*;
use thruway::window::proxy::{Event, Kind, Opened};
use thruway::window::{ProxyFiles, RANGE, Window};
use thruway_bench::frontend::{Frontend, Options, Window as Region};
use zerocopy::{FromBytes, IntoBytes};

/// Of 32 ranges.
const SIZE: u64 = 32 * RANGE;

/// Proxy files that are the real files, or empty copies. A test sends the events. Counts how often a copy is to be read
/// anew.
struct Themselves(Mutex<Receiver<Event>>, Arc<AtomicUsize>);

impl ProxyFiles for Themselves {
    fn open(&self, _id: u64, kind: Kind, real: BorrowedFd) -> io::Result<Opened> {
        let fd = match kind {
            Kind::Through => real.try_clone_to_owned()?,
            Kind::Cached => {
                let copy = memfd_create("copy", MemfdFlags::CLOEXEC)?;
                ftruncate(&copy, 64 * RANGE)?;
                copy
            }
        };
        Ok(Opened { fd, guarded: kind == Kind::Through })
    }

    fn invalidate(&self, _id: u64) -> io::Result<()> {
        self.1.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn watch(&self, _id: u64) -> io::Result<()> {
        Ok(())
    }

    fn next_event(&self) -> Option<Event> {
        self.0.lock().unwrap().recv().ok()
    }
}

struct Guest {
    frontend: Frontend,
    region: Region,
    window: Arc<Window>,
    dir: Arc<TempDir>,
    events: Sender<Event>,
    read_anew: Arc<AtomicUsize>,
}

impl Guest {
    fn new(config: Config) -> Self {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let file = std::fs::File::create(dir.path().join("file")).unwrap();
        // As large as any mapping of it in this test, since the frontend refuses a smaller file.
        file.set_len(64 * RANGE).unwrap();
        file.write_all_at(b"contents", RANGE).unwrap();
        Self::at("socket", dir, config)
    }

    /// The daemon that listens there.
    fn at(socket: &str, dir: Arc<TempDir>, config: Config) -> Self {
        let root = rustix::fs::open(dir.path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let ((events, receiver), read_anew) = (channel(), Arc::new(AtomicUsize::new(0)));
        let files = Themselves(Mutex::new(receiver), read_anew.clone());
        let window = Window::new(SIZE, None, Arc::new(files)).unwrap();
        let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), config).unwrap();
        let fs = fs.with_window(Some(window.clone()));
        let listener = UnixListener::bind(dir.path().join(socket)).unwrap();
        let options = device::Options { keep_alive: true, window: Some(window.clone()), ..Default::default() };
        std::thread::spawn(move || device::serve(listener, Arc::new(Server::new(fs)), options));
        let mut frontend = Frontend::connect(&dir.path().join(socket), Options::default()).unwrap();
        let region = frontend.open_window().unwrap();
        Self { frontend, region, window, dir, events, read_anew }
    }

    fn init(&self) -> InitOut {
        InitOut::read_from_bytes(&self.frontend.fuse_init(u64::MAX).unwrap()).unwrap()
    }

    /// What is mapped: where, which part of the file, whether these are the file's own pages.
    fn mapped(&self) -> Vec<(u64, u64, bool)> {
        let (send, receive) = channel();
        self.window.show(move |mappings| send.send(mappings).unwrap());
        let mapped = receive.recv().unwrap();
        mapped.iter().map(|mapping| (mapping.at / RANGE, mapping.from / RANGE, mapping.through)).collect()
    }

    fn stop(&mut self) -> [u16; 2] {
        [0, 1].map(|queue| self.frontend.stop_queue(queue).unwrap())
    }

    /// Moves to another daemon. The session comes before its device runs.
    fn moved(mut self, socket: &str, config: Config, between: impl FnOnce(&Self)) -> Option<Self> {
        self.stop();
        let state = save(&mut self.frontend).unwrap();
        between(&self);
        let mut target = Self::at(socket, self.dir.clone(), config);
        target.stop();
        target.region.stop();
        let loaded = load(&mut target.frontend, &state);
        // All of it is there before the guest runs.
        let mapped = target.region.mapped().len();
        target.region.start();
        [0, 1].iter().for_each(|queue| target.frontend.start_queue(*queue, 0).unwrap());
        assert!(mapped == self.region.mapped().len() || !loaded);
        loaded.then_some(target)
    }

    fn call(&self, opcode: Opcode, nodeid: u64, args: &[u8], room: usize) -> Result<Vec<u8>, i32> {
        self.frontend.request(1, opcode as u32, nodeid, args, &[], room)
    }

    fn lookup(&self, name: &[u8]) -> EntryOut {
        let entry = self.call(Opcode::Lookup, ROOT_ID, name, size_of::<EntryOut>()).unwrap();
        EntryOut::read_from_bytes(&entry).unwrap()
    }

    fn map(&self, node: u64, from: u64, at: u64, len: u64, flags: u64) -> Result<(), i32> {
        let args = SetupmappingIn { fh: u64::MAX, foffset: from, len, flags, moffset: at };
        self.call(Opcode::Setupmapping, node, args.as_bytes(), 0).map(drop)
    }

    fn unmap(&self, parts: &[(u64, u64)]) -> Result<(), i32> {
        let mut args = (parts.len() as u32).as_bytes().to_vec();
        for &(moffset, len) in parts {
            args.extend(RemovemappingOne { moffset, len }.as_bytes());
        }
        self.call(Opcode::Removemapping, 0, &args, 0).map(drop)
    }
}

/// The window process does not hear of truncate(2), which makes no event for it.
#[test]
fn a_copy_is_read_anew_before_the_guest_knows_another_size() {
    let guest = Guest::new(Config::default());
    guest.init();
    let file = std::fs::File::options().write(true).open(guest.dir.path().join("file")).unwrap();
    file.set_len(63 * RANGE + 5000).unwrap();
    let node = guest.lookup(b"file\0").nodeid;
    // This machine has no memory at address 0, so its pages may be larger than the host's.
    guest.map(node, 63 * RANGE, 0, RANGE, 0).unwrap();
    for (len, times) in [(63 * RANGE + 5000, 0), (63 * RANGE + 5001, 1), (63 * RANGE + 5001, 1), (0, 2)] {
        file.set_len(len).unwrap();
        guest.call(Opcode::Getattr, node, GetattrIn::default().as_bytes(), size_of::<AttrOut>()).unwrap();
        assert_eq!(guest.read_anew.load(Ordering::Relaxed), times, "{len}");
    }
}

#[test]
fn files_are_mapped_and_unmapped() {
    let guest = Guest::new(Config::default());
    assert_eq!(guest.region.size, SIZE);
    let init = guest.init();
    assert_eq!(1 << init.map_alignment, RANGE);
    let node = guest.lookup(b"file\0").nodeid;
    guest.map(node, RANGE, 0, RANGE, 0).unwrap();
    guest.map(node, 4 * RANGE, 2 * RANGE, 3 * RANGE, SETUPMAPPING_WRITE).unwrap();
    let mapped = guest.region.mapped();
    assert_eq!(mapped.keys().map(|at| at / RANGE).collect::<Vec<_>>(), [0, 2, 3, 4]);
    assert_eq!(mapped.values().map(|m| m.from / RANGE).collect::<Vec<_>>(), [1, 4, 5, 6]);
    // In place of what is mapped, and with more rights.
    guest.map(node, 9 * RANGE, 3 * RANGE, RANGE, 0).unwrap();
    guest.map(node, RANGE, 0, RANGE, SETUPMAPPING_WRITE).unwrap();
    assert_eq!((guest.region.mapped()[&(3 * RANGE)].from, guest.window.live()), (9 * RANGE, 4));
    // Many at once, of which some are unmapped already.
    guest.unmap(&[(0, 2 * RANGE), (3 * RANGE, RANGE), (20 * RANGE, RANGE)]).unwrap();
    assert_eq!((guest.region.mapped().len(), guest.window.live()), (2, 2));
    guest.call(Opcode::Destroy, 0, &[], 0).unwrap();
    let until = Instant::now() + Duration::from_secs(100);
    while !guest.region.mapped().is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((guest.region.mapped().len(), guest.window.live()), (0, 0));
}

/// A process of the host writes to a file for long. The daemon allocates blocks for what the guest stores there.
#[test]
fn a_locked_file_delays_no_other_mapping_and_no_revocation() {
    let guest = Guest::new(Config::default());
    guest.init();
    for name in ["locked", "other"] {
        std::fs::File::create(guest.dir.path().join(name)).unwrap().set_len(64 * RANGE).unwrap();
    }
    let [locked, other] = [&b"locked\0"[..], b"other\0"].map(|name| guest.lookup(name).nodeid);
    let first = guest.map(other, 0, 0, RANGE, SETUPMAPPING_WRITE);
    if first == Err(libc::EOPNOTSUPP) {
        return;
    }
    first.unwrap();
    let Some(lock) = Locked::new(&std::fs::File::options().write(true).open(guest.dir.path().join("locked")).unwrap())
    else {
        return;
    };
    let through = || {
        let (send, receive) = channel();
        guest.window.show(move |mappings| send.send(mappings).unwrap());
        let mappings = receive.recv().unwrap();
        mappings.into_iter().filter(|mapping| mapping.node == other).map(|mapping| mapping.through).collect::<Vec<_>>()
    };
    let args = SetupmappingIn { fh: u64::MAX, foffset: 0, len: RANGE, flags: SETUPMAPPING_WRITE, moffset: 4 * RANGE };
    let (_, head) = guest.frontend.header(Opcode::Setupmapping as u32, locked, args.as_bytes().len());
    let waiting = guest.frontend.submit(1, &[&[&head, args.as_bytes()].concat()], &[16]).unwrap();
    guest.map(other, RANGE, RANGE, RANGE, SETUPMAPPING_WRITE).unwrap();
    assert_eq!(through(), [true, true]);
    // The first proxy file of all.
    guest.events.send(Event::Revoke(1)).unwrap();
    let until = Instant::now() + Duration::from_secs(100);
    while through() != [false, false] {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(guest.frontend.wait_for(1, waiting, Duration::ZERO).is_err());
    drop(lock);
    guest.frontend.wait_for(1, waiting, Duration::from_secs(100)).unwrap();
    assert!(guest.region.mapped().contains_key(&(4 * RANGE)));
}

#[test]
fn without_the_region_there_is_no_dax() {
    let guest = Guest::new(Config::default());
    let dax = InitFlags::HAS_INODE_DAX | InitFlags::MAP_ALIGNMENT;
    let flags = |init: InitOut| InitFlags::from_bits_retain(u64::from(init.flags) | u64::from(init.flags2) << 32);
    assert!(flags(guest.init()).contains(dax));
    // A file that is larger than the window is not worth it.
    std::fs::File::create(guest.dir.path().join("small")).unwrap().set_len(RANGE).unwrap();
    assert_eq!([&b"small\0"[..], b"file\0"].map(|name| guest.lookup(name).attr.flags), [ATTR_DAX, 0]);
    let plain = {
        let socket = guest.dir.path().join("socket");
        drop(guest.region);
        Frontend::connect(&socket, Options::default()).unwrap()
    };
    let init = InitOut::read_from_bytes(&plain.fuse_init(u64::MAX).unwrap()).unwrap();
    assert!(!flags(init).intersects(dax));
}

#[test]
fn a_hostile_guest_gets_errnos() {
    let guest = Guest::new(Config::default());
    guest.init();
    std::fs::create_dir(guest.dir.path().join("dir")).unwrap();
    let (file, dir) = (guest.lookup(b"file\0").nodeid, guest.lookup(b"dir\0").nodeid);
    let socket = guest.lookup(b"socket\0").nodeid;
    for (node, from, at, len, errno) in [
        (file, 0, 0, 0, libc::EINVAL),
        (file, 0, SIZE, RANGE, libc::EINVAL),
        (file, 0, SIZE - RANGE, 2 * RANGE, libc::EINVAL),
        (file, 0, u64::MAX - RANGE + 1, RANGE, libc::EINVAL),
        (file, u64::MAX - RANGE + 1, 0, RANGE, libc::EINVAL),
        (file, 0, 4096, RANGE, libc::EINVAL),
        (file, 4096, 0, RANGE, libc::EINVAL),
        (dir, 0, 0, RANGE, libc::EBADF),
        (socket, 0, 0, RANGE, libc::EBADF),
        (99, 0, 0, RANGE, libc::ESTALE),
    ] {
        assert_eq!(guest.map(node, from, at, len, SETUPMAPPING_WRITE), Err(errno), "{node} {from:x} {at:x} {len:x}");
    }
    assert_eq!(guest.unmap(&[(SIZE, RANGE)]), Err(libc::EINVAL));
    // Fewer parts than it says.
    assert_eq!(guest.call(Opcode::Removemapping, 0, u32::MAX.as_bytes(), 0), Err(libc::EINVAL));
    for n in 0..100_000_u64 {
        let at = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40 << 12;
        let done = guest.map(file, (n % 64) * RANGE, at, RANGE << (n % 3), n % 2);
        assert!(matches!(done, Ok(()) | Err(libc::EINVAL)), "{done:?}");
        assert!(guest.region.mapped().len() <= 32);
    }
    guest.unmap(&[(0, SIZE)]).unwrap();
    assert_eq!((guest.region.mapped().len(), guest.window.live()), (0, 0));
    assert!(guest.region.most() <= 32);
}

#[test]
fn a_read_only_share_is_mapped_for_reading_alone() {
    let guest = Guest::new(Config { readonly: true, ..Default::default() });
    guest.init();
    std::fs::File::create(guest.dir.path().join("small")).unwrap().set_len(RANGE).unwrap();
    assert_eq!(guest.lookup(b"small\0").attr.flags, 0);
    let entry = guest.lookup(b"file\0");
    assert_eq!(guest.map(entry.nodeid, 0, 0, RANGE, SETUPMAPPING_WRITE), Err(libc::EROFS));
}

#[test]
fn a_guest_that_has_moved_keeps_its_mappings() {
    let mut guest = Guest::new(Config::default());
    guest.init();
    let node = guest.lookup(b"file\0").nodeid;
    guest.map(node, RANGE, 0, RANGE, 0).unwrap();
    guest.map(node, 4 * RANGE, 2 * RANGE, 2 * RANGE, SETUPMAPPING_WRITE).unwrap();
    let mapped = guest.mapped();
    for socket in ["second", "third"] {
        guest = guest.moved(socket, Config::default(), |_| ()).unwrap();
        assert_eq!((guest.mapped(), guest.window.live()), (mapped.clone(), 3));
        let regions = guest.region.mapped();
        assert_eq!(regions.values().map(|m| m.from / RANGE).collect::<Vec<_>>(), [1, 4, 5]);
        // Each can be replaced, and nothing of it is left behind.
        guest.map(node, 9 * RANGE, 2 * RANGE, RANGE, SETUPMAPPING_WRITE).unwrap();
        guest.map(node, 4 * RANGE, 2 * RANGE, RANGE, SETUPMAPPING_WRITE).unwrap();
        assert_eq!(guest.mapped(), mapped);
    }
    guest.unmap(&[(0, SIZE)]).unwrap();
    assert_eq!((guest.region.mapped().len(), guest.window.live()), (0, 0));
}

#[test]
fn a_file_that_the_target_lacks_is_zeros_if_that_is_wanted() {
    let lenient = || Migration { on_error: MigrationOnError::GuestError, ..Config::default().migration };
    for on_error in [MigrationOnError::Abort, MigrationOnError::GuestError] {
        let guest = Guest::new(Config::default());
        guest.init();
        std::fs::write(guest.dir.path().join("other"), vec![7; 2 * RANGE as usize]).unwrap();
        let [node, other] = [&b"file\0"[..], b"other\0"].map(|name| guest.lookup(name).nodeid);
        guest.map(node, RANGE, 0, RANGE, SETUPMAPPING_WRITE).unwrap();
        guest.map(other, RANGE, RANGE, RANGE, 0).unwrap();
        let config = Config { migration: Migration { on_error, ..lenient() }, ..Default::default() };
        let gone = |guest: &Guest| std::fs::remove_file(guest.dir.path().join("file")).unwrap();
        let moved = guest.moved("second", config, gone);
        let Some(guest) = moved else {
            assert_eq!(on_error, MigrationOnError::Abort);
            continue;
        };
        assert_eq!(on_error, MigrationOnError::GuestError);
        assert_eq!(guest.mapped(), [(0, 1, false), (1, 1, true)]);
        let zeros = &guest.region.mapped()[&0];
        let mut bytes = [1; 8];
        std::fs::File::from(zeros.file.try_clone().unwrap()).read_exact_at(&mut bytes, zeros.from).unwrap();
        assert_eq!((bytes, zeros.writable), ([0; 8], true));
        // The guest gets no other part of it.
        assert_eq!(guest.map(node, 2 * RANGE, 4 * RANGE, RANGE, 0), Err(libc::EIO));
        guest.unmap(&[(0, SIZE)]).unwrap();
        assert_eq!((guest.region.mapped().len(), guest.window.live()), (0, 0));
    }
}

/// The guest believes in the old size, and may touch what the file no longer has.
#[test]
fn a_file_that_is_shorter_at_the_target_is_mapped_by_a_copy() {
    let guest = Guest::new(Config::default());
    guest.init();
    let node = guest.lookup(b"file\0").nodeid;
    guest.map(node, 0, 0, RANGE, 0).unwrap();
    guest.map(node, 5 * RANGE, RANGE, RANGE, 0).unwrap();
    let shorter = |guest: &Guest| {
        let file = std::fs::File::options().write(true).open(guest.dir.path().join("file")).unwrap();
        file.set_len(6 * RANGE).unwrap();
    };
    let guest = guest.moved("second", Config::default(), shorter).unwrap();
    assert_eq!(guest.mapped(), [(0, 0, true), (1, 5, true)]);
    let cut = |guest: &Guest| {
        let file = std::fs::File::options().write(true).open(guest.dir.path().join("file")).unwrap();
        file.set_len(6 * RANGE - 1).unwrap();
    };
    let guest = guest.moved("third", Config::default(), cut).unwrap();
    assert_eq!(guest.mapped(), [(0, 0, true), (1, 5, false)]);
    guest.map(node, 8 * RANGE, 2 * RANGE, RANGE, 0).unwrap();
    assert_eq!(guest.mapped()[2], (2, 8, false));
}
