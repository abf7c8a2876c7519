//! The guest agent's requests, as its kernel would send them, over a real directory: what was not asked for changes
//! nothing on the host.

mod common;

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use common::sh;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tempfile::TempDir;
use thruway::fs::{Config, PassthroughFs, proc_self_fd};
use thruway::fuse::abi::*;
use thruway::fuse::buf::IoRange;
use thruway::fuse::ops::Wait;
use thruway::fuse::{Io, Job, Release, ReplySender, Server, Stopping, Transport, Work};
use thruway::watch::Watch;
use thruway_guest::protocol::{self, Batch, Change, Done, Found, Hello, MARKER, MESSAGE, PHANTOMS, ops};
use zerocopy::{FromBytes, IntoBytes};

/// A limit on hangs.
const LONG: Duration = Duration::from_secs(100);

/// The agent's thread, and a user's.
const AGENT: u32 = 7;
const USER: u32 = 8;

/// Serves everything at once, and keeps parked replies apart.
#[derive(Default)]
struct Here {
    may_wait: bool,
    again: bool,
    job: Option<Job>,
    parked: Option<Receiver<Vec<u8>>>,
}

impl Transport for Here {
    fn moves(&mut self, _bytes: usize) -> bool {
        false
    }

    fn may_wait(&self) -> bool {
        self.may_wait
    }

    fn io(&mut self, _io: Io, _data: &IoRange) {
        self.again = true;
    }

    fn serve_anew(&mut self, _since: Option<std::time::Instant>) {
        self.again = true;
    }

    fn detach(&mut self) -> ReplySender {
        unreachable!("there is no window")
    }

    fn run(&mut self, _wait: Wait, job: Job) -> Result<(), Errno> {
        self.job = Some(job);
        Ok(())
    }

    fn park(&mut self, _bytes: usize, _release: Arc<dyn Release>) -> Option<(ReplySender, Stopping)> {
        let (send, parked) = channel();
        self.parked = Some(parked);
        Some((Box::new(move |reply| drop(send.send(reply))), Box::new(|| false)))
    }
}

struct Guest {
    server: Server<PassthroughFs>,
    work: Work,
    dir: TempDir,
    hidden: u64,
    marker: u64,
    token: String,
    /// The batch that the agent carries out.
    batch: u64,
}

impl Guest {
    fn new() -> Self {
        Self::with(Config::default())
    }

