//! The whole server with a real directory. It serves sequences of requests, and must not read or change anything
//! outside the share.
#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use thruway::fs::{CachePolicy, Config, FileHandles, Offer};
use thruway::fuse::abi::*;
use thruway_fuzz::Input;
use thruway_fuzz::share::{Guest, Share};
use zerocopy::{FromBytes, IntoBytes};

struct Kept {
    share: Share,
    guests: Vec<Guest>,
}

impl Kept {
    fn new() -> Self {
        let share = Share::mount();
        let all = Config {
            xattr: true,
            posix_acl: Offer::Auto,
            security_label: Offer::Auto,
            posix_lock: true,
            flock: true,
            killpriv_v2: true,
            inode_file_handles: FileHandles::Prefer,
            allow_direct_io: true,
            ..Default::default()
        };
        let mapped = Config {
            xattr: true,
            xattrmap: ":map::user.virtiofs.:".parse().ok(),
            uid_map: thruway::fs::idmap::IdMap::new(&["map:0:1000:10".parse().unwrap()]).unwrap(),
            gid_map: thruway::fs::idmap::IdMap::new(&["squash-guest:1:1000:10".parse().unwrap()]).unwrap(),
            writeback: true,
            cache: CachePolicy::Always,
            ..Default::default()
        };
        let readonly = Config { readonly: true, cache: CachePolicy::Never, ..Default::default() };
        let guests = [Config::default(), all, mapped, readonly].map(|config| Guest::new(share.server(config)));
        Self { share, guests: guests.into() }
    }
}

thread_local! {
    static KEPT: RefCell<Kept> = RefCell::new(Kept::new());
}

const NAMES: [&[u8]; 20] = [
    b"f\0",
    b"d\0",
    b"l\0",
    b"ld\0",
    b"la\0",
    b"n\0",
    b"m\0",
    b".\0",
    b"..\0",
    b"/\0",
    b"\0",
    b"../outside/file\0",
    b"ld/file\0",
    b"d/f\0",
    b"/etc/passwd\0",
    b"./f\0",
    b"f",
    b"user.a\0",
    b"security.capability\0",
    b"system.posix_acl_access\0",
];

fn name(input: &mut Input) -> Vec<u8> {
    match input.u8() {
        n @ 0..200 => NAMES[usize::from(n) % NAMES.len()].to_vec(),
        200..210 => [&[b'x'; 255][..], b"\0"].concat(),
        210..215 => [&[b'x'; 256][..], b"\0"].concat(),
        n => [input.bytes(usize::from(n - 214)), b"\0"].concat(),
    }
}

/// The nodeids and handles that the guest has.
struct Known {
    nodes: Vec<u64>,
    handles: Vec<u64>,
}

impl Known {
    fn node(&self, input: &mut Input) -> u64 {
        let n = input.u8();
        match n {
            0xff => input.u64(),
            _ => self.nodes[usize::from(n) % self.nodes.len()],
        }
    }

    fn handle(&self, input: &mut Input) -> u64 {
        let n = input.u8();
        match n {
            0xff => input.u64(),
            _ => self.handles[usize::from(n) % self.handles.len()],
        }
    }
}

fn id(input: &mut Input) -> u32 {
    [0, 0, 0, 1000, 1, 65534, u32::MAX, u32::MAX - 1][usize::from(input.u8() % 8)]
}

/// A mode whose file type is mostly valid.
fn mode(input: &mut Input) -> u32 {
    let kinds =
        [libc::S_IFREG, libc::S_IFIFO, libc::S_IFCHR, libc::S_IFBLK, libc::S_IFSOCK, libc::S_IFDIR, 0, 0o170000];
    let bits = input.u16();
    kinds[usize::from(bits >> 12) % 8] | u32::from(bits & 0o7777)
}

