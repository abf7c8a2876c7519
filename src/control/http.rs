//! Connections: how many, how long, and how much of each.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

use super::{State, routes};
use crate::limits::{ACCEPT_PAUSE, CONTROL_CONNECTIONS, CONTROL_HEAD, CONTROL_PATIENCE};

/// Serves clients for ever.
pub async fn serve(listener: UnixListener, state: Arc<State>) {
    let free = Arc::new(Semaphore::new(CONTROL_CONNECTIONS));
    loop {
        // It is never closed.
        let Ok(permit) = free.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((client, _)) => {
                let state = state.clone();
                tokio::spawn(async move {
                    connection(client, state, CONTROL_PATIENCE).await;
                    drop(permit);
                });
            }
            Err(e) => {
                tracing::warn!("cannot accept a client of --control-path: {e}");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The work on an answer.
#[derive(Default)]
struct Work {
    goes_on: AtomicBool,
    was_done: AtomicBool,
}

/// Serves one request. `patience`: how long the client may take to send it, and then to take the answer.
async fn connection(client: UnixStream, state: Arc<State>, patience: Duration) {
    let work = Arc::new(Work::default());
    let of_service = work.clone();
    let service = service_fn(move |request| {
        let (state, work) = (state.clone(), of_service.clone());
        async move {
            work.goes_on.store(true, Ordering::Relaxed);
            let response = routes::answer(&state, request).await;
            work.goes_on.store(false, Ordering::Relaxed);
            work.was_done.store(true, Ordering::Relaxed);
            Ok::<_, Infallible>(response)
        }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(patience).keep_alive(false).max_buf_size(CONTROL_HEAD);
    let mut talk = pin!(http.serve_connection(TokioIo::new(client), service));
    let mut end = pin!(sleep(patience));
    let end = poll_fn(|cx| {
        if let Poll::Ready(end) = talk.as_mut().poll(cx) {
            return Poll::Ready(end.map_err(|e| e.to_string()));
        }
        while end.as_mut().poll(cx).is_ready() {
            // The work on an answer may take as long as its request allows. What the client does may not.
            if !work.goes_on.load(Ordering::Relaxed) && !work.was_done.swap(false, Ordering::Relaxed) {
                return Poll::Ready(Err("it took too long".into()));
            }
            end.as_mut().reset(Instant::now() + patience);
        }
        Poll::Pending
    });
    if let Err(e) = end.await {
        tracing::debug!("a client of --control-path went away: {e}");
    }
}
