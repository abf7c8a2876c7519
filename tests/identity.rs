//! What one file is and what another, on a file system that does not say when a file was born, and on overlayfs. Needs
//! root, loop devices and mkfs.ext4.
//!
//! Each test has its own process and mount namespace.

mod processes;

use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use processes::{run_mounting, skip};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use thruway::fs::{Config, FileHandles, PassthroughFs, proc_self_fd};
use thruway::fuse::Reply;
use thruway::fuse::abi::*;
use thruway::fuse::ops::{Attrs, Caller, Control, DirSink, Dirs, Files, Names, Result, Threads};
use zerocopy::FromBytes;

type Test = fn(&Path, FileHandles);

const TESTS: &[(&str, Test, &[&str])] = &[
    ("a_number_that_is_used_again_is_another_file", a_number_that_is_used_again_is_another_file, DISKS),
    ("a_copied_up_file_stays_the_same", a_copied_up_file_stays_the_same, OVERLAY),
    ("names_that_part_are_several_files", names_that_part_are_several_files, OVERLAY),
];

/// Inodes of 128 bytes have no time of birth.
const DISKS: &[&str] = &["ext4-128"];

const OVERLAY: &[&str] = &["overlay"];

/// A limit on hangs.
const LONG: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--run", name, disk, handles] => {
            let handles = if handles == "never" { FileHandles::Never } else { FileHandles::Prefer };
            TESTS.iter().find(|(known, ..)| *known == name).unwrap().1(&mount(disk), handles);
        }
        _ => return run(args.iter().find(|arg| !arg.starts_with('-')).map_or("", String::as_str)),
    }
    ExitCode::SUCCESS
}

fn run(filter: &str) -> ExitCode {
    let on_disks = TESTS.iter().flat_map(|(name, _, disks)| disks.iter().map(move |disk| (*name, *disk)));
    run_mounting(on_disks.flat_map(|(name, disk)| ["prefer", "never"].map(|handles| [name, disk, handles])), filter)
}

fn sh(command: &str) -> bool {
    Command::new("sh").args(["-ec", command]).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success()
}

/// Mounts a file system of this kind. Returns the share.
fn mount(disk: &str) -> PathBuf {
    let base = std::env::temp_dir();
    let dir = base.display();
    let mkfs = match disk {
        "ext4-128" => "mkfs.ext4 -q -I 128",
        _ => "mkfs.ext4 -q",
    };
    let made = sh(&format!("cd {dir}; truncate -s 320M image; {mkfs} image; mkdir disk; mount -o loop image disk"));
    if !made {
        skip(format!("there is no {disk} here"));
    }
    let disk = match disk {
        "overlay" => {
            let lower = "echo 1 >low/f; ln low/f low/L; echo 1 >low/single; mkdir low/dir; echo 1 >low/dir/file";
            let mount = "mount -t overlay none -o index=off,lowerdir=low,upperdir=up,workdir=work merged";
            if !sh(&format!("cd {dir}/disk; mkdir low up work merged; {lower}; {mount}")) {
                skip("there is no overlayfs here");
            }
            base.join("disk/merged")
        }
        _ => base.join("disk/share"),
    };
    let _ = fs::create_dir(&disk);
    disk
}

fn session(root: &Path, inode_file_handles: FileHandles) -> PassthroughFs {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root: OwnedFd = rustix::fs::open(root, flags, Mode::empty()).unwrap();
    let config = Config { inode_file_handles, ..Config::default() };
    let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), config).unwrap();
    fs.enter_thread(false);
    fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap();
    fs
}

fn lookup(fs: &PassthroughFs, parent: u64, name: &str) -> u64 {
    fs.lookup(parent, &CString::new(name).unwrap()).unwrap().nodeid
}

fn open(fs: &PassthroughFs, node: u64, flags: i32) -> Result<u64> {
    let (send, sent) = mpsc::channel();
    let mut reply = Reply::late(1, Box::new(move |reply: Vec<u8>| send.send(reply).unwrap()));
    let served =
        fs.open(node, &OpenIn { flags: flags as u32, open_flags: 0 }, Caller { uid: 0, gid: 0, pid: 0 }, &mut reply);
    reply.finish(served);
    let reply = sent.recv().unwrap();
    match OutHeader::read_from_prefix(&reply).unwrap().0.error {
        0 => Ok(OpenOut::read_from_bytes(&reply[16..]).unwrap().fh),
        errno => Err(Errno::from_raw_os_error(-errno)),
    }
}

/// The size of a file that the guest opens.
fn opened_size(fs: &PassthroughFs, node: u64, flags: i32) -> Result<u64> {
    let fh = open(fs, node, flags)?;
    let size = fs.getattr(node, Some(fh))?.attr.size;
    fs.release(node, &ReleaseIn { fh, ..Default::default() })?;
    Ok(size)
}

/// The entries of a listing.
#[derive(Default)]
struct List(Vec<(String, u64)>);

impl DirSink for List {
    fn fits(&self, _: usize) -> bool {
        true
    }

