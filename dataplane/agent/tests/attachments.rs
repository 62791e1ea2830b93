//! Ranks with every kind of access run every collective together. Two whole agents run with control in one process,
//! with RDMA on a fake fabric.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod whole;
#[path = "../../../tests/src/worker.rs"]
#[allow(unreachable_pub, reason = "public in its crate")]
mod worker;

use harmonaize_abi::session::{
    Hello, PairEnd, Refused, Welcome, decode, decode_first, encode, encode_first, length,
};
use harmonaize_agent::config::Verbs;
use harmonaize_agent::handover::{Greeting, HandOverError, Obstacle, Peer, Place, VERSION};
use harmonaize_agent::run::{Interrupted, take_over};
use harmonaize_client::{
    Access, AgentAddress, AttachOptions, Budget, Client, Dtype, Error, JoinOptions, Operation, Rank,
    RdmaOptions, ReduceOp, Secret, Status,
};
use harmonaize_verbs::attachment::TenantOffer;
use harmonaize_verbs::fake::{Fabric, Fault};
use harmonaize_verbs::{Call, Function, PortOptions};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;
use tokio::sync::oneshot;
use whole::{Agent, LIMIT, control_at};
use worker::Worker;

const RANKS: u32 = 6;

fn wait(operation: Result<Operation, Error>) {
    operation.unwrap().wait(LIMIT).unwrap();
}

/// A port that is free now, of an address that nothing else uses.
fn free(test: u8, host: u8) -> SocketAddr {
    std::net::TcpListener::bind((Ipv4Addr::new(127, 77, test, host), 0)).unwrap().local_addr().unwrap()
}

/// Two agents and what tenants need to reach them.
struct Provider {
    fabric: Fabric,
    sockets: [PathBuf; 2],
    listen: [SocketAddr; 2],
    secret: Secret,
    _agents: [oneshot::Sender<()>; 2],
    _control: oneshot::Sender<()>,
    _folder: tempfile::TempDir,
}

impl Provider {
    fn start(test: u8, rate: &str, links: impl Fn(usize) -> Option<Verbs>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (address, control) = control_at(rate);
        let fabric = Fabric::new();
        for (number, name) in ["agent0", "agent1", "host0", "host1"].into_iter().enumerate() {
            fabric.add(name, Ipv4Addr::new(10, 9, 0, number as u8 + 1)).unwrap();
        }
        let secret = Secret::new(&[b's'; 40]).unwrap();
        let (sockets, listen) =
            (["h0", "h1"].map(|host| folder.path().join(host)), [free(test, 1), free(test, 2)]);
        let agents = [0, 1].map(|host| {
            let mut agent = Agent::new(["h0", "h1"][host], address, &sockets[host]).with_rdma(
                fabric.devices(),
                ["agent0", "agent1"][host],
                listen[host],
                secret.clone(),
            );
            agent.config.verbs = links(host);
            agent.start()
        });
        Self { fabric, sockets, listen, secret, _agents: agents, _control: control, _folder: folder }
    }

    fn attach(&self, host: usize, access: Access, tcp: bool) -> Result<Client, Error> {
        let at = match tcp {
            false => AgentAddress::from(&self.sockets[host]),
            true => {
                let (address, secret) = (self.listen[host], self.secret.clone());
                AgentAddress::Tcp { address, tenant: "a".into(), secret }
            }
        };
        let device = Some(["host0", "host1"][host].to_owned());
        let rdma = RdmaOptions { device, devices: self.fabric.devices(), ..RdmaOptions::default() };
        Client::attach(at, AttachOptions { access, rdma, ..Default::default() })
    }
}

