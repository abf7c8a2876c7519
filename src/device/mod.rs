//! The virtio-fs device (VIRTIO 1.3, section 5.11) as a vhost-user backend.
//!
//! [`serve`] serves one frontend. Each queue that the guest uses has a worker thread (`worker`) that takes descriptor
//! chains (`chain`) from a virtqueue (`ring`) and passes each request to a [`Handler`] (`queue`). `origin` takes what
//! the worker does not do itself: it goes to a thread (`pool`) or to the kernel (`uring`), and its reply goes back by
//! the ring.

mod chain;
mod config;
mod crew;
mod deputy;
mod handler;
mod late;
mod lookout;
mod migration;
mod monitor;
mod offload;
mod origin;
mod poll;
mod pool;
mod queue;
mod region;
mod ring;
mod scratch;
mod seat;
mod shmem;
mod tally;
mod uring;
mod worker;

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserProtocolFeatures as Protocol, VhostUserShMemConfig,
    VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Backend, Error as VhostError, Listener};
use vhost_user_backend::{Error as BackendError, VhostUserBackend, VhostUserDaemon};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vm_memory::{GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::epoll::{Epoll, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::limits;
use crate::sandbox::cgroup;
use crate::window::Window;
use config::ConfigSpace;
use crew::Crew;
use lookout::Lookout;
use migration::Transfer;
use monitor::Connection;
use origin::Service;
use pool::Pools;
use queue::Workers;
use region::{GuestMemory, Memory, RegionState, Tables, is_mapped_file};
use ring::Vring;
use shmem::Channel;

/// For fuzz/.
#[cfg(fuzzing)]
pub mod fuzzing {
    pub use super::chain::{Segment, Table, is_near, load, mark_dirty, write};
    pub use super::crew::Crew;
    pub use super::lookout::Lookout;
    pub use super::origin::Service;
    pub use super::pool::Pools;
    pub use super::queue::Workers;
    pub use super::region::{Memory, RegionState, Tables};
    pub use super::ring::Vring;
}

pub use config::{MAX_REQUEST_QUEUES, TAG_LEN};
pub use handler::Handler;
pub use migration::Progress;
pub use monitor::{FrontendState, Monitor, QueueState, Work};
pub use offload::LARGE;
pub use poll::offer_cpu;
pub use uring::Urings;

/// Default of [`Options::poll`] in µs. A guest whose CPU sleeps while it waits takes about 50 from a reply to its next
/// request.
pub const POLL_US: u64 = 100;

/// What a user can choose about the device.
#[derive(Clone)]
pub struct Options {
    /// The name by which the guest mounts the share, 1 to [`TAG_LEN`] bytes. `None` if the frontend has it.
    pub tag: Option<String>,
    /// 1 to [`MAX_REQUEST_QUEUES`]. The guest's driver takes no more than it has CPUs.
    pub request_queues: u16,
    /// Accept another frontend after one is gone.
    pub keep_alive: bool,
    /// The longest that a worker polls its empty queue before it sleeps. 0: it does not poll.
    pub poll: Duration,
    /// For I/O that takes long.
    pub urings: Arc<Urings>,
    /// The shared memory regions, which the handler's file system uses too.
    pub window: Option<Arc<Window>>,
    /// Who looks at the queues from outside.
    pub monitor: Arc<Monitor>,
    /// What the daemon's control group allows.
    pub memory_limit: Option<cgroup::Limit>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            tag: None,
            request_queues: 1,
            keep_alive: false,
            poll: Duration::ZERO,
            urings: Arc::new(Urings::none()),
            window: None,
            monitor: Arc::default(),
            memory_limit: None,
        }
    }
}

/// Why the device stopped.
#[expect(missing_docs, reason = "each variant has its message")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the number of request queues must be 1 to {MAX_REQUEST_QUEUES}, not {0}")]
    RequestQueues(u16),
    #[error("the tag must have 1 to {TAG_LEN} bytes, not {0}")]
    Tag(usize),
    #[error("cannot set up the device: {0}")]
    Setup(String),
    #[error("cannot accept a frontend: {0}")]
    Accept(String),
    #[error("the frontend's connection failed: {0}")]
    Connection(String),
    #[error(
        "the virtual machine's memory is not shared: use share=on with QEMU's memory backend, \
         <access mode='shared'/> in libvirt's <memoryBacking>, or the frontend's option for shared memory"
    )]
    NotShared,
}

