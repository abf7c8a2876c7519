//! Requests without a handle, as a guest sends them that was told to open files by itself.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use caps::{CapSet, Capability};
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, fsconfig_create, fsconfig_reconfigure, fsconfig_set_flag,
    fsmount, fsopen, fspick,
};

use super::super::tests::{CALLER, List, Share, answered, me, open, open_root, root, share};
use super::super::{CachePolicy, Config, FileHandles, InitFlags, NoOpen, PassthroughFs, proc_self_fd};
use crate::fuse::abi::*;
use crate::fuse::ops::*;

const NO_OPEN: InitFlags = InitFlags::NO_OPEN_SUPPORT.union(InitFlags::NO_OPENDIR_SUPPORT);

fn config() -> Config {
    Config { cache: CachePolicy::Always, no_open: NoOpen::Always, ..Default::default() }
}

/// A share for each way to hold inodes.
fn shares() -> impl Iterator<Item = Share> {
    let modes = [FileHandles::Never, FileHandles::Prefer];
    modes.into_iter().map(|inode_file_handles| share(Config { inode_file_handles, ..config() }))
}

/// Closes all spare descriptors that are not in use.
fn sweep(s: &Share) {
    (0..2).for_each(|_| s.fs.places.kept.sweep());
}

fn create(s: &Share, name: &CStr, flags: i32, mode: u32) -> Result<CreateOut> {
    let create = CreateIn { flags: flags as u32, mode, ..Default::default() };
    answered(|reply| s.fs.create(ROOT_ID, name, &create, &me(), reply))
}

/// Creates a file. Its `fh` is 0.
fn new(s: &Share, name: &CStr) -> u64 {
    let made = create(s, name, libc::O_RDWR | libc::O_EXCL, 0o600).unwrap();
    assert_eq!(made.open.fh, 0);
    made.entry.nodeid
}

/// The names from `offset` on, at most `room`, and the position behind them.
fn part(s: &Share, fh: u64, offset: u64, room: usize) -> (Vec<String>, u64) {
    let mut list = List { room, ..Default::default() };
    s.fs.readdir(ROOT_ID, fh, offset, &mut list).unwrap();
    (list.entries.into_iter().map(|(name, _)| name).collect(), list.offset)
}

/// All names, in READDIRs of `room` entries, with `between` after each.
fn list(s: &Share, room: usize, between: impl Fn()) -> Vec<String> {
    let (mut all, mut offset) = (Vec::new(), 0);
    loop {
        let (more, next) = part(s, 0, offset, room);
        if more.is_empty() {
            all.retain(|name: &String| !name.starts_with('.'));
            return all;
        }
        all.extend(more);
        offset = next;
        between();
    }
}

#[test]
fn a_removed_directory_has_no_entries() {
    for s in shares() {
        s.fs.init(InitFlags::all()).unwrap();
        fs::create_dir(s.dir.path().join("sub")).unwrap();
        let node = s.lookup(c"sub").unwrap().nodeid;
        let list = |offset, room| {
            let mut list = List { room, ..Default::default() };
            s.fs.readdir(node, 0, offset, &mut list).map(|()| (list.entries.len(), list.offset))
        };
        let (2, end) = list(0, 9).unwrap() else { panic!("it is not empty") };
        // Another listing, which leaves the descriptor at another position.
        assert_eq!(list(0, 1).unwrap().0, 1);
        fs::remove_dir(s.dir.path().join("sub")).unwrap();
        // By a handle it is not found any more, as when the descriptor was given up for another.
        let is_gone = |listed| assert!(matches!(listed, Err(Errno::NOENT | Errno::STALE)), "{listed:?}");
        is_gone(list(end, 9));
        sweep(&s);
        is_gone(list(0, 9));
    }
}

