//! Coded steps in slices: passes over elements, part after part, which may be left between two parts and gone on with later.
//!
//! A step that was left is called again, with the [`Cursor`] that it left. It walks through its passes in the same order, skips
//! those that are done, and goes on with the next one where that stood. What a pass came to is kept, so what a step decides by it
//! is decided alike. Parts are the same whether a step is left or not, and so are all bits.
//!
//! Whoever never goes on has destinations that are written in part, and nothing else: sources and what is owed before are only
//! read. So a step may be begun anew, with a fresh cursor, wherever it was left.

use crate::{CodecError, Header, Squares};
use harmonaize_abi::{Dtype, View, ViewMut};
use harmonaize_kernels::KernelError;

/// Elements of a part, of which a pass has whole ones but for its last. Blocks and groups of every codec divide it. A part of rotated
/// codes takes some 11 us of a core (by the slowest result of `cargo xtask bench codec`, on Zen 4).
pub const PART: usize = 16 << 10;

/// Passes of a step that can be left; one beyond would run as a whole.
const PASSES: usize = 8;

/// What a part costs, for whoever says when a turn is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Bytes of elements that it reads and writes, coded or not.
    pub bytes: usize,
    /// Bytes that a copy reads and writes in the same time, about.
    pub copied: usize,
}

/// What a pass came to so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    /// Elements that are done.
    elements: usize,
    /// Bytes of the payload that it has written or read.
    pub(crate) bytes: usize,
    pub(crate) squares: Squares,
}

/// How far a step is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor {
    /// The chunk's that is read, as it was at first: nobody changes it meanwhile.
    header: Option<Header>,
    /// By pass, what those came to that are done.
    done: [Option<Outcome>; PASSES],
    /// The next pass.
    open: Outcome,
}

/// A step's passes in one turn.
pub struct Passes<'a> {
    cursor: Cursor,
    /// The number of the next pass.
    next: usize,
    ends_before: &'a mut dyn FnMut(Load) -> bool,
}

/// Elements of a tensor that a pass takes at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Elements before it.
    pub(crate) first: usize,
    pub(crate) elements: usize,
}

/// Runs a step as a whole: nothing ends its turn.
///
/// # Errors
/// As the step.
pub fn whole<T>(
    mut step: impl FnMut(&mut Passes<'_>) -> Result<Option<T>, CodecError>,
) -> Result<T, CodecError> {
    let mut cursor = Cursor::default();
    loop {
        let mut never = |_: Load| false;
        let mut passes = Passes::resume(cursor, &mut never);
        if let Some(done) = step(&mut passes)? {
            return Ok(done);
        }
        cursor = passes.cursor();
    }
}

impl<'a> Passes<'a> {
    /// Begins a step, with the default cursor, or goes on with it. `ends_before` says whether the turn is over before a part.
    pub fn resume(cursor: Cursor, ends_before: &'a mut dyn FnMut(Load) -> bool) -> Self {
        Self { cursor, next: 0, ends_before }
    }

    /// How far the step is.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// The header of the chunk that the step reads, which is read in its first turn.
    pub(crate) fn header(
        &mut self,
        read: impl FnOnce() -> Result<Header, CodecError>,
    ) -> Result<Header, CodecError> {
        let header = self.cursor.header.map_or_else(read, Ok)?;
        self.cursor.header = Some(header);
        Ok(header)
    }

    /// Runs a pass over so many elements of `operands` tensors, or goes on with it. A part takes `weight` times as long as a copy of its
    /// bytes. Returns what the pass came to; none: the turn is over before that.
    pub(crate) fn run(
        &mut self,
        elements: usize,
        (operands, weight): (usize, usize),
        mut part: impl FnMut(Part, &mut Outcome) -> Result<(), CodecError>,
    ) -> Result<Option<Outcome>, CodecError> {
        let number = self.next;
        self.next += 1;
        if let Some(Some(done)) = self.cursor.done.get(number) {
            return Ok(Some(*done));
        }
        let mut outcome = std::mem::take(&mut self.cursor.open);
        while outcome.elements < elements {
            let next = Part { first: outcome.elements, elements: PART.min(elements - outcome.elements) };
            let bytes = (size_of::<f32>() * operands).saturating_mul(next.elements);
            let over = (self.ends_before)(Load { bytes, copied: bytes.saturating_mul(weight) });
            if over && number < PASSES {
                self.cursor.open = outcome;
                return Ok(None);
            }
            part(next, &mut outcome)?;
            outcome.elements += next.elements;
        }
        if let Some(done) = self.cursor.done.get_mut(number) {
            *done = Some(outcome);
        }
        Ok(Some(outcome))
    }

    /// [`Self::run`] of a pass that comes to nothing but what it writes.
    pub(crate) fn each(
        &mut self,
        elements: usize,
        cost: (usize, usize),
        mut part: impl FnMut(Part) -> Result<(), CodecError>,
    ) -> Result<Option<()>, CodecError> {
        Ok(self.run(elements, cost, |one, _| part(one))?.map(|_| ()))
    }
}

impl Part {
    /// Its bytes of a tensor.
    pub(crate) fn of(self, tensor: View<'_>) -> Result<View<'_>, CodecError> {
        let [first, bytes] = self.place();
        tensor.range(first, bytes).ok_or_else(|| self.missing(tensor.bytes()))
    }

    /// The same, to write.
    pub(crate) fn of_mut(self, tensor: ViewMut<'_>) -> Result<ViewMut<'_>, CodecError> {
        let [first, bytes] = self.place();
        tensor.range(first, bytes).ok_or_else(|| self.missing(tensor.bytes()))
    }

    /// Its offset, and its length in bytes.
    fn place(self) -> [usize; 2] {
        [self.first, self.elements].map(|elements| elements.saturating_mul(size_of::<f32>()))
    }

    fn missing(self, given: usize) -> CodecError {
        let [first, bytes] = self.place();
        KernelError::Length { expected: first.saturating_add(bytes), given }.into()
    }
}

/// The elements of a tensor of so many bytes.
pub(crate) fn elements(bytes: usize) -> Result<usize, CodecError> {
    let dtype = Dtype::F32;
    if bytes.is_multiple_of(dtype.size()) {
        Ok(bytes / dtype.size())
    } else {
        Err(KernelError::PartialElement { bytes, dtype }.into())
    }
}

/// The elements of tensors that have as many.
pub(crate) fn elements_of_all<const N: usize>(bytes: [usize; N]) -> Result<usize, CodecError> {
    let expected = bytes.first().copied().unwrap_or(0);
    match bytes.iter().find(|given| **given != expected) {
        None => elements(expected),
        Some(given) => Err(KernelError::Length { expected, given: *given }.into()),
    }
}
