//! Guest memory as lists of slices, in the shape that preadv2(2) and pwritev2(2) take.
//!
//! The guest may change this memory at any time, so every value is copied out once and then checked.

use std::ops::Range;

/// Most slices that one preadv2(2) or pwritev2(2) takes (UIO_MAXIOV, include/uapi/linux/uio.h).
pub const IOV_MAX: usize = 1024;

/// The slices of one direction of a descriptor chain. A worker keeps the list and fills it anew for each request.
#[derive(Default)]
pub struct IoVecs {
    vecs: Vec<libc::iovec>,
    len: usize,
    /// The daemon may touch this many bytes at the start. Only system calls may touch the rest.
    near: usize,
}

// SAFETY: the pointers are only dereferenced under the promise made to `push`, which holds for any thread.
unsafe impl Send for IoVecs {}

impl IoVecs {
    /// Empties the list and keeps its allocation.
    pub fn clear(&mut self) {
        self.vecs.clear();
        self.len = 0;
        self.near = 0;
    }

    /// Adds a slice. If it is not `near`, only system calls may touch it: copies end before it.
    ///
    /// # Safety
    /// `base..base + len` must stay mapped until the list is cleared or no longer used. If it is `near`, touching it
    /// must not raise SIGBUS. Others may read and write it meanwhile.
    pub unsafe fn push(&mut self, base: *mut u8, len: usize, near: bool) {
        if len > 0 {
            if near && self.near == self.len {
                self.near = self.near.saturating_add(len);
            }
            self.len = self.len.saturating_add(len);
            // A guest's buffer is often one range that has a descriptor for each page.
            match self.vecs.last_mut() {
                Some(last) if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base => last.iov_len += len,
                _ => self.vecs.push(libc::iovec { iov_base: base.cast(), iov_len: len }),
            }
        }
    }

    /// Total length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes from `offset` on into `to`. Returns how many there were.
    pub fn read_at(&self, offset: usize, to: &mut [u8]) -> usize {
        self.copy(offset, to.len(), |done, base, n| {
            // SAFETY: `push` promised that the slice is mapped, and `copy` keeps `n` within both sides.
            unsafe { std::ptr::copy_nonoverlapping(base, to[done..done + n].as_mut_ptr(), n) }
        })
    }

    /// Copies `from` to `offset`. Returns how many bytes had room.
    pub fn write_at(&mut self, offset: usize, from: &[u8]) -> usize {
        self.copy(offset, from.len(), |done, base, n| {
            // SAFETY: as in `read_at`.
            unsafe { std::ptr::copy_nonoverlapping(from[done..done + n].as_ptr(), base, n) }
        })
    }

    fn copy(&self, mut offset: usize, want: usize, mut each: impl FnMut(usize, *mut u8, usize)) -> usize {
        let want = want.min(self.near.saturating_sub(offset));
        let mut done = 0;
        for v in &self.vecs {
            if done == want {
                break;
            }
            if offset >= v.iov_len {
                offset -= v.iov_len;
                continue;
            }
            let n = (v.iov_len - offset).min(want - done);
            each(done, v.iov_base.cast::<u8>().wrapping_add(offset), n);
            done += n;
            offset = 0;
        }
        done
    }

    /// The bytes in `range`, cut to the list's length, as slices for a vectored system call. Dropping the value
    /// restores the list.
    pub fn range(&mut self, range: Range<usize>) -> IoRange<'_> {
        let end = range.end.min(self.len);
        let start = range.start.min(end);
        let (mut first, mut skip) = (0, start);
        while first < self.vecs.len() && skip >= self.vecs[first].iov_len {
            skip -= self.vecs[first].iov_len;
            first += 1;
        }
        let (mut last, mut left) = (first, end - start + skip);
        while last < self.vecs.len() && left > self.vecs[last].iov_len {
            left -= self.vecs[last].iov_len;
            last += 1;
        }
        if start == end {
            return IoRange { vecs: &mut self.vecs[..0], saved: None, len: 0 };
        }
        let vecs = &mut self.vecs[first..=last];
        let saved = Some((vecs[0], vecs[vecs.len() - 1]));
        let n = vecs.len();
        vecs[n - 1].iov_len = left;
        vecs[0].iov_base = vecs[0].iov_base.cast::<u8>().wrapping_add(skip).cast();
        vecs[0].iov_len -= skip;
        IoRange { vecs, saved, len: end - start }
    }
}

/// Part of an [`IoVecs`].
pub struct IoRange<'a> {
    vecs: &'a mut [libc::iovec],
    saved: Option<(libc::iovec, libc::iovec)>,
    len: usize,
}

impl IoRange<'_> {
    /// The slices, for preadv2(2) and pwritev2(2).
    pub fn as_slice(&self) -> &[libc::iovec] {
        self.vecs
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for IoRange<'_> {
    fn drop(&mut self) {
        if let (Some((first, last)), n @ 1..) = (self.saved, self.vecs.len()) {
            self.vecs[n - 1] = last;
            self.vecs[0] = first;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(parts: &mut [Vec<u8>]) -> IoVecs {
        let mut v = IoVecs::default();
        for p in parts {
            // SAFETY: the test keeps `parts` alive longer than the list.
            unsafe { v.push(p.as_mut_ptr(), p.len(), true) };
        }
        v
    }

    #[test]
    fn copies_cross_slices() {
        let mut parts = [vec![1, 2, 3], vec![4], vec![5, 6, 7, 8]];
        let mut v = list(&mut parts);
        let mut out = [0; 5];
        assert_eq!(v.read_at(2, &mut out), 5);
        assert_eq!(out, [3, 4, 5, 6, 7]);
        assert_eq!(v.read_at(7, &mut out), 1);
        assert_eq!(v.read_at(9, &mut out), 0);
        assert_eq!(v.write_at(6, &[9; 9]), 2);
        assert_eq!(parts[2], [5, 6, 9, 9]);
    }

    #[test]
    fn copies_end_before_memory_that_may_not_be_touched() {
        let mut parts = [vec![1; 4], vec![2; 4], vec![3; 4]];
        let mut v = IoVecs::default();
        for (n, p) in parts.iter_mut().enumerate() {
            // SAFETY: as above.
            unsafe { v.push(p.as_mut_ptr(), p.len(), n != 1) };
        }
        let mut out = [0; 12];
        assert_eq!((v.read_at(0, &mut out), v.read_at(3, &mut out), v.read_at(4, &mut out)), (4, 1, 0));
        assert_eq!((v.write_at(2, &[9; 9]), v.len(), v.range(0..12).len()), (2, 12, 12));
        assert_eq!(parts[1], [2; 4]);
    }

    #[test]
    fn ranges_are_exact_and_restored() {
        let mut parts = [vec![0; 16], vec![0; 4096], vec![0; 100]];
        let mut v = list(&mut parts);
        for start in [0, 1, 15, 16, 17, 4111, 4112, 4211, 4212, 9999] {
            for len in [0, 1, 16, 4096, 4197, 9999] {
                let r = v.range(start..start + len);
                let sum: usize = r.as_slice().iter().map(|v| v.iov_len).sum();
                assert_eq!(sum, r.len());
                assert_eq!(sum, len.min(4212usize.saturating_sub(start)), "{start} {len}");
                drop(r);
                assert_eq!(v.vecs.iter().map(|v| v.iov_len).sum::<usize>(), 4212);
            }
        }
        let r = v.range(16..4112);
        assert_eq!(r.as_slice().len(), 1);
    }
}
