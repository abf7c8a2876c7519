//! Tests the notification queue with a frontend in the same process.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, open};
use thruway::device::{self, Handler, NOTIFY_BUFFER, Notifier};
use thruway::fs::{Config, PassthroughFs, proc_self_fd};
use thruway::fuse::abi::{EntryOut, InitFlags, Opcode};
use thruway::fuse::notify::Sink;
use thruway::fuse::{Server, Transport, Work};
use thruway::limits::NOTIFICATIONS;
use thruway::watch::Watch;
use thruway_bench::frontend::{Frontend, MEMORY_BASE, Options};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostTransferStateDirection, VhostTransferStatePhase};
use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress};
use zerocopy::FromBytes;

/// The notification queue, and the first request queue after it.
const NOTIFY: usize = 1;
const REQUESTS: usize = 2;

const WRITE: u16 = VRING_DESC_F_WRITE as u16;
const NEXT: u16 = VRING_DESC_F_NEXT as u16;

/// Notification codes of include/uapi/linux/fuse.h.
const INVAL_INODE: i32 = 2;
const INVAL_ENTRY: i32 = 3;
const INC_EPOCH: i32 = 8;

/// A limit on hangs.
const LONG: Duration = Duration::from_secs(100);

/// Replies to each request with the name of the worker's thread, and loads any state.
struct Namer;

impl Handler for Namer {
    fn handle(&self, work: &mut Work, _from: &mut dyn Transport) -> usize {
        let mut head = [0; 40];
        work.readable.read_at(0, &mut head);
        let name = std::fs::read("/proc/thread-self/comm").unwrap();
        let name = name.trim_ascii_end();
        let len = (16 + name.len()) as u32;
        let reply = [&len.to_le_bytes()[..], &[0; 4], &head[8..16], name].concat();
        work.writable.write_at(0, &reply)
    }

    fn reset(&self) {}

    fn load(&self, _state: &[u8]) -> std::io::Result<()> {
        Ok(())
    }
}

/// A daemon in a thread of the test. It ends with the test's process.
struct Daemon {
    path: PathBuf,
    notifier: Arc<Notifier>,
}

impl Daemon {
    fn start(request_queues: u16) -> Self {
        Self::serve(request_queues, |_| Namer)
    }

