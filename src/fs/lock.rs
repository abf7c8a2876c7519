//! File locks that reach the host. POSIX locks are open file description locks on the host, with one description for
//! each inode and owner. flock locks are on the handle's own description.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::thread::{Pid, gettid};

use super::fd::reopen;
use super::handle::Handle;
use super::{PassthroughFs, sys};
use crate::fuse::abi::*;
use crate::fuse::ops::{LockWait, Locks as LockOps, Result};
use crate::limits;
use crate::record::{self, Cell};

/// Held locks, and requests that wait for one.
#[derive(Default)]
pub struct Locks {
    posix: Arc<Mutex<Posix>>,
    waiting: Arc<DashMap<u64, Arc<Waiter>>>,
}

/// A request that waits for a lock.
#[derive(Default)]
struct Waiter {
    /// 0 until its thread runs.
    tid: AtomicI32,
    interrupted: AtomicBool,
}

/// POSIX locks of this daemon's guest. They serve to find deadlocks: the host does not know which owner waits for
/// which. Its mutex is held while a lock is tried, and not while a request waits.
#[derive(Default)]
struct Posix {
    /// By nodeid.
    files: HashMap<u64, HashMap<u64, Owner>>,
    /// Number of owners and of ranges that they hold.
    count: usize,
    /// What each owner waits for.
    wanted: HashMap<u64, Vec<Want>>,
}

/// An owner that has locked parts of a file, or has asked to.
struct Owner {
    file: Arc<OwnedFd>,
    held: Spans,
    /// What the next worker process finds of it: the host knows what it holds.
    cell: Cell,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.cell.free();
    }
}

/// Ranges of a file by their start. They do not overlap, and neighbours of the same kind are merged.
#[derive(Debug, Default)]
struct Spans(BTreeMap<u64, Span>);

/// A locked range in bytes. Both ends are inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    start: u64,
    end: u64,
    write: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Want {
    unique: u64,
    node: u64,
    span: Span,
}

impl Span {
    /// The parts of this range that are outside of `other`.
    fn without(self, other: &Span) -> impl Iterator<Item = Span> + use<> {
        let before = Span { end: self.end.min(other.start.wrapping_sub(1)), ..self };
        let after = Span { start: self.start.max(other.end.wrapping_add(1)), ..self };
        let before = (self.start < other.start).then_some(before);
        let after = (self.end > other.end).then_some(after);
        before.into_iter().chain(after)
    }
}

impl Spans {
    /// The ranges that overlap `span`, by their start.
    fn around(&self, span: &Span) -> impl Iterator<Item = &Span> {
        let before = self.0.range(..span.start).next_back();
        let within = self.0.range(span.start..=span.end);
        before.into_iter().chain(within).map(|(_, span)| span).filter(|other| span.start <= other.end)
    }

    fn conflicts(&self, span: &Span) -> bool {
        self.around(span).any(|held| held.write || span.write)
    }

    /// Whether cutting `span` out would make two ranges of one.
    fn are_split(&self, span: &Span) -> bool {
        let before = self.0.range(..span.start).next_back();
        before.is_some_and(|(_, before)| before.end > span.end)
    }

    /// Notes that the range is now locked or not.
    fn set(&mut self, span: Span, locked: bool) {
        let touched: Vec<Span> = self.around(&span).copied().collect();
        for old in touched {
            self.0.remove(&old.start);
            self.0.extend(old.without(&span).map(|rest| (rest.start, rest)));
        }
        if locked {
            self.add(span);
        }
    }

    /// Adds a range that overlaps no other. Merges it with its neighbours, as the host's kernel does.
    fn add(&mut self, mut span: Span) {
        let before = self.0.range(..span.start).next_back().map(|(_, before)| *before);
        if let Some(before) = before.filter(|b| b.write == span.write && b.end.checked_add(1) == Some(span.start)) {
            span.start = before.start;
        }
        let after = span.end.checked_add(1).and_then(|next| self.0.get(&next)).copied();
        if let Some(after) = after.filter(|after| after.write == span.write) {
            self.0.remove(&after.start);
            span.end = after.end;
        }
        self.0.insert(span.start, span);
    }
}

impl Posix {
    fn owner(&self, node: u64, owner: u64) -> Option<&Owner> {
        self.files.get(&node)?.get(&owner)
    }

    fn add(&mut self, node: u64, owner: u64, file: Arc<OwnedFd>, cell: Cell) {
        self.files.entry(node).or_default().insert(owner, Owner { file, held: Spans::default(), cell });
        self.count += 1;
    }

