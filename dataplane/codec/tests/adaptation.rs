//! The controller in virtual time, against the best fixed codec in hindsight. Rates come and go, and tensors lose more or less
//! than was thought.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod common;

use common::outlook;
use harmonaize_codec::{Budget, Codec, Controller, Level};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Seconds that a tenant computes between two operations.
const COMPUTING: f64 = 0.05;
/// Seconds from a change of the rate until control plans with it. The second figure is from the choice until
/// it is in use.
const CONTROL_DELAY: f64 = 0.25;
const SWITCHED: f64 = 0.15;
const SECONDS: usize = 600;
const TRACES: u64 = 30;
/// Of an operation; a change of codec comes between two.
const SEGMENTS: u32 = 16;

/// What levels took on one core of a server, and what operations are thought to lose by them.
fn levels() -> Vec<Level> {
    [
        (Codec::BF16, 0.5, 15e9, 17e9, 1.3e-5),
        (Codec::INT8, 0.254, 10e9, 19e9, 1.5e-3),
        (Codec::INT4, 0.129, 6e9, 9e9, 0.38),
        (Codec::rotated(4), 0.126, 4e9, 8e9, 0.019),
        (Codec::rotated(2), 0.063, 5e9, 8e9, 0.27),
        (Codec::NonzeroBlocks, 1.0005, 9e9, 9e9, 0.0),
    ]
    .map(|(codec, ratio, encode, decode, loss)| Level { codec, ratio, encode, decode, loss })
    .to_vec()
}

/// Bytes a second in each second, on links of 1 to 256 Gbit/s. They are steady, in steps, in teeth, wandering, or with others'
/// bursts.
fn trace(seed: u64) -> Vec<f64> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let most = 1.25e8 * 4_f64.powi(random.random_range(0..5));
    let period = random.random_range(4..80_usize);
    let mut walk = 0.5_f64;
    let second = |second: usize| {
        let share = match seed % 5 {
            0 => 1.0,
            1 => [1.0, 0.1, 0.5][second / period % 3],
            2 => 0.05 + 0.95 * (second % period) as f64 / period as f64,
            3 => {
                walk = (walk * random.random_range(0.85..1.17)).clamp(0.02, 1.0);
                walk
            }
            _ if second % period < period / 4 => 0.08,
            _ => 0.9,
        };
        most * share * random.random_range(0.95..1.05)
    };
    (0..SECONDS).map(second).collect()
}

/// What trainings on the emulated fabric, whose hosts' sending was recorded, leave of their links of 1 Gbit/s, by host. The figures, of 50 ms
/// each, are stretched to a second, so that such short records go through what control can follow. `goodput` in `tests` makes the file.
fn recorded() -> Vec<Vec<f64>> {
    const LINK: f64 = 1.25e8;
    let lines = include_str!("traces/recorded.txt").lines().filter(|line| !line.starts_with('#'));
    let left = |sent: &str| (LINK - sent.parse::<f64>().unwrap()).max(0.02 * LINK);
    let hosts: Vec<Vec<f64>> = lines.map(|line| line.split(' ').skip(1).map(left).collect()).collect();
    assert!(hosts.len() >= 30 && hosts.iter().all(|rates| rates.len() >= 20), "{} hosts", hosts.len());
    hosts
}

fn at(trace: &[f64], time: f64) -> f64 {
    trace[(time.max(0.0) as usize) % trace.len()]
}

/// What a tensor really loses. Blocks with a scale lose so many times what is thought; what would lose more
/// than `most` goes exact.
#[derive(Clone, Copy)]
struct Truth {
    tails: f64,
    most: f64,
    zeros: Zeros,
}

/// Of a tenant's tensors, what is in blocks that are zeros.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Zeros {
    /// Always so much.
    Of(f64),
    /// So much for a minute, nothing for the next.
    Now(f64),
}

impl Zeros {
    /// Bytes on the wire for a byte, where blocks of zeros are left out.
    fn ratio(self, time: f64) -> f64 {
        let zeros = match self {
            Self::Of(zeros) => zeros,
            Self::Now(zeros) if ((time / 60.0) as u64).is_multiple_of(2) => zeros,
            Self::Now(_) => 0.0,
        };
        1.001 - zeros
    }
}

impl Truth {
    fn loss(self, level: &Level) -> f64 {
        let blocks = [Codec::INT8, Codec::INT4].contains(&level.codec);
        level.loss * if blocks { self.tails } else { 1.0 }
    }

