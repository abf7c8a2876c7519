//! The daemons of this host, and what they say on their control sockets (docs/control.md).

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;

/// How long a daemon may take to answer: it takes milliseconds, and a hung one must not hang its watcher.
const PATIENCE: Duration = Duration::from_secs(2);

/// The longest answer that is read: all metrics have some 100 KiB.
const LONGEST: u64 = 16 << 20;

/// A running daemon.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Daemon {
    /// The process that was started. 0 if only the socket is known.
    pub pid: u32,
    pub socket: PathBuf,
}

impl Daemon {
    /// GET of a path that answers JSON.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, String> {
        serde_json::from_str(&self.text(path)?)
            .map_err(|e| format!("{}{path} is not understood: {e}", self.socket.display()))
    }

    /// GET of a path.
    pub fn text(&self, path: &str) -> Result<String, String> {
        let answer = self.ask(path).map_err(|e| {
            format!(
                "no answer on '{}': {e}: see that the daemon runs and that this user may connect",
                self.socket.display()
            )
        })?;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        match head.split(' ').nth(1) {
            Some("200") => Ok(body.to_owned()),
            _ => Err(format!("'{}' refuses {path}: {}", self.socket.display(), body.trim())),
        }
    }

    fn ask(&self, path: &str) -> io::Result<String> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        // HTTP/1.0: the answer comes in one piece, and then the connection ends.
        write!(stream, "GET {path} HTTP/1.0\r\nHost: _\r\n\r\n")?;
        let mut answer = String::new();
        stream.take(LONGEST).read_to_string(&mut answer)?;
        Ok(answer)
    }
}

/// The command lines of all daemons, by process ID.
fn lines(proc: &Path) -> BTreeMap<u32, Vec<String>> {
    let pids =
        fs::read_dir(proc).into_iter().flatten().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut lines: BTreeMap<u32, _> = pids.filter_map(|pid| Some((pid, command_line(proc, pid)?))).collect();
    // A daemon's children have its command line, and other roots.
    let has_parent = |pid: &u32| parent(proc, *pid).is_some_and(|parent| lines.contains_key(&parent));
    let children: HashSet<u32> = lines.keys().copied().filter(has_parent).collect();
    lines.retain(|pid, _| !children.contains(pid));
    lines
}

/// The process IDs of all daemons.
pub fn pids(proc: &Path) -> Vec<u32> {
    lines(proc).into_keys().collect()
}

/// The daemons with --control-path that this user can see, by process ID.
pub fn all(proc: &Path) -> Vec<Daemon> {
    let mut seen = HashSet::new();
    let found = lines(proc).into_iter().filter_map(|(pid, line)| {
        let socket = place(&proc.join(pid.to_string()), control_path(&line)?)?;
        let meta = fs::metadata(&socket).ok()?;
        seen.insert((meta.dev(), meta.ino())).then_some(Daemon { pid, socket })
    });
    found.collect()
}

/// The daemon with this process ID or socket, or all of them.
///
/// # Errors
/// There is none.
pub fn find(which: Option<&str>) -> Result<Vec<Daemon>, String> {
    let running = all(Path::new("/proc"));
    match which {
        None if running.is_empty() => {
            Err("no daemon with a control socket runs here: start thruwayd with --control-path PATH, or be its user"
                .into())
        }
        None => Ok(running),
        Some(which) => match which.parse::<u32>() {
            Ok(pid) => {
                let up = parent(Path::new("/proc"), pid);
                let is = |daemon: &&Daemon| daemon.pid == pid || Some(daemon.pid) == up;
                let found = running.iter().find(is).cloned().ok_or_else(|| {
                    format!("process {pid} is no daemon with a control socket: thruway status without PID shows all")
                });
                found.map(|daemon| vec![daemon])
            }
            Err(_) => Ok(vec![Daemon { pid: 0, socket: which.into() }]),
        },
    }
}

fn command_line(proc: &Path, pid: u32) -> Option<Vec<String>> {
    let text = fs::read(proc.join(pid.to_string()).join("cmdline")).ok()?;
    let words: Vec<_> = text.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    (Path::new(words.first()?).file_name()? == "thruwayd").then_some(words)
}

