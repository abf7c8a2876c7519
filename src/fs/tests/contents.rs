//! Which opens let the guest keep its pages, on a real file system.

use std::cell::Cell;
use std::fs::File;
use std::io::Write;

use rustix::fs::Timespec;
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, FileOffset, VolatileMemory};

use super::*;
use crate::fs::host::HostFs;
use crate::fs::{CachePolicy, NoOpen, sys};

thread_local! {
    static CLOCK: Cell<Option<Timespec>> = const { Cell::new(None) };
}

/// The time that a test has set, or a day from now: every change is older than that.
fn clock() -> Timespec {
    let now = sys::file_clock();
    CLOCK.get().unwrap_or(Timespec { tv_sec: now.tv_sec + 86400, ..now })
}

/// Serves a directory that has the file `f`. Its file system counts as one whose times tell.
fn serve(dir: TempDir, config: Config) -> Share {
    let root = open_root(dir.path());
    let fs = PassthroughFs { clock, ..PassthroughFs::new(root, proc_self_fd().unwrap(), config).unwrap() };
    let mut host = HostFs::default();
    host.ctime_reliable = true;
    fs.hosts.pretend(fs.inodes.get(ROOT_ID).unwrap().key.dev, host);
    fs.enter_thread(false);
    fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap();
    Share { dir, fs: Arc::new(fs) }
}

fn shared() -> Share {
    let s = serve(tempfile::tempdir().unwrap(), Config::default());
    s.put("f", b"data");
    s
}

fn keeps(out: OpenOut) -> bool {
    out.open_flags & OpenFlags::KEEP_CACHE.bits() != 0
}

impl Share {
    /// Opens `f`, reads and closes it as a guest does. Whether the guest has kept its pages.
    fn keeps_as(&self, flags: i32) -> bool {
        let node = self.lookup(c"f").unwrap().nodeid;
        let out = open(&self.fs, node, flags).unwrap();
        if flags & libc::O_ACCMODE != libc::O_WRONLY {
            self.read(node, out.fh, 0, 10).unwrap();
        }
        self.fs.release(node, &ReleaseIn { fh: out.fh, ..Default::default() }).unwrap();
        keeps(out)
    }

    fn keeps(&self) -> bool {
        self.keeps_as(libc::O_RDONLY)
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("f")
    }

    fn changed(&self) -> (i64, i64) {
        let st = fs::metadata(self.path()).unwrap();
        (st.ctime(), st.ctime_nsec())
    }

