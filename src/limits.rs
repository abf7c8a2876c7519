//! The bounds of what a guest can use up of the host, each with the reason for its number. docs/security.md, "Limits", has
//! the same table with what the guest gets at each bound, the option that changes it and the test that holds it.

use std::time::Duration;

/// Log messages at level info and above from one place of the code in [`LOG_PERIOD`]. The rest are counted, and the count is
/// logged. The numbers are Linux's for its own log (DEFAULT_RATELIMIT_BURST and _INTERVAL of include/linux/ratelimit_types.h).
pub const LOG_BURST: u32 = 10;

/// See [`LOG_BURST`].
pub const LOG_PERIOD: Duration = Duration::from_secs(5);

/// Log lines that wait for a slow reader of the log. Past that they are lost, counted, and the count is logged. With
/// [`LOG_LINE`] they take 4 MiB at most.
pub const LOG_QUEUE: usize = 1024;

/// Bytes of a log line; the rest is cut off. A path (PATH_MAX) fits.
pub const LOG_LINE: usize = 4096;

/// Memory of its own that one daemon has while a guest attacks it with two request queues, in bytes. A test holds it
/// (tests/neighbours); the bounds of this module are what it follows from.
pub const DAEMON_MEMORY: u64 = 512 << 20;

/// Threads of one daemon: a worker for each of the 64 queues, those that wait, and a dozen more.
pub const DAEMON_THREADS: u64 = 1024;
