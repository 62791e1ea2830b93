//! Tenant A's second training, which reacts, and beside it the tenant that adopts nothing. It is what the provider did and knew, what the
//! tenant was told, and what it did about it.

use super::timeline;
use super::views::View;
use anyhow::{Context, Result};
use harmonaize_testkit::bystander::Transfer;
use harmonaize_testkit::elastic::disturbances::{Happened, Kind};
use harmonaize_testkit::elastic::{Course, Line};
use harmonaize_testkit::plans::Decision;
use harmonaize_testkit::summary::{Check, median};

/// What a transfer of the tenant that adopts nothing may take more beside the training than before it.
const AS_WELL_OFF: f64 = 1.1;

/// The least share of the test images that the model must tell in the end.
const LEARNED: f64 = 0.9;

/// What there is to show. Seconds count from the training's beginning.
#[derive(Debug, Clone, PartialEq)]
pub struct Changes {
    /// In the order of their times. `whose` is 0 for what the provider did and knew, 1 for what the tenant was told, 2 for what it did.
    pub views: Vec<View>,
    /// What, figure.
    pub figures: Vec<(String, String)>,
    /// Seconds, and milliseconds of the training's AllReduces.
    pub collectives: Vec<(f64, f64)>,
    /// Seconds, and micro-batches that a rank accumulates.
    pub accumulated: Vec<(f64, f64)>,
    /// When something happened, in seconds.
    pub marks: Vec<f64>,
    /// Whether the tenant went on, and how.
    pub checks: Vec<Check>,
}

impl Changes {
    /// Of what the training's first rank printed, what happened to it, and what control decided. Also of the transfers of who adopts
    /// nothing, which began before the training.
    ///
    /// # Errors
    /// Where the training has not begun, or not ended.
    pub fn of(
        lines: &[Line],
        happened: &[Happened],
        decisions: &[Decision],
        transfers: &[Transfer],
    ) -> Result<Self> {
        let course = Course::of(lines)?;
        let began_us = lines.first().context("no line")?.at_us();
        let began_ns = began_us * 1000;
        let at = |time_ns: u64| (time_ns as f64 - began_ns as f64) / 1e9;
        let decided = decisions
            .iter()
            .filter(|decision| decision.at_ns >= began_ns)
            .flat_map(timeline::decision_events);
        let happening = happened.iter().map(|one| (one.at_ns, one.what.clone()));
        let provider =
            happening.chain(decided).map(|(time_ns, what)| View { at: at(time_ns), owner: 0, what });
        let mut views: Vec<View> = provider.chain(of_tenant(lines, at)).collect();
        views.sort_by(|one, other| one.at.total_cmp(&other.at));
        let (mut collectives, mut accumulated) = (Vec::new(), Vec::new());
        for line in lines {
            if let Line::Step { at_us, accumulate, collective_us, .. } = line {
                collectives.push((at(at_us * 1000), *collective_us as f64 / 1e3));
                accumulated.push((at(at_us * 1000), f64::from(*accumulate)));
            }
        }
        let ms = |before: bool| {
            let of = transfers.iter().filter(|transfer| (transfer.at_ns < began_ns) == before);
            median(of.map(|transfer| transfer.ms).collect())
        };
        let beside = [ms(true), ms(false)];
        Ok(Self {
            views,
            figures: figures(&course, beside),
            collectives,
            accumulated,
            marks: happened.iter().map(|one| at(one.at_ns)).collect(),
            checks: checks(&course, lines, happened, beside),
        })
    }
}

/// What the tenant was told, and did.
fn of_tenant(lines: &[Line], at: impl Fn(u64) -> f64) -> Vec<View> {
    let (mut views, mut accumulates) = (Vec::new(), 0);
    for line in lines {
        let (whose, what) = match line {
            Line::Notified { what, .. } => (1, what.clone()),
            Line::Joined { .. } => (2, "begins to train".to_owned()),
            Line::Step { accumulate, .. } if *accumulate != accumulates => {
                accumulates = *accumulate;
                (2, format!("accumulates {accumulate} micro-batches a rank"))
            }
            Line::Saved { because, .. } => (2, format!("saves its state: {because}")),
            Line::Failed { .. } => (2, "sees an operation fail".to_owned()),
            Line::Regrouped { ranks, took_us, .. } => {
                (2, format!("goes on with {ranks} ranks, after {:.0} ms", *took_us as f64 / 1e3))
            }
            Line::Restored { lost, .. } => (2, format!("has lost {} micro-batches", lost / 100)),
            Line::Finished { micro_batches, .. } => {
                (2, format!("is done: each of {micro_batches} micro-batches is in its model once"))
            }
            Line::Step { .. } | Line::Left { .. } => continue,
        };
        views.push(View { at: at(line.at_us() * 1000), owner: whose, what });
    }
    views
}

