//! A virtqueue as vhost-user-backend has it, and what this device adds: late replies, and a stop that waits for the
//! worker.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;
use vhost_user_backend::{VringMutex, VringState, VringStateGuard, VringStateMutGuard, VringT};
use virtio_queue::{Error as QueueError, Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{GuestAddress, GuestAddressSpace};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::chain::{self, Segment, Table, Used};
use super::late::Late;
use super::region::{GuestMemory, Memory};
use super::scratch::Scratch;
use super::seat::{Glance, Seat, Turn};
use crate::fuse::Release;
use crate::limits;
use crate::record::{self, RingRecord};

/// A virtqueue of this device, as vhost-user-backend handles it.
#[derive(Clone)]
pub struct Vring(pub Arc<Ring>);

/// The state of a virtqueue. The order of its locks: `seat`, `late`, `vring`, `heads`. `busy` is the last.
pub struct Ring {
    /// The frontend's table. It is kept only while something is written that is there already.
    mem: GuestMemory,
    vring: VringMutex<GuestMemory>,
    /// Changed with `vring` locked.
    heads: Mutex<Heads>,
    /// A stop of the ring waits until it is free. `free` tells of that.
    seat: Mutex<Seat<Busy>>,
    free: Condvar,
    /// The driver's kicks. Locked after `vring`, and never while another lock is taken.
    kick: Mutex<Kick>,
    /// Wakes the deputy, which has the event, when the queue's own worker is back.
    back: Mutex<Weak<EventFd>>,
    late: Mutex<LateReplies>,
    /// The driver was not notified, because the frontend had given no call event.
    owed: AtomicBool,
    /// How many [`Busy`] there are. `idle` tells of the end of each.
    busy: Mutex<usize>,
    idle: Condvar,
    /// Somebody waits for the end of what was taken from the ring.
    stopping: AtomicBool,
    /// Requests that wait for a lock, or that are parked.
    locks: Arc<AtomicU32>,
    /// What its requests may wait for, each once.
    releases: Mutex<Vec<Arc<dyn Release>>>,
    /// What the next worker process finds of it. Changed with `vring` locked.
    record: OnceLock<RingRecord>,
    /// The driver's available index when the ring was started.
    there: AtomicU16,
}

/// The event by which the driver tells of new chains. vhost-user-backend has another one in its place, which never
/// comes: the thread that would wait for it has all queues.
#[derive(Default)]
struct Kick {
    event: Option<File>,
    /// Who waits for it, and as what.
    waiter: Option<(Arc<Epoll>, u64)>,
}

impl Kick {
    fn wait(&mut self, waiter: Option<(Arc<Epoll>, u64)>) -> io::Result<()> {
        self.end_wait();
        if let (Some(event), Some((epoll, data))) = (&self.event, &waiter) {
            epoll.ctl(ControlOperation::Add, event.as_raw_fd(), EpollEvent::new(EventSet::IN, *data))?;
            self.waiter = waiter;
        }
        Ok(())
    }

    /// The frontend has the event open too, so to close it would not end the wait.
    fn end_wait(&mut self) -> Option<(Arc<Epoll>, u64)> {
        let waiter = self.waiter.take()?;
        if let Some(event) = &self.event {
            // It fails only if nobody waits.
            let _ = waiter.0.ctl(ControlOperation::Delete, event.as_raw_fd(), EpollEvent::default());
        }
        Some(waiter)
    }
}

/// The chains that the device has taken and not given back.
#[derive(Default)]
struct Heads {
    /// A bit for each head.
    taken: [u64; limits::CHAINS as usize / 64],
    /// The driver broke the rules: no more chains are taken.
    ended: bool,
}

/// How a driver broke the rules (VIRTIO 1.3, section 2.7).
#[derive(Debug)]
enum Breach {
    OutOfRange(u16),
    InFlight(u16),
    /// The available index is here, and the device has taken the chains before `next`.
    Index {
        at: u16,
        next: u16,
    },
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::OutOfRange(head) => write!(f, "it offered chain {head}, which is beyond the descriptor table"),
            Self::InFlight(head) => write!(f, "it offered chain {head}, which it had not got back"),
            Self::Index { at, next } => write!(
                f,
                "its available index is {at}, which is before the next chain to take, {next}, or too far beyond it"
            ),
        }
    }
}

