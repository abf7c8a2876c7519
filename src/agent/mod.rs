//! The guest agent (docs/guest-agent.md): which changes by others it is to repeat, and what its threads are about.
//!
//! `watch` fills the list of changes; the dispatch of requests asks what a request of the agent's threads stands for.
//! Knows no virtqueue, no request and no file.
//!
//! **Order.** Changes are handed out in the order in which they happened. Those of one directory or node are with one
//! thread at a time. No batch has two of one name or node, so a request belongs to one change.
//!
//! **Threads.** A thread is known by its id in the guest. It is registered while the guest knows its marker, a node
//! that only the thread holds: the guest's kernel forgets the marker when the thread's process ends, and only then can
//! the id belong to somebody else.

mod list;
#[cfg(test)]
mod tests;
mod told;

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use thruway_guest::protocol::{
    ASIDE, Batch, Change, Done, Found, Hello, MESSAGE, PHANTOMS, Place, VERSION, WAIT_MS, ops,
};

use crate::limits::{AGENT_CHANGES, AGENT_PATIENCE, AGENT_THREADS, Limit};
use crate::watch::FileId;
use list::List;
pub use list::Other;
use told::Told;

type Result<T> = std::result::Result<T, Errno>;

/// How each token begins.
const TOKEN_START: &str = ".thruway-";

/// Takes a batch, as bytes, to the thread that waits for it.
pub type Answer = Box<dyn FnOnce(Vec<u8>) + Send>;

/// The type of a phantom (S_IFMT), which its number tells.
pub fn phantom_format(node: u64) -> u32 {
    if node & 1 == 1 { libc::S_IFDIR } else { libc::S_IFREG }
}

/// The number of the same phantom with this type.
pub fn phantom_of(node: u64, format: u32) -> u64 {
    node & !1 | u64::from(format == libc::S_IFDIR)
}

/// The phantom after this one.
pub fn next_phantom(node: u64) -> u64 {
    node + 2
}

/// Whether a nodeid is a phantom's.
pub fn is_phantom(node: u64) -> bool {
    node >= PHANTOMS
}

/// The agents of a session.
pub struct Agents {
    /// Threads that are known. It spares a look at `state` where there is no agent.
    known: AtomicUsize,
    /// Locked with no other lock held. Nothing is answered meanwhile.
    state: Mutex<State>,
    /// A thread waits, and none did before.
    waits: Condvar,
    clock: Box<dyn Fn() -> Instant + Send + Sync>,
    /// What the guest has learned of names.
    told: Told,
}

struct State {
    threads: Vec<Thread>,
    list: List,
    /// Nodes that the guest is to look at again.
    refresh: Vec<u64>,
    /// Changes were lost, and nobody has begun to look at everything again.
    lost: bool,
    /// Somebody is about to say which nodes the guest knows.
    gathers: bool,
    next_phantom: u64,
    next_batch: u64,
    /// When a thread asked or was answered last.
    asked: Option<Instant>,
    /// There is a thread that ends waits.
    timer: bool,
    counts: Counts,
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Changes that were repeated.
    pub repeated: u64,
    /// Changes that could not be repeated, of which the guest only saw the outcome.
    pub failed: u64,
    /// The errno of the last of them.
    pub errno: u32,
    /// How often changes were lost: more than the bound waited, or the host's kernel lost events.
    pub lost: u64,
}

/// How the agent is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Threads that are registered.
    pub threads: usize,
    /// Changes that wait for the agent, or that it is repeating.
    pub waiting: usize,
    /// How long the oldest of them has waited.
    pub delay: Duration,
    /// It keeps up, so the guest may have leases.
    pub current: bool,
    /// What has happened so far.
    pub counts: Counts,
}

struct Thread {
    pid: u32,
    token: String,
    /// The node of the directory that the token names. It is also every directory that the guest does not know.
    hidden: u64,
    /// See the module.
    marker: u64,
    registered: bool,
    parked: Option<Parked>,
    given: Option<Given>,
}

struct Parked {
    answer: Answer,
    until: Instant,
}

/// A batch that a thread carries out.
struct Given {
    id: u64,
    /// When the thread got it.
    at: Instant,
    /// Since when its first change has waited.
    since: Instant,
    work: Vec<Work>,
}

