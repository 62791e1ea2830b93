//! Negotiations with a provider of one link. What is promised fits, what is offered instead is agreed on, and what is disclosed
//! is coarse.

use super::*;
use proptest::prelude::*;

const LINE: f64 = 1e9;

/// The ring of n hosts: latency and bandwidth.
fn ring(hosts: u32) -> impl Fn(Collective, u64, f64) -> f64 {
    let hosts = f64::from(hosts);
    move |collective, bytes, rate| {
        let rounds = if collective == Collective::AllReduce { 2.0 } else { 1.0 };
        rounds * (hosts - 1.0) * (50e-6 + bytes as f64 * 8.0 / hosts / rate.max(1.0))
    }
}

/// A provider that has `free` left.
fn with(asked: &Constraints, hosts: u32, free: f64) -> Outcome {
    let time = ring(hosts);
    let longest_regroup = Duration::from_secs(600);
    let unordered = (hosts > 64).then_some("too many hosts");
    let (ranks, most_weight, line) = (hosts, 8, LINE);
    let house = ProviderState {
        ranks,
        hosts,
        max_weight: most_weight,
        max_regroup: longest_regroup,
        line_rate: line,
        available_rate: free,
        unordered,
        time: &time,
    };
    negotiate(asked, &house)
}

fn outcome(asked: &Constraints, free: f64) -> Outcome {
    with(asked, 4, free)
}

fn clauses(outcome: &Outcome) -> Vec<Clause> {
    match outcome {
        Outcome::Promise { .. } => Vec::new(),
        Outcome::Refuse { reasons, .. } => reasons.iter().map(|reason| reason.clause).collect(),
    }
}

