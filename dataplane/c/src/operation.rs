//! Operations in flight: waiting, polling, and what one cost.

use crate::communicator::HARMONAIZE_NO_RANK;
use crate::error::{Failure, alone, answer, call, free, given, result, slice};
use crate::status::{HARMONAIZE_IN_PROGRESS, HARMONAIZE_OK, harmonaize_status_t};
use harmonaize_client::{Algorithm, Operation, Rank, Receipt};
use std::ffi::c_char;
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// Nothing had to be done.
pub const HARMONAIZE_ALGORITHM_NONE: u32 = 0;
/// Within one host.
pub const HARMONAIZE_ALGORITHM_WITHIN_HOST: u32 = 1;
/// A ring of hosts.
pub const HARMONAIZE_ALGORITHM_RING: u32 = 2;
/// Pairs of hosts.
pub const HARMONAIZE_ALGORITHM_PAIRWISE: u32 = 3;
/// A chain of hosts.
pub const HARMONAIZE_ALGORITHM_CHAIN: u32 = 4;
/// Dissemination among hosts.
pub const HARMONAIZE_ALGORITHM_DISSEMINATION: u32 = 5;
/// Direct exchange among hosts, in fewer bits than the tensor has.
pub const HARMONAIZE_ALGORITHM_DIRECT_CODED: u32 = 6;
/// Direct exchange among hosts: everything from each to all.
pub const HARMONAIZE_ALGORITHM_ONE_SHOT: u32 = 7;
/// Direct exchange among hosts: from each to who adds a part up, and from there to all.
pub const HARMONAIZE_ALGORITHM_TWO_SHOT: u32 = 8;
/// Sums by an aggregator on the way.
pub const HARMONAIZE_ALGORITHM_AGGREGATED: u32 = 9;

/// Bytes of a codec's name, with the NUL at its end.
pub const HARMONAIZE_CODEC_BYTES: usize = 24;

/// A collective, a send or a receive in flight. Any thread may use it, one at a time: while one waits, others are answered
/// `HARMONAIZE_ERROR_IN_USE`. Freed before its end, it goes on, and its tensors' memory stays taken until then.
pub struct harmonaize_operation_t(Mutex<Operation>);

/// What an operation that succeeded cost.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_receipt_t {
    /// Number of the operation on its communicator, from 0; of a send or a receive, that of the message between the two ranks.
    pub operation: u64,
    /// Tensor bytes that this rank's host sent.
    pub wire_bytes: u64,
    /// Bits on the wire per element; 0 where nothing was sent.
    pub bits_per_element: f64,
    /// Error (vNMSE) that the sum has at most; 0 where nothing was compressed.
    pub error: f32,
    /// Error (vNMSE) that encoders measured.
    pub measured_error: f32,
    /// Of a send or a receive: the rank at the other end. Else `HARMONAIZE_NO_RANK`.
    pub peer: u32,
    /// Which kind of algorithm ran: `HARMONAIZE_ALGORITHM_...`, or a number that this version has no name for.
    pub algorithm: u32,
    /// 1 where part of it was run another way than planned, else 0.
    pub fallback: u32,
    /// In which codec the tensor travelled, such as "exact".
    pub codec: [c_char; HARMONAIZE_CODEC_BYTES],
}

fn number(algorithm: Algorithm) -> u32 {
    match algorithm {
        Algorithm::None => HARMONAIZE_ALGORITHM_NONE,
        Algorithm::WithinHost => HARMONAIZE_ALGORITHM_WITHIN_HOST,
        Algorithm::Ring => HARMONAIZE_ALGORITHM_RING,
        Algorithm::Pairwise => HARMONAIZE_ALGORITHM_PAIRWISE,
        Algorithm::Chain => HARMONAIZE_ALGORITHM_CHAIN,
        Algorithm::Dissemination => HARMONAIZE_ALGORITHM_DISSEMINATION,
        Algorithm::DirectCoded => HARMONAIZE_ALGORITHM_DIRECT_CODED,
        Algorithm::OneShot => HARMONAIZE_ALGORITHM_ONE_SHOT,
        Algorithm::TwoShot => HARMONAIZE_ALGORITHM_TWO_SHOT,
        Algorithm::Aggregated => HARMONAIZE_ALGORITHM_AGGREGATED,
        Algorithm::Other(other) => other.into(),
        _ => u32::MAX,
    }
}

/// A text in an array of C, cut to what it holds with a NUL at its end.
pub(crate) fn cut<const BYTES: usize>(text: &str) -> [c_char; BYTES] {
    let mut array = [0; BYTES];
    let room = BYTES.saturating_sub(1);
    for (to, from) in array.iter_mut().take(room).zip(text.bytes()) {
        *to = c_char::from_ne_bytes([from]);
    }
    array
}

