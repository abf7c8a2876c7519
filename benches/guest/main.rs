//! `make bench`: the same jobs in the same guests through several daemons, in turn.

mod frontend;
mod guest;
mod host;
mod plan;
mod plot;
mod report;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use tempfile::TempDir;

use host::Result;
use plan::{Contender, FIRST_OPEN, SETUPMAPPING, TABLES, Table};
use thruway::bench::series::Series;

/// Compares daemons by what guests measure, and writes benchmarks.md with plots.
#[derive(Parser)]
struct Options {
    /// How often each contender has its turn
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// One round of one-second jobs, to see that it works; the figures go to target/bench
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
    /// Where benchmarks.md and plots/ are written [default: docs]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// What cargo says to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

/// Five seconds: a pass through the file for the slower contenders' sequential jobs, and a short run in all.
const SECONDS: u32 = 5;

impl Options {
    fn rounds(&self) -> u32 {
        if self.quick { 1 } else { self.rounds }
    }

    fn seconds(&self) -> u32 {
        if self.quick { 1 } else { SECONDS }
    }

    fn out(&self) -> PathBuf {
        let usual = if self.quick { "target/bench" } else { "docs" };
        self.out.clone().unwrap_or_else(|| host::root().join(usual))
    }
}

/// All that was measured.
pub struct Results {
    quick: bool,
    rounds: u32,
    seconds: u32,
    /// Of the host, the guests and the programs.
    facts: Vec<(&'static str, String)>,
    /// By the names of table, contender and job.
    figures: BTreeMap<[&'static str; 3], Series>,
    /// By the tables of [`frontend`].
    rows: Vec<Vec<thruway::bench::report::Row>>,
    /// Of a build, by table and contender: requests by opcode.
    requests: BTreeMap<[&'static str; 2], BTreeMap<String, u64>>,
    /// What the guests of a table told of themselves.
    versions: BTreeMap<&'static str, BTreeMap<String, String>>,
}

impl Results {
    fn series(&self, table: &Table, contender: &Contender, job: &plan::Job) -> &Series {
        &self.figures[&[table.name, contender.name, job.name]]
    }
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    guest::catch_signals()?;
    let out = options.out();
    // Before the minutes that it takes to measure.
    let page = report::Page::open(out.join("benchmarks.md"))?;
    let results = measure(options)?;
    print!("\n{}", report::tables(&results));
    plot::write(&results, &out.join("plots"))?;
    page.write(&results)?;
    println!("\nwritten: {}", out.join("benchmarks.md").display());
    Ok(())
}

fn measure(options: &Options) -> Result<Results> {
    host::build_guest_kernel()?;
    let shares = TABLES.iter().map(host::share).collect::<Result<Vec<_>>>()?;
    let (rounds, seconds) = (options.rounds(), options.seconds());
    let mut results = Results {
        quick: options.quick,
        rounds,
        seconds,
        facts: host::facts()?,
        figures: BTreeMap::new(),
        rows: Vec::new(),
        requests: BTreeMap::new(),
        versions: BTreeMap::new(),
    };
    for table in frontend::TABLES {
        println!("{} ...", table.title);
        let time = std::time::Duration::from_millis(if options.quick { 100 } else { 500 });
        results.rows.push(frontend::measure(table, rounds, time)?);
    }
    for round in 1..=rounds {
        for (table, contender, share) in turns(&shares, round) {
            let turn = format!("round {round} of {rounds}, {}, {}", table.name, contender.name);
            println!("{turn} ...");
            let told = guest::run(table, contender, share.path(), seconds).map_err(|e| format!("{turn}: {e}"))?;
            for job in table.jobs {
                let series = results.figures.entry([table.name, contender.name, job.name]).or_default();
                series.push(told.figures[job.name]);
            }
            for name in [SETUPMAPPING, FIRST_OPEN] {
                if let Some(&us) = told.figures.get(name) {
                    results.figures.entry([table.name, contender.name, name]).or_default().push(us);
                }
            }
            results.requests.insert([table.name, contender.name], told.requests);
            results.versions.insert(table.name, told.versions);
        }
    }
    Ok(results)
}

/// Everybody's, in a round: each round begins with another contender, so that no place in it is always the same one's.
fn turns(shares: &[TempDir], round: u32) -> impl Iterator<Item = (&'static Table, &'static Contender, &TempDir)> {
    TABLES.iter().zip(shares).flat_map(move |(table, share)| {
        let first = (round - 1) as usize % table.contenders.len();
        let (later, sooner) = table.contenders.split_at(first);
        sooner.iter().chain(later).map(move |contender| (table, contender, share))
    })
}
