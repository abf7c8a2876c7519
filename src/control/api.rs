//! What the control socket says and takes, as JSON (docs/control.md). The daemon writes these types and `thruway` reads
//! them. A reader ignores fields that it does not know, and every field that a later version adds has a default.

use std::collections::BTreeMap;

use hyper::StatusCode;
use serde::{Deserialize, Serialize};

/// An answer that is not 200: its status, and the reason in one line.
pub(super) type Refusal = (StatusCode, String);

/// Something that can be on or off.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Switch {
    /// Whether it is on.
    pub on: bool,
    /// If it is off: the reason, in one line.
    pub why: Option<String>,
}

/// GET /status
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// The daemon's version.
    pub version: String,
    /// The process that was started: the number in SOCKET.pid. With `--sandbox namespace` its child serves.
    pub pid: u32,
    /// Seconds since the start.
    pub uptime_s: f64,
    /// `--shared-dir`, as an absolute path on the host. With `--share` all directories, with commas between them.
    pub shared_dir: String,
    /// It was removed on the host. The guest sees an empty directory, whatever has its name now.
    pub shared_dir_removed: bool,
    /// The socket for the frontend; none with `--fd`.
    pub socket: Option<String>,
    /// The option's name without dashes, and its value in force. Lists have commas between their values. An option that
    /// is not given and has no default is missing.
    pub options: BTreeMap<String, String>,
    /// The log's filter at present.
    pub log: String,
    /// The vhost-user frontend, if one is connected.
    pub frontend: Option<Frontend>,
    /// The guest's session, if there is one.
    pub guest: Option<Guest>,
    /// The DAX window.
    pub dax: Window,
    /// The passthrough window.
    pub passthrough: Window,
    /// The guard of mapped files.
    pub guard: Switch,
    /// The watch for changes by the host.
    pub watch: Watch,
    /// The guest agent.
    pub agent: Agent,
    /// Files are named by handle instead of by descriptor.
    pub file_handles: Switch,
    /// Reads and writes that wait for a disk go to io_uring.
    pub io_uring: Switch,
    /// Live migration.
    pub migration: Migration,
    /// Whether the queues are held by POST /drain.
    pub held: bool,
}

/// A vhost-user frontend.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Frontend {
    /// The virtio and vhost features that it took, by name; `BIT_n` if this version has no name.
    pub features: Vec<String>,
    /// The vhost-user protocol features that it was offered.
    pub protocol_offered: Vec<String>,
    /// It gave a channel for requests of the daemon, such as to map.
    pub backend_channel: bool,
    /// All queues of the device.
    pub queues: Vec<Queue>,
}

/// A queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Queue {
    /// Its number.
    pub index: u32,
    /// `hiprio` or `request`.
    pub role: String,
    /// The driver uses it.
    pub running: bool,
    /// Its length in descriptors.
    pub size: u16,
    /// Requests that the daemon has taken and not answered.
    pub in_flight: u32,
    /// The driver broke the rules: the queue is not served until the device is reset.
    pub broken: bool,
}

/// The guest's session, as FUSE_INIT settled it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Guest {
    /// The flags in force, by the names of include/uapi/linux/fuse.h without `FUSE_`.
    pub flags: Vec<String>,
    /// The guest's minor version of FUSE 7; none if the session came by a migration.
    pub minor: Option<u32>,
}

/// A window.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Window {
    /// Whether the guest can use it, or why not.
    #[serde(flatten)]
    pub switch: Switch,
    /// Bytes. 0 if there is none.
    pub size: u64,
    /// Mappings at present.
    pub mappings: u32,
}

/// The watch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Watch {
    /// Whether the guest is told of changes, or why not.
    #[serde(flatten)]
    pub switch: Switch,
    /// Marks at present.
    pub marks: u64,
    /// Files and directories of which an event would be told.
    pub nodes: u64,
    /// Where parts of the share begin that cannot be watched, at most 16: file systems that do not tell of changes, and
    /// subvolumes of Btrfs. Paths in the share, as far as the guest has looked into them.
    pub unwatched: Vec<String>,
}