    /// As the operation goes: chunks that would pass the budget are exact, after they were encoded in vain.
    fn runs(self, level: &Level, time: f64) -> Level {
        match self.loss(level) <= self.most {
            _ if level.codec == Codec::NonzeroBlocks => Level { ratio: self.zeros.ratio(time), ..*level },
            true => Level { loss: self.loss(level), ..*level },
            false => Level { loss: 0.0, ratio: 1.0, ..*level },
        }
    }
}

/// Seconds that `operations` take, by a codec for each segment. `choose` gets the time and whether an operation has just ended, and
/// says which codec.
fn run(
    trace: &[f64],
    operations: usize,
    truth: Truth,
    mut choose: impl FnMut(f64, bool) -> Option<Level>,
) -> f64 {
    let mut time = 0.0;
    for _ in 0..operations {
        for segment in 0..SEGMENTS {
            let level = choose(time, segment == 0).map(|level| truth.runs(&level, time));
            time += outlook(at(trace, time)).time(level.as_ref()) / f64::from(SEGMENTS);
        }
        time += COMPUTING;
    }
    time - COMPUTING * operations as f64
}

/// A controller as control has it. It plans again where a rate has changed, and where a change weighs less than before.
struct Control {
    controller: Controller,
    levels: Vec<Level>,
    budget: Budget,
    current: Codec,
    next: Option<(f64, Codec)>,
    planned: f64,
    rate: f64,
    changes: usize,
    /// Operations by codec.
    ran: BTreeMap<&'static str, usize>,
}

impl Control {
    /// A communicator forms where the rate is known.
    fn new(levels: &[Level], most: f64, rate: f64) -> Self {
        let mut new = Self {
            controller: Controller::default(),
            levels: levels.to_vec(),
            budget: if most == 0.0 { Budget::Exact } else { Budget::Vnmse(most) },
            current: Codec::EXACT,
            next: None,
            planned: f64::NEG_INFINITY,
            rate,
            changes: 0,
            ran: BTreeMap::new(),
        };
        new.current = new.choose(0.0, rate);
        new
    }

    fn choose(&self, time: f64, rate: f64) -> Codec {
        let now = Duration::from_secs_f64(time);
        self.controller.choose(now, &self.budget, self.current, &self.levels, &outlook(rate)).codec
    }

    fn level(&self) -> Option<Level> {
        self.levels.iter().find(|level| level.codec == self.current).copied()
    }

    /// The codec in use, after a look at the network.
    fn sample(&mut self, trace: &[f64], time: f64) -> Option<Level> {
        let now = Duration::from_secs_f64(time);
        if let Some((_, codec)) = self.next.take_if(|(at, _)| *at <= time) {
            self.current = codec;
            self.changes += 1;
            self.controller.handle_change(now);
        }
        let rate = at(trace, time - CONTROL_DELAY);
        let moved = (rate - self.rate).abs() > 0.1 * self.rate;
        if (moved || time >= self.planned + 1.0) && self.next.is_none() {
            (self.planned, self.rate) = (time, rate);
            self.controller.handle_outlook(now, &outlook(rate));
            let codec = self.choose(time, rate);
            if codec != self.current {
                self.next = Some((time + SWITCHED, codec));
            }
        }
        self.level()
    }

    /// What an operation came to that has just ended.
    fn handle_outcome(&mut self, time: f64, level: &Level, ran: &Level) {
        self.controller.handle_outcome(Duration::from_secs_f64(time), level, ran.loss, ran.ratio);
        self.plans(time);
    }

    /// What operations tell is planned with as soon as it is known.
    fn plans(&mut self, time: f64) {
        if self.next.is_none() {
            let codec = self.choose(time, self.rate);
            self.next = (codec != self.current).then_some((time + CONTROL_DELAY + SWITCHED, codec));
        }
    }

    fn at(&mut self, trace: &[f64], truth: Truth, time: f64, ended: bool) -> Option<Level> {
        let now = Duration::from_secs_f64(time);
        let level = self.sample(trace, time);
        if ended {
            *self.ran.entry(self.current.name()).or_default() += 1;
        }
        if let Some(level) = level.filter(|_| ended) {
            let ran = truth.runs(&level, time);
            self.controller.handle_outcome(now, &level, ran.loss, ran.ratio);
        }
        let ratio = truth.zeros.ratio(time);
        if ended && self.current != Codec::NonzeroBlocks && self.controller.heeds_zeros(now, ratio) {
            let blocks = self.levels.iter().find(|level| level.codec == Codec::NonzeroBlocks).unwrap();
            self.controller.handle_outcome(now, blocks, 0.0, ratio);
        }
        if ended {
            self.plans(time);
        }
        level
    }
}

