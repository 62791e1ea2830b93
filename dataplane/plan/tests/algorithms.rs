//! Every algorithm, for every number of ranks up to 64, in several groupings, passes the checker.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use common::{Case, Grouping, RETENTIONS, Reach, plain, requests};
use harmonaize_abi::{Collective, Rank};
use harmonaize_plan::{
    Access, Algorithm, Buffer, Group, Local, MAX_SOURCES, Participant, Plan, PlanError, Request, Retention,
    StepKind, algorithm_code, edges, program,
};

/// Runs all ways up to sixteen ranks. Of more ranks it runs each number in every fourth way, for the checker's time grows with
/// their square.
fn sweep(collective: Collective, coded: bool, shots: Algorithm) {
    sweep_where(collective, coded, shots, |ranks, way| ranks <= 16 || (way + ranks).is_multiple_of(4));
}

/// All ways up to nine ranks; of more ranks, each number of them in some ways.
fn sample(collective: Collective, algorithm: Algorithm) {
    sweep_where(collective, false, algorithm, |ranks, way| ranks <= 9 || (way + ranks).is_multiple_of(17));
}

fn sweep_where(collective: Collective, coded: bool, shots: Algorithm, chosen: impl Fn(u32, u32) -> bool) {
    for ranks in 1..=64 {
        let mut way = 0;
        for grouping in Grouping::ALL {
            let plan = grouping.plan(ranks);
            let wanted = |request: &Request| {
                (request.collective, request.coded, request.algorithm) == (collective, coded, shots)
            };
            for request in requests(ranks).into_iter().filter(wanted) {
                let scales = collective.reduces() && !coded && ranks <= 12;
                let ways = [false, true].into_iter().filter(|scaled| scales || !scaled);
                for (reach, scaled) in
                    Reach::ALL.into_iter().flat_map(|reach| ways.clone().map(move |way| (reach, way)))
                {
                    for retention in RETENTIONS.map(Some).into_iter().chain([None]) {
                        way += 1;
                        if !chosen(ranks, way) {
                            continue;
                        }
                        let case = Case { plan: plan.clone(), request, retention, reach, scaled };
                        let what = || {
                            format!("{ranks} ranks {grouping:?} {request:?} {reach:?} {retention:?} {scaled}")
                        };
                        let programs = case.programs();
                        let report = match case.check(&programs, 1) {
                            Ok(report) => report,
                            Err(error) => panic!("{}: {error}", what()),
                        };
                        match case.check_alone(&programs) {
                            Ok(alone) => assert_eq!(alone, report.usage, "{}", what()),
                            Err(error) => panic!("alone, {}: {error}", what()),
                        }
                        // However many take part.
                        let times = if collective == Collective::AllReduce { 2 } else { 1 };
                        let encoded = if coded && case.plan.participants() > 1 { times } else { 0 };
                        assert_eq!(report.encodings, encoded, "{}", what());
                    }
                }
            }
        }
    }
}

#[test]
fn every_allreduce_is_right() {
    sweep(Collective::AllReduce, false, Algorithm::Ring);
}

#[test]
fn every_allreduce_in_one_shot_is_right() {
    sweep(Collective::AllReduce, false, Algorithm::OneShot);
}

#[test]
fn every_allreduce_in_two_shots_is_right() {
    sweep(Collective::AllReduce, false, Algorithm::TwoShot);
}

#[test]
fn every_broadcast_and_barrier_in_one_shot_is_right() {
    sweep(Collective::Broadcast, false, Algorithm::OneShot);
    sweep(Collective::Barrier, false, Algorithm::OneShot);
}

#[test]
fn every_allreduce_by_recursive_doubling_is_right() {
    sample(Collective::AllReduce, Algorithm::RecursiveDoubling);
}

#[test]
fn every_allreduce_by_recursive_halving_is_right() {
    sample(Collective::AllReduce, Algorithm::RecursiveHalving);
}

#[test]
fn every_allreduce_by_racks_that_are_not_known_is_right() {
    sample(Collective::AllReduce, Algorithm::Hierarchical);
}

