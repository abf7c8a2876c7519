//! What a worker process leaves to the next one (`--supervise`): nodeids, open files, locks, and requests under way.
//!
//! It is memory that all worker processes share. A worker writes to it as it goes, so that it can be killed at any
//! instruction: each step is one store, and the steps are in an order in which the next worker can go on from each of
//! them. It names descriptors by number, since all workers share one table of descriptors (CLONE_FILES of clone(2)),
//! which lives on when one of them dies. With the descriptors live the locks, the positions in directories, and files
//! that have no name left.
//!
//! A *cell* is 32 bytes: a nodeid with its place, an open file, a lock's owner, a range of the DAX window, a number of
//! a file, or a part of a longer place. Rule: a cell that names a descriptor is freed before the descriptor is closed,
//! since another file may get the number.
//!
//! Without `--supervise` there is no record, and each of its functions does nothing.

mod ring;
mod words;

use std::cell::Cell as ThreadCell;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

pub use ring::{LeftAs, Leftovers, RingRecord};
use words::Words;
pub use words::{clone, copy_to, is_open, left_behind};

use crate::limits::CHAINS;

/// What the words mean. Another number: a program of before cannot go on with it, nor one of after. To be raised with
/// every change of what is written here and in `ring`.
pub const VERSION: u32 = 2;

/// Words of the header: what INIT settled, the guest's minor version, the nodeid that comes next, cells ever used, the
/// highest generation of an `fh`, the highest number of a proxy file.
const SESSION: usize = 0;
const MINOR: usize = 1;
const NEXT_ID: usize = 2;
const USED: usize = 3;
const GENERATION: usize = 4;
const PROXY: usize = 5;
/// For tests.
const STEP: usize = 6;
const RINGS_AT: usize = 8;

/// The most rings of a device: the high priority queue and 63 request queues.
pub const RINGS: usize = 64;
const RING_HEADER: usize = 8;
const RING_WORDS: usize = RING_HEADER + CHAINS as usize * ring::CHAIN_WORDS;

const CELLS_AT: usize = RINGS_AT + RINGS * RING_WORDS;
const CELL_WORDS: usize = 4;
/// Cells: 2 GiB of addresses, of which only what is used takes memory. A file that the guest knows takes one or two;
/// what finds no cell is stale after a crash.
const CELLS: u32 = 1 << 26;
const WORDS: usize = CELLS_AT + CELLS as usize * CELL_WORDS;

/// Bytes of a place in one cell.
const PART: usize = 24;
/// Bytes of the longest place: a directory's nodeid and a name, or the numbers and the bytes of a file handle.
const LONGEST: usize = 8 + 255;

/// What a cell is: the lowest byte of its first word.
const FREE: u64 = 0;
const INODE: u64 = 1;
const HANDLE: u64 = 2;
const LOCK: u64 = 3;
const PIECE: u64 = 4;
const MAPPING: u64 = 5;
const ROOM: u64 = 6;
const TOLD: u64 = 7;

/// How far a mapping is: the second byte of its first word.
const STANDING: u64 = 0xff << 8;
/// Bits of a mapping's third word, which is a multiple of 2 MiB.
const STORED: u64 = 1;
const WRITABLE: u64 = 2;

/// How an inode's file is found: the second byte.
const BY_FD: u64 = 1;
const BY_HANDLE: u64 = 2;
const BY_NAME: u64 = 3;
const LOST: u64 = 4;
const REMOVED: u64 = 5;

/// The type of an inode's file, S_IFMT bits >> 12: the third byte.
const FORMAT: u64 = 0xff << 16;

/// Bits of a reference count. The rest of its word is the tag of the FORGET that changed it last.
const COUNT_BITS: u32 = 40;
const MOST_REFERENCES: u64 = (1 << COUNT_BITS) - 1;

static RECORD: OnceLock<&Record> = OnceLock::new();

thread_local! {
    static CLAIM: ThreadCell<Claim> = const { ThreadCell::new(Claim { id: 0, again: None }) };
}

