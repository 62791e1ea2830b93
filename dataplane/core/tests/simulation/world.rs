//! Participants, a clock and a queue of events.

use super::aggregator::{Aggregator, Submitted};
use super::coded::Books;
use super::memory::{self, Tensor};
use super::network::{Direction, Frame, Location};
use super::node::{Node, Outcome, RankState};
use super::p2p::{P2P, P2pState, Store};
use super::scenario::{Incident, MICROSECOND, MILLISECOND, Scenario, generator};
use super::statistics::Statistics;
use harmonaize_abi::{ChannelId, Epoch, OperationId, Rank, Signature, StepId, Token};
use harmonaize_core::{
    Action, BadPlan, Call, CoreError, EpochPlan, Failure, Interleaving, Message, Nanos, Payload, Receipt,
};
use harmonaize_plan::Participant;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Instant;

/// Longest that a peer takes to notice that a link is down.
pub(crate) const NOTICE: u64 = 20 * MILLISECOND;

#[derive(Debug)]
pub(crate) enum Event {
    Poll(Participant),
    Timer(Participant),
    Input(Participant, Input),
    Read(Box<Frame>),
    Deliver(Box<Frame>),
    Fetch(Box<Transfer>),
    Store(Box<Transfer>),
    Piece(Box<Store>),
    Down { at: Participant, link: Epoch, peer: Participant },
    Incident(Incident),
    Close(Participant, Vec<(Epoch, Participant)>),
    Sum(Submitted),
    Summed { at: Participant, channel: ChannelId, of: Submitted, sum: Vec<u8> },
    CopiedOut(Box<CopyOut>),
}

/// What was held of a segment, on its way to tensors that are not mapped.
#[derive(Debug)]
pub(crate) struct CopyOut {
    pub(crate) at: Participant,
    pub(crate) channel: ChannelId,
    pub(crate) outputs: Vec<Location>,
    pub(crate) content: Vec<u8>,
}

/// A fetch or store under way.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) at: Participant,
    pub(crate) from: Location,
    pub(crate) to: Location,
    pub(crate) channel: ChannelId,
    pub(crate) step: StepId,
    /// Read already.
    pub(crate) content: Option<Vec<u8>>,
}

/// What a participant finds at its next turn.
#[derive(Debug)]
pub(crate) enum Input {
    Call(Rank),
    Message(Rank),
    Frame { from: Participant, link: Epoch, message: Vec<u8>, payload: Payload },
    Completed { channel: ChannelId, step: StepId },
    Down { link: Epoch, peer: Participant },
    Change(Box<EpochPlan>),
    LinksUp(Epoch),
    AllPrepared(Epoch),
    Abandon(Epoch),
    Left(Rank),
    Abort(Rank),
    Summed(Submitted),
    SessionEnded { epoch: Epoch, session: u64 },
    Turns(Option<Interleaving>),
    TurnGiven(u64),
    Knocked { epoch: Epoch, there: bool },
    CopiedOut(ChannelId),
}

pub(crate) struct World {
    pub(crate) scenario: Scenario,
    pub(crate) rng: ChaCha8Rng,
    pub(crate) now: u64,
    pub(crate) nodes: Vec<Node>,
    pub(crate) ranks: Vec<RankState>,
    /// By rank.
    pub(crate) messages: Vec<P2pState>,
    pub(crate) links: HashMap<(Epoch, Participant, Participant), Direction>,
    pub(crate) tensors: HashMap<(u32, OperationId), Tensor>,
    pub(crate) plans: Vec<EpochPlan>,
    /// By epoch: how many have opened its links.
    opened: HashMap<Epoch, usize>,
    /// By epoch: at how many all links are up.
    pub(crate) up: HashMap<Epoch, usize>,
    pub(crate) statistics: Statistics,
    pub(crate) books: Books,
    pub(crate) aggregator: Aggregator,
    /// Participants may end badly.
    pub(crate) faulty: bool,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: HashMap<u64, Event>,
    /// Events that are not timers.
    lively: usize,
    next_event: u64,
    /// When the last thing happened that is not a timer.
    pub(crate) last: u64,
    /// When a rank last called, or a step was last issued.
    pub(crate) active: u64,
}

