//! Part recorded: the AllReduces of one iteration of trainings, at their times. Ours and the peers run in turn, on one host.
//!
//! MINA's recordings (INFOCOM 2025, MIT licence) are read where [`MINA`] says, and MCCS's loads ([`super::loads`]) where [`MCCS`] says.
//! Without both, a generator's iterations are replayed.

use super::contestant::{Contestant, Peers};
use super::loads::Load;
use super::nodes::Nodes;
use super::{Collective, Contest, Entry, MIB, Role, Site, best, failures};
use crate::peers::{IN_TURN, RECORDED};
use crate::row::{Case, Row};
use crate::suite::Request;
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::workspace::Binaries;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The part's name.
pub(super) const PART: &str = "recorded";
/// Names the folder `traces` of MINA's artifact.
const MINA: &str = "HARMONAIZE_MINA";
/// Names the folder `workloads` of MCCS's artifact.
const MCCS: &str = "HARMONAIZE_MCCS";
/// How the names of its files end.
const MCCS_END: &str = ".toml";
/// Workers of MINA's recordings that are replayed; their files end with it.
const WORKERS: usize = 4;
/// The most bytes of a worker's gradients that are replayed, usually and with `--full`.
const MOST: (u64, u64) = (512 * MIB, 2048 * MIB);
/// The generator's layers, how many microseconds lie between two, and what else is reduced before them. In turn it has fewer.
const LAYERS: u32 = 12;
const LAYERS_IN_TURN: usize = 4;
const APART_US: u32 = 2500;
const HEAD: u64 = 3 * MIB;
/// Bytes of a layer, usually and in a smoke run.
const LAYER: (u64, u64) = (28 * MIB, MIB);

/// What is an operation of it, and what is one in turn.
static TRAFFIC: Collective = Collective { name: RECORDED, bus: |part| 2.0 * part, rounds: None, blocks: 0 };
static TRAFFIC_IN_TURN: Collective = Collective { name: IN_TURN, ..TRAFFIC };

/// One iteration.
#[derive(Debug, PartialEq)]
struct Iteration {
    name: String,
    ranks: usize,
    /// Whether each operation waits for the one before.
    in_turn: bool,
    /// Bytes of each AllReduce, and microseconds from the first; in turn, microseconds of computing before it.
    operations: Vec<(u64, u32)>,
}

#[derive(Deserialize)]
struct File {
    allreduces: Vec<Line>,
}

#[derive(Deserialize)]
struct Line {
    /// Seconds.
    start: f64,
    /// Bytes.
    size: u64,
}

impl Iteration {
    /// Reads a recording.
    fn parse(name: &str, text: &str) -> Result<Self> {
        let mut lines = serde_json::from_str::<File>(text)?.allreduces;
        lines.sort_by(|one, other| one.start.total_cmp(&other.start));
        let first = lines.first().context("it has no operation")?.start;
        let operation = |line: Line| {
            let after = line.start - first;
            ensure!((0.0..=3600.0).contains(&after), "an operation begins {after} s after the first");
            ensure!(line.size > 0 && line.size.is_multiple_of(4), "{} bytes are no tensor of f32", line.size);
            Ok((line.size, (after * 1e6) as u32))
        };
        let operations = lines.into_iter().map(operation).collect::<Result<_>>()?;
        Ok(Self { name: name.to_owned(), ranks: WORKERS, in_turn: false, operations })
    }

    /// A transformer's: equal layers at equal times.
    fn generated(layer: u64) -> Self {
        let layers = (1..=LAYERS).map(|number| (layer, number * APART_US));
        let operations = [(HEAD.min(layer), 0)].into_iter().chain(layers).collect();
        let name = format!("generated, {LAYERS} layers of {} MiB", layer / MIB);
        Self { name, ranks: WORKERS, in_turn: false, operations }
    }

    /// The same in turn.
    fn generated_in_turn(layer: u64) -> Self {
        let operations = vec![(layer, APART_US); LAYERS_IN_TURN];
        let name = format!("generated, {LAYERS_IN_TURN} layers of {} MiB in turn", layer / MIB);
        Self { name, ranks: WORKERS, in_turn: true, operations }
    }

    fn bytes(&self) -> u64 {
        self.operations.iter().fold(0, |sum, (bytes, _)| sum.saturating_add(*bytes))
    }

