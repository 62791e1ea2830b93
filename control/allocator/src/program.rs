//! One configuration for each job at least cost, within what there is of each kind: an integer program.

use crate::inventory::KindId;
use crate::policy::PolicyError;
use good_lp::{
    Expression, ProblemVariables, Solution, SolverModel, WithMipGap, constraint, microlp, variable,
};

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

impl Program {
    /// A solution of least cost: what each job gets.
    ///
    /// # Errors
    ///
    /// The solver's, where what jobs must get does not fit.
    pub fn solve(&self) -> Result<Vec<Option<Configuration>>, PolicyError> {
        let mut variables = ProblemVariables::new();
        let mut goal = Expression::default();
        let mut used: Vec<Expression> = self.capacity.iter().map(|_| Expression::default()).collect();
        let mut chosen = Vec::with_capacity(self.jobs.len());
        let mut musts: Vec<u32> = vec![0; self.capacity.len()];
        for job in &self.jobs {
            let mut of_job = Vec::with_capacity(job.len());
            for configuration in self.useful(job) {
                if configuration.cost == f64::MIN {
                    if let Some(must) = musts.get_mut(configuration.kind.0) {
                        *must += configuration.workers;
                    }
                    of_job = vec![(configuration, None)];
                    break;
                }
                let choice = variables.add(variable().binary());
                goal.add_mul(configuration.cost - self.idle_cost, choice);
                if let Some(used) = used.get_mut(configuration.kind.0) {
                    used.add_mul(configuration.workers, choice);
                }
                of_job.push((configuration, Some(choice)));
            }
            chosen.push(of_job);
        }
        let solver = |reason: String| PolicyError::Solver { policy: "Sia", reason };
        let mut program = variables.minimise(goal).using(microlp);
        program = program.with_mip_gap(GAP).map_err(|error| solver(error.to_string()))?;
        for ((used, capacity), must) in used.into_iter().zip(&self.capacity).zip(&musts) {
            let Some(capacity) = capacity.checked_sub(*must) else {
                return Err(solver("jobs that must get what they have do not fit".to_owned()));
            };
            program = program.with(constraint!(used <= capacity));
        }
        for of_job in &chosen {
            let sum: Expression = of_job.iter().filter_map(|(_, choice)| *choice).sum();
            program = program.with(constraint!(sum <= 1));
        }
        let solved = program.solve().map_err(|error| solver(error.to_string()))?;
        let is_chosen = |choice: Option<_>| choice.is_none_or(|choice| solved.value(choice) > 0.5);
        let of_job = |of_job: Vec<(Configuration, Option<_>)>| {
            of_job.into_iter().find(|(_, choice)| is_chosen(*choice)).map(|(configuration, _)| configuration)
        };
        Ok(chosen.into_iter().map(of_job).collect())
    }

    /// Configurations that can be a part of a best solution: better than nothing, and than all that need no more of the kind.
    fn useful(&self, job: &[Configuration]) -> Vec<Configuration> {
        let is_useful = |it: &&Configuration| {
            let beats = |other: &Configuration| {
                other.kind == it.kind && other.workers < it.workers && other.cost <= it.cost
            };
            it.cost < self.idle_cost && !job.iter().any(beats)
        };
        job.iter().filter(is_useful).copied().collect()
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
