//! A connection after the handshake: requests and answers until either side goes away.

use super::stream::Stream;
use super::tenant::Tenant;
use super::{AttachmentId, Joined, Question, SessionRequest};
use harmonaize_abi::Rank;
use harmonaize_abi::session::{
    Answer, Bounded, Budget, Choice, Clause, Constraints, EventBatch, JoinRefusal, JoinRefused, MAX_LISTED,
    MAX_NAME, MessageError, Negotiated, Reason, Regrouping, Request, RequestError, decode, encode, length,
};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

/// Most requests of one attachment that wait for the agent.
const MAX_PENDING: usize = 256;
/// Answers that wait for the process to read them.
const MAX_ANSWERS: usize = 64;

/// Where control cannot be asked.
const AWAY: &str = "the provider cannot be asked now; ask again later";

/// A connection after the handshake.
pub(super) struct AttachedSession {
    attachment: AttachmentId,
    tenant: Arc<Tenant>,
    requests: mpsc::Sender<SessionRequest>,
    /// Handles that the process has joined and not left.
    joined: HashSet<u32>,
    /// Joins and questions that the agent has not answered.
    pending: JoinSet<Answer>,
    joining: u32,
    /// Whether the process waits for events.
    reading: bool,
    /// Whether it waits for what comes of a proposal.
    negotiating: bool,
    /// Whether it waits for a choice.
    iterating: bool,
    /// Whether it waits for hints to be taken note of.
    hinting: bool,
}

impl AttachedSession {
    pub(super) fn new(
        attachment: AttachmentId,
        tenant: Arc<Tenant>,
        requests: mpsc::Sender<SessionRequest>,
    ) -> Self {
        let (joined, pending) = (HashSet::new(), JoinSet::new());
        let [reading, negotiating, iterating, hinting] = [false; 4];
        Self {
            attachment,
            tenant,
            requests,
            joined,
            pending,
            joining: 0,
            reading,
            negotiating,
            iterating,
            hinting,
        }
    }

    /// Serves requests; says why it ended.
    pub(super) async fn serve(mut self, stream: Stream) -> String {
        let (read, write) = tokio::io::split(stream);
        let mut reader = Reader { stream: read, received: Vec::new() };
        let (answers, unsent) = mpsc::channel(MAX_ANSWERS);
        // Aborted with the set when this future is dropped.
        let mut writer = JoinSet::new();
        writer.spawn(write_answers(write, unsent));
        loop {
            let answer = tokio::select! {
                Some(answered) = self.pending.join_next() => match answered {
                    Ok(answer) => Some(self.finish(answer)),
                    Err(error) => return format!("a request failed: {error}"),
                },
                request = reader.next(), if self.pending.len() < MAX_PENDING => match request {
                    Ok(Some(request)) => match self.request(request).await {
                        Ok(answer) => answer,
                        Err(why) => return why,
                    },
                    Ok(None) => return "the process is gone".into(),
                    Err(why) => return why,
                },
            };
            if let Some(answer) = answer
                && answers.send(answer).await.is_err()
            {
                return "the process is gone".into();
            }
        }
    }

    fn finish(&mut self, answer: Answer) -> Answer {
        match &answer {
            Answer::Joined { communicator, .. } => {
                self.joining -= 1;
                self.joined.insert(*communicator);
            }
            Answer::JoinRefused { .. } => self.joining -= 1,
            Answer::Events { .. } => self.reading = false,
            Answer::Negotiated { .. } => self.negotiating = false,
            Answer::Iteration { .. } => self.iterating = false,
            Answer::Hinted { .. } => self.hinting = false,
            _ => {}
        }
        answer
    }