    /// Microseconds in which it has no operation, whoever reduces.
    fn computing_us(&self) -> f64 {
        self.operations.iter().filter(|_| self.in_turn).map(|(_, computing)| f64::from(*computing)).sum()
    }
}

/// Which files of a folder are replayed.
struct Wanted<'a> {
    /// Their names without their ends; all if empty.
    names: &'a [String],
    /// The most bytes of gradients.
    most: u64,
}

impl Wanted<'_> {
    /// The texts of a folder's wanted files by name, of those files that end so.
    fn texts(&self, folder: &Path, end: &str) -> Result<BTreeMap<String, String>> {
        let mut texts = BTreeMap::new();
        let entries =
            std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(end)) else {
                continue;
            };
            if self.names.is_empty() || self.names.iter().any(|wanted| wanted == name) {
                let text = std::fs::read_to_string(&path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                texts.insert(name.to_owned(), text);
            }
        }
        Ok(texts)
    }

    /// Whether its gradients are not too many, and says so where they are.
    fn fits(&self, iteration: &Iteration) -> bool {
        let fits = iteration.bytes() <= self.most;
        if !fits {
            eprintln!("Left out: {}, {} MiB of gradients", iteration.name, iteration.bytes() / MIB);
        }
        fits
    }

    /// MINA's recordings of a folder.
    fn recordings(&self, folder: &Path) -> Result<Vec<Iteration>> {
        let mut found = Vec::new();
        for (name, text) in self.texts(folder, &mina_end())? {
            let iteration = Iteration::parse(&name, &text);
            found.push(iteration.with_context(|| format!("{name} of {}", folder.display()))?);
        }
        found.retain(|iteration| self.fits(iteration));
        Ok(found)
    }

    /// MCCS's loads of a folder. Of loads that are alike the first is replayed, and a file that is none is left out with the reason.
    fn loads(&self, folder: &Path) -> Result<Vec<Iteration>> {
        let mut found: Vec<Iteration> = Vec::new();
        for (name, text) in self.texts(folder, MCCS_END)? {
            let Load { ranks, operations } = match Load::parse(&text) {
                Ok(load) => load,
                Err(refused) => {
                    eprintln!("Left out: MCCS {name}: {refused}");
                    continue;
                }
            };
            let iteration = Iteration { name: format!("MCCS {name}"), ranks, in_turn: true, operations };
            let same = |one: &&Iteration| (one.ranks, &one.operations) == (ranks, &iteration.operations);
            match found.iter().find(same) {
                Some(first) => eprintln!("Left out: {}, the same as {}", iteration.name, first.name),
                None => found.push(iteration),
            }
        }
        found.retain(|iteration| self.fits(iteration));
        Ok(found)
    }

    /// What stands in these folders of MINA and MCCS. Each must have something, or else all that is named.
    fn read(&self, mina: Option<&Path>, mccs: Option<&Path>) -> Result<Vec<Iteration>> {
        let is_there = |name: &str| {
            let stands = |folder: Option<&Path>, end: &str| {
                folder.is_some_and(|folder| folder.join(format!("{name}{end}")).is_file())
            };
            stands(mina, &mina_end()) || stands(mccs, MCCS_END)
        };
        for name in self.names {
            ensure!(
                is_there(name),
                "no file is {name:?}: name those of {MINA} without {}, of {MCCS} without {MCCS_END}",
                mina_end()
            );
        }
        let read = [
            mina.map(|folder| (folder, self.recordings(folder))),
            mccs.map(|folder| (folder, self.loads(folder))),
        ];
        let mut all = Vec::new();
        for (folder, found) in read.into_iter().flatten() {
            let found = found?;
            let fine = !found.is_empty() || !self.names.is_empty();
            ensure!(fine, "{} has nothing that can be replayed", folder.display());
            all.extend(found);
        }
        ensure!(!all.is_empty(), "none of {} can be replayed", self.names.join(", "));
        Ok(all)
    }
}

/// How the names of MINA's recordings end.
fn mina_end() -> String {
    format!("-{WORKERS}.json")
}

