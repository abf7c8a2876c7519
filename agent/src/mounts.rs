//! Which shares are mounted.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// A mount of a share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The superblock's device number, as stat(2) tells it.
    pub dev: u64,
    /// Where it is mounted.
    pub path: OsString,
    /// The share's tag.
    pub tag: String,
}

/// The shares of a mountinfo file of proc(5), each once. A mount of a part of a share does not count.
pub fn shares(mountinfo: &[u8]) -> Vec<Mount> {
    let mut shares: Vec<Mount> = Vec::new();
    for line in mountinfo.split(|byte| *byte == b'\n') {
        if let Some(mount) = parse(line) {
            if shares.iter().all(|other| other.dev != mount.dev) {
                shares.push(mount);
            }
        }
    }
    shares
}

fn parse(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let dev = std::str::from_utf8(fields.nth(2)?).ok()?;
    let (major, minor) = dev.split_once(':')?;
    let (root, path) = (fields.next()?, fields.next()?);
    let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
    let (kind, source) = (rest.next()?, rest.next()?);
    if kind != b"virtiofs" || root != b"/" {
        return None;
    }
    Some(Mount {
        dev: rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?),
        path: OsString::from_vec(unescape(path)),
        tag: OsStr::from_bytes(&unescape(source)).to_string_lossy().into_owned(),
    })
}

/// A space, tab, newline or backslash is an octal number there.
fn unescape(field: &[u8]) -> Vec<u8> {
    let (mut bytes, mut at) = (Vec::new(), 0);
    while let Some(byte) = field.get(at) {
        let octal = field.get(at + 1..at + 4).filter(|_| *byte == b'\\');
        let number = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        match number.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(number) => {
                bytes.push(number);
                at += 4;
            }
            None => {
                bytes.push(*byte);
                at += 1;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_found_once() {
        let info = b"22 1 0:20 / / rw - ext4 /dev/vda rw\n\
            31 22 0:40 / /mnt/a\\040b rw,relatime shared:7 - virtiofs tag\\134x rw\n\
            32 22 0:40 / /mnt/again rw - virtiofs tag rw\n\
            33 22 0:41 /part /mnt/part rw - virtiofs other rw\n\
            34 22 0:42 / /mnt/c rw - virtiofs c rw\nnonsense\n";
        let dev = |minor| rustix::fs::makedev(0, minor);
        let a = Mount { dev: dev(40), path: "/mnt/a b".into(), tag: "tag\\x".into() };
        let c = Mount { dev: dev(42), path: "/mnt/c".into(), tag: "c".into() };
        assert_eq!(shares(info), [a, c]);
    }
}
