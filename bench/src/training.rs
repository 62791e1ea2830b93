//! Data-parallel training with SGD and momentum. Every worker takes its part of each batch, gradients are averaged by one
//! AllReduce, and all workers make the same step.

use crate::communicator::{Communicator, Cost};
use crate::digits::{Batches, Digits, TEST_IMAGES};
use crate::model::{Kind, Model};
use crate::seeded::Digest;
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};

/// How far the loss of a step may be, relatively, from that of the same training in one process. Both compute the same
/// mean over the batch, but add in another order (within each worker's part first, then over the workers), and an `f32`
/// sum of n terms in another order differs by at most about n * 6e-8 relative to the terms' size, sqrt(n) of that
/// typically: some 1e-7 for a batch of 128. Each step starts from the difference that the steps before have left, and
/// over 300 steps it grows to at most 4e-6, seen over 5 seeds and 2, 4 and 8 workers. The bound leaves a factor of 25,
/// and a single worker's gradient lost in a single step exceeds it more than tenfold.
pub const TOLERANCE: f32 = 1e-4;

/// Numbers of each worker that all are to know beside the average gradients. They are the loss, and whether the
/// worker wishes to end.
pub const RIDERS: usize = 2;

/// What is trained, the same at every worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// What is trained.
    pub kind: Kind,
    /// Seed of split, weights and batches.
    pub seed: u64,
    /// Steps; the fewest, where a training goes on until it is told to end.
    pub steps: usize,
    /// Images a step, over all workers.
    pub batch: usize,
    /// Test images that are told at the end, at most [`TEST_IMAGES`].
    pub tested: usize,
    /// The first worker is tested on them after every so many steps too; 0 for never.
    pub every: usize,
    /// Learning rate.
    pub rate: f32,
    /// Momentum (Polyak's: `v = momentum * v + gradient`, `w -= rate * v`).
    pub momentum: f32,
    /// Weight decay, added to the gradient: it keeps the loss from vanishing, where a relative difference means nothing.
    pub decay: f32,
}

impl Default for Recipe {
    fn default() -> Self {
        Self {
            kind: Kind::default(),
            seed: 1,
            steps: 300,
            batch: 128,
            tested: TEST_IMAGES,
            every: 0,
            rate: 0.05,
            momentum: 0.9,
            decay: 1e-3,
        }
    }
}

/// One step, as a worker saw it.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// From 0.
    pub number: usize,
    /// Mean cross entropy over the whole batch, before the step.
    pub loss: f32,
    /// The AllReduce.
    pub cost: Cost,
    /// Bytes that were reduced.
    pub bytes: usize,
    /// All but the AllReduce, its copies and the test.
    pub compute: Duration,
    /// Test images told right after this step, where they were asked for.
    pub correct: Option<usize>,
}

/// How a training ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Test images told right.
    pub correct: usize,
    /// Test images.
    pub tested: usize,
    /// Of all parameters' bits: equal at all workers, for they all made the same steps.
    pub digest: String,
}

/// Trains until all steps are made and `told` says so at any worker: all end after the same step. Calls `each` after every step.
pub fn train(
    recipe: &Recipe,
    communicator: &mut dyn Communicator,
    stop_requested: &dyn Fn() -> bool,
    each: &mut dyn FnMut(&Step) -> Result<()>,
) -> Result<Outcome> {
    let digits = Digits::load(recipe.seed)?;
    let batches = Batches::new(recipe.seed, digits.training.len(), recipe.batch)?;
    let model = Model::new(recipe.kind, recipe.seed)?;
    let places: Vec<usize> = (0..digits.test.len().min(recipe.tested)).collect();
    let test = digits.test.select(&places)?;
    let mut parameters = model.parameters()?;
    let mut velocity = vec![0f32; parameters.len()];
    let mut bucket = Vec::with_capacity(parameters.len() + 2);
    let (mut number, mut ends) = (0, recipe.steps == 0);
    while !ends {
        let began = Instant::now();
        let shard = batches.shard(number, communicator.rank(), communicator.ranks())?;
        let loss = model.gradients(&digits.training.select(&shard)?, &mut bucket)?;
        // Every worker is to know the whole batch's loss, and the wish to end: they ride along with the gradients, unless that
        // costs them bits, for they are much larger.
        let rest = [loss, if stop_requested() { 1.0 } else { 0.0 }];
        let computed = began.elapsed();
        let (cost, [loss, wish]) = share(communicator, &mut bucket, rest)?;
        let averaged = Instant::now();
        let gradients = bucket.as_slice();
        ensure!(loss.is_finite(), "the loss of step {number} is {loss}");
        descend(recipe, gradients, &mut velocity, &mut parameters);
        model.set_parameters(&parameters)?;
        let compute = computed + averaged.elapsed();
        let bytes = size_of_val(gradients);
        number += 1;
        let due = recipe.every > 0 && number.is_multiple_of(recipe.every) && communicator.rank() == 0;
        let correct = if due { Some(model.correct(&test)?) } else { None };
        each(&Step { number: number - 1, loss, cost, bytes, compute, correct })?;
        ends = number >= recipe.steps && wish > 0.0;
    }
    let mut digest = Digest::default();
    parameters.iter().for_each(|parameter| digest.update(&parameter.to_le_bytes()));
    Ok(Outcome { correct: model.correct(&test)?, tested: test.len(), digest: digest.hex() })
}

