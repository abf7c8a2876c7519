//! The frontend's shared memory regions: maps what the device asks for, by QEMU's rules and in its order, which is to
//! answer first and to change the memory table then.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;

use parking_lot::Mutex;
use rustix::fs::{OFlags, fcntl_getfl, fstat};
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::message::{VhostUserMMap, VhostUserMMapFlags};
use vhost::vhost_user::{
    Frontend as Connection, FrontendReqHandler, HandlerResult, VhostUserFrontend, VhostUserFrontendReqHandler,
};

/// Where region 0 is in guest memory: beyond all else.
pub const BASE: u64 = 1 << 40;

/// Where the others are: each so far from the one before.
const APART: u64 = 1 << 40;

/// A live mapping.
#[derive(Clone, Debug)]
pub struct Mapped {
    pub len: u64,
    pub file: Arc<OwnedFd>,
    /// Bytes, in the file.
    pub from: u64,
    pub writable: bool,
}

/// The regions, as the device has had them filled.
pub struct Window {
    /// Of region 0 in bytes, as the device says.
    pub size: u64,
    /// Of all, by id.
    pub sizes: Vec<u64>,
    state: Arc<State>,
    vhost: Connection,
}

impl Drop for Window {
    /// Ends the connection, which the thread that serves the device's requests would keep open.
    fn drop(&mut self) {
        // SAFETY: the connection is open as long as this is.
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
    /// Changes of the memory table that are due.
    due: Mutex<Vec<(bool, Place, Mapped)>>,
}

impl Window {
    /// Asks the device for its region and serves its requests from now on.
    pub(super) fn open(vhost: &mut Connection) -> io::Result<Self> {
        let config = vhost.get_shmem_config().map_err(io::Error::other)?;
        let (count, sizes) = (config.nregions as usize, config.memory_sizes);
        let sizes: Vec<u64> = sizes.into_iter().take(count).collect();
        let state = Arc::new(State {
            sizes: sizes.clone(),
            mapped: Mutex::default(),
            most: Mutex::default(),
            due: Mutex::default(),
        });
        let mut requests = FrontendReqHandler::new(state.clone()).map_err(io::Error::other)?;
        requests.set_reply_ack_flag(true);
        // SAFETY: the handler owns the descriptor and outlives this call.
        let channel = unsafe { BorrowedFd::borrow_raw(requests.get_tx_raw_fd()) };
        vhost.set_backend_request_fd(&channel).map_err(io::Error::other)?;
        let (kept, mut vhost, served) = (vhost.clone(), vhost.clone(), state.clone());
        thread::spawn(move || {
            while !matches!(requests.handle_request(), Err(vhost::vhost_user::Error::Disconnected)) {
                for (add, at, mapped) in served.due.lock().drain(..) {
                    let _ = commit(&mut vhost, add, at, &mapped);
                }
            }
        });
        Ok(Self { size: sizes.first().copied().unwrap_or(0), sizes, state, vhost: kept })
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

    /// The most live mappings that there were at a time.
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
    fn check(&self, request: &VhostUserMMap, fd: BorrowedFd) -> io::Result<()> {
        let (at, len, from) = (request.shm_offset, request.len, request.fd_offset);
        let id = request.shmid;
        let before =
            |all: &BTreeMap<Place, Mapped>| all.range((id, 0)..(id, at + len)).next_back().map(|(p, m)| p.1 + m.len);
        let overlaps = before(&self.mapped.lock()).is_some_and(|end| end > at);
        let size = self.sizes.get(usize::from(id)).copied().unwrap_or(0);
        let wrong = match () {
            _ if at + len > size => "outside of the region",
            _ if overlaps => "overlap",
            _ if fcntl_getfl(fd)? & OFlags::ACCMODE != OFlags::RDWR => "not open for writing",
            _ if (fstat(fd)?.st_size as u64) < from + len => "the file is too small",
            _ => return Ok(()),
        };
        Err(io::Error::other(wrong))
    }
}

impl VhostUserFrontendReqHandler for State {
    fn shmem_map(&self, request: &VhostUserMMap, fd: &dyn AsRawFd) -> HandlerResult<u64> {
        // SAFETY: the caller has the descriptor open until this returns.
        let fd = unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
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
        Ok(0)
    }

    fn shmem_unmap(&self, request: &VhostUserMMap) -> HandlerResult<u64> {
        let mut all = self.mapped.lock();
        let at = (request.shmid, request.shm_offset);
        match all.get(&at) {
            Some(mapped) if mapped.len == request.len => {
                self.due.lock().extend(all.remove(&at).map(|mapped| (false, at, mapped)));
                Ok(0)
            }
            _ => Err(io::Error::other("not mapped")),
        }
    }
}
