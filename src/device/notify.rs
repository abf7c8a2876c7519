//! The notification queue (VIRTIO 1.3, section 5.11.6.4): what the guest is told without having asked.
//!
//! [`Notifier`] is the [`Sink`] of the layers above. It holds what the guest has not heard yet, merged and bounded. The
//! worker of the queue takes a buffer of the driver's for each notification when there is one to send, and only then.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::chain::{self, Used};
use super::handler::Handler;
use super::queue::{Role, Workers};
use super::ring::Ring;
use super::scratch::BATCH;
use crate::fuse::notify::{FS_Q_OVERFLOW, FsEvent, LONGEST, Notification, Sink};
use crate::limits::{Limit, NOTIFICATIONS, NOTIFIED_EVENTS};

/// The feature bit VIRTIO_FS_F_NOTIFICATION (VIRTIO 1.3, section 5.11.3).
pub const FEATURE: u64 = 1 << 0;

/// The number of the notification queue, if the driver has taken [`FEATURE`]. Request queues follow it then. Without
/// the feature they begin here.
pub const QUEUE: usize = 1;

/// `notify_buf_size` of the configuration space: how long each buffer in the queue must be, in bytes. The longest
/// notification fits ([`LONGEST`], 1,073 bytes). A power of two divides pages, so that a driver can put its buffers
/// into as few of them as possible.
pub const BUFFER: u32 = (LONGEST as u32).next_power_of_two();

/// What the guest has not heard yet, and the way to wake the worker that tells it.
pub struct Notifier {
    pending: Mutex<Pending>,
    /// The driver has taken the feature. Changed with `pending` locked.
    open: AtomicBool,
    /// Readable if there may be something to send.
    wake: EventFd,
    /// By [`Kind`].
    sent: [AtomicU64; Kind::ALL.len()],
}

/// A kind of notification, as the metrics name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    InvalInode,
    InvalEntry,
    Delete,
    IncEpoch,
    Revoked,
    Event,
}

impl Kind {
    const ALL: [Self; 6] =
        [Self::InvalInode, Self::InvalEntry, Self::Delete, Self::IncEpoch, Self::Revoked, Self::Event];

    fn of(notification: &Notification) -> Self {
        match notification {
            Notification::InvalInode { .. } => Self::InvalInode,
            Notification::InvalEntry { .. } => Self::InvalEntry,
            Notification::Delete { .. } => Self::Delete,
            Notification::IncEpoch => Self::IncEpoch,
            Notification::Revoked => Self::Revoked,
            Notification::Event(_) => Self::Event,
        }
    }
}

/// Revocations, invalidations and events, which are sent in this order. A host process may wait for a revocation. An
/// event never comes before the invalidation that belongs to it, and an invalidation that waits may take in a later
/// one.
#[derive(Default)]
struct Pending {
    /// Slots were revoked. The table says which, so this is said once for all of them, and is never dropped.
    revoked: bool,
    /// The guest must trust nothing. Other invalidations are not kept then.
    epoch: bool,
    /// In order of arrival.
    order: VecDeque<Key>,
    /// By nodeid: whether the contents are invalid too.
    inodes: HashMap<u64, bool>,
    /// By directory and name: the child that was removed, or 0.
    entries: HashMap<Arc<[u8]>, u64>,
    events: VecDeque<Event>,
    /// Events were lost after those that are kept.
    lost: bool,
    /// Reused, for a key.
    key: Vec<u8>,
}

enum Key {
    Inode(u64),
    /// The directory's nodeid in 8 bytes, and the name.
    Entry(Arc<[u8]>),
}

/// An owned [`FsEvent`].
struct Event {
    nodeid: u64,
    child: u64,
    mask: u32,
    cookie: u32,
    name: Box<[u8]>,
}

/// Bytes of a nodeid in [`Key::Entry`].
const ID: usize = size_of::<u64>();

impl Pending {
    fn len(&self) -> usize {
        let single: usize = [self.revoked, self.epoch, self.lost].map(usize::from).iter().sum();
        single + self.order.len() + self.events.len()
    }

