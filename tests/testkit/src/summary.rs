//! From what the tenants printed to a summary of figures and checks.

use crate::lines::Line;
use anyhow::{Context, Result, ensure};
use serde::Serialize;

/// How far a step's loss may be, relatively, from the single process's; `bench`'s training says why.
pub const TOLERANCE: f64 = 1e-4;
/// Why that is the bound, for people.
pub const WHY: &str = "Both trainings compute the same mean over the same 128 images, but add in another order: within \
    each worker's 16 images first, then over the workers. An f32 sum of n terms in another order differs by some \
    sqrt(n) * 6e-8, about 1e-7 here; each step starts from the difference that the steps before have left, and over 300 \
    steps that grows to at most 4e-6 (seen over 5 seeds and 2, 4 and 8 workers). The bound leaves a factor of 25, and the \
    gradient of one worker lost in one step exceeds it more than tenfold.";

/// One step, over all workers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Step {
    /// Loss, the same at every worker.
    pub loss: f64,
    /// The single process's.
    pub reference: f64,
    /// Seconds from the last worker's submission to its completion: the collective without waiting for late workers.
    pub collective: f64,
    /// Seconds since the training began.
    pub at: f64,
}

/// One round of the other tenant.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Round {
    /// Bytes of a rank's tensor.
    pub bytes: u64,
    /// Seconds, of the last rank that came.
    pub collective: f64,
    /// Seconds since the training began; may be negative.
    pub at: f64,
}

/// Something that had to hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What.
    pub what: String,
    /// Whether it did.
    pub passed: bool,
    /// The figures.
    pub found: String,
    /// Whether the demo warns of it where it did not hold, instead of failing.
    pub warns: bool,
}

impl Check {
    /// What came of it, in a word.
    pub fn label(&self) -> &'static str {
        match (self.passed, self.warns) {
            (true, _) => "passed",
            (false, true) => "WARNING",
            (false, false) => "FAILED",
        }
    }
}

/// What the demo found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Whether all checks passed, but for those that warn.
    pub passed: bool,
    /// Each of them.
    pub checks: Vec<Check>,
    /// Workers of the training.
    pub workers: usize,
    /// Hosts.
    pub hosts: usize,
    /// Line rate of each link, in bytes a second.
    pub line_rate: f64,
    /// Bytes that each AllReduce reduced.
    pub bytes: u64,
    /// Seconds that the training took.
    pub seconds: f64,
    /// Of these, seconds that a worker spent in collectives, the mean of all. The wait for late workers is in it.
    pub communication: f64,
    /// AllReduce's bytes a second at the median step, without the wait for late workers.
    pub algbw: f64,
    /// The same, times 2(n-1)/n.
    pub busbw: f64,
    /// The ring's bound between hosts at line rate, over the median step's time.
    pub share: f64,
    /// Tensor bytes of both tenants over all links, a link and second, over line rate, while the training ran.
    pub used: f64,
    /// Share of test images told right.
    pub accuracy: f64,
    /// Largest relative difference of a step's loss from the single process's.
    pub largest_difference: f64,
    /// The other tenant's rounds.
    pub rounds: usize,
    /// The other tenant's bytes, received and checked.
    pub verified_bytes: u64,
    /// The other tenant's AllToAll at the median of its usual rounds, in bytes a second of a rank's tensor.
    pub alltoall_algbw: f64,
    /// Step by step.
    #[serde(skip)]
    pub steps: Vec<Step>,
    /// Round by round.
    #[serde(skip)]
    pub exchange: Vec<Round>,
}

/// What the programs printed, a list a process.
#[derive(Debug, Clone, Default)]
pub struct Printed {
    /// The training's workers, by rank.
    pub workers: Vec<Vec<Line>>,
    /// The other tenant's ranks; none where there is no other tenant.
    pub exchangers: Vec<Vec<Line>>,
    /// The single process.
    pub reference: Vec<Line>,
    /// Ranks of either tenant on one host: one of them counts the host's bytes on the wire.
    pub workers_per_host: usize,
}

/// The middle of the values (the mean of the two middle ones), 0 of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = values.get(middle).copied().unwrap_or(0.0);
    match values.len() % 2 {
        0 if middle > 0 => (upper + values.get(middle - 1).copied().unwrap_or(upper)) / 2.0,
        _ => upper,
    }
}

impl Printed {
    /// Steps that the training has made.
    pub fn steps(&self) -> usize {
        self.workers.first().map_or(0, |worker| losses(worker).len())
    }
}

impl Summary {
    /// Holds one check more.
    pub fn add_check(&mut self, check: Check) {
        self.passed &= check.passed || check.warns;
        self.checks.push(check);
    }
}

