//! Leases: a guest that keeps what it is granted, and a host that changes files at the worst moments.

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::fs::{CWD, IFlags, ioctl_getflags, ioctl_setflags};

use super::*;
use crate::fs::host::HostFs;
use crate::fs::lease::Point;
use crate::fs::{CachePolicy, NoOpen};
use crate::fuse::notify::{Notification, Sink};
use crate::watch::tests::{Host, LONG, c_path, make, places};
use crate::watch::{Step, Watch};

/// What a guest is told.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Told {
    Inode(u64, bool),
    Entry(u64, CString),
    Epoch,
}

/// The guest's notification queue.
#[derive(Default)]
struct Queue {
    told: Mutex<Vec<Told>>,
    changed: Condvar,
    /// The watch's thread stays at its next step while this is set.
    held: AtomicBool,
    closed: AtomicBool,
}

impl Queue {
    fn hold(&self, held: bool) {
        self.held.store(held, Ordering::SeqCst);
        drop(self.told.lock());
        self.changed.notify_all();
    }

    fn pass(&self) {
        let mut told = self.told.lock();
        while self.held.load(Ordering::SeqCst) {
            self.changed.wait(&mut told);
        }
    }
}

impl Sink for Queue {
    fn is_open(&self) -> bool {
        !self.closed.load(Ordering::SeqCst)
    }

    fn notify(&self, notification: Notification) {
        self.pass();
        let told = match notification {
            Notification::InvalInode { nodeid, contents } => Told::Inode(nodeid, contents),
            Notification::InvalEntry { parent, name } => Told::Entry(parent, CString::new(name).unwrap()),
            Notification::IncEpoch => Told::Epoch,
            other => panic!("{other:?}"),
        };
        self.told.lock().push(told);
        self.changed.notify_all();
    }

    fn clear(&self) {
        self.told.lock().clear();
    }
}

type Hook = Rc<dyn Fn(Point)>;

thread_local! {
    static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
}

/// See [`Point`].
pub fn at(point: Point) {
    let hook = HOOK.with_borrow(Clone::clone);
    if let Some(hook) = hook {
        hook(point);
    }
}

/// Numbers that look random (xorshift64).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end
    }
}

/// What the lease of the tests lasts. No other timeout is as long.
const LEASE: Duration = Duration::from_secs(7777);

/// What the guest must not have wrong: mode, size, links, mtime.
type Facts = (u32, u64, u32, (u64, u32));

fn facts(attr: &Attr) -> Facts {
    (attr.mode, attr.size, attr.nlink, (attr.mtime, attr.mtimensec))
}

/// A guest that keeps leases by the rules of docs/protocol.md.
#[derive(Default)]
struct Guest {
    /// By directory and name; 0: nothing there.
    entries: HashMap<(u64, CString), u64>,
    attrs: HashMap<u64, Facts>,
    /// Directories and files that it knows, with references.
    nodes: HashMap<u64, (u64, bool)>,
    /// Notifications that were handled.
    handled: u64,
    /// When a node, a name or everything was invalidated last, in these.
    inode_at: HashMap<u64, u64>,
    entry_at: HashMap<(u64, CString), u64>,
    epoch_at: u64,
}

impl Guest {
    fn handle(&mut self, told: Vec<Told>) {
        for told in told {
            self.handled += 1;
            match told {
                Told::Inode(node, _) => {
                    self.attrs.remove(&node);
                    self.inode_at.insert(node, self.handled);
                }
                Told::Entry(dir, name) => {
                    self.entries.remove(&(dir, name.clone()));
                    self.entry_at.insert((dir, name), self.handled);
                }
                Told::Epoch => {
                    self.entries.clear();
                    self.attrs.clear();
                    self.epoch_at = self.handled;
                }
            }
        }
    }

    /// Takes the attributes of a reply to a request that was sent when `sent` notifications were handled.
    fn attr(&mut self, sent: u64, node: u64, attr: &Attr, valid: u64) {
        let fresh = self.inode_at.get(&node).is_none_or(|at| *at <= sent) && self.epoch_at <= sent;
        if valid == LEASE.as_secs() && fresh {
            self.attrs.insert(node, facts(attr));
        } else {
            self.attrs.remove(&node);
        }
    }

    fn entry(&mut self, sent: u64, dir: u64, name: &CStr, out: &EntryOut) {
        let key = (dir, name.to_owned());
        let fresh = self.entry_at.get(&key).is_none_or(|at| *at <= sent) && self.epoch_at <= sent;
        if out.entry_valid == LEASE.as_secs() && fresh {
            self.entries.insert(key, out.nodeid);
        } else {
            self.entries.remove(&key);
        }
        if out.nodeid != 0 {
            let known = self.nodes.entry(out.nodeid).or_insert((0, out.attr.mode & libc::S_IFMT == libc::S_IFDIR));
            known.0 += 1;
            self.attr(sent, out.nodeid, &out.attr, out.attr_valid);
        }
    }

    /// The guest has changed these by itself.
    fn changed(&mut self, dirs: &[u64], names: &[(u64, &CStr)]) {
        self.attrs.retain(|node, _| !dirs.contains(node));
        for (dir, name) in names {
            if let Some(node) = self.entries.remove(&(*dir, (*name).to_owned())) {
                self.attrs.remove(&node);
            }
        }
    }
}

