//! The seven parameters of a step, fitted to what was measured of one job on one kind of accelerator.

use crate::goodput::{LEAST, StepModel};

/// What was measured in one configuration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Hosts with workers.
    pub hosts: u32,
    /// Workers on all of them.
    pub workers: u32,
    /// Samples of one pass of a worker.
    pub batch: u32,
    /// Seconds of a step with its exchange.
    pub step: f64,
    /// Seconds of computation in it.
    pub compute: f64,
}

/// Seconds and factors, as their logarithms, and the overlap as it is.
type Point = [f64; 7];

/// Where the search begins: 0.1 s and 0.01 s, and nearly no overlap.
const START: Point = [
    -std::f64::consts::LN_10,
    -2.0 * std::f64::consts::LN_10,
    -std::f64::consts::LN_10,
    -2.0 * std::f64::consts::LN_10,
    -std::f64::consts::LN_10,
    -2.0 * std::f64::consts::LN_10,
    1.001,
];
/// The parameters' places.
const BASE: usize = 0;
const SAMPLE: usize = 1;
const HOSTS: usize = 2;
const HOSTS_MORE: usize = 3;
const LOCAL: usize = 4;
const LOCAL_MORE: usize = 5;
const OVERLAP: usize = 6;
/// How much overlap counts as an error, and retrogression: Pollux's weights.
const OVERLAP_WEIGHT: f64 = 1e-3;
const MORE_WEIGHT: f64 = 1e-2;
/// The most steps of the search.
const STEPS: usize = 60;
/// The gain of a step below which the search ends.
const GAIN: f64 = 1e-7;

/// Fits the parameters by least errors of logarithms, as Pollux does. It takes the root mean square of computation's and of
/// steps', with a preference for little overlap and little retrogression. What no measurement shows stays at its lower bound,
/// so that the model is optimistic about what was not tried. `None` of no measurements, or where a time is no number above 0.
pub fn fit(measured: &[Measured]) -> Option<StepModel> {
    let times = measured.iter().flat_map(|each| [each.step, each.compute]);
    if measured.is_empty() || !times.into_iter().all(|time| time.is_finite() && time > 0.0) {
        return None;
    }
    let search = Search::new(measured);
    let model = search.run();
    if measured.iter().any(|each| each.hosts > 1) {
        return Some(model);
    }
    // Between hosts it is never faster than within one.
    Some(StepModel {
        hosts_base: model.hosts_base.max(1.1 * model.local_base),
        hosts_worker: model.hosts_worker.max(1.1 * model.local_worker),
        ..model
    })
}

/// Which parameters are searched, and from where.
struct Search<'a> {
    measured: &'a [Measured],
    start: Point,
    is_free: [bool; 7],
}

impl<'a> Search<'a> {
    fn new(measured: &'a [Measured]) -> Self {
        let (mut start, mut is_free) = (START, [true; 7]);
        let mut fix = |place: &[usize], value: f64| {
            for place in place {
                if let (Some(start), Some(free)) = (start.get_mut(*place), is_free.get_mut(*place)) {
                    (*start, *free) = (value, false);
                }
            }
        };
        let first = measured.first().map(|each| each.batch);
        if measured.iter().all(|each| Some(each.batch) == first) {
            // One batch shows no slope: half of its time is the base.
            let mean = measured.iter().map(|each| each.compute).sum::<f64>() / measured.len() as f64;
            fix(&[BASE], (mean / 2.0).ln());
        }
        if measured.iter().all(|each| each.hosts <= 1) {
            fix(&[HOSTS, HOSTS_MORE], LEAST.ln());
        }
        if !measured.iter().any(|each| each.hosts == 1 && each.workers > 1) {
            fix(&[LOCAL, LOCAL_MORE], LEAST.ln());
        }
        if measured.iter().all(|each| each.workers <= 2) {
            fix(&[HOSTS_MORE, LOCAL_MORE], LEAST.ln());
        }
        Self { measured, start, is_free }
    }

    /// Levenberg and Marquardt's search. A root of a mean of squares is replaced by a quadratic that touches it where the
    /// search stands.
    fn run(&self) -> StepModel {
        let mut point = self.start;
        let mut error = self.error(&point);
        let mut damping = 1e-2;
        for _ in 0..STEPS {
            let Some(next) = self.step(&point, damping) else { break };
            let found = self.error(&next);
            if found < error {
                let gained = error - found;
                (point, error, damping) = (next, found, (damping * 0.3).max(1e-9));
                if gained < GAIN {
                    break;
                }
            } else if damping > 1e6 {
                break;
            } else {
                damping *= 4.0;
            }
        }
        model(&point)
    }

