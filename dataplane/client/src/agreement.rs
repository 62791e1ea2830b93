//! Agreements: what a tenant wants of its communicators, and what the provider promises. They also have what the tenant
//! expects of them, and what the provider chooses within ranges.

use crate::attach::Client;
use crate::events::POLL_INTERVAL;
use crate::{
    Agreement, BatchChoice, BatchKnobs, Choice, Constraints, Error, Hints, Knobs, Negotiated, ProtocolError,
    Reason, RequestKind,
};
use harmonaize_abi::session::{Answer, BATCHES, Checkpoint, Request, RequestError, TYPED_REFUSALS};
use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// How long the provider may take: what it promises is on disk by then.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Most proposals of one [`Client::negotiate`].
const MAX_ROUNDS: usize = 8;

fn request_error(why: RequestError) -> Error {
    Error::from_request_error(why, Error::Agreement)
}

/// What was chosen lately, by communicator. Iterations may be of a few milliseconds, and what is chosen changes once a
/// second.
#[derive(Debug, Default)]
pub(crate) struct ChoiceCache(BTreeMap<String, (Instant, CacheKey, Chosen)>);

type CacheKey = (Knobs, Option<BatchKnobs>);
type Chosen = (Choice, Option<BatchChoice>);

impl ChoiceCache {
    /// The knobs but for what differs from one iteration to the next.
    fn cache_key((knobs, batch): CacheKey) -> CacheKey {
        let checkpoint = knobs.checkpoint.map(|known| Checkpoint { last: Duration::ZERO, ..known });
        let batch = batch.map(|batch| BatchKnobs { square: 0.0, trace: 0.0, ..batch });
        (Knobs { checkpoint, ..knobs }, batch)
    }

    /// What stands for this iteration, too. Not where a checkpoint is due.
    fn get(&self, now: Instant, communicator: &str, key: CacheKey) -> Option<Chosen> {
        let (at, of, chosen) = self.0.get(communicator)?;
        let fresh = now.saturating_duration_since(*at) < POLL_INTERVAL;
        (fresh && *of == Self::cache_key(key) && !key.0.fallback().checkpoint).then_some(*chosen)
    }

