//! The batch of an iteration that a tenant leaves to the provider. It is chosen by throughput times statistical efficiency, as the
//! allocator has them.
//!
//! It follows from what the tenant gave and from the level of its congestion events, and from nothing finer: whoever asks often
//! learns no more than who reads those.

use harmonaize_abi::CongestionLevel;
use harmonaize_abi::session::{BatchChoice, BatchKnobs, LearningRate as Rule};
use harmonaize_allocator::{BatchRange, LearningRate, LocalBatch, Noise, StepModel, best_of};

/// How many times as long an exchange is reckoned to last. A mild level is a rate of a half to nine tenths, a severe one is below
/// that.
fn slowdown(level: CongestionLevel) -> f64 {
    match level {
        CongestionLevel::None => 1.0,
        CongestionLevel::Mild => 1.5,
        CongestionLevel::Severe => 3.0,
    }
}

/// Ranks can make no batch of the range. The text goes to the tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no batch of {} to {} samples: {ranks} ranks with 1 to {passes} micro-batches of {} to {} samples make {} to {}",
    samples.0,
    samples.1,
    micro.0,
    micro.1,
    u64::from(*ranks) * u64::from(micro.0),
    u128::from(*ranks) * u128::from(micro.1) * u128::from(*passes)
)]
pub struct NoBatch {
    /// The fewest and the most of a batch.
    samples: (u32, u32),
    /// The fewest and the most of a micro-batch.
    micro: (u32, u32),
    ranks: u32,
    /// The most micro-batches of a rank.
    passes: u32,
}

