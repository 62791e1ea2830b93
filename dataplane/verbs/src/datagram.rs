//! Unreliable datagrams: queue pairs without a connection, address handles.

use crate::calls::{GATHER, Kind, ReceiveEntry, SendEntry, Transition, Verb, request_identity};
use crate::completion::{Opaque, request_id};
use crate::queue_pair::{create, random_psn, source};
use crate::{
    Access, Call, Completion, CompletionQueue, Depths, Domain, Gid, Local, Path, Status, VerbsError,
};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes before a datagram's payload in the receiver's buffer: the global routing header, or what stands for it.
pub const GRH_BYTES: usize = 40;

/// Where datagrams can go: a port.
#[derive(Clone, Debug)]
pub struct AddressHandle {
    handle: Opaque,
    domain: Arc<Domain>,
    gid: Gid,
}

impl AddressHandle {
    /// To a port's GID, by a path of the device.
    pub fn create(domain: &Arc<Domain>, gid: Gid, path: &Path) -> Result<Self, VerbsError> {
        let device = &domain.device;
        source(domain, path)?;
        let handle = device.calls.address_handle(&domain.handle.0, gid, path).map_err(|errno| {
            let object = format!("address handle to {gid} (GID index {})", path.gid_index);
            device.failed(Call::CreateAddressHandle, object, errno)
        })?;
        Ok(Self { handle: Opaque(handle), domain: Arc::clone(domain), gid })
    }

    /// Where it leads.
    pub fn gid(&self) -> Gid {
        self.gid
    }
}

/// A datagram that arrived.
#[derive(Debug)]
pub struct Received {
    /// The buffer: [`GRH_BYTES`] of header, then the payload. The memory is the caller's again.
    pub buffer: Local,
    /// Length of the payload.
    pub bytes: u32,
    /// The sender's queue pair.
    pub source: u32,
    /// Its immediate data.
    pub immediate: Option<u32>,
}

/// What a settled completion gave back.
#[derive(Debug)]
pub enum Delivered {
    /// The datagram of this token has left, or could not.
    Sent(u64),
    /// A datagram arrived.
    Received(Received),
    /// A receive request ended without a datagram; its buffer.
    Unused(Local),
}

/// A queue pair for datagrams. Every request is signalled.
#[derive(Debug)]
pub struct Datagram {
    // Dropped in this order: the queue pair is destroyed before its buffers are released.
    handle: Opaque,
    sent: VecDeque<(Option<Local>, AddressHandle, u64)>,
    buffers: VecDeque<Local>,
    queue: Arc<CompletionQueue>,
    domain: Arc<Domain>,
    number: u32,
    gid: Gid,
    queue_key: u32,
    depths: Depths,
    most: usize,
    identity: u32,
    settled: u32,
    received: u32,
    entries: Vec<ReceiveEntry>,
}

