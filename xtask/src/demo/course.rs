//! When the cross traffic comes and goes, by what control says of its plans, and what is watched meanwhile.

use super::timeline::Seen;
use anyhow::Result;
use harmonaize_testkit::clock::realtime_ns;
use harmonaize_testkit::cross_traffic::CrossTraffic;
use harmonaize_testkit::deployment::Deployment;
use harmonaize_testkit::load::Watch;
use harmonaize_testkit::plans::{self, Decision, Plan};
use std::time::{Duration, Instant};

/// The spines of the demo's fabric.
const SPINES: [&str; 2] = ["spine0", "spine1"];
/// The hosts that the cross traffic goes from and to, and their leaves.
pub(super) const ENDS: [&str; 2] = ["f0", "f1"];
const LEAVES: [&str; 2] = ["leaf0", "leaf1"];
/// How often their links are read.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);
/// How often control is asked.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Steps of the training before anything happens.
const FIRST_STEPS: u64 = 5;
/// How long nothing must have been decided before the flow begins, and how long that is waited for.
const CALM: Duration = Duration::from_secs(2);
const UNTIL_CALM: Duration = Duration::from_secs(15);
/// How long the flow lasts at most where nobody answers it; and how long it stays once they have.
const UNTIL_ANSWERED: Duration = Duration::from_secs(20);
const STAYS: Duration = Duration::from_secs(3);
/// How long is waited after the flow for plans to come back. The other is how long all goes on once they
/// have.
const UNTIL_BACK: Duration = Duration::from_secs(30);
const LINGERS: Duration = Duration::from_secs(1);

/// How far it is.
#[derive(Debug)]
enum Stage {
    /// The flow has not begun.
    Before { since: Instant },
    /// It lasts; answered since.
    Flows { flow: CrossTraffic, since: Instant, answered: Option<Instant> },
    /// It has ended; plans have come back since.
    After { since: Instant, back: Option<Instant> },
    /// Nothing more happens.
    Over,
}

/// The course of things beside the training.
#[derive(Debug)]
pub struct Course {
    watch: Watch,
    stage: Stage,
    last_poll: Option<Instant>,
    seen: Seen,
}

impl Course {
    /// Begins to watch; the flow will have `rate` in bits a second.
    pub fn begin(deployment: &Deployment, rate: u64) -> Result<Self> {
        let watch = Watch::start(deployment.fabric(), &SPINES, SAMPLE_INTERVAL)?;
        let stage = Stage::Before { since: Instant::now() };
        Ok(Self { watch, stage, last_poll: None, seen: Seen { rate, ..Seen::default() } })
    }

    /// Whether nothing more happens: the training need not go on for this.
    pub fn over(&self) -> bool {
        matches!(self.stage, Stage::Over)
    }

