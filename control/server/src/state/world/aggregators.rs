//! Aggregators on the path: which are there, and whom they serve. Also which communicators do better by one,
//! or by several of which one is above the others.
//!
//! A grant is of one epoch: its number and its secrets are drawn anew for each, and each secret is known to
//! its aggregator and, a key each, to that one's workers alone. It is withdrawn a while after the epoch, for
//! segments may be under way still. A session that ends takes no grant along: the aggregator may serve on,
//! and where it does not, hosts sum for themselves.

use crate::state::breach::Breach;
use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::job::datagrams;
use crate::state::job::decisions::Trigger;
use crate::state::job::reduction::AggregationChoice;
use crate::state::output::{Fact, SessionId};
use crate::state::timed::{Due, Timed};
use crate::state::world::agents::own_address;
use harmonaize_abi::{CommunicatorId, GrantId};
use harmonaize_aggregator::packet::MAX_PAYLOAD;
use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::{self, RefusedKind, from_agent, to_agent};
use harmonaize_planner::{AggregatorId, Topology};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

/// How long an epoch's grant outlives it.
const LINGER: Duration = Duration::from_secs(5);
/// Of a pool's units one of so many is a communicator's own.
pub(crate) const PARTS: u32 = 64;
/// Most grants that an aggregator may say it has.
const MOST_GRANTED: usize = 4096;
/// Most units of a pool that are believed.
const MOST_UNITS: u32 = 1 << 24;
/// Most tenants of a report that are kept, and characters of a name or reason.
const MOST_TENANTS: usize = 64;
const MAX_REASON_CHARS: usize = 200;

/// An aggregator with a session.
#[derive(Debug)]
pub(crate) struct There {
    pub session: SessionId,
    pub address: SocketAddr,
    pub units: u32,
    pub unit_bytes: u32,
    pub packets_per_second: u64,
    /// Where it is over RDMA.
    pub datagrams: Option<v1::DatagramPort>,
    pub report: Option<v1::AggregatorReport>,
}

/// What one aggregator, or several that are above and below each other, serve or are to serve under one
/// number.
#[derive(Debug, Default)]
pub(crate) struct Granted {
    /// Each as it was told; none where an earlier control told it. Not all are known where control has
    /// restarted.
    pub at: BTreeMap<AggregatorId, Option<SentGrant>>,
    /// The communicator; none while no agent has named it since control restarted.
    pub of: Option<CommunicatorId>,
    /// When it is withdrawn.
    pub until: Option<Duration>,
    /// Agents alone have named it since control restarted: when it is void, if no aggregator has by then.
    pub unclaimed: Option<Duration>,
}

/// A grant as an aggregator was told, and where workers were told that this one is.
#[derive(Debug)]
pub(crate) struct SentGrant {
    pub grant: v1::GrantAggregation,
    pub address: SocketAddr,
    /// Where workers reach it over RDMA, if they do.
    pub datagrams: Option<v1::DatagramPort>,
}

impl SentGrant {
    /// Whether workers find it where it is.
    pub(crate) fn is_at(&self, there: &There) -> bool {
        self.address == there.address && (self.datagrams.is_none() || self.datagrams == there.datagrams)
    }
}

impl Due for Granted {
    fn next_timeout(&self) -> Option<Duration> {
        self.until.into_iter().chain(self.unclaimed).min()
    }
}

/// All aggregators and their grants.
#[derive(Debug, Default)]
pub(crate) struct Aggregators {
    there: BTreeMap<AggregatorId, There>,
    sessions: BTreeMap<SessionId, AggregatorId>,
    grants: Timed<GrantId, Granted>,
}

/// That an aggregator does not serve what it was granted.
#[derive(Debug)]
pub(crate) struct GrantRefusal {
    /// The aggregator.
    pub by: AggregatorId,
    /// The grant.
    pub grant: GrantId,
    /// The communicator.
    pub of: Option<CommunicatorId>,
    /// Why, for operators.
    pub reason: String,
}

impl Aggregators {
    /// Returns the aggregators that have sessions.
    pub(crate) fn present(&self) -> &BTreeMap<AggregatorId, There> {
        &self.there
    }

    /// Takes note of a grant under a number that no other has.
    pub(crate) fn grant(&mut self, number: GrantId, granted: Granted) {
        debug_assert!(!self.grants.contains_key(&number), "grant {number} is there already");
        self.grants.insert(number, granted);
        let full = |(at, there): (&AggregatorId, &There)| self.guaranteed(*at) > there.units;
        debug_assert!(!self.there.iter().any(full), "an aggregator guarantees more than it has");
    }

    /// Whether a session is an aggregator's.
    pub(crate) fn is_aggregator(&self, session: SessionId) -> bool {
        self.sessions.contains_key(&session)
    }

