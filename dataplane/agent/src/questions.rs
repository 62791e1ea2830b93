//! What tenants ask of control through their agent, and who waits for which answer.

mod asked;
mod events;

use crate::control::Answered;
use crate::session::Question;
use asked::Asked;
use events::{batch, read_events};
use harmonaize_abi::session::{Choice, EventBatch, Negotiated};
use harmonaize_api::v1::{self, from_agent};

/// Questions of all kinds.
#[derive(Debug, Default)]
pub(crate) struct Questions {
    readers: Asked<EventBatch>,
    negotiations: Asked<Negotiated>,
    iterations: Asked<Choice>,
    hints: Asked<()>,
}

impl Questions {
    /// A session with control has begun, which takes what it says that it does, or has ended.
    pub(crate) fn session(&mut self, welcome: Option<&v1::Welcome>) {
        let takes = |kind: fn(&v1::Welcome) -> bool| welcome.is_some_and(kind);
        self.readers.session(takes(|welcome| welcome.events));
        self.negotiations.session(takes(|welcome| welcome.agreements));
        self.iterations.session(takes(|welcome| welcome.agreements));
        self.hints.session(takes(|welcome| welcome.hints));
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
            Question::Iteration { communicator, knobs, reply } => {
                let request = self.iterations.ask(reply)?;
                let asked = v1::BeginIteration::of(request, tenant, communicator, &knobs);
                from_agent::Message::BeginIteration(asked)
            }
            Question::Hint { communicator, hints, reply } => {
                let request = self.hints.ask(reply)?;
                let (tenant, hints) = (tenant.to_owned(), Some((&hints).into()));
                from_agent::Message::Hint(v1::Hint { request, tenant, communicator, hints })
            }
        })
    }

    /// Control's answer, for who waits for it.
    pub(crate) fn answer(&mut self, answer: Answered) {
        match answer {
            Answered::Events(answer) => self.readers.answer(answer.request, batch(answer)),
            Answered::Negotiated(answer) => self.negotiations.answer(answer.request, answer.outcome()),
            Answered::Iteration(answer) => self.iterations.answer(answer.request, answer.choice()),
            Answered::Hinted(answer) => self.hints.answer(answer.request, answer.outcome()),
        }
    }
}
