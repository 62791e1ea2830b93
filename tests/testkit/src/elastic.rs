//! An elastic training on a deployment while things happen to it. It has its ranks, a process each on a host of its own, the folder
//! that they share, and what its first rank prints. `bench` has the program.

pub mod disturbances;

use crate::deployment::Deployment;
use crate::job::Spaces;
use crate::lines::whole;
use crate::process::Process;
use anyhow::{Context, Result, bail, ensure};
use disturbances::{Disturbances, Happened, Moments, Places};
use serde::{Deserialize, Serialize};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What saving the state takes.
const COST: Duration = Duration::from_secs(1);
/// How long the training may stand still.
const STANDSTILL: Duration = Duration::from_secs(60);
/// The job's name.
const NAME: &str = "elastic";

/// A line that a rank prints. Times in microseconds from 1970, work in hundredths of micro-batches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[expect(missing_docs, reason = "each line says what its fields are")]
pub enum Line {
    /// It is one of the ranks.
    Joined { at_us: u64 },
    /// So much is done, after a step of so many micro-batches a rank; the AllReduce's microseconds, and the mean loss.
    Step { at_us: u64, done: u64, ranks: usize, accumulate: u32, collective_us: u64, loss: f64 },
    /// The state is saved, and why.
    Saved { at_us: u64, because: String },
    /// Ranks were lost.
    Failed { at_us: u64, what: String },
    /// It goes on as another communicator of so many ranks.
    Regrouped { at_us: u64, ranks: usize, took_us: u64 },
    /// It goes on, and so much that was done is lost.
    Restored { at_us: u64, lost: u64 },
    /// What the provider has announced, and whether it is that others slow it.
    Notified { at_us: u64, what: String, congested: bool },
    /// It is no longer one of the ranks.
    Left { at_us: u64 },
    /// The work is done, with each of so many micro-batches in the model exactly once. The model then recognises so many of
    /// the test images.
    Finished { at_us: u64, micro_batches: u64, correct: u64, tested: u64 },
}

impl Line {
    /// When it was printed, in microseconds from 1970.
    pub fn at_us(&self) -> u64 {
        match self {
            Self::Joined { at_us }
            | Self::Step { at_us, .. }
            | Self::Saved { at_us, .. }
            | Self::Failed { at_us, .. }
            | Self::Regrouped { at_us, .. }
            | Self::Restored { at_us, .. }
            | Self::Notified { at_us, .. }
            | Self::Left { at_us }
            | Self::Finished { at_us, .. } => *at_us,
        }
    }
}

/// Where it runs.
#[derive(Debug)]
pub struct Stage<'a> {
    /// Control and agents.
    pub deployment: &'a mut Deployment,
    /// The tenant's.
    pub spaces: &'a Spaces,
    /// The program of a rank.
    pub program: PathBuf,
    /// For what ranks print.
    pub logs: &'a Path,
}

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recipe {
    /// Micro-batches to be done.
    pub work: u64,
    /// The state is saved so often at least.
    pub every: Duration,
    /// Whether it hears the provider's events and leaves choices to it.
    pub subscribed: bool,
}

impl Recipe {
    /// So much work, saved as often as is best where ranks are lost so often. Source: Young, "A first order approximation to the
    /// optimum checkpoint interval", 1974. One that is not subscribed loses what it has done since at every loss of a host; the
    /// other keeps it, and saves for the case that all are lost.
    pub fn new(work: u64, between_losses: Duration, subscribed: bool) -> Self {
        let often = (2.0 * COST.as_secs_f64() * between_losses.as_secs_f64()).sqrt();
        Self {
            work,
            every: Duration::from_secs_f64(if subscribed { 3.0 * often } else { often }),
            subscribed,
        }
    }

