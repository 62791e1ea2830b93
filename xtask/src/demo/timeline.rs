//! What the closed loop did while the tenants ran. It has cross traffic on a spine, the congestion report, the new plan, and what the links
//! carried.

use harmonaize_testkit::load::Load;
use harmonaize_testkit::plans::{CongestionReport as Noticed, Decision};
use harmonaize_testkit::summary::Check;
use std::time::Duration;

/// Time over which a link's load is averaged, in nanoseconds.
const STRETCH_NS: u64 = 100_000_000;

/// Something that happened.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Seconds since the training began.
    pub at: f64,
    /// What.
    pub what: String,
}

/// What there is to show.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// In a few sentences.
    pub story: String,
    /// The spine that the cross traffic congested; none where there was no cross traffic.
    pub spine: Option<String>,
    /// In the order of their times.
    pub events: Vec<Event>,
    /// By link: seconds since the training began, and Mbit/s.
    pub loads: Vec<(String, Vec<(f64, f64)>)>,
    /// Seconds, and the epoch of the training's communicator.
    pub epochs: Vec<(f64, f64)>,
    /// Whether the loop was closed.
    pub checks: Vec<Check>,
}

/// What was seen of it. Times are CLOCK_REALTIME in nanoseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// The spine that the cross traffic crossed; empty if there was none.
    pub spine: String,
    /// Its rate in bits a second.
    pub rate: u64,
    /// When it began and ended; none where control did not know the paths in time for one.
    pub flow_ns: Option<[u64; 2]>,
    /// The training's communicator, as people type it.
    pub communicator: String,
    /// Own connections over that spine in the flow's direction, at three times. Before it, at its end, and when plans came back
    /// or were no longer waited for.
    pub connections: [usize; 3],
    /// When plans had come back.
    pub back_ns: Option<u64>,
    /// How long that was waited for.
    pub waited: Duration,
    /// What control decided, as far as it remembers.
    pub decisions: Vec<Decision>,
    /// What the spines' links carried.
    pub loads: Vec<Load>,
}

impl Timeline {
    /// Of what was seen; `began_ns` and `ended_ns` are the training's.
    pub fn of(seen: &Seen, began_ns: u64, ended_ns: u64) -> Self {
        let at = |time_ns: u64| (time_ns as f64 - began_ns as f64) / 1e9;
        let mut events = Vec::new();
        if let Some([began, ended]) = seen.flow_ns {
            let flow = format!("cross traffic of {} Mbit/s begins on {}", seen.rate / 1_000_000, seen.spine);
            events.extend([(began, flow), (ended, "the cross traffic ends".to_owned())]);
        }
        let mut epochs = Vec::new();
        for decision in &seen.decisions {
            events.extend(decision_events(decision));
            let own = decision.changes.iter().filter(|change| change.communicator == seen.communicator);
            for change in own.filter(|change| change.switched_ns > 0) {
                // A plan holds until the next: a step, not a slope.
                epochs.push((at(change.switched_ns), change.epoch.saturating_sub(1) as f64));
                epochs.push((at(change.switched_ns), change.epoch as f64));
            }
        }
        if let (Some((_, first)), Some((_, last))) = (epochs.first().copied(), epochs.last().copied()) {
            epochs.insert(0, (0.0, first));
            epochs.push((at(ended_ns), last));
        }
        events.sort_by_key(|(time, _)| *time);
        let events = events.into_iter().map(|(time, what)| Event { at: at(time), what }).collect();
        let up = seen.loads.iter().filter(|load| load.from.starts_with("leaf"));
        let points = |load: &Load| -> Vec<(f64, f64)> {
            let within = |(time, _): &(u64, f64)| (began_ns..=ended_ns).contains(time);
            stretched(load).into_iter().filter(within).map(|(time, rate)| (at(time), rate / 1e6)).collect()
        };
        let loads = up.map(|load| (format!("{} to {}", load.from, load.to), points(load))).collect();
        Self {
            story: story(seen),
            spine: seen.flow_ns.map(|_| seen.spine.clone()),
            events,
            loads,
            epochs,
            checks: vec![check_cross_traffic(seen), check_left_spine(seen), check_returned(seen)],
        }
    }
}

/// What is told of a decision, with its time.
pub(super) fn decision_events(decision: &Decision) -> Vec<(u64, String)> {
    let mut events = Vec::new();
    if let Some(report) = &decision.congestion_report {
        events.push((report.found_ns, format!("{} finds: {}", report.host, report.finding)));
    }
    let (before, after) = (decision.score_before_ppm as f64 / 1e6, decision.score_after_ppm as f64 / 1e6);
    events.push((
        decision.at_ns,
        format!(
            "control plans anew ({}): {}; predicted slowdown {after:.2} instead of {before:.2}",
            decision.cause, decision.reason
        ),
    ));
    for change in decision.changes.iter().filter(|change| change.switched_ns > 0) {
        let what = format!("all participants of {} use epoch {}", change.communicator, change.epoch);
        events.push((change.switched_ns, what));
    }
    events
}

