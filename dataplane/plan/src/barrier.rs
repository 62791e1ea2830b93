//! Barrier by dissemination. In round k everybody notifies the one 2^k places on, and waits for the one 2^k places
//! back. Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.

use crate::builder::{Builder, peer};
use crate::plan::{Plan, PlanError};
use crate::program::{Part, Program, StepKind};

/// Empty messages, one each way in each of `ceil(log2(participants))` rounds.
pub(crate) fn program(plan: &Plan, position: u32) -> Result<Program, PlanError> {
    let participants = plan.participants();
    let mut builder = Builder::default();
    let mut distance = 1;
    while distance < participants {
        let to = plan.at(position, distance)?;
        let from = plan.at(position, participants - distance)?;
        builder.push(StepKind::Move, Vec::new(), vec![peer(to, Part::whole(0))]);
        builder.push(StepKind::Move, vec![peer(from, Part::whole(0))], Vec::new());
        distance = distance.saturating_mul(2);
    }
    builder.finish()
}
