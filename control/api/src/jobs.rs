//! Runners and their orders between the words of tenants and those of this interface, for agents and control alike.

use crate::v1::{self, WorkerPhase, runner_order::Order};
use harmonaize_abi::Rank;
use harmonaize_abi::session::{
    ElasticOrder, HostPrice, JobBid, Price, PricedOrder, RecallReason, Refusal, RunnerOrder, RunnerReport,
    WorkerPlace, WorkerState,
};
use std::time::Duration;

impl From<WorkerPlace> for v1::WorkerPlace {
    fn from(place: WorkerPlace) -> Self {
        let WorkerPlace { generation, rank: Rank(rank), workers } = place;
        Self { generation, rank, workers }
    }
}

impl From<v1::WorkerPlace> for WorkerPlace {
    fn from(place: v1::WorkerPlace) -> Self {
        let v1::WorkerPlace { generation, rank, workers } = place;
        Self { generation, rank: Rank(rank), workers }
    }
}

impl From<JobBid> for v1::JobBid {
    fn from(bid: JobBid) -> Self {
        let JobBid { least: Price(least_millionths), further: Price(further_millionths), checkpoint_ns } =
            bid;
        Self { least_millionths, further_millionths, checkpoint_ns }
    }
}

impl From<v1::JobBid> for JobBid {
    fn from(bid: v1::JobBid) -> Self {
        let v1::JobBid { least_millionths, further_millionths, checkpoint_ns } = bid;
        Self { least: Price(least_millionths), further: Price(further_millionths), checkpoint_ns }
    }
}

impl v1::BidSet {
    /// The answer to a question.
    pub fn answer(request: u64, outcome: Result<(), String>) -> Self {
        Self { request, refused: outcome.err().unwrap_or_default() }
    }

    /// What it says.
    ///
    /// # Errors
    /// Why the bid does not stand.
    pub fn outcome(self) -> Result<(), Refusal> {
        if self.refused.is_empty() { Ok(()) } else { Err(self.refused.into()) }
    }
}

impl v1::AwaitOrder {
    /// A question with this report, of a job that is `elastic` or not.
    pub fn of(request: u64, tenant: &str, (report, elastic): (RunnerReport, bool), wait: Duration) -> Self {
        let RunnerReport { runner, job, workers, state } = report;
        let (phase, place) = match state {
            WorkerState::None => (WorkerPhase::Unspecified, None),
            WorkerState::Running { place, stopping: false } => (WorkerPhase::Running, Some(place)),
            WorkerState::Running { place, stopping: true } => (WorkerPhase::Stopping, Some(place)),
            WorkerState::Ended { place, succeeded: true } => (WorkerPhase::Succeeded, Some(place)),
            WorkerState::Ended { place, succeeded: false } => (WorkerPhase::Failed, Some(place)),
        };
        Self {
            request,
            tenant: tenant.to_owned(),
            runner,
            job,
            workers_min: workers.0,
            workers_max: workers.1,
            phase: phase.into(),
            place: place.map(Into::into),
            wait_ns: u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX),
            elastic,
            bid: None,
        }
    }

    /// What the runner says. A worker without a place is none.
    pub fn report(&self) -> RunnerReport {
        let state = match (self.phase(), self.place.map(WorkerPlace::from)) {
            (WorkerPhase::Running, Some(place)) => WorkerState::Running { place, stopping: false },
            (WorkerPhase::Stopping, Some(place)) => WorkerState::Running { place, stopping: true },
            (WorkerPhase::Succeeded, Some(place)) => WorkerState::Ended { place, succeeded: true },
            (WorkerPhase::Failed, Some(place)) => WorkerState::Ended { place, succeeded: false },
            (WorkerPhase::Unspecified, _) | (_, None) => WorkerState::None,
        };
        let workers = (self.workers_min, self.workers_max);
        RunnerReport { runner: self.runner, job: self.job.clone(), workers, state }
    }
}

