//! The contents of files: reading, writing, copying, space and durability.

use rustix::io::Errno;

use super::super::Server;
use super::super::abi::*;
use super::super::buf::IOV_MAX;
use super::super::ops::*;
use super::super::reply::Reply;
use super::super::request::Request;
use super::super::throttle::Kind;
use crate::limits::{COPY_BYTES, COPY_PIECE, DATA_BYTES, SHORTEST_COPY};

impl<F: FileSystem> Server<F> {
    pub(super) fn read(&self, request: &mut Request, reply: &mut Reply) -> Result<()> {
        let args: ReadIn = request.take()?;
        let (node, size) = (request.header.nodeid, data_len(args.size)?);
        let long = reply.moves(size);
        if !long {
            match reply.fill(size, |to| self.fs.read(node, &args, to)) {
                Err(WOULD_WAIT) => {}
                done => return done,
            }
        }
        reply.read_elsewhere(self.fs.file_for_read(node, &args)?, args.offset, size, long);
        Ok(())
    }

    pub(super) fn write(&self, request: &mut Request, reply: &mut Reply) -> Result<()> {
        let args: WriteIn = request.take()?;
        let (node, size) = (request.header.nodeid, data_len(args.size)?);
        let long = reply.moves(size);
        let by = request.caller();
        let data = request.data(size)?;
        if long && data.as_slice().len() <= IOV_MAX {
            if let Some(file) = self.fs.file_for_write(node, &args, by)? {
                reply.write_elsewhere(file, args.offset, &data);
                return Ok(());
            }
        }
        let size = self.fs.write(node, &args, by, &data)?;
        reply.wrote(size);
        reply.put(&WriteOut { size: size as u32, padding: 0 })
    }

    /// Returns the number of bytes copied.
    pub(super) fn copy_file_range(&self, request: &mut Request, reply: &Reply) -> Result<u64> {
        let (node, args): (_, CopyFileRangeIn) = (request.header.nodeid, request.take()?);
        let args = CopyFileRangeIn { len: args.len.min(COPY_BYTES), ..args };
        if reply.may_wait() {
            self.fs.settle_times(args.nodeid_out);
        }
        let copied = copy(&args, || reply.stopping(), |piece| self.fs.copy_file_range(node, piece));
        copied.inspect(|copied| self.throttle.charge(Kind::Write, *copied))
    }
}

/// The length of a READ or WRITE.
///
/// # Errors
/// EINVAL if it is over the limit.
fn data_len(size: u32) -> Result<usize> {
    if size as usize > DATA_BYTES { Err(Errno::INVAL) } else { Ok(size as usize) }
}

/// Copies in pieces. Ends early once `stops`: a short count is no error.
fn copy(
    args: &CopyFileRangeIn,
    stops: impl Fn() -> bool,
    mut copy: impl FnMut(&CopyFileRangeIn) -> Result<usize>,
) -> Result<u64> {
    let mut done = 0;
    loop {
        let stopping = stops();
        if stopping && done > 0 {
            return Ok(done);
        }
        let most = if stopping { SHORTEST_COPY } else { COPY_PIECE };
        let at = |offset: u64| offset.checked_add(done).ok_or(Errno::INVAL);
        let len = (args.len - done).min(most);
        let piece =
            at(args.off_in).and_then(|off_in| Ok(CopyFileRangeIn { off_in, off_out: at(args.off_out)?, len, ..*args }));
        match piece.and_then(|piece| copy(&piece)) {
            Ok(n) => {
                done += n as u64;
                if (n as u64) < len || done >= args.len {
                    return Ok(done);
                }
            }
            Err(_) if done > 0 => return Ok(done),
            Err(errno) => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn args(len: u64) -> CopyFileRangeIn {
        CopyFileRangeIn { off_in: 100, off_out: 7, len, ..Default::default() }
    }

    #[test]
    fn a_copy_is_cut_to_pieces() {
        let mut pieces = Vec::new();
        let copied = copy(
            &args(3 * COPY_PIECE + 5),
            || false,
            |piece| {
                pieces.push((piece.off_in - 100, piece.off_out - 7, piece.len));
                Ok(piece.len as usize)
            },
        );
        assert_eq!(copied, Ok(3 * COPY_PIECE + 5));
        let piece = |n, len| (n * COPY_PIECE, n * COPY_PIECE, len);
        assert_eq!(pieces, [piece(0, COPY_PIECE), piece(1, COPY_PIECE), piece(2, COPY_PIECE), piece(3, 5)]);
    }

    #[test]
    fn a_copy_ends_between_two_pieces() {
        let pieces = Cell::new(0);
        let run = |len| {
            let copied = |piece: &CopyFileRangeIn| {
                pieces.set(pieces.get() + 1);
                Ok(piece.len as usize)
            };
            copy(&args(len), || pieces.get() >= 3, copied)
        };
        assert_eq!(run(100 * COPY_PIECE), Ok(3 * COPY_PIECE));
        // A copy that begins after the stop still copies something: a count of 0 would mean the end of the file.
        assert_eq!(run(100 * COPY_PIECE), Ok(SHORTEST_COPY));
        assert_eq!(pieces.get(), 4);
    }

    #[test]
    fn a_copy_reports_what_was_copied_before_an_error() {
        let run = |results: &[Result<usize>]| {
            let mut results = results.iter();
            copy(&args(100 * COPY_PIECE), || false, |_| *results.next().unwrap())
        };
        let piece = COPY_PIECE as usize;
        assert_eq!(run(&[Err(Errno::NOSPC)]), Err(Errno::NOSPC));
        assert_eq!(run(&[Ok(piece), Err(Errno::NOSPC)]), Ok(COPY_PIECE));
        assert_eq!(run(&[Ok(piece), Ok(5)]), Ok(COPY_PIECE + 5));
        assert_eq!(run(&[Ok(0)]), Ok(0));
        let mut args = args(2 * COPY_PIECE);
        args.off_out = u64::MAX - COPY_PIECE;
        assert_eq!(copy(&args, || false, |_| Ok(piece)), Ok(2 * COPY_PIECE));
        args.off_out += 1;
        assert_eq!(copy(&args, || false, |_| Ok(piece)), Ok(COPY_PIECE));
    }
}