    fn add(&mut self, notification: Notification) {
        match notification {
            Notification::Event(event) => self.add_event(event),
            Notification::Revoked => self.revoked = true,
            _ if self.epoch => {}
            notification if self.merges(&notification) => {}
            notification if self.order.len() >= NOTIFICATIONS || !notification.fits() => {
                Limit::Notifications.reached();
                self.trust_nothing();
            }
            Notification::InvalInode { nodeid, contents } => {
                self.inodes.insert(nodeid, contents);
                self.order.push_back(Key::Inode(nodeid));
            }
            Notification::InvalEntry { .. } => self.add_entry(0),
            Notification::Delete { child, .. } => self.add_entry(child),
            Notification::IncEpoch => self.trust_nothing(),
        }
    }

    /// Whether the notification is part of one that waits. If not and it is about a name, `key` is set.
    fn merges(&mut self, notification: &Notification) -> bool {
        let (parent, name, child) = match *notification {
            Notification::InvalInode { nodeid, contents } => {
                let known = self.inodes.get_mut(&nodeid);
                return known.map(|known| *known |= contents).is_some();
            }
            Notification::InvalEntry { parent, name } => (parent, name, 0),
            Notification::Delete { parent, child, name } => (parent, name, child),
            Notification::IncEpoch | Notification::Revoked | Notification::Event(_) => return false,
        };
        self.key.clear();
        self.key.extend(parent.to_ne_bytes());
        self.key.extend(name);
        self.entries.get_mut(&self.key[..]).map(|known| *known = child).is_some()
    }

    fn add_entry(&mut self, child: u64) {
        let key: Arc<[u8]> = self.key[..].into();
        self.entries.insert(key.clone(), child);
        self.order.push_back(Key::Entry(key));
    }

    /// Drops all invalidations for one that covers them.
    fn trust_nothing(&mut self) {
        let (events, lost) = (std::mem::take(&mut self.events), self.lost);
        *self = Self { revoked: self.revoked, epoch: true, events, lost, ..Self::default() };
    }

    fn add_event(&mut self, event: FsEvent) {
        let FsEvent { nodeid, child, mask, cookie, name } = event;
        if self.lost || self.events.len() >= NOTIFIED_EVENTS || !Notification::Event(event).fits() {
            Limit::NotifiedEvents.reached();
            self.lost = true;
            return;
        }
        self.events.push_back(Event { nodeid, child, mask, cookie, name: name.into() });
    }

    /// Takes the next notification and calls `with` it. `None` if nothing waits.
    fn take<T>(&mut self, with: impl FnOnce(&Notification) -> T) -> Option<T> {
        if std::mem::take(&mut self.revoked) {
            return Some(with(&Notification::Revoked));
        }
        if std::mem::take(&mut self.epoch) {
            return Some(with(&Notification::IncEpoch));
        }
        match self.order.pop_front() {
            Some(Key::Inode(nodeid)) => {
                let contents = self.inodes.remove(&nodeid).unwrap_or(true);
                Some(with(&Notification::InvalInode { nodeid, contents }))
            }
            Some(Key::Entry(key)) => {
                let child = self.entries.remove(&key).unwrap_or_default();
                let (id, name) = key.split_first_chunk::<ID>()?;
                let parent = u64::from_ne_bytes(*id);
                Some(with(&match child {
                    0 => Notification::InvalEntry { parent, name },
                    child => Notification::Delete { parent, child, name },
                }))
            }
            None => self.take_event().map(|event| {
                let Event { nodeid, child, mask, cookie, ref name } = event;
                with(&Notification::Event(FsEvent { nodeid, child, mask, cookie, name }))
            }),
        }
    }

    fn take_event(&mut self) -> Option<Event> {
        let lost = || Event { nodeid: 0, child: 0, mask: FS_Q_OVERFLOW, cookie: 0, name: Box::default() };
        self.events.pop_front().or_else(|| std::mem::take(&mut self.lost).then(lost))
    }