    /// Passes a request on; the answer, if there is one at once.
    async fn request(&mut self, request: Request) -> Result<Option<Answer>, String> {
        let attachment = self.attachment;
        let (passed_on, answer) = match request {
            Request::Join { id, name, rank, ranks, timeout_ns, budget } => {
                let checked = self.check_join(&name, rank, ranks, &budget);
                if let Err(refused) = checked.and_then(|()| self.paced_join()) {
                    return Ok(Some(Answer::JoinRefused { id, refused }));
                }
                let reply = self.joining(id);
                let timeout = Duration::from_nanos(timeout_ns);
                (Some(SessionRequest::Join { attachment, name, rank, ranks, timeout, budget, reply }), None)
            }
            Request::Regroup { id, who, key, min_ranks: least, timeout_ns } => {
                if let Err(refused) = self.check_regroup(&who, least).and_then(|()| self.paced_join()) {
                    return Ok(Some(Answer::JoinRefused { id, refused }));
                }
                let (reply, timeout) = (self.joining(id), Duration::from_nanos(timeout_ns));
                (
                    Some(SessionRequest::Regroup { attachment, who, key, min_ranks: least, timeout, reply }),
                    None,
                )
            }
            Request::Leave { id, communicator } => {
                let known = self.joined.remove(&communicator);
                let leave = SessionRequest::Leave { attachment, communicator };
                (known.then_some(leave), Some(Answer::Left { id }))
            }
            Request::Detail { id, communicator } if self.joined.contains(&communicator) => {
                let (reply, answer) = oneshot::channel::<Option<_>>();
                self.pending.spawn(async move {
                    Answer::Detail { id, detail: answer.await.ok().flatten().map(Bounded::bounded) }
                });
                (Some(SessionRequest::Detail { attachment, communicator, reply }), None)
            }
            Request::Detail { id, .. } => (None, Some(Answer::Detail { id, detail: None })),
            Request::SetBudget { id, communicator, budget } => {
                let known = self.joined.contains(&communicator);
                let unknown = || "no such communicator on this attachment".to_owned();
                let refused = nonsense(&budget).or_else(|| (!known).then(unknown)).map(RequestError::from);
                let refused = refused.or_else(|| self.paced());
                let passed_on = refused.is_none();
                let set = SessionRequest::SetBudget { attachment, communicator, budget };
                (
                    passed_on.then_some(set),
                    Some(Answer::BudgetSet { id, refused: refused.map(Bounded::bounded) }),
                )
            }
            Request::Events { id, .. } if self.reading => {
                let read = Err("this process waits for events already; one can at a time".into());
                (None, Some(Answer::Events { id, read }))
            }
            Request::Events { id, from, wait_ns } => {
                if let Some(refused) = self.paced() {
                    return Ok(Some(Answer::Events { id, read: Err(refused) }));
                }
                let (reply, answer) = oneshot::channel::<Result<EventBatch, String>>();
                self.reading = true;
                self.pending.spawn(async move {
                    let read = answer.await.unwrap_or_else(|_| Err(AWAY.to_owned()));
                    Answer::Events { id, read: read.map(Bounded::bounded).map_err(refusal) }
                });
                let wait = Duration::from_nanos(wait_ns);
                let question = Question::Events { from, wait, reply };
                (Some(SessionRequest::Ask { attachment, question }), None)
            }
            Request::Negotiate { id, communicator, propose } => {
                let senseless = propose.as_ref().map_or_else(Vec::new, senseless);
                let wanted = propose.clone().unwrap_or_default();
                let refused = if self.negotiating {
                    Some("this process waits for an answer already; propose again after it".into())
                } else if !is_name(&communicator) {
                    Some(NO_NAME.into())
                } else {
                    self.paced()
                };
                if let Some(refused) = refused {
                    return Ok(Some(Answer::Negotiated { id, outcome: Err(refused) }));
                }
                let (reply, answer) = oneshot::channel::<Result<Negotiated, String>>();
                self.negotiating = true;
                self.pending.spawn(async move {
                    let alone = |_| match senseless.is_empty() {
                        true => Err(AWAY.to_owned()),
                        false => Ok(Negotiated::Refused { reasons: senseless, counter: None }),
                    };
                    let outcome = answer.await.unwrap_or_else(alone);
                    let outcome = outcome.map(|outcome| refuse_partial_agreement(&wanted, outcome));
                    let outcome = outcome.map(Bounded::bounded).map_err(refusal);
                    Answer::Negotiated { id, outcome }
                });
                let question = Question::Negotiate { communicator, propose, reply };
                (Some(SessionRequest::Ask { attachment, question }), None)
            }
            Request::Iteration { id, communicator, knobs } => {
                let refused = match knobs.check() {
                    _ if self.iterating => Some("this process waits for a choice already".into()),
                    Err(error) => Some(error.to_string().into()),
                    Ok(()) if !is_name(&communicator) => Some(NO_NAME.into()),
                    Ok(()) => self.paced(),
                };
                if let Some(refused) = refused {
                    return Ok(Some(Answer::Iteration { id, choice: Err(refused) }));
                }
                let (reply, answer) = oneshot::channel::<Result<Choice, String>>();
                self.iterating = true;
                self.pending.spawn(async move {
                    // An iteration waits for nobody who is away.
                    let choice = answer.await.unwrap_or_else(|_| Ok(knobs.fallback()));
                    Answer::Iteration { id, choice: choice.map_err(refusal) }
                });
                let question = Question::Iteration { communicator, knobs, reply };
                (Some(SessionRequest::Ask { attachment, question }), None)
            }
            Request::Hint { id, communicator, hints } => {
                let refused = match hints.check() {
                    _ if self.hinting => Some("this process waits for an answer to hints already".into()),
                    Err(error) => Some(error.to_string().into()),
                    Ok(()) if !is_name(&communicator) => Some(NO_NAME.into()),
                    Ok(()) => self.paced(),
                };
                if refused.is_some() {
                    return Ok(Some(Answer::Hinted { id, refused }));
                }
                let (reply, answer) = oneshot::channel::<Result<(), String>>();
                self.hinting = true;
                self.pending.spawn(async move {
                    let hinted = answer.await.unwrap_or_else(|_| Err(AWAY.to_owned()));
                    Answer::Hinted { id, refused: hinted.err().map(refusal) }
                });
                let question = Question::Hint { communicator, hints, reply };
                (Some(SessionRequest::Ask { attachment, question }), None)
            }
        };
        if let Some(request) = passed_on {
            self.requests.send(request).await.map_err(|_| "the agent goes down".to_owned())?;
        }
        Ok(answer)
    }

