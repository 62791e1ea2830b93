//! Coded AllReduces through engines, rings and transports. They keep within their budgets, give the same bits everywhere, and
//! are right across changes of codec. A peer that sends no chunk ends the communicator and is named.

use crate::common::{SMALL, World, call, loopback, reduce, tcp};
use crate::tampering::{Damage, tampering};
use harmonaize_abi::{Collective, Completion, Dtype, ReduceOp, Region, Status, Submission};
use harmonaize_codec::Codec;
use harmonaize_core::Failure;
use harmonaize_engine::{Epoch, Notice, PrepareError};
use harmonaize_events::MarkKind;
use harmonaize_plan::{Coding, Participant};
use harmonaize_transport::Transport;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const OUTPUT: u64 = 16 << 20;

pub(crate) fn number(name: &str) -> u16 {
    Codec::NAMED.iter().position(|(known, _)| *known == name).unwrap() as u16
}

pub(crate) fn coding(name: &str, most: Option<f64>) -> Option<Coding> {
    let codec = number(name);
    Some(Coding { codec, finer: None, max_error: most })
}

fn world(transports: Vec<Box<dyn Transport + Send>>, ranks: &[Vec<u32>], coding: Option<Coding>) -> World {
    World::with_coding(transports, ranks, SMALL, crate::common::ARENA, 2, coding)
}

/// One rank a participant.
fn hosts(count: u32) -> Vec<Vec<u32>> {
    (0..count).map(|rank| vec![rank]).collect()
}

/// Heavy-tailed numbers, other ones at each rank.
fn input(rank: usize, count: usize) -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(rank as u64);
    let mut one = || random.random_range(-1.0..1.0_f32) / random.random_range(0.01..1.0_f32);
    (0..count).map(|_| one()).collect()
}

/// What was lost of the sum, over all ranks' squares; all ranks have the same bits.
fn lost(world: &World, count: usize, to: u64, average: bool) -> f64 {
    let ranks = world.tenants.len();
    let (mut sum, mut signal) = (vec![0.0; count], 0.0);
    for rank in 0..ranks {
        for (sum, value) in sum.iter_mut().zip(input(rank, count)) {
            *sum += f64::from(value);
            signal += f64::from(value).powi(2);
        }
    }
    let first = world.read_floats(0, to, count);
    for rank in 1..ranks {
        let other = world.read_floats(rank, to, count);
        let same = first.iter().zip(&other).all(|(one, other)| one.to_bits() == other.to_bits());
        assert!(same, "rank {rank} has other bits");
    }
    let scale = if average { ranks as f64 } else { 1.0 };
    let error: f64 =
        sum.iter().zip(&first).map(|(sum, value)| (sum - f64::from(*value) * scale).powi(2)).sum();
    // Each sum in f32 rounds, too.
    ((error / signal).sqrt() - 1e-6).max(0.0).powi(2)
}

fn run(world: &mut World, op: ReduceOp, count: usize, to: u64) -> Vec<Completion> {
    let ranks = world.tenants.len();
    for rank in 0..ranks {
        world.write_floats(rank, 0, &input(rank, count));
    }
    (0..ranks).for_each(|rank| world.submit(rank, reduce(op, count as u64, 0, to)));
    let completions = world.completions();
    assert!(completions.iter().all(|done| done.status == 0), "{completions:?}, {:?}", world.notices);
    for rank in 0..ranks {
        assert!(to == 0 || world.read_floats(rank, 0, count) == input(rank, count), "an input changed");
    }
    completions
}

