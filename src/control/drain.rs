//! POST /drain: a moment in which no request is in flight and all data is written.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::StatusCode;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::sleep;

use super::api::{Drained, Refusal};
use super::{Aside, Sources};
use crate::device::Monitor;
use crate::fuse::Release;

/// How often to look whether requests are still in flight. A request takes some microseconds, and a drain happens
/// rarely.
const LOOK: Duration = Duration::from_millis(2);

/// The state of a drain. There is one at a time.
#[derive(Default)]
pub struct Drain {
    /// How to end the one that is under way.
    now: Mutex<Option<Arc<Notify>>>,
    /// For syncfs(2).
    sync: Aside,
}

/// The queues are held as long as it lives.
struct Hold {
    monitor: Arc<Monitor>,
    state: Arc<super::State>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.monitor.resume();
        *self.state.drain.now.lock() = None;
    }
}

/// Holds the queues until no request is in flight and all data is written, and for `hold` after that.
///
/// # Errors
/// CONFLICT if there is another drain; GATEWAY_TIMEOUT; SERVICE_UNAVAILABLE if the data cannot be written. The queues
/// go on then.
pub async fn drain(state: &Arc<super::State>, most: Duration, hold: Duration) -> Result<Drained, Refusal> {
    let began = Instant::now();
    let until = tokio::time::Instant::from_std(began + most);
    let resumed = Arc::new(Notify::new());
    {
        let mut now = state.drain.now.lock();
        if now.is_some() {
            return Err((StatusCode::CONFLICT, "another drain is under way: POST /resume ends it".into()));
        }
        *now = Some(resumed.clone());
    }
    let Sources { device, server, .. } = &state.sources;
    let held = Hold { monitor: device.clone(), state: state.clone() };
    device.hold();
    while device.in_flight() != Some(0) {
        if began.elapsed() >= most {
            let text = match device.in_flight() {
                Some(left) => format!("{left} requests are still in flight: the queues go on"),
                None => "a request is still being served: the queues go on".into(),
            };
            return Err((StatusCode::GATEWAY_TIMEOUT, text));
        }
        // A limit may hold requests back for longer than anybody waits here.
        server.throttle().release();
        sleep(LOOK).await;
    }
    let locks = device.locks();
    let server = server.clone();
    // The thread goes on if its time is over.
    let written = state.drain.sync.run(until, move || {
        server.enter_thread();
        server.fs().sync_all()
    });
    match written.await {
        Ok(Some(Ok(()))) => {}
        Ok(Some(Err(errno))) => {
            let text = format!("the data cannot be written: {errno}: the queues go on");
            return Err((StatusCode::SERVICE_UNAVAILABLE, text));
        }
        Err(e) => return Err((StatusCode::SERVICE_UNAVAILABLE, format!("{e}: the queues go on"))),
        Ok(None) => {
            let text = "the data is not written yet: the queues go on".to_owned();
            return Err((StatusCode::GATEWAY_TIMEOUT, text));
        }
    }
    let stays = !hold.is_zero();
    if stays {
        tokio::spawn(async move {
            let _ = tokio::time::timeout(hold, resumed.notified()).await;
            drop(held);
        });
    } else {
        drop(held);
    }
    Ok(Drained { seconds: began.elapsed().as_secs_f64(), waiting_for_locks: locks, held: stays })
}

impl Drain {
    /// Ends a hold. Whether there was one. A drain that still waits for requests goes on.
    pub fn resume(&self) -> bool {
        let now = self.now.lock();
        now.iter().for_each(|hold| hold.notify_one());
        now.is_some()
    }
}
