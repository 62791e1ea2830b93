//! What control says of plans, decisions, links and jobs, through `harmonaize` as an operator has it.

use crate::deployment::Deployment;
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::time::{Duration, Instant};

/// What a communicator runs by.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Plan {
    /// Which, as people type it.
    pub communicator: String,
    /// The tenant's name for it.
    pub name: String,
    /// The epoch in use.
    pub epoch: u64,
    /// Hosts in ring order.
    pub order: Vec<String>,
    /// Its links along the ring.
    pub ring_edges: Vec<RingEdge>,
    /// Why it runs by this.
    pub reason: String,
    /// Whether an operator chose the order.
    pub pinned: bool,
    /// With whom it is interleaved, in words; empty where it is not.
    pub interleaving: String,
    /// Why it is, as a name that does not change; empty where it is not.
    pub interleaving_reason_code: String,
}

/// From one participant to the next along the ring.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RingEdge {
    /// Host that sends.
    pub from: String,
    /// Host that receives.
    pub to: String,
    /// A path each connection; empty where it is not known.
    pub paths: Vec<Path>,
}

/// The path of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Path {
    /// The port of the end that connects.
    pub source_port: u16,
    /// Switches on the way; empty where it is not known.
    pub switches: Vec<String>,
}

impl Plan {
    /// Whether control knows the path of each connection.
    pub fn paths_known(&self) -> bool {
        let known =
            |hop: &RingEdge| !hop.paths.is_empty() && hop.paths.iter().all(|path| !path.switches.is_empty());
        self.ring_edges.iter().all(known)
    }

    /// The switches of all its connections whose names begin so, each once, in the order of the ring.
    pub fn crossed(&self, stem: &str) -> Vec<&str> {
        let paths = self.ring_edges.iter().flat_map(|hop| &hop.paths);
        let mut crossed = Vec::new();
        for switch in paths.flat_map(|path| &path.switches).filter(|switch| switch.starts_with(stem)) {
            if !crossed.contains(&switch.as_str()) {
                crossed.push(switch);
            }
        }
        crossed
    }
}

/// A decision that changed plans. Times are CLOCK_REALTIME in nanoseconds, 0 for what has not happened.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Decision {
    /// When it was taken.
    pub at_ns: u64,
    /// What made control plan, in words.
    pub cause: String,
    /// Why this plan, in words.
    pub reason: String,
    /// Mean slowdown predicted if all had stayed as it was, of a million.
    pub score_before_ppm: u64,
    /// And for the plan.
    pub score_after_ppm: u64,
    /// The report behind it.
    pub congestion_report: Option<CongestionReport>,
    /// Who changed.
    pub changes: Vec<Change>,
}

/// The report that made control plan.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct CongestionReport {
    /// The host that told.
    pub host: String,
    /// Level and cause, in words.
    pub finding: String,
    /// When the host found it.
    pub found_ns: u64,
    /// When control received it.
    pub received_ns: u64,
}

/// A communicator's part in a decision.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Change {
    /// Which.
    pub communicator: String,
    /// The new epoch.
    pub epoch: u64,
    /// When agents were told.
    pub sent_ns: u64,
    /// When all had prepared it.
    pub prepared_ns: u64,
    /// When all used it.
    pub switched_ns: u64,
    /// What became of it, in words.
    pub outcome: String,
}

impl Decision {
    /// When all participants of all communicators that it changed used it; none where that has not come about.
    pub fn switched_ns(&self) -> Option<u64> {
        let last = self.changes.iter().map(|change| change.switched_ns).max()?;
        self.changes.iter().all(|change| change.switched_ns > 0).then_some(last)
    }
}

/// One direction of a link, as control takes it to be.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Link {
    /// Where packets come from.
    pub from: String,
    /// Where they go.
    pub to: String,
    /// What it carries, in bits a second.
    pub capacity_bps: u64,
    /// What others are taken to use of it.
    pub cross_traffic_bps: u64,
    /// In a word.
    pub state: String,
}

/// What control says of jobs, and of what hosts cost.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Placed {
    /// All jobs that it places, the next one first.
    pub jobs: Vec<PlacedJob>,
    /// Hosts where runners are, by kind.
    pub kinds: Vec<PricedKind>,
}

/// Hosts of a kind.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PricedKind {
    /// The kind; empty for hosts without one.
    pub kind: String,
    /// An hour of one, in millionths; 0 where nothing has a price.
    pub price_millionths: u64,
}

