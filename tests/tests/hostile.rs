//! Tenants' processes that do their host's agent all the harm that they can, beside a tenant whose results are checked.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use anyhow::{Context, Result, ensure};
use harmonaize_client::{Access, Rank};
use harmonaize_testkit::deployment::{Deployment, Tenant};
use harmonaize_testkit::job::{Programs, Spaces};
use harmonaize_testkit::process::Process;
use harmonaize_tests::job::{Worker, deploy, options, run_with, sockets, succeeded};
use harmonaize_tests::{STEP, star};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What the hostile tenant does, on the first host.
const ATTACKS: &[&str] =
    &["scribble", "doorbell", "silent", "attach", "descriptors", "truncate", "maximal", "unmap"];
/// Tensor memory that the hostile tenant may have.
const ARENA: u64 = 64 << 20;
/// What an agent may take beside tensors, more than it had before anybody was hostile.
const OWN: u64 = 64 << 20;
/// Elements of the victim's AllReduce: 64 KiB.
const ELEMENTS: usize = 8192;
const MEBIBYTE: u64 = 1 << 20;

/// Kilobytes of a line of a process's status, in bytes.
fn memory(process: u32, line: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let found = status.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(':')).unwrap();
    found.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

/// How long each of the victim's operations took, while `meanwhile` runs; each was right.
fn victim<T>(
    deployment: &mut Deployment,
    job: &str,
    meanwhile: impl FnOnce(&mut Deployment) -> T,
) -> (Vec<Duration>, T) {
    let (sockets, over) = (sockets(deployment, "b"), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let computing = scope.spawn(|| {
            run_with(
                &sockets,
                job,
                1,
                |_| options(Access::Mapped, 8),
                |worker| {
                    let mut took = Vec::new();
                    let (input, stop) = (Worker::input(worker.rank, 1, ELEMENTS), worker.tensor(&[0])?);
                    let tensor = worker.tensor(&input)?;
                    for round in 0_u64.. {
                        tensor.write(0, &input)?;
                        let begun = Instant::now();
                        let sum = harmonaize_client::ReduceOp::Sum;
                        worker.communicator.all_reduce_in_place(&tensor, sum)?.wait(STEP)?;
                        took.push(begun.elapsed());
                        let theirs = Worker::input(1 - worker.rank, 1, ELEMENTS);
                        let right = worker.contents(&tensor)?.into_iter().zip(input.iter().zip(&theirs));
                        let mut right =
                            right.map(|(found, (ours, theirs))| found == ours.wrapping_add(*theirs));
                        ensure!(right.all(|right| right), "rank {}: wrong sum {round}", worker.rank);
                        if round % 64 == 0 {
                            stop.write(0, &[u64::from(over.load(Ordering::SeqCst))])?;
                            worker.communicator.broadcast(&stop, Rank(0))?.wait(STEP)?;
                            if worker.contents(&stop)? == [1] {
                                return Ok(took);
                            }
                        }
                    }
                    unreachable!("the range has no end")
                },
            )
        });
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| meanwhile(deployment)));
        over.store(true, Ordering::SeqCst);
        let took = succeeded(computing.join().unwrap());
        let done = done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (took.into_iter().next().unwrap(), done)
    })
}

/// What a victim's operations took: operations a second, and the 99th percentile in microseconds.
fn figures(mut took: Vec<Duration>) -> (f64, f64) {
    took.sort();
    let (count, all) = (took.len(), took.iter().sum::<Duration>());
    (count as f64 / all.as_secs_f64(), took[count * 99 / 100].as_secs_f64() * 1e6)
}