    /// A notification of this kind was taken and not sent: what covers it waits from now on.
    fn was_lost(&mut self, kind: Kind) {
        match kind {
            Kind::Revoked => self.revoked = true,
            Kind::Event => {
                // The guest hears of the loss where the event would have come.
                self.events.clear();
                self.lost = true;
            }
            Kind::InvalInode | Kind::InvalEntry | Kind::Delete | Kind::IncEpoch => self.trust_nothing(),
        }
    }
}

impl Notifier {
    /// Holds nothing.
    ///
    /// # Errors
    /// Those of eventfd(2).
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            pending: Mutex::default(),
            open: AtomicBool::new(false),
            wake: EventFd::new(EFD_NONBLOCK)?,
            sent: Default::default(),
        })
    }

    /// The driver has taken the feature, or has not. The device calls it.
    pub fn set_open(&self, open: bool) {
        let mut pending = self.pending.lock();
        self.open.store(open, Ordering::Release);
        if !open {
            *pending = Pending::default();
        }
    }

    /// The event that tells the worker to look.
    pub(super) fn wake_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// The worker has seen the event.
    pub(super) fn seen(&self) {
        let _ = self.wake.read();
    }

    /// Makes the worker look.
    pub(super) fn wake(&self) {
        // It fails only if the event is set already.
        let _ = self.wake.write(1);
    }

    fn len(&self) -> usize {
        self.pending.lock().len()
    }

    /// How many of each kind the guest was sent.
    pub fn sent(&self) -> impl Iterator<Item = (String, u64)> {
        Kind::ALL.iter().zip(&self.sent).map(|(kind, sent)| (format!("{kind:?}"), sent.load(Ordering::Relaxed)))
    }

    /// Sends the next notification by `write`, which returns false if the message does not fit. Returns its length; 0
    /// if nothing was sent.
    fn send(&self, message: &mut Vec<u8>, write: impl FnOnce(&[u8]) -> bool) -> usize {
        let encode = |notification: &Notification| {
            notification.encode(message);
            Kind::of(notification)
        };
        // Memory of the guest may be slow to write to, so the lock is not held then.
        let Some(kind) = self.pending.lock().take(encode) else { return 0 };
        if !write(message) {
            self.pending.lock().was_lost(kind);
            return 0;
        }
        self.sent[kind as usize].fetch_add(1, Ordering::Relaxed);
        message.len()
    }
}

impl Sink for Notifier {
    fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    fn notify(&self, notification: Notification) {
        // A target of a migration may learn only later that the driver has taken the feature.
        let is_kept = || self.is_open() || notification.is_of_all();
        if !is_kept() {
            return;
        }
        let mut pending = self.pending.lock();
        if !is_kept() {
            return;
        }
        let was_empty = pending.len() == 0;
        pending.add(notification);
        drop(pending);
        // If others wait, the worker knows of them, or waits for the driver's buffers.
        if was_empty {
            self.wake();
        }
    }

    fn clear(&self) {
        *self.pending.lock() = Pending::default();
    }
}