/// The guest agent (docs/guest.md).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Agent {
    /// Whether it keeps up, so that the guest has leases, or why not.
    #[serde(flatten)]
    pub switch: Switch,
    /// Its threads.
    pub threads: u32,
    /// Changes that wait for it, or that it is repeating.
    pub waiting: u64,
    /// Seconds for which the oldest of them has waited.
    pub delay_s: f64,
    /// Changes that it has repeated.
    pub repeated: u64,
    /// Changes that it could not repeat: the guest saw only the outcome.
    pub failed: u64,
    /// Why, of the last of them.
    pub last_error: Option<String>,
    /// How often changes were lost, so that the guest looked at everything again.
    pub lost: u64,
}

/// Live migration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Migration {
    /// `none`, `saving`, `saved`, `loading`, `loaded` or `failed`: the last one of this daemon.
    pub state: String,
    /// Why it failed.
    pub error: Option<String>,
}

/// GET /inodes
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Inodes {
    /// Inodes that the guest knows.
    pub known: u64,
    /// `--max-inodes`
    pub limit: u64,
    /// `nlookup` or `opens`: what the list is sorted by, the largest first.
    pub by: String,
    /// The first of them.
    pub inodes: Vec<Inode>,
}

/// An inode that the guest knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Inode {
    /// Its number in FUSE.
    pub nodeid: u64,
    /// References that the guest's kernel holds.
    pub nlookup: u64,
    /// Handles that are open. Opens without a message are not among them.
    pub opens: u32,
    /// `file`, `directory`, `symlink`, `fifo`, `socket`, `char`, `block` or `unknown`.
    pub kind: String,
    /// The host's device number, major:minor.
    pub dev: String,
    /// The host's inode number.
    pub ino: u64,
    /// The path in the share, with a slash at its start. Bytes that are not UTF-8 are replaced. None if it is unknown.
    pub path: Option<String>,
}

/// GET /mappings
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Mappings {
    /// `--max-mappings`
    pub limit: u32,
    /// Ranges of the DAX window, by place.
    pub dax: Vec<Range>,
    /// Slots of the passthrough window, by entry.
    pub passthrough: Vec<Slot>,
}

/// A mapped range of the DAX window.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Range {
    /// The place in the window in bytes.
    pub at: u64,
    /// Bytes.
    pub len: u64,
    /// The file.
    pub nodeid: u64,
    /// The place in the file in bytes.
    pub offset: u64,
    /// The guest may store.
    pub writable: bool,
    /// `through`: the file's own pages. `cached`: pages of its proxy file, since the host truncated it.
    pub kind: String,
}

/// A slot of the passthrough window.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Slot {
    /// The index in the backing table.
    pub entry: u32,
    /// The file.
    pub nodeid: u64,
    /// `live`, `revoking` or `gone`.
    pub state: String,
    /// The place in the window in bytes.
    pub at: u64,
    /// Mapped bytes.
    pub len: u64,
    /// The file's size in bytes, as the table tells it.
    pub size: u64,
    /// The guest may store.
    pub writable: bool,
}

/// The body of PUT /limits, and the answer to it and to GET /limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Requests in a second, as `--limit-iops` has them. Empty: no limit.
    pub iops: String,
    /// Bytes in a second, as `--limit-bandwidth` has them. Empty: no limit.
    pub bandwidth: String,
}

/// The answer to PUT /log, and GET /log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Log {
    /// The filter in force.
    pub filter: String,
}

/// The answer to POST /drain.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Drained {
    /// Seconds until no request was in flight and all was written.
    pub seconds: f64,
    /// Requests that wait for a lock, and were not waited for.
    pub waiting_for_locks: u32,
    /// Whether the queues stay held, until POST /resume or the end of `hold`.
    pub held: bool,
}

/// The answer to POST /resume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resumed {
    /// Whether the queues were held.
    pub was_held: bool,
}

/// The body of every answer that is not 200.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Error {
    /// The reason, in one line.
    pub error: String,
}
