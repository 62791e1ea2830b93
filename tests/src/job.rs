//! A deployment for tests, and jobs on it whose ranks are threads of the test.

use crate::STEP;
use anyhow::{Context, Result, ensure};
use harmonaize_client::{Access, AttachOptions, Client, Communicator, Dtype, Rank, Tensor};
use harmonaize_testkit::deployment::{Deployment, Setup, Tenant, socket};
use harmonaize_testkit::workspace::{Binaries, Profile};
use std::path::PathBuf;
use std::time::Duration;

/// Control and agents on a fabric, with the tenants `a` and `b` of this test's own user; `None`, loudly, without the
/// privilege for namespaces. `adjust` changes the settings.
///
/// # Panics
/// If the deployment fails: a test cannot go on.
#[expect(clippy::panic, reason = "support for tests")]
pub fn deploy(topology: &str, adjust: impl FnOnce(&mut Setup)) -> Option<Deployment> {
    let fabric = crate::fabric(topology)?;
    let start = || -> Result<Deployment> {
        let tenants = ["a", "b"].map(|name| Tenant { name: name.into(), user: 0 });
        let mut setup = Setup::new(Binaries::build(Profile::Dev)?, &tenants);
        setup.tenant = "remote = true".into();
        adjust(&mut setup);
        Deployment::start(fabric?, setup)
    };
    match start() {
        Ok(deployment) => Some(deployment),
        Err(error) => panic!("cannot deploy: {error:#}"),
    }
}

/// The socket of a tenant on each host.
pub fn sockets(deployment: &Deployment, tenant: &str) -> Vec<PathBuf> {
    deployment.hosts().iter().map(|host| socket(host, tenant)).collect()
}

/// One rank of a job.
pub struct Worker {
    /// Its attachment.
    pub client: Client,
    /// Its communicator.
    pub communicator: Communicator,
    /// Its rank.
    pub rank: u32,
    /// Of how many.
    pub ranks: u32,
}

impl Worker {
    /// Attaches and joins.
    pub fn join(socket: &PathBuf, job: &str, rank: u32, ranks: u32, options: AttachOptions) -> Result<Self> {
        Self::of(Client::attach(socket, options)?, job, rank, ranks, STEP)
    }

    /// Joins, where somebody has attached already.
    pub fn of(client: Client, job: &str, rank: u32, ranks: u32, within: Duration) -> Result<Self> {
        let communicator = client.join(job, Rank(rank), ranks, within)?;
        Ok(Self { client, communicator, rank, ranks })
    }

    /// A tensor with contents.
    pub fn tensor(&self, values: &[u64]) -> Result<Tensor> {
        let tensor = self.client.tensor(Dtype::U64, values.len() as u64)?;
        tensor.write(0, values)?;
        Ok(tensor)
    }

    /// A tensor's contents.
    pub fn contents(&self, tensor: &Tensor) -> Result<Vec<u64>> {
        let mut values = vec![0; usize::try_from(tensor.elements())?];
        tensor.read(0, &mut values)?;
        Ok(values)
    }

    /// What this rank contributes: `count` numbers that depend on rank and `salt`.
    pub fn input(rank: u32, salt: u64, count: usize) -> Vec<u64> {
        let seed = (u64::from(rank) << 32 | salt).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (0..count as u64).map(|i| (seed ^ i).wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(31)).collect()
    }

