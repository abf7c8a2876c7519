//! The FUSE server: wire format ([`abi`]), guest buffers ([`buf`]), decoding (`request`), replies (`reply`), and the
//! dispatch of each request to a [`FileSystem`] (`serve`). Knows no file system and no virtqueue.

pub mod abi;
pub mod buf;
pub mod metrics;
mod migration;
pub mod ops;
mod reply;
mod request;
mod serve;
pub mod throttle;
mod transport;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use rustix::io::Errno;

use crate::limits::{COPY_PIECE, DATA_BYTES};
use crate::record;
use abi::*;
use buf::IoVecs;
use metrics::{Counters, Meter, Shard};
use ops::*;
pub use reply::Reply;
use request::Request;
use throttle::{Kind, Throttle};
pub use transport::{Io, Job, Release, ReplySender, Serve, Stopping, Transport};

/// Largest WRITE and READ that is offered, in bytes. The guest lowers it to what its virtqueue's descriptors carry
/// (fs/fuse/virtio_fs.c, max_pages_limit), and a queue has 1024 of them, each a page.
pub const MAX_WRITE: u32 = MAX_PAGES as u32 * 4096;
const MAX_PAGES: u16 = 1024;

/// Background requests that the guest may have under way. As many as a queue has descriptors: fewer would hold back
/// readahead and asynchronous I/O, which the kernel counts against this number.
const MAX_BACKGROUND: u16 = 1024;

/// A FUSE session over one device. Shared by all queue workers.
pub struct Server<F> {
    fs: Arc<F>,
    /// What INIT settled ([`InitFlags`]), or `CLOSED`.
    session: Arc<AtomicU64>,
    counters: Arc<Counters>,
    /// The guest's minor version. 0 if it is not known.
    minor: Arc<AtomicU32>,
    throttle: Arc<Throttle>,
}

impl<F> Clone for Server<F> {
    fn clone(&self) -> Self {
        let Self { fs, session, counters, minor, throttle } = self;
        Self {
            fs: fs.clone(),
            session: session.clone(),
            counters: counters.clone(),
            minor: minor.clone(),
            throttle: throttle.clone(),
        }
    }
}

/// There is no session. Bit 63 is not a flag that the daemon ever sets.
const CLOSED: u64 = 1 << 63;

/// What one worker reuses from request to request, so that the hot path allocates nothing.
#[derive(Default)]
pub struct Work {
    /// The chain's device-readable slices, filled by the transport.
    pub readable: IoVecs,
    /// The chain's device-writable slices, filled by the transport.
    pub writable: IoVecs,
    /// When the request began, if it is measured and the work on it goes on here.
    pub since: Option<Instant>,
    args: Vec<u8>,
    out: Vec<u8>,
    /// Where its worker counts.
    shard: Option<Arc<Shard>>,
}

impl<F: FileSystem> Server<F> {
    /// A server without a session.
    pub fn new(fs: F) -> Self {
        let session = Arc::new(AtomicU64::new(CLOSED));
        let throttle = Throttle::new();
        Self { fs: Arc::new(fs), session, counters: Arc::default(), minor: Arc::default(), throttle }
    }

    /// The guest's limits.
    pub fn throttle(&self) -> &Arc<Throttle> {
        &self.throttle
    }

    /// The file system.
    pub fn fs(&self) -> &Arc<F> {
        &self.fs
    }

    /// Prepares the calling thread, which may wait, for the file system.
    pub fn enter_thread(&self) {
        self.fs.enter_thread(true);
    }

    /// What INIT settled, if there is a session, and the guest's minor version if it is known.
    pub fn session(&self) -> Option<(InitFlags, Option<u32>)> {
        let session = self.session.load(Ordering::Acquire);
        let minor = self.minor.load(Ordering::Relaxed);
        (session != CLOSED).then(|| (InitFlags::from_bits_truncate(session), (minor > 0).then_some(minor)))
    }

    /// The requests so far.
    pub fn counters(&self) -> Arc<Counters> {
        self.counters.clone()
    }

