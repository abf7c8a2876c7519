//! What a frontend has settled with its device, for another worker process that must hear of it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use super::message::*;
use crate::record::RINGS;

/// Bytes of a memory region: its address in the guest, its length, its address in the frontend, its offset in the file.
const REGION: usize = 32;
/// Regions of one SET_MEM_TABLE: the frontends that have more add them one by one.
const TABLE: usize = 8;
/// VHOST_F_LOG_ALL: the frontend wants to know what the device writes to.
const LOG_ALL: u64 = 1 << 26;

/// The messages that count.
#[derive(Debug, Default)]
pub struct Settled {
    owner: Option<Message>,
    features: Option<Message>,
    protocol: Option<Message>,
    log: Option<Message>,
    log_fd: Option<Message>,
    channel: Option<Message>,
    /// The frontend knows the shared memory regions.
    shmem: Option<Message>,
    regions: Vec<(Vec<u8>, OwnedFd)>,
    rings: Vec<RingSettled>,
    /// The device's state is being read or written.
    moves: bool,
}

/// Of one ring. A kick or a call may be a message without a descriptor.
#[derive(Debug, Default)]
struct RingSettled {
    num: Option<Message>,
    addr: Option<Message>,
    base: Option<Message>,
    kick: Option<Message>,
    call: Option<Message>,
    err: Option<Message>,
    enable: Option<Message>,
}

impl RingSettled {
    fn all(&self) -> impl Iterator<Item = &Message> {
        // A kick starts the ring, so the rest comes before it.
        let Self { num, addr, base, kick, call, err, enable } = self;
        [num, base, addr, call, err, kick, enable].into_iter().flatten()
    }
}

impl Settled {
    fn ring(&mut self, message: &Message) -> Option<&mut RingSettled> {
        let index = message.ring()?;
        if self.rings.len() <= index {
            self.rings.resize_with(index + 1, RingSettled::default);
        }
        self.rings.get_mut(index)
    }

    /// The device has done what this message says. `reply`: its reply, if there was one.
    pub fn note(&mut self, message: Message, reply: Option<&Message>) {
        let message = message.without_reply();
        match message.request {
            SET_OWNER => self.owner = Some(message),
            RESET_OWNER => (self.owner, self.features, self.protocol) = (None, None, None),
            SET_FEATURES => self.features = Some(message),
            SET_PROTOCOL_FEATURES => self.protocol = Some(message),
            SET_LOG_BASE => self.log = Some(message),
            SET_LOG_FD => self.log_fd = Some(message),
            SET_BACKEND_REQ_FD => self.channel = Some(message),
            GET_SHMEM_CONFIG => self.shmem = Some(message),
            SET_MEM_TABLE => {
                let regions = message.body.get(8..).unwrap_or_default().chunks_exact(REGION).map(Vec::from);
                self.regions = regions.zip(message.fds).collect();
            }
            ADD_MEM_REG => {
                let region = message.body.get(8..8 + REGION).map(Vec::from);
                self.regions.extend(region.zip(message.fds.into_iter().next()));
            }
            REM_MEM_REG => {
                // The file may be named in another way.
                let gone = message.body.get(8..8 + 24).unwrap_or_default().to_vec();
                self.regions.retain(|(region, _)| region[..24] != gone);
            }
            // It fails with another number than 0.
            SET_DEVICE_STATE_FD => self.moves = reply.is_none_or(|reply| reply.body.first() == Some(&0)),
            CHECK_DEVICE_STATE => self.moves = false,
            RESET_DEVICE => (self.features, self.rings) = (None, Vec::new()),
            GET_VRING_BASE => {
                let Some(ring) = self.ring(&message) else { return };
                (ring.kick, ring.call) = (None, None);
                ring.base = reply.map(|reply| Message::new(SET_VRING_BASE, reply.body.clone(), Vec::new()));
            }
            SET_VRING_NUM | SET_VRING_ADDR | SET_VRING_BASE | SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR
            | SET_VRING_ENABLE => {
                // The guest goes on.
                self.moves &= message.request != SET_VRING_KICK;
                let Some(ring) = self.ring(&message) else { return };
                let to = match message.request {
                    SET_VRING_NUM => &mut ring.num,
                    SET_VRING_ADDR => &mut ring.addr,
                    SET_VRING_BASE => &mut ring.base,
                    SET_VRING_KICK => &mut ring.kick,
                    SET_VRING_CALL => &mut ring.call,
                    SET_VRING_ERR => &mut ring.err,
                    _ => &mut ring.enable,
                };
                *to = Some(message);
            }
            _ => {}
        }
    }

