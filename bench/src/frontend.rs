//! A vhost-user frontend without a VM: it plays the guest in tests and benchmarks.
//!
//! It has guest memory, split virtqueues (VIRTIO 1.3, section 2.7) and just enough of FUSE to send a request. Hostile
//! tests can write the rings by hand ([`Frontend::memory`], [`Frontend::layout`], [`Frontend::push_raw`]).

mod window;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, memfd_create};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures as Protocol, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend as Connection, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
    VRING_USED_F_NO_NOTIFY,
};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{ByteValued, Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use thruway::device::offer_cpu;

pub use window::{BASE as WINDOW_BASE, Mapped, Point, Window};

/// Start of guest memory. It is not 0, so that a test can use addresses below it.
pub const MEMORY_BASE: u64 = 1 << 20;

/// Alignment of rings, large buffers and allocations, in bytes: enough for O_DIRECT.
const PAGE: u64 = 4096;

/// Longest time that [`Frontend::request`] waits for a reply: a limit on hangs.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(100);

/// Sizes of fuse_in_header and fuse_out_header in bytes, and the operation that opens a session
/// (include/uapi/linux/fuse.h).
const IN_HEADER_LEN: usize = 40;
const OUT_HEADER_LEN: usize = 16;
const FUSE_INIT: u32 = 26;

/// How to set up the device.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Number of queues, including the high priority queue (number 0).
    pub queues: usize,
    /// Descriptors per queue, a power of two.
    pub queue_size: u16,
    /// Guest memory in bytes, a multiple of 8 KiB. It is divided equally between the queues.
    pub mem_size: usize,
    pub event_idx: bool,
    /// Put the descriptors of each request into an indirect table.
    pub indirect: bool,
    /// How long to poll for a notification before sleeping for it.
    pub halt_poll: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            queues: 2,
            queue_size: 128,
            mem_size: 16 << 20,
            event_idx: true,
            indirect: true,
            halt_poll: Duration::ZERO,
        }
    }
}

/// Identifies a submitted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token(u64);

/// A request that the device has returned.
#[derive(Debug)]
pub struct Completion {
    pub token: Token,
    /// Number of bytes written, according to the device.
    pub len: u32,
    /// The first `len` bytes of the writable buffers, or all of them if `len` is too large.
    pub data: Vec<u8>,
}

/// Guest addresses of a queue's parts.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub size: u16,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    /// Start and end of the memory that the queue's buffers are allocated from.
    heap: (u64, u64),
}

/// A connection to a daemon. Different threads may use different queues, but not the same queue at once.
pub struct Frontend {
    vhost: Connection,
    mem: GuestMemoryMmap,
    queues: Vec<Queue>,
    options: Options,
    unique: AtomicU64,
}

impl Frontend {
    /// Connects to the daemon that listens at `path` and starts all queues.
    pub fn connect(path: &Path, options: Options) -> io::Result<Self> {
        let mut this = Self::attach(path, options)?;
        this.negotiate()?;
        this.start_all()?;
        Ok(this)
    }

    /// Connects to the daemon that listens at `path`, and sends nothing. The caller sends what some frontend sends, by
    /// [`Frontend::vhost`].
    pub fn attach(path: &Path, options: Options) -> io::Result<Self> {
        let vhost = Connection::connect(path, options.queues as u64).map_err(io::Error::other)?;
        let mem = guest_memory(options.mem_size)?;
        let queues = (0..options.queues).map(|i| Queue::new(&options, i)).collect::<io::Result<_>>()?;
        Ok(Self { vhost, mem, queues, options, unique: AtomicU64::new(1) })
    }

