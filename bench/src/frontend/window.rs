//! The frontend's shared memory regions. It maps files as the device asks, by QEMU's rules and in QEMU's order: it
//! first replies, then changes the memory table.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use parking_lot::Mutex;
use rustix::fs::{OFlags, fcntl_getfl, fstat};
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::message::{VhostUserMMap, VhostUserMMapFlags};
use vhost::vhost_user::{
    Frontend as Connection, FrontendReqHandler, HandlerResult, VhostUserFrontend, VhostUserFrontendReqHandler,
};

/// Guest address of region 0, above everything else.
pub const BASE: u64 = 1 << 40;

/// Distance between the guest addresses of two regions.
const APART: u64 = 1 << 40;

/// A live mapping.
#[derive(Clone, Debug)]
pub struct Mapped {
    pub len: u64,
    pub file: Arc<OwnedFd>,
    /// Offset in the file, in bytes.
    pub from: u64,
    pub writable: bool,
}

/// The regions, with the files that the device has mapped.
pub struct Window {
    /// Size of region 0 in bytes, according to the device.
    pub size: u64,
    /// Sizes of all regions, by shmid.
    pub sizes: Vec<u64>,
    state: Arc<State>,
    vhost: Connection,
}

impl Drop for Window {
    /// Ends the connection. Otherwise the thread that serves the device's requests would keep it open.
    fn drop(&mut self) {
        // SAFETY: the connection is open for as long as this value lives.
        let vhost = unsafe { BorrowedFd::borrow_raw(self.vhost.as_raw_fd()) };
        let _ = rustix::net::shutdown(vhost, rustix::net::Shutdown::Both);
    }
}

/// A region and an offset in it.
type Place = (u8, u64);

struct State {
    sizes: Vec<u64>,
    mapped: Mutex<BTreeMap<Place, Mapped>>,
    most: Mutex<usize>,
    /// Changes of the memory table that have yet to be sent.
    due: Mutex<Vec<(bool, Place, Mapped)>>,
    /// The device does not run, so they are kept until it does.
    stopped: AtomicBool,
    /// Is called at each point of each request.
    hook: Mutex<Option<Box<Hook>>>,
}

/// See [`Window::at_each_request`].
type Hook = dyn Fn(Point) + Send;

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// It has come.
    Asked,
    /// It is done, and the device has no reply yet.
    Done,
    /// The device has its reply, and the memory table is as it was.
    Replied,
    /// The memory table is another one.
    Committed,
}

impl Window {
    /// Asks the device for its regions and starts to serve its requests.
    pub(super) fn open(vhost: &mut Connection) -> io::Result<Self> {
        let config = vhost.get_shmem_config().map_err(io::Error::other)?;
        let (count, sizes) = (config.nregions as usize, config.memory_sizes);
        let sizes: Vec<u64> = sizes.into_iter().take(count).collect();
        let state = Arc::new(State {
            sizes: sizes.clone(),
            mapped: Mutex::default(),
            most: Mutex::default(),
            due: Mutex::default(),
            hook: Mutex::default(),
            stopped: AtomicBool::new(false),
        });
        let mut requests = FrontendReqHandler::new(state.clone()).map_err(io::Error::other)?;
        requests.set_reply_ack_flag(true);
        // SAFETY: the handler owns the descriptor and outlives this call.
        let channel = unsafe { BorrowedFd::borrow_raw(requests.get_tx_raw_fd()) };
        vhost.set_backend_request_fd(&channel).map_err(io::Error::other)?;
        let (kept, mut vhost, served) = (vhost.clone(), vhost.clone(), state.clone());
        thread::spawn(move || {
            while !matches!(requests.handle_request(), Err(vhost::vhost_user::Error::Disconnected)) {
                served.commit(&mut vhost);
            }
        });
        Ok(Self { size: sizes.first().copied().unwrap_or(0), sizes, state, vhost: kept })
    }

    /// The device does not run: it hears of changes of the memory table when it is started.
    pub fn stop(&self) {
        self.state.stopped.store(true, Ordering::Release);
    }

    /// The device is about to run.
    pub fn start(&self) {
        self.state.stopped.store(false, Ordering::Release);
        self.state.commit(&mut self.vhost.clone());
    }

