//! The calls on the fake's devices.

use super::objects::{Address, Object, Resource};
use super::state::{Pair, Queue, Region, State, bell, hush};
use super::{Shared, execute};
use crate::calls::{Calls, Created, Handle, Kind, ReceiveEntry, Refused, Registered, SendEntry, Transition};
use crate::{
    Access, AsyncEvent, Call, Completion, Depths, Gid, GidEntry, GidKind, Limits, LinkLayer, Mtu, Path, Port,
    PortState,
};
use harmonaize_shm::Pin;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// The fake as an implementation of the calls.
#[derive(Debug)]
pub(super) struct FakeCalls(pub(super) Arc<Shared>);

const LIMITS: Limits = Limits {
    ports: 1,
    queue_pairs: 1024,
    work_requests: 4096,
    pieces: 2,
    completion_queues: 1024,
    completions: 65_536,
    regions: 4096,
    region_bytes: 1 << 40,
    domains: 1024,
    reads: 16,
};

/// Most inline bytes, about what a card has.
const INLINE: u32 = 256;

impl FakeCalls {
    fn object(&self, from: &[&Handle], device: &str, what: Resource, number: u32) -> Object {
        Object {
            world: Arc::clone(&self.0),
            device: device.to_owned(),
            what,
            number,
            wake: None,
            _from: from.iter().map(|handle| Arc::clone(handle)).collect(),
        }
    }

    fn post<T: Clone>(
        &self,
        pair: &Handle,
        call: Call,
        entries: &[T],
        take: impl Fn(&mut Pair, &T) -> Result<(), Errno>,
    ) -> Result<(), Refused> {
        let none = |errno| Refused { taken: 0, errno };
        let of = Object::of(pair, Resource::Pair).map_err(none)?;
        let mut world = self.0.lock();
        let device = world.enter(&of.device, call, of.number, entries.len()).map_err(none)?;
        let pair = device.pairs.get_mut(&of.number).ok_or(none(Errno::INVAL))?;
        let mut posted = Ok(());
        for (taken, entry) in entries.iter().enumerate() {
            posted = take(pair, entry).map_err(|errno| Refused { taken, errno });
            if posted.is_err() {
                break;
            }
        }
        if pair.state == State::Error {
            execute::fail(device, of.number);
        }
        execute::run(&mut world, &of.device, of.number);
        posted
    }
}

impl Calls for FakeCalls {
    fn names(&self) -> Result<Vec<String>, Errno> {
        let world = self.0.lock();
        let there = world.devices.iter().filter(|(_, device)| !device.removed);
        Ok(there.map(|(name, _)| name.clone()).collect())
    }

    fn open(&self, name: &str) -> Result<Handle, Errno> {
        let mut world = self.0.lock();
        let wake = Arc::clone(&world.enter(name, Call::OpenDevice, 0, 0)?.wake);
        let mut object = self.object(&[], name, Resource::Context, 0);
        object.wake = Some(wake);
        Ok(Arc::new(object))
    }

    fn limits(&self, context: &Handle) -> Result<Limits, Errno> {
        let of = Object::of(context, Resource::Context)?;
        self.0.lock().enter(&of.device, Call::QueryDevice, 0, 0)?;
        Ok(LIMITS)
    }

    fn port(&self, context: &Handle, number: u8) -> Result<Port, Errno> {
        let of = Object::of(context, Resource::Context)?;
        let mut world = self.0.lock();
        let device = world.enter(&of.device, Call::QueryPort, 0, 0)?;
        if number != 1 {
            return Err(Errno::INVAL);
        }
        Ok(Port {
            number,
            state: if device.up { PortState::Active } else { PortState::Down },
            link_layer: LinkLayer::Ethernet,
            active_mtu: Mtu::Bytes4096,
            lid: 0,
            gids: Vec::new(),
        })
    }

    fn gids(&self, context: &Handle, _port: u8) -> Result<Vec<GidEntry>, Errno> {
        let of = Object::of(context, Resource::Context)?;
        let mut world = self.0.lock();
        let gid = world.enter(&of.device, Call::QueryGid, 0, 0)?.gid;
        let mut local = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        if let (Some(IpAddr::V4(address)), [.., a, b, c, d]) = (gid.ip(), &mut local) {
            [*a, *b, *c, *d] = address.octets();
        }
        Ok(vec![
            GidEntry { index: 0, gid: Gid(local), kind: GidKind::InfiniBandOrRoceV1 },
            GidEntry { index: 1, gid, kind: GidKind::RoceV2 },
        ])
    }

