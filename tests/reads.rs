//! Requests that wait for the host's file system or for others. The queue goes on meanwhile, and a stop returns all of
//! them. And those that wait in the ring for a session.

mod locked;
mod moving;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use locked::Locked;
use moving::{load, save};
use rustix::fs::{MemfdFlags, memfd_create};
use thruway::device::{self, Handler, LARGE, Urings};
use thruway::fs::{Config, PassthroughFs, proc_self_fd};
use thruway::fuse::abi::*;
use thruway::fuse::buf::IoVecs;
use thruway::fuse::metrics::LateMeter;
use thruway::fuse::ops::{Caller, Files, Names, Threads, WOULD_WAIT};
use thruway::fuse::{Io, Reply, Server, Transport, Work};
use thruway::limits::{DEPUTIES, Limit};
use thruway_bench::frontend::{Frontend, Options, Token, WINDOW_BASE};
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostTransferStateDirection, VhostTransferStatePhase};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress};
use zerocopy::{FromBytes, IntoBytes};

/// Reads `nodeid` bytes of a stream.
const READ: u32 = 1000;
/// Replies after 50 ms, on another thread.
const SLOW: u32 = 1001;
/// Replies at once.
const FAST: u32 = 1002;
/// Takes the worker 5 ms. One that moves data fails with EPERM if it should leave the worker.
const HEAVY: u32 = 1003;
/// The node of a [`HEAVY`] request that moves data.
const DATA: u64 = 1;
/// Replies once the stream has a byte. Says by a byte of its own that it waits. The worker waits itself.
const STUCK: u32 = 1004;
/// As [`STUCK`], but a thread that may wait serves it.
const ANEW: u32 = 1005;

/// Bytes of a [`Part`].
const PART: u64 = 2 << 20;

const LONG: Duration = Duration::from_secs(100);

struct Stub(OwnedFd);

impl Handler for Stub {
    fn handle(&self, work: &mut Work, from: &mut dyn Transport) -> usize {
        let mut header = InHeader::default();
        work.readable.read_at(0, header.as_mut_bytes());
        let unique = header.unique;
        let empty = move || OutHeader { len: 16, error: 0, unique }.as_bytes().to_vec();
        match header.opcode {
            READ => {
                let io = Io {
                    unique,
                    file: self.0.try_clone().unwrap(),
                    offset: 0,
                    write: false,
                    long: false,
                    meter: LateMeter::default(),
                };
                from.io(io, &work.writable.range(16..16 + header.nodeid as usize));
                0
            }
            SLOW | ANEW if !from.may_wait() => {
                from.serve_anew(None);
                0
            }
            SLOW => {
                thread::sleep(Duration::from_millis(50));
                work.writable.write_at(0, &empty())
            }
            HEAVY => {
                thread::sleep(Duration::from_millis(5));
                let error = if header.nodeid == DATA && from.moves(LARGE) { -libc::EPERM } else { 0 };
                work.writable.write_at(0, OutHeader { len: 16, error, unique }.as_bytes())
            }
            STUCK | ANEW => {
                rustix::io::write(&self.0, &[0]).unwrap();
                rustix::io::read(&self.0, &mut [0]).unwrap();
                work.writable.write_at(0, &empty())
            }
            _ => work.writable.write_at(0, &empty()),
        }
    }

    fn reset(&self) {}
}

struct Daemon {
    frontend: Frontend,
    thread: JoinHandle<Result<(), device::Error>>,
}

impl Daemon {
    fn start(handler: impl Handler, urings: Urings) -> Self {
        Self::start_with(handler, urings, Options::default())
    }

    fn start_with(handler: impl Handler, urings: Urings, frontend: Options) -> Self {
        let path = tempfile::tempdir().unwrap().keep().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let options = device::Options { urings: Arc::new(urings), ..Default::default() };
        let thread = thread::spawn(move || device::serve(listener, Arc::new(handler), options));
        let frontend = Frontend::connect(&path, frontend).unwrap();
        std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
        Self { frontend, thread }
    }

    fn end(self) {
        drop(self.frontend);
        self.thread.join().unwrap().unwrap();
    }
}

fn with_a_peer(urings: Urings) -> (Daemon, UnixStream) {
    let (read, write) = UnixStream::pair().unwrap();
    (Daemon::start(Stub(read.into()), urings), write)
}

