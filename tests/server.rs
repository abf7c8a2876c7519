//! The FUSE server over a real directory, called without a virtqueue: how much it allocates, and what it survives.

mod listening;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::sync::mpsc;

use listening::Listening;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tempfile::TempDir;
use thruway::fs::{CachePolicy, Config, FileHandles, NoOpen, Offer, PassthroughFs, proc_self_fd};
use thruway::fuse::abi::*;
use thruway::fuse::buf::IoRange;
use thruway::fuse::ops::Wait;
use thruway::fuse::{Io, Job, ReplySender, Server, Transport, Work};
use thruway::limits::{DATA_BYTES, INODE_MEMORY, REMOVED_PARTS};
use thruway::watch::Watch;
use zerocopy::{FromBytes, IntoBytes};

/// Counts the calling thread's allocations, and its bytes that are not freed.
struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all work is the system allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        BYTES.set(BYTES.get().wrapping_add(layout.size()));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        BYTES.set(BYTES.get().wrapping_sub(layout.size()));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Notes what a request wants from another thread.
#[derive(Default)]
struct Here {
    may_wait: bool,
    io: bool,
    job: Option<(Wait, Job)>,
}

impl Transport for Here {
    fn moves(&mut self, _bytes: usize) -> bool {
        false
    }

    fn may_wait(&self) -> bool {
        self.may_wait
    }

    fn io(&mut self, _io: Io, _data: &IoRange) {
        self.io = true;
    }

    fn serve_anew(&mut self, _since: Option<std::time::Instant>) {
        self.io = true;
    }

    fn detach(&mut self) -> ReplySender {
        unreachable!("there is no window")
    }

    fn run(&mut self, wait: Wait, job: Job) -> Result<(), Errno> {
        self.job = Some((wait, job));
        Ok(())
    }
}

struct Guest {
    server: Server<PassthroughFs>,
    work: Work,
    request: Vec<u8>,
    reply: Vec<u8>,
    dir: TempDir,
}

impl Guest {
    fn new(config: Config) -> Self {
        Self::of(config, |fs| fs)
    }

    /// A guest with leases.
    fn leased(config: Config) -> Self {
        let guest = Self::of(config, |fs| fs.with_watch(Some(Watch::new().unwrap())).unwrap());
        Listening::start(guest.server.fs());
        guest
    }

    fn of(config: Config, more: impl FnOnce(PassthroughFs) -> PassthroughFs) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root: OwnedFd = rustix::fs::open(dir.path(), flags, Mode::empty()).unwrap();
        let fs = more(PassthroughFs::new(root, proc_self_fd().unwrap(), config).unwrap());
        let work = Work::default();
        let mut guest = Self { server: Server::new(fs), work, request: Vec::new(), reply: vec![0; 1 << 17], dir };
        let init = InitIn { major: 7, minor: 45, flags: u32::MAX, flags2: u32::MAX, ..Default::default() };
        guest.call(Opcode::Init, 0, &[init.as_bytes()]).unwrap();
        guest
    }

    /// Prepares the request to be served next.
    fn load(&mut self, room: usize) {
        self.work.readable.clear();
        self.work.writable.clear();
        let at = self.request.len().min(40);
        let (head, tail) = self.request.split_at_mut(at);
        for part in [head, tail] {
            // SAFETY: the buffers stay as they are until the request is served.
            unsafe { self.work.readable.push(part.as_mut_ptr(), part.len(), true) };
        }
        // SAFETY: as above.
        unsafe { self.work.writable.push(self.reply.as_mut_ptr(), room.min(self.reply.len()), true) };
    }

    /// Sends raw bytes. Returns the reply's length if there is a reply.
    fn raw(&mut self, room: usize) -> Option<usize> {
        self.load(room);
        let mut here = Here::default();
        let n = self.server.handle(&mut self.work, &mut here);
        if here.io {
            self.load(room);
            let mut here = Here { may_wait: true, ..Here::default() };
            return Some(self.server.handle(&mut self.work, &mut here)).filter(|n| *n > 0);
        }
        let Some((_, job)) = here.job else { return Some(n).filter(|n| *n > 0) };
        let (send, sent) = mpsc::channel();
        job(Box::new(move |reply| send.send(reply).unwrap()));
        let reply = sent.recv().unwrap();
        self.reply[..reply.len()].copy_from_slice(&reply);
        Some(reply.len())
    }

    /// Sends a request. Returns the reply's body or the errno.
    fn call(&mut self, opcode: Opcode, nodeid: u64, parts: &[&[u8]]) -> Result<&[u8], i32> {
        self.request.clear();
        let len = 40 + parts.iter().map(|p| p.len()).sum::<usize>();
        let header = InHeader { len: len as u32, opcode: opcode as u32, unique: 9, nodeid, ..Default::default() };
        self.request.extend_from_slice(header.as_bytes());
        for part in parts {
            self.request.extend_from_slice(part);
        }
        let n = self.raw(usize::MAX).unwrap();
        let (header, body) = OutHeader::ref_from_prefix(&self.reply[..n]).unwrap();
        assert_eq!((header.len as usize, header.unique), (n, 9));
        if header.error == 0 { Ok(body) } else { Err(-header.error) }
    }

    fn lookup(&mut self, name: &[u8]) -> u64 {
        EntryOut::read_from_prefix(self.call(Opcode::Lookup, ROOT_ID, &[name]).unwrap()).unwrap().0.nodeid
    }
}

