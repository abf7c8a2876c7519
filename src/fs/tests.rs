//! The file system without a VM: the tests call it as the server does.

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tempfile::TempDir;
use zerocopy::FromBytes;

use super::idmap::IdMap;
use super::xattrmap::XattrMap;
use super::{CachePolicy, Config, FileHandles, InitFlags, NoOpen, Offer, OwnedFd, PassthroughFs, proc_self_fd};
use crate::fuse::Reply;
use crate::fuse::abi::*;
use crate::fuse::buf::IoVecs;
use crate::fuse::ops::*;
use crate::limits;
use crate::window::proxy::{Event, Kind, Opened};
use crate::window::{Frontend, Mapping, ProxyFiles, RANGE, Window};

mod contents;
mod export;
mod flags;
pub(super) mod lease;
mod owner;

pub(super) struct Share {
    pub dir: TempDir,
    pub fs: Arc<PassthroughFs>,
}

/// Who sends the requests of tests for which that does not matter.
pub(super) const CALLER: Caller = Caller { uid: 0, gid: 0, pid: 0 };

const ROOT: Creator = Creator { uid: 0, gid: 0, umask: 0, group: None, label: None };

pub(super) fn me() -> Creator<'static> {
    Creator { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw(), ..ROOT }
}

pub(super) fn root() -> bool {
    rustix::process::geteuid().is_root()
}