/// The decision that answers the flow. It is the first that was taken for a congestion report while the flow
/// lasted, and that came to use.
fn answer(seen: &Seen) -> Option<(&Noticed, u64)> {
    let [began, ended] = seen.flow_ns?;
    let mut during = seen.decisions.iter().filter(|decision| (began..ended).contains(&decision.at_ns));
    during.find_map(|decision| Some((decision.congestion_report.as_ref()?, decision.switched_ns()?)))
}

fn check_cross_traffic(seen: &Seen) -> Check {
    let found = seen.flow_ns.map(|[began, ended]| ended.saturating_sub(began) as f64 / 1e9);
    Check {
        what: "cross traffic ran over a spine of the training".to_owned(),
        passed: found.is_some_and(|seconds| seconds > 0.0),
        found: found.map_or(
            "none: control did not know the paths of all connections in time".to_owned(),
            |seconds| format!("{} Mbit/s over {} for {seconds:.1} s", seen.rate / 1_000_000, seen.spine),
        ),
        warns: false,
    }
}

fn check_left_spine(seen: &Seen) -> Check {
    let what =
        "a report from the wire moved connections off the spine that cross traffic congests, while it lasted";
    let [before, during, _] = seen.connections;
    let found = match (answer(seen), seen.flow_ns) {
        (Some((report, switched)), Some([began, _])) => {
            let since = |time: u64| time.saturating_sub(began) as f64 / 1e6;
            format!(
                "found by {} after {:.1} ms, all on the new plan after {:.1} ms; {before} connections over {}, then {during}",
                report.host,
                since(report.found_ns),
                since(switched),
                seen.spine
            )
        }
        (None, Some([began, ended])) => format!(
            "no plan was switched for a report in the {:.1} s of the flow; {before} connections over {}, then {during}",
            ended.saturating_sub(began) as f64 / 1e9,
            seen.spine
        ),
        _ => "there was no cross traffic".to_owned(),
    };
    Check { what: what.to_owned(), passed: answer(seen).is_some() && during < before, found, warns: false }
}

fn check_returned(seen: &Seen) -> Check {
    let [_, during, after] = seen.connections;
    let found = match (seen.back_ns, seen.flow_ns) {
        (Some(back), Some([_, ended])) => format!(
            "{after} connections over {} again {:.1} s after the flow's end",
            seen.spine,
            back.saturating_sub(ended) as f64 / 1e9
        ),
        (None, Some(_)) => format!(
            "not in the {:.1} s that were waited; {during} connections over {}, now {after}",
            seen.waited.as_secs_f64(),
            seen.spine
        ),
        _ => "there was no cross traffic".to_owned(),
    };
    let what = "connections cross the spine again once the cross traffic has ended".to_owned();
    Check { what, passed: seen.back_ns.is_some(), found, warns: false }
}

fn story(seen: &Seen) -> String {
    let Some([began, ended]) = seen.flow_ns else {
        return "There was no cross traffic: control did not know the paths of all connections in time."
            .to_owned();
    };
    let (spine, [before, during, _]) = (&seen.spine, seen.connections);
    let since = |time: u64| time.saturating_sub(began) as f64 / 1e6;
    let answered = answer(seen).map_or_else(
        || format!("No plan in use answered it in the {:.1} s that it lasted.", since(ended) / 1e3),
        |(report, switched)| {
            format!(
                "The agent of {} found it after {:.0} ms. After {:.0} ms every rank ran by a new plan: {before} connections \
                 crossed the spine before, {during} then.",
                report.host,
                since(report.found_ns),
                since(switched)
            )
        },
    );
    let returned = match seen.back_ns {
        Some(back) => {
            let after = back.saturating_sub(ended) as f64 / 1e9;
            format!("The cross traffic ended, and {after:.1} s later connections crossed the spine again.")
        }
        None => "Connections did not come back to the spine while that was waited for.".to_owned(),
    };
    format!(
        "A host without an agent sends {} Mbit/s to another over {spine}, which the training crosses. Nobody tells control. \
         The agents' programs in the kernel see what it does to their own connections. {answered} {returned}",
        seen.rate / 1_000_000
    )
}

