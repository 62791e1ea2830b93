//! Operations that aggregators may take part in, while something happens to one of them.

use crate::job::{Worker, deploy, run, sockets, succeeded};
use crate::{STEP, star_with_aggregator};
use anyhow::{Result, ensure};
use harmonaize_client::{Algorithm, Dtype, ReduceOp};
use harmonaize_testkit::deployment::Deployment;
use rustix::process::Signal;
use std::cell::Cell;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// Operations before, between and after what happens to an aggregator; of the last at least.
pub const EACH: u64 = 10;
/// Most operations of a test.
pub const MOST: usize = 10_000;

/// Hosts on links of 1 Gbit/s, and an aggregator with a pool of that size. None, loudly, without the privilege for namespaces.
///
/// # Panics
/// If the deployment fails: a test cannot go on.
pub fn star(hosts: usize, pool: &str) -> Option<Deployment> {
    let topology = star_with_aggregator(hosts, 1000, "0us");
    deploy(&topology, |setup| setup.aggregator = format!("pool = \"{pool}\"\n"))
}

/// Whole numbers, whose sums are exact in whatever order.
pub fn whole(rank: u32, salt: u64, elements: usize) -> Vec<f32> {
    Worker::input(rank, salt, elements).into_iter().map(|word| (word >> 48) as f32 - 32_768.0).collect()
}

/// One operation, checked; whether the aggregator was given it, and did it all.
pub fn sum(worker: &Worker, salt: u64, elements: usize) -> Result<(bool, bool)> {
    sum_within(worker, salt, elements, STEP)
}

/// The same for a slower machine.
pub fn sum_within(worker: &Worker, salt: u64, elements: usize, within: Duration) -> Result<(bool, bool)> {
    let tensor = worker.client.tensor(Dtype::F32, elements as u64)?;
    tensor.write(0, &whole(worker.rank, salt, elements))?;
    let receipt = worker.communicator.all_reduce_in_place(&tensor, ReduceOp::Sum)?.wait(within)?;
    let mut found = vec![0_f32; elements];
    tensor.read(0, &mut found)?;
    let mut right = vec![0_f32; elements];
    for rank in 0..worker.ranks {
        right.iter_mut().zip(whole(rank, salt, elements)).for_each(|(sum, value)| *sum += value);
    }
    ensure!(found == right, "rank {}: wrong sum {salt}", worker.rank);
    Ok((receipt.algorithm == Algorithm::Aggregated, !receipt.fallback))
}

/// Runs rounds at all ranks, again and again in communicators of their own, until enough of them count. On a bad network hosts may do
/// without their aggregator as long as one lasts. How many count, also where these are never enough.
///
/// # Panics
/// If one fails: a test cannot go on.
pub fn rounds_until(
    sockets: &[PathBuf],
    enough: impl Fn(usize) -> bool,
    round: impl Fn(&Worker, u64) -> Result<usize> + Sync,
) -> usize {
    let work = |worker: &Worker| (0..EACH).try_fold(0, |count, salt| Ok(count + round(worker, salt)?));
    let mut served = 0;
    for _ in 0..8 {
        served += succeeded(run(sockets, "world", 1, work)).into_iter().sum::<usize>();
        if enough(served) {
            break;
        }
    }
    served
}

/// How far rank 0 is, and how far all may go.
#[derive(Default)]
pub struct Course {
    /// The two.
    pub reached: Mutex<(u64, u64)>,
    moved: Condvar,
}

impl Course {
    /// Changes it, and wakes who waits.
    #[expect(clippy::unwrap_used, clippy::missing_panics_doc, reason = "support for tests")]
    pub fn change(&self, change: impl FnOnce(&mut (u64, u64))) {
        change(&mut self.reached.lock().unwrap());
        self.moved.notify_all();
    }

    /// Waits until it is so.
    ///
    /// # Errors
    /// If it is not in time.
    #[expect(clippy::unwrap_used, clippy::missing_panics_doc, reason = "support for tests")]
    pub fn wait(&self, until: impl Fn((u64, u64)) -> bool) -> Result<()> {
        let reached = self.reached.lock().unwrap();
        let (reached, _) = self.moved.wait_timeout_while(reached, 4 * STEP, |at| !until(*at)).unwrap();
        ensure!(until(*reached), "nothing moves at {reached:?}");
        Ok(())
    }
}

/// Rounds on the hosts of a topology, a rank each, while aggregators of this configuration serve. The `position`-th is killed in the middle
/// of one, comes back, and is used again. A round says whether all of it went by aggregators. What control said of them at first; none
/// without the privilege for namespaces.
///
/// # Panics
/// If anything is not as it should be: a test cannot go on.
#[expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "support for tests")]
pub fn through_everything(
    topology: &str,
    configuration: &str,
    position: usize,
    round: impl Fn(&Worker, u64) -> Result<bool> + Sync,
) -> Option<String> {
    let mut deployment = deploy(topology, |setup| setup.aggregator = configuration.to_owned())?;
    let sockets = sockets(&deployment, "a");
    let course = Course::default();
    // Operations that went wholly by the aggregator.
    let served = Mutex::new(Vec::new());
    let so_far = |count: u64| course.wait(|(done, _)| done >= count).unwrap();
    let allow = |count: u64| course.change(|at| at.1 = count);
    let over = AtomicBool::new(false);
    allow(EACH);
    let told = std::thread::scope(|scope| {
        let job = scope.spawn(|| {
            run(&sockets, "world", 1, |worker| {
                for salt in 0..MOST as u64 {
                    // The main thread leads; ranks in the middle of an operation are not held up.
                    course.wait(|(_, allowed)| allowed > salt || over.load(SeqCst))?;
                    if course.reached.lock().unwrap().1 <= salt {
                        break;
                    }
                    let aggregated = round(worker, salt)?;
                    if worker.rank == 0 {
                        served.lock().unwrap().extend(aggregated.then_some(salt));
                        course.change(|at| at.0 = salt + 1);
                    }
                }
                Ok(())
            })
        });
        so_far(EACH);
        let plans = deployment.ask(&["plans"]).unwrap();
        let why = format!("{} {}", plans["plans"][0]["aggregator"], plans["plans"][0]["aggregation_reason"]);
        assert!(!served.lock().unwrap().is_empty(), "no operation went by the aggregator: {why}");
        allow(2 * EACH);
        so_far(EACH + 2);
        deployment.aggregator(position).unwrap().signal(Signal::KILL).unwrap();
        so_far(2 * EACH);
        let connected =
            |fabric: &serde_json::Value| fabric["aggregators"][position]["connected"].as_bool() == Some(true);
        deployment
            .wait_until("control does not notice", |this| {
                Ok((!connected(&this.ask(&["topology"])?)).then_some(()))
            })
            .unwrap();
        deployment.start_aggregator(position).unwrap();
        deployment.wait_until_ready().unwrap();
        let count = Cell::new(2 * EACH);
        let again = deployment.wait_until("it is not used again", |_| {
            count.set(count.get() + EACH);
            allow(count.get());
            so_far(count.get());
            Ok(served.lock().unwrap().iter().any(|salt| *salt >= 2 * EACH).then_some(()))
        });
        over.store(true, SeqCst);
        course.change(|_| ());
        succeeded(job.join().unwrap());
        again.unwrap();
        why
    });
    deployment.end().unwrap();
    Some(told)
}