impl Heads {
    fn take(&mut self, head: u16, size: u16) -> Result<(), Breach> {
        let (word, bit) = (usize::from(head) / 64, 1 << (head % 64));
        match self.taken.get_mut(word) {
            Some(word) if head < size && *word & bit == 0 => *word |= bit,
            Some(_) if head < size => return Err(Breach::InFlight(head)),
            _ => return Err(Breach::OutOfRange(head)),
        }
        Ok(())
    }

    fn give_back(&mut self, head: u16) {
        if let Some(word) = self.taken.get_mut(usize::from(head) / 64) {
            *word &= !(1 << (head % 64));
        }
    }
}

/// Where a late reply belongs.
pub struct Completion {
    session: u64,
    head: u16,
    /// Guest addresses, as the memory table may change until the reply is there. Enough for the longest reply.
    segments: Vec<Segment>,
}

/// Replies that came late, and the ring as it was when it stopped.
type LateReplies = Late<(Completion, Vec<u8>), QueueState>;

type State<'a> = <VringMutex<GuestMemory> as VringStateMutGuard<'a, GuestMemory>>::G;

impl Ring {
    /// The seat, which is locked for a moment.
    pub fn seat(&self) -> MutexGuard<'_, Seat<Busy>> {
        self.seat.lock()
    }

    /// Waits until the seat is free. It stays so while the lock is held.
    fn free_seat(&self) -> MutexGuard<'_, Seat<Busy>> {
        let mut seat = self.seat.lock();
        while !seat.is_free() {
            self.free.wait(&mut seat);
        }
        seat
    }

    /// Takes the seat when it is free. `own`: for the queue's own worker.
    pub fn sit(&self, own: bool) -> (Turn, Option<Box<Scratch>>) {
        let mut seat = self.free_seat();
        (seat.take(own), seat.scratch.take())
    }

    /// A thread is back whose seat was taken over. Its request's chain goes back, if it has a reply.
    pub fn return_from(&self, busy: Busy, own: bool, mem: &Memory, used: Option<Used>) {
        match used {
            Some(used) => busy.give_back(mem, used),
            None => drop(busy),
        }
        if own {
            self.seat.lock().own_away = false;
            // It fails only if the event is set already.
            self.back.lock().upgrade().map(|back| back.write(1));
        }
    }

    /// Leaves the seat.
    pub fn leave(&self, mut seat: MutexGuard<Seat<Busy>>, scratch: Box<Scratch>) {
        seat.leave(scratch);
        drop(seat);
        self.free.notify_all();
    }

    /// Takes the seat from a thread that still serves the request of this glance. `back`: what wakes the new one when
    /// the queue's own worker is back.
    pub fn take_over(self: &Arc<Self>, glance: Glance, back: &Arc<EventFd>) -> Option<Turn> {
        let turn = self.seat.lock().take_over(glance, || self.occupy())?;
        *self.back.lock() = Arc::downgrade(back);
        Some(turn)
    }

    /// Has `epoll` wait for the driver's kicks, in place of who did so far. `data`: what an event says then. The wait
    /// ends with the ring's stop. Does nothing if the ring is stopped.
    pub fn watch_kick(&self, epoll: &Arc<Epoll>, data: u64) -> io::Result<()> {
        let state = self.vring.get_ref();
        if !live(&state) {
            return Ok(());
        }
        self.kick.lock().wait(Some((epoll.clone(), data)))
    }

    /// Calls `f` with the event by which the driver tells of new chains.
    pub fn with_kick<R>(&self, f: impl FnOnce(Option<RawFd>) -> R) -> R {
        f(self.kick.lock().event.as_ref().map(AsRawFd::as_raw_fd))
    }

    /// Takes the kicks that have come.
    pub fn clear_kick(&self) {
        let mut kick = self.kick.lock();
        let read = kick.event.as_ref().map(|event| rustix::io::read(event, &mut [0; 8]));
        if let Some(Err(e)) = read.filter(|read| *read != Err(Errno::AGAIN) && *read != Err(Errno::INTR)) {
            tracing::error!("the frontend's kick is no event ({e}): its queue is not served any more");
            kick.end_wait();
        }
    }

    /// Asks the driver for a kick with the next chain. False if there is one to take already.
    pub fn asks_for_kick(&self) -> bool {
        let mut state = self.vring.get_mut();
        let mem = self.mem.memory();
        if !live(&state) || !is_near(&state, &mem) {
            return true;
        }
        // If the ring's memory is gone, the next kick tries again.
        !state.get_queue_mut().enable_notification(&*mem).unwrap_or(false)
    }

    /// Leaves the chains that were in the ring at its start, and asks the driver for a kick with the next one. False if
    /// there is a next one already, or if the ring is served from its beginning on, as a booting guest's is.
    pub fn keeps_what_is_there(&self) -> bool {
        let mut state = self.vring.get_mut();
        let mem = self.mem.memory();
        if !live(&state) || !is_near(&state, &mem) {
            return false;
        }
        let queue = state.get_queue_mut();
        let next = queue.next_avail();
        let mut keeps = || {
            let at = queue.avail_idx(&*mem, Ordering::Acquire)?.0;
            queue.set_next_avail(at);
            // The driver may not have been asked for a kick when it added what has come since the start.
            Ok::<_, QueueError>(at == self.there.load(Ordering::Relaxed) && !queue.enable_notification(&*mem)?)
        };
        // If the ring's memory is gone, there is nothing to serve.
        let keeps = next > 0 && keeps().unwrap_or(true);
        queue.set_next_avail(next);
        keeps
    }

    /// Waits until no thread serves the ring.
    pub fn settle(&self) {
        drop(self.free_seat());
    }

    /// Records what is taken from the ring from now on, and goes on with what an earlier worker process has left in it.
    /// Does nothing if the ring is stopped, or the second time. `index`: the queue's number.
    pub fn adopt(&self, index: usize) {
        let Some(record) = record::get().filter(|_| self.record.get().is_none()) else { return };
        let mut seat = self.free_seat();
        let mut state = self.vring.get_mut();
        if !live(&state) {
            return;
        }
        let record = self.record.get_or_init(|| record.ring(index));
        let queue = state.get_queue_mut();
        let Some(left) = record.adopt(queue.next_used(), queue.next_avail()) else { return };
        queue.set_next_avail(left.next_avail);
        let mut heads = self.heads.lock();
        for head in left.taken.iter().copied().chain(left.done.iter().map(|(head, _)| *head)) {
            // It fails if the queue is shorter now. Then the chain is not served.
            let _ = heads.take(head, queue.size());
        }
        drop(heads);
        seat.heads.extend(left.taken);
        seat.used.extend(left.done.into_iter().map(|(head, len)| Used { head, len }));
        // The driver may not have been notified of what was given back last.
        self.notify(&state);
    }

    /// Whether an earlier worker process has left something.
    pub fn has_leftovers(&self) -> bool {
        let seat = self.seat.lock();
        !seat.heads.is_empty() || !seat.used.is_empty()
    }

    /// A request of this chain begins on this thread.
    ///
    /// # Errors
    /// EIO if it killed earlier worker processes.
    pub fn begin(&self, head: u16) -> Result<(), Errno> {
        let Some(record) = self.record.get() else { return Ok(()) };
        record::begin(record.claim(head).ok_or(Errno::IO)?);
        Ok(())
    }

    /// The request of this chain was served, and its reply is in the guest's memory.
    pub fn served(&self, used: &Used) {
        if let Some(record) = self.record.get() {
            record.done(used.head, used.len);
        }
    }

    /// The queue's descriptor table.
    pub fn table(&self) -> Table {
        table(&self.vring.get_ref())
    }

    /// The number of chains that were taken and not given back.
    pub fn in_flight(&self) -> u32 {
        self.heads.lock().taken.iter().map(|word| word.count_ones()).sum()
    }

    /// The number of requests that wait for a lock.
    pub fn waits_for_lock(&self) -> u32 {
        self.locks.load(Ordering::SeqCst)
    }

    /// Where requests that wait for a lock are counted.
    pub fn locks(&self) -> &Arc<AtomicU32> {
        &self.locks
    }

    /// Whether its driver broke the rules.
    pub fn is_broken(&self) -> bool {
        self.heads.lock().ended
    }

    /// Its length.
    pub fn size(&self) -> u16 {
        self.vring.get_ref().get_queue().size()
    }

    /// Gives `used` back to the driver, notifies it if it wants that, and takes up to `most` chain heads. Returns the
    /// descriptor table of those chains.
    ///
    /// With `rest`, the worker is about to sleep: if there is nothing to take, the driver will notify of the next
    /// chain. `index`: the queue's number, for the log.
    pub fn exchange(
        &self,
        index: usize,
        mem: &Memory,
        used: &mut Vec<Used>,
        heads: &mut Vec<u16>,
        most: usize,
        rest: bool,
    ) -> Table {
        let mut state = self.vring.get_mut();
        self.publish(&mut state, mem, used);
        let mut taken = self.heads.lock();
        if live(&state) && !taken.ended && is_near(&state, mem) {
            let record = self.record.get();
            if let Err(breach) = take(state.get_queue_mut(), mem, (&mut taken, record), heads, most, rest) {
                taken.ended = true;
                tracing::error!(
                    "the guest's driver broke VIRTIO's rules on queue {index}: {breach}. The queue stays unserved \
                     until the guest resets the device"
                );
            }
        }
        table(&state)
    }

    /// Whether there are chains to take.
    pub fn has_more(&self, mem: &Memory) -> bool {
        let state = self.vring.get_ref();
        let queue = state.get_queue();
        is_near(&state, mem) && queue.avail_idx(mem, Ordering::Acquire).is_ok_and(|at| at.0 != queue.next_avail())
    }

    /// Gives `used` back to the driver before its batch is over.
    pub fn flush(&self, mem: &Memory, used: &mut Vec<Used>) {
        self.publish(&mut self.vring.get_mut(), mem, used);
    }

    fn publish(&self, state: &mut State, mem: &Memory, used: &mut Vec<Used>) {
        if used.is_empty() || !is_near(state, mem) {
            return;
        }
        let queue = state.get_queue_mut();
        let mut heads = self.heads.lock();
        for done in used.drain(..) {
            let used_idx = queue.next_used();
            // Before the driver sees it: it may offer the head again at once.
            heads.give_back(done.head);
            // Fails if the ring's memory is gone.
            let mut add = || drop(queue.add_used(mem, done.head, done.len));
            match self.record.get() {
                Some(record) => record.give_back(done.head, done.len, used_idx, add),
                None => add(),
            }
        }
        drop(heads);
        if queue.needs_notification(mem).unwrap_or(true) {
            self.notify(state);
        }
    }

    fn notify(&self, state: &VringState<GuestMemory>) {
        let sent = state.get_call().is_some() && state.signal_used_queue().is_ok();
        if !sent {
            self.owed.store(true, Ordering::Relaxed);
        }
    }

    /// What a late reply of up to `bytes` to the chain at `head` needs to find its way. Call it while the chain is
    /// served.
    pub fn completion(&self, head: u16, segments: &[Segment], bytes: usize) -> Completion {
        let segments = chain::first(segments, bytes).to_vec();
        Completion { session: self.late.lock().session(), head, segments }
    }

    /// Delivers a late reply, now or when the ring runs again; drops it if the ring's session is over.
    pub fn complete(&self, completion: Completion, reply: Vec<u8>) {
        let mut late = self.late.lock();
        if late.keep(completion.session, (completion, reply)) {
            self.deliver(&mut late);
        }
    }

    fn deliver(&self, late: &mut LateReplies) {
        let mut state = self.vring.get_mut();
        if live(&state) {
            self.give_back(&mut state, late);
        }
    }

    fn give_back(&self, state: &mut State, late: &mut LateReplies) {
        if !late.owes() {
            return;
        }
        let mem = self.mem.memory();
        let write = |(completion, reply): (Completion, Vec<u8>)| {
            Used::new(completion.head, chain::write(&mem, &completion.segments, &reply).unwrap_or(0))
        };
        let mut used = late.take().map(write).collect();
        self.publish(state, &mem, &mut used);
    }

    /// Set while somebody waits for the end of what was taken from the ring.
    pub fn stopping(&self) -> &AtomicBool {
        &self.stopping
    }

    /// Keeps the ring from being stopped while another thread serves a request.
    pub fn occupy(self: &Arc<Self>) -> Busy {
        *self.busy.lock() += 1;
        Busy(self.clone())
    }

    /// Waits until the worker, the kernel and other threads are done with what was taken from the ring. Keeps the
    /// worker out.
    fn rest(&self) -> MutexGuard<'_, Seat<Busy>> {
        self.stopping.store(true, Ordering::Relaxed);
        loop {
            let mut seat = self.free_seat();
            let Seat { scratch, used, .. } = &mut *seat;
            if let Some(scratch) = scratch {
                used.append(scratch.finish());
            }
            self.flush(&self.mem.memory(), used);
            // Those that come to wait from now on see that the ring is stopping.
            let releases = self.releases.lock().clone();
            releases.iter().for_each(|release| release.release());
            let mut busy = self.busy.lock();
            if *busy == 0 {
                drop(busy);
                self.stopping.store(false, Ordering::Relaxed);
                return seat;
            }
            // Its end needs the seat's lock.
            drop(seat);
            while *busy > 0 {
                self.idle.wait(&mut busy);
            }
        }
    }

    /// Whenever the ring stops, the requests that wait for this are answered.
    pub fn release_by(&self, release: Arc<dyn Release>) {
        let mut releases = self.releases.lock();
        if !releases.iter().any(|known| std::ptr::addr_eq(Arc::as_ptr(known), Arc::as_ptr(&release))) {
            releases.push(release);
        }
    }

    /// Whether chains may be taken from it.
    pub fn is_started(&self) -> bool {
        self.vring.get_ref().get_queue().ready()
    }

    /// Whether it holds replies that came while it was stopped.
    pub fn owes(&self) -> bool {
        self.late.lock().owes()
    }

    fn stop(&self) {
        self.kick.lock().end_wait();
        let was_ready = {
            let mut state = self.vring.get_mut();
            let was_ready = state.get_queue().ready();
            state.get_queue_mut().set_ready(false);
            was_ready
        };
        drop(self.rest());
        let mut late = self.late.lock();
        // A queue whose driver broke the rules does not go on.
        if was_ready && !self.heads.lock().ended {
            late.stop(self.snapshot());
        }
    }

    fn start(&self) {
        let mut seat = self.free_seat();
        let mut late = self.late.lock();
        if !late.start(self.snapshot()) {
            self.forget(&mut seat);
        }
        drop(seat);
        let there = self.vring.get_ref().get_queue().avail_idx(&*self.mem.memory(), Ordering::Acquire);
        self.there.store(there.map_or(0, |there| there.0), Ordering::Relaxed);
        self.vring.set_queue_ready(true);
        self.deliver(&mut late);
    }

    /// Another session has begun: nothing of the one before goes back to the driver.
    fn forget(&self, seat: &mut Seat<Busy>) {
        if let Some(scratch) = &mut seat.scratch {
            scratch.finish().clear();
        }
        // Chains remain here if the ring's memory was gone.
        seat.used.clear();
        seat.heads.clear();
        *self.heads.lock() = Heads::default();
        self.record.get().inspect(|record| record.clear());
    }

    fn snapshot(&self) -> QueueState {
        QueueState { ready: false, ..self.vring.get_ref().get_queue().state() }
    }

    fn set_kick(&self, file: Option<File>) {
        let stand_in = file.as_ref().and_then(|_| {
            let failed = |e: &Errno| tracing::error!("a queue is not served, since it got no event: {e}");
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).inspect_err(failed).ok().map(File::from)
        });
        self.vring.set_kick(stand_in);
        let mut kick = self.kick.lock();
        let waiter = kick.end_wait();
        kick.event = file;
        // Another event for a ring that runs.
        if let Err(e) = kick.wait(waiter) {
            tracing::error!("nobody hears of a queue's requests: {e}");
        }
    }

    /// Forgets the session: the ring is not served until it is set up again, and late replies are dropped.
    pub fn reset(&self) {
        self.vring.set_queue_ready(false);
        let mut seat = self.rest();
        self.late.lock().forget();
        self.forget(&mut seat);
        drop(seat);
        self.owed.store(false, Ordering::Relaxed);
        self.set_kick(None);
        self.vring.set_call(None);
    }
}

