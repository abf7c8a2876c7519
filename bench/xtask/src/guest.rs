//! Boots a guest that does all jobs of a table with one contender.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use serde_json::Value;

use crate::host::{self, Result};
use crate::plan::{Contender, Daemon, FIRST_OPEN, Job, Measure, SETUPMAPPING, SETUPMAPPING_LIVE, Table};
use thruway_bench::series::{median, number};

/// Lines of a failed boot to show: the end of the console and of the daemon's log, then the boot's own message.
const SHOWN: usize = 60;

static STOPPED: AtomicBool = AtomicBool::new(false);
/// The process id of `vm-images/boot` while it runs, otherwise 0.
static BOOT: AtomicI32 = AtomicI32::new(0);

/// Lets a signal end the guest first. Then this program cleans up and ends too.
pub fn catch_signals() -> Result<()> {
    let stop = || {
        STOPPED.store(true, Ordering::SeqCst);
        if let Some(boot) = rustix::process::Pid::from_raw(BOOT.load(Ordering::SeqCst)) {
            let _ = rustix::process::kill_process(boot, rustix::process::Signal::TERM);
        }
    };
    ctrlc::set_handler(stop).map_err(|e| format!("cannot catch signals: {e}"))
}

/// What a guest reported.
#[derive(Default)]
pub struct Told {
    /// By the job's name.
    pub figures: BTreeMap<String, f64>,
    pub versions: BTreeMap<String, String>,
    /// Messages by job and opcode, of the jobs for which they are counted.
    pub requests: BTreeMap<String, BTreeMap<String, u64>>,
    /// What the daemon had counted when the job began.
    before: BTreeMap<String, u64>,
    rest: Vec<String>,
}

/// Boots the guest, prints each figure as it arrives, and returns when the guest has ended.
pub fn run(table: &Table, contender: &Contender, share: &Path, quick: bool) -> Result<Told> {
    let logs = tempfile::tempdir().map_err(|e| format!("cannot make a directory for logs: {e}"))?;
    let mut boot = command(table, contender, share, quick, logs.path())?
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| format!("cannot start vm-images/boot: {e}"))?;
    BOOT.store(boot.id() as i32, Ordering::SeqCst);
    let _changer = table.jobs.iter().any(|job| matches!(job.measure, Measure::Seen(_))).then(|| Changer::start(share));
    let told = listen(&mut boot, table, &logs.path().join("control"));
    let status = boot.wait().map_err(|e| format!("cannot wait for vm-images/boot: {e}"));
    BOOT.store(0, Ordering::SeqCst);
    let (mut told, status) = (told?, status?);
    if STOPPED.load(Ordering::SeqCst) {
        return Err("stopped".into());
    }
    if !status.success() {
        let end = told.rest.len().saturating_sub(SHOWN);
        return Err(format!("boot failed ({status}):\n{}", told.rest[end..].join("\n")));
    }
    let log = std::fs::read_to_string(logs.path().join("daemon-0.log")).unwrap_or_default();
    for job in table.jobs.iter().filter(|job| matches!(job.measure, Measure::Build)) {
        // A log has the whole session, of which the build is nearly all.
        told.requests.entry(job.name.to_owned()).or_insert_with(|| logged(&log));
    }
    let measured = [(SETUPMAPPING, mapping_time(&log)), (FIRST_OPEN, first_open_time(&log))];
    told.figures.extend(measured.into_iter().filter_map(|(name, us)| Some((name.to_owned(), us?))));
    match table.jobs.iter().find(|job| !told.figures.contains_key(job.name)) {
        Some(job) => Err(format!("the guest did not report the job '{}'", job.name)),
        None => Ok(told),
    }
}

/// A thread that changes the file `seen` of the share, until it is dropped.
struct Changer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Time between two changes: some guests need 10 ms to see one.
const CHANGE: Duration = Duration::from_millis(25);

