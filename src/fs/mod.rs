//! The passthrough file system: a host directory tree served to a guest. Knows no virtqueue.

mod attr;
mod cred;
mod dir;
mod file;
mod file_handle;
mod handle;
mod host;
pub mod idmap;
mod inode;
mod kept;
mod lock;
mod mapping;
mod name;
mod path;
mod state;
mod stream;
mod sys;
#[cfg(test)]
mod tests;
mod xattr;
pub mod xattrmap;

/// For fuzz/.
#[cfg(fuzzing)]
pub mod doors {
    pub use super::stream::{Location, State};
}

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::fuse::abi::InitFlags;
use crate::fuse::ops::{Control, Result, Session};
use crate::limits;
use crate::window::{self, Window};
use handle::{Handles, Listings};
use host::Hosts;
use idmap::IdMap;
use inode::Inodes;
use lock::Locks;
use xattrmap::XattrMap;

/// How long the guest may trust what it has cached (`--cache`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum CachePolicy {
    Auto,
    Always,
    Metadata,
    Never,
}

/// When inodes are held by file handle rather than by O_PATH descriptor (`--inode-file-handles`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum FileHandles {
    Never,
    Prefer,
    Mandatory,
}

/// Whether a feature is offered to the guest (`--posix-acl`, `--security-label`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Offer {
    Never,
    Auto,
    Always,
}

/// How a migration's source says which file an inode is (`--migration-mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum MigrationMode {
    FindPaths,
    FileHandles,
}

/// What a migration's target does about a file that it cannot find (`--migration-on-error`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum MigrationOnError {
    Abort,
    GuestError,
}

/// How a session moves to another daemon.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    pub mode: MigrationMode,
    pub on_error: MigrationOnError,
    /// `--migration-verify-handles`
    pub verify_handles: bool,
    /// `--migration-confirm-paths`
    pub confirm_paths: bool,
    /// As a target, open what the source names by file handle. Such a handle can name any file of the file system, in the
    /// share or not.
    pub trust_handles: bool,
}

/// What the file system is asked to do, as the command line says it.
#[derive(Clone, Debug)]
pub struct Config {
    pub cache: CachePolicy,
    pub writeback: bool,
    pub allow_direct_io: bool,
    pub allow_mmap: bool,
    pub killpriv_v2: bool,
    pub readdirplus: bool,
    pub xattr: bool,
    pub posix_acl: Offer,
    pub security_label: Offer,
    pub announce_submounts: bool,
    pub inode_file_handles: FileHandles,
    pub preserve_noatime: bool,
    pub readonly: bool,
    pub posix_lock: bool,
    pub flock: bool,
    pub uid_map: IdMap,
    pub gid_map: IdMap,
    pub xattrmap: Option<XattrMap>,
    pub migration: Migration,
    /// Most inodes that the guest may know.
    pub max_inodes: usize,
    /// Smallest file that the guest is told to map (`--dax-min-size`), in bytes.
    pub dax_min_size: u64,
    /// Smallest file that is passed through (`--passthrough-min-size`), in bytes.
    pub passthrough_min_size: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cache: CachePolicy::Auto,
            writeback: false,
            allow_direct_io: false,
            allow_mmap: false,
            killpriv_v2: false,
            readdirplus: true,
            xattr: false,
            posix_acl: Offer::Never,
            security_label: Offer::Never,
            announce_submounts: true,
            inode_file_handles: FileHandles::Never,
            preserve_noatime: false,
            readonly: false,
            posix_lock: false,
            flock: false,
            uid_map: IdMap::default(),
            gid_map: IdMap::default(),
            xattrmap: None,
            migration: Migration {
                mode: MigrationMode::FindPaths,
                on_error: MigrationOnError::Abort,
                verify_handles: false,
                confirm_paths: false,
                trust_handles: false,
            },
            max_inodes: limits::INODES,
            dax_min_size: 0,
            passthrough_min_size: 0,
        }
    }
}

