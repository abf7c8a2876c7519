//! A session's state as bytes, for a migration: these types in postcard's encoding. docs/protocol.md describes the
//! stream.
//!
//! The sender may be hostile. In what [`State::decode`] returns, paths and names stay in the share, file types exist,
//! and handles have a length that the kernel takes. A count makes the decoder reserve at most 1 MiB before it has read
//! the items. Integers have a fixed width in the types that a stream repeats: an item in memory takes at most some five
//! times its bytes.

use std::fmt::{self, Display};

use postcard::fixint;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::fs::path::{MAX_NAME, is_name, is_path};
use crate::fs::sys::{MAX_HANDLE, RawHandle};
use crate::limits::{RESTORED_MOUNTS, TABLE_ENTRIES, WINDOW_MAPPINGS};
use crate::window::Moved;

/// Why bytes cannot be decoded.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damaged {
    #[error("the state is damaged: {0}")]
    Encoding(#[from] postcard::Error),
    #[error("the state is damaged: {0}")]
    Contents(&'static str),
}

type Result<T> = std::result::Result<T, Damaged>;

/// Types of files: S_IFMT bits.
const FORMATS: [u32; 7] =
    [libc::S_IFREG, libc::S_IFDIR, libc::S_IFLNK, libc::S_IFCHR, libc::S_IFBLK, libc::S_IFIFO, libc::S_IFSOCK];

/// A session.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The nodeid that comes next.
    pub next_id: u64,
    pub mounts: Vec<MountState>,
    /// An inode comes after the directory that it is an [entry](Location::Entry) of.
    pub inodes: Vec<InodeState>,
    pub handles: Vec<HandleState>,
    /// If the guest has a window.
    pub window: Option<WindowState>,
}

/// The windows, which the target must have too.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowState {
    /// Bytes of the regions, by their number. 0: there is none.
    pub sizes: [u64; 3],
    /// The table of window passthrough.
    pub table: Option<Moved>,
    /// What is mapped in the DAX window.
    pub ranges: Vec<RangeState>,
    /// What the guest was told of files that it may map there.
    pub files: Vec<FileState>,
}

/// A range of the DAX window.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RangeState {
    /// Which one it is.
    #[serde(with = "fixint::le")]
    pub range: u32,
    #[serde(with = "fixint::le")]
    pub node: u64,
    /// Where it is in the file, in bytes.
    #[serde(with = "fixint::le")]
    pub from: u64,
    /// The guest may store there.
    pub stored: bool,
}

/// What the guest was told of a file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    #[serde(with = "fixint::le")]
    pub node: u64,
    /// Bytes of the file. The guest may touch as many.
    #[serde(with = "fixint::le")]
    pub size: u64,
    /// The guest is to map it.
    pub granted: bool,
}

/// A mount on which file handles are opened.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountState {
    /// statfs(2)'s f_type.
    #[serde(with = "fixint::le")]
    pub kind: u64,
    /// Path of the mount's root, relative to the share's. Empty: the share's own mount.
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    pub root: RawHandle,
}

/// An inode.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InodeState {
    #[serde(with = "fixint::le")]
    pub id: u64,
    #[serde(with = "fixint::le")]
    pub nlookup: u64,
    /// S_IFMT bits.
    #[serde(with = "fixint::le")]
    pub format: u32,
    pub location: Location,
    /// The file handle that the target must find there (`--migration-verify-handles`).
    pub verify: Option<RawHandle>,
}

