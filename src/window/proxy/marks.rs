//! The fanotify groups and what they know of: marks of files, and the system calls of host processes.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use libc::*;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{AtFlags, Mode, OFlags, openat, readlinkat, statat};
use rustix::process::getppid;

use super::nodes::FileId;
use crate::fanotify;

/// The caller is about to use or change contents (include/uapi/linux/fanotify.h, Linux 6.14).
pub const FAN_PRE_ACCESS: u64 = 0x0010_0000;

/// The marks of a group, counted by file since several nodes may have the same.
pub struct Marks {
    pub group: OwnedFd,
    mask: u64,
    counts: Mutex<HashMap<FileId, usize>>,
}

impl Marks {
    fn new(flags: c_uint, mask: u64) -> io::Result<Self> {
        let group = fanotify::init(flags | FAN_UNLIMITED_MARKS)?;
        Ok(Self { group, mask, counts: Mutex::default() })
    }

    fn set(&self, action: u32, file: BorrowedFd) -> io::Result<()> {
        fanotify::mark(self.group.as_fd(), action, self.mask, file.as_raw_fd(), None)
    }

    /// Marks a file once more.
    pub fn add(&self, file: FileId, real: impl AsFd) -> io::Result<()> {
        let mut counts = self.counts.lock();
        if !counts.contains_key(&file) {
            self.set(FAN_MARK_ADD, real.as_fd())?;
        }
        *counts.entry(file).or_default() += 1;
        Ok(())
    }

    /// Whether the kernel has events of this mask for any file. For a tmpfs file it answers EOPNOTSUPP if it does,
    /// EINVAL otherwise.
    fn knows_mask(&self) -> bool {
        let Ok(probe) = rustix::fs::memfd_create("thruwayd-probe", rustix::fs::MemfdFlags::CLOEXEC) else {
            return false;
        };
        let marked = self.set(FAN_MARK_ADD, probe.as_fd());
        !marked.is_err_and(|e| e.raw_os_error() == Some(EINVAL))
    }

    /// Takes one mark back.
    pub fn remove(&self, file: FileId, real: impl AsFd) {
        let mut counts = self.counts.lock();
        let Some(count) = counts.get_mut(&file) else { return };
        *count -= 1;
        if *count == 0 {
            counts.remove(&file);
            // A file that is gone has no mark.
            let _ = self.set(FAN_MARK_REMOVE, real.as_fd());
        }
    }
}

/// Where host processes wait that may shrink a mapped file: what other threads than the guard's know of it.
pub struct Gate {
    pub marks: Marks,
    /// Written when a Through proxy file is gone.
    pub wake: OwnedFd,
    pub proc: Proc,
    /// Callers that may go on after a revocation, until they have done so.
    pub passing: Mutex<Vec<Passing>>,
    /// How long a caller waits at most.
    pub deadline: Duration,
}

pub struct Passing {
    pub file: FileId,
    pub caller: i32,
    pub call: String,
    pub since: Instant,
}

impl Gate {
    /// The error is the reason why there is no guard, in one line.
    pub fn new(deadline: Duration) -> Result<Self, String> {
        let flags = FAN_CLASS_PRE_CONTENT | FAN_UNLIMITED_QUEUE | FAN_REPORT_TID;
        let no_events = "the kernel has no pre-content events (they came with Linux 6.14)";
        let marks = Marks::new(flags, FAN_PRE_ACCESS | FAN_OPEN_PERM).map_err(|e| format!("{no_events}: {e}"))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| e.to_string())?;
        if !marks.knows_mask() {
            return Err(no_events.into());
        }
        Ok(Self { marks, wake, proc: Proc::open()?, passing: Mutex::default(), deadline })
    }

    /// A Through proxy file is gone.
    pub fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Whether a caller that waited for the end of a mapping of this file may still shrink it.
    pub fn is_passing(&self, file: FileId) -> bool {
        let mut passing = self.passing.lock();
        passing.retain(|p| p.since.elapsed() < self.deadline && self.proc.may_be_in(p.caller, &p.call));
        passing.iter().any(|p| p.file == file)
    }
}

/// The host's /proc, O_PATH.
pub struct Proc(OwnedFd);

impl Proc {
    fn open() -> Result<Self, String> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let proc = openat(rustix::fs::CWD, "/proc", flags, Mode::empty()).map_err(|e| format!("no /proc: {e}"))?;
        let own = readlinkat(&proc, "self", Vec::new()).map_err(|e| format!("/proc/self is missing: {e}"))?;
        if own.to_bytes() != std::process::id().to_string().as_bytes() {
            return Err("/proc is of another process namespace".into());
        }
        let proc = Self(proc);
        let parent = getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
        // Yama or a lack of CAP_SYS_PTRACE may forbid it.
        proc.call(parent).map(|_| proc).map_err(|e| format!("the system calls of processes cannot be read: {e}"))
    }

    /// The line that shows the system call of a thread.
    pub fn call(&self, thread: i32) -> io::Result<String> {
        read_call(&self.call_file(thread)?)
    }

    fn call_file(&self, thread: i32) -> io::Result<OwnedFd> {
        Ok(openat(&self.0, format!("{thread}/syscall"), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    pub fn has_thread(&self, process: i32, thread: i32) -> bool {
        thread > 0 && statat(&self.0, format!("{process}/task/{thread}"), AtFlags::empty()).is_ok()
    }

    /// Whether a thread may still be in a system call that it was in before.
    fn may_be_in(&self, thread: i32, call: &str) -> bool {
        self.call(thread).is_ok_and(|now| now == RUNNING || now == call)
    }
}

fn read_call(file: &OwnedFd) -> io::Result<String> {
    // Nine numbers of 64 bits fit well.
    let mut line = [0; 256];
    let length = rustix::io::pread(file, &mut line, 0)?;
    Ok(String::from_utf8_lossy(&line[..length]).trim_ascii().to_owned())
}

/// The last caller that was looked at, which is often the next one too. Its open file belongs to that thread: if
/// another thread gets the number, reading fails.
#[derive(Default)]
pub struct LastCaller(Option<(i32, OwnedFd)>);

impl LastCaller {
    pub fn call(&mut self, proc: &Proc, thread: i32) -> io::Result<String> {
        if let Some((_, file)) = self.0.as_ref().filter(|(last, _)| *last == thread) {
            if let Ok(call) = read_call(file) {
                return Ok(call);
            }
        }
        let (_, file) = self.0.insert((thread, proc.call_file(thread)?));
        read_call(file)
    }
}

/// What /proc/TID/syscall says for a thread that is not asleep.
pub const RUNNING: &str = "running";

/// Reports changes to files.
pub struct Watch {
    pub marks: Marks,
}

impl Watch {
    pub fn new() -> io::Result<Self> {
        Marks::new(FAN_CLASS_NOTIF, FAN_MODIFY).map(|marks| Self { marks })
    }

    pub fn group(&self) -> BorrowedFd<'_> {
        self.marks.group.as_fd()
    }
}
