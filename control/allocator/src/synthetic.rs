//! Models and workloads of our own, from a seed. Profiles follow the seven parameters with noise, and records follow noise that grows
//! while a model learns.

use crate::goodput::{Noise, StepModel};
use crate::inventory::{Inventory, InventoryError, Kind};
use crate::job::{Job, Ranges};
use crate::model::{Epoch, Facts, Model, ModelError};
use crate::profile::{Placement, Profile, ProfileError, Scaling, StepTime};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use thiserror::Error;

/// An inventory with models and jobs.
#[derive(Debug, Clone)]
pub struct Synthetic {
    /// 64 accelerators of three kinds.
    pub inventory: Inventory,
    /// Four models, from minutes to days of one slow accelerator.
    pub models: Vec<Model>,
    /// The jobs, in order of arrival.
    pub jobs: Vec<Job>,
}

/// Why nothing was made.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum SyntheticError {
    /// No inventory.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    /// No model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// No profile.
    #[error(transparent)]
    Profile(#[from] ProfileError),
}

/// Kinds: name, hosts, accelerators of each, and how much faster than the first.
const KINDS: [(&str, u32, u32, f64); 3] = [("slow", 6, 4, 1.0), ("medium", 3, 8, 1.6), ("fast", 2, 8, 4.0)];

/// A model that is made. It has epochs, steps of an epoch, the initial batch, how often that can double, seconds of a sample and of an
/// exchange between hosts, seconds of a restart, and how often a job trains it.
struct Sketch {
    name: &'static str,
    epochs: usize,
    steps: f64,
    initial: u32,
    doublings: u32,
    sample: f64,
    exchange: f64,
    restart: f64,
    often: f64,
}

#[rustfmt::skip]
const SKETCHES: [Sketch; 4] = [
    Sketch { name: "small", epochs: 40, steps: 60.0, initial: 64, doublings: 5, sample: 0.001, exchange: 0.05, restart: 30.0, often: 0.7 },
    Sketch { name: "medium", epochs: 50, steps: 200.0, initial: 32, doublings: 5, sample: 0.004, exchange: 0.15, restart: 30.0, often: 0.17 },
    Sketch { name: "large", epochs: 30, steps: 1500.0, initial: 16, doublings: 6, sample: 0.02, exchange: 0.3, restart: 90.0, often: 0.1 },
    Sketch { name: "huge", epochs: 60, steps: 4000.0, initial: 128, doublings: 5, sample: 0.006, exchange: 0.4, restart: 240.0, often: 0.03 },
];

impl Synthetic {
    /// So many jobs, with so many seconds from one arrival to the next in the mean.
    ///
    /// # Errors
    ///
    /// None that a caller could cause.
    pub fn new(seed: u64, jobs: usize, seconds: f64) -> Result<Self, SyntheticError> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let kind = |(name, hosts, accelerators, _): (&str, u32, u32, f64)| Kind {
            name: name.to_owned(),
            hosts,
            accelerators,
            job_hosts: hosts,
        };
        let inventory = Inventory::new(KINDS.map(kind).to_vec())?;
        let mut models = Vec::new();
        for sketch in &SKETCHES {
            models.push(sketch.model(&inventory, &mut random)?);
        }
        let mut arrival = 0.0;
        let mut made = Vec::with_capacity(jobs);
        for number in 0..jobs {
            arrival += -seconds * (1.0 - random.random::<f64>()).ln();
            made.push(job(number, arrival, &models, &mut random));
        }
        Ok(Self { inventory, models, jobs: made })
    }
}