/// The hostile processes, until they have done all that they do. Returns the most that the agent had beside shared memory.
fn harm(
    deployment: &mut Deployment,
    spaces: &Spaces,
    program: &Path,
    logs: &Path,
    seconds: u64,
) -> Result<u64> {
    let started = |(seed, attack): (usize, &&str)| -> Result<Process> {
        let arguments = ["--attack", attack, "--seconds", &seconds.to_string(), "--seed", &seed.to_string()];
        spaces.start_one("hostile", attack, 0, program, &arguments.map(str::to_owned), logs)
    };
    let mut processes = ATTACKS.iter().enumerate().map(started).collect::<Result<Vec<_>>>()?;
    let (agent, deadline) = (deployment.agent(0)?.id(), Instant::now() + Duration::from_secs(seconds) + STEP);
    let mut most = 0;
    while !processes.iter_mut().map(Process::status).collect::<Result<Vec<_>>>()?.iter().all(Option::is_some)
    {
        deployment.check()?;
        most = most.max(memory(agent, "RssAnon"));
        ensure!(memory(agent, "RssShmem") <= ARENA + 16 * MEBIBYTE, "more shared memory than the quotas");
        ensure!(Instant::now() < deadline, "a hostile process does not end");
        std::thread::sleep(Duration::from_millis(50));
    }
    for (process, attack) in processes.iter_mut().zip(ATTACKS) {
        process.succeed_by(deadline)?;
        let said = process.log_tail(4096);
        let done = said.lines().find_map(|line| line.parse::<u64>().ok()).context("no count")?;
        ensure!(done > 0, "{attack} did nothing: {said}");
        eprintln!("{}", said.trim());
    }
    Ok(most)
}

/// For so long a victim with a rank on the hostile tenant's host, and one on another, computes on.
fn beside_all_attacks(seconds: u64) {
    let prepared = deploy(&star(2, "10Gbit/s"), |setup| {
        setup.tenants = [("a", 3001), ("b", 0)].map(|(name, user)| Tenant { name: name.into(), user }).into();
        // Who attaches without end would keep its own tenant's other processes out.
        setup.tenant += &format!("\narena = \"{}MiB\"\nattaches = 100000\n", ARENA / MEBIBYTE);
    });
    let Some(mut deployment) = prepared else { return };
    let folder = Path::new(env!("CARGO_BIN_EXE_hostile")).parent().unwrap();
    let programs = Programs::publish(folder, &["hostile"]).unwrap();
    let spaces = Spaces::make(&deployment, &deployment.tenants()[0].clone()).unwrap();
    let logs = tempfile::tempdir().unwrap();
    let calm = Duration::from_secs(seconds.div_ceil(4));
    let (alone, ()) = victim(&mut deployment, "alone", |_| std::thread::sleep(calm));
    let before = memory(deployment.agent(0).unwrap().id(), "RssAnon");
    let (beside, most) = victim(&mut deployment, "beside", |deployment| {
        harm(deployment, &spaces, &programs.path("hostile"), logs.path(), seconds)
    });
    let most = most.unwrap();
    let [(rate, p99), (rate_beside, p99_beside)] = [alone, beside].map(figures);
    eprintln!(
        "alone: {rate:.0} operations a second, p99 {p99:.0} us; beside: {rate_beside:.0}, {p99_beside:.0} us"
    );
    eprintln!("the agent's own memory: {} MiB before, {} MiB at most", before / MEBIBYTE, most / MEBIBYTE);
    assert!(most <= before + OWN, "{} MiB beside tensors", most / MEBIBYTE);
    // All that the hostile processes had is free again, and the agent goes on as before.
    let (after, ()) = victim(&mut deployment, "after", |_| std::thread::sleep(Duration::from_millis(200)));
    assert!(!after.is_empty());
    deployment.end().unwrap();
}

#[test]
fn all_attacks_at_once_cost_a_victim_no_result() {
    beside_all_attacks(6);
}

/// Five minutes, for the soak.
#[test]
#[ignore = "takes five minutes: cargo xtask soak --suite hostile"]
fn five_minutes_of_all_attacks_cost_a_victim_no_result() {
    beside_all_attacks(300);
}
