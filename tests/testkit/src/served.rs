//! What became of the requests of a tenant that was promised their time, from what its ranks printed.

use crate::lines::Line;
use crate::summary::{Check, median};
use std::collections::BTreeMap;

/// What became of the requests.
#[derive(Debug, Default, PartialEq)]
pub struct Served {
    /// Milliseconds of each request, of the last rank that came; ascending.
    times: Vec<f64>,
    /// Milliseconds asked for, and promised; none where nothing was.
    promised: Option<(f64, f64)>,
    /// By the provider's measure: operations, late ones, and how often the promise ceased to be kept.
    compliance: Option<(u64, u64, u64)>,
    /// Whether the tenant was told that it is not kept.
    breach_notified: bool,
}

impl Served {
    /// Of what the ranks that answer them printed, the one that agreed on a target first.
    pub fn of(all: &[Vec<Line>]) -> Self {
        let first = all.first().map(Vec::as_slice).unwrap_or_default();
        let mut requests: BTreeMap<u64, u64> = BTreeMap::new();
        for line in all.iter().flatten() {
            if let Line::Served { request, collective_us, .. } = line {
                let least = requests.entry(*request).or_insert(*collective_us);
                *least = (*least).min(*collective_us);
            }
        }
        let mut times: Vec<f64> = requests.into_values().map(|time| time as f64 / 1e3).collect();
        times.sort_by(f64::total_cmp);
        let mut served = Self { times, ..Self::default() };
        for line in first {
            match line {
                Line::Promised { requested_us: asked_us, p99_us, .. } if *p99_us > 0 => {
                    served.promised = Some((*asked_us as f64 / 1e3, *p99_us as f64 / 1e3));
                }
                Line::Compliance { operations, late, breaches, .. } => {
                    served.compliance = Some((*operations, *late, *breaches));
                }
                Line::Notified { agreement_broken, .. } => served.breach_notified |= *agreement_broken,
                _ => {}
            }
        }
        served
    }

    /// How many requests were answered.
    pub fn requests(&self) -> usize {
        self.times.len()
    }

    fn p99(&self) -> f64 {
        let place = (self.times.len() * 99).div_ceil(100).saturating_sub(1);
        self.times.get(place).copied().unwrap_or(f64::NAN)
    }

    /// Whether something was promised.
    pub fn is_promised(&self) -> bool {
        self.promised.is_some()
    }

    /// Whether it was kept, as its tenant measured it.
    pub fn is_met(&self) -> bool {
        self.promised.is_some_and(|(_, promised)| self.p99() <= promised)
    }

    /// How often it ceased to be kept by the provider's measure.
    fn breaches(&self) -> u64 {
        self.compliance.map_or(0, |(_, _, breaches)| breaches)
    }

    /// Whether it ceased to be kept by the provider's measure, and its tenant was told.
    pub fn is_reported(&self) -> bool {
        self.promised.is_some() && self.breaches() > 0 && self.breach_notified
    }

    /// Whether one side alone knows that it ceased to be kept. What its tenant alone measured is not that: its process' own turns count there.
    pub fn is_silent_breach(&self) -> bool {
        self.promised.is_some() && (self.breaches() > 0) != self.breach_notified
    }

    /// In a sentence.
    pub fn describe(&self) -> String {
        match self.promised {
            Some((_, promised)) => format!(
                "promised {promised:.1} ms, p99 of {} requests {:.1} ms{}",
                self.times.len(),
                self.p99(),
                if self.is_reported() { ", and its tenant was told of a breach" } else { "" }
            ),
            None => format!("nothing promised, p99 {:.1} ms", self.p99()),
        }
    }

    /// Names and values for people.
    pub fn figures(&self) -> Vec<(String, String)> {
        let row = |what: &str, figure: String| (what.to_owned(), figure);
        let promised = match self.promised {
            Some((asked, promised)) => format!("{promised:.1} ms (asked for {asked:.1} ms)"),
            None => "nothing".to_owned(),
        };
        let (operations, late, breaches) = self.compliance.unwrap_or_default();
        vec![
            row("Requests", self.times.len().to_string()),
            row("p99 promised", promised),
            row("p50", format!("{:.1} ms", median(self.times.clone()))),
            row("p99", format!("{:.1} ms", self.p99())),
            row("Late by the provider's measure", format!("{late} of {operations}")),
            row("Times that the promise ceased to be kept", breaches.to_string()),
        ]
    }

