//! The provider's programs on a fabric. Control is on the management network, an agent in each host, an aggregator on each machine for
//! one.

use crate::etcd::Member;
use crate::fabric::{Fabric, Host, make_folder};
use crate::process::Process;
use crate::workspace::{self, Binaries};
use anyhow::{Context, Result, bail, ensure};
use harmonaize_identity::{Authority, CONTROL, ETCD, Folder, Use, write_file};
use harmonaize_plan::Algorithm;
use serde_json::Value;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Where control listens, in its own namespace.
const CONTROL_PORT: u16 = 7100;
/// Where operators' tools connect to control, likewise.
const OPERATORS_PORT: u16 = 7101;
/// Where control serves its page, in its own namespace: on loopback, as it does by default.
const PAGE_PORT: u16 = 9479;
/// Where an agent listens for other agents, in its host's namespace.
const AGENT_PORT: u16 = 7200;
/// Where an aggregator takes datagrams, on its machine.
const AGGREGATOR_PORT: u16 = 7400;
/// Where a member of etcd listens for controls, and for other members, on the machine of its control.
const ETCD_PORTS: (u16, u16) = (7102, 7103);
/// The name of the operator who may do everything.
const OPERATOR: &str = "operator";
/// How long control and agents may take to be ready.
const READY: Duration = Duration::from_secs(20);

/// A tenant as the operator knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// Its name.
    pub name: String,
    /// The user that its processes run as, on every host.
    pub user: u32,
}

/// What to deploy.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The programs.
    pub binaries: Binaries,
    /// The tenants, on every host.
    pub tenants: Vec<Tenant>,
    /// The tenants' weights, in their order; 1 for those beyond.
    pub weights: Vec<u32>,
    /// More lines for control's configuration, for example `join_timeout = "2s"`.
    pub control: String,
    /// More lines for each agent's configuration; `{folder}` in them stands for the host's run folder.
    pub agent: String,
    /// More lines for each aggregator's configuration.
    pub aggregator: String,
    /// More lines for each tenant in each agent's configuration, for example `remote = true`.
    pub tenant: String,
    /// Tenants, and the algorithm that an operator chose for AllReduces of each.
    pub algorithms: Vec<(String, Algorithm)>,
    /// Whether each agent measures all links of its host: see [`Setup::measure_links`].
    measures_links: bool,
    /// How many hosts at the end of the topology have no agent.
    pub unmanaged_hosts: usize,
    /// Each of those has a control and a member of etcd, in place of the one control.
    pub replicated: bool,
}

impl Setup {
    /// The programs with their usual settings.
    pub fn new(binaries: Binaries, tenants: &[Tenant]) -> Self {
        let tenants = tenants.to_vec();
        let [control, agent, aggregator, tenant] = [const { String::new() }; 4];
        Self {
            binaries,
            tenants,
            weights: Vec::new(),
            control,
            agent,
            aggregator,
            tenant,
            algorithms: Vec::new(),
            measures_links: false,
            unmanaged_hosts: 0,
            replicated: false,
        }
    }
}

impl Setup {
    /// Has the agents measure what links of `rate` carry, and control plan by it. The driver of an emulated device knows no
    /// rate.
    pub fn measure(&mut self, rate: &str) {
        self.control += SOURCE_PORTS;
        self.agent += &format!(
            "[telemetry]\ninterfaces = [\"eth0\"]\ninterval = \"3ms\"\n[telemetry.rate]\neth0 = \"{rate}\"\n"
        );
    }

    /// The same for all links of a host, each of its own rate. Tools reach each agent's telemetry at [`telemetry_socket`].
    pub fn measure_links(&mut self) {
        self.control += SOURCE_PORTS;
        self.measures_links = true;
    }
}

/// Source ports for links, by which control chooses the routes of their connections.
const SOURCE_PORTS: &str = "source_ports = \"20000-29999\"\n";