/// A change that a thread carries out.
#[derive(Clone, Debug)]
pub struct Work {
    /// What it repeats. A directory of 0 is replaced by the thread's hidden one.
    pub change: Change,
    /// The file that has changed, if that is known.
    pub file: Option<FileId>,
    /// See there.
    pub other: Other,
    /// The name was made.
    pub created: bool,
    /// The node that stands for a file which the guest does not know. The next one stands for the other of an exchange.
    pub phantom: u64,
    /// The node that a rename replaces. 0: none that the agent has seen.
    pub target: u64,
    /// The thread's kernel has asked for the name, so it has nothing of it that others could take for true.
    pub asked: bool,
    /// It cannot be repeated: requests for it are answered as anybody's.
    pub given_up: bool,
    /// The directory that the guest has under another name for a moment. 0: none.
    pub aside: u64,
}

impl Work {
    /// Whether it is about this name, or the old one of a rename.
    pub fn is_at(&self, parent: u64, name: &[u8]) -> bool {
        self.change.place.dir == parent && self.change.place.name == name
    }

    /// Whether it moves a file. That may be repeated as the removal of a name and a new file too.
    fn moves_file(&self) -> bool {
        self.change.has(ops::RENAME) && !self.change.has(ops::DIRECTORY)
    }

    /// Whether it moves something to this name.
    pub fn leads_to(&self, parent: u64, name: &[u8]) -> bool {
        self.change.to.dir == parent && self.change.to.name == name
    }
}

/// What a name means to one of the agent's threads.
#[derive(Clone, Debug)]
pub enum Look {
    /// What it means to others.
    AsOthers,
    /// There is no such name.
    Missing,
    /// A phantom.
    Phantom(u64),
    /// What its change says.
    Work(Box<Work>),
}

/// What a new name means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// The agent is registered now, by this marker.
    Marker(u64),
    /// The name of a change, by this phantom.
    Name(u64),
    /// The name of this directory, which was aside.
    Back(u64),
    /// It was not asked for.
    Refused,
}

impl Default for Agents {
    fn default() -> Self {
        Self::with_clock(Box::new(Instant::now))
    }
}

impl Agents {
    fn with_clock(clock: Box<dyn Fn() -> Instant + Send + Sync>) -> Self {
        // No guest has the phantoms of an earlier daemon's: their numbers begin at random.
        let start = PHANTOMS + (random() >> 16 & !3);
        let state = State {
            threads: Vec::new(),
            list: List::default(),
            refresh: Vec::new(),
            lost: true,
            gathers: false,
            next_phantom: start,
            next_batch: 1,
            asked: None,
            timer: false,
            counts: Counts::default(),
        };
        Self {
            known: AtomicUsize::new(0),
            state: Mutex::new(state),
            waits: Condvar::new(),
            clock,
            told: Told::default(),
        }
    }

    /// Whether there is an agent, or one that is about to register.
    pub fn any(&self) -> bool {
        self.known.load(Ordering::Relaxed) > 0
    }

    /// Whether a request with this thread id is the agent's.
    pub fn knows(&self, pid: u32) -> bool {
        self.any() && self.state.lock().threads.iter().any(|thread| thread.pid == pid)
    }

    /// Whether the thread of this id is carrying out changes.
    pub fn works(&self, pid: u32) -> bool {
        self.any() && self.state.lock().thread(pid).is_ok_and(|thread| thread.given.is_some())
    }

    /// The guest learns that a name leads to a node; 0: that there is no such name.
    pub fn tell(&self, parent: u64, name: &[u8], node: u64) {
        if self.any() {
            self.told.tell(parent, name, node);
        }
    }

    /// Whether the guest may know that a name leads to this node. False if it has learned something else since.
    pub fn was_told(&self, parent: u64, name: &[u8], node: u64) -> bool {
        self.told.was_told(parent, name, node)
    }

    /// Whether the agent is yet to repeat that there is such a name.
    pub fn is_announced(&self, parent: u64, name: &[u8]) -> bool {
        if !self.any() {
            return false;
        }
        let state = self.state.lock();
        let is = |work: &Work| {
            let made = work.is_at(parent, name) && work.change.has(ops::CREATE) && !work.created;
            (made || work.leads_to(parent, name)) && !work.given_up
        };
        let mut given = state.threads.iter().filter_map(|thread| thread.given.as_ref()).flat_map(|given| &given.work);
        given.any(is) || state.list.makes(parent, name)
    }

