//! Random agents, tenants and operators from a seed: whatever happens, both sides agree on what is alive.

use super::world::{SECOND, World, hello, lost, settings};
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1::{self, from_agent, to_agent};
use harmonaize_server::state::testing::{CommunicatorView, MemberView, Testing as _};
use harmonaize_server::state::{SessionId, Terms};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const HOSTS: usize = 5;

/// One end of a link as a recipe describes it.
type LinkEnd = (u64, u64, u32, v1::Peer);

/// An agent that keeps account of what it may expect.
struct Agent {
    session: SessionId,
    open: BTreeSet<u64>,
    /// Epochs that are prepared, or in use, by communicator.
    alive: BTreeMap<u64, BTreeSet<u64>>,
    /// By communicator: the recipe of the epoch in use, and of those that may come to use.
    recipes: BTreeMap<u64, BTreeMap<u64, v1::Recipe>>,
    /// Ranks that have not left.
    ranks: BTreeMap<u64, BTreeSet<u32>>,
    /// Ranks of communicators that have ended.
    occupied: Vec<(u64, u32)>,
    /// What it has to say about recipes.
    todo: Vec<(u64, u64)>,
    ready: Vec<(u64, u64)>,
}

impl Agent {
    /// A communicator has ended; its processes are there still. Whether it was there.
    fn end(&mut self, communicator: u64) -> bool {
        self.recipes.remove(&communicator);
        let ranks = self.ranks.remove(&communicator).unwrap_or_default();
        self.occupied.extend(ranks.into_iter().map(|rank| (communicator, rank)));
        self.alive.remove(&communicator).is_some()
    }
}

struct Play {
    world: World,
    rng: ChaCha8Rng,
    agents: BTreeMap<usize, Agent>,
    /// Those without a session, whose data go on.
    away: BTreeMap<usize, Agent>,
    ends: Vec<LinkEnd>,
    request: u64,
    formed: usize,
    /// Communicators that were in use when an agent of theirs came back.
    taken_back: usize,
    /// By host and communicator: memory that its agent said last it holds for it.
    landing: BTreeMap<(usize, u64), u64>,
}

impl Play {
    fn step(&mut self) {
        let host = self.rng.random_range(0..HOSTS);
        match self.rng.random_range(0..100) {
            0..7 => self.connect(host),
            7 => self.die(host),
            8..10 => self.disconnect(host),
            10..35 => self.join(host),
            35..45 => self.regroup(host),
            45..70 => self.work(host),
            70..76 => self.leave(host),
            76..78 => self.fail(host),
            78..81 => self.reorder(),
            81 => self.nonsense(host),
            82 => self.dissolve(),
            83..86 => drop(self.world.state.ask_status(self.world.now, SECOND)),
            86 => self.hand_over(host),
            _ => {
                let time = Duration::from_millis(self.rng.random_range(0..3000));
                self.world.wait(time);
            }
        }
        self.world.run_until_quiet();
        self.listen();
        self.check();
    }

    fn connect(&mut self, host: usize) {
        let running = self.away.get(&host).map(|away| {
            let in_use = away.recipes.values().filter_map(|recipes| recipes.values().next());
            in_use.map(|recipe| v1::Recipe { peers: vec![], ..recipe.clone() }).collect()
        });
        let in_use = self.in_use();
        // One of them cannot have links over TCP alone.
        let capabilities = v1::Capabilities { links_over_tcp: host > 0, ..v1::Capabilities::default() };
        let said = hello(host, running.unwrap_or_default());
        let session = self.world.hello(v1::Hello { capabilities: Some(capabilities), ..said });
        let heard = self.world.received(session);
        if self.agents.contains_key(&host) {
            assert!(matches!(heard.as_slice(), [to_agent::Message::Refused(_)]));
            assert_eq!(self.world.ended.pop(), Some(session));
            return;
        }
        assert!(matches!(heard.first(), Some(to_agent::Message::Welcome(_))), "{heard:?}");
        self.world.got.insert(session, heard);
        if let Some(away) = self.away.remove(&host) {
            self.taken_back += away.alive.keys().filter(|id| in_use.contains(id)).count();
            // Those of which it knew no end it has still; of others it does not speak any more.
            self.agents.insert(host, Agent { session, ..away });
            return;
        }
        let (open, alive, ranks) = (BTreeSet::new(), BTreeMap::new(), BTreeMap::new());
        let (held, todo, ready, recipes) = (vec![], vec![], vec![], BTreeMap::new());
        let agent = Agent { session, open, alive, recipes, ranks, occupied: held, todo, ready };
        self.agents.insert(host, agent);
    }

