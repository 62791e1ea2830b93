//! What the fake devices know: regions, queues and queue pairs by their numbers.

use super::{Fault, Recorded};
use crate::calls::CompletionEntry;
use crate::calls::{Kind, ReceiveEntry, SendEntry};
use crate::{Access, AsyncEvent, Call, Completion, Gid};
use harmonaize_shm::Pin;
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Everything on the fabric.
#[derive(Debug, Default)]
pub(super) struct World {
    pub(super) devices: BTreeMap<String, Device>,
    next: u32,
}

/// A device.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) gid: Gid,
    pub(super) lost: bool,
    pub(super) removed: bool,
    pub(super) up: bool,
    pub(super) paused: bool,
    pub(super) no_pairs: bool,
    pub(super) faults: VecDeque<Fault>,
    pub(super) calls: Vec<Recorded>,
    /// Calls are not recorded: a long run would hold them all.
    pub(super) silent: bool,
    pub(super) events: VecDeque<AsyncEvent>,
    pub(super) wake: Arc<OwnedFd>,
    pub(super) regions: BTreeMap<u32, Region>,
    pub(super) queues: BTreeMap<u32, Queue>,
    pub(super) pairs: BTreeMap<u32, Pair>,
}

/// Registered memory, by its key.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) domain: u32,
    pub(super) memory: Pin,
    pub(super) access: Access,
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) entries: usize,
    pub(super) completions: VecDeque<Completion>,
    pub(super) armed: bool,
    pub(super) wake: Arc<OwnedFd>,
}

/// A state of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum State {
    Reset,
    Init,
    ReadyToReceive,
    ReadyToSend,
    Error,
}

/// A queue pair.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) kind: Kind,
    pub(super) domain: u32,
    pub(super) queue: u32,
    pub(super) state: State,
    pub(super) access: Access,
    /// Its peer's port and number.
    pub(super) remote: (Gid, u32),
    pub(super) queue_key: u32,
    pub(super) most: (usize, usize),
    pub(super) inline_bytes: usize,
    pub(super) receives: VecDeque<ReceiveEntry>,
    /// Sends that wait because the device holds them.
    pub(super) waiting: VecDeque<SendEntry>,
}

/// A descriptor that [`ring`] makes readable.
pub(super) fn bell() -> Result<OwnedFd, Errno> {
    use rustix::event::EventfdFlags;
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// Makes it readable. It is full only where it is readable already.
pub(super) fn ring(fd: &OwnedFd) {
    let _full = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

/// How often it was rung since; quiet afterwards.
pub(super) fn hush(fd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(fd, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}

impl World {
    /// A number that no object had yet.
    pub(super) fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// The device of a call, unless the call is to fail. Records it either way.
    pub(super) fn enter(
        &mut self,
        device: &str,
        call: Call,
        pair: u32,
        count: usize,
    ) -> Result<&mut Device, Errno> {
        let device = self.devices.get_mut(device).ok_or(Errno::NODEV)?;
        let planned =
            device.faults.iter().position(|fault| matches!(fault, Fault::Fail(of, _) if *of == call));
        let planned = planned.and_then(|at| device.faults.remove(at));
        let failure = match planned {
            _ if device.lost => Some(Errno::IO),
            Some(Fault::Fail(_, errno)) => Some(errno),
            _ if call == Call::CreateQueuePair && device.no_pairs => Some(Errno::NOMEM),
            _ => None,
        };
        let succeeded = failure.is_none();
        let thread = std::thread::current().id();
        device.record(Recorded { call, queue_pair: pair, count: count as u64, succeeded, thread });
        failure.map_or(Ok(device), Err)
    }

    /// The device with this address, if packets reach it.
    pub(super) fn at(&mut self, gid: Gid) -> Option<&mut Device> {
        self.devices.values_mut().find(|device| device.gid == gid && device.up && !device.lost)
    }
}

impl Device {
    pub(super) fn new(gid: Gid) -> Result<Self, Errno> {
        Ok(Self {
            gid,
            lost: false,
            removed: false,
            up: true,
            paused: false,
            no_pairs: false,
            faults: VecDeque::new(),
            calls: Vec::new(),
            silent: false,
            events: VecDeque::new(),
            wake: Arc::new(bell()?),
            regions: BTreeMap::new(),
            queues: BTreeMap::new(),
            pairs: BTreeMap::new(),
        })
    }

    pub(super) fn record(&mut self, call: Recorded) {
        if !self.silent {
            self.calls.push(call);
        }
    }

    pub(super) fn push_event(&mut self, event: AsyncEvent) {
        self.events.push_back(event);
        ring(&self.wake);
    }

    /// Puts a completion into a queue, and wakes who waits.
    pub(super) fn complete(&mut self, queue: u32, completion: CompletionEntry) {
        let Some(to) = self.queues.get_mut(&queue) else { return };
        if to.completions.len() >= to.entries {
            self.push_event(AsyncEvent::CompletionQueueError);
            return;
        }
        to.completions.push_back(Completion::from(completion));
        if std::mem::take(&mut to.armed) {
            ring(&to.wake);
        }
    }
}
