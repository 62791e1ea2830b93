//! Error feedback: what fewer bits left out of a tensor's sums, kept from step to step.

use crate::client::harmonaize_client_t;
use crate::error::{Failure, call, create, free, given, slice};
use crate::status::harmonaize_status_t;
use harmonaize_client::{Error, Feedback};
use std::mem::MaybeUninit;

/// What operations have left out of one tensor's sums so far. Any thread may use it, at the same time as others; one operation
/// at a time.
pub struct harmonaize_feedback_t(pub(crate) Feedback);

/// Makes error feedback for a tensor of so many f32, of which nothing is owed yet. Takes twice the tensor's bytes of the arena.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_feedback_create(
    client: Option<&harmonaize_client_t>,
    elements: u64,
    feedback: Option<&mut MaybeUninit<Option<Box<harmonaize_feedback_t>>>>,
) -> harmonaize_status_t {
    create(feedback, || Ok(harmonaize_feedback_t(given(client, "client")?.0.feedback(elements)?)))
}

/// Copies out what is owed, from element `first` on: with it a checkpoint of the training is whole.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_feedback_read(
    feedback: Option<&harmonaize_feedback_t>,
    first: u64,
    into: *mut f32,
    count: usize,
) -> harmonaize_status_t {
    call(|| {
        let feedback = &given(feedback, "feedback")?.0;
        if count == 0 {
            return Ok(());
        }
        if into.is_null() || !into.is_aligned() {
            return Err(Failure::argument(format!("no array of {count} floats can begin at {into:?}")));
        }
        let (asked, elements) = (count as u64, feedback.elements());
        if asked > elements {
            return Err(Error::OutOfRange { offset: first, count: asked, elements }.into());
        }
        let mut owed = vec![0.0; count];
        feedback.read(first, &mut owed)?;
        // SAFETY: the caller has so many floats there, that nobody else uses meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(owed.as_ptr(), into, owed.len()) };
        Ok(())
    })
}

/// Sets what is owed, from element `first` on, as from a checkpoint.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_feedback_write(
    feedback: Option<&harmonaize_feedback_t>,
    first: u64,
    from: *const f32,
    count: usize,
) -> harmonaize_status_t {
    call(|| {
        let feedback = &given(feedback, "feedback")?.0;
        // SAFETY: the caller gives so many floats.
        Ok(feedback.write(first, unsafe { slice(from, count, "floats") }?)?)
    })
}

/// Forgets what is owed.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_feedback_reset(feedback: Option<&harmonaize_feedback_t>) -> harmonaize_status_t {
    call(|| Ok(given(feedback, "feedback")?.0.reset()?))
}

/// Frees error feedback. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_feedback_free(feedback: Option<Box<harmonaize_feedback_t>>) {
    free(feedback);
}
