//! The tables: their contenders, jobs and targets.

/// Contenders that do the same jobs in the same kind of guest.
pub struct Table {
    /// Also the name of its plot.
    pub name: &'static str,
    pub title: &'static str,
    /// Arguments of `vm-images/boot`.
    pub boot: &'static [&'static str],
    /// The first ones are [`Daemon::Virtiofsd`]. The others are compared with the best of these in each row.
    pub contenders: &'static [Contender],
    pub jobs: &'static [Job],
    /// Size of the file that the jobs work on, unless the run is quick.
    file_mib: usize,
    /// Duration of fio's and `meta.py`'s jobs, unless the run is quick.
    pub seconds: u32,
    /// Keep idle CPUs from halting: wake-ups cost the same for all contenders that send messages, and are most of the
    /// noise. False for tables with contenders that send none, since the wake-ups are part of what these save.
    pub awake: bool,
    /// The share is an ext4, as in use, and not a tmpfs: what the host's file system tells of changes decides what a
    /// guest may keep. Each turn has a new one.
    pub on_disk: bool,
}

impl Table {
    /// Size of the file that the jobs work on: more than the 128 MiB that `first-touch.py` does not time.
    pub fn file_mib(&self, quick: bool) -> usize {
        if quick { self.file_mib.min(256) } else { self.file_mib }
    }

    /// How many contenders are virtiofsd.
    pub fn peers(&self) -> usize {
        self.contenders.iter().filter(|c| matches!(c.daemon, Daemon::Virtiofsd)).count()
    }

    pub fn native(&self) -> Option<&Contender> {
        self.contenders.iter().find(|c| matches!(c.daemon, Daemon::Native(_)))
    }
}

pub struct Contender {
    pub name: &'static str,
    pub daemon: Daemon,
    pub daemon_args: &'static str,
    /// Further arguments of `vm-images/boot`.
    pub boot: &'static [&'static str],
    /// The guest agent runs in the guest.
    pub agent: bool,
    pub goals: &'static [Goal],
}