fn parent(proc: &Path, pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(proc.join(pid.to_string()).join("stat")).ok()?;
    // The name, which may have spaces, ends with the last parenthesis. State and parent follow.
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// The last --control-path.
fn control_path(line: &[String]) -> Option<&str> {
    let next = |at: usize| line.get(at + 1).map(String::as_str);
    let of = |(at, word): (usize, &'_ String)| (word == "--control-path").then(|| next(at)).flatten();
    let joined = line.iter().filter_map(|word| word.strip_prefix("--control-path=")).next_back();
    joined.or_else(|| line.iter().enumerate().filter_map(of).next_back())
}

/// Where this process sees a path of another one.
fn place(process: &Path, path: &str) -> Option<PathBuf> {
    let candidates = match path.strip_prefix('/') {
        None => vec![process.join("cwd").join(path)],
        Some(rest) => vec![PathBuf::from(path), process.join("root").join(rest)],
    };
    candidates.into_iter().find(|path| path.exists())
}

type Labels = BTreeMap<String, String>;

/// Counters of a daemon at one moment: by name, each series by its labels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counters(BTreeMap<String, Vec<(Labels, f64)>>);

impl Counters {
    /// Reads OpenMetrics text. What it does not understand is left out.
    pub fn read(text: &str) -> Self {
        let mut all = Self::default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let Ok(value) = value.parse() else { continue };
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let labels = labels.trim_end_matches('}').split("\",").filter_map(|label| {
                let (name, value) = label.split_once("=\"")?;
                Some((name.to_owned(), value.trim_end_matches('"').to_owned()))
            });
            all.0.entry(name.to_owned()).or_default().push((labels.collect(), value));
        }
        all
    }

    /// The sum of all series of this name with this label.
    pub fn of(&self, name: &str, label: Option<(&str, &str)>) -> f64 {
        let is = |labels: &Labels| label.is_none_or(|(key, value)| labels.get(key).is_some_and(|v| v == value));
        self.0.get(name).into_iter().flatten().filter(|(labels, _)| is(labels)).map(|(_, value)| value).sum()
    }

    /// The values of a label.
    pub fn values(&self, name: &str, label: &str) -> Vec<&str> {
        self.0.get(name).into_iter().flatten().filter_map(|(labels, _)| labels.get(label).map(String::as_str)).collect()
    }

    /// The requests of each class of latency, by its upper bound in seconds; since `before`.
    fn classes(&self, before: &Self, opcode: Option<&str>) -> Vec<(f64, f64)> {
        let sums = |all: &Self| {
            let mut classes = BTreeMap::<u64, f64>::new();
            for (labels, value) in all.0.get("thruway_request_seconds_bucket").into_iter().flatten() {
                let bound = labels.get("le").and_then(|le| le.parse::<f64>().ok()).unwrap_or(f64::INFINITY);
                if opcode.is_none_or(|opcode| labels.get("opcode").is_some_and(|o| o == opcode)) {
                    // Positive numbers have the order of their bits.
                    *classes.entry(bound.to_bits()).or_default() += value;
                }
            }
            classes
        };
        let old = sums(before);
        sums(self)
            .into_iter()
            .map(|(bound, n)| (f64::from_bits(bound), n - old.get(&bound).copied().unwrap_or(0.0)))
            .collect()
    }

    /// The time in seconds within which this part of the requests since `before` was answered: the bound of its class.
    /// None if there were none.
    pub fn quantile(&self, before: &Self, opcode: Option<&str>, part: f64) -> Option<f64> {
        // The classes' counts include the classes below.
        let classes = self.classes(before, opcode);
        let total = classes.last().map_or(0.0, |(_, n)| *n);
        let last = classes.iter().rev().find(|(bound, _)| bound.is_finite()).map(|(bound, _)| *bound);
        let found = classes.iter().find(|(_, n)| *n >= part * total).map(|(bound, _)| *bound);
        found.filter(|_| total > 0.0).map(|bound| if bound.is_finite() { bound } else { last.unwrap_or(bound) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn daemons_are_found_once_and_by_any_path() {
        let dir = tempfile::tempdir().unwrap();
        let proc = dir.path();
        let process = |pid: u32, parent: u32, line: &str| {
            let dir = proc.join(pid.to_string());
            fs::create_dir_all(dir.join("cwd")).unwrap();
            fs::write(dir.join("cmdline"), line.replace(' ', "\0")).unwrap();
            fs::write(dir.join("stat"), format!("{pid} (a) b) S {parent} 0")).unwrap();
        };
        let absolute = proc.join("socket");
        fs::write(&absolute, "").unwrap();
        process(10, 1, &format!("/usr/bin/thruwayd --control-path={}", absolute.display()));
        process(11, 10, &format!("/usr/bin/thruwayd --control-path={}", absolute.display()));
        process(12, 1, "thruwayd --control-path relative --xattr");
        fs::write(proc.join("12/cwd/relative"), "").unwrap();
        process(13, 1, "thruwayd --xattr");
        process(14, 1, "cat --control-path relative");
        process(15, 1, "thruwayd --control-path /nowhere/in/a/container");
        fs::create_dir_all(proc.join("15/root/nowhere/in/a")).unwrap();
        fs::write(proc.join("15/root/nowhere/in/a/container"), "").unwrap();
        let daemon = |pid, socket| Daemon { pid, socket };
        let container = proc.join("15/root/nowhere/in/a/container");
        assert_eq!(all(proc), [daemon(10, absolute), daemon(12, proc.join("12/cwd/relative")), daemon(15, container)]);
    }

    #[test]
    fn latencies_are_those_of_the_time_between() {
        let counters = |slow: u32| {
            let text = format!(
                "# TYPE x counter\nthruway_requests_total{{opcode=\"READ\"}} {}\n\
                 thruway_request_seconds_bucket{{le=\"0.001\",opcode=\"READ\"}} 90\n\
                 thruway_request_seconds_bucket{{le=\"0.002\",opcode=\"READ\"}} {n}\n\
                 thruway_request_seconds_bucket{{le=\"+Inf\",opcode=\"READ\"}} {n}\nbad\n# EOF\n",
                90 + slow,
                n = 90 + slow
            );
            Counters::read(&text)
        };
        let (before, now) = (counters(1), counters(11));
        assert_eq!(now.of("thruway_requests_total", Some(("opcode", "READ"))), 101.0);
        assert_eq!(now.quantile(&Counters::default(), None, 0.5), Some(0.001));
        assert_eq!(now.quantile(&before, Some("READ"), 0.5), Some(0.002));
        assert_eq!(now.quantile(&now, None, 0.5), None);
    }
}
