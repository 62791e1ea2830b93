//! A plan driven directly in one process, without agent, rings or engine: what the service's own cost is measured against.

use anyhow::{Context, Result, bail, ensure};
use harmonaize_abi::{Collective, Dtype, Rank, ReduceOp, Signature, View, ViewMut};
use harmonaize_plan::{
    Access, Algorithm, Buffer, Group, Local, Operand, Participant, Plan, Program, Request, Segmentation,
    Step, StepKind, Tuning, program, retention, segmentation,
};
use harmonaize_shm::Memory;
use std::sync::Arc;

/// An AllReduce of f32 among ranks of one host.
#[derive(Debug)]
pub struct Direct {
    program: Program,
    cut: Segmentation,
    /// Input and output of each rank.
    tensors: Vec<[Arc<Memory>; 2]>,
}

impl Direct {
    /// Plans it, and makes the tensors of `bytes` bytes, input of rank `r` all `r + 1`.
    pub fn new(ranks: u32, bytes: usize) -> Result<Self> {
        ensure!(bytes > 0 && bytes.is_multiple_of(size_of::<f32>()), "{bytes} bytes of f32");
        let members = vec![(0..ranks).map(Rank).collect()];
        let plan = Plan::in_sequence(Group::new(members).context("no ranks")?);
        let count = (bytes / size_of::<f32>()) as u64;
        let (collective, root) = (Collective::AllReduce, Rank(0));
        let signature =
            Signature { collective, dtype: Dtype::F32, reduce: ReduceOp::Sum, root, count, uneven: false };
        let tuning = Tuning::default();
        let retention = retention(&plan, &signature, false, &tuning);
        let local = Local { access: &|_| Access::Mapped, retention, scaled: false };
        let program = program(
            &plan,
            Request { collective, root, coded: false, algorithm: Algorithm::Ring },
            Participant(0),
            &local,
        )?;
        ensure!(program.slots.is_empty(), "a plan within one host that stages");
        let mut tensors = Vec::new();
        for rank in 0..ranks {
            let (input, output) = (Memory::private(bytes)?, Memory::private(bytes)?);
            let value = ((rank + 1) as f32).to_ne_bytes();
            input.write(0, &value.repeat(bytes / value.len()))?;
            output.write(0, &vec![0; bytes])?;
            tensors.push([input, output]);
        }
        Ok(Self { program, cut: segmentation(&plan, &signature, &tuning), tensors })
    }

    /// Runs it once.
    pub fn run(&self) -> Result<()> {
        for segment in 0..self.cut.segments {
            let range = self.cut.range(segment);
            self.program.steps.iter().try_for_each(|step| self.step(step, range))?;
        }
        Ok(())
    }

    /// Elements of any output that are not the sum of the ranks' inputs.
    pub fn wrong(&self) -> Result<usize> {
        let ranks = self.tensors.len();
        let expected = ((ranks * (ranks + 1) / 2) as f32).to_ne_bytes();
        let mut wrong = 0;
        for [_, output] in &self.tensors {
            let mut bytes = vec![0; output.bytes()];
            output.read(0, &mut bytes)?;
            wrong += bytes.chunks_exact(expected.len()).filter(|element| *element != expected).count();
        }
        Ok(wrong)
    }

    fn step(&self, step: &Step, range: (u64, u64)) -> Result<()> {
        let mut sources: Vec<View<'_>> = Vec::with_capacity(step.sources.len());
        for operand in &step.sources {
            let (memory, offset, bytes) = self.place(operand, range)?;
            sources.push(memory.view(offset, bytes)?);
        }
        let mut destinations: Vec<ViewMut<'_>> = Vec::with_capacity(step.destinations.len());
        for operand in &step.destinations {
            let (memory, offset, bytes) = self.place(operand, range)?;
            destinations.push(memory.view_mut(offset, bytes)?);
        }
        match step.kind {
            StepKind::Reduce { .. } => {
                harmonaize_kernels::reduce(ReduceOp::Sum, Dtype::F32, &sources, &destinations, None)?;
            }
            StepKind::Move => {
                let source = sources.first().context("a step without source")?;
                harmonaize_kernels::copy(*source, &destinations)?;
            }
            StepKind::Fetch | StepKind::Store => bail!("a step for remote memory"),
        }
        Ok(())
    }

    fn place(&self, operand: &Operand, (lo, hi): (u64, u64)) -> Result<(&Memory, u64, u64)> {
        let (rank, which) = match operand.buffer {
            Buffer::Input(rank) => (rank, 0),
            Buffer::Output(rank) => (rank, 1),
            other => bail!("a plan within one host that uses {other:?}"),
        };
        let tensors = self.tensors.get(rank.0 as usize).context("no such rank")?;
        let memory = tensors.get(which).context("no such tensor")?;
        let (start, elements) = operand.part.elements(lo, hi);
        let size = size_of::<f32>() as u64;
        Ok((memory, start * size, elements * size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_right_for_any_size_and_ranks() {
        for ranks in [1, 2, 3, 8] {
            for bytes in [4, 32 << 10, (1 << 20) + 4, 3 << 20] {
                let direct = Direct::new(ranks, bytes).unwrap();
                direct.run().unwrap();
                assert_eq!(direct.wrong().unwrap(), 0, "{ranks} ranks, {bytes} bytes");
            }
        }
        assert!(Direct::new(2, 0).is_err() && Direct::new(0, 4).is_err() && Direct::new(2, 6).is_err());
    }
}
