//! What of sums is a communicator's own: elements of any type by any reduction, and in one order.

use crate::common::reduce;
use crate::served::{FORMAT, Served, any, grant, my_turn, ordinary, rules, whole_by, world, world_where};
use harmonaize_abi::{Dtype, ReduceOp, Region, Submission, View};
use harmonaize_aggregator::Grant;
use harmonaize_plan::{AlgorithmTable, Tuning};

/// Elements of any type that adds exactly, or as floats of its own, by every reduction. Some are of several ranks on a host, some in place,
/// and some are small ones that are done at once.
#[test]
fn all_types_and_reductions_go_by_the_aggregator() {
    let _turn = my_turn();
    let ranks = [vec![0, 2], vec![1], vec![3]];
    let served = Served::start(any(), 7, 3, 50);
    let mut world = world(&ranks, served.reached_by(3));
    let mut done = 0;
    for dtype in Dtype::ALL.iter().copied().filter(|dtype| !dtype.is_narrow()) {
        let reductions = ReduceOp::ALL.iter().copied().enumerate();
        for (at, op) in reductions.filter(|(_, op)| op.takes(dtype) && *op != ReduceOp::PremulSum) {
            let count = if at % 2 == 0 { 2000_u64 } else { 60_001 };
            let bytes = count * dtype.size() as u64;
            let values: Vec<Vec<u8>> = (0..4).map(|rank| small(dtype, rank, count)).collect();
            let views: Vec<View<'_>> = values.iter().map(|bytes| bytes.as_slice().into()).collect();
            let mut expected = vec![0_u8; bytes as usize];
            let of = (op == ReduceOp::Average).then_some(4);
            let to = expected.as_mut_slice().into();
            harmonaize_kernels::reduce(op, dtype, &views, &[to], of).unwrap();
            let output = if at % 3 == 0 { 0 } else { 1 << 20 };
            let submission = Submission {
                dtype: dtype.code(),
                input: Region { offset: 0, bytes },
                output: Region { offset: output, bytes },
                ..reduce(op, count, 0, output)
            };
            (0..4).for_each(|rank| world.tenants[rank].end.memory().write(0, &values[rank]).unwrap());
            (0..4).for_each(|rank| world.submit(rank, submission));
            let completions = world.completions();
            assert!(completions.iter().all(|completion| completion.status == 0), "{completions:?}");
            done += usize::from(whole_by(&completions));
            for rank in 0..4 {
                let mut found = vec![0; bytes as usize];
                world.tenants[rank].end.memory().read(output, &mut found).unwrap();
                assert!(found == expected, "rank {rank}: {dtype} {op} {count}");
            }
        }
    }
    assert!(done > 50, "{done} of 98 went by the aggregator");
}

/// Values of which sums, and products, of a few are exact in every type.
fn small(dtype: Dtype, rank: usize, count: u64) -> Vec<u8> {
    let value = |at: u64| ((at * 7 + rank as u64 * 3) % 4) as u8;
    let of = |value: u8| match dtype {
        Dtype::F32 => f32::from(value).to_le_bytes().to_vec(),
        Dtype::F64 => f64::from(value).to_le_bytes().to_vec(),
        // Products have no part that is zero, whose sign would tell in which order they were made.
        Dtype::Complex64 => {
            [2.0 + f32::from(value / 2 * 2), 1.0 + f32::from(value / 2)].map(f32::to_le_bytes).concat()
        }
        Dtype::Complex128 => {
            [2.0 + f64::from(value / 2 * 2), 1.0 + f64::from(value / 2)].map(f64::to_le_bytes).concat()
        }
        other => [&[value][..], &[0; 7]].concat()[..other.size()].to_vec(),
    };
    (0..count).flat_map(|at| of(value(at))).collect()
}

/// Sums of floats that round have the same bits by the aggregator and by the hosts. So they have where both did some, host by host
/// and rank by rank, and what is held is copied out in slices.
#[test]
fn sums_in_order_have_one_outcome_whoever_adds() {
    let _turn = my_turn();
    let ranks = [vec![0, 4], vec![1], vec![2], vec![3]];
    let ordered =
        |incarnation, at| Served::granted(Grant { ordered: true, ..grant(FORMAT, 4) }, at, incarnation, 20);
    let served = ordered(1, any());
    let reached = served.reached_by(4);
    let address = reached[0].address;
    // Hosts add in the order in which the aggregator does.
    let tuning = Tuning { algorithms: AlgorithmTable::direct(2000, 1 << 40), ..Tuning::default() };
    let mut world = world_where(rules(FORMAT), &ranks, reached, tuning);
    world.slice_actions(10_000);
    let (mut served, mut by_aggregator, mut by_hosts) = (Some(served), 0, 0);
    for round in 0..24_usize {
        let count = [1000, 70_003][round % 2];
        let inputs: Vec<Vec<f32>> = (0..5).map(|rank| ordinary(rank + round, count)).collect();
        let sums = (0..count).map(|at| {
            let host = inputs[0][at] + inputs[4][at];
            inputs[1..4].iter().fold(host, |sum, input| sum + input[at])
        });
        let op = if round % 3 == 0 { ReduceOp::Average } else { ReduceOp::Sum };
        let expected: Vec<u32> =
            sums.map(|sum| if op == ReduceOp::Average { sum / 5.0 } else { sum }).map(f32::to_bits).collect();
        let output = if round % 4 < 2 { 0 } else { 16 << 20 };
        inputs.iter().enumerate().for_each(|(rank, input)| world.write_floats(rank, 0, input));
        (0..5).for_each(|rank| world.submit(rank, reduce(op, count as u64, 0, output)));
        if round % 8 == 5 {
            drop(served.take());
        }
        let completions = world.completions();
        assert!(completions.iter().all(|completion| completion.status == 0), "{completions:?}");
        for (rank, completion) in completions.iter().enumerate() {
            let found: Vec<u32> =
                world.read_floats(rank, output, count).into_iter().map(f32::to_bits).collect();
            assert!(found == expected, "round {round}, rank {rank}: {:?}", completion);
        }
        by_aggregator += usize::from(whole_by(&completions));
        by_hosts += usize::from(completions[0].algorithm != 9 || completions[0].fallback == 1);
        served.get_or_insert_with(|| ordered(2 + round as u64, address));
    }
    assert!(by_aggregator > 0 && by_hosts > 0, "{by_aggregator} by the aggregator, {by_hosts} by hosts");
}