/// What one request is to know of worker processes before this one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Names the request until it is answered. 0: nothing does.
    id: u64,
    /// An earlier process may have done it, or a part of it. Nothing of that is older than this, in ns.
    pub again: Option<u64>,
}

/// The request that this thread serves.
pub fn claim() -> Claim {
    CLAIM.get()
}

/// This thread serves a request.
pub fn begin(claim: Claim) {
    CLAIM.set(claim);
}

/// Notes something before the request of this thread does what cannot be done twice. Returns what an earlier worker
/// process noted before it began with the same.
pub fn note(value: impl FnOnce() -> u64) -> Option<u64> {
    let (record, id) = (get()?, claim().id);
    if id == 0 { None } else { RingRecord::note(record, id, value) }
}

/// For tests: a worker of a debug build ends where it comes to a step for the nth time, counted over all workers, if
/// the environment variable THRUWAY_TEST_KILL is "step n".
pub fn step(name: &str) {
    if !cfg!(debug_assertions) {
        return;
    }
    let wanted = std::env::var("THRUWAY_TEST_KILL").unwrap_or_default();
    let Some(nth) = wanted.strip_prefix(name).and_then(|rest| rest.trim_start().parse::<u64>().ok()) else { return };
    if get().is_some_and(|record| record.words.at(STEP).fetch_add(1, Ordering::AcqRel) + 1 == nth) {
        std::process::abort();
    }
}

/// The process's record, of which there is one, as it has one session.
pub fn get() -> Option<&'static Record> {
    RECORD.get().copied()
}

/// A session's record.
pub struct Record {
    words: Words,
    free: Mutex<Free>,
}

/// Cells that this process may use.
#[derive(Default)]
struct Free {
    cells: Vec<u32>,
    /// Cells ever used. Those above are free.
    used: u32,
}

/// The cell of a file, an open file or a lock. Empty if nothing is recorded.
#[derive(Debug, Default)]
pub struct Cell(AtomicU32);

/// How an inode's file is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place<'a> {
    /// By descriptor.
    Fd(RawFd),
    /// By file handle, on the mount that a descriptor is open on.
    Handle {
        /// That descriptor.
        mount: RawFd,
        /// The type of the handle.
        kind: i32,
        /// The bytes of the handle.
        data: &'a [u8],
    },
    /// By a name in a directory.
    Name {
        /// The directory's nodeid.
        parent: u64,
        /// The name.
        name: &'a CStr,
    },
    /// A migration lost it.
    Lost,
    /// It was removed, and nobody has it open.
    Removed,
}

/// A [`Place`] that was read.
#[derive(Debug, PartialEq, Eq)]
pub enum FoundPlace {
    /// As [`Place::Fd`].
    Fd(RawFd),
    /// As [`Place::Handle`].
    Handle {
        /// The descriptor of its mount.
        mount: RawFd,
        /// The type of the handle.
        kind: i32,
        /// The bytes of the handle.
        data: Box<[u8]>,
    },
    /// As [`Place::Name`].
    Name {
        /// The directory's nodeid.
        parent: u64,
        /// The name.
        name: CString,
    },
    /// As [`Place::Lost`].
    Lost,
    /// As [`Place::Removed`].
    Removed,
}

/// A file that the guest knew.
#[derive(Debug)]
pub struct FoundInode {
    /// Its cell.
    pub cell: Cell,
    /// The nodeid.
    pub id: u64,
    /// References that the guest holds.
    pub nlookup: u64,
    /// The nodeid of the directory that it was found in last, or 0.
    pub parent: u64,
    /// Its type, S_IFMT bits.
    pub format: u32,
    /// Where it is.
    pub place: FoundPlace,
}

/// What the guest had open.
#[derive(Debug)]
pub struct FoundHandle {
    /// Its cell.
    pub cell: Cell,
    /// Its number.
    pub fh: u64,
    /// The nodeid that it was opened by.
    pub node: u64,
    /// The open file.
    pub fd: RawFd,
}

