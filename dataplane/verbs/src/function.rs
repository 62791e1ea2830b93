//! Where queue pairs go out: a port of a device. It is opened as an operator asked for it, or as it was found.

use crate::{Device, Devices, Gid, GidEntry, GidKind, Mtu, Path, Port, PortState, VerbsError};
use std::net::IpAddr;
use std::sync::Arc;

/// What an operator asks for; what is left out is found out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortOptions {
    /// The device, `mlx5_0`, or with its port, `mlx5_0:1`.
    pub device: Option<String>,
    /// Entry of the port's GID table.
    pub gid_index: Option<u8>,
    /// Most bytes per packet: 256, 512, 1024, 2048 or 4096; none for the port's own. More than
    /// the port has is an error.
    pub mtu: Option<usize>,
    /// DSCP and ECN bits.
    pub traffic_class: u8,
    /// How often a request is tried again, at most 6.
    pub retries: u8,
    /// How long the peer's device may take to answer before that: 4.096 us times two to this power.
    pub timeout: u8,
}

impl Default for PortOptions {
    /// What is there; 6 retries after 0.5 s each.
    fn default() -> Self {
        Self { device: None, gid_index: None, mtu: None, traffic_class: 0, retries: 6, timeout: 17 }
    }
}

/// A port of a device, opened, and how packets go out there.
#[derive(Clone, Debug)]
pub struct Function {
    /// The device.
    pub device: Arc<Device>,
    /// How packets go, but for the flow label.
    pub path: Path,
}

impl Function {
    /// Opens the device that is named; else the one that has the address in a GID table. With neither, it opens the only
    /// one with an active port.
    pub fn open(
        devices: &Devices,
        wanted: &PortOptions,
        address: Option<IpAddr>,
    ) -> Result<Self, VerbsError> {
        match (&wanted.device, address) {
            (Some(named), _) => {
                let bad = || VerbsError::BadDevice { name: named.clone() };
                let (name, port) = match named.split_once(':') {
                    None => (named.as_str(), 1),
                    Some((name, port)) => (name, port.parse().map_err(|_| bad())?),
                };
                Self::of(devices.open(name)?, port, wanted, address)
            }
            (None, Some(address)) => {
                let place = devices.find(address)?;
                let index = wanted.gid_index.unwrap_or(place.gid_index);
                let wanted = PortOptions { gid_index: Some(index), ..wanted.clone() };
                Self::of(devices.open(&place.device)?, place.port, &wanted, Some(address))
            }
            (None, None) => {
                let (name, port) = only(devices)?;
                Self::of(devices.open(&name)?, port, wanted, None)
            }
        }
    }

    fn of(
        device: Arc<Device>,
        number: u8,
        options: &PortOptions,
        address: Option<IpAddr>,
    ) -> Result<Self, VerbsError> {
        let port = device.port(number)?;
        if port.state != PortState::Active {
            return Err(VerbsError::PortDown {
                device: device.name().into(),
                port: number,
                state: port.state,
            });
        }
        let gid_index = options.gid_index.unwrap_or_else(|| usual_gid(&port, address));
        let gid = device.gid(number, gid_index)?;
        let mtu = match options.mtu {
            None => port.active_mtu,
            Some(bytes) => Mtu::from_bytes(bytes).ok_or(VerbsError::BadMtu { bytes })?,
        };
        if mtu > port.active_mtu {
            let (device, active) = (device.name().to_owned(), port.active_mtu);
            return Err(VerbsError::MtuTooLarge { requested: mtu, active, device, port: number });
        }
        let path = Path {
            port: number,
            gid_index,
            mtu: Some(mtu),
            traffic_class: options.traffic_class,
            timeout: options.timeout,
            retries: options.retries,
            ..Path::default()
        };
        tracing::info!(device = device.name(), port = number, gid_index, %gid, %mtu, "RDMA device opened");
        Ok(Self { device, path })
    }
}

/// Device and port, where only one is active.
fn only(devices: &Devices) -> Result<(String, u8), VerbsError> {
    let mut active = Vec::new();
    for name in devices.names()? {
        // One that this process may not open is not for it.
        let ports = devices.open(&name).and_then(|device| device.ports());
        for port in ports.into_iter().flatten().filter(|port| port.state == PortState::Active) {
            active.push((name.clone(), port.number));
        }
    }
    let found = || active.iter().map(|(name, port)| format!("{name}:{port}")).collect();
    match active.as_slice() {
        [only] => Ok(only.clone()),
        _ => Err(VerbsError::WhichDevice { active: found() }),
    }
}

/// The entry for the address over UDP; else over UDP with any IPv4 address; else the first.
fn usual_gid(port: &Port, address: Option<IpAddr>) -> u8 {
    let wanted = address.map(Gid::from);
    let rank = |entry: &&GidEntry| {
        let ipv4 = entry.gid.ip().is_some_and(|ip| ip.is_ipv4());
        (Some(entry.gid) == wanted, entry.kind == GidKind::RoceV2, ipv4, std::cmp::Reverse(entry.index))
    };
    port.gids.iter().max_by_key(rank).map_or(0, |entry| entry.index)
}
