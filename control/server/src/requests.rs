//! Requests of tenants that wait for the state: a queue for each tenant, served in turn.
//!
//! One tenant's flood fills its own queue, and whoever else asks has the next turn but for one of each that waits. What is no tenant's
//! request never waits here.

use crate::state::{RequestRefusal, SessionId};
use harmonaize_api::v1::{self, FromAgent, JoinRefusedKind, from_agent, to_agent};
use std::collections::{BTreeMap, HashSet, VecDeque};

/// Most requests of a tenant that wait: the ranks of the largest communicator come at once.
const MAX_WAITING: usize = 16_384;

/// Most requests of all tenants that wait. A request is some 300 bytes.
const MAX_WAITING_ALL: usize = 8 * MAX_WAITING;

/// What becomes of a message that came.
#[derive(Debug)]
pub(crate) enum Sorted {
    /// It is served now: it is no request of a tenant's.
    Now(Box<FromAgent>),
    /// It waits for its turn, or has ended one that waited.
    Taken,
    /// It is over the limit; its sender gets this.
    Refused(Box<to_agent::Message>),
}

/// The queues.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    tenants: BTreeMap<String, Queue>,
    /// Tenants with requests that wait, each once.
    turns: VecDeque<String>,
    /// Joins that wait. Those that were withdrawn meanwhile are none of them.
    joins: HashSet<(SessionId, u64)>,
    waiting: usize,
}

#[derive(Debug, Default)]
struct Queue {
    requests: VecDeque<(SessionId, Box<FromAgent>)>,
    /// It was full since it was last empty.
    overflowed: bool,
}

impl Requests {
    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Takes a message of a session's in. Cost: a look-up or two, however many wait.
    pub(crate) fn sort(&mut self, session: SessionId, message: Box<FromAgent>) -> Sorted {
        if let Some(from_agent::Message::Leave(leave)) = &message.message
            && leave.communicator == 0
            && self.joins.remove(&(session, leave.request))
        {
            return Sorted::Taken;
        }
        let Some(tenant) = message.message.as_ref().and_then(tenant_of) else { return Sorted::Now(message) };
        let join = match &message.message {
            Some(from_agent::Message::Join(join)) => Some((session, join.request)),
            _ => None,
        };
        if join.is_some_and(|join| self.joins.contains(&join)) {
            // Two of a number: the state ends such a session. The tenant that it names gets no queue.
            return Sorted::Now(message);
        }
        let queue = self.tenants.entry(tenant.to_owned()).or_default();
        let (most, waits, of_all) = match queue.requests.len() >= MAX_WAITING {
            true => (MAX_WAITING, queue.requests.len(), false),
            false => (MAX_WAITING_ALL, self.waiting, true),
        };
        if waits >= most {
            if !std::mem::replace(&mut queue.overflowed, true) {
                tracing::warn!(tenant, waits, "a tenant asks faster than control answers; more is refused");
            }
            if queue.requests.is_empty() {
                self.tenants.remove(tenant);
            }
            let why = RequestRefusal::TooManyRequests { waits, most, of_all };
            return message
                .message
                .and_then(|message| refusal(message, why))
                .map_or(Sorted::Taken, |answer| Sorted::Refused(Box::new(answer)));
        }
        self.joins.extend(join);
        if queue.requests.is_empty() {
            self.turns.push_back(tenant.to_owned());
        }
        queue.requests.push_back((session, message));
        self.waiting += 1;
        Sorted::Taken
    }

    /// The request whose turn it is.
    pub(crate) fn next(&mut self) -> Option<(SessionId, Box<FromAgent>)> {
        loop {
            let tenant = self.turns.pop_front()?;
            let queue = self.tenants.get_mut(&tenant)?;
            let request = queue.requests.pop_front();
            if queue.requests.is_empty() {
                self.tenants.remove(&tenant);
            } else {
                self.turns.push_back(tenant);
            }
            let (session, message) = request?;
            self.waiting = self.waiting.saturating_sub(1);
            match &message.message {
                Some(from_agent::Message::Join(join)) if !self.joins.remove(&(session, join.request)) => {}
                _ => return Some((session, message)),
            }
        }
    }
}

/// Whose request a message is.
fn tenant_of(message: &from_agent::Message) -> Option<&str> {
    use from_agent::Message;
    match message {
        Message::Join(join) => Some(&join.tenant),
        Message::ReadEvents(asked) => Some(&asked.tenant),
        Message::Negotiate(asked) => Some(&asked.tenant),
        Message::BeginIteration(asked) => Some(&asked.tenant),
        Message::Hint(asked) => Some(&asked.tenant),
        Message::AwaitOrder(asked) => Some(&asked.tenant),
        Message::SetBid(asked) => Some(&asked.tenant),
        _ => None,
    }
}

