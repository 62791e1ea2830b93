//! The path to an aggregator, and when it is looked for anew. It goes over RDMA where both ends have a device, else
//! over UDP.

use crate::command::Aggregator;
use harmonaize_core::Nanos;
use harmonaize_transport::datagram::{Address, DatagramConfig, Endpoint, RdmaDatagrams, RdmaPort};
use std::time::Duration;

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

/// Between which times a way is looked for again. The longest is shorter than an aggregator's patience, so that a way that is back is found
/// before a session ends; who has not looked for longer than [`QUIET`] begins with the shortest.
const RETRY_BOUNDS: [Duration; 2] = [Duration::from_millis(4), Duration::from_millis(100)];
const QUIET: Duration = Duration::from_secs(1);

/// When a way that is lost is looked for: at once, and then ever more seldom.
#[derive(Debug, Default)]
pub(super) struct Reconnect {
    due: Nanos,
    wait: Duration,
}

impl Reconnect {
    /// Whether it is time; if so, this was a look.
    pub(super) fn is_due(&mut self, now: Nanos) -> bool {
        if now < self.due {
            return false;
        }
        let [least, most] = RETRY_BOUNDS;
        let quiet = now.since(self.due) > QUIET;
        self.wait = if quiet { least } else { (self.wait * 2).clamp(least, most) };
        self.due = now.after(self.wait);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_sought_ever_more_seldom() {
        let mut search = Reconnect::default();
        let looks = |search: &mut Reconnect, from: u64, to: u64| -> Vec<u64> {
            (from..to).filter(|at| search.is_due(Nanos(at * 1_000_000))).collect()
        };
        assert_eq!(looks(&mut search, 0, 500), [0, 4, 12, 28, 60, 124, 224, 324, 424]);
        assert_eq!(looks(&mut search, 2000, 2020), [2000, 2004, 2012], "long after it begins anew");
        assert_eq!(looks(&mut search, 2020, 3000).len(), 11, "no more than ten a second in the long run");
    }
}
