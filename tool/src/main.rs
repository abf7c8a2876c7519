//! `thruway`, the command that people type: it checks a host, prints what to run, starts a daemon and its virtual
//! machine together, shows what daemons do, and upgrades them.

mod check;
mod command;
mod daemons;
mod man;
mod qemu;
mod run;
mod top;
mod upgrade;
mod vm;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Checks a host for thruwayd, prints what to run, starts a daemon and its virtual machine, and watches daemons
#[derive(Parser)]
#[command(name = "thruway", version, propagate_version = true, arg_required_else_help = true)]
pub struct Tool {
    #[command(subcommand)]
    command: Command,
}

// There is one of it, so its size does not matter. `Command` is what people type.
#[allow(clippy::large_enum_variant, clippy::enum_variant_names)]
#[derive(Subcommand)]
enum Command {
    /// Say whether this host, and a directory, have what thruwayd can use: by trying it
    Check(check::Options),

    /// Print what to run for a share: daemon and virtual machine, with sizes that fit
    Command(command::Options),

    /// Start a daemon and its virtual machine together, and end both
    Run(run::Options),

    /// Say what a daemon does, with what, and why something is off
    Status(top::StatusOptions),

    /// Show what all daemons of this host do: requests, latency, cache and mappings
    Top(top::TopOptions),

    /// Have a supervised daemon, or all of them, become the program that is installed now; guests only see a delay
    Upgrade(upgrade::Options),

    #[command(hide = true)]
    EnterSandbox { dir: PathBuf },

    /// Print a shell's completions of thruway, or of thruwayd
    Completions {
        shell: clap_complete::Shell,
        /// The program that is completed
        #[arg(default_value = "thruway")]
        program: man::Program,
    },

    /// Write the manual pages into a directory: thruwayd.8, thruway.1 and a page for each of its commands
    Man { dir: PathBuf },
}

/// What a command returns: its exit status, or an error of one line that names the cure.
type Result = std::result::Result<ExitCode, String>;

fn main() -> ExitCode {
    let result = match Tool::parse().command {
        Command::Check(options) => check::run(&options),
        Command::Command(options) => command::run(&options),
        Command::Run(options) => run::run(&options),
        Command::Status(options) => top::status(&options),
        Command::Top(options) => top::top(&options),
        Command::Upgrade(options) => upgrade::run(&options),
        Command::EnterSandbox { dir } => return check::enter_sandbox(dir),
        Command::Completions { shell, program } => man::completions(shell, program),
        Command::Man { dir } => man::man(&dir),
    };
    result.unwrap_or_else(|error| {
        eprintln!("thruway: {error}");
        ExitCode::FAILURE
    })
}