struct World {
    share: Share,
    queue: Arc<Queue>,
    guest: RefCell<Guest>,
    host: RefCell<Host>,
    random: RefCell<Random>,
    markers: RefCell<u32>,
    /// Notifications must not be handled now: the guest's kernel has the directories locked.
    locked: RefCell<bool>,
    granted: RefCell<usize>,
}

/// A share with leases.
fn leased(place: &Path, config: Config, most_marks: usize) -> (Share, Arc<Queue>) {
    let (s, queue) = serve_watched(place, Config { lease_timeout: LEASE, ..config }, most_marks);
    assert!(s.fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap().flags.contains(InitFlags::LEASES));
    (s, queue)
}

/// A share that is watched, before a session.
fn serve_watched(place: &Path, config: Config, most_marks: usize) -> (Share, Arc<Queue>) {
    let queue = Arc::new(Queue::default());
    let passed = queue.clone();
    let dir = TempDir::new_in(place).unwrap();
    let fs = PassthroughFs::new(open_root(dir.path()), proc_self_fd().unwrap(), config).unwrap();
    let watch = Watch::with_limits(most_marks, 100_000).unwrap();
    let fs = fs.with_notifier(queue.clone()).with_stepped_watch(watch, move |_: Step| passed.pass());
    fs.enter_thread();
    (Share { dir, fs: Arc::new(fs) }, queue)
}

const DIRS: [&CStr; 3] = [c"A", c"B", c"C"];
/// `sub` becomes a directory now and then.
const NAMES: [&CStr; 4] = [c"f", c"g", c"h", c"sub"];

impl World {
    fn new(place: &Path, seed: u64, config: Config) -> Rc<Self> {
        let (share, queue) = leased(place, config, 1000);
        for dir in DIRS.iter().map(|dir| dir.to_str().unwrap()).chain(["out"]) {
            fs::create_dir(share.dir.path().join(dir)).unwrap();
        }
        Rc::new(Self {
            share,
            queue,
            guest: RefCell::default(),
            host: RefCell::new(Host::start()),
            random: RefCell::new(Random(seed * 0x9e37_79b9 + 1)),
            markers: RefCell::default(),
            locked: RefCell::default(),
            granted: RefCell::default(),
        })
    }

    fn below(&self, end: usize) -> usize {
        self.random.borrow_mut().below(end)
    }

    fn a_place(&self, dirs: &[&str]) -> PathBuf {
        let dir = dirs[self.below(dirs.len())];
        self.share.dir.path().join(dir).join(NAMES[self.below(NAMES.len())].to_str().unwrap())
    }

    /// The host changes something.
    fn host(&self) {
        let any = ["A", "B", "C", "A/sub", "B/sub", "out"];
        let (from, to) = (self.a_place(&any), self.a_place(&any));
        let mut host = self.host.borrow_mut();
        match self.below(10) {
            0 | 1 => host.run("write", &[&from], &"x".repeat(self.below(9))),
            2 => host.run("append", &[&from], "y"),
            3 => host.run("chmod", &[&from], ["700", "755"][self.below(2)]),
            4 => host.run("remove", &[&from], ""),
            5 | 6 => host.run("rename", &[&from, &to], ""),
            7 => host.run("swap", &[&from, &to], ""),
            8 => host.run("mkdir", &[&from], ""),
            // A link in a directory that is not watched would not be seen.
            _ => host.run("link", &[&from, &self.a_place(&["A", "B", "C"])], ""),
        };
    }

    /// Whatever may happen in the middle of a request.
    fn meanwhile(&self, _point: Point) {
        match self.below(12) {
            0..=2 => self.host(),
            3 => {
                self.host();
                self.settle();
            }
            4 => self.queue.hold(true),
            5 => self.queue.hold(false),
            6 => self.take(),
            _ => {}
        }
    }

    /// The guest handles what it was told.
    fn take(&self) {
        if *self.locked.borrow() {
            return;
        }
        let told = std::mem::take(&mut *self.queue.told.lock());
        self.guest.borrow_mut().handle(told);
    }

    /// Waits until the watch has taken up all changes.
    fn settle(&self) {
        self.queue.hold(false);
        *self.markers.borrow_mut() += 1;
        let marker = format!("marker{}", self.markers.borrow());
        assert!(self.host.borrow_mut().run("mkdir", &[&self.share.dir.path().join(&marker)], ""));
        let last = Told::Entry(ROOT_ID, CString::new(marker).unwrap());
        let mut told = self.queue.told.lock();
        while !told.contains(&last) {
            let timed_out = self.queue.changed.wait_for(&mut told, LONG).timed_out();
            assert!(!timed_out, "the watch says nothing");
        }
    }

    fn lookup(&self, dir: u64, name: &CStr) {
        let sent = self.guest.borrow().handled;
        let found = self.share.fs.lookup(dir, name);
        let mut guest = self.guest.borrow_mut();
        match found {
            Ok(out) => guest.entry(sent, dir, name, &out),
            Err(_) => {
                guest.entries.remove(&(dir, name.to_owned()));
            }
        }
    }

    fn list(&self, dir: u64) {
        let sent = self.guest.borrow().handled;
        let Ok(open) = self.share.fs.opendir(dir, 0) else { return };
        let mut list = List { room: 100, ..List::default() };
        let _ = self.share.fs.readdirplus(dir, open.fh, 0, &mut list);
        let mut guest = self.guest.borrow_mut();
        for (name, out) in list.entries.iter().filter(|(_, out)| out.nodeid != 0) {
            guest.entry(sent, dir, &CString::new(name.as_str()).unwrap(), out);
        }
        let _ = self.share.fs.releasedir(dir, open.fh);
    }

