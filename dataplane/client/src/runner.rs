//! Processes that start a job's workers: what the provider has them do.

use crate::attach::Client;
use crate::shared::Shared;
use crate::{Error, ProtocolError, RequestKind};
use harmonaize_abi::session::{
    Answer, BIDS, ElasticOrder, JobBid, PricedOrder, RUNNERS, Request, RunnerOrder, RunnerReport,
};
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
        match self.asked(report, wait, |id, report, wait_ns| Request::Runner { id, report, wait_ns })? {
            Answer::Runner { order, .. } => {
                order.map_err(|why| Error::from_request_error(why, Error::Runner))
            }
            _ => Err(unexpected()),
        }
    }

    /// The same as [`Self::order`] for an elastic job: workers run on when it gets more hosts or fewer.
    ///
    /// # Errors
    /// As of [`Self::order`].
    pub fn elastic_order(&self, report: &RunnerReport, wait: Duration) -> Result<ElasticOrder, Error> {
        match self.asked(report, wait, |id, report, wait_ns| Request::Elastic { id, report, wait_ns })? {
            Answer::Elastic { order, .. } => {
                order.map_err(|why| Error::from_request_error(why, Error::Runner))
            }
            _ => Err(unexpected()),
        }
    }

    /// Whether jobs can bid.
    ///
    /// # Errors
    /// [`Error::Runner`] where the agent is of a release that knows no bids.
    pub fn check_bids(&self) -> Result<(), Error> {
        match self.answered(|id| Request::Detail { id: id | BIDS, communicator: 0 }, Duration::ZERO)? {
            Answer::TakesBids { .. } => Ok(()),
            _ => Err(Error::Runner("the agent is of a release that knows no bids".into())),
        }
    }

    /// The same as [`Self::order`] or, of an `elastic` job, [`Self::elastic_order`], with the price of what the job has. The bid is the
    /// job's where none of it stands; [`Self::bid`] changes one. Only after [`Self::check_bids`].
    ///
    /// # Errors
    /// As of [`Self::order`]; and [`Error::Runner`] of a bid that makes no sense.
    pub fn priced_order(
        &self,
        (report, elastic): (&RunnerReport, bool),
        bid: Option<JobBid>,
        wait: Duration,
    ) -> Result<PricedOrder, Error> {
        if let Some(bid) = &bid {
            bid.check().map_err(|error| Error::Runner(error.to_string()))?;
        }
        let request = |id, report, wait_ns| Request::Bidding { id, report, elastic, bid, wait_ns };
        match self.asked(report, wait, request)? {
            Answer::Bidding { order, .. } => {
                order.map_err(|why| Error::from_request_error(why, Error::Runner))
            }
            _ => Err(unexpected()),
        }
    }

    /// Changes what a job of the tenant's bids. It counts from the next round on. Only after [`Self::check_bids`].
    ///
    /// # Errors
    /// [`Error::Runner`] where the bid makes no sense, there is no such job, hosts have no prices, or the provider cannot be asked now:
    /// the text says which, and the bid before stands. [`Error::TooOften`] where the tenant has asked the provider too much.
    pub fn bid(&self, job: &str, bid: JobBid) -> Result<(), Error> {
        bid.check().map_err(|error| Error::Runner(error.to_string()))?;
        let job = job.to_owned();
        match self.answered(|id| Request::Bid { id, job, bid }, Duration::ZERO)? {
            Answer::Bid { refused: None, .. } => Ok(()),
            Answer::Bid { refused: Some(why), .. } => Err(Error::from_request_error(why, Error::Runner)),
            _ => Err(unexpected()),
        }
    }

    /// Has the provider know that this process ends, once it is gone with its attachments. Elsewhere it is missed only after 15 s, if an
    /// order was on its way to it. Waits for nothing. `elastic` says whether its job is.
    ///
    /// # Errors
    /// [`Error::Runner`] where the report makes no sense, and [`Error::AgentLost`].
    pub fn leave(&self, report: &RunnerReport, elastic: bool) -> Result<(), Error> {
        report.check().map_err(|error| Error::Runner(error.to_string()))?;
        let (report, wait_ns) = (report.clone(), u64::MAX);
        // The end of who has asked and was not answered is what the provider hears of.
        self.shared.lock()?.request(|id| match elastic {
            true => Request::Elastic { id, report, wait_ns },
            false => Request::Runner { id, report, wait_ns },
        })?;
        Ok(())
    }

    fn asked(
        &self,
        report: &RunnerReport,
        wait: Duration,
        request: impl FnOnce(u64, RunnerReport, u64) -> Request,
    ) -> Result<Answer, Error> {
        report.check().map_err(|error| Error::Runner(error.to_string()))?;
        let wait_ns = u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX);
        self.answered(|id| request(id, report.clone(), wait_ns), wait)
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

fn unexpected() -> Error {
    ProtocolError::Unexpected(RequestKind::Runner).into()
}