    fn remove(&mut self, node: u64, owner: u64) -> Option<Owner> {
        let owners = self.files.get_mut(&node)?;
        let removed = owners.remove(&owner)?;
        if owners.is_empty() {
            self.files.remove(&node);
        }
        self.count -= 1 + removed.held.0.len();
        Some(removed)
    }

    /// # Errors
    /// ENOLCK if the guest has too many locks.
    fn have_room(&self) -> Result<()> {
        // A lock within another range makes three of it.
        if self.count + 2 < limits::LOCKS {
            return Ok(());
        }
        limits::Limit::Locks.reached();
        Err(Errno::NOLCK)
    }

    /// Notes that the owner's range is now locked or not.
    fn note(&mut self, node: u64, owner: u64, span: Span, locked: bool) {
        if let Some(owner) = self.files.get_mut(&node).and_then(|owners| owners.get_mut(&owner)) {
            let before = owner.held.0.len();
            owner.held.set(span, locked);
            self.count = self.count + owner.held.0.len() - before;
        }
    }

    /// Whether `origin` would wait for itself if `owner` waited for `want`. Follows the owners that hold what is
    /// wanted.
    fn deadlocks(&self, origin: u64, owner: u64, want: &Want, seen: &mut HashSet<u64>) -> bool {
        let Some(owners) = self.files.get(&want.node) else { return false };
        let holders = owners.iter().filter(|(other, held)| **other != owner && held.held.conflicts(&want.span));
        holders.map(|(holder, _)| *holder).any(|holder| {
            if holder == origin {
                return true;
            }
            let next = self.wanted.get(&holder).filter(|_| seen.insert(holder));
            next.is_some_and(|wants| wants.iter().any(|next| self.deadlocks(origin, holder, next, seen)))
        })
    }
}

impl Locks {
    /// Drops all POSIX locks of an owner, as a close of the file does.
    pub fn drop_owner(&self, node: u64, owner: u64) {
        if let Some(owner) = self.posix.lock().remove(node, owner) {
            // A waiting thread may keep the description open.
            let mut all = range(libc::F_UNLCK, 0, 0);
            let _ = sys::ofd_lock(owner.file.as_fd(), libc::F_OFD_SETLK, &mut all);
        }
    }

    /// Ends the wait of the request `unique` with EINTR, if it waits.
    pub fn interrupt(&self, unique: u64) {
        if let Some(waiter) = self.waiting.get(&unique).map(|w| w.clone()) {
            waiter.interrupted.store(true, Ordering::SeqCst);
            // A signal that comes before the thread's system call is lost. So it is sent again.
            while self.waiting.contains_key(&unique) {
                let thread = Pid::from_raw(waiter.tid.load(Ordering::SeqCst));
                // The thread stores its id first, and then looks at `interrupted`.
                if thread.is_none_or(|thread| sys::interrupt(thread).is_err()) {
                    return;
                }
                std::thread::sleep(sys::INTERRUPT_AGAIN);
            }
        }
    }

    /// Has an owner's locks again that an earlier worker process took. What it holds is not known here, so a wait for
    /// it is not seen to be in a circle.
    pub fn add_again(&self, node: u64, owner: u64, file: OwnedFd, cell: Cell) {
        self.posix.lock().add(node, owner, Arc::new(file), cell);
    }

    /// Ends all waits and drops all locks.
    pub fn clear(&self) {
        let waiting: Vec<u64> = self.waiting.iter().map(|w| *w.key()).collect();
        for unique in waiting {
            self.interrupt(unique);
        }
        *self.posix.lock() = Posix::default();
    }

    /// A wait that [`interrupt`](Self::interrupt) can end. It calls `lock` again after each EINTR.
    ///
    /// # Errors
    /// EINVAL if another request with this number waits.
    fn wait(&self, unique: u64, mut lock: impl FnMut() -> Result<()> + Send + 'static) -> Result<LockWait> {
        let waiter = Arc::new(Waiter::default());
        match self.waiting.entry(unique) {
            Entry::Occupied(_) => return Err(Errno::INVAL),
            Entry::Vacant(entry) => entry.insert(waiter.clone()),
        };
        let registered = Registered { unique, waiting: self.waiting.clone() };
        Ok(Box::new(move || {
            let _registered = registered;
            waiter.tid.store(gettid().as_raw_nonzero().get(), Ordering::SeqCst);
            loop {
                if waiter.interrupted.load(Ordering::SeqCst) {
                    return Err(Errno::INTR);
                }
                match lock() {
                    Err(Errno::INTR) => {}
                    done => return done,
                }
            }
        }))
    }
}