pub(super) fn open_root(path: &Path) -> OwnedFd {
    rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

pub(super) fn share(config: Config) -> Share {
    let dir = tempfile::tempdir().unwrap();
    let fs = PassthroughFs::new(open_root(dir.path()), proc_self_fd().unwrap(), config).unwrap();
    fs.enter_thread(false);
    fs.init(InitFlags::all()).unwrap();
    Share { dir, fs: Arc::new(fs) }
}

/// The reply to a request, whether it comes at once or later.
pub(super) fn answered<T: FromBytes>(serve: impl FnOnce(&mut Reply) -> Result<()>) -> Result<T> {
    let (send, sent) = std::sync::mpsc::channel();
    let mut reply = Reply::late(0, Box::new(move |reply| send.send(reply).unwrap()));
    let served = serve(&mut reply);
    reply.finish(served);
    let reply = sent.recv().unwrap();
    let (header, body) = OutHeader::read_from_prefix(&reply).unwrap();
    match header.error {
        0 => Ok(T::read_from_bytes(body).unwrap()),
        error => Err(Errno::from_raw_os_error(-error)),
    }
}

pub(super) fn open(fs: &PassthroughFs, node: u64, flags: i32) -> Result<OpenOut> {
    answered(|reply| fs.open(node, &OpenIn { flags: flags as u32, open_flags: 0 }, CALLER, reply))
}

fn plain() -> Share {
    share(Config::default())
}

impl Share {
    pub(super) fn put(&self, name: &str, data: &[u8]) {
        fs::write(self.dir.path().join(name), data).unwrap();
    }

    pub(super) fn host(&self, name: &str) -> Vec<u8> {
        fs::read(self.dir.path().join(name)).unwrap()
    }

    pub(super) fn lookup(&self, name: &CStr) -> Result<EntryOut> {
        self.fs.lookup(ROOT_ID, name)
    }

    pub(super) fn open(&self, name: &CStr, flags: i32) -> (u64, u64) {
        let node = self.lookup(name).unwrap().nodeid;
        (node, open(&self.fs, node, flags).unwrap().fh)
    }

    pub(super) fn write(
        &self,
        node: u64,
        fh: u64,
        offset: u64,
        data: &[u8],
        write_flags: u32,
        flags: i32,
    ) -> Result<usize> {
        let write = WriteIn { fh, offset, write_flags, flags: flags as u32, ..Default::default() };
        self.write_by(node, &write, CALLER, data)
    }

    pub(super) fn write_by(&self, node: u64, write: &WriteIn, by: Caller, data: &[u8]) -> Result<usize> {
        let mut data = data.to_vec();
        let mut vecs = IoVecs::default();
        // SAFETY: `data` outlives the list.
        unsafe { vecs.push(data.as_mut_ptr(), data.len(), true) };
        self.fs.write(node, write, by, &vecs.range(0..usize::MAX))
    }

    pub(super) fn read(&self, node: u64, fh: u64, offset: u64, size: usize) -> Result<Vec<u8>> {
        let (mut a, mut b) = (vec![0; size / 3], vec![0; size - size / 3]);
        let mut vecs = IoVecs::default();
        for part in [&mut a, &mut b] {
            // SAFETY: the parts outlive the list.
            unsafe { vecs.push(part.as_mut_ptr(), part.len(), true) };
        }
        let read = ReadIn { fh, offset, ..Default::default() };
        let n = self.fs.read(node, &read, &vecs.range(0..size));
        assert_ne!(n, Err(WOULD_WAIT), "what was written just now is in memory");
        a.extend(b);
        a.truncate(n?);
        Ok(a)
    }

    /// Descriptors that this process has open in the share.
    pub(super) fn descriptors(&self) -> usize {
        let held = |e: std::io::Result<fs::DirEntry>| fs::read_link(e.ok()?.path()).ok();
        let links = fs::read_dir("/proc/self/fd").unwrap().filter_map(held);
        links.filter(|path| path.starts_with(self.dir.path())).count()
    }

    fn list_plus(&self) -> Vec<(String, EntryOut)> {
        let fh = self.fs.opendir(ROOT_ID, 0).unwrap().fh;
        let mut all = List::default();
        let mut offset = 0;
        loop {
            let before = all.entries.len();
            all.room = 7;
            self.fs.readdirplus(ROOT_ID, fh, offset, &mut all).unwrap();
            if all.entries.len() == before {
                break;
            }
            offset = all.offset;
        }
        self.fs.releasedir(ROOT_ID, fh).unwrap();
        all.entries
    }
}

/// Takes as many entries as there is `room` for.
#[derive(Default)]
pub(super) struct List {
    pub entries: Vec<(String, EntryOut)>,
    pub offset: u64,
    pub room: usize,
}

impl DirSink for List {
    fn fits(&self, _: usize) -> bool {
        self.room > 0
    }

    fn push(&mut self, dirent: Dirent, name: &[u8], entry: Option<&EntryOut>) {
        self.room -= 1;
        self.offset = dirent.off;
        self.entries.push((String::from_utf8_lossy(name).into(), entry.copied().unwrap_or_default()));
    }
}

#[test]
fn names_stay_in_their_directory() {
    let s = plain();
    s.put("f", b"");
    symlink("/etc", s.dir.path().join("out")).unwrap();
    for bad in [c"", c".", c"..", c"a/b", c"/etc", c"../x"] {
        assert_eq!(s.lookup(bad).err(), Some(Errno::INVAL), "{bad:?}");
        assert_eq!(s.fs.mkdir(ROOT_ID, bad, 0o755, &me()).err(), Some(Errno::INVAL));
        assert_eq!(s.fs.unlink(ROOT_ID, bad), Err(Errno::INVAL));
        assert_eq!(s.fs.rename(ROOT_ID, c"f", ROOT_ID, bad, 0, &me()), Err(Errno::INVAL));
    }
    let out = s.lookup(c"out").unwrap();
    assert_eq!(out.attr.mode & libc::S_IFMT, libc::S_IFLNK);
    assert_eq!(s.fs.lookup(out.nodeid, c"passwd").err(), Some(Errno::NOTDIR));
    assert_eq!(s.fs.opendir(out.nodeid, 0).err(), Some(Errno::NOTDIR));
    assert_eq!(open(&s.fs, out.nodeid, 0).err(), Some(Errno::BADF));
    let mut target = Vec::new();
    s.fs.readlink(out.nodeid, &mut target).unwrap();
    assert_eq!(target, b"/etc");
}

#[test]
fn a_name_that_is_not_there_may_be_remembered() {
    assert_eq!(plain().lookup(c"f").err(), Some(Errno::NOENT));
    let s = share(Config { negative_timeout: Duration::from_millis(1500), ..Default::default() });
    let entry = s.lookup(c"f").unwrap();
    assert_eq!((entry.nodeid, entry.entry_valid, entry.entry_valid_nsec), (0, 1, 500_000_000));
    assert_eq!(s.fs.known_inodes(), 1);
    // Only that is remembered.
    assert_eq!(s.lookup(c"..").err(), Some(Errno::INVAL));
    s.put("f", b"x");
    assert_ne!(s.lookup(c"f").unwrap().nodeid, 0);
    assert_eq!(s.fs.lookup(s.lookup(c"f").unwrap().nodeid, c"g").err(), Some(Errno::NOTDIR));
}

#[test]
fn a_nodeid_lives_as_long_as_its_lookups() {
    let s = plain();
    s.put("f", b"x");
    let first = s.lookup(c"f").unwrap();
    assert_eq!(s.lookup(c"f").unwrap().nodeid, first.nodeid);
    s.fs.forget(first.nodeid, 1);
    s.fs.getattr(first.nodeid, None).unwrap();
    s.fs.forget(first.nodeid, 1);
    assert_eq!(s.fs.getattr(first.nodeid, None).err(), Some(Errno::STALE));
    assert_eq!(s.fs.known_inodes(), 1);
    assert_ne!(s.lookup(c"f").unwrap().nodeid, first.nodeid);
    s.fs.forget(ROOT_ID, u64::MAX);
    s.fs.forget(12345, 1);
    s.fs.getattr(ROOT_ID, None).unwrap();
}

#[test]
fn a_reused_inode_number_gets_a_new_nodeid() {
    for inode_file_handles in [FileHandles::Never, FileHandles::Prefer] {
        let s = share(Config { inode_file_handles, ..Default::default() });
        let mut seen = std::collections::HashMap::new();
        for round in 0..200 {
            s.put("f", b"x");
            let entry = s.lookup(c"f").unwrap();
            if let Some(before) = seen.insert(entry.nodeid, round) {
                panic!("{inode_file_handles:?}: round {round} has the nodeid of round {before}");
            }
            fs::remove_file(s.dir.path().join("f")).unwrap();
        }
    }
}

#[test]
fn data_is_read_and_written_at_its_offset() {
    let s = plain();
    s.put("f", b"0123456789");
    let (node, fh) = s.open(c"f", libc::O_RDWR);
    assert_eq!(s.read(node, fh, 2, 5).unwrap(), b"23456");
    assert_eq!(s.read(node, fh, 8, 50).unwrap(), b"89");
    assert_eq!(s.read(node, fh, 50, 5).unwrap(), b"");
    assert_eq!(s.write(node, fh, 9, b"abc", 0, 0), Ok(3));
    assert_eq!(s.host("f"), b"012345678abc");
    assert_eq!(s.read(node, fh, u64::MAX, 5).err(), Some(Errno::INVAL));
    assert_eq!(s.read(node + 1, fh, 0, 5).err(), Some(Errno::BADF));
    assert_eq!(s.read(node, fh + 1, 0, 5).err(), Some(Errno::BADF));
    let release = ReleaseIn { fh, ..Default::default() };
    s.fs.release(node, &release).unwrap();
    assert_eq!(s.fs.release(node, &release), Err(Errno::BADF));
    assert_eq!(s.read(node, fh, 0, 5).err(), Some(Errno::BADF));
}

/// As chown(2) without ids, which a guest sends so.
#[test]
fn a_change_of_nothing_moves_the_change_time() {
    let kills = SetattrValid::KILL_SUIDGID;
    for (flags, valid) in [(InitFlags::all(), kills), (InitFlags::all() - InitFlags::HANDLE_KILLPRIV_V2, kills - kills)]
    {
        let s = plain();
        s.fs.init(flags).unwrap();
        s.put("f", b"");
        let node = s.lookup(c"f").unwrap().nodeid;
        let path = s.dir.path().join("f");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let changed = |attr: &Attr| (attr.ctime, attr.ctimensec);
        let before = s.fs.getattr(node, None).unwrap().attr;
        // Until the clock of file times has gone on.
        let set = SetattrIn { valid: valid.bits(), ..Default::default() };
        let tries = (0..500).map(|_| {
            std::thread::sleep(Duration::from_millis(10));
            s.fs.setattr(node, &set, CALLER).unwrap().attr
        });
        let after = tries.into_iter().find(|attr| changed(attr) != changed(&before));
        let after = after.expect("the change time stays");
        assert_eq!((after.mode, after.mtime, after.uid), (before.mode, before.mtime, before.uid));
    }
}

#[test]
fn what_is_not_cached_is_not_written_back() {
    use CachePolicy::{Always, Auto, Metadata, Never};
    for (cache, writes_back) in [(Never, false), (Auto, true), (Metadata, false), (Always, true)] {
        let s = share(Config { cache, writeback: true, ..Config::default() });
        assert_eq!(s.fs.has(InitFlags::WRITEBACK_CACHE), writes_back, "{cache:?}");
        // A session that began elsewhere goes on as it is.
        s.fs.settle(InitFlags::all(), true).unwrap();
        assert!(s.fs.has(InitFlags::WRITEBACK_CACHE), "{cache:?}");
    }
}

#[test]
fn appends_go_to_the_hosts_end_and_page_writeback_does_not() {
    let s = plain();
    s.put("f", b"old");
    let (node, fh) = s.open(c"f", libc::O_WRONLY | libc::O_APPEND);
    s.put("f", b"longer");
    assert_eq!(s.write(node, fh, 3, b"+", 0, libc::O_APPEND), Ok(1));
    assert_eq!(s.host("f"), b"longer+");
    assert_eq!(s.write(node, fh, 0, b"L", WRITE_CACHE, libc::O_APPEND), Ok(1));
    assert_eq!(s.host("f"), b"Longer+");
}

#[test]
fn create_opens_what_is_there_unless_exclusive() {
    let s = plain();
    let create = |flags: i32| {
        let create = CreateIn { flags: flags as u32, mode: 0o640, ..Default::default() };
        answered(|reply| s.fs.create(ROOT_ID, c"f", &create, &me(), reply))
    };
    let CreateOut { entry, open } = create(libc::O_RDWR | libc::O_EXCL).unwrap();
    assert_eq!(entry.attr.mode, libc::S_IFREG | 0o640);
    s.write(entry.nodeid, open.fh, 0, b"data", 0, 0).unwrap();
    assert_eq!(create(libc::O_RDWR | libc::O_EXCL).err(), Some(Errno::EXIST));
    let again = create(libc::O_RDWR).unwrap();
    assert_eq!(again.entry.nodeid, entry.nodeid);
    assert_eq!(s.host("f"), b"data");
    // Truncating may wait. The guest is to send an OPEN instead.
    assert_eq!(create(libc::O_RDWR | libc::O_TRUNC).err(), Some(Errno::STALE));
    assert_eq!(s.host("f"), b"data");
    s.put("f", b"");
    create(libc::O_RDWR | libc::O_TRUNC).unwrap();
    symlink("/etc/passwd", s.dir.path().join("l")).unwrap();
    let link = CreateIn { flags: libc::O_RDWR as u32, ..Default::default() };
    let link = answered::<CreateOut>(|reply| s.fs.create(ROOT_ID, c"l", &link, &me(), reply));
    assert_eq!(link.err(), Some(Errno::BADF));
}

#[test]
fn flush_reaches_file_systems_that_report_errors_at_close() {
    let quiet = |config, flags: i32| {
        let s = share(config);
        s.put("f", b"data");
        let node = s.lookup(c"f").unwrap().nodeid;
        open(&s.fs, node, flags).unwrap().open_flags & OpenFlags::NOFLUSH.bits() != 0
    };
    let all = [libc::O_RDONLY, libc::O_WRONLY, libc::O_WRONLY | libc::O_APPEND, libc::O_RDWR];
    assert_eq!(all.map(|flags| quiet(Config::default(), flags)), [true, true, true, false]);
    assert_eq!(all.map(|flags| quiet(Config { posix_lock: true, ..Default::default() }, flags)), [false; 4]);
}

#[test]
fn special_files_are_not_opened() {
    let s = plain();
    let fifo = s.fs.mknod(ROOT_ID, c"p", libc::S_IFIFO | 0o600, 0, &me()).unwrap();
    assert!(fs::symlink_metadata(s.dir.path().join("p")).unwrap().file_type().is_fifo());
    assert_eq!(open(&s.fs, fifo.nodeid, libc::O_RDWR).err(), Some(Errno::BADF));
}

#[test]
fn listed_files_are_opened_when_they_are_needed() {
    let s = plain();
    for n in 0..100 {
        s.put(&format!("f{n}"), b"data");
    }
    let before = s.descriptors();
    let all = s.list_plus();
    assert_eq!(all.len(), 102);
    assert_eq!(s.descriptors(), before);
    let node = |name: &str| all.iter().find(|(n, _)| n == name).unwrap().1.nodeid;
    assert_eq!((node("."), node("..")), (0, 0));
    assert_eq!(s.fs.getattr(node("f7"), None).unwrap().attr.size, 4);
    assert_eq!(s.descriptors(), before);
    s.fs.access(node("f7"), 0, 0, 4).unwrap();
    assert_eq!(s.descriptors(), before + 1);

    // The guest renames and removes files: they are still the same.
    s.fs.rename(ROOT_ID, c"f1", ROOT_ID, c"g1", 0, &me()).unwrap();
    s.fs.getattr(node("f1"), None).unwrap();
    open(&s.fs, node("f2"), libc::O_RDONLY).unwrap();
    s.fs.unlink(ROOT_ID, c"f2").unwrap();
    assert_eq!(s.fs.getattr(node("f2"), None).unwrap().attr.nlink, 0);

    // The host replaces and removes files: they are stale, and never another file.
    fs::remove_file(s.dir.path().join("f3")).unwrap();
    s.put("f3", b"other");
    assert_eq!(s.fs.getattr(node("f3"), None).err(), Some(Errno::STALE));
    assert_ne!(s.lookup(c"f3").unwrap().nodeid, node("f3"));
    fs::remove_file(s.dir.path().join("f4")).unwrap();
    assert_eq!(s.fs.getattr(node("f4"), None).err(), Some(Errno::STALE));

    // The guest finds the file under its new name.
    fs::rename(s.dir.path().join("f5"), s.dir.path().join("h5")).unwrap();
    assert_eq!(s.fs.getattr(node("f5"), None).err(), Some(Errno::STALE));
    assert_eq!(s.lookup(c"h5").unwrap().nodeid, node("f5"));
    s.fs.getattr(node("f5"), None).unwrap();
}

#[test]
fn a_closed_file_serves_the_next_open_for_reading() {
    let s = plain();
    s.put("f", b"data");
    s.lookup(c"f").unwrap();
    let settle = || (0..2).for_each(|_| s.fs.places.kept.sweep());
    let before = s.descriptors();
    let (node, fh) = s.open(c"f", libc::O_RDONLY);
    let held = s.descriptors();
    let release = |fh| s.fs.release(node, &ReleaseIn { fh, ..Default::default() }).unwrap();
    release(fh);
    assert_eq!(s.descriptors(), held);
    let (_, again) = s.open(c"f", libc::O_RDONLY);
    assert_eq!(s.descriptors(), held);
    // An open file that is in use serves no other open, nor does it serve an open for writing.
    let (_, second) = s.open(c"f", libc::O_RDONLY);
    let (_, third) = s.open(c"f", libc::O_RDWR);
    assert_eq!(s.descriptors(), held + 2);
    assert_eq!(s.read(node, again, 0, 9).unwrap(), b"data");
    [again, second, third].into_iter().for_each(release);
    assert_eq!(s.descriptors(), held);
    settle();
    assert_eq!(s.descriptors(), before);
}

#[test]
fn a_listing_continues_where_it_stopped() {
    let s = plain();
    for n in 0..50 {
        s.put(&format!("f{n}"), b"");
    }
    let fh = s.fs.opendir(ROOT_ID, 0).unwrap().fh;
    let list = |offset, room| {
        let mut list = List { room, ..Default::default() };
        s.fs.readdir(ROOT_ID, fh, offset, &mut list).unwrap();
        list
    };
    let all = list(0, 100);
    assert_eq!(all.entries.len(), 52);
    let part = list(0, 10);
    let rest = list(part.offset, 100);
    let names = |l: &List| l.entries.iter().map(|(n, _)| n.clone()).collect::<Vec<_>>();
    assert_eq!([names(&part), names(&rest)].concat(), names(&all));
    assert!(list(all.offset, 100).entries.is_empty());
    assert_eq!(s.fs.readdir(ROOT_ID, 999, 0, &mut List::default()), Err(Errno::BADF));
}

#[test]
fn file_handles_hold_no_descriptors() {
    if !root() {
        return;
    }
    let s = share(Config { inode_file_handles: FileHandles::Mandatory, ..Default::default() });
    for n in 0..50 {
        s.put(&format!("f{n}"), b"data");
    }
    // A used descriptor is kept for a while.
    let settle = || (0..2).for_each(|_| s.fs.places.kept.sweep());
    let before = s.descriptors();
    s.lookup(c"f0").unwrap();
    settle();
    // Not even the first.
    assert_eq!(s.descriptors(), before);
    for n in 1..50 {
        s.lookup(&CString::new(format!("f{n}")).unwrap()).unwrap();
    }
    assert_eq!(s.descriptors(), before + 49);
    settle();
    assert_eq!(s.descriptors(), before);
    let (node, fh) = s.open(c"f9", libc::O_RDONLY);
    fs::rename(s.dir.path().join("f9"), s.dir.path().join("elsewhere")).unwrap();
    assert_eq!(s.fs.getattr(node, None).unwrap().attr.size, 4);
    assert_eq!(s.read(node, fh, 0, 9).unwrap(), b"data");
    let dir = s.fs.mkdir(ROOT_ID, c"d", 0o755, &me()).unwrap().nodeid;
    s.fs.mkdir(dir, c"e", 0o755, &me()).unwrap();
    assert_eq!(s.fs.rename(dir, c"e", ROOT_ID, c"d", 0, &me()), Err(Errno::NOTEMPTY));
    s.fs.rmdir(dir, c"e").unwrap();

    let node = s.lookup(c"f8").unwrap().nodeid;
    fs::remove_file(s.dir.path().join("f8")).unwrap();
    assert_eq!(s.fs.getattr(node, None).err(), Some(Errno::STALE));
}

#[test]
fn a_removed_file_is_held_as_long_as_it_is_open() {
    for inode_file_handles in [FileHandles::Never, FileHandles::Prefer] {
        let s = share(Config { inode_file_handles, ..Default::default() });
        let held = |name: &str| {
            let held = |e: io::Result<fs::DirEntry>| fs::read_link(e.ok()?.path()).ok();
            let mut links = fs::read_dir("/proc/self/fd").unwrap().filter_map(held);
            links.any(|path| path.starts_with(s.dir.path()) && path.to_string_lossy().contains(name))
        };
        let rename = |from, to| s.fs.rename(ROOT_ID, from, ROOT_ID, to, 0, &me());
        // Nobody has it open: it goes at once, though the guest has not forgotten it.
        for (n, remove) in [(1, true), (2, false)] {
            s.put("closed", b"data");
            s.put("new", b"data");
            let node = s.lookup(c"closed").unwrap().nodeid;
            let fh = open(&s.fs, node, libc::O_RDONLY).unwrap().fh;
            s.fs.release(node, &ReleaseIn { fh, ..Default::default() }).unwrap();
            if remove { s.fs.unlink(ROOT_ID, c"closed") } else { rename(c"new", c"closed") }.unwrap();
            assert!(!held("closed"), "{inode_file_handles:?} {n}");
            assert_eq!(s.fs.getattr(node, None).unwrap().attr.nlink, 0);
            assert_eq!(open(&s.fs, node, libc::O_RDONLY).err(), Some(Errno::STALE));
            // A guest with a write-back cache sends the file's times then.
            let times = SetattrValid::MTIME | SetattrValid::CTIME;
            let set = |valid: SetattrValid| {
                let attr = SetattrIn { valid: valid.bits(), ..Default::default() };
                s.fs.setattr(node, &attr, CALLER).map(|out| out.attr.nlink)
            };
            assert_eq!((set(times), set(times | SetattrValid::MODE)), (Ok(0), Err(Errno::STALE)));
            s.put("closed", b"data");
            assert_ne!(s.lookup(c"closed").unwrap().nodeid, node);
        }
        // It is open, and goes with the last handle.
        s.put("opened", b"data");
        let (node, fh) = s.open(c"opened", libc::O_RDWR);
        let second = open(&s.fs, node, libc::O_RDONLY).unwrap().fh;
        s.fs.unlink(ROOT_ID, c"opened").unwrap();
        for fh in [fh, second] {
            assert_eq!(s.fs.getattr(node, None).unwrap().attr.nlink, 0);
            assert_eq!(s.read(node, fh, 0, 9).unwrap(), b"data");
            s.fs.release(node, &ReleaseIn { fh, ..Default::default() }).unwrap();
        }
        assert!(!held("opened"), "{inode_file_handles:?}");
        assert_eq!(s.fs.getattr(node, None).unwrap().attr.size, 4);
        // The guest opens it by itself.
        let node = s.fs.mknod(ROOT_ID, c"pipe", libc::S_IFIFO | 0o600, 0, &me()).unwrap().nodeid;
        s.fs.unlink(ROOT_ID, c"pipe").unwrap();
        assert_eq!(s.fs.getattr(node, None).unwrap().attr.nlink, 0);
        // It has another name.
        s.put("linked", b"data");
        let node = s.lookup(c"linked").unwrap().nodeid;
        s.fs.link(node, ROOT_ID, c"other").unwrap();
        s.fs.unlink(ROOT_ID, c"linked").unwrap();
        assert_eq!((s.lookup(c"other").unwrap().nodeid, s.fs.getattr(node, None).unwrap().attr.nlink), (node, 1));
    }
}

#[test]
fn attributes_are_set() {
    let s = plain();
    s.put("f", b"0123456789");
    let node = s.lookup(c"f").unwrap().nodeid;
    let set =
        |valid: SetattrValid, attr: SetattrIn| s.fs.setattr(node, &SetattrIn { valid: valid.bits(), ..attr }, CALLER);
    let out = set(SetattrValid::MODE, SetattrIn { mode: 0o4711, ..Default::default() }).unwrap();
    assert_eq!(out.attr.mode, libc::S_IFREG | 0o4711);
    let out = set(SetattrValid::SIZE, SetattrIn { size: 3, ..Default::default() }).unwrap();
    assert_eq!((out.attr.size, s.host("f")), (3, b"012".to_vec()));
    let times = SetattrIn { atime: 5, atimensec: 6, mtime: 7, mtimensec: u32::MAX, ..Default::default() };
    let out = set(SetattrValid::ATIME | SetattrValid::MTIME, times).unwrap();
    assert_eq!((out.attr.atime, out.attr.atimensec, out.attr.mtime, out.attr.mtimensec), (5, 6, 7, 999_999_999));
    assert!(set(SetattrValid::SIZE, SetattrIn { size: u64::MAX, ..Default::default() }).is_err());
    let symlinked = s.fs.symlink(ROOT_ID, c"l", c"nowhere", &me()).unwrap();
    let valid = (SetattrValid::ATIME | SetattrValid::ATIME_NOW).bits();
    s.fs.setattr(symlinked.nodeid, &SetattrIn { valid, ..Default::default() }, CALLER).unwrap();
    assert!(s.fs.statx(node, None, 0, u32::MAX).unwrap().stat.btime.tv_sec > 0);
    let all = s.fs.statfs(node).unwrap();
    assert!(all.blocks > 16);
    let part = share(Config { report_size: Some(16 * u64::from(all.frsize) + 1), ..Default::default() });
    let told = part.fs.statfs(ROOT_ID).unwrap();
    assert_eq!((told.blocks, told.bfree, told.bavail), (16, all.bfree.min(16), all.bavail.min(16)));
}

#[test]
fn files_belong_to_their_creator() {
    if !root() {
        return;
    }
    let s = plain();
    let dir = s.dir.path();
    fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).unwrap();
    s.fs.mkdir(ROOT_ID, c"d", 0o755, &Creator { uid: 1000, gid: 1001, ..ROOT }).unwrap();
    let meta = fs::metadata(dir.join("d")).unwrap();
    assert_eq!((meta.uid(), meta.gid()), (1000, 1001));
    s.fs.mkdir(ROOT_ID, c"e", 0o755, &ROOT).unwrap();
    assert_eq!(fs::metadata(dir.join("e")).unwrap().uid(), 0);

    // In a directory of a supplementary group.
    fs::create_dir(dir.join("g")).unwrap();
    std::os::unix::fs::chown(dir.join("g"), Some(0), Some(50)).unwrap();
    fs::set_permissions(dir.join("g"), fs::Permissions::from_mode(0o2770)).unwrap();
    let g = s.lookup(c"g").unwrap().nodeid;
    let by = Creator { uid: 1000, gid: 1001, ..ROOT };
    s.fs.mkdir(g, c"supplementary", 0o755, &Creator { group: Some(50), ..by }).unwrap();
    assert_eq!(fs::metadata(dir.join("g/supplementary")).unwrap().gid(), 50);
    s.fs.mkdir(g, c"root", 0o755, &ROOT).unwrap();
}

