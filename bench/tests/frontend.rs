//! Tests the device with a frontend in the same process: transport, late replies and hostile rings.

use std::collections::{HashMap, HashSet};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use thruway::device::{self, Error, Handler};
use thruway::fuse::ops::Wait;
use thruway::fuse::{Transport, Work};
use thruway_bench::frontend::{Frontend, MEMORY_BASE, Options};
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress};

const NEXT: u16 = VRING_DESC_F_NEXT as u16;
const WRITE: u16 = VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

/// Replies with the request's body.
const ECHO: u32 = 1000;
/// Replies with the name of the worker's thread.
const NAME: u32 = 1001;
/// Replies when the gate with the nodeid's number opens, or with EINTR at a reset.
const WAIT: u32 = 1002;
/// Replies after 5 ms, and blocks the worker until then.
const SLOW: u32 = 1003;

const SHORT: Duration = Duration::from_millis(150);
/// A limit on hangs.
const LONG: Duration = Duration::from_secs(100);

/// A handler that the tests control.
#[derive(Default)]
struct Stub {
    gates: Arc<(Mutex<Gates>, Condvar)>,
    resets: AtomicUsize,
    slow_done: AtomicUsize,
}

#[derive(Default)]
struct Gates {
    open: HashSet<u64>,
    session: u64,
    ended: usize,
}

impl Stub {
    fn open(&self, gate: u64) {
        self.gates.0.lock().unwrap().open.insert(gate);
        self.gates.1.notify_all();
    }

    /// Waits until `n` WAIT requests have ended.
    fn await_ended(&self, n: usize) {
        let gates = self.gates.0.lock().unwrap();
        let (gates, _) = self.gates.1.wait_timeout_while(gates, LONG, |gates| gates.ended < n).unwrap();
        assert_eq!(gates.ended, n);
    }

    fn wait(&self, gate: u64, unique: u64, from: &mut dyn Transport) -> Result<(), Errno> {
        let gates = self.gates.clone();
        let session = gates.0.lock().unwrap().session;
        let wait = move || {
            let shut = |gates: &mut Gates| !gates.open.contains(&gate) && gates.session == session;
            let mut state = gates.1.wait_while(gates.0.lock().unwrap(), shut).unwrap();
            state.ended += 1;
            gates.1.notify_all();
            reply(unique, if state.session == session { 0 } else { -libc::EINTR }, b"late")
        };
        from.run(Wait::Lock, Box::new(move |back| back(wait())))
    }
}

fn reply(unique: u64, error: i32, body: &[u8]) -> Vec<u8> {
    let len = 16 + body.len() as u32;
    [&len.to_le_bytes()[..], &error.to_le_bytes(), &unique.to_le_bytes(), body].concat()
}

impl Handler for Stub {
    fn handle(&self, work: &mut Work, from: &mut dyn Transport) -> usize {
        let mut head = [0; 40];
        if work.readable.read_at(0, &mut head) < 40 {
            return 0;
        }
        let opcode = u32::from_le_bytes(head[4..8].try_into().unwrap());
        let unique = u64::from_le_bytes(head[8..16].try_into().unwrap());
        let nodeid = u64::from_le_bytes(head[16..24].try_into().unwrap());
        let mut body = vec![0; work.readable.len() - 40];
        work.readable.read_at(40, &mut body);
        let reply = match opcode {
            ECHO => reply(unique, 0, &body),
            NAME => reply(unique, 0, std::fs::read("/proc/thread-self/comm").unwrap().trim_ascii_end()),
            WAIT => match self.wait(nodeid, unique, from) {
                Ok(()) => return 0,
                Err(errno) => reply(unique, -errno.raw_os_error(), &[]),
            },
            SLOW => {
                thread::sleep(Duration::from_millis(5));
                self.slow_done.fetch_add(1, Ordering::SeqCst);
                reply(unique, 0, &[])
            }
            _ => reply(unique, -libc::ENOSYS, &[]),
        };
        if reply.len() > work.writable.len() {
            return 0;
        }
        work.writable.write_at(0, &reply)
    }

