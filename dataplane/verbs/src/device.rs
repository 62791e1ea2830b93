//! Devices: which there are, what their ports and limits are, and what happens to them.

use crate::calls::Calls;
use crate::completion::Opaque;
use crate::{Call, Gid, GidEntry, GidKind, Mtu, VerbsError};
use rustix::io::Errno;
use std::fmt;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a device allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Ports, numbered from 1.
    pub ports: u8,
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Outstanding work requests of a queue.
    pub work_requests: u32,
    /// Pieces of memory in a work request.
    pub pieces: u32,
    /// Completion queues.
    pub completion_queues: u32,
    /// Entries of a completion queue.
    pub completions: u32,
    /// Registered regions.
    pub regions: u32,
    /// Bytes of a region.
    pub region_bytes: u64,
    /// Protection domains.
    pub domains: u32,
    /// Reads that a queue pair may have in flight, and answer at once.
    pub reads: u8,
}

/// State of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// No link.
    Down,
    /// Link, not configured.
    Initialize,
    /// Configured, no data yet.
    Armed,
    /// In use.
    Active,
    /// Link lost for the moment.
    ActiveDefer,
    /// Something else.
    Unknown,
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Down => "DOWN",
            Self::Initialize => "INIT",
            Self::Armed => "ARMED",
            Self::Active => "ACTIVE",
            Self::ActiveDefer => "ACTIVE_DEFER",
            Self::Unknown => "of unknown state",
        })
    }
}

/// What carries a port's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// `InfiniBand`.
    InfiniBand,
    /// Ethernet, that is `RoCE`.
    Ethernet,
    /// Something else.
    Unknown,
}

/// A port of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// From 1.
    pub number: u8,
    /// Whether packets flow.
    pub state: PortState,
    /// What carries them.
    pub link_layer: LinkLayer,
    /// Largest payload of a packet now.
    pub active_mtu: Mtu,
    /// Local identifier, of `InfiniBand`; 0 over Ethernet.
    pub lid: u16,
    /// Entries of its GID table that are in use.
    pub gids: Vec<GidEntry>,
}

/// Where an IP address is: device, port, entry of the port's GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortRef {
    /// The device's name.
    pub device: String,
    /// Its port.
    pub port: u8,
    /// Which of the port's GIDs.
    pub gid_index: u8,
}

/// What happened to a device or to something on it: `ibv_get_async_event`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// The device has failed for good, or was taken away.
    DeviceFatal,
    /// A port became active.
    PortActive(u8),
    /// A port went down.
    PortDown(u8),
    /// A queue pair failed outside of any work request: its number.
    QueuePairFatal(u32),
    /// A completion queue overran.
    CompletionQueueError,
    /// A port's GID table changed.
    GidsChanged(u8),
    /// Something that this crate has no use for: `enum ibv_event_type`.
    Other(u32),
}

/// All devices that one can open: the host's, or a fake fabric's.
#[derive(Clone, Debug)]
pub struct Devices {
    pub(crate) calls: Arc<dyn Calls>,
}

impl Devices {
    /// Those that an implementation of the raw calls has.
    pub fn new(calls: Arc<dyn Calls>) -> Self {
        Self { calls }
    }

    /// Their names, sorted. None where the kernel has no RDMA.
    pub fn names(&self) -> Result<Vec<String>, VerbsError> {
        let mut names = self.calls.names().map_err(VerbsError::failed(Call::ListDevices, "the host"))?;
        names.sort();
        Ok(names)
    }

    /// Opens a device by its name, as in `/sys/class/infiniband`.
    pub fn open(&self, name: &str) -> Result<Arc<Device>, VerbsError> {
        let present = self.names()?;
        if !present.iter().any(|present| present == name) {
            return Err(VerbsError::NoSuchDevice { name: name.to_owned(), present });
        }
        let handle = self.calls.open(name).map_err(VerbsError::failed(Call::OpenDevice, name))?;
        let limits = self.calls.limits(&handle).map_err(VerbsError::failed(Call::QueryDevice, name))?;
        Ok(Arc::new(Device {
            handle: Opaque(handle),
            calls: Arc::clone(&self.calls),
            name: name.to_owned(),
            limits,
            lost: AtomicBool::new(false),
        }))
    }