#[test]
fn the_session_decides() {
    let settled = |config: Config, offered: InitFlags| {
        let s = share(config);
        s.put("f", b"");
        let flags = s.fs.init(offered).unwrap().flags;
        let node = s.lookup(c"f").unwrap().nodeid;
        let opens = (open(&s.fs, node, libc::O_RDONLY).err(), s.fs.opendir(ROOT_ID, 0).err());
        let no = flags & NO_OPEN;
        assert_eq!(flags.contains(InitFlags::ATOMIC_O_TRUNC), !no.contains(InitFlags::NO_OPEN_SUPPORT));
        let no_sys = |flag| no.contains(flag).then_some(Errno::NOSYS);
        assert_eq!(opens, (no_sys(InitFlags::NO_OPEN_SUPPORT), no_sys(InitFlags::NO_OPENDIR_SUPPORT)));
        no
    };
    let (none, all) = (InitFlags::empty(), InitFlags::all());
    assert_eq!(settled(config(), all), NO_OPEN);
    assert_eq!(settled(config(), all - InitFlags::NO_OPENDIR_SUPPORT), InitFlags::NO_OPEN_SUPPORT);
    assert_eq!(settled(config(), all - InitFlags::NO_OPEN_SUPPORT), InitFlags::NO_OPENDIR_SUPPORT);
    assert_eq!(settled(Config { posix_lock: true, ..config() }, all), none);
    assert_eq!(settled(Config { flock: true, ..config() }, all), none);
    for (cache, no_open, wanted) in [
        (CachePolicy::Auto, NoOpen::Always, NO_OPEN),
        (CachePolicy::Auto, NoOpen::Auto, none),
        (CachePolicy::Always, NoOpen::Never, none),
        (CachePolicy::Never, NoOpen::Always, none),
        (CachePolicy::Metadata, NoOpen::Always, none),
    ] {
        assert_eq!(settled(Config { cache, no_open, ..Default::default() }, all), wanted, "{cache:?} {no_open:?}");
    }
    if root() {
        assert_eq!(settled(Config { no_open: NoOpen::Auto, ..config() }, all), NO_OPEN);
    }
}

#[test]
fn a_session_with_handles_serves_none_without() {
    let s = share(Config { no_open: NoOpen::Never, ..config() });
    s.put("f", b"data");
    let node = s.lookup(c"f").unwrap().nodeid;
    assert_eq!(s.read(node, 0, 0, 4), Err(Errno::BADF));
    assert_eq!(s.write(node, 0, 0, b"x", 0, 0), Err(Errno::BADF));
    assert_eq!(s.fs.getattr(node, Some(0)).err(), Some(Errno::BADF));
    assert_eq!(s.fs.readdir(ROOT_ID, 0, 0, &mut List::default()), Err(Errno::BADF));
    assert_eq!(s.fs.release(node, &ReleaseIn::default()), Err(Errno::BADF));
}

