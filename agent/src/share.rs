//! A share, and the threads that repeat the host's changes to it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, fstat, fstatfs, mknodat, openat, unlinkat};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};
use thruway_guest::protocol::{Batch, Done, HELLO, Hello, MARKER, STOP, VERSION, WAIT};

use crate::mounts::Mount;
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

/// A mount of one's own of what is mounted there.
fn clone_of(place: &OwnedFd) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    open_tree(place, c"", flags | OpenTreeFlags::AT_EMPTY_PATH)
}

/// A share that a daemon serves which knows agents, or that may be such a one.
pub struct Share {
    tag: String,
    dev: u64,
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
    /// What was said last, so that it is not said twice.
    said: Mutex<String>,
}

impl Share {
    /// Opens the share.
    ///
    /// # Errors
    /// Those of the system calls; ENODEV if something else is mounted there.
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
            true => top,
            false => sys::open_node(top.as_fd(), ROOT, OFlags::RDONLY | OFlags::DIRECTORY)?,
        };
        Ok(Arc::new(Self {
            tag: mount.tag.clone(),
            dev: mount.dev,
            _tree: tree,
            root,
            threads: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            starting: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            foreign: AtomicBool::new(false),
            said: Mutex::default(),
        }))
    }

    fn say(&self, text: String) {
        let mut said = self.said.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *said != text {
            say(&format!("{}: {text}", self.tag));
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
            let end = share.run();
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
            Errno::SRCH => self.say("it was mounted in another pid namespace: run the agent there".into()),
            Errno::ROFS => self.say(
                "it is mounted read-only: mount it rw, and give the daemon --readonly to keep the guest from writing"
                    .into(),
            ),
            Errno::PERM => self.say("the agent must run as root, with CAP_DAC_READ_SEARCH and CAP_MKNOD".into()),
            Errno::PROTO => self.say("its daemon has another version than this agent".into()),
            errno => self.say(format!("{errno}")),
        }
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
        let mut hands = Hands::new(root, registered.hidden.as_fd(), &registered.token, self.dev);
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
