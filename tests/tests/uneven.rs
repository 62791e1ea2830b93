//! Collectives whose ranks' counts differ, end to end: real agents and control in network namespaces.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use anyhow::{Result, ensure};
use harmonaize_client::{Access, Error, Rank, ReduceOp, Status};
use harmonaize_tests::job::{Worker, deploy, options, run, run_with, sockets};
use harmonaize_tests::{STEP, star};

/// Elements of each rank, none of some.
const COUNTS: [u64; 6] = [5_000, 0, 17, 1, 0, 150_000];

/// What one rank has for another, of so many elements.
fn block(from: u32, to: u32, count: u64) -> Vec<u64> {
    Worker::input(from, 1000 + u64::from(to), count as usize)
}

fn pair(from: u32, to: u32) -> u64 {
    COUNTS[(from as usize + 5 * to as usize) % 6] / 4
}

fn all_five(worker: &Worker) -> Result<()> {
    let (communicator, me, ranks) = (&worker.communicator, worker.rank, worker.ranks);
    let (counts, mine) = (&COUNTS[..ranks as usize], COUNTS[me as usize]);
    let sum: u64 = counts.iter().sum();
    let blocks = |of: &dyn Fn(u32, u64) -> Vec<u64>| -> Vec<u64> {
        (0..ranks).zip(counts).flat_map(|(rank, count)| of(rank, *count)).collect()
    };
    let (own, all) = (worker.tensor(&block(me, 0, mine))?, worker.tensor(&vec![0; sum as usize])?);
    let gathered = blocks(&|rank, count| block(rank, 0, count));
    communicator.all_gather_v(&own, &all, counts)?.wait(STEP)?;
    ensure!(worker.contents(&all)? == gathered, "wrong AllGather");
    let start: u64 = counts[..me as usize].iter().sum();
    let all = worker.tensor(&vec![0; sum as usize])?;
    let slice = all.slice(start..start + mine)?;
    slice.write(0, &block(me, 0, mine))?;
    communicator.all_gather_v(&slice, &all, counts)?.wait(STEP)?;
    ensure!(worker.contents(&all)? == gathered, "wrong AllGather in place");

    let scattered = |from: u32| blocks(&|rank, count| block(from, rank, count));
    let (input, output) = (worker.tensor(&scattered(me))?, worker.tensor(&vec![0; mine as usize])?);
    communicator.reduce_scatter_v(&input, &output, ReduceOp::Sum, counts)?.wait(STEP)?;
    let mut expected = vec![0_u64; mine as usize];
    for from in 0..ranks {
        let theirs = block(from, me, mine);
        expected.iter_mut().zip(theirs).for_each(|(sum, value)| *sum = sum.wrapping_add(value));
    }
    ensure!(worker.contents(&output)? == expected, "wrong ReduceScatter");

    for root in [0, ranks - 1] {
        let here = me == root;
        let all = worker.tensor(&vec![0; if here { sum as usize } else { 0 }])?;
        communicator.gather_v(&own, here.then_some(&all), counts, Rank(root))?.wait(STEP)?;
        ensure!(!here || worker.contents(&all)? == gathered, "wrong Gather");
        let input = worker.tensor(&if here { scattered(root) } else { Vec::new() })?;
        communicator.scatter_v(here.then_some(&input), &output, counts, Rank(root))?.wait(STEP)?;
        ensure!(worker.contents(&output)? == block(root, me, mine), "wrong Scatter");
    }

    let (send, receive): (Vec<u64>, Vec<u64>) =
        (0..ranks).map(|rank| (pair(me, rank), pair(rank, me))).unzip();
    let concatenated = |of: &dyn Fn(u32) -> Vec<u64>| (0..ranks).flat_map(of).collect::<Vec<u64>>();
    let input = worker.tensor(&concatenated(&|to| block(me, to, pair(me, to))))?;
    let output = worker.tensor(&vec![0; receive.iter().sum::<u64>() as usize])?;
    let most = COUNTS.iter().max().unwrap() / 4;
    communicator.all_to_all_v(&input, &send, &output, &receive, most)?.wait(STEP)?;
    let expected = concatenated(&|from| block(from, me, pair(from, me)));
    ensure!(worker.contents(&output)? == expected, "wrong AllToAll");

    let shape = |what: Result<_, Error>| {
        ensure!(matches!(what, Err(Error::Shape(_))), "{:?}", what.err());
        Ok(())
    };
    shape(communicator.all_gather_v(&own, &output, &counts[1..]))?;
    shape(communicator.all_gather_v(&own, &input, &[mine + 1; 6][..ranks as usize]))?;
    shape(communicator.all_to_all_v(&input, &send, &output, &receive, 1))?;
    communicator.barrier()?.wait(STEP)?;
    Ok(())
}

#[test]
fn every_collective_takes_counts_of_its_own_for_each_rank() {
    let Some(deployment) = deploy(&star(3, "10Gbit/s"), |_| ()) else { return };
    let mixed = |rank: u32| if rank.is_multiple_of(2) { Access::Remote } else { Access::Mapped };
    let sockets = sockets(&deployment, "a");
    let mapped = run(&sockets, "uneven", 2, all_five);
    let remote = run_with(&sockets, "remote", 2, |rank| options(mixed(rank), 64), all_five);
    for result in mapped.into_iter().chain(remote) {
        result.unwrap();
    }
}

/// Ranks that say different things of a count are told who said what.
#[test]
fn counts_that_differ_name_who_said_what() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let results = run(&sockets(&deployment, "a"), "gather", 1, |worker| {
        // Too large to be copied: nobody is done before all are.
        let counts = if worker.rank == 0 { [60_000, 50_000] } else { [60_000, 40_000] };
        let input = worker.tensor(&vec![1; counts[worker.rank as usize] as usize])?;
        let output = worker.tensor(&vec![0; counts.iter().sum::<u64>() as usize])?;
        worker.communicator.all_gather_v(&input, &output, &counts)?.wait(STEP)?;
        Ok(())
    });
    let pairs = run(&sockets(&deployment, "a"), "pairs", 1, |worker| {
        let (send, receive) = if worker.rank == 0 { ([1, 60_000], [1, 7]) } else { ([7, 1], [50_000, 1]) };
        let sum = |counts: &[u64]| counts.iter().sum::<u64>() as usize;
        let (input, output) = (worker.tensor(&vec![1; sum(&send)])?, worker.tensor(&vec![0; sum(&receive)])?);
        worker.communicator.all_to_all_v(&input, &send, &output, &receive, 60_000)?.wait(STEP)?;
        Ok(())
    });
    let gathered = "the block of rank 1 has 50000 elements by rank 0, 40000 elements by rank 1";
    let paired = "what rank 0 sends rank 1 has 60000 elements by rank 0, 50000 elements by rank 1";
    for (results, text) in [(results, gathered), (pairs, paired)] {
        for result in results {
            let error = result.expect_err("a mismatch is an error");
            let found = error.downcast_ref::<Error>().unwrap();
            assert!(matches!(found, Error::Operation { status: Status::Mismatch, .. }), "{error:#}");
            assert!(error.to_string().contains(text), "{error:#}");
        }
    }
}
