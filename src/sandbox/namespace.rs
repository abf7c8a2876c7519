//! `--sandbox namespace`: a child process serves, which sees only the shared directory.
//!
//! Without `--supervise` the process that waits for it has moved to the namespaces too. With `--supervise` it stays
//! outside, to have another program take the daemon's place in the same namespaces ([`join`]).

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::exit;

use caps::CapSet;
use rustix::fs::{CWD, Mode, mkdirat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount_change, move_mount, open_tree, unmount,
};
use rustix::process::{
    DumpableBehavior, Pid, Signal, WaitOptions, WaitStatus, chdir, fchdir, geteuid, kill_process, pivot_root,
    set_dumpable_behavior, set_parent_process_death_signal, wait, waitpid,
};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use super::sys::{Forked, clone_sibling, fork, require_single_thread, restrict_mounts, unshare};
use super::{Entered, Error, Inside, Settings, Share, Side, Step, detached_fds, open_dir, open_file, userns};

const NAMESPACES: UnshareFlags = UnshareFlags::NEWNS.union(UnshareFlags::NEWPID).union(UnshareFlags::NEWNET);

/// The restrictions on the daemon's own mount of the share.
const RESTRICTED: u64 = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;

/// The namespaces that another program joins, by their names in /proc/PID/ns, in this order. Root's daemon is in the
/// host's user namespace.
const JOINED: [(&str, LinkNameSpaceType); 4] = [
    ("user", LinkNameSpaceType::User),
    ("mnt", LinkNameSpaceType::Mount),
    ("net", LinkNameSpaceType::Network),
    ("pid", LinkNameSpaceType::ProcessID),
];

fn joined() -> &'static [(&'static str, LinkNameSpaceType)] {
    if geteuid().is_root() { &JOINED[1..] } else { &JOINED }
}

fn unshare_all(settings: &Settings) -> Result<(), Error> {
    if geteuid().is_root() {
        unshare(NAMESPACES).step("create namespaces (give the daemon CAP_SYS_ADMIN, or use --sandbox chroot or none)")
    } else {
        userns::unshare_mapped(NAMESPACES, &settings.uid_map, &settings.gid_map)
    }
}

/// Returns only in the child. The parent waits for the child and exits.
pub fn enter<T>(settings: &Settings, kept: T) -> Result<(Entered, T), Error> {
    unshare_all(settings)?;
    let (parent, child) = UnixStream::pair().step("create a socket pair")?;
    match fork().step("start the sandboxed process")? {
        Forked::Child => {
            drop(parent);
            die_with_parent(&child)?;
            let proc_self_fd = detached_fds()?;
            Ok((Entered { root: enter_mounts(settings)?, proc_self_fd }, kept))
        }
        Forked::Parent(pid) => {
            // If the parent kept the socket, a second frontend could connect to it without an answer. If it kept the
            // helper's socket, the helper would not see the daemon's end.
            drop(kept);
            wait_for(pid, settings.helper)
        }
    }
}

/// Returns in the parent, which stays outside, and in the namespaces' first process, which is its child.
pub fn enter_supervised<T>(settings: &Settings, kept: T) -> Result<Side<T>, Error> {
    let (mut channel, child) = UnixStream::pair().step("create a socket pair")?;
    if let Forked::Parent(between) = fork().step("start the sandboxed process")? {
        drop(child);
        let first = told_pid(&mut channel);
        let code = exit_status(between)?;
        // Those that end have said why.
        let Some(first) = first.filter(|_| code == Some(0)) else { exit_as(code) };
        let mut ready = [0];
        return match channel.read(&mut ready) {
            Ok(1) if ready == [READY] => Ok(Side::Parent(first, channel)),
            Ok(1) => {
                let mut why = String::new();
                channel.read_to_string(&mut why).step("hear from the sandboxed process")?;
                exit_status(first)?;
                Ok(Side::Unable(kept, Error::Other(why)))
            }
            _ => exit_as(exit_status(first)?),
        };
    }
    drop(channel);
    let joined = joined();
    unshare_all(settings)?;
    go_on_as_sibling(&child)?;
    let open = |(name, _): &(&str, _)| open_file(Path::new(&format!("/proc/self/ns/{name}")));
    let namespaces = joined.iter().map(open).collect::<Result<_, _>>()?;
    let proc = match own_processes() {
        Ok(proc) => proc,
        Err(why) => {
            let _ = (&child).write_all(format!("{UNABLE}{why}").as_bytes());
            exit(0)
        }
    };
    (&child).write_all(&[READY]).step("tell the parent process")?;
    let inside = Inside { root: enter_mounts(settings)?, proc, channel: child };
    Ok(Side::First(inside, namespaces, kept))
}

