//! How a supervisor hands everything over to that of another program, its *successor*: what each says to the other.
//!
//! Nothing is given up before the successor has everything: until [`YOURS`] the supervisor can go on with a worker of
//! its own. Each descriptor that the record names gets the same number in the successor, so the record stays as it is.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Signal, getpid, kill_process};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::message::{MOST_FDS, Message};
use super::settled::Settled;
use crate::record::{self, Record};

/// The version of all of this, and of what the parent passes to another program (`parent`). To be raised with every
/// change of it. vhost-user has no such requests.
pub const VERSION: u32 = 1;

/// From a supervisor: its versions, and the record's memory.
const HELLO: u32 = 0x1_0000;
/// From the successor: it can go on with that.
pub const READY: u32 = 0x1_0001;
/// The worker has ended, and the record does not change any more.
const STOPPED: u32 = 0x1_0002;
/// [`State`], and the descriptors that it has.
const STATE: u32 = 0x1_0003;
/// Numbers of descriptors, and the descriptors.
const DESCRIPTORS: u32 = 0x1_0004;
/// From the successor: it has what came last. So few descriptors are under way at a time: Linux limits them.
const GOT: u32 = 0x1_0005;
/// From the successor: it has everything.
const DONE: u32 = 0x1_0006;
/// The supervisor will not go on.
const YOURS: u32 = 0x1_0007;
/// From the successor: the parent knows it.
const TOLD: u32 = 0x1_0008;

/// How long a supervisor whose worker has ended waits for its successor at each step: it takes microseconds, and the
/// guest waits too.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is settled but for messages and descriptors of files.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    /// The program's version.
    version: String,
    /// Workers so far.
    workers: u32,
    /// When the worker was stopped, in ns of the monotonic clock.
    stopped: u64,
    /// Whether there is a control socket, and a frontend.
    control: bool,
    frontend: bool,
    /// Messages that settled something.
    messages: u32,
    /// Whether a message follows that was not answered.
    pending: bool,
    /// Descriptors that the record names.
    descriptors: u32,
}

/// What a supervisor hands over.
#[derive(Debug)]
pub struct Estate {
    /// As in [`State`].
    pub version: String,
    pub workers: u32,
    pub stopped: u64,
    pub listener: UnixListener,
    pub control: Option<UnixListener>,
    pub frontend: Option<UnixStream>,
    pub settled: Settled,
    pub pending: Option<Message>,
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn say(socket: &UnixStream, request: u32) -> io::Result<()> {
    Message::new(request, Vec::new(), Vec::new()).send(socket)
}

fn hear(socket: &UnixStream, request: u32) -> io::Result<Message> {
    let message = Message::receive(socket)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    if message.request == request { Ok(message) } else { Err(invalid("the other program says something else")) }
}

/// The monotonic clock in ns, which is the same in all processes.
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
}

/// To the successor: what it has to go on with.
///
/// # Errors
/// Those of the socket.
pub fn offer(successor: &UnixStream, record: &Record) -> io::Result<()> {
    successor.set_read_timeout(Some(PATIENCE))?;
    successor.set_write_timeout(Some(PATIENCE))?;
    let versions = [VERSION, record::VERSION].map(u32::to_ne_bytes).concat();
    Message::new(HELLO, versions, vec![record.file().try_clone_to_owned()?]).send(successor)
}

/// Hands over. Returns when the successor has everything, and is told that it is its own.
///
/// # Errors
/// If it has not. The successor does nothing then.
pub fn give(successor: &UnixStream, estate: &Estate, record: &Record) -> io::Result<()> {
    say(successor, STOPPED)?;
    let pass = |message: &Message| {
        message.send(successor)?;
        hear(successor, GOT).map(drop)
    };
    let messages = estate.settled.messages()?;
    let named: BTreeSet<RawFd> = record.descriptors().into_iter().collect();
    let mut named = named.into_iter().filter(|fd| record::is_open(*fd)).collect::<Vec<_>>();
    let state = State {
        version: estate.version.clone(),
        workers: estate.workers,
        stopped: estate.stopped,
        control: estate.control.is_some(),
        frontend: estate.frontend.is_some(),
        messages: messages.len() as u32,
        pending: estate.pending.is_some(),
        descriptors: named.len() as u32,
    };
    let sockets = [estate.control.as_ref().map(AsFd::as_fd), estate.frontend.as_ref().map(AsFd::as_fd)];
    let sockets = [Some(estate.listener.as_fd())].into_iter().chain(sockets).flatten();
    let sockets = sockets.map(|fd| fd.try_clone_to_owned()).collect::<io::Result<_>>()?;
    pass(&Message::new(STATE, serde_json::to_vec(&state)?, sockets))?;
    messages.iter().chain(&estate.pending).try_for_each(pass)?;
    for some in named.chunks_mut(MOST_FDS) {
        let body = some.iter().flat_map(|fd| fd.to_ne_bytes()).collect();
        let message = Message::new(DESCRIPTORS, body, some.iter().filter_map(|fd| record::left_behind(*fd)).collect());
        let passed = pass(&message);
        // They stay open here.
        message.fds.into_iter().for_each(std::mem::forget);
        passed?;
    }
    hear(successor, DONE)?;
    say(successor, YOURS)
}

