//! What agents report of congestion while it happens, and how often without a cause.

use crate::lab::Lab;
use crate::row::{Case, Row};
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::clock::ahead_ns;
use harmonaize_testkit::fabric::Host;
use harmonaize_testkit::found::Found;
use harmonaize_testkit::process::Process;
use harmonaize_testkit::workspace::Binaries;
use serde::Deserialize;
use std::process::Command;
use std::time::{Duration, Instant};

/// The file of the socket at which an agent tells what it finds, in its host's folder.
pub(crate) const SOCKET: &str = "telemetry.sock";

/// How `harmonaize` reaches the agent of a host.
pub(crate) fn socket(host: &Host) -> String {
    format!("unix:{}", host.folder.join(SOCKET).display())
}

/// The row beside a detection time: so many false alarms in so many seconds without a cause, an hour. It is held to a limit where there is
/// one, and states otherwise.
pub(crate) fn false_alarms(case: Case, count: usize, seconds: f64, limit: Option<f64>) -> Row {
    eprintln!("{}: {count} false alarms in {seconds:.0} s", case.case);
    let case = Case { case: format!("{}: false alarms an hour", case.case), ..case };
    let hourly = [3600.0 * count as f64 / seconds.max(1e-3)];
    limit.map_or_else(|| case.state(&hourly), |limit| case.limit(&hourly, limit))
}

/// That what leaves a host is held up, by whom, and when that was said, in nanoseconds of CLOCK_MONOTONIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CongestionFinding {
    pub(crate) cause: Option<String>,
    pub(crate) found_ns: u64,
}

impl CongestionFinding {
    /// Whether it blames others than this provider's tenants.
    pub(crate) fn is_cross_traffic(&self) -> bool {
        self.cause.as_deref().is_some_and(|cause| !matches!(cause, "own" | "unknown"))
    }

    pub(crate) fn replayed(found: &Found) -> Option<Self> {
        match found {
            Found::Congestion { leaving: true, state, cause, found_ns, .. } if state != "none" => {
                Some(Self { cause: Some(cause.clone()), found_ns: *found_ns })
            }
            _ => None,
        }
    }

    /// A line of `harmonaize phases`, whose clock is so much ahead.
    fn parse(line: &str, ahead_ns: i64) -> Result<Option<Self>> {
        #[derive(Deserialize)]
        struct Line {
            time_ns: u64,
            kind: String,
            ingress: Option<bool>,
            level: Option<String>,
            cause: Option<String>,
        }
        let line: Line = serde_json::from_str(line).with_context(|| format!("not a finding: {line}"))?;
        let egress = line.kind == "congestion" && line.ingress == Some(false);
        let wanted = egress && line.level.as_deref() != Some("none");
        let found_ns = line.time_ns.saturating_add_signed(-ahead_ns);
        Ok(wanted.then_some(Self { cause: line.cause, found_ns }))
    }
}

/// What every host's agent reports while it finds it.
pub(crate) struct AgentFindings {
    followers: Vec<Process>,
    since: Instant,
}

impl AgentFindings {
    /// Follows the agents, which serve `socket` in their hosts' folders.
    pub(crate) fn follow(binaries: &Binaries, lab: &Lab) -> Result<Self> {
        let program = binaries.path("harmonaize")?;
        let follow = |host: &Host| {
            let mut follow = Command::new(&program);
            follow.args(["phases", "--json", "--follow", "--last", "1", "--agent"]).arg(socket(host));
            let log = lab.logs().join(format!("findings-{}.log", host.name));
            Process::start(&format!("what {} finds", host.name), &mut follow, &host.namespace, &log)
        };
        let hosts = lab.deployment_hosts().iter();
        Ok(Self { followers: hosts.map(follow).collect::<Result<_>>()?, since: Instant::now() })
    }

    /// The findings by host, and for how many seconds they were followed.
    pub(crate) fn end(self, lab: &mut Lab) -> Result<(Vec<Vec<CongestionFinding>>, f64)> {
        // What was found last is on its way.
        std::thread::sleep(Duration::from_millis(200));
        lab.check()?;
        let ahead_ns = ahead_ns()?;
        let mut all = Vec::new();
        for mut one in self.followers {
            ensure!(one.status()?.is_none(), "{} has ended: {}", one.name(), one.log_tail(2048));
            one.end()?;
            let text = std::fs::read_to_string(one.log())?;
            // The last line may be a part of one.
            let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
            let told: Vec<Option<CongestionFinding>> =
                lines.map(|line| CongestionFinding::parse(line, ahead_ns)).collect::<Result<_>>()?;
            all.push(told.into_iter().flatten().collect());
        }
        Ok((all, self.since.elapsed().as_secs_f64()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_findings_are_read() {
        let line = |ingress: bool, level: &str| {
            format!(
                r#"{{"time_ns":100,"kind":"congestion","ingress":{ingress},"level":"{level}","cause":"cross_traffic"}}"#
            )
        };
        let found = CongestionFinding::parse(&line(false, "mild"), 30).unwrap().unwrap();
        assert!(found.is_cross_traffic() && found.found_ns == 70, "{found:?}");
        assert_eq!(CongestionFinding::parse(&line(true, "mild"), 0).unwrap(), None);
        assert_eq!(CongestionFinding::parse(&line(false, "none"), 0).unwrap(), None);
        assert_eq!(
            CongestionFinding::parse(r#"{"time_ns":1,"kind":"operation","ranks":[]}"#, 0).unwrap(),
            None
        );
        assert!(CongestionFinding::parse("nothing", 0).is_err());
    }

    #[test]
    fn false_alarms_are_stated_by_the_hour() {
        let row = |count, limit| false_alarms(Case::less("s", "idle", 1.0), count, 1800.0, limit);
        let stated = row(3, None);
        assert_eq!((stated.ours, stated.pass, stated.runs), (Some(6.0), None, 1));
        assert_eq!(stated.case, "idle: false alarms an hour");
        assert_eq!([0, 5, 6].map(|count| row(count, Some(10.0)).pass), [Some(true), Some(true), Some(false)]);
    }
}