/// What the sandbox's first process tells its parent: it is a supervisor, or (and why) it cannot be one.
const READY: u8 = b'+';
const UNABLE: char = '-';

/// Waits for a child's end.
fn exit_status(child: Pid) -> Result<Option<i32>, Error> {
    let ended = waitpid(Some(child), WaitOptions::empty()).step("wait for the sandboxed process")?;
    Ok(ended.and_then(|(_, status)| status.exit_status()))
}

/// Ends as a child that could not go on.
fn exit_as(code: Option<i32>) -> ! {
    exit(code.filter(|code| *code != 0).unwrap_or(1))
}

/// Joins the namespaces of another program's daemon. Returns in a process in them, a child of this one's parent, which
/// gets its process ID by the channel. The calling process exits. `namespaces`: those of
/// [`Side::First`](super::Side).
///
/// # Errors
/// [`Error`]. The process may then be partly inside the sandbox, and must exit.
pub fn join(namespaces: Vec<OwnedFd>, proc: OwnedFd, channel: UnixStream) -> Result<Inside, Error> {
    require_single_thread().step("join the sandbox")?;
    // Who serves there now may not look into this process, which has more capabilities.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).step("close this process to others")?;
    let joined = joined();
    if namespaces.len() != joined.len() {
        return Err(Error::Other("the sandbox has other namespaces".into()));
    }
    for ((_, kind), namespace) in joined.iter().zip(namespaces) {
        move_into_link_name_space(namespace.as_fd(), Some(*kind)).step("join the sandbox's namespaces")?;
        if *kind == LinkNameSpaceType::User {
            userns::become_root()?;
        }
    }
    go_on_as_sibling(&channel)?;
    Ok(Inside { root: open_dir(Path::new("/"))?, proc, channel })
}

/// Makes a child of this process's parent, tells the parent, and exits. Returns in the child after that.
fn go_on_as_sibling(mut channel: &UnixStream) -> Result<(), Error> {
    let (mut told, telling) = UnixStream::pair().step("create a socket pair")?;
    match clone_sibling().step("start the sandboxed process")? {
        Forked::Child => {
            drop(telling);
            // It ends when the other process does.
            let _ = told.read(&mut [0]);
            die_with_parent(channel)
        }
        Forked::Parent(pid) => {
            let told = channel.write_all(&pid.as_raw_nonzero().get().to_ne_bytes());
            exit(told.is_err().into())
        }
    }
}

/// The process ID of the child that another process has made for this one. `None` if it has not.
pub fn told_pid(channel: &mut UnixStream) -> Option<Pid> {
    let mut pid = [0; 4];
    channel.read_exact(&mut pid).ok()?;
    Pid::from_raw(i32::from_ne_bytes(pid))
}

/// Asks the kernel to kill this process when its parent ends. The kernel drops the request if the thread's user ID
/// changes, so the main thread must keep its own.
fn die_with_parent(mut parent: &UnixStream) -> Result<(), Error> {
    set_parent_process_death_signal(Some(Signal::KILL)).step("ask for a signal at the parent's end")?;
    parent.set_nonblocking(true).step("watch the parent")?;
    let alive = matches!(parent.read(&mut [0]), Err(e) if e.kind() == ErrorKind::WouldBlock);
    parent.set_nonblocking(false).step("watch the parent")?;
    if alive { Ok(()) } else { Err(Error::Other("the parent process ended".into())) }
}

fn enter_mounts(settings: &Settings) -> Result<OwnedFd, Error> {
    // Later mounts of the host in the shared directory appear here. Mounts made here do not reach the host.
    let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    mount_change("/", slave).step("separate the mounts from the host's")?;
    let tree = if settings.shares.is_empty() {
        let tree = clone_tree(&settings.shared_dir)?;
        // The guest may create device nodes and set-user-ID programs, and the daemon must never use one. Linux before
        // 5.12 cannot do this.
        if let Err(e) = restrict_mounts(tree.as_fd(), RESTRICTED, 0, libc::AT_RECURSIVE) {
            tracing::warn!(
                "the daemon's own mount of the share keeps the host's options and is not nosuid,nodev,noexec: {e}"
            );
        }
        mount_onto(&tree, &settings.shared_dir)?;
        tree
    } else {
        mount_shares(&settings.shares)?
    };
    pivot_into(tree.as_fd())?;
    open_dir(Path::new("/"))
}

fn clone_tree(dir: &Path) -> Result<OwnedFd, Error> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    open_tree(CWD, dir, flags).step("clone the shared directory's mounts")
}

