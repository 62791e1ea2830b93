//! Before a time-out is declared, everyone is asked who has called what, so that the error can name the missing.

use crate::communicator::Communicator;
use crate::message::Control;
use crate::{Failure, Nanos};
use harmonaize_abi::{Rank, Signature};
use harmonaize_plan::{Group, Participant};

/// Most times that an inquiry goes back to an earlier operation: a peer that always knows an earlier one gets nowhere.
const MAX_LOWERED: u32 = 8;

type Answer = (Vec<Rank>, Option<(Rank, Signature)>);

/// An inquiry under way.
#[derive(Debug)]
pub(crate) struct Inquiry {
    pub(crate) operation: u64,
    pub(crate) deadline: Nanos,
    /// Whose messages made no sense, and in which operation. If up to that one nobody called anything else, it is to blame.
    suspect: Option<(Participant, u64)>,
    /// How often it went back to an earlier operation.
    lowered: u32,
    answers: Vec<Option<Answer>>,
}

impl Inquiry {
    pub(crate) fn new(
        operation: u64,
        deadline: Nanos,
        suspect: Option<(Participant, u64)>,
        participants: u32,
    ) -> Self {
        Self { operation, deadline, suspect, lowered: 0, answers: vec![None; participants as usize] }
    }

    pub(crate) fn answer(&mut self, from: Participant, missing: Vec<Rank>, call: Option<(Rank, Signature)>) {
        if let Some(answer) = self.answers.get_mut(from.0 as usize) {
            *answer = Some((missing, call));
        }
    }

    pub(crate) fn complete(&self) -> bool {
        self.answers.iter().all(Option::is_some)
    }

    /// What the answers say. Who has not answered counts as missing with all its ranks.
    pub(crate) fn failure(&self, group: &Group) -> Failure {
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

impl Communicator {
    /// Something has moved: nobody need be asked.
    pub(crate) fn note_progress(&mut self, now: Nanos) {
        self.last_progress = now;
        self.inquiry.take_if(|inquiry| inquiry.suspect.is_none());
    }

    /// When [`Communicator::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        let open = self.failure().is_none();
        self.inquiry_timeout().into_iter().chain(self.aggregation_timeout().filter(|_| open)).min()
    }

    fn inquiry_timeout(&self) -> Option<Nanos> {
        if self.failure().is_some() {
            return None;
        }
        match &self.inquiry {
            Some(inquiry) => Some(inquiry.deadline),
            None => self.operations.oldest().map(|_| self.last_progress.after(self.timeouts.operation)),
        }
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Nanos) {
        self.handle_aggregation_timeout(now);
        if self.inquiry_timeout().is_none_or(|due| now < due) {
            return;
        }
        if let Some(inquiry) = &self.inquiry {
            let verdict = inquiry.failure(&self.group);
            self.fail(verdict);
        } else if let Some(number) = self.operations.oldest().map(|operation| operation.number) {
            self.send_inquiry(now.after(self.timeouts.inquiry), number, None);
        }
    }

    /// Asks everybody who has called what.
    fn send_inquiry(&mut self, deadline: Nanos, number: u64, suspect: Option<(Participant, u64)>) {
        let mut inquiry = Inquiry::new(number, deadline, suspect, self.group.participants());
        inquiry.answer(self.me, self.operations.missing(number), self.operations.caller(number));
        self.inquiry = Some(inquiry);
        self.broadcast_control(&Control::Inquire { operation: number });
        self.conclude();
    }

    /// A message of a peer is not what the plan says. Either it called something else, or it is broken.
    pub(crate) fn handle_unexpected(&mut self, now: Nanos, peer: Participant, operation: u64) {
        if self.inquiry.as_ref().is_none_or(|inquiry| inquiry.suspect.is_none()) {
            let operation = operation.min(self.operations.bounds().1);
            let first = self.operations.oldest_remembered().min(operation);
            self.send_inquiry(now.after(self.timeouts.inquiry), first, Some((peer, operation)));
        }
    }

    pub(crate) fn handle_inquiry(&mut self, from: Participant, operation: u64) {
        // Who has ended an operation that others are still in asks for too late a one.
        let oldest = self.operations.oldest().map(|oldest| oldest.number);
        let earlier = oldest.filter(|oldest| *oldest < operation);
        for operation in earlier.into_iter().chain([operation]) {
            let missing = self.operations.missing(operation);
            let call = self.operations.caller(operation);
            self.send_control(from, Control::Answer { operation, missing, call });
        }
    }

    pub(crate) fn handle_answer(
        &mut self,
        now: Nanos,
        from: Participant,
        operation: u64,
        missing: Vec<Rank>,
        call: Option<(Rank, Signature)>,
    ) {
        let Some(inquiry) = &mut self.inquiry else { return };
        if inquiry.operation == operation {
            inquiry.answer(from, missing, call);
            self.conclude();
        } else if operation < inquiry.operation && inquiry.suspect.is_none() && inquiry.lowered < MAX_LOWERED
        {
            let lowered = inquiry.lowered + 1;
            self.send_inquiry(now.after(self.timeouts.inquiry), operation, None);
            if let Some(inquiry) = &mut self.inquiry {
                inquiry.lowered = lowered;
            }
        }
    }

    fn conclude(&mut self) {
        let Some(inquiry) = self.inquiry.as_ref().filter(|inquiry| inquiry.complete()) else { return };
        let verdict = inquiry.failure(&self.group);
        let (deadline, next) = (inquiry.deadline, inquiry.operation.saturating_add(1));
        match (&verdict, inquiry.suspect) {
            // Segments are counted wrongly from the first operation on that differs.
            (Failure::Internal { .. }, Some((suspect, last))) if next <= last => {
                self.send_inquiry(deadline, next, Some((suspect, last)));
            }
            _ => self.fail(verdict),
        }
    }
}