/// One trace and one tenant.
#[derive(Debug)]
#[allow(dead_code, reason = "shown where it fails")]
struct Row {
    seed: u64,
    most: f64,
    tails: f64,
    zeros: Zeros,
    /// The controller's time over that of the best fixed codec.
    of_best: f64,
    /// The controller's time over that of uncompressed operations.
    of_exact: f64,
    changes: usize,
    ran: BTreeMap<&'static str, usize>,
}

fn rows() -> Vec<Row> {
    let levels = levels();
    let mut rows = Vec::new();
    for (seed, trace) in (0..).zip((0..TRACES).map(trace).chain(recorded())) {
        for (most, tails, zeros) in [
            (1e-3, 0.3, Zeros::Of(0.0)),
            (1e-3, 1.0, Zeros::Of(0.0)),
            (0.02, 8.0, Zeros::Of(0.0)),
            (0.3, 0.5, Zeros::Of(0.0)),
            (1e-3, 1.0, Zeros::Of(0.95)),
            (0.0, 1.0, Zeros::Of(0.0)),
            (0.0, 1.0, Zeros::Of(0.3)),
            (0.0, 1.0, Zeros::Of(0.95)),
            (0.0, 1.0, Zeros::Now(0.9)),
        ] {
            let truth = Truth { tails, most, zeros };
            let exact = outlook(trace.iter().sum::<f64>() / trace.len() as f64).time(None);
            let operations = (SECONDS as f64 / (exact + COMPUTING)) as usize;
            let fixed = |level: Option<Level>| run(&trace, operations, truth, |_, _| level);
            let alone = fixed(None);
            let best = levels.iter().map(|level| fixed(Some(*level))).fold(alone, f64::min);
            let mut control = Control::new(&levels, most, trace[0]);
            let time = run(&trace, operations, truth, |time, ended| control.at(&trace, truth, time, ended));
            let (of_best, of_exact) = (time / best, time / alone);
            rows.push(Row {
                seed,
                most,
                tails,
                zeros,
                of_best,
                of_exact,
                changes: control.changes,
                ran: control.ran,
            });
        }
    }
    rows
}

#[test]
fn adaptation_matches_the_best_fixed_codec_in_hindsight() {
    let rows = rows();
    let mut ratios: Vec<f64> = rows.iter().map(|row| row.of_best).collect();
    ratios.sort_by(f64::total_cmp);
    let (least, median, worst) = (ratios[0], ratios[ratios.len() / 2], ratios[ratios.len() - 1]);
    println!(
        "{} runs over {TRACES} generated and {} recorded traces, time over the best fixed codec's:",
        rows.len(),
        recorded().len()
    );
    println!("{least:.3} at best, {median:.3} at the median, {worst:.3} at worst");
    let of = |wanted: fn(&Row) -> bool| -> BTreeSet<u64> {
        rows.iter().filter(|row| wanted(row)).map(|row| row.seed).collect()
    };
    let (gained, all) = (of(|row| row.most == 0.0 && row.of_exact < 0.8), of(|_| true));
    println!("on {} of {} traces exact tenants gained by their zeros", gained.len(), all.len());
    println!("on {} recorded ones some codec changed", of(|row| row.seed >= TRACES && row.changes > 0).len());
    for (name, recorded) in [("generated", false), ("recorded", true)] {
        let mut ran = BTreeMap::<&str, usize>::new();
        for (codec, count) in
            rows.iter().filter(|row| (row.seed >= TRACES) == recorded).flat_map(|row| &row.ran)
        {
            *ran.entry(codec).or_default() += count;
        }
        println!("operations by codec on {name} traces: {ran:?}");
    }
    assert!(2 * gained.len() > all.len(), "{gained:?}");
    for row in rows {
        assert!(row.most > 0.0 || row.zeros != Zeros::Of(0.0) || row.changes == 0, "dense: {row:?}");
        assert!(row.of_best <= 1.05 && row.of_exact <= 1.02, "{row:?}");
        // Ten minutes, in which some networks change every other second.
        assert!(row.changes <= 100, "{row:?}");
    }
}

