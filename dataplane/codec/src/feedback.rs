//! Error feedback: what codes left out of a sum stays owed to it, and is added to the next.

use crate::chunk::{decode_by, header};
use crate::passes::{Passes, elements, elements_of_all};
use crate::{CodecError, Coded, Squares, Store};
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
/// What is owed before is only read: a sum that is done again, or left in its midst, begins with the same. What is owed after holds
/// once its step is done, and until then is anything. Steps run in [slices](Passes), as [`crate::Terms`] do.
#[derive(Clone, Copy, Debug)]
pub struct ErrorFeedback<'a> {
    /// What is owed before.
    pub residual_in: View<'a>,
    /// What is owed after.
    pub residual_out: ViewMut<'a>,
}

impl<'a> ErrorFeedback<'a> {
    /// What to encode of a contribution: it and what is owed, which lies in `residual_out` meanwhile.
    ///
    /// # Errors
    /// If the views do not fit.
    pub fn contribution(
        &self,
        passes: &mut Passes<'_>,
        own: View<'_>,
    ) -> Result<Option<View<'a>>, CodecError> {
        let added = self.add_residual(passes, own, self.residual_out)?;
        Ok(added.map(|()| self.residual_out.as_view()))
    }

    /// A contribution was encoded like that: what its chunk left out is owed.
    ///
    /// # Errors
    /// As [`crate::decode`].
    pub fn record_contribution(
        &self,
        passes: &mut Passes<'_>,
        coded: &Coded,
        chunk: View<'_>,
    ) -> Result<Option<()>, CodecError> {
        self.update_residual(passes, coded, chunk, 1)
    }

    /// Adds what is owed to an owner's sum that has its own contribution so far.
    ///
    /// # Errors
    /// If the views do not fit.
    pub fn begin(&self, passes: &mut Passes<'_>, sum: ViewMut<'_>) -> Result<Option<()>, CodecError> {
        self.add_residual(passes, sum.as_view(), sum)
    }

    /// Takes note of the complete sum, before it is divided.
    ///
    /// # Errors
    /// If the views do not fit.
    pub fn complete(&self, passes: &mut Passes<'_>, sum: View<'_>) -> Result<Option<()>, CodecError> {
        let elements = elements_of_all([sum.bytes(), self.residual_out.bytes()])?;
        passes.each(elements, (2, 1), |part| Ok(copy(part.of(sum)?, &[part.of_mut(self.residual_out)?])?))
    }

    /// That sum was encoded, or its average of so many ranks: what its chunk left out of it is owed. The chunk is decoded once, however many
    /// ranks there are; of an average what is owed is rounded twice more.
    ///
    /// # Errors
    /// As [`crate::decode`].
    pub fn record_result(
        &self,
        passes: &mut Passes<'_>,
        coded: &Coded,
        average_of: Option<u32>,
        chunk: View<'_>,
    ) -> Result<Option<()>, CodecError> {
        self.update_residual(passes, coded, chunk, average_of.unwrap_or(1))
    }

    fn add_residual(
        &self,
        passes: &mut Passes<'_>,
        from: View<'_>,
        to: ViewMut<'_>,
    ) -> Result<Option<()>, CodecError> {
        let elements = elements_of_all([from.bytes(), self.residual_in.bytes(), to.bytes()])?;
        passes.each(elements, (3, 1), |part| {
            let sources = [part.of(from)?, part.of(self.residual_in)?];
            Ok(reduce(ReduceOp::Sum, Dtype::F32, &sources, &[part.of_mut(to)?], None)?)
        })
    }

    /// Chunks without an error leave nothing out. What is no number is told in the sum, and owed to nobody.
    fn update_residual(
        &self,
        passes: &mut Passes<'_>,
        coded: &Coded,
        chunk: View<'_>,
        times: u32,
    ) -> Result<Option<()>, CodecError> {
        let Squares { error, signal } = coded.squares;
        let owed = self.residual_out;
        if coded.refused || error == 0.0 || !error.is_finite() || !signal.is_finite() {
            return clear(passes, owed);
        }
        // As much as is owed to each rank, like the average.
        if times > 1 && scale(passes, owed, 1.0 / f64::from(times))?.is_none() {
            return Ok(None);
        }
        if decode_by(passes, &header(chunk)?, chunk, Store::Subtract, owed)?.is_none() {
            return Ok(None);
        }
        if times > 1 { scale(passes, owed, f64::from(times)) } else { Ok(Some(())) }
    }
}

/// Multiplies all elements.
fn scale(passes: &mut Passes<'_>, of: ViewMut<'_>, by: f64) -> Result<Option<()>, CodecError> {
    passes.each(elements(of.bytes())?, (2, 1), |part| {
        let of = part.of_mut(of)?;
        Ok(sum_scaled(Dtype::F32, &[of.as_view()], &[by], &[of])?)
    })
}

/// Makes all elements 0.
fn clear(passes: &mut Passes<'_>, to: ViewMut<'_>) -> Result<Option<()>, CodecError> {
    const ZEROS: [u8; 4096] = [0; 4096];
    passes.each(elements(to.bytes())?, (1, 1), |part| {
        let to = part.of_mut(to)?;
        for at in (0..to.bytes()).step_by(ZEROS.len()) {
            let length = ZEROS.len().min(to.bytes() - at);
            let zeros = View::from(&ZEROS[..]).range(0, length);
            if let (Some(zeros), Some(some)) = (zeros, to.range(at, length)) {
                copy(zeros, &[some])?;
            }
        }
        Ok(())
    })
}
