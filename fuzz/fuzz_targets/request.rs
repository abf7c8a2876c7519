//! Requests: from bytes to a call of a file system that accepts everything, and back to a reply.
#![no_main]

use std::cell::{Cell, RefCell};
use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use rustix::io::Errno;
use thruway::agent::{Agents, Look};
use thruway::fuse::abi::*;
use thruway::fuse::buf::IoRange;
use thruway::fuse::ops::*;
use thruway::fuse::{Reply, Server, Transport, Work};
use thruway_fuzz::{Here, Input};
use thruway_guest::protocol::{self, Change, Done, Place, ops};
use zerocopy::{FromBytes, IntoBytes};

/// A file system that reads every byte it is given. It succeeds, except for every fifth nodeid.
struct Anything;

fn ask(node: u64) -> Result<()> {
    if node % 5 == 4 { Err(Errno::NOENT) } else { Ok(()) }
}

fn look(bytes: &[u8]) -> u8 {
    std::hint::black_box(bytes.iter().fold(0, |sum, b| sum ^ b))
}

fn name(name: &CStr) {
    assert!(!name.to_bytes().contains(&0));
    look(name.to_bytes());
}

fn creator(by: &Creator) {
    if let Some((label, value)) = by.label {
        name(label);
        look(value);
    }
}

fn entry() -> Result<EntryOut> {
    Ok(EntryOut { nodeid: 2, ..Default::default() })
}

thread_local! {
    static MAY_WAIT: Cell<bool> = const { Cell::new(true) };
}

impl Threads for Anything {
    fn enter_thread(&self, may_wait: bool) {
        MAY_WAIT.set(may_wait);
    }
    fn may_block(&self, does: Does, node: u64, _fh: Option<u64>) -> Option<Wait> {
        let waits = does.intersects(Does::TRUNCATE | Does::CHANGE_SPACE | Does::USE_DISK | Does::TAKE_LONG);
        if waits { [None, Some(Wait::Host), Some(Wait::Others)][(node % 3) as usize] } else { None }
    }
}

impl Control for Anything {
    fn init(&self, offered: InitFlags) -> Result<Session> {
        Ok(Session { flags: offered, map_alignment: 21 })
    }
    fn destroy(&self) {}
    fn interrupt(&self, _unique: u64) {}
}

impl Attrs for Anything {
    fn getattr(&self, node: u64, _fh: Option<u64>) -> Result<AttrOut> {
        ask(node).map(|()| AttrOut::default())
    }
    fn setattr(&self, node: u64, _attr: &SetattrIn, _by: Caller) -> Result<AttrOut> {
        ask(node).map(|()| AttrOut::default())
    }
    fn statx(&self, node: u64, _fh: Option<u64>, _flags: u32, _mask: u32) -> Result<StatxOut> {
        ask(node).map(|()| StatxOut::read_from_bytes(&[0; 288]).unwrap())
    }
    fn statfs(&self, node: u64) -> Result<StatfsOut> {
        ask(node).map(|()| StatfsOut::default())
    }
    fn access(&self, node: u64, _uid: u32, _gid: u32, _mask: u32) -> Result<()> {
        ask(node)
    }
}

impl Names for Anything {
    fn lookup(&self, parent: u64, n: &CStr) -> Result<EntryOut> {
        name(n);
        ask(parent).and_then(|()| entry())
    }
    fn forget(&self, _node: u64, _nlookup: u64) {}
    fn readlink(&self, node: u64, to: &mut Vec<u8>) -> Result<()> {
        to.resize((node % 4096) as usize, b'x');
        ask(node)
    }
    fn symlink(&self, parent: u64, n: &CStr, target: &CStr, by: &Creator) -> Result<EntryOut> {
        name(n);
        name(target);
        creator(by);
        ask(parent).and_then(|()| entry())
    }
    fn mknod(&self, parent: u64, n: &CStr, _mode: u32, _rdev: u32, by: &Creator) -> Result<EntryOut> {
        name(n);
        creator(by);
        ask(parent).and_then(|()| entry())
    }
    fn mkdir(&self, parent: u64, n: &CStr, _mode: u32, by: &Creator) -> Result<EntryOut> {
        name(n);
        creator(by);
        ask(parent).and_then(|()| entry())
    }
    fn unlink(&self, parent: u64, n: &CStr) -> Result<()> {
        name(n);
        ask(parent)
    }
    fn rmdir(&self, parent: u64, n: &CStr) -> Result<()> {
        name(n);
        ask(parent)
    }
    fn rename(&self, parent: u64, n: &CStr, newparent: u64, newname: &CStr, _flags: u32, by: &Creator) -> Result<()> {
        creator(by);
        name(n);
        name(newname);
        ask(parent).and(ask(newparent))
    }
    fn link(&self, node: u64, newparent: u64, newname: &CStr) -> Result<EntryOut> {
        name(newname);
        ask(node).and(ask(newparent)).and_then(|()| entry())
    }
}

