//! Engines whose tenants are attached over RDMA, on fake devices, hand over to others in the midst of operations.

use crate::common::{ARENA, Ends, SMALL, World, near, tcp};
use harmonaize_abi::session::Succession;
use harmonaize_engine::{Command, Engine, HandOverError, Leases, Notice};
use harmonaize_shm::{AgentEnd, EndError, InheritEnd};
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

    /// Another engine in the place of one, whose ranks over RDMA are these. What joins each to its tenant, and the engine before.
    pub(crate) fn succeed(
        &self,
        world: &mut World,
        at: usize,
        ranks: &[u32],
    ) -> (Vec<(u32, Rejoin)>, Engine) {
        let deadline = Instant::now() + Duration::from_secs(20);
        let image = loop {
            world.engines[at].handle_command(Command::HandOver { thread: 0 });
            let handed = world.notices[at].lock().unwrap().pop();
            match handed {
                Some(Notice::HandedOver { image: Ok(image), .. }) => break image,
                // A peer was in the midst of a frame.
                other => assert!(Instant::now() < deadline, "{other:?}"),
            }
            world.run_rounds(1);
        };
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
        let transport = Box::new(TcpTransport::bind(Config::new(([127, 0, 0, 1], 0).into())).unwrap());
        let notify = Arc::clone(&world.notices[at]);
        let mut successor =
            Engine::new(transport, Box::new(move |n| notify.lock().unwrap().push(n))).unwrap();
        let leases = Leases::new(HashMap::new(), ends);
        successor.handle_command(Command::TakeOver { thread: 0, image, leases });
        let taken = world.notices[at].lock().unwrap().pop();
        assert!(matches!(taken, Some(Notice::TakenOver { epochs: Ok(_), .. })), "{taken:?}");
        successor.handle_command(Command::Resume);
        (rejoins, std::mem::replace(&mut world.engines[at], successor))
    }
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
            let (rejoins, engine) = lab.succeed(&mut world, at, &away);
            before.push(engine);
            world.run_rounds(random.random_range(0..20));
            rejoins.into_iter().for_each(|(rank, ours)| rejoin(&mut world, rank, ours));
            world.end_sum(count, to);
        }
    }
}

/// A hand-over does not wait for a process that has not come: it cannot while sessions stand still.
#[test]
fn a_process_that_has_not_come_is_named_and_not_waited_for() {
    let mut lab = Lab::new();
    let ends = &mut |rank: u32| if rank < 2 { near(ARENA) } else { lab.attach() };
    let mut world =
        World::with_ends(tcp(2), &[vec![0, 2], vec![1]], SMALL, 2, None, (None, Vec::new()), ends);
    world.begin_sum(200_000, 0);
    world.run_rounds(4);
    assert_eq!(world.tenants[2].end.succeed(&Succession::Begins).unwrap(), None);
    let (rejoins, _before) = lab.succeed(&mut world, 0, &[2]);
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        world.run_rounds(100);
        world.engines[0].handle_command(Command::HandOver { thread: 0 });
        let handed = world.notices[0].lock().unwrap().pop();
        assert!(Instant::now() < deadline, "nothing waits for the process: {handed:?}");
        match handed {
            Some(Notice::HandedOver { image: Err(HandOverError::Away(2)), .. }) => break,
            // Nothing waits for it yet.
            Some(Notice::HandedOver { image: Ok(_), .. }) => world.engines[0].handle_command(Command::Resume),
            // A peer was in the midst of a frame.
            Some(Notice::HandedOver { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    rejoins.into_iter().for_each(|(rank, ours)| rejoin(&mut world, rank, ours));
    world.end_sum(200_000, 0);
}
