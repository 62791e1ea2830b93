//! A job that computes all the while that something happens to control, and what is looked for meanwhile.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // support for tests

use crate::STEP;
use crate::job::{Worker, run, sockets, succeeded};
use harmonaize_client::{Rank, ReduceOp};
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
}

impl Load {
    /// Waits until it has done some more rounds.
    ///
    /// # Panics
    /// Where it does not.
    pub fn goes_on(&self) {
        let (before, deadline) = (self.rounds.load(Ordering::SeqCst), Instant::now() + STEP);
        while self.rounds.load(Ordering::SeqCst) < before + 20 {
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
    let load = Load::default();
    std::thread::scope(|scope| {
        let job = scope.spawn(|| {
            run(sockets, "load", 1, |worker| {
                for round in 0.. {
                    worker.sum(round, elements, round % 2 == 0, STEP)?;
                    let stop = worker.tensor(&[u64::from(load.over.load(Ordering::SeqCst))])?;
                    worker.communicator.broadcast(&stop, Rank(0))?.wait(STEP)?;
                    if worker.contents(&stop)? == [1] {
                        break;
                    }
                    load.rounds.fetch_add(1, Ordering::SeqCst);
                }
                Ok(())
            })
        });
        let scenario = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| scenario(&load)));
        load.over.store(true, Ordering::SeqCst);
        let outcomes = job.join().unwrap();
        scenario.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        succeeded(outcomes);
    });
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