/// Control and agents that run until this is dropped; the fabric goes with them.
#[derive(Debug)]
pub struct Deployment {
    // In this order they end: agents, aggregators, control, the fabric.
    agents: Vec<Process>,
    aggregators: Vec<Process>,
    control: Option<Process>,
    replicas: Vec<Replica>,
    setup: Setup,
    authority: Authority,
    fabric: Fabric,
}

/// A machine with a control and a member of etcd, which has a disk of its own.
#[derive(Debug)]
pub struct Replica {
    /// The machine.
    pub host: Host,
    /// Its member of etcd.
    pub etcd: Process,
    /// Its control.
    pub control: Process,
}

impl Replica {
    /// Fills the disk of its member of etcd, or makes it as free as it was.
    ///
    /// # Errors
    /// If files there cannot be written, or removed.
    pub fn fill_disk(&self, full: bool) -> Result<()> {
        let filler = etcd_disk(&self.host).join("filler");
        if !full {
            return remove(&filler);
        }
        let mut file =
            std::fs::File::create(&filler).with_context(|| format!("cannot make {}", filler.display()))?;
        let zeros = [0; 4096];
        while file.write_all(&zeros).is_ok() {}
        Ok(())
    }

    /// Has the clock by which its control tells the time of day differ from the machine's, by so many seconds.
    ///
    /// # Errors
    /// If the file that says so cannot be written.
    pub fn step_clock(&self, seconds: i64) -> Result<()> {
        write(&control_clock(&self.host), &format!("{seconds:+}"))
    }
}

/// Bytes of the disk of a member of etcd, which reserves two thirds of it at once for its log.
const ETCD_DISK: &str = "192m";

fn etcd_disk(host: &Host) -> PathBuf {
    host.folder.join("etcd").join("data")
}

fn control_clock(host: &Host) -> PathBuf {
    host.folder.join("control").join("clock")
}

/// Gives the member of etcd of a machine its disk.
fn mount_etcd_disk(host: &Host) -> Result<()> {
    let disk = etcd_disk(host);
    make_folder(&disk)?;
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", &format!("size={ETCD_DISK},mode=700"), "etcd"]).arg(disk);
    workspace::run(&mut mount)
}

/// The library by which a program's clock may step, of Debian's package faketime.
fn stepping_clock() -> Result<PathBuf> {
    let folders = std::fs::read_dir("/usr/lib")?.flatten();
    let found =
        folders.map(|folder| folder.path().join("faketime/libfaketimeMT.so.1")).find(|path| path.is_file());
    found.context("Debian's package faketime is not installed")
}

impl Deployment {
    /// Starts control and the agents, and waits until control listens and each tenant's socket is there.
    pub fn start(fabric: Fabric, setup: Setup) -> Result<Self> {
        let authority = Authority::create()?;
        certify(&fabric, &setup, &authority)?;
        let mut deployment = Self {
            agents: Vec::new(),
            aggregators: Vec::new(),
            control: None,
            replicas: Vec::new(),
            setup,
            authority,
            fabric,
        };
        if deployment.setup.replicated {
            deployment.start_replicas()?;
        } else {
            deployment.start_control()?;
        }
        // An agent that finds no control tries again only a second later.
        deployment.wait_until("control does not listen", |this| Ok(this.control_listens()?.then_some(())))?;
        for position in 0..deployment.fabric.aggregators().len() {
            deployment.start_aggregator(position)?;
        }
        for host in 0..deployment.hosts().len() {
            deployment.start_agent(host)?;
        }
        deployment.wait_until_ready()?;
        Ok(deployment)
    }

    /// Starts control, or starts it again: a running one is ended first.
    pub fn start_control(&mut self) -> Result<()> {
        self.control = None;
        let folder = control_folder(&self.fabric);
        make_folder(&folder)?;
        write(&folder.join("topology.toml"), &self.fabric.described()?)?;
        let config = folder.join("control.toml");
        write(&config, &control_config(self.fabric.control_address(), &self.setup, ""))?;
        let mut command = Command::new(self.setup.binaries.path("harmonaize-control")?);
        command.arg("--config").arg(&config).env("NO_COLOR", "1");
        self.control =
            Some(Process::start("control", &mut command, &self.fabric.control(), &folder.join("log"))?);
        Ok(())
    }

