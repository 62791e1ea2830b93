//! Reliable connected queue pairs: created, connected, posted to, settled.

use crate::calls::{Kind, ReceiveEntry, SendEntry, Transition, Verb, request_identity};
use crate::completion::{Opaque, request_id};
use crate::{
    Access, Call, Completion, CompletionQueue, Domain, Gid, Local, Mtu, PortState, VerbsError, Work,
};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::Arc;

/// Most retries that a path may ask for: 7 means for ever on some devices.
const MOST_RETRIES: u8 = 6;

/// State of a queue pair that has no peer yet: INIT. It takes receive requests, and nothing else.
#[derive(Debug)]
pub enum Unconnected {}

/// State of a queue pair that may send: RTS, or ERR after a failed completion.
#[derive(Debug)]
pub enum Connected {}

/// How much a queue pair may have outstanding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depths {
    /// Work requests in the send queue.
    pub sends: u32,
    /// Work requests in the receive queue.
    pub receives: u32,
    /// Bytes of a request with inline data. A device that has less refuses, and one that has more reports so in
    /// [`QueuePair::depths`].
    pub inline_bytes: u32,
}

/// How packets go to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// The device's port, from 1.
    pub port: u8,
    /// Which of the port's GIDs is the source.
    pub gid_index: u8,
    /// Most payload per packet; none for what both ends' ports have.
    pub mtu: Option<Mtu>,
    /// DSCP and ECN bits.
    pub traffic_class: u8,
    /// Time to live.
    pub hop_limit: u8,
    /// 20 bits; see [`flow_label`](crate::flow_label).
    pub flow_label: u32,
    /// `InfiniBand`'s service level.
    pub service_level: u8,
    /// Wait for an acknowledgement: 4.096 us times two to this power (at most 31), before a retry.
    pub timeout: u8,
    /// Retries before a request fails, at most 6.
    pub retries: u8,
    /// Retries when the peer has no receive request, at most 6.
    pub receiver_not_ready_retries: u8,
    /// Reads in flight at once, in each direction; lowered to the device's limit.
    pub reads: u8,
}

impl Default for Path {
    fn default() -> Self {
        Self {
            port: 1,
            gid_index: 0,
            mtu: None,
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
            service_level: 0,
            timeout: 16,
            retries: MOST_RETRIES,
            receiver_not_ready_retries: MOST_RETRIES,
            reads: 4,
        }
    }
}

impl Path {
    fn check(&self) -> Result<(), VerbsError> {
        let limits = [
            ("retries", self.retries, MOST_RETRIES),
            ("receiver-not-ready retries", self.receiver_not_ready_retries, MOST_RETRIES),
            ("timeout", self.timeout, 31),
            ("service level", self.service_level, 15),
        ];
        for (what, value, most) in limits {
            if value > most {
                return Err(VerbsError::OutOfRange { what, value: value.into(), most: most.into() });
            }
        }
        if self.flow_label > 0xf_ffff {
            let (what, value) = ("flow label", self.flow_label.into());
            return Err(VerbsError::OutOfRange { what, value, most: 0xf_ffff });
        }
        Ok(())
    }
}

/// One end of a connection, to be told to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Number of the queue pair, 24 bits.
    pub number: u32,
    /// First packet sequence number, 24 bits.
    pub psn: u32,
    /// Address of its port.
    pub gid: Gid,
    /// Most payload per packet that it takes.
    pub mtu: Mtu,
    /// Local identifier, of `InfiniBand`.
    pub lid: u16,
    /// Reads that it answers at once; 0: none.
    pub reads: u8,
}

/// What a work request holds until it is done.
#[derive(Debug)]
struct PendingWork {
    _local: [Option<Local>; crate::calls::GATHER],
    token: u64,
}

