//! The guest's hosts in two racks under two spines, in place of the one switch. Between racks there are two ways. Switches are
//! network namespaces that route, and choose among equal ways by addresses and ports.

use crate::host::{Host, may_break, until};
use crate::provider::HOSTS;
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::namespace::{Namespace, batch};
use std::net::{Ipv4Addr, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// What each link carries, in Mbit/s. A guest whose processor is emulated forwards more than that.
pub(crate) const RATE: u32 = 40;
/// As all of the guest's links.
const MTU: u32 = 4200;
/// What others send, in Mbit/s. It is less than a link carries, so that no queue grows for ever. A train that meets it comes out at 22
/// Mbit/s of 40.
const OTHERS_RATE: u32 = 32;
/// Bytes of a datagram of others: so few packets cost an emulated processor next to nothing.
const DATAGRAM: usize = 16_000;
/// Between switches, where others' packets pass.
const SWITCH_MTU: u32 = 16_384;
/// What a socket of others keeps waiting for the shaper of their link, as the kernel counts. It lasts 60 ms at least.
const WAITING: usize = 300_000;
/// Where packets of RoCE v2 go.
const ROCE_PORT: u16 = 4791;

const RACKS: usize = 2;
const SPINES: usize = 2;
const SWITCHES: [&str; 4] = ["leaf0", "leaf1", "spine0", "spine1"];
/// The host of others, at the first leaf.
const OTHERS: &str = "others";

/// Hosts of a rack.
fn hosts(rack: usize) -> std::ops::Range<usize> {
    let each = HOSTS / RACKS;
    rack * each..(rack + 1) * each
}

fn leaf(rack: usize) -> Namespace {
    Namespace::named(format!("leaf{rack}"))
}

fn spine(number: usize) -> Namespace {
    Namespace::named(format!("spine{number}"))
}

/// The address by which a leaf tells that a packet has died there.
fn leaf_address(rack: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 1, 1 + rack as u8)
}

fn spine_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 1, 11 + number as u8)
}

/// Both ends of the link of a leaf and a spine.
fn link(rack: usize, spine: usize) -> (Ipv4Addr, Ipv4Addr) {
    let first = 2 * (SPINES * rack + spine) as u8;
    (Ipv4Addr::new(10, 0, 2, first), Ipv4Addr::new(10, 0, 2, first + 1))
}

/// Where others' packets go that cross a spine, at the second leaf.
fn sink(spine: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 3, spine as u8)
}

/// Both ends of the link of the first leaf and others.
const OTHERS_LINK: (Ipv4Addr, Ipv4Addr) = (Ipv4Addr::new(10, 0, 4, 0), Ipv4Addr::new(10, 0, 4, 1));

/// What control is told of the fabric.
pub(crate) fn topology() -> String {
    let mut text = String::new();
    for rack in 0..RACKS {
        let addresses: Vec<Ipv4Addr> =
            (0..SPINES).map(|spine| link(rack, spine).0).chain([leaf_address(rack)]).collect();
        text += &format!("[[switch]]\nname = \"leaf{rack}\"\naddresses = {}\n", listed(&addresses));
        for host in hosts(rack) {
            text += &format!("[[host]]\nname = \"h{host}\"\nrack = \"r{rack}\"\n");
            text += &linked(&format!("h{host}"), &format!("leaf{rack}"));
        }
    }
    for spine in 0..SPINES {
        let addresses: Vec<Ipv4Addr> =
            (0..RACKS).map(|rack| link(rack, spine).1).chain([spine_address(spine)]).collect();
        text += &format!(
            "[[switch]]\nname = \"spine{spine}\"\nkind = \"spine\"\naddresses = {}\n",
            listed(&addresses)
        );
        (0..RACKS).for_each(|rack| text += &linked(&format!("leaf{rack}"), &format!("spine{spine}")));
    }
    text
}

fn listed(addresses: &[Ipv4Addr]) -> String {
    let texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    format!("{texts:?}")
}

fn linked(from: &str, to: &str) -> String {
    format!("[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\nrate = \"{RATE}Mbit/s\"\n")
}

/// A shaper that holds a queue of up to 200 ms: nothing is lost where others' packets stand.
fn shaped(device: &str) -> String {
    shaped_to(device, RATE, 64)
}

