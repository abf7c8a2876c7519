//! `thruway run`: starts a daemon and its virtual machine together, and ends both.

use std::ffi::OsString;
use std::os::unix::net::UnixListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use thruway::cli;

use crate::Result;
use crate::qemu::Device;
use crate::vm::{self, Machine, Share};

/// The options of `thruway run`.
#[derive(clap::Args)]
#[group(skip)]
#[command(override_usage = "thruway run --shared-dir DIR [THRUWAYD-OPTION]... -- QEMU [QEMU-OPTION]...")]
pub struct Options {
    /// The daemon to start [default: thruwayd beside this program, or as installed]
    #[arg(long, value_name = "PATH")]
    thruwayd: Option<PathBuf>,

    #[command(flatten, next_help_heading = "Options of thruwayd")]
    daemon: cli::Options,

    /// The virtual machine
    #[arg(value_name = "QEMU", last = true, required = true)]
    qemu: Vec<String>,
}

/// The tag, if none is given.
const TAG: &str = "share";

/// What thruway run decides itself.
const OWN: [&str; 5] = ["--socket-path", "--socket", "--fd", "--keep-alive", "--print-capabilities"];

/// How long a process may take to end once it is told to: QEMU writes its disks' caches.
const END: Duration = Duration::from_secs(10);

/// Runs both until QEMU ends. The status is QEMU's.
pub fn run(options: &Options) -> Result {
    let words = daemon_words(std::env::args_os())?;
    let given = |own: &&str| words.iter().any(|word| is(word, own));
    if let Some(own) = OWN.iter().find(|own| given(own)) {
        return Err(format!(
            "{own} does not go with thruway run, which connects both by a socket of its own: remove it"
        ));
    }
    let (program, arguments) = options.qemu.split_first().ok_or("there is no QEMU after --")?;
    let tag = options.daemon.tag.as_deref().unwrap_or(TAG);
    let machine = Machine::read(arguments, tag)?;
    let queues = if given(&"--num-request-queues") { options.daemon.num_request_queues } else { machine.cpus };
    // All QEMUs with windows have this device.
    let share = Share::new(&words, tag, queues, || Device::Test)?;
    let thruwayd = vm::daemon(options.thruwayd.as_deref())?;
    // Children end with a signal that is kept until the loop below.
    let mut signals =
        Signals::new([SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGQUIT]).map_err(|e| format!("cannot catch signals: {e}"))?;
    let dir = tempfile::Builder::new().prefix("thruway-run.").tempdir();
    let dir = dir.map_err(|e| {
        format!("cannot make a directory for the socket: {e}: set TMPDIR to a directory that this user may write to")
    })?;
    let socket = dir.path().join("fs.sock");
    let socket = socket.to_str().ok_or("TMPDIR is not UTF-8: set another")?;

    let mut daemon = start_daemon(&thruwayd, &share, socket)?;
    let mut command = Command::new(program);
    command.args(machine.unshared.iter().flat_map(|size| vm::memory(*size))).args(share.device(socket)).args(arguments);
    // SAFETY: prctl(2) is all that runs between fork(2) and execve(2).
    unsafe { command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?)) };
    let mut qemu =
        command.spawn().map(Process).map_err(|e| format!("cannot run '{program}': {e}: name a QEMU after --"))?;

    for signal in signals.forever() {
        if signal != SIGCHLD {
            qemu.send(signal);
            continue;
        }
        if let Some(status) = qemu.ended() {
            // The daemon ends by itself when QEMU is gone.
            daemon.wait(END);
            return Ok(ExitCode::from(code(status)));
        }
        if let Some(status) = daemon.ended() {
            if status.success() {
                // QEMU has closed the connection, as it does just before it ends.
                qemu.wait(END);
                if let Some(status) = qemu.ended() {
                    return Ok(ExitCode::from(code(status)));
                }
            }
            qemu.send(SIGTERM);
            qemu.wait(END);
            return Err(format!("thruwayd ended ({status}), and QEMU was ended: thruwayd's message above says why"));
        }
    }
    Err("cannot wait for signals".into())
}

/// Whether a word is this option.
fn is(word: &str, option: &str) -> bool {
    word.strip_prefix(option).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
}

/// The daemon's options as they were given: all between `run` and `--` but this command's own.
fn daemon_words(line: impl Iterator<Item = OsString>) -> std::result::Result<Vec<String>, String> {
    let mut line = line.skip_while(|word| word != "run").skip(1).take_while(|word| word != "--");
    let mut words = Vec::new();
    while let Some(word) = line.next() {
        match word.into_string() {
            Ok(word) if word == "--thruwayd" => drop(line.next()),
            Ok(word) if is(&word, "--thruwayd") => {}
            Ok(word) => words.push(word),
            Err(word) => return Err(format!("{word:?} is not UTF-8: use another name")),
        }
    }
    Ok(words)
}

/// Starts the daemon on a socket that is there already, so that QEMU can connect at once.
fn start_daemon(program: &Path, share: &Share, socket: &str) -> std::result::Result<Process, String> {
    let listener =
        UnixListener::bind(socket).map_err(|e| format!("cannot listen on '{socket}': {e}: set a shorter TMPDIR"))?;
    fcntl_setfd(&listener, FdFlags::empty()).map_err(|e| e.to_string())?;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&listener);
    let mut command = Command::new(program);
    // In its own group: Ctrl-C is for QEMU, which ends in order while the daemon still serves.
    command.args(&share.daemon).arg(format!("--fd={fd}")).process_group(0);
    if !share.daemon.iter().any(|word| is(word, "--control-path")) {
        // For thruway status and thruway top.
        command.arg(format!("--control-path={}", Path::new(socket).with_file_name("control.sock").display()));
    }
    let started = command.spawn().map(Process);
    started.map_err(|e| format!("cannot run '{}': {e}: name thruwayd by --thruwayd PATH", program.display()))
}

/// A child, which ends when this is dropped.
struct Process(Child);

impl Process {
    fn ended(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().ok().flatten()
    }

    fn send(&self, signal: i32) {
        let pid = Pid::from_raw(self.0.id() as i32);
        // It fails for a process that has ended. No other gets its number before it is waited for.
        let _ = pid.zip(Signal::from_named_raw(signal)).map(|(pid, signal)| kill_process(pid, signal));
    }

    /// Waits for its end for a time.
    fn wait(&mut self, limit: Duration) {
        let end = Instant::now() + limit;
        while self.ended().is_none() && Instant::now() < end {
            sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The exit status as a shell has it.
fn code(status: ExitStatus) -> u8 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)) as u8
}
