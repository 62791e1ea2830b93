//! What the host itself has: kernel, privileges, limits, the interface on the fabric, devices, the clock.

use super::{Config, Finding};
use serde::Deserialize;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The least kernel for telemetry: BPF's ring buffers, Linux 5.8.
const TELEMETRY: (u32, u32) = (5, 8);
/// The least kernel with Landlock.
const LANDLOCK: (u32, u32) = (5, 13);
/// Privileges that the agent's unit gives: name and number in `linux/capability.h`.
const CAPABILITIES: [(&str, u32); 5] =
    [("CAP_CHOWN", 0), ("CAP_FOWNER", 3), ("CAP_NET_ADMIN", 12), ("CAP_NET_RAW", 13), ("CAP_SYS_NICE", 23)];
/// And those for telemetry alone.
const MEASURING: [(&str, u32); 2] = [("CAP_PERFMON", 38), ("CAP_BPF", 39)];
/// Open files that the unit asks for.
const FILES: u64 = 65536;
/// What an interface has to carry for packets of RoCE with 4096 bytes.
const ROCE_MTU: u32 = 4200;

/// An interface, as `ip -json address` lists it.
#[derive(Clone, Debug, Default, Deserialize)]
struct Interface {
    ifname: String,
    #[serde(default)]
    flags: Vec<String>,
    #[serde(default)]
    mtu: u32,
    #[serde(default)]
    addr_info: Vec<Address>,
}

#[derive(Clone, Debug, Deserialize)]
struct Address {
    local: Option<IpAddr>,
}

/// What is looked at.
pub(super) struct Host {
    /// Where `proc`, `sys` and `dev` are.
    root: PathBuf,
    /// Its interfaces; else why they are not known.
    interfaces: Result<Vec<Interface>, String>,
    /// Whether its clock follows others; none where nobody says.
    synchronised: Option<bool>,
}

impl Host {
    /// This one.
    pub(super) fn read() -> Self {
        let said = |program: &str, arguments: &[&str]| {
            let output = Command::new(program).args(arguments).output();
            output.map_err(|error| format!("cannot start `{program}`: {error}"))
        };
        let listed = said("ip", &["-json", "address"]);
        let interfaces =
            listed.and_then(|list| serde_json::from_slice(&list.stdout).map_err(|error| error.to_string()));
        let clock = said("timedatectl", &["show", "--property=NTPSynchronized", "--value"]);
        let synchronised = clock.ok().and_then(|said| match said.stdout.trim_ascii() {
            b"yes" => Some(true),
            b"no" => Some(false),
            _ => None,
        });
        Self { root: "/".into(), interfaces, synchronised }
    }

    /// A file's text without the white space around it; empty where it cannot be read.
    fn text(&self, path: impl AsRef<Path>) -> String {
        std::fs::read_to_string(self.root.join(path)).unwrap_or_default().trim().to_owned()
    }

    /// Its kernel's version; zeros where nobody says.
    fn version(&self) -> (u32, u32) {
        let release = self.text("proc/sys/kernel/osrelease");
        let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
    }

    /// The names in a folder, in order.
    fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = std::fs::read_dir(self.root.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }
}

/// Everything but control.
pub(super) fn check(host: &Host, config: &Config) -> Vec<Finding> {
    let mut findings =
        vec![kernel(host, config), privileges(host, config), sandbox(host, config), files(host)];
    findings.extend(interface(host, config));
    if config.uses_rdma() {
        findings.push(device(host, config.listen.ip()));
        findings.push(pinned(host));
    }
    findings.push(clock(host));
    findings
}

fn kernel(host: &Host, config: &Config) -> Finding {
    const CHECK: &str = "kernel";
    let release = host.text("proc/sys/kernel/osrelease");
    let version = host.version();
    if config.telemetry.is_some() && version < TELEMETRY {
        let remedy = "telemetry needs Linux 5.8: install a newer one, or take [telemetry] out";
        return Finding::wrong(CHECK, release, remedy);
    }
    if config.telemetry.is_some() && !host.root.join("sys/kernel/btf/vmlinux").exists() {
        let remedy = "round-trip times and owners of sockets are not measured: they take a kernel with \
             CONFIG_DEBUG_INFO_BTF";
        return Finding::advice(CHECK, format!("{release}, without descriptions of its types"), remedy);
    }
    Finding::fine(CHECK, release)
}

