//! Agents that lose their session: what waits for them, what goes on, and when they are given up.

use super::world::{SECOND, World, hello, join_of, lost, running, settings};
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1::{self, FailureKind, JoinRefusedKind, Phase, from_agent, to_agent};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{ReorderError, SessionId};

/// How long an agent is waited for in these tests.
const LEASE: std::time::Duration = SECOND.saturating_mul(30);

/// Three hosts with a rank of `world` each, in use, and the agents' recipes.
struct Job {
    world: World,
    sessions: Vec<SessionId>,
    recipes: Vec<v1::Recipe>,
    id: u64,
}

impl Job {
    fn new() -> Self {
        let mut world = World::new(settings(4), 7);
        let sessions: Vec<SessionId> = (0..3).map(|host| world.agent(host)).collect();
        let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
        let id = recipes[0].communicator;
        world.prepare(&sessions, id, 1);
        Self { world, sessions, recipes, id }
    }

    /// A host's agent comes back with a recipe; what it hears beside its welcome.
    fn back(&mut self, host: usize, recipe: &v1::Recipe) -> Vec<to_agent::Message> {
        self.sessions[host] = self.world.hello(hello(host, running(recipe)));
        let mut heard = self.world.received(self.sessions[host]);
        assert!(matches!(heard.remove(0), to_agent::Message::Welcome(_)));
        heard
    }

    fn phase(&mut self) -> Phase {
        let status = self.world.status();
        self.world.got.clear();
        status.communicators[0].phase()
    }

    /// Begins a change to epoch 2; its recipes.
    fn change(&mut self) -> Vec<v1::Recipe> {
        assert_eq!(self.world.reorder(self.id, &["h2", "h1", "h0"]), Ok(2));
        self.world.recipes(&self.sessions)
    }

    fn prepared(&mut self, host: usize) {
        let prepared = v1::Prepared { communicator: self.id, epoch: 2, links: None };
        self.world.send(self.sessions[host], from_agent::Message::Prepared(prepared));
    }

    fn switched(&mut self, host: usize) {
        let switched = v1::Switched { communicator: self.id, epoch: 2, first_segment: 1 };
        self.world.send(self.sessions[host], from_agent::Message::Switched(switched));
    }

    /// The epochs in use and under way.
    fn epochs(&self) -> (u64, Option<u64>) {
        let view = self.world.state.communicator_view(CommunicatorId(self.id)).unwrap();
        (view.current.unwrap().epoch.into(), view.next.map(|next| next.epoch.into()))
    }

    fn ready(&self) -> Vec<to_agent::Message> {
        vec![to_agent::Message::Ready(v1::Ready { communicator: self.id, epoch: self.epochs().0 })]
    }

    fn is_over(&self) -> bool {
        self.world.state.communicator_ids().is_empty()
    }
}

fn ends(messages: Vec<to_agent::Message>) -> Vec<(FailureKind, Vec<u32>, String)> {
    let ends = every!(messages, Dissolve).into_iter();
    ends.map(|end| (end.kind(), end.ranks, end.reason)).collect()
}

#[test]
fn a_lost_session_ends_no_communicator() {
    let mut job = Job::new();
    job.world.gone(job.sessions[1]);
    job.world.wait(LEASE - SECOND * 2);
    assert!(job.world.got.is_empty(), "{:?}", job.world.got);
    assert_eq!(job.phase(), Phase::Recovering);
    let waits = ReorderError::NotRunning("not all agents have a session");
    assert_eq!(job.world.reorder(job.id, &["h2", "h1", "h0"]), Err(waits));
    let recipe = job.recipes[1].clone();
    assert_eq!(job.back(1, &recipe), job.ready());
    assert_eq!(job.phase(), Phase::Running);
    assert!(job.world.got.is_empty() && job.world.status().errors == 0);
    // It is what it was, and changes again.
    job.world.got.clear();
    let recipes = job.change();
    assert!(recipes.iter().all(|recipe| recipe.order == [2, 1, 0]));
    (0..3).for_each(|host| job.prepared(host));
    (0..3).for_each(|host| job.switched(host));
    assert_eq!(job.epochs(), (2, None));
}

