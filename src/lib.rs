//! Thruway: a vhost-user device daemon for virtio-fs.
//!
//! Calls go one way: [`fuse`] (messages) → [`fs`] (the shared directory).

pub mod fs;
pub mod fuse;
