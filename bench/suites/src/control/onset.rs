//! Cross traffic takes half of the spine that a job crosses. Rows say how long it is until all participants are on a better plan,
//! what that plan is worth, and what is left when the flow has ended.

use super::job::{Running, bytes_for};
use super::{HOSTS, PATIENCE, RATE, Suite, case, spine_of};
use crate::figures::summary;
use crate::findings::{self, AgentFindings, CongestionFinding};
use crate::lab::Lab;
use crate::pictures::{chart, shares};
use crate::processors::Busy;
use crate::row::{Better, Row};
use anyhow::{Context, Result};
use harmonaize_plot::{Chart, Series};
use harmonaize_testkit::clock::ahead_ns;
use harmonaize_testkit::cross_traffic::CrossTraffic;
use harmonaize_testkit::plans::{self, Change, Decision};
use harmonaize_testkit::truth::Iteration;
use std::time::{Duration, Instant};

/// The most from the flow's first packet until all participants use a better plan, at the median, in milliseconds.
const SWITCHED_MS: f64 = 100.0;
/// The most until an agent has found the congestion.
const FOUND_MS: f64 = 10.0;
/// What must be had again of the bandwidth: on the better plan, and after the flow.
const RECOVERED: f64 = 0.9;
/// Switches of plans an onset.
const SWITCHES: f64 = 1.0;
/// The most of all cores' time, in percent, for figures that mean the network.
const BUSY: f64 = 60.0;
/// For how long after a flow a report may be of it.
const AFTER_NS: u64 = 1_000_000_000;
/// How long an operation takes where the links are the job's own.
const OPERATION: Duration = Duration::from_millis(30);

/// What was seen of one onset; times in milliseconds after the flow's first packet.
#[derive(Debug, Default)]
struct Onset {
    found: Option<f64>,
    switched: Option<f64>,
    /// Bandwidths before, on the new plan, and after the flow, in bytes a second.
    busbw: [f64; 3],
    /// Decisions from the flow's first packet to its end.
    switches: usize,
    /// Seconds after the flow's end until control took no link for congested any more; none where that did not come.
    calm: Option<f64>,
    /// When by CLOCK_REALTIME: the flow's first packet, and its end.
    flow_ns: [u64; 2],
}

pub(super) fn onset(suite: &Suite) -> Result<Vec<Row>> {
    let mut lab = suite.lab("")?;
    let hosts: Vec<usize> = (0..HOSTS).collect();
    let mut job = Running::start(&mut lab, &hosts, bytes_for(HOSTS, OPERATION), Duration::ZERO)?;
    let busy = Busy::now()?;
    let followed = AgentFindings::follow(&suite.binaries, &lab)?;
    let mut onsets = Vec::new();
    for number in 1..=suite.budget.onsets {
        let seen = one(&mut lab, &mut job, suite.budget.span)?;
        let [before, on_it, after] = seen.busbw.map(|rate| rate / 1e6);
        eprintln!(
            "onset {number}: found after {:?} ms, switched after {:?} ms, {} decisions; busbw {before:.1}, {on_it:.1}, \
             {after:.1} MB/s",
            seen.found, seen.switched, seen.switches
        );
        onsets.push(seen);
    }
    let busy = 100.0 * busy.share()?;
    let (findings, seconds) = followed.end(&mut lab)?;
    let ahead = ahead_ns()?;
    let alarms = false_alarms(&onsets, &findings, ahead, seconds);
    let bytes = job.bus_bytes();
    let iterations = job.end(&mut lab)?;
    if let Some(folder) = &suite.request.figures {
        spread(&onsets).write(folder, "control-onsets")?;
        let last = onsets.last().context("no onset")?;
        course(last, &iterations, bytes, ahead).write(folder, "control-onset")?;
    }
    let iterations = iterations.len();
    eprintln!("{iterations} operations, every result right; all cores {busy:.0}% busy");
    let mut rows = rows(&onsets, busy)?;
    rows.insert(rows.len().min(2), alarms);
    Ok(rows)
}

