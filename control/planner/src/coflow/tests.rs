//! Coflows: cases computed by hand, and what holds of all.

use super::port::{Class, Ports, max_min};
use super::*;
use harmonaize_units::{Bytes, Rate};
use proptest::prelude::*;

/// A port moves a byte in a nanosecond.
const RATE: Rate = Rate(8_000_000_000);

const MS: u64 = 1_000_000;

const ALL: [Sharing; 4] = [
    Sharing::Fair,
    Sharing::Ordered(Discipline::FirstComeFirstServed),
    Sharing::Ordered(Discipline::LeastRemaining),
    Sharing::LeastAttained,
];

/// A coflow that comes at a millisecond, of transfers between ports that take so many milliseconds alone.
fn coflow(arrival: u64, transfers: &[(usize, usize, u64)]) -> Coflow {
    let transfer =
        |(from, to, ms): &(usize, usize, u64)| Transfer { from: *from, to: *to, bytes: Bytes(ms * MS) };
    Coflow { arrival: Nanos(arrival * MS), transfers: transfers.iter().map(transfer).collect() }
}

/// How many milliseconds each coflow takes.
fn times(coflows: &[Coflow], sharing: Sharing) -> Vec<u64> {
    let workload = Workload::new(8, coflows.to_vec()).unwrap();
    simulate(&workload, RATE, sharing).into_iter().map(|time| (time.0 + MS / 2) / MS).collect()
}

/// Each flow's max-min share of ports of 1.
fn shares(classes: &[((usize, usize), u32)]) -> Vec<f64> {
    let classes: Vec<Class> =
        classes.iter().map(|(ends, flows)| Class { ends: *ends, flows: f64::from(*flows) }).collect();
    let mut rates = Vec::new();
    max_min(&mut Ports::all(8, 1.0), &classes, &mut rates);
    rates
}

#[test]
fn flows_have_their_max_min_shares() {
    assert_eq!(shares(&[((0, 1), 1)]), [1.0]);
    // Both leave one port.
    assert_eq!(shares(&[((0, 1), 1), ((0, 2), 1)]), [0.5, 0.5]);
    // Four into one port, and what that leaves of another's: a quarter each, three quarters.
    assert_eq!(
        shares(&[((0, 7), 1), ((1, 7), 1), ((2, 7), 1), ((3, 7), 1), ((0, 5), 1)]),
        [0.25, 0.25, 0.25, 0.25, 0.75]
    );
    // Three equal ones beside a fourth, whose port of receipt has the rest for another.
    assert_eq!(shares(&[((0, 1), 3), ((0, 2), 1), ((3, 2), 1)]), [0.25, 0.25, 0.75]);
    // A port's two directions have nothing to do with each other.
    assert_eq!(shares(&[((0, 1), 1), ((1, 0), 1), ((2, 2), 1)]), [1.0; 3]);
}

#[test]
fn fair_sharing_serves_transfers_at_once() {
    let two = [coflow(0, &[(0, 1, 30)]), coflow(0, &[(0, 2, 10)])];
    assert_eq!(times(&two, Sharing::Fair), [40, 20]);
    // The second comes when the first has 20 left; both go on at half.
    let late = [coflow(0, &[(0, 1, 30)]), coflow(10, &[(0, 1, 10)])];
    assert_eq!(times(&late, Sharing::Fair), [40, 20]);
    // A transfer that is held up elsewhere leaves its share: 0 to 7 has a quarter, 0 to 5 three quarters.
    let elsewhere = [coflow(0, &[(0, 7, 10), (1, 7, 10), (2, 7, 10), (3, 7, 10)]), coflow(0, &[(0, 5, 30)])];
    assert_eq!(times(&elsewhere, Sharing::Fair), [40, 40]);
    // Nothing to move takes no time.
    assert_eq!(times(&[coflow(5, &[]), coflow(7, &[(0, 1, 3)])], Sharing::Fair), [0, 3]);
}

#[test]
fn least_left_goes_first() {
    let two = [coflow(0, &[(0, 1, 30)]), coflow(0, &[(0, 2, 10)])];
    assert_eq!(times(&two, Sharing::Ordered(Discipline::LeastRemaining)), [40, 10]);
    assert_eq!(times(&two, Sharing::Ordered(Discipline::FirstComeFirstServed)), [30, 40]);
    // What counts is left, not size: 5 of the first are, when 10 come.
    let late = [coflow(0, &[(0, 1, 30)]), coflow(25, &[(0, 1, 10)]), coflow(30, &[(0, 1, 9)])];
    assert_eq!(times(&late, Sharing::Ordered(Discipline::LeastRemaining)), [30, 24, 9]);
    // Its fullest port counts, not the sum: 20 over two ports go before 15 over one.
    let wide = [coflow(0, &[(0, 1, 15)]), coflow(0, &[(0, 1, 10), (2, 3, 10)])];
    assert_eq!(times(&wide, Sharing::Ordered(Discipline::LeastRemaining)), [25, 10]);
}

