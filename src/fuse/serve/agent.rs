//! Requests of the guest agent's threads (docs/guest-agent.md). What repeats an announced change is answered from the
//! share's present state, and changes nothing.

use std::ffi::{CStr, CString};
use std::sync::Arc;

use rustix::io::Errno;
use thruway_guest::protocol::{Done, FOUND, Found, HELLO, MESSAGE, PATH, Place, QUIET, STOP, WAIT, ops};

use super::super::Server;
use super::super::abi::*;
use super::super::ops::*;
use super::super::reply::Reply;
use super::super::request::Request;
use super::super::transport::Release;
use crate::agent::{Agents, Look, Made, Work, is_phantom, next_phantom, phantom_format, phantom_of};
use crate::watch::FileId;

/// An open that the agent makes for IN_CLOSE_WRITE. No file has this `fh`, so its RELEASE finds nothing.
const AGENTS_OPEN: OpenOut =
    OpenOut { fh: u64::MAX, open_flags: OpenFlags::KEEP_CACHE.union(OpenFlags::NOFLUSH).bits(), backing_id: 0 };

impl Release for Agents {
    fn release(&self) {
        self.release();
    }
}

impl<F: FileSystem> Server<F> {
    /// The agent's own calls of ioctl(2), which any process may make.
    pub(super) fn agent_call(
        &self,
        command: u32,
        args: &IoctlIn,
        request: &mut Request,
        reply: &mut Reply,
    ) -> Result<()> {
        let agents = match command {
            HELLO | WAIT | FOUND | STOP | PATH | QUIET if request.header.nodeid == ROOT_ID => {
                self.fs.agents().ok_or(Errno::OPNOTSUPP)?
            }
            _ => return Err(Errno::NOTTY),
        };
        if (args.in_size as usize, args.out_size as usize) != (MESSAGE, MESSAGE) {
            return Err(Errno::INVAL);
        }
        let (pid, message) = (request.header.pid, request.bytes(MESSAGE)?);
        match command {
            HELLO => {
                let version = message.first_chunk().copied().map_or(0, u32::from_le_bytes);
                let hello = agents.hello(pid, version)?;
                reply.put(&IoctlOut::default())?;
                reply.put(&hello.encode()[..])
            }
            FOUND => {
                let found = Found::decode(message).ok_or(Errno::INVAL)?;
                agents.found(pid, found, self.fs.file_id_of(found.node))?;
                reply.put(&IoctlOut::default())
            }
            PATH => {
                let node = message.first_chunk().copied().map_or(0, u64::from_le_bytes);
                let path = self.fs.path_below_root(node).ok_or(Errno::NOENT)?;
                if path.len() >= MESSAGE {
                    return Err(Errno::NAMETOOLONG);
                }
                reply.put(&IoctlOut::default())?;
                reply.put(&path[..])?;
                reply.put(&0u8)
            }
            QUIET => {
                agents.quiet(pid, message)?;
                reply.put(&IoctlOut::default())
            }
            STOP => {
                agents.release();
                reply.put(&IoctlOut::default())
            }
            _ => {
                let done = Done::decode(message).ok_or(Errno::INVAL)?;
                // Once it is parked, no errno can be told. And only the agent looks at all nodes.
                agents.may_wait(pid)?;
                agents.look_again(|| self.fs.known_nodes());
                let (late, stopping) = reply.park(size_of::<IoctlOut>() + MESSAGE, agents.clone())?;
                let answer = |batch: Vec<u8>| {
                    let mut late = late;
                    let put = late.put(&IoctlOut::default()).and_then(|()| late.put(&batch[..]));
                    late.finish(put);
                };
                agents.wait(pid, done, Box::new(answer), stopping)
            }
        }
    }

    /// Whether a request is one that the agent's threads have special answers for.
    pub(in super::super) fn is_agents(
        &self,
        agents: &Agents,
        opcode: Opcode,
        header: &InHeader,
        request: &Request,
    ) -> bool {
        // The name of a directory that is aside, whoever asks for it.
        let aside = |name: &CStr| agents.aside(header.pid, header.nodeid, name.to_bytes()).is_some();
        if opcode == Opcode::Lookup && request.peek().name().is_ok_and(aside) {
            return true;
        }
        // RELEASE and writes of the page cache come with pid 0.
        let any = !matches!(opcode, Opcode::Forget | Opcode::BatchForget | Opcode::Interrupt | Opcode::Destroy);
        any && header.pid != 0 && agents.knows(header.pid)
    }

