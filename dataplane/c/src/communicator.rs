//! Communicators: joining, leaving and what changes them.

use crate::client::harmonaize_client_t;
use crate::error::{Failure, call, create, free, given, result, slice, text, text_if_any};
use crate::group::harmonaize_group_t;
use crate::options::{SizeFirst, duration, read};
use crate::status::harmonaize_status_t;
use harmonaize_client::{
    Budget, Communicator, Error, JoinOptions, OperationOptions, ProtocolError, Rank, RegroupOptions,
};
use std::ffi::{CString, c_char};
use std::mem::MaybeUninit;
use std::time::Duration;

/// No rank: of a newcomer before a regroup, of an operation without another end.
pub const HARMONAIZE_NO_RANK: u32 = u32::MAX;
/// No color: the rank is in no communicator that comes of a split.
pub const HARMONAIZE_NO_COLOR: u32 = u32::MAX;

/// A member's view of a communicator. All ranks call the same collectives in the same order. Any thread may use it, at the
/// same time as others; threads that call side by side need an order among themselves that is the same at all ranks. Left
/// when it, all that were made `with` options or a group, and its operations are freed.
pub struct harmonaize_communicator_t {
    pub(crate) communicator: Communicator,
    name: CString,
}

impl harmonaize_communicator_t {
    fn new(communicator: Communicator) -> Result<Self, Failure> {
        let name = CString::new(communicator.name());
        let name = name.map_err(|_| Error::Protocol(ProtocolError::Name))?;
        Ok(Self { communicator, name })
    }
}

/// How to join. What is 0 or NULL is as usual.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_join_options_t {
    /// `sizeof` of this structure.
    pub size: usize,
    /// The job: communicators of two of the tenant's jobs never meet, though they are named alike. As usual there is none.
    pub job: *const c_char,
    /// What may be lost of tensors, the same at all ranks: "exact" as usual, "bf16", "vnmse=0.01", or names of codecs
    /// separated by commas.
    pub budget: *const c_char,
    /// Nanoseconds to wait for the other ranks; 60 s as usual.
    pub timeout_ns: u64,
    /// Nanoseconds that operations wait for late ranks; 10 min as usual, or as long as the operator allows.
    pub operation_timeout_ns: u64,
}

/// How to go on with other ranks. What is 0 or NULL is as usual.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_regroup_options_t {
    /// `sizeof` of this structure.
    pub size: usize,
    /// Nanoseconds to wait for members that neither come nor go; 60 s as usual.
    pub timeout_ns: u64,
    /// Nanoseconds that operations wait for late ranks; of a member as before, as usual.
    pub operation_timeout_ns: u64,
    /// New ranks ascend by this; as usual by the ranks before, and newcomers come last.
    pub key: *const u32,
    /// Fewest ranks to go on with; 1 as usual.
    pub min_ranks: u32,
}

/// What a rank says of an operation beside what it computes. What is 0 or NULL is as usual. Ranks need not say the same.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_operation_options_t {
    /// `sizeof` of this structure.
    pub size: usize,
    /// Nanoseconds that it waits for late ranks; as the join said, as usual.
    pub timeout_ns: u64,
    /// Wanted nanoseconds from call to end; none are wanted, as usual. The earliest goes first among equals of class and priority.
    pub deadline_ns: u64,
    /// The step of the job that it belongs to, from 1; 0 is unknown. Of equals the oldest goes first.
    pub iteration: u64,
    /// What `HARMONAIZE_PREMUL_SUM` multiplies this rank's input by; 1 as usual.
    pub factor: *const f64,
    /// Within its class, operations of a higher priority go first. 0 is the usual.
    pub priority: u8,
    /// Class among the tenant's operations: 1 latency, 2 normal, 3 bulk, 4 background; else by its size.
    pub tensor_class: u8,
}

// SAFETY: integers and pointers, of which the first is the size.
unsafe impl SizeFirst for harmonaize_join_options_t {}
// SAFETY: as above.
unsafe impl SizeFirst for harmonaize_regroup_options_t {}
// SAFETY: as above.
unsafe impl SizeFirst for harmonaize_operation_options_t {}

/// A value behind a pointer, if there is one.
///
/// # Safety
/// `pointer` is NULL, or points to a value.
pub(crate) unsafe fn value<T: Copy>(pointer: *const T, what: &str) -> Result<Option<T>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: as the caller has promised.
    Ok(unsafe { slice(pointer, 1, what) }?.first().copied())
}

/// A budget from its text.
pub(crate) fn budget(text: &str) -> Result<Budget, Failure> {
    text.parse().map_err(Failure::argument)
}

