//! The daemon's command line as its caller sees it: exit status, one line on stderr, the socket.

mod cgroup;
mod common;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::thruwayd;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Resource::Nofile, Rlimit};
use thruway::fuse::abi::{InitInCompat, KERNEL_VERSION, Opcode};
use thruway_bench::frontend::{Frontend, Options};
use virtio_queue::desc::split::Descriptor;
use zerocopy::IntoBytes;

/// Runs the daemon until it exits.
fn run(args: &[&str]) -> Output {
    thruwayd().args(args).output().unwrap()
}

/// Returns the one error line of a failed start, without warnings and without the program's name.
fn failure(args: &[&str]) -> String {
    let output = run(args);
    let text = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<_> = text.lines().filter(|line| !line.contains(" WARN ")).collect();
    assert_eq!((output.status.code(), lines.len()), (Some(1), 1), "{args:?}: {text}");
    assert!(output.stdout.is_empty());
    lines[0].strip_prefix("thruwayd: ").unwrap().to_owned()
}

/// A daemon without a sandbox, so that the test needs no privilege. Dropping it kills the daemon.
struct Running(Child);

impl Running {
    fn start(share: &Path, args: &[&str]) -> Self {
        let mut command = thruwayd();
        command.arg("--shared-dir").arg(share).args(["--sandbox", "none"]).args(args);
        Self(command.stderr(Stdio::null()).spawn().unwrap())
    }

    fn wait(&mut self) -> Option<i32> {
        self.0.wait().unwrap().code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The vhost-user message VHOST_USER_GET_FEATURES: request 1, version 1, no payload. Its answer has 20 bytes.
const GET_FEATURES: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];

fn connect(path: &Path) -> UnixStream {
    let end = Instant::now() + Duration::from_secs(100);
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return stream,
            Err(e) if Instant::now() > end => panic!("{}: {e}", path.display()),
            Err(_) => sleep(Duration::from_millis(10)),
        }
    }
}

#[test]
fn help_and_version_succeed() {
    for arg in ["--help", "-h", "--version", "-V"] {
        let output = run(&[arg]);
        assert!(output.status.success() && !output.stdout.is_empty() && output.stderr.is_empty(), "{arg}");
    }
    let help = String::from_utf8(run(&["--help"]).stdout).unwrap();
    assert!(help.contains("cannot be killed until it gets the lock"), "{help}");
}

#[test]
fn capabilities_are_those_of_the_installed_file() {
    let printed = String::from_utf8(run(&["--print-capabilities"]).stdout).unwrap();
    let installed = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/50-thruway.json")).unwrap();
    let [printed, installed]: [serde_json::Value; 2] = [&printed, &installed].map(|text| text.parse().unwrap());
    assert_eq!((&printed["type"], &installed["binary"]), (&"fs".into(), &"/usr/libexec/thruwayd".into()));
    assert_eq!(printed["features"], installed["features"]);
}

#[test]
fn usage_errors_are_one_line_that_names_the_option() {
    for (args, named) in [
        (&["--cache=some"][..], "--cache"),
        (&["--sandbox=jail"], "namespace, chroot, none"),
        (&["--share=a/b=/tmp"], "is not a name for a directory"),
        (&["--nonsense"], "--nonsense"),
        (&["--shared-dir"], "--shared-dir"),
        (&["--shared-dir=/"], "--socket-path"),
        (&["--socket-path=/x"], "--shared-dir"),
        (&["--shared-dir=/", "--fd=3", "--tag="], "36"),
        (&["--shared-dir=/", "--fd=3", "--xattrmap=:zap:all:::"], "zap"),
        (&["--shared-dir=/", "--fd=3", "--translate-uid=map:0:1"], "map:0:100000:65536"),
        (&["--shared-dir=/", "--fd=3", "--modcaps=+fly"], "CAP_FLY"),
        (&["--shared-dir=/", "--fd=3", "--uid-map=0:1:2"], ":0:100000:65536:"),
        (&["-o", "source=/,cache=some", "--fd=3"], "-o cache"),
        (&["--shared-dir=/", "--fd=3", "--ownership=xattr", "--posix-acl"], "--ownership=xattr"),
        (&["--shared-dir=/", "--fd=3", "--ownership=xattr", "--killpriv-v2"], "--ownership=xattr"),
        (&["--shared-dir=/", "--fd=3", "--ownership=xattr", "--translate-uid=map:0:1000:1"], "--ownership=xattr"),
    ] {
        let line = failure(args);
        assert!(line.contains(named) && line.contains("--help"), "{args:?}: {line}");
    }
}

