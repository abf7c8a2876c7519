//! The limits on what a guest can use of the host, each with the reason for its number. The table in docs/security.md,
//! "Limits", adds what the guest gets at each limit, the option that changes it, and the test that holds it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Log messages at level info and above that one place of the code may write in [`LOG_PERIOD`]. The rest are counted,
/// and the count is logged. Linux uses the same numbers for its own log (DEFAULT_RATELIMIT_BURST and _INTERVAL of
/// include/linux/ratelimit_types.h).
pub const LOG_BURST: u32 = 10;

/// See [`LOG_BURST`].
pub const LOG_PERIOD: Duration = Duration::from_secs(5);

/// Log lines that wait for a slow reader of the log. Further lines are dropped and counted, and the count is logged.
/// With [`LOG_LINE`] they take 4 MiB at most.
pub const LOG_QUEUE: usize = 1024;

/// Bytes of a log line. The rest is cut off. The longest path (PATH_MAX) fits.
pub const LOG_LINE: usize = 4096;

/// Memory of one daemon in bytes, without known inodes ([`INODES`]), while a guest with two request queues attacks it.
/// It follows from the other limits: [`QUEUE_BYTES`] for each queue, [`LISTINGS`], [`LOG_QUEUE`], [`LOCKS`] and
/// [`WINDOW_JOBS`] come to 120 MiB, and a million open files to 300 MiB. A test holds it (tests/neighbours).
pub const DAEMON_MEMORY: u64 = 512 << 20;

/// Threads of one daemon. A worker for each of the 64 queues, [`WORK_THREADS`], [`OTHERS_THREADS`], [`LOCK_THREADS`]
/// and [`DEPUTIES`] make 576. A dozen more serve the daemon, and each queue's io_uring has up to 4 for each CPU. A test
/// holds it (tests/neighbours).
pub const DAEMON_THREADS: u64 = 1024;

/// Processes and threads that a daemon cannot do without: the process that waits for it, its main thread, and one each
/// for the log, the watch, the sweep, the frontend, the queues, and requests that wait for other processes. The rest
/// are there if the host gives them. A test holds it.
pub const LEAST_THREADS: usize = 8;

/// How many more it takes with a window: seven of the window process, the mapper, a worker of it, and the events.
pub const WINDOW_THREADS: usize = 10;

/// Chains of one queue that the device holds at a time: the length of the longest queue. It is QEMU's
/// VIRTQUEUE_MAX_SIZE, and the most that preadv2(2) takes in one call (UIO_MAXIOV). A driver that offers a chain again
/// which the device still holds breaks VIRTIO's rules: its queue stops until the driver resets the device.
pub const CHAINS: u16 = 1024;

/// Descriptors in one chain, including those of an indirect table. A driver may not make a chain longer than its queue
/// (VIRTIO 1.3, section 2.7.5.3.1). A longer chain is answered with EINVAL.
pub const CHAIN_DESCRIPTORS: u32 = CHAINS as u32;

/// Reads and writes of one queue that its io_uring holds at a time. No disk gains from more, and each can take 32 KiB:
/// 16 bytes for each descriptor and each slice. The rest go to [`WORK_THREADS`].
pub const URING_REQUESTS: usize = 128;

/// Threads of all queues together for requests that wait for the host's file system. No disk gains from more. Each
/// takes some 50 KiB, and 32 KiB more while it reads into a chain of [`CHAIN_DESCRIPTORS`]. Further requests wait for a
/// thread.
pub const WORK_THREADS: usize = 128;

/// Threads for requests that wait for other processes for a bounded time: truncations of mapped files, and opens that
/// break a lease. Further requests wait for a thread.
pub const OTHERS_THREADS: usize = 64;

/// Threads for requests that may wait for ever, which are those for a lock. So many processes of a guest can be blocked
/// in fcntl(F_SETLKW) or flock(2). The next one gets EAGAIN.
pub const LOCK_THREADS: usize = 256;

/// Threads of all queues together that serve a queue while a request of it takes long, for example one for a file that
/// a host process writes to without end. Each such request takes one. If there is none, the queue waits for its
/// request. It is as many as there are queues.
pub const DEPUTIES: usize = 64;

/// Bytes of one READ or WRITE. The daemon offers 1024 pages, and a guest's pages have at most 64 KiB. It bounds the
/// time for which one request keeps its queue from stopping. A larger request gets EINVAL.
pub const DATA_BYTES: usize = 64 << 20;

/// Bytes of the arguments of one request, without the data of a WRITE: an extended attribute's value (XATTR_SIZE_MAX,
/// 64 KiB), a security context (also such a value) and names, rounded up. A larger request gets E2BIG. A BATCH_FORGET
/// is cut off instead.
pub const ARGUMENT_BYTES: usize = 160 << 10;

/// Bytes of a late reply that carries no data. The longest is CREATE's, with 160 bytes including its header. The daemon
/// keeps no more of such a request's buffers.
pub const LATE_REPLY_BYTES: usize = 256;

