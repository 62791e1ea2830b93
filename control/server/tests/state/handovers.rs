//! Agents whose links go over RDMA and which hand over to a successor: their links go over TCP alone meanwhile.

use super::aggregation::{able, aggregator};
use super::world::{SECOND, World, hello, join_of, running, settings};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::v1::{self, from_agent};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{Reason, SessionId, Settings};
use harmonaize_store::Stored;
use std::collections::BTreeSet;
use std::time::Duration;

/// Longest that one word of an agent's holds.
const LONGEST: Duration = SECOND.saturating_mul(300);

/// An agent whose links go over RDMA, but for those that are to go over TCP.
fn over_rdma(host: usize, running: Vec<v1::Recipe>) -> v1::Hello {
    let capabilities = v1::Capabilities { links_over_tcp: true, ..v1::Capabilities::default() };
    v1::Hello { capabilities: Some(capabilities), ..hello(host, running) }
}

/// Three such hosts with a rank of `world` each, in use.
struct Job {
    world: World,
    sessions: Vec<SessionId>,
    id: u64,
    epoch: u64,
}

impl Job {
    fn new(settings: Settings) -> Self {
        let mut world = World::new(settings, 7);
        let sessions = world.connect((0..3).map(|host| over_rdma(host, vec![])));
        let id = world.form(&sessions, "world");
        let mut job = Self { world, sessions, id, epoch: 1 };
        job.world.wait(SECOND);
        assert!(job.is_quiet());
        job
    }

    fn is_quiet(&mut self) -> bool {
        let sessions = self.sessions.clone();
        self.world.is_quiet(&sessions)
    }

    /// What an agent wants from now on.
    fn ask(&mut self, host: usize, time: Duration) {
        let for_ns = u64::try_from(time.as_nanos()).unwrap();
        let message = from_agent::Message::LinksOverTcp(v1::LinksOverTcp { for_ns });
        self.world.send(self.sessions[host], message);
        // A plan may come a moment after the last.
        self.world.wait(SECOND / 100);
    }

    /// An agent ends, and its successor has a session.
    fn succeeded(&mut self, host: usize, recipe: &v1::Recipe) {
        self.world.gone(self.sessions[host]);
        self.sessions[host] = self.world.hello(over_rdma(host, running(recipe)));
        self.world.wait(SECOND / 100);
        assert!(self.stays(), "before the successor has said anything");
    }

    /// Whether nobody hears of another epoch.
    fn stays(&mut self) -> bool {
        let sessions = self.sessions.clone();
        sessions.into_iter().all(|session| every!(self.world.received(session), Change).is_empty())
    }

    /// All get another epoch, prepare it and use it; its recipes, and why.
    fn changes(&mut self) -> (Vec<v1::Recipe>, Reason) {
        self.epoch += 1;
        let (mut recipes, epoch) = (Vec::new(), self.epoch);
        for session in &self.sessions {
            let mut told = every!(self.world.received(*session), Change);
            assert_eq!(told.len(), 1, "one change each");
            recipes.append(&mut told);
        }
        assert!(recipes.iter().all(|recipe| recipe.epoch == epoch), "{recipes:?}");
        self.world.prepare(&self.sessions, self.id, epoch);
        for session in self.sessions.clone() {
            let switched = v1::Switched { communicator: self.id, epoch, first_segment: 1 };
            self.world.send(session, from_agent::Message::Switched(switched));
        }
        let told = |recipe: &v1::Recipe| recipe.over_tcp.iter().copied().collect::<BTreeSet<u32>>();
        assert!(recipes.iter().all(|recipe| told(recipe) == self.world.epoch(self.id).over_tcp));
        (recipes, self.world.reasons.pop().unwrap())
    }
}

/// The pairs of participants whose links go on.
fn reused(recipes: &[v1::Recipe]) -> BTreeSet<(u32, u32)> {
    let pairs = recipes.iter().flat_map(|recipe| {
        let goes_on = recipe.peers.iter().filter(|peer| peer.reused);
        goes_on.map(|peer| (recipe.me.min(peer.participant), recipe.me.max(peer.participant)))
    });
    pairs.collect()
}

/// Whether control plans or not.
fn in_both_directions() -> [Settings; 2] {
    [true, false].map(|replan| Settings { replan, ..settings(4) })
}

