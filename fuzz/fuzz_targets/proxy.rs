//! The window process: calls of a hostile daemon, system calls on its open files, and messages in place of the
//! kernel's.
#![no_main]

use std::cell::RefCell;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};

use libfuzzer_sys::fuzz_target;
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, fallocate, fstat, fsync, ftruncate, memfd_create, open, seek,
};
use rustix::io::{Errno, preadv, pwritev, read, write};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use thruway::fuse::abi::*;
use thruway::window::proxy::Kind;
use thruway::window::proxy::fuzzing::Harness;
use thruway_fuzz::Input;
use zerocopy::{FromBytes, IntoBytes};

struct Kept {
    mounted: Harness,
    talking: Harness,
    kernel: OwnedFd,
    next: u64,
}

impl Kept {
    fn new() -> Self {
        let (fuse, kernel) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let root = open("/proc/self/fd", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        Self { mounted: Harness::mounted().expect("FUSE"), talking: Harness::talking(fuse, root), kernel, next: 1 }
    }
}

thread_local! {
    static KEPT: RefCell<Kept> = RefCell::new(Kept::new());
}

/// A file of the host, of any kind.
fn real(input: &mut Input) -> Option<OwnedFd> {
    let of = |path: &str, flags: OFlags| open(path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap();
    Some(match input.u8() % 8 {
        0..=3 => {
            let file = memfd_create("real", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, u64::from(input.u16())).unwrap();
            file
        }
        4 => of("/dev/null", OFlags::RDWR),
        5 => of("/proc", OFlags::RDONLY),
        6 => of("/etc/passwd", OFlags::RDONLY),
        _ => return None,
    })
}

/// Calls of the daemon, with a real mount.
fn calls(kept: &mut Kept, input: &mut Input) {
    let first = kept.next;
    kept.next += 4;
    let mut files: Vec<OwnedFd> = Vec::new();
    let mut reals: Vec<OwnedFd> = Vec::new();
    for _ in 0..24 {
        if input.is_empty() {
            break;
        }
        let (what, who) = (input.u8(), input.u8());
        let id = if who == 0xff { input.number() } else { first + u64::from(who % 4) };
        let file = files.get(usize::from(who) % files.len().max(1));
        match what % 12 {
            0..=2 => {
                let same = (who & 0x80 != 0).then(|| reals.last().map(|real| real.try_clone().unwrap())).flatten();
                let real = same.or_else(|| real(input));
                let copy = real.as_ref().map(|real| real.try_clone().unwrap());
                let (errno, proxy) = kept.mounted.answer(1 + u64::from(what & 1), id, real);
                assert_eq!(errno == 0, proxy.is_some());
                files.extend(proxy);
                reals.extend(copy);
            }
            3 => drop(kept.mounted.answer(3, id, None)),
            4 => drop(kept.mounted.answer(4, id, None)),
            5 => {
                let real = real(input);
                drop(kept.mounted.answer(input.number(), id, real))
            }
            6 if !files.is_empty() => drop(files.swap_remove(usize::from(who) % files.len())),
            // What QEMU, or another holder of the descriptor, does.
            7 => {
                let Some(file) = file else { continue };
                let mut bytes = vec![0; usize::from(input.u8()) * 64];
                let n = preadv(file, &mut [IoSliceMut::new(&mut bytes)], input.number() & 0xff_ffff_ffff);
                assert!(n.is_ok_and(|n| n <= bytes.len()) || n.is_err());
            }
            8 => {
                let Some(file) = file else { continue };
                let n = usize::from(input.u8());
                let _ = pwritev(file, &[IoSlice::new(input.bytes(n))], input.number() & 0xff_ffff_ffff);
            }
            9 => {
                let Some(file) = file else { continue };
                let size = fstat(file).map(|st| st.st_size);
                assert!(ftruncate(file, input.number() & !(1 << 63)).is_err());
                assert_eq!(size, fstat(file).map(|st| st.st_size));
                let _ = fallocate(file, FallocateFlags::from_bits_retain(input.u8().into()), 0, 4096);
                let _ = (fsync(file), seek(file, rustix::fs::SeekFrom::End(0)));
            }
            10 => {
                let Some(file) = file else { continue };
                let flags = ProtFlags::READ | ProtFlags::WRITE;
                // SAFETY: the kernel chooses the address, and nothing accesses it.
                let _ = unsafe {
                    mmap(std::ptr::null_mut(), 1 << 21, flags, MapFlags::SHARED, file, 0)
                        .and_then(|at| munmap(at, 1 << 21))
                };
            }
            _ => {
                let Some(real) = reals.last() else { continue };
                let _ = ftruncate(real, u64::from(input.u16()));
            }
        }
    }
    // When another file has been opened and closed, the kernel's last RELEASE has been served.
    drop(files);
}

/// Messages in place of the kernel's.
fn messages(kept: &mut Kept, input: &mut Input) {
    let (count, first) = (input.u8() % 4, kept.next);
    kept.next += 8;
    for n in 0..count {
        let kind = if input.u8() & 1 == 0 { Kind::Through } else { Kind::Cached };
        if let Some(real) = real(input) {
            kept.talking.insert(first + u64::from(n), kind, real);
        }
    }
    for _ in 0..16 {
        if input.is_empty() {
            break;
        }
        let opcodes = [Opcode::Lookup, Opcode::Read, Opcode::Write, Opcode::Open, Opcode::Release, Opcode::Fsync];
        let opcode = match input.u8() {
            n @ 0..200 => opcodes[usize::from(n) % opcodes.len()] as u32,
            n => u32::from(n - 200),
        };
        let nodeid = match input.u8() {
            0xff => input.u64(),
            n => 2 * first + u64::from(n % 16),
        };
        let body = match Opcode::from_u32(opcode) {
            Some(Opcode::Read) => {
                let size = if input.u8() & 3 == 0 { input.u32() } else { input.u16().into() };
                ReadIn { offset: input.number(), size, ..Default::default() }.as_bytes().to_vec()
            }
            Some(Opcode::Write) => {
                let (offset, size) = (input.number(), input.number() as u32);
                let n = usize::from(input.u8());
                [WriteIn { offset, size, ..Default::default() }.as_bytes(), input.bytes(n)].concat()
            }
            _ => {
                let n = usize::from(input.u8() % 80);
                input.bytes(n).to_vec()
            }
        };
        let unique = input.u8().into();
        let header = InHeader { len: 40 + body.len() as u32, opcode, unique, nodeid, ..Default::default() };
        let cut = if input.u8() == 0 { usize::from(input.u8() % 40) } else { usize::MAX };
        let message = [header.as_bytes(), &body].concat();
        if cut == 0 {
            continue;
        }
        write(&kept.kernel, &message[..message.len().min(cut)]).unwrap();
        kept.talking.serve_one();
        let mut reply = vec![0; 1 << 16];
        match rustix::net::recv(kept.kernel.as_fd(), &mut reply[..], rustix::net::RecvFlags::DONTWAIT) {
            Err(errno) => assert_eq!(errno, Errno::AGAIN),
            Ok((n, _)) => {
                let (answer, _) = OutHeader::read_from_prefix(&reply[..n]).unwrap();
                assert_eq!(answer.unique, unique);
                assert!((-4095..=0).contains(&answer.error) && (n == reply.len() || answer.len as usize == n));
            }
        }
    }
    // Release each node, however often it was opened.
    for n in 0..u64::from(count) {
        while !kept.talking.is_forgotten(first + n) {
            for nodeid in [2 * (first + n), 2 * (first + n) + 1] {
                let header = InHeader { len: 40, opcode: Opcode::Release as u32, nodeid, ..Default::default() };
                write(&kept.kernel, header.as_bytes()).unwrap();
                kept.talking.serve_one();
                read(&kept.kernel, &mut [0u8; 64]).unwrap();
            }
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    KEPT.with_borrow_mut(|kept| match input.u8() & 1 {
        0 => calls(kept, &mut input),
        _ => messages(kept, &mut input),
    });
});
