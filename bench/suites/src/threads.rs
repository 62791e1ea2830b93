//! Two tenants on one host: what they move together with two threads of the engine, against one.

use crate::lab::{Lab, options};
use crate::row::{Case, Row};
use crate::steady::{Steady, common, finish, nanos};
use crate::suite::Request;
use anyhow::{Context, Result};
use harmonaize_testkit::clock::monotonic_ns;
use harmonaize_testkit::deployment::Tenant;
use harmonaize_testkit::workspace::Binaries;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const TENANTS: usize = 2;
/// Ranks of a tenant.
const RANKS: usize = 2;
const BYTES: u64 = 64 << 10;
/// Operations of a tenant at once, so that its thread always has something to do.
const IN_FLIGHT: u64 = 4;
/// Two threads must move so many times what one does.
const BAR: f64 = 1.6;
/// How long tenants may take to join, and rates to settle.
const JOIN: Duration = Duration::from_secs(3);
const WARM_UP: Duration = Duration::from_millis(500);
/// How long a job may take.
const LIMIT: Duration = Duration::from_secs(60);

/// The row: each round measures one thread, then two.
pub(crate) fn scale(request: &Request, binaries: &Binaries, stop: &Arc<AtomicBool>) -> Result<Vec<Row>> {
    let rounds = request.rounds();
    let window = Duration::from_secs(if request.smoke { 1 } else { 4 });
    let (mut one, mut two) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        eprint!("run {round}/{rounds}, two tenants on one host:");
        for (threads, rates) in [(1, &mut one), (2, &mut two)] {
            let rate = rate(threads, window, binaries, stop)? / 1e6;
            eprint!(" {threads} thread(s) {rate:.1} MB/s;");
            rates.push(rate);
        }
        eprintln!();
    }
    let what = "allreduce f32, two tenants on one host: MB/s of both with two threads";
    Ok(vec![Case::more("service", what, BAR).of(BYTES, RANKS).compare(&two, &one, "one thread")])
}

/// Bytes of a rank's tensors a second, of both tenants together.
fn rate(threads: usize, window: Duration, binaries: &Binaries, stop: &Arc<AtomicBool>) -> Result<f64> {
    let mut lab = Lab::build_with(1, "1Gbit/s", binaries.clone(), Arc::clone(stop), |mut setup| {
        setup.tenants.push(Tenant { name: "b".to_owned(), user: 3002 });
        setup.agent += &format!("[engine]\nthreads = {threads}\n");
        setup
    })?;
    let until = monotonic_ns()? + nanos(JOIN + window);
    let arguments = options(&[("--bytes", BYTES), ("--in-flight", IN_FLIGHT), ("--until-ns", until)]);
    let start = |tenant| lab.start_of(tenant, "steady", &[0; RANKS], &arguments);
    let jobs = (0..TENANTS).map(start).collect::<Result<_>>()?;
    let steady = finish(&mut lab, jobs, LIMIT)?;
    let interval = common(&steady, until, WARM_UP)?;
    lab.end().context("the lab did not end in order")?;
    Ok(steady.iter().map(|one: &Steady| one.rate(interval)).sum())
}
