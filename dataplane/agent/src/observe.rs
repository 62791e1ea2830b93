//! `harmonaize-agent observe`: telemetry alone, on any host, for any library, without control and configuration.

mod lines;
mod text;

use crate::config::check_name;
use crate::telemetry::{
    Finding, Handle, Names, Reading, Setup, late_rtt_limit, own_endpoints, replay, replay_merged, start,
};
use anyhow::{Context, bail};
use clap::Args;
use harmonaize_analysis::trace::{self, Replayed, merge};
use harmonaize_loader::{Collector, Options, Programs, interfaces_up};
use harmonaize_units::Nanos;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;

/// What is observed, and how it is shown.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  harmonaize-agent observe                          what crosses every interface that is up, until Ctrl-C
  harmonaize-agent observe --interface eth0 --json  a line of JSON for each finding, and one each interval
  harmonaize-agent observe --record run.trace --duration 60s
  harmonaize-agent observe --replay run.trace --json | jq 'select(.kind == \"phase\")'
  harmonaize-agent observe --replay h0.trace --replay h1.trace --replay h2.trace

Needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON, or root; a replay needs nothing. Nothing stays attached when it ends.
Times in JSON are CLOCK_REALTIME in nanoseconds, sizes bytes, rates bits in a second. Findings have the fields that
`harmonaize phases --help` explains.")]
pub struct Observe {
    /// An interface to observe; may be given several times. Without it: all that are up but loopback.
    #[arg(long, value_name = "NAME")]
    pub interface: Vec<String>,
    /// Writes all that is measured to a file, for --replay.
    #[arg(long, value_name = "FILE", conflicts_with = "replay")]
    pub record: Option<PathBuf>,
    /// Analyses a recorded file instead of this host's traffic; given several times, what the hosts of all the files together
    /// show (the job's phases and its late host), and the congestion of the first that speaks.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["interface", "duration"])]
    pub replay: Vec<PathBuf>,
    /// Prints JSON, an object a line.
    #[arg(long)]
    pub json: bool,
    /// Time between two lines on how things stand.
    #[arg(long, value_name = "DURATION", default_value = "1s")]
    pub interval: Nanos,
    /// Ends by itself after so long.
    #[arg(long, value_name = "DURATION")]
    pub duration: Option<Nanos>,
    /// A gap of this length between two packets of a flow ends a burst.
    #[arg(long, value_name = "DURATION", default_value = "500us")]
    pub idle_gap: Nanos,
    /// Connections that are kept; the least recently used are forgotten beyond.
    #[arg(long, value_name = "NUMBER", default_value_t = 32768)]
    pub flows: u32,
    /// Has the kernel take the time of every run of its BPF programs, which costs each some 30 ns more.
    #[arg(long)]
    pub run_time: bool,
    /// Logs why packets are of no flow, or found no place; needs Linux 5.19
    #[arg(long)]
    pub diagnosis: bool,
    /// Counts what comes in on XDP, before the stack: also what that drops, and single packets before they are merged. Where
    /// another program has that place, the interface is not measured; needs Linux 5.9
    #[arg(long)]
    pub xdp: bool,
}

/// Prints what was found and how things stand.
trait Printer {
    fn finding(&mut self, finding: &Finding, names: &Names) -> String;
    fn status(&mut self, before: &Reading, now: &Reading) -> String;
    fn missed(&mut self, count: u64) -> String;
}

impl Observe {
    fn printer(&self) -> Box<dyn Printer> {
        if self.json { Box::new(lines::Lines) } else { Box::new(text::Text) }
    }

