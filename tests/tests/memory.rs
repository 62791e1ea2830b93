//! Tensors beside the arena, end to end: arenas that grow, and memory that the program has already. The code of docs/tenants.md runs
//! as it stands there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use anyhow::{Context, Result, ensure};
use harmonaize_client::{
    Access, AttachOptions, Client, Communicator, Dtype, Error, Rank, ReduceOp, Region, RegionRefused, Tensor,
};
use harmonaize_tests::job::{Worker, at_all, deploy, options, run, run_with, sockets, succeeded};
use harmonaize_tests::{STEP, star};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Memory that a program can map, and the agent as well.
fn memfd(bytes: u64) -> Result<OwnedFd> {
    let memfd = rustix::fs::memfd_create("gradients", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&memfd, bytes)?;
    rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK)?;
    Ok(memfd)
}

/// Sums gradients where the program has them.
fn sum_in_place(client: &Client, job: &Communicator, memfd: &OwnedFd, bytes: u64) -> Result<(), Error> {
    let region = client.register(memfd, 0..bytes)?;
    let gradients = region.tensor(Dtype::F32, 0, bytes / 4)?;
    job.all_reduce_in_place(&gradients, ReduceOp::Sum)?.wait(Duration::from_secs(30))?;
    Ok(())
}

/// A tensor with contents in a region.
fn placed(region: &Region, at: u64, values: &[u64]) -> Result<Tensor> {
    let tensor = region.tensor(Dtype::U64, at, values.len() as u64)?;
    tensor.write(0, values)?;
    Ok(tensor)
}

/// AllReduce, AllGather and Broadcast between tensors of all kinds of memory.
fn everywhere(worker: &Worker) -> Result<()> {
    let (client, communicator, ranks) = (&worker.client, &worker.communicator, worker.ranks);
    let memfd = memfd(32 << 20)?;
    let (first, second) =
        (client.register(&memfd, 0..16 << 20)?, client.register(&memfd, 16 << 20..32 << 20)?);
    for (salt, count) in [(1, 1), (2, 1000), (3, 300_000)] {
        let bytes = count as u64 * 8;
        let mine = Worker::input(worker.rank, salt, count);
        let mut sums = vec![0_u64; count];
        for rank in 0..ranks {
            let values = Worker::input(rank, salt, count);
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum = sum.wrapping_add(value));
        }
        let zeros = vec![0; count];
        let registered = || placed(&first, 8, &mine);
        // The arena of 1 MiB grows for the largest.
        let pairs = [
            (registered()?, placed(&first, 16 + bytes, &zeros)?),
            (registered()?, placed(&second, 4096, &zeros)?),
            (registered()?, worker.tensor(&zeros)?),
            (worker.tensor(&mine)?, placed(&second, 0, &zeros)?),
            (worker.tensor(&mine)?, worker.tensor(&zeros)?),
        ];
        for (input, output) in &pairs {
            communicator.all_reduce(input, output, ReduceOp::Sum)?.wait(STEP)?;
            ensure!(worker.contents(output)? == sums, "wrong sum of {count}");
            ensure!(worker.contents(input)? == mine, "the input has changed");
        }
        for tensor in [registered()?, worker.tensor(&mine)?] {
            communicator.all_reduce_in_place(&tensor, ReduceOp::Sum)?.wait(STEP)?;
            ensure!(worker.contents(&tensor)? == sums, "wrong sum of {count} in place");
            let (early, late) = (tensor.slice(..count as u64 / 2)?, tensor.slice(count as u64 / 2..)?);
            let mut operations =
                [communicator.broadcast(&late, Rank(0))?, communicator.broadcast(&early, Rank(1))?];
            operations.iter_mut().try_for_each(|operation| operation.wait(STEP).map(drop))?;
            ensure!(worker.contents(&tensor)? == sums, "wrong broadcast");
        }
        worker.gather(salt, count.min(40_000), true, STEP)?;
        worker.exchange(salt, count.min(20_000), STEP)?;
    }
    ensure!(client.arena_bytes()? > 1 << 20, "it has not grown");
    // The agent's mapping and the program's are of the same pages.
    let mut here = [0; 8];
    rustix::io::pread(&memfd, &mut here, 8)?;
    ensure!(u64::from_ne_bytes(here) == sum_of_firsts(ranks), "another page");
    first.unregister()?;
    communicator.barrier()?.wait(STEP)?;
    Ok(())
}