/// The requests that a guest sends most.
fn hot_path(guest: &mut Guest) {
    let node = guest.lookup(b"file\0");
    let open = OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
    let out = guest.call(Opcode::Open, node, &[open.as_bytes()]).unwrap();
    let fh = OpenOut::read_from_prefix(out).unwrap().0.fh;
    guest.call(Opcode::Getattr, node, &[GetattrIn::default().as_bytes()]).unwrap();
    let read = ReadIn { fh, size: 4096, ..Default::default() };
    assert_eq!(guest.call(Opcode::Read, node, &[read.as_bytes()]).unwrap().len(), 4096);
    let write = WriteIn { fh, size: 5, ..Default::default() };
    guest.call(Opcode::Write, node, &[write.as_bytes(), b"hello"]).unwrap();
    guest.call(Opcode::Release, node, &[ReleaseIn { fh, ..Default::default() }.as_bytes()]).unwrap();
}

#[test]
fn ioctls_have_the_sizes_that_they_say() {
    let mut guest = Guest::new(Config::default());
    std::fs::write(guest.dir.path().join("file"), b"x").unwrap();
    let host = std::fs::File::open(guest.dir.path().join("file")).unwrap();
    let node = guest.lookup(b"file\0");
    let out = guest.call(Opcode::Open, node, &[OpenIn { flags: 0, open_flags: 0 }.as_bytes()]).unwrap();
    let fh = OpenOut::read_from_prefix(out).unwrap().0.fh;
    let args = |cmd, in_size, out_size| IoctlIn { fh, cmd, in_size, out_size, ..Default::default() };
    let mut call =
        |args: IoctlIn, data: &[u8]| guest.call(Opcode::Ioctl, node, &[args.as_bytes(), data]).map(<[u8]>::len);
    if rustix::fs::ioctl_getflags(&host).is_err() {
        return eprintln!("skipped: the file system has no flags");
    }
    let reply = size_of::<IoctlOut>();
    for cmd in [FS_IOC_GETFLAGS, FS_IOC32_GETFLAGS] {
        // Linux since 5.13, and what older ones take from the number. The reply is no longer than either.
        for out_size in [4, 8, u32::MAX] {
            assert_eq!(call(args(cmd, 0, out_size), b""), Ok(reply + 4));
        }
        assert_eq!(call(args(cmd, 0, 3), b""), Err(libc::EINVAL));
    }
    assert_eq!(call(args(FS_IOC_FSGETXATTR, 0, 28), b""), Ok(reply + 28));
    assert_eq!(call(args(FS_IOC_FSGETXATTR, 0, 27), b""), Err(libc::EINVAL));
    for cmd in [FS_IOC_SETFLAGS, FS_IOC32_SETFLAGS, FS_IOC_FSSETXATTR] {
        let size = if cmd == FS_IOC_FSSETXATTR { 28 } else { 4 };
        // Fewer bytes than the call needs, than it says, and than a kernel reads.
        for (in_size, given) in [(0, 0), (3, 3), (size, size - 1), (size - 1, size), (u32::MAX, 0)] {
            assert_eq!(call(args(cmd, in_size, 0), &vec![0; given as usize]), Err(libc::EINVAL), "{cmd:x} {in_size}");
        }
    }
    // A flag that the guest may not set.
    assert_eq!(call(args(FS_IOC_SETFLAGS, 8, 0), &[0, 0, 0, 4, 0, 0, 0, 0]), Err(libc::EOPNOTSUPP));
    // Of CUSE, and all the rest: FIGETBSZ, FS_IOC_GETVERSION, FICLONE, FS_IOC_ENABLE_VERITY, FS_IOC_FIEMAP.
    let cuse = IoctlIn { flags: IOCTL_UNRESTRICTED, ..args(FS_IOC_GETFLAGS, 0, 4) };
    assert_eq!(call(cuse, b""), Err(libc::ENOTTY));
    for cmd in [0, 2, 0x8008_7601, 0x4004_9409, 0x4080_6685, 0xc020_660b, u32::MAX] {
        assert_eq!(call(args(cmd, 64, 4096), &[0; 64]), Err(libc::ENOTTY));
    }
    for len in 0..size_of::<IoctlIn>() {
        let cut = args(FS_IOC_GETFLAGS, 0, 4);
        assert_eq!(guest.call(Opcode::Ioctl, node, &[&cut.as_bytes()[..len]]).err(), Some(libc::EINVAL));
    }
}

