//! Communicators: joining them, and the collectives.

use crate::feedback::Feedback;
use crate::group::{Calls, Group};
use crate::in_flight::Buffers;
use crate::journal::{Scope, Watched};
use crate::noise::{GradientNoise, Gradients, Marked};
use crate::pool::Pool;
use crate::shared::Shared;
use crate::tensor::Tensor;
use crate::{Error, Operation, ProtocolError, RequestKind};
use harmonaize_abi::session::{Answer, Budget, JoinRefusal, Regrouping, Request};
use harmonaize_abi::{
    ANY_RANK, Called, Collective, CommunicatorHandle, Direction, Dtype, P2pSignature, Rank, ReduceOp, Region,
    Signature, Submission, flags,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How much longer than the agent the client waits, so that the agent's better answer comes first.
const GRACE: Duration = Duration::from_secs(2);

/// How long passing a budget on to the agent may take.
const BUDGET_WITHIN: Duration = Duration::from_secs(10);

/// How to join.
#[derive(Clone, Debug, PartialEq)]
pub struct JoinOptions {
    /// How long to wait for the other ranks.
    pub timeout: Duration,
    /// What may be lost of the tensors; all ranks must say the same.
    pub budget: Budget,
    /// The job: communicators of two of the tenant's jobs never meet, though they are named alike. Empty where it has but one. From then on
    /// the communicator is called `job/name`: [`Communicator::name`].
    pub job: String,
    /// This rank's time-out of operations ([`OperationOptions::timeout`]) that do not have their own. None: 10 min, or as long as the
    /// operator allows. Ranks need not say the same.
    pub operation_timeout: Option<Duration>,
}

impl Default for JoinOptions {
    /// 60 s, exact, without a job, the usual time-out of operations.
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            budget: Budget::Exact,
            job: String::new(),
            operation_timeout: None,
        }
    }
}

/// What a rank says of an operation beside what it computes ([`Communicator::with`]). Ranks need not say the same, but for `gradients`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OperationOptions {
    /// How long the communicator may make no progress while the operation is in flight. Then it ends at all ranks, with an error that
    /// names those that have not called. Time counts from the call, or from the last progress if that is later. None: as at the join.
    pub timeout: Option<Duration>,
    /// Within its class, operations of a higher priority go first. 0 is the usual.
    pub priority: u8,
    /// Class among the tenant's operations on a host: 1 latency, 2 normal, 3 bulk, 4 background; else by its size. What is background
    /// moves where the tenant has nothing else in flight there. Of other tenants' it takes nothing.
    pub class: u8,
    /// Wanted time from call to end; none is wanted otherwise. Among equals of class and priority the earliest goes first; nothing
    /// happens to an operation that is late.
    pub deadline: Option<Duration>,
    /// The training or inference step that the operation belongs to: 0 unknown. Among the tenant's equals of class, priority and deadline
    /// the smallest goes first on a host, and what is unknown last.
    pub iteration: u64,
    /// What a [`ReduceOp::PremulSum`] multiplies this rank's input by: 1 where it is none. Of no other reduction.
    pub factor: Option<f64>,
    /// Marks an AllReduce's tensor as gradients, for [`Communicator::gradient_noise`]: a sum or an average of f32, f64, f16 or bf16. All ranks
    /// mark the same ones. The input is read once more at the call, and the output by who first sees the end: until then no other operation has
    /// them. Of no other collective.
    pub gradients: bool,
}

/// A member's view of a communicator. All ranks must call the same collectives in the same order. Left when it and its
/// operations are dropped.
///
/// Threads may share it and call at the same time: each call is one operation, whole. Which of two comes first is then the caller's
/// business, for it must be the same at all ranks: threads that call side by side need an order among themselves, or a communicator each.
#[derive(Debug)]
pub struct Communicator {
    membership: Arc<Membership>,
    pool: Arc<Pool>,
    options: OperationOptions,
    /// Where calls go instead of to the agent.
    group: Option<Arc<Calls>>,
}

/// Membership, shared by the communicator and its operations.
#[derive(Debug)]
pub(crate) struct Membership {
    pub(crate) shared: Arc<Shared>,
    pub(crate) handle: CommunicatorHandle,
    name: String,
    rank: Rank,
    ranks: u32,
    before: Vec<Option<Rank>>,
    /// Of operations that do not have their own, in nanoseconds; 0: the usual.
    timeout_ns: u64,
    aborted: AtomicBool,
    /// What marked operations have measured.
    pub(crate) gradients: Gradients,
    /// What its operations are noted by.
    pub(crate) journal: Option<Arc<Scope>>,
}

impl Membership {
    /// Whether this process has aborted the communicator.
    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// The error of what this process has aborted.
    pub(crate) fn aborted(&self) -> Error {
        Error::Aborted { by: Some(self.rank) }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if let Ok(mut state) = self.shared.lock() {
            state.leave(self.handle);
        }
    }
}

/// How to go on with other ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegroupOptions {
    /// How long to wait for members that neither come nor go. Then it goes on with those who came, if they are enough.
    /// A newcomer waits so long for the members.
    pub timeout: Duration,
    /// Fewest ranks to go on with.
    pub min_ranks: u32,
    /// New ranks ascend by this: a member's rank if nothing is said, and a newcomer's comes last. Where two are the same members
    /// come first, by rank, then newcomers as they came.
    pub key: Option<u32>,
    /// This rank's time-out of operations, as [`JoinOptions::operation_timeout`]. None: a member's is the one before's.
    pub operation_timeout: Option<Duration>,
}

impl Default for RegroupOptions {
    /// 60 s, with whoever is left, in the order of ranks.
    fn default() -> Self {
        Self { timeout: Duration::from_secs(60), min_ranks: 1, key: None, operation_timeout: None }
    }
}