fn losses(lines: &[Line]) -> Vec<f64> {
    let loss = |line: &Line| if let Line::Step { loss, .. } = line { Some(*loss) } else { None };
    lines.iter().filter_map(loss).collect()
}

fn trained(lines: &[Line]) -> Option<(u64, u64, &str)> {
    lines.iter().find_map(|line| match line {
        Line::Trained { correct, tested, digest, .. } => Some((*correct, *tested, digest.as_str())),
        _ => None,
    })
}

/// Start and end of the training in microseconds of the clock: the last worker's start, the last worker's last step.
pub fn span(workers: &[Vec<Line>]) -> Result<(u64, u64)> {
    let lines = || workers.iter().flatten();
    let began = lines().filter_map(|line| match line {
        Line::Start { at_us, .. } => Some(*at_us),
        _ => None,
    });
    let ended = lines().filter_map(|line| match line {
        Line::Step { at_us, .. } => Some(*at_us),
        _ => None,
    });
    let began = began.max().context("no worker has begun")?;
    Ok((began, ended.max().context("no worker has made a step")?.max(began + 1)))
}

fn since(at_us: u64, began: u64) -> f64 {
    (at_us as f64 - began as f64) / 1e6
}

fn steps(printed: &Printed, began: u64) -> Vec<Step> {
    let reference = losses(&printed.reference);
    let mut steps: Vec<Step> = Vec::new();
    for (worker, lines) in printed.workers.iter().enumerate() {
        let of_worker = lines.iter().filter_map(|line| match line {
            Line::Step { at_us, loss, collective_us, .. } => Some((*at_us, *loss, *collective_us)),
            _ => None,
        });
        for (number, (at_us, loss, collective_us)) in of_worker.enumerate() {
            let (collective, at) = (collective_us as f64 / 1e6, since(at_us, began));
            match steps.get_mut(number) {
                Some(step) => step.collective = step.collective.min(collective),
                None if worker == 0 => {
                    let reference = reference.get(number).copied().unwrap_or(f64::NAN);
                    steps.push(Step { loss, reference, collective, at });
                }
                None => {}
            }
        }
    }
    steps
}

fn rounds(printed: &Printed, began: u64) -> Vec<Round> {
    let mut rounds: Vec<Round> = Vec::new();
    for lines in &printed.exchangers {
        for line in lines {
            let Line::Round { at_us, round, bytes, collective_us, .. } = line else { continue };
            let (collective, at) = (*collective_us as f64 / 1e6, since(*at_us, began));
            match rounds.get_mut(*round as usize) {
                Some(known) => known.collective = known.collective.min(collective),
                None => rounds.push(Round { bytes: *bytes, collective, at }),
            }
        }
    }
    rounds
}

/// Tensor bytes that all hosts sent between two moments. A receipt counts its host's bytes, so one rank a host is asked.
fn wire_bytes(printed: &Printed, began: u64, ended: u64) -> u64 {
    let per_host = printed.workers_per_host.max(1);
    let workers = printed.workers.iter().step_by(per_host).flatten();
    let within = |at: &u64| (began..=ended).contains(at);
    workers
        .chain(printed.exchangers.iter().flatten())
        .map(|line| match line {
            Line::Step { at_us, wire_bytes, .. } | Line::Round { at_us, wire_bytes, .. } if within(at_us) => {
                *wire_bytes
            }
            _ => 0,
        })
        .sum()
}

fn check_curve(printed: &Printed, steps: &[Step], largest: f64) -> Check {
    let expected = losses(&printed.reference).len();
    let whole = expected > 0
        && steps.len() == expected
        && printed.workers.iter().all(|worker| losses(worker).len() == expected);
    Check {
        what: format!("each step's loss is the single process's within {TOLERANCE:e}"),
        passed: whole && largest <= TOLERANCE,
        found: format!("{} of {expected} steps, largest relative difference {largest:.1e}", steps.len()),
        warns: false,
    }
}

fn check_workers(printed: &Printed) -> Check {
    let digests: Vec<Option<&str>> =
        printed.workers.iter().map(|worker| trained(worker).map(|(_, _, digest)| digest)).collect();
    let first = digests.first().copied().flatten();
    Check {
        what: "all workers end with the same parameters, to the bit".to_owned(),
        passed: first.is_some() && digests.iter().all(|digest| *digest == first),
        found: format!("{} workers, digest {}", digests.len(), first.unwrap_or("missing")),
        warns: false,
    }
}

