//! What many test programs need. Each of them uses a part of it.

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
