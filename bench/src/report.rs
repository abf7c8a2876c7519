//! Writes tables and JSON.

use std::fmt::Write;

use serde_json::{Value, json};

use super::Measured;
use super::series::{Series, number};

/// The figures of one workload through one daemon, over the rounds.
#[derive(Default)]
pub struct Figures {
    pub ops: Series,
    pub megabytes: Series,
    /// Time of an operation, in µs.
    pub p50: Series,
    pub p99: Series,
    pub p999: Series,
    /// CPU time of the daemon, in seconds per million requests.
    pub cpu: Series,
    /// Context switches of the daemon, per request.
    pub switches: Series,
}

impl Figures {
    pub fn push(&mut self, measured: &Measured) {
        let quantile = |q| measured.latency.value_at_quantile(q) as f64 / 1e3;
        self.ops.push(measured.ops as f64 / measured.seconds);
        self.megabytes.push(measured.bytes as f64 / measured.seconds / 1e6);
        self.p50.push(quantile(0.5));
        self.p99.push(quantile(0.99));
        self.p999.push(quantile(0.999));
        if let Some(usage) = measured.usage {
            self.cpu.push(usage.cpu_seconds * 1e6 / measured.requests as f64);
            self.switches.push(usage.context_switches as f64 / measured.requests as f64);
        }
    }

    fn json(&self) -> Value {
        json!({
            "ops_per_second": self.ops.values(),
            "mb_per_second": self.megabytes.values(),
            "p50_us": self.p50.values(),
            "p99_us": self.p99.values(),
            "p999_us": self.p999.values(),
            "cpu_seconds_per_million_requests": self.cpu.values(),
            "context_switches_per_request": self.switches.values(),
        })
    }
}

/// A workload at one depth, with each daemon.
pub struct Row {
    pub workload: String,
    pub depth: usize,
    pub figures: Vec<Figures>,
}

impl Row {
    pub fn title(&self) -> String {
        format!("{}, depth {}", self.workload, self.depth)
    }
}

/// The table of one daemon.
pub fn table(rows: &[Row]) -> String {
    let head = ["", "ops/s", "MB/s", "p50 µs", "p99 µs", "p99.9 µs", "CPU s/M requests", "switches/request"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let f = &row.figures[0];
        let series = [&f.ops, &f.megabytes, &f.p50, &f.p99, &f.p999, &f.cpu, &f.switches];
        lines.push(std::iter::once(row.title()).chain(series.map(Series::to_string)).collect());
    }
    markdown(&lines)
}

/// The table of two daemons. Where the first one is better, ratios of rates are above 1 and ratios of costs below 1.
pub fn comparison(rows: &[Row]) -> String {
    let head = ["", "A: ops/s", "B: ops/s", "ops/s, A/B", "CPU/request, A/B", "p99, A/B", "switches/request, A/B"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let [a, b] = &row.figures[..] else { continue };
        let ratios = [(&a.ops, &b.ops), (&a.cpu, &b.cpu), (&a.p99, &b.p99), (&a.switches, &b.switches)];
        let mut line = vec![row.title(), number(a.ops.median()), number(b.ops.median())];
        line.extend(ratios.map(|(a, b)| a.over(b).to_string()));
        lines.push(line);
    }
    markdown(&lines)
}

/// All figures of all rounds.
pub fn json(commands: &[String], rows: &[Row]) -> Value {
    let row = |row: &Row| {
        let figures: Vec<_> = row.figures.iter().map(Figures::json).collect();
        json!({ "workload": row.workload, "depth": row.depth, "figures": figures })
    };
    json!({ "daemons": commands, "rows": rows.iter().map(row).collect::<Vec<_>>() })
}

/// A Markdown table. Its cells are padded, so that it is readable as text too.
pub fn markdown(rows: &[Vec<String>]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for (number, row) in rows.iter().enumerate() {
        for (column, cell) in row.iter().enumerate() {
            let _ = write!(text, "| {cell:0$} ", width(column));
        }
        text += "|\n";
        if number == 0 {
            let rules = (0..row.len()).map(|column| format!("| {} ", "-".repeat(width(column))));
            text.extend(rules.chain(["|\n".to_owned()]));
        }
    }
    text
}
