//! Decoding: a cursor over a request's arguments, which are first copied out of guest memory.

use std::ffi::CStr;

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use super::abi::*;
use super::buf::{IoRange, IoVecs};
use super::ops::{Caller, Creator, Result};
use crate::limits::ARGUMENT_BYTES;

/// The length of a WRITE's arguments, and where its data begins, in bytes.
const WRITE_ARGS: usize = size_of::<WriteIn>();
const WRITE_DATA: usize = size_of::<InHeader>() + WRITE_ARGS;

pub(super) struct Request<'a> {
    pub header: InHeader,
    args: &'a [u8],
    readable: &'a mut IoVecs,
    /// Length of the request as its header says.
    len: usize,
}

impl<'a> Request<'a> {
    /// Reads header and arguments. The error comes with the number of the request to answer: 0 if the header cannot be
    /// read.
    pub fn read(readable: &'a mut IoVecs, scratch: &'a mut Vec<u8>) -> std::result::Result<Self, (u64, Errno)> {
        let mut header = InHeader::default();
        if readable.read_at(0, header.as_mut_bytes()) < size_of::<InHeader>() {
            return Err((0, Errno::INVAL));
        }
        let fail = |errno| Err((header.unique, errno));
        let len = header.len as usize;
        let Some(body) = len.checked_sub(size_of::<InHeader>()) else { return fail(Errno::INVAL) };
        if len > readable.len() {
            return fail(Errno::INVAL);
        }
        let args = match Opcode::from_u32(header.opcode) {
            Some(Opcode::Write) => body.min(WRITE_ARGS),
            // Entries beyond the bound are not forgotten. That costs only memory, until the session ends.
            Some(Opcode::BatchForget) => body.min(ARGUMENT_BYTES),
            _ => body,
        };
        if args > ARGUMENT_BYTES {
            return fail(Errno::TOOBIG);
        }
        scratch.resize(args, 0);
        // Memory that may not be touched is not read: the buffer would still have an earlier request's bytes there.
        if readable.read_at(size_of::<InHeader>(), scratch) < args {
            return fail(Errno::FAULT);
        }
        Ok(Self { header, args: scratch, readable, len })
    }

    /// A request whose arguments, a [`rest`](Self::rest), were copied. It has no data.
    pub fn copied(header: InHeader, args: &'a [u8], none: &'a mut IoVecs) -> Self {
        Self { header, args, readable: none, len: 0 }
    }

    /// The arguments that are left.
    pub fn rest(&self) -> &'a [u8] {
        self.args
    }

    /// The arguments that are left, to be read without taking them.
    pub fn peek(&self) -> Cursor<'a> {
        Cursor(self.args)
    }

    /// The next argument structure.
    ///
    /// # Errors
    /// EINVAL if the request is too short.
    pub fn take<T: FromBytes>(&mut self) -> Result<T> {
        let (value, rest) = T::read_from_prefix(self.args).map_err(|_| Errno::INVAL)?;
        self.args = rest;
        Ok(value)
    }

    /// The next NUL-terminated name.
    pub fn name(&mut self) -> Result<&'a CStr> {
        let name = CStr::from_bytes_until_nul(self.args).map_err(|_| Errno::INVAL)?;
        self.args = &self.args[name.count_bytes() + 1..];
        Ok(name)
    }

    /// The next `len` bytes.
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8]> {
        let (bytes, rest) = self.args.split_at_checked(len).ok_or(Errno::INVAL)?;
        self.args = rest;
        Ok(bytes)
    }

    /// A WRITE's data, still in guest memory.
    pub fn data(&mut self, len: usize) -> Result<IoRange<'_>> {
        if self.len.saturating_sub(WRITE_DATA) < len {
            return Err(Errno::INVAL);
        }
        Ok(self.readable.range(WRITE_DATA..WRITE_DATA + len))
    }

    /// Who sent the request.
    pub fn caller(&self) -> Caller {
        Caller { uid: self.header.uid, gid: self.header.gid, pid: self.header.pid }
    }

    /// The creator of a file, from the header and the extensions at the end of the request (struct fuse_ext_header and
    /// fuse_secctx_header).
    pub fn creator(&mut self, umask: u32) -> Result<Creator<'a>> {
        let InHeader { uid, gid, .. } = self.header;
        let mut by = Creator { uid, gid, umask, group: None, label: None };
        while !self.args.is_empty() {
            let mut rest = Cursor(self.args);
            let header: ExtHeader = rest.take()?;
            let size = (header.size as usize).checked_sub(size_of::<ExtHeader>()).ok_or(Errno::INVAL)?;
            let mut body = Cursor(rest.bytes(size)?);
            match header.kind {
                // The kernel sends at most one context, and none as a header alone.
                1..=MAX_NR_SECCTX => by.label = Some(body.label()?),
                // The kernel sends only the group that the directory belongs to.
                EXT_GROUPS if body.take::<u32>()? > 0 => by.group = Some(body.take()?),
                _ => {}
            }
            // Extensions are padded to 8 bytes.
            self.args = rest.0.get(size.next_multiple_of(8) - size..).unwrap_or_default();
        }
        Ok(by)
    }
}

