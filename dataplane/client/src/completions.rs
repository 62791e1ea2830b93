//! Ends of operations for who does not wait for them: callbacks, and a descriptor to poll. A thread of the attachment sees to both, from the
//! first wish of that kind on, and ends with the last.

use crate::attach::Client;
use crate::in_flight::InFlight;
use crate::shared::Shared;
use crate::{Error, Operation, Receipt};
use rustix::event::EventfdFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// What is called at an operation's end.
type Callback = Box<dyn FnOnce(Result<Receipt, Error>) + Send>;

/// An operation, and what is called at its end.
type Awaited = (Operation, Callback);

/// What the thread sees to.
#[derive(Default)]
pub(crate) struct Watch {
    callbacks: Vec<Awaited>,
    descriptors: Vec<Arc<OwnedFd>>,
    /// Whether the thread is there.
    runs: bool,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("callbacks", &self.callbacks.len()).finish_non_exhaustive()
    }
}

/// What the thread is to do.
enum Task {
    Call(Vec<Awaited>),
    End,
}

impl Watch {
    /// Makes the descriptors readable: operations have ended.
    pub(crate) fn signal(&self) {
        for descriptor in &self.descriptors {
            // Fails where the counter is at its most: it is readable then.
            let _ = rustix::io::write(descriptor, &1_u64.to_ne_bytes());
        }
    }

    fn task(&mut self, in_flight: &InFlight) -> Option<Task> {
        if self.callbacks.is_empty() && self.descriptors.is_empty() {
            self.runs = false;
            return Some(Task::End);
        }
        let ended = self.callbacks.extract_if(.., |(operation, _)| operation.has_ended(in_flight));
        let ended: Vec<Awaited> = ended.collect();
        (!ended.is_empty()).then_some(Task::Call(ended))
    }
}

/// Has the thread see to one wish more.
fn add(shared: &Arc<Shared>, wish: impl FnOnce(&mut Watch)) -> Result<(), Error> {
    let mut state = shared.lock()?;
    if !state.watch.runs {
        let shared = Arc::clone(shared);
        let thread = std::thread::Builder::new().name("harmonaize-completions".into());
        thread.spawn(move || run(&shared)).map_err(|source| Error::System { call: "clone", source })?;
        state.watch.runs = true;
    }
    wish(&mut state.watch);
    drop(state);
    shared.nudge();
    Ok(())
}

fn run(shared: &Shared) {
    loop {
        let task = shared.wait_spinning(None, Duration::ZERO, |state| state.watched(Watch::task));
        match task {
            Ok(Some(Task::Call(ended))) => ended.into_iter().for_each(call),
            Ok(Some(Task::End)) => return,
            // The agent is lost: everything has ended. Or a callback has forked, and this is the child.
            Ok(None) | Err(_) => {
                let Ok(mut state) = shared.lock() else { return };
                let ended = std::mem::take(&mut state.watch.callbacks);
                state.watch.runs = !ended.is_empty();
                let over = ended.is_empty();
                drop(state);
                ended.into_iter().for_each(call);
                if over {
                    return;
                }
            }
        }
    }
}

fn call((mut operation, callback): Awaited) {
    let result = operation.wait(Duration::ZERO);
    drop(operation);
    // The panic hook has said it, and the others' ends are not this one's.
    let _ = catch_unwind(AssertUnwindSafe(|| callback(result)));
}

impl Operation {
    /// Has `callback` called with the result once the operation has ended, or the agent is lost. Each operation may have one.
    ///
    /// It runs on a thread of this library, `harmonaize-completions`, which an attachment has while it has callbacks or
    /// [`Completions`]. One runs after the other, so one that blocks holds up the rest. It may begin operations and give them callbacks.
    /// Where it panics, the panic hook says so and the thread goes on with the next.
    ///
    /// ```no_run
    /// # use harmonaize_client::{Communicator, Error, ReduceOp, Tensor};
    /// # fn reduce(job: &Communicator, gradients: &Tensor) -> Result<(), Error> {
    /// job.all_reduce_in_place(gradients, ReduceOp::Sum)?.on_completion(|result| match result {
    ///     Ok(receipt) => println!("operation {} is done", receipt.operation),
    ///     Err(error) => println!("{error}"),
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::System`] where the thread cannot be had; the operation goes on then, and the callback is dropped.
    pub fn on_completion(
        self,
        callback: impl FnOnce(Result<Receipt, Error>) + Send + 'static,
    ) -> Result<(), Error> {
        let shared = Arc::clone(self.attachment());
        add(&shared, move |watch| watch.callbacks.push((self, Box::new(callback))))
    }
}

/// A descriptor for `poll`, `epoll` or an async runtime. It is readable once operations of the attachment have ended,
/// until it is [cleared](Self::clear). Readable at first, for those that had ended before. Keeps the attachment alive.
///
/// ```no_run
/// # use harmonaize_client::{Client, Error, Operation};
/// use rustix::event::{PollFd, PollFlags, poll};
///
/// # fn all(client: &Client, mut operations: Vec<Operation>) -> Result<(), Error> {
/// let completions = client.completions()?;
/// while !operations.is_empty() {
///     let mut fds = [PollFd::new(&completions, PollFlags::IN)];
///     poll(&mut fds, None).map_err(|error| Error::System { call: "poll", source: error.into() })?;
///     completions.clear();
///     let mut left = Vec::new();
///     for mut operation in operations {
///         if operation.poll()?.is_none() {
///             left.push(operation);
///         }
///     }
///     operations = left;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Completions {
    shared: Arc<Shared>,
    descriptor: Arc<OwnedFd>,
}

impl Client {
    /// A descriptor that says when operations of this attachment have ended.
    ///
    /// # Errors
    /// [`Error::System`] where the descriptor or its thread cannot be had.
    pub fn completions(&self) -> Result<Completions, Error> {
        let descriptor = Arc::new(eventfd(1)?);
        let added = Arc::clone(&descriptor);
        add(self.shared(), move |watch| watch.descriptors.push(added))?;
        Ok(Completions { shared: Arc::clone(self.shared()), descriptor })
    }
}

impl Completions {
    /// Makes it unreadable until the next end. To be called before operations are looked at: what ends in between makes it readable again.
    /// In a forked child nothing: the descriptor is the parent's.
    pub fn clear(&self) {
        if self.shared.lock().is_err() {
            return;
        }
        // Fails where nothing has ended.
        let _ = rustix::io::read(&self.descriptor, &mut [0_u8; 8]);
    }
}

impl AsFd for Completions {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        let Ok(mut state) = self.shared.lock() else { return };
        state.watch.descriptors.retain(|kept| !Arc::ptr_eq(kept, &self.descriptor));
        drop(state);
        self.shared.nudge();
    }
}

/// A counter that can be polled, never blocks, and begins with `count`.
pub(crate) fn eventfd(count: u32) -> Result<OwnedFd, Error> {
    rustix::event::eventfd(count, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|source| Error::System { call: "eventfd", source: source.into() })
}