fn urings() -> Urings {
    let urings = Urings::new(1);
    assert!(urings.of(1).is_some(), "there is no io_uring here");
    urings
}

/// A file in the guest's memory, as long as a proxy file of the window.
struct Part {
    file: File,
    name: String,
    at: u64,
}

impl Part {
    /// Puts it at the place of this number. The name is unique among the tests.
    fn new(frontend: &mut Frontend, name: String, place: u64) -> Self {
        let file = File::from(memfd_create(&*name, MemfdFlags::CLOEXEC).unwrap());
        file.set_len(1 << 62).unwrap();
        let part = Self { file, name, at: WINDOW_BASE + place * PART };
        frontend.vhost().add_mem_region(&part.region()).unwrap();
        assert!(part.is_mapped());
        part
    }

    fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: self.at,
            memory_size: PART,
            userspace_addr: self.at,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    /// Takes it out.
    fn leaves(&self, frontend: &mut Frontend) {
        frontend.vhost().remove_mem_region(&self.region()).unwrap();
    }

    /// Whether the daemon, which is this process, still has it mapped.
    fn is_mapped(&self) -> bool {
        let name = format!("/memfd:{} ", self.name);
        std::fs::read_to_string("/proc/self/maps").unwrap().contains(&name)
    }

    fn is_gone(&self) {
        let end = Instant::now() + LONG;
        while self.is_mapped() {
            assert!(Instant::now() < end, "the daemon keeps {}", self.name);
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Sends a request whose reply has room for `len` bytes at this guest address, and waits until it waits.
fn send_and_wait(frontend: &Frontend, peer: &mut UnixStream, opcode: u32, room: (u64, u32)) -> u16 {
    let (_, header) = frontend.header(opcode, room.1.into(), 0);
    let own = frontend.alloc(1, 4096).unwrap();
    frontend.memory().write_slice(&header, GuestAddress(own)).unwrap();
    let heads = frontend.take_descriptors(1, 3).unwrap();
    let buffers = [(own, 40, 1, heads[1]), (own + 64, 16, 3, heads[2]), (room.0, room.1, 2, 0)];
    for (index, (addr, len, flags, next)) in heads.iter().zip(buffers) {
        frontend.write_descriptor(1, *index, Descriptor::new(addr, len, flags, next)).unwrap();
    }
    frontend.push_raw(1, heads[0]).unwrap();
    match opcode {
        READ => drop(frontend.request(1, FAST, 1, b"", b"", 0).unwrap()),
        _ => peer.read_exact(&mut [0]).unwrap(),
    }
    heads[0]
}

/// A host process that truncates a file waits for the end of its mappings, the daemon's too.
#[test]
fn requests_that_wait_keep_no_file_that_they_do_not_use() {
    for opcode in [READ, ANEW, STUCK] {
        let (mut daemon, mut peer) = with_a_peer(urings());
        let part = Part::new(&mut daemon.frontend, format!("unused{opcode}"), 0);
        let own = daemon.frontend.alloc(1, 4096).unwrap();
        let head = send_and_wait(&daemon.frontend, &mut peer, opcode, (own, 1));
        part.leaves(&mut daemon.frontend);
        part.is_gone();
        peer.write_all(&[7]).unwrap();
        assert_eq!(daemon.frontend.wait_raw(1, LONG).unwrap().0, u32::from(head));
        daemon.end();
    }
}

#[test]
fn requests_that_wait_keep_the_file_that_they_use() {
    for opcode in [READ, ANEW, STUCK] {
        let (mut daemon, mut peer) = with_a_peer(urings());
        let mut part = |name, place| Part::new(&mut daemon.frontend, format!("{name}{opcode}"), place);
        let (used, other) = (part("used", 0), part("other", 1));
        let head = send_and_wait(&daemon.frontend, &mut peer, opcode, (used.at + 5, 1));
        used.leaves(&mut daemon.frontend);
        other.leaves(&mut daemon.frontend);
        other.is_gone();
        // Another file may come to the same place of the guest's memory.
        let next = Part::new(&mut daemon.frontend, format!("next{opcode}"), 0);
        next.leaves(&mut daemon.frontend);
        next.is_gone();
        assert!(used.is_mapped());
        peer.write_all(&[7]).unwrap();
        assert_eq!(daemon.frontend.wait_raw(1, LONG).unwrap().0, u32::from(head));
        let mut byte = [0];
        used.file.read_exact_at(&mut byte, 5).unwrap();
        assert_eq!(byte, [if opcode == READ { 7 } else { 0 }]);
        used.is_gone();
        daemon.end();
    }
}

#[test]
fn a_read_that_waits_lets_others_pass() {
    let (daemon, mut peer) = with_a_peer(urings());
    let frontend = &daemon.frontend;
    let (_, head) = frontend.header(READ, 6000, 0);
    let read = frontend.submit(1, &[&head], &[16, 3000, 3000]).unwrap();
    for _ in 0..100 {
        frontend.request(1, FAST, 1, b"", b"", 0).unwrap();
    }
    let data: Vec<u8> = (0..6000).map(|n| (n % 251) as u8).collect();
    peer.write_all(&data).unwrap();
    let done = frontend.wait_for(1, read, LONG).unwrap();
    assert_eq!((done.len, &done.data[16..]), (6016, &data[..]));
    daemon.end();
}

#[test]
fn a_ring_stops_after_the_requests_that_wait() {
    let (daemon, mut peer) = with_a_peer(urings());
    let frontend = &daemon.frontend;
    let (_, head) = frontend.header(READ, 100, 0);
    let read = frontend.submit(1, &[&head], &[16, 100]).unwrap();
    let slow = frontend.submit(1, &[&frontend.header(SLOW, 0, 0).1], &[16]).unwrap();
    frontend.request(1, FAST, 1, b"", b"", 0).unwrap();
    let writer = thread::spawn(move || {
        thread::sleep(Duration::from_millis(200));
        peer.write_all(&[7; 100]).unwrap();
    });
    let before = Instant::now();
    assert_eq!(frontend.stop_queue(1).unwrap(), 3);
    assert!(before.elapsed() > Duration::from_millis(150));
    for (token, len) in [(read, 116), (slow, 16)] {
        assert_eq!(frontend.wait_for(1, token, Duration::ZERO).unwrap().len, len);
    }
    writer.join().unwrap();
    daemon.end();
}

#[test]
fn a_frontend_that_leaves_waits_only_for_the_read() {
    let (daemon, peer) = with_a_peer(urings());
    let (_, head) = daemon.frontend.header(READ, 100, 0);
    daemon.frontend.submit(1, &[&head], &[16, 100]).unwrap();
    daemon.frontend.request(1, FAST, 1, b"", b"", 0).unwrap();
    // The end of the file.
    drop(peer);
    daemon.end();
}

/// A worker reads at once what is in memory, and does not wait for the rest.
#[test]
fn a_cold_read_is_noticed() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = File::options().read(true).write(true).create_new(true).open(dir.path().join("cold")).unwrap();
    if !matches!(rustix::fs::fstatfs(&file).unwrap().f_type, libc::EXT4_SUPER_MAGIC | libc::XFS_SUPER_MAGIC) {
        return;
    }
    file.write_all_at(&[7; 100_000], 0).unwrap();
    file.sync_all().unwrap();
    let root = rustix::fs::open(dir.path(), rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), Config::default()).unwrap();
    fs.enter_thread(false);
    let node = fs.lookup(ROOT_ID, c"cold").unwrap().nodeid;
    let (send, opened) = mpsc::channel();
    let mut reply = Reply::late(1, Box::new(move |reply| send.send(reply).unwrap()));
    fs.open(node, &OpenIn::default(), Caller { uid: 0, gid: 0, pid: 0 }, &mut reply).unwrap();
    reply.finish(Ok(()));
    let open = OpenOut::read_from_bytes(&opened.recv().unwrap()[16..]).unwrap();
    let mut data = vec![0; 1 << 17];
    let mut read = || {
        let mut to = IoVecs::default();
        // SAFETY: the buffer outlives the list.
        unsafe { to.push(data.as_mut_ptr(), data.len(), true) };
        fs.read(node, &ReadIn { fh: open.fh, size: 1 << 17, ..Default::default() }, &to.range(0..1 << 17))
    };
    // All of it, then the second half only.
    for missing in [0, 1 << 16] {
        // A page may stay in memory, or the disk may be quick. Not every time.
        let waited = (0..100).any(|_| {
            rustix::fs::fadvise(&file, missing, None, rustix::fs::Advice::DontNeed).unwrap();
            read() == Err(WOULD_WAIT)
        });
        assert!(waited, "from {missing}");
        file.read_exact_at(&mut [0; 100_000], 0).unwrap();
        assert_eq!(read(), Ok(100_000));
    }
}

/// Requests of the high priority queue gather for a while, so that they cost few wake-ups.
#[test]
fn forgets_gather() {
    let (daemon, _peer) = with_a_peer(Urings::none());
    let waited = |_: &usize| {
        // Usually the worker sleeps again by then. The ring's start may just have woken it, or the machine may be busy.
        thread::sleep(Duration::from_millis(10));
        let before = Instant::now();
        daemon.frontend.request(0, FAST, 1, b"", b"", 0).unwrap();
        before.elapsed() >= Duration::from_millis(1)
    };
    assert!((0..20).filter(waited).count() > 10);
    daemon.end();
}

/// After metadata has waited, a large transfer leaves the worker if there is an io_uring. Data that waits for data does
/// not count.
#[test]
fn large_transfers_leave_a_crowded_worker() {
    let leaves = |urings, data| {
        let (daemon, _peer) = with_a_peer(urings);
        let frontend = &daemon.frontend;
        let submit = |n| {
            let node = if n == 3 { DATA } else { data };
            let (_, head) = frontend.header(HEAVY, node, 128 << 10);
            frontend.submit(1, &[&head, &[0; 128 << 10]], &[16]).unwrap()
        };
        let tokens: Vec<_> = (0..4).map(submit).collect();
        let done: Vec<_> = tokens.into_iter().map(|token| frontend.wait_for(1, token, LONG).unwrap().data).collect();
        let errors: Vec<_> = done.iter().map(|reply| OutHeader::read_from_bytes(reply).unwrap().error).collect();
        assert_eq!(errors[0], 0);
        daemon.end();
        errors[3] == -libc::EPERM
    };
    // If the machine stands still for a moment, a deputy serves some of them.
    assert!((0..100).any(|_| leaves(urings(), 0)));
    assert!(!leaves(urings(), DATA) && !leaves(Urings::none(), 0));
}

/// While the worker waits in a request, and deputies in others, another deputy serves the queue. All requests are
/// answered, and a stop waits for them.
#[test]
fn a_request_that_takes_long_lets_others_pass() {
    for urings in [urings(), Urings::none()] {
        let (daemon, mut peer) = with_a_peer(urings);
        let frontend = &daemon.frontend;
        let empty = |opcode| frontend.submit(1, &[&frontend.header(opcode, 0, 0).1], &[16]).unwrap();
        for round in 0..3 {
            // Some are taken from the ring together.
            let sent: Vec<_> = [STUCK, FAST, STUCK, FAST, FAST, STUCK].map(|opcode| (opcode, empty(opcode))).into();
            peer.read_exact(&mut [0; 3]).unwrap();
            for (_, token) in sent.iter().filter(|(opcode, _)| *opcode == FAST) {
                assert_eq!(frontend.wait_for(1, *token, LONG).unwrap().len, 16);
            }
            for _ in 0..100 {
                frontend.request(1, FAST, 1, b"", b"", 0).unwrap();
            }
            peer.write_all(&[7; 3]).unwrap();
            if round == 2 {
                frontend.stop_queue(1).unwrap();
            }
            for (_, token) in sent.iter().filter(|(opcode, _)| *opcode == STUCK) {
                assert_eq!(frontend.wait_for(1, *token, LONG).unwrap().len, 16);
            }
        }
        daemon.end();
    }
}

/// More requests take long than there are deputies. They are all answered in the end.
#[test]
fn without_a_deputy_a_queue_waits() {
    let (read, mut peer) = UnixStream::pair().unwrap();
    let daemon =
        Daemon::start_with(Stub(read.into()), Urings::none(), Options { queue_size: 512, ..Options::default() });
    let (frontend, none) = (&daemon.frontend, Limit::Deputies.times());
    let stuck = |_| frontend.submit(1, &[&frontend.header(STUCK, 0, 0).1], &[16]).unwrap();
    let sent: Vec<_> = (0..DEPUTIES + 10).map(stuck).collect();
    // One of the threads looks, and the queue has its own.
    peer.read_exact(&mut [0; DEPUTIES]).unwrap();
    let end = Instant::now() + LONG;
    while Limit::Deputies.times() == none {
        assert!(Instant::now() < end, "there are more deputies");
        thread::sleep(Duration::from_millis(1));
    }
    peer.write_all(&[7; DEPUTIES + 10]).unwrap();
    for token in sent {
        assert_eq!(frontend.wait_for(1, token, LONG).unwrap().len, 16);
    }
    daemon.end();
}

/// A host process is in the middle of a write to a file. The guest's requests for this file, and for the names of its
/// directory, wait for that. Those for other files do not wait for them.
#[test]
fn a_locked_file_holds_up_no_other() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("d")).unwrap();
    for name in ["other", "d/file", "d/another"] {
        fs::write(dir.path().join(name), "some").unwrap();
    }
    let file = File::options().read(true).write(true).open(dir.path().join("d/file")).unwrap();
    let root = rustix::fs::open(dir.path(), rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), Config { xattr: true, ..Config::default() }).unwrap();
    let daemon = Daemon::start(Server::new(fs), urings());
    let frontend = &daemon.frontend;
    frontend.fuse_init(0).unwrap();
    let ask =
        |opcode: Opcode, node, body: &[u8], room| frontend.request(1, opcode as u32, node, body, b"", room).unwrap();
    let lookup =
        |parent, name: &[u8]| EntryOut::read_from_bytes(&ask(Opcode::Lookup, parent, name, 128)).unwrap().nodeid;
    let (other, d) = (lookup(ROOT_ID, b"other\0"), lookup(ROOT_ID, b"d\0"));
    let (node, another) = (lookup(d, b"file\0"), lookup(d, b"another\0"));
    let open = OpenIn { flags: libc::O_RDWR as u32, ..Default::default() };
    let fh = OpenOut::read_from_bytes(&ask(Opcode::Open, node, open.as_bytes(), 16)).unwrap().fh;
    let Some(lock) = Locked::new(&file) else { return };
    let write = WriteIn { fh, offset: 4, size: 1, ..Default::default() };
    let mode = SetattrIn { valid: SetattrValid::MODE.bits(), mode: 0o640, ..Default::default() };
    let times = SetattrIn { valid: SetattrValid::MTIME.bits(), mtime: 1000, ..Default::default() };
    let xattr = SetxattrInCompat { size: 1, flags: 0 };
    let hole = LseekIn { fh, whence: libc::SEEK_HOLE as u32, ..Default::default() };
    let requests: [(Opcode, u64, Vec<u8>); 8] = [
        (Opcode::Write, node, [write.as_bytes(), b"x"].concat()),
        (Opcode::Setattr, node, mode.as_bytes().to_vec()),
        (Opcode::Setattr, node, times.as_bytes().to_vec()),
        (Opcode::Setxattr, node, [xattr.as_bytes(), b"user.x\0y"].concat()),
        (Opcode::Lseek, node, hole.as_bytes().to_vec()),
        (Opcode::Link, d, [LinkIn { oldnodeid: node }.as_bytes(), b"link\0"].concat()),
        (Opcode::Rename, d, [RenameIn { newdir: d }.as_bytes(), b"another\0file\0"].concat()),
        (Opcode::Unlink, d, b"file\0".to_vec()),
    ];
    let mut waiting = Vec::new();
    for (opcode, node, body) in &requests {
        let head = frontend.header(*opcode as u32, *node, body.len()).1;
        waiting.push(frontend.submit(1, &[&[&head, &body[..]].concat()], &[160]).unwrap());
        // The first begin to wait, and the daemon goes on.
        ask(Opcode::Getattr, other, GetattrIn::default().as_bytes(), 104);
        lookup(ROOT_ID, b"other\0");
    }
    assert!(frontend.wait_for(1, waiting[0], Duration::ZERO).is_err());
    drop(lock);
    let end = |token| OutHeader::read_from_prefix(&frontend.wait_for(1, token, LONG).unwrap().data).unwrap().0.error;
    for ((opcode, ..), token) in requests.iter().zip(waiting) {
        // They have no order, so the file may be gone. Not all file systems have the attribute.
        let error = end(token);
        assert!([0, -libc::ENOENT, -libc::EOPNOTSUPP].contains(&error), "{opcode:?}: {error}");
    }
    assert_ne!(another, 0);
    daemon.end();
}