#[test]
fn the_hot_path_allocates_nothing_once_warm() {
    for inode_file_handles in [thruway::fs::FileHandles::Never, thruway::fs::FileHandles::Prefer] {
        let mut guest = Guest::new(Config { inode_file_handles, ..Default::default() });
        std::fs::write(guest.dir.path().join("file"), vec![7; 8192]).unwrap();
        for _ in 0..3 {
            hot_path(&mut guest);
        }
        let before = COUNT.get();
        for _ in 0..100 {
            hot_path(&mut guest);
        }
        assert_eq!(COUNT.get() - before, 0, "{inode_file_handles:?}");
    }
}

/// The same for a guest with leases, which asks for what others have changed.
#[test]
fn the_hot_path_allocates_nothing_with_leases() {
    for inode_file_handles in [FileHandles::Never, FileHandles::Prefer] {
        let lease_timeout = std::time::Duration::from_secs(7777);
        let mut guest = Guest::leased(Config { inode_file_handles, lease_timeout, ..Default::default() });
        std::fs::write(guest.dir.path().join("file"), vec![7; 8192]).unwrap();
        let look = |guest: &mut Guest, name: &[u8]| {
            let out = guest.call(Opcode::Lookup, ROOT_ID, &[name]).unwrap();
            EntryOut::read_from_prefix(out).unwrap().0
        };
        let path = |guest: &mut Guest| {
            hot_path(guest);
            let (missing, found) = (look(guest, b"missing\0"), look(guest, b"file\0"));
            assert_eq!((missing.nodeid, missing.entry_valid, found.entry_valid), (0, 7777, 7777));
            let out = guest.call(Opcode::Getattr, found.nodeid, &[GetattrIn::default().as_bytes()]).unwrap();
            AttrOut::read_from_prefix(out).unwrap().0.attr_valid
        };
        // The first lookups learn of the file. If an event of the new file was handled meanwhile, the next one does.
        while path(&mut guest) != 7777 {}
        let before = COUNT.get();
        for _ in 0..100 {
            assert_eq!(path(&mut guest), 7777);
        }
        assert_eq!(COUNT.get() - before, 0, "{inode_file_handles:?}");
    }
}

/// The same for a guest that opens files by itself.
#[test]
fn reading_and_writing_without_a_handle_allocates_nothing() {
    let mut guest = Guest::new(no_open());
    std::fs::write(guest.dir.path().join("file"), vec![7; 8192]).unwrap();
    let node = guest.lookup(b"file\0");
    let read = ReadIn { size: 4096, ..Default::default() };
    let write = WriteIn { size: 5, ..Default::default() };
    let path = |guest: &mut Guest| {
        assert_eq!(guest.call(Opcode::Read, node, &[read.as_bytes()]).unwrap().len(), 4096);
        guest.call(Opcode::Write, node, &[write.as_bytes(), b"hello"]).unwrap();
        let before = COUNT.get();
        guest.call(Opcode::Read, node, &[read.as_bytes()]).unwrap();
        guest.call(Opcode::Write, node, &[write.as_bytes(), b"hello"]).unwrap();
        COUNT.get() - before
    };
    // The first of them may open the file again, since descriptors are closed that were not used for a second.
    assert!((0..100).any(|_| path(&mut guest) == 0));
}

fn no_open() -> Config {
    Config {
        cache: CachePolicy::Always,
        no_open: NoOpen::Always,
        inode_file_handles: FileHandles::Prefer,
        ..Default::default()
    }
}

/// Descriptors that the process has open in a directory.
fn descriptors(dir: &std::path::Path) -> usize {
    let held = |e: std::io::Result<std::fs::DirEntry>| std::fs::read_link(e.ok()?.path()).ok();
    std::fs::read_dir("/proc/self/fd").unwrap().filter_map(held).filter(|path| path.starts_with(dir)).count()
}

#[test]
fn files_that_a_guest_has_open_cost_no_descriptors() {
    const FILES: u64 = 100_000;
    if !rustix::process::geteuid().is_root() {
        return eprintln!("file handles need root: not tested");
    }
    let mut guest = Guest::new(no_open());
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    // The daemon keeps a quarter of them or 4096 at most (src/fs/fd_cache.rs), the root, and one directory of its
    // mount. A sweep may have one that it is about to close.
    let most = (limit / 4).min(4096) as usize + 3;
    let open = OpenIn { flags: libc::O_RDONLY as u32, open_flags: 0 };
    assert_eq!(guest.call(Opcode::Open, ROOT_ID, &[open.as_bytes()]), Err(libc::ENOSYS));
    assert_eq!(guest.call(Opcode::Opendir, ROOT_ID, &[open.as_bytes()]), Err(libc::ENOSYS));
    let create = CreateIn { flags: libc::O_RDWR as u32, mode: 0o600, ..Default::default() };
    let nodes: Vec<u64> = (0..FILES)
        .map(|n| {
            let name = format!("{n}\0");
            let out = guest.call(Opcode::Create, ROOT_ID, &[create.as_bytes(), name.as_bytes()]).unwrap();
            let CreateOut { entry, open } = CreateOut::read_from_bytes(out).unwrap();
            assert_eq!(open.fh, 0);
            entry.nodeid
        })
        .collect();
    assert!(descriptors(guest.dir.path()) <= most);
    for (n, node) in (0..FILES).zip(&nodes) {
        let write = WriteIn { size: 8, ..Default::default() };
        guest.call(Opcode::Write, *node, &[write.as_bytes(), &n.to_le_bytes()]).unwrap();
    }
    assert!(descriptors(guest.dir.path()) <= most);
    for (n, node) in (0..FILES).zip(&nodes) {
        let read = ReadIn { size: 100, ..Default::default() };
        assert_eq!(guest.call(Opcode::Read, *node, &[read.as_bytes()]).unwrap(), n.to_le_bytes());
    }
    assert!(descriptors(guest.dir.path()) <= most);
}

