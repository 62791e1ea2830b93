//! State that outlives the loss of ranks: snapshots of tensors, and replicas of these at other ranks.

use crate::communicator::{harmonaize_communicator_t, value};
use crate::error::{Failure, alone, answer, call, create, free, given, result, slice, text};
use crate::options::{SizeFirst, duration, read};
use crate::status::{HARMONAIZE_IN_PROGRESS, HARMONAIZE_OK, harmonaize_status_t};
use crate::tensor::{harmonaize_dtype_t, harmonaize_tensor_t};
use harmonaize_client::{ProtectOptions, Protection, Rank, RankState, Restored};
use std::ffi::{CString, c_char};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// No step: none is known to be whole at all ranks.
pub const HARMONAIZE_NO_STEP: u64 = u64::MAX;

/// Tensors whose contents survive the loss of ranks. Any thread may use it, one at a time: while one seals, waits, writes or
/// restores, others are answered `HARMONAIZE_ERROR_IN_USE`. The tensors' own handles may be freed before it; their memory
/// stays taken until then.
pub struct harmonaize_protection_t(Mutex<Protection>);

/// What came of a restore: a step, who is lost, and states of ranks. Any thread may use it, at the same time as others. The
/// states take room in the arena until it is freed.
pub struct harmonaize_restored_t {
    restored: Restored,
    lost: Vec<u32>,
    /// By state, its tensors.
    tensors: Vec<Vec<Stored>>,
}

/// A tensor of a state.
struct Stored {
    name: CString,
    dtype: harmonaize_dtype_t,
    elements: u64,
}

/// A tensor to protect.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_named_tensor_t {
    /// Its name, which no other of this rank has.
    pub name: *const c_char,
    /// The tensor, of any type but `HARMONAIZE_COMPLEX128`.
    pub tensor: *const harmonaize_tensor_t,
}

/// How to protect. What is 0 or NULL is as usual.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_protect_options_t {
    /// `sizeof` of this structure.
    pub size: usize,
    /// The failure domain: ranks that say the same are lost together. As usual it is this machine. Virtual machines on one host
    /// have one each; name their host, rack or zone here.
    pub domain: *const u64,
    /// Nanoseconds to wait for the other ranks to call; 60 s as usual.
    pub timeout_ns: u64,
    /// How many other ranks store this rank's state, the same at all ranks; 1 as usual.
    pub replicas: u32,
}

// SAFETY: integers and a pointer, of which the first is the size.
unsafe impl SizeFirst for harmonaize_protect_options_t {}

/// A tensor of a state that was restored.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_restored_tensor_t {
    /// Its name. The text is the handle's, and there until that is freed.
    pub name: *const c_char,
    /// How many elements it has.
    pub elements: u64,
    /// Of which type.
    pub dtype: harmonaize_dtype_t,
}

impl harmonaize_protection_t {
    /// The protection, for this thread alone.
    fn alone(&self) -> Result<MutexGuard<'_, Protection>, Failure> {
        alone(&self.0, "another thread uses this protection")
    }
}

impl harmonaize_restored_t {
    fn new(restored: Restored) -> Self {
        let lost = restored.lost.iter().map(|rank| rank.0).collect();
        let tensors = restored.states.iter().map(|state| state.tensors().map(Stored::new).collect());
        Self { lost, tensors: tensors.collect(), restored }
    }

    fn state(&self, index: usize) -> Result<&RankState, Failure> {
        self.restored.states.get(index).ok_or_else(|| self.no_state(index))
    }

    fn tensors(&self, state: usize) -> Result<&[Stored], Failure> {
        self.tensors.get(state).map(Vec::as_slice).ok_or_else(|| self.no_state(state))
    }

    fn no_state(&self, index: usize) -> Failure {
        Failure::argument(format!("state {index} of {}; there is none", self.restored.states.len()))
    }
}

impl Stored {
    fn new((name, dtype, elements): (&str, harmonaize_client::Dtype, u64)) -> Self {
        // A rank in another language may have given a NUL.
        let name = CString::new(name.replace('\0', "")).unwrap_or_default();
        Self { name, dtype: dtype.code().into(), elements }
    }
}