impl Changer {
    fn start(share: &Path) -> Self {
        let (stop, path) = (Arc::<AtomicBool>::default(), share.join("seen"));
        let told = stop.clone();
        let change = move || -> io::Result<()> {
            let file = File::create(&path)?;
            while !told.load(Ordering::Relaxed) {
                // The time of the change, which the guest compares with its own clock.
                file.set_modified(SystemTime::now())?;
                std::thread::sleep(CHANGE);
            }
            Ok(())
        };
        let shown = move || change().unwrap_or_else(|e| eprintln!("bench: cannot change the file 'seen': {e}"));
        Self { stop, thread: Some(std::thread::spawn(shown)) }
    }
}

impl Drop for Changer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

fn command(table: &Table, contender: &Contender, share: &Path, quick: bool, logs: &Path) -> Result<Command> {
    let daemon = match contender.daemon {
        Daemon::Virtiofsd => host::virtiofsd()?,
        Daemon::Thruwayd | Daemon::Native(_) => host::thruwayd()?,
    };
    let place = match contender.daemon {
        Daemon::Native(place) => place,
        _ => "share",
    };
    let daemon_args = match contender.daemon {
        Daemon::Thruwayd => format!("{} --control-path {}", contender.daemon_args, logs.join("control").display()),
        _ => contender.daemon_args.to_owned(),
    };
    let scripts = match contender.agent {
        true => host::guest_dir_with_agent(&logs.join("guest"))?,
        false => host::guest_dir(),
    };
    // A quick job has a thousandth of the files.
    let line = |job: &Job| if quick { job_line(job).replace("000", "") } else { job_line(job) };
    // 200 ms of a quick job are a few requests even under emulation.
    let milliseconds = if quick { 200 } else { table.seconds * 1000 };
    // A shell joins stderr to stdout, so that there is one log.
    let mut command = Command::new("sh");
    command
        .args(["-c", "exec \"$@\" 2>&1", "sh"])
        // Only virtiofsd's own option sets its log level.
        .env_remove("RUST_LOG")
        .arg(host::root().join("vm-images/boot"))
        .args(table.boot)
        .args(contender.boot)
        .args(["--daemon", &daemon, "--daemon-args", &daemon_args])
        .args(["--share", &format!("b={}", share.display())])
        .arg("--log-dir")
        .arg(logs)
        .arg("--ro-dir")
        .arg(&scripts)
        .arg(scripts.join("bench.sh"))
        .current_dir(host::root())
        .args([place, &table.file_mib(quick).to_string(), &milliseconds.to_string()])
        .args(table.jobs.iter().map(line));
    if !matches!(contender.daemon, Daemon::Virtiofsd) {
        // Trace the window only. It logs one line per mapping, and a mapping takes some hundred times as long.
        command.env("RUST_LOG", "info,thruway::window=trace");
    }
    Ok(command)
}

/// The median of the times that the daemon logged for mappings made while [`SETUPMAPPING_LIVE`] others were live.
fn mapping_time(log: &str) -> Option<f64> {
    let times = log.lines().filter(|line| line.contains(" mapped ")).filter_map(|line| {
        field(line, "live=").filter(|live| SETUPMAPPING_LIVE.contains(live)).and_then(|_| field(line, " us="))
    });
    let times: Vec<f64> = times.map(|us| us as f64).collect();
    (!times.is_empty()).then(|| median(&times))
}

/// The time that the daemon logged for the first OPEN with passthrough.
fn first_open_time(log: &str) -> Option<f64> {
    field(log.lines().find(|line| line.contains(" passthrough "))?, " us=").map(|us| us as f64)
}

fn field(line: &str, name: &str) -> Option<u64> {
    line.split_once(name)?.1.split(' ').next()?.parse().ok()
}

fn job_line(job: &Job) -> String {
    match job.measure {
        Measure::Fio(arguments, 1) => format!("{} fio {arguments}", job.name),
        Measure::Fio(arguments, jobs) => {
            let part = 100 / jobs;
            format!("{} fio {arguments} --numjobs={jobs} --size={part}% --offset_increment={part}%", job.name)
        }
        Measure::Meta(arguments) => format!("{} meta {arguments}", job.name),
        Measure::FirstTouch(ranges) => format!("{} first-touch {ranges}", job.name),
        Measure::Build => format!("{} build", job.name),
        Measure::Names(arguments) => format!("{} names {arguments}", job.name),
        Measure::Seen(arguments) => format!("{} seen {arguments}", job.name),
    }
}

