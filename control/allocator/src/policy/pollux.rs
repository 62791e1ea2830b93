//! Pollux (Qiao et al., OSDI 2021): each round a genetic search over matrices of jobs by kinds. Their fitness is the power mean of
//! speedups, with restarts penalised. A row has workers of one kind alone, and hosts of a kind are filled as with Sia.

use super::elastic::{Size, assign, pinned, sizes};
use super::{Candidate, Policy, PolicyError, Round};
use crate::allocation::Allocation;
use crate::inventory::KindId;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;

/// How Pollux searches. A decision scores `population` times `generations` matrices beside those that it begins with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PolluxSettings {
    /// The exponent of the mean of speedups: 1 is the plain mean, and the further below the fairer.
    pub fairness: f64,
    /// The speedup that a job without anything counts as; its slowest size has 1.
    pub idle_worth: f64,
    /// Matrices that are kept from one generation to the next.
    pub population: usize,
    /// Generations of a decision.
    pub generations: usize,
    /// Where its random numbers begin: the same seed decides the same.
    pub seed: u64,
}

impl Default for PolluxSettings {
    fn default() -> Self {
        Self { fairness: -1.0, idle_worth: 0.1, population: 48, generations: 48, seed: 1 }
    }
}

/// Pollux's policy.
#[derive(Debug, Clone)]
pub struct Pollux {
    settings: PolluxSettings,
    random: ChaCha8Rng,
    /// The last round's matrices by jobs' numbers, from which the next search begins.
    population: Vec<BTreeMap<usize, (KindId, u32)>>,
}

impl Default for Pollux {
    fn default() -> Self {
        Self::new(PolluxSettings::default())
    }
}

impl Pollux {
    /// With settings of its own.
    pub fn new(settings: PolluxSettings) -> Self {
        let random = ChaCha8Rng::seed_from_u64(settings.seed);
        Self { settings, random, population: Vec::new() }
    }
}

/// A matrix of jobs by kinds: for each job the place of its size among those that it may have.
type Matrix = Vec<Option<usize>>;

/// A matrix with its cost, the sum of speedups to the power. Where the power is below 0, a smaller cost is better.
type Scored = (f64, Matrix);

/// What a round's search is about.
struct Search {
    /// Each job's sizes with costs; none for jobs that keep what they have.
    sizes: Vec<Vec<(Size, f64)>>,
    idle_cost: f64,
    /// Accelerators by kind that no job keeps.
    capacity: Vec<u32>,
}

impl Policy for Pollux {
    fn name(&self) -> &'static str {
        "Pollux"
    }

    fn allocate(&mut self, round: &Round<'_>) -> Result<Vec<Option<Allocation>>, PolicyError> {
        let search = Search::new(round, self.settings)?;
        let mut population =
            vec![search.matrix(round, |candidate| {
                candidate.current.map(|current| (current.kind, current.workers()))
            })];
        for earlier in &self.population {
            population.push(search.matrix(round, |candidate| earlier.get(&candidate.number).copied()));
        }
        let population = search.run(population, self.settings, &mut self.random);
        let choices = |(_, matrix): &Scored| {
            let numbered = round.jobs.iter().zip(search.choices(matrix));
            numbered.filter_map(|(candidate, choice)| Some((candidate.number, choice?))).collect()
        };
        self.population = population.iter().map(choices).collect();
        let best = population.first().map(|(_, matrix)| search.choices(matrix)).unwrap_or_default();
        let kept = round.jobs.iter().map(|candidate| pinned(candidate).map(|it| (it.kind, it.workers())));
        let chosen: Vec<Option<(KindId, u32)>> = kept.zip(best).map(|(kept, best)| kept.or(best)).collect();
        Ok(assign(round, &chosen))
    }
}

impl Search {
    fn new(round: &Round<'_>, settings: PolluxSettings) -> Result<Self, PolicyError> {
        let mut capacity: Vec<u32> = round.inventory.kinds().map(|(_, kind)| kind.capacity()).collect();
        // Larger is better where the power is above 0.
        let sign = if settings.fairness < 0.0 { 1.0 } else { -1.0 };
        let cost = |worth: f64| sign * worth.powf(settings.fairness);
        let idle_cost = cost(settings.idle_worth);
        if !idle_cost.is_finite() {
            let PolluxSettings { idle_worth, fairness, .. } = settings;
            return Err(PolicyError::IdleWorth { idle_worth, fairness });
        }
        let mut of_jobs = Vec::with_capacity(round.jobs.len());
        for candidate in round.jobs {
            let mut of_job = Vec::new();
            if let Some(kept) = pinned(candidate) {
                if let Some(capacity) = capacity.get_mut(kept.kind.0) {
                    *capacity = capacity.saturating_sub(kept.workers());
                }
            } else {
                of_job.extend(sizes(round, candidate).into_iter().map(|size| (size, cost(size.worth))));
            }
            if of_job.iter().any(|(_, cost)| !cost.is_finite()) {
                return Err(PolicyError::Value { policy: "Pollux", job: candidate.job.name.clone() });
            }
            of_jobs.push(of_job);
        }
        Ok(Self { sizes: of_jobs, idle_cost, capacity })
    }

