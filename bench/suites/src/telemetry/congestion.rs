//! How long agents take to find that cross traffic congests a link. The agents themselves report it while it happens, and so does a
//! replay of what they recorded.

use super::accuracy::{AFTER_NS, BEFORE_NS, traces};
use super::{HOSTS, Suite, Telemetry};
use crate::figures::summary;
use crate::findings::{self, AgentFindings, CongestionFinding};
use crate::lab::{Lab, options};
use crate::row::{Case, Row};
use anyhow::{Context, Result, bail, ensure};
use harmonaize_testkit::clock::monotonic_ns;
use harmonaize_testkit::found::replay;
use harmonaize_testkit::process::Process;
use harmonaize_testkit::truth::Span;
use serde::Deserialize;
use std::process::Command;
use std::time::{Duration, Instant};

/// The most from a burst's first packet to the finding, at the median, in milliseconds. First on idle links, then on those that a job
/// fills.
const IDLE_MS: f64 = 10.0;
const BUSY_MS: f64 = 20.0;
/// The most false alarms an hour on links that a job fills.
const BUSY_ALARMS: f64 = 10.0;
/// Silence of a flow before each of its bursts, in milliseconds. Each comes long after the last, so that no finding is damped as one
/// that comes and goes.
const PAUSE_MS: u64 = 2400;
/// How long a job may take to fill the links, and to end.
const JOB: Duration = Duration::from_secs(5);
/// Bytes of a rank's tensor of that job, and how many operations it has under way.
const TENSOR: u64 = 4 << 20;
const IN_FLIGHT: u64 = 2;

/// Bursts over links that nothing else crosses.
pub(super) fn idle(suite: &Suite) -> Result<Vec<Row>> {
    let mut lab = suite.lab(Telemetry::Shown)?;
    let program = suite.binaries.path("replay")?;
    let followed = AgentFindings::follow(&suite.binaries, &lab)?;
    let bursts = bursts(&mut lab, suite.budget.bursts.div_ceil(HOSTS))?;
    let (live, seconds) = followed.end(&mut lab)?;
    let fabric = lab.end()?;
    let (mut replayed, mut replayed_seconds) = (Vec::new(), 0.0);
    for (bursts, trace) in bursts.iter().zip(traces(&fabric)) {
        let (Some(first), Some(last)) = (bursts.first(), bursts.last()) else { bail!("no burst") };
        let began_ns = first.began_ns.saturating_sub(2 * BEFORE_NS);
        let span = Span { began_ns, ended_ns: last.handed_over_ns + AFTER_NS };
        replayed_seconds += span.ended_ns.saturating_sub(span.began_ns) as f64 / 1e9 / HOSTS as f64;
        replayed
            .push(replay(&program, &[trace], span)?.iter().filter_map(CongestionFinding::replayed).collect());
    }
    let not_own = |finding: &CongestionFinding| finding.cause.as_deref() != Some("own");
    let of_replay = "idle links, a replay of what the agents recorded";
    Ok(vec![
        row("idle links, told by the agents", &delays(&bursts, &live, not_own), IDLE_MS),
        false_alarms(("idle links", None), &bursts, &live, not_own, seconds),
        row(of_replay, &delays(&bursts, &replayed, not_own), IDLE_MS),
        false_alarms((of_replay, None), &bursts, &replayed, not_own, replayed_seconds),
    ])
}