/// Every number of participants up to 64, in racks. Racks of one size with the remainder in the last, of growing sizes, of one and all
/// others, and of one each.
#[test]
fn allreduces_by_racks_take_any_racks() {
    for all in 2..=64_u32 {
        let group = Grouping::PerHost(1 + all % 3).plan(all * (1 + all % 3)).group().clone();
        let order: Vec<_> = (0..all).map(|at| Participant((at + all / 3) % all)).rev().collect();
        let even = |size: u32| (0..all).step_by(size as usize).map(|at| size.min(all - at)).collect();
        let mut growing: Vec<u32> = (1..)
            .scan(0, |sum, size| {
                (*sum + size <= all).then(|| {
                    *sum += size;
                    size
                })
            })
            .collect();
        growing.push(all - growing.iter().sum::<u32>());
        growing.retain(|size| *size > 0);
        for racks in [even(2), even(4), even(7), even(1), growing, vec![1, all - 1], vec![all - 1, 1]] {
            let plan = Plan::new(group.clone(), order.clone()).unwrap().with_racks(racks.clone()).unwrap();
            let request =
                Request { algorithm: Algorithm::Hierarchical, ..plain(Collective::AllReduce, Rank(0)) };
            let retention = Some(RETENTIONS[(all as usize + racks.len()) % 3]);
            let reach = Reach::ALL[all as usize / 3 % 3];
            let case = Case { plan, request, retention, reach, scaled: all.is_multiple_of(5) };
            let programs = case.programs();
            let report = case.check(&programs, 1).unwrap_or_else(|error| panic!("{racks:?}: {error}"));
            let alone =
                case.check_alone(&programs).unwrap_or_else(|error| panic!("alone, {racks:?}: {error}"));
            assert_eq!(alone, report.usage, "{racks:?}");
            let (most, racks) = (*racks.iter().max().unwrap() as usize, racks.len());
            let hops = 2 * (most - 1) + 2 * (racks - 1);
            assert!(longest_path(&programs) <= hops, "{racks} of {most} at most: {hops}");
        }
    }
}

/// Racks send each other less than along a ring: twelve participants stand in racks of four. A ring sends 22 twelfths of a tensor from rack
/// to rack, this 16, and each participant as much as along the ring.
#[test]
fn racks_send_each_other_less_than_a_ring_does() {
    let sent = |algorithm| {
        let mut one =
            case(Grouping::PerHost(1), 12, Collective::AllReduce, Retention::KeepInputs, Reach::Mapped);
        one.plan = one.plan.with_racks(vec![4; 3]).unwrap();
        one.request.algorithm = algorithm;
        let mut sent = vec![[0; 2]; 3];
        for (me, program) in one.programs().iter().enumerate() {
            for operand in program.steps.iter().flat_map(|step| &step.destinations) {
                if let Buffer::Peer(to) = operand.buffer {
                    let across = usize::from(to.0 as usize / 4 != me / 4);
                    sent[me / 4][across] += operand.part.elements(0, 12).1;
                }
            }
        }
        sent
    };
    assert_eq!(sent(Algorithm::Ring), [[66, 22]; 3]);
    assert_eq!(sent(Algorithm::Hierarchical), [[72, 16]; 3]);
}

#[test]
fn every_broadcast_and_reduce_by_a_binomial_tree_is_right() {
    sample(Collective::Broadcast, Algorithm::BinomialTree);
    sample(Collective::Reduce, Algorithm::BinomialTree);
}

