//! The FUSE server: wire format ([`abi`]), guest buffers ([`buf`]), decoding ([`request`]), replies ([`reply`]), and
//! the dispatch of each request to a [`FileSystem`](ops::FileSystem). Knows no file system.

pub mod abi;
pub mod buf;
pub mod metrics;
pub mod ops;
mod reply;
mod request;
mod state;

use std::ops::{ControlFlow, Range};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use zerocopy::IntoBytes;

use abi::*;
use buf::IoVecs;
use metrics::Counters;
use ops::*;
use reply::Reply;
use request::Request;

/// Largest WRITE and READ that is offered, in bytes. The guest lowers it to what its virtqueue's descriptors carry
/// (fs/fuse/virtio_fs.c, max_pages_limit), and a queue has 1024 of them, each a page.
pub const MAX_WRITE: u32 = MAX_PAGES as u32 * 4096;
const MAX_PAGES: u16 = 1024;

/// From so many bytes on the data of a request is a burden to who waits behind it: about 50 µs of copying, some times what
/// it costs to have another thread copy.
const LARGE: usize = 256 << 10;

/// Background requests that the guest may have under way. As many as a queue has descriptors: fewer would hold back
/// readahead and asynchronous I/O, which the kernel counts against it.
const MAX_BACKGROUND: u16 = 1024;

/// A FUSE session over one device. Shared by all queue workers.
pub struct Server<F> {
    fs: Arc<F>,
    /// What INIT settled ([`InitFlags`]), or `CLOSED`.
    session: Arc<AtomicU64>,
    counters: Arc<Counters>,
}

/// No session: bit 63 is no flag that is ever claimed.
const CLOSED: u64 = 1 << 63;

/// What one worker reuses from request to request, so that the hot path allocates nothing.
#[derive(Default)]
pub struct Work {
    /// The chain's device-readable slices, filled by the transport.
    pub readable: IoVecs,
    /// The chain's device-writable slices, filled by the transport.
    pub writable: IoVecs,
    /// Others wait for the worker when it moves much data: it should not.
    pub crowded: bool,
    /// It was a READ or a WRITE, by the handler.
    pub data: bool,
    args: Vec<u8>,
    out: Vec<u8>,
}

/// A request that would wait: run it on another thread; it returns the whole reply, header included.
pub type Deferred = Box<dyn FnOnce() -> Vec<u8> + Send>;

/// A request that another thread serves: hands it over with what takes the whole reply, header included.
pub type Handed = Box<dyn FnOnce(Box<dyn FnOnce(Vec<u8>) + Send>) + Send>;

/// A READ or WRITE that is better not done by a queue's worker.
pub struct LateIo {
    pub unique: u64,
    pub file: OwnedFd,
    /// Bytes.
    pub offset: u64,
    pub size: usize,
    pub write: bool,
    /// It is in memory, but large. Else it waits for the host's file system.
    pub long: bool,
}

impl LateIo {
    /// Where the data lies in the readable slices, if it is a write, or else is to lie in the writable ones.
    pub fn data(&self) -> Range<usize> {
        let start = if self.write { request::WRITE_DATA } else { size_of::<OutHeader>() };
        start..start.saturating_add(self.size)
    }

    /// The reply but for the data that was read, and the length of all of it. `result`: bytes, or a negative errno.
    pub fn reply(&self, result: i32) -> (Vec<u8>, u32) {
        let bytes = result.max(0) as u32;
        let body = WriteOut { size: bytes, padding: 0 };
        let body = if self.write && result >= 0 { body.as_bytes() } else { &[] };
        let rest = if self.write { body.len() as u32 } else { bytes };
        let header = OutHeader { len: size_of::<OutHeader>() as u32 + rest, error: result.min(0), unique: self.unique };
        ([header.as_bytes(), body].concat(), header.len)
    }

    /// Reads, which waits; the whole reply, header included.
    pub fn wait(self) -> Vec<u8> {
        let start = size_of::<OutHeader>();
        let mut reply = vec![0; start + self.size.min(MAX_WRITE as usize)];
        let result = rustix::io::pread(&self.file, &mut reply[start..], self.offset);
        let (head, len) = self.reply(result.map_or_else(|e| -e.raw_os_error(), |n| n as i32));
        reply[..start].copy_from_slice(&head);
        reply.truncate(len as usize);
        reply
    }
}

