//! What prices of the market tell a tenant of racks and neighbours that it is not told of. `full` is for figures.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

#[path = "../../../server/tests/state/adversary/guess.rs"]
mod guess;
mod site;

use guess::{Puzzle, area, gain, indices, mean};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use site::{JOBS, Observation, Seen, Strategy, watch};
use std::collections::BTreeSet;

/// What the adversary goes by beside its offers and recalls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Nothing,
    /// Prices as it is told them.
    Told,
    /// The same, each job's at other rounds: what chance finds.
    Shuffled,
    /// Prices as the market has them.
    Exact,
    /// Prices of racks, which no tenant is told.
    Racks,
}

const ADVERSARIES: [By; 5] = [By::Nothing, By::Told, By::Shuffled, By::Exact, By::Racks];

/// A figure of each two jobs.
type Pairs = Vec<Vec<f64>>;

fn pairs(of: impl Fn(usize, usize) -> f64) -> Pairs {
    (0..JOBS).map(|i| (0..JOBS).map(|j| of(i.min(j), i.max(j))).collect()).collect()
}

/// By jobs and rounds.
type Series = Vec<Vec<f64>>;

fn series(seen: &Seen, of: impl Fn(&Observation) -> f64) -> Series {
    (0..JOBS).map(|job| seen.rounds.iter().map(|heard| of(&heard[job])).collect()).collect()
}

/// By how much each round differs from the one before.
fn changes(series: &Series) -> Series {
    let of_one = |values: &Vec<f64>| {
        let change = values.windows(2).map(|pair| pair[1] - pair[0]);
        std::iter::once(f64::NAN).chain(change).collect()
    };
    series.iter().map(of_one).collect()
}

/// Where both are known.
fn both<'a>(one: &'a [f64], other: &'a [f64]) -> impl Iterator<Item = (f64, f64)> + 'a {
    one.iter().copied().zip(other.iter().copied()).filter(|(a, b)| a.is_finite() && b.is_finite())
}

/// Pearson's; no number where one of both does not vary.
fn correlation(one: &[f64], other: &[f64]) -> f64 {
    let (a, b): (Vec<f64>, Vec<f64>) = both(one, other).unzip();
    let (of_a, of_b) = (mean(&a), mean(&b));
    let product = |left: &[f64], right: &[f64], of_left: f64, of_right: f64| -> f64 {
        left.iter().zip(right).map(|(a, b)| (a - of_left) * (b - of_right)).sum()
    };
    let spread = product(&a, &a, of_a, of_a) * product(&b, &b, of_b, of_b);
    if spread > 1e-12 { product(&a, &b, of_a, of_b) / spread.sqrt() } else { f64::NAN }
}

/// What offers and recalls tell, beside the kind that a job's host has.
fn by_orders(seen: &Seen) -> Vec<Pairs> {
    let has = series(seen, |heard| f64::from(u8::from(heard.has)));
    let moved = changes(&has);
    vec![
        pairs(|i, j| f64::from(u8::from(seen.kinds[i] == seen.kinds[j]))),
        pairs(|i, j| correlation(&has[i], &has[j])),
        pairs(|i, j| correlation(&moved[i], &moved[j])),
    ]
}