/// The same for a rate in Mbit/s, with a bucket in KiB. It makes up for a timer that is late by what it holds.
fn shaped_to(device: &str, rate: u32, bucket: u32) -> String {
    format!("qdisc replace dev {device} root tbf rate {rate}mbit burst {bucket}kb latency 200ms")
}

/// The hardware address of a leaf's port to a host.
fn port_mac(host: usize) -> String {
    format!("02:00:00:00:01:{host:02x}")
}

/// The fabric, until this is dropped.
pub(crate) struct Spines(());

impl Spines {
    /// Builds it. `None`, loudly, where nobody's devices may be taken away.
    pub(crate) fn build() -> Option<Self> {
        if !may_break(HOSTS) {
            return None;
        }
        // From here on a drop puts everything back.
        let fabric = Self(());
        fabric.wire().unwrap();
        reach_each_other();
        Some(fabric)
    }

    fn wire(&self) -> Result<()> {
        let (leaves, spines) = ((0..RACKS).map(leaf), (0..SPINES).map(spine));
        for switch in leaves.chain(spines) {
            batch("ip", &[format!("netns add {}", switch.name())])?;
            for (setting, value) in [
                ("net.ipv4.ip_forward", "1"),
                // By both addresses, the protocol and both ports, as packets bear them.
                ("net.ipv4.fib_multipath_hash_policy", "3"),
                ("net.ipv4.fib_multipath_hash_fields", "55"),
                ("net.ipv4.conf.all.send_redirects", "0"),
                ("net.ipv4.conf.default.send_redirects", "0"),
                // Traced ways are many at a time, and switches answer each probe that dies there.
                ("net.ipv4.icmp_ratemask", "0"),
            ] {
                switch.set(setting, value)?;
            }
            switch.ip(&["link set lo up".to_owned()])?;
        }
        for rack in 0..RACKS {
            for spine in 0..SPINES {
                let (near, far) = (format!("up{spine}"), format!("down{rack}"));
                let near = format!("{near} mtu {SWITCH_MTU} netns leaf{rack}");
                let far = format!("{far} mtu {SWITCH_MTU} netns spine{spine}");
                batch("ip", &[format!("link add {near} type veth peer name {far}")])?;
            }
        }
        for rack in 0..RACKS {
            self.wire_leaf(rack)?;
        }
        for number in 0..SPINES {
            self.wire_spine(number)?;
        }
        self.wire_others()?;
        for host in 0..HOSTS {
            Host(host as u32).wait_until_active();
            let others = (0..HOSTS).filter(|other| *other != host);
            let known = |other: usize| {
                let address = Host(other as u32).address();
                format!("neigh replace {address} lladdr {} dev h{host} nud permanent", port_mac(host))
            };
            batch("ip", &others.map(known).collect::<Vec<_>>())?;
            batch("tc", &[shaped(&format!("h{host}"))])?;
        }
        // A device with a queue for each flow does so. Else packets of a queue pair overtake one another, and are sent again.
        receive_on(1, &SWITCHES)
    }

    fn wire_leaf(&self, rack: usize) -> Result<()> {
        let (here, own) = (leaf(rack), leaf_address(rack));
        let mut lines = vec![format!("addr add {own}/32 dev lo")];
        let mut shapers = Vec::new();
        let (mut hops, mut sinks) = (String::new(), Vec::new());
        for spine in 0..SPINES {
            let (near, far) = link(rack, spine);
            lines.push(format!("addr add {near}/31 dev up{spine}"));
            lines.push(format!("link set up{spine} up"));
            hops += &format!(" nexthop via {far} dev up{spine}");
            sinks.push(match rack {
                0 => format!("route add {}/32 via {far} dev up{spine}", sink(spine)),
                _ => format!("addr add {}/32 dev lo", sink(spine)),
            });
            shapers.push(shaped(&format!("up{spine}")));
        }
        lines.append(&mut sinks);
        for host in 0..HOSTS {
            let address = Host(host as u32).address();
            if !hosts(rack).contains(&host) {
                lines.push(format!("route add {address}/32 src {own}{hops}"));
                continue;
            }
            moved("sw", here.name(), host)?;
            lines.push(format!("link set p{host} address {} mtu {} up", port_mac(host), MTU));
            lines.push(format!(
                "neigh replace {address} lladdr 02:00:00:00:00:{host:02x} dev p{host} nud permanent"
            ));
            lines.push(format!("route add {address}/32 dev p{host} src {own}"));
            shapers.push(shaped(&format!("p{host}")));
        }
        here.ip(&lines)?;
        here.tc(&shapers)
    }