/// Its user may have CAP_DAC_OVERRIDE or CAP_MKNOD in the guest, or be in a group that the guest does not send.
#[test]
fn what_the_guest_has_checked_is_not_refused() {
    if !root() {
        return;
    }
    let s = plain();
    let dir = s.dir.path().join("d");
    let entry = s.fs.mkdir(ROOT_ID, c"d", 0o555, &Creator { uid: 1000, gid: 1001, ..ROOT }).unwrap();
    // Another user, since the capability holds for files of a user namespace of the guest.
    let by = Creator { uid: 1002, gid: 1003, ..ROOT };
    for flags in [InitFlags::all(), InitFlags::empty()] {
        s.fs.init(flags).unwrap();
        let d = s.lookup(c"d").unwrap().nodeid;
        s.fs.mkdir(d, c"dir", 0o755, &by).unwrap();
        s.fs.symlink(d, c"link", c"target", &by).unwrap();
        s.fs.mknod(d, c"node", libc::S_IFCHR | 0o600, 0x103, &by).unwrap();
        let create = CreateIn { flags: libc::O_RDWR as u32, mode: 0o600, ..Default::default() };
        answered::<CreateOut>(|reply| s.fs.create(d, c"file", &create, &by, reply)).unwrap();
        answered::<CreateOut>(|reply| s.fs.tmpfile(d, &create, &by, reply)).unwrap();
        for name in ["dir", "link", "node", "file"] {
            let meta = fs::symlink_metadata(dir.join(name)).unwrap();
            assert_eq!((meta.uid(), meta.gid()), (1002, 1003), "{name}");
        }
        // The rights were for that alone.
        let caps = rustix::thread::capabilities(None).unwrap();
        assert_eq!(caps.effective, caps.permitted);
        fs::remove_dir_all(&dir).unwrap();
        fs::create_dir(&dir).unwrap();
        std::os::unix::fs::chown(&dir, Some(1000), Some(1001)).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o555)).unwrap();
    }
    s.fs.forget(entry.nodeid, 1);
}