/// What such prices tell.
fn by_prices(seen: &Seen, prices: &Series) -> Vec<Pairs> {
    let has = series(seen, |heard| f64::from(u8::from(heard.has)));
    let (moved, changed) = (changes(&has), changes(prices));
    // Beside those of all jobs on the same kind.
    let rounds = 0..seen.rounds.len();
    let middle = |job: usize, round: usize| {
        let alike = (0..JOBS).filter(|other| seen.kinds[*other] == seen.kinds[job]);
        let of: Vec<f64> =
            alike.map(|other| prices[other][round]).filter(|price| price.is_finite()).collect();
        mean(&of)
    };
    let beside: Series = (0..JOBS)
        .map(|job| rounds.clone().map(|round| prices[job][round] - middle(job, round)).collect())
        .collect();
    let apart = |i: usize, j: usize, count: &dyn Fn(f64) -> f64| {
        let each: Vec<f64> = both(&prices[i], &prices[j]).map(|(a, b)| count((a - b).abs())).collect();
        mean(&each)
    };
    let across = |one: &Series, other: &Series, i: usize, j: usize| {
        correlation(&one[i], &other[j]) + correlation(&one[j], &other[i])
    };
    vec![
        pairs(|i, j| apart(i, j, &|apart| f64::from(u8::from(apart < 1e-9)))),
        pairs(|i, j| apart(i, j, &|apart| apart)),
        pairs(|i, j| correlation(&changed[i], &changed[j])),
        pairs(|i, j| correlation(&beside[i], &beside[j])),
        pairs(|i, j| across(prices, &has, i, j)),
        pairs(|i, j| across(&changed, &moved, i, j)),
    ]
}

/// How much what two jobs have with every third differs.
fn thirds(of: &Pairs, i: usize, j: usize) -> f64 {
    let others = (0..JOBS).filter(|k| *k != i && *k != j);
    let each: Vec<f64> =
        others.map(|k| (of[i][k] - of[j][k]).abs()).filter(|value| value.is_finite()).collect();
    mean(&each)
}

/// Prices of each job by rounds.
fn prices(seen: &Seen, by: By, seed: u64) -> Option<Series> {
    match by {
        By::Nothing => None,
        By::Told => Some(series(seen, |heard| heard.disclosed)),
        By::Exact => Some(series(seen, |heard| heard.exact)),
        By::Racks => Some(series(seen, |heard| heard.by_rack)),
        By::Shuffled => {
            let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x5aff);
            let mut all = series(seen, |heard| heard.disclosed);
            for job in &mut all {
                let mut known: Vec<f64> = job.iter().copied().filter(|price| price.is_finite()).collect();
                known.shuffle(&mut rng);
                let places = job.iter_mut().filter(|price| price.is_finite());
                places.zip(known).for_each(|(place, price)| *place = price);
            }
            Some(all)
        }
    }
}

/// Each site's adjusted Rand index of what is guessed, and the truth.
fn guesses(all: &[Seen], by: By, truth: impl Fn(&Seen) -> &[usize]) -> Vec<f64> {
    let of_one = |(site, seen): (usize, &Seen)| {
        let mut figures = by_orders(seen);
        figures.extend(prices(seen, by, site as u64).iter().flat_map(|prices| by_prices(seen, prices)));
        let row = |i: usize, j: usize| figures.iter().flat_map(|of| [of[i][j], thirds(of, i, j)]).collect();
        Puzzle::new(site, truth(seen), row)
    };
    indices(&all.iter().enumerate().map(of_one).collect::<Vec<Puzzle>>())
}

/// How well a rise of a job's price tells that another tenant comes to its rack: an area under the curve, on average over sites.
fn presence(all: &[Seen], by: By) -> f64 {
    let of_one = |(site, seen): (usize, &Seen)| {
        let changed = changes(&prices(seen, by, site as u64)?);
        let came = |job: usize, round: usize| seen.rounds[round][job].came;
        let all = (0..JOBS).flat_map(|job| (0..seen.rounds.len()).map(move |round| (job, round)));
        let known = all.filter(|(job, round)| changed[*job][*round].is_finite());
        let known: Vec<(f64, bool)> =
            known.map(|(job, round)| (changed[job][round], came(job, round))).collect();
        Some(area(&known)).filter(|area| area.is_finite())
    };
    mean(&all.iter().enumerate().filter_map(of_one).collect::<Vec<f64>>())
}

/// How a site's hosts of the adversary stand together: what a question asks for.
type Truth = fn(&Seen) -> &[usize];

