//! The first process in the namespaces: makes the network, starts the daemons, and is both ranks.

use crate::Failure;
use crate::control::{Control, ControlArguments};
use crate::text::number_of;
use harmonaize_client::{AttachOptions, Client, Dtype, Error, Rank, Receipt, ReduceOp};
use harmonaize_identity::Folder;
use harmonaize_planner::Nanos;
use std::io::{ErrorKind, Write};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Where everything lies: on a file system in memory that is seen here alone.
const FOLDER: &str = "/run/harmonaize-hello";
/// The first host's address on the fabric, in front of its number; control's has the number 1.
const NETWORK: &str = "10.90.0.";
/// The ports of control, for agents and for operators.
const CONTROL: (u16, u16) = (7000, 7001);
/// The port of an agent.
const AGENT: u16 = 7100;
const TENANT: &str = "hello";
/// Elements of the tensor: 16 MiB of f32.
const ELEMENTS: u64 = 4 << 20;
/// The largest element is below this; sums of two are exact in f32.
const VALUES: u64 = 4096;
/// How long a daemon may take to be ready, and each call of a rank.
const PATIENCE: Duration = Duration::from_secs(20);

/// A host of the fabric.
struct Host {
    /// In its certificate.
    name: String,
    /// Of its namespace, for `ip`.
    namespace: String,
    address: String,
    tls: PathBuf,
}

impl Host {
    fn socket(&self) -> PathBuf {
        Path::new(FOLDER).join(format!("{}.sock", self.namespace))
    }
}

/// What `harmonaize init` made.
struct Certificates {
    control: PathBuf,
    hosts: Vec<Host>,
    operator: (String, PathBuf),
}

impl Certificates {
    /// Those of control, of the first two hosts by name, and of the first operator.
    fn find(folder: &Path) -> Result<Self, Failure> {
        let folder = std::path::absolute(folder).map_err(|error| Failure::Usage(error.to_string()))?;
        let missing = |what: &str| {
            Failure::Usage(format!(
                "{} has no {what}: run `harmonaize init` first, or name the folder where it put them",
                folder.display()
            ))
        };
        let control = folder.join("control");
        if !Folder(control.clone()).certificate().is_file() {
            return Err(missing("certificate for control"));
        }
        let hosts = (1..).zip(named(&folder.join("hosts"))).take(2);
        let hosts = hosts.map(|(number, (name, tls))| Host {
            name,
            namespace: format!("host{number}"),
            address: format!("{NETWORK}{}", number + 10),
            tls,
        });
        let hosts: Vec<Host> = hosts.collect();
        if hosts.len() < 2 {
            return Err(missing("certificates for two hosts"));
        }
        let operator = named(&folder.join("operators")).into_iter().next();
        Ok(Self { control, hosts, operator: operator.ok_or_else(|| missing("certificate for an operator"))? })
    }
}

/// The folders with certificates in a folder, by name.
fn named(folder: &Path) -> Vec<(String, PathBuf)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())));
    let mut found: Vec<_> = named.filter(|(_, path)| Folder(path.clone()).certificate().is_file()).collect();
    found.sort();
    found
}

/// Does all of it, and says what it does.
pub(super) async fn run(folder: &Path) -> Result<String, Failure> {
    end_with_input();
    let certificates = Certificates::find(folder)?;
    let begun = Instant::now();
    call("mount", &["-t", "tmpfs", "-o", "mode=755", "hello", "/run"], "")?;
    std::fs::create_dir(FOLDER).map_err(refused)?;
    let hosts = &certificates.hosts;
    let names: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
    let names = names.join(" and ");
    make_network(hosts)?;
    report(&format!("emulated: hosts {names} at a switch, in network namespaces of this machine"))?;

    let address = format!("{NETWORK}1");
    let mut daemons = Daemons::new()?;
    write("topology.toml", &topology(hosts))?;
    let config = write("control.toml", &control_config(&address, &certificates))?;
    daemons.start("control", command("harmonaize-control")?.arg("--config").arg(config))?;
    for host in hosts {
        let config = write(&format!("{}.toml", host.namespace), &agent_config(&address, host))?;
        let mut enter = Command::new("ip");
        enter.args(["netns", "exec", &host.namespace]).arg(program("harmonaize-agent")?);
        daemons.start(&format!("the agent of {}", host.name), enter.arg("--config").arg(config))?;
    }
    report(&format!(
        "running: control, and the agents of {names}, with the certificates of {}",
        folder.display()
    ))?;

    let sockets: Vec<PathBuf> = hosts.iter().map(Host::socket).collect();
    let receipts = tokio::task::spawn_blocking(move || all_reduce(&sockets));
    let receipts = receipts.await.map_err(refused)?.map_err(|error| daemons.with_logs(error))?;
    let sent = receipts.iter().map(|receipt| receipt.wire_bytes).sum::<u64>();
    report(&format!(
        "AllReduce of {} MiB over 2 ranks: all {} elements of both are right; the hosts sent {:.1} MiB",
        (ELEMENTS * 4) >> 20,
        ELEMENTS,
        sent as f64 / f64::from(1 << 20),
    ))?;

    let (operator, tls) = certificates.operator;
    let at = ControlArguments::at(format!("{address}:{}", CONTROL.1), tls);
    let status = Control::connect(&at).await?.status(Nanos(1_000_000_000)).await?;
    let connected = status.agents.iter().filter(|agent| agent.connected).count();
    if connected != 2 || status.errors != 0 {
        let text = format!(
            "control has {connected} of 2 agents, and {}",
            number_of(status.errors, "error", "errors")
        );
        return Err(daemons.with_logs(text));
    }
    report(&format!("status, as operator {operator}: control {}, 2 of 2 agents connected", status.build))?;
    Ok(format!("done after {:.1} s; nothing of it stays\n", begun.elapsed().as_secs_f64()))
}