/// What the last sum put at the first region's first element.
fn sum_of_firsts(ranks: u32) -> u64 {
    (0..ranks).fold(0, |sum, rank| sum.wrapping_add(Worker::input(rank, 3, 1)[0]))
}

#[test]
fn operations_take_tensors_from_arena_growth_and_own_memory() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let sockets = sockets(&deployment, "a");
    succeeded(run_with(&sockets, "job", 2, |_| options(Access::Mapped, 1), everywhere));
    // Beside ranks that map nothing, and so keep their arenas.
    let access = |rank: u32| if rank == 1 { Access::Remote } else { Access::Mapped };
    let mixed = |worker: &Worker| -> Result<()> {
        if access(worker.rank) == Access::Remote {
            let refused = worker.client.grow(1);
            ensure!(matches!(refused, Err(Error::Region(RegionRefused::Access))), "{refused:?}");
        }
        worker.sum(1, 100_000, true, STEP)?;
        worker.sum(2, 300_000, false, STEP)
    };
    let room = |rank| options(access(rank), if rank == 1 { 16 } else { 1 });
    succeeded(run_with(&sockets, "mixed", 1, room, mixed));
}

/// A tenant makes holes in what it has registered while operations run there, and gives it back too early. What it gets is a typed error
/// or its own contents, and another tenant on the same agents has right sums meanwhile.
#[test]
fn holes_under_an_operation_concern_nobody_else() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    const BYTES: u64 = 4 << 20;
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let over = AtomicBool::new(false);
    let bystander = |worker: &Worker| -> Result<u64> {
        let stop = worker.tensor(&[0])?;
        for salt in 0.. {
            worker.sum(salt, 5000, true, STEP)?;
            stop.write(0, &[u64::from(over.load(SeqCst))])?;
            worker.communicator.broadcast(&stop, Rank(0))?.wait(STEP)?;
            if worker.contents(&stop)? == [1] {
                return Ok(salt);
            }
        }
        unreachable!("the range has no end")
    };
    let careless = |worker: &Worker| -> Result<()> {
        let (job, rank) = (&worker.communicator, worker.rank);
        let aside = job.split(Some(0), rank, STEP)?.context("a color")?;
        let memfd = memfd(BYTES)?;
        let region = worker.client.register(&memfd, 0..BYTES)?;
        let tensor = region.tensor(Dtype::U64, 0, BYTES / 8)?;
        for _ in 0..20 {
            let mut operation = job.all_reduce_in_place(&tensor, ReduceOp::Sum)?;
            if rank == 0 {
                rustix::fs::fallocate(&memfd, hole, 0, BYTES)?;
                let cut = rustix::fs::ftruncate(&memfd, 0);
                ensure!(cut == Err(rustix::io::Errno::PERM), "cut under an operation: {cut:?}");
            }
            operation.wait(STEP)?;
        }
        // Rank 1 comes to the last one when rank 0 has tried to take the memory away.
        if rank == 1 {
            aside.barrier()?.wait(STEP)?;
        }
        let mut last = job.all_reduce_in_place(&tensor, ReduceOp::Sum)?;
        drop(tensor);
        if rank == 0 {
            let refused = region.unregister();
            ensure!(matches!(refused, Err(Error::Region(RegionRefused::InUse))), "{refused:?}");
            rustix::fs::fallocate(&memfd, hole, 0, BYTES)?;
            aside.barrier()?.wait(STEP)?;
        }
        last.wait(STEP)?;
        worker.sum(1, 5000, true, STEP)
    };
    std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            run_with(&sockets(&deployment, "b"), "bystander", 1, |_| options(Access::Mapped, 8), bystander)
        });
        let ended = run_with(&sockets(&deployment, "a"), "job", 1, |_| options(Access::Mapped, 8), careless);
        over.store(true, SeqCst);
        succeeded(ended);
        assert!(succeeded(others.join().unwrap())[0] > 0, "nothing ran beside it");
    });
}

