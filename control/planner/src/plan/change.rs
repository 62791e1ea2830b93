//! What of a better plan is worth a change. Each communicator that would change must gain more than a change costs, for itself or
//! for others. All others stay as they are.

use super::model::Ring;
use super::search::Search;
use crate::conditions::LinkUse;

/// Changes in 30 s that cost no more than the first.
const FREE_CHANGES: u32 = 2;

/// What became of a job's change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ChangeOutcome {
    /// There was nothing to change.
    Unchanged,
    /// It forms.
    Forming,
    /// It changes, because what it has cannot stay.
    Forced,
    /// It changes, for this gain: what the jobs together lose without, relative to its own predicted time.
    Gained(f64),
    /// It stays: this gain was too little.
    Retained(f64),
}

/// Puts back what runs now wherever the gain is too small. `before` is what runs, by job, where something does.
pub(super) fn keep_unless_gained(
    search: &mut Search<'_, '_>,
    before: &[Option<Ring>],
    budget: u64,
) -> Vec<ChangeOutcome> {
    let jobs = search.model.jobs();
    let mut outcomes = vec![ChangeOutcome::Unchanged; jobs.len()];
    let mut open: Vec<(f64, usize)> = Vec::new();
    for (index, old) in before.iter().enumerate() {
        let Some(new) = search.rings.get(index).cloned() else { continue };
        let outcome = match old {
            None => ChangeOutcome::Forming,
            Some(old) if old.same(&new) => ChangeOutcome::Unchanged,
            Some(old) if new.worst() == LinkUse::Failed => {
                search.replace(index, old.clone());
                ChangeOutcome::Unchanged
            }
            Some(old) if old.worst() > new.worst() => ChangeOutcome::Forced,
            Some(old) => {
                let gain = own_gain(search, index, old);
                open.push((gain, index));
                ChangeOutcome::Gained(gain)
            }
        };
        if let Some(cell) = outcomes.get_mut(index) {
            *cell = outcome;
        }
    }
    open.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let exact = search.size().saturating_mul(16).saturating_mul(open.len() as u64) <= budget;
    for (_, index) in open {
        let Some(old) = before.get(index).cloned().flatten() else { continue };
        let gain = if exact { joint_gain(search, index, &old) } else { own_gain(search, index, &old) };
        let keep = gain >= min_gain(search, index);
        if !keep {
            search.replace(index, old);
        }
        if let Some(cell) = outcomes.get_mut(index) {
            *cell = if keep { ChangeOutcome::Gained(gain) } else { ChangeOutcome::Retained(gain) };
        }
    }
    outcomes
}

fn min_gain(search: &Search<'_, '_>, index: usize) -> f64 {
    let recent = search
        .model
        .job(index)
        .and_then(|job| job.current.as_ref())
        .map_or(0, |current| current.recent_changes);
    let doublings = recent.saturating_sub(FREE_CHANGES).min(20);
    f64::from(search.model.request.policy.min_gain_ppm) / 1e6 * f64::from(1_u32 << doublings)
}

/// How much longer a job takes by its old ring than by its new one. It is judged by the job's fullest link alone.
fn own_gain(search: &mut Search<'_, '_>, index: usize, old: &Ring) -> f64 {
    let after = search.pressure(index).max(1.0);
    let new = search.replace(index, old.clone());
    let before = search.pressure(index).max(1.0);
    search.replace(index, new);
    before / after - 1.0
}

/// How much longer all jobs take, by weight, if this one goes back to its old ring. It is relative to its own time by the
/// new one.
fn joint_gain(search: &mut Search<'_, '_>, index: usize, old: &Ring) -> f64 {
    let sum = |search: &mut Search<'_, '_>| {
        let (each, score) = search.predict(&|_| true);
        let jobs = search.model.jobs();
        // A job that is stuck counts as a thousand times slower, so that sums compare.
        let slow = each.iter().map(|(_, slowdown)| slowdown.min(1000.0));
        let total: f64 = slow.zip(jobs).map(|(slowdown, job)| slowdown * f64::from(job.weight.max(1))).sum();
        let weights: f64 = jobs.iter().map(|job| f64::from(job.weight.max(1))).sum();
        (total + score.unmet_of(weights), each.get(index).map_or(1.0, |(_, slowdown)| slowdown.min(1000.0)))
    };
    let (after, own) = sum(search);
    let new = search.replace(index, old.clone());
    let (before, _) = sum(search);
    search.replace(index, new);
    let weight = search.model.job(index).map_or(1.0, |job| f64::from(job.weight.max(1)));
    (before - after) / (own * weight)
}