/// An owner of POSIX locks.
#[derive(Debug)]
pub struct FoundLock {
    /// Its cell.
    pub cell: Cell,
    /// The owner.
    pub owner: u64,
    /// The nodeid of the file.
    pub node: u64,
    /// The open file description that has the locks.
    pub fd: RawFd,
    /// The number of the open file through which it asked for the first lock.
    pub fh: u64,
}

/// How far a mapping of the DAX window is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The frontend has it.
    There = 0,
    /// The guest relies on it, and the frontend may have it, or what was there before, or nothing.
    Changing = 1,
    /// The guest does not rely on it yet, or not any more. The frontend may have it.
    Loose = 2,
}

/// A range of the DAX window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Which one.
    pub number: u32,
    /// Its file's nodeid.
    pub node: u64,
    /// Where in the file it begins, a multiple of 2 MiB.
    pub from: u64,
    /// The number of its proxy file.
    pub proxy: u64,
    /// That proxy file can be written to.
    pub writable: bool,
    /// The guest may store there.
    pub stored: bool,
}

impl Range {
    const fn third(&self) -> u64 {
        self.from | if self.stored { STORED } else { 0 } | if self.writable { WRITABLE } else { 0 }
    }
}

/// A mapping that the guest had.
#[derive(Debug)]
pub struct FoundMapping {
    /// Its cell.
    pub cell: Cell,
    /// What is mapped where.
    pub range: Range,
    /// How far it is.
    pub standing: Standing,
}

/// A number that belongs to a file.
#[derive(Debug)]
pub struct FoundNumber {
    /// Its cell.
    pub cell: Cell,
    /// The nodeid.
    pub node: u64,
    /// The number.
    pub value: u64,
}

/// What the guest was told of a file.
#[derive(Debug)]
pub struct FoundSize {
    /// Its cell.
    pub cell: Cell,
    /// The nodeid.
    pub node: u64,
    /// The size.
    pub size: u64,
    /// What the guest stored in place could not be written, for this reason (errno), and the guest was not told. Or 0.
    pub failure: i32,
}

/// A session that another process has left.
#[derive(Debug, Default)]
pub struct Found {
    /// Files, by nodeid.
    pub inodes: Vec<FoundInode>,
    /// Open files.
    pub handles: Vec<FoundHandle>,
    /// Owners of locks.
    pub locks: Vec<FoundLock>,
    /// Nodeids from here on were never given out.
    pub next_id: u64,
    /// Above this, no generation of an `fh` was given out. A RELEASE that is served again must not find another file.
    pub generation: u32,
    /// Ranges of the DAX window.
    pub mappings: Vec<FoundMapping>,
    /// Up to where the ranges of a file have blocks that the guest may store to.
    pub rooms: Vec<FoundNumber>,
    /// The sizes that the guest was told last.
    pub sizes: Vec<FoundSize>,
    /// Above this, no number of a proxy file was given out.
    pub proxy: u64,
}

impl Record {
    /// An empty record. It is the same memory in processes that are made by fork(2).
    ///
    /// # Errors
    /// Those of memfd_create(2) and mmap(2).
    pub fn new() -> io::Result<Self> {
        Ok(Self { words: Words::new(WORDS)?, free: Mutex::default() })
    }

    /// The record of another program. `memory`: its [`file`](Self::file), or anything.
    ///
    /// # Errors
    /// InvalidData if it is no record. Those of mmap(2).
    pub fn open(memory: OwnedFd) -> io::Result<Self> {
        Ok(Self { words: Words::open(memory, WORDS)?, free: Mutex::default() })
    }

    /// Has its memory's descriptor be another one.
    ///
    /// # Errors
    /// Those of `change`.
    pub fn with_file(self, change: impl FnOnce(OwnedFd) -> io::Result<OwnedFd>) -> io::Result<Self> {
        Ok(Self { words: self.words.with_file(change)?, ..self })
    }