/// The ranks that a caller names.
///
/// # Safety
/// `of` is NULL, or so many ranks are there.
unsafe fn named(of: *const u32, count: usize) -> Result<Vec<Rank>, Failure> {
    // SAFETY: as the caller has promised.
    Ok(unsafe { slice(of, count, "ranks") }?.iter().copied().map(Rank).collect())
}

/// Protects what these tensors hold at each step that is sealed: agents send snapshots of them to other ranks. Every rank calls
/// it, at the same place in the order of its splits, with as many tensors as it likes. Takes one of the job's communicators,
/// and `2 * (1 + replicas)` times the tensors' bytes of the arena. Blocks until all have called.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_protect(
    communicator: Option<&harmonaize_communicator_t>,
    tensors: *const harmonaize_named_tensor_t,
    count: usize,
    options: *const harmonaize_protect_options_t,
    protection: Option<&mut MaybeUninit<Option<Box<harmonaize_protection_t>>>>,
) -> harmonaize_status_t {
    create(protection, || {
        let communicator = &given(communicator, "communicator")?.communicator;
        // SAFETY: the caller gives so many.
        let tensors = unsafe { slice(tensors, count, "tensors") }?;
        let named = |one: &harmonaize_named_tensor_t| {
            // SAFETY: the caller gives a name with a NUL at its end, and a handle that it does not free during the call, or NULL.
            let (name, tensor) = unsafe { (text(one.name, "a tensor's name")?, one.tensor.as_ref()) };
            Ok((name, &given(tensor, "tensor")?.0))
        };
        let tensors = tensors.iter().map(named).collect::<Result<Vec<_>, Failure>>()?;
        // SAFETY: the caller gives options with the size that they have, or none.
        let options = unsafe { read(options) }?;
        // SAFETY: the caller gives a pointer to a domain, or none.
        let domain = unsafe { value(options.domain, "domain") }?;
        let usual = ProtectOptions::default();
        let options = ProtectOptions {
            replicas: if options.replicas == 0 { usual.replicas } else { options.replicas },
            domain,
            timeout: duration(options.timeout_ns).unwrap_or(usual.timeout),
            shapes: usual.shapes,
        };
        Ok(harmonaize_protection_t(Mutex::new(communicator.protect(&tensors, &options)?)))
    })
}

/// Seals a step: copies the tensors, and begins to send the copy to the ranks that store replicas. All ranks call it, with the
/// same step, larger than all before. The tensors may be written again when it returns. `HARMONAIZE_IN_PROGRESS`, at all ranks
/// alike: the step is not sealed, since the copy or replicas of the one before are still on their way; nobody waits here.
/// `HARMONAIZE_OK` also says that all ranks have the step before whole, with its replicas.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_seal(
    protection: Option<&harmonaize_protection_t>,
    step: u64,
) -> harmonaize_status_t {
    answer(|| {
        let sealed = given(protection, "protection")?.alone()?.seal(step)?;
        Ok(if sealed { HARMONAIZE_OK } else { HARMONAIZE_IN_PROGRESS })
    })
}

/// Begins to seal a step, as `harmonaize_seal`; the agent copies the tensors while the job computes. They may be read meanwhile, and
/// written again once `harmonaize_end_seal` has returned. The agent has up to a quarter as many tensors in hand as the attachment
/// has entries, two for each; those beyond are copied by `harmonaize_end_seal`. Where the attachment is not mapped, this call copies
/// all.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_begin_seal(
    protection: Option<&harmonaize_protection_t>,
    step: u64,
) -> harmonaize_status_t {
    answer(|| {
        let sealed = given(protection, "protection")?.alone()?.begin_seal(step)?;
        Ok(if sealed { HARMONAIZE_OK } else { HARMONAIZE_IN_PROGRESS })
    })
}

/// Waits until the tensors are copied that `harmonaize_begin_seal` has begun with, at most so long, and begins to send replicas.
/// After `HARMONAIZE_ERROR_WAIT_TIMEOUT` the agent goes on: the tensors must not be written, and it can be waited for again.
/// Without such a call before, it does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_end_seal(
    protection: Option<&harmonaize_protection_t>,
    timeout_ns: u64,
) -> harmonaize_status_t {
    call(|| Ok(given(protection, "protection")?.alone()?.end_seal(Duration::from_nanos(timeout_ns))?))
}