    /// Where an address is. It is the first RoCE v2 entry for it on an active port, else the first entry for it at all.
    /// Opens each device for a moment; devices that cannot be opened are passed over.
    pub fn find(&self, address: IpAddr) -> Result<PortRef, VerbsError> {
        let wanted = Gid::from(address);
        let mut best: Option<(u8, PortRef)> = None;
        for name in self.names()? {
            let Ok(device) = self.open(&name) else { continue };
            for port in device.ports()? {
                for entry in port.gids.iter().filter(|entry| entry.gid == wanted) {
                    let rank = u8::from(entry.kind == GidKind::RoceV2) * 2
                        + u8::from(port.state == PortState::Active);
                    if best.as_ref().is_none_or(|(found, _)| rank > *found) {
                        let place =
                            PortRef { device: name.clone(), port: port.number, gid_index: entry.index };
                        best = Some((rank, place));
                    }
                }
            }
        }
        best.map(|(_, place)| place).ok_or(VerbsError::NoSuchAddress { address })
    }
}

/// An open device.
pub struct Device {
    pub(crate) handle: Opaque,
    pub(crate) calls: Arc<dyn Calls>,
    name: String,
    limits: Limits,
    lost: AtomicBool,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.name).finish()
    }
}

impl Device {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it allows.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// A port as it is now, with its GID table.
    pub fn port(&self, number: u8) -> Result<Port, VerbsError> {
        let object = || format!("{} port {number}", self.name);
        let mut port = self
            .calls
            .port(&self.handle.0, number)
            .map_err(|errno| self.failed(Call::QueryPort, object(), errno))?;
        port.gids = self
            .calls
            .gids(&self.handle.0, number)
            .map_err(|errno| self.failed(Call::QueryGid, object(), errno))?;
        Ok(port)
    }

    /// A port's state alone, which costs less: an error if it is not active.
    pub fn active(&self, number: u8) -> Result<(), VerbsError> {
        let port = self
            .calls
            .port(&self.handle.0, number)
            .map_err(|errno| self.failed(Call::QueryPort, format!("port {number}"), errno))?;
        if port.state == PortState::Active {
            return Ok(());
        }
        Err(VerbsError::PortDown { device: self.name.clone(), port: number, state: port.state })
    }

    /// All ports as they are now.
    pub fn ports(&self) -> Result<Vec<Port>, VerbsError> {
        (1..=self.limits.ports).map(|number| self.port(number)).collect()
    }

    /// The GID at an index of a port's table.
    pub fn gid(&self, port: u8, index: u8) -> Result<Gid, VerbsError> {
        let gids = self.port(port)?.gids;
        gids.iter().find(|entry| entry.index == index).map(|entry| entry.gid).ok_or_else(|| {
            VerbsError::NoSuchGid {
                device: self.name.clone(),
                port,
                index,
                used: gids.iter().map(|entry| entry.index).collect(),
            }
        })
    }

    /// Readable when [`Self::take_event`] has something to tell.
    pub fn event_fd(&self) -> Result<BorrowedFd<'_>, VerbsError> {
        self.calls
            .async_fd(&self.handle.0)
            .map_err(|errno| self.failed(Call::AsyncEvent, self.name.as_str(), errno))
    }

    /// What happened next, without waiting.
    pub fn take_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        let event = self
            .calls
            .async_event(&self.handle.0)
            .map_err(|errno| self.failed(Call::AsyncEvent, self.name.as_str(), errno))?;
        if event == Some(AsyncEvent::DeviceFatal) {
            self.lost.store(true, Ordering::Release);
        }
        Ok(event)
    }

    /// Looks whether the host still has the device, and says so. Not every driver tells by an event or a failed call: ask
    /// now and then. Costs a few system calls, no allocation.
    pub fn check_present(&self) -> bool {
        if !self.lost() && !self.calls.present(&self.handle.0) {
            self.lost.store(true, Ordering::Release);
        }
        !self.lost()
    }

    /// Whether the device is gone, as a taken event, a failed call or a look said. Nothing on it works any more; dropping works.
    pub fn lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// The error for a failed call, which may say that the device is gone.
    pub(crate) fn failed(&self, call: Call, object: impl Into<String>, errno: Errno) -> VerbsError {
        // What the kernel answers to whoever still holds a device that was taken away.
        if errno == Errno::IO {
            self.lost.store(true, Ordering::Release);
        }
        if self.lost() {
            return VerbsError::DeviceLost { device: self.name.clone() };
        }
        VerbsError::Failed { call, object: format!("{} of {}", object.into(), self.name), source: errno }
    }
}
