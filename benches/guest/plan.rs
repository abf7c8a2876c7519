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
}

pub enum Goal {
    /// So many times the first contender in this job.
    Ratio(&'static str, f64),
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
}

impl Measure {
    pub fn unit(&self) -> &'static str {
        match self {
            Self::Fio(_) => "IOPS",
            Self::FirstTouch => "µs",
        }
    }

    pub fn more_is_better(&self) -> bool {
        matches!(self, Self::Fio(_))
    }
}

/// What is measured in the daemon of a contender with a DAX window: µs from a SETUPMAPPING to its answer.
pub const SETUPMAPPING: &str = "setupmapping";

/// With so many live mappings: the target's number, up to the end of what `first-touch.py` maps.
pub const SETUPMAPPING_LIVE: std::ops::Range<u64> = 64..96;

/// Size of the file that is worked on: the targets', and room for the ranges that `first-touch.py` touches.
pub const FILE_MIB: usize = 256;

pub const TABLES: &[Table] = &[Table {
    name: "qemu",
    title: "QEMU guest with one CPU",
    boot: &["--kind", "qemu"],
    contenders: &[
        Contender { name: "virtiofsd", daemon: Daemon::Virtiofsd, daemon_args: "", boot: &[], goals: &[] },
        Contender { name: "thruwayd", daemon: Daemon::Thruwayd, daemon_args: "", boot: &[], goals: &[Goal::NotBelow] },
        Contender {
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
        },
    ],
    jobs: &[
        Job {
            name: "write",
            title: "write 4k, sequential",
            measure: Measure::Fio("--rw=write --bs=4k --ioengine=psync"),
        },
        Job { name: "read", title: "read 4k, sequential", measure: Measure::Fio("--rw=read --bs=4k --ioengine=psync") },
        Job {
            name: "randread",
            title: "read 4k, random",
            measure: Measure::Fio("--rw=randread --bs=4k --ioengine=psync"),
        },
        Job {
            name: "randwrite",
            title: "write 4k, random",
            measure: Measure::Fio("--rw=randwrite --bs=4k --ioengine=psync"),
        },
        Job {
            name: "mmap-randread",
            title: "mmap read 4k, random",
            measure: Measure::Fio("--rw=randread --bs=4k --ioengine=mmap"),
        },
        Job { name: "first-touch", title: "first touch of a 2 MiB range, p50", measure: Measure::FirstTouch },
    ],
}];