    fn with(config: Config) -> Self {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root: OwnedFd = rustix::fs::open(dir.path(), flags, Mode::empty()).unwrap();
        let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), config).unwrap();
        let server = Server::new(fs.with_watch(Some(Watch::new().unwrap())).unwrap());
        let mut guest =
            Self { server, work: Work::default(), dir, hidden: 0, marker: 0, token: String::new(), batch: 0 };
        let init = InitIn { major: 7, minor: 45, flags: u32::MAX, flags2: 0, ..Default::default() };
        guest.call(0, Opcode::Init, 0, &[init.as_bytes()]).unwrap();
        guest
    }

    /// Sends a request of a thread. Returns the reply's body or the errno, or what waits for it.
    fn send(&mut self, pid: u32, opcode: Opcode, nodeid: u64, parts: &[&[u8]]) -> Result<Vec<u8>, Receiver<Vec<u8>>> {
        let len = 40 + parts.iter().map(|p| p.len()).sum::<usize>();
        let header = InHeader { len: len as u32, opcode: opcode as u32, unique: 9, nodeid, pid, ..Default::default() };
        let mut request = [&[header.as_bytes()], parts].concat().concat();
        let mut reply = vec![0; 1 << 16];
        let mut here = Here::default();
        loop {
            self.work.readable.clear();
            self.work.writable.clear();
            let (head, tail) = request.split_at_mut(40);
            for part in [head, tail] {
                // SAFETY: the buffers stay as they are until the request is served.
                unsafe { self.work.readable.push(part.as_mut_ptr(), part.len(), true) };
            }
            // SAFETY: as above.
            unsafe { self.work.writable.push(reply.as_mut_ptr(), reply.len(), true) };
            let n = self.server.handle(&mut self.work, &mut here);
            if let Some(parked) = here.parked.take() {
                return Err(parked);
            }
            if let Some(job) = here.job.take() {
                let (send, sent) = channel();
                job(Box::new(move |reply| send.send(reply).unwrap()));
                return Ok(sent.recv().unwrap());
            }
            if !here.again {
                reply.truncate(n);
                return Ok(reply);
            }
            here = Here { may_wait: true, ..Here::default() };
        }
    }

    fn call(&mut self, pid: u32, opcode: Opcode, nodeid: u64, parts: &[&[u8]]) -> Result<Vec<u8>, i32> {
        let reply = self.send(pid, opcode, nodeid, parts).unwrap_or_else(|_| panic!("the request waits"));
        let (header, body) = OutHeader::ref_from_prefix(&reply).unwrap();
        if header.error == 0 { Ok(body.to_vec()) } else { Err(-header.error) }
    }

    fn entry(&mut self, pid: u32, opcode: Opcode, nodeid: u64, parts: &[&[u8]]) -> Result<EntryOut, i32> {
        self.call(pid, opcode, nodeid, parts).map(|body| EntryOut::read_from_bytes(&body).unwrap())
    }

    fn lookup(&mut self, pid: u32, name: &str) -> Result<EntryOut, i32> {
        self.lookup_in(pid, ROOT_ID, name)
    }

    fn lookup_in(&mut self, pid: u32, parent: u64, name: &str) -> Result<EntryOut, i32> {
        self.entry(pid, Opcode::Lookup, parent, &[name.as_bytes(), b"\0"])
    }

    fn mknod(&mut self, pid: u32, parent: u64, name: &str) -> Result<EntryOut, i32> {
        let args = MknodIn { mode: libc::S_IFREG, ..Default::default() };
        self.entry(pid, Opcode::Mknod, parent, &[args.as_bytes(), name.as_bytes(), b"\0"])
    }

    fn ioctl(&mut self, pid: u32, cmd: u32, bytes: &[u8]) -> Result<Vec<u8>, Receiver<Vec<u8>>> {
        let size = MESSAGE as u32;
        let args = IoctlIn { cmd, in_size: size, out_size: size, ..Default::default() };
        let mut message = vec![0; MESSAGE];
        message[..bytes.len()].copy_from_slice(bytes);
        self.send(pid, Opcode::Ioctl, ROOT_ID, &[args.as_bytes(), &message])
    }

    fn register(&mut self) {
        let hello = self.ioctl(AGENT, protocol::HELLO, &protocol::VERSION.to_le_bytes()).unwrap();
        let hello = Hello::decode(&hello[32..]).unwrap();
        assert_eq!(self.lookup(USER, &hello.token).unwrap_err(), libc::ENOENT);
        self.hidden = self.lookup(AGENT, &hello.token).unwrap().nodeid;
        self.marker = self.mknod(AGENT, self.hidden, MARKER).unwrap().nodeid;
        self.call(AGENT, Opcode::Unlink, self.hidden, &[MARKER.as_bytes(), b"\0"]).unwrap();
        self.token = hello.token;
        assert!(self.hidden >= PHANTOMS && self.marker >= PHANTOMS);
        // The guest may have missed something of what it knows.
        let all = self.batch(|_| {});
        assert!(all.changes.iter().all(|change| change.has(ops::REFRESH)) && !all.changes.is_empty());
    }

    /// The agent has carried out its batch, and waits for the next.
    fn wait(&mut self) -> Receiver<Vec<u8>> {
        let done = Done { batch: self.batch, ..Done::default() };
        self.ioctl(AGENT, protocol::WAIT, &done.encode()).unwrap_err()
    }

    /// The batch that it gets.
    fn got(&mut self, parked: &Receiver<Vec<u8>>) -> Batch {
        let reply = parked.recv_timeout(LONG).unwrap();
        let batch = Batch::decode(&reply[32..]).unwrap();
        self.batch = batch.id;
        batch
    }

    /// The agent waits for what the host does in `change`.
    fn batch(&mut self, change: impl FnOnce(&Path)) -> Batch {
        let parked = self.wait();
        change(self.dir.path());
        self.got(&parked)
    }

    fn forget(&mut self, node: u64, nlookup: u64) {
        let args = ForgetIn { nlookup };
        assert!(self.send(0, Opcode::Forget, node, &[args.as_bytes()]).unwrap().is_empty());
    }
}

fn mkdir(path: &Path) {
    sh(&format!("mkdir {}", path.display()));
}

