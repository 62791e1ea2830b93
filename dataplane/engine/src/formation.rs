//! Bringing a communicator, or a new plan of one, to life: links, landing rings, the state machine.

use crate::aggregated::AggregatorPath;
use crate::attachment::Attachment;
use crate::coded::codec;
use crate::command::{Aggregator, Formation, Peer};
use crate::communicator_state::{CommunicatorParts, CommunicatorState, Links, Local};
use crate::error::{LinkError, PrepareError};
use crate::table::{Key, Table};
use harmonaize_core::{Communicator, Config, EpochPlan};
use harmonaize_plan::{Access, CODED_ROOM, Participant};
use harmonaize_shm::{Memory, Span};
use harmonaize_transport::datagram::RdmaPort;
use harmonaize_transport::{LinkId, Ring, Transport};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// How long others have at most to say what they called, before an operation fails for its time-out.
const MAX_INQUIRY: Duration = Duration::from_secs(1);

/// Opens the links of an epoch into `links`, all at once, and gives each its landing rings, one per channel. Those that go on are taken
/// over from the epoch before with their rings. On an error the caller closes what was opened.
pub(crate) fn open_links(
    transport: &mut dyn Transport,
    plan: &EpochPlan,
    me: Participant,
    peers: Vec<Peer>,
    before: Option<&Links>,
    links: &mut Links,
) -> Result<(), PrepareError> {
    let participants = plan.plan.group().participants();
    let mut expected: Vec<Participant> =
        (0..participants).map(Participant).filter(|peer| *peer != me).collect();
    for peer in peers {
        let participant = peer.participant;
        let known = expected.iter().position(|expected| *expected == participant);
        expected.swap_remove(known.ok_or(PrepareError::UnknownPeer(participant))?);
        open_link(transport, plan, links, peer, before)
            .map_err(|error| PrepareError::Link { participant, error })?;
    }
    match expected.first() {
        Some(missing) => Err(PrepareError::MissingPeer(*missing)),
        None => Ok(()),
    }
}

fn open_link(
    transport: &mut dyn Transport,
    plan: &EpochPlan,
    links: &mut Links,
    peer: Peer,
    before: Option<&Links>,
) -> Result<(), LinkError> {
    let participant = peer.participant;
    let Some(introduction) = peer.introduction else {
        let carried = before.and_then(|before| links.reuse(participant, before, peer.rate));
        let link = carried.ok_or(LinkError::NoneToReuse)?;
        // Both ends need not agree on it, so it holds at once: also of what goes on by the epoch before.
        transport.set_congestion_control(link, peer.congestion_control);
        return Ok(());
    };
    let paths = u16::try_from(introduction.source_ports.len())?;
    let slot_bytes = slot_bytes(plan).ok_or(LinkError::ChunkBytes)?;
    let (ring_bytes, bytes) = (ring_bytes(plan, slot_bytes), landing_bytes(plan));
    let memory = Memory::private(usize::try_from(bytes)?)?;
    let link = transport.open(introduction)?;
    transport.set_congestion_control(link, peer.congestion_control);
    if peer.rate.is_some() && !transport.pace(link, peer.rate) {
        tracing::warn!(participant = participant.0, "this transport bounds no rates");
    }
    links.set(participant, link, std::sync::Arc::clone(&memory), paths);
    links.limit(participant, peer.rate);
    for channel in 0..=plan.channels {
        let memory = Span::new(&memory, u64::from(channel) * ring_bytes, ring_bytes)?;
        let ring = Ring { memory, slot_bytes, slots: plan.landing_slots };
        transport.attach_ring(link, channel, ring)?;
    }
    Ok(())
}

fn ring_bytes(plan: &EpochPlan, slot_bytes: u32) -> u64 {
    u64::from(plan.landing_slots) * u64::from(slot_bytes)
}

/// Memory that a link receives into: a ring a channel, and one for messages from rank to rank.
pub fn landing_bytes(plan: &EpochPlan) -> u64 {
    let ring_bytes = ring_bytes(plan, slot_bytes(plan).unwrap_or(u32::MAX));
    ring_bytes.saturating_mul(u64::from(plan.channels) + 1)
}

