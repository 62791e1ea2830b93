//! Where nothing moves, everyone is asked who has called what. That is soon, and again ever more rarely, since ranks
//! that called different things wait for each other. It is also before a time-out is declared, so that the error can
//! name the missing.

use crate::failure::Failure;
use crate::message::Control;
use crate::shared::Shared;
use harmonaize_abi::{Nanos, OperationId, Rank, Signature};
use harmonaize_plan::{Group, Participant};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Most times that an inquiry goes back to an earlier operation. A peer that always knows an earlier one gets nowhere.
const MAX_LOWERED: u32 = 8;

/// Most doublings of the time after which to ask early: 1,024 times the longest inquiry. Later ones are that far apart.
const MAX_DOUBLINGS: u32 = 10;

/// What a participant knows of an operation.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// Its ranks that have not called it.
    pub(crate) missing: Vec<Rank>,
    /// What one of its ranks called.
    pub(crate) call: Option<(Rank, Signature)>,
    /// What one of its ranks reported of the count in doubt.
    pub(crate) reported: Option<(Rank, u64)>,
}

impl Answer {
    fn new(shared: &Shared, operation: OperationId, count: Option<u32>) -> Self {
        let operations = &shared.operations;
        Self {
            missing: operations.missing(operation),
            call: operations.caller(operation),
            reported: count.and_then(|count| operations.reported(operation, count)),
        }
    }
}

/// Whose message made no sense.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Suspect {
    pub(crate) peer: Participant,
    /// In which operation.
    pub(crate) operation: OperationId,
    /// The count that it did not have the length of, if that alone was wrong.
    pub(crate) count: Option<u32>,
}

/// An inquiry under way.
#[derive(Debug, Serialize, Deserialize)]
struct Inquiry {
    operation: OperationId,
    deadline: Nanos,
    /// Whose messages made no sense, and in which operation. If up to that one nobody called anything else, it is to blame.
    suspect: Option<Suspect>,
    /// Whether it ends in a failure whatever the answers are. An early one ends so only if calls differ.
    last: bool,
    /// How often it went back to an earlier operation.
    lowered: u32,
    answers: Vec<Option<Answer>>,
}

impl Inquiry {
    fn new(
        operation: OperationId,
        deadline: Nanos,
        suspect: Option<Suspect>,
        last: bool,
        participants: u32,
    ) -> Self {
        let answers = vec![None; participants as usize];
        Self { operation, deadline, suspect, last, lowered: 0, answers }
    }

    /// The count that is asked about.
    fn count(&self) -> Option<u32> {
        self.suspect.filter(|suspect| suspect.operation == self.operation)?.count
    }

    fn answer(&mut self, from: Participant, told: Answer) {
        if let Some(answer) = self.answers.get_mut(from.0 as usize) {
            *answer = Some(told);
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
                Some(Answer { missing: absent, call, reported: _ }) => {
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
        if let (Some(count), Some((_, signature))) = (self.count(), calls.first()) {
            let mut reported: Vec<_> =
                self.answers.iter().flatten().filter_map(|answer| answer.reported).collect();
            reported.sort_unstable();
            // Who has ended it, and called more since, no longer knows what it reported.
            let suspect =
                self.suspect.and_then(|suspect| self.answers.get(suspect.peer.0 as usize)?.as_ref());
            let forgot = suspect.is_some_and(|answer| answer.call.is_none() && answer.missing.is_empty());
            if forgot
                || reported.iter().any(|(_, other)| reported.first().is_some_and(|(_, first)| first != other))
            {
                return Failure::of_counts(operation, signature.collective, group.ranks(), count, reported);
            }
        }
        if let Some(suspect) = self.suspect {
            return Failure::Internal { ranks: group.local(suspect.peer).to_vec() };
        }
        missing.sort_unstable();
        Failure::Timeout { operation, signature: calls.first().map(|(_, signature)| *signature), missing }
    }
}

/// When something last moved, and the inquiry that is under way when nothing does.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Inquiries {
    /// The most that one may take.
    longest: Duration,
    open: Option<Inquiry>,
    last_progress: Nanos,
    /// Early inquiries since then.
    early: u32,
}

impl Inquiries {
    pub(crate) fn new(longest: Duration) -> Self {
        Self { longest, open: None, last_progress: Nanos(0), early: 0 }
    }

    /// Notes that time counts from now: a step was issued.
    pub(crate) fn restart(&mut self, now: Nanos) {
        debug_assert!(now >= self.last_progress, "time goes back");
        self.last_progress = now;
        self.early = 0;
    }

    /// Notes that something has moved: nobody need be asked.
    pub(crate) fn note_progress(&mut self, now: Nanos) {
        self.restart(now);
        self.open.take_if(|inquiry| inquiry.suspect.is_none());
    }

    /// When something of the collectives last moved.
    pub(crate) fn last_progress(&self) -> Nanos {
        self.last_progress
    }

