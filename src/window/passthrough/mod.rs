//! Window passthrough (docs/protocol.md): whole files in region 1, and a table that says where they are in region 2.
//!
//! The life of an entry is in `entry`; `entries` has all of them, behind one lock. [`Passthrough`] is what the file
//! system calls. The mapper ([`Slots`]) does what needs messages to the frontend. What may wait for a file is in `look`
//! and in `slots/fill`.

mod allocator;
mod core;
mod entries;
pub(super) mod entry;
mod look;
mod moved;
mod mtime;
mod slots;
pub(super) mod table;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::time::Duration;

use rustix::fs::fstat;
use rustix::io::Errno;

use super::frontend::Source;
use super::jobs::{EntryJob, SlotJob};
use super::reservation::Stores;
use super::turn::MayWait;
use crate::fuse::ops::{Answer, Result};
pub use core::Core;
use entries::Opened;
use entry::Entry;
pub use entry::{EntryState, Record};
pub use look::Holes;
pub use moved::{Moved, MovedEntry, OpenFile, Resumed};
#[cfg(any(fuzzing, test))]
pub use mtime::Touch;
pub use mtime::touch;
pub use slots::Slots;
pub use table::LEN as TABLE_LEN;
use table::LEN;

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

impl Settings {
    /// Bytes of region 1.
    const fn slots_size(&self) -> u64 {
        self.size - LEN
    }
}

/// How long the guest may take to let go if a host process waits, from when the daemon hears of it: the guard lets that
/// process go on after [`DEADLINE`](super::proxy::DEADLINE). The rest is for a job that the mapper is about
/// ([`at_once`](super::Stores::at_once)) and for an answer of the frontend, a quarter of a second each.
pub const PATIENCE: Duration = Duration::from_millis(if cfg!(fuzzing) { 0 } else { 1500 });

/// How long the mapper may take to end the last session, before it goes on with another daemon's. It waits for the
/// frontend then, which may not answer while it waits for the session.
const RESUMED_WITHIN: Duration = Duration::from_secs(10);

/// After so many messages a file that has lost its slot gets another if one is idle. A mapping takes as long as some
/// ten messages.
const MISSED: u32 = 16;

/// The smallest window: a table and one range for slots.
pub const MIN_SIZE: u64 = 2 * LEN;

/// The file system's side of window passthrough: which nodes are open, and what is done to their files.
pub struct Passthrough(Arc<Core>);

/// Threads that serve requests hold no state of the mapper.
const WAIT: MayWait = MayWait::without_a_turn();

