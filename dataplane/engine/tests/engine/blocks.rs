//! Collectives of every type, reduction and size, beside a scalar reference. Ranks are spread over engines and reached in every
//! way. Cases come from printed seeds. `HARMONAIZE_SEED=x` runs one.

use crate::common::{ARENA, SMALL, World, call, loopback, tcp};
use harmonaize_abi::{
    BlockContent, Collective, Dtype, F8E4M3, F8E5M2, Rank, ReduceOp, Region, Submission, View, ViewMut,
};
use harmonaize_kernels::{Isa, PassOptions};
use harmonaize_plan::{Algorithm, AlgorithmTable, Tuning};
use harmonaize_transport::Transport;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeSet;

const OUTPUT: u64 = 16 << 20;

/// What every rank calls, each in place or not.
struct Call {
    collective: Collective,
    dtype: Dtype,
    reduce: ReduceOp,
    root: Rank,
    count: usize,
    in_place: Vec<bool>,
}

fn transports(count: usize, random: &mut ChaCha8Rng) -> Vec<Box<dyn Transport + Send>> {
    if random.random_bool(0.3) {
        return tcp(count);
    }
    loopback(count)
}

/// One to seven ranks, at one to as many engines.
fn groups(random: &mut ChaCha8Rng) -> Vec<Vec<u32>> {
    let mut ranks: Vec<u32> = (0..random.random_range(1..=7)).collect();
    ranks.shuffle(random);
    let most = [1, 2, 3, 7][random.random_range(0..4)];
    let mut groups = Vec::new();
    while !ranks.is_empty() {
        let size = random.random_range(1..=most.min(ranks.len()));
        groups.push(ranks.drain(..size).collect());
    }
    groups
}

/// Numbers whose sums and products every type holds exactly.
fn values(dtype: Dtype, reduce: ReduceOp, count: usize, random: &mut ChaCha8Rng) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count * dtype.size());
    for _ in 0..count {
        let narrow = matches!(dtype, Dtype::F8E4M3 | Dtype::F8E5M2);
        let small = match reduce {
            _ if narrow && reduce != ReduceOp::Product => f32::from(random.random_range(-1_i8..=1)),
            ReduceOp::Product => [1.0, 2.0, -1.0, 1.0][random.random_range(0..4)],
            _ => f32::from(random.random_range(-9_i8..=9)),
        };
        match dtype {
            Dtype::F64 => bytes.extend_from_slice(&f64::from(small).to_ne_bytes()),
            Dtype::F32 => bytes.extend_from_slice(&small.to_ne_bytes()),
            // A bfloat16 is the upper half of an f32.
            Dtype::Bf16 => bytes.extend_from_slice(&((small.to_bits() >> 16) as u16).to_ne_bytes()),
            Dtype::F16 => bytes.extend_from_slice(&half(small).to_ne_bytes()),
            Dtype::F8E4M3 => bytes.push(F8E4M3::from_f32(small).to_bits()),
            Dtype::F8E5M2 => bytes.push(F8E5M2::from_f32(small).to_bits()),
            // Of products no part is ever zero, whose sign would tell in which order they were made.
            Dtype::Complex64 => bytes.extend([2.0 * small, small].map(f32::to_ne_bytes).concat()),
            Dtype::Complex128 => {
                bytes.extend([2.0 * small, small].map(|part| f64::from(part).to_ne_bytes()).concat());
            }
            // Integers wrap, whatever they are.
            integer => bytes.extend_from_slice(&random.random::<u64>().to_ne_bytes()[..integer.size()]),
        }
    }
    bytes
}

/// A small integer as binary16: the exponent rebiased, the lost bits of the fraction 0.
fn half(small: f32) -> u16 {
    let bits = small.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    if small == 0.0 {
        return sign;
    }
    let exponent = (bits >> 23 & 0xff) + 15 - 127;
    sign | (exponent << 10) as u16 | (bits >> 13 & 0x3ff) as u16
}

/// What a rank's input of a `PremulSum` is multiplied by: sums stay exact.
fn factor(dtype: Dtype, rank: usize) -> f64 {
    match dtype {
        Dtype::F8E4M3 | Dtype::F8E5M2 => [1.0, -1.0][rank % 2],
        _ => [1.0, 2.0, -1.0, 3.0][rank % 4],
    }
}