/// Reads arguments.
pub(super) struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    /// See [`Request::name`].
    pub fn name(&mut self) -> Result<&'a CStr> {
        let name = CStr::from_bytes_until_nul(self.0).map_err(|_| Errno::INVAL)?;
        self.0 = &self.0[name.count_bytes() + 1..];
        Ok(name)
    }

    /// See [`Request::take`].
    pub fn take<T: FromBytes>(&mut self) -> Result<T> {
        let (value, rest) = T::read_from_prefix(self.0).map_err(|_| Errno::INVAL)?;
        self.0 = rest;
        Ok(value)
    }

    fn bytes(&mut self, len: usize) -> Result<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len).ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(bytes)
    }

    fn label(&mut self) -> Result<(&'a CStr, &'a [u8])> {
        let context: Secctx = self.take()?;
        let name = CStr::from_bytes_until_nul(self.0).map_err(|_| Errno::INVAL)?;
        self.bytes(name.count_bytes() + 1)?;
        Ok((name, self.bytes(context.size as usize)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(opcode: Opcode, body: &[u8], len: Option<u32>) -> Vec<u8> {
        let len = len.unwrap_or(40 + body.len() as u32);
        let header = InHeader { len, opcode: opcode as u32, unique: 7, uid: 1, gid: 2, ..Default::default() };
        [header.as_bytes(), body].concat()
    }

    fn with<R>(bytes: &mut [u8], f: impl FnOnce(std::result::Result<Request, (u64, Errno)>) -> R) -> R {
        let mut vecs = IoVecs::default();
        // SAFETY: `bytes` outlives the list.
        unsafe { vecs.push(bytes.as_mut_ptr(), bytes.len(), true) };
        let mut scratch = Vec::new();
        f(Request::read(&mut vecs, &mut scratch))
    }

    #[test]
    fn headers_are_checked() {
        let mut short = vec![0; 39];
        with(&mut short, |r| assert_eq!(r.err(), Some((0, Errno::INVAL))));
        for len in [0, 39, 42] {
            let mut bad = request(Opcode::Lookup, b"a", Some(len));
            with(&mut bad, |r| assert_eq!(r.err(), Some((7, Errno::INVAL)), "{len}"));
        }
        let mut big = request(Opcode::Lookup, &vec![0; ARGUMENT_BYTES + 1], None);
        with(&mut big, |r| assert_eq!(r.err(), Some((7, Errno::TOOBIG))));
    }

    #[test]
    fn arguments_never_come_from_an_earlier_request() {
        let mut scratch = Vec::new();
        let mut read = |name: &[u8], near| {
            let mut bytes = request(Opcode::Lookup, name, None);
            let (base, head) = (bytes.as_mut_ptr(), size_of::<InHeader>() + 1);
            let mut vecs = IoVecs::default();
            // SAFETY: `bytes` outlives the list.
            unsafe {
                vecs.push(base, head, true);
                vecs.push(base.wrapping_add(head), bytes.len() - head, near);
            }
            Request::read(&mut vecs, &mut scratch).map(|mut r| r.name().map(std::borrow::ToOwned::to_owned))
        };
        assert_eq!(read(b"secret\0", true), Ok(Ok(c"secret".to_owned())));
        assert_eq!(read(b"public\0", false), Err((7, Errno::FAULT)));
    }

    #[test]
    fn names_need_their_nul() {
        let mut good = request(Opcode::Symlink, b"a\0bc\0", None);
        with(&mut good, |r| {
            let mut r = r.unwrap_or_else(|_| panic!());
            assert_eq!((r.name(), r.name()), (Ok(c"a"), Ok(c"bc")));
            assert_eq!(r.name(), Err(Errno::INVAL));
        });
    }

    #[test]
    fn write_data_is_bounded_by_the_request() {
        let body = [WriteIn { size: 5, ..Default::default() }.as_bytes(), b"hello"].concat();
        let mut write = request(Opcode::Write, &body, None);
        with(&mut write, |r| {
            let mut r = r.unwrap_or_else(|_| panic!());
            r.take::<WriteIn>().unwrap();
            assert_eq!(r.data(5).unwrap().len(), 5);
            assert_eq!(r.data(6).err(), Some(Errno::INVAL));
        });
    }

    #[test]
    fn truncated_write_has_no_data() {
        let mut write = request(Opcode::Write, &[0; 10], None);
        with(&mut write, |r| {
            let mut r = r.unwrap_or_else(|_| panic!());
            assert!(r.take::<WriteIn>().is_err());
        });
    }

    #[test]
    fn extensions() {
        let mut body = Vec::new();
        let value = b"label\0";
        let name = b"security.selinux\0";
        let size = (8 + 8 + name.len() + value.len()).next_multiple_of(8);
        body.extend(SecctxHeader { size: size as u32, nr_secctx: 1 }.as_bytes());
        body.extend(Secctx { size: value.len() as u32, padding: 0 }.as_bytes());
        body.extend(name);
        body.extend(value);
        body.resize(size, 0);
        body.extend(ExtHeader { size: 16, kind: EXT_GROUPS }.as_bytes());
        body.extend([1u32, 27].as_bytes());
        let mut mkdir = request(Opcode::Mkdir, &body, None);
        with(&mut mkdir, |r| {
            let by = r.unwrap_or_else(|_| panic!()).creator(0o22).unwrap();
            assert_eq!(by.label, Some((c"security.selinux", &value[..])));
            assert_eq!((by.uid, by.gid, by.umask, by.group), (1, 2, 0o22, Some(27)));
        });
        for cut in 1..body.len() {
            let mut cut = request(Opcode::Mkdir, &body[..cut], None);
            with(&mut cut, |r| {
                let _ = r.unwrap_or_else(|_| panic!()).creator(0);
            });
        }
    }
}