/// Every number of participants up to 64, one rank each, in an order that is not theirs.
#[test]
fn exchanges_by_powers_of_two_take_any_number_of_participants() {
    for all in 2..=64_u32 {
        let group = Grouping::PerHost(1).plan(all).group().clone();
        let order = (0..all).map(|at| Participant((at + all / 3) % all)).rev().collect();
        let plan = Plan::new(group, order).unwrap();
        let levels = all.ilog2() as usize;
        let folds = if all.is_power_of_two() { 0 } else { 2 };
        for (collective, algorithm, hops) in [
            (Collective::AllReduce, Algorithm::RecursiveDoubling, levels + folds),
            (Collective::AllReduce, Algorithm::RecursiveHalving, 2 * levels + folds),
            (Collective::Broadcast, Algorithm::BinomialTree, (all - 1).ilog2() as usize + 1),
            (Collective::Reduce, Algorithm::BinomialTree, (all - 1).ilog2() as usize + 1),
        ] {
            let request = Request { algorithm, ..plain(collective, Rank(all / 2)) };
            let retention = Some(RETENTIONS[all as usize % 3]);
            let reach = Reach::ALL[all as usize / 3 % 3];
            let case = Case { plan: plan.clone(), request, retention, reach, scaled: false };
            let programs = case.programs();
            let report = case.check(&programs, 1).unwrap();
            assert_eq!(case.check_alone(&programs).unwrap(), report.usage, "{all} {request:?}");
            let longest = longest_path(&programs);
            match collective {
                Collective::Broadcast | Collective::Reduce => {
                    assert_eq!(report.messages, u64::from(all) - 1);
                    assert!(longest <= hops, "{all} {request:?}: {longest} of {hops}");
                }
                // A neighbour's way there may be hidden by the partners' first exchange.
                _ => assert!((hops - folds / 2..=hops).contains(&longest), "{all} {request:?}: {longest}"),
            }
        }
    }
}

/// Of 8 participants each has three partners. Halving sends 7 eighths of a tensor and gets as much, then the same again, as a ring in 14
/// messages does.
#[test]
fn halving_sends_the_bytes_of_a_ring_in_six_messages() {
    let bytes = |algorithm| {
        let mut one =
            case(Grouping::PerHost(1), 8, Collective::AllReduce, Retention::KeepInputs, Reach::Mapped);
        one.request.algorithm = algorithm;
        let sent = |program: &harmonaize_plan::Program| {
            let operands = program.steps.iter().flat_map(|step| &step.destinations);
            let sent = operands.filter(|operand| matches!(operand.buffer, Buffer::Peer(_)));
            let lengths: Vec<u64> = sent.map(|operand| operand.part.elements(0, 800).1).collect();
            (lengths.len(), lengths.iter().sum::<u64>())
        };
        one.programs().iter().map(sent).collect::<Vec<_>>()
    };
    assert_eq!(bytes(Algorithm::RecursiveHalving), [(6, 1400); 8]);
    assert_eq!(bytes(Algorithm::Ring), [(14, 1400); 8]);
    assert_eq!(bytes(Algorithm::RecursiveDoubling), [(3, 2400); 8]);
}

#[test]
fn direct_exchanges_keep_their_hops_and_order() {
    let mut order: Vec<u32> = (0..8).collect();
    for (shots, hops, messages) in
        [(Algorithm::Ring, 14, 14), (Algorithm::OneShot, 1, 7), (Algorithm::TwoShot, 2, 14)]
    {
        order.rotate_left(3);
        let group = Grouping::PerHost(1).plan(8).group().clone();
        let plan = Plan::new(group, order.iter().map(|index| Participant(*index)).collect()).unwrap();
        let request = Request { algorithm: shots, ..plain(Collective::AllReduce, Rank(0)) };
        let case = Case {
            plan,
            request,
            retention: Some(Retention::CopyInputs),
            reach: Reach::Mapped,
            scaled: false,
        };
        let programs = case.programs();
        let report = case.check(&programs, 1).unwrap();
        assert!(report.usage.iter().all(|usage| (usage.sent, usage.received) == (messages, messages)));
        assert_eq!(longest_path(&programs), hops, "{shots:?}");
        if shots == Algorithm::Ring {
            continue;
        }
        // Whoever adds: four contributions by number, then the sum of those and the other four.
        for (me, program) in (0..).zip(&programs) {
            let reductions = program.steps.iter().filter(|step| matches!(step.kind, StepKind::Reduce { .. }));
            let from = |operand: &harmonaize_plan::Operand| match operand.buffer {
                Buffer::Peer(peer) => Some(peer.0),
                Buffer::Staging(_) => Some(me),
                _ => None,
            };
            let added: Vec<Vec<_>> =
                reductions.map(|step| step.sources.iter().filter_map(from).collect()).collect();
            assert_eq!(added, [vec![0, 1, 2, 3], vec![me, 4, 5, 6, 7]]);
        }
    }
}

