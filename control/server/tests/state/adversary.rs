//! A tenant that wants to know what the provider keeps to itself. It asks which of its ranks stand in one rack, and who else is there.
//! It runs against control as it is, in virtual time, and has all that a tenant is told. Beside it runs the same tenant with nothing but
//! what it could find out by itself, and one that is told what the provider knows.

mod evidence;
mod experiment;
mod guess;
mod using;

use evidence::together;
use experiment::{Cause, RANKS, Seen, Strategy, watch};
use guess::{Puzzle, area, gain, mean};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// The ways of being told, each alone.
const METHODS: [By; 12] = [
    By::WithoutStragglers,
    By::Events,
    By::Stragglers,
    By::Times,
    By::Receipts,
    By::Rates,
    By::Meetings,
    By::Going,
    By::RawEvents,
    By::RawStragglers,
    By::RawTimes,
    By::RawMeetings,
];

/// By how many seconds a round trip's mean is off when a tenant measures it: its standard deviation.
const NOISE: [(&str, f64); 3] = [("weak", 300e-6), ("medium", 150e-6), ("strong", 60e-6)];

/// What there is to go by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Probing,
    Events,
    Stragglers,
    Times,
    Receipts,
    Rates,
    Meetings,
    Going,
    Told,
    /// What is told but for who is late.
    WithoutStragglers,
    /// What is known, all of it, and of it what happens, who is late, delays, and which communicators meet.
    Raw,
    RawEvents,
    RawStragglers,
    RawTimes,
    RawMeetings,
}

fn numbers(seen: &Seen, measured: &[Vec<f64>], by: By, i: usize, j: usize) -> Vec<f64> {
    let mut row = vec![measured[i][j]];
    let others = (0..RANKS).filter(|k| *k != i && *k != j);
    row.push(others.map(|k| (measured[i][k] - measured[j][k]).abs()).sum());
    row.extend(together(seen.gone.iter(), i, j));
    let told = &seen.evidence;
    match by {
        By::Probing => {}
        By::Events => row.extend(told.events(i, j)),
        By::Stragglers => row.extend(told.stragglers(i, j)),
        By::Times => row.extend(told.times(i, j)),
        By::Receipts => row.extend(told.receipts(i, j)),
        By::Rates => row.extend(told.rates(i, j)),
        By::Meetings => row.extend(told.meetings(i, j)),
        By::Going => row.extend(told.going(i, j)),
        By::RawEvents => row.extend(seen.raw.events(i, j)),
        By::RawStragglers => row.extend(seen.raw.stragglers(i, j)),
        By::RawTimes => row.extend(seen.raw.times(i, j)),
        By::RawMeetings => row.extend(seen.raw.meetings(i, j)),
        By::Told | By::WithoutStragglers | By::Raw => {
            let of = if by == By::Raw { &seen.raw } else { told };
            let all = [
                of.events(i, j),
                of.times(i, j),
                of.receipts(i, j),
                of.rates(i, j),
                of.meetings(i, j),
                of.going(i, j),
            ];
            row.extend(all.concat());
            if by != By::WithoutStragglers {
                row.extend(of.stragglers(i, j));
            }
        }
    }
    row
}

/// What probing tells: a mean delay between each two ranks.
fn measure(seen: &Seen, noise: f64, seed: u64) -> Vec<Vec<f64>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut found = vec![vec![0.0; RANKS]; RANKS];
    for (i, j) in (0..RANKS).flat_map(|i| (i + 1..RANKS).map(move |j| (i, j))) {
        // Twelve of them are about normal.
        let normal: f64 = (0..12).map(|_| rng.random_range(0.0..1.0)).sum::<f64>() - 6.0;
        found[i][j] = seen.delays[i][j] * 2.0 + normal * noise;
        found[j][i] = found[i][j];
    }
    found
}

/// Noises that are drawn for each fabric: the same for all who probe.
const DRAWS: u64 = 6;

/// Each fabric's adjusted Rand index on average over draws of the noise.
fn indices(all: &[Seen], by: By, noise: f64) -> Vec<f64> {
    let mut puzzles = Vec::new();
    for (fabric, seen) in all.iter().enumerate() {
        for draw in 0..DRAWS {
            let measured = measure(seen, noise, (fabric as u64) << 16 | draw);
            puzzles.push(Puzzle::new(fabric, &seen.racks, |i, j| numbers(seen, &measured, by, i, j)));
        }
    }
    guess::indices(&puzzles)
}

/// Calls for each, on as many threads as there are processors; what came of it, in order.
pub(super) fn in_parallel<T: Sync, R: Send>(all: &[T], call: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some(one) = all.get(at) else { return done };
            done.push((at, call(one)));
        }
    };
    let mut done: Vec<(usize, R)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

/// How well a neighbour's coming is told from nothing. The first is by what the tenant is told, and the second by what the provider
/// knows.
fn presence(all: &[Seen]) -> [f64; 2] {
    let whiles = || all.iter().flat_map(|seen| &seen.whiles);
    let of = |which: usize| {
        let kinds = whiles().filter(|(cause, _)| matches!(cause, Cause::Neighbour | Cause::Nothing));
        area(&kinds.map(|(cause, slow)| (slow[which], *cause == Cause::Neighbour)).collect::<Vec<_>>())
    };
    [of(0), of(1)]
}