/// A reliable connected queue pair. Both queues complete into one completion queue.
#[derive(Debug)]
pub struct QueuePair<State> {
    // Dropped in this order: the queue pair is destroyed before what its work requests hold is released.
    handle: Opaque,
    pending: VecDeque<PendingWork>,
    queue: Arc<CompletionQueue>,
    domain: Arc<Domain>,
    endpoint: Endpoint,
    path: Path,
    depths: Depths,
    identity: u32,
    /// Sequence of the oldest held request.
    completed_sequence: u32,
    unsignalled: u32,
    receives: u32,
    received: u32,
    sends: Vec<SendEntry>,
    empty: Vec<ReceiveEntry>,
    state: PhantomData<State>,
}

impl QueuePair<Unconnected> {
    /// A queue pair in `domain`, both of whose queues complete into `queue`. Its path says which port and GID it sends from.
    pub fn create(
        domain: &Arc<Domain>,
        queue: &Arc<CompletionQueue>,
        depths: Depths,
        path: Path,
    ) -> Result<Self, VerbsError> {
        path.check()?;
        let made = create(domain, queue, Kind::Reliable, depths)?;
        let device = &domain.device;
        let (gid, port) = source(domain, &path)?;
        let handle = Opaque(made.handle);
        let init = Transition::Init { port: path.port, access: Access::REMOTE, queue_key: 0 };
        let object = || format!("queue pair {:#x} (RESET)", made.number);
        device
            .calls
            .modify(&handle.0, &init)
            .map_err(|errno| device.failed(Call::ToInit, object(), errno))?;
        let mtu = path.mtu.unwrap_or(port.active_mtu);
        let psn = random_psn();
        let reads = path.reads.min(device.limits().reads);
        let endpoint = Endpoint { number: made.number, psn, gid, mtu, lid: port.lid, reads };
        Ok(Self {
            handle,
            pending: VecDeque::with_capacity(made.depths.sends as usize),
            queue: Arc::clone(queue),
            domain: Arc::clone(domain),
            endpoint,
            path,
            depths: made.depths,
            identity: request_identity(),
            completed_sequence: 0,
            unsignalled: 0,
            receives: 0,
            received: 0,
            sends: Vec::with_capacity(made.depths.sends as usize),
            empty: Vec::with_capacity(made.depths.receives as usize),
            state: PhantomData,
        })
    }

    /// Connects to the peer's end, which must do the same with this one's. The path's MTU is the lower of both ends'.
    /// Receive requests posted before are kept: post them first, and the peer finds them.
    pub fn connect(self, remote: &Endpoint) -> Result<QueuePair<Connected>, VerbsError> {
        for (what, value) in [("queue pair number", remote.number), ("packet sequence number", remote.psn)] {
            if value > 0xff_ffff {
                return Err(VerbsError::OutOfRange { what, value: value.into(), most: 0xff_ffff });
            }
        }
        let device = Arc::clone(&self.domain.device);
        let path = Path { reads: self.endpoint.reads.min(remote.reads), ..self.path };
        let mtu = self.endpoint.mtu.min(remote.mtu);
        let steps = [
            Transition::ReadyToReceive { remote, path: &path, mtu },
            Transition::ReadyToSend { psn: self.endpoint.psn, path: &path },
        ];
        for step in &steps {
            device.calls.modify(&self.handle.0, step).map_err(|errno| {
                let (from, to) = (self.endpoint, remote);
                let object = format!(
                    "queue pair {:#x} at {} (GID index {}) to {:#x} at {}, MTU {mtu}",
                    from.number, from.gid, path.gid_index, to.number, to.gid
                );
                device.failed(step.call(), object, errno)
            })?;
        }
        Ok(QueuePair {
            handle: self.handle,
            pending: self.pending,
            queue: self.queue,
            domain: self.domain,
            endpoint: Endpoint { mtu, ..self.endpoint },
            path,
            depths: self.depths,
            identity: self.identity,
            completed_sequence: self.completed_sequence,
            unsignalled: self.unsignalled,
            receives: self.receives,
            received: self.received,
            sends: self.sends,
            empty: self.empty,
            state: PhantomData,
        })
    }
}

