//! Plans as the store keeps them: what agents do not tell after a restart of control.

use crate::state::job::communicator::Communicator;
use crate::state::job::lifecycle::{EpochConfig, Planned};
use crate::state::output::{Fact, Output};
use crate::state::settings::Settings;
use harmonaize_abi::{CommunicatorId, Epoch};
use harmonaize_api::v1;
use harmonaize_api::v1::to_agent::Message;
use harmonaize_codec::Codec;
use harmonaize_planner::{AssignmentReason, HostId, Nanos, Rate, RateLimits, Topology};
use harmonaize_store::{Change, Connection, Epoch as StoredEpoch, Link, Loss, Plan};
use std::collections::BTreeMap;
use std::time::Duration;

/// The communicator whose plans an output may have changed.
pub(crate) fn touched(output: &Output) -> Option<CommunicatorId> {
    match output {
        Output::Send(_, Message::Form(recipe) | Message::Change(recipe)) => {
            Some(CommunicatorId(recipe.communicator))
        }
        Output::Send(_, Message::Ready(ready)) => Some(CommunicatorId(ready.communicator)),
        Output::Send(_, Message::Abandon(abandon)) => Some(CommunicatorId(abandon.communicator)),
        Output::Fact(
            Fact::EpochCurrent { communicator, .. }
            | Fact::EpochAbandoned { communicator, .. }
            | Fact::OrderFreed { communicator, .. }
            | Fact::LossLearned { communicator, .. }
            | Fact::Closed { communicator, .. }
            | Fact::Ended { communicator, .. },
        ) => Some(*communicator),
        _ => None,
    }
}

/// What is to be stored of a communicator's plans now.
pub(crate) fn plan_change(
    settings: &Settings,
    communicators: &BTreeMap<CommunicatorId, Communicator>,
    id: CommunicatorId,
) -> Change {
    communicators
        .get(&id)
        .map_or(Change::NoPlan(id), |known| Change::Plan(Box::new(stored_plan(settings, id, known))))
}

fn stored_plan(settings: &Settings, id: CommunicatorId, known: &Communicator) -> Plan {
    let current = known.current().map(|current| stored_epoch(settings, current));
    let pending = known.change().map(|change| stored_epoch(settings, &change.to));
    Plan {
        communicator: id.0,
        tenant: known.tenant.clone(),
        name: known.name.clone(),
        hosts: known.members.iter().map(|member| settings.host_name(member.host)).collect(),
        next_epoch: known.next_epoch.into(),
        current,
        pending,
        pinned: known.pinned,
        losses: known
            .coding
            .losses()
            .map(|(codec, loss, bytes)| Loss { codec: codec.name().to_owned(), loss, bytes })
            .collect(),
    }
}

fn stored_epoch(settings: &Settings, config: &EpochConfig) -> StoredEpoch {
    let EpochConfig { epoch, order, ports, links, plan, .. } = config;
    let planned = plan.as_ref();
    let connection = |(host, port): &(HostId, u16)| Connection {
        host: settings.host_name(*host),
        source_port: u32::from(*port),
    };
    let link = |(ends, ports): (&(u32, u32), &Vec<u16>)| Link {
        low: ends.0,
        high: ends.1,
        source_ports: ports.iter().copied().map(u32::from).collect(),
    };
    StoredEpoch {
        epoch: (*epoch).into(),
        order: order.clone(),
        connections: ports.iter().map(connection).collect(),
        links: links.iter().map(link).collect(),
        share_bits: planned.map_or(0, |planned| planned.share.0),
        pace_bits: planned.and_then(|planned| planned.pace).map_or(0, |pace| pace.0),
        predicted_ns: planned.map_or(0, |planned| planned.time.0),
        slowdown_ppm: planned.map_or(0, |planned| ppm(planned.slowdown)),
        reason: planned.map_or_else(String::new, |planned| planned.reason.to_string()),
    }
}

