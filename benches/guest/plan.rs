//! What is measured, with what, and what is wanted of it.

/// Contenders that do the same jobs in the same kind of guest.
pub struct Table {
    /// Names its plot too.
    pub name: &'static str,
    pub title: &'static str,
    /// For `vm-images/boot`.
    pub boot: &'static [&'static str],
    /// The first is what the others are compared with.
    pub contenders: &'static [Contender],
    pub jobs: &'static [Job],
    /// Size of the file that is worked on.
    pub file_mib: usize,
}

pub struct Contender {
    pub name: &'static str,
    pub daemon: Daemon,
    pub daemon_args: &'static str,
    /// More for `vm-images/boot`.
    pub boot: &'static [&'static str],
    pub goals: &'static [Goal],
}

#[derive(Clone, Copy)]
pub enum Daemon {
    Virtiofsd,
    Thruwayd,
    /// None: the guest works on a file of its own, on a file system that `bench.sh` makes.
    Native(&'static str),
}

pub enum Goal {
    /// So many times the first contender in this job.
    Ratio(&'static str, f64),
    /// So many times this contender in this job.
    Over(&'static str, &'static str, f64),
    /// At most this median in this job.
    AtMost(&'static str, f64),
    /// No job is slower than with the first contender by more than noise.
    NotBelow,
}

pub struct Job {
    pub name: &'static str,
    pub title: &'static str,
    pub measure: Measure,
}

pub enum Measure {
    /// I/O operations a second, by fio with these arguments.
    Fio(&'static str),
    /// The median of `first-touch.py`, in µs.
    FirstTouch,
    /// What `build.py` says, in seconds. The requests are counted.
    Build,
}

impl Measure {
    pub fn unit(&self) -> &'static str {
        match self {
            Self::Fio(_) => "IOPS",
            Self::FirstTouch => "µs",
            Self::Build => "s",
        }
    }

    pub fn more_is_better(&self) -> bool {
        matches!(self, Self::Fio(_))
    }
}

/// What is measured in the daemon of a contender with a passthrough window: µs from the file's first OPEN to its answer.
pub const FIRST_OPEN: &str = "first-open";

/// What is measured in the daemon of a contender with a DAX window: µs from a SETUPMAPPING to its answer.
pub const SETUPMAPPING: &str = "setupmapping";

/// With so many live mappings: the target's number, up to the end of what `first-touch.py` maps.
pub const SETUPMAPPING_LIVE: std::ops::Range<u64> = 64..96;

pub const TABLES: &[Table] = &[STOCK, PATCHED, BUILD];

const VIRTIOFSD: Contender =
    Contender { name: "virtiofsd", daemon: Daemon::Virtiofsd, daemon_args: "", boot: &[], goals: &[] };

const THRUWAYD: Contender =
    Contender { name: "thruwayd", daemon: Daemon::Thruwayd, daemon_args: "", boot: &[], goals: &[Goal::NotBelow] };

const DAX: Contender = Contender {
    name: "thruwayd, DAX",
    daemon: Daemon::Thruwayd,
    daemon_args: "--dax-window 512M",
    boot: &["--dax", "--mount-opts", "dax=always"],
    // From issue 3.
    goals: &[
        Goal::Ratio("write", 12.0),
        Goal::Ratio("read", 1.6),
        Goal::Ratio("randread", 8.0),
        Goal::Ratio("randwrite", 10.0),
        Goal::Ratio("mmap-randread", 50.0),
        Goal::AtMost(SETUPMAPPING, 1000.0),
    ],
};

const STOCK: Table = Table {
    name: "qemu",
    title: "QEMU guest with one CPU",
    boot: &["--kind", "qemu"],
    // The targets', and room for the ranges that `first-touch.py` touches.
    file_mib: 256,
    contenders: &[VIRTIOFSD, THRUWAYD, DAX],
    jobs: &[
        fio("write", "write 4k, sequential", "--rw=write --bs=4k --ioengine=psync"),
        fio("read", "read 4k, sequential", "--rw=read --bs=4k --ioengine=psync"),
        fio("randread", "read 4k, random", "--rw=randread --bs=4k --ioengine=psync"),
        fio("randwrite", "write 4k, random", "--rw=randwrite --bs=4k --ioengine=psync"),
        fio("mmap-randread", "mmap read 4k, random", "--rw=randread --bs=4k --ioengine=mmap"),
        Job { name: "first-touch", title: "first touch of a 2 MiB range, p50", measure: Measure::FirstTouch },
    ],
};

/// From issue 4: 4k then 128k.
const PASSTHROUGH_GOALS: &[Goal] = &[
    Goal::Ratio("write", 16.0),
    Goal::Ratio("read", 1.7),
    Goal::Ratio("randread", 16.0),
    Goal::Ratio("randwrite", 16.0),
    Goal::Ratio("mmap-randread", 50.0),
    Goal::Over("tmpfs", "write", 1.05),
    Goal::Over("tmpfs", "read", 1.05),
    Goal::Over("tmpfs", "randread", 1.05),
    Goal::Over("tmpfs", "randwrite", 1.05),
    Goal::Over("tmpfs", "mmap-randread", 1.05),
    Goal::Over("tmpfs", "write-128k", 1.0),
    Goal::Over("tmpfs", "read-128k", 1.0),
    Goal::Over("tmpfs", "randread-128k", 1.0),
    Goal::Over("tmpfs", "randwrite-128k", 1.0),
    Goal::Over("thruwayd, DAX", "randread", 1.2),
    Goal::Over("thruwayd, DAX", "randwrite", 1.2),
    Goal::AtMost(FIRST_OPEN, 2000.0),
];

const PATCHED: Table = Table {
    name: "passthrough",
    title: "QEMU guest with one CPU and guest-kernel/, a file of 1 GiB",
    // 3 GiB: the file twice, as of a RAM disk's it has a page cache, and what the guest needs.
    boot: &["--kind", "qemu", "--mem", "3072", "--kernel", "target/guest-kernel/bzImage"],
    file_mib: 1024,
    contenders: &[
        VIRTIOFSD,
        THRUWAYD,
        Contender { goals: &[], ..DAX },
        Contender {
            name: "thruwayd, passthrough",
            daemon: Daemon::Thruwayd,
            daemon_args: "--passthrough-window 2G",
            boot: &["--dax"],
            goals: PASSTHROUGH_GOALS,
        },
        Contender { name: "tmpfs", daemon: Daemon::Native("tmpfs"), daemon_args: "", boot: &[], goals: &[] },
        Contender {
            name: "ext4, RAM disk",
            daemon: Daemon::Native("ext4"),
            daemon_args: "",
            // In KiB: the file and an eighth for the file system.
            boot: &["--kernel-args", "brd.rd_size=1179648"],
            goals: &[],
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
    ],
};

const BUILD: Table = Table {
    name: "build",
    title: "QEMU guest with one CPU and guest-kernel/, building a C project",
    boot: &["--kind", "qemu", "--mem", "1024", "--kernel", "target/guest-kernel/bzImage"],
    file_mib: 1,
    contenders: &[
        VIRTIOFSD,
        THRUWAYD,
        Contender {
            name: "thruwayd, passthrough",
            daemon: Daemon::Thruwayd,
            daemon_args: "--passthrough-window 256M",
            boot: &["--dax"],
            goals: &[Goal::NotBelow],
        },
        Contender { name: "tmpfs", daemon: Daemon::Native("tmpfs"), daemon_args: "", boot: &[], goals: &[] },
    ],
    jobs: &[Job { name: "build", title: "unpack and build 17 files", measure: Measure::Build }],
};

const fn fio(name: &'static str, title: &'static str, arguments: &'static str) -> Job {
    Job { name, title, measure: Measure::Fio(arguments) }
}
