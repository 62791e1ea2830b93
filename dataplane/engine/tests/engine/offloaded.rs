//! Sums by an aggregator of tensors that are not mapped: of tenants attached over RDMA, on fake devices, and over sockets.

use crate::aggregated::{aggregated, all_reduce, coded, codes};
use crate::common::{ARENA, Ends, World, call, distant, near, tcp};
use crate::served::{FORMAT, Served, any, my_turn, ordinary, rules, whole_by};
use crate::succession::{Lab, hand_over_while_served, rejoin, take_over};
use harmonaize_abi::session::Succession;
use harmonaize_abi::{Collective, Completion, ReduceOp, Submission, Tag};
use harmonaize_core::Aggregation;
use harmonaize_engine::Aggregator;
use harmonaize_plan::Tuning;
use harmonaize_shm::{AgentEnd, EndError, InheritEnd, InheritedEnd, Regions, RemoteEnd, Span};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Where an aggregator should be used, and is not for some time: another is given up.
const PATIENCE: Duration = Duration::from_secs(120);

/// A world whose ranks' attachments have these ends.
fn offloaded(
    rules: Aggregation,
    ranks: &[Vec<u32>],
    aggregators: Vec<Aggregator>,
    ends: &mut dyn FnMut(u32) -> Ends,
) -> World {
    let tuning =
        Tuning { chunk_bytes: 16 << 10, segment_bytes: 64 << 10, copy_bytes: 4096, ..Tuning::default() };
    World::with_ends(tcp(ranks.len()), ranks, tuning, 2, None, (Some(rules), aggregators), ends)
}

/// Hosts' ranks: one each; several, of whom some are mapped.
fn mixes() -> [Vec<Vec<u32>>; 2] {
    [vec![vec![0], vec![1], vec![2]], vec![vec![0, 2], vec![1], vec![3, 4, 5]]]
}

/// Whether a rank's tensors are mapped in a world of more than one rank a host.
fn is_mapped(ranks: &[Vec<u32>], rank: u32) -> bool {
    ranks.iter().any(|local| local.len() > 1) && matches!(rank, 0 | 4)
}

#[test]
fn sums_of_distant_tensors_go_by_the_aggregator() {
    let _turn = my_turn();
    for over_rdma in [true, false] {
        for ranks in mixes() {
            let served = Served::start(any(), 7, ranks.len() as u16, 0);
            let mut lab = Lab::new();
            let ends = &mut |rank| match (is_mapped(&ranks, rank), over_rdma) {
                (true, _) => near(ARENA),
                (false, true) => lab.attach(),
                (false, false) => distant(ARENA),
            };
            let reached = served.reached_by(ranks.len() as u32);
            let mut world = offloaded(rules(FORMAT), &ranks, reached, ends);
            for (count, in_place) in
                [(300, false), (300, true), (100_000, false), (100_001, true), (777, false)]
            {
                aggregated(&mut world, count, in_place);
            }
            // Less than is worth it.
            let completions = all_reduce(&mut world, 200, false, |_| {});
            assert!(completions.iter().all(|completion| completion.algorithm != 9));
        }
    }
}

/// Sums of f32, and in codes; averages are divided once, whoever stores them.
#[test]
fn averages_and_codes_of_distant_tensors_have_the_same_bits_everywhere() {
    let _turn = my_turn();
    let ranks = mixes()[1].clone();
    for (format, most) in [(FORMAT, 1e-10), (codes(ranks.len()), 0.15)] {
        let served = Served::of(format, any(), 7, ranks.len() as u16, 0);
        let mut lab = Lab::new();
        let ends = &mut |rank| if is_mapped(&ranks, rank) { near(ARENA) } else { lab.attach() };
        let reached = served.reached_by(ranks.len() as u32);
        let mut world = offloaded(rules(format), &ranks, reached, ends);
        for (count, in_place, op) in [
            (300, false, ReduceOp::Average),
            (300, true, ReduceOp::Average),
            (50_000, true, ReduceOp::Sum),
            (50_001, false, ReduceOp::Average),
            (50_001, true, ReduceOp::Average),
        ] {
            let inputs: Vec<Vec<f32>> = (0..6).map(|rank| ordinary(rank, count)).collect();
            let deadline = Instant::now() + PATIENCE;
            loop {
                let (measured, completions) = coded(&mut world, op, &inputs, in_place);
                assert!(measured < most, "{count} {op:?}, in place {in_place}: {measured}");
                if whole_by(&completions) {
                    break;
                }
                assert!(Instant::now() < deadline, "the aggregator is never used: {completions:?}");
            }
        }
    }
}

