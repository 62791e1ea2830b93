//! `harmonaize tenant run`: a runner on a host. It starts a worker of a job when the provider has it do so, and ends it likewise.

use super::attached;
use super::bid::BidTerms;
use crate::Failure;
use crate::jobs::Workers;
use crate::operate::Moment;
use crate::text::visible;
use harmonaize_client::{
    ElasticOrder, Error, HostPrice, JobBid, Price, PricedOrder, RecallReason, Runner, RunnerOrder,
    RunnerReport, WorkerPlace, WorkerState,
};
use rustix::process::{
    Pid, Signal, getppid, kill_process_group, set_parent_process_death_signal, test_kill_process_group,
};
use std::ffi::OsString;
use std::hash::{BuildHasher, RandomState};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, ChildStdin, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

/// Examples of `tenant run`.
pub(super) const HELP: &str = "\
Examples:
  harmonaize tenant run --job bert --workers 2..8 -- ./train.py      on each host that may have a worker
  harmonaize tenant run --job bert --workers 4 --until +8h -- ./train.py
  harmonaize tenant run --job bert --workers 2..8 --elastic -- ./train.py
  harmonaize tenant run --job bert --workers 2..8 --bid 0.65 --further 0.30 -- ./train.py

COMMAND finds its place in RANK, WORLD_SIZE, LOCAL_RANK, HARMONAIZE_JOB, HARMONAIZE_GENERATION and HARMONAIZE_SOCKET. When
the job gets more hosts or fewer, all its workers get SIGTERM, and SIGKILL after the notice; then they start again with other
places, from the checkpoint that COMMAND wrote. The job is over when all its workers have ended with status 0.

With --elastic workers run on where the job keeps their hosts. Each finds a line in its standard input, RESIZED GENERATION
RANK WORLD_SIZE, and regroups its communicators. A worker that starts beside such ones has HARMONAIZE_ENTER=1, and enters.

Where hosts have prices, the job gets them while its bid wins. The first runner's bid is the job's; `tenant bid` changes it.";

/// How long the provider is asked at a time: so soon it learns that a worker has ended.
const POLL: Duration = Duration::from_secs(1);

/// How long after an error it is asked again.
const AGAIN: Duration = Duration::from_secs(1);

/// How often it is seen whether processes of a worker are left that has ended itself.
const ORPHAN_POLL: Duration = Duration::from_millis(50);

/// How long a worker may leave no room for a line. It does not read them then.
const TELL: Duration = Duration::from_secs(1);

/// A worker's notice while nobody has said another one.
const NOTICE: Duration = Duration::from_secs(10);

/// What `tenant run` takes.
#[derive(clap::Args)]
pub(super) struct Run {
    /// The job's name: the same at all its runners.
    #[arg(long, value_name = "NAME")]
    job: String,
    /// The fewest and the most workers, on a host each; the same at all runners.
    #[arg(long, value_name = "LEAST..MOST")]
    workers: Workers,
    /// Workers run on when the job gets more hosts or fewer; the same at all runners.
    #[arg(long)]
    elastic: bool,
    /// When this runner ends, and its worker with it: a time (UTC), or so long from now.
    #[arg(long, value_name = "TIME|+DURATION")]
    until: Option<Moment>,
    /// The highest price of each of the fewest workers, an hour; the base price where nothing is said.
    #[arg(long, value_name = "PRICE")]
    bid: Option<Price>,
    #[command(flatten)]
    terms: BidTerms,
    /// What a worker runs.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// What the process of a worker takes before it becomes COMMAND.
#[derive(clap::Args)]
pub(super) struct Become {
    /// The runner's process.
    #[arg(long, value_name = "PID")]
    runner: i32,
    /// What it becomes.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Become {
    /// Becomes the command, which is killed when the runner dies.
    pub(super) fn run(self) -> Result<String, Failure> {
        let refused = |error: &dyn std::fmt::Display| Failure::Refused(error.to_string());
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| refused(&error))?;
        if getppid().map(|parent| parent.as_raw_nonzero().get()) != Some(self.runner) {
            return Err(Failure::Refused("the runner is gone".to_owned()));
        }
        let Some((program, arguments)) = self.command.split_first() else { return Ok(String::new()) };
        let error = std::process::Command::new(program).args(arguments).exec();
        Err(Failure::Refused(format!("{}: {error}", program.display())))
    }
}

/// An order, and where to say that it was carried out.
type Ordered = (Result<ElasticOrder, String>, oneshot::Sender<()>);

