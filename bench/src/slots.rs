//! Requests in guest memory. They are laid out once, so that the frontend's cost per request is small beside the
//! daemon's.

use std::io;
use std::time::Duration;

use parking_lot::Mutex;
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress};
use zerocopy::{FromBytes, IntoBytes};

use super::errno_text;
use crate::frontend::Frontend;
use thruway::fuse::abi::*;

const PAGE: usize = 4096;

/// Size of the largest I/O, in bytes.
pub const MAX_DATA: usize = 1 << 20;

/// Size of a chain's descriptors: one for header and arguments, one for the reply's header and body, one per page of
/// data.
const TABLE_SIZE: usize = (16 * (2 + MAX_DATA / PAGE)).next_multiple_of(PAGE);

/// Guest memory of a slot, in bytes: table, request, reply, data.
pub const SLOT_SIZE: usize = TABLE_SIZE + 2 * PAGE + MAX_DATA;

/// Nodeids forgotten per batch. Each needs a message, but a batch needs one notification.
pub const FORGETS: usize = 16;

/// Longest wait for a reply. Only a daemon that hangs takes longer.
const TIMEOUT: Duration = Duration::from_secs(30);

const HEADER: usize = size_of::<OutHeader>();

/// A request that a lane wants to send.
#[derive(Default)]
pub struct Ask {
    opcode: u32,
    nodeid: u64,
    args: Vec<u8>,
    shape: Shape,
}

/// Lengths of a chain's parts, in bytes: header and arguments, data to write, the reply's structures, data to read.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Shape {
    args: usize,
    from_guest: usize,
    reply: usize,
    to_guest: usize,
}

impl Ask {
    /// Sets the request. The structures in its reply take `reply` bytes.
    pub fn set(&mut self, opcode: Opcode, nodeid: u64, args: &[&[u8]], reply: usize) {
        self.opcode = opcode as u32;
        self.nodeid = nodeid;
        self.args.clear();
        args.iter().for_each(|part| self.args.extend_from_slice(part));
        self.shape =
            Shape { args: size_of::<InHeader>() + self.args.len(), from_guest: 0, reply: HEADER + reply, to_guest: 0 };
    }

    /// Adds `len` bytes of data to write.
    pub fn write(&mut self, len: usize) {
        self.shape.from_guest = len;
    }

    /// Adds room for `len` bytes of data to read.
    pub fn read(&mut self, len: usize) {
        self.shape.to_guest = len;
    }
}

/// A reply without an error.
pub struct Reply<'a> {
    frontend: &'a Frontend,
    slot: &'a Slot,
    /// Length of the whole reply, in bytes.
    len: usize,
}

impl Reply<'_> {
    /// The structure after the reply's header.
    pub fn body<T: FromBytes + IntoBytes>(&self) -> Result<T, String> {
        let mut value = T::new_zeroed();
        self.read(self.slot.reply + HEADER as u64, value.as_mut_bytes())?;
        Ok(value)
    }

    /// Length of the data, in bytes.
    pub fn data_len(&self) -> usize {
        self.len.saturating_sub(self.slot.shape.reply)
    }

    /// Copies the data.
    pub fn data(&self, to: &mut Vec<u8>) -> Result<(), String> {
        to.resize(self.data_len(), 0);
        self.read(self.slot.data, to)
    }

    fn read(&self, addr: u64, to: &mut [u8]) -> Result<(), String> {
        self.frontend.memory().read_slice(to, GuestAddress(addr)).map_err(|e| e.to_string())
    }
}

struct Slot {
    head: u16,
    table: u64,
    request: u64,
    reply: u64,
    data: u64,
    shape: Shape,
    unique: u64,
}

/// The slots of a queue.
pub struct Slots {
    queue: usize,
    slots: Vec<Slot>,
    /// Slots by the head of their chain.
    by_head: Vec<usize>,
    ready: Vec<u16>,
    ask: Ask,
}

impl Slots {
    pub fn new(frontend: &Frontend, queue: usize, depth: usize) -> io::Result<Self> {
        let heads = frontend.take_descriptors(queue, depth)?;
        let mut by_head = vec![0; usize::from(frontend.layout(queue).size)];
        let mut slots = Vec::new();
        for (at, &head) in heads.iter().enumerate() {
            by_head[usize::from(head)] = at;
            let table = frontend.alloc(queue, SLOT_SIZE)?;
            let request = table + TABLE_SIZE as u64;
            let (reply, data) = (request + PAGE as u64, request + 2 * PAGE as u64);
            // A file system might treat zeroes better than data.
            frontend.memory().write_slice(&vec![0x5a; MAX_DATA], GuestAddress(data)).map_err(io::Error::other)?;
            slots.push(Slot { head, table, request, reply, data, shape: Shape::default(), unique: 0 });
        }
        Ok(Self { queue, slots, by_head, ready: Vec::new(), ask: Ask::default() })
    }

    /// Writes a request into a slot. The device sees it after [`publish`](Self::publish).
    pub fn submit(&mut self, frontend: &Frontend, at: usize, fill: impl FnOnce(&mut Ask)) -> io::Result<()> {
        fill(&mut self.ask);
        let slot = &mut self.slots[at];
        if slot.shape != self.ask.shape {
            slot.shape = self.ask.shape;
            write_chain(frontend, self.queue, slot)?;
        }
        let data = self.ask.args.len() + self.ask.shape.from_guest;
        let (unique, header) = frontend.header(self.ask.opcode, self.ask.nodeid, data);
        slot.unique = unique;
        let mem = frontend.memory();
        mem.write_slice(&header, GuestAddress(slot.request)).map_err(io::Error::other)?;
        mem.write_slice(&self.ask.args, GuestAddress(slot.request + header.len() as u64)).map_err(io::Error::other)?;
        self.ready.push(slot.head);
        Ok(())
    }