    fn a_node(&self, directory: bool) -> u64 {
        let guest = self.guest.borrow();
        let mut all: Vec<u64> =
            guest.nodes.iter().filter(|(_, (_, dir))| *dir || !directory).map(|(n, _)| *n).collect();
        all.sort_unstable();
        if all.is_empty() { ROOT_ID } else { all[self.below(all.len())] }
    }

    fn a_name(&self) -> &'static CStr {
        NAMES[self.below(NAMES.len())]
    }

    /// The guest does something.
    fn step(&self) {
        let fs = &self.share.fs;
        let (dir, name, to, toname) = (self.a_node(true), self.a_name(), self.a_node(true), self.a_name());
        match self.below(16) {
            0..=4 => self.lookup(dir, name),
            5 | 6 => self.list(dir),
            7..=9 => {
                let (node, sent) = (self.a_node(false), self.guest.borrow().handled);
                let got = fs.getattr(node, None);
                let mut guest = self.guest.borrow_mut();
                match got {
                    Ok(out) => guest.attr(sent, node, &out.attr, out.attr_valid),
                    Err(_) => {
                        guest.attrs.remove(&node);
                    }
                }
            }
            10 => {
                let node = self.a_node(false);
                let mode = 0o700 + self.below(8) as u32;
                let sent = self.guest.borrow().handled;
                let set = SetattrIn { valid: SetattrValid::MODE.bits(), mode, ..Default::default() };
                let got = fs.setattr(node, &set);
                let mut guest = self.guest.borrow_mut();
                match got {
                    Ok(out) => guest.attr(sent, node, &out.attr, out.attr_valid),
                    Err(_) => {
                        guest.attrs.remove(&node);
                    }
                }
            }
            11 => self.alone(&[(dir, name), (to, toname)], || {
                if fs.rename(dir, name, to, toname, 0, &me()).is_ok() {
                    let mut guest = self.guest.borrow_mut();
                    let moved = guest.entries.get(&(dir, name.to_owned())).copied();
                    let kept = moved.and_then(|node| Some((node, *guest.attrs.get(&node)?)));
                    guest.changed(&[dir, to], &[(dir, name), (to, toname)]);
                    // The guest's kernel takes the name's lease along, and the attributes but for the ctime.
                    if let Some(node) = moved.filter(|node| *node != 0) {
                        guest.entries.insert((to, toname.to_owned()), node);
                    }
                    let kept = kept.filter(|(node, _)| !guest_is_dir(&guest, *node));
                    guest.attrs.extend(kept);
                }
            }),
            12 => self.alone(&[(dir, name)], || {
                let (node, sent) = (self.a_node(false), self.guest.borrow().handled);
                if let Ok(out) = fs.link(node, dir, name) {
                    let mut guest = self.guest.borrow_mut();
                    guest.changed(&[dir], &[(dir, name)]);
                    guest.entry(sent, dir, name, &out);
                }
            }),
            13 => self.alone(&[(dir, name)], || {
                let removed = fs.unlink(dir, name).or_else(|_| fs.rmdir(dir, name));
                if removed.is_ok() {
                    self.guest.borrow_mut().changed(&[dir], &[(dir, name)]);
                }
            }),
            14 => self.alone(&[(dir, name)], || {
                let sent = self.guest.borrow().handled;
                if self.below(2) == 0 {
                    return self.create(sent, dir, name);
                }
                if let Ok(out) = fs.mknod(dir, name, libc::S_IFREG | 0o644, 0, &me()) {
                    let mut guest = self.guest.borrow_mut();
                    guest.changed(&[dir], &[(dir, name)]);
                    guest.entry(sent, dir, name, &out);
                }
            }),
            _ => self.forget(),
        }
    }

    /// The guest creates a file, writes to it, and closes it without a message.
    fn create(&self, sent: u64, dir: u64, name: &CStr) {
        let create = CreateIn { flags: libc::O_RDWR as u32, mode: 0o644, ..Default::default() };
        let made: Result<CreateOut> = answered(|reply| self.share.fs.create(dir, name, &create, &me(), reply));
        let Ok(CreateOut { entry, open }) = made else { return };
        {
            let mut guest = self.guest.borrow_mut();
            guest.changed(&[dir], &[(dir, name)]);
            guest.entry(sent, dir, name, &entry);
        }
        let node = entry.nodeid;
        let written = self.share.write(node, open.fh, 0, b"guest", 0, libc::O_RDWR);
        self.guest.borrow_mut().attrs.remove(&node);
        // The host may have removed it.
        assert!(matches!(written, Ok(5) | Err(Errno::STALE)), "{written:?}");
        if open.fh != 0 {
            self.share.fs.release(node, &ReleaseIn { fh: open.fh, ..Default::default() }).unwrap();
        }
    }

    /// The guest forgets a node that it has no name of.
    fn forget(&self) {
        let node = self.a_node(false);
        let mut guest = self.guest.borrow_mut();
        let used = guest.entries.iter().any(|((dir, _), to)| *dir == node || *to == node);
        if used || node == ROOT_ID {
            return;
        }
        if let Some((references, _)) = guest.nodes.remove(&node) {
            guest.attrs.remove(&node);
            drop(guest);
            self.share.fs.forget(node, references);
        }
    }

    /// Runs what the guest's kernel does with its directories locked, after it has looked up the names.
    fn alone(&self, names: &[(u64, &CStr)], run: impl FnOnce()) {
        *self.locked.borrow_mut() = true;
        for (dir, name) in names {
            let kept = self.guest.borrow().entries.contains_key(&(*dir, (*name).to_owned()));
            if !kept {
                self.lookup(*dir, name);
            }
        }
        run();
        *self.locked.borrow_mut() = false;
    }

    /// Nothing that the guest keeps is stale.
    fn check(&self, seed: u64) {
        self.settle();
        self.take();
        let guest = self.guest.borrow();
        *self.granted.borrow_mut() += guest.entries.len() + guest.attrs.len();
        for (node, facts_) in &guest.attrs {
            let Ok(now) = self.share.fs.getattr(*node, None) else { continue };
            // What a rename of the host replaced has one link less without an event.
            if now.attr.nlink > 0 {
                assert_eq!(*facts_, facts(&now.attr), "node {node}, seed {seed}");
            }
        }
        for ((dir, name), node) in &guest.entries {
            let now = self.share.fs.lookup(*dir, name).map_or(0, |out| out.nodeid);
            self.share.fs.forget(now, 1);
            assert_eq!(*node, now, "{name:?} in {dir}, seed {seed}");
        }
    }
}

