//! What operators' hands, cut networks and protection cost those who trust the provider: operations beside them, and control itself.

mod control;
mod operations;

use crate::lab::Lab;
use crate::part::{self, Outcome, Part};
use crate::row::{Better, Case};
use crate::suite::Request;
use anyhow::Result;
use harmonaize_testkit::deployment::Setup;
use harmonaize_testkit::workspace::Binaries;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// The suite's parts.
pub(crate) const PARTS: &[Part<Trust>] = &[
    ("cut", operations::cut),
    ("tenants", operations::tenants),
    ("protection", operations::protection),
    ("tls", control::tls),
    ("sessions", control::sessions),
    ("streams", control::streams),
];

/// What all parts need.
pub(crate) struct Trust {
    request: Request,
    binaries: Binaries,
    stop: Arc<AtomicBool>,
}

/// Runs the parts that were asked for.
pub(crate) fn run(request: Request, binaries: Binaries, stop: Arc<AtomicBool>) -> Outcome {
    let only = request.only.clone();
    part::run(&Trust { request, binaries, stop }, PARTS, &only)
}

impl Trust {
    /// How many rounds; one in a smoke run that does not say.
    fn rounds(&self) -> usize {
        if self.request.smoke { self.request.rounds_of((1, 1)) } else { self.request.rounds() }
    }

    /// So many seconds; fewer in a smoke run.
    fn seconds(&self, usual: u64, smoke: u64) -> Duration {
        Duration::from_secs(if self.request.smoke { smoke } else { usual })
    }

    /// So many hosts at 1 Gbit/s; `settings` may change how they are set up.
    fn lab(&self, hosts: usize, settings: impl FnOnce(&mut Setup)) -> Result<Lab> {
        Lab::build_with(hosts, "1Gbit/s", self.binaries.clone(), Arc::clone(&self.stop), |mut setup| {
            settings(&mut setup);
            setup
        })
    }
}

fn case(what: impl Into<String>, better: Better, bar: f64) -> Case {
    Case::new("trust", what.into(), better, bar)
}
