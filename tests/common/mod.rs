//! What many test programs need. Each of them uses a part of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A limit on hangs: a busy machine is slow.
const LONG: Duration = Duration::from_secs(120);

/// Waits for a state.
#[allow(dead_code)]
pub fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !is() {
        assert!(Instant::now() < end, "never: {what}");
        sleep(Duration::from_millis(2));
    }
}

/// Another process than the test runs a command, which must succeed.
#[allow(dead_code)]
pub fn sh(command: &str) {
    let output = Command::new("sh").args(["-ec", command]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The daemon.
#[allow(dead_code)]
pub fn thruwayd() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_thruwayd"));
    command.env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Copies the program into `dir`, since `nobody` may have no access to the build directory. cp(1) does it: if this
/// process did, another test's fork(2) could inherit the file open for writing, and it could not be executed.
#[allow(dead_code)]
pub fn copy_of_the_daemon(dir: &Path) -> PathBuf {
    let program = dir.join("thruwayd");
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_thruwayd")).arg(&program).status().unwrap().success());
    program
}

/// A process and its descendants.
#[allow(dead_code)]
pub fn family(pid: u32) -> Vec<u32> {
    let mut all = vec![pid];
    for index in 0.. {
        let Some(pid) = all.get(index) else { break };
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        all.extend(children.split_whitespace().map(|pid| pid.parse::<u32>().unwrap()));
    }
    all
}