/// Several large writes and reads at a time: some leave the worker, and all arrive.
#[test]
fn a_crowd_of_large_requests_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let root = rustix::fs::open(dir.path(), rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), Config::default()).unwrap();
    let options = Options { mem_size: 64 << 20, ..Options::default() };
    let daemon = Daemon::start_with(Server::new(fs), urings(), options);
    let frontend = &daemon.frontend;
    frontend.fuse_init(0).unwrap();
    let create = CreateIn { flags: libc::O_RDWR as u32, mode: libc::S_IFREG | 0o600, ..Default::default() };
    let body = [create.as_bytes(), b"file\0"].concat();
    let out = frontend.request(1, Opcode::Create as u32, ROOT_ID, &body, b"", 144).unwrap();
    let (entry, rest) = EntryOut::read_from_prefix(&out).unwrap();
    let (open, _) = OpenOut::read_from_prefix(rest).unwrap();
    let part = |n: usize| vec![n as u8 + 1; 1 << 20];
    for round in 0..4 {
        let write = |n: usize| {
            let args = WriteIn { fh: open.fh, offset: (n << 20) as u64, size: 1 << 20, ..Default::default() };
            let len = args.as_bytes().len() + (1 << 20);
            let (_, head) = frontend.header(Opcode::Write as u32, entry.nodeid, len);
            frontend.submit(1, &[&[&head, args.as_bytes()].concat(), &part(n + round)], &[16, 8]).unwrap()
        };
        for token in (0..8).map(write).collect::<Vec<_>>() {
            let done = frontend.wait_for(1, token, LONG).unwrap();
            assert_eq!((done.len, &done.data[16..20]), (24, &(1u32 << 20).to_le_bytes()[..]));
        }
        let read = |n: usize| {
            let args = ReadIn { fh: open.fh, offset: (n << 20) as u64, size: 1 << 20, ..Default::default() };
            let (_, head) = frontend.header(Opcode::Read as u32, entry.nodeid, args.as_bytes().len());
            frontend.submit(1, &[&[&head, args.as_bytes()].concat()], &[16, 1 << 20]).unwrap()
        };
        for (n, token) in (0..8).map(read).collect::<Vec<_>>().into_iter().enumerate() {
            assert!(frontend.wait_for(1, token, LONG).unwrap().data[16..] == part(n + round));
        }
    }
    daemon.end();
}

