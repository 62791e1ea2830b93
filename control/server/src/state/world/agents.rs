//! Agents that have a session, and what they can do.

use crate::state::job::codec::levels;
use harmonaize_abi::{CommunicatorId, CongestionControl};
use harmonaize_api::{SECRET_BYTES, is_tenant_name, v1};
use harmonaize_codec::Level;
use harmonaize_planner::{HostCosts, HostId};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Most that an agent may lack, and characters of each, that are kept.
const MOST_MISSING: usize = 8;
const MISSING_CHARS: usize = 200;

/// Most congestion controls of an agent that are kept.
const MOST_CONTROLS: usize = 32;

/// What a tenant's processes have, as an agent said at the last join there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProcessUsage {
    /// Bytes of tensor memory.
    pub tensors: u64,
    /// Entries of rings.
    pub operations: u64,
    /// Descriptors of the agent, beside those of links.
    pub descriptors: u64,
}

/// A session that said Hello and was welcomed.
#[derive(Debug)]
pub(crate) struct Session {
    pub host: HostId,
    pub listen: SocketAddr,
    pub build: String,
    pub since: Duration,
    pub abilities: Abilities,
    /// Tenants there: where their processes attach, or why they cannot.
    pub tenants: BTreeMap<String, (String, String)>,
    /// By tenant, of those with a limit on it.
    pub processes: BTreeMap<String, ProcessUsage>,
    /// Open joins by the agent's number.
    pub joins: BTreeMap<u64, OpenJoin>,
}

/// Most tenants of an agent that are kept, and characters of what it says of each.
const MOST_TENANTS: usize = 1024;
const TENANT_CHARS: usize = 300;

impl Session {
    /// Takes in which tenants an agent serves, within bounds.
    pub(crate) fn serves(&mut self, report: &v1::TenantsServed) {
        let text = |text: &String| text.chars().filter(|c| !c.is_control()).take(TENANT_CHARS).collect();
        let known = report.tenants.iter().take(MOST_TENANTS);
        let known = known.filter(|tenant| is_tenant_name(&tenant.name));
        self.tenants = known.map(|one| (one.name.clone(), (text(&one.socket), text(&one.refused)))).collect();
    }
}

/// A join that waits.
#[derive(Clone, Debug)]
pub(crate) enum OpenJoin {
    /// For the other ranks of this tenant and name, as this one.
    Rank((String, String), u32),
    /// To regroup, under this tenant and name.
    Regroup((String, String)),
    /// For the other ranks of the communicator that splits.
    Split(CommunicatorId),
}

/// What an agent can do where its host, device and configuration allow it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Abilities {
    pub trace: bool,
    /// Where its answers to trains are and the key of those whom it answers, if it sends and answers any.
    pub probe: Option<(SocketAddr, [u8; SECRET_BYTES])>,
    pub pace: bool,
    pub congestion_reports: bool,
    pub aggregation: bool,
    /// Whether operations can go by racks there.
    pub racks: bool,
    /// Whether its links go over RDMA, and over TCP alone where control says so.
    pub links_over_tcp: bool,
    /// Whether it traces the ways of queue pairs. They send from the address at which it listens.
    pub queue_pair_routes: bool,
    /// Most bytes of a datagram of RDMA; 0: it has none.
    pub datagram_bytes: u32,
    /// What taking part costs its host, if it has measured that.
    pub costs: Option<HostCosts>,
    /// Codecs that it takes, and what they take there.
    pub codecs: Vec<Level>,
    /// TCP congestion controls that its connections can have.
    pub congestion_controls: BTreeSet<CongestionControl>,
    /// What is missing and why.
    pub missing: Vec<String>,
}

impl Abilities {
    /// What an agent that listens at `own` says of itself, within bounds.
    pub(crate) fn new(said: Option<&v1::Capabilities>, own: IpAddr) -> Self {
        let Some(said) = said else { return Self::default() };
        let probe = said.probe_address.parse::<SocketAddr>().ok().filter(|_| said.probe);
        let probe =
            probe.filter(|probe| probe.port() != 0 && probe.ip().to_canonical() == own.to_canonical());
        let text = |text: &String| text.chars().filter(|c| !c.is_control()).take(MISSING_CHARS).collect();
        Self {
            trace: said.trace,
            probe: probe.zip(said.probe_key.as_slice().try_into().ok()),
            pace: said.rate_limit,
            congestion_reports: said.congestion_reports,
            aggregation: said.aggregation,
            racks: said.racks,
            links_over_tcp: said.links_over_tcp,
            queue_pair_routes: said.queue_pair_routes,
            datagram_bytes: said.datagram_bytes,
            costs: said.costs.as_ref().and_then(host_costs),
            codecs: levels(&said.codecs),
            congestion_controls: said
                .congestion_controls
                .iter()
                .take(MOST_CONTROLS)
                .filter_map(|name| name.parse().ok())
                .collect(),
            missing: said.missing.iter().take(MOST_MISSING).map(text).collect(),
        }
    }
}

/// Why an address to be reached at is not taken. The text goes to the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AddressError {
    /// It is no machine's.
    #[error("`listen` must be an address that others can reach, \"ip:port\"")]
    Unreachable,
    /// The topology has others for the machine.
    #[error("`listen` is none of the addresses that the topology has for it")]
    NotListed,
}

/// Returns the address at which an agent or aggregator is to be reached, as it reports it. Others are sent there. It is one machine's,
/// and one of those that the topology has for it, if any.
///
/// # Errors
/// Why it is not taken.
pub(crate) fn own_address(text: &str, addresses: &[IpAddr]) -> Result<SocketAddr, AddressError> {
    let of_a_machine = |at: &SocketAddr| {
        let ip = at.ip().to_canonical();
        at.port() != 0 && !ip.is_unspecified() && !ip.is_multicast() && ip != Ipv4Addr::BROADCAST
    };
    let address = text.parse::<SocketAddr>().ok().filter(of_a_machine);
    let address = address.ok_or(AddressError::Unreachable)?;
    let own = |listed: &IpAddr| listed.to_canonical() == address.ip().to_canonical();
    if !addresses.is_empty() && !addresses.iter().any(own) {
        return Err(AddressError::NotListed);
    }
    Ok(address)
}

/// Most that a message takes its hosts, and a byte that is added up, in nanoseconds and in picoseconds.
const MOST_COSTS: (u64, u64) = (10_000_000, 1_000_000);

/// What an agent has measured, where it can be.
fn host_costs(said: &v1::HostCosts) -> Option<HostCosts> {
    let v1::HostCosts { message_ns, reduced_byte_ps } = *said;
    let believable = (1..=MOST_COSTS.0).contains(&message_ns) && reduced_byte_ps <= MOST_COSTS.1;
    believable
        .then(|| HostCosts { message: message_ns as f64 / 1e9, reduced_byte: reduced_byte_ps as f64 / 1e12 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trains_go_to_an_agents_own_address_alone() {
        let own = IpAddr::from([10, 0, 0, 1]);
        for (address, taken) in [("10.0.0.1:4001", true), ("10.0.0.2:4001", false), ("10.0.0.1:0", false)] {
            let said = v1::Capabilities {
                probe: true,
                probe_address: address.to_owned(),
                probe_key: vec![1; SECRET_BYTES],
                ..v1::Capabilities::default()
            };
            assert_eq!(Abilities::new(Some(&said), own).probe.is_some(), taken, "{address}");
        }
    }
}