/// A request that another thread serves. The ring cannot be stopped meanwhile.
pub struct Busy(Arc<Ring>);

impl Busy {
    pub fn ring(&self) -> &Arc<Ring> {
        &self.0
    }

    /// Gives the chain back.
    pub fn give_back(self, mem: &Memory, used: Used) {
        // The session has not changed since the chain was taken: it cannot end while the ring is busy. The lock keeps
        // the ring from being disabled now.
        let _late = self.0.late.lock();
        self.0.publish(&mut self.0.vring.get_mut(), mem, &mut vec![used]);
    }

    /// Delivers the reply.
    pub fn complete(self, completion: Completion, reply: Vec<u8>) {
        let ring = &self.0;
        let mut late = ring.late.lock();
        if late.keep(completion.session, (completion, reply)) {
            // Even while the ring is being stopped, as the worker's batch is.
            ring.give_back(&mut ring.vring.get_mut(), &mut late);
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        *self.0.busy.lock() -= 1;
        self.0.idle.notify_all();
    }
}

fn set_nonblocking(file: &File) {
    // It fails if the frontend gave something that is no event. Then the frontend bears the consequences.
    let _ = fcntl_setfl(file, OFlags::NONBLOCK);
}

/// Whether the driver may see chains taken and given back (vhost-user, "Ring states").
fn live(state: &VringState<GuestMemory>) -> bool {
    state.is_enabled() && state.get_queue().ready()
}

/// Whether the ring may be touched. A guest could have put it into a file that it has mapped.
fn is_near(state: &VringState<GuestMemory>, mem: &Memory) -> bool {
    let queue = state.get_queue();
    let size = usize::from(queue.size());
    // VIRTIO 1.3, section 2.7. The sizes include the event field at the end of each ring.
    [(queue.desc_table(), 16 * size), (queue.avail_ring(), 6 + 2 * size), (queue.used_ring(), 6 + 8 * size)]
        .into_iter()
        .all(|(addr, len)| chain::is_near(mem, GuestAddress(addr), len))
}

fn table(state: &VringState<GuestMemory>) -> Table {
    let queue = state.get_queue();
    Table { addr: GuestAddress(queue.desc_table()), len: queue.size() }
}

/// Takes chains until the driver breaks the rules.
fn take(
    queue: &mut Queue,
    mem: &Memory,
    (taken, record): (&mut Heads, Option<&RingRecord>),
    heads: &mut Vec<u16>,
    most: usize,
    rest: bool,
) -> Result<(), Breach> {
    let size = queue.size();
    let mut look = || -> Result<Result<(), Breach>, QueueError> {
        queue.disable_notification(mem)?;
        loop {
            for chain in queue.iter(mem)?.take(most) {
                if let Err(breach) = taken.take(chain.head_index(), size) {
                    return Ok(Err(breach));
                }
                if let Some(record) = record {
                    record.take(chain.head_index(), RingRecord::now());
                }
                heads.push(chain.head_index());
            }
            // Looks again: a chain may have come before the driver saw that notifications are wanted.
            if !heads.is_empty() || !rest || !queue.enable_notification(mem)? {
                return Ok(Ok(()));
            }
        }
    };
    match look() {
        Err(QueueError::InvalidAvailRingIndex) => {
            let at = queue.avail_idx(mem, Ordering::Relaxed).map_or(0, |at| at.0);
            Err(Breach::Index { at, next: queue.next_avail() })
        }
        // The ring's memory is gone. Nobody can be told; the next kick tries again.
        Err(_) => Ok(()),
        Ok(taken) => taken,
    }
}

impl<'a> VringStateGuard<'a, GuestMemory> for Vring {
    type G = <VringMutex<GuestMemory> as VringStateGuard<'a, GuestMemory>>::G;
}

impl<'a> VringStateMutGuard<'a, GuestMemory> for Vring {
    type G = State<'a>;
}

impl VringT<GuestMemory> for Vring {
    fn new(mem: GuestMemory, max_queue_size: u16) -> Result<Self, QueueError> {
        Ok(Self(Arc::new(Ring {
            vring: VringMutex::new(mem.clone(), max_queue_size)?,
            heads: Mutex::default(),
            mem,
            seat: Mutex::default(),
            free: Condvar::new(),
            kick: Mutex::default(),
            back: Mutex::default(),
            late: Mutex::default(),
            owed: AtomicBool::new(false),
            busy: Mutex::default(),
            idle: Condvar::new(),
            stopping: AtomicBool::new(false),
            releases: Mutex::default(),
            record: OnceLock::new(),
            there: AtomicU16::new(0),
            locks: Arc::default(),
        })))
    }

