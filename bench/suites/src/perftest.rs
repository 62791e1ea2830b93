//! perftest's programs on the hosts of a testbed: what the device gives without this project (`man ib_write_bw`).

use super::launcher::Remote;
use super::testbed::Host;
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};

/// The programs that the suite runs.
pub const PROGRAMS: [&str; 3] = ["ib_write_bw", "ib_write_lat", "ib_send_lat"];

/// How often a measure that failed is tried again.
const TRIES: u32 = 5;
/// How long a measure may take.
const LIMIT: Duration = Duration::from_secs(120);
/// Waits until a TCP port listens: `$1` in hexadecimal; state 0A of `/proc/net/tcp` (Linux, proc_net_tcp.txt).
const LISTENS: &str = r#"until grep -qiE ":$1 [0-9A-F]+:0000 0A" /proc/net/tcp /proc/net/tcp6 2>/dev/null
do sleep 0.05; done"#;
/// Prints the index of the GID for RoCEv2 with an address. `$1` is the device, `$2` the port, `$3` the GID as sysfs
/// prints it.
const FIND_GID: &str = r#"cd "/sys/class/infiniband/$1/ports/$2" || exit 1
for file in gids/*; do
  read -r gid < "$file" || continue
  [ "$gid" = "$3" ] || continue
  read -r kind < "gid_attrs/types/${file#gids/}" || continue
  case "$kind" in *v2*) echo "${file#gids/}"; exit 0;; esac
done
exit 1"#;

/// Which of perftest's programs, on what.
#[derive(Debug, Clone, Copy)]
pub enum Measure {
    /// ib_write_bw: bytes a second of RDMA writes of `bytes` bytes, `depth` under way, `count` in all.
    Bandwidth {
        /// Of one write.
        bytes: u64,
        /// Writes under way.
        depth: u32,
        /// By count and not by time: on a slow device nothing might end in the time.
        count: u64,
    },
    /// ib_write_lat, or ib_send_lat: typical time of a message of `bytes` bytes one way, in microseconds.
    Latency {
        /// Sends that complete at the receiver, and not writes that it sees in its memory.
        sends: bool,
        /// Of one message.
        bytes: u64,
        /// Round trips.
        iterations: u64,
    },
}

impl Measure {
    fn arguments(self) -> Vec<String> {
        let words = match self {
            Self::Bandwidth { bytes, depth, count } => {
                format!("ib_write_bw -s {bytes} -t {depth} -n {count} --report_gbits")
            }
            Self::Latency { sends, bytes, iterations } => {
                let program = if sends { "ib_send_lat" } else { "ib_write_lat" };
                format!("{program} -s {bytes} -n {iterations}")
            }
        };
        words.split(' ').map(str::to_owned).collect()
    }

    /// The figure in the line that a client prints under its heading.
    fn figure(self, lines: &[String]) -> Result<f64> {
        let bytes = match self {
            Self::Bandwidth { bytes, .. } | Self::Latency { bytes, .. } => bytes.to_string(),
        };
        let words = |line: &String| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let mut rows = lines.iter().map(words).filter(|words| words.first() == Some(&bytes));
        let row = rows.next().with_context(|| format!("no line of figures in:\n{}", lines.join("\n")))?;
        // Columns: bytes, iterations, then peak and average in Gbit/s, or least, most and typical in us.
        let (column, scale) = match self {
            Self::Bandwidth { .. } => (3, 1e9 / 8.0),
            Self::Latency { .. } => (4, 1.0),
        };
        let figure = row.get(column).and_then(|word| word.parse::<f64>().ok());
        let figure = figure.filter(|figure| figure.is_finite() && *figure >= 0.0);
        Ok(figure.with_context(|| format!("no figure in {row:?}"))? * scale)
    }
}

/// A host as perftest's programs need it.
#[derive(Debug, Clone)]
pub struct End {
    host: Host,
    gid_index: u8,
}

impl End {
    /// Looks whether the host has what is needed; an error says what is missing there.
    pub fn check(host: &Host) -> Result<Self> {
        let reach = || format!("host {} cannot be reached", host.name);
        host.launcher.shell("true", &[], b"").with_context(reach)?;
        for program in PROGRAMS {
            let found = host.launcher.shell("command -v \"$1\"", &[program], b"");
            ensure!(found.is_ok(), "host {} has no {program}: install the package perftest there", host.name);
        }
        let devices = host.launcher.shell("ls /sys/class/infiniband 2>/dev/null || true", &[], b"")?;
        let devices: Vec<&str> = devices.split_whitespace().collect();
        let there = devices.contains(&host.device.as_str());
        ensure!(
            there,
            "host {} has no RDMA device {}; it has: {}",
            host.name,
            host.device,
            devices.join(" ")
        );
        let gid_index = match host.gid_index {
            Some(index) => index,
            None => Self::find(host)?,
        };
        Ok(Self { host: host.clone(), gid_index })
    }

    /// A host that nobody has looked at, to show commands for it.
    pub(crate) fn assumed(host: Host) -> Self {
        Self { gid_index: host.gid_index.unwrap_or(0), host }
    }

    fn find(host: &Host) -> Result<u8> {
        let bytes = match host.address {
            std::net::IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            std::net::IpAddr::V6(address) => address.octets(),
        };
        let words: Vec<String> =
            bytes.chunks(2).map(|pair| pair.iter().map(|byte| format!("{byte:02x}")).collect()).collect();
        let found =
            host.launcher.shell(FIND_GID, &[&host.device, &host.port.to_string(), &words.join(":")], b"");
        let found = found.ok().and_then(|index| index.trim().parse().ok());
        found.with_context(|| {
            let Host { name, device, port, address, .. } = host;
            format!("host {name}: port {port} of {device} has no RoCEv2 GID with {address}; `show_gids` tells which there are, `gid_index` names one")
        })
    }

    fn command(&self, measure: Measure, port: u16, to: Option<&Host>) -> Vec<String> {
        let mut command = measure.arguments();
        let Host { device, port: number, .. } = &self.host;
        // Time to answer as our own links give it (4.096 us times 2^17): an emulated device is slow, and loses its place where
        // it repeats what was not lost.
        let more = format!("-d {device} -i {number} -x {} -p {port} -u 17 -F", self.gid_index);
        command.extend(more.split(' ').map(str::to_owned));
        command.extend(to.map(|host| host.address.to_string()));
        command
    }
}

/// Runs a measure between several pairs of hosts at once, from the first of each to the second. Returns the least of their
/// figures.
///
/// Of several pairs each moves as much, so that the least is what all had of a link until the last was done. A busy emulated
/// device fails now and then, and on a busy processor perftest may not learn how fast its clock is, and prints zeros: half the
/// figures are enough, and with fewer it is tried again. Servers listen on the TCP ports from `ports` on.
pub fn measure(ports: u16, ends: &[End], pairs: &[(usize, usize)], measure: Measure) -> Result<f64> {
    let mut tries = 0;
    loop {
        match once(ports, ends, pairs, measure).and_then(|figures| least(&figures)) {
            Err(error) if tries < TRIES => {
                tries += 1;
                eprintln!("warning: perftest failed, and is tried again: {error:#}");
            }
            outcome => return outcome,
        }
    }
}

/// The least of the figures that are some, if half are.
fn least(figures: &[f64]) -> Result<f64> {
    let some: Vec<f64> = figures.iter().copied().filter(|figure| *figure > 0.0).collect();
    ensure!(
        2 * some.len() >= figures.len(),
        "{} of {} figures are zeros",
        figures.len() - some.len(),
        figures.len()
    );
    some.into_iter().reduce(f64::min).context("no figure")
}

/// A command and the place of the host that runs it.
pub(crate) type Placed = (usize, Vec<String>);

/// The commands of a measure: those of the servers, which listen before others start, and those of the clients.
pub(crate) fn commands(
    ports: u16,
    ends: &[End],
    pairs: &[(usize, usize)],
    measure: Measure,
) -> Result<[Vec<Placed>; 2]> {
    let end = |at: usize| ends.get(at).with_context(|| format!("no host {at}"));
    let (mut servers, mut clients) = (Vec::new(), Vec::new());
    for ((from, to), port) in pairs.iter().zip(ports..) {
        let (client, server) = (end(*from)?, end(*to)?);
        servers.push((*to, server.command(measure, port, None)));
        clients.push((*from, client.command(measure, port, Some(&server.host))));
    }
    Ok([servers, clients])
}

fn once(ports: u16, ends: &[End], pairs: &[(usize, usize)], measure: Measure) -> Result<Vec<f64>> {
    let deadline = Instant::now() + LIMIT;
    let end = |at: usize| ends.get(at).with_context(|| format!("no host {at}"));
    let start_all = |role: &str, commands: &[Placed]| -> Result<Vec<Remote>> {
        commands.iter().map(|(at, words)| start(end(*at)?, role, words)).collect()
    };
    let [servers, clients] = commands(ports, ends, pairs, measure)?;
    let mut servers = start_all("server", &servers)?;
    for ((_, to), port) in pairs.iter().zip(ports..) {
        let to = &end(*to)?.host;
        let listens = to.launcher.shell(LISTENS, &[&format!("{port:04X}")], b"");
        listens.with_context(|| format!("host {}: perftest does not listen on port {port}", to.name))?;
    }
    let mut clients = start_all("client", &clients)?;
    let figures =
        clients.iter_mut().map(|client| measure.figure(&client.finish(deadline)?)).collect::<Result<_>>()?;
    for server in &mut servers {
        server.finish(deadline)?;
    }
    Ok(figures)
}

fn start(end: &End, role: &str, command: &[String]) -> Result<Remote> {
    let words: Vec<&str> = command.iter().map(String::as_str).collect();
    let program = words.first().copied().unwrap_or_default();
    end.host.launcher.start(&format!("{program}, the {role} on {}", end.host.name), &words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn figures_are_read_from_what_is_printed() {
        let printed = lines(
            " CQ Moderation   : 1\n #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n \
             1048576    60               0.23               0.18   \t\t   0.000021\n----\n",
        );
        let measure = Measure::Bandwidth { bytes: 1 << 20, depth: 16, count: 60 };
        assert_eq!(measure.figure(&printed).unwrap(), 22_500_000.0);
        let measure = Measure::Latency { sends: false, bytes: 64, iterations: 1000 };
        let printed = lines(
            " 64      1000          35.02          7429.53      41.23    \t       1127.16 \t1784.00\t\t5940.33 \t\t7429.53\n",
        );
        assert_eq!(measure.figure(&printed).unwrap(), 41.23);
        assert_eq!(measure.figure(&lines(" 64 1000 0.00 0.00 0.00 0.00")).unwrap(), 0.0);
        for wrong in ["", " 64 1000 1 2 nan 3", " 64 1000", " 128 1000 1 2 3 4"] {
            assert!(measure.figure(&lines(wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn half_the_figures_are_enough() {
        assert_eq!(least(&[0.0, 3.0, 0.0, 2.0]).unwrap(), 2.0);
        assert!(least(&[0.0, 3.0, 0.0]).is_err() && least(&[0.0]).is_err() && least(&[]).is_err());
    }

    #[test]
    fn both_ends_get_the_same_measure() {
        let host = |name: &str, address: &str| Host {
            name: name.into(),
            launcher: super::super::launcher::Launcher::new("local", name).unwrap(),
            address: address.parse().unwrap(),
            device: "mlx5_0".into(),
            port: 2,
            gid_index: None,
        };
        let end = End { host: host("a", "10.0.0.1"), gid_index: 3 };
        let measure = Measure::Bandwidth { bytes: 64, depth: 4, count: 60 };
        let words = end.command(measure, 18_500, Some(&host("b", "10.0.0.2"))).join(" ");
        assert_eq!(
            words,
            "ib_write_bw -s 64 -t 4 -n 60 --report_gbits -d mlx5_0 -i 2 -x 3 -p 18500 -u 17 -F 10.0.0.2"
        );
        assert!(words.starts_with(&end.command(measure, 18_500, None).join(" ")));
    }
}
