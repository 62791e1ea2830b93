//! Communicators that split, and jobs that are named alike, end to end; the code of docs/tenants.md as it stands there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use anyhow::{Result, ensure};
use harmonaize_client::{
    Access, Client, Communicator, Dtype, Error, JoinOptions, JoinRefusal, Operation, Rank, ReduceOp, Tensor,
};
use harmonaize_tests::job::{Worker, at_all, deploy, options, run, run_with, sockets, succeeded};
use harmonaize_tests::{STEP, star};
use std::time::{Duration, Instant};

/// The sum of one number of each rank.
fn sum(client: &Client, communicator: &Communicator, value: u64) -> Result<u64> {
    let tensor = client.tensor(Dtype::U64, 1)?;
    tensor.write(0, &[value])?;
    communicator.all_reduce_in_place(&tensor, ReduceOp::Sum)?.wait(STEP)?;
    let mut sum = [0];
    tensor.read(0, &mut sum)?;
    Ok(sum[0])
}

#[test]
fn two_colors_and_none_come_of_one_split() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let work = |worker: &Worker| -> Result<Option<(String, u32, u64)>> {
        let (parent, rank) = (&worker.communicator, worker.rank);
        let color = [Some(4), Some(2), Some(4), None][rank as usize];
        let child = parent.split(color, 10 - rank, STEP)?;
        // Both go on, at the same time.
        let found = match &child {
            Some(child) => {
                let sum = sum(&worker.client, child, 1 << (8 * rank))?;
                Some((child.name().to_owned(), child.rank().0, sum))
            }
            None => None,
        };
        ensure!(sum(&worker.client, parent, 1)? == 4, "the parent is another");
        let alone = parent.split(Some(rank), 0, STEP)?.expect("a color");
        ensure!(alone.ranks() == 1 && sum(&worker.client, &alone, 7)? == 7, "alone is alone");
        drop((child, alone));
        parent.barrier()?.wait(STEP)?;
        Ok(found)
    };
    let found = succeeded(run(&sockets(&deployment, "a"), "job", 2, work));
    let named = |name: &str, rank, sum| Some((name.to_owned(), rank, sum));
    let expected = [
        named("job#1.4", 1, 1 | 1 << 16),
        named("job#1.2", 0, 1 << 8),
        named("job#1.4", 0, 1 | 1 << 16),
        None,
    ];
    assert_eq!(found, expected);
}

/// By 64 splits of 8 ranks, on one host and on two, a job keeps all 65 communicators. They are within the limits that nobody
/// has raised.
#[test]
fn sixty_four_groups_form_within_the_usual_limits() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    const GROUPS: u32 = 64;
    let work = |worker: &Worker| -> Result<()> {
        let (client, parent, rank) = (&worker.client, &worker.communicator, worker.rank);
        let split = |round: u32| -> Result<Communicator> {
            let child = parent.split(Some(0), (rank + round) % worker.ranks, STEP)?.expect("a color");
            ensure!((child.ranks(), child.rank().0) == (8, (rank + round) % 8), "another group");
            Ok(child)
        };
        let groups = (0..GROUPS).map(split).collect::<Result<Vec<_>>>()?;
        for (round, group) in (0..).zip(&groups) {
            // 1 + 2 + 4 and so on of the eight ranks.
            ensure!(sum(client, group, (1 + round) << rank)? == (1 + round) * 255, "wrong in group {round}");
        }
        ensure!(sum(client, parent, 1)? == 8, "the parent is another");
        Ok(())
    };
    let (one, two) = (sockets(&deployment, "a"), sockets(&deployment, "b"));
    succeeded(run_with(&one[..1], "job", 8, |_| options(Access::Mapped, 1), work));
    succeeded(run_with(&two, "job", 4, |_| options(Access::Mapped, 1), work));
}

#[test]
fn a_rank_that_never_calls_is_named() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let work = |worker: &Worker| -> Result<Option<Error>> {
        let late = worker.rank == 3;
        let refused = match late {
            true => None,
            false => worker.communicator.split(Some(0), 0, Duration::from_secs(1)).err(),
        };
        worker.communicator.barrier()?.wait(STEP)?;
        let all = worker.communicator.split(Some(0), 0, STEP)?.expect("a color");
        ensure!(all.ranks() == 4, "not all");
        all.barrier()?.wait(STEP)?;
        Ok(refused)
    };
    let refused = succeeded(run(&sockets(&deployment, "a"), "job", 2, work));
    assert!(refused[3].is_none());
    for refused in &refused[..3] {
        let Some(Error::Split { name, kind, concerned, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(
            (name.as_str(), *kind, concerned.as_slice()),
            ("job", JoinRefusal::Timeout, &[Rank(3)][..])
        );
    }
}

#[test]
fn ranks_that_are_lost_end_a_split() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let work = |worker: &Worker| -> Result<Option<Error>> {
        worker.communicator.barrier()?.wait(STEP)?;
        if worker.rank == 1 {
            return Ok(None);
        }
        let begin = Instant::now();
        let refused = worker.communicator.split(Some(0), 0, STEP).err();
        ensure!(begin.elapsed() < STEP, "it waited to the end");
        Ok(refused)
    };
    let refused = succeeded(run(&sockets(&deployment, "a"), "job", 1, work));
    let Some(Error::Split { kind, concerned, .. }) = &refused[0] else { panic!("{refused:?}") };
    assert_eq!((*kind, concerned.as_slice()), (JoinRefusal::RankLost, &[Rank(1)][..]));
}