    /// A matrix in which each job has such a choice, where it may have it.
    fn matrix(&self, round: &Round<'_>, choice: impl Fn(&Candidate<'_>) -> Option<(KindId, u32)>) -> Matrix {
        let row = |(candidate, sizes): (&Candidate<'_>, &Vec<(Size, f64)>)| {
            let (kind, workers) = choice(candidate)?;
            sizes.iter().position(|(size, _)| size.kind == kind && size.workers == workers)
        };
        round.jobs.iter().zip(&self.sizes).map(row).collect()
    }

    fn size(&self, job: usize, place: Option<usize>) -> Option<&(Size, f64)> {
        self.sizes.get(job)?.get(place?)
    }

    fn choices(&self, matrix: &Matrix) -> Vec<Option<(KindId, u32)>> {
        let choice = |(job, place): (usize, &Option<usize>)| {
            self.size(job, *place).map(|(size, _)| (size.kind, size.workers))
        };
        matrix.iter().enumerate().map(choice).collect()
    }

    fn scored(&self, mut matrix: Matrix, random: &mut ChaCha8Rng) -> Scored {
        self.repair(&mut matrix, random);
        let cost = |(job, place): (usize, &Option<usize>)| {
            self.size(job, *place).map_or(self.idle_cost, |(_, cost)| *cost)
        };
        (matrix.iter().enumerate().map(cost).sum(), matrix)
    }

    /// The population after all generations, the best first.
    fn run(&self, first: Vec<Matrix>, settings: PolluxSettings, random: &mut ChaCha8Rng) -> Vec<Scored> {
        let mut population: Vec<Scored> =
            first.into_iter().map(|matrix| self.scored(matrix, random)).collect();
        for _ in 0..settings.generations {
            for _ in 0..settings.population {
                let one = self.tournament(&population, random);
                let other = self.tournament(&population, random);
                let mut child: Matrix = one.to_vec();
                for (row, other) in child.iter_mut().zip(other) {
                    if random.random() {
                        *row = *other;
                    }
                }
                self.mutate(&mut child, random);
                population.push(self.scored(child, random));
            }
            population.sort_by(|one, other| one.0.total_cmp(&other.0).then_with(|| one.1.cmp(&other.1)));
            population.dedup();
            population.truncate(settings.population.max(1));
        }
        population
    }

    /// The better of two matrices.
    fn tournament<'a>(&self, population: &'a [Scored], random: &mut ChaCha8Rng) -> &'a [Option<usize>] {
        let mut draw = || population.get(random.random_range(0..population.len().max(1)));
        let (one, other) = (draw(), draw());
        let better = one.into_iter().chain(other).min_by(|one, other| one.0.total_cmp(&other.0));
        better.map(|(_, matrix)| matrix.as_slice()).unwrap_or_default()
    }

    /// Gives one row in the mean any size, or nothing.
    fn mutate(&self, matrix: &mut Matrix, random: &mut ChaCha8Rng) {
        let rows = matrix.len().max(1);
        for (row, sizes) in matrix.iter_mut().zip(&self.sizes) {
            if random.random_range(0..rows) == 0 {
                *row = Some(random.random_range(0..=sizes.len())).filter(|place| *place < sizes.len());
            }
        }
    }

    /// Has jobs drawn at random shrink until all fits.
    fn repair(&self, matrix: &mut Matrix, random: &mut ChaCha8Rng) {
        for (kind, capacity) in self.capacity.iter().enumerate() {
            let workers = |job: usize, place: Option<usize>| {
                self.size(job, place)
                    .filter(|(size, _)| size.kind.0 == kind)
                    .map_or(0, |(size, _)| size.workers)
            };
            let rows = || matrix.iter().enumerate();
            let mut used: u32 = rows().map(|(job, place)| workers(job, *place)).sum();
            let mut on_kind: Vec<usize> =
                rows().filter(|(job, place)| workers(*job, **place) > 0).map(|(job, _)| job).collect();
            while used > *capacity && !on_kind.is_empty() {
                let drawn = random.random_range(0..on_kind.len());
                let Some((job, row)) = on_kind.get(drawn).and_then(|job| Some((*job, matrix.get_mut(*job)?)))
                else {
                    break;
                };
                // Sizes stand kind by kind, the fewest workers first.
                let before = workers(job, *row);
                *row =
                    row.and_then(|place| place.checked_sub(1)).filter(|place| workers(job, Some(*place)) > 0);
                used -= before - workers(job, *row).min(before);
                if row.is_none() {
                    on_kind.swap_remove(drawn);
                }
            }
        }
    }
}