fn every_sum_is_within_its_budget(transports: fn(usize) -> Vec<Box<dyn Transport + Send>>, names: &[&str]) {
    let groups = [
        hosts(2),
        vec![vec![0, 3], vec![1, 2], vec![4]],
        vec![vec![2], vec![0], vec![3], vec![1]],
        vec![vec![0], (1..11).collect()],
        hosts(8),
    ];
    for (ranks, name) in groups.iter().zip(names.iter().cycle()).cycle().take(groups.len().max(names.len())) {
        for (most, finer) in [(None, None), (Some(0.02), None), (Some(0.02), Some("int8 stochastic"))] {
            let finer = finer.map(number);
            let coding = coding(name, most).map(|coding| Coding { finer, ..coding });
            let mut world = world(transports(ranks.len()), ranks, coding);
            // One element more than a block, than a segment; fewer than participants have parts for each.
            for count in [513, 1025, 4097, 50_003] {
                for (op, to) in [(ReduceOp::Sum, OUTPUT), (ReduceOp::Average, OUTPUT), (ReduceOp::Sum, 0)] {
                    let completions = run(&mut world, op, count, to);
                    let lost = lost(&world, count, to, op == ReduceOp::Average);
                    let what = format!("{name} of {count} at {ranks:?}: lost {lost}");
                    assert!(most.is_none_or(|most| lost <= most), "{what}");
                    for done in completions {
                        let told = f64::from(f32::from_bits(done.error));
                        assert!(lost <= told * 1.001, "{what}, told {told}");
                        assert!(most.is_none_or(|most| told <= most * 1.0001), "{what}, told {told}");
                        let measured = f64::from(f32::from_bits(done.measured_error));
                        assert!(measured <= told, "{what}, measured {measured}");
                        let whole = done.fallback == 0 && finer.is_none();
                        assert!(done.codec == number(name) || !whole, "{what}, in {}", done.codec);
                        // Of many elements and in bits that lose, errors are not alike by chance; of several ranks the squares
                        // of the sum stand for theirs, which are more.
                        let single = ranks.iter().all(|ranks| ranks.len() == 1);
                        if single && count > 50_000 && done.fallback == 0 && lost > 1e-7 {
                            assert!((0.9..1.1).contains(&(measured / lost)), "{what}, measured {measured}");
                        }
                        assert_eq!(done.algorithm, 6, "{what}");
                        assert!(done.fallback == 0 || most.is_some(), "{what}");
                        assert!(done.wire_bytes > 0, "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_sum_is_within_its_budget_in_process() {
    let names: Vec<&str> = Codec::NAMED.iter().skip(1).map(|(name, _)| *name).collect();
    every_sum_is_within_its_budget(loopback, &names);
}

#[test]
fn every_sum_is_within_its_budget_over_tcp() {
    every_sum_is_within_its_budget(tcp, &["int8", "rotated 4", "bf16"]);
}

#[test]
fn fewer_bits_are_sent_and_the_receipt_says_how_many() {
    let count = 200_000;
    let wire = |name: &str| {
        let mut world = world(loopback(4), &hosts(4), coding(name, None));
        run(&mut world, ReduceOp::Sum, count, OUTPUT)[0]
    };
    let ring = {
        let mut world = world(loopback(4), &hosts(4), None);
        run(&mut world, ReduceOp::Sum, count, OUTPUT)[0]
    };
    assert_eq!((ring.algorithm, ring.error, ring.fallback), (2, 0, 0));
    // Of chunks of 4 KiB the header is a hundredth.
    for (name, least) in [("bf16", 1.9), ("int8", 3.7), ("rotated 4", 7.0), ("rotated 1", 20.0)] {
        let done = wire(name);
        let ratio = ring.wire_bytes as f64 / done.wire_bytes as f64;
        assert!(ratio > least, "{name}: {ratio}");
        assert_eq!(u64::from(done.bits_per_element_x256), done.wire_bytes * 8 * 256 / count as u64);
    }
}

/// An AllToAll of `block` elements from each rank to each.
fn exchange(block: usize, ranks: usize, dtype: Dtype) -> Submission {
    let region = |offset| Region { offset, bytes: (block * ranks * 4) as u64 };
    let call = call(Collective::AllToAll, block as u64, 0, 0, 0, 0);
    Submission { dtype: dtype.code(), input: region(0), output: region(OUTPUT), ..call }
}

#[test]
fn moved_blocks_lose_what_their_receipts_say() {
    let groups = [hosts(2), vec![vec![0, 3], vec![1, 2], vec![4]], vec![vec![2], vec![0], vec![3], vec![1]]];
    let block = 1500;
    for (ranks, name) in
        groups.iter().cycle().zip(["int8", "rotated 4", "bf16", "rotated 1", "int8 stochastic"])
    {
        for most in [None, Some(0.002)] {
            let mut world = world(loopback(ranks.len()), ranks, coding(name, most));
            let (all, what) = (world.tenants.len(), format!("{name} within {most:?} at {ranks:?}"));
            for rank in 0..all {
                world.write_floats(rank, 0, &input(rank, all * block));
            }
            (0..all).for_each(|rank| world.submit(rank, exchange(block, all, Dtype::F32)));
            let completions = world.completions();
            for (engine, locals) in ranks.iter().enumerate() {
                let (mut error, mut signal) = (0.0, 0.0);
                for to in locals.iter().map(|rank| *rank as usize) {
                    assert_eq!((completions[to].status, completions[to].algorithm), (0, 3), "{what}");
                    let got = world.read_floats(to, OUTPUT, all * block);
                    for (from, got) in got.chunks_exact(block).enumerate() {
                        let sent = input(from, all * block)[to * block..(to + 1) * block].to_vec();
                        if locals.contains(&(from as u32)) {
                            assert_eq!(got, sent, "{what}: what stays at a host");
                            continue;
                        }
                        let lost = sent.iter().zip(got).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2));
                        error += lost.sum::<f64>();
                        signal += sent.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
                    }
                }
                let done = completions[locals[0] as usize];
                let (told, lost) = (f64::from(f32::from_bits(done.error)), error / signal);
                assert_eq!(done.measured_error, done.error, "{what}: nothing is a bound");
                // Of a rotated block that is not full, what falls into its padding is told, too.
                let least = if name.starts_with("rotated") { told / 2.0 } else { told * 0.999 - 1e-6 };
                assert!(lost >= least && lost <= told * 1.001 + 1e-6, "{what}: lost {lost}, told {told}");
                assert!(most.is_none_or(|most| lost <= most * 1.0001), "{what}: lost {lost}");
                assert!(most.is_some() || lost > 0.0, "{what}: nothing was lost");
                assert_eq!(saved(&world, engine), [], "{what}");
            }
            let exact: u64 = (all - ranks[0].len()) as u64 * ranks[0].len() as u64 * block as u64 * 4;
            let sent = completions[ranks[0][0] as usize].wire_bytes;
            assert!(sent < exact * 5 / 8 || most.is_some(), "{what}: {sent} bytes, exactly {exact}");
        }
    }
    // Of other types nothing is lost.
    let mut world = world(loopback(2), &hosts(2), coding("int8", None));
    (0..2).for_each(|rank| world.write_floats(rank, 0, &input(rank, 2 * block)));
    (0..2).for_each(|rank| world.submit(rank, exchange(block, 2, Dtype::I32)));
    assert!(world.completions().iter().all(|done| (done.status, done.error) == (0, 0)));
    assert_eq!(world.read_floats(1, OUTPUT, block), input(0, 2 * block)[block..]);
}

/// Each block is encoded once, by its owner, who decodes it too: mapped or not, in place by turns.
#[test]
fn gathered_blocks_have_equal_bits_at_all_ranks() {
    let groups = [hosts(2), vec![vec![0, 3], vec![1, 2], vec![4]], vec![vec![2], vec![0], vec![1]], hosts(6)];
    let block = 1500;
    let bytes = |blocks: usize| (blocks * block * 4) as u64;
    for (ranks, name) in groups.iter().cycle().zip(["int8", "rotated 4", "bf16", "int4", "rotated 2"]) {
        for most in [None, Some(0.002)] {
            let transports = loopback(ranks.len());
            let mut world = World::with_away(transports, ranks, coding(name, most), &|rank| rank % 3 == 1);
            let (all, what) = (world.tenants.len(), format!("{name} within {most:?} at {ranks:?}"));
            let at = |rank: usize| if rank.is_multiple_of(2) { OUTPUT + bytes(rank) } else { 0 };
            for rank in 0..all {
                world.write_floats(rank, at(rank), &input(rank, block));
                let submission = Submission {
                    dtype: Dtype::F32.code(),
                    input: Region { offset: at(rank), bytes: bytes(1) },
                    output: Region { offset: OUTPUT, bytes: bytes(all) },
                    ..call(Collective::AllGather, block as u64, 0, 0, 0, 0)
                };
                world.submit(rank, submission);
            }
            let completions = world.completions();
            let first = world.read_floats(0, OUTPUT, all * block);
            for rank in 1..all {
                let same = world
                    .read_floats(rank, OUTPUT, all * block)
                    .iter()
                    .zip(&first)
                    .all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{what}: rank {rank} has other bits");
            }
            let kept = |rank: &usize| world.read_floats(*rank, 0, block) == input(*rank, block);
            assert!(
                (0..all).filter(|rank| rank % 2 == 1).all(|rank| kept(&rank)),
                "{what}: an input changed"
            );
            let (mut error, mut signal) = (0.0, 0.0);
            for (from, got) in first.chunks_exact(block).enumerate() {
                let sent = input(from, block);
                let lost: f64 =
                    sent.iter().zip(got).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
                let squares: f64 = sent.iter().map(|value| f64::from(*value).powi(2)).sum();
                assert!(most.is_none_or(|most| lost <= most * squares * 1.0001), "{what}: block {from}");
                (error, signal) = (error + lost, signal + squares);
            }
            let lost = error / signal;
            assert!(most.is_some() || lost > 0.0, "{what}: nothing was lost");
            for done in &completions {
                assert_eq!((done.status, done.algorithm), (0, 6), "{what}");
                let told = f64::from(f32::from_bits(done.error));
                // Of a rotated block that is not full, what falls into its padding is told, too.
                let least = if name.starts_with("rotated") { told / 2.0 } else { told * 0.999 - 1e-6 };
                assert!(lost >= least && lost <= told * 1.001 + 1e-6, "{what}: lost {lost}, told {told}");
            }
            let exact = bytes((ranks.len() - 1) * ranks[0].len());
            let sent = completions[ranks[0][0] as usize].wire_bytes;
            assert!(sent < exact * 5 / 8 || most.is_some(), "{what}: {sent} bytes, exactly {exact}");
        }
    }
    // A ReduceScatter stays exact.
    let mut world = world(loopback(2), &hosts(2), coding("int8", None));
    (0..2).for_each(|rank| world.write_floats(rank, 0, &input(rank, 2 * block)));
    for rank in 0..2 {
        let submission = Submission {
            dtype: Dtype::F32.code(),
            input: Region { offset: 0, bytes: bytes(2) },
            output: Region { offset: OUTPUT, bytes: bytes(1) },
            ..call(Collective::ReduceScatter, block as u64, 0, 0, 0, 0)
        };
        world.submit(rank, submission);
    }
    let done = world.completions();
    assert!(done.iter().all(|done| (done.status, done.error, done.algorithm) == (0, 0, 2)), "{done:?}");
    for (rank, own) in [(0, 0..block), (1, block..2 * block)] {
        let [one, other] = [0, 1].map(|from| input(from, 2 * block)[own.clone()].to_vec());
        let sum: Vec<f32> = one.iter().zip(&other).map(|(a, b)| a + b).collect();
        assert_eq!(world.read_floats(rank, OUTPUT, block), sum);
    }
}

/// Marks of coded operations that an engine has written. Each gives the bytes saved, whether chunks went exact, and the error as
/// receipts state it.
fn saved(world: &World, engine: usize) -> Vec<(u64, u32, u32)> {
    let marks = std::iter::from_fn(|| world.marks[engine].read());
    let coded = marks.filter(|mark| mark.kind == MarkKind::Coded as u32);
    coded.map(|mark| (mark.bytes, mark.channel, (f64::from_bits(mark.segment) as f32).to_bits())).collect()
}

#[test]
fn marks_tell_once_a_host_what_was_saved_and_lost() {
    let (groups, count) = (vec![vec![0, 1], vec![2], vec![3], vec![4]], 1 << 16);
    let mut exact = world(loopback(4), &groups, None);
    let ring = run(&mut exact, ReduceOp::Sum, count, OUTPUT);
    let mut coded = world(loopback(4), &groups, coding("int8", None));
    let done = run(&mut coded, ReduceOp::Sum, count, OUTPUT);
    for (engine, ranks) in groups.iter().enumerate() {
        let rank = ranks[0] as usize;
        assert_eq!(saved(&exact, engine), []);
        let bytes = ring[rank].wire_bytes - done[rank].wire_bytes;
        assert_eq!(saved(&coded, engine), [(bytes, 0, done[rank].error)]);
    }
}

#[test]
fn what_is_not_a_large_sum_of_floats_stays_exact() {
    let mut world = world(loopback(3), &hosts(3), coding("rotated 1", None));
    let completions = run(&mut world, ReduceOp::Max, 5000, OUTPUT);
    assert!(completions.iter().all(|done| (done.algorithm, done.error) == (2, 0)));
    let completions = run(&mut world, ReduceOp::Sum, 512, OUTPUT);
    assert!(completions.iter().all(|done| (done.algorithm, done.error) == (2, 0)));
    assert!(lost(&world, 512, OUTPUT, false) == 0.0);
    (0..3).for_each(|rank| world.submit(rank, call(Collective::AllReduce, 5000, 1, 0, OUTPUT, 0)));
    assert!(world.completions().iter().all(|done| (done.status, done.algorithm) == (0, 2)));
}

#[test]
fn a_nan_and_an_infinity_come_through() {
    let mut world = world(loopback(3), &hosts(3), coding("int4", None));
    let count = 9000;
    for rank in 0..3 {
        let mut values = vec![0.25_f32; count];
        if rank == 1 {
            (values[17], values[8000]) = (f32::NAN, f32::NEG_INFINITY);
        }
        world.write_floats(rank, 0, &values);
    }
    (0..3).for_each(|rank| world.submit(rank, reduce(ReduceOp::Sum, count as u64, 0, OUTPUT)));
    for done in world.completions() {
        assert_eq!((done.status, done.algorithm, done.fallback), (0, 6, 1));
    }
    assert!((0..3).all(|engine| matches!(*saved(&world, engine), [(1.., 1, _)])));
    for rank in 0..3 {
        let result = world.read_floats(rank, OUTPUT, count);
        let odd: Vec<usize> = (0..count).filter(|at| !result[*at].is_finite()).collect();
        assert_eq!(odd, [17, 8000], "rank {rank}");
        assert!(result[17].is_nan() && result[8000] == f32::NEG_INFINITY);
    }
}

/// Gives everybody a plan with another codec on the links that there are.
pub(crate) fn change(world: &mut World, epoch: Epoch, coding: Option<Coding>) {
    world.coding = coding;
    let order: Vec<u32> = (0..world.group.participants()).collect();
    world.change(epoch, &order, |_, _| false);
}

#[test]
fn the_codec_changes_in_the_midst_of_an_operation() {
    for (transports, to) in [(loopback as fn(usize) -> _, OUTPUT), (tcp, 0)] {
        let mut world = world(transports(4), &hosts(4), None);
        let count = 1 << 21;
        (0..4).for_each(|rank| world.write_floats(rank, 0, &input(rank, count)));
        (0..4).for_each(|rank| world.submit(rank, reduce(ReduceOp::Sum, count as u64, 0, to)));
        for (epoch, next) in
            [coding("int8", Some(1e-3)), coding("rotated 4", Some(0.1)), None].into_iter().enumerate()
        {
            let epoch = Epoch(epoch as u32 + 2);
            change(&mut world, epoch, next);
            world.until_switched(epoch);
        }
        let completions = world.completions();
        assert!(completions.iter().all(|done| (done.status, done.algorithm) == (0, 6)), "{completions:?}");
        let lost = lost(&world, count, to, false);
        assert!(lost > 0.0 && lost <= 0.1, "{lost}");
        // Coded for a while: less than the ring alone would have sent, more than either codec would.
        let exact = count as u64 * 4 * 2 * 3 / 4;
        assert!(completions.iter().all(|done| (exact / 8..exact).contains(&done.wire_bytes)));
        assert!(completions.iter().all(|done| done.codec == harmonaize_abi::SEVERAL_CODECS));
        let after = run(&mut world, ReduceOp::Sum, 9000, OUTPUT);
        assert!(after.iter().all(|done| (done.algorithm, done.error) == (2, 0)));
    }
}

#[test]
fn tensors_that_lose_much_take_a_finer_codec() {
    let (count, at, most) = (30_000, [0, 4 << 20], 1e-3);
    // One of like elements, and one of which each block has large ones.
    let tensors = |rank: usize| {
        let mut random = ChaCha8Rng::seed_from_u64(rank as u64);
        let even: Vec<f32> = (0..count).map(|_| random.random_range(-1.0..1.0)).collect();
        let mut odd = even.clone();
        odd.iter_mut().step_by(100).for_each(|value| *value *= 30.0);
        [even, odd]
    };
    let run = |finer: Option<&str>| {
        let coding = coding("int8", Some(most)).map(|coding| Coding { finer: finer.map(number), ..coding });
        let mut world = world(loopback(4), &hosts(4), coding);
        for rank in 0..4 {
            tensors(rank).iter().zip(at).for_each(|(tensor, at)| world.write_floats(rank, at, tensor));
        }
        let inputs: Vec<[Vec<f32>; 2]> = (0..4).map(tensors).collect();
        let mut last = Vec::new();
        // In turn: each finds its own codec every time.
        for _ in 0..3 {
            last = Vec::from(at.map(|at| {
                let call = reduce(ReduceOp::Sum, count as u64, at, OUTPUT + at);
                (0..4).for_each(|rank| world.submit(rank, call));
                let completions = world.completions();
                let kept = |done: &Completion| f64::from(f32::from_bits(done.error)) <= most;
                assert!(completions.iter().all(|done| done.status == 0 && kept(done)), "{completions:?}");
                completions[0]
            }));
            for (index, at) in at.into_iter().enumerate() {
                let (mut error, mut signal) = (0.0, 0.0);
                let found = world.read_floats(0, OUTPUT + at, count);
                assert!((1..4).all(|rank| world.read_floats(rank, OUTPUT + at, count) == found));
                for (element, found) in found.iter().enumerate() {
                    let all = || inputs.iter().map(|tensors| f64::from(tensors[index][element]));
                    error += (all().sum::<f64>() - f64::from(*found)).powi(2);
                    signal += all().map(|value| value * value).sum::<f64>();
                }
                assert!(error <= most * signal, "{error} of {signal}");
            }
        }
        last
    };
    let (alone, finer) = (run(None), run(Some("bf16")));
    assert_eq!((alone[0].codec, alone[0].fallback, alone[1].fallback), (number("int8"), 0, 1), "{alone:?}");
    assert_eq!((finer[0].codec, finer[0].fallback, finer[1].fallback), (number("int8"), 0, 0), "{finer:?}");
    // Sums of what lost next to nothing may do with int8.
    assert!([number("bf16"), harmonaize_abi::SEVERAL_CODECS].contains(&finer[1].codec), "{finer:?}");
    assert_eq!(finer[0].wire_bytes, alone[0].wire_bytes);
    assert!(finer[1].wire_bytes < alone[1].wire_bytes * 7 / 10, "{alone:?} {finer:?}");
}

#[test]
fn a_codec_that_is_not_known_is_refused() {
    let mut world = world(loopback(2), &hosts(2), coding("int8", None));
    change(&mut world, Epoch(2), Some(Coding { codec: 999, finer: None, max_error: None }));
    let refused = |notice: &Notice| {
        matches!(
            notice,
            Notice::PrepareFailed { epoch: Epoch(2), reason: PrepareError::UnknownCodec(999), .. }
        )
    };
    assert!(world.all_reported(refused));
    let completions = run(&mut world, ReduceOp::Sum, 9000, OUTPUT);
    assert!(completions.iter().all(|done| done.algorithm == 6));
}

#[test]
fn a_peer_whose_chunk_is_none_is_named() {
    for damage in Damage::ALL {
        let mut transports = loopback(3);
        let (tampering, switch) = tampering(transports.remove(1), damage);
        transports.insert(1, tampering);
        let mut world = world(transports, &[vec![0], vec![1, 2], vec![3]], coding("int8", None));
        run(&mut world, ReduceOp::Sum, 9000, OUTPUT);
        switch.store(true, std::sync::atomic::Ordering::Relaxed);
        (0..4).for_each(|rank| world.submit(rank, reduce(ReduceOp::Sum, 9000, 0, OUTPUT)));
        let completions = world.completions();
        let status = Status::Internal.code();
        assert!(completions.iter().all(|done| done.status == status), "{damage:?}: {completions:?}");
        let mut told = String::new();
        for notices in &world.notices {
            let heard = notices.lock().unwrap();
            let (failure, detail) = heard
                .iter()
                .find_map(|notice| match notice {
                    Notice::Ended { failure, detail, .. } => Some((failure.clone(), detail.clone())),
                    _ => None,
                })
                .unwrap();
            let ranks = world.group.local(Participant(1)).to_vec();
            assert_eq!(failure, Failure::Internal { ranks }, "{damage:?}: {detail}");
            told.push_str(&detail);
        }
        assert!(
            told.contains("participant 1") && told.contains(damage.expected_text()),
            "{damage:?}: {told}"
        );
    }
}
