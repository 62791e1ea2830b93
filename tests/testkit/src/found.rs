//! What the analysis finds in recorded traces: the lines that the program `replay` prints.

use crate::job::printed;
use crate::truth::{Agreement, Injection, Span, Truth, agree};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Why a rank holds the others up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// It starts late.
    Compute,
    /// Its bytes move late.
    Network,
}

/// A finding. Times are nanoseconds of CLOCK_MONOTONIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "found")]
pub enum Found {
    /// The communication of an iteration of an external job.
    Phase {
        /// The job's number.
        job: u64,
        /// The iteration's.
        iteration: u64,
        /// When its first bytes passed.
        began_ns: u64,
        /// When its last did.
        ended_ns: u64,
    },
    /// An own operation, over all ranks that were seen.
    Operation {
        /// The communicator's number.
        communicator: u64,
        /// The operation's.
        operation: u64,
        /// By rank: when it called and when it had the result.
        ranks: Vec<(u32, u64, u64)>,
    },
    /// A rank that holds the others up, found or over.
    Straggler {
        /// Whether it is of an external job, else of an own communicator.
        foreign: bool,
        /// The host that it is on, where that is known; else its rank tells.
        host: Option<IpAddr>,
        /// The rank, of an own communicator.
        rank: usize,
        /// Why.
        kind: Kind,
        /// The slow edge that it is an end of: addresses of an external job's hosts, ranks of an own communicator.
        edge: Option<(String, String)>,
        /// When it was found, or found to be over.
        found_ns: u64,
        /// By how much.
        delay_ns: u64,
        /// Whether it is over.
        over: bool,
    },
    /// A link's state, or its cause, has changed.
    Congestion {
        /// The interface's index.
        interface: u32,
        /// Whether bytes leave there that are held up, else they come in.
        leaving: bool,
        /// Whether it is the link as a whole.
        whole: bool,
        /// none, mild, severe.
        state: String,
        /// unknown, own, others.
        cause: String,
        /// When it was found.
        found_ns: u64,
    },
}

/// Replays traces, of one host or several, from one time to another.
pub fn replay(program: &Path, traces: &[PathBuf], window: Span) -> Result<Vec<Found>> {
    let mut command = Command::new(program);
    command.args(["--from-ns", &window.began_ns.to_string(), "--to-ns", &window.ended_ns.to_string()]);
    let text = printed(command.args(traces))?;
    let lines = text.lines().filter(|line| line.starts_with('{'));
    lines.map(|line| serde_json::from_str(line).with_context(|| format!("a strange line: {line}"))).collect()
}

/// The phases of the job that has most of them, by their time.
pub fn phases(found: &[Found]) -> Vec<Span> {
    let mut jobs = std::collections::BTreeMap::<u64, Vec<Span>>::new();
    for one in found {
        if let Found::Phase { job, began_ns, ended_ns, .. } = one {
            let span = Span { began_ns: *began_ns, ended_ns: *ended_ns };
            jobs.entry(*job).or_default().push(span);
        }
    }
    let mut phases = jobs.into_values().max_by_key(Vec::len).unwrap_or_default();
    phases.sort_by_key(|span| span.began_ns);
    phases
}

/// Holds what was found against the log from an iteration on.
pub fn compare(truth: &Truth, found: &[Span], from: usize) -> Agreement {
    let logged = truth.phases();
    let logged = logged.get(from..).unwrap_or_default();
    let earliest = logged.first().map_or(0, |span| span.began_ns);
    let found: Vec<Span> = found.iter().copied().filter(|span| span.ended_ns > earliest).collect();
    agree(logged, &found)
}

/// Found period over logged period, less 1, in percent, over the same iterations.
pub fn period_error(truth: &Truth, found: &[Span], from: usize) -> Option<f64> {
    let logged = truth.phases();
    let (first, last) = (logged.get(from)?, logged.last()?);
    let near = |span: &Span| found.iter().min_by_key(|other| other.began_ns.abs_diff(span.began_ns));
    let (found_first, found_last) = (near(first)?, near(last)?);
    let logged = last.began_ns.checked_sub(first.began_ns).filter(|length| *length > 0)?;
    let found = found_last.began_ns.checked_sub(found_first.began_ns)?;
    Some((found as f64 / logged as f64 - 1.0) * 100.0)
}