    /// Opens the session of an aggregator. Returns which it is; none where it is refused.
    pub(crate) fn hello(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        hello: &v1::Hello,
        aggregator: &v1::Aggregator,
    ) -> Option<AggregatorId> {
        let name: String = hello.host.chars().take(80).collect();
        let Some(id) = ctx.settings.topology.aggregator(&hello.host) else {
            let text = format!("the topology has no aggregator `{name}`");
            effects.refuse(from, RefusedKind::UnknownHost, text);
            return None;
        };
        let known = ctx.settings.topology.aggregators().get(id.0);
        let address = match own_address(&hello.listen, known.map_or(&[][..], |known| &known.addresses)) {
            Ok(address) => address,
            Err(error) => {
                effects.refuse(from, RefusedKind::Protocol, error.to_string());
                return None;
            }
        };
        if self.there.contains_key(&id) {
            let text =
                format!("aggregator `{name}` has a session already; one that died is noticed within seconds");
            effects.refuse(from, RefusedKind::HostInUse, text);
            return None;
        }
        let sound = aggregator.incarnation != 0
            && (1..=MOST_UNITS).contains(&aggregator.units)
            && (8..=MAX_PAYLOAD as u32).contains(&aggregator.unit_bytes)
            && aggregator.granted.len() <= MOST_GRANTED;
        if !sound || !hello.running.is_empty() {
            effects.refuse(from, RefusedKind::Protocol, "an aggregator without sense in Hello".to_owned());
            return None;
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
        self.sessions.insert(from, id);
        let welcome = v1::Welcome {
            protocol_version: PROTOCOL_VERSION,
            build: harmonaize_program::version().to_owned(),
            ..v1::Welcome::default()
        };
        effects.send(from, to_agent::Message::Welcome(welcome));
        effects.fact(Fact::AggregatorConnected { name, address: address.to_string() });
        self.take_up_grants(ctx, effects, (id, there), &aggregator.granted);
        Some(id)
    }

    /// Compares the grants that an aggregator reports with those that it should have. It gets those that it
    /// lacks. Those that its workers would not find there are void.
    fn take_up_grants(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        (id, there): (AggregatorId, There),
        granted: &[u64],
    ) {
        let from = there.session;
        let until = ctx.now.saturating_add(ctx.settings.lease);
        let served: BTreeSet<GrantId> = granted.iter().copied().map(GrantId).collect();
        for number in &served {
            // Whoever it is for may name it yet; else it is withdrawn.
            let unknown = || Granted { until: Some(until), ..Granted::default() };
            let granted = self.grants.entry(*number).or_insert_with(unknown);
            granted.at.entry(id).or_insert(None);
            granted.unclaimed = None;
        }
        let (mut again, mut void) = (Vec::new(), Vec::new());
        let live = self.grants.iter().filter(|(_, granted)| granted.until.is_none());
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
        self.there.insert(id, there);
        for grant in again {
            effects.send(from, to_agent::Message::GrantAggregation(grant));
        }
        // Their communicators get another epoch, with another grant.
        for (number, serves) in void {
            self.revoke(effects, number, (!serves).then_some(id));
        }
        effects.want_plan(Trigger::Aggregators);
    }

    /// Takes in a message of an aggregator. Returns the grant that it refuses to serve, if it does.
    ///
    /// # Errors
    /// The message is a breach of protocol.
    pub(crate) fn message(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        message: from_agent::Message,
    ) -> Result<Option<GrantRefusal>, Breach> {
        let Some(id) = self.sessions.get(&from).copied() else { return Ok(None) };
        match message {
            from_agent::Message::AggregationGranted(answer) => {
                let grant = GrantId(answer.communicator);
                let granted = self.grants.get(&grant);
                let Some(granted) = granted.filter(|granted| granted.at.contains_key(&id)) else {
                    return Ok(None);
                };
                if answer.refused.is_empty() {
                    return Ok(None);
                }
                let why: String =
                    answer.refused.chars().filter(|c| !c.is_control()).take(MAX_REASON_CHARS).collect();
                let of = granted.of;
                // Those above and below it are of no use alone.
                self.revoke(effects, grant, Some(id));
                let name = aggregator_name(&ctx.settings.topology, id);
                let reason = format!("{name} refused: {why}");
                effects.fact(Fact::GrantRefused { name, communicator: of.unwrap_or_default(), why });
                // Who runs by it is told that there is none.
                effects.want_plan(Trigger::Aggregators);
                return Ok(Some(GrantRefusal { by: id, grant, of, reason }));
            }
            from_agent::Message::Aggregator(mut report) => {
                report.tenants.truncate(MOST_TENANTS);
                for tenant in &mut report.tenants {
                    tenant.tenant =
                        tenant.tenant.chars().filter(|c| !c.is_control()).take(MAX_REASON_CHARS).collect();
                }
                if let Some(there) = self.there.get_mut(&id) {
                    there.report = Some(report);
                }
            }
            _ => return Err(Breach::AsAgent),
        }
        Ok(None)
    }

    /// An aggregator's session has ended; what it serves it serves on. Whether it was one.
    pub(crate) fn session_ended(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, session: SessionId) -> bool {
        let Some(id) = self.sessions.remove(&session) else { return false };
        self.there.remove(&id);
        effects.fact(Fact::AggregatorGone { name: aggregator_name(&ctx.settings.topology, id) });
        true
    }

    /// Whether an aggregator was granted any communicator that has not ended.
    pub(crate) fn is_granting(&self, id: AggregatorId) -> bool {
        self.grants.values().any(|granted| granted.at.contains_key(&id))
    }

    /// Returns the session of an aggregator, if it has one.
    pub(crate) fn session_of(&self, id: AggregatorId) -> Option<SessionId> {
        self.there.get(&id).map(|there| there.session)
    }

    /// The sessions of aggregators; control goes down.
    pub(crate) fn leave(&mut self) -> Vec<SessionId> {
        self.there.clear();
        std::mem::take(&mut self.sessions).into_keys().collect()
    }

    /// Units that nobody is guaranteed.
    pub(crate) fn free_units(&self, id: AggregatorId, there: &There) -> u32 {
        there.units.saturating_sub(self.guaranteed(id))
    }

    pub(crate) fn guaranteed(&self, id: AggregatorId) -> u32 {
        let grants = self.grants.values().filter_map(|granted| granted.at.get(&id));
        // Of what an earlier control granted: what it must have granted.
        let part = self.there.get(&id).map_or(2, |there| (there.units / PARTS).max(2));
        let units = grants.map(|told| told.as_ref().map_or(part, |told| told.grant.guaranteed_units));
        units.fold(0, u32::saturating_add)
    }

    /// Other communicators that an aggregator serves.
    pub(crate) fn served_beside(&self, id: AggregatorId, communicator: CommunicatorId) -> u32 {
        let others = self.grants.values().filter(|granted| {
            granted.at.contains_key(&id)
                && granted.until.is_none()
                && granted.of.is_some_and(|of| of != communicator)
        });
        others.count() as u32
    }

    /// An epoch is over, or was given up: its grant is withdrawn a while after.
    pub(crate) fn end(&mut self, now: Duration, chosen: &AggregationChoice) {
        let granted = chosen.grant.and_then(|number| self.grants.get_mut(&number));
        if let Some(granted) = granted {
            granted.until = Some(now.saturating_add(LINGER));
        }
    }

    /// An agent says, after a restart of control, that its communicator has this grant.
    pub(crate) fn recover(&mut self, ctx: &Ctx<'_>, id: CommunicatorId, grant: Option<GrantId>) {
        let Some(number) = grant else { return };
        let unclaimed = Some(ctx.now.saturating_add(ctx.settings.lease));
        let unknown = || Granted { unclaimed, ..Granted::default() };
        let granted = self.grants.entry(number).or_insert_with(unknown);
        (granted.of, granted.until) = (Some(id), None);
    }

    /// Returns when the next grant is to be withdrawn.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        self.grants.next_timeout()
    }

