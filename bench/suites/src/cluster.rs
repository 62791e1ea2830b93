//! Control and agents on the hosts of a testbed, and ranks that run collectives through them.

use super::lab::Measured;
use super::launcher::Remote;
use super::testbed::{Host, Testbed};
use anyhow::{Context, Result, bail, ensure};
use harmonaize_identity::{Authority, CONTROL, Folder, Use};
use harmonaize_testkit::topology::star;
use serde::Deserialize;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long control and agents may take to come up, and ranks to join.
const START: Duration = Duration::from_secs(60);

/// The aggregator's name, and the rate of its link: more than all hosts' together.
const AGGREGATOR: &str = "agg0";
const WIDE: &str = "1000Gbit/s";

/// What carries the bytes between agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carrier {
    /// RDMA.
    Verbs,
    /// TCP.
    Tcp,
    /// RDMA, with an aggregator on the first host.
    Aggregated,
}

impl Carrier {
    fn as_str(self) -> &'static str {
        match self {
            Self::Verbs => "verbs",
            Self::Tcp => "tcp",
            Self::Aggregated => "aggregated",
        }
    }

    /// Whether agents have their devices.
    fn is_rdma(self) -> bool {
        self != Self::Tcp
    }
}

/// Running control and agents; the drop ends them.
#[derive(Debug)]
pub struct Cluster {
    /// In this order they end.
    agents: Vec<Remote>,
    _aggregator: Option<Remote>,
    _control: Remote,
    testbed: Testbed,
    carrier: Carrier,
    jobs: usize,
}

/// Ranks that run, one a host.
#[derive(Debug)]
pub struct Ranks(Vec<Remote>);

/// Where programs stand on the hosts.
pub fn programs(testbed: &Testbed) -> PathBuf {
    testbed.programs.clone().unwrap_or_else(|| testbed.folder.join("bin"))
}

/// The first of the TCP ports that perftest leaves free.
fn ports(testbed: &Testbed, carrier: Carrier) -> u16 {
    let more = match carrier {
        Carrier::Verbs => 100,
        Carrier::Tcp => 102,
        Carrier::Aggregated => 104,
    };
    testbed.ports.saturating_add(more)
}

/// A host's device and port, and the line that names its GID, if one was given.
fn device(host: &Host) -> (String, String) {
    let gid = host.gid_index.map_or(String::new(), |index| format!("gid_index = {index}\n"));
    (format!("{}:{}", host.device, host.port), gid)
}

/// An aggregator's configuration. It says that it is fast: whether it pays is what is measured.
fn aggregator(host: &Host, control: &SocketAddr, port: u16) -> String {
    let (listen, (device, gid)) = (SocketAddr::from((host.address, port)), device(host));
    format!(
        "name = \"{AGGREGATOR}\"\ncontrol = \"{control}\"\ntls = \"tls-{AGGREGATOR}\"\nlisten = \"{listen}\"\n\
         pool = \"4MiB\"\nmtu = 4200\npackets_per_second = 10_000_000\nmetrics = \"127.0.0.1:{port}\"\n\
         [verbs]\ndevices = [\"{device}\"]\n{gid}"
    )
}

/// Gives a host the certificate of a name, in the folder `tls-NAME` beside its configuration.
fn certify(authority: &Authority, host: &Host, folder: &Path, name: &str, purpose: Use) -> Result<()> {
    let folder = Folder(folder.join(format!("tls-{name}")));
    let issued = authority.issue(name, purpose)?;
    let mut files = issued.files(&folder).into_iter();
    files.try_for_each(|(path, text, mode)| host.launcher.write(&path, text.as_bytes(), mode))
}

impl Cluster {
    /// Starts control on the first host and an agent on each. Agents give up a silent peer after `peer_timeout`.
    pub fn start(testbed: &Testbed, carrier: Carrier, peer_timeout: Duration) -> Result<Self> {
        let port = ports(testbed, carrier);
        let control = SocketAddr::from((testbed.control, port));
        let folder = testbed.folder.join(carrier.as_str());
        let first = testbed.hosts.first().context("no host")?;
        let text = format!(
            "listen = \"{control}\"\ntls = \"tls-control\"\ntopology = \"topology.toml\"\n[[tenant]]\nname = \"a\"\n"
        );
        let mut topology = star(testbed.hosts.len(), &testbed.rate);
        for (index, host) in testbed.hosts.iter().enumerate() {
            topology = topology.replace(&format!("\"h{index}\""), &format!("\"host {}\"", host.name));
        }
        let mut topology = topology.replace("\"host ", "\"");
        if carrier == Carrier::Aggregated {
            topology +=
                &format!("[[aggregator]]\nname = \"{AGGREGATOR}\"\nswitch = \"s0\"\nrate = \"{WIDE}\"\n");
        }
        let authority = Authority::create()?;
        certify(&authority, first, &folder, CONTROL, Use::Control)?;
        first.launcher.write(&folder.join("topology.toml"), topology.as_bytes(), 0o644)?;
        first.launcher.write(&folder.join("control.toml"), text.as_bytes(), 0o644)?;
        let deadline = Instant::now() + START;
        let start = |host: &Host, name: &str, role: &[&str], config: &str| {
            let program = programs(testbed).join(name).display().to_string();
            let config = folder.join(config).display().to_string();
            let mut words = vec!["env", "NO_COLOR=1", &program];
            words.extend(role);
            words.extend(["--config", &config]);
            host.launcher.start(&format!("{name} on {}", host.name), &words)
        };
        let mut running = start(first, "harmonaize-control", &[], "control.toml")?;
        running.line(deadline, |line| line.contains("control serves"))?;
        let aggregator = if carrier == Carrier::Aggregated {
            certify(&authority, first, &folder, AGGREGATOR, Use::Session)?;
            let text = aggregator(first, &control, port + 2);
            first.launcher.write(&folder.join("aggregator.toml"), text.as_bytes(), 0o644)?;
            let role = ["--role", "aggregator"];
            let mut started = start(first, "harmonaize-agent", &role, "aggregator.toml")?;
            started.line(deadline, |line| line.contains("session with control is open"))?;
            Some(started)
        } else {
            None
        };
        let mut cluster = Self {
            agents: Vec::new(),
            _aggregator: aggregator,
            _control: running,
            testbed: testbed.clone(),
            carrier,
            jobs: 0,
        };
        for host in &testbed.hosts {
            let user = host.launcher.shell("id -u", &[], b"")?;
            let config = cluster.agent(host, &control, user.trim(), peer_timeout)?;
            certify(&authority, host, &folder, &host.name, Use::Session)?;
            let name = format!("agent-{}.toml", host.name);
            host.launcher.write(&folder.join(&name), config.as_bytes(), 0o644)?;
            cluster.agents.push(start(host, "harmonaize-agent", &[], &name)?);
        }
        for agent in &mut cluster.agents {
            agent.line(deadline, |line| line.contains("session with control is open"))?;
        }
        Ok(cluster)
    }

