//! The socket on which the daemon waits for a frontend.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, flock};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::sockopt::{socket_acceptconn, socket_domain};
use rustix::process::umask;

/// Why the daemon cannot listen, in one line.
#[expect(missing_docs, reason = "each variant has its message")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("another daemon uses the socket '{0}': stop it, or choose another path")]
    InUse(PathBuf),
    #[error("'{0}' exists and is not a socket: remove it, or choose another path")]
    NotASocket(PathBuf),
    #[error("'{0}' exists and is not a pid file: remove it, or choose another path")]
    NotAPidFile(PathBuf),
    #[error("the directory '{0}' for the socket does not exist: create it, or choose another path")]
    NoDirectory(PathBuf),
    #[error(
        "the directory '{0}' for the socket is out of reach: the daemon's user may not search a directory above it"
    )]
    OutOfReach(PathBuf),
    #[error("the path '{0}' of the socket is longer than {LONGEST_PATH} bytes: choose a shorter one")]
    LongPath(PathBuf),
    #[error("the group '{0}' for the socket does not exist: choose another --socket-group")]
    NoGroup(String),
    #[error("--fd {0} is not a listening Unix socket: the parent process must pass one")]
    BadFd(RawFd),
    #[error("cannot {what} '{path}': {source}")]
    Path { what: &'static str, path: PathBuf, source: io::Error },
}

/// How often and at what interval the daemon tries to lock a pid file. A supervisor starts the next daemon at once
/// after it killed one, which takes some milliseconds to end, or more if it had much memory mapped.
const LOCK_TRIES: usize = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// The longest path of a socket in bytes: sun_path of unix(7) has 108, one of them for the NUL.
const LONGEST_PATH: usize = 107;

/// The longest contents of a pid file in bytes: any process ID and a newline fit.
const LONGEST_PID: u64 = 20;

/// A listening socket at a path.
#[derive(Debug)]
pub struct Bound {
    /// The socket.
    pub listener: UnixListener,
    /// Locked while it is open. Meanwhile no other daemon can take the path.
    pub pid_file: File,
}

/// Creates the socket `path` for its owner and `group`. It replaces a socket that no daemon has locked.
///
/// # Errors
/// [`Error`]
pub fn bind(path: &Path, group: Option<&str>) -> Result<Bound, Error> {
    let gid = group.map(group_id).transpose()?;
    if path.as_os_str().len() > LONGEST_PATH {
        return Err(Error::LongPath(path.to_owned()));
    }
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match dir.metadata() {
        Ok(found) if found.is_dir() => {}
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return Err(Error::OutOfReach(dir.to_owned())),
        _ => return Err(Error::NoDirectory(dir.to_owned())),
    }
    let pid_file = lock(path)?;
    remove_stale(path)?;
    let others = if gid.is_some() { Mode::RWXO } else { Mode::RWXG | Mode::RWXO };
    let before = umask(others);
    let listener = UnixListener::bind(path);
    umask(before);
    let listener = listener.map_err(at("listen on", path))?;
    if gid.is_some() {
        chown(path, None, gid).map_err(at("set the group of", path))?;
    }
    Ok(Bound { listener, pid_file })
}

/// As [`bind`], for the owner alone, with mode 0600.
///
/// # Errors
/// [`Error`]
pub fn bind_private(path: &Path) -> Result<Bound, Error> {
    let bound = bind(path, None)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(at("set the mode of", path))?;
    Ok(bound)
}

/// Takes over a listening socket that the parent process passed.
///
/// # Errors
/// [`Error::BadFd`]
pub fn inherit(fd: RawFd) -> Result<UnixListener, Error> {
    if !is_listening(fd) {
        return Err(Error::BadFd(fd));
    }
    // SAFETY: the check above saw that the descriptor is open, and --fd gives its ownership to the daemon.
    let listener = UnixListener::from(unsafe { OwnedFd::from_raw_fd(fd) });
    fcntl_setfd(&listener, FdFlags::CLOEXEC).map_err(|_| Error::BadFd(fd))?;
    // The daemon waits in accept(2). With a non-blocking socket it would call it in a loop.
    listener.set_nonblocking(false).map_err(|_| Error::BadFd(fd))?;
    Ok(listener)
}

fn is_listening(fd: RawFd) -> bool {
    // SAFETY: fcntl(2) accepts any number.
    if fd < 0 || unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return false;
    }
    // SAFETY: the check above saw that the descriptor is open, and nothing closes it meanwhile.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    socket_domain(fd.as_fd()) == Ok(rustix::net::AddressFamily::UNIX) && socket_acceptconn(fd) == Ok(true)
}

/// Locks `path`.pid, as virtiofsd does, and writes the process ID to it.
fn lock(path: &Path) -> Result<File, Error> {
    let mut name = path.as_os_str().to_owned();
    name.push(".pid");
    let pid_path = Path::new(&name);
    let cannot = at("lock", pid_path);
    for _ in 0..LOCK_TRIES {
        let Some(mut file) = open_pid_file(pid_path).map_err(&cannot)? else { continue };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => {
                std::thread::sleep(LOCK_PAUSE);
                continue;
            }
            result => result.map_err(|e| cannot(e.into()))?,
        }
        // The previous holder of the lock may have removed the file.
        let locked = file.metadata().map_err(&cannot)?.ino();
        if fs::symlink_metadata(pid_path).is_ok_and(|now| now.ino() == locked) {
            if !is_pid_file(&file).map_err(&cannot)? {
                return Err(Error::NotAPidFile(pid_path.to_owned()));
            }
            file.set_len(0).and_then(|()| file.rewind()).map_err(&cannot)?;
            writeln!(file, "{}", std::process::id()).map_err(&cannot)?;
            return Ok(file);
        }
    }
    Err(Error::InUse(path.to_owned()))
}

/// Creates the file or opens the existing one. Returns `None` if the existing one has just been removed. It follows no
/// symbolic link and does not block on a FIFO.
fn open_pid_file(path: &Path) -> io::Result<Option<File>> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    match options.clone().create_new(true).open(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        made => return made.map(Some),
    }
    match options.open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

/// Whether the file may be overwritten: it has only one link, and contains a process ID or nothing.
fn is_pid_file(file: &File) -> io::Result<bool> {
    let meta = file.metadata()?;
    if !meta.is_file() || meta.nlink() != 1 {
        return Ok(false);
    }
    let mut text = Vec::new();
    Read::take(file, LONGEST_PID + 1).read_to_end(&mut text)?;
    let is_number = text.iter().all(|b| b.is_ascii_digit() || b.is_ascii_whitespace());
    Ok(text.len() as u64 <= LONGEST_PID && is_number)
}

fn remove_stale(path: &Path) -> Result<(), Error> {
    match fs::symlink_metadata(path) {
        Err(_) => Ok(()),
        Ok(found) if !found.file_type().is_socket() => Err(Error::NotASocket(path.to_owned())),
        Ok(_) => fs::remove_file(path).map_err(at("remove the old socket", path)),
    }
}

fn group_id(name: &str) -> Result<u32, Error> {
    let no_group = || Error::NoGroup(name.to_owned());
    let c_name = CString::new(name).map_err(|_| no_group())?;
    // SAFETY: the name is a C string, and the process has one thread, so nothing changes the result while it is read.
    unsafe { libc::getgrnam(c_name.as_ptr()).as_ref() }.map(|group| group.gr_gid).ok_or_else(no_group)
}

fn at(what: &'static str, path: &Path) -> impl Fn(io::Error) -> Error {
    move |source| Error::Path { what, path: path.to_owned(), source }
}
