//! What a QEMU can do, seen by playing the daemon for it.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The QEMU of this architecture.
pub const DEFAULT: &str = if cfg!(target_arch = "aarch64") { "qemu-system-aarch64" } else { "qemu-system-x86_64" };

/// The device of QEMU's that has windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// `vhost-user-fs-pci`, which all callers of QEMU start: with the patches of `qemu/`.
    FileSystem,
    /// `vhost-user-test-device-pci`, which only a command line of one's own has.
    Test,
}

impl Device {
    /// QEMU's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FileSystem => "vhost-user-fs-pci",
            Self::Test => "vhost-user-test-device-pci",
        }
    }

    const fn properties(self) -> &'static str {
        match self {
            Self::FileSystem => "tag=check",
            Self::Test => "virtio-id=26,num_vqs=2,vq_size=1024,config_size=40",
        }
    }
}

/// Messages of vhost-user, and the bits of its features (QEMU's docs/interop/vhost-user.rst).
const GET_FEATURES: u32 = 1;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const PROTOCOL_FEATURES: u64 = 1 << 30;
const GET_QUEUE_NUM: u32 = 17;
const GET_CONFIG: u32 = 24;
const GET_SHMEM_CONFIG: u32 = 44;
/// Of a message's flags: the sender waits for an answer.
const NEED_REPLY: u32 = 1 << 3;
const SHMEM: u64 = 1 << 22;
/// Besides SHMEM: MQ, REPLY_ACK, BACKEND_REQ and CONFIG.
const OTHERS: u64 = 1 | 1 << 3 | 1 << 5 | 1 << 9;
/// Far more than what QEMU sends before a guest runs.
const MAX_PAYLOAD: usize = 4096;

/// How long QEMU may take to start: far longer than on a busy machine.
const START: Duration = Duration::from_secs(30);

/// By which device QEMU maps files for a daemon; the better one if it has both.
///
/// # Errors
/// Why it has none, in one line.
pub fn maps(command: &str) -> Result<Device, String> {
    if asks(command, Device::FileSystem).is_ok_and(|asked| asked) {
        return Ok(Device::FileSystem);
    }
    match asks(command, Device::Test)? {
        true => Ok(Device::Test),
        false => Err(format!("'{command}' has no shared memory regions for vhost-user devices")),
    }
}

/// The first line of what this QEMU says of its version.
pub fn version(command: &str) -> Option<String> {
    let mut words = command.split_whitespace();
    let output = Command::new(words.next()?).args(words).arg("--version").stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().next().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty())
}

