//! Notifications: what the guest is told without having asked (FUSE_NOTIFY_*). They go to the guest by a [`Sink`].
//!
//! What a notification carries is in the guest's numbers: nodeids, and names in directories that have a nodeid.

use zerocopy::{Immutable, IntoBytes};

use super::abi::*;

/// Longest name in a notification, in bytes without the terminating zero. Linux refuses longer ones (FUSE_NAME_LOW_MAX
/// of fs/fuse/fuse_i.h), and the names of Linux file systems have at most 255.
pub const NAME_MAX: usize = 1024;

/// Bytes of the longest notification: a remote event with the longest name.
pub const LONGEST: usize = size_of::<OutHeader>() + size_of::<NotifyFsnotifyOut>() + NAME_MAX + 1;

/// Something that the guest must be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notification<'a> {
    /// Forget the attributes of a node, and its cached contents or listing with `contents`.
    InvalInode {
        /// Whose.
        nodeid: u64,
        /// Contents too.
        contents: bool,
    },
    /// Ask again for a name when it is used next, and forget the attributes of its directory. What is mounted below the
    /// name stays mounted (FUSE_EXPIRE_ONLY).
    InvalEntry {
        /// The directory.
        parent: u64,
        /// At most [`NAME_MAX`] bytes, none of them zero.
        name: &'a [u8],
    },
    /// A name is gone, and so is the last link of what it led to. Ends what is mounted below.
    Delete {
        /// The directory.
        parent: u64,
        /// What the name led to. The guest does nothing if it knows another node by the name.
        child: u64,
        /// At most [`NAME_MAX`] bytes, none of them zero.
        name: &'a [u8],
    },
    /// Trust nothing that is cached.
    IncEpoch,
    /// Slots of the passthrough window were revoked: look at the backing table (docs/protocol.md, "Revocation").
    Revoked,
    /// Somebody else changed a node that the guest watches.
    Event(FsEvent<'a>),
}

/// A change by somebody else, for those processes of the guest that watch files (inotify(7), fanotify(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FsEvent<'a> {
    /// The watched node: a directory, or the changed file itself. 0 if events were lost.
    pub nodeid: u64,
    /// The node that `name` names. 0 if the guest does not know it.
    pub child: u64,
    /// What happened: FS_* of include/linux/fsnotify_backend.h.
    pub mask: u32,
    /// Joins the two halves of a rename.
    pub cookie: u32,
    /// The name in the directory. Empty if the node itself changed. At most [`NAME_MAX`] bytes, none of them zero.
    pub name: &'a [u8],
}

/// fsnotify's mask of an event that stands for lost ones (FS_Q_OVERFLOW of include/linux/fsnotify_backend.h).
pub const FS_Q_OVERFLOW: u32 = 0x4000;

impl Notification<'_> {
    /// Whether it is about no node of the guest's, but stands for anything that may have happened.
    pub fn is_of_all(&self) -> bool {
        match self {
            Self::IncEpoch => true,
            Self::Event(event) => event.mask == FS_Q_OVERFLOW,
            _ => false,
        }
    }

    /// Whether the name, if there is one, fits into a notification.
    pub fn fits(&self) -> bool {
        match *self {
            Self::InvalEntry { name, .. } | Self::Delete { name, .. } => (1..=NAME_MAX).contains(&name.len()),
            Self::Event(event) => event.name.len() <= NAME_MAX,
            Self::InvalInode { .. } | Self::IncEpoch | Self::Revoked => true,
        }
    }

    /// Replaces the contents of `to` by the message to the guest.
    pub fn encode(&self, to: &mut Vec<u8>) {
        match *self {
            Self::InvalInode { nodeid, contents } => {
                // A negative offset stands for the attributes alone, and a length of 0 for all of the contents.
                let off = if contents { 0 } else { -1 };
                put(to, NOTIFY_INVAL_INODE, &NotifyInvalInodeOut { ino: nodeid, off, len: 0 }, None);
            }
            Self::InvalEntry { parent, name } => {
                let out = NotifyInvalEntryOut { parent, namelen: name.len() as u32, flags: EXPIRE_ONLY };
                put(to, NOTIFY_INVAL_ENTRY, &out, Some(name));
            }
            Self::Delete { parent, child, name } => {
                let out = NotifyDeleteOut { parent, child, namelen: name.len() as u32, padding: 0 };
                put(to, NOTIFY_DELETE, &out, Some(name));
            }
            Self::IncEpoch => put(to, NOTIFY_INC_EPOCH, &[0u8; 0], None),
            Self::Revoked => put(to, NOTIFY_SHM_REVOKED, &[0u8; 0], None),
            Self::Event(FsEvent { nodeid, child, mask, cookie, name }) => {
                let namelen = name.len() as u32;
                let out = NotifyFsnotifyOut { nodeid, child, mask, cookie, namelen, padding: 0 };
                put(to, NOTIFY_FSNOTIFY, &out, Some(name));
            }
        }
    }
}

