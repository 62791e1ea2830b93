//! A tenant's process of one rank: joins, calls operations and checks every result, regroups where a rank was lost, leaves.

use crate::control::{LEASE, PATIENCE, SILENCE};
use crate::host::Host;
use crate::world::World;
use harmonaize_abi::session::{Budget, JoinRefusal, Regrouping};
use harmonaize_abi::{
    ABI_VERSION, Collective, CommunicatorHandle, Dtype, Rank, ReduceOp, Region, Status, Submission,
};
use harmonaize_agent::session::{AttachmentId, Joined, SessionRequest};
use harmonaize_shm::{MappedEnd, MappedTenant, TenantEnd};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

const ARENA: u64 = 4 << 20;
const ENTRIES: u32 = 8;
/// The longest that an operation may take.
pub(crate) const OPERATION: Duration = Duration::from_secs(8);
/// How much later than that its end may come: an inquiry, the slowest delays and a thread that stands still.
pub(crate) const SLACK: Duration = Duration::from_secs(5);
/// How long a join may go without an answer: it may begin in a session that is dead already.
const ANSWER: Duration = Duration::from_secs(PATIENCE.as_secs() + SILENCE.as_secs() + SLACK.as_secs());
/// How often a join that is refused is tried again.
const ATTEMPTS: u32 = 40;

/// What a rank is to do.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    pub(crate) name: &'static str,
    pub(crate) host: usize,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) operations: u32,
    /// Most operations in flight.
    pub(crate) window: u32,
    /// Elements of the largest operation.
    pub(crate) elements: u64,
    /// Milliseconds between two operations.
    pub(crate) pause: u64,
}

/// How a rank ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// With all its operations, and so many regroups.
    Done(u32),
    /// Its communicator failed, and nobody went on with it.
    Lost(String),
    /// Its own process or host was ended.
    Killed,
}

/// A member of a communicator.
struct Process {
    world: Rc<World>,
    script: Script,
    host: Rc<Host>,
    attachment: AttachmentId,
    end: MappedTenant,
}

/// Runs a rank to its end.
pub(crate) async fn run(world: Rc<World>, script: Script) -> End {
    let host = world.host(script.host);
    let (agent, descriptors) = MappedEnd::create(ARENA, ENTRIES, Box::new(())).unwrap();
    let end = MappedTenant::open(descriptors, ARENA, ENTRIES).unwrap();
    let attachment = world.next_attachment();
    let attached = SessionRequest::Attached {
        attachment,
        tenant: "a".into(),
        end: Box::new(agent),
        operation_timeout: OPERATION,
        limits: host.limits.clone(),
    };
    world.attached(script.name, script.rank, attachment);
    let mut process = Process { world, script, host, attachment, end };
    process.request(attached).await;
    let end = process.work().await;
    process.request(SessionRequest::Detached { attachment }).await;
    end
}

impl Process {
    async fn request(&self, request: SessionRequest) {
        // Of an agent that was killed nobody hears anything.
        let _ = self.host.requests.send(request).await;
    }

    fn note(&self, what: std::fmt::Arguments<'_>) {
        let Script { name, rank, .. } = &self.script;
        self.world.note(format_args!("{name} rank {rank}: {what}"));
    }

    async fn work(&mut self) -> End {
        let mut joined = match self.join().await {
            Ok(joined) => joined,
            Err(end) => return end,
        };
        let mut generation = 0;
        loop {
            self.note(format_args!("is rank {} of {}, generation {generation}", joined.rank, joined.ranks));
            // Who has joined may not know it yet, in a session that is lost.
            self.world.all_joined((self.script.name, generation), joined.ranks).await;
            let ran = self.operations(generation, &joined).await;
            let communicator = joined.communicator;
            match ran {
                Ok(()) => {
                    self.request(SessionRequest::Leave { attachment: self.attachment, communicator }).await;
                    return End::Done(generation);
                }
                Err(failed) => {
                    self.note(format_args!("{failed}"));
                    self.world.may_fail(&failed);
                    match self.regroup(communicator).await {
                        Some(more) => joined = more,
                        None => return End::Lost(failed),
                    }
                    self.request(SessionRequest::Leave { attachment: self.attachment, communicator }).await;
                }
            }
            generation += 1;
        }
    }

