//! The messages between the agent and the daemon: arguments of ioctl(2) on a share's root directory. Integers are
//! little-endian.

/// The version of everything here.
pub const VERSION: u32 = 1;

/// Bytes of each call's argument, both ways. A page: it takes few descriptors of a queue without indirect ones, and
/// holds some 60 changes.
pub const MESSAGE: usize = 4096;

/// _IOWR(0x9f, number, MESSAGE) of include/uapi/asm-generic/ioctl.h. No driver of Linux 7.2 has this type.
const fn call(number: u32) -> u32 {
    3 << 30 | (MESSAGE as u32) << 16 | 0x9f << 8 | number
}

/// Begins a registration: takes [`VERSION`] (u32), gives a [`Hello`].
///
/// # Errors
/// EPROTO for another version, EOPNOTSUPP if the daemon does not watch the share, EUSERS if too many threads are
/// registered.
pub const HELLO: u32 = call(1);

/// Acknowledges a batch and waits for the next: takes a [`Done`], gives a batch (see [`Batch`]).
///
/// # Errors
/// ENOTCONN if the thread is not registered, EBUSY if it waits already.
pub const WAIT: u32 = call(2);

/// Tells what the agent has found at a change's place: takes a [`Found`].
///
/// # Errors
/// ENOTCONN if the thread is not registered, EINVAL if it has no such change.
pub const FOUND: u32 = call(3);

/// Lets the calls of [`WAIT`] end that wait: takes and gives nothing.
pub const STOP: u32 = call(4);

/// Asks where a directory is: takes a nodeid (u64), gives its path on the host below the share's root, without a slash
/// at its beginning, and a NUL.
///
/// # Errors
/// ENOENT if that is not known, ENAMETOOLONG if it does not fit.
pub const PATH: u32 = call(5);

/// Says which changes of the batch nobody watches: takes a bitmap, bit n of byte m for change 8 m + n. Requests for
/// their names are answered as anybody's from then on, so that the agent can have the kernel look at them.
///
/// # Errors
/// ENOTCONN if the thread is not registered.
pub const QUIET: u32 = call(6);

/// Longest that [`WAIT`] waits, in milliseconds. A process that waits in it cannot be ended or frozen by the guest's
/// kernel, and a suspend gives up after 20 s (FREEZE_TIMEOUT, kernel/power/process.c). Shorter would wake an idle guest
/// more often: it is six times a minute.
pub const WAIT_MS: u32 = 10_000;

/// Bytes of a [`Hello`]'s token.
pub const TOKEN: usize = 40;

/// Nodeids from here on are phantoms: they stand for files that the guest does not know, or that are gone. Files have
/// lower ones.
pub const PHANTOMS: u64 = 1 << 62;

/// The name of the file that an agent makes to register, in the directory that its token names.
pub const MARKER: &str = "agent";

/// Stands between the token and the change's place in its batch, in the name by which a directory is put aside.
pub const ASIDE: char = '.';

/// A name, a node, or both have changed. These bits say how, and the agent repeats them in this order.
pub mod ops {
    /// The name was made.
    pub const CREATE: u16 = 1;
    /// The name was moved to the new place.
    pub const RENAME: u16 = 2;
    /// The two names were exchanged.
    pub const EXCHANGE: u16 = 4;
    /// The contents have changed.
    pub const CONTENTS: u16 = 8;
    /// A descriptor was closed that could write.
    pub const CLOSED: u16 = 16;
    /// The attributes have changed.
    pub const ATTRIBUTES: u16 = 32;
    /// The name was removed.
    pub const REMOVE: u16 = 64;
    /// The guest is to look at the node again: changes of it were lost.
    pub const REFRESH: u16 = 128;
    /// The name is, or was, a directory's.
    pub const DIRECTORY: u16 = 256;
}

/// The answer to [`HELLO`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// See [`VERSION`].
    pub version: u32,
    /// The name of a directory below the root that only this thread sees.
    pub token: String,
}

