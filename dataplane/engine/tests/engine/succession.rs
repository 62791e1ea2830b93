//! Engines whose tenants are attached over RDMA, on fake devices, or through sockets, hand over to others in the midst of operations.

use crate::common::{ARENA, Ends, SMALL, World, call, distant, input, near, tcp};
use crate::p2p::{content, message};
use harmonaize_abi::session::Succession;
use harmonaize_abi::{Collective, Direction};
use harmonaize_engine::{Command, Engine, EngineImage, Leases, Notice};
use harmonaize_shm::{AgentEnd, EndError, InheritEnd, RemoteEnd};
use harmonaize_transport::tcp::{Config, TcpTransport};
use harmonaize_verbs::attachment::{AgentOffer, Rejoin, TenantOffer};
use harmonaize_verbs::fake::Fabric;
use harmonaize_verbs::{Function, PortOptions};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const ENTRIES: u32 = 64;

/// The devices of agents and of tenants, and what tenants' sessions are in place of.
pub(crate) struct Lab {
    agents: Function,
    tenants: Function,
    sessions: Vec<OwnedFd>,
    fabric: Fabric,
}

impl Lab {
    pub(crate) fn new() -> Self {
        let fabric = Fabric::new();
        fabric.stop_recording();
        let [agents, tenants] = [("agents", 1), ("tenants", 2)].map(|(name, last)| {
            let address = Ipv4Addr::new(10, 0, 0, last);
            fabric.add(name, address).unwrap();
            Function::open(&fabric.devices(), &PortOptions::default(), Some(address.into())).unwrap()
        });
        Self { agents, tenants, sessions: Vec::new(), fabric }
    }

    /// Holds back what agents ask of their device, or carries it out.
    pub(crate) fn hold(&self, holds: bool) {
        if holds { self.fabric.hold("agents") } else { self.fabric.release("agents") }
    }

    pub(crate) fn attach(&mut self) -> Ends {
        let agent = AgentOffer::new(&self.agents, ARENA, ENTRIES).unwrap();
        let tenant = TenantOffer::new(&self.tenants, ARENA, ENTRIES).unwrap();
        let (end, offer) = (agent.end(), tenant.offer());
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::empty(), None).unwrap();
        self.sessions.push(theirs);
        (Box::new(agent.connect(&offer, ours).unwrap()), Box::new(tenant.connect(&end).unwrap()))
    }

    /// What an engine over RDMA hands over.
    pub(crate) fn hand_over(world: &mut World, at: usize) -> Box<EngineImage> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            world.engines[at].handle_command(Command::HandOver { thread: 0 });
            let handed = world.notices[at].lock().unwrap().pop();
            match handed {
                Some(Notice::HandedOver { image: Ok(image), .. }) => return image,
                // A peer was in the midst of a frame.
                other => assert!(Instant::now() < deadline, "{other:?}"),
            }
            world.run_rounds(1);
        }
    }

    /// Another engine in the place of one, whose ranks over RDMA are these. What joins each to its tenant, and the engine before.
    pub(crate) fn succeed(
        &self,
        world: &mut World,
        at: usize,
        ranks: &[u32],
        image: Box<EngineImage>,
    ) -> (Vec<(u32, Rejoin)>, Engine) {
        let (mut ends, mut rejoins) = (HashMap::new(), Vec::new());
        for rank in ranks {
            let offer = AgentOffer::new(&self.agents, ARENA, ENTRIES).unwrap();
            let (end, rejoin) = offer.succeed().unwrap();
            let inherit: InheritEnd = Box::new(move |from| {
                let end: Box<dyn AgentEnd> = Box::new(end.inherit(from)?);
                Ok::<_, EndError>(end)
            });
            ends.insert(u64::from(*rank), inherit);
            rejoins.push((*rank, rejoin));
        }
        (rejoins, take_over(world, at, ends, image))
    }
}

