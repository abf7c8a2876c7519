//! A session's state as bytes, for a migration. docs/protocol.md describes the format.
//!
//! Whoever sends it may be hostile: what [`State::decode`] gives has paths and names that stay in the share, file types
//! that exist, and handles of a length that the kernel takes. No count makes it reserve memory ahead of the bytes.

use std::fmt::{self, Display};

use rustix::io::Errno;

use crate::fs::path::{MAX_NAME, is_name, is_path};
use crate::fs::sys::{MAX_HANDLE, RawHandle};

/// What a reader is told of bytes that are no state.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the state is damaged: {0}")]
pub struct Damaged(pub &'static str);

type Result<T> = std::result::Result<T, Damaged>;

/// Most mounts. Each costs the target an open file; Linux allows 100,000 in a namespace (fs.mount-max).
const MAX_MOUNTS: u32 = 100_000;

/// The end, without which the bytes were cut.
const END: [u8; 4] = *b"end.";

/// A session.
#[derive(Debug, PartialEq, Eq)]
pub struct State {
    /// The nodeid that comes next.
    pub next_id: u64,
    pub mounts: Vec<MountState>,
    /// Those that are entries of others after these.
    pub inodes: Vec<InodeState>,
    pub handles: Vec<HandleState>,
}

/// A mount on which file handles are to be opened.
#[derive(Debug, PartialEq, Eq)]
pub struct MountState {
    /// Of its root, relative to the share's; empty: that of the share itself.
    pub path: Vec<u8>,
    /// statfs(2)'s f_type.
    pub kind: u64,
    pub root: RawHandle,
}

/// An inode.
#[derive(Debug, PartialEq, Eq)]
pub struct InodeState {
    pub id: u64,
    pub nlookup: u64,
    /// S_IFMT bits.
    pub format: u32,
    pub location: Location,
    /// What its file's handle must be (`--migration-verify-handles`).
    pub verify: Option<RawHandle>,
}

/// Where an inode's file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// The shared directory.
    Root,
    /// Relative to the share's root.
    Path(Vec<u8>),
    /// An entry of a directory, which is not to be opened before it is needed.
    Entry { parent: u64, name: Vec<u8> },
    /// On a mount, by its index.
    Handle(u32, RawHandle),
    /// The source does not know.
    Lost(Errno),
}

impl Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Root => write!(f, "the shared directory"),
            Self::Path(path) => write!(f, "'{}'", path.escape_ascii()),
            Self::Entry { parent, name } => {
                write!(f, "'{}' in the directory with nodeid {parent}", name.escape_ascii())
            }
            Self::Handle(..) => write!(f, "a file known by its handle"),
            Self::Lost(errno) => write!(f, "a file that the source could not locate ({errno})"),
        }
    }
}

/// An open file or directory.
#[derive(Debug, PartialEq, Eq)]
pub struct HandleState {
    pub fh: u64,
    pub node: u64,
    pub directory: bool,
    /// As fcntl(2) with F_GETFL gives them.
    pub flags: u32,
}

// Numbers of `Location`'s variants.
const ROOT: u8 = 0;
const PATH: u8 = 1;
const ENTRY: u8 = 2;
const HANDLE: u8 = 3;
const LOST: u8 = 4;

/// Largest errno (MAX_ERRNO, include/linux/err.h).
const MAX_ERRNO: u32 = 4095;