impl v1::RunnerOrder {
    /// The answer to a question.
    pub fn answer(request: u64, order: Result<ElasticOrder, String>) -> Self {
        match order {
            Ok(order) => Self { request, refused: String::new(), order: encode(order), price: None },
            Err(refused) => Self { request, refused, order: None, price: None },
        }
    }

    /// The same answer, with the price of what it is about.
    pub fn priced(self, price: Option<HostPrice>) -> Self {
        let price = price.filter(|_| self.order.is_some());
        let of =
            |HostPrice { kind, price: Price(price_millionths) }| v1::HostPrice { kind, price_millionths };
        Self { price: price.map(of), ..self }
    }

    /// What it says, and at which price.
    ///
    /// # Errors
    /// As of [`Self::outcome`].
    pub fn priced_outcome(mut self) -> Result<PricedOrder, Refusal> {
        let price = self.price.take();
        let of =
            |v1::HostPrice { kind, price_millionths }| HostPrice { kind, price: Price(price_millionths) };
        Ok(PricedOrder { order: self.outcome()?, price: price.map(of) })
    }

    /// What it says, as tenants are told it.
    ///
    /// # Errors
    /// Why it was not looked at.
    pub fn outcome(self) -> Result<ElasticOrder, Refusal> {
        if !self.refused.is_empty() {
            return Err(self.refused.into());
        }
        let order = match self.order {
            Some(Order::Offer(v1::Offer { place: Some(place), notice_ns, enters: true })) => {
                return Ok(ElasticOrder::Enter { place: place.into(), notice_ns });
            }
            Some(Order::Resize(v1::Resize { place: Some(place) })) => {
                return Ok(ElasticOrder::Resize { place: place.into() });
            }
            Some(Order::Offer(v1::Offer { place: Some(place), notice_ns, enters: false })) => {
                RunnerOrder::Offer { place: place.into(), notice_ns }
            }
            Some(Order::Recall(recall)) => {
                let reason = match recall.reason() {
                    v1::RecallReason::Unspecified => RecallReason::Unknown,
                    v1::RecallReason::Resized => RecallReason::Resized,
                    v1::RecallReason::Suspended => RecallReason::Suspended,
                    v1::RecallReason::WorkerLost => RecallReason::WorkerLost,
                    v1::RecallReason::WorkerFailed => RecallReason::WorkerFailed,
                    v1::RecallReason::Outdated => RecallReason::Outdated,
                };
                RunnerOrder::Recall { generation: recall.generation, reason, notice_ns: recall.notice_ns }
            }
            Some(Order::Over(v1::JobOver { succeeded })) => RunnerOrder::Over { succeeded },
            Some(Order::Infeasible(v1::JobInfeasible { text, workers_min, workers_max })) => {
                RunnerOrder::Infeasible { text, nearest: (workers_min, workers_max) }
            }
            Some(Order::Offer(_) | Order::Resize(_)) | None => RunnerOrder::Wait,
        };
        Ok(order.into())
    }
}

