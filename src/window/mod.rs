//! Shared memory regions: what of the host's files a guest has in its address space.

pub mod proxy;
mod sys;