    /// Whether the guest hears of every change within [`AGENT_PATIENCE`].
    pub fn is_current(&self) -> bool {
        self.any() && self.state.lock().is_current((self.clock)())
    }

    /// How the agent is.
    pub fn facts(&self) -> Facts {
        let now = (self.clock)();
        let state = self.state.lock();
        let given = state.threads.iter().filter_map(|thread| thread.given.as_ref());
        let oldest = given.clone().map(|given| given.since).chain(state.list.oldest()).min();
        Facts {
            threads: state.threads.iter().filter(|thread| thread.registered).count(),
            waiting: state.list.len() + state.refresh.len() + given.map(|given| given.work.len()).sum::<usize>(),
            delay: oldest.map_or(Duration::ZERO, |oldest| now.saturating_duration_since(oldest)),
            current: state.is_current(now),
            counts: state.counts,
        }
    }

    /// Begins the registration of a thread.
    ///
    /// # Errors
    /// ESRCH for a thread without an id, which is in another pid namespace than the mounter; EPROTO for another
    /// version; EUSERS if too many are registered.
    pub fn hello(&self, pid: u32, version: u32) -> Result<Hello> {
        if pid == 0 {
            return Err(Errno::SRCH);
        }
        if version != VERSION {
            return Err(Errno::PROTO);
        }
        let token = format!("{TOKEN_START}{:016x}{:08x}", random(), random() >> 32);
        let mut state = self.state.lock();
        let mut over = state.threads.iter().position(|thread| thread.pid == pid);
        if over.is_none() && state.threads.len() >= AGENT_THREADS {
            // One that only begins may be gone before it is registered: it gives way.
            over = Some(state.threads.iter().position(|thread| !thread.registered).ok_or(Errno::USERS)?);
        }
        let replaced = over.and_then(|at| state.remove(at));
        let (hidden, marker) = (phantom_of(state.phantom(), libc::S_IFDIR), state.phantom());
        let thread = Thread { pid, token: token.clone(), hidden, marker, registered: false, parked: None, given: None };
        state.threads.push(thread);
        self.known.store(state.threads.len(), Ordering::Relaxed);
        drop(state);
        drop(replaced);
        Ok(Hello { version: VERSION, token })
    }

    /// What a name in `parent` means to this thread. `root`: the root's nodeid.
    pub fn look(&self, pid: u32, root: u64, parent: u64, name: &[u8]) -> Look {
        let mut state = self.state.lock();
        let Ok(thread) = state.thread(pid) else { return Look::AsOthers };
        if parent == root && name == thread.token.as_bytes() {
            return Look::Phantom(thread.hidden);
        }
        if parent == thread.hidden && name == thruway_guest::protocol::MARKER.as_bytes() {
            return if thread.registered { Look::Phantom(thread.marker) } else { Look::Missing };
        }
        let hidden = thread.hidden;
        let work = thread.work().find(|work| work.is_at(parent, name) || work.leads_to(parent, name));
        match work {
            Some(work) => {
                work.asked |= work.is_at(parent, name);
                Look::Work(Box::new(work.clone()))
            }
            None if parent == hidden => Look::Missing,
            None => Look::AsOthers,
        }
    }

    /// The thread has made a name, which the guest does not know. `uid`: the thread's.
    pub fn make(&self, pid: u32, uid: u32, parent: u64, name: &[u8], directory: bool) -> Made {
        let mut state = self.state.lock();
        let now = (self.clock)();
        let Ok(thread) = state.thread(pid) else { return Made::Refused };
        if parent == thread.hidden && name == thruway_guest::protocol::MARKER.as_bytes() {
            if uid != 0 || thread.registered {
                return Made::Refused;
            }
            let marker = thread.marker;
            if state.threads.iter().all(|thread| !thread.registered) {
                // Nobody has told the guest what has changed since it has looked.
                state.start_over();
            }
            state.thread(pid).into_iter().for_each(|thread| thread.registered = true);
            state.asked = Some(now);
            return Made::Marker(marker);
        }
        let wanted = |work: &&mut Work| {
            let change = &work.change;
            let made = work.is_at(parent, name) && change.has(ops::CREATE) && change.has(ops::DIRECTORY) == directory;
            let moved = !directory && work.moves_file() && work.leads_to(parent, name);
            (made || moved) && !(work.created || work.given_up)
        };
        match thread.work().find(wanted) {
            Some(work) => {
                work.created = true;
                if work.aside == 0 { Made::Name(work.phantom) } else { Made::Back(work.aside) }
            }
            None => Made::Refused,
        }
    }

