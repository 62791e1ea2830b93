//! Error feedback: what a tensor's codes left out in one step is added in the next.

use crate::{Codec, CodecError, Encoded, Store, decode, encode};
use harmonaize_abi::{Dtype, ReduceOp, View, ViewMut};
use harmonaize_kernels::reduce;

/// What one tensor's encoder has left out so far (Seide et al., "1-bit stochastic gradient descent", Interspeech 2014). With
/// it, what was sent over all steps is what was given less one step's error. Holds as many f32 as the tensor; allocates only
/// where the shape changes.
#[derive(Debug, Default)]
pub struct Feedback {
    left_out: Vec<f32>,
    epoch: u64,
}

impl Feedback {
    /// [`encode`] of `source` and what was left out before. Another number of elements or another epoch than last time forgets
    /// that first; a NaN or an infinity in the tensor forgets it afterwards.
    ///
    /// # Errors
    /// As [`encode`]; what was left out before is forgotten then.
    pub fn encode(
        &mut self,
        epoch: u64,
        codec: Codec,
        seed: u64,
        source: View<'_>,
        to: ViewMut<'_>,
    ) -> Result<Encoded, CodecError> {
        let elements = source.bytes() / Dtype::F32.size();
        if self.epoch != epoch || self.left_out.len() != elements {
            self.left_out.clear();
            self.left_out.resize(elements, 0.0);
            self.epoch = epoch;
        }
        let sent = self.step(codec, seed, source, to);
        if !sent.as_ref().is_ok_and(|sent| sent.squares.error.is_finite()) {
            self.left_out.fill(0.0);
        }
        sent
    }

    fn step(
        &mut self,
        codec: Codec,
        seed: u64,
        source: View<'_>,
        to: ViewMut<'_>,
    ) -> Result<Encoded, CodecError> {
        let sum = ViewMut::from(&mut self.left_out[..]);
        reduce(ReduceOp::Sum, Dtype::F32, &[source, sum.as_view()], &[sum], None)?;
        let sent = encode(codec, seed, sum.as_view(), to)?;
        decode(to.as_view(), Store::Subtract, sum)?;
        Ok(sent)
    }

    /// What the last step left out.
    pub fn left_out(&self) -> &[f32] {
        &self.left_out
    }
}