    /// Does what is due after so many steps of the job of that name.
    pub fn advance(&mut self, deployment: &Deployment, job: &str, steps: u64) -> Result<()> {
        if steps < FIRST_STEPS || self.over() || self.last_poll.is_some_and(|at| at.elapsed() < POLL_INTERVAL)
        {
            return Ok(());
        }
        self.last_poll = Some(Instant::now());
        let (plans, decisions) = (plans::plans(deployment)?, plans::decisions(deployment)?);
        self.stage = match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Before { since } => self.before(deployment, job, since, &plans, &decisions)?,
            Stage::Flows { flow, since, answered } => {
                self.flows(flow, since, answered, &plans, &decisions)?
            }
            Stage::After { since, back } => self.after(since, back, &plans, &decisions)?,
            Stage::Over => Stage::Over,
        };
        Ok(())
    }

    fn before(
        &mut self,
        deployment: &Deployment,
        job: &str,
        since: Instant,
        plans: &[Plan],
        decisions: &[Decision],
    ) -> Result<Stage> {
        // Before control knows all paths, and while it still changes plans, it is too early.
        let known = plans.iter().all(Plan::paths_known);
        let latest = decisions.iter().map(|decision| decision.at_ns).max().unwrap_or(0);
        let calm = latest + u64::try_from(CALM.as_nanos())? < realtime_ns()? && since.elapsed() > CALM;
        let plan = plans.iter().find(|plan| plan.name == job);
        let late = since.elapsed() > UNTIL_CALM;
        let (Some(plan), true) = (plan, known && (calm || late)) else {
            return Ok(if since.elapsed() > 2 * UNTIL_CALM { Stage::Over } else { Stage::Before { since } });
        };
        // The spine that the training uses most, of those the flow can cross.
        let own = |spine: &&str| crossing(std::slice::from_ref(plan), spine);
        let spine = SPINES.into_iter().max_by_key(own).unwrap_or_default();
        self.seen.communicator.clone_from(&plan.communicator);
        spine.clone_into(&mut self.seen.spine);
        self.seen.connections[0] = crossing(plans, spine);
        let [from, to] = ENDS;
        let flow = CrossTraffic::start(deployment.fabric(), from, to, spine, self.seen.rate)?;
        self.seen.flow_ns = Some([flow.began_realtime_ns(); 2]);
        Ok(Stage::Flows { flow, since: Instant::now(), answered: None })
    }

    fn flows(
        &mut self,
        flow: CrossTraffic,
        since: Instant,
        answered: Option<Instant>,
        plans: &[Plan],
        decisions: &[Decision],
    ) -> Result<Stage> {
        let own = crossing(plans, &self.seen.spine);
        let [before, ..] = self.seen.connections;
        let began = flow.began_realtime_ns();
        let in_use = |decision: &Decision| {
            decision.at_ns >= began
                && decision.congestion_report.is_some()
                && decision.switched_ns().is_some()
        };
        let left = own < before && decisions.iter().any(in_use);
        let answered = answered.or_else(|| left.then(Instant::now));
        // Once they have left, others may find that what is free there suits them.
        let [_, fewest, _] = self.seen.connections;
        self.seen.connections[1] = if answered.is_some() && !left { fewest.min(own) } else { own };
        if since.elapsed() < UNTIL_ANSWERED && answered.is_none_or(|at| at.elapsed() < STAYS) {
            return Ok(Stage::Flows { flow, since, answered });
        }
        let ended = flow.stop()?;
        self.seen.flow_ns = Some([began, ended]);
        let [_, during, _] = self.seen.connections;
        let taken = own > during;
        self.seen.back_ns = taken.then_some(ended);
        Ok(Stage::After { since: Instant::now(), back: taken.then(Instant::now) })
    }

    fn after(
        &mut self,
        since: Instant,
        back: Option<Instant>,
        plans: &[Plan],
        decisions: &[Decision],
    ) -> Result<Stage> {
        let own = crossing(plans, &self.seen.spine);
        let [before, during, _] = self.seen.connections;
        let ended = self.seen.flow_ns.map_or(0, |[_, ended]| ended);
        let again = own > during && own >= before.min(during + 1);
        if again && back.is_none() {
            let last = decisions.iter().filter(|decision| decision.at_ns >= ended);
            self.seen.back_ns = last.filter_map(Decision::switched_ns).max();
        }
        let back = back.or_else(|| (again && self.seen.back_ns.is_some()).then(Instant::now));
        self.seen.connections[2] = own;
        self.seen.waited = since.elapsed();
        let goes_on = back.map_or(since.elapsed() < UNTIL_BACK, |at| at.elapsed() < LINGERS);
        Ok(if goes_on { Stage::After { since, back } } else { Stage::Over })
    }

    /// What was seen, when the training has ended.
    pub fn finish(mut self, deployment: &Deployment) -> Result<Seen> {
        if let Stage::Flows { flow, .. } = std::mem::replace(&mut self.stage, Stage::Over) {
            self.seen.flow_ns = Some([flow.began_realtime_ns(), flow.stop()?]);
        }
        let loads = self.watch.finish()?;
        Ok(Seen { decisions: plans::decisions(deployment)?, loads, ..self.seen })
    }
}

/// The nodes that the cross traffic passes on its way over a spine, its ends included.
pub fn path(spine: &str) -> [&str; 5] {
    let ([from, to], [up, down]) = (ENDS, LEAVES);
    [from, up, spine, down, to]
}

/// How many own connections cross a spine the way the cross traffic does.
fn crossing(plans: &[Plan], spine: &str) -> usize {
    let [from, to] = LEAVES;
    let paths = plans.iter().flat_map(|plan| &plan.ring_edges).flat_map(|hop| &hop.paths);
    paths.filter(|path| path.switches == [from, spine, to]).count()
}

/// The spine that most own connections cross so, and how many; none where none does.
pub(super) fn most_crossed(plans: &[Plan]) -> Option<(&'static str, usize)> {
    let crossed = SPINES.map(|spine| (spine, crossing(plans, spine)));
    crossed.into_iter().filter(|(_, count)| *count > 0).max_by_key(|(_, count)| *count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_testkit::plans::{Path, RingEdge};

    #[test]
    fn connections_count_in_the_flows_direction_alone() {
        let path = |switches: &[&str]| Path {
            source_port: 1,
            switches: switches.iter().map(|name| (*name).to_owned()).collect(),
        };
        let up = path(&["leaf0", "spine0", "leaf1"]);
        let hop = |paths| RingEdge { from: "a".into(), to: "b".into(), paths };
        let plan = Plan {
            communicator: "c".into(),
            name: "n".into(),
            epoch: 1,
            order: Vec::new(),
            ring_edges: vec![
                hop(vec![up.clone(), up, path(&["leaf0", "spine1", "leaf1"])]),
                hop(vec![path(&["leaf1", "spine0", "leaf0"]), path(&["leaf0"])]),
            ],
            reason: String::new(),
            pinned: false,
            interleaving: String::new(),
            interleaving_reason_code: String::new(),
        };
        let plans = [plan.clone(), plan];
        assert_eq!([crossing(&plans, "spine0"), crossing(&plans, "spine1")], [4, 2]);
        assert_eq!(most_crossed(&plans), Some(("spine0", 4)));
        assert_eq!(most_crossed(&[]), None, "of none no spine is crossed most");
    }
}