#[test]
fn every_request_is_served_without_a_handle() {
    for s in shares() {
        let node = new(&s, c"f");
        // With the spare descriptor that CREATE left, and without it.
        for round in 0..2 {
            let again = || {
                if round > 0 {
                    sweep(&s);
                }
            };
            assert_eq!(s.write(node, 0, 0, b"0123456789", 0, 0), Ok(10));
            again();
            assert_eq!(s.read(node, 0, 2, 5).unwrap(), b"23456");
            again();
            assert_eq!(s.write(node, 0, 3, b"+", 0, libc::O_APPEND), Ok(1));
            again();
            assert_eq!(s.write(node, 0, 0, b"-", WRITE_CACHE, libc::O_APPEND | libc::O_SYNC), Ok(1));
            again();
            assert_eq!(s.write(node, 0, 1, b"_", 0, libc::O_DSYNC), Ok(1));
            assert_eq!(s.host("f"), b"-_23456789+");
            again();
            assert_eq!(s.fs.getattr(node, Some(0)).unwrap().attr.size, 11);
            again();
            assert_eq!(s.fs.statx(node, Some(0), 0, u32::MAX).unwrap().stat.size, 11);
            again();
            let valid = (SetattrValid::SIZE | SetattrValid::FH).bits();
            let out = s.fs.setattr(node, &SetattrIn { valid, size: 4, ..Default::default() }, CALLER).unwrap();
            assert_eq!((out.attr.size, s.host("f")), (4, b"-_23".to_vec()));
            again();
            s.fs.fsync(node, 0, false, CALLER).unwrap();
            again();
            s.fs.fsync(node, 0, true, CALLER).unwrap();
            again();
            s.fs.fallocate(node, &FallocateIn { length: 9, ..Default::default() }).unwrap();
            let mode = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as u32;
            again();
            s.fs.fallocate(node, &FallocateIn { length: 2, mode, ..Default::default() }).unwrap();
            assert_eq!(s.host("f"), b"\0\x0023\0\0\0\0\0");
            again();
            assert_eq!(s.fs.lseek(node, 0, 0, libc::SEEK_DATA as u32), Ok(0));
            again();
            assert_eq!(s.fs.lseek(node, 0, 0, libc::SEEK_HOLE as u32), Ok(9));
            again();
            s.put("to", b"");
            let nodeid_out = s.lookup(c"to").unwrap().nodeid;
            let copy = CopyFileRangeIn { off_in: 2, nodeid_out, len: 2, ..Default::default() };
            assert_eq!(s.fs.copy_file_range(node, &copy), Ok(2));
            assert_eq!(s.host("to"), b"23");
            // Within one file.
            let copy = CopyFileRangeIn { off_in: 2, nodeid_out: node, off_out: 7, len: 2, ..Default::default() };
            assert_eq!(s.fs.copy_file_range(node, &copy), Ok(2));
            assert_eq!(s.host("f"), b"\0\x0023\0\0\x0023");
            again();
            s.fs.fsyncdir(ROOT_ID, 0, true).unwrap();
            let file = fs::File::from(s.fs.file_for_read(node, &ReadIn::default()).unwrap());
            let mut data = [0; 2];
            file.read_exact_at(&mut data, 2).unwrap();
            assert_eq!(&data, b"23");
            let write = WriteIn { flags: libc::O_RDWR as u32, ..Default::default() };
            let file = fs::File::from(s.fs.file_for_write(node, &write, CALLER).unwrap().unwrap());
            file.write_all_at(b"io", 0).unwrap();
            // io_uring would not sync.
            let write = WriteIn { flags: libc::O_SYNC as u32, ..Default::default() };
            assert!(s.fs.file_for_write(node, &write, CALLER).unwrap().is_none());
        }
        assert_eq!(s.fs.flush(node, 0, 1), Err(Errno::NOSYS));
        s.fs.release(node, &ReleaseIn::default()).unwrap();
        s.fs.releasedir(ROOT_ID, 0).unwrap();
        assert_eq!(s.read(node, 1 << 32, 0, 4), Err(Errno::BADF));
        assert_eq!(s.read(node + 99, 0, 0, 4), Err(Errno::STALE));
    }
}

#[test]
fn only_files_are_opened() {
    let s = share(config());
    let fifo = s.fs.mknod(ROOT_ID, c"p", libc::S_IFIFO | 0o600, 0, &me()).unwrap().nodeid;
    let link = s.fs.symlink(ROOT_ID, c"l", c"p", &me()).unwrap().nodeid;
    for node in [fifo, link, ROOT_ID] {
        assert_eq!(s.read(node, 0, 0, 4), Err(Errno::BADF));
        assert_eq!(s.write(node, 0, 0, b"x", 0, 0), Err(Errno::BADF));
        assert_eq!(s.fs.fsync(node, 0, false, CALLER), Err(Errno::BADF));
        assert_eq!(s.fs.lseek(node, 0, 0, libc::SEEK_DATA as u32), Err(Errno::BADF));
    }
    assert_eq!(s.fs.readdir(fifo, 0, 0, &mut List::default()), Err(Errno::NOTDIR));
    assert_eq!(s.fs.fsyncdir(link, 0, false), Err(Errno::NOTDIR));
}

