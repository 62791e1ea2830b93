//! `cargo xtask emulate FILE`: the fabric of a topology file, with control and agents, until Ctrl-C.

use anyhow::{Context, Result, bail};
use harmonaize_testkit::deployment::{Deployment, Setup, Tenant, socket, telemetry_socket};
use harmonaize_testkit::fabric::{self, Fabric};
use harmonaize_testkit::job::Programs;
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::topology::Topology;
use harmonaize_testkit::workspace::{Binaries, Profile};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The program that runs a tenant's AllReduce, and the name of its package.
const PERF: &str = "harmonaize-perf";

/// What `cargo xtask emulate` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask emulate docs/examples/two-hosts.toml     control, agents, two tenants, until Ctrl-C
  cargo xtask emulate fabric.toml --tenant a=3001      one tenant, whose processes run as user 3001
  cargo xtask emulate fabric.toml --bare --keep        namespaces and links alone, left up
  cargo xtask emulate --list                           fabrics that are up
  cargo xtask emulate --down hz-4711-0                 remove one that was left up")]
pub struct Args {
    /// Control's topology file: hosts, switches, links with rate and delay
    #[arg(required_unless_present_any = ["down", "list"])]
    pub file: Option<PathBuf>,
    /// Leave the fabric up (without control and agents) when this command ends
    #[arg(long)]
    pub keep: bool,
    /// Namespaces and links alone: neither control nor agents
    #[arg(long)]
    pub bare: bool,
    /// A tenant and the user id of its processes; may be given several times
    #[arg(long, value_name = "NAME=UID", value_parser = tenant, default_values = ["a=3001", "b=3002"])]
    pub tenant: Vec<Tenant>,
    /// Remove the fabric of this name
    #[arg(long, value_name = "NAME", conflicts_with_all = ["file", "list"])]
    pub down: Option<String>,
    /// List the fabrics that are up
    #[arg(long, conflicts_with = "file")]
    pub list: bool,
    /// Install missing packages without asking
    #[arg(long)]
    pub yes: bool,
}

fn tenant(text: &str) -> Result<Tenant> {
    let (name, user) = text.split_once('=').context("write NAME=UID")?;
    let user = user.parse().with_context(|| format!("{user} is not a user id"))?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if user == 0 || name.is_empty() || !name.bytes().all(plain) {
        bail!("a tenant has a name of letters and digits, and a user id that is not root's");
    }
    Ok(Tenant { name: name.to_owned(), user })
}

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    if args.list {
        fabric::standing()?.iter().for_each(|name| println!("{name}"));
        return Ok(());
    }
    if let Some(name) = &args.down {
        return fabric::down(name);
    }
    let file = args.file.as_deref().context("name a topology file")?;
    // Before anything is installed or built, which takes minutes.
    let topology = Topology::read(file)?;
    Fabric::check(&topology)?;
    let building: &[&str] = if args.bare { &[] } else { packages::BUILDING };
    packages::require(&[packages::EMULATION, building].concat(), Consent::from_flag(args.yes))?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let binaries = if args.bare { None } else { Some(Binaries::build_with(Profile::Dev, &[PERF])?) };
    let fabric = Fabric::build(&topology)?;
    describe(&fabric);
    let Some(binaries) = binaries else {
        if args.keep {
            let name = fabric.keep()?;
            println!("It stays up; `cargo xtask emulate --down {name}` removes it.");
            return Ok(());
        }
        println!("Ctrl-C removes it.");
        wait(&stop, || Ok(()))?;
        return Ok(());
    };
    let mut setup = Setup::new(binaries.clone(), &args.tenant);
    setup.measure_links();
    let mut deployment = Deployment::start(fabric, setup)?;
    describe_programs(&deployment, &binaries)?;
    let programs = Programs::publish(binaries.folder(), &[PERF])?;
    describe_tenants(&deployment, &programs.path(PERF));
    println!("\nCtrl-C ends them and removes it.");
    wait(&stop, || deployment.check())?;
    if args.keep {
        let name = deployment.end()?.keep()?;
        println!("The fabric stays up; `cargo xtask emulate --down {name}` removes it.");
    }
    Ok(())
}

/// Waits for a signal, or for something that went wrong.
fn wait(stop: &AtomicBool, mut check: impl FnMut() -> Result<()>) -> Result<()> {
    while !stop.load(Ordering::Relaxed) {
        check()?;
        std::thread::park_timeout(Duration::from_millis(100));
    }
    eprintln!("\nRemoving it.");
    Ok(())
}