    /// Observes until `stop` completes or the duration is over, and prints to `out`.
    ///
    /// # Errors
    /// What cannot be had, or written.
    pub async fn run(&self, out: &mut dyn Write, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
        if !self.replay.is_empty() {
            return self.replay(out);
        }
        let interfaces = match self.interface.as_slice() {
            [] => interfaces_up().context("cannot list the interfaces")?,
            names => names.to_vec(),
        };
        if interfaces.is_empty() {
            bail!("no interface is up but loopback; name one with --interface");
        }
        interfaces.iter().try_for_each(|name| check_name(name))?;
        let late_rtt = late_rtt_limit(&interfaces, &BTreeMap::new());
        let setup = Setup {
            host: hostname(),
            interfaces,
            rates: BTreeMap::new(),
            interval: Duration::from_millis(5),
            record: self.record.clone().map(|path| (path, u64::MAX)),
            marks: Vec::new(),
            decide: Box::new(|_| {}),
        };
        let options = Options {
            idle_gap: self.idle_gap.into(),
            late_rtt,
            flows: self.flows,
            run_time: self.run_time,
            diagnosis: self.diagnosis,
            xdp: self.xdp,
            endpoints: Some(own_endpoints()),
            ..Options::default()
        };
        let open = move || Ok(Box::new(Programs::open(&options)?) as Box<dyn Collector>);
        let (handle, thread) = start(setup, open)?;
        let done = self.print(&handle, out, stop).await;
        handle.stop();
        thread.join().map_err(|_| anyhow::anyhow!("the telemetry thread has panicked"))?;
        done
    }

    async fn print(
        &self,
        handle: &Handle,
        out: &mut dyn Write,
        stop: impl Future<Output = ()>,
    ) -> anyhow::Result<()> {
        let mut printer = self.printer();
        let (_, mut findings) = handle.findings().listen();
        let ended = || anyhow::anyhow!("the telemetry thread has ended");
        let mut before = handle.read(false).await.ok_or_else(ended)?;
        let mut names = Names::default();
        if before.links.is_empty() {
            bail!("nothing can be observed: {}", before.missing.join("; "));
        }
        let length = Duration::from(self.interval).max(Duration::from_millis(10));
        let mut tick = tokio::time::interval(length);
        tick.tick().await;
        let over = async {
            match self.duration {
                Some(duration) => tokio::time::sleep(duration.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(stop, over);
        loop {
            let mut last = false;
            let line = tokio::select! {
                biased;
                finding = findings.recv() => match finding {
                    Ok(finding) => Some(printer.finding(&finding, &names)),
                    Err(RecvError::Lagged(count)) => Some(printer.missed(count)),
                    Err(RecvError::Closed) => return Err(ended()),
                },
                _ = tick.tick() => None,
                () = &mut over => { last = true; None }
                () = &mut stop => { last = true; None }
            };
            let line = match line {
                Some(line) => line,
                None => {
                    let now: Arc<Reading> = handle.read(true).await.ok_or_else(ended)?;
                    now.links.iter().for_each(|one| names.insert(one.measured.index, &one.measured.name));
                    let line = printer.status(&before, &now);
                    before = now;
                    line
                }
            };
            out.write_all(line.as_bytes())?;
            out.flush()?;
            if last {
                return Ok(());
            }
        }
    }

    fn replay(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        let mut printer = self.printer();
        let mut written = Ok(());
        let print = |finding: &Finding, names: &Names| {
            if written.is_ok() {
                written = out.write_all(printer.finding(finding, names).as_bytes());
            }
        };
        match self.replay.as_slice() {
            [file] => {
                read(file, |bytes| replay(bytes, print))?;
            }
            several => {
                let mut traces = Vec::new();
                for file in several {
                    let mut records = Vec::new();
                    read(file, |bytes| trace::replay(bytes, |record| records.push(*record)))?;
                    traces.push(records);
                }
                let merged = merge(&traces.iter().map(Vec::as_slice).collect::<Vec<_>>());
                drop(traces);
                replay_merged(&merged, print);
            }
        }
        written?;
        Ok(out.flush()?)
    }
}

/// Reads a file by `with`, and says what there was.
fn read(file: &Path, with: impl FnOnce(&[u8]) -> Result<Replayed, trace::Error>) -> anyhow::Result<()> {
    let shown = file.display();
    let bytes = std::fs::read(file).with_context(|| format!("cannot read {shown}"))?;
    let replayed = with(&bytes).with_context(|| shown.to_string())?;
    if let Some(at) = replayed.torn {
        tracing::warn!("{shown} ends within a record, at byte {at}; what was before it is shown");
    }
    tracing::info!(records = replayed.records, unknown = replayed.skipped, "replayed {shown}");
    Ok(())
}

/// This host's name; empty where it has none.
pub(crate) fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}
