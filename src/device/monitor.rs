//! What is seen of the queues from outside of their workers, and the switch that holds them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use vhost::vhost_user::message::{VhostUserProtocolFeatures as Protocol, VhostUserVirtioFeatures};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::eventfd::EventFd;

use super::config::{MAX_REQUEST_QUEUES, Role};
use super::migration::Progress;
use super::ring::{Ring, Vring};
use super::tally::Tally;

/// Most queues of a device: with the high priority queue.
const MOST: usize = MAX_REQUEST_QUEUES as usize + 1;

/// Watches a device, whichever frontend it has.
pub struct Monitor {
    /// The workers take nothing from their rings. Each of them reads it for each batch, and hardly anybody writes it.
    held: Held,
    /// By queue.
    tallies: [Tally; MOST],
    connection: Mutex<Option<Arc<Connection>>>,
    /// The last transfer of a session.
    pub(super) progress: Arc<Mutex<Progress>>,
}

#[repr(align(128))]
struct Held(AtomicBool);

/// What the workers have done since the start, all together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Times that a worker polled its empty ring and found a request.
    pub found: u64,
    /// Times that a worker polled its empty ring and went to sleep.
    pub slept: u64,
    /// Reads and writes that went to io_uring.
    pub submissions: u64,
    /// Requests that went to a thread.
    pub handovers: u64,
}

/// A queue, as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueState {
    /// Its number.
    pub index: usize,
    /// `hiprio` or `request`.
    pub role: &'static str,
    /// Its driver uses it.
    pub running: bool,
    /// Its length.
    pub size: u16,
    /// Requests that were taken and not answered.
    pub in_flight: u32,
    /// Those of them that wait for a lock.
    pub locks: u32,
    /// Its driver broke the rules.
    pub broken: bool,
}

/// A frontend's connection.
pub(super) struct Connection {
    rings: Arc<[OnceLock<Vring>]>,
    /// What the frontend acknowledged.
    pub features: AtomicU64,
    /// What it was offered.
    protocol: Protocol,
    /// It gave a channel for requests to it.
    pub channel: AtomicBool,
    /// Wakes all workers, each once for each write (EPOLLET).
    pub resume: EventFd,
    /// The frontend is there.
    pub connected: AtomicBool,
}

impl Connection {
    pub fn new(rings: Arc<[OnceLock<Vring>]>, protocol: Protocol, resume: EventFd) -> Self {
        let (features, channel, connected) = Default::default();
        Self { rings, features, protocol, channel, resume, connected }
    }

    fn rings(&self) -> impl Iterator<Item = &Arc<Ring>> {
        self.rings.iter().filter_map(|ring| Some(&ring.get()?.0))
    }
}

/// A frontend, as it is now.
#[derive(Clone, Debug)]
pub struct FrontendState {
    /// Names of the features that it acknowledged.
    pub features: Vec<String>,
    /// Names of the protocol features that it was offered.
    pub protocol: Vec<String>,
    /// It gave a channel for requests to it.
    pub channel: bool,
}

impl Default for Monitor {
    fn default() -> Self {
        Self {
            held: Held(AtomicBool::new(false)),
            tallies: std::array::from_fn(|_| Tally::default()),
            connection: Mutex::default(),
            progress: Arc::default(),
        }
    }
}

impl Monitor {
    /// Whether the workers must take nothing: [`hold`](Self::hold) is in force.
    pub fn is_held(&self) -> bool {
        self.held.0.load(Ordering::SeqCst)
    }

    /// Where the worker of a queue counts.
    pub(super) fn tally(&self, queue: usize) -> &Tally {
        &self.tallies[queue % MOST]
    }

    /// The frontend that is connected now.
    pub(super) fn connect(&self, connection: Option<Arc<Connection>>) {
        *self.connection.lock() = connection;
    }

    fn connection(&self) -> Option<Arc<Connection>> {
        self.connection.lock().clone()
    }

    fn connected(&self) -> Option<Arc<Connection>> {
        self.connection().filter(|connection| connection.connected.load(Ordering::Relaxed))
    }

    /// Makes the workers take nothing more from their rings. What they have taken goes on.
    pub fn hold(&self) {
        self.held.0.store(true, Ordering::SeqCst);
    }

