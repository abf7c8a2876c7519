//! File handles in the guest (`--nfs-export`): what its kernel asks for by nodeid when it has forgotten a file.

use std::fs::{create_dir, create_dir_all, remove_dir, remove_file, rename};
use std::path::PathBuf;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::*;
use crate::fs::{Migration, MigrationMode};

/// A share below a directory of the host, on a disk: a tmpfs may have no file handles.
struct Export {
    dir: TempDir,
    fs: PassthroughFs,
}

impl Export {
    /// `None`: there are no file handles here.
    fn try_new(config: &Config) -> Option<Self> {
        let dir = TempDir::new_in("/var/tmp").unwrap();
        create_dir(dir.path().join("share")).unwrap();
        match Self::daemon(&dir, config) {
            Ok(fs) => {
                fs.init(InitFlags::all()).unwrap();
                Some(Self { dir, fs })
            }
            Err(error) => {
                assert!(error.to_string().contains("--nfs-export needs file handles"), "{error}");
                eprintln!("no file handles here: not tested");
                None
            }
        }
    }

    fn daemon(dir: &TempDir, config: &Config) -> io::Result<PassthroughFs> {
        let config = Config { nfs_export: true, inode_file_handles: FileHandles::Prefer, ..config.clone() };
        let fs = PassthroughFs::new(open_root(&dir.path().join("share")), proc_self_fd().unwrap(), config)?;
        fs.enter_thread(false);
        Ok(fs)
    }

    fn host(&self, path: &str) -> PathBuf {
        self.dir.path().join("share").join(path)
    }

    /// Looks up each name of a path. The guest forgets all but the last.
    fn walk(&self, path: &str) -> u64 {
        path.split('/').fold(ROOT_ID, |parent, name| {
            let entry = self.fs.lookup(parent, &CString::new(name).unwrap()).unwrap();
            self.fs.forget(parent, 1);
            entry.nodeid
        })
    }

    fn again(&self, node: u64) -> Result<u64> {
        self.fs.lookup(node, c".").map(|entry| entry.nodeid)
    }

    fn above(&self, node: u64) -> Result<u64> {
        self.fs.lookup(node, c"..").map(|entry| entry.nodeid)
    }
}

#[test]
fn a_forgotten_file_is_found_by_its_nodeid() {
    let Some(s) = Export::try_new(&Config::default()) else { return };
    create_dir_all(s.host("a/b")).unwrap();
    fs::write(s.host("a/b/f"), "text").unwrap();
    let (directory, file) = (s.walk("a/b"), s.walk("a/b/f"));
    assert_eq!(s.fs.known_inodes(), 3, "the root, the directory and the file");
    for node in [directory, file] {
        s.fs.forget(node, 1);
        // Only the kernel's question for the nodeid is answered.
        assert_eq!(s.fs.getattr(node, None).err(), Some(Errno::STALE));
    }
    assert_eq!(s.fs.known_inodes(), 1);
    let entry = s.fs.lookup(file, c".").unwrap();
    assert_eq!((entry.nodeid, entry.generation, entry.attr.size), (file, 0, 4));
    s.fs.getattr(file, None).unwrap();
    // One file has one nodeid, by whatever way the guest comes to it, also under another name.
    assert_eq!(s.walk("a/b"), directory);
    assert_eq!(s.walk("a/b/f"), file);
    s.fs.forget(file, 2);
    rename(s.host("a/b/f"), s.host("g")).unwrap();
    assert_eq!(s.again(file), Ok(file));
    assert_eq!(s.walk("g"), file);
    // A directory that is listed tells of files, too.
    let mut list = List { room: 9, ..List::default() };
    let fh = s.fs.opendir(ROOT_ID, 0).unwrap().fh;
    s.fs.readdirplus(ROOT_ID, fh, 0, &mut list).unwrap();
    let listed: Vec<_> = list.entries.iter().filter(|(name, _)| name == "g").map(|(_, entry)| entry.nodeid).collect();
    assert_eq!(listed, [file]);
    // A new session of the same daemon.
    s.fs.destroy();
    s.fs.init(InitFlags::all()).unwrap();
    assert_eq!((s.fs.known_inodes(), s.again(file)), (1, Ok(file)));
}