fn guest_is_dir(guest: &Guest, node: u64) -> bool {
    guest.nodes.get(&node).is_none_or(|(_, directory)| *directory)
}

/// Seeds for each place. More by THRUWAY_SEEDS, for a longer search.
fn seeds() -> u64 {
    std::env::var("THRUWAY_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(12)
}

#[test]
fn a_guest_with_leases_knows_nothing_stale() {
    let (mut granted, mut checks) = (0, 0);
    for place in places() {
        for handles in [FileHandles::Never, FileHandles::Prefer] {
            for seed in 1..=seeds() {
                let world = World::new(&place, seed, Config { inode_file_handles: handles, ..Config::default() });
                for dir in DIRS {
                    world.lookup(ROOT_ID, dir);
                    let node = world.guest.borrow().entries[&(ROOT_ID, dir.to_owned())];
                    world.lookup(node, c"f");
                }
                let within = world.clone();
                HOOK.set(Some(Rc::new(move |point| within.meanwhile(point))));
                for _ in 0..6 {
                    for _ in 0..40 {
                        world.step();
                    }
                    let hook = HOOK.take();
                    world.check(seed);
                    checks += 1;
                    HOOK.set(hook);
                }
                HOOK.set(None);
                granted += *world.granted.borrow();
            }
        }
    }
    // Otherwise the test shows nothing.
    assert!(granted > 2 * checks, "only {granted} leases in {checks} checks");
}

#[test]
fn lost_events_end_all_leases() {
    for place in places() {
        let world = World::new(&place, 1, Config::default());
        let path = |name: &str| world.share.dir.path().join(name);
        for name in ["A/f", "A/g", "B/f", "C/f"] {
            world.host.borrow_mut().run("write", &[&path(name)], "1");
        }
        let look = || {
            for dir in DIRS {
                world.lookup(ROOT_ID, dir);
                let node = world.guest.borrow().entries[&(ROOT_ID, dir.to_owned())];
                NAMES.iter().for_each(|name| world.lookup(node, name));
            }
        };
        let known = || (world.guest.borrow().entries.len(), world.guest.borrow().attrs.len());
        // What is not leased, since an event came in between, is leased when the guest asks again.
        look();
        world.settle();
        world.take();
        look();
        assert_eq!(known(), (15, 7));
        let most = fs::read_to_string("/proc/sys/fs/fanotify/max_queued_events").unwrap();
        let most: u32 = most.trim().parse().unwrap();
        // The watch's thread stands still in its first event. What comes after the queue is full is lost.
        world.queue.hold(true);
        for n in 0..most + 1000 {
            assert!(world.host.borrow_mut().run("mkdir", &[&path(&format!("B/n{n}"))], ""));
        }
        let mut host = world.host.borrow_mut();
        assert!(host.run("append", &[&path("A/f")], "2") && host.run("chmod", &[&path("C/f")], "600"));
        assert!(host.run("rename", &[&path("A/g"), &path("out/g")], "") && host.run("write", &[&path("A/h")], ""));
        assert!(host.run("remove", &[&path("B/f")], ""));
        drop(host);
        world.queue.hold(false);
        let mut told = world.queue.told.lock();
        while !told.contains(&Told::Epoch) {
            assert!(!world.queue.changed.wait_for(&mut told, LONG).timed_out(), "nobody says that events were lost");
        }
        drop(told);
        world.check(1);
        look();
        world.check(1);
        // It goes on: what is told after the loss is leased again.
        world.take();
        look();
        let a = world.guest.borrow().entries[&(ROOT_ID, c"A".to_owned())];
        let f = world.guest.borrow().entries[&(a, c"f".to_owned())];
        assert!(world.guest.borrow().attrs.contains_key(&f));
        assert!(world.host.borrow_mut().run("append", &[&path("A/f")], "3"));
        world.check(1);
        assert!(!world.guest.borrow().attrs.contains_key(&f));
    }
}

/// The validity of an entry's name and attributes in seconds.
fn valid(out: &EntryOut) -> (u64, u64) {
    (out.entry_valid, out.attr_valid)
}

#[test]
fn leases_need_a_watch() {
    const L: u64 = LEASE.as_secs();
    for place in places() {
        // The share's own directory, and one of the two directories in it.
        let (s, queue) = leased(&place, Config::default(), 2);
        for name in ["a", "b"] {
            fs::create_dir(s.dir.path().join(name)).unwrap();
            s.put(&format!("{name}/f"), b"1");
        }
        let missing = s.lookup(c"missing").unwrap();
        assert_eq!((missing.nodeid, missing.entry_valid), (0, L));
        let a = s.lookup(c"a").unwrap();
        let b = s.lookup(c"b").unwrap();
        assert_eq!((valid(&a), valid(&b)), ((L, L), (L, 1)), "there is no third mark");
        let file = |dir: &EntryOut| s.fs.lookup(dir.nodeid, c"f").unwrap();
        let (af, bf) = (file(&a), file(&b));
        assert_eq!((valid(&af), valid(&bf)), ((L, L), (1, 1)));
        assert_eq!(s.fs.lookup(b.nodeid, c"missing").err(), Some(Errno::NOENT));
        assert_eq!(s.fs.getattr(af.nodeid, None).unwrap().attr_valid, L);
        assert_eq!(s.fs.getattr(bf.nodeid, None).unwrap().attr_valid, 1);
        assert_eq!([&a, &b, &af, &bf].map(|out| out.attr.flags & ATTR_LEASED != 0), [true, false, true, false]);
        // Out of what is watched, and back.
        queue.clear();
        s.fs.rename(a.nodeid, c"f", b.nodeid, c"g", 0, &me()).unwrap();
        // The watch's own thread may have told the second before.
        let told = queue.told.lock().clone();
        for expected in [Told::Entry(b.nodeid, c"g".into()), Told::Inode(af.nodeid, true)] {
            assert!(told.contains(&expected), "{expected:?} in {told:?}");
        }
        assert_eq!(s.fs.getattr(af.nodeid, None).unwrap().attr_valid, 1);
        s.fs.rename(b.nodeid, c"g", a.nodeid, c"h", 0, &me()).unwrap();
        assert_eq!(s.fs.getattr(af.nodeid, None).unwrap().attr_valid, L);
        // A place for a mark becomes free.
        for (node, lookups) in [(af.nodeid, 1), (a.nodeid, 1)] {
            s.fs.forget(node, lookups);
        }
        assert_eq!(valid(&file(&b)), (L, L));
    }
}

#[test]
fn a_file_with_several_links_is_marked_itself() {
    const L: u64 = LEASE.as_secs();
    let (s, queue) = leased(&std::env::temp_dir(), Config::default(), 100);
    let path = |name: &str| s.dir.path().join(name);
    fs::create_dir(path("out")).unwrap();
    make(&path("f"));
    fs::hard_link(path("f"), path("out/g")).unwrap();
    let f = s.lookup(c"f").unwrap();
    assert_eq!(valid(&f), (L, L));
    Host::start().run("append", &[&path("out/g")], "x");
    let mut told = queue.told.lock();
    while !told.contains(&Told::Inode(f.nodeid, true)) {
        assert!(!queue.changed.wait_for(&mut told, LONG).timed_out());
    }
}

#[test]
fn what_was_read_before_the_mark_is_read_again() {
    const L: u64 = LEASE.as_secs();
    let (s, _queue) = leased(&std::env::temp_dir(), Config::default(), 100);
    let path = |name: &str| s.dir.path().join(name);
    fs::create_dir(path("out")).unwrap();
    fs::create_dir(path("d")).unwrap();
    for name in ["f", "g"] {
        make(&path(name));
    }
    fs::hard_link(path("f"), path("out/f")).unwrap();
    let host = Rc::new(RefCell::new(Host::start()));
    // The host changes the file or directory once, at this point, where the daemon does not see it.
    let change = |at: Point, what: &'static str, name: &str, text: &'static str| {
        let (host, path, done) = (host.clone(), path(name), RefCell::new(false));
        HOOK.set(Some(Rc::new(move |point| {
            if point == at && !done.replace(true) {
                assert!(host.borrow_mut().run(what, &[&path], text));
            }
        })));
    };
    change(Point::BeforeTable, "append", "out/f", "xy");
    let f = s.lookup(c"f").unwrap();
    assert_eq!((f.attr.size, valid(&f)), (2, (L, L)));
    change(Point::BeforeTable, "chmod", "d", "711");
    let d = s.lookup(c"d").unwrap();
    assert_eq!((d.attr.mode & 0o777, valid(&d)), (0o711, (L, L)));
    // A file that gets a second name is marked when it is looked at.
    HOOK.set(None);
    let g = s.lookup(c"g").unwrap();
    assert!(host.borrow_mut().run("link", &[&path("g"), &path("out/g")], ""));
    change(Point::AfterStat, "append", "out/g", "xyz");
    let g = s.fs.getattr(g.nodeid, None).unwrap();
    assert_eq!((g.attr.size, g.attr_valid), (3, L));
    HOOK.set(None);
}

#[test]
fn a_name_is_looked_at_after_its_directory_is_watched() {
    const L: u64 = LEASE.as_secs();
    let (s, _queue) = leased(&std::env::temp_dir(), Config::default(), 100);
    let path = |name: &str| s.dir.path().join(name);
    make(&path("f"));
    make(&path("g"));
    assert_eq!(s.lookup(c"missing").unwrap().entry_valid, L);
    let host = Rc::new(RefCell::new(Host::start()));
    let change = |at: Point, name: &str| {
        let (host, path, fs, done) = (host.clone(), path(name), s.fs.clone(), RefCell::new(false));
        HOOK.set(Some(Rc::new(move |point| {
            if point == at && !done.replace(true) {
                let watch = fs.watch().unwrap();
                let before = watch.handled();
                assert!(host.borrow_mut().run("append", &[&path], "xy"));
                let start = std::time::Instant::now();
                while watch.handled() == before {
                    assert!(start.elapsed() < LONG, "the watch handles nothing");
                    std::thread::yield_now();
                }
            }
        })));
    };
    // Once the directory is watched, each change is in the reply, or the guest may not keep what is.
    change(Point::BeforeStat, "f");
    assert_eq!(s.lookup(c"f").unwrap().attr.size, 2);
    change(Point::AfterStat, "g");
    let g = s.lookup(c"g").unwrap();
    HOOK.set(None);
    assert_eq!(valid(&g), (L, 1));
}

#[test]
fn attributes_of_set_id_programs_are_not_leased() {
    let config = Config { killpriv_v2: Some(true), ..Config::default() };
    let (s, _queue) = leased(&std::env::temp_dir(), config, 100);
    s.put("f", b"program");
    fs::set_permissions(s.dir.path().join("f"), fs::Permissions::from_mode(0o4755)).unwrap();
    // The host clears the bit at the guest's writes, and tells nobody.
    assert_eq!(valid(&s.lookup(c"f").unwrap()), (LEASE.as_secs(), 0));
}

#[test]
fn a_file_that_is_swapped_while_it_is_found_has_no_lease() {
    const L: u64 = LEASE.as_secs();
    let config = Config { inode_file_handles: FileHandles::Never, ..Config::default() };
    let (s, queue) = leased(&std::env::temp_dir(), config, 100);
    let [f, g] = ["f", "g"].map(|name| s.dir.path().join(name));
    make(&f);
    make(&g);
    // The directory is marked from now on. The event of the swap is not handled before the reply.
    assert_eq!(s.lookup(c"missing").unwrap().entry_valid, L);
    queue.hold(true);
    let (host, done) = (RefCell::new(Host::start()), RefCell::new(false));
    HOOK.set(Some(Rc::new(move |point| {
        if point == Point::BeforeTable && !done.replace(true) {
            assert!(host.borrow_mut().run("swap", &[&f, &g], ""));
        }
    })));
    // A listing opens no file. When the daemon asks by which handle events name the first, the name leads to the other.
    let mut list = List { room: 100, ..List::default() };
    s.fs.readdirplus(ROOT_ID, 0, 0, &mut list).unwrap();
    HOOK.set(None);
    queue.hold(false);
    let found = &list.entries.iter().find(|(_, out)| out.nodeid > ROOT_ID).unwrap().1;
    assert_eq!(valid(found), (L, 1));
}

#[test]
fn a_session_without_the_queue_has_no_leases() {
    let (s, queue) = leased(&std::env::temp_dir(), Config::default(), 100);
    s.put("f", b"1");
    queue.closed.store(true, Ordering::SeqCst);
    s.fs.destroy();
    let session = s.fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap();
    assert!(!session.flags.contains(InitFlags::LEASES));
    assert_eq!(valid(&s.lookup(c"f").unwrap()), (1, 1));
    assert_eq!(s.lookup(c"missing").err(), Some(Errno::NOENT));
    // A guest with the queue that knows no leases is told, and keeps its timeouts.
    queue.closed.store(false, Ordering::SeqCst);
    s.fs.destroy();
    s.fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM - InitFlags::LEASES).unwrap();
    let f = s.lookup(c"f").unwrap();
    assert_eq!((valid(&f), f.attr.flags & ATTR_LEASED), ((1, 1), 0));
    assert!(crate::fs::file_id(CWD, &c_path(&s.dir.path().join("f"))).is_ok());
    Host::start().run("append", &[&s.dir.path().join("f")], "x");
    let mut told = queue.told.lock();
    while !told.contains(&Told::Inode(f.nodeid, true)) {
        assert!(!queue.changed.wait_for(&mut told, LONG).timed_out());
    }
}

