//! Writes the tables into `benchmarks.md`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use crate::Results;
use crate::frontend;
use crate::host::Result;
use crate::plan::{Contender, Daemon, FIRST_OPEN, Goal, Job, SETUPMAPPING, SETUPMAPPING_LIVE, TABLES, Table};
use crate::plot;
use thruway_bench::report::markdown;
use thruway_bench::series::{Series, median, number};

/// The text between these two lines is generated. The rest of the file is written by hand.
const BEGIN: &str = "<!-- make bench writes from here -->\n";
const END: &str = "<!-- make bench writes to here -->\n";

/// A row that is worse by at most this much is not below: a few rounds differ as much by chance, and no user notices 5
/// %.
const NOISE: f64 = 0.05;

/// `benchmarks.md` before the run.
pub struct Page {
    path: PathBuf,
    before: String,
    /// Its tables, each from its title on.
    sections: Vec<String>,
    after: String,
}

impl Page {
    pub fn open(path: PathBuf) -> Result<Self> {
        let text = match fs::read_to_string(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => format!("# Benchmarks\n\n{BEGIN}{END}"),
            text => text.map_err(|e| format!("cannot read {}: {e}", path.display()))?,
        };
        let parts = text.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?)));
        let Some((before, (ours, after))) = parts else {
            return Err(format!("{}: the lines that mark the generated part are missing", path.display()));
        };
        let sections = ours.split("\n## ").skip(1).map(|section| format!("\n## {}\n", section.trim_end())).collect();
        Ok(Self { path, before: before.into(), sections, after: after.into() })
    }

    /// Writes the document. Tables that were not measured stay.
    pub fn write(&self, results: &Results) -> Result<()> {
        let mut text = format!("{}{BEGIN}{}", self.before, how(results.quick));
        let frontends = frontend::TABLES.iter().map(|table| (table.title, frontend_section(results, table)));
        let guests = TABLES.iter().map(|table| (table.title, guest_section(results, table)));
        for (title, new) in frontends.chain(guests) {
            let head = format!("\n## {title}\n");
            let old = self.sections.iter().find(|section| section.starts_with(&head));
            text += new.as_ref().or(old).map_or("", String::as_str);
        }
        text += &format!("{END}{}", self.after);
        fs::write(&self.path, text).map_err(|e| format!("cannot write {}: {e}", self.path.display()))
    }
}

fn frontend_section(results: &Results, table: &frontend::Table) -> Option<String> {
    let rows = results.rows.get(table.name)?;
    Some(format!("\n## {}\n\n{}\n\n{}", table.title, facts(results), frontend::text(table, rows)))
}

fn guest_section(results: &Results, table: &Table) -> Option<String> {
    let versions = results.versions.get(table.name)?;
    let versions: Vec<_> = versions.iter().map(|(name, value)| format!("{name}: {value}")).collect();
    let mut text = format!("\n## {}\n\n{}; {}\n\n", table.title, facts(results), versions.join("; "));
    let _ = write!(text, "{}\n![{}](plots/{})\n", table_text(results, table), table.title, plot::file_name(table));
    Some(text)
}

fn facts(results: &Results) -> String {
    let facts: Vec<_> = results.facts.iter().map(|(name, value)| format!("{name}: {value}")).collect();
    format!("{}; rounds: {}", facts.join("; "), results.rounds)
}

/// The measured tables, for the terminal.
pub fn tables(results: &Results) -> String {
    let frontends = frontend::TABLES.iter().filter_map(|table| Some((table, results.rows.get(table.name)?)));
    let frontends = frontends.map(|(table, rows)| format!("{}\n{}", table.title, frontend::text(table, rows)));
    frontends.chain(results.tables().map(|table| format!("{}\n{}", table.title, table_text(results, table)))).collect()
}