fn file(dir: &Path, name: &str) {
    std::fs::write(dir.join(name), name).unwrap();
}

#[test]
fn the_agent_changes_nothing_that_it_was_not_asked_for() {
    let mut guest = Guest::new();
    file(guest.dir.path(), "kept");
    let kept = guest.lookup(USER, "kept").unwrap().nodeid;
    guest.register();
    let batch = guest.batch(|dir| mkdir(&dir.join("new")));
    assert!(batch.changes.iter().any(|change: &Change| change.has(ops::CREATE) && change.place.name == b"new"));
    let rename = Rename2In { newdir: ROOT_ID, ..Default::default() };
    let size = SetattrIn { valid: SetattrValid::SIZE.bits(), ..Default::default() };
    let open = OpenIn { flags: (libc::O_WRONLY | libc::O_TRUNC) as u32, open_flags: 0 };
    let create = CreateIn { flags: libc::O_RDWR as u32, mode: 0o600, ..Default::default() };
    for (opcode, node, parts) in [
        (Opcode::Unlink, ROOT_ID, vec![&b"kept\0"[..]]),
        (Opcode::Rmdir, ROOT_ID, vec![b"new\0"]),
        (Opcode::Mkdir, ROOT_ID, vec![MkdirIn::default().as_bytes(), b"other\0"]),
        (Opcode::Symlink, ROOT_ID, vec![b"link\0", b"target\0"]),
        (Opcode::Link, ROOT_ID, vec![LinkIn { oldnodeid: kept }.as_bytes(), b"link\0"]),
        (Opcode::Rename2, ROOT_ID, vec![rename.as_bytes(), b"kept\0", b"moved\0"]),
        (Opcode::Create, ROOT_ID, vec![create.as_bytes(), b"created\0"]),
        (Opcode::Setattr, kept, vec![size.as_bytes()]),
        (Opcode::Open, kept, vec![open.as_bytes()]),
        (Opcode::Write, kept, vec![WriteIn { size: 1, ..Default::default() }.as_bytes(), b"x"]),
        (Opcode::Removexattr, kept, vec![b"user.x\0"]),
        (Opcode::Fallocate, kept, vec![FallocateIn::default().as_bytes()]),
    ] {
        assert_eq!(guest.call(AGENT, opcode, node, &parts), Err(libc::EPERM), "{opcode:?}");
    }
    // An attribute that it sets is not set.
    let mode = SetattrIn { valid: SetattrValid::MODE.bits(), mode: 0o777, ..Default::default() };
    guest.call(AGENT, Opcode::Setattr, kept, &[mode.as_bytes()]).unwrap();
    // What a program has stored to a mapping is written back by whoever has the page dropped.
    let open = OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
    let open = guest.call(USER, Opcode::Open, kept, &[open.as_bytes()]).unwrap();
    let fh = OpenOut::read_from_bytes(&open).unwrap().fh;
    let stored = WriteIn { fh, size: 4, write_flags: WRITE_CACHE, ..Default::default() };
    guest.call(AGENT, Opcode::Write, kept, &[stored.as_bytes(), b"KEPT"]).unwrap();
    let mut names: Vec<_> = std::fs::read_dir(guest.dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["kept", "new"]);
    assert_eq!(std::fs::read(guest.dir.path().join("kept")).unwrap(), b"KEPT");
    assert_ne!(std::fs::metadata(guest.dir.path().join("kept")).unwrap().mode() & 0o777, 0o777);
    // A user next to it is an ordinary one.
    guest.call(USER, Opcode::Unlink, ROOT_ID, &[b"kept\0"]).unwrap();
    assert!(!guest.dir.path().join("kept").exists());
    // When its process is gone, the thread id may be a user's.
    guest.forget(guest.marker, 2);
    guest.call(AGENT, Opcode::Rmdir, ROOT_ID, &[b"new\0"]).unwrap();
    assert!(!guest.dir.path().join("new").exists());
}

