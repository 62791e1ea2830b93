//! Errors: how each entry turns what went wrong into a status, and keeps the rest for its thread.

use crate::status::*;
use harmonaize_client::{Error, JoinRefusal, ProtectionError, Rank};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::{Mutex, MutexGuard, TryLockError};

/// No `reason`.
pub const HARMONAIZE_REASON_NONE: u32 = 0;
/// The name is empty, too long, or has control characters.
pub const HARMONAIZE_REASON_NAME: u32 = 1;
/// The rank is not below the number of ranks, or there are no ranks at all.
pub const HARMONAIZE_REASON_RANK: u32 = 2;
/// Another process has this rank.
pub const HARMONAIZE_REASON_TAKEN: u32 = 3;
/// Ranks disagree on how many they are.
pub const HARMONAIZE_REASON_SIZE: u32 = 4;
/// Some ranks never came: `ranks`.
pub const HARMONAIZE_REASON_TIMEOUT: u32 = 5;
/// As many communicators or ranks as the tenant may have.
pub const HARMONAIZE_REASON_QUOTA: u32 = 6;
/// A rank that had come went away before all were there: `ranks`.
pub const HARMONAIZE_REASON_RANK_LOST: u32 = 7;
/// The provider cannot form communicators at the moment.
pub const HARMONAIZE_REASON_UNAVAILABLE: u32 = 8;
/// A bug or broken invariant in the agent.
pub const HARMONAIZE_REASON_INTERNAL: u32 = 9;
/// The budget makes no sense, or ranks name different ones.
pub const HARMONAIZE_REASON_BUDGET: u32 = 10;
/// The communicator to go on from, or to split, is over.
pub const HARMONAIZE_REASON_OVER: u32 = 11;

/// What went wrong in the last call of this thread that failed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_error_t {
    /// What the call answered.
    pub status: harmonaize_status_t,
    /// Why a join, a regroup or a split failed: `HARMONAIZE_REASON_...`.
    pub reason: u32,
    /// For people: what happened, which value, what to do.
    pub text: *const c_char,
    /// Ranks concerned: those that are late, lost or taken, or the one that aborted. NULL where there are none.
    pub ranks: *const u32,
    /// How many those are.
    pub rank_count: usize,
    /// After `HARMONAIZE_ERROR_TOO_OFTEN`: nanoseconds until a question will be answered.
    pub retry_after_ns: u64,
}

/// The last failure of a thread, and what its pointers point to.
struct LastError {
    shown: harmonaize_error_t,
    _text: CString,
    _ranks: Vec<u32>,
}

thread_local! {
    static LAST: RefCell<Option<Box<LastError>>> = const { RefCell::new(None) };
}

/// The last failure of the calling thread; NULL where no call of it has failed. Valid until the thread's next call that
/// fails, or its end.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_last_error() -> *const harmonaize_error_t {
    LAST.with_borrow(|last| last.as_ref().map_or(ptr::null(), |last| &raw const last.shown))
}

/// Why an entry fails.
#[derive(Debug, Default)]
pub(crate) struct Failure {
    pub(crate) status: harmonaize_status_t,
    pub(crate) text: String,
    reason: u32,
    ranks: Vec<u32>,
    retry_after_ns: u64,
}

impl Failure {
    pub(crate) fn new(status: harmonaize_status_t, text: impl Into<String>) -> Self {
        Self { status, text: text.into(), ..Self::default() }
    }

    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self::new(HARMONAIZE_ERROR_INVALID_ARGUMENT, text)
    }

    fn joining(status: harmonaize_status_t, text: String, kind: JoinRefusal, ranks: &[Rank]) -> Self {
        let ranks = ranks.iter().map(|rank| rank.0).collect();
        Self { reason: reason(kind), ranks, ..Self::new(status, text) }
    }

    fn protecting(error: ProtectionError, text: String) -> Self {
        let (status, ranks) = match error {
            ProtectionError::TooFewDomains { .. } => (HARMONAIZE_ERROR_TOO_FEW_DOMAINS, Vec::new()),
            ProtectionError::NothingSealed => (HARMONAIZE_ERROR_NOTHING_SEALED, Vec::new()),
            ProtectionError::TooManyLost { ranks } => (HARMONAIZE_ERROR_TOO_MANY_LOST, ranks),
            ProtectionError::NoRank { .. } | ProtectionError::Changed { .. } => {
                (HARMONAIZE_ERROR_SHAPE, Vec::new())
            }
            ProtectionError::Differ(_) => (HARMONAIZE_ERROR_DIFFER, Vec::new()),
            ProtectionError::Peers { ranks } => (HARMONAIZE_ERROR_PEERS, ranks),
            ProtectionError::Damaged(_) => (HARMONAIZE_ERROR_DAMAGED, Vec::new()),
            ProtectionError::File { .. } => (HARMONAIZE_ERROR_FILE, Vec::new()),
            _ => (HARMONAIZE_ERROR_OTHER, Vec::new()),
        };
        let ranks = ranks.into_iter().map(|rank| rank.0).collect();
        Self { ranks, ..Self::new(status, text) }
    }

    /// Keeps it as the last of this thread.
    fn keep(self) -> harmonaize_status_t {
        let Self { status, mut text, reason, ranks, retry_after_ns } = self;
        text.retain(|letter| letter != '\0');
        let text = CString::new(text).unwrap_or_default();
        let shown = harmonaize_error_t {
            status,
            reason,
            text: text.as_ptr(),
            ranks: if ranks.is_empty() { ptr::null() } else { ranks.as_ptr() },
            rank_count: ranks.len(),
            retry_after_ns,
        };
        let last = Box::new(LastError { shown, _text: text, _ranks: ranks });
        // Not where the thread is ending and has none any more.
        let _ = LAST.try_with(|slot| slot.borrow_mut().replace(last));
        status
    }
}