    fn async_fd<'a>(&self, context: &'a Handle) -> Result<BorrowedFd<'a>, Errno> {
        Object::of(context, Resource::Context)?.wake.as_ref().map(|fd| fd.as_fd()).ok_or(Errno::INVAL)
    }

    fn async_event(&self, context: &Handle) -> Result<Option<AsyncEvent>, Errno> {
        let of = Object::of(context, Resource::Context)?;
        let mut world = self.0.lock();
        let device = world.devices.get_mut(&of.device).ok_or(Errno::NODEV)?;
        let event = device.events.pop_front();
        if device.events.is_empty() {
            hush(&device.wake);
        }
        Ok(event)
    }

    fn present(&self, context: &Handle) -> bool {
        let world = self.0.lock();
        let device = Object::of(context, Resource::Context).ok().and_then(|of| world.devices.get(&of.device));
        device.is_some_and(|device| !device.lost && !device.removed)
    }

    fn domain(&self, context: &Handle) -> Result<Handle, Errno> {
        let of = Object::of(context, Resource::Context)?;
        let mut world = self.0.lock();
        world.enter(&of.device, Call::AllocateDomain, 0, 0)?;
        let number = world.number();
        Ok(Arc::new(self.object(&[context], &of.device, Resource::Domain, number)))
    }

    fn register(&self, domain: &Handle, memory: &Pin, access: Access) -> Result<Registered, Errno> {
        let of = Object::of(domain, Resource::Domain)?;
        let mut world = self.0.lock();
        let number = world.number();
        let device = world.enter(&of.device, Call::Register, 0, memory.memory().bytes())?;
        device.regions.insert(number, Region { domain: of.number, memory: memory.clone(), access });
        let handle = Arc::new(self.object(&[domain], &of.device, Resource::Region, number));
        Ok(Registered { handle, local_key: number, remote_key: number })
    }

    fn completion_queue(&self, context: &Handle, entries: u32) -> Result<(Handle, u32), (Call, Errno)> {
        let failed = |errno| (Call::CreateCompletionQueue, errno);
        let of = Object::of(context, Resource::Context).map_err(failed)?;
        let mut world = self.0.lock();
        let number = world.number();
        let device =
            world.enter(&of.device, Call::CreateCompletionQueue, 0, entries as usize).map_err(failed)?;
        if entries == 0 || entries > LIMITS.completions {
            return Err(failed(Errno::INVAL));
        }
        let wake = Arc::new(bell().map_err(|errno| (Call::CreateChannel, errno))?);
        let completions = VecDeque::with_capacity(entries as usize);
        let queue = Queue { entries: entries as usize, completions, armed: false, wake: Arc::clone(&wake) };
        device.queues.insert(number, queue);
        let mut object = self.object(&[context], &of.device, Resource::Queue, number);
        object.wake = Some(wake);
        Ok((Arc::new(object), entries))
    }

    fn channel_fd<'a>(&self, queue: &'a Handle) -> Result<BorrowedFd<'a>, Errno> {
        Object::of(queue, Resource::Queue)?.wake.as_ref().map(|fd| fd.as_fd()).ok_or(Errno::INVAL)
    }

    fn arm(&self, queue: &Handle) -> Result<(), Errno> {
        let of = Object::of(queue, Resource::Queue)?;
        let mut world = self.0.lock();
        let device = world.enter(&of.device, Call::Arm, 0, 0)?;
        device.queues.get_mut(&of.number).ok_or(Errno::INVAL)?.armed = true;
        Ok(())
    }

    fn take_events(&self, queue: &Handle) -> Result<u32, Errno> {
        let of = Object::of(queue, Resource::Queue)?;
        let mut world = self.0.lock();
        let device = world.enter(&of.device, Call::TakeEvent, 0, 0)?;
        let queue = device.queues.get(&of.number).ok_or(Errno::INVAL)?;
        Ok(u32::try_from(hush(&queue.wake)).unwrap_or(u32::MAX))
    }

    fn poll(&self, queue: &Handle, into: &mut Vec<Completion>, most: usize) -> Result<usize, Errno> {
        let of = Object::of(queue, Resource::Queue)?;
        let mut world = self.0.lock();
        let device = world.devices.get_mut(&of.device).ok_or(Errno::NODEV)?;
        if device.lost {
            return Err(Errno::IO);
        }
        let queue = device.queues.get_mut(&of.number).ok_or(Errno::INVAL)?;
        let found = queue.completions.len().min(most);
        into.extend(queue.completions.drain(..found));
        Ok(found)
    }

    fn queue_pair(
        &self,
        domain: &Handle,
        queue: &Handle,
        kind: Kind,
        depths: &Depths,
    ) -> Result<Created, Errno> {
        let (of, completions) = (Object::of(domain, Resource::Domain)?, Object::of(queue, Resource::Queue)?);
        let mut world = self.0.lock();
        let number = world.number();
        let device = world.enter(&of.device, Call::CreateQueuePair, 0, 0)?;
        if depths.inline_bytes > INLINE {
            return Err(Errno::INVAL);
        }
        if device.pairs.len() >= LIMITS.queue_pairs as usize {
            return Err(Errno::NOMEM);
        }
        let pair = Pair {
            kind,
            domain: of.number,
            queue: completions.number,
            state: State::Reset,
            access: Access::default(),
            remote: (Gid::default(), 0),
            queue_key: 0,
            most: (depths.sends as usize, depths.receives as usize),
            inline_bytes: depths.inline_bytes as usize,
            receives: VecDeque::with_capacity(depths.receives as usize),
            waiting: VecDeque::with_capacity(depths.sends as usize),
        };
        device.pairs.insert(number, pair);
        let handle = Arc::new(self.object(&[domain, queue], &of.device, Resource::Pair, number));
        Ok(Created { handle, number, depths: *depths })
    }

    fn modify(&self, pair: &Handle, transition: &Transition<'_>) -> Result<(), Errno> {
        let of = Object::of(pair, Resource::Pair)?;
        let mut world = self.0.lock();
        let class = match transition {
            Transition::ReadyToReceive { path, .. } => path.traffic_class.into(),
            _ => 0,
        };
        let device = world.enter(&of.device, transition.call(), of.number, class)?;
        let pair = device.pairs.get_mut(&of.number).ok_or(Errno::INVAL)?;
        let (from, to) = match transition {
            Transition::Init { .. } => (State::Reset, State::Init),
            Transition::ReadyToReceive { .. } | Transition::DatagramReadyToReceive => {
                (State::Init, State::ReadyToReceive)
            }
            Transition::ReadyToSend { .. } | Transition::DatagramReadyToSend { .. } => {
                (State::ReadyToReceive, State::ReadyToSend)
            }
            Transition::Error => (pair.state, State::Error),
        };
        if pair.state != from {
            return Err(Errno::INVAL);
        }
        match transition {
            Transition::Init { access, queue_key, .. } => {
                (pair.access, pair.queue_key) = (*access, *queue_key);
            }
            Transition::ReadyToReceive { remote, .. } => pair.remote = (remote.gid, remote.number),
            _ => {}
        }
        pair.state = to;
        if to == State::Error {
            execute::fail(device, of.number);
            execute::run(&mut world, &of.device, of.number);
        }
        Ok(())
    }

    fn post_send(&self, pair: &Handle, entries: &[SendEntry]) -> Result<(), Refused> {
        self.post(pair, Call::PostSend, entries, |pair, entry| {
            let bytes: usize = entry.pieces.iter().map(|piece| piece.bytes as usize).sum();
            if pair.state < State::ReadyToSend || (entry.inline && bytes > pair.inline_bytes) {
                return Err(Errno::INVAL);
            }
            if pair.waiting.len() >= pair.most.0 {
                return Err(Errno::NOMEM);
            }
            pair.waiting.push_back(entry.clone());
            Ok(())
        })
    }

    fn post_receive(&self, pair: &Handle, entries: &[ReceiveEntry]) -> Result<(), Refused> {
        self.post(pair, Call::PostReceive, entries, |pair, entry| {
            if pair.state < State::Init {
                return Err(Errno::INVAL);
            }
            if pair.receives.len() >= pair.most.1 {
                return Err(Errno::NOMEM);
            }
            pair.receives.push_back(*entry);
            Ok(())
        })
    }

    fn address_handle(&self, domain: &Handle, gid: Gid, _path: &Path) -> Result<Handle, Errno> {
        let of = Object::of(domain, Resource::Domain)?;
        self.0.lock().enter(&of.device, Call::CreateAddressHandle, 0, 0)?;
        Ok(Arc::new(Address { gid, _domain: Arc::clone(domain) }))
    }
}
