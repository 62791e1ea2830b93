//! In which codec a communicator's tensors travel: what its ranks let be lost, and what control chooses within that.
//!
//! The choice is made anew for every epoch, and whenever control plans: where it is another than that of the epoch in use, a new
//! epoch follows that goes on with all links.

use super::communicator::Communicator;
use super::decisions::{Changed, Trigger};
use super::form::Proposal;
use super::replan::{Planned, changed};
use super::session::Abilities;
use super::{Fact, SessionId, State};
use harmonaize_abi::session::Budget as Said;
use harmonaize_api::v1;
use harmonaize_codec::{Budget, BudgetError, Choice, Codec, Controller, Level, Outlook};
use harmonaize_planner::{DirectedLink, HostId, exchange_rate, exchange_usage, line_rate};
use std::collections::BTreeMap;
use std::time::Duration;

/// Bytes of an operation where agents have told of none.
const TYPICAL: u64 = 16 << 20;

/// Larger groups stay exact, and send to nobody but the next: each host would send to very many at once.
pub(super) const MOST_HOSTS: usize = 64;

/// Most codecs of an agent that are looked at.
const MOST_CODECS: usize = 32;

/// Blocks of a tensor that agents look at, of 256 elements each.
const LOOKED: f64 = 32.0;
/// Which blocks are sent, and chunks' headers, for a byte of a tensor.
const PLACES: f64 = 0.001;

/// How the tensors of an epoch travel, and within which budget.
#[derive(Clone, Debug)]
pub(super) struct Chosen {
    pub codec: Codec,
    pub budget: Budget,
    /// In words.
    pub reason: String,
    /// Whether AllToAlls and AllGathers are coded too.
    exchanges: bool,
    /// Whether chunks say what encoders measured.
    measured: bool,
    /// The codec of chunks that lose too much by the other.
    finer: Option<Codec>,
    /// What it was chosen by, where there was something to choose.
    outlook: Option<Outlook>,
    /// How much of a tensor is summed by it in a second, bits; 0 where it is exact, or not known.
    pub speed: u64,
}

impl Chosen {
    /// Nothing is lost, for that is what ranks want.
    pub(super) fn exact() -> Self {
        Self {
            codec: Codec::EXACT,
            budget: Budget::Exact,
            reason: String::new(),
            exchanges: false,
            measured: false,
            finer: None,
            outlook: None,
            speed: 0,
        }
    }

    /// Whether agents are told the same of both.
    fn same(&self, other: &Self) -> bool {
        self.codec == other.codec && self.budget == other.budget
    }

    /// For recipes; none where tensors travel as they are.
    pub(super) fn coding(&self) -> Option<v1::Coding> {
        let coded = self.codec != Codec::EXACT;
        coded.then(|| v1::Coding {
            codec: self.codec.name().to_owned(),
            most: self.budget.most_by(self.codec),
            exchanges: self.exchanges,
            measured: self.measured,
            finer: self.finer.map(|codec| codec.name().to_owned()),
        })
    }

    /// For recipes, so that agents tell it after a restart of control; none where nothing may be lost.
    pub(super) fn budget(&self) -> Option<v1::Budget> {
        (self.budget != Budget::Exact).then(|| (&Said::from(&self.budget)).into())
    }

    /// As an agent's recipe says it.
    fn told(recipe: &v1::Recipe) -> Self {
        let codec = recipe.coding.as_ref().and_then(|coding| Codec::named(&coding.codec));
        let budget = budget(recipe.budget.as_ref()).unwrap_or(Budget::Exact);
        Self {
            codec: codec.unwrap_or(Codec::EXACT),
            budget,
            reason: "as before control restarted".to_owned(),
            exchanges: recipe.coding.as_ref().is_some_and(|coding| coding.exchanges),
            measured: recipe.coding.as_ref().is_some_and(|coding| coding.measured),
            finer: recipe.coding.as_ref().and_then(|coding| Codec::named(coding.finer.as_deref()?)),
            outlook: None,
            speed: 0,
        }
    }
}

/// What a message lets be lost.
///
/// # Errors
/// Where it makes no sense.
pub(super) fn budget(said: Option<&v1::Budget>) -> Result<Budget, BudgetError> {
    Budget::try_from(&said.map_or(Said::Exact, Said::from))
}

