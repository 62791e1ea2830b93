//! What the machines of hosts and offload units are: cards, addresses, configurations, and what each has to run.

use crate::vm::machine::{Card, Wire};
use anyhow::Result;
use harmonaize_guest::{Job, Link, Server, Step};
use harmonaize_identity::{Authority, CONTROL, Folder, Use};
use std::path::Path;
use std::time::Duration;

/// Ranks on each host.
pub(super) const RANKS: u32 = 2;
/// Where the guests have the project's programs.
pub(super) const BINARIES: &str = "/usr/lib/harmonaize";
/// Where the guests have configurations.
const SETTINGS: &str = "/etc/harmonaize";
/// Where the guests have what tenant and agents know.
pub(super) const SECRET: &str = "/etc/harmonaize/secret";
/// The program of the tenant's ranks.
pub(super) const TENANT: &str = "offloaded";

const CONTROL_PORT: u16 = 7100;
const AGENT_PORT: u16 = 7200;
const AGGREGATOR_PORT: u16 = 7400;
const TENANT_PORT: u16 = 7300;
const METRICS_PORT: u16 = 9464;
const PING_PORT: u16 = 18_600;

/// How long a ping-pong of two machines may take. It takes seconds; the rest is for the other's boot and for a
/// machine that is busy.
const PING_LIMIT: Duration = Duration::from_secs(120);
/// What the collectives may take, with the wait for agents and control.
const RANKS_LIMIT: Duration = Duration::from_secs(180);
/// How long metrics may lack what has crossed a unit's interfaces.
const TELEMETRY_LIMIT: Duration = Duration::from_secs(60);
/// Longer than all else: agents serve until the run is over.
const AGENT_LIMIT: Duration = Duration::from_secs(900);

/// The device of a host towards its offload unit.
const HOST_DEVICE: &str = "rxe0";
/// The device of an offload unit towards its host.
const INNER_DEVICE: &str = "rxe_host";
/// The device of an offload unit towards the fabric.
const FABRIC_DEVICE: &str = "rxe_fabric";

/// From how many hosts on a ring sends more than an aggregator takes. Then one runs on the first unit.
const AGGREGATED_FROM: u32 = 3;
/// Its name in the topology.
const AGGREGATOR: &str = "agg0";

/// Which side of a pair a machine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Unit,
    Host,
}

/// One machine.
#[derive(Debug, Clone)]
pub(super) struct MachineSpec {
    pub(super) side: Side,
    pub(super) name: String,
    pub(super) cards: Vec<Card>,
    pub(super) job: Job,
    /// Files to add: path in the guest, contents.
    pub(super) files: Vec<(String, String)>,
}

/// What is to be done.
#[derive(Debug, Clone)]
pub(super) struct Order {
    /// Pairs of a host and its offload unit, 1 to 3.
    pub(super) pairs: u32,
    /// From which the ranks make their data.
    pub(super) seed: u32,
}

impl Order {
    /// The machines in the order in which they start, units first: they listen, the others connect.
    pub(super) fn places(&self, sockets: &Path) -> Vec<MachineSpec> {
        let units = (0..self.pairs).map(|pair| self.unit(pair, sockets));
        units.chain((0..self.pairs).map(|pair| self.host(pair, sockets))).collect()
    }

