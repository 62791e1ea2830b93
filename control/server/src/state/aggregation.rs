//! Aggregators on the way: which are there, whom they serve, and which communicators do better by one, or by several of which one is above
//! the others.
//!
//! A grant is of one epoch: its number and its secrets are drawn anew for each, and each secret is known to its aggregator and, a key each, to
//! that one's workers alone. It is withdrawn a while after the epoch, for segments may be under way still. A session that ends takes no grant
//! along: the aggregator may serve on, and where it does not, hosts sum for themselves.

use super::codec::CodecChoice;
use super::communicator::Communicator;
use super::decisions::Trigger;
use super::lifecycle::Planned;
use super::reduction::{AggregationChoice, ReductionPolicy};
use super::{Fact, SessionId, State};
use harmonaize_aggregator::packet::{MAX_PAYLOAD, MAX_WORKERS};
use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::{self, RefusedKind, from_agent, to_agent};
use harmonaize_codec::Codec;
use harmonaize_planner::{AggregatorId, AggregatorOffer, Bytes, HostId, Rate, decide_aggregation, line_rate};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

mod codes;
mod datagrams;
mod grant;

use codes::Shape;

/// How long an epoch's grant outlives it.
const LINGER: Duration = Duration::from_secs(5);
/// What passes between a part and its sum beside the ways: programs that wait for a processor. For the window alone.
const TURN: Duration = Duration::from_millis(2);
/// Chunks in flight.
const WINDOWS: std::ops::RangeInclusive<u64> = 16..=1024;
/// Of a pool's units one of so many is a communicator's own.
const PARTS: u32 = 64;
/// Most grants that an aggregator may say it has.
const MOST_GRANTED: usize = 4096;
/// Most units of a pool that are believed.
const MOST_UNITS: u32 = 1 << 24;
/// Most tenants of a report that are kept, and characters of a name or reason.
const MOST_TENANTS: usize = 64;
const MAX_REASON_CHARS: usize = 200;
/// Bytes of an element: f32.
const ELEMENT: u32 = 4;

/// What a tenant has of aggregators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Whether its communicators may use them.
    pub allowed: bool,
    /// Its weight where tenants compete, at least 1.
    pub weight: u32,
}

impl Default for Terms {
    fn default() -> Self {
        Self { allowed: true, weight: 1 }
    }
}

/// An aggregator with a session.
#[derive(Debug)]
struct There {
    session: SessionId,
    address: SocketAddr,
    units: u32,
    unit_bytes: u32,
    packets_per_second: u64,
    /// Where it is over RDMA.
    datagrams: Option<v1::DatagramPort>,
    report: Option<v1::AggregatorReport>,
}

/// What one aggregator, or several that are above and below each other, serve or are to serve under one number.
#[derive(Debug, Default)]
struct Granted {
    /// Each as it was told; none where an earlier control told it. Not all are known where control has restarted.
    at: BTreeMap<AggregatorId, Option<SentGrant>>,
    /// The communicator; none while no agent has named it since control restarted.
    of: Option<u64>,
    /// When it is withdrawn.
    until: Option<Duration>,
    /// Agents alone have named it since control restarted: when it is void, if no aggregator has by then.
    unclaimed: Option<Duration>,
}

/// A grant as an aggregator was told, and where workers were told that this one is.
#[derive(Debug)]
struct SentGrant {
    grant: v1::GrantAggregation,
    address: SocketAddr,
    /// Where workers reach it over RDMA, if they do.
    datagrams: Option<v1::DatagramPort>,
}

impl SentGrant {
    /// Whether workers find it where it is.
    fn is_at(&self, there: &There) -> bool {
        self.address == there.address && (self.datagrams.is_none() || self.datagrams == there.datagrams)
    }
}

/// All aggregators and their grants.
#[derive(Debug, Default)]
pub(super) struct Aggregators {
    there: BTreeMap<AggregatorId, There>,
    sessions: BTreeMap<SessionId, AggregatorId>,
    grants: BTreeMap<u64, Granted>,
}

impl State {
    /// Whether a session is an aggregator's.
    pub(super) fn is_aggregator(&self, session: SessionId) -> bool {
        self.aggregators.sessions.contains_key(&session)
    }