#[test]
fn a_removed_file_is_stale_for_ever() {
    let Some(s) = Export::try_new(&Config::default()) else { return };
    let mut nodes = Vec::new();
    for round in 0..50 {
        fs::write(s.host("f"), "x").unwrap();
        create_dir(s.host("d")).unwrap();
        let (file, directory) = (s.walk("f"), s.walk("d"));
        assert!(!nodes.contains(&file) && !nodes.contains(&directory));
        nodes.extend([file, directory]);
        if round % 2 == 0 {
            s.fs.forget(file, 1);
            s.fs.forget(directory, 1);
            remove_file(s.host("f")).unwrap();
            remove_dir(s.host("d")).unwrap();
        } else {
            s.fs.unlink(ROOT_ID, c"f").unwrap();
            s.fs.rmdir(ROOT_ID, c"d").unwrap();
            s.fs.forget(file, 1);
            s.fs.forget(directory, 1);
        }
        for node in &nodes {
            assert_eq!((s.again(*node), s.above(*node)), (Err(Errno::STALE), Err(Errno::STALE)));
        }
    }
    // A guest that removes what it has forgotten costs no descriptor.
    let name = s.host("f").to_string_lossy().into_owned();
    let descriptors = || {
        let all = fs::read_dir("/proc/self/fd").unwrap();
        let paths = all.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
        paths.filter(|path| path.to_string_lossy().starts_with(&name)).count()
    };
    for _ in 0..200 {
        fs::write(s.host("f"), "x").unwrap();
        let file = s.walk("f");
        s.fs.forget(file, 1);
        s.fs.unlink(ROOT_ID, c"f").unwrap();
        assert_eq!(s.again(file), Err(Errno::STALE));
    }
    assert!(descriptors() < 150);
}

#[test]
fn a_nodeid_of_another_daemon_is_stale() {
    let Some(s) = Export::try_new(&Config::default()) else { return };
    fs::write(s.host("f"), "x").unwrap();
    let file = s.walk("f");
    let next = Export::daemon(&s.dir, &Config::default()).unwrap();
    next.init(InitFlags::all()).unwrap();
    assert_ne!(next.lookup(ROOT_ID, c"f").unwrap().nodeid, file);
    assert_eq!(next.lookup(file, c".").err(), Some(Errno::STALE));
    // The root has the same nodeid always.
    assert_eq!(next.lookup(ROOT_ID, c".").unwrap().nodeid, ROOT_ID);
}

#[test]
fn the_directory_of_a_directory_is_in_the_share() {
    let Some(s) = Export::try_new(&Config::default()) else { return };
    create_dir_all(s.host("a/b/c")).unwrap();
    fs::write(s.host("f"), "x").unwrap();
    let (a, b, c) = (s.walk("a"), s.walk("a/b"), s.walk("a/b/c"));
    s.fs.forget(b, 1);
    assert_eq!((s.above(c), s.above(a), s.above(ROOT_ID)), (Ok(b), Ok(ROOT_ID), Ok(ROOT_ID)));
    // It was found without a name before.
    s.fs.forget(b, 1);
    assert_eq!((s.above(b), s.above(c)), (Err(Errno::STALE), Ok(b)));
    assert_eq!(s.above(s.walk("f")), Err(Errno::NOTDIR));
    // The host moves the directory out of the share.
    rename(s.host("a"), s.dir.path().join("a")).unwrap();
    assert_eq!((s.above(a), s.above(b), s.above(c)), (Err(Errno::STALE), Err(Errno::STALE), Err(Errno::STALE)));
    // And another back in, which the guest has not seen.
    rename(s.dir.path().join("a/b"), s.host("b")).unwrap();
    assert_eq!((s.above(b), s.above(c)), (Ok(ROOT_ID), Ok(b)));
    let before = s.fs.known_inodes();
    rename(s.host("b"), s.dir.path().join("a/b")).unwrap();
    rename(s.dir.path().join("a"), s.host("new")).unwrap();
    assert_eq!((s.above(b), s.fs.known_inodes()), (Ok(a), before));
}

