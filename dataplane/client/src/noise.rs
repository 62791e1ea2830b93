//! The noise of gradients: squared norms of what marked AllReduces read and give, and what follows from them.

use crate::tensor::Tensor;
use crate::{Element, Error};
use half::{bf16, f16};
use harmonaize_abi::{Dtype, ReduceOp};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How much gradients differ from sample to sample. As [`crate::Communicator::gradient_noise`] estimates it, it is
/// averages over steps, without bias (McCandlish et al. 2018, appendix A). The same bits at all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GradientNoise {
    /// Squared norm of the true gradient. Below 0 where the steps are too few for a gradient so small.
    pub square: f64,
    /// Trace of the covariance of one sample's gradient.
    pub trace: f64,
    /// Steps that were estimated so far. Steps with infinities or NaN are none.
    pub steps: u64,
}

impl GradientNoise {
    /// The noise scale, in samples: batches far below it gain by growing, and far above it hardly. `None` where the squared norm is not
    /// above 0.
    pub fn scale(&self) -> Option<f64> {
        (self.square > 0.0).then(|| self.trace.max(0.0) / self.square)
    }

    /// Takes a step in, from the squared norm of the ranks' gradients on average, and that of their mean. The first `memory` steps
    /// count alike, and from then on the oldest fade.
    fn add(&mut self, (small, big): (f64, f64), (ranks, samples): (f64, f64), memory: u32) {
        self.steps = self.steps.saturating_add(1);
        let part = 1.0 / self.steps.min(u64::from(memory)) as f64;
        let square = (ranks * big - small) / (ranks - 1.0);
        let trace = (small - big) * samples * ranks / (ranks - 1.0);
        self.square += part * (square - self.square);
        self.trace += part * (trace - self.trace);
    }
}

/// What a communicator's marked operations have measured.
#[derive(Debug, Default)]
pub(crate) struct Gradients(Mutex<Measured>);

#[derive(Debug, Default)]
struct Measured {
    /// The squared norms of this rank's gradients, and of the ranks' means, since the last step's end.
    own: f64,
    mean: f64,
    /// Operations that these are of.
    operations: u32,
    /// Over steps.
    noise: GradientNoise,
}

impl Gradients {
    fn lock(&self) -> MutexGuard<'_, Measured> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins another step; what this rank adds to the sum over ranks. By the last two, ranks with other numbers of operations show.
    pub(crate) fn take_step(&self) -> [f64; 4] {
        let mut measured = self.lock();
        let (own, mean, operations) = (measured.own, measured.mean, f64::from(measured.operations));
        *measured = Measured { noise: measured.noise, ..Measured::default() };
        [own, mean, operations, operations * operations]
    }

    /// Takes in what the ranks' sum says of a step. `None` before the first one that can be estimated.
    pub(crate) fn end_step(
        &self,
        [own, mean, operations, squared]: [f64; 4],
        ranks: u32,
        samples: u32,
        memory: u32,
    ) -> Result<Option<GradientNoise>, Error> {
        let count = f64::from(ranks);
        if operations * operations != squared * count {
            return Err(Error::Shape(
                "ranks have ended different numbers of operations marked as gradients in this step; each must wait for all of them"
                    .into(),
            ));
        }
        let mut measured = self.lock();
        let (small, big) = (own / count, mean / count);
        if operations > 0.0 && small.is_finite() && big.is_finite() {
            measured.noise.add((small, big), (count, f64::from(samples)), memory);
        }
        Ok((measured.noise.steps > 0).then_some(measured.noise))
    }
}

/// A marked AllReduce in flight.
#[derive(Debug)]
pub(crate) struct Marked {
    /// Squared norm of its input.
    own: f64,
    output: Tensor,
    /// The squared norm of the ranks' mean, over that of the output.
    factor: f64,
}

impl Marked {
    /// Reads the input of one that is about to start.
    pub(crate) fn start(
        input: &Tensor,
        output: &Tensor,
        reduce: ReduceOp,
        ranks: u32,
    ) -> Result<Self, Error> {
        let factor = match reduce {
            ReduceOp::Sum => f64::from(ranks).powi(-2),
            ReduceOp::Average => 1.0,
            _ => return Err(Error::Shape(format!("{reduce} of gradients; those are summed or averaged"))),
        };
        Ok(Self { own: squares(input)?, output: output.slice(..)?, factor })
    }

