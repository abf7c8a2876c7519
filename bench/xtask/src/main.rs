//! `make bench`: runs the same jobs in the same guests, with several daemons in turn.
//! `make pictures`: terminals as pictures.

mod frontend;
mod guest;
mod host;
mod picture;
mod plan;
mod plot;
mod report;
mod scenes;
mod terminal;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::{Args, Parser};

use host::{Result, Share};
use plan::{Contender, FIRST_OPEN, SETUPMAPPING, TABLES, Table};
use thruway_bench::series::Series;

/// Tasks of this repository beside cargo's own commands
#[derive(Parser)]
enum Task {
    Bench(Options),
    /// Redraws the plots from the tables in benchmarks.md
    Plots {
        /// Where benchmarks.md and plots/ are [default: docs]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Records the demo and thruway top in terminals, and draws them
    Pictures {
        /// Record only these
        #[arg(value_parser = PossibleValuesParser::new(scenes::NAMES))]
        names: Vec<String>,
        /// Record nothing: draw what was recorded
        #[arg(long, conflicts_with = "names")]
        redraw: bool,
        /// Where the recordings and pictures are [default: docs/pictures]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
}

/// Compares daemons in guests and writes benchmarks.md and its plots
#[derive(Args)]
struct Options {
    /// How many turns each contender has
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// One round of short jobs, to see that the harness works; the figures go to target/bench
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
    /// Measure only these tables; the others stay as they are
    #[arg(long, value_name = "TABLE", value_delimiter = ',', value_parser = PossibleValuesParser::new(names()))]
    only: Vec<String>,
    /// Where to write benchmarks.md and plots/ [default: docs]
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

/// Everything that was measured.
pub struct Results {
    quick: bool,
    rounds: u32,
    /// Versions of the host and its programs.
    facts: Vec<(&'static str, String)>,
    /// By table, contender and job.
    figures: BTreeMap<[&'static str; 3], Series>,
    /// By table, for those of [`frontend`].
    rows: BTreeMap<&'static str, Vec<thruway_bench::report::Row>>,
    /// Messages by job and opcode, by table and contender.
    requests: BTreeMap<[&'static str; 2], BTreeMap<String, BTreeMap<String, u64>>>,
    /// What the guests of a table reported of themselves, by table.
    versions: BTreeMap<&'static str, BTreeMap<String, String>>,
}

impl Results {
    fn new(quick: bool, rounds: u32, facts: Vec<(&'static str, String)>) -> Self {
        let (figures, rows) = (BTreeMap::new(), BTreeMap::new());
        Self { quick, rounds, facts, figures, rows, requests: BTreeMap::new(), versions: BTreeMap::new() }
    }

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
        Task::Pictures { names, redraw, out } => {
            let out = out.unwrap_or_else(|| host::root().join("docs/pictures"));
            ("pictures", if redraw { scenes::redraw(&scenes::NAMES, &out) } else { scenes::record(&names, &out) })
        }
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
    // Fail before measuring for minutes, not after.
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
    let mut results = Results::new(options.quick, rounds, host::facts()?);
    for table in frontend::TABLES.iter().filter(|table| options.wants(table.name)) {
        println!("{} ...", table.title);
        let time = std::time::Duration::from_millis(if options.quick { 100 } else { 500 });
        results.rows.insert(table.name, frontend::measure(table, rounds, time)?);
    }
    for table in tables {
        let awake = table.awake.then(host::keep_awake).flatten();
        let mut share = Share::new(table, options.quick)?;
        for round in 1..=rounds {
            for contender in turns(table, round) {
                let turn = format!("round {round} of {rounds}, {}, {}", table.name, contender.name);
                println!("{turn} ...");
                if table.on_disk {
                    share = Share::new(table, options.quick)?;
                }
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

/// The contenders in the order of a round's turns. Each round begins with another one, so that none always has the same
/// place.
fn turns(table: &Table, round: u32) -> impl Iterator<Item = &Contender> {
    let first = (round - 1) as usize % table.contenders.len();
    let (later, sooner) = table.contenders.split_at(first);
    sooner.iter().chain(later)
}
