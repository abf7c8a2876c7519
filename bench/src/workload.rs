//! The workloads: what the guest asks of the daemon.

use std::sync::Arc;
use std::time::Instant;

use zerocopy::{FromBytes, IntoBytes};

use super::errno_text;
use super::slots::{Ask, Forgets, MAX_DATA, Reply};
use crate::frontend::Frontend;
use thruway::fuse::abi::*;

type Result<T> = std::result::Result<T, String>;

/// The workloads with fixed names. There are also I/O patterns: read, write, randread and randwrite with a size, such
/// as `randread-4k`.
pub const NAMES: &[&str] = &[
    "getattr",
    "lookup",
    "lookup-new",
    "open",
    "create",
    "readdirplus",
    "statfs",
    "fsync",
    "compile",
    "getattr-beside-write",
];

/// Number of files to look up, open and read. They exceed any daemon's cache of files, and are made within a second.
const SMALL_FILES: usize = 4096;
/// Size of each of these files, in bytes.
const SMALL: usize = 4096;
/// Number of files in the directory that is listed.
const LISTED: usize = 10_000;
/// Size of a READDIRPLUS buffer, in bytes: that of glibc's readdir(3).
const LISTING: usize = 32 << 10;
/// Size of the file for reads and writes, in bytes.
const FILE: u64 = 256 << 20;
/// Size of the file that is written and synced beside getattr, in bytes.
const SYNCED: u64 = 1 << 30;
/// Number of WRITEs in flight to it, as in a guest's writeback.
const WRITERS: usize = 4;

/// Whether `name` is a workload or an I/O pattern.
pub fn is_workload(name: &str) -> bool {
    NAMES.contains(&name) || Pattern::parse(name).is_some()
}

/// Bytes of memory that the files take with which these workloads work through one daemon.
pub fn bytes(workloads: &[String]) -> u64 {
    let any = |names: &[&str]| workloads.iter().any(|name| names.contains(&name.as_str()));
    // What a file in memory takes besides its contents: its inode and its name.
    const FILE_COST: u64 = 2 << 10;
    let small = any(&["getattr", "lookup", "open", "compile", "getattr-beside-write"]);
    let small = if small { SMALL_FILES as u64 * (SMALL as u64 + FILE_COST) } else { 0 };
    let listed = if any(&["lookup-new", "readdirplus"]) { LISTED as u64 * FILE_COST } else { 0 };
    let big = match any(&["getattr-beside-write"]) {
        true => SYNCED,
        false if any(&["fsync"]) || workloads.iter().any(|name| Pattern::parse(name).is_some()) => FILE,
        false => 0,
    };
    small + listed + big
}

/// A sequence of operations, one at a time.
pub struct Lane {
    pub name: &'static str,
    pub script: Box<dyn Script>,
    /// Whether its operations are counted.
    pub counts: bool,
    /// When the current operation began.
    pub started: Instant,
}

/// The requests of a lane, in order.
pub trait Script: Send {
    fn next(&mut self, ask: &mut Ask);
    /// Takes the reply. Adds the nodeids to forget to `forgets`.
    fn done(&mut self, reply: &Reply, forgets: &mut Vec<u64>) -> Result<Progress>;
    /// Whether no file is left open.
    fn is_at_rest(&self) -> bool {
        true
    }
}

/// Whether the operation is complete.
pub enum Progress {
    More,
    /// Complete. It counts as this many `units`.
    Done {
        units: u64,
        bytes: u64,
    },
}

const ONE: Progress = Progress::Done { units: 1, bytes: 0 };

/// An I/O pattern with one size.
#[derive(Clone, Copy)]
struct Pattern {
    write: bool,
    random: bool,
    size: usize,
}

impl Pattern {
    fn parse(name: &str) -> Option<Self> {
        let (kind, size) = name.split_once('-')?;
        let (write, random) = match kind {
            "read" => (false, false),
            "write" => (true, false),
            "randread" => (false, true),
            "randwrite" => (true, true),
            _ => return None,
        };
        let size = match size.strip_suffix('k') {
            Some(kib) => kib.parse::<usize>().ok()?.checked_mul(1 << 10)?,
            None => size.strip_suffix('m')?.parse::<usize>().ok()?.checked_mul(1 << 20)?,
        };
        (1..=MAX_DATA).contains(&size).then_some(Self { write, random, size })
    }
}

