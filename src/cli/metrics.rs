//! Tells whoever connects to the socket of `--metrics-path` what the daemon has done, in Prometheus' text format.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::fuse::metrics::Counters;
use crate::limits;
use crate::window::Window;

/// How long a client may take to ask: it has connected for nothing else.
const PATIENCE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Answers every connection as an HTTP server does, whatever it asks for, from a thread of its own.
///
/// # Errors
/// As starting a thread.
pub fn start(listener: UnixListener, counters: Arc<Counters>, window: Option<Arc<Window>>) -> io::Result<()> {
    let serve = move || {
        loop {
            let client = next(|| Ok(listener.accept()?.0), thread::sleep);
            let text = window.iter().fold(counters.to_string(), |text, window| text + &window.metrics());
            if let Err(e) = answer(client, &text) {
                tracing::debug!("a client of --metrics-path went away: {e}");
            }
        }
    };
    thread::Builder::new().name("thruway-metrics".into()).spawn(serve).map(drop)
}

/// The next client. An error of accept(2), such as EMFILE, comes again at once: it is asked again after a pause.
fn next(accept: impl Fn() -> io::Result<UnixStream>, pause: impl Fn(Duration)) -> UnixStream {
    loop {
        match accept() {
            Ok(client) => return client,
            Err(e) => {
                tracing::warn!("cannot accept a client of --metrics-path: {e}");
                pause(limits::ACCEPT_PAUSE);
            }
        }
    }
}

fn answer(client: UnixStream, text: &str) -> io::Result<()> {
    // A stream of its own kind would be written by sendto(2), which the sandbox does not allow.
    let mut client = File::from(OwnedFd::from(client));
    // What has not been read when it is closed would be an error for the client.
    if poll(&mut [PollFd::new(&client, PollFlags::IN)], Some(&PATIENCE))? > 0 {
        let _ = client.read(&mut [0; 4096])?;
    }
    let head = "HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n";
    client.write_all(format!("{head}Content-Length: {}\r\n\r\n{text}", text.len()).as_bytes())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn there_is_a_pause_after_each_failure() {
        let (tries, pauses) = (Cell::new(0), Cell::new(0));
        let accept = || {
            tries.set(tries.get() + 1);
            if tries.get() <= 3 { Err(io::Error::from_raw_os_error(libc::EMFILE)) } else { Ok(UnixStream::pair()?.0) }
        };
        next(accept, |_| pauses.set(pauses.get() + 1));
        assert_eq!((tries.get(), pauses.get()), (4, 3));
    }
}