#[test]
fn jobs_that_are_named_alike_do_not_meet() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let sockets = sockets(&deployment, "a");
    let joined = |job: &str, rank: u32| -> Result<u64> {
        let client = Client::attach(&sockets[rank as usize], options(Access::Mapped, 8))?;
        let options = JoinOptions { timeout: STEP, job: job.to_owned(), ..JoinOptions::default() };
        let world = client.join_with("world", Rank(rank), 2, &options)?;
        let expected = if job.is_empty() { "world".to_owned() } else { format!("{job}/world") };
        ensure!(world.name() == expected, "{}", world.name());
        let half = world.split(Some(0), 0, STEP)?.expect("a color");
        ensure!(half.name() == format!("{expected}#1.0"), "{}", half.name());
        sum(&client, &half, 1 << (8 * job.len()))
    };
    let ranks = ["", "a", "ab"].into_iter().flat_map(|job| [(job, 0), (job, 1)]);
    for (job, sum) in at_all(ranks, |(job, rank)| (job, joined(job, rank))) {
        assert_eq!(sum.unwrap(), 2 << (8 * job.len()), "{job:?}");
    }
}

/// From docs/tenants.md: the halves of a tensor, the later one first.
fn halves(job: &Communicator, gradients: &Tensor) -> Result<(), Error> {
    let middle = gradients.elements() / 2;
    let late = job.all_reduce_in_place(&gradients.slice(middle..)?, ReduceOp::Sum)?;
    let early = job.all_reduce_in_place(&gradients.slice(..middle)?, ReduceOp::Sum)?;
    for mut half in [late, early] {
        half.wait(Duration::from_secs(30))?;
    }
    Ok(())
}

/// From docs/tenants.md: operations as they end.
fn all(mut operations: Vec<Operation>) -> Result<(), Error> {
    while !operations.is_empty() {
        let ended = Operation::wait_any(&mut operations, Duration::from_secs(30))?;
        let receipt = operations.swap_remove(ended).wait(Duration::ZERO)?;
        println!("operation {} is done", receipt.operation);
    }
    Ok(())
}

/// From docs/tenants.md: groups along the rows and columns of a grid of ranks.
fn grid(job: &Communicator, width: u32) -> Result<[Option<Communicator>; 2], Error> {
    let (rank, within) = (job.rank().0, Duration::from_secs(60));
    let row = job.split(Some(rank / width), rank, within)?;
    let column = job.split(Some(rank % width), rank, within)?;
    Ok([row, column])
}

#[test]
fn the_guides_code_runs() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let work = |worker: &Worker| -> Result<()> {
        let values = vec![1; 1001];
        let gradients = worker.tensor(&values)?;
        halves(&worker.communicator, &gradients)?;
        ensure!(worker.contents(&gradients)? == vec![4; 1001], "wrong halves");
        let [row, column] = grid(&worker.communicator, 2)?;
        let (row, column) = (row.expect("a color"), column.expect("a color"));
        ensure!(row.rank().0 == worker.rank % 2 && column.rank().0 == worker.rank / 2, "wrong grid");
        let operations: Result<Vec<Operation>, Error> = (0..5).map(|_| row.barrier()).collect();
        all(operations?)?;
        // Threads, each with a communicator, and a callback.
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            for part in [&row, &column] {
                let (client, tell) = (&worker.client, tell.clone());
                scope.spawn(move || {
                    for round in 0..20 {
                        assert_eq!(sum(client, part, round).unwrap(), 2 * round);
                    }
                    let told = move |result: Result<_, Error>| tell.send(result.is_ok()).unwrap();
                    part.barrier().unwrap().on_completion(told).unwrap();
                });
            }
        });
        ensure!(told.recv_timeout(STEP)? && told.recv_timeout(STEP)?, "a callback heard of a failure");
        Ok(())
    };
    succeeded(run(&sockets(&deployment, "a"), "job", 2, work));
}
