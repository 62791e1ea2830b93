//! A training that is disturbed three times, by a tenant that hears the provider and by one that does not, in turn. The same happens to
//! both when as much of the work is done: a foreign flow on both spines, a host that is drained and then taken away, a host that is lost.

use super::bystander::Bystander;
use super::disturbances::{Disturbances, Moments};
use super::{HOSTS, RATE, Suite, case};
use crate::bench::figures::summary;
use crate::bench::row::{Better, Row};
use crate::process::Process;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How many times sooner it must be done.
const SOONER: f64 = 1.2;
/// What a transfer of the tenant that adopts nothing may take more beside the one that hears than beside the other.
const AS_WELL_OFF: f64 = 1.1;
/// Micro-batches: half a minute where nothing happens.
const WORK: u64 = 3200;
/// What saving the state takes.
const COST: Duration = Duration::from_secs(1);
/// A host is lost so often, in the course here: two in some forty seconds.
const BETWEEN_LOSSES: Duration = Duration::from_secs(20);
/// How long the training may stand still.
const STANDSTILL: Duration = Duration::from_secs(60);
/// The job's name.
const NAME: &str = "elastic";

/// A line that a rank prints; `bench` says what its fields are.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Line {
    Joined { at_us: u64 },
    Step { done: u64, accumulate: u32 },
    Saved {},
    Failed {},
    Regrouped { ranks: usize, took_us: u64 },
    Restored { lost: u64 },
    Told { what: String },
    Left {},
    Finished { at_us: u64, micro_batches: u64 },
}

/// How one training went.
#[derive(Debug, Default, PartialEq)]
struct Course {
    seconds: f64,
    /// Micro-batches that were done in vain.
    lost: f64,
    saved: usize,
    /// Micro-batches that were accumulated at most.
    most: u32,
    regrouped: Vec<usize>,
    told: usize,
    /// Milliseconds of the bystander's transfers.
    transfers: Vec<f64>,
}

pub(super) fn tenant(suite: &Suite) -> Result<Vec<Row>> {
    let (mut told, mut untold) = (Vec::new(), Vec::new());
    for round in 1..=suite.effort.rounds {
        for (subscribed, courses) in [(false, &mut untold), (true, &mut told)] {
            let course = train(suite, round, subscribed)?;
            eprintln!(
                "round {round}, {}: {:.1} s; {:.0} micro-batches lost, {} times saved, at most {} accumulated, ranks after \
                 regrouping {:?}, {} events; bystander ms {}",
                if subscribed { "subscribed" } else { "not subscribed" },
                course.seconds,
                course.lost,
                course.saved,
                course.most,
                course.regrouped,
                course.told,
                summary(&course.transfers)
            );
            courses.push(course);
        }
    }
    rows(&told, &untold)
}