fn listen(boot: &mut Child, table: &Table, control: &Path) -> Result<Told> {
    let mut told = Told::default();
    for line in BufReader::new(boot.stdout.take().expect("it was piped")).split(b'\n') {
        let line = line.map_err(|e| format!("cannot read from vm-images/boot: {e}"))?;
        told.take(String::from_utf8_lossy(&line).trim_end(), table, control)?;
    }
    Ok(told)
}

impl Told {
    fn take(&mut self, line: &str, table: &Table, control: &Path) -> Result<()> {
        if let Some((name, json)) = line.strip_prefix("result ").and_then(|rest| rest.split_once(' ')) {
            let job = table.jobs.iter().find(|job| job.name == name).ok_or(format!("no such job: {name}"))?;
            if job.measure.counts_messages() {
                if let Some(requests) = counted(control, &self.before) {
                    self.requests.insert(name.to_owned(), requests);
                }
            }
            let figure = figure(&job.measure, json).ok_or(format!("the job '{name}' gave no figure: {json}"))?;
            println!("    {:34} {:>8} {}", job.title, number(figure), job.measure.unit());
            self.figures.insert(name.to_owned(), figure);
        } else if line.starts_with("begin ") {
            self.before = counted(control, &BTreeMap::new()).unwrap_or_default();
        } else if let Some((name, version)) = line.strip_prefix("version ").and_then(|rest| rest.split_once(' ')) {
            self.versions.insert(name.to_owned(), version.to_owned());
        } else if let Some(accelerator) = line.strip_prefix("boot: qemu runs with ") {
            self.versions.insert("accelerator".to_owned(), accelerator.to_owned());
        } else {
            self.rest.push(format!("  | {line}"));
        }
        Ok(())
    }
}

/// The requests that the daemon has counted since `before`. `None` if it does not count.
fn counted(control: &Path, before: &BTreeMap<String, u64>) -> Option<BTreeMap<String, u64>> {
    let mut text = String::new();
    let asked = UnixStream::connect(control).and_then(|mut socket| {
        socket.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
        socket.read_to_string(&mut text)
    });
    asked.ok()?;
    let counts = text.lines().filter_map(|line| {
        let (opcode, count) = line.strip_prefix("thruway_requests_total{opcode=\"")?.split_once("\"} ")?;
        Some((opcode.to_owned(), count.parse::<u64>().ok()? - before.get(opcode).copied().unwrap_or(0)))
    });
    Some(counts.collect())
}

/// The requests that virtiofsd has logged, if it was told to log them, in FUSE's capitals.
fn logged(log: &str) -> BTreeMap<String, u64> {
    let mut requests = BTreeMap::new();
    for opcode in log.lines().filter_map(|line| line.split_once("Received request: opcode=")?.1.split(' ').next()) {
        *requests.entry(opcode.to_uppercase()).or_default() += 1;
    }
    requests
}

/// The figure in a job's JSON. `None` if there is none, or if it is not positive.
fn figure(measure: &Measure, json: &str) -> Option<f64> {
    let json: Value = serde_json::from_str(json).ok()?;
    let figure = match measure {
        Measure::Fio(..) => json["jobs"].as_array()?.iter().map(iops).sum::<Option<f64>>()?,
        Measure::Build | Measure::Meta(_) | Measure::Names(_) | Measure::Seen(_) => json.as_f64()?,
        Measure::FirstTouch(_) => median(&json.as_array()?.iter().map(Value::as_f64).collect::<Option<Vec<_>>>()?),
    };
    (figure > 0.0).then_some(figure)
}

fn iops(job: &Value) -> Option<f64> {
    (job["error"] == 0).then_some(job["read"]["iops"].as_f64()? + job["write"]["iops"].as_f64()?)
}