    /// Errors of computation and of steps, root mean square each.
    fn roots(&self, model: &StepModel) -> (f64, f64) {
        let count = self.measured.len() as f64;
        let squares = self.measured.iter().map(|each| {
            let (compute, step) = differences(model, each);
            (compute * compute, step * step)
        });
        let (compute, step) = squares.fold((0.0, 0.0), |sum, each| (sum.0 + each.0, sum.1 + each.1));
        ((compute / count).sqrt(), (step / count).sqrt())
    }

    fn error(&self, point: &Point) -> f64 {
        let model = model(point);
        let (compute, step) = self.roots(&model);
        let more =
            (model.hosts_worker / model.hosts_base).powi(2) + (model.local_worker / model.local_base).powi(2);
        compute + step + OVERLAP_WEIGHT * (model.overlap - 1.0).powi(2) + MORE_WEIGHT * more
    }

    /// The next point for a damping; `None` where there is none.
    fn step(&self, point: &Point, damping: f64) -> Option<Point> {
        let model = model(point);
        let (compute_root, step_root) = self.roots(&model);
        let count = self.measured.len() as f64;
        let weights = (1.0 / (count * compute_root.max(1e-4)), 1.0 / (count * step_root.max(1e-4)));
        let mut normal = Normal::default();
        for each in self.measured {
            let (compute, step) = differences(&model, each);
            let (compute_slopes, step_slopes) = slopes(&model, each);
            normal.add(weights.0, compute, &compute_slopes);
            normal.add(weights.1, step, &step_slopes);
        }
        let mut overlap = [0.0; 7];
        overlap[OVERLAP] = 1.0;
        normal.add(2.0 * OVERLAP_WEIGHT, model.overlap - 1.0, &overlap);
        let (hosts, local) = (model.hosts_worker / model.hosts_base, model.local_worker / model.local_base);
        let mut more = [0.0; 7];
        (more[HOSTS], more[HOSTS_MORE]) = (-hosts, hosts);
        normal.add(2.0 * MORE_WEIGHT, hosts, &more);
        let mut more = [0.0; 7];
        (more[LOCAL], more[LOCAL_MORE]) = (-local, local);
        normal.add(2.0 * MORE_WEIGHT, local, &more);
        let change = normal.solve(&self.is_free, damping)?;
        let mut next = *point;
        for (value, change) in next.iter_mut().zip(change) {
            *value = (*value - change).clamp(LEAST.ln(), 10.0);
        }
        next[OVERLAP] = next[OVERLAP].clamp(1.0, 10.0);
        Some(next)
    }
}

fn model(point: &Point) -> StepModel {
    StepModel {
        compute_base: point[BASE].exp(),
        compute_sample: point[SAMPLE].exp(),
        hosts_base: point[HOSTS].exp(),
        hosts_worker: point[HOSTS_MORE].exp(),
        local_base: point[LOCAL].exp(),
        local_worker: point[LOCAL_MORE].exp(),
        overlap: point[OVERLAP],
    }
}

/// By how much predictions are larger, as differences of logarithms: computation, and the whole step.
fn differences(model: &StepModel, each: &Measured) -> (f64, f64) {
    let batch = f64::from(each.batch);
    let step = model.step(each.hosts, each.workers, batch);
    ((model.compute(batch) / each.compute).ln(), (step / each.step).ln())
}

/// How those differences change with each parameter.
fn slopes(model: &StepModel, each: &Measured) -> (Point, Point) {
    let batch = f64::from(each.batch);
    let (compute, network) = (model.compute(batch), model.network(each.hosts, each.workers));
    let mut of_compute = [0.0; 7];
    of_compute[BASE] = model.compute_base / compute;
    of_compute[SAMPLE] = model.compute_sample * batch / compute;
    let exponent = model.overlap;
    let share = 1.0 / (1.0 + (network / compute).powf(exponent));
    let mut of_step = of_compute.map(|slope| slope * share);
    let further = (f64::from(each.workers) - 2.0).max(LEAST);
    if each.hosts > 1 {
        of_step[HOSTS] = (1.0 - share) * model.hosts_base / network;
        of_step[HOSTS_MORE] = (1.0 - share) * model.hosts_worker * further / network;
    } else if each.workers > 1 {
        of_step[LOCAL] = (1.0 - share) * model.local_base / network;
        of_step[LOCAL_MORE] = (1.0 - share) * model.local_worker * further / network;
    }
    let step = model.step(each.hosts, each.workers, batch);
    of_step[OVERLAP] = (share * compute.ln() + (1.0 - share) * network.ln() - step.ln()) / exponent;
    (of_compute, of_step)
}