/// Whether processes here can have what the unit gives to the agent.
fn privileges(host: &Host, config: &Config) -> Finding {
    const CHECK: &str = "privileges";
    let status = host.text("proc/self/status");
    let bounds = status.lines().find_map(|line| line.strip_prefix("CapBnd:"));
    let Some(bounds) = bounds.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()) else {
        return Finding::advice(CHECK, "unknown", "/proc/self/status does not say; is /proc mounted?");
    };
    let measuring = config.telemetry.iter().flat_map(|_| MEASURING);
    let missing = CAPABILITIES.into_iter().chain(measuring).filter(|(_, number)| bounds >> number & 1 == 0);
    let missing: Vec<&str> = missing.map(|(name, _)| name).collect();
    if missing.is_empty() {
        return Finding::fine(CHECK, "all that the agent's unit gives can be had");
    }
    let remedy = "a container or an earlier unit takes them away: give them to what starts the agent";
    Finding::wrong(CHECK, format!("out of reach: {}", missing.join(", ")), remedy)
}

/// Whether the kernel can take from the agent what it does not need.
fn sandbox(host: &Host, config: &Config) -> Finding {
    const CHECK: &str = "sandbox";
    if !config.sandbox.on {
        let remedy = "who takes the agent over has all that its user has: take `on = false` out of [sandbox]";
        return Finding::advice(CHECK, "off by the configuration", remedy);
    }
    let modules = host.text("sys/kernel/security/lsm");
    let landlock = match modules.as_str() {
        // Where securityfs is not mounted, the release is all that there is to see.
        "" => host.version() >= LANDLOCK,
        modules => modules.split(',').any(|module| module == "landlock"),
    };
    let seccomp = host.text("proc/self/status").lines().any(|line| line.starts_with("Seccomp:"));
    match (landlock, seccomp) {
        (true, true) => {
            Finding::fine(CHECK, "files and system calls that the agent does not need can be refused")
        }
        (landlock, _) => {
            let missing = if landlock { "seccomp" } else { "Landlock" };
            let remedy = "the agent runs with fewer bounds and says so in its log: Linux 5.13 or newer has both, with \
                 CONFIG_SECCOMP_FILTER, CONFIG_SECURITY_LANDLOCK and `landlock` in the kernel's option lsm";
            Finding::advice(CHECK, format!("the kernel has no {missing}"), remedy)
        }
    }
}

