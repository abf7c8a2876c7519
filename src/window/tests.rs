//! The mapper against a frontend and proxy files that only take note.

use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;
use std::task::Poll;
use std::time::{Duration, Instant, UNIX_EPOCH};

use parking_lot::Mutex;
use vm_memory::{Bytes, VolatileMemory};

use super::layout::*;
use super::passthrough::Touch;
use super::proxy::{Event, Kind, Opened};
use super::*;

/// Live mappings as the frontend has them: where they begin (see [`place`]), the proxy file's id, where in it they
/// begin, and how long they are.
#[derive(Default)]
struct Taken {
    mapped: Mutex<Vec<(u64, u64, u64, u64)>>,
    calls: AtomicUsize,
    /// Is asked before a mapping is made. TimedOut: the frontend agrees, and the guest never gets it.
    may: Mutex<Option<Box<May>>>,
}

type May = dyn Fn(&Mapping) -> io::Result<()> + Send;

/// A byte of a region. Those of the DAX window are their own.
const fn place(region: u8, at: u64) -> u64 {
    ((region as u64) << 56) + at
}

struct FakeFrontend(Arc<Taken>, Arc<Made>);

impl FakeFrontend {
    /// Of the proxy file; 0 for the table.
    fn id(&self, file: BorrowedFd) -> u64 {
        let made = self.1.all.lock();
        made.iter().rev().find(|one| one.fd == file.as_raw_fd()).map_or(0, |one| one.id)
    }
}

impl Frontend for FakeFrontend {
    fn is_running(&self) -> bool {
        true
    }

    fn mapped(&self, mapping: &Mapping) -> usize {
        let id = self.id(mapping.file);
        let is_it = |m: &&(u64, u64, u64, u64)| (m.1, m.2, m.3) == (id, mapping.from, mapping.len);
        self.0.mapped.lock().iter().filter(is_it).count()
    }

    fn map(&self, mapping: &Mapping) -> io::Result<()> {
        let Mapping { region, at, len, file, from, .. } = *mapping;
        assert!(region != DAX || len == RANGE);
        self.0.calls.fetch_add(1, Ordering::Relaxed);
        match self.0.may.lock().as_ref().map_or(Ok(()), |may| may(mapping)) {
            Err(e) if e.kind() == io::ErrorKind::TimedOut => return Ok(()),
            may => may?,
        }
        let id = self.id(file);
        let mut mapped = self.0.mapped.lock();
        let at = place(region, at);
        if mapped.iter().any(|m| m.0 < at + len && at < m.0 + m.3) {
            return Err(io::Error::other("overlap"));
        }
        mapped.push((at, id, from, len));
        Ok(())
    }

    fn unmap(&self, mapping: &Mapping) -> io::Result<()> {
        let at = place(mapping.region, mapping.at);
        let mut mapped = self.0.mapped.lock();
        let before = mapped.len();
        mapped.retain(|m| (m.0, m.3) != (at, mapping.len));
        if mapped.len() < before { Ok(()) } else { Err(io::Error::other("not mapped")) }
    }
}

/// A proxy file; its other end tells whether it is open.
struct MadeOne {
    id: u64,
    kind: Kind,
    fd: i32,
    end: UnixStream,
}

#[derive(Default)]
struct Made {
    all: Mutex<Vec<MadeOne>>,
    guarded: bool,
    /// Is called with the id before a proxy file is opened.
    opening: Mutex<Option<Arc<Opening>>>,
}

type Opening = dyn Fn(u64, Kind) + Send + Sync;

impl ProxyFiles for Made {
    fn open(&self, id: u64, kind: Kind, _real: BorrowedFd) -> io::Result<Opened> {
        let opening = self.opening.lock().clone();
        opening.into_iter().for_each(|opening| opening(id, kind));
        let (fd, end) = UnixStream::pair()?;
        end.set_nonblocking(true)?;
        self.all.lock().push(MadeOne { id, kind, fd: fd.as_raw_fd(), end });
        Ok(Opened { fd: fd.into(), guarded: self.guarded })
    }

    fn invalidate(&self, _id: u64) -> io::Result<()> {
        Ok(())
    }

    fn watch(&self, _id: u64) -> io::Result<()> {
        Ok(())
    }

    fn next_event(&self) -> Option<Event> {
        loop {
            thread::park();
        }
    }
}

/// A file that is always the same.
struct OneFile(std::fs::File);

impl Source for OneFile {
    fn failed(&self, _errno: Errno) {}

    fn open(&self, _writable: bool) -> Result<OwnedFd> {
        Ok(self.0.try_clone().unwrap().into())
    }

    fn facts(&self) -> Result<Facts> {
        Ok(Facts { size: self.0.metadata().unwrap().len(), told_size: 0, executable: false })
    }
}

#[derive(Default)]
struct FakeSource {
    readonly: bool,
    busy: bool,
    shrunk: bool,
    executable: bool,
}

impl Source for FakeSource {
    fn failed(&self, _errno: Errno) {}

    fn open(&self, writable: bool) -> Result<OwnedFd> {
        match writable {
            true if self.readonly => Err(Errno::ROFS),
            true if self.busy => Err(Errno::TXTBSY),
            _ => Ok(tempfile::tempfile().unwrap().into()),
        }
    }

    fn facts(&self) -> Result<Facts> {
        Ok(Facts { size: if self.shrunk { 0 } else { 1 << 40 }, told_size: 1 << 30, executable: self.executable })
    }
}

struct Harness {
    window: Arc<Window>,
    taken: Arc<Taken>,
    made: Arc<Made>,
}

fn rig(guarded: bool) -> Harness {
    let (taken, made) = (Arc::new(Taken::default()), Arc::new(Made { guarded, ..Made::default() }));
    let window = Window::new(16 * RANGE, None, made.clone()).unwrap();
    window.connect(Arc::new(FakeFrontend(taken.clone(), made.clone())));
    window.announce();
    Harness { window, taken, made }
}

fn wait(ask: impl FnOnce(Answer) -> Result<()>) -> Result<()> {
    let (send, receive) = mpsc::channel();
    ask(Box::new(move |result| send.send(result).unwrap()))?;
    receive.recv().unwrap()
}

impl Harness {
    fn map(&self, range: u64, ranges: u64, from: u64, writable: bool, node: u64, source: FakeSource) -> Result<()> {
        let (at, len, from) = (range * RANGE, ranges * RANGE, from * RANGE);
        wait(|answer| self.window.map((at, len), from, writable, node, Arc::new(source), || answer))
    }

