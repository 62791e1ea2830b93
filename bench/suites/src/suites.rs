//! The suites: which cases, what is run in turn, what each is compared with.

use super::lab::{Lab, Measured};
use super::row::{Better, Case, Row, median};
use super::suite::Request;
use crate::peers::{Gloo, OpenMpi, PeerRun, Times};
use anyhow::{Context, Result};

const MIB: u64 = 1 << 20;
/// The size of the large cases.
const LARGE: u64 = 64 * MIB;

/// The median of timed operations in seconds.
fn seconds(times_us: &[f64]) -> Result<f64> {
    Ok(median(times_us).context("nothing was timed")? / 1e6)
}

fn of_size(measured: &[Measured], bytes: u64) -> Result<f64> {
    let found = measured.iter().find(|measured| measured.bytes == bytes);
    seconds(&found.with_context(|| format!("no figure for {bytes} bytes"))?.times_us)
}

/// The mean of timed operations, for people: it shows what the median hides, such as ranks that lose their core.
fn mean_us(measured: &[Measured], bytes: u64) -> f64 {
    let times = measured.iter().filter(|measured| measured.bytes == bytes).flat_map(|found| &found.times_us);
    let (sum, count) = times.fold((0.0, 0u32), |(sum, count), time| (sum + time, count + 1));
    sum / f64::from(count.max(1))
}

/// Four hosts around a switch, links of 1 Gbit/s, one rank a host: bytes a second that each host sends, against the goodput
/// of one TCP stream between two of the hosts in the same run. The least that each host must send of a tensor of `S` bytes
/// among `n` is `2(n-1)/n * S` for AllReduce and `(n-1)/n * S` for the others.
pub fn shaped(lab: &mut Lab, request: &Request) -> Result<Vec<Row>> {
    let runs = request.rounds();
    const RANKS: usize = 4;
    let hosts: Vec<usize> = (0..RANKS).collect();
    let least = [
        ("allreduce", 2.0 * 3.0 / 4.0),
        ("alltoall", 3.0 / 4.0),
        ("allgather", 3.0 / 4.0),
        ("reducescatter", 3.0 / 4.0),
    ];
    let (mut stream, mut ours) = (Vec::new(), [const { Vec::new() }; 4]);
    let bytes = LARGE.to_string();
    for run in 1..=runs {
        let goodput = lab.stream(LARGE)? / 1e6;
        eprint!("run {run}/{runs}: one stream {goodput:.1} MB/s");
        stream.push(goodput);
        for ((collective, factor), figures) in least.iter().zip(&mut ours) {
            let arguments =
                ["--collective", collective, "--bytes", &bytes, "--warmup", "1", "--iterations", "4"];
            let took = of_size(&lab.ours(&hosts, &arguments)?, LARGE)?;
            let rate = factor * LARGE as f64 / took / 1e6;
            eprint!(", {collective} {rate:.1} MB/s");
            figures.push(rate);
        }
        eprintln!();
    }
    let rows = least.iter().zip([0.97, 0.95, 0.95, 0.95]).zip(&ours).map(|(((collective, _), bar), ours)| {
        let case = Case {
            suite: "shaped",
            case: format!("{collective} f32, 4 hosts, 1 Gbit/s: busbw MB/s"),
            size: LARGE,
            ranks: RANKS,
            better: Better::More,
            bar,
        };
        case.compare(ours, &stream, "goodput of one TCP stream")
    });
    Ok(rows.collect())
}

/// Two ranks on one host, AllReduce back to back: the median operation through agent and rings, less the median of the same
/// plan driven directly in one process, in microseconds.
pub fn service(lab: &mut Lab, request: &Request) -> Result<Vec<Row>> {
    let runs = request.rounds();
    const RANKS: usize = 2;
    const LIMIT_US: f64 = 40.0;
    let sizes = [32 << 10, 512 << 10];
    let list = sizes.map(|size: u64| size.to_string()).join(",");
    let effort = ["--bytes", &list, "--warmup", "200", "--iterations", "2000"];
    let mut added = [const { Vec::new() }; 2];
    for run in 1..=runs {
        let direct = lab.direct(&effort)?;
        let ours = lab.ours(&[0; RANKS], &effort)?;
        eprint!("run {run}/{runs}:");
        for (size, added) in sizes.iter().zip(&mut added) {
            let mean = mean_us(&ours, *size);
            let (ours, direct) = (of_size(&ours, *size)? * 1e6, of_size(&direct, *size)? * 1e6);
            eprint!(" {} KiB {ours:.1} us (mean {mean:.1}), the plan alone {direct:.1} us;", size >> 10);
            added.push(ours - direct);
        }
        eprintln!();
    }
    let rows = sizes.iter().zip(&added).map(|(size, added)| {
        let case = Case {
            suite: "service",
            case: "allreduce f32, one host: added us at the median".to_owned(),
            size: *size,
            ranks: RANKS,
            better: Better::Less,
            bar: 1.0,
        };
        case.limit(added, LIMIT_US)
    });
    Ok(rows.collect())
}

/// Figures of a peer's runs, or why there are none.
#[derive(Debug)]
struct Peer {
    name: String,
    figures: Result<Vec<f64>, String>,
}

impl Peer {
    fn new(name: &str) -> Self {
        Self { name: name.to_owned(), figures: Ok(Vec::new()) }
    }

