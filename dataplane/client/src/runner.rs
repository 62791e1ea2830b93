//! Processes that start a job's workers: what the provider has them do.

use crate::Error;
use crate::attach::Client;
use crate::shared::Shared;
use harmonaize_abi::session::{Answer, RUNNERS, Request, RunnerOrder, RunnerReport};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How much longer than asked the answer may take: the provider is asked over the network.
const GRACE: Duration = Duration::from_secs(5);

/// A process that starts workers of a job on this host, when the provider has it do so.
#[derive(Debug)]
pub struct Runner {
    shared: Arc<Shared>,
}

impl Client {
    /// Makes this process a runner: one that asks what to do by [`Runner::order`].
    ///
    /// # Errors
    /// [`Error::Runner`] where the agent is of a release that has no runners.
    pub fn runner(&self) -> Result<Runner, Error> {
        let runner = Runner { shared: Arc::clone(self.shared()) };
        match runner.answered(|id| Request::Detail { id: id | RUNNERS, communicator: 0 }, Duration::ZERO)? {
            Answer::TakesRunners { .. } => Ok(runner),
            _ => Err(Error::Runner("the agent is of a release that has no runners".into())),
        }
    }
}

impl Runner {
    /// What the runner is to do, by what it says of itself. Returns [`RunnerOrder::Wait`] after `wait` without anything to do. What is
    /// to be done is said again until a report shows that it is done.
    ///
    /// # Errors
    /// [`Error::Runner`] where the report makes no sense, the tenant may not run here, or the provider cannot be asked now: the text
    /// says which. [`Error::TooOften`] where the tenant has asked the provider too much.
    pub fn order(&self, report: &RunnerReport, wait: Duration) -> Result<RunnerOrder, Error> {
        report.check().map_err(|error| Error::Runner(error.to_string()))?;
        let report = report.clone();
        let wait_ns = u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX);
        match self.answered(|id| Request::Runner { id, report, wait_ns }, wait)? {
            Answer::Runner { order, .. } => {
                order.map_err(|why| Error::from_request_error(why, Error::Runner))
            }
            _ => Err(Error::Protocol("the agent answered a runner with something else".into())),
        }
    }

    fn answered(&self, request: impl FnOnce(u64) -> Request, wait: Duration) -> Result<Answer, Error> {
        let id = self.shared.lock()?.request(request)?;
        let deadline = Instant::now().checked_add(wait.saturating_add(GRACE));
        if let Some(answer) = self.shared.wait(deadline, |state| state.answer(id))? {
            return Ok(answer);
        }
        self.shared.lock()?.forget(id);
        Err(Error::Runner(format!("no answer from the agent within {GRACE:?}")))
    }
}
