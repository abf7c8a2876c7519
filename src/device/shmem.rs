//! The window's requests to the frontend to map files for the guest (vhost-user, VHOST_USER_BACKEND_SHMEM_MAP).

use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, OnceLock};

use vhost::vhost_user::message::{VhostUserMMap, VhostUserMMapFlags};
use vhost::vhost_user::{Backend, VhostUserFrontendReqHandler};
use vm_memory::{GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

use super::region::{GuestMemory, RegionState};
use super::ring::Vring;
use crate::window::proxy::FileId;
use crate::window::{Frontend, Mapping};

/// The channel for requests to the frontend. The rings tell whether the frontend has started the device.
pub struct Channel {
    pub backend: Backend,
    pub rings: Arc<[OnceLock<Vring>]>,
    pub mem: GuestMemory,
}

impl Frontend for Channel {
    fn is_running(&self) -> bool {
        self.rings.iter().filter_map(OnceLock::get).any(|ring| ring.0.is_started())
    }

    fn mapped(&self, mapping: &Mapping) -> usize {
        let wanted = FileId::of(mapping.file).ok();
        let is_it = |region: &&GuestRegionMmap<RegionState>| {
            let place =
                region.file_offset().filter(|place| place.start() == mapping.from && region.len() == mapping.len);
            place.is_some_and(|place| FileId::of(place.file()).ok() == wanted)
        };
        self.mem.memory().iter().filter(is_it).count()
    }

    fn map(&self, mapping: &Mapping) -> io::Result<()> {
        let Mapping { region, at, len, file, from, writable } = *mapping;
        let flags = if writable { VhostUserMMapFlags::WRITABLE.bits() } else { 0 };
        let request =
            VhostUserMMap { shmid: region, fd_offset: from, shm_offset: at, len, flags, ..Default::default() };
        self.backend.shmem_map(&request, &file.as_raw_fd()).map(drop)
    }

    fn unmap(&self, mapping: &Mapping) -> io::Result<()> {
        let Mapping { region, at, len, .. } = *mapping;
        let request = VhostUserMMap { shmid: region, shm_offset: at, len, ..Default::default() };
        self.backend.shmem_unmap(&request).map(drop)
    }
}
