//! Aggregation over datagrams of RDMA: whole agents, an aggregator and control in one process, on a fake fabric.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod whole;

use harmonaize_agent::aggregator::{self, AggregatorConfig, ParentConfig};
use harmonaize_agent::config::Verbs;
use harmonaize_client::{
    Access, Algorithm, AttachOptions, Client, Communicator, Dtype, JoinOptions, Rank, ReduceOp,
};
use harmonaize_identity::Protection;
use harmonaize_testkit::topology::star_with_aggregator;
use harmonaize_verbs::Call;
use harmonaize_verbs::fake::{Fabric, Fault};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;
use tokio::sync::oneshot;
use whole::{Agent, LIMIT, background, control_of};

const HOSTS: usize = 4;
/// Elements of a tensor; no multiple of a chunk's.
const ELEMENTS: usize = 50_001;
/// Operations before and after what happens to the aggregator's device.
const EACH: u64 = 20;

fn device(name: &str) -> Option<Verbs> {
    Some(Verbs { devices: vec![name.to_owned()], ..Verbs::default() })
}

fn aggregator(control: SocketAddr, fabric: &Fabric) -> oneshot::Sender<()> {
    let config = AggregatorConfig {
        name: "agg0".to_owned(),
        control: vec![control.to_string()],
        protection: Protection::InsecureLoopback,
        listen: "127.0.0.1:0".parse().unwrap(),
        pool: 4 << 20,
        mtu: 9000,
        spin: Duration::from_micros(50),
        packets_per_second: Some(10_000_000),
        parent: ParentConfig { timeout: Duration::from_millis(100), retry_after: Duration::from_millis(2) },
        metrics: "127.0.0.1:0".parse().unwrap(),
        verbs: device("agg"),
        sandbox: Default::default(),
        source: None,
    };
    let devices = fabric.devices();
    background(move |stop| async move {
        aggregator::run_on(&devices, config, async { drop(stop.await) }).await.unwrap();
    })
}

fn value(rank: usize, salt: u64, element: usize) -> f32 {
    ((rank + 3) * (salt as usize + 1) + element % 977) as f32
}

/// One operation, checked; whether the aggregator did all of it.
fn sum(job: &Communicator, client: &Client, rank: usize, salt: u64) -> bool {
    let tensor = client.tensor(Dtype::F32, ELEMENTS as u64).unwrap();
    let own: Vec<f32> = (0..ELEMENTS).map(|element| value(rank, salt, element)).collect();
    tensor.write(0, &own).unwrap();
    let receipt = job.all_reduce_in_place(&tensor, ReduceOp::Sum).unwrap().wait(LIMIT).unwrap();
    let mut found = vec![0_f32; ELEMENTS];
    tensor.read(0, &mut found).unwrap();
    for (element, found) in found.into_iter().enumerate() {
        let right: f32 = (0..HOSTS).map(|rank| value(rank, salt, element)).sum();
        assert_eq!(found, right, "rank {rank}, sum {salt}, element {element}");
    }
    receipt.algorithm == Algorithm::Aggregated && !receipt.fallback
}

fn posted(fabric: &Fabric) -> usize {
    fabric.take_calls("agg").iter().filter(|call| call.call == Call::PostSend).count()
}

#[test]
fn hosts_sum_once_the_aggregators_device_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let (address, _control) = control_of(star_with_aggregator(HOSTS, 1000, "0us"));
    let fabric = Fabric::new();
    fabric.add("agg", Ipv4Addr::new(10, 9, 0, 100)).unwrap();
    let names: Vec<String> = (0..HOSTS).map(|host| format!("fake{host}")).collect();
    let sockets: Vec<PathBuf> = (0..HOSTS).map(|host| folder.path().join(format!("h{host}"))).collect();
    let _aggregator = aggregator(address, &fabric);
    let _agents: Vec<oneshot::Sender<()>> = (0..HOSTS)
        .map(|host| {
            fabric.add(&names[host], Ipv4Addr::new(10, 9, 0, host as u8 + 1)).unwrap();
            let mut agent = Agent::new(&format!("h{host}"), address, &sockets[host]);
            agent.devices = fabric.devices();
            agent.config.verbs = device(&names[host]);
            agent.start()
        })
        .collect();
    let (everyone, through) = (Barrier::new(HOSTS), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for (rank, socket) in sockets.iter().enumerate() {
            let (everyone, through, fabric) = (&everyone, &through, &fabric);
            scope.spawn(move || {
                let options = AttachOptions {
                    access: Access::Mapped,
                    arena_bytes: 64 * ELEMENTS as u64,
                    ..AttachOptions::default()
                };
                let client = Client::attach(socket, options).unwrap();
                let options = JoinOptions { timeout: LIMIT, ..JoinOptions::default() };
                let job = client.join_with("world", Rank(rank as u32), HOSTS as u32, &options).unwrap();
                // The aggregator may come after the communicator: it is used from a later epoch on.
                let (mut salt, mut served) = (0, 0);
                while !through.load(SeqCst) {
                    served += u64::from(sum(&job, &client, rank, salt));
                    salt += 1;
                    assert!(salt < 2000, "no operation goes by the aggregator");
                    everyone.wait();
                    if rank == 0 {
                        through.store(served >= EACH, SeqCst);
                    }
                    everyone.wait();
                }
                everyone.wait();
                if rank == 0 {
                    assert!(posted(fabric) as u64 > EACH, "its packets do not go by its device");
                    fabric.inject("agg", Fault::DeviceLost);
                }
                everyone.wait();
                for salt in salt..salt + EACH {
                    assert!(!sum(&job, &client, rank, salt), "by a device that is gone");
                }
            });
        }
    });
}