    /// Serves a request of one of the agent's threads.
    pub(in super::super) fn serve_agent(
        &self,
        agents: &Arc<Agents>,
        opcode: Opcode,
        request: &mut Request,
        reply: &mut Reply,
    ) -> Result<()> {
        let (node, pid, uid) = (request.header.nodeid, request.header.pid, request.header.uid);
        let works = agents.works(pid);
        match opcode {
            Opcode::Lookup => {
                let mut args = request.peek();
                let name = args.name()?;
                if let Some((work, its_own)) = agents.aside(pid, node, name.to_bytes()) {
                    return reply.put(&self.lookup_aside(agents, pid, work, its_own)?);
                }
                match self.agent_lookup(agents, pid, node, name)? {
                    Some(entry) => reply.put(&entry),
                    None if works => reply.put(&self.agent_lookup_known(agents, pid, node, name)?),
                    None => self.serve(opcode, request, reply),
                }
            }
            Opcode::Mknod | Opcode::Mkdir => {
                let directory = opcode == Opcode::Mkdir;
                let mut args = request.peek();
                let format = match directory {
                    true => args.take::<MkdirIn>().map(|_| libc::S_IFDIR)?,
                    false => args.take::<MknodIn>()?.mode & libc::S_IFMT,
                };
                let name = args.name()?;
                if works && self.is_seen(agents, node, name) {
                    return Err(Errno::EXIST);
                }
                if agents.is_hidden(pid, node) && !reply.may_wait() {
                    // It may register, and the directories that the guest knows are many.
                    return Err(WOULD_WAIT);
                }
                match agents.make(pid, uid, node, name.to_bytes(), directory) {
                    Made::Name(phantom) => reply.put(&phantom_entry(phantom, format)),
                    Made::Back(directory) => {
                        agents.tell(node, name.to_bytes(), directory);
                        reply.put(&self.fs.known_entry(directory)?)
                    }
                    Made::Marker(marker) => {
                        self.fs.follow_known();
                        reply.put(&kept_entry(marker, format))
                    }
                    Made::Refused if works || is_phantom(node) => Err(Errno::PERM),
                    Made::Refused => self.serve(opcode, request, reply),
                }
            }
            Opcode::Create if works => {
                let mut args = request.peek();
                let CreateIn { flags, .. } = args.take()?;
                let name = args.name()?;
                if flags & libc::O_EXCL as u32 == 0 {
                    return Err(Errno::PERM);
                }
                if self.is_seen(agents, node, name) {
                    return Err(Errno::EXIST);
                }
                let Made::Name(phantom) = agents.make(pid, uid, node, name.to_bytes(), false) else {
                    return Err(Errno::PERM);
                };
                // The kernel would ask for the attributes before it opens the file. Nobody else finds it.
                reply.put(&EntryOut { attr_valid: KEPT, ..phantom_entry(phantom, libc::S_IFREG) })?;
                reply.put(&AGENTS_OPEN)
            }
            Opcode::Unlink | Opcode::Rmdir => {
                let mut args = request.peek();
                let name = args.name()?;
                if agents.is_marker(pid, node, name.to_bytes()) {
                    return Ok(());
                }
                if !works {
                    return self.serve(opcode, request, reply);
                }
                let directory = opcode == Opcode::Rmdir;
                let work = agents.removes(pid, node, name.to_bytes(), directory).ok_or(Errno::PERM)?;
                self.holds(agents, &work, node, name).inspect_err(|_| agents.give_up(pid, node, name.to_bytes()))?;
                agents.tell(node, name.to_bytes(), 0);
                agents.replaced(pid, node, name.to_bytes());
                Ok(())
            }
            Opcode::Rename | Opcode::Rename2 if works => {
                let mut args = request.peek();
                let (newdir, flags) = match opcode {
                    Opcode::Rename => (args.take::<RenameIn>()?.newdir, 0),
                    _ => args.take::<Rename2In>().map(|args| (args.newdir, args.flags))?,
                };
                let (name, newname) = (args.name()?, args.name()?);
                let from = (node, name.to_bytes());
                let work = agents.moves(pid, from, (newdir, newname.to_bytes())).ok_or(Errno::PERM)?;
                if flags != if work.change.has(ops::EXCHANGE) { libc::RENAME_EXCHANGE } else { 0 } {
                    return Err(Errno::PERM);
                }
                let held =
                    self.holds(agents, &work, node, name).and_then(|()| self.holds(agents, &work, newdir, newname));
                match held {
                    Ok(()) => {
                        agents.tell(node, name.to_bytes(), 0);
                        agents.tell(newdir, newname.to_bytes(), 0);
                    }
                    Err(Errno::CANCELED) => agents.give_up(pid, from.0, from.1),
                    Err(_) => {}
                }
                held
            }
            Opcode::Getattr if agents.is_hidden(pid, node) => {
                let attr = phantom_entry(node, libc::S_IFDIR).attr;
                reply.put(&AttrOut { attr, attr_valid: KEPT, ..AttrOut::default() })
            }
            Opcode::Getattr if is_phantom(node) => {
                let attr = phantom_entry(node, phantom_format(node)).attr;
                reply.put(&AttrOut { attr, ..AttrOut::default() })
            }
            Opcode::Getattr if works => {
                let mut out = self.agent_getattr(node)?;
                let regular = out.attr.mode & libc::S_IFMT == libc::S_IFREG;
                if agents.work_on(pid, node, ops::REMOVE | ops::RENAME).is_some_and(|work| work.loses(node)) {
                    // The removal takes one away.
                    out.attr.nlink += 1;
                    (out.attr_valid, out.attr_valid_nsec) = (0, 0);
                } else if regular {
                    // The guest's kernel drops a file's pages if its time is another. SETATTR brings the true one.
                    out.attr.mtimensec ^= 1;
                    (out.attr_valid, out.attr_valid_nsec) = (0, 0);
                }
                reply.put(&out)
            }
            Opcode::Setattr if is_phantom(node) => {
                let attr = phantom_entry(node, phantom_format(node)).attr;
                reply.put(&AttrOut { attr, ..AttrOut::default() })
            }
            Opcode::Setattr if works => {
                let args: SetattrIn = request.take()?;
                if SetattrValid::from_bits_retain(args.valid).contains(SetattrValid::SIZE) {
                    return Err(Errno::PERM);
                }
                reply.put(&self.agent_getattr(node)?)
            }
            Opcode::Open if works => {
                let args: OpenIn = request.peek().take()?;
                let reads = args.flags & libc::O_ACCMODE as u32 == libc::O_RDONLY as u32;
                if reads && args.flags & libc::O_TRUNC as u32 == 0 {
                    return self.serve(opcode, request, reply);
                }
                if args.flags & libc::O_TRUNC as u32 != 0 {
                    return Err(Errno::PERM);
                }
                reply.put(&AGENTS_OPEN)
            }
            Opcode::Flush if works => Ok(()),
            // What programs have stored to a mapping. The kernel writes it back before it drops the page, for whoever
            // has it do that.
            Opcode::Write if request.peek().take::<WriteIn>()?.write_flags & WRITE_CACHE != 0 => {
                self.serve(opcode, request, reply)
            }
            _ if !works || opcode.does().contains(Does::ONLY_READ) => self.serve(opcode, request, reply),
            Opcode::Ioctl => {
                let args: IoctlIn = request.peek().take()?;
                match args.cmd {
                    FS_IOC_SETFLAGS | FS_IOC32_SETFLAGS | FS_IOC_FSSETXATTR => Err(Errno::PERM),
                    _ => self.serve(opcode, request, reply),
                }
            }
            _ => Err(Errno::PERM),
        }
    }