/// What a caller gives as to how to regroup.
///
/// # Safety
/// `given` is NULL, or points to options with the size that they have, whose pointers point to what they should.
unsafe fn regrouping(given: *const harmonaize_regroup_options_t) -> Result<RegroupOptions, Failure> {
    // SAFETY: as the caller has promised.
    let options = unsafe { read(given) }?;
    // SAFETY: as above.
    let key = unsafe { value(options.key, "key") }?;
    let usual = RegroupOptions::default();
    Ok(RegroupOptions {
        timeout: duration(options.timeout_ns).unwrap_or(usual.timeout),
        min_ranks: options.min_ranks.max(usual.min_ranks),
        key,
        operation_timeout: duration(options.operation_timeout_ns),
    })
}

/// Becomes `rank` of the communicator `name`, of `ranks` ranks. Without options everything is as usual. Blocks until all
/// have come, or fails after the time-out with the ranks that never came.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_join(
    client: Option<&harmonaize_client_t>,
    name: *const c_char,
    rank: u32,
    ranks: u32,
    options: *const harmonaize_join_options_t,
    communicator: Option<&mut MaybeUninit<Option<Box<harmonaize_communicator_t>>>>,
) -> harmonaize_status_t {
    create(communicator, || {
        let client = &given(client, "client")?.0;
        // SAFETY: the caller gives a name with a NUL at its end.
        let name = unsafe { text(name, "the communicator's name") }?;
        // SAFETY: the caller gives options with the size that they have, or none.
        let options = unsafe { read(options) }?;
        // SAFETY: the texts of options have a NUL at their end, or are not there.
        let (job, wanted) =
            unsafe { (text_if_any(options.job, "the job")?, text_if_any(options.budget, "the budget")?) };
        let usual = JoinOptions::default();
        let options = JoinOptions {
            timeout: duration(options.timeout_ns).unwrap_or(usual.timeout),
            budget: wanted.map_or(Ok(usual.budget), budget)?,
            job: job.unwrap_or_default().to_owned(),
            operation_timeout: duration(options.operation_timeout_ns),
        };
        harmonaize_communicator_t::new(client.join_with(name, Rank(rank), ranks, &options)?)
    })
}

/// Becomes a rank of the communicator `name` that runs already: blocks until its members regroup.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_enter(
    client: Option<&harmonaize_client_t>,
    name: *const c_char,
    options: *const harmonaize_regroup_options_t,
    communicator: Option<&mut MaybeUninit<Option<Box<harmonaize_communicator_t>>>>,
) -> harmonaize_status_t {
    create(communicator, || {
        let client = &given(client, "client")?.0;
        // SAFETY: the caller gives a name with a NUL at its end.
        let name = unsafe { text(name, "the communicator's name") }?;
        // SAFETY: the caller gives options with the size that they have, or none.
        let options = unsafe { regrouping(options) }?;
        harmonaize_communicator_t::new(client.enter(name, &options)?)
    })
}

/// Goes on without ranks that are gone, and with processes that wait to be taken in, as a new communicator of the same name.
/// Every member that stays calls it, at the same place in the order of operations. The one before is to be freed then.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_regroup(
    communicator: Option<&harmonaize_communicator_t>,
    options: *const harmonaize_regroup_options_t,
    regrouped: Option<&mut MaybeUninit<Option<Box<harmonaize_communicator_t>>>>,
) -> harmonaize_status_t {
    create(regrouped, || {
        let before = &given(communicator, "communicator")?.communicator;
        // SAFETY: the caller gives options with the size that they have, or none.
        let options = unsafe { regrouping(options) }?;
        harmonaize_communicator_t::new(before.regroup(&options)?)
    })
}

/// Splits a communicator, which goes on: ranks that name the same color become one of their own, ordered by `key` and then by
/// their ranks here. Every rank calls it, at the same place in the order of its splits. With `HARMONAIZE_NO_COLOR` the answer
/// is `HARMONAIZE_OK` and the result NULL. Blocks until all have called, or fails after the least time-out.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_split(
    communicator: Option<&harmonaize_communicator_t>,
    color: u32,
    key: u32,
    timeout_ns: u64,
    part: Option<&mut MaybeUninit<Option<Box<harmonaize_communicator_t>>>>,
) -> harmonaize_status_t {
    call(|| {
        let place = result(part)?;
        place.write(None);
        let whole = &given(communicator, "communicator")?.communicator;
        let color = (color != HARMONAIZE_NO_COLOR).then_some(color);
        if let Some(part) = whole.split(color, key, Duration::from_nanos(timeout_ns))? {
            place.write(Some(Box::new(harmonaize_communicator_t::new(part)?)));
        }
        Ok(())
    })
}