/// A join on its way.
pub(crate) struct PendingJoin<'a> {
    shared: &'a Arc<Shared>,
    pool: &'a Arc<Pool>,
    name: &'a str,
    /// Which rank of how many, if it is not for the provider to say.
    place: Option<(Rank, u32)>,
    timeout: Duration,
    /// Of operations, in nanoseconds; 0: the usual.
    operation_timeout_ns: u64,
    id: u64,
}

pub(crate) fn nanos(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX)
}

impl<'a> PendingJoin<'a> {
    pub(crate) fn start(
        shared: &'a Arc<Shared>,
        pool: &'a Arc<Pool>,
        name: &'a str,
        rank: Rank,
        ranks: u32,
        options: &JoinOptions,
    ) -> Result<Self, Error> {
        let timeout = options.timeout;
        let operation_timeout_ns = shared.operation_timeout_ns(options.operation_timeout)?;
        let id = shared.lock()?.request(|id| Request::Join {
            id,
            job: options.job.clone(),
            name: name.to_owned(),
            rank,
            ranks,
            timeout_ns: nanos(timeout),
            budget: options.budget.clone(),
        })?;
        Ok(Self { shared, pool, name, place: Some((rank, ranks)), timeout, operation_timeout_ns, id })
    }

    pub(crate) fn regroup(
        shared: &'a Arc<Shared>,
        pool: &'a Arc<Pool>,
        name: &'a str,
        who: Regrouping,
        (key, before_ns): (u32, u64),
        options: &RegroupOptions,
    ) -> Result<Self, Error> {
        let operation_timeout_ns = match options.operation_timeout {
            None => before_ns,
            asked => shared.operation_timeout_ns(asked)?,
        };
        let RegroupOptions { timeout, min_ranks: least, .. } = *options;
        let timeout_ns = nanos(timeout);
        let id =
            shared.lock()?.request(|id| Request::Regroup { id, who, key, min_ranks: least, timeout_ns })?;
        Ok(Self { shared, pool, name, place: None, timeout, operation_timeout_ns, id })
    }

    fn split(
        shared: &'a Arc<Shared>,
        pool: &'a Arc<Pool>,
        (name, communicator): (&'a str, CommunicatorHandle),
        (color, key): (Option<u32>, u32),
        timeout: Duration,
        operation_timeout_ns: u64,
    ) -> Result<Self, Error> {
        let timeout_ns = nanos(timeout);
        let id = shared.lock()?.request(|id| Request::Split {
            id,
            communicator: communicator.0,
            color,
            key,
            timeout_ns,
        })?;
        Ok(Self { shared, pool, name, place: None, timeout, operation_timeout_ns, id })
    }

    pub(crate) fn wait(self) -> Result<Communicator, Error> {
        let (began, shared) = (Instant::now(), self.shared);
        let joined = self.await_answer(began);
        if let (Err(error), Some(journal)) = (&joined, shared.journal())
            && !matches!(error, Error::Regroup { kind: JoinRefusal::LeftOut, .. })
        {
            journal.failed(error.to_string());
        }
        joined
    }

    fn await_answer(self, began: Instant) -> Result<Communicator, Error> {
        let deadline = began.checked_add(self.timeout.saturating_add(GRACE));
        let refused = |kind, text, concerned| {
            let name = self.name.to_owned();
            match self.place {
                Some((rank, ranks)) => Error::Join { name, rank, ranks, kind, text, concerned },
                None => Error::Regroup { name, kind, text, concerned },
            }
        };
        match self.shared.wait(deadline, |state| state.answer(self.id))? {
            Some(Answer::Joined { communicator: handle, name, rank, ranks, before, .. }) => {
                let shared = Arc::clone(self.shared);
                let (timeout_ns, aborted) = (self.operation_timeout_ns, AtomicBool::new(false));
                let journal = shared.journal();
                let journal = journal.map(|journal| journal.joined(&name, (rank, ranks), began.elapsed()));
                let gradients = Gradients::default();
                let member = Membership {
                    shared,
                    handle: CommunicatorHandle(handle),
                    name,
                    rank,
                    ranks,
                    before,
                    timeout_ns,
                    aborted,
                    gradients,
                    journal,
                };
                let (membership, pool) = (Arc::new(member), Arc::clone(self.pool));
                Ok(Communicator { membership, pool, options: OperationOptions::default(), group: None })
            }
            Some(Answer::JoinRefused { refused: why, .. }) => Err(refused(why.kind, why.text, why.ranks)),
            Some(_) => Err(ProtocolError::Unexpected(RequestKind::Join).into()),
            None => {
                self.shared.lock()?.forget(self.id);
                let text =
                    format!("no answer from the agent within {:?}", self.timeout.saturating_add(GRACE));
                Err(refused(JoinRefusal::Timeout, text, Vec::new()))
            }
        }
    }
}

impl Communicator {
    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.membership.rank
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> u32 {
        self.membership.ranks
    }

    /// What it is called in calls and events that name a communicator, and by the provider. It is the name that it was joined by, after
    /// `job/` where a [job](JoinOptions::job) was named. Of a [split](Self::split), the one before's with `#`, the number of the split,
    /// `.` and the color.
    pub fn name(&self) -> &str {
        &self.membership.name
    }

    /// The most operations in flight of its attachment.
    pub(crate) fn entries(&self) -> u32 {
        self.membership.shared.entries
    }

    /// Where its tensors lie.
    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Where it goes on from another ([`Communicator::regroup`]): by rank, the rank there, and nothing for newcomers. Empty where it does
    /// not, and where it has more than 1,024 ranks.
    pub fn before(&self) -> &[Option<Rank>] {
        &self.membership.before
    }

