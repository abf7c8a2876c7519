//! The command line, which is virtiofsd's and a little more; the log; the socket.

mod compat;
pub mod listen;
pub mod log;
pub mod metrics;

/// For fuzz/.
#[cfg(fuzzing)]
pub mod doors {
    pub fn size(text: &str) -> Option<u64> {
        super::parse_size(text).ok()
    }
    pub fn window(text: &str) -> Option<super::WindowSize> {
        super::parse_window(text).ok()
    }
}

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use caps::Capability;
use clap::error::ErrorKind;
use clap::{Parser, ValueEnum};
use thiserror::Error;
use tracing::level_filters::LevelFilter;

use crate::device;
use crate::fs::idmap::{self, IdMap};
use crate::fs::xattrmap::XattrMap;
use crate::fs::{self, CachePolicy, FileHandles, MigrationMode, MigrationOnError, Offer};
use crate::limits;
use crate::sandbox::caps::ModCaps;
use crate::sandbox::{self, IdRange, Sandbox, seccomp};
use crate::window;
use crate::window::proxy::GuardMode;

/// Features of docs/interop/vhost-user.json in QEMU that this daemon has, as in `50-thruway.json`.
const FEATURES: [&str; 4] =
    ["migrate-precopy", "posix-acl-negotiation-mode", "security-label-negotiation-mode", "separate-options"];

/// The command line of `thruwayd`.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "thruwayd",
    version,
    about = "Serves a host directory to a virtual machine as a virtio-fs device, over vhost-user.",
    override_usage = "thruwayd --shared-dir DIR --socket-path PATH [OPTIONS]",
    args_override_self = true
)]
pub struct Options {
    /// The directory to share
    #[arg(long, value_name = "DIR")]
    pub shared_dir: Option<PathBuf>,

    /// Where to make the socket that the virtual machine connects to; PATH.pid is locked as long as the daemon runs
    #[arg(long, value_name = "PATH", conflicts_with = "fd")]
    pub socket_path: Option<PathBuf>,

    /// An older name of --socket-path
    #[arg(long, value_name = "PATH", conflicts_with = "fd", hide = true)]
    pub socket: Option<PathBuf>,

    /// The group that may connect to the socket, besides the daemon's user
    #[arg(long, value_name = "GROUP", conflicts_with_all = ["fd", "print_capabilities"])]
    pub socket_group: Option<String>,

    /// Take this inherited descriptor of a listening socket instead of making one
    #[arg(long)]
    pub fd: Option<RawFd>,

    /// Make a socket there that tells how often the guest asked for what, in Prometheus' format: curl --unix-socket PATH http://_
    ///
    /// PATH.pid is locked as long as the daemon runs.
    #[arg(long, value_name = "PATH")]
    pub metrics_path: Option<PathBuf>,

    /// The name by which the guest mounts the share, if the frontend asks the daemon for it (1 to 36 bytes)
    ///
    /// QEMU's vhost-user-fs-pci does not ask: there, its own tag= counts.
    #[arg(long, value_parser = parse_tag)]
    pub tag: Option<String>,

    /// Serve the next frontend when one has disconnected, instead of ending
    #[arg(long)]
    pub keep_alive: bool,

