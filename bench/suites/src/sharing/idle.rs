//! What communicators that do nothing cost an agent: its memory, and its time.

use super::Sharing;
use crate::row::{Case, Row};
use anyhow::{Context, Result};
use harmonaize_testkit::deployment::{Deployment, Setup, Tenant, socket};
use harmonaize_testkit::fabric::{Fabric, Host};
use harmonaize_testkit::process::Process;
use harmonaize_testkit::topology::{self, Topology};
use harmonaize_testkit::usage::{processor_time, resident_bytes};
use std::process::Command;
use std::time::{Duration, Instant};

/// Hosts, with a rank of each communicator.
const HOSTS: usize = 2;
const TENANTS: usize = 200;
/// Of each tenant.
const COMMUNICATORS: usize = 5;
/// Memory that one may take of an agent, in KiB.
const MEMORY: f64 = 256.0;
/// Of a core, what an agent may take that serves nobody's operation.
const CORE: f64 = 0.01;
/// How long all may take to join.
const JOIN: Duration = Duration::from_secs(300);
/// How often links at rest give signs of life, by the usual time-out of a peer, ms.
const EVERY: &str = "2500";
/// What was set up is over.
const QUIET: Duration = Duration::from_secs(3);
/// And links are at rest.
const IDLE_TIME: Duration = Duration::from_secs(12);

/// What a process takes of a core.
fn share_of_a_core(process: u32, window: Duration) -> Result<f64> {
    let (begun, spent) = (Instant::now(), processor_time(process)?);
    std::thread::sleep(window);
    Ok(processor_time(process)?.saturating_sub(spent).as_secs_f64() / begun.elapsed().as_secs_f64())
}

impl Sharing {
    /// Communicators of many tenants, between two hosts, that have met once and do nothing.
    pub(super) fn idle(&self) -> Result<Vec<Row>> {
        let (tenants, window) = if self.request.smoke { (20, 3) } else { (TENANTS, 20) };
        let (mut kibibytes, mut cores, mut least) = (Vec::new(), Vec::new(), Vec::new());
        for round in 1..=self.request.rounds() {
            let window = Duration::from_secs(window);
            let (memory, core) = self.of_idle(tenants, window)?;
            let alone = self.of_signs(tenants * COMMUNICATORS, window)?;
            eprintln!(
                "run {round}: {memory:.1} KiB a communicator, {core:.4} of a core; signs of life alone {alone:.4}"
            );
            kibibytes.push(memory);
            cores.push(core);
            least.push(alone);
        }
        let what = |figure: &str| {
            let count = tenants * COMMUNICATORS;
            format!("{count} idle communicators of {tenants} tenants, 2 hosts: {figure}")
        };
        let case = |figure: &str| Case::less("sharing", what(figure), 1.0).of(0, HOSTS);
        Ok(vec![
            case("KiB of an agent for each").limit(&kibibytes, MEMORY),
            case("of a core at an agent").limit(&cores, CORE),
            case("of a core at an agent").stated().compare(
                &cores,
                &least,
                "signs of life on as many connections",
            ),
        ])
    }

    /// What it takes of a core to give and read signs of life, and nothing else. There are so many connections between
    /// two hosts.
    fn of_signs(&self, connections: usize, window: Duration) -> Result<f64> {
        let fabric = Fabric::build(&Topology::parse(&topology::star(HOSTS, "10Gbit/s"))?)?;
        let address = |host: &Host| host.addresses.first().map(|address| format!("{address}:7777"));
        let first = fabric.hosts().first().and_then(address).context("no address")?;
        let start = |(host, way): (&Host, &str)| -> Result<Process> {
            let mut command = Command::new(self.binaries.path("beats")?);
            command.args([way, &first, "--every", EVERY, "--connections", &connections.to_string()]);
            Process::start(way, &mut command, &host.namespace, &host.folder.join("beats.log"))
        };
        let mut ends =
            fabric.hosts().iter().zip(["--listen", "--to"]).map(start).collect::<Result<Vec<_>>>()?;
        let deadline = Instant::now() + JOIN;
        for end in &mut ends {
            end.line_by(deadline, |line| line.ends_with("connections"))?;
        }
        std::thread::sleep(QUIET);
        share_of_a_core(ends.first().context("no process")?.id(), window)
    }

    /// What each takes of the first host's agent in KiB, and what they take of a core together.
    fn of_idle(&self, tenants: usize, window: Duration) -> Result<(f64, f64)> {
        let fabric = Fabric::build(&Topology::parse(&topology::star(HOSTS, "10Gbit/s"))?)?;
        let named = (0..tenants).map(|number| Tenant { name: format!("t{number}"), user: 0 });
        let named: Vec<Tenant> = named.collect();
        let mut deployment = Deployment::start(fabric, Setup::new(self.binaries.clone(), &named))?;
        let agent = deployment.agent(0)?.id();
        let before = resident_bytes(agent)?;
        let hosts = deployment.hosts().iter().enumerate();
        let start = |(rank, host): (usize, &Host)| -> Result<Process> {
            let mut command = Command::new(self.binaries.path("idle")?);
            command.args(["--rank", &rank.to_string(), "--ranks", &HOSTS.to_string()]);
            command.args(["--communicators", &COMMUNICATORS.to_string()]);
            command.args(named.iter().map(|tenant| socket(host, &tenant.name)));
            Process::start_here(&format!("rank {rank}"), &mut command, &host.folder.join("idle.log"))
        };
        let mut ranks = hosts.map(start).collect::<Result<Vec<_>>>()?;
        let deadline = Instant::now() + JOIN;
        for rank in &mut ranks {
            rank.line_by(deadline, |line| line.ends_with("communicators"))?;
        }
        std::thread::sleep(IDLE_TIME);
        let each = (resident_bytes(agent)?.saturating_sub(before)) as f64
            / 1024.0
            / (tenants * COMMUNICATORS) as f64;
        let core = share_of_a_core(agent, window)?;
        deployment.check()?;
        drop(ranks);
        deployment.end().context("the deployment did not end in order")?;
        Ok((each, core))
    }
}
