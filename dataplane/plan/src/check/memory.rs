//! One participant's memory on symbols, and which unfinished steps still use it.

use super::Fault;
use super::grid::Grid;
use super::values::{Value, Values};
use crate::plan::{Local, Plan, Request};
use crate::program::{Buffer, Encoding, Operand, Part, Participant, Program, Retention, Slot};
use harmonaize_abi::{Collective, Rank};
use std::collections::HashMap;

/// What a step reads or writes: one symbol per range of the grid.
pub(super) type Content = Vec<Value>;

pub(super) struct Memory {
    collective: Collective,
    root: Rank,
    atoms: u32,
    ranks: HashMap<Rank, Tensors>,
    slots: Vec<Staged>,
    /// Whether outputs may be inputs at the same time.
    in_place: bool,
    /// Whether inputs must not be overwritten before the acknowledgement.
    protected: bool,
    copied: bool,
    copying: u32,
    /// By step: known to have completed.
    done: Vec<bool>,
}

/// One rank's tensors, block after block.
#[derive(Default)]
struct Tensors {
    overwritten: Vec<bool>,
    output: Vec<Option<Value>>,
    input_reads: Vec<Use>,
    output_reads: Vec<Use>,
    output_writes: Vec<Use>,
}

/// A step that uses cells `lo..hi` until it completes.
#[derive(Clone, Copy)]
struct Use {
    step: u32,
    lo: usize,
    hi: usize,
}

#[derive(Default)]
struct Staged {
    /// Of how many parts it holds one.
    divisor: u32,
    /// Which part it holds, in which form, and what of it was written, by range of the grid.
    content: Option<(Part, Encoding, Vec<Option<Value>>)>,
    /// Written by a copying step.
    copy: bool,
    /// Read later: must stay.
    retained: bool,
    reads: Vec<Use>,
    writes: Vec<Use>,
}

impl Memory {
    pub(super) fn new(
        plan: &Plan,
        request: Request,
        me: Participant,
        program: &Program,
        local: &Local<'_>,
        grid: &Grid,
    ) -> Self {
        let Request { collective, root, .. } = request;
        let several = plan.participants() > 1;
        let tensors = |rank: Rank| {
            let blocks = collective.blocks(plan.group().ranks(), rank, root);
            let [inputs, outputs] = blocks.map(|blocks| blocks as usize * grid.atoms() as usize);
            Tensors { overwritten: vec![false; inputs], output: vec![None; outputs], ..Default::default() }
        };
        // What is moved uncoded writes its own input where it lies already.
        let changes = collective.reduces() || request.coded;
        let in_place = collective.can_be_in_place()
            && (!changes || !several || local.retention != Retention::KeepInputs);
        Self {
            collective,
            root,
            atoms: grid.atoms(),
            ranks: plan.group().local(me).iter().map(|rank| (*rank, tensors(*rank))).collect(),
            slots: program.slots.iter().map(|&divisor| Staged { divisor, ..Staged::default() }).collect(),
            in_place,
            protected: several && local.retention == Retention::HoldOutputs,
            copied: several && local.retention == Retention::CopyInputs,
            copying: program.copying,
            done: vec![false; program.steps.len()],
        }
    }

    /// A step is known to have completed.
    pub(super) fn complete(&mut self, step: u32) {
        if let Some(done) = self.done.get_mut(step as usize) {
            *done = true;
        }
    }

    /// The segment was acknowledged: everything issued so far has completed.
    pub(super) fn acknowledge(&mut self) {
        self.done.iter_mut().for_each(|done| *done = true);
    }

    /// Issued again after the acknowledgement: a committed step that has not completed.
    pub(super) fn begin(&mut self, step: u32) {
        if let Some(done) = self.done.get_mut(step as usize) {
            *done = false;
        }
    }

