//! The collectives, and messages from rank to rank.

use crate::communicator::harmonaize_communicator_t;
use crate::error::{Failure, create, given, slice};
use crate::feedback::harmonaize_feedback_t;
use crate::operation::harmonaize_operation_t;
use crate::status::harmonaize_status_t;
use crate::tensor::harmonaize_tensor_t;
use harmonaize_client::{Communicator, Error, Operation, Rank, ReduceOp, Tensor};
use std::mem::MaybeUninit;

/// How elements are reduced: `HARMONAIZE_SUM` and so on. Not every type has all of them.
pub type harmonaize_reduce_t = u32;

/// Sum.
pub const HARMONAIZE_SUM: harmonaize_reduce_t = 0;
/// Product.
pub const HARMONAIZE_PRODUCT: harmonaize_reduce_t = 1;
/// Smallest.
pub const HARMONAIZE_MIN: harmonaize_reduce_t = 2;
/// Largest.
pub const HARMONAIZE_MAX: harmonaize_reduce_t = 3;
/// Sum divided by the number of ranks.
pub const HARMONAIZE_AVERAGE: harmonaize_reduce_t = 4;
/// Bitwise and; of bools the conjunction.
pub const HARMONAIZE_BAND: harmonaize_reduce_t = 5;
/// Bitwise or; of bools the disjunction.
pub const HARMONAIZE_BOR: harmonaize_reduce_t = 6;
/// Bitwise exclusive or; of bools whether an odd number is true.
pub const HARMONAIZE_BXOR: harmonaize_reduce_t = 7;
/// Sum of all ranks' inputs, each times its rank's own factor (`harmonaize_with`).
pub const HARMONAIZE_PREMUL_SUM: harmonaize_reduce_t = 8;

fn reduction(reduce: harmonaize_reduce_t) -> Result<ReduceOp, Failure> {
    let known = u8::try_from(reduce).ok().and_then(ReduceOp::from_code);
    known.ok_or_else(|| Failure::argument(format!("{reduce} is no reduction")))
}

fn tensor(tensor: Option<&harmonaize_tensor_t>) -> Result<&Tensor, Failure> {
    Ok(&given(tensor, "tensor")?.0)
}

/// Whether both are the same handle.
fn same(one: Option<&harmonaize_tensor_t>, other: Option<&harmonaize_tensor_t>) -> bool {
    one.zip(other).is_some_and(|(one, other)| std::ptr::eq(one, other))
}

/// Starts an operation.
fn start(
    communicator: Option<&harmonaize_communicator_t>,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
    start: impl FnOnce(&Communicator) -> Result<Result<Operation, Error>, Failure>,
) -> harmonaize_status_t {
    create(operation, || {
        Ok(harmonaize_operation_t::new(start(&given(communicator, "communicator")?.communicator)??))
    })
}

/// Starts an AllReduce: `output` becomes the reduction of all ranks' `input`. Both of the same type and size; in place where
/// they are the same handle.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_all_reduce(
    communicator: Option<&harmonaize_communicator_t>,
    input: Option<&harmonaize_tensor_t>,
    output: Option<&harmonaize_tensor_t>,
    reduce: harmonaize_reduce_t,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| {
        Ok(communicator.all_reduce(tensor(input)?, tensor(output)?, reduction(reduce)?))
    })
}

/// Starts an AllReduce of f32 with error feedback: what fewer bits leave out of this sum is added to the next one with this
/// feedback.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_all_reduce_with_feedback(
    communicator: Option<&harmonaize_communicator_t>,
    input: Option<&harmonaize_tensor_t>,
    output: Option<&harmonaize_tensor_t>,
    reduce: harmonaize_reduce_t,
    feedback: Option<&harmonaize_feedback_t>,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| {
        let (input, output) = (tensor(input)?, tensor(output)?);
        let feedback = &given(feedback, "feedback")?.0;
        Ok(communicator.all_reduce_with_feedback(input, output, reduction(reduce)?, feedback))
    })
}

/// Starts a ReduceScatter: `output` becomes the reduction of all ranks' block of `input` with this rank's number. In place,
/// where they are the same handle, the result is that block, and the others stay as they are.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_reduce_scatter(
    communicator: Option<&harmonaize_communicator_t>,
    input: Option<&harmonaize_tensor_t>,
    output: Option<&harmonaize_tensor_t>,
    reduce: harmonaize_reduce_t,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| {
        let (whole, reduce) = (tensor(input)?, reduction(reduce)?);
        Ok(match same(input, output) {
            true => communicator.reduce_scatter_in_place(whole, reduce),
            false => communicator.reduce_scatter(whole, tensor(output)?, reduce),
        })
    })
}