#[test]
fn ids_are_translated() {
    if !root() {
        return;
    }
    let map: IdMap = IdMap::new(&["map:0:1000:10".parse().unwrap(), "forbid-guest:500:10".parse().unwrap()]).unwrap();
    let s = share(Config { uid_map: map.clone(), gid_map: map, ..Default::default() });
    fs::set_permissions(s.dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let entry = s.fs.mkdir(ROOT_ID, c"d", 0o755, &ROOT).unwrap();
    assert_eq!((entry.attr.uid, entry.attr.gid), (0, 0));
    assert_eq!(fs::metadata(s.dir.path().join("d")).unwrap().uid(), 1000);
    assert_eq!(s.fs.mkdir(ROOT_ID, c"e", 0o755, &Creator { uid: 505, ..ROOT }).err(), Some(Errno::PERM));
}

#[test]
fn set_id_bits_go_when_the_guest_says_so() {
    if !root() {
        return;
    }
    let s = share(Config { killpriv_v2: true, ..Default::default() });
    s.put("f", b"data");
    let mode = || fs::metadata(s.dir.path().join("f")).unwrap().mode() & 0o7777;
    let set = || fs::set_permissions(s.dir.path().join("f"), fs::Permissions::from_mode(0o6755)).unwrap();
    let (node, fh) = s.open(c"f", libc::O_RDWR);
    set();
    s.write(node, fh, 0, b"x", 0, 0).unwrap();
    assert_eq!(mode(), 0o6755);
    s.write(node, fh, 0, b"x", WRITE_KILL_SUIDGID, 0).unwrap();
    assert_eq!(mode(), 0o755);
    set();
    s.write(node, fh, 0, b"x", 0, 0).unwrap();
    assert_eq!(mode(), 0o6755);
    let valid = (SetattrValid::SIZE | SetattrValid::KILL_SUIDGID).bits();
    s.fs.setattr(node, &SetattrIn { valid, size: 1, ..Default::default() }, CALLER).unwrap();
    assert_eq!(mode(), 0o755);
    set();
    // A SETATTR that changes nothing.
    set();
    assert_eq!(s.lookup(c"f").unwrap().attr_valid, 0);
    let out = s.fs.setattr(node, &SetattrIn::default(), CALLER).unwrap();
    assert_eq!((mode(), out.attr.mode & 0o7777), (0o755, 0o755));
    assert_eq!(s.lookup(c"f").unwrap().attr_valid, 1);
    // Linux sends it for a caller outside of the file's group who may not keep this bit.
    fs::set_permissions(s.dir.path().join("f"), fs::Permissions::from_mode(0o2744)).unwrap();
    s.fs.setattr(node, &SetattrIn::default(), Caller { uid: 1000, gid: 1000, pid: 0 }).unwrap();
    assert_eq!(mode(), 0o744);
    set();
    let truncating = OpenIn { flags: (libc::O_RDWR | libc::O_TRUNC) as u32, open_flags: OPEN_KILL_SUIDGID };
    answered::<OpenOut>(|reply| s.fs.open(node, &truncating, CALLER, reply)).unwrap();
    assert_eq!(mode(), 0o755);
}

/// As Linux: a member of the file's group keeps the set-group-ID bit if the group may not execute the file. A guest
/// that does not say who changes the file keeps it, unless it says itself that bits go.
#[test]
fn who_changes_a_file_decides_on_its_set_group_id_bit() {
    if !root() {
        return;
    }
    let (user, group, other) = (1000, 1001, 1002);
    let s = share(Config { killpriv_v2: true, xattr: true, ..Default::default() });
    s.put("f", b"data");
    let path = s.dir.path().join("f");
    let (node, fh) = s.open(c"f", libc::O_RDWR);
    let setattr = |valid: SetattrValid, by| {
        s.fs.setattr(node, &SetattrIn { valid: valid.bits(), size: 1, gid: other, ..Default::default() }, by).map(drop)
    };
    type Change<'a> = (&'a str, &'a dyn Fn(Caller) -> Result<()>);
    let changes: [Change; 6] = [
        ("write", &|by| {
            let write = WriteIn { fh, write_flags: WRITE_KILL_SUIDGID, ..Default::default() };
            s.write_by(node, &write, by, b"x").map(drop)
        }),
        ("io_uring", &|by| {
            let write = WriteIn { fh, write_flags: WRITE_KILL_SUIDGID, ..Default::default() };
            // The kernel writes with the credentials of the thread that asks.
            fs::File::from(s.fs.file_for_write(node, &write, by)?.unwrap()).write_all_at(b"x", 0).unwrap();
            Ok(())
        }),
        ("O_TRUNC", &|by| {
            let open = OpenIn { flags: (libc::O_RDWR | libc::O_TRUNC) as u32, open_flags: OPEN_KILL_SUIDGID };
            answered::<OpenOut>(|reply| s.fs.open(node, &open, by, reply)).map(drop)
        }),
        ("truncate", &|by| setattr(SetattrValid::SIZE | SetattrValid::KILL_SUIDGID, by)),
        ("fallocate", &|by| setattr(SetattrValid::FH, by)),
        ("chown", &|by| setattr(SetattrValid::GID, by)),
    ];
    // Each change is made after each other one, whoever made that.
    let unknown = u32::MAX;
    for (file_group, caller, member) in
        [(group, group, true), (group, other, false), (0, group, false), (0, 0, true), (group, unknown, true)]
    {
        for (name, change) in changes {
            for mode in [0o2644, 0o2744, 0o6644, 0o2755, 0o6775] {
                std::os::unix::fs::chown(&path, Some(user), Some(file_group)).unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
                // The guest hears of the mode.
                s.lookup(c"f").unwrap();
                change(Caller { uid: if caller == unknown { unknown } else { user }, gid: caller, pid: 0 }).unwrap();
                let keeps = member && mode & 0o10 == 0 && (caller, name) != (unknown, "fallocate");
                let kept = if keeps { 0o2777 } else { 0o777 };
                let got = fs::metadata(&path).unwrap().mode() & 0o7777;
                let by = format!("{name} by group {caller} of a file of group {file_group}, {mode:o}");
                assert_eq!(format!("{got:o}"), format!("{:o}", mode & kept), "{by}");
                // What the thread creates next is not its last writer's.
                let made = s.fs.mkdir(ROOT_ID, c"d", 0o755, &ROOT).unwrap();
                assert_eq!((made.attr.uid, made.attr.gid), (0, 0), "{by}");
                s.fs.rmdir(ROOT_ID, c"d").unwrap();
            }
        }
    }
}

/// The guest clears them in a SETATTR. Linux sends none if an OPEN truncates the file.
#[test]
fn a_guest_that_clears_set_id_bits_itself_truncates_by_setattr() {
    let flags = |host, offered| {
        let config = Config { killpriv_v2: host, no_killpriv_v2: !host, ..Config::default() };
        share(config).fs.init(offered).unwrap().flags
    };
    let all = InitFlags::all();
    let truncates = InitFlags::ATOMIC_O_TRUNC;
    assert!(flags(true, all).contains(truncates));
    assert!(!flags(false, all).contains(truncates));
    assert!(!flags(true, all - InitFlags::HANDLE_KILLPRIV_V2).contains(truncates));
}

/// It asks for it in each write that it does not cache, whatever was settled.
#[test]
fn a_direct_write_clears_set_id_bits() {
    if !root() {
        return;
    }
    let s = share(Config { no_killpriv_v2: true, cache: CachePolicy::Never, ..Config::default() });
    s.put("f", b"data");
    let (node, fh) = s.open(c"f", libc::O_RDWR);
    fs::set_permissions(s.dir.path().join("f"), fs::Permissions::from_mode(0o6755)).unwrap();
    s.write(node, fh, 0, b"x", WRITE_KILL_SUIDGID, 0).unwrap();
    assert_eq!(fs::metadata(s.dir.path().join("f")).unwrap().mode() & 0o7777, 0o755);
}

/// setxattr(2) of an ACL that gives the same rights as the mode 0755.
#[test]
fn an_acl_takes_the_set_group_id_bit_from_who_is_not_in_the_group() {
    if !root() {
        return;
    }
    let s = share(Config { posix_acl: Offer::Auto, xattr: true, ..Default::default() });
    s.put("f", b"data");
    let path = s.dir.path().join("f");
    // struct posix_acl_xattr_header and _entry of include/uapi/linux/posix_acl_xattr.h: ACL_USER_OBJ, _GROUP_OBJ and
    // _OTHER.
    let entry = |tag: u16, rights: u16| [tag.to_le_bytes(), rights.to_le_bytes(), [0xff; 2], [0xff; 2]].concat();
    let acl = [vec![2, 0, 0, 0], entry(1, 7), entry(4, 5), entry(0x20, 5)].concat();
    let node = s.lookup(c"f").unwrap().nodeid;
    for (group, by, kept) in [
        (5, None, true),
        (5, Some(Caller { uid: 1000, gid: 5, pid: 0 }), true),
        (5, Some(Caller { uid: 1000, gid: 1000, pid: 0 }), false),
        (0, Some(Caller { uid: 1000, gid: 1000, pid: 0 }), false),
        (0, Some(Caller { uid: u32::MAX, gid: u32::MAX, pid: 0 }), false),
    ] {
        std::os::unix::fs::chown(&path, Some(1000), Some(group)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o2775)).unwrap();
        match s.fs.setxattr(node, c"system.posix_acl_access", &acl, 0, by) {
            Err(Errno::OPNOTSUPP) => return,
            done => done.unwrap(),
        }
        let mode = fs::metadata(&path).unwrap().mode() & 0o7777;
        assert_eq!(format!("{mode:o}"), if kept { "2755" } else { "755" }, "{group} {by:?}");
    }
}