    /// Takes note of a question for control; why it is not passed on, if it is one too many.
    fn paced(&self) -> Option<RequestError> {
        self.tenant.admit_request(Instant::now()).err()
    }

    /// The same of a join, which control hears of, too.
    fn paced_join(&self) -> Result<(), JoinRefused> {
        match self.paced() {
            None => Ok(()),
            Some(RequestError::TooOften { retry_after: again }) => refused(
                JoinRefusal::Quota,
                format!("this tenant has asked the provider too much; the next in {again:?}"),
            ),
            Some(RequestError::Refused(text)) => refused(JoinRefusal::Quota, text),
        }
    }

    /// Has the agent's answer to a join sent on.
    fn joining(&mut self, id: u64) -> oneshot::Sender<Result<Joined, JoinRefused>> {
        let (reply, answer) = oneshot::channel::<Result<Joined, JoinRefused>>();
        self.joining += 1;
        self.pending.spawn(async move {
            match answer.await {
                Ok(Ok(Joined { communicator, rank, ranks, before })) => {
                    let before = if before.len() > MAX_LISTED { Vec::new() } else { before };
                    Answer::Joined { id, communicator, rank, ranks, before }
                }
                Ok(Err(refused)) => Answer::JoinRefused { id, refused: refused.bounded() },
                Err(_) => Answer::JoinRefused { id, refused: dropped() },
            }
        });
        reply
    }

    fn check_regroup(&self, who: &Regrouping, least: u32) -> Result<(), JoinRefused> {
        match who {
            Regrouping::Newcomer { name } => check_name(name)?,
            Regrouping::Member { communicator } if !self.joined.contains(communicator) => {
                return refused(JoinRefusal::Name, "no such communicator on this attachment".to_owned());
            }
            Regrouping::Member { .. } => {}
        }
        self.check_room(least)
    }

    /// Whether one more communicator, of so many ranks, is within the tenant's quota.
    fn check_room(&self, ranks: u32) -> Result<(), JoinRefused> {
        let quota = self.tenant.rules.quota;
        if ranks > quota.ranks {
            let text = format!("{ranks} ranks; this tenant's communicators have at most {}", quota.ranks);
            return refused(JoinRefusal::Quota, text);
        }
        if self.joined.len() as u64 + u64::from(self.joining) >= u64::from(quota.communicators) {
            let text =
                format!("this attachment is in {} communicators, as many as it may be", quota.communicators);
            return refused(JoinRefusal::Quota, text);
        }
        Ok(())
    }

    fn check_join(&self, name: &str, rank: Rank, ranks: u32, budget: &Budget) -> Result<(), JoinRefused> {
        check_name(name)?;
        if rank.0 >= ranks {
            return refused(JoinRefusal::Rank, format!("rank {rank} of {ranks}; ranks count from 0"));
        }
        self.check_room(ranks)?;
        match nonsense(budget) {
            Some(text) => refused(JoinRefusal::Budget, text),
            None => Ok(()),
        }
    }
}

fn refused(kind: JoinRefusal, text: String) -> Result<(), JoinRefused> {
    Err(JoinRefused { kind, text, ranks: Vec::new() })
}

fn check_name(name: &str) -> Result<(), JoinRefused> {
    if !is_name(name) {
        let text = format!("a name has 1 to {MAX_NAME} bytes and no control characters");
        return refused(JoinRefusal::Name, text);
    }
    Ok(())
}

