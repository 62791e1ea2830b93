//! Recorded trainings, as their own logs have them.

use super::{apart, found, matched, median};
use crate::training::Iteration;
use harmonaize_analysis::Nanos;
use harmonaize_analysis::phases::Phase;
use harmonaize_analysis::trace::{Record, merge, replay};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A recorded run.
struct Run {
    folder: PathBuf,
    truth: Value,
    log: Vec<Iteration>,
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

impl Run {
    fn read(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/traces").join(name);
        let text = std::fs::read_to_string(folder.join("truth.json")).unwrap();
        let truth: Value = serde_json::from_str(&text).unwrap();
        let ranks = truth["ranks"].as_array().unwrap();
        let iteration = |at: usize| Iteration {
            called_ns: ranks.iter().map(|rank| number(&rank[at]["called_ns"])).collect(),
            done_ns: ranks.iter().map(|rank| number(&rank[at]["done_ns"])).collect(),
        };
        let log = (0..ranks[0].as_array().unwrap().len()).map(iteration).collect();
        Self { folder, truth, log }
    }

    fn host(&self, host: usize) -> Vec<Record> {
        let bytes = std::fs::read(self.folder.join(format!("h{host}.trace"))).unwrap();
        let mut records = Vec::new();
        assert_eq!(replay(&bytes, |record| records.push(*record)).unwrap().torn, None);
        records
    }

    fn all(&self) -> Vec<Record> {
        let traces: Vec<Vec<Record>> = (0..4).map(|host| self.host(host)).collect();
        merge(&traces.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }
}

const RUNS: [&str; 3] = ["gloo-clean", "gloo-slow-link", "gloo-slow-worker"];

#[test]
fn iterations_match_the_training_log() {
    for name in RUNS {
        let run = Run::read(name);
        let (phases, jobs) = found(&run.all());
        let of: Vec<&Phase> =
            matched(&run.log, &phases.iter().collect::<Vec<_>>()).into_iter().flatten().collect();
        assert_eq!((of.len(), jobs.len()), (run.log.len(), 1), "{name}");
        assert!(jobs[0].ring && jobs[0].hosts.len() == 4, "{:?}", jobs[0]);
        let begin =
            median(run.log.iter().zip(&of).map(|(log, one)| apart(one.began, log.began_ns())).collect());
        let end =
            median(run.log.iter().zip(&of).map(|(log, one)| apart(one.ended, log.ended_ns())).collect());
        println!("{name}: begins {begin} ns after its log, ends {end}");
        assert!((0.0..1e6).contains(&begin), "{name}: {begin}");
        // The log's end is when Python woke up, on a machine with fewer cores than ranks.
        assert!(end < 0.0 && end > -3e6, "{name}: {end}");
        let (first, last) = (&run.log[0], run.log.last().unwrap());
        let count = (run.log.len() - 1) as f64;
        let logged = apart(Nanos(last.began_ns()), first.began_ns()) / count;
        let period = of.last().unwrap().period.as_nanos() as f64;
        // The first words of the first iteration come early, by as much as a rank was late.
        assert!((period - logged).abs() < 35e6 / count, "{name}: {period} {logged}");
        for phase in &of[1..] {
            let ring = phase.ring.unwrap();
            assert!(ring.hosts == 4 && [0, 18, 36].contains(&ring.steps), "{name}: {ring:?}");
        }
        let whole = of.iter().filter(|phase| phase.ring.is_some_and(|ring| ring.steps == 36)).count();
        // Gloo sends each of the 18 steps of 3 AllReduces in two pieces.
        assert!(whole * 4 >= of.len() * 3, "{name}: {whole}");
    }
}

#[test]
fn one_host_finds_every_iteration_too() {
    for name in RUNS {
        let run = Run::read(name);
        for host in 0..4 {
            let (phases, jobs) = found(&run.host(host));
            let of: Vec<&Phase> =
                matched(&run.log, &phases.iter().collect::<Vec<_>>()).into_iter().flatten().collect();
            assert_eq!((of.len(), jobs.len()), (run.log.len(), 1), "{name} {host}");
            let own =
                |phase: &Phase| *phase.hosts.iter().find(|one| one.host[3] == address(&run, host)).unwrap();
            let starts =
                run.log.iter().zip(&of).map(|(log, one)| apart(own(one).first_sent, log.called_ns[host]));
            let ends =
                run.log.iter().zip(&of).map(|(log, one)| apart(own(one).last_received, log.done_ns[host]));
            let (start, end) = (median(starts.collect()), median(ends.collect()));
            println!("{name} {host}: starts {start} ns after its log, ends {end}");
            assert!(start.abs() < 1e6 && end.abs() < 5e6, "{name} {host}: {start} {end}");
        }
    }
}

fn address(run: &Run, host: usize) -> u32 {
    let text = run.truth["places"][host]["address"].as_str().unwrap();
    u32::from_ne_bytes(text.parse::<std::net::Ipv4Addr>().unwrap().octets())
}

#[test]
fn slow_worker_is_reported_late() {
    let run = Run::read("gloo-slow-worker");
    let (rank, from) = (&run.truth["injections"][0]["rank"], &run.truth["injections"][0]["from"]);
    let (rank, from) = (number(rank) as usize, number(from) as usize);
    let (phases, _) = found(&run.all());
    let late: Vec<Option<u32>> = phases.iter().map(|phase| phase.late.map(|late| late.host[3])).collect();
    assert!(late[..from].iter().all(Option::is_none), "{late:?}");
    assert!(late[from..].iter().all(|host| *host == Some(address(&run, rank))), "{late:?}");
}