    /// Live mappings of region 0, by offset.
    pub fn mapped(&self) -> BTreeMap<u64, Mapped> {
        self.mapped_in(0)
    }

    /// Live mappings of a region, by offset.
    pub fn mapped_in(&self, region: u8) -> BTreeMap<u64, Mapped> {
        let all = self.state.mapped.lock();
        all.iter().filter(|((id, _), _)| *id == region).map(|((_, at), mapped)| (*at, mapped.clone())).collect()
    }

    /// Calls `hook` at each point of each request of the device.
    pub fn at_each_request(&self, hook: impl Fn(Point) + Send + 'static) {
        *self.state.hook.lock() = Some(Box::new(hook));
    }

    /// The largest number of live mappings so far.
    pub fn most(&self) -> usize {
        *self.state.most.lock()
    }
}

fn commit(vhost: &mut Connection, add: bool, (id, at): Place, mapped: &Mapped) -> vhost::Result<()> {
    let addr = BASE + u64::from(id) * APART + at;
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: addr,
        memory_size: mapped.len,
        userspace_addr: addr,
        mmap_offset: mapped.from,
        mmap_handle: mapped.file.as_raw_fd(),
    };
    match add {
        true => vhost.add_mem_region(&region).map(drop),
        false => vhost.remove_mem_region(&region),
    }
}

impl State {
    fn at(&self, point: Point) {
        self.hook.lock().iter().for_each(|hook| hook(point));
    }

    fn commit(&self, vhost: &mut Connection) {
        if self.stopped.load(Ordering::Acquire) {
            return;
        }
        for (add, at, mapped) in self.due.lock().drain(..) {
            self.at(Point::Replied);
            let _ = commit(vhost, add, at, &mapped);
            self.at(Point::Committed);
        }
    }

    fn check(&self, request: &VhostUserMMap, fd: BorrowedFd) -> io::Result<()> {
        let (at, len, from) = (request.shm_offset, request.len, request.fd_offset);
        let id = request.shmid;
        let before =
            |all: &BTreeMap<Place, Mapped>| all.range((id, 0)..(id, at + len)).next_back().map(|(p, m)| p.1 + m.len);
        let overlaps = before(&self.mapped.lock()).is_some_and(|end| end > at);
        let size = self.sizes.get(usize::from(id)).copied().unwrap_or(0);
        let wrong = match () {
            () if at + len > size => "outside of the region",
            () if overlaps => "overlap",
            () if fcntl_getfl(fd)? & OFlags::ACCMODE != OFlags::RDWR => "not open for writing",
            () if (fstat(fd)?.st_size as u64) < from + len => "the file is too small",
            () => return Ok(()),
        };
        Err(io::Error::other(wrong))
    }
}

impl VhostUserFrontendReqHandler for State {
    fn shmem_map(&self, request: &VhostUserMMap, fd: &dyn AsRawFd) -> HandlerResult<u64> {
        // SAFETY: the caller keeps the descriptor open until this returns.
        let fd = unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
        self.at(Point::Asked);
        self.check(request, fd)?;
        let mapped = Mapped {
            len: request.len,
            file: Arc::new(fd.try_clone_to_owned()?),
            from: request.fd_offset,
            writable: request.flags & VhostUserMMapFlags::WRITABLE.bits() != 0,
        };
        let place = (request.shmid, request.shm_offset);
        self.due.lock().push((true, place, mapped.clone()));
        let mut all = self.mapped.lock();
        all.insert(place, mapped);
        let mut most = self.most.lock();
        *most = all.len().max(*most);
        drop((all, most));
        self.at(Point::Done);
        Ok(0)
    }

    fn shmem_unmap(&self, request: &VhostUserMMap) -> HandlerResult<u64> {
        self.at(Point::Asked);
        let at = (request.shmid, request.shm_offset);
        let unmapped = {
            let mut all = self.mapped.lock();
            match all.get(&at) {
                Some(mapped) if mapped.len == request.len => all.remove(&at),
                _ => None,
            }
        };
        let mapped = unmapped.ok_or_else(|| io::Error::other("not mapped"))?;
        self.due.lock().push((false, at, mapped));
        self.at(Point::Done);
        Ok(0)
    }
}
