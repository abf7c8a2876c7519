//! The passthrough file system: serves a directory tree of the host to a guest. Knows no virtqueue.

mod announce;
mod attr;
mod config;
mod contents;
mod cred;
mod dax;
mod dir;
mod export;
mod fd;
mod fd_cache;
mod file;
mod file_handle;
mod flags;
mod handle;
mod host;
pub mod idmap;
mod inode;
mod inodes;
mod inspect;
mod key;
mod lease;
mod listing;
mod lock;
mod mapping;
mod migration;
mod name;
mod opens;
mod owner;
mod path;
mod probe;
mod repeat;
mod seen;
mod sys;
mod takeover;
#[cfg(test)]
mod tests;
mod waits;
mod xattr;
pub mod xattrmap;

/// Private parts that the fuzz targets need.
#[cfg(fuzzing)]
pub mod fuzzing {
    pub use super::migration::format::{Location, State};
}

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{OFlags, StatVfsMountFlags, Timespec, fstatvfs};
use rustix::io::Errno;

use crate::agent::Agents;
use crate::fuse::abi::InitFlags;
use crate::fuse::ops::{Control, Result, Session};
use crate::record::Found;
use crate::watch::Watch;
use crate::window::{self, Window};
pub use config::{
    CachePolicy, Config, FileHandles, Migration, MigrationMode, MigrationOnError, NoOpen, Offer, Ownership,
};
use dax::DaxBudget;
use file_handle::Mounts;
use handle::Handles;
pub use host::is_remote;
use host::{HostFs, Hosts};
use inode::Places;
use inodes::Inodes;
pub use inspect::{InodeFacts, InodeOrder};
use lease::{ChangeForwarder, Leases};
use listing::Listings;
use lock::Locks;
pub use owner::can_keep_owners;
pub use probe::{Probe, probe};
#[cfg(test)]
pub(crate) use sys::{file_id, truncate};

/// A served directory.
pub struct PassthroughFs {
    config: Config,
    /// The workers' working directory, where an O_PATH descriptor has a path.
    proc_self_fd: Arc<OwnedFd>,
    timeout: Duration,
    inodes: Inodes,
    handles: Handles,
    places: Arc<Places>,
    locks: Locks,
    listings: Arc<Listings>,
    hosts: Hosts,
    /// The host's name for security.capability, if `--xattrmap` changes it. A write must then remove it, since the
    /// kernel does not.
    capability: Option<CString>,
    /// What INIT settled ([`InitFlags`]).
    session: AtomicU64,
    /// The guest has been told of a file with a set-group-ID bit that its group may not execute.
    knows_sgid_alone: AtomicBool,
    /// The log says that the shared directory is gone.
    said_removed: AtomicBool,
    /// The log says that an id is refused.
    said_denied: AtomicBool,
    window: Option<Arc<Window>>,
    /// The files that the guest maps with `dax=inode`.
    grants: DaxBudget,
    /// The clock of file times. Tests have another.
    clock: fn() -> Timespec,
    leases: Leases,
    /// What the guest's agent is to repeat.
    agents: Arc<Agents>,
    /// Why files are not named by handle.
    why_no_handles: Option<String>,
}

