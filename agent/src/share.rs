//! A share, and the threads that repeat the host's changes to it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, fstat, fstatfs, mknodat, openat, unlinkat};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};
use thruway_guest::protocol::{Batch, Done, HELLO, Hello, MARKER, STOP, VERSION, WAIT};

use crate::mounts::{Mount, other_pids};
use crate::repeat::Hands;
use crate::{say, sys};

type Result<T> = std::result::Result<T, Errno>;

/// Most threads of one share. One works or waits. A second waits meanwhile, for the case that a process of the guest
/// holds a lock which the first needs, and so on.
const THREADS: usize = 4;

/// f_type of FUSE file systems (FUSE_SUPER_MAGIC of fs/fuse/inode.c).
const FUSE: i64 = 0x6573_5546;

/// The root's nodeid (FUSE_ROOT_ID of include/uapi/linux/fuse.h).
const ROOT: u64 = 1;

/// The variable that names the one share of an agent in another pid namespace, by its device number.
const ONLY: &str = "THRUWAY_GUEST_ONLY";

/// The one share that this agent is for, if another agent has begun it. Its standard input is closed when it is to end.
pub fn only() -> Option<u64> {
    std::env::var(ONLY).ok()?.parse().ok()
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A mount of one's own of what is mounted there.
fn clone_of(place: &OwnedFd) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    open_tree(place, c"", flags | OpenTreeFlags::AT_EMPTY_PATH)
}

/// A share that a daemon serves which knows agents, or that may be such a one.
pub struct Share {
    mount: Mount,
    /// A mount of its own, in no namespace: it keeps nobody from unmounting the share.
    _tree: OwnedFd,
    root: OwnedFd,
    threads: AtomicUsize,
    /// Threads that wait for changes.
    waiting: AtomicUsize,
    /// A thread is about to wait.
    starting: AtomicBool,
    ended: AtomicBool,
    /// Its daemon knows no agent.
    foreign: AtomicBool,
    /// An overlay has it as a lower layer.
    pub layered: AtomicBool,
    /// An agent in the mounter's pid namespace, which ends when this is closed.
    elsewhere: Mutex<Option<ChildStdin>>,
    /// What was said last, so that it is not said twice.
    said: Mutex<String>,
}

