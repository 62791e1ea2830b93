//! Suite sweep: sizes swept over each collective, ours beside every peer that installs by name. It runs on one host and over four
//! network namespaces and more, a round of each contestant in turn. [The method](../../../docs/performance/sweep.md).

use crate::lab::Lab;
use crate::part::Outcome;
use crate::report::Report;
use crate::row::{Case, Row, median};
use crate::runs::interleave;
use crate::suite::Request;
use anyhow::{Context, Result, bail};
use harmonaize_testkit::topology::{self, Topology};
use harmonaize_testkit::workspace::{self, Binaries};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

mod contestant;
mod loads;
pub mod named;
mod nodes;
mod page;
mod preloaded;
mod recorded;
mod senders;

use contestant::{Contestant, Peers};
use nodes::Nodes;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Hosts of the fabrics without racks, a rank each.
const APART: usize = 4;
/// Racks of part racks, and hosts of each. What a rack sends out is the narrowest by far.
const RACKS: usize = 2;
const OF_RACK: usize = 3;
/// What control's operator says in part by-racks.
const BY_RACKS: &str = "[[algorithm]]\ncollective = \"allreduce\"\nalgorithm = \"hierarchical\"\n";
/// Numbers of ranks on one host.
const RANKS: [usize; 4] = [2, 3, 4, 8];
/// The share of the links' and the sockets' bounds that ours must reach.
const OF_STREAM: f64 = 0.99;
const OF_RING: f64 = 0.85;
const OF_SKEWED: f64 = 0.9;

/// A collective of the sweep.
#[derive(Debug)]
pub struct Collective {
    /// The name that `harmonaize-perf` has for it.
    pub name: &'static str,
    /// busbw over algbw, of the part of the tensor that other ranks have.
    bus: fn(f64) -> f64,
    /// How often a ring goes round, if a ring does it.
    rounds: Option<usize>,
    /// How many blocks its larger tensor has of each rank; 0 where it has none.
    blocks: u64,
}

/// What is swept.
pub const COLLECTIVES: [Collective; 10] = [
    Collective { name: "all_reduce", bus: |part| 2.0 * part, rounds: Some(2), blocks: 0 },
    Collective { name: "all_gather", bus: |part| part, rounds: Some(1), blocks: 1 },
    Collective { name: "reduce_scatter", bus: |part| part, rounds: Some(1), blocks: 1 },
    Collective { name: "alltoall", bus: |part| part, rounds: None, blocks: 1 },
    Collective { name: "broadcast", bus: |_| 1.0, rounds: None, blocks: 0 },
    Collective { name: "alltoallv", bus: |part| part, rounds: None, blocks: 4 },
    Collective { name: "sendrecv", bus: |_| 1.0, rounds: None, blocks: 0 },
    Collective { name: "reduce", bus: |_| 1.0, rounds: None, blocks: 0 },
    Collective { name: "gather", bus: |part| part, rounds: None, blocks: 1 },
    Collective { name: "scatter", bus: |part| part, rounds: None, blocks: 1 },
];

impl Collective {
    /// Bytes that the slowest link carries, of a tensor of about `bytes`. Of several blocks each is a multiple of 16 bytes, as in
    /// nccl-tests.
    fn on_the_bus(&self, bytes: u64, ranks: usize) -> f64 {
        let blocks = ranks as u64 * self.blocks;
        let of_block = (bytes / 16).checked_div(blocks);
        let whole = of_block.map_or(bytes / 4 * 4, |elements| elements * 16 * blocks);
        whole as f64 * (self.bus)(1.0 - 1.0 / ranks as f64)
    }
}

/// Reads a size: a number of bytes with K, M or G for powers of 1024.
///
/// # Errors
/// Where it is none, or none that tensors of f32 have.
pub fn size(text: &str) -> Result<u64, String> {
    let units = [("K", KIB), ("M", MIB), ("G", 1 << 30)];
    let unit = units.into_iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)));
    let (digits, unit) = unit.unwrap_or((text, 1));
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    let fine = bytes.filter(|bytes| (KIB..=1 << 30).contains(bytes) && bytes.is_multiple_of(4));
    fine.ok_or_else(|| format!("{text:?} is no size from 1K to 1G, a multiple of 4 bytes"))
}