/// The hard limit on one thing, by its line in `limits`; none: unlimited, or not known.
fn limit(host: &Host, name: &str) -> Option<u64> {
    let limits = host.text("proc/self/limits");
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

fn files(host: &Host) -> Finding {
    const CHECK: &str = "open files";
    match limit(host, "Max open files") {
        Some(most) if most < FILES => {
            let remedy = "the unit raises it; whatever else starts the agent should, too (LimitNOFILE=65536)";
            Finding::advice(CHECK, format!("{most} for this shell's processes"), remedy)
        }
        Some(most) => Finding::fine(CHECK, format!("up to {most}")),
        None => Finding::fine(CHECK, "unlimited"),
    }
}

fn pinned(host: &Host) -> Finding {
    const CHECK: &str = "locked memory";
    match limit(host, "Max locked memory") {
        Some(most) => {
            let remedy =
                "the unit lifts it; whatever else starts the agent should, too (LimitMEMLOCK=infinity)";
            Finding::advice(CHECK, format!("{most} bytes for this shell's processes"), remedy)
        }
        None => Finding::fine(CHECK, "unlimited"),
    }
}

/// The interface with the address on the fabric: whether it is there, what it carries, and how fast.
fn interface(host: &Host, config: &Config) -> Vec<Finding> {
    const CHECK: &str = "interface";
    let address = config.listen.ip();
    let interfaces = match &host.interfaces {
        Ok(interfaces) => interfaces,
        Err(why) => return vec![Finding::advice(CHECK, why, "install Debian's package iproute2")],
    };
    let has = |interface: &&Interface| interface.addr_info.iter().any(|at| at.local == Some(address));
    let Some(Interface { ifname, flags, mtu, .. }) = interfaces.iter().find(has) else {
        let remedy = "give `listen` this host's address on the fabric, or give that address to an interface";
        return vec![Finding::wrong(CHECK, format!("none has {address}"), remedy)];
    };
    if address.is_loopback() {
        let remedy = "agents of other hosts cannot reach it: give `listen` this host's address on the fabric";
        return vec![Finding::advice(CHECK, format!("{ifname} has {address}"), remedy)];
    }
    if !flags.iter().any(|flag| flag == "LOWER_UP") {
        let remedy = format!("`ip link set {ifname} up`; if it is, look at its cable and at the switch");
        return vec![Finding::wrong(CHECK, format!("{ifname} has {address} and is down"), remedy)];
    }
    let device = Path::new("sys/class/net").join(ifname);
    let driver = std::fs::read_link(host.root.join(&device).join("device/driver")).ok();
    let driver = driver.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let driver = driver.unwrap_or_else(|| "no device of its own".to_owned());
    let speed = host.text(device.join("speed")).parse::<u64>().ok();
    let mut findings = vec![match speed {
        Some(speed) => Finding::fine(CHECK, format!("{ifname} has {address}: {speed} Mbit/s, {driver}")),
        None if config.telemetry.as_ref().is_some_and(|table| !table.contains_key("rate")) => {
            let remedy = format!(
                "its driver does not say how fast it is: rate = {{ {ifname} = \"25Gbit/s\" }} in [telemetry]"
            );
            Finding::advice(CHECK, format!("{ifname} has {address}: {driver}"), remedy)
        }
        None => Finding::fine(CHECK, format!("{ifname} has {address}: {driver}")),
    }];
    findings.push(match *mtu {
        mtu if mtu < 1500 => {
            let remedy = format!(
                "packets are small: `ip link set {ifname} mtu 1500`, or 9000 where all switches take that"
            );
            Finding::advice("MTU", format!("{mtu} bytes"), remedy)
        }
        mtu if config.uses_rdma() && mtu < ROCE_MTU => {
            let remedy = format!("packets of RoCE with 4096 bytes need {ROCE_MTU}, here and at all switches");
            Finding::advice("MTU", format!("{mtu} bytes"), remedy)
        }
        mtu => Finding::fine("MTU", format!("{mtu} bytes")),
    });
    findings
}

/// The device for RDMA with the address among its GIDs, as RoCE v2.
fn device(host: &Host, address: IpAddr) -> Finding {
    const CHECK: &str = "RDMA device";
    let devices = Path::new("sys/class/infiniband");
    let names = host.names(devices);
    if names.is_empty() {
        let remedy = "no driver has made one: is it loaded (mlx5_ib, rdma_rxe), and is the package ibverbs-providers there?";
        return Finding::wrong(CHECK, "none", remedy);
    }
    let gid = match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    let mut seen = Vec::new();
    for name in &names {
        for port in host.names(devices.join(name).join("ports")) {
            let place = devices.join(name).join("ports").join(&port);
            let found = host.names(place.join("gids")).into_iter().find(|index| {
                let kind = host.text(place.join("gid_attrs/types").join(index));
                kind == "RoCE v2" && host.text(place.join("gids").join(index)).parse() == Ok(gid)
            });
            let state = host.text(place.join("state"));
            match found {
                Some(index) if state.ends_with("ACTIVE") => {
                    return Finding::fine(
                        CHECK,
                        format!("{name}:{port}, GID {index} is {address} as RoCE v2"),
                    );
                }
                Some(_) => seen.push(format!("{name}:{port} is {state}")),
                None => seen.push(format!("{name}:{port} has no GID for it")),
            }
        }
    }
    let remedy =
        "give the address to the device's own interface, bring that up, and see that it speaks RoCE v2";
    Finding::wrong(CHECK, format!("none for {address}: {}", seen.join("; ")), remedy)
}

fn clock(host: &Host) -> Finding {
    const CHECK: &str = "clock";
    let remedy = "install chrony or systemd-timesyncd: certificates are good by the time of day";
    match host.synchronised {
        Some(true) => Finding::fine(CHECK, "synchronised"),
        Some(false) => Finding::advice(CHECK, "not synchronised", remedy),
        None => Finding::advice(CHECK, "nobody says whether it is synchronised", remedy),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    const CONFIG: &str = "host = \"h0\"\ncontrol = \"10.0.0.1:7000\"\nlisten = \"10.1.0.1:7100\"\n";

    /// A host that has all, in this folder.
    fn host(root: &Path) -> Host {
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/sys/kernel/osrelease", "6.1.0-31-amd64\n");
        write("proc/self/status", "Name:\tx\nCapBnd:\t000001ffffffffff\nSeccomp:\t0\n");
        write(
            "proc/self/limits",
            "Max open files            1024                 1048576              files\nMax locked memory         unlimited            unlimited            bytes\n",
        );
        write("sys/kernel/security/lsm", "lockdown,landlock,yama\n");
        write("sys/kernel/btf/vmlinux", "");
        write("sys/class/net/eth0/speed", "25000\n");
        let port = "sys/class/infiniband/mlx5_0/ports/1";
        write(&format!("{port}/state"), "4: ACTIVE\n");
        write(&format!("{port}/gids/3"), "0000:0000:0000:0000:0000:ffff:0a01:0001\n");
        write(&format!("{port}/gid_attrs/types/3"), "RoCE v2\n");
        let list =
            r#"[{"ifname":"eth0","flags":["UP","LOWER_UP"],"mtu":9000,"addr_info":[{"local":"10.1.0.1"}]}]"#;
        let interfaces = serde_json::from_str(list).map_err(|error| error.to_string());
        Host { root: root.to_owned(), interfaces, synchronised: Some(true) }
    }

    fn write(host: &Host, path: &str, text: &str) {
        std::fs::write(host.root.join(path), text).unwrap();
    }

    /// What is found of a host that this was done to.
    fn found(more: &str, harm: impl FnOnce(&mut Host)) -> Vec<Finding> {
        let folder = tempfile::tempdir().unwrap();
        let mut host = host(folder.path());
        harm(&mut host);
        let config = toml::from_str(&format!("{CONFIG}{more}")).unwrap();
        check(&host, &config)
    }

    /// Of such a host, the one finding that is not fine.
    fn one(more: &str, harm: impl FnOnce(&mut Host)) -> (&'static str, State) {
        let findings = found(more, harm);
        let mut bad = findings.iter().filter(|finding| finding.state != State::Fine);
        let (first, second) = (bad.next().expect("something is found"), bad.next());
        assert_eq!(second, None);
        assert!(first.remedy.is_some());
        (first.check, first.state)
    }

    fn interface(host: &mut Host) -> &mut Interface {
        host.interfaces.as_mut().unwrap().first_mut().unwrap()
    }

    #[test]
    fn a_host_with_everything_is_fine() {
        let findings = found("[verbs]\n[telemetry]\n", |_| {});
        assert!(findings.iter().all(|finding| finding.state == State::Fine), "{findings:?}");
        assert_eq!(findings.len(), 9);
    }

    #[test]
    fn a_kernel_that_cannot_confine_the_agent_is_found() {
        let sandbox = |harm: fn(&mut Host)| one("", harm) == ("sandbox", State::Advice);
        assert!(sandbox(|host| write(host, "sys/kernel/security/lsm", "lockdown,yama")));
        assert!(sandbox(|host| {
            write(host, "sys/kernel/security/lsm", "");
            write(host, "proc/sys/kernel/osrelease", "5.10.0-1-amd64");
        }));
        assert!(sandbox(|host| write(host, "proc/self/status", "CapBnd:\t000001ffffffffff\n")));
        assert_eq!(one("[sandbox]\non = false\n", |_| {}), ("sandbox", State::Advice));
    }

    #[test]
    fn a_fault_of_the_system_is_found_alone() {
        let telemetry = "[telemetry]\n";
        let release = |host: &mut Host| write(host, "proc/sys/kernel/osrelease", "5.7.19");
        assert_eq!(one(telemetry, release), ("kernel", State::Wrong));
        let bound = |bits: &str| {
            let line = format!("CapBnd:\t{bits}\nSeccomp:\t0\n");
            move |host: &mut Host| write(host, "proc/self/status", &line)
        };
        assert_eq!(one(telemetry, bound("0000007fffffffff")), ("privileges", State::Wrong));
        assert_eq!(one("", bound("0000000000000000")), ("privileges", State::Wrong));
        let limits = "Max open files            1024                 4096                 files\n";
        let files = |host: &mut Host| write(host, "proc/self/limits", limits);
        assert_eq!(one("", files), ("open files", State::Advice));
        assert_eq!(one("", |host| host.synchronised = None), ("clock", State::Advice));
    }

    #[test]
    fn a_fault_of_the_network_is_found_alone() {
        assert_eq!(one("", |host| interface(host).addr_info.clear()), ("interface", State::Wrong));
        assert_eq!(one("", |host| interface(host).flags.clear()), ("interface", State::Wrong));
        let unknown = |host: &mut Host| write(host, "sys/class/net/eth0/speed", "-1");
        assert_eq!(one("[telemetry]\n", unknown), ("interface", State::Advice));
        assert_eq!(one("", |host| interface(host).mtu = 1400), ("MTU", State::Advice));
        assert_eq!(one("[verbs]\n", |host| interface(host).mtu = 1500), ("MTU", State::Advice));
        let port = "sys/class/infiniband/mlx5_0/ports/1";
        let down = |host: &mut Host| write(host, &format!("{port}/state"), "1: DOWN");
        assert_eq!(one("[rdma]\n", down), ("RDMA device", State::Wrong));
        let old = |host: &mut Host| write(host, &format!("{port}/gid_attrs/types/3"), "IB/RoCE v1");
        assert_eq!(one("[verbs]\n", old), ("RDMA device", State::Wrong));
    }
}
