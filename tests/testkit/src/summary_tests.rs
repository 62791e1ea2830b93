//! The demo's summary on printed lines that are right, and on such that are not.

use super::*;

fn training(losses: &[f64], collective_us: u64, digest: &str) -> Vec<Line> {
    let mut lines = vec![Line::Start { at_us: 1_000_000, rank: 0, ranks: 2 }];
    for (step, loss) in losses.iter().enumerate() {
        lines.push(Line::Step {
            at_us: 1_000_000 + 100_000 * (step as u64 + 1),
            step,
            loss: *loss,
            bytes: 1_000_000,
            collective_us,
            copies_us: 1,
            compute_us: 1,
            wire_bytes: 1_000_000,
            algorithm: "ring".into(),
            correct: None,
        });
    }
    lines.push(Line::Trained { at_us: 2_000_000, correct: 350, tested: 360, digest: digest.into() });
    lines
}

fn exchanging(rounds: u64) -> Vec<Line> {
    let mut lines: Vec<Line> = (0..rounds)
        .map(|round| Line::Round {
            at_us: 1_100_000 + round,
            round,
            bytes: 500_000,
            collective_us: 10_000,
            wire_bytes: 250_000,
        })
        .collect();
    lines.push(Line::Stopped { at_us: 1_200_000, rounds, verified_bytes: rounds * 500_000 });
    lines
}

fn good() -> Printed {
    Printed {
        workers: vec![training(&[2.0, 1.0], 20_000, "d"), training(&[2.0, 1.0], 10_000, "d")],
        exchangers: vec![exchanging(3), exchanging(3)],
        reference: training(&[2.0, 1.000_05], 0, "e"),
        workers_per_host: 1,
    }
}

fn failed(printed: &Printed) -> Vec<usize> {
    let summary = judge(printed, 2, 125e6).unwrap();
    let failed: Vec<usize> = (0..summary.checks.len()).filter(|at| !summary.checks[*at].passed).collect();
    assert_eq!(summary.passed, failed.is_empty());
    failed
}

fn near(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-6, "{found} instead of {expected}");
}

#[test]
fn figures_follow_from_the_lines() {
    let summary = judge(&good(), 2, 125e6).unwrap();
    assert!(summary.passed, "{:?}", summary.checks);
    // The last worker waited 10 ms for 1 MB: 100 MB/s; two hosts exchange 1 MB each, which takes 8 ms at line rate.
    near(summary.algbw, 1e8);
    near(summary.busbw, 1e8);
    near(summary.share, 0.8);
    near(summary.communication, 0.03);
    near(summary.seconds, 0.2);
    // 2 hosts x 2 steps x 1 MB and 2 hosts x 3 rounds x 250 kB, over 2 links in 0.2 s.
    near(summary.used, 5.5e6 / 2.0 / 0.2 / 125e6);
    near(summary.alltoall_algbw, 5e7);
    near(summary.largest_difference, 0.000_05 / 1.000_05);
    assert_eq!((summary.rounds, summary.verified_bytes), (3, 3_000_000));
}

#[test]
fn a_curve_that_parts_fails() {
    let mut printed = good();
    printed.reference = training(&[2.0, 1.000_2], 0, "e");
    assert_eq!(failed(&printed), [0]);
    printed.reference = training(&[2.0, 0.0], 0, "e");
    assert_eq!(failed(&printed), [0]);
}

#[test]
fn steps_that_are_missing_fail() {
    let mut printed = good();
    printed.reference = training(&[2.0, 1.0, 0.5], 0, "e");
    assert_eq!(failed(&printed), [0]);
    let mut printed = good();
    printed.workers[1] = training(&[2.0], 1, "d");
    assert_eq!(failed(&printed), [0]);
    let mut printed = good();
    printed.reference.clear();
    assert_eq!(failed(&printed), [0, 1]);
}

#[test]
fn workers_that_part_fail() {
    let mut printed = good();
    printed.workers[1] = training(&[2.0, 1.0], 1, "other");
    assert_eq!(failed(&printed), [2]);
    printed.workers[1].pop();
    assert_eq!(failed(&printed), [2]);
}

#[test]
fn accuracy_may_differ_by_one_image() {
    for (correct, fails) in [(351, vec![]), (349, vec![]), (352, vec![1])] {
        let mut printed = good();
        printed.reference.pop();
        printed.reference.push(Line::Trained { at_us: 1, correct, tested: 360, digest: "e".into() });
        assert_eq!(failed(&printed), fails, "{correct}");
    }
}

#[test]
fn a_damaged_or_unfinished_exchange_fails() {
    let mut printed = good();
    printed.exchangers[0].insert(1, Line::Damaged { at_us: 1, what: "round 0".into() });
    assert_eq!(failed(&printed), [3]);
    let mut printed = good();
    printed.exchangers[1].pop();
    assert_eq!(failed(&printed), [3]);
    let mut printed = good();
    printed.exchangers[1] = exchanging(2);
    assert_eq!(failed(&printed), [3]);
    let mut printed = good();
    printed.exchangers = vec![exchanging(0)];
    assert_eq!(failed(&printed), [3]);
}

#[test]
fn medians() {
    assert_eq!(median(vec![]), 0.0);
    assert_eq!(median(vec![3.0]), 3.0);
    assert_eq!(median(vec![9.0, 1.0]), 5.0);
    assert_eq!(median(vec![9.0, 1.0, 2.0]), 2.0);
}