    /// Asks for a mapping of a node's file in the first range. The answer comes later.
    fn mapping(&self, node: u64) -> mpsc::Receiver<Result<()>> {
        let (send, answer) = mpsc::channel();
        let to = Box::new(move |result| send.send(result).unwrap());
        self.window.map((0, RANGE), 0, true, node, Arc::new(FakeSource::default()), || to).unwrap();
        answer
    }

    fn unmap(&self, parts: &[(u64, u64)]) -> Result<()> {
        let parts: Vec<_> = parts.iter().map(|(range, ranges)| (range * RANGE, ranges * RANGE)).collect();
        wait(|answer| self.window.unmap(&parts, || answer))
    }

    /// Proxy files of this kind wait until the second sender sends. The first receiver tells their ids.
    fn hold_up(&self, held: Kind) -> (mpsc::Receiver<u64>, mpsc::Sender<()>) {
        let ((tell, told), (go, wait)) = (mpsc::channel(), mpsc::channel());
        let wait = Mutex::new(wait);
        *self.made.opening.lock() = Some(Arc::new(move |id, kind| {
            if kind == held {
                tell.send(id).unwrap();
                wait.lock().recv_timeout(100 * SECOND).unwrap();
            }
        }));
        (told, go)
    }

    /// The kinds of what is mapped, by place.
    fn mapped(&self) -> Vec<(u64, Kind)> {
        let made = self.made.all.lock();
        let kind = |id| made.iter().find(|one| one.id == id).unwrap().kind;
        let mut mapped: Vec<_> = self.taken.mapped.lock().iter().map(|m| (m.0 / RANGE, kind(m.1))).collect();
        mapped.sort_unstable_by_key(|(at, _)| *at);
        mapped
    }

    fn revoke(&self, id: u64) {
        self.window.jobs.send(Job::Event(Event::Revoke(id), Instant::now()));
    }

    /// How many proxy files are open. They are closed before an unmapping is answered, and otherwise soon.
    fn open(&self) -> usize {
        self.kinds().len()
    }

    fn kinds(&self) -> Vec<Kind> {
        let mut all = self.made.all.lock();
        all.retain_mut(|one| one.end.read(&mut [0]).is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock));
        all.iter().map(|one| one.kind).collect()
    }
}

#[test]
fn a_file_has_one_proxy_file_as_long_as_it_is_mapped() {
    let rig = rig(true);
    for range in 0..3 {
        rig.map(range, 1, range, false, 7, FakeSource::default()).unwrap();
    }
    rig.map(8, 4, 100, true, 8, FakeSource::default()).unwrap();
    assert_eq!((rig.window.live(), rig.kinds()), (7, vec![Kind::Through; 2]));
    rig.unmap(&[(0, 2), (8, 4)]).unwrap();
    assert_eq!((rig.window.live(), rig.open()), (1, 1));
    // What is not mapped is no error.
    rig.unmap(&[(0, 16)]).unwrap();
    assert_eq!((rig.window.live(), rig.open(), rig.taken.mapped.lock().len()), (0, 0, 0));
}

#[test]
fn a_mapping_gives_way_to_a_new_one() {
    let rig = rig(true);
    rig.map(1, 1, 0, false, 7, FakeSource::default()).unwrap();
    rig.map(1, 1, 0, true, 7, FakeSource::default()).unwrap();
    // It was writable from the start.
    assert_eq!(rig.taken.calls.load(Ordering::Relaxed), 1);
    rig.map(0, 3, 4, true, 8, FakeSource::default()).unwrap();
    assert_eq!(rig.window.live(), 3);
    wait_until(|| rig.open() == 1);
}

#[test]
fn what_is_outside_or_askew_is_refused() {
    let rig = rig(true);
    for (at, len, from) in [
        (0, 0, 0),
        (0, 17 * RANGE, 0),
        (16 * RANGE, RANGE, 0),
        (4096, RANGE, 0),
        (0, 4096, 0),
        (0, RANGE, 4096),
        (u64::MAX - RANGE + 1, RANGE, 0),
        (RANGE, u64::MAX - RANGE + 1, 0),
        (0, RANGE, u64::MAX - RANGE + 1),
    ] {
        let source = Arc::new(FakeSource::default());
        let asked = rig.window.map((at, len), from, false, 7, source, || unreachable!("it is refused"));
        assert_eq!(asked.err(), Some(Errno::INVAL), "{at:x} {len:x} {from:x}");
    }
    assert_eq!(rig.window.unmap(&[(0, RANGE), (0, 17 * RANGE)], || unreachable!()).err(), Some(Errno::INVAL));
    rig.window.disconnect();
    assert_eq!(rig.window.unmap(&[(0, RANGE)], || unreachable!()).err(), Some(Errno::NODEV));
}

#[test]
fn what_the_guest_of_another_daemon_has_mapped_is_mapped_again() {
    let resumed = |range, from, source| {
        let (node, stored) = (range as u64, false);
        ResumedRange { range, node, from, stored, source: Arc::new(source) }
    };
    let plain = |range, from| resumed(range, from, FakeSource::default());
    let rig = rig(true);
    assert_eq!(rig.window.resume(vec![plain(15, 0), plain(3, 4 * RANGE)], true), Ok(()));
    assert_eq!(rig.mapped(), [(3, Kind::Through), (15, Kind::Through)]);
    assert_eq!(rig.window.mapped().unwrap().iter().map(|m| m.from / RANGE).collect::<Vec<_>>(), [4, 0]);
    // What is hostile changes nothing.
    for damaged in [
        vec![plain(0, 0), plain(0, RANGE)],
        vec![plain(16, 0)],
        vec![plain(usize::MAX, 0)],
        vec![plain(0, 4096)],
        vec![plain(0, u64::MAX - RANGE + 1)],
        vec![plain(0, i64::MAX as u64 + 1 - RANGE)],
    ] {
        assert_eq!(rig.window.resume(damaged, false), Err(Errno::INVAL));
    }
    assert_eq!(rig.window.live(), 2);
    // The guest stores to a file that this daemon may not write.
    let readonly = || {
        let source = FakeSource { readonly: true, ..Default::default() };
        ResumedRange { stored: true, ..resumed(1, 1 << 40, source) }
    };
    assert_eq!(rig.window.resume(vec![readonly()], true), Err(Errno::ROFS));
    assert_eq!(rig.window.live(), 2);
    assert_eq!((rig.window.resume(vec![readonly()], false), rig.window.live()), (Ok(()), 3));
    rig.unmap(&[(0, 16)]).unwrap();
    assert_eq!((rig.window.live(), rig.taken.mapped.lock().len()), (0, 0));
    wait_until(|| rig.open() == 0);
}

