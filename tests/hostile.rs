//! A hostile guest against the whole daemon in one process. After each bad request the daemon serves a good one.

use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;
use thruway::device;
use thruway::fs::{Config, PassthroughFs, proc_self_fd};
use thruway::fuse::Server;
use thruway::fuse::abi::*;
use thruway::limits::LOCK_THREADS;
use thruway_bench::frontend::{Frontend, Options};
use virtio_queue::desc::split::Descriptor;
use zerocopy::{FromBytes, IntoBytes};

/// A limit on hangs.
const LONG: Duration = Duration::from_secs(100);
const NEXT: u16 = 1;
const WRITE: u16 = 2;

struct Guest {
    frontend: Frontend,
    dir: TempDir,
}

impl Guest {
    fn new() -> Self {
        Self::with(tempfile::tempdir().unwrap(), Options { queues: 3, ..Default::default() })
    }

    fn with(dir: TempDir, queues: Options) -> Self {
        std::fs::create_dir(dir.path().join("share")).unwrap();
        std::fs::write(dir.path().join("share/file"), b"contents").unwrap();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(dir.path().join("share"), flags, Mode::empty()).unwrap();
        let config = Config { posix_lock: true, ..Default::default() };
        let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), config).unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let options = device::Options { request_queues: 2, ..Default::default() };
        std::thread::spawn(move || device::serve(listener, Arc::new(Server::new(fs)), options));
        let frontend = Frontend::connect(&dir.path().join("socket"), queues).unwrap();
        frontend.fuse_init(u64::MAX).unwrap();
        Self { frontend, dir }
    }

    fn call(&self, opcode: Opcode, nodeid: u64, args: &[u8], room: usize) -> Result<Vec<u8>, i32> {
        self.frontend.request(1, opcode as u32, nodeid, args, &[], room)
    }

    fn lookup(&self, name: &[u8]) -> Result<u64, i32> {
        let entry = self.call(Opcode::Lookup, ROOT_ID, name, size_of::<EntryOut>())?;
        Ok(EntryOut::read_from_bytes(&entry).unwrap().nodeid)
    }

    fn open(&self, node: u64) -> u64 {
        let open = OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
        let out = self.call(Opcode::Open, node, open.as_bytes(), size_of::<OpenOut>()).unwrap();
        OpenOut::read_from_bytes(&out).unwrap().fh
    }

    /// Checks that the daemon still serves the abused queue and the other one.
    fn is_served(&self) {
        for queue in [1, 2] {
            let args = GetattrIn::default();
            let room = size_of::<AttrOut>();
            self.frontend.request(queue, Opcode::Getattr as u32, ROOT_ID, args.as_bytes(), &[], room).unwrap();
        }
    }

    /// Sends a chain of (address, length, flags). The last descriptor links to `last`.
    fn chain(&self, parts: &[(u64, u32, u16)], last: Option<usize>) -> u32 {
        let indices = self.frontend.take_descriptors(1, parts.len()).unwrap();
        for (n, &(addr, len, flags)) in parts.iter().enumerate() {
            let next = indices.get(n + 1).copied().or(last.map(|n| indices[n]));
            let flags = flags | if next.is_some() { NEXT } else { 0 };
            let descriptor = Descriptor::new(addr, len, flags, next.unwrap_or(0));
            self.frontend.write_descriptor(1, indices[n], descriptor).unwrap();
        }
        self.frontend.push_raw(1, indices[0]).unwrap();
        let (head, len) = self.frontend.wait_raw(1, LONG).unwrap();
        assert_eq!(head, u32::from(indices[0]));
        len
    }
}

#[test]
fn bad_requests_get_an_errno() {
    let guest = Guest::new();
    let node = guest.lookup(b"file\0").unwrap();
    let fh = guest.open(node);
    let read = |node, fh| guest.call(Opcode::Read, node, ReadIn { fh, size: 8, ..Default::default() }.as_bytes(), 8);
    assert_eq!(read(node, fh).unwrap(), b"contents");

    assert_eq!(guest.frontend.request(1, 9999, ROOT_ID, &[], &[], 64), Err(libc::ENOSYS));
    assert_eq!(guest.call(Opcode::Getattr, 0xdead_beef, GetattrIn::default().as_bytes(), 200), Err(libc::ESTALE));
    assert_eq!(read(node, fh ^ 1 << 32), Err(libc::EBADF));
    assert_eq!(read(ROOT_ID, fh), Err(libc::EBADF));
    assert_eq!(guest.lookup(b"no end"), Err(libc::EINVAL));
    assert_eq!(guest.lookup(b"../socket\0"), Err(libc::EINVAL));
    assert_eq!(guest.lookup(b"..\0"), Err(libc::EINVAL));
    assert_eq!(guest.call(Opcode::Write, node, &[0; 7], 8), Err(libc::EINVAL));
    let more = WriteIn { fh, size: 1 << 20, ..Default::default() };
    assert_eq!(guest.call(Opcode::Write, node, more.as_bytes(), 8), Err(libc::EINVAL));
    assert_eq!(guest.call(Opcode::Getattr, ROOT_ID, GetattrIn::default().as_bytes(), 9), Err(libc::EOVERFLOW));
    guest.is_served();
    assert_eq!(std::fs::read(guest.dir.path().join("share/file")).unwrap(), b"contents");
}