/// What is wrong with the findings on a training's ranks; nothing if they are right, and each in time.
///
/// A slow link lies between its host and the switch, and in a ring it slows the edge into the host: which of the edge's ends
/// is at fault cannot be told by times alone. So a finding on the network may name the host or an edge that ends there.
///
/// A finding tells of what was injected if it was made since, or stood then and the log bore it out when it was made. Any other is a
/// false alarm, whomever it names.
///
/// What was injected is not all that happens on a busy machine, where processes wait for cores too. The training's own log says
/// what a rank computed: an iteration in which a slow worker was not late, because others were, does not count for it, and a
/// finding on a rank that was late in each of the last `within` iterations, by half of what the finding says in their mean and by a
/// quarter of it in each, is no false alarm.
pub fn errors(truth: &Truth, found: &[Found], within: usize) -> Vec<String> {
    let phases = truth.phases();
    let findings = straggler_findings(truth, found);
    let borne_out = |one: &StragglerFinding| is_confirmed(truth, &phases, one, within);
    let mut wrong = Vec::new();
    for injection in &truth.injections {
        let (rank, kind, since_ns) = begun(truth, injection);
        let last = match *injection {
            Injection::Compute { rank, from, by_ns } => {
                let mut late = (from..phases.len()).filter(|at| is_late(truth, rank, *at, by_ns));
                late.nth(within.saturating_sub(1)).map_or(phases.len(), |at| at + 1)
            }
            Injection::Network { from, .. } => from + within,
        };
        // In time: before the iteration after the last that it may take communicates.
        let deadline = phases.get(last).or(phases.last()).map_or(u64::MAX, |span| span.began_ns);
        let tells = |one: &&StragglerFinding| {
            let stands = || one.until_ns > since_ns && borne_out(one);
            one.names(rank, kind) && (one.found_ns >= since_ns || stands())
        };
        match findings.iter().find(tells) {
            None => wrong.push(format!("{kind:?} at rank {rank} was not found")),
            Some(one) if one.found_ns > deadline => {
                let late = (one.found_ns - deadline) as f64 / 1e6;
                wrong.push(format!(
                    "{kind:?} at rank {rank} was found {late:.1} ms after {within} iterations"
                ));
            }
            Some(_) => {}
        }
    }
    wrong.extend(false_alarms(truth, found, within));
    wrong
}

/// Whom an injection slows down, how, and since when.
fn begun(truth: &Truth, injection: &Injection) -> (usize, Kind, u64) {
    match *injection {
        Injection::Compute { rank, from, .. } => {
            let began = truth.ranks.get(rank).and_then(|log| log.get(from));
            (rank, Kind::Compute, began.map_or(u64::MAX, |iteration| iteration.began_ns))
        }
        Injection::Network { rank, at_ns, .. } => (rank, Kind::Network, at_ns),
    }
}

/// The false alarms among the findings on a training's ranks, as [`errors`] tells them.
pub fn false_alarms(truth: &Truth, found: &[Found], within: usize) -> Vec<String> {
    let phases = truth.phases();
    let expected: Vec<_> = truth.injections.iter().map(|injection| begun(truth, injection)).collect();
    let mut wrong = Vec::new();
    for one in straggler_findings(truth, found) {
        let tells = |(rank, kind, since_ns): &(usize, Kind, u64)| {
            one.names(*rank, *kind) && one.found_ns >= *since_ns
        };
        if expected.iter().any(tells) || is_confirmed(truth, &phases, &one, within) {
            continue;
        }
        let lately = iterations(&phases, &one, within);
        let iteration = lately.end;
        let (kind, rank, by) = (one.kind, one.rank, one.delay_ns as f64 / 1e6);
        let logged: Vec<f64> = lately.filter_map(|at| Some(truth.late_ns(rank?, at)? as f64 / 1e6)).collect();
        wrong.push(format!(
            "{kind:?} at rank {rank:?} by {by:.1} ms in iteration {iteration} is a false alarm (by its log late by {logged:.1?})"
        ));
    }
    wrong
}

/// Whether a rank was late in an iteration, by its log, by half of a time or more.
fn is_late(truth: &Truth, rank: usize, iteration: usize, by_ns: u64) -> bool {
    truth.late_ns(rank, iteration).is_some_and(|late| late >= (by_ns / 2).cast_signed())
}

/// The iterations of which a finding tells: the last that had begun.
fn iterations(phases: &[Span], one: &StragglerFinding, within: usize) -> std::ops::Range<usize> {
    let iteration = phases.iter().filter(|span| span.began_ns <= one.found_ns).count();
    iteration.saturating_sub(within)..iteration
}

/// Whether the log says of the rank what the finding does.
fn is_confirmed(truth: &Truth, phases: &[Span], one: &StragglerFinding, within: usize) -> bool {
    let Some(rank) = one.rank.filter(|_| one.kind == Kind::Compute) else { return false };
    let lately = iterations(phases, one, within);
    let late = || lately.clone().filter_map(|at| truth.late_ns(rank, at));
    let (least, by_ns) = (late().min().unwrap_or_default(), one.delay_ns.cast_signed());
    least >= (by_ns / 4).max(1) && late().sum::<i64>() * 2 >= by_ns * lately.len() as i64
}

