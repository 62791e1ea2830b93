//! Suite rdma on hosts by their names: `harmonaize-perf` through the agents that run there, beside what is installed there.

use crate::hosts::{self, Hosts, OpenMpi};
use crate::part::{self, Outcome};
use crate::peers::PeerRun;
use crate::perftest::{self, End, Measure};
use crate::row::{Better, Case, Row};
use crate::runs::interleave;
use crate::suite::Request;
use crate::testbed::PORTS;
use anyhow::{Context, Result, anyhow, bail};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Bytes that are in flight for a size, at least.
const MOVED: u64 = 256 * MIB;
/// The payload of the ping-pong.
const SMALL: u64 = 64;

/// A part of the suite that runs by names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Stream,
    Latency,
    AllReduce,
}

/// The parts' names.
const PARTS: [(&str, Kind); 3] =
    [("stream", Kind::Stream), ("latency", Kind::Latency), ("allreduce", Kind::AllReduce)];

/// Who takes part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Contestant {
    Ours,
    WriteBandwidth,
    WriteLatency,
    SendLatency,
    Ring,
    OpenMpi,
    Ucc,
}

impl Contestant {
    fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::WriteBandwidth => "ib_write_bw",
            Self::WriteLatency => "ib_write_lat",
            Self::SendLatency => "ib_send_lat",
            Self::Ring => "ib_write_bw, all hosts in a ring",
            Self::OpenMpi => "Open MPI",
            Self::Ucc => "Open MPI with UCC",
        }
    }
}

impl Kind {
    fn case(self) -> Case {
        let (case, better) = match self {
            Self::Stream => ("sendrecv through agents, two hosts: MB/s each way", Better::More),
            Self::Latency => ("sendrecv through agents, two hosts: p50 us", Better::Less),
            Self::AllReduce => ("allreduce f32 through agents: busbw MB/s", Better::More),
        };
        Case::new("rdma", case, better, 1.0).stated()
    }

    fn contestants(self) -> &'static [Contestant] {
        match self {
            Self::Stream => &[Contestant::Ours, Contestant::WriteBandwidth],
            Self::Latency => &[Contestant::Ours, Contestant::WriteLatency, Contestant::SendLatency],
            Self::AllReduce => &[Contestant::Ours, Contestant::Ring, Contestant::OpenMpi, Contestant::Ucc],
        }
    }

    fn sizes(self, request: &Request) -> Vec<u64> {
        match self {
            Self::Latency => vec![SMALL],
            _ if !request.sizes.is_empty() => request.sizes.clone(),
            Self::Stream => vec![MIB],
            Self::AllReduce => vec![16 * MIB],
        }
    }
}

/// One part at one size.
struct Bout<'a> {
    kind: Kind,
    bytes: u64,
    hosts: &'a Hosts,
    ends: &'a Result<Vec<End>, String>,
    mpi: &'a Result<OpenMpi, String>,
}

