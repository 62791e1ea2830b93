//! A compressed AllReduce of one part of a tensor, all participants in one process.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // tests alone
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

use harmonaize_abi::{View, ViewMut};
use harmonaize_codec::{Codec, Outlook, Squares, Terms, whole};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// Bytes of f32 of an operation, as the controller sees it.
const OPERATION: f64 = 64e6;

/// What is ahead of such operations on a link of so many bytes a second.
pub fn outlook(rate: f64) -> Outlook {
    Outlook {
        wire: 1.5 * OPERATION,
        encoded: OPERATION,
        decoded: 1.75 * OPERATION,
        rate,
        coded_rate: rate,
        overlapped: 0.0,
        chunks: 64.0,
    }
}

/// One part of a tensor at all participants, each with some ranks.
#[derive(Clone)]
pub struct Part {
    pub terms: Terms,
    pub ranks: Vec<u32>,
    /// By participant: the exact sum of its ranks' inputs.
    pub own: Vec<Vec<f32>>,
    /// The exact sum, and the sum of squares of all ranks' inputs.
    pub sum: Vec<f64>,
    pub signal: f64,
}

/// What came out.
pub struct Outcome {
    pub values: Vec<f32>,
    pub stated: Squares,
    /// The squared errors of all encodings as encoders measured them.
    pub measured: f64,
    pub refused: usize,
    pub bytes: usize,
    /// In what each chunk was, the sum's last.
    pub codecs: Vec<Codec>,
}

impl Part {
    /// `input` gives each rank's elements.
    pub fn new(
        terms: Terms,
        ranks: &[u32],
        elements: usize,
        input: &mut dyn FnMut(usize) -> Vec<f32>,
    ) -> Self {
        let (mut sum, mut signal, mut own, mut rank) = (vec![0.0; elements], 0.0, Vec::new(), 0);
        for count in ranks {
            let mut local = vec![0.0_f32; elements];
            for _ in 0..*count {
                let values = input(rank);
                rank += 1;
                for (index, value) in values.iter().enumerate() {
                    local[index] += value;
                    sum[index] += f64::from(*value);
                    signal += f64::from(*value).powi(2);
                }
            }
            own.push(local);
        }
        Self { terms, ranks: ranks.to_vec(), own, sum, signal }
    }

    fn room(&self) -> Vec<u8> {
        vec![0xa5; self.sum.len() * 4 + 128]
    }

    /// Participant 0 owns it.
    pub fn run(&self, seed: u64, average: bool) -> Outcome {
        let (mut refused, mut bytes, mut codecs, mut chunk) = (0, 0, Vec::new(), self.room());
        let mut values = self.own[0].clone();
        let own = View::from(&values[..]);
        let mut sums = whole(|passes| self.terms.begin(passes, self.ranks[0], own)).unwrap();
        for (place, own) in self.own.iter().enumerate().skip(1) {
            let to = ViewMut::from(&mut chunk[..]);
            let seed = seed.wrapping_mul(31).wrapping_add(place as u64);
            let (own, ranks) = (View::from(&own[..]), self.ranks[place]);
            let coded = whole(|passes| self.terms.contribute(passes, ranks, seed, own, to)).unwrap();
            let (from, to) = (View::from(&chunk[..coded.bytes]), ViewMut::from(&mut values[..]));
            whole(|passes| self.terms.add(passes, &mut sums, from, to)).unwrap();
            (refused, bytes) = (refused + usize::from(coded.refused), bytes + coded.bytes);
            codecs.push(coded.codec);
        }
        let all: u32 = self.ranks.iter().sum();
        if average {
            values.iter_mut().for_each(|value| *value /= all as f32);
        }
        let (from, to) = (View::from(&values[..]), ViewMut::from(&mut chunk[..]));
        let average_of = average.then_some(all);
        let coded = whole(|passes| self.terms.conclude(passes, &sums, average_of, seed, from, to)).unwrap();
        let mut values = vec![0.0; values.len()];
        let (from, to) = (View::from(&chunk[..coded.bytes]), ViewMut::from(&mut values[..]));
        let stated = whole(|passes| self.terms.take(passes, from, to)).unwrap();
        assert_eq!((stated.bytes, stated.refused, stated.codec), (coded.bytes, coded.refused, coded.codec));
        codecs.push(coded.codec);
        let (stated, measured) = (stated.squares, stated.measured);
        assert!(stated.signal.to_bits() == coded.squares.signal.to_bits());
        let (refused, bytes) = (refused + usize::from(coded.refused), bytes + coded.bytes);
        Outcome { values, stated, measured, refused, bytes, codecs }
    }

    /// The squared error of the sum, found by hand.
    pub fn error(&self, outcome: &Outcome, average: bool) -> f64 {
        let scale = if average { f64::from(self.ranks.iter().sum::<u32>()) } else { 1.0 };
        let lost = self.sum.iter().zip(&outcome.values);
        lost.map(|(sum, value)| (sum - f64::from(*value) * scale).powi(2)).sum()
    }
}

/// A normal number (Box and Muller).
pub fn normal(random: &mut ChaCha8Rng) -> f32 {
    let radius = (-2.0 * (1.0 - random.random::<f64>()).ln()).sqrt();
    (radius * (std::f64::consts::TAU * random.random::<f64>()).cos()) as f32
}
