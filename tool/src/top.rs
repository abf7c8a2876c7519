//! `thruway status` and `thruway top`.

use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row, Sparkline, Table, TableState};
use thruway::control::api::{Status, Switch};

use crate::Result;
use crate::daemons::{self, Counters, Daemon};

/// The options of `thruway status`.
#[derive(clap::Args)]
pub struct StatusOptions {
    /// A daemon's process ID or control socket [default: all daemons of this host]
    #[arg(value_name = "PID|SOCKET")]
    which: Option<String>,

    /// Print what the daemon says: a line of JSON for each
    #[arg(long)]
    json: bool,
}

/// The options of `thruway top`.
#[derive(clap::Args)]
pub struct TopOptions {
    /// A daemon's process ID or control socket [default: all daemons of this host]
    #[arg(value_name = "PID|SOCKET")]
    which: Option<String>,

    /// Print plain text instead of using the whole terminal; the first figures are averages since the daemon's start
    #[arg(long)]
    batch: bool,

    /// End after N times (with --batch)
    #[arg(short = 'n', long, value_name = "N", requires = "batch")]
    iterations: Option<u64>,

    /// Seconds between two looks
    #[arg(short, long, value_name = "SECONDS", default_value_t = 1.0, value_parser = delay)]
    delay: f64,
}

fn delay(text: &str) -> std::result::Result<f64, String> {
    text.parse().ok().filter(|delay| (0.1..=3600.0).contains(delay)).ok_or_else(|| "give 0.1 to 3600 seconds".into())
}

/// Prints the status of daemons.
pub fn status(options: &StatusOptions) -> Result {
    for (n, daemon) in daemons::find(options.which.as_deref())?.iter().enumerate() {
        let text = match options.json {
            true => daemon.text("/status")?.trim().to_owned() + "\n",
            false => "\n".repeat(n.min(1)) + &describe(&daemon.get("/status")?),
        };
        print!("{text}");
    }
    Ok(ExitCode::SUCCESS)
}

/// A daemon's status for people.
fn describe(status: &Status) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| writeln!(text, "{name:14} {value}").unwrap_or(());
    line("share", &status.shared_dir);
    line("daemon", &format!("thruwayd {}, process {}, up {}", status.version, status.pid, long(status.uptime_s)));
    line("socket", status.socket.as_deref().unwrap_or("given by --fd"));
    let queues = |frontend: &thruway::control::api::Frontend| {
        let running = frontend.queues.iter().filter(|queue| queue.running && queue.role == "request").count();
        let broken = frontend.queues.iter().filter(|queue| queue.broken).count();
        format!(
            "connected, {running} request queues in use{}",
            if broken > 0 { format!(", {broken} broken") } else { String::new() }
        )
    };
    line("frontend", &status.frontend.as_ref().map_or("none is connected".into(), queues));
    let minor = |guest: &thruway::control::api::Guest| {
        let minor =
            guest.minor.map_or("FUSE version unknown, since it migrated".into(), |minor| format!("FUSE 7.{minor}"));
        format!("{minor}, cache {}", status.options.get("cache").map_or("?", String::as_str))
    };
    line("guest", &status.guest.as_ref().map_or("has not mounted the share".into(), minor));
    for (name, switch, more) in switches(status) {
        line(name, &(on(switch) + &more));
    }
    if status.migration.state != "none" {
        line("migration", &format!("{} {}", status.migration.state, status.migration.error.as_deref().unwrap_or("")));
    }
    if status.held {
        line("held", "the queues wait, by POST /drain");
    }
    text
}