/// The codecs that an agent says it takes, with what they take there; the first of each.
pub(super) fn levels(told: &[v1::CodecSpeed]) -> Vec<Level> {
    let mut levels: Vec<Level> = Vec::new();
    for told in told.iter().take(MOST_CODECS) {
        // Aggregators' codes are no chunk's.
        let of_chunks = |codec: &Codec| *codec != Codec::EXACT && *codec != Codec::SHARED4;
        let Some(codec) = Codec::named(&told.codec).filter(of_chunks) else { continue };
        let typical = Level::typical(codec);
        let speed = |told: u64, typical: f64| if told == 0 { typical } else { told as f64 };
        let (encode, decode) = (speed(told.encode, typical.encode), speed(told.decode, typical.decode));
        if levels.iter().all(|known| known.codec != codec) {
            levels.push(Level { encode, decode, ..typical });
        }
    }
    levels
}

/// A communicator's budget and codec.
#[derive(Debug)]
pub(super) struct Coding {
    /// What all ranks wanted last; the next epoch has it.
    agreed: Budget,
    /// What ranks want since, where that is another.
    wanted: BTreeMap<u32, Budget>,
    /// Of the epoch in use.
    pub current: Chosen,
    /// The part of what a host sends that crosses each link where all send to all.
    pub usage: Vec<(DirectedLink, f64)>,
    controller: Controller,
    /// When a change is looked at again that came too soon.
    again: Option<Duration>,
}

impl Coding {
    /// For a communicator that forms.
    pub(super) fn new(agreed: Budget) -> Self {
        Self {
            agreed,
            wanted: BTreeMap::new(),
            current: Chosen::exact(),
            usage: Vec::new(),
            controller: Controller::default(),
            again: None,
        }
    }

    /// What all ranks wanted last.
    pub(super) fn agreed(&self) -> &Budget {
        &self.agreed
    }

    /// For one that outlived a restart of control.
    pub(super) fn recovered(recipe: &v1::Recipe) -> Self {
        let current = Chosen::told(recipe);
        Self { current: current.clone(), ..Self::new(current.budget) }
    }

    /// An agent is in a later epoch than was known.
    pub(super) fn take_up(&mut self, recipe: &v1::Recipe) {
        self.current = Chosen::told(recipe);
        self.agreed = self.current.budget.clone();
    }

    /// An epoch is in use.
    pub(super) fn switched(&mut self, now: Duration, chosen: Chosen) {
        if chosen.codec != self.current.codec {
            self.controller.changed(now);
        }
        self.current = chosen;
    }

    /// What operations told of codecs: loss and bytes over what was predicted.
    pub(super) fn losses(&self) -> impl Iterator<Item = (Codec, f64, f64)> {
        self.controller.learned()
    }

    /// The same from before a restart of control.
    pub(super) fn recall(&mut self, now: Duration, codec: Codec, loss: f64, bytes: f64) {
        self.controller.recall(now, codec, loss, bytes);
    }

    /// An epoch was given up.
    pub(super) fn given_up(&mut self, chosen: &Chosen) {
        if chosen.codec != self.current.codec && chosen.codec != Codec::EXACT {
            self.controller.bar(chosen.codec);
        }
    }
}