/// Messages that follow one another on the longest way through the programs, each sent as early as can be.
fn longest_path(programs: &[harmonaize_plan::Program]) -> usize {
    let mut sent: std::collections::HashMap<(u32, u32), Vec<usize>> = Default::default();
    let mut taken: std::collections::HashMap<(u32, u32), usize> = Default::default();
    let mut at: Vec<(usize, usize)> = vec![(0, 0); programs.len()];
    loop {
        let before = at.clone();
        for (me, program) in (0_u32..).zip(programs) {
            'steps: while let Some(step) = program.steps.get(at[me as usize].0) {
                let mut longest = at[me as usize].1;
                for operand in &step.sources {
                    if let Buffer::Peer(from) = operand.buffer {
                        let next = taken.get(&(from.0, me)).copied().unwrap_or(0);
                        let Some(hops) = sent.get(&(from.0, me)).and_then(|all| all.get(next)) else {
                            break 'steps;
                        };
                        longest = longest.max(*hops);
                    }
                }
                for operand in &step.sources {
                    if let Buffer::Peer(from) = operand.buffer {
                        *taken.entry((from.0, me)).or_default() += 1;
                    }
                }
                for operand in &step.destinations {
                    if let Buffer::Peer(to) = operand.buffer {
                        sent.entry((me, to.0)).or_default().push(longest + 1);
                    }
                }
                at[me as usize] = (at[me as usize].0 + 1, longest);
            }
        }
        if at == before {
            return at.iter().map(|(_, hops)| *hops).max().unwrap();
        }
    }
}

#[test]
fn every_coded_alltoall_is_right_and_encodes_once() {
    sweep(Collective::AllToAll, true, Algorithm::Ring);
}

#[test]
fn every_coded_allreduce_is_right_and_encodes_twice() {
    sweep(Collective::AllReduce, true, Algorithm::Ring);
}

#[test]
fn coded_parts_go_to_their_owner_and_back() {
    let mut case = case(Grouping::PerHost(2), 8, Collective::AllReduce, Retention::KeepInputs, Reach::Mapped);
    case.request.coded = true;
    let programs = case.programs();
    let report = case.check(&programs, 1).unwrap();
    assert_eq!(report.messages, 2 * 4 * 3);
    for (usage, program) in report.usage.iter().zip(&programs) {
        // Three contributions on their way, the sum, the result, and the local sum before it is encoded.
        assert_eq!((usage.sent, usage.received, program.slots.as_slice()), (6, 6, &[4; 6][..]));
        let sends = |step: &&harmonaize_plan::Step| {
            step.destinations.iter().filter(|to| matches!(to.buffer, Buffer::Peer(_))).count()
        };
        assert_eq!(program.steps.iter().map(|step| sends(&step)).max(), Some(3));
    }
    let around = edges(&programs[1]);
    assert_eq!((around.to.len(), around.from.len()), (3, 3));
}

#[test]
fn no_step_sends_to_more_peers_than_can_be() {
    for request in requests(24) {
        let case = Case {
            plan: Grouping::PerHost(1).plan(24),
            request,
            retention: None,
            reach: Reach::Mixed,
            scaled: false,
        };
        for step in case.programs().iter().flat_map(|program| &program.steps) {
            let peers = |operands: &[harmonaize_plan::Operand]| {
                operands.iter().filter(|operand| matches!(operand.buffer, Buffer::Peer(_))).count()
            };
            assert!(peers(&step.sources) <= 4 && peers(&step.destinations) <= 4, "{step:?}");
        }
    }
}

#[test]
fn every_alltoall_is_right() {
    sweep(Collective::AllToAll, false, Algorithm::Ring);
}

#[test]
fn every_allgather_is_right() {
    sweep(Collective::AllGather, false, Algorithm::Ring);
}