    /// `handler` makes what serves requests.
    fn serve<H: Handler>(request_queues: u16, handler: impl FnOnce(&Arc<Notifier>) -> H) -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("thruway-notify-{}-{number}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let notifier = Arc::new(Notifier::new().unwrap());
        let tag = Some("share".to_owned());
        let options = device::Options {
            tag,
            request_queues,
            keep_alive: true,
            notifier: Some(notifier.clone()),
            ..Default::default()
        };
        let handler = Arc::new(handler(&notifier));
        thread::spawn(move || device::serve(listener, handler, options));
        Self { path, notifier }
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

fn with_queue() -> Options {
    Options { queues: 3, notifications: true, ..Options::default() }
}

fn pair() -> (Daemon, Frontend) {
    let daemon = Daemon::start(1);
    let frontend = daemon.connect(with_queue());
    (daemon, frontend)
}

fn name(frontend: &Frontend, queue: usize) -> String {
    String::from_utf8(frontend.request(queue, 1, 1, b"", b"", 64).unwrap()).unwrap()
}

/// Offers a buffer for a notification.
fn post(frontend: &Frontend, len: usize) {
    frontend.submit(NOTIFY, &[], &[len]).unwrap();
}

/// The next notification: code and body. `None` if a buffer came back empty.
fn next(frontend: &Frontend) -> Option<(i32, Vec<u8>)> {
    let done = frontend.wait(NOTIFY, LONG).unwrap();
    if done.len == 0 {
        return None;
    }
    assert_eq!(done.data[..4], done.len.to_le_bytes());
    assert_eq!(done.data[8..16], [0; 8]);
    Some((i32::from_le_bytes(done.data[4..8].try_into().unwrap()), done.data[16..].to_vec()))
}

/// Offers a buffer and returns the notification that comes in it.
fn hear(frontend: &Frontend) -> (i32, Vec<u8>) {
    post(frontend, NOTIFY_BUFFER as usize);
    next(frontend).unwrap()
}

/// The nodeid of an invalidation.
fn nodeid((code, body): (i32, Vec<u8>)) -> u64 {
    assert_eq!(code, INVAL_INODE);
    u64::from_le_bytes(body[..8].try_into().unwrap())
}

/// Nothing was sent before this: the guest hears of node 99, and of nothing else.
fn nothing_waits(daemon: &Daemon, frontend: &Frontend) {
    daemon.notifier.inval_inode(99, false);
    assert_eq!(nodeid(hear(frontend)), 99);
}

#[test]
fn the_driver_chooses_the_order_of_queues() {
    let daemon = Daemon::start(2);
    for round in 0..4 {
        let mut frontend = daemon.connect(Options { queues: 4, ..with_queue() });
        assert_eq!(frontend.config(36, 8).unwrap(), [2, 0, 0, 0, 0, 8, 0, 0]);
        assert!(daemon.notifier.is_open());
        assert_eq!(name(&frontend, 0), "thruway-hiprio");
        assert_eq!((name(&frontend, 2), name(&frontend, 3)), ("thruway-q0".into(), "thruway-q1".into()));
        daemon.notifier.inval_inode(7, true);
        assert_eq!(nodeid(hear(&frontend)), 7);
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let names = threads.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        assert!(names.into_iter().any(|name| name == "thruway-notify\n"), "round {round}");
        drop(frontend);
        // A driver without the feature, with the queue that it does not need and without.
        for queues in [3, 4] {
            let frontend = daemon.connect(Options { queues, ..Options::default() });
            assert!(!daemon.notifier.is_open());
            daemon.notifier.inval_inode(7, true);
            assert_eq!(name(&frontend, 0), "thruway-hiprio");
            assert_eq!((name(&frontend, 1), name(&frontend, 2)), ("thruway-q0".into(), "thruway-q1".into()));
        }
    }
}

#[test]
fn a_guest_of_62_queues_has_the_notification_queue_too() {
    let daemon = Daemon::start(62);
    let frontend = daemon.connect(Options { queues: 64, mem_size: 64 << 20, ..with_queue() });
    assert_eq!(name(&frontend, 63), "thruway-q61");
    nothing_waits(&daemon, &frontend);
}

#[test]
fn what_waits_is_merged() {
    let (daemon, frontend) = pair();
    for _ in 0..3 {
        daemon.notifier.inval_inode(5, false);
        daemon.notifier.inval_entry(1, b"name");
        daemon.notifier.inval_inode(5, true);
    }
    let (code, body) = hear(&frontend);
    assert_eq!((code, &body[..]), (INVAL_INODE, &[[5, 0, 0].map(u64::to_le_bytes).concat()].concat()[..]));
    let (code, body) = hear(&frontend);
    assert_eq!(code, INVAL_ENTRY);
    assert_eq!(body, [&1u64.to_le_bytes()[..], &4u32.to_le_bytes(), &1u32.to_le_bytes(), b"name\0"].concat());
    nothing_waits(&daemon, &frontend);
}

#[test]
fn a_driver_without_buffers_hears_of_too_much_at_once() {
    let (daemon, frontend) = pair();
    for nodeid in 0..10 * NOTIFICATIONS as u64 {
        daemon.notifier.inval_inode(nodeid, false);
    }
    assert_eq!(hear(&frontend).0, INC_EPOCH);
    nothing_waits(&daemon, &frontend);
}

/// What a guest learns of a name, by a daemon that watches.
fn look(frontend: &Frontend, dir: u64, name: &str) -> EntryOut {
    let name = format!("{name}\0");
    let room = size_of::<EntryOut>();
    let out = frontend.request(REQUESTS, Opcode::Lookup as u32, dir, name.as_bytes(), b"", room).unwrap();
    EntryOut::read_from_bytes(&out).unwrap()
}

/// Runs a shell command in a directory, in another process.
fn host(dir: &Path, command: &str) {
    assert!(Command::new("sh").args(["-ec", command]).current_dir(dir).status().unwrap().success(), "{command}");
}

#[test]
fn a_driver_without_buffers_is_served_while_the_host_changes_much() {
    // Three times the limit.
    const NAMES: usize = 3 * NOTIFICATIONS;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let config = Config { lease_timeout: Duration::from_secs(7777), ..Config::default() };
    let daemon = Daemon::serve(1, |notifier| {
        let root = open(dir.path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), config).unwrap();
        let fs = fs.with_notifier(notifier.clone()).with_watch(Some(Watch::new().unwrap())).unwrap();
        Server::new(fs)
    });
    let frontend = daemon.connect(with_queue());
    let flags = InitFlags::all() - InitFlags::PASSTHROUGH_SHM;
    frontend.fuse_init(flags.bits()).unwrap();
    host(dir.path(), "mkdir d; echo 1 >d/f");
    let d = look(&frontend, 1, "d").nodeid;
    host(&dir.path().join("d"), &format!("seq {NAMES} | sed s/^/n/ | xargs touch; echo more >>f"));
    // The driver is served as before.
    let f = look(&frontend, d, "f");
    assert_eq!((f.attr.size, f.entry_valid), (7, 7777));
    assert_ne!(look(&frontend, d, &format!("n{NAMES}")).nodeid, 0);
    // The driver wakes up. All that it had is void, and it hears of what comes after that.
    assert_eq!(hear(&frontend).0, INC_EPOCH);
    host(dir.path(), "echo more >>d/f");
    while hear(&frontend) != (INVAL_INODE, [f.nodeid, 0, 0].map(u64::to_le_bytes).concat()) {}
}

#[test]
fn nothing_is_lost_under_load() {
    for event_idx in [false, true] {
        let daemon = Daemon::start(1);
        let frontend = daemon.connect(Options { event_idx, ..with_queue() });
        (0..16).for_each(|_| post(&frontend, NOTIFY_BUFFER as usize));
        // Fewer than the limit, so none may be missing.
        let last = NOTIFICATIONS as u64 - 1;
        let notifier = daemon.notifier.clone();
        let teller = thread::spawn(move || (0..=last).for_each(|nodeid| notifier.inval_inode(nodeid, true)));
        for expect in 0..=last {
            assert_eq!(nodeid(next(&frontend).unwrap()), expect);
            post(&frontend, NOTIFY_BUFFER as usize);
        }
        teller.join().unwrap();
    }
}

#[test]
fn a_buffer_that_is_too_short_goes_back_empty() {
    let (daemon, frontend) = pair();
    for short in [1, 15, 30, 16 + 16 + 4] {
        post(&frontend, short);
        daemon.notifier.inval_entry(1, b"name");
        assert_eq!(next(&frontend), None);
        assert_eq!(hear(&frontend).0, INC_EPOCH);
        nothing_waits(&daemon, &frontend);
    }
    // A name with its zero fits exactly.
    post(&frontend, 16 + 16 + 5);
    daemon.notifier.inval_entry(1, b"name");
    assert_eq!(next(&frontend).unwrap().0, INVAL_ENTRY);
    // Not even one notification fits into these, and nobody loses it.
    (0..20).for_each(|_| post(&frontend, 8));
    daemon.notifier.inval_inode(1, true);
    (0..20).for_each(|_| assert_eq!(next(&frontend), None));
    assert_eq!(hear(&frontend).0, INC_EPOCH);
}

/// Offers a chain of (address, length, flags).
fn post_raw(frontend: &Frontend, chain: &[(u64, u32, u16)]) -> u16 {
    let indices = frontend.take_descriptors(NOTIFY, chain.len()).unwrap();
    for (i, (addr, len, flags)) in chain.iter().enumerate() {
        let next = indices.get(i + 1).copied();
        let flags = flags | if next.is_some() { NEXT } else { 0 };
        frontend.write_descriptor(NOTIFY, indices[i], Descriptor::new(*addr, *len, flags, next.unwrap_or(0))).unwrap();
    }
    frontend.push_raw(NOTIFY, indices[0]).unwrap();
    indices[0]
}

#[test]
fn hostile_chains_do_no_harm() {
    let (daemon, frontend) = pair();
    let room = frontend.alloc(NOTIFY, 4096).unwrap();
    let chains: [&[(u64, u32, u16)]; 8] = [
        &[(room, 2048, 0)],
        &[(room, 0, WRITE)],
        &[(0, 2048, WRITE)],
        &[(MEMORY_BASE - 4, 2048, WRITE)],
        &[(u64::MAX - 3, 2048, WRITE)],
        &[(room, u32::MAX, WRITE)],
        &[(room, 20, WRITE), (1 << 40, 2048, WRITE)],
        &[(room, 2048, WRITE), (room + 2048, 2048, 0)],
    ];
    for chain in chains {
        let head = post_raw(&frontend, chain);
        daemon.notifier.inval_inode(3, true);
        assert_eq!(frontend.wait_raw(NOTIFY, LONG).unwrap(), (head.into(), 0), "{chain:?}");
        assert_eq!(hear(&frontend).0, INC_EPOCH);
    }
    // A chain that does not end, and one whose buffers have a byte each.
    let head = frontend.take_descriptors(NOTIFY, 1).unwrap()[0];
    frontend.write_descriptor(NOTIFY, head, Descriptor::new(room, 8, WRITE | NEXT, head)).unwrap();
    frontend.push_raw(NOTIFY, head).unwrap();
    daemon.notifier.inval_inode(3, true);
    assert_eq!(frontend.wait_raw(NOTIFY, LONG).unwrap(), (head.into(), 0));
    assert_eq!(hear(&frontend).0, INC_EPOCH);
    let bytes: Vec<_> = (0..40).map(|at| (room + at, 1, WRITE)).collect();
    let head = post_raw(&frontend, &bytes);
    daemon.notifier.inval_inode(3, true);
    assert_eq!(frontend.wait_raw(NOTIFY, LONG).unwrap(), (head.into(), 40));
    let mut message = [0; 40];
    frontend.memory().read_slice(&mut message, GuestAddress(room)).unwrap();
    assert_eq!(message[4..8], INVAL_INODE.to_le_bytes());
    nothing_waits(&daemon, &frontend);
    assert_eq!(name(&frontend, REQUESTS), "thruway-q0");
}

#[test]
fn an_absurd_available_index_stops_the_queue_until_a_reset() {
    let (daemon, mut frontend) = pair();
    nothing_waits(&daemon, &frontend);
    frontend.memory().write_obj(30_000u16, GuestAddress(frontend.layout(NOTIFY).available + 2)).unwrap();
    frontend.kick(NOTIFY).unwrap();
    (0..2 * NOTIFICATIONS as u64).for_each(|nodeid| daemon.notifier.inval_inode(nodeid, true));
    assert_eq!(name(&frontend, REQUESTS), "thruway-q0");
    frontend.reset_device().unwrap();
    // The new driver hears nothing of what the old one missed.
    nothing_waits(&daemon, &frontend);
    assert_eq!(name(&frontend, REQUESTS), "thruway-q0");
}

#[test]
fn a_reset_drops_what_waits() {
    let (daemon, mut frontend) = pair();
    for round in 0..20 {
        (0..100).for_each(|nodeid| daemon.notifier.inval_inode(nodeid, true));
        if round % 2 == 0 {
            (0..10).for_each(|_| post(&frontend, NOTIFY_BUFFER as usize));
        }
        frontend.reset_device().unwrap();
        nothing_waits(&daemon, &frontend);
    }
}

#[test]
fn the_frontend_may_go_at_any_time() {
    let daemon = Daemon::start(1);
    for round in 0..30 {
        let frontend = daemon.connect(with_queue());
        nothing_waits(&daemon, &frontend);
        let notifier = daemon.notifier.clone();
        let teller = thread::spawn(move || (0..2000).for_each(|nodeid| notifier.inval_inode(nodeid, true)));
        (0..round).for_each(|_| drop(hear(&frontend)));
        drop(frontend);
        teller.join().unwrap();
    }
}

#[test]
fn a_paused_queue_goes_on_without_a_kick() {
    let (daemon, mut frontend) = pair();
    nothing_waits(&daemon, &frontend);
    post(&frontend, NOTIFY_BUFFER as usize);
    post(&frontend, NOTIFY_BUFFER as usize);
    for nodeid_sent in [11, 12] {
        let base = frontend.stop_queue(NOTIFY).unwrap();
        daemon.notifier.inval_inode(nodeid_sent, true);
        frontend.start_queue(NOTIFY, base).unwrap();
        assert_eq!(nodeid(next(&frontend).unwrap()), nodeid_sent);
    }
}

#[test]
fn a_migrated_guest_trusts_nothing() {
    let daemon = Daemon::start(1);
    let mut frontend = daemon.connect(with_queue());
    // Offered at the source.
    post(&frontend, NOTIFY_BUFFER as usize);
    for queue in 0..3 {
        frontend.stop_queue(queue).unwrap();
    }
    let (read, write) = rustix::pipe::pipe().unwrap();
    File::from(write).write_all(b"a session").unwrap();
    let (load, stopped) = (VhostTransferStateDirection::LOAD, VhostTransferStatePhase::STOPPED);
    frontend.vhost().set_device_state_fd(load, stopped, read).unwrap();
    frontend.vhost().check_device_state().unwrap();
    // What is known to be invalid meanwhile is part of it.
    daemon.notifier.inval_inode(5, true);
    (0..3).for_each(|queue| frontend.start_queue(queue, 0).unwrap());
    assert_eq!(next(&frontend).unwrap().0, INC_EPOCH);
    nothing_waits(&daemon, &frontend);
}