    fn reset(&self) {
        self.resets.fetch_add(1, Ordering::SeqCst);
        self.gates.0.lock().unwrap().session += 1;
        self.gates.1.notify_all();
    }
}

/// A daemon in a thread of the test.
struct Daemon {
    path: PathBuf,
    handler: Arc<Stub>,
    thread: JoinHandle<Result<(), Error>>,
}

impl Daemon {
    fn start(request_queues: u16, keep_alive: bool, tag: Option<&str>) -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("thruway-test-{}-{number}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let handler = Arc::new(Stub::default());
        let options = device::Options { tag: tag.map(str::to_owned), request_queues, keep_alive, ..Default::default() };
        let served = handler.clone();
        let thread = thread::spawn(move || device::serve(listener, served, options));
        Self { path, handler, thread }
    }

    fn connect(&self, options: Options) -> Frontend {
        Frontend::connect(&self.path, options).unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn pair(options: Options) -> (Daemon, Frontend) {
    let daemon = Daemon::start(options.queues as u16 - 1, false, None);
    let frontend = daemon.connect(options);
    (daemon, frontend)
}

fn echo(frontend: &Frontend, queue: usize) {
    assert_eq!(frontend.request(queue, ECHO, 1, b"hello", b"", 4096).unwrap(), b"hello");
}

fn submit_wait(frontend: &Frontend, gate: u64) -> thruway_bench::frontend::Token {
    let (_, head) = frontend.header(WAIT, gate, 0);
    frontend.submit(1, &[&head], &[16, 4096]).unwrap()
}

/// Waits until the worker has taken all requests submitted to the queue: it takes them in order.
fn settle(frontend: &Frontend) {
    echo(frontend, 1);
}

fn submit_many(frontend: &Frontend, n: usize, opcode: u32) {
    for _ in 0..n {
        frontend.submit(1, &[&frontend.header(opcode, 1, 0).1], &[16]).unwrap();
    }
}

/// Waits until this is so.
fn until(mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < end);
        thread::sleep(Duration::from_millis(1));
    }
}

fn nothing_comes(frontend: &Frontend) {
    assert_eq!(frontend.wait_raw(1, SHORT).unwrap_err().raw_os_error(), Some(libc::ETIMEDOUT));
}

#[test]
fn requests_get_replies() {
    for (event_idx, indirect) in [(false, false), (false, true), (true, false), (true, true)] {
        let (_daemon, frontend) = pair(Options { event_idx, indirect, queue_size: 16, ..Options::default() });
        for queue in [0, 1] {
            for size in [0, 1, 100, 4096, 100_000, 1 << 20] {
                let data: Vec<u8> = (0..size).map(|i| (i * 7) as u8).collect();
                assert_eq!(frontend.request(queue, ECHO, 1, b"", &data, size).unwrap(), data);
            }
            assert_eq!(frontend.request(queue, 77, 1, b"", b"", 10), Err(libc::ENOSYS));
        }
        // More requests at once than a batch, and more in all than the ring's indices can count.
        for _ in 0..6000 {
            let tokens: Vec<_> = (0..if indirect { 16 } else { 5 })
                .map(|_| frontend.submit(1, &[&frontend.header(ECHO, 1, 0).1], &[16, 16]).unwrap())
                .collect();
            for token in tokens {
                assert_eq!(frontend.wait_for(1, token, LONG).unwrap().len, 16);
            }
        }
    }
}

#[test]
fn every_queue_has_a_thread() {
    let (_daemon, frontend) = pair(Options { queues: 9, ..Options::default() });
    let name = |queue| String::from_utf8(frontend.request(queue, NAME, 1, b"", b"", 64).unwrap()).unwrap();
    assert_eq!(name(0), "thruway-hiprio");
    for queue in 1..9 {
        assert_eq!(name(queue), format!("thruway-q{}", queue - 1));
    }
}

