//! Where the daemon's log goes: stderr or syslog.
//!
//! A guest can cause messages, so they are limited ([`LOG_BURST`]). No thread that serves the guest waits for the log's
//! reader: a thread of the log's own writes the lines ([`detach`]).

use std::collections::HashMap;
use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::callsite::Identifier;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Context, Filter, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use crate::limits::{LOG_BURST, LOG_LINE, LOG_PERIOD, LOG_QUEUE};

/// LOG_USER of syslog(3), shifted as in the messages: virtiofsd's facility.
const FACILITY: u8 = 1 << 3;

/// How long [`flush`] waits for a reader who may have stopped to read.
const LAST_WORDS: Duration = Duration::from_secs(1);

static LOG: OnceLock<Log> = OnceLock::new();

/// Starts the log. If syslog cannot be reached, it goes to stderr, with a warning.
pub fn init(level: LevelFilter, syslog: bool) {
    // To be inside of the sandbox what it was outside.
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::default().add_directive(level.into()));
    let (sink, failure) = match syslog.then(Syslog::connect) {
        Some(Ok(syslog)) => (Sink::Syslog(syslog), None),
        Some(Err(e)) => (Sink::Stderr, Some(e)),
        None => (Sink::Stderr, None),
    };
    let plain = matches!(sink, Sink::Syslog(_));
    let log = LOG.get_or_init(|| Log::new(sink));
    let lines = tracing_subscriber::fmt::layer().with_target(false).with_ansi(false).with_writer(log);
    let lines = if plain { lines.without_time().with_level(false).boxed() } else { lines.boxed() };
    let _ = tracing_subscriber::registry().with(lines.with_filter(Limited(log)).with_filter(filter)).try_init();
    if let Some(e) = failure {
        tracing::warn!("cannot log to syslog at /dev/log: {e}: logging to stderr");
    }
}

/// From now on a thread writes the lines, and messages are limited. To be called in the process that serves.
///
/// # Errors
/// If there can be no thread.
pub fn detach() -> io::Result<()> {
    let Some(log) = LOG.get() else { return Ok(()) };
    let (lines, come) = sync_channel(LOG_QUEUE);
    std::thread::Builder::new().name("thruway-log".into()).spawn(move || log.write_all(&come))?;
    let _ = log.queue.set(lines);
    Ok(())
}

/// Waits until what was logged is written, or for a second.
pub fn flush() {
    let Some(queue) = LOG.get().and_then(|log| log.queue.get()) else { return };
    let (done, written) = sync_channel(1);
    if queue.try_send(Job::Flush(done)).is_ok() {
        let _ = written.recv_timeout(LAST_WORDS);
    }
}

struct Log {
    sink: Sink,
    /// To the log's thread, once there is one.
    queue: OnceLock<SyncSender<Job>>,
    limit: Mutex<Limit>,
    /// Lines that found no room in the queue, or that syslog did not take.
    lost: AtomicU64,
}

enum Job {
    Line(Line),
    /// Messages are being left out: their count is to be written in time.
    Count,
    Flush(SyncSender<()>),
}

struct Line {
    level: Level,
    text: Vec<u8>,
}

impl Log {
    fn new(sink: Sink) -> Self {
        Self { sink, queue: OnceLock::new(), limit: Mutex::default(), lost: AtomicU64::new(0) }
    }