impl PassthroughFs {
    /// Serves the directory `root`, an O_PATH descriptor. `proc_self_fd` is /proc/self/fd.
    ///
    /// # Errors
    /// EOPNOTSUPP or EPERM if file handles are mandatory and do not work.
    pub fn new(root: OwnedFd, proc_self_fd: OwnedFd, mut config: Config) -> io::Result<Self> {
        cred::enter_thread(proc_self_fd.as_fd());
        sys::catch_interrupt()?;
        sys::ignore_lease_signal()?;
        if config.ownership == Ownership::Xattr {
            can_keep_owners(fd::FdPath::new(root.as_fd()).as_cstr())?;
        }
        let mut why_no_handles = Some("--inode-file-handles=never".to_owned());
        let mut mounts = Mounts::default();
        if config.inode_file_handles != FileHandles::Never {
            // The root stays a descriptor. This finds out whether handles work at all.
            match (Mounts::new(root.as_fd()), config.inode_file_handles) {
                (Err(errno), FileHandles::Mandatory) => return Err(errno.into()),
                (Err(errno), _) => {
                    tracing::info!("no file handles here ({errno}): inodes are held by descriptor");
                    config.inode_file_handles = FileHandles::Never;
                    why_no_handles = Some(errno.to_string());
                }
                (Ok(opened), _) => (mounts, why_no_handles) = (opened, None),
            }
        }
        if let Some(why) = why_no_handles.as_ref().filter(|_| config.nfs_export) {
            return Err(io::Error::other(format!("--nfs-export needs file handles: {why}")));
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
        let proc_self_fd = Arc::new(proc_self_fd);
        let places = Arc::new(Places::new(config.inode_file_handles, mounts, proc_self_fd.clone()));
        Ok(Self {
            timeout,
            inodes: Inodes::new(root, config.max_inodes, config.nfs_export)?,
            handles: Handles::new(),
            places,
            locks: Locks::default(),
            listings: Arc::default(),
            hosts: Hosts::default(),
            capability,
            session: AtomicU64::new(0),
            knows_sgid_alone: AtomicBool::new(false),
            said_removed: AtomicBool::new(false),
            said_denied: AtomicBool::new(false),
            proc_self_fd,
            window: None,
            grants: DaxBudget::default(),
            clock: sys::file_clock,
            leases: Leases::default(),
            agents: Arc::default(),
            why_no_handles,
            config,
        })
    }

    /// Lets the guest's agent repeat changes by others.
    ///
    /// # Errors
    /// If there is no thread.
    pub fn with_watch(mut self, watch: Option<Watch>) -> io::Result<Self> {
        if let Some(watch) = &watch {
            watch.start(Arc::new(ChangeForwarder(self.agents.clone())))?;
        }
        self.leases.watch = watch;
        Ok(self)
    }

    #[cfg(test)]
    fn with_stepped_watch(mut self, watch: Watch, step: impl Fn(crate::watch::Step) + Send + 'static) -> Self {
        watch.start_stepped(Arc::new(ChangeForwarder(self.agents.clone())), step).unwrap();
        self.leases.watch = Some(watch);
        self
    }

    /// Lets the guest map files.
    pub fn with_window(self, window: Option<Arc<Window>>) -> Self {
        let grants = DaxBudget::new(window.as_ref().map_or(0, |window| window.dax_size()));
        let fs = Self { window, grants, ..self };
        // Whether a file gets DAX depends on its file system, which is otherwise not known before a file of it is
        // opened.
        let _ = fs.shared_hosts();
        fs
    }

    /// Inodes that the guest knows, the root included.
    pub fn known_inodes(&self) -> usize {
        self.inodes.len()
    }

    fn has(&self, flag: InitFlags) -> bool {
        self.session.load(Ordering::Relaxed) & flag.bits() != 0
    }

    /// Whether the host takes set-id bits and capabilities away as the guest would. Not where the guest writes to a
    /// DAX window, of which the host sees nothing, nor where the host does not have the bits.
    fn clears_privileges(&self) -> bool {
        !self.maps()
            && !self.keeps_owners()
            && self.shared_hosts().is_ok_and(|hosts| hosts.iter().all(|host| host.clears_privileges))
    }

    /// What `f` says of the shared directory, or of each one of `--share`.
    fn each_shared<R>(&self, f: impl Fn(BorrowedFd) -> Result<R>) -> Result<Vec<R>> {
        self.inodes.get(crate::fuse::abi::ROOT_ID)?.with_fd(&self.places, |root| match &*self.config.share_names {
            [] => Ok(vec![f(root)?]),
            names => names.iter().map(|name| f(fd::open_path(root, name)?.as_fd())).collect(),
        })
    }

    /// The file systems of the shared directories.
    fn shared_hosts(&self) -> Result<Vec<Arc<HostFs>>> {
        self.each_shared(|fd| Ok(self.hosts.get(key::dev(&fd::stat(fd, c"")?), fd)))
    }

    /// # Errors
    /// EROFS on a read-only share.
    fn writable(&self) -> Result<()> {
        if self.config.readonly { Err(Errno::ROFS) } else { Ok(()) }
    }

    /// Whether a share is read-only, by `--readonly` or by its mount on the host.
    fn is_read_only(&self) -> bool {
        let mounted = || self.each_shared(is_mounted_read_only);
        self.config.readonly || mounted().is_ok_and(|mounted| mounted.contains(&true))
    }

    /// Whether the guest keeps contents. Otherwise each write goes to the host at once, and only the times would be
    /// those that the guest wrote back last.
    fn keeps_contents(&self) -> bool {
        matches!(self.config.cache, CachePolicy::Auto | CachePolicy::Always)
    }

    /// The flags of a feature, if the guest is to have it.
    ///
    /// # Errors
    /// EPROTO if the feature is `Always` on and the guest does not have it.
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

    /// Settles a session with a guest that offers these flags. `moved`: another daemon has settled them.
    fn settle(&self, offered: InitFlags, moved: bool) -> Result<Session> {
        let c = &self.config;
        if c.writeback && !moved && !self.keeps_contents() {
            tracing::warn!("with --cache=never and --cache=metadata, --writeback has no effect: nothing is collected");
        }
        let mut wanted = InitFlags::ASYNC_READ
            | InitFlags::ATOMIC_O_TRUNC
            | InitFlags::BIG_WRITES
            | InitFlags::AUTO_INVAL_DATA
            | InitFlags::ASYNC_DIO
            | InitFlags::PARALLEL_DIROPS
            | InitFlags::MAX_PAGES
            // A symbolic link's target never changes, and a nodeid never names another file.
            | InitFlags::CACHE_SYMLINKS
            | InitFlags::SETXATTR_EXT
            | InitFlags::INIT_EXT
            | InitFlags::CREATE_SUPP_GROUP
            | InitFlags::ALLOW_IDMAP;
        for (on, flags) in [
            (!c.no_readdirplus, InitFlags::DO_READDIRPLUS | InitFlags::READDIRPLUS_AUTO),
            (c.writeback && (moved || self.keeps_contents()), InitFlags::WRITEBACK_CACHE),
            (!c.no_announce_submounts, InitFlags::SUBMOUNTS),
            (moved || c.killpriv_v2 || (!c.no_killpriv_v2 && self.clears_privileges()), InitFlags::HANDLE_KILLPRIV_V2),
            (c.posix_lock, InitFlags::POSIX_LOCKS),
            (c.flock, InitFlags::FLOCK_LOCKS),
            (c.nfs_export, InitFlags::EXPORT_SUPPORT),
            (c.allow_mmap, InitFlags::DIRECT_IO_ALLOW_MMAP),
            (self.maps(), InitFlags::MAP_ALIGNMENT | InitFlags::HAS_INODE_DAX),
        ] {
            wanted.set(flags, on);
        }
        if !moved && !(wanted & offered).contains(InitFlags::HANDLE_KILLPRIV_V2) {
            // Linux sends the mode without set-id bits along with a truncation, but not if an OPEN truncates.
            wanted -= InitFlags::ATOMIC_O_TRUNC;
        }
        let acl = InitFlags::POSIX_ACL | InitFlags::DONT_MASK;
        wanted |= self.offer(c.posix_acl, "posix-acl", acl, offered)?;
        wanted |= self.offer(c.security_label, "security-label", InitFlags::SECURITY_CTX, offered)?;
        let offers_passthrough = self.window.as_ref().is_some_and(|window| window.passthrough().is_some());
        if offers_passthrough && offered.contains(InitFlags::PASSTHROUGH_SHM) {
            wanted |= InitFlags::PASSTHROUGH_SHM;
            if c.writeback {
                // With a write-back cache, the guest decides on size and times.
                tracing::warn!(
                    "the guest has window passthrough and therefore no write-back cache: --writeback has no effect"
                );
                wanted -= InitFlags::WRITEBACK_CACHE;
            }
        }
        if self.wants_no_open(moved) && !(wanted & offered).contains(InitFlags::PASSTHROUGH_SHM) {
            wanted |= InitFlags::NO_OPENDIR_SUPPORT;
            // An OPEN is the only message by which a guest hears that it may not write. Without it, stores to a
            // mapping and what a write-back cache holds would be lost.
            let needs_opens = || self.is_read_only() || self.removes_unopened();
            if offered.contains(InitFlags::NO_OPEN_SUPPORT) && (moved || !needs_opens()) {
                wanted |= InitFlags::NO_OPEN_SUPPORT;
                // Linux would leave the truncation to an OPEN that it does not send.
                wanted -= InitFlags::ATOMIC_O_TRUNC;
            }
        }
        let flags = wanted & offered;
        self.session.store(flags.bits(), Ordering::Relaxed);
        Ok(Session { flags, map_alignment: window::RANGE_SHIFT })
    }
}

impl Control for PassthroughFs {
    fn init(&self, offered: InitFlags) -> Result<Session> {
        self.settle(offered, false)
    }

