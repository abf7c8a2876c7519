//! The FUSE wire format, protocol 7.45: structures, opcodes and flags of include/uapi/linux/fuse.h (Linux 7.2).
//! All integers are of the guest's byte order, which is the host's. Nothing here has behaviour.

#![allow(missing_docs, reason = "fields and flags have their names in fuse.h, which explains them")]

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The major version of the protocol.
pub const KERNEL_VERSION: u32 = 7;
/// The newest minor version that is supported.
pub const KERNEL_MINOR_VERSION: u32 = 45;
/// The oldest minor version that is supported: 7.27 is the first whose structures all have today's sizes.
pub const MIN_MINOR_VERSION: u32 = 27;
/// The nodeid of the shared directory.
pub const ROOT_ID: u64 = 1;

macro_rules! wire {
    ($($(#[$doc:meta])* struct $name:ident { $($(#[$fdoc:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        pub struct $name { $($(#[$fdoc])* pub $field: $type,)* }
    )*};
}

macro_rules! opcodes {
    ($($name:ident = $value:literal $(: $($does:ident)|+)?,)*) => {
        /// What a request asks for (enum fuse_opcode).
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Opcode { $($name = $value,)* }

        impl Opcode {
            /// All opcodes.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// Its place in [`ALL`](Self::ALL). The numbers of the opcodes have a gap before the last.
            pub fn index(self) -> usize {
                #[repr(usize)]
                enum Place { $($name),* }
                match self { $(Self::$name => Place::$name as usize,)* }
            }

            /// Its name as include/uapi/linux/fuse.h writes it, without FUSE_.
            pub fn fuse_name(self) -> String {
                let mut name = String::new();
                for letter in format!("{self:?}").chars() {
                    let word = letter.is_uppercase() || letter == '6';
                    name.extend((word && !name.is_empty()).then_some('_'));
                    name.push(letter.to_ascii_uppercase());
                }
                name
            }

            /// What a request with it does, whatever its arguments are.
            pub const fn does(self) -> Does {
                match self { $(Self::$name => Does::empty()$($(.union(Does::$does))+)?,)* }
            }

            /// The opcode with this number, if there is one.
            pub fn from_u32(value: u32) -> Option<Self> {
                match value { $($value => Some(Self::$name),)* _ => None }
            }
        }
    };
}

opcodes! {
    Lookup = 1: ASK_HOST,
    Forget = 2,
    Getattr = 3: ASK_HOST | ONLY_READ | SEE_TIMES,
    Setattr = 4: ASK_HOST | SEE_TIMES,
    Readlink = 5: ASK_HOST | ONLY_READ,
    Symlink = 6: ASK_HOST,
    Mknod = 8: ASK_HOST,
    Mkdir = 9: ASK_HOST,
    Unlink = 10: ASK_HOST,
    Rmdir = 11: ASK_HOST,
    Rename = 12: ASK_HOST,
    Link = 13: ASK_HOST,
    Open = 14: ASK_HOST | SEE_TIMES | AWAIT_OTHERS,
    Read = 15: ASK_HOST | ONLY_READ,
    Write = 16: ASK_HOST,
    Statfs = 17: ASK_HOST | ONLY_READ,
    Release = 18: ASK_HOST | ONLY_READ | SEE_TIMES,
    Fsync = 20: ASK_HOST | ONLY_READ | SEE_TIMES | USE_DISK,
    Setxattr = 21: ASK_HOST | SEE_TIMES,
    Getxattr = 22: ASK_HOST | ONLY_READ,
    Listxattr = 23: ASK_HOST | ONLY_READ,
    Removexattr = 24: ASK_HOST | SEE_TIMES,
    Flush = 25: ASK_HOST | ONLY_READ | SEE_TIMES,
    Init = 26,
    Opendir = 27: ASK_HOST | ONLY_READ,
    Readdir = 28: ASK_HOST | ONLY_READ,
    Releasedir = 29: ASK_HOST | ONLY_READ,
    Fsyncdir = 30: ASK_HOST | ONLY_READ | USE_DISK,
    Getlk = 31: ASK_HOST | ONLY_READ,
    Setlk = 32: ASK_HOST,
    Setlkw = 33: ASK_HOST,
    Access = 34: ASK_HOST | ONLY_READ,
    Create = 35: ASK_HOST,
    Interrupt = 36: ONLY_READ,
    Bmap = 37,
    Destroy = 38,
    Ioctl = 39: ASK_HOST | SEE_TIMES | AWAIT_OTHERS,
    Poll = 40,
    NotifyReply = 41,
    BatchForget = 42,
    Fallocate = 43: ASK_HOST | SEE_TIMES | USE_DISK | CHANGE_SPACE,
    Readdirplus = 44: ASK_HOST | ONLY_READ,
    Rename2 = 45: ASK_HOST,
    Lseek = 46: ASK_HOST | ONLY_READ | AWAIT_OTHERS,
    CopyFileRange = 47: ASK_HOST | SEE_TIMES | USE_DISK,
    Setupmapping = 48: ONLY_READ | SEE_TIMES,
    Removemapping = 49: ONLY_READ,
    Syncfs = 50: ASK_HOST | ONLY_READ | TAKE_LONG,
    Tmpfile = 51: ASK_HOST,
    Statx = 52: ASK_HOST | ONLY_READ | SEE_TIMES,
    CopyFileRange64 = 53: ASK_HOST | SEE_TIMES | USE_DISK,
}

bitflags::bitflags! {
    /// What a request does, which decides on which thread it is served.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Does: u16 {
        /// It makes system calls on the files that it names, and answers when they are done. Any thread may serve it.
        /// io_uring is no way out for READ and WRITE: before it takes a FUSE file, the kernel sends POLL, and waits for
        /// the answer in the caller.
        const ASK_HOST = 1 << 0;
        /// It changes nothing, whatever its arguments are.
        const ONLY_READ = 1 << 1;
        /// It reads or changes the attributes or data of its node, and waits for the file to get its times. What
        /// LOOKUP, READDIRPLUS, LINK and COPY_FILE_RANGE find comes later, READ has no attributes, and WRITE waits for
        /// the same lock itself.
        const SEE_TIMES = 1 << 2;
        /// It takes long unless the file is in memory.
        const USE_DISK = 1 << 3;
        /// It takes long.
        const TAKE_LONG = 1 << 4;
        /// It changes which blocks the file has.
        const CHANGE_SPACE = 1 << 5;
        /// It gives the file a size. Its arguments tell.
        const TRUNCATE = 1 << 6;
        /// What it finds it has to wait for is other processes. It needs no more of the guest's memory than its
        /// arguments.
        const AWAIT_OTHERS = 1 << 7;
    }

    /// FUSE_INIT flags: `flags` is the low half, `flags2` the high one.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct InitFlags: u64 {
        const ASYNC_READ = 1 << 0;
        const POSIX_LOCKS = 1 << 1;
        const ATOMIC_O_TRUNC = 1 << 3;
        const EXPORT_SUPPORT = 1 << 4;
        const BIG_WRITES = 1 << 5;
        const DONT_MASK = 1 << 6;
        const FLOCK_LOCKS = 1 << 10;
        const AUTO_INVAL_DATA = 1 << 12;
        const DO_READDIRPLUS = 1 << 13;
        const READDIRPLUS_AUTO = 1 << 14;
        const ASYNC_DIO = 1 << 15;
        const WRITEBACK_CACHE = 1 << 16;
        const NO_OPEN_SUPPORT = 1 << 17;
        const PARALLEL_DIROPS = 1 << 18;
        const POSIX_ACL = 1 << 20;
        const MAX_PAGES = 1 << 22;
        const CACHE_SYMLINKS = 1 << 23;
        const NO_OPENDIR_SUPPORT = 1 << 24;
        const MAP_ALIGNMENT = 1 << 26;
        const SUBMOUNTS = 1 << 27;
        const HANDLE_KILLPRIV_V2 = 1 << 28;
        const SETXATTR_EXT = 1 << 29;
        const INIT_EXT = 1 << 30;
        const SECURITY_CTX = 1 << 32;
        const HAS_INODE_DAX = 1 << 33;
        const CREATE_SUPP_GROUP = 1 << 34;
        const DIRECT_IO_ALLOW_MMAP = 1 << 36;
        const PASSTHROUGH = 1 << 37;
        const ALLOW_IDMAP = 1 << 40;
        /// Window passthrough, version 2 (docs/protocol.md). Not Linux's. Bit 62 was version 1.
        const PASSTHROUGH_SHM = 1 << 59;
    }

    /// Which fields SETATTR sets (FATTR_*).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct SetattrValid: u32 {
        const MODE = 1 << 0;
        const UID = 1 << 1;
        const GID = 1 << 2;
        const SIZE = 1 << 3;
        const ATIME = 1 << 4;
        const MTIME = 1 << 5;
        const FH = 1 << 6;
        const ATIME_NOW = 1 << 7;
        const MTIME_NOW = 1 << 8;
        const LOCKOWNER = 1 << 9;
        const CTIME = 1 << 10;
        const KILL_SUIDGID = 1 << 11;
    }

    /// What the reply to OPEN says about the new handle (FOPEN_*).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct OpenFlags: u32 {
        const DIRECT_IO = 1 << 0;
        const KEEP_CACHE = 1 << 1;
        const CACHE_DIR = 1 << 3;
        const NOFLUSH = 1 << 5;
        const PARALLEL_DIRECT_WRITES = 1 << 6;
        const PASSTHROUGH = 1 << 7;
    }
}