    fn put(&self, line: Line) {
        let Some(queue) = self.queue.get() else { return self.write(&line) };
        if queue.try_send(Job::Line(line)).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn write(&self, line: &Line) {
        let written = match &self.sink {
            Sink::Stderr => io::stderr().write_all(&line.text),
            Sink::Syslog(syslog) => syslog.send(line),
        };
        if written.is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn write_all(&self, come: &Receiver<Job>) {
        // When what was left out is to be counted next.
        let mut due: Option<Instant> = None;
        loop {
            let job = match due {
                None => come.recv().map_err(RecvTimeoutError::from),
                Some(due) => come.recv_timeout(due.saturating_duration_since(Instant::now())),
            };
            match job {
                Ok(Job::Line(line)) => self.write(&line),
                Ok(Job::Count) => {}
                Ok(Job::Flush(done)) => {
                    self.write_counts(Instant::now() + LOG_PERIOD);
                    let _ = done.send(());
                }
                Err(RecvTimeoutError::Timeout) => {
                    due = None;
                    self.write_counts(Instant::now());
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let waits = self.lost.load(Ordering::Relaxed) > 0 || self.limit.lock().has_left_out();
            due = waits.then(|| due.unwrap_or_else(|| Instant::now() + LOG_PERIOD));
        }
    }

    /// Writes how many messages are missing.
    fn write_counts(&self, now: Instant) {
        let counts = self.limit.lock().take_left_out(now);
        let left_out = counts.into_iter().map(|(place, count)| {
            format!("{count} more messages like those from {place} were left out: there were too many at a time")
        });
        let lost = match self.lost.swap(0, Ordering::Relaxed) {
            0 => None,
            lost => Some(format!("{lost} log lines are lost: the log's reader is too slow")),
        };
        for text in left_out.chain(lost) {
            let text = match self.sink {
                Sink::Stderr => format!("thruwayd: {text}\n"),
                Sink::Syslog(_) => text,
            };
            self.write(&Line { level: Level::WARN, text: text.into_bytes() });
        }
    }
}

/// How many messages came from each place of the code.
#[derive(Default)]
struct Limit(HashMap<Identifier, Place>);

struct Place {
    name: String,
    /// When its present period began.
    since: Instant,
    let_through: u32,
    left_out: u64,
}

impl Limit {
    /// `None` if a message may pass; else how many were left out, this one included.
    fn left_out(&mut self, meta: &Metadata<'_>, now: Instant) -> Option<u64> {
        let place = self.0.entry(meta.callsite()).or_insert_with(|| {
            let name = format!("{}:{}", meta.file().unwrap_or(meta.target()), meta.line().unwrap_or(0));
            Place { name, since: now, let_through: 0, left_out: 0 }
        });
        // What was left out in a period ends with its count.
        if place.left_out == 0 && now.saturating_duration_since(place.since) >= LOG_PERIOD {
            (place.since, place.let_through) = (now, 0);
        }
        if place.let_through < LOG_BURST {
            place.let_through += 1;
            return None;
        }
        place.left_out += 1;
        Some(place.left_out)
    }

    fn has_left_out(&self) -> bool {
        self.0.values().any(|place| place.left_out > 0)
    }

    /// The places whose period is over by `now`, and how much each left out.
    fn take_left_out(&mut self, now: Instant) -> Vec<(String, u64)> {
        let over = |place: &&mut Place| place.left_out > 0 && now.saturating_duration_since(place.since) >= LOG_PERIOD;
        self.0
            .values_mut()
            .filter(over)
            .map(|place| {
                (place.since, place.let_through) = (now, 0);
                (place.name.clone(), std::mem::take(&mut place.left_out))
            })
            .collect()
    }
}

/// Lets through what [`Limit`] does. Who asks for debug messages gets all of them.
struct Limited(&'static Log);

impl<S> Filter<S> for Limited {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let Some(queue) = self.0.queue.get() else { return true };
        if *event.metadata().level() > Level::INFO {
            return true;
        }
        let left_out = self.0.limit.lock().left_out(event.metadata(), Instant::now());
        if left_out == Some(1) {
            // A full queue keeps the thread awake as well.
            let _ = queue.try_send(Job::Count);
        }
        left_out.is_none()
    }
}

enum Sink {
    Stderr,
    Syslog(Syslog),
}

/// Sends each event as a datagram of RFC 3164 to `/dev/log`.
struct Syslog {
    socket: UnixDatagram,
    /// The host's number of the process, which the one inside of the sandbox is not.
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

    fn send(&self, line: &Line) -> io::Result<()> {
        // LOG_ERR, LOG_WARNING, LOG_INFO and LOG_DEBUG of syslog(3).
        let severity = match line.level {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        };
        let mut datagram = format!("<{}>thruwayd[{}]: ", FACILITY | severity, self.pid).into_bytes();
        datagram.extend_from_slice(line.text.trim_ascii_end());
        self.socket.send(&datagram).map(drop)
    }
}

impl<'a> MakeWriter<'a> for &'static Log {
    type Writer = Message;

    fn make_writer(&'a self) -> Message {
        Message { log: self, level: Level::INFO }
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Message {
        Message { log: self, level: *meta.level() }
    }
}

/// One event; it comes in one write.
struct Message {
    log: &'static Log,
    level: Level,
}

impl Write for Message {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let mut line = text.get(..LOG_LINE).unwrap_or(text).to_vec();
        if line.len() < text.len() {
            line.push(b'\n');
        }
        self.log.put(Line { level: self.level, text: line });
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Callsite;

    impl tracing::callsite::Callsite for Callsite {
        fn set_interest(&self, _: tracing::subscriber::Interest) {}
        fn metadata(&self) -> &Metadata<'_> {
            &META
        }
    }

    static META: Metadata<'static> = tracing::metadata! {
        name: "event",
        target: "test",
        level: Level::ERROR,
        fields: &[],
        callsite: &Callsite,
        kind: tracing::metadata::Kind::EVENT,
    };

    #[test]
    fn a_flood_is_counted() {
        let (mut limit, start) = (Limit::default(), Instant::now());
        let send = |limit: &mut Limit, count: u32, at| {
            (0..count).filter(|_| limit.left_out(&META, at).is_none()).count() as u32
        };
        assert_eq!(send(&mut limit, LOG_BURST, start), LOG_BURST);
        assert!(!limit.has_left_out());
        assert_eq!(send(&mut limit, 1000, start), 0);
        assert!(limit.has_left_out() && limit.take_left_out(start).is_empty());
        // Nothing passes before the count is told.
        let later = start + LOG_PERIOD;
        assert_eq!(send(&mut limit, 1, later), 0);
        let counts = limit.take_left_out(later);
        assert_eq!(counts.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [1001]);
        assert!(counts[0].0.contains("log.rs:"), "{}", counts[0].0);
        assert_eq!(send(&mut limit, LOG_BURST + 1, later), LOG_BURST);
        assert_eq!(limit.take_left_out(later + LOG_PERIOD)[0].1, 1);
        // Few messages are never limited, however long they come.
        for period in 2..100 {
            assert_eq!(send(&mut limit, LOG_BURST, start + period * LOG_PERIOD), LOG_BURST, "{period}");
        }
    }

    #[test]
    fn a_slow_reader_loses_lines_and_hears_how_many() {
        let log = Log::new(Sink::Stderr);
        let (lines, come) = sync_channel(2);
        log.queue.set(lines).unwrap();
        (0..5).for_each(|_| log.put(Line { level: Level::WARN, text: vec![0; 10] }));
        assert_eq!(log.lost.load(Ordering::Relaxed), 3);
        assert_eq!(come.try_iter().count(), 2);
    }
}