    /// How many request queues the device has, if the frontend asks the daemon for it
    ///
    /// The guest uses as many of them as it has CPUs. QEMU's vhost-user-fs-pci does not ask: there, its own
    /// num-request-queues= counts, up to the same 63.
    #[arg(long, value_name = "N", default_value_t = device::MAX_REQUEST_QUEUES,
          value_parser = clap::value_parser!(u16).range(1..=i64::from(device::MAX_REQUEST_QUEUES)))]
    pub num_request_queues: u16,

    /// Accepted for virtiofsd's sake, without effect: thruwayd has one thread for each queue
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub thread_pool_size: usize,

    /// How long at most, in microseconds, a queue's thread looks for the next request before it sleeps
    ///
    /// The time adapts to how soon requests come, and is 0 while they don't. 0: never.
    #[arg(long, value_name = "MAX", default_value_t = device::POLL_US, value_parser = clap::value_parser!(u64).range(..=10_000))]
    pub poll_us: u64,

    /// How long the guest may trust what it has read: auto for a second, always and metadata for a day, never not at all
    ///
    /// With metadata and never, the guest keeps no file contents. With always, contents are kept from one open to the
    /// next even if the host changes the file.
    #[arg(long, default_value = "auto", ignore_case = true)]
    pub cache: CachePolicy,

    /// Let the guest collect writes in its own cache before it sends them
    #[arg(long)]
    pub writeback: bool,

    /// Let the guest map files into memory with --cache=metadata or never too
    ///
    /// Only for a directory that nobody but the guest changes.
    #[arg(long)]
    pub allow_mmap: bool,

    /// Hand O_DIRECT on to the host's files
    #[arg(long)]
    pub allow_direct_io: bool,

    /// Do not send attributes along with directory entries
    #[arg(long)]
    pub no_readdirplus: bool,

    /// Refuse every change that the guest asks for
    ///
    /// The host's directory stays writable: times of access, for one, still change.
    #[arg(long)]
    pub readonly: bool,

    /// Show the guest where file systems are mounted in the share [default]
    ///
    /// Inode numbers are unique in one file system only, and only with this does a sync in the guest reach all of them.
    #[arg(long)]
    pub announce_submounts: bool,

    /// Show the share to the guest as one file system
    #[arg(long, overrides_with = "announce_submounts")]
    pub no_announce_submounts: bool,

    /// Let the host clear set-user-id bits and file capabilities when the guest writes
    #[arg(long)]
    pub killpriv_v2: bool,

    /// Leave that to the guest, as an NFS share needs it [default]
    #[arg(long, overrides_with = "killpriv_v2")]
    pub no_killpriv_v2: bool,

    /// Keep O_NOATIME in the guest's opens; by default it is dropped, since only a file's owner may use it
    #[arg(long)]
    pub preserve_noatime: bool,

    /// Offer extended attributes
    #[arg(long)]
    pub xattr: bool,

    /// Rename extended attributes between guest and host, for example :map::user.virtiofs.: (implies --xattr)
    #[arg(long, value_name = "RULES")]
    pub xattrmap: Option<XattrMap>,

    /// Offer POSIX access control lists, or insist on them (implies --xattr); without a value: always
    #[arg(long, require_equals = true, num_args = 0..=1, default_value = "never", default_missing_value = "always")]
    pub posix_acl: Offer,

    /// Offer security labels (SELinux), or insist on them (implies --xattr); without a value: always
    #[arg(long, require_equals = true, num_args = 0..=1, default_value = "never", default_missing_value = "always")]
    pub security_label: Offer,

    /// Take the guest's fcntl locks on the host's files, so that they hold against the host and other guests
    ///
    /// Off, as in virtiofsd: Linux guests cannot interrupt a request, so a process that waits for a lock cannot be
    /// killed until it has the lock. A wait in a circle gets EDEADLK within one guest; across guests nobody notices it.
    #[arg(long)]
    pub posix_lock: bool,

    /// Take the guest's flock locks on the host's files; what --posix-lock says of waiting holds here too
    #[arg(long)]
    pub flock: bool,

    /// Remember files by handle instead of by open descriptor: never, where it works (prefer), or else fail (mandatory)
    ///
    /// It saves descriptors and NFS's hidden leftovers of removed files, and takes CAP_DAC_READ_SEARCH.
    #[arg(long, require_equals = true, default_value = "prefer", value_parser = parse_file_handles,
          value_name = "never|prefer|mandatory")]
    pub inode_file_handles: FileHandles,

    /// Let the guest map files into its memory (DAX), in a window of this size: 128M, 1G; 0: not
    ///
    /// A power of two, at least 2M, at most 2M for each of --max-mappings. The frontend must have shared memory regions:
    /// docs/dax.md has QEMU's command. Needs CAP_SYS_ADMIN and Linux 6.9; without them there is a warning and no window, or
    /// with SIZE,required an error.
    #[arg(long, value_name = "SIZE[,required]", default_value = "0", value_parser = parse_window)]
    pub dax_window: WindowSize,

    /// Let a guest with the patch of guest-kernel/ read, write and map whole files with no message, in a window of this size
    ///
    /// How much of open files can be mapped at a time, and at most one file for each of --max-mappings that --dax-window
    /// leaves. The sum with --dax-window must be a power of two. 2M of it are the table of what is where. The
    /// frontend, the host and ,required are as for --dax-window. It wins over --writeback.
    #[arg(long, value_name = "SIZE[,required]", default_value = "0", value_parser = parse_window)]
    pub passthrough_window: WindowSize,

    /// The smallest file that is passed through: smaller ones are read sooner by messages
    #[arg(long, value_name = "SIZE", default_value = "256K", value_parser = parse_size)]
    pub passthrough_min_size: u64,

    /// Which passed through files are written in place: where that cannot fail, or all
    ///
    /// in-place: without holes, on ext4 and tmpfs. What else is written goes by messages. With always, a write for which the
    /// host's disk has no room can end the virtual machine.
    #[arg(long, default_value = "in-place")]
    pub passthrough_writable: window::Writable,

    /// The most files' parts of 2 MiB that are mapped at a time (at most 448, as QEMU ends a VM with 512 memory regions)
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAPPINGS,
          value_parser = clap::value_parser!(u16).range(1..=window::MAX_MAPPINGS as i64))]
    pub max_mappings: u16,

    /// The smallest file that a guest with -o dax=inode maps: smaller ones are read sooner by messages
    #[arg(long, value_name = "SIZE", default_value = "256K", value_parser = parse_size)]
    pub dax_min_size: u64,

    /// What keeps a host process that truncates a mapped file from killing the virtual machine
    ///
    /// fanotify: the truncation waits until the mapping is gone. On ext4, XFS and Btrfs, with Linux 6.14.
    #[arg(long, default_value = "fanotify")]
    pub window_guard: GuardMode,

    /// Translate user ids between guest and host; several rules may be given
    ///
    /// map:GUEST:HOST:COUNT translates a range both ways; guest:GUEST:HOST:COUNT and host:HOST:GUEST:COUNT only what
    /// comes from there; squash-guest:GUEST:HOST:COUNT and squash-host:HOST:GUEST:COUNT translate a range to one id;
    /// forbid-guest:GUEST:COUNT refuses ids. All else stays as it is. Excludes --posix-acl.
    #[arg(long, value_name = "RULE")]
    pub translate_uid: Vec<idmap::Rule>,

    /// Translate group ids, as --translate-uid does user ids
    #[arg(long, value_name = "RULE")]
    pub translate_gid: Vec<idmap::Rule>,

    /// Keep the daemon from everything but the share: namespaces; chroot (needs root, for containers); none
    #[arg(long, default_value = "namespace", ignore_case = true)]
    pub sandbox: Sandbox,

    /// User ids of the namespace of an ordinary user's daemon; several may be given [default: the own id as itself]
    ///
    /// :0:100000:65536: makes the host's ids 100000 to 165535 the namespace's 0 to 65535, if /etc/subuid grants them.
    #[arg(long, value_name = ":INSIDE:OUTSIDE:COUNT:")]
    pub uid_map: Vec<IdRange>,

    /// Group ids of the namespace, as --uid-map says user ids
    #[arg(long, value_name = ":INSIDE:OUTSIDE:COUNT:")]
    pub gid_map: Vec<IdRange>,

    /// Capabilities to keep or to drop beyond the usual, for example --modcaps=+sys_admin:-chown
    #[arg(long, value_name = "CHANGES")]
    pub modcaps: Option<ModCaps>,

    /// What happens at a system call that the daemon should not make
    #[arg(long, default_value = "kill")]
    pub seccomp: seccomp::Action,

    /// The limit of open files; 0 leaves it [default: 1000000, or fs.nr_open or a quarter of fs.file-max if less]
    #[arg(long, value_name = "N")]
    pub rlimit_nofile: Option<u64>,

    /// The most files that the guest may know at a time; each takes the daemon up to 512 bytes
    ///
    /// The guest knows what it has in its caches. Past the limit it gets ENFILE for a name that it does not know yet.
    #[arg(long, value_name = "N", default_value_t = limits::INODES)]
    pub max_inodes: usize,

    /// What the source of a migration tells the target about the guest's files: their paths, or their file handles
    ///
    /// Paths need only the same contents at both ends, but a removed file that the guest has open has none, and somebody
    /// may put another file in a path's place meanwhile. File handles avoid both; they need the same file system at
    /// both ends, and at the target CAP_DAC_READ_SEARCH and this same option (or --modcaps=+dac_read_search), as whoever
    /// controls the source can then name any file of that file system.
    #[arg(long, default_value = "find-paths")]
    pub migration_mode: MigrationMode,

    /// What the target of a migration does about a file that it cannot find or open: abort, or let the guest have errors
    ///
    /// With abort, the guest goes on at the source. With guest-error, all that it asks of that file fails with EIO.
    #[arg(long, default_value = "abort")]
    pub migration_on_error: MigrationOnError,

    /// Have the target of a migration see by their file handles that it finds the very same files (for the source)
    ///
    /// Needs the same file system at both ends. With --migration-mode=find-paths.
    #[arg(long)]
    pub migration_verify_handles: bool,

    /// Look at each path once more when all are found, and find those anew that are wrong by then (for the source)
    ///
    /// The guest stands still meanwhile. With --migration-mode=find-paths.
    #[arg(long)]
    pub migration_confirm_paths: bool,

    /// What to log: off, error, warn, info, debug or trace; the environment's RUST_LOG goes first
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: LevelFilter,

    /// Log to syslog instead of stderr
    #[arg(long)]
    pub syslog: bool,

    /// Print what the daemon can do, as vhost-user.json has it, and end
    #[arg(long)]
    pub print_capabilities: bool,

    /// Options as the C virtiofsd had them: source=DIR,cache=none,xattr,…
    #[arg(short = 'o', value_name = "OPTIONS", hide = true)]
    pub compat_options: Vec<String>,

    /// As --log-level=debug
    #[arg(short = 'd', hide = true)]
    pub compat_debug: bool,

    /// No effect
    #[arg(short = 'f', hide = true)]
    pub compat_foreground: bool,
}