/// A share of a file system in memory that is read-only on the host. `None` if this user cannot make one.
fn of_read_only_mount(config: Config) -> Option<PassthroughFs> {
    let tmpfs = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).ok()?;
    fsconfig_create(tmpfs.as_fd()).ok()?;
    let root = fsmount(tmpfs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).ok()?;
    let file = openat(&root, c"f", OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC, Mode::RWXU).unwrap();
    rustix::io::write(&file, b"data").unwrap();
    drop(file);
    let remount = fspick(root.as_fd(), c"", FsPickFlags::FSPICK_EMPTY_PATH).unwrap();
    fsconfig_set_flag(remount.as_fd(), c"ro").unwrap();
    fsconfig_reconfigure(remount.as_fd()).unwrap();
    let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), config).unwrap();
    fs.enter_thread(false);
    Some(fs)
}

#[test]
fn a_read_only_share_is_asked_at_each_open() {
    for (cache, writeback) in [(CachePolicy::Always, false), (CachePolicy::Always, true), (CachePolicy::Auto, false)] {
        let config = Config { cache, writeback, ..config() };
        let s = share(Config { readonly: true, ..config.clone() });
        s.put("f", b"data");
        let mounted = of_read_only_mount(config);
        assert!(mounted.is_some() || !root());
        for fs in [Some(&*s.fs), mounted.as_ref()].into_iter().flatten() {
            let flags = fs.init(InitFlags::all()).unwrap().flags;
            assert_eq!(flags & NO_OPEN, InitFlags::NO_OPENDIR_SUPPORT);
            let node = fs.lookup(ROOT_ID, c"f").unwrap().nodeid;
            for flags in [libc::O_RDWR, libc::O_WRONLY, libc::O_RDONLY | libc::O_TRUNC] {
                assert_eq!(open(fs, node, flags).err(), Some(Errno::ROFS));
            }
            let read = open(fs, node, libc::O_RDONLY).unwrap();
            assert_ne!(read.fh, 0);
            assert!(OpenFlags::from_bits_retain(read.open_flags).contains(OpenFlags::NOFLUSH));
            assert_eq!(fs.opendir(ROOT_ID, 0).err(), Some(Errno::NOSYS));
            assert_eq!(fs.access(node, 0, 0, 2), Err(Errno::ROFS));
            assert_eq!(fs.access(node, 0, 0, 4), Ok(()));
        }
    }
}

#[test]
fn a_session_without_opens_that_moves_to_a_read_only_daemon_is_not_written() {
    let s = share(Config { readonly: true, ..config() });
    s.fs.settle(InitFlags::all(), true).unwrap();
    s.put("f", b"data");
    let node = s.lookup(c"f").unwrap().nodeid;
    assert_eq!(s.read(node, 0, 0, 4).unwrap(), b"data");
    assert_eq!(s.write(node, 0, 0, b"x", 0, 0), Err(Errno::ROFS));
    assert_eq!(s.fs.file_for_write(node, &WriteIn::default(), CALLER).err(), Some(Errno::ROFS));
    let copy = CopyFileRangeIn { off_out: 4, nodeid_out: node, len: 2, ..Default::default() };
    assert_eq!(s.fs.copy_file_range(node, &copy), Err(Errno::ROFS));
    assert_eq!(s.fs.fallocate(node, &FallocateIn { length: 9, ..Default::default() }), Err(Errno::ROFS));
    assert_eq!(s.host("f"), b"data");
}

#[test]
fn removed_files_stay_readable_and_writable() {
    for s in shares() {
        let removed = new(&s, c"removed");
        let replaced = new(&s, c"replaced");
        s.put("over", b"over");
        for node in [removed, replaced] {
            s.write(node, 0, 0, b"data", 0, 0).unwrap();
        }
        sweep(&s);
        s.fs.unlink(ROOT_ID, c"removed").unwrap();
        s.fs.rename(ROOT_ID, c"over", ROOT_ID, c"replaced", 0, &me()).unwrap();
        for node in [removed, replaced] {
            sweep(&s);
            assert_eq!(s.read(node, 0, 0, 9).unwrap(), b"data");
            assert_eq!(s.write(node, 0, 4, b"more", 0, 0), Ok(4));
            sweep(&s);
            assert_eq!(s.read(node, 0, 0, 9).unwrap(), b"datamore");
            assert_eq!(s.fs.getattr(node, Some(0)).unwrap().attr.nlink, 0);
        }
        let before = s.descriptors();
        sweep(&s);
        s.fs.forget(removed, 1);
        assert!(s.descriptors() < before);
        assert_eq!(s.read(removed, 0, 0, 9), Err(Errno::STALE));
    }
}

