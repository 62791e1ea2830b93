//! Protection domains and registered memory.

use crate::completion::Opaque;
use crate::{Call, Device, VerbsError};
use harmonaize_shm::{Memory, Pin, Span};
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::Arc;

/// What may be done to registered memory by the device; it may always read it for its own queue pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Access {
    /// The device may write it: needed to receive into it and for reads to land in it, and for `remote_write`.
    pub local_write: bool,
    /// Peers that know the key may write it.
    pub remote_write: bool,
    /// Peers that know the key may read it.
    pub remote_read: bool,
}

impl Access {
    /// Only sent from.
    pub const SEND: Self = Self { local_write: false, remote_write: false, remote_read: false };
    /// Sent from, received into.
    pub const LOCAL: Self = Self { local_write: true, remote_write: false, remote_read: false };
    /// And peers may write it.
    pub const REMOTE_WRITE: Self = Self { local_write: true, remote_write: true, remote_read: false };
    /// And peers may read and write it.
    pub const REMOTE: Self = Self { local_write: true, remote_write: true, remote_read: true };
}

/// A protection domain: queue pairs reach the regions of their own domain alone, for their peers too.
#[derive(Debug)]
pub struct Domain {
    pub(crate) handle: Opaque,
    pub(crate) device: Arc<Device>,
}

impl Domain {
    /// A domain of a device.
    pub fn create(device: &Arc<Device>) -> Result<Arc<Self>, VerbsError> {
        let handle = device
            .calls
            .domain(&device.handle.0)
            .map_err(|errno| device.failed(Call::AllocateDomain, "protection domain", errno))?;
        Ok(Arc::new(Self { handle: Opaque(handle), device: Arc::clone(device) }))
    }

    /// The device that it is of.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

/// A whole mapping registered with a domain: pinned, and named by keys. It ends with the last use: work requests on it hold
/// it too.
#[derive(Debug)]
pub struct Region {
    // Dropped in this order: the device lets go before the memory may be unmapped.
    _handle: Opaque,
    memory: Pin,
    domain: Arc<Domain>,
    local_key: u32,
    remote_key: u32,
    access: Access,
}

impl Region {
    /// Registers a whole mapping. Costs microseconds per page: keep regions, register once.
    pub fn register(
        domain: &Arc<Domain>,
        memory: &Arc<Memory>,
        access: Access,
    ) -> Result<Arc<Self>, VerbsError> {
        let device = &domain.device;
        let bytes = memory.bytes() as u64;
        if bytes > device.limits().region_bytes {
            let most = device.limits().region_bytes;
            return Err(VerbsError::OutOfRange { what: "a region's length", value: bytes, most });
        }
        let access = Access { local_write: access.local_write || access.remote_write, ..access };
        let pin = Pin::new(memory);
        let made = device.calls.register(&domain.handle.0, &pin, access).map_err(|errno| match errno {
            Errno::NOMEM | Errno::PERM => {
                VerbsError::Memlock { bytes, device: device.name().to_owned(), errno, limit: memlock() }
            }
            errno => device.failed(Call::Register, format!("a region of {bytes} bytes"), errno),
        })?;
        Ok(Arc::new(Self {
            _handle: Opaque(made.handle),
            memory: pin,
            domain: Arc::clone(domain),
            local_key: made.local_key,
            remote_key: made.remote_key,
            access,
        }))
    }

    /// The key for work requests of this process.
    pub fn lkey(&self) -> u32 {
        self.local_key
    }

    /// The key for peers.
    pub fn rkey(&self) -> u32 {
        self.remote_key
    }

    /// Address of the first byte, as peers name it.
    pub fn address(&self) -> u64 {
        self.memory.memory().address()
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.memory().bytes() as u64
    }

    /// The mapping.
    pub fn memory(&self) -> &Arc<Memory> {
        self.memory.memory()
    }

    /// Whether anyone uses the mapping but registrations.
    pub fn used(&self) -> bool {
        self.memory.used()
    }

    /// The domain.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// What may be done to it.
    pub fn access(&self) -> Access {
        self.access
    }
}

/// The regions of a domain by mapping: registered at the first use, kept while anyone uses the mapping.
#[derive(Debug)]
pub struct Registrations {
    domain: Arc<Domain>,
    regions: HashMap<(usize, Access), Arc<Region>>,
}

impl Registrations {
    /// None yet.
    pub fn new(domain: Arc<Domain>) -> Self {
        Self { domain, regions: HashMap::new() }
    }

    /// The domain.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// The region of a whole mapping, which is registered if it is not yet. Allocates then alone.
    pub fn region(&mut self, memory: &Arc<Memory>, access: Access) -> Result<Arc<Region>, VerbsError> {
        // A region keeps its mapping, so nothing else can have come to stand at the address.
        let key = (Arc::as_ptr(memory) as usize, access);
        if let Some(region) = self.regions.get(&key) {
            return Ok(Arc::clone(region));
        }
        self.sweep();
        let region = Region::register(&self.domain, memory, access)?;
        self.regions.insert(key, Arc::clone(&region));
        Ok(region)
    }

    /// Whether there are regions, or others use the domain.
    pub fn is_used(&self) -> bool {
        !self.regions.is_empty() || Arc::strong_count(&self.domain) > 1
    }

    /// Lets go of the regions of mappings that nobody uses any more.
    pub fn sweep(&mut self) {
        self.regions.retain(|_, region| region.used());
    }
}

/// What the limit on pinned memory is, in words.
fn memlock() -> String {
    match rustix::process::getrlimit(rustix::process::Resource::Memlock).current {
        Some(bytes) => format!("{bytes} bytes"),
        None => "unlimited".to_owned(),
    }
}

/// A span of registered memory: what a work request reads from or lands in.
#[derive(Clone, Debug)]
pub struct Local {
    region: Arc<Region>,
    span: Span,
}

impl Local {
    /// The span must lie in the region's mapping, and have less than 4 GiB.
    pub fn new(region: &Arc<Region>, span: Span) -> Result<Self, VerbsError> {
        if !Arc::ptr_eq(region.memory(), span.memory()) {
            return Err(VerbsError::NotRegistered);
        }
        if span.bytes() as u64 > u64::from(u32::MAX) {
            let (value, most) = (span.bytes() as u64, u64::from(u32::MAX));
            return Err(VerbsError::OutOfRange { what: "a span's length", value, most });
        }
        Ok(Self { region: Arc::clone(region), span })
    }

    /// The region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The bytes.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// The bytes alone.
    pub fn into_span(self) -> Span {
        self.span
    }

    pub(crate) fn piece(&self) -> crate::calls::Piece {
        crate::calls::Piece {
            address: self.region.address() + self.span.offset() as u64,
            bytes: self.span.bytes() as u32,
            key: self.region.local_key,
        }
    }
}