/// Serves the frontend that connects to `listener` until it disconnects, which is not an error. With `keep_alive`,
/// serves one frontend after the other, without end.
pub fn serve<H: Handler>(listener: UnixListener, handler: Arc<H>, options: Options) -> Result<(), Error> {
    options.check()?;
    let mut listener = Listener::from(listener);
    let pools = Pools::new().map_err(|e| Error::Setup(format!("no thread for requests that wait: {e}")))?;
    let waiting = Arc::default();
    loop {
        let device = Device::new(handler.clone(), &options, &waiting, &pools);
        match (device.and_then(|device| device.serve(&mut listener)), options.keep_alive) {
            (Ok(()), true) => tracing::info!("the frontend is gone, waiting for another"),
            (Err(e @ (Error::Connection(_) | Error::NotShared)), true) => tracing::warn!("{e}, waiting for another"),
            (Err(e @ (Error::Accept(_) | Error::Setup(_))), true) => {
                tracing::warn!("{e}, trying again");
                std::thread::sleep(limits::ACCEPT_PAUSE);
            }
            (end, _) => return end,
        }
    }
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        if !(1..=MAX_REQUEST_QUEUES).contains(&self.request_queues) {
            return Err(Error::RequestQueues(self.request_queues));
        }
        match self.tag.as_ref().map(String::len) {
            Some(len) if !(1..=TAG_LEN).contains(&len) => Err(Error::Tag(len)),
            _ => Ok(()),
        }
    }
}

/// The device while one frontend is connected.
struct Device<H> {
    workers: Arc<Workers<H>>,
    config: ConfigSpace,
    protocol: Protocol,
    /// By queue, the high priority queue first. Each is set when its worker first sees the ring.
    rings: Arc<[OnceLock<Vring>]>,
    /// Readable once the connection is over. All workers poll it.
    exit: EventFd,
    /// Waits for the kicks of queues without a worker.
    dispatcher: Arc<Epoll>,
    /// The channel for requests to the frontend, which takes a closed channel for a failure.
    channel: Mutex<Option<Backend>>,
    transfer: Transfer,
    window: Option<Arc<Window>>,
    /// For the monitor.
    connection: Arc<Connection>,
    /// Of the daemon's control group, until the log says that it is too low.
    memory_limit: Mutex<Option<cgroup::Limit>>,
}

impl<H: Handler> Device<H> {
    fn new(
        handler: Arc<H>,
        options: &Options,
        waiting: &Arc<AtomicUsize>,
        pools: &Arc<Pools>,
    ) -> Result<Arc<Self>, Error> {
        // The first is the high priority queue.
        let rings: Arc<[_]> = (0..=options.request_queues).map(|_| OnceLock::new()).collect();
        let setup = |e: io::Error| Error::Setup(e.to_string());
        let event = || EventFd::new(EFD_NONBLOCK).map_err(setup);
        let clone = |event: &EventFd| event.try_clone().map_err(setup);
        let exit = event()?;
        let dispatcher = Arc::new(Epoll::new().map_err(setup)?);
        let protocol = protocol_features(options.tag.is_some(), options.window.is_some());
        let connection = Arc::new(Connection::new(rings.clone(), protocol, event()?));
        let workers = Arc::new(Workers {
            service: Arc::new(Service {
                handler,
                mem: Tables::new(Memory::new()),
                pools: pools.clone(),
                waiting: waiting.clone(),
            }),
            closing: AtomicBool::new(false),
            loading: AtomicBool::new(false),
            logging: AtomicBool::new(false),
            urings: options.urings.clone(),
            poll: options.poll,
            monitor: options.monitor.clone(),
            lookout: Lookout::new(rings.clone(), vec![clone(&exit)?, clone(&connection.resume)?]).map_err(setup)?,
            crew: Crew::new(dispatcher.clone()),
        });
        options.monitor.connect(Some(connection.clone()));
        Ok(Arc::new(Self {
            workers,
            config: ConfigSpace::new(options.tag.as_deref(), options.request_queues),
            protocol,
            rings,
            exit,
            dispatcher,
            channel: Mutex::new(None),
            transfer: Transfer::new(options.monitor.progress.clone()),
            window: options.window.clone(),
            connection,
            memory_limit: Mutex::new(options.memory_limit.clone()),
        }))
    }