    /// Reads memory at the issue of `step`; if `unfinished`, it is read until the step completes.
    pub(super) fn read(
        &mut self,
        values: &mut Values,
        grid: &Grid,
        step: u32,
        operand: &Operand,
    ) -> Result<Content, Fault> {
        let atoms = grid.range(operand.part);
        let (lo, hi) = self.cells(operand, grid);
        match operand.buffer {
            Buffer::Input(rank) => {
                if self.copied && step >= self.copying {
                    return Err(Fault::Copied);
                }
                let tensors = self.ranks.get(&rank).ok_or(Fault::Buffer)?;
                if tensors.overwritten.get(lo..hi).is_none_or(|cells| cells.contains(&true)) {
                    return Err(Fault::Overwritten(rank));
                }
                Ok(atoms.map(|atom| values.leaf(rank, operand.part.block, atom)).collect())
            }
            Buffer::Output(rank) => {
                let tensors = self.ranks.get_mut(&rank).ok_or(Fault::Buffer)?;
                unused(&mut tensors.output_writes, &self.done, lo, hi)?;
                let cells = tensors.output.get(lo..hi).ok_or(Fault::Buffer)?;
                cells.iter().map(|cell| cell.ok_or(Fault::Undefined)).collect()
            }
            Buffer::Staging(slot) => {
                let late = step >= self.copying;
                let staged = self.slots.get_mut(usize::from(slot.0)).ok_or(Fault::Buffer)?;
                unused(&mut staged.writes, &self.done, lo, hi)?;
                staged.retained |= staged.copy && late;
                let holds = staged.holds(operand)?;
                match &staged.content {
                    Some((part, form, cells)) if (*part, *form) == (holds, operand.encoding) => {
                        let start = grid.range(holds).start;
                        let range = (atoms.start - start) as usize..(atoms.end - start) as usize;
                        let cells = cells.get(range).ok_or(Fault::Undefined)?;
                        cells.iter().map(|cell| cell.ok_or(Fault::Undefined)).collect()
                    }
                    _ => Err(Fault::Undefined),
                }
            }
            Buffer::Peer(_) => Err(Fault::Buffer),
        }
    }

    /// Writes memory at the issue of `step`.
    pub(super) fn write(
        &mut self,
        values: &mut Values,
        grid: &Grid,
        step: u32,
        operand: &Operand,
        content: &Content,
        committed: bool,
    ) -> Result<(), Fault> {
        match operand.buffer {
            Buffer::Output(rank) => self.write_output(values, grid, (rank, operand), content, committed),
            Buffer::Staging(slot) => self.write_slot(grid, step, slot, operand, content),
            Buffer::Input(_) | Buffer::Peer(_) => Err(Fault::Destinations),
        }
    }

    fn write_output(
        &mut self,
        values: &mut Values,
        grid: &Grid,
        (rank, operand): (Rank, &Operand),
        content: &Content,
        committed: bool,
    ) -> Result<(), Fault> {
        let (lo, hi) = self.cells(operand, grid);
        let tensors = self.ranks.get_mut(&rank).ok_or(Fault::Buffer)?;
        unused(&mut tensors.output_writes, &self.done, lo, hi)?;
        unused(&mut tensors.output_reads, &self.done, lo, hi)?;
        let cells = tensors.output.get_mut(lo..hi).ok_or(Fault::Buffer)?;
        for (cell, value) in cells.iter_mut().zip(content) {
            *cell = Some(*value);
        }
        let shared =
            self.collective.shared_block(rank, self.root).filter(|[_, of]| *of == operand.part.block);
        let Some([input, _]) = shared.filter(|_| self.in_place) else { return Ok(()) };
        let start = input as usize * self.atoms as usize;
        for (value, atom) in content.iter().zip(grid.range(operand.part)) {
            let cell = start + atom as usize;
            if *value == values.leaf(rank, input, atom) {
                continue; // Its own input: in place, nothing changes.
            }
            if self.protected && !committed {
                return Err(Fault::Uncommitted(rank));
            }
            unused(&mut tensors.input_reads, &self.done, cell, cell + 1)?;
            if let Some(overwritten) = tensors.overwritten.get_mut(cell) {
                *overwritten = true;
            }
        }
        Ok(())
    }

