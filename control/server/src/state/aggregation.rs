//! Aggregators on the way: which are there, whom they serve, and which communicators do better by one.
//!
//! A grant is of one epoch: its number and its secret are drawn anew for each, and known to its aggregator and, a key each, to its
//! workers alone. It is withdrawn a while after the epoch, for segments may be under way still. A session that ends takes no grant
//! along: the aggregator may serve on, and where it does not, hosts sum for themselves.

use super::coding;
use super::communicator::Communicator;
use super::decisions::{Changed, Trigger};
use super::replan::{Planned, changed};
use super::session::Abilities;
use super::{Fact, SessionId, State};
use harmonaize_abi::{Dtype, ReduceOp};
use harmonaize_aggregator::packet::{MAX_PAYLOAD, MAX_WORKERS};
use harmonaize_aggregator::{Form, SPAN, worker_key};
use harmonaize_api::v1::{self, RefusedKind, aggregation_form, from_agent, to_agent};
use harmonaize_api::{PROTOCOL_VERSION, SECRET_BYTES};
use harmonaize_codec::Codec;
use harmonaize_planner::{AggregatorId, Bytes, HostId, Nanos, Offer, Rate, aggregation, line_rate};
use rand::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

mod codes;

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
const WORDS: usize = 200;
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
    /// Whether it sums codes.
    codes: bool,
    /// Whether it takes one worker's bytes for all, and parts of nothing.
    spreads: bool,
    report: Option<v1::AggregatorReport>,
}

/// What an aggregator serves, or is to serve.
#[derive(Debug)]
struct Granted {
    /// None while it is not known which: control has restarted.
    aggregator: Option<AggregatorId>,
    /// The communicator; none while no agent has named it since control restarted.
    of: Option<u64>,
    /// As it was told; none where an earlier control told it.
    grant: Option<v1::GrantAggregation>,
    /// When it is withdrawn.
    until: Option<Duration>,
}

/// All aggregators and their grants.
#[derive(Debug, Default)]
pub(super) struct Aggregators {
    there: BTreeMap<AggregatorId, There>,
    sessions: BTreeMap<SessionId, AggregatorId>,
    grants: BTreeMap<u64, Granted>,
}

/// How an epoch's large operations go.
#[derive(Clone, Debug, Default)]
pub(super) struct Chosen {
    /// The grant; none: by the hosts.
    pub grant: Option<u64>,
    pub aggregator: Option<AggregatorId>,
    /// In words.
    pub reason: String,
    /// For all workers, but for what is one's alone.
    told: Option<v1::Aggregation>,
    secret: [u8; SECRET_BYTES],
}

impl Chosen {
    /// Because an agent says so after a restart of control.
    pub(super) fn told(recipe: &v1::Recipe) -> Self {
        let grant = recipe.aggregation.as_ref().map(|told| told.communicator);
        let reason = if grant.is_some() { "as before control restarted".to_owned() } else { String::new() };
        Self { grant, reason, ..Self::default() }
    }

    /// Whether tensors go in codes.
    pub(super) fn is_coded(&self) -> bool {
        let form = self.told.as_ref().and_then(|told| told.form.as_ref()?.form.as_ref());
        matches!(form, Some(aggregation_form::Form::Shared(_)))
    }

