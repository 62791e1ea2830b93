//! A thousand tenants who read events through one agent. Rows say how long after an event is made it is there, and what agent and
//! control keep in memory for them.

use super::Suite;
use crate::row::{Case, Row};
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::deployment::{Deployment, Setup, Tenant, socket};
use harmonaize_testkit::fabric::Fabric;
use harmonaize_testkit::process::Process;
use harmonaize_testkit::topology::{Topology, star};
use harmonaize_testkit::usage::resident_bytes;
use serde::Deserialize;
use std::process::Command;
use std::time::{Duration, Instant};

const TENANTS: usize = 1000;
/// Events of all tenants together, a second.
const RATE: usize = 100;
/// The most that an event may take, in milliseconds.
const P99_MS: f64 = 100.0;
/// Most memory of agent and of control, MiB: a stated limit, so that a leak shows.
const MEMORY_MIB: f64 = 512.0;
/// How long a thousand processes may take to attach and join.
const PATIENCE: Duration = Duration::from_secs(90);

/// What `subscribers` prints.
#[derive(Debug, Deserialize)]
struct DeliveryLatency {
    events: usize,
    p50_ms: f64,
    p99_ms: f64,
    most_ms: f64,
}

/// The causes are drains of the host on which all tenants are, and the drains' ends. One comes every so often that it makes [`RATE`]
/// events a second: each a thousand at once.
pub(super) fn subscribers(suite: &Suite) -> Result<Vec<Row>> {
    let (tenants, changes) = if suite.request.smoke { (50, 2) } else { (TENANTS, 6) };
    let pause = Duration::from_secs_f64(tenants as f64 / RATE as f64);
    let tenants: Vec<Tenant> =
        (0..tenants).map(|number| Tenant { name: format!("t{number}"), user: 0 }).collect();
    let fabric = Fabric::build(&Topology::parse(&star(1, "1Gbit/s"))?)?;
    let mut deployment = Deployment::start(fabric, Setup::new(suite.binaries.clone(), &tenants))?;
    let host = deployment.hosts().first().cloned().context("no host")?;
    let idle = memory(&mut deployment)?;
    let sockets: Vec<String> =
        tenants.iter().map(|tenant| socket(&host, &tenant.name).display().to_string()).collect();
    let list = host.folder.join("sockets");
    std::fs::write(&list, sockets.join("\n"))?;
    let seconds = pause.as_secs() * (changes + 1) + 3;
    let mut command = Command::new(suite.binaries.path("subscribers")?);
    command.arg("--sockets").arg(&list).args(["--seconds", &seconds.to_string()]);
    let mut readers =
        Process::start("subscribers", &mut command, &host.namespace, &host.folder.join("subscribers.log"))?;
    readers.line_by(Instant::now() + PATIENCE, |line| line == "ready")?;
    for change in 0..changes {
        suite.go_on()?;
        // At another moment within the second each time.
        std::thread::sleep(pause + Duration::from_millis(change * 130 % 700));
        let drain = ["drain", host.name.as_str()];
        let end = ["drain", host.name.as_str(), "--end"];
        deployment.harmonaize(if change % 2 == 0 { &drain } else { &end })?;
    }
    let line = readers.line_by(Instant::now() + PATIENCE, |line| line.starts_with('{'))?;
    let heard: DeliveryLatency = serde_json::from_str(&line)?;
    let [agent, control] = memory(&mut deployment)?;
    readers.succeed_by(Instant::now() + PATIENCE)?;
    let DeliveryLatency { events, p50_ms, p99_ms, most_ms } = heard;
    eprintln!(
        "{} tenants, {changes} changes: {events} events, p50 {p50_ms:.1} ms, p99 {p99_ms:.1} ms, at most {most_ms:.1} ms after their tick; \
         agent {:.0} MiB (idle {:.0}), control {:.0} MiB (idle {:.0})",
        tenants.len(),
        agent,
        idle[0],
        control,
        idle[1],
    );
    ensure!(
        events == tenants.len() * changes as usize,
        "{events} events of {} are there",
        tenants.len() as u64 * changes
    );
    let case = |case: &str| Case::less("cooperation", case, 1.0).of(0, tenants.len());
    Ok(vec![
        case("1,000 tenants, 100 events a second: p99 ms from tick to reader").limit(&[p99_ms], P99_MS),
        case("1,000 tenants: MiB of the agent").limit(&[agent], MEMORY_MIB),
        case("1,000 tenants: MiB of control").limit(&[control], MEMORY_MIB),
    ])
}

/// What agent and control have in memory, MiB.
fn memory(deployment: &mut Deployment) -> Result<[f64; 2]> {
    let ids = [deployment.agent(0)?.id(), deployment.control()?.id()];
    let mut found = [0.0; 2];
    for (found, id) in found.iter_mut().zip(ids) {
        *found = resident_bytes(id)? as f64 / f64::from(1 << 20);
    }
    Ok(found)
}