fn put<T: IntoBytes + Immutable>(to: &mut Vec<u8>, code: i32, body: &T, name: Option<&[u8]>) {
    let len = size_of::<OutHeader>() + size_of::<T>() + name.map_or(0, |name| name.len() + 1);
    to.clear();
    to.extend(OutHeader { len: len as u32, error: code, unique: 0 }.as_bytes());
    to.extend(body.as_bytes());
    if let Some(name) = name {
        to.extend(name);
        to.push(0);
    }
}

/// Takes notifications to the guest. It never waits, and holds a bounded number of them: past that, one
/// [`Notification::IncEpoch`] takes the place of all invalidations. What is said twice before the guest hears of it is
/// said once. The guest hears of all that was invalidated before it hears of an event that came later.
///
/// The guest's own changes need no notification.
pub trait Sink: Send + Sync {
    /// Whether the guest takes notifications. If not, they are dropped.
    fn is_open(&self) -> bool;

    /// Tells the guest. A name that [does not fit](Notification::fits) counts as too many notifications.
    fn notify(&self, notification: Notification);

    /// The guest's session is over: drops what it has not heard yet.
    fn clear(&self);

    /// See [`Notification::InvalInode`].
    fn inval_inode(&self, nodeid: u64, contents: bool) {
        self.notify(Notification::InvalInode { nodeid, contents });
    }

    /// See [`Notification::InvalEntry`].
    fn inval_entry(&self, parent: u64, name: &[u8]) {
        self.notify(Notification::InvalEntry { parent, name });
    }

    /// See [`Notification::IncEpoch`].
    fn inc_epoch(&self) {
        self.notify(Notification::IncEpoch);
    }

    /// See [`Notification::Revoked`].
    fn revoked(&self) {
        self.notify(Notification::Revoked);
    }

    /// See [`Notification::Event`].
    fn event(&self, event: FsEvent) {
        self.notify(Notification::Event(event));
    }
}

/// The sink of a guest that takes no notifications.
pub struct Silent;

impl Sink for Silent {
    fn is_open(&self) -> bool {
        false
    }

    fn notify(&self, _notification: Notification) {}

    fn clear(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(notification: Notification) -> Vec<u8> {
        let mut to = vec![7; 3];
        notification.encode(&mut to);
        to
    }

    /// The message of this code: each number with its width in bytes, then a name with its zero.
    fn message(code: i32, numbers: &[(i64, usize)], name: &[u8]) -> Vec<u8> {
        let body: Vec<u8> = numbers.iter().flat_map(|(n, width)| n.to_le_bytes().into_iter().take(*width)).collect();
        let len = (16 + body.len() + name.len()) as u32;
        [&len.to_le_bytes()[..], &code.to_le_bytes(), &[0; 8], &body, name].concat()
    }

    #[test]
    fn messages_are_those_of_fuse_h() {
        let inode = |contents| encoded(Notification::InvalInode { nodeid: 5, contents });
        assert_eq!(inode(false), message(2, &[(5, 8), (-1, 8), (0, 8)], b""));
        assert_eq!(inode(true), message(2, &[(5, 8), (0, 8), (0, 8)], b""));
        let entry = encoded(Notification::InvalEntry { parent: 6, name: b"name" });
        assert_eq!(entry, message(3, &[(6, 8), (4, 4), (1, 4)], b"name\0"));
        let delete = encoded(Notification::Delete { parent: 6, child: 7, name: b"n" });
        assert_eq!(delete, message(6, &[(6, 8), (7, 8), (1, 4), (0, 4)], b"n\0"));
        assert_eq!(encoded(Notification::IncEpoch), message(8, &[], b""));
        assert_eq!(encoded(Notification::Revoked), message(1001, &[], b""));
        let event = FsEvent { nodeid: 8, child: 9, mask: 0x40, cookie: 3, name: b"to" };
        let numbers = [(8, 8), (9, 8), (0x40, 4), (3, 4), (2, 4), (0, 4)];
        assert_eq!(encoded(Notification::Event(event)), message(1000, &numbers, b"to\0"));
    }

    #[test]
    fn the_longest_message_has_the_longest_name() {
        let name = [b'n'; NAME_MAX + 1];
        let event = |name| Notification::Event(FsEvent { nodeid: 1, child: 0, mask: 1, cookie: 0, name });
        let entry = |name| Notification::InvalEntry { parent: 1, name };
        assert!(event(&name[1..]).fits() && entry(&name[1..]).fits() && event(&[]).fits());
        assert!(!event(&name).fits() && !entry(&name).fits() && !entry(&[]).fits());
        assert_eq!(encoded(event(&name[1..])).len(), LONGEST);
        assert!(encoded(entry(&name[1..])).len() < LONGEST);
    }
}
