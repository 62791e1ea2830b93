//! The way to an aggregator: over RDMA where both ends have a device, else over UDP.

use crate::command::Aggregator;
use harmonaize_transport::datagram::{Address, DatagramConfig, Endpoint, RdmaDatagrams, RdmaPort};

/// An endpoint for packets to the aggregator, and where it is: over RDMA where both are there, else over UDP.
pub(super) fn endpoint(
    aggregator: &Aggregator,
    port: Option<&RdmaPort>,
    config: DatagramConfig,
) -> std::io::Result<(Endpoint, Address)> {
    if let Some(((address, key), port)) = aggregator.rdma.zip(port) {
        let opened = RdmaDatagrams::open(port, key, config).and_then(|mut datagrams| {
            datagrams.reach(address.gid)?;
            Ok(datagrams)
        });
        match opened {
            Ok(datagrams) => {
                tracing::info!(gid = %address.gid, number = address.number, "packets to the aggregator go over RDMA");
                return Ok((Endpoint::Rdma(Box::new(datagrams)), Address::Rdma(address)));
            }
            Err(error) => tracing::warn!(%error, "packets to the aggregator go over UDP"),
        }
    }
    Ok((Endpoint::towards(aggregator.address, config)?, Address::Udp(aggregator.address)))
}