#[test]
fn leases_follow_the_cache_mode() {
    let flags = |config: Config| {
        let (s, _queue) = leased(&std::env::temp_dir(), config, 100);
        s.put("f", b"1");
        let f = s.lookup(c"f").unwrap();
        (f.entry_valid, f.attr.flags & ATTR_LEASED != 0)
    };
    let cache = |cache| Config { cache, ..Config::default() };
    use CachePolicy::{Always, Auto, Metadata};
    assert_eq!(flags(cache(Auto)), (LEASE.as_secs(), true));
    assert_eq!(flags(cache(Always)), (86400, true));
    assert_eq!(flags(cache(Metadata)), (86400, false));
    let others = [
        Config { writeback: true, ..cache(Auto) },
        Config { flock: true, ..cache(Auto) },
        Config { posix_lock: true, ..cache(Auto) },
    ];
    for config in others {
        assert_eq!(flags(config), (LEASE.as_secs(), false));
    }
}

#[test]
fn a_leased_node_is_read_without_an_open() {
    let (s, _queue) = leased(&std::env::temp_dir(), Config::default(), 100);
    s.put("f", b"data");
    let read = || {
        let node = s.lookup(c"f").unwrap().nodeid;
        let mut list = List { room: 100, ..List::default() };
        (s.read(node, 0, 0, 10), s.fs.readdirplus(ROOT_ID, 0, 0, &mut list).map(|()| list.entries.len()))
    };
    assert_eq!(read(), (Ok(b"data".to_vec()), Ok(3)));
    // Without leases the guest must have opened it.
    s.fs.destroy();
    s.fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM - InitFlags::LEASES).unwrap();
    assert_eq!(read(), (Err(Errno::BADF), Err(Errno::BADF)));
}

