//! Measures virtio-fs daemons without a VM: plays the guest over vhost-user.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use thruway_bench::daemon::{self, Daemon};
use thruway_bench::report::{self, Figures, Row};
use thruway_bench::series::number;
use thruway_bench::{NAMES, Plan, Result, Session, bytes, is_workload, measure};

/// Measures virtio-fs daemons without a VM
///
/// A COMMAND starts a daemon. In it, {socket} is replaced by the path of the socket to make, and {share} by the
/// directory to serve, which lies in memory. Example: 'thruwayd --socket-path {socket} --shared-dir {share} --sandbox
/// none'
#[derive(Parser)]
#[command(name = "thruway-bench", version)]
struct Options {
    /// Start this daemon and measure it
    #[arg(value_name = "COMMAND", required_unless_present_any = ["socket", "compare"])]
    command: Option<String>,

    /// Measure a daemon that is already running; it must serve several frontends in turn, or be restarted
    #[arg(long, value_name = "PATH", conflicts_with = "command")]
    socket: Option<PathBuf>,

    /// Start two daemons, measure them in turns and print the ratios
    #[arg(long, num_args = 2, value_names = ["COMMAND", "COMMAND"], conflicts_with_all = ["command", "socket"])]
    compare: Option<Vec<String>>,

    /// Workload: a name, or an I/O pattern (read, write, randread or randwrite with a size up to 1m, such as
    /// randread-4k)
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = parse_workload,
          default_values_t = NAMES[..NAMES.len() - 1].iter().map(|name| (*name).to_owned()))]
    workload: Vec<String>,

    /// Request queues, each with its own thread
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=63))]
    queues: u8,

    /// Operations in flight on each queue
    #[arg(long, value_delimiter = ',', default_values_t = [1], value_parser = clap::value_parser!(u8).range(1..=128))]
    depth: Vec<u8>,

    /// How long the guest's CPUs poll before they sleep, in µs; KVM's default is 200 (halt_poll_ns)
    #[arg(long, value_name = "MAX", default_value_t = 0)]
    halt_poll_us: u32,

    /// Measure so many daemons of a command at a time, each with a guest of its own; the figures are of all together
    ///
    /// Each has its own files, in memory: 24 MiB for getattr and the like, 256 MiB for reads and writes.
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "socket",
          value_parser = clap::value_parser!(u16).range(1..=1000))]
    machines: u16,

    /// Begin so many operations a second on each queue, instead of one as soon as another has ended; needs --depth 1
    ///
    /// An operation that had to begin late because the one before took long counts from when it was due.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rate: Option<u32>,

    /// How long to measure each workload
    #[arg(long, default_value_t = 2.0, value_parser = parse_seconds)]
    seconds: f64,

    /// How long to run each workload before it is measured
    #[arg(long, value_name = "SECONDS", default_value_t = 0.3, value_parser = parse_seconds)]
    warm_up: f64,

    /// How many times to measure; with --compare the daemons take turns
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// Print all figures as JSON
    #[arg(long)]
    json: bool,
}

fn parse_workload(name: &str) -> Result<String> {
    match is_workload(name) {
        true => Ok(name.into()),
        false => Err(format!("known workloads: {}, and patterns such as randread-4k", NAMES.join(", "))),
    }
}

fn parse_seconds(text: &str) -> Result<f64> {
    match text.parse() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("give a number of seconds, 0 to 3600".into()),
    }
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("thruway-bench: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    if options.rate.is_some() && options.depth != [1] {
        return Err("--rate needs --depth 1: operations that are begun in time have no depth".into());
    }
    let (daemons, names) = daemons(options)?;
    let deepest = options.depth.iter().copied().max().unwrap_or(1);
    let halt_poll = Duration::from_micros(options.halt_poll_us.into());
    let open = |daemon| Session::open(daemon, options.queues.into(), deepest.into(), halt_poll);
    let open = |daemons: Vec<_>| daemons.into_iter().map(open).collect::<Result<Vec<_>>>();
    let mut sessions = daemons.into_iter().map(open).collect::<Result<Vec<_>>>()?;
    let bar = progress(options, sessions.len());
    let mut rows = Vec::new();
    for depth in &options.depth {
        for workload in &options.workload {
            let depth = usize::from(*depth);
            let time = Duration::from_secs_f64(options.seconds);
            let (warm_up, every) =
                (Duration::from_secs_f64(options.warm_up), options.rate.map(|n| Duration::from_secs(1) / n));
            let plan = Plan { queues: options.queues.into(), depth, every, warm_up, time };
            let mut figures: Vec<Figures> = sessions.iter().map(|_| Figures::default()).collect();
            for _ in 0..options.rounds {
                for (sessions, figures) in sessions.iter_mut().zip(&mut figures) {
                    bar.set_message(format!("{workload}, depth {depth}"));
                    figures.push(&measure(sessions, workload, &plan)?);
                    bar.inc(1);
                }
            }
            rows.push(Row { workload: workload.clone(), depth, figures });
        }
    }
    bar.finish_and_clear();
    sessions.into_iter().flatten().try_for_each(Session::close)?;
    match (options.json, &options.compare) {
        (true, _) => println!("{:#}", report::json(&names, &rows)),
        (false, Some(_)) => {
            for (letter, name) in ["A", "B"].iter().zip(&names) {
                println!("{letter}: {name}");
            }
            print!("\n{}", report::comparison(&rows));
        }
        (false, None) => print!("{}", report::table(&rows)),
    }
    Ok(())
}

/// The daemons of each command, and the commands' names in the report.
fn daemons(options: &Options) -> Result<(Vec<Vec<Daemon>>, Vec<String>)> {
    if let Some(socket) = &options.socket {
        return Ok((vec![vec![Daemon::join(socket.clone())]], vec![socket.display().to_string()]));
    }
    let commands: Vec<String> = options.compare.iter().flatten().chain(&options.command).cloned().collect();
    let (count, need, room) =
        (commands.len() * usize::from(options.machines), bytes(&options.workload), daemon::room()?);
    let need = need * count as u64;
    if need > room {
        let [need, room] = [need, room].map(|bytes| number(bytes as f64 / f64::from(1 << 30)));
        return Err(format!(
            "the files of {count} daemons take {need} GiB of memory, and there is room for {room}: use fewer \
             --machines, or workloads without a large file, such as getattr"
        ));
    }
    let start = |command: &String| (0..options.machines).map(|_| Daemon::start(command)).collect();
    let daemons = commands.iter().map(start).collect::<Result<_>>()?;
    Ok((daemons, commands))
}

fn progress(options: &Options, daemons: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let steps = options.depth.len() * options.workload.len() * options.rounds as usize * daemons;
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}, {eta} left");
    ProgressBar::new(steps as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
