//! Panels of control's own: what communicators run by, and when that changed.

use super::view::{Cell, Column, Kind, Panel, Tone, View};
use crate::text::{clean, duration, moment, number_of, rate};
use harmonaize_api::communicator_text;
use harmonaize_api::v1::{ChangeOutcome, ChangeRecord, DecisionRecord, ExplainReply, PlanStatus, PlansReply};

const fn column(name: &'static str, right: bool, spare: u8) -> Column {
    Column { name, right, drop_priority: spare }
}

fn cell(order: u64, text: String, tone: Tone) -> Cell {
    Cell { text, order, tone }
}

fn plain(text: String) -> Cell {
    cell(0, text, Tone::Plain)
}

impl View {
    /// Control's, with plans before the findings that changed.
    pub(crate) fn with_plans(mut self, plans: &PlansReply, decisions: &ExplainReply) -> Self {
        let at = self.panels.iter().position(|panel| panel.kind == Kind::Communicators);
        let at = at.map_or(self.panels.len(), |at| at + 1);
        let panels = [plans_panel(plans, decisions.now_ns), switches_panel(decisions)];
        self.panels.splice(at..at, panels);
        self
    }
}

fn plans_panel(reply: &PlansReply, now: u64) -> Panel {
    let columns = vec![
        column("communicator", false, 0),
        column("epoch", true, 0),
        column("ring", false, 2),
        column("ways", false, 1),
        column("operation", true, 3),
        column("slowdown", true, 0),
        column("share", true, 2),
        column("since", true, 4),
        column("why", false, 5),
    ];
    let completed = number_of(reply.changes_completed, "change", "changes");
    Panel {
        kind: Kind::Plans,
        title: format!("PLANS  {completed} done, {} given up; share in bit/s", reply.changes_abandoned),
        columns,
        rows: reply.plans.iter().map(|plan| plan_row(plan, now)).collect(),
        sorted_by: None,
        empty: "no communicator has formed",
    }
}

fn plan_row(plan: &PlanStatus, now: u64) -> Vec<Cell> {
    let epoch = match plan.next_epoch {
        0 => plain(plan.epoch.to_string()),
        next => cell(0, format!("{} -> {next}", plan.epoch), Tone::Warn),
    };
    let dash = || cell(0, "-".to_owned(), Tone::Dim);
    let slow = plan.slowdown_ppm;
    let tone = match slow {
        0..1_100_000 => Tone::Good,
        1_100_000..2_000_000 => Tone::Warn,
        _ => Tone::Bad,
    };
    vec![
        plain(owner(&plan.tenant, &plan.name, plan.communicator)),
        Cell { order: plan.epoch, ..epoch },
        plain(plan.order.join(" ")),
        plain(switches_crossed(plan)),
        if plan.predicted_ns == 0 {
            dash()
        } else {
            cell(plan.predicted_ns, duration(plan.predicted_ns), Tone::Plain)
        },
        if slow == 0 { dash() } else { cell(slow, format!("{:.2}", slow as f64 / 1e6), tone) },
        if plan.share_bps == 0 { dash() } else { cell(plan.share_bps, rate(plan.share_bps), Tone::Plain) },
        match plan.since_ns {
            0 => dash(),
            then => cell(now.saturating_sub(then), duration(now.saturating_sub(then)), Tone::Plain),
        },
        plain(plan_reason(plan)),
    ]
}

/// Describes the plan: its codec, its aggregator and why it runs. The codec is left out where tensors travel as they are, and the
/// aggregator where there is none.
fn plan_reason(plan: &PlanStatus) -> String {
    let codec = Some(plan.codec.as_str()).filter(|codec| !matches!(*codec, "" | "exact"));
    let aggregator = Some(plan.aggregator.as_str()).filter(|name| !name.is_empty());
    let reason = Some(plan.reason.as_str()).filter(|reason| !reason.is_empty());
    let words: Vec<&str> = codec.into_iter().chain(aggregator).chain(reason).collect();
    clean(&words.join(": "))
}