    pub(crate) fn poll_timeout(&self, shared: &Shared) -> Option<Nanos> {
        if shared.has_failed() {
            return None;
        }
        match &self.open {
            Some(inquiry) => Some(inquiry.deadline),
            None => self.due(shared).map(|(due, _)| due),
        }
    }

    /// When to ask next, and how long to wait for answers before the operation fails; none for an early inquiry.
    fn due(&self, shared: &Shared) -> Option<(Nanos, Option<Duration>)> {
        let (expiry, timeout) = shared.operations.expiry(self.last_progress)?;
        let quiet_since =
            shared.operations.oldest().map_or(Nanos(0), |oldest| oldest.since).max(self.last_progress);
        let early = quiet_since.after(self.longest.saturating_mul(1 << self.early.min(MAX_DOUBLINGS)));
        // Its answers are there before the last one begins.
        if early.after(self.longest) < expiry {
            return Some((early, None));
        }
        Some((expiry, Some(self.longest.min(timeout / 4))))
    }

    pub(crate) fn handle_timeout(&mut self, now: Nanos, shared: &mut Shared) {
        if self.poll_timeout(shared).is_none_or(|due| now < due) {
            return;
        }
        if let Some(inquiry) = self.open.take() {
            if inquiry.last {
                shared.fail(inquiry.failure(&shared.group));
            }
        } else if let Some((_, wait)) = self.due(shared) {
            self.early = self.early.saturating_add(1);
            let deadline = now.after(wait.unwrap_or(self.longest));
            self.inquire(shared, deadline, shared.operations.bounds().0, None, wait.is_some());
        }
    }

    /// Asks everybody who has called what.
    fn inquire(
        &mut self,
        shared: &mut Shared,
        deadline: Nanos,
        operation: OperationId,
        suspect: Option<Suspect>,
        last: bool,
    ) {
        let participants = shared.group.participants();
        let mut inquiry = Inquiry::new(operation, deadline, suspect, last, participants);
        let count = inquiry.count();
        inquiry.answer(shared.me, Answer::new(shared, operation, count));
        self.open = Some(inquiry);
        shared.broadcast(&Control::Inquire { operation, count });
        self.conclude(shared);
    }

    /// A message of a peer is not what the plan says. Either it called something else, or it is broken.
    pub(crate) fn handle_unexpected(&mut self, now: Nanos, shared: &mut Shared, suspect: Suspect) {
        if self.open.as_ref().is_none_or(|inquiry| inquiry.suspect.is_none()) {
            let operation = suspect.operation.min(shared.operations.bounds().1);
            let first = shared.operations.oldest_remembered().min(operation);
            let suspect = Suspect { operation, ..suspect };
            self.inquire(shared, now.after(self.longest), first, Some(suspect), true);
        }
    }

    pub(crate) fn handle_answer(
        &mut self,
        now: Nanos,
        shared: &mut Shared,
        from: Participant,
        (operation, count): (OperationId, Option<u32>),
        answer: Answer,
    ) {
        let Some(inquiry) = &mut self.open else { return };
        if (inquiry.operation, inquiry.count()) == (operation, count) {
            inquiry.answer(from, answer);
            self.conclude(shared);
        } else if operation < inquiry.operation && inquiry.suspect.is_none() && inquiry.lowered < MAX_LOWERED
        {
            let (lowered, last) = (inquiry.lowered + 1, inquiry.last);
            let deadline = if last { now.after(self.longest) } else { inquiry.deadline };
            self.inquire(shared, deadline, operation, None, last);
            if let Some(inquiry) = &mut self.open {
                inquiry.lowered = lowered;
            }
        }
    }

    fn conclude(&mut self, shared: &mut Shared) {
        let Some(inquiry) = self.open.take_if(|inquiry| inquiry.complete()) else { return };
        let failure = inquiry.failure(&shared.group);
        let next = inquiry.operation.next();
        match (&failure, inquiry.suspect) {
            // Segments are counted wrongly from the first operation on that differs.
            (Failure::Internal { .. }, Some(suspect)) if next <= suspect.operation => {
                self.inquire(shared, inquiry.deadline, next, Some(suspect), true);
            }
            (Failure::Timeout { .. }, None) if !inquiry.last => {}
            _ => shared.fail(failure),
        }
    }
}

/// Answers a peer's inquiry.
pub(crate) fn answer(shared: &mut Shared, to: Participant, operation: OperationId, count: Option<u32>) {
    // Who has ended an operation that others are still in asks for too late a one.
    let oldest = shared.operations.oldest().map(|oldest| oldest.number);
    let earlier = oldest.filter(|oldest| *oldest < operation);
    for (operation, count) in earlier.map(|earlier| (earlier, None)).into_iter().chain([(operation, count)]) {
        let Answer { missing, call, reported } = Answer::new(shared, operation, count);
        shared.send(to, Control::Answer { operation, count, missing, call, reported });
    }
}
