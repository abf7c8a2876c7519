//! `thruway status` and `thruway top`.

use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{
    Block, BorderType, Cell, Padding, Paragraph, RenderDirection, Row, Sparkline, Table, TableState,
};
use signal_hook::consts::{SIGHUP, SIGTERM};
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
    let removed = if status.shared_dir_removed { " (removed on the host: start the daemon anew)" } else { "" };
    line("share", &format!("{}{removed}", status.shared_dir));
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
        true => {
            let not = match &status.watch.unwatched[..] {
                [] => String::new(),
                // The guest may have made the names.
                all => {
                    let all: Vec<_> = all.iter().map(|path| path.escape_debug().to_string()).collect();
                    format!(", not {} (no leases there)", all.join(" "))
                }
            };
            format!(", {} marks, {} files{not}", status.watch.marks, status.watch.nodes)
        }
        false => String::new(),
    };
    let agent = match status.agent.switch.on {
        true => format!(", {} changes repeated, {} not", status.agent.repeated, status.agent.failed),
        false => String::new(),
    };
    [
        ("DAX", &status.dax.switch, window(&status.dax)),
        ("passthrough", &status.passthrough.switch, window(&status.passthrough)),
        ("guard", &status.guard, String::new()),
        ("watch", &status.watch.switch, watch),
        ("guest agent", &status.agent.switch, agent),
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

/// Bytes a second, in few characters.
fn flow(value: f64) -> String {
    match value {
        v if v >= 1073741824.0 => format!("{:.1}G", v / 1073741824.0),
        v if v >= 1048576.0 => format!("{:.0}M", v / 1048576.0),
        0.0 => "0".into(),
        v => format!("{:.0}K", v / 1024.0),
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
            flow(self.rate("thruway_read_bytes_total", None)),
            flow(self.rate("thruway_written_bytes_total", None)),
            gauge("thruway_mappings"),
            gauge("thruway_queue_requests"),
            gauge("thruway_inodes"),
            gauge("thruway_handles"),
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
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| b.0.cmp(&a.0).reverse()));
        all
    }
}

/// The columns of the table of daemons. A narrow terminal shows the first ones.
const COLUMNS: [&str; 11] =
    ["PID", "SHARE", "REQ/S", "P50", "P99", "READ/S", "WRITE/S", "MAPPED", "QUEUED", "INODES", "OPEN"];
