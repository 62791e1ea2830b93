//! Error feedback: what fewer bits left out of a tensor's sums, kept from step to step.

use crate::Error;
use crate::pool::Pool;
use crate::tensor::Tensor;
use harmonaize_abi::{Dtype, Region};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// Elements that are cleared at once.
const CLEARED: usize = 4096;

/// What operations have left out of one tensor's sums so far, for [`crate::Communicator::all_reduce_with_feedback`]: f32, as many as the
/// tensor has. Kept whatever codec or plan comes next. A tensor of another shape needs a feedback of its own.
#[derive(Debug)]
pub struct Feedback {
    halves: Arc<ResidualPair>,
}

/// One half says what is owed, the other takes what will be.
#[derive(Debug)]
struct ResidualPair {
    tensors: [Tensor; 2],
    /// [`OTHER`] and [`IN_USE`].
    state: AtomicU8,
}

/// The second half is the one that says what is owed.
const OTHER: u8 = 1;
/// An operation is in flight with it.
const IN_USE: u8 = 2;

impl ResidualPair {
    /// What is owed, and where what will be goes.
    fn ordered(&self, state: u8) -> [&Tensor; 2] {
        let [one, other] = &self.tensors;
        if state & OTHER == 0 { [one, other] } else { [other, one] }
    }
}

/// An operation has the halves until this is dropped.
#[derive(Debug)]
pub(crate) struct InUse {
    halves: Arc<ResidualPair>,
}

impl InUse {
    /// The operation has succeeded: what it left out is owed.
    pub(crate) fn commit(&self) {
        self.halves.state.fetch_xor(OTHER, Ordering::AcqRel);
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.halves.state.fetch_and(!IN_USE, Ordering::AcqRel);
    }
}

impl Feedback {
    pub(crate) fn new(pool: &Arc<Pool>, elements: u64) -> Result<Self, Error> {
        let half = || Tensor::new(pool, Dtype::F32, elements);
        let halves = ResidualPair { tensors: [half()?, half()?], state: AtomicU8::new(0) };
        let feedback = Self { halves: Arc::new(halves) };
        feedback.reset()?;
        Ok(feedback)
    }

    pub(crate) fn pool(&self) -> &Arc<Pool> {
        let [one, _] = &self.halves.tensors;
        &one.block.pool
    }

    /// An operation of so many elements begins with it: what is owed, and where what will be goes.
    pub(crate) fn start(&self, elements: u64) -> Result<([Region; 2], InUse), Error> {
        if elements != self.elements() {
            let own = self.elements();
            return Err(Error::Shape(format!(
                "feedback of {own} elements for a tensor of {elements}; each shape needs its own"
            )));
        }
        let state = self.halves.state.fetch_or(IN_USE, Ordering::AcqRel);
        if state & IN_USE != 0 {
            return Err(Self::in_use());
        }
        let in_use = InUse { halves: Arc::clone(&self.halves) };
        Ok((self.halves.ordered(state).map(Tensor::region), in_use))
    }

    fn in_use() -> Error {
        Error::Shape("an operation with this feedback is in flight; wait for it first".into())
    }

    /// How many elements.
    pub fn elements(&self) -> u64 {
        let [one, _] = &self.halves.tensors;
        one.elements()
    }

    fn residual(&self) -> Result<&Tensor, Error> {
        let state = self.halves.state.load(Ordering::Acquire);
        let [owed, _] = self.halves.ordered(state);
        if state & IN_USE == 0 { Ok(owed) } else { Err(Self::in_use()) }
    }

    /// Copies out what is owed, from element `offset` on: with it a checkpoint of the training is whole.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Shape`] while an operation with it is in flight.
    pub fn read(&self, offset: u64, into: &mut [f32]) -> Result<(), Error> {
        self.residual()?.read(offset, into)
    }

    /// Sets what is owed, from element `offset` on, as from a checkpoint.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn write(&self, offset: u64, from: &[f32]) -> Result<(), Error> {
        self.residual()?.write(offset, from)
    }

    /// Forgets what is owed.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn reset(&self) -> Result<(), Error> {
        let (owed, elements) = (self.residual()?, self.elements());
        for at in (0..elements).step_by(CLEARED) {
            let length = elements.saturating_sub(at).min(CLEARED as u64) as usize;
            owed.write(at, [0.0_f32; CLEARED].get(..length).unwrap_or_default())?;
        }
        Ok(())
    }
}