    fn serve(self: &Arc<Self>, listener: &mut Listener) -> Result<(), Error> {
        let mem = self.workers.service.mem.all.clone();
        let mut daemon =
            VhostUserDaemon::new("thruway-vhost".into(), self.clone(), mem).map_err(|e| Error::Setup(e.to_string()))?;
        // vhost-user-backend's own exit event is never closed.
        let once = EventSet::IN | EventSet::EDGE_TRIGGERED;
        let events = [
            (self.exit.as_raw_fd(), EventSet::IN, self.exit_token()),
            (self.dispatcher.as_raw_fd(), EventSet::IN, self.kick_token()),
            (self.connection.resume.as_raw_fd(), once, self.resume_token()),
            (self.workers.lookout.timer(), once, self.look_token()),
        ];
        for handler in daemon.get_epoll_handlers() {
            for (fd, on, token) in events {
                let added = handler.register_listener(fd, on, token.into());
                added.map_err(|e| Error::Setup(e.to_string()))?;
            }
        }
        let started = daemon.start(listener).map_err(|e| Error::Accept(e.to_string()));
        self.connection.connected.store(started.is_ok(), Ordering::Relaxed);
        let end = started.and_then(|()| connection_end(daemon.wait()));
        let end = match end {
            // QEMU has no message for memory that it cannot share. It goes on with the rings, which need memory.
            Err(Error::Connection(_)) if self.workers.service.mem.all.memory().num_regions() == 0 => {
                Err(Error::NotShared)
            }
            end => end,
        };
        self.close();
        self.workers.crew.join();
        drop(daemon);
        self.workers.service.handler.reset();
        end
    }

    /// Ends the workers and drops late replies.
    fn close(&self) {
        self.workers.closing.store(true, Ordering::Relaxed);
        let _ = self.exit.write(1);
        self.transfer.cancel();
        self.reset_rings();
        *self.channel.lock() = None;
        self.workers.monitor.connect(None);
        if let Some(window) = &self.window {
            window.disconnect();
        }
    }

    /// Pages of the guest's memory that the daemon touches first count as the daemon's.
    fn compare_memory(&self) {
        let memory = self.workers.service.mem.all.memory();
        let size: u64 = memory.iter().filter(|region| !is_mapped_file(region)).map(GuestMemoryRegion::len).sum();
        if let Some(limit) = self.memory_limit.lock().take_if(|limit| limit.most < size) {
            tracing::warn!(
                "the daemon may have {} bytes of memory ({}), and the virtual machine has {size}: its pages that the \
                 daemon touches first count too, so the kernel may kill the daemon; raise the limit above that",
                limit.most,
                limit.file.display()
            );
        }
    }

    fn is_running(&self) -> bool {
        self.rings.iter().filter_map(OnceLock::get).any(|ring| ring.0.is_started())
    }

    /// Keeps the workers from their rings until what it returns is dropped.
    fn hold_for_load(&self) -> io::Result<Loading<H>> {
        if self.workers.loading.swap(true, Ordering::SeqCst) {
            return Err(migration::refuse("another one is under way"));
        }
        let loading = Loading { workers: self.workers.clone(), connection: self.connection.clone() };
        self.rings.iter().filter_map(OnceLock::get).for_each(|ring| ring.0.settle());
        Ok(loading)
    }

    fn reset_rings(&self) {
        for ring in self.rings.iter().filter_map(OnceLock::get) {
            ring.0.reset();
        }
    }

    /// The event number of `exit`. Queues and vhost-user-backend use the numbers below it.
    fn exit_token(&self) -> u16 {
        self.rings.len() as u16 + 1
    }

    /// The event number of a kick.
    fn kick_token(&self) -> u16 {
        self.exit_token() + 1
    }

    /// The event number of the end of a hold.
    fn resume_token(&self) -> u16 {
        self.exit_token() + 2
    }

    /// The event number of a look at the requests that are served.
    fn look_token(&self) -> u16 {
        self.exit_token() + 3
    }
}

/// A session is loaded: nothing is taken from the rings.
struct Loading<H: Handler> {
    workers: Arc<Workers<H>>,
    connection: Arc<Connection>,
}

impl<H: Handler> Drop for Loading<H> {
    fn drop(&mut self) {
        self.workers.loading.store(false, Ordering::SeqCst);
        // It fails only if the event is set already.
        let _ = self.connection.resume.write(1);
    }
}

/// What a frontend is offered.
fn protocol_features(has_tag: bool, has_window: bool) -> Protocol {
    let mut features = Protocol::MQ
        | Protocol::REPLY_ACK
        | Protocol::CONFIGURE_MEM_SLOTS
        | Protocol::BACKEND_REQ
        | Protocol::BACKEND_SEND_FD
        | Protocol::RESET_DEVICE
        | Protocol::LOG_SHMFD
        | Protocol::DEVICE_STATE;
    // QEMU's vhost-user-fs-pci has the tag itself, and warns of a backend that offers one.
    features.set(Protocol::CONFIG, has_tag);
    features.set(Protocol::SHMEM, has_window);
    features
}

