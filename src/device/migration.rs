//! Transfer of the session to or from the frontend (vhost-user, "Migrating back-end state").

use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use parking_lot::Mutex;

use crate::limits::RESTORED_BYTES;

/// How far the last transfer is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Progress {
    /// There was none.
    #[default]
    None,
    /// The session goes to another daemon.
    Saving,
    /// It has gone there.
    Saved,
    /// A session comes from another daemon.
    Loading,
    /// It has come.
    Loaded,
    /// With the reason.
    Failed(String),
}

/// A connection's transfer, which runs on a thread of its own.
#[derive(Default)]
pub struct Transfer {
    progress: Arc<Mutex<Progress>>,
    thread: Mutex<Option<JoinHandle<io::Result<()>>>>,
    /// The connection is over. Locked while a session is loaded.
    cancelled: Arc<Mutex<bool>>,
}

/// Refuses a transfer, and logs why: the frontend only learns that it failed.
pub fn refuse(why: &str) -> io::Error {
    tracing::error!("no migration: {why}");
    io::Error::other(why.to_owned())
}

impl Transfer {
    /// None is under way. `progress` tells others of it.
    pub fn new(progress: Arc<Mutex<Progress>>) -> Self {
        Self { progress, ..Self::default() }
    }

    /// Writes the result of `save` to `file`.
    ///
    /// # Errors
    /// If another transfer is under way, or no thread can be started.
    pub fn save(&self, mut file: File, save: impl FnOnce() -> io::Result<Vec<u8>> + Send + 'static) -> io::Result<()> {
        self.start("save", Progress::Saving, Progress::Saved, move || {
            let state = save()?;
            file.write_all(&state)?;
            tracing::info!("the session is saved ({} bytes)", state.len());
            Ok(())
        })
    }

    /// Reads `file` to its end and passes the bytes to `load`.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub fn load(&self, file: File, load: impl FnOnce(&[u8]) -> io::Result<()> + Send + 'static) -> io::Result<()> {
        let cancelled = self.cancelled.clone();
        self.start("load", Progress::Loading, Progress::Loaded, move || {
            let mut state = Vec::new();
            // One more byte, to notice a state that is too long.
            file.take(RESTORED_BYTES + 1).read_to_end(&mut state)?;
            if state.len() as u64 > RESTORED_BYTES {
                return Err(io::Error::other("the state is too long"));
            }
            let cancelled = cancelled.lock();
            if *cancelled {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            load(&state)?;
            tracing::info!("the session is loaded ({} bytes)", state.len());
            Ok(())
        })
    }

    fn start(
        &self,
        what: &'static str,
        begun: Progress,
        done: Progress,
        work: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let mut thread = self.thread.lock();
        if thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return Err(refuse("another one is under way"));
        }
        let progress = self.progress.clone();
        *progress.lock() = begun;
        let work = move || {
            let end = work().inspect_err(|e| tracing::error!("cannot {what} the session: {e}"));
            *progress.lock() = end.as_ref().map_or_else(|e| Progress::Failed(e.to_string()), |()| done);
            end
        };
        *thread = Some(Builder::new().name("thruway-state".into()).spawn(work)?);
        Ok(())
    }

    /// Waits for the end of the transfer.
    ///
    /// # Errors
    /// If the transfer failed, or there was none.
    pub fn finish(&self) -> io::Result<()> {
        let thread = self.thread.lock().take().ok_or_else(|| refuse("none was started"))?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the transfer panicked")))
    }

    /// Keeps a state that comes later from being loaded. Waits if one is being loaded now.
    pub fn cancel(&self) {
        *self.cancelled.lock() = true;
    }
}

#[cfg(test)]
mod tests {
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    fn pipe() -> (File, File) {
        let (from, to) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        (from.into(), to.into())
    }

    #[test]
    fn a_state_goes_through_pipes() {
        let (from, to) = pipe();
        let (source, target) = (Transfer::default(), Transfer::default());
        // Longer than a pipe's buffer.
        let state = vec![7; 1 << 20];
        let copy = state.clone();
        source.save(to, move || Ok(copy)).unwrap();
        target
            .load(from, move |loaded| if loaded == state { Ok(()) } else { Err(io::ErrorKind::Other.into()) })
            .unwrap();
        assert!(source.finish().is_ok() && target.finish().is_ok());
        assert!(source.finish().is_err());
    }

    #[test]
    fn errors_are_reported_when_asked_for() {
        let (mut from, to) = pipe();
        let source = Transfer::default();
        source.save(to, || Err(io::ErrorKind::NotFound.into())).unwrap();
        assert_eq!(from.read_to_end(&mut Vec::new()).unwrap(), 0);
        assert_eq!(source.finish().unwrap_err().kind(), io::ErrorKind::NotFound);
        let (from, to) = pipe();
        drop(from);
        source.save(to, || Ok(vec![0; 1 << 20])).unwrap();
        assert!(source.finish().is_err());
    }

    #[test]
    fn nothing_is_loaded_after_the_connection() {
        let (from, to) = pipe();
        let target = Transfer::default();
        target.load(from, |_| Ok(())).unwrap();
        assert!(target.load(File::open("/dev/null").unwrap(), |_| Ok(())).is_err());
        target.cancel();
        drop(to);
        assert_eq!(target.finish().unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }
}