/// Another engine goes on with what one has handed over. Returns that one.
pub(crate) fn take_over(
    world: &mut World,
    at: usize,
    ends: HashMap<u64, InheritEnd>,
    image: Box<EngineImage>,
) -> Engine {
    let transport = Box::new(TcpTransport::bind(Config::new(([127, 0, 0, 1], 0).into())).unwrap());
    let notify = Arc::clone(&world.notices[at]);
    let mut successor = Engine::new(transport, Box::new(move |n| notify.lock().unwrap().push(n))).unwrap();
    let leases = Leases::new(HashMap::new(), ends);
    successor.handle_command(Command::TakeOver { thread: 0, image, leases });
    let taken = world.notices[at].lock().unwrap().pop();
    assert!(matches!(taken, Some(Notice::TakenOver { epochs: Ok(_), .. })), "{taken:?}");
    successor.handle_command(Command::Resume);
    std::mem::replace(&mut world.engines[at], successor)
}

/// A tenant hears of the successor, and comes to it.
pub(crate) fn rejoin(world: &mut World, rank: u32, ours: Rejoin) {
    let tenant = &mut world.tenants[rank as usize].end;
    let connect = Succession::Connect { end: ours.end(), taken: ours.taken().unwrap() };
    let (offer, arrived) = tenant.succeed(&connect).unwrap().unwrap();
    ours.join(&offer, arrived).unwrap();
    assert_eq!(tenant.succeed(&Succession::Connected).unwrap(), None);
}

/// Operations of all ranks while both engines have successors, one after the other, again and again. Their tenants hear of it late.
/// One rank on each is mapped, the others are not.
#[test]
fn operations_over_rdma_go_on_with_other_engines() {
    for seed in 1..=12 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        println!("seed {seed}");
        let mut lab = Lab::new();
        let ends = &mut |rank: u32| if rank < 2 { near(ARENA) } else { lab.attach() };
        let ranks = [vec![0, 2], vec![1, 3, 4]];
        let mut world = World::with_ends(tcp(2), &ranks, SMALL, 2, None, (None, Vec::new()), ends);
        // They have their tenants' queue pairs still, as a process that is about to end.
        let mut before = Vec::new();
        for round in 0..4 {
            let count = random.random_range(1..30_000);
            let to = if round % 2 == 0 { 0 } else { 8 << 20 };
            world.begin_sum(count, to);
            world.run_rounds(random.random_range(0..60));
            let at = round % 2;
            let away: Vec<u32> = ranks[at].iter().copied().filter(|rank| *rank >= 2).collect();
            for rank in &away {
                let told = world.tenants[*rank as usize].end.succeed(&Succession::Begins);
                assert_eq!(told.unwrap(), None);
            }
            let image = Lab::hand_over(&mut world, at);
            let (rejoins, engine) = lab.succeed(&mut world, at, &away, image);
            before.push(engine);
            world.run_rounds(random.random_range(0..20));
            rejoins.into_iter().for_each(|(rank, ours)| rejoin(&mut world, rank, ours));
            world.end_sum(count, to);
        }
    }
}

