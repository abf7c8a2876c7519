//! A share on its own small tmpfs, beside files that no guest may reach.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::{geteuid, getgid, getpid};
use rustix::thread::{CapabilitySet, UnshareFlags, capabilities, unshare_unsafe};
use thruway::fs::{Config, PassthroughFs, proc_self_fd};
use thruway::fuse::abi::*;
use thruway::fuse::ops::{WOULD_WAIT, Wait};
use thruway::fuse::{Server, Transport, Work};
use zerocopy::{FromBytes, IntoBytes};

use super::Here;

/// The content of each file outside the share. No reply may contain it.
pub const SECRET: &[u8] = b"canary: not for the guest";

pub struct Share {
    pub base: PathBuf,
    outside: BTreeMap<PathBuf, String>,
    /// The thread's capabilities.
    has: CapabilitySet,
}

impl Share {
    /// Mounts the tmpfs. Needs root, to make the files that a guest's root makes.
    ///
    /// # Panics
    /// If a system call fails.
    pub fn mount() -> Self {
        assert!(geteuid().is_root(), "this target needs root: run it as root, in a container or a virtual machine");
        // SAFETY: libFuzzer's other threads do not open paths that this changes.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.expect("a mount namespace");
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).expect("private mounts");
        let base = std::env::temp_dir().join(format!("thruway-fuzz-{}", getpid()));
        fs::create_dir_all(&base).unwrap();
        // A device node that a guest makes must not work here.
        let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
        mount("fuzz", &base, "tmpfs", flags, Some(c"size=8m,nr_inodes=600,mode=755")).expect("a tmpfs");
        let mut share = Self { base, outside: BTreeMap::new(), has: capabilities(None).unwrap().effective };
        fs::create_dir(share.base.join("outside")).unwrap();
        fs::write(share.base.join("outside/file"), SECRET).unwrap();
        fs::write(share.base.join("canary"), SECRET).unwrap();
        symlink("file", share.base.join("outside/link")).unwrap();
        share.fill();
        share.outside = share.look();
        share
    }

    pub fn dir(&self) -> PathBuf {
        self.base.join("share")
    }

    /// Empties the share and fills it again.
    pub fn fill(&self) {
        let dir = self.dir();
        if dir.exists() {
            clear(&dir);
        } else {
            fs::create_dir(&dir).unwrap();
        }
        let _ = rustix::fs::chown(&dir, Some(rustix::fs::Uid::ROOT), Some(rustix::fs::Gid::ROOT));
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(dir.join("d")).unwrap();
        fs::write(dir.join("f"), b"contents").unwrap();
        fs::write(dir.join("d/f"), b"more").unwrap();
        symlink("../outside/file", dir.join("l")).unwrap();
        symlink("../outside", dir.join("ld")).unwrap();
        symlink(self.base.join("canary"), dir.join("la")).unwrap();
    }

    /// The state of everything outside the share.
    fn look(&self) -> BTreeMap<PathBuf, String> {
        let mut found = BTreeMap::new();
        let mut left = vec![self.base.clone()];
        while let Some(path) = left.pop() {
            let st = fs::symlink_metadata(&path).unwrap();
            let contents = match st.is_file() {
                true => fs::read(&path).unwrap(),
                false => Vec::new(),
            };
            // Refilling the share changes the base's own times.
            let times = (path != self.base).then(|| (st.mtime(), st.mtime_nsec(), st.ctime(), st.ctime_nsec()));
            let facts = (st.ino(), st.mode(), st.uid(), st.gid(), st.nlink(), st.size(), times);
            if st.is_dir() {
                let of = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().path();
                left.extend(fs::read_dir(&path).unwrap().map(of).filter(|path| *path != self.dir()));
            }
            found.insert(path, format!("{facts:?} {}", contents.escape_ascii()));
        }
        found
    }

    /// # Panics
    /// If anything outside the share has changed, or this thread's identity or capabilities have.
    pub fn check(&self) {
        // Its effective group may be that of who wrote last, until it acts as somebody (`clear_setid`).
        assert!(geteuid().is_root() && getgid().is_root(), "the worker has another identity");
        // The worker drops this one to clear set-id bits.
        let has = capabilities(None).unwrap().effective | CapabilitySet::FSETID;
        assert_eq!(has, self.has | CapabilitySet::FSETID, "the worker's capabilities have changed");
        assert_eq!(self.look(), self.outside, "something outside the share has changed");
    }

    pub fn server(&self, config: Config) -> Server<PassthroughFs> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root: OwnedFd = rustix::fs::open(self.dir(), flags, Mode::empty()).unwrap();
        Server::new(PassthroughFs::new(root, proc_self_fd().unwrap(), config).unwrap())
    }
}

