//! `thruway command`: prints what to run for a share.

use std::fmt::Write as _;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;

use thruway::window::Stores;

use crate::Result;
use crate::qemu::{self, Device};
use crate::vm::{self, Share};

/// Who starts the virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum For {
    /// A shell script that starts the daemon and QEMU
    Qemu,
    /// What to put into a domain's XML
    Libvirt,
    /// A unit for the daemon, and QEMU's options
    Systemd,
}

/// The options of `thruway command`.
#[derive(clap::Args)]
pub struct Options {
    /// The directory to share
    #[arg(long, value_name = "DIR")]
    share: PathBuf,

    /// Who starts the virtual machine
    #[arg(long, value_name = "WHO")]
    r#for: For,

    /// Give the guest a DAX window, of 512M if no SIZE is given
    #[arg(long, value_name = "SIZE", require_equals = true, num_args = 0..=1, default_missing_value = "512M")]
    dax: Option<String>,

    /// Give a guest with the patches of guest-kernel/ a passthrough window; without SIZE, 1G, or as much as makes a
    /// power of two with the DAX window
    #[arg(long, value_name = "SIZE", require_equals = true, num_args = 0..=1, default_missing_value = "")]
    passthrough: Option<String>,

    /// The tag that the guest mounts
    #[arg(long, default_value = "share", value_parser = tag)]
    tag: String,

    /// The guest's memory
    #[arg(long, value_name = "SIZE", default_value = "4G", value_parser = memory)]
    memory: u64,

    /// The guest's CPUs, each of which gets a request queue
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u16).range(1..=i64::from(thruway::device::MAX_REQUEST_QUEUES)))]
    cpus: u16,

    /// The group of the user that QEMU runs as; otherwise only the daemon's user can connect (for libvirt and systemd)
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,

    /// The daemon [default: thruwayd beside this program, or as installed]
    #[arg(long, value_name = "PATH")]
    thruwayd: Option<PathBuf>,

    /// The QEMU, which may have arguments
    #[arg(long, value_name = "COMMAND", default_value = qemu::DEFAULT)]
    qemu: String,
}

/// A tag that needs no quoting anywhere.
pub fn tag(text: &str) -> std::result::Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    match (1..=thruway::device::TAG_LEN).contains(&text.len())
        && text.chars().all(plain)
        && !text.starts_with(['-', '.'])
    {
        true => Ok(text.to_owned()),
        false => Err(format!("use 1 to {} letters, digits and _.-", thruway::device::TAG_LEN)),
    }
}

fn memory(text: &str) -> std::result::Result<u64, String> {
    vm::size(text).ok_or_else(|| "expected a size such as 512M or 4G".into())
}

/// What is printed, and what is to be said of it.
struct Printed {
    text: String,
    /// For stderr: the output is for programs.
    notes: Vec<String>,
}

pub fn run(options: &Options) -> Result {
    let Printed { text, notes } = options.print()?;
    print!("{text}");
    notes.iter().for_each(|note| eprintln!("note: {note}"));
    Ok(ExitCode::SUCCESS)
}

impl Options {
    fn print(&self) -> std::result::Result<Printed, String> {
        let dir = self.share.canonicalize().ok().filter(|dir| dir.is_dir());
        let dir = dir.as_ref().and_then(|dir| dir.to_str());
        let dir = dir.ok_or_else(|| {
            format!("--share {}: there is no such directory: create it, or name another", self.share.display())
        })?;
        let mut arguments = vec![format!("--shared-dir={dir}")];
        arguments.extend(self.windows()?);
        arguments.extend(
            self.socket_group.iter().filter(|_| self.r#for != For::Qemu).map(|group| format!("--socket-group={group}")),
        );
        // What QEMU has as a rule, if this one cannot be asked.
        let device = || qemu::maps(&self.qemu).unwrap_or(Device::Test);
        let share = Share::new(&arguments, &self.tag, self.cpus, device)?;
        let thruwayd = vm::daemon(self.thruwayd.as_deref())?.display().to_string();
        let text = match self.r#for {
            For::Qemu => self.script(&share, &thruwayd),
            For::Libvirt => self.domain(&share, &thruwayd, dir),
            For::Systemd => self.unit(&share, &thruwayd, dir),
        };
        let stores = File::open(dir).ok().and_then(|dir| Stores::of(dir.as_fd()).ok());
        Ok(Printed { text, notes: self.notes(&share, stores) })
    }