    /// Changes `f` so that its change time moves. The kernel's clock stands still within a tick, and the clock of these
    /// tests does not know that.
    fn later(&self, change: impl Fn()) {
        let before = self.changed();
        // A tick is 10 ms at most. This allows a thousand.
        for _ in 0..10_000 {
            change();
            if self.changed() != before {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        panic!("the change time does not move");
    }

    /// The next open drops, and the one after it keeps.
    fn assert_changed(&self, what: &str) {
        assert!(!self.keeps(), "{what}: stale");
        assert!(self.keeps(), "{what}: dropped for nothing");
    }
}

#[test]
fn the_host_changes_a_file() {
    let s = shared();
    s.assert_changed("a new file");
    s.later(|| s.put("f", b"DATA"));
    s.assert_changed("the same size");
    s.later(|| s.put("f", b"longer"));
    s.assert_changed("another size");
    let file = File::options().write(true).open(s.path()).unwrap();
    s.later(|| file.set_len(2).unwrap());
    drop(file);
    s.assert_changed("a truncation");
    s.later(|| {
        let file = File::options().write(true).open(s.path()).unwrap();
        file.set_len(0).unwrap();
        file.set_len(2).unwrap();
    });
    s.assert_changed("a truncation and back");
    let old = fs::metadata(s.path()).unwrap().modified().unwrap();
    s.later(|| {
        s.put("f", b"AA");
        File::options().write(true).open(s.path()).unwrap().set_modified(old).unwrap();
    });
    assert_eq!(fs::metadata(s.path()).unwrap().modified().unwrap(), old);
    s.assert_changed("the time set back");
    s.put("g", b"BB");
    File::options().write(true).open(s.dir.path().join("g")).unwrap().set_modified(old).unwrap();
    fs::rename(s.dir.path().join("g"), s.path()).unwrap();
    s.assert_changed("a replacement");
}

#[test]
fn a_change_within_one_tick_is_seen() {
    let s = shared();
    // The clock stands at the file's own time.
    let (tv_sec, tv_nsec) = s.changed();
    CLOCK.set(Some(Timespec { tv_sec, tv_nsec }));
    for _ in 0..3 {
        assert!(!s.keeps());
    }
    CLOCK.set(Some(Timespec { tv_sec: tv_sec + 1, tv_nsec }));
    s.assert_changed("a file of a second ago");
    CLOCK.set(None);
}

#[test]
fn the_guest_changes_a_file() {
    let s = shared();
    s.assert_changed("a new file");
    let (node, fh) = s.open(c"f", libc::O_WRONLY);
    s.later(|| assert_eq!(s.write(node, fh, 0, b"DATA", 0, 0), Ok(4)));
    // While it has the file open to write, each open drops.
    assert!(!s.keeps() && !s.keeps());
    s.fs.release(node, &ReleaseIn { fh, ..Default::default() }).unwrap();
    s.assert_changed("a write");
    s.later(|| assert!(!s.keeps_as(libc::O_RDWR | libc::O_TRUNC)));
    s.assert_changed("a truncation by OPEN");
    let attr = SetattrIn { valid: SetattrValid::SIZE.bits(), size: 7, ..Default::default() };
    s.later(|| assert_eq!(s.fs.setattr(node, &attr, CALLER).unwrap().attr.size, 7));
    s.assert_changed("a truncation by SETATTR");
    // An open for writing that writes nothing keeps, and what it finds still holds.
    assert!(s.keeps_as(libc::O_RDWR) && s.keeps_as(libc::O_WRONLY) && s.keeps());
}

#[test]
fn another_guest_changes_a_file() {
    let s = shared();
    let other = PassthroughFs::new(open_root(s.dir.path()), proc_self_fd().unwrap(), Config::default()).unwrap();
    other.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap();
    let other = Share { dir: tempfile::tempdir().unwrap(), fs: Arc::new(other) };
    s.assert_changed("a new file");
    let (node, fh) = other.open(c"f", libc::O_RDWR);
    assert!(s.keeps());
    s.later(|| assert_eq!(other.write(node, fh, 0, b"DATA", 0, 0), Ok(4)));
    assert!(!s.keeps() && !s.keeps());
    other.fs.release(node, &ReleaseIn { fh, ..Default::default() }).unwrap();
    s.assert_changed("a write");
}

/// A mapping of `f` by which a host process stores.
fn map(s: &Share) -> MmapRegion {
    let file = File::options().read(true).write(true).open(s.path()).unwrap();
    MmapRegion::from_file(FileOffset::new(file, 0), 4096).unwrap()
}

fn store(mapping: &MmapRegion, text: &[u8]) {
    mapping.as_volatile_slice().write_slice(text, 0).unwrap();
}

#[test]
fn a_file_that_the_host_has_mapped_is_dropped() {
    let s = shared();
    let mapping = map(&s);
    store(&mapping, b"one");
    assert!(!s.keeps());
    // As long as the page is dirty, a store moves no time.
    store(&mapping, b"two");
    assert!(!s.keeps());
    store(&mapping, b"six");
    drop(mapping);
    s.assert_changed("the last store");
}

#[test]
fn a_store_through_a_later_mapping_is_seen() {
    let dir = tempfile::tempdir().unwrap();
    if !HostFs::of(std::os::fd::AsFd::as_fd(&open_root(dir.path()))).ctime_reliable {
        eprintln!("skipped: stores do not move the times of files in {}", dir.path().display());
        return;
    }
    let s = serve(dir, Config::default());
    s.put("f", b"data");
    s.assert_changed("a new file");
    let mapping = map(&s);
    assert!(s.keeps());
    let before = s.changed();
    for round in 0..10_000 {
        store(&mapping, b"new");
        if s.changed() != before {
            break;
        }
        assert!(round < 9_999, "the change time does not move");
        // The next store is the first to a clean page again.
        mapping.file_offset().unwrap().file().sync_all().unwrap();
    }
    assert!(!s.keeps());
    store(&mapping, b"two");
    assert!(!s.keeps());
    drop(mapping);
    s.assert_changed("the last store");
}

#[test]
fn pages_stay_only_after_the_guest_has_dropped_older_ones() {
    let s = shared();
    let node = s.lookup(c"f").unwrap().nodeid;
    let open = || open(&s.fs, node, libc::O_RDONLY).unwrap();
    // None of these replies may have reached the guest.
    let opens = [open(), open(), open()];
    assert!(opens.iter().all(|out| !keeps(*out)));
    s.read(node, opens[1].fh, 0, 4).unwrap();
    assert!(keeps(open()));
    s.later(|| s.put("f", b"DATA"));
    assert!(!keeps(open()));
    // It reads by an open from before.
    s.read(node, opens[0].fh, 0, 4).unwrap();
    assert!(!keeps(open()));
}

#[test]
fn a_look_that_sees_a_change_ends_the_stamp() {
    let s = shared();
    s.assert_changed("a new file");
    let inode = s.fs.inodes.get(s.lookup(c"f").unwrap().nodeid).unwrap();
    assert!(inode.contents.is_known());
    s.later(|| s.put("f", b"DATA"));
    s.fs.getattr(inode.id, None).unwrap();
    assert!(!inode.contents.is_known());
}

#[test]
fn only_some_policies_and_file_systems_decide_by_the_times() {
    let opened = |dir: TempDir, cache, trusted: bool| {
        let s = serve(dir, Config { cache, no_open: NoOpen::Never, ..Default::default() });
        if !trusted {
            let root = open_root(s.dir.path());
            let dev = s.fs.inodes.get(ROOT_ID).unwrap().key.dev;
            s.fs.hosts.pretend(dev, HostFs::of(std::os::fd::AsFd::as_fd(&root)));
        }
        s.put("f", b"data");
        [s.keeps(), s.keeps(), s.keeps()]
    };
    let new = || tempfile::tempdir().unwrap();
    assert_eq!(opened(new(), CachePolicy::Auto, true), [false, true, true]);
    assert_eq!(opened(new(), CachePolicy::Always, true), [true; 3]);
    assert_eq!(opened(new(), CachePolicy::Never, true), [false; 3]);
    assert_eq!(opened(new(), CachePolicy::Metadata, true), [false; 3]);
    let memory = Path::new("/dev/shm");
    let tmpfs = rustix::fs::statfs(memory).is_ok_and(|st| st.f_type == libc::TMPFS_MAGIC);
    if tmpfs {
        assert_eq!(opened(TempDir::new_in(memory).unwrap(), CachePolicy::Auto, false), [false; 3]);
    }
}

#[test]
fn files_that_are_made_when_they_are_read_have_contents() {
    for cache in [CachePolicy::Auto, CachePolicy::Always] {
        let config = Config { cache, no_open: NoOpen::Never, ..Default::default() };
        let fs = PassthroughFs::new(open_root(Path::new("/proc")), proc_self_fd().unwrap(), config).unwrap();
        fs.enter_thread(false);
        fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap();
        let entry = fs.lookup(ROOT_ID, c"loadavg").unwrap();
        assert_eq!(entry.attr.size, 0);
        let opened = open(&fs, entry.nodeid, libc::O_RDONLY).unwrap();
        // The guest then reads past the size.
        assert_eq!(opened.open_flags & OpenFlags::DIRECT_IO.bits(), OpenFlags::DIRECT_IO.bits());
    }
}

#[test]
fn a_look_for_writers_leaves_no_lease() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let reader = File::open(file.path()).unwrap();
    let unwritten = || sys::unwritten(std::os::fd::AsFd::as_fd(&reader)).is_ok();
    sys::ignore_lease_signal().unwrap();
    assert!(!unwritten());
    file.write_all(b"x").unwrap();
    let path = file.into_temp_path();
    assert!(unwritten() && unwritten());
    // With a lease this would wait for fs.lease-break-time, and O_NONBLOCK would fail.
    let flags = OFlags::WRONLY | OFlags::NONBLOCK;
    let writer = rustix::fs::open(&*path, flags, Mode::empty()).unwrap();
    assert!(!unwritten());
    drop(writer);
    assert!(unwritten());
}
