//! A hostile frontend: vhost-user messages in any order, with descriptors of any kind. The daemon must either end the
//! connection or continue to serve, and leave nothing behind.
#![no_main]

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::pipe::{PipeFlags, pipe_with};
use thruway::device::{self, Handler, Options};
use thruway::fuse::{Transport, Work};
use thruway_fuzz::Input;

/// Replies to every request, and loads any session.
struct Any;

impl Handler for Any {
    fn handle(&self, work: &mut Work, from: &mut dyn Transport) -> usize {
        let mut head = [0; 1];
        work.readable.read_at(0, &mut head);
        match head[0] % 4 {
            0 => return work.writable.write_at(0, b"0123456789abcdef"),
            1 => {}
            2 if from.may_wait() => return work.writable.write_at(0, &[2; 16]),
            2 => from.serve_anew(None),
            _ => from.detach()(vec![3; 16]),
        }
        0
    }
    fn reset(&self) {}
    fn save(&self) -> io::Result<Vec<u8>> {
        Ok(vec![0; 1000])
    }
    fn load(&self, state: &[u8]) -> io::Result<()> {
        if state.len() % 2 == 0 { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }
}

const MEMORY: u64 = 0x10000;
/// The address at which the frontend claims to have the guest's memory.
const USER: u64 = 0x7000_0000_0000;

thread_local! {
    /// The guest's memory. Its rings are empty at first.
    static KEPT: RefCell<OwnedFd> = RefCell::new(memory());
}

fn memory() -> OwnedFd {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, MEMORY).unwrap();
    file
}

fn send(to: &UnixStream, request: u32, flags: u32, size: Option<u32>, payload: &[u8], fds: &[BorrowedFd]) -> bool {
    let mut bytes = Vec::new();
    bytes.extend(request.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend(size.unwrap_or(payload.len() as u32).to_le_bytes());
    bytes.extend(payload);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
    }
    sendmsg(to, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL).is_ok()
}