#[test]
fn every_allgather_in_one_shot_is_right() {
    sweep(Collective::AllGather, false, Algorithm::OneShot);
}

#[test]
fn every_coded_allgather_is_right_and_encodes_once() {
    sweep(Collective::AllGather, true, Algorithm::Ring);
}

#[test]
fn every_reducescatter_is_right() {
    sweep(Collective::ReduceScatter, false, Algorithm::Ring);
}

#[test]
fn every_reducescatter_in_one_shot_is_right() {
    sweep(Collective::ReduceScatter, false, Algorithm::OneShot);
}

/// Of 8 participants each sends 7 blocks, along the ring as straight. A ReduceScatter in one shot adds as AllReduce does, a ring from the
/// owner on.
#[test]
fn gather_and_scatter_send_blocks_equally_often() {
    let group = Grouping::PerHost(1).plan(8).group().clone();
    let order = [3, 4, 5, 6, 7, 0, 1, 2].map(Participant).to_vec();
    let plan = Plan::new(group, order).unwrap();
    for collective in [Collective::AllGather, Collective::ReduceScatter] {
        for (shots, hops) in [(Algorithm::Ring, 7), (Algorithm::OneShot, 1)] {
            let request = Request { algorithm: shots, ..plain(collective, Rank(0)) };
            let case = Case {
                plan: plan.clone(),
                request,
                retention: Some(Retention::KeepInputs),
                reach: Reach::Mapped,
                scaled: false,
            };
            let programs = case.programs();
            let report = case.check(&programs, 1).unwrap();
            assert!(report.usage.iter().all(|usage| (usage.sent, usage.received) == (7, 7)), "{request:?}");
            assert_eq!(longest_path(&programs), hops, "{request:?}");
            let own = |operand: &harmonaize_plan::Operand| match operand.buffer {
                Buffer::Peer(peer) => Some(peer.0),
                Buffer::Input(rank) => Some(rank.0),
                _ => None,
            };
            let added = |me: usize| -> Vec<Vec<u32>> {
                let steps = programs[me].steps.iter();
                let reductions = steps.filter(|step| matches!(step.kind, StepKind::Reduce { .. }));
                reductions.map(|step| step.sources.iter().filter_map(own).collect()).collect()
            };
            match (collective, shots) {
                (Collective::AllGather, _) => assert!((0..8).all(|me| added(me).is_empty())),
                (_, Algorithm::OneShot) => {
                    assert!((0..8).all(|me| added(me) == [vec![0, 1, 2, 3], vec![4, 5, 6, 7]]))
                }
                // What came from the one before, and the own contribution.
                _ => assert!((0..8).all(|me| added(me) == vec![vec![(me as u32 + 7) % 8, me as u32]; 7])),
            }
        }
    }
}

#[test]
fn every_broadcast_is_right() {
    sweep(Collective::Broadcast, false, Algorithm::Ring);
}

#[test]
fn every_reduce_is_right() {
    sweep(Collective::Reduce, false, Algorithm::Ring);
}

#[test]
fn every_reduce_in_one_shot_is_right() {
    sweep(Collective::Reduce, false, Algorithm::OneShot);
}

/// Of 8 participants each sends a tensor, in four parts, but the root's, which receives one. It goes along the chain as far as the root,
/// or straight to the root, which adds in the order of participants.
#[test]
fn a_reduce_brings_one_tensor_to_the_root() {
    let group = Grouping::PerHost(1).plan(8).group().clone();
    let plan = Plan::new(group, [3, 4, 5, 6, 7, 0, 1, 2].map(Participant).to_vec()).unwrap();
    for (shots, hops, parts) in [(Algorithm::Ring, 7, 4), (Algorithm::OneShot, 1, 1)] {
        let request = Request { algorithm: shots, ..plain(Collective::Reduce, Rank(5)) };
        let retention = Some(Retention::KeepInputs);
        let case = Case { plan: plan.clone(), request, retention, reach: Reach::Mapped, scaled: false };
        let programs = case.programs();
        let report = case.check(&programs, 1).unwrap();
        let sent: Vec<u64> = report.usage.iter().map(|usage| usage.sent).collect();
        assert_eq!(sent, [parts, parts, parts, parts, parts, 0, parts, parts]);
        let received: Vec<u64> = report.usage.iter().map(|usage| usage.received).collect();
        let along =
            if shots == Algorithm::Ring { [4, 4, 4, 4, 4, 4, 0, 4] } else { [0, 0, 0, 0, 0, 7, 0, 0] };
        assert_eq!(received, along);
        assert_eq!(longest_path(&programs), hops, "{shots:?}");
    }
}