/// What can be on or off, with details.
fn switches(status: &Status) -> [(&'static str, &Switch, String); 7] {
    let window = |window: &thruway::control::api::Window| match window.switch.on {
        true => format!(", {}, {} mappings", bytes(window.size as f64), window.mappings),
        false => String::new(),
    };
    let watch = match status.watch.switch.on {
        true => format!(", {} marks, {} files", status.watch.marks, status.watch.nodes),
        false => String::new(),
    };
    [
        ("DAX", &status.dax.switch, window(&status.dax)),
        ("passthrough", &status.passthrough.switch, window(&status.passthrough)),
        ("guard", &status.guard, String::new()),
        ("watch", &status.watch.switch, watch),
        ("notifications", &status.notifications, String::new()),
        ("file handles", &status.file_handles, String::new()),
        ("io_uring", &status.io_uring, String::new()),
    ]
}

fn on(switch: &Switch) -> String {
    match (switch.on, &switch.why) {
        (true, _) => "on".into(),
        (false, Some(why)) => format!("off: {why}"),
        (false, None) => "off".into(),
    }
}

/// A number with three digits or so.
fn short(value: f64) -> String {
    match value {
        v if v >= 1e9 => format!("{:.1}G", v / 1e9),
        v if v >= 1e6 => format!("{:.1}M", v / 1e6),
        v if v >= 1e4 => format!("{:.0}k", v / 1e3),
        // The sum of nothing is -0.
        v if v >= 10.0 || v.fract() == 0.0 => format!("{:.0}", v + 0.0),
        v => format!("{v:.1}"),
    }
}

fn bytes(value: f64) -> String {
    match value {
        v if v >= 1073741824.0 => format!("{:.1} GiB", v / 1073741824.0),
        v if v >= 1048576.0 => format!("{:.1} MiB", v / 1048576.0),
        v if v >= 1024.0 => format!("{:.0} KiB", v / 1024.0),
        v => format!("{v:.0} B"),
    }
}

/// A latency.
fn took(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".into(),
        Some(s) if s >= 1.0 => format!("{s:.1} s"),
        Some(s) if s >= 0.001 => format!("{:.1} ms", s * 1e3),
        Some(s) => format!("{:.0} µs", s * 1e6),
    }
}

/// A time of running.
fn long(seconds: f64) -> String {
    let s = seconds as u64;
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min", s / 60),
        3600..86400 => format!("{} h {} min", s / 3600, s / 60 % 60),
        _ => format!("{} d {} h", s / 86400, s / 3600 % 24),
    }
}

/// What a daemon did between two looks.
#[derive(Clone, Debug, Default)]
struct Seen {
    status: Status,
    now: Counters,
    before: Counters,
    /// Seconds between them.
    seconds: f64,
    /// Why there is no answer.
    error: Option<String>,
}

impl Seen {
    fn rate(&self, name: &str, label: Option<(&str, &str)>) -> f64 {
        ((self.now.of(name, label) - self.before.of(name, label)) / self.seconds.max(1e-9)).max(0.0)
    }

    fn requests(&self) -> f64 {
        self.rate("thruway_requests_total", None)
    }

    fn data(&self) -> f64 {
        self.rate("thruway_read_bytes_total", None) + self.rate("thruway_written_bytes_total", None)
    }

    fn latency(&self, opcode: Option<&str>, part: f64) -> Option<f64> {
        self.now.quantile(&self.before, opcode, part)
    }

    /// A line of the table of daemons.
    fn columns(&self) -> [String; 11] {
        let gauge = |name| short(self.now.of(name, None));
        [
            self.status.pid.to_string(),
            self.status.shared_dir.clone(),
            short(self.requests()),
            took(self.latency(None, 0.5)),
            took(self.latency(None, 0.99)),
            bytes(self.rate("thruway_read_bytes_total", None)) + "/s",
            bytes(self.rate("thruway_written_bytes_total", None)) + "/s",
            gauge("thruway_queue_requests"),
            gauge("thruway_inodes"),
            gauge("thruway_handles"),
            gauge("thruway_mappings"),
        ]
    }

    /// Opcodes with requests at this time, the most frequent first: name, requests a second, in all, errors, latencies.
    fn opcodes(&self) -> Vec<(String, f64, [String; 5])> {
        let of = |opcode: &str| {
            let label = Some(("opcode", opcode));
            let total = self.now.of("thruway_requests_total", label);
            let rate = self.rate("thruway_requests_total", label);
            let errors = self.now.of("thruway_request_errors_total", label);
            let latency = |part| took(self.latency(Some(opcode), part));
            (total > 0.0).then(|| {
                (opcode.to_owned(), rate, [short(rate), short(total), short(errors), latency(0.5), latency(0.99)])
            })
        };
        let mut all: Vec<_> = self.now.values("thruway_requests_total", "opcode").into_iter().filter_map(of).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all
    }
}

const COLUMNS: [&str; 11] =
    ["PID", "SHARE", "REQ/S", "P50", "P99", "READ", "WRITTEN", "QUEUED", "INODES", "OPEN", "MAPPED"];
const WIDTHS: [u16; 11] = [8, 20, 7, 8, 8, 12, 12, 7, 7, 6, 7];

/// What the daemons are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Order {
    #[default]
    Requests,
    Latency,
    Data,
    Pid,
}

impl Order {
    const fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Latency => "latency",
            Self::Data => "data",
            Self::Pid => "PID",
        }
    }

    const fn next(self) -> Self {
        match self {
            Self::Requests => Self::Latency,
            Self::Latency => Self::Data,
            Self::Data => Self::Pid,
            Self::Pid => Self::Requests,
        }
    }
}