/// Makes a handle of the same membership whose operations have these options. It is freed as any other.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_with(
    communicator: Option<&harmonaize_communicator_t>,
    options: *const harmonaize_operation_options_t,
    with: Option<&mut MaybeUninit<Option<Box<harmonaize_communicator_t>>>>,
) -> harmonaize_status_t {
    create(with, || {
        let own = given(communicator, "communicator")?;
        // SAFETY: the caller gives options with the size that they have, or none.
        let options = unsafe { read(options) }?;
        // SAFETY: the caller gives a pointer to a factor, or none.
        let factor = unsafe { value(options.factor, "factor") }?;
        let options = OperationOptions {
            timeout: duration(options.timeout_ns),
            priority: options.priority,
            class: options.tensor_class,
            deadline: duration(options.deadline_ns),
            iteration: options.iteration,
            factor,
            ..OperationOptions::default()
        };
        harmonaize_communicator_t::new(own.communicator.with(options)?)
    })
}

/// Makes a handle of the same membership whose calls go into a group. It is freed as any other.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_grouped(
    communicator: Option<&harmonaize_communicator_t>,
    group: Option<&harmonaize_group_t>,
    grouped: Option<&mut MaybeUninit<Option<Box<harmonaize_communicator_t>>>>,
) -> harmonaize_status_t {
    create(grouped, || {
        let own = &given(communicator, "communicator")?.communicator;
        harmonaize_communicator_t::new(given(group, "group")?.grouped(own)?)
    })
}

/// Says which rank this process is.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_rank(
    communicator: Option<&harmonaize_communicator_t>,
    rank: Option<&mut MaybeUninit<u32>>,
) -> harmonaize_status_t {
    call(|| {
        result(rank)?.write(given(communicator, "communicator")?.communicator.rank().0);
        Ok(())
    })
}

/// Says how many ranks there are.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_ranks(
    communicator: Option<&harmonaize_communicator_t>,
    ranks: Option<&mut MaybeUninit<u32>>,
) -> harmonaize_status_t {
    call(|| {
        result(ranks)?.write(given(communicator, "communicator")?.communicator.ranks());
        Ok(())
    })
}

/// Says what it is called in calls and events that name a communicator. The text is the handle's, and there until that is freed.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_name(
    communicator: Option<&harmonaize_communicator_t>,
    name: Option<&mut MaybeUninit<*const c_char>>,
) -> harmonaize_status_t {
    call(|| {
        result(name)?.write(given(communicator, "communicator")?.name.as_ptr());
        Ok(())
    })
}

/// Says, of a communicator that goes on from another, which rank a rank was there; `HARMONAIZE_NO_RANK` of a newcomer, and where
/// it does not go on from another.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_rank_before(
    communicator: Option<&harmonaize_communicator_t>,
    rank: u32,
    before: Option<&mut MaybeUninit<u32>>,
) -> harmonaize_status_t {
    call(|| {
        let place = result(before)?;
        let communicator = &given(communicator, "communicator")?.communicator;
        if rank >= communicator.ranks() {
            return Err(Failure::argument(format!("rank {rank} of {}; there is none", communicator.ranks())));
        }
        let found = usize::try_from(rank).ok().and_then(|rank| *communicator.before().get(rank)?);
        place.write(found.map_or(HARMONAIZE_NO_RANK, |Rank(rank)| rank));
        Ok(())
    })
}

/// Wants another budget from now on, as text as when joining. It is in effect once all ranks have asked for the same.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_set_budget(
    communicator: Option<&harmonaize_communicator_t>,
    budget: *const c_char,
) -> harmonaize_status_t {
    call(|| {
        let communicator = &given(communicator, "communicator")?.communicator;
        // SAFETY: the caller gives a text with a NUL at its end.
        let text = unsafe { text(budget, "the budget") }?;
        Ok(communicator.set_budget(&self::budget(text)?)?)
    })
}

/// Ends a communicator at all ranks, from any thread. Whoever waits for one of its operations has `HARMONAIZE_ERROR_ABORTED` at
/// once in this process, and within a second in others.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_abort(communicator: Option<&harmonaize_communicator_t>) -> harmonaize_status_t {
    call(|| {
        given(communicator, "communicator")?.communicator.abort();
        Ok(())
    })
}

/// Frees a communicator, which may leave it. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_communicator_free(communicator: Option<Box<harmonaize_communicator_t>>) {
    free(communicator);
}
