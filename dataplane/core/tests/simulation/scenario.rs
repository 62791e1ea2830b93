//! What a seed stands for: a group of participants, a plan, what each rank calls, how the network behaves.

use super::p2p::P2pScript;
use harmonaize_abi::{Collective, Dtype, Epoch, OperationId, Pattern, Rank, ReduceOp, Signature};
use harmonaize_core::{EpochPlan, Interleaving};
use harmonaize_plan::{
    Access, Algorithm, AlgorithmRange, AlgorithmTable, Group, Participant, Plan, Tuning, segmentation,
};
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Duration;

pub(crate) const MICROSECOND: u64 = 1_000;
pub(crate) const MILLISECOND: u64 = 1_000_000;
pub(crate) const SECOND: u64 = 1_000_000_000;

/// The nanoseconds of a duration.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap()
}

/// How slow things are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weather {
    /// Longest delay of a frame, of a completion and of a participant's turn, in nanoseconds.
    pub(crate) delay: u64,
    /// How often, and for how long at most, a connection or a participant stands still.
    pub(crate) stalls: f64,
    pub(crate) stall: u64,
}

/// One call of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Act {
    pub(crate) signature: Signature,
    pub(crate) in_place: bool,
}

/// What a rank does, in order, and whether it leaves afterwards.
#[derive(Clone, Debug, Default)]
pub(crate) struct Script {
    pub(crate) acts: Vec<Act>,
    pub(crate) leaves: bool,
    /// Calls in flight at once.
    pub(crate) depth: usize,
    /// Longest pause between calls.
    pub(crate) think: u64,
}

/// Something that goes wrong, or changes, at a time.
#[derive(Clone, Debug)]
pub(crate) enum Incident {
    /// Control decides on a plan.
    Change(Box<EpochPlan>),
    /// A participant's host is gone.
    Kill(Participant),
    /// A rank's process is gone.
    RankGone(Rank),
    /// A rank aborts.
    Abort(Rank),
    /// A peer sends what it likes.
    Inject(Participant),
    /// A peer asks so often, and for some time nothing can be sent where it asks.
    Flood { from: Participant, to: Participant, questions: u32 },
    /// The aggregator dies, or comes back.
    Aggregator { dead: bool },
    /// Somebody gives its sessions with the aggregator up.
    Despair,
    /// Another process goes on as one of the participants.
    Succeed,
    /// A participant takes turns by these rules from now on, or none.
    Turns(Participant, Option<Interleaving>),
}

#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) group: Group,
    /// By rank.
    pub(crate) access: Vec<Access>,
    pub(crate) plan: EpochPlan,
    /// Connections of each link.
    pub(crate) paths: u16,
    pub(crate) operations: usize,
    pub(crate) weather: Weather,
    /// By rank: of its calls.
    pub(crate) timeouts: Vec<Duration>,
    /// The longest that an inquiry takes.
    pub(crate) inquiry: Duration,
    /// By rank.
    pub(crate) scripts: Vec<Script>,
    pub(crate) incidents: Vec<(u64, Incident)>,
    /// Participants that do not keep to the protocol; nothing is asserted of data.
    pub(crate) hostile: Option<Participant>,
    /// The operation, the number of one of its counts, and who says something else of it than all others.
    pub(crate) wrong_count: Option<(OperationId, u32, Rank)>,
    /// No new plan can be prepared by this participant: its links do not come up, and it gives up.
    pub(crate) unlinkable: Vec<(Epoch, Participant)>,
    /// By epoch: pairs, the lower first, whose links are those of the epoch before.
    pub(crate) carried: Vec<(Epoch, Participant, Participant)>,
    /// Within which time an aggregator's silence is noticed.
    pub(crate) silence: std::ops::Range<u64>,
    /// By rank; empty where there are no messages.
    pub(crate) p2p: Vec<P2pScript>,
    /// New links that break soon after they are up.
    pub(crate) cut: Vec<(Epoch, Participant, Participant)>,
    /// Whether participants' turns end in the midst of steps and copies.
    pub(crate) slices: bool,
}

pub(crate) fn generator(seed: u64, purpose: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(purpose);
    rng
}

/// Any grouping of ranks: up to 16 participants, now and then more.
fn any_group(rng: &mut ChaCha8Rng, least: u32) -> Group {
    let participants = match rng.random_range(0..20) {
        0 => rng.random_range(17..=24),
        1..=4 => rng.random_range(8..=16),
        _ => rng.random_range(1..=7),
    };
    let participants = participants.max(least);
    let most = match rng.random_range(0..10) {
        0 if participants <= 4 => 10,
        1..=5 => 3,
        _ => 1,
    };
    let sizes: Vec<usize> = (0..participants).map(|_| rng.random_range(1..=most)).collect();
    let mut ranks: Vec<Rank> = (0..sizes.iter().sum::<usize>() as u32).map(Rank).collect();
    shuffle(rng, &mut ranks);
    let mut ranks = ranks.into_iter();
    Group::new(sizes.iter().map(|size| ranks.by_ref().take(*size).collect()).collect()).unwrap()
}