#[derive(Clone, Copy)]
pub enum Daemon {
    Virtiofsd,
    Thruwayd,
    /// No daemon: the guest works on its own file, on a file system of this type that `bench.sh` makes.
    Native(&'static str),
}

/// A target: jobs and contenders are named, figures are medians.
pub enum Goal {
    /// In this job, at least this many times the best virtiofsd.
    Ratio(&'static str, f64),
    /// At least this many times that contender, in the job named second.
    Over(&'static str, &'static str, f64),
    /// In each job at least this many times that contender, and at least so many times in the median of the jobs.
    OverAll(&'static str, f64, f64),
    /// At most this many µs, measured in the daemon.
    AtMost(&'static str, f64),
    /// No job is slower than with virtiofsd, beyond noise.
    NotBelow,
    /// The median of all rows is at least this many times virtiofsd.
    MedianRow(f64),
    /// In this job, at most this part of the messages that the contender named second sends.
    Share(&'static str, &'static str, f64),
    /// In this job, at most so many messages.
    Messages(&'static str, u64),
    /// In this job, at most this part longer than in the guest's own file system: 0.06 is 6 %.
    Longer(&'static str, f64),
    /// In this job, at most so many ms.
    Within(&'static str, f64),
}

pub struct Job {
    pub name: &'static str,
    pub title: &'static str,
    pub measure: Measure,
}

pub enum Measure {
    /// I/O operations per second, by fio with these arguments and this many jobs. Each works on its own part of the
    /// file.
    Fio(&'static str, u32),
    /// The median that `first-touch.py` reports, in µs. It touches this many ranges of 2 MiB, and times them after 64.
    FirstTouch(u32),
    /// The time that `build.py` reports, in seconds. Requests are counted too.
    Build,
    /// Operations per second, by `meta.py` with these arguments.
    Meta(&'static str),
    /// The time that `names.py` reports for this step, in seconds. Requests are counted too.
    Names(&'static str),
    /// A percentile of the time from a change on the host until the guest sees it, in ms, by `seen.py` with these
    /// arguments. The host changes a file all the time.
    Seen(&'static str),
}

impl Measure {
    pub fn unit(&self) -> &'static str {
        match self {
            Self::Fio(..) => "IOPS",
            Self::FirstTouch(_) => "µs",
            Self::Build | Self::Names(_) => "s",
            Self::Meta(_) => "ops/s",
            Self::Seen(_) => "ms",
        }
    }

    pub fn more_is_better(&self) -> bool {
        matches!(self, Self::Fio(..) | Self::Meta(_))
    }

    /// Whether the report has the messages that the job sends.
    pub fn counts_messages(&self) -> bool {
        matches!(self, Self::Build | Self::Names(_))
    }
}

/// Measured in a daemon with a passthrough window: µs from the file's first OPEN to its reply.
pub const FIRST_OPEN: &str = "first-open";

/// Measured in a daemon with a DAX window: µs from a SETUPMAPPING to its reply.
pub const SETUPMAPPING: &str = "setupmapping";

/// SETUPMAPPING is timed with this many live mappings: from the target's 64 to the last that `first-touch.py` makes.
pub const SETUPMAPPING_LIVE: std::ops::Range<u64> = 64..96;

/// The kernel that `guest-kernel/build` builds.
pub const GUEST_KERNEL: &str = "target/guest-kernel/bzImage";

/// The kind of guest that `vm-images/setup.sh` builds from Linux's source.
pub const UML: &str = "uml-smp";

pub const TABLES: &[Table] = &[
    STOCK,
    PATCHED,
    BUILD,
    BUILD_ALWAYS,
    NAMES,
    NAMES_ALWAYS,
    SEEN,
    UML_JOBS,
    QEMU_JOBS,
    UML_WRITEBACK,
    QEMU_WRITEBACK,
];

/// Long enough for the slower contenders to pass through the file once, and a short run in all.
const SECONDS: u32 = 5;
/// For tables with many rows: 2 s are still many requests.
const SECONDS_OF_MANY: u32 = 2;

const VIRTIOFSD: Contender =
    Contender { name: "virtiofsd", daemon: Daemon::Virtiofsd, daemon_args: "", boot: &[], agent: false, goals: &[] };

const THRUWAYD: Contender =
    Contender { name: "thruwayd", daemon: Daemon::Thruwayd, goals: &[Goal::NotBelow], ..VIRTIOFSD };

const AGENT: Contender = Contender { name: "thruwayd, agent", agent: true, ..THRUWAYD };

const AGENT_ALWAYS: Contender =
    Contender { name: "thruwayd, agent, --cache=always", daemon_args: "--cache=always", ..AGENT };

const DAX: Contender = Contender {
    name: "thruwayd, DAX",
    daemon_args: "--dax-window 512M",
    boot: &["--dax", "--mount-opts", "dax=always"],
    // The targets of DAX.
    goals: &[
        Goal::Ratio("write", 12.0),
        Goal::Ratio("read", 1.6),
        Goal::Ratio("randread", 8.0),
        Goal::Ratio("randwrite", 10.0),
        Goal::Ratio("mmap-randread", 50.0),
        Goal::AtMost(SETUPMAPPING, 1000.0),
    ],
    ..THRUWAYD
};

const STOCK: Table = Table {
    name: "qemu",
    title: "QEMU guest with one CPU",
    boot: &["--kind", "qemu"],
    // The size that the targets are for; the ranges that `first-touch.py` touches fit too.
    file_mib: 256,
    seconds: SECONDS,
    awake: false,
    on_disk: false,
    contenders: &[VIRTIOFSD, THRUWAYD, DAX],
    jobs: &[
        fio("write", "write 4k, sequential", "--rw=write --bs=4k --ioengine=psync"),
        fio("read", "read 4k, sequential", "--rw=read --bs=4k --ioengine=psync"),
        fio("randread", "read 4k, random", "--rw=randread --bs=4k --ioengine=psync"),
        fio("randwrite", "write 4k, random", "--rw=randwrite --bs=4k --ioengine=psync"),
        fio("mmap-randread", "mmap read 4k, random", "--rw=randread --bs=4k --ioengine=mmap"),
        // Hardly more than 64 mappings are live at the end.
        Job { name: "first-touch", title: "first touch of a 2 MiB range, p50", measure: Measure::FirstTouch(96) },
    ],
};

/// The targets of passthrough. The guest's own tmpfs needs no host, so it shows what a guest can do at all.
const PASSTHROUGH_GOALS: &[Goal] = &[
    Goal::Ratio("write", 16.0),
    Goal::Ratio("read", 1.7),
    Goal::Ratio("randread", 16.0),
    Goal::Ratio("randwrite", 16.0),
    Goal::Ratio("mmap-randread", 80.0),
    Goal::Ratio("first-touch", 2.0),
    Goal::OverAll("tmpfs", 0.95, 1.0),
    Goal::Over("thruwayd, DAX", "randread", 1.2),
    Goal::Over("thruwayd, DAX", "randwrite", 1.2),
    Goal::AtMost(FIRST_OPEN, 2000.0),
];

const PATCHED: Table = Table {
    name: "passthrough",
    title: "QEMU guest with one CPU and guest-kernel/, a file of 1 GiB",
    // 3 GiB: the file twice (a file on a RAM disk is in the page cache too), and what the guest needs.
    boot: &["--kind", "qemu", "--mem", "3072", "--kernel", GUEST_KERNEL],
    file_mib: 1024,
    seconds: SECONDS,
    awake: false,
    on_disk: false,
    contenders: &[
        VIRTIOFSD,
        THRUWAYD,
        Contender {
            // The file is twice as large as the window. With the kernel's default the daemon leaves it to messages.
            boot: &["--dax", "--mount-opts", "dax=inode"],
            goals: &[
                Goal::Ratio("randread", 0.9),
                Goal::Ratio("randwrite", 0.9),
                Goal::Ratio("mmap-randread", 0.9),
                Goal::Ratio("randread-128k", 0.9),
                Goal::Ratio("randwrite-128k", 0.9),
                Goal::NotBelow,
            ],
            ..DAX
        },
        Contender {
            name: "thruwayd, passthrough",
            daemon_args: "--passthrough-window 2G",
            boot: &["--dax"],
            goals: PASSTHROUGH_GOALS,
            ..THRUWAYD
        },
        Contender {
            name: "thruwayd, passthrough, --xattr",
            daemon_args: "--passthrough-window 2G --xattr",
            boot: &["--dax"],
            // A write must send no GETXATTR of security.capability.
            goals: &[
                Goal::Over("thruwayd, passthrough", "write", 0.95),
                Goal::Over("thruwayd, passthrough", "randwrite", 0.95),
            ],
            ..THRUWAYD
        },
        TMPFS,
        Contender {
            name: "ext4, RAM disk",
            daemon: Daemon::Native("ext4"),
            // In KiB: the file, and an eighth of its size for the file system.
            boot: &["--kernel-args", "brd.rd_size=1179648"],
            ..TMPFS
        },
    ],
    jobs: &[
        fio("write", "overwrite 4k, sequential", "--rw=write --bs=4k --ioengine=psync"),
        fio("read", "read 4k, sequential", "--rw=read --bs=4k --ioengine=psync"),
        fio("randread", "read 4k, random", "--rw=randread --bs=4k --ioengine=psync"),
        fio("randwrite", "overwrite 4k, random", "--rw=randwrite --bs=4k --ioengine=psync"),
        fio("mmap-randread", "mmap read 4k, random", "--rw=randread --bs=4k --ioengine=mmap"),
        fio("write-128k", "overwrite 128k, sequential", "--rw=write --bs=128k --ioengine=psync"),
        fio("read-128k", "read 128k, sequential", "--rw=read --bs=128k --ioengine=psync"),
        fio("randread-128k", "read 128k, random", "--rw=randread --bs=128k --ioengine=psync"),
        fio("randwrite-128k", "overwrite 128k, random", "--rw=randwrite --bs=128k --ioengine=psync"),
        // All of the file: 32 touches take half a millisecond, and one interruption would decide.
        Job { name: "first-touch", title: "first touch of a 2 MiB range, p50", measure: Measure::FirstTouch(512) },
    ],
};

const TMPFS: Contender = Contender { name: "tmpfs", daemon: Daemon::Native("tmpfs"), ..VIRTIOFSD };

/// virtiofsd does not count requests, but it logs them.
const LOGGING: Contender = Contender { name: "virtiofsd, logging", daemon_args: "--log-level debug", ..VIRTIOFSD };

const BUILD: Table = Table {
    name: "build",
    title: "QEMU guest with one CPU, building a C project",
    boot: &["--kind", "qemu", "--mem", "1024"],
    file_mib: 1,
    seconds: SECONDS,
    awake: true,
    on_disk: true,
    contenders: &[
        VIRTIOFSD,
        LOGGING,
        Contender {
            goals: &[Goal::NotBelow, Goal::Share("build", "virtiofsd, logging", 0.75), Goal::Longer("build", 0.18)],
            ..THRUWAYD
        },
        AGENT,
        Contender { goals: &[Goal::NotBelow, Goal::Share("build", "virtiofsd, logging", 0.25)], ..AGENT_ALWAYS },
        TMPFS,
    ],
    jobs: &[BUILD_JOB],
};

const BUILD_ALWAYS: Table = Table {
    name: "build-always",
    title: "QEMU guest with one CPU, a build with --cache=always",
    contenders: &[
        Contender { name: "virtiofsd", daemon_args: "--cache=always", ..VIRTIOFSD },
        Contender { daemon_args: "--cache=always --log-level debug", ..LOGGING },
        Contender {
            daemon_args: "--cache=always",
            goals: &[Goal::NotBelow, Goal::Share("build", "virtiofsd, logging", 0.45), Goal::Longer("build", 0.12)],
            ..THRUWAYD
        },
        Contender { daemon_args: "--cache=always", ..AGENT },
        TMPFS,
    ],
    ..BUILD
};

const BUILD_JOB: Job = Job { name: "build", title: "unpack and build 17 files", measure: Measure::Build };

const NAMES: Table = Table {
    name: "names",
    title: "User-Mode Linux guest with one CPU, many small files",
    file_mib: 1,
    on_disk: true,
    contenders: &[
        POOL_0,
        POOL_4,
        Contender {
            goals: &[
                Goal::Ratio("status", 1.2),
                Goal::Ratio("again", 1.5),
                Goal::Ratio("untar", 1.2),
                Goal::Ratio("remove", 1.2),
            ],
            ..THRUWAYD
        },
        AGENT,
        // What the guest's own work takes.
        TMPFS,
    ],
    jobs: &[
        names("status", "second git status of 20,000 files, after 5 s", "status 20000"),
        names("again", "stat and read 5,000 files of 4 KiB again, after 5 s", "again 5000"),
        names("untar", "tar x of 5,000 small files", "untar 5000"),
        names("remove", "rm -rf of 5,000 small files", "remove 5000"),
    ],
    ..UML_JOBS
};

const NAMES_ALWAYS: Table = Table {
    name: "names-always",
    title: "User-Mode Linux guest with one CPU, many small files, --cache=always",
    contenders: &[
        Contender { daemon_args: "--thread-pool-size=0 --cache=always", ..POOL_0 },
        Contender { daemon_args: "--thread-pool-size=4 --cache=always", ..POOL_4 },
        Contender {
            daemon_args: "--cache=always",
            goals: &[
                Goal::Ratio("status", 1.5),
                Goal::Ratio("again", 2.0),
                Goal::Ratio("untar", 1.3),
                Goal::Ratio("remove", 1.3),
            ],
            ..THRUWAYD
        },
        Contender {
            daemon_args: "--cache=always",
            goals: &[
                Goal::Messages("status", 0),
                Goal::Messages("again", 0),
                Goal::Longer("status", 0.1),
                Goal::Longer("again", 0.2),
            ],
            ..AGENT
        },
        TMPFS,
    ],
    ..NAMES
};

const SEEN: Table = Table {
    name: "seen",
    title: "User-Mode Linux guest with one CPU, changes on the host",
    file_mib: 1,
    seconds: SECONDS,
    on_disk: true,
    contenders: &[
        VIRTIOFSD,
        Contender { goals: &[], ..THRUWAYD },
        Contender { goals: &[Goal::Within("stat-p99", 10.0), Goal::Within("event-p99", 10.0)], ..AGENT },
        Contender { goals: &[Goal::Within("stat-p99", 10.0), Goal::Within("event-p99", 10.0)], ..AGENT_ALWAYS },
    ],
    jobs: &[
        seen("stat-p50", "a change on the host is seen by stat, p50", "stat 50"),
        seen("stat-p99", "a change on the host is seen by stat, p99", "stat 99"),
        seen("event-p50", "a change on the host is an inotify event, p50", "event 50"),
        seen("event-p99", "a change on the host is an inotify event, p99", "event 99"),
    ],
    ..UML_JOBS
};

const WRITE_1K: Job = fio_jobs("write-1k", "write 1k, 2 jobs", "--rw=write --bs=1k --ioengine=psync", 2);
const WRITE_4K: Job = fio_jobs("write-4k", "write 4k, 2 jobs", "--rw=write --bs=4k --ioengine=psync", 2);
const WRITE_1M: Job = fio_jobs("write-1m", "write 1M, 2 jobs", "--rw=write --bs=1M --ioengine=psync", 2);

/// Reading and writing as in the published measurements of Linux's FUSE patches (passthrough, writeback without
/// temporary pages, io_uring); then metadata.
const REQUEST_JOBS: &[Job] = &[
    fio("read-128k-1", "read 128k, 1 job", "--rw=read --bs=128k --ioengine=psync"),
    fio_jobs("read-128k-2", "read 128k, 2 jobs", "--rw=read --bs=128k --ioengine=psync", 2),
    fio_jobs("read-128k-4", "read 128k, 4 jobs", "--rw=read --bs=128k --ioengine=psync", 4),
    fio_jobs("read-128k-8", "read 128k, 8 jobs", "--rw=read --bs=128k --ioengine=psync", 8),
    fio("read-1m-1", "read 1M, 1 job", "--rw=read --bs=1M --ioengine=psync"),
    fio_jobs("read-1m-2", "read 1M, 2 jobs", "--rw=read --bs=1M --ioengine=psync", 2),
    fio_jobs("read-1m-4", "read 1M, 4 jobs", "--rw=read --bs=1M --ioengine=psync", 4),
    fio_jobs("read-1m-8", "read 1M, 8 jobs", "--rw=read --bs=1M --ioengine=psync", 8),
    fio("direct-1m-1", "read 1M, O_DIRECT, 1 job", "--rw=read --bs=1M --direct=1 --ioengine=psync"),
    fio_jobs("direct-1m-2", "read 1M, O_DIRECT, 2 jobs", "--rw=read --bs=1M --direct=1 --ioengine=psync", 2),
    fio_jobs("direct-1m-4", "read 1M, O_DIRECT, 4 jobs", "--rw=read --bs=1M --direct=1 --ioengine=psync", 4),
    fio_jobs("direct-1m-8", "read 1M, O_DIRECT, 8 jobs", "--rw=read --bs=1M --direct=1 --ioengine=psync", 8),
    // One pass: mapped pages stay in the guest's cache, so a second pass would measure that cache.
    fio("mmap-1", "mmap read 4k, 1 job", "--rw=read --bs=4k --ioengine=mmap --time_based=0 --runtime=0"),
    fio_jobs("mmap-4", "mmap read 4k, 4 jobs", "--rw=read --bs=4k --ioengine=mmap --time_based=0 --runtime=0", 4),
    WRITE_1K,
    WRITE_4K,
    WRITE_1M,
    meta("create-1", "create, 1 process", "create 1"),
    meta("create-2", "create, 2 processes", "create 2"),
    meta("create-4", "create, 4 processes", "create 4"),
    meta("create-8", "create, 8 processes", "create 8"),
    meta("stat", "stat, cold", "stat 1"),
    meta("list", "readdir and stat, cold", "list 1"),
    meta("open", "open and close", "open 1"),
    meta("unlink", "unlink", "unlink 1"),
    BUILD_JOB,
];

const WRITEBACK_JOBS: &[Job] = &[WRITE_1K, WRITE_4K, WRITE_1M];

const POOL_0: Contender = Contender { name: "virtiofsd, pool 0", daemon_args: "--thread-pool-size=0", ..VIRTIOFSD };
const POOL_4: Contender = Contender { name: "virtiofsd, pool 4", daemon_args: "--thread-pool-size=4", ..VIRTIOFSD };

const UML_JOBS: Table = Table {
    name: "uml",
    title: "User-Mode Linux guest with one CPU",
    // Debian's kernel misses the interrupt of a device that answers at once and goes to sleep (vm-images/uml-patches).
    boot: &["--kind", UML, "--cpus", "1"],
    file_mib: 256,
    seconds: SECONDS_OF_MANY,
    awake: true,
    on_disk: false,
    contenders: &[
        POOL_0,
        POOL_4,
        Contender { name: "thruwayd", goals: &[Goal::NotBelow, Goal::MedianRow(1.3)], ..THRUWAYD },
    ],
    jobs: REQUEST_JOBS,
};

const QEMU_JOBS: Table = Table {
    name: "qemu-jobs",
    title: "QEMU guest with one CPU, more jobs",
    boot: &["--kind", "qemu"],
    contenders: &[POOL_0, POOL_4, THRUWAYD],
    ..UML_JOBS
};

const UML_WRITEBACK: Table = Table {
    name: "uml-writeback",
    title: "User-Mode Linux guest with one CPU, writeback",
    contenders: &[
        Contender { name: "virtiofsd --writeback", daemon_args: "--writeback", ..VIRTIOFSD },
        Contender { name: "thruwayd --writeback", daemon_args: "--writeback", ..THRUWAYD },
        Contender { name: "thruwayd", goals: &[], ..THRUWAYD },
    ],
    jobs: WRITEBACK_JOBS,
    ..UML_JOBS
};

const QEMU_WRITEBACK: Table = Table {
    name: "qemu-writeback",
    title: "QEMU guest with one CPU, writeback",
    boot: &["--kind", "qemu"],
    ..UML_WRITEBACK
};

const fn meta(name: &'static str, title: &'static str, arguments: &'static str) -> Job {
    Job { name, title, measure: Measure::Meta(arguments) }
}

const fn names(name: &'static str, title: &'static str, arguments: &'static str) -> Job {
    Job { name, title, measure: Measure::Names(arguments) }
}

const fn seen(name: &'static str, title: &'static str, arguments: &'static str) -> Job {
    Job { name, title, measure: Measure::Seen(arguments) }
}

const fn fio(name: &'static str, title: &'static str, arguments: &'static str) -> Job {
    fio_jobs(name, title, arguments, 1)
}

const fn fio_jobs(name: &'static str, title: &'static str, arguments: &'static str, jobs: u32) -> Job {
    Job { name, title, measure: Measure::Fio(arguments, jobs) }
}
