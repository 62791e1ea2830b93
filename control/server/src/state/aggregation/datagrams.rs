//! Which network packets of a communicator take to its aggregator: RDMA where all ends have a device, else UDP.

use super::super::State;
use super::super::communicator::Communicator;
use super::There;
use harmonaize_aggregator::packet::HEADER_BYTES;
use harmonaize_api::v1;

/// Chunks are whole elements of every type.
const ALIGN: u32 = 8;
/// Bytes of a port's address, bits of a queue pair's number, and of a key that is no privileged one.
const GID_BYTES: usize = 16;
const NUMBER_BITS: u32 = 24;
const KEY_BITS: u32 = 31;

/// Whether what an aggregator says of itself makes sense.
pub(super) fn is_sound(port: &v1::DatagramPort) -> bool {
    port.gid.len() == GID_BYTES
        && (1..1 << NUMBER_BITS).contains(&port.number)
        && port.key >> KEY_BITS == 0
        && payload(port.bytes) > 0
}

/// Payload of a datagram, whole elements.
fn payload(bytes: u32) -> u32 {
    bytes.saturating_sub(HEADER_BYTES as u32) / ALIGN * ALIGN
}

impl State {
    /// Most payload of a communicator's packets to an aggregator, and where that is over RDMA.
    pub(super) fn packets(&self, known: &Communicator, there: &There) -> (u32, Option<v1::DatagramPort>) {
        let bytes = known.members.iter().map(|member| {
            let session = member.session.and_then(|session| self.sessions.get(&session));
            session.map_or(0, |session| session.abilities.datagram_bytes)
        });
        let least = bytes.min().unwrap_or(0);
        let fits = |port: &v1::DatagramPort| payload(port.bytes.min(least)).min(there.unit_bytes);
        match there.datagrams.as_ref().map(|port| (fits(port), port)) {
            Some((payload, port)) if payload > 0 => (payload, Some(port.clone())),
            _ => (there.unit_bytes, None),
        }
    }
}
