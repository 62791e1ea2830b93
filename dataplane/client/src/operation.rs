//! Operations in flight, and what is known of them afterwards.

use crate::communicator::Membership;
use crate::group::Calls;
use crate::in_flight::InFlight;
use crate::noise::Marked;
use crate::shared::Shared;
use crate::{Error, ProtocolError};
use harmonaize_abi::session::{Answer, FailureDetail, Request};
use harmonaize_abi::{CODECS, Called, Completion, Cookie, OperationId, Rank, SEVERAL_CODECS, Status};
use std::borrow::Borrow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a failure waits for the agent's explanation.
const DETAIL_WITHIN: Duration = Duration::from_secs(2);

/// A collective, a send or a receive in flight. Dropped before its end, it goes on, and its tensors' memory stays taken until then.
#[derive(Debug)]
pub struct Operation {
    membership: Arc<Membership>,
    cookie: Cookie,
    called: Called,
    stage: Stage,
    /// The group that it was called in.
    group: Option<Arc<Calls>>,
    /// Until its end, where its tensors are marked as gradients.
    marked: Option<Box<Marked>>,
}

#[derive(Debug)]
enum Stage {
    InFlight,
    /// Failed; the agent was asked why.
    AwaitingDetail(Completion, u64, Instant),
    Ended(Completion, Option<Box<FailureDetail>>),
    /// This process has aborted the communicator before the operation had ended.
    Aborted,
}

/// Which kind of algorithm ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// Nothing had to be done.
    None,
    /// Within one host.
    WithinHost,
    /// A ring of hosts.
    Ring,
    /// Pairs of hosts.
    Pairwise,
    /// A chain of hosts.
    Chain,
    /// Dissemination among hosts.
    Dissemination,
    /// Direct exchange among hosts, in fewer bits than the tensor has.
    DirectCoded,
    /// Direct exchange among hosts: everything from each to all.
    OneShot,
    /// Direct exchange among hosts: from each to who adds a part up, and from there to all.
    TwoShot,
    /// Sums by an aggregator on the way.
    Aggregated,
    /// Everything between partners among the hosts, twice as far apart each time.
    RecursiveDoubling,
    /// Half of what is left between such partners, and back.
    RecursiveHalving,
    /// Along a binomial tree of hosts.
    BinomialTree,
    /// Within racks of hosts, and between them.
    Hierarchical,
    /// Something that this version has no name for.
    Other(u8),
}

/// What an operation that succeeded cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Receipt {
    /// Number of the operation on its communicator, from 0. Of a send or a receive: the number of the message among those from its
    /// sender to its receiver.
    pub operation: OperationId,
    /// Of a send or a receive: the rank at the other end.
    pub peer: Option<Rank>,
    /// Tensor bytes that this rank's host sent.
    pub wire_bytes: u64,
    /// Bits on the wire per element; 0 where nothing was sent.
    pub bits_per_element: f64,
    /// Which kind of algorithm ran.
    pub algorithm: Algorithm,
    /// Whether part of it was not run as planned. That part ran again, or uncompressed where the error would have been
    /// too large.
    pub fallback: bool,
    /// In which codec the tensor travelled, as [`crate::Budget::Codecs`] names it. It is "exact" also where nothing was sent, "several"
    /// where parts went by different ones, "unknown" where the agent is newer.
    pub codec: &'static str,
    /// Error (vNMSE) that the sum has at most, from what encoders measured; 0 for exact operations.
    pub error: f32,
    /// Error (vNMSE) that encoders measured, added up over all encodings on the way. It is what was lost, unless the errors of several
    /// hosts are alike, or cancel. They are alike where all have the same tensor, in codecs that are not unbiased. Then the loss lies
    /// anywhere up to `error`. This is never above `error`, and the same where nothing was added, or an aggregator added. Both are over the
    /// squares that are known. Where a host has several ranks, those are of their sum over their number, which are fewer, so both say too
    /// much there.
    pub measured_error: f32,
}

impl Receipt {
    fn new(called: &Called, completion: &Completion) -> Self {
        let peer = matches!(called, Called::P2p(_)).then_some(Rank(completion.peer));
        Self {
            operation: OperationId(completion.operation),
            peer,
            wire_bytes: completion.wire_bytes,
            bits_per_element: f64::from(completion.bits_per_element_x256) / 256.0,
            algorithm: match completion.algorithm {
                0 => Algorithm::None,
                1 => Algorithm::WithinHost,
                2 => Algorithm::Ring,
                3 => Algorithm::Pairwise,
                4 => Algorithm::Chain,
                5 => Algorithm::Dissemination,
                6 => Algorithm::DirectCoded,
                7 => Algorithm::OneShot,
                8 => Algorithm::TwoShot,
                9 => Algorithm::Aggregated,
                10 => Algorithm::RecursiveDoubling,
                11 => Algorithm::RecursiveHalving,
                12 => Algorithm::BinomialTree,
                13 => Algorithm::Hierarchical,
                other => Algorithm::Other(other),
            },
            fallback: completion.fallback != 0,
            codec: match completion.codec {
                SEVERAL_CODECS => "several",
                codec => CODECS.get(usize::from(codec)).copied().unwrap_or("unknown"),
            },
            error: f32::from_bits(completion.error),
            measured_error: f32::from_bits(completion.measured_error),
        }
    }
}

