//! What the guest has learned of names since the last changes.

use std::hash::BuildHasher;
use std::hash::RandomState;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Names that are remembered. It is more than a guest learns in the moment between a change and its announcement. If
/// the guest learns more, others of them count as not learned.
const NAMES: usize = 8192;

/// The last node that each of some names was told to lead to. It takes 64 KiB, once there is an agent.
#[derive(Default)]
pub struct Told {
    hash: RandomState,
    /// The upper half of the name's hash, and the lower half of the nodeid.
    names: OnceLock<Box<[AtomicU64]>>,
}

impl Told {
    fn slot(&self, parent: u64, name: &[u8]) -> (&AtomicU64, u64) {
        let names = self.names.get_or_init(|| (0..NAMES).map(|_| AtomicU64::new(0)).collect());
        let hash = self.hash.hash_one((parent, name));
        (&names[hash as usize % NAMES], hash & !u64::from(u32::MAX))
    }

    pub fn tell(&self, parent: u64, name: &[u8], node: u64) {
        let (slot, hash) = self.slot(parent, name);
        slot.store(hash | node & u64::from(u32::MAX), Ordering::Release);
    }

    pub fn was_told(&self, parent: u64, name: &[u8], node: u64) -> bool {
        let (slot, hash) = self.slot(parent, name);
        slot.load(Ordering::Acquire) == hash | node & u64::from(u32::MAX)
    }
}
