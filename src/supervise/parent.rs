//! The process that was started, which waits for the supervisor and exits with its status. SIGUSR2 has it upgrade.
//!
//! An upgrade: the parent asks the program that is now at its path whether it understands this one. If it does, it
//! starts it once more, to join the sandbox and take over from the supervisor (`handover`). When that is done, it
//! becomes that program itself (execve(2)): its process ID stays.
//!
//! What comes from the sandbox may come from a worker that somebody else has taken over: workers share the supervisor's
//! descriptors. So the parent believes only what is there before the first worker is, and what comes by a channel of
//! which a worker has no end: the namespaces, and that another program has taken over.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio, exit};
use std::thread;
use std::time::{Duration, Instant};

use caps::CapSet;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, FdFlags, fcntl_setfd, read};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};
use rustix::time::Timespec;
use serde::{Deserialize, Serialize};

use super::handover;
use super::message::Message;
use crate::record;
use crate::sandbox::{self, Inside};

/// From the first supervisor: the sandbox's namespaces, and its process file system.
const NAMESPACES: u32 = 0x2_0000;
/// To a supervisor: the way to another program.
const UPGRADE: u32 = 0x2_0001;

/// What a program gets from the one of before.
const PASSED: &str = "THRUWAY_UPGRADE";
/// Where the program is.
const PROGRAM: &str = "THRUWAY_PROGRAM";

/// The option that has a program say what it understands.
const ASK: &str = "--print-upgrade";

/// How long a program may take to say what it understands, and to take over: a broken one must not hold up the parent
/// for good. With a million files it takes seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// The longest answer that is read.
const LONGEST: usize = 4096;

/// What a program understands, as it says itself.
#[derive(Debug, Serialize, Deserialize)]
struct Understood {
    version: String,
    handover: Vec<u32>,
    record: Vec<u32>,
}

/// The answer to --print-upgrade.
pub fn understood() -> String {
    let (handover, record) = (vec![handover::VERSION], vec![record::VERSION]);
    let all = Understood { version: env!("CARGO_PKG_VERSION").into(), handover, record };
    serde_json::to_string(&all).unwrap_or_default()
}

/// [`PASSED`], with numbers of descriptors and processes.
#[derive(Debug, Serialize, Deserialize)]
enum Passed {
    Successor {
        namespaces: Vec<RawFd>,
        proc: RawFd,
        channel: RawFd,
        supervisor: RawFd,
    },
    Parent {
        namespaces: Vec<RawFd>,
        proc: RawFd,
        channel: RawFd,
        supervisor: i32,
        retired: i32,
        locks: Vec<RawFd>,
        upgrades: u32,
    },
}

/// What this program is to do for the one of before.
#[derive(Debug)]
pub enum Handed {
    /// Take over from its supervisor, in its sandbox: the namespaces, the process file system, and the channel to the
    /// parent.
    Successor(Vec<OwnedFd>, OwnedFd, UnixStream, Successor),
    /// Be the parent.
    Parent(Parent),
}

/// The way to the supervisor that is to hand over.
#[derive(Debug)]
pub struct Successor(pub(super) UnixStream);

impl Handed {
    /// Of this program. `None`: it was started by nobody of before.
    ///
    /// # Errors
    /// If that is not understood.
    pub fn get() -> io::Result<Option<Self>> {
        let Ok(text) = std::env::var(PASSED) else { return Ok(None) };
        let take = |fd| {
            let fd = record::left_behind(fd).ok_or(Errno::BADF)?;
            fcntl_setfd(&fd, FdFlags::CLOEXEC)?;
            io::Result::Ok(fd)
        };
        let all = |fds: Vec<RawFd>| fds.into_iter().map(take).collect::<io::Result<_>>();
        Ok(Some(match serde_json::from_str(&text)? {
            Passed::Successor { namespaces, proc, channel, supervisor } => Self::Successor(
                all(namespaces)?,
                take(proc)?,
                take(channel)?.into(),
                Successor(take(supervisor)?.into()),
            ),
            Passed::Parent { namespaces, proc, channel, supervisor, retired, locks, upgrades } => {
                Self::Parent(Parent {
                    program: std::env::var_os(PROGRAM).ok_or(io::ErrorKind::InvalidData)?.into(),
                    supervisor: Pid::from_raw(supervisor).ok_or(io::ErrorKind::InvalidData)?,
                    retired: Pid::from_raw(retired),
                    channel: take(channel)?.into(),
                    sandbox: Some((all(namespaces)?, take(proc)?)),
                    locks: all(locks)?,
                    helper: None,
                    upgrades,
                })
            }
        }))
    }
}