/// Returns a plan as operators see it where another control leads. Of its paths it has the ports, and nothing that is not
/// stored.
pub(crate) fn stored_plan_status(plan: &Plan) -> v1::PlanStatus {
    let current = plan.current.as_ref();
    let order = current.map_or(&[][..], |current| &current.order);
    let name = |index: &u32| plan.hosts.get(*index as usize).cloned().unwrap_or_default();
    let ports = |from: u32, to: u32| {
        let (low, high) = (from.min(to), from.max(to));
        let mut links = current.into_iter().flat_map(|current| &current.links);
        let link = links.find(|link| (link.low, link.high) == (low, high));
        link.into_iter().flat_map(|link| link.source_ports.iter().copied())
    };
    let edge = |(from, to): (&u32, &u32)| v1::PlannedRingEdge {
        from: name(from),
        to: name(to),
        paths: ports(*from, *to)
            .map(|source_port| v1::PlannedPath { source_port, switches: Vec::new() })
            .collect(),
        rate_bps: current.map_or(0, |current| current.pace_bits),
    };
    v1::PlanStatus {
        communicator: plan.communicator,
        tenant: plan.tenant.clone(),
        name: plan.name.clone(),
        epoch: current.map_or(0, |current| current.epoch),
        next_epoch: plan.pending.as_ref().map_or(0, |pending| pending.epoch),
        order: order.iter().map(name).collect(),
        ring_edges: order.iter().zip(order.iter().cycle().skip(1)).map(edge).collect(),
        predicted_ns: current.map_or(0, |current| current.predicted_ns),
        slowdown_ppm: current.map_or(0, |current| current.slowdown_ppm),
        share_bps: current.map_or(0, |current| current.share_bits),
        reason: current.map_or_else(String::new, |current| current.reason.clone()),
        pinned: plan.pinned,
        ..v1::PlanStatus::default()
    }
}

/// Gives back what was stored of a communicator that an agent reports as running. Its links keep the paths
/// that are known of them, what codecs lose is known, and no epoch's number is given twice. Returns the ports
/// that it held, which stay taken.
pub(crate) fn take_up_plan(
    topology: &Topology,
    now: Duration,
    plan: &Plan,
    known: &mut Communicator,
) -> Vec<(HostId, u16)> {
    known.next_epoch = known.next_epoch.max(Epoch::from_wire(plan.next_epoch).unwrap_or_default());
    known.pinned = plan.pinned;
    for Loss { codec, loss, bytes } in &plan.losses {
        if let Some(codec) = Codec::named(codec) {
            known.coding.recall(now, codec, *loss, *bytes);
        }
    }
    let epochs = || plan.current.iter().chain(&plan.pending);
    // The agents may be one epoch further than what was stored: then both are kept, for theirs is not known.
    let Some(current) = known.lifecycle.current_mut() else { return Vec::new() };
    let of_epoch = epochs().find(|epoch| epoch.epoch == u64::from(current.epoch));
    let kept = of_epoch.map_or_else(|| epochs().collect::<Vec<_>>(), |epoch| vec![epoch]);
    let held = kept.into_iter().flat_map(|epoch| &epoch.connections).filter_map(|connection| {
        Some((topology.host(&connection.host)?, u16::try_from(connection.source_port).ok()?))
    });
    let held = held.collect();
    if let Some(epoch) = of_epoch {
        current.links = epoch.links.iter().filter_map(|link| links(link, known.members.len())).collect();
        current.plan = (epoch.slowdown_ppm != 0).then(|| Planned {
            share: Rate(epoch.share_bits),
            pace: (epoch.pace_bits != 0).then_some(Rate(epoch.pace_bits)),
            time: Nanos(epoch.predicted_ns),
            slowdown: epoch.slowdown_ppm as f64 / 1e6,
            gives_way: false,
            reason: AssignmentReason::Recovered(epoch.reason.clone()),
        });
        // What is not known of it is said again.
        current.rate_limits =
            RateLimits { ring: current.plan.as_ref().and_then(|plan| plan.pace), exchange: None };
    }
    held
}

/// Whether what an agent says is running is what an earlier start stored by this number. It must be of that
/// tenant and name, and on those hosts.
pub(crate) fn is_stored_as(plan: &Plan, recipe: &v1::Recipe) -> bool {
    let hosts = recipe.participants.iter().map(|part| &part.host);
    plan.tenant == recipe.tenant && plan.name == recipe.name && plan.hosts.iter().eq(hosts)
}

/// A link as it was stored, where it makes sense.
fn links(link: &Link, members: usize) -> Option<((u32, u32), Vec<u16>)> {
    let fits = link.low < link.high && (link.high as usize) < members;
    let ports: Result<Vec<u16>, _> = link.source_ports.iter().map(|port| u16::try_from(*port)).collect();
    Some(((link.low, link.high), ports.ok().filter(|_| fits)?))
}

/// A factor, of a million.
pub(crate) fn ppm(factor: f64) -> u64 {
    (factor * 1e6).round().clamp(0.0, 1e18) as u64
}