#[test]
fn each_agent_has_a_lease_of_its_own() {
    let mut job = Job::new();
    job.world.gone(job.sessions[1]);
    job.world.wait(SECOND * 20);
    job.world.gone(job.sessions[2]);
    job.world.wait(SECOND * 10 - SECOND / 1000);
    assert!(!job.is_over());
    let recipe = job.recipes[1].clone();
    assert_eq!(job.back(1, &recipe), job.ready());
    job.world.wait(SECOND * 19);
    assert!(!job.is_over());
    job.world.wait(SECOND * 2);
    let detail = "agents did not come back within the lease".to_owned();
    for host in [0, 1] {
        let heard = job.world.received(job.sessions[host]);
        assert_eq!(ends(heard), [(FailureKind::RanksLost, vec![2], detail.clone())]);
    }
    // Who comes later is told the same.
    let recipe = job.recipes[2].clone();
    assert_eq!(ends(job.back(2, &recipe)), [(FailureKind::RanksLost, vec![2], detail)]);
    assert!(job.is_over() && job.world.ended.is_empty());
}

#[test]
fn peers_say_within_the_lease_who_is_lost() {
    let mut job = Job::new();
    job.world.gone(job.sessions[1]);
    job.world.gone(job.sessions[2]);
    job.world.send(job.sessions[0], from_agent::Message::Failed(lost(job.id, vec![1])));
    assert!(job.is_over());
    // Host 2 has its rank still, and may go on with it; host 1 has not.
    let recipe = job.recipes[2].clone();
    let told = (FailureKind::RanksLost, vec![1], "its links are down".to_owned());
    assert_eq!(ends(job.back(2, &recipe)), [told]);
    for (host, rank) in [(0, 0), (2, 2)] {
        let regroup = v1::Regroup { communicator: job.id, previous_rank: rank, key: rank, min_ranks: 1 };
        let join = v1::Join { request: 5, regroup: Some(regroup), ..join_of("a", "world", 0, 0) };
        job.world.send(job.sessions[host], from_agent::Message::Join(join));
    }
    assert_eq!(job.world.recipe(job.sessions[2]).previous_ranks, [1, 3]);
}

#[test]
fn members_of_an_ended_communicator_keep_their_lease() {
    let mut job = Job::new();
    job.world.send(job.sessions[0], from_agent::Message::Failed(lost(job.id, vec![1])));
    job.world.gone(job.sessions[2]);
    let regroup = |rank| {
        let regroup = v1::Regroup { communicator: job.id, previous_rank: rank, key: rank, min_ranks: 1 };
        v1::Join { request: 5, regroup: Some(regroup), ..join_of("a", "world", 0, 0) }
    };
    let joins = [regroup(0), regroup(2)];
    job.world.send(job.sessions[0], from_agent::Message::Join(joins[0].clone()));
    assert!(every!(job.world.received(job.sessions[0]), Form).is_empty(), "host 2 may come");
    let ended = running(&job.recipes[2]);
    job.sessions[2] = job.world.hello(v1::Hello { ended, ..hello(2, vec![]) });
    job.world.send(job.sessions[2], from_agent::Message::Join(joins[1].clone()));
    assert_eq!(every!(job.world.received(job.sessions[0]), Form)[0].participants.len(), 2);
}

/// Agents told control, which went before it heard: they say so again behind their Hello.
#[test]
fn who_was_lost_is_not_awaited_once_a_member_says_so() {
    let mut job = Job::new();
    job.sessions.clone().into_iter().for_each(|session| job.world.gone(session));
    for rank in [2, 0] {
        let (host, ended) = (rank as usize, running(&job.recipes[rank as usize]));
        job.sessions[host] = job.world.hello(v1::Hello { ended, ..hello(host, vec![]) });
        let regroup = v1::Regroup { communicator: job.id, previous_rank: rank, key: rank, min_ranks: 1 };
        let join = v1::Join { request: 5, regroup: Some(regroup), ..join_of("a", "world", 0, 0) };
        job.world.send(job.sessions[host], from_agent::Message::Join(join));
    }
    assert!(every!(job.world.received(job.sessions[0]), Form).is_empty(), "host 1 may come");
    // One that was no member cannot say so.
    let other = job.world.agent(3);
    job.world.send(other, from_agent::Message::Failed(lost(job.id, vec![1])));
    assert!(every!(job.world.received(job.sessions[0]), Form).is_empty());
    job.world.send(job.sessions[2], from_agent::Message::Failed(lost(job.id, vec![1])));
    assert_eq!(job.world.recipe(job.sessions[0]).previous_ranks, [1, 3]);
}

