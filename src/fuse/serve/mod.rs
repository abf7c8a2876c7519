//! Every opcode: what it asks the file system for, and with which arguments.

mod agent;
mod data;
mod names;

use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::Server;
use super::abi::*;
use super::ops::*;
use super::reply::Reply;
use super::request::Request;
use crate::limits::REMOVED_PARTS;

impl<F: FileSystem> Server<F> {
    pub(super) fn serve(&self, opcode: Opcode, request: &mut Request, reply: &mut Reply) -> Result<()> {
        let fs = &*self.fs;
        let node = request.header.nodeid;
        if sees_times(opcode) && self.settles_elsewhere(opcode, node, reply) {
            return Ok(());
        }
        match opcode {
            Opcode::Lookup if reply.may_wait() => reply.put(&fs.lookup(node, request.name()?)?),
            Opcode::Lookup => match fs.lookup_now(node, request.name()?) {
                Err(Errno::AGAIN) => {
                    reply.serve_anew();
                    Ok(())
                }
                found => reply.put(&found?),
            },
            Opcode::Forget => self.forget(request, reply),
            Opcode::BatchForget => self.batch_forget(request, reply),
            Opcode::Readlink => reply.collect(|to| fs.readlink(node, to)),
            Opcode::Symlink => self.symlink(request, reply),
            Opcode::Mknod => self.mknod(request, reply),
            Opcode::Mkdir => self.mkdir(request, reply),
            Opcode::Unlink => fs.unlink(node, request.name()?),
            Opcode::Rmdir => fs.rmdir(node, request.name()?),
            Opcode::Rename => {
                let RenameIn { newdir } = request.take()?;
                self.rename(request, newdir, 0)
            }
            Opcode::Rename2 => {
                let Rename2In { newdir, flags, .. } = request.take()?;
                self.rename(request, newdir, flags)
            }
            Opcode::Link => {
                let args: LinkIn = request.take()?;
                if self.settles_elsewhere(opcode, args.oldnodeid, reply) {
                    return Ok(());
                }
                reply.put(&fs.link(args.oldnodeid, node, request.name()?)?)
            }

            Opcode::Getattr => {
                let args: GetattrIn = request.take()?;
                reply.put(&fs.getattr(node, (args.getattr_flags & GETATTR_FH != 0).then_some(args.fh))?)
            }
            Opcode::Setattr => self.setattr(request, reply),
            Opcode::Statx => {
                let args: StatxIn = request.take()?;
                let fh = (args.getattr_flags & GETATTR_FH != 0).then_some(args.fh);
                reply.put(&fs.statx(node, fh, args.sx_flags, args.sx_mask)?)
            }
            Opcode::Statfs => reply.put(&fs.statfs(node)?),
            Opcode::Access => {
                let args: AccessIn = request.take()?;
                fs.access(node, request.header.uid, request.header.gid, args.mask)
            }

            Opcode::Open => self.open(request, reply),
            Opcode::Create => self.create(request, reply),
            Opcode::Tmpfile => self.tmpfile(request, reply),
            Opcode::Flush => {
                let args: FlushIn = request.take()?;
                fs.flush(node, args.fh, args.lock_owner)
            }
            Opcode::Release => fs.release(node, &request.take()?),

            Opcode::Read => self.read(request, reply),
            Opcode::Write => self.write(request, reply),
            Opcode::Fsync => self.fsync(request, reply),
            Opcode::Fallocate => self.fallocate(request, reply),
            Opcode::Lseek => self.lseek(request, reply),
            Opcode::CopyFileRange => self.copy_file_range(request, reply, |n| WriteOut { size: n as u32, padding: 0 }),
            Opcode::CopyFileRange64 => {
                self.copy_file_range(request, reply, |bytes_copied| CopyFileRangeOut { bytes_copied })
            }
            Opcode::Syncfs => self.serve_where(Some(Wait::Host), reply, move |fs, _| fs.syncfs(node)),

            Opcode::Opendir => {
                let args: OpenIn = request.take()?;
                reply.put(&fs.opendir(node, args.flags)?)
            }
            Opcode::Readdir => {
                let args: ReadIn = request.take()?;
                reply.entries(args.size as usize, false, |sink| fs.readdir(node, args.fh, args.offset, sink))
            }
            Opcode::Readdirplus => {
                let args: ReadIn = request.take()?;
                reply.entries(args.size as usize, true, |sink| fs.readdirplus(node, args.fh, args.offset, sink))
            }
            Opcode::Releasedir => {
                let args: ReleaseIn = request.take()?;
                fs.releasedir(node, args.fh)
            }
            Opcode::Fsyncdir => self.fsyncdir(request, reply),

            Opcode::Setxattr => self.setxattr(request),
            Opcode::Getxattr => {
                let args: GetxattrIn = request.take()?;
                let name = request.name()?;
                reply.sized(args.size, |size, to| fs.getxattr(node, name, size, to))
            }
            Opcode::Listxattr => {
                let args: GetxattrIn = request.take()?;
                reply.sized(args.size, |size, to| fs.listxattr(node, size, to))
            }
            Opcode::Removexattr => fs.removexattr(node, request.name()?),

            Opcode::Getlk => reply.put(&fs.getlk(node, &request.take()?)?),
            Opcode::Setlk => fs.setlk(node, request.header.unique, &request.take()?, false).map(drop),
            Opcode::Setlkw => match fs.setlk(node, request.header.unique, &request.take()?, true)? {
                Some(wait) => reply.run(Wait::Lock, |_, _| wait()),
                None => Ok(()),
            },
            Opcode::Interrupt => {
                let args: InterruptIn = request.take()?;
                fs.interrupt(args.unique);
                reply.silence();
                Ok(())
            }

            Opcode::Setupmapping => fs.setupmapping(node, &request.take()?, reply),
            Opcode::Removemapping => {
                let args: RemovemappingIn = request.take()?;
                if args.count > REMOVED_PARTS {
                    return Err(Errno::INVAL);
                }
                let parts = (0..args.count).map(|_| request.take()).collect::<Result<Vec<_>>>()?;
                fs.removemapping(&parts, reply)
            }
            Opcode::Destroy => {
                self.reset();
                // QEMU may stop the device right after the answer, and must not be asked for anything then. This is
                // answered after all requests to the frontend. Without a window there are none.
                let _ = fs.removemapping(&[], reply);
                Ok(())
            }

            Opcode::Ioctl => self.ioctl(request, reply),

            // Once the kernel has seen ENOSYS it serves POLL (always ready) and BMAP (EINVAL) itself. The device does
            // not ask for NOTIFY_REPLY.
            Opcode::Poll | Opcode::Bmap | Opcode::NotifyReply | Opcode::Init => Err(Errno::NOSYS),
        }
    }