    /// Withdraws the grants that are due. Returns whether there were any.
    pub(crate) fn expire(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) -> bool {
        let over = self.grants.due(ctx.now);
        let some = !over.is_empty();
        over.into_iter().for_each(|number| self.revoke(effects, number, None));
        some
    }

    /// Has nobody serve this grant any more; who refused it needs no word.
    fn revoke(&mut self, effects: &mut Effects, grant: GrantId, refused: Option<AggregatorId>) {
        let Some(granted) = self.grants.remove(&grant) else { return };
        for at in granted.at.into_keys().filter(|at| Some(*at) != refused) {
            if let Some(session) = self.there.get(&at).map(|there| there.session) {
                let revoke = v1::RevokeAggregation { communicator: grant.0 };
                effects.send(session, to_agent::Message::RevokeAggregation(revoke));
            }
        }
    }

    /// Whether a grant is in effect.
    pub(crate) fn is_granted(&self, grant: GrantId) -> bool {
        self.grants.contains_key(&grant)
    }

    /// Returns the name of a communicator's aggregator, or the names of all. The one above comes first where
    /// it is known. The text is empty where the communicator has none.
    pub(crate) fn names_of(&self, topology: &Topology, chosen: &AggregationChoice) -> String {
        let granted = chosen.grant.and_then(|number| self.grants.get(&number));
        let Some(granted) = granted else { return String::new() };
        let root = chosen.root().filter(|root| granted.at.contains_key(root));
        let names = |ids: &mut dyn Iterator<Item = AggregatorId>| {
            ids.map(|id| aggregator_name(topology, id)).collect::<Vec<_>>().join(", ")
        };
        let mut below = granted.at.keys().copied().filter(|id| Some(*id) != root);
        match (root, names(&mut below)) {
            (Some(root), below) if !below.is_empty() => {
                format!("{} above {below}", aggregator_name(topology, root))
            }
            (Some(root), _) => aggregator_name(topology, root),
            (None, all) => all,
        }
    }

    /// Aggregators as operators see them.
    pub(crate) fn reply(&self, topology: &Topology) -> Vec<v1::FabricAggregator> {
        let all = topology.aggregators_there().map(|(id, known)| {
            let there = self.there.get(&id);
            let served = self
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

fn aggregator_name(topology: &Topology, id: AggregatorId) -> String {
    topology.aggregators().get(id.0).map_or_else(String::new, |known| known.name.clone())
}
