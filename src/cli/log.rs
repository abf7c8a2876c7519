//! The daemon's log, which goes to stderr or syslog.
//!
//! A guest can cause messages, so their rate is limited ([`LOG_BURST`]). A separate thread writes the lines
//! ([`detach`]), so that no thread which serves the guest waits for the log's reader.

use std::collections::HashMap;
use std::io::{self, Write};
use std::os::fd::RawFd;
use std::os::unix::net::UnixDatagram;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::fcntl_dupfd_cloexec;
use tracing::callsite::Identifier;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Context, Filter, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

use crate::limits::{LOG_BURST, LOG_LINE, LOG_PERIOD, LOG_QUEUE, Limit as Counted};

/// LOG_USER of syslog(3) in the position that it has in a message. virtiofsd uses the same facility.
const FACILITY: u8 = 1 << 3;

/// How long [`flush`] waits at most: the reader may have stopped reading. One second is enough for a reader that has
/// not.
const LAST_WORDS: Duration = Duration::from_secs(1);

static LOG: OnceLock<Log> = OnceLock::new();

static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// The lowest number of syslog's descriptor. It is the same in each program that takes over from another
/// (`supervise::take_over`), and above those that the program has at its start.
const SYSLOG_FD: RawFd = 40;

/// Starts the log. If syslog cannot be reached, the log goes to stderr and starts with a warning. `pid`: the process
/// ID that syslog gets. Inside the sandbox getpid(2) returns another one.
pub fn init(level: LevelFilter, syslog: bool, pid: u32) {
    // RUST_LOG comes first, as in virtiofsd.
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::default().add_directive(level.into()));
    let (sink, failure) = match syslog.then(|| Syslog::connect(pid)) {
        Some(Ok(syslog)) => (Sink::Syslog(syslog), None),
        Some(Err(e)) => (Sink::Stderr, Some(e)),
        None => (Sink::Stderr, None),
    };
    let plain = matches!(sink, Sink::Syslog(_));
    let log = LOG.get_or_init(|| Log::new(sink));
    let lines = tracing_subscriber::fmt::layer().with_target(false).with_ansi(false).with_writer(log);
    let lines = if plain { lines.without_time().with_level(false).boxed() } else { lines.boxed() };
    let (filter, handle) = reload::Layer::new(filter);
    let _ = FILTER.set(handle);
    let _ = tracing_subscriber::registry().with(lines.with_filter(Limited(log)).with_filter(filter)).try_init();
    if let Some(e) = failure {
        tracing::warn!("cannot log to syslog at /dev/log: {e}: logging to stderr");
    }
}

/// Sets the filter, if there is one, in the syntax of RUST_LOG. Returns the one in force.
///
/// # Errors
/// What is wrong with it, in one line.
pub fn filter(new: Option<&str>) -> Result<String, String> {
    let handle = FILTER.get().ok_or("there is no log")?;
    if let Some(new) = new {
        if new.is_empty() {
            return Err("the filter is empty: give a level such as info, or off".into());
        }
        // Without regular expressions, which could take long to match.
        let new = EnvFilter::builder().with_regex(false).parse(new).map_err(|e| format!("the filter: {e}"))?;
        handle.reload(new).map_err(|e| e.to_string())?;
    }
    handle.with_current(EnvFilter::to_string).map_err(|e| e.to_string())
}

/// Starts the thread that writes the lines, and the limit on messages. Call it in the process that serves: threads do
/// not survive fork(2).
///
/// # Errors
/// Those of starting a thread.
pub fn detach() -> io::Result<()> {
    let Some(log) = LOG.get() else { return Ok(()) };
    let (lines, come) = sync_channel(LOG_QUEUE);
    std::thread::Builder::new().name("thruway-log".into()).spawn(move || log.write_all(&come))?;
    let _ = log.queue.set(lines);
    Ok(())
}

/// Waits until all log lines are written, but at most one second.
pub fn flush() {
    let Some(queue) = LOG.get().and_then(|log| log.queue.get()) else { return };
    let (done, written) = sync_channel(1);
    if queue.try_send(Job::Flush(done)).is_ok() {
        let _ = written.recv_timeout(LAST_WORDS);
    }
}