    fn negotiate(&mut self) -> io::Result<()> {
        let vhost = &mut self.vhost;
        vhost.set_owner().map_err(io::Error::other)?;
        vhost.get_features().map_err(io::Error::other)?;
        let offered = vhost.get_protocol_features().map_err(io::Error::other)?;
        let wanted = Protocol::MQ
            | Protocol::REPLY_ACK
            | Protocol::CONFIG
            | Protocol::RESET_DEVICE
            | Protocol::LOG_SHMFD
            | Protocol::CONFIGURE_MEM_SLOTS
            | Protocol::BACKEND_REQ
            | Protocol::BACKEND_SEND_FD
            | Protocol::DEVICE_STATE
            | Protocol::SHMEM;
        vhost.set_protocol_features(offered & wanted).map_err(io::Error::other)?;
        vhost.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        self.set_features(0)?;
        self.set_memory()
    }

    /// Acknowledges the features that the options need, and `more`.
    pub fn set_features(&self, more: u64) -> io::Result<()> {
        let mut features = 1 << VIRTIO_F_VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() | more;
        features |= u64::from(self.options.event_idx) << VIRTIO_RING_F_EVENT_IDX;
        features |= u64::from(self.options.indirect) << VIRTIO_RING_F_INDIRECT_DESC;
        self.vhost.set_features(features).map_err(io::Error::other)
    }

    /// Lets the device map files into the guest's memory from now on.
    pub fn open_window(&mut self) -> io::Result<Window> {
        Window::open(&mut self.vhost)
    }

    /// Sends the memory table.
    pub fn set_memory(&self) -> io::Result<()> {
        let info = |region| VhostUserMemoryRegionInfo::from_guest_region(region).map_err(io::Error::other);
        let regions = self.mem.iter().map(info).collect::<io::Result<Vec<_>>>()?;
        self.vhost.set_mem_table(&regions).map(drop).map_err(io::Error::other)
    }

    fn start_all(&mut self) -> io::Result<()> {
        (0..self.queues.len()).try_for_each(|queue| self.start_queue(queue, 0))
    }

    /// Starts a queue whose next available entry is number `base`.
    pub fn start_queue(&mut self, queue: usize, base: u16) -> io::Result<()> {
        self.prepare_queue(queue, base)?;
        self.set_call(queue)?;
        self.vhost.set_vring_enable(queue, true).map_err(io::Error::other)
    }

    /// Sends the call event of a queue. A queue needs it, and [`Frontend::prepare_queue`], before it is enabled.
    pub fn set_call(&self, queue: usize) -> io::Result<()> {
        self.vhost.set_vring_call(queue, &self.queues[queue].call).map_err(io::Error::other)
    }

    /// The size and the addresses of a queue, its kick event and its call event.
    pub fn ring(&self, queue: usize) -> io::Result<(VringConfigData, EventFd, EventFd)> {
        let q = &self.queues[queue];
        Ok((self.ring_config(queue)?, q.kick.try_clone()?, q.call.try_clone()?))
    }

    fn ring_config(&self, queue: usize) -> io::Result<VringConfigData> {
        let q = &self.queues[queue];
        let va = |addr| self.mem.get_host_address(GuestAddress(addr)).map(|p| p as u64).map_err(io::Error::other);
        Ok(VringConfigData {
            queue_max_size: q.layout.size,
            queue_size: q.layout.size,
            desc_table_addr: va(q.layout.descriptors)?,
            avail_ring_addr: va(q.layout.available)?,
            used_ring_addr: va(q.layout.used)?,
            ..Default::default()
        })
    }

    /// Sends the size, addresses, base and kick event of a queue.
    pub fn prepare_queue(&self, queue: usize, base: u16) -> io::Result<()> {
        let (q, vhost) = (&self.queues[queue], &self.vhost);
        let config = self.ring_config(queue)?;
        vhost.set_vring_num(queue, q.layout.size).map_err(io::Error::other)?;
        vhost.set_vring_base(queue, base).map_err(io::Error::other)?;
        vhost.set_vring_addr(queue, &config).map_err(io::Error::other)?;
        vhost.set_vring_kick(queue, &q.kick).map_err(io::Error::other)
    }

