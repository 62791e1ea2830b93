//! The collectives and messages from rank to rank.

use crate::config::{check_collective, ncclCollConfig_t};
use crate::group::{Submission, submit};
use crate::registry::{Comm, find, lock, ncclComm_t};
use crate::result::{Failure, entry, give, ncclResult_t, ncclSuccess};
use harmonaize_client::{Collective, Dtype, F8E4M3, F8E5M2, Rank, ReduceOp};
use harmonaize_staging::cuda::{Stream, driver};
use harmonaize_staging::{Call, Kind, Piece};
use std::ffi::{c_int, c_void};

/// A CUDA stream. Calls on memory that CUDA knows run in its order; nobody looks at it otherwise.
type cudaStream_t = *mut c_void;
/// NCCL's element types, reductions and places of a scalar, by number.
type ncclDataType_t = c_int;
type ncclRedOp_t = c_int;
type ncclScalarResidence_t = c_int;

/// Element types, by NCCL's number.
const DTYPES: [Dtype; 12] = [
    Dtype::I8,
    Dtype::U8,
    Dtype::I32,
    Dtype::U32,
    Dtype::I64,
    Dtype::U64,
    Dtype::F16,
    Dtype::F32,
    Dtype::F64,
    Dtype::Bf16,
    Dtype::F8E4M3,
    Dtype::F8E5M2,
];

/// Reductions, by NCCL's number. Those that a communicator made follow.
const REDUCTIONS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Max, ReduceOp::Min, ReduceOp::Average];

fn dtype(number: ncclDataType_t) -> Result<Dtype, Failure> {
    let known = usize::try_from(number).ok().and_then(|number| DTYPES.get(number));
    known.copied().ok_or_else(|| Failure::argument(format!("there is no element type {number}")))
}

/// A reduction of a communicator, and the factor of one that multiplies first.
fn reduction(comm: &Comm, number: ncclRedOp_t) -> Result<(ReduceOp, Option<f64>), Failure> {
    let unknown = || Failure::argument(format!("the communicator has no reduction {number}"));
    let at = usize::try_from(number).map_err(|_| unknown())?;
    if let Some(reduce) = REDUCTIONS.get(at) {
        return Ok((*reduce, None));
    }
    let own = lock(&comm.factors).get(at - REDUCTIONS.len()).copied().flatten();
    own.map(|factor| (ReduceOp::PremulSum, Some(factor))).ok_or_else(unknown)
}

fn rank(number: c_int) -> Result<Rank, Failure> {
    let rank = u32::try_from(number).map_err(|_| Failure::argument(format!("there is no rank {number}")))?;
    Ok(Rank(rank))
}

/// A buffer of so many elements in so many blocks.
fn piece(buffer: *const c_void, dtype: Dtype, count: usize, blocks: u32) -> Result<Vec<Piece>, Failure> {
    let elements = usize::try_from(blocks).ok().and_then(|blocks| count.checked_mul(blocks));
    let bytes = elements.and_then(|elements| elements.checked_mul(dtype.size()));
    let bytes = bytes.filter(|bytes| isize::try_from(*bytes).is_ok());
    let bytes = bytes.ok_or_else(|| Failure::argument(format!("{blocks} times {count} elements")))?;
    if buffer.is_null() {
        return Err(Failure::argument("a buffer is NULL"));
    }
    Ok(vec![Piece { address: buffer.addr(), bytes }])
}

/// The stream in whose order a call runs: where CUDA knows the memory.
fn order(pieces: &[Piece], stream: cudaStream_t) -> Result<Option<Stream>, Failure> {
    let Some(driver) = driver() else { return Ok(None) };
    let known = pieces.iter().filter(|piece| driver.manages(piece.address)).count();
    if known > 0 && known < pieces.len() {
        return Err(Failure::argument(
            "a buffer is CUDA's and another one is not: allocate both on a device, or pinned (cudaMallocHost)",
        ));
    }
    Ok((known > 0).then(|| Stream(stream.addr())))
}

/// What is called of a communicator, and the reduction and the root of it where it has any.
struct Arguments {
    comm: ncclComm_t,
    dtype: ncclDataType_t,
    count: usize,
    reduce: Option<ncclRedOp_t>,
    root: Option<c_int>,
    stream: cudaStream_t,
}

