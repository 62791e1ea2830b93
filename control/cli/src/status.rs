//! Status as a page of text.

use crate::table::{row, table};
use crate::text::{bytes, duration, number_of, ranks};
use harmonaize_api::communicator_text;
use harmonaize_api::v1::{
    AgentStatus, CommunicatorStatus, EndedStatus, MessageReport, OperationReport, StatusReply, WaitingStatus,
};

/// Most operations, and most errors, that are listed.
const MAX_LINES: usize = 20;

/// Everything that an operator looks at first.
pub(crate) fn text(status: &StatusReply) -> String {
    let connected = status.agents.iter().filter(|agent| agent.connected).count();
    let mut page = format!(
        "control {}, up {}: {connected} of {} connected, {}, {} ended with an error\n",
        status.build,
        duration(status.uptime_ns),
        number_of(status.agents.len(), "agent", "agents"),
        number_of(status.communicators.len(), "communicator", "communicators"),
        status.errors,
    );
    let mut section = |title: &str, head: Vec<String>, rows: Vec<Vec<String>>| {
        if !rows.is_empty() {
            let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
            page += &format!("\n{title}\n{}", table(&rows));
        }
    };
    let head = row(["host", "state", "listens on", "since", "processes", "communicators", "sent", "errors"]);
    section("AGENTS", head, status.agents.iter().map(agent).collect());

    let tenants = status.tenants.iter().map(|tenant| {
        let counts = [tenant.communicators, tenant.ranks, tenant.attachments].map(|count| count.to_string());
        let [communicators, ranks, processes] = counts;
        row([&tenant.name, &communicators, &ranks, &processes, &tenant.errors.to_string()])
    });
    section("TENANTS", row(["tenant", "communicators", "ranks", "processes", "errors"]), tenants.collect());

    let head = row(["id", "name", "ranks", "phase", "epoch", "ring", "operations", "sent", "errors"]);
    section("COMMUNICATORS", head, status.communicators.iter().map(communicator).collect());

    let promised = status.communicators.iter().filter_map(|known| Some((known, known.agreement.as_ref()?)));
    let promised = promised.map(|(known, told)| {
        let [promise, kept, operations] = crate::tenant::agreement_cells(&told.into());
        row([&name(&known.tenant, &known.name), &told.number.to_string(), &promise, &kept, &operations])
    });
    let head = row(["name", "number", "promise", "kept", "operations"]);
    section("AGREEMENTS", head, promised.collect());

    let flights =
        status.communicators.iter().flat_map(|known| known.in_flight.iter().map(move |one| (known, one)));
    let flights: Vec<Vec<String>> = flights.take(MAX_LINES).map(|(known, one)| flight(known, one)).collect();
    section("IN FLIGHT", row(["name", "operation", "call", "since", "waits for"]), flights);

    let messages =
        status.communicators.iter().flat_map(|known| known.messages.iter().map(move |one| (known, one)));
    let messages = messages.take(MAX_LINES).map(|(known, one)| message(known, one)).collect();
    section("MESSAGES IN FLIGHT", row(["name", "rank", "call", "since", "waits for"]), messages);

    section(
        "WAITING FOR RANKS",
        row(["name", "joined", "since", "missing"]),
        status.waiting.iter().map(waiting).collect(),
    );

    let changes = status.communicators.iter().filter(|known| !known.last_change.is_empty());
    let changes = changes.map(|known| row([&name(&known.tenant, &known.name), &known.last_change]));
    section("CHANGES GIVEN UP", row(["name", "why"]), changes.collect());

    let last = status.recent_errors.iter().rev().take(MAX_LINES);
    section("ENDED", row(["name", "before", "kind", "ranks", "detail"]), last.map(ended).collect());

    let said = status.agents.iter().filter_map(|agent| Some((agent, agent.report.as_ref()?)));
    let said =
        said.flat_map(|(agent, report)| report.recent_errors.iter().map(|error| row([&agent.host, error])));
    section("ERRORS OF AGENTS", row(["host", "error"]), said.take(MAX_LINES).collect());
    page
}