    fn agent(&self, host: &Host, control: &SocketAddr, user: &str, peer_timeout: Duration) -> Result<String> {
        let listen = SocketAddr::from((host.address, ports(&self.testbed, self.carrier) + 1));
        let mut text = format!(
            "host = \"{}\"\ncontrol = \"{control}\"\ntls = \"tls-{}\"\nlisten = \"{listen}\"\npeer_timeout = \"{}ms\"\nconnect_timeout = \"30s\"\n",
            host.name,
            host.name,
            peer_timeout.as_millis()
        );
        let (device, gid) = device(host);
        if self.carrier.is_rdma() {
            write!(text, "[verbs]\ndevices = [\"{device}\"]\n{gid}[rdma]\ndevice = \"{device}\"\n{gid}")?;
        }
        let rdma = if self.carrier.is_rdma() { "rdma = true\n" } else { "" };
        write!(
            text,
            "[[tenant]]\nname = \"a\"\nsocket = {:?}\nuids = [{user}]\nremote = true\n{rdma}",
            self.socket(host)
        )?;
        Ok(text)
    }

    fn socket(&self, host: &Host) -> PathBuf {
        self.testbed.folder.join(self.carrier.as_str()).join(format!("{}.sock", host.name))
    }

    /// Starts a rank on each host.
    pub fn ranks(&mut self, arguments: &[&str]) -> Result<Ranks> {
        self.jobs += 1;
        let job = format!("job{}", self.jobs);
        let program = programs(&self.testbed).join("collective").display().to_string();
        let count = self.testbed.hosts.len().to_string();
        let mut ranks = Vec::new();
        for (rank, host) in self.testbed.hosts.iter().enumerate() {
            let (number, socket) = (rank.to_string(), self.socket(host).display().to_string());
            let mut words = vec![program.as_str(), "--socket", &socket, "--rank", &number, "--ranks", &count];
            words.extend(["--name", &job, "--json"]);
            words.extend(arguments);
            if arguments.contains(&"rdma") {
                words.extend(["--device", &host.device]);
            }
            ranks.push(host.launcher.start(&format!("rank {rank} on {}", host.name), &words)?);
        }
        Ok(Ranks(ranks))
    }

    /// Runs collectives on all hosts, and returns what the first rank measured for one size.
    pub fn run(&mut self, arguments: &[&str], limit: Duration) -> Result<Measured> {
        let deadline = Instant::now() + limit;
        let Ranks(mut ranks) = self.ranks(arguments)?;
        let mut printed = Vec::new();
        for rank in &mut ranks {
            printed.extend(rank.finish(deadline)?);
        }
        let line =
            printed.iter().find(|line| line.starts_with("{\"bytes\"")).context("no rank told its times")?;
        Ok(serde_json::from_str(line)?)
    }

    /// Kills the agent of the last host, and says when that was asked.
    pub fn kill_last(&mut self) -> Result<Instant> {
        let agent = self.agents.last_mut().context("no agent")?;
        Ok(agent.kill())
    }
}

impl Ranks {
    /// Waits until all ranks have run an operation.
    pub fn begun(&mut self) -> Result<()> {
        let deadline = Instant::now() + START;
        self.0
            .iter_mut()
            .try_for_each(|rank| rank.line(deadline, |line| line.contains("\"begun\"")).map(drop))
    }

    /// Waits until every rank, but `spared` of the last, has learned of a failure. Returns how long after `since` the last
    /// one did.
    pub fn lost(mut self, since: Instant, spared: usize, limit: Duration) -> Result<Duration> {
        #[derive(Deserialize)]
        struct Lost {
            lost: String,
        }
        let (deadline, count) = (Instant::now() + limit, self.0.len().saturating_sub(spared));
        let mut latest = Duration::ZERO;
        for rank in self.0.iter_mut().take(count) {
            let (when, line) = rank.line(deadline, |line| line.contains("\"lost\""))?;
            let Lost { lost } =
                serde_json::from_str(&line).with_context(|| format!("a strange line: {line}"))?;
            ensure!(!lost.is_empty(), "an error without words");
            eprintln!("  after {:.2} s: {lost}", when.saturating_duration_since(since).as_secs_f64());
            latest = latest.max(when.saturating_duration_since(since));
        }
        if count == 0 {
            bail!("no rank is left to be told");
        }
        Ok(latest)
    }
}
