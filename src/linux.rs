//! Numbers of Linux that libc lacks on some architectures. They are the same on all that thruwayd runs on.

use libc::c_long;

/// cachestat(2), of Linux 6.5.
pub(crate) const SYS_CACHESTAT: c_long = 451;

/// fchmodat2(2), of Linux 6.6.
pub(crate) const SYS_FCHMODAT2: c_long = 452;

/// FS_IOC_FIEMAP of include/uapi/linux/fs.h.
pub(crate) const FS_IOC_FIEMAP: u32 = 0xc020_660b;