#[test]
fn what_it_repeats_is_a_phantom_for_a_moment() {
    let mut guest = Guest::new();
    guest.register();
    guest.batch(|dir| mkdir(&dir.join("new")));
    // Rule 4 of docs/guest-agent.md: nobody has looked it up, so the kernel makes the event.
    let made = || [MkdirIn::default().as_bytes(), b"new\0"].concat();
    assert_eq!(guest.lookup(AGENT, "new").unwrap_err(), libc::ENOENT);
    let phantom = guest.entry(AGENT, Opcode::Mkdir, ROOT_ID, &[&made()]).unwrap();
    assert!(phantom.nodeid >= PHANTOMS);
    assert_eq!((phantom.entry_valid, phantom.attr_valid, phantom.attr.mode & libc::S_IFMT), (0, 0, libc::S_IFDIR));
    assert_eq!(guest.call(AGENT, Opcode::Mkdir, ROOT_ID, &[&made()]), Err(libc::EPERM));
    // All others see the true one.
    let node = guest.lookup(USER, "new").unwrap().nodeid;
    assert!(node < PHANTOMS);
    // Somebody has looked this one up before it is repeated: it is there, and no mount on it is detached.
    let mut seen = guest.batch(|dir| mkdir(&dir.join("seen")));
    while !seen.changes.iter().any(|change| change.place.name == b"seen") {
        seen = guest.batch(|_| {});
    }
    let node = guest.lookup(USER, "seen").unwrap().nodeid;
    assert_eq!(guest.lookup(AGENT, "seen").unwrap().nodeid, node);
    let made = [MkdirIn::default().as_bytes(), b"seen\0"].concat();
    assert_eq!(guest.call(AGENT, Opcode::Mkdir, ROOT_ID, &[&made]), Err(libc::EEXIST));
}

#[test]
fn a_directory_that_is_known_is_made_before_watchers() {
    let mut guest = Guest::new();
    guest.register();
    let batch = guest.batch(|dir| mkdir(&dir.join("new")));
    let index = batch.changes.iter().position(|change| change.place.name == b"new").unwrap();
    let aside = format!("{}.{index}", guest.token);
    let made = |name: &str| [MkdirIn::default().as_bytes(), name.as_bytes(), b"\0"].concat();
    // Nobody has looked it up, so it need not be put aside.
    assert_eq!(guest.lookup(AGENT, &aside).unwrap_err(), libc::ENOENT);
    let node = guest.lookup(USER, "new").unwrap().nodeid;
    // It is the agent who puts it aside.
    assert_eq!(guest.lookup(USER, &aside).unwrap_err(), libc::ENOENT);
    let moved = guest.lookup(AGENT, &aside).unwrap();
    assert_eq!((moved.nodeid, moved.entry_valid, moved.attr_valid), (node, 0, 0));
    // If its name was not found at its moment, what is mounted on it would be gone.
    assert_eq!(guest.lookup(USER, &aside).unwrap().nodeid, node);
    assert_eq!(guest.lookup(AGENT, "new").unwrap_err(), libc::ENOENT);
    let back = guest.entry(AGENT, Opcode::Mkdir, ROOT_ID, &[&made("new")]).unwrap();
    assert_eq!((back.nodeid, back.entry_valid, back.attr_valid), (node, 0, 0));
    assert_eq!(guest.lookup(USER, &aside).map_or(0, |entry| entry.nodeid), 0);
    assert_eq!(guest.call(AGENT, Opcode::Mkdir, ROOT_ID, &[&made("new")]), Err(libc::EEXIST));
    // Somebody else finds it by its name while it is aside: it is there.
    let mut batch = guest.batch(|dir| mkdir(&dir.join("other")));
    while !batch.changes.iter().any(|change| change.place.name == b"other") {
        batch = guest.batch(|_| {});
    }
    let index = batch.changes.iter().position(|change| change.place.name == b"other").unwrap();
    let node = guest.lookup(USER, "other").unwrap().nodeid;
    assert_eq!(guest.lookup(AGENT, &format!("{}.{index}", guest.token)).unwrap().nodeid, node);
    assert_eq!(guest.lookup(USER, "other").unwrap().nodeid, node);
    assert_eq!(guest.lookup(AGENT, "other").unwrap().nodeid, node);
    assert_eq!(guest.call(AGENT, Opcode::Mkdir, ROOT_ID, &[&made("other")]), Err(libc::EEXIST));
}

