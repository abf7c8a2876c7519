//! The daemon: it parses its options, listens, enters the sandbox and serves.

use std::error::Error;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thruway::cli::listen;
use thruway::cli::{self, Options, Stop, Supervise};
use thruway::control::{self, Facts, Sources};
use thruway::device;
use thruway::fs::{self, FileHandles, PassthroughFs};
use thruway::fuse::Server;
use thruway::sandbox::{self, Entered, Inside, Sandbox, Side, caps, cgroup, limits, seccomp};
use thruway::supervise::{self, Handed, Parent, Successor, Worker};
use thruway::watch::Watch;
use thruway::window::Window;
use thruway::window::proxy::{self, Guard, GuardMode, Proxy};

/// Why there is no window.
const NO_WINDOW: &str = "neither --dax-window nor --passthrough-window is given";

fn main() -> ExitCode {
    let options = match cli::parse(std::env::args_os()) {
        Ok(options) => options,
        Err(Stop::Help(text)) => {
            print!("{text}");
            return ExitCode::SUCCESS;
        }
        Err(error) => return fail(&error),
    };
    if options.print_capabilities {
        println!("{}", cli::capabilities());
        return ExitCode::SUCCESS;
    }
    if options.print_upgrade {
        println!("{}", supervise::understood());
        return ExitCode::SUCCESS;
    }
    let end = run(&options);
    cli::log::flush();
    end.map_or_else(|error| fail(error.as_ref()), |()| ExitCode::SUCCESS)
}

fn fail(error: &dyn Error) -> ExitCode {
    eprintln!("thruwayd: {error}");
    ExitCode::FAILURE
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let since = Instant::now();
    let handed = Handed::get()?;
    // Of the process that was started.
    let pid = match &handed {
        Some(Handed::Successor(..)) => std::os::unix::process::parent_id(),
        _ => std::process::id(),
    };
    cli::log::init(options.log_level(), options.syslog, pid);
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let shared_dirs = options.shared_dirs().into_iter().map(absolute).collect();
    let socket = options.socket().map(absolute);
    // The sandbox hides the control groups.
    let memory_limit = cgroup::memory();
    // Only the process that serves gets further.
    let Begun { listener, control, entered, proxy, no_window, _locks } = match handed {
        None => begin(options)?,
        Some(Handed::Successor(namespaces, proc, channel, from)) => {
            succeed(options, sandbox::join(namespaces, proc, channel)?, from)?
        }
        Some(Handed::Parent(parent)) => parent.watch(),
    };
    let guard = proxy.as_ref().map_or(Guard::Off("there is no window".into()), |proxy| proxy.guard().clone());
    cli::log::detach()?;
    let window = start_window(options, proxy)?;
    let fs = start_fs(options.fs.clone(), entered)?.with_window(window.clone());
    let (watch, no_watch) = start_watch();
    let server = Arc::new(Server::new(fs.with_watch(watch)?));
    server.take_over()?;
    server.throttle().set(options.limit_iops.unwrap_or_default(), options.limit_bandwidth.unwrap_or_default());
    let urings = Arc::new(device::Urings::new(options.num_request_queues));
    let monitor = Arc::new(device::Monitor::default());
    let is_controlled = control.is_some();
    if let Some(control) = control {
        let sources = Sources {
            facts: Facts {
                pid,
                since,
                shared_dirs,
                socket,
                options: options.in_force.clone(),
                max_mappings: options.max_mappings.into(),
                no_window,
                guard,
                no_watch,
            },
            server: server.clone(),
            device: monitor.clone(),
            urings: urings.clone(),
            window: window.clone(),
            log: cli::log::filter,
        };
        control::start(control, sources)?;
    }
    seccomp::apply(options.seccomp, options.syslog || is_controlled)?;
    // Kata's runtime-rs waits for these words on stderr, which are virtiofsd's, before it starts the virtual machine.
    tracing::info!("Waiting for vhost-user socket connection on {}", options.endpoint());
    let device = device::Options {
        tag: options.tag.clone(),
        request_queues: options.num_request_queues,
        keep_alive: options.keep_alive,
        urings,
        poll: Duration::from_micros(options.poll_us),
        window,
        monitor,
        memory_limit,
    };
    device::serve(listener, server, device)?;
    if let (Sandbox::None, Some(path)) = (options.sandbox, options.socket()) {
        // Inside the other sandboxes the path does not exist. std would call unlink(2), which seccomp does not allow.
        let _ = rustix::fs::unlinkat(rustix::fs::CWD, path, rustix::fs::AtFlags::empty());
    }
    Ok(())
}

