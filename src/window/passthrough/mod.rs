//! Which nodes are open with passthrough, and how large their files are. The file system calls this. The mapper
//! (`slots`) does what needs messages to the frontend.

mod allocator;
mod mtime;
mod slots;
pub(super) mod table;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{Stat, fstat};
use rustix::io::Errno;

use super::frontend::Source;
use super::jobs::{EntryJob, Jobs, SlotJob};
use super::reservation::{Stores, hole};
use super::sys;
use crate::fuse::ops::{Answer, Result};
use crate::limits::TABLE_ENTRIES;
use mtime::DeferredMtime;
pub use mtime::{Touch, touch};
pub use slots::Slots;
use table::{Change, Filled, LEN, Line, Look, Table};
pub use table::{Entry, EntryState, LEN as TABLE_LEN};

/// For which files the guest may store in place (`--passthrough-writable`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Writable {
    /// Only files without holes, on file systems that write in place: no store can fail for want of space. On XFS the
    /// file must share no block, and the guard must see to it that this stays so.
    #[default]
    InPlace,
    /// All files. If the disk is full, a store may end the virtual machine.
    Always,
}

/// How large the passthrough window is.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Regions 1 and 2 together, in bytes: a multiple of 2 MiB from [`MIN_SIZE`] on.
    pub size: u64,
    /// The most slots.
    pub slots: usize,
    /// `--passthrough-writable`
    pub writable: Writable,
    /// How long the guest may take to let go if a host process waits: [`PATIENCE`], except in tests.
    pub patience: Duration,
}

/// How long the guest may take to let go if a host process waits, from when the daemon hears of it: the guard lets that
/// process go on after [`DEADLINE`](super::proxy::DEADLINE). The rest is for a job that the mapper is about
/// ([`at_once`](super::Stores::at_once)) and for an answer of the frontend, a quarter of a second each.
pub const PATIENCE: Duration = Duration::from_millis(if cfg!(fuzzing) { 0 } else { 1500 });

/// After so many messages a file that has lost its slot gets another if one is idle. A mapping takes as long as some
/// ten messages.
const MISSED: u32 = 16;

/// The smallest window: a table and one range for slots.
pub const MIN_SIZE: u64 = 2 * LEN;

/// The state of window passthrough, for the file system and the mapper.
pub struct Passthrough {
    pub(super) table: Table,
    settings: Settings,
    /// The guest has the table.
    on: AtomicBool,
    nodes: Mutex<Nodes>,
    times: Arc<DeferredMtime>,
    jobs: Arc<Jobs>,
}

/// An entry's index, and how many holes its file had got by then.
pub struct Holes(u32, u64);

/// Lock rule: before a line of the table; no system call and no call to the frontend while it is held.
struct Nodes {
    /// Number of the session. What the mapper does for an earlier one is undone.
    pub session: u64,
    known: HashMap<u64, Node>,
    free: Vec<u32>,
    /// Counts releases.
    tick: u64,
}

struct Node {
    opens: u32,
    how: How,
    /// `tick` at the last release.
    released: u64,
}

enum How {
    /// No open has passthrough.
    Messages,
    /// The mapper is mapping the file. The answers wait for it.
    Deciding(u32, Vec<Answer<Option<u32>>>),
    /// With this entry. If there are no opens, it is kept for the next.
    Passing(u32),
}

impl Node {
    fn index(&self) -> Option<u32> {
        match self.how {
            How::Messages => None,
            How::Deciding(index, _) | How::Passing(index) => Some(index),
        }
    }
}

impl Nodes {
    fn new() -> Self {
        Self { session: 0, known: HashMap::new(), free: (1..TABLE_ENTRIES).collect(), tick: 0 }
    }

    /// Gives an entry back, if its session is this one.
    pub fn free(&mut self, session: u64, index: u32) {
        if session == self.session {
            self.free.push(index);
        }
    }

    /// The entry that a node is open by.
    pub fn index(&self, node: u64) -> Option<u32> {
        self.known.get(&node).filter(|node| node.opens > 0).and_then(Node::index)
    }

    /// Forgets a node whose entry is this if nobody has it open.
    pub fn forget(&mut self, node: u64, index: u32) -> bool {
        let kept = self.is_kept(node, index);
        if kept {
            self.known.remove(&node);
        }
        kept
    }

    /// Whether nobody has a node open, and its slot is kept by this entry.
    pub fn is_kept(&self, node: u64, index: u32) -> bool {
        let kept = |node: &Node| node.opens == 0 && matches!(node.how, How::Passing(at) if at == index);
        self.known.get(&node).is_some_and(kept)
    }

    /// The kept node that was released first, and its entry; it is forgotten.
    pub fn evict(&mut self) -> Option<u32> {
        let kept = self.known.iter().filter(|(_, node)| node.opens == 0 && matches!(node.how, How::Passing(_)));
        let node = kept.min_by_key(|(_, node)| node.released).map(|(node, _)| *node)?;
        self.known.remove(&node)?.index()
    }
}