    /// The same membership, whose operations have these options. It costs two reference counts: make one for each call, or keep it.
    ///
    /// # Errors
    /// [`Error::TimeoutTooLong`] where the time-out is longer than the operator allows.
    pub fn with(&self, options: OperationOptions) -> Result<Self, Error> {
        self.membership.shared.operation_timeout_ns(options.timeout)?;
        let (membership, pool) = (Arc::clone(&self.membership), Arc::clone(&self.pool));
        Ok(Self { membership, pool, options, group: self.group.clone() })
    }

    /// The same membership, whose calls go into a group. A group may have calls of several communicators.
    ///
    /// # Errors
    /// [`Error::Foreign`] where the group is another attachment's.
    pub fn grouped(&self, group: &Group) -> Result<Self, Error> {
        if !Arc::ptr_eq(group.attachment(), &self.membership.shared) {
            return Err(Error::Foreign);
        }
        let (membership, pool) = (Arc::clone(&self.membership), Arc::clone(&self.pool));
        Ok(Self { membership, pool, options: self.options, group: Some(Arc::clone(group.calls())) })
    }

    /// Ends the communicator at all ranks. Whoever waits in this process for one of its operations has [`Error::Aborted`] at once, as
    /// does every later call on it. Other ranks' operations end, within a second, with the same error, which names this rank. From any
    /// thread; once more it does nothing, and on a communicator that has ended nothing for others. Members may
    /// [regroup](Self::regroup).
    ///
    /// An operation that was in flight may still read and write its tensors until the agent has heard. Its memory is not given to
    /// other tensors until then.
    pub fn abort(&self) {
        let Membership { shared, handle, aborted, .. } = &*self.membership;
        let Ok(mut state) = shared.lock() else { return };
        if !aborted.swap(true, Ordering::AcqRel) {
            state.abort(*handle);
            drop(state);
            shared.nudge();
        }
    }

    /// Goes on with the ranks that are left, as a new communicator of the same name. Ranks that are gone are left out,
    /// and processes that [wait](crate::Client::enter) to be taken in come in. Every member that stays calls this, at
    /// the same place in the order of operations. One that leaves drops its communicator instead. One whose process or
    /// host is lost is not waited for, and one whose host is in maintenance is refused. Blocks until it has formed. The
    /// budget is the one before's. Drop this one then: it is no longer the communicator of that name, and if the call
    /// fails it is as it was.
    ///
    /// An operation that failed because ranks were lost is to be called again, on what it was called with: where it was in place,
    /// its tensor may hold parts of the result.
    ///
    /// # Errors
    /// [`Error::Regroup`] where too few have come in time, or the communicator is over by its
    /// [policy](crate::Constraints::on_failure): [`JoinRefusal::Over`].
    pub fn regroup(&self, options: &RegroupOptions) -> Result<Self, Error> {
        let Membership { shared, handle, name, rank, timeout_ns, .. } = &*self.membership;
        let who = Regrouping::Member { communicator: handle.0 };
        let key = options.key.unwrap_or(rank.0);
        PendingJoin::regroup(shared, &self.pool, name, who, (key, *timeout_ns), options)?.wait()
    }

    /// Splits this communicator into new ones by color. Ranks that name the same color become one of their own, ordered
    /// by `key` and then by their ranks here. This one goes on. Every rank calls it, at the same place in the order of
    /// its splits; one without a color gets no communicator. Blocks until all have called. Those that come of it are
    /// full ones: with a place among those of the job, to be split and regrouped, with the budget of this one.
    ///
    /// ```no_run
    /// # use harmonaize_client::{Communicator, Error};
    /// # use std::time::Duration;
    /// # fn grid(job: &Communicator) -> Result<(), Error> {
    /// // Eight ranks of tensor parallelism beside each other, and one of data parallelism across.
    /// let (rank, within) = (job.rank().0, Duration::from_secs(60));
    /// let tensor = job.split(Some(rank / 8), rank, within)?;
    /// let data = job.split(Some(rank % 8), rank, within)?;
    /// // The first four ranks alone.
    /// let first = job.split((rank < 4).then_some(0), rank, within)?;
    /// assert_eq!(first.is_some(), rank < 4);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Split`], at all ranks that have called alike: [`JoinRefusal::Timeout`] with those that have not, after the least timeout of
    /// those that have; [`JoinRefusal::RankLost`] where a rank is gone, [`JoinRefusal::Over`] where this one is over,
    /// [`JoinRefusal::Quota`] where there would be too many. [`JoinRefusal::Taken`] where this process calls it twice at once.
    pub fn split(&self, color: Option<u32>, key: u32, timeout: Duration) -> Result<Option<Self>, Error> {
        let Membership { shared, handle, name, timeout_ns, .. } = &*self.membership;
        let split =
            PendingJoin::split(shared, &self.pool, (name, *handle), (color, key), timeout, *timeout_ns)?;
        match split.wait() {
            Ok(communicator) => Ok(Some(communicator)),
            Err(Error::Regroup { kind: JoinRefusal::LeftOut, .. }) => Ok(None),
            Err(Error::Regroup { name, kind, text, concerned }) => {
                Err(Error::Split { name, kind, text, concerned })
            }
            Err(error) => Err(error),
        }
    }