/// Looks that the graph shows: more than a terminal is wide.
const HISTORY: usize = 300;

/// All that is shown.
#[derive(Default)]
struct Top {
    seen: Vec<Seen>,
    looked: HashMap<Daemon, (Instant, Counters)>,
    history: HashMap<u32, VecDeque<u64>>,
    order: Order,
    selected: usize,
}

impl Top {
    /// Looks at the daemons.
    fn look(&mut self, daemons: &[Daemon]) {
        self.seen = daemons.iter().map(|daemon| self.look_at(daemon)).collect();
        for seen in self.seen.iter().filter(|seen| seen.error.is_none()) {
            let history = self.history.entry(seen.status.pid).or_default();
            history.push_front(seen.requests() as u64);
            history.truncate(HISTORY);
        }
        self.looked.retain(|daemon, _| daemons.contains(daemon));
        self.sort();
    }

    fn look_at(&mut self, daemon: &Daemon) -> Seen {
        let status = daemon.get::<Status>("/status");
        let answer = status.and_then(|status| Ok((status, Counters::read(&daemon.text("/metrics")?))));
        match answer {
            Ok((status, now)) => {
                let moment = Instant::now();
                let last = self.looked.insert(daemon.clone(), (moment, now.clone()));
                let (seconds, before) = match last {
                    Some((then, before)) => ((moment - then).as_secs_f64(), before),
                    None => (status.uptime_s, Counters::default()),
                };
                Seen { status, now, before, seconds, error: None }
            }
            Err(error) => {
                Seen { status: Status { pid: daemon.pid, ..Status::default() }, error: Some(error), ..Seen::default() }
            }
        }
    }

    fn sort(&mut self) {
        let order = self.order;
        let latency = |seen: &Seen| seen.latency(None, 0.99).unwrap_or(0.0);
        self.seen.sort_by(|a, b| match order {
            Order::Requests => b.requests().total_cmp(&a.requests()),
            Order::Latency => latency(b).total_cmp(&latency(a)),
            Order::Data => b.data().total_cmp(&a.data()),
            Order::Pid => a.status.pid.cmp(&b.status.pid),
        });
        self.selected = self.selected.min(self.seen.len().saturating_sub(1));
    }

    /// Takes a key. False: it ends.
    fn key(&mut self, code: KeyCode) -> bool {
        match code {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Up | KeyCode::Char('k') => self.selected = self.selected.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.selected += 1,
            KeyCode::Char('s') => self.order = self.order.next(),
            _ => {}
        }
        self.sort();
        true
    }

    /// Plain text.
    fn plain(&self) -> String {
        let mut text = String::new();
        let mut line = |cells: &[String]| {
            let cells: Vec<_> =
                cells.iter().zip(WIDTHS).map(|(cell, width)| format!("{cell:>w$}", w = width.into())).collect();
            let _ = writeln!(text, "{}", cells.join(" ").trim_end());
        };
        line(&COLUMNS.map(str::to_owned));
        for seen in &self.seen {
            match &seen.error {
                None => line(&seen.columns()),
                Some(error) => line(&[seen.status.pid.to_string(), error.clone()]),
            }
            for (opcode, _, figures) in seen.opcodes() {
                let [rate, _, _, half, most] = figures;
                line(&[String::new(), opcode, rate, half, most]);
            }
        }
        text
    }