/// Waits until the replicas of the last sealed step are at their ranks, and those that this rank stores are here, at most so
/// long. After `HARMONAIZE_ERROR_WAIT_TIMEOUT` they go on and can be waited for again.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_protection_wait(
    protection: Option<&harmonaize_protection_t>,
    timeout_ns: u64,
) -> harmonaize_status_t {
    call(|| Ok(given(protection, "protection")?.alone()?.wait(Duration::from_nanos(timeout_ns))?))
}

/// Says the newest step of which this rank knows that all have it whole, with its replicas; `HARMONAIZE_NO_STEP` where there is
/// none. From then on a restore goes back no further, however ranks are lost in up to as many failure domains as replicas.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_committed(
    protection: Option<&harmonaize_protection_t>,
    step: Option<&mut MaybeUninit<u64>>,
) -> harmonaize_status_t {
    call(|| {
        let committed = given(protection, "protection")?.alone()?.committed();
        result(step)?.write(committed.unwrap_or(HARMONAIZE_NO_STEP));
        Ok(())
    })
}

/// Writes this rank's last sealed state to a file of safetensors, and says which step that is; `step` may be NULL. The file is
/// on disk as a whole then, or was not touched. Tensors have one dimension there; the metadata has `rank` and `step`.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_write_safetensors(
    protection: Option<&harmonaize_protection_t>,
    path: *const c_char,
    step: Option<&mut MaybeUninit<u64>>,
) -> harmonaize_status_t {
    call(|| {
        // SAFETY: the caller gives a path with a NUL at its end.
        let path = unsafe { text(path, "a path") }?;
        let written = given(protection, "protection")?.alone()?.write_safetensors(path)?;
        if let Some(step) = step {
            step.write(written);
        }
        Ok(())
    })
}

/// Goes back to the newest step that is whole of all ranks that were protected, those that are lost included: this rank's
/// tensors are as they were then. The states of so many other ranks come beside, by their ranks of then. Every rank of `next`,
/// which comes of `harmonaize_regroup`, calls it, or `harmonaize_restore_newcomer`. After an error of another rank that is
/// lost, regroup and restore again. To seal further steps, protect on `next`.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_restore(
    protection: Option<&harmonaize_protection_t>,
    next: Option<&harmonaize_communicator_t>,
    of: *const u32,
    count: usize,
    restored: Option<&mut MaybeUninit<Option<Box<harmonaize_restored_t>>>>,
) -> harmonaize_status_t {
    create(restored, || {
        let next = &given(next, "communicator")?.communicator;
        // SAFETY: the caller gives so many ranks.
        let of = unsafe { named(of, count) }?;
        Ok(harmonaize_restored_t::new(given(protection, "protection")?.alone()?.restore(next, &of)?))
    })
}

/// Takes part in a restore as a newcomer, which has no state of its own, while the others call `harmonaize_restore`. The states
/// of so many ranks come, by their ranks of then.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_restore_newcomer(
    communicator: Option<&harmonaize_communicator_t>,
    of: *const u32,
    count: usize,
    restored: Option<&mut MaybeUninit<Option<Box<harmonaize_restored_t>>>>,
) -> harmonaize_status_t {
    create(restored, || {
        let communicator = &given(communicator, "communicator")?.communicator;
        // SAFETY: the caller gives so many ranks.
        let of = unsafe { named(of, count) }?;
        Ok(harmonaize_restored_t::new(communicator.restore_newcomer(&of)?))
    })
}

/// Frees a protection. What it has stored of others is gone with it. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_protection_free(protection: Option<Box<harmonaize_protection_t>>) {
    free(protection);
}

/// Says which step all states are of.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_restored_step(
    restored: Option<&harmonaize_restored_t>,
    step: Option<&mut MaybeUninit<u64>>,
) -> harmonaize_status_t {
    call(|| {
        result(step)?.write(given(restored, "result of a restore")?.restored.step);
        Ok(())
    })
}

/// Says which ranks, as they were when they were protected, take no part any more, and how many. NULL where there are none. The
/// array is the handle's, and there until that is freed.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_restored_lost(
    restored: Option<&harmonaize_restored_t>,
    ranks: Option<&mut MaybeUninit<*const u32>>,
    count: Option<&mut MaybeUninit<usize>>,
) -> harmonaize_status_t {
    call(|| {
        let (ranks, count) = (result(ranks)?, result(count)?);
        let lost = &given(restored, "result of a restore")?.lost;
        ranks.write(if lost.is_empty() { ptr::null() } else { lost.as_ptr() });
        count.write(lost.len());
        Ok(())
    })
}

