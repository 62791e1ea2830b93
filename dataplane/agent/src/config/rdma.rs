//! The tables on RDMA: links to other agents, and attachments of tenants.

use harmonaize_transport::datagram::RdmaPort;
use harmonaize_verbs::{Devices, Function, Gid, Mtu, PortOptions, VerbsError};
use serde::Deserialize;
use std::net::{IpAddr, SocketAddr};

/// A key of a table on RDMA that no device could keep to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RdmaError {
    /// Bytes per packet that no network has.
    #[error("`mtu` of [{table}] is {mtu}; 256, 512, 1024, 2048 or 4096")]
    Mtu {
        /// The table.
        table: &'static str,
        /// Bytes per packet.
        mtu: usize,
    },
    /// A request would be repeated for ever.
    #[error("`retries` of [{table}] is {retries}; at most 6 (7 would mean for ever)")]
    Retries {
        /// The table.
        table: &'static str,
        /// How often.
        retries: u8,
    },
    /// An answer would be waited for for ever.
    #[error("`timeout` of [{table}] is {timeout}; 1 to 31 (0 would mean for ever)")]
    Timeout {
        /// The table.
        table: &'static str,
        /// 4.096 us times two to this power.
        timeout: u8,
    },
}

/// Why the ways of queue pairs cannot be traced: those that are traced begin at the address at which the agent listens.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SourceError {
    /// A device sends from another address.
    #[error("{device} of [verbs] sends from {gid}, and not from {listen}, the address of `listen`")]
    Other { device: String, gid: Gid, listen: IpAddr },
    /// A device is not to be had.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
}

/// How links go over RDMA. What is left out is found out, or as usual.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Verbs {
    /// Devices, "mlx5_0" or with their port "mlx5_0:1"; none: the one that has the address of `listen`.
    pub devices: Vec<String>,
    /// Entry of the ports' GID tables.
    pub gid_index: Option<u8>,
    /// Most bytes per packet: 256, 512, 1024, 2048 or 4096.
    pub mtu: Option<usize>,
    /// DSCP and ECN bits of packets.
    pub traffic_class: Option<u8>,
    /// How often a device repeats a request that is not answered, at most 6.
    pub retries: Option<u8>,
    /// How long it waits for the answer: 4.096 us times two to this power, 1 to 31.
    pub timeout: Option<u8>,
}

/// How tenants attach over RDMA. What is left out is found out, or as usual.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rdma {
    /// The device, "mlx5_0" or with its port "mlx5_0:1"; none: the one that has this table's `listen` address, else the
    /// agent's.
    pub device: Option<String>,
    /// Entry of the port's GID table.
    pub gid_index: Option<u8>,
    /// Most bytes per packet: 256, 512, 1024, 2048 or 4096.
    pub mtu: Option<usize>,
    /// DSCP and ECN bits of packets.
    pub traffic_class: Option<u8>,
    /// How often a device repeats a request that is not answered, at most 6.
    pub retries: Option<u8>,
    /// How long it waits for the answer: 4.096 us times two to this power, 1 to 31.
    pub timeout: Option<u8>,
    /// Where tenants' processes on other machines connect over TCP, such as the host of this offload unit.
    pub listen: Option<SocketAddr>,
}

impl Verbs {
    /// What is asked of each device.
    pub fn port_options(&self) -> PortOptions {
        port_options(None, (self.gid_index, self.mtu), (self.traffic_class, self.retries, self.timeout))
    }

    /// The device by which datagrams go: the first that is named, else the one that has the address.
    pub(crate) fn datagrams(&self, address: IpAddr, devices: &Devices) -> RdmaPort {
        let wanted = PortOptions { device: self.devices.first().cloned(), ..self.port_options() };
        RdmaPort { devices: devices.clone(), options: wanted, address }
    }

    /// Whether all queue pairs of links send from the address at which the agent listens.
    ///
    /// # Errors
    /// Which device sends from another, or cannot be opened.
    pub(crate) fn send_from(&self, listen: IpAddr, devices: &Devices) -> Result<(), SourceError> {
        let named = self.devices.iter().cloned().map(Some);
        let unnamed = self.devices.is_empty().then_some(None);
        for device in named.chain(unnamed) {
            let wanted = PortOptions { device, ..self.port_options() };
            let Function { device, path } = Function::open(devices, &wanted, Some(listen))?;
            let gid = device.gid(path.port, path.gid_index)?;
            if gid != Gid::from(listen) {
                return Err(SourceError::Other { device: device.name().to_owned(), gid, listen });
            }
        }
        Ok(())
    }

    pub(crate) fn check(&self) -> Result<(), RdmaError> {
        check("verbs", self.mtu, self.retries, self.timeout)
    }
}

impl Rdma {
    pub(super) fn check(&self) -> Result<(), RdmaError> {
        check("rdma", self.mtu, self.retries, self.timeout)
    }

    /// What is asked of the device.
    pub fn port_options(&self) -> PortOptions {
        let Self { device, gid_index, mtu, traffic_class, retries, timeout, listen: _ } = self.clone();
        port_options(device, (gid_index, mtu), (traffic_class, retries, timeout))
    }
}

/// What is asked of a device; what stands in no table is as usual.
fn port_options(
    device: Option<String>,
    (gid_index, mtu): (Option<u8>, Option<usize>),
    (traffic_class, retries, timeout): (Option<u8>, Option<u8>, Option<u8>),
) -> PortOptions {
    let usual = PortOptions::default();
    PortOptions {
        device,
        gid_index,
        mtu,
        traffic_class: traffic_class.unwrap_or(usual.traffic_class),
        retries: retries.unwrap_or(usual.retries),
        timeout: timeout.unwrap_or(usual.timeout),
    }
}

/// What any table on RDMA must keep to.
fn check(
    table: &'static str,
    mtu: Option<usize>,
    retries: Option<u8>,
    timeout: Option<u8>,
) -> Result<(), RdmaError> {
    if let Some(mtu) = mtu.filter(|mtu| Mtu::from_bytes(*mtu).is_none()) {
        return Err(RdmaError::Mtu { table, mtu });
    }
    if let Some(retries) = retries.filter(|retries| *retries > 6) {
        return Err(RdmaError::Retries { table, retries });
    }
    if let Some(timeout) = timeout.filter(|timeout| !(1..=31).contains(timeout)) {
        return Err(RdmaError::Timeout { table, timeout });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_verbs::fake::Fabric;
    use std::net::Ipv4Addr;

    #[test]
    fn a_device_that_sends_from_another_address_is_named() {
        let (fabric, listen) = (Fabric::new(), Ipv4Addr::new(10, 0, 0, 1));
        fabric.add("rxe0", listen).unwrap();
        fabric.add("rxe1", Ipv4Addr::new(10, 0, 1, 1)).unwrap();
        let send = |names: &[&str]| {
            let devices = names.iter().map(|name| (*name).to_owned()).collect();
            let verbs = Verbs { devices, ..Verbs::default() };
            verbs.send_from(listen.into(), &fabric.devices()).map_err(|error| error.to_string())
        };
        assert_eq!([send(&[]), send(&["rxe0"])], [Ok(()), Ok(())]);
        for names in [&["rxe1"][..], &["rxe0", "rxe1"]] {
            let error = send(names).unwrap_err();
            assert!(error.contains("rxe1") && error.contains("10.0.1.1"), "{error}");
        }
        assert!(send(&["rxe2"]).is_err(), "there is none");
    }
}
