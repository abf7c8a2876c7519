//! Measures daemons without a guest, as `thruway-bench` does.

use std::fmt::Write;
use std::time::Duration;

use thruway_bench::daemon::Daemon;
use thruway_bench::report::{Figures, Row, markdown};
use thruway_bench::series::number;
use thruway_bench::{Plan, Session};

use crate::host::{self, Result};

/// virtiofsd's settings, of which the better one counts in each row; then thruwayd.
const CONTENDERS: [&str; 3] = ["virtiofsd --thread-pool-size=0", "virtiofsd --thread-pool-size=4", "thruwayd"];

pub struct Table {
    pub name: &'static str,
    pub title: &'static str,
    arguments: &'static str,
    /// How long the frontend polls before it sleeps.
    halt_poll: Duration,
    rows: &'static [Wanted],
}

/// A row and its targets, as ratios to virtiofsd.
struct Wanted {
    workload: &'static str,
    depth: usize,
    /// At least this ratio of operations per second. 0: no target.
    rate: f64,
    /// At most this ratio of CPU time per request.
    cpu: f64,
    /// At most this ratio of the 99th percentile of an operation's time.
    p99: f64,
}

const fn wanted(workload: &'static str, depth: usize, rate: f64) -> Wanted {
    let cpu = if rate > 0.0 { 0.6 } else { f64::INFINITY };
    Wanted { workload, depth, rate, cpu, p99: f64::INFINITY }
}

const ROWS: &[Wanted] = &[
    wanted("getattr", 1, 2.0),
    wanted("lookup", 1, 2.0),
    wanted("lookup-new", 1, 0.0),
    wanted("open", 1, 0.0),
    wanted("create", 1, 1.8),
    wanted("readdirplus", 1, 4.0),
    wanted("statfs", 1, 0.0),
    wanted("compile", 1, 0.0),
    wanted("randread-4k", 1, 1.8),
    wanted("randwrite-4k", 1, 0.0),
    wanted("read-128k", 1, 0.0),
    wanted("write-128k", 1, 0.0),
    wanted("read-1m", 1, 1.3),
    wanted("write-1m", 1, 1.3),
    wanted("getattr", 32, 2.5),
    wanted("lookup", 32, 2.5),
    wanted("open", 32, 2.5),
    wanted("create", 32, 0.0),
    wanted("compile", 32, 0.0),
    wanted("randread-4k", 32, 2.5),
    wanted("randwrite-4k", 32, 0.0),
    Wanted { workload: "getattr-beside-write", depth: 5, rate: 0.0, cpu: f64::INFINITY, p99: 0.2 },
];

pub const TABLES: &[Table] = &[
    Table {
        name: "frontend",
        title: "Without a guest, sandbox none",
        arguments: "--sandbox none --seccomp none",
        halt_poll: Duration::ZERO,
        rows: ROWS,
    },
    Table {
        name: "frontend-default",
        title: "Without a guest, sandbox and seccomp as by default",
        arguments: "",
        halt_poll: Duration::ZERO,
        rows: ROWS,
    },
    Table {
        name: "frontend-kvm",
        title: "Without a guest, CPUs that halt as with KVM, sandbox none",
        arguments: "--sandbox none --seccomp none",
        // KVM_HALT_POLL_NS_DEFAULT (arch/x86/include/asm/kvm_host.h)
        halt_poll: Duration::from_micros(200),
        rows: ROWS,
    },
];

/// Measures a table's rows. In each round every contender has its turn.
pub fn measure(table: &Table, rounds: u32, time: Duration) -> Result<Vec<Row>> {
    let deepest = table.rows.iter().map(|row| row.depth).max().unwrap_or(1);
    let (virtiofsd, thruwayd) = (host::virtiofsd()?, host::thruwayd()?);
    let open = |contender: &&str| {
        let command = contender.replace("virtiofsd", &virtiofsd).replace("thruwayd", &thruwayd);
        let fixed = "--socket-path {socket} --shared-dir {share} --log-level error";
        Session::open(Daemon::start(&format!("{command} {fixed} {}", table.arguments))?, 1, deepest, table.halt_poll)
    };
    let mut sessions = CONTENDERS.iter().map(open).collect::<Result<Vec<_>>>()?;
    let mut rows = Vec::new();
    for wanted in table.rows {
        let plan = Plan { queues: 1, depth: wanted.depth, every: None, warm_up: time / 5, time };
        let mut row = Row {
            workload: wanted.workload.into(),
            depth: wanted.depth,
            figures: CONTENDERS.iter().map(|_| Figures::default()).collect(),
        };
        for _ in 0..rounds {
            for (session, figures) in sessions.iter_mut().zip(&mut row.figures) {
                figures.push(&session.measure(wanted.workload, &plan)?);
            }
        }
        println!("    {}", cells(&row, wanted).join(", "));
        rows.push(row);
    }
    Ok(rows)
}

/// The table in Markdown, with the targets that its ratios meet or miss.
pub fn text(table: &Table, rows: &[Row]) -> String {
    let head = ["", "virtiofsd, ops/s", "thruwayd, ops/s", "ops/s", "CPU/request", "p50 µs", "p99"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    lines.extend(rows.iter().zip(table.rows).map(|(row, wanted)| cells(row, wanted)));
    markdown(&lines) + "\n"
}

fn cells(row: &Row, wanted: &Wanted) -> Vec<String> {
    let (ours, theirs) = row.figures.split_last().expect("there are contenders");
    let base = theirs.iter().reduce(|a, b| better(a, b, wanted)).expect("there are contenders");
    let (rate, cpu, p99) = (ours.ops.over(&base.ops), ours.cpu.over(&base.cpu), ours.p99.over(&base.p99));
    let told = |met: bool| if met { "met" } else { "**missed**" };
    let mut cells = vec![
        row.title(),
        number(base.ops.median()),
        number(ours.ops.median()),
        rate.to_string(),
        cpu.to_string(),
        format!("{} / {}", number(ours.p50.median()), number(base.p50.median())),
        p99.to_string(),
    ];
    if wanted.rate > 0.0 {
        let _ = write!(cells[3], "; ≥ {}: {}", wanted.rate, told(rate.median() >= wanted.rate));
    }
    if wanted.cpu.is_finite() {
        let _ = write!(cells[4], "; ≤ {}: {}", wanted.cpu, told(cpu.median() <= wanted.cpu));
    }
    if wanted.p99.is_finite() {
        let _ = write!(cells[6], "; ≤ {}: {}", wanted.p99, told(p99.median() <= wanted.p99));
    }
    cells
}

/// The better of two in what the row's target is about.
fn better<'a>(a: &'a Figures, b: &'a Figures, wanted: &Wanted) -> &'a Figures {
    let first = match wanted.p99.is_finite() {
        true => a.p99.median() <= b.p99.median(),
        false => a.ops.median() >= b.ops.median(),
    };
    if first { a } else { b }
}
