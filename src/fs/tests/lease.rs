//! Leases: a guest that keeps what it is granted until its agent hears of a change, and a host that changes files at
//! the worst moments.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{OnceLock, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use thruway_guest::protocol::{Batch, Change, Done, MARKER, Place, VERSION, ops};

use super::*;
use crate::agent::{Look, Made};
use crate::fs::host::HostFs;
use crate::fs::lease::Point;
use crate::fs::{CachePolicy, Ownership};
use crate::fuse::ops::Repeats;
use crate::watch::tests::{Host, LONG, make, places};
use crate::watch::{Step, Watch};

/// The thread id of the guest's agent.
const AGENT: u32 = 7;

/// The guest's agent, as far as it hears of changes. It acknowledges each at once.
#[derive(Default)]
pub struct Ears {
    pub told: Mutex<Vec<Change>>,
    changed: Condvar,
    /// The watch's thread stays at its next step while this is set.
    held: AtomicBool,
    fs: OnceLock<Weak<PassthroughFs>>,
}

impl Ears {
    /// Those of an agent that has yet to register.
    pub fn of(fs: &Arc<PassthroughFs>) -> Arc<Self> {
        Arc::new(Self { fs: OnceLock::from(Arc::downgrade(fs)), ..Self::default() })
    }

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

    /// The agent registers, and waits for changes from then on. Returns its marker.
    pub fn register(self: &Arc<Self>, fs: &PassthroughFs) -> u64 {
        let token = fs.agents.hello(AGENT, VERSION).unwrap().token;
        let Look::Phantom(hidden) = fs.agents.look(AGENT, ROOT_ID, ROOT_ID, token.as_bytes()) else {
            panic!("unknown")
        };
        let made = fs.agents.make(AGENT, 0, hidden, MARKER.as_bytes(), false);
        let Made::Marker(marker) = made else { panic!("{made:?}") };
        fs.follow_known();
        self.listen(0);
        marker
    }

    /// Waits for changes. `batch` has been done.
    fn listen(self: &Arc<Self>, batch: u64) {
        let Some(fs) = self.fs.get().and_then(Weak::upgrade) else { return };
        fs.agents.look_again(|| fs.known_nodes());
        let ears = self.clone();
        let answer = move |bytes: Vec<u8>| {
            let batch = Batch::decode(&bytes).unwrap();
            ears.told.lock().extend(batch.changes);
            ears.changed.notify_all();
            ears.listen(batch.id);
        };
        // The session may be over.
        let _ = fs.agents.wait(AGENT, Done { batch, ..Done::default() }, Box::new(answer), || false);
    }

    /// Waits until the agent has heard of such a change.
    pub fn hears(&self, what: &str, is: impl Fn(&Change) -> bool) {
        let mut told = self.told.lock();
        while !told.iter().any(&is) {
            assert!(!self.changed.wait_for(&mut told, LONG).timed_out(), "{what}: nobody says it, but {told:?}");
        }
    }
}

