//! The reference: one element at a time, written to be read.

use crate::element::{Element, Factor, Fold, Lane};
use crate::pass::Pass;

/// A pass whose sources are multiplied by these factors, one each, or none.
///
/// # Safety
/// `pass` must be of elements `E`.
pub(crate) unsafe fn run<E: Element, O: Fold>(pass: &Pass<'_>, factors: &[Factor]) {
    let Some((first, others)) = pass.sources.split_first() else { return };
    for offset in (0..pass.bytes).step_by(size_of::<E>()) {
        // SAFETY: a pass's views hold `bytes` bytes, whole elements, and `offset` is the start of one of them. Every bit
        // pattern is an `E`.
        let element = |from: *const u8| unsafe { from.add(offset).cast::<E>().read_unaligned() }.widen();
        let mut factors = factors.iter();
        let mut load = |from| match factors.next() {
            None => element(from),
            Some(by) => element(from).scale(by),
        };
        let mut lane = load(first.pointer());
        for source in others {
            lane = O::fold(lane, load(source.pointer()));
        }
        if let Some(divisor) = pass.divide {
            lane = lane.divide(divisor);
        }
        let element = E::narrow(lane);
        for destination in pass.destinations {
            // SAFETY: as above, and destinations may be written.
            unsafe { destination.pointer().add(offset).cast::<E>().write_unaligned(element) };
        }
    }
}
