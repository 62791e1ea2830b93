//! The devices that links spread over, each with its registered memory.

use super::exchange::MAX_RAILS;
use super::{Config, SetupError};
use crate::TrafficClass;
use harmonaize_verbs::{Device, Devices, Domain, Function, Path, PortOptions, Registrations};
use std::sync::Arc;

/// The bits of a traffic class below its code point.
const ECN_BITS: u32 = 2;

/// A port of a device, opened.
#[derive(Debug)]
pub(super) struct Rail {
    pub(super) device: Arc<Device>,
    /// How packets go, but for the flow label.
    pub(super) route: Path,
    /// Rings that peers write, and where frames' payloads lie.
    pub(super) regions: Registrations,
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
        let wanted = PortOptions { device, ..config.options.clone() };
        let function = Function::open(devices, &wanted, Some(config.tcp.listen.ip()))?;
        let regions = Registrations::new(Domain::create(&function.device)?);
        let mut route = function.path;
        // A queue pair keeps its traffic class once it is connected, and carries operations of every class.
        if let Some(dscp) = config.tcp.dscp.filter(|_| route.traffic_class >> ECN_BITS == 0) {
            route.traffic_class |= dscp.of(TrafficClass::Normal) << ECN_BITS;
        }
        Ok(Self { device: function.device, route, regions })
    }
}
