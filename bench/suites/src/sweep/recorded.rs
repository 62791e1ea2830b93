//! Part recorded: the AllReduces of one iteration of trainings, at their times. Ours and the peers run in turn, four ranks on one
//! host.
//!
//! MINA's recordings (INFOCOM 2025, MIT licence) are read where [`VARIABLE`] says, and a generator's iteration of the same columns without.

use super::contestant::{Contestant, Peers};
use super::nodes::Nodes;
use super::{Collective, Contest, Entry, MIB, Role, Site, best, failures};
use crate::peers::RECORDED;
use crate::row::{Case, Row};
use crate::suite::Request;
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::workspace::Binaries;
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The part's name.
pub(super) const PART: &str = "recorded";
/// Names the folder `traces` of MINA's artifact.
const VARIABLE: &str = "HARMONAIZE_MINA";
/// Workers of the recordings that are replayed; their files end with it.
const WORKERS: usize = 4;
/// The most bytes of a worker's gradients that are replayed, usually and with `--full`.
const MOST: (u64, u64) = (512 * MIB, 2048 * MIB);
/// The generator's layers, how many microseconds lie between two, and what else is reduced before them.
const LAYERS: u32 = 12;
const APART_US: u32 = 2500;
const HEAD: u64 = 3 * MIB;
/// Bytes of a layer, usually and in a smoke run.
const LAYER: (u64, u64) = (28 * MIB, MIB);

/// What is an operation of it.
static TRAFFIC: Collective = Collective { name: RECORDED, bus: |part| 2.0 * part, rounds: None, blocks: 0 };

/// One iteration.
#[derive(Debug, PartialEq)]
struct Iteration {
    name: String,
    /// Bytes of each AllReduce, and microseconds from the first.
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
        Ok(Self { name: name.to_owned(), operations })
    }

    /// A transformer's: equal layers at equal times.
    fn generated(layer: u64) -> Self {
        let layers = (1..=LAYERS).map(|number| (layer, number * APART_US));
        let operations = [(HEAD.min(layer), 0)].into_iter().chain(layers).collect();
        Self { name: format!("generated, {LAYERS} layers of {} MiB", layer / MIB), operations }
    }

    fn bytes(&self) -> u64 {
        self.operations.iter().map(|(bytes, _)| bytes).sum()
    }
}

/// The recordings of a folder whose gradients are no more than so many bytes, by name.
fn read(folder: &Path, most: u64) -> Result<Vec<Iteration>> {
    let end = format!("-{WORKERS}.json");
    let mut found = Vec::new();
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(&end)) else {
            continue;
        };
        let text = std::fs::read_to_string(&path)?;
        let iteration = Iteration::parse(name, &text).with_context(|| path.display().to_string())?;
        match iteration.bytes() <= most {
            true => found.push(iteration),
            false => eprintln!("Left out: {name}, {} MiB of gradients", iteration.bytes() / MIB),
        }
    }
    ensure!(!found.is_empty(), "{} has no recording of {WORKERS} workers, *{end}", folder.display());
    found.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(found)
}

/// The rows: ours against the best peer, for each recording.
pub(super) fn measure(
    request: &Request,
    peers: &Peers,
    binaries: &Binaries,
    stop: &Arc<AtomicBool>,
) -> Result<Vec<Row>> {
    let iterations = match std::env::var_os(VARIABLE) {
        Some(folder) if !request.smoke => read(folder.as_ref(), if request.full { MOST.1 } else { MOST.0 })?,
        _ => {
            eprintln!(
                "Not of {VARIABLE}, the folder traces of MINA's artifact: what is replayed is generated"
            );
            vec![Iteration::generated(if request.smoke { LAYER.1 } else { LAYER.0 })]
        }
    };
    let rounds = if request.smoke { request.rounds_of((1, 1)) } else { request.rounds() };
    let mut lab = Site::Host.lab(binaries.clone(), Arc::clone(stop))?;
    let nodes = Nodes::prepare(lab.fabric())?;
    let mut rows = Vec::new();
    for iteration in &iterations {
        let title = format!("allreduces of an iteration, {}, one host, {WORKERS} ranks", iteration.name);
        eprintln!("{title}");
        let all = peers.contestants(Site::Host, &TRAFFIC).into_iter();
        let (contestants, mut entries): (Vec<Result<Contestant, String>>, Vec<Entry>) =
            all.filter(|(_, entry)| matches!(entry.role, Role::Ours | Role::Peer)).unzip();
        let (hosts, sizes) = ([0; WORKERS], &iteration.operations);
        let contest = Contest { collective: &TRAFFIC, hosts: &hosts, sizes, rounds };
        contest.run(&contestants, &mut entries, &mut lab, &nodes)?;
        let bytes = iteration.bytes();
        let case = Case::less("sweep", format!("{title}: p50 us"), 1.0).of(bytes, WORKERS).stated();
        let own = entries.iter().find(|entry| entry.role == Role::Ours).context("ours did not take part")?;
        rows.push(match best(&entries, bytes) {
            Some(peer) => case.compare(&own.times(bytes), &peer.times(bytes), &peer.name),
            None => case.missing("any peer", "none has run"),
        });
        rows.extend(failures(&title, WORKERS, &entries));
    }
    lab.end().context("the lab did not end in order")?;
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

    #[test]
    fn recordings_of_other_workers_and_too_large_ones_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let files = [("small-4.json", 8), ("large-4.json", 4 * MIB), ("small-16.json", 8), ("LICENSE", 8)];
        for (name, size) in files {
            let text = format!(r#"{{"allreduces": [{{"start": 0, "size": {size}}}]}}"#);
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let names = |most| read(folder.path(), most).map(|all| all.into_iter().map(|one| one.name).collect());
        assert_eq!(names(MIB).unwrap(), ["small".to_owned()] as [String; 1]);
        let both: Vec<String> = names(4 * MIB).unwrap();
        assert_eq!(both, ["large", "small"]);
        assert!(read(folder.path(), 4).is_err());
    }

    #[test]
    fn the_generators_iteration_has_the_columns_of_a_recording() {
        let Iteration { operations, .. } = Iteration::generated(LAYER.0);
        assert_eq!(operations.len(), 13);
        assert!(operations.is_sorted_by_key(|(_, at)| *at) && operations[0] == (HEAD, 0));
    }
}