/// Where the ranks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Site {
    Host,
    Shaped,
    Unshaped,
    /// The same, and our links unprotected, as the peers' are.
    Unprotected,
    /// Racks under one spine, whose links have half of a host's rate.
    Racks,
    /// The same, where control's operator has AllReduces go by racks.
    ByRacks,
    /// Hosts by their names, which run agents already.
    Hosts,
}

/// The parts of the suite.
const SITES: [(&str, Site); 6] = [
    ("host", Site::Host),
    ("shaped", Site::Shaped),
    ("unshaped", Site::Unshaped),
    ("unprotected", Site::Unprotected),
    ("racks", Site::Racks),
    ("by-racks", Site::ByRacks),
];

/// The parts that are no site.
const OTHERS: [&str; 3] = [recorded::PART, senders::PART, preloaded::PART];

/// The parts' names.
pub fn parts() -> Vec<&'static str> {
    SITES.iter().map(|(name, _)| *name).chain(OTHERS).collect()
}

impl Site {
    fn title(self) -> &'static str {
        match self {
            Self::Host => "one host",
            Self::Shaped => "four namespaces, 1 Gbit/s",
            Self::Unshaped => "four namespaces, unshaped",
            Self::Unprotected => "four namespaces, unshaped, links unprotected",
            Self::Racks => "two racks of three, 1 Gbit/s, their uplinks 500 Mbit/s",
            Self::ByRacks => "two racks of three, 1 Gbit/s, their uplinks 500 Mbit/s, ours by racks",
            Self::Hosts => "hosts of a testbed",
        }
    }

    /// The numbers of ranks of its settings.
    fn ranks(self, budget: &Budget) -> &[usize] {
        match self {
            Self::Host => &budget.ranks,
            Self::Racks | Self::ByRacks => &[RACKS * OF_RACK],
            Self::Shaped | Self::Unshaped | Self::Unprotected | Self::Hosts => &[APART],
        }
    }

    fn lab(self, binaries: Binaries, stop: Arc<AtomicBool>) -> Result<Lab> {
        match self {
            Self::Host => Lab::build(1, "1Gbit/s", binaries, stop),
            Self::Shaped => Lab::build(APART, "1Gbit/s", binaries, stop),
            Self::Unshaped | Self::Unprotected => {
                // What control believes of links that nothing shapes.
                let lab = Lab::build_with(APART, "10Gbit/s", binaries, stop, |mut setup| {
                    if self == Self::Unprotected {
                        setup.agent += "[links]\nprotection = \"none\"\n";
                    }
                    setup
                })?;
                lab.fabric().hosts().iter().try_for_each(|host| lab.fabric().set_rate(&host.name, None))?;
                Ok(lab)
            }
            Self::Racks | Self::ByRacks => {
                let text = topology::racks_with_uplinks(RACKS, OF_RACK, 1, "1Gbit/s", "500Mbit/s");
                Lab::on(Topology::parse(&text)?, binaries, stop, |mut setup| {
                    if self == Self::ByRacks {
                        setup.control += BY_RACKS;
                    }
                    setup
                })
            }
            Self::Hosts => bail!("hosts of a testbed are no lab"),
        }
    }

    /// How many times as fast as the best peer ours must be, where that is asked.
    fn bar(self, collective: &str, ranks: usize, bytes: u64) -> Option<f64> {
        let bar = match (self, collective, ranks) {
            (Self::Host, "all_reduce", 4) if bytes >= 64 * KIB => 1.7,
            (Self::Host, "all_reduce", 4) if bytes == KIB => 1.0,
            (Self::Host, "all_reduce", 2) if bytes >= 64 * KIB => 1.0,
            (Self::Host, "all_reduce", 2) if bytes == KIB || bytes == 16 * KIB => 0.5,
            (Self::Host, "alltoall" | "all_gather", 4) if bytes >= 256 * KIB => 1.5,
            (Self::Host, ..) if bytes == 64 * MIB => 1.0,
            (Self::Unshaped | Self::Unprotected, "all_reduce", _) if bytes >= 64 * KIB => 1.3,
            _ => return None,
        };
        Some(bar)
    }

    /// The share of a limit that ours must reach, where that is asked.
    fn share(self, collective: &str, bytes: u64, limit: &Entry) -> Option<f64> {
        match (self, limit.role) {
            (Self::Shaped, Role::Stream) if collective == "all_reduce" && bytes >= MIB => Some(OF_STREAM),
            (Self::Shaped, Role::Stream) if collective == "alltoallv" && bytes >= MIB => Some(OF_SKEWED),
            (Self::Unshaped | Self::Unprotected, Role::Ring)
                if collective == "all_reduce" && bytes >= 64 * KIB =>
            {
                Some(OF_RING)
            }
            _ => None,
        }
    }
}

