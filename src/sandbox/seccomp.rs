//! The system calls that the daemon may make while it serves (`--seccomp`).
//!
//! The list has no place for a call that runs a program, or that makes a process, a socket, a mount or an io_uring.

use std::collections::BTreeMap;

use libc::*;
use seccompiler::SeccompCmpArgLen::Dword;
use seccompiler::SeccompCmpOp::{Eq, MaskedEq};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
    apply_filter_all_threads,
};

use super::Error;
use crate::fuse::abi;
use crate::linux::{FS_IOC_FIEMAP, SYS_CACHESTAT, SYS_FCHMODAT2};

/// What happens at a system call that is not on the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Action {
    /// There is no filter.
    None,
    /// The process ends with SIGSYS and the kernel logs the call.
    Kill,
    /// The call is made, and the kernel logs it.
    Log,
    /// The thread gets SIGSYS, for a debugger.
    Trap,
}

/// Calls that are allowed with any arguments, grouped by their use.
const ALLOWED: &[&[c_long]] = &[
    // Descriptors, and data in guest memory.
    &[SYS_read, SYS_write, SYS_readv, SYS_writev, SYS_pread64, SYS_pwrite64, SYS_preadv, SYS_pwritev],
    &[SYS_preadv2, SYS_pwritev2, SYS_lseek, SYS_close, SYS_dup, SYS_dup3, SYS_fcntl, SYS_copy_file_range],
    // The io_urings are created before the filter is applied. The kernel restricts each to reads and writes.
    &[SYS_io_uring_enter],
    // Finding and opening files.
    &[SYS_openat, SYS_openat2, SYS_name_to_handle_at, SYS_open_by_handle_at, SYS_readlinkat, SYS_getdents64],
    &[SYS_statx, SYS_newfstatat, SYS_fstat, SYS_statfs, SYS_fstatfs, SYS_faccessat, SYS_faccessat2],
    // Whether a file in memory has pages beyond its end.
    &[SYS_CACHESTAT],
    // Watching files. The group was made before.
    &[SYS_fanotify_mark],
    // Creating, removing and renaming files.
    &[SYS_mkdirat, SYS_mknodat, SYS_symlinkat, SYS_linkat, SYS_unlinkat, SYS_renameat2],
    // Changing contents and attributes.
    &[
        SYS_fsync,
        SYS_fdatasync,
        SYS_sync_file_range,
        SYS_syncfs,
        SYS_fallocate,
        SYS_truncate,
        SYS_ftruncate,
        SYS_fadvise64,
    ],
    &[SYS_fchmod, SYS_fchmodat, SYS_FCHMODAT2, SYS_fchown, SYS_fchownat, SYS_utimensat, SYS_flock],
    &[SYS_getxattr, SYS_lgetxattr, SYS_fgetxattr, SYS_setxattr, SYS_lsetxattr, SYS_fsetxattr],
    &[SYS_listxattr, SYS_llistxattr, SYS_flistxattr, SYS_removexattr, SYS_lremovexattr, SYS_fremovexattr],
    // Acting for a user of the guest: credentials, umask and current directory of one thread.
    &[SYS_setfsuid, SYS_setfsgid, SYS_setresuid, SYS_setresgid, SYS_setgroups, SYS_capget, SYS_capset],
    &[SYS_getuid, SYS_geteuid, SYS_getgid, SYS_getegid, SYS_umask, SYS_chdir, SYS_fchdir],
    // The frontend's socket, and events.
    &[SYS_accept4, SYS_recvmsg, SYS_recvfrom, SYS_sendmsg, SYS_getsockopt, SYS_shutdown, SYS_eventfd2],
    &[SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_pwait, SYS_ppoll],
    // Memory of the guest and of the daemon (mmap and mprotect: see `CONDITIONAL`); zeros in place of a file that is
    // gone, and that a guest from another daemon has mapped.
    &[SYS_munmap, SYS_mremap, SYS_madvise, SYS_brk, SYS_memfd_create],
    // Threads and their signals (clone: see `CONDITIONAL`).
    &[SYS_set_robust_list, SYS_rseq, SYS_futex, SYS_sched_getaffinity, SYS_sched_yield, SYS_membarrier, SYS_exit],
    &[SYS_exit_group, SYS_gettid, SYS_getpid, SYS_sigaltstack, SYS_rt_sigprocmask, SYS_rt_sigaction],
    &[SYS_rt_sigreturn, SYS_restart_syscall],
    // Time and random numbers.
    &[SYS_clock_gettime, SYS_clock_nanosleep, SYS_nanosleep, SYS_gettimeofday, SYS_getrandom],
    &[SYS_timerfd_create, SYS_timerfd_settime],
    // The other filter answers clone3 with ENOSYS. glibc then calls clone, whose flags a filter can see.
    &[SYS_clone3],
    #[cfg(target_arch = "x86_64")]
    &[SYS_epoll_wait, SYS_poll],
];

/// A call, the index of an argument, a mask and a value: the call is allowed if the masked argument equals the value.
/// Several conditions for one call are alternatives.
pub type Condition = (c_long, u8, u64, u64);

