//! What the agent and control have agreed on. With it a new session can go on where the last one ended.

use super::{ControlAnswer, Event, Settings};
use harmonaize_abi::{CommunicatorId, Epoch, GrantId};
use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::{self, from_agent, to_agent};
use harmonaize_disclose::{JoinFailure, disclose_join};
use prost::Message;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::time::Instant;

/// Open joins and running communicators.
pub(super) struct Ledger {
    host: String,
    listen: String,
    join_timeout: Duration,
    abilities: v1::Capabilities,
    /// Of an aggregator: what it is, but for what it serves.
    aggregator: Option<v1::Aggregator>,
    /// What it serves.
    granted: BTreeSet<GrantId>,
    /// Since when control is away; none while it is there.
    disconnected_since: Option<Instant>,
    /// By request, and since when.
    joins: BTreeMap<u64, (v1::Join, Instant)>,
    /// While control is away: when each join has waited too long, the earliest first.
    ends: BTreeSet<(Instant, u64)>,
    running: BTreeMap<CommunicatorId, Running>,
    ended: BTreeMap<CommunicatorId, Ended>,
}

/// A communicator that has ended.
struct Ended {
    /// Without secrets; its local ranks are those whose processes are here still.
    recipe: v1::Recipe,
    /// How it failed, as control was told. It may have gone before it heard that, so it is told in each new session.
    failed: Option<v1::Failed>,
}

/// Most communicators that have ended and are remembered; the oldest is forgotten.
const MAX_ENDED: usize = 1024;

/// A communicator of this agent.
struct Running {
    /// Of the epoch in use, without secrets.
    recipe: v1::Recipe,
    /// Whether its first epoch may have been used.
    ready: bool,
    /// Of an epoch under way.
    change: Option<v1::Recipe>,
    /// What was said of epochs while control was away.
    epochs: Vec<from_agent::Message>,
    /// To be said again in a new session.
    leaves: Vec<v1::Leave>,
    /// By rank: the budget that it wanted last, likewise.
    budgets: BTreeMap<u32, v1::SetBudget>,
    /// The last word about it, while control has not heard it.
    unsent: Option<from_agent::Message>,
}

/// Whether a communicator that is over failed.
enum Failure {
    None,
    /// Control said so.
    ByControl,
    /// Control was told so.
    Told(v1::Failed),
}

impl Failure {
    fn of(last: &from_agent::Message) -> Self {
        match last {
            from_agent::Message::Failed(failed) => Self::Told(failed.clone()),
            _ => Self::None,
        }
    }
}

/// A ledger as it is handed over; messages are encoded.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct LedgerImage {
    running: Vec<RunningImage>,
    ended: Vec<Vec<u8>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct RunningImage {
    recipe: Vec<u8>,
    ready: bool,
    change: Option<Vec<u8>>,
    epochs: Vec<Vec<u8>>,
    leaves: Vec<Vec<u8>>,
    budgets: Vec<Vec<u8>>,
    unsent: Option<Vec<u8>>,
}

impl LedgerImage {
    /// Recipes of epochs under way, without secrets.
    ///
    /// # Errors
    /// If one is none.
    pub fn changes(&self) -> Result<Vec<v1::Recipe>, prost::DecodeError> {
        let changes = self.running.iter().filter_map(|running| running.change.as_deref());
        changes.map(v1::Recipe::decode).collect()
    }
}