/// What a contestant is to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Ours,
    Peer,
    /// A ring of bare sockets.
    Ring,
    /// The same by another thread than the rank's, which sums.
    ServedRing,
    /// Another thread than the ranks' that waits for them, sums, and tells them.
    Relay,
    /// What one TCP stream takes for the bytes on the bus.
    Stream,
    /// What all processors take to copy as much as all ranks' tensors.
    Memcpy,
}

/// A contestant's figures of one setting.
#[derive(Debug)]
struct Entry {
    /// Its name, with the way that it waits.
    name: String,
    /// Its name without.
    library: String,
    role: Role,
    /// A round's microseconds by size.
    rounds: Vec<BTreeMap<u64, f64>>,
    /// Why it was given up, if it was.
    failed: Option<String>,
}

impl Entry {
    /// One that has not run yet.
    fn new(name: &str, library: &str, role: Role) -> Self {
        let (name, library) = (name.to_owned(), library.to_owned());
        Self { name, library, role, rounds: Vec::new(), failed: None }
    }

    /// Takes in what a round came to, and says so to whoever watches.
    fn record(&mut self, taken: Result<BTreeMap<u64, f64>>) {
        match taken {
            Ok(times) => {
                let shown: Vec<String> = times.values().map(|time| format!("{time:.0}")).collect();
                eprintln!("  {}: {} us", self.name, shown.join(" "));
                self.rounds.push(times);
            }
            Err(error) => {
                eprintln!("  FAILED: {}: {error:#}", self.name);
                self.failed = Some(format!("{error:#}"));
            }
        }
    }

    fn times(&self, bytes: u64) -> Vec<f64> {
        self.rounds.iter().filter_map(|round| round.get(&bytes).copied()).collect()
    }

    fn median(&self, bytes: u64) -> Option<f64> {
        median(&self.times(bytes))
    }

    /// A peer that has not failed.
    fn is_peer(&self) -> bool {
        self.role == Role::Peer && self.failed.is_none()
    }
}

/// One place, number of ranks and collective.
#[derive(Debug)]
struct Setting {
    site: Site,
    ranks: usize,
    collective: &'static Collective,
    sizes: Vec<u64>,
    entries: Vec<Entry>,
}

impl Setting {
    fn title(&self) -> String {
        format!("{}, {}, {} ranks", self.collective.name, self.site.title(), self.ranks)
    }

    /// GB/s of 1e9 bytes on the bus; of a copy, of what is copied.
    fn busbw(&self, entry: &Entry, bytes: u64, time_us: f64) -> f64 {
        let moved = match entry.role {
            Role::Memcpy => bytes as f64 * self.ranks as f64,
            _ => self.collective.on_the_bus(bytes, self.ranks),
        };
        moved / time_us / 1e3
    }

    /// The peer with the least median.
    fn best(&self, bytes: u64) -> Option<&Entry> {
        best(&self.entries, bytes)
    }

    /// A row for each size against the best peer, and one for each contestant that failed. Also one for each limit that has a bar or is of
    /// one host.
    fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        let ours = |bytes| {
            let own = self.entries.iter().find(|entry| entry.role == Role::Ours);
            own.map(|entry| entry.times(bytes)).unwrap_or_default()
        };
        let case = |bytes, times: f64| {
            Case::less("sweep", format!("{}: p50 us", self.title()), 1.0 / times).of(bytes, self.ranks)
        };
        for bytes in &self.sizes {
            let bar = self.site.bar(self.collective.name, self.ranks, *bytes);
            let case_of_peers = bar.map_or_else(|| case(*bytes, 1.0).stated(), |bar| case(*bytes, bar));
            rows.push(match self.best(*bytes) {
                Some(best) => case_of_peers.compare(&ours(*bytes), &best.times(*bytes), &best.name),
                None if bar.is_none() => {
                    case_of_peers.state_without(&ours(*bytes), "any peer", "none has run")
                }
                None => case_of_peers.missing("any peer", "none has run"),
            });
            for limit in &self.entries {
                let asked = self.site.share(self.collective.name, *bytes, limit);
                let always = matches!(limit.role, Role::Relay | Role::Memcpy | Role::ServedRing)
                    || matches!((self.site, limit.role), (Site::Racks | Site::ByRacks, Role::Ring));
                let stated = always.then(|| case(*bytes, 1.0).stated());
                if let Some(case) = asked.map(|share| case(*bytes, share)).or(stated) {
                    rows.push(case.compare(&ours(*bytes), &limit.times(*bytes), &limit.name));
                }
            }
        }
        rows.extend(failures(&self.title(), self.ranks, &self.entries));
        rows
    }
}

