//! The command line (virtiofsd's, with some additions), the log, and the socket.

mod compat;
pub mod listen;
pub mod log;

/// For fuzz/.
#[cfg(fuzzing)]
pub mod fuzzing {
    pub fn size(text: &str) -> Option<u64> {
        super::parse_size(text).ok()
    }
    pub fn window(text: &str) -> Option<super::WindowSize> {
        super::parse_window(text).ok()
    }
}

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use caps::Capability;
use clap::error::ErrorKind;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser};
use tracing::level_filters::LevelFilter;

use crate::device;
use crate::fs;
use crate::fuse::throttle::Rates;
use crate::limits;
use crate::sandbox::caps::ModCaps;
use crate::sandbox::{self, IdRange, Sandbox, Share, seccomp};
use crate::size::parse_size;
use crate::window;
use crate::window::proxy::GuardMode;

/// The features of docs/interop/vhost-user.json (QEMU) that this daemon has. `50-thruway.json` lists the same.
const FEATURES: [&str; 4] =
    ["migrate-precopy", "posix-acl-negotiation-mode", "security-label-negotiation-mode", "separate-options"];

/// Whether another process goes on when the one that serves is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Supervise {
    /// Where the host can.
    Auto,
    /// The daemon does not start without it.
    Always,
    /// No.
    Never,
}

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

    /// Share a directory as NAME, instead of --shared-dir; may be given several times
    ///
    /// The guest sees one read-only directory with these names. Each is a mount in the guest, as with
    /// --announce-submounts. With ro, nothing in it can be changed. It needs --sandbox namespace. docs/callers.md says
    /// more.
    #[arg(long, value_name = "NAME=DIR[,ro]", conflicts_with = "shared_dir")]
    pub share: Vec<Share>,

    /// Create the socket for the virtual machine at PATH; the daemon holds a lock on PATH.pid while it runs
    #[arg(help_heading = "Socket", long, value_name = "PATH", conflicts_with = "fd")]
    pub socket_path: Option<PathBuf>,

    /// An older name of --socket-path
    #[arg(long, value_name = "PATH", conflicts_with = "fd", hide = true)]
    pub socket: Option<PathBuf>,

    /// Let this group connect to the socket too; otherwise only the daemon's user can
    #[arg(help_heading = "Socket", long, value_name = "GROUP", conflicts_with_all = ["fd", "print_capabilities"])]
    pub socket_group: Option<String>,

    /// Use this inherited descriptor of a listening socket instead of creating a socket
    #[arg(help_heading = "Socket", long)]
    pub fd: Option<RawFd>,

    /// Serve metrics, status and a few commands on a socket at PATH: curl --unix-socket PATH http://_/status
    ///
    /// Only the daemon's user can connect. The daemon holds a lock on PATH.pid while it runs. docs/control.md has all
    /// requests.
    #[arg(help_heading = "Socket", long, value_name = "PATH")]
    pub control_path: Option<PathBuf>,

    /// The tag that the guest mounts, for frontends that ask the daemon for it (1 to 36 bytes)
    ///
    /// QEMU's vhost-user-fs-pci does not ask: it uses its own tag= property.
    #[arg(help_heading = "Socket", long, value_parser = parse_tag)]
    pub tag: Option<String>,

    /// When a frontend disconnects, wait for the next one instead of exiting
    #[arg(help_heading = "Socket", long)]
    pub keep_alive: bool,

    /// If the process that serves is killed, start another one, which goes on where it was: the guest sees a delay
    ///
    /// auto: where the host can, and there is no window. It needs --sandbox namespace. Not together with
    /// --passthrough-window. thruway upgrade, or SIGUSR2, has such a daemon without a window become the program that is
    /// installed now.
    #[arg(help_heading = "Socket", long, value_name = "WHEN", default_value = "auto", num_args = 0..=1,
          default_missing_value = "always", require_equals = true)]
    pub supervise: Supervise,

    /// The number of request queues, for frontends that ask the daemon for it
    ///
    /// The guest uses at most one queue for each of its CPUs. QEMU's vhost-user-fs-pci does not ask: it uses its own
    /// num-request-queues= property, which may be at most 63 too.
    #[arg(help_heading = "Socket", long, value_name = "N", default_value_t = device::MAX_REQUEST_QUEUES,
          value_parser = clap::value_parser!(u16).range(1..=i64::from(device::MAX_REQUEST_QUEUES)))]
    pub num_request_queues: u16,

    /// No effect: accepted for compatibility with virtiofsd. thruwayd has one thread for each queue that
    /// the guest uses, and more only for requests that wait
    #[arg(help_heading = "Socket", long, value_name = "N", default_value_t = 0)]
    pub thread_pool_size: usize,

    /// After its queue is empty a thread polls for at most MAX microseconds before it sleeps; 0 turns polling off
    ///
    /// The time adapts to the load: while requests are rare, the thread does not poll at all.
    #[arg(help_heading = "Socket", long, value_name = "MAX", default_value_t = device::POLL_US,
          value_parser = clap::value_parser!(u64).range(..=10_000))]
    pub poll_us: u64,

    /// The file system's.
    #[command(flatten)]
    pub fs: fs::Config,

    /// Let the guest send at most so many requests in a second: N,read=N,write=N,metadata=N,burst=SECONDS
    ///
    /// Each part may be missing. N alone is for all requests together. A guest that was idle may send what it has saved
    /// up in the last SECONDS (1 unless given) at once. What is over the limit waits, and nothing else waits for it.
    /// What the guest does in a window sends no requests.
    #[arg(help_heading = "Limits", long, display_order = 120, value_name = "LIMITS", value_parser = Rates::iops)]
    pub limit_iops: Option<Rates>,

    /// Let the guest read and write at most so many bytes in a second: SIZE,read=SIZE,write=SIZE,burst=SECONDS
    ///
    /// As for --limit-iops.
    #[arg(help_heading = "Limits", long, display_order = 121, value_name = "LIMITS",
          value_parser = Rates::bandwidth)]
    pub limit_bandwidth: Option<Rates>,

    /// Give the guest a DAX window of this size, for example 1G, through which it maps files; 0: no window
    ///
    /// The size is a power of two, at least 2M, and at most 2M times --max-mappings. The frontend must support shared
    /// memory regions: docs/dax.md has the command for QEMU. The daemon needs CAP_SYS_ADMIN and Linux 6.9. Without them
    /// it warns and starts without a window. With SIZE,required it fails instead. A guest with -o dax=inode maps no
    /// more files than fit into four fifths of the window.
    #[arg(help_heading = "Windows", long, display_order = 101, value_name = "SIZE[,required]", default_value = "0",
          value_parser = parse_window)]
    pub dax_window: WindowSize,

    /// Give a guest with the patches of guest-kernel/ a window of this size, through which it reads, writes and maps
    /// files without messages
    ///
    /// The size limits how much of the open files is mapped at a time. Each file takes one of --max-mappings, or up to
    /// eight when it has grown; --dax-window uses one for each 2M. The two windows' sizes together must be a power of
    /// two. 2M of this window hold its table. The needs of the frontend and the host, and SIZE,required, are as for
    /// --dax-window. --writeback has no effect with this window.
    #[arg(help_heading = "Windows", long, display_order = 102, value_name = "SIZE[,required]", default_value = "0",
          value_parser = parse_window)]
    pub passthrough_window: WindowSize,

    /// Which files the guest writes through the passthrough window: those where the host cannot run out of space, or
    /// all
    ///
    /// in-place: files without holes on ext4, XFS and tmpfs; others use messages. always: all files. If the host's
    /// disk is full then, a write can end the virtual machine.
    #[arg(help_heading = "Windows", long, display_order = 104, default_value = "in-place")]
    pub passthrough_writable: window::Writable,

    /// The number of mappings in the windows at a time (at most 448: QEMU ends a virtual machine with 512 memory
    /// regions)
    #[arg(help_heading = "Windows", long, display_order = 105, value_name = "N", default_value_t = DEFAULT_MAPPINGS,
          value_parser = clap::value_parser!(u16).range(1..=limits::WINDOW_MAPPINGS as i64))]
    pub max_mappings: u16,

    /// Protect the virtual machine from host processes that truncate a mapped file
    ///
    /// fanotify: the truncation waits until the mapping is gone. It works on ext4, XFS and Btrfs, with Linux 6.14.
    #[arg(help_heading = "Windows", long, display_order = 107, default_value = "fanotify")]
    pub window_guard: GuardMode,

    /// Isolate the daemon from everything but the share: by namespaces, by chroot (for containers; needs root), or not
    /// at all
    #[arg(help_heading = "Sandbox", long, default_value = "namespace", ignore_case = true)]
    pub sandbox: Sandbox,

    /// Map user IDs into the user namespace of a daemon that does not run as root; may be given several times [default:
    /// only the user's own ID]
    ///
    /// :0:100000:65536: maps the host's IDs 100000 to 165535 to 0 to 65535. /etc/subuid must grant them to the user.
    #[arg(help_heading = "Sandbox", long, value_name = ":INSIDE:OUTSIDE:COUNT:")]
    pub uid_map: Vec<IdRange>,

    /// Map group IDs, in the same way as --uid-map
    #[arg(help_heading = "Sandbox", long, value_name = ":INSIDE:OUTSIDE:COUNT:")]
    pub gid_map: Vec<IdRange>,

    /// Change the set of capabilities that the daemon keeps, for example --modcaps=+sys_admin:-chown
    #[arg(help_heading = "Sandbox", long, value_name = "CHANGES")]
    pub modcaps: Option<ModCaps>,

    /// What happens when the daemon makes a system call that it should not make
    #[arg(help_heading = "Sandbox", long, default_value = "kill")]
    pub seccomp: seccomp::Action,

    /// The limit of open files; 0 does not change it [default: the least of 1000000, fs.nr_open and a quarter of
    /// fs.file-max]
    #[arg(help_heading = "Sandbox", long, value_name = "N")]
    pub rlimit_nofile: Option<u64>,

    /// What to log: off, error, warn, info, debug or trace; the environment variable RUST_LOG takes precedence
    #[arg(help_heading = "Log", long, value_name = "LEVEL", default_value = "info")]
    pub log_level: LevelFilter,

    /// Log to syslog instead of stderr
    #[arg(help_heading = "Log", long)]
    pub syslog: bool,

    /// Print the daemon's capabilities in the form of QEMU's vhost-user.json, and exit
    #[arg(long)]
    pub print_capabilities: bool,

    /// Print what of another version's session this program could go on with, and exit
    #[arg(long, hide = true)]
    pub print_upgrade: bool,

    /// Options in the form of the C virtiofsd: source=DIR,cache=none,xattr,…
    #[arg(short = 'o', value_name = "OPTIONS", hide = true)]
    pub compat_options: Vec<String>,

    /// The same as --log-level=debug
    #[arg(short = 'd', hide = true)]
    pub compat_debug: bool,

    /// No effect
    #[arg(short = 'f', hide = true)]
    pub compat_foreground: bool,

    /// All options in force that have a value, by name without dashes.
    #[arg(skip)]
    pub in_force: BTreeMap<String, String>,
}

