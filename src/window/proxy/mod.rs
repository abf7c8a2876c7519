//! Proxy files: files of a private FUSE mount that stand for real ones where QEMU is to map them.
//!
//! QEMU maps a descriptor only if it is O_RDWR and the file is as large as the mapping, and it resizes an empty one. A
//! proxy file is large, cannot be resized, and mapping it maps the page cache of the real file. Serving the mount takes
//! CAP_SYS_ADMIN, so a process of its own does that, the window process; [`Proxy`] is the daemon's end of it.
//!
//! /dev/fuse is served directly: the crate `fuser` would add a dozen crates for nine requests, and hides the descriptor
//! from the handshake to the notifications.

mod data;
mod fuse;
#[cfg(fuzzing)]
pub mod fuzzing;
mod guard;
mod marks;
mod messages;
mod nodes;
mod process;
mod shared;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv};
use rustix::process::Pid;
use rustix::time::{ClockId, clock_gettime};
use zerocopy::IntoBytes;

use messages::{
    Answer, CHANGED, Call, FIND_CACHED, FIND_THROUGH, INVALIDATE, Notice, OPEN_CACHED, OPEN_THROUGH, REVOKE, WATCH,
    receive, send,
};
pub use nodes::FileId;
pub(super) use shared::errno;

use crate::sandbox::{self, seccomp};

/// How a proxy file uses the real one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Its mapping is a mapping of the real file. Beyond the real file's end it raises SIGBUS.
    Through,
    /// It has its own page cache. Beyond the real file's end it reads zeros and drops what is written.
    Cached,
}

/// Whether host processes that truncate a mapped file are held until the mapping is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum GuardMode {
    /// They are not held.
    None,
    /// They are held by pre-content events, where the kernel and the file system have these.
    Fanotify,
}

/// Whether there is a guard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Guard {
    /// There is one.
    On,
    /// With the reason.
    Off(String),
}

impl fmt::Display for Guard {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::On => f.write_str("the host's truncations of mapped files wait for the mapping's end"),
            Self::Off(reason) => write!(f, "mapped files are not guarded against truncation by the host: {reason}"),
        }
    }
}

/// What others do to a file. The number is the id of its proxy file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// A truncation waits until the Through proxy file is gone: all its mappings, and then all its descriptors, here
    /// and in QEMU.
    Revoke(u64),
    /// It was written to, or its size changed.
    Changed(u64),
}

/// An open proxy file.
#[derive(Debug)]
pub struct Opened {
    /// Its descriptor, open for reading and writing.
    pub fd: OwnedFd,
    /// Whether truncations of the real file wait for a revocation.
    pub guarded: bool,
}

/// A proxy file that another process of the daemon has opened.
#[derive(Debug)]
pub struct Found {
    /// As [`Opened`], once more.
    pub opened: Opened,
    /// The real file, as that process had opened it.
    pub real: OwnedFd,
    /// There was an [`Event::Revoke`] of it.
    pub revoked: bool,
}

/// Numbers of calls. No process of a daemon has those of another: they begin with the clock, and no process makes as
/// many calls as nanoseconds pass.
#[derive(Debug)]
struct Numbers(AtomicU64);

impl Numbers {
    fn new() -> Self {
        let now = clock_gettime(ClockId::Monotonic);
        Self(AtomicU64::new((now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)))
    }

    fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

/// The daemon's end of the window process. When it is dropped, the window process ends.
#[derive(Debug)]
pub struct Proxy {
    calls: Mutex<OwnedFd>,
    invalidations: Mutex<OwnedFd>,
    notices: OwnedFd,
    numbers: Numbers,
    guard: Guard,
    pid: Pid,
    shared_group: Option<String>,
}

/// How long a host process waits for the end of a mapping. The guest's part takes milliseconds; a service on the host
/// that hangs for longer than this is taken for dead.
pub const DEADLINE: Duration = Duration::from_secs(2);

/// Starts the window process. To be called by root while this process has one thread, before [`crate::sandbox::enter`],
/// and after the limit of open files is set: the window process has as many as files are open. A host process waits for
/// the end of a mapping for `deadline` at most, which is [`DEADLINE`] except in tests.
///
/// # Errors
/// [`sandbox::Error`] if anything that proxy files need is missing.
pub fn start(guard: GuardMode, deadline: Duration, action: seccomp::Action) -> Result<Proxy, sandbox::Error> {
    process::start(guard, deadline, action)
}

/// Whether this is a proxy file, of this daemon or of another one. Waits for nobody: the kernel knows the size.
///
/// # Errors
/// Those of statx(2).
pub fn is_proxy_file(file: impl AsFd) -> io::Result<bool> {
    let st = statx(file, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::SIZE)?;
    // No other file that a frontend maps is as long.
    Ok(st.stx_size >= fuse::SIZE)
}

impl Proxy {
    /// Opens the proxy file of `real`. `id` is the caller's number for that file, from 1 on and never used for another.
    /// For [`Kind::Through`] `real` must be O_RDWR; look at its size after this call, not before. Both kinds may be
    /// open for one id, with different `real` of the same inode. All that the window process holds for the file goes
    /// when the last descriptor of the proxy file is closed, here and in QEMU.
    ///
    /// # Errors
    /// EBUSY while the file is to be dropped after [`Event::Revoke`], and until the truncation that waited for that is
    /// over (the deadline at most); EACCES if `real` must be O_RDWR and is not; ESTALE if `id` is in use for another
    /// inode.
    pub fn open(&self, id: u64, kind: Kind, real: BorrowedFd) -> io::Result<Opened> {
        let what = if kind == Kind::Through { OPEN_THROUGH } else { OPEN_CACHED };
        let (answer, mut fds) = self.call(&self.calls, what, id, &[real])?;
        let fd = fds.pop().ok_or_else(no_descriptor)?;
        Ok(Opened { fd, guarded: answer.guarded != 0 })
    }