    /// Wants another budget for this communicator from now on. It is in effect once all ranks have asked for the same, from the
    /// same place in the operations' order on all of them, which may lie in the middle of one; until then the one before is.
    /// Returns when the agent has passed it on.
    ///
    /// # Errors
    /// [`Error::Budget`] where it makes no sense or the communicator has ended, [`Error::TooOften`] where the tenant has asked the
    /// provider too much lately.
    pub fn set_budget(&self, budget: &Budget) -> Result<(), Error> {
        let (membership, communicator) = (&*self.membership, self.membership.handle.0);
        let shared = &membership.shared;
        if membership.is_aborted() {
            return Err(membership.aborted());
        }
        let budget = budget.clone();
        let id = shared.lock()?.request(|id| Request::SetBudget { id, communicator, budget })?;
        let answered = shared.wait(Instant::now().checked_add(BUDGET_WITHIN), |state| {
            let answer = state.answer(id);
            (answer.is_some() || membership.is_aborted()).then_some(answer)
        })?;
        match answered.flatten() {
            Some(Answer::BudgetSet { refused: None, .. }) => Ok(()),
            Some(Answer::BudgetSet { refused: Some(why), .. }) => {
                Err(Error::from_request_error(why, Error::Budget))
            }
            Some(_) => Err(ProtocolError::Unexpected(RequestKind::Budget).into()),
            None => {
                shared.lock()?.forget(id);
                if membership.is_aborted() {
                    return Err(membership.aborted());
                }
                Err(Error::Budget(format!("no answer from the agent within {BUDGET_WITHIN:?}")))
            }
        }
    }

    /// Ends a step of the operations that are marked as gradients ([`OperationOptions::gradients`]), and estimates their noise. That is by
    /// how much ranks' gradients are longer than their mean, averaged over about `memory` steps. `None` before the first step that can be
    /// estimated.
    /// A step's gradient may be the tensors of several operations; this rank has seen the ends of all. Steps that are not to be measured
    /// mark none, and do without this call.
    ///
    /// Each rank's input is the mean gradient of `samples` samples of its own. All ranks call this with the same numbers, in the order of
    /// operations: it adds up 32 bytes over the ranks, for as long as the operation time-out at most. A regrouped communicator begins anew.
    ///
    /// ```no_run
    /// # use harmonaize_client::{Communicator, Error, OperationOptions, ReduceOp, Tensor};
    /// # use std::time::Duration;
    /// # fn scale(job: &Communicator, gradients: &Tensor) -> Result<Option<f64>, Error> {
    /// let marked = job.with(OperationOptions { gradients: true, ..OperationOptions::default() })?;
    /// marked.all_reduce_in_place(gradients, ReduceOp::Average)?.wait(Duration::from_secs(60))?;
    /// let noise = job.gradient_noise(32, 200)?;
    /// # Ok(noise.and_then(|noise| noise.scale()))
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] where a number is 0, there is one rank alone, or ranks have ended different numbers of marked operations; and those
    /// of an AllReduce. The step is lost then.
    pub fn gradient_noise(&self, samples: u32, memory: u32) -> Result<Option<GradientNoise>, Error> {
        let (gradients, ranks) = (&self.membership.gradients, self.ranks());
        if samples == 0 || memory == 0 || ranks < 2 {
            return Err(Error::Shape(format!(
                "noise of gradients of {samples} samples at each of {ranks} ranks, over {memory} steps; it takes a sample, two ranks and a step"
            )));
        }
        let exchanged = Tensor::new(&self.pool, Dtype::F64, 4)?;
        exchanged.write(0, &gradients.take_step())?;
        let (membership, pool) = (Arc::clone(&self.membership), Arc::clone(&self.pool));
        let options = OperationOptions { gradients: false, ..self.options };
        let unmarked = Self { membership, pool, options, group: None };
        unmarked.all_reduce_in_place(&exchanged, ReduceOp::Sum)?.wait(Duration::MAX)?;
        let mut sums = [0.0; 4];
        exchanged.read(0, &mut sums)?;
        gradients.end_step(sums, ranks, samples, memory)
    }

    /// Starts an AllReduce: `output` becomes the reduction of all ranks' `input`. Both of the same type and size; may be the
    /// same tensor.
    pub fn all_reduce(&self, input: &Tensor, output: &Tensor, reduce: ReduceOp) -> Result<Operation, Error> {
        same_shape(input, output)?;
        let count = input.elements();
        self.submit(Collective::AllReduce, reduce, Rank(0), count, [Some(input), Some(output)], None)
    }

    /// Starts an AllReduce with error feedback. What fewer bits leave out of this sum is added to the next one with this
    /// feedback. It belongs to one tensor of f32, step after step; other ranks may do without. Budget and receipt are
    /// of what was to be sent then: the tensors with what they were owed. Where nothing is coded, nothing changes.
    ///
    /// # Errors
    /// [`Error::Shape`] where the feedback is of another size, or an operation with it is in flight.
    pub fn all_reduce_with_feedback(
        &self,
        input: &Tensor,
        output: &Tensor,
        reduce: ReduceOp,
        feedback: &Feedback,
    ) -> Result<Operation, Error> {
        same_shape(input, output)?;
        if input.dtype() != Dtype::F32 {
            return Err(Error::Dtype { expected: Dtype::F32, found: input.dtype() });
        }
        let count = input.elements();
        self.submit(
            Collective::AllReduce,
            reduce,
            Rank(0),
            count,
            [Some(input), Some(output)],
            Some(Beside::Feedback(feedback)),
        )
    }

    /// Starts an AllReduce of `tensor` in place.
    pub fn all_reduce_in_place(&self, tensor: &Tensor, reduce: ReduceOp) -> Result<Operation, Error> {
        self.all_reduce(tensor, tensor, reduce)
    }

    /// Starts an AllToAll: block `r` of `input` goes to rank `r`, and block `r` of `output` comes from rank `r`. Both of the
    /// same type and size, a multiple of the number of ranks.
    pub fn all_to_all(&self, input: &Tensor, output: &Tensor) -> Result<Operation, Error> {
        same_shape(input, output)?;
        let count = self.block_of(Collective::AllToAll, input)?;
        self.submit(Collective::AllToAll, ReduceOp::Sum, Rank(0), count, [Some(input), Some(output)], None)
    }

