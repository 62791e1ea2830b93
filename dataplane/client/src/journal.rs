//! The journal of this process's own operations, where the environment asks for it. It is a log on standard error,
//! metrics, and a line for each operation.
//!
//! Operations put records into a bounded channel and never wait for it. A thread, which a process has where a variable asks for it, writes.

mod metrics;
mod settings;
mod writer;

use crate::Error;
use harmonaize_abi::session::FailureDetail;
use harmonaize_abi::{Called, Completion, Rank, Status};
pub use settings::DebugLevel;
use settings::Settings;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Records that wait for the thread, at most; more are lost and counted.
const WAITING: usize = 16_384;

/// How long the end of an attachment waits until all is written.
const FLUSH_WITHIN: Duration = Duration::from_secs(2);

/// The process's journal: the process that has read the environment, and what it wants.
static CURRENT: Mutex<Option<(u32, Option<Arc<Journal>>)>> = Mutex::new(None);

/// Where records go.
#[derive(Debug)]
pub(crate) struct Journal {
    sender: SyncSender<Record>,
    /// The process that has its thread.
    process: u32,
    /// Records that found no room.
    lost: Arc<AtomicU64>,
    /// Operations so far.
    operations: AtomicU64,
}

/// A communicator in records.
#[derive(Debug)]
pub(crate) struct Scope {
    journal: Arc<Journal>,
    pub(crate) name: String,
    pub(crate) rank: Rank,
    pub(crate) ranks: u32,
}

/// How an operation ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) number: u64,
    pub(crate) scope: Arc<Scope>,
    pub(crate) called: Called,
    pub(crate) at: SystemTime,
    pub(crate) took: Duration,
    /// None where it was never called, or the attachment ended first.
    pub(crate) completion: Option<Completion>,
}

/// Something to write down.
#[derive(Debug)]
pub(crate) enum Record {
    /// A communicator has formed within so long.
    Joined(Arc<Scope>, Duration),
    /// A communicator has not formed, or the attachment is lost.
    Failed(String),
    /// An operation was called.
    Started { number: u64, scope: Arc<Scope>, called: Called, at: Instant },
    /// It has ended.
    Ended(Box<Ended>),
    /// What the agent knows of a failure.
    Explained(Arc<Scope>, Called, Status, Box<FailureDetail>),
    /// Write everything, then answer.
    Flush(SyncSender<()>),
}

impl Journal {
    /// The journal of this process, which its first attachment begins; none where no variable asks for one.
    ///
    /// # Errors
    /// [`Error::Environment`] names the variable whose value means nothing.
    pub(crate) fn of_process() -> Result<Option<Arc<Self>>, Error> {
        let process = std::process::id();
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        // A child by `fork` has the parent's, and not its thread.
        if let Some((of, journal)) = &*current
            && *of == process
        {
            return Ok(journal.clone());
        }
        let settings = Settings::from_variables(crate::environment::variable)?;
        let journal = if settings.is_empty() { None } else { Some(Self::start(settings)?) };
        *current = Some((process, journal.clone()));
        Ok(journal)
    }

    /// Begins a thread that writes.
    fn start(settings: Settings) -> Result<Arc<Self>, Error> {
        let (sender, records) = sync_channel(WAITING);
        let lost = Arc::<AtomicU64>::default();
        let count = Arc::clone(&lost);
        let thread = std::thread::Builder::new().name("harmonaize-journal".into());
        let run = move || writer::run(settings, &records, &count);
        thread.spawn(run).map_err(|source| Error::System { call: "clone", source })?;
        Ok(Arc::new(Self::new(sender, lost)))
    }

    fn new(sender: SyncSender<Record>, lost: Arc<AtomicU64>) -> Self {
        Self { sender, process: std::process::id(), lost, operations: AtomicU64::new(0) }
    }