fn all_accesses(test: u8, links: impl Fn(usize) -> Option<Verbs>) {
    let provider = Provider::start(test, "10Gbit/s", links);
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            let provider = &provider;
            scope.spawn(move || {
                let (access, tcp) = [
                    (Access::Rdma, true),
                    (Access::Rdma, false),
                    (Access::Mapped, false),
                    (Access::Rdma, true),
                    (Access::Remote, false),
                    (Access::Mapped, false),
                ][rank as usize];
                let client = provider.attach((rank % 2) as usize, access, tcp).unwrap();
                let worker = Worker::of(client, "job", rank, RANKS, LIMIT).unwrap();
                // Each rank is a root.
                worker.everything(&[1, 100, 6_000, 300_000, 0, 77], LIMIT).unwrap();
                // Blocks of many pieces, too.
                worker.exchange(7, 300_000, LIMIT).unwrap();
            });
        }
    });
}

/// Feedback is kept over RDMA, over a socket and mapped. What was received over all steps is what was given, less the
/// residual at the end.
#[test]
fn feedback_is_kept_however_a_rank_is_attached() {
    const ELEMENTS: usize = 200_003;
    const STEPS: u32 = 6;
    // Links so slow that a codec pays on any processor, also on one that others use.
    let provider = Provider::start(7, "100Mbit/s", |_| None);
    let sum = |all: &mut Vec<f64>, values: &[f32], sign: f64| {
        all.iter_mut().zip(values).for_each(|(sum, value)| *sum += sign * f64::from(*value));
    };
    let rank = |rank: u32| {
        let access = [Access::Rdma, Access::Rdma, Access::Remote, Access::Mapped][rank as usize];
        let client = provider.attach((rank % 2) as usize, access, rank == 0).unwrap();
        let budget = Budget::Codecs(vec!["int4".to_owned()]);
        let job = client
            .join_with(
                "fed",
                Rank(rank),
                4,
                &JoinOptions { timeout: LIMIT, budget, ..JoinOptions::default() },
            )
            .unwrap();
        let tensor = || client.tensor(Dtype::F32, ELEMENTS as u64).unwrap();
        let (input, output, feedback) = (tensor(), tensor(), client.feedback(ELEMENTS as u64).unwrap());
        // What was given, less what was received by the first rank and is owed by any.
        let (mut off, mut owes, mut coded) = (vec![0.0; ELEMENTS], false, false);
        for step in 0..STEPS {
            let words = Worker::input(rank, step.into(), ELEMENTS);
            let values: Vec<f32> = words.iter().map(|word| (word >> 40) as f32 / 65_536.0 - 128.0).collect();
            sum(&mut off, &values, 1.0);
            input.write(0, &values).unwrap();
            let operation = job.all_reduce_with_feedback(&input, &output, ReduceOp::Sum, &feedback);
            let receipt = operation.unwrap().wait(LIMIT).unwrap();
            coded |= receipt.codec == "int4";
            let mut values = vec![0.0; ELEMENTS];
            output.read(0, &mut values).unwrap();
            if rank == 0 {
                sum(&mut off, &values, -1.0);
            }
        }
        let mut owed = vec![0.0; ELEMENTS];
        feedback.read(0, &mut owed).unwrap();
        owes |= owed.iter().any(|owed| *owed != 0.0);
        sum(&mut off, &owed, -1.0);
        (off, owes, coded)
    };
    let all = std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = (0..4).map(|number| scope.spawn(move || rank(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    // Ranks of a host owe together, in the first one's memory.
    let told: Vec<_> = all.iter().map(|(_, owes, coded)| (*owes, *coded)).collect();
    assert_eq!(told, [(true, true), (true, true), (false, true), (false, true)]);
    for element in 0..ELEMENTS {
        let off: f64 = all.iter().map(|(off, ..)| off[element]).sum();
        assert!(off.abs() < 0.05, "element {element} is off by {off}");
    }
}

#[test]
fn a_successor_is_told_whose_attachments_over_rdma_would_end() {
    let folder = tempfile::tempdir().unwrap();
    let (address, _control) = control_at("10Gbit/s");
    let fabric = Fabric::new();
    fabric.add("agent0", Ipv4Addr::new(10, 9, 0, 1)).unwrap();
    fabric.add("host0", Ipv4Addr::new(10, 9, 0, 3)).unwrap();
    let socket = folder.path().join("h0");
    let place = folder.path().join("handover");
    let (listen, secret) = (free(8, 1), Secret::new(&[b's'; 40]).unwrap());
    let agent = Agent::new("h0", address, &socket);
    let mut agent = agent.with_rdma(fabric.devices(), "agent0", listen, secret);
    agent.config.verbs = Some(Verbs { devices: vec!["agent0".to_owned()], ..Verbs::default() });
    agent.config.handover = Some(place.clone());
    let _agent = agent.start();
    let own = Greeting { links: format!("{}, with attachments over RDMA", greeting().links), ..greeting() };
    // A process whose client library says nothing of successors, as that of release 0.2.0.
    let function = Function::open(&fabric.devices(), &named("host0"), None).unwrap();
    let mut old = UnixStream::connect(&socket).unwrap();
    old.set_read_timeout(Some(LIMIT)).unwrap();
    let hello = Hello { access: Access::Rdma, arena_bytes: 1 << 16, entries: 4 };
    old.write_all(&encode_first(&hello).unwrap()).unwrap();
    decode_first::<Result<Welcome, Refused>>(&message(&mut old)).unwrap().unwrap();
    let _end: PairEnd = decode(&message(&mut old)).unwrap();
    let offer = TenantOffer::new(&function, 1 << 16, 4).unwrap();
    old.write_all(&encode(&offer.offer()).unwrap()).unwrap();
    decode::<Result<(), Refused>>(&message(&mut old)).unwrap().unwrap();
    match successor(&place).greet(&own) {
        Err(HandOverError::Refused(why)) => {
            assert_eq!(why, Obstacle::Attachments { count: 1 }.to_string());
        }
        other => panic!("{other:?}"),
    }
    // The agent goes on, and once that process is gone nothing is in the way of a successor. One of this release is none either.
    drop((old, offer));
    let device = Some("host0".to_owned());
    let rdma = RdmaOptions { device, devices: fabric.devices(), ..RdmaOptions::default() };
    let options = AttachOptions { access: Access::Rdma, arena_bytes: 1 << 16, rdma, ..Default::default() };
    let client = Client::attach(AgentAddress::from(&socket), options).unwrap();
    let deadline = Instant::now() + LIMIT;
    let (offer, descriptors) = loop {
        match successor(&place).greet(&own) {
            Ok(offered) => break offered,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::yield_now();
    };
    // Where tenants come over TCP is the last.
    assert_eq!(offer.sockets, [socket, PathBuf::new()]);
    assert_eq!(descriptors.len(), 4);
    drop(client);
}

fn named(device: &str) -> PortOptions {
    PortOptions { device: Some(device.to_owned()), ..PortOptions::default() }
}

/// The next message without its length.
fn message(stream: &mut UnixStream) -> Vec<u8> {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).unwrap();
    let mut message = vec![0; length(prefix).unwrap()];
    stream.read_exact(&mut message).unwrap();
    message
}

/// A process that asks for the place of host 0's agent.
fn successor(place: &Path) -> Peer {
    let deadline = Instant::now() + LIMIT;
    loop {
        match Peer::connect(place).unwrap() {
            Some(peer) => return peer,
            None => assert!(Instant::now() < deadline, "the agent made no place"),
        }
        std::thread::yield_now();
    }
}

/// What it says of itself.
fn greeting() -> Greeting {
    let (build, links) = ("test".to_owned(), "authenticated over RDMA at 127.0.0.1:0".to_owned());
    Greeting { version: VERSION, build, host: "h0".into(), threads: 2, links }
}

/// It waits for the agent's links, which takes long, and ends at once all the same. The agent hears why.
#[test]
fn a_successor_that_is_told_to_end_waits_for_no_links() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("handover");
    let mut agent = Agent::new("h0", "127.0.0.1:1".parse().unwrap(), &folder.path().join("h0"));
    agent.config.handover = Some(path.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let place = Place::bind(&path).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let successor = take_over(agent.config, async { drop(stopped.await) });
        let ends = async {
            let peer = place.next().await;
            let own = Greeting { links: greeting().links.replace("RDMA", "TCP"), ..greeting() };
            let greeted = tokio::task::spawn_blocking(move || peer.greeted(&own).map(|()| peer));
            let peer = greeted.await.unwrap().unwrap();
            drop(stop);
            peer
        };
        let (ended, peer) = tokio::join!(successor, ends);
        let error = ended.unwrap_err();
        assert!(error.is::<Interrupted>(), "{error}");
        let heard = peer.waits().unwrap_err();
        assert!(matches!(&heard, HandOverError::Refused(why) if *why == error.to_string()), "{heard}");
    });
}

/// Waits until something is so.
fn until_so(what: &str, so: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

/// Has ranks end once it is dropped, also by a panic.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A successor gets sockets once no link needs its device any more. Where it goes away, links go over RDMA again. No operation
/// fails meanwhile.
#[test]
fn links_over_rdma_go_over_tcp_before_a_successor_starts() {
    let folder = tempfile::tempdir().unwrap();
    let (address, _control) = control_at("10Gbit/s");
    let fabric = Fabric::new();
    let devices = ["agent0", "agent1"];
    for (number, device) in (1..).zip(devices) {
        fabric.add(device, Ipv4Addr::new(10, 9, 0, number)).unwrap();
    }
    let (place, sockets) =
        (folder.path().join("handover"), ["h0", "h1"].map(|host| folder.path().join(host)));
    let _agents = [0, 1].map(|host| {
        let mut agent = Agent::new(["h0", "h1"][host], address, &sockets[host]);
        agent.devices = fabric.devices();
        agent.config.verbs = Some(Verbs { devices: vec![devices[host].to_owned()], ..Verbs::default() });
        agent.config.handover = (host == 0).then(|| place.clone());
        agent.start()
    });
    let (done, stop) = (AtomicU32::new(0), AtomicBool::new(false));
    let work = |rank: u32| {
        let options = AttachOptions { access: Access::Mapped, ..Default::default() };
        let client = Client::attach(AgentAddress::from(&sockets[rank as usize]), options).unwrap();
        let job = client.join("job", Rank(rank), 2, LIMIT).unwrap();
        let tensor = client.tensor(Dtype::U64, 50_000).unwrap();
        let mut told = [0_u64];
        while told == [0] {
            tensor.write(0, &[u64::from(rank == 0 && stop.load(Ordering::Relaxed))]).unwrap();
            wait(job.all_reduce_in_place(&tensor, ReduceOp::Sum));
            tensor.read(0, &mut told).unwrap();
            done.fetch_add(1, Ordering::Relaxed);
        }
    };
    let goes_on = || {
        let before = done.load(Ordering::Relaxed);
        until_so("operations do not go on", || done.load(Ordering::Relaxed) >= before + 40);
    };
    let pairs = || {
        let calls = fabric.take_calls("agent0").into_iter();
        calls.filter(|recorded| recorded.call == Call::ToReadyToReceive).count()
    };
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || work(rank)));
        let stops = Stops(&stop);
        goes_on();
        assert!(pairs() > 0, "its links go over RDMA");
        let (offer, descriptors) = successor(&place).greet(&greeting()).unwrap();
        assert_eq!((offer.sockets.as_slice(), descriptors.len()), (&sockets[..1], 3));
        assert_eq!(pairs(), 0, "queue pairs are made for nothing");
        // It is gone, so links go over RDMA again.
        until_so("no link goes over RDMA again", || pairs() > 0);
        goes_on();
        let gone = successor(&place);
        gone.greet(&greeting()).unwrap();
        // Whatever still needs the device ends now.
        fabric.inject("agent0", Fault::DeviceLost);
        goes_on();
        drop(gone);
        goes_on();
        drop(stops);
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    });
}