/// Live mappings unless --max-mappings says otherwise: half of what QEMU has room for, so that two such devices fit.
const DEFAULT_MAPPINGS: u16 = 256;

/// What `--dax-window` and `--passthrough-window` ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSize {
    /// In bytes; 0: none.
    pub size: u64,
    /// Do not start without it.
    pub required: bool,
}

/// Why there are no options to go on with.
#[derive(Debug, Error)]
pub enum Stop {
    /// The text of --help or --version.
    #[error("{0}")]
    Help(String),
    /// What is wrong with the command line, in one line.
    #[error("{0} (thruwayd --help lists the options)")]
    Usage(String),
}

/// Reads a command line, the program's name first.
///
/// # Errors
/// [`Stop`]
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Options, Stop> {
    let mut options = Options::try_parse_from(args).map_err(stop)?;
    compat::apply(&mut options).map_err(Stop::Usage)?;
    if !options.print_capabilities {
        options.check().map_err(Stop::Usage)?;
    }
    Ok(options)
}

/// Makes one line of clap's several.
fn stop(error: clap::Error) -> Stop {
    let text = error.to_string();
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return Stop::Help(text);
    }
    let lines =
        text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    let line = lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    Stop::Usage(line.trim_start_matches("error: ").to_owned())
}

fn parse_tag(tag: &str) -> Result<String, String> {
    match tag.len() {
        1..=device::TAG_LEN => Ok(tag.to_owned()),
        len => Err(format!("a tag has 1 to {} bytes, not {len}", device::TAG_LEN)),
    }
}