#[test]
fn every_gather_is_right() {
    sweep(Collective::Gather, false, Algorithm::Ring);
}

#[test]
fn every_scatter_is_right() {
    sweep(Collective::Scatter, false, Algorithm::Ring);
}

/// Of 8 hosts of 2 ranks each block goes once, straight to the root or from it. Those of the root's own host do
/// not go.
#[test]
fn gathers_and_scatters_send_each_block_once() {
    for collective in [Collective::Gather, Collective::Scatter] {
        let mut case = case(Grouping::PerHost(2), 16, collective, Retention::KeepInputs, Reach::Mapped);
        case.request.root = Rank(5);
        let programs = case.programs();
        let report = case.check(&programs, 1).unwrap();
        let ends: Vec<_> = report.usage.iter().map(|usage| [usage.sent, usage.received]).collect();
        let [root, other] =
            if collective == Collective::Gather { [[0, 14], [2, 0]] } else { [[14, 0], [0, 2]] };
        assert_eq!(ends, [other, other, root, other, other, other, other, other], "{collective}");
        assert!(programs.iter().all(|program| program.slots.is_empty()), "{collective} stages nothing");
        assert_eq!(longest_path(&programs), 1);
    }
}

#[test]
fn every_barrier_is_right() {
    sweep(Collective::Barrier, false, Algorithm::Ring);
}

fn case(grouping: Grouping, ranks: u32, collective: Collective, retention: Retention, reach: Reach) -> Case {
    let request = plain(collective, Rank(0));
    Case { plan: grouping.plan(ranks), request, retention: Some(retention), reach, scaled: false }
}

#[test]
fn a_ring_sends_chunks_twice_and_stages_two() {
    let case = case(Grouping::PerHost(2), 8, Collective::AllReduce, Retention::KeepInputs, Reach::Mapped);
    let programs = case.programs();
    let report = case.check(&programs, 1).unwrap();
    assert_eq!(report.messages, 4 * 2 * 3);
    assert_eq!(report.encodings, 0);
    for (usage, program) in report.usage.iter().zip(&programs) {
        assert_eq!((usage.sent, usage.received, usage.staging), (6, 6, 0.5));
        assert_eq!(program.slots, [4, 4]);
        assert_eq!(program.staging_elements(10), 6);
        assert_eq!(program.copying, 0);
    }
    let around = edges(&programs[1]);
    assert_eq!((around.to, around.from), (vec![Participant(2)], vec![Participant(0)]));
}

#[test]
fn the_ring_follows_the_order_of_the_plan() {
    let group = Group::new((0..4).map(|rank| vec![Rank(rank)]).collect()).unwrap();
    let plan = Plan::new(group, [2, 0, 3, 1].map(Participant).to_vec()).unwrap();
    let local = Local { access: &|_| Access::Mapped, retention: Retention::KeepInputs, scaled: false };
    let request = plain(Collective::AllReduce, Rank(0));
    let around = |me| edges(&program(&plan, request, Participant(me), &local).unwrap());
    assert_eq!((around(2).to, around(2).from), (vec![Participant(0)], vec![Participant(1)]));
    assert_eq!((around(3).to, around(3).from), (vec![Participant(1)], vec![Participant(0)]));
}

#[test]
fn four_ranks_of_one_host_are_one_step() {
    let case = case(Grouping::PerHost(4), 4, Collective::AllReduce, Retention::KeepInputs, Reach::Mapped);
    let [program] = case.programs().try_into().unwrap();
    assert!(program.slots.is_empty());
    let [step] = program.steps.as_slice() else { panic!("{program:?}") };
    assert_eq!(step.kind, StepKind::Reduce { last: true });
    assert_eq!((step.sources.len(), step.destinations.len()), (4, 4));
}