    pub fn publish(&mut self, frontend: &Frontend) -> io::Result<()> {
        if !self.ready.is_empty() {
            frontend.offer(self.queue, &self.ready)?;
            self.ready.clear();
        }
        Ok(())
    }

    /// A slot that has its reply, and the reply's length. `None` if there is none yet.
    pub fn poll(&self, frontend: &Frontend) -> io::Result<Option<(usize, usize)>> {
        Ok(frontend.poll_raw(self.queue)?.map(|used| self.used(used)))
    }

    /// Waits for the next reply. Returns its slot and its length.
    pub fn wait(&self, frontend: &Frontend) -> io::Result<(usize, usize)> {
        Ok(self.used(frontend.wait_raw(self.queue, TIMEOUT)?))
    }

    fn used(&self, (head, len): (u32, u32)) -> (usize, usize) {
        (self.by_head.get(head as usize).copied().unwrap_or(0), len as usize)
    }

    /// The reply in a slot.
    ///
    /// # Errors
    /// The error in the reply, or a malformed reply.
    pub fn reply<'a>(&'a self, frontend: &'a Frontend, at: usize, len: usize) -> Result<Reply<'a>, String> {
        let slot = &self.slots[at];
        let reply = Reply { frontend, slot, len };
        let mut header = OutHeader::default();
        reply.read(slot.reply, header.as_mut_bytes())?;
        if header.unique != slot.unique || header.len as usize != len {
            return Err("the daemon sent a malformed reply".into());
        }
        if header.error == 0 { Ok(reply) } else { Err(errno_text(-header.error)) }
    }
}

fn write_chain(frontend: &Frontend, queue: usize, slot: &Slot) -> io::Result<()> {
    let pages =
        |len: usize| (0..len.div_ceil(PAGE)).map(move |n| (slot.data + (n * PAGE) as u64, (len - n * PAGE).min(PAGE)));
    let shape = &slot.shape;
    let readable = std::iter::once((slot.request, shape.args)).chain(pages(shape.from_guest)).map(|part| (part, 0));
    let writable = std::iter::once((slot.reply, shape.reply)).chain(pages(shape.to_guest));
    let mut parts = readable.chain(writable.map(|part| (part, VRING_DESC_F_WRITE))).peekable();
    let mut count = 0u16;
    while let Some(((addr, len), flags)) = parts.next() {
        let next = if parts.peek().is_some() { VRING_DESC_F_NEXT } else { 0 };
        let descriptor = Descriptor::new(addr, len as u32, (flags | next) as u16, count + 1);
        frontend
            .memory()
            .write_obj(descriptor, GuestAddress(slot.table + 16 * u64::from(count)))
            .map_err(io::Error::other)?;
        count += 1;
    }
    let table = Descriptor::new(slot.table, 16 * u32::from(count), VRING_DESC_F_INDIRECT as u16, 0);
    frontend.write_descriptor(queue, slot.head, table)
}

/// FORGET messages. They go to the high priority queue, as in Linux.
pub struct Forgets(Mutex<Pool>);

struct Pool {
    /// Unused messages: the head of the chain, and the address of the message.
    free: Vec<(u16, u64)>,
    busy: Vec<(u16, u64)>,
}

/// The high priority queue's number.
const HIPRIO: usize = 0;

impl Forgets {
    pub fn new(frontend: &Frontend) -> io::Result<Self> {
        // A few batches may be in flight.
        let heads = frontend.take_descriptors(HIPRIO, 8 * FORGETS)?;
        let block = frontend.alloc(HIPRIO, heads.len() * 64)?;
        let free = heads.iter().enumerate().map(|(n, &head)| (head, block + 64 * n as u64)).collect();
        Ok(Self(Mutex::new(Pool { free, busy: Vec::new() })))
    }

    /// Forgets one lookup of each of these nodeids.
    pub fn send(&self, frontend: &Frontend, nodes: &mut Vec<u64>) -> io::Result<()> {
        let mut pool = self.0.lock();
        let mut heads = Vec::with_capacity(FORGETS);
        for node in nodes.drain(..) {
            while let Some(used) = frontend.poll_raw(HIPRIO)? {
                pool.done(used);
            }
            if pool.free.is_empty() {
                frontend.offer(HIPRIO, &heads)?;
                heads.clear();
                pool.done(frontend.wait_raw(HIPRIO, TIMEOUT)?);
            }
            let Some((head, addr)) = pool.free.pop() else { continue };
            let args = ForgetIn { nlookup: 1 };
            let (_, header) = frontend.header(Opcode::Forget as u32, node, size_of::<ForgetIn>());
            let message = [&header, args.as_bytes()].concat();
            frontend.memory().write_slice(&message, GuestAddress(addr)).map_err(io::Error::other)?;
            frontend.write_descriptor(HIPRIO, head, Descriptor::new(addr, message.len() as u32, 0, 0))?;
            pool.busy.push((head, addr));
            heads.push(head);
        }
        frontend.offer(HIPRIO, &heads)
    }
}

impl Pool {
    fn done(&mut self, (head, _): (u32, u32)) {
        if let Some(at) = self.busy.iter().position(|(busy, _)| u32::from(*busy) == head) {
            let done = self.busy.swap_remove(at);
            self.free.push(done);
        }
    }
}