/// Starts a call. `blocks`: of how many blocks of `count` elements the input and the output are, by the communicator's ranks and
/// whether this one is the root; nothing where that one is not used.
fn call(
    kind: Kind,
    arguments: &Arguments,
    (input, output): (*const c_void, *mut c_void),
    blocks: impl FnOnce(u32, bool) -> (Option<u32>, Option<u32>),
) -> ncclResult_t {
    entry(|| {
        let comm = find(arguments.comm)?;
        let (dtype, count) = (dtype(arguments.dtype)?, arguments.count);
        let (reduce, factor) =
            arguments.reduce.map_or(Ok((ReduceOp::Sum, None)), |number| reduction(&comm, number))?;
        let root = arguments.root.map_or(Ok(Rank(0)), rank)?;
        let (own, ranks) = comm.place();
        if root.0 >= ranks {
            return Err(Failure::argument(format!("rank {root} of {ranks}")));
        }
        if count == 0 {
            return Ok(());
        }
        let (inputs, outputs) = blocks(ranks, own == root);
        let pieces = |buffer: *const c_void, blocks: Option<u32>| {
            blocks.map_or(Ok(Vec::new()), |blocks| piece(buffer, dtype, count, blocks))
        };
        let (inputs, outputs) = (pieces(input, inputs)?, pieces(output, outputs)?);
        let stream = order(&[&inputs[..], &outputs[..]].concat(), arguments.stream)?;
        let call = Call { kind, dtype, reduce, root, inputs, outputs, counts: None };
        submit(Submission { comm, call, factor, stream })
    })
}

/// Every rank's output becomes the reduction of all ranks' inputs.
#[unsafe(no_mangle)]
pub extern "C" fn ncclAllReduce(
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    reduce: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let arguments = Arguments { comm, dtype, count, reduce: Some(reduce), root: None, stream };
    call(Kind::Collective(Collective::AllReduce), &arguments, (input, output), |_, _| (Some(1), Some(1)))
}

/// The root's output becomes the reduction of all ranks' inputs.
#[unsafe(no_mangle)]
pub extern "C" fn ncclReduce(
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    reduce: ncclRedOp_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let arguments = Arguments { comm, dtype, count, reduce: Some(reduce), root: Some(root), stream };
    let blocks = |_, at_root: bool| (Some(1), at_root.then_some(1));
    call(Kind::Collective(Collective::Reduce), &arguments, (input, output), blocks)
}

/// Every rank's output becomes the root's input.
#[unsafe(no_mangle)]
pub extern "C" fn ncclBroadcast(
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let arguments = Arguments { comm, dtype, count, reduce: None, root: Some(root), stream };
    let blocks = |_, at_root: bool| (at_root.then_some(1), Some(1));
    call(Kind::Collective(Collective::Broadcast), &arguments, (input, output), blocks)
}

/// [`ncclBroadcast`] in place.
#[unsafe(no_mangle)]
pub extern "C" fn ncclBcast(
    buffer: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    ncclBroadcast(buffer, buffer, count, dtype, root, comm, stream)
}

/// Rank `r`'s output becomes the reduction of all ranks' block `r`, of `count` elements.
#[unsafe(no_mangle)]
pub extern "C" fn ncclReduceScatter(
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    reduce: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let arguments = Arguments { comm, dtype, count, reduce: Some(reduce), root: None, stream };
    let blocks = |ranks, _| (Some(ranks), Some(1));
    call(Kind::Collective(Collective::ReduceScatter), &arguments, (input, output), blocks)
}

/// Block `r` of every rank's output becomes rank `r`'s input, of `count` elements.
#[unsafe(no_mangle)]
pub extern "C" fn ncclAllGather(
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let arguments = Arguments { comm, dtype, count, reduce: None, root: None, stream };
    let blocks = |ranks, _| (Some(1), Some(ranks));
    call(Kind::Collective(Collective::AllGather), &arguments, (input, output), blocks)
}

/// Block `r` of the input goes to rank `r`, and block `r` of the output comes from it, each of `count` elements.
#[unsafe(no_mangle)]
pub extern "C" fn ncclAlltoAll(
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let arguments = Arguments { comm, dtype, count, reduce: None, root: None, stream };
    let blocks = |ranks, _| (Some(ranks), Some(ranks));
    call(Kind::Collective(Collective::AllToAll), &arguments, (input, output), blocks)
}

/// Block `r` of the root's output becomes rank `r`'s input, of `count` elements.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGather(
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let arguments = Arguments { comm, dtype, count, reduce: None, root: Some(root), stream };
    let blocks = |ranks, at_root: bool| (Some(1), at_root.then_some(ranks));
    call(Kind::Collective(Collective::Gather), &arguments, (input, output), blocks)
}