impl Ledger {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            host: settings.host.clone(),
            listen: settings.listen.to_string(),
            join_timeout: settings.join_timeout,
            abilities: settings.abilities.clone(),
            aggregator: settings.aggregator.clone(),
            granted: BTreeSet::new(),
            disconnected_since: Some(Instant::now()),
            joins: BTreeMap::new(),
            ends: BTreeSet::new(),
            running: BTreeMap::new(),
            ended: BTreeMap::new(),
        }
    }

    /// What another process's session needs to go on with. No join is open.
    pub(super) fn image(&self) -> LedgerImage {
        let message = |message: &from_agent::Message| v1::FromAgent::from(message.clone()).encode_to_vec();
        let running = |running: &Running| RunningImage {
            recipe: running.recipe.encode_to_vec(),
            ready: running.ready,
            change: running.change.as_ref().map(Message::encode_to_vec),
            epochs: running.epochs.iter().map(message).collect(),
            leaves: running.leaves.iter().map(Message::encode_to_vec).collect(),
            budgets: running.budgets.values().map(Message::encode_to_vec).collect(),
            unsent: running.unsent.as_ref().map(message),
        };
        LedgerImage {
            running: self.running.values().map(running).collect(),
            ended: self.ended.values().map(|ended| ended.recipe.encode_to_vec()).collect(),
        }
    }

    /// Goes on with another process's.
    ///
    /// # Errors
    /// If it is none.
    pub(super) fn inherit(&mut self, image: LedgerImage) -> Result<(), prost::DecodeError> {
        let message = |bytes: &Vec<u8>| Ok(v1::FromAgent::decode(bytes.as_slice())?.message);
        for image in image.running {
            let recipe = v1::Recipe::decode(image.recipe.as_slice())?;
            let epochs: Result<Vec<_>, prost::DecodeError> = image.epochs.iter().map(message).collect();
            let leaves = image.leaves.iter().map(|leave| v1::Leave::decode(leave.as_slice()));
            let budgets = image.budgets.iter().map(|budget| {
                let budget = v1::SetBudget::decode(budget.as_slice())?;
                Ok::<_, prost::DecodeError>((budget.rank, budget))
            });
            let running = Running {
                ready: image.ready,
                change: image.change.map(|change| v1::Recipe::decode(change.as_slice())).transpose()?,
                epochs: epochs?.into_iter().flatten().collect(),
                leaves: leaves.collect::<Result<_, _>>()?,
                budgets: budgets.collect::<Result<_, _>>()?,
                unsent: image.unsent.as_ref().map(message).transpose()?.flatten(),
                recipe,
            };
            self.running.insert(CommunicatorId(running.recipe.communicator), running);
        }
        for recipe in image.ended {
            let recipe = v1::Recipe::decode(recipe.as_slice())?;
            self.ended.insert(CommunicatorId(recipe.communicator), Ended { recipe, failed: None });
        }
        Ok(())
    }

    /// Whether a join waits for control.
    pub(super) fn has_joins(&self) -> bool {
        !self.joins.is_empty()
    }

    /// The first message of a session.
    pub(super) fn hello(&self) -> from_agent::Message {
        from_agent::Message::Hello(v1::Hello {
            protocol_version: PROTOCOL_VERSION,
            host: self.host.clone(),
            listen: self.listen.clone(),
            build: harmonaize_program::version().to_owned(),
            running: self.running.values().map(|running| running.recipe.clone()).collect(),
            ended: self.ended.values().map(|ended| ended.recipe.clone()).collect(),
            capabilities: Some(self.abilities.clone()),
            aggregator: self.aggregator.as_ref().map(|aggregator| v1::Aggregator {
                granted: self.granted.iter().map(|grant| grant.0).collect(),
                ..aggregator.clone()
            }),
        })
    }

    /// Opens the session: returns what must be said again.
    pub(super) fn connected(&mut self) -> Vec<from_agent::Message> {
        self.disconnected_since = None;
        self.ends.clear();
        let failed = self.ended.values().filter_map(|ended| ended.failed.clone());
        let mut messages: Vec<_> = failed.map(from_agent::Message::Failed).collect();
        for running in self.running.values_mut() {
            messages.append(&mut running.epochs);
            messages.extend(running.budgets.values().cloned().map(from_agent::Message::SetBudget));
            messages.extend(running.leaves.iter().map(|leave| from_agent::Message::Leave(*leave)));
            messages.extend(running.unsent.clone());
        }
        let over = self.running.iter().filter_map(|(id, running)| Some((*id, running.unsent.clone()?)));
        for (id, last) in over.collect::<Vec<_>>() {
            self.over(id, Failure::of(&last));
        }
        messages.extend(self.joins.values().map(|(join, _)| from_agent::Message::Join(join.clone())));
        messages
    }

    /// A communicator is over; its processes may go on if it failed. Whether it was there.
    fn over(&mut self, id: CommunicatorId, failure: Failure) -> bool {
        let Some(Running { mut recipe, leaves: left, ready, .. }) = self.running.remove(&id) else {
            return false;
        };
        recipe.local_ranks.retain(|local| left.iter().all(|leave| leave.rank != local.rank));
        let failed = match failure {
            Failure::None => return true,
            Failure::ByControl => None,
            Failure::Told(failed) => Some(failed),
        };
        if ready && !recipe.local_ranks.is_empty() {
            if self.ended.len() >= MAX_ENDED {
                self.ended.pop_first();
            }
            self.ended.insert(id, Ended { recipe, failed });
        }
        true
    }

    pub(super) fn disconnected(&mut self, now: Instant) {
        if self.disconnected_since.is_none() {
            self.disconnected_since = Some(now);
            let ends = self.joins.iter().map(|(request, (join, since))| {
                let end = self.join_deadline(now, join, *since);
                (end, *request)
            });
            self.ends = ends.collect();
        }
    }

    /// A join waits for control from now on.
    fn open_join(&mut self, now: Instant, join: v1::Join) {
        let request = join.request;
        self.close_join(request);
        if let Some(away) = self.disconnected_since {
            let end = self.join_deadline(away, &join, now);
            self.ends.insert((end, request));
        }
        self.joins.insert(request, (join, now));
    }

    /// A join waits no longer. Returns it, if it did.
    fn close_join(&mut self, request: u64) -> Option<v1::Join> {
        let (join, since) = self.joins.remove(&request)?;
        if let Some(away) = self.disconnected_since {
            let end = self.join_deadline(away, &join, since);
            self.ends.remove(&(end, request));
        }
        Some(join)
    }

    /// Notes a message of the agent's. Returns the message if it goes to a control that is there.
    pub(super) fn outgoing(
        &mut self,
        now: Instant,
        message: from_agent::Message,
    ) -> Option<from_agent::Message> {
        use from_agent::Message;
        match &message {
            Message::Hello(_) => return None,
            Message::Join(join) => self.open_join(now, join.clone()),
            Message::Leave(leave) if leave.communicator == 0 => drop(self.close_join(leave.request)),
            Message::Leave(leave) => {
                let id = CommunicatorId(leave.communicator);
                if let Some(running) = self.running.get_mut(&id) {
                    running.leaves.push(*leave);
                }
                if let Some(ended) = self.ended.get_mut(&id) {
                    ended.recipe.local_ranks.retain(|local| local.rank != leave.rank);
                    if ended.recipe.local_ranks.is_empty() {
                        self.ended.remove(&id);
                    }
                }
            }
            Message::SetBudget(wanted) => {
                if let Some(running) = self.running.get_mut(&CommunicatorId(wanted.communicator)) {
                    running.budgets.insert(wanted.rank, wanted.clone());
                }
            }
            Message::Switched(switched) => {
                if let Some(running) = self.running.get_mut(&CommunicatorId(switched.communicator))
                    && let Some(change) = running.change.take_if(|change| change.epoch == switched.epoch)
                {
                    let links = running.recipe.links;
                    running.recipe = v1::Recipe { links, ..change };
                }
                self.keep(CommunicatorId(switched.communicator), &message);
            }
            Message::Prepared(v1::Prepared { communicator, links, .. }) => {
                let id = CommunicatorId(*communicator);
                if let Some(running) = self.running.get_mut(&id) {
                    running.recipe.links = *links;
                }
                self.keep(id, &message);
            }
            Message::PrepareFailed(v1::PrepareFailed { communicator, .. }) => {
                self.keep(CommunicatorId(*communicator), &message);
            }
            Message::Closed(v1::Closed { communicator })
            | Message::Failed(v1::Failed { communicator, .. }) => {
                let id = CommunicatorId(*communicator);
                if self.disconnected_since.is_none() {
                    self.over(id, Failure::of(&message));
                } else if let Some(running) = self.running.get_mut(&id) {
                    running.unsent = Some(message.clone());
                }
            }
            Message::AggregationGranted(answer) if answer.refused.is_empty() => {
                self.granted.insert(GrantId(answer.communicator));
            }
            Message::AggregationGranted(_)
            | Message::Aggregator(_)
            | Message::ReadEvents(_)
            | Message::Negotiate(_)
            | Message::BeginIteration(_)
            | Message::Hint(_)
            | Message::Report(_)
            | Message::Telemetry(_)
            | Message::CongestionReport(_)
            | Message::PathsTraced(_)
            | Message::PathProbed(_)
            | Message::RequestSlot(_)
            | Message::ReleaseSlot(_)
            | Message::TenantsServed(_)
            | Message::CancelRead(_)
            | Message::AwaitOrder(_)
            | Message::SetBid(_)
            | Message::CancelOrder(_)
            | Message::LinksOverTcp(_) => {}
        }
        self.disconnected_since.is_none().then_some(message)
    }

    /// Keeps what was said of an epoch, for a control that is away.
    fn keep(&mut self, communicator: CommunicatorId, message: &from_agent::Message) {
        let running = self.running.get_mut(&communicator).filter(|_| self.disconnected_since.is_some());
        if let Some(running) = running {
            running.epochs.push(message.clone());
        }
    }

    /// Takes note of what control says; none where it concerns nothing that the agent still has.
    pub(super) fn incoming(&mut self, message: to_agent::Message) -> Option<Event> {
        use to_agent::Message;
        match message {
            Message::Welcome(_) | Message::Refused(_) => None,
            Message::Form(recipe) => {
                for local in &recipe.local_ranks {
                    self.close_join(local.request);
                }
                let (recipe_in_use, budgets) = (stripped(&recipe), BTreeMap::new());
                let (change, left, last) = (None, Vec::new(), None);
                let running = Running {
                    recipe: recipe_in_use,
                    ready: false,
                    change,
                    epochs: Vec::new(),
                    leaves: left,
                    budgets,
                    unsent: last,
                };
                self.running.insert(CommunicatorId(recipe.communicator), running);
                Some(Event::Form(recipe))
            }
            Message::Change(recipe) => {
                self.running.get_mut(&CommunicatorId(recipe.communicator))?.change = Some(stripped(&recipe));
                Some(Event::Change(recipe))
            }
            Message::Ready(v1::Ready { communicator, epoch }) => {
                let (communicator, epoch) = (CommunicatorId(communicator), Epoch::from_wire(epoch).ok()?);
                if let Some(running) = self.running.get_mut(&communicator) {
                    running.ready = true;
                }
                Some(Event::Ready { communicator, epoch })
            }
            Message::Abandon(abandon) => {
                let running = self.running.get_mut(&CommunicatorId(abandon.communicator))?;
                running.change.take_if(|change| change.epoch == abandon.epoch);
                Some(Event::Abandon(abandon))
            }
            Message::JoinRefused(refused) => {
                self.close_join(refused.request)?;
                Some(Event::JoinRefused(refused))
            }
            Message::Dissolve(dissolved) => {
                let id = CommunicatorId(dissolved.communicator);
                self.over(id, Failure::ByControl).then_some(Event::Dissolve(dissolved))
            }
            // Answered beside the session.
            Message::Question(_) => None,
            Message::ReportRequest(request) => Some(Event::ReportRequest { id: request.id }),
            Message::TracePaths(asked) => Some(Event::TracePaths(asked)),
            Message::ProbePath(asked) => Some(Event::ProbePath(asked)),
            Message::Interleaving(turns) => Some(Event::Turns(turns)),
            Message::GrantSlot(given) => Some(Event::TurnGiven(given)),
            Message::ServeTenants(told) => Some(Event::ServeTenants(told.tenants)),
            Message::EventsRead(answer) => Some(Event::Answered(ControlAnswer::Events(answer))),
            Message::Negotiated(answer) => Some(Event::Answered(ControlAnswer::Negotiated(answer))),
            Message::IterationChoice(answer) => Some(Event::Answered(ControlAnswer::Iteration(answer))),
            Message::Hinted(answer) => Some(Event::Answered(ControlAnswer::Hinted(answer))),
            Message::RunnerOrder(answer) => Some(Event::Answered(ControlAnswer::Runner(answer))),
            Message::BidSet(answer) => Some(Event::Answered(ControlAnswer::Bid(answer))),
            Message::GrantAggregation(grant) => Some(Event::GrantAggregation(grant)),
            Message::RevokeAggregation(v1::RevokeAggregation { communicator }) => {
                let grant = GrantId(communicator);
                self.granted.remove(&grant);
                Some(Event::RevokeAggregation(grant))
            }
        }
    }

    /// When the next join has waited too long for a control that is away.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.ends.first().map(|(end, _)| *end)
    }

    /// When a join has waited too long: for a control that is away, or longer than its tenant wants.
    fn join_deadline(&self, away: Instant, join: &v1::Join, since: Instant) -> Instant {
        let latest = away.max(since) + self.join_timeout;
        let own = (join.timeout_ns > 0).then(|| since.checked_add(Duration::from_nanos(join.timeout_ns)));
        own.flatten().map_or(latest, |own| own.min(latest))
    }

    /// Refuses joins that have waited too long, in the order of their numbers.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<Event> {
        let late = self.ends.iter().take_while(|(end, _)| *end <= now);
        let late: BTreeSet<u64> = late.map(|(_, request)| *request).collect();
        let text = disclose_join(&JoinFailure::Unavailable { detail: String::new() }).text;
        for request in &late {
            self.close_join(*request);
        }
        let kind = v1::JoinRefusedKind::Unavailable.into();
        let refused = |request| v1::JoinRefused { request, kind, text: text.clone(), ranks: Vec::new() };
        late.into_iter().map(|request| Event::JoinRefused(refused(request))).collect()
    }
}