    /// Gives a node's file the time of what the guest has stored in place, before the request sees it. True if that is
    /// left to another thread, which serves the request too: the file may be locked for seconds, and a worker must
    /// serve others meanwhile. A WRITE waits for the same lock itself.
    pub(super) fn settles_elsewhere(&self, opcode: Opcode, node: u64, reply: &mut Reply) -> bool {
        let owes = self.fs.owes_times(node);
        let elsewhere = owes && opcode != Opcode::Write && !reply.may_wait();
        if elsewhere {
            reply.serve_anew();
        } else if owes {
            self.fs.settle_times(node);
        }
        elsewhere
    }

    fn setattr(&self, request: &mut Request, reply: &mut Reply) -> Result<()> {
        let args: SetattrIn = request.take()?;
        let (node, valid) = (request.header.nodeid, SetattrValid::from_bits_retain(args.valid));
        let (fh, by) = (valid.contains(SetattrValid::FH).then_some(args.fh), request.caller());
        let wait = if valid.contains(SetattrValid::SIZE) { self.fs.truncating_waits(node, fh)? } else { None };
        self.serve_where(wait, reply, move |fs, reply| reply.put(&fs.setattr(node, &args, by)?))
    }

    /// The four calls of ioctl(2) that tell and change a file's flags. Linux from 5.13 on sends them for chattr(1) and
    /// the like, with exact sizes; older ones send what a program asked for, with the sizes of the numbers.
    fn ioctl(&self, request: &mut Request, reply: &mut Reply) -> Result<()> {
        let args: IoctlIn = request.take()?;
        if args.flags & IOCTL_UNRESTRICTED != 0 {
            return Err(Errno::NOTTY);
        }
        let (node, fh, uid) = (request.header.nodeid, args.fh, request.header.uid);
        match args.cmd {
            FS_IOC_GETFLAGS | FS_IOC32_GETFLAGS => {
                answer_ioctl(self, &args, reply, move |fs, patient| fs.flags(node, fh, patient))
            }
            FS_IOC_FSGETXATTR => answer_ioctl(self, &args, reply, move |fs, patient| fs.fsxattr(node, fh, patient)),
            FS_IOC_SETFLAGS | FS_IOC32_SETFLAGS => {
                let flags = ioctl_data(&args, request)?;
                answer_ioctl(self, &args, reply, move |fs, patient| fs.set_flags(node, fh, uid, flags, patient))
            }
            FS_IOC_FSSETXATTR => {
                let to: Fsxattr = ioctl_data(&args, request)?;
                answer_ioctl(self, &args, reply, move |fs, patient| fs.set_fsxattr(node, fh, uid, &to, patient))
            }
            command => self.agent_call(command, &args, request, reply),
        }
    }