fn agent(agent: &AgentStatus) -> Vec<String> {
    let since = if agent.connected { duration(agent.session_ns) } else { "-".to_owned() };
    let listen = if agent.connected { agent.listen.as_str() } else { "-" };
    let Some(report) = &agent.report else {
        let state = if agent.connected { "silent" } else { "away" };
        return row([&agent.host, state, listen, &since, "-", "-", "-", "-"]);
    };
    let sent = report.communicators.iter().fold(0_u64, |sum, one| sum.saturating_add(one.bytes_sent));
    let counts = [report.attachments.len(), report.communicators.len()].map(|count| count.to_string());
    let [processes, communicators] = counts;
    row([
        &agent.host,
        "up",
        listen,
        &since,
        &processes,
        &communicators,
        &bytes(sent),
        &report.errors.to_string(),
    ])
}

fn communicator(known: &CommunicatorStatus) -> Vec<String> {
    let ring = known.order.iter().filter_map(|index| known.participants.get(*index as usize));
    let ring: Vec<String> = ring.map(|one| format!("{}({})", one.host, ranks(&one.ranks))).collect();
    let epoch = match known.next_epoch {
        0 => known.epoch.to_string(),
        next => format!("{}, {next} under way", known.epoch),
    };
    row([
        &communicator_text(known.communicator),
        &name(&known.tenant, &known.name),
        &known.ranks.to_string(),
        &known.phase().text(),
        &epoch,
        &ring.join(" "),
        &known.operations_completed.to_string(),
        &bytes(known.bytes_sent),
        &known.errors.to_string(),
    ])
}

fn flight(known: &CommunicatorStatus, one: &OperationReport) -> Vec<String> {
    let name = name(&known.tenant, &known.name);
    row([&name, &one.operation.to_string(), &one.call, &duration(one.age_ns), &awaited(&one.waiting_for)])
}

fn message(known: &CommunicatorStatus, one: &MessageReport) -> Vec<String> {
    let name = name(&known.tenant, &known.name);
    row([&name, &one.rank.to_string(), &one.call, &duration(one.age_ns), &awaited(&one.waiting_for)])
}

fn awaited(waiting_for: &[u32]) -> String {
    if waiting_for.is_empty() { "nobody".to_owned() } else { ranks(waiting_for) }
}

fn waiting(waiting: &WaitingStatus) -> Vec<String> {
    let missing: Vec<u32> = (0..waiting.ranks).filter(|rank| !waiting.joined.contains(rank)).collect();
    let joined = format!("{} of {}", waiting.joined.len(), waiting.ranks);
    row([&name(&waiting.tenant, &waiting.name), &joined, &duration(waiting.age_ns), &ranks(&missing)])
}

fn ended(ended: &EndedStatus) -> Vec<String> {
    let concerned = if ended.ranks.is_empty() { "-".to_owned() } else { ranks(&ended.ranks) };
    let name = name(&ended.tenant, &ended.name);
    row([&name, &duration(ended.age_ns), &ended.kind().text(), &concerned, &ended.detail])
}