    /// An aggregator opens a session.
    pub(super) fn aggregator_hello(
        &mut self,
        now: Duration,
        from: SessionId,
        hello: &v1::Hello,
        aggregator: &v1::Aggregator,
    ) {
        let name: String = hello.host.chars().take(80).collect();
        let Some(id) = self.settings.topology.aggregator(&hello.host) else {
            let text = format!("the topology has no aggregator `{name}`");
            return self.refuse(from, RefusedKind::UnknownHost, text);
        };
        let address = hello.listen.parse::<SocketAddr>().ok();
        let Some(address) = address.filter(|at| at.port() != 0 && !at.ip().is_unspecified()) else {
            let text = "`listen` must be an address that workers can send to, \"ip:port\"";
            return self.refuse(from, RefusedKind::Protocol, text.to_owned());
        };
        if self.aggregators.there.contains_key(&id) {
            let text =
                format!("aggregator `{name}` has a session already; one that died is noticed within seconds");
            return self.refuse(from, RefusedKind::HostInUse, text);
        }
        let sound = aggregator.incarnation != 0
            && (1..=MOST_UNITS).contains(&aggregator.units)
            && (8..=MAX_PAYLOAD as u32).contains(&aggregator.unit_bytes)
            && aggregator.granted.len() <= MOST_GRANTED;
        if !sound || !hello.running.is_empty() {
            return self.refuse(
                from,
                RefusedKind::Protocol,
                "an aggregator without sense in Hello".to_owned(),
            );
        }
        let there = There {
            session: from,
            address,
            units: aggregator.units,
            unit_bytes: aggregator.unit_bytes,
            packets_per_second: aggregator.packets_per_second,
            datagrams: aggregator.datagrams.clone().filter(datagrams::is_sound),
            report: None,
        };
        self.aggregators.sessions.insert(from, id);
        let welcome = v1::Welcome {
            protocol_version: PROTOCOL_VERSION,
            build: env!("CARGO_PKG_VERSION").to_owned(),
            ..v1::Welcome::default()
        };
        self.send(from, to_agent::Message::Welcome(welcome));
        self.fact(Fact::AggregatorConnected { name, address: address.to_string() });
        let until = now.saturating_add(self.settings.recovery_timeout);
        for number in &aggregator.granted {
            // Whoever it is for may name it yet; else it is withdrawn.
            let unknown = || Granted { until: Some(until), ..Granted::default() };
            let granted = self.aggregators.grants.entry(*number).or_insert_with(unknown);
            granted.at.entry(id).or_insert(None);
            granted.unclaimed = None;
        }
        let served: BTreeSet<u64> = aggregator.granted.iter().copied().collect();
        let (mut again, mut void) = (Vec::new(), Vec::new());
        let live = self.aggregators.grants.iter().filter(|(_, granted)| granted.until.is_none());
        for (number, granted) in live {
            let Some(told) = granted.at.get(&id) else { continue };
            let serves = served.contains(number);
            match told {
                Some(told) if !told.is_at(&there) => void.push((*number, serves)),
                Some(told) if !serves => again.push(told.grant.clone()),
                // Its secret went with the control that drew it.
                None if !serves => void.push((*number, serves)),
                _ => {}
            }
        }
        self.aggregators.there.insert(id, there);
        for grant in again {
            self.send(from, to_agent::Message::GrantAggregation(grant));
        }
        // Their communicators get another epoch, with another grant.
        for (number, serves) in void {
            self.revoke_aggregation(number, (!serves).then_some(id));
        }
        self.communicators.values_mut().for_each(|known| known.refused.forget(id));
        self.want_plan(Trigger::Aggregators);
    }

