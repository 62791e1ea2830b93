//! The choice of a codec from budgets, outlooks and what operations came to.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use harmonaize_codec::{Budget, Codec, Controller, Level, Outlook};
use std::time::Duration;

/// What levels took on one core of a server, and what they lose of normal tensors.
fn levels() -> Vec<Level> {
    [
        (Codec::BF16, 0.5, 15e9, 17e9, 3e-6),
        (Codec::INT8, 0.254, 10e9, 19e9, 1e-4),
        (Codec::rotated(4), 0.126, 4e9, 8e9, 0.0096),
        (Codec::rotated(2), 0.063, 5e9, 8e9, 0.134),
    ]
    .map(|(codec, ratio, encode, decode, loss)| Level { codec, ratio, encode, decode, loss })
    .to_vec()
}

const NOW: Duration = Duration::from_secs(1000);

fn outlook(goodput: f64) -> Outlook {
    Outlook {
        wire: 96e6,
        encoded: 128e6,
        decoded: 128e6,
        rate: goodput,
        coded_rate: goodput,
        overlapped: 0.0,
        chunks: 64.0,
    }
}

fn choose(controller: &Controller, budget: &Budget, current: Codec, outlook: &Outlook) -> Codec {
    controller.choose(NOW, budget, current, &levels(), outlook).codec
}

#[test]
fn a_fast_network_stays_exact_and_a_slow_one_does_not() {
    let (controller, budget) = (Controller::default(), Budget::Vnmse(0.2));
    let chosen = |outlook: &Outlook| choose(&controller, &budget, Codec::EXACT, outlook);
    assert_eq!(chosen(&outlook(50e9)), Codec::EXACT);
    assert_eq!(chosen(&outlook(1e8)), Codec::rotated(2));
    // What the tenant does not wait for is not worth any loss.
    assert_eq!(chosen(&Outlook { overlapped: 10.0, ..outlook(1e8) }), Codec::EXACT);
}

#[test]
fn budgets_bound_the_choice() {
    let choice = |budget| choose(&Controller::default(), &budget, Codec::EXACT, &outlook(1e8));
    assert_eq!(choice(Budget::Exact), Codec::EXACT);
    assert_eq!(choice(Budget::MatchBf16), Codec::BF16);
    assert_eq!(choice(Budget::Vnmse(1e-3)), Codec::INT8);
    assert_eq!(choice(Budget::Codecs(vec![Codec::INT8])), Codec::INT8);
}

#[test]
fn what_operations_lost_and_sent_counts_instead_of_what_was_thought() {
    let level = |codec| levels().into_iter().find(|level| level.codec == codec).unwrap();
    let int8 = level(Codec::INT8);
    let chosen = |controller: &Controller, most: f64, current| {
        choose(controller, &Budget::Vnmse(most), current, &outlook(1e8))
    };
    // Thought to lose 1e-4, and perhaps no more than a quarter of that.
    let mut controller = Controller::default();
    assert_eq!(chosen(&controller, 5e-5, Codec::EXACT), Codec::INT8);
    assert_eq!(chosen(&controller, 2e-5, Codec::EXACT), Codec::BF16);
    // Chunks that the budget refused went exact: the codec gains nothing, and is left alone for a while.
    controller.handle_outcome(NOW, &int8, 1e-6, 0.99);
    assert_eq!(chosen(&controller, 5e-5, Codec::INT8), Codec::BF16);
    let later = |controller: &Controller, seconds| {
        let now = NOW + Duration::from_secs(seconds);
        controller.choose(now, &Budget::Vnmse(5e-5), Codec::BF16, &levels(), &outlook(1e8)).codec
    };
    assert_eq!((later(&controller, 599), later(&controller, 600)), (Codec::BF16, Codec::INT8));
    // What it really loses lets it stay where it was thought to pass the budget.
    let mut controller = Controller::default();
    controller.handle_outcome(NOW, &int8, 1e-5, 0.254);
    assert_eq!(chosen(&controller, 2e-5, Codec::BF16), Codec::INT8);
    // Nothing is learned from what is no number.
    controller.handle_outcome(NOW, &int8, f64::NAN, 0.254);
    controller.handle_outcome(NOW, &int8, 1e-5, f64::INFINITY);
    assert_eq!(chosen(&controller, 2e-5, Codec::BF16), Codec::INT8);
}

#[test]
fn what_cannot_be_used_rests_and_small_changes_change_nothing() {
    let mut controller = Controller::default();
    let budget = Budget::Vnmse(0.02);
    controller.bar(Codec::rotated(4));
    assert_eq!(choose(&controller, &budget, Codec::EXACT, &outlook(1e8)), Codec::INT8);
    controller.unbar();
    assert_eq!(choose(&controller, &budget, Codec::EXACT, &outlook(1e8)), Codec::rotated(4));
    // Around the rate at which two levels take the same time, the choice made stays.
    let (mut current, mut changes) = (Codec::EXACT, 0);
    for step in 0..50 {
        let rate = if step % 2 == 0 { 3.9e9 } else { 4.1e9 };
        let codec = choose(&controller, &Budget::Vnmse(1e-3), current, &outlook(rate));
        changes += usize::from(codec != current);
        current = codec;
    }
    assert!(changes <= 1, "{changes} changes");
}

#[test]
fn each_change_makes_the_next_one_dearer_for_a_minute() {
    let mut controller = Controller::default();
    assert_eq!(controller.retry_at(NOW), None);
    controller.handle_change(NOW);
    assert_eq!(controller.retry_at(NOW), Some(NOW + Duration::from_secs(5)));
    assert_eq!(controller.retry_at(NOW + Duration::from_secs(5)), Some(NOW + Duration::from_secs(60)));
    assert_eq!(controller.retry_at(NOW + Duration::from_secs(60)), None);
}
