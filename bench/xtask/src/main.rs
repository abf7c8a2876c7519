//! `make bench`: the same jobs in the same guests through several daemons, in turn.

mod frontend;
mod guest;
mod host;
mod plan;
mod plot;
mod report;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::{Args, Parser};

use host::Result;
use plan::{Contender, FIRST_OPEN, SETUPMAPPING, TABLES, Table};
use thruway_bench::series::Series;

/// What is done in this repository beside cargo's own commands
#[derive(Parser)]
enum Task {
    Bench(Options),
    /// Redraws the plots from the tables in benchmarks.md
    Plots {
        /// Where benchmarks.md and plots/ are [default: docs]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
}

/// Compares daemons by what guests measure, and writes benchmarks.md with plots
#[derive(Args)]
struct Options {
    /// How often each contender has its turn
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// One round of short jobs, to see that it works; the figures go to target/bench
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
    /// Only these tables; the others stay as they are
    #[arg(long, value_name = "TABLE", value_delimiter = ',', value_parser = PossibleValuesParser::new(names()))]
    only: Vec<String>,
    /// Where benchmarks.md and plots/ are written [default: docs]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

fn names() -> impl Iterator<Item = &'static str> {
    frontend::TABLES.iter().map(|table| table.name).chain(TABLES.iter().map(|table| table.name))
}

impl Options {
    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }

    fn rounds(&self) -> u32 {
        if self.quick { 1 } else { self.rounds }
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
    /// Of the host and the programs.
    facts: Vec<(&'static str, String)>,
    /// By the names of table, contender and job.
    figures: BTreeMap<[&'static str; 3], Series>,
    /// By the name of a table of [`frontend`].
    rows: BTreeMap<&'static str, Vec<thruway_bench::report::Row>>,
    /// Of a build, by table and contender: requests by opcode.
    requests: BTreeMap<[&'static str; 2], BTreeMap<String, u64>>,
    /// What the guests of a table told of themselves, by its name.
    versions: BTreeMap<&'static str, BTreeMap<String, String>>,
}

impl Results {
    fn series(&self, table: &Table, contender: &Contender, job: &plan::Job) -> &Series {
        &self.figures[&[table.name, contender.name, job.name]]
    }

    fn take(&mut self, table: &Table, contender: &Contender, told: guest::Told) {
        let names = table.jobs.iter().map(|job| job.name).chain([SETUPMAPPING, FIRST_OPEN]);
        for name in names {
            if let Some(&figure) = told.figures.get(name) {
                self.figures.entry([table.name, contender.name, name]).or_default().push(figure);
            }
        }
        self.requests.insert([table.name, contender.name], told.requests);
        self.versions.insert(table.name, told.versions);
    }

    /// The tables that were measured.
    fn tables(&self) -> impl Iterator<Item = &'static Table> {
        TABLES.iter().filter(|table| self.versions.contains_key(table.name))
    }
}

fn main() -> ExitCode {
    let (name, done) = match Task::parse() {
        Task::Bench(options) => ("bench", bench(&options)),
        Task::Plots { out } => ("plots", plots(&out.unwrap_or_else(|| host::root().join("docs")))),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{name}: {e}");
            ExitCode::FAILURE
        }
    }
}

fn plots(out: &Path) -> Result<()> {
    let path = out.join("benchmarks.md");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    plot::write(&text, &out.join("plots"))
}

fn bench(options: &Options) -> Result<()> {
    guest::catch_signals()?;
    let out = options.out();
    // Before the minutes that it takes to measure.
    let page = report::Page::open(out.join("benchmarks.md"))?;
    let results = measure(options)?;
    print!("\n{}", report::tables(&results));
    page.write(&results)?;
    plots(&out)?;
    println!("\nwritten: {}", out.join("benchmarks.md").display());
    Ok(())
}

fn measure(options: &Options) -> Result<Results> {
    let tables: Vec<&Table> = TABLES.iter().filter(|table| options.wants(table.name)).collect();
    let boots = |what| tables.iter().any(|table| table.boot.contains(&what));
    if boots(plan::GUEST_KERNEL) {
        host::build("guest-kernel/build", &[])?;
    }
    if boots(plan::UML) {
        host::build("vm-images/setup.sh", &[plan::UML])?;
    }
    let rounds = options.rounds();
    let mut results = Results {
        quick: options.quick,
        rounds,
        facts: host::facts()?,
        figures: BTreeMap::new(),
        rows: BTreeMap::new(),
        requests: BTreeMap::new(),
        versions: BTreeMap::new(),
    };
    for table in frontend::TABLES.iter().filter(|table| options.wants(table.name)) {
        println!("{} ...", table.title);
        let time = std::time::Duration::from_millis(if options.quick { 100 } else { 500 });
        results.rows.insert(table.name, frontend::measure(table, rounds, time)?);
    }
    for table in tables {
        let awake = table.awake.then(host::keep_awake).flatten();
        let share = host::share(table, options.quick)?;
        for round in 1..=rounds {
            for contender in turns(table, round) {
                let turn = format!("round {round} of {rounds}, {}, {}", table.name, contender.name);
                println!("{turn} ...");
                let told =
                    guest::run(table, contender, share.path(), options.quick).map_err(|e| format!("{turn}: {e}"))?;
                results.take(table, contender, told);
            }
        }
        let idle = if awake.is_some() { "kept awake" } else { "halt" };
        results.versions.entry(table.name).or_default().insert("idle CPUs".to_owned(), idle.to_owned());
    }
    Ok(results)
}

/// Everybody's, in a round: each round begins with another contender, so that no place in it is always the same one's.
fn turns(table: &Table, round: u32) -> impl Iterator<Item = &Contender> {
    let first = (round - 1) as usize % table.contenders.len();
    let (later, sooner) = table.contenders.split_at(first);
    sooner.iter().chain(later)
}