fn parse_window(text: &str) -> Result<WindowSize, String> {
    let (size, required) = match text.split_once(',') {
        None => (text, false),
        Some((size, "required")) => (size, true),
        Some((_, other)) => return Err(format!("'{other}' is not 'required'")),
    };
    let size = parse_size(size)?;
    if size % window::RANGE != 0 {
        return Err("the size must be 0 or a multiple of 2M".into());
    }
    Ok(WindowSize { size, required })
}

/// A number of bytes: 4096, 128K, 1M, 2G.
fn parse_size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(1 << shift));
    number.ok_or_else(|| "expected a number of bytes such as 4096, 128K, 64M or 1G".to_owned())
}

fn parse_file_handles(mode: &str) -> Result<FileHandles, String> {
    // virtiofsd's older name.
    let mode = if mode == "fallback" { "prefer" } else { mode };
    FileHandles::from_str(mode, false).map_err(|_| "one of never, prefer, mandatory".to_owned())
}

impl Options {
    /// What clap's attributes cannot say.
    fn check(&self) -> Result<(), String> {
        if self.shared_dir.is_none() {
            return Err("there is no directory to share: give --shared-dir DIR".into());
        }
        if self.socket().is_none() && self.fd.is_none() {
            return Err("there is no socket to listen on: give --socket-path PATH or --fd N".into());
        }
        let most = u64::from(self.max_mappings) * window::RANGE;
        if self.dax_window.size > most {
            return Err(format!(
                "--dax-window is too big for --max-mappings={}: a guest may map each 2 MiB of it, so give at most {}M, \
                 or up to --max-mappings={}",
                self.max_mappings,
                (most >> 20).checked_ilog2().map_or(0, |log| 1 << log),
                window::MAX_MAPPINGS
            ));
        }
        self.check_windows()?;
        let finer = self.migration_verify_handles || self.migration_confirm_paths;
        if self.migration_mode == MigrationMode::FileHandles && finer {
            return Err(
                "--migration-verify-handles and --migration-confirm-paths are for find-paths: leave them out, or \
                        --migration-mode=file-handles"
                    .into(),
            );
        }
        let translates = !self.translate_uid.is_empty() || !self.translate_gid.is_empty();
        if self.posix_acl != Offer::Never && translates {
            return Err(
                "--posix-acl cannot go with --translate-uid or --translate-gid, which do not translate the ids \
                        inside of lists: leave out one"
                    .into(),
            );
        }
        self.fs_config().map(drop)
    }

