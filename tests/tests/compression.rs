//! Budgets for errors, end to end: real agents and control on slow links. What a tenant lets be lost, its receipts tell, and nobody
//! else's tensors lose anything.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use anyhow::{Result, ensure};
use harmonaize_client::{
    Access, Algorithm, Budget, Client, Communicator, Error, JoinOptions, JoinRefusal, Rank, Receipt, ReduceOp,
};
use harmonaize_tests::job::{Worker, at_all, deploy, options, sockets, succeeded};
use harmonaize_tests::{STEP, star};
use std::path::PathBuf;

const HOSTS: u32 = 3;
/// Elements of a rank's tensor; no multiple of any block's length.
const ELEMENTS: usize = (1 << 18) + 3;
const BOUND: f64 = 0.01;

/// A thread per host, joined within the budget; what each came to.
fn ranks<T: Send>(
    sockets: &[PathBuf],
    job: &str,
    budget: &Budget,
    work: impl Fn(&Worker) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let one = |rank: u32, socket: &PathBuf| {
        // Less than one tensor: they and their feedback lie in several regions.
        let client = Client::attach(socket, options(Access::Mapped, 1))?;
        let within = JoinOptions { timeout: STEP, budget: budget.clone(), ..JoinOptions::default() };
        let communicator = client.join_with(job, Rank(rank), sockets.len() as u32, &within)?;
        work(&Worker { client, communicator, rank, ranks: sockets.len() as u32 })
    };
    at_all((0..).zip(sockets), |(rank, socket)| one(rank, socket))
}

/// What a rank contributes: heavy tails, as gradients have.
fn heavy_tailed(rank: u32, salt: u64) -> Vec<f32> {
    let unit = |bits: u64| (bits >> 40) as f32 / (1 << 24) as f32;
    let words = Worker::input(rank, salt, 2 * ELEMENTS);
    words.chunks_exact(2).map(|two| (unit(two[0]) - 0.5) / (unit(two[1]) + 2e-3).sqrt()).collect()
}

/// Whole numbers, whose sums are exact in whatever order.
fn whole(rank: u32, salt: u64) -> Vec<f32> {
    Worker::input(rank, salt, ELEMENTS).into_iter().map(|word| (word >> 48) as f32 - 32_768.0).collect()
}

fn sums(input: impl Fn(u32) -> Vec<f32>) -> Vec<f64> {
    let mut sums = vec![0_f64; ELEMENTS];
    for rank in 0..HOSTS {
        sums.iter_mut().zip(input(rank)).for_each(|(sum, value)| *sum += f64::from(value));
    }
    sums
}

/// An AllReduce of those values.
fn reduce(worker: &Worker, values: &[f32]) -> Result<(Vec<f32>, Receipt)> {
    reduce_by(worker, &worker.communicator, values)
}

/// The same by another communicator of the process.
fn reduce_by(worker: &Worker, by: &Communicator, values: &[f32]) -> Result<(Vec<f32>, Receipt)> {
    let input = worker.client.tensor(harmonaize_client::Dtype::F32, values.len() as u64)?;
    input.write(0, values)?;
    let output = worker.client.tensor(harmonaize_client::Dtype::F32, values.len() as u64)?;
    let receipt = by.all_reduce(&input, &output, ReduceOp::Sum)?.wait(STEP)?;
    let mut found = vec![0_f32; values.len()];
    output.read(0, &mut found)?;
    Ok((found, receipt))
}

/// An AllReduce whose result must be off by no more than the receipt says. The receipt must be within the
/// budget.
fn compressed(worker: &Worker, salt: u64) -> Result<Vec<u32>> {
    let (found, receipt) = reduce(worker, &heavy_tailed(worker.rank, salt))?;
    ensure!(receipt.algorithm == Algorithm::DirectCoded, "{receipt:?}");
    ensure!(receipt.bits_per_element > 0.0 && receipt.bits_per_element < 32.0, "{receipt:?}");
    ensure!(receipt.error > 0.0 && f64::from(receipt.error) <= BOUND, "{receipt:?}");
    let right = sums(|rank| heavy_tailed(rank, salt));
    let lost: f64 = found.iter().zip(&right).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
    let signal: f64 =
        (0..HOSTS).flat_map(|rank| heavy_tailed(rank, salt)).map(|x| f64::from(x).powi(2)).sum();
    // The receipt is a rounded f32.
    ensure!(lost / signal <= f64::from(receipt.error) * 1.000_01, "{} is off: {receipt:?}", lost / signal);
    ensure!(lost > 0.0, "nothing was lost, against {receipt:?}");
    // Ranks' tensors differ, but not at random: what encoders measured is about what is lost.
    let measured = f64::from(receipt.measured_error);
    ensure!((measured / (lost / signal) - 1.0).abs() < 0.25, "{} is off: {receipt:?}", lost / signal);
    ensure!(!["exact", "unknown"].contains(&receipt.codec), "{receipt:?}");
    Ok(found.iter().map(|value| value.to_bits()).collect())
}

