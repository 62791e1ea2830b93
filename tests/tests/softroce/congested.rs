//! The closed loop on verbs. Others' traffic on one of two ways is found on the wire, and queue pairs leave that way. Nothing tells
//! control but the agents' programs in the kernel, which see SoftRoCE's packets.

use crate::alone;
use crate::flaps::{End, Job, job};
use crate::provider::{HOSTS, Provider, program};
use crate::spines::{Others, RATE, Spines, topology};
use anyhow::{Context, Result, bail, ensure};
use harmonaize_testkit::clock::realtime_ns;
use harmonaize_testkit::plans::{Plan, decisions_in, plans_in};
use std::time::{Duration, Instant};

/// For each byte on the other way, more than so many cross the one that the plan names. Acknowledgements may cross the other.
const MOST: u64 = 4;

/// A plan is made again where a busy machine gave one up.
const PATIENCE: Duration = Duration::from_secs(150);

/// Between two looks at what control says. Each takes an emulated processor a tenth of a second.
const POLL_INTERVAL: Duration = Duration::from_millis(700);

/// Control's lines. A ring has all of a hop's bytes on one link; the ports are those on the wire.
const CONTROL: &str =
    "source_ports = \"50000-59999\"\n[[algorithm]]\ncollective = \"allreduce\"\nalgorithm = \"ring\"\n";

/// An agent's lines. The driver of a veth knows no rate.
fn telemetry(host: usize) -> String {
    format!(
        "[telemetry]\ninterfaces = [\"h{host}\"]\nkernel = false\nflows = 1024\n[telemetry.rate]\nh{host} = \"{RATE}Mbit/s\"\n"
    )
}

/// Asks again until there is an answer.
fn until<T>(what: &str, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        if Instant::now() > deadline {
            bail!("{what}: not within {PATIENCE:?}");
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Hops of the ring from the first rack to the second.
fn up(plan: &Plan) -> impl Iterator<Item = (&str, &str, u16, &str)> {
    let paths = plan.ring_edges.iter().flat_map(|hop| hop.paths.iter().map(move |path| (hop, path)));
    paths.filter_map(|(hop, path)| match path.switches.as_slice() {
        [first, spine, last] if first == "leaf0" && last == "leaf1" => {
            Some((hop.from.as_str(), hop.to.as_str(), path.source_port, spine.as_str()))
        }
        _ => None,
    })
}

/// The one spine that takes the ring from the first rack to the second. None where they are more, or not all paths are known.
fn spine_of(plan: &Plan) -> Option<&str> {
    let mut spines = up(plan).map(|(_, _, _, spine)| spine);
    let spine = spines.next().filter(|_| plan.paths_known())?;
    spines.all(|other| other == spine).then_some(spine)
}

fn other(spine: &str) -> &'static str {
    if spine == "spine0" { "spine1" } else { "spine0" }
}

struct Scene<'a> {
    spines: &'a Spines,
    provider: &'a Provider,
    job: &'a Job,
}

