//! The system calls that the daemon may make while it serves (`--seccomp`).

use std::collections::BTreeMap;

use libc::*;
use seccompiler::SeccompCmpArgLen::Dword;
use seccompiler::SeccompCmpOp::{Eq, MaskedEq};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
    apply_filter_all_threads,
};

use super::Error;

/// What happens at a system call outside of the list.
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

/// Calls that may be made with any arguments, by what the daemon does with them.
const ALLOWED: &[&[c_long]] = &[
    // Descriptors, and data in guest memory.
    &[SYS_read, SYS_write, SYS_readv, SYS_writev, SYS_pread64, SYS_pwrite64, SYS_preadv, SYS_pwritev],
    &[SYS_preadv2, SYS_pwritev2, SYS_lseek, SYS_close, SYS_dup, SYS_dup3, SYS_fcntl, SYS_copy_file_range],
    // Rings are there before the filter is, and restricted to reads; none can be made.
    &[SYS_io_uring_enter],
    // Files: to find and open them.
    &[SYS_openat, SYS_openat2, SYS_name_to_handle_at, SYS_open_by_handle_at, SYS_readlinkat, SYS_getdents64],
    &[SYS_statx, SYS_newfstatat, SYS_fstat, SYS_statfs, SYS_fstatfs, SYS_faccessat, SYS_faccessat2],
    // To make, remove and rename them.
    &[SYS_mkdirat, SYS_mknodat, SYS_symlinkat, SYS_linkat, SYS_unlinkat, SYS_renameat2],
    // To change their contents and attributes.
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
    // To act for a user of the guest: credentials, umask and directory of one thread.
    &[SYS_setfsuid, SYS_setfsgid, SYS_setresuid, SYS_setresgid, SYS_setgroups, SYS_capget, SYS_capset],
    &[SYS_getuid, SYS_geteuid, SYS_getgid, SYS_getegid, SYS_umask, SYS_chdir, SYS_fchdir],
    // The frontend's socket, and events.
    &[SYS_accept4, SYS_recvmsg, SYS_recvfrom, SYS_sendmsg, SYS_getsockopt, SYS_shutdown, SYS_eventfd2],
    &[SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_pwait, SYS_ppoll],
    // Memory of the guest and of the daemon (mmap and mprotect: see `CONDITIONAL`).
    &[SYS_munmap, SYS_mremap, SYS_madvise, SYS_brk],
    // Threads and their signals (clone: see `CONDITIONAL`).
    &[SYS_set_robust_list, SYS_rseq, SYS_futex, SYS_sched_getaffinity, SYS_sched_yield, SYS_membarrier, SYS_exit],
    &[SYS_exit_group, SYS_gettid, SYS_getpid, SYS_sigaltstack, SYS_rt_sigprocmask, SYS_rt_sigaction],
    &[SYS_rt_sigreturn, SYS_restart_syscall],
    // Time and chance.
    &[SYS_clock_gettime, SYS_clock_nanosleep, SYS_nanosleep, SYS_gettimeofday, SYS_getrandom],
    // clone3 gets ENOSYS from the second filter; glibc then takes clone, whose flags a filter can see.
    &[SYS_clone3],
    #[cfg(target_arch = "x86_64")]
    &[SYS_epoll_wait, SYS_poll],
];

/// fchmodat2(2), which libc does not name on all architectures; the number is the same on all.
const SYS_FCHMODAT2: c_long = 452;

/// A call that is allowed if an argument (by number), masked with the third column, is the fourth. Several for one call
/// are alternatives.
pub type Condition = (c_long, u8, u64, u64);

/// What the daemon may call with some arguments only.
const CONDITIONAL: &[Condition] = &[
    // No memory is ever executable anew.
    (SYS_mmap, 2, PROT_EXEC as u64, 0),
    (SYS_mprotect, 2, PROT_EXEC as u64, 0),
    // Threads, no processes; the kernel refuses a new user namespace to a thread.
    (SYS_clone, 0, CLONE_THREAD as u64, CLONE_THREAD as u64),
    // A umask and current directory of the thread's own, and no namespaces.
    (SYS_unshare, 0, ANY, CLONE_FS as u64),
    (SYS_prctl, 0, ANY, PR_SET_NAME as u64),
    // What Rust's std makes of set_nonblocking and set_cloexec.
    (SYS_ioctl, 1, ANY, FIONBIO),
    (SYS_ioctl, 1, ANY, FIOCLEX),
];

/// All bits of an argument count.
pub const ANY: u64 = u32::MAX as u64;

/// Installs the daemon's filter for all threads, and for ever. `syslog`: allow what a log to syslog takes.
///
/// # Errors
/// [`Error::Other`] if the kernel has no seccomp filters.
pub fn apply(action: Action, syslog: bool) -> Result<(), Error> {
    let syslog: &[c_long] = if syslog { &[SYS_sendto] } else { &[] };
    apply_list(action, &[ALLOWED, &[syslog]].concat(), CONDITIONAL)
}

/// Installs a filter that allows these calls alone, for all threads, and for ever.
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
    let failed = |e: &dyn std::fmt::Display| Error::Other(format!("cannot set up seccomp: {e}: try --seccomp none"));
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
    // tgkill interrupts a thread that waits for a lock; other processes are no business of the daemon.
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
        assert!(CONDITIONAL.iter().all(|c| !calls.contains(&c.0)));
    }

    #[test]
    fn what_would_leave_the_sandbox_is_not_in_the_list() {
        let calls = ALLOWED.concat();
        for call in [SYS_execve, SYS_execveat, SYS_ptrace, SYS_mount, SYS_setns, SYS_socket, SYS_bpf] {
            assert!(!calls.contains(&call), "{call}");
        }
    }
}