#[test]
fn some_sessions_have_no_leases() {
    let never = Config { cache: CachePolicy::Never, ..Config::default() };
    for (config, lease_timeout) in [(never, LEASE), (Config::default(), Duration::ZERO)] {
        let (s, _queue) = serve_watched(&std::env::temp_dir(), Config { lease_timeout, ..config }, 100);
        let session = s.fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap();
        assert!(!session.flags.contains(InitFlags::LEASES));
    }
}

#[test]
fn without_leases_only_what_programs_watch_is_marked() {
    let config = Config { lease_timeout: Duration::ZERO, ..Config::default() };
    let (s, _queue) = serve_watched(&std::env::temp_dir(), config, 100);
    s.fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap();
    s.put("f", b"1");
    let f = s.lookup(c"f").unwrap().nodeid;
    s.fs.getattr(f, None).unwrap();
    s.fs.getattr(ROOT_ID, None).unwrap();
    let marked = || [ROOT_ID, f].map(|node| s.fs.watch().unwrap().is_marked(node));
    assert_eq!(marked(), [false, false]);
    s.fs.watch_node(f, libc::FAN_MODIFY as u32).unwrap();
    assert_eq!(marked(), [false, true]);
}

#[test]
fn a_file_system_that_cannot_be_watched_has_timeouts() {
    let (s, queue) = leased(&std::env::temp_dir(), Config::default(), 100);
    let dev = fs::metadata(s.dir.path()).unwrap().dev();
    s.fs.hosts.pretend(dev, HostFs::default());
    s.put("f", b"1");
    let f = s.lookup(c"f").unwrap();
    assert_eq!((valid(&f), f.attr.flags & ATTR_LEASED), ((1, 1), 0));
    assert_eq!(s.fs.getattr(f.nodeid, None).unwrap().attr_valid, 1);
    assert_eq!(s.lookup(c"missing").err(), Some(Errno::NOENT));
    assert!(queue.told.lock().is_empty());
}