/// What a job bids for a worker an hour, in millionths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct PlacedBid {
    /// For each of its fewest.
    pub least_millionths: u64,
    /// For each further one.
    pub further_millionths: u64,
}

/// A job that control places.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PlacedJob {
    /// Whose.
    pub tenant: String,
    /// Its name.
    pub job: String,
    /// What it is doing, in a word.
    pub phase: String,
    /// Hosts of its workers, by rank.
    pub hosts: Vec<String>,
    /// How often a generation ended because a worker failed.
    pub failures: u32,
    /// Why it has what it has, as a code.
    pub reason: String,
    /// The same in words.
    pub reason_text: String,
    /// What it bids, where its tenant has said so.
    #[serde(default)]
    pub bid: Option<PlacedBid>,
}

/// What all communicators run by.
pub fn plans(deployment: &Deployment) -> Result<Vec<Plan>> {
    plans_in(deployment.ask(&["plans"])?)
}

/// The same in what `harmonaize plans --json` printed.
pub fn plans_in(said: Value) -> Result<Vec<Plan>> {
    part(said, "plans")
}

/// A spine that the one communicator's traffic crosses, once control knows its paths.
///
/// # Errors
/// If it does not within that time.
pub fn crossed_spine(deployment: &Deployment, limit: Duration) -> Result<String> {
    let deadline = Instant::now() + limit;
    loop {
        let plan = plans(deployment)?.into_iter().next().filter(Plan::paths_known);
        if let Some(spine) = plan.as_ref().and_then(|plan| plan.crossed("spine").first().copied()) {
            return Ok(spine.to_owned());
        }
        ensure!(Instant::now() < deadline, "control does not know the paths of {plan:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What control has decided lately, oldest first.
pub fn decisions(deployment: &Deployment) -> Result<Vec<Decision>> {
    decisions_in(deployment.ask(&["explain"])?)
}

/// The same in what `harmonaize explain --json` printed.
pub fn decisions_in(said: Value) -> Result<Vec<Decision>> {
    part(said, "decisions")
}

/// Every link, both ways.
pub fn links(deployment: &Deployment) -> Result<Vec<Link>> {
    part(deployment.ask(&["topology"])?, "links")
}

/// All jobs that control places, and what hosts cost.
pub fn jobs(deployment: &Deployment) -> Result<Placed> {
    let said = deployment.ask(&["jobs"])?;
    serde_json::from_value(said.clone()).with_context(|| format!("jobs are not understood: {said}"))
}

fn part<T: DeserializeOwned>(mut said: Value, name: &str) -> Result<T> {
    let part = said.get_mut(name).map(Value::take).with_context(|| format!("no {name} in {said}"))?;
    serde_json::from_value(part.clone()).with_context(|| format!("{name} are not understood: {part}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(switches: &[&str]) -> Path {
        Path { source_port: 1, switches: switches.iter().map(|name| (*name).to_owned()).collect() }
    }

    #[test]
    fn a_plan_lists_its_spines() {
        let hop = |paths| RingEdge { from: "a".into(), to: "b".into(), paths };
        let mut plan = Plan {
            communicator: "c".into(),
            name: "n".into(),
            epoch: 1,
            order: vec!["a".into(), "b".into()],
            ring_edges: vec![
                hop(vec![path(&["leaf0", "spine1", "leaf1"])]),
                hop(vec![path(&["leaf1", "spine1", "leaf0"]), path(&["leaf1", "spine0", "leaf0"])]),
            ],
            reason: String::new(),
            pinned: false,
            interleaving: String::new(),
            interleaving_reason_code: String::new(),
        };
        assert_eq!(plan.crossed("spine"), ["spine1", "spine0"]);
        assert!(plan.paths_known());
        plan.ring_edges.push(hop(Vec::new()));
        assert!(!plan.paths_known());
    }

    #[test]
    fn a_decision_applies_once_all_changes_switch() {
        let change = |switched_ns| Change {
            communicator: "c".into(),
            epoch: 2,
            sent_ns: 1,
            prepared_ns: 2,
            switched_ns,
            outcome: "in use".into(),
        };
        let decision = |changes| Decision {
            at_ns: 1,
            cause: String::new(),
            reason: String::new(),
            score_before_ppm: 0,
            score_after_ppm: 0,
            congestion_report: None,
            changes,
        };
        assert_eq!(decision(vec![change(5), change(4)]).switched_ns(), Some(5));
        assert_eq!(decision(vec![change(5), change(0)]).switched_ns(), None);
        assert_eq!(decision(Vec::new()).switched_ns(), None);
    }
}
