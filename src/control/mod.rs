//! The control socket (docs/control.md).

pub mod api;
