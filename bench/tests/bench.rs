//! Runs `thruway-bench` against the daemon: each workload runs, and its output can be parsed.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_thruway-bench");

/// The command that starts the daemon. Cargo tells a test only its own package's programs; the others lie beside them.
fn daemon() -> String {
    let daemon = Path::new(PROGRAM).with_file_name("thruwayd");
    assert!(daemon.exists(), "no {} yet: run cargo build, or the tests of the whole workspace", daemon.display());
    let fixed = "--socket-path {socket} --shared-dir {share} --sandbox none --seccomp none --log-level error";
    format!("{} {fixed}", daemon.display())
}

fn bench(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn every_workload_runs() {
    let short =
        ["--seconds", "0.05", "--warm-up", "0.01", "--rounds", "1", "--json", "--queues", "2", "--depth", "1,5"];
    let all = "getattr,lookup,lookup-new,open,create,readdirplus,statfs,fsync,compile,read-4k,randwrite-128k,write-1m";
    let output = bench(&[&short[..], &["--workload", all, &daemon()]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 24);
    for row in rows {
        assert!(row["figures"][0]["ops_per_second"][0].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["figures"][0]["p99_us"][0].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn two_daemons_are_compared() {
    let daemon = daemon();
    let arguments = ["--seconds", "0.05", "--rounds", "2", "--depth", "8", "--halt-poll-us", "200"];
    let output =
        bench(&[&arguments[..], &["--workload", "getattr-beside-write", "--compare", &daemon, &daemon]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(table.contains("| getattr-beside-write, depth 8 |"), "{table}");
}

#[test]
fn errors_take_one_line() {
    for (arguments, said) in [
        (&["true {socket}"][..], "{share}"),
        (&["false {socket} {share}"], "it ended"),
        (&["--socket", "/nonexistent"], "cannot connect"),
        (&["--workload", "getattr-beside-write", &daemon()], "--depth 5"),
        // 2 TB, and no daemon is started.
        (
            &["--machines", "1000", "--workload", "getattr-beside-write", "--compare", "false", "false"],
            "use fewer --machines",
        ),
        (&["--workload", "sleep", &daemon()], "randread-4k"),
    ] {
        let output = bench(arguments);
        let error = text(&output.stderr);
        assert!(!output.status.success() && error.contains(said), "{arguments:?}: {error}");
    }
}

/// What is in /dev/shm takes memory until somebody removes it.
#[test]
fn nothing_stays_when_it_is_killed() {
    let mut bench = Command::new(PROGRAM);
    bench.args(["--machines", "2", "--seconds", "3600", "--workload", "getattr", &daemon()]);
    let mut bench = bench.stdout(Stdio::null()).spawn().unwrap();
    let prefix = format!("thruway-bench.{}.", bench.id());
    let until = |there: bool, count: usize| {
        // A limit on hangs.
        let end = Instant::now() + Duration::from_secs(100);
        loop {
            let homes = fs::read_dir("/dev/shm").unwrap().flatten().map(|home| home.path());
            let home = homes.into_iter().find(|home| home.file_name().unwrap().to_str().unwrap().starts_with(&prefix));
            let shares = home.as_ref().and_then(|home| Some(fs::read_dir(home).ok()?.count())).unwrap_or(0);
            if home.is_some() == there && shares >= count {
                return;
            }
            assert!(Instant::now() < end, "{home:?}");
            sleep(Duration::from_millis(10));
        }
    };
    until(true, 2);
    bench.kill().unwrap();
    bench.wait().unwrap();
    until(false, 0);
}