    /// The daemon's options for windows whose sizes fit together.
    fn windows(&self) -> std::result::Result<Vec<String>, String> {
        let bytes = |option, text: &str| {
            let digits = text.trim_end_matches(['K', 'k', 'M', 'm', 'G', 'g']);
            let plain = if digits.len() == text.len() { digits.parse().ok() } else { vm::size(text) };
            plain
                .filter(|size| *size > 0)
                .ok_or_else(|| format!("--{option}={text}: expected a size such as 512M or 1G"))
        };
        let dax = self.dax.as_deref().map(|text| bytes("dax", text)).transpose()?.unwrap_or(0);
        let passthrough = match (self.passthrough.as_deref(), dax) {
            (None, _) => 0,
            (Some(""), 0) => 1 << 30,
            (Some(""), dax) => {
                dax.checked_next_power_of_two().map_or(dax, |all| if all == dax { dax } else { all - dax })
            }
            (Some(text), _) => bytes("passthrough", text)?,
        };
        let mut options = Vec::new();
        let mut add = |name, size: u64| {
            if size > 0 {
                options.push(format!("--{name}={}", show(size)));
            }
        };
        add("dax-window", dax);
        add("passthrough-window", passthrough);
        // Each 2 MiB of the DAX window may take a mapping; passed-through files need some beside them.
        let wanted = dax.div_ceil(thruway::window::RANGE) + if passthrough > 0 { FILES } else { 0 };
        let most = thruway::limits::WINDOW_MAPPINGS as u64;
        if wanted > DEFAULT_MAPPINGS {
            options.push(format!("--max-mappings={}", wanted.min(most)));
        }
        Ok(options)
    }

    fn notes(&self, share: &Share, stores: Option<Stores>) -> Vec<String> {
        let mut notes = Vec::new();
        let Some(device) = share.windows else {
            return notes;
        };
        let mut note = |text: &str| notes.push(text.to_owned());
        note(
            "windows need QEMU 11.1 and a daemon that root starts: thruway check says whether this host has all of it",
        );
        if device == Device::Test {
            note(
                "the windows of all devices of a virtual machine may have 448 mappings: with a second such device, set \
                 --max-mappings",
            );
        }
        match stores {
            Some(Stores::Elsewhere) => note(
                "on the share's file system a store may take new blocks: with dax=inode no file of it is mapped, and \
                 with passthrough none is passed through. ext4, XFS and tmpfs are better",
            ),
            Some(Stores::Memory) => note(
                "on tmpfs nothing guards mapped files: a host process that shortens one can end the virtual machine. \
                 Write a new file and rename it instead",
            ),
            _ => {}
        }
        if self.passthrough.is_some() {
            note("passthrough needs a guest kernel with the patches of guest-kernel/; others use messages or DAX");
        }
        notes
    }

    /// What the guest types.
    fn mount(&self) -> String {
        // dax=always would turn passthrough off, and maps more files than fit.
        let dax = if self.dax.is_some() { " -o dax=inode" } else { "" };
        format!("mount -t virtiofs{dax} {} /mnt", self.tag)
    }

    /// QEMU's options for the whole machine but its disks.
    fn machine(&self, share: &Share, socket: &str) -> Vec<Vec<String>> {
        let machine = if cfg!(target_arch = "aarch64") { "virt" } else { "q35" };
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let [object, backend, option, own] = vm::memory(self.memory);
        let [chardev, socket, device, its] = share.device(socket);
        let mut lines = vec![
            words(&format!("-accel kvm -accel tcg -cpu max -smp {} -m {}", self.cpus, show(self.memory))),
            [words(&format!("-machine {machine}")), vec![option, own]].concat(),
            vec![object, backend],
            vec![chardev, socket],
            vec![device, its],
        ];
        if share.windows == Some(Device::Test) {
            // A reset with files mapped would crash QEMU 11.1.
            lines.push(words("-no-reboot"));
        }
        lines
    }

