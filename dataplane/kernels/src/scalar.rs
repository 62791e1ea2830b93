//! The reference: one element at a time, written to be read.

use crate::element::{Element, Fold, Lane, Max, Min, Product, Sum};
use crate::pass::{Kernel, Pass};
use half::{bf16, f16};
use harmonaize_abi::{Dtype, ReduceOp};

/// The reference's kernel for an operation and an element type.
pub(crate) fn kernel(op: ReduceOp, dtype: Dtype) -> Kernel {
    match op {
        ReduceOp::Sum | ReduceOp::Average => of::<Sum>(dtype),
        ReduceOp::Product => of::<Product>(dtype),
        ReduceOp::Min => of::<Min>(dtype),
        ReduceOp::Max => of::<Max>(dtype),
    }
}

fn of<O: Fold>(dtype: Dtype) -> Kernel {
    match dtype {
        Dtype::I8 => run::<i8, O>,
        Dtype::U8 => run::<u8, O>,
        Dtype::I32 => run::<i32, O>,
        Dtype::U32 => run::<u32, O>,
        Dtype::I64 => run::<i64, O>,
        Dtype::U64 => run::<u64, O>,
        Dtype::F16 => run::<f16, O>,
        Dtype::Bf16 => run::<bf16, O>,
        Dtype::F32 => run::<f32, O>,
        Dtype::F64 => run::<f64, O>,
    }
}

/// # Safety
/// `pass` must be of elements of `E`'s size.
unsafe fn run<E: Element, O: Fold>(pass: &Pass<'_>) {
    let Some((first, others)) = pass.sources.split_first() else { return };
    for offset in (0..pass.bytes).step_by(size_of::<E>()) {
        // SAFETY: a pass's views hold `bytes` bytes, whole elements, and `offset` is the start of one of them. Every bit
        // pattern is an `E`.
        let load = |from: *const u8| unsafe { from.add(offset).cast::<E>().read_unaligned() }.widen();
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