    /// The change of a new directory whose name is put aside by this one, and whether that is asked by its thread.
    pub fn aside(&self, pid: u32, parent: u64, name: &[u8]) -> Option<(Work, bool)> {
        if !name.starts_with(TOKEN_START.as_bytes()) {
            return None;
        }
        let (token, index) = std::str::from_utf8(name).ok()?.rsplit_once(ASIDE)?;
        let mut state = self.state.lock();
        let thread = state.threads.iter_mut().find(|thread| thread.token == token)?;
        let its_own = thread.pid == pid;
        let work = thread.work().nth(index.parse().ok()?)?;
        let wanted =
            work.change.has(ops::CREATE) && work.change.has(ops::DIRECTORY) && !(work.created || work.given_up);
        (wanted && work.change.place.dir == parent).then(|| (work.clone(), its_own))
    }

    /// The guest has this directory by another name until the thread makes the change's name.
    pub fn put_aside(&self, pid: u32, change: &Change, node: u64) {
        let mut state = self.state.lock();
        let Ok(thread) = state.thread(pid) else { return };
        thread.work().filter(|work| work.change == *change).for_each(|work| work.aside = node);
    }

    /// What the thread has to remove by this name. It may be what a move takes the name from, or replaces.
    pub fn removes(&self, pid: u32, parent: u64, name: &[u8], directory: bool) -> Option<Work> {
        let wanted = |work: &Work| {
            let (here, there) = (work.is_at(parent, name), work.leads_to(parent, name));
            let removed = here && work.change.has(ops::REMOVE) && work.change.has(ops::DIRECTORY) == directory;
            removed || !directory && work.moves_file() && (here || there)
        };
        self.find(pid, wanted)
    }

    /// What was at the new place of a move is removed.
    pub fn replaced(&self, pid: u32, parent: u64, name: &[u8]) {
        let mut state = self.state.lock();
        let Ok(thread) = state.thread(pid) else { return };
        thread.work().filter(|work| work.leads_to(parent, name)).for_each(|work| work.target = 0);
    }

    /// What the thread has to rename or exchange.
    pub fn moves(&self, pid: u32, (parent, name): (u64, &[u8]), (newparent, newname): (u64, &[u8])) -> Option<Work> {
        self.find(pid, |work| work.is_at(parent, name) && work.leads_to(newparent, newname))
    }

    /// What the thread has to do to a node.
    pub fn work_on(&self, pid: u32, node: u64, what: u16) -> Option<Work> {
        self.find(pid, |work| work.change.has(what) && (work.change.node == node || work.target == node))
    }

    fn find(&self, pid: u32, wanted: impl Fn(&Work) -> bool) -> Option<Work> {
        let mut state = self.state.lock();
        let mut work = state.thread(pid).ok()?.work();
        work.find(|work| !work.given_up && wanted(work)).map(|work| work.clone())
    }

    /// Whether this is the removal of the thread's marker.
    pub fn is_marker(&self, pid: u32, parent: u64, name: &[u8]) -> bool {
        let is = |thread: &mut Thread| {
            parent == thread.hidden && name == thruway_guest::protocol::MARKER.as_bytes() && thread.registered
        };
        self.state.lock().thread(pid).is_ok_and(is)
    }

    /// Whether this is the directory that only this thread sees.
    pub fn is_hidden(&self, pid: u32, node: u64) -> bool {
        self.state.lock().thread(pid).is_ok_and(|thread| thread.hidden == node)
    }

    /// A change did not hold any longer.
    pub fn give_up(&self, pid: u32, parent: u64, name: &[u8]) {
        let mut state = self.state.lock();
        let Ok(thread) = state.thread(pid) else { return };
        thread.work().filter(|work| work.is_at(parent, name)).for_each(|work| work.given_up = true);
    }