impl Bout<'_> {
    fn ranks(&self) -> usize {
        if self.kind == Kind::AllReduce { self.hosts.count() } else { 2 }
    }

    fn operations(&self) -> u64 {
        if self.kind == Kind::Latency { 2000 } else { (MOVED / self.bytes.max(1)).clamp(8, 1000) }
    }

    /// The command of ours.
    fn ours(&self) -> Vec<String> {
        let (bytes, operations) = (self.bytes, self.operations());
        let (collective, waits) = match self.kind {
            Kind::Stream => ("sendrecv", 0),
            Kind::Latency => ("sendrecv", 2),
            Kind::AllReduce => ("all_reduce", 2),
        };
        let warm_up = (operations / 10).clamp(1, 20);
        let arguments = format!("-b {bytes} -e {bytes} -n {operations} -w {warm_up} -z {waits}");
        self.hosts.perf(self.ranks(), collective, &arguments)
    }

    /// The measure of perftest's, and between which hosts; none where the contestant is none of its programs.
    fn perftest(&self, contestant: Contestant) -> Option<(Measure, Vec<(usize, usize)>)> {
        let (bytes, count) = (self.bytes, self.operations());
        let bandwidth = Measure::Bandwidth { bytes, depth: 16, count: count.max(32) };
        let latency = |sends| Measure::Latency { sends, bytes, iterations: count };
        let ranks = self.ranks();
        match contestant {
            Contestant::WriteBandwidth => Some((bandwidth, vec![(0, 1)])),
            Contestant::WriteLatency => Some((latency(false), vec![(0, 1)])),
            Contestant::SendLatency => Some((latency(true), vec![(0, 1)])),
            Contestant::Ring => {
                Some((bandwidth, (0..ranks).map(|from| (from, (from + 1) % ranks)).collect()))
            }
            Contestant::Ours | Contestant::OpenMpi | Contestant::Ucc => None,
        }
    }

    /// The command of Open MPI's ranks, by UCC or not.
    fn mpi(&self, mpi: &OpenMpi, ucc: bool) -> Vec<String> {
        let sizes = [(self.bytes, u32::try_from(self.operations()).unwrap_or(u32::MAX))];
        self.hosts.mpi(mpi, ucc, &PeerRun { collective: "all_reduce", ranks: self.ranks(), sizes: &sizes })
    }

    /// The row's figure of an operation's microseconds, at the median.
    fn of_median(&self, us: f64) -> f64 {
        match self.kind {
            Kind::AllReduce => super::wire_share(self.ranks()) * self.bytes as f64 / us,
            Kind::Stream | Kind::Latency => us,
        }
    }

    /// The figure of one run.
    fn measure(&self, contestant: Contestant) -> Result<f64> {
        if let Some((measure, pairs)) = self.perftest(contestant) {
            let ends = self.ends.as_ref().map_err(|why| anyhow!("{why}"))?;
            let figure = perftest::measure(PORTS, ends, &pairs, measure)?;
            return Ok(if self.kind == Kind::Latency { figure } else { figure / 1e6 });
        }
        if contestant == Contestant::Ours {
            let told = self.hosts.measure(&self.ours())?;
            let of = |key: &str| {
                let figure = told.get(key).and_then(serde_json::Value::as_f64);
                figure.with_context(|| format!("no {key} in {told}"))
            };
            // GB/s there.
            return if self.kind == Kind::Stream {
                Ok(of("bus_bw")? * 1e3)
            } else {
                Ok(self.of_median(of("p50_us")?))
            };
        }
        let mpi = self.mpi.as_ref().map_err(|why| anyhow!("{why}"))?;
        let ucc = contestant == Contestant::Ucc;
        if ucc && !mpi.ucc {
            bail!("not all hosts have an Open MPI with UCC");
        }
        let figures = self.hosts.run_mpi(&self.mpi(mpi, ucc))?;
        Ok(self.of_median(figures.first().context("no figure")?.p50_us))
    }

    /// The commands of a contestant, for a person to read.
    fn commands(&self, contestant: Contestant) -> Result<String> {
        let mut text = format!("# {}\n", contestant.name());
        if let (Some((measure, pairs)), Ok(ends)) = (self.perftest(contestant), self.ends) {
            for (host, words) in perftest::commands(PORTS, ends, &pairs, measure)?.concat() {
                text += &self.hosts.shown_on(host, &words);
            }
        } else if contestant == Contestant::Ours {
            text += &hosts::shown(&self.ours());
        } else if let Ok(mpi) = self.mpi {
            text += &self.hosts.shown_on(0, &self.mpi(mpi, contestant == Contestant::Ucc));
        }
        Ok(text)
    }

    /// Runs the contestants in turn; a row for each that ours is beside. A peer that is not there is stated.
    fn rows(&self, rounds: usize) -> Result<Vec<Row>> {
        let contestants = self.kind.contestants();
        let runs = interleave(rounds, contestants.len(), |which| {
            let contestant = *contestants.get(which).context("no such contestant")?;
            let taken = self.measure(contestant);
            match &taken {
                Ok(figure) => eprintln!("  {}: {figure:.1}", contestant.name()),
                Err(error) => eprintln!("  NOT MEASURED: {}: {error:#}", contestant.name()),
            }
            // Without ours there is nothing to compare.
            if contestant == Contestant::Ours { taken.map(Ok) } else { Ok(taken) }
        })?;
        let mut runs = runs.into_iter().map(|runs| runs.into_iter().collect::<Result<Vec<f64>>>());
        let ours = runs.next().context("no run of ours")??;
        let case = self.kind.case().of(self.bytes, self.ranks());
        let row = |(contestant, runs): (&Contestant, Result<Vec<f64>>)| match runs {
            Ok(figures) => case.compare(&ours, &figures, contestant.name()),
            Err(error) => case.state_without(&ours, contestant.name(), &format!("{error:#}")),
        };
        Ok(contestants.iter().skip(1).zip(runs).map(row).collect())
    }
}

/// The parts that were asked for.
fn wanted(request: &Request) -> Result<Vec<(&'static str, Kind)>> {
    part::check_names("rdma by hosts' names", &PARTS.map(|(name, _)| name), &request.only)?;
    let asked = |name: &str| request.only.is_empty() || request.only.iter().any(|only| only == name);
    Ok(PARTS.into_iter().filter(|(name, _)| asked(name)).collect())
}

/// The commands that print nccl-tests' text, one for each type.
fn texts(request: &Request, hosts: &Hosts) -> Vec<Vec<String>> {
    let (least, most) = (request.sizes.iter().min(), request.sizes.iter().max());
    let (least, most) = (least.copied().unwrap_or(KIB), most.copied().unwrap_or(16 * MIB));
    let float = ["float".to_owned()];
    let types = if request.types.is_empty() { &float[..] } else { &request.types };
    let text = |dtype: &String| {
        hosts.perf(hosts.count(), "all_reduce", &format!("-b {least} -e {most} -f 4 -d {dtype}"))
    };
    types.iter().map(text).collect()
}

