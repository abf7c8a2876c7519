//! Decodes a migrated session. An accepted session is safe, and survives another migration.
#![no_main]

use libfuzzer_sys::fuzz_target;
use thruway::fs::fuzzing::{Location, State};

fn is_safe(path: &[u8]) -> bool {
    !path.is_empty()
        && path.len() < 4096
        && !path.contains(&0)
        && path.split(|b| *b == b'/').all(|part| !part.is_empty() && part != b"." && part != b".." && part.len() < 256)
}

fuzz_target!(|bytes: &[u8]| {
    let Ok(state) = State::decode(bytes) else { return };
    for inode in &state.inodes {
        match &inode.location {
            Location::Path(path) => assert!(is_safe(path)),
            Location::Entry { name, .. } => assert!(is_safe(name) && !name.contains(&b'/')),
            Location::Handle(_, raw) => assert!(raw.data.len() <= 128),
            Location::Root | Location::Lost(_) => {}
        }
        assert!(inode.verify.iter().all(|raw| raw.data.len() <= 128));
    }
    assert!(state.mounts.iter().all(|mount| mount.path.is_empty() || is_safe(&mount.path)));
    if let Some(window) = &state.window {
        assert!(window.ranges.len() <= 448 && window.table.iter().all(|table| table.entries.len() < 4096));
    }
    assert_eq!(State::decode(&state.encode().unwrap()), Ok(state));
});
