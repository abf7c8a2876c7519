//! How much a hostile guest can make the daemon hold: chains, memory, threads. This file is a process of its own,
//! because it counts what is allocated.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use common::wait_until;
use thruway::device::{self, Handler, Urings};
use thruway::fuse::abi::*;
use thruway::fuse::metrics::LateMeter;
use thruway::fuse::ops::Wait;
use thruway::fuse::{Io, ReplySender, Transport, Work};
use thruway::limits::{LOCK_THREADS, Limit, QUEUE_BYTES, URING_REQUESTS, WORK_THREADS};
use thruway_bench::frontend::{Frontend, Options};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress};
use zerocopy::IntoBytes;

/// Replies at once.
const FAST: u32 = 1000;
/// Reads from a stream to which nobody writes.
const READ: u32 = 1001;
/// Waits for the host's file system, until the gate opens.
const SLOW: u32 = 1002;
/// Waits for a lock, until the gate opens.
const LOCK: u32 = 1003;
/// Runs until it is told to end.
const COPY: u32 = 1004;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

const LONG: Duration = Duration::from_secs(60);

/// Counts the allocated bytes.
struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all work is the system allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The tests of this file run one after the other, because they share the counters.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Counts the errors that are logged.
struct Errors;

static ERRORS: AtomicUsize = AtomicUsize::new(0);

impl<S: tracing::Subscriber> Layer<S> for Errors {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        ERRORS.fetch_add(usize::from(*event.metadata().level() == tracing::Level::ERROR), Ordering::SeqCst);
    }
}

#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn wait(&self) {
        drop(self.opened.wait_while(self.open.lock().unwrap(), |open| !*open).unwrap());
    }

    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

#[derive(Default)]
struct Seen {
    fast: AtomicUsize,
    read: AtomicUsize,
    slow: AtomicUsize,
    lock: AtomicUsize,
    running: AtomicUsize,
    gate: Gate,
}

struct Stub {
    seen: Arc<Seen>,
    stream: OwnedFd,
}

impl Handler for Stub {
    fn handle(&self, work: &mut Work, from: &mut dyn Transport) -> usize {
        let mut header = InHeader::default();
        work.readable.read_at(0, header.as_mut_bytes());
        let unique = header.unique;
        let reply = move || OutHeader { len: 16, error: 0, unique }.as_bytes().to_vec();
        let seen = self.seen.clone();
        match header.opcode {
            READ if from.may_wait() => {
                seen.running.fetch_add(1, Ordering::SeqCst);
                seen.gate.wait();
                work.writable.write_at(0, &reply())
            }
            READ => {
                seen.read.fetch_add(1, Ordering::SeqCst);
                let file = self.stream.try_clone().unwrap();
                let data = work.writable.range(16..16 + (1 << 12));
                from.io(Io { unique, file, offset: 0, write: false, long: false, meter: LateMeter::default() }, &data);
                0
            }
            SLOW | COPY if !from.may_wait() => {
                seen.slow.fetch_add(usize::from(header.opcode == SLOW), Ordering::SeqCst);
                from.serve_anew(None);
                0
            }
            SLOW => {
                seen.running.fetch_add(1, Ordering::SeqCst);
                seen.gate.wait();
                work.writable.write_at(0, &reply())
            }
            COPY => {
                seen.running.fetch_add(1, Ordering::SeqCst);
                wait_until("it is to stop", || from.stopping());
                work.writable.write_at(0, &reply())
            }
            LOCK => {
                seen.lock.fetch_add(1, Ordering::SeqCst);
                let gate = seen.clone();
                let lock = move |back: ReplySender| {
                    gate.gate.wait();
                    back(reply());
                };
                match from.run(Wait::Lock, Box::new(lock)) {
                    Ok(()) => 0,
                    Err(errno) => {
                        let refused = OutHeader { len: 16, error: -errno.raw_os_error(), unique };
                        work.writable.write_at(0, refused.as_bytes())
                    }
                }
            }
            _ => {
                seen.fast.fetch_add(1, Ordering::SeqCst);
                work.writable.write_at(0, &reply())
            }
        }
    }

    fn reset(&self) {}
}

struct Daemon {
    frontend: Frontend,
    seen: Arc<Seen>,
    /// Its end ends the reads.
    peer: Mutex<Option<UnixStream>>,
    thread: JoinHandle<Result<(), device::Error>>,
}

impl Daemon {
    fn start(urings: Urings) -> Self {
        let (stream, peer) = UnixStream::pair().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let options = device::Options { urings: Arc::new(urings), ..Default::default() };
        let seen = Arc::new(Seen::default());
        let handler = Arc::new(Stub { seen: seen.clone(), stream: stream.into() });
        let thread = thread::spawn(move || device::serve(listener, handler, options));
        let options = Options { queue_size: 1024, mem_size: 64 << 20, ..Options::default() };
        let frontend = Frontend::connect(&dir.path().join("socket"), options).unwrap();
        Self { frontend, seen, peer: Mutex::new(Some(peer)), thread }
    }

