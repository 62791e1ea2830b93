//! Before a time-out is declared, everyone is asked who has called what, so that the error can name the missing.

use crate::failure::Failure;
use crate::message::Control;
use crate::shared::Shared;
use harmonaize_abi::{Nanos, Rank, Signature};
use harmonaize_plan::{Group, Participant};
use std::time::Duration;

/// Most times that an inquiry goes back to an earlier operation: a peer that always knows an earlier one gets nowhere.
const MAX_LOWERED: u32 = 8;

type Answer = (Vec<Rank>, Option<(Rank, Signature)>);

/// An inquiry under way.
#[derive(Debug)]
struct Inquiry {
    operation: u64,
    deadline: Nanos,
    /// Whose messages made no sense, and in which operation. If up to that one nobody called anything else, it is to blame.
    suspect: Option<(Participant, u64)>,
    /// How often it went back to an earlier operation.
    lowered: u32,
    answers: Vec<Option<Answer>>,
}

impl Inquiry {
    fn new(operation: u64, deadline: Nanos, suspect: Option<(Participant, u64)>, participants: u32) -> Self {
        Self { operation, deadline, suspect, lowered: 0, answers: vec![None; participants as usize] }
    }

    fn answer(&mut self, from: Participant, missing: Vec<Rank>, call: Option<(Rank, Signature)>) {
        if let Some(answer) = self.answers.get_mut(from.0 as usize) {
            *answer = Some((missing, call));
        }
    }

    fn complete(&self) -> bool {
        self.answers.iter().all(Option::is_some)
    }

    /// What the answers say. Who has not answered counts as missing with all its ranks.
    fn failure(&self, group: &Group) -> Failure {
        let operation = self.operation;
        let mut calls: Vec<(Rank, Signature)> = Vec::new();
        let mut missing = Vec::new();
        for (index, answer) in self.answers.iter().enumerate() {
            let local = group.local(Participant(index as u32));
            match answer {
                None => missing.extend_from_slice(local),
                Some((absent, call)) => {
                    missing.extend(absent.iter().filter(|rank| local.contains(rank)));
                    if let Some((rank, signature)) = call
                        && calls.iter().all(|(_, known)| known != signature)
                    {
                        calls.push((*rank, *signature));
                    }
                }
            }
        }
        if calls.len() > 1 {
            return Failure::Mismatch { operation, calls };
        }
        if let Some((suspect, _)) = self.suspect {
            return Failure::Internal { ranks: group.local(suspect).to_vec() };
        }
        missing.sort_unstable();
        Failure::Timeout { operation, signature: calls.first().map(|(_, signature)| *signature), missing }
    }
}

/// When something last moved, and the inquiry that is under way when nothing does.
#[derive(Debug)]
pub(crate) struct Inquiries {
    /// The most that one may take.
    longest: Duration,
    open: Option<Inquiry>,
    last_progress: Nanos,
}

impl Inquiries {
    pub(crate) fn new(longest: Duration) -> Self {
        Self { longest, open: None, last_progress: Nanos(0) }
    }

    /// Notes that time counts from now: a step was issued.
    pub(crate) fn restart(&mut self, now: Nanos) {
        debug_assert!(now >= self.last_progress, "time goes back");
        self.last_progress = now;
    }

    /// Notes that something has moved: nobody need be asked.
    pub(crate) fn note_progress(&mut self, now: Nanos) {
        self.restart(now);
        self.open.take_if(|inquiry| inquiry.suspect.is_none());
    }

    pub(crate) fn poll_timeout(&self, shared: &Shared) -> Option<Nanos> {
        if shared.has_failed() {
            return None;
        }
        match &self.open {
            Some(inquiry) => Some(inquiry.deadline),
            None => shared.operations.expiry(self.last_progress).map(|(due, _)| due),
        }
    }

    pub(crate) fn handle_timeout(&mut self, now: Nanos, shared: &mut Shared) {
        if self.poll_timeout(shared).is_none_or(|due| now < due) {
            return;
        }
        if let Some(inquiry) = self.open.take() {
            shared.fail(inquiry.failure(&shared.group));
        } else if let Some((_, timeout)) = shared.operations.expiry(self.last_progress) {
            let deadline = now.after(self.longest.min(timeout / 4));
            self.inquire(shared, deadline, shared.operations.bounds().0, None);
        }
    }

    /// Asks everybody who has called what.
    fn inquire(
        &mut self,
        shared: &mut Shared,
        deadline: Nanos,
        operation: u64,
        suspect: Option<(Participant, u64)>,
    ) {
        let mut inquiry = Inquiry::new(operation, deadline, suspect, shared.group.participants());
        let operations = &shared.operations;
        inquiry.answer(shared.me, operations.missing(operation), operations.caller(operation));
        self.open = Some(inquiry);
        shared.broadcast(&Control::Inquire { operation });
        self.conclude(shared);
    }

    /// A message of a peer is not what the plan says. Either it called something else, or it is broken.
    pub(crate) fn handle_unexpected(
        &mut self,
        now: Nanos,
        shared: &mut Shared,
        peer: Participant,
        operation: u64,
    ) {
        if self.open.as_ref().is_none_or(|inquiry| inquiry.suspect.is_none()) {
            let operation = operation.min(shared.operations.bounds().1);
            let first = shared.operations.oldest_remembered().min(operation);
            self.inquire(shared, now.after(self.longest), first, Some((peer, operation)));
        }
    }

    pub(crate) fn handle_answer(
        &mut self,
        now: Nanos,
        shared: &mut Shared,
        from: Participant,
        operation: u64,
        (missing, call): Answer,
    ) {
        let Some(inquiry) = &mut self.open else { return };
        if inquiry.operation == operation {
            inquiry.answer(from, missing, call);
            self.conclude(shared);
        } else if operation < inquiry.operation && inquiry.suspect.is_none() && inquiry.lowered < MAX_LOWERED
        {
            let lowered = inquiry.lowered + 1;
            self.inquire(shared, now.after(self.longest), operation, None);
            if let Some(inquiry) = &mut self.open {
                inquiry.lowered = lowered;
            }
        }
    }

    fn conclude(&mut self, shared: &mut Shared) {
        let Some(inquiry) = self.open.take_if(|inquiry| inquiry.complete()) else { return };
        let failure = inquiry.failure(&shared.group);
        let next = inquiry.operation.saturating_add(1);
        match (&failure, inquiry.suspect) {
            // Segments are counted wrongly from the first operation on that differs.
            (Failure::Internal { .. }, Some((suspect, last))) if next <= last => {
                self.inquire(shared, inquiry.deadline, next, Some((suspect, last)));
            }
            _ => shared.fail(failure),
        }
    }
}

/// Answers a peer's inquiry.
pub(crate) fn answer(shared: &mut Shared, to: Participant, operation: u64) {
    // Who has ended an operation that others are still in asks for too late a one.
    let oldest = shared.operations.oldest().map(|oldest| oldest.number);
    let earlier = oldest.filter(|oldest| *oldest < operation);
    for operation in earlier.into_iter().chain([operation]) {
        let missing = shared.operations.missing(operation);
        let call = shared.operations.caller(operation);
        shared.send(to, Control::Answer { operation, missing, call });
    }
}