/// Whether the agent knows more than the status says: the communicator has ended.
fn has_detail(status: Status) -> bool {
    status.code() >= Status::Mismatch.code() && status != Status::TimeoutTooLong
}

impl Operation {
    pub(crate) fn new(
        membership: Arc<Membership>,
        cookie: Cookie,
        called: Called,
        group: Option<Arc<Calls>>,
        marked: Option<Box<Marked>>,
    ) -> Self {
        Self { membership, cookie, called, stage: Stage::InFlight, group, marked }
    }

    /// Whether it was called: its group has ended, if it has one.
    fn check_called(&self) -> Result<(), Error> {
        let open = self.group.as_ref().is_some_and(|group| !group.has_ended());
        if open { Err(Error::GroupOpen) } else { Ok(()) }
    }

    /// What was called.
    pub fn called(&self) -> Called {
        self.called
    }

    /// Waits for the end. After [`Error::WaitTimeout`] the operation is still in flight and can be waited for again; after
    /// the end every call gives the same result. [`Error::GroupOpen`] before its [group](crate::Group) has ended.
    pub fn wait(&mut self, timeout: Duration) -> Result<Receipt, Error> {
        self.check_called()?;
        let deadline = Instant::now().checked_add(timeout);
        if matches!(self.stage, Stage::InFlight) {
            let (cookie, membership) = (self.cookie, &*self.membership);
            let waited = membership.shared.wait(deadline, |state| {
                let completion = state.claim(cookie);
                (completion.is_some() || membership.is_aborted()).then_some(completion)
            });
            match waited? {
                Some(Some(completion)) => self.ended(completion),
                Some(None) => self.abandon(),
                None => {
                    let what = self.called.to_string();
                    return Err(Error::WaitTimeout { what, waited: timeout });
                }
            }
        }
        if let Stage::AwaitingDetail(completion, id, until) = self.stage {
            let membership = &*self.membership;
            let answer = membership.shared.wait(Some(until), |state| {
                let answer = state.answer(id);
                (answer.is_some() || membership.is_aborted()).then_some(answer)
            });
            self.explained(completion, id, answer.ok().flatten().flatten());
        }
        self.result().unwrap_or_else(|| Err(ProtocolError::NoResult.into()))
    }

    /// The result, if the operation has ended. Never blocks.
    pub fn poll(&mut self) -> Result<Option<Receipt>, Error> {
        self.check_called()?;
        if matches!(self.stage, Stage::InFlight) {
            let mut state = self.membership.shared.poll()?;
            match state.claim(self.cookie) {
                Some(completion) => {
                    drop(state);
                    self.ended(completion);
                }
                None if self.membership.is_aborted() => {
                    drop(state);
                    self.abandon();
                }
                None => return state.alive().map(|()| None),
            }
        }
        if let Stage::AwaitingDetail(completion, id, until) = self.stage {
            let mut state = self.membership.shared.poll()?;
            let (answer, lost) = (state.answer(id), state.alive().is_err());
            drop(state);
            if answer.is_some() || lost || Instant::now() >= until {
                self.explained(completion, id, answer);
            }
        }
        self.result().transpose()
    }

    fn ended(&mut self, completion: Completion) {
        if let Some(marked) = self.marked.take()
            && completion.status == Status::Ok.code()
        {
            marked.end(&self.membership.gradients);
        }
        let communicator = self.membership.handle.0;
        let asked = match Status::from_code(completion.status) {
            Some(status) if has_detail(status) => {
                let state = self.membership.shared.lock();
                state.and_then(|mut state| state.request(|id| Request::Detail { id, communicator })).ok()
            }
            _ => None,
        };
        self.stage = match asked {
            Some(id) => Stage::AwaitingDetail(completion, id, Instant::now() + DETAIL_WITHIN),
            None => Stage::Ended(completion, None),
        };
    }

    /// Nobody waits for the completion any more.
    fn abandon(&mut self) {
        if let Ok(mut state) = self.membership.shared.lock() {
            state.in_flight.abandon(self.cookie);
        }
        self.stage = Stage::Aborted;
    }