/// Parts of one REMOVEMAPPING. Linux sends at most one page of them (FUSE_REMOVEMAPPING_MAX_ENTRY): 256 with pages of
/// 4 KiB, 4096 with pages of 64 KiB. A longer request gets EINVAL.
pub const REMOVED_PARTS: u32 = 4096;

/// Bytes that the daemon copies on the host in one call, which takes some 10 ms. Stopping or resetting a queue waits
/// for one such call. The guest then gets a short count, which is allowed.
pub const COPY_PIECE: u64 = 16 << 20;

/// Bytes that a copy moves if it starts while its queue is stopping. A count of 0 would mean the end of the file.
pub const SHORTEST_COPY: u64 = 64 << 10;

/// Bytes of one copy: the most that the host's kernel copies in one call.
pub const COPY_BYTES: u64 = i32::MAX as u64;

/// Bytes of the daemon's memory that the requests in flight of one queue take. It is the sum of the limits above for
/// [`URING_REQUESTS`], threads and jobs, of late replies (4 KiB for each of [`CHAINS`] if their buffers have one byte
/// each), and of the worker's buffers (4.4 MiB, most of it for a directory listing). Nothing is refused at this limit.
/// A test holds it.
pub const QUEUE_BYTES: usize = 20 << 20;

/// Inodes that the guest may know, unless `--max-inodes` says otherwise. Only the guest's kernel can forget an inode,
/// so the number is twice the size of the largest trees that people share (some millions of files). Each takes up to
/// [`INODE_MEMORY`], all of them 2 GiB. At the limit, a lookup of any other file gets ENFILE.
pub const INODES: usize = 1 << 22;

/// Bytes of memory that one known inode takes, including its entries in both tables while these grow. Most take 350. A
/// test holds it.
pub const INODE_MEMORY: usize = 512;

/// Directories and files of several links that one daemon watches for changes by the host. Each mark keeps an inode in
/// the host's memory: 1 KiB or so, 128 MiB in all. The kernel's own limit (fs.fanotify.max_user_marks) is 200,000 on a
/// machine with 24 GiB, for all daemons of a user. What is not watched has ordinary timeouts.
pub const WATCHES: usize = 1 << 17;

/// Files and directories that the guest may have leases of. Each takes some 200 bytes besides [`INODE_MEMORY`], all of
/// them 256 MiB. Others have ordinary timeouts.
pub const LEASES: usize = 1 << 20;

/// Directory handles that keep the part of a listing which the guest has not read yet: 32 KiB each, 32 MiB in all.
/// Other handles read the directory again for each request.
pub const LISTINGS: usize = 1024;

/// Locked ranges of files and owners of locks, each of which takes a descriptor. The host's kernel searches all ranges
/// of a file for each lock, which takes 0.1 ms with 16,384 of them. Databases lock a few dozen ranges. At the limit the
/// guest gets ENOLCK.
pub const LOCKS: usize = 16_384;

/// Descriptors that the daemon keeps for itself, or a quarter of all where that is less: for the connection, the
/// guest's memory, the queues, and what each thread opens for a moment. If no others are left, an open gets ENFILE.
pub const OWN_DESCRIPTORS: u64 = 4096;

/// Descriptors that are kept for files that nobody has open, or a quarter of all where that is less. A build or a
/// listing comes back to about as many files within a second. Each costs the kernel some 300 bytes.
pub const KEPT_DESCRIPTORS: usize = 4096;

/// One daemon may have one part in so many of the open files that the host's kernel allows (fs.file-max), unless
/// `--rlimit-nofile` says otherwise. Three hostile guests leave a quarter to the host.
pub const FILE_MAX_SHARE: u64 = 4;

/// Bytes of a session that a migration brings: enough for 40 million inodes with paths of 70 bytes. A longer one is
/// refused.
pub const RESTORED_BYTES: u64 = 4 << 30;

/// Mounts of such a session. Each costs the target an open file. Linux allows as many in a namespace (fs.mount-max).
pub const RESTORED_MOUNTS: usize = 100_000;

/// Slots of handles that such a session may fill: more than the default limit of descriptors, a million
/// (`--rlimit-nofile`). This limits what a damaged `fh` can cost to 100 MiB.
pub const RESTORED_HANDLES: u32 = 1 << 20;

/// Live mappings in all windows together. QEMU ends the whole VM at 512 memory regions (assertion in
/// vhost_user_add_remove_regions); 64 are left for its RAM, its ROMs and its other devices.
pub const WINDOW_MAPPINGS: usize = 448;

/// Mappings of one file in the passthrough window. Each but the first makes the slot longer, mostly to twice its
/// length, so 2 MiB become 256. A file that needs more moves.
pub const FILE_MAPPINGS: usize = 8;