    /// The memory, for another program.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.words.file()
    }

    /// Makes this the process's record. To be called once, in a worker process.
    pub fn install(&'static self) {
        // rustix looks for the kernel's clock the first time, by a system call that seccomp does not allow.
        RingRecord::now();
        let _ = RECORD.set(self);
    }

    fn word(&self, cell: u32, word: usize) -> u64 {
        self.words.at(CELLS_AT + cell as usize * CELL_WORDS + word).load(Ordering::Acquire)
    }

    fn set_word(&self, cell: u32, word: usize, value: u64) {
        self.words.at(CELLS_AT + cell as usize * CELL_WORDS + word).store(value, Ordering::Release);
    }

    /// What INIT settled and the guest's minor version, if there is a session.
    pub fn session(&self) -> Option<(u64, u32)> {
        let session = self.words.at(SESSION).load(Ordering::Acquire);
        (session != 0).then(|| (session, self.words.at(MINOR).load(Ordering::Relaxed) as u32))
    }

    /// Notes the session. 0: there is none.
    pub fn set_session(&self, session: u64, minor: u32) {
        self.words.at(MINOR).store(minor.into(), Ordering::Relaxed);
        self.words.at(SESSION).store(session, Ordering::Release);
    }

    /// A free cell. Cell 0 is never used.
    fn take(&self) -> Option<u32> {
        let mut free = self.free.lock();
        if let Some(cell) = free.cells.pop() {
            return Some(cell);
        }
        let next = free.used.checked_add(1).filter(|next| *next < CELLS)?;
        free.used = next;
        self.words.at(USED).store(next.into(), Ordering::Release);
        Some(next)
    }

    /// Takes a cell. `first` makes it what it is, after the rest.
    fn add(&self, first: u64, rest: [u64; 3]) -> Cell {
        let Some(cell) = self.take() else { return Cell::default() };
        for (at, value) in rest.into_iter().enumerate() {
            self.set_word(cell, 1 + at, value);
        }
        self.set_word(cell, 0, first);
        Cell(AtomicU32::new(cell))
    }

    fn free(&self, cell: u32) {
        self.set_word(cell, 0, FREE);
        self.free.lock().cells.push(cell);
    }

    /// Frees the pieces of a place.
    fn free_pieces(&self, place: u64) {
        if matches!(place >> 8 & 0xff, BY_HANDLE | BY_NAME) {
            let mut next = (place >> 32) as u32;
            while next != 0 {
                let first = self.word(next, 0);
                self.free(next);
                next = if first & 0xff == PIECE { (first >> 32) as u32 } else { 0 };
            }
        }
    }

    /// The word of a place, whose pieces are written. Without room it is lost.
    fn place(&self, place: &Place) -> u64 {
        let mut bytes = [0; LONGEST];
        let (by, len) = match place {
            Place::Fd(fd) => return BY_FD << 8 | u64::from(*fd as u32) << 32,
            Place::Lost => return LOST << 8,
            Place::Removed => return REMOVED << 8,
            Place::Handle { mount, kind, data } => {
                bytes[..4].copy_from_slice(&mount.to_ne_bytes());
                bytes[4..8].copy_from_slice(&kind.to_ne_bytes());
                (BY_HANDLE, put(&mut bytes, data))
            }
            Place::Name { parent, name } => {
                bytes[..8].copy_from_slice(&parent.to_ne_bytes());
                (BY_NAME, put(&mut bytes, name.to_bytes()))
            }
        };
        let Some(len) = len else { return LOST << 8 };
        // From the end: each piece names the next one.
        let mut next = 0;
        for piece in bytes[..len].chunks(PART).rev() {
            let mut part = [0; PART];
            part[..piece.len()].copy_from_slice(piece);
            let word = |at: usize| u64::from_ne_bytes(part[at * 8..][..8].try_into().unwrap_or_default());
            let first = PIECE | (piece.len() as u64) << 8 | u64::from(next) << 32;
            next = self.add(first, [word(0), word(1), word(2)]).0.into_inner();
            if next == 0 {
                return LOST << 8;
            }
        }
        by << 8 | u64::from(next) << 32
    }

    /// Descriptors that the record names. For a process that has not taken it over.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let mut all = Vec::new();
        for cell in 1..=self.used() {
            let first = self.word(cell, 0);
            match (first & 0xff, first >> 8 & 0xff) {
                (HANDLE | LOCK, _) | (INODE, BY_FD) => all.push((first >> 32) as RawFd),
                (INODE, BY_HANDLE) => {
                    if let Some(FoundPlace::Handle { mount, .. }) = self.read_place(first, |_| ()) {
                        all.push(mount);
                    }
                }
                _ => {}
            }
        }
        all
    }

    fn used(&self) -> u32 {
        (self.words.at(USED).load(Ordering::Acquire) as u32).min(CELLS - 1)
    }

    /// Reads a place. `piece` gets the number of each of its pieces.
    fn read_place(&self, first: u64, mut piece: impl FnMut(u32)) -> Option<FoundPlace> {
        let (by, mut next) = (first >> 8 & 0xff, (first >> 32) as u32);
        match by {
            BY_FD => return Some(FoundPlace::Fd(next as RawFd)),
            LOST => return Some(FoundPlace::Lost),
            REMOVED => return Some(FoundPlace::Removed),
            _ => {}
        }
        let mut bytes = Vec::new();
        while next != 0 && bytes.len() < LONGEST {
            let first = self.word(next, 0);
            if first & 0xff != PIECE {
                return None;
            }
            piece(next);
            let len = (first >> 8 & 0xff) as usize;
            let part: [u64; 3] = std::array::from_fn(|at| self.word(next, 1 + at));
            let part = part.map(u64::to_ne_bytes);
            bytes.extend_from_slice(part.as_flattened().get(..len)?);
            next = (first >> 32) as u32;
        }
        let (numbers, rest) = bytes.split_first_chunk::<8>()?;
        Some(match by {
            BY_HANDLE => FoundPlace::Handle {
                mount: i32::from_ne_bytes(numbers[..4].try_into().ok()?),
                kind: i32::from_ne_bytes(numbers[4..].try_into().ok()?),
                data: rest.into(),
            },
            _ => FoundPlace::Name { parent: u64::from_ne_bytes(*numbers), name: CString::new(rest).ok()? },
        })
    }

    /// Takes over what another process has left. To be called once, before there are requests.
    pub fn take_over(&'static self) -> Found {
        let used = self.used();
        let [next_id, generation] = [NEXT_ID, GENERATION].map(|word| self.words.at(word).load(Ordering::Acquire));
        let proxy = self.words.at(PROXY).load(Ordering::Acquire);
        let mut found = Found { next_id, generation: generation as u32, proxy, ..Found::default() };
        let mut pieces = vec![false; used as usize + 1];
        for cell in 1..=used {
            let [first, a, b, c] = std::array::from_fn(|word| self.word(cell, word));
            let (fd, this) = ((first >> 32) as RawFd, || Cell(AtomicU32::new(cell)));
            match first & 0xff {
                INODE => {
                    let place = self.read_place(first, |piece| pieces[piece as usize % (used as usize + 1)] = true);
                    found.inodes.push(FoundInode {
                        cell: this(),
                        id: a,
                        nlookup: b & MOST_REFERENCES,
                        parent: c,
                        format: ((first & FORMAT) >> 16 << 12) as u32,
                        place: place.unwrap_or(FoundPlace::Lost),
                    });
                }
                // Its request opens it again.
                HANDLE if c != 0 && RingRecord::is_open(self, c) => {
                    self.set_word(cell, 0, FREE);
                    drop(left_behind(fd));
                }
                HANDLE => found.handles.push(FoundHandle { cell: this(), fh: a, node: b, fd }),
                LOCK => found.locks.push(FoundLock { cell: this(), owner: a, node: b, fh: c, fd }),
                MAPPING => {
                    let (stored, writable) = (b & STORED != 0, b & WRITABLE != 0);
                    let (number, from) = ((first >> 32) as u32, b & !(STORED | WRITABLE));
                    let range = Range { number, node: a, from, proxy: c, writable, stored };
                    let standing = match first & STANDING {
                        standing if standing == (Standing::There as u64) << 8 => Standing::There,
                        standing if standing == (Standing::Changing as u64) << 8 => Standing::Changing,
                        _ => Standing::Loose,
                    };
                    found.mappings.push(FoundMapping { cell: this(), range, standing });
                }
                ROOM => found.rooms.push(FoundNumber { cell: this(), node: a, value: b }),
                TOLD => found.sizes.push(FoundSize { cell: this(), node: a, size: b, failure: c as i32 }),
                _ => {}
            }
        }
        let mut free = self.free.lock();
        free.used = used;
        for cell in (1..=used).rev() {
            let kind = self.word(cell, 0) & 0xff;
            if kind == FREE || kind == PIECE && !pieces[cell as usize] {
                self.set_word(cell, 0, FREE);
                free.cells.push(cell);
            }
        }
        found.inodes.sort_by_key(|inode| inode.id);
        found
    }

    /// Forgets the files that another process has left, and the session. For a process that has not taken it over. The
    /// frontend may still have mappings if there `is` one.
    pub fn wipe(&self, is_frontend: bool) {
        self.set_session(0, 0);
        for cell in 1..=self.used() {
            let first = self.word(cell, 0);
            self.set_word(
                cell,
                0,
                match first & 0xff {
                    MAPPING if is_frontend => first & !STANDING | (Standing::Loose as u64) << 8,
                    _ => FREE,
                },
            );
        }
    }

    /// Notes that a nodeid was given out.
    pub fn gave_id(&self, id: u64) {
        self.words.at(NEXT_ID).fetch_max(id.saturating_add(1), Ordering::AcqRel);
    }

    /// Records a file. `format`: S_IFMT bits.
    pub fn inode(&self, id: u64, nlookup: u64, format: u32, place: &Place) -> Cell {
        let first = INODE | u64::from(format >> 12) << 16 | self.place(place);
        self.add(first, [id, nlookup.min(MOST_REFERENCES), 0])
    }

    /// Records an open file. The upper half of an `fh` is its generation.
    pub fn handle(&self, fh: u64, node: u64, fd: RawFd) -> Cell {
        self.words.at(GENERATION).fetch_max(fh >> 32, Ordering::AcqRel);
        self.add(HANDLE | u64::from(fd as u32) << 32, [fh, node, claim().id])
    }

    /// Notes that a number of a proxy file is given out.
    pub fn gave_proxy(&self, id: u64) {
        self.words.at(PROXY).fetch_max(id, Ordering::AcqRel);
    }

    /// Records a range of the DAX window.
    pub fn range(&self, range: &Range, standing: Standing) -> Cell {
        let first = MAPPING | (standing as u64) << 8 | u64::from(range.number) << 32;
        self.add(first, [range.node, range.third(), range.proxy])
    }

    /// Records up to where a file's ranges have blocks.
    pub fn room(&self, node: u64, end: u64) -> Cell {
        self.add(ROOM, [node, end, 0])
    }

    /// Records the size that the guest was told.
    pub fn told(&self, node: u64, size: u64) -> Cell {
        self.add(TOLD, [node, size, 0])
    }

    /// Records an owner of locks. `fh`: the open file through which it asks.
    pub fn lock(&self, owner: u64, node: u64, fd: RawFd, fh: u64) -> Cell {
        self.add(LOCK | u64::from(fd as u32) << 32, [owner, node, fh])
    }
}

