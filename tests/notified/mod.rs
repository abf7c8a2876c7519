//! A guest that takes notifications, for tests that send it none.

use thruway::fuse::notify::{Notification, Sink};

/// A guest that takes notifications.
pub struct Open;

impl Sink for Open {
    fn is_open(&self) -> bool {
        true
    }

    fn notify(&self, _notification: Notification) {}

    fn clear(&self) {}
}
