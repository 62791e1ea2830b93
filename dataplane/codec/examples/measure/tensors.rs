//! Synthetic tensors, from fixed seeds.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Each by its name: normal, heavy-tailed (Student's t, 3 degrees of freedom), and sparse (99 of 100 are 0).
pub(crate) fn synthetic(elements: usize) -> Vec<(String, Vec<f32>)> {
    let make = |name: &str, seed, of: fn(&mut ChaCha8Rng) -> f64| {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        (name.to_owned(), (0..elements).map(|_| (of(&mut random) * 1e-3) as f32).collect())
    };
    vec![
        make("gaussian", 1, normal),
        make("heavy-tailed", 2, |random| {
            let chi: f64 = (0..3).map(|_| normal(random).powi(2)).sum();
            normal(random) / (chi / 3.0).sqrt()
        }),
        make("sparse", 3, |random| if random.random::<f64>() < 0.01 { normal(random) } else { 0.0 }),
    ]
}

/// A normal number (Box and Muller).
fn normal(random: &mut ChaCha8Rng) -> f64 {
    let radius = (-2.0 * (1.0 - random.random::<f64>()).ln()).sqrt();
    radius * (std::f64::consts::TAU * random.random::<f64>()).cos()
}