#[test]
fn what_must_not_be_mapped_itself_goes_through_the_cache() {
    for (guarded, source) in [
        (true, FakeSource { readonly: true, ..Default::default() }),
        (true, FakeSource { busy: true, ..Default::default() }),
        (true, FakeSource { shrunk: true, ..Default::default() }),
        (false, FakeSource { executable: true, ..Default::default() }),
    ] {
        let rig = rig(guarded);
        rig.map(0, 1, 0, false, 7, source).unwrap();
        assert!(rig.kinds().contains(&Kind::Cached));
        rig.window.reset();
        rig.unmap(&[]).unwrap();
        wait_until(|| rig.window.live() + rig.open() == 0);
    }
    let rig = rig(true);
    rig.map(0, 1, 0, false, 7, FakeSource { executable: true, ..Default::default() }).unwrap();
    assert_eq!(rig.kinds(), [Kind::Through]);
    let refused = rig.map(1, 1, 0, true, 8, FakeSource { readonly: true, ..Default::default() });
    assert_eq!((refused, rig.window.live()), (Err(Errno::ROFS), 1));
    wait_until(|| rig.open() == 1);
}

/// A page of the guest may reach past the last one that the file has on the host.
#[test]
fn where_a_file_ends_it_is_a_copy_if_the_guest_has_larger_pages() {
    use Kind::{Cached, Through};
    let file = tempfile::tempfile().unwrap();
    file.set_len(3 * RANGE + 5000).unwrap();
    let copied = if sys::page_size() < LARGEST_PAGE { Cached } else { Through };
    for (larger, last) in [(false, Through), (true, copied)] {
        let rig = rig(true);
        rig.window.small_pages(!larger);
        let source = Arc::new(OneFile(file.try_clone().unwrap()));
        wait(|answer| rig.window.map((0, 4 * RANGE), 0, false, 7, source, || answer)).unwrap();
        assert_eq!(rig.mapped(), [(0, Through), (1, Through), (2, Through), (3, last)]);
        // The guest cuts it off.
        rig.window.cut(7, RANGE + 1).unwrap();
        assert_eq!(rig.mapped(), [(0, Through), (1, last), (2, last), (3, last)]);
        rig.window.cut(7, 0).unwrap();
        assert_eq!(rig.mapped(), [0, 1, 2, 3].map(|at| (at, last)));
        rig.unmap(&[(0, 16)]).unwrap();
        wait_until(|| rig.open() == 0);
    }
}

#[test]
fn a_revoked_file_keeps_its_mappings_but_not_its_pages() {
    let rig = rig(true);
    rig.map(0, 3, 0, true, 7, FakeSource::default()).unwrap();
    rig.map(5, 1, 0, true, 8, FakeSource::default()).unwrap();
    let id = rig.taken.mapped.lock().iter().find(|m| m.0 == 0).unwrap().1;
    rig.revoke(id);
    wait_until(|| {
        let mapped = rig.taken.mapped.lock();
        mapped.len() == 4 && mapped.iter().all(|m| m.1 != id)
    });
    assert!(rig.kinds().contains(&Kind::Cached));
    // When it is over, they are the file's again.
    wait_until(|| rig.mapped().iter().all(|(_, kind)| *kind == Kind::Through));
    rig.map(6, 1, 9, true, 7, FakeSource::default()).unwrap();
    assert!(rig.taken.mapped.lock().iter().all(|m| m.1 != id));
    rig.unmap(&[(0, 16)]).unwrap();
    assert_eq!((rig.window.live(), rig.open()), (0, 0));
}

/// Whoever revokes does not wait for it.
#[test]
fn a_file_that_is_revoked_while_it_is_opened_is_not_mapped_itself() {
    let rig = rig(true);
    let (told, go) = rig.hold_up(Kind::Through);
    let answer = rig.mapping(7);
    let id = told.recv().unwrap();
    rig.revoke(id);
    // The thread is done with it when it shows what is mapped.
    let (send, shown) = mpsc::channel();
    rig.window.show(move |mappings| send.send(mappings).unwrap());
    assert!(shown.recv().unwrap().is_empty());
    go.send(()).unwrap();
    assert_eq!(answer.recv().unwrap(), Ok(()));
    assert_eq!(rig.mapped(), [(0, Kind::Cached)]);
    rig.unmap(&[(0, 16)]).unwrap();
    wait_until(|| rig.open() == 0);
}

/// The window process may be busy with another file.
#[test]
fn a_file_is_taken_back_in_time_even_if_nothing_takes_its_place_yet() {
    let rig = rig(true);
    rig.map(0, 2, 0, true, 7, FakeSource::default()).unwrap();
    let id = rig.taken.mapped.lock()[0].1;
    let (told, go) = rig.hold_up(Kind::Cached);
    rig.revoke(id);
    told.recv().unwrap();
    // The guest has its pages until then.
    wait_until(|| rig.mapped().is_empty());
    assert_eq!(rig.window.live(), 0);
    go.send(()).unwrap();
    // Soon the pages are the file's again.
    wait_until(|| rig.mapped() == [(0, Kind::Through), (1, Kind::Through)]);
    rig.unmap(&[(0, 16)]).unwrap();
    assert_eq!((rig.window.live(), rig.mapped().len()), (0, 0));
}

/// A job of a session that has ended is not carried over into the next one.
#[test]
fn what_a_worker_opens_for_a_session_that_has_ended_is_not_mapped() {
    let rig = rig(true);
    let (told, go) = rig.hold_up(Kind::Through);
    let answer = rig.mapping(7);
    told.recv().unwrap();
    *rig.made.opening.lock() = None;
    rig.window.reset();
    rig.map(1, 1, 0, true, 8, FakeSource::default()).unwrap();
    go.send(()).unwrap();
    assert_eq!(answer.recv().unwrap(), Err(Errno::STALE));
    assert_eq!(rig.mapped(), [(1, Kind::Through)]);
    rig.unmap(&[(0, 16)]).unwrap();
    wait_until(|| rig.open() == 0);
}

#[test]
fn a_mapping_that_the_frontend_still_has_is_replaced() {
    let rig = rig(true);
    rig.taken.mapped.lock().push((0, 99, 0, RANGE));
    rig.map(0, 1, 0, true, 7, FakeSource::default()).unwrap();
    assert_eq!(rig.taken.mapped.lock().len(), 1);
}