/// Writes behind the first 8 bytes. Returns the length of all, if there is room.
fn put(bytes: &mut [u8; LONGEST], rest: &[u8]) -> Option<usize> {
    let len = 8 + rest.len();
    bytes.get_mut(8..len)?.copy_from_slice(rest);
    Some(len)
}

impl Cell {
    fn in_use(&self) -> Option<(&'static Record, u32)> {
        let cell = self.0.load(Ordering::Relaxed);
        if cell == 0 { None } else { Some((get()?, cell)) }
    }

    /// Notes that the inode's file is elsewhere now.
    pub fn set_place(&self, place: &Place) {
        if let Some((record, cell)) = self.in_use() {
            let old = record.word(cell, 0);
            record.set_word(cell, 0, INODE | old & FORMAT | record.place(place));
            record.free_pieces(old);
        }
    }

    /// How far the range's mapping is.
    pub fn set_standing(&self, standing: Standing) {
        if let Some((record, cell)) = self.in_use() {
            record.set_word(cell, 0, record.word(cell, 0) & !STANDING | (standing as u64) << 8);
        }
    }

    /// Notes what is mapped in the range. Unless only `stored` is another, it must not be [`Standing::There`].
    pub fn set_range(&self, range: &Range) {
        if let Some((record, cell)) = self.in_use() {
            record.set_word(cell, 1, range.node);
            record.set_word(cell, 3, range.proxy);
            record.set_word(cell, 2, range.third());
        }
    }