struct Log {
    sink: Sink,
    /// Leads to the log's thread, once it runs.
    queue: OnceLock<SyncSender<Job>>,
    limit: Mutex<Limit>,
    /// Lines for which the queue had no room, or which could not be written.
    lost: AtomicU64,
}

enum Job {
    Line(Line),
    /// Messages are being left out: write their count when it is due.
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
            Counted::LogLines.reached();
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
        // When to write the counts next.
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

    /// Writes how many messages were left out or lost.
    fn write_counts(&self, now: Instant) {
        let counts = self.limit.lock().take_left_out(now);
        let left_out = counts
            .into_iter()
            .map(|(place, count)| format!("{count} more messages from {place} were left out: too many at a time"));
        let lost = match self.lost.swap(0, Ordering::Relaxed) {
            0 => None,
            lost => Some(format!("{lost} log lines were lost: the reader of the log is too slow")),
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

/// Counts the messages from each place of the code.
#[derive(Default)]
struct Limit(HashMap<Identifier, Place>);

struct Place {
    name: String,
    /// The start of its current period.
    since: Instant,
    let_through: u32,
    left_out: u64,
}

impl Limit {
    /// Returns `None` if a message may pass, or the number of messages left out, including this one.
    fn left_out(&mut self, meta: &Metadata<'_>, now: Instant) -> Option<u64> {
        let place = self.0.entry(meta.callsite()).or_insert_with(|| {
            let name = format!("{}:{}", meta.file().unwrap_or(meta.target()), meta.line().unwrap_or(0));
            Place { name, since: now, let_through: 0, left_out: 0 }
        });
        // A period in which messages were left out ends when their count is written.
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

    /// Returns the places whose period is over at `now`, each with the number of messages left out.
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

/// Applies [`Limit`] to messages at level info and above. Debug and trace messages all pass: somebody asked for them.
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
        left_out.inspect(|_| Counted::LogMessages.reached());
        if left_out == Some(1) {
            // If the queue is full, the thread is awake anyway.
            let _ = queue.try_send(Job::Count);
        }
        left_out.is_none()
    }
}

enum Sink {
    Stderr,
    Syslog(Syslog),
}

/// Sends each event to `/dev/log` as a datagram of RFC 3164.
///
/// The crate `syslog` would not do: it writes the time in UTC into each message, which syslog daemons read as local
/// time, and a full socket blocks it. A message without a time gets the right one from the syslog daemon.
struct Syslog {
    socket: UnixDatagram,
    /// The process ID on the host.
    pid: u32,
}

impl Syslog {
    fn connect(pid: u32) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.connect("/dev/log")?;
        // A line that syslog does not take now is lost, and counted.
        socket.set_nonblocking(true)?;
        // It fails if the process may have so few.
        let socket = fcntl_dupfd_cloexec(&socket, SYSLOG_FD).map_or(socket, UnixDatagram::from);
        Ok(Self { socket, pid })
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

/// One event. tracing-subscriber passes it in one write.
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
        // Nothing passes until the count is written.
        let later = start + LOG_PERIOD;
        assert_eq!(send(&mut limit, 1, later), 0);
        let counts = limit.take_left_out(later);
        assert_eq!(counts.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [1001]);
        assert!(counts[0].0.contains("log.rs:"), "{}", counts[0].0);
        assert_eq!(send(&mut limit, LOG_BURST + 1, later), LOG_BURST);
        assert_eq!(limit.take_left_out(later + LOG_PERIOD)[0].1, 1);
        // A low rate is never limited.
        for period in 2..100 {
            assert_eq!(send(&mut limit, LOG_BURST, start + period * LOG_PERIOD), LOG_BURST, "{period}");
        }
    }

    #[test]
    fn lines_that_a_slow_reader_loses_are_counted() {
        let log = Log::new(Sink::Stderr);
        let (lines, come) = sync_channel(2);
        log.queue.set(lines).unwrap();
        (0..5).for_each(|_| log.put(Line { level: Level::WARN, text: vec![0; 10] }));
        assert_eq!(log.lost.load(Ordering::Relaxed), 3);
        assert_eq!(come.try_iter().count(), 2);
    }
}
