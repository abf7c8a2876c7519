//! Shell completions and manual pages, made from the definitions of the options.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use thruway::cli::Options;

use crate::{Result, Tool};

/// A program that has options.
#[derive(Clone, Copy, clap::ValueEnum)]
pub enum Program {
    Thruway,
    Thruwayd,
}

impl Program {
    fn command(self) -> Command {
        match self {
            Self::Thruway => Tool::command(),
            Self::Thruwayd => Options::command(),
        }
    }
}

/// Prints the completions of a program.
pub fn completions(shell: Shell, program: Program) -> Result {
    let (mut command, mut text) = (program.command(), Vec::new());
    let name = command.get_name().to_owned();
    clap_complete::generate(shell, &mut command, name, &mut text);
    // A reader such as head(1) may leave early.
    match io::stdout().write_all(&text) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(format!("cannot print the completions: {e}")),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Writes thruwayd.8, thruway.1 and thruway-COMMAND.1.
pub fn man(dir: &Path) -> Result {
    let cannot = |e: io::Error| {
        format!(
            "cannot write the manual pages to DIR '{}': {e}: choose a directory that you may write to",
            dir.display()
        )
    };
    fs::create_dir_all(dir).map_err(cannot)?;
    fs::write(dir.join("thruwayd.8"), daemon_page().map_err(cannot)?).map_err(cannot)?;
    let thruway = Program::Thruway.command().disable_help_subcommand(true);
    clap_mangen::generate_to(thruway, dir).map_err(cannot)?;
    Ok(ExitCode::SUCCESS)
}

/// The daemon's page. clap_mangen's own synopsis would list sixty options.
fn daemon_page() -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    let man = Man::new(Program::Thruwayd.command()).section("8");
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    writeln!(
        page,
        ".SH SYNOPSIS\n\\fBthruwayd\\fR \\-\\-shared\\-dir \\fIDIR\\fR \\-\\-socket\\-path \\fIPATH\\fR [OPTIONS]"
    )?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    writeln!(page, ".SH SEE ALSO\n\\fBthruway\\fR(1)")?;
    Ok(page)
}