impl<H: Handler> Workers<H> {
    /// Sends what waits, as far as the driver has buffers for it. A buffer that is too short goes back empty.
    pub fn tell(&self, ring: &Arc<Ring>, notifier: &Arc<Notifier>) {
        ring.wake_at_start(notifier);
        Role::Notification.name_thread();
        let mut worker = ring.worker();
        let scratch = self.scratch(&mut worker, QUEUE);
        loop {
            let mut kept = self.service.mem.keep();
            let most = notifier.len().min(BATCH);
            if most == 0 {
                return ring.flush(&kept.near, &mut scratch.used);
            }
            let table = ring.exchange(QUEUE, &kept.near, &mut scratch.used, &mut scratch.heads, most, true);
            if scratch.heads.is_empty() {
                // The driver notifies the device of its next buffer.
                return;
            }
            for head in scratch.heads.drain(..) {
                let (work, segments) = (&mut scratch.work, &mut scratch.segments);
                let (loaded, fault) = chain::load(&self.service.mem, &mut kept, table, head, work, segments);
                let room = if fault.is_ok() { loaded.work.writable.len() } else { 0 };
                let written = notifier.send(&mut scratch.message, |message| {
                    message.len() <= room && loaded.work.writable.write_at(0, message) == message.len()
                });
                drop(loaded);
                if self.logging.load(Ordering::Acquire) {
                    chain::mark_dirty(&kept, &scratch.segments, written);
                }
                scratch.used.push(Used::new(head, written));
            }
            if self.closing.load(Ordering::Relaxed) {
                return ring.flush(&kept.near, &mut scratch.used);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notifier() -> Notifier {
        let notifier = Notifier::new().unwrap();
        notifier.set_open(true);
        notifier
    }

    fn woken(notifier: &Notifier) -> bool {
        notifier.wake.read().is_ok()
    }

    /// All that the guest hears, each as code and name or number.
    fn heard(notifier: &Notifier) -> Vec<String> {
        let text = |notification: &Notification| match *notification {
            Notification::InvalInode { nodeid, contents } => format!("inode {nodeid} {contents}"),
            Notification::InvalEntry { parent, name } => format!("entry {parent} {}", name.escape_ascii()),
            Notification::Delete { parent, child, name } => format!("delete {parent} {child} {}", name.escape_ascii()),
            Notification::IncEpoch => "epoch".into(),
            Notification::Revoked => "revoked".into(),
            Notification::Event(event) => format!("event {} {:#x}", event.nodeid, event.mask),
        };
        let mut all = Vec::new();
        while notifier.len() > 0 {
            all.extend(notifier.pending.lock().take(text));
        }
        all
    }

    fn event(notifier: &Notifier, nodeid: u64) {
        notifier.event(FsEvent { nodeid, child: 0, mask: 2, cookie: 0, name: b"" });
    }

    #[test]
    fn the_longest_notification_fits_into_a_buffer() {
        assert!(BUFFER as usize >= LONGEST && BUFFER as usize / 2 < LONGEST);
        assert_eq!(BUFFER, 2048);
    }

    #[test]
    fn what_is_said_twice_is_heard_once() {
        let n = notifier();
        n.inval_inode(1, false);
        assert!(woken(&n));
        n.inval_entry(1, b"a");
        n.inval_inode(1, true);
        n.inval_inode(1, false);
        n.inval_entry(1, b"b");
        n.inval_entry(2, b"a");
        n.inval_entry(1, b"a");
        n.notify(Notification::Delete { parent: 1, child: 7, name: b"b" });
        assert!(!woken(&n));
        assert_eq!(heard(&n), ["inode 1 true", "entry 1 a", "delete 1 7 b", "entry 2 a"]);
        // Heard is not merged with.
        n.inval_inode(1, false);
        n.inval_entry(1, b"b");
        assert!(woken(&n));
        assert_eq!(heard(&n), ["inode 1 false", "entry 1 b"]);
        assert!(n.pending.lock().inodes.is_empty() && n.pending.lock().entries.is_empty());
    }

    #[test]
    fn invalidations_come_before_events() {
        let n = notifier();
        n.inval_inode(1, true);
        event(&n, 1);
        event(&n, 1);
        n.inval_inode(2, true);
        event(&n, 2);
        n.inval_inode(1, true);
        assert_eq!(heard(&n), ["inode 1 true", "inode 2 true", "event 1 0x2", "event 1 0x2", "event 2 0x2"]);
    }

    #[test]
    fn too_many_become_one() {
        let n = notifier();
        event(&n, 5);
        for nodeid in 0..NOTIFICATIONS as u64 {
            n.inval_inode(nodeid, false);
        }
        // Merged ones take no room.
        n.inval_inode(0, true);
        assert_eq!(n.len(), NOTIFICATIONS + 1);
        let reached = Limit::Notifications.times();
        n.inval_entry(1, b"one too many");
        assert_eq!(n.len(), 2);
        assert!(Limit::Notifications.times() > reached);
        n.inval_inode(3, true);
        n.inc_epoch();
        assert_eq!(heard(&n), ["epoch", "event 5 0x2"]);
        n.inval_inode(3, true);
        n.inc_epoch();
        assert_eq!(heard(&n), ["epoch"]);
    }

    #[test]
    fn revocations_are_said_once_and_first_and_never_dropped() {
        let n = notifier();
        event(&n, 5);
        for nodeid in 0..NOTIFICATIONS as u64 {
            n.inval_inode(nodeid, false);
        }
        n.revoked();
        n.revoked();
        assert_eq!(n.len(), NOTIFICATIONS + 2);
        // The driver's buffer is too short.
        assert_eq!(n.send(&mut Vec::new(), |_| false), 0);
        n.inval_inode(NOTIFICATIONS as u64, false);
        assert_eq!(heard(&n), ["revoked", "epoch", "event 5 0x2"]);
        n.inc_epoch();
        n.revoked();
        assert_eq!(heard(&n), ["revoked", "epoch"]);
        n.revoked();
        n.clear();
        assert!(heard(&n).is_empty());
    }

    #[test]
    fn names_that_are_too_long_void_all() {
        let n = notifier();
        n.inval_inode(3, true);
        n.inval_entry(1, &[b'x'; 1025]);
        assert_eq!(heard(&n), ["epoch"]);
        n.inval_entry(1, &[b'x'; 1024]);
        assert_eq!(heard(&n).len(), 1);
        let name = &[b'x'; 1025];
        n.event(FsEvent { nodeid: 1, child: 0, mask: 2, cookie: 0, name });
        assert_eq!(heard(&n), ["event 0 0x4000"]);
    }

    #[test]
    fn lost_events_are_said_once() {
        let (n, dropped) = (notifier(), Limit::NotifiedEvents.times());
        for _ in 0..NOTIFIED_EVENTS + 10 {
            event(&n, 1);
        }
        assert!(Limit::NotifiedEvents.times() >= dropped + 10);
        assert_eq!(n.len(), NOTIFIED_EVENTS + 1);
        let heard_all = heard(&n);
        assert_eq!(heard_all.len(), NOTIFIED_EVENTS + 1);
        assert_eq!(heard_all[NOTIFIED_EVENTS - 1..], ["event 1 0x2", "event 0 0x4000"]);
        event(&n, 1);
        assert_eq!(heard(&n), ["event 1 0x2"]);
    }

    #[test]
    fn what_cannot_be_sent_is_covered() {
        let n = notifier();
        let refuse = || n.send(&mut Vec::new(), |_| false);
        n.inval_inode(1, true);
        n.inval_inode(2, true);
        event(&n, 3);
        event(&n, 4);
        assert_eq!(refuse(), 0);
        assert_eq!(refuse(), 0);
        assert_eq!(n.len(), 3);
        assert_eq!(n.send(&mut Vec::new(), |message| message.len() == 16), 16);
        assert_eq!(refuse(), 0);
        assert_eq!(refuse(), 0);
        assert_eq!(heard(&n), ["event 0 0x4000"]);
        assert_eq!(refuse(), 0);
    }

    #[test]
    fn a_guest_without_the_queue_hears_nothing() {
        let n = notifier();
        n.inval_inode(1, true);
        n.set_open(false);
        n.inval_inode(2, true);
        event(&n, 2);
        assert_eq!(n.len(), 0);
        // At the target of a migration, before the features are known.
        n.inc_epoch();
        n.event(FsEvent { nodeid: 0, child: 0, mask: FS_Q_OVERFLOW, cookie: 0, name: b"" });
        n.set_open(true);
        assert_eq!(heard(&n), ["epoch", "event 0 0x4000"]);
        n.inval_inode(1, true);
        n.clear();
        assert!(heard(&n).is_empty());
    }
}