    fn send(&self, record: Record) {
        // In a child by `fork` nobody takes them out.
        if self.process == std::process::id() && self.sender.try_send(record).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Notes that something failed which has no operation.
    pub(crate) fn failed(&self, text: String) {
        self.send(Record::Failed(text));
    }

    /// Notes that a communicator has formed; what its operations are noted by.
    pub(crate) fn joined(
        self: &Arc<Self>,
        name: &str,
        (rank, ranks): (Rank, u32),
        took: Duration,
    ) -> Arc<Scope> {
        let scope = Arc::new(Scope { journal: Arc::clone(self), name: name.to_owned(), rank, ranks });
        self.send(Record::Joined(Arc::clone(&scope), took));
        scope
    }

    /// Waits until everything is written, for a while.
    fn flush(&self) {
        let (written, wait) = sync_channel(1);
        let own = self.process == std::process::id();
        if own && self.sender.try_send(Record::Flush(written)).is_ok() {
            let _ = wait.recv_timeout(FLUSH_WITHIN);
        }
    }
}

impl Scope {
    /// Notes what the agent knows of a failure.
    pub(crate) fn explained(self: &Arc<Self>, called: Called, status: Status, detail: &FailureDetail) {
        self.journal.send(Record::Explained(Arc::clone(self), called, status, Box::new(detail.clone())));
    }
}

/// An operation whose end is to be noted.
#[derive(Debug)]
pub(crate) struct Watched {
    scope: Arc<Scope>,
    number: u64,
    called: Called,
    started: Instant,
    ended: bool,
}

impl Watched {
    /// Notes that an operation begins.
    pub(crate) fn start(scope: &Arc<Scope>, called: Called) -> Self {
        let number = scope.journal.operations.fetch_add(1, Ordering::Relaxed);
        let (scope, started) = (Arc::clone(scope), Instant::now());
        scope.journal.send(Record::Started { number, scope: Arc::clone(&scope), called, at: started });
        Self { scope, number, called, started, ended: false }
    }

    /// Notes its end.
    pub(crate) fn end(mut self, completion: Completion) {
        self.note(Some(completion));
    }

    fn note(&mut self, completion: Option<Completion>) {
        self.ended = true;
        let (number, called) = (self.number, self.called);
        let (scope, at, took) = (Arc::clone(&self.scope), SystemTime::now(), self.started.elapsed());
        let ended = Ended { number, scope, called, at, took, completion };
        self.scope.journal.send(Record::Ended(Box::new(ended)));
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if !self.ended {
            self.note(None);
        }
    }
}

/// A communicator of another library, whose operations go into the process's journal as the client's own do. Dropped, it waits for 2 s at
/// most until all that the process has noted is written.
#[derive(Debug)]
pub struct ExternalCommunicator(Arc<Scope>);

impl ExternalCommunicator {
    /// A communicator by its name, and this process's place in it. None where no variable of the environment asks for a
    /// journal.
    ///
    /// # Errors
    /// [`Error::Environment`] names the variable whose value means nothing; [`Error::System`] where there is no thread to be had.
    pub fn from_env(name: &str, rank: Rank, ranks: u32) -> Result<Option<Self>, Error> {
        let journal = Journal::of_process()?;
        Ok(journal.map(|journal| Self(journal.joined(name, (rank, ranks), Duration::ZERO))))
    }