    /// QEMU asserts that the sum of all regions is a power of two.
    fn check_windows(&self) -> Result<(), String> {
        let (dax, pass) = (self.dax_window.size, self.passthrough_window.size);
        let sum = dax.checked_add(pass).filter(|sum| *sum <= 1 << 62);
        let Some(sum) = sum else { return Err("the windows are too large".into()) };
        if sum != 0 && !sum.is_power_of_two() {
            return Err(match pass {
                0 => "--dax-window must be a power of two, at least 2M".into(),
                _ => format!(
                    "--dax-window and --passthrough-window must be a power of two together: give --passthrough-window={}M",
                    (sum.next_power_of_two() - dax) >> 20
                ),
            });
        }
        let Some(passthrough) = self.passthrough() else { return Ok(()) };
        if passthrough.size < window::MIN_SIZE {
            return Err(format!("--passthrough-window must be at least {}M", window::MIN_SIZE >> 20));
        }
        if passthrough.slots == 0 {
            return Err("--dax-window leaves no mappings for --passthrough-window: raise --max-mappings".into());
        }
        Ok(())
    }

    /// The passthrough window, if one is asked for.
    pub fn passthrough(&self) -> Option<window::Settings> {
        // Each 2 MiB of the DAX window may be a mapping, and the table is one.
        let others = self.dax_window.size / window::RANGE + 1;
        let slots = u64::from(self.max_mappings).saturating_sub(others) as usize;
        let settings =
            window::Settings { size: self.passthrough_window.size, slots, writable: self.passthrough_writable };
        (settings.size > 0).then_some(settings)
    }

    /// The directory to share; [`parse`] sees to it that it is given.
    pub fn shared_dir(&self) -> &Path {
        self.shared_dir.as_deref().unwrap_or(Path::new("."))
    }