/// GETATTR: `fh` is valid.
pub const GETATTR_FH: u32 = 1 << 0;
/// OPEN, CREATE: clear the set-id bits, for O_TRUNC by a caller without CAP_FSETID.
pub const OPEN_KILL_SUIDGID: u32 = 1 << 0;
/// WRITE: written back from the page cache, not by a particular process.
pub const WRITE_CACHE: u32 = 1 << 0;
/// WRITE: clear the set-id bits.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// SETXATTR: clear the set-group-id bit, for an ACL set by a caller outside of the file's group.
pub const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;
/// FSYNC: data only.
pub const FSYNC_FDATASYNC: u32 = 1 << 0;
/// RELEASE: drop the handle's flock lock.
pub const RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
/// SETLK: an flock(2) lock.
pub const LK_FLOCK: u32 = 1 << 0;
/// IOCTL: the server says where the program's data is. Only a character device (CUSE) sends it.
pub const IOCTL_UNRESTRICTED: u32 = 1 << 1;
/// IOCTL: reads a file's flags (FS_*_FL of include/uapi/linux/fs.h), an integer of 32 bits. The number says `long`.
pub const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
/// IOCTL: sets them.
pub const FS_IOC_SETFLAGS: u32 = 0x4008_6602;
/// [`FS_IOC_GETFLAGS`] as a 32-bit kernel sends it.
pub const FS_IOC32_GETFLAGS: u32 = 0x8004_6601;
/// [`FS_IOC_SETFLAGS`] as a 32-bit kernel sends it.
pub const FS_IOC32_SETFLAGS: u32 = 0x4004_6602;
/// IOCTL: reads a file's [`Fsxattr`].
pub const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
/// IOCTL: sets it.
pub const FS_IOC_FSSETXATTR: u32 = 0x401c_5820;
/// Notification code, in place of a reply's error: forget cached pages of a node.
pub const NOTIFY_INVAL_INODE: i32 = 2;
/// Attribute flag: the directory is a mount point.
pub const ATTR_SUBMOUNT: u32 = 1 << 0;
/// Attribute flag: a guest that mounted with dax=inode uses the DAX window for the file.
pub const ATTR_DAX: u32 = 1 << 1;
/// SETUPMAPPING: the guest may write too.
pub const SETUPMAPPING_WRITE: u64 = 1 << 0;
/// SETUPMAPPING: for window passthrough (docs/protocol.md). Not Linux's.
pub const SETUPMAPPING_PASSTHROUGH: u64 = 1 << 62;
/// Extension types up to this number are counts of security contexts (FUSE_MAX_NR_SECCTX).
pub const MAX_NR_SECCTX: u32 = 31;
/// Extension type of supplementary groups (FUSE_EXT_GROUPS).
pub const EXT_GROUPS: u32 = 32;

