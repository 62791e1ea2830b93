//! Who takes part: ours, the peers, and what the machine can do.

use super::nodes::{INTERFACE, Nodes};
use super::{Collective, Entry, Role, Site};
use crate::lab::Lab;
use crate::peers::{Figure, Gloo, MPI_PEERS, Mpi, PeerRun, figures};
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::job;
use harmonaize_testkit::packages::Consent;
use harmonaize_testkit::process::Process;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long one run of a contestant may take.
const LIMIT: Duration = Duration::from_secs(180);
/// How long it may take to end once it has measured.
const GRACE: Duration = Duration::from_secs(5);
/// Where the ring's ranks listen.
const RING_PORT: u16 = 7600;
/// How long copies are timed, a size.
const COPIES: Duration = Duration::from_millis(50);
/// What a stream carries to measure a link.
const STREAM: u64 = 64 << 20;

/// A contestant.
pub(super) enum Contestant {
    Ours,
    Mpi(Mpi, bool),
    Gloo(Gloo),
    /// Of bare sockets, or served by a thread apart.
    Ring(bool),
    Relay,
    Stream,
    Memcpy,
}

/// The peers, or why each is not there.
pub(super) struct Peers {
    mpi: Vec<(&'static str, Result<Mpi, String>)>,
    gloo: Result<Gloo, String>,
}

impl Peers {
    /// Installs and compiles them, if consented.
    pub(super) fn prepare(consent: Consent) -> Self {
        let why = |name: &str, error: anyhow::Error| {
            eprintln!("NOT THERE: {name}: {error:#}");
            format!("{error:#}")
        };
        let mpi = MPI_PEERS
            .map(|peer| (peer.name, Mpi::prepare(peer, consent).map_err(|error| why(peer.name, error))));
        Self { mpi: mpi.into(), gloo: Gloo::prepare(consent).map_err(|error| why("torch + Gloo", error)) }
    }