/// A passthrough window whose mapper takes a turn when it is told to, and a guest that sees the table.
struct Stepped {
    rig: fuzzing::Harness,
    taken: Arc<Taken>,
    made: Arc<Made>,
    guest: Arc<vm_memory::mmap::MmapRegion>,
}

impl Stepped {
    fn new(size: u64, slots: usize) -> Self {
        Self::with(Settings { size, slots, writable: Writable::InPlace, patience: PATIENCE })
    }

    fn with(settings: Settings) -> Self {
        Self::touching(settings, Box::new(touch))
    }

    /// `touch`: sets the times of a file.
    fn touching(settings: Settings, touch: Touch) -> Self {
        let (taken, made) = (Arc::new(Taken::default()), Arc::new(Made { guarded: true, ..Made::default() }));
        let rig = fuzzing::Harness::with(0, settings, made.clone(), touch).unwrap();
        rig.window.connect(Arc::new(FakeFrontend(taken.clone(), made.clone())));
        rig.window.announce();
        let table = std::fs::File::from(rig.table().try_clone_to_owned().unwrap());
        let guest = vm_memory::mmap::MmapRegion::from_file(vm_memory::FileOffset::new(table, 0), TABLE_LEN as usize);
        let mut stepped = Self { rig, taken, made, guest: Arc::new(guest.unwrap()) };
        stepped.start();
        stepped
    }

    fn start(&mut self) {
        let (send, receive) = mpsc::channel();
        self.rig.pass().start(Box::new(move |result| send.send(result).unwrap()));
        while self.rig.turn() {}
        assert_eq!(receive.recv().unwrap(), Ok(()));
    }

    /// The guest opens a file. Its entry, once the mapper has decided.
    fn open(&mut self, node: u64, file: &std::fs::File) -> Option<u32> {
        self.open_at(node, file, Instant::now())
    }

    fn open_at(&mut self, node: u64, file: &std::fs::File, now: Instant) -> Option<u32> {
        let told = self.opening(node, file);
        self.turns(now);
        told.try_recv().unwrap().unwrap()
    }

    fn turns(&mut self, now: Instant) {
        while self.rig.turn_at(now) {}
    }

    /// A fault of the guest.
    fn ask(&mut self, node: u64, now: Instant) -> Result<()> {
        self.ask_at(node, 0, now)
    }

    fn ask_at(&mut self, node: u64, from: u64, now: Instant) -> Result<()> {
        let (send, receive) = mpsc::channel();
        self.rig.pass().ask(node, from, 4096, true, Box::new(move |result| send.send(result).unwrap()));
        self.turns(now);
        receive.try_recv().unwrap()
    }

    /// The guest makes a file longer, by a message.
    fn grow(&self, node: u64, file: &std::fs::File, to: u64) {
        let at = file.metadata().unwrap().len();
        file.write_all_at(&vec![b'g'; (to - at) as usize], at).unwrap();
        self.rig.pass().wrote(node, file.as_fd(), Some(at), to - at);
    }

    /// How long the pieces of an entry's slot are. They are a file's, from its first byte on, without a gap.
    fn pieces(&self, index: u32) -> Vec<u64> {
        let entry = self.rig.record(index);
        let mut mapped = self.taken.mapped.lock().clone();
        mapped.sort_unstable();
        let (begin, end) = (place(WHOLE_FILES, entry.offset), place(WHOLE_FILES, entry.offset + entry.length));
        mapped.retain(|m| m.0 < end && begin < m.0 + m.3);
        let mut next = 0;
        for (at, id, from, len) in &mapped {
            assert_eq!((*at, *id, *from), (begin + next, mapped[0].1, next));
            next += len;
        }
        assert_eq!(next, entry.length);
        mapped.iter().map(|m| m.3).collect()
    }

    fn revocations(&self) -> u32 {
        self.guest.as_volatile_slice().load(24, Ordering::Acquire).unwrap()
    }

    fn state(&self, index: u32) -> fuzzing::EntryState {
        self.rig.record(index).state
    }

    fn acknowledge(&self, index: u32) {
        self.word(index, 0, self.rig.record(index).generation);
    }

    fn opening(&mut self, node: u64, file: &std::fs::File) -> mpsc::Receiver<Result<Option<u32>>> {
        let (tell, told) = mpsc::channel();
        let source = OneFile(file.try_clone().unwrap());
        let opened = self.rig.pass().open(node, file.as_fd(), Some(Arc::new(source)));
        assert!(opened.is_pending(), "the mapper has not been asked yet");
        self.rig.pass().decided(node, Box::new(move |opened| tell.send(opened).unwrap()));
        told
    }

    /// The guest writes one of its words (docs/protocol.md): 0 acknowledgement, 1 stored, 2 used.
    fn word(&self, index: u32, word: usize, value: u32) {
        let at = 64 * 4096 + 16 * index as usize + 4 * word;
        self.guest.as_volatile_slice().store(value.to_le(), at, Ordering::Release).unwrap();
    }
}

/// A file without holes.
fn full_file(len: usize) -> std::fs::File {
    let mut file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.write_all(&vec![b'r'; len]).unwrap();
    file
}

#[test]
fn what_the_guest_stores_moves_the_times_now_and_then_and_when_the_slot_goes() {
    let mut window = Stepped::new(4 * RANGE, 2);
    let file = full_file(5000);
    let index = window.open(7, &file).unwrap();
    let past = UNIX_EPOCH + Duration::from_secs(1000);
    let old = || file.set_times(std::fs::FileTimes::new().set_accessed(past).set_modified(past)).unwrap();
    let is_old = || {
        assert_eq!(file.metadata().unwrap().accessed().unwrap(), past);
        file.metadata().unwrap().modified().unwrap() == past
    };
    let mut now = Instant::now();
    window.rig.turn_at(now);
    old();
    for stores in [true, false, true] {
        if stores {
            window.word(index, 1, 1);
        }
        now += Duration::from_secs(5);
        window.rig.turn_at(now);
        // Another thread does it.
        wait_until(|| !stores || !is_old());
        assert_eq!(is_old(), !stores);
        old();
    }
    window.rig.turn_at(now + Duration::from_secs(4));
    window.word(index, 1, 1);
    window.rig.turn_at(now + Duration::from_secs(4));
    assert!(is_old());
    // The file gives way to another one.
    window.rig.pass().release(7);
    assert!(is_old());
    window.rig.pass().forget(7);
    window.rig.turn_at(now);
    wait_until(|| !is_old());
    // The session ends.
    let index = window.open(7, &file).unwrap();
    old();
    window.word(index, 1, 1);
    window.rig.window.reset();
    wait_until(|| !is_old());
}

