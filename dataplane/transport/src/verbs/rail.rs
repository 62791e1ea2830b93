//! The devices that links spread over, each with its registered memory.

use super::delays::DeviceBytes;
use super::exchange::MAX_RAILS;
use super::{Config, SetupError};
use crate::TrafficClass;
use harmonaize_verbs::{Device, Devices, Domain, Function, Path, PortOptions, Registrations, VerbsError};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

/// The bits of a traffic class below its code point.
const ECN_BITS: u32 = 2;

/// A port of a device, opened.
#[derive(Debug)]
pub(super) struct Rail {
    pub(super) device: Arc<Device>,
    /// How packets go, but for the flow label.
    pub(super) route: Path,
    /// Protection domains of links, by the agent's number of the tenant, or of none. With each are the rings that peers write there
    /// and where frames' payloads lie. Who knows keys of one tenant's memory reaches it by none of another's queue pairs.
    domains: BTreeMap<Option<u32>, Registrations>,
    /// Payload bytes that the device was given for paths here.
    pub(super) bytes: Arc<DeviceBytes>,
}

impl Rail {
    /// Opens the devices that the configuration names, else the one that has the listening address.
    pub(super) fn open_all(config: &Config, devices: &Devices) -> Result<Vec<Self>, SetupError> {
        if config.devices.len() > MAX_RAILS {
            return Err(SetupError::TooManyDevices(config.devices.len()));
        }
        let named = config.devices.iter().map(|name| Some(name.clone()));
        let unnamed = config.devices.is_empty().then_some(None);
        named.chain(unnamed).map(|device| Self::open(config, devices, device)).collect()
    }

    fn open(config: &Config, devices: &Devices, device: Option<String>) -> Result<Self, SetupError> {
        let options = PortOptions { device, ..config.options.clone() };
        let function = Function::open(devices, &options, Some(config.tcp.listen.ip()))?;
        let mut route = function.path;
        // A queue pair keeps its traffic class once it is connected, and carries operations of every class.
        if let Some(dscp) = config.tcp.dscp.filter(|_| route.traffic_class >> ECN_BITS == 0) {
            route.traffic_class |= dscp.of(TrafficClass::Normal) << ECN_BITS;
        }
        Ok(Self { device: function.device, route, domains: BTreeMap::new(), bytes: Arc::default() })
    }

    /// What is registered for a tenant's links, or for those of nobody.
    pub(super) fn registrations(&mut self, tenant: Option<u32>) -> Result<&mut Registrations, VerbsError> {
        Ok(match self.domains.entry(tenant) {
            Entry::Occupied(domain) => domain.into_mut(),
            Entry::Vacant(none) => none.insert(Registrations::new(Domain::create(&self.device)?)),
        })
    }

    /// Lets go of what nobody uses any more.
    pub(super) fn sweep(&mut self) {
        self.domains.retain(|_, regions| {
            regions.sweep();
            regions.is_used()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp;
    use harmonaize_shm::Memory;
    use harmonaize_verbs::{Access, fake::Fabric};
    use std::net::{Ipv4Addr, SocketAddr};

    #[test]
    fn each_tenant_has_a_domain_while_using_it() {
        let (fabric, address) = (Fabric::new(), Ipv4Addr::new(10, 0, 0, 1));
        fabric.add("rxe0", address).unwrap();
        let config = Config::new(tcp::Config::new(SocketAddr::from((address, 1))));
        let mut rails = Rail::open_all(&config, &fabric.devices()).unwrap();
        let rail = &mut rails[0];
        let memory = Memory::private(4096).unwrap();
        let mut key = |tenant| {
            let regions = rail.registrations(tenant).unwrap();
            let key = regions.region(&memory, Access::REMOTE_WRITE).unwrap().rkey();
            (key, Arc::as_ptr(regions.domain()) as usize)
        };
        let [nobodys, one, other, again] = [None, Some(1), Some(2), Some(1)].map(&mut key);
        assert_eq!(one, again);
        assert!(one.0 != other.0 && one.1 != other.1 && nobodys.1 != one.1 && nobodys.1 != other.1);
        drop(memory);
        let pair = Arc::clone(rail.registrations(Some(2)).unwrap().domain());
        rail.sweep();
        assert_eq!(rail.domains.keys().collect::<Vec<_>>(), [&Some(2)], "what has a queue pair stays");
        drop(pair);
        rail.sweep();
        assert!(rail.domains.is_empty());
    }
}
