//! The file system's options.

use std::ffi::CString;
use std::time::Duration;

use clap::{Args, Command, FromArgMatches, ValueEnum};

use super::idmap::{self, IdMap};
use super::xattrmap::XattrMap;
use crate::limits;
use crate::size::parse_size;

/// How long the guest may use what it has cached (`--cache`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FileHandles {
    /// By descriptor.
    Never,
    /// By file handle where the file system has them.
    Prefer,
    /// By file handle, or the daemon does not start.
    Mandatory,
}

/// Whether a feature is offered to the guest (`--posix-acl`, `--security-label`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Offer {
    /// No.
    Never,
    /// If the guest supports it.
    Auto,
    /// Yes. A guest that does not support it is refused.
    Always,
}

/// Where owners, modes and device numbers are kept (`--ownership`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Ownership {
    /// By the host, as far as the daemon may set them.
    Host,
    /// In an extended attribute. All files belong to the daemon's user.
    Xattr,
}

/// Whether the guest opens files and directories without a message (`--no-open`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NoOpen {
    /// No.
    Never,
    /// With `--cache=always`, if opening a file has no other use.
    Auto,
    /// With `--cache=auto` too.
    Always,
}

/// How a migration's source describes the file of an inode (`--migration-mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MigrationMode {
    /// By its path in the share.
    FindPaths,
    /// By its file handle.
    FileHandles,
}

/// What a migration's target does about a file that it cannot find (`--migration-on-error`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MigrationOnError {
    /// It fails the migration.
    Abort,
    /// It answers the guest's requests for that file with EIO.
    GuestError,
}

/// How a session moves to another daemon.
#[derive(Clone, Copy, Debug, Args)]
#[group(skip)]
pub struct Migration {
    /// How the source of a migration describes the guest's files to the target: by path or by file handle
    ///
    /// Paths need only the same contents at both ends. But a file that was removed while open has no path, and another
    /// file may take a path's place during the migration. File handles avoid both problems. They need the same file
    /// system at both ends. The target needs CAP_DAC_READ_SEARCH and this same option (or --modcaps=+dac_read_search),
    /// because a hostile source can then name any file of that file system.
    #[arg(
        help_heading = "Migration",
        long = "migration-mode",
        value_name = "MIGRATION_MODE",
        default_value = "find-paths"
    )]
    pub mode: MigrationMode,

    /// What the target of a migration does about a file that it cannot find or open: abort, or return errors to the
    /// guest
    ///
    /// abort: the guest continues at the source. guest-error: every request for that file fails with EIO.
    #[arg(
        help_heading = "Migration",
        long = "migration-on-error",
        value_name = "MIGRATION_ON_ERROR",
        default_value = "abort"
    )]
    pub on_error: MigrationOnError,

    /// Let the target of a migration check by file handle that it found the same files (an option of the source)
    ///
    /// It needs the same file system at both ends, and --migration-mode=find-paths.
    #[arg(help_heading = "Migration", long = "migration-verify-handles")]
    pub verify_handles: bool,

    /// After all paths are found, check each one again and search for those that have changed (an option of the source)
    ///
    /// The guest does not run during the check. It needs --migration-mode=find-paths.
    #[arg(help_heading = "Migration", long = "migration-confirm-paths")]
    pub confirm_paths: bool,

    /// As a target, open the file handles that the source sends. Such a handle can name any file of the file system,
    /// even one outside of the share.
    #[arg(skip)]
    pub trust_handles: bool,
}

