//! What the daemon and QEMU need to be told so that they fit together.

use std::path::{Path, PathBuf};

use thruway::cli::{self, Options, Stop};

use crate::qemu::Device;

/// The id of what this adds to QEMU's command line.
const ID: &str = "thruway";

/// Where thruwayd is: beside this program (a build), in `../libexec` (an installation), or where packages put it.
///
/// # Errors
/// It is in none of these places.
pub fn daemon(named: Option<&Path>) -> Result<PathBuf, String> {
    if let Some(path) = named {
        return Ok(path.to_owned());
    }
    let own = std::env::current_exe().ok();
    let own = own.as_deref().and_then(Path::parent);
    let near = own.into_iter().flat_map(|dir| [dir.join("thruwayd"), dir.join("../libexec/thruwayd")]);
    let usual = ["/usr/local/libexec/thruwayd", "/usr/libexec/thruwayd"].map(PathBuf::from);
    let found = near.chain(usual).find(|path| path.is_file());
    let found = found.ok_or("thruwayd is not installed here: run make install, or name it by --thruwayd PATH")?;
    Ok(found.canonicalize().unwrap_or(found))
}

/// A share as its daemon and its virtual machine see it.
pub struct Share {
    /// The daemon's arguments that decide how it fits to QEMU; without its socket.
    pub daemon: Vec<String>,
    /// QEMU's device, without its chardev.
    device: String,
    /// It has shared memory regions, by this device.
    pub windows: Option<Device>,
}

impl Share {
    /// `arguments`: the daemon's, without a socket. `tag`: what the guest mounts. `queues`: request queues. `device`:
    /// called for the device that has windows, if the arguments have any.
    ///
    /// # Errors
    /// What is wrong with the arguments.
    pub fn new(arguments: &[String], tag: &str, queues: u16, device: impl FnOnce() -> Device) -> Result<Self, String> {
        let options = parse(arguments)?;
        let windows = (options.dax_window.size + options.passthrough_window.size > 0).then(device);
        let mut daemon = arguments.to_vec();
        let device = if windows == Some(Device::Test) {
            daemon.extend([format!("--tag={tag}"), format!("--num-request-queues={queues}")]);
            // One more queue: the high priority queue.
            format!("vhost-user-test-device-pci,virtio-id=26,num_vqs={},vq_size=1024,config_size=40", queues + 1)
        } else {
            format!("vhost-user-fs-pci,tag={tag},queue-size=1024,num-request-queues={queues}")
        };
        Ok(Self { daemon, device, windows })
    }

    /// QEMU's options for the device; `socket` is where the daemon listens.
    pub fn device(&self, socket: &str) -> [String; 4] {
        // A comma ends a value of QEMU's, two are one of the value.
        let path = socket.replace(',', ",,");
        [
            "-chardev".into(),
            format!("socket,id={ID}-fs,path={path}"),
            "-device".into(),
            self.device.clone() + &format!(",chardev={ID}-fs"),
        ]
    }
}

/// QEMU's options for `size` bytes of memory that the daemon can use.
pub fn memory(size: u64) -> [String; 4] {
    let object = format!("memory-backend-memfd,id={ID}-mem,size={size},share=on");
    ["-object".into(), object, "-machine".into(), format!("memory-backend={ID}-mem")]
}

/// Checks the daemon's arguments as it will itself.
pub fn parse(arguments: &[String]) -> Result<Options, String> {
    // Any socket: the caller's own comes later.
    let line = ["thruwayd", "--fd=0"].into_iter().map(Into::into).chain(arguments.iter().map(Into::into));
    cli::parse(line).map_err(|(Stop::Help(text) | Stop::Usage(text))| text)
}

/// What a QEMU command line says that matters to a share.
#[derive(Debug, PartialEq, Eq)]
pub struct Machine {
    /// Its CPUs, 1 to 63.
    pub cpus: u16,
    /// Bytes of memory that are to be made shared. `None`: they are.
    pub unshared: Option<u64>,
}

/// QEMU's memory in MiB without -m.
const MEMORY: u64 = 128;

impl Machine {
    /// Reads QEMU's arguments.
    ///
    /// # Errors
    /// They say something that conflicts with a share by this tag.
    pub fn read(arguments: &[String], tag: &str) -> Result<Self, String> {
        let values = |names: &'static [&str]| {
            // QEMU takes -option and --option.
            let is = move |word: &String| {
                names.contains(&word.strip_prefix('-').unwrap_or(word).trim_start_matches('-')) && word.starts_with('-')
            };
            arguments.windows(2).filter(move |pair| is(&pair[0])).map(|pair| pair[1].as_str())
        };
        for (option, cure) in [
            ("daemonize", "remove it, since thruway waits for QEMU's end; run thruway itself in the background"),
            ("mem-path", "use -object memory-backend-file,…,share=on and -machine memory-backend=ID instead"),
            ("readconfig", "give its contents as options, since thruway must know the memory"),
        ] {
            if arguments.iter().any(|word| word.trim_start_matches('-') == option && word.starts_with('-')) {
                return Err(format!("QEMU's -{option} does not go with thruway run: {cure}"));
            }
        }
        let devices = || values(&["device"]).filter(|value| value.starts_with("vhost-user-fs"));
        if devices().any(|value| field(value, "tag") == Some(tag)) {
            return Err(format!(
                "QEMU's -device already has the tag '{tag}': choose another by --tag, or remove that device"
            ));
        }
        if let Some(value) = values(&["chardev", "object"])
            .find(|value| field(value, "id").is_some_and(|id| id.starts_with(&format!("{ID}-"))))
        {
            return Err(format!(
                "QEMU's '{value}' has an id that thruway uses itself: choose one that does not start with {ID}-"
            ));
        }
        Ok(Self { cpus: cpus(values(&["smp"]).next_back()), unshared: unshared(&values)? })
    }
}