    /// Ends [`hold`](Self::hold). Whether there was one.
    pub fn resume(&self) -> bool {
        let held = self.held.0.swap(false, Ordering::SeqCst);
        if let Some(connection) = self.connection() {
            // It fails only if the event is set already.
            let _ = connection.resume.write(1);
        }
        held
    }

    /// While the queues are held: requests that were taken and not answered, without those that wait for a lock.
    /// `None` if a worker may not have noticed yet.
    pub fn in_flight(&self) -> Option<u32> {
        let Some(connection) = self.connection() else { return Some(0) };
        connection.rings().try_fold(0, |sum, ring| {
            // Who takes the seat later sees that it is held.
            if !ring.seat().is_free() {
                return None;
            }
            // In this order: a wait ends before its request does.
            let taken = ring.in_flight();
            Some(sum + taken.saturating_sub(ring.waits_for_lock()))
        })
    }

    /// Requests that wait for a lock.
    pub fn locks(&self) -> u32 {
        self.connection().map_or(0, |connection| connection.rings().map(|ring| ring.waits_for_lock()).sum())
    }

    /// All queues.
    pub fn queues(&self) -> Vec<QueueState> {
        let Some(connection) = self.connected() else { return Vec::new() };
        let state = |index, ring: Option<&Arc<Ring>>| QueueState {
            index,
            role: match Role::of(index) {
                Role::HighPriority => "hiprio",
                Role::Request(_) => "request",
            },
            running: ring.is_some_and(|ring| ring.is_started()),
            size: ring.map_or(0, |ring| ring.size()),
            in_flight: ring.map_or(0, |ring| ring.in_flight()),
            locks: ring.map_or(0, |ring| ring.waits_for_lock()),
            broken: ring.is_some_and(|ring| ring.is_broken()),
        };
        let all = connection.rings.iter().enumerate();
        all.map(|(index, ring)| state(index, ring.get().map(|ring| &ring.0))).collect()
    }

    /// The frontend, if one is connected.
    pub fn frontend(&self) -> Option<FrontendState> {
        let connection = self.connected()?;
        Some(FrontendState {
            features: names(connection.features.load(Ordering::Relaxed)),
            protocol: connection.protocol.iter_names().map(|(name, _)| name.to_owned()).collect(),
            channel: connection.channel.load(Ordering::Relaxed),
        })
    }

    /// What the workers have done.
    pub fn work(&self) -> Work {
        let sum = |counter: fn(&Tally) -> &AtomicU64| {
            self.tallies.iter().map(|tally| counter(tally).load(Ordering::Relaxed)).sum()
        };
        Work {
            found: sum(|tally| &tally.found),
            slept: sum(|tally| &tally.slept),
            submissions: sum(|tally| &tally.submissions),
            handovers: sum(|tally| &tally.handovers),
        }
    }

    /// The last transfer of a session from or to another daemon.
    pub fn progress(&self) -> Progress {
        self.progress.lock().clone()
    }
}

/// The names of virtio and vhost feature bits.
fn names(features: u64) -> Vec<String> {
    let known = [
        (VhostUserVirtioFeatures::LOG_ALL.bits(), "VHOST_F_LOG_ALL"),
        (VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits(), "VHOST_USER_F_PROTOCOL_FEATURES"),
        (1 << VIRTIO_RING_F_INDIRECT_DESC, "VIRTIO_RING_F_INDIRECT_DESC"),
        (1 << VIRTIO_RING_F_EVENT_IDX, "VIRTIO_RING_F_EVENT_IDX"),
        (1 << VIRTIO_F_VERSION_1, "VIRTIO_F_VERSION_1"),
    ];
    let name = |bit: u32| {
        let named = known.iter().find(|(mask, _)| *mask == 1 << bit);
        named.map_or_else(|| format!("BIT_{bit}"), |(_, name)| (*name).to_owned())
    };
    (0..u64::BITS).filter(|bit| features & 1 << bit != 0).map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_have_names() {
        let names = names(1 << 28 | 1 << 32 | 1 << 62);
        assert_eq!(names, ["VIRTIO_RING_F_INDIRECT_DESC", "VIRTIO_F_VERSION_1", "BIT_62"]);
    }

    #[test]
    fn without_a_frontend_nothing_is_in_flight() {
        let monitor = Monitor::default();
        monitor.hold();
        assert!(monitor.is_held() && monitor.in_flight() == Some(0) && monitor.queues().is_empty());
        assert!(monitor.resume() && !monitor.resume() && !monitor.is_held());
    }
}