    /// Serves the request in `work`. Returns the length of the reply in `work.writable` in bytes; 0 if there is none,
    /// or if it comes later by `from`. Never panics, whatever the guest wrote.
    pub fn handle(&self, work: &mut Work, from: &mut dyn Transport) -> usize {
        self.fs.enter_thread(from.may_wait());
        let Work { readable, writable, args, out, since, shard } = work;
        let (unique, request) = match Request::read(readable, args) {
            Ok(request) => (request.header.unique, Ok(request)),
            Err((unique, errno)) => (unique, Err(errno)),
        };
        let opcode = request.as_ref().ok().and_then(|request| Opcode::from_u32(request.header.opcode));
        let counters = &self.counters;
        let (shard, since) = match from.may_wait() {
            true => (counters.shared(), since.take()),
            false => {
                let shard = shard.get_or_insert_with(|| counters.shard());
                let since = opcode.and_then(|opcode| shard.begin(opcode));
                (&**shard, since)
            }
        };
        let mut reply = Reply::new(unique, writable, out, from, Meter { counters, shard, opcode, since, bytes: 0 });
        let result = request.and_then(|mut request| self.dispatch(&mut request, &mut reply));
        reply.finish(result)
    }

    /// Ends waiting requests with EINTR and forgets the session's state, for a device reset or a lost frontend.
    pub fn reset(&self) {
        self.open(CLOSED, 0);
        self.fs.destroy();
    }

    /// There is this session now.
    fn open(&self, session: u64, minor: u32) {
        if let Some(record) = record::get() {
            // 0 in the record: there is none. A session without any feature is another.
            record.set_session(session ^ CLOSED, minor);
        }
        self.session.store(session, Ordering::Release);
    }

    /// Whether there is a session.
    pub fn is_open(&self) -> bool {
        self.session.load(Ordering::Acquire) != CLOSED
    }

    fn has(&self, flag: InitFlags) -> bool {
        self.session.load(Ordering::Acquire) & flag.bits() != 0
    }

    fn dispatch(&self, request: &mut Request, reply: &mut Reply) -> Result<()> {
        let header = request.header;
        let opcode = Opcode::from_u32(header.opcode);
        tracing::trace!(?opcode, raw = header.opcode, nodeid = header.nodeid, unique = header.unique, "request");
        let opcode = opcode.ok_or(Errno::NOSYS)?;
        if reply.may_wait() && !opcode.does().intersects(Does::ASK_HOST | Does::SEE_TIMES) {
            // The guest has replaced the request since the worker looked at it.
            return Err(Errno::INVAL);
        }
        if opcode == Opcode::Init {
            return self.init(request, reply);
        }
        if !self.is_open() {
            return match opcode {
                // The one who ended the session was killed before it answered: see `serve`.
                Opcode::Destroy if record::claim().again.is_some() => {
                    let _ = self.fs.removemapping(&[], reply);
                    Ok(())
                }
                Opcode::Forget | Opcode::BatchForget | Opcode::Interrupt | Opcode::Destroy => {
                    reply.silence();
                    Ok(())
                }
                _ => Err(Errno::IO),
            };
        }
        // What has waited comes again on a thread that may wait.
        if self.throttle.is_on() && !reply.may_wait() && self.must_wait(opcode, request, reply) {
            return Ok(());
        }
        let wait = if reply.may_wait() { None } else { self.may_block(opcode, request) };
        let args = request.rest();
        let served = match (wait, self.fs.agents()) {
            (Some(_), _) => Err(WOULD_WAIT),
            (None, Some(agents)) if agents.any() && self.is_agents(agents, opcode, &header, request) => {
                self.serve_agent(agents, opcode, request, reply)
            }
            _ => self.serve(opcode, request, reply),
        };
        if served != Err(WOULD_WAIT) {
            return served;
        }
        let awaits = if opcode.does().contains(Does::AWAIT_OTHERS) { Wait::Others } else { Wait::Host };
        if wait.unwrap_or(awaits) == Wait::Host {
            reply.serve_anew();
            return Ok(());
        }
        // Nothing waits for the others, so the guest's memory may be gone by then.
        let (server, args, claim) = (self.clone(), args.to_vec(), record::claim());
        reply.run(Wait::Others, move |reply| {
            record::begin(claim);
            server.enter_thread();
            server.serve(opcode, &mut Request::copied(header, &args, &mut IoVecs::default()), reply)
        })
    }