/// The switches that its connections cross, each with how many of them: "spine0 x4, leaf0 x2".
fn switches_crossed(plan: &PlanStatus) -> String {
    let mut counts: Vec<(&str, u32)> = Vec::new();
    for switch in plan.ring_edges.iter().flat_map(|hop| &hop.paths).flat_map(|path| &path.switches) {
        match counts.iter_mut().find(|(known, _)| known == switch) {
            Some((_, count)) => *count += 1,
            None => counts.push((switch, 1)),
        }
    }
    if counts.is_empty() {
        return "?".to_owned();
    }
    counts.iter().map(|(switch, count)| format!("{switch} x{count}")).collect::<Vec<_>>().join(", ")
}

fn switches_panel(reply: &ExplainReply) -> Panel {
    let columns = vec![
        column("time", false, 0),
        column("communicator", false, 0),
        column("epoch", true, 2),
        column("took", true, 0),
        column("now", false, 1),
        column("slowdown", false, 1),
        column("cause", false, 3),
    ];
    let changes = reply.decisions.iter().rev();
    let changes = changes.flat_map(|decision| decision.changes.iter().map(move |change| (decision, change)));
    Panel {
        kind: Kind::Switches,
        title: "SWITCHES  newest first; from report or decision until all use the plan".to_owned(),
        columns,
        rows: changes.map(|(decision, change)| switch_row(reply.now_ns, decision, change)).collect(),
        sorted_by: None,
        empty: "no plan has changed",
    }
}

fn switch_row(now: u64, decision: &DecisionRecord, change: &ChangeRecord) -> Vec<Cell> {
    let begun = decision.congestion_report.as_ref().map_or(decision.at_ns, |report| report.received_ns);
    let took = match change.switched_ns {
        0 => cell(u64::MAX, "-".to_owned(), Tone::Dim),
        at => cell(at.saturating_sub(begun), duration(at.saturating_sub(begun)), Tone::Plain),
    };
    let tone = match change.outcome_code() {
        ChangeOutcome::InUse => Tone::Good,
        ChangeOutcome::UnderWay => Tone::Warn,
        ChangeOutcome::GivenUp => Tone::Bad,
        ChangeOutcome::Ended => Tone::Dim,
        ChangeOutcome::Unspecified => Tone::Plain,
    };
    let score = |ppm: u64| if ppm == 0 { "-".to_owned() } else { format!("{:.2}", ppm as f64 / 1e6) };
    vec![
        cell(decision.at_ns, moment(now, decision.at_ns), Tone::Plain),
        plain(owner(&change.tenant, &change.name, change.communicator)),
        cell(change.epoch, change.epoch.to_string(), Tone::Plain),
        took,
        cell(0, clean(&change.outcome), tone),
        plain(format!("{} -> {}", score(decision.score_before_ppm), score(decision.score_after_ppm))),
        plain(clean(&decision.cause)),
    ]
}

fn owner(tenant: &str, name: &str, id: u64) -> String {
    if tenant.is_empty() { communicator_text(id) } else { format!("{}/{}", clean(tenant), clean(name)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of the texts none is read: those of a later control may be others.
    #[test]
    fn a_change_is_painted_by_its_outcome_code() {
        for (code, tone) in [
            (ChangeOutcome::InUse, Tone::Good),
            (ChangeOutcome::UnderWay, Tone::Warn),
            (ChangeOutcome::GivenUp, Tone::Bad),
            (ChangeOutcome::Ended, Tone::Dim),
            (ChangeOutcome::Unspecified, Tone::Plain),
        ] {
            let outcome = "some words".to_owned();
            let change = ChangeRecord { outcome, outcome_code: code.into(), ..ChangeRecord::default() };
            let row = switch_row(0, &DecisionRecord::default(), &change);
            assert!(row.contains(&cell(0, "some words".to_owned(), tone)), "{code:?}: {row:?}");
        }
    }
}