/// What is replayed.
fn iterations(request: &Request) -> Result<Vec<Iteration>> {
    let wanted = Wanted { names: &request.recordings, most: if request.full { MOST.1 } else { MOST.0 } };
    let [mina, mccs] = [MINA, MCCS].map(|variable| std::env::var_os(variable).filter(|_| !request.smoke));
    if mina.is_some() || mccs.is_some() {
        return wanted.read(mina.as_deref().map(Path::new), mccs.as_deref().map(Path::new));
    }
    ensure!(
        request.smoke || request.recordings.is_empty(),
        "--recordings needs {MINA} or {MCCS}, the folders of the recordings"
    );
    eprintln!(
        "Generated: neither {MINA} names the folder traces of MINA's artifact, nor {MCCS} workloads of MCCS's"
    );
    let layer = if request.smoke { LAYER.1 } else { LAYER.0 };
    Ok(vec![Iteration::generated(layer), Iteration::generated_in_turn(layer)])
}

/// The rows: ours against the best peer, for each recording.
pub(super) fn measure(
    request: &Request,
    peers: &Peers,
    binaries: &Binaries,
    stop: &Arc<AtomicBool>,
) -> Result<Vec<Row>> {
    let iterations = iterations(request)?;
    let rounds = if request.smoke { request.rounds_of((1, 1)) } else { request.rounds() };
    let mut lab = Site::Host.lab(binaries.clone(), Arc::clone(stop))?;
    let nodes = Nodes::prepare(lab.fabric())?;
    let mut rows = Vec::new();
    for iteration in &iterations {
        let Iteration { name, ranks, in_turn, operations: sizes } = iteration;
        let title = format!("allreduces of an iteration, {name}, one host, {ranks} ranks");
        eprintln!("{title}");
        let collective = if *in_turn { &TRAFFIC_IN_TURN } else { &TRAFFIC };
        let all = peers.contestants(Site::Host, collective).into_iter();
        let (contestants, mut entries): (Vec<Result<Contestant, String>>, Vec<Entry>) =
            all.filter(|(_, entry)| matches!(entry.role, Role::Ours | Role::Peer)).unzip();
        let hosts = vec![0_usize; *ranks];
        let contest = Contest { collective, hosts: &hosts, sizes, rounds };
        contest.run(&contestants, &mut entries, &mut lab, &nodes)?;
        rows.extend(rows_of(iteration, &title, &entries)?);
    }
    lab.end().context("the lab did not end in order")?;
    Ok(rows)
}