impl Passthrough {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self(core)
    }

    /// Bytes of region 1.
    pub fn size(&self) -> u64 {
        self.0.settings.slots_size()
    }

    /// Whether the guest has the table.
    pub fn is_on(&self) -> bool {
        self.0.is_on()
    }

    /// Begins a session with the guest. Answers when the table is in the guest's memory, or with an error.
    pub fn start(&self, answer: Answer) {
        let session = self.0.entries().session;
        self.0.jobs.send(SlotJob::Start { session, answer });
    }

    /// Forgets everything. The mapper's reset must follow.
    pub(super) fn reset(&self) {
        self.0.end();
    }

    /// The guest is about to move to another daemon: it is to let go of all slots, and gets none. Or it stays after
    /// all.
    pub(super) fn set_leaving(&self, leaving: bool) {
        if self.0.set_leaving(leaving) && leaving {
            self.0.jobs.send(SlotJob::Leave);
        }
    }

    /// What another daemon must know of this session.
    ///
    /// # Errors
    /// How many files the guest has not let go of yet.
    pub fn moved(&self) -> std::result::Result<Moved, usize> {
        let entries = self.0.entries();
        entries.used().for_each(|(index, _)| entries.note_stores(index, &self.0.times));
        let moved = entries.moved();
        drop(entries);
        // The target does not know who owes a time.
        self.0.times.settle_all();
        moved
    }

    /// Goes on with the session of another daemon. `files`: all that the guest has open. Another thread gives the guest
    /// the table, once the device runs: QEMU takes no mapping before.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn resume(&self, moved: &Moved, files: Vec<OpenFile>) -> Resumed {
        let (send, resumed) = mpsc::channel();
        let (core, moved) = (self.0.clone(), moved.clone());
        let resume = move || send.send(core.resume(&moved, files)).unwrap_or_default();
        self.0.jobs.send(SlotJob::Resume(Box::new(resume)));
        resumed.recv_timeout(RESUMED_WITHIN).unwrap_or(Err("the last session's files are still mapped"))
    }

    /// The entries that the guest knows, by index.
    pub(super) fn known(&self) -> Vec<(u32, Record)> {
        self.0.entries().table.known()
    }

    /// Revocations in all sessions.
    pub(super) fn revocations(&self) -> u64 {
        self.0.entries().table.revocations()
    }

    /// Whether a node has opens, of any kind.
    pub fn is_open(&self, node: u64) -> bool {
        self.0.entries().is_open(node)
    }

    /// Counts an open of a node. Returns the index of its entry if it has passthrough; pending while the mapper decides
    /// that: [`decided`](Self::decided) tells. `source`: the file, if it is worth passing through, for the first open.
    pub fn open(&self, node: u64, file: BorrowedFd, source: Option<Arc<dyn Source>>) -> Poll<Option<u32>> {
        let source = source.filter(|_| !self.0.is_leaving());
        let mut entries = self.0.entries();
        match entries.open(node, source) {
            Opened::Decided(index) => Poll::Ready(index),
            Opened::Waits => Poll::Pending,
            Opened::Unwanted(index) => {
                // Under the lock, so that it comes before the end of its session.
                self.0.send(EntryJob::Drop, index);
                Poll::Ready(None)
            }
            Opened::Kept { index, life } => {
                drop(entries);
                Poll::Ready(self.revive(index, life, file))
            }
            Opened::First { index, life } => {
                // As above.
                if self.0.jobs.offer(SlotJob::Open { index, life }).is_ok() {
                    return Poll::Pending;
                }
                let _ = entries.decide(index, life, false);
                let entry = entries.remove(index);
                drop((entries, entry));
                Poll::Ready(None)
            }
        }
    }

    /// Answers with the index of an open node's entry, if it has passthrough, once the mapper has decided that.
    pub fn decided(&self, node: u64, answer: Answer<Option<u32>>) {
        let mut entries = self.0.entries();
        let index = match entries.waiting(node) {
            Ok(waiting) => return waiting.push(answer),
            Err(index) => index,
        };
        drop(entries);
        answer(Ok(index));
    }

    /// Makes a kept entry live again, for the first open of its node. If that fails, the open has no passthrough: the
    /// slot has just been taken away, or the guest might not store to it.
    fn revive(&self, index: u32, life: u64, file: BorrowedFd) -> Option<u32> {
        let live = self.0.live(index, file, None, true, &WAIT);
        let passes = self.0.decide(index, life, live.is_ok());
        if !passes {
            let entries = self.0.entries();
            if entries.get(index).is_some_and(|entry| entry.life() == life) {
                self.0.send(EntryJob::Drop, index);
            }
        }
        passes.then_some(index)
    }

    /// Whether a node's file must not come to share blocks with another.
    pub(super) fn keeps_blocks(&self, node: u64) -> bool {
        let real = |entry: &Entry| entry.held().filter(|_| entry.state().is_mapped()).map(|held| held.real.clone());
        let real = self.0.index(node).and_then(|index| self.0.get(index, real)?);
        real.is_some_and(|real| Stores::of(real.get(&WAIT).as_fd()) == Ok(Stores::Unshared))
    }

    /// The guest reads or writes an open node's file by a message. If it has no slot, it may get one again.
    pub fn missed(&self, node: u64) {
        let Some(index) = self.0.index(node) else { return };
        let wants = self.0.update(index, |entry| {
            entry.missed += u32::from(entry.state() == EntryState::Revoked);
            let wants = entry.missed >= MISSED;
            entry.missed %= MISSED;
            wants
        });
        if wants == Some(true) {
            self.0.send(EntryJob::Want, index);
        }
    }

    /// Counts a release of a node. After the last one, its slot is kept.
    pub fn release(&self, node: u64) {
        let mut entries = self.0.entries();
        // The job is sent under the lock, so that it comes before the end of its session.
        entries.release(node).into_iter().for_each(|index| self.0.send(EntryJob::Drop, index));
    }

    /// The guest has forgotten a node.
    pub fn forget(&self, node: u64) {
        let mut entries = self.0.entries();
        let Some(index) = entries.index(node) else { return };
        if entries.give_up(index) {
            self.0.send(EntryJob::Drop, index);
        }
    }

    /// Asks for a live entry of an open node that covers `len` bytes from `from` on.
    pub fn ask(&self, node: u64, from: u64, len: u64, writable: bool, answer: Answer) {
        let entries = self.0.entries();
        let index = entries.index(node).filter(|_| entries.is_open(node));
        drop(entries);
        match index {
            Some(index) => self.0.jobs.send(SlotJob::Ask { node, index, from, len, writable, answer }),
            None => answer(Err(Errno::BADF)),
        }
    }

    /// Whether a node has an entry of the table.
    pub(super) fn has_entry(&self, node: u64) -> bool {
        self.0.index(node).is_some()
    }

    /// Whether a node's file has yet to get the time of what the guest has stored in place. Never waits.
    pub fn owes_times(&self, node: u64) -> bool {
        self.0.index(node).into_iter().for_each(|index| self.0.note_stores(index));
        self.0.times.owes(node)
    }

    /// Gives a node's file the present time if it [owes](Self::owes_times) one. Call this before a request of the guest
    /// reads or changes the file's attributes or data. Waits for the file system.
    pub fn settle_times(&self, node: u64) {
        if self.owes_times(node) {
            self.0.times.settle(node);
        }
    }

    /// `len` bytes of a node's file were written at `at`, or at its end. Call this before the request is answered.
    pub fn wrote(&self, node: u64, file: BorrowedFd, at: Option<u64>, len: u64) {
        let Some(look) = self.0.look_at(node, &WAIT) else { return };
        let Ok(st) = fstat(file) else { return };
        let size = st.st_size as u64;
        let at = at.unwrap_or(size.saturating_sub(len));
        let hole = look.update(|entry| {
            entry.skips_to(at);
            entry.hole
        });
        // Search from the hole on, since others may have punched holes into what was written.
        let covered = hole.ok().filter(|hole| (at..at.saturating_add(len)).contains(hole));
        let next = covered.map(|hole| self.0.hole(file, hole, size, &WAIT).unwrap_or(hole));
        look.note(&st, next);
    }

    /// To be called before blocks are allocated, which look like holes until they are written. The result is for
    /// [`allocated`](Self::allocated).
    pub fn allocating(&self, node: u64) -> Option<Holes> {
        let index = self.0.index(node)?;
        self.0.get(index, |entry| Holes::of(index, entry))
    }

    /// `len` bytes of a node's file from `at` on now have blocks, unless somebody has punched a hole since `since`.
    pub fn allocated(&self, since: &Holes, file: BorrowedFd, at: u64, len: u64) {
        self.0.allocated(since, file, at, len, &WAIT);
    }

    /// Runs `punch`, which punches a hole into a node's file.
    pub fn punching<R>(&self, node: u64, at: u64, punch: impl FnOnce() -> R) -> R {
        let Some(index) = self.0.index(node) else { return punch() };
        let skip = |entry: &mut Entry| {
            entry.skipped(at);
            // The blocks that it takes must not look like a change by others.
            entry.blocks = 0;
            entry.settle()
        };
        let skip = || self.0.look_at(node, &WAIT).and_then(|look| look.update(skip).ok()?);
        let before = skip();
        let done = punch();
        // A thread that looked or allocated in between has not seen the hole.
        let after = skip();
        before.into_iter().chain(after).for_each(|job| self.0.send(job, index));
        done
    }

    /// A thread has found the file to have this size in bytes and `blocks` blocks. `look` looks again.
    pub fn saw(&self, node: u64, found: u64, blocks: u64, look: impl FnOnce() -> Result<(u64, u64)>) {
        let Some(index) = self.0.index(node) else { return };
        // While this guest truncates the file, the size is not final.
        let resized = |entry: &Entry| found != entry.record().size && entry.limits.is_empty();
        let differs = |entry: &Entry| entry.state().is_mapped() && (resized(entry) || blocks < entry.blocks);
        if self.0.get(index, differs) != Some(true) {
            return;
        }
        let Some(held) = self.0.look_at(node, &WAIT) else { return };
        let known = |entry: &mut Entry| {
            let real = entry.held().map(|held| held.real.clone());
            differs(entry).then(|| (real, entry.record().size, resized(entry)))
        };
        let Ok(Some((real, old, is_resized))) = held.update(known) else { return };
        let Ok((size, blocks)) = look() else { return };
        let found = self.0.beyond(real.as_ref().map(|real| real.get(&WAIT).as_fd()), old, size, &WAIT);
        held.settle(|entry| {
            if blocks < entry.blocks {
                // Others have taken some. The daemon finds out which when the guest has let go.
                entry.skipped(0);
                entry.blocks = blocks;
            }
            if is_resized {
                entry.resized(size, found);
            }
        });
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
        let limit = |entry: &mut Entry| {
            entry.limits.push(to);
            let old = entry.record().size;
            entry.resize(old);
            old
        };
        let limited = self.0.look_at(node, &WAIT).and_then(|look| Some((look.entry(), look.update(limit).ok()?)));
        let done = run();
        // Meanwhile an open may have taken over the old size. The node may have another entry by now, without limits.
        let Some(look) = self.0.look_at(node, &WAIT) else { return done };
        let size = size();
        let old = limited.filter(|(entry, _)| *entry == look.entry()).map(|(_, old)| old);
        look.settle(|entry| {
            let limit = entry.limits.iter().position(|limit| old.is_some() && *limit == to);
            limit.map(|at| entry.limits.swap_remove(at));
            entry.skips_to(to);
            // The blocks that a cut takes must not look like a change by others.
            entry.blocks = 0;
            match size {
                Ok(size) => entry.resize(size),
                // Both failed, so the size is what it was.
                Err(_) if done.is_err() => old.into_iter().for_each(|old| entry.resize(old)),
                Err(_) => {}
            }
            entry.forget_past_end();
        });
        done
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;
    use std::time::Instant;

    use rustix::fs::{FallocateFlags, fallocate};

    use super::entry::Held;
    use super::entry::tests::NoFile;
    use super::*;
    use crate::limits::{TABLE_ENTRIES, WINDOW_JOBS};
    use crate::window::RANGE;
    use crate::window::turn::Slow;

    const NODE: u64 = 7;
    /// The first one that a node gets.
    const INDEX: u32 = TABLE_ENTRIES - 1;
    const SIZE: u64 = 1 << 20;

    /// A guest that has a file open by a slot.
    fn passing(file: &File) -> Passthrough {
        let settings = Settings { size: 4 * RANGE, slots: 1, writable: Writable::InPlace, patience: PATIENCE };
        let pass = Passthrough::new(Arc::new(Core::new(settings, Arc::default(), Box::new(touch)).unwrap()));
        pass.0.started(0);
        give(&pass, NODE, file);
        pass
    }

    /// The node gets the next entry and a slot.
    fn give(pass: &Passthrough, node: u64, file: &File) {
        let Opened::First { index, life } = pass.0.entries().open(node, Some(Arc::new(NoFile))) else { unreachable!() };
        assert_eq!(index, INDEX);
        let file = Arc::new(file.try_clone().unwrap().into());
        let (real, proxy) = (Slow::new(Arc::clone(&file)), file);
        let held = Held { at: 0, pieces: vec![RANGE], id: 1, since: Instant::now(), idle: None, real, proxy };
        pass.0.update(INDEX, |entry| entry.hold(held));
        let _ = live(pass, None);
        assert!(pass.0.decide(index, life, true));
    }

    /// The file in the slot is looked at, and the entry is live if it can be.
    fn live(pass: &Passthrough, filled: Option<entry::Filled>) -> Result<()> {
        let real = pass.0.get(INDEX, |entry| entry.held().unwrap().real.clone()).unwrap();
        pass.0.live(INDEX, real.get(&WAIT).as_fd(), filled, false, &WAIT)
    }

    fn fill(pass: &Passthrough, file: &File) -> entry::Filled {
        pass.0.fill(INDEX, file.as_fd(), &WAIT).unwrap()
    }

    /// The entry is free, as after its last release.
    fn take_away(pass: &Passthrough) {
        let mut entries = pass.0.entries();
        entries.release(NODE);
        entries.give_up(INDEX);
        entries.remove(INDEX);
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
        pass.0.get(INDEX, Entry::state).unwrap()
    }

    fn size(pass: &Passthrough) -> u64 {
        pass.0.get(INDEX, |entry| entry.record().size).unwrap()
    }

    fn free(pass: &Passthrough) -> usize {
        pass.0.entries().free()
    }

    /// Makes the entry live, with this size and first hole.
    fn read_only(pass: &Passthrough, size: u64, hole: u64) {
        pass.0.update(INDEX, |entry| {
            entry.close();
            entry.map().unwrap();
            entry.resize(size);
            entry.hole = hole;
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
        let before = free(&pass);
        for node in NODE + 1..NODE + 9 {
            assert!(pass.open(node, file.as_fd(), None) == Poll::Ready(None));
            pass.release(node);
        }
        assert_eq!(free(&pass), before);
    }

    #[test]
    fn files_without_an_entry_are_served_by_messages() {
        let file = full_file("/dev/shm");
        let pass = Arc::new(passing(&file));
        pass.0.entries().keep_free(1);
        let open = |node| pass.open(node, file.as_fd(), Some(Arc::new(NoFile)));
        assert!(open(NODE + 1) == Poll::Pending && open(NODE + 2) == Poll::Ready(None));
    }

    #[test]
    fn an_open_is_by_messages_if_the_mapper_has_too_much_to_do() {
        let file = full_file("/dev/shm");
        let pass = Arc::new(passing(&file));
        let before = free(&pass);
        (0..WINDOW_JOBS).for_each(|_| pass.ask(NODE, 0, 1, false, Box::new(|_| ())));
        let opened = || pass.open(NODE + 1, file.as_fd(), Some(Arc::new(NoFile)));
        assert!(opened() == Poll::Ready(None) && opened() == Poll::Ready(None));
        assert_eq!(free(&pass), before);
    }

    #[test]
    fn a_truncation_meets_an_open() {
        let file = full_file("/dev/shm");
        let pass = passing(&file);
        take_away(&pass);
        let cut = || {
            // It sees the old size.
            give(&pass, NODE, &file);
            assert_eq!(size(&pass), SIZE);
            set_len(&file, 10)
        };
        pass.truncate(NODE, 10, cut, || Ok(look(&file)?.0)).unwrap();
        assert_eq!(size(&pass), 10);
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
        assert_eq!(size(&pass), SIZE);
        // Nor does its limit stay.
        pass.truncate(NODE + 1, 2 * SIZE, || set_len(&other, 2 * SIZE), || Ok(look(&other)?.0)).unwrap();
        assert_eq!(size(&pass), 2 * SIZE);
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
            pass.0.changed(INDEX, file.as_fd(), &WAIT);
            assert_eq!(state(&pass), WRITABLE);
            punch(&file, 4096);
            // As many blocks as before.
            fallocate(&file, FallocateFlags::KEEP_SIZE, SIZE, 4096).unwrap();
            pass.0.changed(INDEX, file.as_fd(), &WAIT);
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
        assert_eq!(live(&pass, None), Err(Errno::OPNOTSUPP));
        file.write_all_at(&vec![b'r'; SIZE as usize], 0).unwrap();
        live(&pass, None).unwrap();
        assert_eq!(state(&pass), WRITABLE);
    }

    /// A process of the guest has the file mapped, and punches a hole.
    #[test]
    fn a_file_in_memory_is_filled_when_the_guest_wants_it() {
        let file = full_file("/dev/shm");
        let pass = passing(&file);
        pass.punching(NODE, 4096, || punch(&file, 4096));
        assert_eq!(live(&pass, None), Err(Errno::OPNOTSUPP));
        let filled = fill(&pass, &file);
        live(&pass, Some(filled)).unwrap();
        assert_eq!(state(&pass), WRITABLE);
        assert_eq!(look(&file).unwrap().1 * 512, SIZE);
        // It does not count if there is another hole by then, or the file is longer.
        let filled = fill(&pass, &file);
        pass.punching(NODE, 4096, || punch(&file, 4096));
        assert_eq!(live(&pass, Some(filled)), Err(Errno::OPNOTSUPP));
        let filled = fill(&pass, &file);
        file.set_len(2 * SIZE).unwrap();
        assert_eq!(live(&pass, Some(filled)), Err(Errno::OPNOTSUPP));
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
