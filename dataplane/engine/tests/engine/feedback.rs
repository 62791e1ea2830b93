//! Error feedback through engines and rings. Over all steps, what was received is what was given less what is owed at the end,
//! across changes of codec, exact operations and several ranks a host.

use crate::coded::{change, coding};
use crate::common::{World, loopback, reduce};
use harmonaize_abi::{ReduceOp, Region, Submission, flags};
use harmonaize_engine::Epoch;
use harmonaize_plan::Coding;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Where the output lies, and both halves of the feedback.
const OUTPUT: u64 = 4 << 20;
const HALVES: [u64; 2] = [8 << 20, 12 << 20];

/// Which ranks' tensors are not mapped.
type Away = fn(u32) -> bool;
const AWAY: [Away; 3] = [|_| false, |_| true, |rank| rank % 2 == 0];

fn world(ranks: &[Vec<u32>], coding: Option<Coding>, away: Away) -> World {
    World::with_away(loopback(ranks.len()), ranks, coding, &away)
}

/// Tensors of `count` elements, step after step.
struct Steps {
    world: World,
    count: usize,
    random: ChaCha8Rng,
    /// The half that says what is owed.
    half: usize,
    given: Vec<f64>,
    received: Vec<f64>,
}

impl Steps {
    fn new(world: World, count: usize, seed: u64) -> Self {
        let zeros = vec![0.0; count];
        for rank in 0..world.tenants.len() {
            world.write_floats(rank, HALVES[0], &vec![0.0; count]);
        }
        let random = ChaCha8Rng::seed_from_u64(seed);
        Self { world, count, random, half: 0, given: zeros.clone(), received: zeros }
    }

    /// Submits the next step; with which scale its result counts.
    fn submit(&mut self, op: ReduceOp, to: u64) -> f64 {
        let (ranks, count) = (self.world.tenants.len(), self.count);
        for rank in 0..ranks {
            let mut one =
                || self.random.random_range(-1.0..1.0_f32) / self.random.random_range(0.05..1.0_f32);
            let values: Vec<f32> = (0..count).map(|_| one()).collect();
            self.given.iter_mut().zip(&values).for_each(|(sum, value)| *sum += f64::from(*value));
            self.world.write_floats(rank, 0, &values);
            let region = |offset| Region { offset, bytes: count as u64 * 4 };
            let (owed, left_out) = (region(HALVES[self.half]), region(HALVES[1 - self.half]));
            let call = reduce(op, count as u64, 0, to);
            self.world.submit(
                rank,
                Submission { flags: flags::FEEDBACK, residual_in: owed, residual_out: left_out, ..call },
            );
        }
        if op == ReduceOp::Average { ranks as f64 } else { 1.0 }
    }

    /// Waits for it; its algorithm.
    fn receive(&mut self, scale: f64, to: u64) -> u8 {
        let completions = self.world.completions();
        assert!(completions.iter().all(|done| done.status == 0), "{completions:?}, {:?}", self.world.notices);
        let found = self.world.read_floats(0, to, self.count);
        self.received.iter_mut().zip(&found).for_each(|(sum, value)| *sum += scale * f64::from(*value));
        self.half = 1 - self.half;
        completions[0].algorithm
    }

    /// What all ranks owe, by element.
    fn residual(&self) -> Vec<f64> {
        let mut owed = vec![0.0; self.count];
        for rank in 0..self.world.tenants.len() {
            let theirs = self.world.read_floats(rank, HALVES[self.half], self.count);
            owed.iter_mut().zip(theirs).for_each(|(sum, value)| *sum += f64::from(value));
        }
        owed
    }

    fn check(&self, what: &str) {
        for (at, owed) in self.residual().iter().enumerate() {
            let off = (self.given[at] - self.received[at] - owed).abs();
            assert!(off < 2e-3, "{what}, element {at}: off by {off}, {owed} owed");
        }
    }
}

#[test]
fn what_is_received_is_what_was_given_less_what_is_owed() {
    let groups = [
        vec![vec![0], vec![1]],
        vec![vec![0, 3], vec![1, 2], vec![4]],
        vec![vec![2], vec![0], vec![3], vec![1]],
    ];
    let names = ["int4", "rotated 1", "rotated 3", "int8 stochastic", "fp16", "nonzero blocks"];
    for (seed, (name, ranks)) in names.iter().zip(groups.iter().cycle()).enumerate() {
        for (most, away) in [None, Some(0.05)].into_iter().flat_map(|most| AWAY.map(|away| (most, away))) {
            let mut steps = Steps::new(world(ranks, coding(name, most), away), 4097, seed as u64);
            let far = (0..5).filter(|rank| away(*rank)).count();
            let what = format!("seed {seed}: {name} within {most:?} at {ranks:?}, {far} of 5 not mapped");
            for (op, to) in
                [(ReduceOp::Sum, OUTPUT), (ReduceOp::Average, OUTPUT), (ReduceOp::Sum, 0)].repeat(3)
            {
                let scale = steps.submit(op, to);
                assert_eq!(steps.receive(scale, to), 6, "{what}");
            }
            steps.check(&what);
            let owes = steps.residual().iter().any(|owed| *owed != 0.0);
            assert!(owes || most.is_some() || *name == "nonzero blocks", "{what}: nothing is owed");
        }
    }
}

#[test]
fn what_is_not_coded_leaves_owed_what_was() {
    AWAY.into_iter().for_each(not_coded);
}

/// What stays owed is copied in slices, too.
fn not_coded(away: Away) {
    let mut steps = Steps::new(world(&[vec![0, 1], vec![2]], None, away), 4097, 9);
    steps.world.slice_actions(1000);
    let owed: Vec<Vec<f32>> = (0..3).map(|rank| (0..4097).map(|at| (rank * at) as f32).collect()).collect();
    (0..3).for_each(|rank| steps.world.write_floats(rank, HALVES[0], &owed[rank]));
    let scale = steps.submit(ReduceOp::Sum, OUTPUT);
    assert_eq!(steps.receive(scale, OUTPUT), 2);
    for (rank, owed) in owed.iter().enumerate() {
        assert_eq!(steps.world.read_floats(rank, HALVES[1], 4097), *owed, "rank {rank}");
    }
    for (at, (given, received)) in steps.given.iter().zip(&steps.received).enumerate() {
        assert!((given - received).abs() < 1e-4, "element {at}: {given} given, {received} received");
    }
}

#[test]
fn residuals_outlive_changes_of_codec_mid_operation() {
    AWAY.into_iter().for_each(four_codecs);
}

fn four_codecs(away: Away) {
    let ranks = [vec![0], vec![1], vec![2], vec![3]];
    let mut steps = Steps::new(world(&ranks, coding("int4", None), away), 1 << 18, 3);
    let next = [coding("rotated 2", None), None, coding("int8", Some(1e-3)), coding("rotated 1", None)];
    for (epoch, next) in (2..).map(Epoch).zip(next) {
        let scale = steps.submit(ReduceOp::Sum, OUTPUT);
        change(&mut steps.world, epoch, next);
        steps.world.until_switched(epoch);
        steps.receive(scale, OUTPUT);
    }
    steps.check("four codecs");
}
