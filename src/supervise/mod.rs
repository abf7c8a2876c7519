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

mod message;
mod settled;

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::exit;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Dir, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::process::{
    DumpableBehavior, Pid, Signal, WaitOptions, WaitStatus, set_dumpable_behavior, set_parent_process_death_signal,
    waitpid,
};

use crate::record::{self, LeftAs, RINGS, Record};
use message::Message;
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
}

/// What the supervisor gives to each worker process.
#[derive(Debug)]
pub struct Shared {
    /// The shared directory, O_PATH.
    pub root: OwnedFd,
    /// The root of a process file system of the sandbox's own, O_PATH.
    pub proc: OwnedFd,
    /// Where the control socket's clients connect.
    pub control: Option<UnixListener>,
}

/// Supervises workers. Returns in each worker process. The calling process exits when the last worker has ended, with
/// its status.
///
/// # Errors
/// Those of making a process or a socket, at the first start.
pub fn start(listener: UnixListener, shared: Shared, keep_alive: bool) -> io::Result<Worker> {
    // The worker has a way to /proc/1/mem of the sandbox, and may not use it.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let record: &'static Record = Box::leak(Box::new(Record::new()?));
    let own = descriptors(&shared.proc)?;
    let mut supervisor = Supervisor {
        own,
        listener,
        shared,
        keep_alive,
        record,
        workers: 0,
        fruitless: 0,
        frontend: None,
        settled: Settled::default(),
        pending: None,
    };
    match supervisor.hire()? {
        Hired::Worker(worker) => {
            // What the supervisor has stays open.
            std::mem::forget(supervisor);
            Ok(worker)
        }
        Hired::Supervisor(process) => supervisor.run(process),
    }
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
    /// The worker has ended.
    End,
}

struct Supervisor {
    /// Descriptors that were open before there was a worker.
    own: BTreeSet<RawFd>,
    listener: UnixListener,
    shared: Shared,
    keep_alive: bool,
    record: &'static Record,
    /// Workers so far.
    workers: u32,
    fruitless: u32,
    frontend: Option<UnixStream>,
    settled: Settled,
    /// The message that the worker has got last. It may not have done what the message says.
    pending: Option<Message>,
}

