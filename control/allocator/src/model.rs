//! What a job trains: how it progresses, and how long its steps take on each kind.

use crate::goodput::{BatchRange, Noise};
use crate::inventory::KindId;
use crate::profile::Profile;
use std::collections::BTreeMap;
use thiserror::Error;

/// What was recorded of one epoch of a training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Epoch {
    /// Progress at its end: steps of the initial batch that would have come as far.
    pub progress: f64,
    /// Gradients during it.
    pub noise: Noise,
}

/// What is wrong with a model.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum ModelError {
    /// No recorded training, or one that is shorter than the model's epochs.
    #[error("model {model} has no record of {epochs} epochs with batches of {batch}")]
    Epochs {
        /// The model's name.
        model: String,
        /// The epochs that it trains.
        epochs: usize,
        /// The batch whose record is too short, or 0.
        batch: u32,
    },
    /// Progress that does not grow, or noise that is none.
    #[error("model {model}: epoch {epoch} with batches of {batch} is no record of progress and noise")]
    Record {
        /// The model's name.
        model: String,
        /// The epoch, from 1.
        epoch: usize,
        /// The batch.
        batch: u32,
    },
    /// A time or factor that is none.
    #[error("model {model}: restarts of {restart} s and a slowdown of {slowdown} make no sense")]
    Factor {
        /// The model's name.
        model: String,
        /// Seconds of a restart.
        restart: f64,
        /// By how much steps are slower than profiles.
        slowdown: f64,
    },
}

/// What is fixed for all jobs of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// The model's name.
    pub name: String,
    /// How many epochs a job trains.
    pub epochs: usize,
    /// Seconds of a checkpoint and a restart.
    pub restart: f64,
    /// What the provider takes those for, in seconds.
    pub restart_guess: f64,
    /// By how much steps are slower than in the profiles.
    pub slowdown: f64,
}

/// A model with its records and profiles.
#[derive(Debug, Clone)]
pub struct Model {
    facts: Facts,
    /// Recorded trainings by batch.
    records: BTreeMap<u32, Vec<Epoch>>,
    profiles: Vec<Option<Profile>>,
}

impl Model {
    /// A model of recorded trainings by batch, with a profile for each kind of the inventory that can run it.
    ///
    /// # Errors
    ///
    /// Records that are too short, or what is no number where one must be.
    pub fn new(
        facts: Facts,
        records: BTreeMap<u32, Vec<Epoch>>,
        profiles: Vec<Option<Profile>>,
    ) -> Result<Self, ModelError> {
        let (model, epochs) = (facts.name.clone(), facts.epochs);
        let is_time = |value: f64| value.is_finite() && value >= 0.0;
        if !(is_time(facts.restart) && is_time(facts.restart_guess) && is_time(facts.slowdown))
            || facts.slowdown == 0.0
        {
            let (restart, slowdown) = (facts.restart, facts.slowdown);
            return Err(ModelError::Factor { model, restart, slowdown });
        }
        if records.is_empty() || epochs == 0 {
            return Err(ModelError::Epochs { model, epochs, batch: 0 });
        }
        for (batch, record) in &records {
            let batch = *batch;
            if record.len() < epochs {
                return Err(ModelError::Epochs { model, epochs, batch });
            }
            let mut before = 0.0;
            for (place, epoch) in record.iter().enumerate() {
                let Noise { square, variance } = epoch.noise;
                if !(epoch.progress > before
                    && epoch.progress.is_finite()
                    && is_time(square)
                    && is_time(variance))
                    || batch == 0
                {
                    return Err(ModelError::Record { model, epoch: place + 1, batch });
                }
                before = epoch.progress;
            }
        }
        Ok(Self { facts, records, profiles })
    }

    /// What is fixed for all its jobs.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Its steps on a kind, where it can run there.
    pub fn profile(&self, kind: KindId) -> Option<&Profile> {
        self.profiles.get(kind.0)?.as_ref()
    }