/// A served directory.
pub struct PassthroughFs {
    config: Config,
    /// The workers' working directory: an O_PATH descriptor has a path there.
    proc_self_fd: Arc<OwnedFd>,
    timeout: Duration,
    inodes: Inodes,
    handles: Handles,
    places: Arc<file_handle::Handles>,
    locks: Locks,
    listings: Arc<Listings>,
    hosts: Hosts,
    /// The host's name of security.capability, if it is another one: then its removal by a write is ours to do.
    capability: Option<CString>,
    /// What INIT settled ([`InitFlags`]).
    session: AtomicU64,
    window: Option<Arc<Window>>,
}

impl PassthroughFs {
    /// Serves the directory `root`, an O_PATH descriptor. `proc_self_fd` is /proc/self/fd.
    ///
    /// # Errors
    /// EOPNOTSUPP or EPERM where file handles are mandatory and cannot be had.
    pub fn new(root: OwnedFd, proc_self_fd: OwnedFd, mut config: Config) -> std::io::Result<Self> {
        cred::enter_thread(proc_self_fd.as_fd());
        sys::catch_interrupt()?;
        if config.inode_file_handles != FileHandles::Never {
            // The root stays a descriptor; this is to see whether handles work at all.
            let tried = file_handle::Handles::new(FileHandles::Mandatory).handle(root.as_fd());
            match (tried, config.inode_file_handles) {
                (Err(errno), FileHandles::Mandatory) => return Err(errno.into()),
                (Err(errno), _) => {
                    tracing::info!("no file handles here ({errno}): inodes are held by descriptor");
                    config.inode_file_handles = FileHandles::Never;
                }
                _ => {}
            }
        }
        let timeout = match config.cache {
            CachePolicy::Never => Duration::ZERO,
            CachePolicy::Auto => Duration::from_secs(1),
            // A day, as in virtiofsd. Memory pressure ends cached names and attributes sooner.
            CachePolicy::Always | CachePolicy::Metadata => Duration::from_secs(86400),
        };
        let capability = config.xattrmap.as_ref().and_then(|map| {
            let host = map.to_host(c"security.capability").ok()?;
            (&*host != c"security.capability").then(|| host.into_owned())
        });
        Ok(Self {
            timeout,
            inodes: Inodes::new(root, config.max_inodes)?,
            handles: Handles::new(),
            places: Arc::new(file_handle::Handles::new(config.inode_file_handles)),
            locks: Locks::default(),
            listings: Arc::default(),
            hosts: Hosts::default(),
            capability,
            session: AtomicU64::new(0),
            proc_self_fd: Arc::new(proc_self_fd),
            window: None,
            config,
        })
    }

    /// Lets the guest map files.
    pub fn with_window(self, window: Option<Arc<Window>>) -> Self {
        let fs = Self { window, ..self };
        // What the guest is told of a file's DAX must not depend on whether one was opened before.
        if let Ok(root) = fs.inodes.get(crate::fuse::abi::ROOT_ID) {
            let _ = root.with_fd(&fs.places, |fd| Ok(fs.hosts.get(root.key.dev, fd)));
        }
        fs
    }

    /// Inodes that the guest knows, the root included.
    pub fn known_inodes(&self) -> usize {
        self.inodes.len()
    }

    fn has(&self, flag: InitFlags) -> bool {
        self.session.load(Ordering::Relaxed) & flag.bits() != 0
    }

    /// # Errors
    /// EROFS on a read-only share.
    fn writable(&self) -> Result<()> {
        if self.config.readonly { Err(Errno::ROFS) } else { Ok(()) }
    }

    /// A flag for a feature that the guest must have where it is said to be `Always`.
    fn offer(&self, offer: Offer, option: &str, flags: InitFlags, offered: InitFlags) -> Result<InitFlags> {
        match (offer, offered.contains(flags)) {
            (Offer::Never, _) | (Offer::Auto, false) => Ok(InitFlags::empty()),
            (_, true) => Ok(flags),
            (Offer::Always, false) => {
                tracing::error!("the guest does not support --{option}: use --{option}=auto, or another guest kernel");
                Err(Errno::PROTO)
            }
        }
    }
}