#[test]
fn ranks_attached_in_all_ways_work_together() {
    all_accesses(1, |_| None);
}

#[test]
fn the_same_with_links_over_rdma() {
    all_accesses(2, |host| {
        let devices = vec![["agent0", "agent1"][host].to_owned()];
        Some(Verbs { devices, ..Verbs::default() })
    });
}

/// Sums until one fails, and says how it failed.
fn sums(provider: &Provider, job: &str, rank: u32, access: Access, started: &AtomicU32) -> Error {
    let client = provider.attach(rank as usize, access, false).unwrap();
    let comm = client.join(job, Rank(rank), 2, LIMIT).unwrap();
    let tensor = client.tensor(Dtype::U64, 50_000).unwrap();
    loop {
        match comm.all_reduce_in_place(&tensor, ReduceOp::Sum).and_then(|mut operation| operation.wait(LIMIT))
        {
            Ok(_) => started.fetch_add(1, Ordering::Relaxed),
            Err(error) => return error,
        };
    }
}

/// Sums until the first of two ranks has seen the flag and told the other by the sum.
fn until(provider: &Provider, rank: u32, stop: &AtomicBool) {
    let client = provider.attach(rank as usize, Access::Mapped, false).unwrap();
    let comm = client.join("spared", Rank(rank), 2, LIMIT).unwrap();
    let tensor = client.tensor(Dtype::U64, 1000).unwrap();
    let mut told = [0_u64];
    while told == [0] {
        tensor.write(0, &[u64::from(rank == 0 && stop.load(Ordering::Relaxed))]).unwrap();
        wait(comm.all_reduce_in_place(&tensor, ReduceOp::Sum));
        tensor.read(0, &mut told).unwrap();
    }
}