/// The arguments of a request: its structure, then names and data.
fn arguments(opcode: Opcode, input: &mut Input, known: &Known) -> Vec<Vec<u8>> {
    fn one(value: impl IntoBytes + zerocopy::Immutable) -> Vec<u8> {
        value.as_bytes().to_vec()
    }
    let some = |input: &mut Input| {
        let n = usize::from(input.u8());
        input.bytes(n).to_vec()
    };
    use Opcode::*;
    match opcode {
        Lookup | Unlink | Rmdir | Removexattr => vec![name(input)],
        Forget => vec![one(ForgetIn { nlookup: input.number() })],
        Getattr => {
            vec![one(GetattrIn { getattr_flags: input.u8().into(), fh: known.handle(input), ..Default::default() })]
        }
        Setattr => vec![one(SetattrIn {
            valid: input.u16().into(),
            fh: known.handle(input),
            size: input.number(),
            mode: mode(input),
            uid: id(input),
            gid: id(input),
            atime: input.number(),
            atimensec: input.u32(),
            ..Default::default()
        })],
        Symlink => vec![name(input), name(input)],
        Mknod => vec![one(MknodIn { mode: mode(input), rdev: input.u16().into(), ..Default::default() }), name(input)],
        Mkdir => vec![one(MkdirIn { mode: mode(input), umask: input.u16().into() }), name(input), some(input)],
        Rename => vec![one(RenameIn { newdir: known.node(input) }), name(input), name(input)],
        Rename2 => vec![
            one(Rename2In { newdir: known.node(input), flags: input.u8().into(), padding: 0 }),
            name(input),
            name(input),
        ],
        Link => vec![one(LinkIn { oldnodeid: known.node(input) }), name(input)],
        Open | Opendir => vec![one(OpenIn { flags: flags(input), open_flags: u32::from(input.u8()) })],
        Create | Tmpfile => vec![
            one(CreateIn {
                flags: flags(input),
                mode: mode(input),
                umask: input.u16().into(),
                open_flags: u32::from(input.u8()),
            }),
            name(input),
            some(input),
        ],
        Read | Readdir | Readdirplus => vec![one(ReadIn {
            fh: known.handle(input),
            offset: input.number(),
            size: input.u16().into(),
            read_flags: input.u8().into(),
            flags: flags(input),
            ..Default::default()
        })],
        Write => {
            let (fh, offset, write_flags) = (known.handle(input), input.number(), input.u8().into());
            let data = some(input);
            let args = WriteIn { fh, offset, size: data.len() as u32, write_flags, ..Default::default() };
            vec![one(args), data]
        }
        Release | Releasedir => vec![one(ReleaseIn {
            fh: known.handle(input),
            release_flags: input.u8().into(),
            lock_owner: input.u8().into(),
            ..Default::default()
        })],
        Flush => vec![one(FlushIn { fh: known.handle(input), lock_owner: input.u8().into(), ..Default::default() })],
        Fsync | Fsyncdir => {
            vec![one(FsyncIn { fh: known.handle(input), fsync_flags: input.u8().into(), padding: 0 })]
        }
        Setxattr => {
            let (flags, name, value) = (input.u8(), name(input), some(input));
            let args = SetxattrIn { size: value.len() as u32, flags: flags.into(), ..Default::default() };
            vec![one(args), name, value]
        }
        Getxattr => vec![one(GetxattrIn { size: input.u16().into(), padding: 0 }), name(input)],
        Listxattr => vec![one(GetxattrIn { size: input.u16().into(), padding: 0 })],
        Getlk | Setlk | Setlkw => vec![one(LkIn {
            fh: known.handle(input),
            owner: input.u8().into(),
            lk: FileLock { start: input.number(), end: input.number(), kind: input.u8().into(), pid: 1 },
            lk_flags: input.u8().into(),
            padding: 0,
        })],
        Access => vec![one(AccessIn { mask: input.u8().into(), padding: 0 })],
        Fallocate => vec![one(FallocateIn {
            fh: known.handle(input),
            offset: input.number(),
            length: input.number(),
            mode: input.u8().into(),
            padding: 0,
        })],
        Ioctl => {
            let commands = [
                FS_IOC_GETFLAGS,
                FS_IOC_SETFLAGS,
                FS_IOC32_SETFLAGS,
                FS_IOC_FSGETXATTR,
                FS_IOC_FSSETXATTR,
                FS_IOC32_GETFLAGS,
            ];
            let cmd = match input.u8() {
                0xff => input.u32(),
                n => commands[usize::from(n) % commands.len()],
            };
            let (fh, flags) = (known.handle(input), input.u8().into());
            let (out_size, data) = (input.u8().into(), some(input));
            let in_size = if input.u8() == 0 { input.u32() } else { data.len() as u32 };
            vec![one(IoctlIn { fh, flags, cmd, arg: 0, in_size, out_size }), data]
        }
        Lseek => vec![one(LseekIn {
            fh: known.handle(input),
            offset: input.number(),
            whence: input.u8().into(),
            padding: 0,
        })],
        CopyFileRange | CopyFileRange64 => vec![one(CopyFileRangeIn {
            fh_in: known.handle(input),
            off_in: input.number(),
            nodeid_out: known.node(input),
            fh_out: known.handle(input),
            off_out: input.number(),
            len: input.number(),
            flags: input.u8().into(),
        })],
        Statx => vec![one(StatxIn {
            getattr_flags: input.u8().into(),
            fh: known.handle(input),
            sx_flags: input.u32(),
            sx_mask: input.u32(),
            ..Default::default()
        })],
        _ => vec![some(input)],
    }
}

