//! Tenants' processes that read their tenant's events: asked of control, and answered once control has.

use harmonaize_abi::Rank;
use harmonaize_abi::session::{Event, EventBatch, EventCursor, EventKind, Level};
use harmonaize_api::v1;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::oneshot;

/// Where a batch goes, or for people why there is none.
pub(crate) type Reply = oneshot::Sender<Result<EventBatch, String>>;

const AWAY: &str = "the provider cannot tell of events now; ask again later";

/// Those that wait for control.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    /// Whether control is there and has events.
    there: bool,
    waiting: BTreeMap<u64, Reply>,
    next: u64,
}

impl Readers {
    /// What to ask control, if it can be asked.
    pub(crate) fn ask(
        &mut self,
        tenant: &str,
        from: Option<EventCursor>,
        wait: Duration,
        reply: Reply,
    ) -> Option<v1::ReadEvents> {
        if !self.there {
            // Nobody hears it if the process went away; so below.
            let _ = reply.send(Err(AWAY.to_owned()));
            return None;
        }
        let request = self.next;
        self.next += 1;
        self.waiting.insert(request, reply);
        let from = from.map(|EventCursor { feed, next }| v1::EventCursor { feed, next });
        let wait_ns = u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX);
        Some(v1::ReadEvents { request, tenant: tenant.to_owned(), from, wait_ns })
    }

    /// Control's answer.
    pub(crate) fn answer(&mut self, answer: v1::EventsRead) {
        if let Some(reply) = self.waiting.remove(&answer.request) {
            let _ = reply.send(batch(answer));
        }
    }

    /// A session with control has begun or ended. What was asked in the one before is answered by nobody else.
    pub(crate) fn session(&mut self, there: bool) {
        self.there = there;
        for reply in std::mem::take(&mut self.waiting).into_values() {
            let _ = reply.send(Err(AWAY.to_owned()));
        }
    }
}

/// What control said, as the tenant gets it. Events of kinds that this agent does not know are left out.
fn batch(answer: v1::EventsRead) -> Result<EventBatch, String> {
    let v1::EventsRead { refused, missed, events, cursor, .. } = answer;
    match cursor {
        Some(v1::EventCursor { feed, next }) if refused.is_empty() => {
            let events = events.into_iter().filter_map(event).collect();
            Ok(EventBatch { missed, events, cursor: EventCursor { feed, next } })
        }
        _ if refused.is_empty() => Err(AWAY.to_owned()),
        _ => Err(refused),
    }
}

fn event(told: v1::TenantEvent) -> Option<Event> {
    let level = match told.level() {
        v1::EventLevel::None => Level::None,
        v1::EventLevel::Mild => Level::Mild,
        v1::EventLevel::Severe => Level::Severe,
    };
    let told_kind = told.kind();
    let v1::TenantEvent { number, communicator, ranks, at_ns, since_ns, waiting, .. } = told;
    let ranks = ranks.into_iter().map(Rank).collect();
    let kind = match told_kind {
        v1::EventKind::Unspecified => return None,
        v1::EventKind::Congestion => EventKind::Congestion(level),
        v1::EventKind::Capacity => EventKind::Capacity(level),
        v1::EventKind::Failure => EventKind::Failure { ranks },
        v1::EventKind::Maintenance => EventKind::Maintenance { ranks, at_ns },
        v1::EventKind::PlanChanged => EventKind::PlanChanged,
        v1::EventKind::Newcomers => EventKind::Newcomers { waiting },
    };
    Some(Event { number, communicator, kind, since_ns })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(
        readers: &mut Readers,
    ) -> (Option<v1::ReadEvents>, oneshot::Receiver<Result<EventBatch, String>>) {
        let (reply, answer) = oneshot::channel();
        (readers.ask("a", Some(EventCursor { feed: 7, next: 3 }), Duration::from_secs(1), reply), answer)
    }

    #[test]
    fn who_asks_is_answered_whatever_becomes_of_control() {
        let mut readers = Readers::default();
        let (none, mut answer) = asked(&mut readers);
        assert!(none.is_none() && answer.try_recv().unwrap().is_err());
        readers.session(true);
        let (first, mut answer) = asked(&mut readers);
        let (second, mut late) = asked(&mut readers);
        let (first, second) = (first.unwrap(), second.unwrap());
        assert_eq!((first.from.unwrap().next, first.wait_ns), (3, 1_000_000_000));
        assert_ne!(first.request, second.request);
        let event = |kind: v1::EventKind, number| v1::TenantEvent {
            number,
            communicator: "job".to_owned(),
            kind: kind.into(),
            level: v1::EventLevel::Severe.into(),
            ranks: vec![2],
            at_ns: 5,
            since_ns: 4,
            waiting: 0,
        };
        let events = vec![event(v1::EventKind::Maintenance, 3), event(v1::EventKind::Unspecified, 4)];
        let cursor = Some(v1::EventCursor { feed: 7, next: 5 });
        readers.answer(v1::EventsRead { request: first.request, events, cursor, ..Default::default() });
        let batch = answer.try_recv().unwrap().unwrap();
        let kind = EventKind::Maintenance { ranks: vec![Rank(2)], at_ns: 5 };
        let expected = Event { number: 3, communicator: "job".to_owned(), kind, since_ns: 4 };
        assert_eq!((batch.events, batch.cursor.next), (vec![expected], 5));
        // An answer that nobody waits for, and one that comes in no session any more.
        readers.answer(v1::EventsRead { request: 99, ..Default::default() });
        readers.session(false);
        assert_eq!(late.try_recv().unwrap().unwrap_err(), AWAY);
        readers.session(true);
        let (third, mut refused) = asked(&mut readers);
        let request = third.unwrap().request;
        readers.answer(v1::EventsRead { request, refused: "no".to_owned(), ..Default::default() });
        assert_eq!(refused.try_recv().unwrap().unwrap_err(), "no");
    }
}
