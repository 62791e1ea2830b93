//! What tenants say of their jobs: tasks are served in order, and a lie costs nobody else.

use super::fabric::Fabric;
use super::turns::{Job, one_spine, run};
use super::world::SECOND;
use harmonaize_abi::session::{Constraints, Hints, Refusal};
use harmonaize_abi::{Collective, CommunicatorId};
use harmonaize_server::state::{Fact, RateChange, Reason, RequestRefusal};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

fn shares(fabric: &Fabric, ids: &[u64]) -> Vec<u64> {
    let share = |id: &u64| fabric.epoch(*id).share.unwrap().0 / 1_000_000;
    ids.iter().map(share).collect()
}

fn described_hints(fabric: &Fabric, id: u64) -> String {
    fabric.state.queries(Duration::ZERO).plans(CommunicatorId(id)).unwrap().plans[0].hints.clone()
}

#[test]
fn what_measurements_contradict_is_dropped_and_said_so() {
    let mut fabric = one_spine(1);
    let mut jobs = [0, 2].map(|leader| Job::of("a", &mut fabric, leader, (60.0, 40.0, 10.0)));
    fabric.run(SECOND);
    let reduce = |bytes| Hints::new().expect(Collective::AllReduce, bytes);
    fabric.hint("a", "job0", &reduce(jobs[0].bytes()).period(MS * 300)).unwrap();
    fabric.hint("a", "job2", &reduce(jobs[1].bytes() * 3)).unwrap();
    run(&mut fabric, &mut jobs, 5);
    let [period, bytes] = [0, 1].map(|job: usize| described_hints(&fabric, jobs[job].id));
    assert!(period.contains("dropped: iterations take") && period.contains("not 300ms"), "{period}");
    assert!(bytes.contains("dropped: iterations have"), "{bytes}");
    let told = fabric.facts.iter().filter(|(_, fact)| matches!(fact, Fact::HintsDropped { .. }));
    assert_eq!(told.count(), 2);
    // What is true is found to be.
    fabric.hint("a", "job2", &reduce(jobs[1].bytes()).period(MS * 100)).unwrap();
    run(&mut fabric, &mut jobs, 5);
    assert!(
        described_hints(&fabric, jobs[1].id).contains("as was measured since"),
        "{}",
        described_hints(&fabric, jobs[1].id)
    );
    fabric.hint("a", "job2", &Hints::new()).unwrap();
    assert_eq!(described_hints(&fabric, jobs[1].id), "");
}

#[test]
fn tasks_are_served_in_the_tenants_order() {
    let mut fabric = Fabric::traced(2, 1);
    let mut ids = Vec::new();
    for (tenant, name) in [("a", "first"), ("a", "second"), ("b", "other")] {
        ids.push(fabric.form(tenant, name, &[0, 4]));
        fabric.run(SECOND * 3);
    }
    assert_eq!(shares(&fabric, &ids), [333, 333, 333]);
    fabric.hint("a", "first", &Hints::new().task_priority(1)).unwrap();
    fabric.run(SECOND * 3);
    assert_eq!(shares(&fabric, &ids), [583, 83, 333]);
    // Who gives way is held to it, by an epoch that goes on with all its links.
    let recipe = fabric.recipe_of(0, ids[1]);
    assert!(recipe.epoch > 1 && recipe.peers.iter().all(|peer| peer.rate_bps / 1_000_000 == 83));
    let decision = fabric.state.queries(Duration::ZERO).decisions().last().unwrap();
    assert!(
        decision
            .changes
            .iter()
            .all(|changed| matches!(changed.reason, Reason::Rates(RateChange::GivesWay(_))))
    );
    // Its own promises come before its own order.
    let wanted = Constraints::new().min_busbw(20_000_000);
    fabric.negotiate("a", "second", Some(&wanted)).unwrap().unwrap();
    fabric.run(SECOND * 3);
    let promised = shares(&fabric, &ids);
    assert!(promised[1] >= 180 && promised[2] >= 333, "{promised:?}");
    fabric.hint("a", "first", &Hints::new()).unwrap();
    fabric.negotiate("a", "second", Some(&Constraints::new())).unwrap().unwrap();
    fabric.run(SECOND * 3);
    assert_eq!(shares(&fabric, &ids), [333, 333, 333]);
    assert!(fabric.recipe_of(0, ids[1]).peers.iter().all(|peer| peer.rate_bps == 0));
}

#[test]
fn hints_of_others_nonsense_and_floods_are_refused() {
    let mut fabric = Fabric::traced(3, 1);
    fabric.form("a", "job", &[0, 4]);
    fabric.run(SECOND * 3);
    let hints = Hints::new().period(MS * 50);
    let refused = |fabric: &mut Fabric, tenant: &str, name: &str, hints: &Hints| {
        fabric.hint(tenant, name, hints).unwrap_err()
    };
    let senseless = |hints: &Hints| Refusal::from(RequestRefusal::Hints(hints.check().unwrap_err()));
    let of_others = fabric.hint("b", "job", &hints).unwrap_err();
    assert!(matches!(of_others, Refusal::NoCommunicator(_)), "{of_others}");
    assert_eq!(refused(&mut fabric, "nobody", "job", &hints), RequestRefusal::UnknownTenant.into());
    for wrong in [Hints::new().period(MS / 200), hints.clone().task_priority(200)] {
        assert_eq!(refused(&mut fabric, "a", "job", &wrong), senseless(&wrong));
    }
    (0..6).for_each(|_| fabric.hint("a", "job", &hints).unwrap());
    for _ in 0..100 {
        assert!(fabric.hint("a", "job", &hints).is_err());
    }
    // Proposals are counted apart.
    fabric.negotiate("a", "job", Some(&Constraints::new().weight(2))).unwrap().unwrap();
    fabric.run(SECOND * 61);
    fabric.hint("a", "job", &hints).unwrap();
    // They end with their communicator, and are in no store.
    let id = *fabric.ids().iter().next().unwrap();
    assert!(!described_hints(&fabric, id).is_empty());
    fabric.dissolve(id);
    assert!(fabric.state.queries(Duration::ZERO).plans(CommunicatorId(0)).unwrap().plans.is_empty());
}

/// A job of a tenant that gives no hints and one of a liar's share a spine. Whatever the liar states, and however often, the other does as
/// many iterations as without.
#[test]
fn a_lie_costs_only_the_liar() {
    for seed in 0..8 {
        let course = |lies: bool| {
            let mut fabric = one_spine(seed);
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let mut jobs: Vec<Job> = [("b", 0), ("a", 2)]
                .map(|(tenant, leader)| Job::of(tenant, &mut fabric, leader, (60.0, 50.0, 10.0)))
                .into();
            fabric.run(SECOND);
            for _ in 0..10 {
                if lies {
                    let mut hints = Hints::new()
                        .period(MS * 55 * rng.random_range(1..8))
                        .task_priority(rng.random_range(0..8));
                    for _ in 0..rng.random_range(0..3) {
                        hints = hints.expect(Collective::AllReduce, rng.random_range(1..100_000_000));
                    }
                    // What is too much is refused.
                    let _ = fabric.hint("a", "job2", &hints);
                }
                run(&mut fabric, &mut jobs, 6);
            }
            jobs[0].done()
        };
        let (honest, lying) = (course(false), course(true));
        assert!(lying as f64 >= honest as f64 * 0.98, "seed {seed}: iterations done {honest} {lying}");
    }
}
