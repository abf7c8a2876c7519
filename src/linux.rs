//! Numbers of Linux that libc lacks, or has in other types, on some machines. They are the same on all that thruwayd
//! runs on.

use libc::c_long;

/// cachestat(2), of Linux 6.5.
pub(crate) const SYS_CACHESTAT: c_long = 451;

/// fchmodat2(2), of Linux 6.6.
pub(crate) const SYS_FCHMODAT2: c_long = 452;

/// FS_IOC_FIEMAP of include/uapi/linux/fs.h.
pub(crate) const FS_IOC_FIEMAP: u32 = 0xc020_660b;

/// The number of a request as ioctl(2) of the C library takes it: musl has an int, glibc an unsigned long.
#[allow(clippy::cast_lossless)]
pub(crate) const fn ioctl_number(number: u32) -> libc::Ioctl {
    number as libc::Ioctl
}
