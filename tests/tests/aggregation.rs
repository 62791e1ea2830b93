//! An aggregator on the fabric, end to end: real agents and control; what it does is right while it serves, when it is killed in the
//! middle of operations, and when it comes back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use anyhow::{Result, ensure};
use harmonaize_client::{Access, Algorithm, Dtype, Rank, ReduceOp};
use harmonaize_tests::job::{Worker, deploy, run, sockets};
use harmonaize_tests::{STEP, star_with_aggregator};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Condvar, Mutex};
use xtask::fabric::Faults;

const HOSTS: usize = 4;
/// Elements of a rank's tensor; no multiple of a chunk's.
const ELEMENTS: usize = (1 << 17) + 3;
/// Operations before, between and after what happens to the aggregator.
const EACH: u64 = 10;

/// Whole numbers, whose sums are exact in whatever order.
fn whole(rank: u32, salt: u64, elements: usize) -> Vec<f32> {
    Worker::input(rank, salt, elements).into_iter().map(|word| (word >> 48) as f32 - 32_768.0).collect()
}

/// One operation, checked; whether the aggregator was given it, and did it all.
fn sum(worker: &Worker, salt: u64, elements: usize) -> Result<(bool, bool)> {
    let tensor = worker.client.tensor(Dtype::F32, elements as u64)?;
    tensor.write(0, &whole(worker.rank, salt, elements))?;
    let receipt = worker.communicator.all_reduce_in_place(&tensor, ReduceOp::Sum)?.wait(STEP)?;
    let mut found = vec![0_f32; elements];
    tensor.read(0, &mut found)?;
    let mut right = vec![0_f32; elements];
    for rank in 0..worker.ranks {
        right.iter_mut().zip(whole(rank, salt, elements)).for_each(|(sum, value)| *sum += value);
    }
    ensure!(found == right, "rank {}: wrong sum {salt}", worker.rank);
    Ok((receipt.algorithm == Algorithm::Aggregated, !receipt.fallback))
}

/// How far rank 0 is, and how far all may go.
#[derive(Default)]
struct Course {
    reached: Mutex<(u64, u64)>,
    moved: Condvar,
}

impl Course {
    fn change(&self, change: impl FnOnce(&mut (u64, u64))) {
        change(&mut self.reached.lock().unwrap());
        self.moved.notify_all();
    }

    fn wait(&self, until: impl Fn((u64, u64)) -> bool) -> Result<()> {
        let reached = self.reached.lock().unwrap();
        let (reached, _) = self.moved.wait_timeout_while(reached, 4 * STEP, |at| !until(*at)).unwrap();
        ensure!(until(*reached), "nothing moves at {reached:?}");
        Ok(())
    }
}

/// Rounds on so many hosts while an aggregator of this configuration serves, is killed in the middle of one, and comes back. A round says
/// whether the aggregator had a part in it.
fn through_everything(
    hosts: usize,
    configuration: &str,
    round: impl Fn(&Worker, u64) -> Result<bool> + Sync,
) {
    let topology = star_with_aggregator(hosts, 1000, "0us");
    let Some(mut deployment) = deploy(&topology, |setup| setup.aggregator = configuration.to_owned()) else {
        return;
    };
    let sockets = sockets(&deployment, "a");
    let course = Course::default();
    // Operations that went wholly by the aggregator.
    let served = Mutex::new(Vec::new());
    let so_far = |count: u64| course.wait(|(done, _)| done >= count).unwrap();
    let allow = |count: u64| course.change(|at| at.1 = count);
    allow(EACH);
    std::thread::scope(|scope| {
        let job = scope.spawn(|| {
            run(
                &sockets,
                "world",
                1,
                |_| Access::Mapped,
                |worker| {
                    for salt in 0..3 * EACH {
                        // The main thread leads; ranks in the middle of an operation are not held up.
                        course.wait(|(_, allowed)| allowed > salt)?;
                        let aggregated = round(worker, salt)?;
                        if worker.rank == 0 {
                            served.lock().unwrap().extend(aggregated.then_some(salt));
                            course.change(|at| at.0 = salt + 1);
                        }
                    }
                    Ok(())
                },
            )
        });
        so_far(EACH);
        let plans = deployment.ask(&["plans"]).unwrap();
        let why = format!("{} {}", plans["plans"][0]["aggregator"], plans["plans"][0]["aggregation_reason"]);
        assert!(!served.lock().unwrap().is_empty(), "no operation went by the aggregator: {why}");
        allow(2 * EACH);
        so_far(EACH + 2);
        let aggregator = deployment.aggregator(0).unwrap().id();
        let killed = std::process::Command::new("kill").args(["-9", &aggregator.to_string()]).status();
        assert!(killed.unwrap().success());
        so_far(2 * EACH);
        let connected =
            |fabric: &serde_json::Value| fabric["aggregators"][0]["connected"].as_bool() == Some(true);
        deployment
            .wait_until("control does not notice", |this| {
                Ok((!connected(&this.ask(&["topology"])?)).then_some(()))
            })
            .unwrap();
        deployment.start_aggregator(0).unwrap();
        deployment.wait_until_ready().unwrap();
        allow(3 * EACH);
        for (rank, outcome) in job.join().unwrap().into_iter().enumerate() {
            outcome.unwrap_or_else(|error| panic!("rank {rank}: {error:#}"));
        }
    });
    deployment.end().unwrap();
}