/// The root's tensor is mapped, or not; sizes that are done at once, and more.
#[test]
fn broadcasts_and_barriers_of_distant_tensors_go_by_the_aggregator() {
    let _turn = my_turn();
    let ranks = mixes()[1].clone();
    let served = Served::start(any(), 7, ranks.len() as u16, 0);
    let mut lab = Lab::new();
    let ends = &mut |rank| if is_mapped(&ranks, rank) { near(ARENA) } else { lab.attach() };
    let rules = Aggregation { broadcast_bytes: Some([8, 1 << 20]), barriers: true, ..rules(FORMAT) };
    let mut world = offloaded(rules, &ranks, served.reached_by(ranks.len() as u32), ends);
    for (root, count) in [(0_u32, 100_u64), (1, 100), (3, 100), (4, 20_000), (5, 20_000), (2, 30_001)] {
        let to = 16 << 20;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let content: Vec<u64> = (0..count).map(|at| at * 7 + u64::from(root)).collect();
            (0..6).for_each(|rank| world.write(rank, to, &vec![0; count as usize]));
            (0..6).for_each(|rank| world.write(rank, 0, &vec![rank as u64; count as usize]));
            world.write(root as usize, 0, &content);
            let broadcast = call(Collective::Broadcast, count, 1, 0, to, root);
            (0..6).for_each(|rank| world.submit(rank, broadcast));
            let completions = world.completions();
            for (rank, completion) in completions.iter().enumerate() {
                assert_eq!(completion.status, 0, "rank {rank}: {completion:?}");
                assert!(world.read(rank, to, count as usize) == content, "rank {rank} of root {root}");
            }
            (0..6).for_each(|rank| world.submit(rank, call(Collective::Barrier, 0, 0, 0, 0, 0)));
            let barriers = world.completions();
            assert!(barriers.iter().all(|completion| completion.status == 0), "{barriers:?}");
            let by = |done: &[Completion]| done.iter().all(|completion| completion.algorithm == 9);
            if by(&completions) && by(&barriers) {
                break;
            }
            assert!(Instant::now() < deadline, "the aggregator is never used: {completions:?} {barriers:?}");
        }
    }
}

/// The aggregator dies and comes back while fetches and stores are held back, at any time; packets are lost. Sums are right.
#[test]
fn an_aggregator_that_dies_while_transfers_are_under_way_costs_no_operation() {
    let _turn = my_turn();
    let ranks = [vec![0, 4], vec![1], vec![2, 3]];
    let mut by_it = 0;
    for seed in 1..=6 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut served = Some(Served::start(any(), 1, 3, 50));
        let reached = served.as_ref().unwrap().reached_by(3);
        let address = reached[0].address;
        let mut lab = Lab::new();
        let ends = &mut |rank: u32| if rank == 4 { near(ARENA) } else { lab.attach() };
        let mut world = offloaded(rules(FORMAT), &ranks, reached, ends);
        if seed % 2 == 0 {
            world.slice_actions(1000);
        }
        let mut incarnation = 1;
        for round in 0..12 {
            let count = if random.random_bool(0.4) {
                random.random_range(256..1000)
            } else {
                random.random_range(2000..200_000)
            };
            let in_place = random.random_bool(0.5);
            let (holds, dies) = (random.random_bool(0.6), random.random_bool(0.5));
            let rounds: [usize; 3] = [0, 1, 2].map(|_| random.random_range(0..400));
            let completions = all_reduce(&mut world, count, in_place, |world| {
                world.run_rounds(rounds[0]);
                lab.hold(holds);
                world.run_rounds(rounds[1]);
                if dies {
                    served = None;
                }
                world.run_rounds(rounds[2]);
                lab.hold(false);
            });
            println!("  round {round}: {count}, in place {in_place}, held {holds}, dies {dies}");
            by_it += usize::from(whole_by(&completions));
            if served.is_none() {
                incarnation += 1;
                served = Some(Served::start(address, incarnation, 3, 50));
            }
        }
        // It is used again.
        aggregated(&mut world, 20_000, seed % 2 == 0);
    }
    println!("{by_it} of 72 operations went by the aggregator whole");
    assert!(by_it > 0);
}