/// What the guest reads of a file whose pages are not in memory, with io_uring and without.
#[test]
fn a_cold_file_reads_as_it_is() {
    for urings in [Urings::new(1), Urings::none()] {
        // Not in /tmp, which may be in memory.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let file = File::create(dir.path().join("cold")).unwrap();
        let data: Vec<u8> = (0..3_000_000u32).map(|n| (n / 7) as u8).collect();
        file.write_all_at(&data, 0).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let root = rustix::fs::open(dir.path(), rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), Config::default()).unwrap();
        let daemon = Daemon::start(Server::new(fs), urings);
        let frontend = &daemon.frontend;
        frontend.fuse_init(0).unwrap();
        let entry = frontend.request(1, Opcode::Lookup as u32, ROOT_ID, b"cold\0", b"", 128).unwrap();
        let (entry, _) = EntryOut::read_from_prefix(&entry).unwrap();
        let open =
            frontend.request(1, Opcode::Open as u32, entry.nodeid, OpenIn::default().as_bytes(), b"", 16).unwrap();
        let (open, _) = OpenOut::read_from_prefix(&open).unwrap();
        for offset in (0..data.len() + 200_000).step_by(100_000).rev() {
            let read = ReadIn { fh: open.fh, offset: offset as u64, size: 131_072, ..Default::default() };
            let got = frontend.request(1, Opcode::Read as u32, entry.nodeid, read.as_bytes(), b"", 131_072).unwrap();
            let end = data.len().min(offset + 131_072);
            assert!(got == data.get(offset..end).unwrap_or_default(), "at {offset}: {} bytes", got.len());
        }
        daemon.end();
    }
}