/// Bytes of a landing slot: a chunk, coded in an epoch or not. None where that is too much.
fn slot_bytes(plan: &EpochPlan) -> Option<u32> {
    plan.tuning.chunk_bytes.checked_add(CODED_ROOM)
}

/// What a plan asks for that this engine does not have.
pub(crate) fn unsupported(plan: &EpochPlan) -> Result<(), PrepareError> {
    let mut named = plan.coding.iter().flat_map(|coding| [Some(coding.codec), coding.finer]).flatten();
    match named.find(|number| codec(*number).is_none()) {
        Some(number) => Err(PrepareError::UnknownCodec(number)),
        None => Ok(()),
    }
}

/// Closes the links of an epoch that another does not have.
pub(crate) fn close_links(transport: &mut dyn Transport, links: &Links, other: Option<&Links>) {
    let gone = |link: &&LinkId| other.is_none_or(|other| !other.has(**link));
    links.links.iter().flatten().filter(gone).for_each(|link| transport.close(*link));
}

/// The way to an epoch's aggregator. Without one, hosts sum by themselves.
pub(crate) fn open_path(
    aggregator: Option<&Aggregator>,
    plan: &EpochPlan,
    me: Participant,
    (wake, port): (&OwnedFd, Option<&RdmaPort>),
) -> Option<Box<AggregatorPath>> {
    AggregatorPath::open(aggregator, plan, me, (wake, port)).unwrap_or_else(|error| {
        tracing::warn!(epoch = %plan.epoch, %error, "no way to the aggregator; hosts sum by themselves");
        None
    })
}

/// A member whose links are on their way up. On an error the caller closes those that are in `opened`.
pub(crate) fn form(
    transport: &mut dyn Transport,
    attachments: &Table<Attachment>,
    keys: &[Key],
    wake: (&OwnedFd, Option<&RdmaPort>),
    (formation, opened): (Formation, &mut Links),
) -> Result<CommunicatorState, PrepareError> {
    let plan = formation.plan.clone();
    unsupported(&plan)?;
    let group = plan.plan.group();
    let mut expected = group.local(formation.me).to_vec();
    expected.sort_unstable();
    let mut given: Vec<_> = formation.locals.iter().map(|local| local.rank).collect();
    given.sort_unstable();
    if expected != given || keys.len() != given.len() {
        return Err(PrepareError::LocalRanks);
    }
    let (mut access, mut locals, mut calls) = (Vec::new(), Vec::new(), 0_u32);
    for (local, key) in formation.locals.iter().zip(keys) {
        let attachment = attachments.get(*key).ok_or(PrepareError::AttachmentGone)?;
        let kind = if attachment.is_mapped() { Access::Mapped } else { Access::Remote };
        access.push((local.rank, kind));
        locals.push(Local { rank: local.rank, attachment: *key, handle: local.handle });
        calls = calls.max(attachment.end.entries());
    }
    let config = Config {
        me: formation.me,
        plan: plan.clone(),
        access,
        inquiry: MAX_INQUIRY,
        operations: calls as usize,
    };
    let core = Communicator::new(config)?;
    open_links(transport, &plan, formation.me, formation.peers, None, opened)?;
    opened.aggregator = open_path(formation.aggregator.as_ref(), &plan, formation.me, wake);
    Ok(CommunicatorState::new(CommunicatorParts {
        id: formation.communicator,
        tenant: formation.tenant,
        weight: formation.weight,
        core,
        ranks: group.ranks(),
        participants: group.participants(),
        calls: calls.saturating_mul(locals.len() as u32),
        locals,
        channels: plan.channels,
        landing_slots: plan.landing_slots,
        slot_bytes: slot_bytes(&plan).ok_or(PrepareError::ChunkBytes)?,
        links: std::mem::replace(opened, Links::new(plan.epoch, 0)),
    }))
}