fn describe(fabric: &Fabric) {
    println!("Fabric {} is up.\n", fabric.name());
    println!("{:<16} {:<28} {:<16} fabric addresses", "host", "namespace", "management");
    for host in fabric.hosts() {
        let addresses: Vec<String> = host.addresses.iter().map(ToString::to_string).collect();
        let (namespace, management) = (host.namespace.name(), host.management.to_string());
        println!("{:<16} {namespace:<28} {management:<16} {}", host.name, addresses.join(" "));
    }
    for switch in fabric.topology().switches() {
        if let Some(node) = fabric.topology().nodes.get(switch) {
            let how = if fabric.layout().bridged { "(bridge)" } else { "(routes, ECMP)" };
            println!("{:<16} {:<28} {how}", node.name, fabric.namespace(&node.name).name());
        }
    }
    if let Some(host) = fabric.hosts().first() {
        let name = host.namespace.name();
        println!("\nEnter a node:  ip netns exec {name} bash");
        println!("or, keeping the mounts of cgroup2 and bpffs:  nsenter --net=/run/netns/{name} bash");
    }
}

/// Prints how operators reach control, its page and an agent's telemetry.
fn describe_programs(deployment: &Deployment, binaries: &Binaries) -> Result<()> {
    let (fabric, control) = (deployment.fabric(), deployment.operators_address());
    let (cli, namespace) = (binaries.path("harmonaize")?, fabric.control());
    let (enter, tls) = (format!("ip netns exec {}", namespace.name()), deployment.operator());
    println!("\nControl listens at {control} on the management network:");
    println!("  {enter} {} --control {control} --tls {} status", cli.display(), tls.display());
    println!("Its page, for who has the operator's certificate: {}", page_url(deployment));
    println!("  {enter} {}", page_command(deployment));
    if let Some(host) = fabric.hosts().first() {
        println!("What crosses the links of {}:", host.name);
        println!("  {} top --agent unix:{}", cli.display(), telemetry_socket(host).display());
    }
    println!("Logs and configurations: {}", fabric.folder().display());
    Ok(())
}

/// The page's address. Control's certificate has the name `control`.
fn page_url(deployment: &Deployment) -> String {
    format!("https://control:{}", deployment.page_address().port())
}

/// A command that reads the page in control's namespace, as an operator.
fn page_command(deployment: &Deployment) -> String {
    let (page, tls) = (deployment.page_address(), deployment.operator());
    let file = |name: &str| tls.join(name).display().to_string();
    format!(
        "curl --cacert {} --cert {} --key {} --resolve control:{}:{} {}/",
        file("ca.crt"),
        file("tls.crt"),
        file("tls.key"),
        page.port(),
        page.ip(),
        page_url(deployment)
    )
}

/// Prints each tenant's sockets, and commands that open a shell and run an AllReduce as the tenant.
fn describe_tenants(deployment: &Deployment, perf: &Path) {
    let hosts = deployment.hosts();
    for tenant in deployment.tenants() {
        let sockets: Vec<PathBuf> = hosts.iter().map(|host| socket(host, &tenant.name)).collect();
        let Some(first) = sockets.first() else { continue };
        println!("\nTenant {} (user {}): {} and so on each host", tenant.name, tenant.user, first.display());
        println!("  HARMONAIZE_SOCKET={} {} sh", first.display(), becomes(tenant));
        println!("  {}", hello(perf, tenant, &sockets));
    }
}

/// A command that has a tenant run an AllReduce, which is checked. It runs between two of its agents, or at
/// its one.
fn hello(perf: &Path, tenant: &Tenant, sockets: &[PathBuf]) -> String {
    let agents = sockets.iter().take(2).map(|socket| format!(" --agent {}", socket.display()));
    let agents = agents.collect::<String>();
    format!("{} {} all_reduce{agents} --ranks 2 -b 1M -e 1M", becomes(tenant), perf.display())
}

/// What runs the command behind it as the tenant.
fn becomes(tenant: &Tenant) -> String {
    let user = tenant.user;
    format!("setpriv --reuid {user} --regid {user} --clear-groups")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_says_hello_between_two_hosts() {
        let (perf, tenant) = (Path::new("/t/harmonaize-perf"), Tenant { name: "a".to_owned(), user: 3001 });
        let sockets = ["/r/h0/a", "/r/h1/a", "/r/h2/a"].map(PathBuf::from);
        let words = "setpriv --reuid 3001 --regid 3001 --clear-groups /t/harmonaize-perf all_reduce";
        let expected = format!("{words} --agent /r/h0/a --agent /r/h1/a --ranks 2 -b 1M -e 1M");
        assert_eq!(hello(perf, &tenant, &sockets), expected);
        let alone = format!("{words} --agent /r/h0/a --ranks 2 -b 1M -e 1M");
        assert_eq!(hello(perf, &tenant, &sockets[..1]), alone);
    }
}
