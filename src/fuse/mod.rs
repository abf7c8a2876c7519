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
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::io::Errno;
use zerocopy::IntoBytes;

use abi::*;
use buf::IoVecs;
use metrics::Counters;
use ops::*;
use reply::Reply;
use request::Request;

use crate::limits::{COPY_BYTES, COPY_PIECE, DATA_BYTES, REMOVED_PARTS, SHORTEST_COPY};

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
    /// The thread may wait for the host's file system. Only READ and WRITE are served so.
    pub waits: bool,
    args: Vec<u8>,
    out: Vec<u8>,
}

/// A request that would wait: run it on another thread; it returns the whole reply, header included.
pub type Deferred = Box<dyn FnOnce() -> Vec<u8> + Send>;

/// As that, and it may end early once the flag is set: someone waits for it.
pub type Slow = Box<dyn FnOnce(&AtomicBool) -> Vec<u8> + Send>;

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
}

/// What became of a request.
pub enum Outcome {
    /// A reply of so many bytes stands in the writable slices.
    Replied(usize),
    /// There is nothing to answer, or nowhere to answer to: return the chain with length 0.
    Silent,
    /// The reply comes later: it waits for other processes or the frontend, not for ever.
    Deferred(Deferred),
    /// As that, and it may wait for ever.
    Lock(Deferred),
    /// The reply comes later: it waits for the host's file system alone.
    Slow(Slow),
    /// As that, for data: what is read belongs behind the room for the reply's header, and what is written ends the
    /// request. A write comes only where [`Work::crowded`] says so. Who cannot do it hands the request in again with
    /// [`Work::waits`], with which this never comes.
    Io(LateIo),
    Handed(Handed),
}

type Body = Box<dyn FnOnce() -> Result<Vec<u8>> + Send>;
type SlowBody = Box<dyn FnOnce(&AtomicBool) -> Result<Vec<u8>> + Send>;

/// [`Work::crowded`] and [`Work::waits`].
type How = (bool, bool);