    fn unit(&self, pair: u32, sockets: &Path) -> MachineSpec {
        let to = |pair: u32| sockets.join(format!("fabric{pair}"));
        let fabric = match pair {
            0 if self.pairs > 2 => Wire::Hub((1..self.pairs).map(to).collect()),
            0 => Wire::Listen(to(1)),
            _ => Wire::Connect(to(pair)),
        };
        let inner = Wire::Listen(sockets.join(format!("host{pair}")));
        let [host, outer] =
            [(0, inner), (1, fabric)].map(|(number, wire)| Card { mac: mac(pair, number), wire });
        let links = vec![
            link(&host, "host", &inner_address(pair, 2), INNER_DEVICE),
            link(&outer, "fabric", &fabric_address(pair), FABRIC_DEVICE),
        ];
        let mut steps =
            vec![Step::new("ping-of-host", &strs(&ping(INNER_DEVICE, PING_PORT, None)), PING_LIMIT)];
        // The first listens for one other.
        if self.pairs > 1 && pair < 2 {
            let to = (pair > 0).then(|| fabric_address(0));
            let words = ping(FABRIC_DEVICE, PING_PORT + 1, to.as_deref());
            steps.push(Step::new("ping-between-units", &strs(&words), PING_LIMIT));
        }
        let mut files = vec![(format!("{SETTINGS}/agent.toml"), self.agent(pair))];
        let aggregates = pair == 0 && self.aggregates();
        let mut agent = if aggregates {
            files.push((format!("{SETTINGS}/aggregator.toml"), aggregator()));
            let words = [daemon_in("aggregator").join(" "), daemon("agent").join(" ")];
            let script = words.join(" & exec ");
            Step::new("agent", &["/usr/bin/busybox", "sh", "-c", &script], AGENT_LIMIT)
        } else {
            Step::new("agent", &strs(&daemon("agent")), AGENT_LIMIT)
        };
        agent.environment.insert("NO_COLOR".into(), "1".into());
        if pair == 0 {
            agent.server = Some(Server { command: daemon("control"), port: CONTROL_PORT });
            files.push((format!("{SETTINGS}/control.toml"), control()));
            files.push((format!("{SETTINGS}/topology.toml"), self.topology()));
        }
        steps.push(agent);
        let job = Job { links, steps, ..Job::default() };
        MachineSpec { side: Side::Unit, name: unit_name(pair), cards: vec![host, outer], job, files }
    }

    fn host(&self, pair: u32, sockets: &Path) -> MachineSpec {
        let wire = Wire::Connect(sockets.join(format!("host{pair}")));
        let card = Card { mac: mac(pair, 2), wire };
        let links = vec![link(&card, "unit", &inner_address(pair, 1), HOST_DEVICE)];
        let unit = inner_address(pair, 2);
        let words = ping(HOST_DEVICE, PING_PORT, Some(&unit));
        let mut steps = vec![Step::new("ping-of-unit", &strs(&words), PING_LIMIT)];
        let mut collectives = vec!["all-reduce"];
        if self.pairs > 1 {
            collectives.push("all-to-all");
        }
        if self.aggregates() {
            collectives.push("aggregated");
        }
        steps.extend(collectives.into_iter().map(|collective| self.ranks(pair, collective)));
        steps.push(self.telemetry(pair));
        let job = Job { links, steps, ..Job::default() };
        MachineSpec {
            side: Side::Host,
            name: format!("host{pair}"),
            cards: vec![card],
            job,
            files: Vec::new(),
        }
    }

    /// Whether an aggregator is there, and worth it.
    fn aggregates(&self) -> bool {
        self.pairs >= AGGREGATED_FROM
    }

    fn ranks(&self, pair: u32, collective: &str) -> Step {
        let program = format!("{BINARIES}/{TENANT}");
        let agent = format!("{}:{TENANT_PORT}", inner_address(pair, 2));
        let ranks = |count: u32| (count * RANKS).to_string();
        let (first, all, here) = (ranks(pair), ranks(self.pairs), ranks(1));
        let (seed, limit) = (self.seed.to_string(), RANKS_LIMIT.as_secs().to_string());
        let words = [
            program.as_str(),
            collective,
            "--agent",
            &agent,
            "--tenant",
            "a",
            "--secret",
            SECRET,
            "--first",
            &first,
            "--here",
            &here,
            "--ranks",
            &all,
            "--seed",
            &seed,
            "--within",
            &limit,
        ];
        Step::new(collective, &words, RANKS_LIMIT)
    }

    /// Waits until the unit's metrics have RDMA of the tenant, and of the other unit where there is one, in both directions.
    fn telemetry(&self, pair: u32) -> Step {
        let url = format!("http://{}:{METRICS_PORT}/metrics", inner_address(pair, 2));
        let interfaces = if self.pairs > 1 { &["host", "fabric"][..] } else { &["host"] };
        let mut script = format!("until page=$(/usr/bin/busybox wget -q -O - {url})");
        for interface in interfaces {
            for direction in ["egress", "ingress"] {
                let series = "harmonaize_interface_roce_packets_total";
                let labels = format!("interface=\"{interface}\",direction=\"{direction}\"");
                script +=
                    &format!(" && echo \"$page\" | /usr/bin/busybox grep '^{series}{{{labels}}} [1-9]'");
            }
        }
        script += "; do /usr/bin/busybox sleep 0.5; done";
        Step::new("telemetry", &["/usr/bin/busybox", "sh", "-c", &script], TELEMETRY_LIMIT)
    }

