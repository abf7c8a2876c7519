//! The window process: how it is started, what it may do, and the daemon's calls.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use caps::Capability::{CAP_DAC_READ_SEARCH, CAP_SYS_ADMIN, CAP_SYS_PTRACE};
use libc::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, MemfdFlags, Mode, OFlags, memfd_create, openat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount_change, move_mount,
};
use rustix::net::{SendFlags, sockopt::set_socket_passcred};
use rustix::process::{WaitOptions, chroot, fchdir, setsid, waitpid};
use rustix::thread::UnshareFlags;
use zerocopy::IntoBytes;

use super::data;
use super::fuse::Fuse;
use super::guard;
use super::marks::{Gate, Watch};
use super::messages::{Call, READY, pair, receive, send};
use super::shared::Shared;
use super::{Guard, GuardMode, Numbers, Proxy};
use crate::sandbox::seccomp::{self, Condition};
use crate::sandbox::sys::{Forked, fork, unshare};
use crate::sandbox::{Error, Step, caps as capabilities, cgroup, pivot_into};
use crate::window::sys;

/// Calls that the window process makes.
const ALLOWED: &[&[c_long]] = &[
    // FUSE requests, and the real files.
    &[SYS_read, SYS_readv, SYS_write, SYS_writev, SYS_pread64, SYS_pwritev2, SYS_fsync, SYS_fdatasync],
    // Proxy files, /proc/TID, marks.
    &[SYS_openat, SYS_close, SYS_fstat, SYS_newfstatat, SYS_statx, SYS_fstatfs, SYS_fanotify_mark, SYS_fcntl],
    // The daemon, and events.
    &[SYS_recvmsg, SYS_sendmsg, SYS_ppoll],
    // Memory and threads.
    &[SYS_munmap, SYS_mremap, SYS_madvise, SYS_brk, SYS_futex, SYS_sched_yield, SYS_sched_getaffinity, SYS_rseq],
    &[SYS_set_robust_list, SYS_sigaltstack, SYS_rt_sigprocmask, SYS_rt_sigaction, SYS_rt_sigreturn, SYS_gettid],
    &[SYS_getpid, SYS_exit, SYS_exit_group, SYS_restart_syscall, SYS_clock_gettime, SYS_clock_nanosleep, SYS_getrandom],
    #[cfg(target_arch = "x86_64")]
    &[SYS_poll],
];

/// Calls that depend on an argument.
const CONDITIONAL: &[Condition] = &[
    (SYS_ioctl, 1, seccomp::ANY, sys::BACKING_OPEN as u64),
    (SYS_ioctl, 1, seccomp::ANY, sys::BACKING_CLOSE as u64),
    (SYS_mmap, 2, PROT_EXEC as u64, 0),
    (SYS_mprotect, 2, PROT_EXEC as u64, 0),
    (SYS_fallocate, 1, seccomp::ANY, FALLOC_FL_KEEP_SIZE as u64),
    (SYS_prctl, 0, seccomp::ANY, PR_SET_NAME as u64),
];

/// Room for the one line that the window process says first.
const LINE: usize = 512;

pub fn start(guard: GuardMode, deadline: Duration, action: seccomp::Action) -> Result<Proxy, Error> {
    let (fuse, root) = mount()?;
    let (calls, theirs) = pair().step("create a socket pair")?;
    let (invalidations, their_invalidations) = pair().step("create a socket pair")?;
    let (notices, their_notices) = pair().step("create a socket pair")?;
    set_socket_passcred(&theirs, true).step("ask for the daemon's process id")?;
    let pid = match fork().step("start the window process")? {
        Forked::Parent(pid) => pid,
        Forked::Child => {
            let (calls, invalidations, notices) = (theirs, their_invalidations, their_notices);
            Setup { fuse, root, calls, invalidations, notices }.run(guard, deadline, action)
        }
    };
    drop((fuse, root, theirs, their_invalidations, their_notices));
    let shared_group = cgroup::set_apart(pid).err();
    match hear(&calls) {
        Ok(guard) => {
            let (calls, invalidations, numbers) = (calls.into(), invalidations.into(), Numbers::new());
            Ok(Proxy { calls, invalidations, notices, numbers, guard, pid, shared_group })
        }
        Err(e) => {
            let _ = waitpid(Some(pid), WaitOptions::empty());
            Err(e)
        }
    }
}