#[test]
fn a_file_that_is_removed_while_it_is_opened_is_not_lost() {
    let s = share(Config { inode_file_handles: FileHandles::Prefer, ..config() });
    for round in 0..300 {
        let name = CString::new(format!("f{round}")).unwrap();
        let node = new(&s, &name);
        s.write(node, 0, 0, b"data", 0, 0).unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let (fs, ends) = (s.fs.clone(), over.clone());
        let opener = std::thread::spawn(move || {
            fs.enter_thread(false);
            while !ends.load(Ordering::Relaxed) {
                fs.inodes.get(node).unwrap().open(&fs.places, rustix::fs::OFlags::RDONLY).unwrap();
            }
        });
        s.fs.unlink(ROOT_ID, &name).unwrap();
        over.store(true, Ordering::Relaxed);
        opener.join().unwrap();
        sweep(&s);
        assert_eq!(s.read(node, 0, 0, 9).unwrap(), b"data");
        s.fs.forget(node, 1);
    }
}

#[test]
fn a_temporary_file_is_not_lost() {
    for s in shares() {
        let create = CreateIn { flags: libc::O_RDWR as u32, mode: 0o600, ..Default::default() };
        let CreateOut { entry, open } = match answered(|reply| s.fs.tmpfile(ROOT_ID, &create, &me(), reply)) {
            Err(Errno::OPNOTSUPP) => return,
            made => made.unwrap(),
        };
        assert_eq!(open.fh, 0);
        s.write(entry.nodeid, 0, 0, b"data", 0, 0).unwrap();
        sweep(&s);
        assert_eq!(s.read(entry.nodeid, 0, 0, 9).unwrap(), b"data");
        sweep(&s);
        s.fs.link(entry.nodeid, ROOT_ID, c"named").unwrap();
        assert_eq!(s.host("named"), b"data");
    }
}

/// An ordinary user's daemon has created a file that it may only read, and the guest has it open for writing.
#[test]
fn who_may_write_may_truncate() {
    if !root() {
        return;
    }
    for s in shares() {
        let fs = s.fs.clone();
        let ordinary = std::thread::spawn(move || {
            fs.enter_thread(false);
            caps::drop(None, CapSet::Effective, Capability::CAP_DAC_OVERRIDE).unwrap();
            let create = CreateIn { flags: (libc::O_RDWR | libc::O_EXCL) as u32, mode: 0o444, ..Default::default() };
            let made: Result<CreateOut> = answered(|reply| fs.create(ROOT_ID, c"f", &create, &me(), reply));
            let node = made.unwrap().entry.nodeid;
            assert_eq!(fs.inodes.get(node).unwrap().open(&fs.places, OFlags::WRONLY).err(), Some(Errno::ACCESS));
            let valid = SetattrValid::SIZE | SetattrValid::FH;
            for (size, wait) in [(5, None), (3, Some(Wait::Host))] {
                assert_eq!(fs.may_block(Does::TRUNCATE, node, Some(0)), wait);
                let attr = SetattrIn { valid: valid.bits(), size, ..Default::default() };
                assert_eq!(fs.setattr(node, &attr, CALLER).map(|out| out.attr.size), Ok(size));
            }
        });
        ordinary.join().unwrap();
    }
}