#[test]
fn the_memory_of_a_known_file_is_bounded() {
    const FILES: usize = 10_000;
    for inode_file_handles in [thruway::fs::FileHandles::Never, thruway::fs::FileHandles::Prefer] {
        let mut guest = Guest::new(Config { inode_file_handles, ..Default::default() });
        for n in 0..FILES {
            std::fs::write(guest.dir.path().join(format!("file{n}")), "").unwrap();
        }
        let out = guest.call(Opcode::Opendir, ROOT_ID, &[OpenIn::default().as_bytes()]).unwrap();
        let fh = OpenOut::read_from_prefix(out).unwrap().0.fh;
        let before = BYTES.get();
        let (mut names, mut offset) = (Vec::new(), 0);
        loop {
            let read = ReadIn { fh, offset, size: 1 << 16, ..Default::default() };
            let mut body = guest.call(Opcode::Readdirplus, ROOT_ID, &[read.as_bytes()]).unwrap();
            if body.is_empty() {
                break;
            }
            while let Ok((_, rest)) = EntryOut::read_from_prefix(body) {
                let (dirent, rest) = Dirent::read_from_prefix(rest).unwrap();
                names.push(rest[..dirent.namelen as usize].to_vec());
                offset = dirent.off;
                body = &rest[(dirent.namelen as usize).next_multiple_of(8)..];
            }
        }
        assert_eq!(names.len(), FILES + 2);
        let listed = names.iter().map(|name| name.capacity() + size_of::<Vec<u8>>()).sum::<usize>() * 2;
        let one = |now: usize| now.saturating_sub(before + listed) / FILES;
        println!("{inode_file_handles:?}: listed {}", one(BYTES.get()));
        assert!(one(BYTES.get()) <= INODE_MEMORY);
        // Each lookup may keep a descriptor, and the process has a limit of them.
        for name in names.iter().filter(|name| name.len() > 2).take(500) {
            guest.lookup(&[name, &b"\0"[..]].concat());
        }
        assert!(one(BYTES.get()) <= INODE_MEMORY);
    }
}

/// Here the data lies where the server may not touch it. Bytes that it copied itself would not arrive.
#[test]
fn only_system_calls_move_data() {
    let mut guest = Guest::new(Config::default());
    std::fs::write(guest.dir.path().join("file"), vec![7; 1 << 16]).unwrap();
    let node = guest.lookup(b"file\0");
    let open = OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
    let out = guest.call(Opcode::Open, node, &[open.as_bytes()]).unwrap();
    let fh = OpenOut::read_from_prefix(out).unwrap().0.fh;
    let read = ReadIn { fh, size: 1 << 16, ..Default::default() };
    let write = WriteIn { fh, offset: 1 << 16, size: 1 << 16, ..Default::default() };
    let mut data = vec![0u8; 1 << 16];
    for (opcode, args) in [(Opcode::Read, read.as_bytes()), (Opcode::Write, write.as_bytes())] {
        let sent = if opcode == Opcode::Write { data.len() } else { 0 };
        let len = (40 + args.len() + sent) as u32;
        let header = InHeader { len, opcode: opcode as u32, unique: 9, nodeid: node, ..Default::default() };
        let mut head = [header.as_bytes(), args].concat();
        let mut reply = [0u8; 24];
        guest.work.readable.clear();
        guest.work.writable.clear();
        // SAFETY: the buffers stay as they are until the request is served.
        unsafe {
            guest.work.readable.push(head.as_mut_ptr(), head.len(), true);
            guest.work.readable.push(data.as_mut_ptr(), sent, false);
            guest.work.writable.push(reply.as_mut_ptr(), if sent > 0 { 24 } else { 16 }, true);
            guest.work.writable.push(data.as_mut_ptr(), data.len() - sent, false);
        }
        assert!(guest.server.handle(&mut guest.work, &mut Here::default()) > 0);
        assert_eq!(OutHeader::ref_from_prefix(&reply).unwrap().0.error, 0);
    }
    assert_eq!(std::fs::read(guest.dir.path().join("file")).unwrap(), [7; 1 << 17]);
}

