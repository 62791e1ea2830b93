//! Engines over RDMA allocate nothing once a communicator is up and has run each kind of operation. Two engines run on
//! fake devices, and every allocation within their turns is counted.

#[path = "../../../transport/tests/counting/mod.rs"]
mod counting;

use crate::coded::number;
use crate::common::{World, call, reduce};
use counting::Counting;
use harmonaize_abi::{Collective, ReduceOp, Region, Submission};
use harmonaize_plan::{AlgorithmTable, Coding, Tuning};
use harmonaize_transport::verbs::{Config, VerbsTransport};
use harmonaize_transport::{Transport, tcp};
use harmonaize_verbs::fake::Fabric;
use std::cell::Cell;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: Counting = Counting(counting::here);

thread_local! {
    /// Within the engines' turns.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

const RANKS: usize = 3;
const LARGE: u64 = 60_000;
const OUTPUT: u64 = 16 << 20;

pub(crate) fn transports() -> Vec<Box<dyn Transport + Send>> {
    let fabric = Fabric::new();
    let names: Vec<String> = (0..2).map(|at| format!("fake{at}")).collect();
    for (name, last) in names.iter().zip(1..) {
        fabric.add(name, Ipv4Addr::new(10, 0, 0, last)).unwrap();
    }
    fabric.stop_recording();
    let bind = |name: &String| {
        let tcp = tcp::Config::new("127.0.0.1:0".parse().unwrap());
        let config = Config { devices: vec![name.clone()], ..Config::new(tcp) };
        Box::new(VerbsTransport::bind(config, &fabric.devices()).unwrap()) as Box<dyn Transport + Send>
    };
    names.iter().map(bind).collect()
}

/// Runs an operation at all ranks; counts within the engines' turns alone.
fn operation(world: &mut World, submission: Submission) {
    (0..RANKS).for_each(|rank| world.submit(rank, submission));
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut done = [false; RANKS];
    while !done.iter().all(|done| *done) {
        let before = counting::so_far();
        world.engines.iter_mut().for_each(|engine| {
            engine.progress(64);
        });
        ALLOCATIONS.set(ALLOCATIONS.get() + counting::so_far() - before);
        for (tenant, done) in world.tenants.iter_mut().zip(&mut done) {
            if let Some(completion) = tenant.end.completion().unwrap() {
                assert_eq!(completion.status, 0);
                *done = true;
            }
        }
        assert!(Instant::now() < deadline, "{submission:?}: {done:?}");
    }
}

fn round(world: &mut World) {
    for count in [1, 200, LARGE] {
        operation(world, call(Collective::AllReduce, count, 1, 0, OUTPUT, 0));
        operation(world, call(Collective::AllReduce, count, 1, 0, 0, 0));
        operation(world, call(Collective::AllToAll, count.min(9000), RANKS as u64, 0, OUTPUT, 0));
        let short = call(Collective::AllGather, count.min(9000), 1, 0, OUTPUT, 0);
        let long = call(Collective::ReduceScatter, count.min(9000), RANKS as u64, 0, OUTPUT, 0);
        operation(world, Submission { output: Region { bytes: long.input.bytes, ..short.output }, ..short });
        operation(world, Submission { output: Region { bytes: short.input.bytes, ..long.output }, ..long });
        operation(world, call(Collective::Broadcast, count, 1, 0, 0, 2));
        operation(world, call(Collective::Barrier, 0, 1, 0, 0, 0));
        // Of these the large ones are coded, some chunks exactly.
        operation(world, reduce(ReduceOp::Average, count, 0, OUTPUT));
        operation(world, reduce(ReduceOp::Sum, count, OUTPUT, OUTPUT));
    }
}

#[test]
fn no_turn_allocates_once_a_communicator_is_up() {
    let tuning = Tuning {
        chunk_bytes: 8192,
        segment_bytes: 32768,
        message_bytes: 1024,
        copy_bytes: 4096,
        algorithms: AlgorithmTable::direct(1000, 2000),
    };
    let (codec, finer) = (number("rotated 4"), Some(number("int8 stochastic")));
    let coding = Some(Coding { codec, finer, max_error: Some(0.02) });
    let ranks = [vec![0, 2], vec![1]];
    let mut world = World::with_coding(transports(), &ranks, tuning, crate::common::ARENA, 2, coding);
    // As many as to bring every operation to every channel.
    (0..40).for_each(|_| round(&mut world));
    assert!(ALLOCATIONS.replace(0) > 0, "the counter counts");
    (0..40).for_each(|_| round(&mut world));
    assert_eq!(ALLOCATIONS.get(), 0, "allocations of both engines in 40 rounds of 27 operations");
    assert!(world.marks.iter().all(|marks| marks.read().is_some()), "with marks");
}