/// What became of a request.
pub enum Outcome {
    /// A reply of so many bytes stands in the writable slices.
    Replied(usize),
    /// There is nothing to answer, or nowhere to answer to: return the chain with length 0.
    Silent,
    /// The reply comes later: it waits for other processes or the frontend.
    Deferred(Deferred),
    /// The reply comes later: it waits for the host's file system alone.
    Slow(Deferred),
    /// As that, for data: what is read belongs behind the room for the reply's header, and what is written ends the
    /// request. A write comes only where [`Work::crowded`] says so.
    Io(LateIo),
    Handed(Handed),
}

type Body = Box<dyn FnOnce() -> Result<Vec<u8>> + Send>;

/// How an operation ended that did not fail.
enum Done {
    Reply,
    Silent,
    /// It makes the reply's body, on a thread of its own.
    Wait(Body),
    /// As that, and waits for the host's file system alone.
    Slow(Body),
    Io(LateIo),
    /// The reply's body comes from another thread.
    Hand(Handover<Vec<u8>>),
}

impl<F: FileSystem + Send + Sync + 'static> Server<F> {
    pub fn new(fs: F) -> Self {
        Self { fs: Arc::new(fs), session: Arc::new(AtomicU64::new(CLOSED)), counters: Arc::default() }
    }

    /// What it has been asked for.
    pub fn counters(&self) -> Arc<Counters> {
        self.counters.clone()
    }

    /// Serves the request in `work`. Never panics, whatever the guest wrote.
    pub fn handle(&self, work: &mut Work) -> Outcome {
        self.fs.enter_thread();
        let Work { readable, writable, crowded, data, args, out } = work;
        *data = false;
        let mut reply = Reply::new(writable, out);
        let request = match Request::read(readable, args) {
            Ok(request) => request,
            Err((unique, errno)) => return reply.fail(unique, errno),
        };
        let unique = request.header.unique;
        *data = [Opcode::Read as u32, Opcode::Write as u32].contains(&request.header.opcode);
        match self.dispatch(request, &mut reply, *crowded) {
            Ok(Done::Reply) => reply.finish(unique),
            Ok(Done::Silent) => Outcome::Silent,
            Ok(Done::Wait(wait)) => Outcome::Deferred(Box::new(move || late_reply(unique, wait()))),
            Ok(Done::Slow(wait)) => Outcome::Slow(Box::new(move || late_reply(unique, wait()))),
            Ok(Done::Io(io)) => Outcome::Io(io),
            Ok(Done::Hand(hand)) => {
                Outcome::Handed(Box::new(move |take| hand(Box::new(move |result| take(late_reply(unique, result))))))
            }
            Err(errno) => reply.fail(unique, errno),
        }
    }

    /// Ends waiting requests with EINTR and forgets the session's state, for a device reset or a lost frontend.
    pub fn reset(&self) {
        self.session.store(CLOSED, Ordering::Release);
        self.fs.destroy();
    }

    /// Has a request served on a thread of its own.
    fn wait(&self, serve: impl FnOnce(&F) -> Result<Vec<u8>> + Send + 'static) -> Done {
        Done::Wait(self.apart(serve))
    }

    fn apart(&self, serve: impl FnOnce(&F) -> Result<Vec<u8>> + Send + 'static) -> Body {
        let fs = self.fs.clone();
        Box::new(move || {
            fs.enter_thread();
            serve(&fs)
        })
    }

    /// Serves a request that may wait for the file system on which the file `fh` lies: here, or on a thread of its own.
    fn perhaps_slow(
        &self,
        (node, fh): (u64, u64),
        reply: &mut Reply,
        serve: impl FnOnce(&F) -> Result<Vec<u8>> + Send + 'static,
    ) -> Result<Done> {
        if self.fs.waits(node, fh) {
            return Ok(Done::Slow(self.apart(serve)));
        }
        reply.bytes(&serve(&self.fs)?)?;
        Ok(Done::Reply)
    }

    fn has(&self, flag: InitFlags) -> bool {
        self.session.load(Ordering::Acquire) & flag.bits() != 0
    }

    fn dispatch(&self, mut request: Request, reply: &mut Reply, crowded: bool) -> Result<Done> {
        let header = request.header;
        let opcode = Opcode::from_u32(header.opcode);
        tracing::trace!(?opcode, raw = header.opcode, nodeid = header.nodeid, unique = header.unique, "request");
        let opcode = opcode.ok_or(Errno::NOSYS)?;
        self.counters.add(opcode);
        if opcode == Opcode::Init {
            return self.init(&mut request, reply);
        }
        if self.session.load(Ordering::Acquire) == CLOSED {
            return match opcode {
                Opcode::Forget | Opcode::BatchForget | Opcode::Interrupt | Opcode::Destroy => Ok(Done::Silent),
                _ => Err(Errno::IO),
            };
        }
        self.serve(opcode, &mut request, reply, crowded)
    }

    fn init(&self, request: &mut Request, reply: &mut Reply) -> Result<Done> {
        let compat: InitInCompat = request.take()?;
        if compat.major > KERNEL_VERSION {
            // The guest sends INIT again with the version that it is told.
            reply.put(&InitOut { major: KERNEL_VERSION, minor: KERNEL_MINOR_VERSION, ..Default::default() })?;
            return Ok(Done::Reply);
        }
        if compat.major < KERNEL_VERSION || compat.minor < MIN_MINOR_VERSION {
            tracing::error!(
                "the guest speaks FUSE {}.{}, older than 7.{MIN_MINOR_VERSION}: use a newer guest kernel (5.0 or later)",
                compat.major,
                compat.minor
            );
            return Err(Errno::PROTO);
        }
        let mut offered = u64::from(compat.flags);
        if offered & InitFlags::INIT_EXT.bits() != 0 {
            offered |= u64::from(request.take::<u32>()?) << 32;
        }
        // A guest that did not say DESTROY, such as one that was reset, begins anew.
        self.reset();
        let session = self.fs.init(InitFlags::from_bits_truncate(offered))?;
        let Session { flags, map_alignment, passthrough } = session;
        let answer = move |flags: InitFlags| {
            tracing::debug!(minor = compat.minor, ?flags, "session");
            init_out(&compat, flags, map_alignment)
        };
        let Some(hand) = passthrough else {
            self.session.store(flags.bits(), Ordering::Release);
            reply.put(&answer(flags))?;
            return Ok(Done::Reply);
        };
        let open = self.session.clone();
        Ok(Done::Hand(Box::new(move |take| {
            hand(Box::new(move |done: Result<()>| {
                let flags = if done.is_ok() { flags } else { flags - InitFlags::PASSTHROUGH_SHM };
                // Unless the session was taken over from another daemon meanwhile.
                let _ = open.compare_exchange(CLOSED, flags.bits(), Ordering::AcqRel, Ordering::Relaxed);
                take(Ok(answer(flags).as_bytes().to_vec()))
            }))
        })))
    }

    fn serve(&self, opcode: Opcode, request: &mut Request, reply: &mut Reply, crowded: bool) -> Result<Done> {
        let fs = &self.fs;
        let node = request.header.nodeid;
        match opcode {
            Opcode::Lookup => reply.put(&fs.lookup(node, request.name()?)?)?,
            Opcode::Getattr => {
                let args: GetattrIn = request.take()?;
                reply.put(&fs.getattr(node, (args.getattr_flags & GETATTR_FH != 0).then_some(args.fh))?)?
            }
            Opcode::Read => {
                let args: ReadIn = request.take()?;
                let (unique, size, offset) = (request.header.unique, args.size as usize, args.offset);
                let io = |file, long| Ok(Done::Io(LateIo { unique, file, offset, size, write: false, long }));
                if crowded
                    && size >= LARGE
                    && let Some(file) = fs.file_for_read(node, &args)?
                {
                    return io(file, true);
                }
                if let Reading::Waits(file) = reply.fill(size, |to| fs.read(node, &args, to))? {
                    return io(file, false);
                }
            }
            Opcode::Write => {
                let args: WriteIn = request.take()?;
                let (unique, size, offset) = (request.header.unique, args.size as usize, args.offset);
                if crowded
                    && size >= LARGE
                    && request.data(size)?.as_slice().len() <= buf::IOV_MAX
                    && let Some(file) = fs.file_for_write(node, &args)?
                {
                    return Ok(Done::Io(LateIo { unique, file, offset, size, write: true, long: true }));
                }
                let from = request.data(args.size as usize)?;
                let size = fs.write(node, &args, &from)? as u32;
                reply.put(&WriteOut { size, padding: 0 })?
            }
            Opcode::Open => {
                let args: OpenIn = request.take()?;
                let elsewhere = move |fs: &F| Ok(fs.open_waiting(node, &args)?.wait()?.as_bytes().to_vec());
                if args.flags & libc::O_TRUNC as u32 != 0 {
                    match fs.truncates(node, None)? {
                        Truncates::Here => {}
                        Truncates::Slowly => return Ok(Done::Slow(self.apart(elsewhere))),
                        Truncates::Waits => return Ok(self.wait(elsewhere)),
                    }
                }
                match fs.open(node, &args) {
                    Err(Errno::AGAIN) if args.flags & libc::O_NONBLOCK as u32 == 0 => return Ok(self.wait(elsewhere)),
                    opened => match opened? {
                        Served::Now(open) => reply.put(&open)?,
                        Served::Later(hand) => return Ok(later(hand, |open| open.as_bytes().to_vec())),
                    },
                }
            }
            Opcode::Flush => {
                let args: FlushIn = request.take()?;
                fs.flush(node, args.fh, args.lock_owner)?
            }
            Opcode::Release => fs.release(node, &request.take()?)?,
            Opcode::Forget => return self.forget(request),
            Opcode::BatchForget => return self.batch_forget(request),
            Opcode::Setattr => {
                let args: SetattrIn = request.take()?;
                if args.valid & SetattrValid::SIZE.bits() != 0 {
                    let fh = (args.valid & SetattrValid::FH.bits() != 0).then_some(args.fh);
                    let elsewhere = move |fs: &F| Ok(fs.setattr(node, &args)?.as_bytes().to_vec());
                    match fs.truncates(node, fh)? {
                        Truncates::Here => {}
                        Truncates::Slowly => return Ok(Done::Slow(self.apart(elsewhere))),
                        Truncates::Waits => return Ok(self.wait(elsewhere)),
                    }
                }
                reply.put(&fs.setattr(node, &args)?)?
            }
            Opcode::Statx => {
                let args: StatxIn = request.take()?;
                let fh = (args.getattr_flags & GETATTR_FH != 0).then_some(args.fh);
                reply.put(&fs.statx(node, fh, args.sx_flags, args.sx_mask)?)?
            }
            Opcode::Readlink => reply.collect(|to| fs.readlink(node, to))?,
            Opcode::Symlink => {
                let (name, target) = (request.name()?, request.name()?);
                reply.put(&fs.symlink(node, name, target, &request.creator(0)?)?)?
            }
            Opcode::Mknod => {
                let args: MknodIn = request.take()?;
                let name = request.name()?;
                let by = request.creator(self.umask(args.umask))?;
                reply.put(&fs.mknod(node, name, args.mode, args.rdev, &by)?)?
            }
            Opcode::Mkdir => {
                let args: MkdirIn = request.take()?;
                let name = request.name()?;
                reply.put(&fs.mkdir(node, name, args.mode, &request.creator(self.umask(args.umask))?)?)?
            }
            Opcode::Unlink => fs.unlink(node, request.name()?)?,
            Opcode::Rmdir => fs.rmdir(node, request.name()?)?,
            Opcode::Rename => {
                let args: RenameIn = request.take()?;
                let (name, newname) = (request.name()?, request.name()?);
                fs.rename(node, name, args.newdir, newname, 0, &request.creator(0)?)?
            }
            Opcode::Rename2 => {
                let args: Rename2In = request.take()?;
                let (name, newname) = (request.name()?, request.name()?);
                fs.rename(node, name, args.newdir, newname, args.flags, &request.creator(0)?)?
            }
            Opcode::Link => {
                let args: LinkIn = request.take()?;
                reply.put(&fs.link(args.oldnodeid, node, request.name()?)?)?
            }
            Opcode::Create | Opcode::Tmpfile => {
                let args: CreateIn = request.take()?;
                let name = request.name()?;
                let by = request.creator(self.umask(args.umask))?;
                let created = match opcode {
                    Opcode::Create => fs.create(node, name, &args, &by)?,
                    _ => fs.tmpfile(node, &args, &by)?,
                };
                match created {
                    Served::Now((entry, open)) => {
                        reply.put(&entry)?;
                        reply.put(&open)?
                    }
                    Served::Later(hand) => {
                        return Ok(later(hand, |(entry, open)| [entry.as_bytes(), open.as_bytes()].concat()));
                    }
                }
            }
            Opcode::Statfs => reply.put(&fs.statfs(node)?)?,
            Opcode::Access => {
                let args: AccessIn = request.take()?;
                fs.access(node, request.header.uid, request.header.gid, args.mask)?
            }
            Opcode::Fsync => {
                let args: FsyncIn = request.take()?;
                let data = args.fsync_flags & FSYNC_FDATASYNC != 0;
                return self.perhaps_slow((node, args.fh), reply, move |fs| {
                    fs.fsync(node, args.fh, data).map(|()| Vec::new())
                });
            }
            Opcode::Fallocate => {
                let args: FallocateIn = request.take()?;
                let serve = move |fs: &F| fs.fallocate(node, &args).map(|()| Vec::new());
                if fs.shrinks_wait() {
                    return Ok(self.wait(serve));
                }
                // It may wait for another daemon, as a truncation does.
                if args.mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) as u32 != 0 {
                    return Ok(Done::Slow(self.apart(serve)));
                }
                return self.perhaps_slow((node, args.fh), reply, serve);
            }
            Opcode::Lseek => {
                let args: LseekIn = request.take()?;
                reply.put(&LseekOut { offset: fs.lseek(node, args.fh, args.offset, args.whence)? })?
            }
            Opcode::CopyFileRange => {
                // The reply counts in 32 bits.
                let mut args: CopyFileRangeIn = request.take()?;
                args.len = args.len.min(u64::from(u32::MAX >> 1));
                return self.perhaps_slow((node, args.fh_in), reply, move |fs| {
                    let size = fs.copy_file_range(node, &args)? as u32;
                    Ok(WriteOut { size, padding: 0 }.as_bytes().to_vec())
                });
            }
            Opcode::CopyFileRange64 => {
                let args: CopyFileRangeIn = request.take()?;
                return self.perhaps_slow((node, args.fh_in), reply, move |fs| {
                    let bytes_copied = fs.copy_file_range(node, &args)? as u64;
                    Ok(CopyFileRangeOut { bytes_copied }.as_bytes().to_vec())
                });
            }
            Opcode::Syncfs => return Ok(Done::Slow(self.apart(move |fs| fs.syncfs(node).map(|()| Vec::new())))),
            Opcode::Opendir => {
                let args: OpenIn = request.take()?;
                reply.put(&fs.opendir(node, args.flags)?)?
            }
            Opcode::Readdir | Opcode::Readdirplus => {
                let args: ReadIn = request.take()?;
                let plus = opcode == Opcode::Readdirplus;
                reply.entries(args.size as usize, plus, |sink| match plus {
                    true => fs.readdirplus(node, args.fh, args.offset, sink),
                    false => fs.readdir(node, args.fh, args.offset, sink),
                })?
            }
            Opcode::Releasedir => {
                let args: ReleaseIn = request.take()?;
                fs.releasedir(node, args.fh)?
            }
            Opcode::Fsyncdir => {
                let args: FsyncIn = request.take()?;
                let data = args.fsync_flags & FSYNC_FDATASYNC != 0;
                return self.perhaps_slow((node, args.fh), reply, move |fs| {
                    fs.fsyncdir(node, args.fh, data).map(|()| Vec::new())
                });
            }
            Opcode::Setxattr => self.setxattr(request)?,
            Opcode::Getxattr => {
                let args: GetxattrIn = request.take()?;
                let name = request.name()?;
                reply.sized(args.size, |size, to| fs.getxattr(node, name, size, to))?
            }
            Opcode::Listxattr => {
                let args: GetxattrIn = request.take()?;
                reply.sized(args.size, |size, to| fs.listxattr(node, size, to))?
            }
            Opcode::Removexattr => fs.removexattr(node, request.name()?)?,
            Opcode::Getlk => reply.put(&fs.getlk(node, &request.take()?)?)?,
            Opcode::Setlk | Opcode::Setlkw => {
                let wait = opcode == Opcode::Setlkw;
                if let ControlFlow::Break(wait) = fs.setlk(node, request.header.unique, &request.take()?, wait)? {
                    return Ok(Done::Wait(Box::new(|| wait().map(|()| Vec::new()))));
                }
            }
            Opcode::Interrupt => {
                let args: InterruptIn = request.take()?;
                fs.interrupt(args.unique);
                return Ok(Done::Silent);
            }
            Opcode::Destroy => {
                self.reset();
                // The last word: QEMU may stop the device right after it, and must not be asked for anything then.
                if let Ok(hand) = fs.removemapping(&[]) {
                    return Ok(later(hand, |()| Vec::new()));
                }
            }
            Opcode::Setupmapping => return Ok(later(fs.setupmapping(node, &request.take()?)?, |()| Vec::new())),
            Opcode::Removemapping => {
                let args: RemovemappingIn = request.take()?;
                // Each is there, or the request is too short: so the length of the request bounds the count.
                let parts = (0..args.count).map(|_| request.take()).collect::<Result<Vec<_>>>()?;
                return Ok(later(fs.removemapping(&parts)?, |()| Vec::new()));
            }
            // The kernel answers these by itself once it has seen ENOSYS: POLL with "always ready", BMAP with EINVAL,
            // IOCTL with ENOTTY. The device has no notifications.
            Opcode::Poll | Opcode::Bmap | Opcode::Ioctl | Opcode::NotifyReply | Opcode::Init => {
                return Err(Errno::NOSYS);
            }
        }
        Ok(Done::Reply)
    }

    /// The guest's kernel has applied the umask unless DONT_MASK was settled.
    fn umask(&self, umask: u32) -> u32 {
        if self.has(InitFlags::DONT_MASK) { umask & 0o777 } else { 0 }
    }

    fn forget(&self, request: &mut Request) -> Result<Done> {
        if let Ok(args) = request.take::<ForgetIn>() {
            self.fs.forget(request.header.nodeid, args.nlookup);
        }
        Ok(Done::Silent)
    }

    fn batch_forget(&self, request: &mut Request) -> Result<Done> {
        let Ok(args) = request.take::<BatchForgetIn>() else { return Ok(Done::Silent) };
        for _ in 0..args.count {
            let Ok(one) = request.take::<ForgetOne>() else { break };
            self.fs.forget(one.nodeid, one.nlookup);
        }
        Ok(Done::Silent)
    }

    fn setxattr(&self, request: &mut Request) -> Result<()> {
        let (size, flags, ext) = if self.has(InitFlags::SETXATTR_EXT) {
            let args: SetxattrIn = request.take()?;
            (args.size, args.flags, args.setxattr_flags)
        } else {
            let args: SetxattrInCompat = request.take()?;
            (args.size, args.flags, 0)
        };
        let name = request.name()?;
        let value = request.bytes(size as usize)?;
        self.fs.setxattr(request.header.nodeid, name, value, flags, ext & SETXATTR_ACL_KILL_SGID != 0)
    }
}