    /// The thread has found something at the place of a change. `file`: by what the watch knows it.
    ///
    /// # Errors
    /// ENOTCONN if it is not registered, EINVAL if it has no such change, or if the change is of another file.
    pub fn found(&self, pid: u32, found: Found, file: Option<FileId>) -> Result<()> {
        let mut state = self.state.lock();
        let thread = state.thread(pid)?;
        let work = thread.work().nth(found.index as usize).ok_or(Errno::INVAL)?;
        match found.node {
            0 => work.given_up = true,
            node if work.change.has(ops::RENAME) => work.target = node,
            node if work.change.node == 0 || work.file.is_some() && work.file == file => work.change.node = node,
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }

    /// The thread does not repeat the changes whose bits are set: nobody watches them.
    ///
    /// # Errors
    /// ENOTCONN if it is not registered.
    pub fn quiet(&self, pid: u32, bitmap: &[u8]) -> Result<()> {
        let mut state = self.state.lock();
        let bits = bitmap.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1));
        let quiet = state.thread(pid)?.work().zip(bits).filter(|(_, quiet)| *quiet);
        quiet.for_each(|(work, _)| work.given_up = true);
        Ok(())
    }

    /// Whether the thread may wait.
    ///
    /// # Errors
    /// Those of [`wait`](Self::wait).
    pub fn may_wait(&self, pid: u32) -> Result<()> {
        self.state.lock().waiter(pid).map(drop)
    }

    /// The thread has carried out a batch, and waits for the next. `stops`: its queue is to stop, so it gets an empty
    /// one. It is called when the thread waits already.
    ///
    /// # Errors
    /// ENOTCONN if it is not registered, EBUSY if it waits already. `answer` is dropped then.
    pub fn wait(self: &Arc<Self>, pid: u32, done: Done, answer: Answer, stops: impl FnOnce() -> bool) -> Result<()> {
        let now = (self.clock)();
        let mut state = self.state.lock();
        let thread = state.waiter(pid)?;
        thread.parked = Some(Parked { answer, until: now + Duration::from_millis(WAIT_MS.into()) });
        match thread.given.take() {
            Some(given) if given.id == done.batch => {
                let all = given.work.len() as u64;
                let failed = u64::from(done.failed).min(all);
                state.counts.repeated += all - failed;
                state.counts.failed += failed;
                if failed > 0 {
                    state.counts.errno = done.errno;
                }
            }
            // It acknowledges something else: it does all of it again.
            Some(given) => state.list.put_back(given.work, given.since),
            None => {}
        }
        state.asked = Some(now);
        let mut answers = state.hand_out(now);
        if stops() {
            answers.extend(state.release(|thread| thread.pid == pid));
        }
        self.start_timer(&mut state);
        drop(state);
        answers.into_iter().for_each(Ready::send);
        Ok(())
    }

    /// If changes were lost, the guest looks at all these nodes again. Changes of the time in which they are gathered
    /// are announced.
    pub fn look_again(&self, nodes: impl FnOnce() -> Vec<u64>) {
        let mut state = self.state.lock();
        if !state.lost {
            return;
        }
        (state.lost, state.gathers) = (false, true);
        drop(state);
        let nodes = nodes();
        let mut state = self.state.lock();
        state.gathers = false;
        if !state.lost {
            state.refresh = nodes;
        }
    }

    /// Changes that others made were lost, or may have been.
    pub fn lose(&self) {
        if !self.any() {
            return;
        }
        let mut state = self.state.lock();
        state.lose();
    }

    /// Others have made a change, of this `file`. [`hand_out`](Self::hand_out) follows.
    pub fn announce(&self, change: Change, file: Option<FileId>) {
        if !self.any() {
            return;
        }
        let now = (self.clock)();
        let mut state = self.state.lock();
        if state.lost {
            // The guest is going to look at everything.
            return;
        }
        if state.list.len() >= AGENT_CHANGES {
            Limit::AgentChanges.reached();
            state.lose();
            return;
        }
        state.list.add(change, file, now);
    }

    /// Gives what waits to the agent.
    pub fn hand_out(&self) {
        if self.any() {
            let answers = self.state.lock().hand_out((self.clock)());
            answers.into_iter().for_each(Ready::send);
        }
    }

    /// The guest has forgotten a node.
    pub fn forgot(&self, node: u64) {
        if !is_phantom(node) || !self.any() {
            return;
        }
        let mut state = self.state.lock();
        let at = state.threads.iter().position(|thread| thread.marker == node && thread.registered);
        let parked = at.and_then(|at| state.remove(at));
        self.known.store(state.threads.len(), Ordering::Relaxed);
        drop(state);
        drop(parked);
    }

    /// Answers all threads that wait: with nothing, unless there is something.
    pub fn release(&self) {
        if self.any() {
            let answers = self.state.lock().release(|_| true);
            answers.into_iter().for_each(Ready::send);
        }
    }

    /// The session is over.
    pub fn clear(&self) {
        let mut state = self.state.lock();
        self.known.store(0, Ordering::Relaxed);
        let threads = std::mem::take(&mut state.threads);
        state.start_over();
        drop(state);
        drop(threads);
    }

    /// Answers threads that have waited for long, while there are any.
    fn start_timer(self: &Arc<Self>, state: &mut State) {
        if state.timer {
            self.waits.notify_one();
            return;
        }
        let agents = Arc::downgrade(self);
        let thread = thread::Builder::new().name("thruway-agents".into());
        state.timer = thread.spawn(move || run_timer(&agents)).is_ok();
    }

    /// Answers the threads that have waited for long enough. Returns when the next has.
    fn expire(&self) -> Option<Instant> {
        let now = (self.clock)();
        let mut state = self.state.lock();
        let mut answers = state.hand_out(now);
        if state.threads.iter().any(|thread| thread.parked.is_some()) {
            state.asked = Some(now);
        }
        answers.extend(state.release(|thread| thread.parked.as_ref().is_some_and(|parked| parked.until <= now)));
        let parked = state.threads.iter().filter_map(|thread| thread.parked.as_ref()).map(|parked| parked.until);
        let given = state.threads.iter().filter_map(|thread| thread.given.as_ref()).map(|given| given.at + HELD_UP);
        // Only a thread that waits could go on.
        let next = parked.clone().chain(given.filter(|until| *until > now && parked.clone().next().is_some())).min();
        drop(state);
        answers.into_iter().for_each(Ready::send);
        next
    }
}

