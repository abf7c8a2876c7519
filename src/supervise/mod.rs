//! `--supervise`: a process that outlives the one that serves.
//!
//! The *supervisor* has the listening socket and the frontend's connection. It passes the frontend's messages to a
//! *worker* process, which does everything else, and notes what they settle. It never touches the guest's memory. If a
//! worker dies, the supervisor starts another, tells it what the frontend has settled, and lets it go on with what the
//! dead one has left in the [`Record`].
//!
//! Both processes share one table of descriptors, so what the dead worker had open is still open. Rule: the supervisor
//! keeps its own descriptors (`Supervisor::own`), a worker never closes those, and when a worker has died, the
//! supervisor closes all that neither it nor the record names.
//!
//! The *parent* is the process outside of the sandbox that was started. It can have another program take the
//! supervisor's place (`parent`, `handover`).

mod channel;
mod handover;
mod message;
mod parent;
mod settled;

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::exit;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, pause, poll};
use rustix::fs::{Dir, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::process::{
    DumpableBehavior, Pid, Signal, WaitOptions, WaitStatus, getpid, pidfd_send_signal, set_dumpable_behavior,
    set_parent_process_death_signal, waitpid,
};

use crate::record::{self, LeftAs, RINGS, Record};
use crate::sandbox::{self, Inside};
use crate::window::proxy::Proxy;
use channel::Channel;
use handover::Estate;
use message::Message;
pub use parent::{Handed, Parent, Successor, understood};
use settled::Settled;

/// Workers that died one after the other, each soon after its start and without an answer to any request. Then the
/// supervisor gives up: the next one would probably die too.
const FRUITLESS: u32 = 5;

/// What "soon" means: a request that kills its worker does so at once.
const SOON: Duration = Duration::from_secs(10);

/// What a worker process has of its own.
#[derive(Debug)]
pub struct Worker {
    /// Where the supervisor connects.
    pub listener: UnixListener,
    /// The shared directory, O_PATH.
    pub root: OwnedFd,
    /// Its /proc/self/fd, O_PATH.
    pub proc_self_fd: OwnedFd,
    /// Where the control socket's clients connect.
    pub control: Option<UnixListener>,
    /// Its end of the window process.
    pub proxy: Option<Proxy>,
}

/// Supervises workers. Returns in each worker process. The calling process exits when the last worker has ended, with
/// its status. `namespaces`: those of the sandbox, for the parent.
///
/// # Errors
/// Those of making a process or a socket, at the first start.
pub fn start(
    inside: Inside,
    namespaces: Vec<OwnedFd>,
    listener: UnixListener,
    control: Option<UnixListener>,
    proxy: Option<Proxy>,
    keep_alive: bool,
) -> io::Result<Worker> {
    // The worker has a way to /proc/1/mem of the sandbox, and may not use it.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    // Nobody but this process has the channel yet, so the parent may believe what comes.
    parent::send_namespaces(&inside, namespaces)?;
    let record: &'static Record = Box::leak(Box::new(Record::new()?));
    let own = descriptors(&inside.proc)?;
    let (settled, pending) = Default::default();
    let version = env!("CARGO_PKG_VERSION").into();
    let estate = Estate { version, workers: 0, stopped: 0, listener, control, frontend: None, settled, pending };
    let mut supervisor = Supervisor::new(own, inside, keep_alive, record, estate);
    supervisor.proxy = proxy;
    match supervisor.hire()? {
        Hired::Worker(worker) => {
            // What the supervisor has stays open.
            std::mem::forget(supervisor);
            Ok(worker)
        }
        Hired::Supervisor(process) => supervisor.run(process),
    }
}

/// Takes over from the supervisor of another program. Otherwise as [`start`]. `check`: says whether this program can go
/// on with a session ([`Record::session`]). It is called in a process of its own, and gets what a worker gets.
///
/// # Errors
/// If it cannot. The supervisor goes on then.
pub fn take_over(
    inside: Inside,
    Successor(supervisor): Successor,
    keep_alive: bool,
    check: impl FnOnce(OwnedFd, OwnedFd, Option<(u64, u32)>) -> bool,
) -> io::Result<Worker> {
    let step = handover::step;
    step("joined");
    let record = handover::greet(&supervisor)?;
    step("greeted");
    try_out(&inside, || {
        let (root, proc_self_fd) = worker_files(&inside)?;
        Ok(check(root, proc_self_fd, record.session()))
    })?;
    step("checked");
    let named = handover::ready(&supervisor, &record)?;
    let away = |fd: OwnedFd| handover::out_of_the_way(fd, &named);
    let Inside { root, proc, channel } = inside;
    let (supervisor, channel) = (UnixStream::from(away(supervisor.into())?), UnixStream::from(away(channel.into())?));
    let inside = Inside { root: away(root)?, proc: away(proc)?, channel };
    let record: &'static Record = Box::leak(Box::new(record.with_file(away)?));
    let mut own = descriptors(&inside.proc)?;
    handover::check_numbers(&own, &named)?;
    own.remove(&supervisor.as_raw_fd());
    let estate = handover::take(&supervisor, &named, &inside.root)?;
    own.extend([estate.listener.as_raw_fd()].into_iter().chain(estate.control.iter().map(AsRawFd::as_raw_fd)));
    handover::done(&supervisor)?;
    // From here on this process is the daemon: if it ends, all ends.
    parent::tell(&inside.channel)?;
    handover::told(&supervisor);
    drop(supervisor);
    let (old, stopped) = (estate.version.clone(), estate.stopped);
    let mut supervisor = Supervisor::new(own, inside, keep_alive, record, estate);
    let mut process = match supervisor.hire()? {
        Hired::Worker(worker) => {
            std::mem::forget(supervisor);
            return Ok(worker);
        }
        Hired::Supervisor(process) => process,
    };
    supervisor.resume_if_used(&mut process);
    let (new, waited) = (env!("CARGO_PKG_VERSION"), Duration::from_nanos(handover::now().saturating_sub(stopped)));
    tracing::info!("upgraded from version {old} to {new}: requests waited for {:.1} ms", waited.as_secs_f64() * 1e3);
    supervisor.run(process)
}

/// Runs something in a process of its own.
///
/// # Errors
/// If it has not returned true.
fn try_out(inside: &Inside, what: impl FnOnce() -> io::Result<bool>) -> io::Result<()> {
    match record::clone(list(&inside.proc, "self/task")?, false)? {
        None => {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            exit(what().map_or(1, |can| i32::from(!can)))
        }
        Some((pid, _)) => match waitpid(Some(pid), WaitOptions::empty())? {
            Some((_, status)) if status.exit_status() == Some(0) => Ok(()),
            _ => Err(io::Error::other("this program cannot go on with the session")),
        },
    }
}

/// For a worker process: the shared directory, and its own descriptors.
fn worker_files(inside: &Inside) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok((inside.root.try_clone()?, openat(&inside.proc, "self/fd", flags, Mode::empty())?))
}

