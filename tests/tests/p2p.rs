//! Messages from rank to rank, end to end: real agents and control in network namespaces.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use anyhow::{Result, ensure};
use harmonaize_client::{
    Client, Communicator, Dtype, Error, OperationOptions, Rank, ReduceOp, Status, Tensor,
};
use harmonaize_tests::job::{Worker, deploy, run, sockets};
use harmonaize_tests::{STEP, star};
use std::time::Duration;

/// Elements of a message; every third is empty.
fn elements(from: u32, to: u32) -> u64 {
    [0, 1, 200_000][(from + to) as usize % 3]
}

fn message(from: u32, to: u32) -> Vec<u64> {
    Worker::input(from, 2000 + u64::from(to), elements(from, to) as usize)
}

/// From docs/tenants.md: around.
fn shift(job: &Communicator, mine: &Tensor, theirs: &Tensor) -> Result<(), Error> {
    let (rank, ranks) = (job.rank().0, job.ranks());
    let mut sent = job.send(mine, Rank((rank + 1) % ranks))?;
    let mut received = job.recv(theirs, Rank((rank + ranks - 1) % ranks))?;
    sent.wait(Duration::from_secs(30))?;
    received.wait(Duration::from_secs(30))?;
    Ok(())
}

/// From docs/tenants.md: one tensor to everybody, and everybody's.
fn exchange(client: &Client, job: &Communicator, mine: &Tensor, theirs: &[Tensor]) -> Result<(), Error> {
    let group = client.group();
    let calls = job.grouped(&group)?;
    let mut operations = Vec::new();
    for (rank, tensor) in (0..).map(Rank).zip(theirs) {
        operations.push(calls.send(mine, rank)?);
        operations.push(calls.recv(tensor, rank)?);
    }
    group.end()?;
    for mut operation in operations {
        operation.wait(Duration::from_secs(30))?;
    }
    Ok(())
}

fn as_documented(worker: &Worker) -> Result<()> {
    let (job, me) = (&worker.communicator, worker.rank);
    let (mine, theirs) = (worker.tensor(&[u64::from(me) + 7])?, worker.tensor(&[0])?);
    shift(job, &mine, &theirs)?;
    ensure!(worker.contents(&theirs)? == [u64::from((me + worker.ranks - 1) % worker.ranks) + 7], "around");
    let all: Result<Vec<Tensor>> = (0..worker.ranks).map(|_| worker.tensor(&[0])).collect();
    let all = all?;
    exchange(&worker.client, job, &mine, &all)?;
    for (from, tensor) in (0..).zip(&all) {
        ensure!(worker.contents(tensor)? == [from + 7], "from {from}");
    }
    Ok(())
}

/// Every rank to every rank, itself among them, in one group with an AllReduce.
fn all_to_all(worker: &Worker) -> Result<()> {
    let (job, me) = (&worker.communicator, worker.rank);
    let others: Vec<u32> = (0..worker.ranks).map(|at| (me + at) % worker.ranks).collect();
    let sum = worker.tensor(&[1])?;
    let mut received = Vec::new();
    let group = worker.client.group();
    let calls = job.grouped(&group)?;
    let mut operations = vec![calls.all_reduce_in_place(&sum, ReduceOp::Sum)?];
    for &other in &others {
        let theirs = worker.client.tensor(Dtype::U64, elements(other, me))?;
        operations.push(calls.send(&worker.tensor(&message(me, other))?, Rank(other))?);
        operations.push(calls.recv(&theirs, Rank(other))?);
        received.push((other, theirs));
    }
    ensure!(matches!(operations[1].poll(), Err(Error::GroupOpen)), "waited for before it is called");
    group.end()?;
    ensure!(matches!(calls.barrier(), Err(Error::GroupEnded)), "called in a group that has ended");
    for operation in &mut operations {
        operation.wait(STEP)?;
    }
    for (other, theirs) in received {
        ensure!(worker.contents(&theirs)? == message(other, me), "from {other}");
    }
    ensure!(worker.contents(&sum)? == [u64::from(worker.ranks)], "beside an AllReduce");
    Ok(())
}

/// Rank 0 hands out work to whoever asks for it, five times to each. A quick rank asks again before others ask at all.
fn whoever_comes_first(worker: &Worker) -> Result<()> {
    const ROUNDS: u64 = 5;
    let (job, me) = (&worker.communicator, worker.rank);
    let (request, work) = (worker.tensor(&[u64::from(me)])?, worker.tensor(&[0; 1000])?);
    if me == 0 {
        let mut served = vec![0; worker.ranks as usize];
        for _ in 0..ROUNDS * u64::from(worker.ranks - 1) {
            let asked = job.recv_any(&request)?.wait(STEP)?.peer;
            let found = worker.contents(&request)?[0];
            ensure!(asked == Some(Rank(found as u32)), "{asked:?} is {found}");
            let round = &mut served[found as usize];
            work.write(0, &vec![found * 10 + *round; 1000])?;
            *round += 1;
            job.send(&work, Rank(found as u32))?.wait(STEP)?;
        }
        return Ok(());
    }
    for round in 0..ROUNDS {
        job.send(&request, Rank(0))?.wait(STEP)?;
        let receipt = job.recv(&work, Rank(0))?.wait(STEP)?;
        ensure!((receipt.peer, receipt.operation.0) == (Some(Rank(0)), round), "{receipt:?}");
        ensure!(worker.contents(&work)? == vec![u64::from(me) * 10 + round; 1000], "other work");
    }
    Ok(())
}

