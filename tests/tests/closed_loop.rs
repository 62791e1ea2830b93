//! The closed loop, end to end: eight agents in two racks under two spines. What the wire shows changes plans under traffic, and
//! every result stays right. Nothing tells control but the agents' programs in the kernel.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use anyhow::{Context, Result, bail, ensure};
use harmonaize_testkit::cross_traffic::CrossTraffic;
use harmonaize_testkit::deployment::Deployment;
use harmonaize_testkit::load::Watch;
use harmonaize_testkit::plans::{self, Plan, RingEdge};
use harmonaize_testkit::route::{Flow, Protocol, switches};
use harmonaize_tests::job::{Worker, deploy, sockets};
use harmonaize_tests::load::{Load, under};
use harmonaize_tests::racks_with_unmanaged_hosts;
use std::fmt::Debug;
use std::time::{Duration, Instant};

const RATE: &str = "100Mbit/s";
/// Half of it.
const CROSS_TRAFFIC: u64 = 50_000_000;
/// How long anything may take: a bound for machines that are busy with other things, and no figure.
const PATIENCE: Duration = Duration::from_secs(60);
/// Where agents listen for each other.
const AGENT_PORT: u16 = 7200;

/// Asks again until there is an answer, for as long as the ranks work.
fn until<T: Debug>(what: &str, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        if Instant::now() > deadline {
            bail!("{what}: not within {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The spine of a path from the first rack to the second. None where the paths that are known lead over none, or over both.
fn up(plan: &Plan) -> Option<String> {
    let paths = plan.ring_edges.iter().flat_map(|hop| &hop.paths);
    let mut spines = paths.filter_map(|path| match path.switches.as_slice() {
        [first, spine, last] if first == "leaf0" && last == "leaf1" => Some(spine),
        _ => None,
    });
    let spine = spines.next()?;
    spines.all(|other| other == spine).then(|| spine.clone())
}

/// What is done to the fabric, while the ranks work.
struct Scene<'a> {
    deployment: &'a Deployment,
    load: &'a Load,
}

impl Scene<'_> {
    /// So many operations more.
    fn operations(&self, count: u64) -> Result<()> {
        let from = self.load.rounds();
        until("operations go on", || Ok((self.load.rounds() >= from + count).then_some(())))
    }

    fn plan(&self, what: &str, wanted: impl Fn(&Plan) -> bool) -> Result<Plan> {
        let mut last = None;
        let found = until(what, || {
            let plan = plans::plans(self.deployment)?.into_iter().next();
            last.clone_from(&plan);
            Ok(plan.filter(|plan| wanted(plan)))
        });
        found.with_context(|| format!("the last plan was {last:?}"))
    }

    /// The spine that takes the ring from the first rack to the second.
    fn crossing(&self) -> Result<String> {
        let plan =
            self.plan("a plan whose paths are known", |plan| plan.paths_known() && up(plan).is_some())?;
        for hop in &plan.ring_edges {
            self.true_paths(hop)?;
        }
        up(&plan).context("the ring crosses a spine")
    }

    /// No link is thought of as other than the topology says.
    fn all_well(&self, what: &str) -> Result<()> {
        let mut last = Vec::new();
        let found = until(what, || {
            last = plans::links(self.deployment)?;
            last.retain(|link| link.state != "ok");
            Ok(last.is_empty().then_some(()))
        });
        found.with_context(|| format!("still {last:?}"))
    }

    /// What control says of a hop's paths is what the switches do with its ports, whichever end has connected.
    fn true_paths(&self, hop: &RingEdge) -> Result<()> {
        for path in &hop.paths {
            let ways = [(path.source_port, AGENT_PORT), (AGENT_PORT, path.source_port)];
            let way = |(source_port, destination_port)| {
                let (from, to) = (hop.from.clone(), hop.to.clone());
                let flow = Flow { protocol: Protocol::Tcp, from, to, source_port, destination_port };
                switches(self.deployment.fabric(), &flow)
            };
            let ways = ways.into_iter().map(way).collect::<Result<Vec<_>>>()?;
            ensure!(ways.contains(&path.switches), "control says {hop:?}, the switches {ways:?}");
        }
        Ok(())
    }

    /// Cross traffic takes half of a spine: found on the wire, and left.
    fn leaves_cross_traffic(&self) -> Result<()> {
        let spine = self.crossing()?;
        let flow = CrossTraffic::start(self.deployment.fabric(), "f0", "f1", &spine, CROSS_TRAFFIC)?;
        let began = flow.began_realtime_ns();
        until("the cross traffic is found and left", || {
            let decisions = plans::decisions(self.deployment)?;
            let mut since = decisions.into_iter().filter(|decision| decision.at_ns >= began);
            Ok(since
                .find(|decision| decision.congestion_report.is_some() && decision.switched_ns().is_some()))
        })?;
        self.plan("a plan whose way up leaves the cross traffic alone", |plan| {
            up(plan).is_some_and(|other| other != spine)
        })?;
        self.operations(5)?;
        flow.stop()?;
        self.all_well("the end of the cross traffic is found")?;
        self.operations(5)
    }

    /// A spine is drained under traffic: soon nothing of ours crosses it.
    fn drained_spine(&self) -> Result<()> {
        let spine = self.crossing()?;
        self.deployment.harmonaize(&["drain", &spine])?;
        self.plan("a plan beside the drained spine", |plan| {
            !plan.crossed("spine").contains(&spine.as_str())
        })?;
        until("silence on the drained spine", || {
            let watch = Watch::start(self.deployment.fabric(), &[&spine], Duration::from_millis(20))?;
            self.operations(5)?;
            let loads = watch.finish()?;
            // Neighbours asking for addresses are no traffic of ours.
            Ok(loads.iter().all(|load| load.between(0, u64::MAX) < 2_000).then_some(()))
        })?;
        self.deployment.harmonaize(&["drain", &spine, "--end"])?;
        self.operations(5)
    }

    /// A spine dies under traffic: operations go on, and the plan goes around it.
    fn dead_spine(&self) -> Result<()> {
        let spine = self.crossing()?;
        self.deployment.fabric().set_switch(&spine, false)?;
        self.operations(5)?;
        self.plan("a plan around the dead spine", |plan| !plan.crossed("spine").contains(&spine.as_str()))?;
        self.deployment.fabric().set_switch(&spine, true)?;
        self.operations(5)
    }

    fn play(&self) -> Result<()> {
        self.operations(3)?;
        self.leaves_cross_traffic().context("cross traffic")?;
        self.drained_spine().context("a drained spine")?;
        self.dead_spine().context("a dead spine")
    }
}

#[test]
fn plans_follow_congestion_and_results_stay_right() {
    let topology = racks_with_unmanaged_hosts(2, 4, 2, RATE);
    let measured = |setup: &mut harmonaize_testkit::deployment::Setup| {
        setup.unmanaged_hosts = 2;
        setup.measure(RATE);
    };
    let Some(mut deployment) = deploy(&topology, measured) else { return };
    let sockets = sockets(&deployment, "a");
    let sum = |worker: &Worker, round: u64| worker.sum(round, 250_000, round.is_multiple_of(2), PATIENCE);
    let mut played: Result<()> = Ok(());
    under(&sockets, 1, sum, |load| played = Scene { deployment: &deployment, load }.play());
    if let Err(error) = played {
        let control = deployment.control().unwrap().log_tail(16_384);
        let decisions = plans::decisions(&deployment);
        panic!("{error:#}\ndecisions: {decisions:#?}\ncontrol's log:\n{control}");
    }
    deployment.check().unwrap();
}