pub(crate) fn shuffle<T>(rng: &mut ChaCha8Rng, items: &mut [T]) {
    for i in (1..items.len()).rev() {
        items.swap(i, rng.random_range(0..=i));
    }
}

pub(crate) fn any_order(rng: &mut ChaCha8Rng, group: &Group) -> Vec<Participant> {
    let mut order: Vec<_> = (0..group.participants()).map(Participant).collect();
    shuffle(rng, &mut order);
    order
}

fn any_tuning(rng: &mut ChaCha8Rng, chunk_bytes: u32) -> Tuning {
    Tuning {
        chunk_bytes,
        segment_bytes: rng.random_range(16..4096),
        message_bytes: rng.random_range(8..256),
        copy_bytes: if rng.random_bool(0.5) { rng.random_range(0..2048) } else { 0 },
        algorithms: AlgorithmTable::RING,
    }
}

/// Another plan for the same communicator.
pub(crate) fn another_plan(rng: &mut ChaCha8Rng, today: &EpochPlan, epoch: Epoch) -> EpochPlan {
    let group = today.plan.group().clone();
    let order = any_order(rng, &group);
    EpochPlan {
        epoch,
        plan: Plan::new(group, order).unwrap(),
        tuning: any_tuning(rng, today.tuning.chunk_bytes),
        channels: today.channels,
        landing_slots: 1 << rng.random_range(0..3),
        coding: None,
        aggregation: None,
    }
}

/// Any reduction that a type has.
pub(crate) fn any_reduce(rng: &mut ChaCha8Rng, dtype: Dtype) -> ReduceOp {
    loop {
        let reduce = ReduceOp::ALL[rng.random_range(0..ReduceOp::ALL.len())];
        if reduce.takes(dtype) {
            return reduce;
        }
    }
}

/// Any operation that all ranks may call. Its size takes no longer than it must to be of interest.
pub(crate) fn any_signature(rng: &mut ChaCha8Rng, plan: &EpochPlan) -> Signature {
    let ranks = plan.plan.group().ranks();
    let collective = match rng.random_range(0..4) {
        0 => Collective::AllReduce,
        _ => Collective::ALL[rng.random_range(0..Collective::ALL.len())],
    };
    let barrier = !collective.has_data();
    let dtypes = [Dtype::U64, Dtype::U32, Dtype::F32, Dtype::U8, Dtype::Bool, Dtype::Complex128];
    let dtype = if barrier { Dtype::U8 } else { dtypes[rng.random_range(0..dtypes.len())] };
    let mut signature = Signature {
        collective,
        dtype,
        reduce: match collective.reduces() {
            true => any_reduce(rng, dtype),
            false => ReduceOp::Sum,
        },
        root: Rank(if collective.is_rooted() { rng.random_range(0..ranks) } else { 0 }),
        count: 0,
        uneven: false,
    };
    if barrier || rng.random_bool(0.05) {
        return signature;
    }
    let participants = u64::from(plan.plan.participants());
    let messages = match collective.traits().pattern {
        Pattern::ReduceDistribute => 2 * participants * participants,
        Pattern::Pairwise => u64::from(ranks) * u64::from(ranks),
        Pattern::Gather => participants * u64::from(ranks),
        Pattern::Chain | Pattern::Dissemination => 4 * participants,
    };
    let segments = (2500 / messages).clamp(2, 40);
    let mut most = if rng.random_bool(0.3) { 64 } else { 4096 };
    loop {
        signature.count = rng.random_range(0..=most);
        if segmentation(&plan.plan, &signature, &plan.tuning).segments <= segments {
            signature.uneven = collective.can_be_uneven() && signature.count % 2 == 1;
            return signature;
        }
        most = most / 2 + 1;
    }
}