/// The options of a [`PassthroughFs`](super::PassthroughFs), as on the command line. [`Config::resolve`] does the rest.
///
/// The numbers of display_order put options among others of their heading, in [`cli::Options`](crate::cli::Options).
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct Config {
    /// How long the guest caches names and attributes: auto: 1 second; always and metadata: 1 day; never: not at all
    ///
    /// With auto, the guest drops a file's cached contents when it opens the file, unless the file is surely unchanged.
    /// With always, it keeps them even if the host changes the file. With metadata and never, it caches no file
    /// contents. docs/caching.md has a table.
    #[arg(help_heading = "Caching", long, default_value = "auto", ignore_case = true)]
    pub cache: CachePolicy,

    /// How long the guest remembers that a name does not exist, in seconds, for example 0.5
    ///
    /// A file that appears on the host is missing in the guest for up to this time. Names that the guest itself makes
    /// are there at once.
    #[arg(help_heading = "Caching", long, value_name = "SECONDS", default_value = "0", value_parser = parse_seconds)]
    pub negative_timeout: Duration,

    /// Let the guest open files and directories without asking the daemon: never; auto: with --cache=always; always:
    /// with --cache=auto too
    ///
    /// Then an open file costs the daemon no descriptor, and opening and closing one costs no messages. With
    /// --cache=auto the guest then drops a file's cached contents up to a second after a change, when it sees the new
    /// time or size. --no-open without a value is --no-open=always. It has no effect with --posix-lock, --flock, or
    /// window passthrough, and on a read-only share for directories only. docs/caching.md says more.
    #[arg(help_heading = "Caching", long, require_equals = true, num_args = 0..=1, default_value = "auto",
          default_missing_value = "always")]
    pub no_open: NoOpen,

    /// How long a guest with thruway-guest keeps names and attributes, in seconds; 0: as --cache says
    ///
    /// thruway-guest repeats the host's changes in the guest. Some changes on the host cause no event: they are seen
    /// after this time.
    #[arg(help_heading = "Caching", long, value_name = "SECONDS", default_value = "60", value_parser = parse_seconds)]
    pub lease_timeout: Duration,

    /// Let the guest collect writes in its page cache before it sends them
    ///
    /// It has no effect with --cache=metadata or never, since nothing is cached then.
    #[arg(help_heading = "Caching", long)]
    pub writeback: bool,

    /// Allow shared mappings (mmap) with --cache=metadata or never too
    ///
    /// Use it only if nobody but the guest changes the directory.
    #[arg(help_heading = "Caching", long)]
    pub allow_mmap: bool,

    /// Pass O_DIRECT through to the files on the host
    #[arg(help_heading = "Caching", long)]
    pub allow_direct_io: bool,

    /// Do not send attributes along with directory entries
    #[arg(help_heading = "Caching", long)]
    pub no_readdirplus: bool,

    /// Refuse every change that the guest requests
    ///
    /// The directory on the host is not mounted read-only: access times, for example, still change.
    #[arg(help_heading = "Files", long)]
    pub readonly: bool,

    /// Show file systems that are mounted in the share as mounts in the guest [default]
    ///
    /// Inode numbers are unique only within one file system. A sync in the guest reaches all file systems only with
    /// this.
    // The word in brackets is for --help.
    #[allow(rustdoc::broken_intra_doc_links)]
    #[arg(help_heading = "Files", long)]
    pub announce_submounts: bool,

    /// Show the share to the guest as one file system
    #[arg(help_heading = "Files", long, overrides_with = "announce_submounts")]
    pub no_announce_submounts: bool,

    /// Let the host clear set-user-ID bits and file capabilities when the guest writes [default: on ext4, XFS, Btrfs,
    /// tmpfs and F2FS, without --dax-window]
    ///
    /// With --xattr each write(2) of the guest takes another message without this.
    #[arg(help_heading = "Files", long)]
    pub killpriv_v2: bool,

    /// Let the guest clear them, which a share on NFS needs [default: on other file systems, and with --dax-window]
    #[arg(help_heading = "Files", long, overrides_with = "killpriv_v2")]
    pub no_killpriv_v2: bool,

    /// Keep O_NOATIME when the guest opens a file; by default it is dropped, since only the file's owner may use it
    #[arg(help_heading = "Files", long)]
    pub preserve_noatime: bool,

    /// Offer extended attributes
    #[arg(help_heading = "Files", long)]
    pub xattr: bool,

    /// Rename extended attributes between guest and host, for example :map::user.virtiofs.: (implies --xattr)
    ///
    /// With :map:trusted.:user.virtiofs.: overlayfs in the guest can have its upper directory on the share.
    /// docs/attributes.md explains the rules.
    #[arg(help_heading = "Files", long, value_name = "RULES")]
    pub xattrmap: Option<XattrMap>,

    /// Support POSIX access control lists (implies --xattr)
    ///
    /// auto: if the guest supports them. always: refuse a guest that does not; the same as --posix-acl without a value.
    #[arg(help_heading = "Files", long, require_equals = true, num_args = 0..=1, default_value = "never",
          default_missing_value = "always")]
    pub posix_acl: Offer,

    /// Support security labels (SELinux) (implies --xattr)
    ///
    /// The values are those of --posix-acl.
    #[arg(help_heading = "Files", long, require_equals = true, num_args = 0..=1, default_value = "never",
          default_missing_value = "always")]
    pub security_label: Offer,

    /// Apply the guest's fcntl locks to the files on the host, so that the host and other guests see them
    ///
    /// Off by default, as in virtiofsd: a Linux guest cannot interrupt a request, so a process that waits for a lock
    /// cannot be killed until it gets the lock. A deadlock within one guest is answered with EDEADLK. A deadlock
    /// between guests is not detected.
    #[arg(help_heading = "Files", long)]
    pub posix_lock: bool,

    /// Apply the guest's flock locks to the files on the host; see --posix-lock about waiting
    #[arg(help_heading = "Files", long)]
    pub flock: bool,

    /// Tell the guest that the share has at most SIZE, for example 10G; df then shows that
    ///
    /// It limits nothing. What is free is the least of SIZE and what is free on the host.
    #[arg(help_heading = "Files", long, value_name = "SIZE", value_parser = parse_size)]
    pub report_size: Option<u64>,

    /// Let the guest export the share by NFS: the daemon remembers files that the guest has forgotten
    ///
    /// Then a file handle in the guest stays valid as long as the daemon runs and the file is there. The daemon
    /// remembers as many files as --max-inodes leaves room for. It needs file handles on the host. docs/callers.md
    /// says more.
    #[arg(help_heading = "Files", long)]
    pub nfs_export: bool,

    /// Refer to files by file handle instead of by open descriptor: never, where possible (prefer), or else fail
    /// (mandatory)
    ///
    /// This saves descriptors, and NFS leaves no .nfs files when an open file is removed. It needs CAP_DAC_READ_SEARCH.
    #[arg(help_heading = "Files", long, default_value = "prefer", value_parser = parse_file_handles,
          value_name = "never|prefer|mandatory")]
    pub inode_file_handles: FileHandles,

    /// The smallest file that goes through the passthrough window: messages are faster for smaller files
    #[arg(help_heading = "Windows", long, display_order = 103, value_name = "SIZE", default_value = "256K",
          value_parser = parse_size)]
    pub passthrough_min_size: u64,

    /// The smallest file that a guest with -o dax=inode maps: messages are faster for smaller files
    #[arg(help_heading = "Windows", long, display_order = 106, value_name = "SIZE", default_value = "256K",
          value_parser = parse_size)]
    pub dax_min_size: u64,

    /// Translate user IDs between guest and host; may be given several times
    ///
    /// map:GUEST:HOST:COUNT translates a range in both directions. guest:GUEST:HOST:COUNT translates only from guest to
    /// host, host:HOST:GUEST:COUNT only from host to guest. squash-guest:GUEST:HOST:COUNT and
    /// squash-host:HOST:GUEST:COUNT translate a range to one ID. forbid-guest:GUEST:COUNT refuses IDs of the guest.
    /// Other IDs do not change. Cannot be used with --posix-acl.
    #[arg(help_heading = "Identity", long, value_name = "RULE")]
    pub translate_uid: Vec<idmap::Rule>,

    /// Translate group IDs, in the same way as --translate-uid
    #[arg(help_heading = "Identity", long, value_name = "RULE")]
    pub translate_gid: Vec<idmap::Rule>,

    /// Where owners, modes and device numbers are kept that the guest sets: by the host, or in an extended attribute
    ///
    /// With xattr, all files belong to the daemon's user, who needs no privilege. The guest's root can install packages
    /// and unpack archives. The attribute is user.containers.override_stat. Cannot be used with --posix-acl,
    /// --killpriv-v2, --translate-uid or --translate-gid. docs/attributes.md says what others see.
    #[arg(help_heading = "Identity", long, default_value = "host")]
    pub ownership: Ownership,

    /// The names of several shared directories in the root directory (`--share`). None: the root is the only one.
    #[arg(skip)]
    pub share_names: Vec<CString>,

    /// `--translate-uid`
    #[arg(skip)]
    pub uid_map: IdMap,

    /// `--translate-gid`
    #[arg(skip)]
    pub gid_map: IdMap,

    /// How many inodes the guest may know at a time; each takes up to 512 bytes of the daemon's memory
    ///
    /// The guest knows the inodes in its caches. At the limit, a lookup of any other file fails with ENFILE.
    #[arg(help_heading = "Sandbox", long, display_order = 108, value_name = "N",
          default_value_t = limits::INODES)]
    pub max_inodes: usize,

    /// The options `--migration-…`.
    #[command(flatten)]
    pub migration: Migration,
}

