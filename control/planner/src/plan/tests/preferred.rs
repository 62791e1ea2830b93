//! Tasks of one tenant: who goes first, who gives way, and that nobody else's plan changes whatever a tenant says.

use super::super::*;
use super::properties::{damaged, jobs};
use super::world::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn tasks(of: &[(usize, u8)]) -> Vec<Task> {
    of.iter().map(|(tenant, priority)| Task { tenant: *tenant, priority: *priority }).collect()
}

#[test]
fn priority_takes_only_from_the_same_tenant() {
    let topology = leaf_spine(2, 1, 3, 1000, 900);
    let conditions = Conditions::clear(&topology);
    let pairs = [job(0, &[0, 3], 1), job(1, &[1, 4], 1), job(2, &[2, 5], 1)];
    let planned = |jobs: &[Job], of: &[(usize, u8)]| {
        let mut plan = planned(&request(&topology, &conditions, jobs));
        apply_priorities(&topology, &conditions, jobs, &tasks(of), &mut plan.assignments);
        plan
    };
    assert_eq!(shares(&planned(&pairs, &[(0, 0), (0, 0), (1, 0)])), [300, 300, 300]);
    assert_eq!(shares(&planned(&pairs, &[(0, 7), (2, 3), (1, 0)])), [300, 300, 300], "alone with its own");
    let plan = planned(&pairs, &[(0, 2), (0, 1), (1, 7)]);
    assert_eq!((shares(&plan), limits(&plan)), (vec![525, 75, 300], vec![None, Some(75), None]));
    let gives = plan.assignments.iter().map(|part| part.yields);
    assert_eq!(gives.collect::<Vec<_>>(), [false, true, false]);
    assert_eq!(plan.assignments[1].time.0 / plan.assignments[2].time.0, 4);
    // What was promised stays, and of three the last gives first.
    let promised = [pairs[0].clone(), Job { guaranteed: mbit(200), ..pairs[1].clone() }, pairs[2].clone()];
    assert_eq!(shares(&planned(&promised, &[(0, 2), (0, 1), (0, 0)])), [625, 200, 75]);
    // Who takes turns is left to that.
    let rhythm = IterationPattern { period: Nanos(100), busy: Nanos(90), ..IterationPattern::default() };
    let periodic =
        [pairs[0].clone(), Job { iteration_pattern: Some(rhythm), ..pairs[1].clone() }, pairs[2].clone()];
    let before = planned(&periodic, &[(0, 0), (0, 0), (1, 0)]);
    assert_eq!(shares(&planned(&periodic, &[(0, 2), (0, 1), (1, 0)])), shares(&before));
}

#[test]
fn false_priorities_cost_only_their_tenant() {
    let mut moved = 0;
    for seed in 0..300 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (leaves, spines, each) = (rng.random_range(1..4), rng.random_range(1..3), rng.random_range(2..5));
        let topology = leaf_spine(leaves, spines, each, 1000, [300, 1000][rng.random_range(0..2)]);
        let conditions = damaged(&mut rng, &topology, 0.1);
        let mut jobs = jobs(&mut rng, leaves * each);
        for job in &mut jobs {
            job.guaranteed = mbit(if rng.random_bool(0.2) { rng.random_range(1..200) } else { 0 });
        }
        let policy = Policy { search_budget: 200_000, ..Policy::default() };
        let request = Request { policy, ..request(&topology, &conditions, &jobs) };
        let before = planned(&request);
        // Tenant 0 says whatever it likes; others do not.
        let said = |rng: &mut ChaCha8Rng| match rng.random_range(0..3) {
            0 => Task { tenant: rng.random_range(1..3), priority: 0 },
            _ => Task { tenant: 0, priority: rng.random_range(0..8) },
        };
        let tasks: Vec<Task> = jobs.iter().map(|_| said(&mut rng)).collect();
        let mut after = before.clone();
        apply_priorities(&topology, &conditions, &jobs, &tasks, &mut after.assignments);
        let highest = tasks.iter().filter(|task| task.tenant == 0).map(|task| task.priority).max();
        for (((job, task), was), is) in
            jobs.iter().zip(&tasks).zip(&before.assignments).zip(&after.assignments)
        {
            if task.tenant != 0 {
                assert_eq!(was, is, "seed {seed}: another's plan has changed");
                continue;
            }
            assert_eq!((&was.order, &was.edges, was.changed), (&is.order, &is.edges, is.changed));
            let least = was.share.0.min(job.guaranteed.0) as f64;
            assert!(is.share.0 as f64 >= least * 0.999 - 2.0, "seed {seed}: a promise is not kept");
            if Some(task.priority) == highest {
                assert!(is.share.0 as f64 >= was.share.0 as f64 * 0.998 - 2.0, "seed {seed}: {was:?} {is:?}");
            }
            moved += u32::from(is.share != was.share);
        }
        // No link is to carry more than it has.
        assert_eq!(check(&request, &after), Ok(()), "seed {seed}");
    }
    assert!(moved > 50, "{moved}: it is not only because nothing happens");
}
