//! Part preloaded: a program of MPI as it is, on one host, with `libharmonaize-mpi.so` preloaded and without, in turn.

use super::contestant::finish;
use super::nodes::Nodes;
use super::{COLLECTIVES, Collective, Entry, KIB, MIB, Role, best, failures, iterations};
use crate::peers::{MPI_PEERS, Mpi, PeerRun};
use crate::row::{Case, Row};
use crate::runs::interleave;
use crate::suite::Request;
use anyhow::{Context, Result, bail, ensure};
use harmonaize_testkit::c_library;
use harmonaize_testkit::deployment::{Deployment, Setup, Tenant, socket};
use harmonaize_testkit::fabric::Fabric;
use harmonaize_testkit::topology::{self, Topology};
use harmonaize_testkit::workspace::{self, Binaries, Profile};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The part's name.
pub(super) const PART: &str = "preloaded";
/// The MPIs, one of each ABI.
const MPIS: [&str; 2] = ["Debian's Open MPI", "Debian's MPICH"];
/// Numbers of ranks.
const RANKS: [usize; 2] = [2, 4];
/// Sizes: 1 KiB to 64 MiB by 4, and of a smoke run.
const SIZES: [u64; 9] = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB];
const SMOKE: [u64; 2] = [KIB, MIB];
/// Timed operations of a size where only the way of the calls is looked at.
const FEW: u32 = 3;
/// Calls of MPI that the program then makes for a size: of the collective itself two more than are timed, and six others.
const CALLS: u64 = FEW as u64 + 2 + 6;

/// A host with an agent, on which programs of MPI run.
struct Host {
    deployment: Deployment,
    nodes: Nodes,
    log: PathBuf,
    stop: Arc<AtomicBool>,
}

impl Host {
    /// Ranks run as root beside the agent, as those of the other parts' peers.
    fn start(binaries: &Binaries, stop: &Arc<AtomicBool>) -> Result<Self> {
        let fabric = Fabric::build(&Topology::parse(&topology::star(1, "1Gbit/s"))?)?;
        let tenant = Tenant { name: "a".to_owned(), user: 0 };
        let deployment = Deployment::start(fabric, Setup::new(binaries.clone(), &[tenant]))?;
        let nodes = Nodes::prepare(deployment.fabric())?;
        let logs = workspace::target().join("bench-logs");
        std::fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
        Ok(Self { deployment, nodes, log: logs.join("sweep-preloaded.log"), stop: Arc::clone(stop) })
    }

    /// An error when a signal has asked to stop, or when control or the agent has ended.
    fn check(&mut self) -> Result<()> {
        ensure!(!self.stop.load(Ordering::Relaxed), "interrupted");
        self.deployment.check()
    }

    /// Microseconds by size. What is printed is in the log.
    fn run(&mut self, command: &Command, sizes: usize) -> Result<BTreeMap<u64, f64>> {
        let started = self.nodes.start(0, "mpi", command, &self.log)?;
        finish(|| self.check(), vec![started], sizes)
    }

    /// An error unless the provider carries all calls of a program that preloads.
    fn verify(&mut self, mpi: &Mpi, run: &PeerRun<'_>) -> Result<()> {
        let few: Vec<(u64, u32)> = run.sizes.iter().map(|(bytes, _)| (*bytes, FEW)).collect();
        let mut command = mpi.command(&PeerRun { sizes: &few, ..*run }, false, None);
        self.run(command.env("HARMONAIZE_DEBUG", "info"), few.len())?;
        carried(&std::fs::read_to_string(&self.log)?, run.ranks, CALLS * few.len() as u64)
    }
}

/// An error unless each rank says at its end that the provider has carried so many calls, and the MPI none. What the library has no entry
/// for it counts nowhere.
fn carried(printed: &str, ranks: usize, calls: u64) -> Result<()> {
    const RANK: &str = "harmonaize-mpi rank ";
    let mut told = 0;
    for line in printed.lines() {
        let said = line.split_once(RANK).and_then(|(_, said)| said.split_once(": "));
        let Some((rank, said)) = said else { continue };
        let Some((by_us, by_mpi)) = said.split_once(" calls by the provider, ") else { continue };
        let all = by_us.parse::<u64>() == Ok(calls) && by_mpi == "0 by the MPI";
        ensure!(all, "of {calls} calls of rank {rank}: {said}");
        told += 1;
    }
    ensure!(told == ranks, "{told} of {ranks} ranks have said who carried their calls: {printed}");
    Ok(())
}

