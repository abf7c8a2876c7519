//! Both windows, with a guest, a host that changes files, and a frontend that records mappings. Each live entry of the
//! table must be mapped where it says, and no store there may fail. While a worker opens a file, others go on. At the
//! end the guest closes all files, and no slot and no entry may be left.
#![no_main]

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::task::Poll;

use libfuzzer_sys::fuzz_target;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstat, ftruncate, memfd_create};
use rustix::io::{Errno, pwrite};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use thruway::fuse::ops::{Answer, Result};
use thruway::window::fuzzing::Harness;
use thruway::window::proxy::{Event, Kind, Opened};
use thruway::window::{Facts, Frontend, Mapping, PATIENCE, ProxyFiles, RANGE, Settings, Source, Writable};
use thruway_fuzz::Input;

const NODES: u64 = 6;
const SLOTS: usize = 4;
const DAX: u64 = 4 * RANGE;
const PASSTHROUGH: u64 = 12 * RANGE;
/// Offset of the guest's words in the table, of which an acknowledgement is the first.
const ACKS: usize = 4096 * 64;
const LEN: usize = 2 << 20;
/// The entries that a node can have.
const ENTRIES: usize = 4095;
/// The entries that the daemon uses first.
const INDICES: std::ops::Range<u32> = 4084..4096;

/// The mappings, by region and offset. How many requests to map fail.
#[derive(Default)]
struct Mapped(Mutex<HashMap<(u8, u64), Piece>>, Mutex<u8>);

/// A mapping: its length, its file and where in the file it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    len: u64,
    standing: Standing,
    from: u64,
}

/// The file behind a descriptor, and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Standing {
    id: u64,
    node: u64,
    kind: Kind,
}

/// Files by descriptor.
#[derive(Default)]
struct Standings(Mutex<HashMap<i32, Standing>>);

impl Standings {
    fn of(&self, file: BorrowedFd) -> Standing {
        let table = Standing { id: 0, node: 0, kind: Kind::Through };
        self.0.lock().unwrap().get(&file.as_raw_fd()).copied().unwrap_or(table)
    }
}

struct Vmm(Arc<Mapped>, Arc<Standings>);

impl Frontend for Vmm {
    fn is_running(&self) -> bool {
        true
    }

    fn mapped(&self, mapping: &Mapping) -> usize {
        let of = self.1.of(mapping.file);
        let wanted = Piece { len: mapping.len, standing: of, from: mapping.from };
        self.0.0.lock().unwrap().values().filter(|piece| **piece == wanted).count()
    }

    fn map(&self, mapping: &Mapping) -> io::Result<()> {
        let Mapping { region, at, len, file, from, .. } = *mapping;
        let size = [DAX, PASSTHROUGH - RANGE, RANGE][usize::from(region)];
        assert!(len > 0 && at % RANGE == 0 && len % RANGE == 0 && at + len <= size, "a mapping outside its region");
        let mut fail = self.0.1.lock().unwrap();
        if *fail > 0 && region == 1 {
            *fail -= 1;
            return Err(io::Error::other("no"));
        }
        let mut mapped = self.0.0.lock().unwrap();
        let overlaps =
            |(place, piece): (&(u8, u64), &Piece)| place.0 == region && place.1 < at + len && at < place.1 + piece.len;
        assert!(!mapped.iter().any(overlaps), "two mappings overlap");
        mapped.insert((region, at), Piece { len, standing: self.1.of(file), from });
        Ok(())
    }

    fn unmap(&self, mapping: &Mapping) -> io::Result<()> {
        let Mapping { region, at, len, .. } = *mapping;
        match self.0.0.lock().unwrap().remove(&(region, at)) {
            Some(piece) => {
                assert_eq!(piece.len, len);
                Ok(())
            }
            None => Err(io::Error::other("not mapped")),
        }
    }
}

/// What others do, with the number of a proxy file that a worker opens.
type Others = Box<dyn FnOnce(u64)>;