/// A wait's place in the table. It ends with the wait.
struct Registered {
    unique: u64,
    waiting: Arc<DashMap<u64, Arc<Waiter>>>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.waiting.remove(&self.unique);
    }
}

/// What an owner waits for, while it waits.
struct Wanting {
    posix: Arc<Mutex<Posix>>,
    owner: u64,
    want: Want,
}

impl Drop for Wanting {
    fn drop(&mut self) {
        let mut posix = self.posix.lock();
        if let Some(wants) = posix.wanted.get_mut(&self.owner) {
            wants.retain(|want| *want != self.want);
            if wants.is_empty() {
                posix.wanted.remove(&self.owner);
            }
        }
    }
}

/// A struct flock from `start`, `len` bytes long (0: to the end of the file).
fn range(kind: i32, start: i64, len: i64) -> libc::flock {
    libc::flock { l_type: kind as i16, l_whence: libc::SEEK_SET as i16, l_start: start, l_len: len, l_pid: 0 }
}

/// The struct flock of a request, whose end is inclusive. OFFSET_MAX means the end of the file.
fn posix_range(lk: &FileLock) -> Result<libc::flock> {
    let start = i64::try_from(lk.start).map_err(|_| Errno::INVAL)?;
    let len = match i64::try_from(lk.end) {
        Ok(i64::MAX) | Err(_) => 0,
        Ok(end) => end.checked_sub(start).and_then(|n| n.checked_add(1)).filter(|n| *n > 0).ok_or(Errno::INVAL)?,
    };
    match lk.kind as i32 {
        kind @ (libc::F_RDLCK | libc::F_WRLCK | libc::F_UNLCK) => Ok(range(kind, start, len)),
        _ => Err(Errno::INVAL),
    }
}

impl PassthroughFs {
    /// The description that has the owner's locks, or a new one. It is open for reading and writing if the file allows
    /// it: a read lock needs the one, a write lock the other.
    fn lock_file(&self, posix: &Posix, owner: u64, handle: &Handle) -> Result<Arc<OwnedFd>> {
        if let Some(owner) = posix.owner(handle.node, owner) {
            return Ok(owner.file.clone());
        }
        let flags = rustix::fs::fcntl_getfl(handle.fd())? & OFlags::ACCMODE;
        // NONBLOCK: does not wait for the holder of a lease.
        let open = |flags| reopen(handle.fd(), flags | OFlags::NONBLOCK);
        Ok(Arc::new(self.places.fit(open(OFlags::RDWR).or_else(|_| open(flags))?)?))
    }

    fn set_posix(&self, handle: &Handle, unique: u64, lk: &LkIn, wait: bool) -> Result<Option<LockWait>> {
        let (node, owner) = (handle.node, lk.owner);
        let mut lock = posix_range(&lk.lk)?;
        let end = if lock.l_len == 0 { u64::MAX } else { lk.lk.end };
        let span = Span { start: lk.lk.start, end, write: lk.lk.kind == libc::F_WRLCK as u32 };
        let mut posix = self.locks.posix.lock();
        if lk.lk.kind == libc::F_UNLCK as u32 {
            let Some(owner) = posix.owner(node, owner) else { return Ok(None) };
            if owner.held.are_split(&span) {
                posix.have_room()?;
            }
        } else {
            posix.have_room()?;
        }
        let file = self.lock_file(&posix, owner, handle)?;
        if posix.owner(node, owner).is_none() {
            let cell = record::get().map(|record| record.lock(owner, node, file.as_raw_fd(), lk.fh));
            posix.add(node, owner, file.clone(), cell.unwrap_or_default());
        }
        handle.locked_by(owner);
        match sys::ofd_lock(file.as_fd(), libc::F_OFD_SETLK, &mut lock) {
            Ok(()) => {
                posix.note(node, owner, span, lk.lk.kind != libc::F_UNLCK as u32);
                Ok(None)
            }
            Err(Errno::AGAIN) if wait => {
                let want = Want { unique, node, span };
                if posix.deadlocks(owner, owner, &want, &mut HashSet::new()) {
                    return Err(Errno::DEADLK);
                }
                posix.wanted.entry(owner).or_default().push(want);
                let wanting = Wanting { posix: self.locks.posix.clone(), owner, want };
                drop(posix);
                let wait = move || {
                    sys::ofd_lock(file.as_fd(), libc::F_OFD_SETLKW, &mut lock)?;
                    wanting.posix.lock().note(node, owner, span, true);
                    Ok(())
                };
                self.locks.wait(unique, wait).map(Some)
            }
            Err(errno) => Err(errno),
        }
    }

