//! Groups: calls that are submitted together, or not at all.

use crate::Error;
use crate::in_flight::Buffers;
use crate::shared::Shared;
use harmonaize_abi::{Cookie, Submission};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Calls that are checked one by one and submitted together when the group [ends](Self::end). Dropped before, none of them was called:
/// a step whose third call is refused leaves no rank behind that waits for the first two.
///
/// ```no_run
/// # use harmonaize_client::{Client, Communicator, Error, Rank, Tensor};
/// # use std::time::Duration;
/// # fn exchange(client: &Client, job: &Communicator, mine: &Tensor, theirs: &[Tensor]) -> Result<(), Error> {
/// let group = client.group();
/// let calls = job.grouped(&group)?;
/// let mut operations = Vec::new();
/// for (rank, tensor) in (0..).map(Rank).zip(theirs) {
///     operations.push(calls.send(mine, rank)?);
///     operations.push(calls.recv(tensor, rank)?);
/// }
/// group.end()?;
/// for mut operation in operations {
///     operation.wait(Duration::from_secs(30))?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Group {
    shared: Arc<Shared>,
    calls: Arc<Calls>,
}

/// What has been called in a group so far.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    open: Mutex<Vec<Submission>>,
    ended: AtomicBool,
}

impl Group {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared), calls: Arc::default() }
    }

    pub(crate) fn calls(&self) -> &Arc<Calls> {
        &self.calls
    }

    pub(crate) fn attachment(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Submits the calls, in their order. From now on their operations can be waited for.
    ///
    /// # Errors
    /// [`Error::AgentLost`].
    pub fn end(self) -> Result<(), Error> {
        let mut state = self.shared.poll()?;
        self.calls.ended.store(true, Ordering::Release);
        for submission in self.calls.take() {
            state.submit_reserved(&submission)?;
        }
        Ok(())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Ok(mut state) = self.shared.lock() {
            let calls = self.calls.take();
            calls.iter().for_each(|submission| state.in_flight.cancel(Cookie(submission.cookie)));
        }
    }
}

impl Calls {
    /// Whether its calls are submitted.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Takes a call in; its cookie. The attachment is locked all the while, as it is when the group ends: a call is in the group, or
    /// refused.
    pub(crate) fn add(
        &self,
        shared: &Shared,
        submission: Submission,
        buffers: Buffers,
    ) -> Result<Cookie, Error> {
        let mut state = shared.poll()?;
        if self.has_ended() {
            return Err(Error::GroupEnded);
        }
        let submission = state.reserve(submission, buffers, shared.entries)?;
        self.open.lock().unwrap_or_else(PoisonError::into_inner).push(submission);
        Ok(Cookie(submission.cookie))
    }

    fn take(&self) -> Vec<Submission> {
        std::mem::take(&mut *self.open.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