    fn script(&self, share: &Share, thruwayd: &str) -> String {
        let daemon: Vec<_> = share.daemon.iter().map(|word| quote(word)).collect();
        let machine = self.machine(share, "SOCKET");
        let lines: Vec<_> = machine
            .iter()
            .map(|words| words.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" "))
            .map(|line| line.replace("path=SOCKET", "path=\"$run/fs.sock\""))
            .collect();
        format!(
            "#!/bin/sh\n\
             # Starts thruwayd and QEMU. QEMU's further options, such as disks, go behind the script's name.\n\
             # In the guest: {}\n\
             run=$(mktemp -d /tmp/thruway.XXXXXX) || exit\n\
             trap 'rm -rf \"$run\"' EXIT\n\
             # The daemon ends by itself when QEMU does.\n\
             {} --socket-path=\"$run/fs.sock\" \\\n    {} &\n\
             # QEMU connects only once, so the socket must be there.\n\
             until [ -S \"$run/fs.sock\" ]; do kill -0 $! || exit; sleep 0.1; done\n\
             {} \\\n    {} \"$@\"\n",
            self.mount(),
            quote(thruwayd),
            daemon.join(" \\\n    "),
            self.qemu,
            lines.join(" \\\n    "),
        )
    }

    /// Where the unit's daemon listens.
    fn socket(&self) -> String {
        format!("/run/thruwayd/{}/fs.sock", self.tag)
    }

    fn unit(&self, share: &Share, thruwayd: &str, dir: &str) -> String {
        let tag = &self.tag;
        let words: Vec<_> = share.daemon.iter().map(|word| unit_word(word)).collect();
        let machine: Vec<_> = self.machine(share, &self.socket()).into_iter().map(|words| words.join(" ")).collect();
        format!(
            "# /etc/systemd/system/thruwayd-{tag}.service: then systemctl daemon-reload; systemctl enable --now \
             thruwayd-{tag}\n\
             [Unit]\n\
             Description=Thruway share {tag}\n\
             RequiresMountsFor={}\n\
             \n\
             [Service]\n\
             # The daemon sets up its own sandbox and its own limits.\n\
             ExecStart={} --keep-alive --socket-path={} \\\n    {}\n\
             RuntimeDirectory=thruwayd/{tag}\n\
             Restart=on-failure\n\
             \n\
             [Install]\n\
             WantedBy=multi-user.target\n\
             \n\
             # QEMU, after the daemon: {} {}\n\
             # In the guest: {}\n",
            unit_word(dir),
            unit_word(thruwayd),
            self.socket(),
            words.join(" \\\n    "),
            self.qemu,
            machine.join(" "),
            self.mount(),
        )
    }

    fn domain(&self, share: &Share, thruwayd: &str, dir: &str) -> String {
        let mut text = String::from(
            "<!-- Into <domain>: the daemon reads and writes the guest's memory, which must be shared. -->\n\
             <memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n</memoryBacking>\n",
        );
        let (tag, mount) = (&self.tag, self.mount());
        let _ = match share.windows {
            None => write!(
                text,
                "<!-- Into <devices>. libvirt starts the daemon. In the guest: {mount} -->\n\
                 <filesystem type='mount' accessmode='passthrough'>\n  \
                   <driver type='virtiofs' queue='1024'/>\n  \
                   <binary path='{}'/>\n  \
                   <source dir='{}'/>\n  \
                   <target dir='{tag}'/>\n\
                 </filesystem>\n",
                xml(thruwayd),
                xml(dir),
            ),
            // libvirt gives the daemon no options for windows.
            Some(Device::FileSystem) => write!(
                text,
                "<!-- Into <devices>. The daemon is a unit: thruway command … with for=systemd,\n     \
                 and socket-group= of QEMU's group. <emulator> must name this QEMU, whose vhost-user-fs-pci has \
                 windows.\n     \
                 In the guest: {mount} -->\n\
                 <filesystem type='mount'>\n  \
                   <driver type='virtiofs' queue='1024'/>\n  \
                   <source socket='{}'/>\n  \
                   <target dir='{tag}'/>\n\
                 </filesystem>\n",
                xml(&self.socket()),
            ),
            Some(Device::Test) => {
                let mut words = share.device(&self.socket()).to_vec();
                words.push("-no-reboot".into());
                let lines: String = words.iter().map(|word| format!("  <qemu:arg value='{}'/>\n", xml(word))).collect();
                write!(
                    text,
                    "<!-- This QEMU has windows by a device alone that libvirt does not have, so the daemon is a unit: \
                     thruway command … with for=systemd,\n     and socket-group= of QEMU's group. \
                     <domain> needs xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'.\n     \
                     In the guest: {mount} -->\n\
                     <qemu:commandline>\n{lines}</qemu:commandline>\n"
                )
            }
        };
        text
    }
}

