//! The devices that links spread over, each with its registered memory.

use super::{Config, SetupError};
use harmonaize_shm::Memory;
use harmonaize_verbs::{Access, Device, Devices, Domain, Gid, GidEntry, GidKind, Mtu, Port, PortState};
use harmonaize_verbs::{Region, VerbsError};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

/// How often a region holds its mapping: itself, and the implementation's object under it.
const HOLDS: usize = 2;

/// A port of a device, opened.
#[derive(Debug)]
pub(super) struct Rail {
    pub(super) device: Arc<Device>,
    pub(super) domain: Arc<Domain>,
    /// How packets go, but for the flow label.
    pub(super) route: harmonaize_verbs::Path,
    /// By mapping, and whether peers may write. Whoever uses a region holds it; it ends with the last of them.
    registered: HashMap<(usize, bool), Weak<Region>>,
}

impl Rail {
    /// Opens the devices that the configuration names, else the one that has the listening address.
    pub(super) fn open_all(config: &Config, devices: &Devices) -> Result<Vec<Self>, SetupError> {
        let listen = config.tcp.listen.ip();
        if config.devices.is_empty() {
            let place = devices.find(listen)?;
            let index = config.gid_index.unwrap_or(place.gid_index);
            return Ok(vec![Self::open(config, devices, &place.device, place.port, Some(index))?]);
        }
        if config.devices.len() > super::exchange::MAX_RAILS {
            return Err(SetupError::TooManyDevices(config.devices.len()));
        }
        let mut rails = Vec::new();
        for named in &config.devices {
            let (name, port) = match named.split_once(':') {
                None => (named.as_str(), 1),
                Some((name, port)) => (name, port.parse().map_err(|_| SetupError::BadDevice(named.clone()))?),
            };
            rails.push(Self::open(config, devices, name, port, config.gid_index)?);
        }
        Ok(rails)
    }

    fn open(
        config: &Config,
        devices: &Devices,
        name: &str,
        number: u8,
        gid_index: Option<u8>,
    ) -> Result<Self, SetupError> {
        let device = devices.open(name)?;
        let port = device.port(number)?;
        if port.state != PortState::Active {
            return Err(VerbsError::PortDown { device: name.into(), port: number, state: port.state }.into());
        }
        let gid_index = gid_index.unwrap_or_else(|| usual_gid(&port, config.tcp.listen.ip()));
        let gid = device.gid(number, gid_index)?;
        let mtu = match config.mtu {
            None => port.active_mtu,
            Some(bytes) => Mtu::from_bytes(bytes).ok_or(SetupError::BadMtu(bytes))?.min(port.active_mtu),
        };
        let route = harmonaize_verbs::Path {
            port: number,
            gid_index,
            mtu: Some(mtu),
            traffic_class: config.traffic_class,
            timeout: config.timeout,
            retries: config.retries,
            ..harmonaize_verbs::Path::default()
        };
        let domain = Domain::create(&device)?;
        tracing::info!(device = name, port = number, gid_index, %gid, mtu = mtu.bytes(), "RDMA device opened");
        Ok(Self { device, domain, route, registered: HashMap::new() })
    }

    /// The region of a whole mapping, which is registered if it is not yet.
    pub(super) fn region(&mut self, memory: &Arc<Memory>, access: Access) -> Result<Arc<Region>, VerbsError> {
        let key = (Arc::as_ptr(memory) as usize, access.remote_write);
        if let Some(region) = self.registered.get(&key).and_then(Weak::upgrade) {
            return Ok(region);
        }
        let region = Region::register(&self.domain, memory, access)?;
        self.registered.retain(|_, region| region.strong_count() > 0);
        self.registered.insert(key, Arc::downgrade(&region));
        Ok(region)
    }

    /// How many regions of a mapping there are.
    fn regions_of(&self, memory: &Arc<Memory>) -> usize {
        let at = Arc::as_ptr(memory) as usize;
        let alive =
            |key: (usize, bool)| self.registered.get(&key).is_some_and(|region| region.strong_count() > 0);
        usize::from(alive((at, false))) + usize::from(alive((at, true)))
    }
}

/// Where frames' payloads lie, registered: per link, by rail and mapping.
#[derive(Debug, Default)]
pub(super) struct Sources(HashMap<(usize, usize), Arc<Region>>);

impl Sources {
    /// The region of a mapping on a rail. Allocates for the first frame from it alone.
    pub(super) fn region(
        &mut self,
        rails: &mut [Rail],
        rail: usize,
        memory: &Arc<Memory>,
    ) -> Result<Arc<Region>, VerbsError> {
        let key = (rail, Arc::as_ptr(memory) as usize);
        if let Some(region) = self.0.get(&key) {
            return Ok(Arc::clone(region));
        }
        let rail = rails.get_mut(rail).ok_or(VerbsError::NotRegistered)?;
        let region = rail.region(memory, Access::SEND)?;
        self.0.insert(key, Arc::clone(&region));
        Ok(region)
    }

    /// Lets go of mappings that only regions hold.
    pub(super) fn sweep(&mut self, rails: &[Rail]) {
        self.0.retain(|_, region| {
            let regions: usize = rails.iter().map(|rail| rail.regions_of(region.memory())).sum();
            Arc::strong_count(region.memory()) > HOLDS * regions
        });
    }
}

/// The entry for the address over UDP; else over UDP with any IPv4 address; else the first.
fn usual_gid(port: &Port, address: IpAddr) -> u8 {
    let wanted = Gid::from(address);
    let rank = |entry: &&GidEntry| {
        let ipv4 = entry.gid.ip().is_some_and(|ip| ip.is_ipv4());
        (entry.gid == wanted, entry.kind == GidKind::RoceV2, ipv4, std::cmp::Reverse(entry.index))
    };
    port.gids.iter().max_by_key(rank).map_or(0, |entry| entry.index)
}
