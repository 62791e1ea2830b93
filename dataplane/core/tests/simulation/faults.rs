//! What may go wrong, as variations of a scenario.

use super::scenario::{
    Act, Incident, MICROSECOND, MILLISECOND, SECOND, Scenario, Script, Weather, another_plan, any_reduce,
    any_signature, generator,
};
use harmonaize_abi::{Collective, Dtype, OperationId, Rank, ReduceOp, Signature};
use harmonaize_aggregator::PayloadFormat;
use harmonaize_core::Aggregation;
use harmonaize_plan::{Access, Participant, Tuning};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use std::time::Duration;

/// Some time at which operations are under way, soon or late.
fn any_time(rng: &mut ChaCha8Rng) -> u64 {
    (MILLISECOND / 16 * rng.random_range(0..16)) << rng.random_range(0..6)
}

impl Scenario {
    /// Several changes of plan.
    pub(crate) fn changing(mut self) -> Self {
        let mut rng = generator(self.seed, 3);
        if rng.random_bool(0.5) {
            self = self.rough();
        }
        let mut at = any_time(&mut rng) / 2;
        let mut epoch = self.plan.epoch;
        for _ in 0..rng.random_range(1..=4) {
            epoch.0 += rng.random_range(1..3);
            let plan = another_plan(&mut rng, &self.plan, epoch);
            self.incidents.push((at, Incident::Change(Box::new(plan))));
            at += any_time(&mut rng) / 2;
        }
        self
    }

    /// AllReduces by an aggregator, in this plan and in most of those that follow. A faulty aggregator dies and
    /// comes back.
    pub(crate) fn aggregating(mut self, faulty: bool) -> Self {
        let mut rng = generator(self.seed, 31);
        let dtype = [Dtype::U32, Dtype::U64, Dtype::F32][rng.random_range(0..3)];
        let others = generator(self.seed, 37).random_bool(0.5);
        let aggregation = |rng: &mut ChaCha8Rng| Aggregation {
            format: PayloadFormat::Tensor { dtype, op: ReduceOp::Sum },
            min_bytes: [0, 0, 200][rng.random_range(0..3)],
            eager: rng.random_bool(0.8),
            broadcast_bytes: [None, Some([0, 300]), Some([100, 1 << 20])][rng.random_range(0..3)],
            barriers: rng.random_bool(0.7),
            backoff: Duration::from_nanos([100, 2000][rng.random_range(0..2)] * MICROSECOND),
            max_backoff: Duration::from_nanos(20 * MILLISECOND),
        };
        self.plan.aggregation = Some(aggregation(&mut rng));
        for (_, incident) in &mut self.incidents {
            if let Incident::Change(plan) = incident {
                plan.aggregation = rng.random_bool(0.8).then(|| aggregation(&mut rng));
            }
        }
        for at in 0..self.scripts[0].acts.len() {
            let taken = rng.random_bool(0.7);
            let reduce = if rng.random_bool(0.3) { ReduceOp::Average } else { ReduceOp::Sum };
            let (dtype, reduce) = match others && rng.random_bool(0.4) {
                true => {
                    let dtype = [Dtype::U8, Dtype::U32, Dtype::U64, Dtype::F32][rng.random_range(0..4)];
                    (dtype, any_reduce(&mut rng, dtype))
                }
                false => (dtype, reduce),
            };
            for (rank, script) in (0..).map(Rank).zip(&mut self.scripts) {
                let Some(act) = script.acts.get_mut(at) else { continue };
                let collective = act.signature.collective;
                if !taken {
                    // Half of what is never aggregated makes way for what may be.
                    if collective.traits().aggregator.is_none() && at % 2 == 0 {
                        (act.signature.collective, act.signature.reduce) =
                            (Collective::Broadcast, ReduceOp::Sum);
                        act.signature.uneven = false;
                        act.in_place &= rank == act.signature.root;
                    }
                    continue;
                }
                let bytes = act.signature.count * act.signature.dtype.size() as u64;
                (act.signature.collective, act.signature.reduce) = (Collective::AllReduce, reduce);
                (act.signature.dtype, act.signature.root) = (dtype, Rank(0));
                act.signature.uneven = false;
                act.signature.count = (bytes / dtype.size() as u64).min(600);
            }
        }
        for _ in 0..if faulty { rng.random_range(1..6) } else { 0 } {
            let at = any_time(&mut rng) / [1, 8][rng.random_range(0..2)];
            let incident = match rng.random_range(0..3) {
                0 => Incident::Despair,
                kind => Incident::Aggregator { dead: kind == 1 },
            };
            self.incidents.push((at, incident));
        }
        self
    }

