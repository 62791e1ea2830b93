//! Averages between threads of one process that lose what coded AllReduces lose: the same arithmetic in the same parts, without
//! agents and a network.

use crate::communicator::{Communicator, Cost};
use anyhow::{Context, Result, anyhow, ensure};
use harmonaize_abi::{View, ViewMut};
use harmonaize_codec::{Codec, Squares, Store, Terms, decode};
use std::sync::{Arc, Barrier, Mutex, MutexGuard};

/// Fewer elements stay exact, as they do with agents.
const FEWEST: usize = 1024;

/// How averages are coded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coding {
    /// The codec.
    pub codec: Codec,
    /// The most that an average may lose, vNMSE.
    pub most: Option<f64>,
    /// Whether what was left out of a step is added in the next.
    pub feedback: bool,
}

#[derive(Debug)]
struct Meeting {
    arrived: Barrier,
    coding: Coding,
    all: Mutex<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    inputs: Vec<Vec<f32>>,
    averages: Vec<f32>,
    /// Error and signal of all averages, as receipts would tell them.
    lost: Squares,
}

/// A rank among threads of one process. It owns a part of every average, which it adds up and encodes for all.
#[derive(Debug)]
pub struct Lossy {
    rank: usize,
    ranks: usize,
    steps: u64,
    meeting: Arc<Meeting>,
    /// Of the own part: what each rank's contribution has left out so far, and then what the average has.
    left_out: Vec<Vec<f32>>,
    chunk: Vec<u8>,
}

impl Lossy {
    /// All ranks of a communicator, to hand to one thread each.
    pub fn new(ranks: usize, coding: Coding) -> Vec<Self> {
        let all = Shared { inputs: vec![Vec::new(); ranks], ..Shared::default() };
        let meeting = Arc::new(Meeting { arrived: Barrier::new(ranks), coding, all: Mutex::new(all) });
        let one = |rank| Self {
            rank,
            ranks,
            steps: 0,
            meeting: Arc::clone(&meeting),
            left_out: vec![Vec::new(); ranks + 1],
            chunk: Vec::new(),
        };
        (0..ranks).map(one).collect()
    }

    /// What all averages so far lost, at most, over the squares of what was averaged.
    pub fn lost(&self) -> Result<f64> {
        Ok(self.shared()?.lost.relative())
    }

    fn shared(&self) -> Result<MutexGuard<'_, Shared>> {
        self.meeting.all.lock().map_err(|_| anyhow!("another rank's thread has panicked"))
    }

    /// Adds up the own part of all contributions and encodes the average: what all ranks decode, and what it lost.
    fn reduce(&mut self, mut contributions: Vec<Vec<f32>>) -> Result<(Vec<f32>, Squares)> {
        let Coding { codec, most, feedback } = self.meeting.coding;
        let elements = contributions.first().map_or(0, Vec::len);
        let room = codec.most_bytes(elements).zip(Codec::EXACT.most_bytes(elements));
        self.chunk.resize(room.map(|(one, other)| one.max(other)).context("so many elements")?, 0);
        let terms = Terms { codec, most, participants: u32::try_from(self.ranks)? };
        let mut sum = contributions.get(self.rank).cloned().context("no such rank")?;
        let mut sums = terms.begin(1, View::from(&sum[..]))?;
        for (rank, contribution) in contributions.iter_mut().enumerate() {
            if rank == self.rank {
                continue;
            }
            let left_out = self.left_out.get_mut(rank).filter(|_| feedback);
            let seed = self.steps << 16 | (rank as u64) << 1;
            let source = with(contribution, left_out.as_deref());
            terms.contribute(1, seed, View::from(&source[..]), ViewMut::from(&mut self.chunk[..]))?;
            terms.add(&mut sums, View::from(&self.chunk[..]), ViewMut::from(&mut sum[..]))?;
            keep(source, &self.chunk, left_out)?;
        }
        let ranks = self.ranks as f32;
        sum.iter_mut().for_each(|value| *value /= ranks);
        let left_out = self.left_out.last_mut().filter(|_| feedback);
        let source = with(&sum, left_out.as_deref());
        let seed = self.steps << 16 | (self.rank as u64) << 1 | 1;
        let average_of = Some(terms.participants);
        terms.conclude(
            &sums,
            average_of,
            seed,
            View::from(&source[..]),
            ViewMut::from(&mut self.chunk[..]),
        )?;
        let taken = terms.take(View::from(&self.chunk[..]), ViewMut::from(&mut sum[..]))?;
        keep(source, &self.chunk, left_out)?;
        Ok((sum, taken.squares))
    }
}

/// Values with what was left out before.
fn with(values: &[f32], left_out: Option<&Vec<f32>>) -> Vec<f32> {
    let mut all = values.to_vec();
    if let Some(left_out) = left_out {
        all.iter_mut().zip(left_out).for_each(|(value, left)| *value += left);
    }
    all
}

