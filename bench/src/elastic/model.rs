//! A model of which one can tell what is in it: element `e` is `2e + 1` times the sum of all micro-batches' gradients.

use super::gradients;
use anyhow::{Context, Result, bail, ensure};
use std::path::Path;

/// The state of a training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// Micro-batches that are in it: those numbered below.
    pub micro_batches: u64,
    /// Work that they were, in hundredths of micro-batches.
    pub done: u64,
    elements: Vec<u64>,
}

/// What a sum of gradients is in an element.
fn at(element: usize, sum: u64) -> u64 {
    sum * (2 * element as u64 + 1)
}

impl Model {
    /// Nothing is in it.
    pub fn new(elements: usize) -> Self {
        Self { micro_batches: 0, done: 0, elements: vec![0; elements] }
    }

    /// With these elements.
    pub fn of(micro_batches: u64, done: u64, elements: Vec<u64>) -> Self {
        Self { micro_batches, done, elements }
    }

    /// Its elements.
    pub fn elements(&self) -> &[u64] {
        &self.elements
    }

    /// A rank's gradient: that of `count` micro-batches from `first` on, in the first elements of `into`.
    pub fn gradient(&self, first: u64, count: u64, into: &mut [u64]) {
        let sum = gradients(first, count);
        let into = into.iter_mut().take(self.elements.len()).enumerate();
        into.for_each(|(element, gradient)| *gradient = at(element, sum));
    }

    /// Adds what all ranks' gradients of the next `count` micro-batches sum up to, if it is that.
    pub fn step(&mut self, count: u64, worth: u64, sum: &[u64]) -> Result<()> {
        ensure!(sum.len() >= self.elements.len(), "a sum of {} elements", sum.len());
        let expected = gradients(self.micro_batches, count);
        for (element, (model, gradient)) in self.elements.iter_mut().zip(sum).enumerate() {
            if *gradient != at(element, expected) {
                bail!(
                    "micro-batches {} to {}: element {element} of their sum is {gradient}, not {}",
                    self.micro_batches,
                    self.micro_batches + count,
                    at(element, expected)
                );
            }
            *model += gradient;
        }
        self.micro_batches += count;
        self.done += worth;
        Ok(())
    }

    /// Whether each micro-batch is in it exactly once, counted from nothing.
    pub fn check(&self) -> Result<()> {
        let sum = gradients(0, self.micro_batches);
        let wrong = self.elements.iter().enumerate().find(|(element, found)| **found != at(*element, sum));
        match wrong {
            None => Ok(()),
            Some((element, found)) => {
                bail!(
                    "element {element} is {found}, and not what {} micro-batches make it",
                    self.micro_batches
                )
            }
        }
    }

    /// Writes it to a file, whole or not at all.
    pub fn save(&self, path: &Path) -> Result<()> {
        let words = [self.micro_batches, self.done];
        let words = words.iter().chain(&self.elements);
        let bytes: Vec<u8> = words.flat_map(|word| word.to_le_bytes()).collect();
        let part = path.with_extension("part");
        std::fs::write(&part, bytes).with_context(|| format!("cannot write {}", part.display()))?;
        std::fs::rename(&part, path).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Reads what was saved; nothing is in it where nothing was.
    pub fn restore(path: &Path, elements: usize) -> Result<Self> {
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self::new(elements)),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let (words, rest) = bytes.as_chunks::<8>();
        let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
        let (micro_batches, done) = words.next().zip(words.next()).context("an empty state")?;
        let found: Vec<u64> = words.collect();
        ensure!(rest.is_empty() && found.len() == elements, "a state of {} elements", found.len());
        Ok(Self::of(micro_batches, done, found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summed(model: &Model, ranks: u64, each: u64) -> Vec<u64> {
        let mut sum = vec![0; 5];
        for rank in 0..ranks {
            let mut own = vec![0; 5];
            model.gradient(model.micro_batches + rank * each, each, &mut own);
            sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
        }
        sum
    }

    #[test]
    fn every_micro_batch_is_counted_once() {
        let mut model = Model::new(5);
        for (ranks, each) in [(8, 2), (7, 16), (8, 5)] {
            let sum = summed(&model, ranks, each);
            model.step(ranks * each, 100, &sum).unwrap();
        }
        model.check().unwrap();
        assert_eq!((model.micro_batches, model.done), (16 + 112 + 40, 300));
        // A rank too few, and one twice.
        let sum = summed(&model, 7, 2);
        assert!(model.clone().step(16, 100, &sum).is_err());
        let sum: Vec<u64> = summed(&model, 8, 2).iter().map(|one| one + 1).collect();
        assert!(model.clone().step(16, 100, &sum).is_err());
        let once_more = Model { micro_batches: model.micro_batches + 1, ..model };
        assert!(once_more.check().is_err());
    }

    #[test]
    fn what_was_saved_comes_back() {
        let folder = std::env::temp_dir().join(format!("harmonaize-model-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("state");
        assert_eq!(Model::restore(&path, 5).unwrap(), Model::new(5));
        let mut model = Model::new(5);
        let sum = summed(&model, 3, 4);
        model.step(12, 1200, &sum).unwrap();
        model.save(&path).unwrap();
        assert_eq!(Model::restore(&path, 5).unwrap(), model);
        assert!(Model::restore(&path, 6).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
