//! Averages between threads of one process that lose what coded AllReduces lose: the same arithmetic in the same parts, without
//! agents and a network.

use crate::communicator::{Communicator, Cost};
use anyhow::{Context, Result, anyhow, ensure};
use harmonaize_abi::{Dtype, ReduceOp, View, ViewMut};
use harmonaize_codec::{Codec, ErrorFeedback, Squares, Terms};
use harmonaize_kernels::reduce;
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
struct Rendezvous {
    arrived: Barrier,
    coding: Coding,
    all: Mutex<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    inputs: Vec<Vec<f32>>,
    averages: Vec<f32>,
    /// Error and signal of all averages, as receipts would tell them.
    squares: Squares,
}

/// A rank among threads of one process. It owns a part of every average, which it adds up and encodes for all.
#[derive(Debug)]
pub struct Lossy {
    rank: usize,
    ranks: usize,
    steps: u64,
    rendezvous: Arc<Rendezvous>,
    /// By rank, of the own part: what it owes, and room for what it will.
    residuals: Vec<[Vec<f32>; 2]>,
    chunk: Vec<u8>,
}

impl Lossy {
    /// All ranks of a communicator, to hand to one thread each.
    pub fn new(ranks: usize, coding: Coding) -> Vec<Self> {
        let all = Shared { inputs: vec![Vec::new(); ranks], ..Shared::default() };
        let meeting = Arc::new(Rendezvous { arrived: Barrier::new(ranks), coding, all: Mutex::new(all) });
        let one = |rank| Self {
            rank,
            ranks,
            steps: 0,
            rendezvous: Arc::clone(&meeting),
            residuals: vec![[Vec::new(), Vec::new()]; ranks],
            chunk: Vec::new(),
        };
        (0..ranks).map(one).collect()
    }

    /// What all averages so far lost, as encoders measured it, over the squares of what was averaged.
    pub fn relative_error(&self) -> Result<f64> {
        Ok(self.shared()?.squares.relative())
    }