/// An AllReduce that loses nothing.
fn uncompressed(worker: &Worker, salt: u64) -> Result<()> {
    let (found, receipt) = reduce(worker, &whole(worker.rank, salt))?;
    ensure!(receipt.algorithm == Algorithm::Ring && receipt.error == 0.0, "{receipt:?}");
    ensure!(receipt.codec == "exact" && receipt.measured_error == 0.0, "{receipt:?}");
    let right = sums(|rank| whole(rank, salt));
    ensure!(found.iter().zip(&right).all(|(a, b)| f64::from(*a) == *b), "wrong sum of whole numbers");
    worker.sum(salt, 10_000, true, STEP)
}

/// An AllToAll whose blocks from other ranks are off by what the receipt says, and the own one is not.
fn wire_bytes(worker: &Worker, salt: u64) -> Result<()> {
    let block = ELEMENTS / HOSTS as usize;
    let part = |from: u32, to: u32| heavy_tailed(from, salt)[to as usize * block..][..block].to_vec();
    let tensor = || worker.client.tensor(harmonaize_client::Dtype::F32, (block * HOSTS as usize) as u64);
    let (input, output) = (tensor()?, tensor()?);
    input.write(0, &heavy_tailed(worker.rank, salt)[..block * HOSTS as usize])?;
    let receipt = worker.communicator.all_to_all(&input, &output)?.wait(STEP)?;
    ensure!(receipt.algorithm == Algorithm::Pairwise && receipt.bits_per_element < 16.0, "{receipt:?}");
    let (mut error, mut signal) = (0.0, 0.0);
    for from in 0..HOSTS {
        let (mut found, sent) = (vec![0_f32; block], part(from, worker.rank));
        output.read(u64::from(from) * block as u64, &mut found)?;
        ensure!(from != worker.rank || found == sent, "the own block is another");
        if from != worker.rank {
            error +=
                found.iter().zip(&sent).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum::<f64>();
            signal += sent.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
        }
    }
    let (lost, told) = (error / signal, f64::from(receipt.error));
    ensure!(lost > 0.0 && lost <= BOUND && (lost / told - 1.0).abs() < 0.01, "{lost} is off: {receipt:?}");
    Ok(())
}

/// An AllGather, in place at one rank, whose blocks are off by what the receipt says, the own one too.
fn gathered(worker: &Worker, salt: u64) -> Result<Vec<u32>> {
    let (block, mine) = (ELEMENTS / HOSTS as usize, heavy_tailed(worker.rank, salt));
    let tensor = |elements: usize| worker.client.tensor(harmonaize_client::Dtype::F32, elements as u64);
    let output = tensor(block * HOSTS as usize)?;
    let receipt = if worker.rank == 1 {
        output.write(block as u64, &mine[..block])?;
        worker.communicator.all_gather_in_place(&output)?.wait(STEP)?
    } else {
        let input = tensor(block)?;
        input.write(0, &mine[..block])?;
        worker.communicator.all_gather(&input, &output)?.wait(STEP)?
    };
    ensure!(receipt.algorithm == Algorithm::DirectCoded && receipt.bits_per_element < 16.0, "{receipt:?}");
    let mut found = vec![0_f32; block * HOSTS as usize];
    output.read(0, &mut found)?;
    let (mut error, mut signal) = (0.0, 0.0);
    for (from, found) in (0..HOSTS).zip(found.chunks_exact(block)) {
        let sent = heavy_tailed(from, salt);
        error += found.iter().zip(&sent).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum::<f64>();
        signal += sent[..block].iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
    }
    let (lost, told) = (error / signal, f64::from(receipt.error));
    ensure!(lost > 0.0 && lost <= BOUND && (lost / told - 1.0).abs() < 0.01, "{lost} is off: {receipt:?}");
    Ok(found.iter().map(|value| value.to_bits()).collect())
}

/// AllReduces until one loses nothing: at all ranks the same.
fn until_uncompressed(worker: &Worker) -> Result<()> {
    for salt in 0..200 {
        let (_, receipt) = reduce(worker, &heavy_tailed(worker.rank, salt))?;
        let tensor = worker.tensor(&[u64::from(receipt.error == 0.0)])?;
        worker.communicator.all_reduce_in_place(&tensor, ReduceOp::Sum)?.wait(STEP)?;
        let agree = worker.contents(&tensor)?;
        ensure!(agree == [0] || agree == [u64::from(HOSTS)], "{agree:?} ranks were exact");
        if agree != [0] {
            return Ok(());
        }
    }
    anyhow::bail!("the budget took no effect")
}

