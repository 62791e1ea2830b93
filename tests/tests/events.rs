//! What a tenant hears, end to end, and nothing of another tenant's. It hears an operator's drain before the host goes, and the
//! rank that is lost with its agent.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_abi::session::AgentRefusal;
use harmonaize_client::{Client, Error, Event, EventKind, Events, Rank, Status, StragglerCause};
use harmonaize_tests::job::{deploy, joined, sockets};
use harmonaize_tests::load::train;
use harmonaize_tests::star;
use rustix::process::Signal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long anything may take: a bound for machines that are busy with other things, and no figure.
const PATIENCE: Duration = Duration::from_secs(60);

/// The next event of a kind that is wanted.
fn next(events: &mut Events, wanted: impl Fn(&EventKind) -> bool) -> Event {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let batch = events.read(deadline.saturating_duration_since(Instant::now())).unwrap();
        assert!(batch.missed == 0 && Instant::now() < deadline, "{batch:?}");
        if let Some(event) = batch.events.into_iter().find(|event| wanted(&event.kind)) {
            return event;
        }
    }
}

#[test]
fn a_drain_is_announced_before_the_loss() {
    let Some(mut deployment) = deploy(&star(3, "1Gbit/s"), |_| {}) else { return };
    let workers = joined(&sockets(&deployment, "a"), "job");
    let others = joined(&sockets(&deployment, "b"), "job");
    let (mut events, mut of_others) = (workers[0].client.events(None), others[0].client.events(None));
    assert_eq!(events.read(Duration::ZERO).unwrap().events, []);
    assert_eq!(of_others.read(Duration::ZERO).unwrap().events, []);
    let begun = events.cursor();

    let host = deployment.hosts()[2].name.clone();
    deployment.harmonaize(&["drain", &host]).unwrap();
    let maintenance = |kind: &EventKind| matches!(kind, EventKind::Maintenance { .. });
    let event = next(&mut events, maintenance);
    let EventKind::Maintenance { ranks, at_ns } = &event.kind else { panic!("{event:?}") };
    assert_eq!((event.communicator.as_str(), ranks.as_slice()), ("job", &[Rank(2)][..]));
    assert!(*at_ns > 0 && event.since_ns % 1_000_000_000 == 0, "{event:?}");
    // Another process of the tenant goes on from where this one began; another tenant's may not.
    assert_eq!(next(&mut workers[1].client.events(begun), maintenance), event);
    let refused = others[1].client.events(begun).read(Duration::ZERO).unwrap_err();
    assert!(matches!(&refused, Error::Events(text) if text.contains("not of this feed")), "{refused}");

    deployment.agent(2).unwrap().signal(Signal::KILL).unwrap();
    let lost = next(&mut events, |kind| matches!(kind, EventKind::Failure { .. }));
    assert_eq!(lost.kind, EventKind::Failure { ranks: vec![Rank(2)], regroup_by_ns: 0 });

    // With control gone there is a plain word, and once it is back, a new feed.
    deployment.control().unwrap().end().unwrap();
    let away = next_error(&workers[0].client, None);
    assert_eq!(away, AgentRefusal::Away.to_string());
    deployment.start_control().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while workers[0].client.events(None).read(Duration::ZERO).is_err() {
        assert!(Instant::now() < deadline, "control is back, and tells nothing");
        std::thread::sleep(Duration::from_millis(50));
    }
    let unknown = next_error(&workers[0].client, events.cursor());
    assert!(unknown.contains("begin without one"), "{unknown}");
}

#[test]
fn an_orderly_agent_stop_is_a_failure() {
    let Some(mut deployment) = deploy(&star(3, "1Gbit/s"), |_| {}) else { return };
    let workers = joined(&sockets(&deployment, "a"), "job");
    let mut events = workers[0].client.events(None);
    assert_eq!(events.read(Duration::ZERO).unwrap().events, []);
    deployment.agent(2).unwrap().end().unwrap();
    let lost = next(&mut events, |kind| matches!(kind, EventKind::Failure { .. }));
    assert_eq!(
        (lost.communicator.as_str(), lost.kind),
        ("job", EventKind::Failure { ranks: vec![Rank(2)], regroup_by_ns: 0 })
    );
    // Calls end with the same, also those that come later.
    for worker in &workers[..2] {
        match worker.communicator.barrier().and_then(|mut barrier| barrier.wait(PATIENCE)) {
            Err(Error::Operation { status, detail: Some(detail), .. }) => {
                assert_eq!((status, detail.ranks), (Status::RankLost, vec![Rank(2)]));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_late_rank_is_named_to_its_tenant_alone() {
    let Some(deployment) = deploy(&star(3, "1Gbit/s"), |setup| setup.measure("1Gbit/s")) else { return };
    let workers = joined(&sockets(&deployment, "a"), "job");
    let others = joined(&sockets(&deployment, "b"), "job");
    let (mut events, mut of_others) = (workers[1].client.events(None), others[0].client.events(None));
    assert_eq!(events.read(Duration::ZERO).unwrap().events, []);
    assert_eq!(of_others.read(Duration::ZERO).unwrap().events, []);
    let (slow, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let deadline = Instant::now() + PATIENCE;
    let mut named = |wanted: &[Rank]| loop {
        let kind = |event: &Event| match &event.kind {
            EventKind::Stragglers { cause: StragglerCause::Compute, ranks } => ranks == wanted,
            _ => false,
        };
        let batch = events.read(deadline.saturating_duration_since(Instant::now()));
        let found = batch.iter().flat_map(|batch| &batch.events).find(|event| kind(event)).cloned();
        if found.is_some() || batch.is_err() || Instant::now() >= deadline {
            return found;
        }
    };
    let heard = std::thread::scope(|scope| {
        for worker in &workers {
            scope.spawn(|| train(worker, &slow, &over));
        }
        // Whatever is heard, the others are to end.
        std::thread::sleep(Duration::from_secs(1));
        slow.store(true, Ordering::Relaxed);
        let late = named(&[Rank(2)]);
        slow.store(false, Ordering::Relaxed);
        let in_time = late.as_ref().and_then(|_| named(&[]));
        over.store(true, Ordering::Relaxed);
        (late, in_time)
    });
    let (Some(late), Some(in_time)) = heard else { panic!("{heard:?}") };
    assert_eq!((late.communicator.as_str(), late.since_ns % 1_000_000_000), ("job", 0));
    assert!(in_time.number > late.number);
    let told = of_others.read(Duration::ZERO).unwrap().events;
    assert!(told.iter().all(|event| !matches!(event.kind, EventKind::Stragglers { .. })), "{told:?}");
}

/// What a reader is told once there is an error to tell.
fn next_error(client: &Client, from: Option<harmonaize_client::EventCursor>) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match client.events(from).read(Duration::ZERO) {
            Err(Error::Events(text)) => return text,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