/// Where an inode's file is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Location {
    /// The shared directory.
    Root,
    /// Relative to the share's root.
    Path(#[serde(with = "serde_bytes")] Vec<u8>),
    /// An entry of a directory. The target opens it when it is first needed.
    Entry {
        parent: u64,
        #[serde(with = "serde_bytes")]
        name: Vec<u8>,
    },
    /// A file on a mount, which is given by its index.
    Handle(u32, RawHandle),
    /// The source could not locate it.
    Lost(#[serde(with = "errno")] Errno),
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
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandleState {
    #[serde(with = "fixint::le")]
    pub fh: u64,
    #[serde(with = "fixint::le")]
    pub node: u64,
    pub directory: bool,
    /// Flags as fcntl(2) returns them for F_GETFL.
    #[serde(with = "fixint::le")]
    pub flags: u32,
}

/// An errno as u16.
mod errno {
    use serde::de::{Deserialize, Deserializer, Error, Unexpected};
    use serde::{Serialize, Serializer};

    use super::Errno;

    /// MAX_ERRNO of include/linux/err.h.
    const MAX: u16 = 4095;

    pub fn serialize<S: Serializer>(errno: &Errno, to: S) -> Result<S::Ok, S::Error> {
        (errno.raw_os_error() as u16).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Errno, D::Error> {
        match u16::deserialize(from)? {
            errno @ 1..=MAX => Ok(Errno::from_raw_os_error(errno.into())),
            other => Err(D::Error::invalid_value(Unexpected::Unsigned(other.into()), &"an errno")),
        }
    }
}

impl State {
    pub fn encode(&self) -> Result<Vec<u8>> {
        Ok(postcard::to_stdvec(self)?)
    }

    /// # Errors
    /// [`Damaged`]
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let (state, rest) = postcard::take_from_bytes::<Self>(bytes)?;
        match state.fault().or((!rest.is_empty()).then_some("it does not end where it should")) {
            Some(fault) => Err(Damaged::Contents(fault)),
            None => Ok(state),
        }
    }

    /// What is wrong with the contents.
    fn fault(&self) -> Option<&'static str> {
        if self.mounts.len() > RESTORED_MOUNTS {
            return Some("too many mounts");
        }
        let inodes = self.inodes.iter().find_map(InodeState::fault);
        let mounts = || self.mounts.iter().find_map(MountState::fault);
        inodes.or_else(mounts).or_else(|| self.window.as_ref().and_then(WindowState::fault))
    }
}

impl WindowState {
    fn fault(&self) -> Option<&'static str> {
        let entries = self.table.as_ref().map_or(0, |table| table.entries.len());
        let fits = entries < TABLE_ENTRIES as usize && self.ranges.len() <= WINDOW_MAPPINGS;
        (!fits).then_some("more mappings than any daemon makes")
    }
}

impl MountState {
    fn fault(&self) -> Option<&'static str> {
        match self.path.is_empty() || is_path(&self.path) {
            true => handle_fault(&self.root),
            false => Some("a mount outside of the share"),
        }
    }
}

impl InodeState {
    fn fault(&self) -> Option<&'static str> {
        if !FORMATS.contains(&self.format) {
            return Some("an unknown type of file");
        }
        let location = match &self.location {
            Location::Path(path) => (!is_path(path)).then_some("a path that could leave the share"),
            Location::Entry { name, .. } => {
                let good = is_name(name) && name.len() <= MAX_NAME;
                (!good).then_some("a name that could leave its directory")
            }
            Location::Handle(_, handle) => handle_fault(handle),
            Location::Root | Location::Lost(_) => None,
        };
        location.or_else(|| self.verify.as_ref().and_then(handle_fault))
    }
}