/// What would run, a command a line, with what each host needs above.
///
/// # Errors
/// Where a part is asked for that does not run so.
pub fn commands(request: &Request, hosts: &Hosts) -> Result<String> {
    let (ends, mpi) = (Ok(hosts.assumed_ends()), Ok(OpenMpi::assumed()));
    let mut text = hosts.needs();
    text += "# perftest takes part where each host has it. DEVICE, port 1, GID 3 and 192.0.2.N stand for what hosts say.\n\n\
             # the text of nccl-tests\n";
    text.extend(texts(request, hosts).iter().map(|command| hosts::shown(command)));
    for (name, kind) in wanted(request)? {
        for bytes in kind.sizes(request) {
            let bout = Bout { kind, bytes, hosts, ends: &ends, mpi: &mpi };
            text += &format!("\n# {name}, {bytes} bytes, in turn\n");
            for contestant in kind.contestants() {
                text += &bout.commands(*contestant)?;
            }
        }
    }
    Ok(text)
}

/// Measures. What `harmonaize-perf` prints goes to standard error; the rows state their figures.
///
/// # Errors
/// Where a host cannot be reached or lacks the program or the socket, or a part is asked for that does not run so. A part that
/// fails is a problem of the outcome.
pub fn run(request: &Request, hosts: &Hosts) -> Result<Outcome> {
    let parts = wanted(request)?;
    hosts.check()?;
    for command in texts(request, hosts) {
        eprintln!("{}", hosts.run_perf(&command)?.join("\n"));
    }
    let why = |error: anyhow::Error| format!("{error:#}");
    let (ends, mpi) = (hosts.ends().map_err(why), hosts.open_mpi().map_err(why));
    let rounds = if request.smoke { 1 } else { request.rounds() };
    let mut outcome = Outcome::default();
    for (name, kind) in parts {
        for bytes in kind.sizes(request) {
            eprintln!("{name}, {bytes} bytes");
            match (Bout { kind, bytes, hosts, ends: &ends, mpi: &mpi }).rows(rounds) {
                Ok(rows) => outcome.rows.extend(rows),
                Err(error) => outcome.problems.push(format!("{name}, {bytes} bytes: {error:#}")),
            }
        }
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::tests::request;
    use harmonaize_testkit::golden;

    #[test]
    fn a_dry_run_shows_every_command() {
        let shown = commands(&request(&["--types", "float,half"]), &hosts::pair()).unwrap();
        golden::same("bench/suites/tests/golden/rdma-hosts.txt", &shown);
    }

    #[test]
    fn parts_and_sizes_are_chosen() {
        let shown =
            |words: &[&str]| commands(&request(words), &hosts::pair()).map_err(|error| error.to_string());
        let some = shown(&["--only", "allreduce", "--sizes", "4K,8K"]).unwrap();
        assert!(some.contains("# allreduce, 8192 bytes") && !some.contains("ib_write_lat"), "{some}");
        let error = shown(&["--only", "failure"]).unwrap_err();
        assert!(error.contains("no part failure; it has stream, latency, allreduce"), "{error}");
    }

    #[test]
    fn peers_that_are_not_there_are_stated() {
        let (ends, mpi) = (Err("no device".to_owned()), Err("no Open MPI".to_owned()));
        let (_folder, hosts) = hosts::told("{\"p50_us\": 500.0, \"bus_bw\": 3.0}");
        let bout = Bout { kind: Kind::AllReduce, bytes: MIB, hosts: &hosts, ends: &ends, mpi: &mpi };
        let rows = bout.rows(2).unwrap();
        let named: Vec<&str> = rows.iter().map(|row| row.reference_name.as_str()).collect();
        let ring = "ib_write_bw, all hosts in a ring (missing: no device)";
        let expected = [ring, "Open MPI (missing: no Open MPI)", "Open MPI with UCC (missing: no Open MPI)"];
        assert_eq!(named, expected);
        // Two ranks: once the tensor on each link, in 500 us.
        let busbw = Some(MIB as f64 / 500.0);
        assert!(rows.iter().all(|row| row.ours == busbw && row.pass.is_none() && row.runs == 2), "{rows:?}");
        // GB/s of the stream are MB/s in its row.
        let rows = Bout { kind: Kind::Stream, ..bout }.rows(1).unwrap();
        assert_eq!(rows[0].ours, Some(3000.0));
    }

    #[test]
    fn without_ours_there_is_no_row() {
        let (ends, mpi) = (Err(String::new()), Err(String::new()));
        let (_folder, hosts) = hosts::told("null");
        let bout = Bout { kind: Kind::Latency, bytes: SMALL, hosts: &hosts, ends: &ends, mpi: &mpi };
        let error = bout.rows(1).unwrap_err().to_string();
        assert!(error.contains("told no figure"), "{error}");
    }
}