    /// Writes a chain into the descriptor `head`: a header, and `parts` writable buffers that do not touch each other.
    fn chain(&self, head: u16, opcode: u32, parts: u64) {
        let frontend = &self.frontend;
        let at = frontend.alloc(1, 4096 + 32 * (parts as usize + 1)).unwrap();
        let put = |addr, bytes: &[u8]| frontend.memory().write_slice(bytes, GuestAddress(addr)).unwrap();
        put(at, &frontend.header(opcode, 0, 0).1);
        let (table, buffers) = (at + 4096, at + 4096 + 16 * (parts + 1));
        let write = |n: u64, descriptor| {
            frontend.memory().write_obj::<Descriptor>(descriptor, GuestAddress(table + 16 * n)).unwrap();
        };
        write(0, Descriptor::new(at, 40, NEXT, 1));
        for n in 1..=parts {
            let flags = if n < parts { WRITE | NEXT } else { WRITE };
            let len = if parts > 2 { 1 } else { 8 };
            write(n, Descriptor::new(buffers + 16 * n, len, flags, n as u16 + 1));
        }
        let all = Descriptor::new(table, 16 * (parts as u32 + 1), INDIRECT, 0);
        frontend.write_descriptor(1, head, all).unwrap();
    }

    fn submit(&self, opcode: u32) -> thruway_bench::frontend::Token {
        self.frontend.submit(1, &[&self.frontend.header(opcode, 0, 0).1], &[16]).unwrap()
    }

    /// The error of the next reply.
    fn next_error(&self) -> i32 {
        let done = self.frontend.wait(1, LONG).unwrap();
        i32::from_le_bytes(done.data[4..8].try_into().unwrap())
    }

    fn end(self) {
        self.seen.gate.open();
        drop(self.peer);
        drop(self.frontend);
        self.thread.join().unwrap().unwrap();
    }
}

/// If a driver breaks the rules, its queue is no longer served until it resets the device. Other queues are. The log
/// says so once.
#[test]
fn a_driver_that_offers_a_wrong_head_loses_that_queue() {
    let _alone = alone();
    let _ = tracing_subscriber::registry().with(Errors).try_init();
    let [a, b, slow] = [1021, 1022, 1023];
    for bad in [slow, 1024, u16::MAX] {
        let mut daemon = Daemon::start(Urings::none());
        daemon.chain(a, FAST, 2);
        daemon.chain(b, FAST, 2);
        daemon.chain(slow, SLOW, 2);
        let (frontend, seen) = (&daemon.frontend, &daemon.seen);
        let errors = ERRORS.load(Ordering::SeqCst);
        frontend.push_raw(1, slow).unwrap();
        wait_until("it runs", || seen.running.load(Ordering::SeqCst) == 1);
        // The worker takes all three at a time: when `a` is back, it has seen the others.
        frontend.offer(1, &[a, bad, b]).unwrap();
        frontend.kick(1).unwrap();
        assert_eq!(frontend.wait_raw(1, LONG).unwrap(), (a.into(), 16));
        (0..10_000).for_each(|_| frontend.push_raw(1, bad).unwrap());
        // Chains that were taken before still come back.
        seen.gate.open();
        assert_eq!(frontend.wait_raw(1, LONG).unwrap(), (slow.into(), 16));
        frontend.request(0, FAST, 0, b"", b"", 0).unwrap();
        frontend.stop_queue(1).unwrap();
        assert_eq!((seen.slow.load(Ordering::SeqCst), seen.fast.load(Ordering::SeqCst)), (1, 2));
        assert_eq!(ERRORS.load(Ordering::SeqCst) - errors, 1);
        daemon.frontend.reset_device().unwrap();
        daemon.frontend.request(1, FAST, 0, b"", b"", 0).unwrap();
        daemon.end();
    }
}

/// A driver may offer a head again as soon as it is in the used ring.
#[test]
fn a_head_that_came_back_may_be_offered_again() {
    let _alone = alone();
    let daemon = Daemon::start(Urings::none());
    daemon.chain(1023, FAST, 2);
    daemon.chain(1022, SLOW, 2);
    daemon.seen.gate.open();
    for head in [1023, 1022].into_iter().cycle().take(5000) {
        daemon.frontend.push_raw(1, head).unwrap();
        assert_eq!(daemon.frontend.wait_raw(1, LONG).unwrap(), (head.into(), 16));
    }
    daemon.end();
}

/// The worst that a guest can have in flight: cold reads into as many buffers as a chain can have, and syncs whose
/// replies go into as many.
#[test]
fn the_memory_of_requests_in_flight_is_bounded() {
    let _alone = alone();
    [READ, SLOW].into_iter().for_each(fill);
}