#[test]
fn a_file_may_forbid_what_its_creator_does() {
    if !root() {
        return;
    }
    for s in shares() {
        let made = create(&s, c"f", libc::O_WRONLY | libc::O_EXCL, 0o400).unwrap();
        let node = made.entry.nodeid;
        assert_eq!(s.write(node, 0, 0, b"data", 0, libc::O_WRONLY), Ok(4));
        sweep(&s);
        assert_eq!(s.write(node, 0, 4, b"more", 0, libc::O_WRONLY), Ok(4));
        assert_eq!(s.read(node, 0, 0, 9).unwrap(), b"datamore");
    }
}

#[test]
fn create_truncates_what_is_there() {
    let s = share(config());
    s.put("f", b"data");
    // The guest then sends a SETATTR.
    assert_eq!(create(&s, c"f", libc::O_RDWR | libc::O_TRUNC, 0o600).err(), Some(Errno::STALE));
    let made = create(&s, c"f", libc::O_RDWR, 0o600).unwrap();
    assert_eq!((made.open.fh, s.host("f")), (0, b"data".to_vec()));
    assert_eq!(made.open.open_flags & OpenFlags::KEEP_CACHE.bits(), OpenFlags::KEEP_CACHE.bits());
    s.put("e", b"");
    assert_eq!(create(&s, c"e", libc::O_RDWR | libc::O_TRUNC, 0o600).unwrap().open.fh, 0);
    assert_eq!(s.fs.known_inodes(), 3);
}

#[test]
fn direct_io_is_the_requests() {
    // On a disk, since not every tmpfs knows O_DIRECT.
    let direct = libc::O_DIRECT;
    for allow_direct_io in [false, true] {
        let s = share(Config { allow_direct_io, ..config() });
        let node = new(&s, c"f");
        s.write(node, 0, 0, &[7; 8192], 0, 0).unwrap();
        let is_direct = |flags: i32| {
            let read = ReadIn { flags: flags as u32, ..Default::default() };
            let file = s.fs.file_for_read(node, &read)?;
            Ok::<_, Errno>(rustix::fs::fcntl_getfl(file)?.contains(rustix::fs::OFlags::DIRECT))
        };
        if is_direct(direct).is_err() {
            return;
        }
        let asked = [0, direct, direct, 0].map(|flags| is_direct(flags).unwrap());
        assert_eq!(asked, [false, allow_direct_io, allow_direct_io, false]);
        // A writable descriptor stays one.
        assert_eq!(s.write(node, 0, 1, b"x", 0, 0), Ok(1));
    }
}

#[test]
fn a_failure_is_told_once() {
    let s = share(config());
    let node = new(&s, c"f");
    assert_eq!(s.fs.fsync(node, 0, false, CALLER), Ok(()));
    s.fs.inodes.get(node).unwrap().failures.add(Errno::NOSPC);
    assert_eq!([0; 2].map(|fh| s.fs.fsync(node, fh, false, CALLER)), [Err(Errno::NOSPC), Ok(())]);
    s.fs.inodes.get(node).unwrap().failures.add(Errno::NOSPC);
    assert_eq!(s.fs.fsync(node, 0, true, CALLER), Err(Errno::NOSPC));
}

/// A thread of the guest.
fn thread(pid: u32) -> Caller {
    Caller { pid, ..CALLER }
}

#[test]
fn each_thread_that_wrote_hears_of_a_failure_once() {
    let s = share(config());
    let node = new(&s, c"f");
    let write = |pid| s.write_by(node, &WriteIn::default(), thread(pid), b"x");
    let sync = |pid| s.fs.fsync(node, 0, false, thread(pid));
    let fail = || s.fs.inodes.get(node).unwrap().failures.add(Errno::NOSPC);
    for pid in [1, 2, 3, 1] {
        assert_eq!(write(pid), Ok(1));
    }
    assert_eq!(sync(1), Ok(()));
    fail();
    assert_eq!([1, 2, 2, 1, 3, 3].map(|pid| sync(pid).is_err()), [true, true, false, false, true, false]);
    // Who has written nothing hears of it if nobody did.
    assert_eq!(sync(4), Ok(()));
    fail();
    assert_eq!([4, 5, 1].map(|pid| sync(pid).is_err()), [true, false, true]);
    // Who writes after a failure was told hears of none.
    assert_eq!(write(6), Ok(1));
    assert_eq!(sync(6), Ok(()));
    // A guest with more threads than are kept: the first of them count as strangers.
    (10..100).for_each(|pid| assert_eq!(write(pid), Ok(1)));
    fail();
    assert_eq!([99, 98, 10].map(|pid| sync(pid).is_err()), [true, true, false]);
}