/// A frontend that leaves is no error. If it crashes, it leaves in the middle of a message.
fn connection_end(end: Result<(), BackendError>) -> Result<(), Error> {
    match end {
        Err(BackendError::HandleRequest(VhostError::Disconnected | VhostError::PartialMessage)) => Ok(()),
        end => end.map_err(|e| Error::Connection(e.to_string())),
    }
}

impl<H: Handler> VhostUserBackend for Device<H> {
    type Bitmap = RegionState;
    type Vring = Vring;

    fn num_queues(&self) -> usize {
        self.rings.len()
    }

    fn max_queue_size(&self) -> usize {
        limits::CHAINS.into()
    }

    fn features(&self) -> u64 {
        let vhost = VhostUserVirtioFeatures::PROTOCOL_FEATURES | VhostUserVirtioFeatures::LOG_ALL;
        1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX | vhost.bits()
    }

    fn acked_features(&self, features: u64) {
        let logging = features & VhostUserVirtioFeatures::LOG_ALL.bits() != 0;
        self.workers.logging.store(logging, Ordering::Release);
        self.connection.features.store(features, Ordering::Relaxed);
        if let Some(window) = &self.window {
            // A frontend has changes of the guest's memory logged from the beginning of a migration to its end.
            window.set_leaving(logging);
        }
    }

    fn protocol_features(&self) -> Protocol {
        self.protocol
    }

    fn reset_device(&self) {
        self.reset_rings();
        self.workers.service.handler.reset();
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        self.config.read(offset, size)
    }

    fn update_memory(&self, _mem: GuestMemory) -> io::Result<()> {
        self.workers.service.mem.follow();
        self.compare_memory();
        if let Some(window) = &self.window {
            window.small_pages(self.workers.service.mem.has_small_pages());
            window.committed();
        }
        Ok(())
    }

    fn get_shmem_config(&self) -> io::Result<VhostUserShMemConfig> {
        let sizes = self.window.as_ref().map(|window| window.announce()).unwrap_or_default();
        Ok(VhostUserShMemConfig::new(sizes.len() as u32, &sizes))
    }

    fn set_backend_req_fd(&self, backend: Backend) {
        if let Some(window) = &self.window {
            let (rings, mem) = (self.rings.clone(), self.workers.service.mem.all.clone());
            window.connect(Arc::new(Channel { backend: backend.clone(), rings, mem }));
        }
        *self.channel.lock() = Some(backend);
        self.connection.channel.store(true, Ordering::Relaxed);
    }

    fn set_device_state_fd(
        &self,
        direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        file: File,
    ) -> io::Result<Option<File>> {
        let handler = self.workers.service.handler.clone();
        // A session may come after the rings were started. One that is there is not replaced then.
        let loads = direction == VhostTransferStateDirection::LOAD;
        let check = || match self.is_running() && (!loads || handler.has_session()) {
            true => Err(migration::refuse("the device is running")),
            false => Ok(()),
        };
        check()?;
        match direction {
            VhostTransferStateDirection::SAVE => {
                let waiting = self.workers.service.waiting.load(Ordering::Acquire) > 0;
                if waiting || self.rings.iter().filter_map(OnceLock::get).any(|ring| ring.0.owes()) {
                    return Err(migration::refuse("a process of the guest waits for a lock, and the wait cannot move"));
                }
                self.transfer.save(file, move || handler.save())?;
            }
            VhostTransferStateDirection::LOAD => {
                let loading = self.hold_for_load()?;
                // The guest may have sent INIT.
                check()?;
                self.transfer.load(file, move |state| {
                    let _loading = &loading;
                    handler.load(state)
                })?;
            }
        }
        Ok(None)
    }

    fn check_device_state(&self) -> io::Result<()> {
        self.transfer.finish()
    }

    /// One thread for all queues, which only gives them their workers.
    fn queues_per_thread(&self) -> Vec<u64> {
        vec![u64::MAX >> (64 - self.rings.len())]
    }

    fn handle_event(&self, event: u16, _events: EventSet, vrings: &[Vring], _thread: usize) -> io::Result<()> {
        if event == self.exit_token() {
            // An error ends the thread.
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if event == self.look_token() {
            self.workers.look();
            return Ok(());
        }
        let all = || (0..self.rings.len()).collect();
        let (queues, starts) = match event {
            event if event == self.kick_token() => (self.workers.crew.kicked(), false),
            event if event == self.resume_token() => (all(), false),
            event => (vec![event.into()], true),
        };
        for queue in queues {
            if let (Some(ring), Some(known)) = (vrings.get(queue), self.rings.get(queue)) {
                known.get_or_init(|| ring.clone());
                self.workers.attend(&ring.0, queue, starts);
            }
        }
        Ok(())
    }
}