    /// Who takes part in a setting, with an empty entry each.
    pub(super) fn contestants(
        &self,
        site: Site,
        collective: &Collective,
    ) -> Vec<(Result<Contestant, String>, Entry)> {
        let alone = |name: &str, role: Role| Entry::new(name, name, role);
        let mut all = vec![(Ok(Contestant::Ours), alone("ours", Role::Ours))];
        for (name, library) in &self.mpi {
            let own = library.clone().map(|library| Contestant::Mpi(library, false));
            all.push((own, Entry::new(name, name, Role::Peer)));
            if let Ok(library) = library
                && library.can_yield()
            {
                let yielding = Entry::new(&format!("{name}, yielding"), name, Role::Peer);
                all.push((Ok(Contestant::Mpi(library.clone(), true)), yielding));
            }
        }
        all.push((self.gloo.clone().map(Contestant::Gloo), alone("torch + Gloo", Role::Peer)));
        match site {
            Site::Host => all.push((Ok(Contestant::Memcpy), alone("copies by all processors", Role::Memcpy))),
            Site::Shaped => {
                all.push((Ok(Contestant::Stream), alone("goodput of one TCP stream", Role::Stream)))
            }
            Site::Unshaped | Site::Unprotected | Site::Racks | Site::ByRacks | Site::Hosts => {}
        }
        if site == Site::Host && collective.name == "all_reduce" {
            all.push((Ok(Contestant::Relay), alone("relay by a third thread", Role::Relay)));
        }
        if site != Site::Host && collective.rounds.is_some() {
            all.push((Ok(Contestant::Ring(false)), alone("ring of bare sockets", Role::Ring)));
        }
        if !matches!(site, Site::Host | Site::Shaped) && collective.name == "all_reduce" {
            let served = alone("ring by a second thread, summed", Role::ServedRing);
            all.push((Ok(Contestant::Ring(true)), served));
        }
        all
    }
}

impl Contestant {
    /// One round: microseconds by size. `hosts` has the place of each rank.
    pub(super) fn run(
        &self,
        collective: &Collective,
        hosts: &[usize],
        sizes: &[(u64, u32)],
        lab: &mut Lab,
        nodes: &Nodes,
    ) -> Result<BTreeMap<u64, f64>> {
        let run = PeerRun { collective: collective.name, ranks: hosts.len(), sizes };
        match self {
            Self::Ours if run.is_recorded() => {
                let arguments = [&[run.collective.to_owned()][..], &run.operations()].concat();
                let figures: Vec<Figure> = lab.figures("calls", hosts, &arguments, LIMIT)?;
                Ok(figures.into_iter().map(|figure| (figure.bytes, figure.p50_us)).collect())
            }
            Self::Ours => ours(&run, hosts, lab),
            Self::Mpi(library, yields) => {
                let command = library.command(&run, *yields, nodes.apart().as_ref());
                let started = start(lab, nodes, 0, "peer", &command)?;
                finish(|| lab.check(), vec![started], run.figures())
            }
            Self::Gloo(gloo) => {
                // A file that all ranks see, wherever they are.
                let store = lab.logs().join("gloo-store");
                let _ = std::fs::remove_file(&store);
                let interface = if nodes.apart().is_some() { INTERFACE } else { "lo" };
                let rank = |(rank, host): (usize, &usize)| {
                    let command = gloo.command(&run, rank, &store, interface);
                    start(lab, nodes, *host, &format!("gloo-{rank}"), &command)
                };
                let ranks = hosts.iter().enumerate().map(rank).collect::<Result<_>>()?;
                finish(|| lab.check(), ranks, run.figures())
            }
            Self::Relay => {
                let mut command = Command::new(lab.program("relay"));
                command.args(["--ranks", &hosts.len().to_string()]).args(run.arguments());
                let started = start(lab, nodes, 0, "relay", &command)?;
                finish(|| lab.check(), vec![started], sizes.len())
            }
            Self::Ring(served) => ring(&run, *served, hosts, lab, nodes),
            Self::Stream => {
                let goodput = lab.stream(STREAM)?;
                let time = |bytes| collective.on_the_bus(bytes, hosts.len()) / goodput * 1e6;
                Ok(sizes.iter().map(|(bytes, _)| (*bytes, time(*bytes))).collect())
            }
            Self::Memcpy => {
                let time = |(bytes, _): &(u64, u32)| Ok((*bytes, copy_us(*bytes, hosts.len())?));
                sizes.iter().map(time).collect()
            }
        }
    }
}

/// `harmonaize-perf` through the agents, a call a size: operations that wait, the greatest of the ranks' medians.
fn ours(run: &PeerRun<'_>, hosts: &[usize], lab: &mut Lab) -> Result<BTreeMap<u64, f64>> {
    let mut times = BTreeMap::new();
    for (bytes, iterations) in run.sizes {
        let warmup = (iterations / 10).clamp(1, 20);
        let line = format!("{} -b {bytes} -e {bytes} -n {iterations} -w {warmup} -z 2", run.collective);
        let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let told = lab.perf(hosts, &arguments, LIMIT)?;
        let p50 = told.pointer("/results/0/out_of_place/p50_us").and_then(serde_json::Value::as_f64);
        times.insert(*bytes, p50.with_context(|| format!("no time for {bytes} bytes in {told}"))?);
    }
    Ok(times)
}

fn ring(
    run: &PeerRun<'_>,
    served: bool,
    hosts: &[usize],
    lab: &mut Lab,
    nodes: &Nodes,
) -> Result<BTreeMap<u64, f64>> {
    let address = |host: &usize| {
        let own = nodes.host(*host)?.addresses.first().context("a host without address")?;
        Ok(format!("{own}:{RING_PORT}"))
    };
    let addresses = hosts.iter().map(address).collect::<Result<Vec<_>>>()?.join(",");
    let program = lab.program("ring");
    let rank = |(rank, host): (usize, &usize)| {
        let mut command = Command::new(&program);
        command.args(["--rank", &rank.to_string(), "--addresses", &addresses]);
        command.args(served.then_some("--service")).args(run.arguments());
        start(lab, nodes, *host, &format!("ring-{rank}"), &command)
    };
    let ranks = hosts.iter().enumerate().map(rank).collect::<Result<_>>()?;
    finish(|| lab.check(), ranks, run.sizes.len())
}

fn start(lab: &Lab, nodes: &Nodes, host: usize, name: &str, command: &Command) -> Result<Process> {
    nodes.start(host, name, command, &lab.logs().join(format!("sweep-{name}.log")))
}

/// Waits for the processes, of which the first prints a figure for each size. One that has printed all and does not end, or ends badly, has
/// still measured. `check` says whether to go on.
pub(super) fn finish(
    mut check: impl FnMut() -> Result<()>,
    mut processes: Vec<Process>,
    sizes: usize,
) -> Result<BTreeMap<u64, f64>> {
    let log = processes.first().context("no rank")?.log().to_path_buf();
    let mut complete: Option<Instant> = None;
    let waited = job::wait(&mut processes, LIMIT, || {
        check()?;
        if complete.is_none() && printed(&log).is_ok_and(|figures| figures.len() >= sizes) {
            complete = Some(Instant::now());
        }
        ensure!(complete.is_none_or(|since| since.elapsed() < GRACE), "it has measured and does not end");
        Ok(())
    });
    let figures = match (printed(&log), waited) {
        (Ok(figures), Err(error)) if figures.len() >= sizes => {
            check()?;
            eprintln!("  after its figures: {error:#}");
            figures
        }
        (figures, waited) => {
            waited?;
            figures?
        }
    };
    Ok(figures.into_iter().map(|figure| (figure.bytes, figure.p50_us)).collect())
}

fn printed(log: &Path) -> Result<Vec<Figure>> {
    figures(&std::fs::read_to_string(log)?)
}

/// The median of copies of as much as all ranks' tensors, in microseconds. Each processor copies its part: it is what any program takes
/// that moves as many bytes.
fn copy_us(bytes: u64, ranks: usize) -> Result<f64> {
    let threads = std::thread::available_parallelism()?.get();
    let part = usize::try_from(bytes)?.saturating_mul(ranks).div_ceil(threads);
    let (begun, done, over) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
    let times = std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| {
                let (from, mut to) = (vec![1u8; part], vec![2u8; part]);
                for turn in 1.. {
                    while begun.load(Ordering::Acquire) < turn {
                        if over.load(Ordering::Relaxed) {
                            return;
                        }
                        std::hint::spin_loop();
                    }
                    copy(&from, &mut to);
                    done.fetch_add(1, Ordering::Release);
                }
            });
        }
        let (from, mut to) = (vec![1u8; part], vec![2u8; part]);
        let (since, mut times) = (Instant::now(), Vec::new());
        while times.len() < 3 || since.elapsed() < COPIES {
            let at = Instant::now();
            let turn = begun.fetch_add(1, Ordering::Release) + 1;
            copy(&from, &mut to);
            while done.load(Ordering::Acquire) < turn * (threads - 1) {
                std::hint::spin_loop();
            }
            times.push(at.elapsed().as_secs_f64() * 1e6);
        }
        over.store(true, Ordering::Relaxed);
        times
    });
    let median = crate::row::median(&times).context("nothing was copied")?;
    ensure!(median > 0.0, "copies took no time");
    Ok(median)
}

fn copy(from: &[u8], to: &mut [u8]) {
    to.copy_from_slice(std::hint::black_box(from));
    std::hint::black_box(to);
}

#[cfg(test)]
mod tests {
    use super::super::COLLECTIVES;
    use super::*;

    #[test]
    fn a_peer_that_is_not_there_is_among_the_contestants() {
        let mpi = MPI_PEERS.map(|peer| (peer.name, Err("no package".to_owned())));
        let peers = Peers { mpi: mpi.into(), gloo: Err("no package".into()) };
        for (site, limits) in [(Site::Host, 2), (Site::Shaped, 2), (Site::Unshaped, 2)] {
            let all = peers.contestants(site, &COLLECTIVES[0]);
            assert_eq!(all.iter().filter(|(contestant, _)| contestant.is_err()).count(), MPI_PEERS.len() + 1);
            assert_eq!(all.len(), 1 + MPI_PEERS.len() + 1 + limits);
        }
        let without_ring = peers.contestants(Site::Unshaped, &COLLECTIVES[3]);
        assert!(without_ring.iter().all(|(_, entry)| entry.role != Role::Ring));
    }

    #[test]
    fn copies_take_time() {
        assert!(copy_us(64 << 10, 3).unwrap() > 0.0);
    }
}
