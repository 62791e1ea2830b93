//! Tensors in an attachment's memory.

use crate::arena::Arena;
use crate::{Element, Error};
use harmonaize_abi::{Dtype, Region, View, ViewMut};
use harmonaize_shm::{ForkGuard, Memory};
use std::ops::{Bound, RangeBounds};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use zerocopy::IntoBytes;

/// The memory of an attachment and what is free in it. Outlives the attachment while tensors do.
#[derive(Debug)]
pub(crate) struct Pool {
    memory: Arc<Memory>,
    guard: Arc<ForkGuard>,
    free: Mutex<Arena>,
}

impl Pool {
    pub(crate) fn new(memory: Arc<Memory>, guard: Arc<ForkGuard>) -> Arc<Self> {
        let free = Mutex::new(Arena::new(memory.bytes() as u64));
        Arc::new(Self { memory, guard, free })
    }

    /// The memory, in the process that attached: a child by `fork` would write into its tensors.
    fn memory(&self) -> Result<&Memory, Error> {
        if self.guard.is_inherited() { Err(Error::Forked) } else { Ok(&self.memory) }
    }

    fn free(&self) -> Result<MutexGuard<'_, Arena>, Error> {
        self.memory()?;
        Ok(self.free.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Elements of one type in a piece of the attachment's memory, 64-byte aligned. The piece is free again when the tensor
/// and all its [slices](Tensor::slice) are dropped and no operation on it is in flight. Contents are unspecified until written.
/// Reading or writing elements that an operation in flight uses gives torn values, and nothing worse.
#[derive(Debug)]
pub struct Tensor {
    pub(crate) block: Arc<Block>,
    /// Elements of the block before the first of these.
    start: u64,
    elements: u64,
}

/// A piece of the arena, given back when the last user drops it.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) pool: Arc<Pool>,
    dtype: Dtype,
    elements: u64,
    offset: u64,
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Ok(mut free) = self.pool.free() {
            free.give_back(self.offset, self.bytes());
        }
    }
}

impl Block {
    fn bytes(&self) -> u64 {
        self.elements * self.dtype.size() as u64
    }
}

impl Tensor {
    pub(crate) fn new(pool: &Arc<Pool>, dtype: Dtype, elements: u64) -> Result<Self, Error> {
        let mut free_pieces = pool.free()?;
        let bytes = elements.checked_mul(dtype.size() as u64);
        let Some(offset) = bytes.and_then(|bytes| free_pieces.take(bytes)) else {
            let (free, largest) = free_pieces.room();
            let asked = bytes.unwrap_or(u64::MAX);
            return Err(Error::NoRoom { requested: asked, arena: pool.memory.bytes() as u64, free, largest });
        };
        drop(free_pieces);
        let block = Arc::new(Block { pool: Arc::clone(pool), dtype, elements, offset });
        Ok(Self { block, start: 0, elements })
    }

    /// A part of this tensor, by its elements: a tensor that shares their memory, to be used wherever a tensor is. Several slices may be in
    /// flight at once.
    ///
    /// ```no_run
    /// # use harmonaize_client::{Communicator, Error, ReduceOp, Tensor};
    /// # use std::time::Duration;
    /// # fn halves(job: &Communicator, gradients: &Tensor) -> Result<(), Error> {
    /// let middle = gradients.elements() / 2;
    /// let (early, late) = (gradients.slice(..middle)?, gradients.slice(middle..)?);
    /// let mut first = job.all_reduce_in_place(&late, ReduceOp::Sum)?;
    /// let mut second = job.all_reduce_in_place(&early, ReduceOp::Sum)?;
    /// first.wait(Duration::from_secs(30))?;
    /// second.wait(Duration::from_secs(30))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// An operation on a slice is refused with [`Error::InUse`] while one in flight has elements of it and either of the two writes them,
    /// and so is an operation on a tensor while one on a slice of it is in flight. Operations on whole tensors alone are not
    /// refused for each other: their order is the caller's.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where the range ends before it begins, or after the tensor.
    pub fn slice(&self, range: impl RangeBounds<u64>) -> Result<Self, Error> {
        let first = match range.start_bound() {
            Bound::Included(first) => *first,
            Bound::Excluded(before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(last) => last.saturating_add(1),
            Bound::Excluded(end) => *end,
            Bound::Unbounded => self.elements,
        };
        match end.checked_sub(first) {
            Some(elements) if end <= self.elements => {
                Ok(Self { block: Arc::clone(&self.block), start: self.start + first, elements })
            }
            count => {
                let count = count.unwrap_or(0);
                Err(Error::OutOfRange { offset: first, count, elements: self.elements })
            }
        }
    }

    /// Whether this is but a part of its block.
    pub(crate) fn is_slice(&self) -> bool {
        self.elements < self.block.elements
    }

    /// Where its memory begins.
    fn offset(&self) -> u64 {
        self.block.offset + self.start * self.block.dtype.size() as u64
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.block.dtype
    }

    /// How many elements.
    pub fn elements(&self) -> u64 {
        self.elements
    }

    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        self.elements * self.block.dtype.size() as u64
    }

    pub(crate) fn region(&self) -> Region {
        Region { offset: self.offset(), bytes: self.bytes() }
    }

    fn start<E: Element>(&self, offset: u64, count: usize) -> Result<u64, Error> {
        let (elements, count) = (self.elements(), count as u64);
        if E::DTYPE != self.dtype() {
            return Err(Error::Dtype { expected: E::DTYPE, found: self.dtype() });
        }
        match offset.checked_add(count) {
            Some(end) if end <= elements => Ok(self.offset() + offset * size_of::<E>() as u64),
            _ => Err(Error::OutOfRange { offset, count, elements }),
        }
    }

    /// Copies elements in, from element `offset` of the tensor on.
    pub fn write<E: Element>(&self, offset: u64, from: &[E]) -> Result<(), Error> {
        let start = self.start::<E>(offset, from.len())?;
        Ok(self.block.pool.memory()?.write(start, from.as_bytes())?)
    }

    /// Copies elements out, from element `offset` of the tensor on.
    pub fn read<E: Element>(&self, offset: u64, into: &mut [E]) -> Result<(), Error> {
        let start = self.start::<E>(offset, into.len())?;
        Ok(self.block.pool.memory()?.read(start, into.as_mut_bytes())?)
    }

    /// The bytes, to read through raw pointers.
    pub fn view(&self) -> Result<View<'_>, Error> {
        Ok(self.block.pool.memory()?.view(self.offset(), self.bytes())?)
    }

    /// The bytes, to write through raw pointers.
    pub fn view_mut(&self) -> Result<ViewMut<'_>, Error> {
        Ok(self.block.pool.memory()?.view_mut(self.offset(), self.bytes())?)
    }
}
