//! Has a session move, as a frontend does.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;

use thruway_bench::frontend::Frontend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostTransferStateDirection, VhostTransferStatePhase};

fn transfer(frontend: &mut Frontend, direction: VhostTransferStateDirection, pipe: OwnedFd) -> bool {
    let phase = VhostTransferStatePhase::STOPPED;
    frontend.vhost().set_device_state_fd(direction, phase, pipe).is_ok()
}

/// The session of a device that is stopped, unless the device refuses.
#[allow(dead_code)]
pub fn save(frontend: &mut Frontend) -> Option<Vec<u8>> {
    let (from, to) = rustix::pipe::pipe().unwrap();
    let mut state = Vec::new();
    let sent = transfer(frontend, VhostTransferStateDirection::SAVE, to);
    File::from(from).read_to_end(&mut state).unwrap();
    (sent && frontend.vhost().check_device_state().is_ok()).then_some(state)
}

/// Sends the session, which fits into a pipe. Whether the device takes it.
pub fn load(frontend: &mut Frontend, state: &[u8]) -> bool {
    let (from, to) = rustix::pipe::pipe().unwrap();
    File::from(to).write_all(state).unwrap();
    transfer(frontend, VhostTransferStateDirection::LOAD, from) && frontend.vhost().check_device_state().is_ok()
}