wire! {
    struct InHeader {
        len: u32,
        opcode: u32,
        unique: u64,
        nodeid: u64,
        uid: u32,
        gid: u32,
        pid: u32,
        /// Length of the extensions that end the request, in units of 8 bytes.
        total_extlen: u16,
        padding: u16,
    }
    struct OutHeader {
        len: u32,
        /// 0 or a negative errno.
        error: i32,
        unique: u64,
    }
    struct Attr {
        ino: u64,
        size: u64,
        /// In units of 512 bytes.
        blocks: u64,
        atime: u64,
        mtime: u64,
        ctime: u64,
        atimensec: u32,
        mtimensec: u32,
        ctimensec: u32,
        mode: u32,
        nlink: u32,
        uid: u32,
        gid: u32,
        rdev: u32,
        blksize: u32,
        flags: u32,
    }
    struct EntryOut {
        nodeid: u64,
        generation: u64,
        entry_valid: u64,
        attr_valid: u64,
        entry_valid_nsec: u32,
        attr_valid_nsec: u32,
        attr: Attr,
    }
    struct AttrOut {
        attr_valid: u64,
        attr_valid_nsec: u32,
        dummy: u32,
        attr: Attr,
    }
    struct SxTime {
        tv_sec: i64,
        tv_nsec: u32,
        reserved: i32,
    }
    struct FuseStatx {
        mask: u32,
        blksize: u32,
        attributes: u64,
        nlink: u32,
        uid: u32,
        gid: u32,
        mode: u16,
        spare0: u16,
        ino: u64,
        size: u64,
        blocks: u64,
        attributes_mask: u64,
        atime: SxTime,
        btime: SxTime,
        ctime: SxTime,
        mtime: SxTime,
        rdev_major: u32,
        rdev_minor: u32,
        dev_major: u32,
        dev_minor: u32,
        spare2: [u64; 14],
    }
    struct StatxIn {
        getattr_flags: u32,
        reserved: u32,
        fh: u64,
        sx_flags: u32,
        sx_mask: u32,
    }
    struct StatxOut {
        attr_valid: u64,
        attr_valid_nsec: u32,
        flags: u32,
        spare: [u64; 2],
        stat: FuseStatx,
    }
    struct StatfsOut {
        blocks: u64,
        bfree: u64,
        bavail: u64,
        files: u64,
        ffree: u64,
        bsize: u32,
        namelen: u32,
        frsize: u32,
        padding: u32,
        spare: [u32; 6],
    }
    struct ForgetIn {
        nlookup: u64,
    }
    struct ForgetOne {
        nodeid: u64,
        nlookup: u64,
    }
    struct BatchForgetIn {
        count: u32,
        dummy: u32,
    }
    struct GetattrIn {
        getattr_flags: u32,
        dummy: u32,
        fh: u64,
    }
    struct SetattrIn {
        valid: u32,
        padding: u32,
        fh: u64,
        size: u64,
        lock_owner: u64,
        atime: u64,
        mtime: u64,
        ctime: u64,
        atimensec: u32,
        mtimensec: u32,
        ctimensec: u32,
        mode: u32,
        unused4: u32,
        uid: u32,
        gid: u32,
        unused5: u32,
    }
    struct MknodIn {
        mode: u32,
        rdev: u32,
        umask: u32,
        padding: u32,
    }
    struct MkdirIn {
        mode: u32,
        umask: u32,
    }
    struct RenameIn {
        newdir: u64,
    }
    struct Rename2In {
        newdir: u64,
        flags: u32,
        padding: u32,
    }
    struct LinkIn {
        oldnodeid: u64,
    }
    struct OpenIn {
        flags: u32,
        open_flags: u32,
    }
    struct CreateIn {
        flags: u32,
        mode: u32,
        umask: u32,
        open_flags: u32,
    }
    struct OpenOut {
        fh: u64,
        open_flags: u32,
        backing_id: i32,
    }

    /// The reply to CREATE and TMPFILE: struct fuse_entry_out and struct fuse_open_out.
    struct CreateOut {
        entry: EntryOut,
        open: OpenOut,
    }
    struct ReleaseIn {
        fh: u64,
        flags: u32,
        release_flags: u32,
        lock_owner: u64,
    }
    struct FlushIn {
        fh: u64,
        unused: u32,
        padding: u32,
        lock_owner: u64,
    }
    struct ReadIn {
        fh: u64,
        offset: u64,
        size: u32,
        read_flags: u32,
        lock_owner: u64,
        flags: u32,
        padding: u32,
    }
    struct WriteIn {
        fh: u64,
        offset: u64,
        size: u32,
        write_flags: u32,
        lock_owner: u64,
        /// The file's present flags in the guest.
        flags: u32,
        padding: u32,
    }
    struct WriteOut {
        size: u32,
        padding: u32,
    }
    struct FsyncIn {
        fh: u64,
        fsync_flags: u32,
        padding: u32,
    }
    struct SetxattrInCompat {
        size: u32,
        flags: u32,
    }
    struct SetxattrIn {
        size: u32,
        flags: u32,
        setxattr_flags: u32,
        padding: u32,
    }
    struct GetxattrIn {
        size: u32,
        padding: u32,
    }
    struct GetxattrOut {
        size: u32,
        padding: u32,
    }
    struct FileLock {
        start: u64,
        /// Inclusive.
        end: u64,
        kind: u32,
        pid: u32,
    }
    struct LkIn {
        fh: u64,
        owner: u64,
        lk: FileLock,
        lk_flags: u32,
        padding: u32,
    }
    struct LkOut {
        lk: FileLock,
    }
    struct AccessIn {
        mask: u32,
        padding: u32,
    }
    /// Sent by 7.27 to 7.35, which have no `flags2`.
    struct InitInCompat {
        major: u32,
        minor: u32,
        max_readahead: u32,
        flags: u32,
    }
    struct InitIn {
        major: u32,
        minor: u32,
        max_readahead: u32,
        flags: u32,
        flags2: u32,
        unused: [u32; 11],
    }
    struct InitOut {
        major: u32,
        minor: u32,
        max_readahead: u32,
        flags: u32,
        max_background: u16,
        congestion_threshold: u16,
        max_write: u32,
        /// In nanoseconds.
        time_gran: u32,
        max_pages: u16,
        map_alignment: u16,
        flags2: u32,
        max_stack_depth: u32,
        request_timeout: u16,
        unused: [u16; 11],
    }
    struct InterruptIn {
        unique: u64,
    }
    struct NotifyInvalInodeOut {
        ino: u64,
        off: i64,
        /// 0: to the end.
        len: i64,
    }
    struct FallocateIn {
        fh: u64,
        offset: u64,
        length: u64,
        mode: u32,
        padding: u32,
    }
    struct IoctlIn {
        fh: u64,
        /// FUSE_IOCTL_*.
        flags: u32,
        cmd: u32,
        /// The address that the program gave. It means nothing here.
        arg: u64,
        in_size: u32,
        out_size: u32,
    }
    struct IoctlOut {
        result: i32,
        flags: u32,
        in_iovs: u32,
        out_iovs: u32,
    }
    /// struct fsxattr of include/uapi/linux/fs.h.
    struct Fsxattr {
        /// FS_XFLAG_*.
        xflags: u32,
        /// Bytes.
        extsize: u32,
        nextents: u32,
        projid: u32,
        /// Bytes.
        cowextsize: u32,
        pad: [u8; 8],
    }
    struct LseekIn {
        fh: u64,
        offset: u64,
        whence: u32,
        padding: u32,
    }
    struct LseekOut {
        offset: u64,
    }
    struct CopyFileRangeIn {
        fh_in: u64,
        off_in: u64,
        nodeid_out: u64,
        fh_out: u64,
        off_out: u64,
        len: u64,
        flags: u64,
    }
    struct CopyFileRangeOut {
        bytes_copied: u64,
    }
    struct SetupmappingIn {
        /// Linux sends -1: the nodeid names the file.
        fh: u64,
        /// Bytes, in the file.
        foffset: u64,
        len: u64,
        flags: u64,
        /// Bytes, in the window.
        moffset: u64,
    }
    struct RemovemappingIn {
        count: u32,
    }
    struct RemovemappingOne {
        moffset: u64,
        len: u64,
    }
    struct Dirent {
        ino: u64,
        /// The position after this entry.
        off: u64,
        namelen: u32,
        kind: u32,
    }
    struct SecctxHeader {
        size: u32,
        nr_secctx: u32,
    }
    struct Secctx {
        size: u32,
        padding: u32,
    }
    struct ExtHeader {
        size: u32,
        kind: u32,
    }
}

const _: () = {
    assert!(size_of::<InHeader>() == 40);
    assert!(size_of::<Attr>() == 88);
    assert!(size_of::<EntryOut>() == 128);
    assert!(size_of::<FuseStatx>() == 256);
    assert!(size_of::<StatxOut>() == 288);
    assert!(size_of::<SetattrIn>() == 88);
    assert!(size_of::<InitIn>() == 64);
    assert!(size_of::<InitOut>() == 64);
    assert!(size_of::<LkIn>() == 48);
    assert!(size_of::<StatfsOut>() == 80);
    assert!(size_of::<IoctlIn>() == 32);
    assert!(size_of::<IoctlOut>() == 16);
    assert!(size_of::<Fsxattr>() == 28);
};
