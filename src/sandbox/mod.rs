//! Isolation of the daemon from the host: namespaces or chroot, capabilities, seccomp, resource limits.
//!
//! All of this happens while the process has one thread, except for the seccomp filter, which is applied to all
//! threads.

pub mod caps;
pub mod cgroup;
pub mod limits;
mod namespace;
pub mod seccomp;
pub(crate) mod sys;
mod userns;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{OpenTreeFlags, open_tree};
use rustix::process::{Pid, chdir, chroot, geteuid};

pub use namespace::join;
pub(crate) use namespace::{exit_like, pivot_into, told_pid};
pub(crate) use sys::{hold_back, let_go, reap_children};
pub use userns::IdRange;

/// How the daemon is isolated from files outside the shared directory (`--sandbox`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sandbox {
    /// New mount, process and network namespaces, and a user namespace for an ordinary user; the shared directory
    /// becomes the root.
    Namespace,
    /// The shared directory becomes the root. For containers; needs root.
    Chroot,
    /// No isolation.
    None,
}

/// One of several directories of a device (`--share`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Its name in the guest's root directory.
    pub name: String,
    /// The directory.
    pub dir: PathBuf,
    /// Nothing in it can be changed.
    pub readonly: bool,
}

impl FromStr for Share {
    type Err = String;

    /// Parses `NAME=DIR[,ro]`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, dir) = text.split_once('=').ok_or("expected NAME=DIR or NAME=DIR,ro")?;
        if matches!(name, "" | "." | "..") || name.contains('/') || name.len() > MAX_NAME {
            return Err(format!("'{name}' is not a name for a directory of 1 to {MAX_NAME} bytes"));
        }
        let (dir, readonly) = dir.strip_suffix(",ro").map_or((dir, false), |dir| (dir, true));
        if dir.is_empty() {
            return Err("expected NAME=DIR or NAME=DIR,ro".into());
        }
        Ok(Self { name: name.to_owned(), dir: dir.into(), readonly })
    }
}

/// Longest name in bytes: NAME_MAX (include/uapi/linux/limits.h).
const MAX_NAME: usize = 255;

/// What [`enter`] needs to know.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `--sandbox`
    pub sandbox: Sandbox,
    /// `--shared-dir`. Not used if there are `shares`.
    pub shared_dir: PathBuf,
    /// `--share`. Only with [`Sandbox::Namespace`].
    pub shares: Vec<Share>,
    /// User IDs of the user namespace; empty: only the user's own ID. Only for an ordinary user with
    /// [`Sandbox::Namespace`].
    pub uid_map: Vec<IdRange>,
    /// Group IDs, in the same way.
    pub gid_map: Vec<IdRange>,
    /// A child process for which processes of the host may wait. With [`Sandbox::Namespace`] the process that waits for
    /// the daemon reaps it, and kills it if a signal stops it.
    pub helper: Option<Pid>,
    /// The process that serves must have a supervisor. Only with [`Sandbox::Namespace`].
    pub supervised: bool,
}

/// What the file system needs from inside the sandbox.
#[derive(Debug)]
pub struct Entered {
    /// The shared directory, O_PATH.
    pub root: OwnedFd,
    /// `/proc/self/fd` of the process that serves, O_PATH.
    pub proc_self_fd: OwnedFd,
}

/// What a supervisor needs from inside the sandbox.
#[derive(Debug)]
pub struct Inside {
    /// The shared directory, O_PATH.
    pub root: OwnedFd,
    /// A process file system that has nothing but the sandbox's processes.
    pub proc: OwnedFd,
    /// To the process that waits for it.
    pub channel: UnixStream,
}

/// In which process [`enter_supervised`] returned.
#[derive(Debug)]
pub enum Side<T> {
    /// In the calling one, outside. The sandbox's first process, and the way to it.
    Parent(Pid, UnixStream),
    /// In the sandbox's first process. Its namespaces, for its parent, and what was kept.
    First(Inside, Vec<OwnedFd>, T),
    /// In the calling one, where nothing has changed: this host gives no supervisor what it needs. What was kept, and
    /// why.
    Unable(T, Error),
}

/// Why the daemon cannot enter the sandbox or start the window process, in one line.
#[expect(missing_docs, reason = "each variant has its message")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("--sandbox chroot needs root: run as root, or use --sandbox namespace or none")]
    ChrootNeedsRoot,
    #[error(
        "--uid-map and --gid-map work only for an ordinary user with --sandbox namespace: remove them, or use \
         --translate-uid and --translate-gid"
    )]
    IdMapUnusable,
    #[error("cannot map IDs into the user namespace: {0}")]
    IdMap(String),
    #[error("--supervise needs --sandbox namespace, whose first process is the supervisor")]
    Unsupervised,
    #[error(
        "--share needs --sandbox namespace, which puts the directories together: with chroot or none, bind-mount them \
         below one directory and share that by --shared-dir"
    )]
    SharesUnusable,
    #[error("cannot {step}: {source}")]
    Step { step: &'static str, source: io::Error },
    #[error("{0}")]
    Other(String),
}

