//! Engines and tenants in one process, driven by hand: no thread, no agent, no control.

use harmonaize_abi::{
    ABI_VERSION, Collective, CommunicatorHandle, Completion, Dtype, Rank, ReduceOp, Region, Submission,
};
use harmonaize_core::{Aggregation, EpochPlan};
use harmonaize_engine::{
    Aggregator, AttachmentId, Command, CommunicatorId, Engine, Epoch, Formation, LocalRank, MarkReader,
    Notice, Peer,
};
use harmonaize_plan::{AlgorithmTable, Coding, Group, Participant, Plan, Tuning};
use harmonaize_shm::{AgentEnd, MappedEnd, MappedTenant, RemoteEnd, RemoteTenant, TenantEnd};
use harmonaize_transport::loopback::Hub;
use harmonaize_transport::tcp::{Config, LinkProtection, TcpTransport};
use harmonaize_transport::{Introduction, Transport};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub(crate) const ARENA: u64 = 32 << 20;

/// Marks that an engine's queue holds.
pub(crate) const MARKS: usize = 1024;

/// Sizes so small that little tensors take several segments, all along the ring.
pub(crate) const SMALL: Tuning = Tuning {
    chunk_bytes: 4096,
    segment_bytes: 16384,
    message_bytes: 1024,
    copy_bytes: 2048,
    algorithms: AlgorithmTable::RING,
};

/// One rank's end.
pub(crate) struct Tenant {
    pub(crate) end: Box<dyn TenantEnd>,
    pub(crate) communicator: u32,
}

/// Several agents' engines and all their tenants.
pub(crate) struct World {
    pub(crate) engines: Vec<Engine>,
    pub(crate) notices: Vec<Arc<Mutex<Vec<Notice>>>>,
    pub(crate) marks: Vec<MarkReader>,
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) tenants: Vec<Tenant>,
    pub(crate) group: Group,
    pub(crate) tuning: Tuning,
    pub(crate) landing_slots: u32,
    pub(crate) coding: Option<Coding>,
    pub(crate) aggregation: Option<Aggregation>,
}

/// The longest time-out of an operation, and so that of one that asks for none.
pub(crate) const LONGEST: Duration = Duration::from_secs(5);

impl World {
    /// An engine per transport; `ranks[i]` are the ranks at engine `i`, all in communicator 1.
    pub(crate) fn new(
        transports: Vec<Box<dyn Transport + Send>>,
        ranks: &[Vec<u32>],
        tuning: Tuning,
    ) -> Self {
        Self::with_sizes(transports, ranks, tuning, ARENA, 2)
    }

    pub(crate) fn with_sizes(
        transports: Vec<Box<dyn Transport + Send>>,
        ranks: &[Vec<u32>],
        tuning: Tuning,
        arena: u64,
        landing_slots: u32,
    ) -> Self {
        Self::with_coding(transports, ranks, tuning, arena, landing_slots, None)
    }

    /// The same with an aggregator; by engine, how it is reached.
    pub(crate) fn with_aggregation(
        transports: Vec<Box<dyn Transport + Send>>,
        ranks: &[Vec<u32>],
        tuning: Tuning,
        (aggregation, aggregators): (Aggregation, Vec<Aggregator>),
    ) -> Self {
        let away = |_| false;
        Self::with_plan(transports, ranks, tuning, (ARENA, 2), None, Some(aggregation), aggregators, &away)
    }

    pub(crate) fn with_coding(
        transports: Vec<Box<dyn Transport + Send>>,
        ranks: &[Vec<u32>],
        tuning: Tuning,
        arena: u64,
        landing_slots: u32,
        coding: Option<Coding>,
    ) -> Self {
        let sizes = (arena, landing_slots);
        Self::with_plan(transports, ranks, tuning, sizes, coding, None, Vec::new(), &|_| false)
    }

    /// The same where some ranks' tensors are not mapped.
    pub(crate) fn with_away(
        transports: Vec<Box<dyn Transport + Send>>,
        ranks: &[Vec<u32>],
        coding: Option<Coding>,
        away: &dyn Fn(u32) -> bool,
    ) -> Self {
        Self::with_plan(transports, ranks, SMALL, (ARENA, 2), coding, None, Vec::new(), away)
    }