impl From<Receipt> for harmonaize_receipt_t {
    fn from(receipt: Receipt) -> Self {
        Self {
            operation: receipt.operation.0,
            wire_bytes: receipt.wire_bytes,
            bits_per_element: receipt.bits_per_element,
            error: receipt.error,
            measured_error: receipt.measured_error,
            peer: receipt.peer.map_or(HARMONAIZE_NO_RANK, |Rank(rank)| rank),
            algorithm: number(receipt.algorithm),
            fallback: receipt.fallback.into(),
            codec: cut(receipt.codec),
        }
    }
}

impl harmonaize_operation_t {
    pub(crate) fn new(operation: Operation) -> Self {
        Self(Mutex::new(operation))
    }

    /// The operation, for this thread alone.
    fn alone(&self) -> Result<MutexGuard<'_, Operation>, Failure> {
        alone(&self.0, "another thread waits for this operation, or it was named twice")
    }
}

fn put(receipt: Receipt, place: Option<&mut MaybeUninit<harmonaize_receipt_t>>) {
    if let Some(place) = place {
        place.write(receipt.into());
    }
}

/// Waits for an operation's end, at most so long. After `HARMONAIZE_ERROR_WAIT_TIMEOUT` it is still in flight and can be
/// waited for again; after the end every call gives the same result. The receipt may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_wait(
    operation: Option<&harmonaize_operation_t>,
    timeout_ns: u64,
    receipt: Option<&mut MaybeUninit<harmonaize_receipt_t>>,
) -> harmonaize_status_t {
    call(|| {
        put(given(operation, "operation")?.alone()?.wait(Duration::from_nanos(timeout_ns))?, receipt);
        Ok(())
    })
}

/// Says at once whether an operation has ended: `HARMONAIZE_OK` where it has succeeded, `HARMONAIZE_IN_PROGRESS` where it is in
/// flight. The receipt may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_test(
    operation: Option<&harmonaize_operation_t>,
    receipt: Option<&mut MaybeUninit<harmonaize_receipt_t>>,
) -> harmonaize_status_t {
    answer(|| {
        let Some(ended) = given(operation, "operation")?.alone()?.poll()? else {
            return Ok(HARMONAIZE_IN_PROGRESS);
        };
        put(ended, receipt);
        Ok(HARMONAIZE_OK)
    })
}

/// Waits until one of several operations of one attachment has ended, at most so long, and says which by its place. One that
/// has ended before is found at once, so put NULL at its place, which is passed over. `harmonaize_wait` then gives its result.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_wait_any(
    operations: *const *mut harmonaize_operation_t,
    count: usize,
    timeout_ns: u64,
    ended: Option<&mut MaybeUninit<usize>>,
) -> harmonaize_status_t {
    call(|| {
        let place = result(ended)?;
        // SAFETY: the caller gives so many handles, each NULL or one that it does not free during the call.
        let handles =
            unsafe { slice(operations.cast::<Option<&harmonaize_operation_t>>(), count, "operations") }?;
        let given = (0..).zip(handles).filter_map(|(at, handle): (usize, _)| Some((at, handle.as_ref()?)));
        let guards =
            given.map(|(at, handle)| Ok((at, handle.alone()?))).collect::<Result<Vec<_>, Failure>>()?;
        let mut waited: Vec<&Operation> = guards.iter().map(|(_, guard)| &**guard).collect();
        let first = Operation::wait_any(&mut waited, Duration::from_nanos(timeout_ns))?;
        let at = guards.get(first).map(|(at, _)| *at);
        place.write(at.ok_or_else(|| Failure::argument("no operation at the place that ended"))?);
        Ok(())
    })
}

/// Frees an operation. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_operation_free(operation: Option<Box<harmonaize_operation_t>>) {
    free(operation);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_to_their_array() {
        let bytes = |text: &str| cut::<4>(text).map(|letter| letter.to_ne_bytes()[0]);
        assert_eq!((&bytes(""), &bytes("ab"), &bytes("abcdef")), (b"\0\0\0\0", b"ab\0\0", b"abc\0"));
    }

    #[test]
    fn no_operations_cannot_be_waited_for() {
        let mut place = MaybeUninit::uninit();
        let status = harmonaize_wait_any(std::ptr::null(), 0, 0, Some(&mut place));
        assert_eq!(status, crate::status::HARMONAIZE_ERROR_SHAPE);
        let none = [std::ptr::null_mut(); 2];
        assert_eq!(
            harmonaize_wait_any(none.as_ptr(), 2, 0, Some(&mut place)),
            crate::status::HARMONAIZE_ERROR_SHAPE
        );
        let status = harmonaize_wait_any(std::ptr::null(), 2, 0, Some(&mut place));
        assert_eq!(status, crate::status::HARMONAIZE_ERROR_INVALID_ARGUMENT);
    }
}