    /// The sum of all ranks' inputs.
    fn summed(&self, salt: u64, count: usize) -> Vec<u64> {
        let mut sums = vec![0_u64; count];
        for rank in 0..self.ranks {
            let values = Self::input(rank, salt, count);
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum = sum.wrapping_add(value));
        }
        sums
    }

    /// An AllReduce in place or not, checked bit for bit.
    pub fn sum(&self, salt: u64, count: usize, in_place: bool, within: Duration) -> Result<()> {
        let input = self.tensor(&Self::input(self.rank, salt, count))?;
        let other = if in_place { None } else { Some(self.tensor(&vec![0; count])?) };
        let output = other.as_ref().unwrap_or(&input);
        self.communicator.all_reduce(&input, output, harmonaize_client::ReduceOp::Sum)?.wait(within)?;
        let expected = self.summed(salt, count);
        ensure!(self.contents(output)? == expected, "rank {}: wrong sum of {count}", self.rank);
        Ok(())
    }

    /// A Reduce in place or not, checked bit for bit.
    pub fn reduce(
        &self,
        salt: u64,
        count: usize,
        root: Rank,
        in_place: bool,
        within: Duration,
    ) -> Result<()> {
        let (mine, sum) = (Self::input(self.rank, salt, count), harmonaize_client::ReduceOp::Sum);
        let input = self.tensor(&mine)?;
        let at_root = self.rank == root.0;
        let output = if at_root && !in_place { Some(self.tensor(&vec![0; count])?) } else { None };
        match in_place {
            true => self.communicator.reduce_in_place(&input, sum, root)?.wait(within)?,
            false => self.communicator.reduce(&input, output.as_ref(), sum, root)?.wait(within)?,
        };
        let expected = self.summed(salt, count);
        if at_root {
            let found = self.contents(output.as_ref().unwrap_or(&input))?;
            ensure!(found == expected, "root {root}: wrong sum of {count}");
        }
        if !(at_root && in_place) {
            ensure!(self.contents(&input)? == mine, "rank {}: its input has changed", self.rank);
        }
        Ok(())
    }

    /// A Gather and a Scatter in place or not, checked bit for bit; `count` elements a block.
    pub fn gather_and_scatter(
        &self,
        salt: u64,
        count: usize,
        root: Rank,
        in_place: bool,
        within: Duration,
    ) -> Result<()> {
        let (at_root, own) = (self.rank == root.0, self.rank as usize * count);
        let mine = Self::input(self.rank, salt, count);
        let all: Vec<u64> = (0..self.ranks).flat_map(|rank| Self::input(rank, salt, count)).collect();
        let one = self.tensor(&mine)?;
        // At the root, in place, all but its own block is still to come.
        let begun = |(at, value): (usize, &u64)| if (own..own + count).contains(&at) { *value } else { 0 };
        let begun: Vec<u64> = all.iter().enumerate().map(begun).collect();
        let many = if at_root { Some(self.tensor(&begun)?) } else { None };
        match (in_place, &many) {
            (true, _) => {
                self.communicator.gather_in_place(many.as_ref().unwrap_or(&one), root)?.wait(within)?
            }
            (false, _) => self.communicator.gather(&one, many.as_ref(), root)?.wait(within)?,
        };
        if let Some(many) = &many {
            ensure!(self.contents(many)? == all, "root {root}: wrong blocks of {count}");
        }
        one.write(0, &vec![0_u64; count])?;
        match (in_place, &many) {
            (true, _) => {
                self.communicator.scatter_in_place(many.as_ref().unwrap_or(&one), root)?.wait(within)?
            }
            (false, _) => self.communicator.scatter(many.as_ref(), &one, root)?.wait(within)?,
        };
        if !(at_root && in_place) {
            ensure!(self.contents(&one)? == mine, "rank {}: wrong block of {count}", self.rank);
        }
        if let Some(many) = &many {
            ensure!(self.contents(many)? == all, "root {root}: its input has changed");
        }
        Ok(())
    }

    /// An AllToAll, checked bit for bit; `count` elements a block.
    pub fn exchange(&self, salt: u64, count: usize, within: Duration) -> Result<()> {
        let ranks = self.ranks as usize;
        let input = self.tensor(&Self::input(self.rank, salt, count * ranks))?;
        let output = self.tensor(&vec![0; count * ranks])?;
        self.communicator.all_to_all(&input, &output)?.wait(within)?;
        let mine = self.rank as usize * count;
        let block = |from| Self::input(from, salt, count * ranks).into_iter().skip(mine).take(count);
        let expected: Vec<u64> = (0..self.ranks).flat_map(block).collect();
        ensure!(self.contents(&output)? == expected, "rank {}: wrong exchange of {count}", self.rank);
        Ok(())
    }

    /// An AllGather in place or not, checked bit for bit; `count` elements a block.
    pub fn gather(&self, salt: u64, count: usize, in_place: bool, within: Duration) -> Result<()> {
        let (ranks, mine) = (self.ranks as usize, Self::input(self.rank, salt, count));
        let mut all = vec![0; count * ranks];
        let output = if in_place {
            let own = all.iter_mut().skip(self.rank as usize * count);
            own.zip(&mine).for_each(|(to, from)| *to = *from);
            let tensor = self.tensor(&all)?;
            self.communicator.all_gather_in_place(&tensor)?.wait(within)?;
            tensor
        } else {
            let (input, output) = (self.tensor(&mine)?, self.tensor(&all)?);
            self.communicator.all_gather(&input, &output)?.wait(within)?;
            output
        };
        let expected: Vec<u64> = (0..self.ranks).flat_map(|from| Self::input(from, salt, count)).collect();
        ensure!(self.contents(&output)? == expected, "rank {}: wrong blocks of {count}", self.rank);
        Ok(())
    }

    /// A ReduceScatter in place or not, checked bit for bit; `count` elements a block.
    pub fn scatter(&self, salt: u64, count: usize, in_place: bool, within: Duration) -> Result<()> {
        let (all, mine) = (count * self.ranks as usize, self.rank as usize * count);
        let input = self.tensor(&Self::input(self.rank, salt, all))?;
        let sum = harmonaize_client::ReduceOp::Sum;
        let found = if in_place {
            self.communicator.reduce_scatter_in_place(&input, sum)?.wait(within)?;
            self.contents(&input)?.into_iter().skip(mine).take(count).collect()
        } else {
            let output = self.tensor(&vec![0; count])?;
            self.communicator.reduce_scatter(&input, &output, sum)?.wait(within)?;
            self.contents(&output)?
        };
        let mut expected = vec![0_u64; count];
        for rank in 0..self.ranks {
            let values = Self::input(rank, salt, all).into_iter().skip(mine);
            expected.iter_mut().zip(values).for_each(|(sum, value)| *sum = sum.wrapping_add(value));
        }
        ensure!(found == expected, "rank {}: wrong scattered sum of {count}", self.rank);
        Ok(())
    }
}