impl Files for Anything {
    fn open(&self, node: u64, _open: &OpenIn, _by: Caller, reply: &mut Reply) -> Result<()> {
        ask(node)?;
        match node % 3 {
            0 => reply.detach().answer(Ok(OpenOut::default())),
            _ => reply.put(&OpenOut::default())?,
        }
        Ok(())
    }
    fn create(&self, parent: u64, n: &CStr, _create: &CreateIn, by: &Creator, reply: &mut Reply) -> Result<()> {
        name(n);
        creator(by);
        ask(parent)?;
        reply.put(&CreateOut { entry: entry()?, open: OpenOut::default() })
    }
    fn tmpfile(&self, parent: u64, _create: &CreateIn, by: &Creator, reply: &mut Reply) -> Result<()> {
        creator(by);
        ask(parent)?;
        reply.put(&CreateOut { entry: entry()?, open: OpenOut::default() })
    }
    fn read(&self, node: u64, read: &ReadIn, to: &IoRange) -> Result<usize> {
        assert!(to.len() <= read.size as usize);
        let sum: usize = to.as_slice().iter().map(|s| s.iov_len).sum();
        assert_eq!(sum, to.len());
        ask(node).map(|()| to.len())
    }
    fn file_for_read(&self, _node: u64, _read: &ReadIn) -> Result<OwnedFd> {
        Err(WOULD_WAIT)
    }
    fn write(&self, node: u64, write: &WriteIn, _by: Caller, from: &IoRange) -> Result<usize> {
        assert_eq!(from.len(), write.size as usize);
        for slice in from.as_slice() {
            // SAFETY: the slice is a part of the input's copy.
            look(unsafe { std::slice::from_raw_parts(slice.iov_base.cast(), slice.iov_len) });
        }
        ask(node).map(|()| from.len())
    }
    fn file_for_write(&self, _node: u64, _write: &WriteIn, _by: Caller) -> Result<Option<OwnedFd>> {
        Ok(None)
    }
    fn flush(&self, node: u64, _fh: u64, _lock_owner: u64) -> Result<()> {
        ask(node)
    }
    fn release(&self, node: u64, _release: &ReleaseIn) -> Result<()> {
        ask(node)
    }
    fn fsync(&self, node: u64, _fh: u64, _datasync: bool, _by: Caller) -> Result<()> {
        ask(node)
    }
    fn fallocate(&self, node: u64, _args: &FallocateIn) -> Result<()> {
        ask(node)
    }
    fn lseek(&self, node: u64, _fh: u64, offset: u64, _whence: u32) -> Result<u64> {
        ask(node).map(|()| offset)
    }
    fn copy_file_range(&self, node: u64, args: &CopyFileRangeIn) -> Result<usize> {
        ask(node).map(|()| args.len as usize)
    }
    fn syncfs(&self, node: u64) -> Result<()> {
        ask(node)
    }
}

impl Anything {
    fn list(node: u64, offset: u64, sink: &mut dyn DirSink, plus: bool) -> Result<()> {
        for n in offset.min(64)..64 {
            let len = (n * 7 % 256) as usize;
            if !sink.fits(len) {
                break;
            }
            let dirent = Dirent { ino: n, off: n + 1, namelen: len as u32, kind: 0 };
            sink.push(dirent, &[b'n'; 256][..len], plus.then(|| entry().unwrap()).as_ref());
        }
        ask(node)
    }
}

impl Dirs for Anything {
    fn opendir(&self, node: u64, _flags: u32) -> Result<OpenOut> {
        ask(node).map(|()| OpenOut::default())
    }
    fn readdir(&self, node: u64, _fh: u64, offset: u64, sink: &mut dyn DirSink) -> Result<()> {
        Self::list(node, offset, sink, false)
    }
    fn readdirplus(&self, node: u64, _fh: u64, offset: u64, sink: &mut dyn DirSink) -> Result<()> {
        Self::list(node, offset, sink, true)
    }
    fn releasedir(&self, node: u64, _fh: u64) -> Result<()> {
        ask(node)
    }
    fn fsyncdir(&self, node: u64, _fh: u64, _datasync: bool) -> Result<()> {
        ask(node)
    }
}