/// A process does not call its library while its engine has two successors. No hand-over waits for it: fetches and stores of its memory
/// go along, of sums and of messages to and from ranks of every kind.
#[test]
fn what_waits_for_a_process_that_has_not_come_goes_along() {
    const AWAY: [u32; 2] = [2, 3];
    const COUNT: usize = 30_000;
    /// From one to another.
    const MESSAGES: [(usize, usize); 5] = [(2, 1), (2, 3), (2, 0), (1, 2), (0, 3)];
    let mut waited = 0;
    for seed in 1..=12 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        println!("seed {seed}");
        let mut lab = Lab::new();
        let ends = &mut |rank: u32| if rank < 2 { near(ARENA) } else { lab.attach() };
        let ranks = [vec![0, 2, 3], vec![1]];
        let mut world = World::with_ends(tcp(2), &ranks, SMALL, 2, None, (None, Vec::new()), ends);
        let all_reduce = call(Collective::AllReduce, COUNT as u64, 1, 0, 0, 0);
        for rank in 0..4 {
            world.write(rank, 0, &input(rank, COUNT));
            world.submit(rank, all_reduce);
        }
        let at = |number: usize| (4 << 20) + (number << 18) as u64;
        let mut expected = [1; 4];
        for (number, (from, to)) in MESSAGES.into_iter().enumerate() {
            world.write(from, at(number), &content(from, to, COUNT));
            world.submit(from, message(Direction::Send, to as u32, COUNT as u64, at(number)));
            world.submit(to, message(Direction::Receive, from as u32, COUNT as u64, at(number)));
            expected[from] += 1;
            expected[to] += 1;
        }
        world.run_rounds(random.random_range(2..40));
        let begins = |world: &mut World| {
            for rank in AWAY {
                let told = world.tenants[rank as usize].end.succeed(&Succession::Begins);
                assert_eq!(told.unwrap(), None);
            }
        };
        begins(&mut world);
        let image = Lab::hand_over(&mut world, 0);
        let (first, _before) = lab.succeed(&mut world, 0, &AWAY, image);
        world.run_rounds(random.random_range(1..200));
        let image = Lab::hand_over(&mut world, 0);
        waited += usize::from(image.state.starts_with(&[0xff; 20]));
        let (second, _then) = lab.succeed(&mut world, 0, &AWAY, image);
        world.run_rounds(random.random_range(0..20));
        // They hear of both, one after the other, and nobody hears that they come to the first.
        for (rank, ours) in first {
            let connect = Succession::Connect { end: ours.end(), taken: ours.taken().unwrap() };
            assert!(world.tenants[rank as usize].end.succeed(&connect).unwrap().is_some());
        }
        begins(&mut world);
        second.into_iter().for_each(|(rank, ours)| rejoin(&mut world, rank, ours));
        let mut ended = [0; 4];
        world.until("all that was called", |world| {
            for (tenant, ended) in world.tenants.iter_mut().zip(&mut ended) {
                if let Some(done) = tenant.end.completion().unwrap() {
                    assert_eq!(done.status, 0, "{done:?}");
                    *ended += 1;
                }
            }
            ended == expected
        });
        let sum = (0..4).map(|rank| input(rank, COUNT)).reduce(|sum, more| {
            sum.into_iter().zip(more).map(|(sum, more): (u64, u64)| sum.wrapping_add(more)).collect()
        });
        (0..4).for_each(|rank| assert!(Some(world.read(rank, 0, COUNT)) == sum, "rank {rank}"));
        for (number, (from, to)) in MESSAGES.into_iter().enumerate() {
            let right = world.read(to, at(number), COUNT) == content(from, to, COUNT);
            assert!(right, "from {from} to {to}");
        }
    }
    assert!(waited > 3, "{waited} hand-overs found anything that waits");
}