fn reference(call: &Call, rank: usize, inputs: &[Vec<u8>]) -> Vec<u8> {
    let block = call.count * call.dtype.size();
    if block == 0 {
        return Vec::new();
    }
    let part = |input: usize, at: u32| &inputs[input][at as usize * block..][..block];
    let [_, blocks] = call.collective.blocks(inputs.len() as u32, Rank(rank as u32), call.root);
    let content = |at| match call.collective.content(Rank(rank as u32), at, call.root) {
        BlockContent::Unwritten => panic!("an output that is not written"),
        BlockContent::Input(of, at) => part(of.0 as usize, at).to_vec(),
        BlockContent::Reduction(at) => {
            let sources: Vec<_> = (0..inputs.len()).map(|input| View::from(part(input, at))).collect();
            let divide = (call.reduce == ReduceOp::Average).then_some(inputs.len() as u32);
            let mut sum = vec![0; block];
            let to = ViewMut::from(&mut sum[..]);
            if call.reduce == ReduceOp::PremulSum {
                let factors: Vec<f64> = (0..inputs.len()).map(|rank| factor(call.dtype, rank)).collect();
                harmonaize_kernels::sum_scaled_with(
                    PassOptions::by(Isa::Scalar),
                    call.dtype,
                    &sources,
                    &factors,
                    &[to],
                )
                .unwrap();
                return sum;
            }
            harmonaize_kernels::reduce_with(
                PassOptions::by(Isa::Scalar),
                call.reduce,
                call.dtype,
                &sources,
                &[to],
                divide,
            )
            .unwrap();
            sum
        }
    };
    (0..blocks).flat_map(content).collect()
}

/// The call's regions at a rank: those of input and output.
fn regions(call: &Call, rank: usize, ranks: usize) -> [Region; 2] {
    let block = (call.count * call.dtype.size()) as u64;
    let me = Rank(rank as u32);
    let blocks = call.collective.blocks(ranks as u32, me, call.root);
    let [inputs, outputs] = blocks.map(|blocks| u64::from(blocks) * block);
    let shared = call.collective.shared_block(me, call.root).filter(|_| call.in_place[rank]);
    let [from, to] = match shared {
        None => [0, OUTPUT],
        Some([of_input, of_output]) => [of_output, of_input].map(|at| OUTPUT + u64::from(at) * block),
    };
    [Region { offset: from, bytes: inputs }, Region { offset: to, bytes: outputs }]
}

fn run(world: &mut World, asked: &Call, random: &mut ChaCha8Rng) -> u8 {
    let ranks = world.tenants.len();
    let blocks = |rank| asked.collective.blocks(ranks as u32, Rank(rank as u32), asked.root);
    let inputs: Vec<Vec<u8>> = (0..ranks)
        .map(|rank| values(asked.dtype, asked.reduce, asked.count * blocks(rank)[0] as usize, random))
        .collect();
    let scales = asked.collective.reduces() && asked.reduce == ReduceOp::PremulSum;
    for (rank, values) in inputs.iter().enumerate() {
        let [input, output] = regions(asked, rank, ranks);
        let memory = world.tenants[rank].end.memory();
        memory.write(output.offset, &vec![0xd5; output.bytes as usize]).unwrap();
        memory.write(input.offset, values).unwrap();
        let submission = Submission {
            dtype: asked.dtype.code(),
            reduce: asked.reduce.code(),
            count: asked.count as u64,
            input,
            output,
            factor: if scales { factor(asked.dtype, rank).to_bits() } else { 0 },
            ..call(asked.collective, 0, 0, 0, 0, asked.root.0)
        };
        world.submit(rank, submission);
    }
    let completions = world.completions();
    assert!(completions.iter().all(|done| done.status == 0), "{completions:?}, {:?}", world.notices);
    for rank in 0..ranks {
        let [input, output] = regions(asked, rank, ranks);
        let read = |region: Region| {
            let mut bytes = vec![0; region.bytes as usize];
            world.tenants[rank].end.memory().read(region.offset, &mut bytes).unwrap();
            bytes
        };
        let expected = reference(asked, rank, &inputs);
        assert!(read(output) == expected, "rank {rank} has another result");
        let mut kept = inputs[rank].clone();
        let shared = asked.collective.shared_block(Rank(rank as u32), asked.root);
        if let Some(shared) = shared.filter(|_| asked.in_place[rank]) {
            let block = asked.count * asked.dtype.size();
            let [of_input, of_output] = shared.map(|at| at as usize * block);
            kept[of_input..][..block].copy_from_slice(&expected[of_output..][..block]);
        }
        assert!(read(input) == kept, "rank {rank}'s input has changed");
    }
    completions[0].algorithm
}