#[test]
fn starts_that_must_fail_say_why() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (share, socket) = (path(""), path("s"));
    fs::write(path("file"), "").unwrap();
    for (args, named) in [
        (["--shared-dir", &path("absent"), "--socket-path", &socket], "--shared-dir"),
        (["--shared-dir", &path("file"), "--socket-path", &socket], "is not a directory"),
        (["--shared-dir", &path("file/x"), "--socket-path", &socket], "Not a directory"),
        (["--shared-dir", &share, "--socket-path", &path("absent/s")], "create it"),
        (["--shared-dir", &share, "--socket-path", &path("file")], "is not a socket"),
        (["--shared-dir", &share, "--socket-path", &path(&"x".repeat(107))], "107 bytes"),
        (["--shared-dir", &share, "--fd", "99"], "--fd 99"),
        (["--shared-dir", &share, "--fd", "0"], "--fd 0"),
    ] {
        let line = failure(&args);
        assert!(line.contains(named), "{args:?}: {line}");
    }
    let line = failure(&["--share", &format!("a={share}"), "--socket-path", &socket, "--sandbox", "none"]);
    assert!(line.contains("--share needs --sandbox namespace"), "{line}");
    let line = failure(&["--shared-dir", &share, "--socket-path", &socket, "--socket-group", "no-such-group"]);
    assert!(line.contains("no-such-group"), "{line}");
    let proc = ["--shared-dir", "/proc", "--socket-path", &socket, "--sandbox", "none", "--ownership", "xattr"];
    let line = failure(&proc);
    assert!(line.contains("--ownership=xattr needs a file system"), "{line}");
    let line = failure(&["--shared-dir", &share, "--socket-path", &socket, "--rlimit-nofile", "18446744073709551615"]);
    assert!(line.contains("--rlimit-nofile"), "{line}");
}

