//! Status requests that wait for agents to report.

use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::output::SessionId;
use harmonaize_api::v1::{self, to_agent};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Most status requests at a time; one more is answered with what control knows.
const MOST_QUESTIONS: usize = 64;

/// Most that is taken of what an agent reports. The limits are of processes, communicators, operations in
/// flight of each, errors, and characters of a text.
const MOST_ATTACHMENTS: usize = 4096;
const MOST_COMMUNICATORS: usize = 4096;
const MOST_IN_FLIGHT: usize = 256;
const MOST_ERRORS: usize = 64;
const MOST_CHARS: usize = 256;

/// What agents reported.
pub(crate) type Reports = BTreeMap<SessionId, v1::Report>;

/// Status requests that wait for agents.
#[derive(Debug, Default)]
pub(crate) struct Questions {
    open: BTreeMap<u64, Question>,
    next: u64,
}

#[derive(Debug)]
struct Question {
    deadline: Duration,
    awaited: BTreeSet<SessionId>,
    reports: Reports,
}

impl Questions {
    /// Asks all agents. Returns the number of the request, which waits until `deadline` at the latest.
    pub(crate) fn ask(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, deadline: Duration) -> u64 {
        self.next += 1;
        let id = self.next;
        let awaited: BTreeSet<SessionId> = match self.open.len() < MOST_QUESTIONS {
            true => ctx.sessions.keys().copied().collect(),
            false => BTreeSet::new(),
        };
        for session in &awaited {
            effects.send(*session, to_agent::Message::ReportRequest(v1::ReportRequest { id }));
        }
        self.open.insert(id, Question { deadline, awaited, reports: BTreeMap::new() });
        id
    }

    /// Takes in what an agent reports.
    pub(crate) fn report(&mut self, ctx: &Ctx<'_>, from: SessionId, mut report: v1::Report) {
        if let Some(question) = self.open.get_mut(&report.id)
            && question.awaited.remove(&from)
        {
            bound(&mut report, ctx.settings.most_ranks as usize);
            question.reports.insert(from, report);
        }
    }

    /// Waits for an agent no longer.
    pub(crate) fn session_ended(&mut self, session: SessionId) {
        for question in self.open.values_mut() {
            question.awaited.remove(&session);
        }
    }

    /// Returns how many wait.
    #[cfg(feature = "testing")]
    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// Returns when the next has waited long enough.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        self.open.values().map(|question| question.deadline).min()
    }

    /// Takes the requests of which nobody is awaited any more, or that have waited long enough.
    pub(crate) fn take_answered(&mut self, now: Duration) -> Vec<(u64, Reports)> {
        let over = |question: &mut Question| question.awaited.is_empty() || question.deadline <= now;
        let over = self.open.extract_if(.., |_, question| over(question));
        over.map(|(id, question)| (id, question.reports)).collect()
    }
}

/// Cuts what an agent reports to what one can have to report. It is kept until all have answered, and goes to
/// operators' terminals.
fn bound(report: &mut v1::Report, most_ranks: usize) {
    report.attachments.truncate(MOST_ATTACHMENTS);
    report.communicators.truncate(MOST_COMMUNICATORS);
    report.recent_errors.truncate(MOST_ERRORS);
    report.attachments.iter_mut().for_each(|attachment| cut(&mut attachment.tenant));
    report.recent_errors.iter_mut().for_each(cut);
    for communicator in &mut report.communicators {
        communicator.in_flight.truncate(MOST_IN_FLIGHT);
        for operation in &mut communicator.in_flight {
            operation.waiting_for.truncate(most_ranks);
            cut(&mut operation.call);
        }
        communicator.messages.truncate(MOST_IN_FLIGHT);
        for message in &mut communicator.messages {
            message.waiting_for.truncate(most_ranks);
            cut(&mut message.call);
        }
    }
}

fn cut(text: &mut String) {
    if text.len() > MOST_CHARS || text.chars().any(char::is_control) {
        *text = text.chars().filter(|c| !c.is_control()).take(MOST_CHARS).collect();
    }
}