    fn explained(&mut self, completion: Completion, id: u64, answer: Option<Answer>) {
        if let Ok(mut state) = self.membership.shared.lock() {
            state.forget(id);
        }
        let detail = match answer {
            Some(Answer::Detail { detail, .. }) => detail.map(Box::new),
            _ => None,
        };
        if let (Some(journal), Some(detail)) = (&self.membership.journal, &detail)
            && let Some(status) = Status::from_code(completion.status)
        {
            journal.explained(self.called, status, detail);
        }
        self.stage = Stage::Ended(completion, detail);
    }

    fn result(&self) -> Option<Result<Receipt, Error>> {
        let (completion, detail) = match &self.stage {
            Stage::Ended(completion, detail) => (completion, detail),
            Stage::Aborted => return Some(Err(self.membership.aborted())),
            Stage::InFlight | Stage::AwaitingDetail(..) => return None,
        };
        Some(match Status::from_code(completion.status) {
            Some(Status::Ok) => Ok(Receipt::new(&self.called, completion)),
            Some(Status::Aborted) if self.membership.is_aborted() => Err(self.membership.aborted()),
            Some(Status::Aborted) => {
                Err(Error::Aborted { by: detail.as_ref().and_then(|detail| detail.ranks.first().copied()) })
            }
            Some(status) => Err(Error::Operation {
                status,
                operation: OperationId(completion.operation),
                called: self.called,
                detail: detail.clone(),
            }),
            None => Err(ProtocolError::Status(completion.status).into()),
        })
    }
}

impl Operation {
    /// Waits until one of these operations of one attachment has ended; which, by its place. One that has ended before is found at once, so
    /// the caller takes out what it has seen. Its result is what [`Self::wait`] or [`Self::poll`] then give, be it an error.
    ///
    /// ```no_run
    /// # use harmonaize_client::{Error, Operation};
    /// # use std::time::Duration;
    /// # fn all(mut operations: Vec<Operation>) -> Result<(), Error> {
    /// while !operations.is_empty() {
    ///     let ended = Operation::wait_any(&mut operations, Duration::from_secs(30))?;
    ///     let receipt = operations.swap_remove(ended).wait(Duration::ZERO)?;
    ///     println!("operation {} is done", receipt.operation);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::WaitTimeout`] where none has ended in time: all are in flight still. [`Error::AgentLost`], and then all have failed.
    /// [`Error::Foreign`] where they are of several attachments, [`Error::Shape`] where there are none, [`Error::GroupOpen`] where one was not called yet.
    pub fn wait_any<O: Borrow<Self>>(operations: &mut [O], timeout: Duration) -> Result<usize, Error> {
        Self::await_any(operations, Instant::now().checked_add(timeout), timeout)
    }

    /// The same until a point in time.
    ///
    /// # Errors
    /// As [`Self::wait_any`].
    pub fn wait_any_until<O: Borrow<Self>>(operations: &mut [O], deadline: Instant) -> Result<usize, Error> {
        let timeout = deadline.saturating_duration_since(Instant::now());
        Self::await_any(operations, Some(deadline), timeout)
    }

    fn await_any<O: Borrow<Self>>(
        operations: &mut [O],
        deadline: Option<Instant>,
        waited: Duration,
    ) -> Result<usize, Error> {
        let Some(first) = operations.first() else {
            return Err(Error::Shape("waiting for one of no operations".into()));
        };
        operations.iter().try_for_each(|operation| operation.borrow().check_called())?;
        let shared = Arc::clone(first.borrow().attachment());
        if operations.iter().any(|operation| !Arc::ptr_eq(operation.borrow().attachment(), &shared)) {
            return Err(Error::Foreign);
        }
        let ended = shared.wait(deadline, |state| {
            operations.iter().position(|operation| operation.borrow().has_ended(&state.in_flight))
        })?;
        ended.ok_or_else(|| Error::WaitTimeout {
            what: format!("any of {} operations", operations.len()),
            waited,
        })
    }

    /// What it is an operation of.
    pub(crate) fn attachment(&self) -> &Arc<Shared> {
        &self.membership.shared
    }

    /// Whether waiting for it does not wait for its ranks.
    pub(crate) fn has_ended(&self, in_flight: &InFlight) -> bool {
        match self.stage {
            Stage::InFlight => in_flight.has_ended(self.cookie) || self.membership.is_aborted(),
            Stage::AwaitingDetail(..) | Stage::Ended(..) | Stage::Aborted => true,
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        let Ok(mut state) = self.membership.shared.lock() else { return };
        match self.stage {
            Stage::InFlight => state.in_flight.abandon(self.cookie),
            Stage::AwaitingDetail(_, id, _) => state.forget(id),
            Stage::Ended(..) | Stage::Aborted => {}
        }
    }
}
