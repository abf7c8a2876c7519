//! `make pictures`: runs the demo and `thruway top` in terminals, and draws them for the documents.
//!
//! Each recording is kept beside its picture as a .cast file, which asciinema plays.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::host::{self, Result};
use crate::picture;
use crate::terminal::{Event, Recording, Terminal};

/// The names of the pictures.
pub const NAMES: [&str; 2] = ["demo", "top"];

/// A limit on hangs. The demo takes two minutes on an idle machine, with the build.
const LONG: Duration = Duration::from_secs(1800);

/// How long `thruway top` looks on before it is drawn: its graph needs some history.
const HISTORY: Duration = Duration::from_secs(100);

/// Records what is named and draws it.
pub fn record(names: &[String], directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).map_err(|e| format!("cannot make {}: {e}", directory.display()))?;
    let wanted: Vec<_> =
        NAMES.into_iter().filter(|name| names.is_empty() || names.iter().any(|wanted| wanted == name)).collect();
    for name in &wanted {
        println!("{name} ...");
        let recording = if *name == "demo" { demo()? } else { top()? };
        write(&directory.join(format!("{name}.cast")), &recording.to_cast())?;
    }
    redraw(&wanted, directory)
}

/// Draws these recordings.
pub fn redraw(names: &[&str], directory: &Path) -> Result<()> {
    for name in names {
        let path = directory.join(format!("{name}.cast"));
        let text = fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
        let recording = Recording::from_cast(&text).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
        write(&directory.join(format!("{name}.svg")), &drawn(name, &recording))?;
    }
    Ok(())
}

fn drawn(name: &str, recording: &Recording) -> String {
    if name == "demo" { picture::moving(recording) } else { picture::still(recording) }
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))
}

/// A shell in a mount namespace of its own.
fn shell(script: &str) -> Command {
    let mut shell = Command::new("unshare");
    shell.args(["--mount", "--propagation", "private", "bash", "-euc", script, "pictures"]);
    for (name, value) in [("TERM", "xterm-256color"), ("LC_ALL", "C.UTF-8")] {
        shell.env(name, value);
    }
    for name in ["PROMPT_COMMAND", "CARGO_TARGET_DIR", "MAKEFLAGS", "MAKELEVEL", "RUSTFLAGS", "THRUWAY_DAEMON"] {
        shell.env_remove(name);
    }
    shell
}

fn prompt(screen: &str) -> bool {
    screen.trim_end().lines().next_back().is_some_and(|line| line.trim_end() == "$")
}

/// `make demo` in a fresh checkout of the last commit. What it downloads is in the cache: the names of servers are
/// nobody's business.
fn demo() -> Result<Recording> {
    let base = tempfile::tempdir_in("/var/tmp").map_err(|e| format!("cannot make a directory: {e}"))?;
    let script = "
        git clone --quiet \"$1\" \"$2/thruway\"
        mount -t tmpfs tmpfs /usr/src
        mkdir /usr/src/thruway
        mount --bind \"$2/thruway\" /usr/src/thruway
        cd /usr/src/thruway
        vm-images/setup.sh packages tree >&2
        cargo fetch --quiet --locked
        clear
        PS1='$ ' exec bash --norc --noprofile -i";
    let mut command = shell(script);
    command.arg(host::root()).arg(base.path());
    let mut terminal = Terminal::start(&mut command, 100, 36)?;
    if !terminal.wait(LONG, prompt)? {
        return Err("the shell does not start".into());
    }
    let before = terminal.recording().events.last().map_or(0.0, |event| event.at);
    terminal.wait(Duration::from_millis(800), |_| false)?;
    terminal.type_in("make demo\n")?;
    // The prompt again.
    if !terminal.wait(LONG, prompt)? {
        return Err("the demo does not end".into());
    }
    let mut recording = terminal.recording().clone();
    terminal.end("exit\n", LONG)?;
    // From the first prompt on.
    recording.events.retain(|event| event.at >= before);
    recording.events.iter_mut().for_each(|event| event.at -= before);
    let seconds = recording.events.last().map_or(0.0, |event| event.at);
    recording.title = format!("make demo: {seconds:.0} s on two CPUs, shown with shorter waits");
    Ok(recording)
}

/// `thruway top` with four daemons, whose guests do something.
fn top() -> Result<Recording> {
    let base = tempfile::tempdir_in("/var/tmp").map_err(|e| format!("cannot make a directory: {e}"))?;
    let programs = host::thruwayd()?;
    let programs = Path::new(&programs).parent().ok_or("no directory of thruwayd")?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.arg(host::root().join("bench/xtask/scenes/top")).args([host::root(), programs, base.path()]);
    command.env("TERM", "xterm-256color").env("LC_ALL", "C.UTF-8").env("COLORTERM", "");
    let mut terminal = Terminal::start(&mut command, 116, 34)?;
    if !terminal.wait(LONG, |screen| screen.contains("thruway top"))? {
        return Err(format!("thruway top does not start: {}", terminal.screen()));
    }
    terminal.wait(HISTORY, |_| false)?;
    // A moment in which no guest rests.
    let busy = |screen: &str| {
        let words: Vec<_> = screen.split_whitespace().collect();
        let at = words.iter().position(|word| *word == "requests/s");
        at.and_then(|at| words[at - 1].parse().ok()).is_some_and(|rate: f64| rate > 1000.0)
    };
    terminal.wait(LONG, busy)?;
    // The screen alone, not how it came to be.
    let event = Event { at: 0.0, text: terminal.redraw() };
    let recording = Recording { title: "thruway top".into(), events: vec![event], ..terminal.recording().clone() };
    terminal.end("q", LONG)?;
    Ok(recording)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pictures in the repository are those of the recordings in the repository.
    #[test]
    fn pictures_match_their_recordings() {
        let directory = host::root().join("docs/pictures");
        for name in NAMES {
            let [cast, svg] = ["cast", "svg"].map(|kind| fs::read_to_string(directory.join(format!("{name}.{kind}"))));
            let (cast, svg) = (cast.unwrap(), svg.unwrap());
            assert_eq!(drawn(name, &Recording::from_cast(&cast).unwrap()), svg, "{name}: run xtask pictures --redraw");
            assert!(svg.len() < 150_000, "{name}: {} bytes", svg.len());
            // No server that somebody downloads from.
            assert!(!cast.contains("://") && !svg.replace("http://www.w3.org/", "").contains("://"), "{name}");
            assert!(!svg.contains("<script") && !svg.contains("href"), "{name}");
        }
    }
}