/// A rank that was said to hold the others up.
#[derive(Debug, Clone)]
struct StragglerFinding {
    rank: Option<usize>,
    kind: Kind,
    /// Of a slow edge.
    ends: Vec<usize>,
    found_ns: u64,
    /// When it was found to be over.
    until_ns: u64,
    delay_ns: u64,
}

/// All that were made, in their order.
fn straggler_findings(truth: &Truth, found: &[Found]) -> Vec<StragglerFinding> {
    let placed = |host: IpAddr| truth.places.iter().position(|place| IpAddr::V4(place.address) == host);
    let end = |text: &String| text.parse().map_or_else(|_| text.parse().ok(), placed);
    let mut findings: Vec<StragglerFinding> = Vec::new();
    for one in found {
        let Found::Straggler { host, rank, kind, edge, found_ns, delay_ns: by_ns, over, .. } = one else {
            continue;
        };
        let rank = host.map_or(Some(*rank), placed);
        if *over {
            let mut standing = findings.iter_mut().rev().filter(|one| (one.rank, one.kind) == (rank, *kind));
            if let Some(standing) = standing.next() {
                standing.until_ns = *found_ns;
            }
            continue;
        }
        let ends = edge.iter().flat_map(|(from, to)| [from, to]).filter_map(end).collect();
        let (found_ns, by_ns) = (*found_ns, *by_ns);
        findings.push(StragglerFinding {
            rank,
            kind: *kind,
            ends,
            found_ns,
            until_ns: u64::MAX,
            delay_ns: by_ns,
        });
    }
    findings
}