    /// Communicators whose first epoch all have prepared.
    fn in_use(&self) -> BTreeSet<u64> {
        let state = &self.world.state;
        let ids = state.communicator_ids().into_iter();
        let ids = ids.filter(|id| state.communicator_view(*id).is_some_and(|known| known.current.is_some()));
        ids.map(u64::from).collect()
    }

    /// An agent loses its session: nothing of what is in use ends.
    fn disconnect(&mut self, host: usize) {
        let Some(mut agent) = self.agents.remove(&host) else { return };
        let before = self.in_use();
        self.world.gone(agent.session);
        assert_eq!(self.in_use(), before, "a session's end loses data");
        agent.open.clear();
        agent.todo.clear();
        agent.ready.clear();
        agent.occupied.clear();
        self.away.insert(host, agent);
    }

    /// A host dies, whether it had a session or not: its peers say so.
    fn die(&mut self, host: usize) {
        self.away.remove(&host);
        if let Some(agent) = self.agents.remove(&host) {
            self.world.gone(agent.session);
        }
        for id in self.in_use() {
            let members = self.world.state.communicator_view(CommunicatorId(id)).unwrap().members;
            let dead = members.iter().find(|member| member.host.0 == host && !member.closed);
            let Some(ranks) = dead.map(|member| member.ranks.clone()) else { continue };
            let tells = |agent: &&mut Agent| agent.alive.contains_key(&id);
            let Some(peer) = self.agents.values_mut().find(tells) else { continue };
            peer.end(id);
            let session = peer.session;
            self.world.send(session, from_agent::Message::Failed(lost(id, ranks)));
        }
    }

    fn join(&mut self, host: usize) {
        let Some(agent) = self.agents.get_mut(&host) else { return };
        self.request += 1;
        let name = self.rng.random_range(0..4);
        let ranks = if self.rng.random_bool(0.95) { name + 1 } else { self.rng.random_range(0..5) };
        let most = ranks.max(1) + u32::from(self.rng.random_bool(0.05));
        let join = v1::Join {
            request: self.request,
            tenant: ["a", "b", "c"]
                [usize::from(self.rng.random_bool(0.5)) + usize::from(self.rng.random_bool(0.02))]
            .to_owned(),
            communicator: format!("c{name}"),
            rank: self.rng.random_range(0..most),
            ranks,
            timeout_ns: if self.rng.random_bool(0.2) { self.rng.random_range(1..30_000_000_000) } else { 0 },
            ..v1::Join::default()
        };
        agent.open.insert(self.request);
        self.world.send(agent.session, from_agent::Message::Join(join));
    }

