//! The control socket of a daemon that serves a frontend: what it says, what it takes, and what clients cannot do to it
//! or to the guest.

mod cgroup;
mod common;

use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{thruwayd, wait_until};
use serde::de::DeserializeOwned;
use thruway::control::api;
use thruway::fuse::abi::*;
use thruway::limits::{CONTROL_BODY, CONTROL_CONNECTIONS, CONTROL_HEAD, Limit};
use thruway_bench::frontend::{Frontend, Options};
use zerocopy::{FromBytes, IntoBytes};

/// A limit on hangs.
const LONG: Duration = Duration::from_secs(60);

/// A daemon, and a guest that has opened a session. Its filter kills it at a call that the control socket should not
/// need.
struct Daemon {
    child: Child,
    guest: Option<Frontend>,
    dir: tempfile::TempDir,
}

impl Daemon {
    fn start(args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("share/sub")).unwrap();
        fs::write(dir.path().join("share/sub/file"), "contents").unwrap();
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let child = command(dir.path(), "socket").args(args).stderr(log).spawn().unwrap();
        let mut daemon = Self { child, guest: None, dir };
        daemon.connect();
        daemon
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn create(&self, name: &[u8]) -> (u64, u64) {
        let args = CreateIn { flags: libc::O_RDWR as u32, mode: libc::S_IFREG | 0o600, ..Default::default() };
        let body = [args.as_bytes(), name].concat();
        let out = self.guest().request(1, Opcode::Create as u32, ROOT_ID, &body, b"", 144).unwrap();
        let (entry, rest) = EntryOut::read_from_prefix(&out).unwrap();
        (entry.nodeid, OpenOut::read_from_prefix(rest).unwrap().0.fh)
    }

    fn connect(&mut self) {
        wait_until("listens", || self.path("socket").exists());
        self.guest = Some(Frontend::connect(&self.path("socket"), Options::default()).unwrap());
        self.guest().fuse_init(InitFlags::ASYNC_READ.bits() | InitFlags::POSIX_LOCKS.bits()).unwrap();
    }

    fn guest(&self) -> &Frontend {
        self.guest.as_ref().unwrap()
    }

    fn lookup(&self, parent: u64, name: &[u8]) -> Result<u64, i32> {
        let entry = self.guest().request(1, Opcode::Lookup as u32, parent, name, b"", 128)?;
        Ok(EntryOut::read_from_prefix(&entry).unwrap().0.nodeid)
    }

    fn file(&self) -> u64 {
        let dir = self.lookup(ROOT_ID, b"sub\0").unwrap();
        self.lookup(dir, b"file\0").unwrap()
    }

    fn open(&self, node: u64) -> u64 {
        let args = OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
        let open = self.guest().request(1, Opcode::Open as u32, node, args.as_bytes(), b"", 16).unwrap();
        OpenOut::read_from_prefix(&open).unwrap().0.fh
    }

    fn dial(&self) -> UnixStream {
        let stream = UnixStream::connect(self.path("control")).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream
    }

    /// Sends these bytes and reads to the end. Returns the status, the head and the body.
    fn raw(&self, request: &[u8]) -> (u16, String, String) {
        let mut stream = self.dial();
        // The daemon may have said no before it has read all.
        let _ = stream.write_all(request);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        (status, head.to_owned(), body.to_owned())
    }

    fn ask(&self, method: &str, target: &str, body: &str) -> (u16, String) {
        let length = body.len();
        let head = format!("{method} {target} HTTP/1.1\r\nHost: _\r\nContent-Length: {length}\r\n\r\n");
        let (status, _, answer) = self.raw((head + body).as_bytes());
        (status, answer)
    }

    fn get<T: DeserializeOwned>(&self, target: &str) -> T {
        let (status, body) = self.ask("GET", target, "");
        assert_eq!(status, 200, "{target}: {body}");
        serde_json::from_str(&body).unwrap()
    }