    /// Other processes go on as participants.
    pub(crate) fn succeeding(mut self) -> Self {
        let mut rng = generator(self.seed, 41);
        for _ in 0..rng.random_range(1..6) {
            let at = any_time(&mut rng) / [1, 8][rng.random_range(0..2)];
            self.incidents.push((at, Incident::Succeed));
        }
        self
    }

    /// One AllReduce of a second or more by the hosts, with an aggregator or without; times are an agent's.
    pub(crate) fn long(mut self, aggregated: bool) -> Self {
        self.plan.tuning = Tuning { segment_bytes: 4096, copy_bytes: 0, ..self.plan.tuning };
        (self.plan.tuning.chunk_bytes, self.plan.tuning.message_bytes) = (512, 512);
        (self.plan.channels, self.plan.landing_slots, self.operations) = (4, 2, 1);
        self.access.fill(Access::Mapped);
        self.weather = Weather { delay: 5 * MILLISECOND, stalls: 0.0, stall: 0 };
        let signature = Signature {
            collective: Collective::AllReduce,
            dtype: Dtype::U32,
            reduce: ReduceOp::Sum,
            root: Rank(0),
            count: 200_000,
            uneven: false,
        };
        let act = Act { signature, in_place: true };
        self.scripts.fill(Script { acts: vec![act], leaves: true, depth: 1, think: 0 });
        self.silence = 150 * MILLISECOND..190 * MILLISECOND;
        self.plan.aggregation = aggregated.then_some(Aggregation {
            format: PayloadFormat::Tensor { dtype: Dtype::U32, op: ReduceOp::Sum },
            min_bytes: 1,
            eager: false,
            broadcast_bytes: None,
            barriers: false,
            backoff: Duration::from_nanos(100 * MILLISECOND),
            max_backoff: Duration::from_nanos(30 * SECOND),
        });
        self
    }

    /// Changes keep some of the links that are there, or all.
    pub(crate) fn carrying(mut self) -> Self {
        let mut rng = generator(self.seed, 11);
        let all = self.group.participants();
        for (_, incident) in &mut self.incidents {
            let Incident::Change(plan) = incident else { continue };
            plan.landing_slots = self.plan.landing_slots;
            let share = [0.0, 0.3, 0.7, 1.0][rng.random_range(0..4)];
            for low in 0..all {
                for high in low + 1..all {
                    if rng.random_bool(share) {
                        self.carried.push((plan.epoch, Participant(low), Participant(high)));
                    }
                }
            }
        }
        self
    }

    /// A new link of each change breaks.
    pub(crate) fn cutting(mut self) -> Self {
        let mut rng = generator(self.seed, 12);
        let all = self.group.participants();
        for (_, incident) in &self.incidents {
            let Incident::Change(plan) = incident else { continue };
            let low = rng.random_range(0..all);
            let high = rng.random_range(low..all);
            self.cut.push((plan.epoch, Participant(low), Participant(high)));
        }
        self
    }

    /// Changes of plan beside whatever else, in every other seed.
    pub(crate) fn sometimes_changing(self) -> Self {
        match self.seed % 4 {
            0 | 2 => self,
            1 => self.changing(),
            _ => self.changing().carrying(),
        }
    }