#[test]
fn a_read_only_share_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("f"), b"data").unwrap();
    let config = Config { readonly: true, xattr: true, ..Default::default() };
    let fs = PassthroughFs::new(open_root(dir.path()), proc_self_fd().unwrap(), config).unwrap();
    fs.enter_thread(false);
    fs.init(InitFlags::all()).unwrap();
    let node = fs.lookup(ROOT_ID, c"f").unwrap().nodeid;
    let by = me();
    let fh = open(&fs, node, libc::O_RDONLY).unwrap().fh;
    let rdwr = CreateIn { flags: libc::O_RDWR as u32, ..Default::default() };
    let refused = [
        open(&fs, node, libc::O_RDWR).map(drop),
        open(&fs, node, libc::O_RDONLY | libc::O_TRUNC).map(drop),
        answered::<CreateOut>(|reply| fs.create(ROOT_ID, c"n", &CreateIn::default(), &by, reply)).map(drop),
        answered::<CreateOut>(|reply| fs.tmpfile(ROOT_ID, &rdwr, &by, reply)).map(drop),
        fs.mkdir(ROOT_ID, c"n", 0o755, &by).map(drop),
        fs.mknod(ROOT_ID, c"n", libc::S_IFIFO, 0, &by).map(drop),
        fs.symlink(ROOT_ID, c"n", c"t", &by).map(drop),
        fs.link(node, ROOT_ID, c"n").map(drop),
        fs.rename(ROOT_ID, c"f", ROOT_ID, c"n", 0, &me()),
        fs.unlink(ROOT_ID, c"f"),
        fs.rmdir(ROOT_ID, c"f"),
        fs.setattr(node, &SetattrIn::default(), CALLER).map(drop),
        fs.setxattr(node, c"user.x", b"", 0, None),
        fs.removexattr(node, c"user.x"),
        fs.fallocate(node, &FallocateIn { fh, length: 9, ..Default::default() }),
        fs.access(node, 0, 0, 2),
    ];
    assert_eq!(refused, [Err(Errno::ROFS); 16]);
}