/// The lanes of a workload.
pub fn lanes(name: &str, frontend: &Frontend, forgets: &Forgets, share: &mut Share, count: usize) -> Result<Vec<Lane>> {
    let script: Box<dyn Fn(usize) -> Box<dyn Script>> = match name {
        "getattr" => {
            let files = share.small(frontend)?;
            Box::new(move |n| Box::new(Getattr(Pick::new(&files, n))))
        }
        "lookup" => {
            let files = share.small(frontend)?;
            Box::new(move |n| Box::new(Lookup(Pick::new(&files, n))))
        }
        "lookup-new" => {
            let files = share.listed(frontend, forgets)?;
            Box::new(move |n| Box::new(LookupNew { files: files.clone(), at: n, step: count }))
        }
        "open" => {
            let files = share.small(frontend)?;
            Box::new(move |n| Box::new(Open { files: Pick::new(&files, n), node: 0, fh: None, read: false }))
        }
        "compile" => {
            let files = share.small(frontend)?;
            Box::new(move |n| {
                let open = Open { files: Pick::new(&files, n), node: 0, fh: None, read: true };
                Box::new(Compile { files: Pick::new(&files, count + n), open, opening: false })
            })
        }
        "create" => {
            let dir = share.scratch(frontend)?;
            Box::new(move |n| {
                Box::new(Create { dir, name: format!("new-{n}"), step: 0, entry: EntryOut::default(), fh: 0 })
            })
        }
        "readdirplus" => {
            let dir = share.listed(frontend, forgets)?.dir;
            Box::new(move |_| Box::new(List { dir, fh: 0, offset: 0, over: false, entries: Vec::new() }))
        }
        "statfs" => Box::new(|_| Box::new(Statfs)),
        "fsync" => {
            let file = share.big(frontend)?;
            Box::new(move |_| Box::new(Fsync(file)))
        }
        "getattr-beside-write" => return beside_write(frontend, share, count),
        io => {
            let pattern = Pattern::parse(io).ok_or_else(|| format!("unknown workload '{io}'"))?;
            let file = share.big(frontend)?;
            Box::new(move |n| Box::new(Io::new(pattern, file, FILE, n, count)))
        }
    };
    let name = share.name(name);
    Ok((0..count).map(|n| Lane { name, script: script(n), counts: true, started: Instant::now() }).collect())
}

/// Lanes that write, and sync whenever the file is full; the other lanes send getattr.
fn beside_write(frontend: &Frontend, share: &mut Share, count: usize) -> Result<Vec<Lane>> {
    if count <= WRITERS {
        return Err(format!("getattr-beside-write takes --depth {} or more: {WRITERS} write", WRITERS + 1));
    }
    let (files, file) = (share.small(frontend)?, share.big(frontend)?);
    let pattern = Pattern { write: true, random: false, size: MAX_DATA };
    let lane = |n: usize| -> (Box<dyn Script>, bool) {
        match n.checked_sub(WRITERS) {
            None => (Box::new(Synced { io: Io::new(pattern, file, SYNCED, n, WRITERS), file, full: false }), false),
            Some(n) => (Box::new(Getattr(Pick::new(&files, n))), true),
        }
    };
    let lanes = (0..count).map(lane);
    Ok(lanes
        .map(|(script, counts)| Lane { name: "getattr-beside-write", script, counts, started: Instant::now() })
        .collect())
}

/// The files of a directory.
struct Files {
    dir: u64,
    /// NUL-terminated names and nodeids.
    files: Vec<(Vec<u8>, u64)>,
}

/// Picks files at random, in the same order in each run.
struct Pick {
    files: Arc<Files>,
    rng: fastrand::Rng,
}

impl Pick {
    fn new(files: &Arc<Files>, seed: usize) -> Self {
        Self { files: files.clone(), rng: fastrand::Rng::with_seed(seed as u64) }
    }

    fn next(&mut self) -> (&[u8], u64) {
        let (name, node) = &self.files.files[self.rng.usize(..self.files.files.len())];
        (name, *node)
    }
}

struct Getattr(Pick);

impl Script for Getattr {
    fn next(&mut self, ask: &mut Ask) {
        let (_, node) = self.0.next();
        ask.set(Opcode::Getattr, node, &[GetattrIn::default().as_bytes()], size_of::<AttrOut>());
    }

    fn done(&mut self, _: &Reply, _: &mut Vec<u64>) -> Result<Progress> {
        Ok(ONE)
    }
}