/// Adds the name of the step that failed to an error.
pub(crate) trait Step<T> {
    fn step(self, step: &'static str) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> Step<T> for Result<T, E> {
    fn step(self, step: &'static str) -> Result<T, Error> {
        self.map_err(|e| Error::Step { step, source: e.into() })
    }
}

/// Checks whether this user can have this sandbox, before anything is changed.
///
/// # Errors
/// [`Error::IdMapUnusable`], [`Error::ChrootNeedsRoot`], [`Error::Unsupervised`], [`Error::SharesUnusable`].
pub fn check(settings: &Settings) -> Result<(), Error> {
    let root = geteuid().is_root();
    let maps = !settings.uid_map.is_empty() || !settings.gid_map.is_empty();
    if maps && (root || settings.sandbox != Sandbox::Namespace) {
        return Err(Error::IdMapUnusable);
    }
    if settings.sandbox == Sandbox::Chroot && !root {
        return Err(Error::ChrootNeedsRoot);
    }
    if settings.supervised && settings.sandbox != Sandbox::Namespace {
        return Err(Error::Unsupervised);
    }
    if !settings.shares.is_empty() && settings.sandbox != Sandbox::Namespace {
        return Err(Error::SharesUnusable);
    }
    Ok(())
}

/// Enters the sandbox. With [`Sandbox::Namespace`] only a child process returns, with `kept`. The calling process drops
/// its own copy, waits for the child and exits with its status.
///
/// # Errors
/// [`Error`]. The process may then be partly inside the sandbox, and must exit.
pub fn enter<T>(settings: &Settings, kept: T) -> Result<(Entered, T), Error> {
    check(settings)?;
    if geteuid().is_root() {
        drop_groups()?;
    }
    match settings.sandbox {
        Sandbox::Namespace => namespace::enter(settings, kept),
        Sandbox::Chroot => Ok((enter_chroot(&settings.shared_dir)?, kept)),
        Sandbox::None => Ok((Entered { root: open_dir(&settings.shared_dir)?, proc_self_fd: open_fds()? }, kept)),
    }
}

/// As [`enter`] with [`Sandbox::Namespace`], for a supervised daemon. The calling process returns too, and has not
/// moved. It returns alone if it is [`Side::Unable`].
///
/// # Errors
/// [`Error`]. The process may then be partly inside the sandbox, and must exit.
pub fn enter_supervised<T>(settings: &Settings, kept: T) -> Result<Side<T>, Error> {
    check(settings)?;
    if geteuid().is_root() {
        drop_groups()?;
    }
    namespace::enter_supervised(settings, kept)
}

fn enter_chroot(dir: &Path) -> Result<Entered, Error> {
    let proc_self_fd = detached_fds().or_else(|_| open_fds())?;
    chroot(dir).step("make the shared directory the root (needs CAP_SYS_CHROOT)")?;
    chdir("/").step("change to the shared directory")?;
    Ok(Entered { root: open_dir(Path::new("/"))?, proc_self_fd })
}

fn open_dir(dir: &Path) -> Result<OwnedFd, Error> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(CWD, dir, flags, Mode::empty()).step("open the shared directory")
}

fn open_file(path: &Path) -> Result<OwnedFd, Error> {
    openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).step("open the sandbox's namespaces")
}

fn open_fds() -> Result<OwnedFd, Error> {
    open_dir(Path::new("/proc/self/fd")).map_err(|_| Error::Other("/proc/self/fd is missing: mount /proc".into()))
}

/// Opens `/proc/self/fd` as a detached mount, so that `..` does not lead out of it. It needs CAP_SYS_ADMIN.
fn detached_fds() -> Result<OwnedFd, Error> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    open_tree(CWD, "/proc/self/fd", flags).step("detach /proc/self/fd (is /proc mounted?)")
}

/// Drops the supplementary groups. Otherwise the daemon would have them when it acts for any user of the guest.
fn drop_groups() -> Result<(), Error> {
    if rustix::process::getgroups().is_ok_and(|groups| groups.is_empty()) {
        return Ok(());
    }
    match rustix::thread::set_thread_groups(&[]) {
        // In a user namespace with one user, groups cannot be dropped, and the daemon cannot act for other users.
        Err(rustix::io::Errno::PERM) if groups_are_denied() => Ok(()),
        result => result.step("drop the supplementary groups (needs CAP_SETGID)"),
    }
}

fn groups_are_denied() -> bool {
    std::fs::read_to_string("/proc/self/setgroups").is_ok_and(|word| word.trim() == "deny")
}