#[test]
fn xattrs_are_mapped() {
    let xattrmap = Some(":map::user.virtiofs.:".parse::<XattrMap>().unwrap());
    let s = share(Config { xattr: true, xattrmap, ..Default::default() });
    s.put("f", b"data");
    let node = s.lookup(c"f").unwrap().nodeid;
    match s.fs.setxattr(node, c"trusted.a", b"value", 0, None) {
        Err(Errno::OPNOTSUPP) => return,
        done => done.unwrap(),
    }
    let mut out = Vec::new();
    assert_eq!(s.fs.getxattr(node, c"trusted.a", 0, &mut out), Ok(5));
    assert_eq!(s.fs.getxattr(node, c"trusted.a", 4, &mut out), Err(Errno::RANGE));
    s.fs.getxattr(node, c"trusted.a", 100, &mut out).unwrap();
    assert_eq!(out, b"value");
    s.fs.listxattr(node, 100, &mut out).unwrap();
    assert_eq!(out, b"trusted.a\0");
    assert_eq!(s.fs.listxattr(node, 0, &mut out), Ok(10));
    assert_eq!(s.fs.listxattr(node, 9, &mut out), Err(Errno::RANGE));

    // The kernel does not know that this attribute has a file's capabilities.
    s.fs.setxattr(node, c"security.capability", b"caps", 0, None).unwrap();
    let (node, fh) = s.open(c"f", libc::O_RDWR);
    s.write(node, fh, 0, b"x", 0, 0).unwrap();
    assert_eq!(s.fs.getxattr(node, c"security.capability", 0, &mut out), Err(Errno::NODATA));
    s.fs.removexattr(node, c"trusted.a").unwrap();
    assert_eq!(plain().fs.getxattr(ROOT_ID, c"user.x", 0, &mut out), Err(Errno::NOSYS));
}

#[test]
fn a_label_comes_with_the_file() {
    let xattrmap = Some(":map:security.selinux:user.virtiofs.:".parse::<XattrMap>().unwrap());
    let s = share(Config { xattr: true, xattrmap, security_label: Offer::Always, ..Default::default() });
    let by = Creator { label: Some((c"security.selinux", b"a:b:c\0")), ..me() };
    let dir = match s.fs.mkdir(ROOT_ID, c"d", 0o755, &by) {
        Err(Errno::OPNOTSUPP) => return,
        made => made.unwrap(),
    };
    let create = CreateIn { flags: libc::O_RDWR as u32, mode: 0o600, ..Default::default() };
    let make = |name, by: &Creator| answered::<CreateOut>(|reply| s.fs.create(ROOT_ID, name, &create, by, reply));
    let file = make(c"f", &by).unwrap().entry;
    let mut out = Vec::new();
    for node in [dir.nodeid, file.nodeid] {
        s.fs.getxattr(node, c"security.selinux", 100, &mut out).unwrap();
        assert_eq!(out, b"a:b:c\0");
    }
    let bad = Creator { label: Some((c"user.virtiofs.x", b"v")), ..me() };
    assert!(s.fs.mkdir(ROOT_ID, c"bad", 0o755, &bad).is_err());
    assert!(make(c"bad", &bad).is_err());
    assert_eq!(s.lookup(c"bad").err(), Some(Errno::NOENT));
}

fn lock(s: &Share, node: u64, fh: u64, owner: u64, kind: i32, flags: u32, wait: bool) -> Result<Option<LockWait>> {
    let lk = FileLock { start: 0, end: i64::MAX as u64, kind: kind as u32, pid: 1 };
    let unique = 1000 + owner;
    s.fs.setlk(node, unique, &LkIn { fh, owner, lk, lk_flags: flags, padding: 0 }, wait)
}

#[test]
fn a_wait_for_a_lock_leaves_the_queue_and_ends() {
    let s = share(Config { posix_lock: true, flock: true, ..Default::default() });
    s.put("f", b"data");
    for flags in [0, LK_FLOCK] {
        let (node, a) = s.open(c"f", libc::O_RDWR);
        let (_, b) = s.open(c"f", libc::O_RDWR);
        let (_, c) = s.open(c"f", libc::O_RDWR);
        assert!(lock(&s, node, a, 1, libc::F_WRLCK, flags, true).unwrap().is_none());
        assert_eq!(lock(&s, node, b, 2, libc::F_WRLCK, flags, false).err(), Some(Errno::AGAIN));
        let waiting = |fh, owner| match lock(&s, node, fh, owner, libc::F_WRLCK, flags, true).unwrap() {
            Some(wait) => std::thread::spawn(wait),
            None => panic!("the lock was free"),
        };
        let (second, third) = (waiting(b, 2), waiting(c, 3));
        s.fs.getattr(node, None).unwrap();
        s.fs.interrupt(1003);
        assert_eq!(third.join().unwrap(), Err(Errno::INTR));
        assert!(!second.is_finished());
        assert!(lock(&s, node, a, 1, libc::F_UNLCK, flags, false).unwrap().is_none());
        assert_eq!(second.join().unwrap(), Ok(()));
        assert_eq!(lock(&s, node, a, 1, libc::F_WRLCK, flags, false).err(), Some(Errno::AGAIN));

        // The close drops the lock.
        s.fs.flush(node, b, 2).unwrap();
        s.fs.release(node, &ReleaseIn { fh: b, ..Default::default() }).unwrap();
        assert!(lock(&s, node, a, 1, libc::F_WRLCK, flags, false).is_ok());

        // A wait that is dropped leaves nothing behind.
        drop(lock(&s, node, c, 4, libc::F_WRLCK, flags, true).unwrap());

        // The session's end ends waits and drops locks.
        let waiting = waiting(c, 4);
        s.fs.destroy();
        assert_eq!(waiting.join().unwrap(), Err(Errno::INTR));
    }
}

#[test]
fn a_deadlock_is_refused() {
    let s = share(Config { posix_lock: true, ..Default::default() });
    s.put("f", b"data");
    let (node, fh) = s.open(c"f", libc::O_RDWR);
    let set = |owner: u64, at: u64, wait| {
        let lk = FileLock { start: at, end: at, kind: libc::F_WRLCK as u32, pid: 1 };
        s.fs.setlk(node, 1000 + owner, &LkIn { fh, owner, lk, ..Default::default() }, wait)
    };
    for owner in 1..=3 {
        assert!(set(owner, owner, true).unwrap().is_none());
    }
    let wait = |owner, at| match set(owner, at, true).unwrap() {
        Some(wait) => std::thread::spawn(wait),
        None => panic!("the lock was free"),
    };
    let (one, two) = (wait(1, 2), wait(2, 3));
    assert_eq!(set(3, 1, true).err(), Some(Errno::DEADLK));
    assert_eq!(set(3, 1, false).err(), Some(Errno::AGAIN));
    s.fs.flush(node, fh, 3).unwrap();
    assert_eq!(two.join().unwrap(), Ok(()));
    let three = wait(3, 3);
    s.fs.flush(node, fh, 2).unwrap();
    assert_eq!((one.join().unwrap(), three.join().unwrap()), (Ok(()), Ok(())));
}