    /// Starts an AllGather: block `r` of every rank's `output` becomes rank `r`'s `input`. Of the same type, `output` with as many
    /// elements as all inputs together.
    pub fn all_gather(&self, input: &Tensor, output: &Tensor) -> Result<Operation, Error> {
        let count = self.block_of(Collective::AllGather, output)?;
        one_block(Collective::AllGather, input, output, count)?;
        self.submit(Collective::AllGather, ReduceOp::Sum, Rank(0), count, [Some(input), Some(output)], None)
    }

    /// Starts an AllGather in place: this rank's input is the block of `tensor` with its number. The tensor has a multiple of the number
    /// of ranks of elements.
    pub fn all_gather_in_place(&self, tensor: &Tensor) -> Result<Operation, Error> {
        let count = self.block_of(Collective::AllGather, tensor)?;
        self.submit(Collective::AllGather, ReduceOp::Sum, Rank(0), count, [Some(tensor); 2], None)
    }

    /// Starts a ReduceScatter: `output` becomes the reduction of all ranks' block of `input` with this rank's number. Of the same type,
    /// `input` with as many elements as all outputs together.
    pub fn reduce_scatter(
        &self,
        input: &Tensor,
        output: &Tensor,
        reduce: ReduceOp,
    ) -> Result<Operation, Error> {
        let count = self.block_of(Collective::ReduceScatter, input)?;
        one_block(Collective::ReduceScatter, output, input, count)?;
        self.submit(Collective::ReduceScatter, reduce, Rank(0), count, [Some(input), Some(output)], None)
    }

    /// Starts a ReduceScatter in place. The result is the block of `tensor` with this rank's number; the other blocks
    /// stay as they are. The tensor has a multiple of the number of ranks of elements.
    pub fn reduce_scatter_in_place(&self, tensor: &Tensor, reduce: ReduceOp) -> Result<Operation, Error> {
        let count = self.block_of(Collective::ReduceScatter, tensor)?;
        self.submit(Collective::ReduceScatter, reduce, Rank(0), count, [Some(tensor); 2], None)
    }

    /// Starts a Broadcast: every rank's `tensor` becomes the root's.
    pub fn broadcast(&self, tensor: &Tensor, root: Rank) -> Result<Operation, Error> {
        self.broadcast_into(Some(tensor), tensor, root)
    }

    /// Starts a Broadcast: every rank's `output` becomes the root's `input`. Both of the same type and size; only the root needs an input.
    pub fn broadcast_into(
        &self,
        input: Option<&Tensor>,
        output: &Tensor,
        root: Rank,
    ) -> Result<Operation, Error> {
        let input = self.of_root(Collective::Broadcast, root, input)?;
        input.map_or(Ok(()), |input| same_shape(input, output))?;
        let count = output.elements();
        self.submit(Collective::Broadcast, ReduceOp::Sum, root, count, [input, Some(output)], None)
    }

    /// Starts a Reduce: the root's `output` becomes the reduction of all ranks' `input`. Both of the same type and size, and may be the
    /// same tensor; only the root needs an output.
    pub fn reduce(
        &self,
        input: &Tensor,
        output: Option<&Tensor>,
        reduce: ReduceOp,
        root: Rank,
    ) -> Result<Operation, Error> {
        let output = self.of_root(Collective::Reduce, root, output)?;
        output.map_or(Ok(()), |output| same_shape(input, output))?;
        self.submit(Collective::Reduce, reduce, root, input.elements(), [Some(input), output], None)
    }

    /// Starts a Reduce in place: the root's `tensor` becomes the reduction of all ranks'; the others' stay as they are.
    pub fn reduce_in_place(&self, tensor: &Tensor, reduce: ReduceOp, root: Rank) -> Result<Operation, Error> {
        self.reduce(tensor, Some(tensor), reduce, root)
    }

    /// Starts a Gather: block `r` of the root's `output` becomes rank `r`'s `input`. Of the same type, `output` with as many elements as all
    /// inputs together; only the root needs an output.
    pub fn gather(&self, input: &Tensor, output: Option<&Tensor>, root: Rank) -> Result<Operation, Error> {
        let output = self.of_root(Collective::Gather, root, output)?;
        if let Some(all) = output {
            one_block(Collective::Gather, input, all, self.block_of(Collective::Gather, all)?)?;
        }
        self.submit(Collective::Gather, ReduceOp::Sum, root, input.elements(), [Some(input), output], None)
    }

    /// Starts a Gather in place. At the root `tensor` is the output, whose block of the root's number is its input; at the others it is the
    /// input.
    pub fn gather_in_place(&self, tensor: &Tensor, root: Rank) -> Result<Operation, Error> {
        let all = self.of_root(Collective::Gather, root, Some(tensor))?;
        let count = all.map_or(Ok(tensor.elements()), |all| self.block_of(Collective::Gather, all))?;
        self.submit(Collective::Gather, ReduceOp::Sum, root, count, [Some(tensor), all], None)
    }

    /// Starts a Scatter: rank `r`'s `output` becomes block `r` of the root's `input`. Of the same type, `input` with as many elements as all
    /// outputs together; only the root needs an input.
    pub fn scatter(&self, input: Option<&Tensor>, output: &Tensor, root: Rank) -> Result<Operation, Error> {
        let input = self.of_root(Collective::Scatter, root, input)?;
        if let Some(all) = input {
            one_block(Collective::Scatter, output, all, self.block_of(Collective::Scatter, all)?)?;
        }
        self.submit(Collective::Scatter, ReduceOp::Sum, root, output.elements(), [input, Some(output)], None)
    }

    /// Starts a Scatter in place. At the root `tensor` is the input and stays as it is; its block of the root's number is the output. At
    /// the others `tensor` is the output.
    pub fn scatter_in_place(&self, tensor: &Tensor, root: Rank) -> Result<Operation, Error> {
        let all = self.of_root(Collective::Scatter, root, Some(tensor))?;
        let count = all.map_or(Ok(tensor.elements()), |all| self.block_of(Collective::Scatter, all))?;
        self.submit(Collective::Scatter, ReduceOp::Sum, root, count, [all, Some(tensor)], None)
    }

