//! For tests that must each run in a process of their own: the test program runs itself, once for each test.

use std::fmt::Display;
use std::process::{Command, ExitCode, ExitStatus, exit};

use tempfile::TempDir;

/// The exit code of a test that cannot run on this machine.
const SKIPPED: u8 = 77;

/// Runs the tests whose name contains `filter`, one after the other, and prints the results.
pub fn run_all<T>(
    tests: impl IntoIterator<Item = (String, T)>,
    filter: &str,
    run: impl Fn(T) -> ExitStatus,
) -> ExitCode {
    let mut failed = 0;
    for (name, test) in tests.into_iter().filter(|(name, _)| name.contains(filter)) {
        let status = run(test);
        let result = match status.code() {
            Some(0) => "ok",
            Some(code) if code == i32::from(SKIPPED) => "skipped",
            _ => {
                failed += 1;
                "FAILED"
            }
        };
        println!("test {name} ... {result}");
    }
    println!("{failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// As [`run_all`], for tests that mount file systems: each has a mount namespace and a directory for temporary files of
/// its own. A test is the words that follow `--run`. Together they are its name.
// Not all test programs mount something.
#[allow(dead_code)]
pub fn run_mounting<const N: usize>(tests: impl IntoIterator<Item = [&'static str; N]>, filter: &str) -> ExitCode {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: it mounts file systems");
        return ExitCode::SUCCESS;
    }
    run_all(tests.into_iter().map(|words| (words.join(" "), words)), filter, |words| {
        // This process removes the directory: the test itself cannot while its file system is mounted.
        let scratch = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut run = Command::new("unshare");
        run.env("TMPDIR", scratch.path()).args(["--mount", "--propagation=private"]);
        run.arg(this(&[]).get_program()).arg("--run").args(words).status().unwrap()
    })
}

/// This program, with other arguments.
pub fn this(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(args);
    command
}

/// Ends a test that cannot run on this machine.
pub fn skip(reason: impl Display) -> ! {
    println!("skipped: {reason}");
    exit(SKIPPED.into())
}
