//! Which files a guest with `dax=inode` maps: no more than the DAX window holds together.
//!
//! If the files in use are larger than the window, each access may need a mapping, and each mapping takes another one
//! away. That is far slower than messages. So a file gets ATTR_DAX only as long as all files that have it fit. A guest
//! decides for good when it first hears of a file (Linux: fuse_dax_inode_init), so a grant lasts until the guest
//! forgets the file. If the flag changes, Linux drops the file as soon as no process uses it (fuse_dax_dontcache).

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::window::RANGE;

/// A guest begins to take mappings away when fewer ranges than this percentage of the window are free
/// (FUSE_DAX_RECLAIM_THRESHOLD of fs/fuse/dax.c).
const KEPT_FREE: u64 = 20;

/// A file that the guest may map.
struct Grant {
    /// Ranges of the window that the file takes if all of it is mapped. They do not become fewer: the guest keeps the
    /// ranges of what a truncation cuts off.
    ranges: u64,
    /// The guest is told otherwise since the file has grown too large.
    withdrawn: bool,
}

#[derive(Default)]
struct Held {
    ranges: u64,
    nodes: HashMap<u64, Grant>,
    /// It was said that the window is too small for a file.
    said: bool,
}

/// The files that the guest may map.
#[derive(Default)]
pub(super) struct DaxBudget {
    /// Ranges of the window that they may take.
    most: u64,
    held: Mutex<Held>,
}

impl DaxBudget {
    /// `window`: its size in bytes.
    pub fn new(window: u64) -> Self {
        let ranges = window / RANGE;
        // Linux keeps at least one range free.
        let most = ranges.saturating_sub((ranges * KEPT_FREE / 100).max(1));
        Self { most, held: Mutex::default() }
    }

    /// Whether the guest is to map this node's file of `size` bytes. `listed`: it is only listed, which is no sign that
    /// it will be used. Such files get at most half of the window.
    pub fn ask(&self, node: u64, size: u64, listed: bool) -> bool {
        let ranges = size.div_ceil(RANGE).max(1);
        let held = &mut *self.held.lock();
        if let Some(grant) = held.nodes.get_mut(&node) {
            if ranges > grant.ranges {
                held.ranges += ranges - grant.ranges;
                grant.ranges = ranges;
                grant.withdrawn |= held.ranges > self.most;
            }
            return !grant.withdrawn;
        }
        let most = if listed { self.most / 2 } else { self.most };
        let fits = held.ranges + ranges <= most;
        if fits {
            held.ranges += ranges;
            held.nodes.insert(node, Grant { ranges, withdrawn: false });
        } else if !listed && !std::mem::replace(&mut held.said, true) {
            tracing::info!("the DAX window is too small for all files in use: the guest sends messages for some");
        }
        fits
    }

    /// Whether the guest was told to map this node's file.
    pub fn has(&self, node: u64) -> bool {
        self.held.lock().nodes.get(&node).is_some_and(|grant| !grant.withdrawn)
    }

    /// The guest has forgotten the node.
    pub fn end(&self, node: u64) {
        let held = &mut *self.held.lock();
        if let Some(grant) = held.nodes.remove(&node) {
            held.ranges -= grant.ranges;
        }
    }

    /// The guest has forgotten everything.
    pub fn clear(&self) {
        *self.held.lock() = Held::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A window of 10 ranges, of which 2 stay free.
    fn ten() -> DaxBudget {
        DaxBudget::new(10 * RANGE)
    }

    #[test]
    fn what_fits_is_mapped() {
        let grants = ten();
        assert!(!grants.ask(1, 9 * RANGE, false) && !grants.ask(1, i64::MAX as u64, false));
        // One byte takes a whole range.
        assert!(grants.ask(2, 5 * RANGE + 1, false) && grants.ask(3, RANGE, false) && grants.ask(4, 1, false));
        for node in [1, 5] {
            assert!(!grants.ask(node, 1, false));
        }
        assert!(grants.ask(2, 5 * RANGE, false) && grants.ask(3, 0, false));
        grants.end(3);
        grants.end(3);
        assert!(grants.ask(5, 1, false) && !grants.ask(3, 1, false));
        grants.clear();
        assert!(grants.ask(1, 8 * RANGE, false) && !grants.ask(2, 1, false));
    }

    #[test]
    fn a_file_that_grows_too_large_is_given_up() {
        let grants = ten();
        assert!(grants.ask(1, 3 * RANGE, false) && grants.ask(2, 3 * RANGE, false));
        assert!(grants.ask(1, 5 * RANGE, false));
        assert!(!grants.ask(2, 4 * RANGE, false));
        // The guest keeps it while it is open, even if it shrinks.
        assert!(!grants.ask(2, 0, false) && !grants.ask(3, 1, false) && grants.ask(1, 5 * RANGE, false));
        grants.end(2);
        assert!(grants.ask(3, 3 * RANGE, false));
    }

    #[test]
    fn what_is_only_listed_gets_half() {
        let grants = ten();
        let listed = (1..10).filter(|node| grants.ask(*node, RANGE, true)).count();
        assert_eq!(listed, 4);
        let opened = (1..20).filter(|node| grants.ask(*node, RANGE, false)).count();
        assert_eq!(opened, 8);
        assert!(grants.ask(1, RANGE, true) && !grants.ask(30, RANGE, true));
    }

    #[test]
    fn small_windows() {
        for (window, most) in [(0, 0), (1, 0), (2, 1), (5, 4), (32, 26), (256, 205), (448, 359)] {
            let grants = DaxBudget::new(window * RANGE);
            assert_eq!((1..1000).filter(|node| grants.ask(*node, 1, false)).count(), most, "{window}");
        }
    }
}
