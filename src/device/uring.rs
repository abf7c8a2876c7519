//! I/O that takes long. io_uring does it for the worker of a queue, which learns of its end in its own loop. All of the
//! device's `unsafe` is here and in `chain`.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use io_uring::register::Restriction;
use io_uring::squeue::Flags;
use io_uring::{IoUring, opcode, types};
use libc::{ECANCELED, iovec};
use parking_lot::Mutex;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::chain::{self, Segment, Used};
use super::pool::no_thread;
use super::region::MemorySnapshot;
use crate::fuse::Io;
use crate::fuse::buf::IOV_MAX;
use crate::limits::URING_REQUESTS;

/// Entries of the submission queue. The completion queue has twice as many, which is room for all that is under way.
/// Each entry is submitted at once, so one would do.
const ENTRIES: u32 = URING_REQUESTS as u32 / 2;

/// An io_uring for each request queue, but no more than there are CPUs.
pub struct Urings {
    rings: Vec<Arc<Mutex<Uring>>>,
    /// Why there is none.
    why: Option<String>,
}

impl Urings {
    /// Makes up to `queues` io_urings. If the host has no io_uring, logs that and makes none.
    pub fn new(queues: u16) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let uring = |_| Uring::new().map(|uring| Arc::new(Mutex::new(uring)));
        let made = (0..usize::from(queues).min(cpus)).map(uring).collect::<io::Result<_>>();
        match made {
            Ok(rings) => Self { rings, why: None },
            Err(e) => {
                tracing::info!("the host has no io_uring ({e}): reads that wait for a disk use threads");
                Self { rings: Vec::new(), why: Some(e.to_string()) }
            }
        }
    }

    /// Whether the host has what [`new`](Self::new) needs.
    ///
    /// # Errors
    /// Why not: ENOSYS, EPERM (kernel.io_uring_disabled, or a container's filter), ENOMEM.
    pub fn probe() -> io::Result<()> {
        Uring::new().map(drop)
    }

    /// No io_uring: reads that wait use threads.
    pub fn none() -> Self {
        Self { rings: Vec::new(), why: Some("it is not used".into()) }
    }

    /// Why there is no io_uring, if there is none.
    pub fn why_not(&self) -> Option<&str> {
        self.why.as_deref()
    }

    /// The io_uring of a queue. Queue 0, the high priority queue, has none.
    pub fn of(&self, queue: usize) -> Option<&Arc<Mutex<Uring>>> {
        self.rings.get(queue.checked_sub(1)?)
    }
}

/// The I/O of one queue.
pub struct Uring {
    ring: IoUring,
    done: EventFd,
    under_way: HashMap<u64, UnderWay>,
    next: u64,
}

/// Must not change until the kernel is done.
struct UnderWay {
    head: u16,
    segments: Vec<Segment>,
    iovecs: Vec<iovec>,
    io: Io,
    /// Keeps what the iovecs point to mapped.
    snapshot: MemorySnapshot,
}

// SAFETY: the iovecs point into guest memory, which `kept` keeps mapped, whatever the thread.
unsafe impl Send for UnderWay {}

impl Uring {
    /// An io_uring that can only read and write open files, whoever gets hold of its descriptor.
    fn new() -> io::Result<Self> {
        let ring: IoUring = IoUring::builder().setup_r_disabled().build(ENTRIES)?;
        let done = EventFd::new(EFD_NONBLOCK)?;
        let submitter = ring.submitter();
        submitter.register_eventfd(done.as_raw_fd())?;
        submitter.register_restrictions(&mut [
            Restriction::sqe_op(opcode::Readv::CODE),
            Restriction::sqe_op(opcode::Writev::CODE),
            Restriction::sqe_flags_allowed(Flags::ASYNC.bits()),
        ])?;
        submitter.register_enable_rings()?;
        Ok(Self { ring, done, under_way: HashMap::new(), next: 0 })
    }

    /// Readable when something is done.
    pub fn event(&self) -> RawFd {
        self.done.as_raw_fd()
    }

    /// Clears the event.
    pub fn seen(&self) {
        let _ = self.done.read();
    }