/// A job of some model, tuned for a batch of the recorded ones and workers that hold it well.
fn job(number: usize, arrival: f64, models: &[Model], random: &mut impl Rng) -> Job {
    let mut drawn = random.random::<f64>();
    let drawn = SKETCHES.iter().position(|sketch| {
        drawn -= sketch.often;
        drawn < 0.0
    });
    let model = drawn.unwrap_or(0);
    let (smallest, largest) = models.get(model).map_or((1, 1), Model::batches);
    let doublings = (largest / smallest).ilog2();
    let batch = smallest << random.random_range(doublings.min(2)..=doublings);
    let tuned = [2, 4, 4, 8, 8, 12, 16].get(random.random_range(0..7)).copied().unwrap_or(1);
    let workers = tuned.min(batch / smallest * 2).max(1);
    let name = models.get(model).map_or("job", |model| model.facts().name.as_str());
    Job {
        name: format!("{name}-{number}"),
        arrival,
        model,
        workers,
        batch,
        ranges: Ranges { workers: 1..=64, kinds: Vec::new(), batch: smallest..=largest },
    }
}

impl Sketch {
    fn model(&self, inventory: &Inventory, random: &mut impl Rng) -> Result<Model, SyntheticError> {
        let mut records = BTreeMap::new();
        for doubling in 0..=self.doublings {
            let epoch = |epoch: usize| {
                let learnt = (epoch as f64 + 1.0) / self.epochs as f64;
                let (square, wobble) = ((-3.0 * learnt).exp(), 0.9 + 0.2 * random.random::<f64>());
                let noise = Noise { square, variance: wobble * (1.0 + 8.0 * learnt) * square };
                Epoch { progress: self.steps * (epoch as f64 + 1.0), noise }
            };
            records.insert(self.initial << doubling, (0..self.epochs).map(epoch).collect());
        }
        let mut profiles = Vec::new();
        for ((_, kind), (.., faster)) in inventory.kinds().zip(KINDS) {
            profiles.push(Some(self.profile(kind, faster, random)?));
        }
        let facts = Facts {
            name: self.name.to_owned(),
            epochs: self.epochs,
            restart: self.restart,
            restart_guess: self.restart,
            slowdown: 1.0,
        };
        Ok(Model::new(facts, records, profiles)?)
    }

    /// Placements that fill hosts, and all others by numbers of hosts and workers alone.
    fn profile(&self, kind: &Kind, faster: f64, random: &mut impl Rng) -> Result<Profile, ProfileError> {
        let truth = StepModel {
            compute_base: self.sample * 4.0 / faster,
            compute_sample: self.sample / faster,
            hosts_base: self.exchange,
            hosts_worker: self.exchange / 20.0,
            local_base: self.exchange / 5.0,
            local_worker: self.exchange / 100.0,
            overlap: 1.5,
        };
        let mut measure = |hosts: u32, workers: u32, batch: u32| {
            let noise = 0.97 + 0.06 * random.random::<f64>();
            let step = noise * truth.step(hosts, workers, f64::from(batch));
            let compute = (noise * truth.compute(f64::from(batch))).min(0.999 * step);
            StepTime { step, exchange: step - compute }
        };
        let local_most = self.initial * 2;
        let batches: Vec<u32> =
            (0..5).map(|halvings| local_most >> halvings).filter(|batch| *batch > 0).collect();
        let mut placements = Vec::new();
        let mut scaling = Vec::new();
        for workers in 1..=kind.capacity() {
            for batch in &batches {
                let shape = kind.filled(workers);
                let time = measure(shape.len() as u32, workers, *batch);
                placements.push(Placement { shape, batch: *batch, time });
                for hosts in kind.hosts_of(workers)..=kind.hosts.min(workers) {
                    scaling.push(Scaling {
                        hosts,
                        workers,
                        batch: *batch,
                        time: measure(hosts, workers, *batch),
                    });
                }
            }
        }
        Profile::new(placements, scaling, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_makes_the_same_workload() {
        let make = |seed| Synthetic::new(seed, 20, 300.0).unwrap();
        let (one, other) = (make(1), make(1));
        assert_eq!(one.jobs, other.jobs);
        assert_ne!(one.jobs, make(2).jobs);
        for job in &one.jobs {
            assert_eq!(job.check(&one.inventory, &one.models), Ok(()));
        }
    }
}