/// The first message of the window process.
fn hear(calls: &OwnedFd) -> Result<Guard, Error> {
    let mut line = [0; LINE];
    let length = receive(calls.as_fd(), &mut line).step("hear from the window process")?.len;
    let text = String::from_utf8_lossy(line[..length].get(1..).unwrap_or_default());
    match (line[0], &*text) {
        (READY, "") => Ok(Guard::On),
        (READY, reason) => Ok(Guard::Off(reason.to_owned())),
        (_, "") => Err(Error::Other("the window process ended at once".into())),
        (_, reason) => Err(Error::Other(reason.to_owned())),
    }
}

/// A FUSE mount that is attached nowhere: nobody sees it, and it is gone with its last descriptor.
pub(super) fn mount() -> Result<(OwnedFd, OwnedFd), Error> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let fuse = openat(rustix::fs::CWD, "/dev/fuse", flags, Mode::empty()).step("open /dev/fuse (modprobe fuse)")?;
    let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC).step("mount FUSE (it needs CAP_SYS_ADMIN)")?;
    let fd = fuse.as_raw_fd().to_string();
    let options = [("fd", &*fd), ("rootmode", "40000"), ("user_id", "0"), ("group_id", "0")];
    options.iter().try_for_each(|(key, value)| fsconfig_set_string(&context, *key, *value)).step("set up FUSE")?;
    // QEMU, which gets the descriptors, may be another user.
    fsconfig_set_flag(&context, "allow_other").step("set up FUSE for all users")?;
    fsconfig_create(&context).step("mount FUSE (it needs CAP_SYS_ADMIN)")?;
    let attributes =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let root = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes).step("mount FUSE")?;
    Ok((fuse, root))
}

/// What the forked process has of the daemon's.
struct Setup {
    fuse: OwnedFd,
    root: OwnedFd,
    calls: OwnedFd,
    invalidations: OwnedFd,
    notices: OwnedFd,
}

impl Setup {
    fn run(self, guard: GuardMode, deadline: Duration, action: seccomp::Action) -> ! {
        let calls = self.calls.try_clone();
        match self.enter(guard, deadline, action) {
            Ok(shared) => {
                let guard = shared.gate.as_ref().err().map_or("", String::as_str);
                let line = [&[READY], guard.as_bytes()].concat();
                let _ = send(shared.calls.as_fd(), &line, &[], SendFlags::empty());
                serve(&shared, &shared.calls);
                // An exit ends the threads that serve the mount. Another one that waits for them would wait for ever,
                // and with it the process. So no other thread exits, and the last invalidation is over by now.
                let _none = shared.invalidating.write();
                exit(0)
            }
            Err(reason) => {
                let line = format!("-{reason}");
                let _ = calls.map(|calls| send(calls.as_fd(), line.as_bytes(), &[], SendFlags::empty()));
                exit(1)
            }
        }
    }

    /// Gives up what the process does not need, and starts its threads.
    fn enter(self, mode: GuardMode, deadline: Duration, action: seccomp::Action) -> Result<Arc<Shared>, Error> {
        // The socket reports the daemon's end. A signal must not: if it killed the thread that serves the mount while
        // another one closes a proxy file, that one would wait for ever, and with it the process.
        // Ctrl-Z is for the daemon: stopped, this process would stop others.
        setsid().step("start a session")?;
        let kept = [&self.fuse, &self.root, &self.calls, &self.invalidations, &self.notices].map(AsFd::as_fd);
        sys::close_all_but(&kept).step("close the daemon's descriptors")?;
        let gate = if mode == GuardMode::None { Err("--window-guard none".into()) } else { Gate::new(deadline) };
        let watch = if mode == GuardMode::None { None } else { Watch::new().ok() };
        let namespaces = UnshareFlags::NEWNS | UnshareFlags::NEWNET | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
        unshare(namespaces).step("create namespaces for the window process (it needs CAP_SYS_ADMIN)")?;
        let Self { fuse, root, calls, invalidations, notices } = self;
        let shared = Arc::new(Shared::new((fuse, root), [calls, invalidations, notices], gate, watch));
        let mut fuse = Fuse::new(Arc::clone(&shared));
        fuse.serve_one().step("open a FUSE session with the kernel")?;
        probe(&shared)?;
        enter_root(&shared, &mut fuse)?;
        limit_capabilities(shared.gate.is_ok())?;
        sys::catch_ends().step("catch SIGBUS")?;
        start_threads(&shared, fuse)?;
        seccomp::apply_list(action, ALLOWED, CONDITIONAL)?;
        Ok(shared)
    }
}