/// Whether it is so comes from another thread.
fn wait_until(mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + 20 * SECOND;
    while !is_so() {
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(1));
    }
}

/// A process of the host writes to a file, or its file system is frozen.
#[test]
fn a_file_that_is_slow_to_get_its_times_delays_nobody() {
    let (begin, begun) = mpsc::channel();
    let (go, wait) = mpsc::channel();
    let wait = Mutex::new(wait);
    let touch = move |_: BorrowedFd<'_>| {
        begin.send(()).unwrap();
        // The mapper would be the one to wait.
        wait.lock().recv_timeout(20 * SECOND).unwrap();
        Ok(())
    };
    let settings = Settings { size: 8 * RANGE, slots: 4, writable: Writable::InPlace, patience: PATIENCE };
    let mut window = Stepped::touching(settings, Box::new(touch));
    let now = Instant::now();
    let (slow, other) = (full_file(5000), full_file(5000));
    let (slow_at, other_at) = (window.open_at(7, &slow, now).unwrap(), window.open_at(8, &other, now).unwrap());
    let proxy = |window: &Stepped, index| {
        let at = place(WHOLE_FILES, window.rig.record(index).offset);
        window.taken.mapped.lock().iter().find(|m| m.0 == at).unwrap().1
    };
    for index in [slow_at, other_at] {
        // The guest stores to it, and a process of the host truncates it.
        if index == slow_at {
            window.word(index, 1, 1);
        }
        window.rig.event(Event::Revoke(proxy(&window, index)));
        window.turns(now);
        window.acknowledge(index);
        window.turns(now);
        assert_eq!(window.state(index), fuzzing::EntryState::Revoked);
        if index == slow_at {
            begun.recv().unwrap();
        }
    }
    // A worker sees that a request must wait, and that others need not.
    let pass = window.rig.pass().clone();
    assert_eq!((pass.owes_times(7), pass.owes_times(8)), (true, false));
    // Its index goes to another file, which has nothing to do with it.
    pass.release(7);
    window.turns(now);
    assert_eq!(window.open_at(9, &full_file(5000), now), Some(slow_at));
    assert_eq!((pass.owes_times(7), pass.owes_times(9)), (true, false));
    let waits = thread::spawn(move || pass.settle_times(7));
    go.send(()).unwrap();
    waits.join().unwrap();
    assert!(!window.rig.pass().owes_times(7));
}

const LIVE: fuzzing::EntryState = fuzzing::EntryState::Live { writable: true };
const REVOKING: fuzzing::EntryState = fuzzing::EntryState::Revoking { writable: true };
const SECOND: Duration = Duration::from_secs(1);

/// A request looks at the file, and waits for its lock.
#[test]
fn who_looks_at_a_file_delays_no_revocation_of_it() {
    let mut window = Stepped::new(4 * RANGE, 2);
    let file = full_file(5000);
    let index = window.open(7, &file).unwrap();
    let id = window.taken.mapped.lock().last().unwrap().1;
    let pass = window.rig.pass().clone();
    let core = window.rig.core().clone();
    let look = core.look(index, &MayWait::without_a_turn());
    window.rig.event(Event::Revoke(id));
    window.rig.turn();
    assert_eq!(window.state(index), REVOKING);
    window.acknowledge(index);
    window.rig.turn();
    assert_eq!((window.state(index), window.rig.live()), (fuzzing::EntryState::Revoked, [0, 0, 1]));
    // What it finds says nothing of the entry's next node.
    pass.release(7);
    window.rig.turn();
    let next = window.opening(8, &file);
    assert_eq!(look.update(|entry| entry.resize(1)), Err(Errno::STALE));
    drop(look);
    window.turns(Instant::now());
    assert_eq!((next.recv().unwrap(), window.rig.record(index).size), (Ok(Some(index)), 5000));
}

/// A host process takes a file back that a worker is about to map.
#[test]
fn a_file_that_is_revoked_while_it_is_opened_gets_no_slot() {
    let mut window = Stepped::new(4 * RANGE, 2);
    let mapper = window.rig.mapper().clone();
    *window.made.opening.lock() = Some(Arc::new(move |id, _| {
        let now = Instant::now();
        mapper.turn(Some(Job::Event(Event::Revoke(id), now)), now);
    }));
    assert_eq!(window.open(7, &full_file(5000)), None);
    assert_eq!((window.rig.live(), window.taken.mapped.lock().len()), ([0, 0, 1], 1));
}

#[test]
fn an_idle_slot_gives_way_to_a_file_that_is_opened() {
    let mut window = Stepped::new(4 * RANGE, 2);
    let mut now = Instant::now();
    let (busy, idle) = (full_file(5000), full_file(5000));
    let (busy, idle) = (window.open_at(7, &busy, now).unwrap(), window.open_at(8, &idle, now).unwrap());
    // One look is not enough.
    assert_eq!(window.open_at(9, &full_file(5000), now), None);
    now += SECOND - Duration::from_millis(1);
    window.word(busy, 2, 1);
    assert_eq!(window.open_at(10, &full_file(5000), now), None);
    now += SECOND / 2;
    window.word(busy, 2, 1);
    let told = window.opening(11, &full_file(5000));
    window.turns(now);
    assert!(told.try_recv().is_err(), "it waits");
    assert_eq!((window.state(busy), window.state(idle)), (LIVE, REVOKING));
    // So does the next one. It takes no other slot meanwhile.
    let next = window.opening(12, &full_file(5000));
    window.turns(now);
    assert_eq!((window.state(busy), next.try_recv().is_err()), (LIVE, true));
    window.acknowledge(idle);
    window.turns(now);
    let new = told.try_recv().unwrap().unwrap().unwrap();
    assert_eq!((window.state(idle), window.state(new)), (fuzzing::EntryState::Revoked, LIVE));
    assert_eq!(next.try_recv().unwrap().unwrap(), None, "there was one");
    assert_eq!(window.rig.live(), [0, 2, 1]);
    // The node's other opens have the entry that it has lost the slot of.
    assert_eq!(window.rig.pass().open(8, full_file(1).as_fd(), None), Poll::Ready(Some(idle)));
    // A guest that does not let go: the open is by messages.
    now += SECOND;
    window.rig.turn_at(now);
    for used in [busy, new] {
        window.word(used, 2, 1);
    }
    assert_eq!(window.open_at(13, &full_file(5000), now), None);
    now += SECOND;
    assert_eq!(window.open_at(14, &full_file(5000), now), None);
    now += SECOND;
    let told = window.opening(15, &full_file(5000));
    window.turns(now);
    assert!(told.try_recv().is_err());
    window.turns(now + SECOND);
    assert!(told.try_recv().is_err());
    window.turns(now + 2 * SECOND);
    assert_eq!(told.try_recv().unwrap().unwrap(), None);
}