    /// Starts an AllGather whose inputs differ in size. Rank `r`'s input has `counts[r]` elements, perhaps none, and
    /// every rank gives the same counts. The inputs follow one another in `output`. In place where `input` is the
    /// [slice](Tensor::slice) of `output` that is its own.
    ///
    /// Like all calls with counts it is never compressed.
    ///
    /// # Errors
    /// [`Error::Shape`] where counts and tensors do not fit each other. [`Error::Operation`] of [`Status::Mismatch`](crate::Status::Mismatch),
    /// with a text of who said what, where ranks' counts differ.
    pub fn all_gather_v(&self, input: &Tensor, output: &Tensor, counts: &[u64]) -> Result<Operation, Error> {
        let tensors = [Some(input), Some(output)];
        self.uneven(Collective::AllGather, ReduceOp::Sum, Rank(0), tensors, counts, largest(counts))
    }

    /// Starts a ReduceScatter whose blocks differ in size. `output` becomes the reduction of all ranks' block of `input` with this rank's
    /// number, of `counts[r]` elements for rank `r`. Counts, place and errors as [`Self::all_gather_v`].
    pub fn reduce_scatter_v(
        &self,
        input: &Tensor,
        output: &Tensor,
        reduce: ReduceOp,
        counts: &[u64],
    ) -> Result<Operation, Error> {
        let tensors = [Some(input), Some(output)];
        self.uneven(Collective::ReduceScatter, reduce, Rank(0), tensors, counts, largest(counts))
    }

    /// Starts a Gather whose inputs differ in size, of `counts[r]` elements at rank `r`; only the root needs an output. Counts, place and
    /// errors as [`Self::all_gather_v`].
    pub fn gather_v(
        &self,
        input: &Tensor,
        output: Option<&Tensor>,
        counts: &[u64],
        root: Rank,
    ) -> Result<Operation, Error> {
        let tensors = [Some(input), self.of_root(Collective::Gather, root, output)?];
        self.uneven(Collective::Gather, ReduceOp::Sum, root, tensors, counts, largest(counts))
    }

    /// Starts a Scatter whose blocks differ in size, of `counts[r]` elements for rank `r`; only the root needs an input. Counts, place and
    /// errors as [`Self::all_gather_v`].
    pub fn scatter_v(
        &self,
        input: Option<&Tensor>,
        output: &Tensor,
        counts: &[u64],
        root: Rank,
    ) -> Result<Operation, Error> {
        let tensors = [self.of_root(Collective::Scatter, root, input)?, Some(output)];
        self.uneven(Collective::Scatter, ReduceOp::Sum, root, tensors, counts, largest(counts))
    }

    /// Starts an AllToAll whose blocks differ in size. Of `input`, `send_counts[r]` elements go to rank `r`, and
    /// `recv_counts[r]` of `output` come from rank `r`. `most` is at least the largest count of any pair of ranks, and
    /// the same at all ranks. Errors as [`Self::all_gather_v`]; a mismatch names the two ranks of the pair.
    pub fn all_to_all_v(
        &self,
        input: &Tensor,
        send_counts: &[u64],
        output: &Tensor,
        recv_counts: &[u64],
        most: u64,
    ) -> Result<Operation, Error> {
        if send_counts.len() != recv_counts.len() {
            return Err(Error::Shape(format!(
                "{} counts of what is sent, {} of what is received; they must be as many as ranks",
                send_counts.len(),
                recv_counts.len()
            )));
        }
        let own = self.rank().0 as usize;
        if send_counts.get(own) != recv_counts.get(own) {
            return Err(Error::Shape(
                "a rank receives of itself what it sends itself; the counts differ".into(),
            ));
        }
        let counts = [send_counts, recv_counts].concat();
        let tensors = [Some(input), Some(output)];
        self.uneven(Collective::AllToAll, ReduceOp::Sum, Rank(0), tensors, &counts, most)
    }

    /// Submits an operation with counts, if they fit the tensors.
    fn uneven(
        &self,
        collective: Collective,
        reduce: ReduceOp,
        root: Rank,
        tensors: [Option<&Tensor>; 2],
        counts: &[u64],
        most: u64,
    ) -> Result<Operation, Error> {
        let (rank, ranks) = (self.rank(), self.ranks());
        if counts.len() != collective.said_counts(ranks) as usize {
            return Err(Error::Shape(format!(
                "{collective} with {} counts among {ranks} ranks; there must be one for each rank",
                counts.len()
            )));
        }
        if let Some(over) = counts.iter().find(|count| **count > most) {
            return Err(Error::Shape(format!(
                "{collective} with a count of {over}, where {most} is the most"
            )));
        }
        let index = |output: bool, block: u32| match (collective.is_pairwise(), output) {
            (true, false) => block,
            (true, true) => ranks.saturating_add(block),
            (false, false) => collective.count_of_input(rank, block, ranks),
            (false, true) => collective.count_of_output(rank, block, ranks),
        };
        let blocks = collective.blocks(ranks, rank, root);
        for ((tensor, blocks), output) in tensors.into_iter().zip(blocks).zip([false, true]) {
            let Some(tensor) = tensor else { continue };
            let said = (0..blocks).filter_map(|block| counts.get(index(output, block) as usize));
            let elements = said.fold(0_u64, |sum, count| sum.saturating_add(*count));
            if tensor.elements() != elements {
                return Err(Error::Shape(format!(
                    "{collective} with counts of {elements} elements and a tensor of {}; they must be equal",
                    tensor.elements()
                )));
            }
        }
        if let [Some(input), Some(output)] = tensors
            && input.dtype() != output.dtype()
        {
            return Err(Error::Dtype { expected: input.dtype(), found: output.dtype() });
        }
        self.submit(collective, reduce, root, most, tensors, Some(Beside::Counts(counts)))
    }