    fn get_ref(&self) -> <Self as VringStateGuard<'_, GuestMemory>>::G {
        self.0.vring.get_ref()
    }

    fn get_mut(&self) -> <Self as VringStateMutGuard<'_, GuestMemory>>::G {
        self.0.vring.get_mut()
    }

    fn add_used(&self, desc_index: u16, len: u32) -> Result<(), QueueError> {
        self.0.vring.add_used(desc_index, len)
    }

    fn signal_used_queue(&self) -> io::Result<()> {
        self.0.vring.signal_used_queue()
    }

    fn enable_notification(&self) -> Result<bool, QueueError> {
        self.0.vring.enable_notification()
    }

    fn disable_notification(&self) -> Result<(), QueueError> {
        self.0.vring.disable_notification()
    }

    fn needs_notification(&self) -> Result<bool, QueueError> {
        self.0.vring.needs_notification()
    }

    fn set_enabled(&self, enabled: bool) {
        self.0.vring.set_enabled(enabled);
        if enabled {
            self.0.deliver(&mut self.0.late.lock());
        } else {
            self.0.kick.lock().end_wait();
            // Returns when neither the worker nor a late reply touches the ring: the frontend goes on then.
            drop(self.0.rest());
            drop(self.0.late.lock());
        }
    }

    fn set_queue_info(&self, desc_table: u64, avail_ring: u64, used_ring: u64) -> Result<(), QueueError> {
        self.0.vring.set_queue_info(desc_table, avail_ring, used_ring)
    }

    fn queue_next_avail(&self) -> u16 {
        self.0.vring.queue_next_avail()
    }

    fn set_queue_next_avail(&self, base: u16) {
        self.0.vring.set_queue_next_avail(base);
    }

    fn set_queue_next_used(&self, idx: u16) {
        self.0.vring.set_queue_next_used(idx);
    }

    fn queue_used_idx(&self) -> Result<u16, QueueError> {
        self.0.vring.queue_used_idx()
    }

    fn set_queue_size(&self, num: u16) {
        self.0.vring.set_queue_size(num);
    }

    fn set_queue_event_idx(&self, enabled: bool) {
        self.0.vring.set_queue_event_idx(enabled);
    }

    fn set_queue_ready(&self, ready: bool) {
        if ready { self.0.start() } else { self.0.stop() }
    }

    fn set_kick(&self, file: Option<File>) {
        // Another event may have replaced this one by the time the worker reads it, and the worker must not block.
        file.iter().for_each(set_nonblocking);
        self.0.set_kick(file);
    }

    fn read_kick(&self) -> io::Result<bool> {
        self.0.vring.read_kick()
    }

    fn set_call(&self, file: Option<File>) {
        let given = file.is_some();
        // User-mode Linux gives a pipe, which may be full.
        file.iter().for_each(set_nonblocking);
        self.0.vring.set_call(file);
        if given && self.0.owed.swap(false, Ordering::Relaxed) {
            self.0.notify(&self.0.vring.get_ref());
        }
    }

    fn set_err(&self, file: Option<File>) {
        self.0.vring.set_err(file);
    }
}