#[test]
fn a_fault_is_always_served() {
    let mut window = Stepped::new(4 * RANGE, 1);
    let mut now = Instant::now();
    let (one, two) = (full_file(5000), full_file(5000));
    let first = window.open_at(1, &one, now).unwrap();
    window.turns(now);
    assert_eq!(window.open_at(3, &full_file(5000), now), None);
    now += SECOND;
    let told = window.opening(2, &two);
    window.turns(now);
    window.acknowledge(first);
    window.turns(now);
    let second = told.try_recv().unwrap().unwrap().unwrap();
    // Both are open, and there is one slot. It stays for a moment.
    let nodes = [(1, first, second), (2, second, first)];
    for (node, index, other) in nodes.into_iter().cycle().take(6) {
        assert_eq!((window.state(index), window.state(other)), (fuzzing::EntryState::Revoked, LIVE));
        assert_eq!((window.ask(node, now), window.state(other)), (Err(Errno::AGAIN), LIVE));
        now += SECOND / 20;
        window.word(other, 2, 1);
        assert_eq!((window.ask(node, now), window.state(other)), (Err(Errno::AGAIN), REVOKING));
        assert_eq!(window.ask(node, now), Err(Errno::AGAIN));
        window.acknowledge(other);
        window.turns(now);
        assert_eq!((window.ask(node, now), window.state(index)), (Ok(()), LIVE));
        assert_eq!(window.rig.live(), [0, 1, 1]);
    }
    // It never fits.
    one.set_len(5 * RANGE).unwrap();
    now += SECOND;
    assert_eq!((window.ask(1, now), window.state(second)), (Err(Errno::NOSPC), LIVE));
    assert_eq!((window.ask(2, now), window.ask(3, now)), (Ok(()), Err(Errno::BADF)));
}

#[test]
fn the_least_used_slot_gives_way_to_a_fault_and_no_more_than_needed() {
    let mut window = Stepped::new(8 * RANGE, 7);
    let mut now = Instant::now();
    // Each takes two ranges, but for the last.
    let files: Vec<_> = (0..4).map(|_| full_file(RANGE as usize - 1)).collect();
    let all: Vec<u32> = (0..4).map(|n| window.open_at(n, &files[n as usize], now).unwrap()).collect();
    let states = |window: &Stepped| all.iter().map(|index| window.state(*index)).collect::<Vec<_>>();
    window.rig.turn_at(now);
    now += SECOND;
    // Two are in use. Of the others, the last one is too short and the third is enough.
    for n in [0, 1] {
        window.word(all[n], 2, 1);
    }
    assert_eq!(window.open_at(9, &full_file(2 * RANGE as usize), now), None);
    now += SECOND;
    for n in [0, 1] {
        window.word(all[n], 2, 1);
    }
    let told = window.opening(10, &full_file(2 * RANGE as usize));
    window.turns(now);
    assert_eq!(states(&window), [LIVE, LIVE, REVOKING, LIVE]);
    window.acknowledge(all[2]);
    window.turns(now);
    let tenth = told.try_recv().unwrap().unwrap().unwrap();
    now += SECOND;
    // A fault of the third: the first one was not used since, and is the last in turn.
    for index in [all[1], all[3], tenth] {
        window.word(index, 2, 1);
    }
    assert_eq!(window.ask(2, now), Err(Errno::AGAIN));
    assert_eq!(states(&window), [REVOKING, LIVE, fuzzing::EntryState::Revoked, LIVE]);
    window.acknowledge(all[0]);
    window.turns(now);
    assert_eq!(window.ask(2, now), Ok(()));
    assert_eq!(states(&window), [fuzzing::EntryState::Revoked, LIVE, LIVE, LIVE]);
    // A file that is used by messages gets a slot again if one is idle.
    now += SECOND;
    window.rig.turn_at(now);
    let read = |window: &mut Stepped, now| {
        for _ in 0..16 {
            window.rig.pass().missed(0);
        }
        window.turns(now);
    };
    for index in [all[1], all[2], all[3], tenth] {
        window.word(index, 2, 1);
    }
    read(&mut window, now);
    assert_eq!(states(&window), [fuzzing::EntryState::Revoked, LIVE, LIVE, LIVE]);
    now += SECOND;
    for index in [all[1], all[2], tenth] {
        window.word(index, 2, 1);
    }
    read(&mut window, now);
    now += SECOND;
    for index in [all[1], all[2], tenth] {
        window.word(index, 2, 1);
    }
    read(&mut window, now);
    assert_eq!(states(&window), [fuzzing::EntryState::Revoked, LIVE, LIVE, REVOKING]);
    window.acknowledge(all[3]);
    window.turns(now);
    assert_eq!(states(&window), [LIVE, LIVE, LIVE, fuzzing::EntryState::Revoked]);
}

#[test]
fn a_file_grows_behind_its_slot_without_a_revocation() {
    let mut window = Stepped::new(33 * RANGE, 6);
    let now = Instant::now();
    let file = full_file(5000);
    let index = window.open_at(7, &file, now).unwrap();
    let other = window.open_at(8, &full_file(5000), now).unwrap();
    let before = window.rig.record(index);
    assert_eq!((before.offset, before.length), (0, RANGE));
    // The guest finds the new length only when there is something.
    let guest = window.guest.clone();
    *window.taken.may.lock() = Some(Box::new(move |mapping| {
        let length: u64 = guest.as_volatile_slice().load(64 * index as usize + 16, Ordering::Acquire).unwrap();
        assert!(mapping.from == 0 || mapping.from == length);
        Ok(())
    }));
    for (to, pieces) in [(RANGE, 1), (RANGE + 1, 2), (3 * RANGE, 2), (4 * RANGE, 3)] {
        window.grow(7, &file, to);
        window.turns(now);
        let entry = window.rig.record(index);
        assert_eq!((entry.size, entry.generation, entry.offset), (to, before.generation, before.offset));
        assert!(entry.length >= to && entry.state == LIVE);
        assert_eq!(window.pieces(index).len(), pieces);
    }
    assert_eq!(window.pieces(index), [RANGE, 2 * RANGE, 5 * RANGE]);
    assert_eq!(window.revocations(), 0);
    // Another file is right behind, so this one moves.
    assert_eq!(window.rig.record(other).offset, 8 * RANGE);
    window.grow(7, &file, 8 * RANGE + 1);
    window.turns(now);
    assert_eq!((window.state(index), window.revocations()), (REVOKING, 1));
    window.acknowledge(index);
    window.turns(now);
    assert_eq!((window.state(index), window.pieces(index).len()), (LIVE, 1));
    assert_eq!(window.rig.live(), [0, 2, 1]);
}