    fn draw(&self, frame: &mut Frame) {
        let rows = u16::try_from(self.seen.len()).unwrap_or(u16::MAX).saturating_add(3);
        let area = frame.area();
        let parts = [
            Constraint::Length(1),
            Constraint::Length(rows.min(area.height / 3).max(4)),
            Constraint::Length(7),
            Constraint::Min(3),
            Constraint::Length(1),
        ];
        let [head, daemons, graph, details, foot] = Layout::vertical(parts).areas(area);
        let all: f64 = self.seen.iter().map(Seen::requests).sum();
        let n = self.seen.len();
        let title = format!(" {n} daemon{}   {} requests/s", if n == 1 { "" } else { "s" }, short(all));
        frame.render_widget(Line::from(vec![" thruway top".bold().cyan(), title.into()]), head);
        self.draw_daemons(frame, daemons);
        if let Some(seen) = self.seen.get(self.selected) {
            self.draw_graph(frame, graph, seen);
            let [left, right] =
                Layout::horizontal([Constraint::Percentage(58), Constraint::Percentage(42)]).areas(details);
            draw_opcodes(frame, left, seen);
            draw_state(frame, right, seen);
        }
        let key = |key: &'static str, what: String| {
            [Span::from(format!(" {key} ")).reversed(), Span::from(format!(" {what}  "))]
        };
        let keys = [
            key("q", "quit".into()),
            key("↑↓", "select".into()),
            key("s", format!("sort by {}", self.order.next().name())),
        ];
        frame.render_widget(Line::from(keys.concat()), foot);
    }

    fn draw_daemons(&self, frame: &mut Frame, area: Rect) {
        let head = Row::new(COLUMNS.iter().enumerate().map(|(n, name)| aligned(n, (*name).to_owned()))).bold();
        let rows = self.seen.iter().map(|seen| match &seen.error {
            None => Row::new(seen.columns().into_iter().enumerate().map(|(n, cell)| aligned(n, cell))),
            Some(error) => Row::new([Cell::from(seen.status.pid.to_string()), Cell::from(error.clone())]).red(),
        });
        let mut widths = WIDTHS.map(Constraint::Length);
        widths[1] = Constraint::Min(12);
        let table =
            Table::new(rows, widths).header(head).row_highlight_style(Style::new().bg(Color::DarkGray).bold()).block(
                Block::bordered().border_style(Color::DarkGray).title(format!(" Daemons, by {} ", self.order.name())),
            );
        let mut state = TableState::default().with_selected(Some(self.selected));
        frame.render_stateful_widget(table, area, &mut state);
    }

    fn draw_graph(&self, frame: &mut Frame, area: Rect, seen: &Seen) {
        let history: Vec<_> = self.history.get(&seen.status.pid).into_iter().flatten().copied().collect();
        let most = short(history.iter().copied().max().unwrap_or(0) as f64);
        let block = Block::bordered().border_style(Color::DarkGray);
        let title = format!(" Requests/s of {}: {}, {most} at most ", seen.status.pid, short(seen.requests()));
        // The newest stands on the right.
        let graph = Sparkline::default().data(&history).direction(ratatui::widgets::RenderDirection::RightToLeft);
        frame.render_widget(graph.style(Color::Cyan).block(block.title(title)), area);
    }
}

/// A cell: names to the left, numbers to the right.
fn aligned(column: usize, text: String) -> Cell<'static> {
    let line = Line::from(text);
    Cell::from(if column == 1 { line } else { line.right_aligned() })
}

fn draw_opcodes(frame: &mut Frame, area: Rect, seen: &Seen) {
    let all = seen.requests().max(1e-9);
    let rows = seen.opcodes().into_iter().map(|(opcode, rate, figures)| {
        let bar = "█".repeat((rate / all * 12.0).round() as usize);
        let figures = figures.into_iter().map(|text| Cell::from(Line::from(text).right_aligned()));
        Row::new([Cell::from(opcode)].into_iter().chain(figures).chain([Cell::from(bar.cyan())]))
    });
    let head = ["REQUEST", "PER S", "IN ALL", "ERRORS", "P50", "P99"].into_iter().enumerate();
    let head =
        head.map(|(n, name)| if n == 0 { Cell::from(name) } else { Cell::from(Line::from(name).right_aligned()) });
    let widths = [16, 7, 7, 7, 8, 8, 12].map(Constraint::Length);
    let block = Block::bordered().border_style(Color::DarkGray).title(" Requests ");
    frame.render_widget(Table::new(rows, widths).header(Row::new(head).bold()).block(block), area);
}

