//! Loads a session from a hostile source, and continues as its guest.
#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use thruway::fs::{Config, FileHandles, Migration, MigrationMode, MigrationOnError};
use thruway::fuse::abi::*;
use thruway_fuzz::Input;
use thruway_fuzz::share::{Guest, Share};
use zerocopy::{FromBytes, IntoBytes};

struct Kept {
    share: Share,
    configs: Vec<Config>,
    guests: Vec<Guest>,
}

impl Kept {
    fn new() -> Self {
        let share = Share::mount();
        let migration = |on_error, verify_handles, confirm_paths| Migration {
            mode: MigrationMode::FindPaths,
            on_error,
            verify_handles,
            confirm_paths,
            trust_handles: false,
        };
        let configs = [
            Config::default(),
            Config { migration: migration(MigrationOnError::GuestError, false, false), ..Default::default() },
            Config {
                migration: migration(MigrationOnError::GuestError, true, true),
                inode_file_handles: FileHandles::Prefer,
                ..Default::default()
            },
            Config { readonly: true, ..Default::default() },
        ];
        let guests = configs.iter().map(|config| Guest::new(share.server(config.clone()))).collect();
        Self { share, configs: configs.into(), guests }
    }

    /// The migration stream of this guest's session.
    fn saved(&mut self, which: usize) -> Vec<u8> {
        let guest = &mut self.guests[which];
        guest.server.reset();
        guest.init(!0);
        let mut lookup = |node, name: &[u8]| {
            let reply = guest.call(Opcode::Lookup as u32, node, (0, 0), &[name]).unwrap();
            EntryOut::read_from_prefix(reply).unwrap().0.nodeid
        };
        let (file, dir, _) = (lookup(1, b"f\0"), lookup(1, b"d\0"), lookup(1, b"l\0"));
        lookup(dir, b"f\0");
        for (opcode, node) in [(Opcode::Open, file), (Opcode::Opendir, dir)] {
            guest.call(opcode as u32, node, (0, 0), &[OpenIn::default().as_bytes()]).unwrap();
        }
        guest.server.save().unwrap()
    }
}

thread_local! {
    static KEPT: RefCell<Kept> = RefCell::new(Kept::new());
}

/// The requests of a guest that continues with a session.
fn go_on(guest: &mut Guest, input: &mut Input) {
    for node in (1..8).chain([input.u64()]) {
        let _ = guest.call(Opcode::Getattr as u32, node, (0, 0), &[GetattrIn::default().as_bytes()]);
        let _ = guest.call(Opcode::Lookup as u32, node, (0, 0), &[b"file\0"]);
        let _ = guest.call(Opcode::Readlink as u32, node, (0, 0), &[]);
        let _ = guest.call(Opcode::Open as u32, node, (0, 0), &[OpenIn { flags: 2, open_flags: 0 }.as_bytes()]);
        for fh in [0, 1, 1 << 32, 1 << 32 | 1, input.u8().into()] {
            let read = ReadIn { fh, size: 64, ..Default::default() };
            let _ = guest.call(Opcode::Read as u32, node, (0, 0), &[read.as_bytes()]);
            let _ = guest.call(Opcode::Readdir as u32, node, (0, 0), &[read.as_bytes()]);
            let write = WriteIn { fh, size: 1, ..Default::default() };
            let _ = guest.call(Opcode::Write as u32, node, (0, 0), &[write.as_bytes(), b"x"]);
        }
        let size = SetattrIn { valid: SetattrValid::SIZE.bits(), size: 3, ..Default::default() };
        let _ = guest.call(Opcode::Setattr as u32, node, (0, 0), &[size.as_bytes()]);
        let mkdir = MkdirIn { mode: 0o755, umask: 0 };
        let _ = guest.call(Opcode::Mkdir as u32, node, (0, 0), &[mkdir.as_bytes(), b"new\0"]);
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    KEPT.with_borrow_mut(|kept| {
        kept.share.fill();
        let how = input.u8();
        let which = usize::from(how % 4);
        let mut state = match how & 16 {
            0 => input.0.to_vec(),
            // A valid session with a few bytes changed.
            _ => {
                let mut state = kept.saved(which);
                for _ in 0..how >> 5 {
                    let (at, value) = (usize::from(input.u16()) % state.len(), input.u8());
                    state[at] = value;
                }
                state
            }
        };
        if how & 8 != 0 && state.len() >= 24 {
            // A valid header.
            state[..16].copy_from_slice(b"thruway\0\x02\0\0\0\0\0\0\0");
            state[16..24].copy_from_slice(&(InitFlags::ASYNC_READ.bits()).to_le_bytes());
        }
        let guest = &mut kept.guests[which];
        let loaded = guest.server.load(&state).is_ok();
        go_on(guest, &mut input);
        if loaded {
            let _ = guest.server.save();
        }
        guest.server.reset();
        if !loaded {
            // The session may have a million slots for handles now, and each reset looks at all of them.
            *guest = Guest::new(kept.share.server(kept.configs[which].clone()));
        }
        kept.share.check();
    });
});