    /// Stops a queue (VHOST_USER_GET_VRING_BASE) and returns the number of its next available entry.
    pub fn stop_queue(&self, queue: usize) -> io::Result<u16> {
        self.vhost.get_vring_base(queue).map(|base| base as u16).map_err(io::Error::other)
    }

    /// Empties a stopped queue, as a booting guest does.
    pub fn clear_queue(&self, queue: usize) -> io::Result<()> {
        let q = &self.queues[queue];
        let len = q.layout.heap.0 - q.layout.descriptors;
        self.mem.write_slice(&vec![0; len as usize], GuestAddress(q.layout.descriptors)).map_err(io::Error::other)?;
        *q.driver.lock() = Driver::new(&q.layout);
        Ok(())
    }

    /// Resets the device (VHOST_USER_RESET_DEVICE), empties all queues and starts them.
    pub fn reset_device(&mut self) -> io::Result<()> {
        self.vhost.reset_device().map_err(io::Error::other)?;
        self.set_features(0)?;
        (0..self.queues.len()).try_for_each(|queue| self.clear_queue(queue))?;
        self.start_all()
    }

    /// Reads the configuration space.
    pub fn config(&mut self, offset: u32, size: u32) -> io::Result<Vec<u8>> {
        let buf = vec![0; size as usize];
        let (_, data) =
            self.vhost.get_config(offset, size, VhostUserConfigFlags::empty(), &buf).map_err(io::Error::other)?;
        Ok(data)
    }

    /// The vhost-user connection, for messages without a method here.
    pub fn vhost(&mut self) -> &mut Connection {
        &mut self.vhost
    }