fn list(proc: &OwnedFd, path: &str) -> io::Result<Dir> {
    Ok(Dir::new(openat(proc, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)?)
}

/// All descriptors of this process.
fn descriptors(proc: &OwnedFd) -> io::Result<BTreeSet<RawFd>> {
    let number = |name: &std::ffi::CStr| name.to_str().ok()?.parse().ok();
    let list = list(proc, "self/fd")?;
    let own = list.fd()?.as_raw_fd();
    Ok(list.filter_map(|entry| number(entry.ok()?.file_name())).filter(|fd| *fd != own).collect())
}

/// A worker process, as the supervisor sees it.
struct Process {
    pid: Pid,
    pidfd: OwnedFd,
    address: SocketAddr,
    /// The supervisor's end of the connection, while there is a frontend.
    connection: Option<UnixStream>,
    started: Instant,
    /// Requests that were answered before it started.
    served: u64,
}

/// In which process [`Supervisor::hire`] returned.
enum Hired {
    Worker(Worker),
    Supervisor(Process),
}

/// What the supervisor waits for.
enum Event {
    /// A frontend connects, or has sent something.
    Frontend,
    /// The worker has sent something.
    Reply,
    /// The worker asks something of the frontend.
    Request,
    /// The frontend has replied to that.
    FrontendReply,
    /// The worker has ended.
    End,
    /// The parent has another program for this one's place.
    Upgrade,
    /// That program has sent something.
    Successor,
}

struct Supervisor {
    /// Descriptors that were open before there was a worker.
    own: BTreeSet<RawFd>,
    inside: Inside,
    keep_alive: bool,
    record: &'static Record,
    fruitless: u32,
    /// What is left to a successor. `pending`: the message that the worker has got last. It may not have done what the
    /// message says. `stopped`: 0 unless the worker is stopped for a successor.
    estate: Estate,
    /// The window process, which outlives workers.
    proxy: Option<Proxy>,
    /// The workers' requests to the frontend.
    channel: Channel,
    successor: Option<UnixStream>,
    /// Whether the parent may say something.
    has_parent: bool,
}

impl Supervisor {
    fn new(own: BTreeSet<RawFd>, inside: Inside, keep_alive: bool, record: &'static Record, estate: Estate) -> Self {
        let estate = Estate { version: env!("CARGO_PKG_VERSION").into(), stopped: 0, ..estate };
        let (proxy, channel) = (None, Channel::default());
        Self {
            own,
            inside,
            keep_alive,
            record,
            fruitless: 0,
            estate,
            proxy,
            channel,
            successor: None,
            has_parent: true,
        }
    }

    /// Starts a worker.
    fn hire(&mut self) -> io::Result<Hired> {
        self.estate.workers += 1;
        let name = format!("thruway-worker-{}", self.estate.workers);
        let address = SocketAddr::from_abstract_name(name)?;
        // A new one for each: nobody but the supervisor is in the sandbox's network namespace.
        let listener = UnixListener::bind_addr(&address)?;
        match record::clone(list(&self.inside.proc, "self/task")?, true)? {
            Some((pid, pidfd)) => {
                // It is the worker's now.
                std::mem::forget(listener);
                let (started, served) = (Instant::now(), self.served());
                Ok(Hired::Supervisor(Process { pid, pidfd, address, connection: None, started, served }))
            }
            None => self.work(listener).map(Hired::Worker),
        }
    }

    /// In a worker process.
    fn work(&self, listener: UnixListener) -> io::Result<Worker> {
        // The sandbox ends with the supervisor, so this is for a debugger that takes the supervisor away.
        set_parent_process_death_signal(Some(Signal::KILL))?;
        set_dumpable_behavior(DumpableBehavior::Dumpable)?;
        self.record.install();
        let (root, proc_self_fd) = worker_files(&self.inside)?;
        let control = self.estate.control.as_ref().map(UnixListener::try_clone).transpose()?;
        let proxy = self.proxy.as_ref().map(Proxy::try_clone).transpose()?;
        proxy.iter().for_each(Proxy::greet);
        Ok(Worker { listener, root, proc_self_fd, control, proxy })
    }

    /// Requests that were answered.
    fn served(&self) -> u64 {
        (0..RINGS).fold(0, |sum, ring| self.record.ring(ring).served().wrapping_add(sum))
    }

    fn run(mut self, mut process: Process) -> io::Result<Worker> {
        loop {
            match self.wait(&process)? {
                Event::End => {
                    if let Some(worker) = self.ended(&mut process)? {
                        std::mem::forget((self, process));
                        return Ok(worker);
                    }
                }
                Event::Frontend if self.estate.frontend.is_none() => self.accept(&mut process)?,
                Event::Frontend => self.forward(&mut process)?,
                Event::Reply => self.answer(&mut process)?,
                Event::Request => self.channel.ask(),
                Event::FrontendReply => self.channel.reply(),
                Event::Upgrade => self.meet_successor(),
                Event::Successor => self.hear_successor(&process),
            }
        }
    }

    fn wait(&self, process: &Process) -> io::Result<Event> {
        loop {
            let asked = self.estate.frontend.as_ref().map_or(self.estate.listener.as_fd(), AsFd::as_fd);
            let end = process.pidfd.as_fd();
            let reply = process.connection.as_ref().map_or(end, AsFd::as_fd);
            let successor = self.successor.as_ref().filter(|_| self.estate.stopped == 0).map_or(end, AsFd::as_fd);
            let parent = if self.has_parent { self.inside.channel.as_fd() } else { end };
            let [request, answer] = self.channel.ends().map(|fd| fd.unwrap_or(end));
            let fds = [end, reply, asked, parent, successor, request, answer];
            let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            match poll(&mut fds, None) {
                Err(Errno::INTR) => continue,
                ready => ready?,
            };
            let ready = fds.map(|fd| !fd.revents().is_empty());
            match ready {
                // What it has sent before its end counts.
                [_, true, ..] if process.connection.is_some() => return Ok(Event::Reply),
                [true, ..] => return Ok(Event::End),
                [.., true] => return Ok(Event::FrontendReply),
                [.., true, _] => return Ok(Event::Request),
                [.., true, _, _] => return Ok(Event::Successor),
                [_, _, _, true, ..] => return Ok(Event::Upgrade),
                [_, _, true, ..] => return Ok(Event::Frontend),
                _ => {}
            }
        }
    }

    /// Another program wants to take over.
    fn meet_successor(&mut self) {
        let met = parent::successor(&self.inside.channel);
        // Otherwise the parent has ended, and this process is about to: or a worker has closed what it may not.
        self.has_parent = met.is_ok();
        let Some(successor) = met.ok().flatten() else { return };
        match handover::offer(&successor, self.record) {
            Ok(()) => self.successor = Some(successor),
            Err(e) => tracing::warn!("another program cannot take over: {e}"),
        }
    }

    fn hear_successor(&mut self, process: &Process) {
        match self.successor.as_ref().map(Message::receive) {
            Some(Ok(Some(message))) if message.request == handover::READY => {
                let starts = |message: &Message| message.request == message::SET_DEVICE_STATE_FD;
                if self.estate.settled.migrates() || self.estate.pending.as_ref().is_some_and(starts) {
                    tracing::warn!("the guest migrates, which an upgrade would break: ask for it again later");
                    self.successor = None;
                    return;
                }
                self.estate.stopped = handover::now();
                let _ = pidfd_send_signal(&process.pidfd, Signal::KILL);
            }
            // It has said why.
            _ => self.successor = None,
        }
    }

    /// Hands over to a successor, if the worker was stopped for it. Returns if there is none, or if that fails.
    fn retire(&mut self) {
        if self.estate.stopped == 0 {
            return;
        }
        let given = self.successor.take().map(|successor| {
            handover::give(&successor, &self.estate, self.record)?;
            io::Result::Ok(successor)
        });
        self.estate.stopped = 0;
        match given {
            Some(Ok(successor)) => self.end(&successor),
            Some(Err(e)) => tracing::warn!("another program has not taken over: {e}: this one goes on"),
            None => {}
        }
    }

    /// The successor has everything.
    fn end(&self, successor: &UnixStream) -> ! {
        for fd in descriptors(&self.inside.proc).unwrap_or_default() {
            if fd > libc::STDERR_FILENO && fd != successor.as_raw_fd() {
                drop(record::left_behind(fd));
            }
        }
        if handover::leave(successor).is_err() {
            exit(1);
        }
        drop(record::left_behind(successor.as_raw_fd()));
        if getpid() != Pid::INIT {
            exit(0);
        }
        // The sandbox ends with its first process, which is this one, and which gets the children of dead processes.
        sandbox::reap_children();
        loop {
            pause();
        }
    }

    fn accept(&mut self, process: &mut Process) -> io::Result<()> {
        let frontend = match self.estate.listener.accept() {
            Ok((frontend, _)) => frontend,
            Err(e) => {
                tracing::warn!("cannot accept a frontend: {e}, trying again");
                std::thread::sleep(crate::limits::ACCEPT_PAUSE);
                return Ok(());
            }
        };
        process.connection = Some(UnixStream::connect_addr(&process.address)?);
        self.estate.frontend = Some(frontend);
        Ok(())
    }

    /// Passes on what the frontend says.
    fn forward(&mut self, process: &mut Process) -> io::Result<()> {
        let received = self.estate.frontend.as_ref().map(Message::receive).transpose();
        let Ok(Some(Some(message))) = received else {
            self.hang_up(process);
            return Ok(());
        };
        // The frontend goes on, so the one before is done.
        if let Some(before) = self.estate.pending.take() {
            self.estate.settled.note(before, None);
        }
        // If this fails, the worker is dead, and the next one gets the message.
        let _ = process.connection.as_ref().map(|worker| pass(&mut self.channel, &message, worker));
        self.estate.pending = Some(message);
        Ok(())
    }

    /// Passes on what the worker answers.
    fn answer(&mut self, process: &mut Process) -> io::Result<()> {
        let received = process.connection.as_ref().map(Message::receive).transpose();
        let Ok(Some(Some(reply))) = received else {
            // It has ended the connection, or itself.
            process.connection = None;
            if !self.is_dead(process) {
                self.hang_up(process);
            }
            return Ok(());
        };
        if let Some(message) = self.estate.pending.take_if(|message| message.request == reply.request) {
            self.estate.settled.note(message, Some(&reply));
        }
        if self.estate.frontend.as_ref().is_some_and(|frontend| reply.send(frontend).is_err()) {
            self.hang_up(process);
        }
        Ok(())
    }

    fn is_dead(&self, process: &Process) -> bool {
        let mut fds = [PollFd::new(&process.pidfd, PollFlags::IN)];
        poll(&mut fds, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
    }

    /// The frontend is gone, or is to be.
    fn hang_up(&mut self, process: &mut Process) {
        process.connection = None;
        (self.estate.frontend, self.estate.pending) = (None, None);
        self.channel = Channel::default();
        self.estate.settled = Settled::default();
        if !self.keep_alive {
            // The worker ends then.
            let status = waitpid(Some(process.pid), WaitOptions::empty()).ok().flatten();
            exit(status.map_or(1, |(_, status)| code(status)));
        }
    }

    /// A worker has ended. Returns in the next one.
    fn ended(&mut self, process: &mut Process) -> io::Result<Option<Worker>> {
        let Some((_, status)) = waitpid(Some(process.pid), WaitOptions::empty())? else { return Ok(None) };
        let Some(signal) = status.terminating_signal() else { exit(code(status)) };
        let is_meant = self.estate.stopped != 0 && signal == libc::SIGKILL;
        let soon = process.started.elapsed() < SOON && !is_meant;
        self.fruitless = if soon && self.served() == process.served { self.fruitless + 1 } else { 0 };
        if self.fruitless == FRUITLESS {
            tracing::error!(
                "{FRUITLESS} processes that serve were killed one after the other, the last by signal {signal}"
            );
            exit(code(status));
        }
        if !is_meant {
            tracing::warn!("the process that serves was killed by signal {signal}: another one goes on");
        }
        process.connection = None;
        self.channel.abandon();
        let suspect = soon && signal != libc::SIGKILL && signal != libc::SIGTERM;
        for index in 0..RINGS {
            let ring = self.record.ring(index);
            ring.leave(match self.estate.settled.is_running(index) {
                true if suspect => LeftAs::Suspect,
                true => LeftAs::Running,
                false => LeftAs::Stopped,
            });
            if self.estate.frontend.is_none() {
                ring.clear();
            }
        }
        if self.estate.frontend.is_none() || self.record.session().is_none() {
            self.record.wipe(self.estate.frontend.is_some());
        }
        self.close_the_rest(process)?;
        self.retire();
        *process = match self.hire()? {
            Hired::Worker(worker) => return Ok(Some(worker)),
            Hired::Supervisor(process) => process,
        };
        self.resume_if_used(process);
        Ok(None)
    }

    /// Has a new worker go on for the frontend, if there is one.
    fn resume_if_used(&mut self, process: &mut Process) {
        if self.estate.frontend.is_some() {
            if let Err(e) = self.resume(process) {
                // If it is dead, its end is the next event.
                tracing::debug!("the next one does not listen: {e}");
                process.connection = None;
            }
        }
    }

    /// Tells a new worker what the frontend has settled, and what it said last.
    fn resume(&mut self, process: &mut Process) -> io::Result<()> {
        let connection = UnixStream::connect_addr(&process.address)?;
        let theirs = self.estate.settled.channel().map(|fd| self.channel.open(fd)).transpose()?;
        self.estate.settled.tell(&connection, theirs, || {
            let mut fds =
                [connection.as_fd(), process.pidfd.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            while poll(&mut fds, None) == Err(Errno::INTR) {}
            let came = if fds[0].revents().is_empty() { None } else { Message::receive(&connection)? };
            came.ok_or_else(|| io::ErrorKind::ConnectionAborted.into())
        })?;
        if let Some(pending) = &self.estate.pending {
            pass(&mut self.channel, pending, &connection)?;
        }
        process.connection = Some(connection);
        Ok(())
    }

    /// Closes what the dead worker had open, unless the record names it.
    fn close_the_rest(&self, process: &Process) -> io::Result<()> {
        let own = [self.estate.listener.as_raw_fd(), process.pidfd.as_raw_fd()];
        let sockets = [&self.estate.frontend, &self.successor].into_iter().flatten().map(AsRawFd::as_raw_fd);
        let pending = self.estate.pending.iter().flat_map(|message| &message.fds).map(AsRawFd::as_raw_fd);
        let mut kept: BTreeSet<RawFd> = self.record.descriptors().into_iter().collect();
        kept.extend(own.into_iter().chain(sockets).chain(pending).chain(self.estate.settled.descriptors()));
        kept.extend(self.channel.descriptors());
        for fd in descriptors(&self.inside.proc)? {
            if !kept.contains(&fd) && !self.own.contains(&fd) {
                drop(record::left_behind(fd));
            }
        }
        Ok(())
    }
}

/// Passes a message of the frontend's on to a worker. A channel for requests to the frontend stays here.
fn pass(channel: &mut Channel, message: &Message, worker: &UnixStream) -> io::Result<()> {
    match message.fds.first() {
        Some(fd) if message.request == message::SET_BACKEND_REQ_FD => message.with(channel.connect(fd)?).send(worker),
        _ => message.send(worker),
    }
}

/// The status to exit with.
fn code(status: WaitStatus) -> i32 {
    status.exit_status().unwrap_or_else(|| 128 + status.terminating_signal().unwrap_or_default())
}