    /// Notes that an operation begins now. Never waits.
    pub fn begin(&self, called: Called) -> ExternalOperation {
        ExternalOperation(Watched::start(&self.0, called))
    }
}

impl Drop for ExternalCommunicator {
    fn drop(&mut self) {
        self.0.journal.flush();
    }
}

/// An operation of another library. Dropped before its end it is noted as unfinished.
#[derive(Debug)]
#[must_use]
pub struct ExternalOperation(Watched);

impl ExternalOperation {
    /// Notes that it ends now, and well. Of what it has sent nothing is known. Never waits.
    pub fn end(self) {
        self.0.end(Completion { status: Status::Ok.code(), ..Completion::default() });
    }
}

/// An attachment's hold on the journal: everything is written when it ends.
#[derive(Debug)]
pub(crate) struct JournalGuard(pub(crate) Arc<Journal>);

impl Drop for JournalGuard {
    fn drop(&mut self) {
        self.0.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::{Collective, Dtype, ReduceOp, Signature};
    use std::path::Path;

    fn journal(folder: &Path) -> Arc<Journal> {
        let settings = Settings {
            debug: None,
            metrics: Some(folder.join("metrics.prom")),
            operations: Some(folder.join("operations.jsonl")),
            rank: Some(2),
        };
        Journal::start(settings).unwrap()
    }

    fn sum(count: u64) -> Called {
        let (collective, dtype, reduce) = (Collective::AllReduce, Dtype::F32, ReduceOp::Sum);
        Called::Collective(Signature { collective, dtype, reduce, root: Rank(0), count, uneven: false })
    }

    fn status(status: Status) -> Completion {
        Completion { status: status.code(), wire_bytes: 7, ..Completion::default() }
    }

    #[test]
    fn each_operation_is_a_line_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let journal = journal(folder.path());
        let scope = journal.joined("job/\"train\"", (Rank(2), 4), Duration::from_millis(3));
        Watched::start(&scope, sum(1024)).end(status(Status::Ok));
        Watched::start(&scope, sum(1)).end(status(Status::RankLost));
        drop(Watched::start(&scope, sum(1)));
        journal.flush();
        let lines = std::fs::read_to_string(folder.path().join("operations.jsonl")).unwrap();
        let lines: Vec<serde_json::Value> =
            lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let outcomes: Vec<_> = lines.iter().map(|line| line["outcome"].as_str().unwrap()).collect();
        assert_eq!(outcomes, ["ok", "rank_lost", "unfinished"]);
        let first = &lines[0];
        assert_eq!(first["communicator"], "job/\"train\"");
        assert_eq!(
            (&first["collective"], &first["dtype"], &first["reduce"]),
            (&"allreduce".into(), &"f32".into(), &"sum".into())
        );
        assert_eq!(
            (&first["count"], &first["bytes"], &first["ranks"]),
            (&1024.into(), &4096.into(), &4.into())
        );
        let (seconds, busbw) = (first["seconds"].as_f64().unwrap(), first["busbw"].as_f64().unwrap());
        assert!((busbw - 4096.0 / seconds * 1.5).abs() < 1e-6 * busbw, "{busbw} over {seconds} s");
        let metrics = std::fs::read_to_string(folder.path().join("metrics.prom")).unwrap();
        let labels = r#"communicator="job/\"train\"",collective="allreduce",rank="2""#;
        for expected in [
            format!("harmonaize_tenant_operations_total{{{labels},outcome=\"ok\"}} 1\n"),
            format!("harmonaize_tenant_operations_total{{{labels},outcome=\"rank_lost\"}} 1\n"),
            format!("harmonaize_tenant_operation_bytes_total{{{labels}}} 4096\n"),
            format!("harmonaize_tenant_wire_bytes_total{{{labels}}} 7\n"),
            format!("harmonaize_tenant_operation_duration_seconds_count{{{labels}}} 1\n"),
            "harmonaize_tenant_operations_in_flight{rank=\"2\"} 0\n".to_owned(),
            "harmonaize_tenant_records_lost_total{rank=\"2\"} 0\n".to_owned(),
        ] {
            assert!(metrics.contains(&expected), "no {expected}in\n{metrics}");
        }
        let left = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, 2, "nothing half-written stays");
    }

    #[test]
    fn a_full_channel_costs_records_and_no_time() {
        let (sender, records) = sync_channel(1);
        let journal = Arc::new(Journal::new(sender, Arc::default()));
        let scope = journal.joined("train", (Rank(0), 1), Duration::ZERO);
        Watched::start(&scope, sum(1)).end(status(Status::Ok));
        assert_eq!(journal.lost.load(Ordering::Relaxed), 2);
        assert!(matches!(records.recv(), Ok(Record::Joined(..))));
    }

    #[test]
    fn files_that_cannot_be_written_cost_no_operation() {
        let folder = tempfile::tempdir().unwrap();
        let journal = journal(&folder.path().join("missing"));
        let scope = journal.joined("train", (Rank(0), 1), Duration::ZERO);
        Watched::start(&scope, sum(1)).end(status(Status::Ok));
        journal.flush();
        std::fs::create_dir(folder.path().join("missing")).unwrap();
        Watched::start(&scope, sum(1)).end(status(Status::Ok));
        journal.flush();
        let lines = std::fs::read_to_string(folder.path().join("missing/operations.jsonl")).unwrap();
        assert_eq!(lines.lines().count(), 1, "once it can be written it is");
    }
}