    /// Some of the changes cannot be prepared by somebody.
    pub(crate) fn unlinkable(mut self) -> Self {
        let mut rng = generator(self.seed, 4);
        for (_, incident) in &self.incidents {
            if let Incident::Change(plan) = incident
                && rng.random_bool(0.6)
            {
                for _ in 0..rng.random_range(1..=2) {
                    let participant = Participant(rng.random_range(0..self.group.participants()));
                    self.unlinkable.push((plan.epoch, participant));
                }
            }
        }
        self
    }

    /// One participant dies, or two.
    pub(crate) fn killing(mut self) -> Self {
        let mut rng = generator(self.seed, 5);
        for _ in 0..if self.group.participants() > 3 && rng.random_bool(0.3) { 2 } else { 1 } {
            let victim = Participant(rng.random_range(0..self.group.participants()));
            let at = any_time(&mut rng);
            self.incidents.push((at, Incident::Kill(victim)));
        }
        self
    }

    fn impatient(&mut self) {
        self.timeouts.fill(Duration::from_nanos(500 * MILLISECOND));
        self.inquiry = Duration::from_nanos(100 * MILLISECOND);
    }

    /// Some ranks never call some operation, nor any later one.
    pub(crate) fn silent(mut self) -> Self {
        let mut rng = generator(self.seed, 6);
        if rng.random_bool(0.5) {
            self = self.rough();
        }
        self.impatient();
        let first = rng.random_range(0..self.scripts[0].acts.len());
        let most = (self.group.ranks() - 1).min(3);
        for _ in 0..rng.random_range(1..=most) {
            let rank = rng.random_range(0..self.group.ranks()) as usize;
            self.scripts[rank].acts.truncate(first);
            self.scripts[rank].leaves = false;
        }
        self
    }

    /// Each rank has a patience of its own, up to the usual one.
    pub(crate) fn differently_patient(mut self) -> Self {
        let mut rng = generator(self.seed, 31);
        for timeout in &mut self.timeouts {
            *timeout = timeout.mul_f64(rng.random_range(0.5..=1.0));
        }
        self
    }

    /// Ranks abort, one or several, at any time.
    pub(crate) fn aborting(mut self) -> Self {
        let mut rng = generator(self.seed, 32);
        for _ in 0..rng.random_range(1..=2) {
            let rank = Rank(rng.random_range(0..self.group.ranks()));
            let at = any_time(&mut rng);
            self.incidents.push((at, Incident::Abort(rank)));
        }
        self
    }

    /// A clean scenario in which ranks have somebody to wait for.
    pub(crate) fn of_two_ranks(seed: u64) -> Self {
        let any = Self::new(seed, 1);
        if any.group.ranks() < 2 { Self::new(seed, 2) } else { any }
    }

    /// Some ranks call something else as some operation.
    pub(crate) fn mismatched(mut self) -> Self {
        let mut rng = generator(self.seed, 7);
        if rng.random_bool(0.5) {
            self = self.rough();
        }
        self.impatient();
        if self.seed.is_multiple_of(2) {
            // They learn of it long before a time-out.
            self.timeouts.fill(Duration::from_secs(600));
        }
        let first = rng.random_range(0..self.scripts[0].acts.len());
        let right = self.scripts[0].acts[first].signature;
        let wrong = self.another_signature(&mut rng, &right);
        let ranks: Vec<Rank> = match rng.random_range(0..3) {
            0 => vec![Rank(rng.random_range(0..self.group.ranks()))],
            1 if self.group.participants() > 1 => {
                let home = Participant(rng.random_range(0..self.group.participants()));
                self.group.local(home).to_vec()
            }
            _ => {
                let most = rng.random_range(1..self.group.ranks());
                (0..most).map(Rank).collect()
            }
        };
        for rank in ranks {
            let act = &mut self.scripts[rank.0 as usize].acts[first];
            act.signature = wrong;
            act.in_place &= wrong.collective.shared_block(rank, wrong.root).is_some();
        }
        self
    }

