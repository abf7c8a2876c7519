//! The control socket (docs/control.md): HTTP/1.1 over a Unix socket, on one thread of its own, which waits for no
//! file.
//!
//! It reads what the others count, and few of its requests do something. Nothing here is on a queue's path, and nothing
//! that a guest does reaches it. It takes no lock for longer than it takes to copy some numbers.

pub mod api;
mod drain;
mod http;
mod metrics;
mod routes;
mod status;

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use rustix::process::{Resource, getrlimit};
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::time::timeout_at;

use crate::device::{Monitor, Urings};
use crate::fs::PassthroughFs;
use crate::fuse::Server;
use crate::window::Window;
use crate::window::proxy::Guard;
use drain::Drain;

/// What the control socket shows, and what it acts on.
pub struct Sources {
    /// What was known at the start.
    pub facts: Facts,
    /// The session.
    pub server: Arc<Server<PassthroughFs>>,
    /// The queues.
    pub device: Arc<Monitor>,
    /// For I/O that takes long.
    pub urings: Arc<Urings>,
    /// The windows, if there are any.
    pub window: Option<Arc<Window>>,
    /// The log's filter, after it was set to the given one.
    ///
    /// Its error says in one line what is wrong with the given one.
    pub log: fn(Option<&str>) -> Result<String, String>,
}

/// What is known at the start and does not change.
#[derive(Clone, Debug)]
pub struct Facts {
    /// See [`api::Status::pid`].
    pub pid: u32,
    /// The start.
    pub since: Instant,
    /// The shared directories on the host.
    pub shared_dirs: Vec<PathBuf>,
    /// The frontend's socket, unless it was inherited.
    pub socket: Option<PathBuf>,
    /// See [`api::Status::options`].
    pub options: BTreeMap<String, String>,
    /// `--max-mappings`
    pub max_mappings: u32,
    /// Why there is no window.
    pub no_window: String,
    /// Whether there is a guard, or why not.
    pub guard: Guard,
    /// Why there is no watch, if there is none.
    pub no_watch: Option<String>,
}

/// Serves the control socket on a thread. Call it before the seccomp filter is applied: it makes an epoll instance.
///
/// # Errors
/// Those of starting the thread, and of the system calls for its events.
pub fn start(listener: UnixListener, sources: Sources) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
    let listener = {
        let _inside = runtime.enter();
        tokio::net::UnixListener::from_std(listener)?
    };
    // The filter forbids to ask for it later.
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let state = Arc::new(State { drain: Drain::default(), paths: Aside::default(), sources, descriptors });
    thread::Builder::new().name(NAME.into()).spawn(move || {
        state.sources.server.enter_thread();
        runtime.block_on(http::serve(listener, state));
    })?;
    Ok(())
}

/// The name of its threads.
const NAME: &str = "thruway-control";

/// What all requests share.
struct State {
    sources: Sources,
    drain: Drain,
    /// For the paths of inodes.
    paths: Aside,
    /// The limit of open descriptors.
    descriptors: u64,
}

/// Work that may wait for the host's file system. It has a thread of its own: on the socket's only thread, it would
/// keep the queues held. There is one such work at a time; the next waits.
#[derive(Default)]
struct Aside(Arc<tokio::sync::Mutex<()>>);

impl Aside {
    /// `None` if it is not done by then. It goes on.
    ///
    /// # Errors
    /// If there is no thread for it.
    async fn run<T: Send + 'static>(
        &self,
        until: tokio::time::Instant,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<Option<T>> {
        let Ok(turn) = timeout_at(until, self.0.clone().lock_owned()).await else { return Ok(None) };
        let (done, result) = oneshot::channel();
        thread::Builder::new().name(NAME.into()).spawn(move || {
            // Nobody may wait for it any more.
            let _ = done.send(work());
            drop(turn);
        })?;
        Ok(timeout_at(until, result).await.ok().and_then(Result::ok))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use tokio::time::Instant;

    use super::*;

    #[test]
    fn work_that_hangs_holds_up_nothing() {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        let aside = Aside::default();
        let (go, wait) = channel();
        runtime.block_on(async {
            assert_eq!(aside.run(Instant::now(), move || wait.recv().unwrap()).await.unwrap(), None);
            assert_eq!(aside.run(Instant::now(), || ()).await.unwrap(), None);
            go.send(()).unwrap();
            let long = Instant::now() + std::time::Duration::from_secs(100);
            assert_eq!(aside.run(long, || 7).await.unwrap(), Some(7));
        });
    }
}
