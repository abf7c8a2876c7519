//! Sessions that move from one file system to another over the same directory.

use std::ffi::CStr;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_move, unmount};
use tempfile::TempDir;
use thruway_guest::protocol::ops;

use super::format::{HandleState, Location, State};
use crate::fs::tests::List;
use crate::fs::tests::lease::Ears;
use crate::fs::{Config, FileHandles, Migration, MigrationMode, MigrationOnError, PassthroughFs, proc_self_fd};
use crate::fuse::Server;
use crate::fuse::abi::*;
use crate::fuse::buf::IoVecs;
use crate::fuse::ops::*;
use crate::watch::Watch;

const PATHS: Migration = Migration {
    mode: MigrationMode::FindPaths,
    on_error: MigrationOnError::Abort,
    verify_handles: false,
    confirm_paths: false,
    trust_handles: false,
};
const VERIFY: Migration = Migration { verify_handles: true, confirm_paths: true, ..PATHS };
const HANDLES: Migration = Migration { mode: MigrationMode::FileHandles, trust_handles: true, ..PATHS };

/// A share on a disk: a tmpfs may have no file handles.
struct Share(TempDir);

impl Share {
    fn new() -> Self {
        Self(TempDir::new_in("/var/tmp").unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn put(&self, name: &str, data: &str) {
        fs::write(self.path(name), data).unwrap();
    }

    /// A daemon without a session.
    fn daemon(&self, migration: Migration, inode_file_handles: FileHandles) -> PassthroughFs {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(self.0.path(), flags, Mode::empty()).unwrap();
        let config = Config { migration, inode_file_handles, ..Config::default() };
        let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), config).unwrap();
        fs.enter_thread(false);
        fs
    }

    fn source(&self, migration: Migration) -> (PassthroughFs, InitFlags) {
        let fs = self.daemon(migration, FileHandles::Never);
        let flags = fs.init(InitFlags::all()).unwrap().flags;
        (fs, flags)
    }

    /// A daemon that has taken over a session.
    fn target(&self, migration: Migration, flags: InitFlags, state: &[u8]) -> std::io::Result<PassthroughFs> {
        let fs = self.daemon(migration, FileHandles::Never);
        fs.load(flags, state).map(|()| fs)
    }
}

