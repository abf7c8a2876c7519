//! The shared memory regions, and how they are divided.

/// log2 of [`RANGE`], as FUSE_INIT's map_alignment has it.
pub const RANGE_SHIFT: u16 = 21;

/// Bytes of a mapping in the DAX window: a Linux guest always asks for as many (FUSE_DAX_SZ of fs/fuse/dax.c). Every
/// mapping must be aligned to it, so that there are never more mappings than the window has ranges.
pub const RANGE: u64 = 1 << RANGE_SHIFT;

/// The region of the DAX window (VIRTIO 1.3, section 5.11.6.4).
pub const DAX: u8 = 0;
/// The region of whole files (docs/protocol.md).
pub const WHOLE_FILES: u8 = 1;
/// The region of the backing table (docs/protocol.md).
pub const TABLE: u8 = 2;