/// An order for the wire; none where there is nothing to do yet.
fn encode(order: ElasticOrder) -> Option<Order> {
    let offer = |place: WorkerPlace, notice_ns, enters| {
        Some(Order::Offer(v1::Offer { place: Some(place.into()), notice_ns, enters }))
    };
    let order = match order {
        ElasticOrder::Order(order) => order,
        ElasticOrder::Resize { place } => {
            return Some(Order::Resize(v1::Resize { place: Some(place.into()) }));
        }
        ElasticOrder::Enter { place, notice_ns } => return offer(place, notice_ns, true),
    };
    match order {
        RunnerOrder::Wait => None,
        RunnerOrder::Offer { place, notice_ns } => offer(place, notice_ns, false),
        RunnerOrder::Recall { generation, reason, notice_ns } => {
            let reason = match reason {
                RecallReason::Unknown => v1::RecallReason::Unspecified,
                RecallReason::Resized => v1::RecallReason::Resized,
                RecallReason::Suspended => v1::RecallReason::Suspended,
                RecallReason::WorkerLost => v1::RecallReason::WorkerLost,
                RecallReason::WorkerFailed => v1::RecallReason::WorkerFailed,
                RecallReason::Outdated => v1::RecallReason::Outdated,
            };
            Some(Order::Recall(v1::Recall { generation, reason: reason.into(), notice_ns }))
        }
        RunnerOrder::Over { succeeded } => Some(Order::Over(v1::JobOver { succeeded })),
        RunnerOrder::Infeasible { text, nearest: (workers_min, workers_max) } => {
            Some(Order::Infeasible(v1::JobInfeasible { text, workers_min, workers_max }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_and_orders_come_back_as_they_went() {
        let place = WorkerPlace { generation: 3, rank: Rank(1), workers: 4 };
        let states = [
            WorkerState::None,
            WorkerState::Running { place, stopping: false },
            WorkerState::Running { place, stopping: true },
            WorkerState::Ended { place, succeeded: true },
            WorkerState::Ended { place, succeeded: false },
        ];
        for state in states {
            let report = RunnerReport { runner: 7, job: "job".to_owned(), workers: (2, 8), state };
            for elastic in [false, true] {
                let report = report.clone();
                let asked = v1::AwaitOrder::of(5, "a", (report.clone(), elastic), Duration::from_secs(1));
                assert_eq!((asked.report(), asked.elastic, asked.wait_ns), (report, elastic, 1_000_000_000));
            }
        }
        let reasons = [
            RecallReason::Unknown,
            RecallReason::Resized,
            RecallReason::Suspended,
            RecallReason::WorkerLost,
            RecallReason::WorkerFailed,
            RecallReason::Outdated,
        ];
        let recalls = reasons.map(|reason| RunnerOrder::Recall { generation: 3, reason, notice_ns: 9 });
        let others = [
            RunnerOrder::Wait,
            RunnerOrder::Offer { place, notice_ns: 9 },
            RunnerOrder::Over { succeeded: true },
            RunnerOrder::Over { succeeded: false },
            RunnerOrder::Infeasible { text: "no".to_owned(), nearest: (2, 4) },
        ];
        let elastic = [ElasticOrder::Resize { place }, ElasticOrder::Enter { place, notice_ns: 9 }];
        for order in recalls.into_iter().chain(others).map(ElasticOrder::from).chain(elastic) {
            assert_eq!(v1::RunnerOrder::answer(5, Ok(order.clone())).outcome(), Ok(order));
        }
        let refused = v1::RunnerOrder::answer(5, Err("no".to_owned()));
        assert_eq!(refused.outcome(), Err(Refusal::from("no")));
    }

    #[test]
    fn bids_and_prices_come_back_as_they_went() {
        let bid = JobBid { least: Price(650_000), further: Price(300_000), checkpoint_ns: 7 };
        assert_eq!(JobBid::from(v1::JobBid::from(bid)), bid);
        let price = Some(HostPrice { kind: "a100".to_owned(), price: Price(650_000) });
        let order = ElasticOrder::from(RunnerOrder::Over { succeeded: true });
        let answer = v1::RunnerOrder::answer(5, Ok(order.clone())).priced(price.clone());
        assert_eq!(answer.priced_outcome(), Ok(PricedOrder { order, price: price.clone() }));
        // Nothing to do has no price.
        let waits = v1::RunnerOrder::answer(5, Ok(RunnerOrder::Wait.into())).priced(price);
        assert_eq!(waits.priced_outcome().unwrap().price, None);
        assert_eq!(v1::BidSet::answer(5, Ok(())).outcome(), Ok(()));
        assert_eq!(v1::BidSet::answer(5, Err("no".to_owned())).outcome(), Err(Refusal::from("no")));
    }
}
