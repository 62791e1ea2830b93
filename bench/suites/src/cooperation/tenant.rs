//! A training that is disturbed three times. A tenant that subscribes to the provider's events does it, and one that does not, in turn.
//! The same happens to both when as much of the work is done: cross traffic on both spines, a host that is drained and then taken away,
//! a host that is lost.

use super::{RATE, Suite, case};
use crate::figures::summary;
use crate::pictures::chart;
use crate::row::{Better, Row, median};
use anyhow::{Context, Result};
use harmonaize_plot::{Chart, Series};
use harmonaize_testkit::bystander::Bystander;
use harmonaize_testkit::elastic::disturbances::{Happened, Moments, Places};
use harmonaize_testkit::elastic::{self, Course, Line, Recipe};
use std::time::Duration;

/// How many times sooner it must be done.
const SOONER: f64 = 1.2;
/// How many times longer a transfer of the bystander may take beside the tenant that subscribes. The comparison is
/// beside the one that does not.
const AS_WELL_OFF: f64 = 1.1;
/// Micro-batches: half a minute where nothing happens.
const WORK: u64 = 3200;
/// A host is lost so often, in the course here: two in some forty seconds.
const BETWEEN_LOSSES: Duration = Duration::from_secs(20);
/// Where it happens.
const PLACES: Places = Places { rate: RATE, drained: 3, lost: 6 };

/// When it happens, for figures, moved a little from round to round. So a loss does not always come as long after the state was saved.
fn moments_of(round: usize) -> Moments {
    // The golden ratio's multiples fill an interval evenly.
    let moved = 0.1 * (round as f64 * 0.618_034).fract();
    let (congested, drained, lost) = (0.1 + moved / 2.0, 0.4 + moved / 2.0, 0.75 + moved);
    let [flows, notice, away] = [10, 4, 5].map(Duration::from_secs);
    Moments { congested, drained, lost, flows, until_adapted: false, notice, away }
}

/// As short as they show anything.
fn short_moments() -> Moments {
    let [flows, notice, away] = [3, 3, 1].map(Duration::from_secs);
    Moments { congested: 0.1, drained: 0.4, lost: 0.7, flows, until_adapted: false, notice, away }
}

/// How one training went, and the milliseconds of the bystander's transfers.
type Went = (Course, Vec<f64>);

/// What its first rank printed, and what happened to it.
type Printed = (Vec<Line>, Vec<Happened>);

pub(super) fn tenant(suite: &Suite) -> Result<Vec<Row>> {
    let (mut told, mut untold) = (Vec::new(), Vec::new());
    for round in 1..=suite.budget.rounds {
        for (subscribed, courses) in [(false, &mut untold), (true, &mut told)] {
            let (printed, transfers) = train(suite, round, subscribed)?;
            let course = Course::of(&printed.0)?;
            if let Some(folder) = &suite.request.figures {
                let (name, title) = match subscribed {
                    true => ("cooperation-subscribed", "Subscribed"),
                    false => ("cooperation-unsubscribed", "Not subscribed"),
                };
                progress(title, &printed).write(folder, name)?;
            }
            eprintln!(
                "round {round}, {}: {:.1} s; {:.0} micro-batches lost, {} times saved, at most {} accumulated, ranks after \
                 regrouping {:?}, {} events, {} of them of congestion; bystander ms {}",
                if subscribed { "subscribed" } else { "not subscribed" },
                course.seconds,
                course.lost,
                course.saved,
                course.most,
                course.regrouped,
                course.events,
                course.congested,
                summary(&transfers)
            );
            courses.push((course, transfers));
        }
    }
    rows(&told, &untold)
}

