//! How long a model's steps take on one kind of accelerator: a table of measurements, and what lies between them.

use good_lp::{Expression, ProblemVariables, SolverModel, constraint, microlp, variable};
use std::cell::RefCell;
use std::collections::BTreeMap;
use thiserror::Error;

/// Seconds of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepTime {
    /// The whole step.
    pub step: f64,
    /// The exchange of gradients that is not hidden behind computation.
    pub exchange: f64,
}

/// Steps of one placement: workers on each host in order, and samples of one pass of a worker.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// Workers on each host.
    pub shape: Vec<u32>,
    /// Samples of a pass.
    pub batch: u32,
    /// What a step takes.
    pub time: StepTime,
}

/// Steps of so many workers on so many hosts, however they are placed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scaling {
    /// Hosts with workers.
    pub hosts: u32,
    /// Workers on all of them.
    pub workers: u32,
    /// Samples of a pass.
    pub batch: u32,
    /// What a step takes.
    pub time: StepTime,
}

/// What is wrong with a profile, or not in it.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum ProfileError {
    /// Nothing was measured.
    #[error("the profile has no placements")]
    Empty,
    /// A placement of no workers, or a time that is none.
    #[error(
        "the profile's row for {shape:?} with {batch} samples is none: step {step} s, exchange {exchange} s"
    )]
    Row {
        /// Workers on each host.
        shape: Vec<u32>,
        /// Samples of a pass.
        batch: u32,
        /// The row's step.
        step: f64,
        /// The row's exchange.
        exchange: f64,
    },
    /// One worker alone was not measured.
    #[error("the profile has no row for one worker alone, from which others' speeds are guessed")]
    NoSingle,
    /// Between measurements, but not among them.
    #[error(
        "the profile has a hole: workers {shape:?} with {batch} samples each; the nearest that is known has {nearest} samples"
    )]
    Hole {
        /// Workers on each host.
        shape: Vec<u32>,
        /// Samples of a pass.
        batch: u32,
        /// Samples of the nearest measurement.
        nearest: u32,
    },
}

/// Steps by batch, ascending.
type Curve = BTreeMap<u32, StepTime>;

/// A model's steps on one kind.
#[derive(Debug, Clone)]
pub struct Profile {
    placements: BTreeMap<Vec<u32>, Curve>,
    /// By hosts, workers and batch: the mean over placements, or what was measured so.
    points: BTreeMap<(u32, u32, u32), StepTime>,
    scaling: Vec<(u32, u32, u32)>,
    local_batch: (u32, u32),
    single_rate: f64,
    /// What was interpolated once.
    between: RefCell<BTreeMap<(u32, u32, u32), Option<StepTime>>>,
}

/// More hosts than that are taken for that many.
const MOST_HOSTS: u32 = 16;

impl Profile {
    /// A profile of measurements. `local_most` lowers the most samples of a pass.
    ///
    /// # Errors
    ///
    /// No placements, a time that is no number above 0, or none of one worker alone.
    pub fn new(
        placements: Vec<Placement>,
        scaling: Vec<Scaling>,
        local_most: Option<u32>,
    ) -> Result<Self, ProfileError> {
        let mut curves: BTreeMap<Vec<u32>, Curve> = BTreeMap::new();
        let mut sums: BTreeMap<(u32, u32, u32), (StepTime, u32)> = BTreeMap::new();
        for row in &placements {
            let workers = row.shape.iter().sum();
            checked(&row.shape, row.batch, row.time)?;
            curves.entry(row.shape.clone()).or_default().insert(row.batch, row.time);
            let none = (StepTime { step: 0.0, exchange: 0.0 }, 0);
            let (sum, count) = sums.entry((row.shape.len() as u32, workers, row.batch)).or_insert(none);
            sum.step += row.time.step;
            sum.exchange += row.time.exchange;
            *count += 1;
        }
        let mut points: BTreeMap<(u32, u32, u32), StepTime> = BTreeMap::new();
        for row in &scaling {
            checked(&[row.hosts, row.workers], row.batch, row.time)?;
            points.insert((row.hosts, row.workers, row.batch), row.time);
        }
        points.extend(sums.into_iter().map(|(key, (sum, count))| {
            let count = f64::from(count);
            (key, StepTime { step: sum.step / count, exchange: sum.exchange / count })
        }));
        let batches = || placements.iter().map(|row| row.batch);
        let (Some(least), Some(most)) = (batches().min(), batches().max()) else {
            return Err(ProfileError::Empty);
        };
        let alone = curves.get([1].as_slice()).ok_or(ProfileError::NoSingle)?;
        let largest = alone.keys().next_back().copied().unwrap_or(0);
        let slowest = alone.values().map(|time| time.step).fold(0.0, f64::max);
        Ok(Self {
            single_rate: f64::from(largest) / slowest,
            placements: curves,
            points,
            scaling: scaling.iter().map(|row| (row.hosts, row.workers, row.batch)).collect(),
            local_batch: (least, local_most.unwrap_or(most)),
            between: RefCell::default(),
        })
    }