    /// Opens a proxy file once more that another process of the daemon has opened.
    ///
    /// # Errors
    /// ENOENT if nobody has it open any more.
    pub fn find(&self, id: u64, kind: Kind) -> io::Result<Found> {
        let what = if kind == Kind::Through { FIND_THROUGH } else { FIND_CACHED };
        let (answer, mut fds) = self.call(&self.calls, what, id, &[])?;
        let (Some(real), Some(fd)) = (fds.pop(), fds.pop()) else { return Err(no_descriptor()) };
        Ok(Found { opened: Opened { fd, guarded: answer.guarded != 0 }, real, revoked: answer.revoked != 0 })
    }

    /// To be called first in another process of the daemon. The window process learns that it is the daemon, and what
    /// others have not taken goes.
    pub fn greet(&self) {
        // No file has this number. If it fails, every call does.
        let _ = self.find(0, Kind::Through);
    }

    /// The same, for another process of the daemon. Only one of them may call at a time.
    ///
    /// # Errors
    /// Those of fcntl(2).
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            calls: self.calls.lock().try_clone()?.into(),
            invalidations: self.invalidations.lock().try_clone()?.into(),
            notices: self.notices.try_clone()?,
            numbers: Numbers::new(),
            guard: self.guard.clone(),
            pid: self.pid,
            shared_group: self.shared_group.clone(),
        })
    }

    /// Makes the Cached proxy file of `id` forget what it has read. Changes by the guest's messages need this. The
    /// guard, if there is one, notices changes by host processes.
    pub fn invalidate(&self, id: u64) -> io::Result<()> {
        self.call(&self.invalidations, INVALIDATE, id, &[]).map(drop)
    }

    /// Asks for [`Event::Changed`] for the Through proxy file of `id`, as long as it is open.
    ///
    /// # Errors
    /// ENOENT if it is not, ENOSYS without a guard.
    pub fn watch(&self, id: u64) -> io::Result<()> {
        self.call(&self.calls, WATCH, id, &[]).map(drop)
    }

    /// Waits for the next event. `None` once the window process has ended. The event may be of a proxy file that
    /// [`Proxy::open`] has not returned yet, or that is closed already.
    pub fn next_event(&self) -> Option<Event> {
        let mut notice = [0; size_of::<Notice>()];
        loop {
            match recv(&self.notices, &mut notice, RecvFlags::empty()) {
                Err(Errno::INTR) => continue,
                Ok((n, _)) if n == notice.len() => {}
                _ => return None,
            }
            let notice: Notice = zerocopy::transmute!(notice);
            match notice.what {
                REVOKE => return Some(Event::Revoke(notice.first)),
                CHANGED => return Some(Event::Changed(notice.first)),
                _ => {}
            }
            let (dev, ino) = (notice.first, notice.second);
            let (major, minor) = (rustix::fs::major(dev), rustix::fs::minor(dev));
            tracing::warn!("inode {ino} of device {major}:{minor} was still mapped when the host truncated it");
        }
    }

    /// Whether there is a guard.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    /// If there is a guard that shares a control group with the daemon: why. Who stops or slows that group then stops
    /// or slows host processes that open mapped files.
    pub fn shared_group(&self) -> Option<&str> {
        self.shared_group.as_deref().filter(|_| self.guard == Guard::On)
    }

    /// The window process. It is a child of the process that called [`start`].
    pub fn pid(&self) -> Pid {
        self.pid
    }

    fn call(
        &self,
        socket: &Mutex<OwnedFd>,
        what: u64,
        id: u64,
        fds: &[BorrowedFd],
    ) -> io::Result<(Answer, Vec<OwnedFd>)> {
        let call = Call { what, id, number: self.numbers.next() };
        let socket = socket.lock();
        send(socket.as_fd(), call.as_bytes(), fds, SendFlags::empty())?;
        loop {
            let mut answer = [0; size_of::<Answer>()];
            let message = receive(socket.as_fd(), &mut answer)?;
            if message.len != answer.len() {
                return Err(io::Error::other("the window process has ended"));
            }
            let answer: Answer = zerocopy::transmute!(answer);
            match answer.errno {
                // The one who called has been killed.
                _ if answer.number != call.number => {}
                0 => return Ok((answer, message.fds)),
                errno => return Err(io::Error::from_raw_os_error(errno)),
            }
        }
    }
}

fn no_descriptor() -> io::Error {
    io::Error::other("the window process sent no descriptor")
}
