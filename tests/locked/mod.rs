//! A process of the host that writes to a file for as long as a test likes.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::thread::{JoinHandle, spawn};

/// UFFDIO_API and UFFDIO_REGISTER of include/uapi/linux/userfaultfd.h, and the mode of the latter.
const API: u64 = 0xc018_aa3f;
const REGISTER: u64 = 0xc020_aa00;
const MISSING: u64 = 1;

const LEN: usize = 4096;

/// A thread in the middle of a write(2), in which the kernel holds the file's lock: the page to write comes from a
/// userfaultfd(2), and does not come. Dropping this ends the write.
pub struct Locked {
    faults: Option<File>,
    writer: Option<JoinHandle<()>>,
}

impl Locked {
    /// Writes zeroes to the file's beginning. `None` if userfaultfd(2) is not allowed.
    pub fn new(file: &File) -> Option<Self> {
        let file = file.try_clone().unwrap();
        // SAFETY: it makes a descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) } as i32;
        if fd < 0 {
            return None;
        }
        // SAFETY: the descriptor is nobody else's.
        let mut faults = unsafe { File::from_raw_fd(fd) };
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: the kernel chooses the address.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), LEN, prot, flags, -1, 0) };
        assert_ne!(page, libc::MAP_FAILED);
        let page = page as usize;
        let (mut api, mut register) = ([0xaa_u64, 0, 0], [page as u64, LEN as u64, MISSING, 0]);
        // SAFETY: both are as long as the kernel's structures.
        unsafe {
            assert_eq!(libc::ioctl(fd, API, api.as_mut_ptr()), 0);
            assert_eq!(libc::ioctl(fd, REGISTER, register.as_mut_ptr()), 0);
        }
        let writer = spawn(move || {
            // SAFETY: the page is mapped for as long as the process runs. It is full of zeroes once it comes.
            assert_eq!(unsafe { libc::pwrite(file.as_raw_fd(), page as *const _, LEN, 0) }, LEN as isize);
        });
        // One struct uffd_msg.
        faults.read_exact(&mut [0; 32]).unwrap();
        Some(Self { faults: Some(faults), writer: Some(writer) })
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // Then the page is an ordinary one.
        drop(self.faults.take());
        self.writer.take().into_iter().for_each(|writer| writer.join().unwrap());
    }
}
