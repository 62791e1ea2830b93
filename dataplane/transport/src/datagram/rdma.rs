//! Datagrams over RDMA: an unreliable queue pair, with the promises of the endpoint over UDP.
//!
//! Bytes are copied into registered memory and out of it, which is registered once. A device drops what it has no buffer for, and what
//! names another key, without a word. Nothing is allocated after [`RdmaDatagrams::open`] but a handle for each port that is sent to first.

use super::{DatagramConfig, DatagramCounters};
use harmonaize_shm::{Memory, Span};
use harmonaize_verbs::{
    Access, AddressHandle, Completion, CompletionQueue, Datagram, Delivered, Depths, Devices, Domain,
    Function, GRH_BYTES, Gid, Local, Path, PortOptions, Received, Region, VerbsError,
};
use std::collections::VecDeque;
use std::mem;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Buffers that wait for datagrams, at most.
const RECEIVES: u32 = 512;
/// Ports whose handles are kept.
const HANDLES: usize = 1024;
/// Completions that are looked at in one go.
const COMPLETIONS: usize = 64;
/// Datagrams that are taken in by one call.
const TAKEN: usize = 128;
/// Where in the header before a datagram's payload the sender is, by the version of IP. IPv4's header fills the last 20 bytes.
const SOURCE_V6: std::ops::Range<usize> = 8..24;
const SOURCE_V4: std::ops::Range<usize> = 32..36;

/// Where an endpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RdmaAddress {
    /// Its port.
    pub gid: Gid,
    /// Its queue pair there.
    pub number: u32,
}

/// Which device endpoints use.
#[derive(Clone, Debug)]
pub struct RdmaPort {
    /// The devices among which it is.
    pub devices: Devices,
    /// What is asked of it.
    pub options: PortOptions,
    /// Where no device is named: the address that it has.
    pub address: IpAddr,
}

impl RdmaPort {
    fn open(&self) -> Result<Function, VerbsError> {
        Function::open(&self.devices, &self.options, Some(self.address))
    }

    /// Most bytes of a datagram there.
    ///
    /// # Errors
    /// If there is no such device, or its port is down.
    pub fn max_bytes(&self) -> Result<usize, VerbsError> {
        let Function { device, path } = self.open()?;
        Ok(path.mtu.unwrap_or(device.port(path.port)?.active_mtu).bytes())
    }
}

/// An endpoint. It never blocks.
#[derive(Debug)]
pub struct RdmaDatagrams {
    pair: Datagram,
    queue: Arc<CompletionQueue>,
    domain: Arc<Domain>,
    region: Arc<Region>,
    path: Path,
    address: RdmaAddress,
    /// Most bytes of a datagram; bytes of a place in the memory, of which the first are sent from.
    bytes: usize,
    place: usize,
    free: Vec<u64>,
    /// By their GID.
    handles: Vec<(Gid, AddressHandle)>,
    completions: Vec<Completion>,
    arrived: VecDeque<Received>,
    empty: Vec<Local>,
    scratch: Box<[u8]>,
    /// The device or the queue pair has failed, and nothing comes or goes any more.
    failed: bool,
    counters: DatagramCounters,
}

