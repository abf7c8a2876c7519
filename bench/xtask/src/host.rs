//! The host: where programs are, and facts for the report.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use tempfile::TempDir;

use crate::plan::Table;

/// The error is one line for the user.
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

/// A program's output without its last newline.
fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program).args(arguments).output().map_err(|e| format!("cannot run {program}: {e}"))?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{program} {} failed: {}", arguments.join(" "), error.trim_end()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

/// Runs one of this repository's scripts, which builds what some guests boot unless it is built already.
pub fn build(script: &str, parts: &[&str]) -> Result<()> {
    let done = Command::new(root().join(script)).args(parts).status();
    match done.map_err(|e| format!("cannot run {script}: {e}"))?.success() {
        true => Ok(()),
        false => Err(format!("{script} failed")),
    }
}

/// Keeps idle CPUs from halting until the result is dropped (0 µs, Documentation/power/pm_qos_interface.rst). `None` if
/// the kernel cannot do that. Waking a halted CPU takes a virtual machine 40 µs or more, as its host pleases. That
/// happens several times per request and is most of the noise.
pub fn keep_awake() -> Option<fs::File> {
    let mut latency = fs::OpenOptions::new().write(true).open("/dev/cpu_dma_latency").ok()?;
    latency.write_all(&0i32.to_ne_bytes()).ok()?;
    Some(latency)
}

/// Makes the directory that a table's guests share, with the file that its jobs work on. It is deleted on drop.
pub fn share(table: &Table, quick: bool) -> Result<TempDir> {
    let mib = table.file_mib(quick);
    let place = if table.on_disk { root().join("target") } else { "/dev/shm".into() };
    let share = tempfile::Builder::new()
        .prefix("thruway-bench.")
        .tempdir_in(&place)
        .map_err(|e| format!("cannot make a directory in {}: {e}", place.display()))?;
    // A file system or an emulator might treat zeroes better than data.
    fs::write(share.path().join("data"), vec![0x5a; mib << 20])
        .map_err(|e| format!("cannot write {mib} MiB to {}: {e}", place.display()))?;
    Ok(share)
}

/// Facts for the report that are known before the run.
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
