//! Feeds as their tenants see them: coarse, whole, in order, and silent about the rest.

use super::*;
use harmonaize_abi::CommunicatorId;
use proptest::prelude::*;

const TICK: Duration = Duration::from_secs(1);

fn seconds(time: f64) -> Duration {
    Duration::from_secs_f64(time)
}

fn limits(burst: usize, capacity: usize) -> Limits {
    Limits { tick: TICK, burst, capacity, pause: TICK * 10 }
}

fn feed() -> Feed {
    Feed::new(7, limits(4, 8))
}

fn all(feed: &Feed) -> Vec<(String, EventKind)> {
    assert!(feed.read(EventCursor { feed: 7, next: 0 }).is_ok_and(|batch| batch.missed == 0));
    feed.events.iter().map(|event| (event.communicator.clone(), event.kind.clone())).collect()
}

fn congestion(share: f64) -> Fact {
    Fact::Congestion { share }
}

fn lost(rank: u32) -> Fact {
    Fact::Failure { ranks: vec![Rank(rank)], regroup_by: None }
}

fn maintenance(ranks: &[(u32, f64)]) -> Fact {
    Fact::Maintenance { ranks: ranks.iter().map(|(rank, at)| (Rank(*rank), seconds(*at))).collect() }
}

#[test]
fn level_changes_are_sent_per_tick_with_hysteresis() {
    let mut feed = feed();
    for (at, share) in
        [(0.2, 0.95), (1.3, 0.7), (2.1, 0.85), (3.9, 0.4), (4.5, 0.55), (5.5, 0.65), (6.5, 0.91)]
    {
        feed.note((CommunicatorId(1), "job"), congestion(share), seconds(at));
        assert_eq!(
            feed.next_due().is_some(),
            feed.subjects.values().any(|subject| subject.waiting_order.is_some())
        );
        // Whatever time within the tick.
        feed.poll(seconds(at + 1.05));
        feed.poll(seconds(at + 1.06));
    }
    let levels: Vec<EventKind> = all(&feed).into_iter().map(|(_, what)| what).collect();
    let expected =
        [CongestionLevel::Mild, CongestionLevel::Severe, CongestionLevel::Mild, CongestionLevel::None]
            .map(EventKind::Congestion);
    assert_eq!(levels, expected);
    let since: Vec<u64> = feed.events.iter().map(|event| event.since_ns).collect();
    assert_eq!(since, [1, 3, 5, 6].map(|at| at * 1_000_000_000));
}

#[test]
fn changes_undone_within_a_tick_are_not_sent() {
    let mut feed = feed();
    feed.note((CommunicatorId(1), "job"), congestion(0.3), seconds(0.1));
    feed.note((CommunicatorId(1), "job"), congestion(1.0), seconds(0.5));
    feed.note((CommunicatorId(1), "job"), maintenance(&[(1, 9.0)]), seconds(0.6));
    feed.note((CommunicatorId(1), "job"), maintenance(&[]), seconds(0.6));
    feed.poll(seconds(1.0));
    assert_eq!((all(&feed), feed.next_due()), (vec![], None));
}

#[test]
fn ranks_are_told_together_and_once() {
    let mut feed = feed();
    let lost = |ranks: &[u32], by| {
        let ranks = ranks.iter().copied().map(Rank).collect();
        Fact::Failure { ranks, regroup_by: Some(seconds(by)) }
    };
    feed.note((CommunicatorId(1), "job"), lost(&[5, 2], 8.1), seconds(0.1));
    feed.note((CommunicatorId(1), "job"), lost(&[2, 3], 9.7), seconds(0.2));
    feed.poll(seconds(1.0));
    feed.note((CommunicatorId(1), "job"), lost(&[3], 9.9), seconds(1.1));
    feed.poll(seconds(2.0));
    let ranks = |ranks: &[u32]| ranks.iter().copied().map(Rank).collect::<Vec<_>>();
    let told = EventKind::Failure { ranks: ranks(&[2, 3, 5]), regroup_by_ns: 9_000_000_000 };
    assert_eq!(all(&feed), [("job".to_owned(), told)]);

    feed.note((CommunicatorId(1), "job"), maintenance(&[(4, 99.7)]), seconds(2.5));
    feed.note((CommunicatorId(1), "job"), maintenance(&[(4, 99.7), (0, 80.2)]), seconds(2.6));
    feed.poll(seconds(3.0));
    feed.note((CommunicatorId(1), "job"), maintenance(&[]), seconds(3.5));
    feed.poll(seconds(4.0));
    let told: Vec<EventKind> = all(&feed).into_iter().skip(1).map(|(_, what)| what).collect();
    let first = EventKind::Maintenance { ranks: ranks(&[0, 4]), at_ns: 80_000_000_000 };
    assert_eq!(told, [first, EventKind::Maintenance { ranks: vec![], at_ns: 0 }]);
}