/// How often an hour agents report cross traffic that is not there. `ahead` is what CLOCK_REALTIME is ahead of the findings' clock.
fn false_alarms(onsets: &[Onset], findings: &[Vec<CongestionFinding>], ahead: i64, seconds: f64) -> Row {
    let holds = |finding: &CongestionFinding| {
        let found = finding.found_ns.saturating_add_signed(ahead);
        onsets.iter().any(|onset| (onset.flow_ns[0]..=onset.flow_ns[1] + AFTER_NS).contains(&found))
    };
    let count =
        findings.iter().flatten().filter(|finding| finding.is_cross_traffic() && !holds(finding)).count();
    let flows = onsets.iter().map(|onset| (onset.flow_ns[1] + AFTER_NS).saturating_sub(onset.flow_ns[0]));
    let case = case("onsets of cross traffic on a spine, eight agents".to_owned(), Better::Less, 1.0);
    findings::false_alarms(case, count, seconds - flows.sum::<u64>() as f64 / 1e9, None)
}

/// How many onsets were found, and answered, within how long.
fn spread(onsets: &[Onset]) -> Chart {
    let times = |time: fn(&Onset) -> Option<f64>| onsets.iter().filter_map(time).collect::<Vec<f64>>();
    let series = vec![
        shares("an agent's report", &times(|onset| onset.found)),
        shares("all on the better plan", &times(|onset| onset.switched)),
    ];
    let title = format!("{} onsets; bars at the median: 1 for the report, 2 for the plan", onsets.len());
    chart(
        title,
        ("ms after the first packet of the cross traffic", "% of onsets"),
        series,
        vec![FOUND_MS, SWITCHED_MS],
    )
}

/// Draws the bus bandwidth of operations around an onset, of `bytes` bytes on the bus each. `ahead` is what CLOCK_REALTIME is ahead of
/// their log's clock.
fn course(onset: &Onset, iterations: &[Iteration], bytes: f64, ahead: i64) -> Chart {
    const AROUND_S: f64 = 0.5;
    let [began, ended] = onset.flow_ns;
    let since = |time: u64| (i128::from(time) - i128::from(began)) as f64 / 1e9;
    let until = since(ended) + onset.calm.unwrap_or(0.0) + AROUND_S;
    let points = iterations.iter().filter_map(|one| {
        let done = since(one.done_ns.saturating_add_signed(ahead));
        let took = one.done_ns.saturating_sub(one.called_ns).max(1) as f64;
        (-AROUND_S..=until).contains(&done).then_some((done, bytes / took * 1e3))
    });
    let series = vec![Series { name: "an AllReduce's busbw".to_owned(), points: points.collect() }];
    let answers = [onset.found, onset.switched].into_iter().flatten().map(|ms| ms / 1e3);
    let marks = std::iter::once(0.0).chain(answers).chain([since(ended)]).collect();
    let title = "An onset: 1 cross traffic begins, 2 report, 3 all on the better plan, 4 it ends".to_owned();
    chart(title, ("seconds after the flow's first packet", "MB/s"), series, marks)
}

fn rows(onsets: &[Onset], busy: f64) -> Result<Vec<Row>> {
    let all = onsets.len();
    // One that was not found took as long as was waited for it.
    let missed = PATIENCE.as_secs_f64() * 1e3;
    let times = |time: fn(&Onset) -> Option<f64>| -> Vec<f64> {
        onsets.iter().map(|onset| time(onset).unwrap_or(missed)).collect()
    };
    let (found, switched) = (times(|onset| onset.found), times(|onset| onset.switched));
    eprintln!("found after ms {}; switched after ms {}", summary(&found), summary(&switched));
    let calm: Vec<f64> = onsets.iter().filter_map(|onset| onset.calm).collect();
    let never = all - calm.len();
    eprintln!("calm after s {}; {never} of {all} not within {PATIENCE:?}", summary(&calm));
    let busbw = |place: usize| -> Vec<f64> {
        onsets.iter().filter_map(|onset| Some(onset.busbw.get(place)? / 1e6)).collect()
    };
    let switches = onsets.iter().map(|onset| onset.switches).max().context("no onset")?;
    let less = |what: &str, bar| {
        case(format!("{all} onsets of cross traffic on a spine: {what}"), Better::Less, bar)
    };
    let more = |what: &str, bar| {
        case(format!("{all} onsets of cross traffic on a spine: {what}"), Better::More, bar)
    };
    Ok(vec![
        less("ms until all participants are on a better plan", 1.0).limit(&switched, SWITCHED_MS),
        less("ms until an agent's report", 1.0).limit(&found, FOUND_MS),
        more("busbw MB/s on the new plan", RECOVERED).compare(&busbw(1), &busbw(0), "before the onset"),
        more("busbw MB/s after the flow", RECOVERED).compare(&busbw(2), &busbw(0), "before the onset"),
        less("most switches of plans an onset", 1.0).limit(&[switches as f64], SWITCHES),
        less("all cores busy, %", 1.0).limit(&[busy], BUSY),
    ])
}