    /// Whether what was promised was kept, or its breach reported.
    pub fn check(&self) -> Check {
        // What is broken is told; that it happens, on a machine that is busy otherwise, is no fault of the demo's.
        let what = "99 of 100 requests of tenant C were answered as fast as promised, or it was told that they are not";
        let found = match self.promised {
            Some((_, promised)) => {
                let reported = match (self.is_reported(), self.is_silent_breach()) {
                    (true, _) => ", and both sides know",
                    (false, true) => ", and one side alone knows",
                    (false, false) => "",
                };
                format!("p99 {:.1} ms, promised {promised:.1} ms{reported}", self.p99())
            }
            None => "nothing was promised".to_owned(),
        };
        let passed = self.is_met() && self.breaches() == 0;
        Check { what: what.to_owned(), passed, found, warns: !self.is_silent_breach() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::summary::{Printed, judge};

    fn inference(slow_us: u64, told: bool) -> Vec<Vec<Line>> {
        let serve = |request| Line::Served {
            at_us: 1,
            request,
            collective_us: if request < 3 { slow_us } else { 4_000 },
        };
        let late: Vec<Line> =
            (0..200).map(|request| Line::Served { at_us: 1, request, collective_us: 90_000 }).collect();
        let mut first = vec![Line::Promised { at_us: 1, requested_us: 10_000, p99_us: 20_000 }];
        first.extend((0..200).map(serve));
        if told {
            first.push(Line::Notified { at_us: 2_000_000, what: String::new(), agreement_broken: false });
            first.push(Line::Notified { at_us: 3_000_000, what: String::new(), agreement_broken: true });
        }
        first.push(Line::Compliance { at_us: 1, operations: 200, late: 3, breaches: u64::from(told) });
        vec![first, late]
    }

    #[test]
    fn a_promise_is_met_or_reported() {
        let judged = |printed: &[Vec<Line>]| {
            let check = Served::of(printed).check();
            (check.passed, check.warns)
        };
        assert_eq!(judged(&inference(4_000, false)), (true, true));
        assert_eq!(judged(&inference(30_000, true)), (false, true), "both know: a warning");
        assert_eq!(
            judged(&inference(30_000, false)),
            (false, true),
            "by the tenant's own measure alone: a warning"
        );
        assert_eq!(judged(&[]), (false, true), "nothing was promised");
        // The provider knew, and said nothing; or the tenant was told what the provider does not stand by.
        let mut silent = inference(4_000, true);
        silent[0].retain(|line| !matches!(line, Line::Notified { .. }));
        assert_eq!(judged(&silent), (false, false));
        let mut denied = inference(30_000, true);
        denied[0].retain(|line| !matches!(line, Line::Compliance { .. }));
        assert_eq!(judged(&denied), (false, false));
    }

    #[test]
    fn a_silent_breach_fails_the_demo() {
        let lines = |at| Line::Step {
            at_us: at,
            step: 0,
            loss: 1.0,
            bytes: 1,
            collective_us: 1,
            copies_us: 1,
            compute_us: 1,
            wire_bytes: 1,
            algorithm: String::new(),
            correct: None,
        };
        let trained = || Line::Trained { at_us: 3, correct: 1, tested: 1, digest: "d".into() };
        let worker = vec![Line::Start { at_us: 1, rank: 0, ranks: 1 }, lines(2), trained()];
        let printed = Printed {
            workers: vec![worker.clone()],
            reference: worker,
            workers_per_host: 1,
            ..Default::default()
        };
        for (says, passed) in [(true, true), (false, false)] {
            let mut served = inference(30_000, true);
            served[0].retain(|line| says || !matches!(line, Line::Notified { .. }));
            let mut summary = judge(&printed, 1, 1e9).unwrap();
            summary.add_check(Served::of(&served).check());
            assert_eq!(summary.passed, passed, "{:?}", summary.checks);
        }
    }
}