/// The default of --max-mappings: half of what QEMU has room for, so that a VM can have two such devices.
const DEFAULT_MAPPINGS: u16 = 256;

/// The value of `--dax-window` or `--passthrough-window`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSize {
    /// In bytes; 0: no window.
    pub size: u64,
    /// The daemon fails to start if it cannot have the window.
    pub required: bool,
}

/// Why [`parse`] returns no options.
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    /// The text of --help or --version.
    #[error("{0}")]
    Help(String),
    /// The error in the command line, in one line.
    #[error("{0} (thruwayd --help lists the options)")]
    Usage(String),
}

/// Parses a command line that starts with the program's name.
///
/// # Errors
/// [`Stop`]
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Options, Stop> {
    let mut command = Options::command();
    let matches = command.try_get_matches_from_mut(args).map_err(stop)?;
    let mut options = Options::from_arg_matches(&matches).map_err(|e| stop(e.format(&mut command)))?;
    options.in_force = in_force(&command, &matches);
    compat::apply(&mut options).map_err(Stop::Usage)?;
    if !options.print_capabilities && !options.print_upgrade {
        options.check().map_err(Stop::Usage)?;
    }
    Ok(options)
}

/// The values of all options that have one.
fn in_force(command: &clap::Command, matches: &ArgMatches) -> BTreeMap<String, String> {
    let value = |arg: &clap::Arg| {
        let name = arg.get_long().filter(|_| !arg.is_hide_set())?;
        let values = matches.try_get_raw(arg.get_id().as_str()).ok()??;
        let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
        Some((name.to_owned(), values.join(",")))
    };
    command.get_arguments().filter_map(value).collect()
}

