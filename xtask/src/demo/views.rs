//! What the provider saw and did, beside what each tenant was told of it.

use super::lines::Line;
use super::timeline::Timeline;
use super::verdict::{Check, median};
use std::collections::BTreeMap;

/// Something that was seen, done or told.
#[derive(Debug, Clone, PartialEq)]
pub struct View {
    /// Seconds since the training began.
    pub at: f64,
    /// By or to whom: 0 for the provider, 1 for the tenant that trains, 2 for the one that answers requests.
    pub whose: usize,
    /// What.
    pub what: String,
}

/// All of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Views {
    /// In the order of their times.
    pub views: Vec<View>,
    /// Of the tenant that answers requests: what, figure.
    pub figures: Vec<(String, String)>,
    /// Whether what was promised to it was kept, or its breach reported.
    pub check: Check,
}

impl Views {
    /// Of the provider's timeline, and of what the first worker of the training and the ranks that answer requests have printed.
    pub fn of(timeline: &Timeline, training: &[Line], inference: &[Vec<Line>], began_us: u64) -> Self {
        let provider =
            timeline.events.iter().map(|event| View { at: event.at, whose: 0, what: event.what.clone() });
        let first = inference.first().map(Vec::as_slice).unwrap_or_default();
        let told = |whose: usize, lines: &[Line]| -> Vec<View> {
            let told = lines.iter().filter_map(|line| match line {
                Line::Told { at_us, what } => Some((*at_us, what.clone())),
                _ => None,
            });
            told.map(|(at_us, what)| View { at: (at_us as f64 - began_us as f64) / 1e6, whose, what })
                .collect()
        };
        let mut views: Vec<View> = provider.chain(told(1, training)).chain(told(2, first)).collect();
        views.sort_by(|one, other| one.at.total_cmp(&other.at));
        let served = Served::of(inference);
        Self { views, figures: served.figures(), check: served.check() }
    }
}

/// What became of the requests.
#[derive(Debug, Default, PartialEq)]
pub struct Served {
    /// Milliseconds of each request, of the last rank that came; ascending.
    times: Vec<f64>,
    /// Milliseconds asked for, and promised; none where nothing was.
    promised: Option<(f64, f64)>,
    /// By the provider's measure: operations, late ones, and how often the promise ceased to be kept.
    kept: Option<(u64, u64, u64)>,
    /// Whether the tenant was told that it is not kept.
    told: bool,
}

