//! Control and an agent for each host, as programs.

use crate::host::{Host, present, until};
use anyhow::{Result, ensure};
use harmonaize_tests::star;
use std::fs::File;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};

pub(crate) const HOSTS: usize = 4;
pub(crate) const CONTROL: &str = "127.0.0.1:7100";

/// MiB of an arena: registered memory is all there from the start, and the guest has little.
pub(crate) const ARENA: u64 = 24;

/// How often an upgrade is tried at most.
const UPGRADES: usize = 5;

/// Beside the agents' configurations: the tenant's secret.
const SECRET: &str = "a.secret";

/// A program of the workspace, as the guest's job has put it.
pub(crate) fn program(name: &str) -> Command {
    let folder = std::env::var_os("HARMONAIZE_BINARIES").expect("the guest's job names the folder");
    let mut command = Command::new(Path::new(&folder).join(name));
    command.env("NO_COLOR", "1");
    command
}

/// A daemon that ends with this value, and whose words are shown where the test fails.
pub(crate) struct Program {
    child: Child,
    log: PathBuf,
}

impl Program {
    /// Starts it with a configuration; its words go to a file beside that.
    pub(crate) fn start(command: &mut Command, config: &Path, text: &str) -> Self {
        std::fs::write(config, text).unwrap();
        let log = config.with_extension("log");
        let file = File::create(&log).unwrap();
        command.arg("--config").arg(config).stdout(file.try_clone().unwrap()).stderr(file);
        Self { child: command.spawn().unwrap(), log }
    }

    /// What it has said so far.
    pub(crate) fn output(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Ends it without a warning.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// Whether it has ended by itself.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits until it has ended by itself.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        until("the program does not end", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            println!("--- {}\n{}", self.log.display(), self.output());
        }
    }
}

/// Control and agents.
pub(crate) struct Provider {
    pub(crate) agents: Vec<Program>,
    /// Their configurations.
    texts: Vec<String>,
    _control: Program,
    folder: tempfile::TempDir,
}

impl Provider {
    /// With agents that offer attachments over RDMA too. `None`, loudly, without a device for each host.
    pub(crate) fn start() -> Option<Self> {
        Self::start_with(rdma, |_| program("harmonaize-agent"))
    }

    /// The same with more lines for each agent's configuration, and its command.
    pub(crate) fn start_with(
        lines: impl Fn(usize) -> String,
        agent: impl Fn(usize) -> Command,
    ) -> Option<Self> {
        Self::start_on(&star(HOSTS, "1Gbit/s"), "", lines, agent)
    }

    /// The same as [`Self::start`], whose links go over TCP.
    pub(crate) fn start_with_links_over_tcp() -> Option<Self> {
        let text = |host: usize, socket: &Path| {
            configuration(Host(host as u32), "", socket).replace("[verbs]\n", "") + &rdma(host)
        };
        Self::start_by(&star(HOSTS, "1Gbit/s"), "", text, |_| program("harmonaize-agent"))
    }

    /// The same for a fabric that control has this topology of, and with more lines for control's configuration.
    pub(crate) fn start_on(
        topology: &str,
        control: &str,
        lines: impl Fn(usize) -> String,
        agent: impl Fn(usize) -> Command,
    ) -> Option<Self> {
        let text = |host: usize, socket: &Path| configuration(Host(host as u32), "", socket) + &lines(host);
        Self::start_by(topology, control, text, agent)
    }

