//! The calling thread's identity: who creates a file, and whether set-id bits survive a write.
//!
//! Each worker has a working directory and a umask of its own (unshare(CLONE_FS)). The directory is /proc/self/fd,
//! where an O_PATH descriptor has a path: its number.

use std::cell::Cell;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::process::{Gid, Uid, fchdir, getegid, geteuid, umask};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

use super::idmap::NO_ID;
use super::sys;
use crate::fuse::ops::Result;

const NO_CAPS: CapabilitySets = CapabilitySets {
    effective: CapabilitySet::empty(),
    permitted: CapabilitySet::empty(),
    inheritable: CapabilitySet::empty(),
};

/// Rights of who need not ask the host: to any directory, to the names of others in a sticky one, to device nodes.
const OVERRIDES: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::FOWNER).union(CapabilitySet::MKNOD);

/// Rights of who may write as a member of any group, and need not be a member to open a file.
const JOINS: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::SETGID);

thread_local! {
    static READY: Cell<bool> = const { Cell::new(false) };
    static FSETID: Cell<bool> = const { Cell::new(false) };
    static OWN: Cell<(Uid, Gid)> = const { Cell::new((Uid::ROOT, Gid::ROOT)) };
    /// The effective group.
    static GROUP: Cell<Gid> = const { Cell::new(Gid::ROOT) };
    /// The group that [`clear_setid`] asked for, since when [`join`] has changed nothing.
    static WRITER: Cell<Option<Gid>> = const { Cell::new(None) };
    static CAPS: Cell<CapabilitySets> = const { Cell::new(NO_CAPS) };
}

/// Prepares the calling thread. Cheap after the first call.
pub fn enter_thread(proc_self_fd: BorrowedFd) {
    if READY.get() {
        return;
    }
    let done = sys::unshare_fs().and_then(|()| fchdir(proc_self_fd)).and_then(|()| capabilities(None));
    match done {
        Ok(caps) => {
            umask(rustix::fs::Mode::empty());
            CAPS.set(caps);
            FSETID.set(caps.effective.contains(CapabilitySet::FSETID));
            OWN.set((geteuid(), getegid()));
            GROUP.set(getegid());
            READY.set(true);
        }
        // Every operation by path then fails. It cannot act on another file.
        Err(errno) => tracing::error!("a worker has no working directory of its own: {errno}"),
    }
}

/// Whether the daemon may open files whatever their mode.
pub fn overrides_modes() -> bool {
    CAPS.get().effective.contains(CapabilitySet::DAC_OVERRIDE)
}

/// The daemon's own user and group.
pub fn own() -> (Uid, Gid) {
    OWN.get()
}

/// The thread's writes keep set-id bits, until [`clear_setid`].
pub fn keep_setid() {
    hold_fsetid(true);
}

/// The thread's writes take set-id bits away, until [`keep_setid`]: as those of a user without CAP_FSETID in this
/// group, or in the daemon's. Without the right to be in the group, the thread stays in the daemon's.
///
/// Costs system calls only if the last write was in another way.
pub fn clear_setid(group: Option<Gid>) {
    hold_fsetid(false);
    let own = OWN.get().1;
    let group = group.filter(|_| CAPS.get().effective.contains(JOINS)).unwrap_or(own);
    if WRITER.get() != Some(group) {
        // A user namespace may not have the group. It is not asked again at each write.
        if join(group).is_err() {
            let _ = join(own);
        }
        WRITER.set(Some(group));
    }
}

fn hold_fsetid(keep: bool) {
    let caps = CAPS.get();
    if FSETID.get() == keep || !caps.permitted.contains(CapabilitySet::FSETID) {
        return;
    }
    let mut effective = caps.effective;
    effective.set(CapabilitySet::FSETID, keep);
    if set_capabilities(None, CapabilitySets { effective, ..caps }).is_ok() {
        FSETID.set(keep);
    }
}

/// An id that the daemon may not act as, and the kernel's error: EPERM without CAP_SETUID or CAP_SETGID, EINVAL if the
/// daemon's user namespace does not have the id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    User(Errno),
    Group(Errno),
}