fn name(tenant: &str, name: &str) -> String {
    format!("{tenant}/{name}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::page;
    use harmonaize_api::v1::{
        Agreement, Attachment, Clause, CommunicatorReport, Constraints, FailureKind, Participant, Phase,
        Priority, Record, Report, TenantStatus,
    };
    use harmonaize_testkit::golden::same;

    const SECOND: u64 = 1_000_000_000;
    const WORLD: u64 = 0x5f3a_9c12_0000_0001;

    fn agents() -> Vec<AgentStatus> {
        let one = |host: &str, sent| AgentStatus {
            host: host.to_owned(),
            connected: true,
            listen: "10.0.0.1:7100".to_owned(),
            build: "0.2.0".to_owned(),
            session_ns: 192 * SECOND,
            report: Some(Report {
                attachments: vec![Attachment { tenant: "a".to_owned(), arena_bytes: 64 << 20 }; 2],
                communicators: vec![CommunicatorReport {
                    communicator: WORLD,
                    bytes_sent: sent,
                    ..CommunicatorReport::default()
                }],
                errors: 1,
                recent_errors: vec![format!("a process at {host} is gone")],
                ..Report::default()
            }),
            ..AgentStatus::default()
        };
        let silent = AgentStatus { report: None, ..one("h2", 0) };
        let away = AgentStatus { host: "h3".to_owned(), ..AgentStatus::default() };
        vec![one("h0", 3 << 30), one("h1", 5 << 20), silent, away]
    }

    fn communicators() -> Vec<CommunicatorStatus> {
        let owned = |text: &str| text.to_owned();
        let agreement = Agreement {
            number: 2,
            constraints: Some(Constraints {
                min_busbw: 80_000_000,
                weight: 2,
                priority: Priority::High.into(),
                ..Constraints::default()
            }),
            broken: vec![Clause::Bandwidth.into()],
            record: Some(Record { operations: 12, missed: 1, ..Record::default() }),
            ..Agreement::default()
        };
        let participant =
            |host: &str, ranks: &[u32]| Participant { ranks: ranks.to_vec(), host: owned(host) };
        let world = CommunicatorStatus {
            communicator: WORLD,
            tenant: owned("a"),
            name: owned("world"),
            ranks: 5,
            phase: Phase::Changing.into(),
            epoch: 3,
            next_epoch: 4,
            participants: vec![participant("h0", &[0, 1, 2]), participant("h1", &[3, 5])],
            order: vec![1, 0],
            in_flight: vec![OperationReport {
                operation: 4118,
                call: owned("allreduce(1024 x f32, sum)"),
                waiting_for: vec![3, 5],
                age_ns: 31_000_000,
            }],
            operations_completed: 4117,
            bytes_sent: 3 << 30,
            errors: 0,
            agreement: Some(agreement),
            messages: vec![MessageReport {
                rank: 0,
                call: owned("send(9 x f32, to rank 1)"),
                waiting_for: vec![],
                age_ns: 3 * SECOND,
            }],
            last_change: owned("h1: port 20001 is taken"),
            ..CommunicatorStatus::default()
        };
        let name = owned("a-communicator-of-a-long-name");
        let (tenant, phase) = (owned("b"), Phase::Forming.into());
        vec![
            world,
            CommunicatorStatus { communicator: 7, tenant, name, ranks: 1, phase, ..Default::default() },
        ]
    }

    fn busy() -> StatusReply {
        let owned = |text: &str| text.to_owned();
        let tenant = |name: &str, ranks| TenantStatus {
            name: owned(name),
            communicators: 1,
            ranks,
            attachments: ranks,
            errors: 0,
        };
        let ended = |kind: FailureKind, ranks: &[u32], detail: &str| EndedStatus {
            communicator: 3,
            tenant: owned("a"),
            name: owned("old"),
            kind: kind.into(),
            ranks: ranks.to_vec(),
            detail: owned(detail),
            age_ns: 7200 * SECOND,
        };
        StatusReply {
            build: owned("0.2.0"),
            uptime_ns: 18_180 * SECOND,
            agents: agents(),
            tenants: vec![tenant("a", 5), tenant("b", 1)],
            communicators: communicators(),
            waiting: vec![WaitingStatus {
                tenant: owned("b"),
                name: owned("late"),
                ranks: 8,
                joined: vec![0, 1, 5],
                age_ns: 42 * SECOND,
            }],
            errors: 2,
            recent_errors: vec![
                ended(FailureKind::RanksLost, &[4], "their agent is away"),
                ended(FailureKind::Operator, &[], "ended by an operator"),
            ],
        }
    }

    #[test]
    fn a_busy_fabric_fills_every_section() {
        same("control/cli/tests/golden/status.txt", &text(&busy()));
        same("control/cli/tests/golden/status.json", &page(&busy()));
    }

    #[test]
    fn an_idle_fabric_is_short() {
        let away = AgentStatus { host: "h0".to_owned(), ..AgentStatus::default() };
        let idle = StatusReply { build: "0.2.0".to_owned(), agents: vec![away], ..StatusReply::default() };
        same("control/cli/tests/golden/status-idle.txt", &text(&idle));
    }
}