/// Mappings for passed-through files: each takes one, and up to eight when it has grown.
const FILES: u64 = 128;

/// The default of --max-mappings.
const DEFAULT_MAPPINGS: u64 = 256;

/// A size as options have it.
fn show(size: u64) -> String {
    match size.trailing_zeros() {
        30.. => format!("{}G", size >> 30),
        20.. => format!("{}M", size >> 20),
        _ => size.to_string(),
    }
}

/// A word of a shell's command line.
fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,:+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// A word of a unit's ExecStart=.
fn unit_word(word: &str) -> String {
    let word = word.replace('%', "%%").replace('$', "$$");
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,:+@%$".contains(c);
    if word.chars().all(plain) { word } else { format!("\"{}\"", word.replace('\\', r"\\").replace('"', "\\\"")) }
}

/// Text in an XML attribute.
fn xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        options: Options,
    }

    fn printed(words: &[&str]) -> std::result::Result<String, String> {
        let words = ["command", "--thruwayd=/d", "--qemu=false"].iter().chain(words);
        Only::try_parse_from(words).map_err(|e| e.to_string())?.options.print().map(|printed| printed.text)
    }

    #[test]
    fn sizes_fit_together() {
        for (words, want) in [
            (&["--dax"][..], &["--dax-window=512M"][..]),
            (&["--dax=4M"], &["--dax-window=4M"]),
            (&["--passthrough"], &["--passthrough-window=1G"]),
            (&["--dax", "--passthrough"], &["--dax-window=512M", "--passthrough-window=512M", "--max-mappings=384"]),
            (
                &["--dax=768M", "--passthrough"],
                &["--dax-window=768M", "--passthrough-window=256M", "--max-mappings=448"],
            ),
        ] {
            for who in ["qemu", "libvirt", "systemd"] {
                let all = [&["--share=/tmp", "--for", who], words].concat();
                let text = printed(&all).unwrap_or_else(|e| panic!("{all:?}: {e}"));
                assert!(who == "libvirt" || want.iter().all(|option| text.contains(option)), "{text}");
                assert!(text.contains("num_vqs=3"), "{text}");
            }
        }
        for (words, cure) in [
            (&["--dax=3M"][..], "multiple of 2M"),
            (&["--dax=6M"], "power of two"),
            (&["--dax=2G"], "at most 512M"),
            (&["--dax=lots"], "expected a size"),
            (&["--dax=512M", "--passthrough=1G"], "--passthrough-window=1536M"),
            (&["--tag=a,b"], "letters, digits"),
        ] {
            let error = printed(&[&["--share=/tmp", "--for=qemu"], words].concat()).unwrap_err();
            assert!(error.contains(cure), "{words:?}: {error}");
        }
    }

    #[test]
    fn libvirt_has_windows_of_its_own_where_qemu_has() {
        let words = ["command", "--share=/tmp", "--for=libvirt", "--dax"];
        let options = Only::try_parse_from(words).unwrap().options;
        let domain = |device| {
            let share = Share::new(&["--shared-dir=/tmp".into(), "--dax-window=512M".into()], "share", 2, || device);
            options.domain(&share.unwrap(), "/d", "/tmp")
        };
        let own = domain(Device::FileSystem);
        assert!(own.contains("<source socket='/run/thruwayd/share/fs.sock'/>") && !own.contains("qemu:"), "{own}");
        let test = domain(Device::Test);
        assert!(test.contains("<qemu:commandline>") && test.contains("-no-reboot"), "{test}");
    }

    #[test]
    fn names_are_quoted() {
        let dir = tempfile::Builder::new().prefix("it's 5%<\"$").tempdir().unwrap();
        let of = |who| printed(&["--share", dir.path().to_str().unwrap(), "--for", who]).unwrap();
        assert!(of("qemu").contains(r#"it'\''s 5%<"$"#));
        assert!(of("systemd").contains(r#"it's 5%%<\"$$"#));
        assert!(of("libvirt").contains(r#"it&apos;s 5%&lt;"$"#));
    }
}