/// A link's rates over longer stretches than it was read at.
fn stretched(load: &Load) -> Vec<(u64, f64)> {
    let mut kept: Vec<(u64, u64)> = Vec::new();
    for sample in &load.samples {
        if kept.last().is_none_or(|(at, _)| sample.0 >= at + STRETCH_NS) {
            kept.push(*sample);
        }
    }
    Load { samples: kept, ..load.clone() }.rates()
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_testkit::plans::{Change, CongestionReport};

    fn decision(at_ns: u64, switched_ns: u64) -> Decision {
        Decision {
            at_ns,
            cause: "h1 tells".into(),
            reason: "over spine1".into(),
            score_before_ppm: 1_500_000,
            score_after_ppm: 1_000_000,
            congestion_report: Some(CongestionReport {
                host: "h1".into(),
                finding: "severe, others".into(),
                found_ns: at_ns - 1_000_000,
                received_ns: at_ns - 500_000,
            }),
            changes: vec![Change {
                communicator: "c-1".into(),
                epoch: 2,
                sent_ns: at_ns,
                prepared_ns: at_ns,
                switched_ns,
                outcome: "in use".into(),
            }],
        }
    }

    fn seen(decisions: Vec<Decision>) -> Seen {
        let samples =
            (0..30).map(|number| (1_000_000_000 + number * 10_000_000, number * 1_000_000)).collect();
        Seen {
            spine: "spine0".into(),
            rate: 100_000_000,
            flow_ns: Some([1_100_000_000, 1_200_000_000]),
            communicator: "c-1".into(),
            connections: [2, 1, 2],
            back_ns: Some(1_250_000_000),
            waited: Duration::from_secs(1),
            decisions,
            loads: vec![
                Load { from: "spine0".into(), to: "leaf0".into(), samples: Vec::new() },
                Load { from: "leaf0".into(), to: "spine0".into(), samples },
            ],
        }
    }

    fn passed(seen: &Seen) -> Vec<bool> {
        let timeline = Timeline::of(seen, 1_000_000_000, 1_300_000_000);
        timeline.checks.iter().map(|check| check.passed).collect()
    }

    #[test]
    fn events_are_in_order_with_cross_traffic() {
        let seen = seen(vec![decision(1_120_000_000, 1_150_000_000)]);
        let timeline = Timeline::of(&seen, 1_000_000_000, 1_300_000_000);
        let events: Vec<(u64, &str)> = timeline
            .events
            .iter()
            .map(|event| ((event.at * 1e3).round() as u64, event.what.split(' ').next().unwrap()))
            .collect();
        assert_eq!(events, [(100, "cross"), (119, "h1"), (120, "control"), (150, "all"), (200, "the")]);
        assert_eq!(passed(&seen), [true; 3]);
        assert_eq!(timeline.spine.as_deref(), Some("spine0"));
        for told in
            ["100 Mbit/s", "agent of h1 found it after 19 ms", "After 50 ms", "2 connections", "0.1 s later"]
        {
            assert!(timeline.story.contains(told), "{told}: {}", timeline.story);
        }
        assert!(timeline.checks[1].found.contains("50.0 ms"), "{:?}", timeline.checks);
        assert!(
            timeline.checks[2].found.starts_with("2 connections over spine0 again 0.1 s"),
            "{:?}",
            timeline.checks
        );
        assert_eq!(timeline.epochs, [(0.0, 1.0), (0.15, 1.0), (0.15, 2.0), (0.3, 2.0)]);
        let [(name, points)] = timeline.loads.as_slice() else { panic!("links up alone") };
        assert_eq!((name.as_str(), points.len()), ("leaf0 to spine0", 2));
        assert!(points.iter().all(|(_, rate)| (rate - 800.0).abs() < 1e-6), "{points:?}");
    }

    #[test]
    fn missing_events_are_reported() {
        let in_time = || vec![decision(1_120_000_000, 1_150_000_000)];
        let late = vec![decision(1_250_000_000, 1_260_000_000)];
        for decisions in [vec![], late, vec![decision(1_120_000_000, 0)]] {
            assert_eq!(passed(&seen(decisions)), [true, false, true]);
        }
        assert_eq!(passed(&Seen { connections: [2, 2, 2], ..seen(in_time()) }), [true, false, true]);
        assert_eq!(passed(&Seen { back_ns: None, ..seen(in_time()) }), [true, true, false]);
        let none = Seen { flow_ns: None, back_ns: None, ..seen(in_time()) };
        assert_eq!(passed(&none), [false; 3]);
        let checks = Timeline::of(&none, 1_000_000_000, 1_300_000_000).checks;
        assert!(checks.iter().all(|check| !check.warns && check.label() == "FAILED"), "{checks:?}");
        assert!(story(&none).starts_with("There was no cross traffic"));
        assert_eq!(Timeline::of(&none, 1_000_000_000, 1_300_000_000).spine, None);
        let unanswered = story(&Seen { back_ns: None, ..seen(Vec::new()) });
        assert!(unanswered.contains("No plan in use answered it in the 0.1 s"), "{unanswered}");
        assert!(unanswered.contains("did not come back"), "{unanswered}");
    }
}