fn reason(kind: JoinRefusal) -> u32 {
    match kind {
        JoinRefusal::Name => HARMONAIZE_REASON_NAME,
        JoinRefusal::Rank => HARMONAIZE_REASON_RANK,
        JoinRefusal::Taken => HARMONAIZE_REASON_TAKEN,
        JoinRefusal::Size => HARMONAIZE_REASON_SIZE,
        JoinRefusal::Timeout => HARMONAIZE_REASON_TIMEOUT,
        JoinRefusal::Quota => HARMONAIZE_REASON_QUOTA,
        JoinRefusal::RankLost => HARMONAIZE_REASON_RANK_LOST,
        JoinRefusal::Unavailable => HARMONAIZE_REASON_UNAVAILABLE,
        JoinRefusal::Internal => HARMONAIZE_REASON_INTERNAL,
        JoinRefusal::Budget => HARMONAIZE_REASON_BUDGET,
        JoinRefusal::Over => HARMONAIZE_REASON_OVER,
        JoinRefusal::LeftOut => HARMONAIZE_REASON_NONE,
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        let status = match error {
            Error::Join { kind, concerned, .. } => {
                return Self::joining(HARMONAIZE_ERROR_JOIN, text, kind, &concerned);
            }
            Error::Regroup { kind, concerned, .. } => {
                return Self::joining(HARMONAIZE_ERROR_REGROUP, text, kind, &concerned);
            }
            Error::Split { kind, concerned, .. } => {
                return Self::joining(HARMONAIZE_ERROR_SPLIT, text, kind, &concerned);
            }
            Error::Protection(error) => return Self::protecting(error, text),
            Error::Operation { status, detail, .. } => {
                let ranks = detail.map(|detail| detail.ranks).unwrap_or_default();
                let ranks = ranks.into_iter().map(|rank| rank.0).collect();
                return Self { ranks, ..Self::new(OF_AGENT + i32::from(status.code()), text) };
            }
            Error::Aborted { by } => {
                let ranks = by.into_iter().map(|rank| rank.0).collect();
                return Self { ranks, ..Self::new(HARMONAIZE_ERROR_ABORTED, text) };
            }
            Error::TooOften { retry_after } => {
                let retry_after_ns = u64::try_from(retry_after.as_nanos()).unwrap_or(u64::MAX);
                return Self { retry_after_ns, ..Self::new(HARMONAIZE_ERROR_TOO_OFTEN, text) };
            }
            Error::Connect { .. } => HARMONAIZE_ERROR_CONNECT,
            Error::Environment { .. } => HARMONAIZE_ERROR_ENVIRONMENT,
            Error::Refused { .. } => HARMONAIZE_ERROR_REFUSED,
            Error::NoRdma => HARMONAIZE_ERROR_NO_RDMA,
            Error::Protocol(_) => HARMONAIZE_ERROR_PROTOCOL,
            Error::AgentLost { .. } => HARMONAIZE_ERROR_AGENT_LOST,
            Error::Detached { .. } => HARMONAIZE_ERROR_DETACHED,
            Error::Forked => HARMONAIZE_ERROR_FORKED,
            Error::System { .. } => HARMONAIZE_ERROR_SYSTEM,
            Error::OutOfRange { .. } => HARMONAIZE_ERROR_OUT_OF_RANGE,
            Error::Memory(_) => HARMONAIZE_ERROR_MEMORY,
            Error::NoRoom { .. } => HARMONAIZE_ERROR_NO_ROOM,
            Error::Region(_) => HARMONAIZE_ERROR_REGION,
            Error::Dtype { .. } => HARMONAIZE_ERROR_DTYPE,
            Error::Reduction { .. } => HARMONAIZE_ERROR_REDUCTION,
            Error::Shape(_) => HARMONAIZE_ERROR_SHAPE,
            Error::Foreign => HARMONAIZE_ERROR_FOREIGN,
            Error::InUse { .. } => HARMONAIZE_ERROR_IN_USE,
            Error::TooMany { .. } => HARMONAIZE_ERROR_TOO_MANY,
            Error::TimeoutTooLong { .. } => HARMONAIZE_ERROR_TIMEOUT_TOO_LONG,
            Error::Budget(_) => HARMONAIZE_ERROR_BUDGET,
            Error::Events(_) => HARMONAIZE_ERROR_EVENTS,
            Error::Agreement(_) | Error::NoCommunicator(_) => HARMONAIZE_ERROR_AGREEMENT,
            Error::WaitTimeout { .. } => HARMONAIZE_ERROR_WAIT_TIMEOUT,
            Error::GroupOpen => HARMONAIZE_ERROR_GROUP_OPEN,
            Error::GroupEnded => HARMONAIZE_ERROR_GROUP_ENDED,
            _ => HARMONAIZE_ERROR_OTHER,
        };
        Self::new(status, text)
    }
}

