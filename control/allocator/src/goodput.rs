//! Goodput: how fast a job comes nearer to its end. It is throughput times statistical efficiency (Qiao et al., "Pollux", OSDI
//! 2021). Throughput follows from seven parameters, and efficiency from the noise of gradients.

/// What a step takes, as parameters. Computation and communication overlap as a norm: with `overlap` 1 they add up, and with a
/// large one the longer of them is all that is seen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepModel {
    /// Seconds of computation, whatever the batch.
    pub compute_base: f64,
    /// Seconds of computation for each sample of a worker's batch.
    pub compute_sample: f64,
    /// Seconds of communication between hosts, with two workers.
    pub hosts_base: f64,
    /// The same for each further worker.
    pub hosts_worker: f64,
    /// Seconds of communication within one host, with two workers.
    pub local_base: f64,
    /// The same for each further worker.
    pub local_worker: f64,
    /// The norm's exponent, 1 to 10.
    pub overlap: f64,
}

/// The least that a time is taken for, in seconds.
pub(crate) const LEAST: f64 = 1e-8;

impl StepModel {
    /// Seconds of one pass over so many samples on each worker.
    pub(crate) fn compute(&self, batch: f64) -> f64 {
        self.compute_base + self.compute_sample * batch
    }

    /// Seconds of communication.
    pub(crate) fn network(&self, hosts: u32, workers: u32) -> f64 {
        let further = (f64::from(workers) - 2.0).max(LEAST);
        match (hosts > 1, workers > 1) {
            (true, _) => self.hosts_base + self.hosts_worker * further,
            (false, true) => self.local_base + self.local_worker * further,
            (false, false) => LEAST + LEAST * further,
        }
    }

    /// Seconds of a step whose gradients are exchanged.
    pub fn step(&self, hosts: u32, workers: u32, batch: f64) -> f64 {
        overlapped(self.compute(batch), self.network(hosts, workers), self.overlap)
    }

    /// Samples a second.
    pub fn throughput(&self, hosts: u32, workers: u32, local: LocalBatch) -> f64 {
        let batch = f64::from(local.samples);
        let seconds = f64::from(local.accumulated) * self.compute(batch) + self.step(hosts, workers, batch);
        f64::from(workers) * local.total() / seconds
    }
}

/// The norm of two times.
fn overlapped(one: f64, other: f64, exponent: f64) -> f64 {
    let (longer, shorter) = if one > other { (one, other) } else { (other, one) };
    longer * (1.0 + (shorter / longer).powf(exponent)).powf(1.0 / exponent)
}

/// What is known of gradients: the squared norm of their mean, and their variance at the initial batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Noise {
    /// The squared norm of the true gradient.
    pub square: f64,
    /// The variance of the gradient of one initial batch.
    pub variance: f64,
}

impl Noise {
    /// What was estimated of gradients, for batches that begin at `initial` samples. `square` is the squared norm of the true one,
    /// `trace` the trace of the covariance of one sample's. An estimate below 0 counts as 0; `None` where one is no number.
    pub fn measured(square: f64, trace: f64, initial: u32) -> Option<Self> {
        let variance = trace.max(0.0) / f64::from(initial.max(1));
        (square.is_finite() && trace.is_finite()).then_some(Self { square: square.max(0.0), variance })
    }

    /// How many initial batches one batch of `scale` times as many samples is worth: between 1 and `scale`. Over `scale` it is the
    /// statistical efficiency.
    pub fn gain(&self, scale: f64) -> f64 {
        let below = self.variance / scale + self.square;
        if below > 0.0 { (self.variance + self.square) / below } else { 1.0 }
    }
}

/// By which rule a job's learning rate follows its batch. Exact for SGD; which one suits another optimizer is the tenant's to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LearningRate {
    /// By what the batch gains (Johnson et al., "AdaScale SGD", 2020): between no change and the linear rule.
    AdaScale,
    /// By the root of the batch.
    SquareRoot,
    /// In proportion to the batch.
    Linear,
}

impl LearningRate {
    /// What the initial batch's learning rate is multiplied by for a batch `scale` times as large, `scale` above 0.
    pub fn factor(self, noise: Noise, scale: f64) -> f64 {
        match self {
            Self::AdaScale => noise.gain(scale),
            Self::SquareRoot => scale.sqrt(),
            Self::Linear => scale,
        }
    }
}

/// What each worker computes between two exchanges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalBatch {
    /// Samples of one pass.
    pub samples: u32,
    /// Passes whose gradients are added up before the last one.
    pub accumulated: u32,
}

impl LocalBatch {
    /// Samples of a worker between two exchanges.
    pub fn total(&self) -> f64 {
        f64::from(self.samples) * (f64::from(self.accumulated) + 1.0)
    }

