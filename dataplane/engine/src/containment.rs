//! Panics while the engine works for one communicator, or one attachment, which end that one alone.
//!
//! Work runs under `catch_unwind`, which costs nothing while nothing panics. What a panic leaves is not trusted: the communicator's state
//! leaves the table at once, so that nothing reaches it any more. [`Engine::end_panicked`](crate::Engine) then tells all that wait from
//! what the engine itself knows. A panic within the transport, or of the engine beside any communicator, is not contained.

use crate::communicator_state::CommunicatorState;
use crate::table::{Key, Table};
use harmonaize_core::Nanos;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What the engine does for a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    /// A call of a tenant.
    Call,
    /// A command of the agent.
    Command,
    /// A frame, or another event of its links.
    Frame,
    /// The links of an epoch, all up or one down.
    Links,
    /// Packets of its aggregator.
    Packets,
    /// What the agent wants to know of it.
    Report,
    /// An attachment's rings, beside any communicator.
    Rings,
    /// A step of its turn, before anything is sent.
    Step,
    /// Actions of its turn.
    Turn,
    /// Time that has passed.
    Timer,
    /// The end of a transfer from or to an attachment.
    Transfer,
}

impl Task {
    /// Whether a communicator may have something to do after the task. A look at it gives none, nor does its turn,
    /// which reports that itself.
    fn wakes(self) -> bool {
        match self {
            Self::Call | Self::Command | Self::Frame | Self::Links | Self::Transfer => true,
            Self::Packets | Self::Report | Self::Rings | Self::Step | Self::Turn | Self::Timer => false,
        }
    }
}

/// Whose work panicked, by what the agent counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PanicScope {
    /// A communicator, which has ended.
    Communicator,
    /// An attachment, which has been let go.
    Attachment,
}

/// A communicator whose work has panicked, to be ended.
#[derive(Debug)]
pub(crate) struct Panicked {
    pub(crate) key: Key,
    /// What is left of it; none of one that was being forgotten.
    pub(crate) remains: Option<Box<CommunicatorState>>,
    /// What the panic said, and at what.
    pub(crate) reason: String,
}

impl Panicked {
    /// Puts the communicator out of reach.
    pub(crate) fn new(
        members: &mut Table<CommunicatorState>,
        (key, task): (Key, Task),
        cause: &(dyn Any + Send),
    ) -> Self {
        Self { key, remains: members.remove(key).map(Box::new), reason: describe(task, cause) }
    }
}

/// What follows of work for communicators; empty between two rounds.
#[derive(Debug, Default)]
pub(crate) struct Aftermath {
    /// To be ended since their work has panicked.
    pub(crate) panicked: Vec<Panicked>,
    /// To have turns again, and until when they would have rested.
    pub(crate) woken: Vec<(Nanos, Key)>,
}

/// Does work for a communicator, which has turns after that unless it was only to be looked at. Returns none if there is none of this key any more, or if the work has panicked: then there is none either.
pub(crate) fn contain<R>(
    members: &mut Table<CommunicatorState>,
    aftermath: &mut Aftermath,
    (key, task): (Key, Task),
    work: impl FnOnce(&mut CommunicatorState) -> R,
) -> Option<R> {
    let member = note_event(members, aftermath, (key, task))?;
    match guarded(task, || work(member)) {
        Ok(done) => Some(done),
        Err(cause) => {
            aftermath.panicked.push(Panicked::new(members, (key, task), &*cause));
            None
        }
    }
}

/// Has a communicator have turns again, if it may have something to do after this; the communicator.
pub(crate) fn note_event<'a>(
    members: &'a mut Table<CommunicatorState>,
    aftermath: &mut Aftermath,
    (key, task): (Key, Task),
) -> Option<&'a mut CommunicatorState> {
    let member = members.get_mut(key)?;
    if task.wakes()
        && let Some(due) = member.wake()
    {
        aftermath.woken.push((due, key));
    }
    Some(member)
}

/// Runs work that may panic. What it had in hand must not be used after that.
pub(crate) fn guarded<R>(task: Task, work: impl FnOnce() -> R) -> Result<R, Box<dyn Any + Send>> {
    catch_unwind(AssertUnwindSafe(|| {
        let done = work();
        strike(task);
        done
    }))
}

/// What a panic said, and at what.
pub(crate) fn describe(task: Task, cause: &(dyn Any + Send)) -> String {
    let text = cause.downcast_ref::<&str>().copied();
    let text = text.or_else(|| cause.downcast_ref::<String>().map(String::as_str));
    format!("panicked at {task:?}: {}", text.unwrap_or("no message"))
}

#[cfg(not(test))]
pub(crate) fn strike(_: Task) {}

#[cfg(test)]
pub(crate) use fault::strike;

/// Panics that tests ask for.
#[cfg(test)]
pub(crate) mod fault {
    use super::Task;
    use std::cell::Cell;

    thread_local! {
        /// The work on this thread that panics once, behind so many of its kind.
        static FAULT: Cell<Option<(Task, u32)>> = const { Cell::new(None) };
    }

    /// Has work panic that comes behind so many of its kind on this thread.
    pub(crate) fn arm(task: Task, behind: u32) {
        FAULT.set(Some((task, behind)));
    }

    /// Whether the panic is still to come.
    pub(crate) fn is_armed() -> bool {
        FAULT.get().is_some()
    }

    pub(crate) fn strike(task: Task) {
        match FAULT.get() {
            Some((of, 0)) if of == task => {
                FAULT.set(None);
                panic!("a fault of the test's");
            }
            Some((of, behind)) if of == task => FAULT.set(Some((of, behind - 1))),
            _ => {}
        }
    }
}
