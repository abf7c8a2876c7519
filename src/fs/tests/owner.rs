//! Owners in an extended attribute.

use std::collections::BTreeMap;

use rustix::fs::{getxattr, lgetxattr, listxattr};

use super::*;
use crate::fs::Ownership;

const USER: Creator = Creator { uid: 1000, gid: 1001, ..ROOT };

fn kept(config: Config) -> Share {
    share(Config { ownership: Ownership::Xattr, xattr: true, ..config })
}

impl Share {
    /// What is kept of a file.
    fn kept(&self, name: &str) -> String {
        let mut value = [0; 100];
        let n = lgetxattr(self.dir.path().join(name), "user.containers.override_stat", &mut value);
        String::from_utf8_lossy(&value[..n.unwrap_or(0)]).into()
    }

    /// The owner on the host, which is this process, and the mode.
    fn host_mode(&self, name: &str) -> u32 {
        let meta = fs::symlink_metadata(self.dir.path().join(name)).unwrap();
        let me = me();
        assert_eq!((meta.uid(), meta.gid()), (me.uid, me.gid), "{name}");
        meta.mode()
    }

    fn set(&self, node: u64, valid: SetattrValid, uid: u32, gid: u32, mode: u32) -> Result<(u32, u32, u32)> {
        let out =
            self.fs.setattr(node, &SetattrIn { valid: valid.bits(), uid, gid, mode, ..Default::default() }, CALLER);
        out.map(|out| (out.attr.uid, out.attr.gid, out.attr.mode))
    }

    fn seen(&self, name: &CStr) -> (u32, u32, u32) {
        let attr = self.lookup(name).unwrap().attr;
        (attr.uid, attr.gid, attr.mode)
    }
}

const OWNER: SetattrValid = SetattrValid::UID.union(SetattrValid::GID);

#[test]
fn all_files_belong_to_the_daemons_user() {
    let s = kept(Config::default());
    let create = CreateIn { flags: libc::O_RDWR as u32, mode: libc::S_IFREG | 0o4640, ..Default::default() };
    answered::<CreateOut>(|reply| s.fs.create(ROOT_ID, c"file", &create, &USER, reply)).unwrap();
    s.fs.mkdir(ROOT_ID, c"dir", 0o1777, &USER).unwrap();
    for (name, mode, rdev) in [
        (c"char", libc::S_IFCHR | 0o666, 0x103),
        (c"block", libc::S_IFBLK | 0o660, 0x801),
        (c"pipe", libc::S_IFIFO | 0o600, 0),
        (c"socket", libc::S_IFSOCK | 0o755, 0),
        (c"regular", libc::S_IFREG | 0o2755, 0),
    ] {
        let entry = s.fs.mknod(ROOT_ID, name, mode, rdev, &USER).unwrap();
        assert_eq!((entry.attr.uid, entry.attr.gid, entry.attr.mode, entry.attr.rdev), (1000, 1001, mode, rdev));
        assert_eq!(s.fs.statx(entry.nodeid, None, 0, u32::MAX).unwrap().stat.mode, mode as u16);
    }
    assert_eq!(s.seen(c"file"), (1000, 1001, libc::S_IFREG | 0o4640));
    for (name, value, mode) in [
        ("file", "1000:1001:4640:file", libc::S_IFREG | 0o600),
        ("dir", "1000:1001:1777:dir", libc::S_IFDIR | 0o755),
        ("char", "1000:1001:0666:char-1-3", libc::S_IFREG | 0o644),
        ("block", "1000:1001:0660:block-8-1", libc::S_IFREG | 0o600),
        ("pipe", "1000:1001:0600:pipe", libc::S_IFREG | 0o600),
        ("socket", "1000:1001:0755:socket", libc::S_IFREG | 0o755),
        ("regular", "1000:1001:2755:file", libc::S_IFREG | 0o755),
    ] {
        assert_eq!((s.kept(name).as_str(), s.host_mode(name)), (value, mode), "{name}");
    }
    // What cannot be kept fails, and leaves nothing.
    let nobody = Creator { uid: u32::MAX, ..ROOT };
    assert_eq!(s.fs.mkdir(ROOT_ID, c"no", 0o755, &nobody).err(), Some(Errno::INVAL));
    assert!(!s.dir.path().join("no").exists());
}

