//! Replies, written in place: the body behind the room for the header, then the header.

use rustix::io::Errno;
use zerocopy::{Immutable, IntoBytes};

use super::abi::*;
use super::buf::{IoRange, IoVecs};
use super::ops::{DirSink, Reading, Result};
use super::{Outcome, header};

const HEADER: usize = size_of::<OutHeader>();

/// Largest directory listing or xattr that is put together, in bytes: the guest asks for at most its max_pages.
const MAX_COLLECTED: usize = super::MAX_WRITE as usize;

pub(super) struct Reply<'a> {
    to: &'a mut IoVecs,
    scratch: &'a mut Vec<u8>,
    len: usize,
}

impl<'a> Reply<'a> {
    pub fn new(to: &'a mut IoVecs, scratch: &'a mut Vec<u8>) -> Self {
        Self { to, scratch, len: HEADER }
    }

    /// Adds a structure.
    ///
    /// # Errors
    /// EOVERFLOW where the guest left too little room.
    pub fn put<T: IntoBytes + Immutable>(&mut self, body: &T) -> Result<()> {
        self.bytes(body.as_bytes())
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        if self.to.write_at(self.len, bytes) < bytes.len() {
            return Err(Errno::OVERFLOW);
        }
        self.len += bytes.len();
        Ok(())
    }

    /// Adds up to `size` bytes that `read` puts into guest memory by itself.
    pub fn fill(&mut self, size: usize, read: impl FnOnce(&IoRange) -> Result<Reading>) -> Result<Reading> {
        let range = self.to.range(self.len..self.len.saturating_add(size));
        let reading = read(&range)?;
        if let Reading::Done(n) = reading {
            self.len += n.min(range.len());
        }
        Ok(reading)
    }

    /// Adds what `f` writes to the scratch buffer.
    pub fn collect(&mut self, f: impl FnOnce(&mut Vec<u8>) -> Result<()>) -> Result<()> {
        self.scratch.clear();
        f(self.scratch)?;
        let scratch = std::mem::take(self.scratch);
        let result = self.bytes(&scratch);
        *self.scratch = scratch;
        result
    }

    /// GETXATTR and LISTXATTR: with a `size` of 0 the length alone, else the bytes.
    pub fn sized(&mut self, size: u32, f: impl FnOnce(usize, &mut Vec<u8>) -> Result<usize>) -> Result<()> {
        if size == 0 {
            let size = f(0, self.scratch)? as u32;
            return self.put(&GetxattrOut { size, padding: 0 });
        }
        self.collect(|to| f((size as usize).min(MAX_COLLECTED), to).map(drop))
    }

    /// READDIR and READDIRPLUS: entries up to `size` bytes. An error after the first entry ends the listing there.
    pub fn entries(
        &mut self,
        size: usize,
        plus: bool,
        read: impl FnOnce(&mut dyn DirSink) -> Result<()>,
    ) -> Result<()> {
        let room = size.min(MAX_COLLECTED).min(self.to.len().saturating_sub(HEADER));
        self.collect(|to| {
            let mut entries = Entries { to, room, plus };
            match read(&mut entries) {
                Err(errno) if entries.to.is_empty() => Err(errno),
                _ => Ok(()),
            }
        })
    }

    pub fn finish(self, unique: u64) -> Outcome {
        let header = OutHeader { len: self.len as u32, error: 0, unique };
        match self.to.write_at(0, header.as_bytes()) {
            HEADER => Outcome::Replied(self.len),
            _ => Outcome::Silent,
        }
    }

    pub fn fail(self, unique: u64, errno: Errno) -> Outcome {
        match self.to.write_at(0, header(unique, Some(errno)).as_bytes()) {
            HEADER => Outcome::Replied(HEADER),
            _ => Outcome::Silent,
        }
    }
}

struct Entries<'a> {
    to: &'a mut Vec<u8>,
    room: usize,
    plus: bool,
}

impl Entries<'_> {
    fn size(&self, namelen: usize) -> usize {
        let entry = if self.plus { size_of::<EntryOut>() } else { 0 };
        (entry + size_of::<Dirent>() + namelen).next_multiple_of(8)
    }
}

impl DirSink for Entries<'_> {
    fn fits(&self, namelen: usize) -> bool {
        self.to.len() + self.size(namelen) <= self.room
    }

    fn push(&mut self, dirent: Dirent, name: &[u8], entry: Option<&EntryOut>) {
        let end = self.to.len() + self.size(name.len());
        if let Some(entry) = entry {
            self.to.extend_from_slice(entry.as_bytes());
        }
        self.to.extend_from_slice(dirent.as_bytes());
        self.to.extend_from_slice(name);
        self.to.resize(end, 0);
    }
}