/// What each way of being told adds to probing alone, over fabrics of these strategies together.
fn report(fabrics: u64, whiles: usize, rounds: usize) -> String {
    let strategies = [Strategy::Pairs, Strategy::Threes, Strategy::Turns];
    let seeds: Vec<(Strategy, u64)> =
        strategies.iter().flat_map(|strategy| (0..fabrics).map(|seed| (*strategy, seed))).collect();
    let began = std::time::Instant::now();
    let mut of_pairs = in_parallel(&seeds, |(strategy, seed)| watch(*seed, *strategy, whiles, rounds));
    let mut of_threes = of_pairs.split_off(fabrics as usize);
    let of_turns = of_threes.split_off(fabrics as usize);
    println!("  watched: {:?}", began.elapsed());
    let strategies = strategies.into_iter().zip([of_pairs, of_threes, of_turns]).collect::<Vec<_>>();
    let mut probing = Vec::new();
    for (name, noise) in NOISE {
        for (strategy, all) in &strategies {
            let ways: Vec<By> = [By::Probing, By::Told, By::Raw].into_iter().chain(METHODS).collect();
            let found = in_parallel(&ways, |by| indices(all, *by, noise));
            let added = |at: usize| gain(&found[at], &found[0]);
            println!("  {name} probing, {strategy:?}: {:.3} alone", mean(&found[0]));
            for (at, by) in ways.iter().enumerate().skip(1) {
                let (gain, error) = added(at);
                println!("    {by:?}: {gain:+.3} +- {error:.3}");
            }
            let strategy = format!("{strategy:?}").to_lowercase();
            let pair = |(gain, error): (f64, f64)| format!("[{gain}, {error}]");
            probing.push(format!(
                "{{\"noise\": \"{name}\", \"strategy\": \"{strategy}\", \"alone\": {}, \"disclosed\": {}, \"full\": {}}}",
                mean(&found[0]),
                pair(added(1)),
                pair(added(2))
            ));
        }
    }
    let (worth, everything) = using::worth(fabrics, whiles);
    let presence = presence(&strategies[0].1);
    let probing = probing.join(", ");
    format!(
        "{{\"fabrics\": {fabrics}, \"ranks\": {RANKS}, \"probing\": [{probing}], \"worth\": {worth}, \
         \"everything\": {everything}, \"presence\": {presence:?}}}"
    )
}

#[test]
#[ignore = "for figures: cargo xtask bench cooperation --only adversary"]
fn full() {
    let number = |name: &str, usual: usize| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
    };
    let (fabrics, whiles, rounds) = (number("FABRICS", 160), number("WHILES", 12), number("ROUNDS", 4));
    println!("{}", report(fabrics as u64, whiles, rounds));
}

/// The same in small. Of what is told every two ranks have the same, and of what is known they have not.
#[test]
fn every_two_ranks_hear_the_same() {
    let pairs = || (0..RANKS).flat_map(|i| (i + 1..RANKS).map(move |j| (i, j)));
    // Where none had to be formed again: who is away meanwhile is told less.
    let all: Vec<Seen> = (0..6).map(|seed| watch(seed, Strategy::Pairs, 4, 1)).collect();
    let whole: Vec<&Seen> = all.iter().filter(|seen| seen.gone.is_empty()).collect();
    assert!(whole.len() >= 2, "{}", whole.len());
    let differ = |of: &dyn Fn(usize, usize) -> f64| {
        let all: Vec<f64> = pairs().map(|(i, j)| of(i, j)).collect();
        all.iter().any(|value| value.to_bits() != all[0].to_bits())
    };
    for seen in &whole {
        let Seen { evidence: told, raw, .. } = seen;
        assert!(!differ(&|i, j| told.times(i, j)[0]), "promised times differ");
        assert!(!differ(&|i, j| told.events(i, j)[0]), "whiles in which something was told differ");
        assert!(differ(&|i, j| raw.times(i, j)[0]));
    }
    let told = |seen: &&Seen| seen.evidence.events(0, 1)[0] > 0.0;
    assert!(whole.iter().any(told), "nothing was ever told");
    let known = |seen: &&Seen| differ(&|i, j| seen.raw.events(i, j)[0]);
    assert!(whole.iter().any(known), "the experiment shows nothing");
    let late = |seen: &&Seen| differ(&|i, j| seen.raw.stragglers(i, j)[0]);
    assert!(whole.iter().any(late), "who is late shows nothing");
}

/// Of ranks behind slow links none is named to who has pairs. Of those that share one, no two are named to who has more.
#[test]
fn one_rank_of_a_slow_link_is_named() {
    let mut named = Vec::new();
    for (strategy, seed) in [Strategy::Pairs, Strategy::Threes, Strategy::Turns].into_iter().zip(0..) {
        let seen = watch(seed, strategy, 6, 1);
        named.push(seen.evidence.named().len());
        assert!(seen.evidence.named().iter().all(|one| one.len() == 1), "{:?}", seen.evidence.named());
        let known = seen.raw.named().iter().map(|all| all.len()).max();
        assert!(strategy == Strategy::Turns || known > Some(1), "the experiment shows nothing");
    }
    assert!(named[0] == 0 && named[1] > 0, "{named:?}");
}