/// Rank `r`'s output becomes block `r` of the root's input, of `count` elements.
#[unsafe(no_mangle)]
pub extern "C" fn ncclScatter(
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let arguments = Arguments { comm, dtype, count, reduce: None, root: Some(root), stream };
    let blocks = |ranks, at_root: bool| (at_root.then_some(ranks), Some(1));
    call(Kind::Collective(Collective::Scatter), &arguments, (input, output), blocks)
}

/// Sends to a rank, which receives as much.
#[unsafe(no_mangle)]
pub extern "C" fn ncclSend(
    input: *const c_void,
    count: usize,
    dtype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let arguments = Arguments { comm, dtype, count, reduce: None, root: Some(peer), stream };
    call(Kind::Send, &arguments, (input, std::ptr::null_mut()), |_, _| (Some(1), None))
}

/// Receives from a rank, which sends as much.
#[unsafe(no_mangle)]
pub extern "C" fn ncclRecv(
    output: *mut c_void,
    count: usize,
    dtype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let arguments = Arguments { comm, dtype, count, reduce: None, root: Some(peer), stream };
    call(Kind::Receive, &arguments, (std::ptr::null(), output), |_, _| (None, Some(1)))
}

/// Reads a scalar. Half floats have no Rust type: their bits become that of an `f32`.
fn scalar(dtype: Dtype, at: *const c_void) -> Result<f64, Failure> {
    // SAFETY: the caller gives the address of a scalar of this type.
    unsafe {
        Ok(match dtype {
            Dtype::F64 => at.cast::<f64>().read_unaligned(),
            Dtype::F32 => at.cast::<f32>().read_unaligned().into(),
            Dtype::Bf16 => f32::from_bits(u32::from(at.cast::<u16>().read_unaligned()) << 16).into(),
            Dtype::F16 => half(at.cast::<u16>().read_unaligned()),
            Dtype::F8E4M3 => F8E4M3::from_bits(at.cast::<u8>().read()).to_f32().into(),
            Dtype::F8E5M2 => F8E5M2::from_bits(at.cast::<u8>().read()).to_f32().into(),
            Dtype::I8 => at.cast::<i8>().read().into(),
            Dtype::U8 => at.cast::<u8>().read().into(),
            Dtype::I32 => at.cast::<i32>().read_unaligned().into(),
            Dtype::U32 => at.cast::<u32>().read_unaligned().into(),
            Dtype::I64 => exact(at.cast::<i64>().read_unaligned().into())?,
            Dtype::U64 => exact(at.cast::<u64>().read_unaligned().into())?,
            other => return Err(Failure::argument(format!("a factor of type {other}"))),
        })
    }
}

/// A whole factor, which goes to the agent as an `f64`.
fn exact(whole: i128) -> Result<f64, Failure> {
    match whole.unsigned_abs() <= 1 << f64::MANTISSA_DIGITS {
        true => Ok(whole as f64),
        false => Err(Failure::argument(format!("a factor of {whole}: whole ones go from -2^53 to 2^53"))),
    }
}

/// The value of a binary16.
fn half(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023) / 1024.0);
    let value = match exponent {
        0 => fraction * 2_f64.powi(-14),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1.0 + fraction) * 2_f64.powi(exponent - 15),
    };
    if bits >> 15 == 1 { -value } else { value }
}

/// Makes a reduction of a communicator that multiplies this rank's input by a scalar and sums. The scalar is read now, wherever it
/// resides, so it must be in host memory.
#[unsafe(no_mangle)]
pub extern "C" fn ncclRedOpCreatePreMulSum(
    op: *mut ncclRedOp_t,
    factor: *mut c_void,
    number: ncclDataType_t,
    _residence: ncclScalarResidence_t,
    comm: ncclComm_t,
) -> ncclResult_t {
    entry(|| {
        let (comm, dtype) = (find(comm)?, dtype(number)?);
        if factor.is_null() || driver().is_some_and(|driver| driver.is_device(factor.addr())) {
            return Err(Failure::argument("the factor is not in host memory"));
        }
        let factor = scalar(dtype, factor)?;
        let mut factors = lock(&comm.factors);
        let (made, free) = (factors.len(), factors.iter().position(Option::is_none));
        let at = free.unwrap_or(made);
        let number = c_int::try_from(at + REDUCTIONS.len());
        let number = number.map_err(|_| Failure::usage("the communicator has too many reductions"))?;
        give(number, op, "where the reduction goes")?;
        factors.resize(made.max(at + 1), None);
        if let Some(slot) = factors.get_mut(at) {
            *slot = Some(factor);
        }
        Ok(())
    })
}