/// What the process that serves begins with.
struct Begun {
    listener: UnixListener,
    control: Option<UnixListener>,
    entered: Entered,
    proxy: Option<Proxy>,
    /// Why there is no proxy.
    no_window: String,
    /// Locked while the daemon runs.
    _locks: Vec<File>,
}

impl Begun {
    fn worker(worker: Worker, no_window: String, _locks: Vec<File>) -> Self {
        let Worker { listener, root, proc_self_fd, control, proxy } = worker;
        let entered = Entered { root, proc_self_fd };
        Self { listener, control, entered, proxy, no_window, _locks }
    }
}

/// Listens and enters the sandbox.
fn begin(options: &Options) -> Result<Begun, Box<dyn Error>> {
    options.deprecated().for_each(|text| tracing::warn!("{text}"));
    options.shared_dirs().into_iter().try_for_each(check_shared_dir)?;
    let mut sandbox = options.sandbox_settings();
    sandbox::check(&sandbox)?;
    let (listener, pid_file) = listen(options)?;
    let control = options.control_path.as_deref().map(listen::bind_private).transpose()?;
    let (control, control_pid_file) = control.map(|bound| (bound.listener, bound.pid_file)).unzip();
    let locks: Vec<File> = pid_file.into_iter().chain(control_pid_file).collect();
    limits::set_nofile(options.rlimit_nofile)?;
    let supervised = check_threads(options)?;
    let (proxy, no_window) = start_proxy(options)?;
    sandbox.helper = proxy.as_ref().map(Proxy::pid);
    let mut kept = (listener, control, proxy);
    if supervised {
        match sandbox::enter_supervised(&sandbox, kept)? {
            Side::Parent(first, channel) => {
                let locks = locks.into_iter().map(OwnedFd::from).collect();
                Parent::new(first, channel, locks, sandbox.helper).watch()
            }
            Side::First(inside, namespaces, (listener, control, proxy)) => {
                limit_capabilities(options)?;
                let worker = supervise::start(inside, namespaces, listener, control, proxy, options.keep_alive)?;
                return Ok(Begun::worker(worker, no_window, locks));
            }
            Side::Unable(_, why) if options.supervise == Supervise::Always => return Err(why.into()),
            Side::Unable(back, why) => {
                say_alone(&why);
                kept = back;
            }
        }
    }
    let (entered, (listener, control, proxy)) = sandbox::enter(&sandbox, kept)?;
    limit_capabilities(options)?;
    Ok(Begun { listener, control, entered, proxy, no_window, _locks: locks })
}

fn say_alone(why: &sandbox::Error) {
    tracing::info!("another process will not go on if this daemon is killed: {why}");
}

/// Sees whether the daemon may have the processes and threads that it needs. Whether one of them is to be a supervisor.
fn check_threads(options: &Options) -> Result<bool, sandbox::Error> {
    let wanted = options.wants_supervisor();
    match limits::check_threads(options.least_threads(wanted)) {
        Err(why) if wanted && options.supervise == Supervise::Auto => {
            limits::check_threads(options.least_threads(false))?;
            say_alone(&why);
            Ok(false)
        }
        done => done.map(|()| wanted),
    }
}

/// Takes over from the supervisor of another program.
fn succeed(options: &Options, inside: Inside, from: Successor) -> Result<Begun, Box<dyn Error>> {
    limit_capabilities(options)?;
    let can_go_on = |root, proc_self_fd, session: Option<(u64, u32)>| {
        let fs = start_fs(options.fs.clone(), Entered { root, proc_self_fd });
        let checked = fs.and_then(|fs| {
            let server = Server::new(fs);
            session.map_or(Ok(()), |(session, _)| server.check(session)).map_err(Box::from)
        });
        checked.inspect_err(|e| tracing::error!("this program cannot go on: {e}")).is_ok()
    };
    let worker = supervise::take_over(inside, from, options.keep_alive, can_go_on)?;
    Ok(Begun::worker(worker, NO_WINDOW.into(), Vec::new()))
}

/// Each thread has its own capabilities, so they are dropped before any thread starts.
fn limit_capabilities(options: &Options) -> Result<(), sandbox::Error> {
    let opens_handles = options.fs.inode_file_handles != FileHandles::Never || options.fs.migration.trust_handles;
    caps::limit(&options.modcaps.clone().unwrap_or_default(), opens_handles)
}

