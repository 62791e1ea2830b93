//! Devices inside the process: a fabric that moves the bytes itself, records the calls, and breaks on demand.
//!
//! Nothing is retried and nothing takes time: a request is carried out when it is posted (or released), in order. Where a
//! device would retry until it gives up, the fake gives up at once.

mod calls;
mod execute;
mod objects;
mod state;

use crate::{AsyncEvent, Call, Devices, Status};
use calls::FakeCalls;
use rustix::io::Errno;
use state::{Device, World, ring};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The next call of this kind on the device fails so, once.
    Fail(Call, Errno),
    /// The next work request of the device's send queues completes so, and its queue pair goes to the error state.
    Complete(Status),
    /// The device is gone: an event says so, every call fails, everyone who sleeps on it wakes.
    DeviceLost,
    /// The device is taken off the host without notice. As with rxe, it goes on serving whoever has it open. Adding it
    /// anew brings it back.
    DeviceRemoved,
    /// The port is down, and requests to and from it fail, until [`Fault::PortUp`].
    PortDown,
    /// The port is active again.
    PortUp,
    /// No queue pairs beyond those there are.
    NoQueuePairsLeft,
}

/// A call as the fake saw it. Polling is not recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Which.
    pub call: Call,
    /// Number of the queue pair, or 0.
    pub queue_pair: u32,
    /// What the call counts, or 0. It is work requests of a post, bytes of a registration, entries of a completion
    /// queue, or traffic class of a connection.
    pub count: u64,
    /// Whether it succeeded.
    pub succeeded: bool,
    /// Who called.
    pub thread: ThreadId,
}

/// The fabric's state under its lock.
#[derive(Debug, Default)]
struct Shared(Mutex<World>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A network of fake devices, each with one port. Threads may share it.
#[derive(Clone, Debug, Default)]
pub struct Fabric {
    shared: Arc<Shared>,
}

impl Fabric {
    /// Without devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a device with port 1, Ethernet and MTU 4096. GID 0 is link-local of RoCE v1, and GID 1 is the address with
    /// RoCE v2. It fails where the process has no descriptor left.
    pub fn add(&self, name: &str, address: Ipv4Addr) -> Result<(), Errno> {
        self.shared.lock().devices.insert(name.to_owned(), Device::new(address.into())?);
        Ok(())
    }

    /// Its devices.
    pub fn devices(&self) -> Devices {
        Devices { calls: Arc::new(FakeCalls(Arc::clone(&self.shared))) }
    }

    /// Breaks something on a device.
    pub fn inject(&self, device: &str, fault: Fault) {
        let mut world = self.shared.lock();
        let Some(device) = world.devices.get_mut(device) else { return };
        match fault {
            Fault::Fail(..) | Fault::Complete(_) => device.faults.push_back(fault),
            Fault::DeviceLost => {
                device.lost = true;
                device.push_event(AsyncEvent::DeviceFatal);
                device.queues.values().for_each(|queue| ring(&queue.wake));
            }
            Fault::DeviceRemoved => device.removed = true,
            Fault::PortDown => {
                device.up = false;
                device.push_event(AsyncEvent::PortDown(1));
            }
            Fault::PortUp => {
                device.up = true;
                device.push_event(AsyncEvent::PortActive(1));
            }
            Fault::NoQueuePairsLeft => device.no_pairs = true,
        }
    }

    /// Holds back the device's work requests, as a slow device does, until [`Self::release`].
    pub fn hold(&self, device: &str) {
        if let Some(device) = self.shared.lock().devices.get_mut(device) {
            device.paused = true;
        }
    }

    /// Carries out what was held back.
    pub fn release(&self, device: &str) {
        let mut world = self.shared.lock();
        let Some(found) = world.devices.get_mut(device) else { return };
        found.paused = false;
        let pairs: Vec<u32> = found.pairs.keys().copied().collect();
        for pair in pairs {
            execute::run(&mut world, device, pair);
        }
    }

    /// Records no more calls, on any device: for long runs, and for those that count allocations.
    pub fn stop_recording(&self) {
        self.shared.lock().devices.values_mut().for_each(|device| device.silent = true);
    }

    /// The calls on a device so far, and forgets them.
    pub fn take_calls(&self, device: &str) -> Vec<Recorded> {
        let mut world = self.shared.lock();
        world.devices.get_mut(device).map(|device| std::mem::take(&mut device.calls)).unwrap_or_default()
    }
}