#[test]
fn a_host_of_twenty_ranks_reduces_eight_sources_at_a_time() {
    let case = case(Grouping::PerHost(20), 40, Collective::AllReduce, Retention::HoldOutputs, Reach::Mixed);
    let programs = case.programs();
    let widest = programs.iter().flat_map(|program| &program.steps).map(|step| step.sources.len()).max();
    assert_eq!(widest, Some(MAX_SOURCES));
    case.check(&programs, 1).unwrap();
}

#[test]
fn sixty_four_participants_fit_the_reserve_with_small_chunks() {
    let chunk_elements = 512; // 2 KiB of f32
    for (retention, bytes) in [(Retention::KeepInputs, 4 << 10), (Retention::HoldOutputs, 128 << 10)] {
        let case = case(Grouping::PerHost(2), 128, Collective::AllReduce, retention, Reach::Mapped);
        for program in case.programs() {
            assert_eq!(program.staging_elements(64 * chunk_elements) * 4, bytes);
        }
    }
}

#[test]
fn copies_are_made_the_same_way_in_every_order() {
    let copying = requests(23).into_iter().filter(|it| it.collective != Collective::Barrier && !it.coded);
    for request in copying {
        for reach in Reach::ALL {
            let mut one = case(Grouping::Shuffled(3), 23, request.collective, Retention::CopyInputs, reach);
            one.request = request;
            let mut order = one.plan.order().to_vec();
            order.reverse();
            order.swap(1, 3);
            let racks = vec![1, order.len() as u32 - 1];
            let plan = Plan::new(one.plan.group().clone(), order).unwrap().with_racks(racks).unwrap();
            let other = Case { plan, ..one.clone() };
            let copying: u32 = one
                .programs()
                .iter()
                .zip(other.programs())
                .map(|(one, other)| {
                    assert_eq!(one.slots, other.slots);
                    assert_eq!(one.copying, other.copying);
                    let steps = one.copying as usize;
                    assert_eq!(one.steps[..steps], other.steps[..steps]);
                    one.copying
                })
                .sum();
            assert!(copying > 0, "{request:?} {reach:?}");
        }
    }
}

#[test]
fn remote_ranks_are_fetched_ahead() {
    let case = case(Grouping::PerHost(2), 8, Collective::AllReduce, Retention::KeepInputs, Reach::Remote);
    for program in case.programs() {
        let reduced =
            program.steps.iter().position(|step| matches!(step.kind, StepKind::Reduce { .. })).unwrap();
        let ahead = program.steps[..reduced].iter().filter(|step| step.kind == StepKind::Fetch).count();
        assert_eq!(ahead, 4, "two chunks of two ranks");
    }
}

#[test]
fn algorithm_classes_are_those_of_the_receipt() {
    let class = |shots, collective: &Collective| {
        algorithm_code(4, Request { algorithm: shots, ..plain(*collective, Rank(0)) })
    };
    let classes = |shots| Collective::ALL.iter().map(|each| class(shots, each)).collect::<Vec<_>>();
    assert_eq!(classes(Algorithm::Ring), [2, 3, 4, 5, 2, 2, 4, 3, 3]);
    assert_eq!(classes(Algorithm::OneShot), [7, 3, 7, 7, 7, 7, 7, 3, 3]);
    assert_eq!(classes(Algorithm::TwoShot), [8, 3, 4, 5, 2, 2, 4, 3, 3]);
    assert_eq!(classes(Algorithm::RecursiveDoubling), [10, 3, 4, 5, 2, 2, 4, 3, 3]);
    assert_eq!(classes(Algorithm::RecursiveHalving), [11, 3, 4, 5, 2, 2, 4, 3, 3]);
    assert_eq!(classes(Algorithm::BinomialTree), [2, 3, 12, 5, 2, 2, 12, 3, 3]);
    assert_eq!(classes(Algorithm::Hierarchical), [13, 3, 4, 5, 2, 2, 4, 3, 3]);
    assert_eq!(algorithm_code(1, plain(Collective::AllToAll, Rank(0))), 1);
    let coded = Request { coded: true, ..plain(Collective::AllReduce, Rank(0)) };
    assert_eq!(algorithm_code(4, coded), 6);
    assert_eq!(algorithm_code(4, Request { coded: true, ..plain(Collective::AllToAll, Rank(0)) }), 3);
    assert_eq!(algorithm_code(4, Request { coded: true, ..plain(Collective::AllGather, Rank(0)) }), 6);
}