/// Another daemon's guest may have mapped the file, and may take long to unmap it.
#[test]
fn requests_that_remove_bytes_leave_the_worker() {
    let mut guest = Guest::new(Config::default());
    std::fs::write(guest.dir.path().join("file"), "contents").unwrap();
    std::fs::write(guest.dir.path().join("empty"), "").unwrap();
    let (node, empty) = (guest.lookup(b"file\0"), guest.lookup(b"empty\0"));
    let open = |flags: i32| OpenIn { flags: flags as u32, open_flags: 0 }.as_bytes().to_vec();
    let out = guest.call(Opcode::Open, node, &[&open(libc::O_RDWR)]).unwrap();
    let fh = OpenOut::read_from_prefix(out).unwrap().0.fh;
    let size = |valid: SetattrValid| SetattrIn { valid: (SetattrValid::SIZE | valid).bits(), fh, ..Default::default() };
    let space = |mode: i32| FallocateIn { fh, length: 4, mode: mode as u32, ..Default::default() };
    let (punch, zero) = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, libc::FALLOC_FL_ZERO_RANGE);
    for (opcode, node, args, elsewhere) in [
        (Opcode::Fallocate, node, space(punch).as_bytes(), true),
        (Opcode::Fallocate, node, space(zero).as_bytes(), true),
        (Opcode::Setattr, node, size(SetattrValid::FH).as_bytes(), true),
        (Opcode::Setattr, empty, size(SetattrValid::empty()).as_bytes(), false),
        (Opcode::Open, empty, &open(libc::O_RDWR | libc::O_TRUNC), false),
        (Opcode::Open, node, &open(libc::O_RDWR | libc::O_TRUNC), true),
        (Opcode::Open, node, &open(libc::O_RDWR), false),
    ] {
        let len = (40 + args.len()) as u32;
        let header = InHeader { len, opcode: opcode as u32, unique: 9, nodeid: node, ..Default::default() };
        guest.request = [header.as_bytes(), args].concat();
        guest.load(usize::MAX);
        let mut here = Here::default();
        guest.server.handle(&mut guest.work, &mut here);
        assert_eq!(here.io || here.job.is_some(), elsewhere, "{opcode:?}");
    }
}

#[test]
fn an_old_or_foreign_guest_is_refused() {
    let mut guest = Guest::new(Config::default());
    let init = |major, minor| InitIn { major, minor, ..Default::default() };
    assert_eq!(guest.call(Opcode::Init, 0, &[init(7, 26).as_bytes()]), Err(libc::EPROTO));
    assert_eq!(guest.call(Opcode::Init, 0, &[init(6, 45).as_bytes()]), Err(libc::EPROTO));
    let out = InitOut::read_from_bytes(guest.call(Opcode::Init, 0, &[init(8, 0).as_bytes()]).unwrap()).unwrap();
    assert_eq!((out.major, out.minor), (7, 45));
    let out = InitOut::read_from_bytes(guest.call(Opcode::Init, 0, &[init(7, 27).as_bytes()]).unwrap()).unwrap();
    assert_eq!((out.major, out.minor, out.flags, out.flags2), (7, 27, 0, 0));
    guest.call(Opcode::Destroy, 0, &[]).unwrap();
    assert_eq!(guest.call(Opcode::Getattr, 1, &[GetattrIn::default().as_bytes()]), Err(libc::EIO));
}

/// Linux 5.4 to 5.12 has ACLs, and cannot say that one takes the set-group-ID bit away.
#[test]
fn an_old_guests_acl_takes_the_set_group_id_bit_away() {
    let mut guest = Guest::new(Config { xattr: true, posix_acl: Offer::Auto, ..Default::default() });
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let path = guest.dir.path().join("acl");
    std::fs::write(&path, b"").unwrap();
    let acl_flags = InitFlags::POSIX_ACL | InitFlags::DONT_MASK;
    let init = InitIn { major: 7, minor: 31, flags: acl_flags.bits() as u32, ..Default::default() };
    guest.call(Opcode::Init, 0, &[init.as_bytes()]).unwrap();
    let node = guest.lookup(b"acl\0");
    // struct posix_acl_xattr_header and _entry: the rights of the mode 0755.
    let entry = |tag: u16, rights: u16| [tag.to_le_bytes(), rights.to_le_bytes(), [0xff; 2], [0xff; 2]].concat();
    let acl = [vec![2, 0, 0, 0], entry(1, 7), entry(4, 5), entry(0x20, 5)].concat();
    let name = c"system.posix_acl_access".to_bytes_with_nul();
    let args = SetxattrInCompat { size: acl.len() as u32, flags: 0 };
    for (uid, gid, mode) in [(1000, 1000, 0o755), (1000, 5, 0o2755), (0, 0, 0o2755)] {
        std::os::unix::fs::chown(&path, Some(1000), Some(5)).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o2775)).unwrap();
        let header = InHeader {
            len: (size_of::<InHeader>() + size_of_val(&args) + name.len() + acl.len()) as u32,
            opcode: Opcode::Setxattr as u32,
            nodeid: node,
            uid,
            gid,
            ..Default::default()
        };
        guest.request = [header.as_bytes(), args.as_bytes(), name, &acl].concat();
        guest.raw(1 << 12).unwrap();
        let now = std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(format!("{now:o}"), format!("{mode:o}"), "{uid}:{gid}");
    }
}