#[test]
fn bad_chains_are_answered_or_dropped() {
    let guest = Guest::new();
    let room = guest.frontend.alloc(1, 8192).unwrap();
    let header = InHeader { len: 56, opcode: Opcode::Getattr as u32, unique: 5, nodeid: 1, ..Default::default() };
    let put = |bytes: &[u8]| {
        use vm_memory::{Bytes, GuestAddress};
        guest.frontend.memory().write_slice(bytes, GuestAddress(room)).unwrap();
    };
    let outside = 1 << 40;
    put(header.as_bytes());
    // Arguments outside of memory, no arguments, a reply outside of memory, two loops, an empty descriptor, a short
    // header.
    assert_eq!(guest.chain(&[(room, 40, 0), (outside, 16, 0), (room + 4096, 16, WRITE)], None), 16);
    assert_eq!(guest.chain(&[(room, 40, 0), (room + 4096, 16, WRITE)], None), 16);
    assert_eq!(guest.chain(&[(room, 56, 0), (outside, 120, WRITE)], None), 0);
    guest.chain(&[(room, 40, 0), (room + 4096, 16, WRITE), (room + 4096, 16, WRITE)], Some(1));
    guest.chain(&[(room, 40, 0), (room + 64, 16, 0)], Some(0));
    guest.chain(&[(room, 0, 0)], None);
    guest.chain(&[(room, 39, 0), (room + 4096, 16, WRITE)], None);
    // The header claims more bytes than there are, or fewer than its own.
    for len in [u32::MAX, 57, 39, 0] {
        put(InHeader { len, ..header }.as_bytes());
        assert_eq!(guest.chain(&[(room, 56, 0), (room + 4096, 120, WRITE)], None), 16);
    }
    // A good request.
    put(header.as_bytes());
    assert_eq!(guest.chain(&[(room, 56, 0), (room + 4096, 120, WRITE)], None), 16 + size_of::<AttrOut>() as u32);
}

#[test]
fn a_waiting_lock_does_not_hold_up_its_queue() {
    let guest = Guest::new();
    let node = guest.lookup(b"file\0").unwrap();
    let (a, b) = (guest.open(node), guest.open(node));
    let lock = |fh, owner, kind: i32| {
        let lk = FileLock { start: 0, end: i64::MAX as u64, kind: kind as u32, pid: 1 };
        LkIn { fh, owner, lk, ..Default::default() }
    };
    guest.call(Opcode::Setlk, node, lock(a, 1, libc::F_WRLCK).as_bytes(), 0).unwrap();
    let want = lock(b, 2, libc::F_WRLCK);
    let (_, head) = guest.frontend.header(Opcode::Setlkw as u32, node, size_of::<LkIn>());
    let waiting = guest.frontend.submit(1, &[&head, want.as_bytes()], &[16]).unwrap();
    guest.is_served();
    assert!(guest.frontend.wait_for(1, waiting, Duration::from_millis(50)).is_err());
    guest.call(Opcode::Setlk, node, lock(a, 1, libc::F_UNLCK).as_bytes(), 0).unwrap();
    let done = guest.frontend.wait_for(1, waiting, LONG).unwrap();
    assert_eq!(OutHeader::ref_from_prefix(&done.data).unwrap().0.error, 0);
}

/// As many processes as possible wait for a lock for ever. A sync, which also needs a thread, is still served.
#[test]
fn waiting_locks_hold_up_no_sync() {
    // Not in /tmp, which may be in memory: nothing waits there.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let guest = Guest::with(dir, Options { queues: 3, queue_size: 512, ..Default::default() });
    let node = guest.lookup(b"file\0").unwrap();
    let fh = guest.open(node);
    let lock = |owner, kind: i32| {
        let lk = FileLock { start: 0, end: i64::MAX as u64, kind: kind as u32, pid: 1 };
        LkIn { fh, owner, lk, ..Default::default() }
    };
    guest.call(Opcode::Setlk, node, lock(1, libc::F_WRLCK).as_bytes(), 0).unwrap();
    for owner in 0..LOCK_THREADS as u64 + 1 {
        let (_, head) = guest.frontend.header(Opcode::Setlkw as u32, node, size_of::<LkIn>());
        guest.frontend.submit(1, &[&head, lock(2 + owner, libc::F_WRLCK).as_bytes()], &[16]).unwrap();
    }
    let refused = guest.frontend.wait(1, LONG).unwrap();
    assert_eq!(OutHeader::ref_from_prefix(&refused.data).unwrap().0.error, -libc::EAGAIN);
    guest.call(Opcode::Fsync, node, FsyncIn { fh, ..Default::default() }.as_bytes(), 0).unwrap();
    guest.is_served();
}