impl World {
    pub(crate) fn new(scenario: Scenario, faulty: bool) -> Self {
        let group = &scenario.group;
        let mut world = Self {
            rng: generator(scenario.seed, 2),
            now: 0,
            nodes: (0..group.participants()).map(|p| Node::new(&scenario, Participant(p))).collect(),
            ranks: (0..group.ranks()).map(|_| RankState::default()).collect(),
            messages: (0..group.ranks()).map(|_| P2pState::default()).collect(),
            links: HashMap::new(),
            tensors: HashMap::new(),
            plans: vec![scenario.plan.clone()],
            opened: HashMap::new(),
            up: HashMap::new(),
            statistics: Statistics::default(),
            books: Books::default(),
            aggregator: Aggregator::default(),
            queue: BinaryHeap::new(),
            events: HashMap::new(),
            lively: 0,
            next_event: 0,
            last: 0,
            active: 0,
            faulty,
            scenario,
        };
        for rank in world.scenario.ranks() {
            world.schedule_rank(rank);
            world.schedule_message(rank);
        }
        for (at, incident) in world.scenario.incidents.clone() {
            world.at(at, Event::Incident(incident));
        }
        world
    }

    pub(crate) fn at(&mut self, time: u64, event: Event) {
        let time = time.max(self.now);
        self.lively += usize::from(!matches!(event, Event::Timer(_)));
        self.queue.push(Reverse((time, self.next_event)));
        self.events.insert(self.next_event, event);
        self.next_event += 1;
    }

    pub(crate) fn home(&self, rank: Rank) -> Participant {
        self.scenario.group.participant_of(rank).unwrap()
    }

    /// A rank's next call, or its leaving, after some thought.
    pub(crate) fn schedule_rank(&mut self, rank: Rank) {
        let script = &self.scenario.scripts[rank.0 as usize];
        let state = &self.ranks[rank.0 as usize];
        if state.gone || state.waits || state.refused {
            return;
        }
        let next = if state.called < script.acts.len() {
            (state.open.len() < script.depth).then_some(Input::Call(rank))
        } else {
            (script.leaves && state.open.is_empty() && self.has_messaged(rank)).then_some(Input::Left(rank))
        };
        let Some(next) = next else { return };
        let at = self.now + self.rng.random_range(0..=script.think + 1);
        self.ranks[rank.0 as usize].waits = true;
        let home = self.home(rank);
        self.at(at, Event::Input(home, next));
    }

    /// Puts something before a participant, which looks at it when its turn comes.
    pub(crate) fn input(&mut self, at: Participant, input: Input) {
        let node = &mut self.nodes[at.0 as usize];
        if !node.alive || node.closed {
            return;
        }
        node.inbox.push_back(input);
        self.wake(at);
    }

    fn wake(&mut self, at: Participant) {
        if !std::mem::replace(&mut self.nodes[at.0 as usize].scheduled, true) {
            let wait = self.scenario.weather.wait(&mut self.rng) / 8;
            self.at(self.now + wait, Event::Poll(at));
        }
    }

    /// Runs until nothing more happens, or it has become clear that nothing will.
    pub(crate) fn run(&mut self) {
        let mut count = 0_u64;
        while let Some(Reverse((time, number))) = self.queue.pop() {
            assert!(time >= self.now, "time runs backwards");
            let event = self.events.remove(&number).unwrap();
            self.now = time;
            if matches!(event, Event::Timer(_)) {
                let held = |node: &Node| node.alive && node.core.is_deferred();
                let waits = self.lively > 0 || self.nodes.iter().any(held);
                let expected = self.faulty || waits || self.all_ended();
                assert!(expected, "deadlock:\n{}", self.describe());
            } else {
                self.lively -= 1;
                self.last = time;
            }
            self.happen(event);
            count += 1;
            assert!(count < 20_000_000, "no end in sight:\n{}", self.describe());
        }
        assert!(self.all_ended(), "calls that never end:\n{}", self.describe());
        self.statistics.virtual_time = self.last;
    }

    /// Whether no live rank waits for a call.
    fn all_ended(&self) -> bool {
        let open = |rank: Rank| {
            let node = &self.nodes[self.home(rank).0 as usize];
            let messages = &self.messages[rank.0 as usize];
            node.alive && (!self.ranks[rank.0 as usize].open.is_empty() || messages.is_open())
        };
        !self.scenario.ranks().any(|rank| open(rank) && !self.ranks[rank.0 as usize].gone)
    }

