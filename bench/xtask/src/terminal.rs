//! Programs in a terminal: what they write there, and when.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use avt::Vt;
use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::{Value, json};

use crate::host::Result;

/// Between two keys: as fast as somebody types who knows the word.
const KEY: Duration = Duration::from_millis(70);

/// What was written to a terminal of this size.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    pub columns: u16,
    pub rows: u16,
    pub title: String,
    pub events: Vec<Event>,
}

/// What came at once.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Seconds since the beginning.
    pub at: f64,
    pub text: String,
}

impl Recording {
    /// Writes asciinema's format, version 2: a line about the recording, and one for each event.
    pub fn to_cast(&self) -> String {
        let head = json!({"version": 2, "width": self.columns, "height": self.rows, "title": self.title});
        let line = |event: &Event| json!([(event.at * 1000.0).round() / 1000.0, "o", event.text]).to_string();
        let lines: Vec<_> = [head.to_string()].into_iter().chain(self.events.iter().map(line)).collect();
        lines.join("\n") + "\n"
    }

    /// Reads what [`to_cast`](Self::to_cast) has written.
    pub fn from_cast(text: &str) -> Result<Self> {
        let mut lines = text.lines().map(|line| serde_json::from_str::<Value>(line).map_err(|e| e.to_string()));
        let head = lines.next().ok_or("an empty recording")??;
        let size = |name: &str| head[name].as_u64().and_then(|n| u16::try_from(n).ok()).ok_or(format!("no {name}"));
        let event = |line: Result<Value>| {
            let line = line?;
            let at = line[0].as_f64().ok_or("an event without a time")?;
            let text = line[2].as_str().ok_or("an event without a text")?;
            Ok(Event { at, text: text.to_owned() })
        };
        let events = lines.map(event).collect::<Result<_>>()?;
        let title = head["title"].as_str().unwrap_or_default().to_owned();
        Ok(Self { columns: size("width")?, rows: size("height")?, title, events })
    }
}

/// A program in a terminal. It is hung up on when this is dropped.
pub struct Terminal {
    keys: File,
    output: Receiver<String>,
    child: Child,
    since: Instant,
    recording: Recording,
    screen: Vt,
}