impl Passthrough {
    pub(super) fn new(settings: Settings, jobs: Arc<Jobs>, touch: Touch) -> io::Result<Self> {
        let (table, nodes, times) = (Table::new()?, Mutex::new(Nodes::new()), DeferredMtime::new(touch));
        Ok(Self { table, settings, on: AtomicBool::new(false), nodes, times, jobs })
    }

    /// Bytes of region 1.
    pub fn size(&self) -> u64 {
        self.settings.size - LEN
    }

    /// Whether the guest has the table.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// Begins a session with the guest. Answers when the table is in the guest's memory, or with an error.
    pub fn start(&self, answer: Answer) {
        let session = self.nodes.lock().session;
        self.jobs.send(SlotJob::Start { session, answer });
    }

    fn started(&self, session: u64) {
        self.on.store(self.nodes.lock().session == session, Ordering::Release);
    }

    /// Forgets everything. The mapper's reset must follow.
    pub(super) fn reset(&self) {
        let mut nodes = self.nodes.lock();
        let new = Nodes { session: nodes.session + 1, ..Nodes::new() };
        let ended = std::mem::replace(&mut *nodes, new);
        self.on.store(false, Ordering::Release);
        (1..TABLE_ENTRIES).for_each(|index| self.note_stores(index, self.table.entry(index).nodeid));
        self.table.clear();
        drop(nodes);
        self.times.set_soon();
        // The mapper then finds that nobody waits.
        for node in ended.known.into_values() {
            if let How::Deciding(_, waiting) = node.how {
                waiting.into_iter().for_each(|answer| answer(Err(Errno::IO)));
            }
        }
    }

    /// Whether a node has opens, of any kind.
    pub fn is_open(&self, node: u64) -> bool {
        self.nodes.lock().known.get(&node).is_some_and(|node| node.opens > 0)
    }

    /// Counts an open of a node. Returns the index of its entry if it has passthrough; pending while the mapper decides
    /// that: [`decided`](Self::decided) tells. `source`: the file, if it is worth passing through, for the first open.
    pub fn open(&self, node: u64, file: BorrowedFd, source: Option<Arc<dyn Source>>) -> Poll<Option<u32>> {
        let mut nodes = self.nodes.lock();
        if let Some(known) = nodes.known.get_mut(&node) {
            let first = known.opens == 0;
            known.opens += 1;
            match (&known.how, first) {
                (How::Messages, _) => return Poll::Ready(None),
                (How::Passing(index), false) => return Poll::Ready(Some(*index)),
                (How::Passing(index), true) => {
                    let index = *index;
                    if source.is_none() {
                        known.how = How::Messages;
                        // Under the lock, so that it comes before the end of its session.
                        self.send(SlotJob::Entry(EntryJob::Drop, index));
                        return Poll::Ready(None);
                    }
                    // Others wait for the end of this.
                    known.how = How::Deciding(index, Vec::new());
                    let session = nodes.session;
                    drop(nodes);
                    return Poll::Ready(self.revive((session, node, index), file));
                }
                (How::Deciding(..), _) => {}
            }
        } else if let Some((source, index)) = source.and_then(|source| Some((source, nodes.free.pop()?))) {
            self.table.begin(index, node);
            nodes.known.insert(node, Node { opens: 1, how: How::Deciding(index, Vec::new()), released: 0 });
            let session = nodes.session;
            // Under the lock, so that it comes before the end of its session.
            let sent = self.jobs.offer(SlotJob::Open { session, node, index, source });
            drop(nodes);
            if sent.is_err() {
                self.decide(session, node, index, false);
                self.nodes.lock().free(session, index);
                return Poll::Ready(None);
            }
        } else {
            nodes.known.insert(node, Node { opens: 1, how: How::Messages, released: 0 });
            return Poll::Ready(None);
        }
        Poll::Pending
    }

    /// Answers with the index of an open node's entry, if it has passthrough, once the mapper has decided that.
    pub fn decided(&self, node: u64, answer: Answer<Option<u32>>) {
        let mut nodes = self.nodes.lock();
        let index = match nodes.known.get_mut(&node).map(|node| &mut node.how) {
            Some(How::Deciding(_, waiting)) => return waiting.push(answer),
            Some(How::Passing(index)) => Some(*index),
            Some(How::Messages) | None => None,
        };
        drop(nodes);
        answer(Ok(index));
    }

    /// The mapper has mapped a node's file, or could not. `false` if the mapping is no longer wanted.
    fn decide(&self, session: u64, node: u64, index: u32, mapped: bool) -> bool {
        let mut nodes = self.nodes.lock();
        if nodes.session != session {
            return false;
        }
        let Some(known) = nodes.known.get_mut(&node) else { return false };
        let How::Deciding(at, waiting) = &mut known.how else { return false };
        if *at != index {
            return false;
        }
        let waiting = std::mem::take(waiting);
        known.how = if mapped { How::Passing(index) } else { How::Messages };
        let open = known.opens > 0;
        if !open {
            // The guest has released an open before it was answered.
            nodes.known.remove(&node);
        }
        drop(nodes);
        waiting.into_iter().for_each(|answer| answer(Ok(mapped.then_some(index))));
        mapped && open
    }