/// The text on how it was measured.
fn how(quick: bool) -> String {
    let mut text = String::new();
    if quick {
        text += "**From the quick form, which only shows that the harness works. Do not quote these figures.**\n\n";
    }
    let _ = write!(
        text,
        "\
## How it was measured

Each table compares its contenders over several rounds. In each round, each contender has one turn: a guest boots and
does every job of the table. A job that is limited by time runs for 5 s, or for 2 s in the tables with many rows.

- A **figure** is the median of the rounds, followed by the lowest and the highest.
- A **ratio** is taken round by round, because the machine may be slower in one round than in the next. It is above 1
  where the contender is better. Where virtiofsd runs with several settings, the better one of each row is the base.
- ***Not below*** is missed if every round of the contender was worse than every round of virtiofsd, and its median is
  worse by more than {:.0} %.

To repeat it, run `make bench` as root on a machine that does nothing else, or
`make bench ARGS='--rounds 5 --only uml,qemu'`. `cargo run -p xtask -- plots` redraws the plots from the tables.

**The contenders.** virtiofsd and thruwayd run with their defaults: cache mode, sandbox, no O_DIRECT. *Pool 0* and *pool
4* are virtiofsd's `--thread-pool-size`. *DAX* and *passthrough* are thruwayd with `--dax-window` and
`--passthrough-window`. The DAX window has 512 MiB. For the file of 256 MiB the guest has `dax=always`. For the file of
1 GiB it has `dax=inode`, the kernel's default, and the daemon leaves the file to messages. *Agent* is thruwayd with the
guest agent in the guest, so that it may keep names, missing names, attributes and listings for 60 s. *tmpfs* and *ext4*
are the guest's own file systems, without a daemon.

**The jobs.** The share lies in the host's memory (`/dev/shm`). For builds, small files and changes on the host it is an
ext4 in the host's memory (a loop device), new for each turn: ext4 is slow to create files where others were deleted in
the last minutes. fio works at depth 1 on an existing file of 256 MiB, unless the title names another size. With several
jobs, each works on its own part of the file. The rows from *create* to *unlink* are `meta.py`, with one directory per
process. Small files are `names.py`. git runs with GIT_OPTIONAL_LOCKS=0, as editors run it, since a lock file takes
messages. *Changes on the host* are `seen.py`: the host sets a file's modification time to the present every 25 ms, and
the guest looks how late it sees each of these changes. It sets the difference of the two clocks right first, to within
the time that a reply takes. *First touch* maps a file and reads one byte in each range of 2 MiB:
96 ranges of the file of 256 MiB, all 512 of the file of 1 GiB. It takes the median of all reads but the first 64. With
a DAX window, such a read costs a page fault and a SETUPMAPPING with 64 to 95 live mappings; without one, a read with
its readahead. The time of SETUPMAPPING itself is measured in the daemon, until the mapping is in the guest's memory.

**Caches.** Before each job the guest drops what it has cached of the share; the host's cache stays. What the job itself
brings into the guest's cache stays, as it does for users, except that fio drops it (all but mapped pages) when it
starts the file again. Programs stay in the guest's cache. Under QEMU's TCG a job that is given pages which held
programs stalls, by up to 0.6 s in a read of 1 MiB.

**Idle CPUs kept awake.** Where a table says so, the host's idle CPUs did not halt (`/dev/cpu_dma_latency`). Waking a
halted CPU takes a virtual machine 40 µs or more, as its own host pleases. That was most of a request's time and most of
the noise. In tables with contenders that send no messages the CPUs do halt, because the wake-ups are part of what these
contenders save.

**Without a guest.** `thruway-bench` plays the frontend, in one process with one queue. The depth is the number of
operations under way. virtiofsd runs with a thread pool of 0 and of 4, and the better one counts. Ratios of ops/s are
above 1 where thruwayd is better; ratios of CPU time per request and of the 99th percentile are below 1. In the first
two tables the frontend sleeps as soon as it has nothing to do, so each reply has to wake a CPU. In the third it first
polls for 200 µs, KVM's default for a vCPU (halt_poll_ns).

**What emulation hides.** With accelerator tcg, fio itself needs 12 to 15 µs for a call of 4 KiB. Little but mmap can
exceed 80,000 IOPS, and the guest's part of a request weighs more than on a real CPU. Expect other ratios with KVM.
User-Mode Linux runs the guest's code at full speed, but each of its system calls and page faults costs some µs.
",
        NOISE * 100.0
    );
    text
}

fn table_text(results: &Results, table: &Table) -> String {
    let (peers, others) = table.contenders.split_at(table.peers());
    let names = |contenders: &[Contender]| contenders.iter().map(|c| c.name.to_owned()).collect::<Vec<_>>();
    let mut figures = vec![row("median (lowest–highest)", names(table.contenders))];
    let mut ratios =
        vec![row(if peers.len() > 1 { "times the better virtiofsd" } else { "times virtiofsd" }, names(others))];
    for job in table.jobs {
        let cells = table.contenders.iter().map(|c| results.series(table, c, job).to_string());
        figures.push(row(&format!("{}, {}", job.title, job.measure.unit()), cells.collect()));
        ratios.push(row(job.title, others.iter().map(|c| ratio_cell(results, table, c, job)).collect()));
    }
    let daemon = [
        (
            SETUPMAPPING,
            format!("SETUPMAPPING with {} to {} live mappings", SETUPMAPPING_LIVE.start, SETUPMAPPING_LIVE.end - 1),
        ),
        (FIRST_OPEN, "the first OPEN of the file".to_owned()),
    ];
    let daemon: String = daemon.iter().map(|(name, title)| daemon_text(results, table, name, title)).collect();
    let rest = [over_text(results, table), rows_text(results, table), daemon, messages_text(results, table)].concat();
    format!("{}\n{}{rest}", markdown(&figures), markdown(&ratios))
}