    pub(crate) fn describe(&self) -> String {
        use std::fmt::Write;
        let mut text = format!("at {} us, {:?}\n", self.now / MICROSECOND, self.scenario.plan);
        for (index, node) in self.nodes.iter().enumerate() {
            let ranks = self.scenario.group.local(Participant(index as u32));
            let (alive, closed, done) = (node.alive, node.closed, node.done);
            let _ = writeln!(
                text,
                "participant {index} {ranks:?}: alive {alive} closed {closed} done {done} failure {:?} switched {:?}",
                node.failure, node.switched
            );
            for flight in node.core.in_flight() {
                let _ = writeln!(text, "    {flight:?}");
            }
        }
        text
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Poll(p) => {
                self.nodes[p.0 as usize].scheduled = false;
                self.turn(p);
            }
            Event::Timer(p) => {
                let now = self.now;
                let node = &mut self.nodes[p.0 as usize];
                if node.timer.is_some_and(|timer| timer <= now) {
                    node.timer = None;
                }
                if node.alive && !node.closed && node.due().is_some_and(|due| due.0 <= now) {
                    self.wake(p);
                } else {
                    self.arm(p);
                }
            }
            Event::Input(p, input) => self.input(p, input),
            Event::Read(frame) => self.read_frame(frame),
            Event::Deliver(frame) => self.deliver(*frame),
            Event::Fetch(transfer) | Event::Store(transfer) => self.transfer(transfer),
            Event::Down { at, link, peer } => {
                self.links.entry((link, peer, at)).or_default().down = true;
                if self.nodes[at.0 as usize].has(link, peer) {
                    self.input(at, Input::Down { link, peer });
                }
            }
            Event::Piece(store) => self.piece_stored(*store),
            Event::Incident(incident) => self.befall(incident),
            Event::Close(p, links) => self.close_links(p, &links, NOTICE),
            Event::Sum(of) => self.sum(of),
            Event::Summed { at, channel, of, sum } => self.summed(at, channel, of, &sum),
            Event::CopiedOut(copy) => self.copied_out(*copy),
        }
    }

    fn befall(&mut self, incident: Incident) {
        match incident {
            Incident::Change(plan) => {
                self.plans.push((*plan).clone());
                for p in (0..self.scenario.group.participants()).map(Participant) {
                    // Control tells each of one plan after another.
                    let wait = self.now + self.rng.random_range(0..2 * MILLISECOND);
                    let told = &mut self.nodes[p.0 as usize].planned_at;
                    *told = wait.max(*told + 1);
                    let at = *told;
                    self.at(at, Event::Input(p, Input::Change(plan.clone())));
                }
            }
            Incident::Kill(p) => {
                self.nodes[p.0 as usize].alive = false;
                if !self.nodes[p.0 as usize].closed {
                    let links = self.nodes[p.0 as usize].all_links();
                    self.close_links(p, &links, NOTICE);
                }
            }
            Incident::RankGone(rank) => {
                if !self.ranks[rank.0 as usize].gone {
                    self.ranks[rank.0 as usize].gone = true;
                    self.input(self.home(rank), Input::Left(rank));
                }
            }
            Incident::Abort(rank) => {
                if !self.ranks[rank.0 as usize].gone {
                    self.input(self.home(rank), Input::Abort(rank));
                }
            }
            Incident::Aggregator { dead } => self.aggregator(dead),
            Incident::Despair => self.despair(),
            Incident::Succeed => self.succeed(),
            Incident::Turns(p, rules) => self.input(p, Input::Turns(rules)),
            Incident::Flood { from, to, questions } => {
                if self.nodes[from.0 as usize].alive {
                    self.flood(from, to, questions);
                }
            }
            Incident::Inject(p) => {
                if self.nodes[p.0 as usize].alive {
                    self.inject(p);
                }
            }
        }
    }

    /// Another process goes on as one of the participants, in none of its sessions.
    fn succeed(&mut self) {
        let p = Participant(self.rng.random_range(0..self.scenario.group.participants()));
        let node = &mut self.nodes[p.0 as usize];
        // What is on its way to tensors that are not mapped ends first.
        if node.closed || node.copying > 0 {
            return;
        }
        let image = postcard::to_allocvec(&node.core).unwrap();
        let state =
            |epoch: &Epoch| Some((*epoch, postcard::to_allocvec(node.core.aggregation(*epoch)?).unwrap()));
        let aggregated: Vec<_> = node.epochs.iter().filter_map(state).collect();
        node.core = postcard::from_bytes(&image).unwrap();
        for (epoch, state) in aggregated {
            let state = postcard::from_bytes(&state).unwrap();
            node.core.inherit_aggregation(Nanos(self.now), epoch, state);
        }
        node.joined.values_mut().for_each(|joined| joined.ended = true);
        self.wake(p);
    }

    /// A participant's turn: takes what is there, then does some of what the core asks for.
    fn turn(&mut self, p: Participant) {
        if !self.nodes[p.0 as usize].alive || self.nodes[p.0 as usize].closed {
            return;
        }
        let started = Instant::now();
        while let Some(input) = self.nodes[p.0 as usize].inbox.pop_front() {
            self.take(p, input);
            if self.rng.random_bool(0.05) {
                break;
            }
        }
        let now = Nanos(self.now);
        self.nodes[p.0 as usize].core.handle_timeout(now);
        if let Some(plan) = self.nodes[p.0 as usize].changes.pop_front() {
            self.prepare(p, plan);
        }
        self.statistics.core += started.elapsed();
        let node = &self.nodes[p.0 as usize];
        if self.now < node.stuck_until && node.core.failure().is_none() {
            if !node.inbox.is_empty() {
                self.wake(p);
            }
            return self.arm(p);
        }
        let mut budget = self.rng.random_range(1..100);
        loop {
            let started = Instant::now();
            let node = &mut self.nodes[p.0 as usize];
            // Once the communicator has failed, the rest is left.
            // Operations may wait, and words do not.
            if self.scenario.slices
                && self.rng.random_bool(0.1)
                && let Some(word) = node.core.poll_control(now, node.unfinished.as_ref())
            {
                let moves = matches!(
                    word,
                    Action::Step { .. }
                        | Action::CopyOut { .. }
                        | Action::Aggregate { .. }
                        | Action::P2pSend { .. }
                        | Action::P2pReceive { .. }
                        | Action::P2pCopy { .. }
                );
                assert!(!moves, "no word: {word:?}");
                self.statistics.control_messages += 1;
                self.act(p, word);
                continue;
            }
            let taken_up = node.unfinished.take().filter(|_| node.core.failure().is_none());
            let action = taken_up.or_else(|| node.core.poll(now));
            self.statistics.core += started.elapsed();
            let Some(action) = action else { break };
            let long = matches!(action, Action::Step { .. } | Action::P2pCopy { .. });
            if long && self.scenario.slices && self.rng.random_bool(0.3) {
                let node = &mut self.nodes[p.0 as usize];
                node.core.handle_progress(now, &action);
                node.unfinished = Some(action);
                self.statistics.slices += 1;
                self.wake(p);
                break;
            }
            self.statistics.actions += 1;
            self.act(p, action);
            self.release_staging(p);
            budget -= 1;
            if budget == 0 {
                self.wake(p);
                break;
            }
        }
        self.release_staging(p);
        if !self.nodes[p.0 as usize].inbox.is_empty() {
            self.wake(p);
        }
        let node = &self.nodes[p.0 as usize];
        if node.unfinished.is_none() && node.core.finished() {
            self.nodes[p.0 as usize].closed = true;
            let links = self.nodes[p.0 as usize].all_links();
            self.close_links(p, &links, NOTICE);
        }
        self.arm(p);
    }

    fn arm(&mut self, p: Participant) {
        let node = &mut self.nodes[p.0 as usize];
        if !node.alive || node.closed {
            return;
        }
        if let Some(due) = node.due()
            && node.timer.is_none_or(|timer| due.0 < timer)
        {
            node.timer = Some(due.0);
            self.at(due.0, Event::Timer(p));
        }
    }

    fn take(&mut self, p: Participant, input: Input) {
        let now = Nanos(self.now);
        let node = &mut self.nodes[p.0 as usize];
        match input {
            Input::Call(rank) => self.call(p, rank),
            Input::Message(rank) => self.call_message(p, rank),
            Input::Frame { from, link, message, payload } => match Message::decode(&message) {
                Some((header, control)) => {
                    node.core.handle_frame(now, from, link, header, control, payload);
                    let (queued, most) = node.core.queued(from);
                    assert!(queued <= most || node.core.failure().is_some(), "{queued} messages wait");
                }
                None => assert!(self.scenario.hostile.is_some(), "a message that cannot be decoded"),
            },
            Input::Completed { channel, step } => {
                if channel == node.core.p2p_channel() {
                    node.core.handle_completion(now, channel, step);
                } else if node.failure.is_none() {
                    self.complete_part(p, channel, step);
                    self.nodes[p.0 as usize].core.handle_completion(now, channel, step);
                }
            }
            Input::Down { link, peer } => node.core.handle_link_down(link, peer),
            Input::Change(plan) => node.changes.push_back(*plan),
            Input::LinksUp(epoch) => {
                node.core.handle_links_up(epoch);
                self.all_prepared(epoch);
            }
            Input::AllPrepared(epoch) => node.core.handle_all_prepared(epoch),
            Input::Abandon(epoch) => {
                // It may have been given up by another.
                if node.core.abandon(epoch) {
                    self.retire(p, epoch);
                }
            }
            Input::Left(rank) => {
                self.ranks[rank.0 as usize].gone = true;
                node.core.handle_rank_departed(rank);
            }
            Input::Abort(rank) => node.core.dissolve(Failure::Aborted { rank }),
            Input::Summed(of) => self.take_sum(p, of),
            Input::SessionEnded { epoch, session } => self.session_ended(p, epoch, session),
            Input::Turns(rules) => node.core.set_interleaving(rules),
            Input::TurnGiven(turn) => self.give_turn(p, turn),
            Input::Knocked { epoch, there } => self.knocked(p, epoch, there),
            Input::CopiedOut(channel) => {
                node.copying -= 1;
                node.core.handle_copied_out(now, channel);
            }
        }
    }

    fn prepare(&mut self, p: Participant, plan: EpochPlan) {
        let epoch = plan.epoch;
        let carried = self.scenario.carried_by(epoch, p);
        let ended = self.nodes.iter().any(|node| node.closed);
        let node = &mut self.nodes[p.0 as usize];
        match node.core.handle_plan_change(plan.clone(), &carried) {
            Ok(()) => {
                let today = node.core.link_epoch();
                for peer in (0..self.scenario.group.participants()).map(Participant) {
                    let made = if carried.contains(&peer) { node.link(today, peer) } else { epoch };
                    node.links.insert((epoch, peer.0), made);
                    self.statistics.carried += u64::from(made != epoch);
                }
                node.epochs.insert(epoch);
                if self.scenario.unlinkable.contains(&(epoch, p)) {
                    let at = self.now + self.rng.random_range(0..2 * MILLISECOND);
                    self.at(at, Event::Input(p, Input::Abandon(epoch)));
                    return;
                }
                if carried.len() as u32 + 1 == self.scenario.group.participants() {
                    let at = self.now + self.rng.random_range(0..2 * MILLISECOND);
                    self.at(at, Event::Input(p, Input::LinksUp(epoch)));
                    return;
                }
                // Links come up when both ends have opened them.
                let opened = self.opened.entry(epoch).or_default();
                *opened += 1;
                if *opened == self.nodes.len() && self.nodes.iter().all(|node| node.alive && !node.closed) {
                    for p in (0..self.scenario.group.participants()).map(Participant) {
                        let at = self.now + self.rng.random_range(0..2 * MILLISECOND);
                        self.at(at, Event::Input(p, Input::LinksUp(epoch)));
                    }
                    self.cut(epoch);
                }
            }
            Err(CoreError::Ended(_)) => {}
            // Given up by another before it was begun here: it has no links for it, or those to carry over are gone with one
            // that has ended.
            Err(CoreError::BadPlan(BadPlan::Withdrawn)) if !self.scenario.unlinkable.is_empty() || ended => {}
            Err(CoreError::BadPlan(BadPlan::ChangeUnderWay)) => node.changes.push_front(plan),
            // Whoever had it is gone, which this one will hear.
            Err(CoreError::BadPlan(BadPlan::LinkDown)) => {
                self.give_up(epoch);
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn call(&mut self, p: Participant, rank: Rank) {
        let state = &mut self.ranks[rank.0 as usize];
        state.waits = false;
        if state.gone {
            return;
        }
        let number = OperationId(state.called as u64);
        let act = self.scenario.scripts[rank.0 as usize].acts[state.called];
        let token = Token(u64::from(rank.0) << 32 | number.0);
        let timeout = self.scenario.timeouts[rank.0 as usize];
        let (seed, ranks, signature) = (self.scenario.seed, self.scenario.group.ranks(), act.signature);
        let counts = self.counts(rank, number, &signature);
        let own = counts.as_ref().map(|counts| memory::own_counts(counts, &signature, rank, ranks).into());
        let call = Call { signature, counts: own, in_place: act.in_place, token, timeout };
        match self.nodes[p.0 as usize].core.handle_call(Nanos(self.now), rank, call) {
            Ok(taken) => {
                assert_eq!(taken, number, "rank {rank}'s call got another number");
                self.active = self.now;
                let counts = counts.as_deref();
                let tensor = Tensor::new(seed, number, rank, &signature, ranks, act.in_place, counts);
                self.tensors.insert((rank.0, number), tensor);
                let state = &mut self.ranks[rank.0 as usize];
                state.called += 1;
                state.open.insert(number);
                self.schedule_rank(rank);
            }
            Err(CoreError::Full) => {
                // Another rank is behind; nothing of ours may be open to wake us.
                let at = self.now + MILLISECOND / 4;
                self.ranks[rank.0 as usize].waits = true;
                self.at(at, Event::Input(p, Input::Call(rank)));
            }
            Err(CoreError::Ended(_)) => self.ranks[rank.0 as usize].refused = true,
            Err(error) => panic!("rank {rank}'s call is refused: {error}"),
        }
    }

    /// The counts of an operation, as a rank has them.
    fn counts(&self, rank: Rank, operation: OperationId, signature: &Signature) -> Option<Vec<u64>> {
        let (seed, ranks) = (self.scenario.seed, self.scenario.group.ranks());
        let mut counts = memory::counts(seed, operation, signature, ranks)?;
        if let Some((at, index, liar)) = self.scenario.wrong_count
            && (at, liar) == (operation, rank)
        {
            let count = &mut counts[index as usize];
            *count = if *count == signature.count { 0 } else { signature.count };
        }
        Some(counts)
    }

    fn act(&mut self, p: Participant, action: Action) {
        let index = p.0 as usize;
        match action {
            Action::Step { channel, step, sources, sends } => {
                assert!(self.nodes[index].failure.is_none(), "a step after the end");
                self.active = self.now;
                self.step(p, channel, step, &sources, &sends);
            }
            Action::Post { channel, step, peer, sequence } => {
                assert!(self.nodes[index].failure.is_none(), "a post after the end");
                self.post(p, channel, step, peer, sequence);
            }
            Action::Join { epoch, session } => self.join(p, epoch, session),
            Action::ProbeAggregator { epoch, session } => self.probe_aggregator(p, epoch, session),
            Action::Leave { epoch } => self.quit(p, epoch),
            Action::Aggregate { channel } => self.aggregate(p, channel),
            Action::CopyOut { channel } => self.copy_out(p, channel),
            Action::RequestSlot { slot: turn } => self.ask_turn(p, turn.0),
            Action::ReleaseSlot { slot: turn } => self.end_turn(p, turn.0),
            Action::Send { to, epoch, message } => {
                let node = &self.nodes[index];
                assert!(node.epochs.contains(&epoch), "a message on links of an epoch that is not there");
                assert!(!node.retired.contains(&epoch), "a message on retired links");
                self.send(p, to, epoch, message, None);
            }
            Action::Complete { rank, token, receipt } => self.completed(p, rank, token, &receipt),
            Action::P2pSend { rank, token, offset, step, message } => {
                self.active = self.now;
                self.send_piece(p, (rank, token), offset, step, &message);
            }
            Action::P2pReceive { rank, token, offset, step, message } => {
                self.active = self.now;
                self.store_piece(p, (rank, token), offset, step, &message);
            }
            Action::P2pCopy { from, to, offset, bytes, step } => {
                self.active = self.now;
                self.copy_piece(p, (from, to), (offset, bytes), step);
            }
            Action::P2pComplete { rank, token, receipt } => self.message_ended(rank, token, &receipt),
            Action::Fail { rank, token, operation } => {
                assert!(self.nodes[index].failure.is_some(), "a failure before the end");
                if token.0 & P2P != 0 {
                    return self.message_failed(rank, token);
                }
                assert_eq!(token.0, u64::from(rank.0) << 32 | operation.0);
                self.end_call(rank, operation, Outcome::Failed);
            }
            Action::Ended(failure) => {
                assert!(self.nodes[index].failure.is_none(), "ended twice");
                assert!(self.faulty, "{p:?} fails: {failure}\n{}", self.describe());
                self.statistics.failures += 1;
                let floods = |(_, incident): &&(u64, Incident)| {
                    matches!((incident, &failure), (Incident::Flood { from, to, .. }, Failure::Internal { ranks })
                        if *to == p && ranks.as_slice() == self.scenario.group.local(*from))
                };
                self.statistics.crowded += self.scenario.incidents.iter().filter(floods).count() as u64;
                self.nodes[index].failure = Some((failure, self.now));
                // Links close before a tenant hears of it.
                self.nodes[index].posts.clear();
                let ranks = self.scenario.group.local(p).to_vec();
                ranks.iter().for_each(|rank| self.ranks[rank.0 as usize].refused = true);
            }
            Action::Switched { epoch, segment } => {
                self.statistics.switches += 1;
                self.nodes[index].switched.insert(epoch, segment);
            }
            Action::Retire { epoch } => self.retire(p, epoch),
        }
    }

    fn retire(&mut self, p: Participant, epoch: Epoch) {
        let node = &mut self.nodes[p.0 as usize];
        assert!(node.epochs.remove(&epoch), "epoch {epoch} is retired twice, or was never there");
        node.retired.insert(epoch);
        let closed = node.forget(epoch);
        let open = |link: Epoch, peer: u32| !closed.contains(&(link, Participant(peer)));
        node.landing.retain(|(link, peer, _), _| open(*link, *peer));
        let before = node.posts.len();
        node.posts.retain(|(link, peer, ..), _| open(*link, *peer));
        let over = before == node.posts.len() || self.scenario.hostile.is_some() || node.failure.is_some();
        assert!(over, "a post outlives its epoch");
        let at = self.now + self.rng.random_range(0..2 * MILLISECOND);
        self.at(at, Event::Close(p, closed));
        self.wake(p);
    }

    fn completed(&mut self, p: Participant, rank: Rank, token: Token, receipt: &Receipt) {
        assert!(self.nodes[p.0 as usize].failure.is_none(), "a completion after the end");
        let operation = receipt.operation;
        assert_eq!(token.0, u64::from(rank.0) << 32 | operation.0, "rank {rank}'s completion of {operation}");
        let act = self.scenario.scripts[rank.0 as usize].acts[operation.0 as usize];
        assert_eq!(receipt.signature, act.signature);
        let wire = self.nodes[p.0 as usize].wire.get(&operation).copied().unwrap_or(0);
        assert_eq!(receipt.wire_bytes, wire, "bytes sent for operation {operation}");
        self.check_retained(p, operation);
        self.check_receipt(rank, receipt);
        let posts = &mut self.nodes[p.0 as usize].posts;
        let before = posts.len();
        posts.retain(|_, (post, _)| post.operation != operation);
        let over = before == posts.len() || self.scenario.hostile.is_some();
        assert!(over, "operation {operation} ends with memory posted");
        match receipt.algorithm {
            harmonaize_plan::Algorithm::Ring => {}
            harmonaize_plan::Algorithm::OneShot => self.statistics.one_two_shot[0] += 1,
            harmonaize_plan::Algorithm::TwoShot => self.statistics.one_two_shot[1] += 1,
            harmonaize_plan::Algorithm::RecursiveDoubling => self.statistics.recursive[0] += 1,
            harmonaize_plan::Algorithm::RecursiveHalving => self.statistics.recursive[1] += 1,
            harmonaize_plan::Algorithm::BinomialTree => self.statistics.recursive[2] += 1,
            harmonaize_plan::Algorithm::Hierarchical => self.statistics.recursive[3] += 1,
        }
        self.end_call(rank, operation, Outcome::Complete);
    }

    fn end_call(&mut self, rank: Rank, operation: OperationId, outcome: Outcome) {
        let state = &mut self.ranks[rank.0 as usize];
        assert!(state.open.remove(&operation), "operation {operation} of rank {rank} ends twice");
        let tensor = self.tensors.remove(&(rank.0, operation)).unwrap();
        if outcome == Outcome::Complete {
            self.statistics.operations += 1;
            self.check_output(rank, operation, &tensor);
        }
        let state = &mut self.ranks[rank.0 as usize];
        state.outcomes.insert(operation, (outcome, self.now));
        self.schedule_rank(rank);
    }
}