#[test]
fn events_beyond_the_burst_wait_in_order() {
    let mut feed = feed();
    for job in 0..7 {
        feed.note((CommunicatorId(job), &format!("job{job}")), congestion(0.1), seconds(0.1));
    }
    feed.poll(seconds(1.0));
    assert_eq!(feed.events.len(), 4);
    // One of those that wait is over before it is told, one more comes.
    feed.note((CommunicatorId(5), "job5"), Fact::Ended, seconds(1.1));
    feed.note((CommunicatorId(7), "job7"), maintenance(&[(0, 9.0)]), seconds(1.2));
    feed.poll(seconds(1.9));
    assert_eq!((feed.events.len(), feed.next_due()), (4, Some(seconds(2.0))));
    feed.poll(seconds(2.0));
    let names: Vec<String> = all(&feed).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["job0", "job1", "job2", "job3", "job4", "job6", "job7"]);
}

#[test]
fn waiting_events_precede_later_ones() {
    let mut feed = feed();
    let names = |feed: &Feed| all(feed).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    feed.note((CommunicatorId(1), "job"), lost(1), seconds(0.5));
    feed.note((CommunicatorId(2), "other"), lost(2), seconds(1.1));
    assert_eq!(feed.next_due(), Some(seconds(1.0)));
    feed.poll(seconds(1.2));
    // What came within the tick is told at the next.
    assert_eq!((names(&feed), feed.next_due()), (vec!["job".to_owned()], Some(seconds(2.0))));
    feed.poll(seconds(2.0));
    assert_eq!(names(&feed), ["job", "other"]);
}

#[test]
fn ended_communicators_keep_only_lost_ranks() {
    let mut feed = feed();
    feed.note((CommunicatorId(1), "job"), congestion(0.1), seconds(0.1));
    feed.note((CommunicatorId(2), "other"), congestion(0.1), seconds(0.1));
    feed.note((CommunicatorId(1), "job"), Fact::Ended, seconds(0.2));
    feed.poll(seconds(1.0));
    assert_eq!((all(&feed).len(), feed.subjects.len()), (1, 1));
    // Whom it lost is told all the same; and of another of its name, anew.
    for id in [3, 4] {
        feed.note((CommunicatorId(id), "job"), lost(1), seconds(1.1));
        feed.note((CommunicatorId(id), "job"), Fact::Ended, seconds(1.1));
    }
    feed.poll(seconds(2.0));
    assert_eq!((all(&feed).len(), feed.subjects.len()), (3, 1));
    // So is that its members have not gone on, when it is long over; and that is the last of it.
    let over = Fact::AgreementEnded { clauses: [Clause::OnFailure].into() };
    feed.note((CommunicatorId(3), "job"), over, seconds(2.1));
    feed.note((CommunicatorId(3), "job"), Fact::Ended, seconds(2.1));
    feed.poll(seconds(3.0));
    let last = all(&feed).pop().unwrap().1;
    assert_eq!(last, EventKind::AgreementEnded { clauses: vec![Clause::OnFailure] });
    assert_eq!((feed.subjects.len(), feed.next_due()), (1, None));
}

#[test]
fn late_readers_learn_missed_count_wrong_cursors_fail() {
    let mut feed = Feed::new(7, limits(4, 12));
    let begin = feed.end();
    for tick in 1..=16_u32 {
        feed.note((CommunicatorId(1), "job"), Fact::PlanChanged, TICK * tick);
        feed.poll(TICK * (tick + 1));
    }
    let batch = feed.read(begin).unwrap();
    assert_eq!((batch.missed, batch.events.len(), batch.cursor.next), (4, 8, 12));
    let batch = feed.read(batch.cursor).unwrap();
    assert_eq!((batch.missed, batch.events.len(), batch.cursor), (0, 4, feed.end()));
    let batch = feed.read(feed.end()).unwrap();
    assert_eq!((batch.missed, batch.events.len(), batch.cursor), (0, 0, feed.end()));
    let wrong = |cursor| feed.read(cursor).unwrap_err();
    assert_eq!(wrong(EventCursor { feed: 8, next: 0 }), CursorError::Unknown);
    let error = wrong(EventCursor { feed: 7, next: 17 });
    assert_eq!(error, CursorError::Ahead { next: 16 });
    assert!(error.to_string().contains("beyond event 16"));
}

/// Ranks that are late by so many milliseconds each.
fn late(cause: StragglerCause, ranks: &[(u32, u64)], hosts: usize) -> Fact {
    let ranks = ranks.iter().map(|(rank, by)| (Rank(*rank), Duration::from_millis(*by))).collect();
    Fact::Stragglers { cause, ranks, hosts }
}