/// # Errors
/// Says what is in the way of the shared directory.
fn check_shared_dir(dir: &Path) -> Result<(), String> {
    let shown = dir.display();
    match dir.metadata() {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => Err(format!("'{shown}' is not a directory: choose another --shared-dir")),
        Err(e) if e.kind() == ErrorKind::NotFound => {
            Err(format!("the directory '{shown}' does not exist: create it, or choose another --shared-dir"))
        }
        Err(e) if e.kind() == ErrorKind::PermissionDenied => Err(format!(
            "--shared-dir '{shown}' is out of reach: the daemon's user may not search a directory above it"
        )),
        Err(e) => Err(format!("cannot find --shared-dir '{shown}': {e}")),
    }
}

/// The socket, and the pid file whose lock reserves it.
fn listen(options: &Options) -> Result<(UnixListener, Option<File>), listen::Error> {
    match (options.fd, options.socket()) {
        (None, Some(path)) => {
            let bound = listen::bind(path, options.socket_group.as_deref())?;
            Ok((bound.listener, Some(bound.pid_file)))
        }
        (fd, _) => Ok((listen::inherit(fd.unwrap_or(-1))?, None)),
    }
}

/// Starts the process that makes files mappable, if a window was requested. Also returns why there is none.
fn start_proxy(options: &Options) -> Result<(Option<Proxy>, String), Box<dyn Error>> {
    let windows = [options.dax_window, options.passthrough_window];
    if windows.iter().all(|window| window.size == 0) {
        return Ok((None, NO_WINDOW.into()));
    }
    let required = windows.iter().any(|window| window.required);
    if options.shared_dirs().into_iter().any(fs::is_remote) {
        // Another host may truncate a file, which no guard here can hold up. QEMU would get SIGBUS.
        let reason = "the shared directory is on a network, cluster or FUSE file system, where others change files \
                      unnoticed";
        if required {
            return Err(format!("cannot create a window: {reason}").into());
        }
        tracing::warn!("continuing without a window: {reason}");
        return Ok((None, reason.into()));
    }
    match proxy::start(options.window_guard, proxy::DEADLINE, options.seccomp) {
        Ok(proxy) => {
            if let (Guard::Off(_), GuardMode::Fanotify) = (proxy.guard(), options.window_guard) {
                tracing::warn!("{}", proxy.guard());
            }
            if let Some(why) = proxy.shared_group() {
                tracing::warn!(
                    "if the daemon's control group is frozen or its CPU is limited, host processes wait that open or \
                     change mapped files: their guard cannot leave {why}"
                );
            }
            Ok((Some(proxy), String::new()))
        }
        Err(error) if required => Err(format!("cannot create a window: {error}").into()),
        Err(error) => {
            tracing::warn!("continuing without a window: {error}");
            Ok((None, error.to_string()))
        }
    }
}

fn start_window(options: &Options, proxy: Option<Proxy>) -> Result<Option<Arc<Window>>, Box<dyn Error>> {
    let Some(proxy) = proxy else { return Ok(None) };
    Ok(Some(Window::new(options.dax_window.size, options.passthrough(), Arc::new(proxy))?))
}

/// Without a watch, the guest has ordinary timeouts. Also returns why there is none.
fn start_watch() -> (Option<Watch>, Option<String>) {
    match Watch::new() {
        Ok(watch) => (Some(watch), None),
        Err(e) => {
            tracing::info!("the share is not watched for changes by others: {e}");
            (None, Some(e.to_string()))
        }
    }
}

fn start_fs(config: fs::Config, entered: Entered) -> Result<PassthroughFs, Box<dyn Error>> {
    let (handles, keeps_owners) = (config.inode_file_handles, config.ownership == fs::Ownership::Xattr);
    PassthroughFs::new(entered.root, entered.proc_self_fd, config).map_err(|e| match handles {
        _ if keeps_owners && e.kind() == ErrorKind::Unsupported => {
            "--ownership=xattr needs a file system with extended attributes of users: ext4, XFS, Btrfs, F2FS, or tmpfs \
             since Linux 6.6"
                .into()
        }
        FileHandles::Mandatory => {
            format!("cannot use file handles for this share: {e}: use --inode-file-handles=prefer, or run as root")
                .into()
        }
        _ => format!("cannot serve the directory: {e}").into(),
    })
}