    /// Splits so many samples of a worker into passes of at most `most`. One worker alone with a batch beyond the initial one
    /// computes at least two, because the noise of a single pass cannot be estimated.
    pub fn split(samples: f64, most: u32, alone_and_beyond: bool) -> Self {
        let passes = ceiling(samples / f64::from(most.max(1))).max(1.0);
        let passes = if alone_and_beyond { passes.max(2.0) } else { passes };
        Self { samples: ceiling(samples / passes) as u32, accumulated: passes as u32 - 1 }
    }

    /// The fewest passes of all workers that make a batch of a range, each of `least` to `most` samples. `None` where no number of whole
    /// samples does.
    pub fn within(
        workers: u32,
        (smallest, largest): (u32, u32),
        (least, most): (u32, u32),
        alone_and_beyond: bool,
    ) -> Option<Self> {
        let first = if alone_and_beyond { 2 } else { 1 };
        (first..=MOST_PASSES).find_map(|passes| {
            let count = workers.checked_mul(passes).filter(|count| *count > 0)?;
            let samples = smallest.div_ceil(count).max(least);
            let fits = samples <= most && samples.checked_mul(count).is_some_and(|batch| batch <= largest);
            fits.then_some(Self { samples, accumulated: passes - 1 })
        })
    }
}

/// The most passes that are tried to make a batch of a range.
const MOST_PASSES: u32 = 64;

/// Rounds up, but for what is off by a rounding error.
pub(crate) fn ceiling(value: f64) -> f64 {
    (value - 1e-8).ceil()
}

/// What a job's batches may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchRange {
    /// The batch for which progress counts 1: the smallest recorded.
    pub initial: u32,
    /// The smallest batch over all workers.
    pub least: u32,
    /// The largest batch over all workers.
    pub most: u32,
    /// The fewest samples of a pass.
    pub local_least: u32,
    /// The most samples of a pass, by memory.
    pub local_most: u32,
}

/// The best batch of an allocation, and its goodput.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Samples a second, each worth as much as one of the initial batch. 0 where no batch fits.
    pub goodput: f64,
    /// What each worker computes.
    pub local: LocalBatch,
}

/// How many batches are tried, evenly spaced by ratio.
const CANDIDATES: u32 = 50;

/// The batches that are tried for so many workers, as what each worker computes. Batches that do not fit a pass are left out, so there
/// may be none.
pub fn candidates(workers: u32, range: BatchRange) -> impl Iterator<Item = LocalBatch> {
    let each = f64::from(workers.max(1));
    let first = f64::from(range.least).max(f64::from(range.local_least) * each);
    let last = f64::from(range.most);
    (0..CANDIDATES)
        .map(move |place| match place {
            0 => first,
            _ if place + 1 == CANDIDATES => last,
            _ => first * (last / first).powf(f64::from(place) / f64::from(CANDIDATES - 1)),
        })
        .map(move |batch| {
            let samples = batch / each;
            let beyond = workers == 1 && samples > f64::from(range.initial) + 1e-8;
            LocalBatch::split(samples, range.local_most, beyond)
        })
        .filter(move |local| (range.local_least..=range.local_most).contains(&local.samples))
}

/// The batch with the largest goodput.
pub fn best(model: &StepModel, noise: Noise, hosts: u32, workers: u32, range: BatchRange) -> Option<Choice> {
    best_of(model, noise, (hosts, workers), range, |_| true)
}