/// What a chunk has left out of its source, for the next step.
fn keep(mut source: Vec<f32>, chunk: &[u8], left_out: Option<&mut Vec<f32>>) -> Result<()> {
    if let Some(left_out) = left_out {
        decode(View::from(chunk), Store::Subtract, ViewMut::from(&mut source[..]))?;
        *left_out = source;
    }
    Ok(())
}

impl Communicator for Lossy {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn is_lossy(&self) -> bool {
        true
    }

    fn average(&mut self, values: &mut [f32]) -> Result<Cost> {
        if let Some(input) = self.shared()?.inputs.get_mut(self.rank) {
            input.clear();
            input.extend_from_slice(values);
        }
        self.meeting.arrived.wait();
        let same = self.shared()?.inputs.iter().all(|input| input.len() == values.len());
        let size = values.len().div_ceil(self.ranks);
        let (from, to) = ((self.rank * size).min(values.len()), ((self.rank + 1) * size).min(values.len()));
        let part = |input: &Vec<f32>| input.get(from..to).unwrap_or_default().to_vec();
        let contributions: Vec<Vec<f32>> = self.shared()?.inputs.iter().map(part).collect();
        let reduced = match values.len() < FEWEST || !same {
            true => Ok((mean(&contributions), Squares::default())),
            false => self.reduce(contributions),
        };
        self.steps += 1;
        if let Ok((averages, lost)) = &reduced {
            let mut all = self.shared()?;
            all.averages.resize(values.len(), 0.0);
            all.averages.get_mut(from..to).context("a part")?.copy_from_slice(averages);
            all.lost = all.lost.and(*lost);
        }
        self.meeting.arrived.wait();
        values.copy_from_slice(self.shared()?.averages.get(..values.len()).context("averages")?);
        self.meeting.arrived.wait();
        ensure!(same, "ranks averaged different numbers of values");
        reduced.map(|_| Cost::default())
    }
}

fn mean(contributions: &[Vec<f32>]) -> Vec<f32> {
    let (mut sum, ranks) = (vec![0.0; contributions.first().map_or(0, Vec::len)], contributions.len() as f32);
    for contribution in contributions {
        sum.iter_mut().zip(contribution).for_each(|(sum, value)| *sum += value);
    }
    sum.iter_mut().for_each(|sum| *sum /= ranks);
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::training::{Recipe, train};

    fn together(coding: Coding, steps: usize) -> Vec<(usize, f64, String)> {
        let recipe = Recipe { steps, ..Recipe::default() };
        std::thread::scope(|scope| {
            let work = |mut rank: Lossy| {
                let outcome = train(&recipe, &mut rank, &|| true, &mut |_| Ok(())).unwrap();
                (outcome.correct, rank.lost().unwrap(), outcome.digest)
            };
            let threads = Lossy::new(4, coding).into_iter().map(|rank| scope.spawn(move || work(rank)));
            let threads: Vec<_> = threads.collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn a_training_loses_what_its_budget_lets_and_no_accuracy() {
        let exact = together(Coding { codec: Codec::EXACT, most: None, feedback: false }, 40);
        let int8 = together(Coding { codec: Codec::INT8, most: Some(0.01), feedback: false }, 40);
        for ranks in [&exact, &int8] {
            assert!(ranks.iter().all(|rank| *rank == ranks[0]), "ranks differ: {ranks:?}");
        }
        assert_eq!(exact[0].1, 0.0);
        assert!(int8[0].1 > 0.0 && int8[0].1 <= 0.01 && int8[0].2 != exact[0].2, "{int8:?}");
        assert!(exact[0].0.abs_diff(int8[0].0) <= 7, "of 360 test images: {exact:?}, {int8:?}");
    }

    /// A few elements a step tell, over many steps, of all of them.
    #[test]
    fn what_is_left_out_of_a_step_comes_in_the_next() {
        const STEPS: u32 = 800;
        let sums = |feedback| {
            let coding = Coding { codec: Codec::named("top 1/64").unwrap(), most: None, feedback };
            let (mut ranks, mut sum) = (Lossy::new(2, coding), vec![0.0_f64; 4096]);
            for _ in 0..STEPS {
                let values: Vec<f32> = (0..4096).map(|at| 1.0 + (at % 7) as f32).collect();
                let found = std::thread::scope(|scope| {
                    let one = |rank: &mut Lossy, mut values: Vec<f32>| {
                        rank.average(&mut values).unwrap();
                        values
                    };
                    let work = |rank| {
                        let values = values.clone();
                        scope.spawn(move || one(rank, values))
                    };
                    let threads: Vec<_> = ranks.iter_mut().map(work).collect();
                    threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
                });
                assert_eq!(found[0], found[1]);
                sum.iter_mut().zip(&found[0]).for_each(|(sum, value)| *sum += f64::from(*value));
            }
            let off =
                |(at, sum): (usize, &f64)| (sum / f64::from(STEPS) / (1.0 + (at % 7) as f64) - 1.0).abs();
            sum.iter().enumerate().map(off).sum::<f64>() / 4096.0
        };
        let (with, without) = (sums(true), sums(false));
        assert!(with < 0.3 && without > 0.8, "off by {with} with feedback, {without} without");
    }
}
