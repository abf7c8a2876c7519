//! The window process's eyes on host processes: one fanotify group holds those that may shrink a mapped file, another
//! tells of those that change a file that a Cached node has pages of.
//!
//! Pre-content events do not say whether the caller reads, writes or truncates; its system call does, which
//! /proc/TID/syscall shows while it waits for the answer. What cannot be known is taken for a truncation, and costs a
//! revocation: whatever io_uring leaves to its workers, 32-bit programs, openat2(2), kernel threads such as KVM's that
//! fault pages in, processes of an outer process namespace.
//!
//! What it cannot see: callers that had the file open before it was marked, NFS and SMB clients of this host, mappings in
//! processes that do not keep the descriptor.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{io, thread};

use libc::*;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{AtFlags, Mode, OFlags, fstatfs, openat, readlinkat, statat};
use rustix::net::SendFlags;
use rustix::process::getppid;
use zerocopy::IntoBytes;

use super::nodes::FileId;
use super::process::Shared;
use super::{CHANGED, Notice, OVERDUE, REVOKE, fuse, send};
use crate::window::sys::{self, Event};

/// The caller is about to use or change contents (include/uapi/linux/fanotify.h, Linux 6.14).
const FAN_PRE_ACCESS: u64 = 0x0010_0000;

/// How long a host process waits for the end of a mapping. The guest's part takes milliseconds; a service on the host
/// that hangs for longer than this is taken for dead.
const DEADLINE: Duration = Duration::from_secs(2);

/// How long a caller may take from its event to its sleep, where its system call can be read: it has only to be scheduled.
const TO_SLEEP: Duration = Duration::from_millis(100);

/// How often the callers that wait are looked at: against `DEADLINE` it is nothing, against the cost of a look it is a lot.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// Tries to see a caller asleep before the others' events are looked at. One is enough most of the time.
const LOOKS: usize = 10;

/// Room for the events of one read(2); more come with the next.
const BUFFER: usize = 4096;

/// The marks of a group, counted by file since several nodes may have the same.
pub struct Marks {
    group: OwnedFd,
    mask: u64,
    counts: Mutex<HashMap<FileId, usize>>,
}

impl Marks {
    fn new(flags: c_uint, mask: u64) -> io::Result<Self> {
        let group = sys::fanotify_init(flags | FAN_UNLIMITED_MARKS)?;
        Ok(Self { group, mask, counts: Mutex::default() })
    }

    /// Marks a file once more.
    pub fn add(&self, file: FileId, real: impl AsFd) -> io::Result<()> {
        let mut counts = self.counts.lock();
        if !counts.contains_key(&file) {
            sys::fanotify_mark(self.group.as_fd(), FAN_MARK_ADD, self.mask, real.as_fd())?;
        }
        *counts.entry(file).or_default() += 1;
        Ok(())
    }

    /// Whether the kernel has events of this mask for any file: a tmpfs file gets EOPNOTSUPP if so, else EINVAL.
    fn knows_mask(&self) -> bool {
        let Ok(probe) = rustix::fs::memfd_create("thruwayd-probe", rustix::fs::MemfdFlags::CLOEXEC) else {
            return false;
        };
        let marked = sys::fanotify_mark(self.group.as_fd(), FAN_MARK_ADD, self.mask, probe.as_fd());
        !marked.is_err_and(|e| e.raw_os_error() == Some(EINVAL))
    }

    /// Takes one mark back.
    pub fn remove(&self, file: FileId, real: impl AsFd) {
        let mut counts = self.counts.lock();
        let Some(count) = counts.get_mut(&file) else { return };
        *count -= 1;
        if *count == 0 {
            counts.remove(&file);
            // What is gone has no mark either.
            let _ = sys::fanotify_mark(self.group.as_fd(), FAN_MARK_REMOVE, self.mask, real.as_fd());
        }
    }
}

/// What is known of the guard outside of its thread.
pub struct Guard {
    pub marks: Marks,
    /// Written when a Through node is gone.
    wake: OwnedFd,
    proc: Proc,
    /// Callers that were let go on after a revocation, until it is seen that they have.
    passing: Mutex<Vec<Passing>>,
}

