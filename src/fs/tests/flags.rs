//! Flags and project ids: what the guest reads, and the few that it sets.

use std::fs::File;

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use thruway_guest::protocol::{Change, ops};

use super::lease::Ears;
use super::*;
use crate::fs::sys::fsxattr;

const SYNC: u32 = IFlags::SYNC.bits();
const NODUMP: u32 = IFlags::NODUMP.bits();
const ANYBODY: u32 = u32::MAX;

/// The flags of a file on the host.
fn host(s: &Share, name: &str) -> IFlags {
    ioctl_getflags(File::open(s.dir.path().join(name)).unwrap()).unwrap()
}

/// A share with a file and a directory, unless the host's file system has no flags.
fn flagged(config: Config) -> Option<Share> {
    let s = share(config);
    s.put("f", b"1");
    fs::create_dir(s.dir.path().join("d")).unwrap();
    let file = File::open(s.dir.path().join("f")).unwrap();
    let works = ioctl_getflags(&file).and_then(|flags| ioctl_setflags(&file, flags | IFlags::NODUMP));
    if works.is_err() {
        eprintln!("skipped: the file system has no such flags");
        return None;
    }
    ioctl_setflags(&file, ioctl_getflags(&file).unwrap() - IFlags::NODUMP).unwrap();
    Some(s)
}

/// Each of the two, with a handle and without where the session allows that.
fn each(s: &Share, test: impl Fn(&str, u64, u64)) {
    let f = s.lookup(c"f").unwrap().nodeid;
    let d = s.lookup(c"d").unwrap().nodeid;
    match s.fs.opendir(d, 0) {
        Ok(dir) => {
            test("f", f, open(&s.fs, f, libc::O_RDONLY).unwrap().fh);
            test("d", d, dir.fh);
        }
        Err(_) => {
            test("f", f, 0);
            test("d", d, 0);
        }
    }
}

fn with_and_without_handles() -> [Config; 2] {
    [Config::default(), Config { no_open: NoOpen::Always, cache: CachePolicy::Always, ..Config::default() }]
}

#[test]
fn flags_that_concern_the_guest_alone_are_set_and_cleared() {
    for config in with_and_without_handles() {
        let Some(s) = flagged(config) else { return };
        each(&s, |name, node, fh| {
            let first = s.fs.flags(node, fh).unwrap();
            assert_eq!(first, host(&s, name).bits());
            s.fs.set_flags(node, fh, ANYBODY, first | SYNC | NODUMP).unwrap();
            assert_eq!(host(&s, name).bits(), first | SYNC | NODUMP);
            assert_eq!(s.fs.flags(node, fh).unwrap(), first | SYNC | NODUMP);
            assert_eq!(s.fs.fsxattr(node, fh).unwrap().xflags & 0xf8, 0xa0);
            // What already is so is no change, whoever asks.
            s.fs.set_flags(node, fh, ANYBODY, first | SYNC | NODUMP).unwrap();
            let mut attr = s.fs.fsxattr(node, fh).unwrap();
            attr.xflags = attr.xflags & !0x20 | 0x40;
            s.fs.set_fsxattr(node, fh, ANYBODY, &attr).unwrap();
            assert_eq!(host(&s, name).bits(), first | NODUMP | IFlags::NOATIME.bits());
            s.fs.set_flags(node, fh, ANYBODY, first).unwrap();
            assert_eq!(host(&s, name).bits(), first);
        });
    }
}

/// The reply has no attributes, and the guest has the change time from before.
#[test]
fn the_guest_hears_of_the_new_change_time() {
    let Some(s) = flagged(Config::default()) else { return };
    let ears = Ears::of(&s.fs);
    ears.register(&s.fs);
    each(&s, |_, node, fh| {
        ears.told.lock().clear();
        let first = s.fs.flags(node, fh).unwrap();
        s.fs.set_flags(node, fh, ANYBODY, first).unwrap();
        assert!(ears.told.lock().is_empty());
        s.fs.set_flags(node, fh, ANYBODY, first | NODUMP).unwrap();
        assert_eq!(*ears.told.lock(), [Change { ops: ops::REFRESH, node, ..Change::default() }]);
    });
}