impl Config {
    /// Sets what follows from other options. `opens_handles`: the daemon may open any file handle.
    ///
    /// # Errors
    /// A message about options that do not go together.
    pub fn resolve(&mut self, opens_handles: bool) -> Result<(), String> {
        self.check_no_open()?;
        let migration = &mut self.migration;
        let by_handles = migration.mode == MigrationMode::FileHandles;
        if by_handles && (migration.verify_handles || migration.confirm_paths) {
            return Err("--migration-verify-handles and --migration-confirm-paths work only with \
                        --migration-mode=find-paths: remove them, or remove --migration-mode=file-handles"
                .into());
        }
        let translates = !self.translate_uid.is_empty() || !self.translate_gid.is_empty();
        if self.posix_acl != Offer::Never && translates {
            return Err("--posix-acl cannot be used with --translate-uid or --translate-gid, which do not translate \
                        the IDs in access control lists: remove one of them"
                .into());
        }
        if self.ownership == Ownership::Xattr && (translates || self.posix_acl != Offer::Never || self.killpriv_v2) {
            return Err("--ownership=xattr cannot be used with --posix-acl, --killpriv-v2, --translate-uid or \
                        --translate-gid, which are about owners and modes on the host: remove them"
                .into());
        }
        if self.nfs_export && self.inode_file_handles == FileHandles::Never {
            return Err("--nfs-export needs file handles: remove --inode-file-handles=never".into());
        }
        migration.trust_handles = by_handles || opens_handles;
        self.no_readdirplus |= self.cache == CachePolicy::Never;
        self.xattr |= self.xattrmap.is_some() || [self.posix_acl, self.security_label] != [Offer::Never; 2];
        let map = |option, rules: &[_]| IdMap::new(rules).map_err(|e| format!("--translate-{option}: {e}"));
        self.uid_map = map("uid", &self.translate_uid)?;
        self.gid_map = map("gid", &self.translate_gid)?;
        Ok(())
    }

