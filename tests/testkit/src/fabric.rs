//! An emulated fabric: a network namespace per host and switch, shaped links, and a management network beside it.
//!
//! However its owner ends, a small process of its own (the reaper) sees its pipe close and removes every namespace,
//! every process inside and the run folder.

use crate::layout::{CONTROL_ADDRESS, Layout, management_address};
use crate::namespace::{NAMES, Namespace, batch};
use crate::topology::{Kind, Topology};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::net::Ipv4Addr;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

mod delayed;
mod faults;

use delayed::Delayed;
pub use faults::Faults;

/// Where each fabric has its run folder.
pub const RUN: &str = "/run/harmonaize-emulation";

/// Ends what runs in the namespaces `$1-*`, removes them and the folder `$2`.
const SWEEP: &str = r#"
for path in /run/netns/"$1"-*; do
    [ -e "$path" ] || continue
    name=${path##*/}
    for process in $(ip netns pids "$name"); do kill -9 "$process"; done
    ip netns del "$name"
done
while read -r _ mount _; do
    case $mount in "$2"/*) umount -l "$mount" ;; esac
done < /proc/mounts
rm -rf -- "$2"
"#;

/// A host of the fabric.
#[derive(Debug, Clone)]
pub struct Host {
    /// Its name in the topology.
    pub name: String,
    /// Its namespace.
    pub namespace: Namespace,
    /// Its addresses on the fabric, one a link; data goes there.
    pub addresses: Vec<Ipv4Addr>,
    /// Its address on the management network; control is reached from there.
    pub management: Ipv4Addr,
    /// Its run folder: configuration, logs, sockets.
    pub folder: PathBuf,
}

/// A fabric that is up until it is dropped.
#[derive(Debug)]
pub struct Fabric {
    name: String,
    folder: PathBuf,
    topology: Topology,
    layout: Layout,
    hosts: Vec<Host>,
    aggregators: Vec<Host>,
    delayed: Delayed,
    reaper: Reaper,
    _lock: File,
}

impl Fabric {
    /// Lays the fabric of a topology out, as [`Fabric::build`] does before it changes anything.
    ///
    /// # Errors
    /// What is wrong with the topology, or that this process may not make namespaces.
    pub fn check(topology: &Topology) -> Result<Layout> {
        let layout = Layout::of(topology)?;
        topology.nodes.iter().try_for_each(|node| check_name(&node.name))?;
        if !privileged() {
            bail!(
                "an emulated fabric needs root, to make network namespaces; run this as root or under sudo"
            );
        }
        Ok(layout)
    }

    /// Builds the fabric of a topology. Needs root and Debian's package iproute2.
    pub fn build(topology: &Topology) -> Result<Self> {
        let layout = Self::check(topology)?;
        sweep_stale()?;
        let (name, folder, lock) = reserve()?;
        let reaper = Reaper::start(&name, &folder)?;
        let mut hosts = Vec::new();
        for (position, node) in topology.ends().enumerate() {
            let host = topology.nodes.get(node).map(|node| node.name.clone()).unwrap_or_default();
            let folder = folder.join(&host);
            make_folder(&folder)?;
            hosts.push(Host {
                namespace: Namespace::named(format!("{name}-{host}")),
                name: host,
                addresses: layout.addresses(node),
                management: management_address(position),
                folder,
            });
        }
        let topology = topology.clone();
        let aggregators = hosts.split_off(topology.hosts().count());
        let delayed = Delayed::Not;
        let mut fabric =
            Self { name, folder, topology, layout, hosts, aggregators, delayed, reaper, _lock: lock };
        fabric.wire()?;
        Ok(fabric)
    }

    /// The prefix of every namespace of this fabric: `hz-PID-N`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The folder for configurations, logs and sockets; removed with the fabric.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The topology that it was built from.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Devices, addresses and routes, as built.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The hosts, in the order of the topology file.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// The machines of aggregators, in the order of the topology file.
    pub fn aggregators(&self) -> &[Host] {
        &self.aggregators
    }

    /// Hosts, then aggregators.
    fn ends(&self) -> impl Iterator<Item = &Host> {
        self.hosts.iter().chain(&self.aggregators)
    }

    /// A host by its name.
    pub fn host(&self, name: &str) -> Result<&Host> {
        let found = self.hosts.iter().find(|host| host.name == name);
        found.with_context(|| format!("the fabric has no host named {name}"))
    }

    /// The namespace of a host or switch, by the node's name.
    pub fn namespace(&self, node: &str) -> Namespace {
        Namespace::named(format!("{}-{node}", self.name))
    }

    /// Control's namespace, on the management network alone.
    pub fn control(&self) -> Namespace {
        Namespace::named(format!("{}-_control", self.name))
    }

    /// Control's address on the management network.
    pub fn control_address(&self) -> Ipv4Addr {
        CONTROL_ADDRESS
    }

    /// Makes a namespace that has nothing but loopback, removed with the fabric; `label` tells it from others.
    pub fn isolated(&self, label: &str) -> Result<Namespace> {
        check_name(label)?;
        let namespace = Namespace::named(format!("{}-_tenant-{label}", self.name));
        batch("ip", &[format!("netns add {}", namespace.name())])?;
        namespace.ip(&["link set lo up".to_owned()])?;
        Ok(namespace)
    }

    /// Takes a host's links down (or up again), as when its cables are pulled; its processes go on.
    pub fn set_links(&self, host: &str, up: bool) -> Result<()> {
        let node = self.topology.hosts().find(|node| self.name_of(*node) == host);
        let node = node.with_context(|| format!("the fabric has no host named {host}"))?;
        let state = if up { "up" } else { "down" };
        // The switch's end is taken down: the host's own device keeps its addresses and routes.
        for (_, _, far) in self.layout.ends_of(node) {
            self.node(far.node).ip(&[format!("link set {} {state}", far.device)])?;
        }
        Ok(())
    }

    /// Takes a host's link to control down (or up again), as when the management network fails there. Its links
    /// to others go on.
    pub fn set_management(&self, host: &str, up: bool) -> Result<()> {
        let position = self.ends().position(|end| end.name == host);
        let position = position.with_context(|| format!("the fabric has no host named {host}"))?;
        let state = if up { "up" } else { "down" };
        self.control().ip(&[format!("link set host{position} {state}")])
    }

    /// Cuts a switch off (or joins it again): all its ports go down, and its neighbours see their carriers go.
    pub fn set_switch(&self, switch: &str, up: bool) -> Result<()> {
        let node = self.topology.switches().find(|node| self.name_of(*node) == switch);
        let node = node.with_context(|| format!("the fabric has no switch named {switch}"))?;
        let state = if up { "up" } else { "down" };
        let ports = self.layout.ends_of(node);
        let mut lines: Vec<String> =
            ports.map(|(_, own, _)| format!("link set {} {state}", own.device)).collect();
        // Its routes went with its ports.
        lines.extend(up.then(|| self.routes_of(node)).into_iter().flatten());
        self.node(node).ip(&lines)
    }

    /// Control's topology file: the text that the fabric was built from, with the addresses of its switches.
    pub fn described(&self) -> Result<String> {
        self.topology.with_addresses(|switch| self.layout.addresses(switch))
    }

    /// Gives a host's links another rate in each direction, as when a cable has trained down. What is queued stays queued.
    /// `None` takes the shaping off. Links with delays keep their rates: an error.
    pub fn set_rate(&self, host: &str, bits_per_second: Option<u64>) -> Result<()> {
        if self.delays() {
            bail!("links with delays keep their rates");
        }
        let node = self.topology.hosts().find(|node| self.name_of(*node) == host);
        let node = node.with_context(|| format!("the fabric has no host named {host}"))?;
        for (_, own, far) in self.layout.ends_of(node) {
            for end in [own, far] {
                let line = match bits_per_second {
                    Some(rate) => format!("qdisc replace dev {} root {}", end.device, bucket(rate)),
                    None => format!("qdisc replace dev {} root noqueue", end.device),
                };
                self.node(end.node).tc(&[line])?;
            }
        }
        Ok(())
    }

    /// Leaves the fabric up when this is dropped, until `down` removes it; returns its name.
    pub fn keep(mut self) -> Result<String> {
        File::create(self.folder.join("kept"))?;
        self.reaper.dismiss()?;
        Ok(self.name.clone())
    }

    fn name_of(&self, node: usize) -> &str {
        self.topology.nodes.get(node).map_or("?", |node| node.name.as_str())
    }

    fn node(&self, node: usize) -> Namespace {
        self.namespace(self.name_of(node))
    }

    fn wire(&mut self) -> Result<()> {
        let count = self.topology.nodes.len();
        let mut names: Vec<String> =
            (0..count).map(|node| format!("netns add {}", self.node(node).name())).collect();
        names.push(format!("netns add {}", self.control().name()));
        batch("ip", &names)?;
        self.delayed = self.delayed_by();
        for (node, of) in self.topology.nodes.iter().enumerate() {
            apply_sysctls(&self.node(node), of.kind == Kind::Switch, node)?;
        }
        apply_sysctls(&self.control(), false, count)?;
        if !self.delayed_here().is_empty() {
            batch("ip", &[format!("netns add {}", self.wires().name())])?;
            apply_sysctls(&self.wires(), false, count + 1)?;
        }
        batch("ip", &self.devices())?;
        for node in 0..count {
            self.configure(node)?;
        }
        self.delay_here()?;
        self.configure_control()?;
        self.wait_for_ports()
    }

    /// Waits until every port of every bridge forwards: a moment after both its ends are up.
    fn wait_for_ports(&self) -> Result<()> {
        let switches =
            self.topology.switches().filter(|_| self.layout.bridged).map(|switch| self.node(switch));
        let deadline = Instant::now() + Duration::from_secs(10);
        for namespace in switches.chain([self.control()]) {
            loop {
                let output = namespace.enter(|| Command::new("bridge").arg("link").output())??;
                let said = String::from_utf8_lossy(&output.stdout);
                if output.status.success() && said.lines().all(|port| port.contains("state forwarding")) {
                    break;
                }
                if Instant::now() > deadline {
                    bail!("ports of {} do not forward:\n{said}", namespace.name());
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        Ok(())
    }

    /// The veth pairs: one a cable, one a host for management.
    fn devices(&self) -> Vec<String> {
        // Each device has an index of its own over all namespaces: where the two ends of a pair had the same, the
        // kernel would take its time to notice the carrier, a second in which a bridge's port drops everything.
        let (mut index, mtu) = (100, self.topology.mtu);
        let mut pair = |a: (&str, &str), b: (&str, &str)| {
            index += 2;
            let end = |(device, space): (&str, &str), index: usize| {
                format!("name {device} index {index} mtu {mtu} netns {space}")
            };
            format!("link add {} type veth peer {}", end(a, index), end(b, index + 1))
        };
        let mut lines = Vec::new();
        let (wires, delayed) = (self.wires(), self.delayed_here());
        for (at, cable) in self.layout.cables.iter().enumerate() {
            let [a, b] = &cable.ends;
            let (near, far) = (self.node(a.node), self.node(b.node));
            match delayed.iter().find(|(cable, ..)| *cable == at) {
                Some((_, [one, other])) => {
                    lines.push(pair((&a.device, near.name()), (one, wires.name())));
                    lines.push(pair((&b.device, far.name()), (other, wires.name())));
                }
                None => lines.push(pair((&a.device, near.name()), (&b.device, far.name()))),
            }
        }
        for (position, host) in self.ends().enumerate() {
            let port = format!("host{position}");
            lines.push(pair(("mgmt0", host.namespace.name()), (&port, self.control().name())));
        }
        lines
    }

    fn configure(&self, node: usize) -> Result<()> {
        let by_kernel = matches!(self.delayed, Delayed::Kernel);
        let bridge =
            self.layout.bridged && self.topology.nodes.get(node).is_some_and(|n| n.kind == Kind::Switch);
        let mut lines = vec!["link set lo up".to_owned()];
        if bridge {
            // As switches do it: what is for a group goes where somebody asked for it.
            lines.push("link add bridge type bridge stp_state 0 mcast_snooping 1 mcast_querier 1".to_owned());
            lines.push("link set bridge up".to_owned());
        }
        let mut shaping = Vec::new();
        for (cable, own, _) in self.layout.ends_of(node) {
            let device = &own.device;
            if let Some((address, length)) = own.address {
                lines.push(format!("addr add {address}/{length} dev {device}"));
            }
            let master = if bridge { " master bridge" } else { "" };
            lines.push(format!("link set {device}{master} up"));
            if let Some(cable) = self.layout.cables.get(cable) {
                let delay = if by_kernel { cable.delay } else { Duration::ZERO };
                shaping.extend(shape(device, cable.rate, delay));
            }
        }
        let position = self.topology.ends().position(|end| end == node);
        if let Some(host) = position.and_then(|position| self.ends().nth(position)) {
            lines.push(format!("addr add {}/16 dev mgmt0", host.management));
            lines.push("link set mgmt0 up".to_owned());
        }
        lines.extend(self.routes_of(node));
        let namespace = self.node(node);
        namespace.ip(&lines)?;
        namespace.tc(&shaping)
    }

    fn configure_control(&self) -> Result<()> {
        let mut lines = vec![
            "link set lo up".to_owned(),
            "link add mgmt0 type bridge stp_state 0 mcast_snooping 0".to_owned(),
            format!("addr add {CONTROL_ADDRESS}/16 dev mgmt0"),
            "link set mgmt0 up".to_owned(),
        ];
        lines.extend((0..self.ends().count()).map(|host| format!("link set host{host} master mgmt0 up")));
        self.control().ip(&lines)
    }

    fn routes_of(&self, node: usize) -> Vec<String> {
        let mut lines = Vec::new();
        for route in self.layout.routes.iter().filter(|route| route.node == node) {
            let prefix =
                route.prefix.map_or("default".to_owned(), |(address, length)| format!("{address}/{length}"));
            let hops: Vec<String> = match route.via.as_slice() {
                [(gateway, device)] => vec![format!("via {gateway} dev {device}")],
                several => several
                    .iter()
                    .map(|(gateway, device)| format!("nexthop via {gateway} dev {device}"))
                    .collect(),
            };
            let mut table = String::new();
            if let Some(source) = route.source {
                let number = 100 + lines.len();
                lines.push(format!("rule add from {source} lookup {number}"));
                table = format!(" table {number}");
            }
            lines.push(format!("route replace {prefix}{table} {}", hops.join(" ")));
        }
        lines
    }
}

/// True when this process may make network namespaces.
pub fn privileged() -> bool {
    rustix::process::geteuid().is_root()
}

/// The names of the fabrics that are up, kept or owned, on this machine.
pub fn standing() -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for folder in [NAMES, RUN] {
        let Ok(entries) = std::fs::read_dir(folder) else { continue };
        for entry in entries {
            let name = entry?.file_name();
            names.extend(name.to_str().and_then(fabric_of).map(str::to_owned));
        }
    }
    Ok(names)
}

/// Removes a fabric by its name, with every process inside.
pub fn down(name: &str) -> Result<()> {
    if fabric_of(name) != Some(name) {
        bail!("{name} is not the name of a fabric, which reads hz-PID-N");
    }
    let mut sweep = sweeper(name, &Path::new(RUN).join(name));
    crate::workspace::run(sweep.stdin(Stdio::null()))
}

/// Removes the fabrics whose owners have died without their reaper.
fn sweep_stale() -> Result<()> {
    for name in standing()? {
        let folder = Path::new(RUN).join(&name);
        let owned = match File::open(folder.join("lock")) {
            Ok(lock) => lock.try_lock().is_err(),
            // Not locked yet, or not ours to judge: the owner that its name gives decides.
            Err(_) => name.split('-').nth(1).is_some_and(|id| Path::new("/proc").join(id).exists()),
        };
        if !owned && !folder.join("kept").exists() {
            eprintln!("note: removing the fabric {name}, which its owner left behind");
            down(&name)?;
        }
    }
    Ok(())
}

/// `hz-PID-N` at the beginning of a namespace's name.
fn fabric_of(name: &str) -> Option<&str> {
    let numbers = name.strip_prefix("hz-")?;
    let (process, rest) = numbers.split_once('-')?;
    let number = rest.split('-').next()?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits(process) && digits(number)).then(|| name.get(..3 + process.len() + 1 + number.len()))?
}

fn reserve() -> Result<(String, PathBuf, File)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("hz-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let folder = Path::new(RUN).join(&name);
    make_folder(&folder)?;
    let lock = File::create(folder.join("lock"))?;
    lock.lock().with_context(|| format!("cannot lock {}", folder.display()))?;
    Ok((name, folder, lock))
}

/// A folder that others may pass through and not list.
pub(crate) fn make_folder(folder: &Path) -> Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o711);
    builder.create(folder).with_context(|| format!("cannot make {}", folder.display()))
}

fn check_name(name: &str) -> Result<()> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if name.is_empty() || name.len() > 63 || !name.bytes().all(allowed) || name.starts_with(['_', '-', '.']) {
        bail!("a namespace cannot be named after \"{name}\": use letters, digits, '.', '_', '-', at most 63");
    }
    Ok(())
}

/// The settings that every namespace gets before its devices are made.
fn apply_sysctls(namespace: &Namespace, forwards: bool, node: usize) -> Result<()> {
    let path = Path::new("/proc/sys/net");
    let seed = (node + 1).to_string();
    namespace.enter(|| -> Result<()> {
        // Kernels lack these where they have no IPv6, no seed for the flow hash, or limit answers over all namespaces at once.
        let sparse = [
            ("ipv6/conf/default/disable_ipv6", "1"),
            ("ipv4/fib_multipath_hash_seed", &seed),
            ("ipv4/icmp_msgs_per_sec", "100000"),
            ("ipv4/icmp_msgs_burst", "10000"),
            // A switch asks no firewall of its machine.
            ("bridge/bridge-nf-call-iptables", "0"),
        ];
        for (file, value) in sparse {
            if path.join(file).exists() {
                std::fs::write(path.join(file), value).with_context(|| format!("cannot set {file}"))?;
            }
        }
        let mut settings = vec![("ipv4/conf/all/rp_filter", "0"), ("ipv4/conf/default/rp_filter", "0")];
        if forwards {
            settings.extend([
                ("ipv4/ip_forward", "1"),
                // By both addresses, the protocol and both ports, as packets bear them. Policy 1 would take the hash that the
                // sender's socket has left in the kernel's buffer, which chooses at random and anew after a timeout.
                ("ipv4/fib_multipath_hash_policy", "3"),
                ("ipv4/fib_multipath_hash_fields", "55"),
                ("ipv4/conf/all/send_redirects", "0"),
                // A next hop whose carrier is gone is none.
                ("ipv4/conf/all/ignore_routes_with_linkdown", "1"),
                ("ipv4/conf/default/ignore_routes_with_linkdown", "1"),
                // Traced paths are many at a time; switches answer each probe that dies there.
                ("ipv4/icmp_ratelimit", "0"),
            ]);
        }
        for (file, value) in settings {
            std::fs::write(path.join(file), value).with_context(|| format!("cannot set {file}"))?;
        }
        Ok(())
    })?
}

/// The shaping of one end of a link: the delay and rate of its egress.
fn shape(device: &str, rate: u64, delay: Duration) -> Vec<String> {
    let bucket = bucket(rate);
    if delay.is_zero() {
        return vec![format!("qdisc add dev {device} root {bucket}")];
    }
    vec![
        format!("qdisc add dev {device} root handle 1: netem delay {}ns limit 100000", delay.as_nanos()),
        format!("qdisc add dev {device} parent 1:1 handle 10: {bucket}"),
    ]
}

fn bucket(rate: u64) -> String {
    format!("tbf rate {rate}bit burst 128kb latency 50ms")
}

fn sweeper(name: &str, folder: &Path) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(SWEEP).arg("sweep").arg(name).arg(folder);
    command
}

/// The process that removes a fabric as soon as its owner is gone.
#[derive(Debug)]
struct Reaper {
    child: Child,
    /// Closed by the kernel when the owner ends, however it ends.
    pipe: Option<ChildStdin>,
}

impl Reaper {
    fn start(name: &str, folder: &Path) -> Result<Self> {
        let mut command = Command::new("sh");
        // At the end of its input it sweeps; a line on it means that the fabric is to stay.
        command.arg("-c").arg(format!("read -r word && exit 0\n{SWEEP}")).arg("sweep").arg(name).arg(folder);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // A process group of its own: Ctrl-C must not end it before its work.
        let mut child = command.process_group(0).spawn().context("cannot start sh")?;
        let pipe = child.stdin.take();
        Ok(Self { child, pipe })
    }

    fn dismiss(&mut self) -> Result<()> {
        use std::io::Write;
        if let Some(mut pipe) = self.pipe.take() {
            pipe.write_all(b"keep\n")?;
        }
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        drop(self.pipe.take());
        if let Err(error) = self.child.wait() {
            eprintln!("warning: the fabric may not be removed: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fabric_is_named_by_its_namespaces() {
        assert_eq!(fabric_of("hz-12-0-leaf-1"), Some("hz-12-0"));
        assert_eq!(fabric_of("hz-12-3"), Some("hz-12-3"));
        for other in ["hz-", "hz-a-1-h", "hz-12", "hz-12-x", "xhz-1-1", "hz-1-"] {
            assert_eq!(fabric_of(other), None, "{other}");
        }
    }

    #[test]
    fn a_topology_is_checked_before_anything_is_built() {
        let check = |text: &str| Fabric::check(&Topology::parse(text).unwrap()).unwrap_err().to_string();
        assert_eq!(check("[[host]]\nname = 'h0'\n"), "host h0 has no link");
        let star = crate::topology::star(2, "1Gbit/s");
        match privileged() {
            true => assert_eq!(Fabric::check(&Topology::parse(&star).unwrap()).unwrap().cables.len(), 2),
            false => assert!(check(&star).contains("needs root")),
        }
    }

    #[test]
    fn names_that_reach_elsewhere_are_refused() {
        assert!(check_name("leaf-1.a").is_ok());
        for name in ["", "../x", "a b", "_control", "-n", "a\nnetns del b", "."] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
    }
}
