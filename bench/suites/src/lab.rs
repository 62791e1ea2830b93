//! Where the suites measure: a star of hosts with agents and one tenant, and the measuring programs.

use anyhow::{Context, Result, bail, ensure};
use harmonaize_testkit::deployment::{Deployment, Setup, Tenant};
use harmonaize_testkit::elastic::Stage;
use harmonaize_testkit::fabric::{Fabric, Host};
use harmonaize_testkit::job::{self, Job, Programs, Spaces};
use harmonaize_testkit::process::Process;
use harmonaize_testkit::topology::{self, Topology};
use harmonaize_testkit::workspace::{self, Binaries};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long one run may take.
const LIMIT: Duration = Duration::from_secs(300);

/// What a measuring program prints for a size.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Measured {
    /// Bytes of a rank's tensor.
    pub bytes: u64,
    /// Each timed operation, in microseconds.
    pub times_us: Vec<f64>,
    /// Bytes that the first rank's host sent for an operation; 0 where nobody told.
    #[serde(default)]
    pub wire_bytes: u64,
    /// What of all processors' time was spent meanwhile; 0 where nobody looked.
    #[serde(default)]
    pub busy: f64,
}

/// The fabric with its programs.
#[derive(Debug)]
pub struct Lab {
    // In this order they end.
    /// A tenant each; the first is the lab's own.
    spaces: Vec<Spaces>,
    programs: Programs,
    deployment: Deployment,
    logs: PathBuf,
    stop: Arc<AtomicBool>,
    jobs: usize,
}

/// What a measuring program prints: a line of JSON for each figure.
pub(crate) fn measured<T: DeserializeOwned>(printed: &str) -> Result<Vec<T>> {
    let lines = printed.lines().filter(|line| line.starts_with('{'));
    let measured: Vec<T> = lines.map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(!measured.is_empty(), "no figures in: {printed}");
    Ok(measured)
}

/// Arguments of a program: names with numbers.
pub fn options(pairs: &[(&str, u64)]) -> Vec<String> {
    pairs.iter().flat_map(|(name, value)| [(*name).to_owned(), value.to_string()]).collect()
}

impl Lab {
    /// Builds a star of `hosts` with links of `rate`, starts control and agents.
    pub fn build(hosts: usize, rate: &str, binaries: Binaries, stop: Arc<AtomicBool>) -> Result<Self> {
        Self::build_with(hosts, rate, binaries, stop, |setup| setup)
    }

    /// The same; `settings` may change how control and agents are set up.
    pub fn build_with(
        hosts: usize,
        rate: &str,
        binaries: Binaries,
        stop: Arc<AtomicBool>,
        settings: impl FnOnce(Setup) -> Setup,
    ) -> Result<Self> {
        Self::on(Topology::parse(&topology::star(hosts, rate))?, binaries, stop, settings)
    }

    /// On the fabric of a topology.
    pub fn on(
        topology: Topology,
        binaries: Binaries,
        stop: Arc<AtomicBool>,
        settings: impl FnOnce(Setup) -> Setup,
    ) -> Result<Self> {
        let logs = workspace::target().join("bench-logs");
        std::fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
        let folder = binaries.path("collective")?.parent().map(Path::to_path_buf).unwrap_or_default();
        let programs = Programs::publish(
            &folder,
            &[
                "alltoall",
                "calls",
                "coded",
                "collective",
                "direct",
                "elastic",
                "flows",
                "harmonaize-perf",
                "inference",
                "periodic",
                "relay",
                "ring",
                "steady",
                "stream",
                "train",
            ],
        )?;
        let tenant = Tenant { name: "a".to_owned(), user: 3001 };
        let fabric = Fabric::build(&topology)?;
        let setup = settings(Setup::new(binaries, std::slice::from_ref(&tenant)));
        let tenants = setup.tenants.clone();
        let deployment = Deployment::start(fabric, setup)?;
        let spaces = tenants.iter().map(|tenant| Spaces::make(&deployment, tenant)).collect::<Result<_>>()?;
        Ok(Self { spaces, programs, deployment, logs, stop, jobs: 0 })
    }

    /// An error when a signal has asked to stop, or when control or an agent has ended.
    pub fn check(&mut self) -> Result<()> {
        self.go_on()?;
        self.deployment.check()
    }

    /// An error when a signal has asked to stop.
    pub fn go_on(&self) -> Result<()> {
        ensure!(!self.stop.load(Ordering::Relaxed), "interrupted");
        Ok(())
    }

    /// Ends control and agents; the fabric with the hosts' folders stays until it is dropped.
    pub fn end(self) -> Result<Fabric> {
        let Self { spaces, deployment, .. } = self;
        drop(spaces);
        deployment.end()
    }

    /// The fabric with control and agents.
    pub fn deployment(&mut self) -> &mut Deployment {
        &mut self.deployment
    }