fn one(seed: u64, algorithms: &mut BTreeSet<u8>) {
    let random = &mut ChaCha8Rng::seed_from_u64(seed);
    let groups = groups(random);
    let copy_bytes = [0, 2048, 1 << 20][random.random_range(0..3)];
    let table = match random.random_range(0..4) {
        0 => AlgorithmTable::RING,
        1 => AlgorithmTable::direct(2000, 40_000),
        2 => AlgorithmTable::direct(1 << 20, 0),
        _ => AlgorithmTable::all_by(*Algorithm::ALL.choose(random).unwrap()),
    };
    let tuning = Tuning { copy_bytes, algorithms: table, ..SMALL };
    let away: Vec<bool> = (0..7).map(|_| random.random_bool(0.3)).collect();
    let transports = transports(groups.len(), random);
    let mut world = World::with_plan(
        transports,
        &groups,
        tuning,
        (ARENA, 1 << random.random_range(0..3)),
        None,
        None,
        Vec::new(),
        &|rank| away[rank as usize],
    );
    // Some go in tiny slices.
    let slice = [None, None, None, Some(500), None, Some(3000), None, Some(20_000)][seed as usize % 8];
    slice.into_iter().for_each(|bytes| world.slice_actions(bytes));
    let ranks = world.tenants.len();
    for _ in 0..12 {
        let with_data: Vec<_> = Collective::ALL.iter().filter(|one| one.has_data()).collect();
        let dtype = *Dtype::ALL.choose(random).unwrap();
        let reductions: Vec<_> = ReduceOp::ALL.iter().filter(|op| op.takes(dtype)).collect();
        let asked = Call {
            collective: **with_data.choose(random).unwrap(),
            dtype,
            reduce: **reductions.choose(random).unwrap(),
            root: Rank(random.random_range(0..ranks) as u32),
            count: *[0, 1, 2, 3, 17, 200, 1500, 9000].choose(random).unwrap(),
            in_place: (0..ranks).map(|_| random.random()).collect(),
        };
        let Call { collective, dtype, reduce, root, count, in_place } = &asked;
        let what = format!(
            "seed {seed}: {collective} of {count} x {dtype}, {reduce}, root {root}, {in_place:?}, {groups:?}, \
             slices of {slice:?}"
        );
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&mut world, &asked, random)));
        algorithms.insert(ran.unwrap_or_else(|_| panic!("{what}")));
    }
}

#[test]
fn every_block_is_where_it_belongs_and_what_it_must_be() {
    let mut algorithms = BTreeSet::new();
    match std::env::var("HARMONAIZE_SEED") {
        Ok(seed) => one(seed.parse().unwrap(), &mut algorithms),
        Err(_) => {
            (0..240).for_each(|seed| one(seed, &mut algorithms));
            // Within a host, along the ring, pairwise, by chain, in one shot and in two, by doubling, halving, tree and racks.
            assert_eq!(algorithms, BTreeSet::from([1, 2, 3, 4, 7, 8, 10, 11, 12, 13]));
        }
    }
}

/// The tensors of a rank that does not keep to the rule are refused, and what follows is right.
#[test]
fn tensors_that_overlap_otherwise_are_refused() {
    let mut world = World::new(transports(2, &mut ChaCha8Rng::seed_from_u64(0)), &[vec![0], vec![1]], SMALL);
    for collective in [Collective::AllGather, Collective::ReduceScatter] {
        let asked = Call {
            collective,
            dtype: Dtype::U64,
            reduce: ReduceOp::Sum,
            root: Rank(0),
            count: 100,
            in_place: vec![true, true],
        };
        let [input, output] = regions(&asked, 0, 2);
        let right = Submission { count: 100, input, output, ..call(collective, 0, 0, 0, 0, 0) };
        // The place that is the other rank's.
        world.submit(1, right);
        let mut refused = None;
        world.until("refusal", |world| {
            refused = world.tenants[1].end.completion().unwrap();
            refused.is_some()
        });
        assert_eq!(refused.map(|done| done.status), Some(harmonaize_abi::Status::Overlap.code()));
        run(&mut world, &asked, &mut ChaCha8Rng::seed_from_u64(1));
    }
}