    /// Starts a Barrier: ends when every rank has started it.
    pub fn barrier(&self) -> Result<Operation, Error> {
        self.submit(Collective::Barrier, ReduceOp::Sum, Rank(0), 0, [None; 2], None)
    }

    /// Starts to send `tensor` to a rank, which [receives](Self::recv) one of the same type and size. It has ended once all of it is there.
    /// Sends and receives are in no order with collectives, nor with those of other ranks; of those from one rank to another
    /// the first send goes to the first receive. A rank may send itself, if it receives before it waits.
    ///
    /// ```no_run
    /// # use harmonaize_client::{Communicator, Error, Rank, Tensor};
    /// # use std::time::Duration;
    /// # fn shift(job: &Communicator, mine: &Tensor, theirs: &Tensor) -> Result<(), Error> {
    /// let (rank, ranks) = (job.rank().0, job.ranks());
    /// let mut sent = job.send(mine, Rank((rank + 1) % ranks))?;
    /// let mut received = job.recv(theirs, Rank((rank + ranks - 1) % ranks))?;
    /// sent.wait(Duration::from_secs(30))?;
    /// received.wait(Duration::from_secs(30))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] where there is no such rank. [`Error::Operation`] of [`Status::Mismatch`](crate::Status::Mismatch) when both ends are
    /// called with other types or sizes, of [`Status::Timeout`](crate::Status::Timeout) when the other end is not called in time;
    /// either ends the communicator.
    pub fn send(&self, tensor: &Tensor, to: Rank) -> Result<Operation, Error> {
        self.submit_p2p(p2p(Direction::Send, Some(to), tensor), tensor)
    }