    /// The shaper of the others' link keeps their rate, from a queue that their socket keeps filled. So it is steady also where
    /// processors are busy.
    fn wire_others(&self) -> Result<()> {
        let (first, host, (near, far)) = (leaf(0), Namespace::named(OTHERS), OTHERS_LINK);
        let ends = format!(
            "link add others mtu {SWITCH_MTU} netns {} type veth peer name out mtu {SWITCH_MTU} netns {OTHERS}",
            first.name()
        );
        batch("ip", &[format!("netns add {OTHERS}"), ends])?;
        first.ip(&[format!("addr add {near}/31 dev others"), "link set others up".to_owned()])?;
        host.ip(&[
            format!("addr add {far}/31 dev out"),
            "link set out up".to_owned(),
            format!("route add default via {near}"),
        ])?;
        host.tc(&[shaped_to("out", OTHERS_RATE, 256)])
    }

    fn wire_spine(&self, number: usize) -> Result<()> {
        let (here, own) = (spine(number), spine_address(number));
        let mut lines = vec![format!("addr add {own}/32 dev lo")];
        for rack in 0..RACKS {
            let (far, near) = link(rack, number);
            lines.push(format!("addr add {near}/31 dev down{rack}"));
            lines.push(format!("link set down{rack} up"));
            for host in hosts(rack) {
                let address = Host(host as u32).address();
                lines.push(format!("route add {address}/32 via {far} dev down{rack} src {own}"));
            }
        }
        lines.push(format!("route add {}/32 via {} dev down1", sink(number), link(1, number).0));
        here.ip(&lines)?;
        // What comes from the first leaf to RoCE's port is counted, what others send too, and goes on. No shaper is needed here: what
        // comes from one leaf goes to the other.
        let counted = |prio: u32, matched: &str| {
            format!("filter add dev down0 ingress protocol ip prio {prio} u32 {matched} action ok")
        };
        here.tc(&[
            "qdisc add dev down0 clsact".to_owned(),
            counted(1, &format!("match ip protocol 17 0xff match ip dport {ROCE_PORT} 0xffff")),
            counted(2, &format!("match ip dst {}/32", sink(number))),
        ])
    }

    /// Bytes of RoCE that have come from the first rack over a spine so far.
    pub(crate) fn roce_bytes(&self, spine: &str) -> Result<u64> {
        self.counted(spine, 1)
    }

    /// Bytes of others, likewise.
    pub(crate) fn others_bytes(&self, spine: &str) -> Result<u64> {
        self.counted(spine, 2)
    }

    fn counted(&self, spine: &str, prio: u32) -> Result<u64> {
        let said = output_of("tc", &format!("-n {spine} -s filter show dev down0 ingress prio {prio}"))?;
        let mut words = said.split_whitespace().skip_while(|word| *word != "Sent");
        let bytes = words.nth(1).and_then(|bytes| bytes.parse().ok());
        bytes.with_context(|| format!("{spine} counts nothing: {said}"))
    }

    /// The spine to which the kernel of the sender's leaf sends datagrams of RoCE from a port.
    pub(crate) fn spine_of(&self, from: &str, to: &str, source_port: u16) -> Result<String> {
        let number = |name: &str| name.strip_prefix('h').and_then(|digits| digits.parse::<u32>().ok());
        let (from, to) = number(from).zip(number(to)).with_context(|| format!("hosts {from} and {to}"))?;
        let leaf = format!("leaf{}", from as usize / (HOSTS / RACKS));
        let [source, target] = [from, to].map(|host| Host(host).address());
        let flow = format!("from {source} iif p{from} ipproto 17 sport {source_port} dport {ROCE_PORT}");
        let said = output_of("ip", &format!("-n {leaf} route get {target} {flow}"))?;
        let device = said.split_whitespace().skip_while(|word| *word != "dev").nth(1);
        let spine = device.and_then(|device| device.strip_prefix("up"));
        Ok(format!("spine{}", spine.with_context(|| format!("{leaf} sends by no spine: {said}"))?))
    }

    /// What an onlooker would want to know of the switches.
    pub(crate) fn state(&self) -> String {
        let mut text = String::new();
        for name in SWITCHES.into_iter().chain([OTHERS]) {
            let said = output_of("tc", &format!("-n {name} -s qdisc show"))
                .unwrap_or_else(|error| format!("{error:#}"));
            text += &format!("{name}:\n{said}");
        }
        for name in ["spine0", "spine1"] {
            text += &format!("bytes of RoCE from the first rack over {name}: {:?}\n", self.roce_bytes(name));
        }
        text
    }
}