/// Calls that are allowed only with certain arguments.
// With musl, FIONBIO and FIOCLEX are of another type.
#[allow(clippy::unnecessary_cast)]
const CONDITIONAL: &[Condition] = &[
    // Memory never becomes executable.
    (SYS_mmap, 2, PROT_EXEC as u64, 0),
    (SYS_mprotect, 2, PROT_EXEC as u64, 0),
    // Threads, but no processes. The kernel refuses a new user namespace to a thread.
    (SYS_clone, 0, CLONE_THREAD as u64, CLONE_THREAD as u64),
    // A separate umask and current directory for a thread, but no namespaces.
    (SYS_unshare, 0, ANY, CLONE_FS as u64),
    (SYS_prctl, 0, ANY, PR_SET_NAME as u64),
    // Rust's std uses these for set_nonblocking and set_cloexec.
    (SYS_ioctl, 1, ANY, FIONBIO as u64),
    (SYS_ioctl, 1, ANY, FIOCLEX as u64),
    // Whether a file on XFS shares its blocks.
    (SYS_ioctl, 1, ANY, FS_IOC_FIEMAP as u64),
    // What lsattr and chattr do. A project id cannot be set.
    (SYS_ioctl, 1, ANY, abi::FS_IOC_GETFLAGS as u64),
    (SYS_ioctl, 1, ANY, abi::FS_IOC_SETFLAGS as u64),
    (SYS_ioctl, 1, ANY, abi::FS_IOC_FSGETXATTR as u64),
];

/// The mask of a condition in which all 32 bits of the argument count.
pub const ANY: u64 = u32::MAX as u64;

/// What logging to syslog and the control socket need besides: send(2) on a connected socket, which is sendto(2) with
/// an address of no length.
const SENDS: &[Condition] = &[(SYS_sendto, 5, ANY, 0)];

/// Installs the daemon's filter for all threads, for good. `sends`: also allow what logging to syslog and the control
/// socket need.
///
/// # Errors
/// [`Error::Other`] if the kernel has no seccomp filters.
pub fn apply(action: Action, sends: bool) -> Result<(), Error> {
    let sends = if sends { SENDS } else { &[] };
    apply_list(action, ALLOWED, &[CONDITIONAL, sends].concat())
}

/// Installs a filter that allows only these calls, for all threads, for good.
///
/// # Errors
/// [`Error::Other`] if the kernel has no seccomp filters.
pub fn apply_list(action: Action, calls: &[&[c_long]], conditional: &[Condition]) -> Result<(), Error> {
    let mismatch = match action {
        Action::None => return Ok(()),
        Action::Kill => SeccompAction::KillProcess,
        Action::Log => SeccompAction::Log,
        Action::Trap => SeccompAction::Trap,
    };
    let failed = |e: &dyn std::fmt::Display| {
        Error::Other(format!("cannot set up seccomp: {e}: if this kernel has no seccomp filters, use --seccomp none"))
    };
    for program in [no_clone3(), allow_list(mismatch, calls, conditional)] {
        apply_filter_all_threads(&program.map_err(|e| failed(&e))?).map_err(|e| failed(&e))?;
    }
    Ok(())
}

fn allow_list(
    mismatch: SeccompAction,
    calls: &[&[c_long]],
    conditional: &[Condition],
) -> Result<BpfProgram, BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        calls.iter().flat_map(|calls| calls.iter()).map(|call| (*call, Vec::new())).collect();
    for &(call, argument, mask, value) in conditional {
        rules.entry(call).or_default().push(rule(argument, mask, value)?);
    }
    // tgkill interrupts a thread that waits for a lock. It is allowed only within this process.
    rules.insert(SYS_tgkill, vec![rule(0, ANY, std::process::id().into())?]);
    compile(rules, mismatch, SeccompAction::Allow)
}

fn no_clone3() -> Result<BpfProgram, BackendError> {
    let rules = BTreeMap::from([(SYS_clone3, Vec::new())]);
    compile(rules, SeccompAction::Allow, SeccompAction::Errno(ENOSYS as u32))
}

fn compile(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    mismatch: SeccompAction,
    on_match: SeccompAction,
) -> Result<BpfProgram, BackendError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, mismatch, on_match, arch)?.try_into()
}

fn rule(argument: u8, mask: u64, value: u64) -> Result<SeccompRule, BackendError> {
    let op = if mask == ANY { Eq } else { MaskedEq(mask) };
    SeccompRule::new(vec![SeccompCondition::new(argument, Dword, op, value)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_compiles_and_names_each_call_once() {
        assert!(allow_list(SeccompAction::KillProcess, ALLOWED, CONDITIONAL).is_ok() && no_clone3().is_ok());
        let mut calls: Vec<_> = ALLOWED.concat();
        let named = calls.len();
        calls.sort_unstable();
        calls.dedup();
        assert_eq!(calls.len(), named);
        assert!(CONDITIONAL.iter().chain(SENDS).all(|c| !calls.contains(&c.0)));
    }

    #[test]
    fn calls_that_could_leave_the_sandbox_are_not_allowed() {
        let calls = ALLOWED.concat();
        for call in [SYS_execve, SYS_execveat, SYS_ptrace, SYS_mount, SYS_setns, SYS_socket, SYS_bpf] {
            assert!(!calls.contains(&call), "{call}");
        }
    }
}