#[test]
fn lossy_sums_stay_within_their_budget() {
    let Some(mut deployment) = deploy(&star(HOSTS as usize, "100Mbit/s"), |_| ()) else { return };
    let (a, b) = (sockets(&deployment, "a"), sockets(&deployment, "b"));
    let lossy = |worker: &Worker| -> Result<Vec<Vec<u32>>> {
        // A class of tensors with a budget of its own is a communicator of its own.
        let within = JoinOptions { timeout: STEP, ..JoinOptions::default() };
        let norms = worker.client.join_with("norms", Rank(worker.rank), worker.ranks, &within)?;
        let mut found = Vec::new();
        for salt in 0..3 {
            found.push(compressed(worker, salt)?);
            let (sum, receipt) = reduce_by(worker, &norms, &whole(worker.rank, salt))?;
            ensure!((receipt.codec, receipt.error) == ("exact", 0.0), "{receipt:?}");
            let right = sums(|rank| whole(rank, salt));
            ensure!(sum.iter().zip(&right).all(|(a, b)| f64::from(*a) == *b), "wrong sum beside");
        }
        wire_bytes(worker, 9)?;
        found.push(gathered(worker, 10)?);
        // One rank alone changes nothing.
        if worker.rank == 0 {
            worker.communicator.set_budget(&Budget::Exact)?;
        }
        worker.communicator.barrier()?.wait(STEP)?;
        found.extend((3..6).map(|salt| compressed(worker, salt)).collect::<Result<Vec<_>>>()?);
        if worker.rank != 0 {
            worker.communicator.set_budget(&Budget::Exact)?;
        }
        until_uncompressed(worker)?;
        uncompressed(worker, 7)?;
        Ok(found)
    };
    let strict = |worker: &Worker| (0..6).try_for_each(|salt| uncompressed(worker, salt));
    std::thread::scope(|scope| {
        let beside = scope.spawn(|| ranks(&b, "job", &Budget::Exact, strict));
        let found = succeeded(ranks(&a, "job", &Budget::Vnmse(BOUND), lossy));
        for (rank, theirs) in (0_u32..).zip(&found) {
            assert!(*theirs == found[0], "rank {rank} has other bits than rank 0");
        }
        succeeded(beside.join().unwrap());
    });
    deployment.check().unwrap();
}

/// Whole numbers in every sixteenth block of 4096 elements, at each rank in another; zeros in between.
fn sparse_input(rank: u32, salt: u64) -> Vec<f32> {
    let mut values = whole(rank, salt);
    for (index, block) in values.chunks_mut(4096).enumerate() {
        if !(index as u32 + 5 * rank).is_multiple_of(16) {
            block.fill(0.0);
        }
    }
    values
}

#[test]
fn lossless_budget_elides_zeros_only() {
    let topology = star(HOSTS as usize, "100Mbit/s");
    let Some(mut deployment) = deploy(&topology, |setup| setup.measure("100Mbit/s")) else { return };
    let (a, b) = (sockets(&deployment, "a"), sockets(&deployment, "b"));
    // Until a whole operation went without, at all ranks. Contributions have a sixteenth of their blocks, sums of three ranks three.
    let until_spared = |worker: &Worker| -> Result<Receipt> {
        for salt in 0..400 {
            let (found, receipt) = reduce(worker, &sparse_input(worker.rank, salt))?;
            let right = sums(|rank| sparse_input(rank, salt));
            let same = found.iter().zip(&right).all(|(a, b)| a.to_bits() == (*b as f32).to_bits());
            ensure!(same && receipt.error == 0.0 && receipt.measured_error == 0.0, "{receipt:?}");
            ensure!(["exact", "nonzero blocks"].contains(&receipt.codec), "{receipt:?}");
            let tensor = worker.tensor(&[u64::from(receipt.bits_per_element > 32.0 * 0.3)])?;
            worker.communicator.all_reduce_in_place(&tensor, ReduceOp::Sum)?.wait(STEP)?;
            if worker.contents(&tensor)? == [0] {
                return Ok(receipt);
            }
        }
        anyhow::bail!("zeros are sent all the time")
    };
    let dense = |worker: &Worker| (0..6).try_for_each(|salt| uncompressed(worker, salt));
    std::thread::scope(|scope| {
        let beside = scope.spawn(|| ranks(&b, "job", &Budget::Exact, dense));
        for receipt in succeeded(ranks(&a, "job", &Budget::Exact, until_spared)) {
            assert_eq!((receipt.codec, receipt.algorithm), ("nonzero blocks", Algorithm::DirectCoded));
        }
        succeeded(beside.join().unwrap());
    });
    deployment.check().unwrap();
}

