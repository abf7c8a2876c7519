//! The file system's options.

use std::time::Duration;

use super::idmap::IdMap;
use super::xattrmap::XattrMap;
use crate::limits;

/// The default of `--lease-timeout`. Changes of which the host does not tell are seen after this time at the latest.
const LEASE_TIMEOUT: Duration = Duration::from_secs(60);

/// How long the guest may use what it has cached (`--cache`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum CachePolicy {
    /// Names and attributes for a second. Contents until the next open finds a change.
    Auto,
    /// Everything for a day.
    Always,
    /// Names and attributes for a day. No contents.
    Metadata,
    /// Nothing.
    Never,
}

/// Whether inodes are held by file handle instead of by O_PATH descriptor (`--inode-file-handles`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum FileHandles {
    /// By descriptor.
    Never,
    /// By file handle where the file system has them.
    Prefer,
    /// By file handle, or the daemon does not start.
    Mandatory,
}

/// Whether a feature is offered to the guest (`--posix-acl`, `--security-label`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Offer {
    /// No.
    Never,
    /// If the guest supports it.
    Auto,
    /// Yes. A guest that does not support it is refused.
    Always,
}

/// Whether the guest opens files and directories without a message (`--no-open`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum NoOpen {
    /// No.
    Never,
    /// With `--cache=always`, if opening a file has no other use.
    Auto,
    /// With `--cache=auto` too.
    Always,
}

/// How a migration's source describes the file of an inode (`--migration-mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum MigrationMode {
    /// By its path in the share.
    FindPaths,
    /// By its file handle.
    FileHandles,
}

/// What a migration's target does about a file that it cannot find (`--migration-on-error`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum MigrationOnError {
    /// It fails the migration.
    Abort,
    /// It answers the guest's requests for that file with EIO.
    GuestError,
}

/// How a session moves to another daemon.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    /// `--migration-mode`
    pub mode: MigrationMode,
    /// `--migration-on-error`
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
    /// `--cache`
    pub cache: CachePolicy,
    /// `--negative-timeout`
    pub negative_timeout: Duration,
    /// `--no-open`
    pub no_open: NoOpen,
    /// `--writeback`
    pub writeback: bool,
    /// `--allow-direct-io`
    pub allow_direct_io: bool,
    /// `--allow-mmap`
    pub allow_mmap: bool,
    /// `--killpriv-v2` or `--no-killpriv-v2`. `None`: where the host does what the guest would do.
    pub killpriv_v2: Option<bool>,
    /// Not `--no-readdirplus`.
    pub readdirplus: bool,
    /// `--xattr`, or an option that implies it.
    pub xattr: bool,
    /// `--posix-acl`
    pub posix_acl: Offer,
    /// `--security-label`
    pub security_label: Offer,
    /// `--announce-submounts`
    pub announce_submounts: bool,
    /// `--inode-file-handles`
    pub inode_file_handles: FileHandles,
    /// `--preserve-noatime`
    pub preserve_noatime: bool,
    /// `--readonly`
    pub readonly: bool,
    /// `--posix-lock`
    pub posix_lock: bool,
    /// `--flock`
    pub flock: bool,
    /// `--translate-uid`
    pub uid_map: IdMap,
    /// `--translate-gid`
    pub gid_map: IdMap,
    /// `--xattrmap`
    pub xattrmap: Option<XattrMap>,
    /// The options `--migration-…`.
    pub migration: Migration,
    /// The most inodes that the guest may know.
    pub max_inodes: usize,
    /// How long a guest whose agent keeps up may keep what it knows (`--lease-timeout`). 0: as long as others.
    pub lease_timeout: Duration,
    /// The smallest file that the guest is told to map (`--dax-min-size`), in bytes.
    pub dax_min_size: u64,
    /// Smallest file that gets passthrough (`--passthrough-min-size`), in bytes.
    pub passthrough_min_size: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cache: CachePolicy::Auto,
            negative_timeout: Duration::ZERO,
            no_open: NoOpen::Auto,
            writeback: false,
            allow_direct_io: false,
            allow_mmap: false,
            killpriv_v2: None,
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
            lease_timeout: LEASE_TIMEOUT,
            dax_min_size: 0,
            passthrough_min_size: 0,
        }
    }
}
