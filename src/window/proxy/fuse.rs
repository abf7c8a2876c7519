//! The window process's file system: a directory of proxy files named by their nodeids.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, ReadWriteFlags, pread, pwritev2};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::nodes::Node;
use super::shared::Shared;
use crate::fuse::abi::*;
use crate::window::sys;

/// The size of each proxy file. No mapping of a real file ends beyond it, since offsets are below 2^63 and files that
/// long do not exist, and sums with it do not overflow.
pub const SIZE: u64 = 1 << 62;

/// Most bytes of a WRITE or READ: 256 pages (FUSE_MAX_MAX_PAGES), the most that the kernel takes without privileges.
const MAX_IO: usize = 1 << 20;

/// Room for the headers of a WRITE: the kernel wants a page at the least.
const HEADERS: usize = 4096;

/// How deep the file systems of backing files may be stacked: overlayfs is 1 deep and must be less than this; it is
/// also the kernel's maximum (FILESYSTEM_MAX_STACK_DEPTH).
const STACK_DEPTH: u32 = 2;

/// Seconds for which the kernel need not ask for attributes again, which never change: a day.
const ATTR_VALID: u64 = 86400;

/// RWF_NOAPPEND of include/uapi/linux/fs.h (Linux 6.9): write at the offset even though the file is O_APPEND.
const NOAPPEND: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x20);

/// Reads requests and answers them.
pub struct Fuse {
    shared: Arc<Shared>,
    request: Vec<u8>,
    reply: Vec<u8>,
}

/// What follows the header of a reply.
type Reply<'a> = Result<&'a [u8], Errno>;

impl Fuse {
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared, request: vec![0; HEADERS + MAX_IO], reply: vec![0; MAX_IO] }
    }

    /// Serves until the mount is gone.
    pub fn run(&mut self) {
        while !matches!(self.serve_one(), Err(Errno::NODEV)) {}
    }

    /// Waits for a request and answers it, or leaves it to another thread.
    pub fn serve_one(&mut self) -> Result<(), Errno> {
        let shared = &*self.shared;
        let length = rustix::io::read(&shared.fuse, &mut *self.request)?;
        let Ok((header, body)) = InHeader::read_from_prefix(&self.request[..length]) else { return Ok(()) };
        let out = &mut *self.reply;
        if !needs_file(&header) {
            return serve(shared, &header, body, out);
        }
        if !shared.data.begin(&self.request[..length]) {
            return Ok(());
        }
        let mut served = serve(shared, &header, body, out);
        while let Some(request) = shared.data.next() {
            if let Ok((header, body)) = InHeader::read_from_prefix(&request) {
                served = served.and(serve(shared, &header, body, out));
            }
        }
        served
    }
}

/// Whether a request may wait for a real file.
fn needs_file(header: &InHeader) -> bool {
    matches!(Opcode::from_u32(header.opcode), Some(Opcode::Read | Opcode::Write | Opcode::Fsync))
}

fn serve(shared: &Shared, header: &InHeader, body: &[u8], out: &mut [u8]) -> Result<(), Errno> {
    let reply = match Opcode::from_u32(header.opcode) {
        Some(Opcode::Forget | Opcode::BatchForget | Opcode::Interrupt) => return Ok(()),
        Some(Opcode::Init) => init(body, out),
        Some(Opcode::Lookup) => lookup(shared, body, out),
        Some(Opcode::Getattr) => put(out, &attr_out(header.nodeid)),
        // QEMU resizes files that seem empty; a proxy file keeps its size.
        Some(Opcode::Setattr) => Err(Errno::PERM),
        Some(Opcode::Open) => open(shared, header.nodeid, out),
        Some(Opcode::Release) => {
            shared.released(header.nodeid);
            Ok([].as_slice())
        }
        Some(Opcode::Read) => read(shared, header.nodeid, body, out),
        Some(Opcode::Write) => write(shared, header.nodeid, body, out),
        Some(Opcode::Fsync) => fsync(shared, header.nodeid, body),
        _ => Err(Errno::NOSYS),
    };
    // It fails with ENOENT if the request was interrupted.
    match reply {
        Ok(body) => shared.tell_kernel(header.unique, 0, body),
        Err(errno) => shared.tell_kernel(header.unique, -errno.raw_os_error(), &[]),
    }
}

fn put<'a, T: IntoBytes + Immutable>(out: &'a mut [u8], value: &T) -> Reply<'a> {
    let bytes = value.as_bytes();
    out[..bytes.len()].copy_from_slice(bytes);
    Ok(&out[..bytes.len()])
}

fn args<T: FromBytes>(body: &[u8]) -> Result<(T, &[u8]), Errno> {
    T::read_from_prefix(body).map_err(|_| Errno::INVAL)
}

fn init<'a>(body: &[u8], out: &'a mut [u8]) -> Reply<'a> {
    let (offer, _): (InitIn, _) = args(body)?;
    let offered = InitFlags::from_bits_truncate(u64::from(offer.flags) | u64::from(offer.flags2) << 32);
    if !offered.contains(InitFlags::PASSTHROUGH | InitFlags::INIT_EXT) {
        return Err(Errno::OPNOTSUPP);
    }
    let wanted = InitFlags::ASYNC_READ | InitFlags::BIG_WRITES | InitFlags::MAX_PAGES;
    let flags = (offered & wanted | InitFlags::PASSTHROUGH | InitFlags::INIT_EXT).bits();
    let reply = InitOut {
        major: KERNEL_VERSION,
        minor: KERNEL_MINOR_VERSION.min(offer.minor),
        max_readahead: offer.max_readahead,
        flags: flags as u32,
        max_write: MAX_IO as u32,
        time_gran: 1,
        max_pages: (MAX_IO / 4096) as u16,
        flags2: (flags >> 32) as u32,
        max_stack_depth: STACK_DEPTH,
        ..Default::default()
    };
    put(out, &reply)
}