fn one(lab: &mut Lab, job: &mut Running, span: Duration) -> Result<Onset> {
    let (_, spine) = spine_of(lab, job.name())?;
    let before = job.busbw(lab, span)?;
    let flow = CrossTraffic::start(lab.fabric(), "f0", "f1", &spine, RATE / 2)?;
    let onset = flow.began_realtime_ns();
    eprintln!("a flow begins at {onset}");
    let decided = switched(lab, onset)?;
    let on_it = job.busbw(lab, span)?;
    let switches = decisions_since(lab, onset)?.len();
    let ended = flow.stop()?;
    let calm = calm(lab)?;
    let after = job.busbw(lab, span)?;
    // What is decided while the flow ends belongs to its end.
    let returned = decisions_since(lab, ended)?.len();
    if returned > 1 {
        eprintln!("note: {returned} decisions after the flow's end");
    }
    let since = |time: u64| time.saturating_sub(onset) as f64 / 1e6;
    if let Some((decision, report)) =
        decided.as_ref().and_then(|one| Some((one, one.congestion_report.as_ref()?)))
    {
        let last = |stage: fn(&Change) -> u64| since(decision.changes.iter().map(stage).max().unwrap_or(0));
        eprintln!(
            "ms after the onset: found {:.1}, received {:.1}, verified and decided {:.1}, prepared by all {:.1}, in use {:.1}",
            since(report.found_ns),
            since(report.received_ns),
            since(decision.at_ns),
            last(|change| change.prepared_ns),
            last(|change| change.switched_ns)
        );
    }
    Ok(Onset {
        found: answer(decided.as_ref(), onset).map(|(found, _)| since(found)),
        switched: answer(decided.as_ref(), onset).map(|(_, switched)| since(switched)),
        busbw: [before, on_it, after],
        switches,
        calm,
        flow_ns: [onset, ended],
    })
}

/// When the flow was found and all were on the plan that answers it. None where nobody found it, or what was found was found before it
/// began.
fn answer(decision: Option<&Decision>, onset: u64) -> Option<(u64, u64)> {
    let found = decision?.congestion_report.as_ref()?.found_ns;
    (found >= onset).then_some((found, decision?.switched_ns()?))
}