impl StragglerFinding {
    /// Whether it is about this rank.
    fn names(&self, rank: usize, kind: Kind) -> bool {
        self.kind == kind && (self.rank == Some(rank) || self.ends.contains(&rank))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::truth::{Iteration, Library, RankLocation};

    fn truth(injections: Vec<Injection>) -> Truth {
        let iteration = |number: u64| Iteration {
            began_ns: number * 100,
            called_ns: number * 100 + 40,
            done_ns: number * 100 + 80,
        };
        let log: Vec<Iteration> = (0..10).map(iteration).collect();
        Truth {
            library: Library::Gloo,
            places: [1, 2]
                .map(|last| RankLocation { host: format!("h{last}"), address: [10, 0, 0, last].into() })
                .to_vec(),
            bits_per_second: 1,
            buckets: 1,
            bucket_bytes: 4,
            injections,
            ranks: vec![log.clone(), log],
        }
    }

    fn straggler(last: u8, kind: Kind, found_ns: u64) -> Found {
        let host = IpAddr::from([10, 0, 0, last]);
        Found::Straggler {
            foreign: true,
            host: Some(host),
            rank: 9,
            kind,
            edge: None,
            found_ns,
            delay_ns: 5,
            over: false,
        }
    }

    #[test]
    fn a_finding_must_match_rank_kind_and_time() {
        let mut truth = truth(vec![Injection::Compute { rank: 1, from: 4, by_ns: 9 }]);
        for iteration in &mut truth.ranks[1][4..] {
            iteration.began_ns -= 9;
        }
        assert_eq!(errors(&truth, &[straggler(2, Kind::Compute, 680)], 3), Vec::<String>::new());
        assert_eq!(errors(&truth, &[straggler(2, Kind::Compute, 741)], 3).len(), 1);
        assert_eq!(errors(&truth, &[], 3).len(), 1);
        assert_eq!(errors(&truth, &[straggler(1, Kind::Compute, 680)], 3).len(), 2);
        assert_eq!(errors(&truth, &[straggler(2, Kind::Network, 680)], 3).len(), 2);
        // In one of the iterations another rank was as late: there was nothing to see.
        truth.ranks[0][5].began_ns -= 9;
        assert_eq!(errors(&truth, &[straggler(2, Kind::Compute, 741)], 3), Vec::<String>::new());
    }

    #[test]
    fn a_finding_before_the_injection_is_false() {
        let mut truth = truth(vec![Injection::Compute { rank: 1, from: 4, by_ns: 9 }]);
        for iteration in &mut truth.ranks[1][4..] {
            iteration.began_ns -= 9;
        }
        let early = straggler(2, Kind::Compute, 390);
        let said = errors(&truth, std::slice::from_ref(&early), 3);
        assert!(said.len() == 2 && said[0].contains("was not found"), "{said:?}");
        let later = straggler(2, Kind::Compute, 680);
        let both = [early.clone(), later.clone()];
        assert_eq!((errors(&truth, &both, 3).len(), false_alarms(&truth, &both, 3).len()), (1, 1));
        assert_eq!(false_alarms(&truth, &both[1..], 3), Vec::<String>::new());
        // By its own log it was late then: what stands until the injection tells of it, what does not does not.
        for iteration in &mut truth.ranks[1][1..4] {
            iteration.began_ns -= 9;
        }
        assert_eq!(errors(&truth, std::slice::from_ref(&early), 3), Vec::<String>::new());
        let over = |found_ns| match straggler(2, Kind::Compute, found_ns) {
            Found::Straggler { foreign, host, rank, kind, edge, found_ns, delay_ns: by_ns, .. } => {
                Found::Straggler { foreign, host, rank, kind, edge, found_ns, delay_ns: by_ns, over: true }
            }
            other => other,
        };
        assert_eq!(errors(&truth, &[early.clone(), over(391)], 3).len(), 1);
        assert_eq!(errors(&truth, &[early, over(391), later], 3), Vec::<String>::new());
        let narrowed = Injection::Network { rank: 1, from: 4, at_ns: 390, bits_per_second: 1 };
        truth.injections = vec![narrowed];
        assert_eq!(errors(&truth, &[straggler(2, Kind::Network, 380)], 3).len(), 2);
    }

    #[test]
    fn a_finding_confirmed_by_the_log_stands() {
        let mut truth = truth(Vec::new());
        let finding = [straggler(2, Kind::Compute, 680)];
        assert_eq!(errors(&truth, &finding, 3).len(), 1);
        for iteration in &mut truth.ranks[1][4..7] {
            iteration.began_ns -= 3;
        }
        assert_eq!(errors(&truth, &finding, 3), Vec::<String>::new());
        assert_eq!(errors(&truth, &[straggler(1, Kind::Compute, 680)], 3).len(), 1);
        truth.ranks[1][5].began_ns += 3;
        assert_eq!(errors(&truth, &finding, 3).len(), 1);
    }

    #[test]
    fn a_slow_link_may_be_its_ingress_edge() {
        let truth = truth(vec![Injection::Network { rank: 1, from: 4, at_ns: 390, bits_per_second: 1 }]);
        let named = |edge: Option<(&str, &str)>| Found::Straggler {
            foreign: edge.is_some_and(|(from, _)| from.contains('.')),
            host: None,
            rank: 0,
            kind: Kind::Network,
            edge: edge.map(|(from, to)| (from.to_owned(), to.to_owned())),
            found_ns: 680,
            delay_ns: 5,
            over: false,
        };
        assert_eq!(errors(&truth, &[named(Some(("0", "1")))], 3), Vec::<String>::new());
        assert_eq!(errors(&truth, &[named(Some(("10.0.0.1", "10.0.0.2")))], 3), Vec::<String>::new());
        assert_eq!(errors(&truth, &[named(None)], 3).len(), 2);
        assert_eq!(errors(&truth, &[named(Some(("0", "2")))], 3).len(), 2);
    }

    #[test]
    fn the_largest_job_is_compared_with_the_log() {
        let truth = truth(Vec::new());
        let phase = |job: u64, iteration: u64, off: u64| Found::Phase {
            job,
            iteration,
            began_ns: iteration * 100 + 40 + off,
            ended_ns: iteration * 100 + 80,
        };
        let mut found: Vec<Found> = (0..10).map(|iteration| phase(7, iteration, 1)).collect();
        found.push(phase(8, 3, 0));
        let spans = phases(&found);
        let agreement = compare(&truth, &spans, 2);
        assert_eq!((agreement.logged, agreement.matched, agreement.extra), (8, 8, 0));
        assert_eq!(period_error(&truth, &spans, 2), Some(0.0));
        assert_eq!(period_error(&truth, &[], 2), None);
    }

    #[test]
    fn lines_of_the_program_are_read() {
        let lines = [
            r#"{"found":"phase","job":1,"iteration":2,"began_ns":3,"ended_ns":4}"#,
            r#"{"found":"operation","communicator":1,"operation":2,"ranks":[[0,1,2]]}"#,
            r#"{"found":"straggler","foreign":true,"host":"10.0.0.2","rank":1,"kind":"network","edge":["10.0.0.1","10.0.0.2"],"found_ns":1,"delay_ns":2,"over":false}"#,
            r#"{"found":"congestion","interface":2,"leaving":true,"whole":true,"state":"mild","cause":"own","found_ns":9}"#,
        ];
        for line in lines {
            serde_json::from_str::<Found>(line).unwrap();
        }
    }
}
