//! This machine: where things are, and what it is.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use tempfile::TempDir;

use crate::plan::Table;

/// The error is the one line for the user.
pub type Result<T> = std::result::Result<T, String>;

pub fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

pub fn guest_dir() -> PathBuf {
    root().join("tests/guest")
}

/// `$THRUWAY_DAEMON`, or the daemon that was built into the directory of this program.
pub fn thruwayd() -> Result<String> {
    if let Ok(daemon) = env::var("THRUWAY_DAEMON") {
        return Ok(daemon);
    }
    let program = env::current_exe().map_err(|e| format!("cannot find this program's directory: {e}"))?;
    let daemon = program.with_file_name("thruwayd");
    if daemon.exists() {
        Ok(daemon.display().to_string())
    } else {
        Err(format!("no {} yet: run make build", daemon.display()))
    }
}

pub fn virtiofsd() -> Result<String> {
    let path = format!("{}/bin/virtiofsd", cached("tools")?);
    if Path::new(&path).exists() { Ok(path) } else { Err(format!("no {path} yet: run vm-images/setup.sh tools")) }
}

/// The cache directory of a part that `vm-images/setup.sh` builds.
fn cached(part: &str) -> Result<String> {
    let lib = root().join("vm-images/lib.sh");
    output("bash", &["-c", &format!(". '{}' && {part}_dir", lib.display())])
}

/// What a program says, without the last newline.
fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program).args(arguments).output().map_err(|e| format!("cannot run {program}: {e}"))?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{program} {} failed: {}", arguments.join(" "), error.trim_end()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

/// Runs a script of this repository that builds what some tables' guests boot, where it is not there yet.
pub fn build(script: &str, parts: &[&str]) -> Result<()> {
    let done = Command::new(root().join(script)).args(parts).status();
    match done.map_err(|e| format!("cannot run {script}: {e}"))?.success() {
        true => Ok(()),
        false => Err(format!("{script} failed")),
    }
}

/// Keeps the CPUs from halting while they idle, until it is dropped (Documentation/power/pm_qos_interface.rst, 0 µs); `None`
/// where the kernel has no such thing. To wake a halted CPU takes a virtual machine 40 µs and more, as its host pleases: several
/// times a request, and most of the noise.
pub fn keep_awake() -> Option<fs::File> {
    let mut latency = fs::OpenOptions::new().write(true).open("/dev/cpu_dma_latency").ok()?;
    latency.write_all(&0i32.to_ne_bytes()).ok()?;
    Some(latency)
}

/// A directory in memory with the file that a table's jobs work on. Gone when dropped.
pub fn share(table: &Table, quick: bool) -> Result<TempDir> {
    let mib = table.file_mib(quick);
    let share = tempfile::Builder::new()
        .prefix("thruway-bench.")
        .tempdir_in("/dev/shm")
        .map_err(|e| format!("cannot make a directory in /dev/shm: {e}"))?;
    // Not zeroes, which a file system or an emulator might treat better than data.
    fs::write(share.path().join("data"), vec![0x5a; mib << 20])
        .map_err(|e| format!("cannot write {mib} MiB to /dev/shm: {e}"))?;
    Ok(share)
}

/// What is known before the run, as it will be told in the report.
pub fn facts() -> Result<Vec<(&'static str, String)>> {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    Ok(vec![
        ("date", output("date", &["+%F"])?),
        ("commit", commit()),
        ("host", format!("Linux {}, {}", output("uname", &["-r"])?, cpu())),
        ("load before", load.split(' ').next().unwrap_or_default().to_owned()),
        ("QEMU", qemu_version()?),
        ("virtiofsd", output(&virtiofsd()?, &["--version"])?),
    ])
}

fn commit() -> String {
    let root = root().display().to_string();
    let describe = ["-C", &root, "describe", "--always", "--dirty", "--exclude=*"];
    output("git", &describe).unwrap_or_else(|_| "not from a git checkout".into())
}

fn cpu() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut models = info.lines().filter_map(|line| line.strip_prefix("model name")?.split_once(": ")).map(|(_, m)| m);
    let first = models.next().unwrap_or("unknown CPU");
    format!("{} × {first}", 1 + models.count())
}

fn qemu_version() -> Result<String> {
    let tree = format!("{}/root", cached("tree")?);
    let version = output("chroot", &[&tree, "qemu-system-x86_64", "--version"])
        .map_err(|e| format!("no guest tree (run vm-images/setup.sh tree): {e}"))?;
    Ok(version.lines().next().unwrap_or_default().replace("QEMU emulator version ", ""))
}