fn handle_fault(handle: &RawHandle) -> Option<&'static str> {
    (handle.data.len() > MAX_HANDLE).then_some("a file handle that is too long")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::MovedEntry;

    fn raw(n: u8) -> RawHandle {
        RawHandle { kind: n.into(), data: vec![n; 12].into() }
    }

    fn window() -> WindowState {
        let entry = MovedEntry { index: 1, node: 2, change: 3, generation: 4, lost: 5, seq: 6, ack: 4 };
        WindowState {
            sizes: [1 << 21; 3],
            table: Some(Moved { revocations: 7, entries: vec![entry] }),
            ranges: vec![RangeState { range: 3, node: 2, from: 1 << 21, stored: true }],
            files: vec![FileState { node: 2, size: 5, granted: true }],
        }
    }

    fn state() -> State {
        let inode = |id, location, verify| InodeState { id, nlookup: 3, format: libc::S_IFREG, location, verify };
        State {
            next_id: 9,
            mounts: vec![MountState { kind: 0xef53, path: b"a/mnt".into(), root: raw(1) }],
            inodes: vec![
                inode(1, Location::Root, Some(raw(2))),
                inode(2, Location::Path(b"a/b \xff".into()), None),
                inode(3, Location::Handle(0, raw(3)), None),
                inode(4, Location::Lost(Errno::NOENT), None),
                inode(5, Location::Entry { parent: 1, name: b"c".into() }, Some(raw(4))),
            ],
            handles: vec![HandleState { fh: 1 << 32, node: 2, directory: false, flags: 0o2 }],
            window: Some(window()),
        }
    }

    #[test]
    fn a_state_survives() {
        assert_eq!(State::decode(&state().encode().unwrap()), Ok(state()));
    }

    #[test]
    fn every_cut_and_every_extra_byte_is_seen() {
        let mut bytes = state().encode().unwrap();
        for len in 0..bytes.len() {
            assert!(State::decode(&bytes[..len]).is_err(), "{len}");
        }
        bytes.push(0);
        assert!(State::decode(&bytes).is_err());
    }

    #[test]
    fn garbage_gets_an_error_and_never_a_panic() {
        let whole = state().encode().unwrap();
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
    fn a_count_reserves_little_memory() {
        // Each list claims as many items as a u64 can say.
        let count = [[0xff; 9].as_slice(), &[1]].concat();
        for before in [&[9][..], &[9, 0], &[9, 0, 0]] {
            let bytes = [before, &count].concat();
            assert_eq!(State::decode(&bytes), Err(Damaged::Encoding(postcard::Error::DeserializeUnexpectedEnd)));
        }
        let name = [&[9, 0, 1][..], &[1; 20], &[1], &count].concat();
        assert_eq!(State::decode(&name), Err(Damaged::Encoding(postcard::Error::DeserializeUnexpectedEnd)));
    }

    #[test]
    fn mappings_are_bounded() {
        let decoded = |change: &dyn Fn(&mut WindowState)| {
            let mut state = state();
            state.window.iter_mut().for_each(change);
            State::decode(&state.encode().unwrap()).is_ok()
        };
        let range = |_| RangeState { range: 0, node: 2, from: 0, stored: false };
        let entry = |_| MovedEntry { index: 1, node: 2, change: 0, generation: 0, lost: 0, seq: 0, ack: 0 };
        let table = |entries: u32| Moved { revocations: 0, entries: (0..entries).map(entry).collect() };
        assert!(decoded(&|window| window.ranges = (0..WINDOW_MAPPINGS).map(range).collect()));
        assert!(!decoded(&|window| window.ranges = (0..=WINDOW_MAPPINGS).map(range).collect()));
        assert!(decoded(&|window| window.table = Some(table(TABLE_ENTRIES - 1))));
        assert!(!decoded(&|window| window.table = Some(table(TABLE_ENTRIES))));
    }

    #[test]
    fn no_path_leaves_the_share() {
        for bad in ["", "/etc", "..", "a/..", "a/../b", "a//b", ".", "a/", "a/./b", "a\0b", &"x/".repeat(3000)] {
            let mut state = state();
            state.inodes[1].location = Location::Path(bad.into());
            assert!(State::decode(&state.encode().unwrap()).is_err(), "{bad}");
        }
        for bad in ["", ".", "..", "a/b", "a\0", &"x".repeat(256)] {
            let mut state = state();
            state.inodes[4].location = Location::Entry { parent: 1, name: bad.into() };
            assert!(State::decode(&state.encode().unwrap()).is_err(), "{bad}");
        }
    }
}