thread_local! {
    /// Runs once, while a worker opens the proxy file with this number.
    static MEANWHILE: RefCell<Option<Others>> = const { RefCell::new(None) };
}

/// What the guest knows of its opens, by node.
#[derive(Default)]
struct Opens {
    counts: [u32; NODES as usize],
    /// How often the guest has closed the last of them.
    ends: [u32; NODES as usize],
    /// The entry that the present ones have, once that is decided.
    given: [Option<Option<u32>>; NODES as usize],
}

impl Opens {
    /// The daemon has answered an open that was made after so many ends.
    fn answered(&mut self, at: usize, ends: u32, index: Option<u32>) {
        if ends == self.ends[at] && self.counts[at] > 0 {
            assert_eq!(*self.given[at].get_or_insert(index), index, "two opens of node {} differ", at + 1);
        }
    }

    fn release(&mut self, at: usize) {
        self.counts[at] = self.counts[at].saturating_sub(1);
        if self.counts[at] == 0 {
            self.ends[at] += 1;
            self.given[at] = None;
        }
    }

    /// The session is over.
    fn end(&mut self) {
        (self.counts, self.given) = Default::default();
        self.ends.iter_mut().for_each(|ends| *ends += 1);
    }
}

struct Files(Arc<Standings>, Vec<OwnedFd>);

impl ProxyFiles for Files {
    fn open(&self, id: u64, kind: Kind, real: BorrowedFd) -> io::Result<Opened> {
        let ino = fstat(real)?.st_ino;
        let node = self.1.iter().position(|file| fstat(file).unwrap().st_ino == ino).unwrap() as u64 + 1;
        MEANWHILE.take().into_iter().for_each(|run| run(id));
        let fd = real.try_clone_to_owned()?;
        self.0.0.lock().unwrap().insert(fd.as_raw_fd(), Standing { id, node, kind });
        Ok(Opened { fd, guarded: true })
    }
    fn invalidate(&self, _id: u64) -> io::Result<()> {
        Ok(())
    }
    fn watch(&self, _id: u64) -> io::Result<()> {
        Ok(())
    }
    fn next_event(&self) -> Option<Event> {
        None
    }
}

struct OneFile(OwnedFd);

impl Source for OneFile {
    fn failed(&self, _errno: Errno) {}
    fn open(&self, _writable: bool) -> Result<OwnedFd> {
        self.0.try_clone().map_err(|_| Errno::MFILE)
    }
    fn facts(&self) -> Result<Facts> {
        Ok(Facts { size: fstat(&self.0)?.st_size as u64, told_size: 1 << 30, executable: false })
    }
}

struct Kept {
    rig: Arc<Harness>,
    opens: Arc<Mutex<Opens>>,
    mapped: Arc<Mapped>,
    files: Arc<Files>,
    /// The guest's view of the table.
    table: *mut u8,
}

impl Kept {
    fn new() -> Self {
        let made = (0..NODES).map(|_| memfd_create("file", MemfdFlags::CLOEXEC).unwrap()).collect();
        let files = Arc::new(Files(Arc::default(), made));
        let settings = Settings { size: PASSTHROUGH, slots: SLOTS, writable: Writable::InPlace, patience: PATIENCE };
        let rig = Arc::new(Harness::new(DAX, settings, files.clone()).unwrap());
        let mapped: Arc<Mapped> = Arc::default();
        let file = rig.table();
        // SAFETY: the kernel chooses the address.
        let table = unsafe {
            mmap(std::ptr::null_mut(), LEN, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0).unwrap()
        };
        Self { rig, opens: Arc::default(), mapped, files, table: table.cast() }
    }

    fn file(&self, node: u64) -> &OwnedFd {
        &self.files.1[(node - 1) as usize]
    }

    fn size(&self, node: u64) -> u64 {
        fstat(self.file(node)).unwrap().st_size as u64
    }