/// How much memory is not shared yet, of a command line with these values of options.
fn unshared<'a, I: Iterator<Item = &'a str>>(
    values: &impl Fn(&'static [&'static str]) -> I,
) -> Result<Option<u64>, String> {
    let machine = values(&["machine", "M"]).filter_map(|value| field(value, "memory-backend"));
    let nodes: Vec<_> = values(&["numa"]).filter(|value| value.starts_with("node")).collect();
    if let Some(node) = nodes.iter().find(|node| field(node, "memdev").is_none()) {
        return Err(format!("QEMU's -numa {node} has no memdev=: name a memory backend there that has share=on"));
    }
    let backends: Vec<_> = machine.chain(nodes.iter().filter_map(|node| field(node, "memdev"))).collect();
    for id in &backends {
        let object =
            values(&["object"]).find(|object| object.starts_with("memory-backend") && field(object, "id") == Some(id));
        match object {
            None => {
                return Err(format!(
                    "QEMU's command names the memory backend '{id}' and has no -object of that id: add it"
                ));
            }
            Some(object) if !matches!(field(object, "share"), Some("on" | "yes" | "true")) => {
                return Err(format!(
                    "QEMU's -object {object} is not shared, and the daemon must see the guest's memory: add share=on \
                     to it"
                ));
            }
            Some(_) => {}
        }
    }
    if !backends.is_empty() {
        return Ok(None);
    }
    match values(&["m"]).last() {
        None => Ok(Some(MEMORY << 20)),
        Some(value) => size(value).map(Some).ok_or_else(|| format!("QEMU's -m {value}: expected a size such as 4G")),
    }
}

/// The value of a field of a QEMU option.
fn field<'a>(option: &'a str, name: &str) -> Option<&'a str> {
    option
        .split(',')
        .filter_map(|part| part.split_once('='))
        .filter(|(key, _)| *key == name)
        .map(|(_, value)| value)
        .next_back()
}

/// The CPUs of -smp, as far as queues can use them.
fn cpus(smp: Option<&str>) -> u16 {
    let first = |value: &str| value.split(',').next().and_then(|first| first.parse().ok());
    let cpus: u16 =
        smp.and_then(|smp| field(smp, "cpus").and_then(|cpus| cpus.parse().ok()).or_else(|| first(smp))).unwrap_or(1);
    cpus.clamp(1, thruway::device::MAX_REQUEST_QUEUES)
}

/// The bytes of -m: a number of MiB, or a size with a suffix.
pub fn size(value: &str) -> Option<u64> {
    let text = field(value, "size").or(value.split(',').next())?;
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "k" => 10,
        "" | "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift).filter(|size| *size > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Machine, String> {
        Machine::read(&line.split(' ').map(str::to_owned).collect::<Vec<_>>(), "share")
    }

    #[test]
    fn memory_is_shared_unless_it_is() {
        let machine = |cpus, unshared| Ok(Machine { cpus, unshared });
        assert_eq!(read("-nographic"), machine(1, Some(128 << 20)));
        assert_eq!(read("-m 512 -smp 4"), machine(4, Some(512 << 20)));
        assert_eq!(read("--m size=4G,slots=2,maxmem=8G -smp sockets=1,cpus=3"), machine(3, Some(4 << 30)));
        let shared = "-object memory-backend-file,id=a,size=1G,share=on";
        assert_eq!(read(&format!("-machine q35,memory-backend=a {shared}")), machine(1, None));
        assert_eq!(read(&format!("-numa node,memdev=a {shared}")), machine(1, None));
    }

    #[test]
    fn conflicts_are_named_with_their_cure() {
        for (line, words) in [
            ("-machine q35,memory-backend=a -object memory-backend-ram,id=a,size=1G", "add share=on"),
            ("-machine q35,memory-backend=a", "has no -object of that id"),
            ("-numa node,nodeid=0", "no memdev="),
            ("-m much", "expected a size"),
            ("-daemonize", "remove it"),
            ("-mem-path /dev/hugepages", "memory-backend-file"),
            ("-device vhost-user-fs-pci,chardev=c,tag=share", "choose another by --tag"),
            ("-chardev socket,id=thruway-fs,path=/x", "choose one that does not start"),
        ] {
            let error = read(line).unwrap_err();
            assert!(error.contains(words), "{line}: {error}");
        }
        assert!(read("-device vhost-user-fs-pci,chardev=c,tag=other").is_ok());
    }

    #[test]
    fn the_device_goes_by_the_windows() {
        let share = |windows: &[&str], device| {
            let arguments: Vec<_> =
                ["--shared-dir=/tmp"].iter().chain(windows).map(|word| (*word).to_owned()).collect();
            Share::new(&arguments, "t", 2, || device)
        };
        let plain = share(&[], Device::Test).unwrap();
        assert_eq!(plain.device("/a,b")[1], "socket,id=thruway-fs,path=/a,,b");
        assert_eq!(plain.device, "vhost-user-fs-pci,tag=t,queue-size=1024,num-request-queues=2");
        let own = share(&["--dax-window=512M"], Device::FileSystem).unwrap();
        assert_eq!((own.windows, own.device), (Some(Device::FileSystem), plain.device));
        let dax = share(&["--dax-window=512M"], Device::Test).unwrap();
        assert!(dax.windows == Some(Device::Test) && dax.device.contains("num_vqs=3,"), "{}", dax.device);
        assert!(dax.daemon.ends_with(&["--tag=t".into(), "--num-request-queues=2".into()]));
        assert!(share(&["--dax-window=3M"], Device::Test).is_err());
    }
}