impl RdmaDatagrams {
    /// Opens the device. Only datagrams that name `key` are taken in, and all that are sent name it; the upper bit of it is the
    /// kernel's. At most [`DatagramConfig::bytes`] and what a packet of the port carries go into a datagram.
    ///
    /// # Errors
    /// If there is no such device, its port is down, or it grants no memory.
    pub fn open(port: &RdmaPort, key: u32, config: DatagramConfig) -> Result<Self, VerbsError> {
        let Function { device, path } = port.open()?;
        let most = device.limits().work_requests;
        let sends = u32::try_from(config.batch.max(1)).unwrap_or(u32::MAX).min(most);
        let receives = RECEIVES.min(most);
        let queue = CompletionQueue::create(&device, sends.saturating_add(receives))?;
        let domain = Domain::create(&device)?;
        let depths = Depths { sends, receives, inline_bytes: 0 };
        let pair = Datagram::create(&domain, &queue, depths, &path, key & 0x7fff_ffff)?;
        // A datagram that is longer than its buffer ends the queue pair: buffers have room for what a packet can carry.
        let longest = device.port(path.port)?.active_mtu.bytes();
        let place = (GRH_BYTES + longest).next_multiple_of(64);
        let memory =
            Memory::private((sends + receives) as usize * place).map_err(|_| VerbsError::Memlock {
                bytes: u64::from(sends + receives) * place as u64,
                device: device.name().to_owned(),
                errno: rustix::io::Errno::NOMEM,
                limit: "the system has no memory".to_owned(),
            })?;
        let region = Region::register(&domain, &memory, Access::LOCAL)?;
        let mut endpoint = Self {
            address: RdmaAddress { gid: pair.gid(), number: pair.number() },
            bytes: config.bytes.min(pair.max_payload()),
            place,
            free: (0..u64::from(sends)).rev().collect(),
            handles: Vec::with_capacity(HANDLES),
            completions: Vec::with_capacity(COMPLETIONS),
            arrived: VecDeque::with_capacity(receives as usize),
            empty: Vec::with_capacity(receives as usize),
            scratch: vec![0; place].into_boxed_slice(),
            failed: false,
            counters: DatagramCounters::default(),
            pair,
            queue,
            domain,
            region,
            path,
        };
        for at in u64::from(sends)..u64::from(sends + receives) {
            let buffer = endpoint.local(at, (GRH_BYTES + longest) as u64)?;
            endpoint.empty.push(buffer);
        }
        endpoint.pair.post_receives(&mut endpoint.empty)?;
        Ok(endpoint)
    }

    fn local(&self, at: u64, bytes: u64) -> Result<Local, VerbsError> {
        let memory = self.region.memory();
        let span = Span::new(memory, at * self.place as u64, bytes).map_err(|_| VerbsError::NotRegistered)?;
        Local::new(&self.region, span)
    }

    /// Where it is.
    pub fn local_address(&self) -> RdmaAddress {
        self.address
    }

    /// Most bytes of a datagram.
    pub fn max_bytes(&self) -> usize {
        self.bytes
    }

    /// What has gone through it; of what the device dropped nothing is known.
    pub fn counters(&self) -> DatagramCounters {
        self.counters
    }