/// Runs an entry whose body says the status itself. No panic leaves it.
pub(crate) fn answer(body: impl FnOnce() -> Result<harmonaize_status_t, Failure>) -> harmonaize_status_t {
    // What a panic may leave half done is behind the client's own locks, which treat it as they do in Rust.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status)) => status,
        Ok(Err(failure)) => failure.keep(),
        Err(_) => {
            Failure::new(HARMONAIZE_ERROR_BUG, "a bug of this library; standard error has its message").keep()
        }
    }
}

/// Runs an entry.
pub(crate) fn call(body: impl FnOnce() -> Result<(), Failure>) -> harmonaize_status_t {
    answer(|| body().map(|()| HARMONAIZE_OK))
}

/// Runs an entry that makes a handle. On failure the place has NULL.
pub(crate) fn create<T>(
    place: Option<&mut MaybeUninit<Option<Box<T>>>>,
    make: impl FnOnce() -> Result<T, Failure>,
) -> harmonaize_status_t {
    call(|| {
        let place = result(place)?;
        place.write(None);
        place.write(Some(Box::new(make()?)));
        Ok(())
    })
}

/// Frees a handle. No panic leaves it.
pub(crate) fn free<T>(handle: Option<Box<T>>) {
    let _ = catch_unwind(AssertUnwindSafe(|| drop(handle)));
}

/// A handle that must be there.
pub(crate) fn given<'a, T>(handle: Option<&'a T>, what: &str) -> Result<&'a T, Failure> {
    handle.ok_or_else(|| Failure::argument(format!("NULL where a {what} is needed")))
}

/// What one thread at a time may use, for this one alone.
pub(crate) fn alone<'a, T>(shared: &'a Mutex<T>, used: &str) -> Result<MutexGuard<'a, T>, Failure> {
    match shared.try_lock() {
        Ok(alone) => Ok(alone),
        Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => Err(Failure::new(HARMONAIZE_ERROR_IN_USE, used)),
    }
}

/// The place of a result, which must be there.
pub(crate) fn result<T>(place: Option<&mut MaybeUninit<T>>) -> Result<&mut MaybeUninit<T>, Failure> {
    place.ok_or_else(|| Failure::argument("NULL where the result is to be put"))
}

/// A text that must be there.
///
/// # Safety
/// NULL, or a string with a NUL at its end that stays as it is for `'a`.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a str, Failure> {
    // SAFETY: as the caller has promised.
    unsafe { text_if_any(pointer, what) }?
        .ok_or_else(|| Failure::argument(format!("NULL where {what} is needed")))
}

/// A text, if there is one.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn text_if_any<'a>(pointer: *const c_char, what: &str) -> Result<Option<&'a str>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, and the caller has promised the rest.
    let text = unsafe { CStr::from_ptr(pointer) }.to_str();
    text.map(Some).map_err(|_| Failure::argument(format!("{what} is not UTF-8")))
}