#[test]
fn a_new_file_that_is_written_takes_no_more_requests_than_it_needs() {
    let mut guest = Guest::new();
    guest.register();
    guest.batch(|dir| sh(&format!("touch {}", dir.join("new").display())));
    assert_eq!(guest.lookup(AGENT, "new").unwrap_err(), libc::ENOENT);
    let flags = (libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY) as u32;
    let create = CreateIn { flags, mode: 0o400, ..Default::default() };
    let made = guest.call(AGENT, Opcode::Create, ROOT_ID, &[create.as_bytes(), b"new\0"]).unwrap();
    let (entry, open) = EntryOut::read_from_prefix(&made).unwrap();
    // Before it opens a file, the kernel asks for attributes that it does not keep. The name is asked for anew.
    assert!(entry.nodeid >= PHANTOMS && entry.attr_valid > 0 && entry.entry_valid == 0);
    // A close asks for nothing but RELEASE.
    let flags = OpenFlags::from_bits_retain(OpenOut::read_from_bytes(open).unwrap().open_flags);
    assert!(flags.contains(OpenFlags::NOFLUSH));
    assert!(guest.lookup(USER, "new").unwrap().nodeid < PHANTOMS);
}

#[test]
fn it_is_told_the_present_state_and_keeps_nothing() {
    let mut guest = Guest::new();
    let path = guest.dir.path().join("file");
    std::fs::write(&path, "four").unwrap();
    std::fs::hard_link(&path, guest.dir.path().join("second")).unwrap();
    let node = guest.lookup(USER, "file").unwrap().nodeid;
    assert_eq!(guest.lookup(USER, "second").unwrap().nodeid, node);
    guest.register();
    let attr = |guest: &mut Guest, opcode, args: &[u8]| {
        let body = guest.call(AGENT, opcode, node, &[args]).unwrap();
        AttrOut::read_from_bytes(&body).unwrap()
    };
    let times = SetattrIn { valid: SetattrValid::MTIME.bits(), mtime: 7, ..Default::default() };
    guest.batch(|dir| sh(&format!("printf more >>{}", dir.join("file").display())));
    // It changes again before the agent has looked.
    sh(&format!("printf even-more >>{}", path.display()));
    let looked = attr(&mut guest, Opcode::Getattr, GetattrIn::default().as_bytes());
    let set = attr(&mut guest, Opcode::Setattr, times.as_bytes());
    assert_eq!((looked.attr.size, set.attr.size, set.attr.nlink), (17, 17, 2));
    // The kernel drops its pages, since the time is another one.
    assert_eq!(looked.attr.mtimensec, set.attr.mtimensec ^ 1);
    assert_ne!(set.attr.mtime, 7);
    let entry = guest.lookup(AGENT, "file").unwrap();
    assert_eq!((entry.nodeid, entry.entry_valid, entry.attr_valid), (node, 0, 0));
    // A file that is opened for its event keeps its pages.
    let open = OpenIn { flags: libc::O_WRONLY as u32, open_flags: 0 };
    let open = guest.call(AGENT, Opcode::Open, node, &[open.as_bytes()]).unwrap();
    let flags = OpenFlags::from_bits_retain(OpenOut::read_from_bytes(&open).unwrap().open_flags);
    assert!(flags.contains(OpenFlags::KEEP_CACHE));
    // The kernel takes one from the number of names when it repeats a removal. Its watches end at 0.
    let mut batch = guest.batch(|dir| sh(&format!("rm {}", dir.join("second").display())));
    while !batch.changes.iter().any(|change| change.has(ops::REMOVE)) {
        batch = guest.batch(|_| {});
    }
    let looked = attr(&mut guest, Opcode::Getattr, GetattrIn::default().as_bytes());
    assert_eq!((looked.attr.nlink, looked.attr_valid), (2, 0));
    let entry = guest.lookup(AGENT, "second").unwrap();
    assert_eq!((entry.nodeid, entry.attr.nlink, entry.entry_valid), (node, 2, 0));
    // Two lookups of the user, one of a name and one of what is removed: that many references.
    guest.forget(node, 3);
    guest.call(USER, Opcode::Getattr, node, &[GetattrIn::default().as_bytes()]).unwrap();
    guest.forget(node, 1);
    let gone = guest.call(USER, Opcode::Getattr, node, &[GetattrIn::default().as_bytes()]);
    assert_eq!(gone.unwrap_err(), libc::ESTALE);
}