#[test]
fn unknown_requests_are_answered() {
    let mut guest = Guest::new(Config::default());
    for opcode in [Opcode::Poll, Opcode::Bmap, Opcode::Setupmapping, Opcode::Removemapping] {
        assert_eq!(guest.call(opcode, 1, &[&[0; 64]]), Err(libc::ENOSYS), "{opcode:?}");
    }
    assert_eq!(guest.call(Opcode::Getattr, 99, &[GetattrIn::default().as_bytes()]), Err(libc::ESTALE));
    assert_eq!(guest.call(Opcode::Getattr, 1, &[]), Err(libc::EINVAL));
    guest.request = InHeader { len: 40, opcode: 4242, unique: 3, nodeid: 1, ..Default::default() }.as_bytes().to_vec();
    assert_eq!(guest.raw(100), Some(16));
    assert_eq!(OutHeader::ref_from_prefix(&guest.reply).unwrap().0.error, -libc::ENOSYS);
    assert_eq!(guest.raw(15), None);
    assert_eq!(guest.raw(0), None);
    guest.request.truncate(39);
    assert_eq!(guest.raw(100), Some(16));
}

#[test]
fn the_parts_of_a_message_are_bounded() {
    let mut guest = Guest::new(Config::default());
    for (count, errno) in [(REMOVED_PARTS, libc::ENOSYS), (REMOVED_PARTS + 1, libc::EINVAL), (10_000, libc::EINVAL)] {
        let parts = vec![0; 16 * count as usize];
        let args = RemovemappingIn { count };
        assert_eq!(guest.call(Opcode::Removemapping, 1, &[args.as_bytes(), &parts]), Err(errno), "{count}");
    }
    let read = ReadIn { size: DATA_BYTES as u32 + 1, ..Default::default() };
    assert_eq!(guest.call(Opcode::Read, 1, &[read.as_bytes()]), Err(libc::EINVAL));
    let write = WriteIn { size: DATA_BYTES as u32 + 1, ..Default::default() };
    assert_eq!(guest.call(Opcode::Write, 1, &[write.as_bytes()]), Err(libc::EINVAL));
    // As many as fit are forgotten.
    let (args, parts) = (BatchForgetIn { count: 10_000, ..Default::default() }, vec![0; 16 * 10_000]);
    guest.request = [&[0; 40], args.as_bytes(), &parts].concat();
    let len = guest.request.len() as u32;
    let header = InHeader { len, opcode: Opcode::BatchForget as u32, unique: 9, nodeid: 1, ..Default::default() };
    guest.request[..40].copy_from_slice(header.as_bytes());
    assert_eq!(guest.raw(100), None);
}

/// As a guest with pages of 64 KiB sends them.
#[test]
fn the_longest_reads_and_writes_are_whole() {
    let mut guest = Guest::new(Config::default());
    let mut data: Vec<u8> = (0..DATA_BYTES as u32 + 5000).map(|n| (n >> 12) as u8 ^ n as u8).collect();
    let path = guest.dir.path().join("file");
    std::fs::write(&path, &data).unwrap();
    guest.reply = vec![0; 16 + DATA_BYTES];
    let node = guest.lookup(b"file\0");
    let open = OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
    let fh = OpenOut::read_from_prefix(guest.call(Opcode::Open, node, &[open.as_bytes()]).unwrap()).unwrap().0.fh;
    // The second one ends within a page.
    for (at, size) in [(0, DATA_BYTES), (DATA_BYTES, 64 << 10)] {
        let read = ReadIn { fh, offset: at as u64, size: size as u32, ..Default::default() };
        assert!(guest.call(Opcode::Read, node, &[read.as_bytes()]).unwrap() == &data[at..data.len().min(at + size)]);
    }
    let written = data.split_off(5000);
    let write = WriteIn { fh, offset: 1000, size: DATA_BYTES as u32, ..Default::default() };
    let out = guest.call(Opcode::Write, node, &[write.as_bytes(), &written]).unwrap();
    assert_eq!(WriteOut::read_from_prefix(out).unwrap().0.size, DATA_BYTES as u32);
    let file = std::fs::read(&path).unwrap();
    assert!(file.len() == DATA_BYTES + 5000 && file[..1000] == data[..1000] && file[1000..][..DATA_BYTES] == written);
}

/// A copy of several pieces arrives whole. It ends at the end of the file.
#[test]
fn a_long_copy_is_whole() {
    let mut guest = Guest::new(Config::default());
    let data: Vec<u8> = (0..40u32 << 20).map(|n| (n >> 8) as u8 ^ n as u8).collect();
    std::fs::write(guest.dir.path().join("from"), &data).unwrap();
    std::fs::write(guest.dir.path().join("to"), b"").unwrap();
    let mut open = |name| {
        let node = guest.lookup(name);
        let open = OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
        let out = guest.call(Opcode::Open, node, &[open.as_bytes()]).unwrap();
        (node, OpenOut::read_from_prefix(out).unwrap().0.fh)
    };
    let ((from, fh_in), (nodeid_out, fh_out)) = (open(b"from\0"), open(b"to\0"));
    for (opcode, len) in [(Opcode::CopyFileRange, 33 << 20), (Opcode::CopyFileRange64, u64::MAX)] {
        std::fs::write(guest.dir.path().join("to"), b"").unwrap();
        let copy = CopyFileRangeIn { fh_in, off_in: 7, nodeid_out, fh_out, off_out: 0, len, flags: 0 };
        guest.call(opcode, from, &[copy.as_bytes()]).unwrap();
        let end = data.len().min(7usize.saturating_add(len as usize));
        assert!(std::fs::read(guest.dir.path().join("to")).unwrap() == data[7..end], "{opcode:?}");
    }
}