    /// Makes a kept entry live again, for the first open of its node (session, node, index). If that fails, the open
    /// has no passthrough: the slot has just been taken away, or the guest might not store to it.
    fn revive(&self, (session, node, index): (u64, u64, u32), file: BorrowedFd) -> Option<u32> {
        let live = self.live(index, file, None, true);
        let passes = self.decide(session, node, index, live.is_ok());
        if !passes {
            let nodes = self.nodes.lock();
            if nodes.session == session {
                self.send(SlotJob::Entry(EntryJob::Drop, index));
            }
        }
        passes.then_some(index)
    }

    /// Allocates the holes of a file in memory, so that no load from them can fail for want of memory. The result is
    /// for [`live`](Self::live). Of a long file it does a part, for the reason given at `Slots::fill_holes`.
    ///
    /// # Errors
    /// EAGAIN if there is more to do; ENOSPC.
    fn fill(&self, index: u32, file: BorrowedFd) -> Result<Filled> {
        let look = self.table.look(index);
        let (st, stores) = (fstat(file)?, Stores::of(file)?);
        let size = st.st_size as u64;
        let (holes, from) = look.update(|line| {
            let Filled { holes, size, blocks } = line.filled;
            // Others may have taken blocks away since the last part.
            let is_known = holes == line.holes && blocks <= st.st_blocks as u64;
            (line.holes, if is_known { size } else { 0 })
        })?;
        if stores == Stores::Memory {
            let from = hole(file, from.min(size), size)?;
            let end = size.min(from.saturating_add(stores.at_once()));
            stores.allocate(file, from, end)?;
            let blocks = fstat(file)?.st_blocks as u64;
            look.update(|line| line.filled = Filled { holes, size: end, blocks })?;
            if end < size {
                return Err(Errno::AGAIN);
            }
        }
        Ok(Filled { holes, size, blocks: 0 })
    }

    /// Makes an entry with a slot live. `filled`: the file had no hole then; the entry counts those that it got since.
    /// `stores`: only if the guest may store to it.
    ///
    /// # Errors
    /// EOPNOTSUPP if it may not, or if a load from a hole would take memory, which may be short; EAGAIN if there is no
    /// slot.
    fn live(&self, index: u32, file: BorrowedFd, filled: Option<Filled>, stores: bool) -> Result<()> {
        let look = self.table.look(index);
        let st = fstat(file)?;
        let size = st.st_size as u64;
        let hole = self.hole(file, 0, size)?;
        if stores && hole < size {
            return Err(Errno::OPNOTSUPP);
        }
        let takes_memory = hole < size && Stores::of(file)? == Stores::Memory;
        look.update(|line| {
            let hole = match filled {
                _ if !takes_memory => hole,
                // Pages that were allocated and not written look like holes.
                Some(filled) if filled.holes == line.holes && filled.size >= size => filled.size,
                _ => return Err(Errno::OPNOTSUPP),
            };
            line.step(Change::Map)?;
            line.hole = hole;
            note(line, &st);
            settle(line);
            Ok(())
        })?
    }

    /// The first byte between `from` and `size` for which a store may have to find room.
    fn hole(&self, file: BorrowedFd, from: u64, size: u64) -> Result<u64> {
        if self.settings.writable == Writable::Always {
            return Ok(u64::MAX);
        }
        match Stores::of(file)? {
            Stores::InPlace | Stores::Memory => hole(file, from, size),
            Stores::Unshared => Ok(hole(file, from, size)?.min(first_shared(file, from, size))),
            Stores::Elsewhere => Ok(from),
        }
    }

    /// Whether the guest may ever store to a file of its file system in place. `guarded`: nobody makes it share blocks
    /// unnoticed.
    fn permits(&self, file: BorrowedFd, guarded: bool) -> Result<bool> {
        Ok(self.settings.writable == Writable::Always || Stores::of(file)?.in_place(guarded))
    }

    /// Whether the guest may store to the file in place, as far as a quick look tells. [`live`](Self::live) decides.
    fn seems_whole(&self, file: BorrowedFd) -> Result<bool> {
        let st = fstat(file)?;
        let size = st.st_size as u64;
        if self.settings.writable == Writable::InPlace && Stores::of(file)? == Stores::Memory {
            // Enough to find most files with holes. To find the hole may take lseek(2) 11 ms for 1 GiB.
            return Ok((st.st_blocks as u64).saturating_mul(512) >= size);
        }
        Ok(self.permits(file, true)? && self.hole(file, 0, size)? >= size)
    }

    /// Whether a node's file must not come to share blocks with another.
    pub(super) fn keeps_blocks(&self, node: u64) -> bool {
        let is_mapped = |line: &mut Line| line.file.clone().filter(|_| line.state().is_mapped());
        let file = self.index(node).and_then(|index| self.table.update(index, is_mapped));
        file.is_some_and(|file| Stores::of(file.as_fd()) == Ok(Stores::Unshared))
    }