/// The messages that a job sends, and a build's time beside one on the guest's tmpfs.
fn messages_text(results: &Results, table: &Table) -> String {
    let mut text = String::new();
    for job in table.jobs.iter().filter(|job| job.measure.counts_messages()) {
        for contender in table.contenders.iter().filter(|c| !matches!(c.daemon, Daemon::Native(_))) {
            let mut said = longer(results, table, contender, job);
            if let Some(requests) =
                requests(results, table, contender, job).filter(|r| total(r) > 0 || has_limit(contender, job))
            {
                said.push(messages(results, table, contender, job, requests));
            }
            if !said.is_empty() {
                let of = if table.jobs.len() > 1 { format!(", {}", job.title) } else { String::new() };
                let _ = writeln!(text, "\n{}{of}: {}", contender.name, said.join("; "));
            }
        }
    }
    text
}

type Requests = BTreeMap<String, u64>;

fn requests<'a>(results: &'a Results, table: &Table, contender: &Contender, job: &Job) -> Option<&'a Requests> {
    results.requests[&[table.name, contender.name]].get(job.name)
}

fn total(requests: &Requests) -> u64 {
    requests.values().sum()
}

fn has_limit(contender: &Contender, job: &Job) -> bool {
    contender.goals.iter().any(|goal| matches!(*goal, Goal::Messages(name, _) if name == job.name))
}

fn met(met: bool) -> &'static str {
    if met { "met" } else { "**missed**" }
}

/// The job's time over that on the guest's own file system.
fn longer(results: &Results, table: &Table, contender: &Contender, job: &Job) -> Vec<String> {
    let Some(native) = table.native() else { return Vec::new() };
    let longer = results.series(table, contender, job).over(results.series(table, native, job)).median() - 1.0;
    let mut said = format!("{:+.0} % over {}", longer * 100.0, native.name);
    for goal in contender.goals {
        if let Goal::Longer(name, most) = *goal {
            if name == job.name {
                let _ = write!(said, " (≤ {:.0} %: {})", most * 100.0, met(longer <= most));
            }
        }
    }
    vec![said]
}

fn messages(results: &Results, table: &Table, contender: &Contender, job: &Job, counts: &Requests) -> String {
    let all = total(counts);
    let mut said = format!("{} messages", number(all as f64));
    for goal in contender.goals {
        match *goal {
            Goal::Messages(name, most) if name == job.name => {
                let _ = write!(said, " (≤ {most}: {})", met(all <= most));
            }
            Goal::Share(name, peer, most) if name == job.name => {
                let peer = table.contenders.iter().find(|c| c.name == peer).expect("the table has what its goals name");
                let theirs = requests(results, table, peer, job).map_or(0, total);
                let share = all as f64 / theirs.max(1) as f64;
                let _ = write!(said, ", {} of virtiofsd's (≤ {most}: {})", number(share), met(share <= most));
            }
            _ => {}
        }
    }
    let mut counts: Vec<_> = counts.iter().filter(|(_, count)| **count > 0).collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let counts: Vec<_> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    if counts.is_empty() { said } else { format!("{said}: {}", counts.join(", ")) }
}

/// All rows together, for contenders with a target for their median.
fn rows_text(results: &Results, table: &Table) -> String {
    let mut text = String::new();
    for contender in table.contenders {
        for goal in contender.goals {
            let Goal::MedianRow(wanted) = *goal else { continue };
            let rows: Vec<f64> = table.jobs.iter().map(|job| ratio(results, table, contender, job).median()).collect();
            let median = median(&rows);
            let met = if median >= wanted { "met" } else { "**missed**" };
            let lowest = number(rows.iter().copied().fold(f64::INFINITY, f64::min));
            let below = rows.iter().filter(|ratio| **ratio < 1.0).count();
            let _ = writeln!(
                text,
                "\n{}: the median row {}; ≥ {wanted}: {met}; the lowest {lowest}; {below} of {} rows below 1",
                contender.name,
                number(median),
                rows.len()
            );
        }
    }
    text
}