/// Starts an AllGather: block `r` of every rank's `output` becomes rank `r`'s `input`. In place, where they are the same
/// handle, this rank's input is the block with its number.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_all_gather(
    communicator: Option<&harmonaize_communicator_t>,
    input: Option<&harmonaize_tensor_t>,
    output: Option<&harmonaize_tensor_t>,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| {
        let whole = tensor(output)?;
        Ok(match same(input, output) {
            true => communicator.all_gather_in_place(whole),
            false => communicator.all_gather(tensor(input)?, whole),
        })
    })
}

/// Starts an AllToAll: block `r` of `input` goes to rank `r`, and block `r` of `output` comes from rank `r`. Never in place.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_all_to_all(
    communicator: Option<&harmonaize_communicator_t>,
    input: Option<&harmonaize_tensor_t>,
    output: Option<&harmonaize_tensor_t>,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(
        communicator,
        operation,
        |communicator| Ok(communicator.all_to_all(tensor(input)?, tensor(output)?)),
    )
}

/// Starts a Broadcast: every rank's `output` becomes the root's `input`. Only the root needs an input; in place where they are
/// the same handle.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_broadcast(
    communicator: Option<&harmonaize_communicator_t>,
    input: Option<&harmonaize_tensor_t>,
    output: Option<&harmonaize_tensor_t>,
    root: u32,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| {
        Ok(communicator.broadcast_into(input.map(|input| &input.0), tensor(output)?, Rank(root)))
    })
}

/// Starts a Reduce: the root's `output` becomes the reduction of all ranks' `input`. Only the root needs an output; in place
/// where they are the same handle.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_reduce(
    communicator: Option<&harmonaize_communicator_t>,
    input: Option<&harmonaize_tensor_t>,
    output: Option<&harmonaize_tensor_t>,
    reduce: harmonaize_reduce_t,
    root: u32,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| {
        let output = output.map(|output| &output.0);
        Ok(communicator.reduce(tensor(input)?, output, reduction(reduce)?, Rank(root)))
    })
}

/// Starts a Gather: block `r` of the root's `output` becomes rank `r`'s `input`. Only the root needs an output. In place, where
/// they are the same handle, the root's input is the block with its number.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_gather(
    communicator: Option<&harmonaize_communicator_t>,
    input: Option<&harmonaize_tensor_t>,
    output: Option<&harmonaize_tensor_t>,
    root: u32,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| {
        let one = tensor(input)?;
        Ok(match same(input, output) {
            true => communicator.gather_in_place(one, Rank(root)),
            false => communicator.gather(one, output.map(|output| &output.0), Rank(root)),
        })
    })
}

/// Starts a Scatter: rank `r`'s `output` becomes block `r` of the root's `input`. Only the root needs an input. In place, where
/// they are the same handle, the root's output is the block with its number, and stays as it is.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_scatter(
    communicator: Option<&harmonaize_communicator_t>,
    input: Option<&harmonaize_tensor_t>,
    output: Option<&harmonaize_tensor_t>,
    root: u32,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| {
        let one = tensor(output)?;
        Ok(match same(input, output) {
            true => communicator.scatter_in_place(one, Rank(root)),
            false => communicator.scatter(input.map(|input| &input.0), one, Rank(root)),
        })
    })
}

/// Starts an AllGather whose inputs differ in size: rank `r`'s has `counts[r]` elements, perhaps none. There is a count for each
/// rank, and all ranks give the same. In place where `input` is the slice of `output` that is its own.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_all_gather_v(
    communicator: Option<&harmonaize_communicator_t>,
    input: Option<&harmonaize_tensor_t>,
    output: Option<&harmonaize_tensor_t>,
    counts: *const u64,
    count: usize,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| {
        // SAFETY: the caller gives so many counts.
        let counts = unsafe { slice(counts, count, "counts") }?;
        Ok(communicator.all_gather_v(tensor(input)?, tensor(output)?, counts))
    })
}

/// Starts a ReduceScatter whose blocks differ in size: `output` becomes the reduction of all ranks' block of `input` with this
/// rank's number. Counts and place as of `harmonaize_all_gather_v`.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_reduce_scatter_v(
    communicator: Option<&harmonaize_communicator_t>,
    input: Option<&harmonaize_tensor_t>,
    output: Option<&harmonaize_tensor_t>,
    reduce: harmonaize_reduce_t,
    counts: *const u64,
    count: usize,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| {
        // SAFETY: the caller gives so many counts.
        let counts = unsafe { slice(counts, count, "counts") }?;
        Ok(communicator.reduce_scatter_v(tensor(input)?, tensor(output)?, reduction(reduce)?, counts))
    })
}