struct Lookup(Pick);

impl Script for Lookup {
    fn next(&mut self, ask: &mut Ask) {
        let dir = self.0.files.dir;
        ask.set(Opcode::Lookup, dir, &[self.0.next().0], size_of::<EntryOut>());
    }

    fn done(&mut self, _: &Reply, _: &mut Vec<u64>) -> Result<Progress> {
        Ok(ONE)
    }
}

/// Looks up names in turn and forgets each at once, so that it is new when its turn comes again.
struct LookupNew {
    files: Arc<Files>,
    at: usize,
    step: usize,
}

impl Script for LookupNew {
    fn next(&mut self, ask: &mut Ask) {
        let name = &self.files.files[self.at % self.files.files.len()].0;
        ask.set(Opcode::Lookup, self.files.dir, &[name], size_of::<EntryOut>());
        self.at += self.step;
    }

    fn done(&mut self, reply: &Reply, forgets: &mut Vec<u64>) -> Result<Progress> {
        forgets.push(reply.body::<EntryOut>()?.nodeid);
        Ok(ONE)
    }
}

/// OPEN and RELEASE. If asked for, a READ of the whole file in between.
struct Open {
    files: Pick,
    node: u64,
    fh: Option<u64>,
    read: bool,
}

impl Script for Open {
    fn next(&mut self, ask: &mut Ask) {
        match self.fh {
            None => {
                self.node = self.files.next().1;
                ask.set(Opcode::Open, self.node, &[open_in(libc::O_RDONLY).as_bytes()], size_of::<OpenOut>());
            }
            Some(fh) if self.read => {
                let args = ReadIn { fh, size: SMALL as u32, ..Default::default() };
                ask.set(Opcode::Read, self.node, &[args.as_bytes()], 0);
                ask.read(SMALL);
            }
            Some(fh) => ask.set(Opcode::Release, self.node, &[ReleaseIn { fh, ..Default::default() }.as_bytes()], 0),
        }
    }

    fn done(&mut self, reply: &Reply, _: &mut Vec<u64>) -> Result<Progress> {
        match self.fh {
            None => self.fh = Some(reply.body::<OpenOut>()?.fh),
            Some(_) if std::mem::take(&mut self.read) => {}
            Some(_) => {
                self.fh = None;
                return Ok(ONE);
            }
        }
        Ok(Progress::More)
    }
}

/// A compiler's search for headers: of ten operations four are LOOKUPs, four GETATTRs, and two read a file.
struct Compile {
    files: Pick,
    open: Open,
    opening: bool,
}

impl Script for Compile {
    fn next(&mut self, ask: &mut Ask) {
        if self.opening {
            return self.open.next(ask);
        }
        match self.files.rng.u32(..10) {
            0..4 => {
                let dir = self.files.files.dir;
                ask.set(Opcode::Lookup, dir, &[self.files.next().0], size_of::<EntryOut>());
            }
            4..8 => {
                let node = self.files.next().1;
                ask.set(Opcode::Getattr, node, &[GetattrIn::default().as_bytes()], size_of::<AttrOut>());
            }
            _ => {
                self.opening = true;
                self.open.read = true;
                self.open.next(ask);
            }
        }
    }

    fn done(&mut self, reply: &Reply, forgets: &mut Vec<u64>) -> Result<Progress> {
        if !self.opening {
            return Ok(ONE);
        }
        let progress = self.open.done(reply, forgets)?;
        self.opening = matches!(progress, Progress::More);
        Ok(progress)
    }
}

/// CREATE, RELEASE, UNLINK, FORGET.
struct Create {
    dir: u64,
    name: String,
    step: u8,
    entry: EntryOut,
    fh: u64,
}

impl Script for Create {
    fn next(&mut self, ask: &mut Ask) {
        let name = [self.name.as_bytes(), b"\0"].concat();
        match self.step {
            0 => {
                let args = create_in();
                ask.set(Opcode::Create, self.dir, &[args.as_bytes(), &name], size_of::<(EntryOut, OpenOut)>());
            }
            1 => {
                let args = ReleaseIn { fh: self.fh, ..Default::default() };
                ask.set(Opcode::Release, self.entry.nodeid, &[args.as_bytes()], 0);
            }
            _ => ask.set(Opcode::Unlink, self.dir, &[&name], 0),
        }
    }