    /// Begins I/O with `data`, which is part of a chain's slices. False if it cannot begin, or enough is under way.
    pub fn begin(&mut self, io: Io, data: &[iovec], head: u16, segments: &[Segment], snapshot: MemorySnapshot) -> bool {
        if data.is_empty() || data.len() > IOV_MAX || self.under_way.len() >= URING_REQUESTS {
            return false;
        }
        let iovecs = data.to_vec();
        let (fd, base, count) = (types::Fd(io.file.as_raw_fd()), iovecs.as_ptr(), iovecs.len() as u32);
        let entry = match io.write {
            true => opcode::Writev::new(fd, base, count).offset(io.offset).build(),
            false => opcode::Readv::new(fd, base, count).offset(io.offset).build(),
        };
        // Copying data that is in memory would keep this thread busy: the kernel uses a thread of its own.
        let entry = if io.long { entry.flags(Flags::ASYNC) } else { entry };
        // SAFETY: the descriptor, the iovecs and the memory under them live in `under_way` until the completion was
        // seen. `drop` waits for all of them.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(self.next)) };
        if pushed.is_err() {
            return false;
        }
        self.under_way.insert(self.next, UnderWay { head, segments: segments.to_vec(), iovecs, io, snapshot });
        self.next += 1;
        // If this fails, a later call submits it, at the latest the one in `finish`.
        let _ = self.ring.submit();
        true
    }

    /// Adds the chains that are done to `used`.
    pub fn reap(&mut self, used: &mut Vec<Used>) {
        for entry in self.ring.completion() {
            let Some(done) = self.under_way.remove(&entry.user_data()) else { continue };
            let result = if entry.result() == -ECANCELED { done.do_here() } else { entry.result() };
            used.push(done.answer(result));
        }
    }

    /// Waits for all I/O under way.
    pub fn finish(&mut self, used: &mut Vec<Used>) {
        while !self.under_way.is_empty() {
            // An interrupted wait is repeated. A working io_uring gives no other error.
            let _ = self.ring.submit_and_wait(1);
            self.reap(used);
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.finish(&mut Vec::new());
    }
}

impl UnderWay {
    /// Does the I/O on this thread: the kernel cancels what it has no thread for, and nobody else cancels. Returns
    /// bytes, or a negative errno.
    fn do_here(&self) -> i32 {
        no_thread();
        let (fd, base, count) = (self.io.file.as_raw_fd(), self.iovecs.as_ptr(), self.iovecs.len() as i32);
        let call = if self.io.write { libc::pwritev } else { libc::preadv };
        // SAFETY: `kept` keeps what the iovecs point to mapped.
        let result = unsafe { call(fd, base, count, self.io.offset as i64) };
        match result {
            -1 => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
            // The kernel moves 2 GiB at most.
            bytes => bytes as i32,
        }
    }

    /// Writes the reply without the data, which is there. `result`: bytes, or a negative errno.
    fn answer(self, result: i32) -> Used {
        let (head, len) = self.io.reply(result);
        let written = chain::write(&self.snapshot.near, &self.segments, &head);
        let len = if written.is_ok() { len } else { 0 };
        chain::mark_dirty(&self.snapshot, &self.segments, len as usize);
        Used { head: self.head, len }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::device::region::{Memory, Tables};
    use crate::fuse::metrics::LateMeter;

    #[test]
    fn what_the_kernel_has_no_thread_for_is_done_here() {
        let file = tempfile::tempfile().unwrap();
        file.write_at(b"0123456789", 0).unwrap();
        let mut data = *b"abcd";
        let io = |write, offset| {
            let file = file.try_clone().unwrap().into();
            Io { unique: 0, file, offset, write, long: true, meter: LateMeter::default() }
        };
        let mut under_way = |write, offset, len| UnderWay {
            head: 0,
            segments: Vec::new(),
            iovecs: vec![iovec { iov_base: data.as_mut_ptr().cast(), iov_len: len }],
            io: io(write, offset),
            snapshot: Tables::new(Memory::new()).keep(),
        };
        assert_eq!(under_way(true, 8, 4).do_here(), 4);
        assert_eq!(under_way(false, 6, 4).do_here(), 4);
        assert_eq!(under_way(true, u64::MAX, 4).do_here(), -libc::EINVAL);
        let mut all = [0; 12];
        file.read_exact_at(&mut all, 0).unwrap();
        assert_eq!((&all, &data), (b"01234567abcd", b"67ab"));
    }
}