fn clear(dir: &Path) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if fs::symlink_metadata(&path).unwrap().is_dir() {
            clear(&path);
            fs::remove_dir(&path).unwrap();
        } else {
            fs::remove_file(&path).unwrap();
        }
    }
    // A few xattrs of the share itself may stay.
}

/// A guest without a virtqueue.
pub struct Guest {
    pub server: Server<PassthroughFs>,
    work: Work,
    request: Vec<u8>,
    reply: Vec<u8>,
    unique: u64,
}

impl Guest {
    pub fn new(server: Server<PassthroughFs>) -> Self {
        Self { server, work: Work::default(), request: Vec::new(), reply: vec![0; 8192], unique: 0 }
    }

    pub fn init(&mut self, flags: u64) {
        let (flags, flags2) = (flags as u32, (flags >> 32) as u32);
        let init = InitIn { major: 7, minor: 45, flags, flags2, ..Default::default() };
        let _ = self.call(Opcode::Init as u32, 0, (0, 0), &[init.as_bytes()]);
    }

    /// Sends a request. Returns the reply's body or its errno; EINPROGRESS if the reply comes later.
    ///
    /// # Panics
    /// If the reply is malformed, or contains data from outside the share.
    pub fn call(&mut self, opcode: u32, nodeid: u64, (uid, gid): (u32, u32), parts: &[&[u8]]) -> Result<&[u8], i32> {
        self.unique += 2;
        self.request.clear();
        let len = 40 + parts.iter().map(|part| part.len()).sum::<usize>();
        let header = InHeader { len: len as u32, opcode, unique: self.unique, nodeid, uid, gid, ..Default::default() };
        self.request.extend(header.as_bytes());
        parts.iter().for_each(|part| self.request.extend(*part));
        self.work.readable.clear();
        self.work.writable.clear();
        self.reply[16..].fill(0);
        // SAFETY: nothing else uses either buffer until the request is served.
        unsafe {
            self.work.readable.push(self.request.as_mut_ptr(), self.request.len(), true);
            self.work.writable.push(self.reply.as_mut_ptr(), self.reply.len(), true);
        }
        let mut here = Here::default();
        let mut n = self.server.handle(&mut self.work, &mut here);
        if here.io {
            here = Here { may_wait: true, ..Here::default() };
            n = self.server.handle(&mut self.work, &mut here);
            assert!(!here.io && here.job.is_none());
        }
        match here.job.take() {
            Some((Wait::Lock, _)) => return Err(libc::EINPROGRESS),
            Some((_, job)) => job(here.detach()),
            None if n == 0 => return Ok(&[]),
            None => assert!(n <= self.reply.len()),
        }
        if let Some(late) = here.late.lock().unwrap().take() {
            n = late.len().min(self.reply.len());
            self.reply[..n].copy_from_slice(&late[..n]);
        }
        let reply = &self.reply[..n];
        let (header, body) = OutHeader::ref_from_prefix(reply).unwrap();
        assert!(header.unique == self.unique && header.len as usize >= reply.len());
        assert!((-4095..=0).contains(&header.error) && header.error != -WOULD_WAIT.raw_os_error());
        assert!(!body.windows(SECRET.len()).any(|part| part == SECRET), "a reply contains data from outside the share");
        if header.error == 0 { Ok(body) } else { Err(-header.error) }
    }
}