#[test]
fn what_is_not_synced_keeps_a_descriptor() {
    for s in shares() {
        let node = new(&s, c"f");
        let spare = || s.fs.inodes.get(node).unwrap().with_spare(|fd| rustix::fs::fcntl_getfl(fd).unwrap());
        let accmode = |flags: OFlags| flags & OFlags::ACCMODE;
        let written = || assert_eq!(s.write(node, 0, 0, b"x", 0, 0), Ok(1));
        // A close on the host, or a fsync(2) there, would otherwise hide a failure from the guest.
        written();
        assert_eq!(spare().map(accmode), Some(OFlags::RDWR));
        sweep(&s);
        // Nobody has it open for writing: the host may execute it.
        assert_eq!(spare().map(accmode), Some(OFlags::RDONLY));
        assert_eq!(s.fs.fsync(node, 0, false, CALLER), Ok(()));
        sweep(&s);
        assert_eq!(spare(), None);
        // It is written back by itself.
        written();
        (0..100).for_each(|_| s.fs.places.kept.sweep());
        assert_eq!(spare(), None);
        // Others remove it: its space is free.
        written();
        sweep(&s);
        assert!(spare().is_some());
        fs::remove_file(s.dir.path().join("f")).unwrap();
        sweep(&s);
        assert_eq!(spare(), None);
    }
}

#[test]
fn a_listing_is_whole_without_a_handle() {
    for s in shares() {
        let names: BTreeSet<String> = (0..500).map(|n| format!("f{n}")).collect();
        names.iter().for_each(|name| s.put(name, b""));
        let whole = |listed: Vec<String>| {
            assert_eq!(listed.len(), names.len());
            assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), names);
        };
        whole(list(&s, 7, || ()));
        // On a new descriptor for each part.
        whole(list(&s, 7, || sweep(&s)));
        // Beside another listing.
        whole(list(&s, 7, || whole(list(&s, 100, || ()))));
        sweep(&s);
        assert_eq!(s.fs.listings.kept(), 0);
    }
}

#[test]
fn a_new_listing_sees_what_was_changed_before() {
    let s = share(config());
    (0..50).for_each(|n| s.put(&format!("f{n}"), b""));
    // Leaves entries in the buffer.
    let (seen, offset) = part(&s, 0, 0, 5);
    let gone = (0..50).map(|n| format!("f{n}")).find(|name| !seen.contains(name)).unwrap();
    fs::remove_file(s.dir.path().join(&gone)).unwrap();
    s.put("new", b"");
    let all = list(&s, 100, || ());
    assert!(!all.contains(&gone) && all.contains(&"new".to_owned()));
    // The first listing goes on.
    let rest = part(&s, 0, offset, 100).0;
    assert!(rest.iter().all(|name| !seen.contains(name)) && !rest.contains(&gone));
    // A listing that has taken nothing leaves nothing.
    part(&s, 0, 0, 0);
    fs::remove_file(s.dir.path().join("new")).unwrap();
    assert!(!list(&s, 100, || ()).contains(&"new".to_owned()));
}