/// The rows: each size with the library against the same MPI without, in the better way to wait.
pub(super) fn measure(request: &Request, binaries: &Binaries, stop: &Arc<AtomicBool>) -> Result<Vec<Row>> {
    let sizes = match request.sizes.as_slice() {
        [] if request.smoke => SMOKE.to_vec(),
        [] => SIZES.to_vec(),
        given => given.to_vec(),
    };
    let ranks = match request.ranks.as_slice() {
        [] if request.smoke => RANKS.get(..1).unwrap_or_default(),
        [] => &RANKS,
        given => given,
    };
    let rounds = if request.smoke { request.rounds_of((1, 1)) } else { request.rounds() };
    let wanted = |collective: &&Collective| match request.collectives.as_slice() {
        [] => collective.name == "all_reduce",
        chosen => chosen.iter().any(|name| name == collective.name),
    };
    let library = c_library::MPI.install(Profile::Release, &workspace::target().join("bench-preloaded"))?;
    let mut host = Host::start(binaries, stop)?;
    let agent = socket(host.deployment.hosts().first().context("no host")?, "a");
    let mut rows = Vec::new();
    for name in MPIS {
        let peer = MPI_PEERS.into_iter().find(|peer| peer.name == name).context("no such MPI")?;
        let alone = Mpi::prepare(peer, request.consent())?;
        let ours = alone.clone().preloading(&library, &agent);
        for ranks in ranks {
            for collective in COLLECTIVES.iter().filter(wanted) {
                let title = format!("{}, one host, {ranks} ranks, {name}", collective.name);
                eprintln!("{title}");
                let sizes: Vec<(u64, u32)> = sizes.iter().map(|size| (*size, iterations(*size))).collect();
                let run = PeerRun { collective: collective.name, ranks: *ranks, sizes: &sizes };
                host.verify(&ours, &run).with_context(|| format!("{title}: not all goes by the provider"))?;
                rows.extend(rows_of(&title, &run, &contest(&mut host, &ours, &alone, &run, rounds)?));
            }
        }
    }
    host.deployment.end().context("control or the agent did not end in order")?;
    Ok(rows)
}

/// Runs the program in turn with the library and without; ours is the first entry.
fn contest(host: &mut Host, ours: &Mpi, alone: &Mpi, run: &PeerRun<'_>, rounds: usize) -> Result<Vec<Entry>> {
    let name = alone.name();
    let mut ways = vec![(ours, false, Entry::new("preloaded", name, Role::Ours))];
    ways.push((alone, false, Entry::new(name, name, Role::Peer)));
    if alone.can_yield() {
        ways.push((alone, true, Entry::new(&format!("{name}, yielding"), name, Role::Peer)));
    }
    interleave(rounds, ways.len(), |which| {
        let Some((mpi, yields, entry)) = ways.get_mut(which) else { bail!("no such way") };
        if entry.failed.is_none() {
            let taken = host.run(&mpi.command(run, *yields, None), run.figures());
            // An interruption, or an agent that has ended, is no failure of the program.
            host.check()?;
            entry.record(taken);
        }
        Ok(())
    })?;
    Ok(ways.into_iter().map(|(_, _, entry)| entry).collect())
}

fn rows_of(title: &str, run: &PeerRun<'_>, entries: &[Entry]) -> Vec<Row> {
    let row = |(bytes, _): &(u64, u32)| {
        let ours = entries.iter().find(|entry| entry.role == Role::Ours);
        let times = ours.map(|entry| entry.times(*bytes)).unwrap_or_default();
        let case = Case::less("sweep", format!("{title}, preloaded: p50 us"), 1.0).of(*bytes, run.ranks);
        match best(entries, *bytes) {
            Some(alone) => case.stated().compare(&times, &alone.times(*bytes), &alone.name),
            None => case.missing("the MPI alone", "it has not run"),
        }
    };
    let mut rows: Vec<Row> = run.sizes.iter().map(row).collect();
    rows.extend(failures(title, run.ranks, entries));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_must_say_that_the_provider_carried_everything() {
        let rank = |number: u32, by_us: u32, by_mpi: u32| {
            format!(
                "harmonaize-mpi rank {number}: {by_us} calls by the provider, {by_mpi} by the MPI\n\
                 harmonaize-mpi rank {number}: attached\n{{\"bytes\": 8}}\n"
            )
        };
        let both = |other: String| format!("{}{other}", rank(0, 9, 0));
        assert!(carried(&both(rank(1, 9, 0)), 2, 9).is_ok());
        for wrong in [both(rank(1, 9, 1)), both(rank(1, 8, 0)), both(String::new()), String::new()] {
            assert!(carried(&wrong, 2, 9).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_size_is_held_against_the_same_mpi_in_its_better_way() {
        let entry = |name: &str, role, us: f64| Entry {
            rounds: vec![BTreeMap::from([(KIB, us)])],
            ..Entry::new(name, "m", role)
        };
        let mut entries = vec![
            entry("preloaded", Role::Ours, 4.0),
            entry("m", Role::Peer, 1.0),
            entry("m, yielding", Role::Peer, 0.5),
        ];
        let sizes = [(KIB, 5)];
        let run = PeerRun { collective: "all_reduce", ranks: 2, sizes: &sizes };
        let rows = rows_of("t", &run, &entries);
        assert_eq!((rows.len(), rows[0].reference_name.as_str()), (1, "m, yielding"));
        assert_eq!((rows[0].ratio, rows[0].pass), (Some(0.125), None));
        entries[0].failed = Some("gone".into());
        assert!(rows_of("t", &run, &entries)[1].failed());
    }

    #[test]
    fn both_abis_are_of_an_mpi_that_is_known() {
        assert!(MPIS.iter().all(|name| MPI_PEERS.iter().any(|peer| peer.name == *name)));
    }
}
