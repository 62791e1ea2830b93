//! What being told is worth. Jobs that act on events run beside the same jobs with all that the provider knows, and with nothing.

use super::experiment::{Sample, watch_jobs};
use harmonaize_abi::CongestionLevel;
use harmonaize_abi::session::{Checkpoint, Knobs, Priority};
use harmonaize_disclose::{CurrentState, Maintenance, choose};
use std::time::Duration;

/// Seconds between two looks.
pub(super) const STEP: f64 = 0.25;

/// Of an iteration: seconds for each micro-batch, and for its communication where nothing slows it.
const COMPUTE: f64 = 0.02;
const SENDING: f64 = 0.06;

/// The batch, in micro-batches, at which a sample is worth half of what it is in a very small one. Source: McCandlish et al., "An
/// Empirical Model of Large-Batch Training", 2018.
const CRITICAL: f64 = 16.0;

/// Micro-batches of an iteration at most.
const MOST: u32 = 16;

/// A checkpoint's longest time since the last, and what it costs.
const EVERY: Duration = Duration::from_secs(60);
const COST: Duration = Duration::from_secs(1);

/// Progress a second, in micro-batches of a very small batch.
fn rate(accumulate: u32, share: f64) -> f64 {
    let batch = f64::from(accumulate);
    batch / (1.0 + batch / CRITICAL) / (batch * COMPUTE + SENDING / share.max(0.01))
}

fn best(share: f64) -> u32 {
    (1..=MOST).max_by(|a, b| rate(*a, share).total_cmp(&rate(*b, share))).unwrap_or(1)
}

/// How a job decides.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Disclosure {
    Nothing,
    Events,
    /// All that the provider knows; saving early while slow, or not.
    Everything {
        reacts: bool,
    },
}

/// What a job gets done.
fn progress(samples: &[Sample], job: usize, told: Disclosure) -> f64 {
    let (mut done, mut saved, mut last) = (0.0, 0.0, 0.0_f64);
    let (mut running, mut noticed) = (true, None);
    for (at, sample) in samples.iter().enumerate() {
        let now = at as f64 * STEP;
        let (share, standing, runs) = sample.jobs[job];
        if !runs {
            if running {
                done = saved;
            }
            (running, last) = (false, now);
            continue;
        }
        running = true;
        let standing = match told {
            Disclosure::Events => standing,
            Disclosure::Nothing => CurrentState::default(),
            Disclosure::Everything { reacts: early } => {
                noticed = match (sample.going[job], noticed) {
                    (true, None) => Some(Duration::from_secs_f64(now)),
                    (true, since) => since,
                    (false, _) => None,
                };
                let slow = match share {
                    share if early && share < 0.5 => CongestionLevel::Severe,
                    share if early && share < 0.9 => CongestionLevel::Mild,
                    _ => CongestionLevel::None,
                };
                CurrentState {
                    slowdown: slow,
                    maintenance: noticed.map(|told| Maintenance { announced: told, at: told }),
                }
            }
        };
        // The feed's clock is that of the samples, less where they began.
        let maintenance = match told {
            Disclosure::Events => standing.maintenance.map(|going| Maintenance {
                announced: going.announced.saturating_sub(sample.began),
                at: going.at.saturating_sub(sample.began),
            }),
            _ => standing.maintenance,
        };
        let standing = CurrentState { maintenance, ..standing };
        let since = Duration::from_secs_f64(now - last);
        let checkpoint =
            Some(Checkpoint { every: EVERY, cost: COST, last: since, importance: Priority::Normal });
        let knobs = Knobs { accumulate: (best(1.0), best(0.3)), checkpoint };
        let choice = choose(&knobs, &standing, Duration::from_secs_f64(now));
        let accumulate =
            if let Disclosure::Everything { .. } = told { best(share) } else { choice.accumulate };
        done += rate(accumulate, share) * STEP;
        if choice.checkpoint {
            done -= rate(accumulate, share) * COST.as_secs_f64();
            (saved, last) = (done, now);
        }
    }
    done
}

/// The part of what everything would gain that events gain, over all fabrics. Then what everything gains, as a part of what is
/// done without.
pub(super) fn worth(fabrics: u64, whiles: usize) -> (f64, f64) {
    let mut sums = [0.0; 4];
    let seeds: Vec<u64> = (1000..1000 + fabrics).collect();
    for samples in super::in_parallel(&seeds, |seed| watch_jobs(*seed, whiles)) {
        for job in 0..2 {
            let [late, early] = [false, true].map(|early| Disclosure::Everything { reacts: early });
            let all = [Disclosure::Nothing, Disclosure::Events, late, early];
            all.iter().zip(&mut sums).for_each(|(told, sum)| *sum += progress(&samples, job, *told));
        }
    }
    let [nothing, events, late, early] = sums;
    let everything = f64::max(late, early);
    ((events - nothing) / (everything - nothing), everything / nothing - 1.0)
}

#[test]
fn who_knows_more_gets_more_done() {
    assert!(best(1.0) < best(0.3) && rate(best(0.3), 0.3) > rate(best(1.0), 0.3));
}
