//! Requests that wait for the host's file system: the queue goes on, and whoever stops it gets all of them.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use thruway::device::{self, Handler, Rings};
use thruway::frontend::{Frontend, Options};
use thruway::fs::{Config, PassthroughFs, proc_self_fd};
use thruway::fuse::abi::*;
use thruway::fuse::{LateRead, Outcome, Server, Work};
use zerocopy::{FromBytes, IntoBytes};

/// Reads `nodeid` bytes of a stream.
const READ: u32 = 1000;
/// Replies after 50 ms, on another thread.
const SLOW: u32 = 1001;
/// Replies at once.
const FAST: u32 = 1002;

const LONG: Duration = Duration::from_secs(10);

struct Stub(OwnedFd);

impl Handler for Stub {
    fn handle(&self, work: &mut Work) -> Outcome {
        let mut header = InHeader::default();
        work.readable.read_at(0, header.as_mut_bytes());
        let unique = header.unique;
        let empty = move || OutHeader { len: 16, error: 0, unique }.as_bytes().to_vec();
        match header.opcode {
            READ => Outcome::Read(LateRead {
                unique,
                file: self.0.try_clone().unwrap(),
                offset: 0,
                size: header.nodeid as usize,
            }),
            SLOW => Outcome::Slow(Box::new(move || {
                thread::sleep(Duration::from_millis(50));
                empty()
            })),
            _ => Outcome::Replied(work.writable.write_at(0, &empty())),
        }
    }

    fn reset(&self) {}
}

struct Daemon {
    frontend: Frontend,
    thread: JoinHandle<Result<(), device::Error>>,
}

impl Daemon {
    fn start(handler: impl Handler, rings: Rings) -> Self {
        let path = tempfile::tempdir().unwrap().keep().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let options = device::Options { rings: Arc::new(rings), ..Default::default() };
        let thread = thread::spawn(move || device::serve(listener, Arc::new(handler), options));
        let frontend = Frontend::connect(&path, Options::default()).unwrap();
        std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
        Self { frontend, thread }
    }

    fn end(self) {
        drop(self.frontend);
        self.thread.join().unwrap().unwrap();
    }
}

fn with_a_peer(rings: Rings) -> (Daemon, UnixStream) {
    let (read, write) = UnixStream::pair().unwrap();
    (Daemon::start(Stub(read.into()), rings), write)
}

fn rings() -> [Rings; 1] {
    let rings = Rings::new(1);
    assert!(rings.of(1).is_some(), "there is no io_uring here");
    [rings]
}

#[test]
fn a_read_that_waits_lets_others_pass() {
    for rings in rings() {
        let (daemon, mut peer) = with_a_peer(rings);
        let frontend = &daemon.frontend;
        let (_, head) = frontend.header(READ, 6000, 0);
        let read = frontend.submit(1, &[&head], &[16, 3000, 3000]).unwrap();
        for _ in 0..100 {
            frontend.request(1, FAST, 1, b"", b"", 0).unwrap();
        }
        let data: Vec<u8> = (0..6000).map(|n| (n % 251) as u8).collect();
        peer.write_all(&data).unwrap();
        let done = frontend.wait_for(1, read, LONG).unwrap();
        assert_eq!((done.len, &done.data[16..]), (6016, &data[..]));
        daemon.end();
    }
}

#[test]
fn a_ring_stops_when_what_waits_is_there() {
    for rings in rings() {
        let (daemon, mut peer) = with_a_peer(rings);
        let frontend = &daemon.frontend;
        let (_, head) = frontend.header(READ, 100, 0);
        let read = frontend.submit(1, &[&head], &[16, 100]).unwrap();
        let slow = frontend.submit(1, &[&frontend.header(SLOW, 0, 0).1], &[16]).unwrap();
        frontend.request(1, FAST, 1, b"", b"", 0).unwrap();
        let writer = thread::spawn(move || {
            thread::sleep(Duration::from_millis(200));
            peer.write_all(&[7; 100]).unwrap();
        });
        let before = Instant::now();
        assert_eq!(frontend.stop_queue(1).unwrap(), 3);
        assert!(before.elapsed() > Duration::from_millis(150));
        for (token, len) in [(read, 116), (slow, 16)] {
            assert_eq!(frontend.wait_for(1, token, Duration::ZERO).unwrap().len, len);
        }
        writer.join().unwrap();
        daemon.end();
    }
}

#[test]
fn a_frontend_that_leaves_waits_for_nothing_but_the_read() {
    for rings in rings() {
        let (daemon, peer) = with_a_peer(rings);
        let (_, head) = daemon.frontend.header(READ, 100, 0);
        daemon.frontend.submit(1, &[&head], &[16, 100]).unwrap();
        daemon.frontend.request(1, FAST, 1, b"", b"", 0).unwrap();
        // The end of the file.
        drop(peer);
        daemon.end();
    }
}

/// The guest's view of a file on a disk whose pages are not in memory: by io_uring and without.
#[test]
fn a_cold_file_reads_as_it_is() {
    for rings in [Rings::new(1), Rings::none()] {
        // Not in /tmp, which may be in memory.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let file = File::create(dir.path().join("cold")).unwrap();
        let data: Vec<u8> = (0..3_000_000u32).map(|n| (n / 7) as u8).collect();
        file.write_all_at(&data, 0).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let root = rustix::fs::open(dir.path(), rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), Config::default()).unwrap();
        let daemon = Daemon::start(Server::new(fs), rings);
        let frontend = &daemon.frontend;
        frontend.fuse_init(0).unwrap();
        let entry = frontend.request(1, Opcode::Lookup as u32, ROOT_ID, b"cold\0", b"", 128).unwrap();
        let (entry, _) = EntryOut::read_from_prefix(&entry).unwrap();
        let open =
            frontend.request(1, Opcode::Open as u32, entry.nodeid, OpenIn::default().as_bytes(), b"", 16).unwrap();
        let (open, _) = OpenOut::read_from_prefix(&open).unwrap();
        for offset in (0..data.len() + 200_000).step_by(100_000).rev() {
            let read = ReadIn { fh: open.fh, offset: offset as u64, size: 131_072, ..Default::default() };
            let got = frontend.request(1, Opcode::Read as u32, entry.nodeid, read.as_bytes(), b"", 131_072).unwrap();
            let end = data.len().min(offset + 131_072);
            assert!(got == data.get(offset..end).unwrap_or_default(), "at {offset}: {} bytes", got.len());
        }
        daemon.end();
    }
}