    /// A directory that somebody has looked up already. The guest's kernel moves it to the name that was asked for,
    /// with what is mounted there and without an event, and back again when its own name is made.
    ///
    /// # Errors
    /// ENOENT if the guest need not have it, or has it no longer by the name that was put aside.
    fn lookup_aside(&self, agents: &Agents, pid: u32, mut work: Work, its_own: bool) -> Result<EntryOut> {
        let place = work.change.place.clone();
        if its_own && work.aside == 0 {
            let name = CString::new(&place.name[..]).map_err(|_| Errno::INVAL)?;
            let Present::Known(node) = self.present_at(place.dir, &name) else { return Err(Errno::NOENT) };
            if !agents.was_told(place.dir, &place.name, node)
                || self.fs.known_attr(node)?.mode & libc::S_IFMT != libc::S_IFDIR
            {
                return Err(Errno::NOENT);
            }
            // From here on, the next who looks it up learns of it anew.
            agents.tell(place.dir, &place.name, 0);
            agents.put_aside(pid, &work.change, node);
            work.aside = node;
        }
        if work.aside == 0 { Err(Errno::NOENT) } else { self.fs.known_entry(work.aside) }
    }

    /// The answer that others get, of which the guest keeps nothing.
    fn agent_lookup_known(&self, agents: &Agents, pid: u32, parent: u64, name: &CStr) -> Result<EntryOut> {
        let mut entry = match self.fs.lookup_repeated(parent, name) {
            // It has gone since it was looked at. There are still changes of it to repeat.
            Err(Errno::NOENT) | Ok(EntryOut { nodeid: 0, .. }) => {
                return self.agent_lookup(agents, pid, parent, name)?.ok_or(Errno::NOENT);
            }
            found => found?,
        };
        // The agent alone has asked for it.
        if entry.attr.mode & libc::S_IFMT != libc::S_IFDIR {
            (entry.entry_valid, entry.entry_valid_nsec) = (0, 0);
            (entry.attr_valid, entry.attr_valid_nsec) = (0, 0);
        }
        Ok(entry)
    }