    /// A metric, for example `thruway_inodes` or `thruway_requests_total{opcode="READ"}`.
    fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.ask("GET", "/metrics", "");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(dir: &Path, socket: &str) -> Command {
    let mut command = thruwayd();
    command.stderr(Stdio::null());
    command.arg("--shared-dir").arg(dir.join("share")).arg("--socket-path").arg(dir.join(socket));
    command.arg("--control-path").arg(dir.join("control")).args(["--sandbox", "none"]);
    command
}

fn error(body: &str) -> String {
    let error: api::Error = serde_json::from_str(body).unwrap();
    assert!(!error.error.is_empty() && !error.error.contains('\n'), "{body}");
    error.error
}

#[test]
fn what_it_shows_is_what_happened() {
    let daemon = Daemon::start(&["--cache", "always", "--tag", "t"]);
    let status: api::Status = daemon.get("/status");
    assert_eq!((&*status.version, status.pid), (env!("CARGO_PKG_VERSION"), daemon.child.id()));
    assert_eq!(status.shared_dir, daemon.path("share").to_str().unwrap());
    assert_eq!(status.socket.as_deref(), daemon.path("socket").to_str());
    for (name, value) in [("cache", "always"), ("tag", "t"), ("sandbox", "none"), ("xattr", "false")] {
        assert_eq!(status.options.get(name).map(String::as_str), Some(value), "{name}");
    }
    assert_eq!(status.guest, Some(api::Guest { flags: vec!["ASYNC_READ".into()], minor: Some(45) }));
    let frontend = status.frontend.unwrap();
    assert!(frontend.features.contains(&"VIRTIO_F_VERSION_1".to_owned()), "{frontend:?}");
    assert!(frontend.protocol_offered.contains(&"MQ".to_owned()), "{frontend:?}");
    let queue = &frontend.queues[1];
    assert!(queue.running && !queue.broken && queue.role == "request" && queue.size == 128, "{queue:?}");
    for off in [&status.dax.switch, &status.passthrough.switch, &status.guard, &status.watch.switch] {
        assert!(!off.on && off.why.as_ref().is_some_and(|why| !why.is_empty()), "{off:?}");
    }
    assert!(!status.held && status.migration.state == "none");

    let file = daemon.file();
    let fh = daemon.open(file);
    assert_eq!(daemon.lookup(ROOT_ID, b"absent\0"), Err(libc::ENOENT));
    assert_eq!(daemon.lookup(999, b"absent\0"), Err(libc::ESTALE));
    for _ in 0..3 {
        let read = ReadIn { fh, size: 5, ..Default::default() };
        let data = daemon.guest().request(1, Opcode::Read as u32, file, read.as_bytes(), b"", 5).unwrap();
        assert_eq!(data, b"conte");
    }
    let write = WriteIn { fh, size: 4, ..Default::default() };
    daemon.guest().request(1, Opcode::Write as u32, file, write.as_bytes(), b"data", 8).unwrap();
    for (name, value) in [
        ("thruway_requests_total{opcode=\"LOOKUP\"}", 4.0),
        ("thruway_requests_total{opcode=\"INIT\"}", 1.0),
        ("thruway_requests_total{opcode=\"MKNOD\"}", 0.0),
        ("thruway_requests_total{opcode=\"RENAME2\"}", 0.0),
        ("thruway_requests_total{opcode=\"BATCH_FORGET\"}", 0.0),
        ("thruway_requests_total{opcode=\"COPY_FILE_RANGE_64\"}", 0.0),
        ("thruway_request_errors_total{opcode=\"LOOKUP\"}", 1.0),
        ("thruway_request_seconds_count{opcode=\"READ\"}", 1.0),
        ("thruway_request_seconds_bucket{le=\"+Inf\",opcode=\"READ\"}", 1.0),
        ("thruway_read_bytes_total", 15.0),
        ("thruway_written_bytes_total", 4.0),
        ("thruway_queue_requests{queue=\"1\"}", 0.0),
        ("thruway_inodes", 3.0),
        ("thruway_inodes_limit", 4_194_304.0),
        ("thruway_handles", 1.0),
        ("thruway_mappings{window=\"dax\"}", 0.0),
        ("thruway_agent_changes_total{result=\"failed\"}", 0.0),
        ("thruway_limit_reached_total{limit=\"inodes\"}", 0.0),
        ("thruway_build_info{version=\"0.1.0\"}", 1.0),
    ] {
        assert_eq!(daemon.metric(name), value, "{name}");
    }
    assert!(daemon.metric("thruway_request_seconds_sum{opcode=\"READ\"}") > 0.0);
    // Those of the process itself, the sockets and the file. Linux before 6.2 does not tell.
    let (_, text) = daemon.ask("GET", "/metrics", "");
    assert!(!text.contains("\nthruway_descriptors ") || daemon.metric("thruway_descriptors") > 6.0);
    assert!(daemon.metric("thruway_uptime_seconds") > 0.0 && daemon.metric("thruway_descriptors_limit") > 0.0);
    let (_, text) = daemon.ask("GET", "/metrics", "");
    assert!(text.ends_with("# EOF\n") && Limit::ALL.iter().all(|limit| text.contains(limit.name())));

    for (by, first) in [("nlookup", "/"), ("opens", "/sub/file")] {
        let inodes: api::Inodes = daemon.get(&format!("/inodes?top=1&by={by}"));
        assert_eq!((inodes.known, inodes.inodes.len(), &*inodes.by), (3, 1, by));
        assert!(by == "nlookup" || inodes.inodes[0].path.as_deref() == Some(first), "{inodes:?}");
    }
    let inodes: api::Inodes = daemon.get("/inodes");
    let mut paths: Vec<_> = inodes.inodes.iter().map(|inode| inode.path.as_deref().unwrap()).collect();
    paths.sort_unstable();
    assert_eq!(paths, ["/", "/sub", "/sub/file"]);
    let of_file = inodes.inodes.iter().find(|inode| inode.nodeid == file).unwrap();
    assert_eq!((&*of_file.kind, of_file.opens, of_file.nlookup), ("file", 1, 1));
    let mappings: api::Mappings = daemon.get("/mappings");
    assert_eq!(mappings, api::Mappings { limit: 256, ..Default::default() });
}

#[test]
fn refusals_are_counted_by_limit() {
    // The root, `sub` and `file`.
    let daemon = Daemon::start(&["--max-inodes", "3"]);
    let reached = |limit: &str| daemon.metric(&format!("thruway_limit_reached_total{{limit=\"{limit}\"}}"));
    daemon.file();
    fs::write(daemon.path("share/other"), "").unwrap();
    // Each of them has a line for the log, which leaves most of these lines out.
    for _ in 0..1000 {
        assert_eq!(daemon.lookup(ROOT_ID, b"other\0"), Err(libc::ENFILE));
    }
    assert_eq!(reached("inodes"), 1000.0);
    assert!(reached("log_messages") > 0.0);
}

#[test]
fn limits_and_polls_are_counted() {
    // For as long as it may, so that a request finds it there even on a busy machine.
    let daemon = Daemon::start(&["--max-inodes", "2", "--poll-us", "10000"]);
    let dir = daemon.lookup(ROOT_ID, b"sub\0").unwrap();
    assert_eq!(daemon.lookup(dir, b"file\0"), Err(libc::ENFILE));
    assert_eq!(daemon.metric("thruway_limit_reached_total{limit=\"inodes\"}"), 1.0);
    wait_until("the idle worker sleeps", || daemon.metric("thruway_polls_total{result=\"slept\"}") > 0.0);
    wait_until("a request comes during a poll", || {
        assert!((0..100).all(|_| daemon.lookup(ROOT_ID, b"absent\0") == Err(libc::ENOENT)));
        daemon.metric("thruway_polls_total{result=\"found\"}") > 0.0
    });
}

/// The names of the daemon's threads.
fn threads(pid: u32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    // A thread may end meanwhile.
    tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok()).map(|name| name.trim().into()).collect()
}