    /// A message of an aggregator. An error is a breach of protocol.
    pub(super) fn aggregator_message(
        &mut self,
        now: Duration,
        from: SessionId,
        message: from_agent::Message,
    ) -> Result<(), &'static str> {
        let Some(id) = self.aggregators.sessions.get(&from).copied() else { return Ok(()) };
        match message {
            from_agent::Message::AggregationGranted(answer) => {
                let granted = self.aggregators.grants.get(&answer.communicator);
                let Some(granted) = granted.filter(|granted| granted.at.contains_key(&id)) else {
                    return Ok(());
                };
                if answer.refused.is_empty() {
                    return Ok(());
                }
                let why: String =
                    answer.refused.chars().filter(|c| !c.is_control()).take(MAX_REASON_CHARS).collect();
                let of = granted.of;
                // Those above and below it are of no use alone.
                self.revoke_aggregation(answer.communicator, Some(id));
                let name = self.aggregator_name(id);
                let reason = format!("{name} refused: {why}");
                if let Some(known) = of.and_then(|of| self.communicators.get_mut(&of)) {
                    known.refused.refuse(now, id, &reason);
                    for chosen in known.lifecycle.configs_mut().map(|config| &mut config.aggregation) {
                        if chosen.grant == Some(answer.communicator) {
                            chosen.reason.clone_from(&reason);
                        }
                    }
                }
                self.fact(Fact::GrantRefused { name, communicator: of.unwrap_or_default(), why });
                // Who runs by it is told that there is none.
                self.want_plan(Trigger::Aggregators);
            }
            from_agent::Message::Aggregator(mut report) => {
                report.tenants.truncate(MOST_TENANTS);
                for tenant in &mut report.tenants {
                    tenant.tenant =
                        tenant.tenant.chars().filter(|c| !c.is_control()).take(MAX_REASON_CHARS).collect();
                }
                if let Some(there) = self.aggregators.there.get_mut(&id) {
                    there.report = Some(report);
                }
            }
            _ => return Err("a message of hosts' agents from an aggregator"),
        }
        Ok(())
    }

    /// An aggregator's session has ended; what it serves it serves on. Whether it was one.
    pub(super) fn aggregator_gone(&mut self, session: SessionId) -> bool {
        let Some(id) = self.aggregators.sessions.remove(&session) else { return false };
        self.aggregators.there.remove(&id);
        self.fact(Fact::AggregatorGone { name: self.aggregator_name(id) });
        true
    }

    /// The sessions of aggregators; control goes down.
    pub(super) fn leave_aggregators(&mut self) -> Vec<SessionId> {
        self.aggregators.there.clear();
        std::mem::take(&mut self.aggregators.sessions).into_keys().collect()
    }

    fn aggregator_name(&self, id: AggregatorId) -> String {
        self.settings.topology.aggregators().get(id.0).map_or_else(String::new, |known| known.name.clone())
    }

    /// What was agreed on for a communicator's sums.
    pub(super) fn reduction_policy(&self, id: u64) -> ReductionPolicy {
        let wanted = self.agreements.constraints(id);
        ReductionPolicy {
            aggregated: wanted.is_none_or(|wanted| wanted.aggregation),
            ordered: wanted.is_some_and(|wanted| wanted.ordered),
        }
    }

    /// How the next epoch of a communicator has large operations summed, by this plan. Nothing is granted yet.
    pub(super) fn weigh_aggregation(
        &self,
        communicator: &Communicator,
        id: u64,
        coding: &CodecChoice,
        planned: Option<&Planned>,
    ) -> Weighed {
        let by_hosts = |reason: &str| Weighed { best: None, reason: reason.to_owned() };
        let topology = &self.settings.topology;
        if topology.aggregators().is_empty() {
            return by_hosts("");
        }
        let members = communicator.members.len();
        if !self.settings.terms(&communicator.tenant).allowed {
            return by_hosts("the tenant has none");
        }
        let sums = self.reduction_policy(id);
        if !sums.aggregated {
            return by_hosts("the tenant wants none");
        }
        if !self.all_aggregate(communicator) {
            return by_hosts("not all agents can");
        }
        if members > usize::from(MAX_WORKERS) {
            return by_hosts("too many hosts");
        }
        // Sums of codes are not added in order.
        let (exact, plain) = (coding.codec == Codec::EXACT, !sums.ordered);
        let coder = self.codes_allowed(communicator, coding).filter(|_| plain);
        if !exact && coder.is_none() {
            return by_hosts("tensors travel in fewer bits");
        }
        let hosts: Vec<HostId> = communicator.members.iter().map(|member| member.host).collect();
        let least = 2 * sums.grain(members);
        let there = self.aggregators.there.iter().filter(|(at, _)| !communicator.refused.holds(**at));
        let offers: Vec<AggregatorOffer> = there
            .filter(|(at, there)| self.free_units(**at, there) >= least)
            .flat_map(|(at, there)| {
                let (unit, _) = self.packets(communicator, there);
                let payload = Bytes(u64::from(unit));
                let offer = AggregatorOffer {
                    aggregator: *at,
                    payload,
                    tensor_bytes: payload,
                    codec_rate: Rate(0),
                    packets_per_second: there.packets_per_second,
                    other_communicators: self.served_beside(*at, id),
                    // Aggregators above each other add in another order, and know no hosts.
                    supports_parents: plain,
                };
                let shape = coder.zip(Shape::of_codes(unit, members));
                let coded = shape.map(|(coder, Shape { elements, bytes, .. })| AggregatorOffer {
                    payload: Bytes(u64::from(bytes)),
                    tensor_bytes: Bytes(u64::from(elements) * u64::from(ELEMENT)),
                    codec_rate: coder,
                    ..offer.clone()
                });
                exact.then_some(offer).into_iter().chain(coded)
            })
            .collect();
        let conditions = self.conditions();
        let share = planned.map(|planned| planned.share).filter(|share| share.0 > 0);
        let ring = share.unwrap_or_else(|| line_rate(topology, &hosts));
        let told = self.rhythms.get(&id).map_or(0, super::iterations::Operations::bytes);
        let decided = decide_aggregation(
            topology,
            &conditions,
            &hosts,
            (ring, Rate(coding.speed)),
            Bytes(told),
            &offers,
        );
        let refused = communicator.refused.reason().filter(|_| decided.plan.is_none());
        Weighed { best: decided.plan, reason: refused.unwrap_or(decided.reason) }
    }

    /// Whether the agents of all of a communicator's hosts are there and can send to aggregators.
    fn all_aggregate(&self, known: &Communicator) -> bool {
        known.members.iter().all(|member| {
            let session = member.session.and_then(|session| self.sessions.get(&session));
            session.is_some_and(|session| session.abilities.aggregation)
        })
    }

    /// Units that nobody is guaranteed.
    fn free_units(&self, id: AggregatorId, there: &There) -> u32 {
        there.units.saturating_sub(self.guaranteed(id))
    }

    fn guaranteed(&self, id: AggregatorId) -> u32 {
        let grants = self.aggregators.grants.values().filter_map(|granted| granted.at.get(&id));
        // Of what an earlier control granted: what it must have granted.
        let part = self.aggregators.there.get(&id).map_or(2, |there| (there.units / PARTS).max(2));
        let units = grants.map(|told| told.as_ref().map_or(part, |told| told.grant.guaranteed_units));
        units.fold(0, u32::saturating_add)
    }

    /// Other communicators that an aggregator serves.
    fn served_beside(&self, id: AggregatorId, communicator: u64) -> u32 {
        let others = self.aggregators.grants.values().filter(|granted| {
            granted.at.contains_key(&id)
                && granted.until.is_none()
                && granted.of.is_some_and(|of| of != communicator)
        });
        others.count() as u32
    }

    /// An epoch is over, or was given up: its grant is withdrawn a while after.
    pub(super) fn end_aggregation(&mut self, now: Duration, chosen: &AggregationChoice) {
        let granted = chosen.grant.and_then(|number| self.aggregators.grants.get_mut(&number));
        if let Some(granted) = granted {
            granted.until = Some(now.saturating_add(LINGER));
        }
    }

    /// An agent says, after a restart of control, that its communicator has this grant.
    pub(super) fn recover_aggregation(&mut self, now: Duration, id: u64, chosen: &AggregationChoice) {
        let Some(number) = chosen.grant else { return };
        let unclaimed = Some(now.saturating_add(self.settings.recovery_timeout));
        let unknown = || Granted { unclaimed, ..Granted::default() };
        let granted = self.aggregators.grants.entry(number).or_insert_with(unknown);
        (granted.of, granted.until) = (Some(id), None);
    }

    /// When the next grant is to be withdrawn, or an aggregator that has refused may be asked again.
    pub(super) fn aggregation_deadline(&self) -> Option<Duration> {
        let grants = self.aggregators.grants.values();
        let over = grants.flat_map(|granted| granted.until.into_iter().chain(granted.unclaimed));
        over.chain(self.communicators.values().filter_map(|known| known.refused.due())).min()
    }

    /// Withdraws what is due, and lets those be asked again that refused.
    pub(super) fn expire_aggregations(&mut self, now: Duration) {
        let past = |at: Option<Duration>| at.is_some_and(|at| at <= now);
        let due = |granted: &Granted| past(granted.until) || past(granted.unclaimed);
        let grants = self.aggregators.grants.iter();
        let over: Vec<u64> = grants.filter(|(_, granted)| due(granted)).map(|(number, _)| *number).collect();
        let mut moved = !over.is_empty();
        over.into_iter().for_each(|number| self.revoke_aggregation(number, None));
        for known in self.communicators.values_mut() {
            moved |= known.refused.expire(now);
        }
        if moved {
            self.want_plan(Trigger::Aggregators);
        }
    }

    /// Has nobody serve this grant any more; who refused it needs no word.
    fn revoke_aggregation(&mut self, communicator: u64, refused: Option<AggregatorId>) {
        let Some(granted) = self.aggregators.grants.remove(&communicator) else { return };
        for at in granted.at.into_keys().filter(|at| Some(*at) != refused) {
            if let Some(session) = self.aggregators.there.get(&at).map(|there| there.session) {
                let revoke = v1::RevokeAggregation { communicator };
                self.send(session, to_agent::Message::RevokeAggregation(revoke));
            }
        }
    }

    /// Whether a grant is in effect.
    pub(super) fn is_granted(&self, grant: u64) -> bool {
        self.aggregators.grants.contains_key(&grant)
    }

    /// The name of a communicator's aggregator, or the names of all, the one above first where it is known; empty where it has none.
    pub(super) fn aggregator_of(&self, chosen: &AggregationChoice) -> String {
        let granted = chosen.grant.and_then(|number| self.aggregators.grants.get(&number));
        let Some(granted) = granted else { return String::new() };
        let root = chosen.root().filter(|root| granted.at.contains_key(root));
        let names = |ids: &mut dyn Iterator<Item = AggregatorId>| {
            ids.map(|id| self.aggregator_name(id)).collect::<Vec<_>>().join(", ")
        };
        let mut below = granted.at.keys().copied().filter(|id| Some(*id) != root);
        match (root, names(&mut below)) {
            (Some(root), below) if !below.is_empty() => {
                format!("{} above {below}", self.aggregator_name(root))
            }
            (Some(root), _) => self.aggregator_name(root),
            (None, all) => all,
        }
    }

    /// Aggregators as operators see them.
    pub(super) fn aggregators_reply(&self) -> Vec<v1::FabricAggregator> {
        let topology = &self.settings.topology;
        let all = topology.aggregators().iter().enumerate().map(|(index, known)| {
            let id = AggregatorId(index);
            let there = self.aggregators.there.get(&id);
            let served = self
                .aggregators
                .grants
                .values()
                .filter(|granted| granted.at.contains_key(&id) && granted.until.is_none());
            let switch = harmonaize_planner::Node::Switch(known.switch);
            v1::FabricAggregator {
                name: known.name.clone(),
                switch: topology.node_name(switch).to_owned(),
                rate_bps: known.rate.0,
                connected: there.is_some(),
                address: there.map_or_else(String::new, |there| there.address.to_string()),
                units: there.map_or(0, |there| there.units),
                guaranteed_units: self.guaranteed(id),
                unit_bytes: there.map_or(0, |there| there.unit_bytes),
                communicators: served.count() as u32,
                report: there.and_then(|there| there.report.clone()),
            }
        });
        all.collect()
    }
}

/// What the planner says for a communicator.
pub(super) struct Weighed {
    pub best: Option<harmonaize_planner::AggregationPlan>,
    pub reason: String,
}