    async fn join(&self) -> Result<Joined, End> {
        for _ in 0..ATTEMPTS {
            let (reply, answer) = oneshot::channel();
            let Script { name, rank, ranks, .. } = self.script;
            let (attachment, timeout) = (self.attachment, PATIENCE);
            let (name, rank, budget) = (name.to_owned(), Rank(rank), Budget::default());
            self.request(SessionRequest::Join { attachment, name, rank, ranks, timeout, budget, reply })
                .await;
            match self.answer(answer, ANSWER).await {
                Some(Ok(joined)) => return Ok(joined),
                Some(Err(refused)) => {
                    self.note(format_args!("refused: {refused:?}"));
                    assert!(
                        !matches!(refused.kind, JoinRefusal::Quota),
                        "a join is refused for what is not so: {refused:?}"
                    );
                    self.world.may_refuse(&refused);
                }
                None => return Err(End::Killed),
            }
            sleep(Duration::from_millis(500)).await;
        }
        panic!("no join of {:?} came to anything", self.script);
    }

    /// What became of a join; none where the agent is gone.
    async fn answer<T>(&self, answer: oneshot::Receiver<T>, within: Duration) -> Option<T> {
        let within = within + self.world.stood_still(&self.host);
        let answer = timeout(within, answer).await;
        let answer = answer.unwrap_or_else(|_| panic!("{:?} got no answer within {within:?}", self.script));
        answer.ok().or_else(|| {
            assert!(self.world.is_killed(&self.host), "a living agent dropped a join of {:?}", self.script);
            None
        })
    }

    async fn regroup(&self, communicator: CommunicatorHandle) -> Option<Joined> {
        let (reply, answer) = oneshot::channel();
        let who = Regrouping::Member { communicator: communicator.0 };
        let (attachment, timeout, key) = (self.attachment, PATIENCE, self.script.rank);
        self.request(SessionRequest::Regroup { attachment, who, key, min_ranks: 1, timeout, reply }).await;
        let refused = match self.answer(answer, ANSWER + LEASE).await? {
            Ok(joined) => return Some(joined),
            Err(refused) => refused,
        };
        self.note(format_args!("does not regroup: {refused:?}"));
        None
    }

    /// Calls all operations, and checks what comes of each.
    async fn operations(&mut self, generation: u32, joined: &Joined) -> Result<(), String> {
        let Script { operations, window, pause, .. } = self.script;
        let (mut next, mut ended) = (0, 0);
        let mut called: Vec<Instant> = Vec::new();
        while ended < operations {
            while next < operations && next < ended + window {
                let submission = self.submission(generation, next, joined);
                if self.end.submit(&submission).is_err() {
                    self.gone().await;
                }
                self.host.bell.notify_one();
                called.push(Instant::now());
                next += 1;
            }
            let since = called[ended as usize];
            let completion = self.completion(since, ended).await;
            assert_eq!(completion.cookie, u64::from(ended), "completions come in order");
            // Behind those before it, after each of which the process does something else.
            let own = Duration::from_millis(pause) * (window - 1);
            self.world.took(since.elapsed().saturating_sub(own));
            if completion.status != Status::Ok.code() {
                let status = Status::from_code(completion.status).unwrap();
                if status != Status::BadCommunicator {
                    self.detail(joined.communicator, status).await;
                }
                let failed = format!("operation {ended} of generation {generation} ended as {status:?}");
                // Those behind it end, too.
                for rest in ended + 1..next {
                    let completion = self.completion(called[rest as usize], rest).await;
                    assert_ne!(completion.status, Status::Ok.code(), "behind a failure");
                }
                return Err(failed);
            }
            self.check(generation, ended, joined);
            ended += 1;
            sleep(Duration::from_millis(pause)).await;
        }
        Ok(())
    }

    /// Has a rank's part of an operation in its memory, and says so.
    fn submission(&self, generation: u32, operation: u32, joined: &Joined) -> Submission {
        let Called { collective, root, count } = self.called(generation, operation, joined);
        let input = self.values(generation, operation, joined.rank.0, count);
        let (input_at, output_at) = self.places(operation);
        let (input_at, blocks) = match collective {
            Collective::Broadcast => (output_at, 1),
            Collective::AllGather => (input_at, joined.ranks.into()),
            _ => (input_at, 1),
        };
        let bytes: Vec<u8> = input.iter().flat_map(|value| value.to_ne_bytes()).collect();
        self.end.memory().write(input_at, &bytes).unwrap();
        let bytes = count * 8;
        Submission {
            version: ABI_VERSION,
            collective: collective.code(),
            dtype: Dtype::U64.code(),
            reduce: ReduceOp::Sum.code(),
            root,
            count,
            communicator: joined.communicator.0,
            input: Region { offset: input_at, bytes },
            output: Region { offset: output_at, bytes: bytes * blocks },
            cookie: operation.into(),
            ..Submission::default()
        }
    }

