//! The tables, and `benchmarks.md` around them.

use std::fmt::Write;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use crate::Results;
use crate::frontend;
use crate::host::Result;
use crate::plan::{Contender, Daemon, FIRST_OPEN, Goal, Job, Measure, SETUPMAPPING, SETUPMAPPING_LIVE, TABLES, Table};
use crate::plot;
use thruway_bench::report::markdown;
use thruway_bench::series::{Series, median, number};

/// What is between these is ours, the rest of the file its readers'.
const BEGIN: &str = "<!-- make bench writes from here -->\n";
const END: &str = "<!-- make bench writes to here -->\n";

/// A row that is below by no more is not below: a few rounds are easily apart by chance, and 5 % is no user's loss.
const NOISE: f64 = 0.05;

/// `benchmarks.md` as it was.
pub struct Page {
    path: PathBuf,
    before: String,
    /// The tables that are there, each from its title on.
    sections: Vec<String>,
    after: String,
}

impl Page {
    pub fn open(path: PathBuf) -> Result<Self> {
        let text = match fs::read_to_string(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => format!("# Benchmarks\n\n{BEGIN}{END}"),
            text => text.map_err(|e| format!("cannot read {}: {e}", path.display()))?,
        };
        let parts = text.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?)));
        let Some((before, (ours, after))) = parts else {
            return Err(format!("{}: lacks the lines that mark what is to be replaced", path.display()));
        };
        let sections = ours.split("\n## ").skip(1).map(|section| format!("\n## {}\n", section.trim_end())).collect();
        Ok(Self { path, before: before.into(), sections, after: after.into() })
    }

    /// What was not measured stays.
    pub fn write(&self, results: &Results) -> Result<()> {
        let mut text = format!("{}{BEGIN}{}", self.before, how(results));
        let frontends = frontend::TABLES.iter().map(|table| (table.title, frontend_section(results, table)));
        let guests = TABLES.iter().map(|table| (table.title, guest_section(results, table)));
        for (title, new) in frontends.chain(guests) {
            let head = format!("\n## {title}\n");
            let old = self.sections.iter().find(|section| section.starts_with(&head));
            text += new.as_ref().or(old).map_or("", String::as_str);
        }
        text += &format!("{END}{}", self.after);
        fs::write(&self.path, text).map_err(|e| format!("cannot write {}: {e}", self.path.display()))
    }
}

fn frontend_section(results: &Results, table: &frontend::Table) -> Option<String> {
    let rows = results.rows.get(table.name)?;
    Some(format!("\n## {}\n\n{}\n\n{}", table.title, facts(results), frontend::text(table, rows)))
}

fn guest_section(results: &Results, table: &Table) -> Option<String> {
    let versions = results.versions.get(table.name)?;
    let versions: Vec<_> = versions.iter().map(|(name, value)| format!("{name}: {value}")).collect();
    let mut text = format!("\n## {}\n\n{}; {}\n\n", table.title, facts(results), versions.join("; "));
    let _ = write!(text, "{}\n![{}](plots/{})\n", table_text(results, table), table.title, plot::file_name(table));
    Some(text)
}

fn facts(results: &Results) -> String {
    let facts: Vec<_> = results.facts.iter().map(|(name, value)| format!("{name}: {value}")).collect();
    format!("{}; rounds: {}", facts.join("; "), results.rounds)
}

/// For the terminal.
pub fn tables(results: &Results) -> String {
    let frontends = frontend::TABLES.iter().filter_map(|table| Some((table, results.rows.get(table.name)?)));
    let frontends = frontends.map(|(table, rows)| format!("{}\n{}", table.title, frontend::text(table, rows)));
    frontends.chain(results.tables().map(|table| format!("{}\n{}", table.title, table_text(results, table)))).collect()
}