    fn acknowledge(&self, index: u32, generation: u32) {
        // SAFETY: the address is within the mapping and aligned.
        unsafe { self.table.add(ACKS + 16 * index as usize).cast::<u32>().write_volatile(generation.to_le()) }
    }

    /// Says that the guest has stored to a slot, or used it.
    fn note(&self, index: u32, word: usize) {
        // SAFETY: as above.
        unsafe { self.table.add(ACKS + 16 * index as usize + 4 * word).cast::<u32>().write_volatile(1) }
    }

    fn source(&self, node: u64) -> Arc<dyn Source> {
        Arc::new(OneFile(self.file(node).try_clone().unwrap()))
    }

    fn begin(&mut self) {
        for n in 0..NODES {
            let file = self.file(n + 1);
            ftruncate(file, 0).unwrap();
            pwrite(file, &[1; 100][..(n * 20) as usize], 0).unwrap();
        }
        self.rig.window.connect(Arc::new(Vmm(self.mapped.clone(), self.files.0.clone())));
        self.rig.window.announce();
        self.start();
    }

    fn start(&mut self) {
        let on = Answered::default();
        self.rig.pass().start(on.to());
        self.drain();
        assert_eq!(on.take(), Some(Ok(())));
    }

    /// The guest lets go of all slots, closes all files and forgets them.
    fn close_all(&mut self) {
        *self.mapped.1.lock().unwrap() = 0;
        self.acknowledge_all();
        self.drain();
        let pass = self.rig.pass();
        for node in 1..=NODES {
            let count = self.opens.lock().unwrap().counts[(node - 1) as usize];
            (0..count).for_each(|_| pass.release(node));
            pass.forget(node);
        }
        self.opens.lock().unwrap().end();
        self.drain();
        assert_eq!(self.rig.free_entries(), ENTRIES, "an entry of no node is not free");
        assert_eq!(self.rig.live()[1], 0, "a slot of no node");
        assert_eq!(self.rig.window.entries(), [], "an entry that the guest has closed");
    }

    fn acknowledge_all(&self) {
        INDICES.for_each(|index| self.acknowledge(index, self.rig.record(index).generation));
    }

    /// While a worker opens the next file, the guest and the host do something to it or to a node's file, and the
    /// mapper's thread goes on.
    fn meanwhile(&self, what: u8, node: u64) {
        let (rig, opens) = (self.rig.clone(), self.opens.clone());
        let release = move |rig: &Harness| {
            rig.pass().release(node);
            opens.lock().unwrap().release((node - 1) as usize);
        };
        let opens = self.opens.clone();
        let run = move |id| {
            match what % 6 {
                0 => release(&rig),
                1 => {
                    release(&rig);
                    rig.pass().forget(node);
                }
                2 => rig.event(Event::Revoke(id)),
                3 => {
                    rig.event(Event::Revoke(id));
                    release(&rig);
                }
                4 => rig.pass().missed(node),
                _ => {
                    rig.window.reset();
                    opens.lock().unwrap().end();
                }
            }
            if what < 128 {
                rig.thread_turns();
            }
        };
        MEANWHILE.set(Some(Box::new(run)));
    }

    fn drain(&mut self) {
        while self.rig.turn() {}
    }