    /// What all ranks call.
    fn called(&self, generation: u32, operation: u32, joined: &Joined) -> Called {
        let base = self.base(generation, operation);
        let root = operation % joined.ranks;
        let count = 1 + (base >> 8) % self.script.elements;
        match base % 4 {
            0 => Called { collective: Collective::Broadcast, root, count },
            1 => Called {
                collective: Collective::AllGather,
                root: 0,
                count: count.div_ceil(joined.ranks.into()),
            },
            _ => Called { collective: Collective::AllReduce, root: 0, count },
        }
    }

    /// The completion of an operation that was called then.
    async fn completion(&mut self, since: Instant, operation: u32) -> harmonaize_abi::Completion {
        loop {
            let done = Rc::clone(&self.host);
            let done = done.done.notified();
            match self.end.completion() {
                Ok(Some(completion)) => return completion,
                Ok(None) => {}
                Err(_) => self.gone().await,
            }
            let most = OPERATION + SLACK + self.world.stood_still(&self.host);
            let remains = (since + most).saturating_duration_since(Instant::now());
            if timeout(remains, done).await.is_err() {
                assert!(
                    self.world.is_killed(&self.host),
                    "operation {operation} of {:?} hangs since {most:?}",
                    self.script
                );
                self.gone().await;
            }
        }
    }

    /// The agent is gone, and nobody will ever say anything here: the process ends with it.
    async fn gone(&self) {
        assert!(self.world.is_killed(&self.host), "a living agent has let {:?} go", self.script);
        std::future::pending().await
    }

    /// Asks why the communicator ended, which an agent knows that has said so.
    async fn detail(&self, communicator: CommunicatorHandle, status: Status) {
        let (reply, answer) = oneshot::channel();
        self.request(SessionRequest::Detail { attachment: self.attachment, communicator, reply }).await;
        let Some(detail) = self.answer(answer, SLACK).await else { return };
        let detail = detail.expect("who is told of a failure may know why");
        self.note(format_args!("{status:?} of {:?}: {}", detail.ranks, detail.text));
    }

    /// A number of each operation.
    fn base(&self, generation: u32, operation: u32) -> u64 {
        let name = self.script.name.bytes().fold(0, |sum, byte| mix(sum, byte.into()));
        mix(mix(name, generation.into()), operation.into())
    }

    /// What a rank gives to an operation.
    fn values(&self, generation: u32, operation: u32, rank: u32, count: u64) -> Vec<u64> {
        let base = mix(self.base(generation, operation), rank.into());
        (0..count).map(|at| mix(base, at)).collect()
    }

    /// Where tensors of an operation lie; those in flight together lie apart.
    fn places(&self, operation: u32) -> (u64, u64) {
        let slot = u64::from(operation % self.script.window) * 2;
        let each = ARENA / 2 / u64::from(self.script.window) / 4096 * 4096;
        (slot * each, (slot + 1) * each)
    }

    fn check(&self, generation: u32, operation: u32, joined: &Joined) {
        let Called { collective, root, count } = self.called(generation, operation, joined);
        let values = |rank| self.values(generation, operation, rank, count);
        let expected: Vec<u64> = match collective {
            Collective::Broadcast => values(root),
            Collective::AllGather => (0..joined.ranks).flat_map(values).collect(),
            _ => (0..joined.ranks).map(values).fold(vec![0; count as usize], |sums, values| {
                sums.iter().zip(values).map(|(sum, value)| sum.wrapping_add(value)).collect()
            }),
        };
        let mut bytes = vec![0; expected.len() * 8];
        self.end.memory().read(self.places(operation).1, &mut bytes).unwrap();
        let found = bytes.chunks_exact(8).map(|each| u64::from_ne_bytes(each.try_into().unwrap()));
        let wrong = found.zip(&expected).position(|(found, expected)| found != *expected);
        assert_eq!(wrong, None, "{collective:?} {operation} of {:?} has a wrong result", self.script);
    }
}

/// An operation as all ranks call it.
struct Called {
    collective: Collective,
    root: u32,
    count: u64,
}

fn mix(a: u64, b: u64) -> u64 {
    let mixed =
        (a ^ b.rotate_left(32)).wrapping_add(0x1234_5678_9abc_def1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}