impl Hello {
    /// As bytes of a message.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.version.to_le_bytes().to_vec();
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(self.token.bytes().chain(std::iter::repeat(0)).take(TOKEN));
        bytes
    }

    /// From a message. `None` if it is none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let version = reader.u32()?;
        reader.u32()?;
        let token = reader.bytes(TOKEN)?.split(|byte| *byte == 0).next()?;
        let token = String::from_utf8(token.to_vec()).ok().filter(|token| !token.is_empty() && !token.contains('/'))?;
        Some(Self { version, token })
    }
}

/// What a thread says with [`WAIT`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// The batch that it has carried out. 0: none.
    pub batch: u64,
    /// Changes of it that could not be repeated.
    pub failed: u32,
    /// The errno of the last of them.
    pub errno: u32,
}

impl Done {
    /// As bytes of a message.
    pub fn encode(&self) -> Vec<u8> {
        [&self.batch.to_le_bytes()[..], &self.failed.to_le_bytes(), &self.errno.to_le_bytes()].concat()
    }

    /// From a message. `None` if it is none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        Some(Self { batch: reader.u64()?, failed: reader.u32()?, errno: reader.u32()? })
    }
}

/// What a thread says with [`FOUND`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The change's place in its batch.
    pub index: u32,
    /// The node at the new place of a rename, which it replaces. 0: the change cannot be repeated, so the guest is to
    /// be told how things are.
    pub node: u64,
}

impl Found {
    /// As bytes of a message.
    pub fn encode(&self) -> Vec<u8> {
        [&self.index.to_le_bytes()[..], &0u32.to_le_bytes(), &self.node.to_le_bytes()].concat()
    }

    /// From a message. `None` if it is none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let index = reader.u32()?;
        reader.u32()?;
        Some(Self { index, node: reader.u64()? })
    }
}

/// A name in a directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Place {
    /// The directory's nodeid. 0: one that the guest does not know.
    pub dir: u64,
    /// Not empty, unless the change is of a node alone. No NUL and no slash.
    pub name: Vec<u8>,
}

impl Place {
    /// Whether there is no name.
    pub fn is_none(&self) -> bool {
        self.name.is_empty()
    }
}

/// A change that the agent repeats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// See [`ops`].
    pub ops: u16,
    /// The node that changed. 0 if the guest does not know it.
    pub node: u64,
    /// The name, or the old one of a rename.
    pub place: Place,
    /// The new name of a rename or exchange.
    pub to: Place,
}

/// Bytes of a change without its names.
const CHANGE: usize = 32;

impl Change {
    /// Whether it moves a directory. (Of an exchange that is not known.)
    pub fn moves_directory(&self) -> bool {
        self.has(ops::EXCHANGE) || self.has(ops::RENAME) && self.has(ops::DIRECTORY)
    }

    /// Whether it is of this node, as far as that is known.
    pub fn is_of(&self, node: u64) -> bool {
        self.node == 0 || self.node == node || node >= PHANTOMS
    }

    /// Whether it has one of these [`ops`].
    pub fn has(&self, ops: u16) -> bool {
        self.ops & ops != 0
    }

    /// Its bytes in a batch.
    pub fn encoded_len(&self) -> usize {
        (CHANGE + self.place.name.len() + self.to.name.len()).next_multiple_of(8)
    }

    fn encode(&self, to: &mut Vec<u8>) {
        let end = to.len() + self.encoded_len();
        to.extend((self.encoded_len() as u16).to_le_bytes());
        to.extend(self.ops.to_le_bytes());
        to.extend((self.place.name.len() as u16).to_le_bytes());
        to.extend((self.to.name.len() as u16).to_le_bytes());
        for number in [self.node, self.place.dir, self.to.dir] {
            to.extend(number.to_le_bytes());
        }
        to.extend(&self.place.name);
        to.extend(&self.to.name);
        to.resize(end, 0);
    }

