//! Error feedback: what codes left out of a sum stays owed to it, and is added to the next.

use crate::{CodecError, Coded, Squares, Store, decode};
use harmonaize_abi::{Dtype, ReduceOp, View, ViewMut};
use harmonaize_kernels::{copy, reduce, sum_scaled};

/// One participant's account of a part of a tensor. It has what the participant owes to sums of this part, and room for what it owes
/// after the next: f32, as many as the part has elements, in memory apart.
///
/// Whoever contributes owes what its chunk left out, whoever owns the part what the chunk of the sum left out (Seide et al., 1-bit
/// stochastic gradient descent, Interspeech 2014; on both sides, Tang et al., DoubleSqueeze, ICML 2019). Both are parts of the sum
/// that nobody was told. So an account holds whatever owner and codec come next, and what was sent over all steps is what was
/// given less what is owed at the end.
///
/// `owed` is only read: a sum that is done again begins with the same.
#[derive(Clone, Copy, Debug)]
pub struct ErrorFeedback<'a> {
    /// What is owed before.
    pub residual_in: View<'a>,
    /// What is owed after.
    pub residual_out: ViewMut<'a>,
}

impl<'a> ErrorFeedback<'a> {
    /// What to encode of a contribution: it and what is owed, which lies in `left_out` meanwhile.
    ///
    /// # Errors
    /// If the views do not fit.
    pub fn contribution(&self, own: View<'_>) -> Result<View<'a>, CodecError> {
        reduce(ReduceOp::Sum, Dtype::F32, &[own, self.residual_in], &[self.residual_out], None)?;
        Ok(self.residual_out.as_view())
    }

    /// A contribution was encoded like that: what its chunk left out is owed.
    ///
    /// # Errors
    /// As [`decode`].
    pub fn record_contribution(&self, coded: &Coded, chunk: View<'_>) -> Result<(), CodecError> {
        self.update_residual(coded, chunk, 1)
    }

    /// Adds what is owed to an owner's sum that has its own contribution so far.
    ///
    /// # Errors
    /// If the views do not fit.
    pub fn begin(&self, sum: ViewMut<'_>) -> Result<(), CodecError> {
        Ok(reduce(ReduceOp::Sum, Dtype::F32, &[sum.as_view(), self.residual_in], &[sum], None)?)
    }

    /// Takes note of the complete sum, before it is divided.
    ///
    /// # Errors
    /// If the views do not fit.
    pub fn complete(&self, sum: View<'_>) -> Result<(), CodecError> {
        Ok(copy(sum, &[self.residual_out])?)
    }

    /// That sum was encoded, or its average of so many ranks: what its chunk left out of it is owed. The chunk is decoded once, however many
    /// ranks there are; of an average what is owed is rounded twice more.
    ///
    /// # Errors
    /// As [`decode`].
    pub fn record_result(
        &self,
        coded: &Coded,
        average_of: Option<u32>,
        chunk: View<'_>,
    ) -> Result<(), CodecError> {
        self.update_residual(coded, chunk, average_of.unwrap_or(1))
    }

    /// Chunks without an error leave nothing out. What is no number is told in the sum, and owed to nobody.
    fn update_residual(&self, coded: &Coded, chunk: View<'_>, times: u32) -> Result<(), CodecError> {
        let Squares { error, signal } = coded.squares;
        if coded.refused || error == 0.0 || !error.is_finite() || !signal.is_finite() {
            return clear(self.residual_out);
        }
        let owed = self.residual_out;
        let scale = |by: f64| sum_scaled(Dtype::F32, &[owed.as_view()], &[by], &[owed]);
        if times > 1 {
            // As much as is owed to each rank, like the average.
            scale(1.0 / f64::from(times))?;
        }
        decode(chunk, Store::Subtract, owed)?;
        if times > 1 {
            scale(f64::from(times))?;
        }
        Ok(())
    }
}

/// Makes all elements 0.
fn clear(to: ViewMut<'_>) -> Result<(), CodecError> {
    const ZEROS: [u8; 4096] = [0; 4096];
    for at in (0..to.bytes()).step_by(ZEROS.len()) {
        let length = ZEROS.len().min(to.bytes() - at);
        let zeros = View::from(&ZEROS[..]).range(0, length);
        if let (Some(zeros), Some(part)) = (zeros, to.range(at, length)) {
            copy(zeros, &[part])?;
        }
    }
    Ok(())
}