/// Bursts over links that a job of ours fills. Agents must find that what fills the links now is another's.
pub(super) fn busy(suite: &Suite) -> Result<Vec<Row>> {
    let mut lab = suite.lab(Telemetry::Shown)?;
    let each = suite.budget.bursts.div_ceil(HOSTS);
    let lasts = Duration::from_millis(PAUSE_MS * 3 / 2) * (each as u32 + 1) + JOB;
    let until_ns = monotonic_ns()? + u64::try_from(lasts.as_nanos())?;
    let arguments = options(&[("--bytes", TENSOR), ("--in-flight", IN_FLIGHT), ("--until-ns", until_ns)]);
    let hosts: Vec<usize> = (0..HOSTS).collect();
    let mut job = lab.start("steady", &hosts, &arguments)?;
    std::thread::sleep(JOB);
    let followed = AgentFindings::follow(&suite.binaries, &lab)?;
    let bursts = bursts(&mut lab, each)?;
    ensure!(!job.ended()?, "the job has ended before the bursts");
    let (live, seconds) = followed.end(&mut lab)?;
    job.wait(lasts + JOB, || lab.check())?;
    Ok(vec![
        row(
            "links that a job of ours fills, told by the agents",
            &delays(&bursts, &live, CongestionFinding::is_cross_traffic),
            BUSY_MS,
        ),
        false_alarms(
            ("links that a job of ours fills", Some(BUSY_ALARMS)),
            &bursts,
            &live,
            CongestionFinding::is_cross_traffic,
            seconds,
        ),
    ])
}

/// How often an hour agents report congestion beside the bursts, before the first of them included. The limit is the most that
/// they may.
fn false_alarms(
    (what, limit): (&str, Option<f64>),
    bursts: &[Vec<Burst>],
    findings: &[Vec<CongestionFinding>],
    matches: impl Fn(&CongestionFinding) -> bool,
    seconds: f64,
) -> Row {
    let beside = |(bursts, findings): (&Vec<Burst>, &Vec<CongestionFinding>)| {
        let within = |finding: &CongestionFinding| bursts.iter().any(|burst| burst.holds(finding));
        findings.iter().filter(|finding| matches(finding) && !within(finding)).count()
    };
    let count: usize = bursts.iter().zip(findings).map(beside).sum();
    let lasted =
        |burst: &Burst| (burst.handed_over_ns + AFTER_NS).saturating_sub(burst.began_ns) as f64 / 1e9;
    let of_bursts: f64 = bursts.iter().flatten().map(lasted).sum::<f64>() / bursts.len().max(1) as f64;
    let case = Case::less("telemetry", format!("bursts of cross traffic, 1 Gbit/s, {what}"), 1.0);
    findings::false_alarms(case.of(0, HOSTS), count, seconds - of_bursts, limit)
}

fn row(what: &str, delays: &[Option<f64>], limit_ms: f64) -> Row {
    let found: Vec<f64> = delays.iter().copied().flatten().collect();
    let all = delays.len();
    eprintln!(
        "congestion, {what}: {} of {all} bursts found, ms after onset {}",
        found.len(),
        summary(&found)
    );
    let case = Case::less(
        "telemetry",
        format!("{all} bursts of cross traffic, 1 Gbit/s, {what}: ms from the first packet to the finding"),
        1.0,
    )
    .of(0, HOSTS);
    // One that was not found has no time: it counts as one that took as long as there was until the next.
    let times: Vec<f64> = delays.iter().map(|delay| delay.unwrap_or(PAUSE_MS as f64)).collect();
    case.limit(&times, limit_ms)
}

/// From each burst's first packet to the first such finding before the next, in milliseconds; none where there is none.
fn delays(
    bursts: &[Vec<Burst>],
    findings: &[Vec<CongestionFinding>],
    matches: impl Fn(&CongestionFinding) -> bool,
) -> Vec<Option<f64>> {
    let of_host = |(bursts, findings): (&Vec<Burst>, &Vec<CongestionFinding>)| {
        let ends = bursts.iter().skip(1).map(|next| next.began_ns).chain([u64::MAX]);
        let delay = |(burst, end): (&Burst, u64)| {
            let span = burst.began_ns..end;
            let first =
                findings.iter().find(|finding| matches(finding) && span.contains(&finding.found_ns))?;
            Some((first.found_ns - burst.began_ns) as f64 / 1e6)
        };
        bursts.iter().zip(ends).map(delay).collect::<Vec<_>>()
    };
    bursts.iter().zip(findings).flat_map(of_host).collect()
}