fn draw_state(frame: &mut Frame, area: Rect, seen: &Seen) {
    let name = |name: &str| Span::from(format!("{name:14}")).dim();
    let mut lines = Vec::new();
    let of = |name: &str| seen.now.of(name, None);
    let pair = |a: &str, b: &str| format!("{} of {}", short(of(a)), short(of(b)));
    lines.push(Line::from(vec![name("up"), long(seen.status.uptime_s).into()]));
    lines.push(Line::from(vec![name("inodes"), pair("thruway_inodes", "thruway_inodes_limit").into()]));
    lines.push(Line::from(vec![name("descriptors"), pair("thruway_descriptors", "thruway_descriptors_limit").into()]));
    lines.push(Line::from(vec![name("mappings"), pair("thruway_mappings", "thruway_mappings_limit").into()]));
    lines.push(Line::from(vec![name("notifications"), short(of("thruway_notifications_total")).into()]));
    lines.push(Line::from(vec![name("limits hit"), short(of("thruway_limit_reached_total")).into()]));
    for (what, switch, more) in switches(&seen.status) {
        let says = Span::from(on(switch) + &more);
        lines.push(Line::from(vec![name(what), if switch.on { says.green() } else { says.dim() }]));
    }
    let block = Block::bordered().border_style(Color::DarkGray).title(format!(" {} ", seen.status.shared_dir));
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

/// Shows what daemons do.
pub fn top(options: &TopOptions) -> Result {
    let mut daemons = daemons::find(options.which.as_deref())?;
    let delay = Duration::from_secs_f64(options.delay);
    let mut top = Top::default();
    if options.batch {
        for n in 0.. {
            if options.iterations.is_some_and(|all| n >= all) {
                break;
            }
            if n > 0 {
                std::thread::sleep(delay);
                daemons = daemons::find(options.which.as_deref())?;
            }
            top.look(&daemons);
            println!("{}", top.plain());
        }
        return Ok(ExitCode::SUCCESS);
    }
    if !std::io::stdout().is_terminal() {
        return Err("thruway top needs a terminal: use --batch, with -n N for N times".into());
    }
    let mut terminal = ratatui::init();
    let result = watch(&mut terminal, &mut top, options, delay);
    ratatui::restore();
    result.map(|()| ExitCode::SUCCESS).map_err(|e| format!("cannot use the terminal: {e}: use --batch"))
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    top: &mut Top,
    options: &TopOptions,
    delay: Duration,
) -> std::io::Result<()> {
    loop {
        // Daemons come and go.
        top.look(&daemons::find(options.which.as_deref()).unwrap_or_default());
        let next = Instant::now() + delay;
        loop {
            terminal.draw(|frame| top.draw(frame))?;
            if !event::poll(next.saturating_duration_since(Instant::now()))? {
                break;
            }
            if let Event::Key(key) = event::read()? {
                let interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
                if key.kind == KeyEventKind::Press && (interrupt || !top.key(key.code)) {
                    return Ok(());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn seen(pid: u32, reads: u32) -> Seen {
        let text = format!(
            "thruway_requests_total{{opcode=\"Read\"}} {reads}\nthruway_requests_total{{opcode=\"Init\"}} 1\n\
             thruway_request_seconds_bucket{{le=\"0.000064\",opcode=\"Read\"}} {reads}\n\
             thruway_read_bytes_total {}\nthruway_inodes 12\nthruway_mappings{{window=\"dax\"}} 3\n",
            reads * 4096
        );
        let mut status = Status { pid, shared_dir: format!("/srv/{pid}"), ..Status::default() };
        status.guard.why = Some("it needs Linux 6.14".into());
        Seen { status, now: Counters::read(&text), seconds: 2.0, ..Seen::default() }
    }

    fn screen(top: &Top, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| top.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn the_screen_shows_all_daemons_and_one_in_detail() {
        let mut top = Top { seen: vec![seen(7, 100), seen(8, 4000)], ..Top::default() };
        top.sort();
        let shown = screen(&top, 120, 30);
        for words in
            ["2 daemons", "/srv/7", "/srv/8", "2000", "64 µs", "Read", "off: it needs Linux 6.14", "sort by latency"]
        {
            assert!(shown.contains(words), "{words}: {shown}");
        }
        assert!(shown.find("/srv/8") < shown.find("/srv/7"), "{shown}");
        assert!(shown.contains("Requests/s of 8"));
        assert!(top.key(KeyCode::Down) && top.key(KeyCode::Down));
        assert!(screen(&top, 120, 30).contains("Requests/s of 7"));
        (0..3).for_each(|_| assert!(top.key(KeyCode::Char('s'))));
        assert_eq!((top.order, top.seen[0].status.pid), (Order::Pid, 7));
        assert!(!top.key(KeyCode::Char('q')));
        // Nothing panics in a small terminal, or without daemons.
        for (width, height) in [(1, 1), (20, 5), (80, 24)] {
            screen(&top, width, height);
            screen(&Top::default(), width, height);
        }
    }

    #[test]
    fn plain_text_has_a_line_for_each_daemon() {
        let top = Top { seen: vec![seen(7, 100)], ..Top::default() };
        let text = top.plain();
        let words: Vec<_> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(words[..4], ["7", "/srv/7", "50", "64"], "{text}");
        assert!(text.lines().any(|line| line.trim_start().starts_with("Read ")), "{text}");
    }

    #[test]
    fn a_status_says_why_something_is_off() {
        let text = describe(&seen(7, 1).status);
        assert!(text.contains("guard          off: it needs Linux 6.14"), "{text}");
    }
}
