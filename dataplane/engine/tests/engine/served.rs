//! An aggregator behind a socket of its own, and engines that are told of it.

use crate::common::World;
use harmonaize_abi::{Completion, Dtype, GrantId, ReduceOp};
use harmonaize_aggregator::{
    Aggregator as Machine, Grant, Outbox, PayloadFormat, Pool, Recipient, Share, worker_key,
};
use harmonaize_core::Aggregation;
use harmonaize_engine::Aggregator;
use harmonaize_plan::Tuning;
use harmonaize_transport::Transport;
use harmonaize_transport::datagram::{DatagramConfig, Datagrams};
use harmonaize_transport::tcp::{Config, TcpTransport};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::time::Instant;

pub(crate) const COMMUNICATOR: GrantId = GrantId(0x5eed);
pub(crate) const SECRET: [u8; 32] = [9; 32];
pub(crate) const CHUNK: u32 = 256;
pub(crate) const FORMAT: PayloadFormat = PayloadFormat::Tensor { dtype: Dtype::F32, op: ReduceOp::Sum };

/// An aggregator with a thread and a socket, until it is dropped.
pub(crate) struct Served {
    address: SocketAddr,
    over: Arc<AtomicBool>,
    /// Chunks summed.
    sums: Arc<AtomicU64>,
    /// The worker that nothing is sent to any more.
    muted: Arc<AtomicU16>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// One world after another: each keeps two processors busy, and an aggregator that gets no turn is given up.
static TURN: Mutex<()> = Mutex::new(());

pub(crate) fn my_turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) struct Out<'a> {
    datagrams: &'a mut Datagrams,
    workers: &'a HashMap<u16, SocketAddr>,
    muted: u16,
    drop: &'a mut dyn FnMut() -> bool,
}

impl Outbox for Out<'_> {
    fn send(&mut self, to: Recipient, packet: &[u8]) {
        let Recipient::Worker { worker, .. } = to else { return };
        let hears = worker != self.muted && !(self.drop)();
        let Some(address) = self.workers.get(&worker).filter(|_| hears) else { return };
        self.datagrams.push(|room| {
            room[..packet.len()].copy_from_slice(packet);
            Some((*address, packet.len()))
        });
    }
}

impl Served {
    /// `lost`: of so many packets in either direction one is dropped; 0: none.
    pub(crate) fn start(at: SocketAddr, incarnation: u64, workers: u16, lost: u64) -> Self {
        Self::of(FORMAT, at, incarnation, workers, lost)
    }

    pub(crate) fn of(form: PayloadFormat, at: SocketAddr, incarnation: u64, workers: u16, lost: u64) -> Self {
        Self::granted(grant(form, workers), at, incarnation, lost)
    }

    pub(crate) fn granted(grant: Grant, at: SocketAddr, incarnation: u64, lost: u64) -> Self {
        let config = DatagramConfig { bytes: 4096, ..DatagramConfig::default() };
        let mut datagrams = Datagrams::bind(at, config).unwrap();
        let address = datagrams.local_address();
        let (over, sums) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stop, count) = (Arc::clone(&over), Arc::clone(&sums));
        let muted = Arc::new(AtomicU16::new(u16::MAX));
        let unheard = Arc::clone(&muted);
        let thread = std::thread::spawn(move || {
            let mut machine = Machine::new(incarnation, Pool::new(256, 1024));
            machine.grant(grant).unwrap();
            let (begun, mut packets) = (Instant::now(), 0_u64);
            let (mut known, mut inbox) = (HashMap::new(), Vec::new());
            while !stop.load(Ordering::Relaxed) {
                datagrams.receive(&mut |from, bytes| inbox.push((from, bytes.to_vec())));
                let mut drop = || {
                    packets = packets
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    lost > 0 && (packets >> 33).is_multiple_of(lost)
                };
                for (from, bytes) in inbox.drain(..) {
                    if drop() {
                        continue;
                    }
                    let worker = u16::from_le_bytes([bytes[4], bytes[5]]);
                    known.insert(worker, from);
                    let muted = unheard.load(Ordering::Relaxed);
                    let mut out = Out { datagrams: &mut datagrams, workers: &known, muted, drop: &mut drop };
                    machine.receive(begun.elapsed(), &bytes, &mut out);
                }
                datagrams.flush();
                count.store(machine.counters(COMMUNICATOR).unwrap().sums, Ordering::Relaxed);
                std::thread::yield_now();
            }
        });
        Self { address, over, sums, muted, thread: Some(thread) }
    }

    pub(crate) fn sums(&self) -> u64 {
        self.sums.load(Ordering::Relaxed)
    }

    /// From now on a worker hears nothing of it.
    pub(crate) fn mute(&self, worker: u16) {
        self.muted.store(worker, Ordering::Relaxed);
    }

    pub(crate) fn reached_by(&self, participants: u32) -> Vec<Aggregator> {
        let aggregator = |worker: u32| Aggregator {
            address: self.address,
            rdma: None,
            communicator: COMMUNICATOR.0,
            worker: worker as u16,
            key: worker_key(&SECRET, COMMUNICATOR, worker as u16),
            chunk_elements: CHUNK,
            window: 64,
            max_error: None,
        };
        (0..participants).map(aggregator).collect()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        assert!(matches!(ended, Some(Ok(()))) || std::thread::panicking());
    }
}

pub(crate) fn grant(form: PayloadFormat, workers: u16) -> Grant {
    Grant {
        communicator: COMMUNICATOR,
        secret: SECRET,
        workers,
        format: form,
        elements: CHUNK,
        share: Share { tenant: 1, weight: 1, guaranteed: 64, most: 256 },
        ordered: false,
        parent: None,
    }
}

pub(crate) fn any() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

pub(crate) fn rules(form: PayloadFormat) -> Aggregation {
    Aggregation {
        format: form,
        min_bytes: 1024,
        eager: true,
        broadcast_bytes: None,
        barriers: false,
        backoff: Duration::from_millis(50),
        max_backoff: Duration::from_millis(200),
    }
}

pub(crate) fn world(ranks: &[Vec<u32>], aggregators: Vec<Aggregator>) -> World {
    world_of(FORMAT, ranks, aggregators)
}

pub(crate) fn world_of(form: PayloadFormat, ranks: &[Vec<u32>], aggregators: Vec<Aggregator>) -> World {
    world_where(rules(form), ranks, aggregators, Tuning::default())
}

pub(crate) fn world_where(
    rules: Aggregation,
    ranks: &[Vec<u32>],
    aggregators: Vec<Aggregator>,
    tuning: Tuning,
) -> World {
    let transport =
        |_| Box::new(TcpTransport::bind(Config::new(any())).unwrap()) as Box<dyn Transport + Send>;
    let transports = (0..ranks.len()).map(transport).collect();
    let tuning = Tuning { chunk_bytes: 16 << 10, segment_bytes: 64 << 10, copy_bytes: 4096, ..tuning };
    World::with_aggregation(transports, ranks, tuning, (rules, aggregators))
}

/// Values of either sign over three powers of ten.
pub(crate) fn ordinary(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| ((at * (rank + 7)) as f32 * 0.37).sin() * (1 + at % 1000) as f32).collect()
}

pub(crate) fn whole_by(completions: &[Completion]) -> bool {
    completions.iter().all(|completion| (completion.algorithm, completion.fallback) == (9, 0))
}