/// Ours against the best peer: the iteration, and of one in turn what it takes beyond its computing. Also a row for each who failed.
fn rows_of(iteration: &Iteration, title: &str, entries: &[Entry]) -> Result<Vec<Row>> {
    let (bytes, ranks) = (iteration.bytes(), iteration.ranks);
    let own = entries.iter().find(|entry| entry.role == Role::Ours).context("ours did not take part")?;
    let row = |title: &str, less: f64| {
        let times =
            |entry: &Entry| entry.times(bytes).into_iter().map(|time| time - less).collect::<Vec<_>>();
        let case = Case::less("sweep", format!("{title}: p50 us"), 1.0).of(bytes, ranks).stated();
        match best(entries, bytes) {
            Some(peer) => case.compare(&times(own), &times(peer), &peer.name),
            None => case.missing("any peer", "none has run"),
        }
    };
    let mut rows = vec![row(title, 0.0)];
    if iteration.in_turn {
        rows.push(row(&format!("{title}, beyond its computing"), iteration.computing_us()));
    }
    rows.extend(failures(title, ranks, entries));
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recordings_are_read_from_their_first_operation_on() {
        let text =
            r#"{"duration": 1.5, "allreduces": [{"start": 0.5, "size": 8}, {"start": 0.25, "size": 4}]}"#;
        let iteration = Iteration::parse("vit", text).unwrap();
        assert_eq!((iteration.operations.as_slice(), iteration.bytes()), (&[(4, 0), (8, 250_000)][..], 12));
        for wrong in ["{}", r#"{"allreduces": []}"#, &text.replace('8', "7"), &text.replace("0.5", "5000")] {
            assert!(Iteration::parse("vit", wrong).is_err(), "{wrong}");
        }
    }

    /// A folder with these files.
    fn folder(files: &[(&str, String)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    fn recording(size: u64) -> String {
        format!(r#"{{"allreduces": [{{"start": 0, "size": {size}}}]}}"#)
    }

    fn load(communicator: &str, size: u64) -> String {
        format!(
            "communicator_id = {communicator}\ncuda_devices = [0, 1]\n\
             [[traces]]\nsize = {size}\ntype = \"all_reduce\"\ncompute_interval = 300\n"
        )
    }

    fn names(read: Result<Vec<Iteration>>) -> Vec<String> {
        read.unwrap().into_iter().map(|one| one.name).collect()
    }

    #[test]
    fn recordings_of_other_workers_and_too_large_ones_are_left_out() {
        let files = [("small-4.json", 8), ("large-4.json", 4 * MIB), ("small-16.json", 8), ("LICENSE", 8)];
        let folder = folder(&files.map(|(name, size)| (name, recording(size))));
        let read = |most| Wanted { names: &[], most }.read(Some(folder.path()), None);
        assert_eq!(names(read(MIB)), ["small"]);
        assert_eq!(names(read(4 * MIB)), ["large", "small"]);
        assert!(read(4).is_err());
    }

    #[test]
    fn bad_loads_beside_recordings_are_left_out() {
        let mina = folder(&[("vit-4.json", recording(8))]);
        let mccs = folder(&[
            ("gpt_0.toml", load("100", 64)),
            ("gpt_1.toml", load("101", 64)),
            ("large.toml", load("102", 2 * MIB)),
            ("resnet.toml", load("'bad'", 128)),
            ("vgg.toml", load("103", 256)),
            ("README.md", String::new()),
        ]);
        let wanted = Wanted { names: &[], most: MIB };
        let all = wanted.read(Some(mina.path()), Some(mccs.path())).unwrap();
        let [_, gpt, _] = all.as_slice() else { panic!("{all:?}") };
        assert_eq!((gpt.ranks, gpt.in_turn, gpt.operations.as_slice()), (2, true, &[(64, 300)][..]));
        assert_eq!(names(Ok(all)), ["vit", "MCCS gpt_0", "MCCS vgg"]);
        let bad = folder(&[("resnet.toml", load("'bad'", 128))]);
        assert!(wanted.read(Some(mina.path()), Some(bad.path())).is_err(), "nothing is left of a folder");
    }

    #[test]
    fn recordings_are_chosen_by_name_or_refused() {
        let mina = folder(&[("opt-4.json", recording(8)), ("vit-4.json", recording(8))]);
        let mccs = folder(&[("gpt_0.toml", load("100", 64)), ("gpt_1.toml", load("101", 64))]);
        let read = |chosen: &[&str]| {
            let chosen: Vec<String> = chosen.iter().map(|name| (*name).to_owned()).collect();
            Wanted { names: &chosen, most: MIB }.read(Some(mina.path()), Some(mccs.path()))
        };
        assert_eq!(names(read(&["vit"])), ["vit"]);
        assert_eq!(names(read(&["gpt_1", "opt"])), ["opt", "MCCS gpt_1"]);
        let error = read(&["vit", "bert"]).unwrap_err();
        assert!(error.to_string().contains("no file is \"bert\""), "{error}");
    }

    #[test]
    fn a_load_has_a_row_beyond_its_computing() {
        let iteration = Iteration::generated_in_turn(MIB);
        let entry = |role, name: &str, time| Entry {
            rounds: vec![BTreeMap::from([(iteration.bytes(), time)])],
            ..Entry::new(name, name, role)
        };
        let entries = [entry(Role::Ours, "ours", 10_100.0), entry(Role::Peer, "slow", 10_400.0)];
        let rows = rows_of(&iteration, "a load", &entries).unwrap();
        let [whole, beyond] = rows.as_slice() else { panic!("{rows:?}") };
        assert_eq!((whole.ours, whole.reference), (Some(10_100.0), Some(10_400.0)));
        assert_eq!((beyond.ours, beyond.reference, beyond.ratio), (Some(100.0), Some(400.0), Some(4.0)));
        assert_eq!(iteration.computing_us(), 10_000.0);
        assert_eq!(Iteration::generated(MIB).computing_us(), 0.0);
    }

    #[test]
    fn the_generators_iteration_has_the_columns_of_a_recording() {
        let Iteration { operations, .. } = Iteration::generated(LAYER.0);
        assert_eq!(operations.len(), 13);
        assert!(operations.is_sorted_by_key(|(_, at)| *at) && operations[0] == (HEAD, 0));
    }
}
