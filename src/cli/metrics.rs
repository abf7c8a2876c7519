//! The socket of `--metrics-path`: it serves the daemon's counters in Prometheus' text format.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::device::Notifier;
use crate::fuse::metrics::Counters;
use crate::limits;
use crate::window::Window;

/// How long the daemon waits for a client's request. Clients send it as soon as they are connected.
const PATIENCE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Starts a thread that answers every connection with the counters, as an HTTP server, whatever the request.
///
/// # Errors
/// Those of starting a thread.
pub fn start(
    listener: UnixListener,
    counters: Arc<Counters>,
    window: Option<Arc<Window>>,
    notifier: Arc<Notifier>,
) -> io::Result<()> {
    let serve = move || {
        loop {
            let client = next(|| Ok(listener.accept()?.0), thread::sleep);
            let counts = format!("{counters}{notifier}");
            let text = window.iter().fold(counts, |text, window| text + &window.metrics());
            if let Err(e) = answer(client, &text) {
                tracing::debug!("a client of --metrics-path went away: {e}");
            }
        }
    };
    thread::Builder::new().name("thruway-metrics".into()).spawn(serve).map(drop)
}

/// Returns the next client. An error of accept(2), such as EMFILE, would come again at once, so there is a pause.
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
    // std writes to a `UnixStream` by sendto(2), which seccomp does not allow, and to a `File` by write(2).
    let mut client = File::from(OwnedFd::from(client));
    // Closing a socket with unread data would give the client an error.
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
    fn each_failure_is_followed_by_a_pause() {
        let (tries, pauses) = (Cell::new(0), Cell::new(0));
        let accept = || {
            tries.set(tries.get() + 1);
            if tries.get() <= 3 { Err(io::Error::from_raw_os_error(libc::EMFILE)) } else { Ok(UnixStream::pair()?.0) }
        };
        next(accept, |_| pauses.set(pauses.get() + 1));
        assert_eq!((tries.get(), pauses.get()), (4, 3));
    }
}