    /// A member of one that runs or has ended splits it or goes on, or a newcomer comes. Sometimes a member leaves after all.
    fn regroup(&mut self, host: usize) {
        let Some(agent) = self.agents.get_mut(&host) else { return };
        let live = agent.ranks.iter().flat_map(|(id, ranks)| ranks.iter().map(move |rank| (*id, *rank)));
        let members: Vec<(u64, u32)> = live.chain(agent.occupied.iter().copied()).collect();
        let member = members.get(self.rng.random_range(0..members.len() + 1)).copied();
        if let Some(at) = agent.occupied.iter().position(|held| Some(*held) == member)
            && self.rng.random_bool(0.3)
        {
            let (communicator, rank) = agent.occupied.swap_remove(at);
            let leave = v1::Leave { communicator, rank, request: 0 };
            return self.world.send(agent.session, from_agent::Message::Leave(leave));
        }
        self.request += 1;
        let (id, rank) = member.unwrap_or((0, 0));
        let known = self.world.state.communicator_view(CommunicatorId(id));
        let name = known.map(|known| (known.tenant.clone(), known.name.clone()));
        let (tenant, communicator) =
            name.unwrap_or_else(|| ("a".to_owned(), format!("c{}", self.rng.random_range(0..4))));
        let key = self.rng.random_range(0..5);
        let least = self.rng.random_range(1..3);
        let join = v1::Join {
            request: self.request,
            tenant,
            communicator,
            timeout_ns: self.rng.random_range(1..30_000_000_000),
            ..v1::Join::default()
        };
        let join = if member.is_some() && self.rng.random_bool(0.5) {
            let color = self.rng.random_bool(0.8).then(|| self.rng.random_range(0..2));
            v1::Join { split: Some(v1::Split { communicator: id, rank, color, key }), ..join }
        } else {
            let regroup = v1::Regroup { communicator: id, previous_rank: rank, key, min_ranks: least };
            v1::Join { regroup: Some(regroup), ..join }
        };
        agent.open.insert(self.request);
        self.world.send(agent.session, from_agent::Message::Join(join));
    }

    /// Says what is due: prepared or not, switched.
    fn work(&mut self, host: usize) {
        let Some(agent) = self.agents.get_mut(&host) else { return };
        let session = agent.session;
        if let Some((communicator, epoch)) = agent.ready.pop() {
            if let Some(recipes) = agent.recipes.get_mut(&communicator) {
                *recipes = recipes.split_off(&epoch);
            }
            let switched = v1::Switched { communicator, epoch, first_segment: 0 };
            return self.world.send(session, from_agent::Message::Switched(switched));
        }
        let Some((communicator, epoch)) = agent.todo.pop() else { return };
        if self.rng.random_bool(0.9) {
            let landing_bytes = communicator % 7 + epoch;
            self.landing.insert((host, communicator), landing_bytes);
            let links = Some(v1::LinkUsage { descriptors: 1, landing_bytes });
            self.world
                .send(session, from_agent::Message::Prepared(v1::Prepared { communicator, epoch, links }));
        } else {
            let failed = v1::PrepareFailed { communicator, epoch, reason: "chance".to_owned() };
            self.world.send(session, from_agent::Message::PrepareFailed(failed));
        }
    }

    fn leave(&mut self, host: usize) {
        let Some(agent) = self.agents.get_mut(&host) else { return };
        if self.rng.random_bool(0.3)
            && let Some(request) = agent.open.pop_first()
        {
            let leave = v1::Leave { communicator: 0, rank: 0, request };
            return self.world.send(agent.session, from_agent::Message::Leave(leave));
        }
        let Some((communicator, ranks)) = agent.ranks.iter_mut().next() else { return };
        let communicator = *communicator;
        let Some(rank) = ranks.pop_first() else { return };
        if ranks.is_empty() {
            agent.ranks.remove(&communicator);
            agent.alive.remove(&communicator);
            agent.recipes.remove(&communicator);
        }
        let leave = v1::Leave { communicator, rank, request: 0 };
        self.world.send(agent.session, from_agent::Message::Leave(leave));
    }

    fn fail(&mut self, host: usize) {
        let Some(agent) = self.agents.get_mut(&host) else { return };
        let Some((communicator, _)) = agent.alive.pop_first() else { return };
        agent.ranks.remove(&communicator);
        agent.recipes.remove(&communicator);
        let failed = v1::Failed { communicator, kind: 1, ranks: vec![0], detail: "chance".to_owned() };
        self.world.send(agent.session, from_agent::Message::Failed(failed));
    }