    #[expect(clippy::too_many_arguments, reason = "whatever some test chooses")]
    pub(crate) fn with_plan(
        transports: Vec<Box<dyn Transport + Send>>,
        ranks: &[Vec<u32>],
        tuning: Tuning,
        (arena, landing_slots): (u64, u32),
        coding: Option<Coding>,
        aggregation: Option<Aggregation>,
        aggregators: Vec<Aggregator>,
        away: &dyn Fn(u32) -> bool,
    ) -> Self {
        let ends = &mut |rank| if away(rank) { distant(arena) } else { near(arena) };
        Self::with_ends(transports, ranks, tuning, landing_slots, coding, (aggregation, aggregators), ends)
    }

    /// The same where each rank's attachment has these ends.
    pub(crate) fn with_ends(
        transports: Vec<Box<dyn Transport + Send>>,
        ranks: &[Vec<u32>],
        tuning: Tuning,
        landing_slots: u32,
        coding: Option<Coding>,
        (aggregation, aggregators): (Option<Aggregation>, Vec<Aggregator>),
        ends: &mut dyn FnMut(u32) -> Ends,
    ) -> Self {
        let group = Group::new(ranks.iter().map(|r| r.iter().map(|&r| Rank(r)).collect()).collect()).unwrap();
        let (mut engines, mut notices, mut addresses) = (Vec::new(), Vec::new(), Vec::new());
        let mut readers = Vec::new();
        for transport in transports {
            let heard = Arc::new(Mutex::new(Vec::new()));
            let notify = Arc::clone(&heard);
            addresses.push(transport.local_address());
            let mut engine =
                Engine::new(transport, Box::new(move |n| notify.lock().unwrap().push(n))).unwrap();
            let (writer, reader) = harmonaize_engine::marks(MARKS);
            engine.set_mark_writer(writer);
            engines.push(engine);
            readers.push(reader);
            notices.push(heard);
        }
        let mut tenants: Vec<Option<Tenant>> = (0..group.ranks()).map(|_| None).collect();
        for (engine, ranks) in engines.iter_mut().zip(ranks) {
            for &rank in ranks {
                let (end, tenant) = ends(rank);
                tenants[rank as usize] = Some(Tenant { end: tenant, communicator: 7 });
                let attachment = AttachmentId(rank.into());
                engine.handle_command(Command::Attach { attachment, end, operation_timeout: LONGEST });
            }
        }
        let tenants = tenants.into_iter().map(Option::unwrap).collect();
        let mut world = Self {
            engines,
            notices,
            marks: readers,
            addresses,
            tenants,
            group,
            tuning,
            landing_slots,
            coding,
            aggregation,
        };
        let order: Vec<u32> = (0..world.group.participants()).collect();
        for index in 0..world.engines.len() {
            let me = Participant(index as u32);
            let locals = world.group.local(me).iter().map(|&rank| LocalRank {
                rank,
                attachment: AttachmentId(rank.0.into()),
                handle: CommunicatorHandle(7),
            });
            let formation = Formation {
                weight: 1,
                communicator: CommunicatorId(1),
                tenant: 0,
                me,
                plan: world.plan(Epoch(1), &order),
                peers: world.peers(Epoch(1), me),
                aggregator: aggregators.get(index).cloned(),
                locals: locals.collect(),
            };
            world.engines[index].handle_command(Command::Form(Box::new(formation)));
        }
        world.until("formed", |world| world.all_reported(|notice| matches!(notice, Notice::Prepared { .. })));
        world
    }

    /// Whether every engine has reported something like this.
    pub(crate) fn all_reported(&self, like: impl Fn(&Notice) -> bool) -> bool {
        self.notices.iter().all(|notices| notices.lock().unwrap().iter().any(&like))
    }

    /// Gives all engines a plan of this order, without an aggregator. Links are made between participants that `made` says, the lower first;
    /// all others go on.
    pub(crate) fn change(&mut self, epoch: Epoch, order: &[u32], made: impl Fn(u32, u32) -> bool) {
        for me in (0..self.group.participants()).map(Participant) {
            let mut peers = self.peers(epoch, me);
            for peer in &mut peers {
                let (low, high) = (me.0.min(peer.participant.0), me.0.max(peer.participant.0));
                peer.introduction = peer.introduction.take().filter(|_| made(low, high));
            }
            let (communicator, plan) = (CommunicatorId(1), Box::new(self.plan(epoch, order)));
            let change = Command::Change { communicator, plan, peers, aggregator: None };
            self.engines[me.0 as usize].handle_command(change);
        }
    }

    /// Drives every engine until all have switched to an epoch.
    pub(crate) fn until_switched(&mut self, epoch: Epoch) {
        let switched = |notice: &Notice| matches!(notice, Notice::Switched { epoch: of, .. } if *of == epoch);
        self.until("a switch", |world| world.all_reported(switched));
    }

