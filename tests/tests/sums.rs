//! What sums are, end to end. Integers go by an aggregator over a bad network, and floats have the same bits whoever adds
//! them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use anyhow::{Context, Result, ensure};
use harmonaize_client::{Algorithm, Constraints, Dtype, Element, Negotiated, Receipt, ReduceOp};
use harmonaize_testkit::deployment::Deployment;
use harmonaize_testkit::fabric::Faults;
use harmonaize_tests::STEP;
use harmonaize_tests::aggregated::{Course, EACH, rounds_until, star};
use harmonaize_tests::job::{Worker, run, sockets, succeeded};
use rustix::process::Signal;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};

const HOSTS: usize = 4;
/// Elements of a rank's tensor; no multiple of a chunk's.
const ELEMENTS: usize = (1 << 16) + 3;

/// An AllReduce of what `of` makes of each rank's words, checked against their reduction; its receipt.
fn reduced<T: Element + PartialEq>(
    worker: &Worker,
    (dtype, op): (Dtype, ReduceOp),
    salt: u64,
    of: impl Fn(u64) -> T,
    reduce: impl Fn(T, T) -> T,
) -> Result<Receipt> {
    let values = |rank| -> Vec<T> { Worker::input(rank, salt, ELEMENTS).into_iter().map(&of).collect() };
    let mut found = values(worker.rank);
    let tensor = worker.client.tensor(dtype, ELEMENTS as u64)?;
    tensor.write(0, &found)?;
    let receipt = worker.communicator.all_reduce_in_place(&tensor, op)?.wait(STEP)?;
    tensor.read(0, &mut found)?;
    let all = (0..worker.ranks).map(values);
    let right = all.reduce(|one, other| one.into_iter().zip(other).map(|(a, b)| reduce(a, b)).collect());
    ensure!(right.context("no ranks")? == found, "rank {}: wrong {op} of {dtype}, {salt}", worker.rank);
    Ok(receipt)
}

/// Frames are lost, come twice, and are overtaken.
#[test]
fn integers_aggregate_over_a_bad_network() {
    let Some(deployment) = star(HOSTS, "1MiB") else { return };
    deployment.fabric().set_faults(Faults { lost: 10_000, twice: 10_000, late: 20_000 }).unwrap();
    let sockets = sockets(&deployment, "a");
    let served: [AtomicUsize; 8] = Default::default();
    let all = |_| served.iter().all(|count| count.load(SeqCst) > 0);
    rounds_until(&sockets, all, |worker, salt| {
        let sums = ReduceOp::Sum;
        let told = [
            reduced(worker, (Dtype::I64, sums), salt, |word| word as i64, i64::wrapping_add)?,
            reduced(worker, (Dtype::U64, sums), salt, |word| word, u64::wrapping_add)?,
            reduced(worker, (Dtype::I32, sums), salt, |word| word as i32, i32::wrapping_add)?,
            reduced(worker, (Dtype::U8, sums), salt, |word| word as u8, u8::wrapping_add)?,
            reduced(worker, (Dtype::I64, ReduceOp::Min), salt, |word| word as i64, i64::min)?,
            reduced(worker, (Dtype::U32, ReduceOp::Product), salt, |word| word as u32, u32::wrapping_mul)?,
            reduced(worker, (Dtype::F64, sums), salt, |word| (word >> 40) as f64, |a, b| a + b)?,
            reduced(worker, (Dtype::F32, sums), salt, |word| (word >> 44) as f32, |a, b| a + b)?,
        ];
        for (count, told) in served.iter().zip(&told) {
            let whole = told.algorithm == Algorithm::Aggregated && !told.fallback;
            count.fetch_add(usize::from(whole), SeqCst);
        }
        Ok(0)
    });
    println!("went whole by the aggregator, by type: {served:?}");
    assert!(all(0), "some types went by the hosts: {served:?}");
    deployment.end().unwrap();
}

/// Waits until the only communicator goes by another epoch than its first.
fn another_epoch(deployment: &mut Deployment) -> serde_json::Value {
    let told = deployment.wait_until("no other epoch", |this| {
        let told = this.ask(&["plans"])?["plans"][0].clone();
        Ok(told["epoch"].as_u64().is_some_and(|epoch| epoch > 1).then_some(told))
    });
    told.unwrap()
}

