//! The calling thread's identity: who creates a file, and whether set-id bits survive a write.
//!
//! Each worker has a working directory of its own, /proc/self/fd, so that an O_PATH descriptor has a path (its number),
//! and a umask of its own. Both come from unshare(CLONE_FS).

use std::cell::Cell;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::process::{fchdir, getegid, geteuid, umask};

use super::sys::{self, Caps};
use crate::fuse::ops::Result;

/// Capability numbers of include/uapi/linux/capability.h.
const CAP_DAC_OVERRIDE: u64 = 1 << 1;
const CAP_FSETID: u64 = 1 << 4;

thread_local! {
    static READY: Cell<bool> = const { Cell::new(false) };
    static FSETID: Cell<bool> = const { Cell::new(false) };
    static OWN: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
    static CAPS: Cell<Caps> = const { Cell::new(Caps { effective: 0, permitted: 0, inheritable: 0 }) };
}

/// Prepares the calling thread. Cheap after the first call.
pub fn enter_thread(proc_self_fd: BorrowedFd) {
    if READY.get() {
        return;
    }
    let done = sys::unshare_fs().and_then(|()| fchdir(proc_self_fd)).and_then(|()| sys::capget());
    match done {
        Ok(caps) => {
            umask(rustix::fs::Mode::empty());
            CAPS.set(caps);
            FSETID.set(caps.effective & CAP_FSETID != 0);
            OWN.set((geteuid().as_raw(), getegid().as_raw()));
            READY.set(true);
        }
        // Every operation by path then fails by itself; it can't act on another file.
        Err(errno) => tracing::error!("a worker has no working directory of its own: {errno}"),
    }
}

/// Sets whether the thread's writes keep set-id bits. Left as it is until another operation needs it otherwise.
pub fn keep_setid(keep: bool) {
    let caps = CAPS.get();
    if FSETID.get() == keep || caps.permitted & CAP_FSETID == 0 {
        return;
    }
    let effective = if keep { caps.effective | CAP_FSETID } else { caps.effective & !CAP_FSETID };
    if sys::capset(Caps { effective, ..caps }).is_ok() {
        FSETID.set(keep);
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
    /// Acts as `uid`, `gid` and the supplementary `group`, with `umask`. The guest has checked its user's permission by
    /// all its groups; where it can't say which one counts (`trust`), the thread overrides the host's check. The guest's
    /// root is whoever the daemon is: an ordinary user's daemon could be no other.
    ///
    /// # Errors
    /// EPERM where the daemon may not act as that user.
    pub fn take(uid: u32, gid: u32, group: Option<u32>, umask_bits: u32, mut trust: bool) -> Result<Self> {
        keep_setid(true);
        let (own_uid, own_gid) = OWN.get();
        let mut me = Self { uid: false, gid: false, groups: false, umask: false };
        let (other_uid, other_gid) = (uid != own_uid && uid != 0, gid != own_gid && gid != 0);
        if let Some(group) = group.filter(|g| *g != gid && other_uid) {
            me.groups = sys::setgroups(&[group]).is_ok();
            // A user namespace may deny it.
            trust |= !me.groups;
        }
        if other_gid {
            sys::setegid(gid)?;
            me.gid = true;
        }
        if other_uid {
            sys::seteuid(uid)?;
            me.uid = true;
            let caps = CAPS.get();
            if trust && caps.permitted & CAP_DAC_OVERRIDE != 0 {
                sys::capset(Caps { effective: CAP_DAC_OVERRIDE, ..caps })?;
            }
        }
        if umask_bits != 0 {
            umask(rustix::fs::Mode::from_raw_mode(umask_bits));
            me.umask = true;
        }
        Ok(me)
    }
}

impl Drop for Identity {
    fn drop(&mut self) {
        let (uid, gid) = OWN.get();
        let undo = || -> std::result::Result<(), Errno> {
            if self.uid {
                // Back at euid 0 the kernel makes all permitted capabilities effective; elsewhere it changes none.
                sys::seteuid(uid)?;
                let caps = CAPS.get();
                if uid != 0 || caps.effective != caps.permitted {
                    sys::capset(caps)?;
                }
            }
            if self.gid {
                sys::setegid(gid)?;
            }
            if self.groups {
                sys::setgroups(&[])?;
            }
            Ok(())
        };
        if let Err(errno) = undo() {
            // To serve anybody's request as this user would be wrong in both directions.
            tracing::error!("cannot return to the daemon's own identity: {errno}");
            std::process::abort();
        }
        if self.umask {
            umask(rustix::fs::Mode::empty());
        }
    }
}