#[test]
fn links_go_over_tcp_during_a_hand_over() {
    for settings in in_both_directions() {
        let mut job = Job::new(settings);
        job.ask(1, SECOND * 60);
        let (recipes, why) = job.changes();
        assert_eq!(why, Reason::OverTcp);
        assert!(recipes.iter().all(|recipe| recipe.over_tcp == [1]), "{recipes:?}");
        assert_eq!(reused(&recipes), BTreeSet::from([(0, 2)]), "other links go on");
        job.world.wait(SECOND);
        assert!(job.is_quiet(), "it stays so");
        job.succeeded(1, &recipes[1]);
        job.ask(1, Duration::ZERO);
        let (recipes, why) = job.changes();
        assert_eq!(why, Reason::OverRdma);
        assert!(recipes.iter().all(|recipe| recipe.over_tcp.is_empty()), "{recipes:?}");
        assert_eq!(reused(&recipes), BTreeSet::from([(0, 2)]));
        job.world.wait(SECOND);
        assert!(job.is_quiet());
    }
}

/// A process has not come to the successor. Of an epoch over RDMA, which an operation that waits for it would keep under way, nobody hears.
/// So the next successor can be handed links at once.
#[test]
fn links_stay_on_tcp_from_one_successor_to_the_next() {
    for settings in in_both_directions() {
        let mut job = Job::new(settings);
        job.ask(1, SECOND * 60);
        let (recipes, _) = job.changes();
        for _ in 0..3 {
            job.succeeded(1, &recipes[1]);
            for _ in 0..4 {
                job.ask(1, SECOND * 60);
                job.world.wait(SECOND * 30);
                assert!(job.stays(), "its links are over TCP");
            }
        }
        job.ask(1, Duration::ZERO);
        assert_eq!(job.changes().1, Reason::OverRdma);
    }
}

/// Of one that died and was started anew, or that ends for good.
#[test]
fn links_go_back_where_a_successor_says_nothing() {
    for settings in in_both_directions() {
        let mut job = Job::new(settings);
        job.ask(1, SECOND * 60);
        let (recipes, _) = job.changes();
        job.succeeded(1, &recipes[1]);
        job.world.wait(SECOND * 9);
        assert!(job.stays());
        job.world.wait(SECOND);
        job.world.wait(SECOND / 100);
        assert_eq!(job.changes().1, Reason::OverRdma);
    }
}

#[test]
fn a_hand_over_that_is_called_off_gives_links_back() {
    for settings in in_both_directions() {
        let mut job = Job::new(settings);
        job.ask(0, SECOND * 60);
        assert_eq!(job.changes().1, Reason::OverTcp);
        job.ask(0, Duration::ZERO);
        assert_eq!(job.changes().1, Reason::OverRdma);
        // Once more is not needed.
        job.ask(0, Duration::ZERO);
        assert!(job.is_quiet());
    }
}

#[test]
fn a_dead_agent_leaves_no_link_on_tcp() {
    for (asked, until) in [(SECOND * 5, SECOND * 5), (LONGEST * 1000, LONGEST)] {
        let mut job = Job::new(settings(4));
        job.ask(2, asked);
        assert_eq!(job.changes().1, Reason::OverTcp);
        job.world.wait(until - SECOND);
        assert!(job.is_quiet(), "before {until:?} are over");
        job.world.wait(SECOND);
        job.world.wait(SECOND / 100);
        assert_eq!(job.changes().1, Reason::OverRdma);
    }
}

#[test]
fn two_hand_overs_put_both_agents_on_tcp() {
    let mut job = Job::new(settings(4));
    job.ask(0, SECOND * 60);
    job.changes();
    job.ask(1, SECOND * 60);
    let (recipes, why) = job.changes();
    assert_eq!((recipes[2].over_tcp.as_slice(), why), (&[0, 1][..], Reason::OverTcp));
    // That of 0 and 1 goes over TCP already, and so does that of 0 and 2.
    assert_eq!(reused(&recipes), BTreeSet::from([(0, 1), (0, 2)]));
    job.ask(0, Duration::ZERO);
    let (recipes, why) = job.changes();
    assert_eq!((recipes[2].over_tcp.as_slice(), why), (&[1][..], Reason::OverRdma));
    assert_eq!(reused(&recipes), BTreeSet::from([(0, 1), (1, 2)]));
}

#[test]
fn a_communicator_that_forms_meanwhile_begins_over_tcp() {
    let mut job = Job::new(settings(4));
    job.ask(1, SECOND * 60);
    job.changes();
    let sessions = job.sessions.clone();
    let recipes = job.world.join_all(&sessions, &join_of("a", "later", 0, 0));
    assert!(recipes.iter().all(|recipe| recipe.epoch == 1 && recipe.over_tcp == [1]), "{recipes:?}");
}

