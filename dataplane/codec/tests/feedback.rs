//! Error feedback over compressed AllReduces. What was sent over all steps is what was given, less what is owed at the end, whatever
//! codecs, owners and ranks. Nothing of what is no number is owed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_abi::{Dtype, ReduceOp, View, ViewMut};
use harmonaize_codec::{Codec, ErrorFeedback, Terms, whole};
use harmonaize_kernels::reduce;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Participants, each with what it owes of one part.
struct World {
    residual_in: Vec<Vec<f32>>,
    residual_out: Vec<Vec<f32>>,
}

impl World {
    fn new(participants: usize, elements: usize) -> Self {
        let zeros = vec![vec![0.0; elements]; participants];
        Self { residual_in: zeros.clone(), residual_out: zeros }
    }

    /// The sum, or average, that all get; `owner` adds it up. What is owed changes only if the step is not `undone`.
    fn step(
        &mut self,
        terms: Terms,
        owner: usize,
        average: bool,
        seed: u64,
        inputs: &[Vec<f32>],
        undone: bool,
    ) -> Vec<f32> {
        let all = inputs.len() as u32;
        let mut accounts =
            self.residual_in.iter().zip(&mut self.residual_out).map(|(owed, left_out)| ErrorFeedback {
                residual_in: View::from(&owed[..]),
                residual_out: ViewMut::from(&mut left_out[..]),
            });
        let accounts: Vec<ErrorFeedback<'_>> = accounts.by_ref().collect();
        let mut bytes = vec![0_u8; inputs[0].len() * 4 + 128];
        let (mut sum, chunk) = (inputs[owner].clone(), ViewMut::from(&mut bytes[..]));
        let to = ViewMut::from(&mut sum[..]);
        whole(|passes| accounts[owner].begin(passes, to)).unwrap();
        let mut sums = whole(|passes| terms.begin(passes, 1, to.as_view())).unwrap();
        for other in (0..inputs.len()).filter(|other| *other != owner) {
            let (account, own) = (accounts[other], View::from(&inputs[other][..]));
            let source = whole(|passes| account.contribution(passes, own)).unwrap();
            let seed = seed ^ (other as u64) << 32;
            let coded = whole(|passes| terms.contribute(passes, 1, seed, source, chunk)).unwrap();
            whole(|passes| account.record_contribution(passes, &coded, chunk.as_view())).unwrap();
            whole(|passes| terms.add(passes, &mut sums, chunk.as_view(), to)).unwrap();
        }
        whole(|passes| accounts[owner].complete(passes, to.as_view())).unwrap();
        let average_of = average.then_some(all);
        if average {
            reduce(ReduceOp::Average, Dtype::F32, &[to.as_view()], &[to], average_of).unwrap();
        }
        let coded =
            whole(|passes| terms.conclude(passes, &sums, average_of, !seed, to.as_view(), chunk)).unwrap();
        whole(|passes| accounts[owner].record_result(passes, &coded, average_of, chunk.as_view())).unwrap();
        whole(|passes| terms.take(passes, chunk.as_view(), to)).unwrap();
        if !undone {
            std::mem::swap(&mut self.residual_in, &mut self.residual_out);
        }
        sum
    }
}

fn input(random: &mut ChaCha8Rng, elements: usize) -> Vec<f32> {
    (0..elements).map(|_| random.random_range(-1.0..1.0_f32) / random.random_range(0.05..1.0_f32)).collect()
}

#[test]
fn what_was_sent_is_what_was_given_less_what_is_owed() {
    for seed in 0..60 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let participants = random.random_range(2..=7);
        let elements = [1, 17, 257, 1500][random.random_range(0..4)];
        let mut world = World::new(participants, elements);
        let (mut given, mut sent) = (vec![0_f64; elements], vec![0_f64; elements]);
        for step in 0..20 {
            // Codec, owner and kind change from step to step.
            let codec = Codec::NAMED[random.random_range(0..Codec::NAMED.len())].1;
            let most = [None, Some(0.05)][random.random_range(0..2)];
            let finer =
                random.random_bool(0.5).then(|| Codec::NAMED[random.random_range(0..Codec::NAMED.len())].1);
            let terms = Terms { codec, finer, max_error: most, participants: participants as u32 };
            let (owner, average) = (random.random_range(0..participants), random.random_bool(0.5));
            let inputs: Vec<Vec<f32>> = (0..participants).map(|_| input(&mut random, elements)).collect();
            if random.random_bool(0.2) {
                // An attempt that was given up leaves what is owed as it was.
                world.step(terms, owner, average, step, &inputs, true);
            }
            let found = world.step(terms, owner, average, step, &inputs, false);
            let scale = if average { participants as f64 } else { 1.0 };
            for at in 0..elements {
                given[at] += inputs.iter().map(|input| f64::from(input[at])).sum::<f64>();
                sent[at] += scale * f64::from(found[at]);
            }
        }
        for at in 0..elements {
            let owed: f64 = world.residual_in.iter().map(|owed| f64::from(owed[at])).sum();
            let off = (given[at] - sent[at] - owed).abs();
            assert!(off < 1e-3, "seed {seed}, element {at} of {elements}: off by {off}, {owed} owed");
        }
    }
}

#[test]
fn the_received_mean_converges_to_the_given_one() {
    let mean_error = |feedback: bool, steps: u64| {
        let (mut random, participants) = (ChaCha8Rng::seed_from_u64(11), 4);
        let inputs: Vec<Vec<f32>> = (0..participants).map(|_| input(&mut random, 2000)).collect();
        let terms =
            Terms { codec: Codec::INT4, finer: None, max_error: None, participants: participants as u32 };
        let (mut world, mut sum) = (World::new(participants, 2000), vec![0_f64; 2000]);
        for step in 0..steps {
            let found = world.step(terms, 1, false, step, &inputs, !feedback);
            sum.iter_mut().zip(found).for_each(|(sum, value)| *sum += f64::from(value));
        }
        let right = |at: usize| inputs.iter().map(|input| f64::from(input[at])).sum::<f64>();
        (0..2000).map(|at| (sum[at] / steps as f64 - right(at)).powi(2)).sum::<f64>().sqrt()
    };
    // Rounding to nearest leaves out the same every time; with feedback what is left out of the mean falls with the steps.
    let (one, without, ten, hundred) =
        (mean_error(true, 1), mean_error(false, 100), mean_error(true, 10), mean_error(true, 100));
    assert!(without > 0.99 * one, "{one} at first, {without} without feedback");
    assert!(ten < one / 4.0 && hundred < one / 40.0, "{one}, {ten}, {hundred}");
}

#[test]
fn nothing_is_owed_of_what_is_no_number() {
    for (name, codec) in Codec::NAMED.iter().skip(1) {
        for odd in [f32::NAN, f32::INFINITY, 1e30] {
            let mut world = World::new(2, 600);
            let terms = Terms { codec: *codec, finer: None, max_error: None, participants: 2 };
            let mut inputs = vec![vec![0.25_f32; 600]; 2];
            world.step(terms, 0, true, 1, &inputs, false);
            inputs[1][7] = odd;
            let found = world.step(terms, 0, true, 2, &inputs, false);
            assert!(odd.is_finite() || !found[7].is_finite(), "{name}: {odd} is hidden");
            let owed = world.residual_in.iter().flatten();
            assert!(owed.clone().all(|owed| owed.is_finite()), "{name}: {odd} is owed");
        }
    }
}