fn agree(worker: &Worker, wanted: &Constraints) -> Result<()> {
    if worker.rank == 0 {
        let outcome = worker.client.negotiate("world", wanted, |_, _| None)?;
        ensure!(matches!(outcome, Negotiated::Agreed(_)), "{outcome:?}");
    }
    Ok(())
}

/// Floats whose sum depends on the order in which they are added.
fn floats(rank: u32, salt: u64, elements: usize) -> Vec<f32> {
    let words = Worker::input(rank, salt, elements).into_iter();
    words.map(|word| (word >> 32) as i32 as f32 * f32::powi(2.0, (word % 40) as i32 - 30)).collect()
}

/// Sums in order, checked bit for bit; whether all went whole by the aggregator.
fn in_order(worker: &Worker, salt: u64) -> Result<bool> {
    let mut whole = true;
    for (elements, op) in [(700, ReduceOp::Sum), (ELEMENTS, ReduceOp::Sum), (9000, ReduceOp::Average)] {
        let tensor = worker.client.tensor(Dtype::F32, elements as u64)?;
        tensor.write(0, &floats(worker.rank, salt, elements))?;
        let receipt = worker.communicator.all_reduce_in_place(&tensor, op)?.wait(STEP)?;
        let mut found = vec![0_f32; elements];
        tensor.read(0, &mut found)?;
        let all: Vec<Vec<f32>> = (0..worker.ranks).map(|rank| floats(rank, salt, elements)).collect();
        for (at, found) in found.iter().enumerate() {
            let sum =
                all.iter().map(|values| values[at]).reduce(|sum, value| sum + value).context("no ranks")?;
            let right = if op == ReduceOp::Average { sum / worker.ranks as f32 } else { sum };
            let (algorithm, fallback) = (receipt.algorithm, receipt.fallback);
            let same = right.to_bits() == found.to_bits();
            ensure!(same, "{op} {salt} at {at}: {found:e}, {right:e} in order; {algorithm:?} {fallback}");
        }
        whole &= receipt.algorithm == Algorithm::Aggregated && !receipt.fallback || elements == 700;
    }
    Ok(whole)
}

/// All bits are those of the one order, by the aggregator and by the hosts alone. So they are by the hosts where the aggregator
/// was killed in the middle.
#[test]
fn ordered_sums_are_bitwise_reproducible() {
    let Some(mut deployment) = star(HOSTS, "1MiB") else { return };
    let sockets = sockets(&deployment, "a");
    let (course, whole) = (Course::default(), AtomicU64::new(0));
    let killed_after = 1 + 2 * EACH;
    std::thread::scope(|scope| {
        let job = scope.spawn(|| {
            let work = |worker: &Worker| {
                agree(worker, &Constraints::new().ordered(true))?;
                worker.communicator.barrier()?.wait(STEP)?;
                course.change(|at| at.0 = at.0.max(1));
                for salt in 1..killed_after + EACH {
                    course.wait(|(_, allowed)| allowed > salt)?;
                    let by_aggregator = in_order(worker, salt)?;
                    if worker.rank == 0 {
                        whole.fetch_add(u64::from(by_aggregator), SeqCst);
                        course.change(|at| at.0 = salt + 1);
                    }
                }
                Ok(())
            };
            run(&sockets, "world", 1, work)
        });
        course.wait(|(done, _)| done > 0).unwrap();
        let plan = another_epoch(&mut deployment);
        let mut ranges = plan["algorithms"].as_array().unwrap().iter();
        let two_shot =
            ranges.find(|range| range["collective"] == "allreduce" && range["algorithm"] == "two-shot");
        assert_eq!(two_shot.and_then(|range| range["to_bytes"].as_u64()), Some(1 << 44), "{plan}");
        course.change(|at| at.1 = killed_after);
        course.wait(|(done, _)| done > 1 + EACH).unwrap();
        deployment.aggregator(0).unwrap().signal(Signal::KILL).unwrap();
        course.change(|at| at.1 = u64::MAX);
        succeeded(job.join().unwrap());
    });
    let whole = whole.into_inner();
    println!("{whole} of {} rounds went whole by the aggregator", killed_after + EACH);
    assert!(whole > 0 && whole < killed_after + EACH - 1, "{whole} rounds went by the aggregator");
}