impl Control for PassthroughFs {
    fn enter_thread(&self) {
        cred::enter_thread(self.proc_self_fd.as_fd());
    }

    fn init(&self, offered: InitFlags) -> Result<Session> {
        let c = &self.config;
        let mut wanted = InitFlags::ASYNC_READ
            | InitFlags::ATOMIC_O_TRUNC
            | InitFlags::BIG_WRITES
            | InitFlags::AUTO_INVAL_DATA
            | InitFlags::ASYNC_DIO
            | InitFlags::PARALLEL_DIROPS
            | InitFlags::MAX_PAGES
            // A symbolic link's target never changes, and neither does what a nodeid stands for.
            | InitFlags::CACHE_SYMLINKS
            | InitFlags::SETXATTR_EXT
            | InitFlags::INIT_EXT
            | InitFlags::CREATE_SUPP_GROUP
            | InitFlags::ALLOW_IDMAP;
        for (on, flags) in [
            (c.readdirplus, InitFlags::DO_READDIRPLUS | InitFlags::READDIRPLUS_AUTO),
            (c.writeback, InitFlags::WRITEBACK_CACHE),
            (c.announce_submounts, InitFlags::SUBMOUNTS),
            (c.killpriv_v2, InitFlags::HANDLE_KILLPRIV_V2),
            (c.posix_lock, InitFlags::POSIX_LOCKS),
            (c.flock, InitFlags::FLOCK_LOCKS),
            (c.allow_mmap, InitFlags::DIRECT_IO_ALLOW_MMAP),
            (self.maps(), InitFlags::MAP_ALIGNMENT | InitFlags::HAS_INODE_DAX),
        ] {
            wanted.set(flags, on);
        }
        let acl = InitFlags::POSIX_ACL | InitFlags::DONT_MASK;
        wanted |= self.offer(c.posix_acl, "posix-acl", acl, offered)?;
        wanted |= self.offer(c.security_label, "security-label", InitFlags::SECURITY_CTX, offered)?;
        let pass = self.window.as_ref().and_then(|window| window.passthrough());
        let passthrough = pass.filter(|_| offered.contains(InitFlags::PASSTHROUGH_SHM)).map(|pass| pass.start());
        if passthrough.is_some() {
            wanted |= InitFlags::PASSTHROUGH_SHM;
            if c.writeback {
                // Under it the guest owns size and times.
                tracing::warn!(
                    "the guest has window passthrough, and so no write-back cache: --writeback has no effect"
                );
                wanted -= InitFlags::WRITEBACK_CACHE;
            }
        }
        let flags = wanted & offered;
        self.session.store(flags.bits(), Ordering::Relaxed);
        Ok(Session { flags, map_alignment: window::RANGE_SHIFT, passthrough })
    }

    fn destroy(&self) {
        self.locks.clear();
        self.handles.clear();
        self.inodes.clear();
        if let Some(window) = &self.window {
            window.reset();
        }
    }

    fn interrupt(&self, unique: u64) {
        self.locks.interrupt(unique);
    }

    fn save(&self) -> io::Result<Vec<u8>> {
        if self.has(InitFlags::PASSTHROUGH_SHM) {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the guest has window passthrough, which cannot move",
            ));
        }
        Ok(self.save_state()?.encode())
    }

    fn load(&self, flags: InitFlags, state: &[u8]) -> io::Result<()> {
        if flags.contains(InitFlags::PASSTHROUGH_SHM) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the source's guest has window passthrough"));
        }
        self.load_state(flags, state).inspect_err(|_| self.destroy())
    }
}

/// Opens /proc/self/fd, for tests and for a daemon without a sandbox.
pub fn proc_self_fd() -> std::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open("/proc/self/fd", flags, rustix::fs::Mode::empty())?)
}
