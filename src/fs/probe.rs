//! What a directory's file system has, seen by trying it. For `thruway check`.

use std::io;
use std::os::fd::BorrowedFd;

use super::host::HostFs;
use super::sys;
use crate::watch::{Target, Watch};

/// What a directory's file system has.
#[derive(Debug)]
pub struct Probe {
    /// Its files can be named and opened by handle.
    pub handles: io::Result<()>,
    /// The daemon hears of all changes by others, so that a guest may have leases.
    pub watch: io::Result<()>,
}

/// Tries what the daemon would do with this directory, which is open for reading. Changes nothing in it.
pub fn probe(dir: BorrowedFd) -> Probe {
    let host = HostFs::of(dir);
    let handles = sys::name_to_handle(dir).and_then(|(raw, _)| sys::open_by_handle(dir, &raw, libc::O_PATH));
    Probe { handles: handles.map(drop).map_err(Into::into), watch: watch(dir, &host) }
}

fn watch(dir: BorrowedFd, host: &HostFs) -> io::Result<()> {
    let target = Target { dir: Some(dir), path: c".", directory: true };
    Watch::new()?.mark(1, sys::file_id(dir, c"")?, target)?;
    match host.watchable {
        true => Ok(()),
        false => Err(io::Error::other("others may change this file system without an event on this host")),
    }
}