struct Passing {
    file: FileId,
    caller: i32,
    call: String,
    since: Instant,
}

impl Guard {
    /// The reason if it cannot be.
    pub fn new() -> Result<Self, String> {
        let flags = FAN_CLASS_PRE_CONTENT | FAN_UNLIMITED_QUEUE | FAN_REPORT_TID;
        let no_events = "the kernel has no pre-content events (they came with Linux 6.14)";
        let marks = Marks::new(flags, FAN_PRE_ACCESS | FAN_OPEN_PERM).map_err(|e| format!("{no_events}: {e}"))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| e.to_string())?;
        if !marks.knows_mask() {
            return Err(no_events.into());
        }
        Ok(Self { marks, wake, proc: Proc::open()?, passing: Mutex::default() })
    }

    /// A Through node is gone.
    pub fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Whether a caller that waited for the end of a mapping of this file may still be about to shrink it.
    pub fn is_passing(&self, file: FileId) -> bool {
        let mut passing = self.passing.lock();
        passing.retain(|p| p.since.elapsed() < DEADLINE && self.proc.may_be_in(p.caller, &p.call));
        passing.iter().any(|p| p.file == file)
    }
}

/// The host's /proc, O_PATH.
struct Proc(OwnedFd);

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
    fn call(&self, thread: i32) -> io::Result<String> {
        read_call(&self.call_file(thread)?)
    }

    fn call_file(&self, thread: i32) -> io::Result<OwnedFd> {
        Ok(openat(&self.0, format!("{thread}/syscall"), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    fn has_thread(&self, process: i32, thread: i32) -> bool {
        thread > 0 && statat(&self.0, format!("{process}/task/{thread}"), AtFlags::empty()).is_ok()
    }

    /// Whether a thread may still be in a system call that it was seen in.
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

/// The caller that was looked at last, most likely the next one too. Its file stays that thread's: if the number goes to
/// another thread, reading fails.
#[derive(Default)]
struct LastCaller(Option<(i32, OwnedFd)>);

impl LastCaller {
    fn call(&mut self, proc: &Proc, thread: i32) -> io::Result<String> {
        if let Some((_, file)) = self.0.as_ref().filter(|(last, _)| *last == thread) {
            if let Ok(call) = read_call(file) {
                return Ok(call);
            }
        }
        let (_, file) = self.0.insert((thread, proc.call_file(thread)?));
        read_call(file)
    }
}

/// What /proc/TID/syscall says of a thread that is not asleep.
const RUNNING: &str = "running";

/// A caller that waits for its answer.
struct Waiting {
    file: OwnedFd,
    mask: u64,
    caller: i32,
    id: FileId,
    since: Instant,
    /// What it is in, once it is known to need a revocation.
    call: Option<String>,
}

enum Verdict {
    Allow,
    Wait,
    Overdue,
}

/// Answers permission events. It waits for nobody but the kernel.
pub fn run(shared: &Arc<Shared>, guard: &Guard) {
    let (mut waiting, mut last) = (Vec::new(), LastCaller::default());
    let mut buffer = [0; BUFFER];
    loop {
        if waiting.is_empty() || has_event(guard) {
            for event in sys::fanotify_read(guard.marks.group.as_fd(), &mut buffer).unwrap_or_default() {
                waiting.extend(first_look(guard, &mut last, event));
            }
        }
        waiting.retain_mut(|w| keeps_waiting(shared, guard, w));
    }
}

/// Waits until there is an event, a node is gone, or it is time to look at the callers that wait.
fn has_event(guard: &Guard) -> bool {
    let mut ready = [PollFd::new(&guard.marks.group, PollFlags::IN), PollFd::new(&guard.wake, PollFlags::IN)];
    let _ = poll(&mut ready, Some(&TICK));
    let [event, woken] = ready.map(|fd| !fd.revents().is_empty());
    if woken {
        let _ = rustix::io::read(&guard.wake, &mut [0; 8]);
    }
    event
}

/// Answers at once what is harmless, as nearly all events are.
fn first_look(guard: &Guard, last: &mut LastCaller, event: Event) -> Option<Waiting> {
    let file = event.file?;
    for _ in 0..LOOKS {
        match last.call(&guard.proc, event.pid) {
            Ok(call) if call == RUNNING => thread::yield_now(),
            Ok(call) if leaves_blocks(event.mask, &call, &file) => {
                allow(guard, &file);
                return None;
            }
            _ => break,
        }
    }
    match FileId::of(&file) {
        Ok(id) => Some(Waiting { file, mask: event.mask, caller: event.pid, id, since: Instant::now(), call: None }),
        Err(_) => {
            allow(guard, &file);
            None
        }
    }
}

fn allow(guard: &Guard, file: &OwnedFd) {
    // It fails for a caller that was killed.
    let _ = sys::fanotify_allow(guard.marks.group.as_fd(), file.as_fd());
}

fn keeps_waiting(shared: &Shared, guard: &Guard, waiting: &mut Waiting) -> bool {
    match verdict(shared, guard, waiting) {
        Verdict::Wait => return true,
        Verdict::Allow => {}
        Verdict::Overdue => {
            let notice = Notice { what: OVERDUE, first: waiting.id.dev, second: waiting.id.ino };
            let _ = notify(shared, notice);
        }
    }
    if let Some(call) = waiting.call.take() {
        let passing = Passing { file: waiting.id, caller: waiting.caller, call, since: Instant::now() };
        let mut all = guard.passing.lock();
        all.retain(|p| p.since.elapsed() < DEADLINE);
        all.push(passing);
    }
    allow(guard, &waiting.file);
    false
}

fn verdict(shared: &Shared, guard: &Guard, waiting: &mut Waiting) -> Verdict {
    if waiting.call.is_none() {
        let call = guard.proc.call(waiting.caller).unwrap_or_default();
        match () {
            () if call == RUNNING && waiting.since.elapsed() < TO_SLEEP => return Verdict::Wait,
            () if leaves_blocks(waiting.mask, &call, &waiting.file) => return Verdict::Allow,
            () if is_ours(shared, guard, waiting.caller) => return Verdict::Allow,
            () => waiting.call = Some(call),
        }
    }
    let ask = |id| notify(shared, Notice { what: REVOKE, first: id, second: 0 }).is_ok();
    match (shared.nodes.revoke(waiting.id, ask), waiting.since.elapsed() > DEADLINE) {
        (false, _) => Verdict::Allow,
        (true, false) => Verdict::Wait,
        (true, true) => Verdict::Overdue,
    }
}

/// The guest's kernel puts its own truncations in order; and this process must not wait for itself.
fn is_ours(shared: &Shared, guard: &Guard, thread: i32) -> bool {
    let processes = [shared.daemon.load(Ordering::Relaxed), std::process::id() as i32];
    processes.into_iter().any(|process| guard.proc.has_thread(process, thread))
}

fn notify(shared: &Shared, notice: Notice) -> io::Result<()> {
    send(shared.notices.as_fd(), notice.as_bytes(), None, SendFlags::DONTWAIT)
}

/// Calls that move data and leave a file's size or raise it. io_uring shrinks and truncates files in its worker threads
/// only, which `is_harmless` knows. Among them there must be no number by which a 32-bit program, whose numbers are
/// others, shrinks a file: i386 openat is preadv here, and is told from it by its event, FAN_OPEN_PERM.
const MOVES_DATA: &[c_long] = &[
    SYS_read,
    SYS_write,
    SYS_readv,
    SYS_writev,
    SYS_pread64,
    SYS_pwrite64,
    SYS_preadv,
    SYS_pwritev,
    SYS_preadv2,
    SYS_pwritev2,
    SYS_sendfile,
    SYS_splice,
    SYS_copy_file_range,
    SYS_sendto,
    SYS_sendmsg,
    SYS_recvfrom,
    SYS_recvmsg,
    SYS_mmap,
    SYS_madvise,
    SYS_readahead,
    SYS_io_submit,
    SYS_io_uring_enter,
];

/// KVM_RUN of include/uapi/linux/kvm.h: the page faults of a guest. Other requests might do anything.
const KVM_RUN: u64 = 0xae80;

/// Allocates, and keeps or raises the size; other modes of fallocate(2) take blocks away.
const ALLOCATES: u64 = (FALLOC_FL_KEEP_SIZE | FALLOC_FL_UNSHARE_RANGE) as u64;

/// Whether the thread with this line of /proc/TID/syscall cannot be about to take blocks from this file, or to have another
/// share them.
fn leaves_blocks(mask: u64, line: &str, file: &OwnedFd) -> bool {
    let copies = || line.split(' ').next().and_then(|number| number.parse().ok()) == Some(SYS_copy_file_range);
    // Where a store goes to the same blocks, a copy has its own, but for XFS.
    let shares = || !fstatfs(file).is_ok_and(|st| st.f_type != XFS_SUPER_MAGIC);
    is_harmless(mask, line) && !(copies() && shares())
}

/// Whether the thread with this line of /proc/TID/syscall cannot be about to shrink a file.
#[expect(non_upper_case_globals, reason = "libc's names")]
fn is_harmless(mask: u64, line: &str) -> bool {
    let mut words = line.split_ascii_whitespace();
    let number = words.next().and_then(|word| word.parse::<i64>().ok());
    let numbers: Option<Vec<u64>> = words.map(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()).collect();
    let (Some(number), Some(numbers)) = (number, numbers) else { return false };
    match (number, &*numbers) {
        // Threads of the kernel and io_uring's workers have no user's instruction pointer, and what is in their registers
        // means nothing.
        (_, [.., 0]) => false,
        (SYS_execve | SYS_execveat, [_, ..]) => true,
        (_, _) if mask & FAN_OPEN_PERM != 0 => opens_whole(number, &numbers),
        // A page fault.
        (-1, [_, _]) => true,
        (SYS_ioctl, [_, request, ..]) => *request == KVM_RUN,
        // A mode is 32 bits wide.
        (SYS_fallocate, [_, mode, _, _, _, _, _, _]) => mode & 0xffff_ffff & !ALLOCATES == 0,
        (number, [_, _, _, _, _, _, _, _]) => MOVES_DATA.contains(&number),
        _ => false,
    }
}

/// Whether it is a call that opens a file without O_TRUNC. The flags of openat2 are in memory and may change.
#[expect(non_upper_case_globals, reason = "libc's names")]
fn opens_whole(number: c_long, arguments: &[u64]) -> bool {
    let flags = match number {
        #[cfg(target_arch = "x86_64")]
        SYS_open => 1,
        SYS_openat | SYS_open_by_handle_at => 2,
        _ => return false,
    };
    arguments.get(flags).is_some_and(|flags| flags & O_TRUNC as u64 == 0)
}

/// Tells of changes to files.
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

/// How long changes are gathered before they are told: a host process that writes all the time costs little then, and a
/// guest still sees what it did at once.
const GATHERED: Duration = Duration::from_millis(1);

/// Makes the kernel forget the pages of Cached nodes whose files others have changed, and tells the daemon of watched ones.
pub fn watch(shared: &Shared, watch: &Watch) {
    let mut buffer = [0; BUFFER];
    loop {
        let Ok(events) = sys::fanotify_read(watch.group(), &mut buffer) else { continue };
        let ours = [shared.daemon.load(Ordering::Relaxed), std::process::id() as i32];
        // Without a file it is the overflow of the queue: anything may have changed.
        let changed = events.iter().filter(|e| !ours.contains(&e.pid));
        let files: HashSet<Option<FileId>> = changed.map(|e| FileId::of(e.file.as_ref()?).ok()).collect();
        for id in files.iter().flat_map(|file| shared.nodes.watched(*file)) {
            // Where the daemon does not keep up, it looks when the guest does.
            let _ = notify(shared, Notice { what: CHANGED, first: id, second: 0 });
        }
        let nodes: HashSet<u64> = files.into_iter().flat_map(|file| shared.nodes.cached(file)).collect();
        for nodeid in nodes {
            // A dirty page is old but for what the guest stored in it since it was written back last, moments ago: that
            // is lost to the host's change, which would else be lost to the page.
            shared.nodes.with(nodeid, |node| node.outdated = true);
            let _ = fuse::invalidate(&shared.fuse, nodeid);
            shared.nodes.with(nodeid, |node| node.outdated = false);
        }
        thread::sleep(GATHERED);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(number: c_long, arguments: [u64; 6]) -> String {
        let arguments: String = arguments.iter().map(|a| format!(" {a:#x}")).collect();
        format!("{number}{arguments} 0x7ffc0 0x7f000")
    }

    #[test]
    fn calls_that_keep_the_size_are_harmless() {
        for call in MOVES_DATA {
            assert!(is_harmless(FAN_PRE_ACCESS, &line(*call, [3, 0, 0, 0, 0, 0])));
        }
        for mode in [0, FALLOC_FL_KEEP_SIZE, FALLOC_FL_KEEP_SIZE | FALLOC_FL_UNSHARE_RANGE] {
            assert!(is_harmless(FAN_PRE_ACCESS, &line(SYS_fallocate, [3, mode as u64, 0, 0, 0, 0])), "{mode}");
        }
        assert!(is_harmless(FAN_PRE_ACCESS, "-1 0x7ffc0 0x7f000"));
        assert!(is_harmless(FAN_PRE_ACCESS, &line(SYS_ioctl, [9, KVM_RUN, 0, 0, 0, 0])));
        assert!(is_harmless(FAN_OPEN_PERM, &line(SYS_openat, [3, 0, O_RDWR as u64, 0, 0, 0])));
        assert!(is_harmless(FAN_OPEN_PERM, &line(SYS_execve, [3, 0, 0, 0, 0, 0])));
    }

    #[test]
    fn all_others_are_suspect() {
        for call in [SYS_truncate, SYS_ftruncate, SYS_openat2, SYS_rename, SYS_ioctl, 1 << 30] {
            assert!(!is_harmless(FAN_PRE_ACCESS, &line(call, [3, 0, 0, 0, 0, 0])), "{call}");
        }
        for mode in [FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, FALLOC_FL_COLLAPSE_RANGE, FALLOC_FL_ZERO_RANGE] {
            assert!(!is_harmless(FAN_PRE_ACCESS, &line(SYS_fallocate, [3, mode as u64, 0, 0, 0, 0])), "{mode}");
        }
        let truncating = line(SYS_openat, [3, 0, (O_RDWR | O_TRUNC) as u64, 0, 0, 0]);
        assert!(!is_harmless(FAN_OPEN_PERM, &truncating));
        for call in [SYS_preadv, SYS_openat2, SYS_io_uring_enter] {
            assert!(!is_harmless(FAN_OPEN_PERM, &line(call, [0; 6])), "{call}");
        }
        assert!(!is_harmless(FAN_OPEN_PERM, "-1 0x7ffc0 0x7f000"), "a core dump opens and truncates");
        for bad in ["", RUNNING, "0", "read", "-1", "0 0x1", "-1 0x0 0x0", "0 0x0 0x0 0x0 0x0 0x0 0x0 0x0 0x0"] {
            assert!(!is_harmless(FAN_PRE_ACCESS, bad), "{bad}");
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn no_number_shrinks_a_file_in_a_32_bit_program() {
        // open, creat, execve, truncate, ftruncate, truncate64, ftruncate64, fallocate, openat2, open_by_handle_at of i386.
        for number in [5, 8, 11, 92, 93, 193, 194, 324, 342, 437] {
            assert!(!MOVES_DATA.contains(&number), "{number}");
            assert!(!opens_whole(number, &[0; 8]), "{number}");
        }
    }
}