#[test]
fn flags_that_concern_the_host_stay_as_they_are() {
    for config in with_and_without_handles() {
        let Some(s) = flagged(config) else { return };
        each(&s, |name, node, fh| {
            let first = s.fs.flags(node, fh).unwrap();
            for (bit, errno) in (0..32).map(|n| (1 << n, Errno::OPNOTSUPP)) {
                let flag = IFlags::from_bits_retain(bit);
                let free = IFlags::SYNC | IFlags::DIRSYNC | IFlags::NODUMP | IFlags::NOATIME;
                if free.contains(flag) {
                    continue;
                }
                // Immutable, append-only, and a directory that gives its project to new files.
                let errno = if [0x10, 0x20, 0x2000_0000].contains(&bit) { Errno::PERM } else { errno };
                let set = s.fs.set_flags(node, fh, ANYBODY, first ^ bit ^ NODUMP);
                assert_eq!(set, Err(errno), "{bit:x}");
            }
            let attr = s.fs.fsxattr(node, fh).unwrap();
            let set = |to: Fsxattr| s.fs.set_fsxattr(node, fh, ANYBODY, &to);
            assert_eq!(set(Fsxattr { projid: attr.projid + 1, ..attr }), Err(Errno::PERM));
            assert_eq!(set(Fsxattr { extsize: 1 << 20, xflags: attr.xflags | 0x800, ..attr }), Err(Errno::OPNOTSUPP));
            assert_eq!(set(Fsxattr { cowextsize: 1 << 20, ..attr }), Err(Errno::OPNOTSUPP));
            for n in 0..32 {
                let bit = 1u32 << n;
                let expected = match bit {
                    0x8 | 0x10 | 0x200 => Err(Errno::PERM),
                    // No program can set these, and Linux leaves them out.
                    0x2 | 0x2_0000 | 0x4_0000 | 0x8_0000 | 0x8000_0000 => Ok(()),
                    0x20 | 0x40 | 0x80 => continue,
                    _ => Err(Errno::OPNOTSUPP),
                };
                assert_eq!(set(Fsxattr { xflags: attr.xflags ^ bit, ..attr }), expected, "{bit:x}");
            }
            assert_eq!(host(&s, name).bits(), first);
            assert_eq!(s.fs.fsxattr(node, fh).unwrap(), attr);
        });
    }
}

#[test]
fn what_the_host_has_set_is_seen_and_kept() {
    let Some(s) = flagged(Config::default()) else { return };
    let file = File::open(s.dir.path().join("f")).unwrap();
    let before = ioctl_getflags(&file).unwrap();
    if ioctl_setflags(&file, before | IFlags::APPEND).is_err() {
        return eprintln!("skipped: it needs root");
    }
    let (node, fh) = s.open(c"f", libc::O_RDONLY);
    let seen = s.fs.flags(node, fh).unwrap();
    assert_eq!(s.fs.set_flags(node, fh, ANYBODY, before.bits()), Err(Errno::PERM));
    let attr = s.fs.fsxattr(node, fh).unwrap();
    assert_eq!((attr, attr.xflags & 0x10), (fsxattr(std::os::fd::AsFd::as_fd(&file)).unwrap(), 0x10));
    // The host's rule holds.
    let written = open(&s.fs, node, libc::O_RDWR).err();
    ioctl_setflags(&file, before).unwrap();
    assert_eq!((seen, written), ((before | IFlags::APPEND).bits(), Some(Errno::PERM)));
}

#[test]
fn only_the_owner_sets_flags() {
    let Some(s) = flagged(Config::default()) else { return };
    each(&s, |_, node, fh| {
        let first = s.fs.flags(node, fh).unwrap();
        let owner = s.fs.getattr(node, None).unwrap().attr.uid;
        for (uid, expected) in [(owner, Ok(())), (owner + 1, Err(Errno::PERM)), (0, Ok(()))] {
            assert_eq!(s.fs.set_flags(node, fh, uid, first ^ NODUMP), expected);
            s.fs.set_flags(node, fh, ANYBODY, first).unwrap();
        }
    });
    let readonly = flagged(Config { readonly: true, ..Config::default() }).unwrap();
    each(&readonly, |_, node, fh| {
        let (first, attr) = (readonly.fs.flags(node, fh).unwrap(), readonly.fs.fsxattr(node, fh));
        assert_eq!(readonly.fs.set_flags(node, fh, 0, first), Err(Errno::ROFS));
        assert_eq!(readonly.fs.set_fsxattr(node, fh, 0, &attr.unwrap()), Err(Errno::ROFS));
    });
}

#[test]
fn a_file_that_is_stored_to_in_place_cannot_be_synchronous() {
    let Some(s) = flagged(Config { writeback: true, ..Config::default() }) else { return };
    each(&s, |name, node, fh| {
        let first = s.fs.flags(node, fh).unwrap();
        let expected = if name == "f" { Err(Errno::OPNOTSUPP) } else { Ok(()) };
        assert_eq!(s.fs.set_flags(node, fh, ANYBODY, first | SYNC), expected);
        s.fs.set_flags(node, fh, ANYBODY, first | NODUMP).unwrap();
    });
}

#[test]
fn other_files_have_no_flags() {
    let s = plain();
    symlink("f", s.dir.path().join("l")).unwrap();
    rustix::fs::mknodat(open_root(s.dir.path()), "p", rustix::fs::FileType::Fifo, Mode::from_raw_mode(0o600), 0)
        .unwrap();
    for name in [c"l", c"p"] {
        let node = s.lookup(name).unwrap().nodeid;
        assert_eq!(s.fs.flags(node, 0), Err(Errno::BADF));
        assert_eq!(s.fs.set_flags(node, 0, ANYBODY, 0), Err(Errno::BADF));
        assert_eq!(s.fs.fsxattr(node, 99), Err(Errno::BADF));
    }
    assert_eq!(s.fs.flags(99, 0), Err(Errno::STALE));
}