fn how(results: &Results) -> String {
    let mut text = String::new();
    if results.quick {
        text += "**From the quick form, which only shows that the harness works. Not to be quoted.**\n\n";
    }
    let _ = writeln!(
        text,
        "\
The contenders have their turns in each round of a table: a turn boots the guest and does every job there, for 5 s, or 2 s
in the tables with many rows, where time ends it. A figure is the median of the rounds, with the lowest and the highest. A
ratio is taken round by round, for the machine may be slower in one than in the next, and is above 1 where the contender is
better. *Not below* is missed where every round of a contender was worse than each of virtiofsd's, and the median by more
than {:.0} %. Where virtiofsd has its turns with several settings, the better one of each row counts.

To repeat it, as root on a machine that does nothing else: `make bench`, or `make bench ARGS='--rounds 5 --only uml,qemu'`.

- The share lies in the host's memory (`/dev/shm`); both daemons run with their defaults: cache mode, sandbox, no O_DIRECT.
- fio works at depth 1 on a file of 256 MiB, or the size that is said, which is there before; of several jobs each has a part
  of the file of its own. *create* and what follows it is `meta.py` with a directory for each process.
- What the guest's caches have of the share is dropped before each job, the host's cache is not. What a job itself brings into the
  guest's cache stays as it does for users; fio drops it when it begins the file anew, except what it has mapped. Programs stay
  in the guest's cache: under QEMU's TCG a job that gets pages which had held them stalls, up to 0.6 s in a read of 1 MiB.
- *first touch* reads a byte in each of 96 ranges of 2 MiB by mmap and takes the median of the last 32: with a DAX window a
  SETUPMAPPING with 64 to 95 live mappings and the page fault, without one a read with its readahead. SETUPMAPPING
  itself is measured in the daemon, until the mapping is in the guest's memory.

- *Idle CPUs kept awake*: where a table says so, the host's CPUs did not halt when idle (`/dev/cpu_dma_latency`). To wake a
  halted one takes a virtual machine 40 µs and more, as its own host pleases, which was most of a request and of the noise.
  Where contenders do without messages, that is a part of what they save, and the CPUs halt as they do.

- *Without a guest*, a frontend in one process with `thruway-bench` plays it: one queue, so many operations at a time as the
  depth says. virtiofsd has its turns with a thread pool of 0 and of 4, and the better one counts. A ratio of ops/s is above 1
  where thruwayd is better, those of CPU time per request and of the 99th percentile are below 1. The frontend sleeps as soon
  as it has nothing to do, so that each reply must wake a CPU, or polls for 200 µs before, as KVM does for a vCPU by default
  (halt_poll_ns).

A guest under emulation (accelerator: tcg) bounds what is to be seen: fio itself needs 12 to 15 µs there for a 4k call, so
that little but mmap can be above 80,000 IOPS, and the guest's part of a request weighs more than on a real CPU. Expect other
ratios with KVM. User-Mode Linux runs the guest's code as it is, but each of its system calls and page faults costs some µs.
",
        NOISE * 100.0
    );
    text
}

fn table_text(results: &Results, table: &Table) -> String {
    let (peers, others) = table.contenders.split_at(table.peers());
    let names = |contenders: &[Contender]| contenders.iter().map(|c| c.name.to_owned()).collect::<Vec<_>>();
    let mut figures = vec![row("median (lowest–highest)", names(table.contenders))];
    let mut ratios =
        vec![row(if peers.len() > 1 { "times the better virtiofsd" } else { "times virtiofsd" }, names(others))];
    for job in table.jobs {
        let cells = table.contenders.iter().map(|c| results.series(table, c, job).to_string());
        figures.push(row(&format!("{}, {}", job.title, job.measure.unit()), cells.collect()));
        ratios.push(row(job.title, others.iter().map(|c| ratio_cell(results, table, c, job)).collect()));
    }
    let daemon = [
        (
            SETUPMAPPING,
            format!("SETUPMAPPING with {} to {} live mappings", SETUPMAPPING_LIVE.start, SETUPMAPPING_LIVE.end - 1),
        ),
        (FIRST_OPEN, "the first OPEN of the file".to_owned()),
    ];
    let daemon: String = daemon.iter().map(|(name, title)| daemon_text(results, table, name, title)).collect();
    let rest = [over_text(results, table), rows_text(results, table), daemon, build_text(results, table)].concat();
    format!("{}\n{}{rest}", markdown(&figures), markdown(&ratios))
}

/// What a build costs beside one on the guest's tmpfs, and the requests that it takes.
fn build_text(results: &Results, table: &Table) -> String {
    let mut text = String::new();
    for job in table.jobs.iter().filter(|job| matches!(job.measure, Measure::Build)) {
        for contender in table.contenders.iter().filter(|c| !matches!(c.daemon, Daemon::Native(_))) {
            let mut said = Vec::new();
            if let Some(native) = table.native() {
                let ratio = results.series(table, contender, job).over(results.series(table, native, job));
                said.push(format!("{:+.0} % over {}", (ratio.median() - 1.0) * 100.0, native.name));
            }
            let mut requests: Vec<_> = results.requests[&[table.name, contender.name]].iter().collect();
            requests.retain(|(_, count)| **count > 0);
            requests.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
            if !requests.is_empty() {
                let requests: Vec<_> = requests.iter().map(|(name, count)| format!("{name} {count}")).collect();
                said.push(format!("requests: {}", requests.join(", ")));
            }
            if !said.is_empty() {
                let _ = writeln!(text, "\n{}: {}", contender.name, said.join("; "));
            }
        }
    }
    text
}