    /// The hosts that have agents.
    pub fn deployment_hosts(&self) -> &[Host] {
        self.deployment.hosts()
    }

    /// Whether the fabric has an aggregator.
    pub fn has_aggregator(&self) -> bool {
        !self.deployment.fabric().aggregators().is_empty()
    }

    /// The fabric.
    pub fn fabric(&self) -> &Fabric {
        self.deployment.fabric()
    }

    /// The folder for what programs print.
    pub fn logs(&self) -> &Path {
        &self.logs
    }

    /// The path of one of the measuring programs.
    pub fn program(&self, name: &str) -> PathBuf {
        self.programs.path(name)
    }

    /// Starts a measuring program as the tenant's job, a rank per entry of `hosts`.
    pub fn start(&mut self, program: &str, hosts: &[usize], arguments: &[impl AsRef<str>]) -> Result<Job> {
        self.start_of(0, program, hosts, arguments)
    }

    /// Where an elastic training runs, by a program of that name.
    pub fn stage(&mut self, program: &str) -> Result<Stage<'_>> {
        let spaces = self.spaces.first().context("no tenant")?;
        let program = self.programs.path(program);
        Ok(Stage { deployment: &mut self.deployment, spaces, program, logs: &self.logs })
    }

    /// The same as the job of a tenant, counted from 0 (the lab's own).
    pub fn start_of(
        &mut self,
        tenant: usize,
        program: &str,
        hosts: &[usize],
        arguments: &[impl AsRef<str>],
    ) -> Result<Job> {
        self.jobs += 1;
        let arguments: Vec<String> = arguments.iter().map(|word| word.as_ref().to_owned()).collect();
        let name = format!("job{}", self.jobs);
        let spaces = self.spaces.get(tenant).context("no such tenant")?;
        spaces.start(&name, hosts, &self.programs.path(program), &arguments, &self.logs)
    }

    /// From now on processes of a tenant, counted from 0, run only where nobody else's would.
    pub(crate) fn yield_processors(&mut self, tenant: usize) -> Result<()> {
        self.spaces.get_mut(tenant).context("no such tenant")?.yield_processors();
        Ok(())
    }

    /// Starts processes of a tenant, counted from 0, on one host: a label and arguments each.
    pub(crate) fn processes_of(
        &self,
        tenant: usize,
        host: usize,
        name: &str,
        program: &Path,
        each: &[(String, Vec<String>)],
    ) -> Result<Vec<Process>> {
        let spaces = self.spaces.get(tenant).context("no such tenant")?;
        let start = |(label, arguments): &(String, Vec<String>)| {
            spaces.start_one(name, label, host, program, arguments, &self.logs)
        };
        each.iter().map(start).collect()
    }

    /// Runs our collectives, a rank per entry of `hosts`, and returns what rank 0 measured.
    pub fn ours(&mut self, hosts: &[usize], arguments: &[&str]) -> Result<Vec<Measured>> {
        self.ours_of(0, hosts, arguments)
    }

    /// The same as the job of a tenant, counted from 0 (the lab's own).
    pub fn ours_of(&mut self, tenant: usize, hosts: &[usize], arguments: &[&str]) -> Result<Vec<Measured>> {
        let job = self.start_of(tenant, "collective", hosts, &[arguments, &["--json"]].concat())?;
        self.finish(job, LIMIT)
    }

    /// Runs `harmonaize-perf`, a rank per entry of `hosts`, and returns what it tells as JSON.
    pub fn perf(
        &mut self,
        hosts: &[usize],
        arguments: &[String],
        limit: Duration,
    ) -> Result<serde_json::Value> {
        self.jobs += 1;
        let (name, program) = (format!("perf{}", self.jobs), self.programs.path("harmonaize-perf"));
        let spaces = self.spaces.first().context("no tenant")?;
        let mut ranks = Vec::new();
        for (rank, host) in hosts.iter().enumerate() {
            let log = self.logs.join(format!("{name}-{rank}.log"));
            let title = format!("rank {rank} of harmonaize-perf");
            ranks.push(spaces.start_command(&title, *host, &program, &log, |command, socket| {
                command.args(arguments).args(["--json", "-", "--name", &name, "--agent"]).arg(socket);
                command.env("HARMONAIZE_RANK", rank.to_string());
                command.env("HARMONAIZE_RANKS", hosts.len().to_string());
            })?);
        }
        job::wait(&mut ranks, limit, || self.check())?;
        let first = ranks.first().context("no rank")?;
        let told = measured(&std::fs::read_to_string(first.log())?)?;
        for rank in &ranks {
            std::fs::remove_file(rank.log())?;
        }
        told.into_iter().next().context("nothing was told")
    }

    /// Runs a measuring program, a rank per entry of `hosts`, for at most `limit`; what rank 0 measured.
    pub fn figures<T: DeserializeOwned>(
        &mut self,
        program: &str,
        hosts: &[usize],
        arguments: &[impl AsRef<str>],
        limit: Duration,
    ) -> Result<Vec<T>> {
        let job = self.start(program, hosts, arguments)?;
        self.finish(job, limit)
    }

    /// Waits for a job; what its rank 0 measured.
    pub fn finish<T: DeserializeOwned>(&mut self, mut job: Job, limit: Duration) -> Result<Vec<T>> {
        job.wait(limit, || self.check())?;
        Self::figures_of(&job)
    }

    /// The same of a job during which a program of the fabric is ended.
    pub fn finish_without_check<T: DeserializeOwned>(&self, mut job: Job, limit: Duration) -> Result<Vec<T>> {
        job.wait(limit, || self.go_on())?;
        Self::figures_of(&job)
    }

    /// What rank 0 of a job that is over has measured.
    fn figures_of<T: DeserializeOwned>(job: &Job) -> Result<Vec<T>> {
        let log = job.logs().first().cloned().context("no rank")?;
        let figures = measured(&std::fs::read_to_string(&log)?)?;
        for log in job.logs() {
            std::fs::remove_file(log)?;
        }
        Ok(figures)
    }

    /// Runs the plan alone in one process.
    pub fn direct(&mut self, arguments: &[&str]) -> Result<Vec<Measured>> {
        self.check()?;
        let mut command = Command::new(self.programs.path("direct"));
        measured(&job::printed(command.args(arguments).arg("--json"))?)
    }

    /// Bytes a second of one TCP stream from the first host to the second.
    pub fn stream(&mut self, bytes: u64) -> Result<f64> {
        Ok(self.streams(&Streams { bytes, streams: 1, method: "write" })?.bytes_per_second)
    }

    /// TCP streams from the first host to the second, of one thread at either end.
    pub(crate) fn streams(&mut self, what: &Streams) -> Result<Streamed> {
        self.check()?;
        let hosts = self.deployment.fabric().hosts();
        let (Some(from), Some(to)) = (hosts.first(), hosts.get(1)) else { bail!("a stream needs two hosts") };
        let address = to.addresses.first().context("a host without address")?;
        let program = self.programs.path("stream");
        let streams = what.streams.to_string();
        let mut receive = Command::new(&program);
        receive.arg("receive").arg(format!("{address}:0")).args(["--streams", &streams]);
        let log = self.logs.join("stream-receive.log");
        let mut receiver = Process::start("the stream's receiver", &mut receive, &to.namespace, &log)?;
        let deadline = Instant::now() + LIMIT;
        let listens = receiver.line_by(deadline, |_| true)?;
        let mut send = Command::new(&program);
        send.args(["send", &listens, "--bytes", &what.bytes.to_string(), "--streams", &streams]);
        let log = self.logs.join("stream-send.log");
        let mut sender = Process::start(
            "the stream's sender",
            send.args(["--method", what.method]),
            &from.namespace,
            &log,
        )?;
        sender.succeed_by(deadline)?;
        receiver.succeed_by(deadline)?;
        let (received, sent) = (receiver.log_tail(4096), sender.log_tail(4096));
        let [received, sent] = [received, sent].map(|said| measured::<Ended>(&said));
        let last = |ends: Result<Vec<Ended>>| ends?.pop().context("no figures");
        let (received, sent) = (last(received)?, last(sent)?);
        Ok(Streamed {
            bytes_per_second: received.bytes_per_second,
            sender_seconds: sent.processor_seconds,
            receiver_seconds: received.processor_seconds,
        })
    }
}