fn words(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn halves(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A descriptor of any kind. For `is_state`, only kinds from which a read ends.
fn descriptor(input: &mut Input, guest: &OwnedFd, kept: &mut Vec<OwnedFd>, is_state: bool) -> Option<OwnedFd> {
    let file = |path: &str| File::open(path).unwrap().into();
    Some(match input.u8() % 10 {
        0 | 1 => guest.try_clone().unwrap(),
        2 if !is_state => eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
        3 if !is_state => eventfd(1, EventfdFlags::empty()).unwrap(),
        4 => file("/dev/null"),
        5 => file("/proc"),
        6 => {
            let small = memfd_create("small", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&small, u64::from(input.u8())).unwrap();
            small
        }
        7 | 8 => {
            let (from, to) = pipe_with(PipeFlags::CLOEXEC).unwrap();
            let (given, other) = if input.u8() & 1 == 0 { (from, to) } else { (to, from) };
            kept.push(other);
            given
        }
        _ => return None,
    })
}

/// One message: its number, payload and descriptors.
fn message(input: &mut Input, guest: &OwnedFd, kept: &mut Vec<OwnedFd>) -> (u32, Vec<u8>, Vec<OwnedFd>) {
    let request = u32::from(input.u8() % 46);
    let index = |input: &mut Input| u32::from(input.u8() % 5);
    let near = |input: &mut Input, base: u64| match input.u8() {
        n @ 0..200 => base + u64::from(n) * 0x100,
        _ => input.number(),
    };
    let region = |input: &mut Input| match input.u8() & 3 {
        0 => [0, MEMORY, USER, 0],
        _ => [near(input, 0), input.number(), near(input, USER), input.number()],
    };
    let (payload, count) = match request {
        2 | 16 => (words(&[if input.u8() & 1 == 0 { !0 } else { input.number() }]), 0),
        5 => {
            let n = input.u8() % 10;
            let regions: Vec<u64> = (0..n).flat_map(|_| region(input)).collect();
            ([halves(&[n.into(), 0]), words(&regions)].concat(), n)
        }
        6 => (words(&[near(input, 0x1000) >> 3, input.number() >> 3]), 1),
        8 | 10 | 11 | 18 => {
            let value = if input.u8() & 1 == 0 { 16 } else { input.u32() };
            (halves(&[index(input), value]), 0)
        }
        9 => {
            let head = halves(&[index(input), u32::from(input.u8() & 1)]);
            let rings = match input.u8() & 1 {
                0 => [USER, USER + 0x800, USER + 0x400, 0],
                _ => [near(input, USER), near(input, USER), near(input, USER), near(input, 0)],
            };
            ([head, words(&rings)].concat(), 0)
        }
        12..=14 => {
            let flag = u64::from(input.u8() & 1) << 8;
            (words(&[u64::from(index(input)) | flag]), u8::from(flag == 0))
        }
        21 => (Vec::new(), 1),
        24 | 25 => {
            let (offset, size) = (input.number() as u32, input.number() as u32);
            let body = vec![0; (size as usize).min(300)];
            ([halves(&[offset, size, input.u8().into()]), body].concat(), 0)
        }
        37 | 38 => ([words(&[0]), words(&region(input))].concat(), 1),
        42 => (halves(&[u32::from(input.u8() % 3), u32::from(input.u8() % 3)]), 1),
        _ => {
            let n = usize::from(input.u8() % 64);
            (input.bytes(n).to_vec(), input.u8() & 1)
        }
    };
    let count = if input.u8() % 16 == 0 { input.u8() % 12 } else { count };
    if request == 6 {
        // A log that is shorter than announced would end the daemon with SIGBUS. Only its own frontend can do that.
        let log = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&log, 1 << 62).unwrap();
        return (request, payload, vec![log]);
    }
    let fds = (0..count).filter_map(|_| descriptor(input, guest, kept, request == 42)).collect();
    (request, payload, fds)
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    KEPT.with_borrow_mut(|guest| {
        let before = open_descriptors();
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = format!("thruway-fuzz-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let how = input.u8();
        let options = Options { tag: (how & 1 == 0).then(|| "tag".into()), request_queues: 2, ..Default::default() };
        let daemon = std::thread::spawn(move || device::serve(listener, Arc::new(Any), options));
        let mut stream = UnixStream::connect_addr(&address).unwrap();
        let mut kept: Vec<OwnedFd> = Vec::new();
        if how & 2 == 0 {
            // The messages of a good frontend, up to its queues.
            for request in [3, 1, 15] {
                send(&stream, request, 1, None, &[], &[]);
            }
            send(&stream, 16, 1, None, &words(&[!0]), &[]);
            send(&stream, 2, 1, None, &words(&[1 << 32 | 1 << 30 | 1 << 28 | 1 << 29]), &[]);
            let table = [halves(&[1, 0]), words(&[0, MEMORY, USER, 0])].concat();
            send(&stream, 5, 1, None, &table, &[guest.as_fd()]);
        }
        if how & 4 == 0 {
            for queue in 0..3u32 {
                send(&stream, 8, 1, None, &halves(&[queue, 16]), &[]);
                send(&stream, 10, 1, None, &halves(&[queue, 0]), &[]);
                let base = USER + u64::from(queue) * 0x1000;
                let rings = [halves(&[queue, 0]), words(&[base, base + 0x800, base + 0x400, 0])].concat();
                send(&stream, 9, 1, None, &rings, &[]);
                let kick = eventfd(u32::from(how & 8), EventfdFlags::NONBLOCK).unwrap();
                send(&stream, 12, 1, None, &words(&[queue.into()]), &[kick.as_fd()]);
                send(&stream, 18, 1, None, &halves(&[queue, 1]), &[]);
            }
        }
        for _ in 0..24 {
            if input.is_empty() {
                break;
            }
            let (request, payload, fds) = message(&mut input, guest, &mut kept);
            let (flags, size) = match input.u8() {
                0xff => (input.u32(), Some(input.u32())),
                0xfe => (1, Some(input.u16().into())),
                n => (1 | u32::from(n & 1) << 3, None),
            };
            let borrowed: Vec<BorrowedFd> = fds.iter().map(AsFd::as_fd).collect();
            if !send(&stream, request, flags, size, &payload, &borrowed) {
                break;
            }
        }
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
        let _ = daemon.join().unwrap();
        drop((stream, kept));
        // The thread that transfers a state ends when its pipe closes.
        let start = Instant::now();
        while open_descriptors() > before {
            assert!(start.elapsed() < Duration::from_secs(60), "descriptors are left: {}", open_descriptors() - before);
            std::thread::sleep(Duration::from_millis(1));
        }
    });
});
