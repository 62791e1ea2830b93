//! One configuration for each job at least cost, within what there is of each kind: an integer program.

use crate::inventory::KindId;
use crate::policy::PolicyError;
use good_lp::{
    Expression, ProblemVariables, Solution, SolutionStatus, SolverModel, Variable, WithMipGap, WithTimeLimit,
    constraint, microlp, variable,
};
use std::time::Duration;

/// What a job may get.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Configuration {
    /// Accelerators of which kind.
    pub kind: KindId,
    /// How many.
    pub workers: u32,
    /// The less the better. `f64::MIN` if the job must get it.
    pub cost: f64,
}

/// Jobs' configurations, and what there is.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// Accelerators of each kind.
    pub capacity: Vec<u32>,
    /// What a job costs that gets nothing.
    pub idle_cost: f64,
    /// What each job may get.
    pub jobs: Vec<Vec<Configuration>>,
}

/// How far a solution may be from the best one, as a part of it: Sia's.
const GAP: f32 = 1e-4;

/// The longest limit: the solver adds it to a point in time, which has an end.
const LONGEST: Duration = Duration::from_secs(86_400);

/// What each job gets.
type Choices = Vec<Option<Configuration>>;

impl Program {
    /// A solution of least cost: what each job gets. Where a limit passes before it is found, or the solver fails, the better of the
    /// solver's last solution and a greedy one.
    ///
    /// # Errors
    ///
    /// What jobs must get does not fit, or the cost of nothing is no number.
    pub fn solve(&self, limit: Duration) -> Result<Choices, PolicyError> {
        if !self.idle_cost.is_finite() {
            return Err(PolicyError::IdleCost(self.idle_cost));
        }
        let free = self.free().ok_or(PolicyError::DoNotFit)?;
        match self.exact(&free, limit) {
            Some((exact, true)) => Ok(exact),
            cut => {
                let greedy = self.greedy(free);
                let last = cut.map(|(last, _)| last).filter(|last| self.cost(last) <= self.cost(&greedy));
                Ok(last.unwrap_or(greedy))
            }
        }
    }

    /// Accelerators of each kind beside those that jobs must get; `None` where those do not fit.
    fn free(&self) -> Option<Vec<u32>> {
        let mut free = self.capacity.clone();
        for must in self.jobs.iter().filter_map(|job| must(job)) {
            let free = free.get_mut(must.kind.0)?;
            *free = free.checked_sub(must.workers)?;
        }
        Some(free)
    }

    /// The solver's solution, and whether it is as good as it should be; `None` where it found none.
    fn exact(&self, free: &[u32], limit: Duration) -> Option<(Choices, bool)> {
        let mut variables = ProblemVariables::new();
        let mut goal = Expression::default();
        let mut used: Vec<Expression> = free.iter().map(|_| Expression::default()).collect();
        let mut choices = Vec::with_capacity(self.jobs.len());
        for job in &self.jobs {
            let mut of_job = Vec::with_capacity(job.len());
            for configuration in self.useful(job) {
                let choice = variables.add(variable().binary());
                goal.add_mul(configuration.cost - self.idle_cost, choice);
                if let Some(used) = used.get_mut(configuration.kind.0) {
                    used.add_mul(configuration.workers, choice);
                }
                of_job.push((configuration, choice));
            }
            choices.push(of_job);
        }
        let mut program = variables.minimise(goal).using(microlp).with_mip_gap(GAP).ok()?;
        program = program.with_time_limit(limit.min(LONGEST).as_secs_f64());
        for (used, free) in used.into_iter().zip(free.iter().copied()) {
            program = program.with(constraint!(used <= free));
        }
        for of_job in &choices {
            let sum: Expression = of_job.iter().map(|(_, choice)| *choice).sum();
            program = program.with(constraint!(sum <= 1));
        }
        let solved = program.solve().ok()?;
        let is_exact = !matches!(solved.status(), SolutionStatus::TimeLimit);
        let of_job = |(job, of_job): (&Vec<Configuration>, Vec<(Configuration, Variable)>)| {
            let choice = of_job.into_iter().find(|(_, choice)| solved.value(*choice) > 0.5);
            must(job).or(choice.map(|(configuration, _)| configuration))
        };
        Some((self.jobs.iter().zip(choices).map(of_job).collect(), is_exact))
    }

    /// A solution by one pass over all configurations, those first that save most for each worker. A job may change to a cheaper one.
    fn greedy(&self, mut free: Vec<u32>) -> Choices {
        let mut chosen: Choices = self.jobs.iter().map(|job| must(job)).collect();
        let jobs = self.jobs.iter().enumerate();
        let mut options: Vec<(usize, Configuration)> =
            jobs.flat_map(|(place, job)| self.useful(job).into_iter().map(move |it| (place, it))).collect();
        let saved = |it: &Configuration| (self.idle_cost - it.cost) / f64::from(it.workers);
        options.sort_by(|(_, one), (_, other)| saved(other).total_cmp(&saved(one)));
        for (job, option) in options {
            let Some(chosen) = chosen.get_mut(job) else { continue };
            let given_back =
                chosen.filter(|before| before.kind == option.kind).map_or(0, |before| before.workers);
            let is_cheaper = option.cost < chosen.map_or(self.idle_cost, |before| before.cost);
            let Some(room) = free.get(option.kind.0).map(|free| free + given_back) else { continue };
            if is_cheaper && option.workers <= room {
                if let Some(before) = chosen.replace(option)
                    && let Some(free) = free.get_mut(before.kind.0)
                {
                    *free += before.workers;
                }
                if let Some(free) = free.get_mut(option.kind.0) {
                    *free -= option.workers;
                }
            }
        }
        chosen
    }

    /// Returns the configurations that can be a part of a best solution. Each is better than nothing, and than all that need
    /// fewer workers of the kind. None for a job that must get one.
    fn useful(&self, job: &[Configuration]) -> Vec<Configuration> {
        let is_useful = |it: &&Configuration| {
            let beats = |other: &Configuration| {
                other.kind == it.kind && other.workers < it.workers && other.cost <= it.cost
            };
            it.cost < self.idle_cost && !job.iter().any(beats)
        };
        if must(job).is_some() { Vec::new() } else { job.iter().filter(is_useful).copied().collect() }
    }

    /// What a choice costs.
    pub fn cost(&self, chosen: &[Option<Configuration>]) -> f64 {
        let free = chosen.iter().map(|choice| match choice {
            Some(configuration) if configuration.cost == f64::MIN => 0.0,
            Some(configuration) => configuration.cost,
            None => self.idle_cost,
        });
        free.sum()
    }
}

/// What a job must get.
fn must(job: &[Configuration]) -> Option<Configuration> {
    job.iter().find(|it| it.cost == f64::MIN).copied()
}