/// The guest's kernel marks a directory that it removes as dead, also for the lookup of its new name.
#[test]
fn a_directory_that_has_moved_is_never_removed() {
    let mut guest = Guest::new();
    let far = tempfile::tempdir_in("/var/tmp").unwrap();
    for name in ["near", "out", "deep", "deep/down"] {
        std::fs::create_dir(guest.dir.path().join(name)).unwrap();
    }
    let nodes = ["near", "out"].map(|name| guest.lookup(USER, name).unwrap().nodeid);
    guest.register();
    let out = far.path().to_owned();
    // To where the guest has never been, and out of the share.
    let moves: [(&str, PathBuf); 2] = [("near", guest.dir.path().join("deep/down")), ("out", out)];
    for ((name, to), node) in moves.into_iter().zip(nodes) {
        let mut all = Vec::new();
        while !all.iter().any(|change: &Change| change.node == node && change.has(ops::RENAME | ops::REMOVE)) {
            let parked = guest.wait();
            if all.is_empty() {
                sh(&format!("mv {}/{name} {}", guest.dir.path().display(), to.display()));
            }
            all.extend(guest.got(&parked).changes);
        }
        assert!(!all.iter().any(|change| change.has(ops::REMOVE)), "{name}: {all:?}");
        let old = [name.as_bytes(), b"\0"].concat();
        for opcode in [Opcode::Rmdir, Opcode::Unlink] {
            assert_eq!(guest.call(AGENT, opcode, ROOT_ID, &[&old]), Err(libc::EPERM), "{name}");
        }
        assert_eq!(guest.lookup(AGENT, name).unwrap().nodeid, node);
        let rename = RenameIn { newdir: guest.hidden };
        guest.call(AGENT, Opcode::Rename, ROOT_ID, &[rename.as_bytes(), &old, &old]).unwrap();
        assert_eq!(guest.lookup(USER, name).map_or(0, |entry| entry.nodeid), 0);
    }
}

/// The guest's kernel changes the two names for each other, whatever it has there.
#[test]
fn an_exchange_that_somebody_has_seen_is_not_repeated() {
    for (swaps, seen, due) in [
        (1, "", Ok(())),
        (1, "d", Err(libc::ECANCELED)),
        (1, "f", Err(libc::ECANCELED)),
        // Everything is at its old place, as the guest has it.
        (2, "df", Ok(())),
    ] {
        let mut guest = Guest::new();
        mkdir(&guest.dir.path().join("d"));
        file(guest.dir.path(), "f");
        for name in ["d", "f"] {
            guest.lookup(USER, name).unwrap();
        }
        guest.register();
        let swap = format!("syscall({}, -100, $d, -100, $f, 2) && exit 1;", libc::SYS_renameat2).repeat(swaps);
        let swap = |dir: &Path| sh(&format!("cd {} && perl -e '($d, $f) = (\"d\", \"f\"); {swap}'", dir.display()));
        let mut batch = guest.batch(swap);
        let is_it = |change: &Change| change.has(ops::EXCHANGE) && change.place.name == b"d";
        while !batch.changes.iter().any(is_it) {
            batch = guest.batch(|_| {});
        }
        for name in seen.split("").filter(|name| !name.is_empty()) {
            guest.lookup(USER, name).unwrap();
        }
        let rename = Rename2In { newdir: ROOT_ID, flags: libc::RENAME_EXCHANGE, ..Default::default() };
        let parts: [&[u8]; 3] = [rename.as_bytes(), b"d\0", b"f\0"];
        let mut done = guest.call(AGENT, Opcode::Rename2, ROOT_ID, &parts);
        if done == Err(libc::EAGAIN) {
            // It has its kernel ask for the name.
            guest.lookup(AGENT, "d").unwrap();
            done = guest.call(AGENT, Opcode::Rename2, ROOT_ID, &parts);
        }
        assert_eq!(done.map(drop), due, "{swaps} exchanges, {seen:?} seen");
    }
}

