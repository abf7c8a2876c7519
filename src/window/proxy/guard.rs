//! How the window process watches host processes. One fanotify group holds those that may shrink a mapped file. Another
//! reports changes to files that a Cached proxy file has pages of.
//!
//! Pre-content events do not say whether the caller reads, writes or truncates. Its system call does: /proc/TID/syscall
//! shows it while the caller waits for the answer. What the guard cannot know counts as a truncation, and costs a
//! revocation. Examples are what io_uring leaves to its workers, 32-bit programs, openat2(2), kernel threads that fault
//! pages in, such as KVM's, and processes of an outer process namespace.
//!
//! The guard cannot see callers that had the file open before it was marked, NFS and SMB clients of this host, and
//! mappings in processes that do not keep the descriptor.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use libc::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::fstatfs;

use super::marks::{Gate, LastCaller, Passing, RUNNING, Watch};
use super::messages::{CHANGED, Notice, OVERDUE, REVOKE};
use super::nodes::FileId;
use super::shared::Shared;
use crate::fanotify::{self, Event};

/// How long a caller may take from its event to its sleep, where its system call can be read: it has only to be
/// scheduled.
const TO_SLEEP: Duration = Duration::from_millis(100);

/// How often the callers that wait are looked at: it is nothing against the deadline, and a lot against the cost of a
/// look.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// Tries to see a caller asleep before the others' events are looked at. One is enough most of the time.
const LOOKS: usize = 10;

/// Room for the events of one read(2); more come with the next.
const BUFFER: usize = 4096;

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
pub fn run(shared: &Arc<Shared>, gate: &Gate) {
    let (mut waiting, mut last) = (Vec::new(), LastCaller::default());
    let mut buffer = [0; BUFFER];
    loop {
        if waiting.is_empty() || has_event(gate) {
            for event in fanotify::read(gate.marks.group.as_fd(), &mut buffer).unwrap_or_default() {
                waiting.extend(first_look(gate, &mut last, event));
            }
        }
        waiting.retain_mut(|w| keeps_waiting(shared, gate, w));
    }
}

/// Waits until there is an event, a node is gone, or it is time to look at the callers that wait.
fn has_event(gate: &Gate) -> bool {
    let mut ready = [PollFd::new(&gate.marks.group, PollFlags::IN), PollFd::new(&gate.wake, PollFlags::IN)];
    let _ = poll(&mut ready, Some(&TICK));
    let [event, woken] = ready.map(|fd| !fd.revents().is_empty());
    if woken {
        let _ = rustix::io::read(&gate.wake, &mut [0; 8]);
    }
    event
}

/// Answers harmless events at once. Nearly all are.
fn first_look(gate: &Gate, last: &mut LastCaller, event: Event) -> Option<Waiting> {
    let file = event.file?;
    for _ in 0..LOOKS {
        match last.call(&gate.proc, event.pid) {
            Ok(call) if call == RUNNING => thread::yield_now(),
            Ok(call) if leaves_blocks(event.mask, &call, &file) => {
                allow(gate, &file);
                return None;
            }
            _ => break,
        }
    }
    match FileId::of(&file) {
        Ok(id) => Some(Waiting { file, mask: event.mask, caller: event.pid, id, since: Instant::now(), call: None }),
        Err(_) => {
            allow(gate, &file);
            None
        }
    }
}

fn allow(gate: &Gate, file: &OwnedFd) {
    // It fails for a caller that was killed.
    let _ = fanotify::allow(gate.marks.group.as_fd(), file.as_fd());
}

fn keeps_waiting(shared: &Shared, gate: &Gate, waiting: &mut Waiting) -> bool {
    match verdict(shared, gate, waiting) {
        Verdict::Wait => return true,
        Verdict::Allow => {}
        Verdict::Overdue => {
            let notice = Notice { what: OVERDUE, first: waiting.id.dev, second: waiting.id.ino };
            let _ = shared.notify(notice);
        }
    }
    if let Some(call) = waiting.call.take() {
        let passing = Passing { file: waiting.id, caller: waiting.caller, call, since: Instant::now() };
        let mut all = gate.passing.lock();
        all.retain(|p| p.since.elapsed() < gate.deadline);
        all.push(passing);
    }
    allow(gate, &waiting.file);
    false
}

fn verdict(shared: &Shared, gate: &Gate, waiting: &mut Waiting) -> Verdict {
    if waiting.call.is_none() {
        let call = gate.proc.call(waiting.caller).unwrap_or_default();
        match () {
            () if call == RUNNING && waiting.since.elapsed() < TO_SLEEP => return Verdict::Wait,
            () if leaves_blocks(waiting.mask, &call, &waiting.file) => return Verdict::Allow,
            () if is_ours(shared, gate, waiting.caller) => return Verdict::Allow,
            () => waiting.call = Some(call),
        }
    }
    let ask = |id| shared.notify(Notice { what: REVOKE, first: id, second: 0 }).is_ok();
    match (shared.nodes.revoke(waiting.id, ask), waiting.since.elapsed() > gate.deadline) {
        (false, _) => Verdict::Allow,
        (true, false) => Verdict::Wait,
        (true, true) => Verdict::Overdue,
    }
}

/// The guest's kernel puts its own truncations in order; and this process must not wait for itself.
fn is_ours(shared: &Shared, gate: &Gate, thread: i32) -> bool {
    let processes = [shared.daemon.load(Ordering::Relaxed), std::process::id() as i32];
    processes.into_iter().any(|process| gate.proc.has_thread(process, thread))
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
    SYS_readahead,
    SYS_io_submit,
    SYS_io_uring_enter,
];