    /// The machines with a control and a member of etcd each.
    pub fn replicas(&mut self) -> &mut [Replica] {
        &mut self.replicas
    }

    fn start_replicas(&mut self) -> Result<()> {
        let members: Vec<Member> = self.members();
        for (host, member) in self.unmanaged().to_vec().into_iter().zip(&members) {
            mount_etcd_disk(&host)?;
            let etcd = member.start(&members, Some(&host.namespace))?;
            let control = self.start_replicas_control(&host)?;
            self.replicas.push(Replica { host, etcd, control });
        }
        Ok(())
    }

    /// Starts the control of a machine again; a running one is ended first.
    pub fn restart_replica(&mut self, position: usize) -> Result<()> {
        let replica = self.replicas.get_mut(position).context("there is no such replica")?;
        replica.control.end()?;
        let host = replica.host.clone();
        let started = self.start_replicas_control(&host)?;
        if let Some(replica) = self.replicas.get_mut(position) {
            replica.control = started;
        }
        Ok(())
    }

    /// Starts the member of etcd of a machine again; a running one is ended first.
    pub fn restart_etcd(&mut self, position: usize) -> Result<()> {
        let members = self.members();
        let replica = self.replicas.get_mut(position).context("there is no such replica")?;
        let member = members.get(position).context("there is no such member")?;
        replica.etcd.end()?;
        replica.etcd = member.start(&members, Some(&replica.host.namespace))?;
        Ok(())
    }

    /// Saves what the members of etcd have to a file, as an operator does.
    ///
    /// # Errors
    /// If no member answers, or the file cannot be written.
    pub fn save_etcd(&self, file: &Path) -> Result<()> {
        let (members, replica) = (self.members(), self.replicas.first().context("there is no replica")?);
        let member = members.first().context("there is no member")?;
        let control = Folder(tls(&replica.host.folder.join("control")));
        let file = file.to_str().context("the file's name is no text")?;
        let save = || member.etcdctl(Some(&control), &["snapshot", "save", file]);
        replica.host.namespace.enter(save)??;
        Ok(())
    }

    /// Ends all controls and members of etcd, makes the members' data of what [`Self::save_etcd`] saved, and starts them.
    ///
    /// # Errors
    /// If a member cannot be made of it, or a program does not start.
    pub fn restore_etcd(&mut self, file: &Path) -> Result<()> {
        for replica in &mut self.replicas {
            replica.control.end()?;
            replica.etcd.end()?;
        }
        let members = self.members();
        for member in &members {
            member.restore(&members, file)?;
        }
        let positions = 0..self.replicas.len();
        positions.clone().try_for_each(|position| self.restart_etcd(position))?;
        positions.into_iter().try_for_each(|position| self.restart_replica(position))
    }

    fn start_replicas_control(&self, host: &Host) -> Result<Process> {
        let folder = host.folder.join("control");
        make_folder(&folder)?;
        write(&folder.join("topology.toml"), &self.fabric.described()?)?;
        let etcd: Vec<String> = self.members().iter().map(|member| member.clients.to_string()).collect();
        let config = folder.join("control.toml");
        write(&config, &control_config(host.management, &self.setup, &format!("etcd = {etcd:?}\n")))?;
        let mut command = Command::new(self.setup.binaries.path("harmonaize-control")?);
        command.arg("--config").arg(&config).env("NO_COLOR", "1");
        let clock = control_clock(host);
        write(&clock, "+0")?;
        command.env("LD_PRELOAD", stepping_clock()?).env("FAKETIME_TIMESTAMP_FILE", clock);
        // It is looked at once a second; how time passes is not touched.
        command.env("FAKETIME_CACHE_DURATION", "1").env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        Process::start(
            &format!("control of {}", host.name),
            &mut command,
            &host.namespace,
            &folder.join("log"),
        )
    }