    fn done(&mut self, reply: &Reply, forgets: &mut Vec<u64>) -> Result<Progress> {
        match self.step {
            0 => {
                let created: [u8; size_of::<EntryOut>() + size_of::<OpenOut>()] = reply.body()?;
                let (entry, rest) = EntryOut::read_from_prefix(&created).map_err(|e| e.to_string())?;
                let (open, _) = OpenOut::read_from_prefix(rest).map_err(|e| e.to_string())?;
                (self.entry, self.fh, self.step) = (entry, open.fh, 1);
            }
            1 => self.step = 2,
            _ => {
                self.step = 0;
                forgets.push(self.entry.nodeid);
                return Ok(ONE);
            }
        }
        Ok(Progress::More)
    }
}

/// OPENDIR, READDIRPLUS to the end, RELEASEDIR. Each full buffer is an operation, with one unit per entry.
struct List {
    dir: u64,
    /// The handle plus 1; 0 if the directory is not open.
    fh: u64,
    offset: u64,
    over: bool,
    entries: Vec<u8>,
}

impl Script for List {
    fn next(&mut self, ask: &mut Ask) {
        match (self.fh, self.over) {
            (0, _) => {
                ask.set(Opcode::Opendir, self.dir, &[open_in(libc::O_DIRECTORY).as_bytes()], size_of::<OpenOut>());
            }
            (fh, false) => {
                let args = ReadIn { fh: fh - 1, offset: self.offset, size: LISTING as u32, ..Default::default() };
                ask.set(Opcode::Readdirplus, self.dir, &[args.as_bytes()], 0);
                ask.read(LISTING);
            }
            (fh, true) => {
                let args = ReleaseIn { fh: fh - 1, ..Default::default() };
                ask.set(Opcode::Releasedir, self.dir, &[args.as_bytes()], 0);
            }
        }
    }

    fn done(&mut self, reply: &Reply, _: &mut Vec<u64>) -> Result<Progress> {
        match (self.fh, self.over) {
            (0, _) => {
                // A daemon's first handle may be 0.
                self.fh = reply.body::<OpenOut>()?.fh.wrapping_add(1);
                self.offset = 0;
            }
            (_, false) if reply.data_len() == 0 => self.over = true,
            (_, false) => {
                reply.data(&mut self.entries)?;
                let (mut rest, mut units) = (&self.entries[..], 0);
                while let Some(dirent) = rest.get(size_of::<EntryOut>()..) {
                    let (dirent, _) = Dirent::read_from_prefix(dirent).map_err(|e| e.to_string())?;
                    self.offset = dirent.off;
                    units += 1;
                    let len = size_of::<EntryOut>() + size_of::<Dirent>() + dirent.namelen as usize;
                    rest = rest.get(len.next_multiple_of(8)..).unwrap_or_default();
                }
                return Ok(Progress::Done { units, bytes: 0 });
            }
            (_, true) => {
                (self.fh, self.over) = (0, false);
                return Ok(Progress::Done { units: 0, bytes: 0 });
            }
        }
        Ok(Progress::More)
    }

    fn is_at_rest(&self) -> bool {
        self.fh == 0
    }
}

struct Statfs;

impl Script for Statfs {
    fn next(&mut self, ask: &mut Ask) {
        ask.set(Opcode::Statfs, ROOT_ID, &[], size_of::<StatfsOut>());
    }

    fn done(&mut self, _: &Reply, _: &mut Vec<u64>) -> Result<Progress> {
        Ok(ONE)
    }
}

/// An open file.
#[derive(Clone, Copy)]
pub struct File {
    node: u64,
    fh: u64,
}

struct Fsync(File);

impl Script for Fsync {
    fn next(&mut self, ask: &mut Ask) {
        let args = FsyncIn { fh: self.0.fh, ..Default::default() };
        ask.set(Opcode::Fsync, self.0.node, &[args.as_bytes()], 0);
    }

    fn done(&mut self, _: &Reply, _: &mut Vec<u64>) -> Result<Progress> {
        Ok(ONE)
    }
}

/// READs or WRITEs.
struct Io {
    pattern: Pattern,
    file: File,
    rng: fastrand::Rng,
    at: u64,
    start: u64,
    end: u64,
}

