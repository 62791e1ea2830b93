//! The UCI handwritten digits: 1797 images of 8 x 8 pixels, split once into training and test, cut into batches.

use crate::seeded::SplitMix64;
use anyhow::{Context, Result, bail, ensure};

/// Pixels of an image.
pub const PIXELS: usize = 64;
/// Kinds of digit.
pub const CLASSES: usize = 10;
/// Images that are never trained on.
pub const TEST_IMAGES: usize = 360;

const CSV: &str = include_str!("../data/digits.csv");

/// Images with their digits, in a fixed order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Images {
    /// [`PIXELS`] numbers in `0.0..=1.0` an image.
    pub pixels: Vec<f32>,
    /// The digit of each image, 0 to 9.
    pub labels: Vec<u32>,
}

impl Images {
    /// How many.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// The images at the given places; an error if one is not there.
    pub fn select(&self, places: &[usize]) -> Result<Self> {
        let mut selected = Self {
            pixels: Vec::with_capacity(places.len() * PIXELS),
            labels: Vec::with_capacity(places.len()),
        };
        for &place in places {
            let pixels = self.pixels.chunks_exact(PIXELS).nth(place).context("no such image")?;
            selected.pixels.extend_from_slice(pixels);
            selected.labels.push(*self.labels.get(place).context("no such image")?);
        }
        Ok(selected)
    }
}

/// The data set, split.
#[derive(Clone, Debug)]
pub struct Digits {
    /// To train on.
    pub training: Images,
    /// To test on: [`TEST_IMAGES`].
    pub test: Images,
}

impl Digits {
    /// The data set in this program, split at random by `seed`.
    pub fn load(seed: u64) -> Result<Self> {
        let all = parse(CSV)?;
        let mut places: Vec<usize> = (0..all.len()).collect();
        SplitMix64::named(seed, &[0x0073_706c_6974]).shuffle(&mut places);
        let (test, training) = places.split_at_checked(TEST_IMAGES).context("the data set is too small")?;
        Ok(Self { training: all.select(training)?, test: all.select(test)? })
    }
}

fn parse(csv: &str) -> Result<Images> {
    let mut images = Images::default();
    for (number, line) in csv.lines().enumerate() {
        let place = || format!("line {} of the data set", number + 1);
        let values: Vec<u32> =
            line.split(',').map(str::parse).collect::<Result<_, _>>().with_context(place)?;
        let Some((&label, pixels)) = values.split_last() else { bail!("{}: empty", place()) };
        ensure!(pixels.len() == PIXELS, "{}: {} pixels instead of {PIXELS}", place(), pixels.len());
        ensure!((label as usize) < CLASSES, "{}: the digit {label}", place());
        ensure!(pixels.iter().all(|&pixel| pixel <= 16), "{}: a pixel over 16", place());
        images.pixels.extend(pixels.iter().map(|&pixel| pixel as f32 / 16.0));
        images.labels.push(label);
    }
    Ok(images)
}

/// Which images a step trains on: batch after batch of a shuffle of each epoch's own. A last part that fills no batch is
/// left out of its epoch.
#[derive(Clone, Debug)]
pub struct Batches {
    seed: u64,
    images: usize,
    batch: usize,
}

impl Batches {
    /// Batches of `batch` out of `images` images.
    pub fn new(seed: u64, images: usize, batch: usize) -> Result<Self> {
        ensure!(batch > 0 && batch <= images, "a batch of {batch} out of {images} images cannot be had");
        Ok(Self { seed, images, batch })
    }

    /// The places of all images of a step's batch, for all ranks.
    pub fn step(&self, step: usize) -> Vec<usize> {
        let per_epoch = self.images / self.batch;
        let mut places: Vec<usize> = (0..self.images).collect();
        SplitMix64::named(self.seed, &[0x65_706f_6368, (step / per_epoch) as u64]).shuffle(&mut places);
        places.into_iter().skip(step % per_epoch * self.batch).take(self.batch).collect()
    }

    /// The part of a step's batch that falls to `rank`. Parts are equal and in order, so that the mean of the ranks' means
    /// is the batch's mean.
    pub fn shard(&self, step: usize, rank: usize, ranks: usize) -> Result<Vec<usize>> {
        ensure!(rank < ranks, "rank {rank} of {ranks}");
        ensure!(
            self.batch.is_multiple_of(ranks),
            "a batch of {} cannot be cut for {ranks} ranks",
            self.batch
        );
        let part = self.batch / ranks;
        Ok(self.step(step).into_iter().skip(rank * part).take(part).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_set_is_whole_and_split() {
        let digits = Digits::load(1).unwrap();
        assert_eq!((digits.training.len(), digits.test.len()), (1437, 360));
        assert_eq!(digits.training.pixels.len(), 1437 * PIXELS);
        let mut counts = [0; CLASSES];
        for &label in digits.training.labels.iter().chain(&digits.test.labels) {
            counts[label as usize] += 1;
        }
        // The class distribution that UCI's description states for the test part.
        assert_eq!(counts, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
    }

    #[test]
    fn the_split_follows_the_seed() {
        let labels = |seed| Digits::load(seed).unwrap().test.labels;
        assert_eq!(labels(1), labels(1));
        assert_ne!(labels(1), labels(2));
    }

    #[test]
    fn bad_lines_are_named() {
        assert!(format!("{:#}", parse("1,2\n").unwrap_err()).contains("line 1"));
        let good = [["0"; 64].join(","), "3".into()].join(",");
        assert_eq!(parse(&good).unwrap().labels, [3]);
        assert!(format!("{:#}", parse(&format!("{good}\n{good}x")).unwrap_err()).contains("line 2"));
        assert!(parse(&good.replace("0,3", "0,10")).is_err());
        assert!(parse(&good.replacen('0', "17", 1)).is_err());
    }

    #[test]
    fn shards_concatenate_to_the_batch() {
        let batches = Batches::new(5, 1437, 128).unwrap();
        for step in [0, 1, 10, 11, 500] {
            for ranks in [1, 2, 4, 8, 16, 128] {
                let shards: Vec<usize> =
                    (0..ranks).flat_map(|rank| batches.shard(step, rank, ranks).unwrap()).collect();
                assert_eq!(shards, batches.step(step));
            }
        }
        assert!(batches.shard(0, 0, 3).is_err());
        assert!(batches.shard(0, 8, 8).is_err());
    }

    #[test]
    fn an_epoch_sees_no_image_twice() {
        let batches = Batches::new(5, 1437, 128).unwrap();
        let mut seen: Vec<usize> = (0..11).flat_map(|step| batches.step(step)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 11 * 128);
        assert_ne!(batches.step(0), batches.step(11));
        assert!(Batches::new(0, 5, 0).is_err() && Batches::new(0, 5, 6).is_err());
    }
}