#[test]
fn what_the_guest_sets_is_kept_and_moves_with_the_file() {
    let s = kept(Config::default());
    s.put("file", b"from the host");
    fs::set_permissions(s.dir.path().join("file"), fs::Permissions::from_mode(0o444)).unwrap();
    let node = s.lookup(c"file").unwrap().nodeid;
    // What has no attribute and is the daemon's own is root's.
    assert_eq!(s.seen(c"file"), (0, 0, libc::S_IFREG | 0o444));
    assert_eq!(s.set(node, OWNER, 7, 8, 0), Ok((7, 8, libc::S_IFREG | 0o444)));
    assert_eq!(s.set(node, SetattrValid::MODE, 0, 0, 0o6711), Ok((7, 8, libc::S_IFREG | 0o6711)));
    assert_eq!((s.kept("file").as_str(), s.host_mode("file")), ("7:8:6711:file", libc::S_IFREG | 0o711));
    // chown(2) takes set-id bits away. A single id leaves the other.
    assert_eq!(s.set(node, SetattrValid::GID, 0, 9, 0), Ok((7, 9, libc::S_IFREG | 0o711)));
    assert_eq!(s.set(node, OWNER, u32::MAX, 0, 0), Err(Errno::INVAL));
    // A hard link is the same file, and a rename takes all along.
    s.fs.link(node, ROOT_ID, c"link").unwrap();
    s.fs.rename(ROOT_ID, c"link", ROOT_ID, c"moved", 0, &ROOT).unwrap();
    assert_eq!(s.set(node, SetattrValid::UID, 3, 0, 0), Ok((3, 9, libc::S_IFREG | 0o711)));
    assert_eq!(s.seen(c"moved"), (3, 9, libc::S_IFREG | 0o711));
    // An open file without a name.
    let create = CreateIn { flags: libc::O_RDWR as u32, mode: 0o600, ..Default::default() };
    let tmp: CreateOut = answered(|reply| s.fs.tmpfile(ROOT_ID, &create, &USER, reply)).unwrap();
    assert_eq!((tmp.entry.attr.uid, tmp.entry.attr.mode), (1000, libc::S_IFREG | 0o600));
    assert_eq!(s.set(tmp.entry.nodeid, OWNER, 5, 6, 0), Ok((5, 6, libc::S_IFREG | 0o600)));
    s.fs.link(tmp.entry.nodeid, ROOT_ID, c"named").unwrap();
    assert_eq!(s.seen(c"named"), (5, 6, libc::S_IFREG | 0o600));
    let (node, fh) = s.open(c"named", libc::O_RDWR);
    s.fs.unlink(ROOT_ID, c"named").unwrap();
    assert_eq!(s.set(node, OWNER, 1, 2, 0), Ok((1, 2, libc::S_IFREG | 0o600)));
    assert_eq!(s.fs.getattr(node, Some(fh)).unwrap().attr.uid, 1);
    // A symbolic link can keep nothing.
    let link = s.fs.symlink(ROOT_ID, c"symlink", c"x", &USER).unwrap();
    assert_eq!(s.set(link.nodeid, OWNER, 1, 2, 0), Ok((0, 0, libc::S_IFLNK | 0o777)));
    // Nor can a pipe of the host, which stays as it is.
    rustix::fs::mknodat(rustix::fs::CWD, s.dir.path().join("fifo"), rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
    let fifo = s.lookup(c"fifo").unwrap();
    assert_eq!((fifo.attr.uid, fifo.attr.mode), (0, libc::S_IFIFO | 0o400));
    assert_eq!(s.set(fifo.nodeid, OWNER, 1, 2, 0), Err(Errno::PERM));
}

#[test]
fn a_directory_gives_its_group_to_what_is_made_in_it() {
    let s = kept(Config::default());
    let dir = s.fs.mkdir(ROOT_ID, c"d", 0o2755, &Creator { gid: 50, ..ROOT }).unwrap().nodeid;
    let sub = s.fs.mkdir(dir, c"sub", 0o755, &USER).unwrap();
    assert_eq!((sub.attr.gid, sub.attr.mode), (50, libc::S_IFDIR | 0o2755));
    assert_eq!(s.fs.mknod(dir, c"f", libc::S_IFREG | 0o600, 0, &USER).unwrap().attr.gid, 50);
    assert_eq!(s.host_mode("d/sub") & 0o7777, 0o755);
}

#[test]
fn a_listing_has_the_kinds_that_the_guest_sees() {
    let s = kept(Config::default());
    for name in ["plain", "device"] {
        s.put(name, b"");
    }
    s.fs.mkdir(ROOT_ID, c"dir", 0o755, &USER).unwrap();
    rustix::fs::setxattr(
        s.dir.path().join("device"),
        "user.containers.override_stat",
        b"4:5:0600:char-1-3",
        rustix::fs::XattrFlags::empty(),
    )
    .unwrap();
    struct Kinds(BTreeMap<Vec<u8>, (u32, u32)>);
    impl DirSink for Kinds {
        fn fits(&self, _: usize) -> bool {
            true
        }
        fn push(&mut self, dirent: Dirent, name: &[u8], entry: Option<&EntryOut>) {
            self.0.insert(name.into(), (dirent.kind, entry.map_or(0, |entry| entry.attr.uid)));
        }
    }
    let fh = s.fs.opendir(ROOT_ID, 0).unwrap().fh;
    let list = |plus: bool| {
        let mut kinds = Kinds(BTreeMap::new());
        match plus {
            true => s.fs.readdirplus(ROOT_ID, fh, 0, &mut kinds).unwrap(),
            false => s.fs.readdir(ROOT_ID, fh, 0, &mut kinds).unwrap(),
        }
        let get = |name: &str| kinds.0[name.as_bytes()];
        [get("plain"), get("device"), get("dir")]
    };
    let [unknown, char, dir, regular] = [libc::DT_UNKNOWN, libc::DT_CHR, libc::DT_DIR, libc::DT_REG].map(u32::from);
    assert_eq!(list(true), [(regular, 0), (char, 4), (dir, 1000)]);
    assert_eq!(list(false).map(|(kind, _)| kind), [unknown, unknown, dir]);
}

#[test]
fn whoever_changes_a_file_takes_its_set_id_bits() {
    for flags in [InitFlags::all(), InitFlags::all() - InitFlags::HANDLE_KILLPRIV_V2] {
        let s = kept(Config::default());
        // The guest is to clear them where it can.
        assert!(!s.fs.init(flags).unwrap().flags.contains(InitFlags::HANDLE_KILLPRIV_V2));
        let error = s.fs.load(InitFlags::HANDLE_KILLPRIV_V2, &[]).unwrap_err();
        assert!(error.to_string().contains("--ownership=xattr"));
        s.put("f", b"data");
        let (node, fh) = s.open(c"f", libc::O_RDWR);
        s.set(node, SetattrValid::MODE, 0, 0, 0o6755).unwrap();
        s.write(node, fh, 0, b"x", 0, 0).unwrap();
        assert_eq!(s.kept("f"), "0:0:6755:file");
        s.write(node, fh, 0, b"x", WRITE_KILL_SUIDGID, 0).unwrap();
        assert_eq!(s.kept("f"), "0:0:0755:file");
        s.set(node, SetattrValid::MODE, 0, 0, 0o6744).unwrap();
        let truncating = OpenIn { flags: (libc::O_RDWR | libc::O_TRUNC) as u32, open_flags: OPEN_KILL_SUIDGID };
        answered::<OpenOut>(|reply| s.fs.open(node, &truncating, CALLER, reply)).unwrap();
        assert_eq!(s.kept("f"), "0:0:2744:file");
    }
}

#[test]
fn the_guest_does_not_reach_the_attribute() {
    let name = c"user.containers.override_stat";
    let map = ":prefix:all:override_stat:user.containers.::ok:all:::";
    for (map, guest) in [(None, name), (Some(map), c"override_stat")] {
        let s = kept(Config { xattrmap: map.map(|map| map.parse().unwrap()), ..Default::default() });
        let node = s.fs.mknod(ROOT_ID, c"f", libc::S_IFREG | 0o600, 0, &USER).unwrap().nodeid;
        for name in [name, guest] {
            let mut value = Vec::new();
            assert_eq!(s.fs.getxattr(node, name, 100, &mut value), Err(Errno::NODATA), "{name:?}");
            assert_eq!(s.fs.setxattr(node, name, b"0:0:6777:file", 0, None), Err(Errno::PERM));
            assert_eq!(s.fs.removexattr(node, name), Err(Errno::PERM));
        }
        s.fs.setxattr(node, c"user.other", b"x", 0, None).unwrap();
        let mut names = Vec::new();
        s.fs.listxattr(node, 1000, &mut names).unwrap();
        assert_eq!(names, b"user.other\0");
        assert_eq!(s.kept("f"), "1000:1001:0600:file");
        let mut value = [0; 10];
        assert_eq!(getxattr(s.dir.path().join("f"), "user.other", &mut value), Ok(1));
        assert!(listxattr(s.dir.path().join("f"), &mut [0u8; 1000]).unwrap() > names.len());
    }
}

#[test]
fn a_value_of_others_is_read_and_a_wrong_one_is_not() {
    let s = kept(Config::default());
    s.put("f", b"");
    let set = |value: &[u8]| {
        let path = s.dir.path().join("f");
        rustix::fs::setxattr(path, "user.containers.override_stat", value, rustix::fs::XattrFlags::empty()).unwrap();
        s.seen(c"f")
    };
    assert_eq!(set(b"5:6:0100640"), (5, 6, libc::S_IFREG | 0o640));
    assert_eq!(set(b"5:6:0640:dir"), (5, 6, libc::S_IFREG | 0o640));
    assert_eq!(set(b"5:6:010640"), (5, 6, libc::S_IFIFO | 0o640));
    let host = (0, 0, s.host_mode("f"));
    for wrong in [&b"5:6"[..], b"5:6:9", b"-1:0:0644:file", b"\xff:0:0644:file", &[b'1'; 4000]] {
        assert_eq!(set(wrong), host);
    }
}
