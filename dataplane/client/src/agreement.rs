//! Agreements: what a tenant wants of its communicators and expects of them, what the provider promises, and what it chooses within
//! ranges.

use crate::attach::Client;
use crate::events::LOOK;
use crate::{Agreement, Choice, Constraints, Error, Hints, Knobs, Negotiated, Reason};
use harmonaize_abi::session::{Answer, Checkpoint, Request, Unanswered};
use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// How long the provider may take: what it promises is on disk by then.
const WITHIN: Duration = Duration::from_secs(10);

/// Most proposals of one [`Client::negotiate`].
const MOST_ROUNDS: usize = 8;

fn unanswered(why: Unanswered) -> Error {
    Error::unanswered(why, Error::Agreement)
}

/// What was chosen lately, by communicator: iterations may be of a few milliseconds, and what is chosen changes once a second.
#[derive(Debug, Default)]
pub(crate) struct Chosen(BTreeMap<String, (Instant, Knobs, Choice)>);

impl Chosen {
    /// The knobs but for what differs from one iteration to the next.
    fn alike(knobs: &Knobs) -> Knobs {
        let checkpoint = knobs.checkpoint.map(|known| Checkpoint { last: Duration::ZERO, ..known });
        Knobs { checkpoint, ..*knobs }
    }

    /// What stands for this iteration, too. Not where a checkpoint is due.
    fn recall(&self, now: Instant, communicator: &str, knobs: &Knobs) -> Option<Choice> {
        let (at, of, choice) = self.0.get(communicator)?;
        let fresh = now.saturating_duration_since(*at) < LOOK;
        (fresh && *of == Self::alike(knobs) && !knobs.alone().checkpoint).then_some(*choice)
    }

    /// What was chosen stands for a moment, but to save is for once.
    fn note(&mut self, now: Instant, communicator: String, knobs: &Knobs, choice: Choice) {
        self.0.retain(|_, (at, ..)| now.saturating_duration_since(*at) < LOOK);
        if choice.checkpoint {
            self.0.remove(&communicator);
        } else {
            self.0.insert(communicator, (now, Self::alike(knobs), choice));
        }
    }
}

impl Client {
    /// Proposes what the provider shall promise for the tenant's communicator of this name, in which this process need not be. What is
    /// agreed on takes the place of what was before, and ends with the communicator; no constraints give everything back. A
    /// refusal says why, and what could be had: to take that, propose it.
    ///
    /// ```no_run
    /// # use harmonaize_client::{AttachOptions, Client, Constraints, Negotiated, Priority};
    /// # use std::time::Duration;
    /// # fn main() -> Result<(), harmonaize_client::Error> {
    /// # let client = Client::attach("/run/harmonaize/tenant.sock", AttachOptions::default())?;
    /// let wanted = Constraints::new().priority(Priority::High).p99(64 << 10, Duration::from_millis(5));
    /// match client.propose("job", &wanted)? {
    ///     Negotiated::Agreed(agreement) => println!("agreed on; it costs {} an hour", agreement.price),
    ///     Negotiated::Refused { reasons, counter } => println!("{reasons:?}; could be had: {counter:?}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Agreement`] where nothing came of it: no such communicator runs, there were too many proposals lately, or the
    /// provider cannot be asked now. [`Error::TooOften`] where the tenant has asked the provider too much through this agent, whatever it
    /// was: more than 600 times at once, or than 100 times a second and attachment in the long run.
    pub fn propose(&self, communicator: &str, constraints: &Constraints) -> Result<Negotiated, Error> {
        self.ask(communicator, Some(constraints.clone()))
    }

    /// Proposes, and goes on with what `amend` makes of each refusal (the counter-offer and the reasons) until something is agreed on
    /// or `amend` gives up. `Some(counter.clone())` takes every counter-offer.
    ///
    /// # Errors
    /// As [`Client::propose`].
    pub fn negotiate(
        &self,
        communicator: &str,
        constraints: &Constraints,
        mut amend: impl FnMut(&Constraints, &[Reason]) -> Option<Constraints>,
    ) -> Result<Negotiated, Error> {
        let mut wanted = constraints.clone();
        for round in 1.. {
            let outcome = self.propose(communicator, &wanted)?;
            let amended = match &outcome {
                Negotiated::Refused { reasons, counter: Some(counter) } if round < MOST_ROUNDS => {
                    amend(counter, reasons)
                }
                _ => None,
            };
            match amended {
                Some(amended) => wanted = amended,
                None => return Ok(outcome),
            }
        }
        Err(Error::Agreement("no round was left".into()))
    }

    /// What the provider has promised for the communicator of this name, what of it is not kept now, and how it was kept.
    ///
    /// # Errors
    /// As [`Client::propose`].
    pub fn agreement(&self, communicator: &str) -> Result<Agreement, Error> {
        match self.ask(communicator, None)? {
            Negotiated::Agreed(agreement) => Ok(agreement),
            Negotiated::Refused { .. } => {
                Err(Error::Protocol("the agent refused what was not proposed".into()))
            }
        }
    }

