//! A tenant's events on their way from control to its processes.

use harmonaize_abi::Rank;
use harmonaize_abi::session::{Event, EventBatch, EventCursor, EventKind, Refusal};
use harmonaize_api::v1;
use std::time::Duration;

/// What to ask control.
pub(super) fn read_events(
    request: u64,
    tenant: &str,
    from: Option<EventCursor>,
    wait: Duration,
) -> v1::ReadEvents {
    let from = from.map(|EventCursor { feed, next }| v1::EventCursor { feed, next });
    let wait_ns = u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX);
    v1::ReadEvents { request, tenant: tenant.to_owned(), from, wait_ns }
}

/// What control said, as the tenant gets it. Events of kinds that this agent does not know are left out.
pub(super) fn batch(answer: v1::EventsRead) -> Result<EventBatch, Refusal> {
    let v1::EventsRead { refused, missed, events, cursor, .. } = answer;
    match cursor {
        Some(v1::EventCursor { feed, next }) if refused.is_empty() => {
            let events = events.into_iter().filter_map(event).collect();
            Ok(EventBatch { missed, events, cursor: EventCursor { feed, next } })
        }
        _ if refused.is_empty() => Err("the provider told of no place in the feed".into()),
        _ => Err(refused.into()),
    }
}

fn event(told: v1::TenantEvent) -> Option<Event> {
    let level = told.level().into();
    let (told_kind, cause) = (told.kind(), told.cause());
    let v1::TenantEvent { number, communicator, ranks, at_ns, since_ns, clauses, waiting, .. } = told;
    let ranks = ranks.into_iter().map(Rank).collect();
    let kind = match told_kind {
        v1::EventKind::Unspecified => return None,
        v1::EventKind::Congestion => EventKind::Congestion(level),
        v1::EventKind::Capacity => EventKind::Capacity(level),
        v1::EventKind::Failure => EventKind::Failure { ranks, regroup_by_ns: at_ns },
        v1::EventKind::Maintenance => EventKind::Maintenance { ranks, at_ns },
        v1::EventKind::PlanChanged => EventKind::PlanChanged,
        v1::EventKind::Newcomers => EventKind::Newcomers { waiting },
        v1::EventKind::AgreementBroken => {
            EventKind::AgreementBroken { clauses: harmonaize_api::clauses(&clauses) }
        }
        v1::EventKind::AgreementEnded => {
            EventKind::AgreementEnded { clauses: harmonaize_api::clauses(&clauses) }
        }
        v1::EventKind::Stragglers => EventKind::Stragglers { cause: cause.specified()?, ranks },
    };
    Some(Event { number, communicator, kind, since_ns })
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::StragglerCause;
    use harmonaize_abi::session::Clause;

    #[test]
    fn what_control_says_is_what_the_tenant_gets() {
        let asked = read_events(3, "a", Some(EventCursor { feed: 7, next: 3 }), Duration::from_secs(1));
        assert_eq!((asked.request, asked.from.unwrap().next, asked.wait_ns), (3, 3, 1_000_000_000));
        let event = |kind: v1::EventKind, number| v1::TenantEvent {
            number,
            communicator: "job".to_owned(),
            kind: kind.into(),
            level: v1::CongestionLevel::Severe.into(),
            ranks: vec![2],
            at_ns: 5,
            since_ns: 4,
            waiting: 0,
            clauses: vec![v1::Clause::Bandwidth.into(), 77],
            cause: v1::StragglerCause::Network.into(),
        };
        let kinds = [
            v1::EventKind::Maintenance,
            v1::EventKind::Unspecified,
            v1::EventKind::AgreementBroken,
            v1::EventKind::Failure,
            v1::EventKind::Stragglers,
        ];
        let mut events: Vec<_> =
            kinds.into_iter().zip(3..).map(|(kind, number)| event(kind, number)).collect();
        // Of kinds and causes that a later control has, nothing is known here.
        events.push(v1::TenantEvent { kind: 99, ..event(v1::EventKind::Failure, 8) });
        events.push(v1::TenantEvent { cause: 99, ..event(v1::EventKind::Stragglers, 9) });
        let cursor = Some(v1::EventCursor { feed: 7, next: 10 });
        let read = batch(v1::EventsRead { request: 3, events, cursor, ..Default::default() }).unwrap();
        let expected = |number, kind| Event { number, communicator: "job".to_owned(), kind, since_ns: 4 };
        let maintenance = EventKind::Maintenance { ranks: vec![Rank(2)], at_ns: 5 };
        let broken = EventKind::AgreementBroken { clauses: vec![Clause::Bandwidth] };
        let lost = EventKind::Failure { ranks: vec![Rank(2)], regroup_by_ns: 5 };
        let late = EventKind::Stragglers { cause: StragglerCause::Network, ranks: vec![Rank(2)] };
        let events =
            vec![expected(3, maintenance), expected(5, broken), expected(6, lost), expected(7, late)];
        assert_eq!((read.events, read.cursor.next), (events, 10));
        let refused = v1::EventsRead { refused: "no".to_owned(), ..Default::default() };
        assert_eq!(batch(refused).unwrap_err(), Refusal::from("no"));
    }
}