/// A small generator (xorshift64), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// A number that is small, or near a border.
    fn number(&mut self) -> u64 {
        match self.below(8) {
            0 => self.next(),
            1 => u64::MAX - self.below(3),
            2 => i64::MAX as u64 - self.below(3),
            3 => 1 << 32 | self.below(8),
            _ => self.below(20),
        }
    }
}

#[test]
fn no_request_brings_the_server_down() {
    let config = Config { xattr: true, posix_lock: true, flock: true, killpriv_v2: true, ..Default::default() };
    survives(Guest::new(config));
    survives(Guest::new(Config { xattr: true, ..no_open() }));
}

fn survives(mut guest: Guest) {
    let mut random = Random(0x7468_7275_7761_7901);
    for round in 0..60_000 {
        // Waiting locks would wait for ever here, on this one thread; RESET and INIT end the session, so they are rare.
        let opcode = match random.below(56) as u32 {
            33 => 32,
            26 | 38 if round % 100 != 0 => 1,
            n => n,
        };
        let body_len = random.below(160) as usize;
        let mut body: Vec<u8> = (0..body_len.div_ceil(8)).flat_map(|_| random.number().to_le_bytes()).collect();
        body.truncate(body_len);
        if random.below(2) == 0 {
            body.extend(format!("n{}\0m{}\0", random.below(5), random.below(5)).bytes());
        }
        let len = if random.below(10) == 0 { random.number() as u32 } else { 40 + body.len() as u32 };
        let total_extlen = random.below(3) as u16;
        let nodeid = random.number();
        let header = InHeader { len, opcode, unique: round, nodeid, total_extlen, ..Default::default() };
        guest.request = [header.as_bytes(), &body].concat();
        if random.below(20) == 0 {
            let cut = random.below(guest.request.len() as u64) as usize;
            guest.request.truncate(cut);
        }
        let room = if random.below(4) == 0 { random.below(200) as usize } else { 1 << 17 };
        if let Some(n) = guest.raw(room) {
            assert!((16..=room).contains(&n), "opcode {opcode} replied {n} bytes into {room}");
        }
    }
    let init = InitIn { major: 7, minor: 45, ..Default::default() };
    guest.call(Opcode::Init, 0, &[init.as_bytes()]).unwrap();
    guest.call(Opcode::Getattr, 1, &[GetattrIn::default().as_bytes()]).unwrap();
}

/// A request or a few that belong together, as the guest sends them most.
struct Cost {
    name: &'static str,
    /// System calls that they take.
    calls: usize,
    /// Instructions that they take in a debug build, at most: half as many again as there were when this was written,
    /// since compilers differ.
    instructions: usize,
}

const fn cost(name: &'static str, calls: usize, instructions: usize) -> Cost {
    Cost { name, calls, instructions }
}

/// In the order of [`cheap_requests`]. The first one is nothing.
const COSTS: [Cost; 9] = [
    cost("nothing", 0, 0),
    cost("LOOKUP", 1, 24_000),
    cost("GETATTR", 1, 20_000),
    cost("OPEN for writing, RELEASE", 4, 49_000),
    cost("OPEN for reading, READ, RELEASE", 2, 67_000),
    cost("READ of 4 KiB", 1, 16_000),
    cost("WRITE of 5 bytes", 1, 18_000),
    cost("SETATTR of the mode", 2, 24_000),
    cost("CREATE, RELEASE, UNLINK and FORGET", 10, 121_000),
];

/// Each is measured as often, and the least counts: a thread of the file system may close descriptors meanwhile.
const ROUNDS: usize = 3;

/// Tells the test below that it is the process that is traced.
const TRACED: &str = "THRUWAY_TEST_TRACED";

#[test]
fn a_request_takes_few_system_calls_and_instructions() {
    if std::env::var_os(TRACED).is_some() {
        return traced();
    }
    let (calls, instructions) = (stops(libc::PTRACE_SYSCALL), stops(libc::PTRACE_SINGLESTEP));
    let mut dear = Vec::new();
    for (index, cost) in COSTS.iter().enumerate() {
        // It stops at a call's begin and at its end.
        let (calls, instructions) = ((calls[index] - calls[0]) / 2, instructions[index] - instructions[0]);
        if calls > cost.calls || instructions > cost.instructions {
            dear.push(format!("{}: {calls} system calls and {instructions} instructions", cost.name));
        }
    }
    assert!(dear.is_empty(), "{dear:#?}");
}

