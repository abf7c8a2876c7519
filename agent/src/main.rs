//! The guest agent of thruwayd. It repeats what others do to the shares that are mounted here, so that this kernel
//! tells it to watchers (inotify(7), fanotify(7)) and forgets what it has cached. docs/guest.md says how to install it.

mod mounts;
mod repeat;
mod share;
mod sys;

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use share::Share;

const HELP: &str = "\
usage: thruway-guest
Repeats what the host and other guests do to this guest's virtio-fs shares, so
that programs here see it by inotify(7) and fanotify(7), and nothing cached is
out of date. Needs root, and shares that thruwayd serves. SIGTERM ends it.
  --help     shows this
  --version  shows the version
";

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        None => {}
        Some("--help") => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Some("--version") => {
            println!("thruway-guest {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        Some(other) => {
            say(&format!("'{other}' is no option: see --help"));
            return ExitCode::from(2);
        }
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

/// Writes a line to standard error.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "thruway-guest: {text}");
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    if !rustix::process::geteuid().is_root() {
        return Err("must run as root".into());
    }
    let signals = sys::end_signals()?;
    // The kernel says by POLLPRI when it has changed.
    let info = fs::File::open("/proc/self/mountinfo").map_err(|e| format!("cannot read /proc/self/mountinfo: {e}"))?;
    let mut shares = HashMap::new();
    loop {
        follow(&mut shares)?;
        let mut ready = [PollFd::new(&signals, PollFlags::IN), PollFd::new(&info, PollFlags::PRI)];
        match poll(&mut ready, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if !ready[0].revents().is_empty() {
            shares.values().flatten().for_each(|share: &Arc<Share>| share.end());
            return Ok(());
        }
    }
}

/// Takes up the shares that are mounted now, and lets go of those that are not.
fn follow(shares: &mut HashMap<u64, Option<Arc<Share>>>) -> std::io::Result<()> {
    let mounted = mounts::shares(&fs::read("/proc/self/mountinfo")?);
    shares.retain(|dev, share| {
        let stays = mounted.iter().any(|mount| mount.dev == *dev);
        share.iter().filter(|_| !stays).for_each(|share| share.end());
        stays
    });
    for mount in mounted {
        shares.entry(mount.dev).or_insert_with(|| match Share::open(&mount) {
            Ok(share) => {
                share.start();
                Some(share)
            }
            Err(errno) => {
                say(&format!("{}: cannot be opened: {errno}", mount.tag));
                None
            }
        });
    }
    Ok(())
}