    fn reorder(&mut self) {
        let ids: Vec<CommunicatorId> = self.world.state.communicator_ids();
        if let Some(id) = ids.get(self.rng.random_range(0..ids.len().max(1))) {
            let members = self.world.state.communicator_view(*id).unwrap().members;
            let mut hosts: Vec<String> = members.iter().map(|member| format!("h{}", member.host.0)).collect();
            hosts.reverse();
            let _ = self.world.state.reorder(self.world.now, *id, &hosts);
        }
    }

    /// An agent has a successor soon, or calls that off.
    fn hand_over(&mut self, host: usize) {
        let Some(session) = self.agents.get(&host).map(|agent| agent.session) else { return };
        let for_ns = if self.rng.random_bool(0.3) { 0 } else { self.rng.random_range(1..6_000_000_000) };
        self.world.send(session, from_agent::Message::LinksOverTcp(v1::LinksOverTcp { for_ns }));
    }

    fn dissolve(&mut self) {
        if let Some(id) = self.world.state.communicator_ids().first().copied() {
            assert!(self.world.state.dissolve(self.world.now, id, "chance"));
        }
    }

    /// A message about anything; it may cost the session, and only that.
    fn nonsense(&mut self, host: usize) {
        let Some(session) = self.agents.get(&host).map(|agent| agent.session) else { return };
        let known = self.world.state.communicator_ids().into_iter().map(u64::from);
        let ids: Vec<u64> = known.chain([0, 1, u64::MAX]).collect();
        let communicator = ids[self.rng.random_range(0..ids.len())];
        let epoch = self.rng.random_range(0..4);
        let message = match self.rng.random_range(0..6) {
            0 => from_agent::Message::Report(v1::Report { id: epoch, ..Default::default() }),
            1 => from_agent::Message::Hello(hello(host, vec![])),
            2 => from_agent::Message::Leave(v1::Leave { communicator, rank: 99, request: 0 }),
            3 => from_agent::Message::Telemetry(self.report(communicator)),
            4 => from_agent::Message::Switched(v1::Switched { communicator: 1, epoch, first_segment: 0 }),
            _ => from_agent::Message::Prepared(v1::Prepared { communicator: u64::MAX, epoch, links: None }),
        };
        self.world.send(session, message);
    }

    /// Telemetry that may be right, or not.
    fn report(&mut self, communicator: u64) -> v1::TelemetryReport {
        let mut small = || self.rng.random_range(0..3);
        let straggler =
            v1::Straggler { communicator, rank: small(), cause: small() as i32, ..Default::default() };
        let ranks = vec![v1::RankTiming { rank: small(), called_ns: 1, ended_ns: 1, ..Default::default() }];
        let edges = vec![v1::Edge { peer: small(), sent_bytes: 1, ..Default::default() }];
        let (participant, operation) = (small(), u64::from(small()));
        let operation = v1::Operation {
            communicator,
            operation,
            ranks,
            edges,
            participant,
            complete: true,
            ..Default::default()
        };
        let (stragglers, operations) = match small() {
            0 => (vec![straggler], vec![]),
            _ => (vec![], vec![operation]),
        };
        self.request += 1;
        v1::TelemetryReport { sequence: self.request, stragglers, operations, ..Default::default() }
    }