impl Datagram {
    /// Ready to send and receive. Only datagrams that name `queue_key` are taken in.
    pub fn create(
        domain: &Arc<Domain>,
        queue: &Arc<CompletionQueue>,
        depths: Depths,
        path: &Path,
        queue_key: u32,
    ) -> Result<Self, VerbsError> {
        let made = create(domain, queue, Kind::Datagram, depths)?;
        let device = &domain.device;
        let (gid, port) = source(domain, path)?;
        let handle = Opaque(made.handle);
        let steps = [
            Transition::Init { port: path.port, access: Access::LOCAL, queue_key },
            Transition::DatagramReadyToReceive,
            Transition::DatagramReadyToSend { psn: random_psn() },
        ];
        for step in &steps {
            let object = || format!("datagram queue pair {:#x}", made.number);
            device
                .calls
                .modify(&handle.0, step)
                .map_err(|errno| device.failed(step.call(), object(), errno))?;
        }
        Ok(Self {
            handle,
            sent: VecDeque::with_capacity(made.depths.sends as usize),
            buffers: VecDeque::with_capacity(made.depths.receives as usize),
            queue: Arc::clone(queue),
            domain: Arc::clone(domain),
            number: made.number,
            gid,
            queue_key,
            depths: made.depths,
            most: path.mtu.unwrap_or(port.active_mtu).bytes(),
            identity: request_identity(),
            settled: 0,
            received: 0,
            entries: Vec::with_capacity(made.depths.receives as usize),
        })
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Its port's address.
    pub fn gid(&self) -> Gid {
        self.gid
    }

    /// What senders must name.
    pub fn queue_key(&self) -> u32 {
        self.queue_key
    }

    /// Most bytes of a datagram's payload: the path's MTU.
    pub fn max_payload(&self) -> usize {
        self.most
    }

    /// Where its requests complete.
    pub fn completion_queue(&self) -> &Arc<CompletionQueue> {
        &self.queue
    }

    /// Sends one datagram. The memory is held until settled, unless `inline`, which
    /// copies it at once.
    pub fn send(
        &mut self,
        from: Local,
        to: &AddressHandle,
        number: u32,
        queue_key: u32,
        inline: bool,
        token: u64,
    ) -> Result<(), VerbsError> {
        let room = (self.depths.sends as usize).saturating_sub(self.sent.len());
        if room == 0 {
            return Err(VerbsError::Full { requested: 1, room });
        }
        let ours = |domain: &Arc<Domain>| Arc::ptr_eq(domain, &self.domain);
        if !ours(from.region().domain()) || !ours(&to.domain) {
            return Err(VerbsError::NotRegistered);
        }
        let (bytes, most) = (from.span().bytes(), self.most);
        let most = if inline { most.min(self.depths.inline_bytes as usize) } else { most };
        if bytes > most {
            let (value, most) = (bytes as u64, most as u64);
            return Err(VerbsError::OutOfRange { what: "a datagram's length", value, most });
        }
        let mut pieces = [crate::calls::Piece::default(); GATHER];
        if let Some(piece) = pieces.first_mut() {
            *piece = from.piece();
        }
        let sequence = self.settled.wrapping_add(self.sent.len() as u32);
        let entry = SendEntry {
            id: request_id(self.identity, false, sequence),
            verb: Verb::Send,
            pieces,
            count: 1,
            remote: 0,
            remote_key: 0,
            immediate: 0,
            inline,
            signalled: true,
            destination: Some((Arc::clone(&to.handle.0), number, queue_key)),
        };
        let device = &self.domain.device;
        device.calls.post_send(&self.handle.0, &[entry]).map_err(|refused| {
            device.failed(Call::PostSend, format!("datagram queue pair {:#x}", self.number), refused.errno)
        })?;
        self.sent.push_back(((!inline).then_some(from), to.clone(), token));
        Ok(())
    }

    /// Posts buffers to receive into, each with room for [`GRH_BYTES`] and a payload; `buffers` is left empty. On an error,
    /// those left were not posted.
    pub fn post_receives(&mut self, buffers: &mut Vec<Local>) -> Result<(), VerbsError> {
        let room = (self.depths.receives as usize).saturating_sub(self.buffers.len());
        if buffers.len() > room {
            return Err(VerbsError::Full { requested: buffers.len(), room });
        }
        let fit = |local: &Local| {
            let region = local.region();
            Arc::ptr_eq(region.domain(), &self.domain) && region.access().local_write
        };
        if !buffers.iter().all(fit) {
            return Err(VerbsError::NotRegistered);
        }
        self.entries.clear();
        for (ahead, local) in buffers.iter().enumerate() {
            let id = request_id(self.identity, true, self.received.wrapping_add(ahead as u32));
            self.entries.push(ReceiveEntry { id, piece: local.piece() });
        }
        let device = &self.domain.device;
        let posted = device.calls.post_receive(&self.handle.0, &self.entries);
        let taken = posted.map_or_else(|refused| refused.taken, |()| buffers.len()).min(buffers.len());
        self.received = self.received.wrapping_add(taken as u32);
        self.buffers.extend(buffers.drain(..taken));
        posted.map_err(|refused| {
            device.failed(Call::PostReceive, format!("datagram queue pair {:#x}", self.number), refused.errno)
        })
    }

    /// Gives back what a completion was for; nothing if it was settled before.
    pub fn handle_completion(&mut self, completion: &Completion) -> Result<Option<Delivered>, VerbsError> {
        if completion.pair() != self.identity {
            let (found, expected) = (completion.queue_pair(), self.number);
            return Err(VerbsError::ForeignCompletion { found, expected });
        }
        if !completion.is_receive() {
            if completion.sequence() != self.settled {
                return Ok(None);
            }
            let Some((_, _, token)) = self.sent.pop_front() else { return Ok(None) };
            self.settled = self.settled.wrapping_add(1);
            return Ok(Some(Delivered::Sent(token)));
        }
        if completion.sequence() != self.received.wrapping_sub(self.buffers.len() as u32) {
            return Ok(None);
        }
        let Some(buffer) = self.buffers.pop_front() else { return Ok(None) };
        if completion.status() != Status::Success || (completion.bytes() as usize) < GRH_BYTES {
            return Ok(Some(Delivered::Unused(buffer)));
        }
        let bytes = completion.bytes() - GRH_BYTES as u32;
        let (source, immediate) = (completion.source(), completion.immediate());
        Ok(Some(Delivered::Received(Received { buffer, bytes, source, immediate })))
    }
}