/// Equations of least squares: the last column is the right side.
#[derive(Default)]
struct Normal {
    rows: [[f64; 8]; 7],
}

impl Normal {
    fn add(&mut self, weight: f64, difference: f64, slopes: &Point) {
        for (row, slope) in self.rows.iter_mut().zip(slopes) {
            let columns = slopes.iter().chain(std::iter::once(&difference));
            for (value, column) in row.iter_mut().zip(columns) {
                *value += weight * slope * column;
            }
        }
    }

    /// Solves by Gauss and Jordan; what is not free does not change. The damped matrix is positive definite, so no pivot is
    /// exchanged.
    fn solve(mut self, is_free: &[bool; 7], damping: f64) -> Option<Point> {
        for (place, (row, free)) in self.rows.iter_mut().zip(is_free).enumerate() {
            if let Some(diagonal) = row.get_mut(place) {
                *diagonal = if *free { *diagonal * (1.0 + damping) + 1e-12 } else { 1e30 };
            }
        }
        for place in 0..self.rows.len() {
            let pivot = *self.rows.get(place)?;
            let diagonal = *pivot.get(place)?;
            if !(diagonal.is_finite() && diagonal > 0.0) {
                return None;
            }
            for (other, row) in self.rows.iter_mut().enumerate() {
                let factor = if other == place { 0.0 } else { *row.get(place)? / diagonal };
                for (value, pivot) in row.iter_mut().zip(pivot) {
                    *value -= factor * pivot;
                }
            }
        }
        let mut change = [0.0; 7];
        for (place, (value, row)) in change.iter_mut().zip(self.rows).enumerate() {
            *value = row[7] / row.get(place)?;
        }
        change.iter().all(|value| value.is_finite()).then_some(change)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRUE: StepModel = StepModel {
        compute_base: 0.05,
        compute_sample: 0.002,
        hosts_base: 0.3,
        hosts_worker: 0.02,
        local_base: 0.04,
        local_worker: 0.003,
        overlap: 2.0,
    };

    fn measure(hosts: u32, workers: u32, batch: u32) -> Measured {
        let (compute, step) = (TRUE.compute(f64::from(batch)), TRUE.step(hosts, workers, f64::from(batch)));
        Measured { hosts, workers, batch, step, compute }
    }

    #[test]
    fn predictions_fit_what_was_measured() {
        let mut measured = Vec::new();
        for (hosts, workers) in [(1, 1), (1, 2), (1, 4), (2, 8), (4, 16)] {
            measured.extend([8, 32, 128].map(|batch| measure(hosts, workers, batch)));
        }
        let model = fit(&measured).unwrap();
        for each in measured.iter().chain(&[measure(3, 12, 64), measure(1, 3, 100)]) {
            let off = model.step(each.hosts, each.workers, f64::from(each.batch)) / each.step - 1.0;
            assert!(off.abs() < 0.03, "{each:?}: {off} {model:?}");
        }
    }

    #[test]
    fn one_measurement_is_met_and_the_rest_hoped_for() {
        let model = fit(&[measure(1, 1, 32)]).unwrap();
        assert!((model.step(1, 1, 32.0) / measure(1, 1, 32).step - 1.0).abs() < 1e-3, "{model:?}");
        assert!((model.compute_base / measure(1, 1, 32).compute - 0.5).abs() < 1e-6);
        // Nothing is known of communication, so that it costs nothing.
        assert!(model.network(2, 16) < 1e-6);
    }

    #[test]
    fn hosts_are_never_faster_than_one_host() {
        let model = fit(&[measure(1, 1, 32), measure(1, 4, 32), measure(1, 4, 64)]).unwrap();
        assert!(model.hosts_base >= 1.1 * model.local_base && model.local_base > 1e-3, "{model:?}");
    }

    #[test]
    fn times_that_are_none_are_refused() {
        assert_eq!(fit(&[]), None);
        for time in [f64::NAN, 0.0, -1.0, f64::INFINITY] {
            assert_eq!(fit(&[Measured { step: time, ..measure(1, 1, 8) }]), None);
            assert_eq!(fit(&[Measured { compute: time, ..measure(1, 1, 8) }]), None);
        }
    }
}
