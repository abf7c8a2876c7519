//! The bounds of what a guest can use up of the host, each with the reason for its number. docs/security.md, "Limits", has
//! the same table with what the guest gets at each bound, the option that changes it and the test that holds it.

use std::time::Duration;

/// Log messages at level info and above from one place of the code in [`LOG_PERIOD`]. The rest are counted, and the count is
/// logged. The numbers are Linux's for its own log (DEFAULT_RATELIMIT_BURST and _INTERVAL of include/linux/ratelimit_types.h).
pub const LOG_BURST: u32 = 10;

/// See [`LOG_BURST`].
pub const LOG_PERIOD: Duration = Duration::from_secs(5);

/// Log lines that wait for a slow reader of the log. Past that they are lost, counted, and the count is logged. With
/// [`LOG_LINE`] they take 4 MiB at most.
pub const LOG_QUEUE: usize = 1024;

/// Bytes of a log line; the rest is cut off. A path (PATH_MAX) fits.
pub const LOG_LINE: usize = 4096;

/// Memory of its own that one daemon has while a guest attacks it with two request queues, in bytes, known inodes apart
/// ([`INODES`]). The sum of what this module bounds: [`QUEUE_BYTES`] for each queue, [`LISTINGS`], [`LOG_QUEUE`], [`LOCKS`] and
/// [`WINDOW_JOBS`] come to 120 MiB, and a million open files to 300 MiB. A test holds it (tests/neighbours).
pub const DAEMON_MEMORY: u64 = 512 << 20;

/// Threads of one daemon: a worker for each of the 64 queues, [`WORK_THREADS`], [`OTHERS_THREADS`] and [`LOCK_THREADS`] make 512; a
/// dozen more serve the daemon, and io_uring makes 4 for each CPU of each queue that uses it. A test holds it
/// (tests/neighbours).
pub const DAEMON_THREADS: u64 = 1024;

/// Chains of one queue that the device has at a time: the longest queue in descriptors. QEMU's VIRTQUEUE_MAX_SIZE, and what
/// preadv2(2) takes at once (UIO_MAXIOV). Bounds what all below hold for a queue. A driver that offers a chain which the
/// device has already breaks VIRTIO's rules: its queue ends until the device is reset.
pub const CHAINS: u16 = 1024;

/// Descriptors in one chain, those of an indirect table included. A driver may not make a chain longer than its queue (VIRTIO
/// 1.3, section 2.7.5.3.1). A longer one is answered with EINVAL.
pub const CHAIN_DESCRIPTORS: u32 = CHAINS as u32;

/// Reads and writes of one queue that io_uring has at a time. A disk has no use for more, and each can hold 32 KiB: 16 bytes
/// for each descriptor and each slice. The rest go to [`WORK_THREADS`].
pub const URING_REQUESTS: usize = 128;

/// Threads for requests that wait for the host's file system, over all queues. A disk has no use for more. Each costs some
/// 50 KiB, and 32 KiB while it reads into a chain of [`CHAIN_DESCRIPTORS`]. Requests past that wait for a thread.
pub const WORK_THREADS: usize = 128;

/// Threads for requests that wait for other processes, but not for ever: truncations of mapped files, opens that break a lease.
/// Requests past that wait for a thread.
pub const OTHERS_THREADS: usize = 64;

/// Requests that may wait for ever, each on a thread: those for a lock. As many processes of a guest can be blocked in
/// fcntl(F_SETLKW) or flock(2); the next one gets EAGAIN.
pub const LOCK_THREADS: usize = 256;

/// Bytes of one READ or WRITE: what the daemon offers (1024 pages), for the largest pages of a guest (64 KiB). It bounds
/// how long one request keeps its queue from being stopped. EINVAL past that.
pub const DATA_BYTES: usize = 64 << 20;

/// Bytes of the arguments of one request, the data of a WRITE apart: an xattr value of XATTR_SIZE_MAX (64 KiB), names, a security
/// context (also an xattr value), rounded up. E2BIG past that; the rest of a BATCH_FORGET is not looked at.
pub const ARGUMENT_BYTES: usize = 160 << 10;

/// Bytes of a reply that is not in time and brings no data: CREATE's with its header is the longest, of 160 bytes. Of the buffers of
/// such a request no more are kept.
pub const LATE_REPLY_BYTES: usize = 256;

/// Parts of one REMOVEMAPPING. Linux sends at most a page of them (FUSE_REMOVEMAPPING_MAX_ENTRY): 256 with pages of 4 KiB, so
/// many with pages of 64 KiB. EINVAL past that.
pub const REMOVED_PARTS: u32 = 4096;

/// Bytes that are copied in the host at a time. Whoever stops or resets the queue waits for one such piece. The guest gets a short
/// count then, which is allowed. Some 10 ms where it moves data at all.
pub const COPY_PIECE: u64 = 16 << 20;

/// What a copy does that begins when its queue is being stopped: a count of 0 would mean the end of the file.
pub const SHORTEST_COPY: u64 = 64 << 10;

/// Bytes of one copy: the most that the host's kernel does in a call.
pub const COPY_BYTES: u64 = i32::MAX as u64;

/// Bytes that the requests in flight of one queue take of the daemon's memory: the sum of what is said above, for
/// [`URING_REQUESTS`], late replies (4 KiB for each of [`CHAINS`] if their buffers have one byte each), threads and jobs, and of the
/// worker's buffers (4.4 MiB, most of it for a directory listing). Nothing is refused at it: a test holds it.
pub const QUEUE_BYTES: usize = 20 << 20;

/// Inodes that the guest knows; more with `--max-inodes`. Only the guest's kernel can forget one, so the number is twice that of
/// the largest trees which people share as one (some millions of files). One takes up to [`INODE_MEMORY`], so all of them 2 GiB.
/// Past it, a name that is not known yet gets ENFILE.
pub const INODES: usize = 1 << 22;

/// Memory of one known inode in bytes, with its entries in both tables while these grow: 300 for most. A test holds it.
pub const INODE_MEMORY: usize = 512;

/// Directory handles that keep what they have read and not yet passed on, 32 KiB each: 32 MiB. Any other one reads it
/// again for each request.
pub const LISTINGS: usize = 1024;

/// Locked ranges of files, and owners of them, each of which takes a descriptor. The host's kernel looks through those of a
/// file for each lock: 16,384 take it 0.1 ms. Databases lock some dozens of ranges. Past it the guest gets ENOLCK.
pub const LOCKS: usize = 16_384;

/// Descriptors that the guest cannot have, or a quarter of all where that is less: for the connection, the guest's memory,
/// the queues, and what each thread opens for a moment. With fewer left, an open gets ENFILE.
pub const OWN_DESCRIPTORS: u64 = 4096;

/// The part of all open files that the host's kernel allows (fs.file-max) which one daemon may have, unless
/// `--rlimit-nofile` says otherwise: three hostile guests leave a quarter to the host.
pub const FILE_MAX_SHARE: u64 = 4;

/// Requests of one guest that wait for the mapper: SETUPMAPPING, REMOVEMAPPING, first opens with passthrough. One of a guest
/// that behaves is of a process that waits, so it needs more threads than this in one moment to come near. At 4 KiB for the
/// largest, which has a number for each mapping there can be, they hold 16 MiB. One more gets EAGAIN.
pub const WINDOW_JOBS: usize = 4096;

/// How long the daemon waits when a connection cannot be accepted, for want of descriptors most often, before it tries again.
pub const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