    fn members(&self) -> Vec<Member> {
        let member = |host: &Host| {
            let at = |port| SocketAddr::from((host.management, port));
            let folder = host.folder.join("etcd");
            let tls = Some(Folder(tls(&folder)));
            Member {
                name: host.name.clone(),
                clients: at(ETCD_PORTS.0),
                peers: at(ETCD_PORTS.1),
                folder,
                tls,
            }
        };
        self.unmanaged().iter().map(member).collect()
    }

    /// The hosts that have no agents.
    fn unmanaged(&self) -> &[Host] {
        self.fabric.hosts().get(self.hosts().len()..).unwrap_or_default()
    }

    /// Makes control's store of a copy, while control does not run. Its configuration must name one.
    pub fn restore_control(&self, copy: &Path) -> Result<()> {
        let mut command = Command::new(self.setup.binaries.path("harmonaize-control")?);
        command.arg("--config").arg(control_folder(&self.fabric).join("control.toml"));
        let output = command.arg("--restore").arg(copy).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    }

    /// Starts the agent of the host that is `position`-th, or starts it again: a running one is ended first.
    pub fn start_agent(&mut self, position: usize) -> Result<()> {
        let host = self.hosts().get(position).cloned();
        let host = &host.with_context(|| format!("there is no host number {position}"))?;
        if let Some(running) = self.agents.get_mut(position) {
            running.end()?;
        }
        for tenant in &self.setup.tenants {
            own_folder(&tenant_folder(host, &tenant.name), tenant.user)?;
            remove(&socket(host, &tenant.name))?;
        }
        let config = host.folder.join("agent.toml");
        let telemetry = self.telemetry_config(host);
        write(&config, &agent_config(&self.control_list(CONTROL_PORT), host, &self.setup, &telemetry)?)?;
        let mut command = Command::new(self.setup.binaries.path("harmonaize-agent")?);
        command.arg("--config").arg(&config).env("NO_COLOR", "1");
        let name = format!("agent of {}", host.name);
        let agent = Process::start(&name, &mut command, &host.namespace, &host.folder.join("log"))?;
        match self.agents.get_mut(position) {
            Some(slot) => *slot = agent,
            None => self.agents.push(agent),
        }
        Ok(())
    }

    /// Starts a successor of the agent of the host that is `position`-th, and waits until it has taken its place.
    ///
    /// # Errors
    /// If it has not, with what it says; the agent before is the host's then.
    pub fn upgrade_agent(&mut self, position: usize) -> Result<()> {
        let host = self.hosts().get(position).cloned();
        let host = &host.with_context(|| format!("there is no host number {position}"))?;
        let mut command = Command::new(self.setup.binaries.path("harmonaize-agent")?);
        command.arg("--config").arg(host.folder.join("agent.toml")).arg("--take-over").env("NO_COLOR", "1");
        self.succeed_agent(position, &mut command)
    }

