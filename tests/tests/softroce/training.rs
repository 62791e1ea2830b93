//! The demo's training on verbs: four ranks on four hosts follow the single process, by the demo's own summary.

use crate::alone;
use crate::host::PATIENCE;
use crate::provider::{HOSTS, Provider, program};
use harmonaize_testkit::lines::{Line, Tail};
use harmonaize_testkit::summary::{Printed, judge};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// Few steps, small batches and few test images: an emulated processor multiplies some ten million numbers a second.
const STEPS: &str = "5";
const BATCH: &str = "16";
const TESTED: &str = "40";

/// A run of the training's program that ends with this value.
struct Run {
    child: Child,
    log: PathBuf,
}

impl Run {
    fn start(arguments: &mut Command, log: PathBuf) -> Self {
        arguments.args(["--seed", "1", "--steps", STEPS, "--batch", BATCH, "--tested", TESTED]);
        arguments.env("RAYON_NUM_THREADS", "1");
        let child = arguments.stdin(Stdio::null()).stdout(File::create(&log).unwrap()).spawn().unwrap();
        Self { child, log }
    }

    /// What it printed, once it has ended well.
    fn lines(&mut self) -> Vec<Line> {
        let deadline = Instant::now() + 2 * PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(status.success(), "{} ended with {status}", self.log.display());
                return Tail::open(&self.log).unwrap().lines().unwrap();
            }
            assert!(Instant::now() < deadline, "{}: the training stands still", self.log.display());
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn worker(socket: &Path, rank: usize) -> Command {
    let mut command = program("train");
    command.arg("--socket").arg(socket);
    command.args(["--rank", &rank.to_string(), "--ranks", &HOSTS.to_string(), "--name", "training"]);
    command
}

#[test]
fn a_training_on_verbs_follows_the_single_process() {
    let _alone = alone();
    let Some(provider) = Provider::start() else { return };
    let log = |name: String| provider.folder().join(name);
    let sockets = provider.sockets();
    let workers = sockets.iter().enumerate();
    let mut workers: Vec<Run> = workers
        .map(|(rank, socket)| Run::start(&mut worker(socket, rank), log(format!("rank{rank}.log"))))
        .collect();
    let workers = workers.iter_mut().map(Run::lines).collect();
    let reference = Run::start(program("train").arg("--single"), log("single.log".into())).lines();
    let printed = Printed { workers, exchangers: Vec::new(), reference, workers_per_host: 1 };
    // The line rate is the shaped links' of the demo; here nothing is shaped, and nothing judged by it.
    let summary = judge(&printed, HOSTS, 1e9 / 8.0).unwrap();
    for check in &summary.checks {
        println!("  {}: {}", check.what, check.found);
    }
    assert!(summary.passed, "{:?}", summary.checks);
    assert_eq!(summary.steps.len().to_string(), STEPS);
    // The gradients went over the wire, by the ring of the plan.
    let ring = |line: &Line| matches!(line, Line::Step { algorithm, wire_bytes, .. } if algorithm == "ring" && *wire_bytes > 0);
    assert!(
        printed
            .workers
            .iter()
            .all(|lines| lines.iter().filter(|line| ring(line)).count() == summary.steps.len())
    );
}