/// Why control does not answer.
fn refusal(why: String) -> RequestError {
    RequestError::Refused(why).bounded()
}

/// For who names what cannot be a communicator.
const NO_NAME: &str = "no communicator can have this name";

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= MAX_NAME && !name.chars().any(char::is_control)
}

/// Control as it was before it knew of some clauses leaves them out and agrees on the others: then what was wanted is refused, and what is
/// in force is offered.
fn refuse_partial_agreement(wanted: &Constraints, outcome: Negotiated) -> Negotiated {
    let Negotiated::Agreed(agreement) = outcome else { return outcome };
    let had = &agreement.constraints;
    let unknown = [
        (Clause::OnFailure, wanted.on_failure.is_some() && had.on_failure.is_none()),
        (Clause::Order, wanted.ordered && !had.ordered),
    ];
    let unknown = unknown.into_iter().filter(|(_, unknown)| *unknown);
    let text = "the provider does not know of it yet; the rest is agreed on";
    let reasons: Vec<Reason> = unknown.map(|(clause, _)| Reason { clause, text: text.to_owned() }).collect();
    if reasons.is_empty() {
        return Negotiated::Agreed(agreement);
    }
    Negotiated::Refused { reasons, counter: Some(agreement.constraints) }
}

/// Why constraints make no sense, if they do not.
fn senseless(constraints: &Constraints) -> Vec<Reason> {
    let mut reasons = constraints.check().err().unwrap_or_default();
    let budget = constraints.budget.as_ref().and_then(nonsense);
    reasons.extend(budget.map(|text| Reason { clause: Clause::Budget, text }));
    reasons
}

/// Why a budget makes no sense, if it does not.
fn nonsense(budget: &Budget) -> Option<String> {
    harmonaize_codec::Budget::try_from(budget).err().map(|error| error.to_string())
}

fn dropped() -> JoinRefused {
    JoinRefused {
        kind: JoinRefusal::Internal,
        text: "the agent dropped the request; try again".into(),
        ranks: Vec::new(),
    }
}

async fn write_answers(mut stream: WriteHalf<Stream>, mut answers: mpsc::Receiver<Answer>) {
    while let Some(answer) = answers.recv().await {
        let Ok(message) = encode(&answer) else { return };
        if stream.write_all(&message).await.is_err() {
            return;
        }
    }
}

/// Reads requests; may be dropped at any await without losing bytes.
struct Reader {
    stream: ReadHalf<Stream>,
    received: Vec<u8>,
}

impl Reader {
    /// The next request; `None` when the process is gone.
    async fn next(&mut self) -> Result<Option<Request>, String> {
        loop {
            if let Some(request) =
                self.parse().map_err(|error| format!("the process sent nonsense: {error}"))?
            {
                return Ok(Some(request));
            }
            match self.stream.read_buf(&mut self.received).await {
                Ok(0) | Err(_) => return Ok(None),
                Ok(_) => {}
            }
        }
    }

    fn parse(&mut self) -> Result<Option<Request>, MessageError> {
        let Some((prefix, rest)) = self.received.split_first_chunk::<4>() else { return Ok(None) };
        let bytes = length(*prefix)?;
        let Some(message) = rest.get(..bytes) else { return Ok(None) };
        let request = decode(message)?;
        self.received.drain(..4 + bytes);
        Ok(Some(request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::session::{Agreement, OnFailure};

    #[test]
    fn what_control_left_out_is_not_agreed_on() {
        let agreed = |constraints: &Constraints| {
            Negotiated::Agreed(Agreement {
                number: 1,
                constraints: constraints.clone(),
                ..Agreement::default()
            })
        };
        let known = Constraints::new().weight(2);
        let wanted = Constraints { ordered: true, ..known.clone().on_failure(OnFailure::End) };
        assert_eq!(refuse_partial_agreement(&wanted, agreed(&wanted)), agreed(&wanted));
        assert_eq!(refuse_partial_agreement(&known, agreed(&known)), agreed(&known));
        // Who asked only what is in force wanted nothing.
        assert_eq!(refuse_partial_agreement(&Constraints::new(), agreed(&wanted)), agreed(&wanted));
        let Negotiated::Refused { reasons, counter } = refuse_partial_agreement(&wanted, agreed(&known))
        else {
            panic!("agreed on")
        };
        let clauses: Vec<Clause> = reasons.iter().map(|reason| reason.clause).collect();
        assert_eq!(clauses, [Clause::OnFailure, Clause::Order]);
        assert_eq!(counter, Some(known));
    }
}