fn rows(told: &[Course], untold: &[Course]) -> Result<Vec<Row>> {
    let seconds = |courses: &[Course]| courses.iter().map(|course| course.seconds).collect::<Vec<f64>>();
    let transfer = |courses: &[Course]| {
        let medians = courses.iter().map(|course| crate::bench::row::median(&course.transfers));
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

fn train(suite: &Suite, round: usize, subscribed: bool) -> Result<Course> {
    let moments = if suite.effort.smoke { Moments::smoke() } else { Moments::of_round(round) };
    // Dark hosts are noticed as soon as operators may have it.
    let mut lab = suite.lab("", "peer_timeout = \"2s\"\n")?;
    let shared = Shared::make()?;
    let arguments = arguments(&shared.folder, subscribed, suite.effort.smoke);
    let mut ranks = Vec::new();
    for host in 0..HOSTS {
        let seat = ["--rank", &host.to_string(), "--ranks", &HOSTS.to_string()].map(str::to_owned);
        let started =
            lab.start_one(NAME, &host.to_string(), "elastic", host, &[&seat, &arguments[..]].concat())?;
        ranks.push(Some(started));
    }
    let log = ranks.iter().flatten().next().context("no rank")?.log().to_path_buf();
    let bystander = Bystander::start(lab.fabric(), "f1", "f0")?;
    let mut disturbances = Disturbances::new(moments, RATE);
    let (mut moved, mut known) = (Instant::now(), 0);
    let lines = loop {
        lab.go_on()?;
        let lines = lines_of(&log)?;
        if lines.len() > known {
            (moved, known) = (Instant::now(), lines.len());
        }
        if lines.iter().any(|line| matches!(line, Line::Finished { .. })) {
            break lines;
        }
        ensure!(moved.elapsed() < STANDSTILL, "the training stands still; {} has more", log.display());
        let share = done(&lines) as f64 / (work(suite.effort.smoke) * 100) as f64;
        disturbances.advance(&mut lab, share, &mut ranks, |lab, label, host| {
            let enter = [&["--enter".to_owned()], &arguments[..]].concat();
            lab.start_one(NAME, label, "elastic", host, &enter)
        })?;
        running(&mut ranks)?;
        std::thread::sleep(Duration::from_millis(20));
    };
    ensure!(disturbances.over(), "the training ended before all had happened: {disturbances:?}");
    let deadline = Instant::now() + STANDSTILL;
    for rank in ranks.iter_mut().flatten() {
        if lines_of(rank.log())?.iter().any(|line| matches!(line, Line::Joined { .. })) {
            rank.succeed_by(deadline)?;
        } else {
            // It was back too late to be taken in.
            rank.end()?;
        }
    }
    let transfers = bystander.stop()?;
    Ok(Course { transfers, ..course(&lines)? })
}

fn work(smoke: bool) -> u64 {
    if smoke { WORK / 2 } else { WORK }
}

/// Both save as often as is best for what losses cost them (Young 1974, with the mean time between losses as it is here): the one that
/// is not subscribed loses what it has done since at every loss of a host, the other keeps it, and saves for the case that all are lost.
fn arguments(shared: &Path, subscribed: bool, smoke: bool) -> Vec<String> {
    let often = (2.0 * COST.as_secs_f64() * BETWEEN_LOSSES.as_secs_f64()).sqrt();
    let every = Duration::from_secs_f64(if subscribed { 3.0 * often } else { often });
    let pairs = [
        ("--shared", shared.to_string_lossy().into_owned()),
        ("--work", work(smoke).to_string()),
        ("--every-ms", every.as_millis().to_string()),
        ("--cost-ms", COST.as_millis().to_string()),
    ];
    let mut arguments: Vec<String> =
        pairs.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect();
    arguments.extend(subscribed.then(|| "--subscribed".to_owned()));
    arguments
}

/// An error where a rank that is there has failed.
fn running(ranks: &mut [Option<Process>]) -> Result<()> {
    for rank in ranks.iter_mut().flatten() {
        if let Some(status) = rank.status()?
            && !status.success()
        {
            bail!("{} ended with {status}; its last lines:\n{}", rank.name(), rank.said(2048));
        }
    }
    Ok(())
}

fn lines_of(log: &Path) -> Result<Vec<Line>> {
    let text = std::fs::read_to_string(log).with_context(|| format!("cannot read {}", log.display()))?;
    let whole = text.rfind('\n').and_then(|end| text.get(..end)).unwrap_or_default();
    // What is no line of ours (a warning, an error's text) is for people.
    Ok(whole.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// Hundredths of micro-batches that are done.
fn done(lines: &[Line]) -> u64 {
    let steps = lines.iter().filter_map(|line| match line {
        Line::Step { done, .. } => Some(*done),
        _ => None,
    });
    // What was done once counts, though it may be lost: what happens then does not happen again.
    steps.max().unwrap_or(0)
}

fn course(lines: &[Line]) -> Result<Course> {
    let (mut course, mut began, mut ended) = (Course::default(), None, None);
    for line in lines {
        match line {
            Line::Joined { at_us } => began = Some(*at_us),
            Line::Step { accumulate, .. } => course.most = course.most.max(*accumulate),
            Line::Saved {} => course.saved += 1,
            Line::Regrouped { ranks, .. } => course.regrouped.push(*ranks),
            Line::Restored { lost } => course.lost += *lost as f64 / 100.0,
            Line::Told { .. } => course.told += 1,
            Line::Finished { at_us, micro_batches } if *micro_batches > 0 => ended = Some(*at_us),
            Line::Failed {} | Line::Left {} | Line::Finished { .. } => {}
        }
    }
    let (began, ended) = began.zip(ended).context("the training has not begun, or not ended")?;
    course.seconds = ended.saturating_sub(began) as f64 / 1e6;
    Ok(course)
}

/// A folder that all hosts share, as a parallel file system.
struct Shared {
    folder: PathBuf,
}

impl Shared {
    fn make() -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("harmonaize-shared-{}", std::process::id()));
        std::fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let shared = Self { folder };
        std::fs::set_permissions(&shared.folder, std::fs::Permissions::from_mode(0o1777))?;
        Ok(shared)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.folder) {
            eprintln!("warning: {} stays: {error}", self.folder.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_course_is_read_from_what_the_first_rank_prints() {
        let text = r#"{"event":"joined","at_us":1000000,"rank":0,"ranks":8}
{"event":"step","at_us":1,"done":2500,"ranks":8,"accumulate":2,"collective_us":5}
{"event":"told","at_us":1,"what":"Congestion(Severe)"}
{"event":"step","at_us":1,"done":4000,"ranks":8,"accumulate":16,"collective_us":5}
{"event":"saved","at_us":1,"done":4000,"because":"due"}
{"event":"failed","at_us":1,"what":"lost"}
{"event":"regrouped","at_us":1,"rank":0,"ranks":7,"took_us":5}
{"event":"restored","at_us":1,"done":2500,"lost":1500}
{"event":"finished","at_us":3500000,"done":5000,"micro_batches":48}
{"event":"half a li"#;
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        std::fs::write(&log, text).unwrap();
        let lines = lines_of(&log).unwrap();
        assert_eq!(lines.len(), 9);
        assert_eq!(done(&lines), 4000);
        let expected = Course {
            seconds: 2.5,
            lost: 15.0,
            saved: 1,
            most: 16,
            regrouped: vec![7],
            told: 1,
            transfers: Vec::new(),
        };
        assert_eq!(course(&lines).unwrap(), expected);
        assert!(course(&lines[..8]).is_err());
    }

    #[test]
    fn rows_hold_sooner_and_as_well_off() {
        let course = |seconds, transfer| Course { seconds, transfers: vec![transfer], ..Course::default() };
        let passed = |told, untold| -> Vec<bool> {
            rows(&[told], &[untold]).unwrap().iter().map(|row| row.pass).collect()
        };
        assert_eq!(passed(course(30.0, 6.0), course(36.5, 6.0)), [true, true]);
        assert_eq!(passed(course(30.0, 6.7), course(35.0, 6.0)), [false, false]);
        assert!(rows(&[Course::default()], &[Course::default()]).is_err());
    }
}
