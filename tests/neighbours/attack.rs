//! The attacks of the hostile guest. Each is a step that is repeated.

use std::io::Write;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::fs::{Advice, fadvise};
use thruway::fuse::abi::*;
use thruway_bench::frontend::{Frontend, Token, Window};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress};
use zerocopy::{FromBytes, IntoBytes};

/// Timeout for requests that may get no reply, because the queue may have stopped.
const SHORT: Duration = Duration::from_millis(20);
/// Timeout for requests that get a reply even on a slow machine.
const LONG: Duration = Duration::from_secs(60);

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// The name of an attack and its step.
pub type Attack = (&'static str, fn(&mut Hostile));

pub const ATTACKS: &[Attack] = &[
    ("one head offered again and again", the_same_head_repeatedly),
    ("heads and indices out of range", heads_out_of_range),
    ("chains that loop or lead nowhere", bad_chains),
    ("requests of random bytes", random_requests),
    ("log lines without end", log_flood),
    ("sessions begun and ended", sessions),
    ("cold reads in 1000 pieces", cold_reads),
    ("4 MiB reads, a queue full", large_reads),
    ("fsyncs, a queue full", fsyncs),
    ("copies of 1 GiB, 200 at a time", copies),
    ("lock waiters, 900 at a time", lock_waiters),
    ("lock spans without end", lock_spans),
    ("opens without end", opens),
    ("directory listings without end", listings),
    ("names without end", names),
    ("opens of FIFOs", fifos),
    ("files moved under others", fallocates),
    ("mappings without end", mappings),
    ("10,000 parts to unmap", removemappings),
];

pub struct Hostile {
    guest: Frontend,
    /// Its shared memory regions. They stay mapped until this is dropped.
    _window: Option<Window>,
    dir: u64,
    path: PathBuf,
    steps: u64,
    random: fastrand::Rng,
    /// (nodeid, fh) of the files that an attack keeps open.
    open: Vec<(u64, u64)>,
}

impl Hostile {
    pub fn new((guest, window): (Frontend, Option<Window>), path: PathBuf) -> Self {
        let mut this = Self {
            guest,
            _window: window,
            dir: 0,
            path,
            steps: 0,
            random: fastrand::Rng::with_seed(7),
            open: Vec::new(),
        };
        this.dir = this.lookup(ROOT_ID, "hostile").unwrap();
        this
    }

    fn call(&self, opcode: Opcode, node: u64, body: &[u8], room: usize) -> Result<Vec<u8>, i32> {
        self.guest.request(1, opcode as u32, node, body, &[], room)
    }

    fn lookup(&self, dir: u64, name: &str) -> Result<u64, i32> {
        let entry = self.call(Opcode::Lookup, dir, format!("{name}\0").as_bytes(), size_of::<EntryOut>())?;
        Ok(EntryOut::read_from_bytes(&entry).unwrap().nodeid)
    }

    /// Creates and opens a file.
    fn create(&self, name: &str) -> Result<(u64, u64), i32> {
        let args = CreateIn { flags: libc::O_RDWR as u32, mode: 0o600, ..Default::default() };
        let body = [args.as_bytes(), name.as_bytes(), b"\0"].concat();
        let made = self.call(Opcode::Create, self.dir, &body, size_of::<EntryOut>() + size_of::<OpenOut>())?;
        let (entry, open) = EntryOut::read_from_prefix(&made).unwrap();
        Ok((entry.nodeid, OpenOut::read_from_bytes(open).unwrap().fh))
    }

    fn open(&self, node: u64) -> Result<u64, i32> {
        let args = OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
        let open = self.call(Opcode::Open, node, args.as_bytes(), size_of::<OpenOut>())?;
        Ok(OpenOut::read_from_bytes(&open).unwrap().fh)
    }

    /// The host makes a file of `len` bytes in the guest's directory; the guest opens it.
    fn file(&mut self, len: u64) -> (u64, u64) {
        if let Some(open) = self.open.first() {
            return *open;
        }
        let file = std::fs::File::create(self.path.join("file")).unwrap();
        file.set_len(len).unwrap();
        if len <= 64 << 20 {
            (&file).write_all(&vec![7; len as usize]).unwrap();
            rustix::fs::fsync(&file).unwrap();
        }
        let node = self.lookup(self.dir, "file").unwrap();
        let fh = self.open(node).unwrap();
        self.open.push((node, fh));
        (node, fh)
    }

    /// Makes a request available. `None` if the queue is full.
    fn send(&self, queue: usize, opcode: Opcode, node: u64, body: &[u8], rooms: &[usize]) -> Option<Token> {
        let (_, head) = self.guest.header(opcode as u32, node, body.len());
        self.guest.submit(queue, &[&[&head, body].concat()], &[&[16], rooms].concat()).ok()
    }

    fn finish(&self, queue: usize, sent: Vec<Option<Token>>) {
        for token in sent.into_iter().flatten() {
            self.guest.wait_for(queue, token, LONG).expect("a reply to each request");
        }
    }

    /// Resets the device, which may have stopped the queue.
    fn reset(&mut self) {
        self.guest.reset_device().unwrap();
        self.guest.fuse_init(u64::MAX).unwrap();
        self.dir = self.lookup(ROOT_ID, "hostile").unwrap();
        self.open.clear();
    }

    /// Writes a chain of (address, length, flags) that is not freed. Returns its head.
    fn chain(&self, parts: &[(u64, u32, u16)], last: Option<usize>) -> u16 {
        let indices = self.guest.take_descriptors(1, parts.len()).unwrap();
        for (n, &(addr, len, flags)) in parts.iter().enumerate() {
            let next = indices.get(n + 1).copied().or(last.map(|n| indices[n]));
            let flags = flags | if next.is_some() { NEXT } else { 0 };
            let descriptor = Descriptor::new(addr, len, flags, next.unwrap_or(0));
            self.guest.write_descriptor(1, indices[n], descriptor).unwrap();
        }
        indices[0]
    }

    /// Writes a request to memory, with room for its reply. Returns both addresses.
    fn written(&self, opcode: Opcode, node: u64, body: &[u8]) -> (u64, u64) {
        let at = self.guest.alloc(1, 8192).unwrap();
        let (_, head) = self.guest.header(opcode as u32, node, body.len());
        self.guest.memory().write_slice(&[&head, body].concat(), GuestAddress(at)).unwrap();
        (at, at + 4096)
    }
}

fn lock(fh: u64, owner: u64, start: u64, end: u64, kind: i32) -> LkIn {
    let lk = FileLock { start, end, kind: kind as u32, pid: 1 };
    LkIn { fh, owner, lk, ..Default::default() }
}

fn the_same_head_repeatedly(hostile: &mut Hostile) {
    hostile.reset();
    let (node, fh) = hostile.file(4096);
    let other = hostile.open(node).unwrap();
    let whole = |fh, owner| lock(fh, owner, 0, i64::MAX as u64, libc::F_WRLCK);
    hostile.call(Opcode::Setlk, node, whole(fh, 1).as_bytes(), 0).unwrap();
    let body = whole(other, 2);
    let (request, reply) = hostile.written(Opcode::Setlkw, node, body.as_bytes());
    let head = hostile.chain(&[(request, 40 + size_of::<LkIn>() as u32, 0), (reply, 16, WRITE)], None);
    for _ in 0..64 {
        hostile.guest.offer(1, &[head; 256]).unwrap();
        hostile.guest.kick(1).unwrap();
    }
    // A queue that runs replies to this; one that has stopped does not.
    let ping = hostile.send(1, Opcode::Getattr, ROOT_ID, GetattrIn::default().as_bytes(), &[size_of::<AttrOut>()]);
    let _ = ping.map(|ping| hostile.guest.wait_for(1, ping, SHORT));
    // The other queue still works.
    hostile.guest.request(2, Opcode::Statfs as u32, ROOT_ID, &[], &[], size_of::<StatfsOut>()).unwrap();
}

fn heads_out_of_range(hostile: &mut Hostile) {
    hostile.reset();
    match hostile.steps % 3 {
        0 => hostile.guest.offer(1, &[1024, u16::MAX]).unwrap(),
        1 => hostile.guest.offer(1, &[u16::MAX; 512]).unwrap(),
        _ => {
            // Announce 40,000 chains that do not exist.
            let at = GuestAddress(hostile.guest.layout(1).available + 2);
            hostile.guest.memory().store(40_000_u16, at, Ordering::Release).unwrap();
        }
    }
    hostile.guest.kick(1).unwrap();
    hostile.steps += 1;
    hostile.guest.request(2, Opcode::Statfs as u32, ROOT_ID, &[], &[], size_of::<StatfsOut>()).unwrap();
}

fn bad_chains(hostile: &mut Hostile) {
    hostile.reset();
    let outside = 1 << 40;
    let (request, reply) = hostile.written(Opcode::Getattr, ROOT_ID, GetattrIn::default().as_bytes());
    let heads = [
        hostile.chain(&[(request, 40, 0), (outside, 16, 0), (reply, 16, WRITE)], None),
        hostile.chain(&[(request, 56, 0), (outside, 120, WRITE)], None),
        hostile.chain(&[(request, 40, 0), (reply, 16, WRITE), (reply, 16, WRITE)], Some(1)),
        hostile.chain(&[(request, 40, 0), (request + 64, 16, 0)], Some(0)),
        hostile.chain(&[(request, 0, 0)], None),
        hostile.chain(&[(u64::MAX - 8, 40, 0), (reply, u32::MAX, WRITE)], None),
        hostile.chain(&[(hostile.guest.layout(1).used, 4096, WRITE), (request, 40, 0)], None),
    ];
    for head in heads {
        hostile.guest.push_raw(1, head).unwrap();
        hostile.guest.wait_raw(1, LONG).unwrap();
    }
}

fn random_requests(hostile: &mut Hostile) {
    let (_, fh) = hostile.file(1 << 20);
    for _ in 0..100 {
        let opcode = hostile.random.u32(..60);
        let mut body = vec![0; hostile.random.usize(..200)];
        hostile.random.fill(&mut body);
        if hostile.random.bool() && body.len() > 8 {
            body[..8].copy_from_slice(&fh.to_le_bytes());
        }
        let node = *hostile.random.choice(&[0, ROOT_ID, hostile.dir, hostile.dir + 1, u64::MAX]).unwrap();
        // SETLKW may wait without end. INIT and DESTROY have their own attack.
        let not =
            [Opcode::Setlkw, Opcode::Init, Opcode::Destroy, Opcode::Forget, Opcode::BatchForget, Opcode::Interrupt];
        if not.iter().any(|not| *not as u32 == opcode) {
            continue;
        }
        let _ = hostile.guest.request(1, opcode, node, &body, &[], 4096);
    }
}

fn log_flood(hostile: &mut Hostile) {
    let old = InitInCompat { major: KERNEL_VERSION, minor: 5, ..Default::default() };
    for _ in 0..200 {
        assert_eq!(hostile.call(Opcode::Init, 0, old.as_bytes(), 64), Err(libc::EPROTO));
    }
}

fn sessions(hostile: &mut Hostile) {
    for _ in 0..20 {
        hostile.guest.fuse_init(u64::MAX).unwrap();
        let dir = hostile.lookup(ROOT_ID, "hostile").unwrap();
        hostile.dir = dir;
        let _ = hostile.create("session");
        hostile.call(Opcode::Destroy, 0, &[], 0).unwrap();
    }
    hostile.guest.fuse_init(u64::MAX).unwrap();
}

fn cold_reads(hostile: &mut Hostile) {
    let (node, fh) = hostile.file(32 << 20);
    let file = std::fs::File::open(hostile.path.join("file")).unwrap();
    fadvise(file.as_fd(), 0, None, Advice::DontNeed).unwrap();
    let read = |n: u64| {
        let args = ReadIn { fh, offset: n % 250 * (128 << 10), size: 1000 * 64, ..Default::default() };
        hostile.send(1, Opcode::Read, node, args.as_bytes(), &[64; 1000])
    };
    let sent = (0..500).map(read).collect();
    hostile.finish(1, sent);
}

fn large_reads(hostile: &mut Hostile) {
    let (node, fh) = hostile.file(4 << 20);
    let args = ReadIn { fh, size: 4 << 20, ..Default::default() };
    let sent = (0..7).map(|_| hostile.send(1, Opcode::Read, node, args.as_bytes(), &[4 << 20])).collect();
    hostile.finish(1, sent);
}

fn fsyncs(hostile: &mut Hostile) {
    let (node, fh) = hostile.file(1 << 20);
    let args = FsyncIn { fh, ..Default::default() };
    let sent = (0..1000).map(|_| hostile.send(1, Opcode::Fsync, node, args.as_bytes(), &[])).collect();
    hostile.finish(1, sent);
}

fn copies(hostile: &mut Hostile) {
    let (node, fh) = hostile.file(2 << 30);
    let args = |n: u64| CopyFileRangeIn {
        fh_in: fh,
        nodeid_out: node,
        fh_out: fh,
        off_out: 1 << 30,
        len: (1 << 30) - n,
        ..Default::default()
    };
    let send = |n| hostile.send(1, Opcode::CopyFileRange, node, args(n).as_bytes(), &[size_of::<WriteOut>()]);
    let _sent: Vec<_> = (0..200).map(send).collect();
    // A reset ends the waiting requests.
    hostile.reset();
    std::fs::File::create(hostile.path.join("file")).unwrap();
}

fn lock_waiters(hostile: &mut Hostile) {
    let (node, fh) = hostile.file(4096);
    let other = hostile.open(node).unwrap();
    let whole = |fh, owner, kind| lock(fh, owner, 0, i64::MAX as u64, kind);
    hostile.call(Opcode::Setlk, node, whole(fh, 1, libc::F_WRLCK).as_bytes(), 0).unwrap();
    let wait = |n: u64| hostile.send(1, Opcode::Setlkw, node, whole(other, n + 2, libc::F_WRLCK).as_bytes(), &[]);
    let _sent: Vec<_> = (0..900).map(wait).collect();
    // Meanwhile, send work that waits for a disk.
    let args = FsyncIn { fh, ..Default::default() };
    hostile.guest.request(2, Opcode::Fsync as u32, node, args.as_bytes(), &[], 0).unwrap();
    hostile.reset();
}

fn lock_spans(hostile: &mut Hostile) {
    let (node, fh) = hostile.file(4096);
    for _ in 0..200 {
        hostile.steps += 1;
        let at = 2 * hostile.steps;
        let result = hostile.call(Opcode::Setlk, node, lock(fh, 1, at, at, libc::F_WRLCK).as_bytes(), 0);
        assert!(matches!(result, Ok(_) | Err(libc::ENOLCK)), "{result:?}");
    }
}

fn opens(hostile: &mut Hostile) {
    let (node, _) = hostile.file(4096);
    for _ in 0..500 {
        match hostile.open(node) {
            Ok(fh) => hostile.open.push((node, fh)),
            Err(errno) => assert!([libc::EMFILE, libc::ENFILE, libc::ENOMEM].contains(&errno), "{errno}"),
        }
    }
    hostile.call(Opcode::Getattr, ROOT_ID, GetattrIn::default().as_bytes(), size_of::<AttrOut>()).unwrap();
}

fn listings(hostile: &mut Hostile) {
    if hostile.steps == 0 {
        (0..2000).for_each(|n| {
            drop(std::fs::File::create(hostile.path.join(format!("a long name of a file {n}"))).unwrap());
        });
        hostile.steps = 1;
    }
    for _ in 0..200 {
        let open = hostile.call(Opcode::Opendir, hostile.dir, OpenIn::default().as_bytes(), size_of::<OpenOut>());
        let Ok(open) = open else { continue };
        let fh = OpenOut::read_from_bytes(&open).unwrap().fh;
        let args = ReadIn { fh, size: 1024, ..Default::default() };
        hostile.call(Opcode::Readdir, hostile.dir, args.as_bytes(), 1024).unwrap();
    }
}

fn names(hostile: &mut Hostile) {
    for _ in 0..200 {
        hostile.steps += 1;
        let args = [MkdirIn { mode: 0o700, umask: 0 }.as_bytes(), format!("d{}\0", hostile.steps).as_bytes()].concat();
        let made = hostile.call(Opcode::Mkdir, hostile.dir, &args, size_of::<EntryOut>());
        assert!(matches!(made, Ok(_) | Err(libc::ENFILE | libc::ENOMEM | libc::EMFILE | libc::ENOSPC)), "{made:?}");
    }
}

fn fifos(hostile: &mut Hostile) {
    if hostile.steps == 0 {
        let args = MknodIn { mode: libc::S_IFIFO | 0o600, ..Default::default() };
        let body = [args.as_bytes(), b"fifo\0"].concat();
        hostile.call(Opcode::Mknod, hostile.dir, &body, size_of::<EntryOut>()).unwrap();
        hostile.steps = 1;
    }
    let node = hostile.lookup(hostile.dir, "fifo").unwrap();
    let args = OpenIn { flags: libc::O_RDONLY as u32, open_flags: 0 };
    let _sent: Vec<_> =
        (0..300).map(|_| hostile.send(1, Opcode::Open, node, args.as_bytes(), &[size_of::<OpenOut>()])).collect();
    // The hostile guest's own queue still works.
    hostile.guest.request(1, Opcode::Statfs as u32, ROOT_ID, &[], &[], size_of::<StatfsOut>()).unwrap();
    hostile.reset();
}

fn fallocates(hostile: &mut Hostile) {
    let (node, fh) = hostile.file(1 << 20);
    // FALLOC_FL_COLLAPSE_RANGE, INSERT_RANGE, UNSHARE_RANGE, and modes that do not exist.
    for mode in [0x08, 0x20, 0x40, 0x80, 0x100, u32::MAX] {
        let args = FallocateIn { fh, length: 4096, mode, ..Default::default() };
        assert_eq!(hostile.call(Opcode::Fallocate, node, args.as_bytes(), 0), Err(libc::EOPNOTSUPP), "{mode:#x}");
    }
    let size = std::fs::metadata(hostile.path.join("file")).unwrap().len();
    assert_eq!(size, 1 << 20);
}

fn mappings(hostile: &mut Hostile) {
    let (node, _) = hostile.file(32 << 20);
    let range = 2 << 20;
    for _ in 0..100 {
        let mut place = |of: u64| {
            let odd = if hostile.random.u8(..8) == 0 { hostile.random.u64(..) >> hostile.random.u32(..64) } else { 0 };
            (hostile.random.u64(..of) * range).wrapping_add(odd)
        };
        let (foffset, moffset, len) = (place(20), place(34), place(4));
        let flags = hostile.random.u64(..4);
        let args = SetupmappingIn { fh: u64::MAX, foffset, len, flags, moffset };
        let _ = hostile.call(Opcode::Setupmapping, node, args.as_bytes(), 0);
        let one = RemovemappingOne { moffset, len };
        let _ = hostile.call(Opcode::Removemapping, node, &[1u32.to_le_bytes().as_slice(), one.as_bytes()].concat(), 0);
    }
}

fn removemappings(hostile: &mut Hostile) {
    let parts = 10_000u32;
    let body = [parts.to_le_bytes().as_slice(), &vec![0; 16 * parts as usize]].concat();
    for _ in 0..20 {
        let result = hostile.call(Opcode::Removemapping, ROOT_ID, &body, 0);
        assert!(result.is_err());
    }
}