    /// Has all engines' actions give up their turns in their midst, after so many bytes each.
    pub(crate) fn slice_actions(&mut self, bytes: usize) {
        self.engines.iter_mut().for_each(|engine| engine.slice_actions(bytes));
    }

    /// Drives every engine so many times.
    pub(crate) fn run_rounds(&mut self, rounds: usize) {
        for _ in 0..rounds {
            self.engines.iter_mut().for_each(|engine| {
                engine.progress(64);
            });
        }
    }

    /// Has all ranks clear what an earlier sum left, write their inputs and call an AllReduce of them.
    pub(crate) fn begin_sum(&mut self, count: usize, to: u64) {
        let ranks = self.tenants.len();
        (0..ranks).for_each(|rank| self.write(rank, to, &vec![0; count]));
        (0..ranks).for_each(|rank| self.write(rank, 0, &input(rank, count)));
        let sum = call(Collective::AllReduce, count as u64, 1, 0, to, 0);
        (0..ranks).for_each(|rank| self.submit(rank, sum));
    }

    /// Waits until it has ended well; all ranks have the sum, and, not in place, their inputs.
    pub(crate) fn end_sum(&mut self, count: usize, to: u64) {
        let (ranks, completions) = (self.tenants.len(), self.completions());
        let right = completions.iter().all(|done| done.status == 0 && done.cookie == 42);
        assert!(right, "{count} elements to {to}: {completions:?}, {:?}", self.notices);
        let mut sum = vec![0_u64; count];
        for rank in 0..ranks {
            sum.iter_mut().zip(input(rank, count)).for_each(|(sum, value)| *sum = sum.wrapping_add(value));
        }
        for rank in 0..ranks {
            assert!(self.read(rank, to, count) == sum, "rank {rank} of {ranks}, {count} elements");
            assert!(
                to == 0 || self.read(rank, 0, count) == input(rank, count),
                "rank {rank}: its input changed"
            );
        }
    }

    pub(crate) fn plan(&self, epoch: Epoch, order: &[u32]) -> EpochPlan {
        let plan = Plan::new(self.group.clone(), order.iter().map(|&p| Participant(p)).collect()).unwrap();
        EpochPlan {
            epoch,
            plan,
            tuning: self.tuning,
            channels: 4,
            landing_slots: self.landing_slots,
            coding: self.coding,
            aggregation: self.aggregation,
        }
    }

    pub(crate) fn peers(&self, epoch: Epoch, me: Participant) -> Vec<Peer> {
        let others = (0..self.group.participants()).filter(|&peer| peer != me.0);
        others
            .map(|peer| {
                let (low, high) = (peer.min(me.0), peer.max(me.0));
                let mut name = [0; 16];
                name[0] = epoch.0 as u8;
                (name[1], name[2]) = (low as u8, high as u8);
                let introduction = Introduction {
                    name,
                    secret: [low as u8 * 16 + high as u8; 32],
                    peer: self.addresses[peer as usize],
                    initiate: me.0 < peer,
                    source_ports: vec![0, 0],
                    over_tcp: false,
                };
                Peer {
                    participant: Participant(peer),
                    introduction: Some(introduction),
                    rate: None,
                    congestion_control: None,
                }
            })
            .collect()
    }

    /// Drives every engine until something holds.
    pub(crate) fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !holds(self) {
            for engine in &mut self.engines {
                engine.progress(64);
            }
            for tenant in &mut self.tenants {
                tenant.end.progress().unwrap();
            }
            assert!(Instant::now() < deadline, "not within 20 s: {what}; notices {:?}", self.notices);
        }
    }

    pub(crate) fn submit(&mut self, rank: usize, submission: Submission) {
        let communicator = self.tenants[rank].communicator;
        self.tenants[rank].end.submit(&Submission { communicator, ..submission }).unwrap();
    }

    /// The next completion of every rank.
    pub(crate) fn completions(&mut self) -> Vec<Completion> {
        let mut done: Vec<Option<Completion>> = vec![None; self.tenants.len()];
        self.until("completions of all ranks", |world| {
            for (tenant, done) in world.tenants.iter_mut().zip(&mut done) {
                if done.is_none() {
                    *done = tenant.end.completion().unwrap();
                }
            }
            done.iter().all(Option::is_some)
        });
        done.into_iter().map(Option::unwrap).collect()
    }

    /// The next completion of a rank.
    pub(crate) fn completion(&mut self, rank: usize) -> Completion {
        let mut done = None;
        self.until("a completion", |world| {
            done = done.or_else(|| world.tenants[rank].end.completion().unwrap());
            done.is_some()
        });
        done.unwrap()
    }

    pub(crate) fn write_floats(&self, rank: usize, offset: u64, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tenants[rank].end.memory().write(offset, &bytes).unwrap();
    }

    pub(crate) fn read_floats(&self, rank: usize, offset: u64, count: usize) -> Vec<f32> {
        let mut bytes = vec![0; count * 4];
        self.tenants[rank].end.memory().read(offset, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|each| f32::from_le_bytes(each.try_into().unwrap())).collect()
    }

    pub(crate) fn write(&self, rank: usize, offset: u64, values: &[u64]) {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        self.tenants[rank].end.memory().write(offset, &bytes).unwrap();
    }

    pub(crate) fn read(&self, rank: usize, offset: u64, count: usize) -> Vec<u64> {
        let mut bytes = vec![0; count * 8];
        self.tenants[rank].end.memory().read(offset, &mut bytes).unwrap();
        bytes.chunks_exact(8).map(|b| u64::from_ne_bytes(b.try_into().unwrap())).collect()
    }
}