/// Whether this device asks the daemon for its shared memory regions.
fn asks(command: &str, device: Device) -> Result<bool, String> {
    let dir = tempfile::tempdir().map_err(|e| format!("cannot make a temporary directory: {e}"))?;
    let socket = dir.path().join("fs");
    let listener = UnixListener::bind(&socket).map_err(|e| format!("cannot listen on '{}': {e}", socket.display()))?;
    let mut words = command.split_whitespace();
    let machine = if command.contains("aarch64") { "virt" } else { "q35" };
    let mut child = Command::new(words.next().ok_or("--qemu is empty: name a program")?)
        .args(words)
        .args(["-machine", machine, "-nodefaults", "-display", "none", "-S", "-m", "64M", "-chardev"])
        .arg(format!("socket,id=fs,path={}", socket.display()))
        .arg("-device")
        .arg(format!("{},{},chardev=fs", device.name(), device.properties()))
        // There is no such device: so QEMU ends when it has made the one before.
        .args(["-device", "thruway-end"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("cannot run '{command}': {e}"))?;
    let asked = accept(&listener, &mut child).and_then(|stream| play(stream).map_err(|e| format!("{command}: {e}")));
    let _ = child.kill();
    let _ = child.wait();
    asked
}

/// Waits until QEMU connects.
fn accept(listener: &UnixListener, child: &mut Child) -> Result<UnixStream, String> {
    listener.set_nonblocking(true).map_err(|e| e.to_string())?;
    let end = Instant::now() + START;
    loop {
        match listener.accept() {
            Ok((stream, _)) => return stream.set_nonblocking(false).map(|()| stream).map_err(|e| e.to_string()),
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(format!("cannot accept QEMU: {e}")),
            Err(_) if Instant::now() > end => return Err(format!("QEMU did not start within {} s", START.as_secs())),
            Err(_) => {}
        }
        if let Ok(Some(status)) = child.try_wait() {
            let mut text = String::new();
            let _ = child.stderr.take().map(|mut stderr| stderr.read_to_string(&mut text));
            return Err(match text.lines().next() {
                Some(line) => line.to_owned(),
                None => format!("QEMU ended ({status})"),
            });
        }
        sleep(Duration::from_millis(10));
    }
}

/// Answers QEMU until it asks for the regions, or ends.
fn play(mut stream: UnixStream) -> io::Result<bool> {
    stream.set_read_timeout(Some(START))?;
    loop {
        let mut header = [0; 12];
        match stream.read_exact(&mut header) {
            Err(e) if matches!(e.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) => {
                return Ok(false);
            }
            read => read?,
        }
        let [request, flags, size] = [0, 4, 8].map(|at| u32::from_ne_bytes(std::array::from_fn(|i| header[at + i])));
        let mut payload = [0; MAX_PAYLOAD];
        let payload = payload.get_mut(..size as usize).ok_or(io::ErrorKind::InvalidData)?;
        stream.read_exact(payload)?;
        let number = |number: u64| number.to_ne_bytes().to_vec();
        let answer = match request {
            GET_FEATURES => number(PROTOCOL_FEATURES | 1 << 32),
            GET_PROTOCOL_FEATURES => number(OTHERS | SHMEM),
            // It is asked for the regions only if it takes the feature.
            // Byte 2 has the bit.
            SET_PROTOCOL_FEATURES if payload.get(2).is_none_or(|byte| byte & (SHMEM >> 16) as u8 == 0) => {
                return Ok(false);
            }
            GET_QUEUE_NUM => number(2),
            GET_CONFIG => payload.to_vec(),
            GET_SHMEM_CONFIG => return Ok(true),
            _ if flags & NEED_REPLY != 0 => number(0),
            _ => continue,
        };
        // The flags: version 1, an answer.
        let words = [request, 1 | 1 << 2, answer.len() as u32].map(u32::to_ne_bytes);
        stream.write_all(&[words.as_flattened(), &answer].concat())?;
    }
}

#[cfg(test)]
mod tests {
    use std::thread::spawn;

    use super::*;

    /// What `play` says of a QEMU that sends these messages, each with a u64, and waits for `answers`.
    fn played(messages: &[(u32, u32, u64)], answers: usize) -> bool {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let player = spawn(|| play(ours).unwrap());
        for (request, flags, number) in messages {
            let words = [*request, 1 | flags, 8].map(u32::to_ne_bytes);
            theirs.write_all(&[words.as_flattened(), &number.to_ne_bytes()].concat()).unwrap();
        }
        theirs.read_exact(&mut vec![0; answers * 20]).unwrap();
        drop(theirs);
        player.join().unwrap()
    }

    #[test]
    fn a_device_that_asks_for_regions_has_them() {
        let set = |features| (SET_PROTOCOL_FEATURES, NEED_REPLY, features);
        let owner = (3, 0, 0);
        assert!(played(&[(GET_FEATURES, 0, 0), set(SHMEM), owner, (GET_SHMEM_CONFIG, 0, 0)], 2));
        assert!(!played(&[(GET_FEATURES, 0, 0), set(SHMEM), (GET_QUEUE_NUM, 0, 0), owner], 3));
        assert!(!played(&[(GET_FEATURES, 0, 0), set(OTHERS)], 1));
    }
}