impl Scenario {
    /// A clean one: everybody calls the same operations, leaves at the end, and nothing goes wrong.
    pub(crate) fn new(seed: u64, least_participants: u32) -> Self {
        let mut rng = generator(seed, 0);
        let group = any_group(&mut rng, least_participants);
        let remote = [0.0, 0.0, 0.3, 1.0][rng.random_range(0..4)];
        let access = (0..group.ranks())
            .map(|_| if rng.random_bool(remote) { Access::Remote } else { Access::Mapped })
            .collect();
        let order = any_order(&mut rng, &group);
        let chunk_bytes = [8, 16, 64, 200, 512][rng.random_range(0..5)];
        let plan = EpochPlan {
            epoch: Epoch(rng.random_range(0..3)),
            plan: Plan::new(group.clone(), order).unwrap(),
            tuning: any_tuning(&mut rng, chunk_bytes),
            channels: rng.random_range(1..=8),
            landing_slots: 1 << rng.random_range(0..3),
            coding: None,
            aggregation: None,
        };
        let acts: Vec<Signature> =
            (0..rng.random_range(2..=7)).map(|_| any_signature(&mut rng, &plan)).collect();
        let think = [0, 20 * MICROSECOND, MILLISECOND][rng.random_range(0..3)];
        let script = |rng: &mut ChaCha8Rng, rank: Rank| {
            let act = |signature: &Signature| {
                let shared = signature.collective.shared_block(rank, signature.root);
                Act { signature: *signature, in_place: rng.random_bool(0.5) && shared.is_some() }
            };
            let acts = acts.iter().map(act).collect();
            Script { acts, leaves: true, depth: rng.random_range(1..=4), think }
        };
        let scripts = (0..group.ranks()).map(|rank| script(&mut rng, Rank(rank))).collect();
        Self {
            seed,
            access,
            paths: rng.random_range(1..=4),
            operations: rng.random_range(1..=6),
            weather: Weather { delay: 20 * MICROSECOND, stalls: 0.0, stall: 0 },
            timeouts: vec![Duration::from_nanos(60 * SECOND); group.ranks() as usize],
            inquiry: Duration::from_nanos(SECOND),
            scripts,
            incidents: Vec::new(),
            hostile: None,
            wrong_count: None,
            unlinkable: Vec::new(),
            carried: Vec::new(),
            silence: 10 * MICROSECOND..3 * MILLISECOND,
            p2p: Vec::new(),
            cut: Vec::new(),
            slices: false,
            plan,
            group,
        }
    }

    /// Operations go in one shot and in two up to any size; with every plan the sizes change.
    pub(crate) fn direct(mut self) -> Self {
        let mut rng = generator(self.seed, 30);
        let plans = self.incidents.iter_mut().filter_map(|(_, incident)| match incident {
            Incident::Change(plan) => Some(&mut **plan),
            _ => None,
        });
        for plan in plans.chain([&mut self.plan]) {
            let most = u64::from(plan.tuning.chunk_bytes) * 16;
            let one_shot = rng.random_range(0..most.min(2048));
            let two_shot = [0, rng.random_range(0..8192)][rng.random_range(0..2)];
            plan.tuning.algorithms = AlgorithmTable::direct(one_shot, two_shot);
        }
        self
    }

    /// Operations go by doubling, halving, a tree or racks, each collective up to any size. With every plan they and the racks change.
    pub(crate) fn recursive(mut self) -> Self {
        let mut rng = generator(self.seed, 31);
        let plans = self.incidents.iter_mut().filter_map(|(_, incident)| match incident {
            Incident::Change(plan) => Some(&mut **plan),
            _ => None,
        });
        for plan in plans.chain([&mut self.plan]) {
            let mut ranges = Vec::new();
            for &collective in Collective::ALL {
                let algorithms = &Algorithm::of(collective.traits().pattern)[1..];
                let sizes = [256, 2048, u64::MAX];
                let range = |up_to| {
                    algorithms.choose(&mut rng).map(|&algorithm| AlgorithmRange {
                        collective,
                        up_to,
                        algorithm,
                    })
                };
                ranges.extend(sizes.into_iter().filter_map(range));
            }
            plan.tuning.algorithms = AlgorithmTable::new(ranges).unwrap();
            let hosts = plan.plan.participants();
            let first = rng.random_range(0..=hosts);
            let racks = [first, hosts - first].into_iter().filter(|hosts| *hosts > 0).collect();
            plan.plan = plan.plan.clone().with_racks(racks).unwrap();
        }
        self
    }

    /// Where turns end in the midst of steps and copies.
    pub(crate) fn sliced(self) -> Self {
        Self { slices: true, ..self }
    }

    /// Delays of any length, connections and participants that stand still.
    pub(crate) fn rough(mut self) -> Self {
        let mut rng = generator(self.seed, 1);
        self.weather = Weather {
            delay: [50, 300][rng.random_range(0..2)] * MICROSECOND,
            stalls: [0.002, 0.02][rng.random_range(0..2)],
            stall: 5 * MILLISECOND,
        };
        self
    }

    /// To whom a participant keeps its link when an epoch begins.
    pub(crate) fn carried_by(&self, epoch: Epoch, me: Participant) -> Vec<Participant> {
        let of_epoch = self.carried.iter().filter(|(carried, ..)| *carried == epoch);
        let other = |(_, low, high): &(Epoch, Participant, Participant)| match me {
            me if me == *low => Some(*high),
            me if me == *high => Some(*low),
            _ => None,
        };
        of_epoch.filter_map(other).collect()
    }

    pub(crate) fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.group.ranks()).map(Rank)
    }
}