    /// Everyone takes in what was sent.
    fn listen(&mut self) {
        for agent in self.agents.values_mut() {
            for message in self.world.got.remove(&agent.session).unwrap_or_default() {
                match message {
                    to_agent::Message::Form(recipe) | to_agent::Message::Change(recipe) => {
                        take(agent, &recipe, &mut self.ends);
                        self.formed += 1;
                    }
                    to_agent::Message::Ready(ready) if agent.alive.contains_key(&ready.communicator) => {
                        agent.ready.push((ready.communicator, ready.epoch));
                    }
                    to_agent::Message::Abandon(abandon) => {
                        let epochs = agent.alive.get_mut(&abandon.communicator).expect("it is alive");
                        assert!(epochs.remove(&abandon.epoch), "it was handed out");
                        let recipes = agent.recipes.get_mut(&abandon.communicator).expect("it is alive");
                        assert!(recipes.remove(&abandon.epoch).is_some(), "it was not in use");
                    }
                    to_agent::Message::JoinRefused(refused) => {
                        assert!(agent.open.remove(&refused.request), "answered once");
                    }
                    to_agent::Message::Dissolve(end) => {
                        assert!(agent.end(end.communicator), "{end:?} was alive at {:?}", agent.session);
                    }
                    _ => {}
                }
            }
        }
        let ended = std::mem::take(&mut self.world.ended);
        self.agents.retain(|_, agent| !ended.contains(&agent.session));
        self.world.got.clear();
    }

    /// Both sides know the same communicators and joins; each port is used once.
    fn check(&self) {
        let state = &self.world.state;
        let communicators: BTreeMap<u64, CommunicatorView> = state
            .communicator_ids()
            .into_iter()
            .map(|id| (id.0, state.communicator_view(id).unwrap()))
            .collect();
        for agent in self.agents.values() {
            let is_open = |member: &MemberView| member.session == Some(agent.session) && !member.closed;
            let known = communicators.iter().filter(|(_, known)| known.members.iter().any(is_open));
            let known: Vec<u64> = known.map(|(id, _)| *id).collect();
            assert_eq!(known, agent.alive.keys().copied().collect::<Vec<_>>());
            assert_eq!(state.open_joins(agent.session), agent.open);
        }
        assert_eq!(state.open_sessions().len(), self.agents.len());
        let joined = state.waiting_ranks();
        let waiting = joined.iter().sum::<usize>() + state.regrouping_processes() + state.splitting_ranks();
        assert_eq!(waiting, self.agents.values().map(|agent| agent.open.len()).sum::<usize>());
        assert!(!joined.contains(&0));
        // A link that goes on has its ports in both epochs.
        let ports = communicators.values().flat_map(|known| {
            let epochs = known.current.iter().chain(&known.next);
            epochs.flat_map(|epoch| epoch.ports.iter().copied()).collect::<BTreeSet<_>>()
        });
        let ports: Vec<_> = ports.collect();
        assert_eq!(ports.iter().collect::<BTreeSet<_>>().len(), ports.len(), "a port is used twice");
        // What agents hold counts until it is given back, whether they have a session or not.
        let own = communicators.iter().filter(|(_, known)| known.tenant == "a");
        let said = own.flat_map(|(id, known)| {
            let open = known.members.iter().filter(|member| !member.closed);
            open.filter_map(|member| self.landing.get(&(member.host.0, *id)))
        });
        let told = state.queries(self.world.now).tenants().tenants.remove(0).limits;
        assert_eq!(told.iter().map(|limit| limit.used).collect::<Vec<_>>(), [said.sum::<u64>()]);
        assert!(
            state.next_deadline().is_none_or(|deadline| deadline > self.world.now),
            "expired and still there"
        );
    }
}

