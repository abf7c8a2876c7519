//! GET /status, /inodes and /mappings.

use std::sync::Arc;

use hyper::StatusCode;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use super::api::{
    Agent, Frontend, Guest, Inode, Inodes, Mappings, Migration, Queue, Range, Refusal, Slot, Status, Switch, Watch,
    Window,
};
use super::{Sources, State};
use crate::device::Progress;
use crate::fs::{InodeFacts, InodeOrder};
use crate::fuse::abi::InitFlags;
use crate::limits::CONTROL_PATIENCE;
use crate::window::proxy::Guard;
use crate::window::{EntryState, RANGE};

impl Switch {
    /// On, or off for this reason.
    pub fn off(why: Option<impl Into<String>>) -> Self {
        let why = why.map(Into::into);
        Self { on: why.is_none(), why }
    }
}

/// GET /status
pub fn status(state: &Arc<State>) -> Status {
    let sources = &state.sources;
    let facts = &sources.facts;
    let session = sources.server.session();
    let frontend = sources.device.frontend();
    let names = |flags: InitFlags| flags.iter_names().map(|(name, _)| name.to_owned()).collect();
    Status {
        version: env!("CARGO_PKG_VERSION").into(),
        pid: facts.pid,
        uptime_s: facts.since.elapsed().as_secs_f64(),
        shared_dir: facts.shared_dirs.iter().map(|dir| dir.to_string_lossy()).collect::<Vec<_>>().join(", "),
        shared_dir_removed: sources.server.fs().is_removed(),
        socket: facts.socket.as_ref().map(|path| path.to_string_lossy().into_owned()),
        options: facts.options.clone(),
        log: (sources.log)(None).unwrap_or_default(),
        frontend: frontend.map(|frontend| Frontend {
            features: frontend.features,
            protocol_offered: frontend.protocol,
            backend_channel: frontend.channel,
            queues: queues(sources),
        }),
        guest: session.map(|(flags, minor)| Guest { flags: names(flags), minor }),
        dax: dax(sources),
        passthrough: passthrough(sources),
        guard: match &facts.guard {
            Guard::On => Switch::off(None::<String>),
            Guard::Off(why) => Switch::off(Some(why.clone())),
        },
        watch: watch(sources),
        agent: agent(sources),
        file_handles: Switch::off(sources.server.fs().why_no_handles()),
        io_uring: Switch::off(sources.urings.why_not()),
        migration: migration(sources.device.progress()),
        held: sources.device.is_held(),
    }
}

fn queues(sources: &Sources) -> Vec<Queue> {
    let queue = |queue: crate::device::QueueState| Queue {
        index: queue.index as u32,
        role: queue.role.into(),
        running: queue.running,
        size: queue.size,
        in_flight: queue.in_flight,
        broken: queue.broken,
    };
    sources.device.queues().into_iter().map(queue).collect()
}

fn flags(sources: &Sources) -> Option<InitFlags> {
    sources.server.session().map(|(flags, _)| flags)
}

/// Why no guest has a session.
const NO_SESSION: &str = "no guest has mounted the share";

/// Why nobody hears of the host's changes.
const NO_AGENT: &str = "no thruway-guest runs in the guest";

/// A window of this `size`. `needs`: the session's flag, and why it is missing.
fn window(sources: &Sources, size: u64, option: &str, mappings: u64, needs: (InitFlags, &str)) -> Window {
    let why = match (&sources.window, flags(sources)) {
        (None, _) => Some(sources.facts.no_window.clone()),
        (Some(_), _) if size == 0 => Some(format!("{option} is not given")),
        (Some(_), _) if sources.device.frontend().is_none() => Some("no frontend is connected".into()),
        (Some(window), _) if !window.is_connected() => Some("the frontend has no shared memory regions".into()),
        (Some(_), None) => Some(NO_SESSION.into()),
        (Some(_), Some(flags)) => (!flags.contains(needs.0)).then(|| needs.1.into()),
    };
    Window { switch: Switch::off(why), size, mappings: mappings as u32 }
}

fn dax(sources: &Sources) -> Window {
    let (size, mappings) =
        sources.window.as_ref().map_or((0, 0), |window| (window.dax_size(), window.live_mappings()[0]));
    let needs = (InitFlags::MAP_ALIGNMENT, "the guest has mounted the share without -o dax");
    window(sources, size, "--dax-window", mappings, needs)
}

fn passthrough(sources: &Sources) -> Window {
    let (size, mappings) =
        sources.window.as_ref().map_or((0, 0), |window| (window.passthrough_size(), window.live_mappings()[1]));
    let needs =
        (InitFlags::PASSTHROUGH_SHM, "the guest's kernel does not have it: it needs the patches of guest-kernel/");
    window(sources, size, "--passthrough-window", mappings, needs)
}

fn agent(sources: &Sources) -> Agent {
    let facts = sources.server.fs().agent_facts();
    let counts = facts.counts;
    let why = match flags(sources) {
        None => Some(NO_SESSION.to_owned()),
        Some(_) if facts.threads == 0 => Some(NO_AGENT.into()),
        Some(_) if !facts.current => Some(format!("it is {:.1} s behind", facts.delay.as_secs_f64())),
        Some(_) => None,
    };
    Agent {
        switch: Switch::off(why),
        threads: facts.threads as u32,
        waiting: facts.waiting as u64,
        delay_s: facts.delay.as_secs_f64(),
        repeated: counts.repeated,
        failed: counts.failed,
        last_error: (counts.failed > 0)
            .then(|| std::io::Error::from_raw_os_error(counts.errno.try_into().unwrap_or(libc::EIO)).to_string()),
        lost: counts.lost,
    }
}