/// A worker that runs.
struct Worker {
    child: Child,
    group: Option<Pid>,
    /// Where one of an elastic job reads that it has another place.
    input: Option<ChildStdin>,
    place: WorkerPlace,
    /// When it is killed.
    kill_at: Option<Instant>,
    /// Whether it was.
    killed: bool,
}

impl Worker {
    /// Starts COMMAND at a place, in a process group of its own. It `enters` where others run on.
    fn start(run: &Run, socket: &Path, place: WorkerPlace, enters: bool) -> std::io::Result<Self> {
        let WorkerPlace { generation, rank, workers } = place;
        let runner = std::process::id().to_string();
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["tenant", "become", "--runner", runner.as_str(), "--"])
            .args(&run.command)
            // Its group is none of the terminal's, which would stop it where it reads.
            .stdin(if run.elastic { Stdio::piped() } else { Stdio::null() })
            .process_group(0);
        command.env_remove("HARMONAIZE_RANK").env_remove("HARMONAIZE_RANKS");
        command.env("RANK", rank.0.to_string()).env("WORLD_SIZE", workers.to_string());
        command.env("LOCAL_RANK", "0").env("LOCAL_WORLD_SIZE", "1");
        command.env("HARMONAIZE_JOB", &run.job).env("HARMONAIZE_GENERATION", generation.to_string());
        command.env("HARMONAIZE_SOCKET", socket);
        match enters {
            true => command.env("HARMONAIZE_ENTER", "1"),
            false => command.env_remove("HARMONAIZE_ENTER"),
        };
        let mut child = command.spawn()?;
        let input = child.stdin.take();
        let group = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        Ok(Self { child, group, input, place, kill_at: None, killed: false })
    }

    /// Signals all processes of its group; those that are gone are no error.
    fn signal(&self, signal: Signal) {
        if let Some(group) = self.group {
            let _ = kill_process_group(group, signal);
        }
    }

    /// Whether a process of its group is left.
    fn has_processes(&self) -> bool {
        self.group.is_some_and(|group| test_kill_process_group(group).is_ok())
    }

    /// Gives it another place, with a line in its standard input. One that does not read them runs on all the same.
    async fn resize(&mut self, place: WorkerPlace) {
        self.place = place;
        let WorkerPlace { generation, rank, workers } = place;
        let line = format!("RESIZED {generation} {rank} {workers}\n");
        let Some(input) = &mut self.input else { return };
        // A line is written at once or not at all: it is shorter than what a pipe takes so.
        if !matches!(tokio::time::timeout(TELL, input.write_all(line.as_bytes())).await, Ok(Ok(()))) {
            self.input = None;
        }
    }

    /// Asks it to end, once. It is killed after its notice.
    fn stop(&mut self, notice: Duration) {
        if self.kill_at.is_none() {
            self.signal(Signal::TERM);
            self.kill_at = Some(Instant::now() + notice);
        }
    }
}

/// What the runner says of its worker.
#[derive(Clone)]
struct State(Arc<Mutex<WorkerState>>);