/// The usual options for an access, with room for `mebibytes`.
pub fn options(access: Access, mebibytes: u64) -> AttachOptions {
    AttachOptions { access, arena_bytes: mebibytes << 20, ..AttachOptions::default() }
}

/// A job with one rank on each host, that has joined; small tensors have room.
///
/// # Panics
/// If one cannot join: a test cannot go on.
#[expect(clippy::panic, reason = "support for tests")]
pub fn joined(sockets: &[PathBuf], job: &str) -> Vec<Worker> {
    let ranks = sockets.len() as u32;
    std::thread::scope(|scope| {
        let join = |(rank, socket)| {
            scope.spawn(move || Worker::join(socket, job, rank, ranks, options(Access::Mapped, 8)))
        };
        let threads: Vec<_> = (0..ranks).zip(sockets).map(join).collect();
        let ended = threads.into_iter().map(|thread| thread.join());
        ended
            .map(|worker| worker.unwrap_or_else(|_| panic!("a rank's thread panicked")))
            .map(|worker| worker.unwrap_or_else(|error| panic!("cannot join: {error:#}")))
            .collect()
    })
}

/// Runs a job of mapped ranks: a thread per rank, `per_host` ranks on each host in host order. Returns the result of each.
pub fn run<T: Send>(
    sockets: &[PathBuf],
    job: &str,
    per_host: u32,
    work: impl Fn(&Worker) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    run_with(sockets, job, per_host, |_| options(Access::Mapped, 192), work)
}

/// What all ranks of a job have come to.
///
/// # Panics
/// If one failed: a test cannot go on.
#[expect(clippy::panic, reason = "support for tests")]
pub fn succeeded<T>(outcomes: Vec<Result<T>>) -> Vec<T> {
    let each = outcomes.into_iter().enumerate();
    each.map(|(rank, outcome)| outcome.unwrap_or_else(|error| panic!("rank {rank}: {error:#}"))).collect()
}

/// The same with the options of each rank.
pub fn run_with<T: Send>(
    sockets: &[PathBuf],
    job: &str,
    per_host: u32,
    options: impl Fn(u32) -> AttachOptions + Sync,
    work: impl Fn(&Worker) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let ranks = sockets.len() as u32 * per_host;
    std::thread::scope(|scope| {
        let (options, work) = (&options, &work);
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let socket = sockets.get((rank / per_host) as usize);
                scope.spawn(move || {
                    let socket = socket.context("no such host")?;
                    let worker = Worker::join(socket, job, rank, ranks, options(rank))?;
                    work(&worker)
                })
            })
            .collect();
        let panicked = |_| Err(anyhow::anyhow!("a rank's thread panicked"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    })
}