/// Mounts a tree on a directory. Its path may end in a symbolic link, which open_tree(2) has followed.
fn mount_onto(tree: &OwnedFd, dir: &Path) -> Result<(), Error> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
    move_mount(tree, "", CWD, dir, flags).step("mount the shared directory")
}

/// Mounts these directories below a read-only directory, which is mounted, too. From then on they are like any mounts
/// in a share.
fn mount_shares(shares: &[Share]) -> Result<OwnedFd, Error> {
    let step = "make the directory of the shares (needs Linux 5.12)";
    let restrict = |tree: BorrowedFd, more, propagation, flags| {
        restrict_mounts(tree, RESTRICTED | more, propagation, flags).step(step)
    };
    let mut trees = Vec::new();
    for share in shares {
        let tree = clone_tree(&share.dir)?;
        // Mounts that the host adds later would not be read-only.
        let (readonly, propagation) = if share.readonly { (libc::MOUNT_ATTR_RDONLY, libc::MS_PRIVATE) } else { (0, 0) };
        restrict(tree.as_fd(), readonly, propagation, libc::AT_RECURSIVE)?;
        trees.push((&share.name, tree));
    }
    let top = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).step(step)?;
    fsconfig_set_string(&top, "mode", "755").step(step)?;
    fsconfig_create(&top).step(step)?;
    let top = fsmount(&top, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).step(step)?;
    // It hides that directory, which is cloned.
    shares.first().map_or(Ok(()), |share| mount_onto(&top, &share.dir))?;
    for (name, tree) in trees {
        mkdirat(&top, &**name, Mode::from_raw_mode(0o755)).step("make a directory for a share")?;
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&tree, "", &top, &**name, flags).step("mount a shared directory")?;
    }
    restrict(top.as_fd(), libc::MOUNT_ATTR_RDONLY, 0, 0)?;
    Ok(top)
}

/// A process file system of this process's PID namespace. It has nothing but processes (Linux 5.8): a worker that is
/// not the supervisor finds its own descriptors there, and neither finds anything of the host.
fn own_processes() -> Result<OwnedFd, Error> {
    let step = "make a process file system for --supervise (needs Linux 5.8 and CAP_SYS_ADMIN)";
    let proc = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC).step(step)?;
    fsconfig_set_string(&proc, "subset", "pid").step(step)?;
    fsconfig_create(&proc).step(step)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let attributes = attributes | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    fsmount(&proc, FsMountFlags::FSMOUNT_CLOEXEC, attributes).step(step)
}

/// Makes the mounted `tree` the root directory and unmounts everything else.
pub(crate) fn pivot_into(tree: impl AsFd) -> Result<(), Error> {
    let old_root = open_dir(Path::new("/"))?;
    fchdir(&tree).step("change to the shared directory")?;
    pivot_root(".", ".").step("make the shared directory the root")?;
    // Both roots are now stacked at "/". In the old one, "." names the mount to remove.
    fchdir(&old_root).step("change to the old root")?;
    unmount(".", UnmountFlags::DETACH).step("unmount the old root")?;
    chdir("/").step("change to the new root")
}

/// Waits for the child and exits with its status, or 128 plus the signal that killed it.
fn wait_for(child: Pid, helper: Option<Pid>) -> ! {
    for set in [CapSet::Effective, CapSet::Permitted, CapSet::Inheritable] {
        if let Err(e) = caps::clear(None, set) {
            tracing::warn!("the waiting process keeps its capabilities: {e}");
        }
    }
    loop {
        match wait(WaitOptions::UNTRACED) {
            Err(rustix::io::Errno::INTR) | Ok(None) => continue,
            Err(e) => {
                tracing::error!("cannot wait for the sandboxed process: {e}");
                exit(1)
            }
            Ok(Some((pid, status))) if pid != child => {
                if Some(pid) == helper && status.stopped() {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
            Ok(Some((_, status))) => exit_like(status),
        }
    }
}

/// Exits with the status of a child that has ended.
pub fn exit_like(status: WaitStatus) {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => exit(code),
        (None, Some(signal)) => exit(killed_by(signal)),
        (None, None) => {}
    }
}

fn killed_by(signal: i32) -> i32 {
    match signal {
        libc::SIGSYS => tracing::error!(
            "seccomp killed the daemon for a system call that is not on its list (SIGSYS): run it with --seccomp=log \
             to find the call in the kernel's log"
        ),
        _ => tracing::error!("the daemon was killed by signal {signal}"),
    }
    128 + signal
}