    fn agent(&self, pair: u32) -> String {
        // Emulated processors are slow: nobody is given up early.
        format!(
            "host = \"{}\"\ncontrol = \"{}:{CONTROL_PORT}\"\ntls = \"tls\"\nlisten = \"{}:{AGENT_PORT}\"\npeer_timeout = \"30s\"\n\
             connect_timeout = \"60s\"\nmetrics = \"{}:{METRICS_PORT}\"\n[verbs]\n[rdma]\nlisten = \"{}:{TENANT_PORT}\"\n\
             [telemetry]\ninterfaces = [\"host\", \"fabric\"]\nkernel = false\nflows = 1024\n[[tenant]]\nname = \"a\"\n\
             socket = \"/run/a.sock\"\nuids = [0]\nrdma = true\nsecret = \"{SECRET}\"\naddresses = [\"{}\"]\n",
            unit_name(pair),
            fabric_address(0),
            fabric_address(pair),
            inner_address(pair, 2),
            inner_address(pair, 2),
            inner_address(pair, 1),
        )
    }

    fn topology(&self) -> String {
        let mut text = "[[switch]]\nname = \"s0\"\n".to_owned();
        for name in (0..self.pairs).map(unit_name) {
            text += &format!("[[host]]\nname = \"{name}\"\n");
            text += &format!("[[link]]\nfrom = \"{name}\"\nto = \"s0\"\nrate = \"1Gbit/s\"\n");
        }
        if self.aggregates() {
            let rate = self.pairs;
            text += &format!(
                "[[aggregator]]\nname = \"{AGGREGATOR}\"\nswitch = \"s0\"\nrate = \"{rate}Gbit/s\"\n"
            );
        }
        text
    }
}

fn control() -> String {
    let address = fabric_address(0);
    format!(
        "listen = \"{address}:{CONTROL_PORT}\"\ntls = \"tls-control\"\ntopology = \"topology.toml\"\n[[tenant]]\nname = \"a\"\n"
    )
}

/// An aggregator that says that it is fast, so that it is used although its processor is emulated.
fn aggregator() -> String {
    let address = fabric_address(0);
    format!(
        "name = \"{AGGREGATOR}\"\ncontrol = \"{address}:{CONTROL_PORT}\"\ntls = \"tls-{AGGREGATOR}\"\n\
         listen = \"{address}:{AGGREGATOR_PORT}\"\npool = \"1MiB\"\npackets_per_second = 10_000_000\n\
         [verbs]\ndevices = [\"{FABRIC_DEVICE}\"]\n"
    )
}

/// The agent's program in another role.
fn daemon_in(role: &str) -> Vec<String> {
    let (program, config) = (format!("{BINARIES}/harmonaize-agent"), format!("{SETTINGS}/{role}.toml"));
    [program, "--role".into(), role.into(), "--config".into(), config].to_vec()
}

fn daemon(name: &str) -> Vec<String> {
    let program = format!("{BINARIES}/harmonaize-{name}");
    vec![program, "--config".into(), format!("{SETTINGS}/{name}.toml")]
}

fn unit_name(pair: u32) -> String {
    format!("unit{pair}")
}

/// All addresses begin with 10.0, as a guest's devices expect. 1 is the host, 2 its unit.
fn inner_address(pair: u32, end: u32) -> String {
    format!("10.0.{}.{end}", pair + 1)
}

fn fabric_address(pair: u32) -> String {
    format!("10.0.0.{}", pair + 1)
}

fn mac(pair: u32, number: u32) -> String {
    format!("02:00:00:00:{pair:02x}:{number:02x}")
}

fn link(card: &Card, name: &str, address: &str, device: &str) -> Link {
    let (mac, name, device) = (card.mac.clone(), name.to_owned(), device.to_owned());
    Link { mac, name, address: format!("{address}/24"), device }
}

/// A ping-pong with checked contents; to an address it is repeated until somebody listens there.
fn ping(device: &str, port: u16, to: Option<&str>) -> Vec<String> {
    let words =
        format!("/usr/bin/ibv_rc_pingpong -c -d {device} -g {{gid:{device}}} -p {port} -s 65536 -n 20");
    let script = match to {
        None => format!("exec {words}"),
        Some(to) => format!("until {words} {to}; do /usr/bin/busybox sleep 0.5; done"),
    };
    ["/usr/bin/busybox", "sh", "-c", &script].map(str::to_owned).to_vec()
}

