//! Thruway: a vhost-user device daemon for virtio-fs.
//!
//! Calls go one way: [`device`] (virtqueues) → [`fuse`] (messages) → [`fs`] (the shared directory) → [`window`] (what
//! of it is mapped into the guest). [`watch`] tells what the host changes in it, and [`agent`] keeps what of that the
//! guest's agent is to repeat.

// The modules `fuzzing` open private items to tests and fuzz targets.
#![cfg_attr(not(any(test, fuzzing)), warn(missing_docs))]

pub mod agent;
pub mod cli;
pub mod control;
pub mod device;
mod fanotify;
pub mod fs;
pub mod fuse;
pub mod limits;
mod linux;
pub mod record;
pub mod sandbox;
mod size;
pub mod supervise;
pub mod watch;
pub mod window;