/// Takes a reduction back.
#[unsafe(no_mangle)]
pub extern "C" fn ncclRedOpDestroy(op: ncclRedOp_t, comm: ncclComm_t) -> ncclResult_t {
    entry(|| {
        let comm = find(comm)?;
        let at = usize::try_from(op).ok().and_then(|op| op.checked_sub(REDUCTIONS.len()));
        let mut factors = lock(&comm.factors);
        let own = at.and_then(|at| factors.get_mut(at)).and_then(Option::take);
        own.map(drop).ok_or_else(|| Failure::argument(format!("the communicator did not make {op}")))
    })
}

/// Collectives with a configuration, which makes no difference where it is taken: it tunes NCCL's own kernels.
macro_rules! configured {
    ($($name:ident => $plain:ident($($argument:ident: $type:ty),*);)*) => {$(
        /// The same with a configuration for NCCL's kernels.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type,)* config: *const ncclCollConfig_t) -> ncclResult_t {
            match entry(|| check_collective(config)) {
                ncclSuccess => $plain($($argument),*),
                refused => refused,
            }
        }
    )*};
}

configured! {
    ncclAllReduceConfig => ncclAllReduce(input: *const c_void, output: *mut c_void, count: usize, dtype: ncclDataType_t, reduce: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t);
    ncclReduceConfig => ncclReduce(input: *const c_void, output: *mut c_void, count: usize, dtype: ncclDataType_t, reduce: ncclRedOp_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t);
    ncclBroadcastConfig => ncclBroadcast(input: *const c_void, output: *mut c_void, count: usize, dtype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t);
    ncclReduceScatterConfig => ncclReduceScatter(input: *const c_void, output: *mut c_void, count: usize, dtype: ncclDataType_t, reduce: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t);
    ncclAllGatherConfig => ncclAllGather(input: *const c_void, output: *mut c_void, count: usize, dtype: ncclDataType_t, comm: ncclComm_t, stream: cudaStream_t);
    ncclAlltoAllConfig => ncclAlltoAll(input: *const c_void, output: *mut c_void, count: usize, dtype: ncclDataType_t, comm: ncclComm_t, stream: cudaStream_t);
    ncclGatherConfig => ncclGather(input: *const c_void, output: *mut c_void, count: usize, dtype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t);
    ncclScatterConfig => ncclScatter(input: *const c_void, output: *mut c_void, count: usize, dtype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_floats_have_their_values() {
        for (bits, value) in [
            (0, 0.0),
            (0x3c00, 1.0),
            (0x3800, 0.5),
            (0xc000, -2.0),
            (0x7bff, 65_504.0),
            (1, 2_f64.powi(-24)),
            (0x7c00, f64::INFINITY),
        ] {
            assert_eq!(half(bits), value, "{bits:#x}");
        }
        assert!(half(0x7e00).is_nan());
    }

    #[test]
    fn factors_of_eight_bits_have_their_values() {
        for (dtype, bits, value) in [
            (Dtype::F8E4M3, 0x38_u8, 1.0),
            (Dtype::F8E4M3, 0xc0, -2.0),
            (Dtype::F8E5M2, 0x3c, 1.0),
            (Dtype::F8E5M2, 0xc0, -2.0),
        ] {
            assert_eq!(scalar(dtype, (&raw const bits).cast()).unwrap(), value, "{dtype} {bits:#x}");
        }
    }

    #[test]
    fn whole_factors_are_taken_where_they_are_exact() {
        let most = 1_i64 << 53;
        for whole in [0, 2, -3, most, -most] {
            let factor = scalar(Dtype::I64, (&raw const whole).cast()).unwrap();
            assert_eq!(factor, whole as f64);
        }
        for whole in [most + 1, -most - 1, i64::MAX, i64::MIN] {
            let refused = scalar(Dtype::I64, (&raw const whole).cast()).unwrap_err();
            assert!(format!("{refused:?}").contains("from -2^53 to 2^53"), "{refused:?}");
        }
        assert_eq!(scalar(Dtype::U64, (&raw const most).cast()).unwrap(), most as f64);
        let beyond = u64::MAX;
        assert!(scalar(Dtype::U64, (&raw const beyond).cast()).is_err());
    }

    #[test]
    fn sizes_that_no_memory_has_are_refused() {
        let buffer = [0_u8; 8];
        let buffer = buffer.as_ptr().cast();
        assert_eq!(piece(buffer, Dtype::F64, 1, 1).unwrap()[0].bytes, 8);
        for (count, blocks) in [(usize::MAX, 1), (usize::MAX / 8, 2), (1 << 62, 3)] {
            assert!(piece(buffer, Dtype::F64, count, blocks).is_err(), "{count} {blocks}");
        }
        assert!(piece(std::ptr::null(), Dtype::F64, 1, 1).is_err());
    }
}
