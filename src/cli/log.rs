//! Where the daemon's log goes: stderr or syslog.

use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;

use tracing::level_filters::LevelFilter;
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// LOG_USER of syslog(3), shifted as in the messages: virtiofsd's facility.
const FACILITY: u8 = 1 << 3;

/// Starts the log. If syslog cannot be reached, stderr it is, with a warning.
pub fn init(level: LevelFilter, syslog: bool) {
    // To be inside of the sandbox what it was outside.
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::default().add_directive(level.into()));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_target(false);
    match syslog.then(Syslog::connect) {
        Some(Ok(writer)) => log.without_time().with_level(false).with_ansi(false).with_writer(writer).init(),
        failed => {
            log.with_ansi(false).with_writer(io::stderr).init();
            if let Some(Err(e)) = failed {
                tracing::warn!("cannot log to syslog at /dev/log: {e}: logging to stderr");
            }
        }
    }
}

/// Sends each event as a datagram of RFC 3164 to `/dev/log`.
struct Syslog {
    socket: UnixDatagram,
    pid: u32,
}

impl Syslog {
    fn connect() -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.connect("/dev/log")?;
        // A full log must not stop the file system.
        socket.set_nonblocking(true)?;
        Ok(Self { socket, pid: std::process::id() })
    }
}

impl<'a> MakeWriter<'a> for Syslog {
    type Writer = Message<'a>;

    fn make_writer(&'a self) -> Message<'a> {
        Message { log: self, severity: 6 }
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Message<'a> {
        // LOG_ERR, LOG_WARNING, LOG_INFO and LOG_DEBUG of syslog(3).
        let severity = match *meta.level() {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        };
        Message { log: self, severity }
    }
}

struct Message<'a> {
    log: &'a Syslog,
    severity: u8,
}

impl Write for Message<'_> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let mut datagram = format!("<{}>thruwayd[{}]: ", FACILITY | self.severity, self.log.pid).into_bytes();
        datagram.extend_from_slice(text.trim_ascii_end());
        self.log.socket.send(&datagram).map(|_| text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