const WIDTHS: [u16; 11] = [7, 24, 6, 7, 7, 7, 7, 6, 6, 6, 6];
/// How many of them a narrow terminal shows, and how wide one is that shows all.
const FIRST: usize = 8;
const WIDE: u16 = 100;

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
    /// The process ID of the daemon that is shown in detail.
    selected: u32,
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
        if !self.seen.iter().any(|seen| seen.status.pid == self.selected) {
            self.selected = self.seen.first().map_or(0, |seen| seen.status.pid);
        }
    }

    /// Where the selected daemon stands.
    fn place(&self) -> usize {
        self.seen.iter().position(|seen| seen.status.pid == self.selected).unwrap_or(0)
    }

    fn select(&mut self, place: usize) {
        self.selected = self.seen.get(place).map_or(self.selected, |seen| seen.status.pid);
    }

    /// Takes a key. False: it ends.
    fn key(&mut self, code: KeyCode) -> bool {
        match code {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Up | KeyCode::Char('k') => self.select(self.place().saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.select(self.place() + 1),
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
        if let Some(seen) = self.seen.get(self.place()) {
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
            key("s", format!("sort, now by {}", self.order.name())),
        ];
        frame.render_widget(Line::from(keys.concat()), foot);
    }

    fn draw_daemons(&self, frame: &mut Frame, area: Rect) {
        let shown = if area.width < WIDE { FIRST } else { COLUMNS.len() };
        let others: u16 = WIDTHS[..shown].iter().sum::<u16>() - WIDTHS[1];
        // Beside the columns there are the gaps, the border and its padding.
        let share = usize::from(area.width.saturating_sub(others + shown as u16 + 3).max(8));
        let cell = |(n, text): (usize, String)| match n {
            1 => Cell::from(tail(&text, share)),
            _ => Cell::from(Line::from(text).right_aligned()),
        };
        let head = Row::new(COLUMNS[..shown].iter().map(|name| (*name).to_owned()).enumerate().map(cell)).bold();
        let rows = self.seen.iter().map(|seen| match &seen.error {
            None => Row::new(seen.columns().into_iter().take(shown).enumerate().map(cell)),
            Some(error) => {
                Row::new([seen.status.pid.to_string(), error.clone()].into_iter().enumerate().map(cell)).red()
            }
        });
        let mut widths = WIDTHS.map(Constraint::Length)[..shown].to_vec();
        widths[1] = Constraint::Min(8);
        let table = Table::new(rows, widths)
            .header(head)
            .row_highlight_style(Style::new().bg(Color::DarkGray).bold())
            .block(block(format!("Daemons, by {}", self.order.name())));
        let mut state = TableState::default().with_selected(Some(self.place()));
        frame.render_stateful_widget(table, area, &mut state);
    }

    fn draw_graph(&self, frame: &mut Frame, area: Rect, seen: &Seen) {
        let history: Vec<_> = self.history.get(&seen.status.pid).into_iter().flatten().copied().collect();
        let most = short(history.iter().copied().max().unwrap_or(0) as f64);
        let title = format!("Requests/s of process {}: {}, {most} at most", seen.status.pid, short(seen.requests()));
        // The newest stands on the right.
        let graph = Sparkline::default().data(&history).direction(RenderDirection::RightToLeft);
        frame.render_widget(graph.style(Color::Cyan).block(block(title)), area);
    }
}

fn block(title: String) -> Block<'static> {
    let title = Span::from(format!(" {title} ")).fg(Color::Gray).bold();
    Block::bordered()
        .border_type(BorderType::Rounded)
        .border_style(Color::DarkGray)
        .title(title)
        .padding(Padding::horizontal(1))
}

/// The end of a path that is too long.
fn tail(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.to_owned();
    }
    format!("…{}", text.chars().skip(length + 1 - width).collect::<String>())
}

fn draw_opcodes(frame: &mut Frame, area: Rect, seen: &Seen) {
    let all = seen.requests().max(1e-9);
    let wide = area.width >= 66;
    // A narrow terminal shows neither the sums nor the bar.
    let fits = move |(n, _): &(usize, Cell)| wide || ![2, 6].contains(n);
    let right = |text: String| Cell::from(Line::from(text).right_aligned());
    let row = |cells: Vec<Cell<'static>>| Row::new(cells.into_iter().enumerate().filter(fits).map(|(_, cell)| cell));
    let rows = seen.opcodes().into_iter().map(|(opcode, rate, figures)| {
        let bar = "▆".repeat((rate / all * 12.0).round() as usize);
        row([Cell::from(opcode)].into_iter().chain(figures.map(right)).chain([Cell::from(bar.cyan())]).collect())
    });
    let head = ["PER S", "IN ALL", "ERRORS", "P50", "P99", ""].map(|name| right(name.to_owned()));
    let head = row([Cell::from("REQUEST")].into_iter().chain(head).collect()).bold();
    let widths = [13, 6, 6, 6, 7, 7, 12].map(Constraint::Length).into_iter().enumerate();
    let widths = widths.filter(|(n, _)| wide || ![2, 6].contains(n)).map(|(_, width)| width);
    frame.render_widget(Table::new(rows, widths).header(head).block(block("Requests".into())), area);
}

/// Room for a name in the state.
const NAME: usize = 15;

