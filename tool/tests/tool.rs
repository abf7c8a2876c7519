//! The command `thruway` as its caller sees it. Where it starts programs, these are scripts that play thruwayd and
//! QEMU.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;

/// Far longer than anything here takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

fn thruway() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_thruway"));
    command.stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < end, "never: {what}");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn check_leaves_no_process_behind() {
    if !geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    for _ in 0..20 {
        // This returns when all processes have closed the pipe: the window process too.
        let output = thruway().arg("check").arg(dir.path()).args(["--qemu=false", "--json"]).output().unwrap();
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["ok"].as_bool(), Some(output.status.success()), "{json}");
        assert_eq!(json["dir"]["path"].as_str(), dir.path().to_str());
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// What `thruway check` says of these, by `setpriv` with these options.
fn checked_by(options: &[&str], names: [&str; 2]) -> [(bool, String); 2] {
    let dir = tempfile::tempdir().unwrap();
    let open = fs::Permissions::from_mode(0o777);
    fs::set_permissions(dir.path(), open).unwrap();
    // A copy, since the user may have no access to the build directory. cp(1) makes it: if this process did, another
    // test's fork(2) could inherit the file open for writing, and it could not be executed.
    let program = dir.path().join("thruway");
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_thruway")).arg(&program).status().unwrap().success());
    let mut command = Command::new("setpriv");
    command.args(options).arg(&program).arg("check").arg(dir.path()).args(["--qemu=false", "--json"]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks: Vec<_> = ["host", "dir"].iter().map(|of| &json[of]).collect();
    let checks = checks[0].as_array().unwrap().iter().chain(checks[1]["checks"].as_array().unwrap());
    let checks: Vec<_> = checks.collect();
    names.map(|name| {
        let check = checks.iter().find(|check| check["name"] == name).unwrap();
        (check["ok"].as_bool().unwrap(), check["cure"].as_str().unwrap_or_default().to_owned())
    })
}

#[test]
fn check_names_what_cannot_be_had_without_root() {
    if !geteuid().is_root() {
        return;
    }
    let nobody = ["--reuid=54321", "--regid=54321", "--clear-groups", "--bounding-set=-all"];
    let [(ids, cure), (ownership, _)] = checked_by(&nobody, ["ids", "ownership"]);
    assert!(!ids && cure.contains("/etc/subuid") && cure.contains("--ownership=xattr"), "{cure}");
    assert!(ownership);
    let [(ids, cure), (sandbox, other)] =
        checked_by(&["--bounding-set=-sys_admin,-setpcap,-chown", "--inh-caps=-all"], ["ids", "sandbox"]);
    assert!(!ids && cure.contains("--ownership=xattr"), "{cure}");
    assert!(!sandbox && other.contains("--sandbox chroot"), "{other}");
    let [(ids, _), (sandbox, _)] = checked_by(&["--bounding-set=-setpcap"], ["ids", "sandbox"]);
    assert!(ids && sandbox);
}

#[test]
fn what_is_required_decides_the_status() {
    let check = |args: &[&str]| thruway().arg("check").args(["--qemu=false"]).args(args).output().unwrap();
    let output = check(&["--require=qemu"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).lines().any(|line| line.contains("missing  qemu") && line.contains("to get it: ")));
    let output = check(&["--require=mapping"]);
    assert_eq!(text(&output.stderr), "thruway: --require mapping is about a directory: name one, thruway check DIR\n");
}

#[test]
fn pages_and_completions_are_made() {
    let dir = tempfile::tempdir().unwrap();
    assert!(thruway().arg("man").arg(dir.path()).status().unwrap().success());
    for (page, words) in [("thruwayd.8", "passthrough"), ("thruway.1", "check"), ("thruway-run.1", "QEMU")] {
        let page = fs::read_to_string(dir.path().join(page)).unwrap();
        assert!(page.contains(words), "{page}");
    }
    for shell in ["bash", "zsh", "fish"] {
        for (program, words) in [("thruway", "check"), ("thruwayd", "passthrough-window")] {
            let output = thruway().args(["completions", shell, program]).output().unwrap();
            assert!(text(&output.stdout).contains(words), "{shell} {program}");
        }
    }
}

/// A directory with a script for each program. Each writes its process ID to the file PROGRAM.pid.
struct Stage(TempDir);

impl Stage {
    fn new(daemon: &str, qemu: &str) -> Self {
        let stage = Self(tempfile::tempdir().unwrap());
        fs::create_dir(stage.path("tmp")).unwrap();
        for (name, script) in [("daemon", daemon), ("qemu", qemu)] {
            let path = stage.path(name);
            let head = format!(
                "#!/bin/sh\ncd {}\necho \"$@\" >{name}.arguments\necho $$ >{name}.new\nmv {name}.new {name}.pid\n",
                stage.0.path().display()
            );
            fs::write(&path, head + script).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        stage
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, qemu: &[&str]) -> Child {
        let mut command = thruway();
        command.arg("run").arg("--thruwayd").arg(self.path("daemon")).args(["--shared-dir=/tmp", "--"]);
        command.arg(self.path("qemu")).args(qemu).env("TMPDIR", self.path("tmp"));
        // A file, since a process that is left behind would keep a pipe open.
        command.stdout(Stdio::null()).stderr(fs::File::create(self.path("errors")).unwrap());
        command.spawn().unwrap()
    }

    fn pid(&self, name: &str) -> Option<Pid> {
        Pid::from_raw(fs::read_to_string(self.path(&format!("{name}.pid"))).ok()?.trim().parse().ok()?)
    }

    /// Waits for the end. The error, after it has looked for what is left.
    fn end(&self, mut run: Child) -> (ExitStatus, String) {
        until("the end", || run.try_wait().unwrap().is_some());
        for name in ["daemon", "qemu"] {
            let proc = |pid: Pid| format!("/proc/{}", pid.as_raw_nonzero());
            let alive = self.pid(name).is_some_and(|pid| Path::new(&proc(pid)).exists());
            assert!(!alive, "{name} is left behind");
        }
        assert_eq!(fs::read_dir(self.path("tmp")).unwrap().count(), 0, "a socket is left behind");
        (run.wait().unwrap(), fs::read_to_string(self.path("errors")).unwrap())
    }

    fn started(&self) {
        until("both run", || self.pid("daemon").is_some() && self.pid("qemu").is_some());
    }
}

const SLEEP: &str = "exec sleep 1000";
/// Ends in order at SIGTERM, SIGINT and SIGHUP, as QEMU does, and says so by its status. The trap is there before the
/// process ID is.
const QEMU: &str = "while :; do sleep 0.01; done";

/// Puts a line in front of what a script does.
fn first(stage: &Stage, name: &str, line: &str) {
    let script = fs::read_to_string(stage.path(name)).unwrap();
    fs::write(stage.path(name), script.replacen("#!/bin/sh\n", &format!("#!/bin/sh\n{line}\n"), 1)).unwrap();
}

#[test]
fn run_returns_the_status_of_qemu() {
    let stage = Stage::new("until [ -f qemu.pid ] && ! kill -0 $(cat qemu.pid); do sleep 0.01; done", "exit 42");
    let (status, _) = stage.end(stage.run(&["-m", "1G", "-smp", "3"]));
    assert_eq!(status.code(), Some(42));
    let qemu = fs::read_to_string(stage.path("qemu.arguments")).unwrap();
    for words in ["size=1073741824,share=on", "memory-backend=thruway-mem", "tag=share", "num-request-queues=3"] {
        assert!(qemu.contains(words), "{qemu}");
    }
}

#[test]
fn run_passes_signals_to_qemu_alone() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let stage = Stage::new("until [ -f qemu.pid ] && ! kill -0 $(cat qemu.pid); do sleep 0.01; done", QEMU);
        first(&stage, "qemu", "trap 'exit 7' TERM INT HUP");
        let run = stage.run(&[]);
        stage.started();
        kill_process(Pid::from_child(&run), signal).unwrap();
        assert_eq!(stage.end(run).0.code(), Some(7), "{signal:?}");
    }
}

#[test]
fn run_ends_qemu_when_the_daemon_ends() {
    let stage = Stage::new("exit 3", QEMU);
    let (status, error) = stage.end(stage.run(&[]));
    assert_eq!(status.code(), Some(1));
    assert!(error.contains("thruwayd ended (exit status: 3)"), "{error}");

    let stage = Stage::new(SLEEP, QEMU);
    let run = stage.run(&[]);
    stage.started();
    kill_process(stage.pid("daemon").unwrap(), Signal::KILL).unwrap();
    let (status, error) = stage.end(run);
    assert_eq!(status.code(), Some(1));
    assert!(error.contains("thruwayd ended (signal: 9"), "{error}");
}

/// QEMU closes the connection just before it ends, and the daemon may be faster.
#[test]
fn run_waits_for_qemu_when_the_daemon_ends_in_order() {
    let qemu = "until [ -f daemon.pid ] && ! kill -0 $(cat daemon.pid); do sleep 0.01; done; exit 5";
    let stage = Stage::new("until [ -f qemu.pid ]; do sleep 0.01; done", qemu);
    assert_eq!(stage.end(stage.run(&[])).0.code(), Some(5));
}

#[test]
fn run_ends_the_daemon_when_qemu_cannot_start() {
    let stage = Stage::new(SLEEP, "");
    fs::remove_file(stage.path("qemu")).unwrap();
    let (status, error) = stage.end(stage.run(&[]));
    assert_eq!(status.code(), Some(1));
    assert!(error.contains("name a QEMU after --"), "{error}");

    let stage = Stage::new("", QEMU);
    fs::remove_file(stage.path("daemon")).unwrap();
    let (_, error) = stage.end(stage.run(&[]));
    assert!(error.contains("--thruwayd PATH"), "{error}");
}

#[test]
fn qemu_ends_when_run_is_killed() {
    let stage = Stage::new(SLEEP, QEMU);
    let mut run = stage.run(&[]);
    stage.started();
    run.kill().unwrap();
    run.wait().unwrap();
    let qemu = stage.pid("qemu").unwrap();
    // Its new parent may be slow to wait for it.
    let state = || fs::read_to_string(format!("/proc/{}/stat", qemu.as_raw_nonzero()));
    until("QEMU's end", || state().map_or(true, |stat| stat.contains(") Z ")));
    // A real daemon would end by itself, since QEMU is gone.
    kill_process(stage.pid("daemon").unwrap(), Signal::KILL).unwrap();
}

#[test]
fn run_refuses_what_conflicts() {
    let error = |args: &[&str]| -> String {
        let Output { status, stderr, .. } = thruway().arg("run").args(args).output().unwrap();
        assert!(!status.success());
        text(&stderr)
    };
    assert!(error(&["--shared-dir=/tmp", "--socket-path=/x", "--", "true"]).contains("remove it"));
    assert!(error(&["--shared-dir=/tmp", "--", "true", "-daemonize"]).contains("-daemonize does not go"));
    assert!(error(&["--shared-dir=/tmp", "--dax-window=3M", "--", "true"]).contains("multiple of 2M"));
    assert!(error(&["--", "true"]).contains("give --shared-dir DIR"));
}
