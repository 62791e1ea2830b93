//! Which network packets of a communicator take to its aggregator: RDMA where all ends have a device, else
//! UDP.

use crate::state::ctx::Ctx;
use crate::state::job::communicator::Communicator;
use crate::state::job::over_tcp::over_tcp;
use harmonaize_aggregator::packet::HEADER_BYTES;
use harmonaize_api::v1;

/// Chunks are whole elements of every type.
const ALIGN: u32 = 8;
/// Bytes of a port's address, bits of a queue pair's number, and of a key that is no privileged one.
const GID_BYTES: usize = 16;
const NUMBER_BITS: u32 = 24;
const KEY_BITS: u32 = 31;

/// Whether what an aggregator says of itself makes sense.
pub(crate) fn is_sound(port: &v1::DatagramPort) -> bool {
    port.gid.len() == GID_BYTES
        && (1..1 << NUMBER_BITS).contains(&port.number)
        && port.key >> KEY_BITS == 0
        && payload(port.bytes) > 0
}

/// Payload of a datagram, whole elements.
fn payload(bytes: u32) -> u32 {
    bytes.saturating_sub(HEADER_BYTES as u32) / ALIGN * ALIGN
}

/// Most payload of a communicator's packets to an aggregator, and where that is over RDMA.
pub(crate) fn packets(
    ctx: &Ctx<'_>,
    known: &Communicator,
    unit_bytes: u32,
    datagrams: Option<&v1::DatagramPort>,
) -> (u32, Option<v1::DatagramPort>) {
    // A queue pair would end with the process of an agent that hands over.
    if !over_tcp(ctx, known).is_empty() {
        return (unit_bytes, None);
    }
    let bytes = known.members.iter().map(|member| {
        let session = member.session.and_then(|session| ctx.sessions.get(&session));
        session.map_or(0, |session| session.abilities.datagram_bytes)
    });
    let least = bytes.min().unwrap_or(0);
    let fits = |port: &v1::DatagramPort| payload(port.bytes.min(least)).min(unit_bytes);
    match datagrams.map(|port| (fits(port), port)) {
        Some((payload, port)) if payload > 0 => (payload, Some(port.clone())),
        _ => (unit_bytes, None),
    }
}
