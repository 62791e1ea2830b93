//! In which codec a communicator's tensors travel: what its ranks let be lost, and what control chooses within that.
//!
//! The choice is made anew for every epoch, and whenever control plans: where it is another than that of the epoch in use, a new
//! epoch follows that goes on with all links.

use super::codec::{CodecChoice, budget};
use super::communicator::Communicator;
use super::decisions::Trigger;
use super::lifecycle::{EpochConfig, Planned};
use super::reason::Reason;
use super::{Fact, SessionId, State};
use harmonaize_api::v1;
use harmonaize_codec::{Budget, Choice, Codec, Level, Outlook};
use harmonaize_planner::{DirectedLink, HostId, exchange_rate, exchange_usage, line_rate};
use std::collections::BTreeMap;
use std::time::Duration;

/// Bytes of an operation where agents have told of none.
const TYPICAL: u64 = 16 << 20;

/// Larger groups stay exact, and send to nobody but the next: each host would send to very many at once.
pub(super) const MOST_HOSTS: usize = 64;

/// Blocks of a tensor that agents look at, of 256 elements each.
const LOOKED: f64 = 32.0;
/// Which blocks are sent, and chunks' headers, for a byte of a tensor.
const PLACES: f64 = 0.001;

impl Communicator {
    /// Whether its ranks let something be lost or did, or its tensors have zeros.
    fn is_coded(&self) -> bool {
        let Some(current) = self.current() else { return false };
        let super::codec::CodecState { agreed, controller, .. } = &self.coding;
        let lossy = [agreed, &current.codec.budget].into_iter().any(|budget| *budget != Budget::Exact);
        lossy || current.codec.codec != Codec::EXACT || controller.learned().next().is_some()
    }
}