    /// The fewest and the most samples of a pass.
    pub fn local_batch(&self) -> (u32, u32) {
        self.local_batch
    }

    /// Samples a second of one worker alone.
    pub fn single_rate(&self) -> f64 {
        self.single_rate
    }

    /// The most samples of a pass in a placement; `None` where nothing was measured that is as large.
    pub fn most_samples(&self, shape: &[u32]) -> Option<u32> {
        if let Some(curve) = self.placements.get(&turned(shape)) {
            return curve.keys().next_back().copied();
        }
        let (hosts, workers) = (shape.len() as u32, shape.iter().sum::<u32>());
        let as_large = self.scaling.iter().filter(|row| row.0 >= hosts && row.1 >= workers);
        as_large.map(|row| row.2).max()
    }

    /// The most samples of a pass in any placement of so many workers.
    pub fn most_samples_of(&self, workers: u32) -> Option<u32> {
        let alike = self.placements.iter().filter(|(shape, _)| shape.iter().sum::<u32>() == workers);
        alike.filter_map(|(_, curve)| curve.keys().next_back().copied()).max()
    }

    /// What a step takes, on the line between the two nearest batches of the placement. Where it was not measured it lies
    /// between the nearest corners by hosts, workers and batch.
    ///
    /// # Errors
    ///
    /// A hole: outside all that was measured.
    pub fn step_time(&self, shape: &[u32], batch: u32) -> Result<StepTime, ProfileError> {
        let turned = turned(shape);
        if let Some(curve) = self.placements.get(&turned) {
            return on_line(curve, batch).ok_or_else(|| hole(shape, batch, curve.keys().copied()));
        }
        let key = ((shape.len() as u32).min(MOST_HOSTS), shape.iter().sum::<u32>(), batch);
        let known = self.between.borrow().get(&key).copied();
        let found = known.unwrap_or_else(|| {
            let found = self.between_corners(key);
            self.between.borrow_mut().insert(key, found);
            found
        });
        found.ok_or_else(|| self.hole(shape, batch))
    }

    /// The hole at a placement that nothing covers.
    pub(crate) fn hole(&self, shape: &[u32], batch: u32) -> ProfileError {
        hole(shape, batch, self.points.keys().map(|point| point.2))
    }

    /// Interpolates linearly between the corners of the tetrahedron around a point. The tetrahedron is Delaunay's: the lifted
    /// points' lower hull above the point, which a linear program finds. `None` outside of the hull.
    fn between_corners(&self, (hosts, workers, batch): (u32, u32, u32)) -> Option<StepTime> {
        if let Some(time) = self.points.get(&(hosts, workers, batch)) {
            return Some(*time);
        }
        let offset = |to: u32, from: u32| f64::from(to) - f64::from(from);
        let mut variables = ProblemVariables::new();
        let [mut height, mut at_hosts, mut at_workers, mut at_batch, mut all, mut step, mut exchange] =
            std::array::from_fn(|_| Expression::default());
        for (point, time) in &self.points {
            let share = variables.add(variable().min(0.0));
            let (x, y, z) = (offset(point.0, hosts), offset(point.1, workers), offset(point.2, batch));
            height.add_mul(x * x + y * y + z * z, share);
            at_hosts.add_mul(x, share);
            at_workers.add_mul(y, share);
            at_batch.add_mul(z, share);
            all.add_mul(1.0, share);
            step.add_mul(time.step, share);
            exchange.add_mul(time.exchange, share);
        }
        let model = variables.minimise(height).using(microlp);
        let model = model.with(constraint!(at_hosts == 0.0)).with(constraint!(at_workers == 0.0));
        let solved = model.with(constraint!(at_batch == 0.0)).with(constraint!(all == 1.0)).solve().ok()?;
        Some(StepTime { step: step.eval_with(&solved), exchange: exchange.eval_with(&solved) })
    }
}