    fn arguments(&self, shared: &Path) -> Vec<String> {
        let pairs = [
            ("--shared", shared.to_string_lossy().into_owned()),
            ("--work", self.work.to_string()),
            ("--every-ms", self.every.as_millis().to_string()),
            ("--cost-ms", COST.as_millis().to_string()),
        ];
        let mut arguments: Vec<String> =
            pairs.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect();
        arguments.extend(self.subscribed.then(|| "--subscribed".to_owned()));
        arguments
    }
}

/// Trains with a rank on each host with an agent until the work is done. All must have happened by then that is to happen: else it is
/// an error. What the first rank printed, and what happened. `go_on` is asked meanwhile.
pub fn train(
    stage: &mut Stage<'_>,
    recipe: &Recipe,
    (moments, places): (Moments, Places),
    go_on: impl Fn() -> Result<()>,
) -> Result<(Vec<Line>, Vec<Happened>)> {
    let shared = Shared::make()?;
    let arguments = recipe.arguments(&shared.folder);
    let hosts = stage.deployment.hosts().len();
    let Stage { deployment, spaces, program, logs } = stage;
    let start = |label: usize, host: usize, arguments: &[String]| {
        spaces.start_one(NAME, &label.to_string(), host, program, arguments, logs)
    };
    let mut ranks = Vec::new();
    for host in 0..hosts {
        let seat = ["--rank", &host.to_string(), "--ranks", &hosts.to_string()].map(str::to_owned);
        ranks.push(Some(start(host, host, &[&seat, &arguments[..]].concat())?));
    }
    let log = ranks.iter().flatten().next().context("no rank")?.log().to_path_buf();
    let mut disturbances = Disturbances::new(moments, places);
    let (mut moved, mut known, mut started) = (Instant::now(), 0, hosts);
    let lines = loop {
        go_on()?;
        let lines: Vec<Line> = whole(&log)?;
        if lines.len() > known {
            (moved, known) = (Instant::now(), lines.len());
        }
        if lines.iter().any(|line| matches!(line, Line::Finished { .. })) {
            break lines;
        }
        ensure!(moved.elapsed() < STANDSTILL, "the training stands still; {} has more", log.display());
        let share = done(&lines) as f64 / (recipe.work * 100) as f64;
        disturbances.advance(deployment, (share, adapted(&lines)), &mut ranks, |host| {
            started += 1;
            start(started - 1, host, &[&["--enter".to_owned()], &arguments[..]].concat())
        })?;
        running(&mut ranks)?;
        std::thread::sleep(Duration::from_millis(20));
    };
    ensure!(disturbances.over(), "the training ended before all had happened: {disturbances:?}");
    let deadline = Instant::now() + STANDSTILL;
    for rank in ranks.iter_mut().flatten() {
        if whole::<Line>(rank.log())?.iter().any(|line| matches!(line, Line::Joined { .. })) {
            rank.succeed_by(deadline)?;
        } else {
            // It was back too late to be taken in.
            rank.end()?;
        }
    }
    Ok((lines, disturbances.happened))
}

/// An error where a rank that is there has failed.
fn running(ranks: &mut [Option<Process>]) -> Result<()> {
    for rank in ranks.iter_mut().flatten() {
        if let Some(status) = rank.status()?
            && !status.success()
        {
            bail!("{} ended with {status}; its last lines:\n{}", rank.name(), rank.log_tail(2048));
        }
    }
    Ok(())
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

/// Whether more micro-batches were accumulated than at first.
fn adapted(lines: &[Line]) -> bool {
    let mut accumulated = lines.iter().filter_map(|line| match line {
        Line::Step { accumulate, .. } => Some(*accumulate),
        _ => None,
    });
    let first = accumulated.next();
    accumulated.max() > first
}

/// How a training went.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Course {
    /// From its first rank's beginning to its end.
    pub seconds: f64,
    /// Micro-batches that were done in vain.
    pub lost: f64,
    /// How often the state was saved.
    pub saved: usize,
    /// Micro-batches that were accumulated at most.
    pub most: u32,
    /// Ranks after each regrouping.
    pub regrouped: Vec<usize>,
    /// Events.
    pub events: usize,
    /// And of these how many said that others slow it.
    pub congested: usize,
    /// The share of the test images that its model tells in the end.
    pub accuracy: f64,
}