/// A call of a group that is refused: none of it was called.
fn none_of_a_group(worker: &Worker) -> Result<()> {
    let (job, me) = (&worker.communicator, worker.rank);
    let tensor = worker.tensor(&[u64::from(me); 4])?;
    let group = worker.client.group();
    let calls = job.grouped(&group)?;
    let mut sent = calls.send(&tensor, Rank((me + 1) % worker.ranks))?;
    let wrong = calls.send(&tensor, Rank(worker.ranks));
    ensure!(matches!(wrong, Err(Error::Shape(_))), "{:?}", wrong.err());
    drop(group);
    ensure!(matches!(sent.wait(STEP), Err(Error::GroupOpen)), "waited for what was never called");
    // Nobody's receive is for what was never sent.
    as_documented(worker)
}

/// A thread calls in a group that another one ends. Each call is in the group or refused, and none is lost.
fn calls_while_a_group_ends(worker: &Worker) -> Result<()> {
    let alone = worker.communicator.split(Some(worker.rank), 0, STEP)?.expect("a color was given");
    let mut late = 0;
    for _ in 0..200 {
        let group = worker.client.group();
        let calls = alone.grouped(&group)?;
        let mut operations = vec![calls.barrier()?];
        let more: Result<Vec<_>> = std::thread::scope(|scope| {
            let caller = scope.spawn(|| {
                let mut taken = Vec::new();
                loop {
                    match calls.barrier() {
                        Ok(operation) => taken.push(operation),
                        Err(Error::GroupEnded) => return Ok(taken),
                        Err(Error::TooMany { .. }) => std::thread::yield_now(),
                        Err(other) => return Err(other.into()),
                    }
                }
            });
            std::thread::yield_now();
            group.end()?;
            caller.join().unwrap()
        });
        let more = more?;
        late += more.len();
        operations.extend(more);
        for operation in &mut operations {
            operation.wait(STEP)?;
        }
    }
    ensure!(late > 0, "no call met the end of a group");
    Ok(())
}

#[test]
fn messages_arrive_between_hosts_and_within() {
    let Some(deployment) = deploy(&star(3, "10Gbit/s"), |_| ()) else { return };
    for (name, program) in [
        ("all", all_to_all as fn(&Worker) -> Result<()>),
        ("first", whoever_comes_first),
        ("none", none_of_a_group),
        ("while", calls_while_a_group_ends),
    ] {
        let results = run(&sockets(&deployment, "a"), name, 2, program);
        assert!(results.iter().all(Result::is_ok), "{name}: {results:#?}");
    }
}

/// What is said when the other end is never called, or called with another size.
#[test]
fn a_message_without_its_other_end_says_who_is_missing() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let late = run(&sockets(&deployment, "a"), "late", 1, |worker| {
        if worker.rank == 0 {
            let timeout = Some(Duration::from_millis(300));
            let job =
                worker.communicator.with(OperationOptions { timeout, ..OperationOptions::default() })?;
            job.recv(&worker.tensor(&[0; 4])?, Rank(1))?.wait(STEP)?;
        } else {
            worker.communicator.barrier()?.wait(STEP)?;
        }
        Ok(())
    });
    let differs = run(&sockets(&deployment, "a"), "differs", 1, |worker| {
        if worker.rank == 0 {
            worker.communicator.send(&worker.tensor(&[0; 4])?, Rank(1))?.wait(STEP)?;
        } else {
            worker.communicator.recv(&worker.tensor(&[0; 5])?, Rank(0))?.wait(STEP)?;
        }
        Ok(())
    });
    let missing = "receive(4 x u64, from rank 1) of rank 0: rank 1 has not sent in time";
    let other = "message 0 from rank 0 to rank 1 differs: sent as 4 x u64, received as 5 x u64";
    for (results, expected, text) in [(late, Status::Timeout, missing), (differs, Status::Mismatch, other)] {
        for result in results {
            let error = result.expect_err("it cannot end well");
            let found = error.downcast_ref::<Error>().unwrap();
            assert!(matches!(found, Error::Operation { status, .. } if *status == expected), "{error:#}");
            assert!(error.to_string().contains(text), "{error:#}");
        }
    }
}
