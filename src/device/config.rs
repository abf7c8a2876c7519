//! A virtio-fs device's queues and its configuration space (VIRTIO 1.3, sections 5.11.2 and 5.11.4).

/// Most request queues. vhost-user-backend names the queues of a thread by a mask of 64 bits. One bit is the high
/// priority queue's.
pub const MAX_REQUEST_QUEUES: u16 = 63;

/// What a queue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    HighPriority,
    /// The request queue of this number.
    Request(usize),
}

impl Role {
    /// What queue number `index` is for.
    pub fn of(index: usize) -> Self {
        index.checked_sub(1).map_or(Self::HighPriority, Self::Request)
    }

    /// The name of its worker.
    pub fn thread_name(self) -> String {
        match self {
            Self::HighPriority => "thruway-hiprio".to_owned(),
            Self::Request(number) => format!("thruway-q{number}"),
        }
    }
}

/// Length of the tag field in bytes. A tag that fills it has no terminating zero.
pub const TAG_LEN: usize = 36;

/// `tag[36]` and le32 `num_request_queues`. What follows is for devices with a notification queue, which this has not.
const SPACE_LEN: usize = TAG_LEN + 4;

/// A device's configuration space, which is read-only.
pub struct ConfigSpace([u8; SPACE_LEN]);

impl ConfigSpace {
    /// Cuts a tag that is longer than [`TAG_LEN`] bytes. Without a tag the field stays zero: the frontend has its own.
    pub fn new(tag: Option<&str>, request_queues: u16) -> Self {
        let mut space = [0; SPACE_LEN];
        let tag = tag.unwrap_or_default().as_bytes();
        let len = tag.len().min(TAG_LEN);
        space[..len].copy_from_slice(&tag[..len]);
        space[TAG_LEN..].copy_from_slice(&u32::from(request_queues).to_le_bytes());
        Self(space)
    }

    /// Reads `size` bytes from `offset` on; bytes past the end are zero. A frontend may ask for fields of features that
    /// were not negotiated, and vhost-user takes a shorter answer for an error. The caller bounds `size` (crate vhost:
    /// VHOST_USER_CONFIG_SIZE, 4 KiB).
    pub fn read(&self, offset: u32, size: u32) -> Vec<u8> {
        let from = self.0.get(offset as usize..).unwrap_or_default();
        from.iter().copied().chain(std::iter::repeat(0)).take(size as usize).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_have_their_order() {
        let [first, second] = [0, 1].map(Role::Request);
        assert_eq!([0, 1, 2].map(Role::of), [Role::HighPriority, first, second]);
    }

    #[test]
    fn reads_anywhere() {
        let space = ConfigSpace::new(Some("share"), 0x102);
        assert_eq!(space.read(0, 6), b"share\0");
        assert_eq!(space.read(36, 4), [2, 1, 0, 0]);
        assert_eq!(space.read(37, 8), [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(space.read(37, 1), [1]);
        assert_eq!(space.read(u32::MAX, 2), [0, 0]);
        assert_eq!(space.read(0, 256).len(), 256);
        assert!(space.read(0, 0).is_empty());
    }

    #[test]
    fn long_tags_are_cut() {
        let space = ConfigSpace::new(Some(&"x".repeat(99)), 1);
        assert_eq!(space.read(35, 2), [b'x', 1]);
    }
}
