//! Requests that name files or make them.

use super::super::Server;
use super::super::abi::*;
use super::super::ops::*;
use super::super::reply::Reply;
use super::super::request::Request;
use crate::agent::is_phantom;

impl<F: FileSystem> Server<F> {
    /// The umask to apply. The guest's kernel has applied it unless DONT_MASK was settled.
    fn umask(&self, umask: u32) -> u32 {
        if self.has(InitFlags::DONT_MASK) { umask & 0o777 } else { 0 }
    }

    pub(super) fn forget(&self, request: &mut Request, reply: &mut Reply) -> Result<()> {
        reply.silence();
        let args: ForgetIn = request.take()?;
        self.forget_one(request.header.nodeid, args.nlookup);
        Ok(())
    }

    pub(super) fn batch_forget(&self, request: &mut Request, reply: &mut Reply) -> Result<()> {
        reply.silence();
        let args: BatchForgetIn = request.take()?;
        for _ in 0..args.count {
            let one: ForgetOne = request.take()?;
            self.forget_one(one.nodeid, one.nlookup);
        }
        Ok(())
    }

    fn forget_one(&self, node: u64, nlookup: u64) {
        match self.fs.agents() {
            Some(agents) if is_phantom(node) => agents.forgot(node),
            _ => self.fs.forget(node, nlookup),
        }
    }

    pub(super) fn symlink(&self, request: &mut Request, reply: &mut Reply) -> Result<()> {
        let (name, target) = (request.name()?, request.name()?);
        reply.put(&self.fs.symlink(request.header.nodeid, name, target, &request.creator(0)?)?)
    }

    pub(super) fn mknod(&self, request: &mut Request, reply: &mut Reply) -> Result<()> {
        let args: MknodIn = request.take()?;
        let name = request.name()?;
        let by = request.creator(self.umask(args.umask))?;
        reply.put(&self.fs.mknod(request.header.nodeid, name, args.mode, args.rdev, &by)?)
    }

    pub(super) fn mkdir(&self, request: &mut Request, reply: &mut Reply) -> Result<()> {
        let args: MkdirIn = request.take()?;
        let name = request.name()?;
        let by = request.creator(self.umask(args.umask))?;
        reply.put(&self.fs.mkdir(request.header.nodeid, name, args.mode, &by)?)
    }

    pub(super) fn rename(&self, request: &mut Request, newdir: u64, flags: u32) -> Result<()> {
        let (name, newname) = (request.name()?, request.name()?);
        self.fs.rename(request.header.nodeid, name, newdir, newname, flags, &request.creator(0)?)
    }

    pub(super) fn create(&self, request: &mut Request, reply: &mut Reply) -> Result<()> {
        let args: CreateIn = request.take()?;
        let name = request.name()?;
        let by = request.creator(self.umask(args.umask))?;
        self.fs.create(request.header.nodeid, name, &args, &by, reply)
    }

    pub(super) fn tmpfile(&self, request: &mut Request, reply: &mut Reply) -> Result<()> {
        let args: CreateIn = request.take()?;
        // The kernel sends a name, which means nothing.
        request.name()?;
        let by = request.creator(self.umask(args.umask))?;
        self.fs.tmpfile(request.header.nodeid, &args, &by, reply)
    }
}