    /// Guest memory: two adjacent regions of equal size, from [`MEMORY_BASE`] on.
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.mem
    }

    /// The address where the first memory region ends and the second one starts.
    pub fn seam(&self) -> u64 {
        MEMORY_BASE + self.options.mem_size as u64 / 2
    }

    pub fn layout(&self, queue: usize) -> Layout {
        self.queues[queue].layout
    }

    /// Makes a request available, and notifies the device if it wants notifications. Leaves out empty buffers. Fails
    /// with ENOMEM if the queue is out of memory or descriptors.
    pub fn submit(&self, queue: usize, readable: &[&[u8]], writable_lens: &[usize]) -> io::Result<Token> {
        let q = &self.queues[queue];
        let mut driver = q.driver.lock();
        let token = driver.add(&self.mem, self.options.indirect, readable, writable_lens)?;
        self.publish(q, &mut driver)?;
        Ok(token)
    }

    /// Waits for the next request that the device returns. Fails with ETIMEDOUT.
    pub fn wait(&self, queue: usize, timeout: Duration) -> io::Result<Completion> {
        let q = &self.queues[queue];
        let mut driver = q.driver.lock();
        if let Some(done) = driver.done.pop_front() {
            return Ok(done);
        }
        let used = self.next_used(q, &mut driver, timeout)?;
        driver.finish(&self.mem, used)
    }

    /// Waits until the device returns this request. Keeps others that come first for [`Frontend::wait`].
    pub fn wait_for(&self, queue: usize, token: Token, timeout: Duration) -> io::Result<Completion> {
        let q = &self.queues[queue];
        let mut driver = q.driver.lock();
        if let Some(at) = driver.done.iter().position(|done| done.token == token) {
            return driver.done.remove(at).ok_or_else(|| io::ErrorKind::NotFound.into());
        }
        let end = Instant::now() + timeout;
        loop {
            let used = self.next_used(q, &mut driver, end.saturating_duration_since(Instant::now()))?;
            let done = driver.finish(&self.mem, used)?;
            if done.token == token {
                return Ok(done);
            }
            driver.done.push_back(done);
        }
    }

    /// Sends a FUSE request and waits for the reply. Returns the reply's body, or its errno; EPROTO if it is malformed.
    /// `extra` goes into a separate buffer. `out_size` is the room for the reply's body, in bytes.
    pub fn request(
        &self,
        queue: usize,
        opcode: u32,
        nodeid: u64,
        body: &[u8],
        extra: &[u8],
        out_size: usize,
    ) -> Result<Vec<u8>, i32> {
        let errno = |e: io::Error| e.raw_os_error().unwrap_or(libc::EIO);
        let (unique, head) = self.header(opcode, nodeid, body.len() + extra.len());
        let head = [&head, body].concat();
        let token = self.submit(queue, &[&head, extra], &[OUT_HEADER_LEN, out_size]).map_err(errno)?;
        let mut done = self.wait_for(queue, token, REQUEST_TIMEOUT).map_err(errno)?;
        parse_reply(&done, unique)?;
        Ok(done.data.split_off(OUT_HEADER_LEN))
    }

    /// Makes a fuse_in_header with a new unique number, for a request with `len` bytes after the header.
    pub fn header(&self, opcode: u32, nodeid: u64, len: usize) -> (u64, [u8; IN_HEADER_LEN]) {
        let unique = self.unique.fetch_add(2, Ordering::Relaxed);
        let mut head = [0; IN_HEADER_LEN];
        head[..4].copy_from_slice(&((IN_HEADER_LEN + len) as u32).to_le_bytes());
        head[4..8].copy_from_slice(&opcode.to_le_bytes());
        head[8..16].copy_from_slice(&unique.to_le_bytes());
        head[16..24].copy_from_slice(&nodeid.to_le_bytes());
        (unique, head)
    }

    /// Opens a FUSE session (version 7.45) that offers the INIT flags in `flags`. Returns fuse_init_out.
    pub fn fuse_init(&self, flags: u64) -> Result<Vec<u8>, i32> {
        // fuse_init_in: major, minor, max_readahead, flags, flags2, 11 unused words.
        let mut words = [0u32; 16];
        words[..5].copy_from_slice(&[7, 45, 128 << 10, flags as u32, (flags >> 32) as u32]);
        let body: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.request(1, FUSE_INIT, 0, &body, &[], 64)
    }

    /// Allocates `len` bytes of the queue's memory and returns their guest address. They are never freed.
    pub fn alloc(&self, queue: usize, len: usize) -> io::Result<u64> {
        self.queues[queue].driver.lock().heap.alloc(len as u64).ok_or_else(no_memory)
    }

    /// Allocates `n` descriptors of the queue. They are never freed.
    pub fn take_descriptors(&self, queue: usize, n: usize) -> io::Result<Vec<u16>> {
        self.queues[queue].driver.lock().take_descriptors(n)
    }

    /// Writes descriptor number `index` of the queue's table.
    pub fn write_descriptor(&self, queue: usize, index: u16, descriptor: Descriptor) -> io::Result<()> {
        let addr = self.queues[queue].layout.descriptors + u64::from(index) * 16;
        self.mem.write_obj(descriptor, GuestAddress(addr)).map_err(io::Error::other)
    }

    /// Makes the chain at `head` available without a check, and notifies the device.
    pub fn push_raw(&self, queue: usize, head: u16) -> io::Result<()> {
        self.offer(queue, &[head])?;
        self.queues[queue].kick.write(1)
    }

    /// Makes several chains available at once without a check, and notifies the device if it wants notifications.
    pub fn offer(&self, queue: usize, heads: &[u16]) -> io::Result<()> {
        let q = &self.queues[queue];
        let mut driver = q.driver.lock();
        heads.iter().try_for_each(|head| driver.push(&self.mem, *head))?;
        self.publish(q, &mut driver)
    }

    /// The next entry of the used ring, (head, length), if there is one. It is not checked.
    pub fn poll_raw(&self, queue: usize) -> io::Result<Option<(u32, u32)>> {
        self.queues[queue].driver.lock().poll(&self.mem)
    }

    /// Waits for the next entry of the used ring, (head, length). It is not checked. Fails with ETIMEDOUT.
    pub fn wait_raw(&self, queue: usize, timeout: Duration) -> io::Result<(u32, u32)> {
        let q = &self.queues[queue];
        self.next_used(q, &mut q.driver.lock(), timeout)
    }

    /// Number of notifications for the queue since [`Frontend::wait`] or this method last saw one.
    pub fn interrupts(&self, queue: usize) -> u64 {
        self.queues[queue].call.read().unwrap_or(0)
    }

    /// Notifies the device of a queue.
    pub fn kick(&self, queue: usize) -> io::Result<()> {
        self.queues[queue].kick.write(1)
    }

    /// Takes the notifications of a queue back that the device has not seen.
    pub fn take_kicks(&self, queue: usize) -> u64 {
        self.queues[queue].kick.read().unwrap_or(0)
    }

    fn publish(&self, q: &Queue, driver: &mut Driver) -> io::Result<()> {
        let old = driver.publish(&self.mem)?;
        if driver.kick_wanted(&self.mem, self.options.event_idx, old)? {
            q.kick.write(1)?;
        }
        Ok(())
    }

    fn next_used(&self, q: &Queue, driver: &mut Driver, timeout: Duration) -> io::Result<(u32, u32)> {
        let end = Instant::now() + timeout;
        loop {
            if let Some(used) = driver.poll(&self.mem)? {
                return Ok(used);
            }
            driver.want_interrupt(&self.mem)?;
            if let Some(used) = driver.poll(&self.mem)? {
                return Ok(used);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT));
            }
            if !q.poll(self.options.halt_poll.min(left), offer_cpu) {
                q.sleep(left)?;
            }
        }
    }
}