    fn check_no_open(&self) -> Result<(), String> {
        if self.no_open != NoOpen::Always {
            return Ok(());
        }
        if self.posix_lock || self.flock {
            return Err("--no-open=always cannot be used with --posix-lock or --flock, which need handles of open \
                        files: remove one of them"
                .into());
        }
        match self.cache {
            CachePolicy::Auto | CachePolicy::Always => Ok(()),
            CachePolicy::Never | CachePolicy::Metadata => {
                Err("--no-open=always needs --cache=auto or --cache=always: the guest then always caches file contents"
                    .into())
            }
        }
    }
}

/// As without options, but inodes are held by descriptor, and no file is too small for a window.
impl Default for Config {
    fn default() -> Self {
        let command = Self::augment_args(Command::new("")).no_binary_name(true);
        let config = Self::from_arg_matches(&command.get_matches_from([""; 0])).expect("no option is required");
        Self { inode_file_handles: FileHandles::Never, dax_min_size: 0, passthrough_min_size: 0, ..config }
    }
}

/// A number of seconds: 0, 0.5, 60.
fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| "expected a number of seconds such as 0, 0.5 or 60".to_owned())
}

fn parse_file_handles(mode: &str) -> Result<FileHandles, String> {
    // virtiofsd's older name.
    let mode = if mode == "fallback" { "prefer" } else { mode };
    FileHandles::from_str(mode, false).map_err(|_| "one of never, prefer, mandatory".to_owned())
}
