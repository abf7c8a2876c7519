//! What the file system and the mapper share of window passthrough.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;

use super::Settings;
use super::entries::Entries;
use super::entry::Entry;
use super::moved::{Moved, OpenFile, Resumed};
use super::mtime::{DeferredMtime, Touch};
use crate::limits::TABLE_ENTRIES;
use crate::window::jobs::{EntryJob, Jobs, SlotJob};

pub struct Core {
    pub settings: Settings,
    /// The guest has the table.
    on: AtomicBool,
    /// The guest is about to move to another daemon: no entry becomes live. Changed under the lock of `entries`.
    leaving: AtomicBool,
    entries: Mutex<Entries>,
    /// The file that the frontend maps as the table.
    pub table: OwnedFd,
    /// See [`Look`](super::look::Look).
    pub looks: Box<[Mutex<()>]>,
    pub times: Arc<DeferredMtime>,
    pub jobs: Arc<Jobs>,
}

impl Core {
    pub fn new(settings: Settings, jobs: Arc<Jobs>, touch: Touch) -> io::Result<Self> {
        let looks = (0..TABLE_ENTRIES).map(|_| Mutex::default()).collect();
        let entries = Entries::new()?;
        let table = entries.table.file().ok_or(io::ErrorKind::NotFound)?.try_clone_to_owned()?;
        let (on, leaving) = (AtomicBool::new(false), AtomicBool::new(false));
        let (entries, times) = (Mutex::new(entries), DeferredMtime::new(touch));
        Ok(Self { settings, on, leaving, entries, table, looks, times, jobs })
    }

    pub fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock()
    }

    /// What `ask` says of an entry, if it is not free.
    pub fn get<R>(&self, index: u32, ask: impl FnOnce(&Entry) -> R) -> Option<R> {
        self.entries().get(index).map(ask)
    }

    /// Changes an entry, and what the guest sees of it, if it is not free.
    pub fn update<R>(&self, index: u32, change: impl FnOnce(&mut Entry) -> R) -> Option<R> {
        self.entries().update(index, change)
    }

    /// Whether the guest has the table.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// Whether no entry may become live.
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// The guest is about to move to another daemon, or stays after all. Whether that is new.
    pub fn set_leaving(&self, leaving: bool) -> bool {
        // Who makes an entry live looks at it under the lock.
        let _entries = self.entries();
        self.leaving.swap(leaving, Ordering::AcqRel) != leaving
    }

    /// Begins with the session of another daemon.
    ///
    /// # Errors
    /// What is wrong with it. There is nothing of it then.
    pub fn resume(&self, moved: &Moved, files: Vec<OpenFile>) -> Resumed {
        let mut entries = self.entries();
        entries.resume(moved, files)?;
        self.on.store(true, Ordering::Release);
        let session = entries.session;
        drop(entries);
        // Not by the caller: it waits until the device runs.
        self.jobs.send(SlotJob::Table { session });
        Ok(())
    }

    /// The guest of this session has the table.
    pub fn started(&self, session: u64) {
        let entries = self.entries();
        self.on.store(entries.session == session, Ordering::Release);
    }

    /// Forgets everything. The mapper's reset must follow, which finds that nobody waits.
    pub fn end(&self) {
        let mut entries = self.entries();
        self.on.store(false, Ordering::Release);
        let waiting = entries.end(&self.times);
        drop(entries);
        self.times.set_soon();
        waiting.into_iter().for_each(|answer| answer(Err(Errno::IO)));
    }

    /// Says whether the opens of the `life`th entry have passthrough. `false` if its slot is no longer wanted.
    pub fn decide(&self, index: u32, life: u64, passes: bool) -> bool {
        let (wanted, waiting) = self.entries().decide(index, life, passes);
        waiting.into_iter().for_each(|answer| answer(Ok(passes.then_some(index))));
        wanted
    }

    /// The entry that a node has.
    pub fn index(&self, node: u64) -> Option<u32> {
        if self.is_on() { self.entries().index(node) } else { None }
    }

    /// Notes that an entry's file must get the present time, if the guest has stored to it. Never waits.
    pub fn note_stores(&self, index: u32) {
        self.entries().note_stores(index, &self.times);
    }

    pub fn send(&self, job: EntryJob, index: u32) {
        self.jobs.send(SlotJob::Entry(job, index));
    }
}
