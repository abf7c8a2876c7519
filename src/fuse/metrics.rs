//! Counts of requests by opcode.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use super::abi::Opcode;

/// Counts by opcode, since the daemon's start.
pub struct Counters([AtomicU64; Opcode::ALL.len()]);

impl Default for Counters {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Counters {
    pub(super) fn add(&self, opcode: Opcode) {
        self.0[opcode.index()].fetch_add(1, Ordering::Relaxed);
    }

    /// The number of requests with this opcode.
    pub fn get(&self, opcode: Opcode) -> u64 {
        self.0[opcode.index()].load(Ordering::Relaxed)
    }
}

/// In Prometheus' text format.
impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(f, "# HELP thruway_requests_total FUSE requests of the guest\n# TYPE thruway_requests_total counter")?;
        for opcode in Opcode::ALL {
            writeln!(f, "thruway_requests_total{{opcode=\"{opcode:?}\"}} {}", self.get(*opcode))?;
        }
        Ok(())
    }
}
