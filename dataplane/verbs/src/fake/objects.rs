//! Handles of the fake's objects: numbers, and what they were made from. Dropping one takes its object off the device.

use super::Shared;
use crate::calls::Handle;
use crate::{Call, Gid};
use rustix::io::Errno;
use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The object behind a handle, if it is one of this kind.
pub(super) fn object<T: Any>(handle: &Handle) -> Result<&T, Errno> {
    handle.downcast_ref().ok_or(Errno::INVAL)
}

/// What kind of thing an object is on its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resource {
    Context,
    Domain,
    Region,
    Queue,
    Pair,
}

/// An object of a device, of one kind.
pub(super) struct Object {
    pub(super) world: Arc<Shared>,
    pub(super) device: String,
    pub(super) what: Resource,
    pub(super) number: u32,
    /// Of contexts and completion queues: what becomes readable.
    pub(super) wake: Option<Arc<OwnedFd>>,
    /// What it was made from.
    pub(super) _from: Vec<Handle>,
}

impl Object {
    /// The object behind a handle, if it is of this kind.
    pub(super) fn of(handle: &Handle, what: Resource) -> Result<&Self, Errno> {
        object::<Self>(handle)
            .and_then(|object| if object.what == what { Ok(object) } else { Err(Errno::INVAL) })
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        let mut world = self.world.lock();
        let Some(device) = world.devices.get_mut(&self.device) else { return };
        let (call, pair) = match self.what {
            Resource::Context => (Call::CloseDevice, 0),
            Resource::Domain => (Call::FreeDomain, 0),
            Resource::Region => {
                device.regions.remove(&self.number);
                (Call::Deregister, 0)
            }
            Resource::Queue => {
                device.queues.remove(&self.number);
                (Call::DestroyCompletionQueue, 0)
            }
            Resource::Pair => {
                device.pairs.remove(&self.number);
                (Call::DestroyQueuePair, self.number)
            }
        };
        let thread = std::thread::current().id();
        device.record(super::Recorded { call, queue_pair: pair, count: 0, succeeded: true, thread });
    }
}

/// An address handle.
pub(super) struct Address {
    pub(super) gid: Gid,
    pub(super) _domain: Handle,
}