#[test]
fn locks_of_the_open_file_go_with_it() {
    let s = share(Config { posix_lock: true, ..Default::default() });
    s.put("f", b"data");
    let (node, a) = s.open(c"f", libc::O_RDWR);
    let (_, b) = s.open(c"f", libc::O_RDWR);
    assert!(lock(&s, node, a, 1, libc::F_WRLCK, 0, false).is_ok());
    s.fs.flush(node, a, 99).unwrap();
    assert_eq!(lock(&s, node, b, 2, libc::F_WRLCK, 0, false).err(), Some(Errno::AGAIN));
    s.fs.release(node, &ReleaseIn { fh: a, ..Default::default() }).unwrap();
    assert!(lock(&s, node, b, 2, libc::F_WRLCK, 0, false).is_ok());
}

#[test]
fn lock_ranges() {
    let s = share(Config { posix_lock: true, ..Default::default() });
    s.put("f", b"data");
    let (node, fh) = s.open(c"f", libc::O_RDWR);
    let lk = |start, end, kind: i32| FileLock { start, end, kind: kind as u32, pid: 1 };
    let set = |owner, lk| s.fs.setlk(node, 0, &LkIn { fh, owner, lk, ..Default::default() }, false).map(drop);
    set(1, lk(10, 19, libc::F_WRLCK)).unwrap();
    assert_eq!(set(2, lk(19, 19, libc::F_RDLCK)), Err(Errno::AGAIN));
    set(2, lk(20, i64::MAX as u64, libc::F_RDLCK)).unwrap();
    let get = |owner, lk| s.fs.getlk(node, &LkIn { fh, owner, lk, ..Default::default() }).map(|out| out.lk);
    assert_eq!(get(3, lk(0, 15, libc::F_RDLCK)), Ok(FileLock { pid: 0, ..lk(10, 19, libc::F_WRLCK) }));
    assert_eq!(get(3, lk(30, 40, libc::F_WRLCK)).unwrap().end, i64::MAX as u64);
    assert_eq!(get(3, lk(0, 9, libc::F_WRLCK)).unwrap().kind, libc::F_UNLCK as u32);
    for bad in [lk(9, 3, libc::F_RDLCK), lk(u64::MAX, 0, libc::F_RDLCK), lk(0, 1, 99)] {
        assert_eq!(set(1, bad), Err(Errno::INVAL));
    }
}

#[test]
fn a_temporary_file_gets_a_name() {
    let s = plain();
    let create = CreateIn { flags: libc::O_RDWR as u32, mode: 0o600, ..Default::default() };
    let made = answered(|reply| s.fs.tmpfile(ROOT_ID, &create, &me(), reply));
    let CreateOut { entry, open } = match made {
        Err(Errno::OPNOTSUPP) => return,
        made => made.unwrap(),
    };
    s.write(entry.nodeid, open.fh, 0, b"data", 0, 0).unwrap();
    assert_eq!(fs::read_dir(s.dir.path()).unwrap().count(), 0);
    let linked = s.fs.link(entry.nodeid, ROOT_ID, c"named").unwrap();
    assert_eq!(linked.nodeid, entry.nodeid);
    assert_eq!(s.host("named"), b"data");
}

#[test]
fn names_have_up_to_255_bytes_of_any_kind() {
    let s = plain();
    let long = CString::new(vec![0xff; 255]).unwrap();
    s.fs.mkdir(ROOT_ID, &long, 0o755, &me()).unwrap();
    assert!(s.dir.path().join(std::ffi::OsStr::from_bytes(long.to_bytes())).is_dir());
    let longer = CString::new(vec![b'a'; 256]).unwrap();
    assert_eq!(s.fs.mkdir(ROOT_ID, &longer, 0o755, &me()).err(), Some(Errno::NAMETOOLONG));
    assert_eq!(s.lookup(&longer).err(), Some(Errno::NAMETOOLONG));
}

#[test]
fn the_number_of_locks_is_limited() {
    let s = share(Config { posix_lock: true, ..Default::default() });
    s.put("f", b"data");
    let (node, fh) = s.open(c"f", libc::O_RDWR);
    let set = |owner, start, end, kind: i32| {
        let lk = FileLock { start, end, kind: kind as u32, pid: 1 };
        s.fs.setlk(node, 0, &LkIn { fh, owner, lk, ..Default::default() }, false).map(drop)
    };
    let all = i64::MAX as u64;
    let refused = limits::Limit::Locks.times();
    let count = (0..).find(|n| set(1, 2 * n, 2 * n, libc::F_WRLCK).is_err()).unwrap();
    assert!((limits::LOCKS - 10..limits::LOCKS).contains(&(count as usize)), "{count}");
    assert_eq!(set(1, 2 * count, 2 * count, libc::F_WRLCK), Err(Errno::NOLCK));
    assert_eq!(set(2, 1, 1, libc::F_RDLCK), Err(Errno::NOLCK));
    assert!(limits::Limit::Locks.times() >= refused + 3);
    set(1, 2 * count - 2, 2 * count - 2, libc::F_UNLCK).unwrap();
    set(2, 1, 1, libc::F_RDLCK).unwrap();

    // Unlocked parts between locks count too.
    s.fs.flush(node, fh, 2).unwrap();
    s.fs.flush(node, fh, 1).unwrap();
    set(1, 0, all, libc::F_WRLCK).unwrap();
    let holes = (1..).find(|n| set(1, 2 * n, 2 * n, libc::F_UNLCK).is_err()).unwrap();
    assert!((limits::LOCKS - 10..limits::LOCKS).contains(&(holes as usize)), "{holes}");
    set(1, 0, all, libc::F_UNLCK).unwrap();
    set(1, 0, all, libc::F_WRLCK).unwrap();
}

#[test]
fn asking_about_a_lock_leaves_nothing_behind() {
    let s = share(Config { posix_lock: true, ..Default::default() });
    s.put("f", b"data");
    let (node, fh) = s.open(c"f", libc::O_RDWR);
    let before = s.descriptors();
    for owner in 0..100 {
        let lk = FileLock { start: 0, end: 9, kind: libc::F_WRLCK as u32, pid: 1 };
        s.fs.getlk(node, &LkIn { fh, owner, lk, ..Default::default() }).unwrap();
        let lk = FileLock { kind: libc::F_UNLCK as u32, ..lk };
        assert!(s.fs.setlk(node, 0, &LkIn { fh, owner, lk, ..Default::default() }, false).unwrap().is_none());
    }
    assert_eq!(s.descriptors(), before);
}

#[test]
fn the_number_of_known_files_is_limited() {
    let s = share(Config { max_inodes: 5, ..Default::default() });
    for n in 0..10 {
        s.put(&format!("f{n}"), b"");
    }
    let nodes: Vec<u64> = [c"f0", c"f1", c"f2", c"f3"].map(|name| s.lookup(name).unwrap().nodeid).into();
    assert_eq!(s.lookup(c"f4").err(), Some(Errno::NFILE));
    assert_eq!(s.fs.mkdir(ROOT_ID, c"d", 0o755, &me()).err(), Some(Errno::NFILE));
    let create = CreateIn { flags: libc::O_RDWR as u32, mode: 0o600, ..Default::default() };
    assert_eq!(
        answered::<CreateOut>(|reply| s.fs.create(ROOT_ID, c"n", &create, &me(), reply)).err(),
        Some(Errno::NFILE)
    );
    assert_eq!(fs::read_dir(s.dir.path()).unwrap().count(), 10);
    let listed = s.list_plus();
    assert_eq!((listed.len(), listed.iter().filter(|(_, entry)| entry.nodeid != 0).count()), (12, 4));
    // Known files are still served.
    assert_eq!(s.lookup(c"f0").unwrap().nodeid, nodes[0]);
    s.fs.getattr(nodes[1], None).unwrap();
    s.fs.forget(nodes[2], 2);
    s.lookup(c"f4").unwrap();
    s.fs.destroy();
    assert_eq!(s.fs.known_inodes(), 1);
}