/// As root, in a control group of its own: the daemon serves with as many threads as it says that it needs, and says
/// with fewer which limit is in the way.
#[test]
fn too_few_threads_are_said_at_the_start() {
    let Some(group) = cgroup::Group::new("pids.max") else { return };
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let start = |most: usize, args: &[&str]| {
        let args: Vec<_> = ["--rlimit-nofile=0"].iter().chain(args).copied().collect();
        group.set("pids.max", most);
        let mut command = group.command(env!("CARGO_BIN_EXE_thruwayd"));
        command.env_remove("RUST_LOG").arg("--shared-dir").arg(dir.path()).arg("--socket-path").arg(&socket);
        command.args(args).stdin(Stdio::null());
        command
    };
    for args in [&["--num-request-queues=1"][..], &["--num-request-queues=63"], &["--dax-window=2M"]] {
        let failed = start(5, args).output().unwrap();
        let text = String::from_utf8(failed.stderr).unwrap();
        assert_eq!((failed.status.code(), text.lines().count()), (Some(1), 1), "{text}");
        assert!(text.contains("pids.max is 5,"), "{text}");
        let mut words = text.split(' ');
        let needed = words.find_map(|word| word.parse().ok()).unwrap_or_else(|| panic!("{text}"));
        let refused = start(needed - 1, args).output().unwrap().stderr;
        let refused = String::from_utf8(refused).unwrap();
        assert!(refused.contains(&format!("needs {needed} processes and threads")), "{refused}");
        let mut running = Running(start(needed, args).stderr(Stdio::null()).spawn().unwrap());
        drop(connect(&socket));
        let ended = running.wait();
        assert_eq!(ended, Some(0), "{args:?} {needed}");
        // The window process ends by itself.
        while !group.get("cgroup.procs").is_empty() {
            sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn the_socket_is_private_exclusive_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let args = ["--socket-path", socket.to_str().unwrap()];
    let mut first = Running::start(dir.path(), &args);
    let frontend = connect(&socket);
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o700);
    let pid = fs::read_to_string(dir.path().join("s.pid")).unwrap();
    assert_eq!(pid, format!("{}\n", first.0.id()));
    let line = failure(&["--shared-dir", dir.path().to_str().unwrap(), args[0], args[1]]);
    assert!(line.contains("another daemon"), "{line}");
    drop(frontend);
    assert_eq!(first.wait(), Some(0));
    assert!(!socket.exists());
}

#[test]
fn a_group_can_be_allowed() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let args = ["--keep-alive", "--socket-group=daemon", "--socket-path", socket.to_str().unwrap()];
    let _daemon = Running::start(dir.path(), &args);
    // A daemon that answers has set the group.
    let mut frontend = connect(&socket);
    frontend.write_all(&GET_FEATURES).unwrap();
    frontend.read_exact(&mut [0; 20]).unwrap();
    let groups = fs::read_to_string("/etc/group").unwrap();
    let group = groups.lines().find(|line| line.starts_with("daemon:")).unwrap();
    let found = fs::metadata(&socket).unwrap();
    assert_eq!(group.split(':').nth(2).unwrap(), found.gid().to_string());
    assert_eq!(found.permissions().mode() & 0o777, 0o770);
}

#[test]
fn a_stale_socket_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    drop(UnixListener::bind(&socket).unwrap());
    let args = ["--socket-path", socket.to_str().unwrap()];
    // There is no pause, so the first daemon may still be ending when the second starts.
    drop(Running::start(dir.path(), &args));
    let mut second = Running::start(dir.path(), &args);
    drop(connect(&socket));
    assert_eq!(second.wait(), Some(0));
}

