//! The mapper against a frontend and proxy files that only take note.

use std::io::Read;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::Duration;

use parking_lot::Mutex;

use super::proxy::{Event, Kind, Opened};
use super::*;

/// Live mappings as the frontend has them, by range: the proxy file's id.
#[derive(Default)]
struct Taken {
    mapped: Mutex<Vec<(u64, u64)>>,
    calls: AtomicUsize,
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
        self.0.mapped.lock().iter().filter(|mapped| mapped.1 == id).count()
    }

    fn map(&self, mapping: &Mapping) -> io::Result<()> {
        let Mapping { region, at, len, file, .. } = *mapping;
        assert!(region != DAX || len == RANGE);
        self.0.calls.fetch_add(1, Ordering::Relaxed);
        let id = self.id(file);
        let mut mapped = self.0.mapped.lock();
        if mapped.iter().any(|m| m.0 == at) {
            return Err(io::Error::other("overlap"));
        }
        mapped.push((at, id));
        Ok(())
    }

    fn unmap(&self, mapping: &Mapping) -> io::Result<()> {
        let at = mapping.at;
        let mut mapped = self.0.mapped.lock();
        let before = mapped.len();
        mapped.retain(|m| m.0 != at);
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
}

impl ProxyFiles for Made {
    fn open(&self, id: u64, kind: Kind, _real: BorrowedFd) -> io::Result<Opened> {
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

struct Rig {
    window: Arc<Window>,
    taken: Arc<Taken>,
    made: Arc<Made>,
}

fn rig(guarded: bool) -> Rig {
    let (taken, made) = (Arc::new(Taken::default()), Arc::new(Made { guarded, ..Made::default() }));
    let window = Window::new(16 * RANGE, None, made.clone()).unwrap();
    window.connect(Arc::new(FakeFrontend(taken.clone(), made.clone())));
    window.announce();
    Rig { window, taken, made }
}

fn wait(ask: impl FnOnce(Answer) -> Result<()>) -> Result<()> {
    let (send, receive) = mpsc::channel();
    ask(Box::new(move |result| send.send(result).unwrap()))?;
    receive.recv().unwrap()
}

impl Rig {
    fn map(&self, range: u64, ranges: u64, from: u64, writable: bool, node: u64, source: FakeSource) -> Result<()> {
        let (at, len, from) = (range * RANGE, ranges * RANGE, from * RANGE);
        wait(|answer| self.window.map((at, len), from, writable, node, Arc::new(source), || answer))
    }

    fn unmap(&self, parts: &[(u64, u64)]) -> Result<()> {
        let parts: Vec<_> = parts.iter().map(|(range, ranges)| (range * RANGE, ranges * RANGE)).collect();
        wait(|answer| self.window.unmap(&parts, || answer))
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
    assert_eq!((rig.window.live(), rig.kinds().len()), (1, 1));
    // What is not mapped is no error.
    rig.unmap(&[(0, 16)]).unwrap();
    assert_eq!((rig.window.live(), rig.kinds().len(), rig.taken.mapped.lock().len()), (0, 0, 0));
}

#[test]
fn a_mapping_gives_way_to_a_new_one() {
    let rig = rig(true);
    rig.map(1, 1, 0, false, 7, FakeSource::default()).unwrap();
    rig.map(1, 1, 0, true, 7, FakeSource::default()).unwrap();
    // It was writable from the start.
    assert_eq!(rig.taken.calls.load(Ordering::Relaxed), 1);
    rig.map(0, 3, 4, true, 8, FakeSource::default()).unwrap();
    assert_eq!((rig.window.live(), rig.kinds().len()), (3, 1));
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
        assert_eq!((rig.window.live(), rig.kinds().len()), (0, 0));
    }
    let rig = rig(true);
    rig.map(0, 1, 0, false, 7, FakeSource { executable: true, ..Default::default() }).unwrap();
    assert_eq!(rig.kinds(), [Kind::Through]);
    let refused = rig.map(1, 1, 0, true, 8, FakeSource { readonly: true, ..Default::default() });
    assert_eq!((refused, rig.window.live(), rig.kinds().len()), (Err(Errno::ROFS), 1, 1));
}

#[test]
fn a_revoked_file_keeps_its_mappings_but_not_its_pages() {
    let rig = rig(true);
    rig.map(0, 3, 0, true, 7, FakeSource::default()).unwrap();
    rig.map(5, 1, 0, true, 8, FakeSource::default()).unwrap();
    let id = rig.taken.mapped.lock().iter().find(|m| m.0 == 0).unwrap().1;
    rig.window.jobs.send(Job::Event(Event::Revoke(id)));
    rig.unmap(&[]).unwrap();
    let mapped = rig.taken.mapped.lock().clone();
    assert_eq!((rig.window.live(), mapped.len()), (4, 4));
    assert!(mapped.iter().all(|m| m.1 != id));
    // When it is over, they are the file's again.
    thread::sleep(Duration::from_millis(200));
    rig.unmap(&[]).unwrap();
    let kind = |id| rig.made.all.lock().iter().find(|one| one.id == id).map(|one| one.kind);
    assert!(rig.taken.mapped.lock().iter().all(|m| kind(m.1) == Some(Kind::Through)));
    rig.map(6, 1, 9, true, 7, FakeSource::default()).unwrap();
    assert!(rig.taken.mapped.lock().iter().all(|m| m.1 != id));
    rig.unmap(&[(0, 16)]).unwrap();
    assert_eq!((rig.window.live(), rig.kinds().len()), (0, 0));
}

#[test]
fn a_mapping_that_the_frontend_still_has_is_replaced() {
    let rig = rig(true);
    rig.taken.mapped.lock().push((0, 99));
    rig.map(0, 1, 0, true, 7, FakeSource::default()).unwrap();
    assert_eq!(rig.taken.mapped.lock().len(), 1);
}

#[test]
fn a_session_that_ends_while_files_are_mapped_leaves_no_entry_and_no_open_unanswered() {
    let (taken, made) = (Arc::new(Taken::default()), Arc::new(Made { guarded: true, ..Made::default() }));
    let settings = Settings { size: 4 * RANGE, slots: 1, writable: Writable::InPlace };
    let mut rig = doors::Rig::new(0, settings, made.clone()).unwrap();
    rig.window.connect(Arc::new(FakeFrontend(taken.clone(), made)));
    rig.window.announce();
    let (send, receive) = mpsc::channel();
    let answer = |send: &mpsc::Sender<_>| {
        let send = send.clone();
        Box::new(move |result: Result<()>| send.send(result).unwrap())
    };
    let start = |rig: &mut doors::Rig| {
        rig.pass().start(answer(&send));
        while rig.turn() {}
        assert_eq!(receive.recv().unwrap(), Ok(()));
    };
    start(&mut rig);
    let file = tempfile::tempfile().unwrap();
    let (tell, told) = mpsc::channel();
    let opened = rig.pass().open(7, file.as_fd(), Some(Arc::new(FakeSource::default())));
    assert!(opened.is_pending(), "the mapper has not been asked yet");
    rig.pass().decided(7, Box::new(move |opened| tell.send(opened).unwrap()));
    // The mapper comes to the open only now, when its session is over.
    rig.window.reset();
    assert_eq!(told.recv().unwrap(), Err(Errno::IO));
    start(&mut rig);
    assert!((1..4096).all(|index| rig.table().entry(index) == doors::Entry::default()));
    assert_eq!((rig.live(), taken.mapped.lock().len()), ([0, 0, 1], 1));
}