impl Course {
    /// Of what its first rank printed.
    ///
    /// # Errors
    /// Where it has not begun, or not ended.
    pub fn of(lines: &[Line]) -> Result<Self> {
        let (mut course, mut began, mut ended) = (Self::default(), None, None);
        for line in lines {
            match line {
                Line::Joined { at_us } => began = Some(*at_us),
                Line::Step { accumulate, .. } => course.most = course.most.max(*accumulate),
                Line::Saved { .. } => course.saved += 1,
                Line::Regrouped { ranks, .. } => course.regrouped.push(*ranks),
                Line::Restored { lost, .. } => course.lost += *lost as f64 / 100.0,
                Line::Notified { congested, .. } => {
                    course.events += 1;
                    course.congested += usize::from(*congested);
                }
                Line::Finished { at_us, micro_batches, correct, tested } if *micro_batches > 0 => {
                    ended = Some(*at_us);
                    course.accuracy = *correct as f64 / (*tested).max(1) as f64;
                }
                Line::Failed { .. } | Line::Left { .. } | Line::Finished { .. } => {}
            }
        }
        let (began, ended) = began.zip(ended).context("the training has not begun, or not ended")?;
        course.seconds = ended.saturating_sub(began) as f64 / 1e6;
        Ok(course)
    }
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
    fn a_course_is_read_from_rank_0() {
        let text = r#"{"event":"joined","at_us":1000000,"rank":0,"ranks":8}
{"event":"step","at_us":1,"done":2500,"ranks":8,"accumulate":2,"collective_us":5,"loss":0.5}
{"event":"notified","at_us":1,"what":"Congestion(Severe)","congested":true}
{"event":"notified","at_us":1,"what":"Congestion(None)","congested":false}
{"event":"step","at_us":1,"done":4000,"ranks":8,"accumulate":16,"collective_us":5,"loss":0.5}
{"event":"saved","at_us":1,"done":4000,"because":"due"}
{"event":"saved","at_us":1,"done":4000,"because":"maintenance"}
{"event":"failed","at_us":1,"what":"lost"}
{"event":"regrouped","at_us":1,"rank":0,"ranks":7,"took_us":5}
{"event":"restored","at_us":1,"done":2500,"lost":1500}
{"event":"finished","at_us":3500000,"done":5000,"micro_batches":48,"correct":342,"tested":360}
{"event":"half a li"#;
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        std::fs::write(&log, text).unwrap();
        let lines: Vec<Line> = whole(&log).unwrap();
        assert_eq!(lines.len(), 11);
        assert_eq!(done(&lines), 4000);
        assert!(adapted(&lines) && !adapted(&lines[..4]) && !adapted(&[]));
        let expected = Course {
            seconds: 2.5,
            lost: 15.0,
            saved: 2,
            most: 16,
            regrouped: vec![7],
            events: 2,
            congested: 1,
            accuracy: 0.95,
        };
        assert_eq!(Course::of(&lines).unwrap(), expected);
        assert!(Course::of(&lines[..10]).is_err());
    }

    #[test]
    fn who_keeps_what_was_done_saves_more_seldom() {
        let losses = Duration::from_secs(20);
        let every = |subscribed| Recipe::new(1, losses, subscribed).every.as_secs_f64();
        assert!((every(false) - 6.32).abs() < 0.01 && (every(true) / every(false) - 3.0).abs() < 1e-6);
        let has = |subscribed| {
            let arguments = Recipe::new(1, losses, subscribed).arguments(Path::new("/shared"));
            arguments.iter().any(|argument| argument == "--subscribed")
        };
        assert!(has(true) && !has(false));
    }
}
