//! The state of an elastic training: the demo's perceptron with its momentum, and which micro-batches are in it.

use super::tags;
use crate::digits::{Batches, Digits};
use crate::model::{Kind, Model};
use crate::seeded::Digest;
use crate::training::{Recipe, descend};
use anyhow::{Context, Result, ensure};
use std::path::Path;

/// Images of a micro-batch.
pub const IMAGES: usize = 16;
/// Numbers behind a rank's gradients: the sum of its micro-batches' numbers in two parts, and of their losses.
pub const RIDERS: usize = 3;
/// Parts are so small that sums over all ranks are exact in `f32`.
const PART: u64 = 1 << 12;

/// A copy of the model.
pub struct State {
    /// Micro-batches that are in it: those numbered below.
    pub micro_batches: u64,
    /// Work that they were, in hundredths of micro-batches.
    pub done: u64,
    recipe: Recipe,
    network: Model,
    digits: Digits,
    batches: Batches,
    parameters: Vec<f32>,
    velocity: Vec<f32>,
}

impl State {
    /// Nothing is in it.
    ///
    /// # Errors
    /// Where the data or the model cannot be made.
    pub fn new() -> Result<Self> {
        let recipe = Recipe { kind: Kind::Perceptron, ..Recipe::default() };
        let (network, digits) = (Model::new(recipe.kind, recipe.seed)?, Digits::load(recipe.seed)?);
        let batches = Batches::new(recipe.seed, digits.training.len(), IMAGES)?;
        let parameters = network.parameters()?;
        let velocity = vec![0.0; parameters.len()];
        Ok(Self { micro_batches: 0, done: 0, recipe, network, digits, batches, parameters, velocity })
    }

    /// The number of parameters, and of words of a state.
    pub fn elements(&self) -> usize {
        self.parameters.len()
    }

    /// A rank's sum of gradients over `count` micro-batches from `first` on, and [`RIDERS`] behind it.
    ///
    /// # Errors
    /// Where the model cannot be evaluated.
    pub fn gradient(&self, first: u64, count: u64, into: &mut Vec<f32>) -> Result<()> {
        let places = (first..first + count).flat_map(|number| self.batches.step(number as usize));
        let images = self.digits.training.select(&places.collect::<Vec<usize>>())?;
        let loss = self.network.gradients(&images, into)?;
        // Micro-batches are equal, so that the mean over them is the mean of their means.
        into.iter_mut().for_each(|gradient| *gradient *= count as f32);
        let numbers = tags(first, count);
        into.extend([(numbers % PART) as f32, (numbers / PART) as f32, loss * count as f32]);
        Ok(())
    }

    /// Makes a step with the sum of all ranks' gradients over the next `count` micro-batches. The sum must be of exactly those. Returns
    /// their mean loss.
    ///
    /// # Errors
    /// Where a micro-batch is missing from the sum, or twice in it.
    pub fn step(&mut self, count: u64, worth: u64, sum: &[f32]) -> Result<f32> {
        let (gradients, riders) = sum.split_at_checked(self.elements()).context("a short sum")?;
        let &[low, high, loss] = riders.first_chunk::<RIDERS>().context("no riders")?;
        let (found, expected) = (low as u64 + high as u64 * PART, tags(self.micro_batches, count));
        ensure!(
            found == expected,
            "micro-batches {} to {}: their numbers sum up to {found}, not {expected}",
            self.micro_batches,
            self.micro_batches + count
        );
        ensure!(loss.is_finite(), "the loss is {loss}");
        let mean: Vec<f32> = gradients.iter().map(|gradient| gradient / count as f32).collect();
        descend(&self.recipe, &mean, &mut self.velocity, &mut self.parameters);
        self.network.set_parameters(&self.parameters)?;
        self.micro_batches += count;
        self.done += worth;
        Ok(loss / count as f32)
    }

    /// Test images told right, and test images.
    ///
    /// # Errors
    /// Where the model cannot be evaluated.
    pub fn test(&self) -> Result<(u64, u64)> {
        Ok((self.network.correct(&self.digits.test)? as u64, self.digits.test.len() as u64))
    }

    /// A digest of all that is in it, equal at ranks that made the same steps.
    pub fn digest(&self) -> u64 {
        let mut digest = Digest::default();
        self.words().iter().for_each(|word| digest.update(&word.to_le_bytes()));
        digest.value()
    }