/// The peer with the least median.
fn best(entries: &[Entry], bytes: u64) -> Option<&Entry> {
    let timed = entries.iter().filter(|entry| entry.is_peer());
    let timed = timed.filter_map(|entry| Some((entry, entry.median(bytes)?)));
    timed.min_by(|one, other| one.1.total_cmp(&other.1)).map(|(entry, _)| entry)
}

/// A row for each contestant that failed.
fn failures(title: &str, ranks: usize, entries: &[Entry]) -> Vec<Row> {
    let failed = entries.iter().filter_map(|entry| Some((entry, entry.failed.as_ref()?)));
    let row = |(entry, why): (&Entry, &String)| {
        Case::more("sweep", format!("{title}: it runs"), 1.0).of(0, ranks).missing(&entry.name, why)
    };
    failed.map(row).collect()
}

/// How much is measured.
#[derive(Debug)]
struct Budget {
    rounds: usize,
    sizes: Vec<u64>,
    ranks: Vec<usize>,
    collectives: Vec<&'static Collective>,
}

impl Budget {
    fn of(request: &Request) -> Self {
        let or = |given: &[u64], own: &[u64]| if given.is_empty() { own.to_vec() } else { given.to_vec() };
        let usual: Vec<u64> = (0..10).map(|power| KIB << (2 * power)).collect();
        let sizes = if request.smoke { &[KIB, MIB][..] } else { &usual };
        let ranks = if request.smoke { &RANKS[..1] } else { &RANKS };
        let named = |collective: &&Collective| match request.collectives.as_slice() {
            [] if request.smoke => collective.name == "all_reduce",
            [] => true,
            chosen => chosen.iter().any(|name| name == collective.name),
        };
        Self {
            rounds: if request.smoke { 1 } else { request.rounds() },
            sizes: or(&request.sizes, sizes),
            ranks: if request.ranks.is_empty() { ranks.to_vec() } else { request.ranks.clone() },
            collectives: COLLECTIVES.iter().filter(named).collect(),
        }
    }
}

/// The most timed operations of a size.
fn iterations(bytes: u64) -> u32 {
    u32::try_from(64 * MIB / bytes.max(1)).unwrap_or(u32::MAX).clamp(4, 200)
}

/// Where what was measured is written.
fn folder(request: &Request) -> PathBuf {
    request.figures.clone().unwrap_or_else(|| workspace::target().join("sweep"))
}

/// Sweeps. What was measured is written after each setting, so that an interruption leaves what was finished.
///
/// # Errors
/// Where the report cannot be written. A site that fails is a problem of the outcome, and a contestant that fails a row.
pub fn run(request: &Request, binaries: &Binaries, stop: &Arc<AtomicBool>) -> Result<Outcome> {
    let budget = Budget::of(request);
    let folder = folder(request);
    let peers = Peers::prepare(request.consent());
    let mut settings = Vec::new();
    let mut outcome = Outcome::default();
    let wanted = |name: &str| request.only.is_empty() || request.only.iter().any(|only| only == name);
    for (name, site) in SITES.into_iter().filter(|(name, _)| wanted(name)) {
        let mut sweep = Sweep { budget: &budget, peers: &peers, folder: &folder, settings: &mut settings };
        if let Err(error) = sweep.site(site, binaries, stop) {
            eprintln!("error: {name}: {error:#}");
            outcome.problems.push(format!("{name}: {error:#}"));
        }
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    outcome.rows = settings.iter().flat_map(Setting::rows).collect();
    for part in OTHERS.into_iter().filter(|part| wanted(part)) {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let measured = match part {
            recorded::PART => recorded::measure(request, &peers, binaries, stop),
            preloaded::PART => preloaded::measure(request, binaries, stop),
            _ => senders::measure(request, binaries, stop),
        };
        match measured {
            Ok(rows) => outcome.rows.extend(rows),
            Err(error) => outcome.problems.push(format!("{part}: {error:#}")),
        }
    }
    Ok(outcome)
}

/// What all contestants of a setting run in turn.
struct Contest<'a> {
    collective: &'a Collective,
    /// The place of each rank.
    hosts: &'a [usize],
    /// What [`crate::peers::PeerRun`] has.
    sizes: &'a [(u64, u32)],
    rounds: usize,
}

