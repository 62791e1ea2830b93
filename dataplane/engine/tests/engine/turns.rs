//! Three tenants on one engine: what each moves, by weight and not by communicators.

use crate::common::{ARENA, World, loopback, reduce};
use harmonaize_abi::{CommunicatorHandle, Rank, ReduceOp};
use harmonaize_core::EpochPlan;
use harmonaize_engine::{AttachmentId, Command, CommunicatorId, Epoch, Formation, LocalRank};
use harmonaize_plan::{Group, Participant, Plan, Tuning};
use std::time::{Duration, Instant};

/// By tenant: its weight, and how many communicators of one rank it has.
const TENANTS: [(u32, usize); 3] = [(1, 8), (2, 4), (4, 2)];
const BYTES: u64 = 4 << 20;

#[test]
fn tenants_share_an_engine_by_weight() {
    let ranks = [(0..14).collect::<Vec<u32>>()];
    let mut world = World::with_sizes(loopback(1), &ranks, Tuning::default(), ARENA, 2);
    let owners: Vec<usize> = (0..).zip(TENANTS).flat_map(|(at, (_, count))| vec![at; count]).collect();
    for (rank, owner) in owners.iter().enumerate() {
        let group = Group::new(vec![vec![Rank(0)]]).unwrap();
        let plan =
            EpochPlan { plan: Plan::new(group, vec![Participant(0)]).unwrap(), ..world.plan(Epoch(1), &[0]) };
        let attachment = AttachmentId(rank as u64);
        let local = LocalRank { rank: Rank(0), attachment, handle: CommunicatorHandle(9) };
        world.engines[0].handle_command(Command::Form(Box::new(Formation {
            communicator: CommunicatorId(100 + rank as u64),
            tenant: 1 + *owner as u32,
            weight: TENANTS[*owner].0,
            me: Participant(0),
            plan,
            peers: Vec::new(),
            aggregator: None,
            locals: vec![local],
        })));
        world.tenants[rank].communicator = 9;
    }
    let operation = || reduce(ReduceOp::Sum, BYTES / 4, 0, BYTES);
    (0..owners.len()).for_each(|rank| (0..2).for_each(|_| world.submit(rank, operation())));
    let mut done = [0_u32; 3];
    let (end, begin) = (Duration::from_secs(2), Instant::now());
    while begin.elapsed() < end {
        world.engines[0].progress(64);
        for (rank, owner) in owners.iter().enumerate() {
            let Some(completion) = world.tenants[rank].end.completion().unwrap() else { continue };
            assert_eq!(completion.status, 0);
            done[*owner] += 1;
            world.submit(rank, operation());
        }
    }
    let all: u32 = done.iter().sum();
    println!("operations of each tenant: {done:?}");
    for (done, (weight, _)) in done.iter().zip(TENANTS) {
        let share = f64::from(*done) * 7.0 / f64::from(all * weight);
        // A processor that others use too charges whose turn it takes; by turns of equals it would be 4 and 0.25.
        assert!((0.5..=2.0).contains(&share), "weight {weight} has {share} of its share");
    }
}
