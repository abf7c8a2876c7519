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
/// Makes a copy of that directory, with the guest agent, which `bench.sh` starts.
pub fn guest_dir_with_agent(to: &Path) -> Result<PathBuf> {
    let agent = built("thruway-guest")?;
    let copy = || -> std::io::Result<()> {
        fs::create_dir(to)?;
        for entry in fs::read_dir(guest_dir())? {
            let entry = entry?;
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
        fs::copy(agent, to.join("thruway-guest")).map(drop)
    };
    copy().map_err(|e| format!("cannot copy the guest's programs to {}: {e}", to.display()))?;
    Ok(to.to_owned())
}

pub fn thruwayd() -> Result<String> {
    match env::var("THRUWAY_DAEMON") {
        Ok(daemon) => Ok(daemon),
        Err(_) => built("thruwayd").map(|daemon| daemon.display().to_string()),
    }
}

/// A program that was built into the directory of `$THRUWAY_DAEMON`, or of this program.
fn built(name: &str) -> Result<PathBuf> {
    let this = env::current_exe().map_err(|e| format!("cannot find this program's directory: {e}"))?;
    // Its first word is the program.
    let daemon = env::var("THRUWAY_DAEMON").ok();
    let beside = daemon.as_ref().and_then(|command| command.split(' ').next()).map_or(&*this, Path::new);
    let program = beside.with_file_name(name);
    if program.exists() { Ok(program) } else { Err(format!("no {} yet: run make build", program.display())) }
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

/// Bytes of a disk of its own: enough for the trees of `names.py`, which stay until the end of a turn.
const DISK: u64 = 4 << 30;

/// A directory that guests share. It is deleted on drop.
pub struct Share {
    dir: TempDir,
    /// It lies on a disk of its own.
    mounted: bool,
}

impl Share {
    /// Makes the directory, with the file that the table's jobs work on.
    pub fn new(table: &Table, quick: bool) -> Result<Self> {
        let place = Path::new("/dev/shm");
        let directory = || tempfile::Builder::new().prefix("thruway-bench.").tempdir_in(place);
        let dir = directory().map_err(|e| format!("cannot make a directory in {}: {e}", place.display()))?;
        let mut share = Self { dir, mounted: false };
        if table.on_disk {
            share.mount()?;
        }
        let mib = table.file_mib(quick);
        // A file system or an emulator might treat zeroes better than data.
        fs::write(share.path().join("data"), vec![0x5a; mib << 20])
            .map_err(|e| format!("cannot write {mib} MiB to {}: {e}", place.display()))?;
        Ok(share)
    }

    /// A new ext4. In one where many files were deleted in the last minutes, ext4 spends most of the time of a create
    /// on finding a number that was not used lately (recently_deleted of fs/ext4/ialloc.c).
    fn mount(&mut self) -> Result<()> {
        let image = tempfile::NamedTempFile::new_in("/dev/shm").map_err(|e| format!("cannot make an image: {e}"))?;
        image.as_file().set_len(DISK).map_err(|e| format!("cannot make an image: {e}"))?;
        let path = image.path().display().to_string();
        output("mkfs.ext4", &["-q", "-F", &path])?;
        output("mount", &["-o", "loop", &path, &self.dir.path().display().to_string()])?;
        self.mounted = true;
        // The image lives as long as it is mounted.
        Ok(())
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // A program that still looks at it, such as an indexer, must not keep the directory.
        if self.mounted && output("umount", &["--lazy", &self.dir.path().display().to_string()]).is_err() {
            eprintln!("bench: cannot unmount {}", self.dir.path().display());
        }
    }
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