impl Contest<'_> {
    /// Runs the contestants in turn; their figures, or why there are none, go into the entries.
    fn run(
        &self,
        contestants: &[Result<Contestant, String>],
        entries: &mut [Entry],
        lab: &mut Lab,
        nodes: &Nodes,
    ) -> Result<()> {
        let mut order = Vec::new();
        interleave(self.rounds, contestants.len(), |which| {
            order.push(which);
            Ok(())
        })?;
        for which in order {
            let (Some(contestant), Some(entry)) = (contestants.get(which), entries.get_mut(which)) else {
                continue;
            };
            if entry.failed.is_some() {
                continue;
            }
            let taken = match contestant {
                Ok(contestant) => contestant.run(self.collective, self.hosts, self.sizes, lab, nodes),
                Err(why) => Err(anyhow::anyhow!("{why}")),
            };
            // An interruption, or an agent that has ended, is nobody else's failure.
            lab.check()?;
            entry.record(taken);
        }
        Ok(())
    }
}

/// One run of the suite.
struct Sweep<'a> {
    budget: &'a Budget,
    peers: &'a Peers,
    folder: &'a Path,
    settings: &'a mut Vec<Setting>,
}

impl Sweep<'_> {
    fn site(&mut self, site: Site, binaries: &Binaries, stop: &Arc<AtomicBool>) -> Result<()> {
        let mut lab = site.lab(binaries.clone(), Arc::clone(stop))?;
        let nodes = Nodes::prepare(lab.fabric())?;
        for ranks in site.ranks(self.budget) {
            for collective in &self.budget.collectives {
                let setting = self.setting(site, *ranks, collective, &mut lab, &nodes)?;
                self.settings.push(setting);
                let [csv, html] = write(self.folder, self.settings)?;
                eprintln!("written: {} and {}", csv.display(), html.display());
            }
        }
        Ok(())
    }

    fn setting(
        &self,
        site: Site,
        ranks: usize,
        collective: &'static Collective,
        lab: &mut Lab,
        nodes: &Nodes,
    ) -> Result<Setting> {
        let sizes = self.budget.sizes.clone();
        let (contestants, entries) = self.peers.contestants(site, collective).into_iter().unzip();
        let contestants: Vec<Result<Contestant, String>> = contestants;
        let mut setting = Setting { site, ranks, collective, sizes, entries };
        let hosts: Vec<usize> = (0..ranks).map(|rank| if site == Site::Host { 0 } else { rank }).collect();
        let efforts: Vec<(u64, u32)> = setting.sizes.iter().map(|size| (*size, iterations(*size))).collect();
        eprintln!("{}", setting.title());
        let contest = Contest { collective, hosts: &hosts, sizes: &efforts, rounds: self.budget.rounds };
        contest.run(&contestants, &mut setting.entries, lab, nodes)?;
        Ok(setting)
    }
}