    /// The smallest and the largest recorded batch.
    pub fn batches(&self) -> (u32, u32) {
        let ends = (self.records.keys().next(), self.records.keys().next_back());
        (ends.0.copied().unwrap_or(1), ends.1.copied().unwrap_or(1))
    }

    /// The batches that may be on a kind, between a least and a most. Passes are not larger than `local_most`.
    pub(crate) fn range(&self, profile: &Profile, (least, most): (u32, u32), local_most: u32) -> BatchRange {
        let (initial, local_least) = (self.batches().0, profile.local_batch().0);
        BatchRange { initial, least, most, local_least, local_most }
    }

    /// Progress after so many epochs; `None` beyond the last.
    pub fn progress(&self, epochs: usize) -> Option<f64> {
        let Some(last) = epochs.checked_sub(1) else { return Some(0.0) };
        let ends = self.records.values().map(|record| record.get(last).map(|epoch| epoch.progress));
        ends.reduce(|one, other| Some(one?.min(other?)))?
    }

    /// Gradients of a batch during an epoch, counted from 0: on the line between the nearest recorded batches. A batch outside of
    /// the recorded ones has the nearest one's.
    pub fn noise(&self, batch: u32, epoch: usize) -> Option<Noise> {
        let (least, most) = self.batches();
        let batch = batch.clamp(least, most);
        let of = |(batch, record): (&u32, &Vec<Epoch>)| Some((*batch, record.get(epoch)?.noise));
        let (below, low) = of(self.records.range(..=batch).next_back()?)?;
        let (above, high) = of(self.records.range(batch..).next()?)?;
        if below == above {
            return Some(low);
        }
        let part = f64::from(batch - below) / f64::from(above - below);
        let between = |low: f64, high: f64| low + part * (high - low);
        let square = between(low.square, high.square);
        Some(Noise { square, variance: between(low.variance, high.variance) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(progress: f64, square: f64) -> Epoch {
        Epoch { progress, noise: Noise { square, variance: 2.0 * square } }
    }

    fn facts() -> Facts {
        Facts { name: "m".to_owned(), epochs: 2, restart: 30.0, restart_guess: 30.0, slowdown: 1.0 }
    }

    #[test]
    fn progress_is_the_slowest_records_and_noise_lies_between() {
        let records = BTreeMap::from([
            (8, vec![epoch(10.0, 1.0), epoch(20.0, 2.0)]),
            (16, vec![epoch(11.0, 3.0), epoch(19.0, 6.0)]),
        ]);
        let model = Model::new(facts(), records, Vec::new()).unwrap();
        assert_eq!(
            [0, 1, 2, 3].map(|epochs| model.progress(epochs)),
            [Some(0.0), Some(10.0), Some(19.0), None]
        );
        assert_eq!(model.noise(12, 1), Some(Noise { square: 4.0, variance: 8.0 }));
        assert_eq!(model.noise(99, 0), Some(Noise { square: 3.0, variance: 6.0 }));
        assert_eq!(model.noise(8, 2), None);
    }

    #[test]
    fn records_that_are_none_are_refused() {
        let model =
            |facts: Facts, record: Vec<Epoch>| Model::new(facts, BTreeMap::from([(8, record)]), Vec::new());
        let fine = vec![epoch(1.0, 1.0), epoch(2.0, 1.0)];
        assert!(model(facts(), fine.clone()).is_ok());
        assert!(matches!(model(facts(), fine[..1].to_vec()), Err(ModelError::Epochs { batch: 8, .. })));
        for second in [epoch(1.0, 1.0), epoch(f64::NAN, 1.0), epoch(2.0, f64::NAN), epoch(2.0, -1.0)] {
            let record = vec![epoch(1.0, 1.0), second];
            assert!(matches!(model(facts(), record), Err(ModelError::Record { epoch: 2, .. })), "{second:?}");
        }
        for slowdown in [0.0, -1.0, f64::NAN] {
            assert!(matches!(
                model(Facts { slowdown, ..facts() }, fine.clone()),
                Err(ModelError::Factor { .. })
            ));
        }
    }
}