impl State {
    fn set(&self, state: WorkerState) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    fn get(&self) -> WorkerState {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Run {
    fn report(&self, runner: u64, state: WorkerState) -> RunnerReport {
        let Workers(least, most) = self.workers;
        RunnerReport { runner, job: self.job.clone(), workers: (least, most), state }
    }

    pub(super) async fn run(self, socket: Option<PathBuf>) -> Result<String, Failure> {
        let runner = RandomState::new().hash_one(std::process::id());
        self.report(runner, WorkerState::None).check().map_err(|error| Failure::Usage(error.to_string()))?;
        let bid = self.terms.bid(self.bid)?;
        let client = attached(socket.clone())?;
        let known = client.runner().and_then(|runner| bid.map_or(Ok(()), |_| runner.check_bids()));
        known.map_err(|error| Failure::Refused(error.to_string()))?;
        drop(client);
        let Some(socket) = socket else { return Ok(String::new()) };
        let (state, (orders, ordered)) = (State(Arc::new(Mutex::new(WorkerState::None))), mpsc::channel(1));
        let ask = {
            let (socket, state) = (socket.clone(), state.clone());
            let report = self.report(runner, WorkerState::None);
            let elastic = self.elastic;
            move || ask(&socket, (&report, elastic, bid), &state, &orders)
        };
        let thread = std::thread::Builder::new().name("orders".to_owned()).spawn(ask);
        thread.map_err(|error| Failure::Refused(error.to_string()))?;
        self.execute(&socket, runner, &state, ordered).await
    }

    /// Carries orders out until the job is over, the time is, or a signal asks this process to end.
    async fn execute(
        &self,
        socket: &Path,
        runner: u64,
        state: &State,
        mut orders: mpsc::Receiver<Ordered>,
    ) -> Result<String, Failure> {
        let handler = |kind| signal(kind).map_err(|error| Failure::Refused(error.to_string()));
        let mut signals = [
            handler(SignalKind::interrupt())?,
            handler(SignalKind::terminate())?,
            handler(SignalKind::hangup())?,
        ];
        let until = self.until.map(|until| Instant::now() + until.remaining(SystemTime::now()));
        let (mut worker, mut notice, mut last_error): (Option<Worker>, Duration, String) =
            (None, NOTICE, String::new());
        let mut over = false;
        let mut ending: Option<Result<String, Failure>> = None;
        loop {
            if worker.is_none()
                && let Some(outcome) = ending.take()
            {
                if !over {
                    self.leave(socket, runner, state);
                }
                return outcome;
            }
            let kill_at = worker.as_ref().and_then(|worker| worker.kill_at);
            let [interrupt, terminate, hangup] = &mut signals;
            let mut ends = None;
            tokio::select! {
                _ = interrupt.recv() => ends = Some(stopped()),
                _ = terminate.recv() => ends = Some(stopped()),
                _ = hangup.recv() => ends = Some(stopped()),
                () = at(until), if ending.is_none() => ends = Some(Ok("the runner's time is over\n".to_owned())),
                () = at(kill_at), if kill_at.is_some() => {
                    if let Some(worker) = &mut worker {
                        worker.signal(Signal::KILL);
                        (worker.killed, worker.kill_at) = (true, Some(Instant::now() + NOTICE));
                    }
                }
                status = ended(&mut worker) => {
                    if let Some(gone) = worker.take() {
                        // What it left behind in its group goes, too.
                        gone.signal(Signal::KILL);
                        let WorkerPlace { generation, rank, .. } = gone.place;
                        eprintln!("{}: rank {rank} of generation {generation} ended: {status}", self.job);
                        if ending.is_none() {
                            state.set(outcome(gone.place, gone.kill_at.is_some(), status));
                        }
                    }
                }
                Some((order, done)) = orders.recv() => {
                    match order {
                        // This process has no worker to start any more.
                        _ if ending.is_some() => {}
                        Err(why) if why == last_error => {}
                        Err(why) => {
                            eprintln!("{}: {}", self.job, why.chars().map(visible).collect::<String>());
                            last_error = why;
                        }
                        Ok(ElasticOrder::Resize { place }) => {
                            if let Some(worker) = worker.as_mut().filter(|worker| worker.kill_at.is_none()) {
                                let WorkerPlace { generation, rank, workers } = place;
                                eprintln!("{}: rank {rank} of {workers}, generation {generation}, runs on", self.job);
                                worker.resize(place).await;
                                state.set(WorkerState::Running { place, stopping: false });
                            }
                        }
                        Ok(ElasticOrder::Enter { place, notice_ns }) => {
                            notice = Duration::from_nanos(notice_ns);
                            if worker.is_none() {
                                worker = self.start(socket, state, place, true);
                            }
                        }
                        Ok(ElasticOrder::Order(RunnerOrder::Wait)) => last_error.clear(),
                        Ok(ElasticOrder::Order(RunnerOrder::Offer { place, notice_ns })) => {
                            notice = Duration::from_nanos(notice_ns);
                            if worker.is_none() {
                                worker = self.start(socket, state, place, false);
                            }
                        }
                        Ok(ElasticOrder::Order(RunnerOrder::Recall { generation, reason, notice_ns })) => {
                            notice = Duration::from_nanos(notice_ns);
                            if let Some(worker) = worker.as_mut().filter(|it| it.place.generation == generation) {
                                eprintln!("{}: generation {generation} ends, for {}", self.job, text(reason));
                                worker.stop(notice);
                                state.set(WorkerState::Running { place: worker.place, stopping: true });
                            }
                        }
                        Ok(ElasticOrder::Order(RunnerOrder::Over { succeeded: true })) => {
                            over = true;
                            ends = Some(Ok(format!("{}: over\n", self.job)));
                        }
                        Ok(ElasticOrder::Order(RunnerOrder::Over { succeeded: false })) => {
                            over = true;
                            ends = Some(Err(Failure::Refused(format!("{}: its workers failed", self.job))));
                        }
                        Ok(ElasticOrder::Order(RunnerOrder::Infeasible { text, .. })) => {
                            over = true;
                            ends = Some(Err(Failure::Refused(text)));
                        }
                    }
                    // The thread that asks has ended with its last one.
                    let _ = done.send(());
                }
            }
            if let Some(outcome) = ends {
                if let Some(worker) = &mut worker {
                    // Asked twice it is killed at once.
                    worker.stop(notice);
                    worker.kill_at = worker.kill_at.filter(|_| ending.is_none()).or(Some(Instant::now()));
                    state.set(WorkerState::Running { place: worker.place, stopping: true });
                }
                ending.get_or_insert(outcome);
            }
        }
    }

    /// Has the provider know that this process ends. Where runners of a job end together, an order crosses the news of the end, and
    /// control would count the host as taken until it misses the runner. It does so, too, where the agent cannot be reached now.
    fn leave(&self, socket: &Path, runner: u64, state: &State) {
        let report = self.report(runner, state.get());
        if let Ok(client) = attached(Some(socket.to_owned()))
            && let Ok(known) = client.runner()
        {
            let _ = known.leave(&report, self.elastic);
        }
    }

    /// Starts a worker. One that cannot be started has failed.
    fn start(&self, socket: &Path, state: &State, place: WorkerPlace, enters: bool) -> Option<Worker> {
        let WorkerPlace { generation, rank, workers } = place;
        match Worker::start(self, socket, place, enters) {
            Ok(worker) => {
                eprintln!("{}: rank {rank} of {workers}, generation {generation}, starts", self.job);
                state.set(WorkerState::Running { place, stopping: false });
                Some(worker)
            }
            Err(error) => {
                eprintln!("{}: rank {rank} of generation {generation} cannot start: {error}", self.job);
                state.set(WorkerState::Ended { place, succeeded: false });
                None
            }
        }
    }
}

fn stopped() -> Result<String, Failure> {
    Err(Failure::Refused("stopped; its worker is gone".to_owned()))
}

/// Completes at a time; never without one.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// How the worker ended; never without one. May be dropped and called again.
async fn ended(worker: &mut Option<Worker>) -> ExitStatus {
    let Some(worker) = worker else { return std::future::pending().await };
    // Nobody else waits for it, so an error is a kernel's or a bug: it counts as failed.
    let status = worker.child.wait().await.unwrap_or_else(|_| ExitStatusExt::from_raw(1 << 8));
    // Of a worker that was asked to end, all processes have its notice: a shell ends before what it started.
    while worker.kill_at.is_some() && !worker.killed && worker.has_processes() {
        tokio::time::sleep(ORPHAN_POLL).await;
    }
    status
}

/// What a worker has come to. One that was asked to end has not done its work, whatever its status.
fn outcome(place: WorkerPlace, stopping: bool, status: ExitStatus) -> WorkerState {
    WorkerState::Ended { place, succeeded: status.success() && !stopping }
}

fn text(reason: RecallReason) -> &'static str {
    match reason {
        RecallReason::Resized => "the job goes on with more workers, or fewer",
        RecallReason::Suspended => "other jobs have its hosts",
        RecallReason::WorkerLost => "a worker's runner is gone",
        RecallReason::WorkerFailed => "a worker failed",
        RecallReason::Outdated => "a later one has its place",
        RecallReason::Unknown => "the provider wants it so",
    }
}

/// Asks the provider again and again, and hands its orders on. Attaches again where the agent went away.
fn ask(
    socket: &Path,
    (report, elastic, bid): (&RunnerReport, bool, Option<JobBid>),
    state: &State,
    orders: &mpsc::Sender<Ordered>,
) {
    let mut shown = None;
    let hand = |order| {
        let (done, carried_out) = oneshot::channel();
        orders.blocking_send((order, done)).is_ok() && carried_out.blocking_recv().is_ok()
    };
    loop {
        let runner = attached(Some(socket.to_owned())).and_then(|client| {
            let runner = client.runner().map_err(|error| Failure::Refused(error.to_string()))?;
            Ok((client, runner))
        });
        let why = match &runner {
            Ok((_client, runner)) => loop {
                let report = RunnerReport { state: state.get(), ..report.clone() };
                match order(runner, (&report, elastic, bid), &mut shown) {
                    Ok(order) => {
                        if !hand(Ok(order)) {
                            return;
                        }
                    }
                    Err(Error::TooOften { retry_after }) => std::thread::sleep(retry_after),
                    Err(error @ Error::Runner(_)) => {
                        if !hand(Err(error.to_string())) {
                            return;
                        }
                        std::thread::sleep(AGAIN);
                    }
                    Err(error) => break error.to_string(),
                }
            },
            Err(failure) => failure.to_string(),
        };
        drop(runner);
        if !hand(Err(why)) {
            return;
        }
        std::thread::sleep(AGAIN);
    }
}

/// Asks once; of a job that bids with the price, which is shown where it is another than was `shown`.
fn order(
    runner: &Runner,
    (report, elastic, bid): (&RunnerReport, bool, Option<JobBid>),
    shown: &mut Option<HostPrice>,
) -> Result<ElasticOrder, Error> {
    let Some(bid) = bid else {
        return match elastic {
            true => runner.elastic_order(report, POLL),
            false => runner.order(report, POLL).map(ElasticOrder::from),
        };
    };
    let PricedOrder { order, price } = runner.priced_order((report, elastic), Some(bid), POLL)?;
    if price.is_some() && *shown != price {
        if let Some(HostPrice { kind, price }) = &price {
            let kind: String = kind.chars().map(visible).collect();
            let of = if kind.is_empty() { kind } else { format!(" of kind {kind}") };
            eprintln!("{}: the price{of} is {price} an hour of a worker, or a little less", report.job);
        }
        *shown = price;
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_worker_has_not_succeeded() {
        let place = WorkerPlace { generation: 1, rank: harmonaize_client::Rank(0), workers: 1 };
        let succeeded = |stopping, code: i32| {
            let state = outcome(place, stopping, ExitStatus::from_raw(code << 8));
            matches!(state, WorkerState::Ended { succeeded: true, .. })
        };
        assert_eq!([succeeded(false, 0), succeeded(false, 1), succeeded(true, 0)], [true, false, false]);
    }

    #[tokio::test]
    async fn a_worker_reads_its_new_place() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "read line; echo $line > told"]).current_dir(folder.path());
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        let (input, rank) = (child.stdin.take(), harmonaize_client::Rank);
        let place = WorkerPlace { generation: 1, rank: rank(0), workers: 2 };
        let mut worker = Worker { child, group: None, input, place, kill_at: None, killed: false };
        let next = WorkerPlace { generation: 3, rank: rank(1), workers: 4 };
        worker.resize(next).await;
        assert_eq!(worker.place, next);
        assert!(worker.child.wait().await.unwrap().success());
        assert_eq!(std::fs::read_to_string(folder.path().join("told")).unwrap(), "RESIZED 3 1 4\n");
        // One that reads nothing any more is no error.
        worker.resize(place).await;
        assert_eq!((worker.place, worker.input.is_none()), (place, true));
    }

    /// A group whose first process ends at once on SIGTERM, and another only once a file is there.
    #[tokio::test]
    async fn what_a_shell_started_has_its_notice_too() {
        let folder = tempfile::tempdir().unwrap();
        let script = "(trap '' TERM; echo > up; until [ -e go ]; do sleep 0.01; done; echo > saved) & wait";
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(folder.path()).process_group(0);
        let child = command.spawn().unwrap();
        let group = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        let place = WorkerPlace { generation: 1, rank: harmonaize_client::Rank(0), workers: 1 };
        let mut worker = Some(Worker { child, group, input: None, place, kill_at: None, killed: false });
        let file = |name: &str| folder.path().join(name);
        while !file("up").exists() {
            tokio::time::sleep(ORPHAN_POLL).await;
        }
        worker.as_mut().unwrap().stop(Duration::from_secs(60));
        assert!(!worker.as_mut().unwrap().child.wait().await.unwrap().success(), "SIGTERM ends the shell");
        let over =
            tokio::select! { biased; _ = ended(&mut worker) => true, () = std::future::ready(()) => false };
        assert!(!over, "another process runs still");
        std::fs::write(file("go"), "").unwrap();
        let saved = async {
            while !file("saved").exists() {
                tokio::time::sleep(ORPHAN_POLL).await;
            }
        };
        tokio::select! { _ = ended(&mut worker) => {} () = saved => {} }
        assert!(file("saved").exists());
    }
}