/// TCP streams to send.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Streams {
    /// Of all streams together.
    pub(crate) bytes: u64,
    pub(crate) streams: usize,
    /// A method of program `stream`.
    pub(crate) method: &'static str,
}

/// What sending took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Streamed {
    /// Of all streams together, after a warm-up.
    pub(crate) bytes_per_second: f64,
    /// Seconds of a processor at either end.
    pub(crate) sender_seconds: f64,
    pub(crate) receiver_seconds: f64,
}

/// What program `stream` prints.
#[derive(Deserialize)]
struct Ended {
    #[serde(default)]
    bytes_per_second: f64,
    processor_seconds: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_figures_are_read() {
        let text = "{\"bytes\":8,\"times_us\":[1.0,2.5],\"wrong\":0,\"wire_bytes\":3}\n";
        assert_eq!(
            measured::<Measured>(text).unwrap(),
            [Measured { bytes: 8, times_us: vec![1.0, 2.5], wire_bytes: 3, busy: 0.0 }]
        );
        assert!(measured::<Measured>("nothing\n").is_err() && measured::<Measured>("{\"bytes\":8}").is_err());
        let ended = measured::<Ended>("10.0.0.1:4\n{\"bytes_per_second\":1.5,\"processor_seconds\":2.0}\n");
        assert_eq!(ended.unwrap().pop().unwrap().bytes_per_second, 1.5);
        assert!(measured::<Ended>("10.0.0.1:4\n").is_err());
    }
}