/// To the parent, before there is a worker.
pub(super) fn send_namespaces(inside: &Inside, mut namespaces: Vec<OwnedFd>) -> io::Result<()> {
    namespaces.push(inside.proc.try_clone()?);
    Message::new(NAMESPACES, Vec::new(), namespaces).send(&inside.channel)
}

/// To the parent: its own end of the channel has the daemon now.
pub(super) fn tell(mut channel: &UnixStream) -> io::Result<()> {
    channel.write_all(&[0])
}

/// From the parent: the way to another program that is to take over, if this is what it says.
pub(super) fn successor(channel: &UnixStream) -> io::Result<Option<UnixStream>> {
    let message = Message::receive(channel)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok(message.fds.into_iter().next().filter(|_| message.request == UPGRADE).map(UnixStream::from))
}

/// What the parent waits for.
enum Event {
    /// The supervisor's end.
    End,
    /// That of the one before it.
    Retired,
    /// SIGUSR2.
    Asked,
}

/// The process that was started.
#[derive(Debug)]
pub struct Parent {
    /// Where the program is.
    program: PathBuf,
    supervisor: Pid,
    /// The supervisor of before. The sandbox's first process stays, and others end.
    retired: Option<Pid>,
    /// To the supervisor.
    channel: UnixStream,
    /// The namespaces, and the process file system.
    sandbox: Option<(Vec<OwnedFd>, OwnedFd)>,
    /// Files that are locked as long as the daemon runs.
    locks: Vec<OwnedFd>,
    /// The window process, which is a child of this one.
    helper: Option<Pid>,
    /// How many there were. `thruway upgrade` sees a change in /proc/PID/environ.
    upgrades: u32,
}

impl Parent {
    /// For the sandbox's first process.
    pub fn new(first: Pid, channel: UnixStream, locks: Vec<OwnedFd>, helper: Option<Pid>) -> Self {
        let sandbox = match Message::receive(&channel) {
            Ok(Some(message)) if message.request == NAMESPACES => {
                let mut namespaces = message.fds;
                namespaces.pop().map(|proc| (namespaces, proc))
            }
            // It has ended.
            _ => None,
        };
        Self { program: program(), supervisor: first, retired: None, channel, sandbox, locks, helper, upgrades: 0 }
    }

    /// Exits with the supervisor's status.
    pub fn watch(mut self) -> ! {
        // What is permitted stays: with no_new_privs, as systemd sets it, the next program gets no more than that, and
        // it takes CAP_SYS_ADMIN to join the sandbox.
        for set in [CapSet::Effective, CapSet::Inheritable] {
            if let Err(e) = caps::clear(None, set) {
                tracing::warn!("the waiting process keeps its capabilities: {e}");
            }
        }
        if let Some(helper) = self.helper {
            let kept = thread::Builder::new().name("thruway-helper".into()).spawn(move || keep_going(helper));
            kept.map_or_else(|e| tracing::warn!("nobody waits for the window process: {e}"), drop);
        }
        let hold_back = || sandbox::hold_back(libc::SIGUSR2).inspect_err(|e| tracing::warn!("no upgrades: {e}")).ok();
        let mut asked = hold_back();
        loop {
            match self.wait(asked.as_ref()) {
                Event::End => self.end(),
                Event::Retired => {
                    if let Some(retired) = self.retired.take() {
                        let _ = waitpid(Some(retired), WaitOptions::empty());
                    }
                }
                Event::Asked => {
                    if let Err(why) = self.upgrade() {
                        tracing::warn!("not upgraded, the daemon goes on: {why}");
                    }
                    // Until here the signal waits, which tells `thruway upgrade` that there is no end yet.
                    while asked.as_ref().is_some_and(|asked| read(asked, &mut [0; 128]).is_ok()) {}
                    // If it cannot become the program, it has let go of the signal.
                    asked = hold_back();
                }
            }
        }
    }