fn flags(input: &mut Input) -> u32 {
    let access = u32::from(input.u8() % 4);
    let more = [0, 0, libc::O_TRUNC, libc::O_APPEND, libc::O_EXCL, libc::O_CREAT, libc::O_DIRECT, libc::O_NOFOLLOW];
    match input.u8() {
        0xff => input.u32(),
        n => access | more[usize::from(n % 8)] as u32 | more[usize::from(n / 8 % 8)] as u32,
    }
}

fn learn(known: &mut Known, opcode: Opcode, reply: &[u8]) {
    use Opcode::*;
    match opcode {
        Lookup | Symlink | Mknod | Mkdir | Link => known.nodes.extend(entry(reply)),
        Create | Tmpfile => {
            known.nodes.extend(entry(reply));
            let open = reply.get(size_of::<EntryOut>()..).unwrap_or_default();
            known.handles.extend(OpenOut::read_from_prefix(open).map(|(open, _)| open.fh));
        }
        Open | Opendir => known.handles.extend(OpenOut::read_from_prefix(reply).map(|(open, _)| open.fh)),
        _ => {}
    }
}

fn entry(reply: &[u8]) -> Option<u64> {
    EntryOut::read_from_prefix(reply).ok().map(|(entry, _)| entry.nodeid)
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    KEPT.with_borrow_mut(|kept| {
        let guest = &mut kept.guests[usize::from(input.u8() % 4)];
        guest.server.reset();
        kept.share.fill();
        guest.init(if input.u8() & 1 == 0 { !0 } else { input.u64() });
        let mut known = Known { nodes: vec![ROOT_ID], handles: vec![0] };
        for _ in 0..64 {
            if input.is_empty() {
                break;
            }
            let number = u32::from(input.u8() % 54);
            let Some(opcode) = Opcode::from_u32(number) else { continue };
            let (node, uid, gid) = match input.u8() {
                who @ 0..128 => (known.nodes[usize::from(who) % known.nodes.len()], 0, 0),
                _ => (known.node(&mut input), id(&mut input), id(&mut input)),
            };
            let parts = arguments(opcode, &mut input, &known);
            let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            if let Ok(reply) = guest.call(number, node, (uid, gid), &parts) {
                learn(&mut known, opcode, reply);
            }
        }
        guest.server.reset();
        kept.share.check();
    });
});