    /// What the provider chooses, within what is left to it, for the next iteration of the job on this communicator: to be asked by one
    /// rank, which tells the others. Where the provider cannot be asked it is the least accumulation, and a checkpoint once
    /// one is due. Within 50 ms of a choice that was not to save, the same stands for alike knobs without asking, unless a checkpoint is due.
    ///
    /// # Errors
    /// [`Error::Agreement`] where the knobs make no sense or no such communicator runs, [`Error::TooOften`] as [`Client::propose`].
    pub fn iteration(&self, communicator: &str, knobs: &Knobs) -> Result<Choice, Error> {
        let chosen = || self.chosen().lock().unwrap_or_else(PoisonError::into_inner);
        let recalled = chosen().recall(Instant::now(), communicator, knobs);
        if let Some(choice) = recalled {
            self.shared().poll().alive()?;
            return Ok(choice);
        }
        let (communicator, knobs) = (communicator.to_owned(), *knobs);
        let asked = communicator.clone();
        let choice = match self.answered(|id| Request::Iteration { id, communicator: asked, knobs })? {
            Answer::Iteration { choice, .. } => choice.map_err(unanswered)?,
            _ => return Err(Error::Protocol("the agent answered an iteration with something else".into())),
        };
        chosen().note(Instant::now(), communicator, &knobs, choice);
        Ok(choice)
    }

    /// Says what is expected of the tenant's communicator of this name, in which this process need not be, in place of what was said before:
    /// for the provider's first plans, until it has measured. It promises nothing, and ends with the communicator.
    ///
    /// ```no_run
    /// # use harmonaize_client::{AttachOptions, Client, Collective, Hints};
    /// # use std::time::Duration;
    /// # fn main() -> Result<(), harmonaize_client::Error> {
    /// # let client = Client::attach("/run/harmonaize/tenant.sock", AttachOptions::default())?;
    /// let hints = Hints::new().period(Duration::from_millis(50)).expect(Collective::AllReduce, 64 << 20);
    /// client.hint("job", &hints)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Agreement`] where the hints make no sense, no such communicator runs, there were too many lately, or the provider
    /// cannot be asked now; [`Error::TooOften`] as [`Client::propose`].
    pub fn hint(&self, communicator: &str, hints: &Hints) -> Result<(), Error> {
        let (communicator, hints) = (communicator.to_owned(), hints.clone());
        match self.answered(|id| Request::Hint { id, communicator, hints })? {
            Answer::Hinted { refused, .. } => refused.map_or(Ok(()), |why| Err(unanswered(why))),
            _ => Err(Error::Protocol("the agent answered hints with something else".into())),
        }
    }

    fn ask(&self, communicator: &str, propose: Option<Constraints>) -> Result<Negotiated, Error> {
        let communicator = communicator.to_owned();
        match self.answered(|id| Request::Negotiate { id, communicator, propose })? {
            Answer::Negotiated { outcome, .. } => outcome.map_err(unanswered),
            _ => Err(Error::Protocol("the agent answered a proposal with something else".into())),
        }
    }

    fn answered(&self, request: impl FnOnce(u64) -> Request) -> Result<Answer, Error> {
        let shared = self.shared();
        let id = shared.lock().request(request)?;
        let answer = shared.wait(Instant::now().checked_add(WITHIN), |state| state.answer(id))?;
        answer.ok_or_else(|| {
            shared.lock().forget(id);
            Error::Agreement(format!("no answer from the agent within {WITHIN:?}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::session::{Because, Priority};

    #[test]
    fn a_choice_stands_for_a_moment_unless_it_was_to_save_or_saving_is_due() {
        let (mut chosen, begin) = (Chosen::default(), Instant::now());
        let second = Duration::from_secs(1);
        let knobs = |most, last| {
            let checkpoint =
                Checkpoint { every: second * 60, cost: second, last, importance: Priority::Normal };
            Knobs { accumulate: (1, most), checkpoint: Some(checkpoint) }
        };
        let choice = Choice { accumulate: 3, checkpoint: false, because: Because::Slow };
        let recall = |chosen: &Chosen, after: Duration, name: &str, knobs: Knobs| {
            chosen.recall(begin + after, name, &knobs).is_some()
        };
        let soon = LOOK / 2;
        chosen.note(begin, "job".to_owned(), &knobs(8, second), choice);
        assert_eq!(chosen.recall(begin + soon, "job", &knobs(8, second + soon)), Some(choice));
        assert!(!recall(&chosen, LOOK, "job", knobs(8, second)));
        assert!(!recall(&chosen, soon, "other", knobs(8, second)));
        assert!(!recall(&chosen, soon, "job", knobs(9, second)));
        assert!(!recall(&chosen, soon, "job", knobs(8, second * 60)), "saving is due");
        assert!(!recall(&chosen, soon, "job", Knobs { checkpoint: None, ..knobs(8, second) }));
        chosen.note(begin, "job".to_owned(), &knobs(8, second), Choice { checkpoint: true, ..choice });
        assert!(!recall(&chosen, soon, "job", knobs(8, second)), "it saves once");
        // What is old is not kept.
        chosen.note(begin, "job".to_owned(), &knobs(8, second), choice);
        chosen.note(begin + LOOK, "other".to_owned(), &knobs(8, second), choice);
        assert_eq!(chosen.0.len(), 1);
    }
}