/// What a rank adds to sums: numbers of its own.
pub(crate) fn input(rank: usize, count: usize) -> Vec<u64> {
    (0..count as u64)
        .map(|i| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(rank as u32 * 7))
        .collect()
}

/// Both ends of an attachment.
pub(crate) type Ends = (Box<dyn AgentEnd>, Box<dyn TenantEnd>);

/// Both ends of an attachment whose tensors are mapped.
pub(crate) fn near(arena: u64) -> Ends {
    let (end, descriptors) = MappedEnd::create(arena, 64, Box::new(())).unwrap();
    (Box::new(end), Box::new(MappedTenant::open(descriptors, arena, 64).unwrap()))
}

/// The same where they are not.
pub(crate) fn distant(arena: u64) -> Ends {
    let (end, socket) = RemoteEnd::create(arena, 64).unwrap();
    (Box::new(end), Box::new(RemoteTenant::open(socket, arena, 64).unwrap()))
}

/// Transports of engines that reach each other within the process.
pub(crate) fn loopback(count: usize) -> Vec<Box<dyn Transport + Send>> {
    let hub = Hub::new();
    (0..count).map(|_| Box::new(hub.endpoint().unwrap()) as Box<dyn Transport + Send>).collect()
}

/// Transports of engines that reach each other over TCP.
pub(crate) fn tcp(count: usize) -> Vec<Box<dyn Transport + Send>> {
    protected_tcp(count, LinkProtection::Authenticated)
}

/// The same over links that are protected so.
pub(crate) fn protected_tcp(count: usize, protection: LinkProtection) -> Vec<Box<dyn Transport + Send>> {
    let config = || Config { protection, ..Config::new("127.0.0.1:0".parse().unwrap()) };
    let bind = || TcpTransport::bind(config()).unwrap();
    (0..count).map(|_| Box::new(bind()) as Box<dyn Transport + Send>).collect()
}

/// The same where another thread writes every payload.
pub(crate) fn tcp_with_sender(count: usize, protection: LinkProtection) -> Vec<Box<dyn Transport + Send>> {
    let address = "127.0.0.1:0".parse().unwrap();
    let config = || Config { protection, sender_bytes: Some(1), ..Config::new(address) };
    let bind = || TcpTransport::bind(config()).unwrap();
    (0..count).map(|_| Box::new(bind()) as Box<dyn Transport + Send>).collect()
}

/// An AllReduce of f32.
pub(crate) fn reduce(reduce: ReduceOp, count: u64, input: u64, output: u64) -> Submission {
    let bytes = count * 4;
    Submission {
        dtype: Dtype::F32.code(),
        reduce: reduce.code(),
        count,
        input: Region { offset: input, bytes },
        output: Region { offset: output, bytes },
        ..call(Collective::AllReduce, 0, 1, 0, 0, 0)
    }
}

pub(crate) fn call(
    collective: Collective,
    count: u64,
    blocks: u64,
    input: u64,
    output: u64,
    root: u32,
) -> Submission {
    let bytes = count * blocks * 8;
    Submission {
        version: ABI_VERSION,
        collective: collective.code(),
        dtype: Dtype::U64.code(),
        reduce: ReduceOp::Sum.code(),
        root,
        count,
        input: Region { offset: input, bytes },
        output: Region { offset: output, bytes },
        cookie: 42,
        ..Submission::default()
    }
}