    /// The same, `text` being each agent's whole configuration.
    fn start_by(
        topology: &str,
        control: &str,
        text: impl Fn(usize, &Path) -> String,
        agent: impl Fn(usize) -> Command,
    ) -> Option<Self> {
        if !present(HOSTS) {
            println!("SKIPPED: this test needs the devices rxe0 to rxe3, as in `cargo xtask softroce test`");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("topology.toml"), topology).unwrap();
        let secret = folder.path().join(SECRET);
        std::fs::write(&secret, "tenant a and the agents of this test").unwrap();
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
        let own = format!(
            "listen = \"{CONTROL}\"\ninsecure_loopback = true\ntopology = \"topology.toml\"\n{control}[[tenant]]\nname = \"a\"\n"
        );
        let config = folder.path().join("control.toml");
        let mut control = program("harmonaize-control");
        // What is said of links is in the log of a test that fails.
        control.env("RUST_LOG", "info,harmonaize_server::state::world=debug");
        let control = Program::start(&mut control, &config, &own);
        until("control does not listen", || TcpStream::connect(CONTROL).is_ok());
        let mut provider = Self { agents: Vec::new(), texts: Vec::new(), _control: control, folder };
        for host in 0..HOSTS {
            let config = provider.folder.path().join(format!("agent{host}.toml"));
            let text = text(host, &provider.socket(host));
            provider.agents.push(Program::start(&mut agent(host), &config, &text));
            provider.texts.push(text);
        }
        until("an agent has no socket", || {
            provider.sockets().iter().all(|socket| UnixStream::connect(socket).is_ok())
        });
        Some(provider)
    }

    /// Starts a successor of a host's agent, by the same configuration, and waits until it has taken its place. An emulated processor
    /// may be too slow for the pause; then it is tried again, as an operator would.
    pub(crate) fn upgrade(&self, host: usize) -> Program {
        let config = self.folder.path().join(format!("successor{host}.toml"));
        for _ in 0..UPGRADES {
            let mut command = program("harmonaize-agent");
            let mut successor = Program::start(command.arg("--take-over"), &config, &self.texts[host]);
            let mut taken = false;
            until("a successor neither takes the agent's place nor ends", || {
                taken = successor.output().contains("took the place of the agent before");
                taken || successor.has_ended()
            });
            if taken {
                return successor;
            }
            println!("  no successor on host {host} yet: {}", successor.output());
        }
        panic!("{UPGRADES} successors of host {host} have not taken the agent's place");
    }

    /// What control told an operator, as text.
    pub(crate) fn harmonaize(&self, arguments: &[&str]) -> Result<String> {
        let mut command = program("harmonaize");
        let output = command.args(["--control", CONTROL, "--insecure-loopback"]).args(arguments).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "harmonaize {arguments:?} failed: {}", said.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The same as JSON.
    pub(crate) fn ask(&self, argument: &str) -> Result<serde_json::Value> {
        Ok(serde_json::from_str(&self.harmonaize(&[argument, "--json"])?)?)
    }

    /// The tenant's socket on a host.
    pub(crate) fn socket(&self, host: usize) -> PathBuf {
        self.folder.path().join(format!("h{host}.sock"))
    }

    /// The tenant's socket on each host.
    pub(crate) fn sockets(&self) -> Vec<PathBuf> {
        (0..HOSTS).map(|host| self.socket(host)).collect()
    }

    /// The file with the tenant's secret.
    pub(crate) fn secret(&self) -> PathBuf {
        self.folder.path().join(SECRET)
    }

    /// Where files may lie until the end of the test.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// Where the agent of a host listens for tenants over TCP.
pub(crate) fn tenants(host: usize) -> SocketAddr {
    SocketAddr::from((Host(host as u32).address(), 7300))
}

/// The lines for attachments over RDMA, which go on in the tenant's table.
pub(crate) fn rdma(host: usize) -> String {
    format!(
        "rdma = true\nsecret = \"{SECRET}\"\naddresses = [\"10.0.0.1\", \"10.0.0.4\"]\n\
         [rdma]\ndevice = \"rxe{host}\"\nlisten = \"{}\"\n",
        tenants(host)
    )
}

/// An agent's configuration, with more lines for its table `[verbs]`.
pub(crate) fn configuration(host: Host, verbs: &str, socket: &Path) -> String {
    let (Host(number), address) = (host, host.address());
    format!(
        "host = \"h{number}\"\ncontrol = \"{CONTROL}\"\ninsecure_loopback = true\nlisten = \"{address}:7200\"\npeer_timeout = \"10s\"\n\
         connect_timeout = \"30s\"\nhandover = {:?}\n[verbs]\n{verbs}[[tenant]]\nname = \"a\"\nsocket = {socket:?}\nuids = [0]\n\
         remote = true\n",
        socket.with_extension("handover")
    )
}