/// A host has a small sum, and the other has not when the aggregator dies. Hosts go on from the sum that is kept, whose first local
/// rank's tensors are not mapped while another's are.
#[test]
fn a_kept_sum_is_given_on_by_a_host_whose_first_tensor_is_not_mapped() {
    let _turn = my_turn();
    let ranks = [vec![0, 1], vec![2]];
    let mut served = Some(Served::start(any(), 1, 2, 0));
    let reached = served.as_ref().unwrap().reached_by(2);
    let address = reached[0].address;
    let mut lab = Lab::new();
    let ends = &mut |rank: u32| if rank == 0 { lab.attach() } else { near(ARENA) };
    let mut world = offloaded(rules(FORMAT), &ranks, reached, ends);
    let (count, deadline) = (300, Instant::now() + PATIENCE);
    let nothing = vec![0.0_f32; count];
    for incarnation in 2.. {
        aggregated(&mut world, count, false);
        (0..3).for_each(|rank| world.write_floats(rank, 16 << 20, &nothing));
        served.as_ref().unwrap().mute(1);
        let mut alone = false;
        let completions = all_reduce(&mut world, count, false, |world| {
            let has = |world: &World, rank| world.read_floats(rank, 16 << 20, count) != nothing;
            world.until("a sum", |world| has(world, 1) || has(world, 2));
            alone = !has(world, 2);
            drop(served.take());
        });
        if alone && whole_by(&completions[1..2]) && completions[2].fallback != 0 {
            return;
        }
        // Where the aggregator's thread got no turn in time, hosts have summed by themselves.
        assert!(Instant::now() < deadline, "no host is ever the only one with a sum: {completions:?}");
        served = Some(Served::start(address, incarnation, 2, 0));
    }
}

/// Engines are succeeded in the midst of operations: what is fetched and stored ends before, and hosts go on.
#[test]
fn successors_go_on_with_an_aggregator_and_tensors_over_rdma() {
    let _turn = my_turn();
    let ranks = [vec![0, 2], vec![1, 3, 4]];
    for seed in 1..=4 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let served = Served::start(any(), 7, 2, 0);
        let mut lab = Lab::new();
        let ends = &mut |rank: u32| if rank < 2 { near(ARENA) } else { lab.attach() };
        let mut world = offloaded(rules(FORMAT), &ranks, served.reached_by(2), ends);
        let mut before = Vec::new();
        for round in 0..4 {
            let at = round % 2;
            let in_place = random.random_bool(0.5);
            aggregated(&mut world, 20_000, in_place);
            let count = if random.random_bool(0.5) { 500 } else { 300_000 };
            let rounds: [usize; 2] = [0, 1].map(|_| random.random_range(0..200));
            all_reduce(&mut world, count, in_place, |world| {
                world.run_rounds(rounds[0]);
                let away: Vec<u32> = ranks[at].iter().copied().filter(|rank| *rank >= 2).collect();
                for rank in &away {
                    let told = world.tenants[*rank as usize].end.succeed(&Succession::Begins);
                    assert_eq!(told.unwrap(), None);
                }
                let image = Lab::hand_over(world, at);
                let (rejoins, engine) = lab.succeed(world, at, &away, image);
                before.push(engine);
                world.run_rounds(rounds[1]);
                rejoins.into_iter().for_each(|(rank, ours)| rejoin(world, rank, ours));
            });
        }
        aggregated(&mut world, 20_000, true);
    }
}

/// What engines one after the other have stored through an end, as long as it takes stores.
#[derive(Clone, Debug, Default)]
struct Stores {
    paused: Arc<AtomicBool>,
    /// Whether one was asked for in vain, and whether that is of what an aggregator summed.
    refused: Arc<Mutex<Option<bool>>>,
    /// How often, of what an aggregator summed, by where.
    summed: Arc<Mutex<BTreeMap<u64, usize>>>,
}

/// An end whose process does not come to stores for some time, as it does not to an engine over RDMA.
#[derive(Debug)]
struct Late(Box<dyn AgentEnd>, Stores);

impl AgentEnd for Late {
    fn submission(&mut self) -> Result<Option<Submission>, EndError> {
        self.0.submission()
    }

    fn complete(&mut self, completion: &Completion) -> Result<(), EndError> {
        self.0.complete(completion)
    }

    fn memory(&self) -> Option<&Regions> {
        None
    }

    fn arena_bytes(&self) -> u64 {
        self.0.arena_bytes()
    }

    fn entries(&self) -> u32 {
        self.0.entries()
    }