    /// Whether the frontend migrates, with another process of which it would fail.
    pub fn migrates(&self) -> bool {
        let features = self.features.as_ref().and_then(|features| features.body.first_chunk::<8>());
        let logs = features.is_some_and(|features| u64::from_ne_bytes(*features) & LOG_ALL != 0) && self.log.is_some();
        logs || self.moves
    }

    /// Whether the frontend has started a ring and not stopped it.
    pub fn is_running(&self, ring: usize) -> bool {
        self.rings.get(ring).is_some_and(|ring| ring.kick.is_some())
    }

    /// The descriptors that are kept for the next worker process.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let Self { owner, features, protocol, log, log_fd, channel, shmem, regions, rings, moves: _ } = self;
        let first = [owner, features, protocol, log, log_fd, channel, shmem].into_iter().flatten();
        let messages = first.chain(rings.iter().flat_map(RingSettled::all));
        let fds = messages.flat_map(|message| &message.fds).chain(regions.iter().map(|(_, fd)| fd));
        fds.map(AsRawFd::as_raw_fd)
    }

    /// All of it, as messages that make the same of an empty one by [`note`](Self::note).
    ///
    /// # Errors
    /// If there is no room for more descriptors.
    pub fn messages(&self) -> io::Result<Vec<Message>> {
        let Self { owner, features, protocol, log, log_fd, channel, shmem, regions, rings, moves: _ } = self;
        let first = [owner, features, protocol, log, log_fd, channel, shmem].into_iter().flatten();
        let kept = first.chain(rings.iter().flat_map(RingSettled::all)).map(Message::copy);
        let added = regions.iter().map(|(region, fd)| added(region, fd));
        kept.chain(added).collect()
    }

    /// The frontend's end of the channel for requests to it.
    pub fn channel(&self) -> Option<&OwnedFd> {
        self.channel.as_ref()?.fds.first()
    }

    /// Tells another worker process. `channel`: the worker's end of the channel for requests to the frontend. The
    /// socket has no other replies under way.
    ///
    /// # Errors
    /// Those of the socket. ConnectionAborted if the process ends.
    pub fn tell(
        &self,
        socket: impl AsFd,
        channel: Option<OwnedFd>,
        mut reply: impl FnMut() -> io::Result<Message>,
    ) -> io::Result<()> {
        let ask = |request| Message::new(request, Vec::new(), Vec::new());
        let first = [ask(GET_FEATURES), ask(GET_PROTOCOL_FEATURES)];
        for message in first.iter().chain([&self.protocol, &self.owner, &self.features].into_iter().flatten()) {
            message.send(&socket)?;
        }
        // A table is in the order of addresses in the guest. The frontend has added regions in any order.
        let address = |region: &[u8]| region.first_chunk::<8>().map(|address| u64::from_ne_bytes(*address));
        let mut sorted: Vec<_> = self.regions.iter().collect();
        sorted.sort_by_key(|(region, _)| address(region));
        let (table, rest) = sorted.split_at(sorted.len().min(TABLE));
        if !table.is_empty() {
            let mut body = (table.len() as u64).to_ne_bytes().to_vec();
            table.iter().for_each(|(region, _)| body.extend(region));
            let fds = table.iter().map(|(_, fd)| fd.try_clone()).collect::<io::Result<_>>()?;
            Message::new(SET_MEM_TABLE, body, fds).send(&socket)?;
        }
        for (region, fd) in rest {
            added(region, fd)?.send(&socket)?;
        }
        for message in [&self.log_fd, &self.log, &self.shmem].into_iter().flatten() {
            message.send(&socket)?;
        }
        if let (Some(message), Some(channel)) = (&self.channel, channel) {
            message.with(channel).send(&socket)?;
        }
        for message in self.rings.iter().take(RINGS).flat_map(RingSettled::all) {
            message.send(&socket)?;
        }
        // The dead process may have taken a kick, and not what it was for.
        for kick in self.rings.iter().filter_map(|ring| ring.kick.as_ref()?.fds.first()) {
            // It fails if there is one already.
            let _ = rustix::io::write(kick, &1u64.to_ne_bytes());
        }
        // The second of these replies comes after all that is done.
        ask(GET_FEATURES).send(&socket)?;
        let mut answered = 0;
        while answered < 2 {
            answered += u32::from(reply()?.request == GET_FEATURES);
        }
        Ok(())
    }
}