impl Served {
    /// Of what the ranks that answer them printed, the one that agreed on a target first.
    pub fn of(all: &[Vec<Line>]) -> Self {
        let first = all.first().map(Vec::as_slice).unwrap_or_default();
        let mut requests: BTreeMap<u64, u64> = BTreeMap::new();
        for line in all.iter().flatten() {
            if let Line::Served { request, collective_us } = line {
                let least = requests.entry(*request).or_insert(*collective_us);
                *least = (*least).min(*collective_us);
            }
        }
        let mut times: Vec<f64> = requests.into_values().map(|time| time as f64 / 1e3).collect();
        times.sort_by(f64::total_cmp);
        let mut served = Self { times, ..Self::default() };
        for line in first {
            match line {
                Line::Promised { asked_us, p99_us } if *p99_us > 0 => {
                    served.promised = Some((*asked_us as f64 / 1e3, *p99_us as f64 / 1e3));
                }
                Line::Kept { operations, late, breaches } => {
                    served.kept = Some((*operations, *late, *breaches));
                }
                Line::Told { what, .. } => served.told |= what.contains("AgreementBroken"),
                _ => {}
            }
        }
        served
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
    pub fn is_kept(&self) -> bool {
        self.promised.is_some_and(|(_, promised)| self.p99() <= promised)
    }

    /// How often it ceased to be kept by the provider's measure.
    fn breaches(&self) -> u64 {
        self.kept.map_or(0, |(_, _, breaches)| breaches)
    }

    /// Whether it ceased to be kept by the provider's measure, and its tenant was told.
    pub fn is_reported(&self) -> bool {
        self.promised.is_some() && self.breaches() > 0 && self.told
    }

    /// Whether one side alone knows that it ceased to be kept. What its tenant alone measured is not that: its process' own turns count there.
    pub fn is_broken_in_silence(&self) -> bool {
        self.promised.is_some() && (self.breaches() > 0) != self.told
    }

    /// In a sentence.
    pub fn told_in_words(&self) -> String {
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

    fn figures(&self) -> Vec<(String, String)> {
        let row = |what: &str, figure: String| (what.to_owned(), figure);
        let promised = match self.promised {
            Some((asked, promised)) => format!("{promised:.1} ms (asked for {asked:.1} ms)"),
            None => "nothing".to_owned(),
        };
        let (operations, late, breaches) = self.kept.unwrap_or_default();
        vec![
            row("Requests", self.times.len().to_string()),
            row("p99 promised", promised),
            row("p50", format!("{:.1} ms", median(self.times.clone()))),
            row("p99", format!("{:.1} ms", self.p99())),
            row("Late by the provider's measure", format!("{late} of {operations}")),
            row("Times that the promise ceased to be kept", breaches.to_string()),
        ]
    }

    fn check(&self) -> Check {
        // What is broken is told; that it happens, on a machine that is busy otherwise, is no fault of the demo's.
        let what = "99 of 100 requests of tenant C were answered as fast as promised, or it was told that they are not";
        let found = match self.promised {
            Some((_, promised)) => {
                let reported = match (self.is_reported(), self.is_broken_in_silence()) {
                    (true, _) => ", and both sides know",
                    (false, true) => ", and one side alone knows",
                    (false, false) => "",
                };
                format!("p99 {:.1} ms, promised {promised:.1} ms{reported}", self.p99())
            }
            None => "nothing was promised".to_owned(),
        };
        let passed = self.is_kept() && self.breaches() == 0;
        Check { what: what.to_owned(), passed, found, warns: !self.is_broken_in_silence() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::timeline::Event;
    use super::*;

    fn timeline() -> Timeline {
        let events = vec![Event { at: 1.5, what: "control plans anew".into() }];
        Timeline { story: String::new(), events, loads: vec![], epochs: vec![], checks: vec![] }
    }

    fn inference(slow_us: u64, told: bool) -> Vec<Vec<Line>> {
        let serve =
            |request| Line::Served { request, collective_us: if request < 3 { slow_us } else { 4_000 } };
        let late: Vec<Line> =
            (0..200).map(|request| Line::Served { request, collective_us: 90_000 }).collect();
        let mut first = vec![Line::Promised { asked_us: 10_000, p99_us: 20_000 }];
        first.extend((0..200).map(serve));
        if told {
            let what = "AgreementBroken { clauses: [Completion(0)] }".to_owned();
            first.push(Line::Told { at_us: 3_000_000, what });
        }
        first.push(Line::Kept { operations: 200, late: 3, breaches: u64::from(told) });
        vec![first, late]
    }

    #[test]
    fn what_was_told_stands_beside_what_was_done() {
        let training = [Line::Told { at_us: 2_000_000, what: "PlanChanged".into() }];
        let views = Views::of(&timeline(), &training, &inference(4_000, true), 1_000_000).views;
        let seen: Vec<(f64, usize)> = views.iter().map(|view| (view.at, view.whose)).collect();
        assert_eq!(seen, [(1.0, 1), (1.5, 0), (2.0, 2)]);
    }

    #[test]
    fn a_promise_is_kept_or_its_breach_is_told() {
        let judged = |printed: &[Vec<Line>]| {
            let check = Views::of(&timeline(), &[], printed, 0).check;
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
        silent[0].retain(|line| !matches!(line, Line::Told { .. }));
        assert_eq!(judged(&silent), (false, false));
        let mut denied = inference(30_000, true);
        denied[0].retain(|line| !matches!(line, Line::Kept { .. }));
        assert_eq!(judged(&denied), (false, false));
    }

    #[test]
    fn a_breach_that_nobody_was_told_of_fails_the_demo() {
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
        };
        let trained = || Line::Trained { at_us: 3, correct: 1, tested: 1, digest: "d".into() };
        let worker = vec![Line::Start { at_us: 1, rank: 0, ranks: 1 }, lines(2), trained()];
        let printed = super::super::verdict::Printed {
            workers: vec![worker.clone()],
            reference: worker,
            workers_per_host: 1,
            ..Default::default()
        };
        for (says, passed) in [(true, true), (false, false)] {
            let mut served = inference(30_000, true);
            served[0].retain(|line| says || !matches!(line, Line::Told { .. }));
            let mut verdict = super::super::verdict::judge(&printed, 1, 1e9).unwrap();
            verdict.hold(Views::of(&timeline(), &[], &served, 0).check);
            assert_eq!(verdict.passed, passed, "{:?}", verdict.checks);
        }
    }
}