#[test]
fn an_open_of_an_immutable_file_takes_a_message() {
    let (s, _queue) = leased(&std::env::temp_dir(), Config::default(), 100);
    for (name, flag) in [("i", IFlags::IMMUTABLE), ("a", IFlags::APPEND), ("n", IFlags::NODUMP)] {
        s.put(name, b"1");
        let file = fs::File::open(s.dir.path().join(name)).unwrap();
        let before = ioctl_getflags(&file).unwrap_or(IFlags::empty());
        if ioctl_setflags(&file, before | flag).is_err() {
            return eprintln!("skipped: it needs root, and a file system with such flags");
        }
        let f = s.lookup(&CString::new(name).unwrap()).unwrap();
        let (asked, valid) = (s.fs.getattr(f.nodeid, None).unwrap(), valid(&f));
        ioctl_setflags(&file, before).unwrap();
        let free = flag == IFlags::NODUMP;
        assert_eq!((f.attr.flags & ATTR_LEASED != 0, asked.attr.flags & ATTR_LEASED != 0), (free, free), "{name}");
        assert_eq!(valid, (LEASE.as_secs(), LEASE.as_secs()));
    }
}

fn create(s: &Share, name: &CStr, flags: i32, mode: u32) -> CreateOut {
    let create = CreateIn { flags: flags as u32, mode, ..Default::default() };
    answered(|reply| s.fs.create(ROOT_ID, name, &create, &me(), reply)).unwrap()
}

fn has_handle(open: &OpenOut) -> bool {
    let leased = open.open_flags & OpenFlags::LEASED.bits() != 0;
    assert_eq!(open.fh == 0, leased);
    !leased
}

/// Closes all spare descriptors that are not in use.
fn sweep(s: &Share) {
    (0..2).for_each(|_| s.fs.places.kept.sweep());
}

/// Whether nobody has the file open for writing, as a host that executes it needs.
fn is_unwritten(s: &Share, name: &str) -> bool {
    crate::fs::sys::is_unwritten(fs::File::open(s.dir.path().join(name)).unwrap().as_fd())
}