#[test]
fn transfers_end_with_the_slowest_others_use_what_is_free() {
    // The first needs a third of port 4's receipt for its shorter transfer; the second has the rest, and takes as long as both need.
    let both = [coflow(0, &[(0, 1, 30), (0, 4, 15)]), coflow(0, &[(3, 4, 50)])];
    assert_eq!(times(&both, Sharing::Ordered(Discipline::LeastRemaining)), [45, 65]);
}

#[test]
fn unknown_sizes_go_by_what_they_attained() {
    // Both are of the first class until 10 ms of the port; the later one is in it alone then.
    let two = [coflow(0, &[(0, 1, 300)]), coflow(20, &[(0, 1, 5)])];
    assert_eq!(times(&two, Sharing::LeastAttained), [305, 5]);
    // Within a class the first goes first.
    let two = [coflow(0, &[(0, 1, 8)]), coflow(1, &[(0, 1, 5)])];
    assert_eq!(times(&two, Sharing::LeastAttained), [8, 12]);
}

#[test]
fn order_is_by_age_then_what_is_left_then_arrival() {
    let contender = |arrival, remaining, overdue| Contender { arrival: Nanos(arrival), remaining, overdue };
    let known = |ms: u64| Remaining::Known(Nanos(ms * MS));
    let contenders = [
        contender(1, known(50), false),
        contender(2, known(20), false),
        contender(3, known(20), false),
        contender(4, known(90), true),
        contender(5, Remaining::Unknown(Nanos(25 * MS)), false),
        contender(6, known(30), false),
        contender(7, known(10), true),
    ];
    // Who is not known and had 25 ms is taken for one of 40.
    assert_eq!(service_order(Discipline::LeastRemaining, &contenders), [3, 6, 1, 2, 5, 4, 0]);
    assert_eq!(service_order(Discipline::FirstComeFirstServed, &contenders), [3, 6, 0, 1, 2, 4, 5]);
    assert_eq!(class_end(Nanos(0)), FIRST_CLASS);
    assert_eq!(class_end(FIRST_CLASS), Nanos(FIRST_CLASS.0 * NEXT_CLASS));
    assert_eq!(class_end(Nanos(u64::MAX)), Nanos(u64::MAX));
}

#[test]
fn texts_are_coflows_or_say_what_is_wrong() {
    let text = "8 2\n1 0 2 0 1 1 7:4.0\n2 15 1 3 2 4:1.0 5:0\n";
    let workload = Workload::parse(text).unwrap();
    let half = Bytes(2 << 20);
    let first = [0, 1].map(|from| Transfer { from, to: 7, bytes: half });
    assert_eq!(workload.coflows()[0], Coflow { arrival: Nanos(0), transfers: first.to_vec() });
    let second = vec![Transfer { from: 3, to: 4, bytes: Bytes(1 << 20) }];
    assert_eq!(workload.coflows()[1], Coflow { arrival: Nanos(15 * MS), transfers: second });
    for (text, line, problem) in [
        ("", 1, "nothing is there"),
        ("8 1\n", 1, "not as many coflows as the first line says"),
        ("8 1\n1 0 1 8 1 0:1", 2, "no port of a sender"),
        ("8 1\n1 0 1 0 1 8:1", 2, "no port with its megabytes, as 7:12.5"),
        ("8 1\n1 0 1 0 1 0:-1", 2, "no port with its megabytes, as 7:12.5"),
        ("8 1\n1 0 1 0 1 0:NaN", 2, "no port with its megabytes, as 7:12.5"),
        ("8 1\n1 0 9 0", 2, "no number of senders"),
        ("8 1\n1 0 1 0 1 0:1 1:1", 2, "more than its receivers"),
        ("8 2\n1 5 1 0 1 0:1\n2 4 1 0 1 0:1", 3, "a coflow that comes before the one above"),
        ("8 1\n1 99999999999999999 1 0 1 0:1", 2, "an arrival that is too late"),
        ("9999 1\n", 1, "no number of ports"),
    ] {
        assert_eq!(Workload::parse(text), Err(CoflowError { line, problem }), "{text}");
    }
    let outside = coflow(0, &[(0, 8, 1)]);
    assert_eq!(Workload::new(8, vec![outside]), None);
    assert_eq!(Workload::new(8, vec![coflow(2, &[]), coflow(1, &[])]), None);
}

