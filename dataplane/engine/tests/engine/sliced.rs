//! Coded operations whose actions give up their turns in their midst come to the bits of those whose actions do not. That is so for
//! every codec, of random sizes from printed seeds, with error feedback and without, and wherever tensors lie. Scaling what was fetched
//! for a `PremulSum` gives up its turn likewise.

use crate::coded::coding;
use crate::common::{ARENA, World, loopback, reduce};
use harmonaize_abi::{Completion, ReduceOp, Region, Submission, flags};
use harmonaize_codec::{Codec, PART};
use harmonaize_plan::{AlgorithmTable, Coding, Tuning};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const OUTPUT: u64 = 4 << 20;
const HALVES: [u64; 2] = [8 << 20, 12 << 20];

/// Chunks of many parts.
const LARGE: Tuning = Tuning {
    chunk_bytes: 512 << 10,
    segment_bytes: 2 << 20,
    message_bytes: 16 << 10,
    copy_bytes: 2048,
    algorithms: AlgorithmTable::RING,
};

struct Case {
    ranks: Vec<Vec<u32>>,
    coding: Option<Coding>,
    count: usize,
    op: ReduceOp,
    to: u64,
    feedback: bool,
    away: fn(u32) -> bool,
    seed: u64,
}

/// What ranks have afterwards, and their completions.
type Outcome = (Vec<Vec<u32>>, Vec<Completion>);

impl Case {
    fn new(name: &str, seed: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let groups =
            [vec![vec![0], vec![1]], vec![vec![0, 3], vec![1], vec![2]], vec![vec![1], vec![0], vec![2]]];
        let away: [fn(u32) -> bool; 3] = [|_| false, |_| true, |rank| rank % 2 == 0];
        Self {
            ranks: groups[random.random_range(0..groups.len())].clone(),
            coding: coding(name, [None, Some(1e-4), Some(0.05)][random.random_range(0..3)]),
            count: random.random_range(4 * PART..20 * PART),
            op: [ReduceOp::Sum, ReduceOp::Average][random.random_range(0..2)],
            to: [0, OUTPUT][random.random_range(0..2)],
            feedback: random.random_bool(0.7),
            away: away[random.random_range(0..3)],
            seed,
        }
    }

    /// Two operations, the second of which owes what the first left. In slices, each turn is over after a part, or after so many bytes of
    /// another pass.
    fn run(&self, slices: Option<usize>) -> Vec<Outcome> {
        let transports = loopback(self.ranks.len());
        let (sizes, none) = ((ARENA, 2), Vec::new());
        let mut world =
            World::with_plan(transports, &self.ranks, LARGE, sizes, self.coding, None, none, &self.away);
        if let Some(bytes) = slices {
            world.slice_actions(bytes);
        }
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        let mut values = |scale: f32| -> Vec<f32> {
            let mut one = || scale * random.random_range(-1.0..1.0_f32) / random.random_range(0.05..1.0_f32);
            (0..self.count).map(|_| one()).collect()
        };
        let ranks = world.tenants.len();
        (0..ranks).for_each(|rank| world.write_floats(rank, HALVES[0], &values(0.1)));
        let region = |offset| Region { offset, bytes: self.count as u64 * 4 };
        let mut outcomes = Vec::new();
        for [residual_in, residual_out] in [HALVES, [HALVES[1], HALVES[0]]] {
            (0..ranks).for_each(|rank| world.write_floats(rank, 0, &values(1.0)));
            let call = reduce(self.op, self.count as u64, 0, self.to);
            let fed = Submission {
                flags: flags::FEEDBACK,
                residual_in: region(residual_in),
                residual_out: region(residual_out),
                ..call
            };
            (0..ranks).for_each(|rank| world.submit(rank, if self.feedback { fed } else { call }));
            let completions = world.completions();
            let bits = |(rank, at)| -> Vec<u32> {
                world.read_floats(rank, at, self.count).iter().map(|value| value.to_bits()).collect()
            };
            let places = (0..ranks).flat_map(|rank| [self.to, residual_out].map(|at| (rank, at)));
            outcomes.push((places.map(bits).collect(), completions));
        }
        outcomes
    }
}

#[test]
fn slices_change_no_bit_whatever_the_codec() {
    for (seed, (name, _)) in (0..).zip(Codec::NAMED.iter().skip(1).cycle().take(16)) {
        let case = Case::new(name, seed);
        let what = format!(
            "seed {seed}: {name} of {} elements at {:?}, feedback: {}",
            case.count, case.ranks, case.feedback
        );
        let whole = case.run(None);
        let sliced = case.run(Some(1));
        for ((expected, told), (found, also)) in whole.iter().zip(&sliced) {
            assert!(told.iter().all(|done| done.status == 0), "{what}: {told:?}");
            assert_eq!(format!("{told:?}"), format!("{also:?}"), "{what}");
            assert!(expected == found, "{what}: other bits");
        }
    }
}

/// Elements of a tensor that is fetched: 64 KiB.
const FETCHED: usize = 1 << 14;

/// Sums tensors that are not mapped, of two ranks of an engine whose turns are over after 64 bytes of each operand. Returns in how many
/// rounds, and what the ranks have then.
fn sum_fetched(op: ReduceOp, factors: [u64; 2]) -> (usize, Vec<Vec<f32>>) {
    let (sizes, none) = ((ARENA, 2), Vec::new());
    let mut world = World::with_plan(loopback(1), &[vec![0, 1]], LARGE, sizes, None, None, none, &|_| true);
    world.slice_actions(1);
    for (rank, factor) in factors.into_iter().enumerate() {
        world.write_floats(rank, 0, &numbers(rank));
        world.submit(rank, Submission { factor, ..reduce(op, FETCHED as u64, 0, OUTPUT) });
    }
    let (mut rounds, mut done) = (0, 0);
    world.until("sums", |world| {
        rounds += 1;
        for completion in world.tenants.iter_mut().filter_map(|tenant| tenant.end.completion().unwrap()) {
            assert_eq!(completion.status, 0, "{completion:?}");
            done += 1;
        }
        done == factors.len()
    });
    (rounds, (0..2).map(|rank| world.read_floats(rank, OUTPUT, FETCHED)).collect())
}

fn numbers(rank: usize) -> Vec<f32> {
    (0..FETCHED).map(|at| ((at * 7 + rank * 13) % 1000) as f32).collect()
}

/// Each rank's tensor is scaled in as many turns as it has pieces, beside those in which both are summed.
#[test]
fn scaling_what_was_fetched_gives_up_its_turn() {
    let (plain, _) = sum_fetched(ReduceOp::Sum, [0; 2]);
    let (scaled, sums) = sum_fetched(ReduceOp::PremulSum, [2.0_f64, 3.0].map(f64::to_bits));
    let pieces = FETCHED * size_of::<f32>() / 64;
    assert!(scaled > plain + pieces, "{scaled} rounds, {plain} without factors");
    let expected: Vec<f32> =
        numbers(0).iter().zip(numbers(1)).map(|(one, other)| 2.0 * one + 3.0 * other).collect();
    assert!(sums.iter().all(|sum| *sum == expected), "another sum");
}
