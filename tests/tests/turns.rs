//! Turns, end to end. Two tenants' periodic jobs that share one narrow link take turns on it, and every sum stays right.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use anyhow::{Context, Result, bail, ensure};
use harmonaize_testkit::deployment::{Deployment, Setup};
use harmonaize_tests::job::{Worker, deploy, run, sockets, succeeded};
use harmonaize_tests::star;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

const RATE: &str = "100Mbit/s";
/// Elements of 8 bytes: 80 ms over such a link, where it is a job's own.
const COUNT: usize = 125_000;
/// How long a job computes between two sums.
const COMPUTES: Duration = Duration::from_millis(100);
/// How long anything may take: a bound for machines that are busy with other things, and no figure. Who is left out of turns there, for what it
/// takes, comes back after a minute.
const PATIENCE: Duration = Duration::from_secs(170);
/// Turns that each job is seen to take: fewer than after which waits are judged.
const SLOTS: u64 = 8;
const TENANTS: [&str; 2] = ["a", "b"];

/// How many sums a job has begun, and how many it may.
struct Progress {
    begun: u64,
    limit: u64,
}

/// Computes and sums in turn, as long as it may.
fn work(worker: &Worker, progress: &Mutex<Progress>) -> Result<()> {
    for operation in 0.. {
        std::thread::sleep(COMPUTES);
        {
            let mut progress = progress.lock().unwrap();
            if operation >= progress.limit {
                break;
            }
            progress.begun = progress.begun.max(operation + 1);
        }
        worker.sum(operation, COUNT, operation % 2 == 0, PATIENCE)?;
    }
    Ok(())
}

/// How many turns each tenant's job has been given; none where not both take turns with each other.
fn slots_taken(deployment: &Deployment) -> Result<Option<Vec<u64>>> {
    let answer = deployment.ask(&["plans"])?;
    let plans = answer["plans"].as_array().context("no plans")?;
    let given = |index: usize| -> Result<Option<u64>> {
        let plan = plans.iter().find(|plan| plan["tenant"] == TENANTS[index]);
        let Some(plan) = plan else { return Ok(None) };
        let words = plan["interleaving"].as_str().context("no word of interleaving")?;
        let Some(rest) = words.strip_prefix("takes turns with ") else { return Ok(None) };
        let (with, rest) = rest.split_once(", ").context("no number of turns")?;
        ensure!(with == format!("{}/job", TENANTS[1 - index]), "{words}");
        Ok(Some(rest.split(' ').next().unwrap_or_default().parse()?))
    };
    (0..TENANTS.len()).map(given).collect()
}

/// Waits until each of both jobs has been given some turns. A job asks for one once the one before is over.
fn wait_until_interleaved(deployment: &Deployment) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let mut last = None;
    while Instant::now() < deadline {
        last = slots_taken(deployment)?;
        if last.as_ref().is_some_and(|given| given.iter().all(|turns| *turns >= SLOTS)) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    bail!("not {SLOTS} turns of each job within {PATIENCE:?}: {last:?}")
}

/// What each engine thread of the agent on the first host has taken of a processor. It is in nanoseconds, by the
/// thread's name.
fn engine_times(deployment: &mut Deployment) -> Result<Vec<(String, u64)>> {
    let tasks = Path::new("/proc").join(deployment.agent(0)?.id().to_string()).join("task");
    let mut times = Vec::new();
    for task in std::fs::read_dir(tasks)? {
        let task = task?.path();
        let name = std::fs::read_to_string(task.join("comm"))?.trim().to_owned();
        if name.starts_with("engine-") {
            let spent = std::fs::read_to_string(task.join("schedstat"))?;
            times.push((name, spent.split(' ').next().context("an empty schedstat")?.parse()?));
        }
    }
    times.sort();
    Ok(times)
}

#[test]
fn two_jobs_interleave_on_one_link() {
    // A thread for each tenant.
    let adjust = |setup: &mut Setup| {
        setup.measure(RATE);
        setup.agent += "[engine]\nthreads = 2\n";
    };
    let Some(mut deployment) = deploy(&star(2, RATE), adjust) else { return };
    let idle = engine_times(&mut deployment).unwrap();
    let sockets = TENANTS.map(|tenant| sockets(&deployment, tenant));
    let progress = TENANTS.map(|_| Mutex::new(Progress { begun: 0, limit: u64::MAX }));
    let (seen, results) = std::thread::scope(|scope| {
        let job = |index: usize| {
            let (sockets, progress) = (&sockets[index], &progress[index]);
            scope.spawn(move || run(sockets, "job", 1, |worker| work(worker, progress)))
        };
        let jobs: Vec<_> = (0..TENANTS.len()).map(job).collect();
        let seen = wait_until_interleaved(&deployment);
        for progress in &progress {
            let mut progress = progress.lock().unwrap();
            // What one rank has begun, all do.
            progress.limit = progress.begun;
        }
        (seen, jobs.into_iter().map(|job| job.join().unwrap()).collect::<Vec<_>>())
    });
    results.into_iter().for_each(|of_job| drop(succeeded(of_job)));
    if let Err(error) = seen {
        let control = deployment.control().unwrap().log_tail(16_384);
        panic!("{error:#}\ncontrol's log:\n{control}");
    }
    deployment.check().unwrap();
    // Each thread served its own: moving some dozens of tensors of 1 MB takes ten milliseconds and more.
    let busy = engine_times(&mut deployment).unwrap();
    assert_eq!(busy.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["engine-0", "engine-1"]);
    for ((name, after), (_, before)) in busy.iter().zip(&idle) {
        assert!(after - before > 5_000_000, "{name} took {} ns", after - before);
    }
}