    /// Checks what must hold while the mapper is idle. `told`: for each file, whether the daemon knows all its changes.
    fn check(&self, told: &[bool]) {
        let mapped = self.mapped.0.lock().unwrap();
        let count = |region| mapped.keys().filter(|place| place.0 == region).count();
        assert_eq!(self.rig.live(), [0, 1, 2].map(count), "the count of live mappings");
        assert!(count(1) <= SLOTS, "more slots than allowed");
        for (at, index) in self.opens.lock().unwrap().given.iter().enumerate() {
            if let Some(index) = index.flatten() {
                assert_eq!(self.rig.record(index).nodeid, at as u64 + 1, "an open has another node's entry");
            }
        }
        for index in INDICES {
            let entry = self.rig.record(index);
            if !entry.state.is_live() {
                continue;
            }
            // The file from its first byte on, in one piece or more.
            let (mut next, mut first) = (0, None);
            while next < entry.length {
                let piece = mapped.get(&(1, entry.offset + next)).expect("a live entry without a mapping");
                assert_eq!(piece.standing.node, entry.nodeid, "another file's mapping");
                assert_eq!((piece.standing.kind, piece.from), (Kind::Through, next));
                assert_eq!(*first.get_or_insert(piece.standing), piece.standing);
                next += piece.len;
            }
            assert_eq!(next, entry.length);
            if !told[(entry.nodeid - 1) as usize] {
                continue;
            }
            assert_eq!(entry.size, self.size(entry.nodeid), "the size of {}", entry.nodeid);
            if entry.state.is_writable() && entry.size > 0 {
                // Here no block lies past the end. (SEEK_HOLE would treat blocks without data as holes.)
                let blocks = fstat(self.file(entry.nodeid)).unwrap().st_blocks as u64 * 512;
                assert!(
                    blocks >= entry.size,
                    "a store may find no space: {blocks} bytes of {} have blocks",
                    entry.size
                );
            }
        }
    }
}

/// Receives the reply of a job.
#[derive(Clone, Default)]
struct Answered<T = ()>(Arc<Mutex<Option<Result<T>>>>);

impl<T: Send + 'static> Answered<T> {
    fn to(&self) -> Answer<T> {
        let to = self.0.clone();
        Box::new(move |result| *to.lock().unwrap() = Some(result))
    }

    fn take(&self) -> Option<Result<T>> {
        self.0.lock().unwrap().take()
    }
}

thread_local! {
    static KEPT: RefCell<Kept> = RefCell::new(Kept::new());
}

