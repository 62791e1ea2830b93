//! What the provider saw and did, beside what each tenant was told of it.

use super::timeline::Timeline;
use harmonaize_testkit::lines::Line;
use harmonaize_testkit::served::Served;
use harmonaize_testkit::summary::Check;

/// Something that was seen, done or told.
#[derive(Debug, Clone, PartialEq)]
pub struct View {
    /// Seconds since the training began.
    pub at: f64,
    /// By or to whom. 0 is the provider, 1 the tenant that trains, 2 the one that answers requests.
    pub owner: usize,
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
    /// Views of the provider's timeline, and of what workers have printed. These are the first worker of the training and the
    /// ranks that answer requests.
    pub fn of(timeline: &Timeline, training: &[Line], inference: &[Vec<Line>], began_us: u64) -> Self {
        let provider =
            timeline.events.iter().map(|event| View { at: event.at, owner: 0, what: event.what.clone() });
        let first = inference.first().map(Vec::as_slice).unwrap_or_default();
        let told = |whose: usize, lines: &[Line]| -> Vec<View> {
            let told = lines.iter().filter_map(|line| match line {
                Line::Notified { at_us, what, .. } => Some((*at_us, what.clone())),
                _ => None,
            });
            told.map(|(at_us, what)| View { at: (at_us as f64 - began_us as f64) / 1e6, owner: whose, what })
                .collect()
        };
        let mut views: Vec<View> = provider.chain(told(1, training)).chain(told(2, first)).collect();
        views.sort_by(|one, other| one.at.total_cmp(&other.at));
        let served = Served::of(inference);
        Self { views, figures: served.figures(), check: served.check() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::timeline::Event;
    use super::*;

    fn timeline() -> Timeline {
        let events = vec![Event { at: 1.5, what: "control plans anew".into() }];
        Timeline { spine: None, story: String::new(), events, loads: vec![], epochs: vec![], checks: vec![] }
    }

    #[test]
    fn notifications_stand_beside_reactions() {
        let what = "AgreementBroken { clauses: [Completion(0)] }".to_owned();
        let requests = vec![Line::Notified { at_us: 3_000_000, what, agreement_broken: true }];
        let training =
            [Line::Notified { at_us: 2_000_000, what: "PlanChanged".into(), agreement_broken: false }];
        let views = Views::of(&timeline(), &training, &[requests], 1_000_000).views;
        let seen: Vec<(f64, usize)> = views.iter().map(|view| (view.at, view.owner)).collect();
        assert_eq!(seen, [(1.0, 1), (1.5, 0), (2.0, 2)]);
    }
}
