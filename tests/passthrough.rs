//! Window passthrough of a whole device, with the real window process and guard, and a guest that reads the table and
//! acknowledges. Needs root and Linux 6.9, and 6.14 for the guard.
//!
//! Each test has its own process, since only a process with one thread can start the window process.

mod common;
mod locked;
mod moving;
mod processes;

use std::fs::{self, File, FileTimes, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Child, ExitCode};
use std::sync::Arc;
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant, UNIX_EPOCH};

use common::wait_until;
use locked::Locked;
use moving::{load, save};
use processes::{run_all, skip, this};
use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;
use thruway::device;
use thruway::fs::{Config, Migration, MigrationOnError, PassthroughFs, proc_self_fd};
use thruway::fuse::Server;
use thruway::fuse::abi::*;
use thruway::sandbox::seccomp;
use thruway::window::proxy::{self, Guard, GuardMode, Proxy};
use thruway::window::{RANGE, Settings, Window, Writable};
use thruway_bench::frontend::{Frontend, Mapped, Options, Token, Window as Regions};
use vhost::vhost_user::message::VhostUserVirtioFeatures;
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, FileOffset, VolatileMemory};
use zerocopy::{FromBytes, IntoBytes};

const TESTS: &[(&str, fn())] = &[
    ("a_file_is_mapped_once_and_whole", a_file_is_mapped_once_and_whole),
    ("sizes_follow_the_guests_changes", sizes_follow_the_guests_changes),
    ("sizes_follow_the_hosts_changes", sizes_follow_the_hosts_changes),
    ("times_follow_what_the_guest_stores", times_follow_what_the_guest_stores),
    ("appends_by_the_host_revoke_nothing", appends_by_the_host_revoke_nothing),
    ("holes_are_not_written_in_place", holes_are_not_written_in_place),
    ("what_is_not_worth_it_stays_with_messages", what_is_not_worth_it_stays_with_messages),
    ("slots_are_few_and_evicted", slots_are_few_and_evicted),
    ("a_file_that_grows_gets_a_longer_slot", a_file_that_grows_gets_a_longer_slot),
    ("the_host_waits_for_the_acknowledgement", the_host_waits_for_the_acknowledgement),
    ("a_file_that_is_locked_delays_no_other", a_file_that_is_locked_delays_no_other),
    ("a_file_that_is_locked_delays_no_revocation", a_file_that_is_locked_delays_no_revocation),
    ("without_acknowledgement_there_is_a_cached_proxy_file", without_acknowledgement_there_is_a_cached_proxy_file),
    ("the_table_is_not_believed", the_table_is_not_believed),
    ("a_session_begins_with_nothing", a_session_begins_with_nothing),
    ("a_stock_guest_sees_nothing_of_it", a_stock_guest_sees_nothing_of_it),
    ("with_a_dax_window_too", with_a_dax_window_too),
    ("a_guest_that_moves_lets_go_of_all_slots", a_guest_that_moves_lets_go_of_all_slots),
    ("a_guest_that_has_moved_gets_slots_anew", a_guest_that_has_moved_gets_slots_anew),
    ("a_guest_moves_only_to_the_same_windows", a_guest_moves_only_to_the_same_windows),
];

const SIZE: u64 = 64 * RANGE;
const SLOTS: usize = 3;
const SOON: Duration = Duration::from_secs(1);
/// A patience and a deadline that no test reaches.
const HOUR: Duration = Duration::from_secs(3600);

const VALID: u32 = 1;
const WRITABLE: u32 = 2;
const REVOKED: u32 = 4;
/// Where the guest's words of all entries begin: 16 bytes for each entry, of which an acknowledgement is the first.
const ACKS: usize = 64 * 4096;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--run", name] => TESTS.iter().find(|(n, _)| *n == name).unwrap().1(),
        ["--truncate", path, size] => truncate(path, size.parse().unwrap()),
        ["--append", path] => OpenOptions::new().append(true).open(path).unwrap().write_all(&[b'a'; 1 << 16]).unwrap(),
        _ => return run_tests(args.iter().find(|arg| !arg.starts_with('-')).map_or("", String::as_str)),
    }
    ExitCode::SUCCESS
}

/// A process of the host that truncates a file.
fn truncate(path: &str, size: u64) {
    // The crate vhost receives descriptors without O_CLOEXEC, so this process has inherited the mapping that must go.
    // SAFETY: nothing in this process uses these descriptors.
    assert_eq!(unsafe { libc::close_range(3, u32::MAX, 0) }, 0);
    OpenOptions::new().write(true).open(path).unwrap().set_len(size).unwrap();
}

fn run_tests(filter: &str) -> ExitCode {
    let names = TESTS.iter().map(|(name, _)| ((*name).to_owned(), *name));
    run_all(names, filter, |name| this(&["--run", name]).status().unwrap())
}

/// A mapping as the guest has it.
struct Memory(MmapRegion);

impl Memory {
    fn new(mapped: &Mapped) -> Self {
        let file = File::from(mapped.file.try_clone().unwrap());
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let file = Some(FileOffset::new(file, mapped.from));
        Self(MmapRegion::build(file, mapped.len as usize, prot, flags).unwrap())
    }

    fn get<T: vm_memory::ByteValued>(&self, at: usize) -> T {
        self.0.as_volatile_slice().read_obj(at).unwrap()
    }

    fn put<T: vm_memory::ByteValued>(&self, at: usize, value: T) {
        self.0.as_volatile_slice().write_obj(value, at).unwrap();
    }
}

/// An entry of the table. Nobody writes while it is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entry {
    flags: u32,
    offset: u64,
    length: u64,
    size: u64,
    nodeid: u64,
    change: u64,
    generation: u32,
    lost: u32,
}

struct Guest {
    frontend: Frontend,
    regions: Regions,
    dir: Arc<TempDir>,
    guard: Guard,
    table: Memory,
}

/// Starts a window process.
fn window_process(deadline: Duration) -> Proxy {
    proxy::start(GuardMode::Fanotify, deadline, seccomp::Action::Kill).unwrap_or_else(|e| skip(e))
}