impl Supervisor {
    /// Starts a worker.
    fn hire(&mut self) -> io::Result<Hired> {
        self.workers += 1;
        let name = format!("thruway-worker-{}", self.workers);
        let address = SocketAddr::from_abstract_name(name)?;
        // A new one for each: nobody but the supervisor is in the sandbox's network namespace.
        let listener = UnixListener::bind_addr(&address)?;
        match record::clone_files(list(&self.shared.proc, "self/task")?)? {
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
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Worker {
            listener,
            root: self.shared.root.try_clone()?,
            proc_self_fd: openat(&self.shared.proc, "self/fd", flags, Mode::empty())?,
            control: self.shared.control.as_ref().map(UnixListener::try_clone).transpose()?,
        })
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
                Event::Frontend if self.frontend.is_none() => self.accept(&mut process)?,
                Event::Frontend => self.forward(&mut process)?,
                Event::Reply => self.answer(&mut process)?,
            }
        }
    }

    fn wait(&self, process: &Process) -> io::Result<Event> {
        loop {
            let asked = self.frontend.as_ref().map_or(self.listener.as_fd(), AsFd::as_fd);
            let reply = process.connection.as_ref().map_or(process.pidfd.as_fd(), AsFd::as_fd);
            let mut fds = [process.pidfd.as_fd(), reply, asked].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            match poll(&mut fds, None) {
                Err(Errno::INTR) => continue,
                ready => ready?,
            };
            let ready = fds.map(|fd| !fd.revents().is_empty());
            match ready {
                // What it has sent before its end counts.
                [_, true, _] if process.connection.is_some() => return Ok(Event::Reply),
                [true, ..] => return Ok(Event::End),
                [_, _, true] => return Ok(Event::Frontend),
                _ => {}
            }
        }
    }

    fn accept(&mut self, process: &mut Process) -> io::Result<()> {
        let frontend = match self.listener.accept() {
            Ok((frontend, _)) => frontend,
            Err(e) => {
                tracing::warn!("cannot accept a frontend: {e}, trying again");
                std::thread::sleep(crate::limits::ACCEPT_PAUSE);
                return Ok(());
            }
        };
        process.connection = Some(UnixStream::connect_addr(&process.address)?);
        self.frontend = Some(frontend);
        Ok(())
    }

    /// Passes on what the frontend says.
    fn forward(&mut self, process: &mut Process) -> io::Result<()> {
        let received = self.frontend.as_ref().map(Message::receive).transpose();
        let Ok(Some(Some(message))) = received else {
            self.hang_up(process);
            return Ok(());
        };
        // The frontend goes on, so the one before is done.
        if let Some(before) = self.pending.take() {
            self.settled.note(before, None);
        }
        // If this fails, the worker is dead, and the next one gets the message.
        let _ = process.connection.as_ref().map(|worker| message.send(worker));
        self.pending = Some(message);
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
        if let Some(message) = self.pending.take_if(|message| message.request == reply.request) {
            self.settled.note(message, Some(&reply));
        }
        if self.frontend.as_ref().is_some_and(|frontend| reply.send(frontend).is_err()) {
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
        (self.frontend, self.pending) = (None, None);
        self.settled = Settled::default();
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
        let soon = process.started.elapsed() < SOON;
        self.fruitless = if soon && self.served() == process.served { self.fruitless + 1 } else { 0 };
        if self.fruitless == FRUITLESS {
            tracing::error!(
                "{FRUITLESS} processes that serve were killed one after the other, the last by signal {signal}"
            );
            exit(code(status));
        }
        tracing::warn!("the process that serves was killed by signal {signal}: another one goes on");
        process.connection = None;
        let suspect = soon && signal != libc::SIGKILL && signal != libc::SIGTERM;
        for index in 0..RINGS {
            let ring = self.record.ring(index);
            ring.leave(match self.settled.is_running(index) {
                true if suspect => LeftAs::Suspect,
                true => LeftAs::Running,
                false => LeftAs::Stopped,
            });
            if self.frontend.is_none() {
                ring.clear();
            }
        }
        if self.frontend.is_none() || self.record.session().is_none() {
            self.record.wipe();
        }
        self.close_the_rest(process)?;
        *process = match self.hire()? {
            Hired::Worker(worker) => return Ok(Some(worker)),
            Hired::Supervisor(process) => process,
        };
        if self.frontend.is_some() {
            if let Err(e) = self.resume(process) {
                // If it is dead, its end is the next event.
                tracing::debug!("the next one does not listen: {e}");
                process.connection = None;
            }
        }
        Ok(None)
    }

    /// Tells a new worker what the frontend has settled, and what it said last.
    fn resume(&mut self, process: &mut Process) -> io::Result<()> {
        let connection = UnixStream::connect_addr(&process.address)?;
        self.settled.tell(&connection, || {
            let mut fds =
                [connection.as_fd(), process.pidfd.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            while poll(&mut fds, None) == Err(Errno::INTR) {}
            let came = if fds[0].revents().is_empty() { None } else { Message::receive(&connection)? };
            came.ok_or_else(|| io::ErrorKind::ConnectionAborted.into())
        })?;
        if let Some(pending) = &self.pending {
            pending.send(&connection)?;
        }
        process.connection = Some(connection);
        Ok(())
    }

    /// Closes what the dead worker had open, unless the record names it.
    fn close_the_rest(&self, process: &Process) -> io::Result<()> {
        let own = [self.listener.as_raw_fd(), process.pidfd.as_raw_fd()];
        let frontend = self.frontend.iter().map(AsRawFd::as_raw_fd);
        let pending = self.pending.iter().flat_map(|message| &message.fds).map(AsRawFd::as_raw_fd);
        let mut kept: BTreeSet<RawFd> = self.record.descriptors().into_iter().collect();
        kept.extend(own.into_iter().chain(frontend).chain(pending).chain(self.settled.descriptors()));
        for fd in descriptors(&self.shared.proc)? {
            if !kept.contains(&fd) && !self.own.contains(&fd) {
                drop(record::left_behind(fd));
            }
        }
        Ok(())
    }
}

/// The status to exit with.
fn code(status: WaitStatus) -> i32 {
    status.exit_status().unwrap_or_else(|| 128 + status.terminating_signal().unwrap_or_default())
}