#[test]
fn an_open_for_writing_leaves_no_handle() {
    if !root() {
        return;
    }
    for inode_file_handles in [FileHandles::Never, FileHandles::Prefer] {
        let (s, _queue) = leased(&std::env::temp_dir(), Config { inode_file_handles, ..Config::default() }, 100);
        // Its owner's mode forbids what the guest does.
        let made = create(&s, c"f", libc::O_WRONLY | libc::O_EXCL, 0o400);
        let node = made.entry.nodeid;
        assert!(!has_handle(&made.open));
        for round in 0..2 {
            for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_WRONLY | libc::O_APPEND, libc::O_RDWR | libc::O_SYNC] {
                assert!(!has_handle(&open(&s.fs, node, flags).unwrap()), "{flags:x}");
            }
            assert_eq!(s.write(node, 0, 0, b"0123", 0, libc::O_WRONLY), Ok(4));
            assert_eq!(s.write(node, 0, 0, b"+", 0, libc::O_WRONLY | libc::O_APPEND), Ok(1));
            assert_eq!(s.read(node, 0, 0, 9).unwrap(), [b"0123+".as_slice(), b"0123++"][round]);
            sweep(&s);
        }
        assert!(!has_handle(&open(&s.fs, node, libc::O_WRONLY | libc::O_TRUNC).unwrap()));
        assert_eq!(s.host("f"), b"");
        // Once nobody uses it, no descriptor is left.
        sweep(&s);
        assert!(is_unwritten(&s, "f"));
        // An open for reading is one that the guest cannot do by itself.
        let reads = open(&s.fs, node, libc::O_RDONLY).unwrap();
        assert!(has_handle(&reads));
        assert_eq!(s.fs.release(node, &ReleaseIn { fh: reads.fh, ..Default::default() }), Ok(()));
        assert!(has_handle(&create(&s, c"g", libc::O_RDONLY, 0o600).open));
    }
}

#[test]
fn what_the_guest_removes_stays_open() {
    if !root() {
        return;
    }
    for inode_file_handles in [FileHandles::Never, FileHandles::Prefer] {
        let (s, _queue) = leased(&std::env::temp_dir(), Config { inode_file_handles, ..Config::default() }, 100);
        let removed = create(&s, c"removed", libc::O_RDWR, 0o600).entry.nodeid;
        let replaced = create(&s, c"replaced", libc::O_RDWR, 0o600).entry.nodeid;
        s.put("over", b"over");
        let tmpfile = CreateIn { flags: libc::O_RDWR as u32, mode: 0o600, ..Default::default() };
        let unnamed: CreateOut = answered(|reply| s.fs.tmpfile(ROOT_ID, &tmpfile, &me(), reply)).unwrap();
        assert!(!has_handle(&unnamed.open));
        sweep(&s);
        s.fs.unlink(ROOT_ID, c"removed").unwrap();
        s.fs.rename(ROOT_ID, c"over", ROOT_ID, c"replaced", 0, &me()).unwrap();
        for node in [removed, replaced, unnamed.entry.nodeid] {
            sweep(&s);
            assert_eq!(s.write(node, 0, 0, b"data", 0, libc::O_RDWR), Ok(4));
            sweep(&s);
            assert_eq!(s.read(node, 0, 0, 9).unwrap(), b"data");
            assert_eq!(s.fs.getattr(node, Some(0)).unwrap().attr.nlink, 0);
        }
    }
}

#[test]
fn a_program_has_a_handle_and_no_descriptor_of_it_is_left() {
    if !root() {
        return;
    }
    for inode_file_handles in [FileHandles::Never, FileHandles::Prefer] {
        let (s, _queue) = leased(&std::env::temp_dir(), Config { inode_file_handles, ..Config::default() }, 100);
        let program = create(&s, c"p", libc::O_RDWR, 0o755);
        assert!(has_handle(&program.open));
        let release = ReleaseIn { fh: program.open.fh, ..Default::default() };
        s.fs.release(program.entry.nodeid, &release).unwrap();
        assert!(is_unwritten(&s, "p"));
        // As a linker does it.
        let node = create(&s, c"q", libc::O_RDWR, 0o600).entry.nodeid;
        s.write(node, 0, 0, b"data", 0, libc::O_RDWR).unwrap();
        assert!(!is_unwritten(&s, "q"));
        let set = SetattrIn { valid: SetattrValid::MODE.bits(), mode: 0o755, ..Default::default() };
        s.fs.setattr(node, &set).unwrap();
        assert!(is_unwritten(&s, "q"));
        // The guest still has it open.
        assert_eq!(s.write(node, 0, 4, b"more", 0, libc::O_RDWR), Ok(4));
        assert!(is_unwritten(&s, "q"));
        assert_eq!(s.read(node, 0, 0, 9).unwrap(), b"datamore");
    }
}

#[test]
fn only_a_guest_with_leases_has_no_handles() {
    let made = |config: Config, leases: bool| {
        let (s, _queue) = leased(&std::env::temp_dir(), config, 100);
        if !leases {
            s.fs.destroy();
            s.fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM - InitFlags::LEASES).unwrap();
        }
        has_handle(&create(&s, c"f", libc::O_RDWR, 0o600).open)
    };
    let cache = |cache| Config { cache, no_open: NoOpen::Never, ..Config::default() };
    use CachePolicy::{Always, Auto, Metadata};
    assert_eq!([cache(Auto), cache(Always)].map(|config| made(config, true)), [!root(); 2]);
    for config in [
        cache(Metadata),
        Config { writeback: true, ..cache(Auto) },
        Config { flock: true, ..cache(Auto) },
        Config { posix_lock: true, ..cache(Auto) },
    ] {
        assert!(made(config, true));
    }
    assert!(made(cache(Auto), false));
}