    /// A name's answer, unless it is the one that others get.
    fn agent_lookup(&self, agents: &Agents, pid: u32, parent: u64, name: &CStr) -> Result<Option<EntryOut>> {
        let work = match agents.look(pid, ROOT_ID, parent, name.to_bytes()) {
            Look::AsOthers => return Ok(None),
            Look::Missing => return Err(Errno::NOENT),
            Look::Phantom(node) => return Ok(Some(kept_entry(node, phantom_format(node)))),
            Look::Work(work) if work.given_up => return Ok(None),
            Look::Work(work) => work,
        };
        let Work { change, phantom, target, .. } = &*work;
        let here = self.present_at(parent, name);
        let format = if change.has(ops::DIRECTORY) { libc::S_IFDIR } else { libc::S_IFREG };
        // Of a node that the guest knows, or a phantom.
        let entry = |node: u64, format: u32, removed: bool| {
            let known = if node == 0 { Err(Errno::STALE) } else { self.fs.known_entry(node) };
            let mut entry = known.unwrap_or_else(|_| phantom_entry(*phantom, format));
            if removed && format != libc::S_IFDIR && !is_phantom(entry.nodeid) {
                entry.attr.nlink += 1;
            }
            Ok(Some(entry))
        };
        if change.has(ops::EXCHANGE) {
            let first = work.is_at(parent, name.to_bytes());
            let (place, node, directory, phantom) = match first {
                true => (&change.to, change.node, change.has(ops::DIRECTORY), *phantom),
                false => (&change.place, work.other.node, work.other.directory, next_phantom(*phantom)),
            };
            let node = if first { self.moved_node(&work, place) } else { node };
            let format = if directory { libc::S_IFDIR } else { libc::S_IFREG };
            return Ok(Some(self.fs.known_entry(node).unwrap_or_else(|_| phantom_entry(phantom, format))));
        }
        let seen = self.is_seen(agents, parent, name);
        if change.has(ops::RENAME) && work.is_at(parent, name.to_bytes()) {
            let moved = self.moved_node(&work, &change.to);
            return match here {
                // Something else has this name already.
                Present::Known(node) if node != moved && seen => Ok(None),
                _ => entry(moved, format, false),
            };
        }
        if change.has(ops::RENAME) {
            return match *target {
                target if target != 0 => entry(target, format, true),
                _ if seen => Ok(None),
                _ => Err(Errno::NOENT),
            };
        }
        match here {
            _ if change.has(ops::CREATE) && seen => Ok(None),
            _ if change.has(ops::CREATE) && !work.created => Err(Errno::NOENT),
            Present::Known(node) if seen || node == change.node => Ok(None),
            Present::Known(_) | Present::New(..) if !change.has(ops::REMOVE) && self.is_of(here, work.file) => Ok(None),
            // It is gone, perhaps with another one in its place, and the guest is still to hear what happened to it.
            _ => entry(if work.created { 0 } else { change.node }, format, change.has(ops::REMOVE)),
        }
    }