/// The steps of messages' pieces are counted round, past those of what an aggregator is given. A piece waits whatever its number.
#[test]
fn a_piece_of_a_message_goes_along_whatever_its_number() {
    const COUNT: usize = 8;
    const AT: u64 = 4 << 20;
    // A slot's pieces are numbered by 1024; the steps of an aggregator's transfers are those of 896 to 959.
    const BEFORE: usize = 900;
    let mut lab = Lab::new();
    let ends = &mut |rank: u32| if rank < 2 { near(ARENA) } else { lab.attach() };
    let ranks = [vec![0, 2], vec![1]];
    let mut world = World::with_ends(tcp(2), &ranks, SMALL, 2, None, (None, Vec::new()), ends);
    world.write(2, AT, &content(2, 0, COUNT));
    let [send, receive] = [(Direction::Send, 0), (Direction::Receive, 2)]
        .map(|(way, peer)| message(way, peer, COUNT as u64, AT));
    let end = |world: &mut World| {
        for rank in [0, 2] {
            let done = world.completion(rank);
            assert_eq!(done.status, 0, "rank {rank}: {done:?}");
        }
        assert!(world.read(0, AT, COUNT) == content(2, 0, COUNT));
    };
    for _ in 0..BEFORE {
        world.submit(2, send);
        world.submit(0, receive);
        end(&mut world);
    }
    world.write(0, AT, &[0; COUNT]);
    world.submit(2, send);
    for _ in 0..40 {
        world.run_rounds(1);
        world.tenants[2].end.progress().unwrap();
    }
    let begins = |world: &mut World| {
        assert_eq!(world.tenants[2].end.succeed(&Succession::Begins).unwrap(), None);
    };
    begins(&mut world);
    let image = Lab::hand_over(&mut world, 0);
    let (first, _before) = lab.succeed(&mut world, 0, &[2], image);
    // Now what is sent is to be fetched, of a process that has not come.
    world.submit(0, receive);
    world.run_rounds(40);
    let image = Lab::hand_over(&mut world, 0);
    assert!(image.state.starts_with(&[0xff; 20]), "nothing waits");
    let (second, _then) = lab.succeed(&mut world, 0, &[2], image);
    for (rank, ours) in first {
        let connect = Succession::Connect { end: ours.end(), taken: ours.taken().unwrap() };
        assert!(world.tenants[rank as usize].end.succeed(&connect).unwrap().is_some());
    }
    begins(&mut world);
    second.into_iter().for_each(|(rank, ours)| rejoin(&mut world, rank, ours));
    end(&mut world);
}

/// Hands over while tenants' processes call their library, as fetches and stores through sockets need.
pub(crate) fn hand_over_while_served(world: &mut World, at: usize) -> Box<EngineImage> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let (World { engines, tenants, .. }, over) = (&mut *world, AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    for tenant in tenants.iter_mut() {
                        tenant.end.progress().unwrap();
                    }
                }
            });
            engines[at].handle_command(Command::HandOver { thread: 0 });
            over.store(true, Ordering::Relaxed);
        });
        let handed = world.notices[at].lock().unwrap().pop();
        match handed {
            Some(Notice::HandedOver { image: Ok(image), .. }) => return image,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
        world.run_rounds(1);
    }
}

/// Operations through sockets, and of mapped ranks, while both engines have successors again and again.
#[test]
fn operations_through_sockets_go_on_with_other_engines() {
    for seed in 1..=12 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        println!("seed {seed}");
        let ends = &mut |rank: u32| if rank < 2 { near(ARENA) } else { distant(ARENA) };
        let ranks = [vec![0, 2], vec![1, 3, 4]];
        let mut world = World::with_ends(tcp(2), &ranks, SMALL, 2, None, (None, Vec::new()), ends);
        let mut before = Vec::new();
        for round in 0..4 {
            let count = random.random_range(1..30_000);
            let to = if round % 2 == 0 { 0 } else { 8 << 20 };
            world.begin_sum(count, to);
            for _ in 0..random.random_range(0..60) {
                world.run_rounds(1);
                for tenant in &mut world.tenants {
                    tenant.end.progress().unwrap();
                }
            }
            let at = round % 2;
            let image = hand_over_while_served(&mut world, at);
            let distant = ranks[at].iter().filter(|rank| **rank >= 2);
            let inherit = |rank: &u32| {
                let inherit: InheritEnd = Box::new(|from| {
                    let end: Box<dyn AgentEnd> = Box::new(RemoteEnd::inherit(from, ARENA)?);
                    Ok::<_, EndError>(end)
                });
                (u64::from(*rank), inherit)
            };
            before.push(take_over(&mut world, at, distant.map(inherit).collect(), image));
            world.end_sum(count, to);
        }
    }
}