#[test]
fn nothing_changes_where_an_agent_is_of_an_older_release() {
    for settings in in_both_directions() {
        let mut world = World::new(settings, 7);
        let mut sessions = world.connect((0..2).map(|host| over_rdma(host, vec![])));
        sessions.push(world.agent(2));
        world.form(&sessions, "world");
        world.wait(SECOND);
        // The one that cannot is not heard either.
        for host in [0, 2] {
            let asked = v1::LinksOverTcp { for_ns: 60_000_000_000 };
            world.send(sessions[host], from_agent::Message::LinksOverTcp(asked));
        }
        world.wait(SECOND);
        assert!(world.is_quiet(&sessions) && world.ended.is_empty());
    }
}

#[test]
fn control_says_that_it_takes_it() {
    let mut world = World::new(settings(4), 7);
    let session = world.hello(over_rdma(0, vec![]));
    assert!(only!(world.received(session), Welcome).takes_links_over_tcp);
}

/// However many agents are upgraded, the planner can move the communicator as soon as before.
#[test]
fn hand_overs_are_no_changes_of_plan() {
    for settings in in_both_directions() {
        let mut job = Job::new(settings);
        for host in 0..3 {
            job.ask(host, SECOND * 60);
            job.changes();
            job.ask(host, Duration::ZERO);
            job.changes();
            let view = job.world.state.communicator_view(CommunicatorId(job.id)).unwrap();
            assert_eq!(view.changes, 0);
        }
    }
}

/// What agents tell of their epochs is enough to find back.
#[test]
fn a_restarted_control_returns_links_nobody_wants() {
    let mut job = Job::new(settings(4));
    job.ask(1, SECOND * 60);
    let recipes = job.changes().0;
    for asks_again in [false, true] {
        let mut world = World::new(settings(4), 8);
        world.state.restore(Stored::default(), Nanos(0));
        let mut again = Job { world, sessions: Vec::new(), id: job.id, epoch: recipes[0].epoch };
        for (host, recipe) in recipes.iter().enumerate() {
            let session = again.world.hello(over_rdma(host, running(recipe)));
            again.sessions.push(session);
            if asks_again && host == 1 {
                again.ask(1, SECOND * 60);
            }
        }
        again.world.wait(SECOND / 100);
        assert_eq!(again.world.epoch(job.id).over_tcp, BTreeSet::from([1]), "as agents say");
        let next = again.world.state.communicator_view(CommunicatorId(job.id)).unwrap().next;
        if asks_again {
            assert!(next.is_none_or(|next| next.over_tcp == BTreeSet::from([1])));
            continue;
        }
        // Numbers that the control before may have given are left out.
        again.epoch = u64::from(next.expect("an epoch over RDMA").epoch) - 1;
        let (recipes, _) = again.changes();
        assert!(recipes.iter().all(|recipe| recipe.over_tcp.is_empty()), "{recipes:?}");
    }
}

/// A queue pair for datagrams ends with its process as others do.
#[test]
fn packets_to_an_aggregator_go_over_udp_meanwhile() {
    let port = v1::DatagramPort { gid: vec![1; 16], number: 17, key: 5, bytes: 4096 };
    let mut world = World::new(super::aggregation::settings(3), 3);
    let mut said = aggregator(&[]);
    said.aggregator.as_mut().unwrap().datagrams = Some(port);
    world.hello(said);
    let sessions = world.connect((0..3).map(|host| {
        let mut said = able(host, vec![]);
        let capabilities = said.capabilities.as_mut().unwrap();
        (capabilities.datagram_bytes, capabilities.links_over_tcp) = (4096, true);
        said
    }));
    let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
    assert!(recipes[0].aggregation.as_ref().unwrap().datagrams.is_some());
    world.prepare(&sessions, recipes[0].communicator, 1);
    let asked = v1::LinksOverTcp { for_ns: 60_000_000_000 };
    world.send(sessions[0], from_agent::Message::LinksOverTcp(asked));
    world.wait(SECOND);
    let recipes = world.recipes(&sessions);
    assert!(recipes.iter().all(|recipe| recipe.over_tcp == [0]), "{recipes:?}");
    let packets = recipes.iter().filter_map(|recipe| recipe.aggregation.as_ref());
    assert!(packets.clone().count() == 3 && packets.clone().all(|told| told.datagrams.is_none()));
}