#[test]
fn a_file_that_is_not_a_pid_file_is_not_touched() {
    let start = |dir: &Path| {
        let socket = dir.join("s");
        failure(&["--sandbox=none", "--shared-dir", dir.to_str().unwrap(), "--socket-path", socket.to_str().unwrap()])
    };
    for contents in ["123\n", "text"] {
        let makers: [fn(&Path, &Path); 3] = [
            |victim, pid| std::os::unix::fs::symlink(victim, pid).unwrap(),
            |victim, pid| fs::hard_link(victim, pid).unwrap(),
            |victim, pid| fs::write(pid, fs::read(victim).unwrap()).unwrap(),
        ];
        for (kind, make) in makers.iter().enumerate() {
            let dir = tempfile::tempdir().unwrap();
            let (victim, pid) = (dir.path().join("victim"), dir.path().join("s.pid"));
            fs::write(&victim, contents).unwrap();
            make(&victim, &pid);
            if (kind, contents) == (2, "123\n") {
                // This is the file that a killed daemon leaves.
                let mut daemon = Running::start(dir.path(), &["--socket-path", dir.path().join("s").to_str().unwrap()]);
                drop(connect(&dir.path().join("s")));
                assert_eq!(fs::read_to_string(&pid).unwrap(), format!("{}\n", daemon.0.id()));
                daemon.wait();
                continue;
            }
            let line = start(dir.path());
            assert!(line.contains("s.pid"), "{line}");
            assert_eq!(fs::read_to_string(&victim).unwrap(), contents);
            assert_eq!(fs::read_to_string(&pid).unwrap(), contents);
            assert!(!dir.path().join("s").exists());
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, dir.path().join("s.pid"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    assert!(start(dir.path()).contains("is not a pid file"));
}

#[test]
fn a_daemon_without_descriptors_accepts_later() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, log) = (dir.path().join("s"), dir.path().join("log"));
    let mut command = thruwayd();
    command.args(["--keep-alive", "--sandbox=none", "--shared-dir"]).arg(dir.path()).arg("--socket-path").arg(&socket);
    let mut daemon = Running(command.stderr(fs::File::create(&log).unwrap()).spawn().unwrap());
    let says = |text: &str| {
        let end = Instant::now() + Duration::from_secs(100);
        while !fs::read_to_string(&log).unwrap().contains(text) {
            assert!(Instant::now() < end, "not said: {text}");
            sleep(Duration::from_millis(5));
        }
    };
    drop(connect(&socket));
    says("waiting for another");
    let pid = rustix::process::Pid::from_child(&daemon.0);
    let limits = fs::read_to_string(format!("/proc/{}/limits", daemon.0.id())).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let hard = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    let limit = |n| {
        rustix::process::prlimit(Some(pid), Nofile, Rlimit { current: Some(n), maximum: Some(hard) }).unwrap();
    };
    // When the daemon waits in accept(2), it has opened all that it needs for the next connection.
    let waits = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", daemon.0.id())).unwrap();
        let calls = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("syscall")).ok());
        calls.into_iter().any(|call| call.starts_with(&format!("{} ", libc::SYS_accept4)))
    };
    while !waits() {
        sleep(Duration::from_millis(5));
    }
    let fd = format!("/proc/{}/fd", daemon.0.id());
    let free = (0..).find(|n| !Path::new(&fd).join(n.to_string()).is_symlink()).unwrap();
    limit(free);
    // The kernel had a descriptor for the connection, but the daemon has none for the next step.
    drop(connect(&socket));
    says("trying again");
    assert!(daemon.0.try_wait().unwrap().is_none());
    limit(hard);
    let mut frontend = connect(&socket);
    frontend.write_all(&GET_FEATURES).unwrap();
    frontend.read_exact(&mut [0; 20]).unwrap();
}

#[test]
fn keep_alive_serves_the_next_frontend() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let mut daemon = Running::start(dir.path(), &["--keep-alive", "--socket-path", socket.to_str().unwrap()]);
    for _ in 0..3 {
        drop(connect(&socket));
    }
    assert!(daemon.0.try_wait().unwrap().is_none());
}

#[test]
fn an_inherited_listener_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    fcntl_setfd(&listener, FdFlags::empty()).unwrap();
    let mut daemon = Running::start(dir.path(), &["--fd", &listener.as_raw_fd().to_string()]);
    drop(listener);
    drop(connect(&socket));
    assert_eq!(daemon.wait(), Some(0));
    assert!(socket.exists());
}

#[test]
fn the_log_says_where_it_listens_and_what_is_deprecated() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, log) = (dir.path().join("s"), dir.path().join("log"));
    let mut command = thruwayd();
    command.args(["-f", "--sandbox=none", "--socket"]).arg(&socket).arg("--shared-dir").arg(dir.path());
    let mut child = command.stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
    drop(connect(&socket));
    assert!(child.wait().unwrap().success());
    let text = fs::read_to_string(log).unwrap();
    assert!(text.contains(&format!("Waiting for vhost-user socket connection on {}", socket.display())), "{text}");
    assert!(text.contains("--socket is deprecated") && text.contains("-f has no effect"), "{text}");
}

