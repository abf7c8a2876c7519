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
        // A worker serves none whose file owes a time.
        if opcode == Opcode::Write || opcode.does().contains(Does::SEE_TIMES) && reply.may_wait() {
            fs.settle_times(node);
        }
        match opcode {
            Opcode::Lookup => reply.put(&fs.lookup(node, request.name()?)?),
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
                if reply.may_wait() {
                    fs.settle_times(args.oldnodeid);
                }
                reply.put(&fs.link(args.oldnodeid, node, request.name()?)?)
            }

            Opcode::Getattr => {
                let args: GetattrIn = request.take()?;
                reply.put(&fs.getattr(node, (args.getattr_flags & GETATTR_FH != 0).then_some(args.fh))?)
            }
            Opcode::Setattr => {
                let args = request.take()?;
                reply.put(&fs.setattr(node, &args, request.caller())?)
            }
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

            Opcode::Open => {
                let args = request.take()?;
                fs.open(node, &args, request.caller(), reply)
            }
            Opcode::Create => self.create(request, reply),
            Opcode::Tmpfile => self.tmpfile(request, reply),
            Opcode::Flush => {
                let args: FlushIn = request.take()?;
                fs.flush(node, args.fh, args.lock_owner)
            }
            Opcode::Release => fs.release(node, &request.take()?),

            Opcode::Read => self.read(request, reply),
            Opcode::Write => self.write(request, reply),
            Opcode::Fsync => {
                let args: FsyncIn = request.take()?;
                fs.fsync(node, args.fh, args.fsync_flags & FSYNC_FDATASYNC != 0, request.caller())
            }
            Opcode::Fallocate => fs.fallocate(node, &request.take()?),
            Opcode::Lseek => {
                let args: LseekIn = request.take()?;
                reply.put(&LseekOut { offset: fs.lseek(node, args.fh, args.offset, args.whence)? })
            }
            Opcode::CopyFileRange => {
                let size = self.copy_file_range(request, reply)? as u32;
                reply.put(&WriteOut { size, padding: 0 })
            }
            Opcode::CopyFileRange64 => {
                let bytes_copied = self.copy_file_range(request, reply)?;
                reply.put(&CopyFileRangeOut { bytes_copied })
            }
            Opcode::Syncfs => fs.syncfs(node),

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
            Opcode::Fsyncdir => {
                let args: FsyncIn = request.take()?;
                fs.fsyncdir(node, args.fh, args.fsync_flags & FSYNC_FDATASYNC != 0)
            }

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
                Some(wait) => reply.run(Wait::Lock, |_| wait()),
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

    /// The four calls of ioctl(2) that tell and change a file's flags. Linux from 5.13 on sends them for chattr(1) and
    /// the like, with exact sizes; older ones send what a program asked for, with the sizes of the numbers.
    fn ioctl(&self, request: &mut Request, reply: &mut Reply) -> Result<()> {
        let args: IoctlIn = request.take()?;
        if args.flags & IOCTL_UNRESTRICTED != 0 {
            return Err(Errno::NOTTY);
        }
        let (fs, node, fh, uid) = (&self.fs, request.header.nodeid, args.fh, request.header.uid);
        match args.cmd {
            FS_IOC_GETFLAGS | FS_IOC32_GETFLAGS => answer_ioctl(&args, reply, || fs.flags(node, fh)),
            FS_IOC_FSGETXATTR => answer_ioctl(&args, reply, || fs.fsxattr(node, fh)),
            FS_IOC_SETFLAGS | FS_IOC32_SETFLAGS => {
                let flags = ioctl_data(&args, request)?;
                answer_ioctl(&args, reply, || fs.set_flags(node, fh, uid, flags))
            }
            FS_IOC_FSSETXATTR => {
                let to: Fsxattr = ioctl_data(&args, request)?;
                answer_ioctl(&args, reply, || fs.set_fsxattr(node, fh, uid, &to))
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

/// Answers an ioctl(2) with what `serve` returns.
///
/// # Errors
/// EINVAL if the guest has too little room for that.
fn answer_ioctl<T: IntoBytes + Immutable>(
    args: &IoctlIn,
    reply: &mut Reply,
    serve: impl FnOnce() -> Result<T>,
) -> Result<()> {
    if (args.out_size as usize) < size_of::<T>() {
        return Err(Errno::INVAL);
    }
    let result = serve()?;
    reply.put(&IoctlOut::default())?;
    reply.put(&result)
}
