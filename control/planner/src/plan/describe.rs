//! Finds out why a plan is as it is.

use super::change::ChangeOutcome;
use super::model::{EdgeRoutes, Model, Ring};
use super::reason::{AssignmentReason, Bottleneck, PlanReason, RingChange};
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
) -> AssignmentReason {
    match outcome {
        ChangeOutcome::Unchanged => AssignmentReason::Unchanged,
        ChangeOutcome::Forming => AssignmentReason::Forms,
        ChangeOutcome::Retained(gain) => AssignmentReason::TooLittleGain(gain),
        ChangeOutcome::Forced | ChangeOutcome::Gained(_) => {
            let Some((ring, before)) = old else { return AssignmentReason::Unchanged };
            let (bottleneck, change) = (bottleneck(model, ring, load), ring_change(ring, new.0));
            AssignmentReason::Changes { bottleneck, change, before, after: new.1 }
        }
    }
}

/// What holds a ring up.
fn bottleneck(model: &Model<'_>, ring: &Ring, load: &dyn Fn(u32) -> f64) -> Bottleneck {
    let name = |link: u32| {
        model
            .links
            .get(link as usize)
            .map_or_else(String::new, |link| model.request.topology.link_name(*link))
    };
    let usage = ring.usage();
    let first = |usable: LinkUse| {
        let is = |link: &u32| {
            model
                .links
                .get(*link as usize)
                .is_some_and(|link| model.request.conditions.usable(*link) == usable)
        };
        usage.iter().map(|(link, _)| *link).find(is).map(name)
    };
    if let Some(link) = first(LinkUse::Failed) {
        return Bottleneck::Failed(link);
    }
    if let Some(link) = first(LinkUse::Avoid) {
        return Bottleneck::Avoided(link);
    }
    if ring.edges.iter().any(|hop| matches!(hop, EdgeRoutes::Unreachable)) {
        return Bottleneck::Unreachable;
    }
    let value = |list: &[f64], link: u32| list.get(link as usize).copied().unwrap_or(0.0);
    let filled = |link: u32| load(link) / value(&model.capacity, link).max(1e-3);
    let Some((link, _)) = usage.iter().max_by(|a, b| filled(a.0).total_cmp(&filled(b.0))) else {
        return Bottleneck::Nothing;
    };
    let (capacity, rate) = (value(&model.capacity, *link), value(&model.rate, *link));
    let (congested, link, load) = (capacity < rate, name(*link), rounded(load(*link)));
    let (available, rate) = (rounded(capacity), rounded(rate));
    match congested {
        true => Bottleneck::Congested { link, available, rate },
        false => Bottleneck::Full { link, load, rate },
    }
}

fn ring_change(old: &Ring, new: &Ring) -> RingChange {
    if old.order != new.order {
        return RingChange::Order;
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
    RingChange::Paths { moved, all }
}

/// Why the plan as a whole.
pub(super) fn summary(
    assignments: &[Assignment],
    outcomes: &[ChangeOutcome],
    before: Score,
    after: Score,
) -> PlanReason {
    let count = |counted: fn(&ChangeOutcome) -> bool| outcomes.iter().filter(|one| counted(one)).count();
    let (forced, gain, form, stay) = (
        count(|outcome| *outcome == ChangeOutcome::Forced),
        count(|outcome| matches!(outcome, ChangeOutcome::Gained(_))),
        count(|outcome| *outcome == ChangeOutcome::Forming),
        count(|outcome| matches!(outcome, ChangeOutcome::Retained(_))),
    );
    if forced + gain + form == 0 {
        return if stay > 0 { PlanReason::TooLittleGain(after) } else { PlanReason::NothingBetter(after) };
    }
    let first = assignments
        .iter()
        .zip(outcomes)
        .find(|(_, outcome)| matches!(outcome, ChangeOutcome::Forced | ChangeOutcome::Gained(_)));
    let first = first.map(|(assignment, _)| (assignment.communicator, assignment.reason.clone()));
    PlanReason::Changes { gain, forced, form, stay, before, after, first }
}

/// A rate to three digits.
fn rounded(bits: f64) -> Rate {
    let bits = bits.clamp(0.0, 1e18) as u64;
    let digits = bits.max(1).ilog10().saturating_sub(2);
    let unit = 10_u64.pow(digits);
    Rate(bits.saturating_add(unit / 2) / unit * unit)
}