fn figures(course: &Course, [before, beside]: [f64; 2]) -> Vec<(String, String)> {
    let row = |what: &str, figure: String| (what.to_owned(), figure);
    let ranks: Vec<String> = course.regrouped.iter().map(ToString::to_string).collect();
    vec![
        row("Until tenant A's work was done", format!("{:.1} s", course.seconds)),
        row("Events that it was told", course.events.to_string()),
        row("Micro-batches that a rank accumulated at most", course.most.to_string()),
        row("Ranks after each regrouping", ranks.join(", ")),
        row("Micro-batches done in vain", format!("{:.0}", course.lost)),
        row("Times that it saved its state", course.saved.to_string()),
        row("Test images that its model tells in the end", format!("{:.1}%", course.accuracy * 100.0)),
        row(
            "Tenant D, 512 KiB by TCP of its own: median before tenant A trains so",
            format!("{before:.1} ms"),
        ),
        row("And meanwhile", format!("{beside:.1} ms")),
    ]
}

/// How often the state was saved between the announcement that a host leaves and its end. Whatever the reason: a state that is saved then
/// is not saved again for maintenance.
fn saved_in_notice(lines: &[Line], happened: &[Happened]) -> usize {
    let when = |kind| happened.iter().find(|one| one.kind == kind).map(|one| one.at_ns / 1000);
    let Some((drained, taken)) = when(Kind::Drained).zip(when(Kind::TakenAway)) else { return 0 };
    let notice = drained..taken;
    lines.iter().filter(|line| matches!(line, Line::Saved { at_us, .. } if notice.contains(at_us))).count()
}