/// Contenders compared with others than virtiofsd, where there is such a target.
fn over_text(results: &Results, table: &Table) -> String {
    let mut rows = vec![["", "ratio", "wanted"].map(str::to_owned).to_vec()];
    let mut row = |pair: &str, job: &str, ratio: String, median: f64, wanted: f64| {
        let met = if median >= wanted { "met" } else { "**missed**" };
        rows.push(vec![format!("{pair}: {job}"), ratio, format!("≥ {wanted}: {met}")]);
    };
    for contender in table.contenders {
        for goal in contender.goals {
            let (other, one, each, all) = match *goal {
                Goal::Over(other, job, wanted) => (other, Some(job), wanted, None),
                Goal::OverAll(other, each, all) => (other, None, each, Some(all)),
                _ => continue,
            };
            let other = table.contenders.iter().find(|c| c.name == other).expect("the table has what its goals name");
            let pair = format!("{} / {}", contender.name, other.name);
            let jobs = table.jobs.iter().filter(|job| one.is_none_or(|one| one == job.name));
            let ratios: Vec<(&Job, Series)> =
                jobs.map(|job| (job, over(results, table, [contender, other], job))).collect();
            for (job, ratio) in &ratios {
                row(&pair, job.title, ratio.to_string(), ratio.median(), each);
            }
            if let Some(wanted) = all {
                let median = median(&ratios.iter().map(|(_, ratio)| ratio.median()).collect::<Vec<_>>());
                row(&pair, "the median of the rows", number(median), median, wanted);
            }
        }
    }
    if rows.len() > 1 { format!("\n{}", markdown(&rows)) } else { String::new() }
}

/// A figure measured in the daemon, for the contenders that have it.
fn daemon_text(results: &Results, table: &Table, name: &'static str, title: &str) -> String {
    let mut text = String::new();
    for contender in table.contenders {
        let Some(series) = results.figures.get(&[table.name, contender.name, name]) else { continue };
        let _ = write!(text, "\n{}: {title}, p50: {series} µs", contender.name);
        for goal in contender.goals {
            if let Goal::AtMost(of, most) = *goal {
                if of == name {
                    let met = if series.median() <= most { "met" } else { "**missed**" };
                    let _ = write!(text, "; ≤ {} µs: {met}", number(most));
                }
            }
        }
        text += "\n";
    }
    text
}

fn row(head: &str, mut cells: Vec<String>) -> Vec<String> {
    cells.insert(0, head.to_owned());
    cells
}

/// The best virtiofsd in this job.
fn base<'a>(results: &'a Results, table: &Table, job: &Job) -> &'a Series {
    let peers = table.contenders[..table.peers()].iter().map(|peer| results.series(table, peer, job));
    let better =
        |a: &'a Series, b: &'a Series| if (a.median() >= b.median()) == job.measure.more_is_better() { a } else { b };
    peers.reduce(better).expect("a table begins with virtiofsd")
}

/// Contender to virtiofsd, above 1 where the contender is better.
fn ratio(results: &Results, table: &Table, contender: &Contender, job: &Job) -> Series {
    better_by(results.series(table, contender, job), base(results, table, job), job)
}

/// One contender to another, above 1 where the first is better.
fn over(results: &Results, table: &Table, [mine, other]: [&Contender; 2], job: &Job) -> Series {
    better_by(results.series(table, mine, job), results.series(table, other, job), job)
}

fn better_by(mine: &Series, other: &Series, job: &Job) -> Series {
    if job.measure.more_is_better() { mine.over(other) } else { other.over(mine) }
}

/// The ratio, and whether it meets its target.
fn ratio_cell(results: &Results, table: &Table, contender: &Contender, job: &Job) -> String {
    let (mine, base) = (results.series(table, contender, job), base(results, table, job));
    let ratio = ratio(results, table, contender, job);
    let mut cell = ratio.to_string();
    for goal in contender.goals {
        let (wanted, met) = match *goal {
            Goal::Ratio(name, wanted) if name == job.name => (format!("≥ {wanted}"), ratio.median() >= wanted),
            Goal::Within(name, most) if name == job.name => (format!("≤ {most} ms"), mine.median() <= most),
            // One round does not show the noise.
            Goal::NotBelow if results.rounds > 1 => ("not below".to_owned(), !is_below(mine, base, &ratio, job)),
            _ => continue,
        };
        let _ = write!(cell, "; {wanted}: {}", if met { "met" } else { "**missed**" });
    }
    cell
}

fn is_below(mine: &Series, base: &Series, ratio: &Series, job: &Job) -> bool {
    let apart = if job.measure.more_is_better() { mine.max() < base.min() } else { mine.min() > base.max() };
    apart && ratio.median() < 1.0 - NOISE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_says_how_it_was_measured() {
        let text = fs::read_to_string(crate::host::root().join("docs/benchmarks.md")).unwrap();
        let (_, ours) = text.split_once(BEGIN).unwrap();
        assert!(ours.starts_with(&how(false)));
    }

    /// A run of no table changes nothing: all sections and the text around them stay.
    #[test]
    fn a_run_keeps_what_it_did_not_measure() {
        let text = fs::read_to_string(crate::host::root().join("docs/benchmarks.md")).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("benchmarks.md");
        fs::write(&path, &text).unwrap();
        Page::open(path.clone()).unwrap().write(&Results::new(false, 3, Vec::new())).unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), text);
    }
}
