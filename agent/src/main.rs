//! The guest agent of thruwayd. It repeats what others do to the shares that are mounted here, so that this kernel
//! tells it to watchers (inotify(7), fanotify(7)) and forgets what it has cached. docs/guest.md says how to install it.

mod mounts;
mod repeat;
mod share;
mod sys;
mod watched;

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use share::{Share, only};

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
    sys::share_heap();
    let signals = sys::end_signals()?;
    // The kernel says by POLLPRI when it has changed.
    let info = fs::File::open("/proc/self/mountinfo").map_err(|e| format!("cannot read /proc/self/mountinfo: {e}"))?;
    let (mut shares, mut looked) = (HashMap::new(), None);
    let (only, input) = (only(), std::io::stdin());
    loop {
        // Whatever happens in between.
        let all = looked.is_none_or(|looked: Instant| looked.elapsed() >= LOOK);
        if all {
            looked = Some(Instant::now());
        }
        follow(&mut shares, all, only)?;
        if only.is_some() && shares.is_empty() {
            return Ok(());
        }
        let mut ready = [
            PollFd::new(&signals, PollFlags::IN),
            PollFd::new(&info, PollFlags::PRI),
            PollFd::new(&input, PollFlags::empty()),
        ];
        let watched = if only.is_some() { 3 } else { 2 };
        let left = LOOK.saturating_sub(looked.map_or(Duration::ZERO, |looked| looked.elapsed()));
        match poll(&mut ready[..watched], Some(&left.try_into()?)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if !ready[0].revents().is_empty() || !ready[2].revents().is_empty() {
            shares.values().flatten().for_each(|share: &Arc<Share>| share.end());
            return Ok(());
        }
    }
}

/// How often to look for shares in other mount namespaces. The kernel tells of changes in one's own only. It is two
/// wake-ups a minute, and a container has run for some seconds before it misses an event.
const LOOK: Duration = Duration::from_secs(30);

/// Takes up the shares that are mounted now, and lets go of those that are not. `all`: also looks at the mount
/// namespaces of others, and tries again what has failed. `only`: the one share to take up.
fn follow(shares: &mut HashMap<u64, Option<Arc<Share>>>, all: bool, only: Option<u64>) -> std::io::Result<()> {
    let mut mounted = mounts::own()?;
    let layered =
        |share: &Option<Arc<Share>>| share.as_ref().is_some_and(|share| share.layered.load(Ordering::Relaxed));
    let everywhere = all || shares.iter().any(|(dev, share)| !mounts::has(&mounted, *dev) || layered(share));
    if everywhere {
        mounted = mounts::all()?;
    }
    mounted.retain(|mount| only.is_none_or(|only| mount.dev == only));
    shares.retain(|dev, share| {
        let stays = mounts::has(&mounted, *dev);
        share.iter().filter(|_| !stays).for_each(|share| share.end());
        stays
    });
    for mount in mounted {
        let known = shares.get(&mount.dev);
        if let Some(Some(share)) = known {
            share.layered.store(mount.layered, Ordering::Relaxed);
        }
        match known {
            Some(Some(share)) if all => share.revive(),
            Some(Some(_)) => {}
            Some(None) if !all => {}
            None | Some(None) => {
                let share = Share::open(&mount);
                match &share {
                    Ok(share) => {
                        share.layered.store(mount.layered, Ordering::Relaxed);
                        share.start();
                    }
                    Err(rustix::io::Errno::XDEV) if known.is_none() => {
                        say(&format!("{}: a submount, whose changes are not told", mount.path_here().display()));
                    }
                    Err(errno) if known.is_none() => say(&format!("{}: cannot be opened: {errno}", mount.tag)),
                    Err(_) => {}
                }
                shares.insert(mount.dev, share.ok());
            }
        }
    }
    Ok(())
}