#[test]
fn a_mount_in_the_share_has_no_directory_unless_it_is_hidden() {
    if !root() {
        return;
    }
    for hidden in [false, true] {
        let config = Config { no_announce_submounts: hidden, ..Config::default() };
        let Some(s) = Export::try_new(&config) else { return };
        create_dir_all(s.host("m")).unwrap();
        // The same directory again: on a disk, as some tmpfs has no file handles.
        let other = s.dir.path().join("other");
        create_dir_all(other.join("in/it")).unwrap();
        mount(&other, s.host("m"), "", MountFlags::BIND, None).unwrap();
        let (m, inside) = (s.walk("m"), s.walk("m/in"));
        s.fs.forget(m, 1);
        assert_eq!((s.again(m), s.above(inside)), (Ok(m), Ok(m)));
        // The entry of a mount's root is no mount again.
        assert_eq!(s.fs.lookup(m, c".").unwrap().attr.flags & ATTR_SUBMOUNT, 0);
        assert_eq!(s.above(m), if hidden { Ok(ROOT_ID) } else { Err(Errno::STALE) });
        // Open files keep no mount here.
        unmount(s.host("m"), UnmountFlags::DETACH).unwrap();
    }
}

#[test]
fn forgotten_files_make_room() {
    let Some(s) = Export::try_new(&Config { max_inodes: 5, ..Config::default() }) else { return };
    let nodes: Vec<u64> = (0..8)
        .map(|n| {
            fs::write(s.host(&n.to_string()), "x").unwrap();
            let node = s.walk(&n.to_string());
            s.fs.forget(node, 1);
            node
        })
        .collect();
    // The four that were known last.
    let again: Vec<_> = nodes.iter().map(|node| s.again(*node).is_ok()).collect();
    assert_eq!(again, [false, false, false, false, true, true, true, true]);
    assert_eq!(s.fs.lookup(ROOT_ID, c"0").err(), Some(Errno::NFILE));
    s.fs.forget(nodes[7], 1);
    assert!(s.fs.lookup(ROOT_ID, c"0").is_ok_and(|entry| entry.nodeid != nodes[0]));
    assert_eq!(s.again(nodes[7]), Err(Errno::STALE));
}

#[test]
fn forgotten_files_move_by_handle() {
    for (mode, moves) in [(MigrationMode::FileHandles, true), (MigrationMode::FindPaths, false)] {
        let mut config = Config::default();
        config.migration = Migration { mode, trust_handles: true, ..config.migration };
        let Some(s) = Export::try_new(&config) else { return };
        fs::write(s.host("f"), "x").unwrap();
        fs::write(s.host("g"), "x").unwrap();
        let (f, g) = (s.walk("f"), s.walk("g"));
        s.fs.forget(f, 1);
        let state = s.fs.save().unwrap();
        let target = Export::daemon(&s.dir, &config).unwrap();
        target.load(InitFlags::all() & s.fs.init(InitFlags::all()).unwrap().flags, &state).unwrap();
        target.getattr(g, None).unwrap();
        assert_eq!(target.known_inodes(), 2);
        assert_eq!(target.lookup(f, c".").map(|entry| entry.nodeid), if moves { Ok(f) } else { Err(Errno::STALE) });
        assert!(moves || target.lookup(ROOT_ID, c"f").unwrap().nodeid > g);
    }
}

#[test]
fn without_the_option_nothing_is_remembered() {
    let s = plain();
    s.put("f", b"x");
    let node = s.lookup(c"f").unwrap().nodeid;
    s.fs.forget(node, 1);
    assert_eq!(s.fs.lookup(node, c".").err(), Some(Errno::INVAL));
    // A guest that does not know the feature.
    let Some(s) = Export::try_new(&Config::default()) else { return };
    s.fs.destroy();
    assert!(
        !s.fs.init(InitFlags::all() - InitFlags::EXPORT_SUPPORT).unwrap().flags.contains(InitFlags::EXPORT_SUPPORT)
    );
    assert_eq!(s.again(ROOT_ID), Err(Errno::INVAL));
}
