//! One rank of a job, and collectives of which it checks each bit; other crates' tests take this file too.

use anyhow::{Result, ensure};
use harmonaize_client::{Client, Communicator, Dtype, Rank, ReduceOp, Tensor};
use std::time::Duration;

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
        let mine = Self::input(self.rank, salt, count);
        let input = self.tensor(&mine)?;
        let other = if in_place { None } else { Some(self.tensor(&vec![0; count])?) };
        let output = other.as_ref().unwrap_or(&input);
        self.communicator.all_reduce(&input, output, ReduceOp::Sum)?.wait(within)?;
        let expected = self.summed(salt, count);
        ensure!(self.contents(output)? == expected, "rank {}: wrong sum of {count}", self.rank);
        ensure!(in_place || self.contents(&input)? == mine, "rank {}: its input has changed", self.rank);
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
        let (mine, sum) = (Self::input(self.rank, salt, count), ReduceOp::Sum);
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
        let own = Self::input(self.rank, salt, all);
        let input = self.tensor(&own)?;
        let found = if in_place {
            self.communicator.reduce_scatter_in_place(&input, ReduceOp::Sum)?.wait(within)?;
            let mut found = self.contents(&input)?;
            let block = own.iter().copied().skip(mine).take(count);
            let block: Vec<u64> = found.splice(mine..mine + count, block).collect();
            ensure!(found == own, "rank {}: another rank's block has changed", self.rank);
            block
        } else {
            let output = self.tensor(&vec![0; count])?;
            self.communicator.reduce_scatter(&input, &output, ReduceOp::Sum)?.wait(within)?;
            ensure!(self.contents(&input)? == own, "rank {}: its input has changed", self.rank);
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

    /// Every collective on tensors of these sizes, in place and not, checked bit for bit.
    pub fn everything(&self, sizes: &[usize], within: Duration) -> Result<()> {
        for (salt, count) in (1_u64..).zip(sizes.iter().copied()) {
            let (few, root) = (count.min(40_000), Rank(salt as u32 % self.ranks));
            for in_place in [false, true] {
                self.sum(salt, count, in_place, within)?;
                self.gather(salt, few, in_place, within)?;
                self.scatter(salt, few, in_place, within)?;
                self.reduce(salt, count, root, in_place, within)?;
                self.gather_and_scatter(salt, few, root, in_place, within)?;
            }
            self.exchange(salt, count.min(20_000), within)?;
            let tensor = self.tensor(&Self::input(self.rank, salt, count))?;
            self.communicator.broadcast(&tensor, root)?.wait(within)?;
            ensure!(self.contents(&tensor)? == Self::input(root.0, salt, count), "wrong broadcast");
            self.communicator.barrier()?.wait(within)?;
        }
        Ok(())
    }
}