/// KVM_RUN of include/uapi/linux/kvm.h: the page faults of a guest. Other requests might do anything.
const KVM_RUN: u64 = 0xae80;

/// Advice of madvise(2) that reads a file. Other advice changes no file, and so makes no event, or takes blocks away,
/// as MADV_REMOVE does.
const READS: [c_int; 3] = [MADV_WILLNEED, MADV_POPULATE_READ, MADV_POPULATE_WRITE];

/// Allocates, and keeps or raises the size; other modes of fallocate(2) take blocks away.
const ALLOCATES: u64 = (FALLOC_FL_KEEP_SIZE | FALLOC_FL_UNSHARE_RANGE) as u64;

/// Whether the thread with this line of /proc/TID/syscall cannot be about to take blocks from this file, or to have
/// another share them.
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
        // Kernel threads and io_uring's workers have no instruction pointer in user space, and their registers mean
        // nothing.
        (_, [.., 0]) => false,
        (SYS_execve | SYS_execveat, [_, ..]) => true,
        (_, _) if mask & FAN_OPEN_PERM != 0 => opens_whole(number, &numbers),
        // A page fault.
        (-1, [_, _]) => true,
        (SYS_ioctl, [_, request, ..]) => *request == KVM_RUN,
        // A mode is 32 bits wide.
        (SYS_fallocate, [_, mode, _, _, _, _, _, _]) => mode & 0xffff_ffff & !ALLOCATES == 0,
        // The advice is an int.
        (SYS_madvise, [_, _, advice, _, _, _, _, _]) => READS.contains(&(*advice as c_int)),
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

/// How long changes are gathered before they are told: a host process that writes all the time costs little then, and a
/// guest still sees what it did at once.
const GATHERED: Duration = Duration::from_millis(1);

/// Makes the kernel forget the pages of Cached nodes whose files others have changed, and tells the daemon of watched
/// ones.
pub fn watch(shared: &Shared, watch: &Watch) {
    let mut buffer = [0; BUFFER];
    loop {
        let Ok(events) = fanotify::read(watch.group(), &mut buffer) else { continue };
        let ours = [shared.daemon.load(Ordering::Relaxed), std::process::id() as i32];
        // Without a file it is the overflow of the queue: anything may have changed.
        let changed = events.iter().filter(|e| !ours.contains(&e.pid));
        let files: HashSet<Option<FileId>> = changed.map(|e| FileId::of(e.file.as_ref()?).ok()).collect();
        for id in files.iter().flat_map(|file| shared.nodes.watched(*file)) {
            // Where the daemon does not keep up, it looks when the guest does.
            let _ = shared.notify(Notice { what: CHANGED, first: id, second: 0 });
        }
        let nodes: HashSet<u64> = files.into_iter().flat_map(|file| shared.nodes.cached(file)).collect();
        for nodeid in nodes {
            // A dirty page is old, except for what the guest stored since it was last written back, moments ago. The
            // host's change replaces that; otherwise the page would replace the host's change.
            shared.nodes.with(nodeid, |node| node.outdated = true);
            let _ = shared.invalidate_node(nodeid);
            shared.nodes.with(nodeid, |node| node.outdated = false);
        }
        thread::sleep(GATHERED);
    }
}

#[cfg(test)]
mod tests {
    use super::super::marks::FAN_PRE_ACCESS;
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
        for advice in [MADV_WILLNEED, MADV_POPULATE_READ, MADV_POPULATE_WRITE] {
            assert!(is_harmless(FAN_PRE_ACCESS, &line(SYS_madvise, [0, 4096, advice as u64, 0, 0, 0])), "{advice}");
        }
        assert!(is_harmless(FAN_PRE_ACCESS, "-1 0x7ffc0 0x7f000"));
        assert!(is_harmless(FAN_PRE_ACCESS, &line(SYS_ioctl, [9, KVM_RUN, 0, 0, 0, 0])));
        assert!(is_harmless(FAN_OPEN_PERM, &line(SYS_openat, [3, 0, O_RDWR as u64, 0, 0, 0])));
        assert!(is_harmless(FAN_OPEN_PERM, &line(SYS_execve, [3, 0, 0, 0, 0, 0])));
    }

    #[test]
    fn all_others_are_suspect() {
        for call in [SYS_truncate, SYS_ftruncate, SYS_openat2, SYS_renameat2, SYS_ioctl, 1 << 30] {
            assert!(!is_harmless(FAN_PRE_ACCESS, &line(call, [3, 0, 0, 0, 0, 0])), "{call}");
        }
        for mode in [FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, FALLOC_FL_COLLAPSE_RANGE, FALLOC_FL_ZERO_RANGE] {
            assert!(!is_harmless(FAN_PRE_ACCESS, &line(SYS_fallocate, [3, mode as u64, 0, 0, 0, 0])), "{mode}");
        }
        for advice in [u64::from(u32::MAX), 1 << 32 | MADV_REMOVE as u64, MADV_REMOVE as u64, MADV_DONTNEED as u64] {
            assert!(!is_harmless(FAN_PRE_ACCESS, &line(SYS_madvise, [0, 4096, advice, 0, 0, 0])), "{advice}");
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
        // open, creat, execve, truncate, ftruncate, truncate64, ftruncate64, fallocate, openat2, open_by_handle_at of
        // i386.
        for number in [5, 8, 11, 92, 93, 193, 194, 324, 342, 437] {
            assert!(!MOVES_DATA.contains(&number), "{number}");
            assert!(!opens_whole(number, &[0; 8]), "{number}");
        }
    }
}