impl Denied {
    /// The error that the guest gets.
    pub fn errno(self) -> Errno {
        match self {
            Self::User(errno) | Self::Group(errno) => errno,
        }
    }
}

/// The thread acts as another user until this is dropped.
pub struct Identity {
    uid: bool,
    gid: bool,
    groups: bool,
    umask: bool,
}

impl Identity {
    /// Acts as `uid`, `gid` and the supplementary `group`, with `umask`. The guest's root acts as the daemon's own
    /// user, since an ordinary user's daemon can be nobody else.
    ///
    /// # Errors
    /// [`Denied`]; EINVAL for [`NO_ID`].
    pub fn take(uid: u32, gid: u32, group: Option<u32>, umask_bits: u32) -> std::result::Result<Self, Denied> {
        if uid == NO_ID {
            return Err(Denied::User(Errno::INVAL));
        }
        if [Some(gid), group].contains(&Some(NO_ID)) {
            return Err(Denied::Group(Errno::INVAL));
        }
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        keep_setid();
        let (own_uid, own_gid) = OWN.get();
        let mut me = Self { uid: false, gid: false, groups: false, umask: false };
        let (other_uid, other_gid) = (uid != own_uid && !uid.is_root(), gid != own_gid && !gid.is_root());
        if let Some(group) = group.map(Gid::from_raw).filter(|g| *g != gid && other_uid) {
            // A user namespace may deny it.
            me.groups = set_thread_groups(&[group]).is_ok();
        }
        // The thread may still be in the group of who wrote last.
        join(if other_gid { gid } else { own_gid }).map_err(Denied::Group)?;
        me.gid = other_gid;
        if other_uid {
            set_euid(uid).map_err(Denied::User)?;
            me.uid = true;
        }
        if umask_bits != 0 {
            umask(rustix::fs::Mode::from_raw_mode(umask_bits));
            me.umask = true;
        }
        Ok(me)
    }

    /// Runs `make` as this user. If the host denies it, runs it once more with the rights to override that: the guest
    /// has checked the permission, and knows more of its user than the daemon. Its user may have a capability, or be in
    /// a group that the guest does not send. The other id is no part of it: the file belongs to this user.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn run<R>(self, make: impl Fn() -> Result<R>) -> Result<R> {
        match make() {
            Err(Errno::ACCESS | Errno::PERM) if self.uid && self.overrides() => make(),
            done => done,
        }
    }

    /// Takes the rights to override the host's checks, as far as the daemon has them.
    fn overrides(&self) -> bool {
        let caps = CAPS.get();
        let effective = caps.permitted & OVERRIDES;
        !effective.is_empty() && set_capabilities(None, CapabilitySets { effective, ..caps }).is_ok()
    }
}

impl Drop for Identity {
    fn drop(&mut self) {
        let (uid, gid) = OWN.get();
        let undo = || -> Result<()> {
            if self.uid {
                // Back at euid 0 the kernel makes all permitted capabilities effective. For other users it changes
                // none.
                set_euid(uid)?;
                let caps = CAPS.get();
                if !uid.is_root() || caps.effective != caps.permitted {
                    set_capabilities(None, caps)?;
                }
            }
            if self.gid {
                join(gid)?;
            }
            if self.groups {
                set_thread_groups(&[])?;
            }
            Ok(())
        };
        if let Err(errno) = undo() {
            // Serving other requests as this user could allow too much or too little.
            tracing::error!("cannot return to the daemon's own identity: {errno}");
            std::process::abort();
        }
        if self.umask {
            umask(rustix::fs::Mode::empty());
        }
    }
}

/// Sets the calling thread's effective user id alone.
fn set_euid(uid: Uid) -> Result<()> {
    set_thread_res_uid(None::<Uid>, uid, None::<Uid>)
}

/// Sets the calling thread's effective group id alone.
fn join(gid: Gid) -> Result<()> {
    if GROUP.get() != gid {
        set_thread_res_gid(None::<Gid>, gid, None::<Gid>)?;
        GROUP.set(gid);
        WRITER.set(None);
    }
    Ok(())
}