/// A row that is one.
fn checked(shape: &[u32], batch: u32, time: StepTime) -> Result<(), ProfileError> {
    let StepTime { step, exchange } = time;
    let is_time = step.is_finite() && exchange.is_finite() && exchange >= 0.0 && step > exchange;
    if is_time && batch > 0 && !shape.is_empty() && !shape.contains(&0) {
        return Ok(());
    }
    Err(ProfileError::Row { shape: shape.to_vec(), batch, step, exchange })
}

fn hole(shape: &[u32], batch: u32, measured: impl Iterator<Item = u32>) -> ProfileError {
    let nearest = measured.min_by_key(|each| each.abs_diff(batch)).unwrap_or(0);
    ProfileError::Hole { shape: shape.to_vec(), batch, nearest }
}

/// The shape's smallest rotation: which host is the first makes no difference.
fn turned(shape: &[u32]) -> Vec<u32> {
    let turn = |first: usize| shape.iter().cycle().skip(first).take(shape.len()).copied().collect::<Vec<_>>();
    (0..shape.len()).map(turn).min().unwrap_or_default()
}

/// Between the two nearest batches; `None` outside of all.
fn on_line(curve: &Curve, batch: u32) -> Option<StepTime> {
    let (below, low) = curve.range(..=batch).next_back()?;
    let (above, high) = curve.range(batch..).next()?;
    if below == above {
        return Some(*low);
    }
    let part = f64::from(batch - below) / f64::from(above - below);
    let between = |low: f64, high: f64| low + part * (high - low);
    Some(StepTime { step: between(low.step, high.step), exchange: between(low.exchange, high.exchange) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(step: f64) -> StepTime {
        StepTime { step, exchange: step / 4.0 }
    }

    fn placement(shape: &[u32], batch: u32, step: f64) -> Placement {
        Placement { shape: shape.to_vec(), batch, time: time(step) }
    }

    fn profile() -> Profile {
        let placements = vec![
            placement(&[1], 8, 1.0),
            placement(&[1], 16, 2.0),
            placement(&[2, 4], 8, 3.0),
            placement(&[2, 4], 16, 5.0),
        ];
        // Linear in all three, so that every triangulation says the same.
        let scaling = [(2, 8), (2, 16), (4, 8), (4, 16)].into_iter().flat_map(|(hosts, workers)| {
            [8, 16].map(|batch| Scaling {
                hosts,
                workers,
                batch,
                time: time(f64::from(hosts) + f64::from(workers) + f64::from(batch)),
            })
        });
        Profile::new(placements, scaling.collect(), None).unwrap()
    }

    #[test]
    fn a_measured_placement_is_interpolated_by_batch() {
        let profile = profile();
        assert_eq!(profile.step_time(&[4, 2], 12).unwrap(), time(4.0));
        assert_eq!(profile.step_time(&[1], 16).unwrap(), time(2.0));
        assert_eq!((profile.single_rate(), profile.local_batch()), (8.0, (8, 16)));
        assert_eq!((profile.most_samples(&[4, 2]), profile.most_samples_of(6)), (Some(16), Some(16)));
        assert_eq!((profile.most_samples(&[4, 4, 4]), profile.most_samples(&[8; 5])), (Some(16), None));
    }

    #[test]
    fn other_placements_lie_between_corners() {
        let found = profile().step_time(&[4, 4, 4], 10).unwrap();
        assert!((found.step - 25.0).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn a_hole_names_the_nearest_batch() {
        let hole = |shape: &[u32], batch| profile().step_time(shape, batch).unwrap_err();
        let expected = ProfileError::Hole { shape: vec![1], batch: 4, nearest: 8 };
        assert_eq!(hole(&[1], 4), expected);
        assert!(hole(&[4, 4, 4], 17).to_string().contains("the nearest that is known has 16 samples"));
        assert!(matches!(hole(&[8; 5], 8), ProfileError::Hole { .. }));
    }

    #[test]
    fn rows_that_are_none_are_refused() {
        let alone = placement(&[1], 8, 1.0);
        let refused = |placements: Vec<Placement>| Profile::new(placements, Vec::new(), None).unwrap_err();
        assert_eq!(refused(Vec::new()), ProfileError::Empty);
        assert_eq!(refused(vec![placement(&[2], 8, 1.0)]), ProfileError::NoSingle);
        for step in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            assert!(matches!(
                refused(vec![alone.clone(), placement(&[2], 8, step)]),
                ProfileError::Row { .. }
            ));
        }
        assert!(matches!(refused(vec![alone.clone(), placement(&[0, 2], 8, 1.0)]), ProfileError::Row { .. }));
        assert!(matches!(refused(vec![alone, placement(&[], 8, 1.0)]), ProfileError::Row { .. }));
    }
}