fn shared(dir: &std::path::Path) -> Server<PassthroughFs> {
    let root: OwnedFd = File::open(dir).unwrap().into();
    Server::new(PassthroughFs::new(root, proc_self_fd().unwrap(), Config::default()).unwrap())
}

fn error(frontend: &Frontend, token: Token) -> i32 {
    let done = frontend.wait_for(1, token, LONG).unwrap();
    OutHeader::read_from_prefix(&done.data).unwrap().0.error
}

/// A ring of a virtual machine that is restored, with a GETATTR of the node. It goes on after another request.
fn restored(daemon: &mut Daemon, node: u64, send_first: bool) -> Token {
    let frontend = &mut daemon.frontend;
    let body = GetattrIn::default();
    let ask = |frontend: &Frontend| {
        let (_, head) = frontend.header(Opcode::Getattr as u32, node, size_of::<GetattrIn>());
        frontend.submit(1, &[&head, body.as_bytes()], &[16, size_of::<AttrOut>()]).unwrap()
    };
    let first = send_first.then(|| ask(frontend));
    // The queue has a worker then.
    first.into_iter().for_each(|first| assert_eq!(error(frontend, first), -libc::EIO));
    let mut base = frontend.stop_queue(1).unwrap();
    if !send_first {
        ask(frontend);
        base += 1;
    }
    let waits = ask(frontend);
    frontend.take_kicks(1);
    frontend.start_queue(1, base).unwrap();
    waits
}