    /// The same with this command.
    ///
    /// # Errors
    /// As of [`Deployment::upgrade_agent`].
    pub fn succeed_agent(&mut self, position: usize, command: &mut Command) -> Result<()> {
        let host = self.hosts().get(position).cloned();
        let host = &host.with_context(|| format!("there is no host number {position}"))?;
        let before = self.agents.get_mut(position).context("there is no agent to succeed")?;
        let log = host.folder.join(format!("log-after-{}", before.id()));
        let mut successor = Process::start(before.name(), command, &host.namespace, &log)?;
        let deadline = Instant::now() + READY;
        while before.status()?.is_none() {
            if let Some(status) = successor.status()? {
                bail!("the successor ended with {status}: {}", successor.log_tail(4096));
            }
            if Instant::now() > deadline {
                bail!(
                    "no hand-over within {READY:?}: {}\n{}",
                    before.log_tail(4096),
                    successor.log_tail(4096)
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        *before = successor;
        self.check()
    }

    /// Starts the aggregator that is `position`-th, or starts it again: a running one is ended first.
    pub fn start_aggregator(&mut self, position: usize) -> Result<()> {
        let machine = self.fabric.aggregators().get(position).cloned();
        let machine = &machine.with_context(|| format!("there is no aggregator number {position}"))?;
        if let Some(running) = self.aggregators.get_mut(position) {
            running.end()?;
        }
        let config = machine.folder.join("aggregator.toml");
        write(
            &config,
            &aggregator_config(&self.fabric, &self.control_list(CONTROL_PORT), machine, &self.setup)?,
        )?;
        let mut command = Command::new(self.setup.binaries.path("harmonaize-agent")?);
        command.args(["--role", "aggregator", "--config"]).arg(&config).env("NO_COLOR", "1");
        let log = machine.folder.join("log");
        let started = Process::start(&machine.name, &mut command, &machine.namespace, &log)?;
        match self.aggregators.get_mut(position) {
            Some(slot) => *slot = started,
            None => self.aggregators.push(started),
        }
        Ok(())
    }

    /// The process of the aggregator that is `position`-th in the topology file.
    pub fn aggregator(&mut self, position: usize) -> Result<&mut Process> {
        let found = self.aggregators.get_mut(position);
        found.with_context(|| format!("there is no aggregator number {position}"))
    }

    /// The hosts that have agents.
    pub fn hosts(&self) -> &[Host] {
        let hosts = self.fabric.hosts();
        hosts.get(..hosts.len().saturating_sub(self.setup.unmanaged_hosts)).unwrap_or_default()
    }

    /// The fabric that it runs on.
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// The programs that it starts.
    pub fn binaries(&self) -> &Binaries {
        &self.setup.binaries
    }

    /// What is started from now on is of these programs.
    pub fn set_binaries(&mut self, binaries: &Binaries) {
        self.setup.binaries = binaries.clone();
    }

    /// The tenants that it was started with.
    pub fn tenants(&self) -> &[Tenant] {
        &self.setup.tenants
    }

    /// Control's process.
    pub fn control(&mut self) -> Result<&mut Process> {
        self.control.as_mut().context("control has not been started")
    }

    /// The agent's process on the host that is `position`-th in the topology file.
    pub fn agent(&mut self, position: usize) -> Result<&mut Process> {
        self.agents.get_mut(position).with_context(|| format!("there is no host number {position}"))
    }

    /// Control's address on the management network.
    pub fn control_address(&self) -> SocketAddr {
        SocketAddr::from((self.fabric.control_address(), CONTROL_PORT))
    }

    /// Where operators' tools connect to control, on the management network.
    pub fn operators_address(&self) -> SocketAddr {
        SocketAddr::from((self.fabric.control_address(), OPERATORS_PORT))
    }

    /// Where control serves its page, in its own namespace.
    pub fn page_address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, PAGE_PORT))
    }

    /// What an agent's configuration says of the links of its host, where it is to measure them.
    fn telemetry_config(&self, host: &Host) -> String {
        if !self.setup.measures_links {
            return String::new();
        }
        let (topology, layout) = (self.fabric.topology(), self.fabric.layout());
        let named = |node: &usize| topology.nodes.get(*node).is_some_and(|node| node.name == host.name);
        let own = topology.hosts().find(named).into_iter().flat_map(|node| layout.ends_of(node));
        let links =
            own.filter_map(|(cable, end, _)| Some((end.device.as_str(), layout.cables.get(cable)?.rate)));
        telemetry_config(&telemetry_socket(host), &links.collect::<Vec<_>>())
    }

    /// The management addresses of machines with a control.
    fn controls(&self) -> Vec<Ipv4Addr> {
        match self.setup.replicated {
            true => self.unmanaged().iter().map(|host| host.management).collect(),
            false => vec![self.fabric.control_address()],
        }
    }

    /// Where controls listen, at this port each, as their clients are configured.
    fn control_list(&self, port: u16) -> Vec<String> {
        self.controls().into_iter().map(|address| SocketAddr::from((address, port)).to_string()).collect()
    }