    /// Reads the output of one that has succeeded. One that cannot be read is missing in the step, which its end reports.
    pub(crate) fn end(&self, gradients: &Gradients) {
        let Ok(output) = squares(&self.output) else { return };
        let mut measured = gradients.lock();
        measured.own += self.own;
        measured.mean += output * self.factor;
        measured.operations = measured.operations.saturating_add(1);
    }
}

/// A tensor's squared norm.
fn squares(tensor: &Tensor) -> Result<f64, Error> {
    match tensor.dtype() {
        Dtype::F32 => squares_as::<f32>(tensor, f64::from),
        Dtype::F64 => squares_as::<f64>(tensor, f64::from),
        Dtype::F16 => squares_as(tensor, f16::to_f64),
        Dtype::Bf16 => squares_as(tensor, bf16::to_f64),
        other => Err(Error::Shape(format!("gradients of {other}; f32, f64, f16 and bf16 can be marked"))),
    }
}

/// Elements that are read at once.
const READ: usize = 1024;

fn squares_as<E: Element>(tensor: &Tensor, wide: impl Fn(E) -> f64) -> Result<f64, Error> {
    let (mut buffer, mut sum) = ([E::new_zeroed(); READ], 0.0);
    for start in (0..tensor.elements()).step_by(READ) {
        let count = tensor.elements().saturating_sub(start).min(READ as u64) as usize;
        let part = buffer.get_mut(..count).unwrap_or_default();
        tensor.read(start, part)?;
        sum += squares_of(part, &wide);
    }
    Ok(sum)
}