#[test]
fn a_queue_without_requests_costs_no_thread() {
    let daemon = Daemon::start(&["--num-request-queues", "8"]);
    let has = |name: &str| threads(daemon.child.id()).iter().any(|thread| thread == name);
    daemon.file();
    assert!(has("thruway-q0") && !has("thruway-q1") && !has("thruway-hiprio"));
    // What looks after requests that take long ends when there are none.
    // One of them serves the control socket.
    wait_until("few threads", || threads(daemon.child.id()).len() <= 9);
    forget(&daemon);
    wait_until("the queue with a request has a thread", || has("thruway-hiprio"));
}

fn forget(daemon: &Daemon) {
    let (_, header) = daemon.guest().header(Opcode::Forget as u32, ROOT_ID, ForgetIn::default().as_bytes().len());
    daemon.guest().submit(0, &[&header, ForgetIn::default().as_bytes()], &[]).unwrap();
}

/// The host gives the daemon no more threads. Its user has that limit, and root has none.
#[test]
fn queues_without_threads_are_served() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("share/sub")).unwrap();
    fs::write(dir.path().join("share/sub/file"), "contents").unwrap();
    // Nobody else's number.
    let user = if rustix::process::geteuid().is_root() { 1_977_000_001 } else { rustix::process::geteuid().as_raw() };
    std::os::unix::fs::chown(dir.path(), Some(user), Some(user)).unwrap();
    let child = command(dir.path(), "socket").uid(user).spawn().unwrap();
    let mut daemon = Daemon { child, guest: None, dir };
    wait_until("listens", || daemon.path("socket").exists());
    daemon.guest = Some(Frontend::connect(&daemon.path("socket"), Options::default()).unwrap());
    // Only the daemon's user may.
    let allow = |threads: &str| {
        let args = [format!("--pid={}", daemon.child.id()), format!("--nproc={threads}:")];
        assert!(Command::new("prlimit").args(args).uid(user).status().unwrap().success());
    };
    let has = |name: &str| threads(daemon.child.id()).iter().any(|thread| thread == name);
    allow("1");
    daemon.guest().fuse_init(InitFlags::ASYNC_READ.bits()).unwrap();
    let node = daemon.file();
    forget(&daemon);
    let args = OpenIn { flags: libc::O_RDONLY as u32, open_flags: 0 };
    daemon.guest().request(1, Opcode::Open as u32, node, args.as_bytes(), b"", 16).unwrap();
    assert!(!has("thruway-q0") && !has("thruway-hiprio"));
    assert!(daemon.metric("thruway_limit_reached_total{limit=\"threads\"}") > 0.0);
    // The next request finds a thread.
    let most = rustix::process::getrlimit(rustix::process::Resource::Nproc).maximum;
    allow(&most.map_or("unlimited".into(), |most| most.to_string()));
    daemon.file();
    assert!(has("thruway-q0"));
}