#[test]
fn who_comes_back_without_it_has_lost_its_ranks() {
    let mut job = Job::new();
    job.world.gone(job.sessions[1]);
    job.world.agent(1);
    let detail = "the agent on `h1` came back without it".to_owned();
    for host in [0, 2] {
        let heard = job.world.received(job.sessions[host]);
        assert_eq!(ends(heard), [(FailureKind::RanksLost, vec![1], detail.clone())]);
    }
    // Where all others have closed it, it closed it too.
    let mut job = Job::new();
    job.world.gone(job.sessions[1]);
    for host in [0, 2] {
        let closed = v1::Closed { communicator: job.id };
        job.world.send(job.sessions[host], from_agent::Message::Closed(closed));
    }
    assert!(!job.is_over());
    job.world.agent(1);
    assert!(job.is_over() && job.world.status().errors == 0);
}

#[test]
fn what_forms_ends_with_an_agents_session() {
    let mut world = World::new(settings(4), 7);
    let sessions: Vec<SessionId> = (0..2).map(|host| world.agent(host)).collect();
    let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
    world.gone(sessions[1]);
    let detail = "the session of an agent ended while it formed".to_owned();
    let told = [(FailureKind::RanksLost, vec![1], detail)];
    assert_eq!(ends(world.received(sessions[0])), told);
    let back = world.hello(hello(1, running(&recipes[1])));
    assert_eq!(ends(world.received(back)), told);
}

#[test]
fn an_epoch_comes_to_use_without_an_agents_word() {
    // All have prepared it, and host 1 has switched when it comes back.
    let mut job = Job::new();
    let recipes = job.change();
    (0..3).for_each(|host| job.prepared(host));
    job.world.gone(job.sessions[1]);
    [0, 2].into_iter().for_each(|host| job.switched(host));
    assert_eq!(job.epochs(), (1, Some(2)));
    job.back(1, &recipes[1]);
    assert_eq!((job.epochs(), job.phase()), ((2, None), Phase::Running));
    // It switches after that.
    let mut job = Job::new();
    job.change();
    (0..3).for_each(|host| job.prepared(host));
    job.world.gone(job.sessions[1]);
    [0, 2].into_iter().for_each(|host| job.switched(host));
    job.world.wait(SECOND * 20);
    let recipe = job.recipes[1].clone();
    job.back(1, &recipe);
    assert_eq!((job.epochs(), job.phase()), ((1, Some(2)), Phase::Changing));
    job.switched(1);
    assert_eq!((job.epochs(), job.phase()), ((2, None), Phase::Running));
    // That it has prepared was lost: the others would not have switched without.
    let mut job = Job::new();
    let recipes = job.change();
    [0, 2].into_iter().for_each(|host| job.prepared(host));
    job.world.gone(job.sessions[1]);
    [0, 2].into_iter().for_each(|host| job.switched(host));
    job.world.wait(SECOND * 20);
    assert_eq!(job.epochs(), (1, Some(2)));
    job.back(1, &recipes[1]);
    assert_eq!(job.epochs(), (2, None));
}