/// How an operation ended that did not fail.
enum Done {
    Reply,
    Silent,
    /// It makes the reply's body, on a thread of its own.
    Wait(Body),
    /// As that, perhaps never.
    Lock(Body),
    /// As that, and waits for the host's file system alone.
    Slow(SlowBody),
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
        let Work { readable, writable, crowded, data, waits, args, out } = work;
        *data = false;
        let mut reply = Reply::new(writable, out);
        let request = match Request::read(readable, args) {
            Ok(request) => request,
            Err((unique, errno)) => return reply.fail(unique, errno),
        };
        let unique = request.header.unique;
        *data = [Opcode::Read as u32, Opcode::Write as u32].contains(&request.header.opcode);
        if *waits && !*data {
            return reply.fail(unique, Errno::INVAL);
        }
        match self.dispatch(request, &mut reply, (*crowded, *waits)) {
            Ok(Done::Reply) => reply.finish(unique),
            Ok(Done::Silent) => Outcome::Silent,
            Ok(Done::Wait(wait)) => Outcome::Deferred(Box::new(move || late_reply(unique, wait()))),
            Ok(Done::Lock(wait)) => Outcome::Lock(Box::new(move || late_reply(unique, wait()))),
            Ok(Done::Slow(wait)) => Outcome::Slow(Box::new(move |stop| late_reply(unique, wait(stop)))),
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

    /// As [`apart`](Self::apart), for what waits for the host's file system alone and cannot end early.
    fn slowly(&self, serve: impl FnOnce(&F) -> Result<Vec<u8>> + Send + 'static) -> Done {
        let body = self.apart(serve);
        Done::Slow(Box::new(|_| body()))
    }

    /// Serves a request that may wait for the file system on which the file `fh` lies: here, or on a thread of its own.
    fn perhaps_slow(
        &self,
        (node, fh): (u64, u64),
        reply: &mut Reply,
        serve: impl FnOnce(&F) -> Result<Vec<u8>> + Send + 'static,
    ) -> Result<Done> {
        if self.fs.waits(node, fh) {
            return Ok(self.slowly(serve));
        }
        reply.bytes(&serve(&self.fs)?)?;
        Ok(Done::Reply)
    }

    fn has(&self, flag: InitFlags) -> bool {
        self.session.load(Ordering::Acquire) & flag.bits() != 0
    }

    fn dispatch(&self, mut request: Request, reply: &mut Reply, how: How) -> Result<Done> {
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
        self.serve(opcode, &mut request, reply, how)
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

    fn serve(&self, opcode: Opcode, request: &mut Request, reply: &mut Reply, how: How) -> Result<Done> {
        let fs = &self.fs;
        let node = request.header.nodeid;
        let (crowded, waits) = how;
        match opcode {
            Opcode::Lookup => reply.put(&fs.lookup(node, request.name()?)?)?,
            Opcode::Getattr => {
                let args: GetattrIn = request.take()?;
                reply.put(&fs.getattr(node, (args.getattr_flags & GETATTR_FH != 0).then_some(args.fh))?)?
            }
            Opcode::Read => {
                let args: ReadIn = request.take()?;
                let (unique, size, offset) = (request.header.unique, data_len(args.size)?, args.offset);
                let io = |file, long| Ok(Done::Io(LateIo { unique, file, offset, size, write: false, long }));
                if crowded
                    && size >= LARGE
                    && let Some(file) = fs.file_for_read(node, &args)?
                {
                    return io(file, true);
                }
                if let Reading::Waits(file) = reply.fill(size, |to| fs.read(node, &args, to, waits))? {
                    return io(file, false);
                }
            }
            Opcode::Write => {
                let args: WriteIn = request.take()?;
                let (unique, size, offset) = (request.header.unique, data_len(args.size)?, args.offset);
                if crowded
                    && size >= LARGE
                    && request.data(size)?.as_slice().len() <= buf::IOV_MAX
                    && let Some(file) = fs.file_for_write(node, &args)?
                {
                    return Ok(Done::Io(LateIo { unique, file, offset, size, write: true, long: true }));
                }
                let from = request.data(size)?;
                let size = fs.write(node, &args, &from)? as u32;
                reply.put(&WriteOut { size, padding: 0 })?
            }
            Opcode::Open => {
                let args: OpenIn = request.take()?;
                let elsewhere = move |fs: &F| Ok(fs.open_waiting(node, &args)?.wait()?.as_bytes().to_vec());
                if args.flags & libc::O_TRUNC as u32 != 0 {
                    match fs.truncates(node, None)? {
                        Truncates::Here => {}
                        Truncates::Slowly => return Ok(self.slowly(elsewhere)),
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
                        Truncates::Slowly => return Ok(self.slowly(elsewhere)),
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
                if fs.has_mappings() {
                    return Ok(self.wait(serve));
                }
                // It may wait for another daemon, as a truncation does, or take long even in memory.
                let removes = args.mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) as u32 != 0;
                if removes || args.length > COPY_PIECE {
                    return Ok(self.slowly(serve));
                }
                return self.perhaps_slow((node, args.fh), reply, serve);
            }
            Opcode::Lseek => {
                let args: LseekIn = request.take()?;
                reply.put(&LseekOut { offset: fs.lseek(node, args.fh, args.offset, args.whence)? })?
            }
            Opcode::CopyFileRange | Opcode::CopyFileRange64 => {
                let args: CopyFileRangeIn = request.take()?;
                let args = CopyFileRangeIn { len: args.len.min(COPY_BYTES), ..args };
                let body = move |bytes_copied: u64| match opcode {
                    Opcode::CopyFileRange => WriteOut { size: bytes_copied as u32, padding: 0 }.as_bytes().to_vec(),
                    _ => CopyFileRangeOut { bytes_copied }.as_bytes().to_vec(),
                };
                if args.len > COPY_PIECE || fs.waits(node, args.fh_in) {
                    let fs = fs.clone();
                    return Ok(Done::Slow(Box::new(move |stop| {
                        fs.enter_thread();
                        copy(&args, stop, |piece| fs.copy_file_range(node, piece)).map(body)
                    })));
                }
                reply.bytes(&body(fs.copy_file_range(node, &args)? as u64))?
            }
            Opcode::Syncfs => return Ok(self.slowly(move |fs| fs.syncfs(node).map(|()| Vec::new()))),
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
                    return Ok(Done::Lock(Box::new(|| wait().map(|()| Vec::new()))));
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
                if args.count > REMOVED_PARTS {
                    return Err(Errno::INVAL);
                }
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

/// The length of a READ or WRITE.
fn data_len(size: u32) -> Result<usize> {
    if size as usize > DATA_BYTES { Err(Errno::INVAL) } else { Ok(size as usize) }
}

/// Copies in pieces, and ends early once `stop` is set: a short count is no error.
fn copy(
    args: &CopyFileRangeIn,
    stop: &AtomicBool,
    mut copy: impl FnMut(&CopyFileRangeIn) -> Result<usize>,
) -> Result<u64> {
    let mut done = 0;
    loop {
        let stopping = stop.load(Ordering::Relaxed);
        if stopping && done > 0 {
            return Ok(done);
        }
        let most = if stopping { SHORTEST_COPY } else { COPY_PIECE };
        let at = |offset: u64| offset.checked_add(done).ok_or(Errno::INVAL);
        let len = (args.len - done).min(most);
        let piece =
            at(args.off_in).and_then(|off_in| Ok(CopyFileRangeIn { off_in, off_out: at(args.off_out)?, len, ..*args }));
        match piece.and_then(|piece| copy(&piece)) {
            Ok(n) => {
                done += n as u64;
                if (n as u64) < len || done >= args.len {
                    return Ok(done);
                }
            }
            Err(_) if done > 0 => return Ok(done),
            Err(errno) => return Err(errno),
        }
    }
}

/// The reply without a body: to success, or to `errno`.
fn header(unique: u64, errno: Option<Errno>) -> OutHeader {
    let error = errno.map_or(0, |e| -e.raw_os_error());
    OutHeader { len: size_of::<OutHeader>() as u32, error, unique }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(len: u64) -> CopyFileRangeIn {
        CopyFileRangeIn { off_in: 100, off_out: 7, len, ..Default::default() }
    }

    #[test]
    fn a_copy_is_cut_to_pieces() {
        let mut pieces = Vec::new();
        let copied = copy(&args(3 * COPY_PIECE + 5), &AtomicBool::new(false), |piece| {
            pieces.push((piece.off_in - 100, piece.off_out - 7, piece.len));
            Ok(piece.len as usize)
        });
        assert_eq!(copied, Ok(3 * COPY_PIECE + 5));
        let piece = |n, len| (n * COPY_PIECE, n * COPY_PIECE, len);
        assert_eq!(pieces, [piece(0, COPY_PIECE), piece(1, COPY_PIECE), piece(2, COPY_PIECE), piece(3, 5)]);
    }

    #[test]
    fn a_copy_ends_between_two_pieces() {
        let stop = AtomicBool::new(false);
        let mut pieces = 0;
        let mut run = |len| {
            copy(&args(len), &stop, |piece| {
                pieces += 1;
                stop.fetch_or(pieces == 3, Ordering::Relaxed);
                Ok(piece.len as usize)
            })
        };
        assert_eq!(run(100 * COPY_PIECE), Ok(3 * COPY_PIECE));
        // One that comes when all is to stop does what is no end of the file.
        assert_eq!(run(100 * COPY_PIECE), Ok(SHORTEST_COPY));
        assert_eq!(pieces, 4);
    }

    #[test]
    fn a_copy_tells_what_was_copied_before_an_error() {
        let run = |results: &[Result<usize>]| {
            let mut results = results.iter();
            copy(&args(100 * COPY_PIECE), &AtomicBool::new(false), |_| *results.next().unwrap())
        };
        let piece = COPY_PIECE as usize;
        assert_eq!(run(&[Err(Errno::NOSPC)]), Err(Errno::NOSPC));
        assert_eq!(run(&[Ok(piece), Err(Errno::NOSPC)]), Ok(COPY_PIECE));
        assert_eq!(run(&[Ok(piece), Ok(5)]), Ok(COPY_PIECE + 5));
        assert_eq!(run(&[Ok(0)]), Ok(0));
        let mut args = args(2 * COPY_PIECE);
        args.off_out = u64::MAX - COPY_PIECE;
        assert_eq!(copy(&args, &AtomicBool::new(false), |_| Ok(piece)), Ok(2 * COPY_PIECE));
        args.off_out += 1;
        assert_eq!(copy(&args, &AtomicBool::new(false), |_| Ok(piece)), Ok(COPY_PIECE));
    }
}