/// Entries of the backing table, its header among them: far more than there can be slots ([`WINDOW_MAPPINGS`]), since
/// revoked files keep their entries. Further files are served by messages.
pub const TABLE_ENTRIES: u32 = 4096;

/// Requests of one guest that wait for the mapper: SETUPMAPPING, REMOVEMAPPING, and the first open of a file with
/// passthrough. In a guest that behaves, a process waits for each of them, and few guests have so many threads waiting
/// at once. The largest takes 4 KiB (a number for each possible mapping), all of them 16 MiB. The next request gets
/// EAGAIN.
pub const WINDOW_JOBS: usize = 4096;

/// Files of one guest that were stored to in place and have yet to get the time of that: more than there can be slots,
/// since the file of a slot that was given up keeps its descriptor until then. They are many only while the host's file
/// system keeps the daemon waiting. Further ones keep the time that they have.
pub const OWED_TIMES: usize = 1024;

/// Workers of the mapper, all but one of which may wait for as many files at a time: for their locks, or for their file
/// systems. Further files wait for them to be mapped. One is left for what a host process waits for.
pub const WINDOW_WORKERS: usize = 8;

/// Threads that set such times, if no request does. So many files of one guest may keep the daemon waiting before
/// others get their times late.
pub const TIMES_THREADS: usize = 4;

/// Changes by others that wait for the guest agent: as many as Linux keeps for one watcher
/// (fs.inotify.max_queued_events). Each takes 300 bytes with its name. At the limit all of them give way to one
/// request: look at everything again.
pub const AGENT_CHANGES: usize = 16_384;

/// Longest name that the guest agent is told, in bytes: NAME_MAX of include/uapi/linux/limits.h. All file systems that
/// can be watched have it.
pub const AGENT_NAME: usize = 255;

/// Threads of guest agents that may be registered with one daemon. An agent has one, and up to three more while
/// somebody in the guest holds a directory's lock; a second agent may take the place of the first.
pub const AGENT_THREADS: usize = 16;

/// How long a change may wait for the guest agent before the guest gets no more leases. An idle guest needs some
/// milliseconds. A busy one may need longer, and has no leases then.
pub const AGENT_PATIENCE: Duration = Duration::from_secs(2);

/// How long the daemon waits before it accepts connections again after accept(2) failed, most often for lack of
/// descriptors.
pub const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Connections to the control socket at a time. A person, a collector of metrics and a few tools take one each, for
/// some milliseconds. Further ones wait in the socket's backlog.
pub const CONTROL_CONNECTIONS: usize = 16;

/// Bytes of the request line and the headers of a request to the control socket. The longest that a tool sends has some
/// hundreds. It is the least that hyper allows.
pub const CONTROL_HEAD: usize = 8192;

/// Bytes of the body of a request to the control socket. The only body is a log filter, and the longest that makes
/// sense names each module once.
pub const CONTROL_BODY: usize = 4096;

/// How long a client of the control socket may take to send its request, and again to take the answer.
pub const CONTROL_PATIENCE: Duration = Duration::from_secs(10);

/// Inodes in one answer of the control socket. More than fit onto a screen, and few enough that their paths take some
/// milliseconds.
pub const CONTROL_TOP: usize = 1000;

/// Declares [`Limit`] with the names that the metrics have.
macro_rules! counted {
    ($($(#[$doc:meta])* $limit:ident = $name:literal,)*) => {
        /// A limit whose refusals are counted, for the control socket. The counts are the process's.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Limit {
            $($(#[$doc])* $limit,)*
        }

        impl Limit {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$limit),*];

            /// Its name, as the metrics have it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$limit => $name,)*
                }
            }
        }
    };
}

counted! {
    /// [`INODES`], or `--max-inodes`
    Inodes = "inodes",
    /// Descriptors: all but [`OWN_DESCRIPTORS`].
    Descriptors = "descriptors",
    /// [`LOCKS`]
    Locks = "locks",
    /// [`LOCK_THREADS`]
    LockThreads = "lock_threads",
    /// [`DEPUTIES`]
    Deputies = "deputies",
    /// A thread that the host did not give: RLIMIT_NPROC, pids.max.
    Threads = "threads",
    /// [`LISTINGS`]
    Listings = "listings",
    /// [`WINDOW_JOBS`]
    WindowJobs = "window_jobs",
    /// [`AGENT_CHANGES`]
    AgentChanges = "agent_changes",
    /// [`WATCHES`] and [`LEASES`]
    Watches = "watches",
    /// [`LOG_BURST`]
    LogMessages = "log_messages",
    /// [`LOG_QUEUE`]
    LogLines = "log_lines",
}

static TIMES: [AtomicU64; Limit::ALL.len()] = [const { AtomicU64::new(0) }; Limit::ALL.len()];

impl Limit {
    /// Counts that it was reached.
    pub fn reached(self) {
        TIMES[self as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How often it was reached.
    pub fn times(self) -> u64 {
        TIMES[self as usize].load(Ordering::Relaxed)
    }
}
