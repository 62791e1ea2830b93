//! A plan's reasons in words, for operators.

use super::change::ChangeOutcome;
use super::model::{EdgeRoutes, Model, Ring};
use super::{Assignment, Score};
use crate::conditions::LinkUse;
use harmonaize_units::Rate;

/// Why a job changes, or stays.
pub(super) fn reason(
    model: &Model<'_>,
    outcome: ChangeOutcome,
    old: Option<(&Ring, f64)>,
    new: (&Ring, f64),
    load: &dyn Fn(u32) -> f64,
) -> String {
    match outcome {
        ChangeOutcome::Unchanged => String::new(),
        ChangeOutcome::Forming => "it forms".to_owned(),
        ChangeOutcome::Retained(gain) => {
            format!("stays: another plan would gain {}, too little for a change", percent(gain))
        }
        ChangeOutcome::Forced | ChangeOutcome::Gained(_) => {
            let Some((ring, before)) = old else { return String::new() };
            let cause = bottleneck(model, ring, load);
            let what = describe_changes(ring, new.0);
            format!("{cause}: {what}, predicted slowdown {} instead of {}", times(new.1), times(before))
        }
    }
}

/// What holds a ring up.
fn bottleneck(model: &Model<'_>, ring: &Ring, load: &dyn Fn(u32) -> f64) -> String {
    let name = |link: u32| {
        model
            .links
            .get(link as usize)
            .map_or_else(String::new, |link| model.request.topology.link_name(*link))
    };
    let usage = ring.usage();
    for (usable, words) in [(LinkUse::Failed, "passes nothing"), (LinkUse::Avoid, "is to be avoided")] {
        let at = usage.iter().find(|(link, _)| {
            model
                .links
                .get(*link as usize)
                .is_some_and(|link| model.request.conditions.usable(*link) == usable)
        });
        if let Some((link, _)) = at {
            return format!("{} {words}", name(*link));
        }
    }
    if ring.edges.iter().any(|hop| matches!(hop, EdgeRoutes::Unreachable)) {
        return "a hop has no way left".to_owned();
    }
    let value = |list: &[f64], link: u32| list.get(link as usize).copied().unwrap_or(0.0);
    let filled = |link: u32| load(link) / value(&model.capacity, link).max(1e-3);
    let Some((link, _)) = usage.iter().max_by(|a, b| filled(a.0).total_cmp(&filled(b.0))) else {
        return "nothing holds it up".to_owned();
    };
    let (capacity, rate) = (value(&model.capacity, *link), value(&model.rate, *link));
    if capacity < rate {
        format!("{} has {} of {} left", name(*link), rounded(capacity), rounded(rate))
    } else {
        format!("{} is asked for {} and has {}", name(*link), rounded(load(*link)), rounded(rate))
    }
}

fn describe_changes(old: &Ring, new: &Ring) -> String {
    if old.order != new.order {
        return "the ring takes another order".to_owned();
    }
    let (mut moved, mut all) = (0, 0);
    for (old, new) in old.edges.iter().zip(&new.edges) {
        match (old, new) {
            (EdgeRoutes::Pinned(old), EdgeRoutes::Pinned(new)) => {
                all += new.len();
                moved += new.iter().zip(old).filter(|(new, old)| new.path != old.path).count();
            }
            (_, EdgeRoutes::Pinned(new)) => {
                all += new.len();
                moved += new.len();
            }
            _ => {}
        }
    }
    format!("{moved} of {all} connections take another path")
}

/// Why the plan as a whole.
pub(super) fn summary(
    assignments: &[Assignment],
    verdicts: &[ChangeOutcome],
    before: Score,
    after: Score,
) -> String {
    let count =
        |wanted: fn(&ChangeOutcome) -> bool| verdicts.iter().filter(|verdict| wanted(verdict)).count();
    let (forced, gains, forms, stays) = (
        count(|verdict| *verdict == ChangeOutcome::Forced),
        count(|verdict| matches!(verdict, ChangeOutcome::Gained(_))),
        count(|verdict| *verdict == ChangeOutcome::Forming),
        count(|verdict| matches!(verdict, ChangeOutcome::Retained(_))),
    );
    if forced + gains + forms == 0 {
        let why = if stays > 0 {
            "what could be gained is less than a change costs"
        } else {
            "nothing better was found"
        };
        return format!("no change: {why}; {after}");
    }
    let first = assignments
        .iter()
        .zip(verdicts)
        .find(|(_, verdict)| matches!(verdict, ChangeOutcome::Forced | ChangeOutcome::Gained(_)));
    let example = first.map_or_else(String::new, |(assignment, _)| {
        format!("; communicator {:x}: {}", assignment.communicator.0, assignment.reason)
    });
    format!(
        "{gains} change to gain, {forced} because they must, {forms} form, {stays} stay though others would be better; {after} instead of {before}{example}"
    )
}

impl std::fmt::Display for Score {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "mean slowdown {}, worst {}", times(self.slowdown), times(self.worst))?;
        if self.unreachable_jobs > 0 {
            write!(f, ", {} stuck", self.unreachable_jobs)?;
        }
        Ok(())
    }
}

fn times(slowdown: f64) -> String {
    if slowdown.is_finite() { format!("{slowdown:.2}") } else { "without end".to_owned() }
}

fn percent(gain: f64) -> String {
    format!("{:.0}%", (gain * 100.0).clamp(-100.0, 99_999.0))
}

/// A rate to three digits.
fn rounded(bits: f64) -> Rate {
    let bits = bits.clamp(0.0, 1e18) as u64;
    let digits = bits.max(1).ilog10().saturating_sub(2);
    let unit = 10_u64.pow(digits);
    Rate(bits.saturating_add(unit / 2) / unit * unit)
}