fn guest_memory(size: usize) -> io::Result<GuestMemoryMmap> {
    let file = File::from(memfd_create("thruway-frontend", MemfdFlags::CLOEXEC)?);
    file.set_len(size as u64)?;
    let half = size / 2;
    let part = |i: usize| -> io::Result<_> {
        let offset = FileOffset::new(file.try_clone()?, (i * half) as u64);
        Ok((GuestAddress(MEMORY_BASE + (i * half) as u64), half, Some(offset)))
    };
    GuestMemoryMmap::from_ranges_with_files([part(0)?, part(1)?]).map_err(io::Error::other)
}

/// Checks a reply to the request `unique`. Fails with its errno, or with EPROTO if it is malformed.
fn parse_reply(done: &Completion, unique: u64) -> Result<(), i32> {
    let Some(head) = done.data.first_chunk::<OUT_HEADER_LEN>() else { return Err(libc::EPROTO) };
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    if word(0) != done.len || head[8..] != unique.to_le_bytes() {
        return Err(libc::EPROTO);
    }
    match word(4) as i32 {
        0 => Ok(()),
        error => Err(-error),
    }
}

fn no_memory() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOMEM)
}

/// A virtqueue and its events.
struct Queue {
    layout: Layout,
    kick: EventFd,
    call: EventFd,
    epoll: Epoll,
    driver: Mutex<Driver>,
}

impl Queue {
    fn new(options: &Options, index: usize) -> io::Result<Self> {
        let layout = Layout::new(options, index)?;
        let (kick, call, epoll) = (EventFd::new(EFD_NONBLOCK)?, EventFd::new(EFD_NONBLOCK)?, Epoll::new()?);
        epoll.ctl(ControlOperation::Add, call.as_raw_fd(), EpollEvent::new(EventSet::IN, 0))?;
        Ok(Self { layout, kick, call, epoll, driver: Mutex::new(Driver::new(&layout)) })
    }

    /// Polls for a notification as KVM does when a vCPU has halted (kvm_vcpu_halt() in virt/kvm/kvm_main.c): for
    /// `time`, or until `offer`, which yields the CPU, returns true: another thread wants it. Returns true if there was
    /// a notification.
    fn poll(&self, time: Duration, offer: impl Fn() -> bool) -> bool {
        let start = Instant::now();
        while start.elapsed() < time {
            if self.call.read().is_ok() {
                return true;
            }
            if offer() {
                return false;
            }
        }
        false
    }