/// For an overlay in the guest, which has the share as a lower layer.
#[test]
fn a_files_move_may_be_repeated_as_two_changes() {
    let mut guest = Guest::new();
    file(guest.dir.path(), "one");
    file(guest.dir.path(), "two");
    let [one, two] = ["one", "two"].map(|name| guest.lookup(USER, name).unwrap().nodeid);
    guest.register();
    let mut batch = guest.batch(|dir| sh(&format!("cd {}; mv one two", dir.display())));
    let is = |change: &Change| change.has(ops::RENAME);
    while !batch.changes.iter().any(is) {
        batch = guest.batch(|_| {});
    }
    let index = batch.changes.iter().position(is).unwrap() as u32;
    guest.ioctl(AGENT, protocol::FOUND, &Found { index, node: two }.encode()).unwrap();
    // The watches of both outlive their names: none is the last one, as far as the kernel knows.
    for (name, node) in [("one", one), ("two", two)] {
        assert_eq!(guest.lookup(AGENT, name).unwrap().nodeid, node);
        let attr = guest.call(AGENT, Opcode::Getattr, node, &[GetattrIn::default().as_bytes()]).unwrap();
        let attr = AttrOut::read_from_bytes(&attr).unwrap();
        let left = if node == one { 1 } else { 0 };
        assert_eq!((attr.attr.nlink, attr.attr_valid), (left + 1, 0), "{name}");
        guest.call(AGENT, Opcode::Unlink, ROOT_ID, &[name.as_bytes(), b"\0"]).unwrap();
    }
    assert_eq!(guest.lookup(AGENT, "two").unwrap_err(), libc::ENOENT);
    assert!(guest.mknod(AGENT, ROOT_ID, "two").unwrap().nodeid >= PHANTOMS);
    assert_eq!(guest.mknod(AGENT, ROOT_ID, "two").unwrap_err(), libc::EPERM);
    assert_eq!(guest.lookup(USER, "two").unwrap().nodeid, one);
    assert_eq!(std::fs::read(guest.dir.path().join("two")).unwrap(), b"one");
}

/// The kernel of a guest with a write-back cache sends its own times of a file whose name it removes or moves, at once
/// and by the thread that does it (fuse_update_ctime() of fs/fuse/dir.c). They may be older than the host's.
#[test]
fn times_that_come_with_a_removal_are_not_set() {
    let mut guest = Guest::with(Config { writeback: true, ..Config::default() });
    let path = guest.dir.path().join("file");
    file(guest.dir.path(), "file");
    std::fs::hard_link(&path, guest.dir.path().join("second")).unwrap();
    let node = guest.lookup(USER, "file").unwrap().nodeid;
    guest.lookup(USER, "second").unwrap();
    guest.register();
    let mut batch = guest.batch(|dir| sh(&format!("rm {}", dir.join("second").display())));
    while !batch.changes.iter().any(|change| change.has(ops::REMOVE)) {
        batch = guest.batch(|_| {});
    }
    guest.call(AGENT, Opcode::Unlink, ROOT_ID, &[b"second\0"]).unwrap();
    let before = std::fs::metadata(&path).unwrap().mtime();
    let valid = (SetattrValid::MTIME | SetattrValid::CTIME).bits();
    let times = SetattrIn { valid, mtime: 7, ctime: 7, ..Default::default() };
    // The kernel takes an error for one of the user's data, and tells it to the next fsync(2).
    guest.call(AGENT, Opcode::Setattr, node, &[times.as_bytes()]).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().mtime(), before);
    guest.call(USER, Opcode::Setattr, node, &[times.as_bytes()]).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().mtime(), 7);
}

#[test]
fn a_listing_does_not_make_known_what_is_announced() {
    let mut guest = Guest::new();
    guest.register();
    let open = guest.call(USER, Opcode::Opendir, ROOT_ID, &[OpenIn::default().as_bytes()]).unwrap();
    let fh = OpenOut::read_from_bytes(&open).unwrap().fh;
    // The nodeid that comes with the only name but "." and "..".
    let listed = |guest: &mut Guest| {
        let args = ReadIn { fh, size: 4096, ..Default::default() };
        let list = guest.call(USER, Opcode::Readdirplus, ROOT_ID, &[args.as_bytes()]).unwrap();
        let at = list.windows(3).position(|bytes| bytes == b"new").unwrap();
        let entry = &list[at - size_of::<Dirent>() - size_of::<EntryOut>()..];
        EntryOut::read_from_prefix(entry).unwrap().0.nodeid
    };
    guest.batch(|dir| mkdir(&dir.join("new")));
    // Its CREATE would not be told.
    assert_eq!(listed(&mut guest), 0);
    assert_eq!(guest.lookup(AGENT, "new").unwrap_err(), libc::ENOENT);
    guest.entry(AGENT, Opcode::Mkdir, ROOT_ID, &[MkdirIn::default().as_bytes(), b"new\0"]).unwrap();
    assert_ne!(listed(&mut guest), 0);
}