/// Starts a Gather whose inputs differ in size; only the root needs an output. Counts and place as of `harmonaize_all_gather_v`.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_gather_v(
    communicator: Option<&harmonaize_communicator_t>,
    input: Option<&harmonaize_tensor_t>,
    output: Option<&harmonaize_tensor_t>,
    counts: *const u64,
    count: usize,
    root: u32,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| {
        // SAFETY: the caller gives so many counts.
        let counts = unsafe { slice(counts, count, "counts") }?;
        Ok(communicator.gather_v(tensor(input)?, output.map(|output| &output.0), counts, Rank(root)))
    })
}

/// Starts a Scatter whose blocks differ in size; only the root needs an input. Counts and place as of
/// `harmonaize_all_gather_v`.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_scatter_v(
    communicator: Option<&harmonaize_communicator_t>,
    input: Option<&harmonaize_tensor_t>,
    output: Option<&harmonaize_tensor_t>,
    counts: *const u64,
    count: usize,
    root: u32,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| {
        // SAFETY: the caller gives so many counts.
        let counts = unsafe { slice(counts, count, "counts") }?;
        Ok(communicator.scatter_v(input.map(|input| &input.0), tensor(output)?, counts, Rank(root)))
    })
}

/// Starts an AllToAll whose blocks differ in size: `send_counts[r]` elements of `input` go to rank `r`, and `recv_counts[r]` of
/// `output` come from rank `r`. `most` is at least the largest count of any pair of ranks, and the same at all ranks.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_all_to_all_v(
    communicator: Option<&harmonaize_communicator_t>,
    input: Option<&harmonaize_tensor_t>,
    send_counts: *const u64,
    output: Option<&harmonaize_tensor_t>,
    recv_counts: *const u64,
    count: usize,
    most: u64,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| {
        // SAFETY: the caller gives so many counts, of both.
        let (sent, received) =
            unsafe { (slice(send_counts, count, "counts")?, slice(recv_counts, count, "counts")?) };
        Ok(communicator.all_to_all_v(tensor(input)?, sent, tensor(output)?, received, most))
    })
}

/// Starts a Barrier: ends when every rank has started it.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_barrier(
    communicator: Option<&harmonaize_communicator_t>,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| Ok(communicator.barrier()))
}

/// Starts to send `message` to a rank, which receives one of the same type and size. Sends and receives are in no order with
/// collectives; of those from one rank to another the first send goes to the first receive.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_send(
    communicator: Option<&harmonaize_communicator_t>,
    message: Option<&harmonaize_tensor_t>,
    to: u32,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| Ok(communicator.send(tensor(message)?, Rank(to))))
}

/// Starts to receive what a rank sends: `message` becomes that.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_recv(
    communicator: Option<&harmonaize_communicator_t>,
    message: Option<&harmonaize_tensor_t>,
    from: u32,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| Ok(communicator.recv(tensor(message)?, Rank(from))))
}

/// Starts to receive what any rank sends that no receive before this one is for. `peer` of the receipt names it.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_recv_any(
    communicator: Option<&harmonaize_communicator_t>,
    message: Option<&harmonaize_tensor_t>,
    operation: Option<&mut MaybeUninit<Option<Box<harmonaize_operation_t>>>>,
) -> harmonaize_status_t {
    start(communicator, operation, |communicator| Ok(communicator.recv_any(tensor(message)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reduction_and_type_is_in_the_header() {
        let header = include_str!("../include/harmonaize.h");
        let defined = |name: String, code: u8| {
            let line = format!("#define HARMONAIZE_{name} {code}\n");
            assert!(header.contains(&line), "{line}");
        };
        for reduce in ReduceOp::ALL {
            let name = if *reduce == ReduceOp::PremulSum { "premul_sum" } else { reduce.name() };
            defined(name.to_uppercase(), reduce.code());
            assert_eq!(reduction(reduce.code().into()).unwrap(), *reduce);
        }
        for dtype in harmonaize_client::Dtype::ALL {
            defined(dtype.name().to_uppercase(), dtype.code());
        }
        assert!(reduction(9).is_err() && reduction(256).is_err());
    }
}
