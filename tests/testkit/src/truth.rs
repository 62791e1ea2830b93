//! What a training did, by its own log: beside a recorded trace it says what an analysis should have found.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;
use std::path::Path;

/// One iteration of one rank, in nanoseconds of CLOCK_MONOTONIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Iteration {
    /// When it began to compute.
    pub began_ns: u64,
    /// When it called its first AllReduce.
    pub called_ns: u64,
    /// When its last AllReduce was done.
    pub done_ns: u64,
}

/// Which library carried the training's AllReduces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Library {
    /// Gloo, through torch: external to the agents.
    Gloo,
    /// Ours: the agents carry it.
    Ours,
}

/// What was done to the training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Injection {
    /// A rank computes longer.
    Compute {
        /// Which.
        rank: usize,
        /// The first iteration that it does.
        from: usize,
        /// How much longer, in nanoseconds.
        by_ns: u64,
    },
    /// The link of a rank's host has become slower.
    Network {
        /// Whose.
        rank: usize,
        /// The first iteration that begins after it (of any rank).
        from: usize,
        /// When, in nanoseconds of CLOCK_MONOTONIC.
        at_ns: u64,
        /// Its rate since, in bits per second.
        bits_per_second: u64,
    },
}

/// A host and its end of the link to the switch. The ranks' hosts are in the order of the ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankLocation {
    /// Its name in the topology.
    pub host: String,
    /// Its address on the fabric.
    pub address: Ipv4Addr,
}

/// A training, its setting and its log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Truth {
    /// What carried it.
    pub library: Library,
    /// Where its ranks ran.
    pub places: Vec<RankLocation>,
    /// The rate of every link at the beginning, in bits per second.
    pub bits_per_second: u64,
    /// AllReduces of an iteration.
    pub buckets: usize,
    /// Bytes of each.
    pub bucket_bytes: u64,
    /// What was done to it.
    pub injections: Vec<Injection>,
    /// The log: by rank, then by iteration.
    pub ranks: Vec<Vec<Iteration>>,
}

/// A stretch of time, in nanoseconds of CLOCK_MONOTONIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Its beginning.
    pub began_ns: u64,
    /// Its end.
    pub ended_ns: u64,
}

/// How phases that were found agree with those of the log.
#[derive(Debug, Clone, PartialEq)]
pub struct Agreement {
    /// How many the log has.
    pub logged: usize,
    /// How many of these have a found phase that overlaps them; each found phase counts for one.
    pub matched: usize,
    /// How many were found that overlap none, or one that has another already.
    pub extra: usize,
    /// Found beginning less logged beginning, of those matched, in milliseconds.
    pub beginnings_ms: Vec<f64>,
    /// Found end less logged end, likewise.
    pub ends_ms: Vec<f64>,
}

impl Truth {
    /// Reads the JSON beside a trace.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let truth: Self = serde_json::from_str(&text)
            .with_context(|| format!("{} is not the truth of a trace", path.display()))?;
        ensure!(!truth.ranks.is_empty() && truth.ranks.len() == truth.places.len(), "a rank without a host");
        let iterations = truth.iterations();
        ensure!(iterations > 1, "less than two iterations tell no period");
        ensure!(truth.ranks.iter().all(|log| log.len() == iterations), "ranks of different length");
        Ok(truth)
    }

    /// How many iterations there were.
    pub fn iterations(&self) -> usize {
        self.ranks.iter().map(Vec::len).min().unwrap_or(0)
    }

    /// Each iteration's communication: from the first AllReduce that any rank called to the last that any rank saw done.
    pub fn phases(&self) -> Vec<Span> {
        let of = |number: usize| {
            let all = || self.ranks.iter().filter_map(move |log| log.get(number));
            let began_ns = all().map(|iteration| iteration.called_ns).min()?;
            let ended_ns = all().map(|iteration| iteration.done_ns).max()?;
            Some(Span { began_ns, ended_ns })
        };
        (0..self.iterations()).filter_map(of).collect()
    }

    /// By how much longer than the (lower) median rank a rank computed in an iteration. It is in nanoseconds, by the
    /// rank's own log.
    pub fn late_ns(&self, rank: usize, iteration: usize) -> Option<i64> {
        let computed = |log: &Vec<Iteration>| {
            let one = log.get(iteration)?;
            Some(one.called_ns.saturating_sub(one.began_ns).cast_signed())
        };
        let mut all: Vec<i64> = self.ranks.iter().map(computed).collect::<Option<_>>()?;
        let own = all.get(rank).copied()?;
        all.sort_unstable();
        Some(own - all.get((all.len() - 1) / 2)?)
    }

    /// The mean time from one iteration's beginning to the next's, in nanoseconds.
    pub fn period_ns(&self) -> Option<f64> {
        let log = self.ranks.first()?;
        let (first, last) = (log.first()?, log.last()?);
        let count = log.len().checked_sub(1).filter(|count| *count > 0)?;
        Some(last.began_ns.saturating_sub(first.began_ns) as f64 / count as f64)
    }
}