impl Drop for Spines {
    fn drop(&mut self) {
        let back = || {
            // What was never done needs no undoing.
            for host in 0..HOSTS {
                let _ = moved(leaf(host / (HOSTS / RACKS)).name(), "sw", host);
                let _ = output_of("ip", &format!("-n sw link set p{host} master br0 mtu {MTU} up"));
                let _ = output_of("tc", &format!("qdisc del dev h{host} root"));
                for other in (0..HOSTS).filter(|other| *other != host) {
                    let address = Host(other as u32).address();
                    let _ = output_of("ip", &format!("neigh del {address} dev h{host}"));
                }
            }
            let _ = receive_on(0, &["sw"]);
            for name in SWITCHES.into_iter().chain([OTHERS]) {
                let _ = output_of("ip", &format!("netns del {name}"));
            }
            (0..HOSTS).for_each(|host| Host(host as u32).wait_until_active());
            reach_each_other();
        };
        // A test that has failed says why; the next one finds the switch, or fails too.
        if !std::thread::panicking() {
            back();
        } else {
            let _ = std::panic::catch_unwind(back);
        }
    }
}

/// What a program printed, which must have ended well.
fn output_of(program: &str, words: &str) -> Result<String> {
    let mut command = Command::new(program);
    let output = command.args(words.split_whitespace()).stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{program} {words}` failed: {}", said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Moves a switch's port to a host from one namespace to another.
fn moved(from: &str, to: &str, host: usize) -> Result<()> {
    output_of("ip", &format!("-n {from} link set p{host} netns {to}")).map(drop)
}

/// Sets the processors, as a mask, on which hosts' links and those of switches are received; 0 for any.
fn receive_on(mask: u32, switches: &[&str]) -> Result<()> {
    let script = format!(
        "for queue in /sys/class/net/[hpud][0-9po]*/queues/rx-0/rps_cpus; do echo {mask} > $queue || exit; done"
    );
    let inside = switches.iter().map(|switch| vec!["ip", "netns", "exec", *switch]);
    for namespace in std::iter::once(Vec::new()).chain(inside) {
        let words = [namespace.as_slice(), &["busybox", "sh", "-c", &script]].concat();
        let (program, arguments) = words.split_first().context("no program")?;
        let status = Command::new(program).args(arguments).status()?;
        ensure!(status.success(), "{words:?} ended with {status}");
    }
    Ok(())
}

/// Waits until all hosts reach each other.
fn reach_each_other() {
    for host in 0..HOSTS {
        for other in (0..HOSTS).filter(|other| *other != host) {
            let [from, to] = [host, other].map(|host| Host(host as u32).address());
            until(&format!("{from} does not reach {to}"), || {
                output_of("ping", &format!("-c 1 -W 1 -I {from} {to}")).is_ok()
            });
        }
    }
}

/// A steady flow of others from the first leaf to the second over one spine.
pub(crate) struct Others {
    stop: Arc<AtomicBool>,
    sender: Option<JoinHandle<()>>,
    /// Holds the receiver's port; nobody reads it.
    _sink: UdpSocket,
}

impl Others {
    /// Begins it.
    pub(crate) fn begin(name: &str) -> Result<Self> {
        let number = (0..SPINES).find(|number| spine(*number).name() == name);
        let target = sink(number.with_context(|| format!("no spine {name}"))?);
        let receiver = leaf(1).enter(|| UdpSocket::bind((target, 0)))??;
        let target = receiver.local_addr()?;
        let socket = Namespace::named(OTHERS).enter(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))??;
        socket.connect(target)?;
        rustix::net::sockopt::set_socket_send_buffer_size_force(&socket, WAITING)?;
        let stop = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&stop);
        let sender = std::thread::spawn(move || {
            // Others have processors of their own. This has little to do: a few calls each 30 ms.
            let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), -20);
            while !ended.load(Ordering::Relaxed) {
                // Waits for room in the queue.
                let _ = socket.send(&[0x5a; DATAGRAM]);
            }
        });
        Ok(Self { stop, sender: Some(sender), _sink: receiver })
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(sender) = self.sender.take() {
            let _ = sender.join();
        }
    }
}
