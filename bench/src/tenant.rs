//! A tenant's process as the programs here need it: attached to its agent, joined, with the tensors at hand.

use crate::communicator::{Communicator, Cost};
use crate::report::{Line, now_us};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use harmonaize_client::{
    Access, AgentAddress, Algorithm, AttachOptions, Budget, Client, Dtype, Element, EventKind, JoinOptions,
    Operation, Rank, RdmaOptions, Receipt, ReduceOp, Tensor,
};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long ranks wait for each other to join.
const JOIN: Duration = Duration::from_secs(60);
/// How long an operation may take; the agent's own time-out comes first.
const OPERATION: Duration = Duration::from_secs(120);

/// How long one look for events may wait.
const EVENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Which rank of which communicator, and where its agent is.
#[derive(Args, Clone, Debug)]
pub struct Seat {
    /// The agent's socket for this tenant
    #[arg(long)]
    pub socket: Option<PathBuf>,
    /// The agent's address for tenants over TCP, instead of a socket
    #[arg(long, conflicts_with = "socket", requires_all = ["tenant", "secret"])]
    pub agent: Option<SocketAddr>,
    /// Over TCP: whose process this is
    #[arg(long, requires = "agent")]
    pub tenant: Option<String>,
    /// Over TCP: the file with the tenant's secret
    #[arg(long, requires = "agent")]
    pub secret: Option<PathBuf>,
    /// How the agent reaches tensors; over TCP by RDMA alone
    #[arg(long, value_enum)]
    pub access: Option<AccessKind>,
    /// With RDMA: this process's device, mlx5_0 or mlx5_0:1
    #[arg(long)]
    pub device: Option<String>,
    /// This rank
    #[arg(long, default_value_t = 0)]
    pub rank: usize,
    /// How many ranks there are
    #[arg(long, default_value_t = 1)]
    pub ranks: usize,
    /// The communicator's name, the same at all ranks
    #[arg(long, default_value = "job")]
    pub name: String,
}

/// What may be lost, from the command line: exact, as-bf16, a bound on vNMSE, or a codec's name.
///
/// # Errors
/// None: what is no such word is taken for a codec's name, which agents refuse if it is none.
pub fn budget(text: &str) -> Result<Budget, std::convert::Infallible> {
    Ok(match (text, text.parse()) {
        ("exact", _) => Budget::Exact,
        ("as-bf16", _) => Budget::MatchBf16,
        (_, Ok(most)) => Budget::Vnmse(most),
        (name, Err(_)) => Budget::Codecs(vec![name.to_owned()]),
    })
}

/// How the agent reaches tensors.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// Both map them.
    Mapped,
    /// Through a socket.
    Remote,
    /// By RDMA.
    Rdma,
}

impl Seat {
    fn address(&self) -> Result<AgentAddress> {
        match (&self.socket, self.agent, &self.tenant, &self.secret) {
            (Some(socket), ..) => Ok(socket.into()),
            (None, Some(address), Some(tenant), Some(secret)) => {
                Ok(AgentAddress::tcp(address, tenant, secret)?)
            }
            _ => bail!(
                "--socket is missing: the agent's socket for this tenant (or --agent, --tenant and --secret)"
            ),
        }
    }

    fn options(&self, arena_bytes: u64) -> AttachOptions {
        let access = match self.access {
            Some(AccessKind::Mapped) => Access::Mapped,
            Some(AccessKind::Remote) => Access::Remote,
            Some(AccessKind::Rdma) => Access::Rdma,
            None if self.agent.is_some() => Access::Rdma,
            None => Access::Mapped,
        };
        let rdma = RdmaOptions { device: self.device.clone(), ..RdmaOptions::default() };
        AttachOptions { access, arena_bytes, rdma, ..AttachOptions::default() }
    }

    /// Attaches with room for `bytes` bytes of tensors.
    pub fn attach(&self, bytes: u64) -> Result<Client> {
        Ok(Client::attach(self.address()?, self.options(bytes.max(1)))?)
    }
}

/// A rank that has joined.
#[derive(Debug)]
pub struct Participant {
    client: Client,
    communicator: harmonaize_client::Communicator,
    rank: usize,
    ranks: usize,
}

/// A receipt's kind of algorithm in a word.
pub fn algorithm_name(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::None => "none",
        Algorithm::WithinHost => "within host",
        Algorithm::Ring => "ring",
        Algorithm::Pairwise => "pairwise",
        Algorithm::Chain => "chain",
        Algorithm::Dissemination => "dissemination",
        Algorithm::DirectCoded => "direct, coded",
        Algorithm::OneShot => "one shot",
        Algorithm::TwoShot => "two shots",
        Algorithm::Aggregated => "aggregated",
        Algorithm::RecursiveDoubling => "recursive doubling",
        Algorithm::RecursiveHalving => "recursive halving",
        Algorithm::BinomialTree => "binomial tree",
        Algorithm::Hierarchical => "hierarchical",
        _ => "other",
    }
}

impl Participant {
    /// Attaches with room for `bytes` bytes of tensors, and joins.
    pub fn join(seat: &Seat, bytes: u64) -> Result<Self> {
        Self::join_within(seat, bytes, Budget::Exact)
    }