    /// Whether somebody in the guest has learned what the name leads to now.
    fn is_seen(&self, agents: &Agents, parent: u64, name: &CStr) -> bool {
        match self.present_at(parent, name) {
            Present::Known(node) => agents.was_told(parent, name.to_bytes(), node),
            Present::Missing | Present::New(..) => false,
        }
    }

    /// Whether this is the file that a change is of.
    fn is_of(&self, here: Present, file: Option<FileId>) -> bool {
        match here {
            Present::Known(node) => self.fs.file_id_of(node) == file,
            Present::New(_, id) => id == file,
            Present::Missing => false,
        }
    }

    /// The present attributes of a node. If its file is gone, the guest may keep nothing of them.
    fn agent_getattr(&self, node: u64) -> Result<AttrOut> {
        self.fs.getattr(node, None).or_else(|_| Ok(AttrOut { attr: self.fs.known_attr(node)?, ..AttrOut::default() }))
    }

    /// The node that a change has moved to this place: the one that it is known by, or the one that is there.
    fn moved_node(&self, work: &Work, to: &Place) -> u64 {
        let name = CString::new(&to.name[..]).unwrap_or_default();
        match self.present_at(to.dir, &name) {
            there @ Present::Known(node) if work.change.node == 0 && self.is_of(there, work.file) => node,
            _ => work.change.node,
        }
    }

    fn present_at(&self, parent: u64, name: &CStr) -> Present {
        if is_phantom(parent) { Present::Missing } else { self.fs.present(parent, name) }
    }

    /// Whether the guest may lose what it has by this name: it has not learned yet what is there now.
    ///
    /// # Errors
    /// ECANCELED if not. EAGAIN if it would have to ask for the name first.
    fn holds(&self, agents: &Agents, work: &Work, parent: u64, name: &CStr) -> Result<()> {
        let old = work.is_at(parent, name.to_bytes());
        match self.present_at(parent, name) {
            _ if work.given_up => Err(Errno::CANCELED),
            // The other one of an exchange is where it was.
            Present::Known(node) if !old && node == work.other.node => Ok(()),
            Present::Known(node) if agents.was_told(parent, name.to_bytes(), node) => {
                // It has been moved away and back again.
                let same = old && self.is_of(Present::Known(node), work.file);
                match (same, work.asked) {
                    (true, true) => Ok(()),
                    (true, false) => Err(Errno::AGAIN),
                    _ => Err(Errno::CANCELED),
                }
            }
            _ => Ok(()),
        }
    }
}

impl Work {
    /// Whether the node loses a name.
    fn loses(&self, node: u64) -> bool {
        self.target == node || self.change.has(ops::REMOVE | ops::RENAME) && self.change.node == node
    }
}

/// How long the guest may keep what only the agent sees, in seconds: a day. It would forget the marker otherwise.
const KEPT: u64 = 86_400;

/// What the guest's kernel learns of a phantom that only the agent sees.
fn kept_entry(node: u64, format: u32) -> EntryOut {
    EntryOut { entry_valid: KEPT, attr_valid: KEPT, ..phantom_entry(node, format) }
}

/// What the guest's kernel learns of another phantom: nothing that it may keep.
fn phantom_entry(node: u64, format: u32) -> EntryOut {
    let (node, mode) = (phantom_of(node, format), format | if format == libc::S_IFDIR { 0o700 } else { 0o600 });
    EntryOut { nodeid: node, attr: Attr { ino: node, mode, nlink: 1, ..Attr::default() }, ..EntryOut::default() }
}