fn check_accuracy(printed: &Printed) -> (Check, f64) {
    let ours = printed.workers.first().and_then(|worker| trained(worker));
    let single = trained(&printed.reference);
    let what = "as many test images told right as by the single process, but for one at most".to_owned();
    match (ours, single) {
        (Some((ours, tested, _)), Some((single, _, _))) => {
            let found = format!("{ours} and {single} of {tested}");
            let check = Check { what, passed: ours.abs_diff(single) <= 1, found, warns: false };
            (check, ours as f64 / (tested as f64).max(1.0))
        }
        _ => (Check { what, passed: false, found: "a training did not end".to_owned(), warns: false }, 0.0),
    }
}

fn check_exchange(printed: &Printed) -> (Check, u64) {
    let (mut verified, mut stopped, mut agreed) = (0, 0, Vec::new());
    let mut damaged = Vec::new();
    for line in printed.exchangers.iter().flatten() {
        match line {
            Line::Stopped { rounds, verified_bytes, .. } => {
                stopped += 1;
                verified += verified_bytes;
                agreed.push(*rounds);
            }
            Line::Damaged { what, .. } => damaged.push(what.clone()),
            _ => {}
        }
    }
    agreed.dedup();
    let rounds = agreed.first().copied().unwrap_or(0);
    let whole = stopped == printed.exchangers.len() && agreed.len() == 1 && rounds > 0;
    let mut found = format!("{rounds} rounds, {:.1} MB received and checked", verified as f64 / 1e6);
    if let Some(first) = damaged.first() {
        found = format!("{found}; damaged: {first}");
    }
    let what = "every byte of the other tenant's AllToAll is what its sender made".to_owned();
    (Check { what, passed: whole && damaged.is_empty(), found, warns: false }, verified)
}

/// Judges what was printed. `line_rate` in bytes a second.
pub fn judge(printed: &Printed, hosts: usize, line_rate: f64) -> Result<Summary> {
    ensure!(!printed.workers.is_empty(), "there was no worker");
    let (began, ended) = span(&printed.workers)?;
    let (steps, exchange) = (steps(printed, began), rounds(printed, began));
    let difference = |step: &Step| (step.loss - step.reference).abs() / step.reference.abs();
    // A difference that is no number counts as infinite.
    let size = |step: &Step| Some(difference(step)).filter(|d| d.is_finite()).unwrap_or(f64::INFINITY);
    let largest = steps.iter().map(size).fold(0.0, f64::max);
    let (accurate, accuracy) = check_accuracy(printed);
    let (intact, verified_bytes) = check_exchange(printed);
    let mut checks = vec![check_curve(printed, &steps, largest), accurate, check_workers(printed)];
    // A training that has the links to itself is judged by the rest.
    checks.extend((!printed.exchangers.is_empty()).then_some(intact));
    let bytes = printed.workers.iter().flatten().find_map(|line| match line {
        Line::Step { bytes, .. } => Some(*bytes),
        _ => None,
    });
    let bytes = bytes.unwrap_or(0);
    let in_collectives = |line: &Line| match line {
        Line::Step { collective_us, .. } => *collective_us as f64 / 1e6,
        _ => 0.0,
    };
    let workers = printed.workers.len();
    let total: f64 = printed.workers.iter().flatten().map(in_collectives).sum();
    let time = median(steps.iter().map(|step| step.collective).collect()).max(1e-9);
    let (ranks, host_count, size) = (workers as f64, hosts as f64, bytes as f64);
    let bound = 2.0 * (host_count - 1.0) / host_count * size / line_rate;
    let usual = exchange
        .iter()
        .map(|round| round.bytes)
        .max_by_key(|bytes| exchange.iter().filter(|round| round.bytes == *bytes).count());
    let usual_rounds = exchange.iter().filter(|round| Some(round.bytes) == usual);
    let usual_time = median(usual_rounds.map(|round| round.collective).collect()).max(1e-9);
    let seconds = since(ended, began);
    let sent = wire_bytes(printed, began, ended) as f64;
    Ok(Summary {
        passed: checks.iter().all(|check| check.passed),
        checks,
        workers,
        hosts,
        line_rate,
        bytes,
        seconds,
        communication: total / ranks,
        algbw: size / time,
        busbw: size / time * 2.0 * (ranks - 1.0) / ranks,
        share: bound / time,
        used: sent / host_count / seconds / line_rate,
        accuracy,
        largest_difference: largest,
        rounds: exchange.len(),
        verified_bytes,
        alltoall_algbw: usual.unwrap_or(0) as f64 / usual_time,
        steps,
        exchange,
    })
}

#[cfg(test)]
#[path = "summary_tests.rs"]
mod tests;