    /// What was chosen stands for a moment, but to save is for once.
    fn insert(&mut self, now: Instant, communicator: String, key: CacheKey, chosen: Chosen) {
        self.0.retain(|_, (at, ..)| now.saturating_duration_since(*at) < POLL_INTERVAL);
        if chosen.0.checkpoint {
            self.0.remove(&communicator);
        } else {
            self.0.insert(communicator, (now, Self::cache_key(key), chosen));
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
    ///     Negotiated::Agreed(agreement) => println!("agreement {}", agreement.number),
    ///     Negotiated::Refused { reasons, counter } => println!("{reasons:?}; could be had: {counter:?}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NoCommunicator`] where no such communicator runs. [`Error::Agreement`] where nothing came of it: there were too many
    /// proposals lately, or the provider cannot be asked now. [`Error::TooOften`] where the tenant has asked the provider too much through this agent, whatever it
    /// was: more than 600 times at once, or than 100 times a second and attachment in the long run.
    pub fn propose(&self, communicator: &str, constraints: &Constraints) -> Result<Negotiated, Error> {
        self.ask(communicator, Some(constraints.clone()))
    }

    /// Proposes, and goes on with what `amend` makes of each refusal. A refusal is the counter-offer and the reasons. It ends once
    /// something is agreed on or `amend` gives up. `Some(counter.clone())` takes every counter-offer.
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
                Negotiated::Refused { reasons, counter: Some(counter) } if round < MAX_ROUNDS => {
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

    /// Returns what the provider has promised for the communicator of this name. It also returns what of it is not kept
    /// now, and how it was kept.
    ///
    /// # Errors
    /// As [`Client::propose`].
    pub fn agreement(&self, communicator: &str) -> Result<Agreement, Error> {
        match self.ask(communicator, None)? {
            Negotiated::Agreed(agreement) => Ok(agreement),
            Negotiated::Refused { .. } => Err(ProtocolError::NotProposed.into()),
        }
    }

    /// What the provider chooses for the next iteration of the job on this communicator. It chooses within what is left to it, and is to be
    /// asked by one rank, which tells the others. Where the provider cannot be asked it is the least accumulation, and a checkpoint once
    /// one is due. Within 50 ms of a choice that was not to save, the same stands for alike knobs without asking, unless a checkpoint is
    /// due.
    ///
    /// # Errors
    /// [`Error::Agreement`] where the knobs make no sense, [`Error::NoCommunicator`] and [`Error::TooOften`] as [`Client::propose`].
    pub fn iteration(&self, communicator: &str, knobs: &Knobs) -> Result<Choice, Error> {
        self.choose(communicator, (*knobs, None)).map(|(choice, _)| choice)
    }

    /// As [`Client::iteration`], where the batch is left to the provider too. It is that of the range with the largest throughput times
    /// statistical efficiency, of `knobs.accumulate.1` micro-batches at most. No batch where the provider cannot be asked, or it or the
    /// agent is of a release that chooses none: then the job goes on with its own.
    ///
    /// # Errors
    /// As [`Client::iteration`]; [`Error::Agreement`] also where the communicator's ranks cannot make a batch of the range.
    pub fn iteration_with_batch(
        &self,
        communicator: &str,
        knobs: &Knobs,
        batch: &BatchKnobs,
    ) -> Result<(Choice, Option<BatchChoice>), Error> {
        self.choose(communicator, (*knobs, Some(*batch)))
    }

    fn choose(&self, communicator: &str, key: CacheKey) -> Result<Chosen, Error> {
        let cache = || self.choices().lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.shared().lock()?);
        let recalled = cache().get(Instant::now(), communicator, key);
        if let Some(chosen) = recalled {
            self.shared().poll()?.alive()?;
            return Ok(chosen);
        }
        let (knobs, batch) = key;
        let named = || communicator.to_owned();
        let bit = if batch.is_some() { BATCHES } else { 0 };
        let plain = |id: u64| Request::Iteration { id: id | bit, communicator: named(), knobs };
        let answer = match (self.answered(plain)?, batch) {
            (Answer::TakesBatches { .. }, Some(batch)) => {
                self.answered(|id| Request::Batch { id, communicator: named(), knobs, batch })?
            }
            (answer, _) => answer,
        };
        let chosen = match answer {
            Answer::Iteration { choice, .. } => (choice.map_err(request_error)?, None),
            Answer::Batch { choice, .. } => choice.map_err(request_error)?,
            _ => return Err(ProtocolError::Unexpected(RequestKind::Iteration).into()),
        };
        cache().insert(Instant::now(), named(), key, chosen);
        Ok(chosen)
    }

    /// Gives the provider hints for the tenant's communicator of this name, in place of those given before. They are for its first plans,
    /// until it has measured. This process need not be in the communicator. Hints promise nothing, and end with it.
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
    /// [`Error::Agreement`] where the hints make no sense, there were too many lately, or the provider cannot be asked now;
    /// [`Error::NoCommunicator`] and [`Error::TooOften`] as [`Client::propose`].
    pub fn hint(&self, communicator: &str, hints: &Hints) -> Result<(), Error> {
        let (communicator, hints) = (communicator.to_owned(), hints.clone());
        match self.answered(|id| Request::Hint { id, communicator, hints })? {
            Answer::Hinted { refused, .. } => refused.map_or(Ok(()), |why| Err(request_error(why))),
            _ => Err(ProtocolError::Unexpected(RequestKind::Hints).into()),
        }
    }

    fn ask(&self, communicator: &str, propose: Option<Constraints>) -> Result<Negotiated, Error> {
        let communicator = communicator.to_owned();
        match self.answered(|id| Request::Negotiate { id, communicator, propose })? {
            Answer::Negotiated { outcome, .. } => outcome.map_err(request_error),
            _ => Err(ProtocolError::Unexpected(RequestKind::Proposal).into()),
        }
    }

    fn answered(&self, request: impl FnOnce(u64) -> Request) -> Result<Answer, Error> {
        let shared = self.shared();
        let id = shared.lock()?.request(|id| request(id | TYPED_REFUSALS))?;
        let answer = shared.wait(Instant::now().checked_add(TIMEOUT), |state| state.answer(id))?;
        match answer {
            Some(Answer::NoCommunicator { text, .. }) => Err(Error::NoCommunicator(text)),
            Some(answer) => Ok(answer),
            None => {
                shared.lock()?.forget(id);
                Err(Error::Agreement(format!("no answer from the agent within {TIMEOUT:?}")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::session::{ChoiceReason, LearningRate, Priority};

    #[test]
    fn a_choice_stands_briefly_unless_saving_is_due() {
        let (mut chosen, begin) = (ChoiceCache::default(), Instant::now());
        let second = Duration::from_secs(1);
        let knobs = |most, last| {
            let checkpoint =
                Checkpoint { every: second * 60, cost: second, last, importance: Priority::Normal };
            (Knobs { accumulate: (1, most), checkpoint: Some(checkpoint) }, None)
        };
        let choice = Choice { accumulate: 3, checkpoint: false, reason: ChoiceReason::Slow };
        let chose = (choice, None);
        let recall = |chosen: &ChoiceCache, after: Duration, name: &str, key: CacheKey| {
            chosen.get(begin + after, name, key).is_some()
        };
        let soon = POLL_INTERVAL / 2;
        chosen.insert(begin, "job".to_owned(), knobs(8, second), chose);
        assert_eq!(chosen.get(begin + soon, "job", knobs(8, second + soon)), Some(chose));
        assert!(!recall(&chosen, POLL_INTERVAL, "job", knobs(8, second)));
        assert!(!recall(&chosen, soon, "other", knobs(8, second)));
        assert!(!recall(&chosen, soon, "job", knobs(9, second)));
        assert!(!recall(&chosen, soon, "job", knobs(8, second * 60)), "saving is due");
        assert!(!recall(&chosen, soon, "job", (Knobs { checkpoint: None, ..knobs(8, second).0 }, None)));
        chosen.insert(
            begin,
            "job".to_owned(),
            knobs(8, second),
            (Choice { checkpoint: true, ..choice }, None),
        );
        assert!(!recall(&chosen, soon, "job", knobs(8, second)), "it saves once");
        // The noise differs from one iteration to the next.
        let batch = BatchKnobs {
            samples: (32, 64),
            micro: (8, 8),
            initial: 32,
            rule: LearningRate::Linear,
            square: 1.0,
            trace: 2.0,
            pass: Duration::ZERO,
            sample: second,
            exchange: second,
        };
        let of = |batch: BatchKnobs| (knobs(8, second).0, Some(batch));
        chosen.insert(begin, "job".to_owned(), of(batch), chose);
        assert!(recall(&chosen, soon, "job", of(BatchKnobs { square: 3.0, trace: 4.0, ..batch })));
        assert!(!recall(&chosen, soon, "job", of(BatchKnobs { samples: (32, 65), ..batch })));
        assert!(!recall(&chosen, soon, "job", knobs(8, second)));
        // What is old is not kept.
        chosen.insert(begin, "job".to_owned(), knobs(8, second), chose);
        chosen.insert(begin + POLL_INTERVAL, "other".to_owned(), knobs(8, second), chose);
        assert_eq!(chosen.0.len(), 1);
    }
}