    /// The guest reads or writes an open node's file by a message. If it has no slot, it may get one again.
    pub fn missed(&self, node: u64) {
        let Some(index) = self.index(node) else { return };
        let wants = self.table.update(index, |line| {
            line.missed += u32::from(line.state() == EntryState::Revoked);
            let wants = line.missed >= MISSED;
            line.missed %= MISSED;
            wants
        });
        if wants {
            self.send(SlotJob::Entry(EntryJob::Want, index));
        }
    }

    /// Counts a release of a node. After the last one, its slot is kept.
    pub fn release(&self, node: u64) {
        let mut nodes = self.nodes.lock();
        nodes.tick += 1;
        let tick = nodes.tick;
        let Some(known) = nodes.known.get_mut(&node) else { return };
        known.opens = known.opens.saturating_sub(1);
        known.released = tick;
        let index = match known.how {
            _ if known.opens > 0 => return,
            How::Deciding(..) => return,
            How::Messages => None,
            How::Passing(index) => Some(index),
        };
        let kept = index.is_some_and(|index| {
            self.table.update(index, |line| {
                let kept = line.state().is_live();
                let _ = line.step(Change::Release);
                kept
            })
        });
        if !kept {
            nodes.known.remove(&node);
            index.into_iter().for_each(|index| self.send(SlotJob::Entry(EntryJob::Drop, index)));
        }
    }

    /// The guest has forgotten a node.
    pub fn forget(&self, node: u64) {
        let mut nodes = self.nodes.lock();
        let Some(index) = nodes.known.get(&node).and_then(Node::index) else { return };
        if nodes.forget(node, index) {
            self.send(SlotJob::Entry(EntryJob::Drop, index));
        }
    }

    /// Asks for a live entry of an open node that covers `len` bytes from `from` on.
    pub fn ask(&self, node: u64, from: u64, len: u64, writable: bool, answer: Answer) {
        let index = self.nodes.lock().index(node);
        match index {
            Some(index) => self.jobs.send(SlotJob::Ask { node, index, from, len, writable, answer }),
            None => answer(Err(Errno::BADF)),
        }
    }

    /// Whether a node has an entry of the table.
    pub(super) fn has_entry(&self, node: u64) -> bool {
        self.index(node).is_some()
    }

    #[cfg(any(fuzzing, test))]
    pub(super) fn free_entries(&self) -> usize {
        self.nodes.lock().free.len()
    }

    fn index(&self, node: u64) -> Option<u32> {
        if self.is_on() { self.nodes.lock().known.get(&node).and_then(Node::index) } else { None }
    }

    /// `len` bytes of a node's file were written at `at`, or at its end. Call this before the request is answered.
    pub fn wrote(&self, node: u64, file: BorrowedFd, at: Option<u64>, len: u64) {
        let Some(look) = self.looking(node) else { return };
        let Ok(st) = fstat(file) else { return };
        let size = st.st_size as u64;
        let at = at.unwrap_or(size.saturating_sub(len));
        let hole = look.update(|line| {
            self.skips_to(line, at);
            line.hole
        });
        // Search from the hole on, since others may have punched holes into what was written.
        let covered = hole.ok().filter(|hole| (at..at.saturating_add(len)).contains(hole));
        let next = covered.map(|hole| self.hole(file, hole, size).unwrap_or(hole));
        self.noted(look, &st, next);
    }

