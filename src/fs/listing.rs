//! What an open directory keeps of its entries.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::limits;

/// Directory entries that were read and not yet sent.
pub struct DirState {
    pub entries: Vec<u8>,
    /// Start of the next entry in `entries`.
    pub at: usize,
    /// The directory's position at `at`: d_off of the entry before. `None`: the descriptor is at another position.
    pub offset: Option<u64>,
    /// The descriptor was never read.
    pub fresh: bool,
    pub listings: Arc<Listings>,
    /// Held while `entries` stay from one request to the next.
    pub kept: Option<Listing>,
}

impl DirState {
    pub fn new(listings: &Arc<Listings>) -> Self {
        Self { entries: Vec::new(), at: 0, offset: Some(0), fresh: true, listings: listings.clone(), kept: None }
    }
}

/// The number of handles that keep directory entries.
#[derive(Default)]
pub struct Listings(AtomicUsize);

/// One of them.
pub struct Listing(Arc<Listings>);

impl Listings {
    /// `None` if there are too many.
    pub fn keep(self: &Arc<Self>) -> Option<Listing> {
        let more = |kept| (kept < limits::LISTINGS).then_some(kept + 1);
        let kept = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        match kept {
            Ok(_) => Some(Listing(self.clone())),
            Err(_) => {
                limits::Limit::Listings.reached();
                None
            }
        }
    }

    #[cfg(test)]
    pub fn kept(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Listing {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}