    /// The path of the socket to make, if any.
    pub fn socket(&self) -> Option<&Path> {
        self.socket_path.as_deref().or(self.socket.as_deref())
    }

    /// Where the daemon listens, for messages.
    pub fn endpoint(&self) -> String {
        match (self.socket(), self.fd) {
            (Some(path), _) => path.display().to_string(),
            (None, fd) => format!("descriptor {}", fd.unwrap_or(-1)),
        }
    }

    /// What to log, at most.
    pub fn log_level(&self) -> LevelFilter {
        if self.compat_debug { LevelFilter::DEBUG } else { self.log_level }
    }

    /// What the sandbox is to be.
    pub fn sandbox_settings(&self) -> sandbox::Settings {
        sandbox::Settings {
            sandbox: self.sandbox,
            shared_dir: self.shared_dir().to_owned(),
            uid_map: self.uid_map.clone(),
            gid_map: self.gid_map.clone(),
            helper: None,
        }
    }

    /// What the file system is to do.
    ///
    /// # Errors
    /// If two rules of --translate-uid or --translate-gid overlap.
    pub fn fs_config(&self) -> Result<fs::Config, String> {
        let ids = |option, rules: &[_]| IdMap::new(rules).map_err(|e| format!("--translate-{option}: {e}"));
        let offered = self.posix_acl != Offer::Never || self.security_label != Offer::Never;
        Ok(fs::Config {
            cache: self.cache,
            timeout: None,
            writeback: self.writeback,
            allow_direct_io: self.allow_direct_io,
            allow_mmap: self.allow_mmap,
            killpriv_v2: self.killpriv_v2,
            readdirplus: !self.no_readdirplus && self.cache != CachePolicy::Never,
            xattr: self.xattr || self.xattrmap.is_some() || offered,
            posix_acl: self.posix_acl,
            security_label: self.security_label,
            announce_submounts: !self.no_announce_submounts,
            inode_file_handles: self.inode_file_handles,
            preserve_noatime: self.preserve_noatime,
            readonly: self.readonly,
            posix_lock: self.posix_lock,
            flock: self.flock,
            uid_map: ids("uid", &self.translate_uid)?,
            gid_map: ids("gid", &self.translate_gid)?,
            xattrmap: self.xattrmap.clone(),
            migration: self.migration(),
            max_inodes: self.max_inodes,
            dax_min_size: self.dax_min_size,
            passthrough_min_size: self.passthrough_min_size,
        })
    }

    fn migration(&self) -> fs::Migration {
        let adds = |modcaps: &ModCaps| modcaps.adds(&Capability::CAP_DAC_READ_SEARCH);
        fs::Migration {
            mode: self.migration_mode,
            on_error: self.migration_on_error,
            verify_handles: self.migration_verify_handles,
            confirm_paths: self.migration_confirm_paths,
            trust_handles: self.migration_mode == MigrationMode::FileHandles || self.modcaps.as_ref().is_some_and(adds),
        }
    }

    /// Old spellings in use, each with what to write instead.
    pub fn deprecated(&self) -> impl Iterator<Item = &'static str> {
        [
            (self.socket.is_some(), "--socket is deprecated: use --socket-path"),
            (!self.compat_options.is_empty(), "-o is deprecated: use --shared-dir, --cache and so on"),
            (self.compat_debug, "-d is deprecated: use --log-level=debug"),
            (self.compat_foreground, "-f has no effect"),
        ]
        .into_iter()
        .filter_map(|(used, text)| used.then_some(text))
    }
}