/// Ends this process, and all in the namespaces with it, once whoever started it is gone.
fn end_with_input() {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        std::process::exit(1);
    });
}

fn refused(error: impl std::fmt::Display) -> Failure {
    Failure::Refused(error.to_string())
}

fn report(line: &str) -> Result<(), Failure> {
    writeln!(std::io::stdout(), "{line}").map_err(refused)
}

/// Runs a program of the system on this input.
fn call(name: &str, arguments: &[&str], input: &str) -> Result<(), Failure> {
    let cannot = |why: String| Failure::Refused(format!("`{name} {}`: {why}", arguments.join(" ")));
    let mut command = Command::new(name);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| cannot(error.to_string()))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes()).map_err(|error| cannot(error.to_string()))?;
    }
    let output = child.wait_with_output().map_err(|error| cannot(error.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(cannot(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

/// A bridge, at which control is, and a namespace for each host, joined to it.
fn make_network(hosts: &[Host]) -> Result<(), Failure> {
    let mut lines = format!(
        "link set lo up\nlink add fabric type bridge\naddr add {NETWORK}1/24 dev fabric\nlink set fabric up\n"
    );
    for Host { namespace, .. } in hosts {
        lines += &format!(
            "netns add {namespace}\nlink add {namespace} type veth peer name eth0 netns {namespace}\n\
             link set {namespace} master fabric up\n"
        );
    }
    call("ip", &["-batch", "-"], &lines)?;
    for Host { namespace, address, .. } in hosts {
        let lines = format!("link set lo up\naddr add {address}/24 dev eth0\nlink set eth0 up\n");
        call("ip", &["-n", namespace, "-batch", "-"], &lines)?;
    }
    Ok(())
}

/// Writes a file of ours.
fn write(name: &str, text: &str) -> Result<PathBuf, Failure> {
    let path = Path::new(FOLDER).join(name);
    std::fs::write(&path, text).map_err(refused)?;
    Ok(path)
}

/// Text as a string of TOML, which a basic string of JSON is, too.
fn quoted(text: impl AsRef<Path>) -> String {
    serde_json::Value::from(text.as_ref().to_string_lossy().into_owned()).to_string()
}

fn topology(hosts: &[Host]) -> String {
    let mut text = "[[switch]]\nname = \"hello-switch\"\n".to_owned();
    for host in hosts {
        let name = quoted(&host.name);
        text += &format!(
            "[[host]]\nname = {name}\n[[link]]\nfrom = {name}\nto = \"hello-switch\"\nrate = \"10Gbit/s\"\n"
        );
    }
    text
}

fn control_config(address: &str, certificates: &Certificates) -> String {
    format!(
        "listen = \"{address}:{}\"\nlisten_operators = \"{address}:{}\"\ntls = {}\ntopology = \"topology.toml\"\n\
         [[tenant]]\nname = \"{TENANT}\"\n[[operator]]\nname = {}\nrole = \"viewer\"\n",
        CONTROL.0,
        CONTROL.1,
        quoted(&certificates.control),
        quoted(&certificates.operator.0),
    )
}

fn agent_config(control: &str, host: &Host) -> String {
    format!(
        "host = {}\ncontrol = \"{control}:{}\"\ntls = {}\nlisten = \"{}:{AGENT}\"\n\
         [[tenant]]\nname = \"{TENANT}\"\nsocket = {}\nuids = [0]\n",
        quoted(&host.name),
        CONTROL.0,
        quoted(&host.tls),
        host.address,
        quoted(host.socket()),
    )
}

/// One of our programs: beside this one, or else where the system finds it.
fn program(name: &str) -> Result<PathBuf, Failure> {
    let beside = std::env::current_exe().map_err(refused)?.with_file_name(name);
    Ok(if beside.is_file() { beside } else { name.into() })
}

fn command(name: &str) -> Result<Command, Failure> {
    Ok(Command::new(program(name)?))
}

/// Daemons that run, and where they report that they are ready.
struct Daemons {
    reports: UnixDatagram,
    running: Vec<(String, Child, PathBuf)>,
}

impl Daemons {
    fn new() -> Result<Self, Failure> {
        let reports = UnixDatagram::bind(Self::place()).map_err(refused)?;
        reports.set_read_timeout(Some(Duration::from_millis(50))).map_err(refused)?;
        Ok(Self { reports, running: Vec::new() })
    }

    fn place() -> PathBuf {
        Path::new(FOLDER).join("ready")
    }

    /// Starts one as systemd would, and waits until it reports that it is ready.
    fn start(&mut self, name: &str, command: &mut Command) -> Result<(), Failure> {
        let log = Path::new(FOLDER).join(format!("{}.log", self.running.len()));
        let file = std::fs::File::create(&log).map_err(refused)?;
        command.env("NOTIFY_SOCKET", Self::place()).env_remove("WATCHDOG_USEC").env("NO_COLOR", "1");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        let child = command.spawn().map_err(|error| refused(format!("cannot start {name}: {error}")))?;
        self.running.push((name.to_owned(), child, log));
        let (begun, mut report) = (Instant::now(), [0; 64]);
        while begun.elapsed() < PATIENCE {
            match self.reports.recv(&mut report) {
                Ok(bytes) if report.get(..bytes).is_some_and(|report| report.starts_with(b"READY=1")) => {
                    return Ok(());
                }
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) => return Err(refused(error)),
            }
            if let Some((_, child, _)) = self.running.last_mut()
                && let Some(status) = child.try_wait().map_err(refused)?
            {
                return Err(self.with_logs(format!("{name} ended with {status}")));
            }
        }
        Err(self.with_logs(format!("{name} is not ready after {} s", PATIENCE.as_secs())))
    }

    /// What went wrong, with the last lines of each daemon's log.
    fn with_logs(&self, what: impl std::fmt::Display) -> Failure {
        const LINES: usize = 8;
        let mut text = what.to_string();
        for (name, _, log) in &self.running {
            let log = std::fs::read(log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let first = log.lines().count().saturating_sub(LINES);
            text += &format!("\nthe log of {name}:");
            log.lines().skip(first).for_each(|line| text += &format!("\n  {line}"));
        }
        Failure::Refused(text)
    }
}

/// Both ranks, each at its host's agent; what each was told at the end.
fn all_reduce(sockets: &[PathBuf]) -> Result<Vec<Receipt>, String> {
    std::thread::scope(|scope| {
        let ranks = (0..).zip(sockets);
        let ranks: Vec<_> = ranks.map(|(rank, socket)| scope.spawn(move || one_rank(rank, socket))).collect();
        let ended =
            ranks.into_iter().map(|rank| rank.join().map_err(|_| "a rank has panicked".to_owned())?);
        ended.collect()
    })
}

/// Adds up what element `i` of rank `r` is, `i` modulo [`VALUES`] and `r` more, and looks at every sum.
fn one_rank(rank: u32, socket: &Path) -> Result<Receipt, String> {
    let value = |element: u64, rank: u32| (element % VALUES) as f32 + rank as f32;
    let said = |error: Error| format!("rank {rank}: {error}");
    let client = Client::attach(socket, AttachOptions::default()).map_err(said)?;
    let tensor = client.tensor(Dtype::F32, ELEMENTS).map_err(said)?;
    let mut elements: Vec<f32> = (0..ELEMENTS).map(|element| value(element, rank)).collect();
    tensor.write(0, &elements).map_err(said)?;
    let job = client.join("hello", Rank(rank), 2, PATIENCE).map_err(said)?;
    let mut sum = job.all_reduce_in_place(&tensor, ReduceOp::Sum).map_err(said)?;
    let receipt = sum.wait(PATIENCE).map_err(said)?;
    tensor.read(0, &mut elements).map_err(said)?;
    for (element, sum) in (0..).zip(&elements) {
        let expected = value(element, 0) + value(element, 1);
        if *sum != expected {
            return Err(format!("rank {rank}: element {element} is {sum}, and not {expected}"));
        }
    }
    Ok(receipt)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_of_init_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let make = |path: &str| {
            let folder = folder.path().join(path);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("tls.crt"), "").unwrap();
        };
        let found = || Certificates::find(folder.path()).map_err(|failure| failure.to_string());
        let missing = |what: &str| {
            let error = found().err().unwrap();
            assert!(error.contains(what) && error.contains("harmonaize init"), "{error}");
        };
        missing("certificate for control");
        make("control");
        make("hosts/b");
        missing("certificates for two hosts");
        make("hosts/c");
        make("hosts/a");
        missing("certificate for an operator");
        make("operators/alice");
        let found = found().unwrap();
        let hosts: Vec<_> =
            found.hosts.iter().map(|host| (host.name.as_str(), host.address.as_str())).collect();
        assert_eq!(hosts, [("a", "10.90.0.11"), ("b", "10.90.0.12")]);
        assert_eq!(found.operator.0, "alice");
    }
}