/// So many elements that must be there.
///
/// # Safety
/// `first` is NULL, or so many elements are there that stay as they are for `'a`.
pub(crate) unsafe fn slice<'a, T>(first: *const T, count: usize, what: &str) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if first.is_null()
        || !first.is_aligned()
        || count.checked_mul(size_of::<T>()).is_none_or(|bytes| isize::try_from(bytes).is_err())
    {
        return Err(Failure::argument(format!("no array of {count} {what} can begin at {first:?}")));
    }
    // SAFETY: not NULL, aligned, not too long, and the caller has promised the rest.
    Ok(unsafe { std::slice::from_raw_parts(first, count) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_client::{Called, Direction, Dtype, FailureDetail, OperationId, P2pSignature, Status};

    fn last() -> harmonaize_error_t {
        let last = harmonaize_last_error();
        assert!(!last.is_null());
        // SAFETY: not NULL, and this thread has made no call since.
        unsafe { *last }
    }

    fn shown(error: &harmonaize_error_t) -> (&str, &[u32]) {
        // SAFETY: the last error of this thread, of which no call has failed since.
        let text = unsafe { CStr::from_ptr(error.text) }.to_str().unwrap();
        // SAFETY: as above.
        (text, unsafe { slice(error.ranks, error.rank_count, "ranks") }.unwrap())
    }

    #[test]
    fn a_thread_without_failures_has_no_last_error() {
        assert!(std::thread::spawn(|| harmonaize_last_error().is_null()).join().unwrap());
    }

    #[test]
    fn a_panic_becomes_a_status() {
        assert_eq!(call(|| panic!("on purpose")), HARMONAIZE_ERROR_BUG);
        assert!(shown(&last()).0.contains("a bug of this library"));
    }

    #[test]
    fn failures_name_the_ranks_concerned() {
        let signature = P2pSignature { direction: Direction::Send, peer: None, dtype: Dtype::U8, count: 1 };
        let detail = FailureDetail {
            status: Status::Timeout,
            operation: 3,
            signature: None,
            ranks: vec![Rank(2), Rank(5)],
            calls: Vec::new(),
            text: "no\0call".to_owned(),
        };
        let failed = Error::Operation {
            status: Status::Timeout,
            operation: OperationId(3),
            called: Called::P2p(signature),
            detail: Some(Box::new(detail)),
        };
        assert_eq!(call(|| Err(failed.into())), HARMONAIZE_ERROR_TIMEOUT);
        let error = last();
        let (text, ranks) = shown(&error);
        assert!(text.contains("nocall") && ranks == [2, 5], "{text} {ranks:?}");
        assert_eq!(call(|| Err(Error::Aborted { by: None }.into())), HARMONAIZE_ERROR_ABORTED);
        assert_eq!((last().ranks, last().rank_count), (ptr::null(), 0));
        let refused = Error::Join {
            name: "job".to_owned(),
            rank: Rank(0),
            ranks: 2,
            kind: JoinRefusal::Timeout,
            text: "late".to_owned(),
            concerned: vec![Rank(1)],
        };
        assert_eq!(call(|| Err(refused.into())), HARMONAIZE_ERROR_JOIN);
        assert_eq!((last().reason, shown(&last()).1), (HARMONAIZE_REASON_TIMEOUT, [1].as_slice()));
    }

    #[test]
    fn states_that_are_gone_name_their_ranks() {
        let gone = ProtectionError::TooManyLost { ranks: vec![Rank(3), Rank(4)] };
        assert_eq!(call(|| Err(Error::from(gone).into())), HARMONAIZE_ERROR_TOO_MANY_LOST);
        let error = last();
        let (text, ranks) = shown(&error);
        assert!(text.contains("ranks 3, 4; go on from a checkpoint") && ranks == [3, 4], "{text} {ranks:?}");
        let one = ProtectionError::NoRank { rank: Rank(7), ranks: 2 };
        assert_eq!(call(|| Err(Error::from(one).into())), HARMONAIZE_ERROR_SHAPE);
        assert_eq!(
            call(|| Err(Error::from(ProtectionError::NothingSealed).into())),
            HARMONAIZE_ERROR_NOTHING_SEALED
        );
    }

    #[test]
    fn one_thread_at_a_time_uses_what_is_locked() {
        let shared = Mutex::new(1);
        let first = alone(&shared, "taken").unwrap();
        assert_eq!(alone(&shared, "taken").unwrap_err().status, HARMONAIZE_ERROR_IN_USE);
        drop(first);
        assert_eq!(*alone(&shared, "taken").unwrap(), 1);
    }

    #[test]
    fn a_failed_creation_leaves_null() {
        let mut place = MaybeUninit::new(Some(Box::new(1)));
        // SAFETY: it was given a value.
        drop(unsafe { place.assume_init_mut() }.take());
        assert_eq!(
            create(Some(&mut place), || Err(Failure::argument("no"))),
            HARMONAIZE_ERROR_INVALID_ARGUMENT
        );
        // SAFETY: as above.
        assert!(unsafe { place.assume_init_ref() }.is_none());
        assert_eq!(create::<u8>(None, || Ok(1)), HARMONAIZE_ERROR_INVALID_ARGUMENT);
    }
}
