//! What a QEMU can do, seen by playing the daemon for it.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The QEMU of this architecture.
pub const DEFAULT: &str = if cfg!(target_arch = "aarch64") { "qemu-system-aarch64" } else { "qemu-system-x86_64" };

/// The device that has shared memory regions.
const DEVICE: &str = "vhost-user-test-device-pci,virtio-id=26,num_vqs=2,vq_size=1024,config_size=40,chardev=fs";

/// Messages of vhost-user, and the bits of its features (QEMU's docs/interop/vhost-user.rst).
const GET_FEATURES: u32 = 1;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const PROTOCOL_FEATURES: u64 = 1 << 30;
const SHMEM: u64 = 1 << 22;
/// Besides SHMEM: MQ, REPLY_ACK, BACKEND_REQ and CONFIG.
const OTHERS: u64 = 1 | 1 << 3 | 1 << 5 | 1 << 9;

/// How long QEMU may take to start: far longer than on a busy machine.
const START: Duration = Duration::from_secs(30);

/// Whether QEMU maps files for a daemon.
///
/// # Errors
/// Why not, in one line.
pub fn maps(command: &str) -> Result<(), String> {
    let dir = tempfile::tempdir().map_err(|e| format!("cannot make a temporary directory: {e}"))?;
    let socket = dir.path().join("fs");
    let listener = UnixListener::bind(&socket).map_err(|e| format!("cannot listen on '{}': {e}", socket.display()))?;
    let mut words = command.split_whitespace();
    let machine = if command.contains("aarch64") { "virt" } else { "q35" };
    let mut child = Command::new(words.next().ok_or("--qemu is empty: name a program")?)
        .args(words)
        .args(["-machine", machine, "-nodefaults", "-display", "none", "-S", "-m", "64M", "-chardev"])
        .arg(format!("socket,id=fs,path={}", socket.display()))
        .args(["-device", DEVICE])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("cannot run '{command}': {e}"))?;
    let asked = accept(&listener, &mut child).and_then(|stream| play(stream).map_err(|e| format!("{command}: {e}")));
    let _ = child.kill();
    let _ = child.wait();
    match asked? & SHMEM {
        0 => Err(format!("'{command}' has no shared memory regions for vhost-user devices")),
        _ => Ok(()),
    }
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

/// Answers QEMU until it says which protocol features it takes.
fn play(mut stream: UnixStream) -> io::Result<u64> {
    stream.set_read_timeout(Some(START))?;
    loop {
        let mut header = [0; 12];
        stream.read_exact(&mut header)?;
        let [request, _, size] = [0, 4, 8].map(|at| u32::from_ne_bytes(std::array::from_fn(|i| header[at + i])));
        // A u64, as in all messages that come before the features are settled.
        let mut payload = [0; 8];
        stream.read_exact(payload.get_mut(..size as usize).ok_or(io::ErrorKind::InvalidData)?)?;
        let answer = match request {
            GET_FEATURES => PROTOCOL_FEATURES | 1 << 32,
            GET_PROTOCOL_FEATURES => OTHERS | SHMEM,
            SET_PROTOCOL_FEATURES => return Ok(u64::from_ne_bytes(payload)),
            _ => continue,
        };
        // The flags: version 1, an answer.
        let words = [request, 1 | 1 << 2, 8].map(u32::to_ne_bytes);
        stream.write_all(&[words.as_flattened(), &answer.to_ne_bytes()].concat())?;
    }
}
