//! What a seed makes of a run: how many workers, over what network, and what goes wrong when.

use harmonaize_abi::{Dtype, ReduceOp};
use harmonaize_aggregator::{PayloadFormat, Task};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Duration;

pub(crate) const MICROSECOND: Duration = Duration::from_micros(1);
pub(crate) const PATIENCE: Duration = Duration::from_millis(20);
pub(crate) const RETRY_MOST: Duration = Duration::from_millis(4);

/// What goes wrong, once so many packets have been delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Incident {
    RestartWorker(usize),
    RestartAggregator(usize),
    KillAggregator(usize),
    /// The pool gives another communicator what it may.
    Squeeze,
}

/// What is done with a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Sum,
    /// The greatest of each: another reduction than the form's.
    Greatest,
    /// From this worker to all.
    Broadcast(usize),
    Barrier,
}

#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) workers: usize,
    /// Aggregators below the root; 0 if the root serves workers itself.
    pub(crate) leaves: usize,
    /// Where there are such, hosts that the root serves itself beside them.
    pub(crate) direct: usize,
    pub(crate) segments: Vec<u64>,
    /// What is done with each, if not all are sums.
    pub(crate) kinds: Vec<Kind>,
    pub(crate) elements: u32,
    pub(crate) units: u32,
    /// In ten thousand.
    pub(crate) loss: u32,
    pub(crate) duplication: u32,
    pub(crate) reordering: u32,
    pub(crate) corruption: u32,
    pub(crate) hostility: u32,
    pub(crate) incidents: Vec<(u64, Incident)>,
    /// A worker that comes so late to a segment.
    pub(crate) straggler: Option<(usize, u64, Duration)>,
    pub(crate) ordered: bool,
    /// Whether payloads are codes.
    pub(crate) coded: bool,
    /// Whether somebody repeats what a dead aggregator has sent.
    pub(crate) replaying: bool,
    /// Whether hosts are told that nobody is where an aggregator was, and by whoever is hostile also where one is.
    pub(crate) refusing: bool,
}

impl Scenario {
    /// Nothing goes wrong.
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let workers = match random.random_range(0..20) {
            0 => 1,
            1 => random.random_range(10..=16),
            _ => random.random_range(2..=8),
        };
        let elements = random.random_range(1..=8);
        let segments =
            (0..random.random_range(1..=4)).map(|_| random.random_range(1..=u64::from(elements) * 12));
        let segments = segments.collect();
        let leaves = if workers > 2 && random.random_range(0..4) == 0 { 2 } else { 0 };
        let direct =
            if leaves > 0 && random.random() { random.random_range(1..=workers - leaves) } else { 0 };
        let ordered = random.random_range(0..5) == 0;
        let grain = if ordered { workers as u32 } else { 1 };
        Self {
            seed,
            workers,
            leaves,
            direct,
            segments,
            kinds: Vec::new(),
            elements,
            units: grain * random.random_range(2..=24),
            loss: 0,
            duplication: 0,
            reordering: 0,
            corruption: 0,
            hostility: 0,
            incidents: Vec::new(),
            straggler: None,
            ordered,
            coded: false,
            replaying: false,
            refusing: false,
        }
    }

    pub(crate) fn form(&self) -> PayloadFormat {
        let words = PayloadFormat::Tensor { dtype: Dtype::I32, op: ReduceOp::Sum };
        if self.coded { super::coded::form(self.workers) } else { words }
    }

    /// Not sums alone: what one worker has goes to all, and all wait for each other.
    pub(crate) fn mixed(mut self) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ 0x6c07_8965);
        self.leaves = 0;
        for _ in 0..random.random_range(1..6) {
            self.segments.push(random.random_range(1..=u64::from(self.elements) * 12));
        }
        for elements in &mut self.segments {
            let kind = match random.random_range(0..5) {
                0 => Kind::Sum,
                1 => Kind::Barrier,
                2 => Kind::Greatest,
                _ => Kind::Broadcast(random.random_range(0..self.workers)),
            };
            if kind == Kind::Barrier {
                *elements = 0;
            }
            self.kinds.push(kind);
        }
        self
    }

    /// Some segments are reduced otherwise.
    pub(crate) fn reduced(mut self) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ 0x1f83_d9ab);
        let kinds = self.segments.iter().map(|_| [Kind::Sum, Kind::Greatest][random.random_range(0..2)]);
        self.kinds = kinds.collect();
        self
    }

    pub(crate) fn kind(&self, segment: u64) -> Kind {
        self.kinds.get(segment as usize).copied().unwrap_or(Kind::Sum)
    }

    /// What a worker is to do with a segment.
    pub(crate) fn task(&self, segment: u64, worker: usize) -> Option<Task> {
        let elements = *self.segments.get(segment as usize)?;
        Some(match self.kind(segment) {
            Kind::Sum => Task::Sum(elements),
            Kind::Greatest => Task::Other { elements, dtype: Dtype::I32, op: ReduceOp::Max },
            Kind::Broadcast(root) => Task::Broadcast { bytes: elements * 4, root: root == worker },
            Kind::Barrier => Task::Barrier,
        })
    }

    /// A network that loses, repeats, mixes and damages packets, and one who sends what nobody should believe.
    pub(crate) fn rough(mut self) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ 0x9e37_79b9);
        self.loss = [0, 100, 500][random.random_range(0..3)];
        self.duplication = 100;
        self.reordering = 500;
        self.corruption = 100;
        self.hostility = 300;
        self
    }

    /// Packets of a run without losses, about.
    pub(crate) fn packets(&self) -> u64 {
        let chunks: u64 =
            self.segments.iter().map(|elements| elements.div_ceil(u64::from(self.elements))).sum();
        (chunks + 1) * 2 * self.workers as u64
    }

    /// Workers and aggregators restart, at any moment.
    pub(crate) fn restarting(mut self) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ 0x7f4a_7c15);
        for _ in 0..random.random_range(1..=3) {
            let incident = if random.random() {
                Incident::RestartWorker(random.random_range(0..self.workers))
            } else {
                Incident::RestartAggregator(random.random_range(0..=self.leaves))
            };
            self.incidents.push((random.random_range(0..self.packets() + 8), incident));
        }
        self
    }

    /// An aggregator dies, at any moment, and does not come back.
    pub(crate) fn killing(mut self) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ 0x2545_f491);
        let incident = Incident::KillAggregator(random.random_range(0..=self.leaves));
        self.incidents.push((random.random_range(0..self.packets() + 2), incident));
        self
    }

    /// What the dead aggregator sent comes again and again.
    pub(crate) fn replaying(mut self) -> Self {
        self.replaying = true;
        self
    }

    /// The network says where nobody is any more.
    pub(crate) fn refusing(mut self) -> Self {
        self.refusing = true;
        self
    }

    /// Another communicator takes its part of the pool.
    pub(crate) fn squeezed(mut self) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ 0x51a3_77c1);
        self.incidents.push((random.random_range(0..self.packets()), Incident::Squeeze));
        self
    }

    /// One worker is late.
    pub(crate) fn straggling(mut self) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed ^ 0x3c6e_f372);
        let late = Duration::from_millis(random.random_range(1..200));
        let segment = random.random_range(0..self.segments.len() as u64);
        self.straggler = Some((random.random_range(0..self.workers), segment, late));
        self
    }
}
