//! Late replies: which of them go back to the driver, and when.

/// The late replies of one ring. `R`: a reply. `S`: the ring's state as its driver sees it.
pub struct Late<R, S> {
    session: u64,
    held: Vec<R>,
    stopped: Option<S>,
}

impl<R, S> Default for Late<R, S> {
    fn default() -> Self {
        Self { session: 0, held: Vec::new(), stopped: None }
    }
}

impl<R, S: PartialEq> Late<R, S> {
    /// The number of the ring's present session. A reply is [kept](Self::keep) for one session.
    pub fn session(&self) -> u64 {
        self.session
    }

    /// Keeps a reply until it can be delivered. If its session is over, drops it and returns false.
    pub fn keep(&mut self, session: u64, reply: R) -> bool {
        let is_current = session == self.session;
        if is_current {
            self.held.push(reply);
        }
        is_current
    }

    /// Whether there are replies to deliver.
    pub fn owes(&self) -> bool {
        !self.held.is_empty()
    }

    /// The replies to deliver now.
    pub fn take(&mut self) -> impl Iterator<Item = R> + use<'_, R, S> {
        self.held.drain(..)
    }

    /// The ring stops in this state. Its session may go on later.
    pub fn stop(&mut self, ring: S) {
        self.stopped = Some(ring);
    }

    /// The ring starts in this state. Returns true if the session goes on, because the VM was only paused. A ring in
    /// another state than it was stopped in is new.
    ///
    /// After a reset of the driver, a ring never looks like one that stopped with replies outstanding, even if the
    /// indices have wrapped around: its used index equals its available index.
    pub fn start(&mut self, ring: S) -> bool {
        let goes_on = self.stopped.take() == Some(ring);
        if !goes_on {
            self.forget();
        }
        goes_on
    }

    /// Begins another session. Replies of the previous one are dropped, including those that are still to come.
    pub fn forget(&mut self) {
        *self = Self { session: self.session + 1, ..Self::default() };
    }
}

/// Tries each order of the steps of a late reply and of a stop and start of its ring. [`Late`] is the real one. The
/// locks are taken as in `ring.rs`, which uses vhost-user-backend's.
#[cfg(test)]
mod orders {
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    use super::*;

    /// The driver's session that asked for the reply.
    type Reply = u32;

    #[derive(Default)]
    struct Vring {
        ready: bool,
        /// The driver's session.
        session: u32,
        delivered: Vec<Reply>,
    }

    struct Ring {
        late: Mutex<Late<Reply, u32>>,
        vring: Mutex<Vring>,
        busy: Mutex<usize>,
        idle: Condvar,
    }

    impl Ring {
        fn started() -> Arc<Self> {
            let vring = Vring { ready: true, ..Vring::default() };
            Arc::new(Self {
                late: Mutex::new(Late::default()),
                vring: Mutex::new(vring),
                busy: Mutex::new(0),
                idle: Condvar::new(),
            })
        }

        fn deliver(late: &mut Late<Reply, u32>, vring: &mut Vring) {
            for reply in late.take() {
                assert_eq!(reply, vring.session, "a driver gets a reply to what another one asked for");
                vring.delivered.push(reply);
            }
        }

        fn complete(&self, session: u64, reply: Reply) {
            let mut late = self.late.lock().unwrap();
            if late.keep(session, reply) {
                let mut vring = self.vring.lock().unwrap();
                if vring.ready {
                    Self::deliver(&mut late, &mut vring);
                }
            }
        }

        /// Completes the reply of a job that a stop of the ring waits for.
        fn complete_busy(&self, session: u64, reply: Reply) {
            let mut late = self.late.lock().unwrap();
            if late.keep(session, reply) {
                Self::deliver(&mut late, &mut self.vring.lock().unwrap());
            }
            drop(late);
            *self.busy.lock().unwrap() -= 1;
            self.idle.notify_all();
        }

        fn stop(&self) {
            let state = {
                let mut vring = self.vring.lock().unwrap();
                vring.ready = false;
                vring.session
            };
            let mut busy = self.busy.lock().unwrap();
            while *busy > 0 {
                busy = self.idle.wait(busy).unwrap();
            }
            drop(busy);
            self.late.lock().unwrap().stop(state);
        }

        fn start(&self, session: u32) {
            self.vring.lock().unwrap().session = session;
            let mut late = self.late.lock().unwrap();
            late.start(session);
            self.vring.lock().unwrap().ready = true;
            let mut vring = self.vring.lock().unwrap();
            if vring.ready {
                Self::deliver(&mut late, &mut vring);
            }
        }

        fn delivered(&self) -> Vec<Reply> {
            self.vring.lock().unwrap().delivered.clone()
        }
    }

    /// Completes a reply on another thread while this one stops the ring and starts it for a driver's session. Returns
    /// what was delivered.
    fn meanwhile(complete: fn(&Ring, u64, Reply), busy: usize, next: u32) -> Vec<Reply> {
        let ring = Ring::started();
        *ring.busy.lock().unwrap() = busy;
        let session = ring.late.lock().unwrap().session();
        let other = thread::spawn({
            let ring = ring.clone();
            move || complete(&ring, session, 0)
        });
        ring.stop();
        ring.start(next);
        other.join().unwrap();
        ring.delivered()
    }

    #[test]
    fn a_pause_loses_no_reply() {
        loom::model(|| assert_eq!(meanwhile(Ring::complete, 0, 0), [0]));
    }

    #[test]
    fn a_new_driver_gets_no_old_reply() {
        // deliver() checks the reply's session.
        loom::model(|| assert!(meanwhile(Ring::complete, 0, 1).len() <= 1));
    }

    #[test]
    fn a_stop_waits_for_the_replies_under_way() {
        loom::model(|| assert_eq!(meanwhile(Ring::complete_busy, 1, 1), [0]));
    }
}
