//! The mapper: a thread that takes files back from the guest, and workers that map them.
//!
//! Only they talk to the frontend. They hold no lock but that of their [`Turn`] while they wait for it: the frontend
//! changes the guest's memory then, and waits for the thread that notes the change. The thread waits for no file;
//! `turn` says how that is kept. While it waits for a turn, another thread may wait for the frontend.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::dax::{Dax, Left};
use super::frontend::Shared;
use super::jobs::{Job, Jobs};
use super::passthrough::Slots;
use super::proxy::Event;
use super::turn::{MayWait, Turn};

pub struct Mapper {
    jobs: Arc<Jobs>,
    shared: Arc<Shared>,
    dax: Mutex<Dax>,
    /// Files that are mapped as a whole.
    slots: Option<Mutex<Slots>>,
}

impl Mapper {
    pub fn new(jobs: Arc<Jobs>, shared: Arc<Shared>, dax: Dax, slots: Option<Slots>) -> Self {
        Self { jobs, shared, dax: Mutex::new(dax), slots: slots.map(Mutex::new) }
    }

    /// Takes over what another process has left in the DAX window. To be called before there are requests.
    pub fn take_over(&self, left: Vec<Left>) {
        self.dax.lock().take_over(left);
    }

    /// Starts the thread and the first worker.
    pub fn start(self: Arc<Self>) -> io::Result<()> {
        let this = self;
        this.add_worker()?;
        let run = move || {
            loop {
                let job = this.jobs.next(this.patience());
                this.turn(job, Instant::now());
            }
        };
        thread::Builder::new().name("thruway-mapper".into()).spawn(run).map(drop)
    }

    fn add_worker(self: &Arc<Self>) -> io::Result<()> {
        if !self.jobs.add_worker() {
            return Ok(());
        }
        let this = self.clone();
        let added = thread::Builder::new().name("thruway-map".into()).spawn(move || this.work());
        added.map(drop).inspect_err(|_| self.jobs.remove_worker())
    }

    fn work(self: &Arc<Self>) {
        loop {
            let mut work = self.jobs.next_work();
            if work.is_last {
                // Before this one waits for a file.
                let added = self.add_worker();
                added.unwrap_or_else(|e| tracing::debug!("one worker less to map files: {e}"));
            }
            work.job.take().into_iter().for_each(|job| self.serve(job, Instant::now()));
            drop(work);
            self.patience().into_iter().for_each(|patience| self.jobs.hurry(patience));
        }
    }

    /// A turn of the thread: does a job, if there is one, and then what is due.
    pub fn turn(&self, job: Option<Job>, now: Instant) {
        match job {
            Some(Job::Event(Event::Revoke(id), since)) => {
                self.slots.iter().for_each(|slots| slots.lock().revoke_for_host(id, since));
                self.dax.lock().revoke(id, since);
            }
            Some(Job::Reset) => {
                self.dax.lock().reset();
                self.slots.iter().for_each(|slots| slots.lock().reset());
            }
            Some(Job::FinishTakeover) => self.dax.lock().finish_takeover(now),
            Some(Job::Show(to)) => {
                let mappings = self.dax.lock().mappings();
                to(mappings);
            }
            Some(Job::Slot(job)) => {
                if let Some(slots) = &self.slots {
                    slots.lock().serve(job, now);
                }
            }
            _ => {}
        }
        self.dax.lock().look();
        self.slots.iter().for_each(|slots| slots.lock().look(now));
    }

    /// A worker's turn.
    pub fn serve(&self, job: Job, now: Instant) {
        match job {
            Job::Dax(job) => Turn::new(&self.dax).serve(job),
            Job::Slot(job) => {
                if let Some(slots) = &self.slots {
                    Turn::new(slots).serve(job, now);
                }
            }
            Job::Event(Event::Changed(id), _) => {
                self.slots.iter().for_each(|slots| Turn::new(slots).changed(id));
            }
            Job::Close(closing) => closing.close(&self.shared.cached, &MayWait::without_a_turn()),
            _ => {}
        }
    }

    /// How long to wait for a job before something else is due.
    pub fn patience(&self) -> Option<Duration> {
        let slots = self.slots.as_ref().and_then(|slots| slots.lock().patience());
        self.dax.lock().patience().into_iter().chain(slots).min()
    }
}