/// How long a thread may take for a batch before another one goes on with other directories: longer than a batch takes,
/// and short beside [`AGENT_PATIENCE`].
const HELD_UP: Duration = Duration::from_secs(1);

/// How long the timer waits at most before it looks whether its agents still exist, while no thread waits.
const LOOK: Duration = Duration::from_secs(60);

fn run_timer(agents: &Weak<Agents>) {
    loop {
        let Some(agents) = agents.upgrade() else { return };
        let next = agents.expire();
        let mut state = agents.state.lock();
        let until = next.unwrap_or_else(|| Instant::now() + LOOK);
        if next.is_none() && state.threads.is_empty() {
            state.timer = false;
            return;
        }
        agents.waits.wait_until(&mut state, until);
    }
}

fn random() -> u64 {
    RandomState::new().hash_one(0)
}

/// A batch, and who gets it.
struct Ready(Answer, Batch);

impl Ready {
    fn send(self) {
        (self.0)(self.1.encode());
    }
}

impl Thread {
    /// The changes that it carries out.
    fn work(&mut self) -> impl Iterator<Item = &mut Work> {
        self.given.iter_mut().flat_map(|given| &mut given.work)
    }
}

impl State {
    /// # Errors
    /// ENOTCONN if the thread is not known.
    fn thread(&mut self, pid: u32) -> Result<&mut Thread> {
        self.threads.iter_mut().find(|thread| thread.pid == pid).ok_or(Errno::NOTCONN)
    }

    /// A thread that may wait.
    fn waiter(&mut self, pid: u32) -> Result<&mut Thread> {
        match self.thread(pid)? {
            thread if !thread.registered => Err(Errno::NOTCONN),
            thread if thread.parked.is_some() => Err(Errno::BUSY),
            thread => Ok(thread),
        }
    }

    /// The number of a new phantom that is no directory, and has another after it.
    fn phantom(&mut self) -> u64 {
        self.next_phantom += 4;
        self.next_phantom - 4
    }