/// Whether a change is about this name.
fn is_at(change: &Change, dir: u64, name: &str) -> bool {
    [&change.place, &change.to].into_iter().any(|place| (place.dir, &place.name[..]) == (dir, name.as_bytes()))
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

/// A guest that keeps what it was granted, until its agent repeats a change.
#[derive(Default)]
struct Guest {
    /// By directory and name; 0: nothing there.
    entries: HashMap<(u64, CString), u64>,
    attrs: HashMap<u64, Facts>,
    /// Directories and files that it knows, with references.
    nodes: HashMap<u64, (u64, bool)>,
    /// Changes that were repeated.
    handled: u64,
    /// When a node or a name was invalidated last, in these.
    inode_at: HashMap<u64, u64>,
    entry_at: HashMap<(u64, CString), u64>,
}

impl Guest {
    /// The agent repeats changes, by which the guest's kernel drops what they are about.
    fn handle(&mut self, told: Vec<Change>) {
        for change in told {
            self.handled += 1;
            for Place { dir, name } in [&change.place, &change.to].into_iter().filter(|place| place.dir != 0) {
                if change.has(ops::CREATE | ops::RENAME | ops::EXCHANGE | ops::REMOVE) {
                    self.drop_node(*dir);
                }
                self.drop_entry((*dir, CString::new(&name[..]).unwrap()));
            }
            if change.node != 0 {
                self.drop_node(change.node);
            }
            if change.has(ops::REFRESH) && change.node != 0 {
                // The agent opens it by handle, which ends the timeout of its name.
                let names = self.entries.iter().filter(|(_, node)| **node == change.node);
                names.map(|(key, _)| key.clone()).collect::<Vec<_>>().into_iter().for_each(|key| self.drop_entry(key));
            }
        }
    }

    fn drop_node(&mut self, node: u64) {
        self.attrs.remove(&node);
        self.inode_at.insert(node, self.handled);
    }

    fn drop_entry(&mut self, key: (u64, CString)) {
        if let Some(node) = self.entries.remove(&key) {
            self.drop_node(node);
        }
        self.entry_at.insert(key, self.handled);
    }

    /// Takes the attributes of a reply to a request that was sent when `sent` changes were repeated.
    fn attr(&mut self, sent: u64, node: u64, attr: &Attr, valid: u64) {
        let fresh = self.inode_at.get(&node).is_none_or(|at| *at <= sent);
        if valid == LEASE.as_secs() && fresh {
            self.attrs.insert(node, facts(attr));
        } else {
            self.attrs.remove(&node);
        }
    }

    fn entry(&mut self, sent: u64, dir: u64, name: &CStr, out: &EntryOut) {
        let key = (dir, name.to_owned());
        let fresh = self.entry_at.get(&key).is_none_or(|at| *at <= sent);
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
    ears: Arc<Ears>,
    guest: RefCell<Guest>,
    host: RefCell<Host>,
    random: RefCell<Random>,
    markers: RefCell<u32>,
    /// Changes cannot be repeated now: the guest's kernel has the directories locked.
    locked: RefCell<bool>,
    granted: RefCell<usize>,
}

/// A share with leases.
fn leased(place: &Path, config: Config, most_marks: usize) -> (Share, Arc<Ears>) {
    let (s, ears) = serve_watched(place, Config { lease_timeout: LEASE, ..config }, most_marks);
    s.fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap();
    ears.register(&s.fs);
    (s, ears)
}

/// A share that is watched, before a session.
fn serve_watched(place: &Path, config: Config, most_marks: usize) -> (Share, Arc<Ears>) {
    let ears = Arc::new(Ears::default());
    let passed = ears.clone();
    let dir = TempDir::new_in(place).unwrap();
    let fs = PassthroughFs::new(open_root(dir.path()), proc_self_fd().unwrap(), config).unwrap();
    let watch = Watch::with_limits(most_marks, 100_000).unwrap();
    let fs = Arc::new(fs.with_stepped_watch(watch, move |_: Step| passed.pass()));
    ears.fs.set(Arc::downgrade(&fs)).unwrap();
    fs.enter_thread(false);
    (Share { dir, fs }, ears)
}

const DIRS: [&CStr; 3] = [c"A", c"B", c"C"];
/// `sub` becomes a directory now and then.
const NAMES: [&CStr; 4] = [c"f", c"g", c"h", c"sub"];

impl World {
    fn new(place: &Path, seed: u64, config: Config) -> Rc<Self> {
        let (share, ears) = leased(place, config, 1000);
        for dir in DIRS.iter().map(|dir| dir.to_str().unwrap()).chain(["out"]) {
            fs::create_dir(share.dir.path().join(dir)).unwrap();
        }
        Rc::new(Self {
            share,
            ears,
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
            4 => self.ears.hold(true),
            5 => self.ears.hold(false),
            6 => self.take(),
            _ => {}
        }
    }

    /// The agent repeats what it has heard of.
    fn take(&self) {
        if *self.locked.borrow() {
            return;
        }
        let told = std::mem::take(&mut *self.ears.told.lock());
        self.guest.borrow_mut().handle(told);
    }

    /// Waits until the agent has heard of all changes. Whether none was lost.
    fn settle(&self) -> bool {
        let lost = || self.share.fs.agents.facts().counts.lost;
        let before = lost();
        self.ears.hold(false);
        loop {
            *self.markers.borrow_mut() += 1;
            let marker = format!("marker{}", self.markers.borrow());
            let mut seen = self.ears.told.lock().len();
            assert!(self.host.borrow_mut().run("mkdir", &[&self.share.dir.path().join(&marker)], ""));
            let mut told = self.ears.told.lock();
            loop {
                if told[seen..].iter().any(|change| is_at(change, ROOT_ID, &marker)) {
                    return lost() == before;
                }
                // The marker may be among what was lost. The agent looks at the root again then.
                if told[seen..].iter().any(|change| change.has(ops::REFRESH) && change.node == ROOT_ID) {
                    break;
                }
                // There may be thousands, and who tells them needs the lock.
                seen = told.len();
                assert!(!self.ears.changed.wait_for(&mut told, LONG).timed_out(), "the watch says nothing");
            }
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
                let got = fs.setattr(node, &set, CALLER);
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

    /// The guest creates a file, writes to it, and closes it.
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
        assert_eq!(written, Ok(5));
        self.share.fs.release(node, &ReleaseIn { fh: open.fh, ..Default::default() }).unwrap();
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
fn lost_events_end_the_leases_of_all_nodes() {
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
        world.ears.hold(true);
        for n in 0..most + 1000 {
            assert!(world.host.borrow_mut().run("mkdir", &[&path(&format!("B/n{n}"))], ""));
        }
        let mut host = world.host.borrow_mut();
        assert!(host.run("append", &[&path("A/f")], "2") && host.run("chmod", &[&path("C/f")], "600"));
        assert!(host.run("rename", &[&path("A/g"), &path("out/g")], ""));
        assert!(host.run("remove", &[&path("B/f")], ""));
        drop(host);
        assert!(!world.settle(), "nobody says that events were lost");
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
        let (s, ears) = leased(&place, Config::default(), 2);
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
        // Out of what is watched, and back.
        ears.told.lock().clear();
        s.fs.rename(a.nodeid, c"f", b.nodeid, c"g", 0, &me()).unwrap();
        // The watch's own thread may tell the second.
        ears.hears("its name", |change| change.has(ops::REFRESH) && is_at(change, b.nodeid, "g"));
        ears.hears("the file", |change| change.has(ops::REFRESH) && change.node == af.nodeid);
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
    let (s, ears) = leased(&std::env::temp_dir(), Config::default(), 100);
    let path = |name: &str| s.dir.path().join(name);
    fs::create_dir(path("out")).unwrap();
    make(&path("f"));
    fs::hard_link(path("f"), path("out/g")).unwrap();
    let f = s.lookup(c"f").unwrap();
    assert_eq!(valid(&f), (L, L));
    Host::start().run("append", &[&path("out/g")], "x");
    ears.hears("a write by the other link", |change| change.has(ops::CONTENTS) && change.node == f.nodeid);
}

#[test]
fn an_owner_in_an_attribute_is_leased_as_the_attributes_are() {
    const L: u64 = LEASE.as_secs();
    let config = Config { ownership: Ownership::Xattr, ..Config::default() };
    let (s, ears) = leased(&std::env::temp_dir(), config, 100);
    make(&s.dir.path().join("f"));
    let f = s.lookup(c"f").unwrap();
    assert_eq!(valid(&f), (L, L));
    let path = s.dir.path().join("f");
    assert!(Host::start().run("owner", &[&path], "7:8:0600:file"));
    ears.hears("another owner", |change| change.has(ops::ATTRIBUTES) && change.node == f.nodeid);
    assert_eq!(s.fs.getattr(f.nodeid, None).unwrap().attr.uid, 7);
}

#[test]
fn what_was_read_before_the_mark_is_read_again() {
    const L: u64 = LEASE.as_secs();
    let (s, _ears) = leased(&std::env::temp_dir(), Config::default(), 100);
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
    let (s, _ears) = leased(&std::env::temp_dir(), Config::default(), 100);
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
    let config = Config { killpriv_v2: true, ..Config::default() };
    let (s, _ears) = leased(&std::env::temp_dir(), config, 100);
    s.put("f", b"program");
    fs::set_permissions(s.dir.path().join("f"), fs::Permissions::from_mode(0o4755)).unwrap();
    // The host clears the bit at the guest's writes, and tells nobody.
    assert_eq!(valid(&s.lookup(c"f").unwrap()), (LEASE.as_secs(), 0));
}

#[test]
fn a_file_that_is_swapped_while_it_is_found_has_no_lease() {
    const L: u64 = LEASE.as_secs();
    let config = Config { inode_file_handles: FileHandles::Never, ..Config::default() };
    let (s, ears) = leased(&std::env::temp_dir(), config, 100);
    let [f, g] = ["f", "g"].map(|name| s.dir.path().join(name));
    make(&f);
    make(&g);
    // The directory is marked from now on. The event of the swap is not handled before the reply.
    assert_eq!(s.lookup(c"missing").unwrap().entry_valid, L);
    ears.hold(true);
    let (host, done) = (RefCell::new(Host::start()), RefCell::new(false));
    HOOK.set(Some(Rc::new(move |point| {
        if point == Point::BeforeTable && !done.replace(true) {
            assert!(host.borrow_mut().run("swap", &[&f, &g], ""));
        }
    })));
    // A listing opens no file. When the daemon asks by which handle events name the first, the name leads to the other.
    let mut list = List { room: 100, ..List::default() };
    let fh = s.fs.opendir(ROOT_ID, 0).unwrap().fh;
    s.fs.readdirplus(ROOT_ID, fh, 0, &mut list).unwrap();
    HOOK.set(None);
    ears.hold(false);
    let found = &list.entries.iter().find(|(_, out)| out.nodeid > ROOT_ID).unwrap().1;
    assert_eq!(valid(found), (L, 1));
}

#[test]
fn without_an_agent_nothing_is_leased_or_marked() {
    let config = || Config { lease_timeout: LEASE, ..Config::default() };
    let (s, ears) = serve_watched(&std::env::temp_dir(), config(), 100);
    s.fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap();
    s.put("f", b"1");
    let marked = || s.fs.watched().unwrap().marks;
    let f = s.lookup(c"f").unwrap();
    assert_eq!((valid(&f), marked()), ((1, 1), 0));
    assert_eq!(s.lookup(c"missing").err(), Some(Errno::NOENT));
    // It learns of what the guest knows already.
    let marker = ears.register(&s.fs);
    assert_eq!(marked(), 1);
    Host::start().run("append", &[&s.dir.path().join("f")], "x");
    ears.hears("a write", |change| change.has(ops::CONTENTS) && change.node == f.nodeid);
    assert_eq!(s.lookup(c"missing").unwrap().entry_valid, LEASE.as_secs());
    s.fs.agents.forgot(marker);
    assert_eq!(s.lookup(c"missing").err(), Some(Errno::NOENT));
    // What the guest forgets meanwhile is not watched for the next one.
    let nodes = || s.fs.watched().unwrap().nodes;
    let before = nodes();
    s.fs.forget(f.nodeid, 2);
    assert_eq!(nodes(), before - 1);
    // The session ends, and with it the agent.
    ears.register(&s.fs);
    s.fs.destroy();
    s.fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap();
    assert_eq!((valid(&s.lookup(c"f").unwrap()), marked()), ((1, 1), 0));
}

/// Writes by libaio cause no event, so the attributes of a file that somebody has open for writing are not leased.
#[test]
fn a_file_that_others_write_has_no_leased_attributes() {
    const L: u64 = LEASE.as_secs();
    let (s, ears) = leased(&std::env::temp_dir(), Config::default(), 100);
    let dev = s.fs.inodes.get(ROOT_ID).unwrap().key.dev;
    let mut host = HostFs::default();
    (host.watchable, host.ctime_reliable) = (true, true);
    s.fs.hosts.pretend(dev, host);
    s.put("f", b"1");
    let look = || {
        ears.told.lock().clear();
        valid(&s.lookup(c"f").unwrap())
    };
    while look() != (L, L) {}
    let node = s.lookup(c"f").unwrap().nodeid;
    let guest_reads = || {
        let fh = open(&s.fs, node, libc::O_RDONLY).unwrap().fh;
        s.fs.release(node, &ReleaseIn { fh, ..Default::default() }).unwrap();
    };
    guest_reads();
    assert_eq!(look(), (L, L));
    let mut writer = fs::OpenOptions::new().append(true).open(s.dir.path().join("f")).unwrap();
    // On a slow machine the guest has kept its pages, and an open of an unchanged file finds no writer.
    writer.write_all(b"2").unwrap();
    guest_reads();
    // What was leased ends, and nothing is leased again.
    ears.hears("a writer", |change| change.has(ops::REFRESH) && change.node == node);
    assert_eq!(look(), (L, 1));
    assert_eq!(s.fs.getattr(node, None).unwrap().attr_valid, 1);
    drop(writer);
    guest_reads();
    assert_eq!(look(), (L, L));
}

/// A change is told by a name that the guest does not know the file by.
#[test]
fn names_are_not_leased_where_case_does_not_matter() {
    const L: u64 = LEASE.as_secs();
    let config = Config { negative_timeout: Duration::from_secs(5), ..Config::default() };
    let (s, _ears) = leased(&std::env::temp_dir(), config.clone(), 100);
    fs::create_dir(s.dir.path().join("dir")).unwrap();
    fs::write(s.dir.path().join("dir/f"), "1").unwrap();
    let dir = s.lookup(c"dir").unwrap().nodeid;
    let look = |s: &Share, dir, name| s.fs.lookup(dir, name).map_or(0, |out| out.entry_valid);
    assert_eq!((look(&s, dir, c"f"), look(&s, dir, c"missing")), (L, L));
    let fold = |s: &Share, dir| s.fs.inodes.get(dir).unwrap().folds.set(Some(true));
    fold(&s, dir);
    assert_eq!((look(&s, dir, c"f"), look(&s, dir, c"missing")), (1, 0));
    // The attributes are told of by the file's handle.
    assert_eq!(s.fs.lookup(dir, c"f").unwrap().attr_valid, L);
    // Other directories are as they were.
    assert_eq!(look(&s, ROOT_ID, c"missing"), L);
    // Without leases, too.
    let s = share(config);
    assert_eq!(look(&s, ROOT_ID, c"missing"), 5);
    fold(&s, ROOT_ID);
    assert_eq!(s.lookup(c"missing").err(), Some(Errno::NOENT));
}

#[test]
fn leases_follow_the_cache_mode() {
    let valid = |config: Config, lease_timeout| {
        let (s, ears) = serve_watched(&std::env::temp_dir(), Config { lease_timeout, ..config }, 100);
        s.fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap();
        ears.register(&s.fs);
        s.put("f", b"1");
        // Its events are repeated in any case.
        assert!(s.fs.watch().unwrap().is_marked(ROOT_ID));
        (s.lookup(c"f").unwrap().entry_valid, s.lookup(c"missing").map_or(0, |out| out.entry_valid))
    };
    let cache = |cache| Config { cache, ..Config::default() };
    use CachePolicy::{Always, Auto, Metadata, Never};
    const L: u64 = LEASE.as_secs();
    assert_eq!(valid(cache(Always), LEASE), (86400, L));
    assert_eq!(valid(cache(Metadata), LEASE), (86400, L));
    assert_eq!(valid(cache(Never), LEASE), (0, 0));
    assert_eq!(valid(cache(Auto), Duration::ZERO), (1, 0));
    let others = [
        cache(Auto),
        Config { writeback: true, ..cache(Auto) },
        Config { flock: true, ..cache(Auto) },
        Config { posix_lock: true, ..cache(Auto) },
    ];
    for config in others {
        assert_eq!(valid(config, LEASE), (L, L));
    }
}

#[test]
fn a_file_system_that_cannot_be_watched_has_timeouts() {
    let config = Config { lease_timeout: LEASE, ..Config::default() };
    let (s, ears) = serve_watched(&std::env::temp_dir(), config, 100);
    let dev = s.fs.inodes.get(ROOT_ID).unwrap().key.dev;
    s.fs.hosts.pretend(dev, HostFs::default());
    s.fs.init(InitFlags::all() - InitFlags::PASSTHROUGH_SHM).unwrap();
    ears.register(&s.fs);
    s.put("f", b"1");
    let f = s.lookup(c"f").unwrap();
    assert_eq!(valid(&f), (1, 1));
    assert_eq!(s.fs.getattr(f.nodeid, None).unwrap().attr_valid, 1);
    assert_eq!(s.lookup(c"missing").err(), Some(Errno::NOENT));
    // A new agent looks at everything. It is told of no change.
    assert!(ears.told.lock().iter().all(|change| change.has(ops::REFRESH)));
}
