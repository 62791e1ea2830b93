//! The provider's programs on a fabric: control on the management network, an agent in each host.

use crate::fabric::{Fabric, Host, make_folder};
use crate::process::Process;
use crate::workspace::Binaries;
use anyhow::{Context, Result, bail};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Where control listens, in its own namespace.
const CONTROL_PORT: u16 = 7100;
/// Where an agent listens for other agents, in its host's namespace.
const AGENT_PORT: u16 = 7200;
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

/// Control and agents that run until this is dropped; the fabric goes with them.
#[derive(Debug)]
pub struct Deployment {
    agents: Vec<Process>,
    control: Process,
    tenants: Vec<Tenant>,
    fabric: Fabric,
}

impl Deployment {
    /// Starts control and an agent on each host, and waits until control accepts connections and each tenant's socket is there.
    pub fn start(fabric: Fabric, topology: &Path, binaries: &Binaries, tenants: &[Tenant]) -> Result<Self> {
        let folder = fabric.folder().join("_control");
        make_folder(&folder)?;
        let config = folder.join("control.toml");
        write(&config, &control_config(&fabric, topology, tenants)?)?;
        let mut command = Command::new(binaries.path("harmonaize-control")?);
        command.arg("--config").arg(&config);
        let control = Process::start("control", &mut command, &fabric.control(), &folder.join("log"))?;
        let mut agents = Vec::new();
        for host in fabric.hosts() {
            for tenant in tenants {
                own_folder(&tenant_folder(host, &tenant.name), tenant.user)?;
            }
            let config = host.folder.join("agent.toml");
            write(&config, &agent_config(&fabric, host, tenants)?)?;
            let mut command = Command::new(binaries.path("harmonaize-agent")?);
            command.arg("--config").arg(&config);
            let name = format!("agent of {}", host.name);
            agents.push(Process::start(&name, &mut command, &host.namespace, &host.folder.join("log"))?);
        }
        let mut deployment = Self { agents, control, tenants: tenants.to_vec(), fabric };
        deployment.wait_until_ready()?;
        Ok(deployment)
    }

    /// The fabric that it runs on.
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// The tenants that it was started with.
    pub fn tenants(&self) -> &[Tenant] {
        &self.tenants
    }

    /// Control's process.
    pub fn control(&mut self) -> &mut Process {
        &mut self.control
    }

    /// The agent's process on the host that is `position`-th in the topology file.
    pub fn agent(&mut self, position: usize) -> Result<&mut Process> {
        self.agents.get_mut(position).with_context(|| format!("there is no host number {position}"))
    }

    /// Control's address on the management network.
    pub fn control_address(&self) -> SocketAddr {
        control_address(&self.fabric)
    }

    /// An error with the end of its log when control or an agent has ended.
    pub fn check(&mut self) -> Result<()> {
        for process in std::iter::once(&mut self.control).chain(&mut self.agents) {
            if let Some(status) = process.status()? {
                bail!("{} ended with {status}; its last lines:\n{}", process.name(), process.said(4096));
            }
        }
        Ok(())
    }

    /// Ends control and the agents, and returns the fabric.
    pub fn end(self) -> Result<Fabric> {
        let Self { agents, control, fabric, .. } = self;
        for mut process in agents.into_iter().chain([control]) {
            process.end()?;
        }
        Ok(fabric)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + READY;
        loop {
            self.check()?;
            let address = self.control_address();
            let listens = self.fabric.control().enter(|| {
                std::net::TcpStream::connect_timeout(&address, Duration::from_millis(200)).is_ok()
            })?;
            let missing = self.fabric.hosts().iter().find_map(|host| {
                self.tenants.iter().map(|tenant| socket(host, &tenant.name)).find(|socket| !socket.exists())
            });
            match (listens, missing) {
                (true, None) => return Ok(()),
                (false, _) if Instant::now() > deadline => {
                    bail!("control does not listen; its last lines:\n{}", self.control.said(4096))
                }
                (true, Some(socket)) if Instant::now() > deadline => {
                    bail!("no agent has made {}; their logs are beside it", socket.display())
                }
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
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

fn control_address(fabric: &Fabric) -> SocketAddr {
    SocketAddr::from((fabric.control_address(), CONTROL_PORT))
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

fn control_config(fabric: &Fabric, topology: &Path, tenants: &[Tenant]) -> Result<String> {
    let topology = topology.canonicalize().with_context(|| format!("cannot find {}", topology.display()))?;
    let mut text = format!("listen = \"{}\"\ntopology = {}\n", control_address(fabric), quoted(&topology));
    for tenant in tenants {
        text += &format!("\n[[tenant]]\nname = \"{}\"\n", tenant.name);
    }
    Ok(text)
}

fn agent_config(fabric: &Fabric, host: &Host, tenants: &[Tenant]) -> Result<String> {
    let address = host.addresses.first().with_context(|| format!("{} has no address", host.name))?;
    let mut text = format!(
        "host = \"{}\"\ncontrol = \"http://{}\"\nlisten = \"{address}:{AGENT_PORT}\"\n",
        host.name,
        control_address(fabric)
    );
    for tenant in tenants {
        let socket = quoted(&socket(host, &tenant.name));
        text +=
            &format!("\n[[tenant]]\nname = \"{}\"\nsocket = {socket}\nuid = {}\n", tenant.name, tenant.user);
    }
    Ok(text)
}

/// A path as a TOML string.
fn quoted(path: &Path) -> String {
    toml::Value::String(path.to_string_lossy().into_owned()).to_string()
}