#[test]
fn options_are_checked() {
    let listen = |n| {
        let path = std::env::temp_dir().join(format!("thruway-test-{}-bad-{n}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        listener
    };
    let handler = Arc::new(Stub::default());
    for (n, request_queues) in [0, 64].into_iter().enumerate() {
        let options = device::Options { request_queues, ..Default::default() };
        assert!(matches!(device::serve(listen(n), handler.clone(), options), Err(Error::RequestQueues(_))));
    }
    for (n, len) in [0, 37].into_iter().enumerate() {
        let options = device::Options { tag: Some("x".repeat(len)), ..Default::default() };
        assert!(matches!(device::serve(listen(9 + n), handler.clone(), options), Err(Error::Tag(_))));
    }
}

#[test]
fn the_tag_is_in_config_space() {
    let daemon = Daemon::start(3, false, Some("share"));
    let mut frontend = daemon.connect(Options::default());
    let config = frontend.config(0, 44).unwrap();
    assert_eq!(&config[..6], b"share\0");
    assert_eq!(config[36..], [3, 0, 0, 0, 0, 0, 0, 0]);
    let daemon = Daemon::start(3, false, None);
    assert!(daemon.connect(Options::default()).config(0, 40).is_err());
}

/// QEMU without share=on has no memory to send. The rings' addresses are the first that it misses.
#[test]
fn a_frontend_that_shares_no_memory_is_told_how() {
    use vhost::vhost_user::VhostUserFrontend;
    use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;
    use vhost::{VhostBackend, VringConfigData};

    let mut daemon = Daemon::start(1, false, None);
    let mut frontend = vhost::vhost_user::Frontend::connect(&daemon.path, 2).unwrap();
    frontend.set_owner().unwrap();
    let features = frontend.get_features().unwrap();
    let offered = frontend.get_protocol_features().unwrap();
    frontend.set_protocol_features(offered & (Protocol::MQ | Protocol::REPLY_ACK)).unwrap();
    frontend.set_features(features).unwrap();
    frontend.set_vring_num(0, 128).unwrap();
    let _ = frontend.set_vring_addr(0, &VringConfigData { queue_max_size: 128, queue_size: 128, ..Default::default() });
    drop(frontend);
    let thread = std::mem::replace(&mut daemon.thread, thread::spawn(|| Ok(())));
    let end = thread.join().unwrap();
    assert!(matches!(end, Err(Error::NotShared)), "{end:?}");
    assert!(Error::NotShared.to_string().contains("share=on"));
}

/// QEMU's num-request-queues is 1 by default, and cloud-hypervisor's num_queues too. The daemon offers more.
#[test]
fn a_frontend_may_use_fewer_queues_than_there_are() {
    for tag in [None, Some("share")] {
        for used in [1, 2, 5] {
            let daemon = Daemon::start(device::MAX_REQUEST_QUEUES, false, tag);
            let mut frontend = daemon.connect(Options { queues: used, ..Options::default() });
            (0..used).for_each(|queue| echo(&frontend, queue));
            if tag.is_some() {
                let config = frontend.config(36, 4).unwrap();
                assert_eq!(config, u32::from(device::MAX_REQUEST_QUEUES).to_le_bytes());
            }
            (0..used).for_each(|queue| echo(&frontend, queue));
        }
    }
}

#[test]
fn the_daemon_ends_with_its_frontend() {
    let (mut daemon, frontend) = pair(Options::default());
    submit_wait(&frontend, 1);
    settle(&frontend);
    drop(frontend);
    let thread = std::mem::replace(&mut daemon.thread, thread::spawn(|| Ok(())));
    thread.join().unwrap().unwrap();
    assert_eq!(daemon.handler.resets.load(Ordering::SeqCst), 1);
    daemon.handler.await_ended(1);
}

#[test]
fn a_waiting_request_delays_no_other() {
    let (daemon, frontend) = pair(Options::default());
    let tokens: Vec<_> = (0..8).map(|gate| submit_wait(&frontend, gate)).collect();
    for _ in 0..100 {
        echo(&frontend, 1);
    }
    for gate in [5, 0, 7, 1, 2, 6, 3, 4] {
        daemon.handler.open(gate as u64);
        let done = frontend.wait(1, LONG).unwrap();
        assert_eq!(done.token, tokens[gate]);
        assert_eq!(done.data[16..], *b"late");
    }
}

#[test]
fn too_many_waiting_locks_get_eagain() {
    let options = Options { queue_size: 1024, mem_size: 64 << 20, ..Options::default() };
    let (daemon, frontend) = pair(options);
    for _ in 0..256 {
        submit_wait(&frontend, 1);
    }
    assert_eq!(frontend.request(1, WAIT, 1, b"", b"", 64), Err(libc::EAGAIN));
    daemon.handler.open(1);
    for _ in 0..256 {
        assert_eq!(frontend.wait(1, LONG).unwrap().len, 20);
    }
    assert_eq!(frontend.request(1, WAIT, 1, b"", b"", 64).unwrap(), b"late");
}

#[test]
fn a_paused_ring_keeps_its_replies() {
    let (daemon, mut frontend) = pair(Options::default());
    let (first, second) = (submit_wait(&frontend, 1), submit_wait(&frontend, 2));
    settle(&frontend);
    let base = frontend.stop_queue(1).unwrap();
    assert_eq!(base, 3);
    daemon.handler.open(1);
    daemon.handler.await_ended(1);
    nothing_comes(&frontend);
    frontend.set_memory().unwrap();
    frontend.start_queue(1, base).unwrap();
    assert_eq!(frontend.wait(1, LONG).unwrap().token, first);
    daemon.handler.open(2);
    assert_eq!(frontend.wait(1, LONG).unwrap().token, second);
    echo(&frontend, 1);
}

#[test]
fn a_disabled_ring_keeps_its_replies() {
    use vhost::vhost_user::VhostUserFrontend;

    let (daemon, mut frontend) = pair(Options::default());
    let token = submit_wait(&frontend, 1);
    settle(&frontend);
    frontend.vhost().set_vring_enable(1, false).unwrap();
    daemon.handler.open(1);
    daemon.handler.await_ended(1);
    let other = frontend.submit(1, &[&frontend.header(ECHO, 1, 0).1], &[16, 16]).unwrap();
    nothing_comes(&frontend);
    frontend.vhost().set_vring_enable(1, true).unwrap();
    assert_eq!(frontend.wait(1, LONG).unwrap().token, token);
    assert_eq!(frontend.wait(1, LONG).unwrap().token, other);
}

#[test]
fn a_rebooted_ring_gets_no_old_replies() {
    let (daemon, mut frontend) = pair(Options::default());
    submit_wait(&frontend, 1);
    submit_wait(&frontend, 2);
    settle(&frontend);
    frontend.stop_queue(1).unwrap();
    daemon.handler.open(1);
    daemon.handler.await_ended(1);
    frontend.clear_queue(1).unwrap();
    frontend.start_queue(1, 0).unwrap();
    daemon.handler.open(2);
    daemon.handler.await_ended(2);
    nothing_comes(&frontend);
    echo(&frontend, 1);
}

#[test]
fn a_reset_device_gets_no_old_replies() {
    let (daemon, mut frontend) = pair(Options::default());
    submit_wait(&frontend, 1);
    settle(&frontend);
    frontend.reset_device().unwrap();
    assert_eq!(daemon.handler.resets.load(Ordering::SeqCst), 1);
    daemon.handler.await_ended(1);
    nothing_comes(&frontend);
    echo(&frontend, 0);
    echo(&frontend, 1);
}

#[test]
fn a_stop_waits_for_the_requests_under_way() {
    let (daemon, mut frontend) = pair(Options::default());
    submit_many(&frontend, 40, SLOW);
    until(|| daemon.handler.slow_done.load(Ordering::SeqCst) > 0);
    let base = frontend.stop_queue(1).unwrap();
    assert!((1..40).contains(&base));
    assert_eq!(usize::from(base), daemon.handler.slow_done.load(Ordering::SeqCst));
    (0..base).for_each(|_| assert_eq!(frontend.wait(1, LONG).unwrap().len, 16));
    nothing_comes(&frontend);
    frontend.start_queue(1, base).unwrap();
    (base..40).for_each(|_| assert_eq!(frontend.wait(1, LONG).unwrap().len, 16));
    echo(&frontend, 1);
}

#[test]
fn a_disabled_ring_is_left_alone() {
    use vhost::vhost_user::VhostUserFrontend;

    let (daemon, mut frontend) = pair(Options::default());
    submit_many(&frontend, 40, SLOW);
    until(|| daemon.handler.slow_done.load(Ordering::SeqCst) > 0);
    frontend.vhost().set_vring_enable(1, false).unwrap();
    let done = daemon.handler.slow_done.load(Ordering::SeqCst);
    thread::sleep(SHORT);
    assert_eq!(daemon.handler.slow_done.load(Ordering::SeqCst), done);
    assert!(done < 40);
    frontend.vhost().set_vring_enable(1, true).unwrap();
    (0..40).for_each(|_| assert_eq!(frontend.wait(1, LONG).unwrap().len, 16));
}

#[test]
fn a_late_call_event_is_signalled() {
    use vhost::vhost_user::VhostUserFrontend;

    let (_daemon, mut frontend) = pair(Options::default());
    frontend.stop_queue(1).unwrap();
    frontend.prepare_queue(1, 0).unwrap();
    frontend.vhost().set_vring_enable(1, true).unwrap();
    let token = frontend.submit(1, &[&frontend.header(ECHO, 1, 0).1], &[16]).unwrap();
    thread::sleep(SHORT);
    assert_eq!(frontend.interrupts(1), 0);
    frontend.set_call(1).unwrap();
    assert_eq!(frontend.interrupts(1), 1);
    assert_eq!(frontend.wait(1, LONG).unwrap().token, token);
}

#[test]
fn one_notification_serves_many_replies() {
    let (_daemon, mut frontend) = pair(Options::default());
    assert_eq!(frontend.stop_queue(1).unwrap(), 0);
    submit_many(&frontend, 16, ECHO);
    frontend.start_queue(1, 0).unwrap();
    let used = GuestAddress(frontend.layout(1).used + 2);
    until(|| frontend.memory().read_obj::<u16>(used).unwrap() == 16);
    thread::sleep(SHORT);
    assert_eq!(frontend.interrupts(1), 1);
}

#[test]
fn written_pages_are_logged() {
    use std::os::fd::AsRawFd;
    use vhost::{VhostBackend, VhostUserDirtyLogRegion};

    const LOG_ALL: u64 = 1 << 26;
    let (_daemon, mut frontend) = pair(Options::default());
    echo(&frontend, 1);
    let log = std::fs::File::from(rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    log.set_len(4096).unwrap();
    let region = VhostUserDirtyLogRegion { mmap_size: 4096, mmap_offset: 0, mmap_handle: log.as_raw_fd() };
    frontend.vhost().set_log_base(0, Some(region)).unwrap();
    frontend.set_features(LOG_ALL).unwrap();
    let buffer = frontend.alloc(1, 3 * 4096).unwrap();
    raw_request(&frontend, &[(buffer + 4090, 16, WRITE), (buffer + 8192, 4096, WRITE)], Some(16 + 5));
    let mut bits = [0; 4096];
    std::os::unix::fs::FileExt::read_exact_at(&log, &mut bits, 0).unwrap();
    let dirty = |addr: u64| bits[(addr >> 15) as usize] & 1 << (addr >> 12 & 7) != 0;
    assert!(dirty(buffer) && dirty(buffer + 4096) && dirty(buffer + 8192));
    assert!(dirty(frontend.layout(1).used));
    assert!(!dirty(frontend.layout(1).available) && !dirty(buffer + 12288));
}

/// Sends ECHO of five bytes with these descriptors after the header's, and checks the length of the reply.
fn raw_request(frontend: &Frontend, rest: &[(u64, u32, u16)], expect: Option<u32>) {
    let (_, header) = frontend.header(ECHO, 1, 5);
    let at = frontend.alloc(1, 64).unwrap();
    frontend.memory().write_slice(&[&header[..], b"hello"].concat(), GuestAddress(at)).unwrap();
    let chain: Vec<_> = std::iter::once((at, 45, 0)).chain(rest.iter().copied()).collect();
    raw_chain(frontend, &chain, expect);
}

/// Sends a chain of (address, length, flags) in direct descriptors. If the device returns it, its length must be
/// `expect`.
fn raw_chain(frontend: &Frontend, chain: &[(u64, u32, u16)], expect: Option<u32>) {
    let indices = frontend.take_descriptors(1, chain.len()).unwrap();
    for (i, (addr, len, flags)) in chain.iter().enumerate() {
        let next = indices.get(i + 1).copied();
        let flags = flags | if next.is_some() { NEXT } else { 0 };
        frontend.write_descriptor(1, indices[i], Descriptor::new(*addr, *len, flags, next.unwrap_or(0))).unwrap();
    }
    frontend.push_raw(1, indices[0]).unwrap();
    expect_used(frontend, indices[0], expect);
}

fn expect_used(frontend: &Frontend, head: u16, expect: Option<u32>) {
    match expect {
        Some(len) => assert_eq!(frontend.wait_raw(1, LONG).unwrap(), (head.into(), len)),
        None => nothing_comes(frontend),
    }
    echo(frontend, 1);
}

/// The error in the reply header at `addr`.
fn error_at(frontend: &Frontend, addr: u64) -> i32 {
    frontend.memory().read_obj(GuestAddress(addr + 4)).unwrap()
}

#[test]
fn buffers_outside_memory_are_refused() {
    let (_daemon, frontend) = pair(Options::default());
    let room = frontend.alloc(1, 4096).unwrap();
    let end = MEMORY_BASE + Options::default().mem_size as u64;
    for bad in [0, MEMORY_BASE - 4, end, end - 4, 1 << 40, u64::MAX - 3, u64::MAX] {
        let clear = || frontend.memory().write_slice(&[0; 64], GuestAddress(room)).unwrap();
        // In turn: data that cannot be read, data that cannot be written, no room for a reply, no header.
        raw_request(&frontend, &[(bad, 8, 0), (room, 16, WRITE), (room + 16, 64, WRITE)], Some(16));
        assert_eq!(error_at(&frontend, room), -libc::EFAULT);
        clear();
        raw_request(&frontend, &[(room, 16, WRITE), (bad, 64, WRITE)], Some(16));
        assert_eq!(error_at(&frontend, room), -libc::EFAULT);
        clear();
        raw_request(&frontend, &[(bad, 16, WRITE), (room + 16, 64, WRITE)], Some(0));
        raw_chain(&frontend, &[(bad, 40, 0), (room, 16, WRITE)], Some(0));
        assert_eq!(error_at(&frontend, room), 0);
    }
    // A length that wraps around.
    raw_request(&frontend, &[(room, u32::MAX, 0), (room, 16, WRITE)], Some(16));
}

#[test]
fn buffers_may_span_regions() {
    // With three queues, the seam lies in the middle queue's memory.
    let (_daemon, frontend) = pair(Options { queues: 3, ..Options::default() });
    let seam = frontend.seam();
    let start = frontend.alloc(1, 4096).unwrap();
    frontend.alloc(1, (seam - start) as usize).unwrap();
    let (unique, header) = frontend.header(ECHO, 1, 5);
    frontend.memory().write_slice(&[&header[..], b"hello"].concat(), GuestAddress(seam - 20)).unwrap();
    raw_chain(&frontend, &[(seam - 20, 45, 0), (seam - 30, 2, WRITE), (seam - 7, 30, WRITE)], Some(21));
    let mut reply = [0; 21];
    frontend.memory().read_slice(&mut reply[..2], GuestAddress(seam - 30)).unwrap();
    frontend.memory().read_slice(&mut reply[2..], GuestAddress(seam - 7)).unwrap();
    assert_eq!(reply[8..16], unique.to_le_bytes());
    assert_eq!(reply[16..], *b"hello");
}

#[test]
fn chains_that_break_the_rules_are_refused() {
    let (_daemon, frontend) = pair(Options::default());
    let room = frontend.alloc(1, 4096).unwrap();
    // A readable descriptor after a writable one.
    raw_request(&frontend, &[(room, 64, WRITE), (room + 64, 8, 0)], Some(16));
    assert_eq!(error_at(&frontend, room), -libc::EINVAL);
    // No room for a reply, or not enough.
    raw_request(&frontend, &[], Some(0));
    raw_request(&frontend, &[(room, 15, WRITE)], Some(0));
    // A header that is too short, and an empty chain.
    raw_chain(&frontend, &[(room, 39, 0), (room, 64, WRITE)], Some(0));
    raw_chain(&frontend, &[(room, 0, 0)], Some(0));
    raw_chain(&frontend, &[(room, 0, WRITE)], Some(0));
    raw_chain(&frontend, &[(room, 64, WRITE)], Some(0));
}

#[test]
fn loops_end() {
    let (_daemon, frontend) = pair(Options::default());
    let room = frontend.alloc(1, 4096).unwrap();
    let (_, header) = frontend.header(ECHO, 1, 0);
    frontend.memory().write_slice(&header, GuestAddress(room)).unwrap();
    let d = frontend.take_descriptors(1, 3).unwrap();
    let answer = room + 64;
    // Sends a chain that must be refused: with a reply, or without one if there is no room for it.
    let send = |table: &[(u16, u64, u32, u16, u16)], answered: bool| {
        for (index, addr, len, flags, next) in table {
            frontend.write_descriptor(1, *index, Descriptor::new(*addr, *len, *flags, *next)).unwrap();
        }
        frontend.memory().write_obj(0u64, GuestAddress(answer)).unwrap();
        frontend.push_raw(1, table[0].0).unwrap();
        expect_used(&frontend, table[0].0, Some(if answered { 16 } else { 0 }));
        assert_eq!(error_at(&frontend, answer), if answered { -libc::EINVAL } else { 0 });
    };
    send(&[(d[0], room, 40, NEXT, d[0])], false);
    send(&[(d[0], room, 40, NEXT, d[1]), (d[1], answer, 16, WRITE | NEXT, d[1])], true);
    // A link back to a readable descriptor, and a link out of the table.
    send(&[(d[0], room, 40, NEXT, d[1]), (d[1], answer, 16, WRITE | NEXT, d[0])], true);
    send(&[(d[0], room, 40, NEXT, d[1]), (d[1], answer, 16, WRITE | NEXT, 9999)], true);
    send(&[(d[0], room, 40, NEXT, 200), (200, answer, 64, WRITE, 0)], false);
    // Indirect tables of odd size, empty, outside memory, huge, with a link after them, and nested.
    let (good, outer) = (room + 1024, room + 2048);
    let write = |addr, descriptor| frontend.memory().write_obj(descriptor, GuestAddress(addr)).unwrap();
    write(good, Descriptor::new(room, 40, NEXT, 1));
    write(good + 16, Descriptor::new(answer, 64, WRITE, 0));
    write(outer, Descriptor::new(good, 32, INDIRECT, 0));
    for (addr, len) in [(good, 0), (good, 33), (0, 16), (u64::MAX, 32), (MEMORY_BASE - 32, 64), (outer, 16)] {
        send(&[(d[0], addr, len, INDIRECT, 0)], false);
    }
    send(&[(d[0], good, 32, INDIRECT | NEXT, d[1])], false);
    // A loop, and a link out of the table.
    write(good + 16, Descriptor::new(answer, 64, WRITE | NEXT, 1));
    send(&[(d[0], good, 32, INDIRECT, 0)], true);
    send(&[(d[0], good, u32::MAX - 15, INDIRECT, 0)], true);
    write(good + 16, Descriptor::new(answer, 64, WRITE | NEXT, 2));
    send(&[(d[0], good, 32, INDIRECT, 0)], true);
    // More descriptors than a chain may have; each of them is valid.
    let long = frontend.alloc(1, 16 * 1025).unwrap();
    write(long, Descriptor::new(room, 40, NEXT, 1));
    for i in 1..1025 {
        let flags = if i < 1024 { WRITE | NEXT } else { WRITE };
        write(long + u64::from(i) * 16, Descriptor::new(answer, 64, flags, i + 1));
    }
    send(&[(d[0], long, 16 * 1025, INDIRECT, 0)], true);
}

#[test]
fn an_absurd_available_index_stops_only_its_queue() {
    // The last possible queue: no other test has a thread of this name.
    let (_daemon, mut frontend) = pair(Options { queues: 64, mem_size: 64 << 20, ..Options::default() });
    (0..64).for_each(|queue| echo(&frontend, queue));
    frontend.memory().write_obj(30_000u16, GuestAddress(frontend.layout(63).available + 2)).unwrap();
    frontend.kick(63).unwrap();
    thread::sleep(SHORT);
    until(|| sleeps("thruway-q62"));
    echo(&frontend, 62);
    assert_eq!(frontend.stop_queue(63).unwrap(), 1);
    frontend.clear_queue(63).unwrap();
    frontend.start_queue(63, 0).unwrap();
    echo(&frontend, 63);
}

/// Whether the thread of this name sleeps.
fn sleeps(name: &str) -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let stats = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("stat")).ok());
    stats.filter(|stat| stat.contains(&format!("({name})"))).all(|stat| stat.contains(") S "))
}