    /// All of it: two counts, then a parameter with its velocity a word.
    pub fn words(&self) -> Vec<u64> {
        let both = self.parameters.iter().zip(&self.velocity);
        let pairs = both.map(|(own, speed)| u64::from(own.to_bits()) << 32 | u64::from(speed.to_bits()));
        [self.micro_batches, self.done].into_iter().chain(pairs).collect()
    }

    /// Takes over what [`Self::words`] gave.
    ///
    /// # Errors
    /// Where they are too few or too many.
    pub fn take(&mut self, words: &[u64]) -> Result<()> {
        let (&[micro_batches, done], pairs) = words.split_first_chunk().context("an empty state")?;
        ensure!(pairs.len() == self.elements(), "a state of {} elements", pairs.len());
        self.parameters = pairs.iter().map(|pair| f32::from_bits((pair >> 32) as u32)).collect();
        self.velocity = pairs.iter().map(|pair| f32::from_bits(*pair as u32)).collect();
        (self.micro_batches, self.done) = (micro_batches, done);
        self.network.set_parameters(&self.parameters)
    }

    /// Writes it to a file, whole or not at all.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let bytes: Vec<u8> = self.words().iter().flat_map(|word| word.to_le_bytes()).collect();
        let part = path.with_extension("part");
        std::fs::write(&part, bytes).with_context(|| format!("cannot write {}", part.display()))?;
        std::fs::rename(&part, path).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Reads what was saved; nothing is in it where nothing was.
    ///
    /// # Errors
    /// Where the file cannot be read, or holds no state.
    pub fn restore(path: &Path) -> Result<Self> {
        let mut state = Self::new()?;
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(state),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let (words, rest) = bytes.as_chunks::<8>();
        ensure!(rest.is_empty(), "a state of {} bytes", bytes.len());
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        state.take(&words).with_context(|| format!("{} holds no state", path.display()))?;
        Ok(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summed(state: &State, ranks: u64, each: u64) -> Vec<f32> {
        let mut sum = vec![0.0; state.elements() + RIDERS];
        let mut own = Vec::new();
        for rank in 0..ranks {
            state.gradient(state.micro_batches + rank * each, each, &mut own).unwrap();
            sum.iter_mut().zip(&own).for_each(|(sum, own)| *sum += own);
        }
        sum
    }

    #[test]
    fn every_micro_batch_is_counted_once() {
        let mut state = State::new().unwrap();
        for (ranks, each) in [(8, 2), (7, 16), (8, 5)] {
            let sum = summed(&state, ranks, each);
            state.step(ranks * each, 100, &sum).unwrap();
        }
        assert_eq!((state.micro_batches, state.done), (16 + 112 + 40, 300));
        // A rank too few, and one twice.
        let sum = summed(&state, 7, 2);
        assert!(state.step(16, 100, &sum).is_err());
        let mut twice = summed(&state, 8, 2);
        let mut own = Vec::new();
        state.gradient(state.micro_batches, 2, &mut own).unwrap();
        twice.iter_mut().zip(&own).for_each(|(sum, own)| *sum += own);
        assert!(state.step(16, 100, &twice).is_err());
        assert_eq!(state.done, 300, "a wrong sum changes nothing");
    }

    #[test]
    fn the_model_learns_whoever_computes() {
        let mut state = State::new().unwrap();
        let mut losses = Vec::new();
        for step in 0..60 {
            let (ranks, each) = if step % 3 == 0 { (3, 2) } else { (4, 2) };
            let sum = summed(&state, ranks, each);
            losses.push(state.step(ranks * each, 1, &sum).unwrap());
        }
        let (correct, tested) = state.test().unwrap();
        assert!(losses[59] < 0.3 * losses[0], "{losses:?}");
        assert!(correct * 10 >= tested * 9, "{correct} of {tested}");
    }

    #[test]
    fn what_was_saved_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let mut state = State::new().unwrap();
        assert_eq!(State::restore(&path).unwrap().digest(), state.digest());
        let sum = summed(&state, 3, 4);
        state.step(12, 1200, &sum).unwrap();
        state.save(&path).unwrap();
        let mut restored = State::restore(&path).unwrap();
        assert_eq!((restored.digest(), restored.done), (state.digest(), 1200));
        let sum = summed(&restored, 2, 2);
        assert_eq!(restored.step(4, 1, &sum).unwrap(), state.step(4, 1, &sum).unwrap());
        assert_eq!(restored.digest(), state.digest(), "its velocity came back too");
        assert!(restored.take(&state.words()[1..]).is_err());
    }
}