    /// One uneven operation, in which one count is wrong. A rank says something else of it than the one that has the
    /// block or gets it.
    pub(crate) fn with_a_wrong_count(mut self) -> Self {
        let mut rng = generator(self.seed, 38);
        if rng.random_bool(0.5) {
            self = self.rough();
        }
        self.impatient();
        // Nobody forgets what it said.
        self.operations = self.scripts[0].acts.len();
        let ranks = self.group.ranks();
        let at = rng.random_range(0..self.scripts[0].acts.len());
        let uneven: Vec<Collective> =
            Collective::ALL.iter().copied().filter(|collective| collective.can_be_uneven()).collect();
        let collective = uneven[rng.random_range(0..uneven.len())];
        let root = Rank(if collective.is_rooted() { rng.random_range(0..ranks) } else { 0 });
        let signature = Signature {
            collective,
            dtype: Dtype::U32,
            reduce: ReduceOp::Sum,
            root,
            count: rng.random_range(1..200),
            uneven: true,
        };
        for script in &mut self.scripts {
            script.acts[at] = Act { signature, in_place: false };
        }
        let block = rng.random_range(0..ranks);
        let other = (block + rng.random_range(1..ranks)) % ranks;
        let (index, liar) = match collective {
            // Of a pair, either end.
            Collective::AllToAll => (block * ranks + other, Rank([block, other][rng.random_range(0..2)])),
            // Who gets it, or gives it: the root.
            Collective::Gather | Collective::Scatter if block == root.0 => (other, root),
            Collective::Gather | Collective::Scatter => (block, [Rank(block), root][rng.random_range(0..2)]),
            _ => (block, Rank(other)),
        };
        self.wrong_count = Some((OperationId(at as u64), index, liar));
        self
    }

    fn another_signature(&self, rng: &mut ChaCha8Rng, right: &Signature) -> Signature {
        loop {
            let mut wrong = *right;
            match rng.random_range(0..4) {
                0 => wrong.count = rng.random_range(0..300),
                1 if right.collective.reduces() => {
                    wrong.reduce = any_reduce(rng, right.dtype);
                }
                2 if right.collective.is_rooted() => {
                    wrong.root = Rank(rng.random_range(0..self.group.ranks()));
                }
                _ => wrong = any_signature(rng, &self.plan),
            }
            let barrier = !wrong.collective.has_data() && wrong.count > 0;
            if wrong != *right && !barrier {
                return wrong;
            }
        }
    }

    /// A rank leaves in good order after some operation; the others call more.
    pub(crate) fn leaving(mut self) -> Self {
        let mut rng = generator(self.seed, 8);
        let keep = rng.random_range(0..self.scripts[0].acts.len());
        let rank = rng.random_range(0..self.group.ranks()) as usize;
        self.scripts[rank].acts.truncate(keep);
        self
    }

    /// A rank's process dies at any time.
    pub(crate) fn rank_dying(mut self) -> Self {
        let mut rng = generator(self.seed, 9);
        let rank = Rank(rng.random_range(0..self.group.ranks()));
        let at = any_time(&mut rng);
        self.incidents.push((at, Incident::RankGone(rank)));
        self
    }

    /// A participant asks on and on, and reads nothing.
    pub(crate) fn flooding(mut self) -> Self {
        let mut rng = generator(self.seed, 39);
        self.impatient();
        let all = self.group.participants();
        let from = Participant(rng.random_range(0..all));
        let to = Participant((from.0 + rng.random_range(1..all)) % all);
        self.hostile = Some(from);
        let questions = rng.random_range(1..2000);
        self.incidents.push((any_time(&mut rng) / 4, Incident::Flood { from, to, questions }));
        self
    }

    /// A participant sends wrong headers and frames out of nowhere.
    pub(crate) fn hostile(mut self) -> Self {
        let mut rng = generator(self.seed, 10);
        self.impatient();
        let hostile = Participant(rng.random_range(0..self.group.participants()));
        self.hostile = Some(hostile);
        if rng.random_bool(0.3) {
            self = self.changing();
        }
        for _ in 0..rng.random_range(0..12) {
            let at = any_time(&mut rng) / 4;
            self.incidents.push((at, Incident::Inject(hostile)));
        }
        self
    }
}