/// What the daemon says of the virtual machine's memory: it is more than the daemon's control group allows, and some of
/// it is not shared.
#[test]
fn the_log_says_what_is_wrong_with_the_memory() {
    const LIMIT: &str = "50331648";
    let dir = tempfile::tempdir().unwrap();
    let (socket, log) = (dir.path().join("s"), dir.path().join("log"));
    let serve = |mut command: Command, options| {
        command.env_remove("RUST_LOG").args(["--sandbox=none", "--socket-path"]).arg(&socket);
        command.arg("--shared-dir").arg(dir.path()).stdin(Stdio::null());
        let mut child = command.stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
        while !socket.exists() {
            sleep(Duration::from_millis(10));
        }
        let frontend = Frontend::connect(&socket, options).unwrap();
        // 1 TiB: no memory is there.
        let descriptors = frontend.take_descriptors(1, 1).unwrap();
        frontend.write_descriptor(1, descriptors[0], Descriptor::new(1 << 40, 40, 0, 0)).unwrap();
        for _ in 0..2 {
            frontend.push_raw(1, descriptors[0]).unwrap();
            frontend.wait_raw(1, Duration::from_secs(100)).unwrap();
        }
        drop(frontend);
        assert!(child.wait().unwrap().success());
        fs::read_to_string(&log).unwrap()
    };
    let unshared = |text: &str| text.lines().filter(|line| line.contains("has not shared")).count();
    let text = serve(thruwayd(), Options::default());
    assert!(unshared(&text) == 1 && text.contains("share=on"), "{text}");
    let group = ["memory.max", "memory.limit_in_bytes"].map(|file| (cgroup::Group::new(file), file));
    let Some((group, file)) = group.into_iter().find_map(|(group, file)| Some((group?, file))) else { return };
    group.set(file, LIMIT);
    for (mem_size, said) in [(32 << 20, 0), (64 << 20, 1)] {
        let command = group.command(env!("CARGO_BIN_EXE_thruwayd"));
        let text = serve(command, Options { mem_size, ..Options::default() });
        let lines = text.lines().filter(|line| line.contains(LIMIT) && line.contains("kernel may kill"));
        assert_eq!(lines.count(), said, "{text}");
    }
}

/// A guest that floods the log is served even if nobody reads the log, and every lost message is counted.
#[test]
fn a_flood_of_messages_delays_nothing() {
    const FLOOD: u64 = 1000;
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let (log, full) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let (mut log, mut full) = (File::from(log), File::from(full));
    let mut command = thruwayd();
    command.arg("--shared-dir").arg(dir.path()).arg("--socket-path").arg(&socket).args(["--sandbox", "none"]);
    let mut child = Running(command.stderr(full.try_clone().unwrap()).spawn().unwrap());
    drop(command);
    // The daemon writes the log's first line when it has started.
    let mut first = [0; 1];
    log.read_exact(&mut first).unwrap();
    let end = Instant::now() + Duration::from_secs(100);
    let frontend = loop {
        match Frontend::connect(&socket, Options::default()) {
            Ok(frontend) => break frontend,
            Err(e) if Instant::now() > end => panic!("{e}"),
            Err(_) => sleep(Duration::from_millis(10)),
        }
    };
    fcntl_setfl(&full, OFlags::NONBLOCK).unwrap();
    while full.write(&[b'\n'; 4096]).is_ok() {}
    while full.write(b"\n").is_ok() {}
    fcntl_setfl(&full, OFlags::empty()).unwrap();
    drop(full);
    let init = InitInCompat { major: KERNEL_VERSION, minor: 5, ..Default::default() };
    for _ in 0..FLOOD {
        let reply = frontend.request(1, Opcode::Init as u32, 0, init.as_bytes(), &[], 64);
        assert_eq!(reply, Err(libc::EPROTO));
    }
    drop(frontend);
    let mut text = String::new();
    log.read_to_string(&mut text).unwrap();
    assert_eq!(child.wait(), Some(0));
    let told = text.lines().filter(|line| line.contains("the guest speaks FUSE")).count() as u64;
    let count = |line: &str| line.strip_prefix("thruwayd: ")?.split_once(" more messages")?.0.parse::<u64>().ok();
    let left_out: u64 = text.lines().filter_map(count).sum();
    assert_eq!(told + left_out, FLOOD, "{text}");
    assert!(told < FLOOD, "{text}");
}