fn stragglers(name: &str, cause: StragglerCause, ranks: &[u32]) -> (String, EventKind) {
    let ranks = ranks.iter().copied().map(Rank).collect();
    (name.to_owned(), EventKind::Stragglers { cause, ranks })
}

#[test]
fn late_computing_ranks_are_named_until_in_time() {
    use StragglerCause::Compute;
    let mut feed = feed();
    feed.note((CommunicatorId(1), "job"), late(Compute, &[], 2), seconds(0.1));
    feed.poll(seconds(1.0));
    feed.note((CommunicatorId(1), "job"), late(Compute, &[(5, 9), (2, 3)], 2), seconds(1.7));
    feed.poll(seconds(2.0));
    // By how much is not told, nor what came and went within a tick.
    feed.note((CommunicatorId(1), "job"), late(Compute, &[(5, 1), (2, 8)], 2), seconds(2.1));
    feed.poll(seconds(3.0));
    feed.note((CommunicatorId(1), "job"), late(Compute, &[(5, 1)], 2), seconds(3.1));
    feed.note((CommunicatorId(1), "job"), late(Compute, &[(2, 3), (5, 1)], 2), seconds(3.2));
    feed.poll(seconds(4.0));
    feed.note((CommunicatorId(1), "job"), late(Compute, &[], 2), seconds(4.9));
    feed.poll(seconds(5.0));
    assert_eq!(all(&feed), [stragglers("job", Compute, &[2, 5]), stragglers("job", Compute, &[])]);
    let since: Vec<u64> = feed.events.iter().map(|event| event.since_ns).collect();
    assert_eq!((since, feed.next_due()), (vec![1_000_000_000, 4_000_000_000], None));
}

#[test]
fn one_rank_behind_slow_links_is_named() {
    use StragglerCause::Network;
    let mut feed = feed();
    // Of two hosts nothing is said, however late they are.
    feed.note((CommunicatorId(9), "pair"), late(Network, &[(0, 99)], 2), seconds(0.1));
    feed.note((CommunicatorId(1), "one"), late(Network, &[(3, 5), (4, 7)], 3), seconds(0.2));
    feed.note((CommunicatorId(2), "two"), late(Network, &[(1, 90)], 6), seconds(0.3));
    feed.poll(seconds(1.0));
    // Whoever was named first is, until it is in time. Then nobody is for a while, though others are late still.
    feed.note((CommunicatorId(1), "one"), late(Network, &[(3, 50), (4, 1)], 3), seconds(1.1));
    feed.poll(seconds(2.0));
    let first = all(&feed);
    let [(_, EventKind::Stragglers { ranks, .. })] = first.as_slice() else { panic!("{first:?}") };
    let named = ranks[0];
    let others: Vec<(u32, u64)> =
        [(3, 50), (4, 1)].into_iter().filter(|(rank, _)| Rank(*rank) != named).collect();
    feed.note((CommunicatorId(1), "one"), late(Network, &others, 3), seconds(2.5));
    feed.poll(seconds(3.0));
    assert_eq!(all(&feed)[1..], [stragglers("one", Network, &[])]);
    // Of three that are late the latest is named, ten ticks after the first was in time, and told a tick later.
    assert_eq!(feed.next_due(), Some(seconds(12.5)));
    feed.poll(seconds(12.4));
    assert_eq!(feed.events.len(), 2);
    feed.poll(seconds(13.0));
    feed.poll(seconds(14.0));
    assert_eq!(all(&feed)[2..], [stragglers("two", Network, &[1])]);
    // With its communicator it is over, and that is no news.
    feed.note((CommunicatorId(2), "two"), Fact::Ended, seconds(14.5));
    feed.poll(seconds(15.0));
    assert_eq!((feed.events.len(), feed.next_due()), (3, Some(seconds(24.5))));
    feed.note((CommunicatorId(1), "one"), late(Network, &[], 3), seconds(16.0));
    assert_eq!(feed.next_due(), None);
}

#[derive(Clone, Debug)]
enum Move {
    Share { job: u8, share: f64, capacity: bool },
    Lost { job: u8, rank: u32 },
    Plan { job: u8 },
    Wait { millis: u64 },
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let share = prop_oneof![Just(f64::NAN), Just(f64::NEG_INFINITY), -0.5..1.5];
    let one = prop_oneof![
        4 => (0_u8..6, share, any::<bool>()).prop_map(|(job, share, capacity)| Move::Share { job, share, capacity }),
        1 => (0_u8..6, 0_u32..4).prop_map(|(job, rank)| Move::Lost { job, rank }),
        1 => (0_u8..6).prop_map(|job| Move::Plan { job }),
        3 => (0_u64..2500).prop_map(|millis| Move::Wait { millis }),
    ];
    proptest::collection::vec(one, 0..120)
}