fn fill(opcode: u32) {
    let daemon = Daemon::start(Urings::new(1));
    let (frontend, seen) = (&daemon.frontend, &daemon.seen);
    let before = BYTES.load(Ordering::Relaxed);
    daemon.chain(0, opcode, 1022);
    let descriptor = |head: u64| GuestAddress(frontend.layout(1).descriptors + 16 * head);
    let chain: [u8; 16] = frontend.memory().read_obj(descriptor(0)).unwrap();
    (1..1024).for_each(|head| frontend.memory().write_obj(chain, descriptor(head)).unwrap());
    let all: Vec<u16> = (0..1024).collect();
    frontend.offer(1, &all).unwrap();
    frontend.kick(1).unwrap();
    let taken = || seen.read.load(Ordering::SeqCst) + seen.slow.load(Ordering::SeqCst);
    wait_until("all threads work", || taken() == 1024 && seen.running.load(Ordering::SeqCst) == WORK_THREADS);
    let bounded = || {
        let taken = BYTES.load(Ordering::Relaxed) - before;
        assert!(taken < QUEUE_BYTES, "{taken} bytes");
    };
    bounded();
    for _ in 0..10 {
        frontend.offer(1, &all).unwrap();
        frontend.kick(1).unwrap();
    }
    thread::scope(|scope| {
        let stop = scope.spawn(|| frontend.stop_queue(1).unwrap());
        wait_until("it is served", || frontend.request(0, FAST, 0, b"", b"", 0).is_ok());
        bounded();
        seen.gate.open();
        drop(daemon.peer.lock().unwrap().take());
        stop.join().unwrap();
    });
    // A stop of the queue returns all chains, wherever they were.
    assert_eq!(std::iter::from_fn(|| frontend.poll_raw(1).unwrap()).count(), 1024);
    assert!(seen.running.load(Ordering::SeqCst) >= 1024 - URING_REQUESTS);
    daemon.end();
}

/// There are more syncs than threads.
#[test]
fn slow_requests_wait_for_a_thread() {
    let _alone = alone();
    let daemon = Daemon::start(Urings::none());
    for _ in 0..1000 {
        daemon.submit(SLOW);
    }
    wait_until("all wait", || daemon.seen.slow.load(Ordering::SeqCst) == 1000);
    assert!(daemon.seen.running.load(Ordering::SeqCst) <= WORK_THREADS);
    daemon.seen.gate.open();
    (0..1000).for_each(|_| assert_eq!(daemon.next_error(), 0));
    daemon.end();
}

/// Waiting for locks that are never released does not hold up syncs.
#[test]
fn waiting_locks_take_no_thread_from_syncs() {
    let _alone = alone();
    let (daemon, refused) = (Daemon::start(Urings::none()), Limit::LockThreads.times());
    for _ in 0..LOCK_THREADS + 44 {
        daemon.submit(LOCK);
    }
    // The ones over the limit are refused.
    (0..44).for_each(|_| assert_eq!(daemon.next_error(), -libc::EAGAIN));
    assert_eq!(Limit::LockThreads.times(), refused + 44);
    daemon.submit(SLOW);
    wait_until("it runs", || daemon.seen.running.load(Ordering::SeqCst) == 1);
    daemon.seen.gate.open();
    (0..=LOCK_THREADS).for_each(|_| assert_eq!(daemon.next_error(), 0));
    daemon.end();
}

/// A stop, a disable or a reset of the queue ends jobs that can end early.
#[test]
fn a_stop_ends_jobs_that_can_end_early() {
    use vhost::vhost_user::VhostUserFrontend;

    let _alone = alone();
    let mut daemon = Daemon::start(Urings::none());
    let (copies, per_thread) = (2 * WORK_THREADS, WORK_THREADS);
    let begin = |daemon: &Daemon| {
        let ended = daemon.seen.running.load(Ordering::SeqCst);
        for _ in 0..copies {
            daemon.submit(COPY);
        }
        wait_until("others run", || daemon.seen.running.load(Ordering::SeqCst) == ended + per_thread);
        daemon.frontend.request(1, FAST, 0, b"", b"", 0).unwrap();
    };
    begin(&daemon);
    let base = daemon.frontend.stop_queue(1).unwrap();
    daemon.frontend.start_queue(1, base).unwrap();
    (0..copies).for_each(|_| assert_eq!(daemon.next_error(), 0));
    begin(&daemon);
    daemon.frontend.vhost().set_vring_enable(1, false).unwrap();
    daemon.frontend.vhost().set_vring_enable(1, true).unwrap();
    (0..copies).for_each(|_| assert_eq!(daemon.next_error(), 0));
    begin(&daemon);
    daemon.frontend.reset_device().unwrap();
    assert_eq!(daemon.seen.running.load(Ordering::SeqCst), 3 * copies);
    daemon.end();
}