fn checks(course: &Course, lines: &[Line], happened: &[Happened], [before, beside]: [f64; 2]) -> Vec<Check> {
    let check = |what: &str, passed: bool, found: String, warns: bool| Check {
        what: what.to_owned(),
        passed,
        found,
        warns,
    };
    let micro_batches = lines.iter().find_map(|line| match line {
        Line::Finished { micro_batches, .. } => Some(*micro_batches),
        _ => None,
    });
    let in_notice = saved_in_notice(lines, happened);
    let Course { lost, saved, most, regrouped, congested, .. } = course;
    let all = lines.iter().find_map(|line| match line {
        Line::Step { ranks, .. } => Some(*ranks),
        _ => None,
    });
    let fewer = regrouped.iter().position(|ranks| Some(*ranks) < all);
    let again = fewer.is_some_and(|fewer| regrouped.iter().skip(fewer).any(|ranks| Some(*ranks) == all));
    let first = lines.iter().find_map(|line| match line {
        Line::Step { accumulate, .. } => Some(*accumulate),
        _ => None,
    });
    vec![
        check(
            "tenant A did all its work through congestion, maintenance and a lost host, each micro-batch once",
            micro_batches.is_some(),
            format!("{} micro-batches, {lost:.0} more in vain", micro_batches.unwrap_or(0)),
            false,
        ),
        check(
            "its model, the perceptron of the first training, has learned the digits",
            course.accuracy >= LEARNED,
            format!("{:.1}% of the test images", course.accuracy * 100.0),
            false,
        ),
        check(
            "it went on with fewer ranks, and took in those that came back",
            fewer.is_some() && again,
            format!("ranks after each regrouping: {regrouped:?}"),
            false,
        ),
        check(
            "it was told that others slow it, and accumulated more",
            *congested > 0 && Some(*most) > first,
            format!("{congested} events of congestion; at most {most} micro-batches a rank"),
            false,
        ),
        check(
            "it saved its state before a host was taken away, because that was announced",
            in_notice > 0,
            format!("{saved} times saved, {in_notice} of them after the announcement"),
            false,
        ),
        check(
            "tenant D, which adopts nothing, is as well off beside it as before",
            before > 0.0 && beside <= before * AS_WELL_OFF,
            format!("512 KiB take {beside:.1} ms, {before:.1} ms before"),
            true,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(told: bool, back: bool) -> Vec<Line> {
        lines_of(told, back, 342)
    }

    fn lines_of(told: bool, back: bool, correct: u64) -> Vec<Line> {
        let step = |at_us, accumulate, ranks| Line::Step {
            at_us,
            done: 1,
            ranks,
            accumulate,
            collective_us: 9_000,
            loss: 0.5,
        };
        let mut lines = vec![Line::Joined { at_us: 1_000_000 }, step(1_100_000, 2, 4), step(1_200_000, 2, 4)];
        if told {
            lines.push(Line::Notified {
                at_us: 2_000_000,
                what: "Congestion(Severe)".into(),
                congested: true,
            });
            lines.push(step(2_500_000, 16, 4));
            lines.push(Line::Saved { at_us: 3_000_000, because: "maintenance".into() });
        }
        lines.push(Line::Regrouped { at_us: 4_000_000, ranks: 3, took_us: 20_000 });
        if back {
            lines.push(Line::Regrouped { at_us: 5_000_000, ranks: 4, took_us: 20_000 });
        }
        lines.push(Line::Finished { at_us: 6_000_000, micro_batches: 48, correct, tested: 360 });
        lines
    }

    fn drain() -> [Happened; 2] {
        [(2_900_000_000, Kind::Drained), (3_900_000_000, Kind::TakenAway)].map(|(at_ns, kind)| Happened {
            at_ns,
            kind,
            what: String::new(),
        })
    }

    fn passed(lines: &[Line], ms: f64) -> Vec<bool> {
        let transfer = |at_ns, ms| Transfer { at_ns, ms };
        let transfers = [transfer(500_000_000, 10.0), transfer(2_000_000_000, ms)];
        let changes = Changes::of(lines, &drain(), &[], &transfers).unwrap();
        changes.checks.iter().map(|check| check.passed).collect()
    }

    #[test]
    fn subscribers_adapt_and_others_lose_nothing() {
        assert_eq!(passed(&lines(true, true), 10.9), [true; 6]);
        assert_eq!(passed(&lines(false, true), 11.1), [true, true, true, false, false, false]);
        assert_eq!(passed(&lines(true, false), 10.0), [true, true, false, true, true, true]);
        assert_eq!(passed(&lines_of(true, true, 300), 10.0), [true, false, true, true, true, true]);
        assert!(Changes::of(&lines(true, true)[..5], &[], &[], &[]).is_err(), "it has not ended");
        let due = Line::Saved { at_us: 3_100_000, because: "due".into() };
        assert_eq!(saved_in_notice(&[due], &drain()), 1, "not saved again for maintenance");
        let early = Line::Saved { at_us: 2_800_000, because: "slow".into() };
        assert_eq!(saved_in_notice(&[early], &drain()), 0);
        let silent = Changes::of(&lines(false, true), &drain(), &[], &[]).unwrap().checks;
        let failed = |place: usize| silent.get(place).map(Check::label);
        assert_eq!(
            [failed(3), failed(4)],
            [Some("FAILED"); 2],
            "a tenant that does not react fails the demo"
        );
    }

    #[test]
    fn events_and_reactions_stand_side_by_side() {
        let what = "cross traffic".into();
        let happened = [Happened { at_ns: 1_500_000_000, kind: Kind::CrossTraffic, what }];
        let changes = Changes::of(&lines(true, true), &happened, &[], &[]).unwrap();
        let seen: Vec<(f64, usize)> = changes.views.iter().map(|view| (view.at, view.owner)).collect();
        let expected =
            [(0.0, 2), (0.1, 2), (0.5, 0), (1.0, 1), (1.5, 2), (2.0, 2), (3.0, 2), (4.0, 2), (5.0, 2)];
        assert_eq!(seen.len(), expected.len());
        for ((at, whose), (when, who)) in seen.iter().zip(expected) {
            assert!((at - when).abs() < 1e-6 && *whose == who, "{seen:?}");
        }
        assert_eq!((changes.collectives.len(), changes.marks.len()), (3, 1));
    }
}