/// What a tenant whose request is refused is answered.
fn refusal(message: from_agent::Message, why: RequestRefusal) -> Option<to_agent::Message> {
    use from_agent::Message;
    let refused = why.to_string();
    Some(match message {
        Message::Join(join) => to_agent::Message::JoinRefused(v1::JoinRefused {
            request: join.request,
            kind: JoinRefusedKind::Limit.into(),
            text: refused,
            ranks: Vec::new(),
        }),
        Message::ReadEvents(v1::ReadEvents { request, .. }) => {
            to_agent::Message::EventsRead(v1::EventsRead { request, refused, ..Default::default() })
        }
        Message::Negotiate(v1::Negotiate { request, .. }) => {
            to_agent::Message::Negotiated(v1::Negotiated { request, refused, ..Default::default() })
        }
        Message::BeginIteration(v1::BeginIteration { request, .. }) => {
            to_agent::Message::IterationChoice(v1::IterationChoice { request, refused, ..Default::default() })
        }
        Message::Hint(v1::Hint { request, .. }) => {
            to_agent::Message::Hinted(v1::Hinted::answer(request, Err(refused.into())))
        }
        Message::AwaitOrder(v1::AwaitOrder { request, .. }) => {
            to_agent::Message::RunnerOrder(v1::RunnerOrder::answer(request, Err(refused)))
        }
        Message::SetBid(v1::SetBid { request, .. }) => {
            to_agent::Message::BidSet(v1::BidSet::answer(request, Err(refused)))
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SESSION: SessionId = SessionId(1);

    fn join(tenant: &str, request: u64) -> Box<FromAgent> {
        let join = v1::Join { request, tenant: tenant.to_owned(), ..v1::Join::default() };
        Box::new(from_agent::Message::Join(join).into())
    }

    fn withdraw(request: u64) -> Box<FromAgent> {
        Box::new(from_agent::Message::Leave(v1::Leave { request, ..v1::Leave::default() }).into())
    }

    fn answer(sorted: Sorted) -> to_agent::Message {
        match sorted {
            Sorted::Refused(answer) => *answer,
            other => panic!("not refused: {other:?}"),
        }
    }

    fn served(requests: &mut Requests) -> Vec<u64> {
        std::iter::from_fn(|| requests.next())
            .filter_map(|(_, message)| match message.message {
                Some(from_agent::Message::Join(join)) => Some(join.request),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn tenants_are_served_in_turn() {
        let mut requests = Requests::default();
        for (tenant, request) in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6)] {
            assert!(matches!(requests.sort(SESSION, join(tenant, request)), Sorted::Taken));
        }
        assert_eq!(served(&mut requests), [1, 4, 5, 2, 6, 3]);
        assert!(requests.is_empty() && requests.tenants.is_empty() && requests.joins.is_empty());
    }

    #[test]
    fn a_withdrawn_join_is_never_served() {
        let mut requests = Requests::default();
        for request in 1..=3 {
            requests.sort(SESSION, join("a", request));
        }
        assert!(matches!(requests.sort(SESSION, withdraw(2)), Sorted::Taken));
        assert!(matches!(requests.sort(SessionId(2), withdraw(1)), Sorted::Now(_)), "another session's");
        assert_eq!(served(&mut requests), [1, 3]);
        assert!(matches!(requests.sort(SESSION, withdraw(1)), Sorted::Now(_)), "the state has it");
    }

    #[test]
    fn a_join_of_a_waiting_number_makes_no_queue() {
        let mut requests = Requests::default();
        requests.sort(SESSION, join("a", 1));
        for invented in 0..100 {
            let again = requests.sort(SESSION, join(&format!("invented{invented}"), 1));
            assert!(matches!(again, Sorted::Now(_)), "{again:?}");
        }
        assert_eq!(requests.tenants.keys().collect::<Vec<_>>(), ["a"]);
        assert_eq!(served(&mut requests), [1]);
        assert!(requests.is_empty() && requests.tenants.is_empty() && requests.joins.is_empty());
    }

    #[test]
    fn a_full_queue_refuses_its_tenant_alone() {
        let mut requests = Requests::default();
        for request in 0..MAX_WAITING as u64 {
            assert!(matches!(requests.sort(SESSION, join("a", request)), Sorted::Taken));
        }
        let to_agent::Message::JoinRefused(refused) = answer(requests.sort(SESSION, join("a", u64::MAX)))
        else {
            panic!("not refused");
        };
        assert_eq!((refused.request, refused.kind()), (u64::MAX, JoinRefusedKind::Limit));
        let (waits, most) = (MAX_WAITING, MAX_WAITING);
        let why = RequestRefusal::TooManyRequests { waits, most, of_all: false }.to_string();
        assert_eq!(refused.text, why);
        assert_eq!(
            refused.text,
            "16384 requests of this tenant wait for the provider, and 16384 may; ask again once some are answered"
        );
        let events = from_agent::Message::ReadEvents(v1::ReadEvents {
            request: 7,
            tenant: "a".to_owned(),
            ..v1::ReadEvents::default()
        });
        let answer_to_events = answer(requests.sort(SESSION, Box::new(events.into())));
        let to_agent::Message::EventsRead(refused) = answer_to_events else { panic!("not refused") };
        assert_eq!((refused.request, refused.refused), (7, why));
        assert!(matches!(requests.sort(SESSION, join("b", u64::MAX)), Sorted::Taken));
    }

    #[test]
    fn all_tenants_together_have_a_limit() {
        let mut requests = Requests::default();
        for request in 0..MAX_WAITING_ALL as u64 {
            requests.sort(SESSION, join(&(request % 100).to_string(), request));
        }
        let to_agent::Message::JoinRefused(refused) = answer(requests.sort(SESSION, join("new", u64::MAX)))
        else {
            panic!("not refused");
        };
        let (waits, most) = (MAX_WAITING_ALL, MAX_WAITING_ALL);
        let why = RequestRefusal::TooManyRequests { waits, most, of_all: true };
        assert_eq!(refused.text, why.to_string());
        assert!(!requests.tenants.contains_key("new"), "no queue is made for whom it refuses");
    }
}