impl<State> QueuePair<State> {
    /// This end, to be told to the peer. Once connected, its MTU is the connection's.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// Its number, as in [`Completion::queue_pair`].
    pub fn number(&self) -> u32 {
        self.endpoint.number
    }

    /// How much it may have outstanding.
    pub fn depths(&self) -> Depths {
        self.depths
    }

    /// Where its requests complete.
    pub fn completion_queue(&self) -> &Arc<CompletionQueue> {
        &self.queue
    }

    /// Its protection domain.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Whether a completion is of one of its requests.
    pub fn owns(&self, completion: &Completion) -> bool {
        completion.pair() == self.identity
    }

    /// Receive requests outstanding.
    pub fn receives(&self) -> u32 {
        self.receives
    }

    /// Posts `count` receive requests of no bytes, for as many writes with immediate. One call, no allocation.
    pub fn post_receives(&mut self, count: u32) -> Result<(), VerbsError> {
        let room = self.depths.receives.saturating_sub(self.receives);
        if count > room {
            return Err(VerbsError::Full { requested: count as usize, room: room as usize });
        }
        self.empty.clear();
        for ahead in 0..count {
            let id = request_id(self.identity, true, self.received.wrapping_add(ahead));
            self.empty.push(ReceiveEntry { id, ..ReceiveEntry::default() });
        }
        let device = &self.domain.device;
        let posted = device.calls.post_receive(&self.handle.0, &self.empty);
        let taken = posted.map_or_else(|refused| refused.taken as u32, |()| count);
        self.receives += taken;
        self.received = self.received.wrapping_add(taken);
        posted.map_err(|refused| device.failed(Call::PostReceive, self.describe(), refused.errno))
    }

    /// Takes note of a completion. One of the send queue releases its request and all before it: `released` gets their
    /// tokens, oldest first. Says how many. One of the receive queue makes room for another receive request. A completion
    /// that was settled before releases nothing.
    pub fn handle_completion(
        &mut self,
        completion: &Completion,
        mut released: impl FnMut(u64),
    ) -> Result<usize, VerbsError> {
        if completion.pair() != self.identity {
            let (found, expected) = (completion.queue_pair(), self.endpoint.number);
            return Err(VerbsError::ForeignCompletion { found, expected });
        }
        if completion.is_receive() {
            let oldest = self.received.wrapping_sub(self.receives);
            if completion.sequence() == oldest && self.receives > 0 {
                self.receives -= 1;
            }
            return Ok(0);
        }
        let ahead = completion.sequence().wrapping_sub(self.completed_sequence) as usize;
        if ahead >= self.pending.len() {
            return Ok(0);
        }
        for held in self.pending.drain(..=ahead) {
            released(held.token);
        }
        self.completed_sequence = self.completed_sequence.wrapping_add(ahead as u32 + 1);
        Ok(ahead + 1)
    }

    fn describe(&self) -> String {
        format!("queue pair {:#x}", self.endpoint.number)
    }
}

impl QueuePair<Connected> {
    /// Free entries of the send queue.
    pub fn room(&self) -> usize {
        (self.depths.sends as usize).saturating_sub(self.pending.len())
    }

    /// Work requests posted and not settled.
    pub fn outstanding(&self) -> usize {
        self.pending.len()
    }

    /// Posts all of `work`, in order, as one list; `work` is left empty. Each request holds its memory until settled. At
    /// least one in half a queue is signalled, whether asked for or not. On an error, those left in `work` were not
    /// posted. Costs one call of the library, no system call on most devices, no allocation.
    pub fn post(&mut self, work: &mut Vec<Work>) -> Result<(), VerbsError> {
        if work.len() > self.room() {
            return Err(VerbsError::Full { requested: work.len(), room: self.room() });
        }
        work.iter().try_for_each(|work| self.check(work))?;
        self.sends.clear();
        let first = self.completed_sequence.wrapping_add(self.pending.len() as u32);
        let every = (self.depths.sends / 2).max(1);
        for (ahead, work) in work.iter().enumerate() {
            let id = request_id(self.identity, false, first.wrapping_add(ahead as u32));
            let mut entry = work.entry(id);
            self.unsignalled += 1;
            entry.signalled |= self.unsignalled >= every;
            if entry.signalled {
                self.unsignalled = 0;
            }
            self.sends.push(entry);
        }
        let device = &self.domain.device;
        let posted = device.calls.post_send(&self.handle.0, &self.sends);
        let taken = posted.map_or_else(|refused| refused.taken, |()| work.len()).min(work.len());
        for work in work.drain(..taken) {
            let local = if work.is_inline() { [const { None }; crate::calls::GATHER] } else { work.local };
            self.pending.push_back(PendingWork { _local: local, token: work.token });
        }
        posted.map_err(|refused| device.failed(Call::PostSend, self.describe(), refused.errno))
    }

