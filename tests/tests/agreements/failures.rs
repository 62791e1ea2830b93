//! What becomes of jobs that lose a rank, by what they have agreed on.

use super::PATIENCE;
use harmonaize_client::{
    Clause, Constraints, Error, EventKind, JoinRefusal, Negotiated, OnFailure, Rank, RegroupOptions, Status,
};
use harmonaize_testkit::deployment::Setup;
use harmonaize_tests::job::{Worker, at_all, deploy, joined, sockets};
use harmonaize_tests::star;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

fn agree(worker: &Worker, job: &str, wanted: &Constraints) {
    let outcome = worker.client.propose(job, wanted).unwrap();
    assert!(matches!(&outcome, Negotiated::Agreed(told) if told.constraints == *wanted), "{outcome:?}");
}

/// One of two that are left goes on.
fn goes_on(worker: &mut Worker) {
    let options = RegroupOptions { timeout: PATIENCE, ..Default::default() };
    worker.communicator = worker.communicator.regroup(&options).unwrap();
    worker.ranks = worker.communicator.ranks();
    assert_eq!(worker.ranks, 2);
    worker.sum(2, 10_000, true, PATIENCE).unwrap();
}

/// What was agreed on went over to the next communicator, as this.
fn went_over(worker: &Worker, job: &str, wanted: &Constraints) {
    let deadline = Instant::now() + PATIENCE;
    let agreement = loop {
        let agreement = worker.client.agreement(job).unwrap();
        if agreement.number > 0 {
            break agreement;
        }
        assert!(Instant::now() < deadline, "it did not go over");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!((agreement.number, &agreement.constraints), (2, wanted), "{job}");
}

fn is_over(worker: &mut Worker) {
    match worker.communicator.regroup(&RegroupOptions { timeout: PATIENCE, ..Default::default() }) {
        Err(Error::Regroup { kind: JoinRefusal::Over, text, .. }) => println!("{text}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_lost_rank_follows_the_agreed_policy() {
    let Some(mut deployment) = deploy(&star(3, "1Gbit/s"), |_| {}) else { return };
    let (own, others) = (sockets(&deployment, "a"), sockets(&deployment, "b"));
    let others = joined(&others[..2], "job");
    let mut jobs: BTreeMap<&str, Vec<Worker>> =
        ["ends", "goes", "late"].into_iter().map(|name| (name, joined(&own, name))).collect();
    let regroup = |within| Constraints::new().on_failure(OnFailure::Regroup { within });
    let goes = regroup(PATIENCE * 2).min_busbw(60_000_000);
    let late = Duration::from_secs(5);
    let wanted = [("ends", Constraints::new().on_failure(OnFailure::End)), ("goes", goes.clone())];
    for (name, wanted) in wanted {
        agree(&jobs[name][0], name, &wanted);
    }
    let socket = own[0].to_str().unwrap();
    let line = ["tenant", "--socket", socket, "constraints", "late", "--on-failure", "regroup=5s"];
    let told = deployment.harmonaize(&line).unwrap();
    assert!(told.contains("agreement 1") && told.contains("--on-failure regroup=5000000000ns"), "{told}");
    let mut events = jobs["ends"][0].client.events(None);
    events.read(Duration::ZERO).unwrap();

    deployment.agent(2).unwrap().signal(Signal::KILL).unwrap();
    for workers in jobs.values_mut() {
        drop(workers.pop());
        for error in at_all(workers, |worker| worker.sum(1, 1000, true, PATIENCE).unwrap_err()) {
            match error.downcast_ref() {
                Some(Error::Operation { status: Status::RankLost, .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    }
    // At once, and it is nobody's: the same name is a new job's.
    at_all(jobs.get_mut("ends").unwrap(), is_over);
    at_all(jobs.get_mut("ends").unwrap(), |worker| {
        worker.communicator = worker.client.join("ends", Rank(worker.rank), 2, PATIENCE).unwrap();
        worker.ranks = 2;
        worker.sum(2, 10_000, true, PATIENCE).unwrap();
    });
    // What is kept is nobody else's.
    let much = Constraints::new().min_busbw(56_000_000);
    let refused = others[0].client.propose("job", &much).unwrap();
    assert!(
        matches!(&refused, Negotiated::Refused { reasons, .. } if reasons[0].clause == Clause::Bandwidth)
    );
    at_all(jobs.get_mut("goes").unwrap(), goes_on);
    went_over(&jobs["goes"][0], "goes", &goes);

    // Members are told until when they are expected, and when that is over.
    let deadline = Instant::now() + PATIENCE;
    let (mut lost, mut ended) = (BTreeMap::new(), Vec::new());
    while ended.is_empty() {
        assert!(Instant::now() < deadline, "nobody was told of the end: {lost:?}");
        for event in events.read(PATIENCE).unwrap().events {
            match event.kind {
                EventKind::Failure { ranks, regroup_by_ns } => {
                    assert_eq!(ranks, [Rank(2)]);
                    lost.insert(event.communicator, (event.since_ns, regroup_by_ns));
                }
                EventKind::AgreementEnded { clauses } => ended.push((event.communicator, clauses)),
                _ => {}
            }
        }
    }
    assert_eq!(ended, [("late".to_owned(), vec![Clause::OnFailure])]);
    assert!(lost["ends"].1 == 0 && lost["goes"].1 > lost["late"].1, "{lost:?}");
    let given = Duration::from_nanos(lost["late"].1 - lost["late"].0);
    assert!(given >= late && given <= late + Duration::from_secs(1), "{given:?}");
    at_all(jobs.get_mut("late").unwrap(), is_over);
    deployment.end().unwrap();
}

/// An agent dies, and control at about the same time. Whatever it had heard and written by then, members go on as was agreed on.
#[test]
fn members_regroup_though_control_dies() {
    let with_store = |setup: &mut Setup| setup.control += "store = \"control.redb\"\n";
    let Some(mut deployment) = deploy(&star(5, "1Gbit/s"), with_store) else { return };
    let own = sockets(&deployment, "a");
    for (lost, pause) in [(2, 0), (3, 5), (4, 200)] {
        let name = format!("job{lost}");
        let mut workers = joined(&[own[0].clone(), own[1].clone(), own[lost].clone()], &name);
        let policy = OnFailure::Regroup { within: PATIENCE * 2 };
        let wanted = Constraints::new().on_failure(policy).min_busbw(10_000_000);
        agree(&workers[0], &name, &wanted);
        deployment.agent(lost).unwrap().signal(Signal::KILL).unwrap();
        // Somewhere within what control does about it.
        std::thread::sleep(Duration::from_millis(pause));
        deployment.control().unwrap().signal(Signal::KILL).unwrap();
        drop(workers.pop());
        at_all(&mut workers, |worker| worker.sum(1, 1000, true, PATIENCE).unwrap_err());
        deployment.start_control().unwrap();
        at_all(&mut workers, goes_on);
        went_over(&workers[0], &name, &wanted);
    }
    deployment.end().unwrap();
}