#[test]
fn a_fault_past_a_slot_is_served_at_once_if_the_slot_can_grow() {
    let mut window = Stepped::new(17 * RANGE, 4);
    let now = Instant::now();
    let file = full_file(5000);
    let index = window.open_at(7, &file, now).unwrap();
    // The daemon has not heard of a slot that is too short yet.
    window.rig.pass().ask(7, RANGE, 4096, true, Box::new(|asked| assert_eq!(asked, Ok(()))));
    window.grow(7, &file, RANGE + 1);
    window.turns(now);
    assert_eq!((window.state(index), window.pieces(index)), (LIVE, vec![RANGE, 2 * RANGE]));
    assert_eq!((window.ask_at(7, 2 * RANGE, now), window.ask_at(7, 3 * RANGE, now)), (Ok(()), Err(Errno::FAULT)));
}

#[test]
fn only_kept_slots_give_way_to_one_that_grows() {
    let mut window = Stepped::new(33 * RANGE, 3);
    let now = Instant::now();
    let files: Vec<_> = (0..3).map(|_| full_file(5000)).collect();
    let all: Vec<u32> = (0..3).map(|n| window.open_at(n, &files[n as usize], now).unwrap()).collect();
    assert_eq!([0, 1].map(|n: usize| window.rig.record(all[n]).offset), [0, 8 * RANGE]);
    window.rig.pass().release(1);
    window.grow(0, &files[0], 8 * RANGE + 1);
    window.turns(now);
    assert_eq!((window.pieces(all[0]), window.revocations()), (vec![RANGE, 16 * RANGE], 0));
    assert_eq!((window.state(all[1]), window.rig.live()), (fuzzing::EntryState::Free, [0, 3, 1]));
    // There is room for more of it, but not for another mapping.
    window.grow(0, &files[0], 17 * RANGE + 1);
    window.turns(now);
    assert_eq!((window.state(all[0]), window.state(all[2]), window.rig.live()), (REVOKING, LIVE, [0, 3, 1]));
}

#[test]
fn a_file_takes_eight_mappings_at_most() {
    let mut window =
        Stepped::with(Settings { size: 600 * RANGE, slots: 20, writable: Writable::Always, patience: PATIENCE });
    let now = Instant::now();
    let file = full_file(5000);
    let index = window.open_at(7, &file, now).unwrap();
    let sizes = (1..8).map(|n| ((1 << n) - 1) * RANGE + 1);
    let grow = |window: &mut Stepped, to| {
        window.rig.pass().truncate(7, to, || file.set_len(to).map_err(|_| Errno::IO), || Ok(to)).unwrap();
        window.turns(now);
    };
    sizes.for_each(|to| grow(&mut window, to));
    assert_eq!(window.pieces(index), (0..8).map(|n| RANGE << n).collect::<Vec<_>>());
    assert_eq!((window.revocations(), window.rig.live()), (0, [0, 8, 1]));
    grow(&mut window, 255 * RANGE + 1);
    assert_eq!((window.state(index), window.rig.live()), (REVOKING, [0, 8, 1]));
    window.acknowledge(index);
    window.turns(now);
    assert_eq!((window.state(index), window.pieces(index).len(), window.rig.live()), (LIVE, 1, [0, 1, 1]));
}

#[test]
fn a_slot_does_not_grow_if_the_frontend_does_not_map() {
    let mut window = Stepped::new(17 * RANGE, 4);
    let now = Instant::now();
    let file = full_file(5000);
    let index = window.open_at(7, &file, now).unwrap();
    let refuse = |kind: io::ErrorKind| -> Option<Box<May>> {
        Some(Box::new(move |mapping| if mapping.from > 0 { Err(kind.into()) } else { Ok(()) }))
    };
    // The guest has switched the device's memory off, perhaps. Later all is well.
    *window.taken.may.lock() = refuse(io::ErrorKind::TimedOut);
    window.grow(7, &file, RANGE + 1);
    window.turns(now);
    assert_eq!((window.state(index), window.pieces(index)), (LIVE, vec![RANGE]));
    *window.taken.may.lock() = None;
    assert_eq!(window.ask_at(7, RANGE, now), Ok(()));
    assert_eq!((window.pieces(index), window.rig.live()), (vec![RANGE, 2 * RANGE], [0, 2, 1]));
    // It does not want to: the file moves.
    *window.taken.may.lock() = refuse(io::ErrorKind::Other);
    window.grow(7, &file, 3 * RANGE + 1);
    window.turns(now);
    assert_eq!((window.state(index), window.pieces(index)), (REVOKING, vec![RANGE, 2 * RANGE]));
    window.acknowledge(index);
    window.turns(now);
    assert_eq!((window.pieces(index), window.rig.live()), (vec![7 * RANGE], [0, 1, 1]));
}