#[test]
fn an_unprepared_epoch_rests_while_an_agent_is_away() {
    let mut job = Job::new();
    job.change();
    [0, 2].into_iter().for_each(|host| job.prepared(host));
    job.world.gone(job.sessions[1]);
    job.world.wait(SECOND * 20);
    assert_eq!(job.epochs(), (1, Some(2)), "it may be in use");
    let recipe = job.recipes[1].clone();
    let heard = job.back(1, &recipe);
    assert_eq!(every!(heard, Abandon).len(), 1);
    assert_eq!(job.epochs(), (1, None));
    for host in [0, 2] {
        assert_eq!(only!(job.world.received(job.sessions[host]), Abandon).epoch, 2);
    }
    // One that another cannot prepare is given up at once.
    let mut job = Job::new();
    job.change();
    job.world.gone(job.sessions[1]);
    let (communicator, reason) = (job.id, "no".to_owned());
    let failed = v1::PrepareFailed { communicator, epoch: 2, reason };
    job.world.send(job.sessions[0], from_agent::Message::PrepareFailed(failed));
    assert_eq!(job.epochs(), (1, None));
    let recipe = job.recipes[1].clone();
    assert_eq!(job.back(1, &recipe), job.ready());
    // One that was given up and came to use after all is what runs.
    let mut job = Job::new();
    let recipes = job.change();
    job.world.wait(SECOND * 10);
    assert_eq!(job.epochs(), (1, None));
    job.world.gone(job.sessions[1]);
    job.back(1, &recipes[1]);
    assert_eq!(job.epochs(), (2, None));
}

#[test]
fn joins_wait_for_an_agent_that_is_away() {
    let mut job = Job::new();
    let join = join_of("a", "next", 1, 2);
    job.world.send(job.sessions[0], from_agent::Message::Join(join_of("a", "next", 0, 2)));
    job.world.gone(job.sessions[1]);
    job.world.wait(SECOND * 20);
    assert!(job.world.got.is_empty());
    let recipe = job.recipes[1].clone();
    job.back(1, &recipe);
    job.world.send(job.sessions[1], from_agent::Message::Join(join));
    assert_eq!(job.world.recipe(job.sessions[0]).participants.len(), 2);
    assert_eq!(job.world.recipe(job.sessions[1]).name, "next");
}

#[test]
fn a_name_is_taken_while_an_agent_tells_of_it() {
    let mut job = Job::new();
    let other = job.world.agent(3);
    job.world.gone(job.sessions[1]);
    job.world.join(other, "world", 1, 2);
    assert_eq!(job.world.refusal(other).kind(), JoinRefusedKind::DuplicateRank);
    // Where nobody does, its tenant knows better whether it is there.
    [0, 2].into_iter().for_each(|host| job.world.gone(job.sessions[host]));
    job.world.join(other, "world", 0, 1);
    let next = job.world.recipe(other).communicator;
    job.world.prepare(&[other], next, 1);
    for host in 0..3 {
        let recipe = job.recipes[host].clone();
        assert_eq!(job.back(host, &recipe), job.ready());
    }
    assert_eq!(job.world.state.communicator_ids(), [job.id, next].map(CommunicatorId));
}

#[test]
fn a_regroup_waits_for_an_agent_that_is_away() {
    let mut job = Job::new();
    job.world.gone(job.sessions[1]);
    for (host, timeout) in [(0, 8), (2, 10)] {
        let rank = host as u32;
        let regroup = v1::Regroup { communicator: job.id, previous_rank: rank, key: rank, min_ranks: 1 };
        let timeout_ns = timeout * 1_000_000_000;
        let join = v1::Join { request: 5, timeout_ns, regroup: Some(regroup), ..join_of("a", "world", 0, 0) };
        job.world.send(job.sessions[host], from_agent::Message::Join(join));
    }
    job.world.wait(SECOND * 7);
    assert!(job.world.got.is_empty());
    job.world.wait(SECOND);
    assert_eq!(job.world.recipe(job.sessions[2]).previous_ranks, [1, 3], "within their own time");
    assert_eq!(job.world.state.communicator_ids().len(), 2, "the one before is as it was");
}

#[test]
fn an_epoch_that_was_never_given_is_a_breach() {
    let mut job = Job::new();
    job.world.gone(job.sessions[1]);
    let recipe = v1::Recipe { epoch: 2, ..job.recipes[1].clone() };
    let session = job.world.hello(hello(1, running(&recipe)));
    assert_eq!(job.world.ended, [session]);
    assert_eq!(job.epochs(), (1, None));
    let recipe = job.recipes[1].clone();
    assert_eq!(job.back(1, &recipe), job.ready());
}