#[test]
fn few_listings_keep_a_buffer_and_all_are_complete() {
    let s = plain();
    let names: Vec<String> = (0..20).map(|n| format!("f{n}")).collect();
    names.iter().for_each(|name| s.put(name, b""));
    let list = |fh, offset, room| {
        let mut list = List { room, ..Default::default() };
        s.fs.readdir(ROOT_ID, fh, offset, &mut list).unwrap();
        (list.entries, list.offset)
    };
    let fhs: Vec<u64> = (0..limits::LISTINGS + 100).map(|_| s.fs.opendir(ROOT_ID, 0).unwrap().fh).collect();
    let refused = limits::Limit::Listings.times();
    let begun: Vec<_> = fhs.iter().map(|fh| list(*fh, 0, 3)).collect();
    assert_eq!(s.fs.listings.kept(), limits::LISTINGS);
    assert!(limits::Limit::Listings.times() >= refused + 100);
    for (fh, (first, mut offset)) in fhs.iter().zip(begun) {
        let mut seen: Vec<String> = first.into_iter().map(|(name, _)| name).collect();
        loop {
            let (more, next) = list(*fh, offset, 3);
            if more.is_empty() {
                break;
            }
            (offset, ()) = (next, seen.extend(more.into_iter().map(|(name, _)| name)));
        }
        seen.retain(|name| !name.starts_with('.'));
        seen.sort_by_key(|name| name[1..].parse::<u32>().unwrap());
        assert_eq!(seen, names);
    }
    assert_eq!(s.fs.listings.kept(), 0);
    list(fhs[0], 0, 3);
    s.fs.releasedir(ROOT_ID, fhs[0]).unwrap();
    assert_eq!(s.fs.listings.kept(), 0);
}

/// A frontend and a window process that do everything at once.
struct Obliging;

impl Frontend for Obliging {
    fn is_running(&self) -> bool {
        true
    }

    fn map(&self, _: &Mapping) -> io::Result<()> {
        Ok(())
    }

    fn unmap(&self, _: &Mapping) -> io::Result<()> {
        Ok(())
    }

    fn mapped(&self, _: &Mapping) -> usize {
        0
    }
}

impl ProxyFiles for Obliging {
    fn open(&self, _: u64, _: Kind, real: BorrowedFd) -> io::Result<Opened> {
        Ok(Opened { fd: real.try_clone_to_owned()?, guarded: true })
    }

    fn invalidate(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn watch(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn next_event(&self) -> Option<Event> {
        loop {
            std::thread::park();
        }
    }
}

#[test]
fn a_cold_read_leaves_the_worker_while_files_are_mapped() {
    // On a disk, whose pages can be dropped from memory.
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let kind = rustix::fs::statfs(dir.path()).unwrap().f_type;
    if !matches!(kind, libc::EXT4_SUPER_MAGIC | libc::XFS_SUPER_MAGIC) {
        return;
    }
    for name in ["mapped", "other"] {
        fs::write(dir.path().join(name), [7; 100_000]).unwrap();
        fs::File::open(dir.path().join(name)).unwrap().sync_all().unwrap();
    }
    let window = Window::new(RANGE, None, Arc::new(Obliging)).unwrap();
    window.connect(Arc::new(Obliging));
    window.announce();
    let fs = PassthroughFs::new(open_root(dir.path()), proc_self_fd().unwrap(), Config::default()).unwrap();
    let s = Share { dir, fs: Arc::new(fs.with_window(Some(window))) };
    s.fs.enter_thread(false);
    s.fs.init(InitFlags::all()).unwrap();
    // Whether io_uring does the read.
    let cold_read = |(node, fh), name: &str| {
        let file = fs::File::open(s.dir.path().join(name)).unwrap();
        // A page may stay in memory for a while, or the disk may be quick.
        let limit = std::time::Instant::now() + Duration::from_secs(30);
        let leaves = || {
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            let mut data = vec![0; 100_000];
            let mut to = IoVecs::default();
            // SAFETY: `data` outlives the list.
            unsafe { to.push(data.as_mut_ptr(), data.len(), true) };
            let read = ReadIn { fh, size: 100_000, ..Default::default() };
            s.fs.read(node, &read, &to.range(0..100_000)) == Err(WOULD_WAIT)
        };
        while !leaves() {
            assert!(std::time::Instant::now() < limit, "{name} is read on the worker");
        }
        match s.fs.file_for_read(node, &ReadIn { fh, ..Default::default() }) {
            Err(errno) => {
                assert_eq!(errno, WOULD_WAIT);
                false
            }
            Ok(_) => true,
        }
    };
    let (mapped, other) = (s.open(c"mapped", libc::O_RDWR), s.open(c"other", libc::O_RDWR));
    assert!(cold_read(mapped, "mapped") && cold_read(other, "other"));
    let map = SetupmappingIn { fh: mapped.1, len: RANGE, ..Default::default() };
    answered::<()>(|reply| s.fs.setupmapping(mapped.0, &map, reply)).unwrap();
    assert!(s.fs.has_mappings());
    assert!(!cold_read(mapped, "mapped"));
    assert!(cold_read(other, "other"));
    let unmap = RemovemappingOne { moffset: 0, len: RANGE };
    answered::<()>(|reply| s.fs.removemapping(&[unmap], reply)).unwrap();
    assert!(cold_read(mapped, "mapped"));
}

/// A share with a DAX window of 10 ranges, of which the guest keeps 2 free.
fn windowed(dir: TempDir) -> Share {
    let window = Window::new(10 * RANGE, None, Arc::new(Obliging)).unwrap();
    window.connect(Arc::new(Obliging));
    window.announce();
    let config = Config { dax_min_size: RANGE, ..Default::default() };
    let fs = PassthroughFs::new(open_root(dir.path()), proc_self_fd().unwrap(), config).unwrap();
    let s = Share { dir, fs: Arc::new(fs.with_window(Some(window))) };
    s.fs.enter_thread(false);
    s.fs.init(InitFlags::all()).unwrap();
    s
}

#[test]
fn no_more_files_are_mapped_than_fit_into_the_window() {
    let s = windowed(tempfile::tempdir().unwrap());
    let set = |name: &str, ranges: u64| {
        let file = fs::File::options().create(true).truncate(false).write(true).open(s.dir.path().join(name)).unwrap();
        file.set_len(ranges * RANGE).unwrap();
    };
    let dax = |name: &CStr| s.lookup(name).unwrap().attr.flags & ATTR_DAX != 0;
    let now = |node| s.fs.getattr(node, None).unwrap().attr.flags & ATTR_DAX != 0;
    for (name, ranges) in [("five", 5), ("three", 3), ("one", 1), ("nine", 9)] {
        set(name, ranges);
    }
    let five = s.lookup(c"five").unwrap().nodeid;
    let one = s.lookup(c"one").unwrap().nodeid;
    assert!(dax(c"five") && dax(c"one") && !dax(c"three") && !dax(c"nine"));
    // ACCESS gives nothing away, and takes nothing.
    s.fs.access(s.lookup(c"three").unwrap().nodeid, 0, 0, 4).unwrap();
    // What is forgotten makes room. An inode lives until its last reference is gone.
    s.fs.forget(five, 1);
    assert!(!dax(c"three") && now(five));
    s.fs.forget(five, 1);
    assert!(dax(c"three") && dax(c"one") && dax(c"three"));
    // It grows past the room: the guest is to give it up, and has it until then.
    set("one", 6);
    assert!(!now(one));
    set("one", 1);
    assert!(!now(one) && !dax(c"five"));
    s.fs.forget(one, u64::MAX);
    assert!(dax(c"one") && !dax(c"five"));
    s.fs.destroy();
    assert!(dax(c"five") && !dax(c"nine"));
}

#[test]
fn an_open_that_fails_takes_no_part_of_the_window() {
    let s = windowed(tempfile::tempdir().unwrap());
    for name in ["a", "b"] {
        fs::File::create(s.dir.path().join(name)).unwrap().set_len(5 * RANGE).unwrap();
    }
    // Another process holds a lease on the first file, so this CREATE fails.
    let held = fs::File::open(s.dir.path().join("a")).unwrap();
    // SAFETY: the descriptor is open.
    assert_eq!(unsafe { libc::fcntl(held.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) }, 0);
    let create = CreateIn { flags: libc::O_RDWR as u32, mode: 0o644, ..Default::default() };
    let failed = answered::<CreateOut>(|reply| s.fs.create(ROOT_ID, c"a", &create, &me(), reply));
    assert_eq!(failed.err(), Some(Errno::STALE));
    assert_eq!(s.lookup(c"b").unwrap().attr.flags, ATTR_DAX);
}
