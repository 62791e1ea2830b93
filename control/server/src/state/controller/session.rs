//! Agents' sessions: how they open, and what their end takes along: joins, and never data.

use super::Controller;
use crate::state::breach::Breach;
use crate::state::ctx::ctx;
use crate::state::job::communicator::EndCause;
use crate::state::output::{Fact, SessionId};
use crate::state::world::agents::{Abilities, Session, own_address};
use crate::state::world::handovers::HandOvers;
use crate::state::world::link_state::congestion_reports::MOST_A_SECOND;
use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::{self, RefusedKind, to_agent};
use std::collections::BTreeMap;
use std::time::Duration;

/// Longest build text that is kept.
const BUILD_BYTES: usize = 128;

impl Controller {
    /// An agent or aggregator opens a session. An error is a breach of protocol.
    pub(crate) fn hello(&mut self, now: Duration, from: SessionId, hello: &v1::Hello) -> Result<(), Breach> {
        let version = hello.protocol_version;
        if version != PROTOCOL_VERSION {
            let text = format!(
                "the agent speaks version {version}, control {PROTOCOL_VERSION}; upgrade the older of the two"
            );
            self.outbox.refuse(from, RefusedKind::Version, text);
            return Ok(());
        }
        if let Some(aggregator) = &hello.aggregator {
            let came = self.aggregators.hello(&ctx!(self, now), &mut self.outbox, from, hello, aggregator);
            if let Some(came) = came {
                self.communicators.values_mut().for_each(|known| known.refused.forget(came));
            }
            return Ok(());
        }
        let Some(host) = self.settings.topology.host(&hello.host) else {
            let name: String = hello.host.chars().take(80).collect();
            self.outbox.refuse(from, RefusedKind::UnknownHost, format!("the topology has no host `{name}`"));
            return Ok(());
        };
        let addresses = self.settings.topology.hosts().get(host.0).map_or(&[][..], |host| &host.addresses);
        let listen = match own_address(&hello.listen, addresses) {
            Ok(listen) => listen,
            Err(error) => {
                self.outbox.refuse(from, RefusedKind::Protocol, error.to_string());
                return Ok(());
            }
        };
        if self.hosts.contains_key(&host) {
            let text = format!(
                "host `{}` has a session already; one that died is noticed within seconds",
                hello.host
            );
            self.outbox.refuse(from, RefusedKind::HostInUse, text);
            return Ok(());
        }
        let build = hello.build.chars().take(BUILD_BYTES).collect();
        let abilities = Abilities::new(hello.capabilities.as_ref(), listen.ip());
        let (joins, tenants, processes) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let session = Session { host, listen, build, since: now, abilities, tenants, processes, joins };
        self.sessions.insert(from, session);
        self.hosts.insert(host, from);
        self.handovers.connected(now, host);
        self.telemetry.forget(&ctx!(self, now), &mut self.outbox, host);
        let interval = u64::try_from(self.settings.telemetry_interval.as_nanos()).unwrap_or(u64::MAX);
        let welcome = v1::Welcome {
            protocol_version: PROTOCOL_VERSION,
            build: harmonaize_program::version().to_owned(),
            tenants: self.settings.tenants.clone(),
            telemetry_interval_ns: interval,
            congestion_reports_per_second: MOST_A_SECOND,
            serve: self.operator.served_at(&hello.host),
            uplink_bits_per_second: self.settings.topology.uplink(host).0,
            cancels_reads: true,
            allocates: self.settings.allocator.is_some(),
            takes_links_over_tcp: true,
        };
        self.outbox.send(from, to_agent::Message::Welcome(welcome));
        self.outbox.fact(Fact::AgentConnected { host: hello.host.clone(), listen: listen.to_string() });
        let missing = self.sessions.get(&from).map(|session| session.abilities.missing.join("; "));
        if let Some(what) = missing.filter(|what| !what.is_empty()) {
            self.outbox.fact(Fact::AgentLacks { host: hello.host.clone(), what });
        }
        self.recover(now, from, host, hello)?;
        // An epoch that this agent was waited for may be overdue.
        self.expire_communicators(now);
        let ctx = &ctx!(self, now);
        self.link_state.trace_host(ctx, host);
        self.link_state.ask_traces(ctx, &mut self.outbox);
        Ok(())
    }

    /// A connection has ended, whoever ended it. That takes its agent's joins along, and no data: its ranks
    /// are lost once a peer's links say so, or the lease is over.
    pub fn session_ended(&mut self, now: Duration, session: SessionId) {
        self.settle(now);
        if self.aggregators.session_ended(&ctx!(self, now), &mut self.outbox, session) {
            return;
        }
        let Some(ended) = self.sessions.remove(&session) else { return };
        self.hosts.remove(&ended.host);
        self.link_state.session_ended(ended.host);
        for (request, join) in ended.joins {
            self.withdraw_join((session, request), join);
        }
        let until = now.saturating_add(self.settings.lease);
        let (communicators, forming) = self.communicators.await_agent(session, until);
        self.link_state.active_changed();
        let host = self.settings.host_name(ended.host);
        self.outbox.fact(Fact::AgentGone { host, communicators, lease: self.settings.lease });
        self.regroups.past.session_ended((ended.host, session), until);
        for (id, ranks) in forming {
            let detail = "the session of an agent ended while it formed".to_owned();
            self.end(now, id, EndCause { kind: v1::FailureKind::RanksLost, ranks, detail }, None);
        }
        self.turns.session_ended(&ctx!(self, now), &mut self.outbox, session);
        self.questions.session_ended(session);
        self.answer_questions(now);
        self.events.forget_readers(session);
        self.jobs.session_ended(now, session);
        self.act(now);
    }

    /// Ends a session whose agent broke the protocol.
    pub(crate) fn breach(&mut self, now: Duration, session: SessionId, what: Breach) {
        self.outbox.refuse(session, RefusedKind::Protocol, format!("breach of protocol: {what}"));
        self.session_ended(now, session);
    }

    /// Tells every agent that control goes down. Their communicators run on.
    pub fn shut_down(&mut self) {
        let aggregators = self.aggregators.leave();
        for session in self.sessions.keys().copied().chain(aggregators).collect::<Vec<_>>() {
            self.outbox.refuse(session, RefusedKind::Shutdown, "control is going down".to_owned());
        }
        self.sessions.clear();
        self.hosts.clear();
        self.handovers = HandOvers::default();
    }
}