fn added(region: &[u8], fd: &OwnedFd) -> io::Result<Message> {
    Ok(Message::new(ADD_MEM_REG, [&[0; 8], region].concat(), vec![fd.try_clone()?]))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn null() -> OwnedFd {
        File::open("/dev/null").unwrap().into()
    }

    /// The requests that another worker process gets.
    fn told(settled: &Settled) -> Vec<u32> {
        let (here, there) = UnixStream::pair().unwrap();
        let answer = || Ok(Message::new(GET_FEATURES, Vec::new(), Vec::new()));
        settled.tell(&here, None, answer).unwrap();
        drop(here);
        std::iter::from_fn(|| Message::receive(&there).unwrap()).map(|message| message.request).collect()
    }

    fn region(n: u64) -> Vec<u8> {
        [n, 1, n, 0].iter().flat_map(|n| n.to_ne_bytes()).collect()
    }

    #[test]
    fn memory_is_told_as_it_is_now() {
        let mut settled = Settled::default();
        let table = [1u64.to_ne_bytes().to_vec(), region(1)].concat();
        settled.note(Message::new(SET_MEM_TABLE, table, vec![null()]), None);
        for n in 2..12 {
            settled.note(Message::new(ADD_MEM_REG, [vec![0; 8], region(n)].concat(), vec![null()]), None);
        }
        settled.note(Message::new(REM_MEM_REG, [vec![0; 8], region(1)].concat(), vec![null()]), None);
        assert_eq!(settled.descriptors().count(), 10);
        let all = told(&settled);
        assert_eq!(all.iter().filter(|request| **request == ADD_MEM_REG).count(), 2);
        assert_eq!(all.iter().filter(|request| **request == SET_MEM_TABLE).count(), 1);
        let mut copy = Settled::default();
        settled.messages().unwrap().into_iter().for_each(|message| copy.note(message, None));
        assert_eq!(told(&copy), all);
    }

    /// vhost-user-backend takes no other.
    #[test]
    fn the_table_is_in_order() {
        let mut settled = Settled::default();
        for n in [3, 1, 2, 256] {
            settled.note(Message::new(ADD_MEM_REG, [vec![0; 8], region(n)].concat(), vec![null()]), None);
        }
        let (here, there) = UnixStream::pair().unwrap();
        settled.tell(&here, None, || Ok(Message::new(GET_FEATURES, Vec::new(), Vec::new()))).unwrap();
        drop(here);
        let mut told = std::iter::from_fn(|| Message::receive(&there).unwrap());
        let table = told.find(|message| message.request == SET_MEM_TABLE).unwrap();
        let all: Vec<_> = [1, 2, 3, 256].into_iter().flat_map(region).collect();
        assert_eq!(table.body[8..], all);
    }

    #[test]
    fn a_migration_is_seen() {
        let mut settled = Settled::default();
        let features = |bits: u64| Message::new(SET_FEATURES, bits.to_ne_bytes().into(), Vec::new());
        let log = Message::new(SET_LOG_BASE, vec![0; 16], vec![null()]);
        // Some frontends may set the bit before there is a log.
        settled.note(features(LOG_ALL | 1), None);
        assert!(!settled.migrates());
        settled.note(log, None);
        assert!(settled.migrates());
        settled.note(features(1), None);
        assert!(!settled.migrates());
        let state = |request| Message::new(request, vec![0; 8], Vec::new());
        for (ended, failed) in [(CHECK_DEVICE_STATE, 0), (SET_VRING_KICK, 0), (CHECK_DEVICE_STATE, 1)] {
            let reply = Message::new(SET_DEVICE_STATE_FD, vec![failed, 1, 0, 0, 0, 0, 0, 0], Vec::new());
            settled.note(state(SET_DEVICE_STATE_FD), Some(&reply));
            assert_eq!(settled.migrates(), failed == 0);
            settled.note(state(ended), None);
            assert!(!settled.migrates());
        }
    }

    #[test]
    fn a_stopped_ring_is_not_started() {
        let mut settled = Settled::default();
        let index = |n: u32, value: u32| [n.to_ne_bytes(), value.to_ne_bytes()].concat();
        settled.note(Message::new(SET_VRING_NUM, index(1, 128), Vec::new()), None);
        settled.note(Message::new(SET_VRING_BASE, index(1, 0), Vec::new()), None);
        settled.note(Message::new(SET_VRING_KICK, 1u64.to_ne_bytes().into(), vec![null()]), None);
        assert!(settled.is_running(1) && !settled.is_running(0));
        assert_eq!(told(&settled)[2..5], [SET_VRING_NUM, SET_VRING_BASE, SET_VRING_KICK]);
        let reply = Message::new(GET_VRING_BASE, index(1, 77), Vec::new());
        settled.note(Message::new(GET_VRING_BASE, index(1, 0), Vec::new()), Some(&reply));
        assert!(!settled.is_running(1));
        assert_eq!(settled.rings[1].base.as_ref().unwrap().body, index(1, 77));
        settled.note(Message::new(RESET_DEVICE, Vec::new(), Vec::new()), None);
        assert_eq!(told(&settled), [GET_FEATURES, GET_PROTOCOL_FEATURES, GET_FEATURES]);
    }
}