    /// Adds a run's busbw, unless an earlier one failed.
    fn run(&mut self, factor: f64, run: impl FnOnce() -> Result<Times, String>) {
        let Ok(figures) = &mut self.figures else { return };
        let taken = run().and_then(|times| seconds(&times.times_us).map_err(|error| error.to_string()));
        match taken {
            Ok(took) => {
                let busbw = factor * LARGE as f64 / took / 1e9;
                eprint!(", {} {busbw:.2}", self.name);
                figures.push(busbw);
            }
            Err(error) => self.figures = Err(error),
        }
    }

    fn middle(&self) -> Option<f64> {
        self.figures.as_ref().ok().and_then(|figures| median(figures))
    }

    fn row(&self, case: &Case, ours: &[f64]) -> Row {
        match &self.figures {
            Ok(figures) => case.compare(ours, figures, &self.name),
            Err(why) => case.missing(&self.name, why),
        }
    }
}

/// The better of two ways to run the same peer: the one with the larger median; one that ran over one that did not.
fn better_of<'a>(one: &'a Peer, other: &'a Peer) -> &'a Peer {
    if other.middle() > one.middle() { other } else { one }
}

/// Four ranks on one host, AllReduce of 64 MiB, out of place and in place: busbw against Gloo through torch (in place alone:
/// it has no other way) and against Open MPI, with and without ranks that yield while they wait; its better counts.
pub fn intra(lab: &mut Lab, request: &Request) -> Result<Vec<Row>> {
    let (runs, consent) = (request.rounds(), request.consent);
    const RANKS: usize = 4;
    let factor = 2.0 * 3.0 / 4.0;
    let text = |error: anyhow::Error| format!("{error:#}");
    let gloo = Gloo::prepare(consent).map_err(text);
    let mpi = OpenMpi::prepare(consent).map_err(text);
    let bytes = LARGE.to_string();
    let effort = PeerRun { ranks: RANKS, bytes: LARGE, warmup: 1, iterations: 4, in_place: true };
    let mut by_gloo = Peer::new("torch + Gloo");
    let ways = [(false, "out of place"), (true, "in place")];
    let mut ours = [const { Vec::new() }; 2];
    let names = ["Open MPI", "Open MPI, yielding"];
    let mut by_mpi: Vec<[Peer; 2]> = ways.iter().map(|_| names.map(Peer::new)).collect();
    for run in 1..=runs {
        eprint!("run {run}/{runs}, busbw GB/s");
        by_gloo.run(factor, || gloo.as_ref().map_err(Clone::clone)?.run(&effort).map_err(text));
        for (((in_place, way), ours), by_mpi) in ways.iter().zip(&mut ours).zip(&mut by_mpi) {
            let effort = PeerRun { in_place: *in_place, ..effort };
            let mut arguments = vec!["--bytes", &bytes, "--warmup", "1", "--iterations", "4"];
            arguments.extend(in_place.then_some("--in-place"));
            eprint!("; {way}");
            for (peer, yields) in by_mpi.iter_mut().zip([false, true]) {
                peer.run(factor, || mpi.as_ref().map_err(Clone::clone)?.run(&effort, yields).map_err(text));
            }
            let busbw = factor * LARGE as f64 / of_size(&lab.ours(&[0; RANKS], &arguments)?, LARGE)? / 1e9;
            eprint!(", ours {busbw:.2}");
            ours.push(busbw);
        }
        eprintln!();
    }
    let mut rows = Vec::new();
    for (((_, way), ours), [spinning, yielding]) in ways.iter().zip(&ours).zip(&by_mpi) {
        let case = Case {
            suite: "intra",
            case: format!("allreduce f32, one host, {way}: busbw GB/s"),
            size: LARGE,
            ranks: RANKS,
            better: Better::More,
            bar: 1.0,
        };
        rows.push(by_gloo.row(&case, ours));
        rows.push(better_of(spinning, yielding).row(&case, ours));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(figures: Result<Vec<f64>, String>) -> Peer {
        Peer { name: "p".into(), figures }
    }

    #[test]
    fn the_better_way_of_a_peer_counts() {
        let (slow, fast, none) = (peer(Ok(vec![1.0])), peer(Ok(vec![2.0])), peer(Err("why".into())));
        for (one, other) in [(&slow, &fast), (&fast, &slow), (&none, &fast), (&fast, &none)] {
            assert_eq!(better_of(one, other).middle(), Some(2.0));
        }
        assert!(better_of(&none, &none).figures.is_err());
    }

    #[test]
    fn a_peer_that_fails_once_is_missing() {
        let mut peer = peer(Ok(vec![]));
        let times = |us| Ok(Times { times_us: vec![us], wrong: 0 });
        peer.run(1.5, || times(1e6));
        peer.run(1.5, || Err("gone: apt-get install it".into()));
        peer.run(1.5, || times(1e6));
        let case = Case { suite: "s", case: "c".into(), size: 1, ranks: 2, better: Better::More, bar: 1.0 };
        let row = peer.row(&case, &[1.0]);
        assert!(!row.pass && row.reference_name.contains("apt-get install it"), "{row:?}");
    }

    #[test]
    fn a_size_is_found_among_others() {
        let measured =
            [(1, 5.0), (2, 7.0)].map(|(bytes, us)| Measured { bytes, times_us: vec![us], busy: 0.0 });
        assert_eq!(of_size(&measured, 2).unwrap(), 7e-6);
        assert!(of_size(&measured, 3).is_err());
    }
}