    fn push(&mut self, _: Dirent, name: &[u8], entry: Option<&EntryOut>) {
        self.0.push((String::from_utf8_lossy(name).into(), entry.map_or(0, |entry| entry.nodeid)));
    }
}

/// The nodeid that READDIRPLUS gives a name of the root.
fn listed(fs: &PassthroughFs, name: &str) -> u64 {
    let fh = fs.opendir(ROOT_ID, 0).unwrap().fh;
    let mut list = List::default();
    fs.readdirplus(ROOT_ID, fh, 0, &mut list).unwrap();
    fs.releasedir(ROOT_ID, fh).unwrap();
    list.0.iter().find(|(found, _)| found == name).unwrap().1
}

/// Removes `old` and makes files until one has its number.
fn replace(old: &Path, new: &Path, contents: &str) {
    let number = fs::metadata(old).unwrap().ino();
    fs::remove_file(old).unwrap();
    let end = Instant::now() + LONG;
    let mut others = Vec::new();
    loop {
        fs::write(new, contents).unwrap();
        if fs::metadata(new).unwrap().ino() == number {
            break;
        }
        assert!(Instant::now() < end, "the number is not used again");
        // The other one keeps its number, so that the next file gets another.
        let other = new.with_extension(others.len().to_string());
        fs::rename(new, &other).unwrap();
        others.push(other);
        // A descriptor that is kept for a second or two keeps the number.
        sleep(Duration::from_millis(10));
    }
    others.iter().for_each(|other| fs::remove_file(other).unwrap());
}

fn a_number_that_is_used_again_is_another_file(share: &Path, handles: FileHandles) {
    let fs = session(share, handles);
    type Learn = fn(&PassthroughFs, &str) -> u64;
    let looked_up: Learn = |fs, name| lookup(fs, ROOT_ID, name);
    for (learn, again) in [(looked_up, looked_up), (looked_up, listed), (listed, looked_up), (listed, listed)] {
        if handles == FileHandles::Never && learn as usize == looked_up as usize {
            // A descriptor keeps the number.
            continue;
        }
        let (old, new) = (share.join("old"), share.join("new"));
        fs::write(&old, "old").unwrap();
        let node = learn(&fs, "old");
        replace(&old, &new, "another");
        let other = again(&fs, "new");
        assert_ne!(node, other);
        assert_eq!(opened_size(&fs, other, libc::O_RDWR), Ok(7));
        assert_eq!(open(&fs, node, libc::O_RDONLY), Err(Errno::STALE));
        assert_eq!(lookup(&fs, ROOT_ID, "new"), other);
        assert_eq!(listed(&fs, "new"), other);
        fs::remove_file(&new).unwrap();
    }
}

/// Copying up changes a file's time of birth.
fn a_copied_up_file_stays_the_same(share: &Path, handles: FileHandles) {
    let fs = session(share, handles);
    let dir = lookup(&fs, ROOT_ID, "dir");
    for (parent, name) in [(ROOT_ID, "single"), (dir, "file"), (ROOT_ID, "dir")] {
        let node = lookup(&fs, parent, name);
        match name {
            "dir" => fs::write(share.join("dir/new"), "new").unwrap(),
            _ => assert_eq!(opened_size(&fs, node, libc::O_RDWR), Ok(2)),
        }
        assert_eq!(lookup(&fs, parent, name), node, "{name}");
    }
}

/// Two names of a file in the lower layer become two files when one of them is copied up.
fn names_that_part_are_several_files(share: &Path, handles: FileHandles) {
    let fs = session(share, handles);
    let [f, other] = ["f", "L"].map(|name| lookup(&fs, ROOT_ID, name));
    assert_eq!([opened_size(&fs, f, 0), opened_size(&fs, other, 0)], [Ok(2), Ok(2)]);
    // The guest appends to one, and may not look the other up again before it opens it.
    opened_size(&fs, f, libc::O_RDWR).unwrap();
    OpenOptions::new().append(true).open(share.join("f")).unwrap().write_all(b"more").unwrap();
    assert_eq!(opened_size(&fs, f, 0), Ok(6));
    assert_eq!(opened_size(&fs, other, 0), Ok(2));
    let again = lookup(&fs, ROOT_ID, "L");
    assert_eq!(opened_size(&fs, again, libc::O_RDWR | libc::O_TRUNC), Ok(0));
    assert_eq!(fs::read(share.join("f")).unwrap(), b"1\nmore");
    assert_eq!(fs::read(share.join("L")).unwrap(), b"");
    let f = lookup(&fs, ROOT_ID, "f");
    assert_eq!(opened_size(&fs, f, libc::O_RDWR), Ok(6));
    // What has several names in the upper layer is one file.
    fs::write(share.join("new"), "new").unwrap();
    let new = lookup(&fs, ROOT_ID, "new");
    fs::hard_link(share.join("new"), share.join("newer")).unwrap();
    let [first, second] = ["new", "newer"].map(|name| lookup(&fs, ROOT_ID, name));
    assert_eq!((first, second), (new, new));
}