/// Joins clap's error message into one line.
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

impl Options {
    /// Checks what clap's attributes cannot express, and sets what follows from it.
    fn check(&mut self) -> Result<(), String> {
        if self.shared_dir.is_none() && self.share.is_empty() {
            return Err("there is no directory to share: give --shared-dir DIR".into());
        }
        self.check_shares()?;
        self.fs.share_names = self.share.iter().filter_map(|share| CString::new(&*share.name).ok()).collect();
        if self.socket().is_none() && self.fd.is_none() {
            return Err("there is no socket to listen on: give --socket-path PATH or --fd N".into());
        }
        let most = u64::from(self.max_mappings) * window::RANGE;
        if self.dax_window.size > most {
            return Err(format!(
                "--dax-window is too large for --max-mappings={}: each 2 MiB of it needs a mapping; give at most {}M, \
                 or raise --max-mappings (up to {})",
                self.max_mappings,
                (most >> 20).checked_ilog2().map_or(0, |log| 1 << log),
                limits::WINDOW_MAPPINGS
            ));
        }
        self.check_windows()?;
        if self.supervise == Supervise::Always && self.passthrough_window.size > 0 {
            return Err("--supervise cannot be used with --passthrough-window yet: give --supervise=never".into());
        }
        let opens_handles = |modcaps: &ModCaps| modcaps.adds(&Capability::CAP_DAC_READ_SEARCH);
        self.fs.resolve(self.modcaps.as_ref().is_some_and(opens_handles))
    }