    fn decode(reader: &mut Reader) -> Option<Self> {
        let len = usize::from(reader.u16()?);
        let mut reader = Reader(reader.bytes(len.checked_sub(2)?)?);
        let (ops, old_len, new_len) = (reader.u16()?, reader.u16()?, reader.u16()?);
        let (node, dir, newdir) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let mut name = |len: u16| {
            let name = reader.bytes(len.into())?;
            let plain = !name.iter().any(|byte| matches!(byte, 0 | b'/')) && name != b"." && name != b"..";
            plain.then(|| name.to_vec())
        };
        let (old, new) = (name(old_len)?, name(new_len)?);
        Some(Self { ops, node, place: Place { dir, name: old }, to: Place { dir: newdir, name: new } })
    }
}

/// The answer to [`WAIT`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Its number. 0: nothing has happened.
    pub id: u64,
    /// The host has moved directories, and not all of that is repeated. The agent must not look for directories by
    /// path: the guest's kernel would learn where they are, and the moves could not be repeated.
    pub moves: bool,
    /// In the order in which they are to be repeated. No two are of one name or of one node.
    pub changes: Vec<Change>,
}

impl Batch {
    /// Bytes of a batch without its changes.
    pub const HEADER: usize = 16;

    /// As bytes of a message.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.id.to_le_bytes().to_vec();
        bytes.extend((self.changes.len() as u32).to_le_bytes());
        bytes.extend(u32::from(self.moves).to_le_bytes());
        self.changes.iter().for_each(|change| change.encode(&mut bytes));
        bytes
    }

    /// From a message. `None` if it is none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let (id, count, moves) = (reader.u64()?, reader.u32()?, reader.u32()? & 1 != 0);
        let changes = (0..count).map(|_| Change::decode(&mut reader)).collect::<Option<_>>()?;
        Some(Self { id, moves, changes })
    }
}

/// Reads integers and bytes, and checks that they are there.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch() -> Batch {
        let place = |dir, name: &[u8]| Place { dir, name: name.to_vec() };
        let rename = Change { ops: ops::RENAME, node: 7, place: place(1, b"old"), to: place(0, b"new name") };
        let create = Change { ops: ops::CREATE | ops::CONTENTS, place: place(9, b"file"), ..Change::default() };
        Batch {
            id: 3,
            moves: true,
            changes: vec![rename, create, Change { ops: ops::REFRESH, node: 5, ..Change::default() }],
        }
    }

    #[test]
    fn messages_come_back_as_they_were() {
        let hello = Hello { version: 1, token: ".thruway-0123456789abcdef".into() };
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        let done = Done { batch: 5, failed: 2, errno: 16 };
        assert_eq!(Done::decode(&done.encode()), Some(done));
        let found = Found { index: 1, node: 77 };
        assert_eq!(Found::decode(&found.encode()), Some(found));
        let bytes = batch().encode();
        assert_eq!(Batch::decode(&bytes), Some(batch()));
        let lens = batch().changes.iter().map(Change::encoded_len).sum::<usize>();
        assert_eq!(bytes.len(), Batch::HEADER + lens);
    }

    #[test]
    fn damaged_messages_are_none() {
        let whole = batch().encode();
        for len in 0..whole.len() {
            assert_eq!(Batch::decode(&whole[..len]), None, "{len}");
        }
        assert_eq!(Hello::decode(&[0; 8 + TOKEN]), None);
        for bad in [&b"a/b"[..], b"..", b"a\0"] {
            let place = Place { dir: 1, name: bad.to_vec() };
            let bytes = Batch { id: 1, moves: false, changes: vec![Change { place, ..Change::default() }] }.encode();
            assert_eq!(Batch::decode(&bytes), None, "{bad:?}");
        }
    }

    #[test]
    fn the_numbers_are_those_of_the_document() {
        let numbers = [0xd000_9f01, 0xd000_9f02, 0xd000_9f03, 0xd000_9f04, 0xd000_9f05];
        assert_eq!([HELLO, WAIT, FOUND, STOP, PATH], numbers);
    }
}
