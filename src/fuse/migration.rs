//! A session as bytes: this header, then the file system's part. docs/protocol.md describes the format.

use std::io;
use std::sync::atomic::Ordering;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian};

use super::abi::InitFlags;
use super::ops::FileSystem;
use super::{CLOSED, Server};
use crate::record;

const MAGIC: [u8; 8] = *b"thruway\0";

/// Raised with every change that an older daemon would misread.
const VERSION: u32 = 5;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: little_endian::U32,
    reserved: little_endian::U32,
    /// What INIT settled. Bit 63 alone: there was no INIT yet, and nothing follows.
    session: little_endian::U64,
}

fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// What INIT settled, from a record.
fn flags(session: u64) -> io::Result<InitFlags> {
    InitFlags::from_bits(session ^ CLOSED).ok_or_else(|| invalid("the session has unknown features"))
}

impl<F: FileSystem> Server<F> {
    /// Goes on with the session that an earlier worker process has left in the record, if there is one. To be called
    /// before there are requests.
    ///
    /// # Errors
    /// If this daemon cannot have what INIT settled. There is no session then.
    pub fn take_over(&self) -> io::Result<()> {
        let Some(record) = record::get() else { return Ok(()) };
        self.enter_thread();
        let Some((session, minor)) = record.session() else {
            self.fs.take_over_rest(record.take_over());
            return Ok(());
        };
        let flags = flags(session)?;
        self.fs.take_over(flags, record.take_over())?;
        self.minor.store(minor, Ordering::Relaxed);
        self.session.store(session ^ CLOSED, Ordering::Release);
        Ok(())
    }

    /// Whether [`take_over`](Self::take_over) could go on with this session.
    ///
    /// # Errors
    /// If this daemon cannot have what INIT settled.
    pub fn check(&self, session: u64) -> io::Result<()> {
        self.fs.check(flags(session)?)
    }

    /// The session, for another daemon. No request is served meanwhile.
    ///
    /// # Errors
    /// If the session cannot move.
    pub fn save(&self) -> io::Result<Vec<u8>> {
        self.enter_thread();
        let session = self.session.load(Ordering::Acquire);
        let header = Header { magic: MAGIC, version: VERSION.into(), reserved: 0.into(), session: session.into() };
        let mut state = header.as_bytes().to_vec();
        if session != CLOSED {
            state.extend(self.fs.save()?);
        }
        Ok(state)
    }

    /// Takes over what [`save`](Self::save) gave. The state may hold anything. No request is served meanwhile.
    ///
    /// # Errors
    /// If the state is not valid. There is no session then.
    pub fn load(&self, state: &[u8]) -> io::Result<()> {
        self.enter_thread();
        self.reset();
        let (header, rest) = Header::read_from_prefix(state).map_err(|_| invalid("the state is cut off"))?;
        if header.magic != MAGIC {
            return Err(invalid("this is not a state of thruwayd: both ends of a migration must run it"));
        }
        if header.version != VERSION {
            let is = header.version;
            return Err(invalid(format!(
                "the state has version {is}, not {VERSION}: use the same thruwayd at both ends"
            )));
        }
        let session = header.session.get();
        if session == CLOSED {
            return if rest.is_empty() { Ok(()) } else { Err(invalid("bytes follow the end of the state")) };
        }
        let flags = InitFlags::from_bits(session).ok_or_else(|| invalid("the session has unknown features"))?;
        self.minor.store(0, Ordering::Relaxed);
        self.fs.load(flags, rest)?;
        self.open(session, 0);
        Ok(())
    }
}
