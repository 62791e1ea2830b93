//! A job of AllReduces that runs while something is done to the fabric.

use super::RATE;
use crate::lab::Lab;
use crate::row::median;
use anyhow::{Context, Result, bail};
use harmonaize_testkit::job::Job;
use harmonaize_testkit::truth::{Iteration, whole_log_of};
use std::time::{Duration, Instant};

/// How long ranks may take to begin, and to end.
const LIMIT: Duration = Duration::from_secs(60);

/// The job, until it is ended or dropped.
#[derive(Debug)]
pub(super) struct Running {
    job: Job,
    ranks: usize,
    bytes: u64,
}

impl Running {
    /// Starts a rank per entry of `hosts`, and waits until one iteration is done. Each rank reduces `bytes` bytes after
    /// every `compute`. Every result is checked by the ranks themselves.
    pub(super) fn start(lab: &mut Lab, hosts: &[usize], bytes: u64, compute: Duration) -> Result<Self> {
        let mut running = Self::launch(lab, hosts, bytes, compute, 0)?;
        running.begun(lab)?;
        Ok(running)
    }

    /// The same without waiting. Iterations begin at that time by CLOCK_MONOTONIC, or once all ranks are there if that is later.
    pub(super) fn launch(
        lab: &mut Lab,
        hosts: &[usize],
        bytes: u64,
        compute: Duration,
        begins_ns: u64,
    ) -> Result<Self> {
        let compute_ms = (compute.as_secs_f64() * 1e3).to_string();
        let arguments = [
            ["--iterations", &u64::MAX.to_string()],
            ["--buckets", "1"],
            ["--bytes", &bytes.to_string()],
            ["--forward-ms", &compute_ms],
            ["--backward-ms", "0"],
            ["--begins-ns", &begins_ns.to_string()],
        ];
        let job = lab.start("periodic", hosts, arguments.as_flattened())?;
        Ok(Self { job, ranks: hosts.len(), bytes })
    }

    /// Waits until one iteration is done.
    pub(super) fn begun(&mut self, lab: &mut Lab) -> Result<()> {
        let job = &mut self.job;
        let deadline = Instant::now() + LIMIT;
        while job.logs().first().is_none_or(|log| whole_log_of(log).is_ok_and(|log| log.is_empty())) {
            lab.check()?;
            if job.ended()? || Instant::now() > deadline {
                bail!("{} has not begun within {LIMIT:?}", job.name());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// The name under which control knows it.
    pub(super) fn name(&self) -> &str {
        self.job.name()
    }

    /// Its first rank's iterations so far; an error where a rank has failed.
    pub(super) fn log(&mut self) -> Result<Vec<Iteration>> {
        self.job.ended()?;
        whole_log_of(self.job.logs().first().context("no rank")?)
    }

    /// Runs the job for so long, and measures its bus bandwidth in bytes a second. Only operations that were whole
    /// within the time count.
    pub(super) fn busbw(&mut self, lab: &mut Lab, span: Duration) -> Result<f64> {
        let times = self.taken(lab, span, |one| one.done_ns.saturating_sub(one.called_ns))?;
        Ok(self.bus_bytes() / (times / 1e9))
    }

    /// What an operation must put on each link at least, in bytes.
    pub(super) fn bus_bytes(&self) -> f64 {
        2.0 * (self.ranks as f64 - 1.0) / self.ranks as f64 * self.bytes as f64
    }

    /// The same for the time of an iteration, in milliseconds.
    pub(super) fn period_ms(&mut self, lab: &mut Lab, span: Duration) -> Result<f64> {
        Ok(self.taken(lab, span, |one| one.done_ns.saturating_sub(one.began_ns))? / 1e6)
    }

    fn taken(&mut self, lab: &mut Lab, span: Duration, time: impl Fn(&Iteration) -> u64) -> Result<f64> {
        let from_ns = harmonaize_testkit::clock::monotonic_ns()?;
        let until = Instant::now() + span;
        let deadline = until + LIMIT;
        loop {
            lab.check()?;
            let log = self.log()?;
            let within = log.iter().filter(|one| one.began_ns >= from_ns);
            let times: Vec<f64> = within.map(|one| time(one) as f64).collect();
            // Slow operations get the time that three of them need.
            if Instant::now() >= until && times.len() >= 3 {
                return median(&times).context("no operation");
            }
            if Instant::now() > deadline {
                bail!("{} stands still", self.name());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends it; all its iterations. An error where a rank found a wrong result.
    pub(super) fn end(mut self, lab: &mut Lab) -> Result<Vec<Iteration>> {
        self.job.stop()?;
        self.job.wait(LIMIT, || lab.check())?;
        self.log()
    }
}

/// Bytes of a tensor whose AllReduce over `ranks` takes so long, where the links are its own.
pub(super) fn bytes_for(ranks: usize, time: Duration) -> u64 {
    let bus = 2.0 * (ranks as f64 - 1.0) / ranks as f64;
    let bytes = RATE as f64 / 8.0 * time.as_secs_f64() / bus;
    (bytes as u64).next_multiple_of(4 * ranks as u64)
}