    fn sleep(&self, timeout: Duration) -> io::Result<()> {
        let millis = i32::try_from(timeout.as_millis() + 1).unwrap_or(i32::MAX);
        match self.epoll.wait(millis, &mut [EpollEvent::default()]) {
            Ok(0) => Ok(()),
            Ok(_) => self.call.read().map(drop),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(e) => Err(e),
        }
    }
}

impl Layout {
    fn new(options: &Options, index: usize) -> io::Result<Self> {
        let share = (options.mem_size / options.queues) as u64 / PAGE * PAGE;
        let descriptors = MEMORY_BASE + index as u64 * share;
        let size = u64::from(options.queue_size);
        let available = page_up(descriptors + 16 * size);
        let used = page_up(available + 6 + 2 * size);
        let heap = (page_up(used + 6 + 8 * size), descriptors + share);
        if heap.0 >= heap.1 {
            return Err(no_memory());
        }
        Ok(Self { size: options.queue_size, descriptors, available, used, heap })
    }
}

fn page_up(n: u64) -> u64 {
    n.next_multiple_of(PAGE)
}

/// The driver's side of a split virtqueue.
struct Driver {
    layout: Layout,
    heap: Heap,
    /// Descriptors that are not in a chain.
    free: Vec<u16>,
    /// Requests in flight, by the head of their chain.
    pending: Vec<Option<Pending>>,
    done: VecDeque<Completion>,
    /// Entries added to the available ring, and entries of it that were published.
    added: u16,
    published: u16,
    /// Entries of the used ring that were read.
    seen: u16,
    tokens: u64,
}

struct Pending {
    token: Token,
    block: u64,
    writable: Vec<(u64, usize)>,
    descriptors: Vec<u16>,
}

impl Driver {
    fn new(layout: &Layout) -> Self {
        Self {
            layout: *layout,
            heap: Heap::new(layout.heap.0, layout.heap.1),
            free: (0..layout.size).rev().collect(),
            pending: (0..layout.size).map(|_| None).collect(),
            done: VecDeque::new(),
            added: 0,
            published: 0,
            seen: 0,
            tokens: 0,
        }
    }

    fn add(
        &mut self,
        mem: &GuestMemoryMmap,
        indirect: bool,
        readable: &[&[u8]],
        writable: &[usize],
    ) -> io::Result<Token> {
        let lens = readable.iter().map(|data| data.len()).chain(writable.iter().copied());
        let (offsets, size) = place(lens);
        let count = if indirect { 1 } else { offsets.len() };
        let descriptors = self.take_descriptors(count)?;
        let Some(block) = self.heap.alloc(size) else {
            self.free.extend(descriptors);
            return Err(no_memory());
        };
        let addrs: Vec<u64> = offsets.iter().map(|offset| block + offset).collect();
        for (data, addr) in readable.iter().zip(&addrs) {
            mem.write_slice(data, GuestAddress(*addr)).map_err(io::Error::other)?;
        }
        let writable: Vec<_> = addrs[readable.len()..].iter().copied().zip(writable.iter().copied()).collect();
        let readable = addrs.iter().copied().zip(readable.iter().map(|data| data.len()));
        let buffers = readable.map(|b| (b, 0)).chain(writable.iter().map(|b| (*b, VRING_DESC_F_WRITE)));
        let buffers: Vec<_> = buffers.filter(|((_, len), _)| *len > 0).collect();
        if indirect {
            let indices: Vec<u16> = (0..buffers.len() as u16).collect();
            write_chain(mem, block, &indices, &buffers)?;
            let len = 16 * buffers.len() as u32;
            let table = Descriptor::new(block, len, VRING_DESC_F_INDIRECT as u16, 0);
            write_at(mem, self.layout.descriptors + 16 * u64::from(descriptors[0]), table)?;
        } else {
            write_chain(mem, self.layout.descriptors, &descriptors[..buffers.len()], &buffers)?;
        }
        self.tokens += 1;
        let (token, head) = (Token(self.tokens), descriptors[0]);
        self.pending[usize::from(head)] = Some(Pending { token, block, writable, descriptors });
        self.push(mem, head)?;
        Ok(token)
    }