fn lookup<'a>(shared: &Shared, name: &[u8], out: &'a mut [u8]) -> Reply<'a> {
    let text = name.strip_suffix(b"\0").and_then(|name| std::str::from_utf8(name).ok());
    let nodeid = text.and_then(|text| text.parse().ok()).ok_or(Errno::NOENT)?;
    shared.nodes.with(nodeid, |_| ()).ok_or(Errno::NOENT)?;
    // The name is good for one open(2); the kernel forgets it, and the node with its pages, with the last descriptor.
    put(out, &EntryOut { nodeid, attr_valid: ATTR_VALID, attr: attr(nodeid), ..Default::default() })
}

fn attr_out(nodeid: u64) -> AttrOut {
    AttrOut { attr_valid: ATTR_VALID, attr: attr(nodeid), ..Default::default() }
}

fn attr(nodeid: u64) -> Attr {
    let (mode, size) = match nodeid {
        ROOT_ID => (libc::S_IFDIR | 0o700, 0),
        _ => (libc::S_IFREG | 0o600, SIZE),
    };
    Attr { ino: nodeid, size, mode, nlink: 1, blksize: 4096, ..Default::default() }
}

fn open<'a>(shared: &Shared, nodeid: u64, out: &'a mut [u8]) -> Reply<'a> {
    let reply = match shared.nodes.opened(nodeid).ok_or(Errno::NOENT)? {
        Some(backing_id) => OpenOut { open_flags: OpenFlags::PASSTHROUGH.bits(), backing_id, ..Default::default() },
        None => OpenOut::default(),
    };
    put(out, &reply)
}

fn real(shared: &Shared, nodeid: u64) -> Result<Arc<OwnedFd>, Errno> {
    shared.nodes.with(nodeid, |node| Arc::clone(&node.real)).ok_or(Errno::BADF)
}

/// Reads zeros beyond the real file's end, so that a mapping never raises SIGBUS there.
fn read<'a>(shared: &Shared, nodeid: u64, body: &[u8], out: &'a mut [u8]) -> Reply<'a> {
    let (args, _): (ReadIn, _) = args(body)?;
    let file = real(shared, nodeid)?;
    let out = out.get_mut(..args.size as usize).ok_or(Errno::INVAL)?;
    let mut done = 0;
    while done < out.len() {
        match pread(&file, &mut out[done..], args.offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::INTR) => continue,
            Err(e) => return Err(e),
        }
    }
    out[done..].fill(0);
    Ok(out)
}

/// Drops what is beyond the real file's end, and reports that everything was written.
fn write<'a>(shared: &Shared, nodeid: u64, body: &[u8], out: &'a mut [u8]) -> Reply<'a> {
    let (args, data): (WriteIn, _) = args(body)?;
    let node = |node: &mut Node| (Arc::clone(&node.real), node.outdated);
    let (file, outdated) = shared.nodes.with(nodeid, node).ok_or(Errno::BADF)?;
    if !outdated {
        put_in_place(&file, args.offset, data.get(..args.size as usize).ok_or(Errno::INVAL)?)?;
    }
    put(out, &WriteOut { size: args.size, padding: 0 })
}

/// Stores what is before the file's end. A host process may truncate the file at any time, and pwrite(2) would make it
/// longer again.
fn put_in_place(file: &OwnedFd, offset: u64, data: &[u8]) -> Result<(), Errno> {
    let (mut done, mut has_room) = (0, false);
    loop {
        let at = offset + done as u64;
        let rest = before_end(file, at, &data[done..])?;
        let Ok(stored) = sys::store(file.as_fd(), at, rest) else { return write_at(file, at, rest) };
        done += stored;
        // The file is shorter now, or a hole has no room.
        let at = offset + done as u64;
        let rest = before_end(file, at, &rest[stored..])?;
        if rest.is_empty() {
            break;
        }
        if has_room {
            return Err(Errno::IO);
        }
        match fallocate(file, FallocateFlags::KEEP_SIZE, at, rest.len() as u64) {
            Err(Errno::OPNOTSUPP) => return write_at(file, at, rest),
            done => done?,
        }
        has_room = true;
    }
    // A store in a mapping is no event. This is one, and changes nothing.
    let _ = fallocate(file, FallocateFlags::KEEP_SIZE, offset, 1);
    Ok(())
}

/// The part of `data` that is before the file's end.
fn before_end<'a>(file: &OwnedFd, offset: u64, data: &'a [u8]) -> Result<&'a [u8], Errno> {
    let room = (rustix::fs::fstat(file)?.st_size as u64).saturating_sub(offset);
    Ok(&data[..data.len().min(usize::try_from(room).unwrap_or(usize::MAX))])
}

/// For files that cannot be mapped, and for file systems without fallocate(2). This undoes a truncation that came after
/// the look at the size.
fn write_at(file: &OwnedFd, mut offset: u64, mut data: &[u8]) -> Result<(), Errno> {
    while !data.is_empty() {
        match pwritev2(file, &[IoSlice::new(data)], offset, NOAPPEND) {
            Ok(0) => return Err(Errno::IO),
            Ok(n) => (data, offset) = (&data[n..], offset + n as u64),
            Err(Errno::INTR) => continue,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn fsync(shared: &Shared, nodeid: u64, body: &[u8]) -> Reply<'static> {
    let (args, _): (FsyncIn, _) = args(body)?;
    let file = real(shared, nodeid)?;
    match args.fsync_flags & FSYNC_FDATASYNC {
        0 => rustix::fs::fsync(&file)?,
        _ => rustix::fs::fdatasync(&file)?,
    }
    Ok(&[])
}