fn counter(outcome: Outcome) -> Constraints {
    match outcome {
        Outcome::Refuse { counter: Some(counter), .. } => *counter,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_ladder_climbs_and_covers_all_rates() {
    let all: Vec<u64> = (0..steps()).map(step_rate).collect();
    assert_eq!((all[0], all[1], all[12], *all.last().unwrap()), (BUSBW.0, 1_200, 10_000, BUSBW.1));
    assert!(all.is_sorted_by(|one, other| one < other && *other as f64 <= *one as f64 * 1.26));
    assert_eq!([0, 10, 11, 82, 83, 1001].map(rounded_up), [10, 10, 12, 82, 100, 1200]);
}

#[test]
fn unavailable_sums_are_refused_with_counter_offer() {
    let promise = Outcome::Promise { rate: 0.0 };
    let ordered = Constraints::new().ordered(true);
    assert_eq!(outcome(&ordered, LINE), promise);
    let refused = with(&ordered.weight(2), 65, LINE);
    assert_eq!((clauses(&refused), counter(refused)), (vec![Clause::Order], Constraints::new().weight(2)));
}

#[test]
fn nothing_is_promised_whatever_is_free() {
    let promise = Outcome::Promise { rate: 0.0 };
    assert_eq!(with(&Constraints::new(), 4, 0.0), promise);
}

#[test]
fn guarantees_are_at_most_one_step_above_need() {
    let asked = Constraints::new().min_busbw(40_000_000);
    let Outcome::Promise { rate, .. } = outcome(&asked, LINE) else { panic!("refused") };
    // 47 MB/s is the next step, and 4 ranks on 4 hosts send what the bus bandwidth says.
    assert!((rate / (47e6 * 8.0 * RATE_MARGIN) - 1.0).abs() < 1e-9, "{rate}");
    let asked = Constraints::new().p99(4 << 20, Duration::from_millis(200));
    let Outcome::Promise { rate, .. } = outcome(&asked, LINE) else { panic!("refused") };
    let time = ring(4)(Collective::AllReduce, 4 << 20, rate);
    assert!(time * TIME_MARGIN <= 0.2 && time * TIME_MARGIN >= 0.2 / 1.35, "{time} s at {rate}");
}

#[test]
fn unreachable_targets_get_a_counter_offer() {
    let asked = Constraints::new().p99(64 << 20, Duration::from_millis(1)).min_busbw(2_000_000_000);
    let refused = outcome(&asked, LINE);
    assert_eq!(clauses(&refused), [Clause::Bandwidth, Clause::Completion]);
    let counter = counter(refused);
    assert_eq!(counter.min_busbw, 100_000_000);
    assert!(counter.completions[0].p99 > Duration::from_millis(800), "{counter:?}");
    assert!(matches!(outcome(&counter, LINE), Outcome::Promise { .. }));
}

#[test]
fn a_target_is_reckoned_by_its_collective() {
    let time = Duration::from_millis(200);
    let rate = |collective| match outcome(&Constraints::new().p99_of(collective, 4 << 20, time), LINE) {
        Outcome::Promise { rate, .. } => rate,
        refused => panic!("{refused:?}"),
    };
    assert!(rate(Collective::AllGather) < rate(Collective::AllReduce) * 0.6);
    let asked = Constraints::new().p99_of(Collective::AllGather, 64 << 20, Duration::from_millis(1));
    let Outcome::Refuse { reasons, counter: Some(counter) } = outcome(&asked, LINE) else {
        panic!("promised")
    };
    assert!(reasons[0].text.starts_with("allgather of 67108864 B within 1ms"), "{reasons:?}");
    assert_eq!(counter.completions[0].collective, Collective::AllGather);
}

#[test]
fn unoffered_weights_and_policies_are_returned_unchanged() {
    let asked = Constraints::new().weight(20);
    let refused = outcome(&asked, LINE);
    assert_eq!(clauses(&refused), [Clause::Weight]);
    assert_eq!(counter(refused), Constraints::new().weight(8));
}

#[test]
fn invalid_proposals_get_a_counter_offer() {
    let asked = Constraints::new().priority(Priority::Low).min_busbw(1_000_000);
    let refused = outcome(&asked, LINE);
    assert_eq!(clauses(&refused), [Clause::Priority]);
    assert_eq!(counter(refused), Constraints::new().min_busbw(1_000_000));
    // Contradictory, and more than there is.
    let (ms, size) = (Duration::from_millis(1), 64 << 20);
    let asked = Constraints::new().p99(size, ms).p99(1 << 10, ms * 900).weight(0).min_busbw(50_000_000);
    let refused = outcome(&asked, LINE / 10.0);
    assert_eq!(clauses(&refused)[..2], [Clause::Weight, Clause::Completion]);
    assert!(clauses(&refused)[2..].contains(&Clause::Bandwidth));
    let counter = counter(refused);
    assert!(counter.completions[0].p99 == ms * 900 && counter.completions[1].p99 > ms * 900, "{counter:?}");
    assert!(matches!(outcome(&counter, LINE / 10.0), Outcome::Promise { .. }));
}

#[test]
fn regroup_time_is_limited_by_the_provider() {
    let regroup = |seconds| OnFailure::Regroup { within: Duration::from_secs(seconds) };
    for policy in [OnFailure::End, regroup(600)] {
        let granted = outcome(&Constraints::new().on_failure(policy), 0.0);
        assert_eq!(granted, Outcome::Promise { rate: 0.0 });
    }
    let refused = outcome(&Constraints::new().weight(2).on_failure(regroup(601)), 0.0);
    assert_eq!(clauses(&refused), [Clause::OnFailure]);
    assert_eq!(counter(refused), Constraints::new().weight(2).on_failure(regroup(600)));
    // Out of anybody's range: what is offered is this provider's.
    let refused = outcome(&Constraints::new().on_failure(regroup(9999)), 0.0);
    assert_eq!(counter(refused), Constraints::new().on_failure(regroup(600)));
}

fn collectives() -> proptest::sample::Select<Collective> {
    proptest::sample::select(Collective::ALL)
}

fn constraints() -> impl Strategy<Value = Constraints> {
    let target = (collectives(), 1_u64..1 << 26, 20_u64..5_000_000);
    let priorities = prop_oneof![Just(Priority::Normal), Just(Priority::High)];
    (
        proptest::collection::vec(target.clone(), 0..3),
        proptest::option::of(target),
        priorities,
        1_u32..20,
        prop_oneof![Just(0), 1_000_u64..1_000_000_000],
    )
        .prop_map(|(targets, iteration, priority, weight, busbw)| {
            let mut wanted = Constraints::new().priority(priority).weight(weight).min_busbw(busbw);
            for (collective, bytes, micros) in targets {
                wanted = wanted.p99_of(collective, bytes, Duration::from_micros(micros));
            }
            wanted.iteration = iteration.map(|(collective, bytes, micros)| Target {
                collective,
                bytes,
                p99: Duration::from_micros(micros),
            });
            wanted
        })
}

/// Anything that can be said at all.
fn anything() -> impl Strategy<Value = Constraints> {
    let number = || prop_oneof![Just(0), Just(u64::MAX), 1_u64..1 << 30, any::<u64>()];
    let target = (collectives(), number(), number()).prop_map(|(collective, bytes, nanos)| Target {
        collective,
        bytes,
        p99: Duration::from_nanos(nanos),
    });
    let priorities = prop_oneof![Just(Priority::Low), Just(Priority::Normal), Just(Priority::High)];
    let targets = proptest::collection::vec(target.clone(), 0..8);
    let within = number().prop_map(|nanos| OnFailure::Regroup { within: Duration::from_nanos(nanos) });
    let policy = proptest::option::of(prop_oneof![Just(OnFailure::End), within]);
    (targets, proptest::option::of(target), priorities, any::<u32>(), number(), policy).prop_map(
        |(completions, iteration, priority, weight, min_busbw, on_failure)| {
            let weight = if weight % 2 == 0 { weight / 2 % 70 } else { weight };
            Constraints {
                completions,
                iteration,
                priority,
                weight,
                min_busbw,
                on_failure,
                ..Constraints::new()
            }
        },
    )
}

proptest! {
    /// Requests are refused with a reason and an offer that is good. That holds however little sense a request makes.
    #[test]
    fn counter_offers_are_accepted(
        asked in anything(),
        hosts in 2_u32..9,
        free in prop_oneof![Just(0.0), 1e4..1.2e9_f64],
    ) {
        prop_assert_eq!(asked.clamped().check(), Ok(()));
        match with(&asked, hosts, free) {
            Outcome::Promise { .. } => prop_assert_eq!(asked.check(), Ok(())),
            Outcome::Refuse { reasons, counter } => {
                prop_assert!(!reasons.is_empty());
                let counter = *counter.expect("an offer");
                prop_assert_eq!(counter.check(), Ok(()));
                let taken = with(&counter, hosts, free);
                prop_assert!(matches!(taken, Outcome::Promise { .. }), "{:?}: {:?}", counter, taken);
            }
        }
    }

    /// Taking each counter-offer ends in an agreement in the second round, that fits what is free.
    #[test]
    fn negotiation_ends_within_available_capacity(
        asked in constraints(),
        hosts in 2_u32..9,
        free in prop_oneof![Just(0.0), 1e4..1.2e9_f64],
    ) {
        let mut wanted = asked;
        for round in 0.. {
            prop_assert!(round < 2, "a counter-offer was refused: {wanted:?}");
            match with(&wanted, hosts, free) {
                Outcome::Promise { rate } => {
                    prop_assert!(rate <= free.min(LINE));
                    for target in wanted.completions.iter().chain(&wanted.iteration) {
                        prop_assert!(ring(hosts)(target.collective, target.bytes, rate) <= target.p99.as_secs_f64());
                    }
                    break;
                }
                Outcome::Refuse { counter: None, .. } => return Err(TestCaseError::fail("no offer")),
                Outcome::Refuse { counter: Some(counter), reasons } => {
                    prop_assert!(!reasons.is_empty());
                    wanted = *counter;
                }
            }
        }
    }

    /// Whatever is asked, whether it is promised depends on what is free by the step alone.
    #[test]
    fn available_rate_is_disclosed_in_steps(asked in 1_000_u64..120_000_000, free in 1e4..1e9_f64) {
        let step = (0..steps()).find(|step| step_rate(*step) >= asked).unwrap();
        let same = |asked| matches!(outcome(&Constraints::new().min_busbw(asked), free), Outcome::Promise { .. });
        prop_assert_eq!(same(asked), same(step_rate(step)));
    }
}