/// On ext4 a descriptor whose first position is the end lists nothing afterwards, even from the beginning.
fn lists_after_the_end(base: &Path) {
    let dir = tempfile::tempdir_in(base).unwrap();
    for no_open in [NoOpen::Never, NoOpen::Always] {
        let fs = PassthroughFs::new(open_root(dir.path()), proc_self_fd().unwrap(), Config { no_open, ..config() });
        let fs = Arc::new(fs.unwrap());
        fs.enter_thread(false);
        fs.init(InitFlags::all()).unwrap();
        let s = Share { dir: tempfile::tempdir().unwrap(), fs };
        (0..20).for_each(|n| fs::write(dir.path().join(format!("f{n}")), b"").unwrap());
        let fh = || if no_open == NoOpen::Never { s.fs.opendir(ROOT_ID, 0).unwrap().fh } else { 0 };
        let (all, end) = part(&s, fh(), 0, 100);
        assert_eq!(all.len(), 22);
        sweep(&s);
        let again = fh();
        assert!(part(&s, again, end, 100).0.is_empty());
        assert_eq!(part(&s, again, 0, 100).0, all);
    }
}

#[test]
fn a_listing_from_the_end_on_is_empty_and_spoils_nothing() {
    lists_after_the_end(&std::env::temp_dir());
    lists_after_the_end(Path::new(env!("CARGO_MANIFEST_DIR")));
    if Path::new("/dev/shm").is_dir() {
        lists_after_the_end(Path::new("/dev/shm"));
    }
}

#[test]
fn few_descriptors_serve_many_files() {
    let s = share(Config { inode_file_handles: FileHandles::Prefer, ..config() });
    if !s.fs.places.use_handles() {
        return;
    }
    let most = s.fs.places.kept.most();
    let nodes: Vec<u64> = (0..most + 200)
        .map(|n| {
            let node = new(&s, &CString::new(format!("f{n}")).unwrap());
            assert_eq!(s.write(node, 0, 0, &n.to_le_bytes(), 0, 0), Ok(8));
            assert!(s.fs.places.kept.count() <= most);
            node
        })
        .collect();
    // One is the share's root, one is its mount's, which handles need, and one a sweep has opened in another's place.
    assert!(s.descriptors() <= most + 3);
    for (n, node) in nodes.iter().enumerate() {
        assert_eq!(s.read(*node, 0, 0, 9).unwrap(), n.to_le_bytes());
    }
    assert!(s.descriptors() <= most + 3);
    // They were written to, and nobody has asked for a sync.
    (0..100).for_each(|_| s.fs.places.kept.sweep());
    assert!(s.descriptors() <= 2);
}

#[test]
fn a_session_moves_with_its_decision() {
    let s = share(config());
    let node = new(&s, c"f");
    s.write(node, 0, 0, b"data", 0, 0).unwrap();
    let another = |config, flags: InitFlags, state: &[u8]| {
        let fs = PassthroughFs::new(open_root(s.dir.path()), proc_self_fd().unwrap(), config).unwrap();
        fs.load(flags, state).map(|()| Share { dir: tempfile::tempdir().unwrap(), fs: Arc::new(fs) })
    };
    let flags = |s: &Share| InitFlags::from_bits_retain(s.fs.session.load(Ordering::Relaxed));
    let never = Config { no_open: NoOpen::Never, ..config() };
    let target = another(never.clone(), flags(&s), &s.fs.save().unwrap()).unwrap();
    assert_eq!(flags(&target) & (NO_OPEN | InitFlags::ATOMIC_O_TRUNC), NO_OPEN);
    assert_eq!(target.read(node, 0, 0, 9).unwrap(), b"data");
    assert_eq!(target.write(node, 0, 4, b"more", 0, 0), Ok(4));
    assert_eq!(part(&target, 0, 0, 9).0.len(), 3);

    // A session with handles keeps them.
    let s = share(never);
    s.put("f", b"data");
    let fs = PassthroughFs::new(open_root(s.dir.path()), proc_self_fd().unwrap(), config()).unwrap();
    fs.load(flags(&s), &s.fs.save().unwrap()).unwrap();
    let target = Share { dir: tempfile::tempdir().unwrap(), fs: Arc::new(fs) };
    let (node, fh) = target.open(c"f", libc::O_RDWR);
    assert!(fh > 0 && target.read(node, 0, 0, 9).is_err());
    assert_eq!(target.read(node, fh, 0, 9).unwrap(), b"data");
}