/// QEMU sends the session before it starts the rings, cloud-hypervisor after that.
#[test]
fn a_session_may_come_before_or_after_the_rings_start() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "contents").unwrap();
    let mut source = Daemon::start(shared(dir.path()), Urings::none());
    source.frontend.fuse_init(0).unwrap();
    let entry = source.frontend.request(1, Opcode::Lookup as u32, ROOT_ID, b"file\0", b"", 128).unwrap();
    let node = EntryOut::read_from_prefix(&entry).unwrap().0.nodeid;
    assert_eq!([0, 1].map(|queue| source.frontend.stop_queue(queue).unwrap()), [0, 2]);
    let state = save(&mut source.frontend).unwrap();
    source.end();

    let mut early = Daemon::start(shared(dir.path()), Urings::none());
    assert_eq!([0, 1].map(|queue| early.frontend.stop_queue(queue).unwrap()), [0, 0]);
    assert!(load(&mut early.frontend, &state));
    early.frontend.start_queue(0, 0).unwrap();
    let waits = restored(&mut early, node, false);
    assert_eq!(error(&early.frontend, waits), 0);
    early.end();

    for has_worker in [false, true] {
        let mut late = Daemon::start(shared(dir.path()), Urings::none());
        let waits = restored(&mut late, node, has_worker);
        let nothing_comes = |frontend: &Frontend| {
            let nothing = frontend.wait(1, Duration::from_millis(150));
            assert_eq!(nothing.unwrap_err().raw_os_error(), Some(libc::ETIMEDOUT));
        };
        nothing_comes(&late.frontend);
        let (from, to) = rustix::pipe::pipe().unwrap();
        let (load_it, stopped) = (VhostTransferStateDirection::LOAD, VhostTransferStatePhase::STOPPED);
        late.frontend.vhost().set_device_state_fd(load_it, stopped, from).unwrap();
        // The guest runs before all of the session is there.
        late.frontend.kick(1).unwrap();
        nothing_comes(&late.frontend);
        File::from(to).write_all(&state).unwrap();
        late.frontend.vhost().check_device_state().unwrap();
        assert_eq!(error(&late.frontend, waits), 0, "{has_worker}");
        // A session that is in use stays.
        assert!(!load(&mut late.frontend, &state));
        let body = GetattrIn::default();
        late.frontend.request(1, Opcode::Getattr as u32, node, body.as_bytes(), b"", size_of::<AttrOut>()).unwrap();
        late.end();
    }
}

/// The session was lost: the guest mounts the share anew, by a ring that waits for a session.
#[test]
fn a_mount_does_not_wait_for_a_session() {
    for has_worker in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let mut daemon = Daemon::start(shared(dir.path()), Urings::none());
        let waits = restored(&mut daemon, 5, has_worker);
        daemon.frontend.fuse_init(0).unwrap();
        assert_eq!(error(&daemon.frontend, waits), -libc::EIO);
        daemon.end();
        // A session that fails to come keeps nothing back either.
        let mut daemon = Daemon::start(shared(dir.path()), Urings::none());
        let waits = restored(&mut daemon, 5, has_worker);
        assert!(!load(&mut daemon.frontend, b"no session"));
        assert_eq!(error(&daemon.frontend, waits), -libc::EIO);
        daemon.end();
    }
}