impl State {
    /// A rank wants another budget. An error is a breach of protocol.
    pub(super) fn set_budget(&mut self, from: SessionId, said: &v1::SetBudget) -> Result<(), &'static str> {
        let Ok(budget) = budget(said.budget.as_ref()) else { return Err("a budget that makes no sense") };
        let Some((known, index)) = self.part(from, said.communicator)? else { return Ok(()) };
        if !known.members.get(index).is_some_and(|member| member.ranks.contains(&said.rank)) {
            return Err("a budget for a rank of others");
        }
        let (ranks, coding) = (known.ranks, &mut known.coding);
        if budget == coding.agreed {
            coding.budgets.remove(&said.rank);
            return Ok(());
        }
        coding.budgets.insert(said.rank, budget.clone());
        let all =
            coding.budgets.len() == ranks as usize && coding.budgets.values().all(|other| *other == budget);
        if all {
            self.agree_on_budget(said.communicator, budget);
        }
        Ok(())
    }

    /// Whether this is what a communicator's ranks let be lost already.
    pub(super) fn has_budget(&self, id: u64, budget: &Budget) -> bool {
        self.communicators.get(&id).is_some_and(|known| known.coding.agreed == *budget)
    }

    /// This budget holds for all ranks from the next epoch on.
    pub(super) fn agree_on_budget(&mut self, id: u64, budget: Budget) {
        let Some(known) = self.communicators.get_mut(&id) else { return };
        known.coding.budgets.clear();
        known.coding.agreed = budget;
        known.coding.controller.unbar();
        self.learn_usage(id);
        self.want_plan(Trigger::Budget);
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
    pub(super) fn choose_coding(&self, now: Duration, id: u64, planned: Option<&Planned>) -> CodecChoice {
        let Some(known) = self.communicators.get(&id) else { return CodecChoice::exact() };
        let budget = known.coding.agreed.clone();
        let exact = |reason: &str| (Codec::EXACT, reason.to_owned(), None);
        let controller = &known.coding.controller;
        let (codec, reason, chosen) =
            if budget == Budget::Exact && !controller.has_learned(now, Codec::NonzeroBlocks) {
                exact("")
            } else if self.reduction_policy(id).ordered {
                exact("its tenant wants contributions added in one order")
            } else if budget == Budget::Exact
                && known.current().is_some_and(|current| current.aggregation.grant.is_some())
            {
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
        let finer = chosen
            .as_ref()
            .filter(|_| codec != Codec::EXACT)
            .and_then(|(outlook, _)| controller.finer(&budget, codec, &self.common_levels(known), outlook));
        let (outlook, speed) = chosen.unzip();
        let speed = speed.filter(|_| codec != Codec::EXACT).unwrap_or(0);
        CodecChoice { codec, budget, reason, finer, outlook, speed }
    }

    fn fastest(
        &self,
        now: Duration,
        id: u64,
        communicator: &Communicator,
        planned: Option<&Planned>,
    ) -> (Codec, String, Option<(Outlook, u64)>) {
        let coding = &communicator.coding;
        let told = self.rhythms.get(&id).map_or(0, super::iterations::Operations::dominant_bytes);
        let told = if told == 0 { self.hints.dominant_bytes(id) } else { told };
        if told > 0 && told <= communicator.tuning.copy_threshold.0 {
            return (Codec::EXACT, format!("operations of {told} bytes are too small to gain"), None);
        }
        let bytes = if told == 0 { TYPICAL } else { told } as f64;
        let hosts = communicator.members.len() as f64;
        let levels = self.common_levels(communicator);
        if levels.is_empty() {
            return (Codec::EXACT, "no codec that all agents take".to_owned(), None);
        }
        let conditions = self.conditions();
        let direct = exchange_rate(&coding.usage, &conditions, &self.takers(id)).0 as f64 / 8.0;
        let members: Vec<HostId> = communicator.members.iter().map(|member| member.host).collect();
        let line = line_rate(&self.settings.topology, &members).0 as f64 / 8.0;
        let rate = planned.map_or(direct, |planned| line / planned.slowdown.max(1.0));
        if rate < 1.0 || direct < 1.0 {
            return (communicator.codec(), "nothing passes now".to_owned(), None);
        }
        let outlook = Outlook {
            wire: 2.0 * (hosts - 1.0) / hosts * bytes,
            encoded: bytes,
            decoded: (2.0 * hosts - 1.0) / hosts * bytes,
            rate,
            coded_rate: direct,
            overlapped: self.overlapped(id, bytes).as_secs_f64(),
            chunks: bytes / communicator.tuning.chunk.0.max(1) as f64,
        };
        let current = communicator.codec();
        let choice = coding.controller.choose(now, &coding.agreed, current, &levels, &outlook);
        let speed = (8.0 * bytes / (choice.time + outlook.overlapped).max(1e-9)) as u64;
        (choice.codec, describe_choice(choice, bytes), Some((outlook, speed)))
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
        let (Some(coded), Some(known)) = (&told.compression, self.communicators.get(&told.communicator))
        else {
            return;
        };
        let of = known.members.len() as f64;
        let exact = 2.0 * (of - 1.0) / of * told.bytes as f64;
        let Some(EpochConfig { epoch, codec: CodecChoice { codec: current, .. }, aggregation, .. }) =
            known.current()
        else {
            return;
        };
        // What ran by several epochs was coded by several codecs; sums of an aggregator's codes say nothing of the hosts'.
        if (told.first_epoch, told.last_epoch) != (*epoch, *epoch) || exact < 1.0 || aggregation.is_coded() {
            return;
        }
        let levels = self.common_levels(known);
        let Some(level) = levels.iter().find(|level| level.codec == *current) else { return };
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
        let dense = !known.coding.controller.heeds_zeros(now, ratio);
        if dense || known.codec() == Codec::NonzeroBlocks || !self.settings.compression {
            return;
        }
        let mut levels = self.common_levels(known).into_iter();
        let Some(level) = levels.find(|level| level.codec == Codec::NonzeroBlocks) else { return };
        self.learn_level(now, told.communicator, &level, 0.0, ratio);
    }

    /// What an operation by this level came to, or would have: the choice is made anew where it is another now.
    fn learn_level(&mut self, now: Duration, communicator: u64, level: &Level, loss: f64, ratio: f64) {
        let Some(known) = self.communicators.get_mut(&communicator) else { return };
        let current = known.codec();
        if known.coding.controller.handle_outcome(now, level, loss, ratio) {
            self.fact(Fact::LossLearned { communicator, codec: level.codec.name() });
        }
        let Some(known) = self.communicators.get(&communicator) else { return };
        let plan = known.current().and_then(|current| current.plan.as_ref());
        let chosen = self.choose_coding(now, communicator, plan);
        if chosen.codec != current && known.phase() == v1::Phase::Running {
            self.want_plan(Trigger::Losses);
        }
    }

    /// How many other communicators use each link along their rings.
    pub(super) fn takers(&self, id: u64) -> BTreeMap<DirectedLink, u32> {
        let mut takers = BTreeMap::new();
        for (_, known) in self.communicators.iter().filter(|(other, _)| **other != id) {
            let hops = known.current().map_or_else(Vec::new, |current| self.link_state.hops(known, current));
            let links = hops.iter().filter_map(|hop| hop.paths.first()).flat_map(|path| path.links());
            for link in links {
                *takers.entry(*link).or_default() += 1;
            }
        }
        takers
    }

    /// Whether another codec is the best now, or the ranks agreed on another budget. What was found is remembered.
    pub(super) fn other_codec(&mut self, now: Duration, id: u64) -> Option<Reason> {
        let known = self.communicators.get(&id).filter(|known| known.is_coded())?;
        let chosen = self.choose_coding(now, id, known.current()?.plan.as_ref());
        let known = self.communicators.get_mut(&id)?;
        let current = &mut known.lifecycle.current_mut()?.codec;
        let same = chosen.same(current);
        known.coding.again = known.coding.controller.retry_at(now).filter(|_| same);
        if let Some(outlook) = &chosen.outlook {
            known.coding.controller.handle_outlook(now, outlook);
        }
        if same {
            current.reason = chosen.reason;
            return None;
        }
        Some(chosen.reason_after(current))
    }

    /// Whether the ranks agreed on another budget.
    pub(super) fn other_budget(&self, now: Duration, id: u64) -> Option<Reason> {
        let known = self.communicators.get(&id).filter(|known| known.is_coded())?;
        let current = known.current()?;
        if known.coding.agreed == current.codec.budget {
            return None;
        }
        let chosen = self.choose_coding(now, id, current.plan.as_ref());
        Some(chosen.reason_after(&current.codec))
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
fn describe_choice(choice: Choice, bytes: f64) -> String {
    let Choice { codec, time, exact } = choice;
    let (time, exact, bytes) = (time * 1e3, exact * 1e3, bytes / f64::from(1 << 20));
    match codec {
        Codec::EXACT if exact <= 0.0 => "operations end before the tenant waits for them".to_owned(),
        Codec::EXACT => format!("nothing within the budget is faster than {exact:.3} ms for {bytes:.1} MiB"),
        _ => format!("{time:.3} ms for {bytes:.1} MiB, which take {exact:.3} ms exact"),
    }
}