    /// The right to look at a node's file, if it has an entry.
    fn looking(&self, node: u64) -> Option<Look<'_>> {
        let look = self.table.look(self.index(node)?);
        // While this waited, the entry may have become another node's.
        (look.update(|line| line.entry().nodeid) == Ok(node)).then_some(look)
    }

    /// Something was written or allocated at `at`: there may be a hole between the end of the file and there.
    fn skips_to(&self, line: &mut Line, at: u64) {
        let old = line.entry().size;
        if at > old {
            self.skipped(line, old);
        }
    }

    /// Notes what a look has found. `hole`: the first hole, if it was looked for.
    fn noted(&self, look: Look, st: &Stat, hole: Option<u64>) {
        let (index, _) = look.entry();
        let revoked = look.update(|line| {
            hole.into_iter().for_each(|hole| line.hole = hole);
            note(line, st);
            settle(line)
        });
        drop(look);
        self.changed(index, revoked == Ok(true));
    }

    /// Whether a node's file has yet to get the time of what the guest has stored in place. Never waits.
    pub fn owes_times(&self, node: u64) -> bool {
        self.index(node).into_iter().for_each(|index| self.note_stores(index, node));
        self.times.owes(node)
    }

    /// Gives a node's file the present time if it [owes](Self::owes_times) one. Call this before a request of the guest
    /// reads or changes the file's attributes or data. Waits for the file system.
    pub fn settle_times(&self, node: u64) {
        if self.owes_times(node) {
            self.times.settle(node);
        }
    }

    /// Notes that an entry's file must get the present time, if the guest has stored to it.
    fn note_stores(&self, index: u32, node: u64) {
        self.table.stored(index, node, |file| self.times.owe(node, file));
    }

    /// To be called before blocks are allocated, which look like holes until they are written. The result is for
    /// [`allocated`](Self::allocated).
    pub fn allocating(&self, node: u64) -> Option<Holes> {
        self.index(node).map(|index| self.holes(index))
    }

    fn holes(&self, index: u32) -> Holes {
        Holes(index, self.table.update(index, |line| line.holes))
    }

    /// The first byte of an entry's file for which a store may have to find room.
    fn first_hole(&self, index: u32) -> u64 {
        self.table.update(index, |line| line.hole)
    }

    /// `len` bytes of a node's file from `at` on now have blocks, unless somebody has punched a hole since `since`.
    pub fn allocated(&self, since: &Holes, file: BorrowedFd, at: u64, len: u64) {
        let Holes(index, before) = *since;
        let look = self.table.look(index);
        let Ok(st) = fstat(file) else { return };
        let (size, end) = (st.st_size as u64, at.saturating_add(len));
        let hole = look.update(|line| {
            self.skips_to(line, at);
            (line.holes == before).then_some(line.hole)
        });
        let covered = hole.ok().flatten().filter(|hole| (at..end).contains(hole));
        let next = covered.map(|hole| {
            let done = end.min(size);
            // An allocation without FALLOC_FL_UNSHARE_RANGE leaves blocks shared.
            let own = match (self.settings.writable, Stores::of(file)) {
                (Writable::InPlace, Ok(Stores::Unshared)) => first_shared(file, hole, done),
                _ => done,
            };
            if own < done { own } else { self.hole(file, done, size).unwrap_or(hole) }
        });
        self.noted(look, &st, next);
    }

    /// Runs `punch`, which punches a hole into a node's file.
    pub fn punching<R>(&self, node: u64, at: u64, punch: impl FnOnce() -> R) -> R {
        let Some(index) = self.index(node) else { return punch() };
        let skip = || {
            let skipped = self.looking(node).map(|look| {
                look.update(|line| {
                    self.skipped(line, at);
                    // The blocks that it takes must not look like a change by others.
                    line.blocks = 0;
                    settle(line)
                })
            });
            skipped == Some(Ok(true))
        };
        let before = skip();
        let done = punch();
        // A thread that looked or allocated in between has not seen the hole.
        let after = skip();
        self.changed(index, before || after);
        done
    }

    /// From now on there may be a hole at this byte.
    fn skipped(&self, line: &mut Line, at: u64) {
        if self.settings.writable == Writable::InPlace {
            line.hole = line.hole.min(at);
            line.holes += 1;
        }
    }

    /// A thread has found the file to have this size in bytes and `blocks` blocks. `look` looks again.
    pub fn saw(&self, node: u64, found: u64, blocks: u64, look: impl FnOnce() -> Result<(u64, u64)>) {
        let Some(index) = self.index(node) else { return };
        // While this guest truncates the file, the size is not final.
        let resized = |line: &Line| found != line.entry().size && line.limits.is_empty();
        let differs = |line: &mut Line| line.state().is_mapped() && (resized(line) || blocks < line.blocks);
        if !self.table.update(index, differs) {
            return;
        }
        let Some(held) = self.looking(node) else { return };
        let known = |line: &mut Line| differs(line).then(|| (line.file.clone(), line.entry().size, resized(line)));
        let Ok(Some((file, old, is_resized))) = held.update(known) else { return };
        let Ok((size, blocks)) = look() else { return };
        let found = self.beyond(file.as_deref(), old, size);
        let revoked = held.update(|line| {
            if blocks < line.blocks {
                // Others have taken some. The daemon finds out which when the guest has let go.
                self.skipped(line, 0);
                line.blocks = blocks;
            }
            if is_resized {
                self.resized(line, size, found);
            }
            settle(line)
        });
        drop(held);
        self.changed(index, revoked == Ok(true));
    }

    /// Others have changed the file of an entry: its size may be another, and there may be holes.
    fn look(&self, index: u32, file: BorrowedFd) {
        let held = self.table.look(index);
        let Ok(st) = fstat(file) else { return };
        let Ok(old) = held.update(|line| line.entry().size) else { return };
        let size = st.st_size as u64;
        let found = self.beyond(Some(&file), old, size);
        // Allocated blocks that nobody has written look like a hole. The guest then only has to look again. On XFS
        // the guard reports by itself who comes to share blocks.
        let in_place = self.settings.writable == Writable::InPlace;
        let hole = if in_place { hole(file, 0, size).unwrap_or(0) } else { u64::MAX };
        let revoked = held.update(|line| {
            if !line.state().is_mapped() {
                return false;
            }
            if line.limits.is_empty() {
                self.resized(line, size, found);
            }
            if hole < line.hole.min(size) {
                self.skipped(line, hole);
            }
            line.blocks = st.st_blocks as u64;
            settle(line)
        });
        drop(held);
        self.changed(index, revoked == Ok(true));
    }

    /// The first hole of a file between its `old` end and its new one.
    fn beyond(&self, file: Option<impl AsFd>, old: u64, size: u64) -> u64 {
        match file {
            Some(file) if size > old => self.hole(file.as_fd(), old, size).unwrap_or(old),
            _ => old,
        }
    }

    /// Others have given the file this size. `found`: the first hole [`beyond`](Self::beyond) the old one.
    fn resized(&self, line: &mut Line, size: u64, found: u64) {
        let old = line.entry().size;
        if size > old {
            // The others may have made it longer by a hole, or appended to it.
            match found >= size && line.hole >= old {
                true => line.hole = line.hole.max(found),
                false => self.skipped(line, found),
            }
        }
        resize(line, size);
        forget_past_end(line);
        if line.entry().size != old {
            line.count_change();
        }
    }

    /// Runs `run`, which sets the file's size. The guest sees a smaller size before that, and a larger one after it.
    /// `size` then looks at the size.
    pub fn truncate<R>(
        &self,
        node: u64,
        to: u64,
        run: impl FnOnce() -> Result<R>,
        size: impl FnOnce() -> Result<u64>,
    ) -> Result<R> {
        let limit = |line: &mut Line| {
            line.limits.push(to);
            let old = line.entry().size;
            resize(line, old);
            old
        };
        let limited = self.looking(node).and_then(|look| Some((look.entry(), look.update(limit).ok()?)));
        let done = run();
        // Meanwhile an open may have taken over the old size. The node may have another entry by now, without limits.
        let Some(look) = self.looking(node) else { return done };
        let size = size();
        let old = limited.filter(|(entry, _)| *entry == look.entry()).map(|(_, old)| old);
        let revoked = look.update(|line| {
            let limit = line.limits.iter().position(|limit| old.is_some() && *limit == to);
            limit.map(|at| line.limits.swap_remove(at));
            if to > line.entry().size {
                self.skipped(line, line.entry().size);
            }
            // The blocks that a cut takes must not look like a change by others.
            line.blocks = 0;
            match size {
                Ok(size) => resize(line, size),
                // Both failed, so the size is what it was.
                Err(_) if done.is_err() => old.into_iter().for_each(|old| resize(line, old)),
                Err(_) => {}
            }
            forget_past_end(line);
            settle(line)
        });
        let (index, _) = look.entry();
        drop(look);
        self.changed(index, revoked == Ok(true));
        done
    }

    /// Tells the mapper if an entry is revoked, or too short for its file.
    fn changed(&self, index: u32, revoked: bool) {
        let entry = self.table.entry(index);
        if revoked {
            self.send(SlotJob::Entry(EntryJob::Downgrade, index));
        } else if entry.state.is_live() && entry.size > entry.length {
            self.send(SlotJob::Entry(EntryJob::Remap, index));
        }
    }

    fn send(&self, job: SlotJob) {
        self.jobs.send(job);
    }

    fn jobs(&self) -> &Jobs {
        &self.jobs
    }
}

