//! A snapshot on its way: tensors that the agent copies while the job computes.

use crate::communicator::Communicator;
use crate::tensor::Tensor;
use crate::{Error, Operation};
use std::time::Instant;

/// Each copy has two of the attachment's entries, and all of them half: one in so many entries is a copy at most.
const ENTRIES: u32 = 4;

/// Copies of a rank's tensors into its image.
#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    copies: Vec<TensorCopy>,
    /// Whether it is to become whole.
    unfinished: bool,
}

/// A tensor that is copied.
#[derive(Debug)]
pub(crate) struct TensorCopy {
    from: Tensor,
    into: Tensor,
    /// Both ends of the agent's copy. None: it has not begun.
    ends: Option<[Operation; 2]>,
}

impl TensorCopy {
    /// Into a tensor of as many bytes.
    pub(crate) fn new(from: Tensor, into: Tensor) -> Self {
        Self { from, into, ends: None }
    }

    /// Has the agent begin; false where there is no room for it now.
    fn begin(&mut self, communicator: &Communicator) -> Result<bool, Error> {
        if self.ends.is_none() {
            self.ends = match communicator.copy(&self.from, &self.into) {
                // What an operation writes meanwhile, the process copies after it.
                Err(Error::TooMany { .. } | Error::InUse { .. }) => return Ok(false),
                begun => Some(begun?),
            };
        }
        Ok(true)
    }

    fn has_ended(&mut self) -> Result<bool, Error> {
        let Some([read, written]) = &mut self.ends else { return Ok(false) };
        Ok(read.poll()?.is_some() && written.poll()?.is_some())
    }
}

impl Snapshot {
    /// Begins one, of which nothing is copied yet.
    pub(crate) fn new(copies: Vec<TensorCopy>) -> Self {
        Self { copies, unfinished: true }
    }

    /// Whether something is to be copied.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.unfinished
    }

    /// Has the agent begin what it has room for, and notes what has ended. Whether the snapshot became whole now.
    pub(crate) fn advance(&mut self, communicator: &Communicator) -> Result<bool, Error> {
        let most = (communicator.entries() / ENTRIES).max(1) as usize;
        for copy in self.copies.iter_mut().take(most) {
            if !copy.begin(communicator)? {
                break;
            }
        }
        let mut failed = None;
        self.copies.retain_mut(|copy| match copy.has_ended() {
            Ok(ended) => !ended,
            Err(error) => {
                failed.get_or_insert(error);
                true
            }
        });
        match failed {
            Some(error) => Err(error),
            None => Ok(self.copies.is_empty() && std::mem::take(&mut self.unfinished)),
        }
    }

    /// Copies here what the agent has not begun. After an error it never becomes whole.
    pub(crate) fn copy_remaining(&mut self) -> Result<(), Error> {
        let (begun, rest) =
            std::mem::take(&mut self.copies).into_iter().partition::<Vec<_>, _>(|copy| copy.ends.is_some());
        self.copies = begun;
        let copy = |TensorCopy { from, into, .. }: &TensorCopy| into.copy_from(0, from, 0, from.bytes());
        let copied = rest.iter().try_for_each(copy);
        if copied.is_err() {
            self.forget();
        }
        copied
    }

    /// Waits until one of the agent's copies has ended, or the time has come. Its result stays for [`Self::advance`].
    pub(crate) fn wait_any(&mut self, deadline: Option<Instant>) -> Result<(), Error> {
        // What reads has ended, too, once what writes has.
        let ends = self.copies.iter_mut().filter_map(|copy| copy.ends.as_mut());
        super::wait_any(ends.map(|[_, written]| written), deadline)
    }

    /// It never becomes whole.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pool;
    use harmonaize_abi::Dtype;
    use harmonaize_shm::{ForkGuard, Memory};

    #[test]
    fn what_the_agent_has_not_begun_is_copied_here() {
        let pool = Pool::fixed(Memory::private(1 << 16).unwrap(), ForkGuard::new().unwrap());
        let tensor = |dtype, elements| Tensor::new(&pool, dtype, elements).unwrap();
        let (weights, image) = (tensor(Dtype::F32, 100), tensor(Dtype::U8, 1000));
        weights.write(0, &[1.5_f32; 100]).unwrap();
        let into = image.slice(8..408).unwrap();
        let mut snapshot = Snapshot::new(vec![TensorCopy::new(weights.slice(..).unwrap(), into)]);
        assert!(snapshot.is_unfinished());
        snapshot.copy_remaining().unwrap();
        assert!(
            snapshot.copies.is_empty() && snapshot.is_unfinished(),
            "nobody has noted yet that it is whole"
        );
        let copy = tensor(Dtype::F32, 100);
        copy.copy_from(0, &image, 8, 400).unwrap();
        let mut values = [0.0_f32; 100];
        copy.read(0, &mut values).unwrap();
        assert_eq!(values, [1.5; 100]);
    }

    #[test]
    fn a_snapshot_that_could_not_be_copied_never_becomes_whole() {
        let pool = Pool::fixed(Memory::private(1 << 16).unwrap(), ForkGuard::new().unwrap());
        let tensor = |elements| Tensor::new(&pool, Dtype::U8, elements).unwrap();
        let mut snapshot = Snapshot::new(vec![TensorCopy::new(tensor(9), tensor(8))]);
        snapshot.copy_remaining().unwrap_err();
        assert!(!snapshot.is_unfinished() && snapshot.copies.is_empty());
    }
}