    fn check_shares(&self) -> Result<(), String> {
        let mut names = BTreeSet::new();
        if let Some(share) = self.share.iter().find(|share| !names.insert(&share.name)) {
            return Err(format!("--share gives the name '{}' twice", share.name));
        }
        if !names.is_empty() && self.shared_dir.is_some() {
            return Err("--share cannot be used with --shared-dir: give each directory a name".into());
        }
        if !names.is_empty() && self.fs.migration.verify_handles {
            return Err(
                "--migration-verify-handles cannot be used with --share, whose root directory each daemon makes \
                        for itself"
                    .into(),
            );
        }
        Ok(())
    }

    /// Checks the sizes of the windows. QEMU asserts that the sum of all regions is a power of two.
    fn check_windows(&self) -> Result<(), String> {
        let (dax, pass) = (self.dax_window.size, self.passthrough_window.size);
        let sum = dax.checked_add(pass).filter(|sum| *sum <= 1 << 62);
        let Some(sum) = sum else { return Err("the windows are too large".into()) };
        if sum != 0 && !sum.is_power_of_two() {
            return Err(match pass {
                0 => "--dax-window must be a power of two, at least 2M".into(),
                _ => format!(
                    "the sum of --dax-window and --passthrough-window must be a power of two: use \
                     --passthrough-window={}M",
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

    /// The settings of the passthrough window, if one was requested.
    pub fn passthrough(&self) -> Option<window::Settings> {
        // Each 2 MiB of the DAX window may be a mapping, and the table is one.
        let others = self.dax_window.size / window::RANGE + 1;
        let slots = u64::from(self.max_mappings).saturating_sub(others) as usize;
        let settings = window::Settings {
            size: self.passthrough_window.size,
            slots,
            writable: self.passthrough_writable,
            patience: window::PATIENCE,
        };
        (settings.size > 0).then_some(settings)
    }

    /// The directory to share. [`parse`] has checked that it was given.
    pub fn shared_dir(&self) -> &Path {
        self.shared_dir.as_deref().unwrap_or(Path::new("."))
    }

    /// All directories that are shared.
    pub fn shared_dirs(&self) -> Vec<&Path> {
        match &*self.share {
            [] => vec![self.shared_dir()],
            shares => shares.iter().map(|share| &*share.dir).collect(),
        }
    }

    /// The path of the socket to create, if any.
    pub fn socket(&self) -> Option<&Path> {
        self.socket_path.as_deref().or(self.socket.as_deref())
    }

    /// Where the daemon listens, as text for messages.
    pub fn endpoint(&self) -> String {
        match (self.socket(), self.fd) {
            (Some(path), _) => path.display().to_string(),
            (None, fd) => format!("descriptor {}", fd.unwrap_or(-1)),
        }
    }

    /// The most detailed level to log.
    pub fn log_level(&self) -> LevelFilter {
        if self.compat_debug { LevelFilter::DEBUG } else { self.log_level }
    }

    /// The settings of the sandbox.
    pub fn sandbox_settings(&self) -> sandbox::Settings {
        sandbox::Settings {
            sandbox: self.sandbox,
            shared_dir: self.shared_dir().to_owned(),
            shares: self.share.clone(),
            uid_map: self.uid_map.clone(),
            gid_map: self.gid_map.clone(),
            helper: None,
            supervised: self.supervise == Supervise::Always,
        }
    }

    /// Whether to have a supervisor, if the host can.
    pub fn wants_supervisor(&self) -> bool {
        match self.supervise {
            Supervise::Auto => self.sandbox == Sandbox::Namespace && !self.has_window(),
            when => when == Supervise::Always,
        }
    }

    /// Whether a window was requested.
    pub fn has_window(&self) -> bool {
        self.dax_window.size > 0 || self.passthrough_window.size > 0
    }

    /// How many processes and threads the daemon cannot do without. `supervised`: with a supervisor.
    pub fn least_threads(&self, supervised: bool) -> usize {
        let more = [(self.has_window(), limits::WINDOW_THREADS), (self.control_path.is_some(), 1), (supervised, 1)];
        let more: usize = more.iter().filter(|(has, _)| *has).map(|(_, threads)| threads).sum();
        limits::LEAST_THREADS + more
    }

    /// Warnings about deprecated options that were used. Each names the option to use instead.
    pub fn deprecated(&self) -> impl Iterator<Item = &'static str> {
        [
            (self.socket.is_some(), "--socket is deprecated: use --socket-path"),
            (!self.compat_options.is_empty(), "-o is deprecated: use --shared-dir, --cache and the other long options"),
            (self.compat_debug, "-d is deprecated: use --log-level=debug"),
            (self.compat_foreground, "-f has no effect"),
        ]
        .into_iter()
        .filter_map(|(used, text)| used.then_some(text))
    }
}

/// The output of `--print-capabilities`: docs/interop/vhost-user.json in QEMU, "VHostUserBackendCapabilities".
pub fn capabilities() -> String {
    let capabilities = serde_json::json!({ "type": "fs", "features": FEATURES });
    format!("{capabilities:#}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fs::{CachePolicy, FileHandles, NoOpen, Offer};

    fn args(line: &str) -> Result<Options, Stop> {
        parse(["thruwayd"].into_iter().chain(line.split_whitespace()).map(OsString::from))
    }

    fn config(line: &str) -> fs::Config {
        args(&format!("--shared-dir /s --socket-path /k {line}")).unwrap().fs
    }

    #[test]
    fn a_supervisor_is_wanted_where_one_can_be() {
        let wants = |line: &str| args(&format!("--shared-dir / --socket-path s {line}")).map(|o| o.wants_supervisor());
        for line in ["", "--supervise=auto", "--supervise --sandbox none", "--supervise=always"] {
            assert!(wants(line).unwrap(), "{line}");
        }
        for line in ["--supervise=never", "--sandbox none", "--sandbox chroot", "--dax-window 2M"] {
            assert!(!wants(line).unwrap(), "{line}");
        }
        assert!(wants("--supervise --dax-window 2M").unwrap());
        assert!(wants("--supervise --passthrough-window 2M").is_err());
    }

    #[test]
    fn defaults_are_virtiofsds() {
        let options = args("--shared-dir /s --fd 3").unwrap();
        assert_eq!((options.sandbox, options.seccomp), (Sandbox::Namespace, seccomp::Action::Kill));
        let config = &options.fs;
        assert_eq!((config.cache, config.inode_file_handles), (CachePolicy::Auto, FileHandles::Prefer));
        assert!(!config.no_announce_submounts && !config.no_readdirplus && !config.xattr);
        assert!(!config.killpriv_v2 && !config.no_killpriv_v2);
        assert!(!config.writeback && !config.allow_direct_io && !config.posix_lock && !config.flock);
    }

    #[test]
    fn the_last_option_wins() {
        let killpriv = [config("--killpriv-v2 --no-killpriv-v2"), config("--no-killpriv-v2 --killpriv-v2")];
        assert_eq!(killpriv.map(|c| (c.killpriv_v2, c.no_killpriv_v2)), [(false, true), (true, false)]);
        assert!(config("--announce-submounts --no-announce-submounts").no_announce_submounts);
        assert!(!config("--no-announce-submounts --announce-submounts").no_announce_submounts);
        assert_eq!(config("--cache never --cache always").cache, CachePolicy::Always);
    }

    #[test]
    fn seconds_may_have_fractions() {
        let timeout = |line| config(line).negative_timeout;
        assert_eq!(timeout(""), Duration::ZERO);
        assert_eq!(timeout("--negative-timeout 1.5"), Duration::from_millis(1500));
        assert_eq!(timeout("--negative-timeout=86400"), Duration::from_secs(86400));
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
        assert!(config("--cache Never").no_readdirplus);
        assert_eq!(
            ["", "--no-open", "--no-open=never"].map(|line| config(line).no_open),
            [NoOpen::Auto, NoOpen::Always, NoOpen::Never]
        );
        assert_eq!(config("--inode-file-handles=fallback").inode_file_handles, FileHandles::Prefer);
        // Kata's runtime-rs.
        assert_eq!(config("--inode-file-handles never").inode_file_handles, FileHandles::Never);
    }

    #[test]
    fn compat_options_are_accepted() {
        let options = args("-f -d -o source=/a=b,cache=none,xattr --socket /k -o no_xattr,loglevel=err").unwrap();
        assert_eq!((options.shared_dir(), options.fs.cache), (Path::new("/a=b"), CachePolicy::Never));
        assert_eq!((options.fs.xattr, options.log_level), (false, LevelFilter::ERROR));
        assert_eq!(options.deprecated().count(), 4);
        assert!(args("-o source=/,nonsense --fd 3").is_err());
    }

    #[test]
    fn help_has_headings() {
        let command = Options::command();
        let bare = command.get_arguments().filter(|arg| !arg.is_hide_set() && arg.get_help_heading().is_none());
        assert_eq!(
            bare.map(|arg| arg.get_id().as_str()).collect::<Vec<_>>(),
            ["shared_dir", "share", "print_capabilities"]
        );
    }

    #[test]
    fn what_is_in_force_is_known_by_name() {
        let all = args("--shared-dir /s --fd 3 --cache always --cache never --xattr -o readdirplus,no_xattr").unwrap();
        let value = |name| all.in_force.get(name).map(String::as_str);
        assert_eq!((value("shared-dir"), value("fd"), value("cache")), (Some("/s"), Some("3"), Some("never")));
        assert_eq!(
            (value("xattr"), value("no-readdirplus"), value("writeback")),
            (Some("false"), Some("false"), Some("false"))
        );
        assert_eq!((value("sandbox"), value("max-mappings"), value("tag")), (Some("namespace"), Some("256"), None));
        let rules = args("--shared-dir /s --fd 3 --translate-uid map:0:1:1 --translate-uid map:5:7:1").unwrap();
        assert_eq!(rules.in_force["translate-uid"], "map:0:1:1,map:5:7:1");
        assert_eq!(args("--fd 3 -o source=/t,cache=none").unwrap().in_force["cache"], "never");
    }

    #[test]
    fn several_directories_have_names() {
        let options = args("--share a=/x,ro --share b=/y,z=1 --share c,d=rel --fd 3").unwrap();
        let share = |name: &str, dir: &str, readonly| Share { name: name.into(), dir: dir.into(), readonly };
        assert_eq!(options.share, [share("a", "/x", true), share("b", "/y,z=1", false), share("c,d", "rel", false)]);
        assert_eq!(options.shared_dirs(), ["/x", "/y,z=1", "rel"].map(Path::new));
        assert_eq!(args("--shared-dir /s --fd 3").unwrap().shared_dirs(), [Path::new("/s")]);
        for bad in ["a", "=/x", "a=", "a=,ro", ".=/x", "..=/x", "a/b=/x"] {
            assert!(args(&format!("--share {bad} --fd 3")).is_err(), "{bad}");
        }
    }

    #[test]
    fn bad_combinations_are_refused_in_one_line() {
        for line in [
            "--share a=/x --share a=/y --fd 3",
            "--share a=/x --shared-dir /s --fd 3",
            "--share a=/x --fd 3 -o source=/s",
            "--share a=/x --fd 3 --migration-verify-handles",
            "--shared-dir /s --fd 3 --nfs-export --inode-file-handles=never",
            "",
            "--shared-dir /s",
            "--socket-path /k",
            "--shared-dir /s --fd 3 --socket-path /k",
            "--shared-dir /s --fd 3 --socket-group kvm",
            "--shared-dir /s --fd 3 --posix-acl --translate-uid map:0:1:1",
            "--shared-dir /s --fd 3 --translate-uid map:0:1:2 --translate-uid guest:1:1:1",
            "--shared-dir /s --fd 3 --migration-mode file-handles --migration-confirm-paths",
            "--shared-dir /s --fd 3 --num-request-queues 64",
            "--shared-dir /s --fd 3 --no-open --posix-lock",
            "--shared-dir /s --fd 3 --no-open=always --cache=never",
            "--shared-dir /s --fd 3 --no-open=always --cache=metadata",
            "--shared-dir /s --fd 3 --num-request-queues 0",
            "--shared-dir /s --fd 3 --xatr",
            "--shared-dir /s --fd 3 --negative-timeout -1",
            "--shared-dir /s --fd 3 --negative-timeout nan",
            "--shared-dir /s --fd 3 --negative-timeout 1e30",
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
