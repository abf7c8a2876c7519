//! Shared parts of the targets: reading an input piece by piece.

pub mod share;

use std::sync::{Arc, Mutex};

use thruway::fuse::buf::IoRange;
use thruway::fuse::ops::{Result, Wait};
use thruway::fuse::{Io, Job, ReplySender, Transport};

/// Records what a request wants from another thread, and late replies.
#[derive(Default)]
pub struct Here {
    pub crowded: bool,
    pub may_wait: bool,
    /// The request wants another thread to move its data.
    pub io: bool,
    pub job: Option<(Wait, Job)>,
    pub late: Arc<Mutex<Option<Vec<u8>>>>,
}

impl Transport for Here {
    fn moves(&mut self, _bytes: usize) -> bool {
        self.crowded && !self.may_wait
    }

    fn may_wait(&self) -> bool {
        self.may_wait
    }

    fn io(&mut self, _io: Io, _data: &IoRange) {
        self.io = true;
    }

    fn serve_anew(&mut self, _since: Option<std::time::Instant>) {
        self.io = true;
    }

    fn detach(&mut self) -> ReplySender {
        let late = self.late.clone();
        Box::new(move |reply| *late.lock().unwrap() = Some(reply))
    }

    fn run(&mut self, wait: Wait, job: Job) -> Result<()> {
        self.job = Some((wait, job));
        Ok(())
    }
}

/// The remaining bytes of an input. Reads past the end return zeroes.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let n = N.min(self.0.len());
        array[..n].copy_from_slice(&self.0[..n]);
        self.0 = &self.0[n..];
        array
    }

    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// The next bytes, at most `most`.
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    /// A number: small, near a limit, or any.
    pub fn number(&mut self) -> u64 {
        match self.u8() {
            n @ 0..=0x7f => n.into(),
            n @ 0x80..=0xbf => 1u64.checked_shl(u32::from(n & 0x3f)).unwrap_or(0),
            n @ 0xc0..=0xdf => (1u64 << (n & 0x1f)).wrapping_add(u64::from(self.u8())).wrapping_sub(128),
            n @ 0xe0..=0xef => u64::MAX - u64::from(n & 0xf),
            n @ 0xf0..=0xf7 => i64::MAX as u64 - 4 + u64::from(n & 7),
            0xf8..=0xfb => self.u32().into(),
            _ => self.u64(),
        }
    }
}