/// A daemon that shares the directory, which has its socket too.
fn serve(proxy: Proxy, dir: &TempDir, socket: &str, config: Config, dax: u64, settings: Settings) -> Frontend {
    let window = Window::new(dax, Some(settings), Arc::new(proxy)).unwrap();
    let root = rustix::fs::open(dir.path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let fs = PassthroughFs::new(root, proc_self_fd().unwrap(), config).unwrap();
    let fs = fs.with_window(Some(window.clone()));
    let listener = UnixListener::bind(dir.path().join(socket)).unwrap();
    let options = device::Options { keep_alive: true, window: Some(window), ..Default::default() };
    spawn(move || device::serve(listener, Arc::new(Server::new(fs)), options));
    Frontend::connect(&dir.path().join(socket), Options::default()).unwrap()
}

impl Guest {
    fn new() -> Self {
        Self::with(Config { passthrough_min_size: 1000, ..Default::default() }, 0, Writable::InPlace)
    }

    fn guarded() -> Self {
        Self::guarded_for(HOUR, HOUR)
    }

    fn guarded_for(patience: Duration, deadline: Duration) -> Self {
        let config = Config { passthrough_min_size: 1000, ..Default::default() };
        let guest = Self::waiting(config, 0, Writable::InPlace, patience, deadline);
        match &guest.guard {
            Guard::On => guest,
            off => skip(off),
        }
    }

    fn with(config: Config, dax: u64, writable: Writable) -> Self {
        Self::waiting(config, dax, writable, HOUR, HOUR)
    }

    fn waiting(config: Config, dax: u64, writable: Writable, patience: Duration, deadline: Duration) -> Self {
        let settings = Settings { size: SIZE, slots: SLOTS, writable, patience };
        Self::mounted(window_process(deadline), config, dax, settings)
    }

    fn mounted(proxy: Proxy, config: Config, dax: u64, settings: Settings) -> Self {
        let dir = Arc::new(TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        let guard = proxy.guard().clone();
        let mut frontend = serve(proxy, &dir, "socket", config, dax, settings);
        let regions = frontend.open_window().unwrap();
        assert_eq!(regions.sizes, [dax, SIZE - RANGE, RANGE]);
        let flags = init(&frontend, u64::MAX);
        assert!(flags.contains(InitFlags::PASSTHROUGH_SHM));
        assert!(!flags.intersects(InitFlags::WRITEBACK_CACHE | InitFlags::PASSTHROUGH));
        let table = Memory::new(&regions.mapped_in(2)[&0]);
        Self { frontend, regions, dir, guard, table }
    }

    /// This guest at another daemon, which is not on its way there yet.
    fn target(&self, proxy: Proxy, socket: &str, settings: Settings) -> (Frontend, Regions) {
        let migration = Migration { on_error: MigrationOnError::GuestError, ..Config::default().migration };
        let config = Config { passthrough_min_size: 1000, migration, ..Default::default() };
        let mut frontend = serve(proxy, &self.dir, socket, config, 0, settings);
        let regions = frontend.open_window().unwrap();
        (frontend, regions)
    }

    /// The guest is about to move to another daemon, or stays after all.
    fn leaves(&self, leaves: bool) {
        let logging = VhostUserVirtioFeatures::LOG_ALL.bits();
        self.frontend.set_features(if leaves { logging } else { 0 }).unwrap();
    }

    /// The session, if it can move. The device goes on afterwards.
    fn save(&mut self) -> Option<Vec<u8>> {
        let bases = [0, 1].map(|queue| self.frontend.stop_queue(queue).unwrap());
        let state = save(&mut self.frontend);
        [0, 1].iter().for_each(|queue| self.frontend.start_queue(*queue, bases[*queue]).unwrap());
        state
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A new file without holes, full of "r".
    fn file(&self, name: &str, size: usize) -> File {
        fs::write(self.path(name), vec![b'r'; size]).unwrap();
        OpenOptions::new().read(true).write(true).open(self.path(name)).unwrap()
    }

    fn call(&self, opcode: Opcode, node: u64, args: &[u8], room: usize) -> Result<Vec<u8>, i32> {
        self.frontend.request(1, opcode as u32, node, args, &[], room)
    }

    fn lookup(&self, name: &str) -> u64 {
        let name = format!("{name}\0");
        let entry = self.call(Opcode::Lookup, ROOT_ID, name.as_bytes(), size_of::<EntryOut>()).unwrap();
        EntryOut::read_from_bytes(&entry).unwrap().nodeid
    }

    /// The handle, and the index if it has passthrough.
    fn open(&self, node: u64, flags: i32) -> (u64, Option<u32>) {
        let open = OpenIn { flags: flags as u32, open_flags: 0 };
        let out = self.call(Opcode::Open, node, open.as_bytes(), size_of::<OpenOut>()).unwrap();
        let out = OpenOut::read_from_bytes(&out).unwrap();
        let passes = out.open_flags & OpenFlags::PASSTHROUGH.bits() != 0;
        assert!(passes == (out.open_flags == OpenFlags::PASSTHROUGH.bits()) && passes == (out.backing_id > 0));
        (out.fh, passes.then_some(out.backing_id as u32))
    }

    fn release(&self, node: u64, fh: u64) {
        self.call(Opcode::Release, node, ReleaseIn { fh, ..Default::default() }.as_bytes(), 0).unwrap();
    }

    fn write(&self, node: u64, fh: u64, offset: u64, len: usize) {
        let write = WriteIn { fh, offset, size: len as u32, ..Default::default() };
        let args = [write.as_bytes(), &vec![b'w'; len]].concat();
        self.call(Opcode::Write, node, &args, size_of::<WriteOut>()).unwrap();
    }

    fn setattr_size(&self, node: u64, size: u64) {
        let attr = SetattrIn { valid: SetattrValid::SIZE.bits(), size, ..Default::default() };
        self.call(Opcode::Setattr, node, attr.as_bytes(), size_of::<AttrOut>()).unwrap();
    }

    fn fallocate(&self, node: u64, fh: u64, mode: i32, offset: u64, length: u64) {
        let args = FallocateIn { fh, offset, length, mode: mode as u32, padding: 0 };
        self.call(Opcode::Fallocate, node, args.as_bytes(), 0).unwrap();
    }

    fn getattr(&self, node: u64) -> Attr {
        let out = self.call(Opcode::Getattr, node, GetattrIn::default().as_bytes(), size_of::<AttrOut>()).unwrap();
        AttrOut::read_from_bytes(&out).unwrap().attr
    }

    /// The nodeid that READDIRPLUS gives a file of the share. 0: there are no attributes.
    fn listed(&self, name: &str) -> u64 {
        let opened = self.call(Opcode::Opendir, ROOT_ID, OpenIn::default().as_bytes(), size_of::<OpenOut>());
        let fh = OpenOut::read_from_bytes(&opened.unwrap()).unwrap().fh;
        let args = ReadIn { fh, size: 4096, ..Default::default() };
        let listed = self.call(Opcode::Readdirplus, ROOT_ID, args.as_bytes(), 4096).unwrap();
        let mut rest = &listed[..];
        loop {
            let (entry, after) = EntryOut::read_from_prefix(rest).unwrap();
            let (dirent, after) = Dirent::read_from_prefix(after).unwrap();
            if &after[..dirent.namelen as usize] == name.as_bytes() {
                return entry.nodeid;
            }
            rest = &after[(dirent.namelen as usize).next_multiple_of(8)..];
        }
    }

    /// Sends a request without waiting for the reply.
    fn send(&self, opcode: Opcode, node: u64, args: &[u8], room: usize) -> Token {
        let (_, head) = self.frontend.header(opcode as u32, node, args.len());
        self.frontend.submit(1, &[&[&head, args].concat()], &[16, room]).unwrap()
    }

    fn ask(&self, node: u64, fh: u64, foffset: u64, len: u64, write: bool) -> Result<(), i32> {
        let flags = SETUPMAPPING_PASSTHROUGH | if write { SETUPMAPPING_WRITE } else { 0 };
        let args = SetupmappingIn { fh, foffset, len, flags, moffset: 0 };
        self.call(Opcode::Setupmapping, node, args.as_bytes(), 0).map(drop)
    }

    fn entry(&self, index: u32) -> Entry {
        let at = 64 * index as usize;
        let word = |n: usize| self.table.get::<u64>(at + 8 * n);
        let (flags, generation, lost) = (self.table.get(at + 4), self.table.get(at + 48), self.table.get(at + 52));
        let (offset, length, size, nodeid, change) = (word(1), word(2), word(3), word(4), word(5));
        Entry { flags, offset, length, size, nodeid, change, generation, lost }
    }

    fn revocations(&self) -> u32 {
        self.table.get(24)
    }

    fn acknowledge(&self, index: u32) {
        self.table.put(ACKS + 16 * index as usize, self.entry(index).generation);
    }

    /// Says that the guest has stored to a slot.
    fn stored(&self, index: u32) {
        self.table.put(ACKS + 16 * index as usize + 4, 1u32);
    }

    /// Waits for a revocation, acknowledges it, and waits until the entry is live again.
    fn let_go(&self, index: u32) -> Entry {
        wait_until("revoked", || self.entry(index).flags & REVOKED != 0);
        self.acknowledge(index);
        wait_until("live", || self.entry(index).flags & (VALID | REVOKED) == VALID);
        self.entry(index)
    }

    /// Mappings of the window: a slot that has grown has several.
    fn slots(&self) -> usize {
        self.regions.mapped_in(1).len()
    }

    /// Opens files until no mapping is left.
    fn take_all_mappings(&self) {
        for number in self.slots()..SLOTS {
            let name = format!("other{number}");
            self.file(&name, 2000);
            self.open(self.lookup(&name), libc::O_RDWR).1.unwrap();
        }
        assert_eq!(self.slots(), SLOTS);
    }

    fn slot(&self, index: u32) -> Memory {
        Memory::new(&self.regions.mapped_in(1)[&self.entry(index).offset])
    }

    fn host_truncates(&self, name: &str, size: u64) -> Child {
        this(&["--truncate", self.path(name).to_str().unwrap(), &size.to_string()]).spawn().unwrap()
    }
}

fn init(frontend: &Frontend, flags: u64) -> InitFlags {
    let out = InitOut::read_from_bytes(&frontend.fuse_init(flags).unwrap()).unwrap();
    InitFlags::from_bits_retain(u64::from(out.flags) | u64::from(out.flags2) << 32)
}

fn byte(file: &File, at: u64) -> u8 {
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    byte[0]
}

fn a_file_is_mapped_once_and_whole() {
    let guest = Guest::new();
    let (file, other) = (guest.file("file", 5_000_000), guest.file("other", 5_000));
    let node = guest.lookup("file");
    let (fh, index) = guest.open(node, libc::O_RDONLY);
    let index = index.unwrap();
    let entry = guest.entry(index);
    let (nodeid, size) = (node, 5_000_000_u64);
    let length = (2 * size).next_multiple_of(RANGE);
    let offset = entry.offset;
    let live = Entry { flags: VALID | WRITABLE, offset, length, size, nodeid, change: 0, generation: 1, lost: 0 };
    assert_eq!((entry, offset % RANGE), (live, 0));
    let slot = guest.slot(index);
    assert_eq!([0, 4_999_999, 5_000_000].map(|at| slot.get::<u8>(at)), [b'r', b'r', 0]);
    slot.put(4_000_000, b's');
    file.write_all_at(b"h", 1).unwrap();
    assert_eq!((byte(&file, 4_000_000), slot.get::<u8>(1)), (b's', b'h'));

    // Opens share it, and the next one after the last finds it.
    let mapped = guest.regions.mapped_in(1)[&offset].file.clone();
    let (fh2, again) = guest.open(node, libc::O_RDWR);
    assert_eq!((again, guest.entry(index)), (Some(index), live));
    guest.release(node, fh);
    assert_eq!(guest.entry(index), live);
    guest.release(node, fh2);
    assert_eq!((guest.entry(index).flags, guest.slots()), (0, 1));
    file.set_len(6_000_000).unwrap();
    file.write_all_at(&[b'h'; 1_000_000], 5_000_000).unwrap();
    assert_eq!(guest.open(node, libc::O_RDONLY).1, Some(index));
    assert_eq!(guest.entry(index), Entry { generation: 2, size: 6_000_000, ..live });
    assert!(Arc::ptr_eq(&mapped, &guest.regions.mapped_in(1)[&offset].file));

    // Another file is in another slot.
    let (_, second) = guest.open(guest.lookup("other"), libc::O_RDWR);
    other.write_all_at(b"o", 0).unwrap();
    assert_eq!((guest.slot(second.unwrap()).get::<u8>(0), slot.get::<u8>(0), guest.slots()), (b'o', b'r', 2));
}

fn sizes_follow_the_guests_changes() {
    let guest = Guest::new();
    guest.file("file", 5000);
    guest.file("from", 5000);
    let node = guest.lookup("file");
    let (fh, index) = guest.open(node, libc::O_RDWR);
    let index = index.unwrap();
    let size = || guest.entry(index).size;
    guest.write(node, fh, 5000, 100);
    assert_eq!(size(), 5100);
    let append = WriteIn { fh, size: 7, flags: libc::O_APPEND as u32, ..Default::default() };
    let args = [append.as_bytes(), b"appends"].concat();
    guest.call(Opcode::Write, node, &args, size_of::<WriteOut>()).unwrap();
    assert_eq!(size(), 5107);
    guest.setattr_size(node, 4000);
    assert_eq!(size(), 4000);
    guest.fallocate(node, fh, 0, 3000, 5000);
    assert_eq!(size(), 8000);
    guest.fallocate(node, fh, libc::FALLOC_FL_KEEP_SIZE, 8000, 5000);
    assert_eq!(size(), 8000);
    let from = guest.lookup("from");
    let (fh_in, _) = guest.open(from, libc::O_RDONLY);
    let copy = CopyFileRangeIn { fh_in, nodeid_out: node, fh_out: fh, off_out: 8000, len: 1000, ..Default::default() };
    guest.call(Opcode::CopyFileRange, from, copy.as_bytes(), size_of::<WriteOut>()).unwrap();
    assert_eq!(size(), 9000);
    assert_eq!(guest.open(node, libc::O_RDWR | libc::O_TRUNC).1, Some(index));
    assert_eq!(size(), 0);
    guest.write(node, fh, 0, 20_000);
    assert_eq!((size(), guest.getattr(node).size), (20_000, 20_000));
    let entry = guest.entry(index);
    assert_eq!((entry.change, entry.generation, entry.flags), (0, 1, VALID | WRITABLE));
}

fn sizes_follow_the_hosts_changes() {
    let guest = Guest::new();
    let file = guest.file("file", 5000);
    let node = guest.lookup("file");
    let index = guest.open(node, libc::O_RDWR).1.unwrap();
    file.write_all_at(b"more", 5000).unwrap();
    assert_eq!(guest.entry(index).size, 5000);
    guest.getattr(node);
    assert_eq!((guest.entry(index).size, guest.entry(index).change), (5004, 1));
    guest.getattr(node);
    assert_eq!(guest.entry(index).change, 1);
}

fn times_follow_what_the_guest_stores() {
    let guest = Guest::new();
    let file = guest.file("file", 5000);
    let node = guest.lookup("file");
    let (fh, index) = guest.open(node, libc::O_RDWR);
    let index = index.unwrap();
    let past = UNIX_EPOCH + 1000 * SOON;
    let old = || file.set_times(FileTimes::new().set_modified(past).set_accessed(past)).unwrap();
    let is_old = || file.metadata().unwrap().modified().unwrap() == past;
    type Ask = fn(&Guest, u64, u64);
    // Requests that leave the times alone, and others. Those that fail count too.
    let leave: &[(&str, Ask)] = &[
        ("getattr", |guest, node, _| {
            guest.getattr(node);
        }),
        ("statx", |guest, node, _| {
            guest.call(Opcode::Statx, node, StatxIn::default().as_bytes(), size_of::<StatxOut>()).unwrap();
        }),
        ("lookup", |guest, node, _| assert_eq!(guest.lookup("file"), node)),
        ("link", |guest, node, _| {
            let _ = fs::remove_file(guest.path("link"));
            let args = [LinkIn { oldnodeid: node }.as_bytes(), b"link\0"].concat();
            guest.call(Opcode::Link, ROOT_ID, &args, size_of::<EntryOut>()).unwrap();
        }),
        ("setattr", |guest, node, _| {
            let attr = SetattrIn { valid: SetattrValid::MODE.bits(), mode: 0o600, ..Default::default() };
            guest.call(Opcode::Setattr, node, attr.as_bytes(), size_of::<AttrOut>()).unwrap();
        }),
        ("setxattr", |guest, node, _| drop(guest.call(Opcode::Setxattr, node, b"user.x\0", 0))),
        ("removexattr", |guest, node, _| drop(guest.call(Opcode::Removexattr, node, b"user.x\0", 0))),
        ("flush", |guest, node, fh| {
            guest.call(Opcode::Flush, node, FlushIn { fh, ..Default::default() }.as_bytes(), 0).unwrap();
        }),
        ("fsync", |guest, node, fh| {
            guest.call(Opcode::Fsync, node, FsyncIn { fh, ..Default::default() }.as_bytes(), 0).unwrap();
        }),
        ("setupmapping", |guest, node, fh| guest.ask(node, fh, 0, 4096, true).unwrap()),
        ("open and release", |guest, node, _| guest.release(node, guest.open(node, libc::O_RDONLY).0)),
    ];
    let change: &[(&str, Ask)] = &[
        ("write", |guest, node, _| {
            let args = WriteIn { fh: u64::MAX, size: 1, ..Default::default() };
            drop(guest.call(Opcode::Write, node, &[args.as_bytes(), b"w"].concat(), size_of::<WriteOut>()));
        }),
        ("fallocate", |guest, node, _| {
            let args = FallocateIn { fh: u64::MAX, length: 1, ..Default::default() };
            drop(guest.call(Opcode::Fallocate, node, args.as_bytes(), 0));
        }),
        ("copy to it", |guest, node, _| {
            let args = CopyFileRangeIn { fh_in: u64::MAX, nodeid_out: node, len: 1, ..Default::default() };
            drop(guest.call(Opcode::CopyFileRange, ROOT_ID, args.as_bytes(), size_of::<WriteOut>()));
        }),
        ("copy from it", |guest, node, _| {
            let args = CopyFileRangeIn { fh_in: u64::MAX, nodeid_out: ROOT_ID, len: 1, ..Default::default() };
            drop(guest.call(Opcode::CopyFileRange, node, args.as_bytes(), size_of::<WriteOut>()));
        }),
    ];
    for (name, ask) in leave.iter().chain(change) {
        old();
        ask(&guest, node, fh);
        assert!(is_old(), "{name} alone");
        guest.stored(index);
        ask(&guest, node, fh);
        assert!(!is_old(), "{name} after a store");
        assert_eq!(guest.table.get::<u32>(ACKS + 16 * index as usize + 4), 0, "{name}");
        assert_eq!(file.metadata().unwrap().accessed().unwrap(), past, "{name}");
    }
    // What the guest is told has the new time, by whatever request it asks.
    old();
    guest.stored(index);
    let told = guest.getattr(node).mtime;
    assert_eq!(told, file.metadata().unwrap().mtime() as u64);
    assert!(told > 1000);
    // A listing leaves out the attributes of a file whose times would have to be waited for.
    guest.getattr(node);
    assert_eq!(guest.listed("file"), node);
    guest.stored(index);
    assert_eq!(guest.listed("file"), 0);
    guest.lookup("file");
    assert_eq!(guest.listed("file"), node);
    // A time that a process of the guest sets stays.
    guest.stored(index);
    let attr = SetattrIn { valid: SetattrValid::MTIME.bits(), mtime: 2000, ..Default::default() };
    guest.call(Opcode::Setattr, node, attr.as_bytes(), size_of::<AttrOut>()).unwrap();
    assert_eq!((guest.getattr(node).mtime, guest.entry(index).change), (2000, 0));
    // Nobody asks: at the end of the slot.
    guest.take_all_mappings();
    guest.write(node, fh, 5000, 2 * RANGE as usize);
    wait_until("revoked", || guest.entry(index).flags & REVOKED != 0);
    guest.getattr(node);
    old();
    guest.stored(index);
    guest.let_go(index);
    // Another thread does it.
    wait_until("the file has its times", || !is_old());
}

/// The guest keeps the file in place while the host makes it longer.
fn appends_by_the_host_revoke_nothing() {
    let guest = Guest::guarded();
    let file = guest.file("file", 5_000_000);
    let node = guest.lookup("file");
    let index = guest.open(node, libc::O_RDWR).1.unwrap();
    let before = guest.entry(index);
    for n in 1..=32 {
        assert!(this(&["--append", guest.path("file").to_str().unwrap()]).status().unwrap().success());
        let size = 5_000_000 + (n << 16);
        // The guest asks, or the kernel tells.
        if n % 2 == 0 {
            assert_eq!(guest.getattr(node).size, size);
        }
        wait_until("told", || guest.entry(index).size == size);
    }
    let after = guest.entry(index);
    assert_eq!(after, Entry { size: after.size, change: after.change, ..before });
    // One for each append, and one more if the kernel tells of the last one while the next is half done.
    assert!((32..64).contains(&after.change), "{}", after.change);
    assert_eq!((after.flags, guest.revocations()), (VALID | WRITABLE, 0));
    assert_eq!(guest.slot(index).get::<u8>(after.size as usize - 1), b'a');
    // Longer by a hole.
    file.set_len(after.size + 100_000).unwrap();
    guest.getattr(node);
    assert_eq!((guest.entry(index).flags, guest.revocations()), (VALID | WRITABLE | REVOKED, 1));
}

fn holes_are_not_written_in_place() {
    let guest = Guest::new();
    let file = guest.file("file", 5000);
    file.set_len(1 << 20).unwrap();
    let node = guest.lookup("file");
    for flags in [libc::O_RDONLY, libc::O_RDWR] {
        let (fh, none) = guest.open(node, flags);
        assert_eq!((none, guest.slots()), (None, 0));
        guest.release(node, fh);
    }
    // Messages fill the holes.
    let (fh, none) = guest.open(node, libc::O_RDWR);
    guest.write(node, fh, 4096, (1 << 20) - 4096);
    guest.release(node, fh);
    assert_eq!(none, None);
    let (fh, index) = guest.open(node, libc::O_RDWR);
    let index = index.unwrap();
    assert_eq!(guest.entry(index).flags, VALID | WRITABLE);
    // A slot that is kept is no use if the file has got a hole.
    guest.release(node, fh);
    file.set_len(3 << 20).unwrap();
    let (fh, none) = guest.open(node, libc::O_RDWR);
    assert_eq!((none, guest.entry(index).flags), (None, 0));
    wait_until("unmapped", || guest.slots() == 0);
    guest.release(node, fh);
    file.set_len(1 << 20).unwrap();
    let (fh, index) = guest.open(node, libc::O_RDWR);
    let index = index.unwrap();
    // The file gets a hole: the guest must let go, and may then read in place again.
    let before = guest.revocations();
    guest.setattr_size(node, 2 << 20);
    let revoked = guest.entry(index);
    let revocations = guest.revocations() - before;
    assert_eq!((revoked.flags, revoked.size, revocations), (VALID | WRITABLE | REVOKED, 2 << 20, 1));
    assert_eq!(guest.ask(node, fh, 0, 4096, false), Err(libc::EAGAIN));
    let live = guest.let_go(index);
    assert_eq!(live, Entry { flags: VALID, generation: revoked.generation + 1, ..revoked });
    assert_eq!(guest.slots(), 1);
    // The daemon allocates the holes, since the guest wants to write there.
    assert_eq!(guest.ask(node, fh, 0, 4096, false), Ok(()));
    assert_eq!(guest.ask(node, fh, (2 << 20) - 4096, 4096, true), Ok(()));
    assert_eq!(guest.entry(index).flags, VALID | WRITABLE);
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    guest.fallocate(node, fh, punch, 8192, 4096);
    assert_eq!(guest.entry(index).flags, VALID | WRITABLE | REVOKED);
    assert_eq!(guest.let_go(index).flags, VALID);
    // An allocation that fails may take back pages that the daemon has seen meanwhile.
    assert_eq!(guest.ask(node, fh, 0, 4096, true), Ok(()));
    let args = FallocateIn { fh, length: i64::MAX as u64, ..Default::default() };
    assert!(guest.call(Opcode::Fallocate, node, args.as_bytes(), 0).is_err());
    assert_eq!(guest.entry(index).flags, VALID | WRITABLE | REVOKED);
    assert_eq!(guest.let_go(index).flags, VALID);
}

fn what_is_not_worth_it_stays_with_messages() {
    let config = Config { passthrough_min_size: 1000, allow_direct_io: true, writeback: true, ..Default::default() };
    let guest = Guest::with(config, 0, Writable::InPlace);
    for (name, size, flags) in [
        ("small", 999, libc::O_RDWR),
        ("append", 5000, libc::O_WRONLY | libc::O_APPEND),
        ("direct", 5000, libc::O_RDONLY | libc::O_DIRECT),
    ] {
        guest.file(name, size);
        let node = guest.lookup(name);
        let (fh, none) = guest.open(node, flags);
        assert_eq!(none, None, "{name}");
        // While that open lasts, no other open may have passthrough.
        guest.file(name, 5000);
        let (fh2, none) = guest.open(node, libc::O_RDWR);
        assert_eq!(none, None, "{name}");
        guest.release(node, fh);
        guest.release(node, fh2);
        assert_eq!(guest.slots(), 0);
        let (fh, some) = guest.open(node, libc::O_RDWR);
        assert!(some.is_some());
        // Nor the other way round.
        assert_eq!(guest.open(node, flags).1, some);
        guest.release(node, fh);
        fs::remove_file(guest.path(name)).unwrap();
        guest.call(Opcode::Destroy, 0, &[], 0).unwrap();
        init(&guest.frontend, u64::MAX);
    }
}

fn slots_are_few_and_evicted() {
    let guest = Guest::new();
    let names: Vec<String> = (0..6).map(|n| format!("f{n}")).collect();
    let nodes: Vec<u64> = names
        .iter()
        .map(|name| {
            guest.file(name, 2000);
            guest.lookup(name)
        })
        .collect();
    let open: Vec<_> = nodes.iter().take(SLOTS).map(|node| guest.open(*node, libc::O_RDONLY)).collect();
    assert!(open.iter().all(|(_, index)| index.is_some()));
    assert_eq!((guest.open(nodes[3], libc::O_RDONLY).1, guest.slots()), (None, SLOTS));
    // The file that was released first gives way.
    guest.release(nodes[1], open[1].0);
    guest.release(nodes[0], open[0].0);
    assert_eq!(guest.slots(), SLOTS);
    let index = guest.open(nodes[4], libc::O_RDONLY).1.unwrap();
    assert_eq!((guest.slots(), guest.slot(index).get::<u8>(0)), (SLOTS, b'r'));
    assert_eq!(guest.open(nodes[0], libc::O_RDONLY).1, open[0].1);
    // A kept file goes with its node.
    guest.release(nodes[2], open[2].0);
    guest.call(Opcode::Forget, nodes[2], ForgetIn { nlookup: 1 }.as_bytes(), 0).ok();
    wait_until("forgotten", || guest.slots() == SLOTS - 1);
    // Nothing fits.
    let huge = guest.file("huge", 0);
    huge.set_len(SIZE).unwrap();
    assert_eq!(guest.open(guest.lookup("huge"), libc::O_RDONLY).1, None);
    huge.set_len(1 << 43).unwrap();
    assert_eq!(guest.open(guest.lookup("huge"), libc::O_RDONLY).1, None);
}

fn a_file_that_grows_gets_a_longer_slot() {
    let guest = Guest::new();
    guest.file("file", 5000);
    let node = guest.lookup("file");
    let (fh, index) = guest.open(node, libc::O_RDWR);
    let index = index.unwrap();
    let before = guest.entry(index);
    assert_eq!(before.length, RANGE);
    // In place, while there is room.
    (0..2 * RANGE).step_by(1 << 20).for_each(|at| guest.write(node, fh, at, 1 << 20));
    wait_until("longer", || guest.entry(index).length >= 2 * RANGE);
    let longer = guest.entry(index);
    assert_eq!(longer, Entry { length: longer.length, size: 2 * RANGE, ..before });
    assert_eq!((guest.revocations(), guest.slots()), (0, 2));
    let behind = Memory::new(&guest.regions.mapped_in(1)[&(before.offset + RANGE)]);
    assert_eq!(behind.get::<u8>(RANGE as usize - 1), b'w');
    drop(behind);
    // By a move, if no mapping is left.
    guest.take_all_mappings();
    let size = longer.length + (1 << 20);
    (2 * RANGE..size).step_by(1 << 20).for_each(|at| guest.write(node, fh, at, 1 << 20));
    wait_until("revoked", || guest.entry(index).flags == VALID | WRITABLE | REVOKED);
    assert_eq!(guest.entry(index).size, size);
    let after = guest.let_go(index);
    assert!(after.length >= size, "{after:?}");
    assert_eq!((after.size, after.generation), (size, before.generation + 1));
    assert_eq!(guest.slot(index).get::<u8>(size as usize - 1), b'w');
    // The guest asks for a part that is not mapped yet.
    let end = after.length;
    guest.write(node, fh, end, 1 << 20);
    for _ in 0..2 {
        if guest.ask(node, fh, end, 1 << 20, true) == Err(libc::EAGAIN) {
            guest.let_go(index);
        }
    }
    assert_eq!(guest.ask(node, fh, end, 1 << 20, true), Ok(()));
    assert_eq!(guest.ask(node, fh, 20 * RANGE, 4096, false), Err(libc::EFAULT));
    assert_eq!(guest.ask(node, fh, u64::MAX, 4096, false), Err(libc::EINVAL));
    assert_eq!(guest.ask(node, fh + 1, 0, 4096, false), Err(libc::EBADF));
}

fn the_host_waits_for_the_acknowledgement() {
    let guest = Guest::guarded();
    let file = guest.file("file", 5_000_000);
    let node = guest.lookup("file");
    let (fh, index) = guest.open(node, libc::O_RDWR);
    let index = index.unwrap();
    let before = guest.entry(index);
    let mut host = guest.host_truncates("file", 100);
    wait_until("revoked", || guest.entry(index).flags & REVOKED != 0);
    assert_eq!((guest.entry(index).generation, guest.revocations()), (before.generation, 1));
    // The daemon goes on serving messages.
    guest.write(node, fh, 0, 10);
    assert_eq!(guest.getattr(node).size, 5_000_000);
    sleep(SOON / 4);
    assert!(host.try_wait().unwrap().is_none(), "held");
    assert_eq!(guest.ask(node, fh, 0, 4096, false), Err(libc::EAGAIN));
    guest.acknowledge(index);
    assert!(host.wait().unwrap().success());
    let gone = guest.entry(index);
    assert_eq!((gone.flags, gone.offset, gone.length, guest.slots(), gone.lost), (REVOKED, 0, 0, 0, 0));
    // Later opens have the same entry, revoked or not.
    assert_eq!(guest.open(node, libc::O_RDONLY).1, Some(index));
    assert_eq!((file.metadata().unwrap().len(), guest.getattr(node).size), (100, 100));
    wait_until("mapped again", || guest.entry(index).flags & VALID != 0);
    let after = guest.entry(index);
    assert_eq!((after.size, after.generation), (100, before.generation + 1));
    assert_eq!(guest.ask(node, fh, 0, 4096, true), Ok(()));
    // A kept slot goes at once.
    guest.call(Opcode::Destroy, 0, &[], 0).unwrap();
    init(&guest.frontend, u64::MAX);
    let node = guest.lookup("file");
    guest.file("file", 5000);
    sleep(5 * SOON / 2);
    let (fh, index) = guest.open(node, libc::O_RDWR);
    guest.release(node, fh);
    assert_eq!((index.is_some(), guest.slots()), (true, 1));
    assert!(guest.host_truncates("file", 100).wait().unwrap().success());
    assert_eq!(guest.slots(), 0);
}

/// A process of the host writes to a file for long, so the daemon cannot set its times.
fn a_file_that_is_locked_delays_no_other() {
    let guest = Guest::guarded();
    let (file, _) = (guest.file("file", 5000), guest.file("other", 5000));
    let nodes = ["file", "other"].map(|name| guest.lookup(name));
    let [index, other] = nodes.map(|node| guest.open(node, libc::O_RDWR).1.unwrap());
    let past = UNIX_EPOCH + 1000 * SOON;
    file.set_times(FileTimes::new().set_modified(past)).unwrap();
    let lock = Locked::new(&file).unwrap_or_else(|| skip("userfaultfd(2) is not allowed"));
    // Requests that wait for the times. Others do not wait for them.
    guest.stored(index);
    let waiting = [
        guest.send(Opcode::Getattr, nodes[0], GetattrIn::default().as_bytes(), size_of::<AttrOut>()),
        guest.send(Opcode::Lookup, ROOT_ID, b"file\0", size_of::<EntryOut>()),
    ];
    guest.getattr(nodes[1]);
    guest.lookup("other");
    assert_eq!((guest.listed("file"), guest.listed("other")), (0, nodes[1]));
    // Nor does a process that truncates the other file, while the first one leaves its slot.
    guest.stored(index);
    let mut host = guest.host_truncates("file", 100);
    wait_until("revoked", || guest.entry(index).flags & REVOKED != 0);
    guest.acknowledge(index);
    wait_until("unmapped", || guest.entry(index).flags & VALID == 0);
    let mut hosts_other = guest.host_truncates("other", 100);
    wait_until("the other is revoked", || guest.entry(other).flags & REVOKED != 0);
    guest.acknowledge(other);
    wait_until("the other is unmapped", || guest.entry(other).flags & VALID == 0);
    // The requests that wait do not keep the mapping, nor does the daemon for them.
    wait_until("the other is truncated", || hosts_other.try_wait().unwrap().is_some_and(|status| status.success()));
    assert_eq!(guest.getattr(nodes[1]).size, 100);
    // When the file is free again, all get their answers, with the new time.
    let is_waiting = |token: Token| guest.frontend.wait_for(1, token, Duration::ZERO).is_err();
    assert!(waiting.into_iter().all(is_waiting) && host.try_wait().unwrap().is_none());
    drop(lock);
    let [attr, entry] = waiting.map(|token| guest.frontend.wait_for(1, token, 100 * SOON).unwrap().data.split_off(16));
    let (attr, entry) = (AttrOut::read_from_bytes(&attr).unwrap(), EntryOut::read_from_bytes(&entry).unwrap());
    assert!(attr.attr.mtime > 1000 && entry.attr.mtime > 1000);
    assert!(host.wait().unwrap().success());
}

/// The daemon looks at the file for holes, for which it needs the lock.
fn a_file_that_is_locked_delays_no_revocation() {
    let guest = Guest::guarded();
    let (file, _) = (guest.file("locked", 5000), guest.file("other", 5000));
    let [locked, other] = ["locked", "other"].map(|name| guest.lookup(name));
    let index = guest.open(other, libc::O_RDWR).1.unwrap();
    let lock = Locked::new(&file).unwrap_or_else(|| skip("userfaultfd(2) is not allowed"));
    let open = OpenIn { flags: libc::O_RDONLY as u32, open_flags: 0 };
    let opening = guest.send(Opcode::Open, locked, open.as_bytes(), size_of::<OpenOut>());
    let mut host = guest.host_truncates("other", 100);
    wait_until("revoked", || guest.entry(index).flags & REVOKED != 0);
    guest.acknowledge(index);
    wait_until("unmapped", || guest.entry(index).flags & VALID == 0);
    wait_until("truncated", || host.try_wait().unwrap().is_some_and(|status| status.success()));
    // The open is by messages.
    let opened = guest.frontend.wait_for(1, opening, 100 * SOON).unwrap().data.split_off(16);
    let flags = OpenOut::read_from_bytes(&opened).unwrap().open_flags;
    assert!(!OpenFlags::from_bits_retain(flags).contains(OpenFlags::PASSTHROUGH));
    drop(lock);
}

fn without_acknowledgement_there_is_a_cached_proxy_file() {
    let guest = Guest::guarded_for(SOON, HOUR);
    guest.file("file", 5_000_000);
    let node = guest.lookup("file");
    let (fh, index) = guest.open(node, libc::O_RDWR);
    let index = index.unwrap();
    let before = guest.entry(index);
    let start = Instant::now();
    assert!(guest.host_truncates("file", 100).wait().unwrap().success());
    assert!(start.elapsed() >= SOON);
    // It may have stored something.
    let gone = guest.entry(index);
    assert_eq!((gone.flags, gone.length, gone.lost), (REVOKED, 0, 1));
    // A late access finds memory, and only of that file.
    wait_until("replaced", || guest.slots() == 1);
    let proxy_file = Memory::new(&guest.regions.mapped_in(1)[&before.offset]);
    assert_eq!([0, 4096, before.length as usize - 1].map(|at| proxy_file.get::<u8>(at)), [b'r', 0, 0]);
    proxy_file.put(4_000_000, b'l');
    drop(proxy_file);
    assert_eq!(guest.ask(node, fh, 0, 100, false), Err(libc::EAGAIN));
    assert_eq!(guest.getattr(node).size, 100);
    guest.acknowledge(index);
    wait_until("mapped again", || guest.entry(index).flags & VALID != 0);
    let live = guest.entry(index);
    assert_eq!((guest.slots(), live.generation, live.lost), (1, before.generation + 1, 1));
    guest.release(node, fh);
}

fn the_table_is_not_believed() {
    let guest = Guest::new();
    let file = guest.file("file", 5_000_000);
    let node = guest.lookup("file");
    let (fh, index) = guest.open(node, libc::O_RDWR);
    let index = index.unwrap();
    let (entry, slots) = (guest.entry(index), guest.slots());
    for word in [0, u64::MAX, 0x0102_0304_0506_0708, entry.generation.into()] {
        (0..RANGE as usize).step_by(8).for_each(|at| guest.table.put(at, word));
        guest.write(node, fh, 0, 100);
        guest.setattr_size(node, 4_999_000);
        guest.write(node, fh, 4_999_000, 1000);
        assert_eq!((guest.getattr(node).size, guest.slots()), (5_000_000, slots));
        assert_eq!(guest.entry(index), entry);
    }
    // An early acknowledgement hurts only the guest.
    guest.acknowledge(index);
    guest.setattr_size(node, 6_000_000);
    wait_until("live", || guest.entry(index).flags == VALID);
    guest.release(node, fh);
    let (_, again) = guest.open(node, libc::O_RDWR);
    assert_eq!((again, file.metadata().unwrap().len()), (None, 6_000_000), "it has a hole");
    // Handles that do not exist, again and again.
    for fh in 0..1000 {
        let released = guest.call(Opcode::Release, node + 1, ReleaseIn { fh, ..Default::default() }.as_bytes(), 0);
        assert_eq!(released, Err(libc::EBADF));
    }
    assert_eq!(guest.entry(index).flags, 0);
}

fn a_session_begins_with_nothing() {
    let guest = Guest::new();
    guest.file("file", 5000);
    for _ in 0..20 {
        let node = guest.lookup("file");
        let index = guest.open(node, libc::O_RDWR).1.unwrap();
        assert_eq!((guest.entry(index).nodeid, guest.entry(index).generation, guest.slots()), (node, 1, 1));
        init(&guest.frontend, u64::MAX);
        assert_eq!((guest.entry(index), guest.slots()), (Entry::default(), 0));
    }
    guest.call(Opcode::Destroy, 0, &[], 0).unwrap();
    wait_until("unmapped", || guest.regions.mapped_in(2).is_empty());
}

fn a_stock_guest_sees_nothing_of_it() {
    let guest = Guest::with(Config { writeback: true, ..Default::default() }, 0, Writable::InPlace);
    guest.file("file", 5000);
    let flags = init(&guest.frontend, !InitFlags::PASSTHROUGH_SHM.bits());
    assert!(flags.contains(InitFlags::WRITEBACK_CACHE) && !flags.contains(InitFlags::PASSTHROUGH_SHM));
    assert!(!flags.contains(InitFlags::HAS_INODE_DAX));
    let node = guest.lookup("file");
    let (fh, none) = guest.open(node, libc::O_RDWR);
    assert_eq!(none, None);
    guest.write(node, fh, 5000, 100);
    assert_eq!(guest.ask(node, fh, 0, 4096, false), Err(libc::ENOSYS));
    let args = SetupmappingIn { len: RANGE, ..Default::default() };
    assert_eq!(guest.call(Opcode::Setupmapping, node, args.as_bytes(), 0), Err(libc::EINVAL));
    guest.release(node, fh);
    wait_until("unmapped", || (guest.slots(), guest.regions.mapped_in(2).len()) == (0, 0));
}

fn with_a_dax_window_too() {
    let config = Config { passthrough_min_size: 1000, ..Default::default() };
    let guest = Guest::with(config, 8 * RANGE, Writable::Always);
    guest.file("file", 5000).set_len(RANGE).unwrap();
    let node = guest.lookup("file");
    // Not both for one file.
    assert_eq!(guest.getattr(node).flags, 0);
    let index = guest.open(node, libc::O_RDWR).1.unwrap();
    assert_eq!(guest.entry(index).flags, VALID | WRITABLE);
    let args = SetupmappingIn { fh: u64::MAX, len: 2 * RANGE, flags: SETUPMAPPING_WRITE, ..Default::default() };
    guest.call(Opcode::Setupmapping, node, args.as_bytes(), 0).unwrap();
    assert_eq!((guest.regions.mapped().len(), guest.slots()), (2, 1));
    init(&guest.frontend, !InitFlags::PASSTHROUGH_SHM.bits());
    assert_eq!(guest.lookup("file"), node + 1);
    assert_eq!(guest.getattr(node + 1).flags, ATTR_DAX);
}

fn settings() -> Settings {
    Settings { size: SIZE, slots: SLOTS, writable: Writable::InPlace, patience: HOUR }
}

fn a_guest_that_moves_lets_go_of_all_slots() {
    let mut guest = Guest::new();
    guest.file("file", 5000);
    guest.file("kept", 5000);
    guest.file("late", 5000);
    let [node, kept, late] = ["file", "kept", "late"].map(|name| guest.lookup(name));
    let (fh, index) = guest.open(node, libc::O_RDWR);
    let index = index.unwrap();
    let live = guest.entry(index);
    let (kept_fh, _) = guest.open(kept, libc::O_RDWR);
    guest.release(kept, kept_fh);
    guest.slot(index).put(7, b's');
    assert_eq!(guest.slots(), 2);
    // A frontend that does not say so finds the file mapped.
    assert_eq!(guest.save(), None);
    assert_eq!(guest.entry(index), live);

    guest.leaves(true);
    wait_until("the kept slot is gone", || guest.slots() == 1);
    let revoking = Entry { flags: VALID | WRITABLE | REVOKED, ..live };
    wait_until("revoked", || guest.entry(index) == revoking);
    assert_eq!(guest.save(), None);
    guest.acknowledge(index);
    wait_until("unmapped", || guest.slots() == 0);
    let revoked = Entry { flags: REVOKED, offset: 0, length: 0, ..live };
    assert_eq!(guest.entry(index), revoked);
    // Nothing is mapped meanwhile, and messages go on.
    assert_eq!(guest.ask(node, fh, 0, 4096, false), Err(libc::EAGAIN));
    assert_eq!(guest.open(node, libc::O_RDWR).1, Some(index));
    let (late_fh, none) = guest.open(late, libc::O_RDWR);
    assert_eq!((none, guest.slots(), guest.entry(index)), (None, 0, revoked));
    (0..20).for_each(|_| guest.write(node, fh, 8, 1));
    assert!(guest.save().is_some());

    // The guest stays after all.
    guest.leaves(false);
    guest.release(late, late_fh);
    guest.ask(node, fh, 0, 4096, true).unwrap();
    assert_eq!(guest.entry(index), Entry { offset: guest.entry(index).offset, generation: 2, ..live });
    assert_eq!([7, 8, 9].map(|at| guest.slot(index).get::<u8>(at)), [b's', b'w', b'r']);
    assert!(guest.open(late, libc::O_RDWR).1.is_some());
    assert_eq!(guest.save(), None);
}

fn a_guest_that_has_moved_gets_slots_anew() {
    let proxies = [(); 2].map(|()| window_process(HOUR));
    let mut guest = Guest::new();
    guest.file("first", 5000);
    let file = guest.file("file", 5000);
    guest.file("small", 500);
    let [first, node, small] = ["first", "file", "small"].map(|name| guest.lookup(name));
    let lost = guest.open(first, libc::O_RDWR).1.unwrap();
    let (fh, index) = guest.open(node, libc::O_RDWR);
    let index = index.unwrap();
    let (again, _) = guest.open(node, libc::O_RDONLY);
    let (small_fh, none) = guest.open(small, libc::O_RDWR);
    assert_eq!(none, None);
    guest.file("small", 5000);
    // The first one is lost, and forgotten.
    fs::remove_file(guest.path("first")).unwrap();
    let before = guest.entry(index);
    for (proxy, socket) in proxies.into_iter().zip(["second", "third"]) {
        guest.leaves(true);
        wait_until("revoked", || guest.entry(index).flags & REVOKED != 0);
        let (seen, count) = (guest.entry(index).generation, guest.revocations());
        [lost, index].iter().for_each(|index| guest.acknowledge(*index));
        wait_until("unmapped", || guest.slots() == 0);
        guest.stored(index);
        let state = guest.save().unwrap();
        let (mut frontend, regions) = guest.target(proxy, socket, settings());
        assert!(load(&mut frontend, &state));
        wait_until("the table", || regions.mapped_in(2).len() == 1);
        let table = Memory::new(&regions.mapped_in(2)[&0]);
        let ack = table.get::<u32>(ACKS + 16 * index as usize);
        guest = Guest { frontend, regions, table, ..guest };
        let revoked = Entry { flags: REVOKED, offset: 0, length: 0, size: 0, generation: seen, ..before };
        assert_eq!((guest.entry(index), ack, guest.slots()), (revoked, seen, 0));
        assert_ne!(guest.revocations(), count);
        assert_eq!(guest.entry(lost), Entry::default());
        // By messages, until the guest asks.
        guest.write(node, fh, 7, 1);
        guest.ask(node, again, 0, 4096, true).unwrap();
        let live = Entry { offset: guest.entry(index).offset, generation: seen + 1, ..before };
        assert_eq!((guest.entry(index), guest.slot(index).get::<u8>(7)), (live, b'w'));
        guest.slot(index).put(8, b's');
        assert_eq!(byte(&file, 8), b's');
        // All opens of a node are of one kind.
        assert_eq!(guest.open(small, libc::O_RDWR).1, None);
        assert_eq!(guest.open(node, libc::O_RDWR).1, Some(index));
    }
    for opened in [fh, again] {
        guest.release(node, opened);
    }
    guest.release(small, small_fh);
    assert_eq!(guest.entry(index).flags, VALID | WRITABLE);
    guest.file("new", 5000);
    assert_ne!(guest.open(guest.lookup("new"), libc::O_RDWR).1, Some(index));
}

fn a_guest_moves_only_to_the_same_windows() {
    let proxies = [(); 3].map(|()| window_process(HOUR));
    let mut guest = Guest::new();
    let state = guest.save().unwrap();
    let [smaller, deaf, same] = proxies;
    let (mut frontend, _regions) = guest.target(smaller, "smaller", Settings { size: SIZE / 2, ..settings() });
    assert!(!load(&mut frontend, &state));
    let config = Config { passthrough_min_size: 1000, ..Default::default() };
    assert!(!load(&mut serve(deaf, &guest.dir, "deaf", config, 0, settings()), &state));
    let (mut frontend, _regions) = guest.target(same, "same", settings());
    assert!(load(&mut frontend, &state));
}
