//! Tensors in an attachment's memory.

use crate::arena::Arena;
use crate::{Element, Error};
use harmonaize_abi::{Dtype, Region, View, ViewMut};
use harmonaize_shm::Memory;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use zerocopy::IntoBytes;

/// The memory of an attachment and what is free in it. Outlives the attachment while tensors do.
#[derive(Debug)]
pub(crate) struct Pool {
    memory: Arc<Memory>,
    free: Mutex<Arena>,
}

impl Pool {
    pub(crate) fn new(memory: Arc<Memory>) -> Arc<Self> {
        let free = Mutex::new(Arena::new(memory.bytes() as u64));
        Arc::new(Self { memory, free })
    }

    fn free(&self) -> MutexGuard<'_, Arena> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Elements of one type in a piece of the attachment's memory, 64-byte aligned. The piece is free again when the tensor
/// is dropped and no operation on it is in flight. Contents are unspecified until written. Reading or writing elements that
/// an operation in flight uses gives torn values, and nothing worse.
#[derive(Debug)]
pub struct Tensor {
    pub(crate) block: Arc<Block>,
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
        self.pool.free().give_back(self.offset, self.bytes());
    }
}

impl Block {
    fn bytes(&self) -> u64 {
        self.elements * self.dtype.size() as u64
    }
}

impl Tensor {
    pub(crate) fn new(pool: &Arc<Pool>, dtype: Dtype, elements: u64) -> Result<Self, Error> {
        let mut free_pieces = pool.free();
        let bytes = elements.checked_mul(dtype.size() as u64);
        let Some(offset) = bytes.and_then(|bytes| free_pieces.take(bytes)) else {
            let (free, largest) = free_pieces.room();
            let asked = bytes.unwrap_or(u64::MAX);
            return Err(Error::NoRoom { requested: asked, arena: pool.memory.bytes() as u64, free, largest });
        };
        drop(free_pieces);
        Ok(Self { block: Arc::new(Block { pool: Arc::clone(pool), dtype, elements, offset }) })
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.block.dtype
    }

    /// How many elements.
    pub fn elements(&self) -> u64 {
        self.block.elements
    }

    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        self.block.bytes()
    }

    pub(crate) fn region(&self) -> Region {
        Region { offset: self.block.offset, bytes: self.bytes() }
    }

    fn start<E: Element>(&self, offset: u64, count: usize) -> Result<u64, Error> {
        let (elements, count) = (self.elements(), count as u64);
        if E::DTYPE != self.dtype() {
            return Err(Error::Dtype { expected: E::DTYPE, found: self.dtype() });
        }
        match offset.checked_add(count) {
            Some(end) if end <= elements => Ok(self.block.offset + offset * size_of::<E>() as u64),
            _ => Err(Error::OutOfRange { offset, count, elements }),
        }
    }

    /// Copies elements in, from element `offset` of the tensor on.
    pub fn write<E: Element>(&self, offset: u64, from: &[E]) -> Result<(), Error> {
        let start = self.start::<E>(offset, from.len())?;
        Ok(self.block.pool.memory.write(start, from.as_bytes())?)
    }

    /// Copies elements out, from element `offset` of the tensor on.
    pub fn read<E: Element>(&self, offset: u64, into: &mut [E]) -> Result<(), Error> {
        let start = self.start::<E>(offset, into.len())?;
        Ok(self.block.pool.memory.read(start, into.as_mut_bytes())?)
    }

    /// The bytes, to read through raw pointers.
    pub fn view(&self) -> Result<View<'_>, Error> {
        Ok(self.block.pool.memory.view(self.block.offset, self.bytes())?)
    }

    /// The bytes, to write through raw pointers.
    pub fn view_mut(&self) -> Result<ViewMut<'_>, Error> {
        Ok(self.block.pool.memory.view_mut(self.block.offset, self.bytes())?)
    }
}
