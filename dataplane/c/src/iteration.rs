//! Iterations: what a tenant leaves to the provider from one to the next, and what the provider chose.

use crate::agreement::priority;
use crate::client::harmonaize_client_t;
use crate::error::{Failure, call, given, text};
use crate::options::{SizeFirst, duration, read, write};
use crate::status::harmonaize_status_t;
use harmonaize_client::{Checkpoint, Choice, ChoiceReason, Knobs};
use std::ffi::c_char;
use std::time::Duration;

/// Nothing speaks for anything else.
pub const HARMONAIZE_CHOICE_USUAL: u32 = 0;
/// The network is slow now.
pub const HARMONAIZE_CHOICE_SLOW: u32 = 1;
/// Hosts will be taken away.
pub const HARMONAIZE_CHOICE_MAINTENANCE: u32 = 2;
/// The longest time between two checkpoints is over.
pub const HARMONAIZE_CHOICE_DUE: u32 = 3;
/// The provider cannot be asked now.
pub const HARMONAIZE_CHOICE_UNKNOWN: u32 = 4;

/// What a tenant leaves to the provider for its next iteration. What is 0 is as usual.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_knobs_t {
    /// `sizeof` of this structure.
    pub size: usize,
    /// The state is saved at least once in so many nanoseconds; as usual the provider does not choose when.
    pub checkpoint_every_ns: u64,
    /// Nanoseconds that saving takes.
    pub checkpoint_cost_ns: u64,
    /// Nanoseconds since it was last saved.
    pub checkpoint_last_ns: u64,
    /// How much it matters that little is lost, and so how early it is saved: `HARMONAIZE_PRIORITY_...`.
    pub checkpoint_importance: u32,
    /// Fewest micro-batches of which gradients are added up locally before they are exchanged; 1 as usual.
    pub least_accumulate: u32,
    /// Most of them; as many as the fewest, as usual.
    pub most_accumulate: u32,
}

/// What the provider chose for an iteration.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_choice_t {
    /// `sizeof` of this structure.
    pub size: usize,
    /// Micro-batches, within the range.
    pub accumulate: u32,
    /// 1: save the state before this iteration.
    pub checkpoint: u32,
    /// Why, of whichever differs from the usual; of the checkpoint where both do: `HARMONAIZE_CHOICE_...`.
    pub reason: u32,
}

// SAFETY: integers, of which the first is the size.
unsafe impl SizeFirst for harmonaize_knobs_t {}
// SAFETY: as above.
unsafe impl SizeFirst for harmonaize_choice_t {}

impl harmonaize_knobs_t {
    fn knobs(&self) -> Result<Knobs, Failure> {
        let importance = priority(self.checkpoint_importance)?;
        let least = self.least_accumulate.max(1);
        let most = if self.most_accumulate == 0 { least } else { self.most_accumulate };
        let checkpoint = duration(self.checkpoint_every_ns).map(|every| Checkpoint {
            every,
            cost: Duration::from_nanos(self.checkpoint_cost_ns),
            last: Duration::from_nanos(self.checkpoint_last_ns),
            importance,
        });
        Ok(Knobs { accumulate: (least, most), checkpoint })
    }
}

impl From<Choice> for harmonaize_choice_t {
    fn from(choice: Choice) -> Self {
        Self {
            size: size_of::<Self>(),
            accumulate: choice.accumulate,
            checkpoint: choice.checkpoint.into(),
            reason: match choice.reason {
                ChoiceReason::Usual => HARMONAIZE_CHOICE_USUAL,
                ChoiceReason::Slow => HARMONAIZE_CHOICE_SLOW,
                ChoiceReason::Maintenance => HARMONAIZE_CHOICE_MAINTENANCE,
                ChoiceReason::Due => HARMONAIZE_CHOICE_DUE,
                ChoiceReason::Unknown => HARMONAIZE_CHOICE_UNKNOWN,
            },
        }
    }
}

/// Says what the provider chooses for the next iteration of the job on the communicator of this name. One rank asks, and tells
/// the others. Where the provider cannot be asked it is the least accumulation, and a checkpoint once one is due. Which
/// iteration an operation belongs to is `iteration` of `harmonaize_operation_options_t`. The size of `choice` is to be set.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_iteration(
    client: Option<&harmonaize_client_t>,
    communicator: *const c_char,
    knobs: *const harmonaize_knobs_t,
    choice: *mut harmonaize_choice_t,
) -> harmonaize_status_t {
    call(|| {
        let client = &given(client, "client")?.0;
        if choice.is_null() {
            return Err(Failure::argument("NULL where the choice is to be put"));
        }
        // SAFETY: the caller gives a name with a NUL at its end.
        let communicator = unsafe { text(communicator, "the communicator's name") }?;
        // SAFETY: the caller gives knobs with the size that they have, or none.
        let knobs = unsafe { read(knobs) }?.knobs()?;
        let chosen = client.iteration(communicator, &knobs)?;
        // SAFETY: the caller gives a place with the size that it has.
        unsafe { write(choice, &chosen.into()) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_client::Priority;

    const NOTHING: harmonaize_knobs_t = harmonaize_knobs_t {
        size: size_of::<harmonaize_knobs_t>(),
        checkpoint_every_ns: 0,
        checkpoint_cost_ns: 0,
        checkpoint_last_ns: 0,
        checkpoint_importance: 0,
        least_accumulate: 0,
        most_accumulate: 0,
    };

    #[test]
    fn knobs_of_zeros_leave_nothing_to_the_provider() {
        assert_eq!(NOTHING.knobs().unwrap(), Knobs::default());
        let four = harmonaize_knobs_t { least_accumulate: 4, ..NOTHING };
        assert_eq!(four.knobs().unwrap().accumulate, (4, 4));
    }

    #[test]
    fn a_checkpoint_comes_with_its_times_and_importance() {
        let knobs = harmonaize_knobs_t {
            checkpoint_every_ns: 9,
            checkpoint_cost_ns: 2,
            checkpoint_last_ns: 3,
            checkpoint_importance: crate::agreement::HARMONAIZE_PRIORITY_HIGH,
            ..NOTHING
        };
        let expected = Checkpoint {
            every: Duration::from_nanos(9),
            cost: Duration::from_nanos(2),
            last: Duration::from_nanos(3),
            importance: Priority::High,
        };
        assert_eq!(knobs.knobs().unwrap().checkpoint, Some(expected));
        let wrong = harmonaize_knobs_t { checkpoint_importance: 7, ..knobs };
        assert!(wrong.knobs().unwrap_err().text.contains("7 is no priority"));
    }
}