#[test]
fn wrong_plans_and_requests_are_refused() {
    let group = || Group::new(vec![vec![Rank(1)], vec![Rank(0), Rank(2)]]).unwrap();
    for order in [vec![0], vec![0, 0], vec![0, 2], vec![0, 1, 1], vec![]] {
        let entries = order.len();
        let order = order.into_iter().map(Participant).collect();
        assert_eq!(Plan::new(group(), order), Err(PlanError::Order { participants: 2, entries }));
    }
    let plan = Plan::in_sequence(group());
    let local = Local { access: &|_| Access::Mapped, retention: Retention::HoldOutputs, scaled: false };
    let copied = Local { retention: Retention::CopyInputs, ..local };
    let coded = Request { coded: true, ..plain(Collective::AllReduce, Rank(0)) };
    assert_eq!(program(&plan, coded, Participant(0), &copied), Err(PlanError::Copied));
    let coded = Request { collective: Collective::AllToAll, ..coded };
    assert_eq!(program(&plan, coded, Participant(0), &copied), Err(PlanError::Copied));
    let coded = Request { collective: Collective::AllGather, ..coded };
    assert_eq!(program(&plan, coded, Participant(0), &copied), Err(PlanError::Copied));
    let make = |collective, root, me| program(&plan, plain(collective, root), Participant(me), &local);
    let root = PlanError::Root { root: Rank(3), ranks: 3 };
    for collective in Collective::ALL.iter().filter(|one| one.is_rooted()) {
        assert_eq!(make(*collective, Rank(3), 0), Err(root.clone()));
    }
    assert_eq!(make(Collective::AllReduce, Rank(0), 2), Err(PlanError::Participant(Participant(2))));
    assert_eq!(make(Collective::AllToAll, Rank(0), 0), Err(PlanError::InPlace));
}

#[test]
fn a_recipe_from_elsewhere_is_validated() {
    let plan = Grouping::Shuffled(5).plan(9);
    let text = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
    let bad = |text: &str| serde_json::from_str::<Plan>(text).unwrap_err().to_string();
    let message = bad(r#"{"group":[[0],[1]],"order":[1,1]}"#);
    assert!(message.contains(&PlanError::Order { participants: 2, entries: 2 }.to_string()), "{message}");
    let message = bad(r#"{"group":[[0],[0]],"order":[0,1]}"#);
    assert!(message.contains("there twice"), "{message}");
    let racks = plan.clone().with_racks(vec![1, plan.participants() - 1]).unwrap();
    let text = serde_json::to_string(&racks).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), racks);
    for racks in ["1", "2,1", "2,0", "0,2", "4294967295,3"] {
        let message = bad(&format!(r#"{{"group":[[0],[1]],"order":[1,0,{racks}]}}"#));
        assert!(message.contains("are not those of 2 participants"), "{message}");
    }
}

#[test]
fn no_step_needs_both_a_message_and_credit() {
    let peer = |operands: &[harmonaize_plan::Operand]| {
        operands.iter().any(|operand| matches!(operand.buffer, Buffer::Peer(_)))
    };
    for request in requests(24) {
        let case = Case {
            plan: Grouping::PerHost(3).plan(24),
            request,
            retention: None,
            reach: Reach::Mixed,
            scaled: false,
        };
        for step in case.programs().iter().flat_map(|program| &program.steps) {
            assert!(!(peer(&step.sources) && peer(&step.destinations)), "{step:?}");
        }
    }
}