#[test]
fn random_rings_do_no_harm() {
    let (_daemon, mut frontend) = pair(Options { queue_size: 32, ..Options::default() });
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let heap = frontend.alloc(1, 64 << 10).unwrap();
    for _ in 0..300 {
        for index in 0..32 {
            frontend.write_descriptor(1, index, random.descriptor(heap, 31)).unwrap();
        }
        for index in 0..512 {
            let at = GuestAddress(heap + index * 16);
            frontend.memory().write_obj(random.descriptor(heap, 511), at).unwrap();
        }
        (0..16).for_each(|_| frontend.push_raw(1, random.below(34) as u16).unwrap());
        echo(&frontend, 0);
        frontend.stop_queue(1).unwrap();
        frontend.clear_queue(1).unwrap();
        assert_eq!(frontend.alloc(1, 64 << 10).unwrap(), heap);
        frontend.start_queue(1, 0).unwrap();
        echo(&frontend, 1);
        frontend.stop_queue(1).unwrap();
        frontend.clear_queue(1).unwrap();
        assert_eq!(frontend.alloc(1, 64 << 10).unwrap(), heap);
        frontend.start_queue(1, 0).unwrap();
    }
}

/// A xorshift generator.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }

    fn descriptor(&mut self, heap: u64, links: u64) -> Descriptor {
        let addr = match self.below(8) {
            0 => self.below(u64::MAX),
            1 => MEMORY_BASE + (16 << 20) - self.below(64),
            _ => heap + self.below(32) * 256,
        };
        let len = match self.below(8) {
            0 => self.below(1 << 32),
            n => n * 16,
        };
        Descriptor::new(addr, len as u32, self.below(8) as u16, self.below(links + 2) as u16)
    }
}

#[test]
fn frontends_come_one_after_the_other() {
    let daemon = Daemon::start(2, true, None);
    let mut names = HashMap::new();
    for round in 0..5 {
        let frontend = daemon.connect(Options { queues: 3, ..Options::default() });
        submit_wait(&frontend, 1);
        for queue in 0..3 {
            *names.entry(frontend.request(queue, NAME, 1, b"", b"", 64).unwrap()).or_insert(0) += 1;
        }
        drop(frontend);
        daemon.handler.await_ended(round + 1);
        until(|| daemon.handler.resets.load(Ordering::SeqCst) > round);
        assert_eq!(daemon.handler.resets.load(Ordering::SeqCst), round + 1);
    }
    assert!(names.len() == 3 && names.values().all(|n| *n == 5));
}