    /// Removes a thread. What it has not done is to be done by another. Returns its answer, to be dropped.
    fn remove(&mut self, at: usize) -> Option<Parked> {
        let thread = self.threads.swap_remove(at);
        if let Some(given) = thread.given {
            self.list.put_back(given.work, given.since);
        }
        if self.threads.is_empty() {
            // Nothing is announced any more.
            self.start_over();
        }
        thread.parked
    }

    /// The guest is to look at everything.
    fn start_over(&mut self) {
        self.lost = true;
        self.list = List::default();
        self.refresh = Vec::new();
    }

    fn lose(&mut self) {
        self.counts.lost += 1;
        self.start_over();
    }

    fn is_current(&self, now: Instant) -> bool {
        let in_time = |since: Instant| now.saturating_duration_since(since) < AGENT_PATIENCE;
        let waits = self.threads.iter().any(|thread| thread.parked.is_some());
        let registered = self.threads.iter().any(|thread| thread.registered);
        registered
            && !(self.lost || self.gathers)
            && self.refresh.is_empty()
            && (waits || self.asked.is_some_and(in_time))
            && self.list.oldest().into_iter().all(in_time)
            && self.threads.iter().filter_map(|thread| thread.given.as_ref()).all(|given| in_time(given.since))
    }

    /// Gives changes to threads that wait.
    fn hand_out(&mut self, now: Instant) -> Vec<Ready> {
        if self.lost {
            // Its next wait brings the nodes to look at.
            return self.release(|_| true);
        }
        let mut ready = Vec::new();
        for at in 0..self.threads.len() {
            // One thread works at a time, as long as nobody in the guest holds it up: that keeps the order.
            let given = self.threads.iter().filter_map(|thread| thread.given.as_ref());
            let works = given.clone().any(|given| now.saturating_duration_since(given.at) < HELD_UP);
            if self.threads[at].parked.is_none() || works {
                continue;
            }
            let batch = self.next_for(at, now);
            if !batch.changes.is_empty() {
                ready.extend(self.threads[at].parked.take().map(|parked| Ready(parked.answer, batch)));
                self.asked = Some(now);
            }
        }
        ready
    }

    /// Answers those threads that wait and are wanted.
    fn release(&mut self, wanted: impl Fn(&Thread) -> bool) -> Vec<Ready> {
        let all = self.threads.iter_mut().filter(|thread| wanted(thread));
        all.filter_map(|thread| thread.parked.take()).map(|parked| Ready(parked.answer, Batch::default())).collect()
    }

    /// The next batch for a thread. It is empty if there is nothing to do.
    fn next_for(&mut self, at: usize, now: Instant) -> Batch {
        let hidden = self.threads[at].hidden;
        let mut busy = HashSet::new();
        let given = self.threads.iter().filter_map(|thread| thread.given.as_ref()).flat_map(|given| &given.work);
        let moves = self.list.has_moves() || given.clone().any(|work| work.change.moves_directory());
        given.for_each(|work| busy.extend(list::ids(&work.change)));
        let mut room = MESSAGE - Batch::HEADER;
        let (mut changes, since) = self.list.take(&mut busy, &mut room);
        while room >= Change::default().encoded_len() {
            let Some(node) = self.refresh.pop() else { break };
            if busy.insert(node) {
                let change = Change { ops: ops::REFRESH, node, ..Change::default() };
                room -= change.encoded_len();
                changes.push((change, None, Other::default()));
            }
        }
        if changes.is_empty() {
            return Batch::default();
        }
        let id = self.next_batch;
        self.next_batch += 1;
        let mut work = Vec::new();
        for (change, file, other) in &changes {
            let within =
                |place: &Place| Place { dir: if place.dir == 0 { hidden } else { place.dir }, ..place.clone() };
            let change = Change { place: within(&change.place), to: within(&change.to), ..change.clone() };
            work.push(Work {
                change,
                file: *file,
                other: *other,
                created: false,
                phantom: self.phantom(),
                target: 0,
                asked: false,
                given_up: false,
                aside: 0,
            });
        }
        self.threads[at].given = Some(Given { id, at: now, since: since.unwrap_or(now), work });
        Batch { id, moves, changes: changes.into_iter().map(|(change, ..)| change).collect() }
    }
}
