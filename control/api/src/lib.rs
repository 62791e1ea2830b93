//! The provider's own gRPC interface: what agents and operators' tools say to control. No tenant-facing crate depends on it.
#![forbid(unsafe_code)]

mod agreements;
mod bounded;
mod congestion;
mod jobs;
mod json;
mod rows;

pub use agreements::{clause_numbers, clauses, collective};
use harmonaize_abi::keyed;
use hmac::Mac;
pub use rows::CAUSES;
use std::net::Ipv4Addr;

/// Version 1 of the interface, generated from `proto/harmonaize/provider/v1`.
pub mod v1 {
    #![allow(missing_docs, clippy::doc_markdown, clippy::large_enum_variant)] // generated
    tonic::include_proto!("harmonaize.provider.v1");
}

/// Version of the session between agents and control. [`v1::Hello`] opens with it; another is refused.
pub const PROTOCOL_VERSION: u32 = 1;

/// Bytes of a link's name in a recipe.
pub const LINK_BYTES: usize = 16;

/// Bytes of a link's secret in a recipe.
pub const SECRET_BYTES: usize = 32;

/// The key of packet trains from an agent at `source`, by the [key](v1::Capabilities::probe_key) of the agent that measures them. That one
/// and control can tell it, and who is asked is told it: an address that control never asked has no key.
pub fn train_key(probe_key: &[u8; SECRET_BYTES], source: Ipv4Addr) -> [u8; SECRET_BYTES] {
    let mut mac = keyed(probe_key);
    mac.update(b"trains from ");
    mac.update(&source.octets());
    mac.finalize().into_bytes().into()
}

/// Whether a tenant can have this name: 1 to 63 visible ASCII characters, no slash.
pub fn is_tenant_name(name: &str) -> bool {
    (1..=63).contains(&name.len()) && name.chars().all(|c| c.is_ascii_graphic() && c != '/')
}

/// A communicator's id as people see it: sixteen hexadecimal digits.
pub fn communicator_text(communicator: u64) -> String {
    format!("{communicator:016x}")
}

/// The id behind [`communicator_text`]; leading zeros may be left out.
pub fn communicator_from_text(text: &str) -> Option<u64> {
    if text.is_empty() || text.starts_with('+') {
        return None;
    }
    u64::from_str_radix(text, 16).ok()
}

/// All but the secret, so that no log holds one.
impl std::fmt::Debug for v1::Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer")
            .field("participant", &self.participant)
            .field("address", &self.address)
            .field("link", &self.link)
            .field("initiate", &self.initiate)
            .field("source_ports", &self.source_ports)
            .field("rate_bits", &self.rate_bps)
            .finish_non_exhaustive()
    }
}

/// All but the worker's key.
impl std::fmt::Debug for v1::Aggregation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Aggregation")
            .field("address", &self.address)
            .field("communicator", &self.communicator)
            .field("worker", &self.worker)
            .field("workers", &self.workers)
            .field("chunk_elements", &self.chunk_elements)
            .field("window", &self.window)
            .field("least_bytes", &self.min_bytes)
            .field("form", &self.form)
            .finish_non_exhaustive()
    }
}

/// All but the secret.
impl std::fmt::Debug for v1::GrantAggregation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrantAggregation")
            .field("communicator", &self.communicator)
            .field("workers", &self.workers)
            .field("form", &self.form)
            .field("chunk_elements", &self.chunk_elements)
            .field("ordered", &self.ordered)
            .field("tenant", &self.tenant)
            .field("weight", &self.weight)
            .field("guaranteed", &self.guaranteed_units)
            .field("most", &self.max_units)
            .finish_non_exhaustive()
    }
}

/// All but the key.
impl std::fmt::Debug for v1::Capabilities {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Capabilities")
            .field("trace", &self.trace)
            .field("probe", &self.probe)
            .field("probe_address", &self.probe_address)
            .field("rate_limit", &self.rate_limit)
            .field("congestion_reports", &self.congestion_reports)
            .field("missing", &self.missing)
            .field("aggregation", &self.aggregation)
            .field("costs", &self.costs)
            .finish_non_exhaustive()
    }
}

/// All but the key.
impl std::fmt::Debug for v1::ProbePath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProbePath")
            .field("request", &self.request)
            .field("address", &self.address)
            .field("via", &self.via)
            .field("bytes", &self.bytes)
            .field("trains", &self.trains)
            .finish_non_exhaustive()
    }
}

impl From<v1::from_agent::Message> for v1::FromAgent {
    fn from(message: v1::from_agent::Message) -> Self {
        Self { message: Some(message) }
    }
}

impl From<v1::to_agent::Message> for v1::ToAgent {
    fn from(message: v1::to_agent::Message) -> Self {
        Self { message: Some(message) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_do_not_show() {
        let peer =
            v1::Peer { secret: vec![171; SECRET_BYTES], link: vec![7; LINK_BYTES], ..v1::Peer::default() };
        let aggregation =
            Some(v1::Aggregation { window: 9, key: vec![171; SECRET_BYTES], ..v1::Aggregation::default() });
        let recipe = v1::Recipe { peers: vec![peer], aggregation, ..v1::Recipe::default() };
        let shown = format!("{recipe:?}");
        assert!(
            shown.contains("7, 7, 7") && shown.contains("window: 9") && !shown.contains("171"),
            "{shown}"
        );
        let grant =
            v1::GrantAggregation { secret: vec![171; SECRET_BYTES], ..v1::GrantAggregation::default() };
        assert!(!format!("{grant:?}").contains("171"));
        let able = v1::Capabilities { probe_key: vec![171; SECRET_BYTES], ..v1::Capabilities::default() };
        let asked = v1::ProbePath { key: vec![171; SECRET_BYTES], ..v1::ProbePath::default() };
        assert!(!format!("{able:?}{asked:?}").contains("171"));
    }

    #[test]
    fn ids_survive_being_shown() {
        for id in [0, 1, 0xdead_beef, u64::MAX] {
            assert_eq!(communicator_from_text(&communicator_text(id)), Some(id));
        }
        for bad in ["", "+1", "-1", "g", "11112222333344445"] {
            assert_eq!(communicator_from_text(bad), None, "{bad}");
        }
    }
}
