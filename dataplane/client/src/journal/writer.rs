//! The thread that writes: the log, the lines of operations, and the metrics.

use super::metrics::{Metrics, bytes, name, outcome, time};
use super::settings::{DebugLevel, Settings};
use super::{Ended, Record, Scope};
use harmonaize_abi::session::FailureDetail;
use harmonaize_abi::{Called, Status};
use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// How often metrics are written.
const METRICS_EVERY: Duration = Duration::from_secs(5);
/// How often a communicator's operations are summed up in the log.
const SUMS_EVERY: Duration = Duration::from_secs(10);
/// From when on an operation in flight is reported; then whenever it has taken twice as long.
const SLOW: Duration = Duration::from_secs(5);
/// How often the thread looks at the clock without records.
const TICK: Duration = Duration::from_millis(500);
/// Lines that wait to be written, at most.
const BUFFERED: usize = 1 << 20;
/// Lines of failures in the log between two sums, at most.
const FAILURES: u32 = 20;

/// An operation in flight.
struct Flying {
    scope: Arc<Scope>,
    called: Called,
    since: Instant,
    /// When it is reported next, in time since then.
    report: Duration,
}

/// Operations of a communicator since the last sum.
#[derive(Default)]
struct Sum {
    operations: u64,
    bytes: u64,
    slowest: Option<(Duration, Called)>,
}

struct Writer<'a> {
    settings: Settings,
    lost: &'a AtomicU64,
    metrics: Metrics,
    flying: HashMap<u64, Flying>,
    lines: Vec<u8>,
    operations: Option<File>,
    changed: bool,
    metrics_at: Instant,
    sums: BTreeMap<(String, u32), Sum>,
    sums_at: Instant,
    failures: u32,
    /// Variables whose files could not be written, which is told once.
    told: Vec<&'static str>,
    lost_told: u64,
}