/// The rows together, of contenders of which something is wanted of that.
fn rows_text(results: &Results, table: &Table) -> String {
    let mut text = String::new();
    for contender in table.contenders {
        for goal in contender.goals {
            let Goal::MedianRow(wanted) = *goal else { continue };
            let rows: Vec<f64> = table.jobs.iter().map(|job| ratio(results, table, contender, job).median()).collect();
            let median = median(&rows);
            let met = if median >= wanted { "met" } else { "**missed**" };
            let lowest = number(rows.iter().copied().fold(f64::INFINITY, f64::min));
            let below = rows.iter().filter(|ratio| **ratio < 1.0).count();
            let _ = writeln!(
                text,
                "\n{}: the median row {}; ≥ {wanted}: {met}; the lowest {lowest}; {below} of {} rows below 1",
                contender.name,
                number(median),
                rows.len()
            );
        }
    }
    text
}

/// How contenders compare with others than the first, where something is wanted of that.
fn over_text(results: &Results, table: &Table) -> String {
    let mut rows = vec![["", "ratio", "wanted"].map(str::to_owned).to_vec()];
    for contender in table.contenders {
        for goal in contender.goals {
            let Goal::Over(other, job, wanted) = *goal else { continue };
            let other = table.contenders.iter().find(|c| c.name == other).expect("it is in the table");
            let job = table.jobs.iter().find(|j| j.name == job).expect("it is in the table");
            let ratio = results.series(table, contender, job).over(results.series(table, other, job));
            let met = if ratio.median() >= wanted { "met" } else { "**missed**" };
            let title = format!("{} / {}: {}", contender.name, other.name, job.title);
            rows.push(vec![title, ratio.to_string(), format!("≥ {wanted}: {met}")]);
        }
    }
    if rows.len() > 1 { format!("\n{}", markdown(&rows)) } else { String::new() }
}

/// What is measured in the daemon, of the contenders that have it.
fn daemon_text(results: &Results, table: &Table, name: &'static str, title: &str) -> String {
    let mut text = String::new();
    for contender in table.contenders {
        let Some(series) = results.figures.get(&[table.name, contender.name, name]) else { continue };
        let _ = write!(text, "\n{}: {title}, p50: {series} µs", contender.name);
        for goal in contender.goals {
            if let Goal::AtMost(of, most) = *goal {
                if of == name {
                    let met = if series.median() <= most { "met" } else { "**missed**" };
                    let _ = write!(text, "; ≤ {} µs: {met}", number(most));
                }
            }
        }
        text += "\n";
    }
    text
}

fn row(head: &str, mut cells: Vec<String>) -> Vec<String> {
    cells.insert(0, head.to_owned());
    cells
}

/// The better one of what a contender is compared with in this job.
fn base<'a>(results: &'a Results, table: &Table, job: &Job) -> &'a Series {
    let peers = table.contenders[..table.peers()].iter().map(|peer| results.series(table, peer, job));
    let better =
        |a: &'a Series, b: &'a Series| if (a.median() >= b.median()) == job.measure.more_is_better() { a } else { b };
    peers.reduce(better).expect("a table begins with virtiofsd")
}

/// Above 1 where the contender is better.
fn ratio(results: &Results, table: &Table, contender: &Contender, job: &Job) -> Series {
    let (mine, base) = (results.series(table, contender, job), base(results, table, job));
    if job.measure.more_is_better() { mine.over(base) } else { base.over(mine) }
}

/// The ratio, and whether what was wanted is there.
fn ratio_cell(results: &Results, table: &Table, contender: &Contender, job: &Job) -> String {
    let (mine, base) = (results.series(table, contender, job), base(results, table, job));
    let ratio = ratio(results, table, contender, job);
    let mut cell = ratio.to_string();
    for goal in contender.goals {
        let (wanted, met) = match *goal {
            Goal::Ratio(name, wanted) if name == job.name => (format!("≥ {wanted}"), ratio.median() >= wanted),
            // One round does not show what is noise.
            Goal::NotBelow if results.rounds > 1 => ("not below".to_owned(), !is_below(mine, base, &ratio, job)),
            _ => continue,
        };
        let _ = write!(cell, "; {wanted}: {}", if met { "met" } else { "**missed**" });
    }
    cell
}

fn is_below(mine: &Series, base: &Series, ratio: &Series, job: &Job) -> bool {
    let apart = if job.measure.more_is_better() { mine.max() < base.min() } else { mine.min() > base.max() };
    apart && ratio.median() < 1.0 - NOISE
}