    fn destroy(&self) {
        self.locks.clear();
        self.handles.clear();
        self.inodes.forget_all();
        self.grants.clear();
        self.knows_sgid_alone.store(false, Ordering::Relaxed);
        if let Some(watch) = &self.leases.watch {
            watch.clear();
            self.leases.unwatched.lock().clear();
        }
        if let Some(window) = &self.window {
            window.reset();
        }
        self.agents.clear();
    }

    fn interrupt(&self, unique: u64) {
        self.locks.interrupt(unique);
    }

    fn save(&self) -> io::Result<Vec<u8>> {
        self.save_state()?.encode().map_err(io::Error::other)
    }

    fn check(&self, flags: InitFlags) -> io::Result<()> {
        self.check_settled(flags)
    }

    fn take_over(&self, flags: InitFlags, found: Found) -> io::Result<()> {
        self.take_over_found(flags, found)
    }

    fn take_over_rest(&self, mut found: Found) {
        self.take_over_mappings(&mut found);
    }

    fn load(&self, flags: InitFlags, state: &[u8]) -> io::Result<()> {
        if self.keeps_owners() && flags.contains(InitFlags::HANDLE_KILLPRIV_V2) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the source runs without --ownership=xattr"));
        }
        // Another daemon's nodeids may be the same as those of an earlier session.
        self.inodes.clear();
        self.load_state(flags, state).inspect_err(|_| {
            self.destroy();
            self.inodes.clear();
        })
    }
}

/// Whether nothing on the mount of `fd` can be changed.
fn is_mounted_read_only(fd: BorrowedFd) -> Result<bool> {
    Ok(fstatvfs(fd)?.f_flag.contains(StatVfsMountFlags::RDONLY))
}

/// Opens /proc/self/fd, for tests and for a daemon without a sandbox.
pub fn proc_self_fd() -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open("/proc/self/fd", flags, rustix::fs::Mode::empty())?)
}