impl Io {
    /// Lane `n` of `count`. Each has its own part of a file of `size` bytes.
    fn new(pattern: Pattern, file: File, size: u64, n: usize, count: usize) -> Self {
        let unit = pattern.size as u64;
        let part = (size / count as u64 / unit).max(1) * unit;
        let start = part * n as u64 % size;
        Self { pattern, file, rng: fastrand::Rng::with_seed(n as u64), at: start, start, end: (start + part).min(size) }
    }

    fn offset(&mut self) -> u64 {
        let unit = self.pattern.size as u64;
        if self.pattern.random {
            return self.rng.u64(..FILE / unit) * unit;
        }
        let at = self.at;
        self.at = if at + 2 * unit <= self.end { at + unit } else { self.start };
        at
    }
}

impl Script for Io {
    fn next(&mut self, ask: &mut Ask) {
        let (fh, offset, size) = (self.file.fh, self.offset(), self.pattern.size as u32);
        if self.pattern.write {
            let args = WriteIn { fh, offset, size, flags: libc::O_RDWR as u32, ..Default::default() };
            ask.set(Opcode::Write, self.file.node, &[args.as_bytes()], size_of::<WriteOut>());
            ask.write(self.pattern.size);
        } else {
            let args = ReadIn { fh, offset, size, flags: libc::O_RDWR as u32, ..Default::default() };
            ask.set(Opcode::Read, self.file.node, &[args.as_bytes()], 0);
            ask.read(self.pattern.size);
        }
    }

    fn done(&mut self, reply: &Reply, _: &mut Vec<u64>) -> Result<Progress> {
        let bytes = if self.pattern.write { reply.body::<WriteOut>()?.size.into() } else { reply.data_len() as u64 };
        if bytes != self.pattern.size as u64 {
            return Err(format!("{bytes} bytes instead of {}", self.pattern.size));
        }
        Ok(Progress::Done { units: 1, bytes })
    }
}

/// Writes its part of the file again and again, and syncs it after each pass.
struct Synced {
    io: Io,
    file: File,
    full: bool,
}

impl Script for Synced {
    fn next(&mut self, ask: &mut Ask) {
        if std::mem::take(&mut self.full) {
            return Fsync(self.file).next(ask);
        }
        self.io.next(ask);
        self.full = self.io.at == self.io.start;
    }

    fn done(&mut self, _: &Reply, _: &mut Vec<u64>) -> Result<Progress> {
        Ok(ONE)
    }
}

fn open_in(flags: i32) -> OpenIn {
    OpenIn { flags: (flags | libc::O_LARGEFILE) as u32, open_flags: 0 }
}

fn create_in() -> CreateIn {
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_LARGEFILE;
    CreateIn { flags: flags as u32, mode: libc::S_IFREG | 0o644, umask: 0o022, open_flags: 0 }
}

/// This program's own directory in the share. The files that a workload needs are made when they are first needed.
pub struct Share {
    dir: u64,
    name: String,
    small: Option<Arc<Files>>,
    listed: Option<Arc<Files>>,
    scratch: Option<u64>,
    big: Option<File>,
}

impl Share {
    pub fn make(frontend: &Frontend) -> Result<Self> {
        let name = format!("thruway-bench.{}", std::process::id());
        let dir = mkdir(frontend, ROOT_ID, &name)?;
        Ok(Self { dir, name, small: None, listed: None, scratch: None, big: None })
    }

