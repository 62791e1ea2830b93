//! What communicators that do nothing cost an agent: its memory, and its time.

use super::Sharing;
use crate::processors::processor_time;
use crate::row::{Case, Row};
use anyhow::{Context, Result};
use harmonaize_testkit::deployment::{Deployment, Setup, Tenant, socket};
use harmonaize_testkit::fabric::{Fabric, Host};
use harmonaize_testkit::process::Process;
use harmonaize_testkit::topology::{self, Topology};
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
/// What was set up is over.
const QUIET: Duration = Duration::from_secs(3);

/// Resident memory of a process in KiB.
fn memory(process: u32) -> Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    Ok(line.split_whitespace().next().context("no figure")?.parse()?)
}

impl Sharing {
    /// Communicators of many tenants, between two hosts, that have met once and do nothing.
    pub(super) fn idle(&self) -> Result<Vec<Row>> {
        let (tenants, window) = if self.request.smoke { (20, 3) } else { (TENANTS, 20) };
        let (mut kibibytes, mut cores) = (Vec::new(), Vec::new());
        for round in 1..=self.request.rounds() {
            let (memory, core) = self.of_idle(tenants, Duration::from_secs(window))?;
            eprintln!("run {round}: {memory:.1} KiB a communicator, {core:.4} of a core");
            kibibytes.push(memory);
            cores.push(core);
        }
        let what = |figure: &str| {
            let count = tenants * COMMUNICATORS;
            format!("{count} idle communicators of {tenants} tenants, 2 hosts: {figure}")
        };
        let case = |figure: &str| Case::less("sharing", what(figure), 1.0).of(0, HOSTS);
        Ok(vec![
            case("KiB of an agent for each").limit(&kibibytes, MEMORY),
            case("of a core at an agent").limit(&cores, CORE),
        ])
    }

    /// What each takes of the first host's agent in KiB, and what they take of a core together.
    fn of_idle(&self, tenants: usize, window: Duration) -> Result<(f64, f64)> {
        let fabric = Fabric::build(&Topology::parse(&topology::star(HOSTS, "10Gbit/s"))?)?;
        let named = (0..tenants).map(|number| Tenant { name: format!("t{number}"), user: 0 });
        let named: Vec<Tenant> = named.collect();
        let mut deployment = Deployment::start(fabric, Setup::new(self.binaries.clone(), &named))?;
        let agent = deployment.agent(0)?.id();
        let before = memory(agent)?;
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
        std::thread::sleep(QUIET);
        let each = (memory(agent)? - before) / (tenants * COMMUNICATORS) as f64;
        let (begun, spent) = (Instant::now(), processor_time(agent)?);
        std::thread::sleep(window);
        let core =
            (processor_time(agent)?.saturating_sub(spent)).as_secs_f64() / begun.elapsed().as_secs_f64();
        deployment.check()?;
        drop(ranks);
        deployment.end().context("the deployment did not end in order")?;
        Ok((each, core))
    }
}