/// Runs the moves, with each share changed by `blur`, and reads along; what was read, and the feed.
fn run(moves: &[Move], limits: Limits, blur: impl Fn(f64) -> f64) -> (Vec<Event>, Feed) {
    let (mut feed, mut now, mut read) = (Feed::new(7, limits), Duration::ZERO, Vec::new());
    let mut cursor = feed.end();
    for one in moves {
        match *one {
            Move::Share { job, share, capacity } => {
                let share = blur(share);
                let fact = if capacity { Fact::Capacity { share } } else { Fact::Congestion { share } };
                feed.note((CommunicatorId(job.into()), &job.to_string()), fact, now);
            }
            Move::Lost { job, rank } => {
                feed.note((CommunicatorId(job.into()), &job.to_string()), lost(rank), now);
            }
            Move::Plan { job } => {
                feed.note((CommunicatorId(job.into()), &job.to_string()), Fact::PlanChanged, now)
            }
            Move::Wait { millis } => {
                for _ in 0..millis.div_ceil(100) {
                    now += Duration::from_millis(100);
                    feed.poll(now);
                    let batch = feed.read(cursor).unwrap();
                    assert_eq!(batch.missed, 0);
                    read.extend(batch.events);
                    cursor = batch.cursor;
                }
            }
        }
    }
    for _ in 0..30 {
        now += TICK;
        feed.poll(now);
        let batch = feed.read(cursor).unwrap();
        read.extend(batch.events);
        cursor = batch.cursor;
    }
    (read, feed)
}

proptest! {
    /// Whoever reads along has every event once, in order. The last event about each subject is what holds. A tick has no more
    /// events than it may, nor two of one kind and communicator.
    #[test]
    fn last_event_matches_current_state(moves in moves(), burst in 1_usize..5) {
        let (events, feed) = run(&moves, limits(burst, 64), |share| share);
        prop_assert!(events.iter().enumerate().all(|(at, event)| event.number == at as u64));
        prop_assert_eq!(feed.next_due(), None);
        for ((_, kind), subject) in &feed.subjects {
            let name = &subject.name;
            let last = |wanted: fn(&EventKind) -> bool| {
                events.iter().rfind(|event| event.communicator == *name && wanted(&event.kind)).map(|event| &event.kind)
            };
            match kind {
                Kind::Congestion => {
                    let told = last(|what| matches!(what, EventKind::Congestion(_)));
                    let worst = feed.worst.get(kind).copied().unwrap_or_default();
                    prop_assert_eq!(told.unwrap_or(&EventKind::Congestion(CongestionLevel::None)), &EventKind::Congestion(worst));
                }
                Kind::Failure => {
                    let ranks = subject.ranks.keys().copied().collect();
                    prop_assert_eq!(last(|what| matches!(what, EventKind::Failure { .. })), Some(&EventKind::Failure { ranks, regroup_by_ns: 0 }));
                }
                _ => {}
            }
        }
        prop_assert!(events.iter().all(|event| event.since_ns % 1_000_000_000 == 0));
    }

    /// Which of a tenant's communicators are slowed, and which take another way, makes no difference that it could see.
    #[test]
    fn communicator_identity_is_not_disclosed(moves in moves(), turn in 0_u8..6) {
        let others = |job: u8| (job + turn) % 6;
        let facts = |moves: &[Move]| -> Vec<Move> {
            let all = (0..12).map(|at| Move::Share { job: at % 6, share: 1.0, capacity: at < 6 });
            let told = moves.iter().filter(|one| !matches!(one, Move::Lost { .. })).cloned();
            all.chain(told).collect()
        };
        let moves = facts(&moves);
        let turned: Vec<Move> = moves.iter().map(|one| match one.clone() {
            Move::Share { job, share, capacity } => Move::Share { job: others(job), share, capacity },
            Move::Plan { job } => Move::Plan { job: others(job) },
            one => one,
        }).collect();
        let limits = limits(64, 512);
        prop_assert_eq!(run(&moves, limits, |share| share).0, run(&turned, limits, |share| share).0);
    }

    /// Shares that differ within a level make no difference that a tenant could see.
    #[test]
    fn shares_within_a_level_are_not_disclosed(moves in moves()) {
        // All thresholds stand at whole tenths.
        let coarse = |share: f64| if share.is_finite() { (share * 10.0).floor() / 10.0 + 0.05 } else { share };
        let fine = |share: f64| if share.is_finite() { (share * 10.0).floor() / 10.0 + 0.01 } else { share };
        let limits = limits(3, 64);
        prop_assert_eq!(run(&moves, limits, coarse).0, run(&moves, limits, fine).0);
    }
}