    fn take_descriptors(&mut self, n: usize) -> io::Result<Vec<u16>> {
        let at = self.free.len().checked_sub(n).ok_or_else(no_memory)?;
        Ok(self.free.split_off(at))
    }

    /// Adds an entry to the available ring. The device sees it after [`Driver::publish`].
    fn push(&mut self, mem: &GuestMemoryMmap, head: u16) -> io::Result<()> {
        let slot = u64::from(self.added % self.layout.size);
        write_at(mem, self.layout.available + 4 + 2 * slot, head)?;
        self.added = self.added.wrapping_add(1);
        Ok(())
    }

    /// Publishes the added entries. Returns the available index before.
    fn publish(&mut self, mem: &GuestMemoryMmap) -> io::Result<u16> {
        let addr = GuestAddress(self.layout.available + 2);
        mem.store(self.added, addr, Ordering::Release).map_err(io::Error::other)?;
        Ok(std::mem::replace(&mut self.published, self.added))
    }

    fn kick_wanted(&self, mem: &GuestMemoryMmap, event_idx: bool, old: u16) -> io::Result<bool> {
        fence(Ordering::SeqCst);
        if !event_idx {
            return Ok(load(mem, self.layout.used)? & VRING_USED_F_NO_NOTIFY as u16 == 0);
        }
        let event = load(mem, self.layout.used + 4 + 8 * u64::from(self.layout.size))?;
        let new = self.published;
        Ok(new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old))
    }

    /// Asks for an interrupt with the next used entry.
    fn want_interrupt(&self, mem: &GuestMemoryMmap) -> io::Result<()> {
        let addr = self.layout.available + 4 + 2 * u64::from(self.layout.size);
        mem.store(self.seen, GuestAddress(addr), Ordering::Relaxed).map_err(io::Error::other)?;
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn poll(&mut self, mem: &GuestMemoryMmap) -> io::Result<Option<(u32, u32)>> {
        if load(mem, self.layout.used + 2)? == self.seen {
            return Ok(None);
        }
        let slot = u64::from(self.seen % self.layout.size);
        let addr = GuestAddress(self.layout.used + 4 + 8 * slot);
        let [head, len]: [u32; 2] = mem.read_obj(addr).map_err(io::Error::other)?;
        self.seen = self.seen.wrapping_add(1);
        Ok(Some((head, len)))
    }

    fn finish(&mut self, mem: &GuestMemoryMmap, (head, len): (u32, u32)) -> io::Result<Completion> {
        let unknown = || io::Error::other(format!("the device returned chain {head}, which it did not have"));
        let pending = self.pending.get_mut(head as usize).and_then(Option::take).ok_or_else(unknown)?;
        let mut data = Vec::new();
        for (addr, room) in &pending.writable {
            let (at, n) = (data.len(), (len as usize - data.len()).min(*room));
            data.resize(at + n, 0);
            mem.read_slice(&mut data[at..], GuestAddress(*addr)).map_err(io::Error::other)?;
        }
        self.heap.free(pending.block);
        self.free.extend(pending.descriptors);
        Ok(Completion { token: pending.token, len, data })
    }
}

/// Lays out an indirect table and its buffers. Returns the buffers' offsets and the size of the whole. Large buffers
/// are page aligned.
fn place(lens: impl Iterator<Item = usize> + Clone) -> (Vec<u64>, u64) {
    let mut end = 16 * lens.clone().count() as u64;
    let offsets = lens.map(|len| {
        let align = if len as u64 >= PAGE { PAGE } else { 16 };
        let at = end.next_multiple_of(align);
        end = at + len as u64;
        at
    });
    let offsets = offsets.collect();
    (offsets, end)
}

type Buffer = ((u64, usize), u32);