/// Sends the requests of [`COSTS`], and stops its thread between them.
fn traced() {
    // Without file handles, so that it is the same for every user.
    let mut guest = Guest::new(Config { inode_file_handles: FileHandles::Never, ..Default::default() });
    std::fs::write(guest.dir.path().join("file"), vec![7; 8192]).unwrap();
    let node = guest.lookup(b"file\0");
    let open = |guest: &mut Guest, flags: i32| {
        let args = OpenIn { flags: flags as u32, open_flags: 0 };
        OpenOut::read_from_prefix(guest.call(Opcode::Open, node, &[args.as_bytes()]).unwrap()).unwrap().0.fh
    };
    let release = |guest: &mut Guest, node: u64, fh: u64| {
        guest.call(Opcode::Release, node, &[ReleaseIn { fh, ..Default::default() }.as_bytes()]).unwrap();
    };
    let read = |guest: &mut Guest, fh: u64| {
        let read = ReadIn { fh, size: 4096, ..Default::default() };
        assert_eq!(guest.call(Opcode::Read, node, &[read.as_bytes()]).unwrap().len(), 4096);
    };
    let fh = open(&mut guest, libc::O_RDWR);
    let mut requests: [&mut dyn FnMut(&mut Guest); COSTS.len()] = [
        &mut |_| (),
        &mut |guest| _ = guest.lookup(b"file\0"),
        &mut |guest| _ = guest.call(Opcode::Getattr, node, &[GetattrIn::default().as_bytes()]).unwrap(),
        &mut |guest| {
            let fh = open(guest, libc::O_RDWR);
            release(guest, node, fh);
        },
        &mut |guest| {
            let fh = open(guest, libc::O_RDONLY);
            read(guest, fh);
            release(guest, node, fh);
        },
        &mut |guest| read(guest, fh),
        &mut |guest| {
            let write = WriteIn { fh, size: 5, ..Default::default() };
            guest.call(Opcode::Write, node, &[write.as_bytes(), b"hello"]).unwrap();
        },
        &mut |guest| {
            let set = SetattrIn { valid: SetattrValid::MODE.bits(), mode: 0o640, ..Default::default() };
            guest.call(Opcode::Setattr, node, &[set.as_bytes()]).unwrap();
        },
        &mut |guest| {
            let create = CreateIn { flags: libc::O_RDWR as u32, mode: libc::S_IFREG | 0o600, ..Default::default() };
            let made = guest.call(Opcode::Create, ROOT_ID, &[create.as_bytes(), b"new\0"]).unwrap();
            let CreateOut { entry, open } = CreateOut::read_from_bytes(made).unwrap();
            release(guest, entry.nodeid, open.fh);
            guest.call(Opcode::Unlink, ROOT_ID, &[b"new\0"]).unwrap();
            guest.request.clear();
            let header =
                InHeader { len: 48, opcode: Opcode::Forget as u32, nodeid: entry.nodeid, ..Default::default() };
            guest.request.extend_from_slice(header.as_bytes());
            guest.request.extend_from_slice(ForgetIn { nlookup: 1 }.as_bytes());
            assert_eq!(guest.raw(0), None);
        },
    ];
    // Once to become warm.
    requests.iter_mut().for_each(|request| request(&mut guest));
    // SAFETY: neither call takes memory.
    let stop = || unsafe { libc::raise(libc::SIGSTOP) };
    // SAFETY: as above.
    unsafe { libc::ptrace(libc::PTRACE_TRACEME) };
    println!("\nthread {}", rustix::thread::gettid().as_raw_nonzero());
    stop();
    for request in &mut requests {
        for _ in 0..ROUNDS {
            request(&mut guest);
            stop();
        }
    }
}

/// Has another process send the requests of [`COSTS`]. Counts how often its thread stops during each if it goes on by
/// `how`.
fn stops(how: u32) -> Vec<usize> {
    use std::io::BufRead;
    let mut test = std::process::Command::new(std::env::current_exe().unwrap());
    test.args(["--exact", "a_request_takes_few_system_calls_and_instructions", "--nocapture"]).env(TRACED, "");
    let mut child = test.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let thread = lines.find_map(|line| line.strip_prefix("thread ").map(|id| id.parse().unwrap())).unwrap();
    let next = || {
        let mut status = 0;
        // SAFETY: `status` is an int.
        assert_eq!(unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) }, thread);
        assert!(libc::WIFSTOPPED(status), "{status:x}");
        libc::WSTOPSIG(status)
    };
    // SAFETY: no such request takes memory.
    let go = |how: u32| assert_eq!(unsafe { libc::ptrace(how, thread, 0, 0) }, 0);
    assert_eq!(next(), libc::SIGSTOP);
    let count = || {
        let mut count = 0;
        loop {
            go(how);
            match next() {
                libc::SIGTRAP => count += 1,
                signal => break assert_eq!(signal, libc::SIGSTOP),
            }
        }
        count
    };
    let counts = COSTS.iter().map(|_| (0..ROUNDS).map(|_| count()).min().unwrap()).collect();
    go(libc::PTRACE_DETACH);
    lines.for_each(drop);
    assert!(child.wait().unwrap().success());
    counts
}