    /// Whether the guest is at its limit, so that the request is served later. What asks the host for nothing has no
    /// limit.
    fn must_wait(&self, opcode: Opcode, request: &Request, reply: &mut Reply) -> bool {
        if !opcode.does().contains(Does::ASK_HOST) {
            return false;
        }
        let mut args = request.peek();
        let (kind, bytes) = match opcode {
            Opcode::Read => (Kind::Read, args.take::<ReadIn>().map_or(0, |args| args.size)),
            Opcode::Write => (Kind::Write, args.take::<WriteIn>().map_or(0, |args| args.size)),
            // It takes its bytes when it has moved them.
            Opcode::CopyFileRange | Opcode::CopyFileRange64 => (Kind::Write, 0),
            _ => (Kind::Metadata, 0),
        };
        let bytes = bytes.min(DATA_BYTES as u32).into();
        if self.throttle.admit(kind, bytes) {
            return false;
        }
        let Some((serve, stopping)) = reply.defer(self.throttle.clone()) else { return false };
        self.throttle.wait(kind, bytes, serve);
        if stopping() {
            // The stop may have released the others before.
            self.throttle.release();
        }
        true
    }

    /// What a request waits for, as far as it is known before it begins. `None`: a queue's worker serves it.
    fn may_block(&self, opcode: Opcode, request: &Request) -> Option<Wait> {
        let (mut does, mut fh, mut other) = (opcode.does(), None, None);
        let (node, mut args) = (request.header.nodeid, request.peek());
        match opcode {
            Opcode::Open => does.set(Does::TRUNCATE, args.take::<OpenIn>().ok()?.flags & libc::O_TRUNC as u32 != 0),
            Opcode::Setattr => {
                let args: SetattrIn = args.take().ok()?;
                let valid = SetattrValid::from_bits_retain(args.valid);
                does.set(Does::TRUNCATE, valid.contains(SetattrValid::SIZE));
                fh = valid.contains(SetattrValid::FH).then_some(args.fh);
            }
            Opcode::Fsync | Opcode::Fsyncdir => fh = Some(args.take::<FsyncIn>().ok()?.fh),
            Opcode::Fallocate => {
                let args: FallocateIn = args.take().ok()?;
                // Removing blocks may wait for another daemon, as a truncation does.
                let removes = args.mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) as u32 != 0;
                does.set(Does::TAKE_LONG, removes || args.length > COPY_PIECE);
                fh = Some(args.fh);
            }
            Opcode::CopyFileRange | Opcode::CopyFileRange64 => {
                let args: CopyFileRangeIn = args.take().ok()?;
                does.set(Does::TAKE_LONG, args.len > COPY_PIECE);
                (fh, other) = (Some(args.fh_in), Some(args.nodeid_out));
            }
            Opcode::Link => other = Some(args.take::<LinkIn>().ok()?.oldnodeid),
            _ => {}
        }
        // The other node is one whose times the request sees.
        self.fs.may_block(does, node, fh).or_else(|| self.fs.may_block(Does::SEE_TIMES, other?, None))
    }

    fn init(&self, request: &mut Request, reply: &mut Reply) -> Result<()> {
        let compat: InitInCompat = request.take()?;
        if compat.major > KERNEL_VERSION {
            // The guest sends INIT again, with this version.
            return reply.put(&InitOut { major: KERNEL_VERSION, minor: KERNEL_MINOR_VERSION, ..Default::default() });
        }
        if compat.major < KERNEL_VERSION || compat.minor < MIN_MINOR_VERSION {
            tracing::error!(
                "the guest speaks FUSE {}.{}, older than 7.{MIN_MINOR_VERSION}: use Linux 5.0 or later in the guest",
                compat.major,
                compat.minor
            );
            return Err(Errno::PROTO);
        }
        let mut offered = u64::from(compat.flags);
        if offered & InitFlags::INIT_EXT.bits() != 0 {
            offered |= u64::from(request.take::<u32>()?) << 32;
        }
        // A guest that was reset, for example, has sent no DESTROY.
        self.reset();
        self.minor.store(compat.minor, Ordering::Relaxed);
        let Session { flags, map_alignment } = self.fs.init(InitFlags::from_bits_truncate(offered))?;
        let out = move |flags: InitFlags| {
            tracing::debug!(minor = compat.minor, ?flags, "session");
            init_out(&compat, flags, map_alignment)
        };
        if !flags.contains(InitFlags::PASSTHROUGH_SHM) {
            self.open(flags.bits(), compat.minor);
            return reply.put(&out(flags));
        }
        let (open, reply) = (self.session.clone(), reply.detach());
        self.fs.start_passthrough(Box::new(move |started: Result<()>| {
            let flags = if started.is_ok() { flags } else { flags - InitFlags::PASSTHROUGH_SHM };
            // Unless the session was taken over from another daemon meanwhile.
            let _ = open.compare_exchange(CLOSED, flags.bits(), Ordering::AcqRel, Ordering::Relaxed);
            reply.answer(Ok(out(flags)));
        }));
        Ok(())
    }
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