#[test]
fn a_slot_that_has_grown_goes_as_a_whole() {
    let mut window = Stepped::new(17 * RANGE, 4);
    let now = Instant::now();
    let file = full_file(5000);
    let grown = |window: &mut Stepped| {
        let index = window.open_at(7, &file, now).unwrap();
        window.grow(7, &file, RANGE + 1);
        window.turns(now);
        assert_eq!(window.pieces(index), [RANGE, 2 * RANGE]);
        index
    };
    let truncate = |window: &mut Stepped| {
        let shrink = || file.set_len(5000).map_err(|_| Errno::IO);
        window.rig.pass().truncate(7, 5000, shrink, || Ok(5000)).unwrap();
        window.turns(now);
    };
    // A shorter file keeps its slot, and so does one that nobody has open. Then it gives way as a whole.
    let index = grown(&mut window);
    truncate(&mut window);
    assert_eq!((window.rig.record(index).length, window.revocations()), (3 * RANGE, 0));
    window.rig.pass().release(7);
    assert_eq!(window.rig.live(), [0, 2, 1]);
    assert_eq!(
        window.rig.pass().open(7, file.as_fd(), Some(Arc::new(OneFile(file.try_clone().unwrap())))),
        Poll::Ready(Some(index))
    );
    assert_eq!(window.pieces(index).len(), 2);
    window.rig.pass().release(7);
    let long = window.open_at(8, &full_file(15 * RANGE as usize), now).unwrap();
    assert_eq!((window.rig.live(), window.pieces(long)), ([0, 1, 1], vec![15 * RANGE]));
    window.rig.pass().release(8);
    // A guest that does not let go in time gets other memory for all of it, until it does.
    let index = grown(&mut window);
    let (id, at) = (window.taken.mapped.lock().last().unwrap().1, window.rig.record(index).offset);
    let generation = window.rig.record(index).generation;
    window.rig.event(Event::Revoke(id));
    let until = Instant::now() + 20 * SECOND;
    while window.state(index) != fuzzing::EntryState::Revoked {
        assert!(Instant::now() < until);
        window.turns(now);
    }
    let late = *window.taken.mapped.lock().last().unwrap();
    assert_eq!((late.0, late.2, late.3), (place(WHOLE_FILES, at), 0, 3 * RANGE));
    assert_eq!((window.rig.live(), late.1 != id), ([0, 1, 1], true));
    window.word(index, 0, generation);
    window.turns(now);
    assert!(!window.taken.mapped.lock().contains(&late));
    // And so does the end of the session.
    window.rig.window.reset();
    window.start();
    truncate(&mut window);
    grown(&mut window);
    window.rig.window.reset();
    window.start();
    assert_eq!((window.rig.live(), window.taken.mapped.lock().len()), ([0, 0, 1], 1));
}

/// The guard does not know how long the mapper was busy.
#[test]
fn a_process_waits_from_when_the_daemon_hears_of_it() {
    let mut window = Stepped::new(4 * RANGE, 2);
    let now = Instant::now();
    let (later, before) = (now + 3600 * SECOND, now - 2 * SECOND);
    for (since, state) in [(later, REVOKING), (before, fuzzing::EntryState::Revoked)] {
        let index = window.open_at(7, &full_file(5000), now).unwrap();
        let id = window.taken.mapped.lock().last().unwrap().1;
        window.rig.event_at(Event::Revoke(id), since);
        window.turns(now);
        assert_eq!(window.state(index), state);
        window.rig.window.reset();
        window.start();
    }
}

#[test]
fn a_guest_that_never_lets_go_is_looked_at_less_often() {
    let mut window = Stepped::new(4 * RANGE, 4);
    let now = Instant::now();
    let file = full_file(5000);
    let index = window.open_at(7, &file, now).unwrap();
    window.grow(7, &file, RANGE + 1);
    window.turns(now);
    assert_eq!((window.state(index), window.rig.patience()), (REVOKING, Some(Duration::from_millis(1))));
    window.turns(now + SECOND);
    assert_eq!(window.rig.patience(), Some(Duration::from_millis(100)));
}

/// Only where the tests' directory is on a file system with blocks.
#[test]
fn a_long_file_is_allocated_in_parts() {
    let dir = std::fs::File::open(env!("CARGO_MANIFEST_DIR")).unwrap();
    if Stores::of(dir.as_fd()) != Ok(Stores::InPlace) {
        return;
    }
    let mut window = Stepped::new(33 * RANGE, 4);
    let now = Instant::now();
    let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    file.write_all_at(&[b'r'; 5000], 0).unwrap();
    let index = window.open_at(7, &file, now).unwrap();
    let grow = || file.set_len(3 * RANGE).map_err(|_| Errno::IO);
    window.rig.pass().truncate(7, 3 * RANGE, grow, || Ok(3 * RANGE)).unwrap();
    window.turns(now);
    assert_eq!(window.state(index), REVOKING);
    window.acknowledge(index);
    window.turns(now);
    assert_eq!(window.state(index), fuzzing::EntryState::Live { writable: false });
    // Others need not wait until all of it is done. In a test, a part is one range.
    let again = Err(Errno::AGAIN);
    assert_eq!([0; 3].map(|at| window.ask_at(7, at, now)), [again, again, Ok(())]);
    assert_eq!((window.state(index), window.rig.record(index).size), (LIVE, 3 * RANGE));
    assert!(file.metadata().unwrap().blocks() * 512 >= 3 * RANGE);
}

/// A load from a hole takes memory.
#[test]
fn a_long_file_in_memory_is_allocated_in_parts() {
    let mut window = Stepped::new(33 * RANGE, 4);
    let now = Instant::now();
    let file = full_file(5000);
    let index = window.open_at(7, &file, now).unwrap();
    let grow = || file.set_len(4 * RANGE).map_err(|_| Errno::IO);
    window.rig.pass().truncate(7, 4 * RANGE, grow, || Ok(4 * RANGE)).unwrap();
    window.turns(now);
    window.acknowledge(index);
    window.turns(now);
    assert_eq!(window.state(index), fuzzing::EntryState::Revoked);
    let blocks = || file.metadata().unwrap().blocks() * 512;
    let (mut parts, mut before) = (0, blocks());
    // The file must not come back sooner than the host's process sees that it is gone.
    wait_until(|| {
        let asked = window.ask_at(7, 0, now);
        assert!(asked == Ok(()) || asked == Err(Errno::AGAIN));
        assert!(blocks() <= before + RANGE);
        parts += usize::from(blocks() > before);
        if parts == 2 {
            // Others take away what was allocated first.
            let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&file, punch, 0, RANGE).unwrap();
        }
        before = blocks();
        asked == Ok(())
    });
    assert_eq!((window.state(index), blocks(), parts), (LIVE, 4 * RANGE, 5));
}

#[test]
fn a_session_that_ends_while_files_are_mapped_leaves_no_entry_and_no_open_unanswered() {
    let mut window = Stepped::new(4 * RANGE, 1);
    let file = tempfile::tempfile().unwrap();
    let told = window.opening(7, &file);
    // The mapper comes to the open only now, when its session is over.
    window.rig.window.reset();
    assert_eq!(told.recv().unwrap(), Err(Errno::IO));
    window.start();
    assert!((1..4096).all(|index| window.rig.record(index) == fuzzing::Record::default()));
    assert_eq!((window.rig.live(), window.taken.mapped.lock().len()), ([0, 0, 1], 1));
}
