//! Staggering: periodic jobs that share a link take turns on it. After Rajasekaran et al., "CASSINI: Network-aware job
//! scheduling in machine learning clusters", NSDI 2024: the rotation of circles.

use crate::conditions::Conditions;
use crate::plan::{Assignment, Job};
use crate::topology::Topology;
use crate::units::Nanos;

/// Hold the next operation of a communicator back, once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// Which communicator.
    pub communicator: u64,
    /// For how long.
    pub hold: Nanos,
    /// Why, in words.
    pub reason: String,
}

/// Which jobs to hold back so that those that share links take turns; none where nothing is gained by it.
pub fn stagger(
    topology: &Topology,
    conditions: &Conditions,
    jobs: &[Job],
    assignments: &[Assignment],
) -> Vec<Hold> {
    let _ = (topology, conditions, jobs, assignments);
    Vec::new()
}