/// A burst, in nanoseconds of CLOCK_MONOTONIC.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Burst {
    began_ns: u64,
    handed_over_ns: u64,
}

impl Burst {
    /// Whether a finding is of its time, or of a moment after it.
    fn holds(&self, finding: &CongestionFinding) -> bool {
        (self.began_ns..=self.handed_over_ns + AFTER_NS).contains(&finding.found_ns)
    }
}

/// Has a flow burst so often from each host to the next, one host after the other. Returns the bursts by
/// host.
fn bursts(lab: &mut Lab, count: usize) -> Result<Vec<Vec<Burst>>> {
    let hosts = lab.fabric().hosts().to_vec();
    let deadline =
        Instant::now() + Duration::from_secs(30) + Duration::from_millis(2 * PAUSE_MS) * count as u32;
    let (mut senders, mut receivers) = (Vec::new(), Vec::new());
    for (place, (from, to)) in hosts.iter().zip(hosts.iter().cycle().skip(1)).enumerate() {
        let address = to.addresses.first().context("a host without address")?;
        let mut receive = Command::new(lab.program("stream"));
        receive.arg("receive").arg(format!("{address}:0"));
        let log = lab.logs().join(format!("bursts-receive-{place}.log"));
        let mut receiver = Process::start("a bursts' receiver", &mut receive, &to.namespace, &log)?;
        let listens = receiver.line_by(deadline, |_| true)?;
        receivers.push(receiver);
        let mut send = Command::new(lab.program("stream"));
        send.args(["bursts", &listens, "--bursts", &count.to_string(), "--pause-ms", &PAUSE_MS.to_string()]);
        let log = lab.logs().join(format!("bursts-send-{place}.log"));
        senders.push(Process::start("a bursts' sender", &mut send, &from.namespace, &log)?);
        // Apart from each other, as far as that goes.
        std::thread::sleep(Duration::from_millis(PAUSE_MS / HOSTS as u64));
    }
    let mut all = Vec::new();
    for sender in &mut senders {
        sender.succeed_by(deadline)?;
        let text = std::fs::read_to_string(sender.log())?;
        let lines = text.lines().filter(|line| line.starts_with('{'));
        let bursts: Vec<Burst> = lines.map(serde_json::from_str).collect::<Result<_, _>>()?;
        ensure!(bursts.len() == count, "{} bursts instead of {count}", bursts.len());
        all.push(bursts);
    }
    receivers.iter_mut().try_for_each(|receiver| receiver.succeed_by(deadline))?;
    lab.check()?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_takes_its_first_finding() {
        let burst = |began_ns| Burst { began_ns, handed_over_ns: began_ns + 10 };
        let finding = |found_ns, cause: &str| CongestionFinding { cause: Some(cause.to_owned()), found_ns };
        let bursts = [vec![burst(1_000_000), burst(9_000_000)], vec![burst(5)]];
        let findings = [
            vec![finding(2_000_000, "own"), finding(3_000_000, "others"), finding(8_000_000, "others")],
            vec![],
        ];
        let found = delays(&bursts, &findings, CongestionFinding::is_cross_traffic);
        assert_eq!(found, [Some(2.0), None, None]);
        // Long after both bursts: one in ten seconds of no burst.
        let late = [vec![finding(5_000_000_000, "others"), finding(6_000_000_000, "own")], vec![]];
        let alarms =
            |limit| false_alarms(("here", limit), &bursts, &late, CongestionFinding::is_cross_traffic, 11.5);
        let ours = alarms(None).ours.unwrap();
        assert!((ours - 360.0).abs() < 1e-3 && alarms(None).pass.is_none(), "{ours}");
        assert!(alarms(Some(BUSY_ALARMS)).failed() && alarms(Some(400.0)).passed());
        let row = row("here", &found, BUSY_MS);
        assert!(!row.passed() && row.runs == 3, "{row:?}");
    }
}
