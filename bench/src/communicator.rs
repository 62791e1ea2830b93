//! How a training reaches its other workers: alone, or between threads of one process (for tests). [`crate::tenant`] has
//! the real one.

use anyhow::{Result, anyhow, ensure};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

/// What one collective cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// From submission to completion, without the copies between the program's memory and the tensor's.
    pub collective: Duration,
    /// Those copies.
    pub copies: Duration,
    /// Tensor bytes that this rank's host sent, from the receipt.
    pub wire_bytes: u64,
    /// Kind of algorithm, from the receipt; empty where there is none.
    pub algorithm: &'static str,
}

/// The ranks of one training.
pub trait Communicator {
    /// This worker.
    fn rank(&self) -> usize;
    /// How many there are.
    fn ranks(&self) -> usize;
    /// Replaces every element by its average over all ranks.
    fn average(&mut self, values: &mut [f32]) -> Result<Cost>;
    /// Whether many elements may lose something.
    fn is_lossy(&self) -> bool {
        false
    }
}

/// One worker, nobody to talk to.
#[derive(Clone, Copy, Debug, Default)]
pub struct SingleProcess;

impl Communicator for SingleProcess {
    fn rank(&self) -> usize {
        0
    }

    fn ranks(&self) -> usize {
        1
    }

    fn average(&mut self, _values: &mut [f32]) -> Result<Cost> {
        Ok(Cost::default())
    }
}

#[derive(Debug)]
struct Rendezvous {
    arrived: Barrier,
    inputs: Mutex<Vec<Vec<f32>>>,
}

/// A rank among threads of one process; adds in rank order.
#[derive(Clone, Debug)]
pub struct InProcess {
    rank: usize,
    rendezvous: Arc<Rendezvous>,
}

impl InProcess {
    /// All ranks of a communicator, to hand to one thread each.
    pub fn new(ranks: usize) -> Vec<Self> {
        let inputs = Mutex::new(vec![Vec::new(); ranks]);
        let meeting = Arc::new(Rendezvous { arrived: Barrier::new(ranks), inputs });
        (0..ranks).map(|rank| Self { rank, rendezvous: Arc::clone(&meeting) }).collect()
    }
}

impl Communicator for InProcess {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.rendezvous.inputs.lock().map_or(0, |inputs| inputs.len())
    }

    fn average(&mut self, values: &mut [f32]) -> Result<Cost> {
        let poisoned = || anyhow!("another rank's thread has panicked");
        let began = Instant::now();
        if let Some(input) = self.rendezvous.inputs.lock().map_err(|_| poisoned())?.get_mut(self.rank) {
            input.clear();
            input.extend_from_slice(values);
        }
        self.rendezvous.arrived.wait();
        let inputs = self.rendezvous.inputs.lock().map_err(|_| poisoned())?;
        let same = inputs.iter().all(|input| input.len() == values.len());
        if same {
            values.fill(0.0);
            for input in inputs.iter() {
                values.iter_mut().zip(input).for_each(|(sum, value)| *sum += value);
            }
            let ranks = inputs.len() as f32;
            values.iter_mut().for_each(|sum| *sum /= ranks);
        }
        drop(inputs);
        self.rendezvous.arrived.wait();
        ensure!(same, "ranks averaged different numbers of values");
        Ok(Cost { collective: began.elapsed(), ..Cost::default() })
    }
}
