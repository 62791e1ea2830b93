//! The suites: which cases, what is run in turn, what each is compared with.

use super::lab::{Lab, Measured};
use super::row::{Case, Row, median};
use super::suite::Request;
use crate::peers::{Gloo, MPI_PEERS, Mpi, MpiPeer, PeerRun, Times};
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
        let case = Case::more("shaped", format!("{collective} f32, 4 hosts, 1 Gbit/s: busbw MB/s"), bar)
            .of(LARGE, RANKS);
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
        let case =
            Case::less("service", "allreduce f32, one host: added us at the median", 1.0).of(*size, RANKS);
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

/// A library under `mpirun`, or why it is not there; and its figures, of ranks that spin and of such that yield.
struct MpiContestant {
    library: Result<Mpi, String>,
    figures: [Peer; 2],
}

impl MpiContestant {
    fn new(peer: MpiPeer, library: Result<Mpi, String>) -> Self {
        let figures = [peer.name.to_owned(), format!("{}, yielding", peer.name)].map(|name| Peer::new(&name));
        Self { library, figures }
    }

    /// A run in each way.
    fn run(&mut self, factor: f64, effort: &PeerRun) {
        for (yields, peer) in [false, true].into_iter().zip(&mut self.figures) {
            peer.run(factor, || match &self.library {
                Ok(library) if yields && !library.can_yield() => Err("it cannot yield".to_owned()),
                Ok(library) => library.run(effort, yields).map_err(|error| format!("{error:#}")),
                Err(why) => Err(why.clone()),
            });
        }
    }

    /// The row of its better way.
    fn row(&self, case: &Case, ours: &[f64]) -> Row {
        let [spinning, yielding] = &self.figures;
        better_of(spinning, yielding).row(case, ours)
    }
}

/// Four ranks on one host, AllReduce of 64 MiB, out of place and in place: busbw against Gloo through torch (in place alone: it has no other
/// way) and against each library of MPI that installs by name, with and without ranks that yield while they wait; its better counts. One that
/// cannot be had fails its row.
pub fn intra(lab: &mut Lab, request: &Request) -> Result<Vec<Row>> {
    const RANKS: usize = 4;
    const PLACES: [(bool, &str); 2] = [(false, "out of place"), (true, "in place")];
    let (runs, consent) = (request.rounds(), request.consent);
    let factor = 2.0 * 3.0 / 4.0;
    let text = |error: anyhow::Error| format!("{error:#}");
    let gloo = Gloo::prepare(consent).map_err(text);
    let prepared = MPI_PEERS.map(|peer| (peer, Mpi::prepare(peer, consent).map_err(text)));
    let contestants = || prepared.clone().map(|(peer, library)| MpiContestant::new(peer, library));
    let mut by_mpi = PLACES.map(|_| contestants());
    let bytes = LARGE.to_string();
    let mut by_gloo = Peer::new("torch + Gloo");
    let mut ours = PLACES.map(|_| Vec::new());
    for run in 1..=runs {
        eprint!("run {run}/{runs}, busbw GB/s");
        let effort = PeerRun { ranks: RANKS, bytes: LARGE, warmup: 1, iterations: 4, in_place: true };
        by_gloo.run(factor, || gloo.as_ref().map_err(Clone::clone)?.run(&effort).map_err(text));
        for (((in_place, place), ours), by_mpi) in PLACES.iter().zip(&mut ours).zip(&mut by_mpi) {
            eprint!("; {place}");
            let effort = PeerRun { in_place: *in_place, ..effort };
            by_mpi.iter_mut().for_each(|peer| peer.run(factor, &effort));
            let mut arguments = vec!["--bytes", &bytes, "--warmup", "1", "--iterations", "4"];
            arguments.extend(in_place.then_some("--in-place"));
            let busbw = factor * LARGE as f64 / of_size(&lab.ours(&[0; RANKS], &arguments)?, LARGE)? / 1e9;
            eprint!(", ours {busbw:.2}");
            ours.push(busbw);
        }
        eprintln!();
    }
    let rows = PLACES.iter().zip(&ours).zip(&by_mpi).flat_map(|(((_, place), ours), by_mpi)| {
        let case = Case::more("intra", format!("allreduce f32, one host, {place}: busbw GB/s"), 1.0);
        let case = case.of(LARGE, RANKS);
        let mut rows = vec![by_gloo.row(&case, ours)];
        rows.extend(by_mpi.iter().map(|peer| peer.row(&case, ours)));
        rows
    });
    Ok(rows.collect())
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
        let case = Case::more("s", "c", 1.0).of(1, 2);
        let row = peer.row(&case, &[1.0]);
        assert!(!row.passed() && row.reference_name.contains("apt-get install it"), "{row:?}");
    }

    #[test]
    fn every_library_that_cannot_be_had_fails_its_own_row() {
        let effort = PeerRun { ranks: 2, bytes: LARGE, warmup: 0, iterations: 1, in_place: true };
        let case = Case::more("s", "c", 1.0).of(1, 2);
        let rows = MPI_PEERS.map(|peer| {
            let mut contestant = MpiContestant::new(peer, Err(format!("{} is not there", peer.name)));
            contestant.run(1.5, &effort);
            contestant.row(&case, &[1.0])
        });
        for (row, peer) in rows.iter().zip(MPI_PEERS) {
            assert!(
                row.failed() && row.reference_name.contains(&format!("{} is not there", peer.name)),
                "{row:?}"
            );
        }
    }

    #[test]
    fn a_size_is_found_among_others() {
        let measured =
            [(1, 5.0), (2, 7.0)].map(|(bytes, us)| Measured { bytes, times_us: vec![us], busy: 0.0 });
        assert_eq!(of_size(&measured, 2).unwrap(), 7e-6);
        assert!(of_size(&measured, 3).is_err());
    }
}