fn has_handles() -> bool {
    let share = Share::new();
    let root = rustix::fs::open(share.0.path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let config = Config { inode_file_handles: FileHandles::Mandatory, ..Config::default() };
    let has = PassthroughFs::new(root, proc_self_fd().unwrap(), config).is_ok();
    if !has {
        eprintln!("no file handles here: not tested with them");
    }
    has
}

fn lookup(fs: &PassthroughFs, path: &str) -> u64 {
    path.split('/').fold(ROOT_ID, |node, name| {
        let name = std::ffi::CString::new(name).unwrap();
        fs.lookup(node, &name).unwrap().nodeid
    })
}

fn open(fs: &PassthroughFs, node: u64, flags: i32) -> u64 {
    super::super::tests::open(fs, node, flags).unwrap().fh
}

fn write(fs: &PassthroughFs, node: u64, fh: u64, offset: u64, data: &str) -> Result<usize> {
    let mut data = data.as_bytes().to_vec();
    let mut vecs = IoVecs::default();
    // SAFETY: `data` outlives the list.
    unsafe { vecs.push(data.as_mut_ptr(), data.len(), true) };
    fs.write(
        node,
        &WriteIn { fh, offset, ..Default::default() },
        Caller { uid: 0, gid: 0, pid: 0 },
        &vecs.range(0..usize::MAX),
    )
}

fn read(fs: &PassthroughFs, node: u64, fh: u64) -> Result<usize> {
    let mut data = [0; 16];
    let mut vecs = IoVecs::default();
    // SAFETY: `data` outlives the list.
    unsafe { vecs.push(data.as_mut_ptr(), data.len(), true) };
    let n = fs.read(node, &ReadIn { fh, ..Default::default() }, &vecs.range(0..16));
    assert_ne!(n, Err(WOULD_WAIT), "what was written just now is in memory");
    n
}

fn ino(fs: &PassthroughFs, node: u64) -> Result<u64> {
    fs.getattr(node, None).map(|out| out.attr.ino)
}

fn list(fs: &PassthroughFs, node: u64, fh: u64, list: &mut List, room: usize) {
    list.room = room;
    fs.readdirplus(node, fh, list.offset, list).unwrap();
}

fn goes_on(migration: Migration, target_handles: FileHandles) {
    let share = Share::new();
    fs::create_dir_all(share.path("a/b")).unwrap();
    share.put("a/b/file", "0123456789");
    share.put("read", "only");
    symlink("/etc", share.path("link")).unwrap();
    mknodat(CWD, share.path("fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
    for n in 0..20 {
        share.put(&format!("a/entry {n}"), "");
    }
    let (source, flags) = share.source(migration);
    let known: Vec<u64> = ["a", "a/b", "a/b/file", "read", "link", "fifo"].iter().map(|p| lookup(&source, p)).collect();
    let (dir, file, ro) = (known[0], known[2], known[3]);
    let before = open(&source, ro, libc::O_RDONLY);
    let fh = open(&source, file, libc::O_RDWR);
    let read_only = open(&source, ro, libc::O_RDONLY);
    // Leaves a free slot before others.
    source.release(ro, &ReleaseIn { fh: before, ..Default::default() }).unwrap();
    let listing = source.opendir(dir, 0).unwrap().fh;
    let mut all = List::default();
    list(&source, dir, listing, &mut all, 7);
    write(&source, file, fh, 0, "source").unwrap();

    let target = share.daemon(migration, target_handles);
    target.load(flags, &source.save().unwrap()).unwrap();
    for node in known.iter().chain(all.entries.iter().map(|(_, entry)| &entry.nodeid)).filter(|node| **node != 0) {
        assert_eq!(ino(&source, *node), ino(&target, *node), "{node}");
    }
    assert_eq!(target.known_inodes(), source.known_inodes());
    assert_eq!(write(&target, file, fh, 6, "target"), Ok(6));
    assert_eq!(fs::read_to_string(share.path("a/b/file")).unwrap(), "sourcetarget");
    assert_eq!((read(&target, ro, read_only), write(&target, ro, read_only, 0, "x")), (Ok(4), Err(Errno::BADF)));
    assert_eq!(read(&target, ro, before), Err(Errno::BADF));
    drop(source);
    list(&target, dir, listing, &mut all, 100);
    let mut names: Vec<_> = all.entries.iter().map(|(name, _)| name).collect();
    names.sort();
    names.dedup();
    assert_eq!((names.len(), all.entries.len()), (23, 23));
    // The guest has the source's references, and one more.
    assert_eq!(lookup(&target, "read"), ro);
    target.release(ro, &ReleaseIn { fh: read_only, ..Default::default() }).unwrap();
    target.forget(ro, 1);
    assert!(ino(&target, ro).is_ok());
    target.forget(ro, 1);
    assert_eq!(ino(&target, ro), Err(Errno::STALE));
    // New files get unused numbers.
    share.put("new", "");
    let new = lookup(&target, "new");
    let fhs: Vec<u64> = (0..10).map(|_| open(&target, new, libc::O_RDONLY)).collect();
    assert!(!known.contains(&new) && !fhs.contains(&fh) && !fhs.contains(&listing));
    assert_eq!(write(&target, file, fh, 0, "target"), Ok(6));
    // The session can move again.
    let next = share.target(migration, flags, &target.save().unwrap()).unwrap();
    assert_eq!(write(&next, file, fh, 0, "next"), Ok(4));
}

#[test]
fn a_session_goes_on_by_paths() {
    goes_on(PATHS, FileHandles::Never);
    goes_on(PATHS, FileHandles::Prefer);
}

#[test]
fn a_session_goes_on_by_handles() {
    if has_handles() {
        for target in [FileHandles::Never, FileHandles::Prefer] {
            goes_on(VERIFY, target);
            goes_on(HANDLES, target);
        }
    }
}

#[test]
fn files_that_the_host_moved_are_found() {
    let share = Share::new();
    fs::create_dir(share.path("d")).unwrap();
    share.put("renamed", "1");
    share.put("d/linked", "2");
    share.put("deleted (deleted)", "3");
    let (source, flags) = share.source(PATHS);
    let nodes: Vec<u64> = ["renamed", "d/linked", "deleted (deleted)"].iter().map(|p| lookup(&source, p)).collect();
    let inos: Vec<_> = nodes.iter().map(|node| ino(&source, *node).unwrap()).collect();
    fs::rename(share.path("renamed"), share.path("d/elsewhere")).unwrap();
    fs::hard_link(share.path("d/linked"), share.path("other name")).unwrap();
    fs::remove_file(share.path("d/linked")).unwrap();
    let target = share.target(PATHS, flags, &source.save().unwrap()).unwrap();
    assert_eq!(nodes.iter().map(|node| ino(&target, *node).unwrap()).collect::<Vec<_>>(), inos);
}

#[test]
fn a_removed_file_is_lost_without_its_handle() {
    let share = Share::new();
    share.put("gone", "data");
    share.put("kept", "data");
    for migration in [PATHS, VERIFY] {
        share.put("gone", "data");
        let (source, flags) = share.source(migration);
        let (gone, kept) = (lookup(&source, "gone"), lookup(&source, "kept"));
        let (gone_fh, kept_fh) = (open(&source, gone, libc::O_RDWR), open(&source, kept, libc::O_RDWR));
        fs::remove_file(share.path("gone")).unwrap();
        let state = source.save().unwrap();
        assert_eq!(share.target(migration, flags, &state).err().map(|e| e.kind()), Some(ErrorKind::NotFound));
        // The source goes on.
        assert_eq!(read(&source, gone, gone_fh), Ok(4));

        let lenient = Migration { on_error: MigrationOnError::GuestError, ..migration };
        let target = share.target(lenient, flags, &state).unwrap();
        assert_eq!(read(&target, kept, kept_fh), Ok(4));
        assert_eq!((ino(&target, gone), read(&target, gone, gone_fh)), (Err(Errno::IO), Err(Errno::IO)));
        assert_eq!(super::super::tests::open(&target, gone, 0).err(), Some(Errno::IO));
        assert_eq!(target.getattr(gone, Some(gone_fh)).err(), Some(Errno::IO));
        // A new file of that name is not taken for the old one.
        share.put("gone", "another");
        assert_ne!(lookup(&target, "gone"), gone);
        assert!(target.release(gone, &ReleaseIn { fh: gone_fh, ..Default::default() }).is_err());
        assert_eq!(read(&target, gone, gone_fh), Err(Errno::BADF));
        target.forget(gone, 1);
        assert_eq!(ino(&target, gone), Err(Errno::STALE));
    }
}

#[test]
fn a_removed_file_moves_by_its_handle() {
    if !has_handles() {
        return;
    }
    let share = Share::new();
    share.put("gone", "data");
    let (source, flags) = share.source(HANDLES);
    let node = lookup(&source, "gone");
    let fh = open(&source, node, libc::O_RDWR);
    fs::remove_file(share.path("gone")).unwrap();
    let state = source.save().unwrap();
    let refused = share.target(PATHS, flags, &state).err().unwrap();
    assert!(refused.to_string().contains("--migration-mode=file-handles"));
    let target = share.target(Migration { trust_handles: true, ..PATHS }, flags, &state).unwrap();
    assert_eq!((read(&target, node, fh), write(&target, node, fh, 4, "more")), (Ok(4), Ok(4)));
    drop((source, target));
    // Nothing holds it any more.
    assert!(share.target(HANDLES, flags, &state).is_err());
}

/// A tmpfs in a share.
struct Mounted(PathBuf);

impl Mounted {
    fn new(path: PathBuf) -> Option<Self> {
        fs::create_dir(&path).unwrap();
        mount("tmpfs", &path, "tmpfs", MountFlags::empty(), None).ok()?;
        Some(Self(path))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

#[test]
fn submounts_move_with_it() {
    let share = Share::new();
    fs::create_dir(share.path("dir")).unwrap();
    let Some(mounted) = Mounted::new(share.path("dir/mount")) else {
        return eprintln!("cannot mount: not tested");
    };
    fs::create_dir(share.path("dir/mount/sub")).unwrap();
    share.put("dir/mount/sub/file", "data");
    share.put("dir/mount/removed", "data");
    for migration in [PATHS, VERIFY, HANDLES] {
        share.put("dir/mount/removed", "data");
        let (source, flags) = share.source(migration);
        let by_handle = migration.mode == MigrationMode::FileHandles;
        let removed = by_handle.then(|| lookup(&source, "dir/mount/removed"));
        fs::remove_file(share.path("dir/mount/removed")).unwrap();
        let nodes: Vec<u64> = ["dir", "dir/mount", "dir/mount/sub/file"].iter().map(|p| lookup(&source, p)).collect();
        let state = source.save().unwrap();
        let target = share.target(migration, flags, &state).unwrap();
        for node in nodes.iter().chain(&removed) {
            assert_eq!((ino(&source, *node), target.getattr(*node, None).is_ok()), (ino(&target, *node), true));
        }
        let root = share.0.path().join("dir/mount");
        if by_handle {
            // Another file system there is not taken for the old one.
            let other = Mounted::new(root.join("..").join("other")).unwrap();
            mount_move(&other.0, &root).unwrap();
            assert!(share.target(migration, flags, &state).is_err());
            unmount(&root, UnmountFlags::DETACH).unwrap();
        }
    }
    drop(mounted);
}

#[test]
fn a_replaced_file_is_seen() {
    let share = Share::new();
    share.put("file", "old");
    share.put("was a file", "old");
    let (source, flags) = share.source(VERIFY);
    let (file, other) = (lookup(&source, "file"), lookup(&source, "was a file"));
    let state = source.save().unwrap();
    // The old file stays, so that the new one cannot get its inode number.
    fs::rename(share.path("file"), share.path("old")).unwrap();
    share.put("file", "new");
    if has_handles() {
        let text = share.target(VERIFY, flags, &state).err().unwrap().to_string();
        assert!(text.contains("'file'"), "{text}");
        let lenient = Migration { on_error: MigrationOnError::GuestError, ..PATHS };
        let target = share.target(lenient, flags, &state).unwrap();
        assert_eq!((ino(&target, file), ino(&target, other).is_ok()), (Err(Errno::IO), true));
    }
    let (source, flags) = share.source(PATHS);
    lookup(&source, "was a file");
    let state = source.save().unwrap();
    fs::rename(share.path("was a file"), share.path("moved")).unwrap();
    fs::create_dir(share.path("was a file")).unwrap();
    assert!(share.target(PATHS, flags, &state).is_err());
}

#[test]
fn options_must_fit_the_session() {
    let share = Share::new();
    let (source, flags) = share.source(PATHS);
    let state = source.save().unwrap();
    for more in [InitFlags::WRITEBACK_CACHE, InitFlags::POSIX_ACL] {
        assert!(share.target(PATHS, flags | more, &state).err().unwrap().to_string().contains("options"));
    }
}

/// The host may have changed anything meanwhile, and the target has not seen it.
#[test]
fn the_agent_looks_at_everything_after_a_move() {
    let share = Share::new();
    fs::create_dir(share.path("dir")).unwrap();
    share.put("file", "");
    let (source, flags) = share.source(PATHS);
    let nodes = [ROOT_ID, lookup(&source, "dir"), lookup(&source, "file")];
    let target = share.daemon(PATHS, FileHandles::Never).with_watch(Some(Watch::new().unwrap())).unwrap();
    target.destroy();
    target.load(flags, &source.save().unwrap()).unwrap();
    let target = Arc::new(target);
    let ears = Ears::of(&target);
    // Until the agent has looked, the guest may know what is stale. It gets no lease, and nothing is watched.
    let lease = Config::default().lease_timeout.as_secs();
    let valid = || target.lookup(ROOT_ID, c"file").unwrap().entry_valid;
    let marks = || target.watched().unwrap().marks;
    assert!(valid() < lease && marks() == 0);
    ears.register(&target);
    assert!(valid() == lease && marks() > 0);
    let told = ears.told.lock();
    assert!(told.iter().all(|change| change.ops == ops::REFRESH), "{told:?}");
    let mut looked: Vec<u64> = told.iter().map(|change| change.node).collect();
    looked.sort_unstable();
    assert_eq!(looked, nodes);
    drop(told);
    // From then on it hears of each change.
    let file = share.path("file");
    assert!(Command::new("sh").args(["-c", "echo x >>\"$0\""]).arg(file).status().unwrap().success());
    ears.hears("a write", |change| change.has(ops::CONTENTS) && change.node == nodes[2]);
}

#[test]
fn a_stream_of_an_older_daemon_is_refused() {
    let share = Share::new();
    let server = Server::new(share.daemon(PATHS, FileHandles::Never));
    let mut state = server.save().unwrap();
    server.load(&state).unwrap();
    state[8] -= 1;
    assert!(server.load(&state).unwrap_err().to_string().contains("version 4, not 5"));
}

#[test]
fn a_hostile_state_gets_an_error_and_never_a_panic() {
    let share = Share::new();
    share.put("file", "");
    symlink("/", share.path("out")).unwrap();
    fs::create_dir(share.path("dir")).unwrap();
    let (source, flags) = share.source(PATHS);
    let (file, dir) = (lookup(&source, "file"), lookup(&source, "dir"));
    open(&source, file, libc::O_RDWR);
    source.opendir(dir, 0).unwrap();
    let bytes = source.save().unwrap();
    let lenient = Migration { on_error: MigrationOnError::GuestError, ..HANDLES };
    for at in 0..bytes.len() {
        // A damaged `fh` can make the table of handles long. It is then slow to clear.
        let fs = share.daemon(lenient, FileHandles::Never);
        for bit in 0..8 {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << bit;
            let _ = fs.load(flags, &bytes);
        }
    }
    let fs = share.daemon(lenient, FileHandles::Never);
    let damaged = |change: &dyn Fn(&mut State)| {
        let mut state = State::decode(&bytes).unwrap();
        change(&mut state);
        fs.load(flags, &state.encode().unwrap()).err().map(|e| e.to_string())
    };
    let handle = |fh, node| HandleState { fh, node, directory: false, flags: 0 };
    assert_eq!(damaged(&|_| ()), None);
    assert!(damaged(&|s| s.next_id = file).is_some());
    assert!(damaged(&|s| s.next_id = u64::MAX).is_some());
    // The guest would get the root's nodeid for another file.
    let empty = |next_id| State { next_id, mounts: vec![], inodes: vec![], handles: vec![], window: None };
    assert!(damaged(&|s| *s = empty(ROOT_ID)).is_some());
    assert!(damaged(&|s| *s = empty(ROOT_ID + 1)).is_none());
    assert!(damaged(&|s| s.inodes[1].id = s.inodes[2].id).is_some());
    assert!(damaged(&|s| s.inodes[1].id = 0).is_some());
    assert!(damaged(&|s| s.inodes[1].location = Location::Root).is_some());
    assert!(damaged(&|s| s.handles[0].node = 99).is_some());
    assert!(damaged(&|s| s.handles[0].fh = u64::MAX).is_some());
    assert!(damaged(&|s| s.handles.push(handle(s.handles[0].fh, file))).is_some());
    assert_eq!(fs.known_inodes(), 1);
    // No symbolic link is followed, and no file is truncated again.
    share.put("file", "data");
    damaged(&|s| {
        s.inodes[1].location = Location::Path(b"out/etc/passwd".into());
        s.handles[0].flags |= (libc::O_TRUNC | libc::O_APPEND) as u32;
    });
    let outside: &CStr = c"passwd";
    assert!(fs.lookup(ROOT_ID, outside).is_err());
    assert_eq!(ino(&fs, file), Err(Errno::IO));
    damaged(&|s| s.handles[0].flags |= libc::O_TRUNC as u32);
    assert_eq!(fs::read(share.path("file")).unwrap(), b"data");
}