/// The same of those batches that fit, for so many hosts and workers. By rounding up a candidate may be beyond the range's end.
pub fn best_of(
    model: &StepModel,
    noise: Noise,
    (hosts, workers): (u32, u32),
    range: BatchRange,
    fits: impl Fn(LocalBatch) -> bool,
) -> Option<Choice> {
    let mut best: Option<Choice> = None;
    for local in candidates(workers, range).filter(|local| fits(*local)) {
        let scale = f64::from(workers) * local.total() / f64::from(range.initial.max(1));
        let goodput = model.throughput(hosts, workers, local) * noise.gain(scale) / scale;
        if best.is_none_or(|best| goodput > best.goodput) {
            best = Some(Choice { goodput, local });
        }
    }
    best
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const MODEL: StepModel = StepModel {
        compute_base: 0.1,
        compute_sample: 0.01,
        hosts_base: 0.2,
        hosts_worker: 0.01,
        local_base: 0.05,
        local_worker: 0.001,
        overlap: 1.0,
    };

    #[test]
    fn times_add_up_or_hide_each_other() {
        assert!((MODEL.step(2, 4, 10.0) - 0.42).abs() < 1e-9);
        let hidden = StepModel { overlap: 10.0, ..MODEL };
        assert!((0.22..0.24).contains(&hidden.step(2, 4, 10.0)));
        assert!((MODEL.step(1, 1, 10.0) - 0.2).abs() < 1e-6);
    }

    #[test]
    fn larger_batches_gain_what_noise_allows() {
        let noisy = Noise { square: 0.0, variance: 1.0 };
        let still = Noise { square: 1.0, variance: 0.0 };
        assert_eq!((noisy.gain(8.0), still.gain(8.0)), (8.0, 1.0));
        assert_eq!(Noise { square: 0.0, variance: 0.0 }.gain(8.0), 1.0);
    }

    #[test]
    fn efficiency_follows_from_measured_noise() {
        // A noise scale of 300 samples.
        let noise = Noise::measured(2.0, 600.0, 32).unwrap();
        for batch in [32.0, 64.0, 1000.0] {
            let efficiency = noise.gain(batch / 32.0) / (batch / 32.0);
            let expected = (300.0 + 32.0) / (300.0 + batch);
            assert!((efficiency - expected).abs() < 1e-12, "{batch}: {efficiency}, {expected}");
        }
        assert_eq!(Noise::measured(-1.0, 32.0, 32), Some(Noise { square: 0.0, variance: 1.0 }));
        assert_eq!(Noise::measured(1.0, -1.0, 0), Some(Noise { square: 1.0, variance: 0.0 }));
        for (square, trace) in [(f64::NAN, 1.0), (1.0, f64::NAN), (f64::INFINITY, 1.0)] {
            assert_eq!(Noise::measured(square, trace, 32), None, "{square} {trace}");
        }
    }

    #[test]
    fn learning_rates_grow_by_their_rule() {
        let noise = Noise { square: 1.0, variance: 3.0 };
        let factors = |rule: LearningRate| [0.25, 1.0, 3.0].map(|scale| rule.factor(noise, scale));
        assert_eq!(factors(LearningRate::AdaScale), [4.0 / 13.0, 1.0, 2.0]);
        assert_eq!(factors(LearningRate::SquareRoot), [0.5, 1.0, 3.0_f64.sqrt()]);
        assert_eq!(factors(LearningRate::Linear), [0.25, 1.0, 3.0]);
    }

    #[test]
    fn the_batch_grows_with_noise() {
        let range = BatchRange { initial: 32, least: 32, most: 1024, local_least: 8, local_most: 64 };
        let choose = |square, variance| best(&MODEL, Noise { square, variance }, 1, 4, range).unwrap();
        let (small, large) = (choose(1.0, 0.01), choose(0.01, 1.0));
        assert!(small.local.total() < large.local.total(), "{small:?} {large:?}");
        assert!(small.local.total() < 16.0 && large.local.total() > 50.0, "{small:?} {large:?}");
        let short = |local: LocalBatch| local.samples <= 32;
        let noise = Noise { square: 0.01, variance: 1.0 };
        let fitting = best_of(&MODEL, noise, (1, 4), range, short).unwrap();
        assert!(fitting.local.samples <= 32 && fitting.goodput < large.goodput, "{fitting:?} {large:?}");
        assert_eq!(best_of(&MODEL, noise, (1, 4), range, |_| false), None);
        let narrow = BatchRange { local_most: 4, ..range };
        assert_eq!(best(&MODEL, Noise { square: 1.0, variance: 1.0 }, 1, 4, narrow), None);
    }

    #[test]
    fn no_batch_is_below_the_least() {
        let still = Noise { square: 1.0, variance: 0.0 };
        let range = BatchRange { initial: 32, least: 200, most: 1024, local_least: 8, local_most: 64 };
        for workers in 1..=16 {
            let batches = candidates(workers, range).map(|local| f64::from(workers) * local.total());
            assert!(batches.fold(f64::INFINITY, f64::min) >= 200.0, "{workers} workers");
            // Without noise a larger batch gains nothing, so that the least is chosen.
            let choice = best(&MODEL, still, 1, workers, range).unwrap();
            assert!(f64::from(workers) * choice.local.total() < 240.0, "{workers} workers: {choice:?}");
        }
    }

    #[test]
    fn one_worker_beyond_the_initial_batch_makes_two_passes() {
        let local = LocalBatch::split(33.0, 64, true);
        assert_eq!(local, LocalBatch { samples: 17, accumulated: 1 });
        assert_eq!(LocalBatch::split(129.0, 64, false), LocalBatch { samples: 43, accumulated: 2 });
    }

    #[test]
    fn whole_samples_make_a_batch_of_a_range() {
        let within = |workers, range, alone| LocalBatch::within(workers, range, (4, 64), alone);
        assert_eq!(within(3, (100, 110), false), Some(LocalBatch { samples: 34, accumulated: 0 }));
        assert_eq!(within(3, (100, 100), false), None);
        assert_eq!(within(1, (100, 200), false), Some(LocalBatch { samples: 50, accumulated: 1 }));
        assert_eq!(within(1, (32, 64), true), Some(LocalBatch { samples: 16, accumulated: 1 }));
    }
}
