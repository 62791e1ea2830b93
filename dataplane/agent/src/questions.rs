//! What tenants ask of control through their agent, and who waits for which answer.

mod events;
mod pending;

use crate::control::ControlAnswer;
use crate::session::Question;
use events::{batch, read_events};
use harmonaize_abi::session::{BatchChoice, Choice, EventBatch, Negotiated, PricedOrder};
use harmonaize_api::v1::{self, from_agent};
use pending::PendingRequests;

/// Questions of all kinds.
#[derive(Debug, Default)]
pub(crate) struct Questions {
    readers: PendingRequests<EventBatch>,
    negotiations: PendingRequests<Negotiated>,
    iterations: PendingRequests<(Choice, Option<BatchChoice>)>,
    hints: PendingRequests<()>,
    runners: PendingRequests<PricedOrder>,
    bids: PendingRequests<()>,
    /// Whether control takes `CancelRead`.
    cancels: bool,
}

impl Questions {
    /// A session with control has begun, or has ended. `cancels`: whether this control takes `CancelRead`; `allocates`: `AwaitOrder`
    /// and `SetBid`.
    pub(crate) fn session(&mut self, open: bool, cancels: bool, allocates: bool) {
        self.cancels = cancels;
        self.readers.reset(open);
        self.negotiations.reset(open);
        self.iterations.reset(open);
        self.hints.reset(open);
        self.runners.reset(open && allocates);
        self.bids.reset(open && allocates);
    }

    /// What to say to control for a tenant's question; none where it cannot be asked.
    pub(crate) fn ask(&mut self, tenant: &str, question: Question) -> Option<from_agent::Message> {
        Some(match question {
            Question::Events { from, wait, reply } => {
                let request = self.readers.ask(reply)?;
                from_agent::Message::ReadEvents(read_events(request, tenant, from, wait))
            }
            Question::Negotiate { communicator, propose, reply } => {
                let request = self.negotiations.ask(reply)?;
                let (tenant, propose) = (tenant.to_owned(), propose.as_ref().map(Into::into));
                from_agent::Message::Negotiate(v1::Negotiate { request, tenant, communicator, propose })
            }
            Question::Iteration { communicator, knobs, batch, reply } => {
                let request = self.iterations.ask(reply)?;
                let asked = v1::BeginIteration::of(request, tenant, communicator, &knobs, batch.as_ref());
                from_agent::Message::BeginIteration(asked)
            }
            Question::Hint { communicator, hints, reply } => {
                let request = self.hints.ask(reply)?;
                let (tenant, hints) = (tenant.to_owned(), Some((&hints).into()));
                from_agent::Message::Hint(v1::Hint { request, tenant, communicator, hints })
            }
            Question::Runner { report, elastic, bid, wait, reply } => {
                let request = self.runners.ask(reply)?;
                let asked = v1::AwaitOrder::of(request, tenant, (report, elastic), wait);
                from_agent::Message::AwaitOrder(v1::AwaitOrder { bid: bid.map(Into::into), ..asked })
            }
            Question::Bid { job, bid, reply } => {
                let request = self.bids.ask(reply)?;
                let (tenant, bid) = (tenant.to_owned(), Some(bid.into()));
                from_agent::Message::SetBid(v1::SetBid { request, tenant, job, bid })
            }
        })
    }

    /// What to say to control of processes that waited for events or orders and went away.
    pub(crate) fn abandoned(&mut self) -> Vec<from_agent::Message> {
        let mut readers = self.readers.abandoned();
        readers.retain(|_| self.cancels);
        let readers =
            readers.into_iter().map(|request| from_agent::Message::CancelRead(v1::CancelRead { request }));
        let runners = self.runners.abandoned().into_iter();
        let runners = runners.map(|request| from_agent::Message::CancelOrder(v1::CancelOrder { request }));
        readers.chain(runners).collect()
    }

    /// Control's answer, for who waits for it.
    pub(crate) fn answer(&mut self, answer: ControlAnswer) {
        match answer {
            ControlAnswer::Events(answer) => self.readers.answer(answer.request, batch(answer)),
            ControlAnswer::Negotiated(answer) => self.negotiations.answer(answer.request, answer.outcome()),
            ControlAnswer::Iteration(answer) => self.iterations.answer(answer.request, answer.choice()),
            ControlAnswer::Hinted(answer) => self.hints.answer(answer.request, answer.outcome()),
            ControlAnswer::Runner(answer) => self.runners.answer(answer.request, answer.priced_outcome()),
            ControlAnswer::Bid(answer) => self.bids.answer(answer.request, answer.outcome()),
        }
    }
}
