//! Checks that many connections leave nothing behind. It has its own process, because it counts threads and
//! descriptors.

use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use thruway::device::{self, Handler};
use thruway::fuse::{Transport, Work};
use thruway_bench::frontend::{Frontend, Options};

struct Nothing;

impl Handler for Nothing {
    fn handle(&self, _: &mut Work, _: &mut dyn Transport) -> usize {
        0
    }

    fn reset(&self) {}
}

fn count(what: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count()
}

#[test]
fn connections_leave_nothing_behind() {
    let path = std::env::temp_dir().join(format!("thruway-leaks-{}", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let options = device::Options { request_queues: 7, keep_alive: true, ..Default::default() };
    thread::spawn(|| device::serve(listener, Arc::new(Nothing), options));
    let before = settled();
    for _ in 0..20 {
        let frontend = Frontend::connect(&path, Options { queues: 8, ..Options::default() }).unwrap();
        for queue in 0..8 {
            let token = frontend.submit(queue, &[&[0; 40]], &[16]).unwrap();
            assert_eq!(frontend.wait_for(queue, token, Duration::from_secs(100)).unwrap().len, 0);
        }
    }
    // A thread that waits for work ends after some seconds.
    let began = Instant::now();
    while settled() != before {
        assert!(began.elapsed() < Duration::from_secs(100), "threads and descriptors: {:?}, not {before:?}", settled());
    }
    std::fs::remove_file(path).unwrap();
}

/// Numbers of threads and file descriptors, once they have not changed for a while.
fn settled() -> (usize, usize) {
    let (mut last, mut since) = ((0, 0), Instant::now());
    while since.elapsed() < Duration::from_millis(300) {
        let now = (count("task"), count("fd"));
        if now != last {
            (last, since) = (now, Instant::now());
        }
        thread::sleep(Duration::from_millis(10));
    }
    last
}