/// The share is an ext4 of its own, with another one mounted in it. Their images show what is on the disk.
#[test]
fn a_drain_writes_all_data() {
    let dir = tempfile::tempdir().unwrap();
    let script = "cd \"$1\" && shift
        for name in share below; do
            truncate -s 16M $name.image && mkfs.ext4 -q $name.image && mkdir -p share/$name || exit 77
            mount -o loop $name.image $([ $name = share ] && echo share || echo share/below) || exit 77
            mkdir -p share/below
        done
        exec \"$@\"";
    let daemon = command(dir.path(), "socket");
    let mut namespace = Command::new("unshare");
    namespace.args(["--mount", "--propagation=private", "sh", "-c", script, "sh"]).arg(dir.path());
    namespace.arg(daemon.get_program()).args(daemon.get_args()).env_remove("RUST_LOG");
    let child = namespace.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut daemon = Daemon { child, guest: None, dir };
    wait_until("it listens or ends", || daemon.path("socket").exists() || daemon.child.try_wait().unwrap().is_some());
    if daemon.child.try_wait().unwrap().is_some() {
        return eprintln!("skipped: no ext4 can be mounted here");
    }
    daemon.connect();
    let below = daemon.lookup(ROOT_ID, b"below\0").unwrap();
    let mut files = Vec::new();
    for (parent, data) in [(ROOT_ID, b"in the share's ext4 "), (below, b"in the mounted ext4 ")] {
        let data = data.repeat(50);
        let create = CreateIn { flags: libc::O_RDWR as u32, mode: libc::S_IFREG | 0o600, ..Default::default() };
        let body = [create.as_bytes(), b"new\0"].concat();
        let made = daemon.guest().request(1, Opcode::Create as u32, parent, &body, b"", 144).unwrap();
        let (entry, open) = EntryOut::read_from_prefix(&made).unwrap();
        let fh = OpenOut::read_from_prefix(open).unwrap().0.fh;
        let write = WriteIn { fh, size: data.len() as u32, ..Default::default() };
        daemon.guest().request(1, Opcode::Write as u32, entry.nodeid, write.as_bytes(), &data, 8).unwrap();
        files.push((entry.nodeid, fh, data));
    }
    assert_eq!(daemon.ask("POST", "/drain", "").0, 200);
    for (image, (_, _, data)) in ["share.image", "below.image"].iter().zip(&files) {
        let disk = fs::read(daemon.path(image)).unwrap();
        assert!(disk.chunks(1024).any(|block| block.starts_with(data)), "{image}");
    }

    // What is not in memory is read by io_uring.
    let status: api::Status = daemon.get("/status");
    let (node, fh, data) = &files[0];
    let before = daemon.metric("thruway_offloaded_requests_total{to=\"io_uring\"}");
    let inside = format!("/proc/{}/root{}/share/new", daemon.child.id(), daemon.dir.path().display());
    rustix::fs::fadvise(fs::File::open(inside).unwrap(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let read = ReadIn { fh: *fh, size: data.len() as u32, ..Default::default() };
    let got = daemon.guest().request(1, Opcode::Read as u32, *node, read.as_bytes(), b"", data.len()).unwrap();
    let after = daemon.metric("thruway_offloaded_requests_total{to=\"io_uring\"}");
    assert_eq!((&got, after > before), (data, status.io_uring.on));
}

#[test]
fn the_socket_is_the_users_and_one_daemons() {
    let mut daemon = Daemon::start(&["--keep-alive"]);
    let mode = fs::metadata(daemon.path("control")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let other = command(daemon.dir.path(), "other").stderr(Stdio::piped()).output().unwrap();
    let text = String::from_utf8(other.stderr).unwrap();
    assert!(!other.status.success() && text.contains("another daemon uses the socket"), "{text}");
    let _: api::Status = daemon.get("/status");
    // Without a frontend.
    daemon.guest = None;
    wait_until("the frontend leaves", || {
        let status: api::Status = daemon.get("/status");
        status.frontend.is_none() && status.guest.is_none()
    });
    let drained: api::Drained = serde_json::from_str(&daemon.ask("POST", "/drain", "").1).unwrap();
    assert!(!drained.held);
    // What a dead daemon leaves behind is in nobody's way.
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    assert!(daemon.path("control").exists());
    fs::remove_file(daemon.path("socket")).unwrap();
    daemon.child = command(daemon.dir.path(), "socket").spawn().unwrap();
    daemon.connect();
    assert_eq!(daemon.get::<api::Status>("/status").pid, daemon.child.id());
}

#[test]
fn bad_requests_get_a_reason() {
    let daemon = Daemon::start(&[]);
    for (method, target, status) in [
        ("GET", "/", 404),
        ("GET", "/status/", 404),
        ("GET", "/../etc/passwd", 404),
        ("POST", "/status", 405),
        ("DELETE", "/log", 405),
        ("GET", "/drain", 405),
        ("GET", "/status?x=1", 400),
        ("GET", "/inodes?top=0", 400),
        ("GET", "/inodes?top=1001", 400),
        ("GET", "/inodes?top=1.5", 400),
        ("GET", "/inodes?top=nan", 400),
        ("GET", "/inodes?by=size", 400),
        ("GET", "/inodes?top", 400),
        ("POST", "/drain?timeout=-1", 400),
        ("POST", "/drain?hold=1e9", 400),
        ("PUT", "/log", 400),
        ("PUT", "/limits", 400),
    ] {
        let (got, body) = daemon.ask(method, target, "");
        assert_eq!(got, status, "{method} {target}: {body}");
        error(&body);
    }
    let (_, head, _) = daemon.raw(b"PATCH /log HTTP/1.1\r\n\r\n");
    assert!(head.to_lowercase().contains("allow: get, head, put"), "{head}");
    let (status, head, body) = daemon.raw(b"HEAD /status HTTP/1.1\r\n\r\n");
    assert!(status == 200 && body.is_empty() && head.to_lowercase().contains("content-length"), "{head}");
    assert_eq!(daemon.ask("PUT", "/log", &"x".repeat(CONTROL_BODY + 1)).0, 413);
    for filter in ["thruway=loud", "[", "\u{0}\u{1}"] {
        assert_eq!(daemon.ask("PUT", "/log", filter).0, 400, "{filter}");
    }
    assert_eq!(daemon.raw(b"PUT /log HTTP/1.1\r\nContent-Length: 2\r\n\r\n\xff\xfe").0, 400);
    let before: api::Log = daemon.get("/log");
    assert_eq!(before.filter, "info");
    for limits in [r#"{"iops": "0"}"#, r#"{"iops": "x=1"}"#, r#"{"bandwidth": "metadata=1M"}"#, r#"{"rate": "1"}"#] {
        assert_eq!(daemon.ask("PUT", "/limits", limits).0, 400, "{limits}");
    }
    let (status, body) = daemon.ask("PUT", "/log", "warn,thruway::fs=trace\n");
    let after: api::Log = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &daemon.get::<api::Log>("/log")), (200, &after));
    assert!(after.filter.contains("thruway::fs=trace") && after.filter.contains("warn"), "{after:?}");
    assert_eq!(daemon.get::<api::Status>("/status").log, after.filter);
}

#[test]
fn clients_that_flood_or_stall_stop_neither_the_guest_nor_others_for_good() {
    let daemon = Daemon::start(&[]);
    let long = format!("GET /status HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(2 * CONTROL_HEAD));
    let many = format!("GET /status HTTP/1.1\r\n{}\r\n", "X: x\r\n".repeat(1000));
    for (request, status) in
        [(long.as_bytes(), 431), (many.as_bytes(), 431), (b"\x16\x03\x01\x02\0\x01\0\x01\xfc\r\n", 400)]
    {
        assert_eq!(daemon.raw(request).0, status);
    }
    // A body that never ends, and lengths that lie.
    for head in
        ["Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", "Content-Length: 18446744073709551615\r\n\r\nx"]
    {
        let mut stream = daemon.dial();
        stream.write_all(format!("PUT /log HTTP/1.1\r\n{head}").as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    }
    // More than are served at a time, of each kind: silent, half a request, and answers that nobody reads.
    let stalled: Vec<_> = (0..3 * CONTROL_CONNECTIONS)
        .map(|n| {
            let mut stream = daemon.dial();
            let request: &[u8] = [&b""[..], b"GET /status HTTP/1.1\r\nHo", b"GET /metrics HTTP/1.1\r\n\r\n"][n % 3];
            stream.write_all(request).unwrap();
            stream
        })
        .collect();
    let before = Instant::now();
    for _ in 0..2000 {
        assert_eq!(daemon.lookup(ROOT_ID, b"absent\0"), Err(libc::ENOENT));
    }
    // They were all still there: none is given up so soon.
    println!("2000 requests beside {} clients took {:?}", stalled.len(), before.elapsed());
    drop(stalled);
    assert_eq!(daemon.metric("thruway_requests_total{opcode=\"LOOKUP\"}"), 2000.0);
    // Nobody needs to end them.
    let _stalled: Vec<_> = (0..CONTROL_CONNECTIONS).map(|_| daemon.dial()).collect();
    let _: api::Status = daemon.get("/status");
}

#[test]
fn a_hold_keeps_requests_in_the_queue() {
    let daemon = Daemon::start(&[]);
    let (status, body) = daemon.ask("POST", "/drain?hold=300", "");
    let drained: api::Drained = serde_json::from_str(&body).unwrap();
    assert!(status == 200 && drained.held && drained.waiting_for_locks == 0, "{body}");
    let guest = daemon.guest();
    let (_, head) = guest.header(Opcode::Lookup as u32, ROOT_ID, 4);
    let token = guest.submit(1, &[&[&head[..], b"sub\0"].concat()], &[16, 128]).unwrap();
    // If the worker took it, one of these would show it.
    for _ in 0..50 {
        let status: api::Status = daemon.get("/status");
        assert!(status.held && status.frontend.unwrap().queues.iter().all(|queue| queue.in_flight == 0));
        assert_eq!(daemon.metric("thruway_requests_total{opcode=\"LOOKUP\"}"), 0.0);
    }
    assert_eq!(daemon.ask("POST", "/drain", "").0, 409);
    let resumed: api::Resumed = serde_json::from_str(&daemon.ask("POST", "/resume", "").1).unwrap();
    assert!(resumed.was_held);
    assert_eq!(guest.wait_for(1, token, LONG).unwrap().len, 144);
    wait_until("the hold ends", || !daemon.get::<api::Status>("/status").held);
    let resumed: api::Resumed = serde_json::from_str(&daemon.ask("POST", "/resume", "").1).unwrap();
    assert!(!resumed.was_held);
    // A hold ends by itself, and the worker is woken.
    assert_eq!(daemon.ask("POST", "/drain?hold=0.01", "").0, 200);
    daemon.file();
}

/// A guest at its limit waits, for as long as the limit says: here for more than an hour.
#[test]
fn a_guest_at_its_limit_waits_and_holds_up_no_other_request() {
    const LIMITS: &str = r#"{"bandwidth": "read=1"}"#;
    let waiting = "thruway_limited_requests_waiting{kind=\"read\"}";
    let mut daemon = Daemon::start(&["--limit-bandwidth=read=1", "--keep-alive"]);
    let limits: api::Limits = daemon.get("/limits");
    assert_eq!((&*limits.iops, &*limits.bandwidth), ("", "read=1,burst=1"));
    let file = daemon.file();
    let fh = daemon.open(file);
    let begin = |daemon: &Daemon| {
        let (_, head) = daemon.guest().header(Opcode::Read as u32, file, size_of::<ReadIn>());
        let read = ReadIn { fh, size: 4096, ..Default::default() };
        daemon.guest().submit(1, &[&[&head[..], read.as_bytes()].concat()], &[16, 4096]).unwrap()
    };
    let end = |daemon: &Daemon, token| assert_eq!(daemon.guest().wait_for(1, token, LONG).unwrap().len, 24);
    // The first leaves a debt of 4095 s.
    let first = begin(&daemon);
    end(&daemon, first);
    let reads = [begin(&daemon), begin(&daemon)];
    wait_until("they wait", || daemon.metric(waiting) == 2.0);
    // A request of another kind passes by.
    daemon.file();
    assert_eq!(daemon.metric("thruway_queue_requests{queue=\"1\"}"), 2.0);

    // Without the limit they go on.
    assert_eq!(daemon.ask("PUT", "/limits", "{}").0, 200);
    reads.into_iter().for_each(|token| end(&daemon, token));
    assert_eq!((daemon.metric(waiting), daemon.metric("thruway_limited_requests_total{kind=\"read\"}")), (0.0, 2.0));

    // So they do when somebody waits for them: a drain, or a stop of the queue.
    let limited = |daemon: &Daemon| {
        assert_eq!(daemon.ask("PUT", "/limits", LIMITS).0, 200);
        let first = begin(daemon);
        end(daemon, first);
        let second = begin(daemon);
        wait_until("it waits", || daemon.metric(waiting) == 1.0);
        second
    };
    let token = limited(&daemon);
    assert_eq!(daemon.ask("POST", "/drain?timeout=60", "").0, 200);
    end(&daemon, token);
    let token = limited(&daemon);
    let guest = daemon.guest.as_mut().unwrap();
    let base = guest.stop_queue(1).unwrap();
    guest.start_queue(1, base).unwrap();
    end(&daemon, token);

    // A guest that leaves meanwhile leaves nothing behind.
    limited(&daemon);
    daemon.guest = None;
    daemon.connect();
    assert_eq!(daemon.metric(waiting), 0.0);
    daemon.file();
}

#[test]
fn a_drain_waits_for_requests_but_not_for_locks() {
    let daemon = Daemon::start(&["--posix-lock"]);
    let file = daemon.file();
    let fh = daemon.open(file);
    let guest = daemon.guest();
    let lock = |owner| {
        let lk = FileLock { start: 0, end: 10, kind: libc::F_WRLCK as u32, pid: 1 };
        LkIn { fh, owner, lk, lk_flags: 0, padding: 0 }
    };
    guest.request(1, Opcode::Setlk as u32, file, lock(1).as_bytes(), b"", 0).unwrap();
    let (_, head) = guest.header(Opcode::Setlkw as u32, file, size_of::<LkIn>());
    let offloaded = "thruway_offloaded_requests_total{to=\"thread\"}";
    let before = daemon.metric(offloaded);
    let waits = guest.submit(1, &[&[&head[..], lock(2).as_bytes()].concat()], &[16]).unwrap();
    wait_until("the lock is waited for", || daemon.metric("thruway_queue_requests{queue=\"1\"}") == 1.0);
    wait_until("it is counted", || daemon.metric(offloaded) > before);
    let drain = || {
        let (status, body) = daemon.ask("POST", "/drain?timeout=60", "");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str::<api::Drained>(&body).unwrap().waiting_for_locks
    };
    // The thread may not have begun to wait.
    wait_until("the drain leaves the lock out", || drain() == 1);

    // An open that waits for a host process counts.
    let path = daemon.path("share/sub/leased");
    let leased = fs::File::create(&path).unwrap();
    // SAFETY: no memory is involved. Without this, the signal would end the process.
    unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
    // SAFETY: no memory is involved.
    let take = |kind: i32| unsafe { libc::fcntl(leased.as_raw_fd(), libc::F_SETLEASE, kind) } == 0;
    if take(libc::F_WRLCK) {
        let node = daemon.lookup(daemon.lookup(ROOT_ID, b"sub\0").unwrap(), b"leased\0").unwrap();
        let (_, head) = guest.header(Opcode::Open as u32, node, 8);
        let args = OpenIn { flags: libc::O_RDWR as u32, open_flags: 0 };
        let open = guest.submit(1, &[&[&head[..], args.as_bytes()].concat()], &[16, 16]).unwrap();
        wait_until("the open waits", || daemon.metric("thruway_queue_requests{queue=\"1\"}") == 2.0);
        let (status, body) = daemon.ask("POST", "/drain?timeout=0.1", "");
        assert_eq!((status, error(&body).contains("1 requests are still in flight")), (504, true), "{body}");
        // The queue goes on.
        daemon.file();
        // So it does when the client leaves.
        let held = || daemon.get::<api::Status>("/status").held;
        let mut client = daemon.dial();
        client.write_all(b"POST /drain?timeout=300 HTTP/1.1\r\n\r\n").unwrap();
        wait_until("the drain begins", held);
        drop(client);
        wait_until("the drain ends", || !held());
        assert!(take(libc::F_UNLCK));
        assert_eq!(guest.wait_for(1, open, LONG).unwrap().len, 32);
        assert_eq!(drain(), 1);
    }
    let unlock = FileLock { start: 0, end: 10, kind: libc::F_UNLCK as u32, pid: 1 };
    let unlock = LkIn { lk: unlock, ..lock(1) };
    guest.request(1, Opcode::Setlk as u32, file, unlock.as_bytes(), b"", 0).unwrap();
    assert_eq!(guest.wait_for(1, waits, LONG).unwrap().len, 16);
    assert_eq!(drain(), 0);
}

/// The shared directory is removed on the host, and another one gets its name.
#[test]
fn a_removed_share_is_told() {
    let daemon = Daemon::start(&[]);
    let getattr = || daemon.guest().request(1, Opcode::Getattr as u32, ROOT_ID, &[0; 16], b"", 104).unwrap();
    let is_removed = || daemon.get::<api::Status>("/status").shared_dir_removed;
    let lines = || {
        let log = fs::read_to_string(daemon.path("log")).unwrap();
        log.lines().filter(|line| line.contains("the shared directory was removed")).count()
    };
    getattr();
    assert!(!is_removed());
    fs::remove_dir_all(daemon.path("share")).unwrap();
    fs::create_dir(daemon.path("share")).unwrap();
    for _ in 0..3 {
        getattr();
    }
    assert!(is_removed());
    // The log has a thread of its own.
    wait_until("is told", || lines() > 0);
    assert_eq!(lines(), 1);
}

/// As root, where the daemon gets no more threads: what it would have other threads do, io_uring's among them, its
/// queue does. No request fails.
#[test]
fn without_more_threads_every_write_is_done() {
    let Some(group) = cgroup::Group::new("pids.max") else { return };
    let daemon = Daemon::start(&[]);
    group.set("cgroup.procs", daemon.child.id());
    group.set("pids.max", group.get("pids.current"));
    let (node, fh) = daemon.create(b"new\0");
    let guest = daemon.guest();
    let part = |n: usize| vec![n as u8 + 1; 256 << 10];
    let write = |n: usize| {
        let args = WriteIn { fh, offset: (n * (256 << 10)) as u64, size: 256 << 10, ..Default::default() };
        let (_, head) = guest.header(Opcode::Write as u32, node, args.as_bytes().len() + (256 << 10));
        guest.submit(1, &[&[&head, args.as_bytes()].concat(), &part(n)], &[16, 8]).unwrap()
    };
    // Metadata waits behind large writes, so large writes leave the worker.
    let stat = || {
        let (_, head) = guest.header(Opcode::Getattr as u32, node, 16);
        guest.submit(1, &[&head, &[0; 16]], &[16, 104]).unwrap()
    };
    let refused = || daemon.metric("thruway_limit_reached_total{limit=\"threads\"}");
    wait_until("lacks a thread", || {
        let tokens = [write(0), write(1), stat(), write(2), write(3), write(4), write(5)];
        for token in tokens {
            let done = guest.wait_for(1, token, LONG).unwrap();
            assert_eq!(OutHeader::read_from_prefix(&done.data).unwrap().0.error, 0);
        }
        // An idle thread of io_uring ends after 5 s.
        refused() > 0.0
    });
    let written = fs::read(daemon.path("share/new")).unwrap();
    assert!((0..6).all(|n| written[n * (256 << 10)..][..256 << 10] == part(n)));
    drop(daemon);
}