    fn write_slot(
        &mut self,
        grid: &Grid,
        step: u32,
        slot: Slot,
        operand: &Operand,
        content: &Content,
    ) -> Result<(), Fault> {
        let early = step < self.copying;
        let (lo, hi) = self.cells(operand, grid);
        let staged = self.slots.get_mut(usize::from(slot.0)).ok_or(Fault::Buffer)?;
        unused(&mut staged.reads, &self.done, lo, hi)?;
        unused(&mut staged.writes, &self.done, lo, hi)?;
        let holds = staged.holds(operand)?;
        // What is left of a copy would not be there when the segment is run again.
        if !early && (staged.retained || staged.copy && holds != operand.part) {
            return Err(Fault::Copied);
        }
        staged.copy = early;
        let (all, part) = (grid.range(holds), grid.range(operand.part));
        let now = (holds, operand.encoding);
        if staged.content.as_ref().is_none_or(|(held, form, _)| (*held, *form) != now) {
            staged.content = Some((holds, operand.encoding, vec![None; all.len()]));
        }
        if let Some((_, _, cells)) = &mut staged.content {
            let range = (part.start - all.start) as usize..(part.end - all.start) as usize;
            let cells = cells.get_mut(range).ok_or(Fault::SlotSize(slot))?;
            for (cell, value) in cells.iter_mut().zip(content) {
                *cell = Some(*value);
            }
        }
        Ok(())
    }

    /// `step` goes on reading the operand until it completes.
    pub(super) fn reading(&mut self, grid: &Grid, step: u32, operand: &Operand) {
        let (lo, hi) = self.cells(operand, grid);
        let span = Use { step, lo, hi };
        match operand.buffer {
            Buffer::Input(rank) => {
                if let Some(tensors) = self.ranks.get_mut(&rank) {
                    tensors.input_reads.push(span);
                }
            }
            Buffer::Output(rank) => {
                if let Some(tensors) = self.ranks.get_mut(&rank) {
                    tensors.output_reads.push(span);
                }
            }
            Buffer::Staging(slot) => {
                if let Some(staged) = self.slots.get_mut(usize::from(slot.0)) {
                    staged.reads.push(span);
                }
            }
            Buffer::Peer(_) => {}
        }
    }

    /// `step` goes on writing the operand until it completes.
    pub(super) fn writing(&mut self, grid: &Grid, step: u32, operand: &Operand) {
        let (lo, hi) = self.cells(operand, grid);
        let span = Use { step, lo, hi };
        match operand.buffer {
            Buffer::Output(rank) => {
                if let Some(tensors) = self.ranks.get_mut(&rank) {
                    tensors.output_writes.push(span);
                }
            }
            Buffer::Staging(slot) => {
                if let Some(staged) = self.slots.get_mut(usize::from(slot.0)) {
                    staged.writes.push(span);
                }
            }
            Buffer::Input(_) | Buffer::Peer(_) => {}
        }
    }

    /// What a rank's output holds, by block and range of the grid.
    pub(super) fn output(&self, rank: Rank) -> impl Iterator<Item = (u32, u32, Option<Value>)> {
        let atoms = self.atoms.max(1);
        let cells = (0_u32..).map(move |cell| (cell / atoms, cell % atoms));
        let output = self.ranks.get(&rank).map_or([].as_slice(), |tensors| tensors.output.as_slice());
        cells.zip(output).map(|((block, atom), value)| (block, atom, *value))
    }

    /// Cells of a tensor that an operand covers; of a slot, those of a whole segment's only block, else all.
    fn cells(&self, operand: &Operand, grid: &Grid) -> (usize, usize) {
        if let Buffer::Staging(slot) = operand.buffer {
            let divisor = self.slots.get(usize::from(slot.0)).map(|staged| staged.divisor);
            if divisor != Some(1) || operand.part.block > 0 {
                return (0, usize::MAX);
            }
        }
        let start = operand.part.block as usize * self.atoms as usize;
        let range = grid.range(operand.part);
        (start + range.start as usize, start + range.end as usize)
    }
}

impl Staged {
    /// The part that the slot holds where it holds this operand's; what is coded is such a part whole.
    fn holds(&self, operand: &Operand) -> Result<Part, Fault> {
        let holds = operand.part.enclosing(self.divisor).ok_or(Fault::Undefined)?;
        let whole = operand.encoding == Encoding::Exact || holds == operand.part;
        if whole { Ok(holds) } else { Err(Fault::Undefined) }
    }
}

/// Fails if an unfinished step uses a cell of `lo..hi`; forgets those that have finished.
fn unused(uses: &mut Vec<Use>, done: &[bool], lo: usize, hi: usize) -> Result<(), Fault> {
    uses.retain(|each| !done.get(each.step as usize).is_some_and(|done| *done));
    match uses.iter().find(|each| each.lo < hi && lo < each.hi) {
        Some(each) => Err(Fault::Unordered(each.step)),
        None => Ok(()),
    }
}