impl Xattrs for Anything {
    fn setxattr(&self, node: u64, n: &CStr, value: &[u8], _flags: u32, _kill: Option<Caller>) -> Result<()> {
        name(n);
        look(value);
        ask(node)
    }
    fn getxattr(&self, node: u64, n: &CStr, size: usize, to: &mut Vec<u8>) -> Result<usize> {
        name(n);
        to.resize(size.min(300), b'v');
        ask(node).map(|()| 300)
    }
    fn listxattr(&self, node: u64, size: usize, to: &mut Vec<u8>) -> Result<usize> {
        to.resize(size.min(300), b'v');
        ask(node).map(|()| 300)
    }
    fn removexattr(&self, node: u64, n: &CStr) -> Result<()> {
        name(n);
        ask(node)
    }
}

impl Flags for Anything {
    fn flags(&self, node: u64, _fh: u64) -> Result<u32> {
        if !MAY_WAIT.get() && node & 1 == 0 {
            return Err(WOULD_WAIT);
        }
        ask(node).map(|()| 7)
    }
    fn set_flags(&self, node: u64, _fh: u64, _uid: u32, _flags: u32) -> Result<()> {
        ask(node)
    }
    fn fsxattr(&self, node: u64, _fh: u64) -> Result<Fsxattr> {
        ask(node).map(|()| Fsxattr::default())
    }
    fn set_fsxattr(&self, node: u64, _fh: u64, _uid: u32, to: &Fsxattr) -> Result<()> {
        look(to.as_bytes());
        ask(node)
    }
}

impl Locks for Anything {
    fn getlk(&self, node: u64, lk: &LkIn) -> Result<LkOut> {
        ask(node).map(|()| LkOut { lk: lk.lk })
    }
    fn setlk(&self, node: u64, _unique: u64, _lk: &LkIn, wait: bool) -> Result<Option<LockWait>> {
        ask(node)?;
        Ok(wait.then(|| -> LockWait { Box::new(|| Err(Errno::INTR)) }))
    }
}

impl Mappings for Anything {
    fn start_passthrough(&self, answer: Answer) {
        answer(Err(Errno::NODEV));
    }
    fn setupmapping(&self, node: u64, _args: &SetupmappingIn, reply: &mut Reply) -> Result<()> {
        ask(node)?;
        reply.answer_later()(Ok(()));
        Ok(())
    }
    fn removemapping(&self, parts: &[RemovemappingOne], reply: &mut Reply) -> Result<()> {
        look(parts.as_bytes());
        reply.answer_later::<()>()(Err(Errno::INVAL));
        Ok(())
    }
}

/// A thread of the guest agent, number 1, that repeats these changes.
fn agents() -> &'static Arc<Agents> {
    static AGENTS: LazyLock<Arc<Agents>> = LazyLock::new(|| {
        let agents = Arc::new(Agents::default());
        let token = agents.hello(1, protocol::VERSION).unwrap().token;
        let Look::Phantom(hidden) = agents.look(1, ROOT_ID, ROOT_ID, token.as_bytes()) else { unreachable!() };
        agents.make(1, 0, hidden, protocol::MARKER.as_bytes(), false);
        let place = |dir, name: &[u8]| Place { dir, name: name.to_vec() };
        for (ops, name) in
            [(ops::CREATE | ops::CONTENTS, b"a"), (ops::RENAME, b"b"), (ops::EXCHANGE, b"c"), (ops::REMOVE, b"d")]
        {
            let to = if ops & (ops::RENAME | ops::EXCHANGE) == 0 { Place::default() } else { place(2, name) };
            agents.announce(Change { ops, node: 3, place: place(1, name), to }, None);
            agents.announce(
                Change { ops: ops | ops::DIRECTORY, node: 0, place: place(2, &[name[0], b'2']), to: Place::default() },
                None,
            );
        }
        agents.wait(1, Done::default(), Box::new(drop), || false).unwrap();
        agents
    });
    &AGENTS
}

impl Repeats for Anything {
    fn agents(&self) -> Option<&Arc<Agents>> {
        Some(agents())
    }
    fn present(&self, parent: u64, to: &CStr) -> Present {
        name(to);
        match parent % 3 {
            0 => Present::Missing,
            1 => Present::New(libc::S_IFREG, None),
            _ => Present::Known(parent),
        }
    }
    fn lookup_repeated(&self, parent: u64, to: &CStr) -> Result<EntryOut> {
        self.lookup(parent, to)
    }
    fn known_attr(&self, node: u64) -> Result<Attr> {
        ask(node).map(|()| Attr::default())
    }
    fn known_entry(&self, node: u64) -> Result<EntryOut> {
        ask(node).map(|()| EntryOut { nodeid: node, ..Default::default() })
    }
    fn path_below_root(&self, node: u64) -> Option<Vec<u8>> {
        ask(node).ok().map(|()| vec![b'p'; node as usize % 9000])
    }
}