/// Sees whether the kernel takes backing files.
fn probe(shared: &Shared) -> Result<(), Error> {
    let file = memfd_create("thruwayd-probe", MemfdFlags::CLOEXEC).step("create a file in memory")?;
    let id = sys::backing_open(shared.fuse.as_fd(), file.as_fd())
        .step("use FUSE passthrough (it needs Linux 6.9 with CONFIG_FUSE_PASSTHROUGH, and CAP_SYS_ADMIN)")?;
    sys::backing_close(shared.fuse.as_fd(), id).step("close a backing file")
}

/// Makes the mount the root, so that no path leads anywhere. Meanwhile this process must answer the kernel, so it takes
/// two threads.
fn enter_root(shared: &Arc<Shared>, fuse: &mut Fuse) -> Result<(), Error> {
    let root = Arc::clone(shared);
    // A process in a plain chroot(2) cannot move its root.
    let entering = thread::spawn(move || {
        leave_mounts(root.root.as_fd()).or_else(|_| fchdir(&root.root).and_then(|()| chroot(".")))
    });
    while !entering.is_finished() {
        let mut ready = [PollFd::new(&shared.fuse, PollFlags::IN)];
        // A millisecond: how soon the end of the thread is noticed.
        if poll(&mut ready, Some(&Timespec { tv_sec: 0, tv_nsec: 1_000_000 })).is_ok_and(|n| n > 0) {
            let _ = fuse.serve_one();
        }
    }
    entering.join().unwrap_or(Err(Errno::IO)).step("make the mount of proxy files the root")
}

/// Unmounts all but `root` in the namespace of this process. Copies of the host's mounts would keep a disk busy that
/// the host unmounts.
fn leave_mounts(root: BorrowedFd) -> Result<(), Error> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).step("separate the mounts from the host's")?;
    move_mount(root, "", CWD, "/", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).step("mount the proxy files")?;
    pivot_into(root)
}

/// Backing files and marks of others' files need the first two; reading others' system calls needs the third.
fn limit_capabilities(guard: bool) -> Result<(), Error> {
    let kept = [CAP_SYS_ADMIN, CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE];
    let kept = if guard { &kept[..] } else { &kept[..2] };
    capabilities::keep(&kept.iter().copied().collect())
}

fn start_threads(shared: &Arc<Shared>, mut fuse: Fuse) -> Result<(), Error> {
    for _ in 1..data::THREADS {
        spawn(shared, "fuse", |shared| Fuse::new(Arc::clone(shared)).run())?;
    }
    spawn(shared, "fuse", move |_| fuse.run())?;
    spawn(shared, "invalidate", |shared| serve(shared, &shared.invalidations))?;
    spawn(shared, "guard", |shared| shared.gate.iter().for_each(|gate| guard::run(shared, gate)))?;
    spawn(shared, "watch", |shared| shared.watch.iter().for_each(|watch| guard::watch(shared, watch)))
}

/// Starts a thread whose panic ends the process.
fn spawn(shared: &Arc<Shared>, name: &str, run: impl FnOnce(&Arc<Shared>) + Send + 'static) -> Result<(), Error> {
    let shared = Arc::clone(shared);
    let run = move || {
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&shared))).is_err() {
            exit(1)
        }
    };
    thread::Builder::new().name(name.into()).spawn(run).step("start a thread of the window process").map(drop)
}

/// Serves the daemon's calls until it ends.
fn serve(shared: &Shared, calls: &OwnedFd) {
    let mut sent = Ok(());
    while sent.is_ok() {
        let mut call = [0; size_of::<Call>()];
        let Ok(mut message) = receive(calls.as_fd(), &mut call) else { break };
        if message.len != call.len() {
            break;
        }
        if let Some(daemon) = message.sender {
            shared.daemon.store(daemon.as_raw_nonzero().get(), Ordering::Relaxed);
        }
        let (answer, fds) = shared.answer(zerocopy::transmute!(call), message.fds.pop());
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        sent = send(calls.as_fd(), answer.as_bytes(), &fds, SendFlags::empty());
    }
}