/// Averages the gradients over all workers, and the rest.
fn share(
    communicator: &mut dyn Communicator,
    gradients: &mut Vec<f32>,
    mut rest: [f32; RIDERS],
) -> Result<(Cost, [f32; RIDERS])> {
    if communicator.is_lossy() {
        let cost = communicator.average(gradients)?;
        communicator.average(&mut rest)?;
        return Ok((cost, rest));
    }
    gradients.extend(rest);
    let cost = communicator.average(gradients)?;
    let (_, &[loss, wish]) = gradients.split_last_chunk().context("empty bucket")?;
    gradients.truncate(gradients.len() - rest.len());
    Ok((cost, [loss, wish]))
}

/// A step of SGD with momentum.
pub(crate) fn descend(recipe: &Recipe, gradients: &[f32], velocity: &mut [f32], parameters: &mut [f32]) {
    let each = gradients.iter().zip(velocity).zip(parameters);
    for ((gradient, velocity), parameter) in each {
        *velocity = recipe.momentum * *velocity + (gradient + recipe.decay * *parameter);
        *parameter -= recipe.rate * *velocity;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::{InProcess, SingleProcess};

    /// Largest relative difference of two curves.
    fn apart(one: &[f32], other: &[f32]) -> f32 {
        assert_eq!(one.len(), other.len());
        one.iter().zip(other).map(|(a, b)| (a - b).abs() / b.abs()).fold(0.0, f32::max)
    }

    fn curve(recipe: &Recipe, communicator: &mut dyn Communicator) -> (Vec<f32>, Outcome) {
        let mut losses = Vec::new();
        let outcome = train(recipe, communicator, &|| true, &mut |step| {
            losses.push(step.loss);
            Ok(())
        });
        (losses, outcome.unwrap())
    }

    fn together(recipe: &Recipe, communicators: Vec<impl Communicator + Send>) -> Vec<(Vec<f32>, Outcome)> {
        std::thread::scope(|scope| {
            let workers: Vec<_> = communicators
                .into_iter()
                .map(|mut communicator| scope.spawn(move || curve(recipe, &mut communicator)))
                .collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).collect()
        })
    }

    const SHORT: Recipe = Recipe {
        kind: Kind::Perceptron,
        seed: 1,
        steps: 40,
        batch: 128,
        tested: TEST_IMAGES,
        every: 0,
        rate: 0.05,
        momentum: 0.9,
        decay: 1e-3,
    };

    #[test]
    fn eight_workers_match_a_single_process() {
        let (single, alone) = curve(&SHORT, &mut SingleProcess);
        let workers = together(&SHORT, InProcess::new(8));
        for (losses, outcome) in &workers {
            assert_eq!((losses, outcome), (&workers[0].0, &workers[0].1));
        }
        assert!(apart(&workers[0].0, &single) < TOLERANCE);
        assert!(workers[0].1.correct.abs_diff(alone.correct) <= 1);
        assert!(single[39] < 0.2 * single[0], "{single:?}");
        assert!(alone.correct * 10 >= alone.tested * 9, "{alone:?}");
    }

    /// Leaves one rank's values out of one average, as an AllReduce with a lost contribution would.
    struct Forgetful {
        inner: InProcess,
        calls: usize,
    }

    impl Communicator for Forgetful {
        fn rank(&self) -> usize {
            self.inner.rank()
        }
        fn ranks(&self) -> usize {
            self.inner.ranks()
        }
        fn average(&mut self, values: &mut [f32]) -> Result<Cost> {
            self.calls += 1;
            if self.calls == 5 && self.rank() == 3 {
                // Gradients only: the loss itself stays right.
                let last = values.len() - 2;
                values[..last].fill(0.0);
            }
            self.inner.average(values)
        }
    }

    #[test]
    fn a_stop_request_ends_all_at_one_step() {
        let steps = std::thread::scope(|scope| {
            let worker = |mut communicator: InProcess| {
                scope.spawn(move || {
                    let recipe = Recipe { steps: 3, ..SHORT };
                    let made = std::cell::Cell::new(0);
                    let third = communicator.rank() == 2;
                    let told = || third && made.get() >= 5;
                    train(&recipe, &mut communicator, &told, &mut |step| {
                        made.set(step.number + 1);
                        Ok(())
                    })
                    .unwrap();
                    made.get()
                })
            };
            let workers: Vec<_> = InProcess::new(4).into_iter().map(worker).collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).collect::<Vec<usize>>()
        });
        assert_eq!(steps, [6; 4]);
    }

    #[test]
    fn the_tolerance_finds_a_single_lost_contribution() {
        let (single, _) = curve(&SHORT, &mut SingleProcess);
        let ranks = InProcess::new(8).into_iter().map(|inner| Forgetful { inner, calls: 0 }).collect();
        let found = apart(&together(&SHORT, ranks)[0].0, &single);
        assert!(found > 10.0 * TOLERANCE, "a lost contribution moved the curve by {found} only");
    }
}