/// Chooses for so many ranks: micro-batches, `passes` at most, and their batch. The knobs make sense.
///
/// # Errors
/// Why the ranks cannot make a batch of the range.
pub(crate) fn choose_batch(
    knobs: &BatchKnobs,
    passes: u32,
    ranks: u32,
    level: CongestionLevel,
) -> Result<(u32, BatchChoice), NoBatch> {
    let BatchKnobs { samples: (least, most), micro: (local_least, local_most), initial, .. } = *knobs;
    let model = StepModel {
        compute_base: knobs.pass.as_secs_f64(),
        compute_sample: knobs.sample.as_secs_f64(),
        hosts_base: knobs.exchange.as_secs_f64() * slowdown(level),
        hosts_worker: 0.0,
        local_base: 0.0,
        local_worker: 0.0,
        overlap: 1.0,
    };
    let range = BatchRange { initial, least, most, local_least, local_most };
    let batch = |local: LocalBatch| f64::from(ranks) * local.total();
    let fits = |local: LocalBatch| {
        local.accumulated < passes && (f64::from(least)..=f64::from(most)).contains(&batch(local))
    };
    let rule = match knobs.rule {
        Rule::AdaScale => LearningRate::AdaScale,
        Rule::SquareRoot => LearningRate::SquareRoot,
        Rule::Linear => LearningRate::Linear,
    };
    let chosen = Noise::measured(knobs.square, knobs.trace, initial).and_then(|noise| {
        // The model takes each rank for a host: the exchange's time is the tenant's word, wherever its ranks are.
        let best = best_of(&model, noise, (ranks, ranks), range, fits).map(|best| best.local);
        // By rounding up all that are tried may miss a narrow range.
        let within = || LocalBatch::within(ranks, knobs.samples, knobs.micro, false);
        let local = best.or_else(within).filter(|local| fits(*local))?;
        let learning_rate = rule.factor(noise, batch(local) / f64::from(initial));
        let choice = BatchChoice { micro: local.samples, learning_rate };
        learning_rate.is_finite().then_some((local.accumulated + 1, choice))
    });
    chosen.ok_or(NoBatch { samples: knobs.samples, micro: knobs.micro, ranks, passes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const KNOBS: BatchKnobs = BatchKnobs {
        samples: (32, 4096),
        micro: (1, 64),
        initial: 32,
        rule: Rule::AdaScale,
        square: 1.0,
        trace: 1000.0,
        pass: Duration::from_millis(10),
        sample: Duration::from_millis(1),
        exchange: Duration::from_millis(200),
    };

    fn batch(knobs: &BatchKnobs, level: CongestionLevel) -> u32 {
        let (passes, choice) = choose_batch(knobs, 64, 4, level).unwrap();
        4 * passes * choice.micro
    }

    #[test]
    fn noise_and_congestion_make_batches_larger() {
        let noises = [0.0, 100.0, 1000.0, 10_000.0];
        let usual = noises.map(|trace| batch(&BatchKnobs { trace, ..KNOBS }, CongestionLevel::None));
        assert!(usual.is_sorted() && usual[0] == 32 && usual[3] > 4 * usual[1], "{usual:?}");
        let levels = [CongestionLevel::None, CongestionLevel::Mild, CongestionLevel::Severe];
        let slowed = levels.map(|level| batch(&KNOBS, level));
        assert!(slowed.is_sorted() && slowed[0] < slowed[2], "{slowed:?}");
    }

    /// What is chosen, by the formula of the papers over every batch of single micro-batches.
    #[test]
    fn the_choice_is_near_the_best_of_all_batches() {
        let knobs = BatchKnobs { trace: 100.0, exchange: Duration::from_millis(20), ..KNOBS };
        let goodput = |micro: u32| {
            let batch = 4.0 * f64::from(micro);
            batch / (0.02 + 0.01 + 0.001 * f64::from(micro)) * (100.0 + 32.0) / (100.0 + batch)
        };
        let best = (8..=64).map(goodput).fold(0.0, f64::max);
        let (passes, choice) = choose_batch(&knobs, 1, 4, CongestionLevel::None).unwrap();
        assert!(passes == 1 && goodput(choice.micro) > 0.99 * best, "{choice:?}");
    }

    #[test]
    fn learning_rates_go_by_the_rule() {
        let all = BatchKnobs { samples: (128, 128), ..KNOBS };
        let rate = |rule| choose_batch(&BatchKnobs { rule, ..all }, 1, 4, CongestionLevel::None).unwrap().1;
        assert_eq!(rate(Rule::Linear), BatchChoice { micro: 32, learning_rate: 4.0 });
        assert_eq!(rate(Rule::SquareRoot).learning_rate, 2.0);
        let gain = (1000.0 / 32.0 + 1.0) / (1000.0 / 128.0 + 1.0);
        assert!((rate(Rule::AdaScale).learning_rate - gain).abs() < 1e-9);
    }

    #[test]
    fn a_batch_is_within_its_range_or_there_is_none() {
        let choose = |samples, passes, ranks| {
            choose_batch(&BatchKnobs { samples, ..KNOBS }, passes, ranks, CongestionLevel::Severe)
        };
        for most in 300..340 {
            let (passes, choice) = choose((100, most), 3, 3).unwrap();
            assert!(passes <= 3 && (100..=most).contains(&(3 * passes * choice.micro)), "{most}: {choice:?}");
        }
        let why = choose((1000, 2000), 2, 4).unwrap_err();
        assert_eq!(why, NoBatch { samples: (1000, 2000), micro: KNOBS.micro, ranks: 4, passes: 2 });
        assert!(why.to_string().ends_with("samples make 4 to 512"), "{why}");
        assert!(choose((100, 100), 1, 3).is_err());
        // Two micro-batches of 13 samples would be too many, and five of 5 are not.
        let narrow = BatchKnobs { samples: (97, 100), micro: (1, 20), ..KNOBS };
        let (passes, choice) = choose_batch(&narrow, 5, 4, CongestionLevel::None).unwrap();
        assert_eq!((passes, choice.micro), (5, 5));
        assert!(choose_batch(&narrow, 4, 4, CongestionLevel::None).is_err());
        // Numbers that no computation can take.
        let huge = BatchKnobs { square: f64::MAX, trace: f64::MAX, initial: 1, ..KNOBS };
        assert!(choose_batch(&huge, 64, 4, CongestionLevel::None).is_err());
    }
}