    fn hand_over(&self) -> Result<InheritedEnd, EndError> {
        self.0.hand_over()
    }

    fn rests(&self) -> bool {
        self.0.rests()
    }

    fn is_away(&self) -> bool {
        self.1.paused.load(Ordering::Relaxed)
    }

    fn fetch(&mut self, tag: Tag, offset: u64, into: Span) -> Result<(), EndError> {
        self.0.fetch(tag, offset, into)
    }

    fn store(&mut self, tag: Tag, from: Span, offset: u64) -> Result<(), EndError> {
        // By the steps of tags.
        let of_aggregator = (0xe_0000..=0xe_ffff).contains(&(tag.0 & 0xf_ffff));
        if self.is_away() {
            *self.1.refused.lock().unwrap() = Some(of_aggregator);
            return Err(EndError::Full);
        }
        self.0.store(tag, from, offset)?;
        if of_aggregator {
            *self.1.summed.lock().unwrap().entry(offset).or_default() += 1;
        }
        Ok(())
    }

    fn progress(&mut self, done: &mut dyn FnMut(Tag)) -> Result<usize, EndError> {
        self.0.progress(done)
    }

    fn flush(&mut self) -> Result<(), EndError> {
        self.0.flush()
    }

    fn prepare_sleep(&mut self) -> bool {
        self.0.prepare_sleep()
    }

    fn cancel_sleep(&mut self, woken: bool) {
        self.0.cancel_sleep(woken);
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.0.wake_fd()
    }
}

/// What an aggregator summed waits for a process while its engine has two successors. It is stored by the second, once; the operation does
/// not end before, and its sum is right. Small sums may end before everybody has them, and large ones in place may not.
#[test]
fn a_held_sum_that_waits_for_a_process_goes_along() {
    let _turn = my_turn();
    let ranks = [vec![0, 2], vec![1, 3]];
    for (seed, count) in (1..).zip([300, 100_000, 300, 100_000]) {
        println!("seed {seed}, {count} elements");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let served = Served::start(any(), 7, 2, 0);
        let stores = Stores::default();
        let ends = &mut |rank: u32| match (rank, distant(ARENA)) {
            (0 | 1, _) => near(ARENA),
            (2, (end, tenant)) => (Box::new(Late(end, stores.clone())) as Box<dyn AgentEnd>, tenant),
            (_, ends) => ends,
        };
        let mut world = offloaded(rules(FORMAT), &ranks, served.reached_by(2), ends);
        let (mut before, deadline) = (Vec::new(), Instant::now() + PATIENCE);
        loop {
            aggregated(&mut world, 20_000, true);
            stores.summed.lock().unwrap().clear();
            let mut waited = None;
            all_reduce(&mut world, count, true, |world| {
                stores.paused.store(true, Ordering::Relaxed);
                world.until("a store", |_| stores.refused.lock().unwrap().is_some());
                for _ in 0..2 {
                    waited = stores.refused.lock().unwrap().take();
                    let image = hand_over_while_served(world, 0);
                    assert!(image.state.starts_with(&[0xff; 20]), "nothing waits");
                    let stores = stores.clone();
                    let inherit: InheritEnd = Box::new(move |from| {
                        let end = Box::new(RemoteEnd::inherit(from, ARENA)?);
                        let end: Box<dyn AgentEnd> = Box::new(Late(end, stores));
                        Ok::<_, EndError>(end)
                    });
                    before.push(take_over(world, 0, HashMap::from([(2, inherit)]), image));
                    let mut rounds = random.random_range(1..300);
                    world.until("some rounds", |world| {
                        let ended = world.tenants[2].end.completion().unwrap();
                        assert!(ended.is_none(), "its sum is still to be stored: {ended:?}");
                        rounds -= 1;
                        rounds == 0
                    });
                }
                stores.paused.store(false, Ordering::Relaxed);
            });
            let summed = stores.summed.lock().unwrap().clone();
            assert!(summed.values().all(|times| *times == 1), "stored more than once: {summed:?}");
            assert!(waited != Some(true) || !summed.is_empty(), "what waited was not stored");
            *stores.refused.lock().unwrap() = None;
            if waited == Some(true) {
                break;
            }
            // Where the aggregator's thread got no turn in time, hosts have summed by themselves.
            assert!(Instant::now() < deadline, "no sum of an aggregator's ever waits");
        }
        aggregated(&mut world, 20_000, true);
    }
}