/// The sum of squares, in lanes that a compiler makes vectors of.
fn squares_of<E: Copy>(values: &[E], wide: impl Fn(E) -> f64) -> f64 {
    let (groups, rest) = values.as_chunks::<8>();
    let mut lanes = [0.0; 8];
    for group in groups {
        for (lane, value) in lanes.iter_mut().zip(group) {
            let value = wide(*value);
            *lane += value * value;
        }
    }
    let rest = rest.iter().map(|value| wide(*value).powi(2));
    lanes.iter().sum::<f64>() + rest.sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pool;
    use harmonaize_shm::{ForkGuard, Memory};

    const PARAMETERS: usize = 12;

    /// Numbers of a fixed sequence (splitmix64).
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        }

        /// Of variance 1, about normal.
        fn normal(&mut self) -> f64 {
            (0..12).map(|_| (self.next() >> 11) as f64 / (1_u64 << 53) as f64).sum::<f64>() - 6.0
        }
    }

    type Vector = [f64; PARAMETERS];

    fn dot(one: &Vector, other: &Vector) -> f64 {
        one.iter().zip(other).map(|(one, other)| one * other).sum()
    }

    fn mean<'a>(vectors: impl Iterator<Item = &'a Vector>) -> Vector {
        let (mut sum, mut count) = ([0.0; PARAMETERS], 0.0);
        for vector in vectors {
            sum.iter_mut().zip(vector).for_each(|(sum, value)| *sum += value);
            count += 1.0;
        }
        sum.map(|value| value / count)
    }

    /// Gradients of all samples of a logistic regression.
    fn gradients_of(samples: &[(Vector, f64)], weights: &Vector) -> Vec<Vector> {
        let gradient = |(features, label): &(Vector, f64)| {
            let error = 1.0 / (1.0 + (-dot(features, weights)).exp()) - label;
            features.map(|feature| error * feature)
        };
        samples.iter().map(gradient).collect()
    }

    /// The noise scale that ranks estimate while they train, and the exact one over the same steps. More steps are shorter ones.
    fn train(ranks: u32, samples: u32, steps: u32, seed: u64) -> (f64, f64) {
        let mut random = Random(seed);
        let hidden: Vector = std::array::from_fn(|_| random.normal());
        let data: Vec<(Vector, f64)> = (0..256)
            .map(|_| {
                let features: Vector = std::array::from_fn(|_| random.normal());
                let label = dot(&features, &hidden) + random.normal() > 0.0;
                (features, f64::from(u8::from(label)))
            })
            .collect();
        let (measured, mut weights) = (Gradients::default(), [0.0; PARAMETERS]);
        let rate = 20.0 / f64::from(steps);
        let ([mut square, mut trace], mut found) = ([0.0; 2], None);
        for _ in 0..steps {
            let all = gradients_of(&data, &weights);
            let truth = mean(all.iter());
            square += dot(&truth, &truth);
            trace += all.iter().map(|it| dot(it, it)).sum::<f64>() / all.len() as f64 - dot(&truth, &truth);
            let own: Vec<Vector> = (0..ranks)
                .map(|_| mean((0..samples).map(|_| &all[random.next() as usize % all.len()])))
                .collect();
            let step = mean(own.iter());
            let squares = |vector: &Vector| squares_of(&vector.map(|value| value as f32), f64::from);
            let count = f64::from(ranks);
            let sums = [own.iter().map(squares).sum(), count * squares(&step), count, count];
            found = measured.end_step(sums, ranks, samples, steps).unwrap();
            weights.iter_mut().zip(step).for_each(|(weight, step)| *weight -= rate * step);
        }
        (found.unwrap().scale().unwrap(), trace / square)
    }

    #[test]
    fn the_estimate_is_within_five_percent_of_the_exact_noise() {
        for (ranks, samples, steps) in [(8, 64, 200), (2, 32, 4000), (4, 16, 4000)] {
            for seed in 1..=3 {
                let (found, exact) = train(ranks, samples, steps, seed);
                let off = (found / exact - 1.0).abs();
                assert!(off < 0.05, "{ranks} of {samples}, seed {seed}: {found}, exactly {exact}");
            }
        }
    }

    #[test]
    fn old_steps_fade() {
        let mut noise = GradientNoise::default();
        // A mean of 3 and of 1 for two ranks of one sample: nothing but gradient.
        (0..50).for_each(|_| noise.add((3.0, 3.0), (2.0, 1.0), 4));
        (0..50).for_each(|_| noise.add((1.0, 1.0), (2.0, 1.0), 4));
        assert!((noise.square - 1.0).abs() < 1e-5 && noise.trace == 0.0, "{noise:?}");
        assert_eq!((noise.steps, noise.scale()), (100, Some(0.0)));
    }

    #[test]
    fn steps_that_say_nothing_are_left_out() {
        let gradients = Gradients::default();
        assert_eq!(gradients.end_step([0.0; 4], 2, 1, 10).unwrap(), None);
        let first = gradients.end_step([10.0, 8.0, 2.0, 2.0], 2, 3, 10).unwrap();
        assert_eq!(first, Some(GradientNoise { square: 3.0, trace: 6.0, steps: 1 }));
        for broken in [f64::NAN, f64::INFINITY] {
            assert_eq!(gradients.end_step([broken, 8.0, 2.0, 2.0], 2, 3, 10).unwrap(), first);
        }
        assert!(matches!(gradients.end_step([10.0, 8.0, 3.0, 5.0], 2, 3, 10), Err(Error::Shape(_))));
    }

    #[test]
    fn norms_are_of_tensors_in_and_out() {
        let pool = Pool::fixed(Memory::private(65_536).unwrap(), ForkGuard::new().unwrap());
        let (elements, gradients) = (READ as u64 + 11, Gradients::default());
        let of = |dtype| Tensor::new(&pool, dtype, elements).unwrap();
        let (input, output) = (of(Dtype::F32), of(Dtype::Bf16));
        input.write(0, &[2.0_f32; READ + 11]).unwrap();
        let summed = Marked::start(&input, &output, ReduceOp::Sum, 3).unwrap();
        let averaged = Marked::start(&input, &output, ReduceOp::Average, 3).unwrap();
        output.write(0, &[bf16::from_f32(3.0); READ + 11]).unwrap();
        summed.end(&gradients);
        averaged.end(&gradients);
        let count = elements as f64;
        let [own, mean, operations, squared] = gradients.take_step();
        assert_eq!((own, operations, squared), (8.0 * count, 2.0, 4.0));
        assert!((mean - 10.0 * count).abs() < 1e-9 * count, "{mean}");
        assert_eq!(gradients.take_step(), [0.0; 4]);
        let refused =
            |input, reduce| matches!(Marked::start(input, &output, reduce, 3), Err(Error::Shape(_)));
        assert!(refused(&input, ReduceOp::Max) && refused(&of(Dtype::I32), ReduceOp::Sum));
    }
}