#[test]
fn the_example_for_tenants_sums_where_the_program_has_its_gradients() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    const ELEMENTS: usize = 1 << 20;
    let work = |worker: &Worker| -> Result<()> {
        let memfd = memfd(4 * ELEMENTS as u64)?;
        let ones: Vec<u8> = std::iter::repeat_n(1.5_f32.to_ne_bytes(), ELEMENTS).flatten().collect();
        rustix::io::pwrite(&memfd, &ones, 0)?;
        sum_in_place(&worker.client, &worker.communicator, &memfd, 4 * ELEMENTS as u64)?;
        let mut found = vec![0; 4 * ELEMENTS];
        rustix::io::pread(&memfd, &mut found, 0)?;
        let right = found.chunks_exact(4).all(|each| each == (1.5 * worker.ranks as f32).to_ne_bytes());
        ensure!(right, "another sum");
        Ok(())
    };
    succeeded(run(&sockets(&deployment, "a"), "job", 2, work));
}

/// The operator's quota ends growth, with a limit and a value. What a process had comes free when it dies, with operations in flight or
/// not, and others' jobs go on.
#[test]
fn quotas_hold_and_the_dead_leave_nothing() {
    let small = |setup: &mut harmonaize_testkit::deployment::Setup| {
        setup.tenant = "arena = \"32MiB\"\nregions = 3\nremote = true".into();
    };
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), small) else { return };
    let (sockets, others) = (sockets(&deployment, "a"), sockets(&deployment, "b"));
    let bystander = std::thread::spawn(move || {
        let work = |worker: &Worker| (0..200).try_for_each(|salt| worker.sum(salt, 5000, true, STEP));
        succeeded(run_with(&others, "bystander", 1, |_| options(Access::Mapped, 8), work));
    });
    let one = &|round: u32, rank: u32| -> Result<()> {
        let alone = AttachOptions { arena_bytes: 1 << 20, ..AttachOptions::default() };
        let client = Client::attach(&sockets[rank as usize], alone)?;
        // What the last one had comes free within a moment.
        let start = Instant::now();
        loop {
            let refused = client.grow(32 << 20);
            let Err(Error::Region(RegionRefused::Bytes { asked, left, limit })) = refused else {
                anyhow::bail!("{refused:?}")
            };
            ensure!((asked, limit) == (32 << 20, 32 << 20), "{limit}");
            if left == 31 << 20 {
                break;
            }
            ensure!(start.elapsed() < STEP, "{left} bytes are left of {limit}");
        }
        let region = client.register(memfd(1 << 20)?, 0..1 << 20)?;
        let tensor = region.tensor(Dtype::U64, 0, 1000)?;
        client.grow(1)?;
        client.grow(1)?;
        let refused = client.grow(1);
        ensure!(matches!(refused, Err(Error::Region(RegionRefused::Regions { limit: 3 }))), "{refused:?}");
        let communicator = client.join(&format!("job{round}"), Rank(rank), 2, STEP)?;
        communicator.all_reduce_in_place(&tensor, ReduceOp::Sum)?.wait(STEP)?;
        let met = communicator.barrier()?.wait(STEP);
        // Rank 0 goes with an operation in flight, which ends what rank 1 has not heard the end of: its barrier at most.
        if rank == 0 {
            met?;
            drop(communicator.all_reduce_in_place(&tensor, ReduceOp::Sum)?);
        }
        Ok(())
    };
    for round in 0..10 {
        succeeded(at_all([0, 1], |rank| one(round, rank)));
    }
    bystander.join().unwrap();
}