/// What `--print-capabilities` prints: docs/interop/vhost-user.json in QEMU, "VHostUserBackendCapabilities".
pub fn capabilities() -> String {
    let features = FEATURES.map(|name| format!("    \"{name}\"")).join(",\n");
    format!("{{\n  \"type\": \"fs\",\n  \"features\": [\n{features}\n  ]\n}}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Result<Options, Stop> {
        parse(["thruwayd"].into_iter().chain(line.split_whitespace()).map(OsString::from))
    }

    fn config(line: &str) -> fs::Config {
        args(&format!("--shared-dir /s --socket-path /k {line}")).unwrap().fs_config().unwrap()
    }

    #[test]
    fn defaults_are_those_of_virtiofsd() {
        let options = args("--shared-dir /s --fd 3").unwrap();
        assert_eq!((options.sandbox, options.seccomp), (Sandbox::Namespace, seccomp::Action::Kill));
        let config = options.fs_config().unwrap();
        assert_eq!((config.cache, config.inode_file_handles), (CachePolicy::Auto, FileHandles::Prefer));
        assert!(config.announce_submounts && config.readdirplus && !config.killpriv_v2 && !config.xattr);
        assert!(!config.writeback && !config.allow_direct_io && !config.posix_lock && !config.flock);
    }

    #[test]
    fn the_last_of_two_wins() {
        assert!(!config("--killpriv-v2 --no-killpriv-v2").killpriv_v2);
        assert!(config("--no-killpriv-v2 --killpriv-v2").killpriv_v2);
        assert!(!config("--announce-submounts --no-announce-submounts").announce_submounts);
        assert!(config("--no-announce-submounts --announce-submounts").announce_submounts);
        assert_eq!(config("--cache never --cache always").cache, CachePolicy::Always);
    }

    #[test]
    fn some_options_imply_others() {
        for line in ["--xattrmap :ok:all:::", "--posix-acl", "--security-label=auto"] {
            assert!(config(line).xattr, "{line}");
        }
        assert_eq!(
            (config("--posix-acl").posix_acl, config("--posix-acl=auto").posix_acl),
            (Offer::Always, Offer::Auto)
        );
        assert!(!config("--cache Never").readdirplus);
        assert_eq!(config("--inode-file-handles=fallback").inode_file_handles, FileHandles::Prefer);
    }

    #[test]
    fn compat_options_are_taken() {
        let options = args("-f -d -o source=/a=b,cache=none,xattr --socket /k -o no_xattr,loglevel=err").unwrap();
        assert_eq!((options.shared_dir(), options.cache), (Path::new("/a=b"), CachePolicy::Never));
        assert_eq!((options.xattr, options.log_level), (false, LevelFilter::ERROR));
        assert_eq!(options.deprecated().count(), 4);
        assert!(args("-o source=/,nonsense --fd 3").is_err());
    }

    #[test]
    fn what_cannot_go_together_is_refused_in_one_line() {
        for line in [
            "",
            "--shared-dir /s",
            "--socket-path /k",
            "--shared-dir /s --fd 3 --socket-path /k",
            "--shared-dir /s --fd 3 --socket-group kvm",
            "--shared-dir /s --fd 3 --posix-acl --translate-uid map:0:1:1",
            "--shared-dir /s --fd 3 --translate-uid map:0:1:2 --translate-uid guest:1:1:1",
            "--shared-dir /s --fd 3 --migration-mode file-handles --migration-confirm-paths",
            "--shared-dir /s --fd 3 --num-request-queues 64",
            "--shared-dir /s --fd 3 --num-request-queues 0",
            "--shared-dir /s --fd 3 --inode-file-handles never",
            "--shared-dir /s --fd 3 --xatr",
            "--shared-dir /s --fd 3 --dax-window 3M",
            "--shared-dir /s --fd 3 --dax-window 1M",
            "--shared-dir /s --fd 3 --dax-window 128M,please",
            "--shared-dir /s --fd 3 --dax-window 256M --max-mappings 64",
            "--shared-dir /s --fd 3 --max-mappings 449",
            "--shared-dir /s --fd 3 --passthrough-window 3M",
            "--shared-dir /s --fd 3 --passthrough-window 2M",
            "--shared-dir /s --fd 3 --passthrough-window 6M",
            "--shared-dir /s --fd 3 --passthrough-window 256M --dax-window 128M",
            "--shared-dir /s --fd 3 --passthrough-window 512M --dax-window 512M",
            "--shared-dir /s --fd 3 --passthrough-window 18446744073707454464 --dax-window 2M",
        ] {
            let text = args(line).unwrap_err().to_string();
            assert!(!text.contains('\n') && text.ends_with("options)"), "{line}: {text}");
        }
    }
}