impl Scene<'_> {
    fn plan(&self) -> Result<Option<Plan>> {
        Ok(plans_in(self.provider.ask("plans")?)?.into_iter().next())
    }

    /// A plan whose way up is like this. What control says of its ports is what the leaf's kernel does with them.
    fn crossing(&self, what: &str, wanted: impl Fn(&str) -> bool) -> Result<(Plan, String)> {
        let found = until(what, || {
            let plan = self.plan()?;
            Ok(plan.and_then(|plan| {
                let spine = spine_of(&plan).filter(|spine| wanted(spine))?.to_owned();
                Some((plan, spine))
            }))
        })?;
        for (from, to, port, spine) in up(&found.0) {
            let truth = self.spines.spine_of(from, to, port)?;
            ensure!(
                truth == spine,
                "control says that port {port} of {from} to {to} takes {spine}, not {truth}"
            );
        }
        Ok(found)
    }

    /// Waits until operations have had nearly all that they move cross this spine.
    fn moves_over(&self, spine: &str) -> Result<()> {
        let mut seen = Vec::new();
        let moved = until(&format!("queue pairs send over {spine}"), || {
            let read = || -> Result<[u64; 2]> {
                Ok([self.spines.roce_bytes(spine)?, self.spines.roce_bytes(other(spine))?])
            };
            let before = read()?;
            self.job.wait_for_progress();
            let after = read()?;
            let [here, there] = [0, 1].map(|at: usize| after[at] - before[at]);
            seen.push((here, there));
            Ok((here > MOST * there).then_some(here))
        });
        let moved = moved.with_context(|| format!("bytes over {spine} and beside it: {seen:?}"))?;
        println!("  {moved} bytes of some operations crossed {spine}");
        Ok(())
    }

    fn play(&self) -> Result<()> {
        let (_, spine) = self.crossing("a plan whose ways are known", |_| true)?;
        self.moves_over(&spine)?;
        let (began, others) = (realtime_ns()?, Others::begin(&spine)?);
        // A late processor may look like others' traffic elsewhere.
        let links = [format!("leaf0 -> {spine}"), format!("{spine} -> leaf1")];
        let decision = until("others' traffic is found, and a plan for that is in use", || {
            let decisions = decisions_in(self.provider.ask("explain")?)?;
            Ok(decisions.into_iter().find(|decision| {
                decision.at_ns >= began
                    && links.iter().any(|link| decision.reason.contains(link))
                    && decision.switched_ns().is_some()
            }))
        })?;
        let (took_ms, bytes) = ((decision.at_ns - began) / 1_000_000, self.spines.others_bytes(&spine)?);
        println!("  planned after {took_ms} ms, {bytes} bytes of others so far");
        println!("  {}: {}", decision.cause, decision.reason);
        let explained = self.provider.ask("explain")?;
        let trains = |of: &str| explained[format!("congestion_reports_{of}")].as_u64().unwrap_or_default();
        let (verified, refuted) = (trains("verified"), trains("refuted"));
        println!("  reports that trains verified: {verified}, refuted: {refuted}");
        ensure!(verified > 0, "no train met others' traffic");
        // On a busy machine a plan may come of the estimate that a report has left, and not of a report.
        if let Some(report) = decision.congestion_report {
            ensure!(report.finding.contains("congestion"), "{report:?}");
        }
        let (_, now) = self.crossing("a plan beside the others", |now| now != spine)?;
        self.moves_over(&now)?;
        drop(others);
        self.job.wait_for_progress();
        Ok(())
    }

    /// What somebody wants to know who was not there.
    fn account(&self) -> String {
        let shown = |arguments: &[&str]| {
            let said = self.provider.harmonaize(arguments).unwrap_or_else(|error| format!("{error:#}"));
            format!("harmonaize {}:\n{said}\n", arguments.join(" "))
        };
        let asked: [&[&str]; 5] = [
            &["status"],
            &["plans", "--json"],
            &["explain", "--json"],
            &["topology"],
            &["flows", "-o", "wide"],
        ];
        asked.map(shown).concat() + &self.spines.state()
    }
}

/// The ring goes from one rack to the other over the way with others' traffic. Control learns of that from telemetry, gives
/// the queue pairs ports that lead over the other way, and no sum is wrong meanwhile.
#[test]
fn queue_pairs_leave_a_congested_way() {
    let _alone = alone();
    let Some(spines) = Spines::build() else { return };
    let agent = |_| program("harmonaize-agent");
    let Some(provider) = Provider::start_on(&topology(), CONTROL, telemetry, agent) else { return };
    let ends = job(&provider, "congested", |job| {
        let scene = Scene { spines: &spines, provider: &provider, job };
        if let Err(error) = scene.play() {
            panic!("{error:#}\n{}", scene.account());
        }
    });
    assert_eq!(ends, [End::Right; HOSTS]);
}