/// The tensors of a step of a training: what blocks with a scale lose of each, over what is assumed. They range from normal tensors to such
/// of which each block has one large element.
const LAYERS: [f64; 8] = [0.14, 0.14, 0.3, 0.5, 1.0, 1.0, 2.0, 4.0];

/// Seconds that `operations` take, one layer after another, in the codecs that `choose` says. These are the first, and that of what loses
/// too much.
fn run_layers(
    trace: &[f64],
    (operations, most): (usize, f64),
    mut choose: impl FnMut(f64) -> [Option<Level>; 2],
    mut told: impl FnMut(f64, &Level, &Level),
) -> f64 {
    let mut time = 0.0;
    for operation in 0..operations {
        let jitter = ChaCha8Rng::seed_from_u64(operation as u64).random_range(0.8..1.2);
        let truth = Truth { tails: LAYERS[operation % LAYERS.len()] * jitter, most, zeros: Zeros::Of(0.0) };
        let [chosen, finer] = choose(time);
        let ran = chosen.map(|level| match finer.filter(|finer| truth.loss(finer) <= most) {
            Some(finer) if truth.loss(&level) > most => {
                let encode = 1.0 / (1.0 / level.encode + 1.0 / finer.encode);
                Level { encode, loss: truth.loss(&finer), ..finer }
            }
            _ => truth.runs(&level, time),
        });
        assert!(ran.is_none_or(|ran| ran.loss <= most), "the budget of an operation was passed");
        time += outlook(at(trace, time)).time(ran.as_ref());
        if let Some((level, ran)) = chosen.zip(ran) {
            told(time, &level, &ran);
        }
        time += COMPUTING;
    }
    time - COMPUTING * operations as f64
}

/// The controller's time over the best fixed codec's. First with one codec for all, then with a finer one for what loses too much
/// by it.
fn layered(trace: &[f64], most: f64) -> [f64; 2] {
    let levels = levels();
    let exact = outlook(trace.iter().sum::<f64>() / trace.len() as f64).time(None);
    let operations = (SECONDS as f64 / (exact + COMPUTING)) as usize;
    let fixed = |level: Option<Level>| run_layers(trace, (operations, most), |_| [level, None], |_, _, _| ());
    let best = levels.iter().map(|level| fixed(Some(*level))).fold(fixed(None), f64::min);
    [false, true].map(|two| {
        let control = std::cell::RefCell::new(Control::new(&levels, most, trace[0]));
        let choose = |time: f64| {
            let mut control = control.borrow_mut();
            let chosen = control.sample(trace, time);
            let Control { controller, budget, current, rate, .. } = &*control;
            let finer = controller.finer(budget, *current, &levels, &outlook(*rate)).filter(|_| two);
            [chosen, levels.iter().find(|level| Some(level.codec) == finer).copied()]
        };
        let told =
            |time: f64, level: &Level, ran: &Level| control.borrow_mut().handle_outcome(time, level, ran);
        run_layers(trace, (operations, most), choose, told) / best
    })
}

#[test]
fn a_finer_codec_helps_layers_that_lose_much() {
    let traces: Vec<Vec<f64>> = (0..TRACES).map(trace).chain(recorded()).collect();
    for (most, saves) in [(1e-3, 0.2), (3e-3, 0.1), (0.02, 0.0)] {
        let sorted = |of: fn(&[f64; 2]) -> f64, runs: &[[f64; 2]]| {
            let mut found: Vec<f64> = runs.iter().map(of).collect();
            found.sort_by(f64::total_cmp);
            [found[0], found[found.len() / 2], found[found.len() - 1]]
        };
        let runs: Vec<[f64; 2]> = traces.iter().map(|trace| layered(trace, most)).collect();
        let (one, two) = (sorted(|run| run[0], &runs), sorted(|run| run[1], &runs));
        let ratio = sorted(|run| run[1] / run[0], &runs);
        println!(
            "within {most}, least, median, most: of the best fixed codec's time {one:.3?} with one codec, {two:.3?} with a finer one, which is {ratio:.3?} of it"
        );
        assert!(two[2] <= 1.05 && ratio[2] <= 1.05 && ratio[1] <= 1.0 - saves, "within {most}");
    }
}