fn draw_state(frame: &mut Frame, area: Rect, seen: &Seen) {
    let of = |name: &str| seen.now.of(name, None);
    let pair = |a: &str, b: &str| Span::from(format!("{} of {}", short(of(a)), short(of(b))));
    let says = |(name, switch, more): (_, &Switch, String)| {
        let says = Span::from(on(switch) + &more);
        (name, if switch.on { says.green() } else { says.dim() })
    };
    let figures = [
        ("up", long(seen.status.uptime_s).into()),
        ("inodes", pair("thruway_inodes", "thruway_inodes_limit")),
        ("descriptors", pair("thruway_descriptors", "thruway_descriptors_limit")),
        ("mappings", pair("thruway_mappings", "thruway_mappings_limit")),
        ("limits reached", short(of("thruway_limit_reached_total")).into()),
        ("at its limit", pair("thruway_limited_requests_waiting", "thruway_limited_requests_total")),
    ];
    let width = usize::from(area.width).saturating_sub(NAME + 4).max(8);
    let mut switches = switches(&seen.status);
    // What is off takes more lines, which may not all fit.
    switches.sort_by_key(|(_, switch, _)| !switch.on);
    let lines = figures.into_iter().chain(switches.map(says)).flat_map(|(name, says)| {
        wrap(&says.content, width).into_iter().enumerate().map(move |(n, part)| {
            let name = format!("{:NAME$}", if n == 0 { name } else { "" });
            Line::from(vec![Span::from(name).fg(Color::Gray), Span::styled(part, says.style)])
        })
    });
    let title = tail(&seen.status.shared_dir, width);
    frame.render_widget(Paragraph::new(lines.collect::<Vec<_>>()).block(block(title)), area);
}

/// Lines of at most `width` characters, if no word is longer.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => *line += &format!(" {word}"),
            _ => lines.push(word.to_owned()),
        }
    }
    lines
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

/// How often it looks for a signal while no key is pressed.
const SIGNALS: Duration = Duration::from_millis(200);

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    top: &mut Top,
    options: &TopOptions,
    delay: Duration,
) -> std::io::Result<()> {
    // A signal ends it in order too: the terminal would otherwise stay as it is.
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, ended.clone())?;
    }
    loop {
        // Daemons come and go.
        top.look(&daemons::find(options.which.as_deref()).unwrap_or_default());
        let next = Instant::now() + delay;
        loop {
            terminal.draw(|frame| top.draw(frame))?;
            let left = next.saturating_duration_since(Instant::now());
            let pressed = event::poll(left.min(SIGNALS))?;
            if ended.load(Ordering::Relaxed) {
                return Ok(());
            }
            if !pressed && left.is_zero() {
                break;
            }
            if !pressed {
                continue;
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
            "thruway_requests_total{{opcode=\"READ\"}} {reads}\nthruway_requests_total{{opcode=\"INIT\"}} 1\n\
             thruway_request_seconds_bucket{{le=\"0.000064\",opcode=\"READ\"}} {reads}\n\
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
            ["2 daemons", "/srv/7", "/srv/8", "2000", "64 µs", "READ", "off: it needs Linux 6.14", "by requests"]
        {
            assert!(shown.contains(words), "{words}: {shown}");
        }
        assert!(shown.find("/srv/8") < shown.find("/srv/7"), "{shown}");
        assert!(shown.contains("Requests/s of process 8"));
        assert!(top.key(KeyCode::Down) && top.key(KeyCode::Down));
        assert!(screen(&top, 120, 30).contains("Requests/s of process 7"));
        let narrow = screen(&top, 80, 24);
        assert!(narrow.contains("WRITE/S") && !narrow.contains("INODES"), "{narrow}");
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
        assert!(text.lines().any(|line| line.trim_start().starts_with("READ ")), "{text}");
    }

    #[test]
    fn a_status_says_why_something_is_off() {
        let text = describe(&seen(7, 1).status);
        assert!(text.contains("guard          off: it needs Linux 6.14"), "{text}");
    }
}
