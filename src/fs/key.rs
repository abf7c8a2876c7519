//! What makes a file of the host the one that the guest knows.

use std::ffi::CStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::BorrowedFd;

use rustix::fs::{Statx, StatxFlags, StatxTimestamp, fstatfs};

use super::sys;

/// Identity of a host file: no two have the same, at one time or one after the other, as far as their file system
/// tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub ino: u64,
    /// What the file is [told by](ToldBy) in the upper bits, then two bits of which that is, and four of its type.
    mark: u64,
    /// The device number as the kernel has it: 12 bits and 20.
    pub dev: u32,
    /// The guest sees the same file through another mount as another inode: a submount's root must be one.
    pub mount: u32,
}

/// What tells files apart that have the same inode number, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToldBy {
    /// Their time of birth.
    Birth,
    /// Their handle. ext2, ext3, NFS and others keep no time of birth.
    Handle,
    /// Their handle as long as they are open. The kernel makes handles of FUSE from what it has in its cache. An open
    /// file does not keep its inode number from another file: that is the server's.
    OpenHandle,
    /// Nothing: the number is theirs as long as they are open. A file of overlayfs gets another time of birth when it
    /// is copied up.
    Number,
}

impl ToldBy {
    fn of_bits(bits: u64) -> Self {
        match bits & 0b11 {
            0 => Self::Birth,
            1 => Self::Handle,
            2 => Self::OpenHandle,
            _ => Self::Number,
        }
    }

    /// What tells this file, which `fd` is a descriptor of. `near`: another file, perhaps of the same mount.
    fn of(fd: BorrowedFd, st: &Statx, near: Option<&Key>) -> Self {
        let near = near.filter(|near| near.mount == mount(st)).map(Key::told_by);
        if near == Some(Self::Number) {
            return Self::Number;
        }
        let born = st.stx_mask & StatxFlags::BTIME.bits() != 0;
        let kind = || fstatfs(fd).map_or(0, |st| st.f_type);
        match near {
            Some(_) if born => Self::Birth,
            Some(told) if told != Self::Birth => told,
            _ => match kind() {
                libc::OVERLAYFS_SUPER_MAGIC => Self::Number,
                _ if born => Self::Birth,
                libc::FUSE_SUPER_MAGIC => Self::OpenHandle,
                _ => Self::Handle,
            },
        }
    }
}

/// Both parts of a device number in 32 bits: MKDEV of include/linux/kdev_t.h.
pub fn dev(st: &Statx) -> u32 {
    st.stx_dev_major << 20 | st.stx_dev_minor
}

/// Major and minor of a [`dev`].
pub fn parts_of_dev(dev: u32) -> (u32, u32) {
    (dev >> 20, dev & 0xf_ffff)
}

/// The id of the mount that the file was found on. The kernel has it in an int.
pub fn mount(st: &Statx) -> u32 {
    st.stx_mnt_id as u32
}

/// A file's time in ns.
pub fn ns(time: &StatxTimestamp) -> u64 {
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec.into())
}

/// What a file is told by that nothing but its number tells.
pub const UNMARKED: u64 = 0;

impl Key {
    /// No file has it. `format`: S_IFMT bits.
    pub fn of_none(id: u64, format: u32) -> Self {
        let mark = u64::from(format >> 12);
        Self { ino: id, mark, dev: u32::MAX, mount: u32::MAX }
    }

    pub fn new(st: &Statx, told_by: ToldBy, value: u64) -> Self {
        let format = u64::from(st.stx_mode >> 12);
        let mark = value << 6 | (told_by as u64) << 4 | format;
        Self { ino: st.stx_ino, mark, dev: dev(st), mount: mount(st) }
    }

    /// The key of a file that has a time of birth, unless overlayfs says so.
    pub fn born(st: &Statx) -> Option<Self> {
        let known = st.stx_mask & StatxFlags::BTIME.bits() != 0;
        // In nanoseconds. The bits that are lost come back after 9 years.
        known.then(|| Self::new(st, ToldBy::Birth, ns(&st.stx_btime)))
    }

    /// The key of the file that `fd` is a descriptor of. `near`: of another file, perhaps of the same mount.
    /// `place`: the directory's nodeid and the file's name in it.
    pub fn of(fd: BorrowedFd, st: &Statx, near: Option<&Self>, place: Option<(u64, &CStr)>) -> Self {
        let told_by = ToldBy::of(fd, st, near);
        let value = match told_by {
            ToldBy::Birth => return Self::born(st).unwrap_or_else(|| Self::new(st, told_by, UNMARKED)),
            ToldBy::Handle | ToldBy::OpenHandle => handle_hash(fd, c""),
            ToldBy::Number => place.filter(|_| may_part(fd, st)).map_or(UNMARKED, hash),
        };
        Self::new(st, told_by, value)
    }

    pub fn told_by(&self) -> ToldBy {
        ToldBy::of_bits(self.mark >> 4)
    }

    /// The file's type, S_IFMT bits.
    pub fn format(&self) -> u32 {
        (self.mark as u32 & 0xf) << 12
    }

    /// Whether `name` in `dir`, or `dir` itself with an empty name, is the file with this key. `st`: its attributes.
    pub fn is_of(&self, dir: BorrowedFd, name: &CStr, st: &Statx) -> bool {
        let value = match self.told_by() {
            ToldBy::Birth => return Self::born(st) == Some(*self),
            ToldBy::Handle | ToldBy::OpenHandle => handle_hash(dir, name),
            ToldBy::Number => return Self::new(st, ToldBy::Number, UNMARKED) == self.unmarked(),
        };
        Self::new(st, self.told_by(), value) == *self
    }

    /// What all files have in common that have the same number, one after the other.
    pub fn unmarked(&self) -> Self {
        Self { mark: self.mark & 0x3f, ..*self }
    }
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Of a file without a handle: [`UNMARKED`]. Then its number must do.
fn handle_hash(fd: BorrowedFd, name: &CStr) -> u64 {
    sys::with_file_id(fd, name, |kind, handle| hash((kind, handle))).unwrap_or(UNMARKED)
}

/// A handle of overlayfs by fs/overlayfs/overlayfs.h: byte 4 is [`OVL_FH_MAGIC`], byte 6 has flags. 4 of them is
/// OVL_FH_FLAG_PATH_UPPER.
const OVL_FILEID_V1: i32 = 0xf8;
const OVL_FH_MAGIC: u8 = 0xfb;

/// Whether the names of a file on overlayfs may become names of several files. If its lower layer has a file with
/// several names, each is a file of its own once it is copied up (without `index=on`, which cannot be seen from here).
/// In the upper layer all names stay one file. Before Linux 6.6 nothing tells the two apart.
fn may_part(fd: BorrowedFd, st: &Statx) -> bool {
    let directory = u32::from(st.stx_mode) & libc::S_IFMT == libc::S_IFDIR;
    let is_upper = |kind: i32, handle: &[u8]| {
        kind == OVL_FILEID_V1
            && handle.get(4) == Some(&OVL_FH_MAGIC)
            && handle.get(6).is_some_and(|flags| flags & 4 != 0)
    };
    !directory && st.stx_nlink > 1 && !sys::with_file_id(fd, c"", is_upper).unwrap_or(false)
}