    /// Notes a file's number.
    pub fn set_number(&self, value: u64) {
        if let Some((record, cell)) = self.in_use() {
            record.set_word(cell, 2, value);
        }
    }

    /// Notes a failure that the guest is to be told of, or 0. The cell has what the guest was told.
    pub fn set_failure(&self, errno: i32) {
        if let Some((record, cell)) = self.in_use() {
            record.set_word(cell, 3, errno as u64);
        }
    }

    /// Makes this another cell, which is freed if this is one already.
    pub fn set_first(&self, other: Self) {
        let new = other.0.load(Ordering::Relaxed);
        if self.0.compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            other.free();
        }
    }

    /// Makes this another cell.
    pub fn set(&self, other: Self) {
        self.0.store(other.0.into_inner(), Ordering::Relaxed);
    }

    /// The same cell.
    pub fn copy(&self) -> Self {
        Self(AtomicU32::new(self.0.load(Ordering::Relaxed)))
    }

    /// Whether nothing is recorded.
    pub fn is_empty(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }

    /// Notes the directory that the inode was found in.
    pub fn set_parent(&self, parent: u64) {
        if let Some((record, cell)) = self.in_use() {
            record.set_word(cell, 3, parent);
        }
    }

    /// Notes the references that the guest holds.
    pub fn set_references(&self, count: u64) {
        if let Some((record, cell)) = self.in_use() {
            record.set_word(cell, 2, count.min(MOST_REFERENCES));
        }
    }

    /// As [`set_references`](Self::set_references), after a FORGET, which is done only once.
    pub fn set_forgotten(&self, count: u64) {
        if let Some((record, cell)) = self.in_use() {
            record.set_word(cell, 2, count.min(MOST_REFERENCES) | tag(claim().id) << COUNT_BITS);
        }
    }

    /// Whether this thread's FORGET was done by a process before this one.
    pub fn was_forgotten(&self) -> bool {
        let claim = claim();
        claim.again.is_some()
            && self.in_use().is_some_and(|(record, cell)| record.word(cell, 2) >> COUNT_BITS == tag(claim.id))
    }

    /// Nothing is recorded any more. To be called before a descriptor that it names is closed.
    pub fn free(&self) {
        let cell = self.0.swap(0, Ordering::Relaxed);
        let Some(record) = get().filter(|_| cell != 0) else { return };
        let first = record.word(cell, 0);
        record.free(cell);
        if first & 0xff == INODE {
            record.free_pieces(first);
        }
    }
}