/// What 4 bits leave out of one step comes in the next. The mean of what is received tends to the mean of what was sent.
#[test]
fn error_feedback_preserves_the_mean() {
    const STEPS: usize = 12;
    let Some(mut deployment) = deploy(&star(HOSTS as usize, "100Mbit/s"), |_| ()) else { return };
    let sockets = sockets(&deployment, "a");
    let exact = sums(|rank| heavy_tailed(rank, 1));
    let off = |sum: &[f64], steps: usize| -> f64 {
        let each = sum.iter().zip(&exact).map(|(sum, right)| (sum / steps as f64 - right).powi(2));
        each.sum::<f64>().sqrt()
    };
    let steps = |worker: &Worker| -> Result<(f64, f64, f64)> {
        let input = worker.client.tensor(harmonaize_client::Dtype::F32, ELEMENTS as u64)?;
        let output = worker.client.tensor(harmonaize_client::Dtype::F32, ELEMENTS as u64)?;
        let feedback = worker.client.feedback(ELEMENTS as u64)?;
        input.write(0, &heavy_tailed(worker.rank, 1))?;
        let (mut found, mut figures) = (vec![0_f32; ELEMENTS], Vec::new());
        for with in [false, true] {
            let mut sum = vec![0_f64; ELEMENTS];
            for step in 0..STEPS {
                let communicator = &worker.communicator;
                let mut operation = match with {
                    true => {
                        communicator.all_reduce_with_feedback(&input, &output, ReduceOp::Sum, &feedback)?
                    }
                    false => communicator.all_reduce(&input, &output, ReduceOp::Sum)?,
                };
                let receipt = operation.wait(STEP)?;
                ensure!(receipt.algorithm == Algorithm::DirectCoded, "{receipt:?}");
                output.read(0, &mut found)?;
                sum.iter_mut().zip(&found).for_each(|(sum, value)| *sum += f64::from(*value));
                if with && step == 0 {
                    figures.push(off(&sum, 1));
                }
            }
            figures.push(off(&sum, STEPS));
        }
        // Another shape needs another feedback, and each tensor its own.
        let other = worker.client.feedback(8)?;
        let refused = worker.communicator.all_reduce_with_feedback(&input, &output, ReduceOp::Sum, &other);
        ensure!(matches!(refused, Err(Error::Shape(_))), "{refused:?}");
        feedback.read(0, &mut found)?;
        ensure!(found.iter().any(|owed| *owed != 0.0), "nothing is owed");
        feedback.reset()?;
        feedback.read(0, &mut found)?;
        ensure!(found.iter().all(|owed| *owed == 0.0), "something is owed after a reset");
        let [without, one, with] = figures[..] else { anyhow::bail!("{figures:?}") };
        Ok((without, one, with))
    };
    for (without, one, with) in
        succeeded(ranks(&sockets, "job", &Budget::Codecs(vec!["int4".to_owned()]), steps))
    {
        assert!(without > 0.9 * one, "{one} at first, without feedback {without} in the mean");
        assert!(with < 0.25 * one, "{one} at first, with feedback {with} in the mean of {STEPS}");
    }
    deployment.check().unwrap();
}

/// Whoever comes second is told whom it disagrees with, and joins as soon as it agrees.
#[test]
fn a_differing_budget_is_refused() {
    let Some(mut deployment) = deploy(&star(2, "100Mbit/s"), |_| ()) else { return };
    let sockets = sockets(&deployment, "a");
    let wanted = [Budget::MatchBf16, Budget::Vnmse(BOUND)];
    let join = &|rank: usize| -> Result<bool> {
        let client = Client::attach(&sockets[rank], options(Access::Mapped, 64))?;
        let within =
            |budget: &Budget| JoinOptions { timeout: STEP, budget: budget.clone(), ..JoinOptions::default() };
        let join = |budget| client.join_with("job", Rank(rank as u32), 2, &within(budget));
        let (communicator, told) = match join(&wanted[rank]) {
            Ok(communicator) => (communicator, false),
            Err(Error::Join { kind: JoinRefusal::Budget, concerned, .. }) => {
                ensure!(concerned == [Rank(1 - rank as u32)], "concerned: {concerned:?}");
                (join(&wanted[1 - rank])?, true)
            }
            Err(error) => return Err(error.into()),
        };
        communicator.barrier()?.wait(STEP)?;
        Ok(told)
    };
    let told = succeeded(at_all([0, 1], join));
    assert!(told[0] != told[1], "told: {told:?}");
    deployment.check().unwrap();
}