    /// The same; tensors may lose what the budget says.
    pub fn join_within(seat: &Seat, bytes: u64, budget: Budget) -> Result<Self> {
        ensure!(seat.rank < seat.ranks, "rank {} of {}", seat.rank, seat.ranks);
        let (rank, ranks) = (u32::try_from(seat.rank)?, u32::try_from(seat.ranks)?);
        let client = seat.attach(bytes)?;
        let options = JoinOptions { timeout: JOIN, budget, ..JoinOptions::default() };
        let communicator = client.join_with(&seat.name, Rank(rank), ranks, &options)?;
        Ok(Self { client, communicator, rank: seat.rank, ranks: seat.ranks })
    }

    /// The attachment.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// From now on prints what the provider tells its tenant, until the process ends.
    pub fn print_events(&self) -> Result<()> {
        let mut events = self.client.events(None);
        let mut batch = events.read(Duration::ZERO)?;
        std::thread::spawn(move || {
            loop {
                for event in batch.events {
                    let what = format!("{}: {:?}", event.communicator, event.kind);
                    let agreement_broken = matches!(event.kind, EventKind::AgreementBroken { .. });
                    if (Line::Notified { at_us: now_us(), what, agreement_broken }).print().is_err() {
                        return;
                    }
                }
                match events.read(EVENT_TIMEOUT) {
                    Ok(next) => batch = next,
                    // The end of the attachment among them, which operations tell of.
                    Err(_) => return,
                }
            }
        });
        Ok(())
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// A tensor in the arena.
    pub fn tensor<E: Element>(&self, elements: usize) -> Result<Tensor> {
        Ok(self.client.tensor(E::DTYPE, elements as u64)?)
    }

    /// Runs an AllReduce in place, and times it from submission to completion.
    pub fn all_reduce(&self, tensor: &Tensor, reduce: ReduceOp) -> Result<(Receipt, Duration)> {
        timed(|| self.communicator.all_reduce_in_place(tensor, reduce))
    }

    /// Runs an AllReduce from one tensor to another (or the same), and times it from submission to completion.
    pub fn all_reduce_into(
        &self,
        input: &Tensor,
        output: &Tensor,
        reduce: ReduceOp,
    ) -> Result<(Receipt, Duration)> {
        timed(|| self.communicator.all_reduce(input, output, reduce))
    }

    /// Submits an AllReduce in place; the operation is waited for by the caller.
    pub fn start_all_reduce(&self, tensor: &Tensor, reduce: ReduceOp) -> Result<Operation> {
        Ok(self.communicator.all_reduce_in_place(tensor, reduce)?)
    }

    /// Runs an operation, and times it from submission to completion.
    pub fn run(
        &self,
        start: impl FnOnce(&harmonaize_client::Communicator) -> Result<Operation, harmonaize_client::Error>,
    ) -> Result<(Receipt, Duration)> {
        timed(|| start(&self.communicator))
    }

    /// Waits until all ranks are here.
    pub fn barrier(&self) -> Result<()> {
        timed(|| self.communicator.barrier()).map(drop)
    }
}

fn timed(start: impl FnOnce() -> Result<Operation, harmonaize_client::Error>) -> Result<(Receipt, Duration)> {
    let began = Instant::now();
    let receipt = start()?.wait(OPERATION)?;
    Ok((receipt, began.elapsed()))
}

/// A worker of a training whose gradients go through the agent.
#[derive(Debug)]
pub struct Worker {
    participant: Participant,
    /// One for each number of elements that was averaged.
    tensors: Vec<Tensor>,
    lossy: bool,
}

impl Worker {
    /// Attaches with room for `bytes` bytes of gradients, and joins; gradients may lose what the budget says.
    pub fn join(seat: &Seat, bytes: u64, budget: Budget) -> Result<Self> {
        let lossy = budget != Budget::Exact;
        Ok(Self { participant: Participant::join_within(seat, bytes, budget)?, tensors: Vec::new(), lossy })
    }

    /// Its membership.
    pub fn participant(&self) -> &Participant {
        &self.participant
    }
}

impl Communicator for Worker {
    fn rank(&self) -> usize {
        self.participant.rank
    }

    fn ranks(&self) -> usize {
        self.participant.ranks
    }

    fn is_lossy(&self) -> bool {
        self.lossy
    }

    fn average(&mut self, values: &mut [f32]) -> Result<Cost> {
        let wanted = values.len() as u64;
        if !self.tensors.iter().any(|tensor| tensor.elements() == wanted) {
            self.tensors.push(self.participant.client.tensor(Dtype::F32, wanted)?);
        }
        let tensor = self.tensors.iter().find(|tensor| tensor.elements() == wanted).context("no tensor")?;
        let began = Instant::now();
        tensor.write(0, values)?;
        let written = began.elapsed();
        let (receipt, collective) = self.participant.all_reduce(tensor, ReduceOp::Average)?;
        let began = Instant::now();
        tensor.read(0, values)?;
        Ok(Cost {
            collective,
            copies: written + began.elapsed(),
            wire_bytes: receipt.wire_bytes,
            algorithm: algorithm_name(receipt.algorithm),
        })
    }
}