    fn set_flock(&self, handle: &Handle, unique: u64, kind: u32, wait: bool) -> Result<Option<LockWait>> {
        let (try_it, do_it) = match kind as i32 {
            libc::F_RDLCK => (FlockOperation::NonBlockingLockShared, FlockOperation::LockShared),
            libc::F_WRLCK => (FlockOperation::NonBlockingLockExclusive, FlockOperation::LockExclusive),
            libc::F_UNLCK => (FlockOperation::NonBlockingUnlock, FlockOperation::Unlock),
            _ => return Err(Errno::INVAL),
        };
        match flock(handle.fd(), try_it) {
            Err(Errno::AGAIN) if wait => {
                let file = rustix::io::fcntl_dupfd_cloexec(handle.fd(), 0)?;
                self.locks.wait(unique, move || flock(&file, do_it)).map(Some)
            }
            done => done.map(|()| None),
        }
    }
}

impl LockOps for PassthroughFs {
    fn getlk(&self, node: u64, lk: &LkIn) -> Result<LkOut> {
        let handle = self.handles.get(node, lk.fh)?;
        if !self.config.posix_lock {
            return Err(Errno::NOSYS);
        }
        let mut lock = posix_range(&lk.lk)?;
        let file = self.lock_file(&self.locks.posix.lock(), lk.owner, &handle)?;
        sys::ofd_lock(file.as_fd(), libc::F_OFD_GETLK, &mut lock)?;
        let kind = i32::from(lock.l_type);
        if kind == libc::F_UNLCK {
            return Ok(LkOut { lk: FileLock { kind: kind as u32, ..lk.lk } });
        }
        let start = lock.l_start as u64;
        let end = if lock.l_len == 0 { i64::MAX as u64 } else { start + lock.l_len as u64 - 1 };
        // The holder's pid means nothing in the guest.
        Ok(LkOut { lk: FileLock { start, end, kind: kind as u32, pid: 0 } })
    }

    fn setlk(&self, node: u64, unique: u64, lk: &LkIn, wait: bool) -> Result<Option<LockWait>> {
        let handle = self.handles.get(node, lk.fh)?;
        let is_flock = lk.lk_flags & LK_FLOCK != 0;
        if !(if is_flock { self.config.flock } else { self.config.posix_lock }) {
            return Err(Errno::NOSYS);
        }
        if is_flock {
            return self.set_flock(&handle, unique, lk.lk.kind, wait);
        }
        self.set_posix(&handle, unique, lk, wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_cut() {
        let span = |start, end| Span { start, end, write: true };
        let cut = |a: Span, b: Span| a.without(&b).collect::<Vec<_>>();
        assert_eq!(cut(span(10, 19), span(12, 15)), [span(10, 11), span(16, 19)]);
        assert_eq!(cut(span(10, 19), span(0, 12)), [span(13, 19)]);
        assert_eq!(cut(span(10, 19), span(15, u64::MAX)), [span(10, 14)]);
        assert_eq!(cut(span(10, 19), span(0, u64::MAX)), []);
        assert_eq!(cut(span(10, 19), span(20, 30)), [span(10, 19)]);
        assert_eq!(cut(span(10, 19), span(0, 9)), [span(10, 19)]);
    }

    /// Compares with an array that has an entry for each byte.
    #[test]
    fn spans_are_what_was_locked_last() {
        const END: u64 = 40;
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..200 {
            let (mut spans, mut bytes) = (Spans::default(), [None; END as usize]);
            for _ in 0..60 {
                let (a, b) = (random.u64(..END), random.u64(..END));
                let span = Span { start: a.min(b), end: a.max(b), write: random.bool() };
                let expected = bytes[span.start as usize..=span.end as usize].iter().flatten();
                assert_eq!(spans.conflicts(&span), expected.clone().any(|write| *write || span.write));
                let locked = random.bool();
                spans.set(span, locked);
                bytes[span.start as usize..=span.end as usize].fill(locked.then_some(span.write));
                let mut seen = [None; END as usize];
                for span in spans.0.values() {
                    assert!(seen[span.start as usize..=span.end as usize].iter().all(Option::is_none));
                    seen[span.start as usize..=span.end as usize].fill(Some(span.write));
                }
                assert_eq!(seen, bytes);
                let runs = bytes.chunk_by(|a, b| a == b).filter(|run| run[0].is_some()).count();
                assert_eq!(spans.0.len(), runs);
            }
        }
    }
}