/// Writes until the process ends.
pub(super) fn run(settings: Settings, records: &Receiver<Record>, lost: &AtomicU64) {
    let now = Instant::now();
    let mut writer = Writer {
        settings,
        lost,
        metrics: Metrics::default(),
        flying: HashMap::new(),
        lines: Vec::new(),
        operations: None,
        changed: true,
        metrics_at: now,
        sums: BTreeMap::new(),
        sums_at: now,
        failures: 0,
        told: Vec::new(),
        lost_told: 0,
    };
    loop {
        match records.recv_timeout(TICK) {
            Ok(record) => {
                let mut waiting = writer.take(record);
                while let Ok(record) = records.try_recv() {
                    waiting = waiting.or(writer.take(record));
                    if waiting.is_some() || writer.lines.len() > BUFFERED {
                        break;
                    }
                }
                writer.write_lines();
                if let Some(waiting) = waiting {
                    writer.write_metrics();
                    let _ = waiting.try_send(());
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        writer.tick(Instant::now());
    }
}

impl Writer<'_> {
    fn log(&self, text: &str) {
        let rank = self.settings.rank.map_or_else(String::new, |rank| format!(" rank {rank}"));
        let line = format!("harmonaize{rank}: {text}\n");
        // In one piece: ranks share it. Whoever has closed standard error does not want it.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }

    fn level(&self, level: DebugLevel) -> bool {
        self.settings.debug.is_some_and(|asked| asked >= level)
    }

    /// Logs a failure, unless there were many lately.
    fn fail(&mut self, text: &str) {
        self.failures += 1;
        if self.level(DebugLevel::Trace) || self.level(DebugLevel::Info) && self.failures <= FAILURES {
            self.log(text);
        }
    }

    /// Takes a record in. Who waits for everything to be written, if it is that.
    fn take(&mut self, record: Record) -> Option<SyncSender<()>> {
        match record {
            Record::Joined(scope, took) => {
                if self.level(DebugLevel::Info) {
                    let Scope { name, rank, ranks, .. } = &*scope;
                    self.log(&format!("{name}: rank {rank} of {ranks}, formed in {}", time(took)));
                }
            }
            Record::Failed(text) => self.fail(&text),
            Record::Started { number, scope, called, at } => {
                self.flying.insert(number, Flying { scope, called, since: at, report: SLOW });
            }
            Record::Ended(ended) => self.ended(&ended),
            Record::Explained(scope, called, status, detail) => {
                self.fail(&explained(&scope.name, &called, status, &detail));
            }
            Record::Flush(waiting) => return Some(waiting),
        }
        None
    }

    fn ended(&mut self, ended: &Ended) {
        self.flying.remove(&ended.number);
        self.metrics.add(ended);
        self.changed = true;
        let Ended { scope, called, took, .. } = ended;
        let (bytes, factor) = bytes(called, scope.ranks);
        let seconds = took.as_secs_f64();
        let busbw = if seconds > 0.0 { bytes as f64 / seconds * factor } else { 0.0 };
        let outcome = outcome(ended);
        if outcome != "ok" {
            self.fail(&format!("{}: {called} ended as {outcome} after {}", scope.name, time(*took)));
        } else if self.level(DebugLevel::Trace) {
            let gigabytes = busbw / 1e9;
            self.log(&format!(
                "{}: {called}, {bytes} bytes in {}, busbw {gigabytes:.3} GB/s",
                scope.name,
                time(*took)
            ));
        } else if self.level(DebugLevel::Info) {
            let sum = self.sums.entry((scope.name.clone(), scope.rank.0)).or_default();
            sum.operations += 1;
            sum.bytes = sum.bytes.saturating_add(bytes);
            if sum.slowest.is_none_or(|(slowest, _)| slowest < *took) {
                sum.slowest = Some((*took, *called));
            }
        }
        if self.settings.operations.is_some() {
            let line = line(ended, (bytes, busbw), &outcome);
            // Writing to memory does not fail.
            let _ = writeln!(self.lines, "{line}");
        }
    }

    fn tick(&mut self, now: Instant) {
        if now.duration_since(self.metrics_at) >= METRICS_EVERY {
            self.metrics_at = now;
            self.write_metrics();
        }
        let lost = self.lost.load(Ordering::Relaxed);
        if lost > self.lost_told {
            if self.settings.debug.is_some() {
                self.log(&format!("{} records found no room; this log lacks them", lost - self.lost_told));
            }
            self.lost_told = lost;
            // Ends among them would leave operations here for ever.
            self.flying.clear();
        }
        if self.settings.debug.is_none() {
            return;
        }
        let mut slow = Vec::new();
        for flying in self.flying.values_mut() {
            let waited = now.saturating_duration_since(flying.since);
            if waited >= flying.report {
                flying.report = waited.saturating_mul(2);
                let Flying { scope, called, .. } = flying;
                slow.push(format!(
                    "{}: {called} is in flight for {}: ranks may be late",
                    scope.name,
                    time(waited)
                ));
            }
        }
        slow.iter().for_each(|text| self.fail(text));
        if now.duration_since(self.sums_at) < SUMS_EVERY {
            return;
        }
        let over = now.duration_since(self.sums_at);
        self.sums_at = now;
        if self.failures > FAILURES && !self.level(DebugLevel::Trace) {
            self.log(&format!("{} more lines of this kind", self.failures - FAILURES));
        }
        self.failures = 0;
        for ((name, _), sum) in std::mem::take(&mut self.sums) {
            let slowest = sum
                .slowest
                .map_or_else(String::new, |(took, called)| format!("; slowest: {called} in {}", time(took)));
            let Sum { operations, bytes, .. } = sum;
            self.log(&format!("{name}: {operations} operations, {bytes} bytes in {}{slowest}", time(over)));
        }
    }

    fn warn_once(&mut self, variable: &'static str, path: &std::path::Path, error: &std::io::Error) {
        if !self.told.contains(&variable) {
            self.told.push(variable);
            let path = path.display();
            self.log(&format!(
                "{variable}: cannot write {path}: {error}; operations go on, and this is said once"
            ));
        }
    }

    fn write_lines(&mut self) {
        let Some(path) = self.settings.operations.clone() else { return };
        if self.lines.is_empty() {
            return;
        }
        let lines = std::mem::take(&mut self.lines);
        let opened = match self.operations.take() {
            Some(file) => Ok(file),
            None => OpenOptions::new().create(true).append(true).open(&path),
        };
        match opened.and_then(|mut file| file.write_all(&lines).map(|()| file)) {
            Ok(file) => self.operations = Some(file),
            Err(error) => self.warn_once("HARMONAIZE_OPERATIONS", &path, &error),
        }
    }

    /// Replaces the file of metrics as a whole.
    fn write_metrics(&mut self) {
        let Some(path) = self.settings.metrics.clone() else { return };
        if !std::mem::take(&mut self.changed) {
            return;
        }
        let text =
            self.metrics.text(self.settings.rank, self.flying.len(), self.lost.load(Ordering::Relaxed));
        let mut new = path.clone().into_os_string();
        new.push(format!(".{}", std::process::id()));
        let new = PathBuf::from(new);
        let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &path));
        if let Err(error) = written {
            self.changed = true;
            self.warn_once("HARMONAIZE_METRICS", &path, &error);
        }
    }
}

/// What the agent knows of a failure, for people.
fn explained(name: &str, called: &Called, status: Status, detail: &FailureDetail) -> String {
    let ranks: Vec<String> = detail.ranks.iter().map(ToString::to_string).collect();
    let what = match status {
        Status::Timeout => "late",
        Status::RankLost => "lost",
        _ => "concerned",
    };
    let who = if ranks.is_empty() { String::new() } else { format!("; {what}: rank {}", ranks.join(", ")) };
    format!("{name}: {called} failed: {status}: {}{who}", detail.text)
}

/// An operation as a line of JSON.
fn line(ended: &Ended, (bytes, busbw): (u64, f64), outcome: &str) -> serde_json::Value {
    let Scope { name: communicator, rank, ranks, .. } = &*ended.scope;
    let time = ended.at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let (dtype, count, reduce, root, peer) = match &ended.called {
        Called::Collective(it) => {
            let reduce = it.collective.reduces().then(|| it.reduce.to_string());
            let root = it.collective.is_rooted().then_some(it.root.0);
            (it.dtype, it.count, reduce, root, None)
        }
        Called::P2p(it) => (it.dtype, it.count, None, None, it.peer.map(|peer| peer.0)),
    };
    let wire_bytes = ended.completion.map(|completion| completion.wire_bytes);
    serde_json::json!({
        "time": time,
        "communicator": communicator,
        "rank": rank.0,
        "ranks": ranks,
        "collective": name(&ended.called),
        "dtype": dtype.name(),
        "count": count,
        "reduce": reduce,
        "root": root,
        "peer": peer,
        "bytes": bytes,
        "seconds": ended.took.as_secs_f64(),
        "busbw": busbw,
        "wire_bytes": wire_bytes,
        "outcome": outcome,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::{Collective, Dtype, Rank, ReduceOp, Signature};

    #[test]
    fn a_failure_says_who_is_late() {
        let (collective, dtype, reduce) = (Collective::AllReduce, Dtype::F32, ReduceOp::Sum);
        let signature = Signature { collective, dtype, reduce, root: Rank(0), count: 8, uneven: false };
        let called = Called::Collective(signature);
        let text = "2 of 4 ranks have not called".to_owned();
        let (status, ranks) = (Status::Timeout, vec![Rank(1), Rank(3)]);
        let detail = FailureDetail { status, operation: 0, signature: None, ranks, calls: Vec::new(), text };
        assert_eq!(
            explained("train", &called, status, &detail),
            "train: allreduce(8 x f32, sum) failed: ranks did not arrive in time: 2 of 4 ranks have not called; late: rank 1, 3"
        );
    }
}