/// Whichever device breaks while operations run, the ranks over it lose their agent. Their communicator ends with an error, and
/// another one on the same agents goes on.
#[test]
fn a_device_that_breaks_in_mid_operation_ends_its_own_communicator() {
    for (test, device) in [(3, "host0"), (4, "agent0")] {
        let provider = Provider::start(test, "10Gbit/s", |_| None);
        let (started, stop) = (AtomicU32::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let (provider, started, stop) = (&provider, &started, &stop);
            let near = scope.spawn(|| sums(provider, "doomed", 0, Access::Rdma, started));
            let far = scope.spawn(|| sums(provider, "doomed", 1, Access::Mapped, started));
            let spared: Vec<_> =
                (0..2).map(|rank| scope.spawn(move || until(provider, rank, stop))).collect();
            let deadline = Instant::now() + LIMIT;
            while started.load(Ordering::Relaxed) < 20 {
                assert!(Instant::now() < deadline, "nothing ran");
                std::thread::yield_now();
            }
            provider.fabric.inject(device, Fault::DeviceLost);
            let error = near.join().unwrap();
            assert!(matches!(error, Error::AgentLost { .. }), "{device}: {error}");
            match far.join().unwrap() {
                Error::Operation { status: Status::RankLost, detail, .. } => {
                    assert_eq!(detail.unwrap().ranks, [Rank(0)], "{device}");
                }
                other => panic!("{device}: {other}"),
            }
            stop.store(true, Ordering::Relaxed);
            spared.into_iter().for_each(|rank| rank.join().unwrap());
        });
    }
}

/// A process that goes while its operation is under way, tensors and all, is a lost rank, and no more.
#[test]
fn a_process_that_goes_in_mid_operation_is_a_lost_rank() {
    let provider = Provider::start(5, "10Gbit/s", |_| None);
    std::thread::scope(|scope| {
        let far = scope.spawn(|| sums(&provider, "doomed", 1, Access::Rdma, &AtomicU32::new(0)));
        let client = provider.attach(0, Access::Rdma, true).unwrap();
        let comm = client.join("doomed", Rank(0), 2, LIMIT).unwrap();
        let tensor = client.tensor(Dtype::U64, 50_000).unwrap();
        wait(comm.all_reduce_in_place(&tensor, ReduceOp::Sum));
        drop(comm.all_reduce_in_place(&tensor, ReduceOp::Sum).unwrap());
        drop((comm, tensor, client));
        let error = far.join().unwrap();
        assert!(matches!(error, Error::Operation { .. }), "{error}");
    });
    for rank in 0..2 {
        provider.attach(rank, Access::Rdma, false).unwrap();
    }
}
