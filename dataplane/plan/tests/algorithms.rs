//! Every algorithm, for every number of ranks up to 64, in several groupings, passes the checker.

mod common;

use common::{Case, Grouping, RETENTIONS, Reach, requests};
use harmonaize_abi::{Collective, Rank};
use harmonaize_plan::{
    Access, Group, Local, MAX_SOURCES, Participant, Place, Plan, PlanError, Request, Retention, StepKind,
    algorithm, edges, program,
};

fn sweep(collective: Collective) {
    for ranks in 1..=64 {
        for grouping in Grouping::ALL {
            let plan = grouping.plan(ranks);
            for request in requests(ranks).into_iter().filter(|request| request.collective == collective) {
                for reach in Reach::ALL {
                    for retention in RETENTIONS.map(Some).into_iter().chain([None]) {
                        let case = Case { plan: plan.clone(), request, retention, reach };
                        if let Err(error) = case.check(&case.programs(), 1) {
                            panic!("{ranks} ranks {grouping:?} {request:?} {reach:?} {retention:?}: {error}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn every_allreduce_is_right() {
    sweep(Collective::AllReduce);
}

#[test]
fn every_alltoall_is_right() {
    sweep(Collective::AllToAll);
}

#[test]
fn every_broadcast_is_right() {
    sweep(Collective::Broadcast);
}

#[test]
fn every_barrier_is_right() {
    sweep(Collective::Barrier);
}