fn rows(told: &[Went], untold: &[Went]) -> Result<Vec<Row>> {
    let seconds = |courses: &[Went]| courses.iter().map(|(course, _)| course.seconds).collect::<Vec<f64>>();
    let transfer = |courses: &[Went]| {
        let medians = courses.iter().map(|(_, transfers)| median(transfers));
        medians.collect::<Option<Vec<f64>>>().context("the bystander has moved nothing")
    };
    let what = "a training through congestion, a drain and a lost host: s until its work is done";
    let sooner = case(what, Better::Less, 1.0 / SOONER);
    let beside = case("plain TCP of others meanwhile: ms for 512 KiB", Better::Less, AS_WELL_OFF);
    Ok(vec![
        sooner.compare(&seconds(told), &seconds(untold), "the same, not subscribed"),
        beside.compare(&transfer(told)?, &transfer(untold)?, "beside the one that is not subscribed"),
    ])
}

fn train(suite: &Suite, round: usize, subscribed: bool) -> Result<(Printed, Vec<f64>)> {
    let (moments, work) =
        if suite.request.smoke { (short_moments(), WORK / 2) } else { (moments_of(round), WORK) };
    // Dark hosts are noticed as soon as operators may have it.
    let mut lab = suite.lab("", "peer_timeout = \"2s\"\n")?;
    let bystander = Bystander::start(lab.fabric(), "f1", "f0")?;
    let recipe = Recipe::new(work, BETWEEN_LOSSES, subscribed);
    let mut stage = lab.stage("elastic")?;
    let printed = elastic::train(&mut stage, &recipe, (moments, PLACES), || suite.go_on())?;
    let transfers = bystander.stop()?.into_iter().map(|transfer| transfer.ms).collect();
    Ok((printed, transfers))
}

/// Micro-batches that are done, and ranks, over time, with what happened marked.
fn progress(title: &str, (lines, happened): &Printed) -> Chart {
    let began = lines.first().map_or(0, Line::at_us);
    let since = |at_us: u64| at_us.saturating_sub(began) as f64 / 1e6;
    let steps = lines.iter().filter_map(|line| match line {
        Line::Step { at_us, done, ranks, .. } => {
            Some((since(*at_us), *done as f64 / 100.0, *ranks as f64 * 100.0))
        }
        _ => None,
    });
    let (work, ranks) = steps.map(|(at, done, ranks)| ((at, done), (at, ranks))).unzip();
    let series = vec![
        Series { name: "micro-batches done".to_owned(), points: work },
        Series { name: "a hundred times the ranks".to_owned(), points: ranks },
    ];
    let marks: Vec<f64> = happened.iter().map(|what| since(what.at_ns / 1000)).collect();
    let title = format!("{title}: what is done, and by how many; marks are what happens to it");
    chart(title, ("seconds", "micro-batches"), series, marks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_testkit::elastic::disturbances::Kind;

    #[test]
    fn progress_is_in_seconds_and_micro_batches() {
        let step = |at_us, done, ranks| Line::Step {
            at_us,
            done,
            ranks,
            accumulate: 1,
            collective_us: 0,
            loss: 0.5,
        };
        let lines = vec![Line::Joined { at_us: 5_000_000 }, step(6_000_000, 200, 8), step(9_000_000, 400, 7)];
        let happened =
            vec![Happened { at_ns: 8_000_000_000, kind: Kind::Lost, what: "h6 is lost".to_owned() }];
        let chart = progress("Subscribed", &(lines, happened));
        assert_eq!(chart.series[0].points, [(1.0, 2.0), (4.0, 4.0)]);
        assert_eq!(chart.series[1].points, [(1.0, 800.0), (4.0, 700.0)]);
        assert_eq!(chart.marks, [3.0]);
    }

    #[test]
    fn rows_hold_sooner_and_as_well_off() {
        let course = |seconds, transfer| (Course { seconds, ..Course::default() }, vec![transfer]);
        let passed = |told, untold| -> Vec<bool> {
            rows(&[told], &[untold]).unwrap().iter().map(|row| row.passed()).collect()
        };
        assert_eq!(passed(course(30.0, 6.0), course(36.5, 6.0)), [true, true]);
        assert_eq!(passed(course(30.0, 6.7), course(35.0, 6.0)), [false, false]);
        assert!(rows(&[(Course::default(), Vec::new())], &[(Course::default(), Vec::new())]).is_err());
    }
}