    /// Whether the device or the queue pair has failed: nothing comes or goes any more.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// Makes what it takes to send to a port; where nobody has, the first datagram does.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn reach(&mut self, gid: Gid) -> Result<(), VerbsError> {
        if let Err(at) = self.handles.binary_search_by_key(&gid, |(gid, _)| *gid) {
            let handle = AddressHandle::create(&self.domain, gid, &self.path)?;
            if self.handles.len() >= HANDLES {
                self.handles.clear();
            }
            let at = at.min(self.handles.len());
            self.handles.insert(at, (gid, handle));
        }
        Ok(())
    }

    /// Has `write` write a datagram, and say its length and where it goes; it leaves at once. `None` of `write` leaves things as they were.
    /// False if there is no room for more, or nothing was written: not a byte is no datagram here.
    pub fn push(&mut self, write: impl FnOnce(&mut [u8]) -> Option<(RdmaAddress, usize)>) -> bool {
        if self.free.is_empty() {
            self.poll();
        }
        if self.free.is_empty() && !self.failed {
            return false;
        }
        let Some(room) = self.scratch.get_mut(..self.bytes) else { return false };
        let Some((to, bytes)) = write(room) else { return false };
        if self.failed {
            // Lost, like what a network loses: who sends finds out by its own time-outs.
            self.counters.unsent += 1;
            return true;
        }
        let sent = (1..=self.bytes).contains(&bytes) && self.post(to, bytes).is_some();
        *if sent { &mut self.counters.sent } else { &mut self.counters.unsent } += 1;
        self.counters.messages += u64::from(sent);
        sent
    }

    /// Sends what lies in the scratch memory.
    fn post(&mut self, to: RdmaAddress, bytes: usize) -> Option<()> {
        self.reach(to.gid).ok()?;
        let at = self.free.pop()?;
        let posted = self.post_from(at, to, bytes);
        if posted.is_none() {
            self.free.push(at);
        }
        posted
    }

    fn post_from(&mut self, at: u64, to: RdmaAddress, bytes: usize) -> Option<()> {
        self.region.memory().write(at * self.place as u64, self.scratch.get(..bytes)?).ok()?;
        let from = self.local(at, bytes as u64).ok()?;
        let found = self.handles.binary_search_by_key(&to.gid, |(gid, _)| *gid).ok()?;
        let (_, handle) = self.handles.get(found)?;
        let key = self.pair.queue_key();
        self.pair.send(from, handle, to.number, key, false, at).ok()
    }

    /// Looks what the device has done, and gives it buffers again.
    fn poll(&mut self) {
        let mut completions = mem::take(&mut self.completions);
        // No more wait than buffers do.
        while !self.failed {
            match self.queue.poll(&mut completions, COMPLETIONS) {
                Ok(0) => break,
                Ok(_) => {}
                Err(_) => self.failed = true,
            }
            for completion in completions.drain(..) {
                self.failed |= completion.status() != harmonaize_verbs::Status::Success;
                match self.pair.handle_completion(&completion) {
                    Ok(Some(Delivered::Sent(at))) => self.free.push(at),
                    Ok(Some(Delivered::Received(received))) => self.arrived.push_back(received),
                    Ok(Some(Delivered::Unused(_)) | None) | Err(_) => {}
                }
            }
        }
        self.completions = completions;
    }

    /// Takes in what has arrived, and shows `sink` each datagram with its sender. How many there were; 0: no more.
    pub fn receive(&mut self, sink: &mut dyn FnMut(RdmaAddress, &[u8])) -> usize {
        self.poll();
        self.counters.calls += u64::from(!self.arrived.is_empty());
        let mut taken = 0;
        while taken < TAKEN {
            let Some(Received { buffer, bytes, source, .. }) = self.arrived.pop_front() else { break };
            taken += 1;
            self.counters.received += 1;
            let whole = GRH_BYTES + bytes as usize;
            let read =
                self.scratch.get_mut(..whole).filter(|_| bytes as usize <= self.bytes).and_then(|scratch| {
                    self.region.memory().read(buffer.span().offset() as u64, scratch).ok()?;
                    let (header, payload) = scratch.split_at_checked(GRH_BYTES)?;
                    Some((RdmaAddress { gid: sender(self.address.gid, header)?, number: source }, payload))
                });
            match read {
                Some((from, payload)) => sink(from, payload),
                None => self.counters.unrecognized += 1,
            }
            self.empty.push(buffer);
        }
        if !self.failed && self.pair.post_receives(&mut self.empty).is_err() {
            self.failed = true;
        }
        taken
    }

    /// Asks to be woken by [`RdmaDatagrams::wake_fd`]; false if something is there already.
    pub fn prepare_sleep(&mut self) -> bool {
        if self.failed {
            return true;
        }
        let armed = self.queue.take_events().and_then(|_| self.queue.arm());
        self.failed |= armed.is_err();
        // What came before it was armed wakes nobody.
        self.poll();
        self.arrived.is_empty()
    }

    /// Readable when something has happened since [`RdmaDatagrams::prepare_sleep`].
    ///
    /// # Errors
    /// If the device is gone.
    pub fn wake_fd(&self) -> Result<BorrowedFd<'_>, VerbsError> {
        self.queue.wake_fd()
    }
}

/// Who sent a datagram to this address, as the header before its payload has it. Both are of one version of IP; of a header of IPv4 the first
/// 20 bytes are left as they were by some devices.
fn sender(to: Gid, header: &[u8]) -> Option<Gid> {
    if to.ip().is_some_and(|ip| ip.is_ipv4()) {
        let address: [u8; 4] = header.get(SOURCE_V4)?.try_into().ok()?;
        return Some(Gid::from(Ipv4Addr::from(address)));
    }
    Some(Gid(header.get(SOURCE_V6)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn senders_are_read_by_the_version_of_ip() {
        let header: Vec<u8> = (0..GRH_BYTES as u8).map(|at| 0x60 | at).collect();
        let v4 = Gid::from(Ipv4Addr::new(10, 0, 0, 1));
        assert_eq!(sender(v4, &header), Some(Gid::from(Ipv4Addr::new(0x60, 0x61, 0x62, 0x63))));
        let v6 = Gid([0xfe; 16]);
        assert_eq!(sender(v6, &header).map(|gid| gid.0[..2].to_vec()), Some(vec![0x68, 0x69]));
        assert_eq!(sender(v6, &header[..20]), None);
    }
}