    /// Starts to receive what a rank [sends](Self::send): `tensor` becomes that.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub fn recv(&self, tensor: &Tensor, from: Rank) -> Result<Operation, Error> {
        self.submit_p2p(p2p(Direction::Receive, Some(from), tensor), tensor)
    }

    /// Starts to receive what any rank sends that no receive before this one is for: whose send comes first. [`crate::Receipt::peer`]
    /// names it.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub fn recv_any(&self, tensor: &Tensor) -> Result<Operation, Error> {
        self.submit_p2p(p2p(Direction::Receive, None, tensor), tensor)
    }

    /// Has the agent copy a tensor into another one of as many bytes. It is a message from this rank to itself, whose ends are
    /// called both, or neither.
    pub(crate) fn copy(&self, from: &Tensor, into: &Tensor) -> Result<[Operation; 2], Error> {
        let group = Group::new(&self.membership.shared);
        let (calls, me) = (self.grouped(&group)?, Some(self.rank()));
        let end = |direction, tensor: &Tensor| {
            let signature = P2pSignature { direction, peer: me, dtype: Dtype::U8, count: tensor.bytes() };
            calls.submit_p2p(signature, tensor)
        };
        let ends = [end(Direction::Send, from)?, end(Direction::Receive, into)?];
        group.end()?;
        Ok(ends)
    }

    /// What the root alone gives: nothing at the others.
    fn of_root<'a>(
        &self,
        collective: Collective,
        root: Rank,
        tensor: Option<&'a Tensor>,
    ) -> Result<Option<&'a Tensor>, Error> {
        match tensor {
            _ if root.0 >= self.ranks() => {
                Err(Error::Shape(format!("root {root} of a communicator of {} ranks", self.ranks())))
            }
            None if root == self.rank() => Err(Error::Shape(format!(
                "{collective} at its root {root} without the tensor that a root gives"
            ))),
            given => Ok(given.filter(|_| root == self.rank())),
        }
    }

    /// Elements of each rank's block of a tensor.
    fn block_of(&self, collective: Collective, tensor: &Tensor) -> Result<u64, Error> {
        let (elements, ranks) = (tensor.elements(), u64::from(self.ranks()));
        if elements % ranks != 0 {
            return Err(Error::Shape(format!(
                "{collective} of {elements} elements among {ranks} ranks; the elements must be a multiple of the ranks"
            )));
        }
        Ok(elements / ranks)
    }

    fn submit(
        &self,
        collective: Collective,
        reduce: ReduceOp,
        root: Rank,
        count: u64,
        tensors: [Option<&Tensor>; 2],
        beside: Option<Beside<'_>>,
    ) -> Result<Operation, Error> {
        if self.membership.is_aborted() {
            return Err(self.membership.aborted());
        }
        if tensors.iter().flatten().any(|tensor| !Arc::ptr_eq(&tensor.block.pool, &self.pool)) {
            return Err(Error::Foreign);
        }
        let dtype = tensors.iter().flatten().next().map_or(Dtype::U8, |tensor| tensor.dtype());
        if collective.reduces() && !reduce.takes(dtype) {
            return Err(Error::Reduction { reduce, dtype });
        }
        let marked = match tensors {
            [Some(input), Some(output)] if self.options.gradients && collective == Collective::AllReduce => {
                Some(Box::new(Marked::start(input, output, reduce, self.ranks())?))
            }
            _ => None,
        };
        let mut regions = tensors.map(|tensor| tensor.map(Tensor::region).unwrap_or_default());
        if let [Some(input), Some(output)] = tensors
            && std::ptr::eq(input, output)
            && !matches!(beside, Some(Beside::Counts(_)))
            && let Some([of_input, of_output]) = collective.shared_block(self.rank(), root)
        {
            // In place, the one begins within the other where they share a block.
            let bytes = count.saturating_mul(dtype.size() as u64);
            let blocks = collective.blocks(self.ranks(), self.rank(), root);
            for ((region, other), blocks) in regions.iter_mut().zip([of_output, of_input]).zip(blocks) {
                region.offset = region.offset.saturating_add(bytes.saturating_mul(other.into()));
                region.bytes = bytes.saturating_mul(blocks.into());
            }
        }
        let [input, output] = regions;
        let used = |tensor: Option<&Tensor>, region| tensor.map(|tensor| (Arc::clone(&tensor.block), region));
        let [read, written] = tensors;
        let mut buffers = Buffers {
            tensors: [used(read, input), used(written, output)],
            sliced: tensors.iter().flatten().any(|tensor| tensor.is_slice()),
            ..Buffers::default()
        };
        let (mut owing, mut bits) = ([Region::default(); 2], 0);
        match beside {
            Some(Beside::Feedback(feedback)) => {
                if !Arc::ptr_eq(feedback.pool(), &self.pool) {
                    return Err(Error::Foreign);
                }
                let (halves, in_use) = feedback.start(count)?;
                (owing, bits) = (halves, flags::FEEDBACK);
                buffers.feedback = Some(in_use);
            }
            Some(Beside::Counts(said)) => {
                let counts = Tensor::new(&self.pool, Dtype::U64, said.len() as u64)?;
                counts.write(0, said)?;
                (owing, bits) = ([counts.region(), Region::default()], flags::UNEVEN);
                buffers.counts = Some(counts);
            }
            None => {}
        }
        let [owed, left_out] = owing;
        let scales = reduce == ReduceOp::PremulSum;
        let submission = Submission {
            collective: collective.code(),
            dtype: dtype.code(),
            reduce: reduce.code(),
            root: root.0,
            count,
            flags: bits,
            input,
            output,
            residual_in: owed,
            residual_out: left_out,
            factor: if scales { self.options.factor.unwrap_or(1.0).to_bits() } else { 0 },
            ..Default::default()
        };
        let signature =
            Signature { collective, dtype, reduce, root, count, uneven: bits & flags::UNEVEN != 0 };
        self.start(submission, buffers, Called::Collective(signature), marked)
    }

    fn submit_p2p(&self, signature: P2pSignature, tensor: &Tensor) -> Result<Operation, Error> {
        if self.membership.is_aborted() {
            return Err(self.membership.aborted());
        }
        if !Arc::ptr_eq(&tensor.block.pool, &self.pool) {
            return Err(Error::Foreign);
        }
        if let Some(peer) = signature.peer.filter(|peer| peer.0 >= self.ranks()) {
            return Err(Error::Shape(format!("rank {peer} of {}; there is none", self.ranks())));
        }
        let (region, used) = (tensor.region(), Some((Arc::clone(&tensor.block), tensor.region())));
        let nothing = Region::default();
        let (tensors, input, output) = match signature.direction {
            Direction::Send => ([used, None], region, nothing),
            Direction::Receive => ([None, used], nothing, region),
        };
        let buffers = Buffers { tensors, sliced: tensor.is_slice(), ..Buffers::default() };
        let submission = Submission {
            collective: signature.direction.code(),
            dtype: signature.dtype.code(),
            root: signature.peer.map_or(ANY_RANK, |peer| peer.0),
            count: signature.count,
            input,
            output,
            ..Submission::default()
        };
        self.start(submission, buffers, Called::P2p(signature), None)
    }

    /// Submits with the options.
    fn start(
        &self,
        submission: Submission,
        mut buffers: Buffers,
        called: Called,
        marked: Option<Box<Marked>>,
    ) -> Result<Operation, Error> {
        if let Some(journal) = &self.membership.journal {
            buffers.watched = Some(Box::new(Watched::start(journal, called)));
        }
        let OperationOptions { timeout, priority, class, deadline, iteration, factor: _, gradients: _ } =
            self.options;
        let submission = Submission {
            communicator: self.membership.handle.0,
            tensor_class: class,
            priority,
            deadline_ns: deadline.map_or(0, nanos),
            iteration,
            timeout_ns: timeout.map_or(self.membership.timeout_ns, |timeout| nanos(timeout).max(1)),
            ..submission
        };
        let shared = &self.membership.shared;
        let cookie = match &self.group {
            Some(group) => group.add(shared, submission, buffers)?,
            None => shared.poll()?.submit(submission, buffers, shared.entries)?,
        };
        Ok(Operation::new(Arc::clone(&self.membership), cookie, called, self.group.clone(), marked))
    }
}

/// What an operation has beside its tensors.
enum Beside<'a> {
    Feedback(&'a Feedback),
    /// As this rank [says](Collective::said_counts) them.
    Counts(&'a [u64]),
}

fn same_shape(input: &Tensor, output: &Tensor) -> Result<(), Error> {
    if input.dtype() != output.dtype() {
        return Err(Error::Dtype { expected: input.dtype(), found: output.dtype() });
    }
    if input.elements() != output.elements() {
        return Err(Error::Shape(format!(
            "an input of {} elements and an output of {}; they must be equal",
            input.elements(),
            output.elements()
        )));
    }
    Ok(())
}

fn p2p(direction: Direction, peer: Option<Rank>, tensor: &Tensor) -> P2pSignature {
    P2pSignature { direction, peer, dtype: tensor.dtype(), count: tensor.elements() }
}

fn largest(counts: &[u64]) -> u64 {
    counts.iter().copied().max().unwrap_or(0)
}

/// Whether a tensor has the size of one block of the other.
fn one_block(collective: Collective, one: &Tensor, all: &Tensor, count: u64) -> Result<(), Error> {
    if one.dtype() != all.dtype() {
        return Err(Error::Dtype { expected: all.dtype(), found: one.dtype() });
    }
    if one.elements() != count {
        return Err(Error::Shape(format!(
            "{collective} of blocks of {count} elements and a tensor of {}; they must be equal",
            one.elements()
        )));
    }
    Ok(())
}