    fn check(&self, work: &Work) -> Result<(), VerbsError> {
        let locals = work.local.iter().flatten();
        if locals.clone().any(|local| !Arc::ptr_eq(local.region().domain(), &self.domain)) {
            return Err(VerbsError::NotRegistered);
        }
        let most = u64::from(if work.is_inline() { self.depths.inline_bytes } else { 1 << 31 });
        if work.bytes() > most || (work.is_inline() && work.verb == Verb::Read) {
            let what = if work.is_inline() { "inline data" } else { "a work request's length" };
            return Err(VerbsError::OutOfRange { what, value: work.bytes(), most });
        }
        Ok(())
    }

    /// Ends it at once: what is outstanding completes as flushed, and the peer's requests fail.
    pub fn abort(&mut self) -> Result<(), VerbsError> {
        let device = &self.domain.device;
        device
            .calls
            .modify(&self.handle.0, &Transition::Error)
            .map_err(|errno| device.failed(Call::ToError, self.describe(), errno))
    }
}

/// A raw queue pair, within the device's limits.
pub(crate) fn create(
    domain: &Arc<Domain>,
    queue: &Arc<CompletionQueue>,
    kind: Kind,
    depths: Depths,
) -> Result<crate::calls::Created, VerbsError> {
    let device = &domain.device;
    if !Arc::ptr_eq(device, &queue.device) {
        return Err(VerbsError::NotRegistered);
    }
    let most = device.limits().work_requests;
    for (what, value) in [("send queue depth", depths.sends), ("receive queue depth", depths.receives)] {
        if value > most {
            return Err(VerbsError::OutOfRange { what, value: value.into(), most: most.into() });
        }
    }
    device.calls.queue_pair(&domain.handle.0, &queue.handle.0, kind, &depths).map_err(|errno| {
        let name = device.name().to_owned();
        if errno == Errno::NOMEM || errno == Errno::NOSPC || errno == Errno::AGAIN {
            return VerbsError::QueuePairsExhausted {
                device: name,
                errno,
                most: device.limits().queue_pairs,
            };
        }
        let object = format!(
            "queue pair with {} sends, {} receives, {} bytes inline",
            depths.sends, depths.receives, depths.inline_bytes
        );
        device.failed(Call::CreateQueuePair, object, errno)
    })
}

/// The source GID and port of a path; the port must be active.
pub(crate) fn source(domain: &Domain, path: &Path) -> Result<(Gid, crate::Port), VerbsError> {
    let device = &domain.device;
    let port = device.port(path.port)?;
    if port.state != PortState::Active {
        let (device, state) = (device.name().to_owned(), port.state);
        return Err(VerbsError::PortDown { device, port: path.port, state });
    }
    if let Some(asked) = path.mtu.filter(|mtu| *mtu > port.active_mtu) {
        let (device, active) = (device.name().to_owned(), port.active_mtu);
        return Err(VerbsError::MtuTooLarge { requested: asked, active, device, port: path.port });
    }
    let gid = device.gid(path.port, path.gid_index)?;
    Ok((gid, port))
}

/// 24 bits that a late packet of an earlier connection does not know.
pub(crate) fn random_psn() -> u32 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish() as u32 & 0xff_ffff
}