    /// Who has signed the certificates that everybody got at the start.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Gives everybody a certificate of this authority in place of the one before; whom anybody trusts stays.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn certify(&self, authority: &Authority) -> Result<()> {
        certify(&self.fabric, &self.setup, authority)
    }

    /// Where an operator, control and the agents have their certificates, the agents in the order of their hosts.
    pub fn identities(&self) -> Vec<Folder> {
        let [operator, control] = [self.operator(), tls(&control_folder(&self.fabric))];
        let agents = self.hosts().iter().map(|host| tls(&host.folder));
        [operator, control].into_iter().chain(agents).map(Folder).collect()
    }

    /// The folder with the certificate of an operator who may do everything.
    pub fn operator(&self) -> PathBuf {
        tls(&control_folder(&self.fabric)).with_file_name(OPERATOR)
    }

    /// An error with the end of its log when control or an agent has ended. Aggregators may.
    pub fn check(&mut self) -> Result<()> {
        for process in self.control.iter_mut().chain(&mut self.agents) {
            if let Some(status) = process.status()? {
                bail!("{} ended with {status}; its last lines:\n{}", process.name(), process.log_tail(4096));
            }
        }
        Ok(())
    }

    /// Ends control and the agents, and returns the fabric.
    pub fn end(self) -> Result<Fabric> {
        let Self { agents, aggregators, control, replicas, fabric, .. } = self;
        let replicas = replicas.into_iter().flat_map(|replica| [replica.control, replica.etcd]);
        for mut process in agents.into_iter().chain(aggregators).chain(control).chain(replicas) {
            process.end()?;
        }
        Ok(fabric)
    }

    /// What `harmonaize status --json` says.
    pub fn status(&self) -> Result<Value> {
        self.ask(&["status"])
    }

    /// What a command of `harmonaize` says with `--json`.
    pub fn ask(&self, arguments: &[&str]) -> Result<Value> {
        let said = self.harmonaize(&[arguments, &["--json"]].concat())?;
        serde_json::from_str(&said)
            .with_context(|| format!("harmonaize {arguments:?} did not print JSON: {said}"))
    }

    /// At how many hosts agents serve a tenant that an operator has added.
    pub fn hosts_that_serve(&self, tenant: &str) -> Result<usize> {
        let known = self.ask(&["tenants"])?;
        let known = known.get("tenants").and_then(Value::as_array).context("no tenants")?;
        let named = known.iter().find(|one| one.get("name").is_some_and(|name| name == tenant));
        let at = named.and_then(|one| one.get("at")?.as_array());
        let serves = |one: &&Value| one.get("refused").is_some_and(|refused| refused == "");
        Ok(at.map_or(0, |at| at.iter().filter(serves).count()))
    }

    /// Runs `harmonaize` beside control, and returns what it printed.
    pub fn harmonaize(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(self.setup.binaries.path("harmonaize")?);
        command.env("HARMONAIZE_CONTROL", self.control_list(OPERATORS_PORT).join(","));
        command.arg("--tls").arg(self.operator()).args(arguments);
        let output = self.fabric.control().enter(|| command.stdin(Stdio::null()).output())??;
        if !output.status.success() {
            bail!("harmonaize {arguments:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        String::from_utf8(output.stdout).context("harmonaize printed what is no text")
    }

    /// Waits until all is ready, for twenty seconds at most. Control listens, every agent is connected to it and
    /// each tenant's socket is there.
    pub fn wait_until_ready(&mut self) -> Result<()> {
        self.wait_until("control does not listen", |this| Ok(this.control_listens()?.then_some(())))?;
        self.wait_until("an agent has not made its sockets", |this| {
            let hosts = this.hosts().iter();
            let mut sockets =
                hosts.flat_map(|host| this.setup.tenants.iter().map(|tenant| socket(host, &tenant.name)));
            Ok(sockets.all(|socket| socket.exists()).then_some(()))
        })?;
        self.wait_until("an agent is not connected to control", |this| {
            let status = this.status()?;
            let agents = status.get("agents").and_then(Value::as_array).context("status names no agents")?;
            let connected = |agent: &&Value| agent.get("connected").and_then(Value::as_bool) == Some(true);
            Ok((agents.iter().filter(connected).count() >= this.hosts().len()).then_some(()))
        })?;
        self.wait_until("an aggregator is not connected to control", |this| {
            if this.aggregators.is_empty() {
                return Ok(Some(()));
            }
            let fabric = this.ask(&["topology"])?;
            let known = fabric.get("aggregators").and_then(Value::as_array).context("no aggregators")?;
            let connected = |one: &&Value| one.get("connected").and_then(Value::as_bool) == Some(true);
            Ok((known.iter().filter(connected).count() >= this.aggregators.len()).then_some(()))
        })
    }

    /// Polls until `done` gives something, for twenty seconds at most, and as long as no program has ended.
    pub fn wait_until<T>(&mut self, wrong: &str, done: impl Fn(&Self) -> Result<Option<T>>) -> Result<T> {
        let deadline = Instant::now() + READY;
        loop {
            self.check()?;
            if let Some(value) = done(self)? {
                return Ok(value);
            }
            if Instant::now() > deadline {
                let controls =
                    self.control.iter().chain(self.replicas.iter().map(|replica| &replica.control));
                let programs = controls.chain(&self.agents).chain(&self.aggregators);
                let said: Vec<String> = programs
                    .map(|process| format!("{}:\n{}", process.name(), process.log_tail(2048)))
                    .collect();
                bail!("{wrong}, after {} s; last lines of\n{}", READY.as_secs(), said.join("\n"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn control_listens(&self) -> Result<bool> {
        let connect = |address| TcpStream::connect_timeout(&address, Duration::from_millis(200)).is_ok();
        // Agents and operators have listeners of their own, one of which is there first.
        let listens =
            |address| [CONTROL_PORT, OPERATORS_PORT].into_iter().all(|port| connect((address, port).into()));
        let addresses = self.controls();
        self.fabric.control().enter(|| addresses.into_iter().any(listens))
    }
}

/// The folder of a tenant on a host: its processes see it, and nothing else of the run folder.
pub fn tenant_folder(host: &Host, tenant: &str) -> PathBuf {
    host.folder.join(tenant)
}

/// The socket by which a tenant's processes on a host reach their agent.
pub fn socket(host: &Host, tenant: &str) -> PathBuf {
    tenant_folder(host, tenant).join("agent.sock")
}

/// The socket by which operators' tools reach an agent's telemetry, where it [measures its links](Setup::measure_links).
pub fn telemetry_socket(host: &Host) -> PathBuf {
    host.folder.join("telemetry.sock")
}

/// Telemetry of an agent: its interfaces with the bits a second of their links, whose drivers know none.
fn telemetry_config(socket: &Path, links: &[(&str, u64)]) -> String {
    let interfaces: Vec<&str> = links.iter().map(|(interface, _)| *interface).collect();
    let mut text = format!("[telemetry]\ninterfaces = {interfaces:?}\nsocket = {}\n", quoted(socket));
    text += "[telemetry.rate]\n";
    for (interface, rate) in links {
        text += &format!("{interface} = \"{rate}bit/s\"\n");
    }
    text
}

fn control_folder(fabric: &Fabric) -> PathBuf {
    fabric.folder().join("_control")
}

/// Where a program whose configuration is in `folder` has its certificate.
fn tls(folder: &Path) -> PathBuf {
    folder.join("tls")
}

/// Makes a certificate for everything that talks to control. Who trusts somebody already goes on trusting him alone.
fn certify(fabric: &Fabric, setup: &Setup, authority: &Authority) -> Result<()> {
    let give = |name: &str, purpose, folder: PathBuf| -> Result<()> {
        let folder = Folder(folder);
        for (path, text, mode) in authority.issue(name, purpose)?.files(&folder) {
            if path != folder.authorities() || !path.exists() {
                write_file(&path, text.as_bytes(), mode)?;
            }
        }
        Ok(())
    };
    let control = tls(&control_folder(fabric));
    give(OPERATOR, Use::Session, control.with_file_name(OPERATOR))?;
    give(CONTROL, Use::Control, control)?;
    for machine in fabric.hosts().iter().chain(fabric.aggregators()) {
        give(&machine.name, Use::Session, tls(&machine.folder))?;
    }
    if setup.replicated {
        for host in fabric.hosts().iter().rev().take(setup.unmanaged_hosts) {
            give(CONTROL, Use::Control, tls(&host.folder.join("control")))?;
            give(ETCD, Use::Etcd(host.management.into()), tls(&host.folder.join("etcd")))?;
        }
    }
    Ok(())
}

fn own_folder(folder: &Path, user: u32) -> Result<()> {
    use std::os::unix::fs::{PermissionsExt, chown};
    make_folder(folder)?;
    chown(folder, Some(0), Some(user))?;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o750))?;
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn control_config(address: Ipv4Addr, setup: &Setup, store: &str) -> String {
    let mut text = format!(
        "listen = \"{address}:{CONTROL_PORT}\"\nlisten_operators = \"{address}:{OPERATORS_PORT}\"\ntls = \"tls\"\ntopology = \"topology.toml\"\n{store}{}\n\n[[operator]]\nname = \"{OPERATOR}\"\nrole = \"admin\"\n",
        setup.control
    );
    let weights = setup.weights.iter().copied().chain(std::iter::repeat(1));
    for (tenant, weight) in setup.tenants.iter().zip(weights) {
        text += &format!("\n[[tenant]]\nname = \"{}\"\nweight = {weight}\n", tenant.name);
    }
    for (tenant, algorithm) in &setup.algorithms {
        text += &format!(
            "\n[[algorithm]]\ntenant = \"{tenant}\"\ncollective = \"allreduce\"\nalgorithm = \"{algorithm}\"\n"
        );
    }
    text
}

fn agent_config(controls: &[String], host: &Host, setup: &Setup, telemetry: &str) -> Result<String> {
    let address = host.addresses.first().with_context(|| format!("{} has no address", host.name))?;
    let mut text = format!(
        "host = \"{}\"\ncontrol = {controls:?}\ntls = \"tls\"\nlisten = \"{address}:{AGENT_PORT}\"\n{}\n{telemetry}",
        host.name,
        setup.agent.replace("{folder}", &host.folder.to_string_lossy())
    );
    for tenant in &setup.tenants {
        let socket = quoted(&socket(host, &tenant.name));
        text += &format!(
            "\n[[tenant]]\nname = \"{}\"\nsocket = {socket}\nuids = [{}]\n{}\n",
            tenant.name, tenant.user, setup.tenant
        );
    }
    Ok(text)
}

fn aggregator_config(fabric: &Fabric, controls: &[String], machine: &Host, setup: &Setup) -> Result<String> {
    let address = machine.addresses.first().with_context(|| format!("{} has no address", machine.name))?;
    Ok(format!(
        "name = \"{}\"\ncontrol = {controls:?}\ntls = \"tls\"\nlisten = \"{address}:{AGGREGATOR_PORT}\"\nmtu = {}\n{}\n",
        machine.name,
        fabric.topology().mtu,
        setup.aggregator
    ))
}

/// A path as a TOML string.
fn quoted(path: &Path) -> String {
    toml::Value::String(path.to_string_lossy().into_owned()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_link_has_its_rate() {
        let links = [("eth0", 1_000_000_000), ("eth1", 25_000_000)];
        let text = telemetry_config(Path::new("/run/h0/telemetry.sock"), &links);
        let table: toml::Table = text.parse().unwrap();
        let telemetry = &table["telemetry"];
        assert_eq!(telemetry["interfaces"].as_array().unwrap().len(), 2);
        assert_eq!(telemetry["socket"].as_str(), Some("/run/h0/telemetry.sock"));
        assert_eq!(telemetry["rate"]["eth1"].as_str(), Some("25000000bit/s"));
    }
}
