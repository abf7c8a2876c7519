//! `--sandbox namespace`: a child process serves, which sees only the shared directory.

use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::exit;

use caps::CapSet;
use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount_change, move_mount, open_tree, unmount,
};
use rustix::process::{
    Pid, Signal, WaitOptions, chdir, fchdir, geteuid, kill_process, pivot_root, set_parent_process_death_signal, wait,
};
use rustix::thread::UnshareFlags;

use super::sys::{Forked, fork, restrict_mounts, unshare};
use super::{Entered, Error, Settings, Step, detached_fds, open_dir, userns};

const NAMESPACES: UnshareFlags = UnshareFlags::NEWNS.union(UnshareFlags::NEWPID).union(UnshareFlags::NEWNET);

/// The restrictions on the daemon's own mount of the share.
const RESTRICTED: u64 = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;

/// Returns only in the child. The parent waits for the child and exits.
pub fn enter<T>(settings: &Settings, kept: T) -> Result<(Entered, T), Error> {
    if geteuid().is_root() {
        unshare(NAMESPACES)
            .step("create namespaces (give the daemon CAP_SYS_ADMIN, or use --sandbox chroot or none)")?;
    } else {
        userns::unshare_mapped(NAMESPACES, &settings.uid_map, &settings.gid_map)?;
    }
    let (parent, child) = UnixStream::pair().step("create a socket pair")?;
    match fork().step("start the sandboxed process")? {
        Forked::Child => {
            drop(parent);
            die_with_parent(child)?;
            Ok((enter_mounts(&settings.shared_dir, settings.supervised)?, kept))
        }
        Forked::Parent(pid) => {
            // If the parent kept the socket, a second frontend could connect to it without an answer. If it kept the
            // helper's socket, the helper would not see the daemon's end.
            drop(kept);
            wait_for(pid, settings.helper)
        }
    }
}

/// Asks the kernel to kill this process when its parent ends. The kernel drops the request if the thread's user ID
/// changes, so the main thread must keep its own.
fn die_with_parent(mut parent: UnixStream) -> Result<(), Error> {
    set_parent_process_death_signal(Some(Signal::KILL)).step("ask for a signal at the parent's end")?;
    parent.set_nonblocking(true).step("watch the parent")?;
    match parent.read(&mut [0]) {
        Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(()),
        _ => Err(Error::Other("the parent process ended".into())),
    }
}

fn enter_mounts(shared_dir: &Path, supervised: bool) -> Result<Entered, Error> {
    let proc_self_fd = detached_fds()?;
    let proc = if supervised { Some(own_processes()?) } else { None };
    // Later mounts of the host in the shared directory appear here. Mounts made here do not reach the host.
    let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    mount_change("/", slave).step("separate the mounts from the host's")?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    let tree = open_tree(CWD, shared_dir, flags).step("clone the shared directory's mounts")?;
    // The guest may create device nodes and set-user-ID programs, and the daemon must never use one. Linux before 5.12
    // cannot do this.
    if let Err(e) = restrict_mounts(tree.as_fd(), RESTRICTED) {
        tracing::warn!(
            "the daemon's own mount of the share keeps the host's options and is not nosuid,nodev,noexec: {e}"
        );
    }
    // The path may end in a symbolic link, which open_tree(2) has followed.
    let onto_itself = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
    move_mount(&tree, "", CWD, shared_dir, onto_itself).step("mount the shared directory")?;
    pivot_into(tree.as_fd())?;
    Ok(Entered { root: open_dir(Path::new("/"))?, proc_self_fd, proc })
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
            Ok(Some((_, status))) => match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => exit(code),
                (None, Some(signal)) => exit(killed_by(signal)),
                (None, None) => continue,
            },
        }
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