    fn shared(&self) -> Result<MutexGuard<'_, Shared>> {
        self.rendezvous.all.lock().map_err(|_| anyhow!("another rank's thread has panicked"))
    }

    /// Adds up the own part of all contributions and encodes the average: what all ranks decode, and what it lost.
    fn reduce(&mut self, contributions: &[Vec<f32>]) -> Result<(Vec<f32>, Squares)> {
        let Coding { codec, most, feedback } = self.rendezvous.coding;
        let (own, ranks) = (self.rank, u32::try_from(self.ranks)?);
        let mut average = contributions.get(own).cloned().context("no such rank")?;
        let room = codec.max_bytes(average.len()).zip(Codec::EXACT.max_bytes(average.len()));
        self.chunk.resize(room.map(|(one, other)| one.max(other)).context("so many elements")?, 0);
        self.residuals.iter_mut().flatten().for_each(|half| half.resize(average.len(), 0.0));
        let accounts =
            self.residuals.iter_mut().filter(|_| feedback).map(|[residual_in, residual_out]| ErrorFeedback {
                residual_in: View::from(&residual_in[..]),
                residual_out: ViewMut::from(&mut residual_out[..]),
            });
        let accounts: Vec<ErrorFeedback<'_>> = accounts.collect();
        let account = |rank: usize| accounts.get(rank).copied();
        let terms = Terms { codec, finer: None, max_error: most, participants: ranks };
        let (sum, chunk) = (ViewMut::from(&mut average[..]), ViewMut::from(&mut self.chunk[..]));
        account(own).map_or(Ok(()), |account| account.begin(sum))?;
        let mut sums = terms.begin(1, sum.as_view())?;
        for (rank, contribution) in contributions.iter().enumerate().filter(|(rank, _)| *rank != own) {
            let seed = self.steps << 16 | (rank as u64) << 1;
            let (source, account) = (View::from(&contribution[..]), account(rank));
            let source = account.map_or(Ok(source), |account| account.contribution(source))?;
            let coded = terms.contribute(1, seed, source, chunk)?;
            account.map_or(Ok(()), |account| account.record_contribution(&coded, chunk.as_view()))?;
            terms.add(&mut sums, chunk.as_view(), sum)?;
        }
        account(own).map_or(Ok(()), |account| account.complete(sum.as_view()))?;
        reduce(ReduceOp::Average, Dtype::F32, &[sum.as_view()], &[sum], Some(ranks))?;
        let seed = self.steps << 16 | (own as u64) << 1 | 1;
        let coded = terms.conclude(&sums, Some(ranks), seed, sum.as_view(), chunk)?;
        account(own).map_or(Ok(()), |account| account.record_result(&coded, Some(ranks), chunk.as_view()))?;
        let taken = terms.take(chunk.as_view(), sum)?;
        self.residuals.iter_mut().for_each(|halves| halves.swap(0, 1));
        Ok((average, Squares { error: taken.measured, ..taken.squares }))
    }
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
        self.rendezvous.arrived.wait();
        let same = self.shared()?.inputs.iter().all(|input| input.len() == values.len());
        let size = values.len().div_ceil(self.ranks);
        let (from, to) = ((self.rank * size).min(values.len()), ((self.rank + 1) * size).min(values.len()));
        let part = |input: &Vec<f32>| input.get(from..to).unwrap_or_default().to_vec();
        let contributions: Vec<Vec<f32>> = self.shared()?.inputs.iter().map(part).collect();
        let reduced = match values.len() < FEWEST || !same {
            true => Ok((mean(&contributions), Squares::default())),
            false => self.reduce(&contributions),
        };
        self.steps += 1;
        if let Ok((averages, lost)) = &reduced {
            let mut all = self.shared()?;
            all.averages.resize(values.len(), 0.0);
            all.averages.get_mut(from..to).context("a part")?.copy_from_slice(averages);
            all.squares = all.squares.and(*lost);
        }
        self.rendezvous.arrived.wait();
        values.copy_from_slice(self.shared()?.averages.get(..values.len()).context("averages")?);
        self.rendezvous.arrived.wait();
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
                (outcome.correct, rank.relative_error().unwrap(), outcome.digest)
            };
            let threads = Lossy::new(4, coding).into_iter().map(|rank| scope.spawn(move || work(rank)));
            let threads: Vec<_> = threads.collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn lossy_training_keeps_accuracy() {
        let exact = together(Coding { codec: Codec::EXACT, most: None, feedback: false }, 40);
        let int8 = together(Coding { codec: Codec::INT8, most: Some(0.01), feedback: false }, 40);
        for ranks in [&exact, &int8] {
            assert!(ranks.iter().all(|rank| *rank == ranks[0]), "ranks differ: {ranks:?}");
        }
        assert_eq!(exact[0].1, 0.0);
        assert!(int8[0].1 > 0.0 && int8[0].1 <= 0.01 && int8[0].2 != exact[0].2, "{int8:?}");
        assert!(exact[0].0.abs_diff(int8[0].0) <= 7, "of 360 test images: {exact:?}, {int8:?}");
    }

    /// Coarse codes of a step tell, over many steps, of all elements.
    #[test]
    fn residual_is_added_in_the_next_step() {
        const STEPS: u32 = 400;
        // Of as many sizes as elements, between the steps of the codes.
        let values: Vec<f32> =
            (0..4096).map(|at| 1.0 + (at * 2_654_435_761_usize % 4096) as f32 / 1024.0).collect();
        let means = |feedback| {
            let coding = Coding { codec: Codec::INT4, most: None, feedback };
            let (mut ranks, mut sum) = (Lossy::new(2, coding), vec![0.0_f64; 4096]);
            for _ in 0..STEPS {
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
            let off = sum
                .iter()
                .zip(&values)
                .map(|(sum, value)| (sum / f64::from(STEPS) / f64::from(*value) - 1.0).abs());
            off.sum::<f64>() / 4096.0
        };
        let (with, without) = (means(true), means(false));
        assert!(with < without / 10.0, "off by {with} with feedback, {without} without");
    }
}