fn middle(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// What prices add to offers and recalls, over so many sites of each strategy. A line of JSON for each strategy and question.
fn report(sites: u64, rounds: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for strategy in [Strategy::Steady, Strategy::Ladder, Strategy::Turns] {
        let all: Vec<Seen> = (0..sites).map(|seed| watch(seed, strategy, rounds)).collect();
        let truths: [(&str, Truth); 2] =
            [("racks", |seen| &seen.racks), ("neighbours", |seen| &seen.neighbours)];
        for (question, truth) in truths {
            let found: Vec<Vec<f64>> = ADVERSARIES.iter().map(|by| guesses(&all, *by, truth)).collect();
            let alone = &found[0];
            let added = |at: usize| {
                let (mean, error) = gain(&found[at], alone);
                let each: Vec<f64> =
                    found[at].iter().zip(alone).map(|(found, alone)| found - alone).collect();
                let worst = each.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                format!("[{mean:.5}, {error:.5}, {:.5}, {worst:.5}]", middle(&each))
            };
            lines.push(format!(
                "{{\"strategy\": \"{strategy:?}\", \"question\": \"{question}\", \"sites\": {sites}, \"rounds\": {rounds}, \
                 \"jobs\": {JOBS}, \"alone\": {:.5}, \"disclosed\": {}, \"shuffled\": {}, \"exact\": {}, \"by_rack\": {}, \
                 \"presence\": [{:.4}, {:.4}]}}",
                mean(alone),
                added(1),
                added(2),
                added(3),
                added(4),
                presence(&all, By::Told),
                presence(&all, By::Racks)
            ));
        }
    }
    lines
}

#[test]
#[ignore = "for figures: cargo xtask bench allocation --only market"]
fn full() {
    let number = |name: &str, usual: usize| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
    };
    for line in report(number("SITES", 640) as u64, number("ROUNDS", 120)) {
        println!("{line}");
    }
}

/// All of the adversary's jobs that have hosts of a kind hear one price, or their own bid where that is less.
#[test]
fn jobs_of_a_kind_hear_one_price() {
    let mut by_rack = false;
    for strategy in [Strategy::Steady, Strategy::Ladder, Strategy::Turns] {
        for seed in 0..4 {
            let seen = watch(seed, strategy, 40);
            let mut told = 0;
            for (round, heard) in seen.rounds.iter().enumerate() {
                for kind in seen.kinds.iter().copied().collect::<BTreeSet<usize>>() {
                    let has = |job: &usize| seen.kinds[*job] == kind && heard[*job].has;
                    let of: Vec<&Observation> = (0..JOBS).filter(has).map(|job| &heard[job]).collect();
                    let differ = |price: fn(&Observation) -> f64| {
                        of.iter().any(|heard| price(heard).to_bits() != price(of[0]).to_bits())
                    };
                    assert!(!differ(|heard| heard.exact), "{strategy:?}, seed {seed}, round {round}");
                    let steady = strategy == Strategy::Steady;
                    assert!(!(steady && differ(|heard| heard.disclosed)), "seed {seed}, round {round}");
                    by_rack |= differ(|heard| heard.by_rack);
                    told += of.len();
                }
            }
            assert!(told > 100, "{strategy:?}, seed {seed}: {told} prices");
        }
    }
    assert!(by_rack, "the experiment shows nothing");
}

/// The figures in small. An adversary that hears prices of racks finds them, and one that hears what tenants are told does not.
#[test]
fn prices_of_racks_would_tell_and_coarse_ones_do_not() {
    let all: Vec<Seen> = (0..24).map(|seed| watch(seed, Strategy::Steady, 40)).collect();
    let found = |by| guesses(&all, by, |seen| &seen.racks);
    let alone = found(By::Nothing);
    let added = |by| gain(&found(by), &alone).0;
    let (told, planted) = (added(By::Told), added(By::Racks));
    assert!(planted > 0.3, "seeds 0..24: a price of a rack adds {planted}");
    assert!(told < 0.1, "seeds 0..24: what is told adds {told}");
}