fn watch(sources: &Sources) -> Watch {
    let fs = sources.server.fs();
    let watched = fs.watched();
    let why = match (&watched, flags(sources)) {
        (None, _) => Some(sources.facts.no_watch.clone().unwrap_or_else(|| "there is none".into())),
        (Some(watched), _) if watched.failed => Some("the host's events cannot be read any more".into()),
        (Some(_), None) => Some(NO_SESSION.into()),
        (Some(_), Some(_)) if fs.agent_facts().threads == 0 => Some(NO_AGENT.into()),
        (Some(_), Some(_)) => fs.why_unwatchable().map(Into::into),
    };
    let watched = watched.unwrap_or_default();
    let unwatched = fs.unwatched().into_iter().map(|path| path.to_string_lossy().into_owned()).collect();
    Watch { switch: Switch::off(why), marks: watched.marks as u64, nodes: watched.nodes as u64, unwatched }
}

fn migration(progress: Progress) -> Migration {
    let (state, error) = match progress {
        Progress::None => ("none", None),
        Progress::Saving => ("saving", None),
        Progress::Saved => ("saved", None),
        Progress::Loading => ("loading", None),
        Progress::Loaded => ("loaded", None),
        Progress::Failed(error) => ("failed", Some(error)),
    };
    Migration { state: state.into(), error }
}

/// GET /inodes
///
/// # Errors
/// SERVICE_UNAVAILABLE while a file system of the host does not answer.
pub async fn inodes(state: &Arc<State>, top: usize, order: InodeOrder) -> Result<Inodes, Refusal> {
    let server = state.sources.server.clone();
    let first = state.paths.run(Instant::now() + CONTROL_PATIENCE, move || {
        server.enter_thread();
        server.fs().top_inodes(top, order)
    });
    let busy = |why: String| (StatusCode::SERVICE_UNAVAILABLE, why + ": try again");
    let first = first.await.map_err(|e| busy(e.to_string()))?;
    let first = first.ok_or_else(|| busy("a file system of the host does not answer".into()))?;
    let fs = state.sources.server.fs();
    let by = match order {
        InodeOrder::Lookups => "nlookup",
        InodeOrder::Opens => "opens",
    };
    Ok(Inodes {
        known: fs.known_inodes() as u64,
        limit: fs.max_inodes() as u64,
        by: by.into(),
        inodes: first.into_iter().map(inode).collect(),
    })
}

fn inode(facts: InodeFacts) -> Inode {
    let kind = match facts.format {
        libc::S_IFREG => "file",
        libc::S_IFDIR => "directory",
        libc::S_IFLNK => "symlink",
        libc::S_IFIFO => "fifo",
        libc::S_IFSOCK => "socket",
        libc::S_IFCHR => "char",
        libc::S_IFBLK => "block",
        _ => "unknown",
    };
    Inode {
        nodeid: facts.id,
        nlookup: facts.nlookup,
        opens: facts.opens,
        kind: kind.into(),
        dev: format!("{}:{}", facts.dev.0, facts.dev.1),
        ino: facts.ino,
        path: facts.path.map(|path| path.to_string_lossy().into_owned()),
    }
}

/// GET /mappings
///
/// # Errors
/// SERVICE_UNAVAILABLE if the mapper does not answer.
pub async fn mappings(sources: &Sources) -> Result<Mappings, Refusal> {
    let mut mappings = Mappings { limit: sources.facts.max_mappings, ..Mappings::default() };
    let Some(window) = &sources.window else { return Ok(mappings) };
    let busy = |what| (StatusCode::SERVICE_UNAVAILABLE, format!("the mapper {what}: try again"));
    let (send, shown) = oneshot::channel();
    window.show(move |shown| drop(send.send(shown)));
    let shown = timeout(CONTROL_PATIENCE, shown).await.map_err(|_| busy("waits for the frontend"))?;
    let range = |mapping: crate::window::DaxMapping| Range {
        at: mapping.at,
        len: RANGE,
        nodeid: mapping.node,
        offset: mapping.from,
        writable: mapping.writable,
        kind: if mapping.through { "through" } else { "cached" }.into(),
    };
    mappings.dax = shown.map_err(|_| busy("has such a request already"))?.into_iter().map(range).collect();
    let slot = |(index, entry): (u32, crate::window::Record)| {
        let state = match entry.state {
            EntryState::Live { .. } => "live",
            EntryState::Revoking { .. } => "revoking",
            EntryState::Free | EntryState::Revoked => "revoked",
        };
        Slot {
            entry: index,
            nodeid: entry.nodeid,
            state: state.into(),
            at: entry.offset,
            len: entry.length,
            size: entry.size,
            writable: entry.state.is_writable(),
        }
    };
    mappings.passthrough = window.entries().into_iter().map(slot).collect();
    Ok(mappings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_off_has_a_reason() {
        assert_eq!(Switch::off(None::<String>), Switch { on: true, why: None });
        assert_eq!(Switch::off(Some("why")), Switch { on: false, why: Some("why".into()) });
    }
}