#[test]
fn sums_are_right_while_an_aggregator_serves_is_killed_and_comes_back() {
    through_everything(HOSTS, "pool = \"1MiB\"\n", |worker, salt| {
        let (right, all) = sum(worker, salt, ELEMENTS)?;
        Ok(right && all)
    });
}

/// Small operations, which are done before all have what they come to: of sums, of what one has, and of nothing.
#[test]
fn small_operations_are_right_through_the_same() {
    const RANKS: usize = 5;
    let entered: Vec<AtomicUsize> = (0..3 * EACH).map(|_| AtomicUsize::new(0)).collect();
    let broadcasts = AtomicUsize::new(0);
    let barriers = AtomicUsize::new(0);
    // With a core that is said to be fast it pays for barriers of so few.
    let configuration = "pool = \"1MiB\"\npackets_per_second = 10_000_000\n";
    through_everything(RANKS, configuration, |worker, salt| {
        let (given, summed) = sum(worker, salt, 6000)?;
        let root = Rank(salt as u32 % worker.ranks);
        let tensor = worker.client.tensor(Dtype::F32, 1500)?;
        let own = |rank| whole(rank, !salt, 1500);
        tensor.write(0, &own(worker.rank))?;
        let receipt = worker.communicator.broadcast(&tensor, root)?.wait(STEP)?;
        let mut found = vec![0_f32; 1500];
        tensor.read(0, &mut found)?;
        ensure!(found == own(root.0), "rank {}: not what {root} has, {salt}", worker.rank);
        broadcasts.fetch_add(usize::from(receipt.algorithm == Algorithm::Aggregated), SeqCst);
        entered[salt as usize].fetch_add(1, SeqCst);
        let receipt = worker.communicator.barrier()?.wait(STEP)?;
        ensure!(
            entered[salt as usize].load(SeqCst) == RANKS,
            "rank {} passed barrier {salt} alone",
            worker.rank
        );
        barriers.fetch_add(usize::from(receipt.algorithm == Algorithm::Aggregated), SeqCst);
        Ok(given && summed)
    });
    let [broadcasts, barriers] = [broadcasts, barriers].map(AtomicUsize::into_inner);
    assert!(broadcasts >= RANKS && barriers >= RANKS, "{broadcasts} and {barriers} went by the aggregator");
}

/// Frames are lost, come twice, and are overtaken.
#[test]
fn sums_are_right_on_a_bad_network() {
    let topology = star_with_aggregator(HOSTS, 1000, "0us");
    let Some(mut deployment) = deploy(&topology, |setup| setup.aggregator = "pool = \"1MiB\"\n".into())
    else {
        return;
    };
    deployment.fabric().set_faults(Faults { lost: 50_000, twice: 10_000, late: 50_000 }).unwrap();
    let sockets = sockets(&deployment, "a");
    let served = AtomicUsize::new(0);
    let outcomes = run(
        &sockets,
        "world",
        1,
        |_| Access::Mapped,
        |worker| {
            for salt in 0..EACH {
                let (given, all) = sum(worker, salt, ELEMENTS)?;
                let (small, _) = sum(worker, salt, 2000)?;
                served.fetch_add(usize::from(given && all) + usize::from(small), SeqCst);
            }
            Ok(())
        },
    );
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        outcome.unwrap_or_else(|error| panic!("rank {rank}: {error:#}"));
    }
    assert!(served.into_inner() >= HOSTS, "the aggregator did nothing");
    let counts = deployment.wait_until("it tells nothing", |this| {
        let told = this.ask(&["topology"])?;
        let tenants = &told["aggregators"][0]["report"]["tenants"];
        Ok((tenants[0]["sums"].as_u64() > Some(0)).then(|| tenants.clone()))
    });
    println!("{}", counts.unwrap());
    deployment.end().unwrap();
}
