//! A job that computes all the while that something happens to control, and what is looked for meanwhile.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // support for tests

use crate::STEP;
use crate::job::{Worker, options, run, run_with, sockets, succeeded};
use anyhow::Result;
use harmonaize_client::{Access, AttachOptions, Rank, ReduceOp};
use harmonaize_testkit::deployment::{Deployment, Setup};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Silent sessions and peers are noticed soon. The lease is as it usually is: nothing here waits for its end.
pub fn noticed_soon(setup: &mut Setup) {
    setup.control = "session_timeout = \"1s\"\n".into();
    setup.agent = "peer_timeout = \"1s\"\n".into();
    setup.tenant += "\noperation_timeout = \"5s\"\n";
}

/// A job that computes until it is told to stop, and the rounds that it has done.
#[derive(Default)]
pub struct Load {
    rounds: AtomicU64,
    over: AtomicBool,
    ended: AtomicBool,
}

impl Load {
    /// The rounds that it has done.
    pub fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::SeqCst)
    }

    /// Waits until it has done some more rounds.
    ///
    /// # Panics
    /// Where it does not, or has ended.
    pub fn goes_on(&self) {
        let (before, deadline) = (self.rounds(), Instant::now() + 3 * STEP);
        while self.rounds() < before + 20 {
            assert!(!self.ended.load(Ordering::SeqCst), "the job has ended");
            assert!(Instant::now() < deadline, "operations do not go on");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// While `scenario` runs, a job on these hosts keeps computing; none of its operations fails.
///
/// # Panics
/// Where one does, or `scenario` panics.
pub fn under_load(sockets: &[PathBuf], scenario: impl FnOnce(&Load)) {
    under_load_of(sockets, 20_000, scenario);
}

/// The same of sums of so many elements.
///
/// # Panics
/// As of [`under_load`].
pub fn under_load_of(sockets: &[PathBuf], elements: usize, scenario: impl FnOnce(&Load)) {
    let sum = |worker: &Worker, round: u64| worker.sum(round, elements, round.is_multiple_of(2), STEP);
    under(sockets, 1, sum, scenario);
}

/// The same of any operation, of which each has a number, by so many ranks a host. Returns how long each
/// rank's took.
///
/// # Panics
/// As of [`under_load`].
pub fn under(
    sockets: &[PathBuf],
    per_host: u32,
    operation: impl Fn(&Worker, u64) -> Result<()> + Sync,
    scenario: impl FnOnce(&Load),
) -> Vec<Vec<Duration>> {
    under_with(sockets, per_host, |_| options(Access::Mapped, 192), operation, scenario)
}

/// The same with the options of each rank.
///
/// # Panics
/// As of [`under_load`].
pub fn under_with(
    sockets: &[PathBuf],
    per_host: u32,
    options: impl Fn(u32) -> AttachOptions + Sync,
    operation: impl Fn(&Worker, u64) -> Result<()> + Sync,
    scenario: impl FnOnce(&Load),
) -> Vec<Vec<Duration>> {
    let load = Load::default();
    let work = |worker: &Worker| -> Result<Vec<Duration>> {
        let mut took = Vec::new();
        for round in 0.. {
            let begun = Instant::now();
            operation(worker, round)?;
            took.push(begun.elapsed());
            let stop = worker.tensor(&[u64::from(load.over.load(Ordering::SeqCst))])?;
            // Ranks may be as far apart as a slow operation takes.
            worker.communicator.broadcast(&stop, Rank(0))?.wait(3 * STEP)?;
            if worker.contents(&stop)? == [1] {
                break;
            }
            load.rounds.fetch_add(u64::from(worker.rank == 0), Ordering::SeqCst);
        }
        Ok(took)
    };
    std::thread::scope(|scope| {
        let job = scope.spawn(|| {
            let ends = run_with(sockets, "load", per_host, &options, work);
            load.ended.store(true, Ordering::SeqCst);
            ends
        });
        let scenario = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| scenario(&load)));
        load.over.store(true, Ordering::SeqCst);
        // Of a scenario that panicked everything is printed already; what failed in the job is not.
        let took = succeeded(job.join().unwrap());
        scenario.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        took
    })
}

/// Computes and adds up until rank 0 ends it; rank 2 computes ten times as long while it is slow.
///
/// # Panics
/// Where an operation fails.
pub fn train(worker: &Worker, slow: &AtomicBool, over: &AtomicBool) {
    loop {
        let late = worker.rank == 2 && slow.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(if late { 200 } else { 20 }));
        let ends = worker.rank == 0 && over.load(Ordering::Relaxed);
        let tensor = worker.tensor(&[u64::from(ends)]).unwrap();
        worker.communicator.all_reduce_in_place(&tensor, ReduceOp::Sum).unwrap().wait(STEP).unwrap();
        if worker.contents(&tensor).unwrap()[0] > 0 {
            return;
        }
    }
}

/// Waits until control says of all communicators that they are in this phase.
///
/// # Panics
/// Where they are not in time.
pub fn in_phase(deployment: &mut Deployment, phase: &str) {
    let wrong = format!("not all communicators are in phase {phase}");
    let all = |this: &Deployment| {
        let status = this.status()?;
        let known = status["communicators"].as_array().cloned().unwrap_or_default();
        Ok((!known.is_empty() && known.iter().all(|one| one["phase"] == phase)).then_some(()))
    };
    deployment.wait_until(&wrong, all).unwrap();
}

/// A new job on all hosts does a sum.
///
/// # Panics
/// Where it fails.
pub fn forms_anew(deployment: &Deployment, job: &str) {
    succeeded(run(&sockets(deployment, "a"), job, 1, |worker| worker.sum(1, 1000, true, STEP)));
}