/// A length or an offset: mostly small, sometimes a few slots.
fn bytes_of(input: &mut Input) -> u64 {
    match input.u8() {
        n @ 0..128 => n.into(),
        n @ 128..192 => (u64::from(n - 128) * 4096).saturating_sub(1),
        n @ 192..224 => RANGE - 2 + u64::from(n - 192),
        n => RANGE * u64::from(n % 4) + u64::from(n / 8),
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    KEPT.with_borrow_mut(|kept| {
        kept.begin();
        let mut told = [true; NODES as usize];
        let mut asked: Vec<(usize, u32, Answered<Option<u32>>)> = Vec::new();
        let opens = kept.opens.clone();
        for _ in 0..48 {
            if input.is_empty() {
                break;
            }
            let (what, who) = (input.u8(), input.u8());
            let node = 1 + u64::from(who) % NODES;
            let at = (node - 1) as usize;
            let index = INDICES.start + u32::from(who) % 12;
            let window = kept.rig.window.clone();
            let Some(pass) = window.passing().cloned() else { break };
            match what % 20 {
                0 | 1 => {
                    let source = (who & 0x40 == 0).then(|| kept.source(node));
                    let opened = pass.open(node, kept.file(node).as_fd(), source);
                    let mut opens = opens.lock().unwrap();
                    opens.counts[at] += 1;
                    let ends = opens.ends[at];
                    match opened {
                        Poll::Ready(index) => opens.answered(at, ends, index),
                        Poll::Pending => {
                            let answer = Answered::default();
                            pass.decided(node, answer.to());
                            asked.push((at, ends, answer));
                        }
                    }
                }
                2 => {
                    pass.release(node);
                    opens.lock().unwrap().release(at);
                }
                3 => pass.forget(node),
                4 => {
                    let append = who & 0x80 != 0;
                    // More than a slot has, now and then.
                    let most = if append && who & 0x40 != 0 { 2 * RANGE } else { 8192 };
                    let (offset, len) = (bytes_of(&mut input), bytes_of(&mut input).min(most));
                    let offset = if append { kept.size(node) } else { offset };
                    pwrite(kept.file(node), &vec![2; len as usize], offset).unwrap();
                    pass.wrote(node, kept.file(node).as_fd(), (!append).then_some(offset), len);
                }
                5 => {
                    let (offset, len) = (bytes_of(&mut input), bytes_of(&mut input).max(1));
                    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    pass.punching(node, offset, || fallocate(kept.file(node), flags, offset, len).unwrap());
                }
                6 | 7 => {
                    let to = bytes_of(&mut input);
                    let file = kept.file(node);
                    let fails = who & 0x80 != 0;
                    let run = || if fails { Err(Errno::NOSPC) } else { ftruncate(file, to) };
                    let _ = pass.truncate(node, to, run, || Ok(fstat(file)?.st_size as u64));
                }
                8 => {
                    let look = || fstat(kept.file(node)).map(|st| (st.st_size as u64, st.st_blocks as u64));
                    let (size, blocks) = look().unwrap();
                    pass.saw(node, size, blocks, look);
                }
                // The host changes a file, then the daemon gets the event.
                9 => {
                    ftruncate(kept.file(node), bytes_of(&mut input)).unwrap();
                    told[at] = false;
                }
                10 => {
                    let mapped = kept.mapped.0.lock().unwrap();
                    let standing = mapped.values().map(|piece| piece.standing).find(|of| of.node == node);
                    drop(mapped);
                    if let Some(standing) = standing {
                        kept.rig.event(if who & 0x80 == 0 {
                            Event::Revoke(standing.id)
                        } else {
                            Event::Changed(standing.id)
                        });
                    }
                }
                11 | 12 => kept.acknowledge(index, kept.rig.record(index).generation),
                13 => kept.acknowledge(index, input.number() as u32),
                14 => {
                    let answer = Answered::default();
                    pass.ask(node, bytes_of(&mut input), bytes_of(&mut input), who & 0x80 != 0, answer.to());
                    kept.drain();
                    assert!(answer.take().is_some());
                }
                15 => {
                    let (at, len, from) = (bytes_of(&mut input), bytes_of(&mut input), bytes_of(&mut input));
                    let answer = || Answered::default().to();
                    if let Err(errno) = window.map((at, len), from, who & 0x80 != 0, node, kept.source(node), answer) {
                        assert_eq!(errno, Errno::INVAL);
                    }
                }
                16 => {
                    let parts = [(bytes_of(&mut input), bytes_of(&mut input))];
                    let _ = window.unmap(&parts, || Answered::default().to());
                }
                18 if who & 0xf0 != 0 => match who & 0x30 {
                    0x10 => kept.note(index, 1),
                    0x20 => kept.note(index, 2),
                    _ => pass.missed(node),
                },
                17 => *kept.mapped.1.lock().unwrap() = who % 3,
                18 if who & 0xf0 == 0 => {
                    window.reset();
                    opens.lock().unwrap().end();
                    kept.drain();
                    assert!(kept.mapped.0.lock().unwrap().is_empty());
                    told = [true; NODES as usize];
                    *kept.mapped.1.lock().unwrap() = 0;
                    kept.start();
                }
                19 if who & 0xc0 == 0xc0 => kept.meanwhile(input.u8(), node),
                _ => {
                    kept.rig.turn();
                }
            }
            asked.retain(|(at, ends, answer)| match answer.take() {
                Some(index) => {
                    index.into_iter().for_each(|index| opens.lock().unwrap().answered(*at, *ends, index));
                    false
                }
                None => true,
            });
            if what & 0x80 == 0 {
                kept.drain();
                kept.check(&told);
            }
        }
        kept.drain();
        kept.check(&told);
        assert!(asked.iter().all(|(.., answer)| answer.take().is_some()), "an open without a reply");
        MEANWHILE.take();
        kept.close_all();
        kept.rig.window.disconnect();
        kept.drain();
        // Without a frontend no mapping is revoked, and none is counted.
        assert_eq!(kept.rig.live(), [0; 3]);
        kept.mapped.0.lock().unwrap().clear();
        kept.files.0.0.lock().unwrap().clear();
    });
});