    fn wait(&self, asked: Option<&OwnedFd>) -> Event {
        let open = |pid| pidfd_open(pid, PidfdFlags::empty());
        let (Some(asked), Ok(end)) = (asked, open(self.supervisor)) else { return Event::End };
        let retired = self.retired.and_then(|pid| open(pid).ok());
        let fds = [end.as_fd(), retired.as_ref().unwrap_or(&end).as_fd(), asked.as_fd()];
        let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        while poll(&mut fds, None) == Err(Errno::INTR) {}
        match fds.map(|fd| !fd.revents().is_empty()) {
            [false, true, _] => Event::Retired,
            [false, _, true] => Event::Asked,
            _ => Event::End,
        }
    }

    /// Exits when the supervisor has ended, with its status.
    fn end(&self) -> ! {
        loop {
            match waitpid(Some(self.supervisor), WaitOptions::empty()) {
                Ok(Some((_, status))) => sandbox::exit_like(status),
                Ok(None) | Err(Errno::INTR) => {}
                Err(e) => {
                    tracing::error!("cannot wait for the sandboxed process: {e}");
                    exit(1)
                }
            }
        }
    }

    /// Does not return if all goes well.
    fn upgrade(&mut self) -> Result<(), String> {
        if self.helper.is_some() {
            return Err("it has a window, which another program cannot take over yet".into());
        }
        let (namespaces, proc) = self.sandbox.as_ref().ok_or("the sandbox is not known")?;
        let shown = self.program.display();
        let new = ask(&self.program).map_err(|e| format!("'{shown}' does not say what it understands: {e}"))?;
        if !new.handover.contains(&handover::VERSION) || !new.record.contains(&record::VERSION) {
            return Err(format!("'{shown}', version {}, does not understand this one's record", new.version));
        }
        let failed = |what: &'static str| move |e: io::Error| format!("cannot {what}: {e}");
        let pair = || UnixStream::pair().map_err(failed("create a socket pair"));
        let (to_successor, to_supervisor) = pair()?;
        let (mut channel, of_successor) = pair()?;
        channel.set_read_timeout(Some(PATIENCE)).map_err(failed("set a time limit"))?;
        let passed = Passed::Successor {
            namespaces: namespaces.iter().map(AsRawFd::as_raw_fd).collect(),
            proc: proc.as_raw_fd(),
            channel: of_successor.as_raw_fd(),
            supervisor: to_supervisor.as_raw_fd(),
        };
        let sockets = [of_successor.as_fd(), to_supervisor.as_fd()];
        let inherited = || namespaces.iter().chain([proc]).map(AsFd::as_fd).chain(sockets);
        inherited().try_for_each(|fd| fcntl_setfd(fd, FdFlags::empty())).map_err(|e| e.to_string())?;
        let started = self.command(&passed).spawn();
        let _ = inherited().try_for_each(|fd| fcntl_setfd(fd, FdFlags::CLOEXEC));
        let mut between = started.map_err(|e| format!("cannot run '{shown}': {e}"))?;
        drop((of_successor, to_supervisor));
        let successor = sandbox::told_pid(&mut channel);
        if successor.is_none() {
            let _ = between.kill();
        }
        let ended = between.wait().is_ok_and(|status| status.success());
        let successor = successor.filter(|_| ended).ok_or_else(|| format!("'{shown}' has not joined the sandbox"))?;
        let order = Message::new(UPGRADE, Vec::new(), vec![to_successor.into()]);
        // A supervisor that does not read must not hold up this process.
        let sent = self.channel.set_write_timeout(Some(PATIENCE)).and_then(|()| order.send(&self.channel));
        drop(order);
        if sent.is_err() || channel.read_exact(&mut [0]).is_err() {
            let _ = kill_process(successor, Signal::KILL);
            let _ = waitpid(Some(successor), WaitOptions::empty());
            return Err(format!("'{shown}', version {}, has not taken over", new.version));
        }
        self.retired = Some(std::mem::replace(&mut self.supervisor, successor));
        (self.channel, self.upgrades) = (channel, self.upgrades + 1);
        let e = self.become_it();
        tracing::warn!("upgraded, but the process that waits stays the old program: {e}");
        Ok(())
    }