/// Writes what was measured: `sweep.csv` with each run, and `sweep.html`.
fn write(folder: &Path, settings: &[Setting]) -> Result<[PathBuf; 2]> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let rows = settings.iter().flat_map(Setting::rows).collect();
    let files = [
        ("sweep.csv", page::comma_separated(settings)),
        ("sweep.html", page::page(settings, &Report::new(rows))?),
    ];
    let mut paths = Vec::new();
    for (name, text) in files {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        paths.push(path);
    }
    <[PathBuf; 2]>::try_from(paths).ok().context("two files")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entries by name, role and the microseconds of each round at 64 KiB.
    pub(super) fn setting(site: Site, entries: &[(&str, Role, &[f64])]) -> Setting {
        let entries = entries.iter().map(|(name, role, times)| Entry {
            rounds: times.iter().map(|time| BTreeMap::from([(64 * KIB, *time)])).collect(),
            ..Entry::new(name, name.split(',').next().unwrap(), *role)
        });
        let collective = &COLLECTIVES[0];
        Setting { site, ranks: 4, collective, sizes: vec![64 * KIB], entries: entries.collect() }
    }

    #[test]
    fn ours_is_held_against_the_best_peer() {
        let entries: [(&str, Role, &[f64]); 4] = [
            ("ours", Role::Ours, &[10.0, 10.0, 11.0]),
            ("slow", Role::Peer, &[40.0, 40.0, 40.0]),
            ("fast, yielding", Role::Peer, &[18.0, 17.0, 19.0]),
            ("memcpy", Role::Memcpy, &[1.0, 1.0, 1.0]),
        ];
        let rows = setting(Site::Host, &entries).rows();
        let [row, limit] = rows.as_slice() else { panic!("{rows:?}") };
        assert_eq!((limit.reference_name.as_str(), limit.ratio, limit.pass), ("memcpy", Some(0.1), None));
        assert_eq!((row.reference_name.as_str(), row.ratio), ("fast, yielding", Some(1.8)));
        assert!(row.passed() && (row.bar.unwrap() - 1.7).abs() < 1e-9, "{row:?}");
        assert_eq!(setting(Site::Shaped, &entries).rows()[0].pass, None, "no bar at this size");
    }

    #[test]
    fn a_failing_contestant_fails_its_row() {
        let mut setting = setting(
            Site::Host,
            &[("ours", Role::Ours, &[10.0]), ("a", Role::Peer, &[1.0]), ("b", Role::Peer, &[20.0])],
        );
        setting.entries[1].failed = Some("no package".into());
        let rows = setting.rows();
        assert!(rows[0].reference_name == "b" && rows[0].passed(), "{rows:?}");
        assert!(rows[1].failed() && rows[1].reference_name.contains("a (missing: no package)"), "{rows:?}");
        setting.entries[2].failed = Some("gone".into());
        assert!(setting.rows()[0].failed(), "no peer is left");
    }

    #[test]
    fn the_ring_is_a_limit_over_namespaces() {
        let entries: [(&str, Role, &[f64]); 3] =
            [("ours", Role::Ours, &[100.0]), ("p", Role::Peer, &[131.0]), ("ring", Role::Ring, &[84.0])];
        let rows = setting(Site::Unshaped, &entries).rows();
        assert!(rows[0].passed(), "{rows:?}");
        assert!(rows[1].failed() && rows[1].reference_name == "ring", "0.84 is less than 0.85: {rows:?}");
    }

    #[test]
    fn a_relay_is_a_limit_without_a_bar() {
        let entries: [(&str, Role, &[f64]); 3] =
            [("ours", Role::Ours, &[10.0]), ("p", Role::Peer, &[20.0]), ("relay", Role::Relay, &[4.0])];
        let rows = setting(Site::Host, &entries).rows();
        assert_eq!((rows[1].reference_name.as_str(), rows[1].ratio, rows[1].bar), ("relay", Some(0.4), None));
    }

    #[test]
    fn bars_are_those_of_the_sizes_that_they_name() {
        let bar = |site: Site, name: &str, ranks, bytes| site.bar(name, ranks, bytes);
        assert_eq!(bar(Site::Host, "all_reduce", 4, 256 * MIB), Some(1.7));
        assert_eq!(bar(Site::Host, "all_reduce", 4, 16 * KIB), None);
        assert_eq!(bar(Site::Host, "all_reduce", 2, 16 * KIB), Some(0.5));
        assert_eq!(bar(Site::Host, "alltoall", 4, MIB), Some(1.5));
        assert_eq!(bar(Site::Host, "broadcast", 8, 64 * MIB), Some(1.0));
        assert_eq!(bar(Site::Unshaped, "all_reduce", 4, 64 * KIB), Some(1.3));
        assert_eq!(bar(Site::Shaped, "all_reduce", 4, MIB), None, "a share of the stream is asked there");
    }

    #[test]
    fn sizes_are_read_and_bytes_counted_in_whole_blocks() {
        assert_eq!([size("1K"), size("256M"), size("4096")].map(Result::unwrap), [KIB, 256 * MIB, 4096]);
        for bad in ["", "K", "512", "2G", "1025", "x"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        // 85 elements a rank, of which 84 are whole blocks of 16 bytes.
        assert_eq!(COLLECTIVES[3].on_the_bus(KIB, 3), 1008.0 * (1.0 - 1.0 / 3.0));
        assert_eq!(COLLECTIVES[0].on_the_bus(KIB, 4), 1536.0);
        assert_eq!([KIB, MIB, 256 * MIB].map(iterations), [200, 64, 4]);
    }
}