impl State {
    /// A rank wants another budget. An error is a breach of protocol.
    pub(super) fn set_budget(
        &mut self,
        now: Duration,
        from: SessionId,
        said: &v1::SetBudget,
    ) -> Result<(), &'static str> {
        let Ok(budget) = budget(said.budget.as_ref()) else { return Err("a budget that makes no sense") };
        let Some((known, index)) = self.part(from, said.communicator)? else { return Ok(()) };
        if !known.members.get(index).is_some_and(|member| member.ranks.contains(&said.rank)) {
            return Err("a budget for a rank of others");
        }
        let (ranks, coding) = (known.ranks, &mut known.coding);
        if budget == coding.agreed {
            coding.wanted.remove(&said.rank);
            return Ok(());
        }
        coding.wanted.insert(said.rank, budget.clone());
        let all =
            coding.wanted.len() == ranks as usize && coding.wanted.values().all(|other| *other == budget);
        if all {
            self.agree_on_budget(now, said.communicator, budget);
        }
        Ok(())
    }

    /// Whether this is what a communicator's ranks let be lost already.
    pub(super) fn has_budget(&self, id: u64, budget: &Budget) -> bool {
        self.communicators.get(&id).is_some_and(|known| known.coding.agreed == *budget)
    }

    /// This budget holds for all ranks from the next epoch on.
    pub(super) fn agree_on_budget(&mut self, now: Duration, id: u64, budget: Budget) {
        let Some(known) = self.communicators.get_mut(&id) else { return };
        known.coding.wanted.clear();
        known.coding.agreed = budget;
        known.coding.controller.unbar();
        self.learn_usage(id);
        self.want_plan(Trigger::Budget);
        if !self.settings.replan {
            self.recode_agreed(now);
        }
    }

    /// Looks at which links a communicator would load.
    pub(super) fn learn_usage(&mut self, id: u64) {
        let Some(known) = self.communicators.get_mut(&id) else { return };
        if known.coding.usage.is_empty() && known.members.len() <= MOST_HOSTS {
            let hosts: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
            known.coding.usage = exchange_usage(&self.settings.topology, &hosts);
        }
    }

    /// How the next epoch of a communicator has its tensors travel, by this plan.
    pub(super) fn choose_coding(&self, now: Duration, id: u64, planned: Option<&Planned>) -> Chosen {
        let Some(known) = self.communicators.get(&id) else { return Chosen::exact() };
        let budget = known.coding.agreed.clone();
        let exact = |reason: &str| (Codec::EXACT, reason.to_owned(), None);
        let controller = &known.coding.controller;
        let (codec, reason, chosen) = if budget == Budget::Exact && !controller.knows(now, Codec::NONZERO) {
            exact("")
        } else if self.sums(id).ordered {
            exact("its tenant wants contributions added in one order")
        } else if budget == Budget::Exact && known.aggregation.grant.is_some() {
            exact("an aggregator sums")
        } else if !self.settings.compression {
            exact("compression is switched off")
        } else if known.members.len() < 2 {
            exact("nothing crosses a wire")
        } else if known.members.len() > MOST_HOSTS {
            exact("too many hosts to send to each other directly")
        } else {
            self.fastest(now, id, known, planned)
        };
        let all = |can: fn(&Abilities) -> bool| {
            let session = |session: Option<SessionId>| self.sessions.get(&session?);
            let mut agents = known.members.iter().map(|member| session(member.session));
            codec != Codec::EXACT && agents.all(|agent| agent.is_some_and(|agent| can(&agent.abilities)))
        };
        let (exchanges, measured) = (all(|can| can.coded_exchanges), all(|can| can.coded_measured));
        let finer = chosen.as_ref().and_then(|(outlook, _)| {
            let levels = self.common_levels(known);
            controller.finer(&budget, codec, &levels, outlook).filter(|_| all(|can| can.coded_finer))
        });
        let (outlook, speed) = chosen.unzip();
        let speed = speed.filter(|_| codec != Codec::EXACT).unwrap_or(0);
        Chosen { codec, budget, reason, exchanges, measured, finer, outlook, speed }
    }

    fn fastest(
        &self,
        now: Duration,
        id: u64,
        known: &Communicator,
        planned: Option<&Planned>,
    ) -> (Codec, String, Option<(Outlook, u64)>) {
        let coding = &known.coding;
        let told = self.rhythms.get(&id).map_or(0, super::rhythms::Operations::bulk);
        let told = if told == 0 { self.hints.bulk(id) } else { told };
        if told > 0 && told <= known.tuning.copy.0 {
            return (Codec::EXACT, format!("operations of {told} bytes are too small to gain"), None);
        }
        let bytes = if told == 0 { TYPICAL } else { told } as f64;
        let hosts = known.members.len() as f64;
        let levels = self.common_levels(known);
        if levels.is_empty() {
            return (Codec::EXACT, "no codec that all agents take".to_owned(), None);
        }
        let conditions = self.estimates.conditions(&self.settings.topology, self.withdrawn());
        let direct = exchange_rate(&coding.usage, &conditions, &self.takers(id)).0 as f64 / 8.0;
        let members: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
        let line = line_rate(&self.settings.topology, &members).0 as f64 / 8.0;
        let rate = planned.map_or(direct, |planned| line / planned.slowdown.max(1.0));
        if rate < 1.0 || direct < 1.0 {
            return (coding.current.codec, "nothing passes now".to_owned(), None);
        }
        let outlook = Outlook {
            wire: 2.0 * (hosts - 1.0) / hosts * bytes,
            encoded: bytes,
            decoded: (2.0 * hosts - 1.0) / hosts * bytes,
            rate,
            coded_rate: direct,
            hidden: self.hidden(id, bytes).as_secs_f64(),
            chunks: bytes / known.tuning.chunk.0.max(1) as f64,
        };
        let current = coding.current.codec;
        let choice = coding.controller.choose(now, &coding.agreed, current, &levels, &outlook);
        let speed = (8.0 * bytes / (choice.time + outlook.hidden).max(1e-9)) as u64;
        (choice.codec, words(choice, bytes), Some((outlook, speed)))
    }

    /// What all agents of a communicator take, each as slow as at the slowest; what an operation loses by it, in which each element
    /// is encoded twice, and where errors of several ranks may be alike.
    pub(super) fn common_levels(&self, known: &Communicator) -> Vec<Level> {
        let session = |session: Option<SessionId>| self.sessions.get(&session?);
        let mut agents = known.members.iter().map(|member| session(member.session));
        let Some(first) = agents.next().flatten() else { return Vec::new() };
        let mut levels = first.abilities.codecs.clone();
        for agent in agents {
            let theirs = agent.map_or(&[][..], |agent| &agent.abilities.codecs);
            levels.retain_mut(|level| {
                let same = theirs.iter().find(|other| other.codec == level.codec);
                same.is_some_and(|other| {
                    (level.encode, level.decode) =
                        (level.encode.min(other.encode), level.decode.min(other.decode));
                    true
                })
            });
        }
        for level in &mut levels {
            level.loss *= if level.codec.is_unbiased() { 2.0 } else { known.members.len() as f64 + 1.0 };
        }
        levels
    }

    /// An agent told of an operation: what it lost and sent is what the next choice goes by.
    pub(super) fn learn_coded(&mut self, now: Duration, told: &v1::Operation) {
        let (Some(coded), Some(known)) = (&told.coded, self.communicators.get(&told.communicator)) else {
            return;
        };
        let of = known.members.len() as f64;
        let exact = 2.0 * (of - 1.0) / of * told.bytes as f64;
        let current = known.coding.current.codec;
        // What ran by several epochs was coded by several codecs; sums of an aggregator's codes say nothing of the hosts'.
        if (told.first_epoch, told.last_epoch) != (known.epoch, known.epoch)
            || exact < 1.0
            || known.aggregation.is_coded()
        {
            return;
        }
        let levels = self.common_levels(known);
        let Some(level) = levels.iter().find(|level| level.codec == current) else { return };
        let (level, ratio) = (*level, (1.0 - coded.saved_bytes as f64 / exact).max(0.0));
        self.learn_level(now, told.communicator, &level, coded.error, ratio);
    }

    /// An agent told of an operation, and how many zeros are in its tensors: by that the next choice goes, until operations in blocks that
    /// are not zeros tell what was saved. Of a dense tensor nothing is learned.
    pub(super) fn learn_zeros(&mut self, now: Duration, told: &v1::Operation) {
        let part = |zeros: Option<u32>| zeros.map(|zeros| 1.0 - (f64::from(zeros) / LOOKED).min(1.0));
        // A host sends what any of its ranks has.
        let sent: Option<f64> = told.ranks.iter().map(|rank| part(rank.zero_input)).sum();
        let sum = told.ranks.first().and_then(|rank| part(rank.zero_output));
        let (Some(sent), Some(sum)) = (sent, sum) else { return };
        let ratio = (sent.min(1.0) + sum) / 2.0 + PLACES;
        let Some(known) = self.communicators.get(&told.communicator) else { return };
        let Coding { controller, current, .. } = &known.coding;
        let dense = !controller.heeds_zeros(now, ratio);
        if dense || current.codec == Codec::NONZERO || !self.settings.compression {
            return;
        }
        let mut levels = self.common_levels(known).into_iter();
        let Some(level) = levels.find(|level| level.codec == Codec::NONZERO) else { return };
        self.learn_level(now, told.communicator, &level, 0.0, ratio);
    }

    /// What an operation by this level came to, or would have: the choice is made anew where it is another now.
    fn learn_level(&mut self, now: Duration, communicator: u64, level: &Level, loss: f64, ratio: f64) {
        let Some(known) = self.communicators.get_mut(&communicator) else { return };
        let current = known.coding.current.codec;
        if known.coding.controller.told(now, level, loss, ratio) {
            self.fact(Fact::LossLearned { communicator, codec: level.codec.name() });
        }
        let Some(known) = self.communicators.get(&communicator) else { return };
        let chosen = self.choose_coding(now, communicator, known.plan.as_ref());
        if chosen.codec != current && known.phase() == v1::Phase::Running {
            self.want_plan(Trigger::Losses);
        }
    }

    /// How many other communicators use each link along their rings.
    pub(super) fn takers(&self, id: u64) -> BTreeMap<DirectedLink, u32> {
        let mut takers = BTreeMap::new();
        for (_, known) in self.communicators.iter().filter(|(other, _)| **other != id) {
            let hops = self.hops(known, &known.order, &known.links);
            let links = hops.iter().filter_map(|hop| hop.paths.first()).flat_map(|path| path.links());
            for link in links {
                *takers.entry(*link).or_default() += 1;
            }
        }
        takers
    }

    /// Has communicators whose codec is not the best any more, or whose ranks agreed on another budget, go on by another epoch with
    /// the links that they have.
    pub(super) fn recode(&mut self, now: Duration, number: u64, changes: &mut Vec<Changed>) {
        for id in self.coded() {
            let Some(known) = self.communicators.get(&id) else { continue };
            let chosen = self.choose_coding(now, id, known.plan.as_ref());
            let until = known.coding.controller.again(now);
            let same = chosen.same(&known.coding.current);
            let Some(known) = self.communicators.get_mut(&id) else { continue };
            known.coding.again = until.filter(|_| same);
            if let Some(outlook) = &chosen.outlook {
                known.coding.controller.saw(now, outlook);
            }
            if same {
                known.coding.current.reason = chosen.reason;
                continue;
            }
            let reason = match chosen.budget == known.coding.current.budget {
                true => format!("{}: {}", chosen.codec.name(), chosen.reason),
                false => {
                    format!("the budget is {} now; {}: {}", chosen.budget, chosen.codec.name(), chosen.reason)
                }
            };
            let epoch = self.propose_same(now, id, Some(number));
            changes.push(changed(id, epoch, &reason, now));
        }
    }

    /// The same where control does not plan: for what ranks agreed on alone.
    pub(super) fn recode_agreed(&mut self, now: Duration) {
        let due = self.coded().into_iter().filter(|id| {
            let known = self.communicators.get(id);
            known.is_some_and(|known| known.coding.agreed != known.coding.current.budget)
        });
        for id in due.collect::<Vec<_>>() {
            self.propose_same(now, id, None);
        }
    }

    pub(super) fn propose_same(&mut self, now: Duration, id: u64, decision: Option<u64>) -> u64 {
        let Some(known) = self.communicators.get(&id) else { return 0 };
        let (order, plan) = (known.order.clone(), known.plan.clone());
        let hops = self.hops(known, &order, &known.links);
        self.propose(now, id, Proposal { order, hops, plan, decision, same_links: true })
    }

    /// Communicators whose epoch can change now, and whose ranks let something be lost or did, or whose tensors have zeros.
    fn coded(&self) -> Vec<u64> {
        let can = |known: &Communicator| {
            let Coding { agreed, current, controller, .. } = &known.coding;
            let lossy = [agreed, &current.budget].into_iter().any(|budget| *budget != Budget::Exact);
            known.phase() == v1::Phase::Running
                && known.held_off.is_none()
                && (lossy || current.codec != Codec::EXACT || controller.learned().next().is_some())
        };
        self.communicators.iter().filter(|(_, known)| can(known)).map(|(id, _)| *id).collect()
    }

    /// When changes are looked at again that came too soon.
    pub(super) fn coding_deadline(&self) -> Option<Duration> {
        self.communicators.values().filter_map(|known| known.coding.again).min()
    }

    /// Looks at them again.
    pub(super) fn expire_codings(&mut self, now: Duration) {
        let mut due = false;
        for known in self.communicators.values_mut() {
            due |= known.coding.again.take_if(|at| *at <= now).is_some();
        }
        if due {
            self.want_plan(Trigger::Settled);
        }
    }
}

/// Why a codec, in words.
fn words(choice: Choice, bytes: f64) -> String {
    let Choice { codec, time, exact } = choice;
    let (time, exact, bytes) = (time * 1e3, exact * 1e3, bytes / f64::from(1 << 20));
    match codec {
        Codec::EXACT if exact <= 0.0 => "operations end before the tenant waits for them".to_owned(),
        Codec::EXACT => format!("nothing within the budget is faster than {exact:.3} ms for {bytes:.1} MiB"),
        _ => format!("{time:.3} ms for {bytes:.1} MiB, which take {exact:.3} ms exact"),
    }
}