/// Least left first takes at most 0.7 of fair sharing's mean, sizes known or not. The coflows have the recorded ones' shape.
#[test]
fn made_up_coflows_end_sooner_than_shared_fairly() {
    let workload = Workload::generate(1, 40);
    assert_eq!(workload, Workload::generate(1, 40));
    let mean = |sharing| {
        let times = simulate(&workload, Rate(1_000_000_000), sharing);
        times.iter().map(|time| time.0 as f64 / 1e9).sum::<f64>() / times.len() as f64
    };
    let means = ALL.map(mean);
    eprintln!("{means:.2?} s fairly, first come, least left, least attained");
    assert!(means[2] < 0.7 * means[0] && means[3] < 0.7 * means[0], "{means:?}");
}

prop_compose! {
    fn any_coflows()(
        each in prop::collection::vec((0_u64..40, prop::collection::btree_map((0_usize..8, 0_usize..8), 1_u64..50, 0..12)), 0..12)
    ) -> Vec<Coflow> {
        let mut coflows: Vec<Coflow> = each.into_iter().map(|(arrival, transfers)| {
            let transfers: Vec<_> = transfers.into_iter().map(|((from, to), ms)| (from, to, ms)).collect();
            coflow(arrival, &transfers)
        }).collect();
        coflows.sort_by_key(|coflow| coflow.arrival);
        coflows
    }
}

proptest! {
    /// Shares are max-min fair by definition. No port moves more than it can, and each flow crosses a full port on which none has
    /// more.
    #[test]
    fn shares_are_max_min_fair(
        classes in prop::collection::vec(((0_usize..8, 0_usize..8), 1_u32..5), 1..40)
    ) {
        let rates = shares(&classes);
        let all: Vec<(usize, usize, f64, f64)> = classes.iter().zip(&rates)
            .map(|(((from, to), flows), rate)| (*from, 8 + *to, f64::from(*flows), *rate)).collect();
        let sum = |place: usize| {
            let crosses = all.iter().filter(|(from, to, ..)| *from == place || *to == place);
            crosses.fold((0.0, 0.0), |(sum, most): (f64, f64), (_, _, flows, rate)| (sum + flows * rate, most.max(*rate)))
        };
        for (from, to, _, rate) in &all {
            let limits = [*from, *to].map(sum);
            prop_assert!(limits.iter().all(|(sum, _)| *sum <= 1.0 + 1e-9), "{limits:?}");
            prop_assert!(limits.iter().any(|(sum, most)| *sum >= 1.0 - 1e-9 && *rate >= most - 1e-9), "{rate} {limits:?}");
        }
    }

    /// Nobody ends sooner than alone, and no port is ever done sooner than all that it has to move takes.
    #[test]
    fn no_sharing_moves_more_than_ports_can(coflows in any_coflows()) {
        let workload = Workload::new(8, coflows.clone()).unwrap();
        for sharing in ALL {
            let times = simulate(&workload, RATE, sharing);
            let mut work = [0_u64; 16];
            let transfers: usize = coflows.iter().map(|coflow| coflow.transfers.len()).sum();
            let (mut last, mut begin) = (0, u64::MAX);
            for (coflow, time) in coflows.iter().zip(&times) {
                let mut own = [0_u64; 16];
                for transfer in &coflow.transfers {
                    for place in [transfer.from, 8 + transfer.to] {
                        own[place] += transfer.bytes.0;
                        work[place] += transfer.bytes.0;
                    }
                }
                prop_assert!(time.0 + 1000 >= own.into_iter().max().unwrap(), "{sharing:?}");
                last = last.max(coflow.arrival.0 + time.0);
                begin = begin.min(coflow.arrival.0);
            }
            if !coflows.is_empty() {
                prop_assert!(last + 1000 >= begin + work.into_iter().max().unwrap(), "{sharing:?}");
                // Something moves whenever something could.
                prop_assert!(last <= 40 * MS + work.into_iter().sum::<u64>() + 100 * MS * transfers as u64, "{sharing:?}");
            }
        }
    }

    #[test]
    fn no_text_breaks_the_reader(text in "[0-9 :.\n]{0,200}") {
        let _ = Workload::parse(&text);
    }
}