    /// The name of the workload, for errors.
    fn name(&self, name: &str) -> &'static str {
        NAMES.iter().find(|known| **known == name).copied().unwrap_or("I/O")
    }

    fn small(&mut self, frontend: &Frontend) -> Result<Arc<Files>> {
        if self.small.is_none() {
            self.small = Some(Arc::new(fill(frontend, self.dir, "small", SMALL_FILES, SMALL)?));
        }
        Ok(self.small.clone().unwrap_or_else(|| unreachable!("it was made just now")))
    }

    /// The directory to list. The guest does not know its files yet.
    fn listed(&mut self, frontend: &Frontend, forgets: &Forgets) -> Result<Arc<Files>> {
        if self.listed.is_none() {
            let files = fill(frontend, self.dir, "listed", LISTED, 0)?;
            let mut nodes = files.files.iter().map(|(_, node)| *node).collect();
            forgets.send(frontend, &mut nodes).map_err(|e| format!("the daemon does not accept FORGET: {e}"))?;
            self.listed = Some(Arc::new(files));
        }
        Ok(self.listed.clone().unwrap_or_else(|| unreachable!("it was made just now")))
    }

    fn scratch(&mut self, frontend: &Frontend) -> Result<u64> {
        if self.scratch.is_none() {
            self.scratch = Some(mkdir(frontend, self.dir, "scratch")?);
        }
        Ok(self.scratch.unwrap_or(0))
    }

    fn big(&mut self, frontend: &Frontend) -> Result<File> {
        if let Some(file) = self.big {
            return Ok(file);
        }
        let (node, fh) = create(frontend, self.dir, "big")?;
        for offset in (0..FILE).step_by(MAX_DATA) {
            write(frontend, node, fh, offset, MAX_DATA)?;
        }
        Ok(*self.big.insert(File { node, fh }))
    }

    /// Removes the directory and its files.
    pub fn remove(&mut self, frontend: &Frontend) -> Result<()> {
        if let Some(file) = self.big {
            release(frontend, file.node, file.fh)?;
            unlink(frontend, Opcode::Unlink, self.dir, "big")?;
        }
        for (files, name) in [(&self.small, "small"), (&self.listed, "listed")] {
            let Some(files) = files else { continue };
            for (name, _) in &files.files {
                call(frontend, Opcode::Unlink, files.dir, name, &[], 0)?;
            }
            unlink(frontend, Opcode::Rmdir, self.dir, name)?;
        }
        if self.scratch.is_some() {
            unlink(frontend, Opcode::Rmdir, self.dir, "scratch")?;
        }
        unlink(frontend, Opcode::Rmdir, ROOT_ID, &self.name)
    }
}

fn call(frontend: &Frontend, opcode: Opcode, node: u64, args: &[u8], data: &[u8], reply: usize) -> Result<Vec<u8>> {
    let done = frontend.request(1, opcode as u32, node, args, data, reply);
    done.map_err(|errno| format!("{opcode:?} failed: {}", errno_text(errno)))
}

fn cut<T: FromBytes>(reply: &[u8]) -> Result<(T, &[u8])> {
    T::read_from_prefix(reply).map_err(|_| "the daemon gave a reply that is too short".into())
}

fn mkdir(frontend: &Frontend, parent: u64, name: &str) -> Result<u64> {
    let args = MkdirIn { mode: 0o755, umask: 0o022 };
    let args = [args.as_bytes(), name.as_bytes(), b"\0"].concat();
    Ok(cut::<EntryOut>(&call(frontend, Opcode::Mkdir, parent, &args, &[], size_of::<EntryOut>())?)?.0.nodeid)
}

fn create(frontend: &Frontend, parent: u64, name: &str) -> Result<(u64, u64)> {
    let args = [create_in().as_bytes(), name.as_bytes(), b"\0"].concat();
    let reply = call(frontend, Opcode::Create, parent, &args, &[], size_of::<EntryOut>() + size_of::<OpenOut>())?;
    let (entry, rest) = cut::<EntryOut>(&reply)?;
    Ok((entry.nodeid, cut::<OpenOut>(rest)?.0.fh))
}

fn write(frontend: &Frontend, node: u64, fh: u64, offset: u64, size: usize) -> Result<()> {
    let args = WriteIn { fh, offset, size: size as u32, flags: libc::O_RDWR as u32, ..Default::default() };
    call(frontend, Opcode::Write, node, args.as_bytes(), &vec![0x5a; size], size_of::<WriteOut>()).map(drop)
}

fn release(frontend: &Frontend, node: u64, fh: u64) -> Result<()> {
    call(frontend, Opcode::Release, node, ReleaseIn { fh, ..Default::default() }.as_bytes(), &[], 0).map(drop)
}

fn unlink(frontend: &Frontend, opcode: Opcode, dir: u64, name: &str) -> Result<()> {
    call(frontend, opcode, dir, &[name.as_bytes(), b"\0"].concat(), &[], 0).map(drop)
}

fn fill(frontend: &Frontend, parent: u64, name: &str, count: usize, size: usize) -> Result<Files> {
    let dir = mkdir(frontend, parent, name)?;
    let mut files = Vec::with_capacity(count);
    for n in 0..count {
        let name = format!("file-{n:05}.h");
        let (node, fh) = create(frontend, dir, &name)?;
        if size > 0 {
            write(frontend, node, fh, 0, size)?;
        }
        release(frontend, node, fh)?;
        files.push(([name.as_bytes(), b"\0"].concat(), node));
    }
    Ok(Files { dir, files })
}
