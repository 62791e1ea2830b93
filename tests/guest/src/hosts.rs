//! The guest's hosts: N links with an address and a SoftRoCE device each, and the switch between them.
//!
//! All hosts share one network namespace, because SoftRoCE works in no other: routes by source address send what one
//! host says to another over the wire, and the table of local addresses is asked only for what arrives, for a host's
//! words to itself, and for loopback. The switch, a bridge, is in a namespace of its own.

use anyhow::{Context, Result, bail};
use harmonaize_guest::MTU;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The namespace of the switch.
const SWITCH: &str = "sw";
/// How long a device may take to come up.
const PATIENCE: Duration = Duration::from_secs(20);
/// How the addresses of hosts begin in a GID that maps an IPv4 address.
const GID: &str = ":ffff:0a00:";

const SYSTEM: &[(&str, &str)] = &[
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    ("ipv4/conf/all/accept_local", "1"),
    ("ipv4/conf/all/arp_ignore", "1"),
    ("ipv4/conf/all/arp_announce", "2"),
    ("ipv6/conf/default/disable_ipv6", "1"),
];

/// Builds `count` hosts: link `hI`, port `pI` of the switch, address 10.0.0.(I+1), device `rxeI`.
pub(crate) fn build(count: u32) -> Result<()> {
    if count > 32 {
        bail!("{count} hosts are more than the guest can have (32)");
    }
    for (name, value) in SYSTEM {
        let path = PathBuf::from("/proc/sys/net").join(name);
        // A kernel without IPv6 has nothing to turn off.
        if path.exists() {
            fs::write(&path, value).with_context(|| format!("cannot set {name}"))?;
        }
    }
    call(&["ip", "netns", "add", SWITCH])?;
    fs::write("/run/here", links(count)?)?;
    call(&["ip", "-batch", "/run/here"])?;
    fs::write("/run/switch", ports(count)?)?;
    call(&["ip", "-n", SWITCH, "-batch", "/run/switch"])?;
    for host in 0..count {
        let (device, link) = (format!("rxe{host}"), format!("h{host}"));
        call(&["rdma", "link", "add", &device, "type", "rxe", "netdev", &link])?;
    }
    (0..count).try_for_each(|host| ready(&format!("rxe{host}")))?;
    (0..count).try_for_each(|host| (0..host).try_for_each(|other| meet(host, other)))
}

/// Has two hosts learn each other's hardware address. A first request may be lost while links come up, and a queue pair that
/// is to be connected waits for the answer no longer than the next would take.
fn meet(host: u32, other: u32) -> Result<()> {
    let [from, to] = [host, other].map(|host| format!("10.0.0.{}", host + 1));
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut ping = Command::new("/usr/bin/ping");
        ping.args(["-c", "1", "-W", "1", "-I", &from, &to]).stdout(Stdio::null());
        if ping.status().context("cannot start ping")?.success() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            bail!("{from} does not reach {to}");
        }
    }
}

/// Waits until a device is active and has an address.
pub(crate) fn ready(device: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !active(device) || gid_index(device).is_err() {
        if Instant::now() >= deadline {
            bail!("{device} is not active, or has no address");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// What a person in the guest should know.
pub(crate) fn describe(count: u32) -> String {
    let mut text = String::new();
    for host in 0..count {
        let index = gid_index(&format!("rxe{host}")).map_or("none".to_owned(), |index| index.to_string());
        text.push_str(&format!(
            "host {host}: rxe{host} on h{host}, 10.0.0.{}, GID index {index}\n",
            host + 1
        ));
    }
    text + "The switch: `ip netns exec sw ...`; loss: `tc -n sw qdisc add dev p0 root netem loss 1%`."
}

/// A word of a command, with `{gid:DEVICE}` replaced by the device's GID index.
pub(crate) fn with_gid_index(word: &str) -> Result<String> {
    let Some((before, rest)) = word.split_once("{gid:") else { return Ok(word.to_owned()) };
    let (device, after) = rest.split_once('}').with_context(|| format!("no end of the device in {word}"))?;
    Ok(format!("{before}{}{after}", gid_index(device)?))
}

fn links(count: u32) -> Result<String> {
    let mut text = String::from("link set lo up\n");
    for host in 0..count {
        let (address, table) = (format!("10.0.0.{}", host + 1), 100 + host);
        writeln!(text, "link add h{host} mtu {MTU} type veth peer name p{host} netns {SWITCH} mtu {MTU}")?;
        writeln!(text, "link set h{host} address 02:00:00:00:00:{host:02x} up")?;
        writeln!(text, "addr add {address}/24 dev h{host}")?;
        writeln!(text, "rule add pref 10 iif h{host} lookup local")?;
        writeln!(text, "rule add pref 11 from {address} to {address} lookup local")?;
        writeln!(text, "route add 10.0.0.0/24 dev h{host} src {address} table {table}")?;
        writeln!(text, "rule add pref 12 from {address} lookup {table}")?;
    }
    text.push_str(
        "rule add pref 15 to 127.0.0.0/8 lookup local\nrule add pref 20 lookup main\nrule del pref 0\n",
    );
    Ok(text)
}

fn ports(count: u32) -> Result<String> {
    let mut text = String::from("link set lo up\nlink add br0 type bridge\nlink set br0 up\n");
    for host in 0..count {
        writeln!(text, "link set p{host} master br0 up")?;
    }
    Ok(text)
}

/// Calls a program in `/usr/bin`.
pub(crate) fn call(words: &[&str]) -> Result<()> {
    let Some((program, arguments)) = words.split_first() else { bail!("no program") };
    let status = Command::new(format!("/usr/bin/{program}")).args(arguments).status();
    let status = status.with_context(|| format!("cannot start {program}"))?;
    if !status.success() {
        bail!("`{}` ended with {status}", words.join(" "));
    }
    Ok(())
}

fn port(device: &str) -> PathBuf {
    PathBuf::from(format!("/sys/class/infiniband/{device}/ports/1"))
}

fn active(device: &str) -> bool {
    fs::read_to_string(port(device).join("state")).is_ok_and(|state| state.contains("ACTIVE"))
}

/// The index of the RoCEv2 GID with the device's IPv4 address.
fn gid_index(device: &str) -> Result<u32> {
    let folder = port(device).join("gids");
    let entries = fs::read_dir(&folder).with_context(|| format!("there is no device {device}"))?;
    let mut found: Vec<u32> = Vec::new();
    for entry in entries {
        let entry = entry?;
        let gid = fs::read_to_string(entry.path()).unwrap_or_default();
        if gid.contains(GID) {
            found.extend(entry.file_name().to_string_lossy().parse::<u32>());
        }
    }
    found.into_iter().min().with_context(|| format!("{device} has no GID with an IPv4 address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_host_has_link_address_and_routes() {
        let text = links(12).unwrap();
        assert!(text.contains("link set h11 address 02:00:00:00:00:0b up\n"));
        assert!(text.contains("rule add pref 11 from 10.0.0.12 to 10.0.0.12 lookup local\n"));
        assert!(text.contains("route add 10.0.0.0/24 dev h11 src 10.0.0.12 table 111\n"));
        assert!(text.ends_with("rule del pref 0\n"), "the last, or the hosts' own tables are never asked");
        assert_eq!(ports(2).unwrap().lines().count(), 5);
    }

    #[test]
    fn arguments_without_a_device_stay() {
        assert_eq!(with_gid_index("-g").unwrap(), "-g");
        assert!(with_gid_index("{gid:none0}").unwrap_err().to_string().contains("none0"));
        assert!(with_gid_index("{gid:rxe0").is_err());
    }
}