#[test]
fn what_nobody_watches_is_answered_truly() {
    let mut guest = Guest::new();
    guest.register();
    let batch = guest.batch(|dir| mkdir(&dir.join("new")));
    let at = batch.changes.iter().position(|change| change.place.name == b"new").unwrap();
    assert_eq!(guest.lookup(AGENT, "new").unwrap_err(), libc::ENOENT);
    guest.ioctl(AGENT, protocol::QUIET, &(1u64 << at).to_le_bytes()).unwrap();
    let node = guest.lookup(AGENT, "new").unwrap().nodeid;
    assert!(node < PHANTOMS);
    // It is still asked for nothing.
    let made = [MkdirIn::default().as_bytes(), b"new\0"].concat();
    assert_eq!(guest.call(AGENT, Opcode::Mkdir, ROOT_ID, &[&made]), Err(libc::EPERM));
    assert_eq!(guest.lookup(USER, "new").unwrap().nodeid, node);
}

#[test]
fn there_are_leases_while_the_agent_keeps_up() {
    let mut guest = Guest::new();
    file(guest.dir.path(), "file");
    let opendir = |guest: &mut Guest| {
        let open = guest.call(USER, Opcode::Opendir, ROOT_ID, &[OpenIn::default().as_bytes()]).unwrap();
        OpenOut::read_from_bytes(&open).unwrap().open_flags
    };
    assert_eq!((guest.lookup(USER, "file").unwrap().entry_valid, opendir(&mut guest)), (1, 0));
    // It registers again when it hears that.
    let refused = guest.ioctl(AGENT, protocol::WAIT, &Done::default().encode()).unwrap();
    assert_eq!(OutHeader::read_from_prefix(&refused).unwrap().0.error, -libc::ENOTCONN);
    guest.register();
    let waits = guest.wait();
    // The first look learns of the file.
    while guest.lookup(USER, "file").unwrap().attr_valid != 60 {}
    let missing = guest.lookup(USER, "none").unwrap();
    assert_eq!((missing.nodeid, missing.entry_valid), (0, 60));
    // The guest keeps the listing.
    assert_eq!(opendir(&mut guest), (OpenFlags::KEEP_CACHE | OpenFlags::CACHE_DIR).bits());
    guest.forget(guest.marker, 2);
    assert_eq!((guest.lookup(USER, "file").unwrap().entry_valid, opendir(&mut guest)), (1, 0));
    assert_eq!(guest.lookup(USER, "none").unwrap_err(), libc::ENOENT);
    // Its reply was dropped, which answers EIO.
    let reply = waits.recv_timeout(LONG).unwrap();
    assert_eq!(OutHeader::read_from_prefix(&reply).unwrap().0.error, -libc::EIO);
}

#[test]
fn nothing_of_a_submount_is_leased() {
    // Its own namespace, so that nothing is left. Its file system can be watched.
    // SAFETY: no descriptors are separated from other threads'.
    let own = unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) };
    let flags = rustix::mount::MountPropagationFlags::PRIVATE | rustix::mount::MountPropagationFlags::REC;
    if own.and_then(|()| rustix::mount::mount_change("/", flags)).is_err() {
        eprintln!("skipped: only root may mount");
        return;
    }
    let mut guest = Guest::new();
    let below = guest.dir.path().join("below");
    std::fs::create_dir(&below).unwrap();
    file(guest.dir.path(), "here");
    let none = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", &below, "tmpfs", none, None).unwrap();
    file(&below, "there");
    guest.register();
    let _waits = guest.wait();
    while guest.lookup(USER, "here").unwrap().attr_valid != 60 {}
    for _ in 0..3 {
        let mount = guest.lookup(USER, "below").unwrap();
        let file = guest.lookup_in(USER, mount.nodeid, "there").unwrap();
        assert_eq!([mount.entry_valid, mount.attr_valid, file.entry_valid, file.attr_valid], [1; 4]);
        assert_eq!(guest.lookup_in(USER, mount.nodeid, "none").unwrap_err(), libc::ENOENT);
    }
}
