//! A queue's worker, while another thread rewrites its rings, descriptors and requests.
#![no_main]

use std::cell::RefCell;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use thruway::device::fuzzing::{Crew, Lookout, Memory, Pools, RegionState, Service, Tables, Vring, Workers};
use thruway::device::{Handler, Urings};
use thruway::fuse::ops::Wait;
use thruway::fuse::{ReplySender, Transport, Work};
use thruway_fuzz::Input;
use vhost_user_backend::VringT;
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestRegionMmap};

const SIZE: u16 = 16;
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x400;
const USED: u64 = 0x800;
/// Size of guest memory, in bytes: small, so that an input's changes hit the rings and the first requests.
const LEN: u64 = 0x4000;

/// Rounds of the other thread: it must run for longer than the worker needs for an input.
const ROUNDS: usize = 8;

/// Replies in any of the possible ways; the request chooses.
#[derive(Default)]
struct Any(Mutex<Vec<ReplySender>>);

impl Handler for Any {
    fn handle(&self, work: &mut Work, from: &mut dyn Transport) -> usize {
        let mut head = [0; 4];
        work.readable.read_at(0, &mut head);
        let mut all = [0; 64];
        let n = work.readable.read_at(usize::from(head[3]), &mut all);
        let room = work.writable.len();
        match head[0] % 8 {
            0 => return work.writable.write_at(0, &all[..n]),
            1 => {}
            2 | 3 if head[2] % 3 == 2 => match from.may_wait() {
                true => return room,
                false => from.serve_anew(None),
            },
            2 | 3 => {
                let wait = [Wait::Others, Wait::Lock][usize::from(head[2] % 3)];
                // Fails if too many requests wait.
                let _ = from.run(wait, Box::new(move |back| back(vec![1; usize::from(head[1])])));
            }
            4 => from.detach()(vec![3; usize::from(head[1])]),
            // The reply is kept until the other thread, or the end of the input, drops it.
            5 => self.0.lock().unwrap().push(from.detach()),
            6 => return room,
            _ => return usize::MAX,
        }
        0
    }

    fn reset(&self) {}
}

impl Any {
    fn answer(&self) {
        let kept = std::mem::take(&mut *self.0.lock().unwrap());
        kept.into_iter().for_each(|back| back(vec![4; 20]));
    }
}

type Write = (u64, Vec<u8>);

struct Kept {
    workers: Arc<Workers<Any>>,
    jobs: SyncSender<(Vec<Write>, Arc<Any>)>,
    done: Receiver<()>,
}

impl Kept {
    fn new() -> Self {
        // Two adjacent regions. The rings are in the first one.
        let region = |addr| GuestRegionMmap::new(MmapRegion::<RegionState>::new(0x2000).unwrap(), GuestAddress(addr));
        let mem = Tables::new(Memory::from_regions(vec![region(0).unwrap(), region(0x2000).unwrap()]).unwrap());
        let (jobs, work) = sync_channel::<(Vec<Write>, Arc<Any>)>(1);
        let (tell, done) = sync_channel(1);
        let theirs = mem.all.clone();
        std::thread::spawn(move || {
            for (writes, handler) in work {
                let mem = theirs.memory();
                for round in 0..ROUNDS {
                    for (at, bytes) in &writes {
                        let _ = mem.write(bytes, GuestAddress(*at));
                    }
                    if round == ROUNDS / 2 {
                        handler.answer();
                    }
                }
                drop(mem);
                tell.send(()).unwrap();
            }
        });
        let workers = Arc::new(Workers {
            service: Arc::new(Service {
                handler: Arc::default(),
                mem,
                pools: Pools::new().unwrap(),
                waiting: Arc::default(),
            }),
            closing: AtomicBool::new(false),
            loading: AtomicBool::new(false),
            logging: AtomicBool::new(true),
            urings: Arc::new(Urings::none()),
            poll: Duration::ZERO,
            monitor: Arc::default(),
            lookout: Lookout::new(Arc::default(), Vec::new()).unwrap(),
            crew: Crew::default(),
        });
        Self { workers, jobs, done }
    }
}

thread_local! {
    static KEPT: RefCell<Kept> = RefCell::new(Kept::new());
}

fn writes(input: &mut Input, most: u8) -> Vec<Write> {
    let count = input.u8() % most;
    (0..count)
        .map(|_| {
            let at = match input.u8() {
                n @ 0..96 => DESCRIPTORS + u64::from(n) * 4,
                n @ 96..128 => AVAILABLE + u64::from(n - 96) * 2,
                n @ 128..160 => USED + u64::from(n - 128) * 2,
                n => 0x1000 + u64::from(n - 160) * 128,
            };
            let len = usize::from(input.u8() % 33);
            (at, input.bytes(len).to_vec())
        })
        .collect()
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    KEPT.with_borrow_mut(|kept| {
        let mem = kept.workers.service.mem.all.memory();
        mem.write_slice(&[0; LEN as usize], GuestAddress(0)).unwrap();
        let (how, offered) = (input.u8(), input.u8());
        // Chains of a request and room for its reply. The input then changes them.
        for n in 0..u64::from(SIZE) / 2 {
            let mut chain = Vec::new();
            for (addr, len, flags) in [(0x1000 + n * 128, 64u32, 1u16), (0x3000 + n * 64, 64, 2)] {
                chain.extend(addr.to_le_bytes());
                chain.extend(len.to_le_bytes());
                chain.extend(flags.to_le_bytes());
                chain.extend((2 * n as u16 + 1).to_le_bytes());
            }
            mem.write_slice(&chain, GuestAddress(DESCRIPTORS + 32 * n)).unwrap();
            mem.write_obj(2 * n as u16, GuestAddress(AVAILABLE + 4 + 2 * n)).unwrap();
            mem.write_obj(input.u16(), GuestAddress(0x1000 + n * 128)).unwrap();
        }
        mem.write_obj(u16::from(offered), GuestAddress(AVAILABLE + 2)).unwrap();
        for (at, bytes) in writes(&mut input, 8) {
            let _ = mem.write(&bytes, GuestAddress(at));
        }
        drop(mem);
        let ring = Vring::new(kept.workers.service.mem.all.clone(), 1024).unwrap();
        ring.set_queue_size(SIZE);
        ring.set_queue_event_idx(how & 1 != 0);
        ring.set_queue_info(DESCRIPTORS, AVAILABLE, USED).unwrap();
        ring.set_queue_ready(true);
        ring.set_enabled(true);
        kept.jobs.send((writes(&mut input, 16), kept.workers.service.handler.clone())).unwrap();
        kept.workers.drain(&ring.0, 1);
        if how & 2 != 0 {
            // The VM is paused and resumed, or the driver starts again.
            ring.set_queue_ready(false);
            let at = if how & 4 != 0 { ring.queue_next_avail() } else { 0 };
            ring.set_queue_next_avail(at);
            ring.set_queue_ready(true);
            kept.workers.drain(&ring.0, 1);
        }
        kept.done.recv().unwrap();
        if how & 8 != 0 {
            kept.workers.drain(&ring.0, 1);
        }
        ring.set_enabled(how & 16 != 0);
        ring.0.reset();
        kept.workers.service.handler.answer();
        assert!(!ring.0.owes() && !ring.0.is_started());
    });
});