/// What is left of a claim's id beside a reference count: the chain's head, and 14 bits of how often it was used. All
/// FORGETs come by one ring.
fn tag(id: u64) -> u64 {
    (id >> 40 & 0x3ff | id << 10) & ((1 << (64 - COUNT_BITS)) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> &'static Record {
        Box::leak(Box::new(Record::new().unwrap()))
    }

    fn placed(record: &'static Record, place: &Place) -> FoundPlace {
        record.inode(7, 1, libc::S_IFREG, place);
        record.take_over().inodes.pop().unwrap().place
    }

    #[test]
    fn every_place_is_found_again() {
        let fd = placed(record(), &Place::Fd(65));
        assert_eq!(fd, FoundPlace::Fd(65));
        for len in [0, 1, 15, 16, 17, 100, 128] {
            let data = vec![7; len];
            let place = Place::Handle { mount: 9, kind: -1, data: &data };
            assert_eq!(placed(record(), &place), FoundPlace::Handle { mount: 9, kind: -1, data: data.into() });
        }
        for len in [1, 15, 16, 40, 41, 255] {
            let name = CString::new(vec![b'n'; len]).unwrap();
            let place = Place::Name { parent: 1 << 40, name: &name };
            assert_eq!(placed(record(), &place), FoundPlace::Name { parent: 1 << 40, name });
        }
        let name = CString::new(vec![b'n'; 256]).unwrap();
        assert_eq!(placed(record(), &Place::Name { parent: 1, name: &name }), FoundPlace::Lost);
    }

    #[test]
    fn cells_of_the_dead_are_used_again() {
        let record = record();
        let name = CString::new(vec![b'n'; 200]).unwrap();
        record.inode(2, 1, libc::S_IFREG, &Place::Name { parent: 1, name: &name });
        // What a process leaves that dies before the pieces belong to a file.
        record.place(&Place::Name { parent: 1, name: &name });
        let used = record.free.lock().used;
        let found = record.take_over();
        assert_eq!(found.inodes.len(), 1);
        record.place(&Place::Name { parent: 1, name: &name });
        assert_eq!(record.free.lock().used, used);
    }

    #[test]
    fn another_program_finds_the_same() {
        let record = record();
        record.inode(2, 1, libc::S_IFREG, &Place::Fd(30));
        let again = Record::open(record.file().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(again.descriptors(), [30]);
        let other = rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::empty()).unwrap();
        assert!(rustix::fs::ftruncate(record.file(), 0).is_err());
        rustix::fs::ftruncate(&other, rustix::fs::fstat(record.file()).unwrap().st_size as u64).unwrap();
        assert_eq!(Record::open(other).err().unwrap().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn ranges_are_found_as_far_as_they_are() {
        let record = record();
        let range = Range { number: 447, node: 9, from: 5 << 21, proxy: u64::MAX / 2, writable: true, stored: false };
        let all = [Standing::There, Standing::Changing, Standing::Loose];
        for standing in all {
            record.range(&range, standing);
        }
        let found = || {
            let found = record.take_over().mappings.into_iter();
            found.map(|found| (found.range, found.standing)).collect::<Vec<_>>()
        };
        assert_eq!(found(), all.map(|standing| (range, standing)));
        // Without a session the guest relies on nothing, and the frontend may still have it.
        record.wipe(true);
        assert_eq!(found(), all.map(|_| (range, Standing::Loose)));
        record.wipe(false);
        assert!(found().is_empty());
    }

    #[test]
    fn descriptors_are_named() {
        let record = record();
        record.inode(2, 1, libc::S_IFREG, &Place::Fd(30));
        record.inode(3, 1, libc::S_IFREG, &Place::Handle { mount: 31, kind: 1, data: &[1; 30] });
        record.inode(4, 1, libc::S_IFREG, &Place::Removed);
        record.handle(1 << 32, 2, 32);
        record.lock(5, 2, 33, 1 << 32);
        assert_eq!(record.descriptors(), [30, 31, 32, 33]);
        record.wipe(true);
        assert!(record.descriptors().is_empty());
        let found = record.take_over();
        assert!(found.inodes.is_empty() && found.handles.is_empty() && found.locks.is_empty());
    }
}
