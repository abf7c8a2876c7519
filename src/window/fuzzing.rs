//! For fuzz/: a window without threads.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::jobs::Job;
use super::passthrough::Touch;
use super::proxy::Event;
use super::*;

pub use super::passthrough::entry::{Change, EntryState, Record};
pub use super::passthrough::table::Table;

/// A window whose mapper takes a turn only when it is told to.
pub struct Harness {
    pub window: Arc<Window>,
    core: Arc<Core>,
    mapper: Arc<Mapper>,
}

impl Harness {
    pub fn new(size: u64, settings: Settings, files: Arc<dyn ProxyFiles>) -> io::Result<Self> {
        Self::with(size, settings, files, Box::new(touch))
    }

    /// `touch`: sets the times of a file.
    pub fn with(size: u64, settings: Settings, files: Arc<dyn ProxyFiles>, touch: Touch) -> io::Result<Self> {
        let jobs = Arc::new(Jobs::default());
        let (shared, core) = (Arc::new(Shared::default()), Arc::new(Core::new(settings, jobs.clone(), touch)?));
        let slow = Slow::new(files.clone());
        let slots = Slots::new(core.clone(), shared.clone(), slow.clone());
        let dax = Dax::new((size / RANGE) as usize, shared.clone(), slow, jobs.clone(), settings.patience);
        let mapper = Arc::new(Mapper::new(jobs.clone(), shared.clone(), dax, Some(slots)));
        let window = Arc::new(Window {
            size,
            passthrough: Some(Arc::new(Passthrough::new(core.clone()))),
            jobs,
            shared,
            files,
            mapper: mapper.clone(),
        });
        Ok(Self { window, core, mapper })
    }

    /// One turn of the mapper: a job, what is due, and what is to be done for that. Whether there was a job.
    pub fn turn(&self) -> bool {
        self.turn_at(Instant::now())
    }

    /// The same at another time.
    pub fn turn_at(&self, now: Instant) -> bool {
        let job = self.window.jobs.any(false);
        let any = job.is_some();
        job.into_iter().for_each(|job| self.job(job, now));
        // What comes of it may make room for others. They take another turn.
        for _ in 0..3 {
            self.mapper.turn(None, now);
            while let Some(job) = self.window.jobs.any(true) {
                self.job(job, now);
            }
        }
        any
    }

    /// Does all that the mapper's thread has to do, as while a worker waits for a file.
    pub fn thread_turns(&self) {
        loop {
            let job = self.window.jobs.next(Some(Duration::ZERO));
            let is_last = job.is_none();
            self.mapper.turn(job, Instant::now());
            if is_last {
                return;
            }
        }
    }

    fn job(&self, job: Job, now: Instant) {
        match job.is_mappers() {
            true => self.mapper.turn(Some(job), now),
            false => self.mapper.serve(job, now),
        }
    }

    #[cfg(test)]
    pub const fn core(&self) -> &Arc<Core> {
        &self.core
    }

    #[cfg(test)]
    pub const fn mapper(&self) -> &Arc<Mapper> {
        &self.mapper
    }

    /// How long the mapper would wait for a job.
    pub fn patience(&self) -> Option<Duration> {
        self.mapper.patience()
    }

    pub fn event(&self, event: Event) {
        self.event_at(event, Instant::now());
    }

    /// The same for an event that the daemon has known since then.
    pub fn event_at(&self, event: Event, since: Instant) {
        self.window.jobs.send(Job::Event(event, since));
    }

    pub fn pass(&self) -> &Arc<Passthrough> {
        self.window.passthrough.as_ref().expect("there is one")
    }

    /// What the guest sees of an entry.
    pub fn record(&self, index: u32) -> Record {
        *self.core.entries().table.record(index)
    }

    /// The file of the table.
    pub fn table(&self) -> BorrowedFd<'_> {
        self.core.table.as_fd()
    }

    /// How many entries no node has.
    pub fn free_entries(&self) -> usize {
        self.core.entries().free()
    }

    pub fn live(&self) -> [usize; 3] {
        [0, 1, 2].map(|region: usize| self.window.shared.live[region].load(Ordering::Relaxed))
    }
}
