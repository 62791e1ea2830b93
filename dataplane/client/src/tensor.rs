//! Tensors in an attachment's memory.

use crate::pool::{Piece, Pool};
use crate::region::Registration;
use crate::{Element, Error};
use harmonaize_abi::{Dtype, Region, View, ViewMut};
use harmonaize_shm::{Memory, Pin, check_range};
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Bytes that are copied from tensor to tensor at once: few enough for the processor's cache.
pub(crate) const COPY_BYTES: usize = 256 << 10;

/// Elements of one type in a piece of the attachment's memory. They are 64-byte aligned in the arena, or where the program
/// put them in a [region](crate::Region). The piece is free again when the tensor and all its [slices](Tensor::slice) are dropped and
/// no operation on it is in flight. Contents are unspecified until written. Reading or writing elements that an operation in
/// flight uses gives torn values, and nothing worse.
#[derive(Debug)]
pub struct Tensor {
    pub(crate) block: Arc<Block>,
    /// Elements of the block before the first of these.
    start: u64,
    elements: u64,
}

/// Memory of the attachment's, given back when the last user drops it.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) pool: Arc<Pool>,
    dtype: Dtype,
    elements: u64,
    home: Home,
}

/// Where a block lies.
#[derive(Debug)]
enum Home {
    Arena(Piece),
    /// From this byte of the region on.
    Registered(Arc<Registration>, u64),
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Home::Arena(piece) = &self.home {
            self.pool.give_back(piece, self.bytes());
        }
    }
}

impl Block {
    fn bytes(&self) -> u64 {
        self.elements * self.dtype.size() as u64
    }

    /// Its mapping, where that begins among the attachment's offsets, and where in it the block begins.
    fn place(&self) -> (&Arc<Memory>, u64, u64) {
        match &self.home {
            Home::Arena(Piece { memory, base, offset, .. }) => (memory, *base, *offset),
            Home::Registered(registration, offset) => (&registration.memory, registration.base, *offset),
        }
    }
}

impl Tensor {
    pub(crate) fn new(pool: &Arc<Pool>, dtype: Dtype, elements: u64) -> Result<Self, Error> {
        // More than can be counted is not there either.
        let bytes = elements.saturating_mul(dtype.size() as u64);
        let home = Home::Arena(pool.take(bytes)?);
        Ok(Self::of(Block { pool: Arc::clone(pool), dtype, elements, home }))
    }

    /// On bytes that lie in the region.
    pub(crate) fn registered(
        pool: &Arc<Pool>,
        registration: &Arc<Registration>,
        dtype: Dtype,
        offset: u64,
        elements: u64,
    ) -> Self {
        let home = Home::Registered(Arc::clone(registration), offset);
        Self::of(Block { pool: Arc::clone(pool), dtype, elements, home })
    }

    fn of(block: Block) -> Self {
        let elements = block.elements;
        Self { block: Arc::new(block), start: 0, elements }
    }

    /// A part of this tensor, by its elements. It is a tensor that shares their memory, to be used wherever a tensor
    /// is. Several slices may be in flight at once.
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

    /// Its mapping, and where in it the tensor begins. Fails in a child by `fork`.
    fn memory(&self) -> Result<(&Memory, u64), Error> {
        self.block.pool.owned()?;
        let (memory, _, offset) = self.block.place();
        Ok((memory, offset + self.start * self.block.dtype.size() as u64))
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
        let (_, base, offset) = self.block.place();
        let start = self.start * self.block.dtype.size() as u64;
        Region { offset: base + offset + start, bytes: self.bytes() }
    }

    /// The mapping, and where in it the elements from one on lie.
    fn elements_at<E: Element>(&self, offset: u64, count: usize) -> Result<(&Memory, u64), Error> {
        let (elements, count) = (self.elements(), count as u64);
        if E::DTYPE != self.dtype() {
            return Err(Error::Dtype { expected: E::DTYPE, found: self.dtype() });
        }
        match offset.checked_add(count) {
            Some(end) if end <= elements => {
                let (memory, start) = self.memory()?;
                Ok((memory, start + offset * size_of::<E>() as u64))
            }
            _ => Err(Error::OutOfRange { offset, count, elements }),
        }
    }

    /// Copies elements in, from element `offset` of the tensor on.
    pub fn write<E: Element>(&self, offset: u64, from: &[E]) -> Result<(), Error> {
        let (memory, start) = self.elements_at::<E>(offset, from.len())?;
        Ok(memory.write(start, from.as_bytes())?)
    }

    /// Copies elements out, from element `offset` of the tensor on.
    pub fn read<E: Element>(&self, offset: u64, into: &mut [E]) -> Result<(), Error> {
        let (memory, start) = self.elements_at::<E>(offset, into.len())?;
        Ok(memory.read(start, into.as_mut_bytes())?)
    }

    /// The mapping, and where in it these bytes of the tensor lie.
    fn bytes_at(&self, offset: u64, bytes: u64) -> Result<(&Memory, u64), Error> {
        check_range(offset, bytes, self.bytes())?;
        let (memory, start) = self.memory()?;
        Ok((memory, start + offset))
    }

    /// Copies bytes in, from this byte of the tensor on.
    pub(crate) fn write_bytes(&self, offset: u64, from: &[u8]) -> Result<(), Error> {
        let (memory, start) = self.bytes_at(offset, from.len() as u64)?;
        Ok(memory.write(start, from)?)
    }

    /// Copies bytes out, from this byte of the tensor on.
    pub(crate) fn read_bytes(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let (memory, start) = self.bytes_at(offset, into.len() as u64)?;
        Ok(memory.read(start, into)?)
    }

    /// Copies bytes of another tensor in, from these bytes of both on. Costs one pass, and one through the cache.
    pub(crate) fn copy_from(&self, into: u64, other: &Self, from: u64, bytes: u64) -> Result<(), Error> {
        check_range(into, bytes, self.bytes())?;
        check_range(from, bytes, other.bytes())?;
        let mut buffer = vec![0; bytes.min(COPY_BYTES as u64) as usize];
        for at in (0..bytes).step_by(COPY_BYTES) {
            buffer.truncate((bytes - at).min(COPY_BYTES as u64) as usize);
            other.read_bytes(from + at, &mut buffer)?;
            self.write_bytes(into + at, &buffer)?;
        }
        Ok(())
    }

    /// A hold on the mapping that the tensor lies in, for a device that is to reach it.
    pub fn pin(&self) -> Pin {
        Pin::new(self.block.place().0)
    }

    /// The bytes, to read through raw pointers.
    pub fn view(&self) -> Result<View<'_>, Error> {
        let (memory, start) = self.memory()?;
        Ok(memory.view(start, self.bytes())?)
    }

    /// The bytes, to write through raw pointers.
    pub fn view_mut(&self) -> Result<ViewMut<'_>, Error> {
        let (memory, start) = self.memory()?;
        Ok(memory.view_mut(start, self.bytes())?)
    }
}