/// The first byte in `from..end` that another file may share. `end` if there is none.
fn first_shared(file: BorrowedFd, from: u64, end: u64) -> u64 {
    sys::shared(file, from, end).unwrap_or(from)
}

/// Notes a file's blocks and size.
fn note(line: &mut Line, st: &Stat) {
    line.blocks = st.st_blocks as u64;
    resize(line, st.st_size as u64);
}

/// Sets the size, but not above the truncations in progress.
fn resize(line: &mut Line, size: u64) {
    line.set_size(line.limits.iter().copied().fold(size, u64::min));
}

/// What was known of a file past its end no longer holds once somebody makes it longer.
fn forget_past_end(line: &mut Line) {
    // u64::MAX: holes do not count.
    if line.hole != u64::MAX {
        line.hole = line.hole.min(line.entry().size);
    }
}

/// Lets the guest store to a live entry if no store can fail, and revokes the entry if stores were allowed and may fail
/// from now on. Whether it revoked.
fn settle(line: &mut Line) -> bool {
    let whole = line.hole >= line.entry().size;
    match line.state() {
        EntryState::Live { writable: false } if whole => line.step(Change::AllowStores).is_err(),
        EntryState::Live { writable: true } if !whole => line.step(Change::BeginRevoke).is_ok(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use rustix::fs::{FallocateFlags, fallocate};

    use super::touch;
    use super::*;
    use crate::limits::WINDOW_JOBS;
    use crate::window::RANGE;

    const NODE: u64 = 7;
    const INDEX: u32 = 1;
    const SIZE: u64 = 1 << 20;

    /// A guest that has a file open by a slot.
    fn passing(file: &File) -> Passthrough {
        let settings = Settings { size: 4 * RANGE, slots: 1, writable: Writable::InPlace, patience: PATIENCE };
        let pass = Passthrough::new(settings, Arc::default(), Box::new(touch)).unwrap();
        pass.on.store(true, Ordering::Release);
        give(&pass, NODE, file);
        pass
    }

    /// The node gets the entry and a slot.
    fn give(pass: &Passthrough, node: u64, file: &File) {
        pass.nodes.lock().known.insert(node, Node { opens: 1, how: How::Passing(INDEX), released: 0 });
        pass.table.begin(INDEX, node);
        pass.table.update(INDEX, |line| line.slot = Some((0, RANGE)));
        let _ = pass.live(INDEX, file.as_fd(), None, false);
    }

    /// The node's entry is free, as after its last release.
    fn take_away(pass: &Passthrough) {
        pass.nodes.lock().known.remove(&NODE);
        pass.table.update(INDEX, |line| line.step(Change::Release).unwrap());
    }

    fn full_file(dir: &str) -> File {
        let mut file = tempfile::tempfile_in(dir).unwrap();
        file.write_all(&vec![b'r'; SIZE as usize]).unwrap();
        file.sync_all().unwrap();
        file
    }

    fn set_len(file: &File, len: u64) -> Result<()> {
        file.set_len(len).unwrap();
        Ok(())
    }

    fn punch(file: &File, at: u64) {
        fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, 4096).unwrap();
    }

    const READ_ONLY: EntryState = EntryState::Live { writable: false };
    const WRITABLE: EntryState = EntryState::Live { writable: true };
    const REVOKED: EntryState = EntryState::Revoking { writable: true };

    fn state(pass: &Passthrough) -> EntryState {
        pass.table.entry(INDEX).state
    }

    /// Makes the entry live, with this size and first hole.
    fn read_only(pass: &Passthrough, size: u64, hole: u64) {
        pass.table.update(INDEX, |line| {
            line.step(Change::Release).unwrap();
            line.step(Change::Map).unwrap();
            line.set_size(size);
            line.hole = hole;
        });
    }

    fn look(file: &File) -> Result<(u64, u64)> {
        let st = fstat(file)?;
        Ok((st.st_size as u64, st.st_blocks as u64))
    }

    /// A directory on the disk and one in memory. The disk's is left out if its file system does not write in place.
    fn directories() -> impl Iterator<Item = &'static str> {
        [env!("CARGO_MANIFEST_DIR"), "/dev/shm"].into_iter().filter(|dir| {
            let dir = File::open(dir).unwrap();
            matches!(Stores::of(dir.as_fd()), Ok(Stores::InPlace | Stores::Memory))
        })
    }

    #[test]
    fn files_that_do_not_pass_take_no_entry() {
        let file = full_file("/dev/shm");
        let pass = Arc::new(passing(&file));
        let free = pass.nodes.lock().free.len();
        for node in NODE + 1..NODE + 9 {
            assert!(pass.open(node, file.as_fd(), None) == Poll::Ready(None));
            pass.release(node);
        }
        assert_eq!(pass.nodes.lock().free.len(), free);
    }

    /// Never opened: the mapper does not come to it.
    struct NoFile;

    impl Source for NoFile {
        fn open(&self, _writable: bool) -> Result<std::os::fd::OwnedFd> {
            Err(Errno::IO)
        }

        fn facts(&self) -> Result<crate::window::Facts> {
            Err(Errno::IO)
        }

        fn failed(&self, _errno: Errno) {}
    }

    #[test]
    fn files_without_an_entry_are_served_by_messages() {
        let file = full_file("/dev/shm");
        let pass = Arc::new(passing(&file));
        pass.nodes.lock().free.truncate(1);
        let open = |node| pass.open(node, file.as_fd(), Some(Arc::new(NoFile)));
        assert!(open(NODE + 1) == Poll::Pending && open(NODE + 2) == Poll::Ready(None));
    }

    #[test]
    fn an_open_is_by_messages_if_the_mapper_has_too_much_to_do() {
        let file = full_file("/dev/shm");
        let pass = Arc::new(passing(&file));
        let free = pass.nodes.lock().free.len();
        (0..WINDOW_JOBS).for_each(|_| pass.ask(NODE, 0, 1, false, Box::new(|_| ())));
        let opened = || pass.open(NODE + 1, file.as_fd(), Some(Arc::new(NoFile)));
        assert!(opened() == Poll::Ready(None) && opened() == Poll::Ready(None));
        assert_eq!(pass.nodes.lock().free.len(), free);
    }

    #[test]
    fn a_truncation_meets_an_open() {
        let file = full_file("/dev/shm");
        let pass = passing(&file);
        take_away(&pass);
        let cut = || {
            // It sees the old size.
            give(&pass, NODE, &file);
            assert_eq!(pass.table.entry(INDEX).size, SIZE);
            set_len(&file, 10)
        };
        pass.truncate(NODE, 10, cut, || Ok(look(&file)?.0)).unwrap();
        assert_eq!(pass.table.entry(INDEX).size, 10);
    }

    #[test]
    fn a_truncation_leaves_the_entrys_next_node_alone() {
        let (file, other) = (full_file("/dev/shm"), full_file("/dev/shm"));
        let pass = passing(&file);
        let cut = || {
            take_away(&pass);
            give(&pass, NODE + 1, &other);
            set_len(&file, 10)
        };
        pass.truncate(NODE, 10, cut, || Ok(look(&file)?.0)).unwrap();
        assert_eq!(pass.table.entry(INDEX).size, SIZE);
        // Nor does its limit stay.
        pass.truncate(NODE + 1, 2 * SIZE, || set_len(&other, 2 * SIZE), || Ok(look(&other)?.0)).unwrap();
        assert_eq!(pass.table.entry(INDEX).size, 2 * SIZE);
    }

    #[test]
    fn holes_past_a_new_end_are_found() {
        let file = full_file("/dev/shm");
        let pass = passing(&file);
        assert_eq!(state(&pass), WRITABLE);
        pass.truncate(NODE, 4096, || set_len(&file, 4096), || Ok(look(&file)?.0)).unwrap();
        // Somebody else makes the file longer by a hole, which the guest does not know of when it writes at the end.
        file.set_len(SIZE / 2).unwrap();
        file.write_all_at(b"w", 4096).unwrap();
        pass.wrote(NODE, file.as_fd(), Some(4096), 1);
        assert_eq!(state(&pass), REVOKED);
    }

    #[test]
    fn holes_that_others_punch_are_found() {
        for dir in directories() {
            // When the guest asks for attributes, and when the kernel reports a change.
            let file = full_file(dir);
            let pass = passing(&file);
            assert_eq!(state(&pass), WRITABLE, "{dir}");
            let seen = look(&file).unwrap();
            pass.saw(NODE, seen.0, seen.1, || look(&file));
            assert_eq!(state(&pass), WRITABLE);
            punch(&file, 4096);
            let seen = look(&file).unwrap();
            pass.saw(NODE, seen.0, seen.1, || look(&file));
            assert_eq!(state(&pass), REVOKED, "{dir}");

            let file = full_file(dir);
            let pass = passing(&file);
            pass.look(INDEX, file.as_fd());
            assert_eq!(state(&pass), WRITABLE);
            punch(&file, 4096);
            // As many blocks as before.
            fallocate(&file, FallocateFlags::KEEP_SIZE, SIZE, 4096).unwrap();
            pass.look(INDEX, file.as_fd());
            assert_eq!(state(&pass), REVOKED, "{dir}");
        }
    }

    #[test]
    fn memory_past_the_end_fills_no_hole() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(SIZE).unwrap();
        fallocate(&file, FallocateFlags::KEEP_SIZE, SIZE, SIZE).unwrap();
        let pass = passing(&file);
        assert_eq!(state(&pass), EntryState::Free, "a load from a hole takes memory too");
        assert_eq!(pass.live(INDEX, file.as_fd(), None, false), Err(Errno::OPNOTSUPP));
        file.write_all_at(&vec![b'r'; SIZE as usize], 0).unwrap();
        pass.live(INDEX, file.as_fd(), None, false).unwrap();
        assert_eq!(state(&pass), WRITABLE);
    }

    /// A process of the guest has the file mapped, and punches a hole.
    #[test]
    fn a_file_in_memory_is_filled_when_the_guest_wants_it() {
        let file = full_file("/dev/shm");
        let pass = passing(&file);
        pass.punching(NODE, 4096, || punch(&file, 4096));
        assert_eq!(pass.live(INDEX, file.as_fd(), None, false), Err(Errno::OPNOTSUPP));
        let filled = pass.fill(INDEX, file.as_fd()).unwrap();
        pass.live(INDEX, file.as_fd(), Some(filled), false).unwrap();
        assert_eq!(state(&pass), WRITABLE);
        assert_eq!(look(&file).unwrap().1 * 512, SIZE);
        // It does not count if there is another hole by then, or the file is longer.
        let filled = pass.fill(INDEX, file.as_fd()).unwrap();
        pass.punching(NODE, 4096, || punch(&file, 4096));
        assert_eq!(pass.live(INDEX, file.as_fd(), Some(filled), false), Err(Errno::OPNOTSUPP));
        let filled = pass.fill(INDEX, file.as_fd()).unwrap();
        file.set_len(2 * SIZE).unwrap();
        assert_eq!(pass.live(INDEX, file.as_fd(), Some(filled), false), Err(Errno::OPNOTSUPP));
    }

    #[test]
    fn a_hole_is_not_forgotten_by_who_filled_it_before() {
        for dir in directories() {
            let file = full_file(dir);
            file.set_len(2 * SIZE).unwrap();
            fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 2 * SIZE).unwrap();
            let pass = passing(&file);
            read_only(&pass, 2 * SIZE, SIZE);
            // Blocks are allocated, a hole is punched, and only then the first is noted.
            let since = pass.allocating(NODE).unwrap();
            fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 2 * SIZE).unwrap();
            pass.punching(NODE, 4096, || punch(&file, 4096));
            pass.allocated(&since, file.as_fd(), 0, 2 * SIZE);
            assert_eq!(state(&pass), READ_ONLY, "{dir}");

            // The same with a write.
            let file = full_file(dir);
            let pass = passing(&file);
            read_only(&pass, SIZE, 0);
            file.write_all_at(&vec![b'w'; SIZE as usize], 0).unwrap();
            pass.punching(NODE, 4096, || punch(&file, 4096));
            pass.wrote(NODE, file.as_fd(), Some(0), SIZE);
            assert_eq!(state(&pass), READ_ONLY, "{dir}");
            // Without a hole, both count.
            pass.wrote(NODE, file.as_fd(), Some(0), SIZE);
            file.write_all_at(&vec![b'w'; SIZE as usize], 0).unwrap();
            pass.wrote(NODE, file.as_fd(), Some(0), SIZE);
            assert_eq!(state(&pass), WRITABLE);
        }
    }
}
