//! Events as fanotify(7) writes them.

use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::FileId;
use crate::fanotify::Metadata;

/// struct fanotify_event_info_fid, and the struct file_handle in it, without its bytes.
#[repr(C)]
#[derive(FromBytes, Immutable, KnownLayout)]
struct Info {
    kind: u8,
    pad: u8,
    len: u16,
    fsid: [u32; 2],
    handle_bytes: u32,
    handle_kind: i32,
}

/// A name in a directory. Without a directory the watch does not cover it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place<'a> {
    /// `None`: an event of the directory or file itself.
    pub dir: Option<FileId>,
    pub name: &'a [u8],
}

/// One event, which may stand for several changes of one file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event<'a> {
    /// FAN_* bits.
    pub mask: u64,
    pub pid: i32,
    /// The file or directory that changed.
    pub object: Option<FileId>,
    /// The name that changed, or the name of the file that changed. Of a rename: the old name.
    pub place: Place<'a>,
    /// Of a rename: the new name.
    pub to: Place<'a>,
}

impl<'a> Event<'a> {
    /// The next event, and the bytes behind it.
    pub fn read(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let (head, _) = Metadata::read_from_prefix(bytes).ok()?;
        let (event, rest) = bytes.split_at_checked(head.event_len as usize)?;
        let mut infos = event.get(usize::from(head.metadata_len)..)?;
        let mut event = Event { mask: head.mask, pid: head.pid, ..Self::default() };
        while let Some((info, after)) = read_info(infos) {
            event.add(info);
            infos = after;
        }
        Some((event, rest))
    }

    fn add(&mut self, (kind, file, name): Record<'a>) {
        let place = Place { dir: Some(file), name };
        match kind {
            libc::FAN_EVENT_INFO_TYPE_FID => self.object = Some(file),
            libc::FAN_EVENT_INFO_TYPE_OLD_DFID_NAME => self.place = place,
            libc::FAN_EVENT_INFO_TYPE_NEW_DFID_NAME => self.to = place,
            // A directory's own event names it so.
            libc::FAN_EVENT_INFO_TYPE_DFID_NAME if name == b"." => self.object = Some(file),
            libc::FAN_EVENT_INFO_TYPE_DFID_NAME => self.place = place,
            libc::FAN_EVENT_INFO_TYPE_DFID => self.object = self.object.or(Some(file)),
            _ => {}
        }
    }
}

/// A record's type, handle and name.
type Record<'a> = (u8, FileId, &'a [u8]);

/// The next record, and the bytes behind it.
fn read_info(bytes: &[u8]) -> Option<(Record<'_>, &[u8])> {
    let (info, _) = Info::read_from_prefix(bytes).ok()?;
    let (record, after) = bytes.split_at_checked(usize::from(info.len).max(size_of::<Info>()))?;
    let (handle, name) = record[size_of::<Info>()..].split_at_checked(info.handle_bytes as usize)?;
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    // A file whose handle is too long is not watched, so it is nobody.
    let file = FileId::new(info.handle_kind, handle).unwrap_or_default();
    Some(((info.kind, file, name), after))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(kind: u8, handle: &[u8], name: &str) -> Vec<u8> {
        let mut bytes = vec![kind, 0, 0, 0, 9, 9, 9, 9, 9, 9, 9, 9];
        bytes.extend((handle.len() as u32).to_ne_bytes());
        bytes.extend(1i32.to_ne_bytes());
        bytes.extend(handle);
        bytes.extend(name.as_bytes());
        bytes.resize((bytes.len() + 1).next_multiple_of(4), 0);
        let len = bytes.len() as u16;
        bytes[2..4].copy_from_slice(&len.to_ne_bytes());
        bytes
    }

    fn event(mask: u64, infos: &[Vec<u8>]) -> Vec<u8> {
        let infos = infos.concat();
        let mut bytes = (24 + infos.len() as u32).to_ne_bytes().to_vec();
        bytes.extend([3, 0, 24, 0]);
        bytes.extend(mask.to_ne_bytes());
        bytes.extend((-1i32).to_ne_bytes());
        bytes.extend(7i32.to_ne_bytes());
        bytes.extend(infos);
        bytes
    }

    #[test]
    fn a_rename_has_two_names() {
        let id = |bytes: &[u8]| FileId::new(1, bytes);
        let infos = [info(10, b"olddir..", "a"), info(12, b"newdir..", "bcd"), info(1, b"file", "")];
        let mut bytes = event(libc::FAN_RENAME, &infos);
        bytes.extend(event(libc::FAN_ATTRIB, &[info(2, b"olddir..", ".")]));
        let (first, rest) = Event::read(&bytes).unwrap();
        assert_eq!((first.pid, first.object), (7, id(b"file")));
        assert_eq!(first.place, Place { dir: id(b"olddir.."), name: b"a" });
        assert_eq!(first.to, Place { dir: id(b"newdir.."), name: b"bcd" });
        let (second, rest) = Event::read(rest).unwrap();
        assert_eq!((second.object, second.place), (id(b"olddir.."), Place::default()));
        assert!(rest.is_empty() && Event::read(rest).is_none());
    }

    #[test]
    fn damaged_events_end_the_list() {
        let whole = event(libc::FAN_CREATE, &[info(2, b"dir", "name"), info(1, b"file", "")]);
        for len in 0..whole.len() {
            assert!(Event::read(&whole[..len]).is_none(), "{len}");
        }
        let mut long = whole.clone();
        long[24 + 12] = 200;
        assert_eq!(Event::read(&long).unwrap().0.place, Place::default());
    }
}