fn strs(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

/// Gives control and each unit's agent a certificate.
pub(super) fn certify(places: &mut [MachineSpec], authority: &Authority) -> Result<()> {
    let units = places.iter_mut().filter(|place| place.side == Side::Unit);
    for (pair, place) in (0..).zip(units) {
        let control = (pair == 0).then_some((CONTROL, Use::Control, "tls-control"));
        let agent = unit_name(pair);
        let aggregates = place.files.iter().any(|(path, _)| path.ends_with("aggregator.toml"));
        let folder = format!("tls-{AGGREGATOR}");
        let aggregator = aggregates.then_some((AGGREGATOR, Use::Session, folder.as_str()));
        let others = [(agent.as_str(), Use::Session, "tls")].into_iter().chain(aggregator);
        for (name, purpose, folder) in control.into_iter().chain(others) {
            let issued = authority.issue(name, purpose)?;
            let files = issued.files(&Folder(Path::new(SETTINGS).join(folder)));
            let files = files.map(|(path, text, _)| (path.display().to_string(), text.to_owned()));
            place.files.extend(files);
        }
    }
    Ok(())
}

/// The most time that one machine's job may take, without its boot.
pub(super) fn limit(places: &[MachineSpec]) -> Duration {
    let hosts = places.iter().filter(|place| place.side == Side::Host);
    let limits = hosts.map(|host| host.job.steps.iter().map(|step| step.limit_s).sum());
    Duration::from_secs(limits.max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn places(pairs: u32) -> Vec<MachineSpec> {
        Order { pairs, seed: 7 }.places(Path::new("/s"))
    }

    #[test]
    fn every_wire_is_listened_on_before_somebody_connects() {
        for pairs in [1, 2, 3] {
            let (mut there, mut used) = (BTreeSet::new(), 0);
            let mut listen = |path| assert!(there.insert(path), "two listen on one socket");
            let places = places(pairs);
            for card in places.iter().flat_map(|place| &place.cards) {
                match &card.wire {
                    Wire::Listen(path) => listen(path.clone()),
                    Wire::Hub(paths) => paths.iter().cloned().for_each(&mut listen),
                    Wire::Connect(_) => {}
                }
            }
            let mut so_far = BTreeSet::new();
            for card in places.iter().flat_map(|place| &place.cards) {
                match &card.wire {
                    Wire::Listen(path) => {
                        so_far.insert(path);
                    }
                    Wire::Hub(paths) => so_far.extend(paths),
                    Wire::Connect(path) => {
                        assert!(so_far.contains(path), "{path:?}");
                        used += 1;
                    }
                }
            }
            assert_eq!(there.len(), pairs as usize + (pairs as usize - 1).max(1));
            assert_eq!(used, there.len() - usize::from(pairs == 1), "one host has no other to be wired to");
        }
    }

    #[test]
    fn cards_and_addresses_are_each_others_alone() {
        let places = places(2);
        let links: Vec<&Link> = places.iter().flat_map(|place| &place.job.links).collect();
        assert_eq!(links.len(), 6);
        for field in [|link: &Link| link.mac.clone(), |link: &Link| link.address.clone()] {
            assert_eq!(links.iter().map(|link| field(link)).collect::<BTreeSet<_>>().len(), 6);
        }
        for place in &places {
            let cards: Vec<&String> = place.cards.iter().map(|card| &card.mac).collect();
            assert_eq!(cards, place.job.links.iter().map(|link| &link.mac).collect::<Vec<_>>());
        }
    }

    #[test]
    fn ranks_are_dealt_to_the_hosts_in_order() {
        let places = places(2);
        let words = |place: &MachineSpec| place.job.steps[1].command.join(" ");
        assert!(
            words(&places[2]).contains("all-reduce --agent 10.0.1.2:7300 --tenant a"),
            "{}",
            words(&places[2])
        );
        assert!(words(&places[2]).contains("--first 0 --here 2 --ranks 4 --seed 7"), "{}", words(&places[2]));
        assert!(words(&places[3]).contains("--agent 10.0.2.2:7300"), "{}", words(&places[3]));
        assert!(words(&places[3]).contains("--first 2 --here 2 --ranks 4 --seed 7"), "{}", words(&places[3]));
    }

    #[test]
    fn configurations_are_read_as_they_were_meant() {
        let places = places(2);
        for (pair, place) in places.iter().filter(|place| place.side == Side::Unit).enumerate() {
            let text = &place.files.iter().find(|(path, _)| path.ends_with("agent.toml")).unwrap().1;
            let agent: toml::Table = text.parse().unwrap();
            assert_eq!(agent["host"].as_str(), Some(place.name.as_str()));
            assert_eq!(agent["control"].as_str(), Some("10.0.0.1:7100"));
            assert_eq!(agent["listen"].as_str().unwrap(), format!("10.0.0.{}:7200", pair + 1));
            assert_eq!(agent["rdma"]["listen"].as_str().unwrap(), format!("10.0.{}.2:7300", pair + 1));
            assert_eq!(agent["telemetry"]["interfaces"].as_array().unwrap().len(), place.cards.len());
            assert_eq!(agent["metrics"].as_str().unwrap(), format!("10.0.{}.2:9464", pair + 1));
            let tenant = &agent["tenant"][0];
            assert_eq!(tenant["addresses"][0].as_str().unwrap(), format!("10.0.{}.1", pair + 1));
            assert_eq!((tenant["rdma"].as_bool(), tenant["secret"].as_str()), (Some(true), Some(SECRET)));
            assert_eq!(place.files.iter().any(|(path, _)| path.ends_with("control.toml")), pair == 0);
        }
        let topology = &places[0].files.iter().find(|(path, _)| path.ends_with("topology.toml")).unwrap().1;
        harmonaize_testkit::topology::Topology::parse(topology).unwrap();
    }

    #[test]
    fn three_pairs_have_an_aggregator_on_the_first_unit() {
        let of = |place: &MachineSpec, name: &str| {
            place.files.iter().find(|(path, _)| path.ends_with(name)).map(|(_, text)| text.clone())
        };
        for pairs in [1, 2, 3] {
            let mut places = places(pairs);
            certify(&mut places, &Authority::create().unwrap()).unwrap();
            let has: Vec<_> = places.iter().filter(|place| of(place, "aggregator.toml").is_some()).collect();
            assert_eq!(has.len(), usize::from(pairs == 3));
            let aggregated = |step: &Step| step.name == "aggregated";
            let sums = places.iter().filter(|place| place.job.steps.iter().any(aggregated)).count();
            assert_eq!(sums, if pairs == 3 { 3 } else { 0 });
        }
        let mut places = places(3);
        certify(&mut places, &Authority::create().unwrap()).unwrap();
        let unit = &places[0];
        let text: toml::Table = of(unit, "aggregator.toml").unwrap().parse().unwrap();
        assert_eq!(text["listen"].as_str(), Some("10.0.0.1:7400"));
        let folder = format!("{SETTINGS}/{}", text["tls"].as_str().unwrap());
        assert!(unit.files.iter().any(|(path, _)| path.starts_with(&folder)), "no certificate in {folder}");
        let agent = unit.job.steps.iter().find(|step| step.name == "agent").unwrap();
        let script = agent.command.last().unwrap();
        let begins = format!("{BINARIES}/harmonaize-agent --role aggregator --config ");
        assert!(script.starts_with(&begins) && script.contains(" & exec "), "{script}");
        let topology = of(unit, "topology.toml").unwrap();
        let topology = harmonaize_testkit::topology::Topology::parse(&topology).unwrap();
        assert_eq!(topology.aggregators().count(), 1);
    }

    #[test]
    fn telemetry_is_looked_for_after_all_else() {
        for pairs in [1, 2, 3] {
            let places = places(pairs);
            let hosts = places.iter().filter(|place| place.side == Side::Host);
            for (pair, host) in hosts.enumerate() {
                let step = host.job.steps.last().unwrap();
                let script = step.command.last().unwrap();
                assert_eq!(step.name, "telemetry");
                assert!(script.contains(&format!("http://10.0.{}.2:9464/metrics", pair + 1)), "{script}");
                let series = "_packets_total{interface=\"host\",direction=\"egress\"} [1-9]";
                assert!(script.contains(series), "{script}");
                assert_eq!(script.contains("interface=\"fabric\""), pairs > 1, "{script}");
            }
        }
    }

    #[test]
    fn the_limit_is_the_longest_hosts() {
        assert_eq!(limit(&places(1)), PING_LIMIT + RANKS_LIMIT + TELEMETRY_LIMIT);
        assert_eq!(limit(&places(2)), PING_LIMIT + 2 * RANKS_LIMIT + TELEMETRY_LIMIT);
        assert_eq!(limit(&places(3)), PING_LIMIT + 3 * RANKS_LIMIT + TELEMETRY_LIMIT);
        assert!(limit(&places(3)) < AGENT_LIMIT, "or agents would end too early");
    }
}