/// An agent takes a recipe in, after a look at its sense.
fn take(agent: &mut Agent, recipe: &v1::Recipe, ends: &mut Vec<LinkEnd>) {
    let mut order = recipe.order.clone();
    order.sort_unstable();
    assert!(order.iter().copied().eq(0..recipe.participants.len() as u32));
    let mut ranks: Vec<u32> = recipe.participants.iter().flat_map(|part| part.ranks.clone()).collect();
    ranks.sort_unstable();
    assert!(ranks.iter().copied().eq(0..ranks.len() as u32));
    let mine = &recipe.participants[recipe.me as usize].ranks;
    assert_eq!(recipe.local_ranks.iter().map(|local| local.rank).collect::<Vec<_>>(), *mine);
    assert_eq!(recipe.peers.len() + 1, recipe.participants.len());
    let over_tcp = |recipe: &v1::Recipe, peer: &v1::Peer| {
        recipe.over_tcp.contains(&recipe.me) || recipe.over_tcp.contains(&peer.participant)
    };
    let recipes = agent.recipes.entry(recipe.communicator).or_default();
    if let Some(in_use) = recipes.values().next() {
        let mut goes_on = recipe.peers.iter().filter(|peer| peer.reused);
        assert!(
            goes_on.all(|peer| over_tcp(recipe, peer) == over_tcp(in_use, peer)),
            "a link changes its network"
        );
    }
    recipes.insert(recipe.epoch, recipe.clone());
    let epochs = agent.alive.entry(recipe.communicator).or_default();
    assert!(epochs.insert(recipe.epoch), "an epoch comes once");
    if epochs.len() == 1 {
        for local in &recipe.local_ranks {
            assert!(agent.open.remove(&local.request), "a join is answered once");
        }
        agent.ranks.insert(recipe.communicator, mine.iter().copied().collect());
    }
    agent.todo.push((recipe.communicator, recipe.epoch));
    for peer in recipe.peers.iter().filter(|peer| !peer.reused) {
        ends.push((recipe.communicator, recipe.epoch, recipe.me, peer.clone()));
    }
}

/// Each new link has two ends that agree, and no two links have anything in common.
fn check_links(ends: &[LinkEnd]) {
    let mut links: BTreeMap<&[u8], Vec<&LinkEnd>> = BTreeMap::new();
    for end in ends {
        links.entry(&end.3.link).or_default().push(end);
    }
    let mut secrets = BTreeSet::new();
    for ends in links.values() {
        let [near, far] = ends.as_slice() else { panic!("a link has two ends: {ends:?}") };
        assert_eq!((near.0, near.1), (far.0, far.1));
        assert_eq!((near.2, near.3.participant), (far.3.participant, far.2));
        assert_eq!((&near.3.secret, &near.3.source_ports), (&far.3.secret, &far.3.source_ports));
        assert_ne!(near.3.initiate, far.3.initiate);
        assert!(secrets.insert(&near.3.secret), "a secret is used once");
    }
}

/// Recipes that were handed out, and communicators in use that an agent came back to.
fn play(seed: u64) -> (usize, usize) {
    let rng = ChaCha8Rng::seed_from_u64(seed);
    let mut settings = settings(HOSTS);
    settings.terms.insert("a".to_owned(), Terms { landing: Some(u64::MAX), ..Terms::default() });
    let world = World::new(settings, seed as u8);
    let (agents, away, ends, landing) = (BTreeMap::new(), BTreeMap::new(), Vec::new(), BTreeMap::new());
    let mut play = Play { world, rng, agents, away, ends, request: 0, formed: 0, taken_back: 0, landing };
    for _ in 0..400 {
        play.step();
    }
    // In the end every join and every preparation is answered.
    for _ in 0..2 {
        play.world.wait(SECOND * 61);
        play.listen();
        play.check();
    }
    let state = &play.world.state;
    assert!(state.waiting_ranks().is_empty());
    assert_eq!((state.regrouping_processes(), state.splitting_ranks()), (0, 0));
    let mut ids = state.communicator_ids().into_iter();
    assert!(ids.all(|id| state.communicator_view(id).unwrap().current.is_some()));
    assert_eq!(state.open_questions(), 0);
    check_links(&play.ends);
    (play.formed, play.taken_back)
}

#[test]
fn both_sides_agree() {
    let (mut formed, mut taken_back) = (0, 0);
    for seed in 0..300 {
        let outcome = std::panic::catch_unwind(|| play(seed));
        let (recipes, back) = outcome.unwrap_or_else(|_| panic!("seed {seed}"));
        (formed, taken_back) = (formed + recipes, taken_back + back);
    }
    assert!(taken_back > 100, "too few agents come back: {taken_back}");
    assert!(formed > 3000, "the plays are too dull: {formed} recipes");
}