/// Says how many tensors a state has. States are counted from 0, in the order in which the restore named their ranks.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_restored_tensors(
    restored: Option<&harmonaize_restored_t>,
    state: usize,
    count: Option<&mut MaybeUninit<usize>>,
) -> harmonaize_status_t {
    call(|| {
        result(count)?.write(given(restored, "result of a restore")?.tensors(state)?.len());
        Ok(())
    })
}

/// Gives name, type and size of a state's tensor. They are in the order of their names.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_restored_tensor(
    restored: Option<&harmonaize_restored_t>,
    state: usize,
    index: usize,
    tensor: Option<&mut MaybeUninit<harmonaize_restored_tensor_t>>,
) -> harmonaize_status_t {
    call(|| {
        let place = result(tensor)?;
        let tensors = given(restored, "result of a restore")?.tensors(state)?;
        let none = || Failure::argument(format!("tensor {index} of {}; there is none", tensors.len()));
        let Stored { name, dtype, elements } = tensors.get(index).ok_or_else(none)?;
        place.write(harmonaize_restored_tensor_t { name: name.as_ptr(), elements: *elements, dtype: *dtype });
        Ok(())
    })
}

/// Copies a tensor of a state, by its name, into one of the same type and number of elements.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_restored_read(
    restored: Option<&harmonaize_restored_t>,
    state: usize,
    name: *const c_char,
    into: Option<&harmonaize_tensor_t>,
) -> harmonaize_status_t {
    call(|| {
        let state = given(restored, "result of a restore")?.state(state)?;
        // SAFETY: the caller gives a name with a NUL at its end.
        let name = unsafe { text(name, "a tensor's name") }?;
        Ok(state.read(name, &given(into, "tensor")?.0)?)
    })
}

/// Writes a state to a file of safetensors, as `harmonaize_write_safetensors`.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_restored_write_safetensors(
    restored: Option<&harmonaize_restored_t>,
    state: usize,
    path: *const c_char,
) -> harmonaize_status_t {
    call(|| {
        let state = given(restored, "result of a restore")?.state(state)?;
        // SAFETY: the caller gives a path with a NUL at its end.
        let path = unsafe { text(path, "a path") }?;
        Ok(state.write_safetensors(path)?)
    })
}

/// Frees what came of a restore. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_restored_free(restored: Option<Box<harmonaize_restored_t>>) {
    free(restored);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::HARMONAIZE_ERROR_INVALID_ARGUMENT;

    #[test]
    fn a_name_loses_its_nul_and_no_more() {
        let stored = Stored::new(("a\0b", harmonaize_client::Dtype::F32, 3));
        assert_eq!(
            (stored.name.as_c_str(), stored.dtype, stored.elements),
            (c"ab", crate::tensor::HARMONAIZE_F32, 3)
        );
    }

    #[test]
    fn nothing_is_protected_or_restored_without_handles() {
        let mut protection = MaybeUninit::uninit();
        let status = harmonaize_protect(None, ptr::null(), 0, ptr::null(), Some(&mut protection));
        assert_eq!(status, HARMONAIZE_ERROR_INVALID_ARGUMENT);
        // SAFETY: a failed creation has left NULL.
        assert!(unsafe { protection.assume_init() }.is_none());
        assert_eq!(harmonaize_seal(None, 1), HARMONAIZE_ERROR_INVALID_ARGUMENT);
        assert_eq!(harmonaize_begin_seal(None, 1), HARMONAIZE_ERROR_INVALID_ARGUMENT);
        assert_eq!(harmonaize_end_seal(None, 1), HARMONAIZE_ERROR_INVALID_ARGUMENT);
        assert_eq!(harmonaize_write_safetensors(None, ptr::null(), None), HARMONAIZE_ERROR_INVALID_ARGUMENT);
        assert_eq!(harmonaize_restore(None, None, ptr::null(), 0, None), HARMONAIZE_ERROR_INVALID_ARGUMENT);
        assert_eq!(harmonaize_restored_step(None, None), HARMONAIZE_ERROR_INVALID_ARGUMENT);
    }
}