    /// Returns only if it fails.
    fn become_it(&self) -> io::Error {
        let Some((namespaces, proc)) = &self.sandbox else { return io::ErrorKind::NotFound.into() };
        let passed = Passed::Parent {
            namespaces: namespaces.iter().map(AsRawFd::as_raw_fd).collect(),
            proc: proc.as_raw_fd(),
            channel: self.channel.as_raw_fd(),
            supervisor: self.supervisor.as_raw_nonzero().get(),
            retired: Pid::as_raw(self.retired),
            locks: self.locks.iter().map(AsRawFd::as_raw_fd).collect(),
            upgrades: self.upgrades,
        };
        let inherited =
            namespaces.iter().chain([proc]).chain(&self.locks).map(AsFd::as_fd).chain([self.channel.as_fd()]);
        for fd in inherited {
            if let Err(e) = fcntl_setfd(fd, FdFlags::empty()) {
                return e.into();
            }
        }
        // Until the program is ready, a signal would be lost. `thruway upgrade` sees that it does not wait.
        sandbox::let_go(libc::SIGUSR2);
        self.command(&passed).exec()
    }

    fn command(&self, passed: &Passed) -> Command {
        let mut command = Command::new(&self.program);
        command.args(std::env::args_os().skip(1)).env(PROGRAM, &self.program);
        command.env(PASSED, serde_json::to_string(passed).unwrap_or_default());
        command
    }
}

/// Waits for the end of the window process. Processes of the host may wait for it, so it must not stay stopped.
fn keep_going(helper: Pid) {
    loop {
        match waitpid(Some(helper), WaitOptions::UNTRACED) {
            Ok(Some((_, status))) if status.stopped() => drop(kill_process(helper, Signal::KILL)),
            Err(Errno::INTR) | Ok(None) => {}
            _ => return,
        }
    }
}

/// Where this program was started from. A link stays a link: another program may be behind it later.
fn program() -> PathBuf {
    let running = std::env::current_exe().unwrap_or_default();
    let is_it = |path: &Path| {
        let number = |path: &Path| path.metadata().ok().map(|meta| (meta.dev(), meta.ino()));
        number(path).is_some() && number(path) == number(Path::new("/proc/self/exe"))
    };
    let named: Option<OsString> = std::env::args_os().next();
    let named = named.map(PathBuf::from).filter(|named| named.components().count() > 1);
    named.and_then(|named| std::path::absolute(named).ok()).filter(|named| is_it(named)).unwrap_or(running)
}

/// Asks a program what it understands.
fn ask(program: &Path) -> io::Result<Understood> {
    let mut command = Command::new(program);
    command.arg(ASK).env_remove(PASSED).stdin(Stdio::null()).stderr(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let answer = answer(&mut child);
    if answer.is_err() {
        let _ = child.kill();
    }
    let status = child.wait()?;
    let answer = answer?;
    match status.success() {
        true => Ok(serde_json::from_slice(&answer)?),
        false => Err(io::Error::other("it fails")),
    }
}

fn answer(child: &mut Child) -> io::Result<Vec<u8>> {
    let mut pipe = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let (mut all, mut some, end) = (Vec::new(), [0; LONGEST], Instant::now() + PATIENCE);
    loop {
        let left = Timespec { tv_sec: end.saturating_duration_since(Instant::now()).as_secs() as i64, tv_nsec: 0 };
        match poll(&mut [PollFd::new(&pipe, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => continue,
            ready if ready? == 0 => return Err(io::ErrorKind::TimedOut.into()),
            _ => {}
        }
        match pipe.read(&mut some)? {
            0 => return Ok(all),
            more if all.len() + more > LONGEST => return Err(io::ErrorKind::FileTooLarge.into()),
            more => all.extend(&some[..more]),
        }
    }
}