/// Writes a chain of the buffers into the descriptors `indices` of the table at `table`.
fn write_chain(mem: &GuestMemoryMmap, table: u64, indices: &[u16], buffers: &[Buffer]) -> io::Result<()> {
    for (i, ((addr, len), flags)) in buffers.iter().enumerate() {
        let next = indices.get(i + 1).copied();
        let flags = *flags | if next.is_some() { VRING_DESC_F_NEXT } else { 0 };
        let descriptor = Descriptor::new(*addr, *len as u32, flags as u16, next.unwrap_or(0));
        write_at(mem, table + 16 * u64::from(indices[i]), descriptor)?;
    }
    Ok(())
}

fn write_at<T: ByteValued>(mem: &GuestMemoryMmap, addr: u64, value: T) -> io::Result<()> {
    mem.write_obj(value, GuestAddress(addr)).map_err(io::Error::other)
}

fn load(mem: &GuestMemoryMmap, addr: u64) -> io::Result<u16> {
    mem.load(GuestAddress(addr), Ordering::Acquire).map_err(io::Error::other)
}

/// First-fit allocation of whole pages.
struct Heap {
    /// (start, end), sorted.
    free: Vec<(u64, u64)>,
    /// (start, end).
    taken: Vec<(u64, u64)>,
}

impl Heap {
    fn new(start: u64, end: u64) -> Self {
        Self { free: vec![(start, end)], taken: Vec::new() }
    }

    fn alloc(&mut self, len: u64) -> Option<u64> {
        let len = page_up(len.max(1));
        let at = self.free.iter().position(|(start, end)| end - start >= len)?;
        let start = self.free[at].0;
        self.free[at].0 += len;
        if self.free[at].0 == self.free[at].1 {
            self.free.remove(at);
        }
        self.taken.push((start, start + len));
        Some(start)
    }

    fn free(&mut self, block: u64) {
        let Some(at) = self.taken.iter().position(|(start, _)| *start == block) else { return };
        let (start, mut end) = self.taken.swap_remove(at);
        let at = self.free.partition_point(|(other, _)| *other < start);
        if let Some(after) = self.free.get(at).filter(|(next, _)| *next == end) {
            end = after.1;
            self.free.remove(at);
        }
        match at.checked_sub(1).map(|before| &mut self.free[before]) {
            Some(before) if before.1 == start => before.1 = end,
            _ => self.free.insert(at, (start, end)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_halted_cpu_polls_before_it_sleeps() {
        let queue = Queue::new(&Options::default(), 1).unwrap();
        let notify = || queue.call.write(1).unwrap();
        // Longer than any test, so that the time never ends the polling.
        let long = Duration::from_secs(3600);
        // Polling sees the notification while no other thread wants the CPU. Otherwise, or without time, sleep() gets
        // it.
        let offers = std::cell::Cell::new(0);
        let not_taken = || {
            offers.set(offers.get() + 1);
            if offers.get() == 2 {
                notify();
            }
            false
        };
        assert!(queue.poll(long, not_taken));
        assert_eq!(offers.get(), 2);
        assert!(!queue.poll(Duration::from_micros(1), || false));
        let taken = || {
            notify();
            true
        };
        assert!(!queue.poll(long, taken));
        assert!(!queue.poll(Duration::ZERO, || unreachable!()));
        queue.sleep(REQUEST_TIMEOUT).unwrap();
        assert!(queue.call.read().is_err());
    }

    #[test]
    fn the_heap_merges_what_is_freed() {
        let mut heap = Heap::new(PAGE, 9 * PAGE);
        let blocks: Vec<u64> = (0..8).map_while(|_| heap.alloc(1)).collect();
        assert_eq!(blocks.len(), 8);
        assert_eq!(heap.alloc(1), None);
        for i in [1, 3, 2, 0, 7, 5, 6, 4] {
            heap.free(blocks[i]);
        }
        assert_eq!(heap.free, [(PAGE, 9 * PAGE)]);
        assert_eq!(heap.alloc(8 * PAGE), Some(PAGE));
    }
}