/// The first decision after `onset` that is in use everywhere; none if there is none for long.
fn switched(lab: &mut Lab, onset: u64) -> Result<Option<Decision>> {
    let deadline = Instant::now() + PATIENCE / 3;
    while Instant::now() < deadline {
        let decisions = decisions_since(lab, onset)?;
        if let Some(decision) = decisions.into_iter().find(|decision| decision.switched_ns().is_some()) {
            return Ok(Some(decision));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(None)
}

fn decisions_since(lab: &mut Lab, time_ns: u64) -> Result<Vec<Decision>> {
    lab.check()?;
    let all = plans::decisions(lab.deployment())?;
    Ok(all.into_iter().filter(|decision| decision.at_ns >= time_ns).collect())
}

/// Waits until control estimates that no link carries cross traffic. Returns after how many seconds; none if one still does
/// after long.
fn calm(lab: &mut Lab) -> Result<Option<f64>> {
    let began = Instant::now();
    loop {
        lab.check()?;
        let links = plans::links(lab.deployment())?;
        let taken: Vec<_> = links.iter().filter(|link| link.state == "congested").collect();
        if taken.is_empty() {
            return Ok(Some(began.elapsed().as_secs_f64()));
        }
        if began.elapsed() > PATIENCE {
            let taken = taken.iter().map(|link| format!("{} -> {}", link.from, link.to));
            let taken = taken.collect::<Vec<_>>().join(", ");
            eprintln!("note: links are still taken for congested {PATIENCE:?} after the flow's end: {taken}");
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_testkit::plans::CongestionReport;

    #[test]
    fn an_onset_that_is_missed_fails_its_bars() {
        let fine = || Onset {
            found: Some(5.0),
            switched: Some(40.0),
            busbw: [10e6, 9.5e6, 10e6],
            switches: 1,
            ..Onset::default()
        };
        let good = rows(&[fine(), fine()], 40.0).unwrap();
        assert!(good.iter().all(|row| row.passed()), "{good:?}");
        let missed = || Onset { busbw: [10e6, 5e6, 10e6], ..Onset::default() };
        let bad = rows(&[missed(), missed()], 90.0).unwrap();
        let passed: Vec<bool> = bad.iter().map(|row| row.passed()).collect();
        assert_eq!(passed, [false, false, false, true, true, false]);
    }

    #[test]
    fn a_report_before_the_onset_is_a_miss() {
        let decision = |found_ns| Decision {
            at_ns: 1_020,
            cause: String::new(),
            reason: String::new(),
            score_before_ppm: 0,
            score_after_ppm: 0,
            congestion_report: Some(CongestionReport {
                host: "h0".into(),
                finding: String::new(),
                found_ns,
                received_ns: 1_010,
            }),
            changes: vec![Change {
                communicator: "c".into(),
                epoch: 2,
                sent_ns: 1_021,
                prepared_ns: 1_022,
                switched_ns: 1_030,
                outcome: String::new(),
            }],
        };
        assert_eq!(answer(Some(&decision(1_005)), 1_000), Some((1_005, 1_030)));
        assert_eq!(answer(Some(&decision(999)), 1_000), None);
        assert_eq!(answer(Some(&Decision { congestion_report: None, ..decision(0) }), 1_000), None);
        assert_eq!(answer(None, 1_000), None);
    }

    #[test]
    fn false_alarms_are_those_beside_flows() {
        let onset = Onset { flow_ns: [10_000_000_000, 12_000_000_000], ..Onset::default() };
        let finding = |cause: &str, found_ns| CongestionFinding { cause: Some(cause.to_owned()), found_ns };
        // Their clock is 5 s behind.
        let findings = [
            vec![finding("others", 4_900_000_000), finding("others", 5_000_000_000)],
            vec![
                finding("others", 7_500_000_000),
                finding("own", 9_000_000_000),
                finding("others", 9_000_000_000),
            ],
        ];
        let row = false_alarms(&[onset], &findings, 5_000_000_000, 23.0);
        assert_eq!((row.ours, row.pass), (Some(360.0), None), "two in twenty seconds");
    }

    #[test]
    fn a_course_counts_seconds_after_the_flow() {
        let onset = Onset {
            found: Some(10.0),
            switched: Some(40.0),
            flow_ns: [5_000_000_000, 7_000_000_000],
            ..Onset::default()
        };
        let iteration = |done_ns: u64| Iteration { began_ns: 0, called_ns: done_ns - 10_000_000, done_ns };
        let log = [0.1, 1.8, 3.0, 9.0].map(|seconds| iteration((seconds * 1e9) as u64));
        let course = course(&onset, &log, 1e6, 3_000_000_000);
        assert_eq!(course.marks, [0.0, 0.01, 0.04, 2.0]);
        assert_eq!(course.series[0].points.len(), 2, "{course:?}");
        assert!(course.series[0].points.iter().all(|(at, rate)| (-0.5..=2.5).contains(at) && *rate == 100.0));
        let spread = spread(&[onset, Onset { found: Some(30.0), ..Onset::default() }]);
        assert_eq!(spread.series[0].points.last(), Some(&(30.0, 100.0)));
    }
}
