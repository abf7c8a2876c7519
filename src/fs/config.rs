//! The file system's options.

use super::idmap::IdMap;
use super::xattrmap::XattrMap;
use crate::limits;

/// How long the guest may trust what it has cached (`--cache`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum CachePolicy {
    Auto,
    Always,
    Metadata,
    Never,
}

/// When inodes are held by file handle rather than by O_PATH descriptor (`--inode-file-handles`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum FileHandles {
    Never,
    Prefer,
    Mandatory,
}

/// Whether a feature is offered to the guest (`--posix-acl`, `--security-label`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Offer {
    Never,
    Auto,
    Always,
}

/// How a migration's source says which file an inode is (`--migration-mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum MigrationMode {
    FindPaths,
    FileHandles,
}

/// What a migration's target does about a file that it cannot find (`--migration-on-error`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum MigrationOnError {
    Abort,
    GuestError,
}

/// How a session moves to another daemon.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    pub mode: MigrationMode,
    pub on_error: MigrationOnError,
    /// `--migration-verify-handles`
    pub verify_handles: bool,
    /// `--migration-confirm-paths`
    pub confirm_paths: bool,
    /// As a target, open the file handles that the source sends. Such a handle can name any file of the file system,
    /// even one outside of the share.
    pub trust_handles: bool,
}

/// The options of a [`PassthroughFs`](super::PassthroughFs), as on the command line.
#[derive(Clone, Debug)]
pub struct Config {
    pub cache: CachePolicy,
    pub writeback: bool,
    pub allow_direct_io: bool,
    pub allow_mmap: bool,
    pub killpriv_v2: bool,
    pub readdirplus: bool,
    pub xattr: bool,
    pub posix_acl: Offer,
    pub security_label: Offer,
    pub announce_submounts: bool,
    pub inode_file_handles: FileHandles,
    pub preserve_noatime: bool,
    pub readonly: bool,
    pub posix_lock: bool,
    pub flock: bool,
    pub uid_map: IdMap,
    pub gid_map: IdMap,
    pub xattrmap: Option<XattrMap>,
    pub migration: Migration,
    /// The most inodes that the guest may know.
    pub max_inodes: usize,
    /// Smallest file that the guest is told to map (`--dax-min-size`), in bytes.
    pub dax_min_size: u64,
    /// Smallest file that gets passthrough (`--passthrough-min-size`), in bytes.
    pub passthrough_min_size: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cache: CachePolicy::Auto,
            writeback: false,
            allow_direct_io: false,
            allow_mmap: false,
            killpriv_v2: false,
            readdirplus: true,
            xattr: false,
            posix_acl: Offer::Never,
            security_label: Offer::Never,
            announce_submounts: true,
            inode_file_handles: FileHandles::Never,
            preserve_noatime: false,
            readonly: false,
            posix_lock: false,
            flock: false,
            uid_map: IdMap::default(),
            gid_map: IdMap::default(),
            xattrmap: None,
            migration: Migration {
                mode: MigrationMode::FindPaths,
                on_error: MigrationOnError::Abort,
                verify_handles: false,
                confirm_paths: false,
                trust_handles: false,
            },
            max_inodes: limits::INODES,
            dax_min_size: 0,
            passthrough_min_size: 0,
        }
    }
}