impl Share {
    /// Opens the share.
    ///
    /// # Errors
    /// Those of the system calls; ENODEV if something else is mounted there; EXDEV if it is a submount of a share.
    pub fn open(mount: &Mount) -> Result<Arc<Self>> {
        let place = openat(CWD, mount.path_here(), OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let tree = match mount.pid {
            None => clone_of(&place)?,
            // A mount can be cloned in its own namespace only.
            Some(pid) => thread::scope(|scope| {
                let cloned = scope.spawn(|| sys::enter_mounts(pid).and_then(|()| clone_of(&place)));
                cloned.join().unwrap_or(Err(Errno::IO))
            })?,
        };
        let top = openat(&tree, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let is_it = fstat(&top)?.st_dev == mount.dev && fstatfs(&top)?.f_type == FUSE;
        if !is_it {
            return Err(Errno::NODEV);
        }
        let root = match mount.root == "/" {
            // The daemon hears of no changes in it. Held open, it would keep the share from going with its last mount.
            true if sys::node_of(top.as_fd())? != ROOT => return Err(Errno::XDEV),
            true => top,
            false => sys::open_node(top.as_fd(), ROOT, OFlags::RDONLY | OFlags::DIRECTORY)?,
        };
        Ok(Arc::new(Self {
            mount: mount.clone(),
            _tree: tree,
            root,
            threads: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            starting: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            foreign: AtomicBool::new(false),
            layered: AtomicBool::new(false),
            elsewhere: Mutex::default(),
            said: Mutex::default(),
        }))
    }

    fn say(&self, text: String) {
        let mut said = lock(&self.said);
        if *said != text {
            say(&format!("{}: {text}", self.mount.tag));
            *said = text;
        }
    }

    /// Starts a thread, unless there are enough.
    pub fn start(self: &Arc<Self>) {
        if self.starting.swap(true, Ordering::SeqCst) {
            return;
        }
        if self.threads.fetch_add(1, Ordering::SeqCst) >= THREADS {
            self.threads.fetch_sub(1, Ordering::SeqCst);
            self.starting.store(false, Ordering::SeqCst);
            return;
        }
        let share = self.clone();
        // The work needs some 20 KiB of stack, most of it for messages.
        let thread = thread::Builder::new().name("thruway-guest".into()).stack_size(64 << 10);
        let started = thread.spawn(move || {
            let end = match share.run() {
                Err(Errno::SRCH) => share.serve_elsewhere(),
                end => end,
            };
            share.threads.fetch_sub(1, Ordering::SeqCst);
            if let Err(errno) = end {
                share.explain(errno);
            }
        });
        if started.is_err() {
            self.threads.fetch_sub(1, Ordering::SeqCst);
            self.starting.store(false, Ordering::SeqCst);
        }
    }

    /// Tries again, if it has failed.
    pub fn revive(self: &Arc<Self>) {
        if self.threads.load(Ordering::SeqCst) == 0 && !self.foreign.load(Ordering::SeqCst) {
            self.start();
        }
    }

    /// Ends the threads, once they have nothing to do.
    pub fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        *lock(&self.elsewhere) = None;
        let _ = sys::ask(self.root.as_fd(), STOP, &[]);
    }

    fn explain(&self, errno: Errno) {
        if self.ended.load(Ordering::SeqCst) {
            return;
        }
        match errno {
            // Another daemon, or an older one: there is nothing to do.
            Errno::NOTTY | Errno::NOSYS => {
                self.foreign.store(true, Ordering::SeqCst);
                self.say("its daemon knows no guest agent".into());
            }
            Errno::OPNOTSUPP => self.say("its daemon does not watch the share for changes".into()),
            Errno::SRCH => {
                self.foreign.store(true, Ordering::SeqCst);
                self.say("it was mounted in another pid namespace: run the agent there".into());
            }
            Errno::ROFS => self.say(
                "it is mounted read-only: mount it rw, and give the daemon --readonly to keep the guest from writing"
                    .into(),
            ),
            Errno::PERM => self.say("the agent must run as root, with CAP_DAC_READ_SEARCH and CAP_MKNOD".into()),
            Errno::PROTO => self.say("its daemon has another version than this agent".into()),
            errno => self.say(format!("{errno}")),
        }
    }

    /// Runs an agent for this share in the pid namespace of the mounter, by whose numbers the daemon knows threads.
    /// Returns when it ends.
    ///
    /// # Errors
    /// ESRCH if that namespace is not found.
    fn serve_elsewhere(&self) -> Result<()> {
        if only().is_some() {
            // The agent that has begun this one tries the next.
            std::process::exit(1);
        }
        for pid in other_pids(&self.mount) {
            sys::enter_pids(pid)?;
            let mut agent = Command::new("/proc/self/exe");
            let agent = agent.env(ONLY, self.mount.dev.to_string()).stdin(Stdio::piped()).spawn();
            let mut agent = agent.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
            let mut ends = lock(&self.elsewhere);
            *ends = agent.stdin.take().filter(|_| !self.ended.load(Ordering::SeqCst));
            drop(ends);
            // With the namespace's first process it is killed.
            if agent.wait().is_ok_and(|status| status.code() != Some(1)) {
                return Ok(());
            }
        }
        Err(Errno::SRCH)
    }

    fn run(self: &Arc<Self>) -> Result<()> {
        while !self.ended.load(Ordering::SeqCst) {
            let registered = Registered::new(self.root.as_fd());
            self.starting.store(false, Ordering::SeqCst);
            let registered = registered?;
            match self.serve(&registered) {
                // The daemon is another one than before, or the guest has been migrated.
                Err(Errno::NOTCONN) => {}
                end => return end,
            }
        }
        Ok(())
    }

    fn serve(self: &Arc<Self>, registered: &Registered) -> Result<()> {
        let root = self.root.as_fd();
        let mut hands = Hands::new(root, registered.hidden.as_fd(), &registered.token, self.mount.dev, &self.layered);
        let mut done = Done::default();
        self.say("changes by others are repeated".into());
        loop {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            let waited = sys::ask(root, WAIT, &done.encode());
            let others = self.waiting.fetch_sub(1, Ordering::SeqCst) - 1;
            let batch = Batch::decode(&waited?).ok_or(Errno::PROTO)?;
            if self.ended.load(Ordering::SeqCst) {
                return Ok(());
            }
            if batch.changes.is_empty() && others > 0 {
                // Another one waits.
                return Ok(());
            }
            if !batch.changes.is_empty() && others == 0 {
                self.start();
            }
            done = hands.carry_out(&batch);
        }
    }
}

/// A thread that the daemon knows as the agent's.
struct Registered {
    hidden: OwnedFd,
    /// See [`Hello`].
    token: String,
    /// The guest's kernel tells the daemon when nobody has this open any more.
    _marker: OwnedFd,
}

impl Registered {
    fn new(root: BorrowedFd) -> Result<Self> {
        let hello = Hello::decode(&sys::ask(root, HELLO, &VERSION.to_le_bytes())?).ok_or(Errno::PROTO)?;
        let path = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let hidden = openat(root, &*hello.token, path | OFlags::DIRECTORY, Mode::empty())?;
        mknodat(&hidden, MARKER, FileType::RegularFile, Mode::RUSR, 0)?;
        let marker = openat(&hidden, MARKER, path, Mode::empty())?;
        unlinkat(&hidden, MARKER, AtFlags::empty())?;
        Ok(Self { hidden, token: hello.token, _marker: marker })
    }
}
