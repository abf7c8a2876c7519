//! The messages of frontends that do not run here, in their order and with their features: those of crosvm and
//! cloud-hypervisor, as their sources of 2026 have them.

mod common;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use common::{thruwayd, wait_until};
use rustix::fs::{MemfdFlags, memfd_create};
use tempfile::TempDir;
use thruway::fuse::abi::*;
use thruway_bench::frontend::{Frontend, Options};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserHeaderFlag,
    VhostUserProtocolFeatures as Protocol,
};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use zerocopy::{FromBytes, IntoBytes};

/// VIRTIO_RING_F_INDIRECT_DESC, VIRTIO_RING_F_EVENT_IDX, VHOST_USER_F_PROTOCOL_FEATURES and VIRTIO_F_VERSION_1.
const INDIRECT: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const PROTOCOL: u64 = 1 << 30;
const VERSION_1: u64 = 1 << 32;

/// The queues that these frontends give a guest with one CPU: the high priority queue and one for requests.
const QUEUES: usize = 2;

/// Long enough for a daemon to answer what it should not.
const SHORT: Duration = Duration::from_millis(150);

struct Daemon {
    child: Child,
    dir: TempDir,
}

impl Daemon {
    fn start(share: &Path) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = thruwayd();
        command.args(["--sandbox=none", "--tag=share", "--shared-dir"]).arg(share);
        command.arg("--socket-path").arg(dir.path().join("socket")).stderr(Stdio::null());
        let daemon = Self { child: command.spawn().unwrap(), dir };
        wait_until("listens", || daemon.socket().exists());
        daemon
    }

    fn socket(&self) -> std::path::PathBuf {
        self.dir.path().join("socket")
    }

    /// The daemon ends with its frontend.
    fn end(mut self, guest: Frontend) {
        drop(guest);
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn share() -> TempDir {
    let share = tempfile::tempdir().unwrap();
    fs::write(share.path().join("file"), "contents").unwrap();
    share
}

fn lookup(guest: &Frontend) -> u64 {
    let entry = guest.request(1, Opcode::Lookup as u32, ROOT_ID, b"file\0", b"", size_of::<EntryOut>()).unwrap();
    EntryOut::read_from_bytes(&entry).unwrap().nodeid
}

fn size(guest: &Frontend, node: u64) -> Result<u64, i32> {
    let args = GetattrIn::default();
    let attr = guest.request(1, Opcode::Getattr as u32, node, args.as_bytes(), b"", size_of::<AttrOut>())?;
    Ok(AttrOut::read_from_bytes(&attr).unwrap().attr.size)
}

/// A guest mounts the share, or mounts it again after it has booted.
fn mount(guest: &Frontend) -> u64 {
    guest.fuse_init(InitFlags::INIT_EXT.bits()).unwrap();
    let node = lookup(guest);
    assert_eq!(size(guest, node), Ok(8));
    node
}

/// devices/src/virtio/vhost_user_frontend/mod.rs of crosvm. None of its messages asks for a reply that it would not
/// have anyway.
mod crosvm {
    use super::*;

    /// Bits 0 to 23 and 50 to 63 are the device's. Of the others, it passes on what it knows of rings.
    const PASSED: u64 = 0xfffc_0000_00ff_ffff | VERSION_1 | PROTOCOL;

    pub struct Vmm {
        pub guest: Frontend,
        features: u64,
        /// Its end of the channel for the daemon's requests.
        _requests: UnixStream,
    }

    /// `VhostUserFrontend::new`, and what its PCI device asks for before the guest boots.
    pub fn connect(socket: &Path) -> Vmm {
        let options = Options { queues: QUEUES, event_idx: false, indirect: false, ..Options::default() };
        let mut guest = Frontend::attach(socket, options).unwrap();
        let vhost = guest.vhost();
        vhost.set_owner().unwrap();
        let features = vhost.get_features().unwrap() & PASSED;
        assert_eq!(features & (VERSION_1 | PROTOCOL), VERSION_1 | PROTOCOL);
        let known = Protocol::CONFIG
            | Protocol::MQ
            | Protocol::BACKEND_REQ
            | Protocol::DEVICE_STATE
            | Protocol::SHMEM
            | Protocol::REPLY_ACK;
        let both = vhost.get_protocol_features().unwrap() & known;
        // Without a state it could take no snapshot, and without the configuration it would have no tag.
        assert!(both.contains(Protocol::CONFIG | Protocol::MQ | Protocol::DEVICE_STATE));
        vhost.set_protocol_features(both).unwrap();
        let (requests, theirs) = UnixStream::pair().unwrap();
        if both.contains(Protocol::BACKEND_REQ) {
            vhost.set_backend_request_fd(&theirs).unwrap();
        }
        assert!(vhost.get_queue_num().unwrap() >= QUEUES as u64);
        if both.contains(Protocol::SHMEM) {
            assert_eq!(vhost.get_shmem_config().unwrap().nregions, 0);
        }
        // The guest reads the tag, then the number of request queues.
        for (at, expected) in [(0, &b"share"[..]), (36, &[QUEUES as u8 - 1])] {
            let (_, config) = vhost.get_config(at, 4, VhostUserConfigFlags::WRITABLE, &[0; 4]).unwrap();
            assert!(at != 0 || config == expected[..4], "{config:?}");
            assert!(at == 0 || u32::from_le_bytes(config.try_into().unwrap()) >= expected[0].into());
        }
        Vmm { guest, features, _requests: requests }
    }

    impl Vmm {
        /// `ack_features`: the guest's driver writes the two halves one after the other.
        pub fn negotiate(&mut self) {
            for features in [self.features & 0xffff_ffff, self.features] {
                self.guest.vhost().set_features(features | PROTOCOL).unwrap();
            }
        }

        /// `activate`, which a wake-up is too.
        pub fn activate(&mut self, bases: [u16; QUEUES]) {
            self.guest.set_memory().unwrap();
            for (queue, base) in bases.into_iter().enumerate() {
                let (ring, kick, call) = self.guest.ring(queue).unwrap();
                let vhost = self.guest.vhost();
                vhost.set_vring_num(queue, ring.queue_size).unwrap();
                vhost.set_vring_addr(queue, &ring).unwrap();
                vhost.set_vring_base(queue, base).unwrap();
                vhost.set_vring_call(queue, &call).unwrap();
                vhost.set_vring_kick(queue, &kick).unwrap();
                vhost.set_vring_enable(queue, true).unwrap();
            }
        }

        /// `deactivate_vring` of each queue: a reset, or the machine sleeps.
        pub fn deactivate(&mut self) -> [u16; QUEUES] {
            std::array::from_fn(|queue| {
                let vhost = self.guest.vhost();
                vhost.set_vring_enable(queue, false).unwrap();
                vhost.get_vring_base(queue).unwrap() as u16
            })
        }

        /// `virtio_snapshot`
        pub fn snapshot(&mut self) -> Vec<u8> {
            let (from, to) = rustix::pipe::pipe().unwrap();
            let (save, stopped) = (VhostTransferStateDirection::SAVE, VhostTransferStatePhase::STOPPED);
            assert!(self.guest.vhost().set_device_state_fd(save, stopped, to).unwrap().is_none());
            let mut state = Vec::new();
            File::from(from).read_to_end(&mut state).unwrap();
            self.guest.vhost().check_device_state().unwrap();
            state
        }

        /// `virtio_restore`, before the device has memory and rings.
        pub fn restore(&mut self, state: &[u8]) {
            let (from, to) = rustix::pipe::pipe().unwrap();
            let (load, stopped) = (VhostTransferStateDirection::LOAD, VhostTransferStatePhase::STOPPED);
            assert!(self.guest.vhost().set_device_state_fd(load, stopped, from).unwrap().is_none());
            File::from(to).write_all(state).unwrap();
            self.guest.vhost().check_device_state().unwrap();
        }
    }
}

#[test]
fn crosvm_boots_sleeps_and_takes_a_snapshot() {
    let share = share();
    let daemon = Daemon::start(share.path());
    let mut vmm = crosvm::connect(&daemon.socket());
    vmm.negotiate();
    vmm.activate([0, 0]);
    mount(&vmm.guest);
    // The guest reboots.
    vmm.deactivate();
    (0..QUEUES).for_each(|queue| vmm.guest.clear_queue(queue).unwrap());
    vmm.negotiate();
    vmm.activate([0, 0]);
    let node = mount(&vmm.guest);
    // The machine sleeps, and goes on where it was.
    for has_features in [false, true] {
        let bases = vmm.deactivate();
        let state = vmm.snapshot();
        vmm.activate(bases);
        assert_eq!(size(&vmm.guest, node), Ok(8));
        // Another machine goes on from the snapshot. Its memory, and so its rings, are those of a new test guest.
        let next = Daemon::start(share.path());
        let mut restored = crosvm::connect(&next.socket());
        // It sends what it has of features if its PCI device has not sent those of the guest's driver.
        match has_features {
            true => restored.negotiate(),
            false => restored.guest.vhost().set_features(PROTOCOL).unwrap(),
        }
        restored.restore(&state);
        restored.activate([0, 0]);
        assert_eq!(size(&restored.guest, node), Ok(8));
        next.end(restored.guest);
    }
    daemon.end(vmm.guest);
}

/// virtio-devices/src/vhost_user of cloud-hypervisor: fs.rs, vu_common_ctrl.rs and mod.rs. Every message asks for a
/// reply from the protocol features on.
mod cloud_hypervisor {
    use super::*;

    pub struct Vmm {
        pub guest: Frontend,
        features: u64,
    }

    /// `Fs::new`. The configuration is its own, so it never asks for it.
    pub fn connect(socket: &Path) -> Vmm {
        let mut guest = Frontend::attach(socket, Options { queues: QUEUES, ..Options::default() }).unwrap();
        let vhost = guest.vhost();
        vhost.set_owner().unwrap();
        // And IN_ORDER, ORDER_PLATFORM and NOTIFICATION_DATA, which no part of the daemon knows.
        let known = INDIRECT | EVENT_IDX | VERSION_1 | PROTOCOL | 1 << 35 | 1 << 36 | 1 << 38;
        let features = vhost.get_features().unwrap() & known;
        assert_eq!(features, INDIRECT | EVENT_IDX | VERSION_1 | PROTOCOL);
        let known = Protocol::MQ
            | Protocol::CONFIGURE_MEM_SLOTS
            | Protocol::REPLY_ACK
            | Protocol::INFLIGHT_SHMFD
            | Protocol::LOG_SHMFD;
        let both = vhost.get_protocol_features().unwrap() & known;
        // With INFLIGHT_SHMFD it would ask for shared memory between the sizes and the addresses of the rings.
        assert_eq!(both, known - Protocol::INFLIGHT_SHMFD);
        vhost.set_protocol_features(both).unwrap();
        vhost.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        assert!(vhost.get_queue_num().unwrap() >= QUEUES as u64);
        Vmm { guest, features }
    }

    impl Vmm {
        /// `setup_vhost_user`
        pub fn activate(&mut self) {
            self.guest.vhost().set_features(self.features).unwrap();
            self.guest.set_memory().unwrap();
            let rings: [_; QUEUES] = std::array::from_fn(|queue| self.guest.ring(queue).unwrap());
            let vhost = self.guest.vhost();
            for (queue, (ring, ..)) in rings.iter().enumerate() {
                vhost.set_vring_num(queue, ring.queue_size).unwrap();
            }
            for (queue, (ring, kick, call)) in rings.iter().enumerate() {
                vhost.set_vring_addr(queue, ring).unwrap();
                vhost.set_vring_base(queue, 0).unwrap();
                vhost.set_vring_call(queue, call).unwrap();
                vhost.set_vring_kick(queue, kick).unwrap();
            }
            self.enable(true);
        }

        /// Pause and resume. The rings keep their state in the daemon.
        pub fn enable(&mut self, on: bool) {
            (0..QUEUES).for_each(|queue| self.guest.vhost().set_vring_enable(queue, on).unwrap());
        }

        /// `add_memory_region`
        pub fn add_memory(&mut self, at: u64) {
            let file = File::from(memfd_create("more", MemfdFlags::CLOEXEC).unwrap());
            file.set_len(1 << 20).unwrap();
            let region = VhostUserMemoryRegionInfo {
                guest_phys_addr: at,
                memory_size: 1 << 20,
                // Nothing of this process is there.
                userspace_addr: at + (1 << 50),
                mmap_offset: 0,
                mmap_handle: file.as_raw_fd(),
            };
            self.guest.vhost().add_mem_region(&region).unwrap();
        }

        /// `reset_vhost_user`
        pub fn reset(&mut self) {
            for queue in 0..QUEUES {
                self.guest.vhost().set_vring_enable(queue, false).unwrap();
                self.guest.vhost().get_vring_base(queue).unwrap();
            }
        }
    }
}

#[test]
fn cloud_hypervisor_boots_pauses_and_adds_memory() {
    let share = share();
    let daemon = Daemon::start(share.path());
    let mut vmm = cloud_hypervisor::connect(&daemon.socket());
    vmm.activate();
    mount(&vmm.guest);
    // The guest reboots.
    vmm.reset();
    (0..QUEUES).for_each(|queue| vmm.guest.clear_queue(queue).unwrap());
    vmm.activate();
    let node = mount(&vmm.guest);
    for more in 1..4 {
        vmm.enable(false);
        // What the guest has offered before it stood still is served when it goes on.
        let args = GetattrIn::default();
        let (_, header) = vmm.guest.header(Opcode::Getattr as u32, node, args.as_bytes().len());
        let token = vmm.guest.submit(1, &[&header, args.as_bytes()], &[16, size_of::<AttrOut>()]).unwrap();
        assert_eq!(vmm.guest.wait(1, SHORT).unwrap_err().raw_os_error(), Some(libc::ETIMEDOUT));
        vmm.enable(true);
        vmm.guest.wait_for(1, token, Duration::from_secs(100)).unwrap();
        // The machine gets more memory.
        vmm.add_memory(more << 30);
        assert_eq!(size(&vmm.guest, node), Ok(8));
    }
    daemon.end(vmm.guest);
}