    /// For the recipe of a worker.
    pub(super) fn recipe(&self, worker: u32) -> Option<v1::Aggregation> {
        let told = self.told.clone()?;
        let number = u16::try_from(worker).ok()?;
        let key = worker_key(&self.secret, told.communicator, number).to_vec();
        Some(v1::Aggregation { worker, key, ..told })
    }
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
        told: &v1::Aggregator,
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
        let sound = told.incarnation != 0
            && (1..=MOST_UNITS).contains(&told.units)
            && (8..=MAX_PAYLOAD as u32).contains(&told.unit_bytes)
            && told.granted.len() <= MOST_GRANTED;
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
            units: told.units,
            unit_bytes: told.unit_bytes,
            packets_per_second: told.packets_per_second,
            codes: told.codes,
            spreads: told.spreads,
            report: None,
        };
        self.aggregators.there.insert(id, there);
        self.aggregators.sessions.insert(from, id);
        let welcome = v1::Welcome {
            protocol_version: PROTOCOL_VERSION,
            build: env!("CARGO_PKG_VERSION").to_owned(),
            ..v1::Welcome::default()
        };
        self.send(from, to_agent::Message::Welcome(welcome));
        self.fact(Fact::AggregatorConnected { name, address: address.to_string() });
        let until = now.saturating_add(self.settings.recovery_timeout);
        for number in &told.granted {
            // Whoever it is for may name it yet; else it is withdrawn.
            let unknown = || Granted { aggregator: Some(id), of: None, grant: None, until: Some(until) };
            self.aggregators.grants.entry(*number).or_insert_with(unknown).aggregator = Some(id);
        }
        let served: BTreeSet<u64> = told.granted.iter().copied().collect();
        let missing = self.aggregators.grants.iter().filter(|(number, granted)| {
            granted.aggregator == Some(id) && granted.until.is_none() && !served.contains(number)
        });
        let missing: Vec<v1::GrantAggregation> =
            missing.filter_map(|(_, granted)| granted.grant.clone()).collect();
        for grant in missing {
            self.send(from, to_agent::Message::GrantAggregation(grant));
        }
        self.want_plan(Trigger::Aggregators);
    }

    /// A message of an aggregator. An error is a breach of protocol.
    pub(super) fn aggregator_message(
        &mut self,
        from: SessionId,
        message: from_agent::Message,
    ) -> Result<(), &'static str> {
        let Some(id) = self.aggregators.sessions.get(&from).copied() else { return Ok(()) };
        match message {
            from_agent::Message::AggregationGranted(answer) => {
                let granted = self.aggregators.grants.get(&answer.communicator);
                let Some(granted) = granted.filter(|granted| granted.aggregator == Some(id)) else {
                    return Ok(());
                };
                if answer.refused.is_empty() {
                    return Ok(());
                }
                let why: String = answer.refused.chars().filter(|c| !c.is_control()).take(WORDS).collect();
                let of = granted.of;
                self.aggregators.grants.remove(&answer.communicator);
                let name = self.aggregator_name(id);
                let reason = format!("{name} refused: {why}");
                if let Some(known) = of.and_then(|of| self.communicators.get_mut(&of)) {
                    known.refused.insert(id);
                    let pending = known.pending.as_mut().map(|pending| &mut pending.aggregation);
                    for chosen in std::iter::once(&mut known.aggregation).chain(pending) {
                        if chosen.grant == Some(answer.communicator) {
                            chosen.reason.clone_from(&reason);
                        }
                    }
                }
                self.fact(Fact::GrantRefused { name, communicator: of.unwrap_or_default(), why });
            }
            from_agent::Message::Aggregator(mut report) => {
                report.tenants.truncate(MOST_TENANTS);
                for tenant in &mut report.tenants {
                    tenant.tenant = tenant.tenant.chars().filter(|c| !c.is_control()).take(WORDS).collect();
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

    /// How the next epoch of a communicator has large operations summed, by this plan. Nothing is granted yet.
    fn weigh_aggregation(
        &self,
        known: &Communicator,
        id: u64,
        coding: &coding::Chosen,
        planned: Option<&Planned>,
    ) -> Weighed {
        let by_hosts = |reason: &str| Weighed { best: None, reason: reason.to_owned() };
        let topology = &self.settings.topology;
        if topology.aggregators().is_empty() {
            return by_hosts("");
        }
        let members = known.members.len();
        let able = known.members.iter().all(|member| {
            let session = member.session.and_then(|session| self.sessions.get(&session));
            session.is_some_and(|session| session.abilities.aggregation)
        });
        if !self.settings.terms(&known.tenant).allowed {
            return by_hosts("the tenant has none");
        }
        if !self.agreements.aggregates(id) {
            return by_hosts("the tenant wants none");
        }
        if !able {
            return by_hosts("not all agents can");
        }
        if members > usize::from(MAX_WORKERS) {
            return by_hosts("too many hosts");
        }
        let (exact, coder) = (coding.codec == Codec::EXACT, self.codes_allowed(known, coding));
        if !exact && coder.is_none() {
            return by_hosts("tensors travel in fewer bits");
        }
        let hosts: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
        let there = self.aggregators.there.iter().filter(|(at, _)| !known.refused.contains(at));
        let offers: Vec<Offer> = there
            .filter(|(at, there)| self.free_units(**at, there) >= 2)
            .flat_map(|(at, there)| {
                let payload = Bytes(u64::from(there.unit_bytes));
                let offer = Offer {
                    aggregator: *at,
                    payload,
                    carries: payload,
                    coder: Rate(0),
                    packets_per_second: there.packets_per_second,
                    others: self.served_beside(*at, id),
                };
                let shape = coder.filter(|_| there.codes).zip(Shape::of_codes(there.unit_bytes, members));
                let coded = shape.map(|(coder, Shape { elements, bytes, .. })| Offer {
                    payload: Bytes(u64::from(bytes)),
                    carries: Bytes(u64::from(elements) * u64::from(ELEMENT)),
                    coder,
                    ..offer.clone()
                });
                exact.then_some(offer).into_iter().chain(coded)
            })
            .collect();
        let conditions = self.estimates.conditions(topology, self.withdrawn());
        let share = planned.map(|planned| planned.share).filter(|share| share.0 > 0);
        let ring = share.unwrap_or_else(|| line_rate(topology, &hosts));
        let told = self.rhythms.get(&id).map_or(0, super::rhythms::Operations::bytes);
        let decided =
            aggregation(topology, &conditions, &hosts, (ring, Rate(coding.speed)), Bytes(told), &offers);
        Weighed { best: decided.chosen, reason: decided.reason }
    }

    /// Units that nobody is guaranteed.
    fn free_units(&self, id: AggregatorId, there: &There) -> u32 {
        there.units.saturating_sub(self.guaranteed(id))
    }

    fn guaranteed(&self, id: AggregatorId) -> u32 {
        let grants = self.aggregators.grants.values().filter(|granted| granted.aggregator == Some(id));
        let units = grants.map(|granted| granted.grant.as_ref().map_or(2, |grant| grant.guaranteed));
        units.fold(0, u32::saturating_add)
    }

    /// Other communicators that an aggregator serves.
    fn served_beside(&self, id: AggregatorId, communicator: u64) -> u32 {
        let others = self.aggregators.grants.values().filter(|granted| {
            granted.aggregator == Some(id)
                && granted.until.is_none()
                && granted.of.is_some_and(|of| of != communicator)
        });
        others.count() as u32
    }

    /// Decides how the next epoch has large operations summed, and grants it. The aggregator is told before any agent is.
    pub(super) fn choose_aggregation(
        &mut self,
        id: u64,
        coding: &coding::Chosen,
        planned: Option<&Planned>,
    ) -> Chosen {
        let Some(known) = self.communicators.get(&id) else { return Chosen::default() };
        let Weighed { best, reason } = self.weigh_aggregation(known, id, coding, planned);
        let none = |reason: String| Chosen { reason, ..Chosen::default() };
        let Some(best) = best else { return none(reason) };
        let Some(there) = self.aggregators.there.get(&best.aggregator) else { return none(reason) };
        let (workers, tenant) = (known.members.len() as u32, known.tenant.clone());
        let (address, session, units, unit) = (there.address, there.session, there.units, there.unit_bytes);
        let free = self.free_units(best.aggregator, there);
        let all = |can: fn(&Abilities) -> bool| {
            known.members.iter().all(|member| {
                let session = member.session.and_then(|session| self.sessions.get(&session));
                session.is_some_and(|session| can(&session.abilities))
            })
        };
        let all_take = all(|abilities| abilities.aggregated_codes);
        let at_once = there.spreads && all(|abilities| abilities.aggregated_at_once);
        let [broadcast_least_bytes, broadcast_most_bytes] =
            best.broadcasts.filter(|_| at_once).map_or([0; 2], |range| range.map(|bytes| bytes.0));
        let form = Form::Tensor { dtype: Dtype::F32, op: ReduceOp::Sum };
        let exact = Shape { form, elements: unit / ELEMENT, bytes: unit };
        let shape = if best.coded { Shape::of_codes(unit, workers as usize) } else { Some(exact) };
        let Some(Shape { form, elements: chunk_elements, bytes }) = shape else { return none(reason) };
        let round = Duration::from_nanos(best.delay.0.saturating_mul(2)).saturating_add(TURN);
        let held = best.rate.bytes_in(Nanos(u64::try_from(round.as_nanos()).unwrap_or(u64::MAX))).0;
        let window = held.div_ceil(u64::from(bytes.max(1))).clamp(*WINDOWS.start(), *WINDOWS.end()) as u32;
        let most = (2 * SPAN * window).min(units);
        let guaranteed = (units / PARTS).clamp(2, most.max(2)).min(free);
        let mut secret = [0; SECRET_BYTES];
        self.random.fill_bytes(&mut secret);
        let number = std::iter::repeat_with(|| self.random.next_u64());
        let grants = &self.aggregators.grants;
        let number = number.take(16).find(|number| *number != 0 && !grants.contains_key(number));
        let Some(number) = number else { return none(reason) };
        let form = Some(v1::AggregationForm { form: Some(said(form)) });
        let grant = v1::GrantAggregation {
            communicator: number,
            secret: secret.to_vec(),
            workers,
            form: form.clone(),
            chunk_elements,
            ordered: false,
            partial: None,
            weight: self.settings.terms(&tenant).weight,
            tenant,
            guaranteed,
            most,
        };
        let granted = Granted {
            aggregator: Some(best.aggregator),
            of: Some(id),
            grant: Some(grant.clone()),
            until: None,
        };
        self.aggregators.grants.insert(number, granted);
        self.send(session, to_agent::Message::GrantAggregation(grant));
        let told = v1::Aggregation {
            address: address.to_string(),
            communicator: number,
            workers,
            chunk_elements,
            window,
            least_bytes: best.least.0,
            form,
            most_error: if best.coded { coding.budget.most().unwrap_or(0.0) } else { 0.0 },
            averages: all_take,
            at_once,
            broadcast_least_bytes,
            broadcast_most_bytes,
            barriers: best.barriers && at_once,
            ..v1::Aggregation::default()
        };
        Chosen { grant: Some(number), aggregator: Some(best.aggregator), reason, told: Some(told), secret }
    }

    /// An epoch is over, or was given up: its grant is withdrawn a while after.
    pub(super) fn end_aggregation(&mut self, now: Duration, chosen: &Chosen) {
        let granted = chosen.grant.and_then(|number| self.aggregators.grants.get_mut(&number));
        if let Some(granted) = granted {
            granted.until = Some(now.saturating_add(LINGER));
        }
    }

    /// An agent says, after a restart of control, that its communicator has this grant.
    pub(super) fn recover_aggregation(&mut self, id: u64, chosen: &Chosen) {
        let Some(number) = chosen.grant else { return };
        let unknown = || Granted { aggregator: None, of: None, grant: None, until: None };
        let granted = self.aggregators.grants.entry(number).or_insert_with(unknown);
        (granted.of, granted.until) = (Some(id), None);
    }

    /// When the next grant is to be withdrawn.
    pub(super) fn aggregation_deadline(&self) -> Option<Duration> {
        self.aggregators.grants.values().filter_map(|granted| granted.until).min()
    }

    /// Withdraws what is due.
    pub(super) fn expire_aggregations(&mut self, now: Duration) {
        let due = |granted: &Granted| granted.until.is_some_and(|until| until <= now);
        let over: Vec<(u64, Option<AggregatorId>)> = self
            .aggregators
            .grants
            .iter()
            .filter(|(_, granted)| due(granted))
            .map(|(number, granted)| (*number, granted.aggregator))
            .collect();
        for (communicator, at) in over {
            self.aggregators.grants.remove(&communicator);
            let session = at.and_then(|at| self.aggregators.there.get(&at)).map(|there| there.session);
            if let Some(session) = session {
                let revoke = v1::RevokeAggregation { communicator };
                self.send(session, to_agent::Message::RevokeAggregation(revoke));
            }
        }
    }

    /// Has communicators that have no aggregator, and do better by one that is there now, go on by another epoch with the links that
    /// they have.
    pub(super) fn aggregate(&mut self, now: Duration, number: u64, changes: &mut Vec<Changed>) {
        if self.aggregators.there.is_empty() {
            return;
        }
        let mut found = Vec::new();
        for (id, known) in &self.communicators {
            let still = known.phase() == v1::Phase::Running && known.held_off.is_none();
            if !still
                || known.aggregation.grant.is_some_and(|grant| self.aggregators.grants.contains_key(&grant))
            {
                continue;
            }
            let weighed = self.weigh_aggregation(known, *id, &known.coding.current, known.plan.as_ref());
            found.extend(weighed.best.map(|_| (*id, weighed.reason)));
        }
        for (id, reason) in found {
            let epoch = self.propose_same(now, id, Some(number));
            changes.push(changed(id, epoch, &reason, now));
        }
    }

    /// The name of a communicator's aggregator; empty where it has none.
    pub(super) fn aggregator_of(&self, chosen: &Chosen) -> String {
        let granted = chosen.grant.and_then(|number| self.aggregators.grants.get(&number));
        granted.and_then(|granted| granted.aggregator).map_or_else(String::new, |id| self.aggregator_name(id))
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
                .filter(|granted| granted.aggregator == Some(id) && granted.until.is_none());
            let switch = harmonaize_planner::Node::Switch(known.switch);
            v1::FabricAggregator {
                name: known.name.clone(),
                at: topology.node_name(switch).to_owned(),
                rate_bits: known.rate.0,
                connected: there.is_some(),
                address: there.map_or_else(String::new, |there| there.address.to_string()),
                units: there.map_or(0, |there| there.units),
                guaranteed: self.guaranteed(id),
                unit_bytes: there.map_or(0, |there| there.unit_bytes),
                communicators: served.count() as u32,
                report: there.and_then(|there| there.report.clone()),
            }
        });
        all.collect()
    }
}

/// What the planner says for a communicator.
struct Weighed {
    best: Option<harmonaize_planner::Aggregated>,
    reason: String,
}

/// A form as messages have it.
fn said(form: Form) -> aggregation_form::Form {
    match form {
        Form::Tensor { dtype, op } => {
            aggregation_form::Form::Tensor(v1::TensorForm { dtype: dtype.to_string(), op: op.to_string() })
        }
        Form::Shared { bits, block, ranks } => {
            let (bits, block, ranks) = (bits.into(), block.into(), ranks.into());
            aggregation_form::Form::Shared(v1::SharedForm { bits, block, ranks })
        }
    }
}