/// A request that another thread serves, with what makes the reply's body.
fn later<T: 'static>(hand: Handover<T>, body: impl FnOnce(T) -> Vec<u8> + Send + 'static) -> Done {
    Done::Hand(Box::new(|take| hand(Box::new(|result| take(result.map(body))))))
}

/// The whole reply with this body, or the errno.
fn late_reply(unique: u64, result: Result<Vec<u8>>) -> Vec<u8> {
    let mut header = header(unique, result.as_ref().err().copied());
    let body = result.unwrap_or_default();
    header.len += body.len() as u32;
    [header.as_bytes(), &body].concat()
}

fn init_out(compat: &InitInCompat, flags: InitFlags, map_alignment: u16) -> InitOut {
    InitOut {
        major: KERNEL_VERSION,
        minor: KERNEL_MINOR_VERSION.min(compat.minor),
        max_readahead: compat.max_readahead,
        flags: flags.bits() as u32,
        max_background: MAX_BACKGROUND,
        congestion_threshold: MAX_BACKGROUND / 4 * 3,
        max_write: MAX_WRITE,
        time_gran: 1,
        max_pages: MAX_PAGES,
        map_alignment,
        flags2: (flags.bits() >> 32) as u32,
        ..Default::default()
    }
}

/// The reply without a body: to success, or to `errno`.
fn header(unique: u64, errno: Option<Errno>) -> OutHeader {
    let error = errno.map_or(0, |e| -e.raw_os_error());
    OutHeader { len: size_of::<OutHeader>() as u32, error, unique }
}