/// Holds found phases against logged ones; both in the order of time.
pub fn agree(logged: &[Span], found: &[Span]) -> Agreement {
    let mut agreement = Agreement {
        logged: logged.len(),
        matched: 0,
        extra: 0,
        beginnings_ms: Vec::new(),
        ends_ms: Vec::new(),
    };
    let mut taken = vec![false; logged.len()];
    for span in found {
        let overlap =
            |log: &Span| span.ended_ns.min(log.ended_ns).saturating_sub(span.began_ns.max(log.began_ns));
        let free = logged.iter().zip(&mut taken).filter(|(log, taken)| !**taken && overlap(log) > 0);
        let Some((log, taken)) = free.max_by_key(|(log, _)| overlap(log)) else {
            agreement.extra += 1;
            continue;
        };
        *taken = true;
        agreement.matched += 1;
        agreement.beginnings_ms.push(apart_ms(span.began_ns, log.began_ns));
        agreement.ends_ms.push(apart_ms(span.ended_ns, log.ended_ns));
    }
    agreement
}

fn apart_ms(found: u64, logged: u64) -> f64 {
    (found as f64 - logged as f64) / 1e6
}

/// Reads what a rank printed: a line of JSON an iteration, after one that says that it is connected.
pub fn log_of(printed: &str) -> Result<Vec<Iteration>> {
    let lines = printed.lines().filter(|line| line.starts_with("{\"") && line.contains("\"called_ns\""));
    let log: Vec<Iteration> = lines.map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(!log.is_empty(), "no iteration in: {printed}");
    Ok(log)
}

/// The iterations of a log that still grows: those whose lines are whole.
pub fn whole_log_of(log: &Path) -> Result<Vec<Iteration>> {
    let printed = std::fs::read_to_string(log).with_context(|| format!("cannot read {}", log.display()))?;
    let whole = printed.rfind('\n').and_then(|end| printed.get(..=end)).unwrap_or_default();
    let lines = whole.lines().filter(|line| line.starts_with("{\"") && line.contains("\"called_ns\""));
    Ok(lines.map(serde_json::from_str).collect::<Result<_, _>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn truth() -> Truth {
        let log = |shift: u64| {
            let iteration = move |number: u64| Iteration {
                began_ns: number * 50_000_000,
                called_ns: number * 50_000_000 + 20_000_000 + shift,
                done_ns: number * 50_000_000 + 40_000_000 + shift,
            };
            (0..3).map(iteration).collect()
        };
        Truth {
            library: Library::Gloo,
            places: [1, 2]
                .map(|last| RankLocation { host: format!("h{last}"), address: [10, 0, 0, last].into() })
                .to_vec(),
            bits_per_second: 1_000_000_000,
            buckets: 1,
            bucket_bytes: 4,
            injections: vec![Injection::Compute { rank: 1, from: 2, by_ns: 3 }],
            ranks: vec![log(0), log(1_000_000)],
        }
    }

    #[test]
    fn a_phase_spans_first_call_to_last_end() {
        let truth = truth();
        let phases = truth.phases();
        assert_eq!(phases.len(), 3);
        assert_eq!(phases[1], Span { began_ns: 70_000_000, ended_ns: 91_000_000 });
        assert_eq!(truth.period_ns(), Some(50e6));
    }

    #[test]
    fn lateness_is_extra_compute_time() {
        let mut truth = truth();
        assert_eq!([0, 1].map(|rank| truth.late_ns(rank, 2)), [Some(0), Some(1_000_000)]);
        truth.ranks[1][2].began_ns += 3_000_000;
        assert_eq!([0, 1].map(|rank| truth.late_ns(rank, 2)), [Some(2_000_000), Some(0)]);
        assert_eq!((truth.late_ns(2, 0), truth.late_ns(0, 3)), (None, None));
    }

    #[test]
    fn found_phases_count_once() {
        let logged = truth().phases();
        let off = |span: &Span, by: u64| Span { began_ns: span.began_ns + by, ended_ns: span.ended_ns };
        let found = [off(&logged[0], 500_000), off(&logged[0], 19_000_000), off(&logged[2], 0)];
        let agreement = agree(&logged, &found);
        assert_eq!((agreement.logged, agreement.matched, agreement.extra), (3, 2, 1));
        assert_eq!(agreement.beginnings_ms, [0.5, 0.0]);
        assert_eq!(agreement.ends_ms, [0.0, 0.0]);
    }

    #[test]
    fn what_is_written_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        std::fs::write(&path, serde_json::to_string(&truth()).unwrap()).unwrap();
        assert_eq!(Truth::read(&path).unwrap(), truth());
        let mut short = truth();
        short.ranks[1].pop();
        std::fs::write(&path, serde_json::to_string(&short).unwrap()).unwrap();
        assert!(Truth::read(&path).is_err());
    }

    #[test]
    fn a_ranks_lines_are_its_log() {
        let printed = "a warning\n{\"connected_ns\": 1}\n\
                       {\"iteration\": 0, \"began_ns\": 2, \"called_ns\": 3, \"done_ns\": 4}\n";
        assert_eq!(log_of(printed).unwrap(), [Iteration { began_ns: 2, called_ns: 3, done_ns: 4 }]);
        assert!(log_of("{\"connected_ns\": 1}\n").is_err());
    }
}