/// The successor is its own. Returns when the parent knows it.
///
/// # Errors
/// If the successor has ended before that.
pub fn leave(successor: &UnixStream) -> io::Result<()> {
    // It has little left to do, and this process nothing.
    successor.set_read_timeout(None)?;
    hear(successor, TOLD).map(drop)
}

/// From the supervisor: the record, which changes still.
///
/// # Errors
/// If this program cannot go on with it.
pub fn greet(supervisor: &UnixStream) -> io::Result<Record> {
    let hello = hear(supervisor, HELLO)?;
    if hello.body != [VERSION, record::VERSION].map(u32::to_ne_bytes).concat() {
        return Err(invalid("the running program's record is of another version"));
    }
    Record::open(hello.fds.into_iter().next().ok_or_else(|| invalid("there is no record"))?)
}

/// This program can go on. Returns when the worker has ended, with the numbers of the descriptors that the record
/// names.
///
/// # Errors
/// Those of the socket.
pub fn ready(supervisor: &UnixStream, record: &Record) -> io::Result<BTreeSet<RawFd>> {
    say(supervisor, READY)?;
    hear(supervisor, STOPPED)?;
    step("stopped");
    Ok(record.descriptors().into_iter().filter(|fd| *fd > libc::STDERR_FILENO).collect())
}

/// The same descriptor with a number that the record does not name.
///
/// # Errors
/// Those of fcntl(2).
pub fn out_of_the_way(fd: impl AsFd, named: &BTreeSet<RawFd>) -> io::Result<OwnedFd> {
    let mut at = libc::STDERR_FILENO + 1;
    loop {
        while named.contains(&at) {
            at += 1;
        }
        let copy = fcntl_dupfd_cloexec(&fd, at)?;
        if !named.contains(&copy.as_raw_fd()) {
            return Ok(copy);
        }
        at = copy.as_raw_fd() + 1;
    }
}

/// Takes everything. `named`: as [`ready`] returned it; none of these numbers is in use. `any`: a descriptor.
///
/// # Errors
/// If something is missing.
pub fn take(supervisor: &UnixStream, named: &BTreeSet<RawFd>, any: impl AsFd) -> io::Result<Estate> {
    // What comes must not get the number of what comes later.
    named.iter().try_for_each(|number| record::copy_to(&any, *number))?;
    let next = || {
        let message = Message::receive(supervisor)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        say(supervisor, GOT)?;
        io::Result::Ok(message)
    };
    let message = next()?;
    let state: State = serde_json::from_slice(&message.body)?;
    let mut sockets = message.fds.into_iter();
    let mut socket = || sockets.next().ok_or_else(|| invalid("a socket is missing"));
    let listener = socket()?.into();
    let control = state.control.then(&mut socket).transpose()?.map(UnixListener::from);
    let frontend = state.frontend.then(&mut socket).transpose()?.map(UnixStream::from);
    let mut settled = Settled::default();
    for _ in 0..state.messages {
        settled.note(next()?, None);
    }
    let pending = state.pending.then(next).transpose()?;
    step("state");
    let mut missing = named.clone();
    let mut left = state.descriptors as usize;
    while left > 0 {
        let message = next()?;
        let numbers =
            message.body.chunks_exact(4).map(|word| RawFd::from_ne_bytes([word[0], word[1], word[2], word[3]]));
        if message.request != DESCRIPTORS || numbers.len() != message.fds.len() || message.fds.is_empty() {
            return Err(invalid("descriptors are missing"));
        }
        left = left.checked_sub(message.fds.len()).ok_or_else(|| invalid("there are too many descriptors"))?;
        for (number, fd) in numbers.zip(message.fds) {
            if !missing.remove(&number) {
                return Err(invalid("the record does not name this descriptor"));
            }
            record::copy_to(fd, number)?;
        }
        step("descriptors");
    }
    // The record names them, and they are closed.
    missing.into_iter().for_each(|number| drop(record::left_behind(number)));
    let State { version, workers, stopped, .. } = state;
    Ok(Estate { version, workers, stopped, listener, control, frontend, settled, pending })
}

/// This program has everything. Returns when it is its own.
///
/// # Errors
/// If it does not become that.
pub fn done(supervisor: &UnixStream) -> io::Result<()> {
    step("done");
    say(supervisor, DONE)?;
    hear(supervisor, YOURS).map(drop)
}

/// The parent knows this program.
pub fn told(supervisor: &UnixStream) {
    // If it fails, who would hear it has ended.
    let _ = say(supervisor, TOLD);
}

/// For tests: debug builds end here if the environment variable THRUWAY_TEST_END names this step, and stop here if
/// THRUWAY_TEST_STOP does.
pub fn step(name: &str) {
    if !cfg!(debug_assertions) {
        return;
    }
    for (variable, signal) in [("THRUWAY_TEST_END", Signal::ABORT), ("THRUWAY_TEST_STOP", Signal::STOP)] {
        if std::env::var_os(variable).is_some_and(|step| step == name) {
            let _ = kill_process(getpid(), signal);
        }
    }
}

/// An error if a descriptor of this process has a number that the record names: it would be lost.
///
/// # Errors
/// Says so.
pub fn check_numbers(open: &BTreeSet<RawFd>, named: &BTreeSet<RawFd>) -> io::Result<()> {
    match open.intersection(named).next() {
        Some(_) => Err(io::Error::from(Errno::BUSY)),
        None => Ok(()),
    }
}