/// A recipe as Hello repeats it.
fn stripped(recipe: &v1::Recipe) -> v1::Recipe {
    let aggregation = recipe.aggregation.clone().map(|told| v1::Aggregation { key: Vec::new(), ..told });
    v1::Recipe { peers: Vec::new(), aggregation, ..recipe.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use from_agent::Message;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn ledger() -> Ledger {
        let mut settings = Settings::new(
            vec!["127.0.0.1:1".to_owned()],
            harmonaize_identity::Protection::InsecureLoopback,
            "h0".to_owned(),
            ([127, 0, 0, 1], 1).into(),
        );
        settings.join_timeout = PATIENCE;
        Ledger::new(&settings)
    }

    fn join(request: u64) -> Message {
        let (tenant, communicator) = ("a".to_owned(), "world".to_owned());
        Message::Join(v1::Join { request, tenant, communicator, rank: 0, ranks: 2, ..v1::Join::default() })
    }

    fn recipe(communicator: u64, epoch: u64) -> v1::Recipe {
        let local = vec![v1::LocalRank { rank: 0, request: 7 }];
        let peers = vec![v1::Peer { secret: vec![1; 32], ..v1::Peer::default() }];
        let aggregation = Some(v1::Aggregation { key: vec![1; 32], ..v1::Aggregation::default() });
        v1::Recipe { communicator, epoch, local_ranks: local, peers, aggregation, ..v1::Recipe::default() }
    }

    fn running(ledger: &Ledger) -> Vec<(u64, u64)> {
        let Message::Hello(hello) = ledger.hello() else { panic!("no Hello") };
        let bare = |recipe: &v1::Recipe| {
            recipe.peers.is_empty() && recipe.aggregation.as_ref().is_some_and(|told| told.key.is_empty())
        };
        assert!(hello.running.iter().all(bare), "secrets stay here");
        hello.running.iter().map(|recipe| (recipe.communicator, recipe.epoch)).collect()
    }

    #[test]
    fn open_joins_are_resent() {
        let (mut ledger, now) = (ledger(), Instant::now());
        assert_eq!(ledger.outgoing(now, join(7)), None);
        assert_eq!(ledger.outgoing(now, join(8)), None);
        assert_eq!(
            ledger.outgoing(now, Message::Leave(v1::Leave { request: 8, ..v1::Leave::default() })),
            None
        );
        assert_eq!(ledger.connected(), [join(7)]);
        assert_eq!(ledger.outgoing(now, join(9)), Some(join(9)));
        assert!(ledger.incoming(to_agent::Message::Form(recipe(1, 1))).is_some());
        ledger.disconnected(now);
        assert_eq!(ledger.connected(), [join(9)]);
    }

    #[test]
    fn an_aggregator_says_what_it_serves() {
        let (mut ledger, now) = (ledger(), Instant::now());
        let granted = |ledger: &Ledger| {
            let Message::Hello(hello) = ledger.hello() else { panic!("no Hello") };
            hello.aggregator.map(|aggregator| aggregator.granted)
        };
        let answer = |communicator, refused: &str| {
            let refused = refused.to_owned();
            Message::AggregationGranted(v1::AggregationGranted { communicator, refused })
        };
        assert_eq!(granted(&ledger), None, "a host's agent is none");
        ledger.aggregator = Some(v1::Aggregator { units: 4, ..v1::Aggregator::default() });
        ledger.connected();
        for (communicator, refused) in [(1, ""), (2, "no room"), (3, "")] {
            let grant = v1::GrantAggregation { communicator, ..v1::GrantAggregation::default() };
            ledger.incoming(to_agent::Message::GrantAggregation(grant)).unwrap();
            ledger.outgoing(now, answer(communicator, refused)).unwrap();
        }
        assert_eq!(granted(&ledger), Some(vec![1, 3]));
        ledger.disconnected(now);
        let revoked = v1::RevokeAggregation { communicator: 1 };
        let event = ledger.incoming(to_agent::Message::RevokeAggregation(revoked));
        assert_eq!(event, Some(Event::RevokeAggregation(GrantId(1))));
        assert_eq!(granted(&ledger), Some(vec![3]));
    }

    #[test]
    fn joins_do_not_wait_for_ever() {
        let (mut ledger, start) = (ledger(), Instant::now());
        ledger.connected();
        ledger.outgoing(start, join(7));
        assert_eq!(ledger.deadline(), None);
        let away = start + Duration::from_secs(100);
        ledger.disconnected(away);
        ledger.outgoing(away + Duration::from_secs(1), join(8));
        assert_eq!(ledger.deadline(), Some(away + PATIENCE));
        let refused = ledger.expire(away + PATIENCE);
        let [Event::JoinRefused(refused)] = refused.as_slice() else { panic!("{refused:?}") };
        assert_eq!((refused.request, refused.kind()), (7, v1::JoinRefusedKind::Unavailable));
        // Nor longer than their tenants want.
        let Message::Join(hasty) = join(9) else { panic!("no join") };
        let hasty = v1::Join { timeout_ns: 1_000_000_000, ..hasty };
        let asked = away + PATIENCE;
        ledger.outgoing(asked, Message::Join(hasty));
        assert_eq!(ledger.deadline(), Some(asked + Duration::from_secs(1)));
        assert_eq!(ledger.expire(asked + Duration::from_secs(1)).len(), 2, "and the one before");
        ledger.outgoing(asked, join(8));
        assert_eq!(ledger.connected(), [join(8)]);
    }

    #[test]
    fn joins_that_wait_no_longer_are_not_due() {
        let (mut ledger, start, second) = (ledger(), Instant::now(), Duration::from_secs(1));
        let leave = |request| Message::Leave(v1::Leave { request, ..v1::Leave::default() });
        ledger.connected();
        for request in [6, 7, 8] {
            ledger.outgoing(start, join(request));
        }
        ledger.disconnected(start);
        ledger.disconnected(start + second);
        ledger.outgoing(start + second, join(5));
        ledger.outgoing(start, leave(6));
        assert_eq!(ledger.deadline(), Some(start + PATIENCE));
        ledger.outgoing(start, leave(7));
        ledger.outgoing(start + second * 2, join(8));
        assert_eq!(ledger.deadline(), Some(start + second + PATIENCE));
        assert!(ledger.expire(start + PATIENCE).is_empty());
        ledger.outgoing(start + second, join(9));
        ledger.outgoing(start + second * 3, join(4));
        let refused = |events: Vec<Event>| -> Vec<u64> {
            let request = |event: Event| match event {
                Event::JoinRefused(refused) => refused.request,
                other => panic!("{other:?}"),
            };
            events.into_iter().map(request).collect()
        };
        assert_eq!(refused(ledger.expire(start + second * 2 + PATIENCE)), [5, 8, 9], "4 waits on");
        assert_eq!(ledger.deadline(), Some(start + second * 3 + PATIENCE));
        ledger.connected();
        assert_eq!((ledger.deadline(), ledger.expire(start + second * 9 + PATIENCE)), (None, vec![]));
    }

    #[test]
    fn communicators_outlive_sessions() {
        let (mut ledger, now) = (ledger(), Instant::now());
        ledger.connected();
        for id in [1, 2, 3] {
            ledger.incoming(to_agent::Message::Form(recipe(id, 1)));
        }
        ledger.incoming(to_agent::Message::Change(recipe(2, 2)));
        assert_eq!(running(&ledger), [(1, 1), (2, 1), (3, 1)]);
        ledger.outgoing(now, Message::Switched(v1::Switched { communicator: 2, epoch: 2, first_segment: 0 }));
        assert_eq!(running(&ledger), [(1, 1), (2, 2), (3, 1)]);
        let closed = |communicator| Message::Closed(v1::Closed { communicator });
        assert_eq!(ledger.outgoing(now, closed(1)), Some(closed(1)));
        ledger.disconnected(now);
        let leave = Message::Leave(v1::Leave { communicator: 2, rank: 0, request: 0 });
        assert_eq!(ledger.outgoing(now, leave.clone()), None);
        assert_eq!(ledger.outgoing(now, closed(3)), None);
        assert_eq!(running(&ledger), [(2, 2), (3, 1)]);
        assert_eq!(ledger.connected(), [leave.clone(), closed(3)]);
        assert_eq!(running(&ledger), [(2, 2)]);
        let want = Message::SetBudget(v1::SetBudget { communicator: 2, rank: 0, budget: None });
        assert_eq!(ledger.outgoing(now, want.clone()), Some(want.clone()));
        ledger.disconnected(now);
        assert_eq!(ledger.connected(), [want, leave]);
        let dissolved = |communicator| v1::Dissolved { communicator, ..v1::Dissolved::default() };
        assert_eq!(ledger.incoming(to_agent::Message::Dissolve(dissolved(3))), None);
        assert!(ledger.incoming(to_agent::Message::Dissolve(dissolved(2))).is_some());
        assert!(running(&ledger).is_empty());
    }

    #[test]
    fn an_image_has_the_epochs_under_way() {
        let mut ledger = ledger();
        (1..=3).for_each(|id| drop(ledger.incoming(to_agent::Message::Form(recipe(id, 1)))));
        ledger.incoming(to_agent::Message::Change(v1::Recipe { over_tcp: vec![1], ..recipe(2, 2) }));
        ledger.incoming(to_agent::Message::Change(recipe(3, 2)));
        let abandon = v1::Abandon { communicator: 3, epoch: 2, ..v1::Abandon::default() };
        ledger.incoming(to_agent::Message::Abandon(abandon));
        let changes = ledger.image().changes().unwrap();
        let told: Vec<_> =
            changes.iter().map(|of| (of.communicator, of.epoch, of.over_tcp.as_slice())).collect();
        assert_eq!(told, [(2, 2, &[1][..])]);
    }

    #[test]
    fn control_hears_of_epochs_what_it_missed() {
        let (mut ledger, now) = (ledger(), Instant::now());
        ledger.connected();
        ledger.incoming(to_agent::Message::Form(recipe(1, 1)));
        ledger.incoming(to_agent::Message::Change(recipe(1, 2)));
        let links = Some(v1::LinkUsage { descriptors: 3, landing_bytes: 4096 });
        let prepared = Message::Prepared(v1::Prepared { communicator: 1, epoch: 2, links });
        let switched = Message::Switched(v1::Switched { communicator: 1, epoch: 2, first_segment: 0 });
        ledger.disconnected(now);
        assert_eq!(ledger.outgoing(now, prepared.clone()), None);
        // Its Hello is on the way, and says that the epoch before is in use.
        assert_eq!(running(&ledger), [(1, 1)]);
        assert_eq!(ledger.outgoing(now, switched.clone()), None);
        assert_eq!(ledger.connected(), [prepared, switched]);
        ledger.disconnected(now);
        assert_eq!((running(&ledger), ledger.connected()), (vec![(1, 2)], vec![]));
        let Message::Hello(hello) = ledger.hello() else { panic!("no Hello") };
        assert_eq!(hello.running[0].links, links, "what it takes outlives the epoch and control");
    }

    /// A communicator of ranks 0 and 1 that may have been used.
    fn used(ledger: &mut Ledger, id: u64) {
        let local = [0, 1].map(|rank| v1::LocalRank { rank, request: 7 }).to_vec();
        ledger.incoming(to_agent::Message::Form(v1::Recipe { local_ranks: local, ..recipe(id, 1) }));
        ledger.incoming(to_agent::Message::Ready(v1::Ready { communicator: id, epoch: 1 }));
    }

    #[test]
    fn whose_communicator_has_ended_is_named_until_it_leaves() {
        let (mut ledger, now) = (ledger(), Instant::now());
        let ended = |ledger: &Ledger| -> Vec<(u64, Vec<u32>)> {
            let Message::Hello(hello) = ledger.hello() else { panic!("no Hello") };
            assert!(hello.ended.iter().all(|recipe| recipe.peers.is_empty()), "secrets stay here");
            let local = |recipe: &v1::Recipe| recipe.local_ranks.iter().map(|local| local.rank).collect();
            hello.ended.iter().map(|recipe| (recipe.communicator, local(recipe))).collect()
        };
        let leave = |communicator, rank| Message::Leave(v1::Leave { communicator, rank, request: 0 });
        let failed = |communicator| Message::Failed(v1::Failed { communicator, ..v1::Failed::default() });
        ledger.connected();
        (1..=4).for_each(|id| used(&mut ledger, id));
        ledger.incoming(to_agent::Message::Form(recipe(5, 1)));
        ledger.outgoing(now, failed(1));
        ledger.outgoing(now, leave(2, 0));
        let dissolved = v1::Dissolved { communicator: 2, ..v1::Dissolved::default() };
        ledger.incoming(to_agent::Message::Dissolve(dissolved));
        ledger.outgoing(now, Message::Closed(v1::Closed { communicator: 3 }));
        assert_eq!(ended(&ledger), [(1, vec![0, 1]), (2, vec![1])]);
        // Nobody was ever in one whose first epoch was never ready.
        ledger.outgoing(now, failed(5));
        ledger.disconnected(now);
        ledger.outgoing(now, failed(4));
        ledger.outgoing(now, leave(1, 1));
        ledger.outgoing(now, leave(2, 1));
        assert_eq!((ended(&ledger), running(&ledger).len()), (vec![(1, vec![0])], 1));
        // Control hears last words first, and what is left of it with the next session.
        assert_eq!(ledger.connected(), [failed(1), failed(4)]);
        assert_eq!(ended(&ledger), [(1, vec![0]), (4, vec![0, 1])]);
        (10..10 + MAX_ENDED as u64).for_each(|id| {
            used(&mut ledger, id);
            ledger.outgoing(now, failed(id));
        });
        assert_eq!(ended(&ledger).len(), MAX_ENDED);
    }
}
