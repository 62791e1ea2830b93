//! Agreements: what a tenant wants of its communicators and expects of them, what the provider promises, and what it chooses within
//! ranges.

use crate::attach::Client;
use crate::{Agreement, Choice, Constraints, Error, Hints, Knobs, Negotiated, Reason};
use harmonaize_abi::session::{Answer, Request, Unanswered};
use std::time::{Duration, Instant};

/// How long the provider may take: what it promises is on disk by then.
const WITHIN: Duration = Duration::from_secs(10);

/// Most proposals of one [`Client::negotiate`].
const MOST_ROUNDS: usize = 8;

fn unanswered(why: Unanswered) -> Error {
    Error::unanswered(why, Error::Agreement)
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
    /// provider cannot be asked now. [`Error::TooOften`] where this process has asked the provider too much, whatever it was: more
    /// than 600 times at once, or than 100 times a second in the long run.
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
    /// one is due.
    ///
    /// # Errors
    /// [`Error::Agreement`] where the knobs make no sense or no such communicator runs, [`Error::TooOften`] where iterations are so short
    /// that asking for each is too much: what is chosen changes once a second.
    pub fn iteration(&self, communicator: &str, knobs: &Knobs) -> Result<Choice, Error> {
        let (communicator, knobs) = (communicator.to_owned(), *knobs);
        match self.answered(|id| Request::Iteration { id, communicator, knobs })? {
            Answer::Iteration { choice, .. } => choice.map_err(unanswered),
            _ => Err(Error::Protocol("the agent answered an iteration with something else".into())),
        }
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