    fn setxattr(&self, request: &mut Request) -> Result<()> {
        let by = request.caller();
        let (size, flags, ext) = if self.has(InitFlags::SETXATTR_EXT) {
            let args: SetxattrIn = request.take()?;
            (args.size, args.flags, Some(args.setxattr_flags))
        } else {
            let args: SetxattrInCompat = request.take()?;
            (args.size, args.flags, None)
        };
        let name = request.name()?;
        let value = request.bytes(size as usize)?;
        let kills = match ext {
            Some(ext) => ext & SETXATTR_ACL_KILL_SGID != 0,
            // Linux before 5.13 leaves it to the daemon. The guest's root is taken to have CAP_FSETID.
            None => self.has(InitFlags::POSIX_ACL) && name == c"system.posix_acl_access" && by.uid != 0,
        };
        self.fs.setxattr(request.header.nodeid, name, value, flags, kills.then_some(by))
    }
}

/// What a program gave to an ioctl(2).
///
/// # Errors
/// EINVAL if it is too short.
fn ioctl_data<T: FromBytes>(args: &IoctlIn, request: &mut Request) -> Result<T> {
    if (args.in_size as usize) < size_of::<T>() { Err(Errno::INVAL) } else { request.take() }
}

/// Answers an ioctl(2) with what `serve` returns. It gets whether the thread may wait.
///
/// # Errors
/// EINVAL if the guest has too little room for that.
fn answer_ioctl<F: FileSystem, T: IntoBytes + Immutable>(
    server: &Server<F>,
    args: &IoctlIn,
    reply: &mut Reply,
    serve: impl Fn(&F, bool) -> Result<T> + Send + 'static,
) -> Result<()> {
    if (args.out_size as usize) < size_of::<T>() {
        return Err(Errno::INVAL);
    }
    let answer = |reply: &mut Reply, result: T| reply.put(&IoctlOut::default()).and_then(|()| reply.put(&result));
    match serve(&server.fs, false) {
        Err(Errno::AGAIN) => {
            server.serve_where(Some(Wait::Others), reply, move |fs, reply| answer(reply, serve(fs, true)?))
        }
        result => answer(reply, result?),
    }
}

/// Whether a request may be served on a thread that may wait, from its beginning.
pub(super) const fn may_wait(opcode: Opcode) -> bool {
    matches!(opcode, Opcode::Read | Opcode::Lookup | Opcode::Link) || sees_times(opcode)
}

/// Whether a request reads or changes the attributes or data of its node. What LOOKUP, READDIRPLUS, LINK and
/// COPY_FILE_RANGE find comes later, and READ has no attributes.
const fn sees_times(opcode: Opcode) -> bool {
    matches!(
        opcode,
        Opcode::Getattr
            | Opcode::Setattr
            | Opcode::Statx
            | Opcode::Open
            | Opcode::Flush
            | Opcode::Release
            | Opcode::Write
            | Opcode::Fsync
            | Opcode::Fallocate
            | Opcode::CopyFileRange
            | Opcode::CopyFileRange64
            | Opcode::Setxattr
            | Opcode::Removexattr
            | Opcode::Ioctl
            | Opcode::Setupmapping
    )
}