impl Terminal {
    /// Starts the program in a terminal of its own, which controls it.
    pub fn start(command: &mut Command, columns: u16, rows: u16) -> Result<Self> {
        let (ours, theirs) = pair(columns, rows).map_err(|e| format!("cannot open a pseudo terminal: {e}"))?;
        let clone = |fd: &OwnedFd| fd.try_clone().map_err(|e| format!("cannot copy a descriptor: {e}"));
        let mut leader = Command::new("setsid");
        leader.args(["--ctty", "--wait"]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => leader.env(name, value),
                None => leader.env_remove(name),
            };
        }
        if let Some(directory) = command.get_current_dir() {
            leader.current_dir(directory);
        }
        leader.stdin(Stdio::from(clone(&theirs)?)).stdout(Stdio::from(clone(&theirs)?)).stderr(Stdio::from(theirs));
        let child = leader.spawn().map_err(|e| format!("cannot start setsid: {e}"))?;
        let mut input = File::from(clone(&ours)?);
        let (send, output) = channel();
        thread::spawn(move || {
            let (mut bytes, mut rest) = ([0; 4096], Vec::new());
            // EIO when nobody has the other end any more.
            while let Ok(n @ 1..) = input.read(&mut bytes) {
                rest.extend_from_slice(&bytes[..n]);
                if send.send(take_whole(&mut rest)).is_err() {
                    return;
                }
            }
        });
        let recording = Recording { columns, rows, ..Recording::default() };
        let screen = Vt::builder().size(columns.into(), rows.into()).scrollback_limit(0).build();
        Ok(Self { keys: ours.into(), output, child, since: Instant::now(), recording, screen })
    }

    /// Types these keys.
    pub fn type_in(&mut self, keys: &str) -> Result<()> {
        for key in keys.chars() {
            self.keys.write_all(key.to_string().as_bytes()).map_err(|e| format!("cannot type: {e}"))?;
            // The answer is read meanwhile.
            let until = Instant::now() + KEY;
            self.wait(KEY, |_| Instant::now() >= until)?;
        }
        Ok(())
    }

    /// Records until the screen is as wanted, or the time is over. Whether it is as wanted.
    pub fn wait(&mut self, limit: Duration, wanted: impl Fn(&str) -> bool) -> Result<bool> {
        let until = Instant::now() + limit;
        loop {
            if wanted(&self.screen()) {
                return Ok(true);
            }
            let left = until.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(text) => {
                    self.screen.feed_str(&text);
                    self.recording.events.push(Event { at: self.since.elapsed().as_secs_f64(), text });
                }
                Err(RecvTimeoutError::Timeout) => return Ok(wanted(&self.screen())),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(format!("the program ended: {}", self.screen().trim()));
                }
            }
        }
    }

    /// Types the keys that end the program, and records what it still writes.
    pub fn end(mut self, keys: &str, limit: Duration) -> Result<Recording> {
        self.keys.write_all(keys.as_bytes()).map_err(|e| format!("cannot type: {e}"))?;
        // Nobody has the terminal any more.
        if self.wait(limit, |_| false).is_ok() {
            return Err("the program does not end".into());
        }
        self.child.wait().map_err(|e| format!("cannot wait for the program: {e}"))?;
        Ok(std::mem::take(&mut self.recording))
    }

    /// What was recorded up to now.
    pub fn recording(&self) -> &Recording {
        &self.recording
    }

    /// The lines on the screen.
    pub fn screen(&self) -> String {
        self.screen.view().map(|line| line.text() + "\n").collect()
    }

    /// What makes another terminal show the same.
    pub fn redraw(&self) -> String {
        self.screen.dump()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It passes the signal on to nobody: the terminal's end does that.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Takes the whole characters.
fn take_whole(bytes: &mut Vec<u8>) -> String {
    let whole = match std::str::from_utf8(bytes) {
        Err(e) if e.error_len().is_none() => e.valid_up_to(),
        _ => bytes.len(),
    };
    String::from_utf8_lossy(&bytes.drain(..whole).collect::<Vec<_>>()).into_owned()
}

/// Both ends of a pseudo terminal of this size.
fn pair(columns: u16, rows: u16) -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&ours)?;
    unlockpt(&ours)?;
    let name = ptsname(&ours, Vec::new())?;
    let theirs = open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?;
    tcsetwinsize(&ours, Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 })?;
    Ok((ours, theirs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_is_read_as_it_was_written() {
        let event = |at, text: &str| Event { at, text: text.into() };
        let events = vec![event(0.25, "a\r\n"), event(1.5, "\u{1b}[1mü\"\u{1b}[0m")];
        let recording = Recording { columns: 80, rows: 24, title: "t".into(), events };
        assert_eq!(Recording::from_cast(&recording.to_cast()), Ok(recording));
        for bad in ["", "{}", "[1]", "{\"width\": 1, \"height\": 1}\n[1]"] {
            assert!(Recording::from_cast(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_character_is_not_torn() {
        let mut bytes = b"a\xc3".to_vec();
        assert_eq!((take_whole(&mut bytes), bytes.len()), ("a".into(), 1));
        bytes.extend_from_slice(b"\xbc\xffb");
        assert_eq!((take_whole(&mut bytes), bytes.len()), ("ü\u{fffd}b".into(), 0));
    }

    #[test]
    fn keys_reach_the_program_and_its_output_comes_back() {
        let mut terminal = Terminal::start(Command::new("sh").env("PS1", "> "), 60, 10).unwrap();
        let long = Duration::from_secs(60);
        assert!(terminal.wait(long, |screen| screen.starts_with("> ")).unwrap());
        terminal.type_in("stty size; tty | cut -c 1-8\n").unwrap();
        assert!(terminal.wait(long, |screen| screen.replace(' ', "").contains("\n1060\n/dev/pts\n>")).unwrap());
        assert!(!terminal.end("exit\n", long).unwrap().events.is_empty());
    }
}