impl State {
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer(Vec::new());
        to.u64(self.next_id);
        to.u32(self.mounts.len() as u32);
        self.mounts.iter().for_each(|mount| to.mount(mount));
        to.u64(self.inodes.len() as u64);
        self.inodes.iter().for_each(|inode| to.inode(inode));
        to.u64(self.handles.len() as u64);
        self.handles.iter().for_each(|handle| to.handle(handle));
        to.0.extend(END);
        to.0
    }

    /// # Errors
    /// [`Damaged`]
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader(bytes);
        let next_id = from.u64()?;
        let mounts = from.u32()?;
        if mounts > MAX_MOUNTS {
            return Err(Damaged("too many mounts"));
        }
        let state = Self {
            next_id,
            mounts: from.list(mounts.into(), Reader::mount)?,
            inodes: from.counted(Reader::inode)?,
            handles: from.counted(Reader::handle)?,
        };
        if from.take(END.len())? != END || !from.0.is_empty() {
            return Err(Damaged("it does not end where it should"));
        }
        Ok(state)
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// Paths and names are shorter than PATH_MAX, handles than [`MAX_HANDLE`].
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend((bytes.len() as u16).to_le_bytes());
        self.0.extend(bytes);
    }

    fn raw(&mut self, raw: &RawHandle) {
        self.u32(raw.kind as u32);
        self.bytes(&raw.data);
    }

    fn mount(&mut self, mount: &MountState) {
        self.bytes(&mount.path);
        self.u64(mount.kind);
        self.raw(&mount.root);
    }

    fn inode(&mut self, inode: &InodeState) {
        self.u64(inode.id);
        self.u64(inode.nlookup);
        self.u32(inode.format);
        match &inode.location {
            Location::Root => self.u8(ROOT),
            Location::Path(path) => {
                self.u8(PATH);
                self.bytes(path);
            }
            Location::Entry { parent, name } => {
                self.u8(ENTRY);
                self.u64(*parent);
                self.bytes(name);
            }
            Location::Handle(mount, raw) => {
                self.u8(HANDLE);
                self.u32(*mount);
                self.raw(raw);
            }
            Location::Lost(errno) => {
                self.u8(LOST);
                self.u32(errno.raw_os_error() as u32);
            }
        }
        self.u8(inode.verify.is_some().into());
        inode.verify.iter().for_each(|raw| self.raw(raw));
    }

    fn handle(&mut self, handle: &HandleState) {
        self.u64(handle.fh);
        self.u64(handle.node);
        self.u8(handle.directory.into());
        self.u32(handle.flags);
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len).ok_or(Damaged("it is cut off"))?;
        self.0 = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| Damaged("it is cut off"))
    }

    fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn bool(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Damaged("neither yes nor no")),
        }
    }

    fn bytes(&mut self) -> Result<&'a [u8]> {
        let len = u16::from_le_bytes(self.array()?);
        self.take(len.into())
    }

    /// Each item takes at least a byte, so that no count makes more of them than there are bytes.
    fn list<T>(&mut self, count: u64, item: fn(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let mut items = Vec::new();
        for _ in 0..count {
            items.push(item(self)?);
        }
        Ok(items)
    }

    fn counted<T>(&mut self, item: fn(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let count = self.u64()?;
        self.list(count, item)
    }

    fn path(&mut self) -> Result<Vec<u8>> {
        let path = self.bytes()?;
        if is_path(path) { Ok(path.into()) } else { Err(Damaged("a path that could leave the share")) }
    }

    fn raw(&mut self) -> Result<RawHandle> {
        let kind = self.u32()? as i32;
        match self.bytes()? {
            data if data.len() <= MAX_HANDLE => Ok(RawHandle { kind, data: data.into() }),
            _ => Err(Damaged("a file handle that is too long")),
        }
    }

    fn mount(&mut self) -> Result<MountState> {
        let path = match self.bytes()? {
            path if path.is_empty() || is_path(path) => path.into(),
            _ => return Err(Damaged("a mount outside of the share")),
        };
        Ok(MountState { path, kind: self.u64()?, root: self.raw()? })
    }

    fn location(&mut self) -> Result<Location> {
        match self.u8()? {
            ROOT => Ok(Location::Root),
            PATH => Ok(Location::Path(self.path()?)),
            ENTRY => {
                let (parent, name) = (self.u64()?, self.bytes()?);
                if !is_name(name) || name.len() > MAX_NAME {
                    return Err(Damaged("a name that could leave its directory"));
                }
                Ok(Location::Entry { parent, name: name.into() })
            }
            HANDLE => Ok(Location::Handle(self.u32()?, self.raw()?)),
            LOST => match self.u32()? {
                errno @ 1..=MAX_ERRNO => Ok(Location::Lost(Errno::from_raw_os_error(errno as i32))),
                _ => Err(Damaged("an error that is none")),
            },
            _ => Err(Damaged("a location of an unknown kind")),
        }
    }

    fn inode(&mut self) -> Result<InodeState> {
        let (id, nlookup, format) = (self.u64()?, self.u64()?, self.u32()?);
        let formats =
            [libc::S_IFREG, libc::S_IFDIR, libc::S_IFLNK, libc::S_IFCHR, libc::S_IFBLK, libc::S_IFIFO, libc::S_IFSOCK];
        if !formats.contains(&format) {
            return Err(Damaged("an unknown type of file"));
        }
        let location = self.location()?;
        let verify = if self.bool()? { Some(self.raw()?) } else { None };
        Ok(InodeState { id, nlookup, format, location, verify })
    }

    fn handle(&mut self) -> Result<HandleState> {
        Ok(HandleState { fh: self.u64()?, node: self.u64()?, directory: self.bool()?, flags: self.u32()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(n: u8) -> RawHandle {
        RawHandle { kind: n.into(), data: vec![n; 12].into() }
    }

    fn state() -> State {
        let inode = |id, location, verify| InodeState { id, nlookup: 3, format: libc::S_IFREG, location, verify };
        State {
            next_id: 9,
            mounts: vec![MountState { path: b"a/mnt".into(), kind: 0xef53, root: raw(1) }],
            inodes: vec![
                inode(1, Location::Root, Some(raw(2))),
                inode(2, Location::Path(b"a/b \xff".into()), None),
                inode(3, Location::Handle(0, raw(3)), None),
                inode(4, Location::Lost(Errno::NOENT), None),
                inode(5, Location::Entry { parent: 1, name: b"c".into() }, Some(raw(4))),
            ],
            handles: vec![HandleState { fh: 1 << 32, node: 2, directory: false, flags: 0o2 }],
        }
    }

    #[test]
    fn a_state_survives() {
        assert_eq!(State::decode(&state().encode()), Ok(state()));
    }

    #[test]
    fn every_cut_and_every_extra_byte_is_seen() {
        let mut bytes = state().encode();
        for len in 0..bytes.len() {
            assert!(State::decode(&bytes[..len]).is_err(), "{len}");
        }
        bytes.push(0);
        assert!(State::decode(&bytes).is_err());
    }

    #[test]
    fn garbage_gets_an_error_and_never_a_panic() {
        let whole = state().encode();
        for at in 0..whole.len() {
            for value in 0..=255 {
                let mut bytes = whole.clone();
                bytes[at] = value;
                let _ = State::decode(&bytes);
            }
        }
        let mut seed: u64 = 7;
        for _ in 0..2000 {
            let bytes: Vec<u8> = (0..300)
                .map(|_| {
                    // Knuth's MMIX generator.
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (seed >> 56) as u8
                })
                .collect();
            assert!(State::decode(&bytes).is_err());
        }
    }

    #[test]
    fn no_path_leaves_the_share() {
        for bad in ["", "/etc", "..", "a/..", "a/../b", "a//b", ".", "a/", "a/./b", "a\0b", &"x/".repeat(3000)] {
            let mut state = state();
            state.inodes[1].location = Location::Path(bad.into());
            assert!(State::decode(&state.encode()).is_err(), "{bad}");
        }
        for bad in ["", ".", "..", "a/b", "a\0", &"x".repeat(256)] {
            let mut state = state();
            state.inodes[4].location = Location::Entry { parent: 1, name: bad.into() };
            assert!(State::decode(&state.encode()).is_err(), "{bad}");
        }
    }
}