struct Kept {
    server: Server<Anything>,
    work: Work,
    request: Vec<u8>,
    reply: Vec<u8>,
}

thread_local! {
    static KEPT: RefCell<Kept> = RefCell::new(Kept {
        server: Server::new(Anything),
        work: Work::default(),
        request: Vec::new(),
        reply: vec![0; 8192],
    });
}

/// Serves one request. Its readable part is cut at `cuts`, and the reply has `room` bytes. Returns the reply.
fn serve(kept: &mut Kept, cuts: [u8; 2], room: usize, (crowded, may_wait): (bool, bool)) {
    let Kept { server, work, request, reply } = kept;
    let (base, len) = (request.as_mut_ptr(), request.len());
    let mut cuts = cuts.map(|cut| usize::from(cut).min(len));
    cuts.sort_unstable();
    work.readable.clear();
    work.writable.clear();
    for (from, to) in [(0, cuts[0]), (cuts[0], cuts[1]), (cuts[1], len)] {
        // SAFETY: nothing else uses either buffer until the lists are cleared.
        unsafe { work.readable.push(base.wrapping_add(from), to - from, true) };
    }
    let (first, rest) = (room.min(7), room - room.min(7));
    // SAFETY: as above.
    unsafe {
        work.writable.push(reply.as_mut_ptr(), first, true);
        work.writable.push(reply.as_mut_ptr().wrapping_add(first), rest, true);
    }
    let unique = InHeader::read_from_prefix(request).map_or(0, |(header, _)| header.unique);
    let check = move |reply: &[u8]| {
        let (header, _) = OutHeader::read_from_prefix(reply).unwrap();
        assert_eq!((header.len as usize, header.unique), (reply.len(), unique));
        assert!((-4095..=0).contains(&header.error) && (header.error == 0 || reply.len() == 16));
        assert_ne!(header.error, -WOULD_WAIT.raw_os_error());
    };
    let mut here = Here { crowded, may_wait, ..Here::default() };
    let mut len = server.handle(work, &mut here);
    if here.io {
        here = Here { may_wait: true, ..Here::default() };
        len = server.handle(work, &mut here);
        assert!(!here.io, "it may wait");
    }
    if let Some((_, job)) = here.job.take() {
        job(here.detach());
        assert!(here.late.lock().unwrap().is_some());
    }
    if let Some(reply) = here.late.lock().unwrap().take() {
        assert!(len == 0 && reply.len() <= room);
        assert!(reply.is_empty() == (room < size_of::<OutHeader>()), "a header, where one fits");
        if !reply.is_empty() {
            check(&reply);
        }
    } else if len > 0 {
        assert!(len <= room);
        check(&reply[..len]);
    }
    work.readable.clear();
    work.writable.clear();
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let (how, cuts, room) = (input.u8(), input.array(), usize::from(input.u16() % 8193));
    KEPT.with_borrow_mut(|kept| {
        kept.server.reset();
        if how & 1 == 0 {
            let flags = if how & 2 == 0 { !0u64 } else { 0 };
            let flags = flags & !InitFlags::PASSTHROUGH_SHM.bits();
            let init =
                InitIn { major: 7, minor: 45, flags: flags as u32, flags2: (flags >> 32) as u32, ..Default::default() };
            let header = InHeader { len: 104, opcode: Opcode::Init as u32, unique: 1, ..Default::default() };
            kept.request.clear();
            kept.request.extend(header.as_bytes());
            kept.request.extend(init.as_bytes());
            serve(kept, [0, 0], 80, (false, false));
        }
        kept.request.clear();
        kept.request.extend(input.0);
        if how & 4 == 0 && kept.request.len() >= 40 {
            // A header that gets far into the parser.
            let len = kept.request.len() as u32;
            kept.request[..4].copy_from_slice(&len.to_le_bytes());
            let opcode = u32::from(kept.request[4] % 56);
            kept.request[4..8].copy_from_slice(&opcode.to_le_bytes());
        }
        serve(kept, cuts, room, (how & 8 != 0, how & 16 != 0));
    });
});
